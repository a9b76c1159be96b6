"""Models as other people write them train as plain torch does: some of `tests/outside.py` under some of its plans.

`python -m tests.outside`, a part of `make thorough`, runs all models under all plans.
"""

from __future__ import annotations

import importlib.util
import warnings

import pytest
import torch
from torch import nn

import minipar
from minipar import models
from tests import outside

# Where a model's parts go together with a plan in another way than in those that were tried before.
SOME = {
    "densenet": "tp=2", "vision_transformer": "tp=2", "swin_transformer": "pp=2 microbatches=2",
    "annotated": "pp=2 microbatches=2", "deq": "dp=2 zero=2", "dlrm": "checkpoint=sqrt", "vae": "dp=2 zero=3",
    "unet": "dp=2 zero=3", "gat": "pp=2 microbatches=2", "neural_ode": "pp=2 microbatches=2", "lora": "tp=2",
    "bert (transformers)": "pp=2 microbatches=2", "lstm_tagger": "tp=2", "message_passing": "tp=2", "siamese": "tp=2",
    "compiled_blocks": "pp=2 microbatches=2", "realnvp": "accumulate=2", "gemma (transformers)": "dp=2",
    "vqvae": "accumulate=2", "swin (transformers)": "dp=2 zero=3", "rwkv (transformers)": "tp=2", "seq2seq": "tp=2",
    "meta_llama": "dp=2",
}  # fmt: skip
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="pip install minipar[models]"
)


@pytest.mark.many(3)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[needs_transformers] * ("(" in n)) for n in SOME])
def test_equals_plain_torch(clusters, name):
    found = outside.tried(clusters, name, SOME[name])
    assert found.word == "equal", found


