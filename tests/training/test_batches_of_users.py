"""Batches as people have them: dicts, tuples of several, masks without rows, data sets of rows, and models that make
their loss themselves. Beside each run: a loop in plain torch."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import minipar
from minipar import PlanError, RankError, data
from minipar.data.loading import Pairing, stacked, takes_of
from minipar.models.losses import Own, weighted
from minipar.models.own_loss import Elements, find_count
from minipar.models.tracing import in_layers
from tests.plain_loop import assert_equals_plain_torch

cloudpickle.register_pickle_by_value(sys.modules[__name__])

WORDS, WIDTH, TOKENS = 14, 8, 5
F = nn.functional
SGD = partial(torch.optim.SGD, lr=0.3, momentum=0.5)
PLANS = ["dp=2", "pp=2 microbatches=3", "dp=2 zero=3 accumulate=2"]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def words(rows: int = 12, seed: int = 0) -> Tensor:
    return torch.randint(WORDS, (rows, TOKENS), generator=torch.Generator().manual_seed(seed))


class Towers(nn.Module):
    """A recommender: three inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item, self.dense = nn.Embedding(9, WIDTH), nn.Embedding(7, WIDTH), nn.Linear(4, WIDTH)

    def forward(self, user: Tensor, item: Tensor, dense: Tensor) -> Tensor:
        return (self.user(user) * self.item(item) * self.dense(dense)).sum(1)


CLICKS = {"user": torch.arange(12) % 9, "item": torch.arange(12) % 7, "dense": drawn(12, 4), "rating": drawn(12)}
INPUTS = {key: CLICKS[key] for key in ("user", "item", "dense")}


class Clicks(Dataset):
    """Rows as a data set of Hugging Face gives them: lists, and a text."""

    column_names = ("user", "item", "dense", "rating", "text")

    def batch(self, batch_size: int) -> None:
        raise AssertionError("this is something else than a data set of minipar has")

    def __len__(self) -> int:
        return 12

    def __getitem__(self, k: int) -> dict[str, Any]:
        return {key: t[k].tolist() for key, t in CLICKS.items()} | {"text": "a click"}


class Stream(IterableDataset):
    def __iter__(self):
        for k in range(12):
            yield {key: t[k] for key, t in CLICKS.items()}


class Masked(nn.Module):
    """A mask of tokens and tokens, and the numbers of the places, have no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, mask: Tensor, places: Tensor) -> Tensor:
        x = self.embed(ids) + self.places(places)
        for block in self.blocks:
            x = block(x, src_mask=mask)
        return self.head(x).transpose(1, 2)


MASK = torch.full((TOKENS, TOKENS), float("-inf"), dtype=torch.float64).triu(1)


class Sentences(Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, k: int) -> Tensor:
        return words()[k, : 2 + k % 4]


def padded(rows: list[Tensor]) -> tuple[Any, Tensor]:
    """Rows of unequal lengths, with one mask for all of them."""
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    count = ids.shape[1]
    return {"ids": ids, "mask": MASK[:count, :count], "places": torch.arange(count)}, ids.roll(1, 1)


def by_name(model: nn.Module, x: dict[str, Tensor]) -> Any:
    return model(**x)


AS_TUPLE = ((words(), MASK, torch.arange(TOKENS)), words(seed=1))
SMALLER = [padded([Sentences()[k] for k in range(a, a + 6)]) for a in (0, 6, 0)]
BY_NAME = INPUTS, CLICKS["rating"]
FORMS: dict[str, tuple[Any, Any, Any, Any, Any]] = {
    "dict": (Towers, [CLICKS], F.mse_loss, BY_NAME, by_name),
    "rows": (Towers, data.Rows(Clicks(), shuffle=False), F.mse_loss, BY_NAME, by_name),
    "stream": (Towers, Stream(), F.mse_loss, BY_NAME, by_name),
    "several": (
        Towers,
        DataLoader(TensorDataset(*CLICKS.values()), 12),
        F.mse_loss,
        (INPUTS, CLICKS["rating"]),
        by_name,
    ),
    "mask": (Masked, AS_TUPLE, F.cross_entropy, AS_TUPLE, lambda model, x: model(*x)),
    "collate": (Masked, DataLoader(Sentences(), 6, collate_fn=padded), F.cross_entropy, SMALLER, by_name),
}


@pytest.mark.many(3)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("form", FORMS)
def test_batches_as_people_have_them(clusters, form, plan):
    make, given, loss, pairs, call = FORMS[form]
    batch = 99 if isinstance(given, DataLoader) else 12  # (a loader knows it)
    assert_equals_plain_torch(clusters, plan, make, given, loss, SGD, call=call, pairs=pairs, batch=batch)


# the model's own loss -------------------------------------------------------------------------------------------------


class GPT(nn.Module):
    """As nanoGPT: (logits, loss), -1 is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(WORDS, WIDTH), nn.Dropout(0.0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        assert idx.shape[1] <= TOKENS
        x = self.drop(self.embed(idx))
        for block in self.blocks:
            x = x + block(x)
        logits = self.head(x)
        return logits, None if targets is None else F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=-1
        )


