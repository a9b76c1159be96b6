"""Losses that are not a plain mean over rows: computed correctly, or refused with advice."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from torch import nn

from minipar import Plan, PlanError, train
from minipar.models.losses import check_loss, counted, try_loss, try_tokens, weighted
from tests.toys import rows, toy

pytestmark = pytest.mark.many(6)

F = nn.functional
MODEL = partial(toy, ("linear", "dropout"))


def masked_rows() -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Targets of classes and a mask; one micro-batch's rows are all left out."""
    x, y = rows(16, classes=True)
    mask = torch.arange(16) % 3 == 0
    mask[8:12] = False
    return x, (y, mask)


def pair_loss(output, y):
    each = F.cross_entropy(output, y[0], reduction="none")
    return (each * y[1]).sum(), y[1].sum()


def masked_loss(output, y):
    total, count = pair_loss(output, y)
    return total / count


def padded(output, y):
    return F.cross_entropy(output, y, ignore_index=0)


def contrastive(output, y):
    return F.cross_entropy(output @ output.T, torch.arange(len(output)))


def balanced(output, y):
    """Two tasks, the second as large as the first: its value is twice the first mean, and its gradient is no mean."""
    one, two = F.mse_loss(output, y), output.square().mean()
    return one + two * (one / two).detach()


def summed(output, y):
    return F.mse_loss(output, y, reduction="sum")


def run(clusters, data, loss, text, **more):
    plan = Plan.parse(text)
    return train(MODEL, data, plan, cluster=clusters(plan.ranks), steps=2, loss=loss, dtype=torch.float64, check=True,
                 optimizer=partial(torch.optim.SGD, lr=0.3), progress=False, **more)  # fmt: skip


PLANS = ["microbatches=4", "pp=2 microbatches=3", "dp=2 microbatches=2 zero=1", "dp=2 local_steps=1", "dp=2 sync=ps",
         "pp=2 schedule=pipedream microbatches=4"]  # fmt: skip


@pytest.mark.parametrize("text", PLANS)
@pytest.mark.parametrize("loss", [pair_loss, weighted(masked_loss, count=lambda y: y[1].sum())], ids=["pair", "count"])
def test_a_masked_loss(clusters, loss, text):
    found = run(clusters, masked_rows(), loss, text)
    assert found.max_error() <= 1e-12
    assert found.losses == pytest.approx(found.reference.losses, rel=1e-12)


REFUSED = [
    (masked_loss, masked_rows(), "weighted by target elements, give"),
    (padded, rows(16, classes=True), "weighted by target elements, give"),
    (contrastive, rows(16), "weighted by rows, give"),
    (summed, rows(16), "it seems to be a sum, and no mean"),
    (balanced, rows(16), "its gradient times output is .* weighted by rows, give"),
]


@pytest.mark.parametrize(("loss", "data", "why"), REFUSED, ids=["masked", "padded", "contrastive", "sum", "balanced"])
def test_a_loss_that_cannot_be_split_is_refused(clusters, loss, data, why):
    with pytest.raises(PlanError, match=why) as caught:
        run(clusters, data, loss, "microbatches=4")
    assert "losses.weighted(loss, count=lambda y: ...)" in str(caught.value)
    assert run(clusters, data, loss, "pp=2").max_error() <= 1e-12  # the whole batch is one part


def depends(output, y):
    chosen = output[:, 0] > output[:, 0].mean()
    return (output[:, 0] * chosen).sum(), output.abs().sum()


def test_a_count_that_depends_on_the_output_is_refused(clusters):
    with pytest.raises(PlanError, match="with a count that depends on the output"):
        run(clusters, rows(16), depends, "microbatches=2")


def noisy(output, y):
    return F.mse_loss(output + torch.rand_like(output), y)


def test_random_losses_are_warned_of(clusters):
    with pytest.warns(UserWarning, match="gives another number for the same rows each time"):
        run(clusters, rows(16), noisy, "microbatches=2")


def test_what_a_loss_weighs():
    y = torch.tensor([0, 1, 1, -100])
    assert counted(y, F.cross_entropy) == 3
    assert counted(y, nn.CrossEntropyLoss(weight=torch.tensor([0.5, 2.0]))) == 4.5
    assert counted(y, weighted(F.cross_entropy, count=len)) == 4
    assert counted(torch.zeros(5, 2), F.mse_loss) == 5
    assert counted((y, y > 0), weighted(F.cross_entropy, count=lambda y: y[1].sum())) == 2


def test_ordinary_losses_are_let_through():
    x = torch.randn(8, 6)
    y = torch.randint(6, (11,))
    for loss in (F.cross_entropy, nn.CrossEntropyLoss(label_smoothing=0.1), partial(F.cross_entropy, ignore_index=2)):
        assert try_loss(loss, x, y, 4) == (None, "")
    for loss in (F.mse_loss, F.l1_loss, nn.HuberLoss()):
        assert try_loss(loss, x, torch.randn(11, 6), 3) == (None, "")
    assert try_loss(nn.BCELoss(), x.sigmoid(), torch.rand(11, 6), 5) == (None, "")
    for narrow in (torch.Tensor.float, lambda t: t.bfloat16().float()):  # (as language models compute theirs)
        long, wanted = torch.randn(64, 50), torch.randint(50, (64,))
        assert try_loss(lambda output, y, to=narrow: F.cross_entropy(to(output), y), long, wanted, 4) == (None, "")
    trained = nn.Linear(2, 2)
    with pytest.raises(PlanError, match="reaches loss.weight, .* part of the last layer"):
        check_loss(trained)


