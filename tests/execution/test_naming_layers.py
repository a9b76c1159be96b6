"""An exception in a layer or in the loss names the layer, its place, and its input."""

from __future__ import annotations

import sys
from collections import OrderedDict

import cloudpickle
import pytest
import torch
from torch import nn

import minipar
from minipar.execution.execution import Job, execute
from minipar.models.parameter_groups import shape_of
from tests.toys import rows

# Ranks cannot import this file by name; its functions travel as those of a notebook do.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def misfit():
    named = OrderedDict(first=nn.Linear(6, 6), middle=nn.ReLU(), second=nn.Linear(5, 6), last=nn.Linear(6, 6))
    return nn.Sequential(named)


class Late(nn.Module):
    """Fails at its fourth call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(6, 6), 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 4:
            raise KeyError("late")
        return self.linear(x)


def test_in_the_profile(clusters):
    with pytest.raises(
        Exception,
        match=r"layer 2 \('second'\) in the profile, before the run: RuntimeError: mat1 and mat2 .*; "
        r"given x \(2, 6\) float32",
    ):
        minipar.train(misfit, rows(4), "pp=2 microbatches=2", cluster=clusters(2), progress=False)


def test_in_a_run_with_its_own_traceback(clusters):
    layers = [nn.Linear(6, 6), nn.Linear(6, 6), Late(), nn.Linear(6, 6)]
    program = minipar.Plan.parse("pp=2 microbatches=2 split=2,2").compile(shape_of(layers))
    job = Job(layers, rows(8), loss=nn.functional.mse_loss, dtype=torch.float64)
    with pytest.raises(
        Exception, match=r"layer 2 \(Late\) on rank 1, micro-batch 1 of step 1: KeyError: 'late'"
    ) as told:
        execute(program, job, cluster=clusters(2), passes=3)
    assert "given x (4, 6) float64" in str(told.value)
    assert 'raise KeyError("late")' in str(told.value) + str(getattr(told.value, "__notes__", ""))


def test_in_the_loss(clusters):
    program = minipar.Plan(pp=2).compile(shape_of([nn.Linear(6, 6), nn.Linear(6, 6)]))

    def loss(output, y):
        raise ValueError("no such target")

    with pytest.raises(Exception, match=r"the loss on rank 1: ValueError: no such target; given x\[0\] \(8, 6\)"):
        execute(program, Job([nn.Linear(6, 6), nn.Linear(6, 6)], rows(8), loss=loss), cluster=clusters(2))


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise KeyError("no way back")


class OneWay(nn.Module):
    def forward(self, x):
        return _Refused.apply(x) if torch.is_grad_enabled() and x.shape[0] == 2 else x


@pytest.mark.parametrize("words", ["pp=2 microbatches=2 split=2,2", "pp=2 schedule=zb-h1 microbatches=2 split=2,2"])
def test_in_a_backward(clusters, words):
    layers = [nn.Linear(6, 6), nn.Linear(6, 6), OneWay(), nn.Linear(6, 6)]
    program = minipar.Plan.parse(words).compile(shape_of(layers))
    job = Job(layers, rows(4), loss=nn.functional.mse_loss, dtype=torch.float64)
    with pytest.raises(
        Exception,
        match=r"layer 2 \(OneWay\) and layer 3 \(Linear\) in the backward on rank 1, micro-batch 0 of step 0: "
        "KeyError: 'no way back'",
    ):
        execute(program, job, cluster=clusters(2))


class Once(nn.Module):
    """Raises in one of its calls, and in no other."""

    calls = 0

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Once.calls += 1
        if Once.calls == self.at:
            raise ValueError("boom")
        return x


@pytest.mark.parametrize("at", range(1, 7))
def test_an_error_of_any_forward_before_the_run_names_its_layer(at):
    """A new cluster for each, in whose rank nobody has called it."""
    model = nn.Sequential(nn.Linear(6, 6), Once(at), nn.Linear(6, 3))
    data = torch.randn(4, 6), torch.arange(4) % 3
    with pytest.raises(minipar.RankError, match=r"layer 1 \(Once\) .*before the run: ValueError: boom"):
        minipar.train(model, data, "microbatches=2", loss=nn.functional.cross_entropy, progress=False)
