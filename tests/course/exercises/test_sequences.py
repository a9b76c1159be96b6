"""Lesson 14b: wrong and wasteful answers are told why, on real ranks too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from minipar_course.exercises import sequences as tasks


def _gathered(of: Callable[[list[Tensor], int], Tensor]) -> Callable[[Tensor], Tensor]:
    """An answer that has the tensors of all ranks by messages only, and returns `of` them."""

    def answer(x: Tensor) -> Tensor:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        sent = [dist.isend(x, peer) for peer in range(ranks) if peer != rank]
        every = [x if peer == rank else torch.empty_like(x) for peer in range(ranks)]
        for peer in range(ranks):
            if peer != rank:
                dist.recv(every[peer], peer)
        for message in sent:
            message.wait()
        return of(every, rank)

    return answer


def _exchanged(of: Callable[[list[Tensor], int], Tensor]) -> Callable[[Tensor], Tensor]:
    def answer(x: Tensor) -> Tensor:
        every = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_to_all(every, [x.clone() for _ in every])
        return of(every, dist.get_rank())

    return answer


@pytest.mark.parametrize(("task", "by"), [(tasks.RING, _gathered), (tasks.ULYSSES, _exchanged)], ids=["ring", "all"])
def test_attention_on_ranks(task: Any, by: Callable[..., Any], clusters: Any) -> None:
    """Three mistakes are recognised; what moves all tensors to all ranks is right, and wasteful."""
    assert len(task.mistakes) == 3
    for wrong, hint in task.mistakes:
        verdict = task.judge(by(wrong), clusters)
        assert not verdict
        assert verdict.hint == hint
    verdict = task.judge(by(tasks._of_rank), clusters)
    assert "right on 2 ranks" in verdict.reason
    assert verdict.hint == task.wasteful
    assert "def " in task.judge(None).hint


def test_a_call_that_does_the_work_is_refused(clusters: Any) -> None:
    def gathers(x: Tensor) -> Tensor:
        every = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(every, x)
        return tasks._of_rank(every, dist.get_rank())

    assert "all_gather, which does the work itself" in tasks.RING.judge(gathers, clusters).reason


@pytest.mark.parametrize(("task", "right"), [(tasks.BLOCKS, tasks.zigzag), (tasks.RATIO, lambda p: p / 2)])
def test_answers_without_ranks(task: Any, right: Any) -> None:
    assert task.judge(right)
    assert len(task.mistakes) == 3
    for wrong, hint in task.mistakes:
        assert task.judge(wrong).hint == hint
    assert not task.judge(lambda *given: None)
    assert not task.judge(None)


def test_unbalanced_blocks_are_right_and_wasteful() -> None:
    verdict = tasks.BLOCKS.judge(lambda ranks: [[2 * r, 2 * r + 1] for r in range(ranks)])
    assert "is right, but wasteful: rank 1 computes 1.50 times the mean" in verdict.reason
    assert "for 1 ranks" in tasks.BLOCKS.judge(lambda ranks: [[0, 1, 2, 3]]).reason
