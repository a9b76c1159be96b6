"""A mixture of experts as one operator, `torch.ops.minipar.mixture`: what tensor and expert parallelism divide.

    tokens (T, d) -> scores (T, X) -> the `top` best experts of each token -> their weighted sum (T, d)

How many tokens an expert gets depends on the data, which the letters of a rule cannot say. So routing, experts and
weighting are one operator, with fixed forms of what it reads and writes. Here every expert computes all tokens, which
is plain, and right for small models. Source of the routing: Shazeer et al., 2017; Jiang et al., "Mixtral", 2024.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def mixture(tokens: Tensor, gate: Tensor, up: Tensor, down: Tensor, top: int = 2) -> Tensor:
    """A mixture of experts in which no token is dropped.

    tokens (T, d), gate (d, X), up (X, d, f), down (X, f, d); each token goes to its `top` experts, and gets the sum of
    what they give, weighted by a softmax of their scores. Returns (T, d).
    """
    weights, chosen = routed(tokens, gate, top)
    return weighted(feed(tokens, up, down), weights, chosen, 0)


def routed(tokens: Tensor, gate: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Weights (T, top) of the experts that each token goes to, and their numbers."""
    best, chosen = (tokens @ gate).topk(top, -1)
    return best.softmax(-1), chosen


def feed(tokens: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """What every expert makes of its tokens, (X, T, d) or of all (T, d): (X, T, d)."""
    return functional.gelu(tokens @ up) @ down


def weighted(made: Tensor, weights: Tensor, chosen: Tensor, first: int) -> Tensor:
    """Of what experts `first`, `first` + 1, ... made of all tokens (X, T, d), what each token gets: (T, d)."""
    experts = torch.arange(first, first + made.shape[0], device=chosen.device)
    share = (weights[None] * (chosen[None] == experts[:, None, None])).sum(-1)
    return (share[..., None] * made).sum(0)


_LIBRARY = torch.library.Library("minipar", "FRAGMENT")
_LIBRARY.define("mixture(Tensor tokens, Tensor gate, Tensor up, Tensor down, int top=2) -> Tensor")
_LIBRARY.impl("mixture", mixture, "CompositeImplicitAutograd")
