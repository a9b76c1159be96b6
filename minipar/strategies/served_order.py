"""Programs of parameter servers as they happened, made from the order in which servers applied and answered.

    order      ANSWER w0 | ANSWER w1 | TAKE w1 step 0, APPLY | ANSWER w1 | TAKE w0 step 0, APPLY ...
    server     REPLY ->0 | REPLY ->1 | ACCEPT <-1, APPLY     | REPLY ->1 | ACCEPT <-0, APPLY     ...

A worker of the order is a replica, or a stage of one (`Program.served_workers`). Where it has several ranks, each of
them is answered, and its gradient accepted:

    order      ANSWER w0            | TAKE w0 step 0, APPLY              w0: ranks 0 and 1
    server     REPLY ->0, REPLY ->1 | ACCEPT <-0, ACCEPT <-1, APPLY

In mode sync the order, and so the program, is known before the run. Where layers are served by priority, each of them
is applied and answered by itself:

    server     REPLY 0, 1, 2 ->all | ACCEPT 2 <-all, APPLY 2, REPLY 2 ->all | ACCEPT 0 <-all, APPLY 0, REPLY 0 ->all ...

So is each piece, where a layer is served in pieces.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from minipar.program import Instruction, Op, Part, Portion, Program, portions, pushed, served, served_state
from minipar.program.server_rule import Kind, Row

Blocks = Mapping[int, Sequence[Instruction]]


def in_step(replicas: int, step: int) -> list[Row]:
    """The log of a step in mode sync: an answer for every worker, then a gradient from every worker, then an update."""
    order = [Row(Kind.ANSWER, w, step, step) for w in range(replicas)]
    order += [Row(Kind.TAKE, w, step, step) for w in range(replicas)]
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
    blocks: list[dict[int, list[Instruction]]] = [{} for _ in range(workers)]
    for rank in range(workers):
        for ins in template.ranks[rank]:
            blocks[rank].setdefault(ins.step, []).append(ins)
    if template.virtual_workers:  # (whose steps overlap: each does all of them)
        ranks = list(template.ranks[:workers])
    else:
        steps: list[list[int]] = [[] for _ in range(template.replicas)]
        for k in completed(order):
            steps[order[k].worker].append(order[k].step)
        ranks = [tuple(ins for s in steps[template.replica(r)] for ins in blocks[r][s]) for r in range(workers)]
    return replace(template, ranks=(*ranks, *of_servers(order, shares, blocks, template.served_workers)))


def of_servers(
    order: Sequence[Row],
    shares: Sequence[dict[int, int]],
    blocks: Sequence[Blocks],
    replicas: Sequence[Sequence[int]],
) -> list[tuple[Instruction, ...]]:
    """The instructions of each server, from the order of what they did.

    blocks     for each rank that is no server: step -> its instructions
    replicas   for each worker of the order its ranks
    """
    done = completed(order)
    used = {id(answer) for answer in done.values()}
    return [tuple(_server(server, share, order, done, used, blocks, replicas)) for server, share in enumerate(shares)]


def _server(
    server: int,
    share: dict[int, int],
    order: Sequence[Row],
    done: dict[int, Row],
    used: set[int],
    blocks: Sequence[Blocks],
    replicas: Sequence[Sequence[int]],
) -> list[Instruction]:
    rank = len(blocks) + server
    result: list[Instruction] = []
    taken: list[Instruction] = []
    for k, row in enumerate(order):
        if row.kind is Kind.ANSWER and id(row) in used:
            result += [
                reply(pull, r) for r in replicas[row.worker] for pull in _with(rank, Op.PULL, blocks[r][row.step])
            ]
        elif k in done:
            accepts = [
                accept(push, r) for r in replicas[row.worker] for push in _with(rank, Op.PUSH, blocks[r][row.step])
            ]
            if row.kind is Kind.TAKE:
                taken += accepts
            else:  # a dropped gradient is freed at once
                accepts = [ins._replace(frees=ins.writes) for ins in accepts]
            result += accepts
        elif row.kind is Kind.APPLY and taken:  # (of some stages a server may have nothing)
            some = dict.fromkeys(one for ins in taken for one in portions(ins))
            result.append(update({one: share[one.group] for one in some}, row.version, taken))
            taken = []
    return result


def is_by_layer(program: Program) -> bool:
    """Whether servers update and answer some layers before others, in an order that is known before the run."""
    if program.virtual_workers:
        return program.serving is not None and program.serving.mode == "sync"
    pulls = Counter(
        (rank, ins.peer, ins.step)
        for rank in range(program.workers)
        for op, ins in zip(program.ops[rank], program.ranks[rank], strict=True)
        if op is Op.PULL
    )
    return max(pulls.values(), default=0) > 1


def by_layer(
    step: int, last: bool, shares: Sequence[dict[Portion, int]], blocks: Sequence[Sequence[Instruction]]
) -> list[tuple[Instruction, ...]]:
    """The instructions of each server in a step in which every gradient, or piece of one, is applied by itself, as soon
    as all workers have pushed it, and answered at once with the parameters of the next step.

    shares   bytes of what each server serves by itself
    blocks   for each worker its instructions of this step, those of the next one being the same
    """
    return [tuple(_server_by_layer(step, last, server, share, blocks)) for server, share in enumerate(shares)]


def _server_by_layer(
    step: int, last: bool, server: int, share: dict[Portion, int], blocks: Sequence[Sequence[Instruction]]
) -> list[Instruction]:
    rank = len(blocks) + server
    pulls = [deque(_with(rank, Op.PULL, block)) for block in blocks]
    pushes = [{portions(push): push for push in _with(rank, Op.PUSH, block)} for block in blocks]
    result = [reply(pull, worker) for worker, mine in enumerate(pulls) for pull in mine] if step == 0 else []
    new: set[Portion] = set()
    for some in _merged(tuple(mine) for mine in pushes):
        taken = [accept(mine[some], worker) for worker, mine in enumerate(pushes) if some in mine]
        result += [*taken, update({portion: share[portion] for portion in some}, step, taken)]
        new.update(some)
        for worker, waiting in enumerate(pulls if not last else ()):
            while waiting and new.issuperset(portions(waiting[0])):
                result.append(reply(waiting.popleft()._replace(step=step + 1), worker))
    return result


def _merged(lists: Iterable[tuple[tuple[Portion, ...], ...]]) -> Iterator[tuple[Portion, ...]]:
    """All that stands in some lists, each once and in an order that agrees with every list."""
    rows = list(dict.fromkeys(lists))
    places = [{one: k for k, one in enumerate(row)} for row in rows]
    at = [0] * len(rows)
    while left := [r for r, row in enumerate(rows) if at[r] < len(row)]:
        heads = {rows[r][at[r]]: at[r] for r in sorted(left, key=lambda r: -at[r])}
        free = [head for head in heads if not any(places[r].get(head, -1) > at[r] for r in left)]
        some = min(free or heads, key=heads.__getitem__)  # (where no order agrees, verify says so)
        yield some
        for r in left:
            at[r] += rows[r][at[r]] == some


def _with(rank: int, op: Op, block: Sequence[Instruction]) -> list[Instruction]:
    """A worker's instructions of one kind that have to do with a server."""
    return [ins for ins in block if ins.op is op and ins.peer == rank]


