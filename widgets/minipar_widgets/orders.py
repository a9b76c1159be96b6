"""Orders made by hand: what each rank of a small pipeline runs, as words that people can move about.

    rank 0   F0 F1 B0 B1            F forward, B backward, I and W its halves (input and weight gradient) of a
    rank 1   F0 B0 F1 B1            micro-batch; F0.1 through chunk 1; F0& beside the backward that follows

An `Order` is judged by the engine alone: it is registered as a schedule like any other, compiled, verified, simulated.
Where it cannot run, the judgement says why, where, and how far the ranks would come.
"""

from __future__ import annotations

import keyword
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from minipar import strategies
from minipar.costs.shapes import uniform
from minipar.costs.unit import UnitCosts
from minipar.errors import Deadlock, MiniparError, PlanError, ProgramError
from minipar.plan import Plan
from minipar.program import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    Op,
    Program,
    message,
)
from minipar.simulator import simulate
from minipar.strategies.layout import both_ways, looped, place, wave
from minipar.trace import Trace
from minipar.verifier import verify
from minipar.walk import Walk

MOST = 1_000  # actions: more are no longer moved by hand
ACTIONS: dict[str, type[Forward | Backward | BackwardInput | BackwardWeight]] = {
    "F": Forward,
    "B": Backward,
    "I": BackwardInput,
    "W": BackwardWeight,
}
LETTERS = {kind: letter for letter, kind in ACTIONS.items()}
PLACEMENTS = {"looped": looped, "wave": wave, "both_ways": both_ways}
Words = tuple[tuple[str, ...], ...]
Span = tuple[float, float]


@dataclass(frozen=True)
class Order:
    """What each rank runs, in order.

    words          per rank; see above
    microbatches   that it is made for
    stages         per rank of the pipeline its stages, by chunk
    """

    words: Words
    microbatches: int
    stages: tuple[tuple[int, ...], ...]

    @property
    def chunks(self) -> int:
        return len(self.stages[0])

    @property
    def layers(self) -> int:
        """One for each stage, so that instructions read `F 2 mb5`."""
        return 1 + max(map(max, self.stages))


@dataclass(frozen=True)
class Judgement:
    """What the engine says of an order.

    trace     the prediction, if it can run
    reason    why it cannot, in one line; empty if it can
    details   the lines of the program that show it
    guilty    (rank, place in its words) of what the reason names
    spans     per rank and word start and end; None: it never runs, or nothing is known of when
    same_as   names of schedules that have this very order
    """

    trace: Trace | None
    reason: str = ""
    details: str = ""
    guilty: frozenset[tuple[int, int]] = frozenset()
    spans: tuple[tuple[Span | None, ...], ...] = ()
    same_as: tuple[str, ...] = ()


# words ----------------------------------------------------------------------------------------------------------------


def word_of(action: Action) -> str:
    """An action as a word: `F0`, `B2.1`."""
    chunk = f".{action.chunk}" if action.chunk else ""
    return f"{LETTERS[type(action)]}{action.microbatch}{chunk}" + ("&" if getattr(action, "beside", False) else "")


def action_of(word: str) -> Action:
    """The action that a word means. PlanError for other words."""
    found = re.fullmatch(r"([FBIW])(\d{1,6})(?:\.(\d{1,6}))?(&?)", word)
    if found is None or (found[4] and found[1] != "F"):
        raise PlanError(f"{word!r} is no action; possible are F0, B0, I0 and W0, and F0.1 for chunk 1")
    kind, i, c = ACTIONS[found[1]], int(found[2]), int(found[3] or 0)
    return Forward(i, c, beside=bool(found[4])) if kind is Forward else kind(i, c)


def actions_of(words: Sequence[str]) -> list[Action]:
    """The actions of one rank. A forward that has lost the backward it was beside is an ordinary one."""
    chosen = [action_of(word) for word in words]
    for k, action in enumerate(chosen):
        alone = k + 1 == len(chosen) or not isinstance(chosen[k + 1], (Backward, BackwardInput))
        if isinstance(action, Forward) and action.beside and alone:
            chosen[k] = Forward(action.microbatch, action.chunk)
    return chosen


