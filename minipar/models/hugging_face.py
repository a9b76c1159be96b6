"""`from_transformers`: cuts models of Hugging Face's transformers into layers by their own modules.

    embedding | block | block | ... | norm and head

The hidden state crosses each cut, and so do attention_mask and position_ids if they are given. Each block makes causal
masks and rotary tables again from these, which costs less than sending them. Keys and values are not cached.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from minipar.errors import PlanError
from minipar.models.cutting import Holder, Layered, check

DECODERS = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe")
IGNORED = -100  # the label of a token that the loss leaves out


def from_transformers(model: nn.Module, example: Any = None) -> nn.Sequential:
    """A model of Hugging Face's transformers cut into layers that `train` takes.

    model     for causal language modelling GPT-2, or of Llama's kind (Llama, Mistral, Qwen2, Qwen3, Mixtral, Qwen-MoE);
              BertForMaskedLM; T5ForConditionalGeneration
    example   an input to compare the layers with the model on; default: 2 rows of 8 tokens. False: no comparison

    The layers take token numbers (rows, tokens), or a dict of input_ids and, optionally, attention_mask, position_ids
    (decoders), token_type_ids (BERT), decoder_input_ids and decoder_attention_mask (T5). They give logits (rows,
    tokens, vocabulary). Labels belong to y, and the loss is `next_token_loss` or `token_loss`. Parameters and modules
    are the model's own and keep their names. Errors: PlanError for a model of another kind, with what to do.
    """
    config: Any = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    name = type(model).__name__
    if kind == "gpt2" and hasattr(model, "lm_head") and hasattr(model, "transformer"):
        layers = _gpt2(model)
    elif kind in DECODERS and hasattr(model, "lm_head"):
        layers = _decoder(model)
    elif kind == "bert" and name == "BertForMaskedLM":
        layers = _bert(model)
    elif kind == "t5" and hasattr(model, "lm_head"):
        layers = _t5(model)
    else:
        raise PlanError(
            f"model: {name} cannot be cut here; possible are GPT2LMHeadModel, causal language models of the kinds "
            f"{', '.join(DECODERS)}, BertForMaskedLM and T5ForConditionalGeneration; models.from_torch(model, example) "
            "cuts what torch.fx can trace, and any model can be written as an nn.Sequential of its modules"
        )
    if getattr(config, "output_router_logits", False):
        raise PlanError(
            "model: output_router_logits=True adds a loss of all layers, which a pipeline does not have in one place; "
            "set model.config.output_router_logits = False"
        )
    layered = Layered(layers, model)
    if example is False:
        return layered
    if example is None:
        ids = torch.arange(16).view(2, 8) % config.vocab_size
        ids = ids.to(next(model.parameters()).device)
        example = {"input_ids": ids, "decoder_input_ids": ids[:, :5]} if kind == "t5" else ids
    return check(model, layered, example, _logits, "by its own modules")


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


def _logits(model: nn.Module, example: Any) -> Any:
    given = dict(example) if isinstance(example, Mapping) else {"input_ids": example}
    if type(model).__name__ != "BertForMaskedLM":
        given["use_cache"] = False
    return model(**given).logits


def _inputs(x: Any, *possible: str) -> dict[str, Any]:
    """The inputs of the first layer, by name; None for an input that was not given. Errors: PlanError for other
    names."""
    given = dict(x) if isinstance(x, Mapping) else {"input_ids": x}
    unknown = given.keys() - {"input_ids", *possible}
    if unknown or "input_ids" not in given:
        hint = "; labels belong to y" if "labels" in unknown else ""
        raise PlanError(
            f"x has {', '.join(sorted(map(str, given)))}; possible are input_ids and {', '.join(possible)}{hint}"
        )
    return {name: given.get(name) for name in ("input_ids", *possible)}


def _hidden(output: Any) -> Tensor:
    """The hidden state in a block's output (in older versions of transformers the output is a tuple)."""
    found = output[0] if isinstance(output, (tuple, list)) else output
    assert isinstance(found, Tensor)
    return found


def _places(hidden: Tensor, given: Tensor | None) -> Tensor:
    """Position numbers (rows or 1, tokens)."""
    return torch.arange(hidden.shape[1], device=hidden.device)[None] if given is None else given


# decoders -------------------------------------------------------------------------------------------------------------


