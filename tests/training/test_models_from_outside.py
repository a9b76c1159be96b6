"""Models of Hugging Face and papers train as in plain torch.

Those of Hugging Face are skipped without the extra `models`. Each model has two plans here;
`python -m tests.outside`, a part of `make thorough`, runs all models under all plans.
"""

from __future__ import annotations

import importlib.util
import warnings
from functools import partial

import pytest
import torch
from torch import nn

import minipar
from minipar import models
from tests import outside

pytestmark = pytest.mark.many(6)

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="pip install minipar[models]"
)


@pytest.mark.many(5)
@needs_transformers
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral", "bert", "t5"])
def test_language_models(clusters, name):
    for plan in outside.some_plans(name):
        outside.check_language(clusters(4), name, plan)


@pytest.mark.parametrize("name", [pytest.param("resnet-group", marks=needs_transformers), "vit", "unet", "amoebanet"])
def test_models_of_pictures(clusters, name):
    for plan in outside.some_plans(name):
        outside.check_pictures(clusters(4), name, plan)


@needs_transformers
def test_batch_norm_of_whole_batches(clusters):
    """Where no batch is split, statistics are those of one device."""
    outside.check_pictures(clusters(4), "resnet-batch", "pp=4 microbatches=1")


def weight_normed():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # (torch has a newer one)
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 8)), nn.Tanh(), nn.Linear(8, 10))


@pytest.mark.parametrize("plan", ["pp=2 schedule=zb-h1 microbatches=2", "sync=ps dp=2"])
def test_old_weight_norm(clusters, plan):
    """Its weight is made anew in each forward, and torch does not copy it."""
    x, y = torch.randn(12, 3, dtype=torch.float64), torch.arange(12) % 10
    cluster = clusters(minipar.Plan.parse(plan).ranks)
    outside._check(outside.train(cluster, weight_normed, (x, y), plan, dtype=torch.float64, check=True), 1e-12)


@needs_transformers
def test_half_precision(clusters):
    model, data = partial(outside.language, "gpt2"), outside.texts("gpt2")
    plan = outside.PLANS[0]
    narrow = outside.train(clusters(4), model, data, f"{plan} precision=bf16", loss=models.token_loss)
    whole = outside.train(clusters(4), model, data, plan, loss=models.token_loss)
    assert narrow.losses == pytest.approx(whole.losses, rel=0.02)


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
