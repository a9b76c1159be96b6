"""The mixture of experts: routing by hand, against a loop over tokens, and its loss in parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu

from minipar import models
from minipar.errors import PlanError
from minipar.models.mixture_gpt import (
    Experts,
    MixtureLayer,
    combine,
    combine_all,
    count,
    dispatch,
    dispatch_all,
    route,
    total,
)
from minipar.models.table import room_of
from minipar.trace.charts import expert_load

SMALL: dict[str, Any] = {"layers": 2, "width": 16, "heads": 2, "context": 12, "vocab": 32, "experts": 4}


def test_routing_by_hand() -> None:
    # One row of four tokens, three experts, of which each token chooses two. An expert has places for two tokens.
    scores = torch.tensor([[[2.0, 1.0, 0.0], [3.0, 0.0, 1.0], [5.0, 4.0, 0.0], [0.0, 1.0, 9.0]]])
    weights, slots, balance = route(scores, 2, 2)
    # Expert 0 is full after tokens 0 and 1, so token 2 is dropped; expert 1 is full when token 3 comes.
    assert slots.tolist() == [[[0, 2], [1, 4], [-1, 3], [5, -1]]]
    assert torch.allclose(weights[0, 0], torch.tensor([1.0, 0.0]).exp() / (1 + torch.e))
    shares = torch.tensor([3.0, 3.0, 2.0]) / 8
    assert torch.allclose(balance, 3 * (shares * scores[0].softmax(-1).mean(0)).sum())

    x = torch.arange(1.0, 5.0).view(1, 4, 1)
    sent = dispatch(x, slots, 3, 2)
    assert sent.squeeze(-1).tolist() == [[1, 2], [1, 3], [2, 4]]
    got = combine(10 * sent, weights, slots).flatten()
    assert torch.allclose(got, 10 * x.flatten() * torch.tensor([1.0, 1.0, weights[0, 2, 1], weights[0, 3, 0]]))


def test_balance_is_1_if_all_are_equally_busy_and_experts_if_one_has_all() -> None:
    even = 100 * torch.eye(4).view(1, 4, 4)
    assert route(even, 1, 4)[2].item() == pytest.approx(1.0)
    one = torch.tensor([100.0, 0.0, 0.0, 0.0]).expand(1, 4, 4)
    assert route(one, 1, 4)[2].item() == pytest.approx(4.0)


def looped(layer: MixtureLayer, x: Tensor) -> Tensor:
    """The same as the mixture, token by token."""
    rows, tokens, _ = x.shape
    room = room_of(layer.capacity, tokens, layer.top, layer.experts.count)
    made = torch.zeros_like(x)
    for b in range(rows):
        taken = [0] * layer.experts.count
        for t in range(tokens):
            best, chosen = (x[b, t] @ layer.gate.weight.T).topk(layer.top)
            for weight, e in zip(best.softmax(-1), chosen.tolist(), strict=True):
                taken[e] += 1
                if taken[e] <= room:
                    own = gelu(x[b, t] @ layer.experts.up[e]) @ layer.experts.down[e]
                    made[b, t] = made[b, t] + weight * own
    return made


@pytest.mark.parametrize(("top", "capacity"), [(1, 1.0), (2, 0.5), (2, 1.25), (3, 10.0), (1, None), (2, None)])
def test_equal_to_a_loop_over_tokens(top: int, capacity: float | None) -> None:
    torch.manual_seed(0)
    layer = MixtureLayer(8, 4, top, capacity).double()
    for parameter in (layer.experts.up, layer.experts.down):
        nn.init.normal_(parameter)
    x = torch.randn(3, 9, 8, dtype=torch.float64, requires_grad=True)
    made, wanted = layer(x)[0], looped(layer, x)
    assert torch.allclose(made, wanted, rtol=1e-12, atol=1e-12)
    seed = torch.randn_like(made)
    given = [x, *layer.parameters()]
    for got, want in zip(torch.autograd.grad(made, given, seed), torch.autograd.grad(wanted, given, seed), strict=True):
        assert torch.allclose(got, want, rtol=1e-10, atol=1e-10)


def test_slices_are_routed_by_themselves() -> None:
    model = models.mixture(**SMALL, capacity=None, balance=False).double()
    x = torch.randint(32, (3, 12))
    logits, aux = model(x)
    assert aux.eq(0).all()
    made, carries = [], [None] * len(model)
    for tokens in (range(5), range(5, 6), range(6, 12)):
        value = x[:, tokens.start : tokens.stop]
        for k, layer in enumerate(model):
            value, carries[k] = layer(value, tokens.start, carries[k])
        made.append(value[0])
    assert torch.allclose(logits, torch.cat(made, 2), rtol=1e-12, atol=1e-12)


def test_the_loss_of_a_batch_is_the_weighted_mean_of_its_parts() -> None:
    torch.manual_seed(0)
    output = torch.randn(5, 7, 6, dtype=torch.float64), torch.rand(5, dtype=torch.float64)
    y = torch.randint(7, (5, 6))
    whole = models.mixture_loss(output, y, 0.5)
    assert torch.allclose(whole, cross_entropy(output[0], y) + 0.5 * output[1].mean())
    y[0, 2:], y[3, 1:] = -100, -100
    whole = models.mixture_loss(output, y, 0.5)
    counts, losses = [], []
    for part in (slice(0, 2), slice(2, 3), slice(3, 5)):
        counts.append(int((y[part] != -100).sum()))
        losses.append(models.mixture_loss((output[0][part], output[1][part]), y[part], 0.5))
    together = sum(n * loss for n, loss in zip(counts, losses, strict=True)) / sum(counts)
    assert torch.allclose(whole, together)


def test_load_counts_choices_and_dropped_tokens() -> None:
    model = models.mixture(**SMALL, top=2, capacity=1.0)
    with torch.no_grad():
        model[1].mixture.gate.weight.zero_()  # all scores are equal: every token chooses the same two experts
    load = models.mixture_load(model, torch.randint(32, (3, 12)))
    assert load.layers == (1, 2)
    assert load.room == 3 * 6
    assert sorted(load.tokens[0]) == [0, 0, 36, 36]
    assert sorted(load.dropped[0]) == [0, 0, 18, 18]
    assert sum(load.tokens[1]) == 72
    text = str(load)
    assert "takes up to 18" in text
    assert "36 (-18)" in text
    assert "50.0% dropped" in text
    figure: Any = expert_load(load)
    assert figure.alt == text
    dropped = figure.axes[0].containers[1]
    assert [bar.get_height() for bar in dropped] == list(load.dropped[0])
    assert {bar.get_linewidth() for bar in dropped} == {0}  # where nothing was dropped, an edge would be a line
    assert figure._repr_mimebundle_()[0]["text/plain"] == text


def test_operators_without_a_capacity_by_hand() -> None:
    # Two rows of two tokens, two experts: all of the first row go to expert 1, of the second one to each.
    slots = torch.tensor([[[2], [3]], [[2], [0]]])
    counts = count(slots, 2)
    assert counts.tolist() == [[0, 2], [1, 1]]
    x = torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]])
    sent = dispatch_all(counts, x, slots)
    assert sent.flatten().tolist() == [4, 1, 2, 3]
    got = combine_all(counts, 10 * sent, torch.ones(2, 2, 1), slots)
    assert torch.equal(got, 10 * x)


def test_loads_of_parts_are_added() -> None:
    model, x = models.mixture(**SMALL), torch.randint(32, (4, 12))
    parts = [models.mixture_load(model, part) for part in x.split([1, 3])]
    assert total(parts) == models.mixture_load(model, x)


def test_an_unused_expert_gets_no_gradient() -> None:
    experts = Experts(3, 4)
    nn.init.normal_(experts.up)
    nn.init.normal_(experts.down)
    slots = torch.tensor([[[0], [3], [-1]]])  # of three experts with two places each: one token for 0, one for 1
    made = combine(experts(dispatch(torch.randn(1, 3, 4), slots, 3, 2)), torch.ones(1, 3, 1), slots)
    made.sum().backward()
    assert made[0, 2].eq(0).all()
    assert experts.up.grad is not None
    assert [bool(gradient.abs().sum() > 0) for gradient in experts.up.grad] == [True, True, False]


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"experts": 0}, "experts=0: must be a whole number of at least 1"),
        ({"top": 5, "experts": 4}, "top=5: must be a whole number of at least 1 and at most experts=4"),
        ({"capacity": 0.0}, r"capacity=0.0: must be a number above 0, or None, with which nothing is dropped"),
        ({"capacity": "none"}, r"capacity='none': must be a number above 0"),
        ({"heads": 3}, "heads=3: must divide width"),
        ({"balance": 0.01}, "balance=0.01: must be True or False; its weight is that of `mixture_loss`"),
    ],
)
def test_sizes_that_make_no_model(numbers: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        models.build("gpt-moe-tiny", **numbers)


def test_no_load_without_experts() -> None:
    with pytest.raises(PlanError, match="mixture_load: the model has no experts"):
        models.mixture_load(models.build("gpt-tiny"), torch.zeros(1, 2, dtype=torch.int64))
