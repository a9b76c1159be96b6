"""Initial values as a function of (seed, parameter name), never of the order in which a model is built.

Every parameter has its own random generator. So a rank that builds one layer of a model gets the same values as in the
whole model, and parameters with the same name and shape in two models have the same initial values.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import nn


def initialise(model: nn.Module, prefix: str = "", std: float | None = 0.02) -> None:
    """Fill every parameter of `model` in place, from (`torch.initial_seed()`, `prefix` + its name).

    Matrices are drawn from a normal distribution with standard deviation `std` (0.02 is GPT-2's; None means
    sqrt(2 / inputs), for deep models without residual connections or norms). Biases are 0, and other vectors, which are
    weights of norms, are 1.

    The numbers are drawn on the CPU in float32, so a model in float64 or on a GPU gets the same values. Parameters on
    the "meta" device are skipped. `prefix` is the path of the model inside a larger one: `initialise(model[3],
    prefix="3.")` gives the values that `initialise(model)` gives to layer 3. A tied parameter has the name of its first
    holder.
    """
    seed = torch.initial_seed()
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            continue
        with torch.no_grad():
            if parameter.dim() >= 2:
                scale = math.sqrt(2 / parameter[0].numel()) if std is None else std
                generator = torch.Generator("cpu").manual_seed(_seed_of(seed, prefix + name))
                values = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
                parameter.copy_(values.normal_(0.0, scale, generator=generator))
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little")
