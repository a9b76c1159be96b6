"""Mistakes in the engine, each planted in ranks while they run a plan: plain torch must show every one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from minipar.cluster import worker
from minipar.comm.buckets import Buckets
from minipar.comm.communicator import Communicator
from minipar.comm.handles import Handle
from minipar.comm.links import Links
from minipar.execution import repartition
from minipar.execution.compute import Compute
from minipar.execution.execution import Job
from minipar.execution.mean_loss import MeanLoss
from minipar.execution.streams import HostStreams
from minipar.program import Op

Put = Callable[[Any, str, Any], None]
_planted = pytest.MonkeyPatch()


def plant(name: str) -> None:
    """In a rank: make this mistake from now on."""
    MISTAKES[name][1](worker.context().rank, _planted.setattr)


def mend() -> None:
    """In a rank: make no mistakes any more."""
    _planted.undo()


def _around(kind: type, name: str, change: Callable[..., Any], put: Put) -> None:
    """Replace a method by `change(method, self, ...)`."""
    method = getattr(kind, name)
    put(kind, name, lambda self, *args, **given: change(method, self, *args, **given))


def dropped_sum(rank: int, put: Put) -> None:
    put(Buckets, "all_reduce", lambda self, ins, comm: [])


def wrong_group(rank: int, put: Put) -> None:
    group = (0, 1) if rank < 2 else (2, 3)
    _around(Buckets, "all_reduce", lambda call, self, ins, comm: call(self, ins._replace(group=group), comm), put)


def doubled_loss(rank: int, put: Put) -> None:
    _around(MeanLoss, "__call__", lambda call, self, *given: call(self, *given) * 2, put)


def swapped_messages(rank: int, put: Put) -> None:
    before: list[Any] = []

    def late(call: Any, self: Links, message: Any, contents: Any, *rest: Any) -> None:
        own = contents if message[0].kind == "output" else []
        same = own and before and [t.shape for t in before[-1]] == [t.shape for t in own]
        call(self, message, before[-1] if same else contents, *rest)
        before.extend([own] if own else [])

    _around(Links, "send", late, put)


def stale_weight(rank: int, put: Put) -> None:
    old: dict[int, torch.Tensor] = {}

    def with_old(call: Any, self: Compute, ins: Any, live: Any) -> None:
        for p in self.layers[ins.layers[0]].parameters():
            p.data.copy_(old.setdefault(id(p), p.detach().clone()))
        call(self, ins, live)

    _around(Compute, "backward", with_old, put)


def update_left_out(rank: int, put: Put) -> None:
    if rank == 1:
        put(torch.optim.SGD, "step", lambda self, *_: None)


def missing_backward(rank: int, put: Put) -> None:
    def some(call: Any, self: Compute, ins: Any, live: Any) -> None:
        call(self, ins, live)
        for layer in ins.layers if ins.microbatch == 1 else ():
            for p in self.layers[layer].parameters():
                p.grad = None

    _around(Compute, "backward", some, put)


def wrong_form(rank: int, put: Put) -> None:
    change = repartition._change

    def left(tensor: Any, old: str, new: str, ins: Any, *rest: Any) -> Any:
        partial = old == "P" and new == "R"
        return (Handle(None, None, set()), lambda: tensor) if partial else change(tensor, old, new, ins, *rest)

    put(repartition, "_change", left)


def wrong_order_of_shards(rank: int, put: Put) -> None:
    joined = repartition._joined
    put(repartition, "_joined", lambda parts, letter, rows: joined(list(parts)[::-1], letter, rows))


def swapped_slices(rank: int, put: Put) -> None:
    def rolled(call: Any, self: Communicator, tensor: Any, into: Any, *rest: Any) -> Any:
        return call(self, tensor.roll(into.numel()), into, *rest)

    _around(Communicator, "ireduce_scatter", rolled, put)


def slice_in_the_wrong_place(rank: int, put: Put) -> None:
    def swapped(call: Any, self: Communicator, *given: Any) -> Any:
        for handle in call(self, *given):
            handle.wait()
        into = given[1]
        into.copy_(into.roll(len(into) // 2))
        return []

    _around(Communicator, "iall_gather", swapped, put)


def other_initial_values(rank: int, put: Put) -> None:
    def other(call: Any, self: Job) -> Any:
        model = call(self)
        for p in model.parameters():
            p.data.add_(0.1 if rank == 1 else 0.0)
        return model

    _around(Job, "build", other, put)


def damaged_while_away(rank: int, put: Put) -> None:
    def other(call: Any, self: HostStreams, source: torch.Tensor, into: torch.Tensor, line: str, *more: Any) -> Any:
        copy = call(self, source, into, line, *more)
        if line == Op.FETCH.value:
            copy.result()
            (into if into.is_floating_point() else into.view(torch.float64)).mul_(2)
        return copy

    _around(HostStreams, "copy", other, put)


# By its name: the plan, and what plants it.
MISTAKES: dict[str, tuple[str, Callable[[int, Put], None]]] = {
    "a sum left out": ("dp=2", dropped_sum),
    "a sum over another group": ("dp=4", wrong_group),
    "a loss that counts twice": ("pp=2 microbatches=2", doubled_loss),
    "messages in another order": ("pp=2 schedule=gpipe microbatches=6", swapped_messages),
    "a weight of the step before": ("dp=2 pp=2", stale_weight),
    "an update left out": ("dp=4 zero=1", update_left_out),
    "a gradient that is not added": ("microbatches=3 dp=2", missing_backward),
    "a partial sum taken for the whole": ("tp=2", wrong_form),
    "shards in another order": ("tp=2 sequence_parallel=true", wrong_order_of_shards),
    "slices swapped": ("dp=2 zero=2 microbatches=2", swapped_slices),
    "a slice in another place": ("dp=2 zero=3", slice_in_the_wrong_place),
    "other initial values": ("dp=2 pp=2", other_initial_values),
    "damage while it is away": ("dp=2 offload=activations microbatches=3", damaged_while_away),
}
