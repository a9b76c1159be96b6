"""Layers with unusual autograd graphs, for which every backward, whole or in halves, must be correct. Their input is a
matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 6


class Odd(nn.Module):
    """Two linear layers, a vector and a table, which `compute` uses in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.vector = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.table = nn.Parameter(torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH))
        self.prepare()

    def prepare(self) -> None:
        """More to register."""


class Takes(nn.Module):
    """Takes what an odd layer hands on: sums the parts of floating point."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Tensor:
        parts = [x] if isinstance(x, Tensor) else [part for part in x if part.is_floating_point()]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return torch.tanh(self.linear(total))


ODD: dict[str, type[Odd]] = {}


def odd(name: str) -> Callable[[type[Odd]], type[Odd]]:
    def register(kind: type[Odd]) -> type[Odd]:
        ODD[name] = kind
        return kind

    return register


def model(name: str) -> list[nn.Module]:
    """Seven layers, two of them odd ones."""
    linear = nn.Linear(WIDTH, WIDTH)
    return [linear, ODD[name](), Takes(), nn.Linear(WIDTH, WIDTH), ODD[name](), Takes(), nn.Linear(WIDTH, WIDTH)]


# outputs that reach parameters without passing the input --------------------------------------------------------------


@odd("a bias handed on")
class HandsOnBias(Odd):
    def forward(self, x: Tensor) -> Any:
        return self.a(x).tanh(), self.table[torch.tensor([2, 0, 2])].mean(0).expand(len(x), -1)


@odd("a product with the detached input")
class Detached(Odd):
    def forward(self, x: Tensor) -> Any:
        return self.a(x).tanh(), self.b(x.detach())


@odd("a product with the detached input, added")
class DetachedAdded(Odd):
    def forward(self, x: Tensor) -> Any:
        return self.a(x).tanh() + self.b(x.detach())


@odd("a parameter handed on")
class HandsOnParameter(Odd):
    def forward(self, x: Tensor) -> Any:
        return self.a(x).tanh(), self.vector


@odd("a parameter handed on and used")
class HandsOnAndUses(Odd):
    def forward(self, x: Tensor) -> Any:
        return (self.a(x) * self.vector).tanh(), self.vector, self.vector.exp()


@odd("two outputs beside the input")
class TwoBeside(Odd):
    def forward(self, x: Tensor) -> Any:
        return self.a(x).tanh(), self.table.mean(0).exp(), self.table.sum(0).sin()


@odd("nothing of the input")
class Nothing(Odd):
    def forward(self, x: Tensor) -> Any:
        return self.table.sin().sum(0).expand(len(x), -1)


# shapes of graphs -----------------------------------------------------------------------------------------------------


@odd("the input handed on")
class HandsOnInput(Odd):
    def forward(self, x: Tensor) -> Any:
        return x, self.a(x).tanh(), x


@odd("one tensor handed on twice")
class Twice(Odd):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x).tanh()
        return h, h, h.argmax(1)


@odd("outputs that share operations")
class SharedOperations(Odd):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        return h.tanh(), (h * self.vector).sigmoid(), h


@odd("a parameter used twice")
class Shared(Odd):
    def forward(self, x: Tensor) -> Any:
        return self.a((self.a(x)).tanh()) + nn.functional.linear(x, self.a.weight.T)


@odd("a parameter used aside and on the way")
class SharedAside(Odd):
    def forward(self, x: Tensor) -> Any:
        return (x * self.vector).tanh(), self.b(self.vector)


@odd("a gradient inside")
class Force(Odd):
    def forward(self, x: Tensor) -> Any:
        with torch.enable_grad():
            at = x if x.requires_grad else x.detach().requires_grad_()
            energy = self.b(self.a(at).tanh()).sin().sum()
            return torch.autograd.grad(energy, at, create_graph=True)[0] + self.b(at)


@odd("gradients and tangents of torch.func")
class Functional(Odd):
    def forward(self, x: Tensor) -> Any:
        force = torch.func.grad(lambda at: self.b(self.a(at).tanh()).sin().sum())(x)
        value, tangent = torch.func.jvp(self.b, (x,), (self.vector.expand_as(x),))
        return force + value * tangent


@odd("weight norm")
class Normed(Odd):
    def prepare(self) -> None:
        self.a = nn.utils.parametrizations.weight_norm(self.a)

    def forward(self, x: Tensor) -> Any:
        return self.b(self.a(x).tanh())


@odd("complex numbers")
class Complex(Odd):
    def forward(self, x: Tensor) -> Any:
        turn = torch.polar(self.vector[:4], self.table[0, :4])
        return torch.fft.irfft(torch.fft.rfft(self.a(x)) * turn, n=WIDTH)


@odd("in place on views")
class InPlace(Odd):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        h[:, :2] = self.vector[:2] * x[:, :2]
        h[:, 2:4].mul_(self.vector[2:4]).add_(self.table[0, 2:4])
        h.t()[1].add_(self.b(x)[:, 0])
        return h.sigmoid_()


@odd("straight through")
class Straight(Odd):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        return h + (h.round() - h).detach() * self.vector


@odd("recurrent")
class Recurrent(Odd):
    def prepare(self) -> None:
        self.lstm = nn.LSTM(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        found, (hidden, _) = self.lstm(x.unsqueeze(0))
        return found[0], hidden[0]


# functions of the user's own ------------------------------------------------------------------------------------------


class _Several(torch.autograd.Function):
    """Several outputs, one of which has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Any:
        ctx.save_for_backward(x, w)
        order = x.argsort(1)
        ctx.mark_non_differentiable(order)
        return x * w, x + w, order

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor, _: Any) -> Any:
        x, w = ctx.saved_tensors
        of_w = (first * x).sum(0) + second.sum(0)
        return first * w + second, of_w