class NextToken(GPT):
    """As transformers: `.loss`, of the next tokens, -100 is left out."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:  # type: ignore[override]
        logits, _ = super().forward(input_ids)
        wanted = None if labels is None else labels[:, 1:].flatten()
        return {"logits": logits} if wanted is None else {
            "loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), wanted), "logits": logits
        }  # fmt: skip


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.last(torch.tanh(self.first(x)))[:, 0] - y).square().mean()


def uneven(ignored: int) -> Tensor:
    """Targets; some rows have few, and one part of the batch has none at all."""
    kept = torch.arange(TOKENS) < torch.tensor([5, 1, 4, 0, 0, 0, 2, 5, 3, 1, 5, 5])[:, None]
    return words(seed=1).masked_fill(~kept, ignored)


OWN: dict[str, tuple[Any, Any, Any]] = {
    "gpt": (GPT, (words(), uneven(-1)), lambda model, x: model(*x)[1]),
    "next": (NextToken, {"input_ids": words(), "labels": uneven(-100)}, lambda model, x: model(**x)["loss"]),
    "regression": (Regression, (drawn(12, 6), drawn(12)), lambda model, x: model(*x)),
}


@pytest.mark.many(3)
@pytest.mark.parametrize("plan", [*PLANS, "dp=2 local_steps=2", "tp=2"])
@pytest.mark.parametrize("name", OWN)
def test_a_model_that_makes_its_own_loss(clusters, name, plan):
    make, batch, call = OWN[name]
    if "local" in plan:
        run = minipar.train(make, batch, plan, cluster=clusters(2), steps=4, loss=None, dtype=torch.float64, check=True,
                            progress=False)  # fmt: skip
        assert run.max_error() < 1e-10
        return
    run = assert_equals_plain_torch(
        clusters, plan, make, batch, None, SGD, plain_loss=lambda output, y: output, call=call, pairs=(batch, None),
        batch=12,
    )  # fmt: skip
    if plan == "dp=2":
        found = minipar.evaluate(make, batch, plan, cluster=clusters(2), loss=None, batch=5, dtype=torch.float64)
        assert found.loss == pytest.approx(run.losses[0], rel=1e-9)
        assert found.count == {"gpt": 31, "next": 22, "regression": 12}[name]


def test_what_a_model_s_own_loss_counts():
    def found(make: Any, batch: Any) -> Any:
        return find_count(Own(), in_layers(make().double(), batch), batch, 2)[0]

    assert found(GPT, (words(), words(seed=1))) == Elements("x[1]", -1)
    assert found(NextToken, {"input_ids": words(), "labels": words(seed=1)}) == Elements("x['labels']", -100, 1)
    assert found(Regression, (drawn(6, 6), drawn(6))) == Elements("x[0]")


class Contrast(Regression):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found = self.first(x) @ self.first(y).T
        return F.cross_entropy(found, torch.arange(len(found)))


class Noisy(Regression):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x + torch.randn_like(x), y)


class NoLoss(Regression):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.first(x)


def test_own_losses_that_are_no_mean(clusters):
    train = partial(minipar.train, cluster=clusters(2), steps=1, loss=None, dtype=torch.float64, progress=False)
    pairs = drawn(12, 6), drawn(12, 6, seed=1)
    with pytest.raises(PlanError, match=r"it is a mean neither over rows .*losses.weighted\(None, count="):
        train(Contrast, pairs, "dp=2")
    with pytest.raises(PlanError, match="it is a mean neither over rows"):
        train(GPT, (words(), uneven(-1)), "dp=2", loss=weighted(None, count=lambda batch: len(batch[0])))
    assert train(Contrast, pairs, "pp=2", check=True).max_error() < 1e-12  # (one part)
    with pytest.warns(UserWarning, match="the model draws random numbers for its loss"):
        train(Noisy, (drawn(12, 6), drawn(12)), "dp=2")
    with pytest.raises(PlanError, match="loss=None: the model gives a Tensor, in which there is no loss"):
        train(NoLoss, pairs, "dp=2")
    with pytest.raises(PlanError, match=r"a dict of x is its first argument.*\{\*\*x, 'labels': y\}"):
        train(NoLoss, ({"x": pairs[0]}, pairs[1]), "dp=2")


# what cannot be -------------------------------------------------------------------------------------------------------


def test_what_is_x_and_what_is_y():
    assert takes_of(partial(Towers)) == takes_of(Towers()) == {"user", "item", "dense"}
    assert takes_of(nn.Sequential()) == {"input"}
    assert takes_of(lambda: Towers()) is None
    x, y = Pairing(takes=takes_of(Towers))({**CLICKS, "weight": 1})
    assert list(x) == list(INPUTS)
    assert list(y) == ["rating", "weight"]
    assert Pairing()({"a": 1, "labels": 2}) == ({"a": 1}, 2)
    assert Pairing()((1, 2, 3)) == ((1, 2), 3)


class Nodes(nn.Module):
    """Rows are the nodes of one graph, and see each other by its edges."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, WIDTH), nn.Linear(WIDTH, 2)])

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x = x.index_add(0, edges[1], x[edges[0]])
        return x


