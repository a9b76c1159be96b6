"""Ranks read only their own rows; results are those of the whole batch, also when an epoch ends or a run continues."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from minipar import Plan, data, resume, train
from minipar.cluster import worker
from minipar.data.batches import gives_rows
from minipar.data.sharing import part_of
from minipar.errors import PlanError, RankError
from minipar.execution.execution import Job, execute
from minipar.models.parameter_groups import shape_of
from minipar.training.reference import Job as PlainJob
from minipar.training.reference import gradient_error, train_plainly

pytestmark = pytest.mark.many(6)

ROWS = 23


def numbers(rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Row k, as a function of k."""
    k = torch.from_numpy(np.asarray(rows, dtype=np.int64))
    return torch.sin(k[:, None] * torch.arange(1.0, 7.0)), k % 6


@dataclass(frozen=True)
class Rows(data.Source):
    """23 rows of 6 numbers and a class; writes down who reads which, in a folder."""

    folder: str = ""
    known: bool = True
    ignored: bool = False

    @property
    def targets(self) -> range | None:
        return range(6) if self.known else None

    def places(self, split: str) -> int:
        return ROWS

    def examples(self, places: np.ndarray, split: str) -> tuple[torch.Tensor, torch.Tensor]:
        if self.folder and worker.in_rank():
            with open(os.path.join(self.folder, str(worker.context().rank)), "a") as file:
                file.write(" ".join(map(str, places.tolist())) + "\n")
        x, y = numbers(places)
        return x, torch.where(y == 0, -100, y) if self.ignored else y


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.2)) for _ in range(4)))


def job(source, loss=nn.functional.cross_entropy, batch=10) -> Job:
    return Job(model, source, batch, loss, partial(torch.optim.SGD, lr=0.3), seed=1, dtype=torch.float64)


def ran(clusters, text: str, work: Job, passes: int):
    plan = Plan.parse(text)
    program = plan.compile(shape_of(list(work.build())))
    return program, execute(program, work, cluster=clusters(plan.ranks), passes=passes)


def equal_to_plain_torch(done, work: Job, passes: int) -> None:
    plain = train_plainly(PlainJob(work.build(), work.batches, work.loss, work.optimizer, work.seed), passes)
    assert done.losses == pytest.approx(plain.losses, rel=1e-12)
    for found, expected in zip(done.gradients, plain.gradients, strict=True):
        assert gradient_error(found, expected) <= 1e-12