@odd("a custom function")
class Custom(Odd):
    def forward(self, x: Tensor) -> Any:
        return _Several.apply(self.a(x), self.vector)


class _Overwrites(torch.autograd.Function):
    """Its backward overwrites what it is given, and must not run twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> Any:
        x, w = ctx.saved_tensors
        of_w = (given * x).sum(0)
        return given.mul_(w), of_w


@odd("a custom function that overwrites")
class CustomOverwrites(Odd):
    def forward(self, x: Tensor) -> Any:
        return self.b(_Overwrites.apply(self.a(x), self.vector).tanh())


class _Steep(torch.autograd.Function):
    """Without parameters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> Tensor:
        return given * ctx.saved_tensors[0].cos() * 2


@odd("a custom activation")
class CustomActivation(Odd):
    def forward(self, x: Tensor) -> Any:
        return self.b(_Steep.apply(self.a(x)))


@odd("a reentrant checkpoint")
class Reentrant(Odd):
    def forward(self, x: Tensor) -> Any:
        from torch.utils.checkpoint import checkpoint

        return self.b(checkpoint(lambda given: self.a(given).tanh() * self.vector, x, use_reentrant=True))


@odd("a checkpoint")
class Checkpoint(Odd):
    def forward(self, x: Tensor) -> Any:
        from torch.utils.checkpoint import checkpoint

        return self.b(checkpoint(lambda given: self.a(given).tanh() * self.vector, x, use_reentrant=False))


# hooks ----------------------------------------------------------------------------------------------------------------


@odd("hooks on tensors")
class TensorHooks(Odd):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        last = self.b(h.tanh())
        for tensor, factor in ((x, 3.0), (h, 0.5), (last, -2.0)):
            if tensor.requires_grad:
                tensor.register_hook(lambda grad, factor=factor: grad * factor)
        return last


@odd("a hook on one product")
class HookOnProduct(Odd):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        if h.requires_grad:
            h.register_hook(lambda grad: grad * 0.5)
            h.retain_grad()
        return self.b(h.tanh())


@odd("hooks on parameters")
class ParameterHooks(Odd):
    def prepare(self) -> None:
        self.a.weight.register_hook(lambda grad: grad * 2)
        self.vector.register_hook(lambda grad: grad * -1)

    def forward(self, x: Tensor) -> Any:
        return self.b(self.a(x).tanh() * self.vector) * self.vector, self.a.weight.mean(0)


@odd("hooks on accumulated gradients")
class AccumulatedHooks(Odd):
    def prepare(self) -> None:
        for p in (self.a.weight, self.vector, self.table):
            p.register_post_accumulate_grad_hook(_third)

    def forward(self, x: Tensor) -> Any:
        return self.b(self.a(x).tanh() * self.vector) * self.vector, self.table.mean(0)


def _third(p: Tensor) -> None:
    assert p.grad is not None
    p.grad.mul_(3)


@odd("hooks of modules")
class ModuleHooks(Odd):
    def prepare(self) -> None:
        self.a.register_full_backward_hook(lambda module, inputs, outputs: None)
        self.a.register_full_backward_pre_hook(lambda module, outputs: tuple(g * 0.5 for g in outputs))
        self.b.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 3,))
        self.register_full_backward_hook(_of_layer)

    def forward(self, x: Tensor) -> Any:
        return self.b(self.a(x).tanh()), self.table.mean(0)


def _of_layer(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return None if inputs[0] is None else (inputs[0] * 2,)


@odd("old hooks of modules")
class OldModuleHooks(Odd):
    def prepare(self) -> None:
        self.a.register_backward_hook(lambda module, inputs, outputs: tuple(g if g is None else g * 2 for g in inputs))

    def forward(self, x: Tensor) -> Any:
        return self.b(self.a(x).tanh())