def order_of(start: str | Plan | Program, stages: int = 4, microbatches: int = 4) -> Order:
    """The order to begin with: of a schedule by name, of a plan, or of a program compiled from one (and changed since).

    Errors: MiniparError for what has no such order, or one too long to be moved by hand.
    """
    if isinstance(start, Program):
        return _of_program(start)
    plan = start if isinstance(start, Plan) else Plan(pp=stages, microbatches=microbatches, schedule=start)
    schedule = strategies.find(plan.schedule)
    if schedule.asynchronous is not None or plan.slice_count > 1:
        possible = [s.name for s in strategies.schedules() if s.asynchronous is None and "slices" not in s.options]
        raise PlanError(
            f"schedule={plan.schedule}: its micro-batches are no parts of one step; possible are {', '.join(possible)}"
        )
    words = tuple(tuple(word_of(action) for action in plan.actions(rank)) for rank in range(plan.pp))
    return _checked(Order(words, plan.total_microbatches, plan.placement()))


def _of_program(program: Program) -> Order:
    """From the instructions themselves, since the program may have been changed by hand; its name is its plan's."""
    try:
        plan = Plan.parse(program.name)
        layout = plan.layout(uniform(program.layers))
    except MiniparError as error:
        raise MiniparError(
            f"the program {program.name!r} is of no plan, so nobody knows its stages: {error.reason}; "
            "possible are a schedule's name, a plan, or a program that plan.compile(...) gave"
        ) from None
    letters = {
        Op.FORWARD: Forward, Op.BACKWARD: Backward, Op.BACKWARD_INPUT: BackwardInput,
        Op.BACKWARD_WEIGHT: BackwardWeight,
    }  # fmt: skip
    words = []
    for rank in range(plan.pp):
        found: list[str] = []
        for ins in program.ranks[rank]:
            if ins.op in letters and ins.step == 0:
                own = [c for c, layers in enumerate(layout.chunks(rank)) if set(layers) & set(ins.layers)]
                ascending = own if ins.op is Op.FORWARD else own[::-1]
                found += [word_of(letters[ins.op](ins.microbatch, c)) for c in ascending]
        words.append(tuple(dict.fromkeys(found)))
    return _checked(Order(tuple(words), program.microbatches, plan.placement()))


def _checked(order: Order) -> Order:
    size = sum(map(len, order.words))
    if not 0 < size <= MOST:
        raise MiniparError(f"{size} actions are no order to be moved by hand; possible are up to {MOST}")
    return order


# the judgement --------------------------------------------------------------------------------------------------------


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
    """Register an order under `name`, and see whether it can run, and how long it takes."""
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
    walk = Walk(program)
    with suppress(Deadlock):
        walk.run()
    begun = [list(row[: walk.place[rank]]) for rank, row in enumerate(program.ranks)]
    sent = Counter((rank, ins.peer) for rank, row in enumerate(begun) for ins in row if ins.op is Op.SEND)
    joined = Counter((rank, ins.group) for rank, row in enumerate(begun) for ins in row if ins.group)
    for rank, row in enumerate(begun):  # what came before the circle, but waits for what comes after it
        came: Counter[object] = Counter()
        kept = []
        for ins in row:
            link = (ins.peer, rank) if ins.op is Op.RECV else ins.group
            came[link] += 1
            most = sent[ins.peer, rank] if ins.op is Op.RECV else min((joined[r, ins.group] for r in ins.group), default=0)
            if (ins.op is not Op.RECV and not ins.group) or came[link] <= most:
                kept.append(ins)
        begun[rank] = kept
    return simulate(replace(program, ranks=tuple(map(tuple, begun))), costs)


def _spans(order: Order, trace: Trace) -> tuple[tuple[Span | None, ...], ...]:
    """When each word runs. Neighbouring chunks may run as one instruction: then each has its part of the time."""
    found: list[dict[tuple[Op, int, int], Span]] = []
    for rank, row in enumerate(trace.program.ranks):
        found.append({})
        for index, ins in enumerate(row):
            if ins.op in _OPS.values():
                start, end = trace.starts[rank][index], trace.ends[rank][index]
                layers = ins.layers if ins.op is Op.FORWARD else sorted(ins.layers, reverse=True)
                each = (end - start) / len(layers)
                for k, layer in enumerate(layers):
                    found[rank][ins.op, ins.microbatch, layer] = (start + k * each, start + (k + 1) * each)
    return tuple(
        tuple(found[rank].get(_key(order, rank, word)) for word in words) for rank, words in enumerate(order.words)
    )


