"""What students build with torch.distributed: mistakes and waste are told apart, with reasons.

The solutions of the lessons run in tests/course/test_solutions.py, and their stubs in tests/course/test_assignments.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minipar_course import against
from minipar_course.against import Comparison, OnRank, against_plain_torch, counted, on_ranks, plain_sgd
from minipar_course.assignments import source
from minipar_course.exercises import building as tasks
from minipar_course.exercises.kinds.verdict import Verdict

SOLUTIONS = Path(__file__).parents[3] / "lessons" / "solutions"


def solution(name: str) -> Callable[..., Any]:
    """The function that a notebook of solutions defines."""
    for path in SOLUTIONS.glob("*.ipynb"):
        for cell in json.loads(path.read_text())["cells"]:
            if cell["cell_type"] == "code" and f"def {name}(" in source(cell):
                names: dict[str, Any] = {"torch": torch, "dist": dist, "__name__": "__main__"}
                exec(source(cell), names)
                return names[name]
    raise AssertionError(name)


# the ring ------------------------------------------------------------------------------------------------------------


def to_everybody(x):
    """Right, but each rank sends its whole tensor to each other one."""
    rank, p = dist.get_rank(), dist.get_world_size()
    mine = x.clone()
    sending = [dist.isend(mine, other) for other in range(p) if other != rank]
    for other in range(p):
        if other != rank:
            arrived = torch.empty_like(x)
            dist.recv(arrived, other)
            x += arrived
    for message in sending:
        message.wait()
    return x


def mean_of_all(x):
    return solution("my_allreduce")(x) / dist.get_world_size()


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (to_everybody, "but a rank sends 128 bytes; 128 are enough|a rank sends 288 bytes; 144 are enough", "chunks"),
        (lambda x: x, "rank 0 has", "what the rank began with"),
    ],
)
def test_wrong_rings(answer, reason, hint, clusters):
    is_told(tasks.RING.judge(answer, clusters), reason, hint)


# halving and doubling ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (lambda x: solution("my_allreduce")(x), "but a rank sends 6 messages; 4 are enough", "distance p/2"),
        (mean_of_all, "rank 0 has", "that is the mean"),
    ],
    ids=["ring", "mean"],
)
def test_wrong_halvings(answer, reason, hint, clusters):
    is_told(tasks.HALVING.judge(answer, clusters), reason, hint)


# micro-batches on several ranks --------------------------------------------------------------------------------------


def accumulated(weight: str = "rows", divide: bool = True) -> Callable[..., None]:
    """Accumulation with a mistake."""

    def train(model, batches, loss, lr):
        p = dist.get_world_size()
        for x, y in batches:
            total = [torch.zeros_like(parameter) for parameter in model.parameters()]
            for rows, target in zip(x.chunk(4), y.chunk(4), strict=True):
                model.zero_grad()
                (loss(model(rows), target) * (len(rows) / len(x) if weight == "rows" else 1 / 4)).backward()
                for so_far, parameter in zip(total, model.parameters(), strict=True):
                    so_far += parameter.grad
            for so_far, parameter in zip(total, model.parameters(), strict=True):
                dist.all_reduce(so_far)
                parameter.data -= lr * so_far / (p if divide else 1)

    return train


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (accumulated(weight="parts"), "not plain torch's", "with more rows counts more"),
        (accumulated(divide=False), "not plain torch's", "p times too large"),
    ],
    ids=["equal parts", "not divided"],
)
def test_wrong_accumulations(answer, reason, hint, clusters):
    is_told(tasks.ACCUMULATED.judge(answer, clusters), reason, hint)


# data parallel -------------------------------------------------------------------------------------------------------


def ddp(every_step: bool = False) -> Callable[..., None]:
    """The loop of data parallelism. `every_step`: rank 0 sends its weights before each step, which is right."""

    def train(model, batches, loss, lr):
        p = dist.get_world_size()
        for step, (x, y) in enumerate(batches):
            if every_step or not step:
                for parameter in model.parameters():
                    dist.broadcast(parameter.data, 0)
            model.zero_grad()
            loss(model(x), y).backward()
            for parameter in model.parameters():
                summed = parameter.grad.clone()
                dist.all_reduce(summed)
                parameter.data -= lr * summed / p

    return train


def one_sum_each(model, batches, loss, lr, overlap=True):
    """Overlaps, but with a message for each tensor; or waits for each of them inside the backward."""
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    under_way = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda one: under_way.append(dist.all_reduce(one.grad, async_op=overlap))
        )
    for x, y in batches:
        model.zero_grad()
        loss(model(x), y).backward()
        for work in filter(None, under_way):
            work.wait()
        under_way.clear()
        for parameter in model.parameters():
            parameter.data -= lr * parameter.grad / dist.get_world_size()


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (plain_sgd, "not plain torch's", "nothing was exchanged"),
        (ddp(every_step=True), "a rank sends 1.3 times the bytes", "once all weights"),
    ],
    ids=["alone", "weights each step"],
)
def test_wrong_loops(answer, reason, hint, clusters):
    is_told(tasks.NAIVE_DDP.judge(answer, clusters), reason, hint)


def test_a_right_loop_may_be_wasteful(clusters):
    is_told(tasks.BUCKET_DDP.judge(ddp(), clusters), "0 sums of 3 steps began inside a backward", "async_op=True")
    waiting = partial(one_sum_each, overlap=False)
    is_told(
        tasks.BUCKET_DDP.judge(waiting, clusters),
        "36 sums of 3 steps began inside a backward, which waited for 36",
        "wait for all after the backward",
    )
    is_told(tasks.BUCKET_DDP.judge(one_sum_each, clusters), "12 sums in a step, for 12 tensors", "one buffer")


def test_an_error_of_a_rank_is_named(clusters):
    def train(model, batches, loss, lr):
        raise ValueError("no rows")

    assert "raised ValueError: no rows" in tasks.NAIVE_DDP.judge(train, clusters).reason


# a server ------------------------------------------------------------------------------------------------------------


def server(divide: int = 1, by: str = "messages") -> Callable[..., None]:
    """Push and pull, or one with a mistake. `divide`: by the number of ranks minus this."""

    def train(model, batches, loss, lr):
        rank, p = dist.get_rank(), dist.get_world_size()

        def pull():
            for parameter in model.parameters():
                if by == "broadcast":
                    dist.broadcast(parameter.data, 0)
                elif rank == 0:
                    for worker in range(1, p):
                        dist.send(parameter.data, worker)
                else:
                    dist.recv(parameter.data, 0)

        for x, y in batches:
            pull()
            if rank:
                model.zero_grad()
                loss(model(x), y).backward()
            for parameter in model.parameters():
                if rank:
                    dist.send(parameter.grad, 0)
                else:
                    pushed = torch.empty_like(parameter)
                    for worker in range(1, p):
                        dist.recv(pushed, worker)
                        parameter.data -= lr * pushed / (p - divide)
        pull()

    return train


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (server(divide=0), "not plain torch's", "divide by the number of workers"),
        (server(by="broadcast"), "calls broadcast", "use send and recv"),
    ],
    ids=["all ranks", "broadcast"],
)
def test_wrong_servers(answer, reason, hint, clusters):
    is_told(tasks.SERVER.judge(answer, clusters), reason, hint)


# ZeRO ----------------------------------------------------------------------------------------------------------------


def with_momentum(model, batches, loss, lr):
    """Data parallelism with the whole momentum on each rank."""
    momentum: dict[Any, Any] = {}
    for x, y in batches:
        model.zero_grad()
        loss(model(x), y).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            momentum[parameter] = 0.9 * momentum.get(parameter, 0) + parameter.grad / dist.get_world_size()
            parameter.data -= lr * momentum[parameter]


def own_chunk_only(model, batches, loss, lr):
    """ZeRO-1 without its all-gather."""
    rank, p = dist.get_rank(), dist.get_world_size()
    momentum: dict[Any, Any] = {}
    for x, y in batches:
        model.zero_grad()
        loss(model(x), y).backward()
        for parameter in model.parameters():
            mine = parameter.data.chunk(p)[rank]
            gradient = torch.empty_like(mine)
            dist.reduce_scatter(gradient, list(parameter.grad.chunk(p)))
            momentum[parameter] = 0.9 * momentum.get(parameter, 0) + gradient / p
            mine -= lr * momentum[parameter]


@pytest.mark.parametrize(
    ("task", "answer", "reason", "hint"),
    [
        (tasks.ZERO_1, own_chunk_only, "not plain torch's", "all_gather brings it those of the others"),
        (tasks.ZERO_1, with_momentum, "a rank holds up to", "only its part of momentum"),
        (tasks.ZERO_2, "my_zero1", "a rank holds up to", "only its part of gradients and momentum"),
        (tasks.ZERO_3, "my_zero2", "a rank holds up to", "only its part of parameters"),
        (tasks.ZERO_1, "my_zero3", "a rank sends 3.3 Ψ (N-1)/N numbers in a step; 2 are enough", "reduce_scatter"),
    ],
    ids=["own chunk", "data parallel", "1 for 2", "2 for 3", "3 for 1"],
)
def test_wrong_shares(task, answer, reason, hint, clusters):
    is_told(task.judge(solution(answer) if isinstance(answer, str) else answer, clusters), reason, hint)


# a graph that holds less ---------------------------------------------------------------------------------------------


def checkpointed(random: bool = True) -> Callable[..., Any]:
    """Checkpointing, or that without the random numbers of the forward."""

    class Checkpoint(torch.autograd.Function):
        @staticmethod
        def forward(ctx, layer, x, *parameters):
            ctx.layer, ctx.random = layer, torch.get_rng_state()
            ctx.save_for_backward(x)
            with torch.no_grad():
                return layer(x)

        @staticmethod
        def backward(ctx, gradient):
            (x,), now = ctx.saved_tensors, torch.get_rng_state()
            x = x.detach().requires_grad_()
            if random:
                torch.set_rng_state(ctx.random)
            with torch.enable_grad():
                output = ctx.layer(x)
            torch.set_rng_state(now)
            found = torch.autograd.grad(output, (x, *ctx.layer.parameters()), gradient)
            return None, *found

    def my_checkpointed(layers, x):
        for layer in layers:
            x = Checkpoint.apply(layer, x, *layer.parameters())
        return x

    return my_checkpointed


def plainly(layers, x):
    return layers(x)


@pytest.mark.parametrize(
    ("task", "answer", "reason", "hint"),
    [
        (tasks.CHECKPOINT, plainly, "bytes live after the forward", "save the input alone"),
        (tasks.CHECKPOINT, checkpointed(random=False), "the gradients of the input differ from", "same random numbers"),
        (tasks.OFFLOAD, plainly, "bytes live after the forward", "unpack(name) reads it"),
        (tasks.OFFLOAD, checkpointed(), "a layer runs 2 times", "1 run"),
    ],
    ids=["plain", "random numbers", "nothing offloaded", "recomputed"],
)
def test_wrong_graphs(task, answer, reason, hint):
    is_told(task.judge(answer), reason, hint)


# pipelines -----------------------------------------------------------------------------------------------------------


def one_by_one(stage, batches, loss, lr):
    """Right, but each micro-batch goes forward and backward before the next one begins."""
    rank, p = dist.get_rank(), dist.get_world_size()
    for x, y in batches:
        stage.zero_grad()
        for rows, target in zip(x.chunk(16), y.chunk(16), strict=True):
            value = torch.empty_like(rows) if rank else rows
            if rank:
                dist.recv(value, rank - 1)
                value.requires_grad_()
            output, gradient = stage(value), None
            if rank < p - 1:
                dist.send(output.detach(), rank + 1)
                gradient = torch.empty_like(output)
                dist.recv(gradient, rank + 1)
            (output if rank < p - 1 else loss(output, target) / 16).backward(gradient)
            if rank:
                dist.send(value.grad, rank - 1)
        for parameter in stage.parameters():
            parameter.data -= lr * parameter.grad


def gpipe(scale: bool = True) -> Callable[..., None]:
    """GPipe, or one whose loss is not divided by the number of micro-batches."""

    def train(stage, batches, loss, lr):
        rank, p = dist.get_rank(), dist.get_world_size()
        for x, y in batches:
            stage.zero_grad()
            under_way, graphs = [], []
            for rows, target in zip(x.chunk(16), y.chunk(16), strict=True):
                value = torch.empty_like(rows) if rank else rows
                if rank:
                    dist.recv(value, rank - 1)
                    value.requires_grad_()
                output = stage(value)
                if rank < p - 1:
                    under_way.append(dist.isend(output.detach(), rank + 1))
                else:
                    output = loss(output, target) / (16 if scale else 1)
                graphs.append((value, output))
            for value, output in graphs:
                gradient = torch.empty_like(output) if rank < p - 1 else None
                if gradient is not None:
                    dist.recv(gradient, rank + 1)
                output.backward(gradient)
                if rank:
                    under_way.append(dist.isend(value.grad, rank - 1))
            for message in under_way:
                message.wait()
            for parameter in stage.parameters():
                parameter.data -= lr * parameter.grad

    return train


@pytest.mark.parametrize(
    ("task", "answer", "reason", "hint"),
    [
        (tasks.GPIPE, gpipe(scale=False), "not plain torch's", "divide it by the number of micro-batches"),
        (tasks.GPIPE, one_by_one, "sends 1 micro-batch before its first backward, and not 16", "then all backwards"),
        (tasks.ONE_F_ONE_B, one_by_one, "sends 1 micro-batch before its first backward, and not 2", "p - r forwards"),
        (tasks.ONE_F_ONE_B, gpipe(), "the first stage holds up to", "one backward after each forward"),
    ],
    ids=["scale", "one by one", "one by one for 1f1b", "gpipe"],
)
def test_wrong_pipelines(task, answer, reason, hint, clusters):
    is_told(task.judge(answer, clusters), reason, hint)


def all_receive_first(stage, batches, loss, lr):
    rank, p = dist.get_rank(), dist.get_world_size()
    for x, _ in batches:
        dist.recv(torch.empty_like(x), (rank + 1) % p)
        dist.send(x, (rank - 1) % p)


def test_ranks_that_wait_for_each_other_are_told_so(monkeypatch):
    """torch.distributed waits in C++, where no watchdog looks: it has a limit of its own."""
    monkeypatch.setattr(against, "LONGEST_WAIT", 2.0)
    verdict = tasks.GPIPE.judge(all_receive_first)
    is_told(verdict, "on 2 ranks your function does not end", "Each recv needs its send")


# for other models ----------------------------------------------------------------------------------------------------


def test_a_model_of_ones_own(clusters):
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randn(4, 6, dtype=torch.float64, generator=generator) for _ in range(4)]
    batches = [(rows[0], rows[1]), (rows[2], rows[3])]
    found = against_plain_torch(ddp(), lambda: nn.Linear(6, 6), batches, alike=False, cluster=clusters(2))
    assert isinstance(found, Comparison)
    assert found.right
    size = 8 * (6 * 6 + 6)
    assert found.sent == size // 2 + 2 * size  # of two ranks: half of the weights, and of two steps the gradients
    assert [rank.messages for rank in found.ranks] == [2 + 4, 2 + 4]
    assert repr(found).startswith("equal to plain torch\nranks 0, 1 sent 840 bytes: 4 all_reduce, 2 broadcast\n")


def is_told(verdict: Verdict, reason: str, hint: str) -> None:
    assert not verdict
    assert any(one in verdict.reason for one in reason.split("|")), verdict
    assert any(one in verdict.hint for one in hint.split("|")), verdict


def by_both_interfaces(rows):
    """Each collective twice: by its usual name, and as a functional collective, whose result is read."""
    from torch.distributed import _functional_collectives as functional

    x, group = torch.ones(rows, dtype=torch.float64), dist.new_group([0, 1])
    once, twice = torch.empty(rows // 2, dtype=torch.float64), torch.empty(2 * rows, dtype=torch.float64)
    if dist.get_rank() > 1:
        return [OnRank(None, {}, 0, {}, 0, 0, 0, 0)] * 2
    with counted() as usual:
        dist.all_reduce(x.clone(), group=group)
        dist.all_gather_into_tensor(twice, x, group=group)
        dist.reduce_scatter_tensor(once, x, group=group)
        dist.all_to_all_single(torch.empty_like(x), x, group=group)
        dist.broadcast(x, 0, group=group)
    with counted() as other:
        functional.all_reduce(x, "sum", group).sum()
        functional.all_gather_tensor(x, 0, group).sum()
        torch.ops._c10d_functional.reduce_scatter_tensor(x, "sum", 2, group.group_name).sum()
        functional.all_to_all_single(x, None, None, group).sum()
        functional.broadcast(x, 0, group).sum()
    return [count.on_rank(None, {}) for count in (usual, other)]


def test_functional_collectives_are_counted_as_the_others(clusters):
    for usual, other in on_ranks(by_both_interfaces, 8, ranks=4, cluster=clusters(4))[:2]:
        assert dict(usual.calls) == dict.fromkeys(
            ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"), 1
        )
        assert usual.calls == other.calls
        assert usual.sent == other.sent == 64 * (2 + 2 + 1 + 1 + 1) / 2


def backward_by_all_to_all(model, batches, loss, lr):
    """An all-to-all that autograd follows sends in the backward, too."""
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    x = batches[0][0]
    loss(model(all_to_all_single_autograd(x.clone().requires_grad_(), None, None, dist.group.WORLD)), x).backward()


def test_an_all_to_all_inside_of_a_backward_is_early(clusters):
    batches = [(torch.ones(4, 2).double(), torch.ones(4, 2).double())]
    found = against_plain_torch(backward_by_all_to_all, lambda: nn.Linear(2, 2), batches, cluster=clusters(2))
    assert [(rank.calls["all_to_all"], rank.early) for rank in found.ranks] == [(2, 1), (2, 1)]
