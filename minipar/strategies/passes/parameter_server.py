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

With overlap=priority (Jayarajan et al., P3) each layer is pushed, applied and answered by itself, those that the next
forward needs first before the others (`urgency.py`). A forward waits for its own layer alone:

    worker    ... B 2 | PUSH 2 | B 1 | B 0 | PUSH 0 | PUSH 1          PULL 2 | PULL 0 | F 0 | PULL 1 | F 1 | F 2 ...
    server                   APPLY 2, REPLY 2   APPLY 0, REPLY 0   APPLY 1, REPLY 1

In a pipeline every rank pulls what its layers need, and pushes their gradients. Servers add up a tied set of several
stages.

So does every one of the ranks that share layers. Each pulls what it has: shards, of which servers keep every one by
itself, and whole parameters. It pushes the gradients of its shards, and its parts of gradients that are sums over these
ranks, since servers add up anyway. A gradient that all of them have whole counts once: one pushes it, and the others
push the -0.0 of a gradient that is missing, so that all do the same.

For the rule, all ranks of a replica are one worker: what one of them pushes counts when all have pushed theirs, and
they are answered together, so that a step has one version of all parameters. Where one of them dies and may come back
(on_death=continue), all of them begin the step again.

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

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate

from minipar.errors import PlanError
from minipar.program import COPIES, Group, Instruction, Op, Value, home, residual, served, served_state
from minipar.program.mesh import Mesh
from minipar.program.server_rule import Mode
from minipar.strategies import served_order
from minipar.strategies.buckets import split_buckets
from minipar.strategies.draft import Draft
from minipar.strategies.rewriting import insert, last_writes
from minipar.strategies.shares import Shares, kept_shares, message, pushed_shares, shares_of
from minipar.strategies.urgency import first_uses, in_order


def push_and_pull(draft: Draft) -> Draft:
    """Workers pull parameters and push gradients; servers, which are ranks after the workers, update."""
    plan, mesh = draft.plan, draft.layout.mesh
    shares = _shares(draft.layout.shape.groups, plan.servers)
    late = plan.overlap == "priority"
    rows = [_worker_step(draft, rank, shares, late) for rank in range(draft.layout.pp)]
    workers = [rows[mesh.coordinates(rank)["pp"]] for rank in range(mesh.size)]
    servers: Sequence[tuple[Instruction, ...]] = [()] * plan.servers
    whole = kept_shares(shares, draft.layout.shape.groups, Mesh(plan.shared))
    if late:
        servers = served_order.by_layer(draft.step, draft.step == draft.steps - 1, whole, workers)
    elif Mode.parse(plan.mode, plan.dp).kind == "sync":  # in the other modes servers decide as they run
        known, inner = served_order.in_step(plan.dp, draft.step), [axis for axis, _ in mesh if axis != "dp"]
        replicas = [mesh.group(rank, *inner) for rank in mesh.group(0, "dp")]
        servers = served_order.of_servers(known, whole, [{draft.step: row} for row in workers], replicas)
    held = [_held(row, state) for row, state in zip(rows, draft.state, strict=True)]
    held += [frozenset(map(served, share)) | frozenset(map(served_state, share)) for share in shares]
    return replace(draft, ranks=(*map(tuple, rows), *servers), update=(), state=tuple(held))


def _held(row: Sequence[Instruction], state: frozenset[Value]) -> frozenset[Value]:
    """What a worker holds between steps. (It frees its gradients when they are pushed.)"""
    kept = {value for ins in row for value in ins.writes if value.kind == "residual"}
    return frozenset(value for value in state if home(value).kind == "param") | kept


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


