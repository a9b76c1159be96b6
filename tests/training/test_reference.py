"""The reference shares no code with the engine, and runs in its own process, so that it finds the engine's mistakes."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from minipar import CheckError, Cluster, RankDied, RankError, train
from minipar.cluster import launch
from minipar.execution.execution import Job
from minipar.models.randomness import RowDropout, at
from minipar.strategies.served_order import in_step
from minipar.trace.recorded_order import Entry, RecordedOrder, local_order, served_order
from minipar.training import plainly, reference
from minipar.training.reference import Masks, gradient_error
from tests.toys import rows, toy

mse = nn.functional.mse_loss


@pytest.fixture(scope="module", params=["fresh", "forked"])
def alone(request):
    """A process of plain torch that has done nothing yet: a new interpreter, or the spare process of a helper."""
    helper = launch.Zygote(launch.settings_of_glibc()) if request.param == "forked" else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_zygotes", {(os.getpid(), ""): helper} if helper else {})
        process = plainly.Plain()
        assert isinstance(process.process, launch.Forked if helper else launch.Spawned)
        assert launch.take_spare(reference.__file__, 0) is None  # there is one only
    yield process
    assert process.alive
    if helper:
        mark = Path(launch.scratch_folder(), "mark")
        mark.touch()
        helper.close()
        assert mark.exists()  # ranks of other helpers have their sockets there
        with pytest.raises(EOFError):
            process.control.recv()
        assert not process.alive  # though nobody is left who could tell its status
    process.end()


# Functions that are pickled by value, as those of a notebook are: their module is not imported at the other end.
NOTEBOOK: dict = {"__name__": "__main__", "torch": torch, "nn": nn, "sys": sys, "partial": partial}
exec(
    """
def clean_model():
    found = [name for name in sys.modules if name.partition(".")[0] == "minipar"]
    if found:
        raise ImportError(f"the reference has imported {found}")
    return nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6))


def light_model():
    if "torch._dynamo" in sys.modules:
        raise ImportError("the reference has imported torch's compiler")
    return clean_model()


def raising():
    return [nn.Linear(6, 6), Odd()]


class Odd(nn.Module):
    def forward(self, x):
        raise KeyError("an error of the user's own")


def leaving():
    import os

    os._exit(7)


def slow():
    import time

    time.sleep(60)
