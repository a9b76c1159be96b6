"""What passes work on, what a pass is, and passes of one's own.

    draft = Draft(plan, layout, step, ranks)          one step of one replica: the instructions of each of its ranks
    draft = draft.each(lambda rank, row: ...)         a pass: rewrite every rank's instructions

A pass is a function from a Draft to a Draft. It states what its instructions read, write and free, and the readers of
programs do the rest: what is read on another rank gets a SEND and a RECV, and verify refuses what cannot run. No pass
knows another one. What a pass must know of those before it, it finds in the Draft: `update` says which gradients are
needed whole, `state` which values are slices or buffers that stay.

    @minipar.pass_("mine", after="checkpoint")
    def mine(draft): ...

    Plan(pp=2, microbatches=4, extra_passes="mine")
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from minipar.costs.recomputation import Move
from minipar.errors import PlanError
from minipar.program import Action, Instruction, Value
from minipar.strategies.buckets import Bucket
from minipar.strategies.layout import Layout

if TYPE_CHECKING:
    from minipar.strategies.plan import Plan

Rows = tuple[tuple[Instruction, ...], ...]
Rewrite = Callable[[int, Sequence[Instruction]], Iterable[Instruction]]
Seconds = Callable[[Instruction], float]

# The built-in passes in their order (`compile.passes_of`); one of your own stands behind one of them. Up to "offload"
# the instructions are layer by layer, and nothing is sent; before "update" there is no STEP among them.
PLACES = (
    "layers", "bucket", "checkpoint", "slices", "zero", "priority", "data_parallel", "compress", "forms",
    "parts", "host_layers",
    "offload", "local_steps", "clip", "parameter_server", "transfers", "update", "fuse", "versions",
)  # fmt: skip


@dataclass(frozen=True)
class Draft:
    """One step of one replica's pipeline, while it is made. The other replicas are copies of it.

    Of a schedule without flushes it is all steps, as there is nothing between two of them.

    plan     what the user chose
    layout   which rank holds which layers: `layout.placement[rank]` are its stages, `layout.layers(stage)` their layers
    step     counts from 0 in the program; instructions and values carry it
    ranks    the instructions of each rank of the pipeline, in order; behind them those of parameter servers
    update   of each rank: its STEP and what belongs to it, until the pass "update" puts them among the instructions
    state    of each rank: the values that it holds between steps
    late     of each rank: the `update` of the step before

    What holds for all steps:

    steps    how many the program has
    actions  of each rank: what its schedule yields
    moves    of each stage: which of its layers run forward again, as `checkpoint` says (`segments.schedules`)
    bucket   what the plan says, or what the pass "bucket" has found
    seconds  of each rank: what an instruction takes, computing or on its link, where the plan decides by it
    """

    plan: Plan
    layout: Layout
    step: int
    ranks: Rows
    update: Rows = ()
    state: tuple[frozenset[Value], ...] = ()
    late: Rows = ()
    steps: int = 1
    actions: Sequence[Sequence[Action]] = ()
    moves: Sequence[Sequence[Move]] = ()
    bucket: Bucket = 25
    seconds: Sequence[Seconds] = ()

    def each(self, rewrite: Rewrite) -> Draft:
        """The draft in which every rank's instructions are `rewrite(rank, instructions)`."""
        return replace(self, ranks=tuple(tuple(rewrite(rank, row)) for rank, row in enumerate(self.ranks)))

    def each_update(self, rewrite: Rewrite) -> Draft:
        """The draft in which every rank's STEP, with what belongs to it, is `rewrite(rank, update)`."""
        return replace(self, update=tuple(tuple(rewrite(rank, row)) for rank, row in enumerate(self.update)))

    def each_state(self, hold: Callable[[int, frozenset[Value]], Iterable[Value]]) -> Draft:
        """The draft in which every rank holds `hold(rank, state)` between steps."""
        return replace(self, state=tuple(frozenset(hold(rank, held)) for rank, held in enumerate(self.state)))

    def following(self) -> Draft:
        """The empty draft of the next step."""
        return replace(self, step=self.step + 1, ranks=(), update=(), state=(), late=self.update)


@dataclass(frozen=True)
class Pass:
    """One of the passes of a plan: `print(*plan.passes(), sep="\\n")`.

    name      of the built-in pass, as in `PLACES`; or of one of your own
    rewrite   the function from a Draft to a Draft
    after     of one of your own: the built-in pass behind which it stands
    """

    name: str
    rewrite: Callable[[Draft], Draft]
    after: str = ""

    def __call__(self, draft: Draft) -> Draft:
        """The draft after this pass. PlanError if one of your own gives no Draft of the same ranks."""
        made = self.rewrite(draft)
        if self.after:
            _check(self.name, draft, made)
        return made

    @property
    def summary(self) -> str:
        """What it does: the first line of its docstring."""
        return (self.rewrite.__doc__ or "A pass of your own.").strip().split("\n")[0]

    def __str__(self) -> str:
        return f"{self.name:16} {self.summary}"


_passes: dict[str, Pass] = {}


def pass_(name: str, *, after: str = "offload") -> Callable[[Callable[[Draft], Draft]], Callable[[Draft], Draft]]:
    """Decorator: register a pass of your own under `name`, for `Plan(extra_passes=name)`. Registering again replaces.

    after   the built-in pass behind which it stands, one of `PLACES`: also where the plan does not need that one. Of
            several at one place, the plan's order counts. `plan.passes()` shows where they are.

    Errors: PlanError for a name that is no word, or an unknown place.
    """
    if not name or any(c.isspace() or c in "=," for c in name):
        raise PlanError(f"pass name {name!r}: must be one word without '=' and ','")
    if after not in PLACES:
        raise PlanError(f"pass {name!r}: after={after!r} is no place; possible are {', '.join(PLACES)}")

    def register(rewrite: Callable[[Draft], Draft]) -> Callable[[Draft], Draft]:
        _passes[name] = Pass(name, rewrite, after)
        return rewrite

    return register


def registered(name: str) -> Pass:
    """A pass of the user's own, by its name."""
    return _passes[name]


def check_names(names: Iterable[str]) -> tuple[str, ...]:
    """The names of registered passes, or a PlanError that lists what there is."""
    found = tuple(names)
    for name in found:
        if name not in _passes:
            known = f"possible are {', '.join(_passes)}" if _passes else "none is registered"
            raise PlanError(f"extra_passes={name}: unknown; {known}; @minipar.pass_({name!r}) registers one")
    if len(set(found)) < len(found):
        raise PlanError(f"extra_passes={','.join(found)}: a pass is named twice; each runs once")
    return found


def _check(name: str, given: Draft, made: object) -> None:
    if not isinstance(made, Draft):
        raise PlanError(f"pass {name!r}: gave {made!r}; it must return a Draft, such as draft.each(...)")
    for before, after in ((given.ranks, made.ranks), (given.update, made.update), (given.state, made.state)):
        if len(before) != len(after):
            raise PlanError(f"pass {name!r}: gave {len(after)} ranks for {len(before)}; it must keep their number")
    for rows in (made.ranks, made.update):
        for rank, row in enumerate(rows):
            wrong = next((ins for ins in row if not isinstance(ins, Instruction)), None)
            if wrong is not None:
                raise PlanError(f"pass {name!r}: rank {rank} has {wrong!r}, which is no Instruction")
