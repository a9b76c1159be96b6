"""The exercises of lesson 08: plausible mistakes fail, and the reason is given."""

from __future__ import annotations

import pytest

from minipar_course.exercise import check
from minipar_course.exercises import sharding as tasks
from minipar_course.exercises.kinds.order import GATHER, SCATTER, B, F

# an optimizer in parallel


def updating(scatter=True, in_place=True, gather=True):
    """The update of ZeRO-1, or one with a mistake. (Local functions reach the ranks by value.)"""

    def update(comm, parameters, gradient, momentum):
        import torch

        if scatter:
            mine = comm.reduce_scatter(gradient)
        else:
            mine = comm.allreduce(gradient).tensor_split(comm.size)[comm.rank]
        if in_place:
            momentum.mul_(0.9).add_(mine)
        else:
            momentum = 0.9 * momentum + mine
        new = parameters.tensor_split(comm.size)[comm.rank] - 0.1 * momentum
        if gather:
            return comm.all_gather(new)
        parts = list(parameters.tensor_split(comm.size))
        parts[comm.rank] = new
        return torch.cat(parts)

    return update


def test_a_mistake_that_one_rank_shows():
    verdict = check(updating(in_place=False), tasks.UPDATE)
    assert not verdict
    assert "on a single rank, without any sum" in verdict.reason
    assert "in place" in verdict.hint


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (updating(scatter=False), "sends 3.0 Ψ (N-1)/N numbers in a step; 2 are enough", "allreduce, all_gather"),
        (updating(gather=False), "the parameters differ from rank to rank", "updated slices of all"),
    ],
)
def test_mistakes_that_several_ranks_show(answer, reason, hint):
    verdict = check(answer, tasks.OptimizerParallel(cases=((2, 12),)))
    assert not verdict
    assert reason in verdict.reason
    assert hint in verdict.hint


def test_what_is_compared():
    """Without processes: who forgets to sum gets one rank's gradient; a mean is half of the sum."""
    right = tasks._expected(12, 2)
    task = tasks.UPDATE
    assert task._compare([(right, 6, 12.0, ["reduce_scatter", "all_gather"])] * 2, 2, 12) is None
    verdict = task._compare([(tasks._expected(12, 1), 6, 12.0, [])] * 2, 2, 12)
    assert "not those of plain SGD" in verdict.reason
    assert "sum over the ranks" in verdict.hint


# ZeRO-3


def gathered(ahead, scatter=True):
    """An order that gathers `ahead` layers before they are needed."""

    def mine(layers):
        for layer in range(-ahead, layers):
            yield from [(GATHER, layer + ahead)] * (layer + ahead < layers)
            yield from [(F, layer)] * (layer >= 0)
        for layer in reversed(range(layers)):
            early = layer - ahead
            yield from [(GATHER, early)] * (0 <= early < layers - 1 - ahead)
            yield (B, layer)
            yield from [(SCATTER, layer)] * scatter

    return mine


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (gathered(0), "takes ", "the network can bring the next one"),
        (gathered(1, scatter=False), "cannot run", ""),
    ],
)
def test_wrong_orders(answer, reason, hint):
    verdict = check(answer, tasks.ZERO_3)
    assert not verdict
    assert reason in verdict.reason
    assert hint in verdict.hint
