"""Randomness as a function of (seed, step, global row, layer name), never of call order.

Every split of a batch then sees the same dropout: which rank computes a row, in which micro-batch, and how often
(recomputation) makes no difference. `nn.Dropout` draws from a generator in call order, so it is replaced.

    row r of layer "3.drop"  ->  64-bit key  ->  element j kept if hash(key, j) is above p
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # the 64-bit golden ratio, as a signed number
_MIX1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX2 = 0x94D049BB133111EB - (1 << 64)


def hash64(*words: object) -> int:
    """A signed 64-bit number from any words, the same in every process."""
    digest = hashlib.blake2b("\0".join(map(str, words)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


class RowDropout(nn.Module):
    """Dropout whose mask depends on (seed, layer name, step, global row) alone. `at` says where the rows are.

    Of a slice of a sequence (rows, tokens, ...) `at` says where its tokens begin: it sees the whole sequence's mask.
    """

    def __init__(self, p: float, seed: int, name: str) -> None:
        super().__init__()
        self.p = p
        self.seed = seed
        self.name = name
        self.step = 0
        self.first_row = 0
        self.first_token = 0

    def forward(self, x: Tensor) -> Tensor:
        """x of shape (rows, ...): the same shape, with elements zeroed with probability p, the rest scaled up."""
        if not self.training or self.p == 0.0:
            return x
        if self.p == 1.0:
            return x * 0.0
        return x * (self._uniform(x) >= self.p).to(x.dtype).div_(1.0 - self.p)

    def _uniform(self, x: Tensor) -> Tensor:
        """Numbers in [0, 1), one per element: splitmix64 of the row's key and the element's position in the row."""
        base = hash64(self.seed, self.name, self.step)
        rows = torch.arange(self.first_row, self.first_row + len(x), device=x.device)
        key = _mix(rows * _GOLDEN + base).view(-1, 1)
        count = x[0].numel() if len(x) else 0
        before = self.first_token * (count // x.shape[1]) if self.first_token and count else 0
        position = torch.arange(before + 1, before + count + 1, device=x.device) * _GOLDEN
        bits = _mix(key + position).bitwise_right_shift_(11).bitwise_and_((1 << 53) - 1)
        return bits.double().mul_(2.0**-53).view(x.shape)

    def extra_repr(self) -> str:
        return f"p={self.p}, by row"


def _mix(z: Tensor) -> Tensor:
    z = (z ^ (z >> 30 & (1 << 34) - 1)) * _MIX1
    z = (z ^ (z >> 27 & (1 << 37) - 1)) * _MIX2
    return z ^ (z >> 31 & (1 << 33) - 1)


def replace_dropout(model: nn.Module, seed: int) -> None:
    """Replace every `nn.Dropout` of a model, in place, by one whose mask is a function of the global row."""
    for name, module in list(model.named_modules()):
        for child_name, child in list(module.named_children()):
            if type(child) is nn.Dropout:
                full = f"{name}.{child_name}" if name else child_name
                replacement = RowDropout(child.p, seed, full)
                replacement.train(child.training)
                setattr(module, child_name, replacement)


def split_sensitive(model: nn.Module) -> list[str]:
    """Modules, by name, whose result depends on how the batch is split, so that it cannot equal one device's."""
    found = []
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            if not module.training and module.running_mean is not None:
                continue  # it goes by the statistics that it has
            found.append(f"{name} ({kind}: statistics of a micro-batch)")
        elif not module.training:
            continue
        elif isinstance(module, nn.modules.dropout._DropoutNd) and type(module) is not nn.Dropout and module.p:
            found.append(f"{name} ({kind}: only nn.Dropout draws by row)")
        elif isinstance(module, nn.MultiheadAttention) and module.dropout:
            found.append(f"{name} ({kind}: its inner dropout does not draw by row)")
    return found


def row_dropouts(layer: nn.Module) -> list[RowDropout]:
    """The row-wise dropouts of a layer."""
    return [module for module in layer.modules() if isinstance(module, RowDropout)]


def at(dropouts: Iterable[RowDropout], step: int, first_row: int, first_token: int = 0) -> None:
    """Tell dropouts which rows they see next: `first_row`, in the whole batch of `step`, and those after it.

    first_token   of a slice of sequences, whose tokens are dimension 1
    """
    for dropout in dropouts:
        dropout.step = step
        dropout.first_row = first_row
        dropout.first_token = first_token