def _worker_step(draft: Draft, rank: int, shares: Shares, late: bool) -> list[Instruction]:
    """The step of a rank of the first replica: it pulls parameters from all servers that have some of its own,
    computes, and pushes each bucket of gradients when it is complete.

    Without overlap it pushes all buckets after the last backward.
    """
    row, layout = draft.ranks[rank], draft.layout
    own = {value.index: value for value in draft.state[rank] if home(value).kind == "param"}  # (some on the host)
    if not any(g in share for share in shares for g in own):
        raise PlanError(
            f"sync=ps pp={layout.pp}: stage {rank} has no parameters that are trained, and every rank works with the "
            "servers; possible is another split="
        )

    def pulls(groups: Iterable[int]) -> list[Instruction]:
        made = [
            message(Op.PULL, sorted(groups), share, draft.step, layout.mesh.size + s) for s, share in enumerate(shares)
        ]
        return [pull._replace(writes=tuple(own[g] for g in pull.layers)) for pull in made if pull.layers]

    pushes = _pushes(draft, rank, shares)
    last = last_writes(row, "grad", "host grad")
    before: dict[int, list[Instruction]] = {}
    after: dict[int, list[Instruction]] = {}
    if late:
        sent, brought = _by_priority(draft, rank, pushes)
        for g, place in sent:
            after.setdefault(place, []).extend(pushes([g]))
        for g, place in brought:
            before.setdefault(place, []).extend(pulls([g]))
        return insert(row, before, after)
    ready = sorted(last, key=lambda g: (last[g], g))  # groups as backward completes them
    for bucket in split_buckets(ready, layout.shape.groups, draft.bucket):
        place = max(last[g] for g in bucket) if draft.plan.overlap == "backward" else len(row) - 1
        after.setdefault(place, []).extend(pushes(bucket))
    return pulls(own) + insert(row, after=after)


def _pushes(draft: Draft, rank: int, shares: Shares) -> Callable[[Sequence[int]], list[Instruction]]:
    """Makes the PUSHes of some gradients, one to each server that keeps something of them."""
    layout, compress = draft.layout, draft.plan.compress
    made = {value.index: value for ins in draft.ranks[rank] for value in ins.writes if home(value).kind == "grad"}
    sent = pushed_shares(layout.shape, len(shares), compress)

    def pushes(groups: Sequence[int]) -> list[Instruction]:
        found = []
        holders = {g: max(s for s, share in enumerate(shares) if g in share) for g in groups}
        for server, smaller in enumerate(sent):
            push = message(Op.PUSH, groups, smaller, draft.step, layout.mesh.size + server)
            frees = tuple(made[g] for g in push.layers if holders[g] == server)
            kept = tuple(map(residual, push.layers)) if compress.startswith("topk") else ()
            push = push._replace(reads=(*(made[g] for g in push.layers), *kept), writes=kept, frees=frees)
            found += [push] if push.layers else []
        return found

    return pushes


Places = list[tuple[int, int]]  # parameter group, place in the row


def _by_priority(
    draft: Draft, rank: int, pushes: Callable[[Sequence[int]], list[Instruction]]
) -> tuple[Places, Places]:
    """In which order a rank pushes its gradients, and after which instructions; and in which order their parameters
    come back for the next step, and before which instructions they must be there.

    On both ways the most urgent of those that are ready comes next. Messages of a link keep their order, so a layer is
    awaited no later than those that come after it.
    """
    row, layout, seconds = draft.ranks[rank], draft.layout, draft.seconds[rank]
    clock = [0.0]
    for ins in row:  # (copies run beside what is computed)
        clock.append(clock[-1] + (0.0 if ins.op in COPIES else seconds(ins)))
    last, first = last_writes(row, "grad", "host grad"), first_uses(row)
    tied = [g for g in sorted(last) if sum(g in layout.groups(r) for r in range(layout.pp)) > 1]
    within = sorted(last.keys() - set(tied), key=lambda g: (last[g], -g))
    urgent = [first.get(g, len(row)) for g in within]
    lasts = [sum(map(seconds, pushes([g]))) for g in within]
    ready = [clock[last[g] + 1] for g in within]
    sent: Places = []
    arrived = list(ready)
    place, now = 0, 0.0
    for k in in_order(ready, lasts, urgent):
        place, now = max(place, last[within[k]]), max(now, ready[k]) + lasts[k]
        sent.append((within[k], place))
        arrived[k] = now
    sent += [(g, len(row) - 1) for g in tied]  # (stages complete these at different times)
    back = [within[k] for k in in_order(arrived, lasts, urgent)] + tied
    needed = list(accumulate((first.get(g, len(row)) for g in reversed(back)), min))
    return sent, list(zip(back, reversed(needed), strict=True))
