"""A model that says itself how it is cut: an embedding, perceptron blocks with norms, and a head tied or not."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from minipar.models.nodes import Cut, Held, Node
from minipar.program.forms import Forms


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


class SequenceBlock(Block):
    """The same block, of which the norm and the sum are sequence-parallel: each rank has a part of the tokens there.

    first, last   whether the block reads what is whole, and writes what is read whole
    """

    def __init__(self, width: int, inner: int, first: bool = False, last: bool = False) -> None:
        super().__init__(width, inner)
        self.first, self.last = first, last

    def shard(self, index: int, count: int, name: str, known: dict[str, nn.Parameter]) -> list[Node]:
        norm, middle, added = super().shard(index, count, name, known)
        norm.forms = Forms(reads="C1" if self.first else "S1", writes="S1,S1", grad_reads="S1,S1", grad_writes="S1")
        middle.forms = Forms(reads="S1,R", writes="S1,P", grad_reads="S1,R", grad_writes="S1,P")
        grads = "C1" if self.last else "S1"
        added.forms = Forms(reads="S1,S1", writes="S1", grad_reads=grads, grad_writes="S1,S1")
        for node in (norm, added):  # every rank has these parameters whole, and makes the gradient of its tokens
            for own, held in node.held.items():
                node.held[own] = replace(held, letters="P")
                known[held.name].minipar_form = "P"  # type: ignore[attr-defined]
                known[held.name].minipar_held = node.held[own]  # type: ignore[attr-defined]
        return [norm, middle, added]


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


class Halves(Whole):
    """A linear layer of which each rank has a part of the inputs. The next layer reads shards of its partial sums."""

    def shard(self, index: int, count: int, name: str, known: dict[str, nn.Parameter]) -> list[Node]:
        return [_Columns(self.layer, index, count, f"{name}.layer", known)]


class _Columns(Node):
    def __init__(self, layer: nn.Linear, index: int, count: int, name: str, known: dict[str, nn.Parameter]) -> None:
        super().__init__(Forms(reads="C2", writes="P", grad_writes="S2"))
        self.hold("weight", layer.weight, Held(f"{name}.weight", Cut(1, index, count)), known)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


def model(width: int = 8, blocks: int = 3) -> nn.Sequential:
    """A linear layer, blocks, and a linear layer."""
    torch.manual_seed(0)
    ends = [Whole(nn.Linear(width, width)), Whole(nn.Linear(width, width))]
    return nn.Sequential(ends[0], *(Block(width, 4 * width) for _ in range(blocks)), ends[1])


def sequence_model(width: int = 8, blocks: int = 3) -> nn.Sequential:
    """The same layers, sequence-parallel: rows are (tokens, width), and the tokens are divided."""
    torch.manual_seed(0)
    ends = [Whole(nn.Linear(width, width)), Whole(nn.Linear(width, width))]
    inner = [SequenceBlock(width, 4 * width, k == 0, k == blocks - 1) for k in range(blocks)]
    return nn.Sequential(ends[0], *inner, ends[1])


def partial_model() -> nn.Sequential:
    """A layer makes partial sums, of which the sequence-parallel block behind it reads shards."""
    torch.manual_seed(0)
    halves, block = Halves(nn.Linear(8, 8, bias=False)), SequenceBlock(8, 16, last=True)
    return nn.Sequential(Whole(nn.Linear(8, 8)), halves, block, Whole(nn.Linear(8, 8)))
