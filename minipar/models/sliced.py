"""Layers that take a sequence slice by slice, as schedule=terapipe gives it to them.

    slice 0 of x --layer--> slice 0 of the output          a causal layer needs nothing of later tokens; of earlier
                   | carry                                 tokens it needs its carry: an attention their keys and
    slice 1 of x --layer--> slice 1 of the output          values, a recurrent layer its state

To write such a layer, derive it from `Sliced` instead of `nn.Module`, and write `forward_slice` instead of `forward`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn


class Sliced(nn.Module):
    """A layer that can take some tokens of each row at a time, with a carry from the tokens before.

    carries   whether it has a carry; False for a layer that treats every token separately
    whole     why this one takes whole sequences only, with a way out; "" if it takes slices

    In its inputs and outputs dimension 0 is rows and dimension 1 is tokens. (Only the last layer's output, which the
    loss takes, may have other dimensions.)
    """

    carries = True
    whole = ""

    def forward_slice(self, x: Any, start: int, carry: Any) -> tuple[Any, Any]:
        """The output for the tokens from `start` on, and the carry for the next slice (None: nothing).

        x       (rows, tokens of the slice, ...)
        carry   what this method returned for the slice before, a tensor or nested tuples of them; None for the first
                slice. Gradients flow back through it
        """
        raise NotImplementedError(f"{type(self).__name__} needs a method forward_slice(x, start, carry)")

    def forward(self, x: Any, start: int | None = None, carry: Any = None) -> Any:
        """The output for whole sequences; with `start`, the result of `forward_slice`."""
        found = self.forward_slice(x, start or 0, carry)
        return found[0] if start is None else found


def describe(layers: Sequence[nn.Module]) -> tuple[tuple[int, ...], str]:
    """The layers that have a carry; and number and class of the first layer that takes only whole sequences, with the
    reason that it gives (or "")."""
    carries = tuple(
        l for l, layer in enumerate(layers) if isinstance(layer, Sliced) and layer.carries and not layer.whole
    )
    reasons = (layer.whole if isinstance(layer, Sliced) else None for layer in layers)
    named = ((l, type(layers[l]).__name__, reason) for l, reason in enumerate(reasons) if reason != "")
    return carries, next((f"{l} ({name}: {reason})" if reason else f"{l} ({name})" for l, name, reason in named), "")
