"""Epochs: every row exactly once for any number of ranks; any step can be read alone; all orders are equally likely."""

import pickle
import tracemalloc
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minipar import data
from minipar.data.order import Order, permuted
from minipar.data.sharing import part_of, replica_of, rows_of
from minipar.errors import PlanError

MESHES = [{"dp": 1}, {"dp": 3}, {"dp": 2, "pp": 2}, {"dp": 2, "pp": 1, "tp": 2}, {"pp": 2, "dp": 2}]


@given(st.integers(1, 600), st.text(max_size=5))
def test_a_permutation_is_one(count, key):
    found = permuted(np.arange(count), count, key)
    assert sorted(found.tolist()) == list(range(count))
    some = np.arange(count)[:: max(1, count // 7)]
    assert permuted(some, count, key).tolist() == found[some].tolist(), "each place on its own"


def test_permutations_are_evenly_likely():
    """Of 4 rows all 24 orders, and of 101 rows every row in every place, about as often as chance has it."""
    orders = Counter(tuple(permuted(np.arange(4), 4, f"{k}").tolist()) for k in range(4800))
    assert len(orders) == 24
    assert sum((n - 200) ** 2 / 200 for n in orders.values()) < 60  # chi-squared with 23 degrees: 60 is 1 in 30,000
    where = np.zeros((101, 101))
    for k in range(2020):
        where[np.arange(101), permuted(np.arange(101), 101, f"{k}")] += 1
    chi = ((where - 20) ** 2 / 20).sum()
    assert abs(chi - 100 * 100) < 6 * np.sqrt(2 * 100 * 100)


def test_neighbours_are_torn_apart():
    found = permuted(np.arange(10_000), 10_000, "key")
    assert abs(np.corrcoef(found, np.arange(10_000))[0, 1]) < 0.05
    assert abs(np.corrcoef(found[1:], found[:-1])[0, 1]) < 0.05
    assert Counter(np.diff(found).tolist()).most_common(1)[0][1] < 10


def test_orders_of_any_length_take_no_memory():
    order = Order(10**15, seed=3)
    tracemalloc.start()
    found = order.rows(12_345_678, 1000)
    assert tracemalloc.get_traced_memory()[1] < 10**6
    tracemalloc.stop()
    assert len(set(found.tolist())) == 1000
    assert 0 <= found.min() < 10**14 < 9 * 10**14 < found.max() < 10**15


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 4), st.sampled_from(MESHES), st.integers(0, 3), st.data())
def test_an_epoch_has_every_row_once(count, batch, microbatches, mesh, epoch, draw):
    """Over all replicas and micro-batches, and uneven sizes; the ranks of a replica see the same rows."""
    batch = min(batch, count)
    last = draw.draw(st.sampled_from(["smaller", "dropped"]))
    order = Order(count, seed=5, last=last)
    ranks = int(np.prod(list(mesh.values())))
    seen: dict[int, list[int]] = {}
    steps = order.steps(batch)
    for step in range(epoch * steps, (epoch + 1) * steps):
        length = order.place(step, batch)[2]
        by_rank = []
        for rank in range(ranks):
            parts = rows_of(rank, mesh, length, microbatches)
            assert len(parts) == microbatches
            by_rank.append([row for part in parts for row in order.rows(step, batch, part).tolist()])
            assert part_of(rank, mesh, length, microbatches) == range(parts[0].start, parts[-1].stop)
        lengths = [len(part) for rank in range(ranks) for part in rows_of(rank, mesh, length, microbatches)]
        assert max(lengths) - min(lengths) <= 1
        for rank, rows in enumerate(by_rank):
            replica, replicas = replica_of(rank, mesh)
            assert replicas == mesh.get("dp", 1)
            assert rows == next(r for other, r in enumerate(by_rank) if replica_of(other, mesh)[0] == replica)
            seen.setdefault(rank, []).extend(rows)
    one_of_each = {replica_of(rank, mesh)[0]: rows for rank, rows in seen.items()}
    found = sorted(row for rows in one_of_each.values() for row in rows)
    assert len(found) == len(set(found)), "no row twice"
    assert len(found) == (count if last == "smaller" else count - count % batch)
    assert set(found) <= set(range(count))