def accept(push: Instruction, worker: int) -> Instruction:
    """A server's ACCEPT of what a worker pushes."""
    return _answer(push, Op.ACCEPT, worker)._replace(
        writes=tuple(pushed(one.group, worker, push.step, one.form) for one in portions(push))
    )


def reply(pull: Instruction, worker: int) -> Instruction:
    """A server's REPLY to a worker that pulls."""
    return _answer(pull, Op.REPLY, worker)._replace(reads=tuple(map(served, pull.layers)))


def _answer(ins: Instruction, op: Op, worker: int) -> Instruction:
    parts = tuple(part._replace(op=op) for part in ins.parts)
    return Instruction(op, ins.layers, -1, ins.step, stream=f"{op.value.lower()} {worker}", peer=worker, parts=parts)


def update(share: Mapping[Portion, int], version: int, taken: Iterable[Instruction]) -> Instruction:
    """The APPLY of a server that serves so many bytes of these, of the gradients that these instructions accept."""
    parts = tuple(Part(Op.APPLY, one.group, size, one.start, one.end) for one, size in sorted(share.items()))
    groups = tuple(part.layer for part in parts)
    state = tuple(served(g) for g in groups) + tuple(served_state(g) for g in groups)
    values = tuple(value for ins in taken for value in ins.writes)
    return Instruction(Op.APPLY, groups, -1, version, values + state, state, values, parts=parts)
