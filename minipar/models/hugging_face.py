"""`from_transformers`: cuts models of Hugging Face's transformers into layers.

    embeddings | block | block | ... | norm and head

A layer runs the model's own forward around its block (`replaying.py`), so that masks, rotary tables and position biases
are what transformers makes of `attention_mask` and `position_ids`. Keys and values are not cached.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minipar.errors import PlanError
from minipar.models.replaying import at_blocks

IGNORED = -100  # the label of a token that the loss leaves out


def from_transformers(model: nn.Module, example: Any = None) -> nn.Sequential:
    """A model of Hugging Face's transformers cut into layers that `train` takes.

    model     any that calls its blocks one after another and gives logits: for causal language modelling (GPT-2, Llama,
              Mistral, Gemma, Phi, OPT, GPT-NeoX, Qwen, Mixtral, Mamba ...), for masked language modelling or
              classification (BERT, RoBERTa, DistilBERT, ViT ...), with an encoder and a decoder (T5 ...)
    example   an input to cut it by, and to compare the layers with the model on; default: 2 rows of 8 tokens, or 2
              pictures

    The layers take what the model's forward takes: a dict of input_ids, attention_mask and so on, by name, or its first
    input alone, such as token numbers (rows, tokens). They give its logits. Labels belong to y, and the loss is
    `next_token_loss` or `token_loss`. Parameters and modules are the model's own and keep their names. Errors:
    PlanError for a model that cannot be cut, with the reason and what to do.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "model_type"):
        raise PlanError(f"model: {type(model).__name__} is no model of transformers; possible is models.from_torch")
    if getattr(config, "output_router_logits", False):
        raise PlanError(
            "model: output_router_logits=True adds a loss of all layers, which a pipeline does not have in one place; "
            "set model.config.output_router_logits = False"
        )
    options = {"use_cache": False} if hasattr(config, "use_cache") else {}
    first = getattr(model, "main_input_name", "input_ids")
    return at_blocks(model, _example(model, first) if example is None else example, partial(_logits, first, options))


def _example(model: Any, first: str) -> Any:
    """A small input for a model, by its configuration."""
    config, device = model.config, next(model.parameters()).device
    if first == "input_ids":
        ids = torch.arange(16, device=device).view(2, 8) % config.vocab_size
        return {first: ids, "decoder_input_ids": ids[:, :5]} if config.is_encoder_decoder else ids
    if first == "pixel_values" and hasattr(config, "image_size"):
        size = config.image_size
        height, width = size if isinstance(size, (tuple, list)) else (size, size)
        return torch.linspace(-1, 1, 2 * config.num_channels * height * width, device=device).view(
            2, config.num_channels, height, width
        )
    raise PlanError(f"model: what {type(model).__name__} takes as {first} is not known; give an example of two rows")


def _logits(first: str, options: dict[str, Any], model: nn.Module, x: Any) -> Any:
    """The logits of a model for rows x."""
    given = dict(x) if isinstance(x, Mapping) else {first: x}
    if "labels" in given:
        raise PlanError(f"x has {', '.join(map(str, given))}; labels belong to y")
    output = model(**given, **options)
    if getattr(output, "logits", None) is None:
        raise PlanError(
            f"model: {type(model).__name__} gives no logits; possible are models with a head, such as those of "
            "AutoModelForCausalLM"
        )
    return output.logits


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of masked language models, and of T5: the mean cross-entropy of logits (rows, tokens, vocabulary) and
    labels (rows, tokens) at the same places, over all labels except -100."""
    return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED)


def next_token_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of causal language models, as transformers computes it: the cross-entropy of logits (rows, tokens,
    vocabulary) and the labels one place later (labels = input_ids; -100 does not count). Returns (sum, count)."""
    wanted = labels[:, 1:]
    total = nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, -2), wanted.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return total, (wanted != IGNORED).sum()
