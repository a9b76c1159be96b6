"""The log of a run that is not one device's: who did what, with the parameters of which version. No torch.

    rank 0    forward 0 v0 | forward 1 v0 | backward 0 v0 | update v1 | forward 2 v1 | ...

`Replay` in `reference.py` trains by such a log alone. One is made of an asynchronous pipeline's program, one of what
parameter servers did, and one of replicas that are averaged after some steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from minipar.errors import PlanError
from minipar.program import BACKWARDS, Op, Program, Staleness, version_of
from minipar.program.rule import order
from minipar.program.server_rule import Kind, Row
from minipar.program.verify.staleness import delay
from minipar.strategies.served_order import completed

FORWARD, BACKWARD, UPDATE, DROP, AVERAGE = "forward", "backward", "update", "drop", "average"


class Entry(NamedTuple):
    """One thing that was done.

    rank         replica * stages + stage; an update is done by the first rank that has these parameters
    what         forward, backward or update; drop: what this rank has added up since the last update is left out of the
                 next one; average: of the parameters of all replicas
    microbatch   its number, counted through the run; -1 where there is none. Each replica has rows of its own in it
    version      of the parameters: which one a forward or backward used, or what an update or an average made
    """

    rank: int
    what: str
    microbatch: int
    version: int


class RecordedOrder(NamedTuple):
    """What was done, in an order in which it can be done.

    entries        what was done
    layers         the layers of each stage; (): one stage has the whole model
    microbatches   of a step, on each replica
    every          micro-batches of an update, each with a mean loss of its own; None: the rows of a step have one mean
    delays         for each stage, how many updates old its gradients are; its optimizer gets this number. (): it does
                   not
    replicas       each of which works on rows of its own
    local          every replica has parameters of its own; else an update is of what all have added up
    served         the gradients that are kept are those of each replica, as they arrived; else those of each update
    """

    entries: tuple[Entry, ...]
    layers: tuple[tuple[int, ...], ...] = ()
    microbatches: int = 1
    every: int | None = None
    delays: tuple[int, ...] = ()
    replicas: int = 1
    local: bool = False
    served: bool = False


def order_of(program: Program) -> RecordedOrder:
    """The log of an asynchronous pipeline. For a run that decided, use `Execution.program` or `Trace.program`.

    Errors: PlanError for a synchronous program, and for one whose ranks have not decided yet."""
    if not isinstance(program.contract, Staleness) or program.in_flight is not None:
        raise PlanError(
            f"program {program.name!r}: has no recorded order; possible is an asynchronous one that has run"
        )
    chosen = range(program.workers)
    first = [rank for rank in chosen if program.replica(rank) == 0]
    entries = _of_stages(program, first)
    for rank in sorted({program.representatives[rank] for rank in chosen}.difference(first)):
        stage = chosen.index(rank) % len(first)
        like = [entry._replace(rank=0) for entry in entries if entry.rank == stage]
        if _of_stages(program, [rank]) != like:
            raise PlanError(f"program {program.name!r}: rank {rank} does not do what its replicas do, in their order")
    every_replica = tuple(
        entry._replace(rank=replica * len(first) + entry.rank)
        for entry in entries
        for replica in range(1 if entry.what == UPDATE else program.replicas)
    )
    delays = tuple(delay(program, rank) for rank in first)
    layers = tuple(program.placement[rank] for rank in first)
    return RecordedOrder(every_replica, layers, program.microbatches, program.contract.every, delays, program.replicas)


def _of_stages(program: Program, ranks: Sequence[int]) -> list[Entry]:
    """What these ranks did, each of which is a stage."""
    entries: dict[tuple[int, str, int], Entry] = {}
    for rank, _, ins, _, _ in order(program):
        if ins is None or rank not in ranks:
            continue
        i, stage = ins.step * program.microbatches + ins.microbatch, ranks.index(rank)
        if ins.op is Op.STEP:
            entries[stage, UPDATE, ins.step + 1] = Entry(stage, UPDATE, -1, ins.step + 1)
        elif ins.op is Op.FORWARD or ins.op in BACKWARDS:
            what = FORWARD if ins.op is Op.FORWARD else BACKWARD
            # A backward may consist of several instructions, and some of these read no parameters.
            before = entries.get((stage, what, i), Entry(stage, what, i, 0)).version
            entries[stage, what, i] = Entry(stage, what, i, max(before, *map(version_of, ins.reads)))
    return list(entries.values())


def served_order(rows: Sequence[Row], workers: int, microbatches: int) -> RecordedOrder:
    """The log of parameter servers: each gradient that arrived is of the version that its worker had been given."""
    answers, entries = completed(rows), []
    for k, row in enumerate(rows):
        if k in answers:
            version = answers[k].version
            for i in range(row.step * microbatches, (row.step + 1) * microbatches):
                entries += [Entry(row.worker, FORWARD, i, version), Entry(row.worker, BACKWARD, i, version)]
            if row.kind is Kind.DROP:
                entries.append(Entry(row.worker, DROP, -1, version))
        elif row.kind is Kind.APPLY:
            entries.append(Entry(0, UPDATE, -1, row.version + 1))
    return RecordedOrder(tuple(entries), microbatches=microbatches, replicas=workers, served=True)


def local_order(steps: int, replicas: int, microbatches: int, every: int) -> RecordedOrder:
    """The log of Local SGD: replicas are averaged after every `every` steps, and after the last one."""
    entries = []
    for step in range(steps):
        for replica in range(replicas):
            for i in range(step * microbatches, (step + 1) * microbatches):
                entries += [Entry(replica, FORWARD, i, step), Entry(replica, BACKWARD, i, step)]
            entries.append(Entry(replica, UPDATE, -1, step + 1))
        if (step + 1) % every == 0 or step == steps - 1:
            entries.append(Entry(0, AVERAGE, -1, step + 1))
    return RecordedOrder(tuple(entries), microbatches=microbatches, replicas=replicas, local=True)
