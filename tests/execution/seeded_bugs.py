"""Mistakes that nothing else notices, each planted in the ranks for one run of `test_checking.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from minipar.cluster import worker
from minipar.comm.buckets import Buckets
from minipar.comm.communicator import Communicator
from minipar.comm.handles import Handle
from minipar.comm.links import Links
from minipar.execution import repartition
from minipar.execution.batch_rows import BatchRows
from minipar.execution.compute import Compute
from minipar.execution.execution import Job
from minipar.execution.executor import Executor
from minipar.execution.mean_loss import MeanLoss
from minipar.execution.memory.stores import HostStore
from minipar.execution.offloading import Offloading
from minipar.execution.owners import Owner
from minipar.execution.parameter_slices import SlicedGroup
from minipar.execution.parameter_versions import Versions
from minipar.execution.state import State
from minipar.execution.streams import HostStreams
from minipar.program import Op, Value, portions
from minipar.server.pushing import Servers
from minipar.server.shard import Shard
from minipar.server.working import Worker

_planted = pytest.MonkeyPatch()


class Bug(NamedTuple):
    """A mistake: the plan that it is planted in, why the check finds it, and the op of the instruction named.

    rank   the one that is named; None: any
    """

    plan: str
    why: str
    op: str
    rank: int | None = None


BUGS = {
    "dropped all-reduce": Bug("dp=2", "is not what the ranks gave", "ALL_REDUCE"),
    "doubled loss": Bug("pp=2 microbatches=2", "counts 1 of the step's mean, and its targets 0.5", "F", 1),
    "doubled gradient": Bug("dp=2", r"grad\(\d\) was changed since it was last written", "ALL_REDUCE", 1),
    "swapped message": Bug("pp=2 schedule=gpipe microbatches=4", r"from 0 to 1 is not the same", "RECV", 1),
    "stale weight": Bug("dp=2 pp=2", r"param\(\d\) is not what the last update of it has left", "STEP"),
    "update left out": Bug("dp=4", "was not changed, though its gradient is not zero", "STEP", 1),
    "another update": Bug("dp=4", r"param\(\d\) after the STEP of step 0 is not the same on rank 1", "STEP", 1),
    "no update at all": Bug("pp=2 microbatches=2", "was not changed, though its gradient is not zero", "STEP"),
    "wrong group": Bug("dp=4", "is not what the ranks gave", "ALL_REDUCE"),
    "wrong form": Bug("tp=2", "it is not what the ranks gave|is not the same on rank", "ALL_REDUCE"),
    "wrong order of shards": Bug("tp=2 sequence_parallel=true", "is not what the ranks gave", "ALL_GATHER"),
    "missing backward": Bug("microbatches=3", "it added to 0 gradients of parameters", "B", 0),
    "missing micro-batch": Bug("inference=true microbatches=4", "add up to 0.75 instead of 1", "F", 0),
    "reused buffer": Bug(
        "pp=2 schedule=gpipe microbatches=4", r"output\(\d\) mb0 was changed between the instruction that", "B", 1
    ),
    "counted twice": Bug("dp=2 microbatches=3", "written to twice: it would be counted more than once", "B"),
    "summed twice": Bug("dp=2", r"grad\(\d\) was changed since it was last written", "STEP"),
    "gradients not cleared": Bug("pp=2 microbatches=2", "does not begin from nothing", "B"),
    "not a number": Bug("pp=2 schedule=interleaved chunks=2 microbatches=4", r"output\(1\) mb2 has numbers", "F", 1),
    "swapped slices": Bug("dp=2 zero=2 microbatches=2", "is not what the ranks gave", "REDUCE_SCATTER"),
    "slice not gathered": Bug("dp=2 zero=1", r"param\(\d\) is not the same on rank", "ALL_GATHER"),
    "slice in the wrong place": Bug("dp=2 zero=3", r"where slice \d of rank \d belongs", "ALL_GATHER"),
    "other initial values": Bug("dp=2 pp=2", r"param\(\d\) at the beginning is not the same", "F"),
    "other buffers": Bug("dp=4", "the buffers of layer 0 is not the same on rank 2", "B", 2),
    "damaged while away": Bug("offload=activations microbatches=3", r"saved.* is not what was copied to host", "FETCH"),
    "gradient damaged on its way": Bug("offload=optimizer", r"grad\(\d\) was changed since it was last", "STEP"),
    "update not brought back": Bug(
        "offload=optimizer", r"param\(\d\) is not what the last update of it has left", "FETCH"
    ),
    "layer on the host overwritten": Bug(
        "host_layers=0 microbatches=2", r"output\(0\) mb\d was changed between the instruction that", "F"
    ),
    "piece left out": Bug("dp=2 overlap=priority bucket=0.0001", "is not what the ranks gave", "ALL_REDUCE"),
    "average left out": Bug("dp=2 local_steps=2", "is not what the ranks gave", "ALL_REDUCE"),
    "average of wrong weights": Bug("dp=2 local_steps=2", "is not what the ranks gave", "ALL_REDUCE"),
    "shares of the wrong batch": Bug("dp=2 microbatches=2", "add up to 2 instead of 1", "F"),
    "push left out of an update": Bug("dp=2 sync=ps", "is not what the ranks gave", "APPLY", 2),
    "push counted twice": Bug("dp=2 sync=ps overlap=priority", "is not what the ranks gave", "APPLY", 2),
    "push damaged on its way": Bug("dp=2 sync=ps", r"of step 0 from 1 to 2 is not the same on rank 2", "ACCEPT", 2),
    "stale push": Bug(
        "dp=2 sync=ps mode=async on_death=continue", r"of step 1 from 1 to 2 is not the same on rank 2", "ACCEPT", 2
    ),
    "stale pull": Bug("dp=2 sync=ps", r"of step 1 from 2 to 1 is not the same on rank 1", "PULL", 1),
    "pull not used": Bug("dp=2 sync=ps mode=ssp:1", r"param\(\d\) is not what was pulled", "PULL", 1),
    "update of a server left out": Bug("dp=2 sync=ps", "was not changed, though its gradient is not zero", "APPLY", 2),
    "servers clip to two norms": Bug("sync=ps servers=2 clip=0.01", "the norm of update 0 is not the same", "APPLY", 2),
    "stale version": Bug(
        "pp=2 sync=ps schedule=pipedream-2bw", r"of step 1 from 2 to 1 is not the same on rank 1", "PULL", 1
    ),
    "version in another place": Bug(
        "dp=2 sync=ps schedule=pipedream-2bw", r"param\(\d\) v1 is not what was pulled", "PULL"
    ),
    "version overwritten": Bug(
        "pp=2 schedule=pipedream microbatches=4", r"param\(\d\) v0 is not what the last update of it has left", "B", 0
    ),
    "newest version in every backward": Bug(
        "pp=2 schedule=pipedream microbatches=4", r"param\(\d\) v0 is not what the last update of it has left", "B", 0
    ),
    "sum of an update left out": Bug(
        "dp=2 pp=2 schedule=pipedream microbatches=2", "is not what the ranks gave", "ALL_REDUCE"
    ),
}


def plant(name: str) -> None:
    """In a rank: make this mistake from now on."""
    PLANTERS[name](worker.context().rank, _planted.setattr)


def mend() -> None:
    """In a rank: make no mistakes any more."""
    _planted.undo()


def _around(kind: type, name: str, change: Callable[..., Any], put: Any) -> None:
    """Replace a method by `change(method, self, ...)`."""
    method = getattr(kind, name)
    put(kind, name, lambda self, *args, **given: change(method, self, *args, **given))


def dropped_all_reduce(rank: int, put: Any) -> None:
    put(Buckets, "all_reduce", lambda self, ins, comm: [])


def doubled_loss(rank: int, put: Any) -> None:
    _around(MeanLoss, "__call__", lambda call, self, *given: call(self, *given) * 2, put)


def doubled_gradient(rank: int, put: Any) -> None:
    def twice(call: Any, self: Buckets, group: int) -> None:
        call(self, group)
        for p in self.groups[group] if rank == 1 else ():
            p.grad.mul_(2)  # type: ignore[union-attr]

    _around(Buckets, "fill", twice, put)


def swapped_message(rank: int, put: Any) -> None:
    before: list[Any] = []

    def late(call: Any, self: Links, message: Any, contents: Any, *rest: Any) -> None:
        own = contents if message[0].kind == "output" else []
        call(self, message, before[-1] if own and before else contents, *rest)
        before.extend([own] if own else [])

    _around(Links, "send", late, put)


def stale_weight(rank: int, put: Any) -> None:
    old: dict[int, torch.Tensor] = {}

    def with_old(call: Any, self: Compute, ins: Any, live: Any) -> None:
        for p in self.layers[ins.layers[0]].parameters():
            p.data.copy_(old.setdefault(id(p), p.detach().clone()))
        call(self, ins, live)

    _around(Compute, "backward", with_old, put)


def update_left_out(rank: int, put: Any) -> None:
    if rank == 1:
        put(torch.optim.SGD, "step", lambda self, *_: None)


def another_update(rank: int, put: Any) -> None:
    def more(call: Any, self: torch.optim.SGD, *given: Any) -> None:
        call(self, *given)
        self.param_groups[0]["params"][0].data.add_(1e-9)

    if rank == 1:
        _around(torch.optim.SGD, "step", more, put)


def no_update_at_all(rank: int, put: Any) -> None:
    put(torch.optim.SGD, "step", lambda self, *_: None)


def wrong_group(rank: int, put: Any) -> None:
    group = (0, 1) if rank < 2 else (2, 3)
    _around(Buckets, "all_reduce", lambda call, self, ins, comm: call(self, ins._replace(group=group), comm), put)


def wrong_form(rank: int, put: Any) -> None:
    change = repartition._change

    def left(tensor: Any, old: str, new: str, ins: Any, *rest: Any) -> Any:
        partial = old == "P" and new == "R"
        return (Handle(None, None, set()), lambda: tensor) if partial else change(tensor, old, new, ins, *rest)

    put(repartition, "_change", left)


def wrong_order_of_shards(rank: int, put: Any) -> None:
    joined = repartition._joined
    put(repartition, "_joined", lambda parts, letter, rows: joined(list(parts)[::-1], letter, rows))


def missing_backward(rank: int, put: Any) -> None:
    def some(call: Any, self: Compute, ins: Any, live: Any) -> None:
        if ins.microbatch != self.program.microbatches - 1:
            call(self, ins, live)

    _around(Compute, "backward", some, put)


def missing_micro_batch(rank: int, put: Any) -> None:
    def some(call: Any, self: Compute, ins: Any, live: Any) -> None:
        if ins.microbatch != self.program.microbatches - 1:
            call(self, ins, live)

    _around(Compute, "forward", some, put)


def reused_buffer(rank: int, put: Any) -> None:
    buffers: dict[Any, torch.Tensor] = {}

    def into_one(call: Any, self: Links, message: Any, peer: int) -> Any:
        (content,), *rest = call(self, message, peer)
        if message[0].kind == "output":
            kept = buffers.setdefault(peer, torch.zeros(99, 6, dtype=content.dtype))[: len(content)]
            content = kept.copy_(content)
        return [content], *rest

    _around(Links, "receive", into_one, put)


def counted_twice(rank: int, put: Any) -> None:
    def twice(call: Any, self: Compute, ins: Any, live: Any) -> None:
        call(self, ins, live)
        for layer in ins.layers if ins.microbatch == 1 else ():
            for p in self.layers[layer].parameters():
                p.grad.mul_(2)  # type: ignore[union-attr]

    _around(Compute, "backward", twice, put)


def summed_twice(rank: int, put: Any) -> None:
    def twice(call: Any, self: Executor, ins: Any) -> None:
        for g in ins.layers:
            for p in self.groups[g]:
                self.comm.iallreduce(p.grad.contiguous(), (0, 1)).wait()  # type: ignore[union-attr]
        call(self, ins)

    _around(Executor, "_step", twice, put)


def gradients_not_cleared(rank: int, put: Any) -> None:
    put(Owner, "finish_update", lambda self: self.show_update())
    put(Buckets, "clear", lambda self, groups: None)


def not_a_number(rank: int, put: Any) -> None:
    def spoilt(call: Any, self: Compute, ins: Any, live: Any) -> None:
        call(self, ins, live)
        for value in ins.writes:
            if value in live and (value.kind, value.index, value.microbatch) == ("output", 1, 2):
                live[value].view(-1)[0] = float("nan")

    _around(Compute, "forward", spoilt, put)


def swapped_slices(rank: int, put: Any) -> None:
    def rolled(call: Any, self: Communicator, tensor: Any, into: Any, *rest: Any) -> Any:
        return call(self, tensor.roll(into.numel()), into, *rest)

    _around(Communicator, "ireduce_scatter", rolled, put)


def slice_not_gathered(rank: int, put: Any) -> None:
    put(SlicedGroup, "gather", lambda self, comm, ranks: [])


def slice_in_the_wrong_place(rank: int, put: Any) -> None:
    def swapped(call: Any, self: Communicator, *given: Any) -> Any:
        for handle in call(self, *given):
            handle.wait()
        into = given[1]
        into.copy_(into.roll(len(into) // 2))
        return []

    _around(Communicator, "iall_gather", swapped, put)


def other_initial_values(rank: int, put: Any) -> None:
    def other(call: Any, self: Job, program: Any, at: int) -> Any:
        model = call(self, program, at)
        for p in model.parameters():
            p.data.add_(0.1 if rank == 3 else 0.0)
        return model

    _around(Job, "build_for", other, put)


def other_buffers(rank: int, put: Any) -> None:
    def other(call: Any, self: Job, program: Any, at: int) -> Any:
        model = call(self, program, at)
        next(iter(model.children())).register_buffer("mask", torch.ones(3) * (2.0 if rank == 2 else 1.0))
        return model

    _around(Job, "build_for", other, put)


def damaged_while_away(rank: int, put: Any) -> None:
    def other(call: Any, self: HostStore, key: Any, into: torch.Tensor) -> None:
        call(self, key, into)
        into.view(-1)[:1] ^= 1 if into.dtype == torch.uint8 else into.view(-1)[:1] * 0 + 1

    _around(HostStore, "_read_into", other, put)


def gradient_damaged_on_its_way(rank: int, put: Any) -> None:
    def half(call: Any, self: Offloading, g: int) -> Any:
        copy = call(self, g)
        for master in self.state.owners[g].masters:
            master.grad.mul_(0.5)  # type: ignore[union-attr]
        return copy

    def at_once(call: Any, self: HostStreams, source: torch.Tensor, target: torch.Tensor, what: Any) -> Any:
        target.copy_(source)
        return call(self, source, target.clone(), what)

    _around(HostStreams, "copy", at_once, put)
    _around(Offloading, "_gradient", half, put)


def update_not_brought_back(rank: int, put: Any) -> None:
    _around(HostStreams, "copy", lambda call, self, source, target, what: call(
        self, source, target.clone() if what == Op.FETCH.value else target, what), put)  # fmt: skip


def layer_on_the_host_overwritten(rank: int, put: Any) -> None:
    def spoilt(call: Any, self: Executor, index: int, ins: Any) -> None:
        for value in ins.reads:
            if value.kind == "host output":
                self.live[value].data.mul_(2)
        call(self, index, ins)

    _around(Executor, "_copy", spoilt, put)


def piece_left_out(rank: int, put: Any) -> None:
    _around(Buckets, "all_reduce", lambda call, self, ins, comm: call(self, ins, comm) if ins.writes else [], put)


def average_left_out(rank: int, put: Any) -> None:
    put(State, "_average", lambda self, ins, share: [])


def average_of_wrong_weights(rank: int, put: Any) -> None:
    _around(State, "_average", lambda call, self, ins, share: call(self, ins, share / 2), put)


def shares_of_the_wrong_batch(rank: int, put: Any) -> None:
    def half(call: Any, self: BatchRows, step: int) -> Any:
        part = call(self, step)
        return part._replace(weight=part.weight / 2)

    _around(BatchRows, "part", half, put)


def push_left_out_of_an_update(rank: int, put: Any) -> None:
    _around(Shard, "combine", lambda call, self, taken, *rest, **how: call(self, taken[:1], *rest, **how), put)


def push_counted_twice(rank: int, put: Any) -> None:
    _around(
        Shard, "combine", lambda call, self, taken, *rest, **how: call(self, [*taken, taken[-1]], *rest, **how), put
    )


def push_damaged_on_its_way(rank: int, put: Any) -> None:
    if rank == 1:
        _around(Servers, "push", lambda call, self, key, gradient, *rest: call(self, key, gradient * 2, *rest), put)


def stale_push(rank: int, put: Any) -> None:
    first: dict[Any, torch.Tensor] = {}

    def old(call: Any, self: Servers, key: Any, gradient: torch.Tensor, *rest: Any) -> None:
        call(self, key, first.setdefault(key, gradient.clone()), *rest)

    if rank == 1:
        _around(Servers, "push", old, put)


def stale_pull(rank: int, put: Any) -> None:
    first: dict[Any, torch.Tensor] = {}

    def old(call: Any, self: Servers, key: Any) -> torch.Tensor:
        return first.setdefault(key, call(self, key).clone())

    for name in ("pull", "here") if rank == 1 else ():
        _around(Servers, name, old, put)


stale_version = stale_pull


def version_in_another_place(rank: int, put: Any) -> None:
    _around(Versions, "room_for_next", lambda call, self, ins: [t.clone() for t in call(self, ins)], put)


def pull_not_used(rank: int, put: Any) -> None:
    def skipped(call: Any, self: Worker, index: int, ins: Any) -> None:
        if ins.op is Op.PULL and self.compute.rows.base > 0:
            self.here.update(portions(ins))
        call(self, index, ins)

    if rank == 1:
        _around(Worker, "_serve", skipped, put)


def update_of_a_server_left_out(rank: int, put: Any) -> None:
    if rank == 2:
        put(torch.optim.SGD, "step", lambda self, *_: None)


def servers_clip_to_two_norms(rank: int, put: Any) -> None:
    if rank == 2:
        _around(Shard, "clip", lambda call, self, gradients, whole, most: call(self, gradients, 4 * whole, most), put)


def version_overwritten(rank: int, put: Any) -> None:
    def shared(call: Any, self: Versions, *given: Any, **more: Any) -> Any:
        newest = self.newest
        call(self, *given, **more)
        self.alive[max(self.alive)] = newest
        for own, tensor in zip(self.trained, newest, strict=True):
            own.data = tensor

    _around(Versions, "room_for_next", shared, put)


def newest_version_in_every_backward(rank: int, put: Any) -> None:
    def newest(call: Any, self: Versions, value: Value) -> None:
        call(self, value._replace(step=max(self.alive)) if value.kind == "param" else value)

    _around(Versions, "show", newest, put)


sum_of_an_update_left_out = dropped_all_reduce

PLANTERS = {name: globals()[name.replace("-", "_").replace(" ", "_")] for name in BUGS}