def by_place(output, y):
    return nn.functional.cross_entropy(output, y)


def by_next(output, y):
    return nn.functional.cross_entropy(output[:, :, :-1], y[:, 1:])


def by_next_counted(output, y):
    return nn.functional.cross_entropy(output[:, :, :-1], y[:, 1:], reduction="sum"), y[:, 1:].numel()


def by_rows(output, y):
    return (output.mean((1, 2)) - y.float().mean(1)).abs().mean()


@pytest.mark.parametrize("loss", [by_next, by_next_counted, by_rows])
@pytest.mark.parametrize("sizes", [(3, 3), (1, 4, 1)])
def test_a_loss_that_looks_at_other_tokens_than_its_own_is_refused(loss, sizes):
    """Where each rank, or each slice, has some tokens of every sequence, it would silently be another loss."""
    torch.manual_seed(0)
    output, y = torch.randn(4, 5, 6), torch.randint(5, (4, 6))
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    parts = [range(a, a + n) for a, n in zip(starts, sizes, strict=True)]
    with pytest.raises(PlanError, match=r"loss: (of sequences of 6 tokens it is|cannot be computed of) .*next tokens"):
        try_tokens(loss, output, output[:, :, : sizes[0]], y, parts)
    try_tokens(by_place, output, output[:, :, : sizes[0]], y, parts)
    try_tokens(loss, output, output, y, parts)  # (an output that has nothing for each token is not cut)


def test_ignored_targets_and_what_has_no_tokens():
    y = torch.randint(5, (4, 6))
    y[:, 4:] = -100
    output = torch.randn(4, 6, 5), torch.rand(4)  # with a number for each row

    def loss(given, y):
        return nn.functional.cross_entropy(given[0].transpose(1, 2), y) + given[1].mean()

    parts = [range(3), range(3, 6)]
    try_tokens(loss, output, (output[0][:, :3], output[1]), y, parts)


def test_a_loss_of_the_next_tokens_is_refused_where_ranks_have_parts_of_sequences(clusters):
    from minipar import models

    model = partial(models.gpt, layers=1, width=8, heads=2, context=6, vocab=11)
    ids = torch.randint(11, (8, 6))
    for plan, parts in (
        ("context_parallel=2", "3 + 3"),
        ("pp=2 schedule=terapipe slices=2", "3 + 3"),
        ("context_parallel=2 schedule=terapipe slices=4,2", "2 + 2 + 1 + 1"),  # of each slice each rank has a part
    ):
        with pytest.raises(PlanError, match=f"of sequences of 6 tokens it is .* parts of {re.escape(parts)} tokens"):
            train(model, (ids, ids), plan, cluster=clusters(2), loss=by_next, batch=8, progress=False)


def test_an_output_may_hold_what_has_no_rows():
    """A parameter that is handed on, say: parts of a batch share it."""
    output, y = (torch.randn(8, 6), torch.randn(1, 6)), torch.randn(11, 6)

    def scaled(given, y):
        return F.mse_loss(given[0] * given[1], y)

    assert try_loss(scaled, output, y, 3) == (None, "")
    with pytest.raises(PlanError, match="seems to be a sum"):
        try_loss(lambda given, y: summed(given[0] * given[1], y), output, y, 3)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_an_error_in_a_trial_that_does_not_come_again_is_told(number):
    """The run would not meet it again: the first and second call, and that in float64."""
    calls = []

    def loss(output, y):
        calls.append(1)
        if len(calls) == number:
            raise ValueError("only once")
        return F.mse_loss(output, y)

    with pytest.raises(ValueError, match="only once"):
        try_loss(loss, torch.randn(8, 3), torch.randn(8, 3), 4)


WRONG = {
    "vector": (lambda o, y: F.cross_entropy(o, y, reduction="none"), r"Tensor of shape \(8,\)"),
    "one element": (lambda o, y: F.cross_entropy(o, y)[None], r"Tensor of shape \(1,\)"),
    "complex": (lambda o, y: F.cross_entropy(o, y) * 1j, r"Tensor of shape \(\), torch.complex64"),
    "number": (lambda o, y: F.cross_entropy(o, y).item(), "float"),
    "nothing": (lambda o, y: None, "NoneType"),
    "dict": (lambda o, y: {"loss": F.cross_entropy(o, y)}, "dict"),
    "list": (lambda o, y: [F.cross_entropy(o, y)], "list"),
    "triple": (lambda o, y: (F.cross_entropy(o, y), 1, 2), "tuple"),
    "array": (lambda o, y: F.cross_entropy(o, y).detach().numpy(), "ndarray"),
    "sums": (lambda o, y: (F.cross_entropy(o, y, reduction="none"), 8), r"Tensor of shape \(8,\)"),
}


@pytest.mark.many(2)
@pytest.mark.parametrize("plan", ["", "dp=2", "pp=2 microbatches=2"])
@pytest.mark.parametrize("kind", WRONG)
def test_what_is_no_scalar_is_refused_before_the_run(clusters, kind, plan):
    loss, says = WRONG[kind]
    data = torch.randn(8, 6), torch.randint(0, 3, (8,))
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    with pytest.raises(PlanError, match=f"^loss: gave a {says}.*; it must be a scalar tensor, the mean over the rows"):
        train(model, data, plan, cluster=clusters(Plan.parse(plan).ranks), loss=loss, progress=False)