class _Embedding(Holder):
    """From token numbers to the input of blocks: hidden, attention_mask, position_ids."""

    def __init__(self, held: dict[str, nn.Module], tokens: str, positions: str = "", dropout: str = "") -> None:
        super().__init__(held)
        self.tokens, self.positions, self.dropout = tokens, positions, dropout

    def forward(self, x: Any) -> dict[str, Any]:
        given = _inputs(x, "attention_mask", "position_ids")
        hidden = self.get_submodule(self.tokens)(given.pop("input_ids"))
        if self.positions:
            hidden = hidden + self.get_submodule(self.positions)(_places(hidden, given["position_ids"]))
            hidden = self.get_submodule(self.dropout)(hidden)
        return {"hidden": hidden, **given}


class _Block(Holder):
    """A block of a decoder. It makes its causal mask and its rotary table itself."""

    def __init__(self, held: dict[str, nn.Module], path: str, config: Any, sliding: bool, rotary: str = "") -> None:
        super().__init__(held)
        self.path, self.config, self.sliding, self.rotary = path, config, sliding, rotary

    def forward(self, given: dict[str, Any]) -> dict[str, Any]:
        from transformers import masking_utils

        hidden = given["hidden"]
        places = _places(hidden, given["position_ids"])
        make = masking_utils.create_sliding_window_causal_mask if self.sliding else masking_utils.create_causal_mask
        options: dict[str, Any] = {"position_ids": places, "past_key_values": None, "use_cache": False}
        options["attention_mask"] = make(
            config=self.config, inputs_embeds=hidden, attention_mask=given["attention_mask"], past_key_values=None,
            position_ids=places,
        )  # fmt: skip
        if self.rotary:
            options["position_embeddings"] = self.get_submodule(self.rotary)(hidden, position_ids=places)
        return {**given, "hidden": _hidden(self.get_submodule(self.path)(hidden, **options))}


class _Head(Holder):
    """From hidden states to logits, through a chain of modules."""

    def __init__(self, held: dict[str, nn.Module], scale: float = 1.0) -> None:
        super().__init__(held)
        self.paths, self.scale = tuple(held), scale

    def forward(self, given: dict[str, Any]) -> Tensor:
        hidden = given["hidden"]
        for path in self.paths[:-1]:
            hidden = self.get_submodule(path)(hidden)
        logits = self.get_submodule(self.paths[-1])(hidden if self.scale == 1 else hidden * self.scale)
        assert isinstance(logits, Tensor)
        return logits


def _held(model: nn.Module, *paths: str) -> dict[str, nn.Module]:
    return {path: model.get_submodule(path) for path in paths}


def _gpt2(model: Any) -> dict[str, nn.Module]:
    if model.config.add_cross_attention:
        raise PlanError("model: add_cross_attention=True is not possible; a decoder of its own has none")
    base = "transformer."
    embedding = base + "wte", base + "wpe", base + "drop"
    layers: dict[str, nn.Module] = {"embedding": _Embedding(_held(model, *embedding), *embedding)}
    for k in range(len(model.transformer.h)):
        path = f"{base}h.{k}"
        layers[f"block_{k}"] = _Block(_held(model, path), path, model.config, False)
    layers["head"] = _Head(_held(model, base + "ln_f", "lm_head"))
    return layers


def _decoder(model: Any) -> dict[str, nn.Module]:
    config, base = model.config, "model."
    layers: dict[str, nn.Module] = {"embedding": _Embedding(_held(model, base + "embed_tokens"), base + "embed_tokens")}
    kinds = getattr(config, "layer_types", None)
    for k in range(config.num_hidden_layers):
        path = f"{base}layers.{k}"
        if config.model_type in ("mistral", "mixtral"):
            sliding = config.sliding_window is not None
        else:
            sliding = kinds is not None and kinds[k] == "sliding_attention"
        held = _held(model, path, base + "rotary_emb")
        layers[f"block_{k}"] = _Block(held, path, config, sliding, base + "rotary_emb")
    layers["head"] = _Head(_held(model, base + "norm", "lm_head"))
    return layers


# BERT -----------------------------------------------------------------------------------------------------------------


class _BertEmbedding(Holder):
    def forward(self, x: Any) -> dict[str, Any]:
        given = _inputs(x, "attention_mask", "position_ids", "token_type_ids")
        mask = given.pop("attention_mask")
        return {"hidden": self.get_submodule("bert.embeddings")(**given), "attention_mask": mask}


class _BertBlock(Holder):
    def __init__(self, held: dict[str, nn.Module], path: str, config: Any) -> None:
        super().__init__(held)
        self.path, self.config = path, config

    def forward(self, given: dict[str, Any]) -> dict[str, Any]:
        mask = _both_ways(self.config, given["hidden"], given["attention_mask"])
        return {**given, "hidden": _hidden(self.get_submodule(self.path)(given["hidden"], attention_mask=mask))}


