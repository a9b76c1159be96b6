"""Small models with cases that are easy to get wrong: ties, frozen layers, tuples, uneven sizes, dropout, in-place."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Tied(nn.Module):
    """A linear layer that shares its weight with another layer."""

    def __init__(self, other: nn.Linear, transpose: bool = False) -> None:
        super().__init__()
        self.weight = other.weight
        self.bias = nn.Parameter(torch.zeros(other.weight.shape[0]))
        self.transpose = transpose

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.T if self.transpose else self.weight
        return nn.functional.linear(x, weight, self.bias)


class Fork(nn.Module):
    """Takes a tensor, hands on a tuple: (transformed, the input itself as a skip, a counter that has no gradient)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return torch.tanh(self.linear(x)), (x, torch.arange(len(x)))


class Carry(nn.Module):
    """Takes and hands on the tuple of `Fork`, changing its first part only."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: tuple[Tensor, tuple[Tensor, Tensor]]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return torch.sigmoid(self.linear(x[0])), x[1]


class Join(nn.Module):
    """Takes the tuple, hands on one tensor; uses the skip and the counter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * width, width)

    def forward(self, x: tuple[Tensor, tuple[Tensor, Tensor]]) -> Tensor:
        skip, count = x[1]
        assert len(count) == len(skip)
        return self.linear(torch.cat([x[0], skip], 1))


class Unused(nn.Module):
    """Holds a parameter that its output does not depend on, and a part of its output that nobody uses."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class InPlace(nn.Module):
    """Overwrites its input, as the first thing it does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=True)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.act(x))


KINDS = ("linear", "dropout", "in-place", "unused", "tuples")


def toy(kinds: tuple[str, ...], width: int = 6, tied: bool = False, frozen: tuple[int, ...] = ()) -> nn.Sequential:
    """A chain of small layers: a first Linear, then `kinds` ("tuples" stands for three layers), then a last Linear.

    tied     the last layer shares the first one's weight
    frozen   layers whose parameters get no gradient (counted modulo the number of layers)
    """
    first = nn.Linear(width, width)
    layers: list[nn.Module] = [first]
    for kind in kinds:
        if kind == "tuples":
            layers += [Fork(width), Carry(width), Join(width)]
        else:
            layers.append(
                {
                    "linear": lambda: nn.Sequential(nn.Linear(width, width), nn.GELU()),
                    "dropout": lambda: nn.Sequential(nn.Linear(width, width), nn.Dropout(0.3)),
                    "in-place": lambda: InPlace(width),
                    "unused": lambda: Unused(width),
                }[kind]()
            )
    layers.append(Tied(first) if tied else nn.Linear(width, width))
    model = nn.Sequential(*layers)
    for k in frozen:
        for p in model[k % len(layers)].parameters():
            p.requires_grad_(False)
    return model


def two_ties() -> nn.Sequential:
    """The last two layers share the weights of the first two, in opposite order."""
    a, b = nn.Linear(6, 6), nn.Linear(6, 6)
    return nn.Sequential(a, b, nn.Tanh(), Tied(b), Tied(a, transpose=True))


def rows(count: int, width: int = 6, classes: bool = False, ignored: int = 0) -> tuple[Tensor, Tensor]:
    """`count` random rows and their targets; with `classes` integers, of which the first `ignored` do not count."""
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, width, generator=generator, dtype=torch.float64)
    if not classes:
        return x, torch.randn(count, width, generator=generator, dtype=torch.float64)
    y = torch.randint(width, (count,), generator=generator)
    y[:ignored] = -100
    return x, y
