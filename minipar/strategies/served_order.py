"""Programs of parameter servers as they happened, made from the order in which servers applied and answered.

    order      ANSWER w0 | ANSWER w1 | TAKE w1 step 0, APPLY | ANSWER w1 | TAKE w0 step 0, APPLY ...
    server     REPLY ->0 | REPLY ->1 | ACCEPT <-1, APPLY     | REPLY ->1 | ACCEPT <-0, APPLY     ...

In mode sync the order, and so the program, is known before the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from minipar.program import Instruction, Op, Part, Program, pushed, served, served_state
from minipar.program.server_rule import Kind, Row

Blocks = Mapping[int, Sequence[Instruction]]  # of a worker: step -> its instructions


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


def blocks_of(program: Program, worker: int) -> dict[int, list[Instruction]]:
    """A worker's instructions, by step."""
    blocks: dict[int, list[Instruction]] = {}
    for ins in program.ranks[worker]:
        blocks.setdefault(ins.step, []).append(ins)
    return blocks


def as_it_happened(template: Program, order: Sequence[Row], shares: Sequence[dict[int, int]]) -> Program:
    """The program of an order: `template` with the steps that its workers did, and the instructions of its servers.

    shares   what each server keeps, from `shares.shares_of`
    """
    blocks = [blocks_of(template, worker) for worker in range(template.workers)]
    steps: list[list[int]] = [[] for _ in blocks]
    for k in completed(order):
        steps[order[k].worker].append(order[k].step)
    ranks = [tuple(ins for s in mine for ins in block[s]) for block, mine in zip(blocks, steps, strict=True)]
    return replace(template, ranks=(*ranks, *of_servers(order, shares, blocks)))


def of_servers(
    order: Sequence[Row], shares: Sequence[dict[int, int]], blocks: Sequence[Blocks]
) -> list[tuple[Instruction, ...]]:
    """The instructions of each server, from the order of what they did. `blocks`: of each worker."""
    done = completed(order)
    used = {id(answer) for answer in done.values()}
    return [tuple(_server(len(blocks) + k, share, order, done, used, blocks)) for k, share in enumerate(shares)]


def _server(
    rank: int,
    share: dict[int, int],
    order: Sequence[Row],
    done: dict[int, Row],
    used: set[int],
    blocks: Sequence[Blocks],
) -> list[Instruction]:
    result: list[Instruction] = []
    taken: list[Instruction] = []
    for k, row in enumerate(order):
        if row.kind is Kind.ANSWER and id(row) in used:
            result += [reply(pull, row.worker) for pull in _with(rank, Op.PULL, blocks[row.worker][row.step])]
        elif k in done:
            accepts = [accept(push, row.worker) for push in _with(rank, Op.PUSH, blocks[row.worker][row.step])]
            if row.kind is Kind.TAKE:
                taken += accepts
            else:  # a dropped gradient is freed at once
                accepts = [ins._replace(frees=ins.writes) for ins in accepts]
            result += accepts
        elif row.kind is Kind.APPLY:
            result.append(update(share, row.version, taken))
            taken = []
    return result


def _with(rank: int, op: Op, block: Sequence[Instruction]) -> list[Instruction]:
    """A worker's instructions of one kind that have to do with a server."""
    return [ins for ins in block if ins.op is op and ins.peer == rank]


def accept(push: Instruction, worker: int) -> Instruction:
    """A server's ACCEPT of what a worker pushes."""
    return _answer(push, Op.ACCEPT, worker)._replace(writes=tuple(pushed(g, worker, push.step) for g in push.layers))


def reply(pull: Instruction, worker: int) -> Instruction:
    """A server's REPLY to a worker that pulls."""
    return _answer(pull, Op.REPLY, worker)._replace(reads=tuple(map(served, pull.layers)))


def _answer(ins: Instruction, op: Op, worker: int) -> Instruction:
    parts = tuple(part._replace(op=op) for part in ins.parts)
    return Instruction(op, ins.layers, -1, ins.step, stream=f"{op.value.lower()} {worker}", peer=worker, parts=parts)


def update(share: Mapping[int, int], version: int, taken: Iterable[Instruction]) -> Instruction:
    """The APPLY of a server that keeps so many bytes of these groups, of the gradients that these instructions
    accept."""
    parts = tuple(Part(Op.APPLY, g, size) for g, size in sorted(share.items()))
    groups = tuple(sorted(share))
    state = tuple(served(g) for g in groups) + tuple(served_state(g) for g in groups)
    values = tuple(value for ins in taken for value in ins.writes)
    return Instruction(Op.APPLY, groups, -1, version, values + state, state, values, parts=parts)
