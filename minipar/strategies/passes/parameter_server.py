"""Data parallelism by a parameter server: workers push gradients, servers update parameters and send them.

Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014.

    worker 0   PULL | F 0:4 | B 0:4 | PUSH --.                      PULL ...
    worker 1   PULL | F 0:4 | B 0:4 | PUSH ---+--.                  PULL ...
    server     REPLY ->0 ->1            ACCEPT <-0 <-1 | APPLY | REPLY ->0 ->1 ...

Let D be the bytes of the parameters. A server receives gradients from n workers and sends them parameters: 2 n D bytes
a step. In an allreduce each rank sends 2 (n - 1) / n D bytes. Several servers share this traffic.

A worker does the same in every step and every mode. `program.server_rule` says what servers do, and in which order. In
mode sync this is known before the run. In the other modes `simulate` and `train` follow the rule, and `served_order`
makes the program as it happened from the order of updates and answers.

    clip          an update is scaled down to a norm: each server sums the squares of its part of the gradient, server 0
                  adds these up and tells the others, and until then nothing else happens
    compress      gradients are pushed as 16-bit numbers, or as the largest of them (`server/packing.py`); parameters
                  are pulled whole
    offload       what autograd keeps is copied away as in any program; with offload=parameters what is pulled comes to
                  the host (or the disk), and each layer's is fetched before it is used
    host_layers   their parameters come to the host, and stay there
    precision     bf16: layers compute with what they have pulled, rounded; servers keep, add up and send wide numbers
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from minipar.errors import PlanError
from minipar.program import Group, Instruction, Op, home, residual, served, served_state
from minipar.program.server_rule import Mode
from minipar.strategies import served_order
from minipar.strategies.buckets import split_buckets
from minipar.strategies.draft import Draft
from minipar.strategies.rewriting import insert, last_writes
from minipar.strategies.shares import Shares, message, pushed_shares, shares_of


def push_and_pull(draft: Draft) -> Draft:
    """Workers pull parameters and push gradients; servers, which are ranks after the workers, update."""
    plan, workers, groups = draft.plan, draft.layout.dp, draft.layout.shape.groups
    shares = _shares(groups, plan.servers)
    worker = tuple(_worker_step(draft, shares))
    servers: Sequence[tuple[Instruction, ...]] = [()] * plan.servers
    if Mode.parse(plan.mode, workers).kind == "sync":  # in the other modes servers decide as they run
        known = served_order.in_step(workers, draft.step)
        servers = served_order.of_servers(known, shares, [{draft.step: worker}] * workers)
    # (a worker frees its gradients when they are pushed)
    kept = {value for ins in worker for value in ins.writes if value.kind == "residual"}
    held = [frozenset(value for value in draft.state[0] if home(value).kind == "param") | kept]
    held += [frozenset(map(served, share)) | frozenset(map(served_state, share)) for share in shares]
    return replace(draft, ranks=(worker, *servers), update=(), state=tuple(held))


def _shares(groups: Sequence[Group], servers: int) -> Shares:
    """Which server has which part of the parameters. Errors: PlanError if a server would have none."""
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
    """A worker's step: it pulls parameters from all servers, computes, and pushes each bucket of gradients when it is
    complete.

    Without overlap it pushes all buckets after the last backward.
    """
    (row,), step, workers = draft.ranks, draft.step, draft.layout.dp
    own = {value.index: value for value in draft.state[0] if home(value).kind == "param"}  # (some on the host)
    made = {value.index: value for ins in row for value in ins.writes if home(value).kind == "grad"}
    pulls = []
    for server, share in enumerate(shares):
        pull = message(Op.PULL, sorted(share), share, step, workers + server)
        pulls.append(pull._replace(writes=tuple(own[g] for g in pull.layers)))
    sent = pushed_shares(draft.layout.shape, len(shares), draft.plan.compress)
    last = last_writes(row, "grad", "host grad")
    ready = sorted(last, key=lambda g: (last[g], g))  # groups as backward completes them
    after: dict[int, list[Instruction]] = {}
    for bucket in split_buckets(ready, draft.layout.shape.groups, draft.bucket):
        place = max(last[g] for g in bucket) if draft.plan.overlap == "backward" else len(row) - 1
        holders = {g: max(s for s, share in enumerate(shares) if g in share) for g in bucket}
        for server, smaller in enumerate(sent):
            push = message(Op.PUSH, bucket, smaller, step, workers + server)
            frees = tuple(made[g] for g in push.layers if holders[g] == server)
            kept = tuple(map(residual, push.layers)) if draft.plan.compress.startswith("topk") else ()
            push = push._replace(reads=(*(made[g] for g in push.layers), *kept), writes=kept, frees=frees)
            if push.layers:
                after.setdefault(place, []).append(push)
    return pulls + insert(row, after=after)
