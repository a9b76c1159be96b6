"""Whether an order made by hand can run, and how long it takes. Only the engine decides that: the order is registered
as a schedule like any other, compiled, verified and simulated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from minipar import strategies
from minipar.costs.unit import UnitCosts
from minipar.errors import Deadlock, MiniparError, PlanError, ProgramError
from minipar.prediction.simulator import simulate
from minipar.program import Action, Instruction, Op, Program, message, order
from minipar.program.verify.verifier import verify
from minipar.strategies.layout import place
from minipar.strategies.plan import Plan
from minipar.trace import Trace
from minipar_widgets.orders import OPS, Order, action_of, actions_of, order_of

Span = tuple[float, float]


@dataclass(frozen=True)
class Judgement:
    """The engine's result for an order.

    trace     the prediction, if it can run
    reason    why it cannot, in one line; empty if it can
    details   the lines of the program that show it
    guilty    (rank, place in its words) of the words that the reason names
    spans     for each rank and word its start and end; None: it never runs, or its time is not known
    same_as   names of schedules that have this very order
    """

    trace: Trace | None
    reason: str = ""
    details: str = ""
    guilty: frozenset[tuple[int, int]] = frozenset()
    spans: tuple[tuple[Span | None, ...], ...] = ()
    same_as: tuple[str, ...] = ()


def register(order: Order, name: str) -> None:
    """Make the order known as a schedule, for `Plan(schedule=name)`, the explorer and `train`."""

    def by_hand(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
        """An order made by hand."""
        if (ranks, microbatches) != (len(order.words), order.microbatches):
            raise PlanError(
                f"schedule={name}: was made by hand; possible are pp={len(order.words)} "
                f"microbatches={order.microbatches}"
            )
        yield from actions_of(order.words[rank])

    strategies.schedule(
        name,
        paper="made by hand",
        needs=f"p = {len(order.words)}, m = {order.microbatches}",
        placement=lambda rank, ranks, chunks: order.stages[rank % len(order.stages)],
        chunks=order.chunks,
    )(by_hand)


def judge(order: Order, name: str, forward: float = 1.0, backward: float = 2.0, latency: float = 0.0) -> Judgement:
    """Register an order under `name`, and find out whether it can run, and how long it takes."""
    nothing = tuple((None,) * len(row) for row in order.words)
    try:
        register(order, name)
        plan = Plan(pp=len(order.words), microbatches=order.microbatches, schedule=name)
        program = plan.compile(layers=order.layers, check=False)
        costs = UnitCosts(program, forward, backward, latency=latency)
    except MiniparError as error:
        return Judgement(None, error.reason, error.details, spans=nothing)
    try:
        verify(program)
    except ProgramError as error:
        guilty = frozenset(_place(order, program.ranks[rank][index], rank) for rank, index in error.places)
        spans = _spans(order, _as_far_as_possible(program, costs)) if isinstance(error, Deadlock) else nothing
        return Judgement(None, error.reason, error.details, guilty - {None}, spans)  # type: ignore[arg-type]
    trace = simulate(program, forward=forward, backward=backward, latency=latency)
    return Judgement(trace, spans=_spans(order, trace), same_as=_same_as(order, name))


def _as_far_as_possible(program: Program, costs: UnitCosts) -> Trace:
    """The trace of what runs before the ranks wait for each other in a circle."""
    begun: list[list[Instruction]] = [[] for _ in program.ranks]
    with suppress(Deadlock):
        for rank, _, ins, _, _ in order(program):
            begun[rank] += [ins] if ins is not None else []
    sent = Counter((rank, ins.peer) for rank, row in enumerate(begun) for ins in row if ins.op is Op.SEND)
    joined = Counter((rank, ins.group) for rank, row in enumerate(begun) for ins in row if ins.group)
    ranks = []
    for rank, row in enumerate(begun):  # without instructions that began before the circle, but wait for one after it
        seen: Counter[object] = Counter()
        kept = []
        for ins in row:
            link = (ins.peer, rank) if ins.op is Op.RECV else ins.group
            seen[link] += 1
            if ins.op is Op.RECV:
                due = sent[ins.peer, rank]
            else:
                due = min((joined[r, ins.group] for r in ins.group), default=seen[link])
            kept += [ins] if seen[link] <= due else []
        ranks.append(tuple(kept))
    return simulate(replace(program, ranks=tuple(ranks)), costs)


def _spans(order: Order, trace: Trace) -> tuple[tuple[Span | None, ...], ...]:
    """When each word runs. Neighbouring chunks may run as one instruction: then each gets a part of its time."""
    found: list[dict[tuple[Op, int, int], Span]] = []
    for rank, row in enumerate(trace.program.ranks):
        found.append({})
        for index, ins in enumerate(row):
            if ins.op in OPS.values():
                start, end = trace.starts[rank][index], trace.ends[rank][index]
                layers = ins.layers if ins.op is Op.FORWARD else sorted(ins.layers, reverse=True)
                each = (end - start) / len(layers)
                for k, layer in enumerate(layers):
                    found[rank][ins.op, ins.microbatch, layer] = (start + k * each, start + (k + 1) * each)
    return tuple(
        tuple(found[rank].get(_key(order, rank, word)) for word in words) for rank, words in enumerate(order.words)
    )


def _key(order: Order, rank: int, word: str) -> tuple[Op, int, int]:
    return OPS[word[0]], action_of(word).microbatch, order.stage(rank, word)


def _place(order: Order, ins: Instruction, rank: int) -> tuple[int, int] | None:
    """The word that an instruction comes from; for a message, the word that makes or reads the message's value."""
    if ins.op in (Op.SEND, Op.RECV):
        value = message(ins)[0]
        forwards = value.kind == "output"
        built = value.index if forwards else value.index + 1
        layer = built if ins.op is Op.SEND else value.index + 1 if forwards else value.index
        wanted = [(op, ins.microbatch, layer) for op in OPS.values() if (op is Op.FORWARD) == forwards]
    else:
        wanted = [(ins.op, ins.microbatch, layer) for layer in ins.layers]
    for k, word in enumerate(order.words[rank]):
        if _key(order, rank, word) in wanted:
            return rank, k
    return None


def _same_as(order: Order, name: str) -> tuple[str, ...]:
    """The schedules that give this order without further options."""
    found = []
    for schedule in strategies.schedules():
        try:
            if schedule.name == name or schedule.asynchronous is not None or "slices" in schedule.options:
                continue
            if place(schedule.placement, len(order.words), schedule.chunks) == order.stages:
                theirs = order_of(schedule.name, len(order.words), order.microbatches)
                if theirs.words == order.words:
                    found.append(schedule.name)
        except MiniparError:
            continue  # the schedule does not exist for this size
    return tuple(found)
