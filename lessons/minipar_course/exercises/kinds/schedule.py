"""A schedule that the student writes, with a target for time and for memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from minipar import strategies
from minipar.errors import Deadlock, MiniparError
from minipar.prediction.simulator import simulate
from minipar.program import (
    BACKWARDS,
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    Op,
    Program,
)
from minipar.strategies.plan import Plan
from minipar.trace import Trace
from minipar.wording import several
from minipar_course.exercises.kinds.verdict import Verdict, raised

OTHER_SIZES = ((1, 1), (2, 1), (2, 5), (3, 2), (5, 3))  # (stages, micro-batches) for which it must work, too


@dataclass(frozen=True)
class Target:
    """A schedule that the student writes, for a pipeline of `stages` ranks and `microbatches` micro-batches.

    time                at most this long, in the unit of `forward` and `backward`; None: no limit
    activations         at most so many micro-batches' activations on every rank; None: no limit
    forward, backward   of one micro-batch on one rank
    latency             of a message
    like                a schedule of minipar that meets the target: the idle time of each rank is compared with its

    The schedule must also be able to run with other numbers of stages and micro-batches.
    """

    stages: int
    microbatches: int
    time: float | None = None
    activations: float | None = None
    forward: float = 1.0
    backward: float = 2.0
    latency: float = 0.0
    like: str = ""

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
        trace = self._simulated(program)
        held = [float(x) for x in trace.in_flight()]
        if self.time is not None and trace.time > self.time + 1e-9:
            reason = f"it can run, but takes {trace.time:g} units; the target is {self.time:g}"
            if self.like:
                model = self._simulated(_compile(self.like, self.stages, self.microbatches))
                return Verdict(False, reason, _idles_more(trace, model))
            wait, rank, index = _longest_wait(trace)
            before = f"rank {rank} waits longest, {wait:g} units before `{program.ranks[rank][index]}`"
            return Verdict(False, reason, f"{before}: which work could it have, or its neighbour do, before?")
        if self.activations is not None and max(held) > self.activations + 1e-9:
            rank = max(range(self.stages), key=held.__getitem__)
            index = _first_above(program, rank, self.activations)
            reason = (
                f"it can run, but rank {rank} holds {several(held[rank], 'activation')}; the target is "
                f"{self.activations:g}"
            )
            where = f"`{program.ranks[rank][index]}` is the first forward too many"
            return Verdict(False, reason, f"{where}: only a backward frees activations, so one must come before")
        for stages, microbatches in OTHER_SIZES:
            refusal = _refusal(name, answer, stages, microbatches)
            if refusal is not None:
                sizes = (
                    f"right for {several(self.stages, 'stage')} and {several(self.microbatches, 'micro-batch')}, but"
                )
                hint = f"use `stages` and `microbatches`, not {self.stages} and {self.microbatches}. {refusal.hint}"
                return Verdict(False, f"{sizes} {refusal.reason}", hint.strip(), refusal.evidence)
        met = [f"time {trace.time:g}" + (f" of at most {self.time:g}" if self.time is not None else "")]
        met.append(several(max(held), "activation") + (f" of at most {self.activations:g}" if self.activations else ""))
        return Verdict(
            True, f"{name} can run, with {several(self.stages, 'stage')} and in other sizes; {', '.join(met)}"
        )

    def _simulated(self, program: Program) -> Trace:
        return simulate(program, forward=self.forward, backward=self.backward, latency=self.latency)


def _refusal(name: str, answer: Callable[..., Any], stages: int, microbatches: int) -> Verdict | None:
    """Why a schedule cannot run in this size; None if it can."""
    sizes = f"with {several(stages, 'stage')} and {several(microbatches, 'micro-batch')}"
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
            return raised(error, f"{sizes}, your schedule for rank {rank}")
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
    """The program with one layer for each stage, so that instructions read `F 2 mb5`. `compile` verifies it."""
    plan = Plan(pp=stages, microbatches=microbatches, schedule=name)
    return plan.compile(layers=1 + max(map(max, plan.placement())))


def _hint(rank: int, actions: list[Action], microbatches: int) -> str:
    """What one rank's list lacks, without regard to the other ranks; "" if nothing."""
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


def _waits(trace: Trace, rank: int) -> list[tuple[float, int]]:
    """For how long a rank does not compute, and the index of the instruction before which it waits; in order."""
    found, end = [], trace.span[0]
    for k, ins in enumerate(trace.program.ranks[rank]):
        if ins.op is Op.FORWARD or ins.op in BACKWARDS:
            found.append((trace.starts[rank][k] - end, k))
            end = trace.ends[rank][k]
    return found


def _longest_wait(trace: Trace) -> tuple[float, int, int]:
    """The longest time for which a rank does not compute: how long, the rank, and the index of the next instruction."""
    longest = (0.0, 0, 0)
    for rank in range(len(trace.program.ranks)):
        for wait, k in _waits(trace, rank):
            if wait > longest[0] + 1e-9:
                longest = (wait, rank, k)
    return longest


def _idles_more(trace: Trace, model: Trace) -> str:
    """Where a rank waits longest although the model, which is as fast as can be, does not; and what it could do."""
    extra: list[tuple[float, int, int]] = []
    for rank in range(len(trace.program.ranks)):
        needed = {_done_by(model.program.ranks[rank][k]): wait for wait, k in _waits(model, rank)}
        row = trace.program.ranks[rank]
        extra += [(wait - needed.get(_done_by(row[k]), 0.0), -rank, k) for wait, k in _waits(trace, rank)]
    more, minus_rank, k = max(extra, key=lambda one: (round(one[0], 9), one[1], -one[2]))
    rank, row = -minus_rank, trace.program.ranks[-minus_rank]
    text = f"rank {rank} waits {several(more, 'unit')} more than it must before `{row[k]}`"
    later = {(ins.microbatch, ins.layers) for ins in row[k:] if ins.op is Op.BACKWARD_WEIGHT}
    ready = [ins for ins in row[:k] if ins.op is Op.BACKWARD_INPUT and (ins.microbatch, ins.layers) in later]
    if ready:
        count = several(len(ready), "micro-batch")
        return f"{text}, though weight halves of {count} could run there: do not keep them to the end"
    halves = [ins for each in trace.program.ranks[rank + 1 :] for ins in each if ins.op is Op.BACKWARD_WEIGHT]
    if halves:
        return (
            f"{text}, with nothing else to do then: weight halves come too early on the ranks after it; let some wait"
        )
    return f"{text}: which work could it have, or its neighbour do, before?"


def _done_by(ins: Instruction) -> tuple[object, ...]:
    """What an instruction does, where a whole backward counts as its input half, for which others wait."""
    return (Op.BACKWARD_INPUT if ins.op is Op.BACKWARD else ins.op), ins.microbatch, ins.layers


def _first_above(program: Program, rank: int, limit: float) -> int:
    """The index of the forward with which a rank first holds more than `limit` micro-batches' activations."""
    held = 0.0
    for k, ins in enumerate(program.ranks[rank]):
        part = len(ins.layers) / len(program.share[rank])
        held += part * ((ins.op is Op.FORWARD) - (ins.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT)))
        if held > limit + 1e-9:
            return k
    raise AssertionError("a rank's activations are what its forwards leave and its backwards free")
