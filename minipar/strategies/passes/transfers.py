"""Transfers are derived: a value read on one rank and written on another is sent and received, nobody writes that down.

    rank 0   F 0 mb0 -> output(0)                    rank 0   F 0 mb0 | SEND output(0) mb0 -> 1
                                          becomes
    rank 1   F 1 mb0 <- output(0)                    rank 1   RECV output(0) mb0 <- 0 | F 1 mb0

SEND stands right after the producer, and the last one frees the sender's copy when it is done; RECV stands right before
its reader. What a forward beside a backward makes (`Forward.beside`) is sent after both. Receive order equals send
order on each link (NCCL has no tags), so a RECV whose reader comes late may move up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from types import MappingProxyType

from minipar.errors import PlanError
from minipar.program import MOVED, Action, Backward, BackwardInput, Forward, Instruction, Op, Value, output, saved
from minipar.strategies.draft import Draft
from minipar.strategies.layout import Layout


def send_and_receive(draft: Draft) -> Draft:
    """A value that is read on another rank than it was written on is sent and received."""
    together = beside(draft.actions, draft.layout, draft.step)
    sent = insert_transfers(dict(enumerate(draft.ranks)), together)
    return draft.each(lambda rank, row: sent[rank])


def beside(actions: Sequence[Iterable[Action]], layout: Layout, step: int) -> dict[Value, Value]:
    """What forwards beside backwards hand on, each with what the first layer of that backward reads.

    PlanError if no backward comes next.
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
    """Micro-batch and step of a micro-batch that is counted from the first one of a step on."""
    return microbatch % layout.microbatches, step + microbatch // layout.microbatches


REST = tuple(Instruction._field_defaults.values())[5:]  # what comes after `peer`, as it is by default


def insert_transfers(
    ranks: Mapping[int, Sequence[Instruction]], together: Mapping[Value, Value] = MappingProxyType({})
) -> dict[int, list[Instruction]]:
    """The ranks of one replica with SEND and RECV inserted; `ranks` maps rank number to instructions.

    together   values that are sent no sooner than another one was read for the last time
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
                # (what comes back from another tier was made before, unless by a layer on the host)
                if value[0] in MOVED and (ins.op is not FETCH or value not in producer):
                    producer[value] = rank, k
    if together:
        last_read = {(r, value): k for r, row in ranks.items() for k, ins in enumerate(row) for value in ins.reads}
        for value in together.keys() & producer.keys():
            rank, k = producer[value]
            producer[value] = (rank, max(k, last_read.get((rank, together[value]), k)))

    # per link, in the order of reading: position of the producer, position of the first reader, value
    links: dict[tuple[int, int], list[tuple[int, int, Value]]] = {}
    read_here: set[Value] = set()  # also by the rank that produces them
    last_target: dict[Value, int] = {}
    again: set[Value] = set()  # by several ranks that do not
    for rank, first in reading.items():
        arriving: dict[int, list[tuple[int, int, Value]]] = {}
        for value, k in first.items():
            source, position = producer.get(value, (rank, k))
            if source == rank:
                read_here.add(value)
                continue
            if value in last_target:
                again.add(value)
            last_target[value] = rank
            if source not in arriving:
                arriving[source] = links[source, rank] = []
            arriving[source].append((position, k, value))

    stay = read_here | again  # what not every SEND frees
    added: dict[int, list[Instruction]] = {rank: list(row) for rank, row in ranks.items()}
    # (instruction k has place 3k, what comes before it 3k - 1, and after it 3k + 1)
    places: dict[int, list[int]] = {rank: [*range(0, 3 * len(row), 3)] for rank, row in ranks.items()}
    new = tuple.__new__  # (takes half the time of Instruction itself)
    for (source, target), moves in links.items():
        moves.sort(key=itemgetter(0))
        messages: list[tuple[int, int, tuple[Value, ...]]] = []  # the last one first
        reader = len(ranks[target])
        for position, k, value in reversed(moves):
            reader = k if k < reader else reader  # not later than any receive after it
            if messages and messages[-1][0] == position:  # at the same moment, for the same rank: one message
                messages[-1] = position, reader, (value, *messages[-1][2])
            else:
                messages.append((position, reader, (value,)))
        to, origin = f"send {target}", f"recv {source}"
        for position, reader, values in reversed(messages):
            _, index, i, step, _ = values[0]
            layers = (index,)
            recv = new(Instruction, (RECV, layers, i, step, (), values, (), origin, source, *REST))
            added[target].append(recv)
            places[target].append(3 * reader - 1)
            frees = values
            if not stay.isdisjoint(values):
                frees = tuple(v for v in values if v not in read_here and last_target[v] == target)
            send = new(Instruction, (SEND, layers, i, step, values, (), frees, to, target, *REST))
            added[source].append(send)
            places[source].append(3 * position + 1)

    orders = {rank: sorted(range(len(found)), key=found.__getitem__) for rank, found in places.items()}
    return {rank: [*map(added[rank].__getitem__, order)] for rank, order in orders.items()}
