"""Data parallelism by a parameter server: workers push gradients, servers update and hand out parameters.

Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014.

    worker 0   PULL | F 0:4 | B 0:4 | PUSH --.                      PULL ...
    worker 1   PULL | F 0:4 | B 0:4 | PUSH ---+--.                  PULL ...
    server     REPLY ->0 ->1            ACCEPT <-0 <-1 | APPLY | REPLY ->0 ->1 ...

A server receives and sends the gradients and parameters of every worker, 2 n D bytes a step for n workers, where an
allreduce has each rank send 2 (n - 1) / n D: more servers share it out.

A worker does the same in every step and every mode. What servers do, and in which order, follows from `consistency`:
in mode sync it is known beforehand; in the others `simulate` and `train` follow the rule, and give the program as it
happened, made by `served_order` from the order of updates and answers.
"""

from __future__ import annotations

from collections.abc import Sequence

from minipar.costs.recomputation import Move
from minipar.errors import PlanError
from minipar.program import (
    Action,
    Group,
    Instruction,
    Op,
    Program,
    Serving,
    Staleness,
    Synchronous,
    Value,
    grad,
    param,
    served,
    served_state,
)
from minipar.program.server_rule import Mode
from minipar.strategies import served_order
from minipar.strategies.buckets import Bucket, split_buckets
from minipar.strategies.layout import Layout
from minipar.strategies.passes.checkpoint import recompute
from minipar.strategies.passes.fuse import fuse
from minipar.strategies.passes.layers import expand
from minipar.strategies.shares import Shares, message, shares_of


def worker_step(
    instructions: Sequence[Instruction],
    buckets: Sequence[Sequence[int]],
    shares: Shares,
    workers: int,
    step: int,
    overlap: bool,
) -> list[Instruction]:
    """A worker's step: parameters from all servers, then the step, and gradients as soon as a bucket is complete.

    Without `overlap` the buckets are pushed one after another when the backward is through.
    """
    result = []
    for server, share in enumerate(shares):
        pull = message(Op.PULL, sorted(share), share, step, workers + server)
        result.append(pull._replace(writes=tuple(param(g) for g in pull.layers)))
    end = len(instructions) - 1
    last = {value.index: k for k, ins in enumerate(instructions) for value in ins.writes if value.kind == "grad"}
    for k, ins in enumerate(instructions):
        result.append(ins)
        for bucket in buckets:
            if (max(last.get(g, end) for g in bucket) if overlap else end) != k:
                continue
            holders = {g: max(s for s, share in enumerate(shares) if g in share) for g in bucket}
            for server, share in enumerate(shares):
                push = message(Op.PUSH, bucket, share, step, workers + server)
                frees = tuple(grad(g) for g in push.layers if holders[g] == server)
                if push.layers:
                    result.append(push._replace(reads=tuple(grad(g) for g in push.layers), frees=frees))
    return result


def worker_state(groups: Sequence[Group]) -> frozenset[Value]:
    """What a worker holds before and after: parameters. (Their gradients are gone once they are pushed.)"""
    return frozenset(param(g) for g in range(len(groups)))


def server_state(share: dict[int, int]) -> frozenset[Value]:
    return frozenset(value for g in share for value in (served(g), served_state(g)))


def compile_program(
    layout: Layout,
    actions: Sequence[Action],
    again: Sequence[Sequence[Move]],
    steps: int,
    bucket: Bucket,
    overlap: bool,
    serving: Serving,
    name: str,
    selective: bool = False,
) -> Program:
    """The program of all workers, and of the servers as far as it is known: in mode sync whole, else empty.

    actions          of one worker's step, as for any plan
    again            for each chunk of the worker how a micro-batch goes through it (`segments.schedules`)
    selective        a backward runs the attention cores of its layers again
    overlap          a bucket is pushed while backward goes on; otherwise after it
    """
    workers, groups = layout.dp, layout.shape.groups
    nothing = [group.layers[0] for group in groups if group.trainable and not sum(group.tensors)]
    if nothing:
        raise PlanError(
            f"sync=ps: all parameters of layer {nothing[0]} are empty, and no server can hold them; possible is "
            "requires_grad=False"
        )
    shares = shares_of(groups, serving.servers)
    if not all(shares):
        size = sum(size for group in groups for size in group.tensors)
        raise PlanError(f"servers={serving.servers}: too many for parameters of {size} bytes")
    chunks = [(layout.trained(stage), again[stage]) for stage in layout.placement[0]]
    ranks: list[list[Instruction]] = [[] for _ in range(workers)]
    for step in range(steps):
        own = recompute(expand([actions], layout, step)[0], chunks)
        order: dict[int, None] = {}  # groups as backward completes them
        for ins in reversed(own):
            order |= {value.index: None for value in reversed(ins.writes) if value.kind == "grad"}
        buckets = split_buckets(list(reversed(order)), groups, bucket)
        once = fuse(worker_step(own, buckets, shares, workers, step, overlap))
        for rank in ranks:
            rank += once
    mode = Mode.parse(serving.mode, workers)
    held = [worker_state(groups)] * workers + [server_state(share) for share in shares]
    template = Program(
        (*map(tuple, ranks), *((),) * serving.servers),
        layout.shape.layers,
        layout.microbatches,
        groups,
        (("dp", workers), ("pp", 1)),
        tuple(held),
        steps,
        Synchronous() if mode.kind == "sync" else Staleness(mode.staleness(workers)),
        name=name,
        serving=serving,
        selective=selective,
    )
    if mode.kind != "sync":
        return template
    return served_order.as_it_happened(template, served_order.in_step(workers, steps), shares)
