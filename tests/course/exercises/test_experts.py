"""Lesson 15: mistakes and waste are told apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from minipar_course.exercises import experts as tasks
from tests.course.exercises.test_building import is_told


def everywhere(divide: bool = True) -> Callable[..., None]:
    """Each rank has all rows and computes those of its experts: right and wasteful, or wrong, too."""

    class Sum(torch.autograd.Function):
        """The sum over the ranks of what each of them reads; backward the sum of their gradients."""

        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            x = x.clone()
            dist.all_reduce(x)
            return x

        backward = forward

    def train(layer: Any, batches: Any, loss: Any, lr: float) -> None:
        rank, p, own = dist.get_rank(), dist.get_world_size(), len(layer.up)
        for x, y in batches:
            layer.zero_grad()
            chance, chosen = layer.gate(x).softmax(-1).max(-1)
            parts_of_x = [torch.empty_like(x) for _ in range(p)]
            dist.all_gather(parts_of_x, x)
            rows = torch.cat(parts_of_x)
            wanted = [torch.empty_like(chosen) for _ in range(p)]
            dist.all_gather(wanted, chosen)
            every = torch.cat(wanted)
            made = torch.zeros_like(rows)
            for e in range(own):
                here = (every == rank * own + e).nonzero()[:, 0]
                made = made.index_put((here,), layer.one(e, rows[here]))
            mine = Sum.apply(made).chunk(p)[rank]
            loss(x + chance[:, None] * mine, y).backward()
            dist.all_reduce(layer.gate.weight.grad)
            for name, parameter in layer.named_parameters():
                parts = p if divide or name == "gate.weight" else 1
                parameter.data -= lr * parameter.grad / parts

    return train


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (everywhere(divide=False), "not plain torch's", "the sum over all ranks' losses"),
        (everywhere(), "a rank sends", "to the rank of its expert, and to no other one"),
    ],
    ids=["sum", "to everybody"],
)
def test_wrong_experts(answer: Any, reason: str, hint: str, clusters: Any) -> None:
    is_told(tasks.EXPERT_PARALLEL.judge(answer, clusters), reason, hint)
