"""Layers that take a sequence slice by slice, as schedule=terapipe feeds them.

    slice 0 of x --layer--> slice 0 of the output          a causal layer needs of later tokens nothing, and of earlier
                   | carry                                 ones what it chose to carry on: an attention their keys and
    slice 1 of x --layer--> slice 1 of the output          values, a recurrent layer its state

To make a layer fit, derive it from `Sliced` instead of `nn.Module` and write `forward_slice` instead of `forward`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn


class Sliced(nn.Module):
    """A layer for which some tokens of each row are enough, given what it carried on of those before.

    carries   whether it carries something; of a layer that treats every token by itself, say False

    Of what goes in and out, tensors have rows as dimension 0 and tokens as dimension 1 (only the last layer's output,
    which the loss takes, may have them elsewhere).
    """

    carries = True

    def forward_slice(self, x: Any, start: int, carry: Any) -> tuple[Any, Any]:
        """The output for tokens `start` on, and what to carry on to the next slice (None: nothing).

        x       (rows, tokens of the slice, ...)
        carry   what this method gave for the slice before, a tensor or nested tuples of them; None for the first slice.
                Gradients flow back through it
        """
        raise NotImplementedError(f"{type(self).__name__} needs a method forward_slice(x, start, carry)")

    def forward(self, x: Any, start: int | None = None, carry: Any = None) -> Any:
        """The output for whole sequences; with `start`, what `forward_slice` gives."""
        found = self.forward_slice(x, start or 0, carry)
        return found[0] if start is None else found


def describe(layers: Sequence[nn.Module]) -> tuple[tuple[int, ...], str]:
    """The layers that carry something, and the first one, by number and class, that takes whole sequences (or "")."""
    carries = tuple(l for l, layer in enumerate(layers) if isinstance(layer, Sliced) and layer.carries)
    others = (f"{l} ({type(layer).__name__})" for l, layer in enumerate(layers) if not isinstance(layer, Sliced))
    return carries, next(others, "")
