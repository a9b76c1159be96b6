"""A pass: a function from a program to a program that still does the same work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minipar.errors import Deadlock, MiniparError
from minipar.prediction.simulator import simulate
from minipar.program import BACKWARDS, Op, Part, Program
from minipar.program.verify.verifier import verify
from minipar.strategies.plan import Plan
from minipar.trace import Trace
from minipar.wording import several
from minipar_course.exercises.kinds.verdict import Verdict, raised

WORK = (Op.FORWARD, *BACKWARDS, Op.STEP)


@dataclass(frozen=True)
class Rewrite:
    """A pass, tried on several programs. `verify` must accept its results, and each rank must do the same work in them.

    plans        (plan, number of layers) of each program; the targets are for the first one
    time         at most this long, in the unit of the costs; None: no limit
    activations  at most so many micro-batches' activations on every rank; None: no limit
    problem      what else is wrong: (trace before, trace after) -> words, "" if nothing; called for every program
    forward, backward, latency     as in `simulate`

    A target or a problem must refuse the original program: else a pass that does nothing would be accepted. "The same
    work" means the same forwards, backwards and steps of each layer and micro-batch on each rank. A pass may change
    recomputations, messages, copies and frees.
    """

    plans: tuple[tuple[str, int], ...]
    time: float | None = None
    activations: float | None = None
    problem: Callable[[Trace, Trace], str] | None = None
    forward: float = 1.0
    backward: float = 2.0
    latency: float = 0.0

    def judge(self, answer: Any) -> Verdict:
        if not callable(answer) or isinstance(answer, type):
            return Verdict(False, f"{answer!r} is no function", "a pass is a function: def mine(program): ...")
        for k, (plan, layers) in enumerate(self.plans):
            before = Plan.parse(plan).compile(layers=layers)
            verdict = self._judge(answer, before, f"of `{plan}` with {several(layers, 'layer')}", targets=k == 0)
            if verdict is not None:
                return verdict
        return Verdict(
            True, f"what your pass makes can run and does the same work, for {several(len(self.plans), 'program')}"
        )

    def _judge(self, answer: Callable[[Program], Any], before: Program, name: str, targets: bool) -> Verdict | None:
        try:
            after = answer(before)
        except Exception as error:
            return raised(error, f"given the program {name} your pass")
        if not isinstance(after, Program):
            hint = "make the new one by `program.with_rank(rank, instructions)`, and return it"
            return Verdict(False, f"your pass gives {type(after).__name__}, not a Program", hint)
        different = _different_work(before, after)
        if different:
            return Verdict(False, f"what your pass makes {name} does other work: {different}", _WORK_HINT)
        try:
            verify(after)
        except (Deadlock, MiniparError) as error:
            hint = "`verify` names the instruction; print the rank's list around it: program.text(rank=..., limit=...)"
            return Verdict(False, f"what your pass makes {name} cannot run: {error.reason}", hint, error.details)
        was, now = (
            simulate(p, forward=self.forward, backward=self.backward, latency=self.latency) for p in (before, after)
        )
        if targets and self.time is not None and now.time > self.time + 1e-9:
            reason = f"{name}: it takes {now.time:g} units ({was.time:g} before your pass); the target is {self.time:g}"
            return Verdict(False, reason, "draw both: simulate(program).plot(); where does a rank wait?")
        if targets and self.activations is not None and (held := max(now.in_flight())) > self.activations + 1e-9:
            rank = now.in_flight().index(held)
            reason = f"{name}: rank {rank} holds {several(held, 'activation')}; the target is {self.activations:g}"
            return Verdict(False, reason, "which forward could come later, or which value be freed earlier?")
        text = self.problem(was, now) if self.problem is not None else ""
        return (
            Verdict(False, f"{name}: {text}", "print program.text(rank=0) before and after your pass") if text else None
        )


_WORK_HINT = "a pass may move, add or take away communication; every forward, backward and STEP must stay, once"


def _different_work(before: Program, after: Program) -> str:
    """The first piece of work that one program has and the other lacks; empty if there is none."""
    if len(before.ranks) != len(after.ranks):
        return f"it has {several(len(after.ranks), 'rank')}, not {len(before.ranks)}"
    for rank in range(len(before.ranks)):
        was, now = _work(before, rank), _work(after, rank)
        for missing, words in ((was - now, "lacks"), (now - was, "does too much:")):
            for op, layer, microbatch, step in sorted(missing, key=lambda one: (one[3], one[2], one[1], one[0].value)):
                where = f" mb{microbatch}" if microbatch >= 0 else ""
                return f"rank {rank} {words} {op.value} of layer {layer}{where}" + (f" in step {step}" if step else "")
    return ""


def _work(program: Program, rank: int) -> Counter[tuple[Op, int, int, int]]:
    found: Counter[tuple[Op, int, int, int]] = Counter()
    for ins in program.ranks[rank]:
        if ins.op in WORK:
            parts = ins.parts or tuple(Part(ins.op, layer) for layer in ins.layers)
            found.update((part.op, part.layer, ins.microbatch, ins.step) for part in parts if part.op in WORK)
    return found
