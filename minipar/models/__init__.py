"""Small models as `nn.Sequential`s of layers, which can be cut into stages, and presets of them by name.

    model = models.build("gpt-tiny")            # or models.gpt(layers=4, ...), models.mlp(widths=...), models.branchy()
    shape = models.shape("gpt-tiny")            # what a plan must know of it; never imports torch
    loss = models.loss_of("gpt-tiny")           # what the preset is trained with
    shape = models.shape_of(model)              # the same for any model in torch
    models.presets()                            # the names
    layers = models.from_torch(model, example)  # a model of your own, cut into layers
    layers = models.from_transformers(model)    # a model of Hugging Face's

The builders import torch when they are first used. This package, its presets and its shapes need no torch.

A layer is the smallest unit that a plan places. `program.shape.Shape` is all that a plan knows of a model: the number
of layers, and parameter groups in bytes, first one for each layer, then one for each set of layers that share the same
Parameter objects. The initial values of a parameter depend on (seed, name), and are drawn in float32 on the CPU, so a
rank can build only its own layers. The output of the GPT is (B, vocabulary, T), as `cross_entropy` takes it. The batch
is the first dimension of every value. On a rank parameters are row-major, whatever strides the user's have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from minipar.models.shapes import shape
from minipar.models.table import GPT, MLP, PRESETS, Branchy, Mixture, preset, presets, title

if TYPE_CHECKING:
    from torch import nn

    from minipar.models.hugging_face import from_transformers, next_token_loss, token_loss
    from minipar.models.inception import branchy
    from minipar.models.initial import initialise
    from minipar.models.mixture_gpt import mixture, mixture_load, mixture_loss
    from minipar.models.parameter_groups import shape_of
    from minipar.models.perceptron import mlp
    from minipar.models.selective_checkpoint import Recomputed
    from minipar.models.sliced import Sliced
    from minipar.models.tracing import from_torch
    from minipar.models.transformer import gpt

__all__ = [
    "GPT", "MLP", "PRESETS", "Branchy", "Mixture", "Recomputed", "Sliced", "branchy", "build", "from_torch",
    "from_transformers", "gpt", "initialise", "loss_of", "mixture", "mixture_load", "mixture_loss", "mlp",
    "next_token_loss", "preset", "presets", "shape", "shape_of", "token_loss",
]  # fmt: skip

_LAZY = {
    "branchy": "minipar.models.inception",
    "gpt": "minipar.models.transformer",
    "mixture": "minipar.models.mixture_gpt",
    "mixture_load": "minipar.models.mixture_gpt",
    "mixture_loss": "minipar.models.mixture_gpt",
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
    elif isinstance(chosen, Mixture):
        from minipar.models.mixture_gpt import mixture

        model = mixture(**chosen.numbers())
    elif isinstance(chosen, Branchy):
        from minipar.models.inception import branchy

        model = branchy(**chosen.numbers())
    else:
        from minipar.models.perceptron import mlp

        model = mlp(**chosen.numbers())
    model.name = title(name, chosen, overrides)  # type: ignore[assignment]  # a plain string, for messages and pictures
    return model


def loss_of(name: str) -> Callable[[Any, Any], Any]:
    """The loss that a preset is trained with: cross entropy, of a mixture `mixture_loss`.

    Errors: `PlanError` for an unknown preset.
    """
    if isinstance(preset(name), Mixture):
        from minipar.models.mixture_gpt import mixture_loss

        return mixture_loss
    from torch.nn.functional import cross_entropy

    return cross_entropy


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