def test_a_graph_that_is_one_batch(clusters):
    """It cannot be cut on two rows; its rows are divided between no replicas."""
    batch = (drawn(12, 3), torch.stack([torch.arange(12), torch.arange(12).roll(5)])), torch.arange(12) % 2
    call = lambda model, x: model(*x)  # noqa: E731
    assert_equals_plain_torch(clusters, "pp=2", Nodes, batch, F.cross_entropy, SGD, call=call, batch=12)
    with pytest.raises(RankError, match="index .* is out of bounds for dimension 0 with size 6"):
        minipar.train(Nodes, batch, "dp=2", cluster=clusters(2), progress=False)


def test_wrong_batches_say_what_was_called_with_what(clusters):
    train = partial(minipar.train, cluster=clusters(2), steps=1, progress=False)
    with pytest.raises(PlanError, match=r"Towers.forward\(user.*\) .*cannot be called with x, .*dict of user, w"):
        train(Towers, ({"user": CLICKS["user"], "wide": CLICKS["dense"]}, CLICKS["rating"]), "dp=2")
    with pytest.raises(RankError, match=r"the model on 12 rows, .*: mat1 .*; given x\[0\] \(12, 4\)"):
        train(Regression, ((drawn(12, 4), drawn(12)), drawn(12)), "dp=2")
    with pytest.raises(PlanError, match="a dict of data sets, train, test; give one of them"):
        train(Towers, {"train": Clicks(), "test": Clicks()}, "dp=2")
    with pytest.raises(PlanError, match=r"'ids' has rows of unequal length \(1, 2 ...\), which cannot be stacked"):
        stacked([{"ids": [1]}, {"ids": [1, 2]}])
