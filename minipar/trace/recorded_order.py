"""The order of an asynchronous run: what each rank did, with the version that it used or made. No torch.

    rank 0    forward 0 v0 | forward 1 v0 | backward 0 v0 | update v1 | forward 2 v1 | ...

`replay_order` in `reference.py` trains by this order alone.
"""

from __future__ import annotations

from typing import NamedTuple

from minipar.errors import PlanError
from minipar.program import BACKWARDS, Op, Program, Staleness, version_of
from minipar.program.verify.staleness import delay

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"


class Entry(NamedTuple):
    """One thing that a rank did.

    what         forward, backward or update
    microbatch   its number, counted through the run; -1 for an update
    version      the version of the rank's parameters that a forward or backward used, or that an update made
    """

    what: str
    microbatch: int
    version: int


class RecordedOrder(NamedTuple):
    """What every rank did, in order.

    ranks          the entries of each rank
    layers         the layers of each rank
    microbatches   micro-batches of a step
    every          micro-batches of an update, each with a mean loss of its own; None: an update uses all micro-batches
                   of a step, which have one mean loss
    delays         for each rank, how many updates old its gradients are; its optimizer gets this number
    replicas       each of which does all this on rows of its own; their gradients are added up for every update
    local          0, or: every replica has updates of its own, and the parameters of a rank are averaged over replicas
                   after so many of its updates, and after its last one
    """

    ranks: tuple[tuple[Entry, ...], ...]
    layers: tuple[tuple[int, ...], ...]
    microbatches: int
    every: int | None
    delays: tuple[int, ...]
    replicas: int = 1
    local: int = 0

    def __str__(self) -> str:
        return "\n".join(
            f"rank {r}  " + " | ".join(f"{e.what} {e.microbatch if e.what != UPDATE else ''} v{e.version}" for e in row)
            for r, row in enumerate(self.ranks)
        )


def order_of(program: Program) -> RecordedOrder:
    """The order that a program states. For a run that decided, use `Execution.program` or `Trace.program`.

    Of replicas it is the order of the first one.

    Errors: PlanError for a synchronous program, and for one whose ranks have not decided yet."""
    if not isinstance(program.contract, Staleness) or program.in_flight is not None:
        raise PlanError(
            f"program {program.name!r}: has no recorded order; possible is an asynchronous one that has run"
        )
    chosen = range(program.workers)
    first = [rank for rank in chosen if program.replica(rank) == 0]
    orders = {rank: _of_rank(program, rank) for rank in dict.fromkeys(map(program.representatives.__getitem__, chosen))}
    for k, rank in enumerate(chosen):
        if orders[program.representatives[rank]] != orders[first[k % len(first)]]:
            raise PlanError(f"program {program.name!r}: rank {rank} does not do what its replicas do, in their order")
    delays = tuple(delay(program, rank) for rank in first)
    layers = tuple(program.placement[rank] for rank in first)
    found = tuple(orders[rank] for rank in first)
    every, local = program.contract.every, program.local_steps
    return RecordedOrder(found, layers, program.microbatches, every, delays, program.replicas, local)


def _of_rank(program: Program, rank: int) -> tuple[Entry, ...]:
    entries: dict[tuple[str, int], Entry] = {}
    for ins in program.ranks[rank]:
        i = ins.step * program.microbatches + ins.microbatch
        if ins.op is program.last_of_update:
            entries[UPDATE, ins.step + 1] = Entry(UPDATE, -1, ins.step + 1)
        elif ins.op is Op.FORWARD or ins.op in BACKWARDS:
            what = FORWARD if ins.op is Op.FORWARD else BACKWARD
            # A backward may consist of several instructions, and some of these read no parameters.
            before = entries.get((what, i), Entry(what, i, 0)).version
            entries[what, i] = Entry(what, i, max(before, *map(version_of, ins.reads)))
    return tuple(entries.values())
