"""Data of torch's kind: a Dataset, a DataLoader, any iterable of batches. Ranks and the reference see the same rows."""

from __future__ import annotations

import sys
from functools import partial
from itertools import chain

import cloudpickle
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

import minipar
from minipar.data import Batches, Rows, loading
from minipar.errors import PlanError

# Ranks cannot import this file by name; its functions travel as those of a notebook do.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

X = torch.arange(60.0, dtype=torch.float64).view(10, 6).sin()
Y = X.roll(1, 1)


class Dicts(Dataset):
    """Rows as Hugging Face gives them, of any length; `read` says which were read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 10

    def __getitem__(self, k: int):
        self.read.append(k)
        return {"input_ids": X[k], "attention_mask": torch.ones(6), "labels": Y[k]}


class FromDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return self.linear(x["input_ids"] * x["attention_mask"])


class Stream(IterableDataset):
    """Draws its rows as it goes."""

    def __iter__(self):
        for _ in range(7):
            x = torch.randn(6, dtype=torch.float64)
            yield x, x.flip(0)


def layers(first=partial(nn.Linear, 6, 6)) -> nn.Sequential:
    return nn.Sequential(first(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))


def train(clusters, data, plan="pp=2 microbatches=2", model=layers, **options):
    return minipar.train(
        model, data, plan, cluster=clusters(minipar.Plan.parse(plan).ranks), loss=nn.functional.mse_loss,
        dtype=torch.float64, check=True, progress=False, **({"steps": 5, "batch": 4} | options),
    )  # fmt: skip


def rows_of(data, steps, size=4):
    with loading.read_ahead(data, steps, 0, 0, size) as (found, _):
        return [found.batch(step, size) for step in range(steps)]


def test_a_dataset_is_read_by_rows(clusters):
    run = train(clusters, TensorDataset(X, Y), "dp=2 pp=2 zero=1")
    assert run.max_error() < 1e-12
    assert len(run.losses) == 5


def test_every_row_once_an_epoch_in_an_order_of_the_seed():
    def order(data, steps=3):
        return [x[:, 0].tolist() for x, _ in rows_of(data, steps)]

    found = order(TensorDataset(X, Y))
    assert [len(rows) for rows in found] == [4, 4, 2]
    assert sorted(chain(*found)) == sorted(X[:, 0].tolist())
    assert found == order(TensorDataset(X, Y))
    assert found != order(Rows(TensorDataset(X, Y), seed=1))
    assert list(chain(*order(Rows(TensorDataset(X, Y), shuffle=False)))) == X[:, 0].tolist()


def test_a_rank_reads_its_own_rows():
    data = Dicts()
    x, y = Rows(data, shuffle=False).batch(1, 4, rows=range(1, 3))
    assert data.read == [5, 6]
    assert torch.equal(x["input_ids"], X[5:7])
    assert torch.equal(y, Y[5:7])


def padded(rows):
    longest = max(2 + int(row[0][0] > 0) for row in rows)
    x, y = default_collate(rows)
    return x[:, :longest], y[:, :longest]


def test_a_collate_of_ones_own_makes_the_batch_as_a_whole():
    data = Rows(TensorDataset(X, Y), shuffle=False, collate=padded)
    whole = data.batch(0, 4)
    part = data.batch(0, 4, rows=range(1, 2))
    assert part[0].shape[1] == whole[0].shape[1]
    assert torch.equal(part[0], whole[0][1:2])


def test_dict_batches_give_their_labels_to_the_loss(clusters):
    run = train(clusters, Dicts(), model=partial(layers, FromDict))
    assert run.max_error() < 1e-12
    run = train(clusters, DataLoader(Dicts(), batch_size=4), model=partial(layers, FromDict))
    assert run.max_error() < 1e-12


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_shuffles_is_read_once_for_all(clusters, workers):
    """Its last batch is smaller, and then it begins again, in another order."""
    loader = DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True, num_workers=workers)
    run = train(clusters, loader, "dp=2 pp=2 microbatches=2", steps=7, batch=99)
    assert run.max_error() < 1e-12
    found = rows_of(loader, 6)
    assert [len(x) for x, _ in found] == [4, 4, 2, 4, 4, 2]
    epochs = [torch.cat([x[:, 0] for x, _ in found[k : k + 3]]).tolist() for k in (0, 3)]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(X[:, 0].tolist())


def test_the_same_seed_gives_the_same_batches_and_leaves_the_generator_alone(clusters):
    loader = DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True)
    state = torch.random.get_rng_state()
    first, second = train(clusters, loader), train(clusters, loader)
    assert first.losses == second.losses
    assert torch.equal(state, torch.random.get_rng_state())
    assert train(clusters, loader, seed=1).losses != first.losses


def test_a_resumed_run_goes_on_with_batches_of_its_own(clusters, tmp_path):
    loader = DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True)
    run = train(clusters, loader, steps=3, save=tmp_path / "run")
    more = train(clusters, loader, steps=3, resume=tmp_path / "run")
    assert more.first_step == 3
    assert more.max_error() < 1e-12
    assert more.losses != run.losses


def test_generators_and_iterable_datasets(clusters):
    run = train(clusters, ((X[k : k + 3], Y[k : k + 3]) for k in range(5)))
    assert run.max_error() < 1e-12
    run = train(clusters, DataLoader(Stream(), batch_size=3), "dp=2")
    assert run.max_error() < 1e-12


def test_refusals(clusters):
    few = ((X, Y) for _ in range(2))
    with pytest.raises(PlanError, match="ended after 2 batches, but there are 5 steps: step 2 has none"):
        train(clusters, few)
    with pytest.raises(PlanError, match="ended after 0 batches"):
        train(clusters, [])
    with pytest.raises(PlanError, match="a dict of image, class, which does not say what is x and what is y"):
        train(clusters, [{"image": X, "class": Y}])
    with pytest.raises(PlanError, match="a tuple of 1"):
        train(clusters, [(X,)])
    with pytest.raises(Exception, match="x has 10 rows, but y has 4"):
        train(clusters, [(X, Y[:4])])
    with pytest.raises(PlanError, match="data=int: must have"):
        train(clusters, 3)
    with pytest.raises(PlanError, match="has no __len__"):
        Rows(Stream())
    run = train(clusters, Batches([{"image": X, "class": Y}], pair=lambda b: (b["image"], b["class"])), steps=2)
    assert run.max_error() < 1e-12
