r"""A small convolutional network with branches, after Inception, for images of 8 x 8.

           ,-- 1x1 -------------.
    stem --+-- 1x1 - 3x3 --------+-- join --+-- 1x1 ...  -- join -- head
           +-- 1x1 - 5x5 --------+
           '-- pool and 1x1 ----'            a block is 7 layers: 1x1 | 1x1, 3x3 | 1x1, 5x5 | pool | join

Source: Szegedy et al., "Going Deeper with Convolutions", 2015.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minipar.models.initial import initialise
from minipar.models.network import Network
from minipar.models.table import Branchy, check_branchy, edges_of_blocks

SIDE = 8  # of an image


def branchy(blocks: int = 2, width: int = 16) -> Network:
    """A stem, `blocks` blocks of four branches with `width` channels each, and a head: 7 blocks + 2 layers.

    Takes grey values of shape (rows, 64), gives (rows, 10) logits. Initial values come from `torch.initial_seed()` and
    the parameters' names. Errors: `PlanError` for numbers that make no model.
    """
    check_branchy(Branchy(blocks, width))
    with torch.random.fork_rng(devices=[]):  # torch first draws values of its own, which are not used
        layers: list[nn.Module] = [Stem(width)]
        for block in range(blocks):
            given = 4 * width if block else width
            layers += [
                _convolution(given, width, 1),
                _convolution(given, width // 2, 1),
                _convolution(width // 2, width, 3),
                _convolution(given, width // 2, 1),
                _convolution(width // 2, width, 5),
                nn.Sequential(nn.AvgPool2d(3, 1, 1), *_convolution(given, width, 1)),
                Concatenation(),
            ]
        layers.append(Head(4 * width, Branchy.classes))
    model = Network(layers, edges_of_blocks(blocks))
    initialise(model, std=None)
    return model


def _convolution(given: int, width: int, size: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(given, width, size, padding=size // 2), nn.ReLU())


class Stem(nn.Module):
    """From rows of 64 grey values to `width` channels of 8 x 8."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.convolution(x.view(-1, 1, SIDE, SIDE)))


class Concatenation(nn.Module):
    """The channels of all branches, concatenated."""

    def forward(self, given: tuple[Tensor, ...]) -> Tensor:
        return torch.cat(given, dim=1)


class Head(nn.Module):
    """From channels to logits: the mean over the image, then a linear layer."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.logits = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.logits(x.mean((2, 3)))
        return found
