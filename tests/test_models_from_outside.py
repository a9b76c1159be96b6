"""Models that nobody here wrote train as plain torch trains them: Hugging Face's, torchvision's, timm's, of papers.

Skipped where the packages of the extra `models` are missing. One plan for each model; all plans are marked slow.
"""

from __future__ import annotations

import importlib.util
from functools import partial

import pytest
import torch

import minipar
from minipar import models
from tests import outside

PLANS = ["dp=2 pp=2 zero=1 microbatches=2 checkpoint=sqrt", "dp=4 zero=3", "pp=2 dp=2 schedule=zb-h1 microbatches=2"]
SHORT = "pp=4 schedule=1f1b microbatches=4"
SGD = partial(torch.optim.SGD, lr=0.1)

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="pip install minipar[models]"
)
needs_timm = pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="pip install minipar[models]")


def train(clusters, model, data, plan, **options):
    return minipar.train(
        model, data, plan, cluster=clusters(4), optimizer=SGD, progress=False, **({"steps": 4} | options)
    )


def check_language(clusters, name, plan):
    # Norms and rotary tables of Llama's kind are computed in float32, whatever the model's type; so are experts.
    dtype = torch.float32 if name in ("mixtral", "qwen_moe") else torch.float64
    run = train(
        clusters, partial(outside.language, name), outside.texts(name), plan, loss=models.token_loss,
        dtype=dtype, check=True,
    )  # fmt: skip
    assert run.max_gradient_error() < (1e-12 if name in ("gpt2", "bert") else 1e-5)
    assert run.losses == pytest.approx(run.reference.losses, rel=1e-6)


def check_pictures(clusters, name, plan):
    run = train(clusters, outside.PICTURES[name], outside.pictures(), plan, dtype=torch.float64, check=True)
    assert run.max_gradient_error() < 1e-11
    assert run.losses == pytest.approx(run.reference.losses, rel=1e-10)


@needs_transformers
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral", "bert", "t5"])
def test_language_models(clusters, name):
    check_language(clusters, name, SHORT)


@needs_timm
@pytest.mark.parametrize("name", ["resnet-group", "vit"])
def test_models_of_pictures(clusters, name):
    check_pictures(clusters, name, SHORT)


@pytest.mark.parametrize("name", ["unet", "amoebanet"])
def test_models_with_skips(clusters, name):
    check_pictures(clusters, name, SHORT)


@needs_timm
def test_batch_norm_of_whole_batches(clusters):
    """Where no batch is split, statistics are those of one device."""
    check_pictures(clusters, "resnet-batch", "pp=4 microbatches=1")


@needs_transformers
def test_half_precision(clusters):
    model, data = partial(outside.language, "gpt2"), outside.texts("gpt2")
    narrow = train(clusters, model, data, f"{SHORT} precision=bf16", loss=models.token_loss)
    whole = train(clusters, model, data, SHORT, loss=models.token_loss)
    assert narrow.losses == pytest.approx(whole.losses, rel=0.02)


@needs_transformers
@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", outside.LANGUAGE)
def test_language_models_under_every_plan(clusters, name, plan):
    check_language(clusters, name, plan)


@needs_timm
@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["resnet-group", "vit", "unet", "amoebanet"])
def test_models_of_pictures_under_every_plan(clusters, name, plan):
    check_pictures(clusters, name, plan)


@needs_transformers
@pytest.mark.parametrize("name", outside.LANGUAGE)
def test_layers_have_the_names_of_the_model_and_do_what_it_does(name):
    model = outside.LANGUAGE[name]()
    layers = models.from_transformers(model, outside.texts(name, 2)[0])
    assert layers.report.error < 1e-6
    assert {n: id(p) for n, p in layers.named_parameters()} == {n: id(p) for n, p in model.named_parameters()}
    assert layers.state_dict().keys() == model.state_dict().keys()


@needs_transformers
def test_losses_are_those_of_transformers():
    x, labels = outside.texts("gpt2")
    model = outside.gpt2().eval()
    wanted = model(**x, labels=labels)
    total, count = models.next_token_loss(wanted.logits, labels)
    assert (total / count).item() == pytest.approx(wanted.loss.item(), rel=1e-6)
    x, labels = outside.texts("bert")
    masked = outside.bert().eval()(**x, labels=labels)
    assert models.token_loss(masked.logits, labels).item() == pytest.approx(masked.loss.item(), rel=1e-6)


@needs_transformers
def test_refusals():
    model = outside.mixtral()
    model.config.output_router_logits = True
    with pytest.raises(minipar.PlanError, match="output_router_logits=True adds a loss of all layers"):
        models.from_transformers(model)
    x, labels = outside.texts("gpt2")
    layers = outside.language("gpt2")
    with pytest.raises(minipar.PlanError, match="labels belong to y"):
        layers(x | {"labels": labels})