""",
    NOTEBOOK,
)


def job(model, **more) -> Job:
    return Job(model, rows(9), loss=mse, dtype=torch.float64, **more)


def test_the_process_imports_nothing_of_the_engine(alone):
    task = plainly.task_of(job(NOTEBOOK["clean_model"]), 2)
    found = alone.ask(task, 1, lambda step: None)
    assert len(found.losses) == 2
    model = plainly.task_of(job(partial(toy, ("linear",))), 1)
    alone.ask(model, 1, lambda step: None)  # of a module that it can import


def test_no_optimizer_imports_torchs_compiler(alone):
    for optimizer in (torch.optim.SGD, torch.optim.AdamW):
        recipe = partial(optimizer, lr=0.1)
        for name in ("clean_model", "light_model"):  # the second job finds what the first one imported
            alone.ask(plainly.task_of(job(NOTEBOOK[name], optimizer=recipe), 2), 1, lambda step: None)


def test_what_user_code_raises_comes_back_with_its_traceback():
    with pytest.raises(KeyError, match="an error of the user's own") as caught:
        plainly.train_reference(job(NOTEBOOK["raising"]), 1)
    notes = "".join(getattr(caught.value, "__notes__", ())) + str(getattr(caught.value.__cause__, "details", ""))
    assert "in a process of its own" in notes
    assert "in forward" in notes
    assert len(plainly.train_reference(job(toy_model), 1).losses) == 1


def toy_model():
    return toy(("linear",))


def test_a_process_that_dies_is_told_of_and_started_again():
    with pytest.raises(RankDied, match="the process of plain torch, which .* 7"):
        plainly.train_reference(job(NOTEBOOK["leaving"]), 1)
    assert len(plainly.train_reference(job(toy_model), 1).losses) == 1


def test_torchs_settings_end_with_the_job_whose_model_changes_them():
    def plain():
        return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))

    def changing():
        torch.set_default_dtype(torch.float64)
        torch.set_deterministic_debug_mode(2)
        return plain()

    before, odd, after = (plainly.train_reference(Job(m, rows(9), loss=mse), 1) for m in (plain, changing, plain))
    assert before.losses == after.losses != odd.losses


def test_what_cannot_be_sent_is_refused():
    with pytest.raises(RankError, match="the reference cannot be sent to its process"):
        plainly.train_reference(job(toy_model, optimizer=partial(torch.optim.SGD, lr=threading.Lock())), 1)


def test_an_interrupt_ends_it():
    plainly.prepare()
    before = plainly._process().process
    main = threading.main_thread().ident
    timer = threading.Timer(0.5, signal.pthread_kill, [main, signal.SIGINT])
    timer.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        plainly.train_reference(job(NOTEBOOK["slow"]), 1)
    assert time.monotonic() - start < 10
    assert before.wait(0) is not None
    assert len(plainly.train_reference(job(toy_model), 1).losses) == 1


@pytest.mark.parametrize("shape", [(3, 2, 4), (0, 3)])
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_masks_are_those_of_the_engine(shape, p):
    """Written twice, by the same words: the numbers must be equal."""
    model = nn.Sequential(nn.Identity(), nn.Sequential(nn.Dropout(p)))
    masks = Masks(model, seed=3)
    masks.step, masks.row = 2, 11
    theirs = RowDropout(p, 3, "1.0")
    at([theirs], 2, 11)
    x = torch.randn(shape, dtype=torch.float64)
    assert torch.equal(model(x), theirs(x))
    assert torch.equal(model.eval()(x), x)


def test_what_looks_at_the_same_memory_still_does_there(alone):
    base = torch.zeros(4)
    task = plainly.task_of(Job(NOTEBOOK["clean_model"], (base[:2], base[2:])), 1)
    found = torch.load(io.BytesIO(plainly._pickled(task)), weights_only=False)["data"]
    assert found[0].untyped_storage().data_ptr() == found[1].untyped_storage().data_ptr()
    assert found[1].storage_offset() == 2


# the replay -----------------------------------------------------------------------------------------------------------


def plain_job() -> reference.Job:
    model = reference.build(partial(toy, ("linear", "tuples", "dropout")), 0, torch.float64)
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    return reference.Job(model, reference.reader(rows(9), 9, torch.float64), mse, sgd)


@pytest.mark.parametrize(
    "order",
    [
        local_order(3, 1, 2, 2),
        served_order([row for step in range(3) for row in in_step(2, step)], 2, 2),
        RecordedOrder(
            tuple(
                Entry(stage, what, i, i // 2) if what != "update" else Entry(stage, what, -1, i // 2 + 1)
                for i in range(6)
                for what, stages in (("forward", (0, 1)), ("backward", (1, 0)), ("update", (0, 1) if i % 2 else ()))
                for stage in stages
            ),
            layers=((0, 1, 2), (3, 4, 5, 6)),
            microbatches=2,
        ),
    ],
    ids=["local", "served", "stages"],
)  # fmt: skip
def test_a_log_of_what_one_device_does_gives_the_same_and_a_wrong_one_does_not(order):
    plain = reference.train_plainly(plain_job(), 3)
    found = reference.Replay(plain_job(), order).train()
    assert found.losses == pytest.approx(plain.losses, abs=1e-12)
    assert gradient_error(found.parameters, plain.parameters) <= 1e-12
    stale = [
        e._replace(version=1) if e.version == 2 and e.what in ("forward", "backward") else e for e in order.entries
    ]
    other = reference.Replay(plain_job(), order._replace(entries=tuple(stale))).train()
    assert gradient_error(other.parameters, plain.parameters) > 1e-6
    with pytest.raises(ValueError, match="the order cannot be: Entry"):
        reference.Replay(plain_job(), order._replace(entries=tuple(order.entries[1:]))).train()


# the error ------------------------------------------------------------------------------------------------------------


def test_the_error_of_gradients_that_are_all_zero_or_empty():
    zero, empty = torch.zeros(3), torch.zeros(0, 2)
    assert gradient_error({"a": zero, "b": empty}, {"a": zero, "b": empty}) == 0
    assert gradient_error({"a": torch.ones(3)}, {"a": zero}) == 1
    assert gradient_error({"a": torch.ones(3) * 2}, {"a": torch.ones(3)}) == 1
    assert gradient_error({}, {"a": zero}) == float("inf")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_none_is_never_overlooked(bad):
    """max() of Python passes over NaN, depending on where it stands."""
    good, worse = torch.ones(2), torch.tensor([1.0, bad])
    for names in (("a", "b"), ("b", "a")):
        mine = {name: worse if name == "b" else good for name in names}
        plain = dict.fromkeys(names, good)
        assert gradient_error(mine, plain) == float("inf")
        assert gradient_error(plain, mine) == float("inf")
        assert gradient_error(mine, mine) == float("inf")
    assert gradient_error({"a": good}, {"a": torch.ones(2, 1)}) == float("inf")


def forgetful_build(job):
    """What an engine with a mistake in its preparations would do: it loses what a layer adds."""
    model = _build(job)
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.zero_()
    return model


_build = Job.build


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("added", torch.arange(6.0))

    def forward(self, x):
        return torch.tanh(x + self.added)


def with_a_buffer() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), Adds(), nn.Linear(6, 6))


def test_it_finds_a_mistake_in_the_engines_preparations():
    """Whatever the engine does to a model before it trains it, the reference does not share it."""

    def prepare():
        Job.build = forgetful_build

    with Cluster(2) as own:  # (ranks with a mistake are of no use to other tests)
        keys = {"cluster": own, "steps": 1, "dtype": torch.float64, "check": True, "progress": False}
        keys["loss"] = torch.nn.functional.mse_loss
        assert train(with_a_buffer, rows(8), "pp=2", **keys).max_error() < 1e-12
        own.run(prepare)
        with pytest.raises(CheckError, match="step 0: the gradient of"):
            train(with_a_buffer, rows(8), "pp=2", **keys)


class RunsAgain(nn.Module):
    """A layer that computes a part of its forward again in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: torch.tanh(self.linear(x)).square(), x, use_reentrant=False)


def twice() -> nn.Sequential:
    layer = nn.Linear(6, 6)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(6, 4))


@pytest.mark.parametrize("model", [twice, lambda: nn.Sequential(nn.Linear(6, 6), RunsAgain(), nn.Linear(6, 4))])
@pytest.mark.parametrize("words", ["dp=2 sync=ps mode=ssp:1", "dp=2 local_steps=2"])
def test_a_replay_of_layers_that_stand_twice_or_run_again(clusters, model, words):
    """The parameters that a replay ends with are those of its updates, whatever the modules were given meanwhile."""
    ranks, data = clusters(3 if "sync" in words else 2), (torch.randn(17, 6).double(), torch.randn(17, 4).double())
    found = train(model, data, words, cluster=ranks, steps=4, batch=17, loss=mse, check=True, progress=False,
                  dtype=torch.float64, optimizer=partial(torch.optim.SGD, lr=0.3))  # fmt: skip
    assert found.max_error() < 1e-12
