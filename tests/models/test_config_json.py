"""Hugging Face models by their config.json: parameters are those that their authors publish."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from minipar.errors import PlanError
from minipar.models.config_json import GATED, PLAIN
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


@pytest.mark.many(9)
@pytest.mark.filterwarnings("ignore:.*config.json. its")
@pytest.mark.parametrize("family", sorted({*GATED, *PLAIN}))
def test_known_families_have_the_parameters_of_transformers(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install minipar[models]")
    own = {"head_dim": 128} if family == "glm4_moe" else {}  # (that of its default does not divide)
    config = transformers.AutoConfig.for_model(family, **own)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    word = " sequence=2048" if family == "bloom" else ""  # (which has no longest one)
    found = sizes(f"{tmp_path}/config.json{word}")
    assert found.parameters == pytest.approx(sum(p.numel() for p in model.parameters()), rel=0.02)


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"model_type": "new"}, "new is no family whose parameters were compared"),
     ({"text_config": {"num_hidden_layers": 3}}, "its text_config alone is estimated"),
     ({"layer_types": ["full_attention", "linear_attention"]}, "layers of linear attention are estimated as full")],
)  # fmt: skip
def test_what_may_be_built_otherwise_is_said(changed: dict[str, object], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changed}))
    with pytest.warns(UserWarning, match=message):
        sizes(tmp_path / "config.json")


def test_layers_without_attention_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**LLAMA, "model_type": "jamba", "mamba_d_state": 16}))
    with pytest.raises(PlanError, match="a jamba has layers of another kind than attention \\(mamba_d_state\\)"):
        sizes(file)
    file.write_text(json.dumps({key: value for key, value in LLAMA.items() if key != "max_position_embeddings"}))
    with pytest.raises(PlanError, match=re.escape(f"a number in words, such as '{file} sequence=1024'")):
        sizes(file)
    assert sizes(f"{file} sequence=1024").sequence == 1024


def test_presets_have_the_published_sizes() -> None:
    for name, billions in (
        ("qwen3-235b-a22b", 235.1),
        ("gpt-oss-120b", 116.8),
        ("mpt-7b", 6.65),
        ("mixtral-8x7b", 46.7),
    ):
        assert MODELS[name].parameters / 1e9 == pytest.approx(billions, rel=0.005), name
