"""A layer's exception, with the layer's number and name, where it ran, and what it was given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from minipar.errors import RankError
from minipar.models.tensors import dtype_name, named_tensors

_SHOWN = 4  # tensors of an input that are listed


def names_of(model: object) -> tuple[str, ...]:
    """The names of a model's layers; () for a plain list of them."""
    return tuple(name for name, layer in getattr(model, "_modules", {}).items() if layer is not None)


def title(number: int, layer: nn.Module, names: Sequence[str] = ()) -> str:
    """A layer in words: its number, and its name or (of a list) its class."""
    name = names[number] if number < len(names) else ""
    return f"layer {number} ({type(layer).__name__ if not name or name.isdigit() else repr(name)})"


def raised(who: str, error: Exception, where: str, given: Any = None) -> RankError:
    """The error to raise for an exception of a layer or a loss; it names the layer.

    who     such as `title(...)`, or "the loss"; where: such as "in the profile", or the rank and the micro-batch
    given   what the layer was given: the error lists its shapes and dtypes
    """
    forms = [f"{name} {tuple(t.shape)} {dtype_name(t.dtype)}" for name, t in named_tensors(given, "x")]
    listed = "; given " + ", ".join(forms[:_SHOWN]) + ", ..." * (len(forms) > _SHOWN) if forms else ""
    lines = str(error).strip().splitlines()
    reason = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return RankError(f"{who} {where}: {reason}{listed}", "\n".join(lines[1:]))
