"""Drafts, on which passes work; passes; and how a user registers passes of their own.

    draft = Draft(plan, layout, step, ranks)          one step of one replica: the instructions of each of its ranks
    draft = draft.each(lambda rank, row: ...)         a pass: rewrite every rank's instructions

A pass is a function from a Draft to a Draft. It only states what its instructions read, write and free. Later a value
that is read on another rank gets a SEND and a RECV, and verify refuses a program that cannot run. No pass knows another
pass. What it must know about earlier passes it finds in the Draft: `update` says which gradients are needed whole, and
`state` says which values are slices, or buffers that stay between steps.

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

# The built-in passes in their order (`compile.passes_of`). A pass of your own runs after one of them. Until "fuse" a
# compute instruction works on one layer. Until "transfers" nothing is sent, and until "update" the rows have no STEP
# (but those of a schedule without flushes have theirs from "versions" on).
PLACES = (
    "layers", "bucket", "checkpoint", "slices", "versions", "zero", "priority", "data_parallel", "compress",
    "forms", "parts", "copies", "local_steps", "host_layers", "offload", "clip", "parameter_server",
    "transfers", "update", "fuse",
)  # fmt: skip


@dataclass(frozen=True)
class Draft:
    """One step of one replica's pipeline, while the passes make it. The other replicas are copies of it.

    For a schedule without flushes a draft has all steps, because nothing separates two steps.

    plan     what the user chose
    layout   which rank holds which layers: `layout.placement[rank]` are its stages, `layout.layers(stage)` their layers
    step     number of the step in the program, from 0; instructions and values carry it
    ranks    the instructions of each rank of the pipeline, in order; after these the rows of parameter servers
    update   for each rank: its STEP and what belongs to it, until the pass "update" puts them among the instructions
    state    for each rank: the values that it holds between steps
    previous_update  for each rank: the `update` of the step before

    These are the same for all steps:

    steps    the number of steps in the program
    actions  for each rank: the actions that its schedule yields
    moves    for each stage: which of its layers run forward again, as `checkpoint` says (`segments.schedules`)
    bucket   the plan's bucket, or the size that the pass "bucket" has found
    seconds  for each rank: the time of an instruction, computing or on its link; empty if no pass of the plan needs it
    """

    plan: Plan
    layout: Layout
    step: int
    ranks: Rows
    update: Rows = ()
    state: tuple[frozenset[Value], ...] = ()
    previous_update: Rows = ()
    steps: int = 1
    actions: Sequence[Sequence[Action]] = ()
    moves: Sequence[Sequence[Move]] = ()
    bucket: Bucket = 25
    seconds: Sequence[Seconds] = ()

    def each(self, rewrite: Rewrite) -> Draft:
        """The draft in which every rank's instructions are `rewrite(rank, instructions)`."""
        return replace(self, ranks=tuple(tuple(rewrite(rank, row)) for rank, row in enumerate(self.ranks)))

    def each_update(self, rewrite: Rewrite) -> Draft:
        """The draft in which every rank's STEP, and what belongs to it, is `rewrite(rank, update)`."""
        return replace(self, update=tuple(tuple(rewrite(rank, row)) for rank, row in enumerate(self.update)))

    def each_state(self, hold: Callable[[int, frozenset[Value]], Iterable[Value]]) -> Draft:
        """The draft in which every rank holds `hold(rank, state)` between steps."""
        return replace(self, state=tuple(frozenset(hold(rank, held)) for rank, held in enumerate(self.state)))

    def following(self) -> Draft:
        """The empty draft of the next step."""
        return replace(self, step=self.step + 1, ranks=(), update=(), state=(), previous_update=self.update)


@dataclass(frozen=True)
class Pass:
    """One of the passes of a plan: `print(*plan.passes(), sep="\\n")`.

    name      the name of a built-in pass, as in `PLACES`, or of one of your own
    rewrite   the function from a Draft to a Draft
    after     for a pass of your own: the built-in pass after which it runs
    """

    name: str
    rewrite: Callable[[Draft], Draft]
    after: str = ""

    def __call__(self, draft: Draft) -> Draft:
        """The draft after this pass. Errors: PlanError if a pass of your own returns no Draft, or other ranks."""
        built = self.rewrite(draft)
        if self.after:
            _check(self.name, draft, built)
        return built

    @property
    def summary(self) -> str:
        """What it does: the first line of its docstring."""
        return (self.rewrite.__doc__ or "A pass of your own.").strip().split("\n")[0]

    def __str__(self) -> str:
        return f"{self.name:16} {self.summary}"


_passes: dict[str, Pass] = {}


def pass_(name: str, *, after: str = "offload") -> Callable[[Callable[[Draft], Draft]], Callable[[Draft], Draft]]:
    """Decorator: register a pass of your own under `name`, for `Plan(extra_passes=name)`. Registering again replaces.

    after   the built-in pass, one of `PLACES`, after which it runs, even if the plan does not need that built-in pass.
            Several passes at one place run in the order of the plan. `plan.passes()` shows where they run.

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
    """The names as a tuple. Errors: PlanError, which lists the registered passes, for a name that is unknown or given
    twice."""
    found = tuple(names)
    for name in found:
        if name not in _passes:
            known = f"possible are {', '.join(_passes)}" if _passes else "none is registered"
            raise PlanError(f"extra_passes={name}: unknown; {known}; @minipar.pass_({name!r}) registers one")
    if len(set(found)) < len(found):
        raise PlanError(f"extra_passes={','.join(found)}: a pass is named twice; each runs once")
    return found


def _check(name: str, given: Draft, built: object) -> None:
    if not isinstance(built, Draft):
        raise PlanError(f"pass {name!r}: gave {built!r}; it must return a Draft, such as draft.each(...)")
    for before, after in ((given.ranks, built.ranks), (given.update, built.update), (given.state, built.state)):
        if len(before) != len(after):
            raise PlanError(f"pass {name!r}: gave {len(after)} ranks for {len(before)}; it must keep their number")
    for rows in (built.ranks, built.update):
        for rank, row in enumerate(rows):
            wrong = next((ins for ins in row if not isinstance(ins, Instruction)), None)
            if wrong is not None:
                raise PlanError(f"pass {name!r}: rank {rank} has {wrong!r}, which is no Instruction")
