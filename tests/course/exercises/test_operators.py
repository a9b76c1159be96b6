"""Lesson 14: mistakes and waste are told apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from minipar_course.exercise import check
from minipar_course.exercises import operators as tasks
from tests.course.exercises.test_building import is_told


@pytest.mark.parametrize(
    ("forms", "reason", "hint"),
    [
        ({}, "it may store 3,584", "divides its weight"),
        ({"0.gate": "S1 on tp", "0.up": "S1 on tp", "0.down": "S1 on tp"}, "may send 2,048", "columns, then rows"),
    ],
)
def test_wrong_annotations(forms: Any, reason: str, hint: str) -> None:
    is_told(check(lambda: forms, tasks.ANNOTATED), reason, hint)


def mlp(biases: bool = False, gather: bool = False) -> Callable[..., None]:
    """Megatron's perceptron with a mistake. `gather`: each rank gathers the whole weights, which is right."""

    def summed(tensor: Any) -> Any:
        tensor = tensor.clone()
        dist.all_reduce(tensor)
        return tensor

    class F(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: x.clone())
        backward = staticmethod(lambda ctx, gradient: summed(gradient))

    class G(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: summed(x))
        backward = staticmethod(lambda ctx, gradient: gradient)

    def whole(part: Any, dim: int) -> Any:
        parts = [torch.empty_like(part.data) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part.data.contiguous())
        parts[dist.get_rank()] = part
        return torch.cat(parts, dim)

    def train(blocks: Any, batches: Any, loss: Any, lr: float) -> None:
        for x, y in batches:
            blocks.zero_grad()
            for block in blocks:
                if gather:
                    hidden = functional.gelu(functional.linear(x, whole(block.up.weight, 0), whole(block.up.bias, 0)))
                    x = x + functional.linear(hidden, whole(block.down.weight, 1), block.down.bias)
                    continue
                hidden = functional.gelu(block.up(F.apply(x)))
                made = functional.linear(hidden, block.down.weight, block.down.bias if biases else None)
                x = x + G.apply(made) + (0 if biases else block.down.bias)
            loss(x, y).backward()
            for parameter in blocks.parameters():
                parameter.data -= lr * parameter.grad

    return train


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (mlp(biases=True), "not plain torch's", "p times in the sum"),
        (mlp(gather=True), "a rank sends", "weights never move"),
    ],
    ids=["biases", "gathered"],
)
def test_wrong_perceptrons(answer: Any, reason: str, hint: str, clusters: Any) -> None:
    is_told(tasks.MLP.judge(answer, clusters), reason, hint)


def head(largest: bool = True, gather: bool = False) -> Callable[..., None]:
    """The loss over a divided vocabulary with a mistake. `gather`: scores are gathered, which is right."""

    def train(head: Any, batches: Any, loss: Any, lr: float) -> None:
        rank, p = dist.get_rank(), dist.get_world_size()
        with torch.no_grad():
            for x, y in batches:
                scores = head(x)
                words = scores.shape[1]
                if gather:
                    parts = [torch.empty_like(scores) for _ in range(p)]
                    dist.all_gather(parts, scores)
                    gradient = torch.cat(parts, 1).softmax(1).chunk(p, 1)[rank].clone()
                else:
                    most = scores.amax(1)
                    if largest:
                        dist.all_reduce(most, dist.ReduceOp.MAX)
                    raised = (scores - most[:, None]).exp()
                    added = raised.sum(1)
                    dist.all_reduce(added)
                    gradient = raised / added[:, None]
                here = y // words == rank
                gradient[here, y[here] % words] -= 1
                head.weight -= lr * gradient.T @ x / len(x)

    return train


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (head(largest=False), "not plain torch's", "subtracts its own maximum"),
        (head(gather=True), "a rank sends", "scores stay where they are"),
    ],
    ids=["own maximum", "gathered"],
)
def test_wrong_heads(answer: Any, reason: str, hint: str, clusters: Any) -> None:
    is_told(tasks.CROSS_ENTROPY.judge(answer, clusters), reason, hint)
