"""Parameter servers with a pipeline that never drains: each stage pushes updates and pulls versions of its own.

Source: Park et al., "HetPipe: Enabling Large DNN Training on (Whimpy) Heterogeneous GPU Clusters through Integration of
Pipelined Model Parallelism and Data Parallelism", USENIX ATC 2020. A replica, which is such a pipeline, is a "virtual
worker" there.

    rank 0   PULL v0 | F0 F1 B0 | PUSH 0, PULL v1 | F2 B1 | PUSH 1, PULL v2 | F3 ...
    rank 1   PULL v0 | F0 B0 | PUSH 0, PULL v1 | F1 B1 | PUSH 1, PULL v2 | F2 B2 | PUSH 2 ...
    server             ACCEPT 0 of rank 1 of all replicas, APPLY, REPLY v1 to it | the same of rank 0 | ...

The pass "versions" has said which version of its parameters each forward and backward uses, and where a rank updates
them. There a rank now pushes its gradients, and pulls what the servers make of them as its next version. So in mode
sync the numbers are those of replicas that sum the gradients of an update among themselves. Each group is updated as
soon as all replicas have pushed its gradient, and answered at once: no stage waits for another one at an update. After
the last update nothing is pulled.

A version is there when all servers have sent their parts of it. The first PULL of these makes room for it, and frees
the version before it if nothing needs that any more: then it is in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from minipar.program import Instruction, Op, Portion, grad, home, param, served, served_state
from minipar.program.mesh import Mesh
from minipar.strategies import served_order
from minipar.strategies.draft import Draft
from minipar.strategies.rewriting import insert, last_writes
from minipar.strategies.shares import Shares, checked_shares, kept_shares, piece, whole


def push_and_pull_versions(draft: Draft) -> Draft:
    """Stages push gradients and pull versions of their own; servers, ranks after the workers, update."""
    layout, plan = draft.layout, draft.plan
    shares = checked_shares(layout.shape.groups, plan.servers, draft.state)
    rows = [_with_service(draft, rank, shares) for rank in range(layout.pp)]
    workers = [rows[layout.mesh.coordinates(rank)["pp"]] for rank in range(layout.mesh.size)]
    kept = list(map(whole, kept_shares(shares, layout.shape.groups, Mesh(plan.shared))))
    servers: list[list[Instruction]] = [[] for _ in shares]
    last = max(ins.step for row in rows for ins in row if ins.op is Op.PUSH)
    for update in range(last + 1):
        blocks = [[ins for ins in row if ins.step == update] for row in workers]
        made = served_order.by_layer(update, update == last, kept, blocks)
        for row, more in zip(servers, made, strict=True):
            row += more
    held = [frozenset(value for value in state if home(value).kind == "param") for state in draft.state]
    held += [frozenset(map(served, share)) | frozenset(map(served_state, share)) for share in shares]
    return replace(draft, ranks=(*map(tuple, rows), *map(tuple, servers)), state=tuple(held))


def _with_service(draft: Draft, rank: int, shares: Shares) -> list[Instruction]:
    """A rank of the first replica that pushes and pulls where it would update its parameters."""
    row, early = draft.ranks[rank], draft.plan.overlap == "backward"
    groups = draft.layout.trainable(rank)
    ends = [k for k, ins in enumerate(row) if ins.op is Op.STEP]
    result = _pulls(draft, groups, shares, 0, frozenset())
    begin = 0
    for end in ends:
        part, step = row[begin:end], row[end]
        last = last_writes(part, "grad")
        after: dict[int, list[Instruction]] = {}
        for g in sorted(groups, key=lambda g: (last[g], g)):
            after.setdefault(last[g] if early else len(part) - 1, []).extend(_pushes(draft, g, shares, step.step))
        result += insert(part, after=after)
        if end != ends[-1]:
            result += _pulls(draft, groups, shares, step.step + 1, frozenset(step.frees))
        begin = end + 1
    return [*result, *row[begin:]]


def _pushes(draft: Draft, group: int, shares: Shares, update: int) -> list[Instruction]:
    """The PUSHes of a group's gradient, one to each server that keeps some of it; the last one frees it."""
    homes = [server for server, share in enumerate(shares) if group in share]
    size = draft.layout.mesh.size
    made = [piece(Op.PUSH, Portion(group), shares[server][group], update, size + server) for server in homes]
    reads = [push._replace(reads=(grad(group),)) for push in made]
    return [*reads[:-1], reads[-1]._replace(frees=(grad(group),))]


def _pulls(
    draft: Draft, groups: Sequence[int], shares: Shares, version: int, gone: frozenset[object]
) -> list[Instruction]:
    """The PULLs of a version of some groups, from each server that keeps some of them. `gone`: what nothing needs once
    it comes."""
    found: list[Instruction] = []
    for g in groups:
        homes = [server for server, share in enumerate(shares) if g in share]
        size = draft.layout.mesh.size
        made = [piece(Op.PULL, Portion(g), shares[server][g], version, size + server) for server in homes]
        made = [pull._replace(writes=(param(g, version),)) for pull in made]
        before = param(g, version - 1)
        found += [made[0]._replace(frees=(before,) if before in gone else ()), *made[1:]]
    return found
