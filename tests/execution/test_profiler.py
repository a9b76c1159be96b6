"""Shapes found from real layers, and profiles that change nothing in the model."""

import pickle
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from minipar import models
from minipar.errors import PlanError
from minipar.execution.measuring.profiler import profile
from minipar.models.parameter_groups import parameters_of, shape_of
from minipar.program import Group


class Both(nn.Module):
    """Takes and returns a tuple: (rows, 4) numbers and (rows,) whole numbers, which it only passes on."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, pair):
        x, tags = pair
        return torch.tanh(self.linear(x)), tags


class Split(nn.Module):
    def forward(self, x):
        return x, x[:, 0].long()


class Join(nn.Module):
    def forward(self, pair):
        return pair[0] + pair[1][:, None]


# ---------------------------------------------------------------- shape_of


def test_untied_layers_have_their_own_groups():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1, bias=False, dtype=torch.float64))
    assert shape_of(model).groups == (Group((0,), (24, 12)), Group((1,), ()), Group((2,), (24,)))
    assert [[p.shape for p in group] for group in parameters_of(model)] == [[(3, 2), (3,)], [], [(1, 3)]]


def test_frozen_parameters_are_counted_apart():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    model[1].bias.requires_grad_(False)
    shape = shape_of(model)
    assert shape.groups == (Group((0,), (), 36), Group((1,), (36,), 12), Group((2,), (24, 8)))
    assert not shape.groups[0].trainable
    assert parameters_of(model)[0] == []
    assert parameters_of(model)[1] == [model[1].weight]


def test_tied_parameters_form_one_group_per_set_of_layers():
    a, b, c = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    c.weight, c.bias = a.weight, a.bias  # two parameters shared by the same layers
    d = nn.Sequential(nn.Linear(2, 2), b)  # a whole module shared, behind another name
    d[0].weight = b.weight  # and shared again inside the layer, which still is the same set of layers
    a.bias.requires_grad_(False)
    model = nn.Sequential(a, b, c, d)
    assert shape_of(model).groups == (
        Group((0,), ()),
        Group((1,), ()),
        Group((2,), ()),
        Group((3,), (8,)),
        Group((0, 2), (16,), 8),
        Group((1, 3), (16, 8)),
    )
    found = parameters_of(model)
    assert found[3] == [d[0].bias]
    assert found[4][0] is a.weight
    assert found[5][0] is b.weight
    assert found[5][1] is b.bias


def test_no_layers_is_an_error():
    with pytest.raises(PlanError, match="at least 1 layer"):
        shape_of(nn.Sequential())


# ---------------------------------------------------------------- profile


def test_bytes_of_a_plain_stack():
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 2))
    found = profile(model, (torch.randn(6, 4), torch.randn(6, 2)), mse_loss, rows=[6, 3, 3], repeats=1)
    assert set(found.forward) == set(found.saved_bytes) == {3, 6}
    assert found.output_bytes[6] == (6 * 8 * 4, 6 * 8 * 4, 6 * 2 * 4)
    assert found.grad_output_bytes == found.output_bytes
    assert found.output_bytes[3] == tuple(n // 2 for n in found.output_bytes[6])
    # A Linear saves its input (its own or another's) and its weight; ReLU saves its output; mse_loss its two arguments.
    assert found.saved_bytes[6] == (0, 0, 0)
    assert found.parameter_bytes == found.gradient_bytes == (160, 288, 72)
    assert found.optimizer_bytes == (0, 0, 0)


def test_saved_bytes_are_what_lies_between_input_and_output():
    layer = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))  # saves GELU's input and its output
    found = profile([layer], (torch.randn(6, 4), torch.randn(6, 2)), mse_loss, rows=[6], repeats=1)
    assert found.saved_bytes[6] == (2 * 6 * 8 * 4,)


def test_the_loss_belongs_to_the_last_layer():
    calls = []

    def loss(output, target):
        calls.append(output.requires_grad)
        return mse_loss(output, target)

    profile(
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), (torch.randn(3, 2), torch.randn(3, 2)), loss, [3], repeats=2
    )
    assert calls == [True] * 4  # once to weigh and warm up, twice timed, and once for the halves of the backward


def test_layers_before_the_first_trainable_one_have_no_backward():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.GELU(), nn.Linear(4, 4)), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    found = profile(model, (torch.randn(6, 4), torch.randn(6, 4)), mse_loss, rows=[6], repeats=1)
    assert found.backward[6][0] == 0.0
    assert found.saved_bytes[6][0] == found.grad_output_bytes[6][0] == 0
    assert found.backward[6][1] > 0
    assert found.gradient_bytes == (0, 80, 80)
    assert found.parameter_bytes == (80, 80, 80)


def test_layers_that_take_and_return_tuples():
    model = nn.Sequential(nn.Linear(4, 4), Split(), Both(), Join())
    found = profile(model, (torch.randn(6, 4), torch.randn(6, 4)), mse_loss, rows=[6], repeats=1)
    assert found.output_bytes[6] == (96, 96 + 48, 96 + 48, 96)
    assert found.grad_output_bytes[6] == (96, 96, 96, 96)
    pair = (torch.randn(6, 4), torch.ones(6, dtype=torch.long))
    found = profile(nn.Sequential(Both(), Join()), (pair, torch.randn(6, 4)), mse_loss, rows=[2], repeats=1)
    assert found.output_bytes[2] == (32 + 16, 32)


@pytest.mark.parametrize(
    ("optimizer", "per_number", "per_tensor"),
    [(torch.optim.SGD, 0, 0), (partial(torch.optim.SGD, lr=0.1, momentum=0.9), 4, 0), (torch.optim.AdamW, 8, 4)],
)
def test_optimizer_bytes(optimizer, per_number, per_tensor):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].bias.requires_grad_(False)
    found = profile(model, (torch.randn(2, 4), torch.randn(2, 4)), mse_loss, [2], repeats=1, optimizer=optimizer)
    assert found.optimizer_bytes == (20 * per_number + 2 * per_tensor, 16 * per_number + per_tensor)


def test_leaves_everything_as_it_was():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5)), nn.Linear(4, 4))
    for parameter in model[0].parameters():
        parameter.grad = torch.full_like(parameter, 5.0)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [p.grad for p in model.parameters()]
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    data = x.clone()
    rng, threads = torch.get_rng_state(), torch.get_num_threads()
    profile(model, (x, y), mse_loss, rows=[2, 6], repeats=2, threads=threads + 1, optimizer=torch.optim.AdamW)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(a is b for a, b in zip(gradients, [p.grad for p in model.parameters()], strict=True))
    assert torch.equal(model[0].weight.grad, torch.full((4, 4), 5.0))
    assert torch.equal(x, data)
    assert not x.requires_grad
    assert torch.equal(torch.get_rng_state(), rng)
    assert torch.get_num_threads() == threads


def test_profiles_a_gpt_and_pickles_without_tensors():
    model = models.build("gpt-tiny-tied", layers=2)
    x = torch.randint(256, (4, 16))
    found = profile(model, (x, x), cross_entropy, rows=[1, 4], repeats=1, optimizer=torch.optim.AdamW)
    assert len(found.parameter_bytes) == len(model) + 1
    assert found.parameter_bytes[-1] == 256 * 64 * 4
    assert found.output_bytes[4] == (4 * 16 * 64 * 4,) * 3 + (4 * 16 * 256 * 4,)
    width = 4 * 16 * 64 * 4  # a block's norms, q/k/v, attention, the sum after it, and the MLP's two wide tensors
    assert found.saved_bytes[4][1] >= (1 + 3 + 1 + 1 + 1 + 4 + 4) * width
    assert found.saved_bytes[4][1] < 17 * width
    assert b"torch" not in pickle.dumps(found)
    assert pickle.loads(pickle.dumps(found)) == found


def test_a_profile_is_read_without_torch():
    subprocess.run(
        [sys.executable, "-c", "import sys, minipar.costs.measured; assert 'torch' not in sys.modules"], check=True
    )


@pytest.mark.parametrize(
    ("rows", "repeats", "message"), [([7], 1, "rows=7.*1 to 6"), ([0], 1, "rows=0"), ([1], 0, "=0")]
)
def test_refusals(rows, repeats, message):
    with pytest.raises(PlanError, match=message):
        profile([nn.Linear(4, 4)], (torch.randn(6, 4), torch.randn(6, 4)), mse_loss, rows, repeats)


def test_operations_of_linear_layers_are_exact():
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    found = profile(model, (torch.randn(6, 4), torch.randn(6, 2)), mse_loss, rows=[3, 6], repeats=1)
    assert found.forward_flops == {n: (2 * n * 4 * 8, 0, 2 * n * 8 * 2) for n in (3, 6)}
    # the first layer has no input gradient, the last one both halves
    assert found.backward_flops == {n: (2 * n * 4 * 8, 0, 2 * 2 * n * 8 * 2) for n in (3, 6)}


def test_operations_of_attention_are_counted():
    block = models.build("gpt-tiny")[1]
    found = profile([nn.Identity(), block], (torch.randn(2, 16, 64), torch.randn(2, 16, 64)), mse_loss, repeats=1)
    products, attention = 2 * (2 * 16) * 12 * 64 * 64, 2 * 2 * (2 * 16) * 16 * 64
    assert found.forward_flops[2][1] == products + attention


def test_a_profile_prints_as_a_table():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    model[1].bias = None
    found = profile(model, (torch.randn(6, 4), torch.randn(6, 2)), mse_loss, rows=[1, 6], repeats=1)
    lines = str(found).splitlines()
    assert [line for line in lines if "row" in line] == ["1 row", "6 rows"]
    assert sum(line.split()[:1] == ["all"] for line in lines) == 2
    assert "weight half" in str(found)
    assert "optimizer step" in lines[-1]
    assert found._repr_html_().count("<tr>") == 2 * 4


def test_a_batch_is_a_pair():
    with pytest.raises(PlanError, match="pair"):
        profile([nn.Linear(4, 4)], torch.randn(6, 4), mse_loss)