def read(folder: Path, rank: int) -> list[list[int]]:
    path = folder / str(rank)
    return [list(map(int, line.split())) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize(
    "text",
    ["microbatches=3", "dp=2 microbatches=3 zero=2", "pp=2 microbatches=2", "dp=2 pp=2 microbatches=3", "pp=4 dp=1"],
)
def test_each_rank_reads_its_rows_and_results_are_those_of_the_whole_batch(clusters, text, tmp_path):
    """Two epochs of 10 + 10 + 3 rows, so that micro-batches are uneven and some have no rows at all."""
    work = job(data.Epochs(Rows(folder=str(tmp_path)), seed=3))
    program, done = ran(clusters, text, work, 6)
    lines = [read(tmp_path, rank) for rank in range(len(program.ranks))]
    equal_to_plain_torch(done, work, 6)
    order = work.data.order
    by_replica: dict[int, list[int]] = {}
    for rank, found in enumerate(lines):
        held = program.placement[rank]
        parts = [part_of(rank, program.mesh, (10, 10, 3)[step % 3], program.microbatches) for step in range(6)]
        expected = [order.rows(step, 10, part).tolist() for step, part in enumerate(parts) if part]
        assert found == (expected if 0 in held or program.layers - 1 in held else []), rank
        if 0 in held:
            by_replica[program.replica(rank)] = [row for line in expected for row in line]
    assert Counter(row for rows in by_replica.values() for row in rows) == dict.fromkeys(range(ROWS), 2)


def test_the_trace_has_the_sizes_of_its_own_pass(clusters):
    work = job(data.Epochs(Rows()), batch=22)
    _, done = ran(clusters, "pp=2", work, 2)  # of 22 rows and of 1; the second is the one that is traced
    assert done.trace.bytes_sent() == [6 * 8, 6 * 8]
    _, done = ran(clusters, "pp=2", work, 1)
    assert done.trace.bytes_sent() == [22 * 6 * 8, 22 * 6 * 8]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("text", ["dp=2 microbatches=2", "pp=2 dp=2"])
def test_targets_that_do_not_count(clusters, text, known, tmp_path):
    """A rank with the last layer must know how many targets count in all: it reads them, or is told that all do."""
    whole = data.Epochs(Rows(folder=str(tmp_path), known=known, ignored=not known), seed=1)
    work = job(whole)
    program, done = ran(clusters, text, work, 3)
    lines = [read(tmp_path, rank) for rank in range(len(program.ranks))]
    equal_to_plain_torch(done, work, 3)
    for rank, found in enumerate(lines):
        last = program.layers - 1 in program.placement[rank]
        assert any(len(line) == 10 for line in found) == (last and not known)


def test_a_loss_that_leaves_out_a_known_target_reads_them_all(clusters, tmp_path):
    loss = partial(nn.functional.cross_entropy, ignore_index=2)
    work = job(data.Epochs(Rows(folder=str(tmp_path)), seed=1), loss)
    _, done = ran(clusters, "dp=2 microbatches=2", work, 3)
    equal_to_plain_torch(done, work, 3)
    assert any(len(line) == 10 for line in read(tmp_path, 1))


def test_a_data_set_that_hides_targets_is_found_out(clusters):
    with pytest.raises(RankError, match=r"targets -100, which the loss leaves out, but says it has range\(0, 6\)"):
        ran(clusters, "dp=2", job(data.Epochs(Rows(ignored=True))), 3)


class Short(Rows):
    def batch(self, step, size, split="train", rows=None):
        return super().batch(step, size, split, rows=range(max(0, len(rows) - 1)))


class Whole:
    """Has no `rows`: every rank gets all of them, as before."""

    def batch(self, step, size):
        return numbers(np.arange(size) + step)


def test_other_data_sets(clusters):
    assert gives_rows(Rows())
    assert gives_rows(data.Epochs(Rows()))
    assert not gives_rows(Whole())
    assert not gives_rows(numbers(np.arange(4)))
    with pytest.raises(RankError, match="asked for 5 rows of step 0, gave 4 of x and 4 of y"):
        ran(clusters, "dp=2", job(Short()), 1)
    work = job(Whole())
    equal_to_plain_torch(ran(clusters, "dp=2 microbatches=2", work, 2)[1], work, 2)
    work = job(Rows())  # draws with replacement
    equal_to_plain_torch(ran(clusters, "dp=2 microbatches=2", work, 2)[1], work, 2)


def options(cluster):
    return {
        "cluster": cluster,
        "optimizer": partial(torch.optim.Adam, lr=0.01),
        "progress": False,
    }


def test_a_run_goes_on_in_the_middle_of_an_epoch_under_another_plan(clusters, tmp_path):
    rows = data.Epochs(Rows(), seed=2)
    common = {"batch": 6, "seed": 1, "dtype": torch.float64}  # 4 steps an epoch, the last one of 5 rows
    whole = train(model, rows, "microbatches=2", steps=9, **common, **options(clusters(1)))
    first = train(model, rows, "pp=2 microbatches=2", steps=5, **common, **options(clusters(2)))
    first.save(tmp_path)
    log = tmp_path / "log"
    log.mkdir()
    again = data.Epochs(Rows(folder=str(log)), seed=2)
    rest = resume(tmp_path, model, again, "dp=2", steps=4, **options(clusters(2)))
    assert first.losses + rest.losses == pytest.approx(whole.losses, rel=1e-12)
    found = [row for rank in range(2) for line in read(log, rank)[-4:-1] for row in line]
    rest_of_epoch = [row for step in (5, 6, 7) for row in rows.order.rows(step, 6).tolist()]
    assert sorted(found) == sorted(rest_of_epoch), "what the first run had left of its epoch"


def test_batches_larger_than_an_epoch(clusters):
    with pytest.raises(PlanError, match="batch=24: must be from 1 to 23"):
        ran(clusters, "dp=2", job(data.Epochs(Rows()), batch=24), 1)
