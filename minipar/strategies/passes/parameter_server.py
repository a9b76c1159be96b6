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

A layer of more than `bucket` MiB at a server goes in pieces (the slices of P3): each of them is pushed, applied and
answered by itself, and can be overtaken. "none" leaves layers whole; "auto" is the size with which the next forward
ends earliest.

    worker    ... B 2 | PUSH 2[0:8] | B 1 | B 0 | PUSH 0 | PUSH 1 | PUSH 2[8:16]     PULL 2[0:8] | PULL 0 | F 0 ...

In a pipeline every rank pulls what its layers need, and pushes their gradients. Servers add up a tied set of several
stages.

So does every one of the ranks that share layers. Each pulls what it has: shards, of which servers keep every one by
itself, and whole parameters. It pushes the gradients of its shards, and its parts of gradients that are sums over these
ranks, since servers add up anyway. A gradient that all of them have whole counts once: one pushes it, and the others
push the -0.0 of a gradient that is missing, so that all do the same.

For the rule, all ranks of a replica are one worker: what one of them pushes counts when all have pushed theirs, and
they are answered together, so that a step has one version of all parameters. Where one of them dies and may come back
(on_death=continue), all of them begin the step again. By priority, servers then send what they have updated already as
it was before.

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
from dataclasses import dataclass, replace
from itertools import accumulate, zip_longest

from minipar.program import COPIES, Instruction, Op, Portion, home, served, served_state
from minipar.program.mesh import Mesh
from minipar.program.server_rule import Mode
from minipar.strategies import served_order
from minipar.strategies.buckets import MiB, best_piece, split_buckets
from minipar.strategies.draft import Draft
from minipar.strategies.rewriting import insert, last_writes
from minipar.strategies.shares import (
    Portions,
    Shares,
    checked_shares,
    held_between,
    kept_shares,
    left_out,
    message,
    piece,
    portions_of,
    pushed_in,
    pushed_shares,
    pushes_of,
)
from minipar.strategies.urgency import first_uses, in_order


def push_and_pull(draft: Draft) -> Draft:
    """Workers pull parameters and push gradients; servers, which are ranks after the workers, update."""
    plan, mesh = draft.plan, draft.layout.mesh
    shares = checked_shares(draft.layout.shape.groups, plan.servers, draft.state)
    late = plan.overlap == "priority"
    draft = _with_size(draft, shares) if late else draft
    pieces = _pieces(draft) if late else []
    rows = [_worker_step(draft, rank, shares, pieces) for rank in range(draft.layout.pp)]
    workers = [rows[mesh.coordinates(rank)["pp"]] for rank in range(mesh.size)]
    servers: Sequence[tuple[Instruction, ...]] = [()] * plan.servers
    groups, sharing = draft.layout.shape.groups, Mesh(plan.shared)
    whole = kept_shares(shares, groups, sharing)
    if late:
        kept = [{one: sum(sizes) * groups[one.group].shards(sharing) for one, sizes in own.items()} for own in pieces]
        servers = served_order.by_layer(draft.step, draft.step == draft.steps - 1, kept, workers)
    elif Mode.parse(plan.mode, plan.dp).kind == "sync":  # in the other modes servers decide as they run
        known, inner = served_order.in_step(plan.dp, draft.step), [axis for axis, _ in mesh if axis != "dp"]
        replicas = [mesh.group(rank, *inner) for rank in mesh.group(0, "dp")]
        servers = served_order.of_servers(known, whole, [{draft.step: row} for row in workers], replicas)
    held = [held_between(row, state) for row, state in zip(rows, draft.state, strict=True)]
    held += [frozenset(map(served, share)) | frozenset(map(served_state, share)) for share in shares]
    return replace(draft, ranks=(*map(tuple, rows), *servers), update=(), state=tuple(held))


def _worker_step(draft: Draft, rank: int, shares: Shares, pieces: Portions) -> list[Instruction]:
    """The step of a rank of the first replica: it pulls parameters from all servers that have some of its own,
    computes, and pushes each bucket of gradients when it is complete.

    Without overlap it pushes all buckets after the last backward. `pieces`: by priority, what each server serves by
    itself.
    """
    row, layout = draft.ranks[rank], draft.layout
    own = {value.index: value for value in draft.state[rank] if home(value).kind == "param"}  # (some on the host)

    def pulls(groups: Iterable[int]) -> list[Instruction]:
        made = [
            message(Op.PULL, sorted(groups), share, draft.step, layout.mesh.size + s) for s, share in enumerate(shares)
        ]
        return [pull._replace(writes=tuple(own[g] for g in pull.layers)) for pull in made if pull.layers]

    before: dict[int, list[Instruction]] = {}
    after: dict[int, list[Instruction]] = {}
    if pieces:
        order = _by_priority(draft, rank, pieces)
        for push, place in order.sent:
            after.setdefault(place, []).append(push)
        for pull, place in order.brought:
            before.setdefault(place, []).append(pull._replace(writes=tuple(own[g] for g in pull.layers)))
        return insert(row, before, after)
    pushes = _pushes(draft, rank, shares)
    last = last_writes(row, "grad", "host grad")
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
    return lambda groups: pushes_of(made, groups, sent, compress, draft.step, layout.mesh.size)


@dataclass(frozen=True)
class _Order:
    """In which order a rank sends its gradients, and gets parameters of the next step.

    sent      PUSHes, and the places in its row after which they stand
    brought   PULLs, and the places before which they stand
    arrived   when what each PULL brings is there, if a worker had the link and the servers for itself
    """

    sent: list[tuple[Instruction, int]]
    brought: list[tuple[Instruction, int]]
    arrived: list[float]


