"""Transfers are derived: a value read on one rank and written on another is sent and received, nobody writes that down.

    rank 0   F 0 mb0 -> output(0)                    rank 0   F 0 mb0 | SEND output(0) mb0 -> 1
                                          becomes
    rank 1   F 1 mb0 <- output(0)                    rank 1   RECV output(0) mb0 <- 0 | F 1 mb0

SEND stands right after the producer, and the last one frees the sender's copy when it is done; RECV stands right before
its reader. Receive order equals send order on each link (NCCL has no tags), so a RECV whose reader comes late may move
up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minipar.program import Instruction, Op, Value

MOVES = ("output", "grad_output")


def insert_transfers(ranks: Mapping[int, Sequence[Instruction]]) -> dict[int, list[Instruction]]:
    """The ranks of one replica with SEND and RECV inserted; `ranks` maps rank number to instructions."""
    producer: dict[Value, tuple[int, int]] = {}
    for rank, instructions in ranks.items():
        for k, ins in enumerate(instructions):
            for value in ins.writes:
                if value.kind in MOVES:
                    producer[value] = (rank, k)

    # (value, position of its producer, position of its first reader) per link
    links: dict[tuple[int, int], list[tuple[int, int, Value]]] = {}
    local: set[tuple[int, Value]] = set()
    seen: set[tuple[int, Value]] = set()
    last_target: dict[Value, int] = {}
    for rank, instructions in ranks.items():
        for k, ins in enumerate(instructions):
            for value in ins.reads:
                if value.kind not in MOVES or value not in producer:
                    continue
                source, position = producer[value]
                if source == rank:
                    local.add((rank, value))
                elif (rank, value) not in seen:
                    seen.add((rank, value))
                    last_target[value] = rank
                    links.setdefault((source, rank), []).append((position, k, value))

    after: dict[int, dict[int, list[Instruction]]] = {rank: {} for rank in ranks}
    before: dict[int, dict[int, list[Instruction]]] = {rank: {} for rank in ranks}
    for (source, target), moves in links.items():
        moves.sort()
        reader = len(ranks[target])
        placed = []
        for _, k, value in reversed(moves):
            reader = min(reader, k)  # not later than any receive after it
            placed.append((reader, value))
        for reader, value in reversed(placed):
            recv = Instruction(
                Op.RECV, (value.index,), value.microbatch, value.step, (), (value,), (), f"recv {source}", source
            )
            before[target].setdefault(reader, []).append(recv)
        for position, _, value in moves:
            frees = () if (source, value) in local or last_target[value] != target else (value,)
            send = Instruction(
                Op.SEND, (value.index,), value.microbatch, value.step, (value,), (), frees, f"send {target}", target
            )
            after[source].setdefault(position, []).append(send)

    result = {}
    for rank, instructions in ranks.items():
        merged: list[Instruction] = []
        early, late = before[rank], after[rank]
        for k, ins in enumerate(instructions):
            if k in early:
                merged += early[k]
            merged.append(ins)
            if k in late:
                merged += late[k]
        result[rank] = merged
    return result
