"""Small models as `nn.Sequential`s of layers, ready to be cut into stages, and presets of them by name.

    model = models.build("gpt-tiny")            # or models.gpt(layers=4, ...), models.mlp(widths=...), models.branchy()
    shape = models.shape("gpt-tiny")            # what a plan needs of it; never imports torch
    shape = models.shape_of(model)              # the same of any model in torch
    models.presets()                            # the names
    layers = models.from_torch(model, example)  # a model of your own, cut into layers
    layers = models.from_transformers(model)    # one of Hugging Face's

The builders import torch when they are first used; this package, its presets and its shapes do without.

A layer is the smallest unit that a plan places. `program.shape.Shape` is all that a plan knows of a model: the number
of layers, and parameter groups in bytes, first one for each layer, then one for each set of layers that share the same
Parameter objects. Initial values are drawn for each parameter from (seed, name), in float32 on the CPU, so that a rank
can build its own layers only. The GPT has its classes second, (B, vocabulary, T): `cross_entropy` takes its output as
it is, and the batch is the first dimension everywhere. On a rank parameters are row-major, whatever the user's strides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minipar.models.shapes import shape
from minipar.models.table import GPT, MLP, PRESETS, Branchy, preset, presets, title

if TYPE_CHECKING:
    from torch import nn

    from minipar.models.hugging_face import from_transformers, next_token_loss, token_loss
    from minipar.models.inception import branchy
    from minipar.models.initial import initialise
    from minipar.models.parameter_groups import shape_of
    from minipar.models.perceptron import mlp
    from minipar.models.selective_checkpoint import Recomputed
    from minipar.models.sliced import Sliced
    from minipar.models.tracing import from_torch
    from minipar.models.transformer import gpt

__all__ = [
    "GPT", "MLP", "PRESETS", "Branchy", "Recomputed", "Sliced", "branchy", "build", "from_torch", "from_transformers",
    "gpt", "initialise", "mlp", "next_token_loss", "preset", "presets", "shape", "shape_of", "token_loss",
]  # fmt: skip

_LAZY = {
    "branchy": "minipar.models.inception",
    "gpt": "minipar.models.transformer",
    "mlp": "minipar.models.perceptron",
    "initialise": "minipar.models.initial",
    "from_torch": "minipar.models.tracing",
    "from_transformers": "minipar.models.hugging_face",
    "next_token_loss": "minipar.models.hugging_face",
    "token_loss": "minipar.models.hugging_face",
    "shape_of": "minipar.models.parameter_groups",
    "Recomputed": "minipar.models.selective_checkpoint",
    "Sliced": "minipar.models.sliced",
}


def build(name: str, **overrides: Any) -> nn.Sequential:
    """The model of a preset, initialised from `torch.initial_seed()`. `overrides` replace the preset's numbers.

    Errors: `PlanError` for an unknown preset or number.
    """
    chosen = preset(name, **overrides)
    if isinstance(chosen, GPT):
        from minipar.models.transformer import gpt

        model: nn.Sequential = gpt(**chosen.numbers())
    elif isinstance(chosen, Branchy):
        from minipar.models.inception import branchy

        model = branchy(**chosen.numbers())
    else:
        from minipar.models.perceptron import mlp

        model = mlp(**chosen.numbers())
    model.name = title(name, chosen, overrides)  # type: ignore[assignment]  # a plain string, for messages and pictures
    return model


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
