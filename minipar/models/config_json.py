"""A Hugging Face model by its `config.json`, as plain numbers: `minipar estimate ... --model path/config.json`.

    from_config("llama/config.json")        a Transformer: sizes that the formulas know
    from_config("llama")                    the same for its folder

Names of the numbers differ between families. Each has a list here, of which the first one that is there counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minipar.errors import PlanError

NAMES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "head_dim": ("head_dim",),
    "value_dim": ("v_head_dim",),
    "latent": ("kv_lora_rank",),
    "query_latent": ("q_lora_rank",),
    "rope": ("qk_rope_head_dim",),
    "sequence": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
    "vocabulary": ("vocab_size",),
    "experts": ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts"),
    "top": ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "top_k"),
    "window": ("sliding_window",),
    "dense": ("first_k_dense_replace",),
}
LEARNED = ("gpt2", "opt", "gpt_neo", "bert", "gpt_bigcode")  # families with positions as parameters
PLAIN = (*LEARNED, "gpt_neox", "gptj", "mpt", "bloom", "falcon", "phi", "starcoder2")  # with two matrices and biases


def from_config(path: str | Path) -> dict[str, Any]:
    """The numbers of `models.sizes.Transformer`, from a file or its folder.

    Errors: PlanError for a file that cannot be read, and for one that lacks a number.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        config = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise PlanError(f"{path}: cannot be read as a model's config.json: {error}") from None
    config = {**config, **config.get("text_config", {})} if isinstance(config, dict) else {}
    config |= {key: value for key, value in config.get("ffn_config", {}).items() if key.startswith("moe_")}
    found = {key: value for key, names in NAMES.items() if (value := _first(config, names))}
    missing = [key for key in ("layers", "hidden", "heads", "sequence", "vocabulary") if key not in found]
    if missing:
        raise PlanError(f"{path}: has no {' or '.join(NAMES[missing[0]])}; possible is a decoder of tokens")
    family = str(config.get("model_type", ""))
    gated, hidden = family not in PLAIN, found["hidden"]
    inner = _first(config, ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")) or 4 * hidden
    if found.get("latent"):
        found["head_dim"] = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
        found.pop("kv_heads", None)
    if found.get("experts"):
        found["ffn"] = _first(config, ("moe_intermediate_size",)) or inner
        found["shared"] = _shared(config, found["ffn"])
        if found.get("dense"):
            found["dense_ffn"] = inner
    else:
        found = {key: value for key, value in found.items() if key not in ("experts", "top", "dense")} | {"ffn": inner}
    if found.get("window") and "full_attention" not in config.get("layer_types", ()):
        found["windowed"] = float(config.get("use_sliding_window", True))
    bias = bool(config.get("attention_bias", config.get("use_bias", not gated and family not in ("mpt", "falcon"))))
    tied = bool(config.get("tie_word_embeddings", family in PLAIN))
    return {
        **found, "gated": gated, "rms": gated, "bias": bias, "learned": family in LEARNED, "tied": tied,
        "dropout": False, "name": family or file.parent.name,
    }  # fmt: skip


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((config[name] for name in names if config.get(name)), None)


def _shared(config: Mapping[str, Any], inner: int) -> int:
    """Numbers between the matrices of the expert of all tokens."""
    return int(config.get("shared_expert_intermediate_size") or (config.get("n_shared_experts") or 0) * inner)
