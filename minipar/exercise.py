"""Checks for the exercises of the lessons: at once, in words that teach, and not passed by a stub.

    exercise.check(step_time, exercise.GPIPE_TIME)                                      a function of numbers
    exercise.check(mine, exercise.Target(stages=4, microbatches=8, time=33, activations=4))      a schedule

A task says what is asked; the engine itself judges: `simulate` knows the right number, `verify` whether a schedule can
run, the predicted trace what it costs. A verdict shows itself, and is true only if everything asked was met.
"""

from __future__ import annotations

import math
import textwrap
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from minipar import strategies
from minipar.errors import Deadlock, MiniparError
from minipar.plan import Plan
from minipar.program import BACKWARDS, Action, Backward, BackwardInput, BackwardWeight, Forward, Op, Program
from minipar.simulator import simulate
from minipar.trace import Trace

WIDTH = 88
OTHER_SIZES = ((1, 1), (2, 1), (2, 5), (3, 2), (5, 3))  # (stages, micro-batches): a schedule must work for these, too


@dataclass(frozen=True)
class Verdict:
    """What a check found. Shown in words; true if the answer passed, so that `assert check(...)` grades it.

    reason     one sentence: what was met, or what is wrong
    hint       where to look
    evidence   lines of the program, or where the answer's own code failed
    """

    passed: bool
    reason: str
    hint: str = ""
    evidence: str = ""

    def __bool__(self) -> bool:
        return self.passed

    def __repr__(self) -> str:
        lines = [f"{'passed' if self.passed else 'not yet'}: {self.reason}"]
        lines += ["  " + line for line in self.evidence.splitlines()]
        lines += [f"hint: {self.hint}"] if self.hint else []
        # A notebook breaks longer lines in the middle of a word.
        return "\n".join(textwrap.fill(line, WIDTH, subsequent_indent="      ") for line in lines)


class Task(Protocol):
    """What an exercise asks for."""

    def judge(self, answer: Any) -> Verdict: ...


def check(answer: Any, task: Task) -> Verdict:
    """Judge an answer at once. Never raises for a wrong answer: the verdict says what is wrong with it."""
    return task.judge(answer)


# functions of numbers -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Formula:
    """A function of numbers that must agree with `truth` in all cases.

    names      what the arguments are called, in order
    cases      arguments to try; enough of them that no constant agrees
    mistakes   wrong formulas that are often written, each with the hint that its author needs
    """

    names: tuple[str, ...]
    truth: Callable[..., float]
    cases: tuple[tuple[float, ...], ...]
    mistakes: tuple[tuple[Callable[..., float], str], ...] = ()

    def judge(self, answer: Any) -> Verdict:
        if not callable(answer):
            shape = f"def answer({', '.join(self.names)}): ..."
            return Verdict(False, f"{answer!r} is one number; the answer is a function for every size", shape)
        given: list[float] = []
        for case in self.cases:
            words = ", ".join(f"{name}={x:g}" for name, x in zip(self.names, case, strict=True))
            try:
                value = answer(*case)
            except Exception as error:
                return _raised(error, f"for {words} your function")
            if value is None:
                return Verdict(False, f"for {words} your function gives None", "does it end with `return ...`?")
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                return Verdict(False, f"for {words} your function gives {value!r}", "it must return one number")
            given.append(float(value))
        right = [self.truth(*case) for case in self.cases]
        wrong = [k for k, (x, y) in enumerate(zip(given, right, strict=True)) if not _close(x, y)]
        if not wrong:
            return Verdict(True, f"your function agrees with the simulator in all {len(right)} cases")
        k = wrong[0]
        words = ", ".join(f"{name}={x:g}" for name, x in zip(self.names, self.cases[k], strict=True))
        reason = f"for {words} your function gives {given[k]:g}, the simulator {right[k]:g}"
        return Verdict(
            False, reason, self._hint(given) or f"it agrees in {len(right) - len(wrong)} of {len(right)} cases"
        )

    def _hint(self, given: list[float]) -> str:
        for formula, hint in self.mistakes:
            if all(_close(x, formula(*case)) for x, case in zip(given, self.cases, strict=True)):
                return hint
        return ""


def _close(x: float, y: float) -> bool:
    return math.isclose(x, y, rel_tol=1e-9, abs_tol=1e-9)


