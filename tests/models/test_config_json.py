"""Hugging Face models by their config.json: parameters are those that their authors publish."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minipar.errors import PlanError
from minipar.models.sizes import MODELS, Transformer, sizes

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "vocab_size": 129280, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}


@pytest.mark.parametrize(
    ("config", "billions", "preset"),
    [(LLAMA, 8.03, "llama3-8b"), (QWEN, 30.5, "qwen3-30b-a3b"), (DEEPSEEK, 671.0, "deepseek-v3"),
     (GPT2, 0.1244, "gpt2-small")],
)  # fmt: skip
def test_the_parameters_are_those_that_are_published(
    config: dict[str, object], billions: float, preset: str, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    model = sizes(str(file))
    assert isinstance(model, Transformer)
    assert model.parameters / 1e9 == pytest.approx(billions, rel=0.002)
    known = MODELS[preset]
    assert isinstance(known, Transformer)
    assert (model.parameters, model.flops) == (known.parameters, known.flops)
    changed = sizes(f"{file} sequence=512")
    assert isinstance(changed, Transformer)
    assert changed.sequence == 512


def test_what_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be read as a model's config.json"):
        sizes(str(tmp_path / "none.json"))
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 3}))
    with pytest.raises(PlanError, match="has no num_hidden_layers"):
        sizes(tmp_path / "config.json")


def test_presets_have_the_published_sizes() -> None:
    for name, billions in (
        ("qwen3-235b-a22b", 235.1),
        ("gpt-oss-120b", 116.8),
        ("mpt-7b", 6.65),
        ("mixtral-8x7b", 46.7),
    ):
        assert MODELS[name].parameters / 1e9 == pytest.approx(billions, rel=0.005), name
