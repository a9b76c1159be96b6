"""What passes work on, and passes of one's own.

    draft = Draft(plan, layout, step, ranks)          one step of one replica: the instructions of each of its ranks
    draft = draft.each(lambda rank, row: ...)         a pass: rewrite every rank's instructions

A pass is a function from a Draft to a Draft. It states what its instructions read, write and free, and the readers of
programs do the rest: what is read on another rank gets a SEND and a RECV, and verify refuses what cannot run.

    @minipar.pass_("mine", after="checkpoint")
    def mine(draft): ...

    Plan(pp=2, microbatches=4, extra_passes="mine")
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from minipar.errors import PlanError
from minipar.program import Instruction
from minipar.strategies.layout import Layout

if TYPE_CHECKING:
    from minipar.strategies.plan import Plan

Rows = tuple[tuple[Instruction, ...], ...]
Rewrite = Callable[[int, Sequence[Instruction]], Iterable[Instruction]]

# The built-in passes after which one of your own can stand, in their order. Up to "offload" the instructions are layer
# by layer, and nothing is sent; before "fuse" there is no STEP.
PLACES = (
    "layers", "checkpoint", "slices", "zero", "data_parallel", "compress", "host_layers", "offload", "transfers", "fuse"
)  # fmt: skip


@dataclass(frozen=True)
class Draft:
    """One step of one replica's pipeline, while it is made. The other replicas are copies of it.

    plan     what the user chose
    layout   which rank holds which layers: `layout.placement[rank]` are its stages, `layout.layers(stage)` their layers
    step     counts from 0 in the program; instructions and values carry it
    ranks    the instructions of each rank of the pipeline, in order
    """

    plan: Plan
    layout: Layout
    step: int
    ranks: Rows

    def each(self, rewrite: Rewrite) -> Draft:
        """The draft in which every rank's instructions are `rewrite(rank, instructions)`."""
        return replace(self, ranks=tuple(tuple(rewrite(rank, row)) for rank, row in enumerate(self.ranks)))


OwnPass = Callable[[Draft], Draft]


@dataclass(frozen=True)
class _Registered:
    after: str
    rewrite: OwnPass


_passes: dict[str, _Registered] = {}


def pass_(name: str, *, after: str = "offload") -> Callable[[OwnPass], OwnPass]:
    """Decorator: register a pass of your own under `name`, for `Plan(extra_passes=name)`. Registering again replaces.

    after   the built-in pass behind which it stands, one of `PLACES`. Of several at one place, the plan's order counts.

    Errors: PlanError for a name that is no word, or an unknown place.
    """
    if not name or any(c.isspace() or c in "=," for c in name):
        raise PlanError(f"pass name {name!r}: must be one word without '=' and ','")
    if after not in PLACES:
        raise PlanError(f"pass {name!r}: after={after!r} is no place; possible are {', '.join(PLACES)}")

    def register(rewrite: OwnPass) -> OwnPass:
        _passes[name] = _Registered(after, rewrite)
        return rewrite

    return register


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


def apply_own(draft: Draft, place: str) -> Draft:
    """The draft after the plan's own passes that stand behind the built-in pass `place`.

    Errors: PlanError that names the pass, if it gives no Draft of the same ranks with instructions.
    """
    for name in draft.plan.extra_passes:
        registered = _passes[name]
        if registered.after == place:
            made = registered.rewrite(draft)
            _check(name, draft, made)
            draft = made
    return draft


def _check(name: str, given: Draft, made: object) -> None:
    if not isinstance(made, Draft):
        raise PlanError(f"pass {name!r}: gave {made!r}; it must return a Draft, such as draft.each(...)")
    if len(made.ranks) != len(given.ranks):
        raise PlanError(
            f"pass {name!r}: gave {len(made.ranks)} ranks for {len(given.ranks)}; it must keep their number"
        )
    for rank, row in enumerate(made.ranks):
        wrong = next((ins for ins in row if not isinstance(ins, Instruction)), None)
        if wrong is not None:
            raise PlanError(f"pass {name!r}: rank {rank} has {wrong!r}, which is no Instruction")
