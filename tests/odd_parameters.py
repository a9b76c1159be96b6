"""Unusual parameters: empty, with one number, with strides that are not row by row, complex, of several dtypes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

WIDTH = 6


class Odd(nn.Module):
    """A linear layer, and one odd parameter `p`, whose sum of squares scales the output a little."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.p = nn.Parameter(values)

    def forward(self, x: Tensor) -> Tensor:
        found = self.linear(x).tanh()
        scale = (self.p * self.p.conj()).real if self.p.is_complex() else self.p.square()
        if self.p.shape == (WIDTH, WIDTH) and not self.p.is_complex():
            found = found + x @ self.p
        return found * (1 + 0.1 * scale.sum().to(found.dtype))


class Alone(nn.Module):
    """A layer with nothing but an odd parameter."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.p = nn.Parameter(values)

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + 0.1 * self.p.abs().square().sum().to(x.dtype))


def _numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    count = torch.Size(shape).numel()
    return torch.linspace(-0.3, 0.3, max(1, count))[:count].to(dtype).view(shape)


FORMS: dict[str, Callable[[], Tensor]] = {
    "empty": lambda: _numbers(0),
    "no columns": lambda: _numbers(3, 0),
    "one number": lambda: torch.tensor(0.5),
    "transposed": lambda: _numbers(WIDTH, WIDTH).T,
    "columns of a larger one": lambda: _numbers(WIDTH, 2 * WIDTH)[:, 1 : 1 + WIDTH],
    "every second": lambda: _numbers(2 * WIDTH)[::2],
    "a row of a larger one": lambda: _numbers(4, WIDTH)[2],
    "channels last": lambda: _numbers(2, 3, 2, 2).to(memory_format=torch.channels_last),
    "strides (1, 5)": lambda: _numbers(5, 5).T,
}


def model(form: str) -> list[nn.Module]:
    """Five layers, two of them odd ones, the first one among them."""
    make = FORMS[form]
    inner = nn.Sequential(nn.Tanh(), Odd(make()))
    return [Odd(make()), Alone(make()), inner, nn.Linear(WIDTH, WIDTH), Odd(make())]