def _gpipe_time(stages: int, microbatches: int, forward: float, backward: float) -> float:
    program = Plan(pp=int(stages), microbatches=int(microbatches), schedule="gpipe").compile(layers=int(stages))
    return simulate(program, forward=forward, backward=backward).time


GPIPE_TIME = Formula(
    ("stages", "microbatches", "forward", "backward"),
    _gpipe_time,
    ((4, 8, 1, 2), (1, 1, 1, 2), (1, 6, 1, 2), (3, 1, 1, 1), (2, 5, 1.5, 2.5), (8, 4, 2, 3)),
    (
        (lambda p, m, f, b: m * (f + b), "that is how long a rank works; how long does the last one wait at first?"),
        (lambda p, m, f, b: p * m * (f + b), "that is one micro-batch at a time; in a pipeline the ranks overlap"),
        (lambda p, m, f, b: (m + p) * (f + b), "one too many: micro-batch 0 crosses how many links to the last rank?"),
        (lambda p, m, f, b: m * (f + b) + (p - 1) * f, "the pipeline fills before it works; must it not drain, too?"),
        (lambda p, m, f, b: (m + p - 1) * f, "that is the forwards alone; the backwards fill and drain the same way"),
    ),
)  # fmt: skip


# schedules ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A schedule of one's own, for a pipeline of `stages` ranks and `microbatches` micro-batches.

    time                at most this long, in the unit of `forward` and `backward`; None: as long as it likes
    activations         at most so many micro-batches' activations on every rank; None: all of them
    forward, backward   of one micro-batch on one rank

    The schedule must also be able to run with other numbers of stages and micro-batches.
    """

    stages: int
    microbatches: int
    time: float | None = None
    activations: float | None = None
    forward: float = 1.0
    backward: float = 2.0

    def judge(self, answer: Any) -> Verdict:
        found = [known for known in strategies.schedules() if known.generate is answer]
        if not found:
            what = f"schedule {answer!r}" if isinstance(answer, str) else f"a {type(answer).__name__}"
            hint = 'give the function itself, with @minipar.schedule("a-name") above it'
            return Verdict(False, f"{what} is not a registered schedule function", hint)
        if getattr(answer, "__module__", "").startswith("minipar.strategies"):
            return Verdict(False, f"{found[-1].name} is minipar's own", "write the generator yourself, then compare")
        name = found[-1].name
        refusal = _refusal(name, answer, self.stages, self.microbatches)
        if refusal is not None:
            return refusal
        program = _compile(name, self.stages, self.microbatches)
        trace = simulate(program, forward=self.forward, backward=self.backward)
        held = [float(x) for x in trace.in_flight()]
        if self.time is not None and trace.time > self.time + 1e-9:
            wait, rank, index = _longest_wait(trace)
            reason = f"it can run, but takes {trace.time:g} units; the target is {self.time:g}"
            before = f"rank {rank} waits longest, {wait:g} units before `{program.ranks[rank][index]}`"
            return Verdict(False, reason, f"{before}: which work could it have, or its neighbour do, before?")
        if self.activations is not None and max(held) > self.activations + 1e-9:
            rank = max(range(self.stages), key=held.__getitem__)
            index = _first_above(program, rank, self.activations)
            reason = f"it can run, but rank {rank} holds {held[rank]:g} activations; the target is {self.activations:g}"
            where = f"`{program.ranks[rank][index]}` is the first forward too many"
            return Verdict(False, reason, f"{where}: only a backward frees activations, so one must come before")
        for stages, microbatches in OTHER_SIZES:
            refusal = _refusal(name, answer, stages, microbatches)
            if refusal is not None:
                sizes = f"right for {self.stages} stages and {self.microbatches} micro-batches, but"
                hint = f"use `stages` and `microbatches`, not {self.stages} and {self.microbatches}. {refusal.hint}"
                return Verdict(False, f"{sizes} {refusal.reason}", hint.strip(), refusal.evidence)
        met = [f"time {trace.time:g}" + (f" of at most {self.time:g}" if self.time is not None else "")]
        met.append(f"{max(held):g} activations" + (f" of at most {self.activations:g}" if self.activations else ""))
        return Verdict(True, f"{name} can run, with {self.stages} stages and in other sizes; {', '.join(met)}")


def _refusal(name: str, answer: Callable[..., Any], stages: int, microbatches: int) -> Verdict | None:
    """Why a schedule cannot run in this size; None if it can."""
    sizes = f"with {stages} stage{'s' * (stages > 1)} and {microbatches} micro-batch{'es' * (microbatches > 1)}"
    hint = ""
    known = strategies.find(name)
    options = {key: {"chunks": known.chunks, "group": None}[key] for key in known.options}
    most = 4 * microbatches * known.chunks
    for rank in range(stages):
        try:
            chosen = answer(rank, stages, microbatches, **options)
            # A schedule that never ends must not hang the notebook.
            actions = list(islice(chosen, most + 1)) if hasattr(chosen, "__iter__") else []
        except Exception as error:
            return _raised(error, f"{sizes}, your schedule for rank {rank}")
        if len(actions) > most:
            reason = f"{sizes}, rank {rank} yields more than {most} actions"
            return Verdict(
                False, reason, "a rank needs one Forward(i) and one Backward(i) for each i; does a loop end?"
            )
        hint = hint or (_hint(rank, actions, microbatches) if known.chunks == 1 else "")
    try:
        _compile(name, stages, microbatches)
    except Deadlock as error:
        circle = "read each line: what that rank waits for comes too late on the other; change the order on one of them"
        return Verdict(False, f"{sizes}, {error.reason}", circle, error.details)
    except MiniparError as error:
        return Verdict(False, f"{sizes}, {error.reason}", hint, error.details)
    return None


def _compile(name: str, stages: int, microbatches: int) -> Program:
    """One layer a stage, so that instructions read `F 2 mb5`. `compile` verifies."""
    plan = Plan(pp=stages, microbatches=microbatches, schedule=name)
    return plan.compile(layers=1 + max(map(max, plan.placement())))


def _hint(rank: int, actions: list[Action], microbatches: int) -> str:
    """What one rank's own list lacks, seen without the other ranks; empty if nothing."""
    if not actions:
        return f"rank {rank} yields nothing: a schedule is a generator, `for i in ...: yield Forward(i)`"
    halves = any(isinstance(action, BackwardInput | BackwardWeight) for action in actions)
    for kind in (Forward, BackwardInput, BackwardWeight) if halves else (Forward, Backward):
        name = kind.__name__
        count = Counter(str(action.microbatch) for action in actions if isinstance(action, kind))
        for i in range(microbatches):
            if count[str(i)] != 1:
                times = "never" if not count[str(i)] else f"{count[str(i)]} times"
                return f"rank {rank} yields {name}({i}) {times}; every rank needs it once"
    seen: list[object] = []
    for action in actions:
        if isinstance(action, Backward) and action.microbatch not in seen:
            return f"rank {rank} yields Backward({action.microbatch}) before Forward({action.microbatch})"
        if isinstance(action, Forward):
            seen.append(action.microbatch)
    return ""