def _both_ways(config: Any, hidden: Tensor, mask: Tensor | None, encoded: Tensor | None = None) -> Any:
    """The mask of attention to all tokens, or to the tokens in `encoded`."""
    from transformers import masking_utils

    across: dict[str, Any] = {} if encoded is None else {"encoder_hidden_states": encoded}
    return masking_utils.create_bidirectional_mask(config=config, inputs_embeds=hidden, attention_mask=mask, **across)


def _bert(model: Any) -> dict[str, nn.Module]:
    if model.config.is_decoder:
        raise PlanError("model: BERT with is_decoder=True is not possible; set model.config.is_decoder = False")
    layers: dict[str, nn.Module] = {"embedding": _BertEmbedding(_held(model, "bert.embeddings"))}
    for k in range(len(model.bert.encoder.layer)):
        path = f"bert.encoder.layer.{k}"
        layers[f"block_{k}"] = _BertBlock(_held(model, path), path, model.config)
    layers["head"] = _Head(_held(model, "cls"))
    return layers


# T5 -------------------------------------------------------------------------------------------------------------------


class _T5Begin(Holder):
    """The embedding of the encoder's tokens."""

    def forward(self, x: Any) -> dict[str, Any]:
        given = _inputs(x, "attention_mask", "decoder_input_ids", "decoder_attention_mask")
        if given["decoder_input_ids"] is None:
            raise PlanError(
                "x has no decoder_input_ids; model.prepare_decoder_input_ids_from_labels(labels) makes them of labels"
            )
        hidden = self.get_submodule("encoder.embed_tokens")(given.pop("input_ids"))
        return {"hidden": self.get_submodule("encoder.dropout")(hidden), "bias": None, **given}


class _T5Block(Holder):
    """A block of the encoder or the decoder. The first one makes the position bias, and all others get it."""

    def __init__(self, held: dict[str, nn.Module], path: str, config: Any) -> None:
        super().__init__(held)
        self.path, self.config = path, config

    def forward(self, given: dict[str, Any]) -> dict[str, Any]:
        from transformers import masking_utils

        block, hidden = self.get_submodule(self.path), given["hidden"]
        if not self.config.is_decoder:
            mask = _both_ways(self.config, hidden, given["attention_mask"])
            hidden, bias, _ = block(hidden, mask, given["bias"])
            return {**given, "hidden": hidden, "bias": bias}
        mask = masking_utils.create_causal_mask(
            config=self.config, inputs_embeds=hidden, attention_mask=given["decoder_attention_mask"],
            past_key_values=None,
        )  # fmt: skip
        encoded = given["encoded"]
        across = _both_ways(self.config, hidden, given["attention_mask"], encoded)
        hidden, bias, over = block(hidden, mask, given["bias"], encoded, across, given["bias_across"])
        return {**given, "hidden": hidden, "bias": bias, "bias_across": over}


class _T5Turn(Holder):
    """The end of the encoder, and the embedding of the decoder's tokens."""

    def forward(self, given: dict[str, Any]) -> dict[str, Any]:
        encoded = self.get_submodule("encoder.final_layer_norm")(given["hidden"])
        encoded = self.get_submodule("encoder.dropout")(encoded)
        hidden = self.get_submodule("decoder.embed_tokens")(given["decoder_input_ids"])
        return {
            "hidden": self.get_submodule("decoder.dropout")(hidden),
            "encoded": encoded,
            "attention_mask": given["attention_mask"],
            "decoder_attention_mask": given["decoder_attention_mask"],
            "bias": None,
            "bias_across": None,
        }


def _t5(model: Any) -> dict[str, nn.Module]:
    layers: dict[str, nn.Module] = {"embedding": _T5Begin(_held(model, "encoder.embed_tokens", "encoder.dropout"))}
    for part in ("encoder", "decoder"):
        stack = model.get_submodule(part)
        if part == "decoder":
            between = "encoder.final_layer_norm", "encoder.dropout", "decoder.embed_tokens", "decoder.dropout"
            layers["turn"] = _T5Turn(_held(model, *between))
        for k in range(len(stack.block)):
            path = f"{part}.block.{k}"
            layers[f"{part}_{k}"] = _T5Block(_held(model, path), path, stack.config)
    scale = model.model_dim**-0.5 if getattr(model.config, "scale_decoder_outputs", False) else 1.0
    layers["head"] = _Head(_held(model, "decoder.final_layer_norm", "decoder.dropout", "lm_head"), scale)
    return layers
