"""Data parallelism by a parameter server: workers push gradients, servers update parameters and send them.

Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014.

    worker 0   PULL | F 0:4 | B 0:4 | PUSH --.                      PULL ...
    worker 1   PULL | F 0:4 | B 0:4 | PUSH ---+--.                  PULL ...
    server     REPLY ->0 ->1            ACCEPT <-0 <-1 | APPLY | REPLY ->0 ->1 ...

Let D be the bytes of the parameters. A server receives gradients from n workers and sends them parameters: 2 n D bytes
a step. In an allreduce each rank sends 2 (n - 1) / n D bytes. Several servers share this traffic.

A worker is a replica of one rank, and does the same in every step and every mode. `program.server_rule` says what
servers do, and in which order. In mode sync this is known before the run. In the other modes `simulate` and `train`
follow the rule, and `served_order` makes the program as it happened from the order of updates and answers.

    clip          an update is scaled down to a norm: each server sums the squares of its part of the gradient, server 0
                  adds these up and sends the others the sum, and until then nothing else happens
    compress      gradients are pushed as 16-bit numbers, or as the largest of them (`server/packing.py`); parameters
                  are pulled whole
    precision     bf16: layers compute with what they have pulled, rounded; servers keep, add up and send wide numbers
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from minipar.program import Instruction, Op, Part, param, served, served_state
from minipar.program.server_rule import Mode
from minipar.strategies import served_order
from minipar.strategies.buckets import split_buckets
from minipar.strategies.draft import Draft
from minipar.strategies.rewriting import insert, last_writes
from minipar.strategies.shares import Shares, checked_shares, left_out, pushed_shares


def push_and_pull(draft: Draft) -> Draft:
    """Workers pull parameters and push gradients; servers, which are ranks after the workers, update."""
    plan = draft.plan
    shares = checked_shares(draft.layout.shape.groups, plan.servers)
    row = _worker_step(draft, shares)
    servers: Sequence[tuple[Instruction, ...]] = [()] * plan.servers
    if Mode.parse(plan.mode, plan.dp).kind == "sync":  # in the other modes servers decide as they run
        order = served_order.in_step(plan.dp, draft.step)
        servers = served_order.of_servers(order, shares, [{draft.step: row}] * plan.dp)
    left = {value for ins in row for value in ins.writes if value.kind == "residual"}
    # (A worker frees its gradients when they are pushed.)
    held = [frozenset(value for value in draft.state[0] if value.kind == "param") | left]
    held += [frozenset(map(served, share)) | frozenset(map(served_state, share)) for share in shares]
    return replace(draft, ranks=(tuple(row), *servers), update=(), state=tuple(held))


def _worker_step(draft: Draft, shares: Shares) -> list[Instruction]:
    """The step of a worker: it pulls the parameters from all servers, computes, and pushes each bucket of gradients
    when it is complete. Without overlap it pushes all buckets after the last backward."""
    (row,), groups, first = draft.ranks, draft.layout.shape.groups, draft.plan.dp
    pulls = [_message(Op.PULL, sorted(share), share, draft.step, first + s) for s, share in enumerate(shares)]
    pulls = [pull._replace(writes=tuple(map(param, pull.layers))) for pull in pulls]
    last = last_writes(row, "grad")
    ready = sorted(last, key=lambda g: (last[g], g))  # groups as backward completes them
    pushes: list[tuple[int, Instruction]] = []
    for bucket in split_buckets(ready, groups, draft.bucket):
        place = max(last[g] for g in bucket) if draft.plan.overlap == "backward" else len(row) - 1
        pushes += [(place, push) for push in _pushes(draft, bucket)]
    return pulls + insert(row, after=pushes)


def _pushes(draft: Draft, bucket: Sequence[int]) -> list[Instruction]:
    """The PUSHes of some groups' gradients, one to each server that keeps something of them. The last one of each
    gradient frees it."""
    plan = draft.plan
    gradients = {value.index: value for ins in draft.ranks[0] for value in ins.writes if value.kind == "grad"}
    sent = pushed_shares(draft.layout.shape, plan.servers, plan.compress)
    last = {g: max(server for server, share in enumerate(sent) if g in share) for g in bucket}
    found = []
    for server, share in enumerate(sent):
        push = _message(Op.PUSH, bucket, share, draft.step, plan.dp + server)
        left = left_out(push.layers, plan.compress)
        frees = tuple(gradients[g] for g in push.layers if last[g] == server)
        push = push._replace(reads=(*(gradients[g] for g in push.layers), *left), writes=left, frees=frees)
        found += [push] if push.layers else []
    return found


def _message(op: Op, groups: Sequence[int], share: dict[int, int], step: int, peer: int) -> Instruction:
    """A PUSH or PULL: it moves the parts of some groups that one server keeps. `share` has their bytes."""
    here = tuple(g for g in groups if g in share)
    parts = tuple(Part(op, g, share[g]) for g in here)
    return Instruction(op, here, -1, step, stream=f"{op.value.lower()} {peer}", peer=peer, parts=parts)
