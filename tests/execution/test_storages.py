"""Live storages, counted to the byte: compared with torch's profiler, and in cases that are easy to get wrong."""

from __future__ import annotations

import gc

import torch
from torch import nn

from minipar.execution.memory.storages import Storages


class Log(Storages):
    """Keeps every change, and the highest level."""

    def __init__(self) -> None:
        super().__init__()
        self.deltas: list[int] = []
        self.highest = 0

    def changed(self, held, delta: int) -> None:
        self.deltas.append(delta)
        self.highest = max(self.highest, self.live)

    def now(self) -> int:
        self.settle()
        return self.live


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_training_step_is_what_the_profiler_saw():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Dropout(0.1), nn.Linear(64, 16))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(24, 32)
    step(model, optimizer, x)
    with torch.profiler.profile(profile_memory=True) as profiler:
        step(model, optimizer, x)
    level = highest = 0
    for size in _allocations(profiler):
        level += size
        highest = max(highest, level)
    log = Log()
    with log:
        step(model, optimizer, x)
    assert log.now() == 0
    assert abs(log.highest - highest) <= 64  # (scalars that a kernel makes for itself)
    assert log.highest > 30_000


def _allocations(profiler) -> list[int]:
    found = []

    def walk(event) -> None:
        if event.typed[0] == torch._C._profiler._EventType.Allocation:
            found.append((event.start_time_ns, event.typed[1].alloc_size))
        for child in event.children:
            walk(child)

    for root in profiler.profiler.kineto_results.experimental_event_tree():
        walk(root)
    return [size for _, size in sorted(found, key=lambda one: one[0])]


def test_views_and_tensors_from_outside_count_for_nothing():
    outside = torch.randn(100, 100)
    log = Log()
    with log:
        view = outside[10:20].view(-1)
        same = view.reshape(10, 100).detach()
        made = outside + 1
        part = made[3]
        assert log.now() == made.untyped_storage().nbytes() == 40_000
        del made
        assert log.now() == 40_000, "a view keeps all of it"
        del part
    assert log.now() == 0
    assert same.sum() == view.sum()


def test_what_autograd_keeps_is_live_until_the_backward():
    weight = torch.ones(50, requires_grad=True)
    log = Log()
    with log:
        loss = (weight * 2).tanh().sum()  # tanh saves its output, nothing else is needed again
        gc.collect()
        assert log.now() == 50 * 4 + 4
        loss.backward()
        assert log.now() == 50 * 4 + 4, "the gradient, and the loss"
    del loss
    weight.grad = None
    assert log.now() == 0


def test_storages_that_change_their_size():
    before = torch.UntypedStorage.resize_
    log = Log()
    with log:
        tensor = torch.empty(1000)
        tensor.untyped_storage().resize_(0)
        assert log.now() == 0
        tensor.untyped_storage().resize_(4000)
        assert log.now() == 4000
        out = torch.empty(0)
        torch.add(tensor, tensor, out=out)
        assert log.now() == 8000
    assert torch.UntypedStorage.resize_ is before
    del tensor, out
    assert log.now() == 0
    assert sum(log.deltas) == 0


def test_lists_of_tensors_and_sparse_ones():
    log = Log()
    with log:
        parts = torch.unbind(torch.zeros(4, 25))
        doubled = torch._foreach_mul(list(parts), 2.0)
        assert log.now() == 400 + 4 * 100
        torch.eye(3).to_sparse()
    del parts, doubled
    assert log.now() == 0


def test_registered_tensors_count_from_then_on():
    tensor = torch.zeros(10)
    log = Log()
    assert log.register(tensor, "parameters", 3).layer == 3
    assert log.register(tensor.view(2, 5), "parameters", 4).layer == 3, "one storage, one owner"
    assert log.now() == 40
    del tensor
    assert log.now() == 0
