"""Parameters of odd forms run under every plan as in plain torch, or are refused by name."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import nn

from minipar import MiniparError, Plan, PlanError, train
from minipar.execution.execution import Job, execute
from minipar.execution.fitting import check_parameters
from minipar.models.parameter_groups import shape_of
from tests.comparing import check, trained
from tests.odd_parameters import FORMS, WIDTH, Alone, model
from tests.toys import rows

pytestmark = pytest.mark.many(4)

mse = torch.nn.functional.mse_loss

PLANS = (
    "dp=2 zero=1 bucket=none clip=1e9",
    "dp=2 zero=3 offload=parameters prefetch=0",
    "pp=2 microbatches=2 offload=optimizer,parameters offload_to=disk",
    "pp=2 schedule=chimera microbatches=4 bucket=none",
)


@pytest.mark.parametrize("text", PLANS)
@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_odd_parameters(clusters, form, text):
    """Three steps, so that what was stored away and came back is used; one row, so that a replica may have none."""
    for count in (9, 1):
        check(clusters, Plan.parse(text), partial(model, form), rows(count), steps=3)


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        (lambda: nn.Embedding(5, WIDTH, sparse=True), r"layer 1: Embedding\(sparse=True\) has sparse gradients, .*"),
        (lambda: Alone(torch.ones(1).expand(4)), r"layer 1: parameter p is expanded: elements share memory; possible"),
        (lambda: Alone(torch.ones(2, 2).to_sparse()), "layer 1: parameter p is of layout torch.sparse_coo; possible"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(clusters, layer, says):
    with pytest.raises(MiniparError, match=says) as error:
        check_parameters([nn.Linear(WIDTH, WIDTH), layer()])
    assert "\n" not in str(error.value)
    if "expanded" in says:
        made = partial(_with, layer)
        with pytest.raises(MiniparError, match=says):
            train(made, rows(8), "pp=2", cluster=clusters(2), steps=1, loss=mse, progress=False)


def _with(layer):
    return [nn.Linear(WIDTH, WIDTH), layer()]


def test_no_server_can_hold_what_is_empty():
    layers = [nn.Linear(WIDTH, WIDTH), Alone(torch.ones(0))]
    with pytest.raises(PlanError, match="sync=ps: all parameters of layer 1 are empty, and no server can hold them"):
        Plan.parse("dp=2 sync=ps").compile(shape_of(layers))


def channels_last() -> list[nn.Module]:
    """Convolutions whose activations have the channels as last dimension, with the norm that torch crashes in there."""
    layers = [
        nn.Conv2d(3, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.Sequential(nn.GroupNorm(2, 4), nn.ReLU()),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, WIDTH)),
    ]
    return [layer.to(memory_format=torch.channels_last) for layer in layers]


def test_channels_last_with_group_norm(clusters):
    """torch 2.13 ends the process where of its GroupNorm only the weights' gradients are wanted: a weight half does."""
    x = torch.linspace(-1, 1, 6 * 3 * 16, dtype=torch.float64).view(6, 3, 4, 4).to(memory_format=torch.channels_last)
    for text in ("pp=2 microbatches=2 offload=optimizer offload_to=disk", "pp=2 microbatches=3 schedule=zb-h1"):
        trained(clusters, Plan.parse(text), channels_last, (x, rows(6)[1]), steps=3)


def only_empty() -> list[nn.Module]:
    """A layer all of whose parameters are empty, between others."""
    return [nn.Linear(WIDTH, WIDTH), Alone(torch.zeros(0)), nn.Linear(WIDTH, WIDTH)]


@pytest.mark.parametrize("text", ["bucket=none overlap=priority", "bucket=none compress=topk:0.5", "bucket=none"])
def test_messages_of_nothing(clusters, text):
    job = Job(only_empty, rows(8), loss=mse, dtype=torch.float64)
    program = Plan.parse(f"dp=2 {text}").compile(shape_of(only_empty()))
    assert all(map(math.isfinite, execute(program, job, cluster=clusters(2), passes=2, check=False).losses))


class Conjugate(nn.Module):
    """Gradients of p, and what it hands on, are views whose memory has other signs than their numbers."""

    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex128))
        self.unused = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex128))

    def forward(self, x):
        return (x * self.p.conj()).conj()


class Imaginary(nn.Module):
    def forward(self, x):
        return (1j * x).conj().imag + x.real


def conjugates():
    torch.manual_seed(0)
    return nn.Sequential(Conjugate(), Imaginary(), Imaginary(), nn.Linear(WIDTH, WIDTH)).double()


@pytest.mark.parametrize(
    "text", ["dp=2 bucket=none", "dp=2 sync=ps", "pp=4 microbatches=2", "dp=2 pp=2 offload=parameters offload_to=disk"]
)
def test_conjugate_views_and_complex_parameters_without_a_gradient(clusters, text):
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
    run = train(conjugates, rows(8), text, cluster=clusters(Plan.parse(text).ranks), steps=2, loss=mse, batch=8,
                optimizer=optimizer, dtype=torch.float64, check=True, progress=False)  # fmt: skip
    assert run.max_error() < 1e-12
