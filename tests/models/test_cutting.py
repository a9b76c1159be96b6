"""`models.from_torch`: models that were not written as layers, cut into layers which compute the same."""

from __future__ import annotations

import pickle
import subprocess
import sys
import warnings
from functools import partial

import cloudpickle
import pytest
import torch
from torch import Tensor, nn

import minipar
from minipar import models
from minipar.errors import PlanError
from minipar.models.tensors import copied
from tests import outside

# Ranks cannot import this file by name; its functions travel as those of a notebook do.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Block(nn.Module):
    """Takes its input row by row: nobody can trace that, and nobody has to."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.stack([torch.tanh(self.linear(row)) for row in self.norm(x)])


class Spine(nn.Module):
    """A ModuleList in a module, a skip over all of it, a parameter of its own, a buffer, a tied head, a dropout."""

    def __init__(self, width: int = 6, depth: int = 3) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.linspace(-1, 1, width))
        self.register_buffer("scale", torch.linspace(1, 2, width))
        self.table = nn.Linear(width, width, bias=False)
        self.body = nn.Module()
        self.body.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.drop = nn.Dropout(0.0)
        self.head = nn.Linear(width, width, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        rows = x.shape[0]
        x = self.table(x) + self.place
        skip = x
        for block in self.body.blocks:
            x = block(x)
        if gate is not None:
            x = x * gate
        x = self.drop(x + skip) * self.scale
        return self.head(x.view(rows, -1) + self.place)


def batch(count: int = 12, width: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = count, width
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))


def example(width: int = 6) -> Tensor:
    return torch.linspace(-1, 1, 2 * width).view(2, width)


def spine(width: int = 6):
    return models.from_torch(Spine(width), example(width))


def test_a_spine_is_cut_between_its_blocks():
    model = Spine()
    layers = models.from_torch(model, example())
    assert list(layers._modules) == ["table", "body_blocks_0", "body_blocks_1", "body_blocks_2", "head"]
    assert layers.report.error == 0.0
    text = str(layers.report)
    assert "Spine: 5 layers, cut between its blocks" in text
    assert "add, body_blocks_1: 48 bytes a row" in text  # the skip travels with every layer
    assert layers.report.crossings[0].names == ("getitem", "add")


def test_parameters_have_the_names_and_are_the_objects_of_the_model():
    model = Spine()
    model.body.blocks[1].eval()
    model.table.weight.requires_grad_(False)
    layers = models.from_torch(model, example())
    own = dict(model.named_parameters())
    assert {name: id(p) for name, p in layers.named_parameters()} == {name: id(p) for name, p in own.items()}
    state = model.state_dict()
    assert layers.state_dict().keys() == state.keys()
    layers.load_state_dict({name: tensor + 1 for name, tensor in state.items()})
    assert torch.equal(model.scale, state["scale"])  # (state was of the same tensors)
    with pytest.raises(RuntimeError, match="Missing key"):
        layers.load_state_dict({})
    assert [m.training for m in layers.modules() if isinstance(m, Block)] == [True, False, True]
    assert not model.body.blocks[1].norm.training
    again = pickle.loads(pickle.dumps(models.from_torch(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), example())))
    assert [name for name, _ in again.named_parameters()] == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_a_check_leaves_buffers_gradients_and_random_numbers_alone():
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 6))
    model[0].weight.grad = torch.ones(6, 6)
    state, before = torch.random.get_rng_state(), {k: v.clone() for k, v in model.state_dict().items()}
    models.from_torch(model, example())
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.ones(6, 6))
    assert model[3].weight.grad is None


def test_what_a_forward_keeps_is_not_of_the_trace():
    model = outside.NeuralODE()
    replaced = model.odefunc.register_buffer("calls", torch.zeros(())) or model.odefunc.calls
    models.from_torch(model, example())
    assert type(model.integration_time) is Tensor
    assert model.odefunc.nfe == 0
    assert model.odefunc.calls is replaced
    assert model(example()).shape == (2, 4)


def sigmoid_gate(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


class Gated(nn.Module):
    def __init__(self, looks: bool) -> None:
        super().__init__()
        self.first, self.last, self.looks = nn.Linear(6, 8), nn.Linear(8, 6), looks
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # (torch has a newer compiler)
            self.act = torch.jit.script(sigmoid_gate)

    def forward(self, x: Tensor) -> Tensor:
        assert not self.looks or bool(x.isfinite().all())
        return self.last(self.act(self.first(x)))


@pytest.mark.parametrize("looks", [False, True])
def test_layers_with_a_function_of_torch_jit_can_be_copied(looks):
    layers = models.from_torch(Gated(looks), example())
    assert len(layers) == 2
    assert torch.equal(copied(layers)(example()), layers(example()))


@pytest.mark.parametrize("kind", [tuple, dict])
def test_several_arguments(kind):
    gate = torch.linspace(0, 1, 12).view(2, 6)
    given = {"x": example(), "gate": gate} if kind is dict else (example(), gate)
    layers = models.from_torch(Spine(), given)
    assert layers.report.error == 0.0
    assert "gate" not in layers.report.layers


def test_nested_sequentials_are_opened_where_they_hold_blocks():
    stem = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
    body = nn.Sequential(Block(6), nn.Sequential(Block(6), Block(6)), Block(6))
    layers = models.from_torch(nn.Sequential(stem, body, nn.Linear(6, 6)), example())
    assert list(layers._modules) == ["0", "1_0", "1_1_0", "1_1_1", "1_2", "2"]
    assert "1.1.0.linear.weight" in dict(layers.named_parameters())


def test_trains_as_plain_torch_does(clusters):
    run = minipar.train(
        partial(spine, 192), batch(24, 192), "pp=2 dp=2 zero=1 microbatches=2", cluster=clusters(4), steps=4,
        loss=nn.functional.mse_loss, dtype=torch.float64, check=True, progress=False,
    )  # fmt: skip
    assert run.max_error() < 1e-12
    assert run.gradients[0].keys() == dict(Spine(192).named_parameters()).keys()


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.norm(layer(x))
        return x


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Twice, "module norm changes its buffers and is used in layers 1 and 2"),
        (partial(nn.Linear, 6, 6), "has no two blocks to cut between"),
    ],
)
def test_refusals_say_why(model, reason):
    with pytest.raises(PlanError, match=reason):
        models.from_torch(model(), example())


def test_models_of_other_kinds_are_refused():
    with pytest.raises(PlanError, match="Spine is no model of transformers; possible is models.from_torch"):
        models.from_transformers(Spine())


def test_a_model_is_cut_without_a_library_for_formulas():
    """Torch imports sympy for some ways of calling autograd, in each rank: a tenth of a first run."""
    code = """
import sys
import torch
from torch import nn
from minipar.models import from_torch

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))

assert len(from_torch(Net(), torch.zeros(3, 4))) > 1
assert "sympy" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
