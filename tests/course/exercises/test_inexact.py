"""Lessons 06 and 12: compression and stashing. Stubs, mistakes and waste are told apart; so are the solutions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from minipar_course.exercises import inexact as tasks
from tests.course.exercises.test_building import is_told, solution, stub


def compressed(feedback: str = "rest", dense: bool = False) -> Callable[..., None]:
    """Compression with error feedback, or one with a mistake. `dense`: zeros are sent, too, which is right."""

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
                rest = {"rest": whole - total, "none": 0 * whole, "all": whole}[feedback]
                waiting[each] = rest
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
        (stub, "nothing is written here yet", "raise"),
        (compressed("all"), "not plain torch's", "what was sent must not wait"),
        (compressed(dense=True), "a rank sends", "the values and their places"),
    ],
    ids=["stub", "twice", "dense"],
)
def test_wrong_compressions(answer: Any, reason: str, hint: str, clusters: Any) -> None:
    is_told(tasks.COMPRESSED.judge(answer, clusters), reason, hint)


def pipedream(stash: bool = True, keep: bool = False, flush: bool = False) -> Callable[..., None]:
    """PipeDream, or one with a mistake. `keep`: no version is let go, which is right; `flush`: a batch at a time."""

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
            copies = {name: each.detach().clone().requires_grad_() for name, each in own.items()}
            weights = copies if stash else own
            all_kept.append(copies if keep else None)
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
        (stub, "nothing is written here yet", "raise"),
        (pipedream(flush=True), "not plain torch's", "begins with p - 1 - r more forwards"),
        (pipedream(keep=True), "the first stage holds up to", "let the weights of a batch go"),
    ],
    ids=["stub", "flush", "all versions"],
)
def test_wrong_stashes(answer: Any, reason: str, hint: str, clusters: Any) -> None:
    is_told(tasks.STASHED.judge(answer, clusters), reason, hint)


def test_the_solutions_pass(clusters: Any) -> None:
    assert tasks.COMPRESSED.judge(solution("my_compressed"), clusters)
    assert tasks.STASHED.judge(solution("my_pipedream"), clusters)