def test_epochs_differ_and_are_functions_of_seed_and_epoch():
    order = Order(50, seed=1)
    epochs = [tuple(row for step in range(5) for row in order.rows(5 * e + step, 10)) for e in range(3)]
    assert len(set(epochs)) == 3
    assert Order(50, seed=1).rows(7, 10).tolist() == order.rows(7, 10).tolist()
    assert Order(50, seed=2).rows(7, 10).tolist() != order.rows(7, 10).tolist()
    assert Order(50, shuffle=False).rows(6, 10).tolist() == list(range(10, 20))
    dropped = [
        set(range(53)) - {r for s in range(5) for r in Order(53, last="dropped").rows(5 * e + s, 10)} for e in (0, 1)
    ]
    assert len(dropped[0]) == len(dropped[1]) == 3
    assert dropped[0] != dropped[1], "the rows that wait are others in each epoch"


def test_epochs_of_a_source():
    source = data.Digits()
    rows = data.Epochs(source, seed=4, split="validation")
    assert rows.steps(32) == 6
    assert [rows.length(step, 32) for step in (0, 4, 5, 6)] == [32, 32, 19, 32]
    found = torch.cat([rows.batch(step, 32)[0] for step in range(6)])
    whole = source.examples(np.arange(source.places("validation")), "validation")[0]
    assert sorted(map(tuple, found.tolist())) == sorted(map(tuple, whole.tolist()))
    x, y = rows.batch(7, 32)
    part = rows.batch(7, 32, rows=range(5, 9))
    assert torch.equal(part[0], x[5:9])
    assert torch.equal(part[1], y[5:9])
    assert torch.equal(rows.batch(5, 32, rows=slice(10, None))[0], rows.batch(5, 32)[0][10:])
    again = pickle.loads(pickle.dumps(rows))
    assert again == rows
    assert torch.equal(again.batch(7, 32)[0], x)
    assert len(pickle.dumps(rows)) < 600


def test_a_stream_goes_on_at_any_step():
    rows = data.Epochs(data.Digits(), seed=4, split="validation")
    mesh = {"dp": 2, "pp": 2}

    def taken(rank, start, count):
        stream = data.stream(rows, 50, rank, mesh, step=start)
        return [next(stream) for _ in range(count)]

    whole = taken(2, 0, 9)
    assert [step for step, _ in whole] == list(range(9))
    for (step, (x, y)), (other, (a, b)) in zip(whole[5:], taken(2, 5, 4), strict=True):
        assert step == other
        assert torch.equal(x, a)
        assert torch.equal(y, b)
    assert torch.equal(taken(3, 4, 1)[0][1][0], whole[4][1][0]), "both ranks of a pipeline"
    other = taken(0, 3, 1)[0][1][0]
    assert torch.equal(torch.cat([other, whole[3][1][0]]), rows.batch(3, 50)[0])
    assert [len(x) for _, (x, _) in taken(2, 0, 4)] == [25, 25, 25, 14]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Order(0), "count=0"),
        (lambda: Order(5, last="padded"), "'padded'.*smaller or dropped"),
        (lambda: Order(5).steps(6), "batch=6: must be from 1 to 5"),
        (lambda: Order(5).rows(-1, 2), "step=-1"),
        (lambda: Order(5).rows(2, 2, range(2)), "step 2 has rows 0 to 0"),
        (lambda: data.Epochs(data.Digits(), split="test"), "'test'"),
        (lambda: data.Epochs(data.Digits(), last="x"), "last='x'"),
        (lambda: data.Epochs(data.Digits()).batch(0, 2000), "batch=2000.*1618"),
        (lambda: replica_of(4, {"dp": 2, "pp": 2}), "rank=4: must be from 0 to 3"),
        (lambda: next(data.stream(data.Digits(), 8, rank=2, mesh={"dp": 2})), "rank=2"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(PlanError, match=message):
        call()