def _by_priority(draft: Draft, rank: int, pieces: Portions) -> _Order:
    """In which order a rank pushes its gradients, and after which instructions; and in which order their parameters
    come back for the next step, and before which instructions they must be there.

    On both ways the most urgent of those that are ready comes next. Messages of a link keep their order, so a layer is
    awaited no later than those that come after it.
    """
    row, layout, seconds = draft.ranks[rank], draft.layout, draft.seconds[rank]
    clock = _clock(draft, rank)
    last, first = last_writes(row, "grad", "host grad"), first_uses(row)
    tied = [g for g in sorted(last) if sum(g in layout.groups(r) for r in range(layout.pp)) > 1]
    within = sorted(last.keys() - set(tied), key=lambda g: (last[g], -g))
    pushes, pulls = _messages(draft, pieces, within)
    urgent = [first.get(push.layers[0], len(row)) for push in pushes]
    lasts = list(map(seconds, pushes))
    ready = [clock[last[push.layers[0]] + 1] for push in pushes]
    sent: list[tuple[Instruction, int]] = []
    arrived = list(ready)
    place, now = 0, 0.0
    for k in in_order(ready, lasts, urgent):
        place, now = max(place, last[pushes[k].layers[0]]), max(now, ready[k]) + lasts[k]
        sent.append((pushes[k], place))
        arrived[k] = now
    back = in_order(arrived, lasts, urgent)
    now, there = 0.0, []
    for k in back:
        now = max(now, arrived[k]) + lasts[k]
        there.append(now)
    late_pushes, late_pulls = _messages(draft, pieces, tied)  # (stages complete these at different times)
    sent += [(push, len(row) - 1) for push in late_pushes]
    brought = [pulls[k] for k in back] + late_pulls
    there += [now + sum(map(seconds, late_pushes))] * len(late_pulls)
    needed = list(accumulate((first.get(pull.layers[0], len(row)) for pull in reversed(brought)), min))
    return _Order(_freeing(draft, rank, sent), list(zip(brought, reversed(needed), strict=True)), there)


def _clock(draft: Draft, rank: int) -> list[float]:
    """When each instruction of a rank that waits for no other one begins, and when the last one ends."""
    clock = [0.0]
    for ins in draft.ranks[rank]:  # (copies run beside what is computed)
        clock.append(clock[-1] + (0.0 if ins.op in COPIES else draft.seconds[rank](ins)))
    return clock


def _messages(draft: Draft, pieces: Portions, groups: Sequence[int]) -> tuple[list[Instruction], list[Instruction]]:
    """The PUSHes of the gradients of some groups, and the PULLs of their parameters, in the same order: pieces of a
    group at one server and at the others by turns."""
    shape, choice = draft.layout.shape, draft.plan.compress
    of_group: dict[int, list[list[tuple[int, Portion]]]] = {}
    for server, own in enumerate(pieces):
        for portion in own:
            here = of_group.setdefault(portion.group, [[] for _ in pieces])
            here[server].append((server, portion))
    pushes, pulls = [], []
    for g in groups:
        for server, portion in (one for turn in zip_longest(*of_group[g]) for one in turn if one is not None):
            sizes, peer = pieces[server][portion], draft.layout.mesh.size + server
            pushes.append(piece(Op.PUSH, portion, pushed_in(shape, sizes, choice), draft.step, peer))
            pulls.append(piece(Op.PULL, portion, sum(sizes), draft.step, peer))
    return pushes, pulls


def _freeing(draft: Draft, rank: int, sent: Sequence[tuple[Instruction, int]]) -> list[tuple[Instruction, int]]:
    """PUSHes that read gradients; the last one of each gradient frees it."""
    made = {value.index: value for ins in draft.ranks[rank] for value in ins.writes if home(value).kind == "grad"}
    last = {push.layers[0]: k for k, (push, _) in enumerate(sent)}
    found = []
    for k, (push, place) in enumerate(sent):
        (g,) = push.layers
        left = left_out([g], draft.plan.compress)
        frees = (made[g],) if last[g] == k else ()
        found.append((push._replace(reads=(made[g], *left), writes=left, frees=frees), place))
    return found


def _pieces(draft: Draft) -> Portions:
    """What each server serves by itself."""
    most = draft.bucket * MiB if isinstance(draft.bucket, (int, float)) else float("inf")
    return portions_of(draft.layout.shape.groups, draft.plan.servers, most)


def _with_size(draft: Draft, shares: Shares) -> Draft:
    """bucket=auto is the size of pieces with which the next forward ends earliest; of equal ones the largest."""
    if draft.bucket != "auto":
        return draft  # (the first step has found it)

    def end(size: float) -> float:
        tried = replace(draft, bucket=size)
        return max(_end_of_next_forward(tried, rank) for rank in range(draft.layout.pp))

    return replace(draft, bucket=best_piece(max(size for share in shares for size in share.values()), end))


def _end_of_next_forward(draft: Draft, rank: int) -> float:
    """When the last forward of the next step ends on a rank that waits for nothing but its parameters."""
    row, seconds = draft.ranks[rank], draft.seconds[rank]
    order = _by_priority(draft, rank, _pieces(draft))
    there: dict[int, float] = {}
    for (_, place), at in zip(order.brought, order.arrived, strict=True):
        there[place] = max(there.get(place, 0.0), at)
    now = _clock(draft, rank)[-1]
    last = max((k for k, ins in enumerate(row) if ins.op is Op.FORWARD), default=-1)
    for k, ins in enumerate(row[: last + 1]):
        now = max(now, there.get(k, 0.0)) + (0.0 if ins.op in COPIES else seconds(ins))
    return now
