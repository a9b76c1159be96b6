"""Programs of parameter servers as they happened, made from the order in which servers applied and answered.

    order      ANSWER w0 | ANSWER w1 | TAKE w1 step 0, APPLY | ANSWER w1 | TAKE w0 step 0, APPLY ...
    server     REPLY ->0 | REPLY ->1 | ACCEPT <-1, APPLY     | REPLY ->1 | ACCEPT <-0, APPLY     ...

In mode sync the order, and so the program, is known before the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from minipar.program import Instruction, Op, Part, Program, pushed, served, served_state
from minipar.program.server_rule import Kind, Row
from minipar.strategies.shares import message

Blocks = Mapping[int, Sequence[Instruction]]


def in_step(workers: int, step: int) -> list[Row]:
    """The log of a step in mode sync: an answer for every worker, then a gradient from every worker, then an update."""
    order = [Row(Kind.ANSWER, w, step, step) for w in range(workers)]
    order += [Row(Kind.TAKE, w, step, step) for w in range(workers)]
    return [*order, Row(Kind.APPLY, -1, -1, step)]


def completed(order: Sequence[Row]) -> dict[int, Row]:
    """For each gradient that arrived, by its place in the order: the answer whose parameters it was computed from.

    It has no answers to workers that died before they pushed.
    """
    answers: dict[tuple[int, int], Row] = {}
    found = {}
    for k, row in enumerate(order):
        if row.kind is Kind.ANSWER:
            answers[row.worker, row.step] = row
        elif row.kind in (Kind.TAKE, Kind.DROP) and (row.worker, row.step) in answers:
            found[k] = answers[row.worker, row.step]
    return found


def as_it_happened(template: Program, order: Sequence[Row], shares: Sequence[dict[int, int]]) -> Program:
    """The program of an order: `template` with the steps that its workers did, and the instructions of its servers.

    shares   what each server keeps, from `shares.shares_of`
    """
    workers = template.workers
    steps: list[list[int]] = [[] for _ in range(workers)]
    for k in completed(order):
        steps[order[k].worker].append(order[k].step)
    blocks: list[dict[int, list[Instruction]]] = [{} for _ in range(workers)]
    for w in range(workers):
        for ins in template.ranks[w]:
            blocks[w].setdefault(ins.step, []).append(ins)
    ranks = [tuple(ins for s in steps[w] for ins in blocks[w][s]) for w in range(workers)]
    return replace(template, ranks=(*ranks, *of_servers(order, shares, blocks)))


def of_servers(
    order: Sequence[Row], shares: Sequence[dict[int, int]], blocks: Sequence[Blocks]
) -> list[tuple[Instruction, ...]]:
    """The instructions of each server, from the order of what they did.

    blocks   for each worker: step -> its instructions
    """
    done = completed(order)
    used = {id(answer) for answer in done.values()}
    return [tuple(_server(server, share, order, done, used, blocks)) for server, share in enumerate(shares)]


def _server(
    server: int,
    share: dict[int, int],
    order: Sequence[Row],
    done: dict[int, Row],
    used: set[int],
    blocks: Sequence[Blocks],
) -> list[Instruction]:
    workers = len(blocks)
    state = tuple(served(g) for g in sorted(share))
    result: list[Instruction] = []
    taken: list[Row] = []
    for k, row in enumerate(order):
        if row.kind is Kind.ANSWER and id(row) in used:
            reply = message(Op.REPLY, sorted(share), share, row.step, row.worker)
            result.append(reply._replace(reads=state))
        elif k in done:
            for ins in blocks[row.worker][row.step]:
                if ins.op is Op.PUSH and ins.peer == workers + server:
                    values = tuple(pushed(g, row.worker, row.step) for g in ins.layers)
                    accept = message(Op.ACCEPT, ins.layers, share, row.step, row.worker)
                    accept = accept._replace(parts=tuple(part._replace(op=Op.ACCEPT) for part in ins.parts))
                    late = values if row.kind is Kind.DROP else ()  # a dropped gradient is freed at once
                    result.append(accept._replace(writes=values, frees=late))
            if row.kind is Kind.TAKE:
                taken.append(row)
        elif row.kind is Kind.APPLY:
            result.append(update(share, row, taken))
            taken = []
    return result


def update(share: dict[int, int], row: Row, taken: Sequence[Row]) -> Instruction:
    """The APPLY of a server with this share. It uses the gradients of the rows in `taken`."""
    groups = tuple(sorted(share))
    state = tuple(served(g) for g in groups) + tuple(served_state(g) for g in groups)
    values = tuple(pushed(g, take.worker, take.step) for take in taken for g in groups)
    parts = tuple(Part(Op.APPLY, g, share[g]) for g in groups)
    return Instruction(Op.APPLY, groups, -1, row.version, values + state, state, values, parts=parts)
