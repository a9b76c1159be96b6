"""Runs with parameter servers that are saved and go on: with other servers and workers, with none, and from none."""

from __future__ import annotations

import contextlib
import os
import signal
from functools import partial

import pytest
import torch

from minipar import SaveError, resume, train
from minipar.cluster import worker
from minipar.errors import PlanError
from minipar.execution.saving.folder import INDEX, Header, step_folder, write_fragment
from minipar.execution.saving.keeping import Storing, model_in
from minipar.server.saving import Saving
from minipar.strategies.plan import Plan
from tests.toys import rows, toy

pytestmark = pytest.mark.many(6)

mse = torch.nn.functional.mse_loss
MODEL = partial(toy, ("linear", "tuples", "dropout", "unused"), tied=True, frozen=(1,))
ADAM = partial(torch.optim.Adam, lr=0.01)
OPTIONS = {
    "loss": mse, "dtype": torch.float64, "check": True, "progress": False, "optimizer": ADAM,
    "scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=3, gamma=0.5),
}  # fmt: skip


def go(clusters, words, steps, model=MODEL, **more):
    return train(model, rows(17), words, cluster=clusters(Plan.parse(words).ranks), steps=steps, **(OPTIONS | more))


def go_on(clusters, folder, words, steps, model=MODEL, **more):
    ranks = clusters(Plan.parse(words).ranks)
    return resume(folder, model, rows(17), words, cluster=ranks, steps=steps, **(OPTIONS | more))


@pytest.mark.many(6)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("dp=2 sync=ps servers=2 microbatches=2", "dp=2 sync=ps servers=2 microbatches=2"),
        ("dp=2 sync=ps servers=2 mode=k-of-n:2/2", "dp=3 sync=ps clip=0.1"),
        ("dp=3 sync=ps", "pp=2 dp=2 zero=1 microbatches=2"),
        ("pp=2 dp=2 zero=1 microbatches=2", "sync=ps servers=3"),
    ],
)  # fmt: skip
def test_a_run_goes_on_as_if_it_had_not_stopped(clusters, tmp_path, before, after):
    clip = 0.1 if "clip" in after else None
    whole = go(clusters, before, 5)
    begun = go(clusters, before, 2, save=tmp_path)
    assert os.listdir(tmp_path)
    assert begun.first_step == 0
    rest = go_on(clusters, tmp_path, after, 3)
    assert rest.first_step == 2
    assert rest.max_error() <= 1e-12
    if clip is None:
        assert begun.losses + rest.losses == pytest.approx(whole.losses, rel=1e-12, abs=0)


@pytest.mark.parametrize("mode", ["async", "ssp:1"])
def test_every_mode_is_saved_at_its_end(clusters, tmp_path, mode):
    """The run that goes on is equal to the replay of its order from what was saved."""
    words = f"dp=2 sync=ps servers=2 mode={mode}"
    begun = go(clusters, words, 3)
    begun.save(tmp_path)
    saved = model_in(tmp_path)
    assert all(torch.equal(saved[name], values) for name, values in begun.service.parameters.items())
    rest = go_on(clusters, tmp_path, words, 2)
    assert (rest.first_step, rest.max_error() <= 1e-12) == (3, True)


@pytest.mark.parametrize("more", ["", " on_death=continue"])
def test_saved_during_the_run_and_by_a_run_that_fails(clusters, tmp_path, more):
    """What the index names is whole after every so many steps, also where the run ends in an error."""
    words = f"dp=2 sync=ps servers=2{more}"
    before = go(clusters, words, 4)
    broken = Failing(rows(17), at=5)
    with pytest.raises(ZeroDivisionError):
        train(MODEL, broken, words, cluster=clusters(4), steps=9, batch=17, save=tmp_path, save_every=2,
              **(OPTIONS | {"check": False}))  # fmt: skip
    saved = model_in(tmp_path)
    assert all(torch.equal(saved[name], values) for name, values in before.service.parameters.items())
    rest = go_on(clusters, tmp_path, "dp=2", 2)
    assert rest.first_step == 4
    assert rest.max_error() <= 1e-12
    go(clusters, words, 3, save=tmp_path, save_every=1)
    assert len(os.listdir(tmp_path)) == 2  # the index, and the files of one step