_OPS = {"F": Op.FORWARD, "B": Op.BACKWARD, "I": Op.BACKWARD_INPUT, "W": Op.BACKWARD_WEIGHT}


def stage_of(order: Order, rank: int, word: str) -> int:
    """The stage that a word runs, on its rank."""
    return order.stages[rank][min(action_of(word).chunk, order.chunks - 1)]


def _key(order: Order, rank: int, word: str) -> tuple[Op, int, int]:
    return _OPS[word[0]], action_of(word).microbatch, stage_of(order, rank, word)


def _place(order: Order, ins: Instruction, rank: int) -> tuple[int, int] | None:
    """The word that an instruction comes from; of a message the one that makes or reads what is moved."""
    if ins.op in (Op.SEND, Op.RECV):
        value = message(ins)[0]
        forwards = value.kind == "output"
        made = value.index if forwards else value.index + 1
        layer = made if ins.op is Op.SEND else value.index + 1 if forwards else value.index
        wanted = [(op, ins.microbatch, layer) for op in _OPS.values() if (op is Op.FORWARD) == forwards]
    else:
        wanted = [(ins.op, ins.microbatch, layer) for layer in ins.layers]
    for k, word in enumerate(order.words[rank]):
        if _key(order, rank, word) in wanted:
            return rank, k
    return None


def _same_as(order: Order, name: str) -> tuple[str, ...]:
    """The schedules that give this order, of all that do without options."""
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
            continue  # not in this size
    return tuple(found)


# code -----------------------------------------------------------------------------------------------------------------


def code(order: Order, name: str) -> str:
    """The order as Python: a schedule that a cell or a file can register."""
    used = [
        kind.__name__
        for letter, kind in ACTIONS.items()
        if any(word[0] == letter for row in order.words for word in row)
    ]
    marks = [mark for mark in (".", "&") if any(mark in word for row in order.words for word in row)]
    function = re.sub(r"\W", "_", name)
    if not function.isidentifier() or keyword.iskeyword(function):
        function = "by_hand"
    options, imports = _placement(order)
    lines = [
        "import minipar",
        f"from minipar import {', '.join(sorted(used))}",
        *imports,
        "",
        "ORDER = (",
        *(f'    "{" ".join(row)}",' for row in order.words),
        ")",
        "ACTIONS = {"
        + ", ".join(
            f'"{LETTERS[ACTIONS[letter]]}": {kind.__name__}'
            for letter, kind in ACTIONS.items()
            if kind.__name__ in used
        )
        + "}",
        "",
        "",
        f'@minipar.schedule("{name}"{options})',
        f"def {function}(rank, stages, microbatches):",
        f'    """Made by hand, for {len(order.words)} ranks and {order.microbatches} micro-batches."""',
        f"    if (stages, microbatches) != ({len(order.words)}, {order.microbatches}):",
        f'        raise minipar.PlanError("{name}: possible are pp={len(order.words)} microbatches={order.microbatches}")',
        "    for word in ORDER[rank].split():",
    ]
    if "&" in marks:
        lines.append('        beside = {"beside": True} if word.endswith("&") else {}')
        lines.append('        word = word.rstrip("&")')
    more = ", **beside" if "&" in marks else ""
    if "." in marks:
        lines.append('        i, _, chunk = word[1:].partition(".")')
        lines.append(f"        yield ACTIONS[word[0]](int(i), int(chunk or 0){more})")
    else:
        lines.append(f"        yield ACTIONS[word[0]](int(word[1:]){more})")
    return "\n".join(lines) + "\n"


def _placement(order: Order) -> tuple[str, list[str]]:
    """The decorator's options that say where the stages are, and what they import."""
    ranks, chunks = len(order.stages), order.chunks
    known = [
        name
        for name, where in PLACEMENTS.items()
        if tuple(tuple(where(r, ranks, chunks)) for r in range(ranks)) == order.stages
    ]
    count = f", chunks={chunks}" if chunks > 1 else ""
    if known and known[0] == "looped":
        return count, []
    if known:
        return f", placement={known[0]}{count}", [f"from minipar.strategies.layout import {known[0]}"]
    return f", placement=lambda rank, ranks, chunks: {order.stages}[rank]{count}", []
