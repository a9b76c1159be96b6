"""Data parallelism by a parameter server: workers push gradients, servers update and hand out parameters.

Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014.

    worker 0   PULL | F 0:4 | B 0:4 | PUSH --.                      PULL ...
    worker 1   PULL | F 0:4 | B 0:4 | PUSH ---+--.                  PULL ...
    server     REPLY ->0 ->1            ACCEPT <-0 <-1 | APPLY | REPLY ->0 ->1 ...

A server receives and sends the gradients and parameters of every worker, 2 n D bytes a step for n workers, where an
allreduce has each rank send 2 (n - 1) / n D: more servers share it out.

A worker does the same in every step and every mode. What servers do, and in which order, follows from
`program.server_rule`: in mode sync it is known beforehand; in the others `simulate` and `train` follow the rule, and
give the program as it happened, made by `served_order` from the order of updates and answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from minipar.errors import PlanError
from minipar.program import Group, Instruction, Op, grad, param, served, served_state
from minipar.program.server_rule import Mode
from minipar.strategies import served_order
from minipar.strategies.buckets import split_buckets
from minipar.strategies.draft import Draft
from minipar.strategies.rewriting import insert, last_writes
from minipar.strategies.shares import Shares, message, shares_of


def push_and_pull(draft: Draft) -> Draft:
    """Workers pull parameters and push gradients; servers, which are ranks behind them, update."""
    plan, workers, groups = draft.plan, draft.layout.dp, draft.layout.shape.groups
    shares = _shares(groups, plan.servers)
    worker = tuple(_worker_step(draft, shares))
    servers: Sequence[tuple[Instruction, ...]] = [()] * plan.servers
    if Mode.parse(plan.mode, workers).kind == "sync":  # in the other modes what servers do is known when it happens
        known = served_order.in_step(workers, draft.step)
        servers = served_order.of_servers(known, shares, [{draft.step: worker}] * workers)
    # (a worker's gradients are gone once they are pushed)
    held = [frozenset(map(param, range(len(groups))))]
    held += [frozenset(map(served, share)) | frozenset(map(served_state, share)) for share in shares]
    return replace(draft, ranks=(worker, *servers), update=(), state=tuple(held))


def _shares(groups: Sequence[Group], servers: int) -> Shares:
    """Which server has which part of the parameters. PlanError for servers with nothing to serve."""
    nothing = [group.layers[0] for group in groups if group.trainable and not sum(group.tensors)]
    if nothing:
        raise PlanError(
            f"sync=ps: all parameters of layer {nothing[0]} are empty, and no server can hold them; possible is "
            "requires_grad=False"
        )
    shares = shares_of(groups, servers)
    if not all(shares):
        size = sum(size for group in groups for size in group.tensors)
        raise PlanError(f"servers={servers}: too many for parameters of {size} bytes")
    return shares


def _worker_step(draft: Draft, shares: Shares) -> list[Instruction]:
    """A worker's step: parameters from all servers, then the step, and gradients as soon as a bucket is complete.

    Without overlap the buckets are pushed one after another when the backward is through.
    """
    (row,), step, workers = draft.ranks, draft.step, draft.layout.dp
    pulls = []
    for server, share in enumerate(shares):
        pull = message(Op.PULL, sorted(share), share, step, workers + server)
        pulls.append(pull._replace(writes=tuple(map(param, pull.layers))))
    last = last_writes(row, "grad")
    ready = sorted(last, key=lambda g: (last[g], g))  # groups as backward completes them
    after: dict[int, list[Instruction]] = {}
    for bucket in split_buckets(ready, draft.layout.shape.groups, draft.bucket):
        place = max(last[g] for g in bucket) if draft.plan.overlap == "backward" else len(row) - 1
        holders = {g: max(s for s, share in enumerate(shares) if g in share) for g in bucket}
        for server, share in enumerate(shares):
            push = message(Op.PUSH, bucket, share, step, workers + server)
            frees = tuple(grad(g) for g in push.layers if holders[g] == server)
            if push.layers:
                after.setdefault(place, []).append(push._replace(reads=tuple(map(grad, push.layers)), frees=frees))
    return pulls + insert(row, after=after)
