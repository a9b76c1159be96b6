"""Lessons 06 and 12: compression and stashing. Mistakes and waste are told apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from minipar_course.exercises import inexact as tasks
from tests.course.exercises.test_building import is_told


def compressed(keep_all: bool = False, dense: bool = False) -> Callable[..., None]:
    """Compression with a mistake. `keep_all`: what was sent waits, too; `dense`: zeros are sent, which is right."""

    def train(model: Any, batches: Any, loss: Any, lr: float) -> None:
        p = dist.get_world_size()
        waiting = {each: torch.zeros_like(each.data).flatten() for each in model.parameters()}
        for x, y in batches:
            model.zero_grad()
            loss(model(x), y).backward()
            for each in model.parameters():
                whole = each.grad.flatten() + waiting[each]
                places = whole.abs().topk(-(-whole.numel() // 10)).indices
                total = torch.zeros_like(whole).index_copy(0, places, whole[places])
                waiting[each] = whole if keep_all else whole - total
                if dense:
                    dist.all_reduce(total)
                else:
                    every = [torch.empty_like(total) for _ in range(p)]
                    dist.all_gather(every, total)
                    total = torch.stack(every).sum(0)
                each.data -= lr * total.view_as(each) / p

    return train


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (compressed(keep_all=True), "not plain torch's", "what was sent must not wait"),
        (compressed(dense=True), "a rank sends", "the values and their places"),
    ],
    ids=["twice", "dense"],
)
def test_wrong_compressions(answer: Any, reason: str, hint: str, clusters: Any) -> None:
    is_told(tasks.COMPRESSED.judge(answer, clusters), reason, hint)


def pipedream(keep: bool = False, flush: bool = False) -> Callable[..., None]:
    """PipeDream with a mistake. `keep`: no version is let go, which is right; `flush`: a batch at a time."""

    def train(stage: Any, batches: Any, loss: Any, lr: float) -> None:
        rank, p = dist.get_rank(), dist.get_world_size()
        under_way: list[Any] = []
        messages: list[Any] = []
        all_kept: list[Any] = []

        def backward() -> None:
            value, weights, output = under_way.pop(0)
            gradient = None
            if rank < p - 1:
                gradient = torch.empty_like(output)
                dist.recv(gradient, rank + 1)
            stage.zero_grad()
            output.backward(gradient)
            if rank:
                messages.append(dist.isend(value.grad, rank - 1))
            for name, each in stage.named_parameters():
                each.data -= lr * weights[name].grad

        for i, (x, y) in enumerate(batches):
            value = torch.empty_like(x) if rank else x
            if rank:
                dist.recv(value, rank - 1)
                value.requires_grad_()
            own = dict(stage.named_parameters())
            weights = {name: each.detach().clone().requires_grad_() for name, each in own.items()}
            all_kept.append(weights if keep else None)
            output = torch.func.functional_call(stage, weights, (value,))
            if rank < p - 1:
                messages.append(dist.isend(output.detach(), rank + 1))
            else:
                output = loss(output, y)
            under_way.append((value, weights, output))
            if flush or i >= p - 1 - rank:
                backward()
        while under_way:
            backward()
        for message in messages:
            message.wait()

    return train


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (pipedream(flush=True), "not plain torch's", "begins with p - 1 - r more forwards"),
        (pipedream(keep=True), "the first stage holds up to", "let the weights of a batch go"),
    ],
    ids=["flush", "all versions"],
)
def test_wrong_stashes(answer: Any, reason: str, hint: str, clusters: Any) -> None:
    is_told(tasks.STASHED.judge(answer, clusters), reason, hint)
