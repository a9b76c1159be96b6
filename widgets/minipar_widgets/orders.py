"""Orders made by hand: what each rank of a small pipeline runs, as words that a reader can move.

    rank 0   F0 F1 B0 B1            F forward, B backward, I and W its halves (input and weight gradient) of a
    rank 1   F0 B0 F1 B1            micro-batch; F0.1 through chunk 1; F0& beside the backward that follows

An order is made from a schedule, a plan or a program, and can be printed as code. judging.py says whether it can run.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Sequence
from dataclasses import dataclass

from minipar import strategies
from minipar.errors import MiniparError, PlanError
from minipar.program import Action, Backward, BackwardInput, BackwardWeight, Forward, Op, Program
from minipar.program.shape import uniform
from minipar.strategies.layout import both_ways, looped, wave
from minipar.strategies.plan import Plan

MOST = 1_000  # actions; longer orders are refused
HAND = "by-hand"  # the name of a schedule that was made by hand
ACTIONS: dict[str, type[Forward | Backward | BackwardInput | BackwardWeight]] = {
    "F": Forward,
    "B": Backward,
    "I": BackwardInput,
    "W": BackwardWeight,
}
LETTERS = {kind: letter for letter, kind in ACTIONS.items()}
OPS = {"F": Op.FORWARD, "B": Op.BACKWARD, "I": Op.BACKWARD_INPUT, "W": Op.BACKWARD_WEIGHT}
PLACEMENTS = {"looped": looped, "wave": wave, "both_ways": both_ways}
Words = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Order:
    """What each rank runs, in order.

    words          for each rank; see above
    microbatches   their number
    stages         for each rank of the pipeline its stages, by chunk
    """

    words: Words
    microbatches: int
    stages: tuple[tuple[int, ...], ...]

    @property
    def chunks(self) -> int:
        return len(self.stages[0])

    @property
    def layers(self) -> int:
        """The number of layers: one for each stage, so that instructions are printed as `F 2 mb5`."""
        return 1 + max(map(max, self.stages))

    def stage(self, rank: int, word: str) -> int:
        """The stage that a word of this rank runs."""
        return self.stages[rank][min(action_of(word).chunk, self.chunks - 1)]


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
    """The actions of one rank. `F0&` means an ordinary forward if the next word is not a backward."""
    chosen = [action_of(word) for word in words]
    for k, action in enumerate(chosen):
        alone = k + 1 == len(chosen) or not isinstance(chosen[k + 1], (Backward, BackwardInput))
        if isinstance(action, Forward) and action.beside and alone:
            chosen[k] = Forward(action.microbatch, action.chunk)
    return chosen


def order_of(start: str | Plan | Program, stages: int = 4, microbatches: int = 4) -> Order:
    """The order of a schedule (by name), of a plan, or of a program compiled from a plan (and perhaps changed since).

    Errors: MiniparError if there is no such order, or if it has more than MOST actions.
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
    """The order of the instructions themselves, since the program may have been changed by hand; the name is that of
    the program's plan."""
    try:
        plan = Plan.parse(program.name)
        layout = plan.layout(uniform(program.layers))
    except MiniparError as error:
        raise MiniparError(
            f"the program {program.name!r} is of no plan, so nobody knows its stages: {error.reason}; "
            "possible are a schedule's name, a plan, or a program that plan.compile(...) gave"
        ) from None
    kinds = {op: ACTIONS[letter] for letter, op in OPS.items()}
    words = []
    for rank in range(plan.pp):
        found: list[str] = []
        for ins in program.ranks[rank]:
            if ins.op in kinds and ins.step == 0:
                own = [c for c, layers in enumerate(layout.chunks(rank)) if set(layers) & set(ins.layers)]
                ascending = own if ins.op is Op.FORWARD else own[::-1]
                found += [word_of(kinds[ins.op](ins.microbatch, c)) for c in ascending]
        words.append(tuple(dict.fromkeys(found)))
    return _checked(Order(tuple(words), program.microbatches, plan.placement()))


def _checked(order: Order) -> Order:
    size = sum(map(len, order.words))
    if not 0 < size <= MOST:
        raise MiniparError(f"{size} actions are no order to be moved by hand; possible are up to {MOST}")
    return order


# code -----------------------------------------------------------------------------------------------------------------


def code(order: Order, name: str) -> str:
    """The order as Python: a schedule that a cell or a file can register."""
    every = {word[0] for row in order.words for word in row}
    used = {letter: kind.__name__ for letter, kind in ACTIONS.items() if letter in every}
    function = re.sub(r"\W", "_", name)
    if not function.isidentifier() or keyword.iskeyword(function):
        function = "by_hand"
    options, imports = _placement(order)
    text = str(order.words)
    ranks, microbatches = len(order.words), order.microbatches
    chunk = ', int(word[1:].partition(".")[2] or 0)' if "." in text else ""
    beside = ', **{"beside": True} if word.endswith("&") else {}' if "&" in text else ""
    number = 'word[1:].partition(".")[0]' if chunk else "word[1:]"
    if beside:
        number, chunk = number.replace("word", 'word.rstrip("&")'), chunk.replace("word", 'word.rstrip("&")')
    lines = [
        "import minipar",
        f"from minipar import {', '.join(sorted(used.values()))}",
        *imports,
        "",
        "ORDER = (",
        *(f'    "{" ".join(row)}",' for row in order.words),
        ")",
        "ACTIONS = {" + ", ".join(f'"{letter}": {kind}' for letter, kind in used.items()) + "}",
        "",
        "",
        f'@minipar.schedule("{name}"{options})',
        f"def {function}(rank, stages, microbatches):",
        f'    """Made by hand, for {ranks} ranks and {microbatches} micro-batches."""',
        f"    if (stages, microbatches) != ({ranks}, {microbatches}):",
        f'        raise minipar.PlanError("{name}: possible are pp={ranks} microbatches={microbatches}")',
        "    for word in ORDER[rank].split():",
        f"        yield ACTIONS[word[0]](int({number}){chunk}{beside})",
    ]
    return "\n".join(lines) + "\n"


def _placement(order: Order) -> tuple[str, list[str]]:
    """The decorator's options that say where the stages are, and the imports that these options need."""
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