def _longest_wait(trace: Trace) -> tuple[float, int, int]:
    """The longest time for which a rank does not compute between two instructions: how long, whose, before which."""
    longest = (0.0, 0, 0)
    for rank, row in enumerate(trace.program.ranks):
        end = trace.span[0]
        for k, ins in enumerate(row):
            if ins.op is Op.FORWARD or ins.op in BACKWARDS:
                wait = trace.starts[rank][k] - end
                if wait > longest[0] + 1e-9:
                    longest = (wait, rank, k)
                end = trace.ends[rank][k]
    return longest


def _first_above(program: Program, rank: int, limit: float) -> int:
    """The index of the forward with which a rank first holds more than `limit` micro-batches' activations."""
    held = 0.0
    for k, ins in enumerate(program.ranks[rank]):
        part = len(ins.layers) / len(program.share[rank])
        held += part * ((ins.op is Op.FORWARD) - (ins.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT)))
        if held > limit + 1e-9:
            return k
    raise AssertionError("a rank's activations are what its forwards leave and its backwards free")


def _raised(error: Exception, what: str) -> Verdict:
    """A verdict on an answer that failed by itself: the exception, and the line of the answer that raised it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    line = f"line {frames[-1].lineno}: {frames[-1].line}" if frames and frames[-1].line else ""
    hint = "check its arguments" if isinstance(error, TypeError) and not frames else "mend that line first"
    return Verdict(False, f"{what} raised {type(error).__name__}: {error}", hint, line)
