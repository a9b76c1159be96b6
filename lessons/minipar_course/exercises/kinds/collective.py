"""A collective that the student writes: which rank sends what to which, with a target for time and for memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minipar.costs.alpha_beta import AlphaBeta
from minipar.errors import Deadlock, MiniparError, PlanError
from minipar.prediction.simulator import simulate
from minipar.program import Op, Program
from minipar.program.collectives.own import Setting, own_program
from minipar.program.verify.verifier import verify
from minipar.trace import Trace
from minipar.wording import several
from minipar_course.exercises.kinds.verdict import Verdict, raised


@dataclass(frozen=True)
class Collective:
    """A generator `answer(setting, rank)` of Send, Reduce and Copy, judged by `verify` and `simulate`.

    settings   for which it must work; the targets are for the first one
    nbytes     of the tensor
    chunks     how many it is cut into; None: what `own_program` chooses
    time       at most so many seconds, on links of alpha, beta and gamma; `far` between nodes (`AlphaBeta`)
    memory     at most so many times the tensor on every rank, while it runs
    """

    collective: str
    settings: tuple[Setting, ...]
    nbytes: int
    time: float | None = None
    memory: float | None = None
    chunks: int | None = None
    alpha: float = 1e-4
    beta: float = 1e-9
    gamma: float = 0.0
    far: tuple[float, float] | None = None

    def judge(self, answer: Any) -> Verdict:
        if not callable(answer) or isinstance(answer, type):
            hint = "def mine(setting, rank): and in it `yield Send(...)`, `yield Reduce(...)`, `yield Copy(...)`"
            return Verdict(False, f"{answer!r} is no function", hint)
        for k, setting in enumerate(self.settings):
            made = self._program(answer, setting)
            if isinstance(made, Verdict):
                return made
            missed = self._above(simulate(made, self._costs(made, setting))) if k == 0 else None
            if missed is not None:
                return missed
        first = self.program(answer)
        trace = simulate(first, self._costs(first, self.settings[0]))
        met = [f"{_milli(trace.time)}" + (f" of at most {_milli(self.time)}" if self.time is not None else "")]
        if self.memory is not None:
            met.append(f"{self._held(trace):.3g} tensors in memory of at most {self.memory:g}")
        sizes = "also with other numbers of ranks" if len(self.settings) > 1 else "checked to the last chunk"
        return Verdict(True, f"every rank ends with what it should, {sizes}; {', '.join(met)}")

    def program(self, answer: Callable[[Setting, int], Any]) -> Program:
        """The answer's program in the first setting."""
        return self._made(answer, self.settings[0])

    def _made(self, answer: Callable[[Setting, int], Any], setting: Setting) -> Program:
        more = {"root": setting.root, "nodes": setting.nodes, "chunks": self.chunks}
        return own_program(self.collective, answer, setting.ranks, self.nbytes, **more)  # type: ignore[arg-type]

    def _costs(self, program: Program, setting: Setting) -> AlphaBeta:
        return AlphaBeta(program, self.alpha, self.beta, self.gamma, nodes=setting.nodes, far=self.far)

    def _program(self, answer: Callable[[Setting, int], Any], setting: Setting) -> Program | Verdict:
        """The program that the answer makes in a setting, verified; or a verdict that says why it is impossible."""
        where = f"with {several(setting.ranks, 'rank')}" + (
            f" on {several(setting.nodes, 'node')}" if setting.nodes > 1 else ""
        )
        where += f", root {setting.root}" if setting.root else ""
        try:
            program = self._made(answer, setting)
        except PlanError as error:
            return Verdict(
                False, f"{where}, {error.reason}", "a move is Send(chunks, to), or Reduce or Copy(chunks, source)"
            )
        except Exception as error:
            return raised(error, f"{where}, your generator")
        if setting.ranks > 1 and not len(program):
            return Verdict(
                False, f"{where}, no rank makes a move", "a generator yields its moves: `yield Send([0], 1)`"
            )
        try:
            verify(program)
        except Deadlock as error:
            hint = "a send never waits; a Reduce does. Which rank could send before it waits?"
            return Verdict(False, f"{where}, {error.reason}", hint, error.details)
        except MiniparError as error:
            return Verdict(False, f"{where}, {error.reason}", _hint(error.reason), error.details)
        return program

    def _held(self, trace: Trace) -> float:
        return max(trace.peak_memory()) / self.nbytes

    def _above(self, trace: Trace) -> Verdict | None:
        """A verdict on a program that misses a target."""
        program = trace.program
        if self.time is not None and trace.time > self.time * (1 + 1e-9):
            sent = trace.bytes_sent()
            rank = max(range(len(sent)), key=sent.__getitem__)
            sends = sum(ins.op is Op.SEND for ins in program.ranks[rank])
            reason = f"every rank ends with what it should, but it takes {_milli(trace.time)}; "
            reason += f"the target is {_milli(self.time)}"
            hint = f"rank {rank} sends most: {sent[rank] / self.nbytes:.3g} tensors in {sends} messages. "
            return Verdict(False, reason, hint + self._advice(trace))
        if self.memory is not None and self._held(trace) > self.memory * (1 + 1e-9):
            peaks = trace.peak_memory()
            rank = max(range(len(peaks)), key=peaks.__getitem__)
            reason = (
                f"every rank ends with what it should, but rank {rank} holds {self._held(trace):.3g} tensors at once; "
            )
            hint = "what comes in waits beside what is there until it is added; let less come at a time"
            return Verdict(False, f"{reason}the target is {self.memory:g}", hint)
        return None

    def _advice(self, trace: Trace) -> str:
        if self.far is None:
            return "Is every rank sending all the time? Could it send a part as soon as it has it?"
        nodes, ranks = self.settings[0].nodes, len(trace.program.ranks)
        across = sum(
            trace.sent(rank, ins)
            for rank, row in enumerate(trace.program.ranks)
            for ins in row
            if ins.op is Op.SEND and rank * nodes // ranks != ins.peer * nodes // ranks
        )
        return f"Between the nodes, where links are slow, go {across / self.nbytes:.3g} tensors; could it be less?"


def _milli(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"


def _hint(reason: str) -> str:
    """A hint about the moves, for a refusal of `verify`."""
    pairs = "each Send(chunks, to) needs a Reduce or Copy(chunks, source) of the other rank"
    known = (
        ("never has it", "follow that chunk from the rank that has it at the beginning: who should have passed it on?"),
        ("lacks rank", "follow that chunk from rank to rank: where is the part left behind, or replaced by Copy?"),
        ("times", "a part was added twice: what is complete already is copied, not reduced"),
        ("order differs", f"{pairs}, with the same chunks, in the same order"),
        ("without", pairs),
        ("reads", "a rank can only send a chunk that it holds: its own, or one that came before"),
    )
    return next((hint for word, hint in known if word in reason), "print the program and follow one chunk by hand")
