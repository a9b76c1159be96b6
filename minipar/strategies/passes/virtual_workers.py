"""Parameter servers with a pipeline that never drains: each stage pushes updates and pulls versions of its own.

Source: Park et al., "HetPipe: Enabling Large DNN Training on (Whimpy) Heterogeneous GPU Clusters through Integration of
Pipelined Model Parallelism and Data Parallelism", USENIX ATC 2020. A replica, which is such a pipeline, is a "virtual
worker" there.

    schedule=pipedream: an update for each micro-batch
    rank 0   PULL v0 | F0 F1 B0 | PUSH 0 | PULL v1 | F2 B1 | PUSH 1 | PULL v2 | F3 B2 ...
    rank 1   PULL v0 | F0 B0 | PUSH 0 | PULL v1 | F1 B1 | PUSH 1 | PULL v2 | F2 B2 | PUSH 2 ...
    server             ACCEPT 0 of rank 1 of all replicas, APPLY, REPLY v1 to it | the same of rank 0 | ...

    schedule=pipedream-2bw: an update for each step, here of 2 micro-batches; two versions in turn
    rank 1   PULL v0 | F0 B0 F1 B1 | PUSH 0 | F2 B2 F3 B3 with v0 | PULL v1, PUSH 1 | F4 B4 F5 B5 with v1 ...
                                            '------- time to sum, update and send v1 -------'

The pass "versions" has said which version of its parameters each forward and backward uses, and where a rank updates
them. There a rank now pushes its gradients, and what the servers make of them is its next version. So in mode sync the
numbers are those of replicas that sum the gradients of an update among themselves. Each layer is updated as soon as all
replicas have pushed its gradient, and answered at once: no stage waits for another one at an update.

A rank waits for a version where it first uses it, or before it pushes to the update after it: its connections are at
one version at a time. Nobody pulls what the last update makes. A version is there when all servers have sent their
parts of it. The first PULL of these makes room for it, and frees the version before it if nothing needs that any more:
then it is in its place.

With offload=parameters a rank pulls versions to the host (or the disk). It fetches each where it is used, and what uses
it last frees it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Sequence
from dataclasses import replace

from minipar.program import Instruction, Op, Portion, Value, home, served, served_state, version_of
from minipar.program.mesh import Mesh
from minipar.strategies import served_order
from minipar.strategies.draft import Draft
from minipar.strategies.rewriting import insert
from minipar.strategies.shares import (
    Shares,
    checked_shares,
    held_between,
    kept_shares,
    left_out,
    piece,
    pushed_shares,
    whole,
)


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
    held = [held_between(row, state) for row, state in zip(rows, draft.state, strict=True)]
    held += [frozenset(map(served, share)) | frozenset(map(served_state, share)) for share in shares]
    return replace(draft, ranks=(*map(tuple, rows), *map(tuple, servers)), state=tuple(held))


def _with_service(draft: Draft, rank: int, shares: Shares) -> list[Instruction]:
    """A rank of the first replica that pushes what it would update its parameters with, and pulls each version when it
    needs it."""
    own = [value for value in sorted(draft.state[rank]) if home(value).kind == "param" and version_of(value) >= 0]
    row = _pushing(draft, rank)
    needed: dict[int, int] = {}  # version -> the place where it must have been pulled
    freed: dict[Value, int] = {}  # a version of a group -> the place where nothing needs it any more
    for k, ins in enumerate(row):
        if ins.op is not Op.STEP:
            needed.setdefault(ins.step if ins.op is Op.PUSH else max(map(version_of, ins.reads), default=-1), k)
        here = [value for value in ins.frees if value._replace(step=0) in own]
        freed.update((value, k) for value in here if ins.op is not Op.FETCH)  # (which frees what it has copied)
    over = {value for value, k in freed.items() if k < needed.get(value.step + 1, len(row))}  # another comes over it
    kept = [ins._replace(frees=tuple(value for value in ins.frees if value not in over)) for ins in row]
    pulls = {k: _pulls(draft, own, shares, version, over) for version, k in needed.items() if version >= 0}
    return [ins for ins in insert(kept, before=pulls) if ins.op is not Op.STEP]


def _pushing(draft: Draft, rank: int) -> list[Instruction]:
    """The row with PUSHes of each update before its STEP."""
    row, early = draft.ranks[rank], draft.plan.overlap == "backward"
    last: dict[int, tuple[int, Value]] = {}  # group -> the place where its gradient is written last, and that
    after = defaultdict[int, list[Instruction]](list)
    for k, ins in enumerate(row):
        if ins.op is not Op.STEP:
            last.update((value.index, (k, value)) for value in ins.writes if home(value).kind == "grad")
            continue
        for place, gradient in sorted(last[g] for g in ins.layers):
            after[place if early else k - 1] += _pushes(draft, gradient, ins.step)
    return insert(row, after=after)


def _pushes(draft: Draft, gradient: Value, update: int) -> list[Instruction]:
    """The PUSHes of a gradient, one to each server that keeps some of its group; the last one frees it."""
    g, size, choice = gradient.index, draft.layout.mesh.size, draft.plan.compress
    sent = pushed_shares(draft.layout.shape, draft.plan.servers, choice)
    left = left_out([g], choice)
    found = [piece(Op.PUSH, Portion(g), share[g], update, size + k) for k, share in enumerate(sent) if g in share]
    found = [push._replace(reads=(gradient, *left), writes=left) for push in found]
    return [*found[:-1], found[-1]._replace(frees=(gradient,))]


def _pulls(
    draft: Draft, own: Sequence[Value], shares: Shares, version: int, over: Container[Value]
) -> list[Instruction]:
    """The PULLs of a version of a rank's own parameters, from each server that keeps some of them. `over`: the versions
    in whose place the next one comes."""
    size, found = draft.layout.mesh.size, list[Instruction]()
    for value in own:
        g, before = value.index, value._replace(step=version - 1)
        made = [piece(Op.PULL, Portion(g), share[g], version, size + k) for k, share in enumerate(shares) if g in share]
        made = [pull._replace(writes=(value._replace(step=version),)) for pull in made]
        found += [made[0]._replace(frees=(before,) if before in over else ()), *made[1:]]
    return found
