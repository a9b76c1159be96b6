"""The exercises of lesson 08: reference solutions pass; stubs and plausible mistakes fail, and the reason is given."""

from __future__ import annotations

from typing import Any

import pytest

from minipar_course.exercise import check
from minipar_course.exercises import sharding as tasks
from minipar_course.exercises.kinds.order import GATHER, SCATTER, B, F


def stub(*arguments: Any) -> Any:
    raise NotImplementedError("your code here")


@pytest.mark.parametrize("task", [tasks.BYTES, tasks.UPDATE, tasks.ZERO_3])
def test_a_stub_is_told_that_nothing_is_written(task):
    verdict = check(stub, task)
    assert not verdict
    assert "nothing is written here yet" in verdict.reason


# bytes


def bytes_on_a_rank(parameters, ranks, stage):
    part = -(-parameters // ranks)
    sizes = zip((2, 2, 12), (3, 2, 1), strict=True)
    return sum(size * (part if stage >= since else parameters) for size, since in sizes)


def test_bytes():
    assert check(bytes_on_a_rank, tasks.BYTES)


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (lambda psi, n, stage: 16 * -(-psi // n) if stage else 16 * psi, "stage by stage"),
        (tasks._shared(3, 1, 2), "stage 1 are the optimizer's states"),
        (lambda psi, n, stage: 16 * psi, "which of them does this stage divide"),
    ],
)
def test_wrong_bytes(answer, hint):
    verdict = check(answer, tasks.BYTES)
    assert not verdict
    assert hint in verdict.hint


# an optimizer in parallel


def updating(scatter=True, in_place=True, scale=1.0, gather=True):
    """The update of ZeRO-1, or one with a mistake. (Local functions reach the ranks by value.)"""

    def update(comm, parameters, gradient, momentum):
        import torch

        whole = gradient * scale if scale else gradient
        mine = comm.reduce_scatter(whole) if scatter else comm.allreduce(whole).tensor_split(comm.size)[comm.rank]
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


@pytest.mark.slow
def test_an_optimizer_in_parallel():
    verdict = check(updating(), tasks.UPDATE)
    assert verdict, verdict
    assert "on 2 and on 3 ranks" in verdict.reason


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (updating(in_place=False), "on a single rank, without any sum", "in place"),
        (lambda comm, parameters, gradient, momentum: None, "it gives NoneType", ""),
        (3, "3 is no function", "def update"),
    ],
)
def test_mistakes_that_one_rank_shows(answer, reason, hint):
    verdict = check(answer, tasks.UPDATE)
    assert not verdict
    assert reason in verdict.reason
    assert hint in verdict.hint


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


def gathered(ahead, twice=True, scatter=True):
    """An order that gathers `ahead` layers before they are needed."""

    def mine(layers):
        for layer in range(-ahead, layers):
            yield from [(GATHER, layer + ahead)] * (layer + ahead < layers)
            yield from [(F, layer)] * (layer >= 0)
        for layer in reversed(range(layers)):
            early = layer - ahead
            yield from [(GATHER, early)] * (twice and 0 <= early < layers - 1 - ahead)
            yield (B, layer)
            yield from [(SCATTER, layer)] * scatter

    return mine


def test_gathered_one_layer_ahead():
    verdict = check(gathered(1), tasks.ZERO_3)
    assert verdict, verdict
    assert "256 ms, at most 95 MiB" in verdict.reason


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (gathered(0), "takes ", "the network can bring the next one"),
        (gathered(1, scatter=False), "cannot run", ""),
        (lambda n: [*((F, k) for k in range(n)), *((B, k) for k in reversed(range(n)))], "cannot run", ""),
    ],
)
def test_wrong_orders(answer, reason, hint):
    verdict = check(answer, tasks.ZERO_3)
    assert not verdict
    assert reason in verdict.reason
    assert hint in verdict.hint