def test_the_page_has_todays_models():
    """Its table is that of the list as it is now; `python -m tests.outside` writes it anew."""
    table = outside.PAGE.read_text().partition(outside.BEGIN)[2].partition(outside.END)[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")]
    assert rows[0] == ["model", "cut", *outside.PLANS]
    refused = {row[0].removesuffix(f" ({outside.ENTRIES[name].family})") for row in rows[3:]
               for name in outside.ENTRIES if row[0].startswith(f"{name} (")}  # fmt: skip
    groups = " ".join(table.partition("Under all of these plans: ")[2].split()).rstrip(".").split("; ")
    equal = {
        (family, name) for family, _, names in (group.partition(": ") for group in groups) for name in names.split(", ")
    }
    told = equal | {(outside.ENTRIES[name].family, name) for name in refused}
    assert told == {(one.family, name.removesuffix(" (transformers)")) for name, one in outside.ENTRIES.items()}
    asked = dict(zip(rows[2][2:], outside.PLANS.values(), strict=True))
    assert all(int(share.rstrip("%")) >= 100 * least for share, least in asked.items())


@pytest.mark.parametrize("plan", ["checkpoint=sqrt", "tp=2"])
@pytest.mark.filterwarnings("ignore:.*computed whole")
def test_a_model_that_draws_between_its_modules_is_said_to(clusters, plan):
    data, cluster = outside.ENTRIES["vae"].data(), clusters(minipar.Plan.parse(plan).ranks)
    options = {"loss": outside.elbo, "cluster": cluster, "progress": False, "steps": 2}
    assert "draws other numbers in layers than in its own forward" in str(
        minipar.train(outside.VAE, data, plan, **options).checked
    )


@pytest.mark.parametrize("compiled", ["script", "load", "an element"])
def test_what_torch_jit_has_compiled(clusters, compiled, tmp_path):
    """The module itself, not a function that makes it: it is sent to the ranks, and to plain torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # (torch has a newer compiler)
        model = torch.jit.script(nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 10)))
        if compiled == "load":
            torch.jit.save(model, tmp_path / "model.pt")
            model = torch.jit.load(tmp_path / "model.pt")
    if compiled == "an element":
        model = nn.Sequential(nn.Linear(3, 3), model)
    x, y = torch.randn(12, 3), torch.arange(12) % 10
    options = {"dtype": torch.float64, "check": True, "progress": False, "steps": 2}
    run = minipar.train(model, (x, y), "zero=3", cluster=clusters(1), **options)
    assert run.max_error() < 1e-12
    assert run.cut.startswith("one layer, since torch.jit has compiled") == (compiled != "an element")


def weight_normed():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # (torch has a newer one)
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 8)), nn.Tanh(), nn.Linear(8, 10))


@pytest.mark.parametrize("plan", ["pp=2 schedule=zb-h1 microbatches=2", "sync=ps dp=2"])
def test_old_weight_norm(clusters, plan):
    """Its weight is made anew in each forward, and torch does not copy it."""
    x, y = torch.randn(12, 3, dtype=torch.float64), torch.arange(12) % 10
    cluster = clusters(minipar.Plan.parse(plan).ranks)
    options = {"cluster": cluster, "dtype": torch.float64, "check": True, "progress": False, "steps": 4}
    assert minipar.train(weight_normed, (x, y), plan, **options).max_error() < 1e-12


def gpt2():
    return outside.made("gpt2 (transformers)")


@needs_transformers
def test_half_precision(clusters):
    options = {"loss": outside.cross_entropy, "cluster": clusters(2), "progress": False, "steps": 4}
    plan = "pp=2 schedule=1f1b microbatches=4"
    words = outside.next_words()
    narrow = minipar.train(gpt2, words, f"{plan} precision=bf16", **options)
    whole = minipar.train(gpt2, words, plan, **options)
    assert narrow.losses == pytest.approx(whole.losses, rel=0.02)


@needs_transformers
@pytest.mark.parametrize("plan", ["dp=2 zero=2", "tp=2"])
@pytest.mark.filterwarnings("ignore:.*computed whole")
def test_a_model_that_is_stored_in_half_precision(clusters, plan):
    options = {"loss": outside.cross_entropy, "cluster": clusters(2), "progress": False, "steps": 2, "check": True}
    run = minipar.train(lambda: gpt2().bfloat16(), outside.next_words(), f"{plan} precision=bf16", **options)
    assert run.max_error() < 0.02


def adapted():
    import peft

    settings = {"r": 2, "target_modules": ["c_attn"], "init_lora_weights": False, "fan_in_fan_out": True}
    return peft.get_peft_model(gpt2(), peft.LoraConfig(**settings))


@needs_transformers
@pytest.mark.parametrize("plan", ["dp=2 zero=3", "pp=2 microbatches=2"])
def test_adapters_of_peft(clusters, plan):
    options = {"loss": outside.cross_entropy, "cluster": clusters(2), "progress": False, "steps": 2, "check": True}
    run = minipar.train(adapted, outside.next_words(), plan, dtype=torch.float64, batch=outside.ROWS, **options)
    assert run.max_error() < 1e-10


@needs_transformers
@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_losses_are_those_of_transformers(kind):
    x, y = outside.next_words()
    model = (gpt2() if kind == "gpt2" else outside.hugging_face("bert", "MaskedLM", **outside._SIZES)).eval()
    layers = models.from_transformers(model, x)
    wanted = model(**x, labels=y).loss.item()
    assert layers.state_dict().keys() == model.state_dict().keys()
    found = models.token_loss(layers(x), y)
    if kind == "gpt2":
        total, count = models.next_token_loss(layers(x), y)
        found = total / count
    assert found.item() == pytest.approx(wanted, rel=1e-6)


@needs_transformers
def test_refusals():
    model = gpt2()
    with pytest.raises(minipar.PlanError, match="labels belong to y"):
        models.from_transformers(model, outside.next_words()[0])(outside.next_words()[0] | {"labels": 0})
    model.config.output_router_logits = True
    with pytest.raises(minipar.PlanError, match="output_router_logits=True adds a loss of all layers"):
        models.from_transformers(model)
