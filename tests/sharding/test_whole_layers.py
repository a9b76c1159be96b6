"""Layers of which ranks cannot have parts: every rank computes them whole. Beside them: a loop in plain torch."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minipar
from minipar import models, sharding
from tests import odd_layers
from tests.plain_loop import assert_equals_plain_torch

WIDTH = 8


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-0.001, 0.001)


class Layer(nn.Module):
    """A perceptron, and something around it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def inner(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


class OwnBackward(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return Double.apply(self.inner(x))


class OwnClip(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(Clipped.apply(x))


class StraightThrough(Layer):
    def forward(self, x: Tensor) -> Tensor:
        soft = self.inner(x)
        return soft + (soft.round() - soft).detach()


class Clamped(Layer):
    def forward(self, x: Tensor) -> Tensor:
        found = self.inner(x)
        if found.requires_grad:
            found.register_hook(lambda gradient: gradient.clamp(-0.002, 0.002))
        return found


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH // 2, dtype=torch.complex64) / 3)
        self.angle = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        turned = (x * torch.polar(torch.ones_like(self.angle), self.angle)) @ self.weight
        return torch.view_as_real(turned).flatten(-2)


class Recurrent(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.cells = kind(WIDTH, WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cells(x[:, None] if x.dim() == 2 else x)[0].view_as(x)


class InPlace(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.inner(x), 0.0, inplace=True)


def spectral() -> nn.Module:
    """Its division by a norm has no rule."""
    return nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))


class Functional(Layer):
    def forward(self, x: Tensor) -> Tensor:
        doubled = {name: p * 2 for name, p in self.down.named_parameters()}
        return torch.func.functional_call(self.down, doubled, (torch.tanh(self.up(x)),))


class Transformed(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda row: torch.sin(self.inner(row)))(x)


ODD = {
    "own backward": OwnBackward, "own clip": OwnClip, "straight-through": StraightThrough, "clamped": Clamped,
    "complex": Turned, "lstm": partial(Recurrent, nn.LSTM),
    "gru": partial(Recurrent, nn.GRU), "in-place dropout": InPlace,
    "spectral norm": spectral, "doubled parameters": Functional, "a transform": Transformed,
}  # fmt: skip


def around(odd: Any) -> nn.Sequential:
    return nn.Sequential(Layer(), odd(), Layer(), nn.Linear(WIDTH, 3))


def batch(*shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(*shape, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, shape, generator=generator)


def loss(output: Tensor, wanted: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, -2), wanted.flatten())


SGD = partial(torch.optim.SGD, lr=0.3, momentum=0.5)


def compared(clusters: Any, make: Any, data: Any, plan: str, loss: Any = loss) -> tuple[minipar.Run, list[str]]:
    """A run that equals plain torch, and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = assert_equals_plain_torch(clusters, plan, make, data, loss, SGD)
    return run, [str(one.message) for one in caught]


@pytest.mark.many(4)
@pytest.mark.parametrize("plan", ["tp=2", "pp=2 tp=2", "tp=2 dp=2 zero=1"])
@pytest.mark.parametrize("odd", ODD)
def test_what_belongs_to_the_backward_is_done(clusters, odd, plan):
    if "dp" in plan and odd in ("clamped", "own clip"):
        plan = "tp=4"  # (a hook that is not linear does another thing with each replica's part)
    if "zero" in plan and odd == "complex":
        plan = "tp=2 dp=2"  # (slices are of numbers of one type)
    run, said = compared(clusters, partial(around, ODD[odd]), batch(8), plan)
    assert odd in ("straight-through", "spectral norm") or any(
        "1 layer computed whole by every rank that shares layers (1: " in text for text in said
    ), said
    divided = [form for form in run.program.forms if form.writes or form.grad_writes]
    assert divided  # the other layers are


@pytest.mark.many(3)
@pytest.mark.parametrize("odd", odd_layers.ODD)
def test_layers_with_unusual_graphs_and_hooks(clusters, odd):
    x = torch.randn(8, odd_layers.WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    data = x, x.roll(1, 0)
    compared(clusters, lambda: nn.Sequential(*odd_layers.model(odd)), data, "tp=2", nn.functional.mse_loss)


@pytest.mark.parametrize("plan", ["context_parallel=2", "tp=2 context_parallel=2"])
def test_tokens_that_ranks_have_parts_of_are_gathered(clusters, plan):
    compared(clusters, partial(around, partial(Recurrent, nn.GRU)), batch(4, 6), plan)
    compared(clusters, partial(around, OwnBackward), batch(4, 6), plan)


def twice() -> nn.Sequential:
    same = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(same, nn.Tanh(), same, Layer(), nn.Linear(WIDTH, 3))


def tied() -> nn.Sequential:
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH, bias=False), OwnBackward(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
    )
    model[2].weight = model[0].weight
    return model


@pytest.mark.parametrize("make", [twice, tied])
@pytest.mark.parametrize("plan", ["tp=2", "pp=2 tp=2"])
def test_parameters_that_layers_share(clusters, make, plan):
    compared(clusters, make, batch(8), plan)


class Giving(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.head = kind, nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Any:
        found = self.head(x)
        rest = {"none": None, "count": 3, "twice": 2 * found}
        return {"dict": {"scores": found, **rest}, "tuple": (found, None, rest)}[self.kind]


def of_given(output: Any, wanted: Tensor) -> Tensor:
    scores = output["scores"] if isinstance(output, dict) else output[0]
    rest = output if isinstance(output, dict) else output[-1]
    assert rest["none"] is None
    assert rest["count"] == 3
    return loss(scores + rest["twice"], wanted)


@pytest.mark.parametrize("kind", ["dict", "tuple"])
def test_the_loss_is_given_what_the_model_gives(clusters, kind):
    compared(clusters, lambda: nn.Sequential(Layer(), Giving(kind)), batch(8), "tp=2 dp=2", loss=of_given)
    compared(clusters, lambda: nn.Sequential(Layer(), OwnBackward(), Giving(kind)), batch(8), "tp=2", loss=of_given)


def test_fewer_rows_than_parts(clusters):
    compared(clusters, partial(around, OwnBackward), batch(3), "tp=2 microbatches=4")
    compared(clusters, partial(around, Layer), batch(3, 4), "context_parallel=2 microbatches=4")


def test_dropout_inside_draws_as_on_one_rank(clusters):
    def make() -> nn.Module:
        torch.manual_seed(0)
        layer = OwnBackward()
        layer.down = nn.Sequential(nn.Dropout(0.3), layer.down)
        return around(lambda: layer)

    run = minipar.train(make, batch(8), "tp=2", cluster=clusters(2), steps=2, loss=loss, dtype=torch.float64,
                        progress=False, check=True)  # fmt: skip
    assert run.max_error() < 1e-11


def test_layers_that_are_their_graph_are_divided():
    captured = sharding.capture_model(models.build("gpt-tiny"), torch.zeros(4, 16, dtype=torch.long))
    assert captured.whole == {}
    captured = sharding.capture_model(around(OwnBackward), torch.randn(6, WIDTH))
    assert captured.whole == {"1.layer": "Double has a backward of its own"}


def test_slices_of_what_differs_are_refused():
    class Own(models.Sliced):
        def forward_slice(self, x: Tensor, start: int, carry: Any) -> tuple[Tensor, None]:
            return Double.apply(x * 2.0), None

    with pytest.raises(minipar.PlanError, match="Own: Double has a backward of its own, and slices of sequences"):
        sharding.capture_model(nn.Sequential(Own(), Own()), torch.randn(4, 6, WIDTH), 0)


class Applied(nn.Module):
    """Applies a function that it is given."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.weight)


def scaled(by: float) -> Any:
    return lambda x: x * by


def of_functions() -> nn.Sequential:
    sine, cosine = (Applied(function) for function in (lambda x: x.sin(), lambda x: x.cos()))
    return nn.Sequential(Layer(), sine, cosine, Applied(scaled(2.0)), Applied(scaled(3.0)), nn.Linear(WIDTH, 3))


def test_layers_that_differ_in_a_function_alone(clusters):
    compared(clusters, of_functions, batch(8), "tp=2")


def test_a_model_of_whole_layers_alone(clusters):
    compared(clusters, lambda: nn.Sequential(OwnBackward(), OwnClip()), (batch(8)[0], batch(8)[0]), "tp=2",
             nn.functional.mse_loss)  # fmt: skip


class Pooled(Layer):
    def forward(self, x: Tensor) -> Any:
        found = Clipped.apply(self.inner(x))
        return found, found.mean(1), found.argmax(-1)


def test_parts_of_sequences_of_what_a_whole_layer_gives(clusters):
    def loss(output: Any, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(output[0] if isinstance(output, tuple) else output, y)

    x, _ = batch(4, 6)
    compared(clusters, lambda: nn.Sequential(Layer(), Pooled()), (x, x.flip(-1)), "context_parallel=2", loss)
    model, data = [Layer(), Applied(lambda x: Clipped.apply(x).mean(1))], (x, torch.zeros(4, dtype=torch.long))
    with pytest.raises(minipar.PlanError, match=r"gives \(4, 8\) for sequences of 6 tokens, nothing for each token"):
        minipar.train(model, data, "context_parallel=2", cluster=clusters(2), progress=False, dtype=torch.float64)
