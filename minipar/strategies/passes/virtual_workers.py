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
replicas have pushed its gradient, and answered at once: no stage waits for another one at an update. With `bucket=`
several layers go together.

In modes async and ssp every gradient of a stage is an update of its own, at once, and the replica's next version of
this stage is what servers have when it asks. In ssp a stage first waits until it is at most S updates ahead of the same
stage of the slowest replica. (HetPipe bounds the distance D of replicas in waves, of as many micro-batches as a replica
has in flight.) Stages do not wait for each other, so each follows the rule by itself: what a stage pulls is of one
version, and two stages of a replica may have seen different numbers of updates.

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
from itertools import product

from minipar.program import Instruction, Op, Value, home, served, served_state, version_of
from minipar.program.mesh import Mesh
from minipar.program.server_rule import Mode
from minipar.strategies import served_order
from minipar.strategies.buckets import split_buckets
from minipar.strategies.draft import Draft
from minipar.strategies.rewriting import insert, last_writes
from minipar.strategies.shares import (
    Shares,
    checked_shares,
    held_between,
    kept_shares,
    message,
    pushed_shares,
    pushes_of,
    whole,
)


def push_and_pull_versions(draft: Draft) -> Draft:
    """Stages push gradients and pull versions of their own; servers, ranks after the workers, update."""
    layout, plan = draft.layout, draft.plan
    shares = checked_shares(layout.shape.groups, plan.servers, draft.state)
    known = Mode.parse(plan.mode, plan.dp).kind == "sync"  # in the other modes servers decide as they run
    rows = [_with_service(draft, rank, shares, known) for rank in range(layout.pp)]
    workers = [rows[layout.mesh.coordinates(rank)["pp"]] for rank in range(layout.mesh.size)]
    kept = list(map(whole, kept_shares(shares, layout.shape.groups, Mesh(plan.shared))))
    servers: list[list[Instruction]] = [[] for _ in shares]
    last = max(ins.step for row in rows for ins in row if ins.op is Op.PUSH)
    for update in range(last + 1) if known else ():
        blocks = [[ins for ins in row if ins.step == update] for row in workers]
        made = served_order.by_layer(update, update == last, kept, blocks)
        for row, more in zip(servers, made, strict=True):
            row += more
    held = [held_between(row, state) for row, state in zip(rows, draft.state, strict=True)]
    held += [frozenset(map(served, share)) | frozenset(map(served_state, share)) for share in shares]
    return replace(draft, ranks=(*map(tuple, rows), *map(tuple, servers)), state=tuple(held))


def _with_service(draft: Draft, rank: int, shares: Shares, known: bool) -> list[Instruction]:
    """A rank of the first replica that pushes what it would update its parameters with, and pulls each version when it
    needs it: all of it at once, unless layers are updated one by one, or in buckets, as is `known` before the run."""
    own = [value for value in sorted(draft.state[rank]) if home(value).kind == "param" and version_of(value) >= 0]
    buckets = _buckets(draft, rank)
    row = _pushing(draft, rank, buckets)
    pulled = sorted(map(sorted, buckets)) if known else [[value.index for value in own]]
    needed: dict[int, int] = {}  # version -> the place where it must have been pulled
    freed: dict[Value, int] = {}  # a version of a group -> the place where nothing needs it any more
    for k, ins in enumerate(row):
        if ins.op is not Op.STEP:
            needed.setdefault(ins.step if ins.op is Op.PUSH else max(map(version_of, ins.reads), default=-1), k)
        here = [value for value in ins.frees if value._replace(step=0) in own]
        freed.update((value, k) for value in here if ins.op is not Op.FETCH)  # (which frees what it has copied)
    over = {value for value, k in freed.items() if k < needed.get(value.step + 1, len(row))}  # another comes over it
    kept = [ins._replace(frees=tuple(value for value in ins.frees if value not in over)) for ins in row]
    pulls = {k: _pulls(draft, own, pulled, shares, version, over) for version, k in needed.items() if version >= 0}
    return [ins for ins in insert(kept, before=pulls) if ins.op is not Op.STEP]


def _buckets(draft: Draft, rank: int) -> list[list[int]]:
    """The groups of a rank that travel together, as the backward completes their gradients for the first update."""
    row = draft.ranks[rank]
    first = row[: next(k for k, ins in enumerate(row) if ins.op is Op.STEP)]
    last = last_writes(first, "grad", "host grad")
    return split_buckets(sorted(last, key=lambda g: (last[g], g)), draft.layout.shape.groups, draft.bucket)


def _pushing(draft: Draft, rank: int, buckets: Sequence[Sequence[int]]) -> list[Instruction]:
    """The row with the PUSHes of each update before its first STEP."""
    row, plan, shape = draft.ranks[rank], draft.plan, draft.layout.shape
    sent = pushed_shares(shape, plan.servers, plan.compress)
    gradients: dict[int, Value] = {}  # of each group
    last: dict[int, int] = {}  # group -> the place where its gradient is written last
    after = defaultdict[int, list[Instruction]](list)
    done = -1
    for k, ins in enumerate(row):
        if ins.op is not Op.STEP:
            made = {value.index: value for value in ins.writes if home(value).kind == "grad"}
            gradients |= made
            last |= dict.fromkeys(made, k)
        elif ins.step > done:
            done = ins.step
            for bucket in sorted(buckets, key=lambda some: max(last[g] for g in some)):
                place = max(last[g] for g in bucket) if plan.overlap == "backward" else k - 1
                after[place] += pushes_of(gradients, bucket, sent, plan.compress, done, draft.layout.mesh.size)
    return insert(row, after=after)


def _pulls(
    draft: Draft,
    own: Sequence[Value],
    buckets: Sequence[Sequence[int]],
    shares: Shares,
    version: int,
    over: Container[Value],
) -> list[Instruction]:
    """The PULLs of a version of a rank's own parameters, one from each server that keeps some of a bucket. `over`: the
    versions in whose place the next one comes."""
    size, found, named = draft.layout.mesh.size, list[Instruction](), {value.index: value for value in own}
    here: set[int] = set()  # groups for which the first PULL has made room
    for bucket, (k, share) in product(buckets, enumerate(shares)):
        pull = message(Op.PULL, bucket, share, version, size + k)
        before = [named[g]._replace(step=version - 1) for g in pull.layers if g not in here]
        here.update(pull.layers)
        writes = tuple(named[g]._replace(step=version) for g in pull.layers)
        pull = pull._replace(writes=writes, frees=tuple(value for value in before if value in over))
        found += [pull] if pull.layers else []
    return found
