"""A model that says itself how it is cut: an embedding, perceptron blocks with norms, and a head tied or not."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minipar.program.forms import Forms
from minipar.sharding.nodes import Cut, Held, Node


class Block(nn.Module):
    """x + down(gelu(up(norm(x)))): with a bias behind the partial sum, which is added once."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

    def shard(self, index: int, count: int, name: str, known: dict[str, nn.Parameter]) -> list[Node]:
        return [_Norm(self, name, known), _Middle(self, index, count, name, known), _Sum(self, name, known)]


class _Norm(Node):
    def __init__(self, block: Block, name: str, known: dict[str, nn.Parameter]) -> None:
        super().__init__(Forms())
        self.hold("weight", block.norm.weight, Held(f"{name}.norm.weight"), known)
        self.hold("bias", block.norm.bias, Held(f"{name}.norm.bias"), known)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, nn.functional.layer_norm(x, x.shape[-1:], self.weight, self.bias)


class _Middle(Node):
    def __init__(self, block: Block, index: int, count: int, name: str, known: dict[str, nn.Parameter]) -> None:
        super().__init__(Forms(writes="R,P", grad_writes="R,P"))
        self.hold("up", block.up.weight, Held(f"{name}.up.weight", Cut(0, index, count)), known)
        self.hold("up_bias", block.up.bias, Held(f"{name}.up.bias", Cut(0, index, count)), known)
        self.hold("down", block.down.weight, Held(f"{name}.down.weight", Cut(1, index, count)), known)

    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, y = given
        inner = nn.functional.gelu(nn.functional.linear(y, self.up, self.up_bias))
        return x, nn.functional.linear(inner, self.down)


class _Sum(Node):
    def __init__(self, block: Block, name: str, known: dict[str, nn.Parameter]) -> None:
        super().__init__(Forms())
        self.hold("bias", block.down.bias, Held(f"{name}.down.bias"), known)

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        x, y = given
        return x + (y + self.bias)


class Whole(nn.Module):
    """A layer that every rank computes alike."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def shard(self, index: int, count: int, name: str, known: dict[str, nn.Parameter]) -> list[Node]:
        return [_Linear(self.layer, f"{name}.layer", known)]


class _Linear(Node):
    def __init__(self, layer: nn.Linear, name: str, known: dict[str, nn.Parameter]) -> None:
        super().__init__(Forms())
        self.hold("weight", layer.weight, Held(f"{name}.weight"), known)
        self.hold("bias", layer.bias, Held(f"{name}.bias"), known)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


def model(width: int = 8, blocks: int = 3) -> nn.Sequential:
    """A linear layer, blocks, and a linear layer."""
    torch.manual_seed(0)
    ends = [Whole(nn.Linear(width, width)), Whole(nn.Linear(width, width))]
    return nn.Sequential(ends[0], *(Block(width, 4 * width) for _ in range(blocks)), ends[1])
