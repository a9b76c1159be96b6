"""A Hugging Face model by its `config.json`, as plain numbers: `minipar estimate ... --model path/config.json`.

    from_config("llama/config.json")        a Transformer: sizes that the formulas know
    from_config("llama")                    the same for its folder

Names of the numbers differ between families. Each has a list here, of which the first one that is there counts.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from minipar.errors import PlanError

NAMES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
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
LEARNED = (  # families with positions as parameters
    "bert", "bert-generation", "big_bird", "biogpt", "camembert", "data2vec-text", "ernie", "gpt2", "gpt_bigcode",
    "gpt_neo", "megatron-bert", "openai-gpt", "opt", "roberta", "xlm-roberta", "xlm-roberta-xl",
)  # fmt: skip
PLAIN = (  # families with two matrices in a block's perceptron, and biases
    *LEARNED, "apertus", "arcee", "bloom", "codegen", "falcon", "fuyu", "gpt_neox", "gpt_neox_japanese", "gptj",
    "jais2", "mpt", "nanochat", "persimmon", "phi", "roformer", "starcoder2", "xglm",
)  # fmt: skip
GATED = (  # families with three, and no biases; those of both kinds have the parameters of transformers within 2 %
    "afmoe", "bitnet", "cohere", "cohere2", "cohere2_moe", "cwm", "deepseek_v2", "deepseek_v3", "deepseek_v32",
    "diffllama", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo", "gemma", "gemma2", "gemma3_text",
    "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_oss", "granite", "granitemoe",
    "granitemoeshared", "helium", "hyperclovax", "internlm3", "llama", "mimo_v2_flash", "minicpm3", "minimax",
    "minimax_m2", "ministral3", "mistral", "mixtral", "olmo", "olmo2", "olmo3", "olmoe", "phi3", "phimoe", "qwen2",
    "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "seed_oss", "smollm3", "solar_open", "stablelm", "vaultgemma",
    "youtu",
)  # fmt: skip
NO_BIAS = ("mpt", "falcon", "nanochat", "apertus", "arcee")  # of PLAIN
STATES = ("mamba", "ssm", "lru_width", "conv_L_cache", "state_size", "num_blocks")  # in names of what is no attention


def from_config(path: str | Path, given: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """The numbers of `models.sizes.Transformer`, from a file or its folder, but for those that are given. Warns of a
    family that may be built otherwise.

    Errors: PlanError for a file that cannot be read, for one that lacks a number, and for layers without attention.
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
    family = str(config.get("model_type", ""))
    others = [key for key in config for name in STATES if name in key]
    if others or family == "rwkv":
        raise PlanError(
            f"{path}: a {family} has layers of another kind than attention ({', '.join(others[:1] or [family])}), for "
            "which there are no formulas; possible is a decoder whose layers are attention and a perceptron"
        )
    found |= given
    missing = [key for key in ("layers", "hidden", "heads", "sequence", "vocabulary") if key not in found]
    if missing:
        raise PlanError(
            f"{path}: has no {' or '.join(NAMES[missing[0]])}; possible is a decoder of tokens, and a number in words, "
            f"such as '{path} {missing[0]}=1024'"
        )
    _warn(path, family, config)
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        found["kv_heads"] = 1
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
    bias = bool(config.get("attention_bias", config.get("use_bias", not gated and family not in NO_BIAS)))
    tied = bool(config.get("tie_word_embeddings", family in PLAIN))
    return {
        **found, "gated": gated, "rms": gated, "bias": bias, "learned": family in LEARNED, "tied": tied,
        "dropout": False, "name": family or file.parent.name, **given,
    }  # fmt: skip


def _warn(path: str | Path, family: str, config: Mapping[str, Any]) -> None:
    """Say what may be otherwise than the formulas have it."""
    if family not in (*GATED, *PLAIN):
        warnings.warn(
            f"{path}: {family or 'a model without model_type'} is no family whose parameters were compared; it is "
            "estimated as a decoder of gated blocks, as Llama's are", stacklevel=4,
        )  # fmt: skip
    elif "text_config" in config:
        warnings.warn(f"{path}: its text_config alone is estimated, without what reads pictures or sound", stacklevel=4)
    elif "linear_attention" in (config.get("layer_types") or ()):
        warnings.warn(f"{path}: its layers of linear attention are estimated as full attention", stacklevel=4)


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((config[name] for name in names if config.get(name)), None)


def _shared(config: Mapping[str, Any], inner: int) -> int:
    """Numbers between the matrices of the expert of all tokens."""
    return int(config.get("shared_expert_intermediate_size") or (config.get("n_shared_experts") or 0) * inner)
