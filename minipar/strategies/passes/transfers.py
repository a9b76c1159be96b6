"""Transfers are derived: a value that is written on one rank and read on another one is sent and received.

    rank 0   F 0 mb0 -> output(0)                    rank 0   F 0 mb0 | SEND output(0) mb0 -> 1
                                          becomes
    rank 1   F 1 mb0 <- output(0)                    rank 1   RECV output(0) mb0 <- 0 | F 1 mb0

A SEND comes right after the producer of its value. The last SEND of a value frees the sender's copy when it is done. A
RECV comes right before its reader. The output of a forward beside a backward (`Forward.beside`) is sent after both.
Receive order equals send order on each link (NCCL has no tags), so a RECV may come earlier than right before its
reader.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from types import MappingProxyType

from minipar.errors import PlanError
from minipar.program import MOVED, Action, Backward, BackwardInput, Forward, Instruction, Op, Value, output, saved
from minipar.strategies.draft import Draft
from minipar.strategies.layout import Layout
from minipar.strategies.rewriting import insert


def send_and_receive(draft: Draft) -> Draft:
    """A value that is read on another rank than the one that writes it is sent and received."""
    joined = beside(draft.actions, draft.layout, draft.step)
    sent = insert_transfers(dict(enumerate(draft.ranks)), joined)
    return draft.each(lambda rank, row: sent[rank])


def beside(actions: Sequence[Iterable[Action]], layout: Layout, step: int) -> dict[Value, Value]:
    """The outputs of forwards beside backwards. Each is mapped to the saved value of the layer where that backward
    ends.

    Errors: PlanError if no backward comes next.
    """
    found = {}
    for rank, (stages, chosen) in enumerate(zip(layout.placement, actions, strict=True)):
        for action, after in pairwise([*chosen, None]):
            if isinstance(action, Forward) and action.beside:
                if not isinstance(after, (Backward, BackwardInput)):
                    raise PlanError(
                        f"{action} on rank {rank}: beside=True, but {after} comes next; "
                        "possible are Backward and BackwardInput"
                    )
                layers, trained = layout.layers(stages[action.chunk]), layout.trained(stages[after.chunk])
                if trained:
                    (i, a), (j, b) = (_in_step(each.microbatch, layout, step) for each in (action, after))
                    found[output(layers[-1], i, a)] = saved(trained[0], j, b)
    return found


def _in_step(microbatch: int, layout: Layout, step: int) -> tuple[int, int]:
    """The number within its step, and the step, of a micro-batch that is counted from the first one of `step`."""
    return microbatch % layout.microbatches, step + microbatch // layout.microbatches


REST = tuple(Instruction._field_defaults.values())[5:]  # defaults of the fields after `peer`


def insert_transfers(
    ranks: Mapping[int, Sequence[Instruction]], joined: Mapping[Value, Value] = MappingProxyType({})
) -> dict[int, list[Instruction]]:
    """The ranks of one replica with SEND and RECV inserted. `ranks` maps the number of a rank to its instructions.

    joined   value -> another value: the first is not sent before the second was read for the last time
    """
    producer: dict[Value, tuple[int, int]] = {}
    reading: dict[int, dict[Value, int]] = {}  # where each rank reads a value for the first time
    SEND, RECV, FETCH = Op.SEND, Op.RECV, Op.FETCH
    for rank, instructions in ranks.items():
        first = reading[rank] = {}
        for k, ins in enumerate(instructions):
            for value in ins.reads:
                if value[0] in MOVED and value not in first:
                    first[value] = k
            for value in ins.writes:
                if value[0] in MOVED and ins.op is not FETCH:  # (that brings back what was copied away)
                    producer[value] = rank, k
    if joined:
        last_read = {(r, value): k for r, row in ranks.items() for k, ins in enumerate(row) for value in ins.reads}
        for value in joined.keys() & producer.keys():
            rank, k = producer[value]
            producer[value] = (rank, max(k, last_read.get((rank, joined[value]), k)))

    links: dict[tuple[int, int], list[tuple[int, int, Value]]] = {}  # of each: producer's place, first reader's, value
    read_here: set[Value] = set()  # values that the rank which produces them reads, too
    last_target: dict[Value, int] = {}
    for rank, first in reading.items():
        for value, k in first.items():
            source, position = producer.get(value, (rank, k))
            if source == rank:
                read_here.add(value)
            else:
                last_target[value] = rank
                links.setdefault((source, rank), []).append((position, k, value))

    before: dict[int, list[tuple[int, Instruction]]] = {rank: [] for rank in ranks}
    after: dict[int, list[tuple[int, Instruction]]] = {rank: [] for rank in ranks}
    new = tuple.__new__  # (takes half the time of calling Instruction)
    for (source, target), moves in links.items():
        moves.sort(key=itemgetter(0))
        soonest = [*accumulate((k for _, k, _ in reversed(moves)), min)]  # a receive comes no later than those after it
        for position, run in groupby(moves, key=itemgetter(0)):  # same producer and same target: one message
            values = tuple([value for _, _, value in run])
            _, index, i, step, _ = values[0]
            recv = (RECV, (index,), i, step, (), values, (), f"recv {source}", source, *REST)
            before[target].append((soonest[-1], new(Instruction, recv)))
            del soonest[-len(values) :]
            frees = tuple([v for v in values if last_target[v] == target and v not in read_here])
            send = (SEND, (index,), i, step, values, (), frees, f"send {target}", target, *REST)
            after[source].append((position, new(Instruction, send)))
    return {rank: insert(row, before[rank], after[rank]) for rank, row in ranks.items()}
