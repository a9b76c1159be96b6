"""A mixture of experts in a few lines, in which no token is dropped: what `mixture_gpt.py` is compared with.

    tokens (T, d) -> scores (T, X) -> the `top` best experts of each token -> their weighted sum (T, d)

Here every expert computes all tokens, which is plain, and right for small models. Sources: Shazeer et al., 2017; Jiang
et al., "Mixtral", 2024.
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
    best, chosen = (tokens @ gate).topk(top, -1)
    every = functional.gelu(tokens @ up) @ down  # (X, T, d): of all tokens
    share = (best.softmax(-1)[None] * (chosen[None] == torch.arange(len(up))[:, None, None])).sum(-1)
    return (share[..., None] * every).sum(0)