class Failing:
    """Rows that cannot be read in one of the steps."""

    def __init__(self, pair, at):
        self.pair, self.at = pair, at

    def batch(self, step, size):
        return self.pair if step != self.at else 1 / 0


def test_buffers_are_those_of_the_first_worker(clusters, tmp_path):
    model = partial(with_statistics, 3)
    run = go(clusters, "dp=2 sync=ps", 2, model, save=tmp_path)
    alone = go(clusters, "sync=ps", 1, model, save=tmp_path / "alone")
    saved = model_in(tmp_path)
    assert saved["1.num_batches_tracked"] == 2
    assert run.service is not None
    rest = go_on(clusters, tmp_path, "sync=ps", 1, model)
    rest.save(tmp_path)
    assert model_in(tmp_path)["1.num_batches_tracked"] == 3
    assert alone.max_error() <= 1e-12


class Counting(torch.nn.Linear):
    """Knows how often it was called."""

    def __init__(self):
        super().__init__(6, 6)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def counting():
    return torch.nn.Sequential(Counting(), Counting())


@pytest.mark.parametrize("words", ["dp=2 sync=ps", "dp=2 sync=ps mode=async"])
def test_buffers_are_compared(clusters, words):
    run = go(clusters, words, 3, counting)
    assert run.max_error() <= 1e-12
    assert run.reference.buffers["1.calls"] == 3


def with_statistics(width):
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(6, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 6, bias=False)
    )


def test_what_cannot_be_saved_is_said(clusters, tmp_path):
    with pytest.raises(PlanError, match=r"save_every=2: with mode=async workers are at different steps"):
        go(clusters, "dp=2 sync=ps mode=async", 4, save=tmp_path, save_every=2)
    with pytest.raises(SaveError, match=r"compress=topk:0\.5 has left out .* is not saved; possible are compress=none"):
        go(clusters, "dp=2 sync=ps compress=topk:0.5", 2, save=tmp_path)
    run = go(clusters, "dp=2 sync=ps compress=topk:0.5", 1)
    with pytest.raises(SaveError, match="has left out"):
        run.save(tmp_path)
    with pytest.raises(SaveError, match="its state was not kept"):
        go(clusters, "sync=ps", 1, keep=False).save(tmp_path)
    go(clusters, "sync=ps", 1, save=tmp_path)
    with pytest.raises(SaveError, match=r"saved with the optimizer torch\.optim\.adam\.Adam, not .*SGD"):
        go_on(clusters, tmp_path, "sync=ps", 1, optimizer=partial(torch.optim.SGD, lr=0.1))


class DiesOnce:
    """Rows that end rank 0 when it asks for those of step 2, once."""

    def __init__(self, marker):
        self.marker, self.pair = marker, rows(17)

    def batch(self, step, size):
        if step == 2 and worker.in_rank() and worker.context().rank == 0:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(self.marker, os.O_CREAT | os.O_EXCL))
                os.kill(os.getpid(), signal.SIGKILL)
        return self.pair


def test_a_worker_that_saves_dies_and_saves_again(clusters, tmp_path):
    folder, words = tmp_path / "saved", "dp=2 sync=ps servers=2 on_death=continue"
    run = train(MODEL, DiesOnce(str(tmp_path / "died")), words, cluster=clusters(4), steps=4, batch=17, save=folder,
                save_every=1, **OPTIONS)  # fmt: skip
    assert len(run.service.deaths) == 1
    assert len(os.listdir(folder)) == 2
    saved = model_in(folder)
    assert all(torch.equal(saved[name], values) for name, values in run.service.parameters.items())
    assert run.max_error() <= 1e-12


def test_a_rank_that_says_again_that_it_has_written_counts_once(tmp_path):
    """It died after it had said so, and its next process finds the file. Another rank has not written yet."""
    storing = Storing(folder=str(tmp_path), every=2, token="0000abcd")
    saving = Saving(storing, parts=3)
    place = step_folder(str(tmp_path), 2, storing.token)
    os.makedirs(place)
    for rank in (2, 0, 0, 1):
        assert not os.path.exists(tmp_path / INDEX)
        write_fragment(place, {2: 0, 0: 1, 1: 2}[rank], "", {})
        saving.heard(rank, Header(2, 0, 8, "float32", "", "", (), {"last": 2} if rank == 2 else None))
    assert '"last": 2' in (tmp_path / INDEX).read_text()
