"""What a run reports at each step: losses, rates and norms, equal to a plain torch loop's; and a loss that is NaN."""

from __future__ import annotations

import math
import sys
import warnings
from dataclasses import FrozenInstanceError
from functools import partial
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor, nn

from minipar import NotFinite, PlanError, RankError, StepInfo, resume, train
from minipar.strategies.plan import Plan
from tests.execution.test_updating import MOMENTUM, Stream, factors, model, plainly, recipe

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules["tests.execution.test_updating"])

mse = nn.functional.mse_loss


def plain(steps: int, clip: float = math.inf) -> list[StepInfo]:
    return plainly(recipe, factors, steps, names=True, clip=clip)[2]


def same(found: list[StepInfo], expected: list[StepInfo]) -> None:
    assert [info.step for info in found] == [info.step for info in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-11)
        assert one.learning_rates == pytest.approx(other.learning_rates, rel=1e-14)
        assert one.gradient_norm == pytest.approx(other.gradient_norm, rel=1e-11)


@pytest.mark.parametrize(
    "text",
    ["dp=2 pp=2 zero=3 microbatches=2", "dp=2 overlap=priority bucket=none", "pp=2 offload=optimizer", "dp=2 clip=0.3"],
)
def test_every_step_is_told_in_order_as_plain_torch_has_it(clusters, text):
    """Tied between stages, held by all replicas, sliced, frozen: each gradient counts once; 11 steps are two blocks."""
    plan, told = Plan.parse(text), []
    steps = 11 if plan.overlap == "priority" else 4
    run = train(model, Stream(), plan, cluster=clusters(plan.ranks), steps=steps, batch=13, loss=mse, optimizer=recipe,
                scheduler=factors, dtype=torch.float64, progress=False, callback=told.append)  # fmt: skip
    expected = plain(steps, plan.clip or math.inf)
    same(told, expected)
    assert plan.clip is None or told[0].gradient_norm > plan.clip, "before clipping"
    assert [info.loss for info in told] == run.losses
    assert told[0].learning_rate == told[0].learning_rates[0]
    with pytest.raises(FrozenInstanceError):
        told[0].loss = 0.0


def test_it_may_end_the_run_which_is_saved_and_goes_on(clusters, tmp_path):
    expected, told = plain(60), []

    def third(info: StepInfo) -> bool:
        told.append(info)
        return info.step < 2

    options: dict[str, Any] = {"batch": 13, "loss": mse, "optimizer": recipe, "scheduler": factors, "progress": False,
                               "dtype": torch.float64, "cluster": clusters(2)}  # fmt: skip
    run = train(model, Stream(), "dp=2 zero=1", steps=60, callback=third, save=tmp_path, save_every=1, **options)
    same(told, expected[:3])
    assert 3 <= len(run.losses) < 60, "the steps that had begun are part of it"
    assert len(run.step_times) == len(run.losses)
    again: list[StepInfo] = []
    resume(tmp_path, model, Stream(), "pp=2", steps=2, callback=again.append, **options)
    same(again, expected[len(run.losses) : len(run.losses) + 2])


def test_what_it_raises_ends_the_run_and_the_cluster_lives(clusters):
    def fails(info: StepInfo) -> None:
        raise KeyError(info.step)

    go: Any = partial(train, model, Stream(), "dp=2", cluster=clusters(2), batch=13, loss=mse, progress=False)
    with pytest.raises(KeyError, match="0"):
        go(steps=500, callback=fails)
    assert len(go(steps=2).losses) == 2


def test_where_gradients_have_no_common_norm_it_says_none(clusters):
    told: list[StepInfo] = []
    go: Any = partial(train, batch=12, loss=mse, optimizer=MOMENTUM, progress=False, callback=told.append)
    go(model, Stream(), "dp=2 local_steps=2", cluster=clusters(2), steps=3)
    assert [(info.step, info.gradient_norm) for info in told] == [(0, None), (1, None), (2, None)]
    told.clear()
    untied = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    run = go(untied, Stream(), "pp=2 schedule=pipedream microbatches=2", cluster=clusters(2), steps=3)
    assert [(info.step, info.loss) for info in told] == list(enumerate(run.losses))
    with pytest.raises(PlanError, match="callback: not together with sync=ps.*use watch="):
        go(model, Stream(), "dp=2 sync=ps", cluster=clusters(3))


# losses that are not numbers ------------------------------------------------------------------------------------------


class Broken:
    """Row 9 of step 2 is not a number."""

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        x, y = Stream().batch(step, size)
        if step == 2:
            x[9] = math.nan
        return x, y


@pytest.mark.parametrize(
    ("text", "rank", "part"), [("dp=2 microbatches=3", 1, 1), ("pp=2 microbatches=4", 1, 3), ("dp=2 sync=ps", 1, 0)]
)
def test_a_nan_stops_the_run_and_says_where(clusters, text, rank, part):
    plan = Plan.parse(text)
    go: Any = partial(train, model, cluster=clusters(plan.ranks), steps=9, batch=12, loss=mse, progress=False)
    found = rf"the loss is nan in step 2, rank {rank}, micro-batch {part} \(rows .*on_nan=.warn.\) to go on"
    with pytest.raises(NotFinite, match=found) as caught:
        go(Broken(), plan)
    assert (caught.value.step, caught.value.rank, caught.value.microbatch) == (2, rank, part)
    assert isinstance(caught.value, RankError)
    assert len(go(Stream(), plan).losses) >= 9


def test_on_nan_goes_on_if_it_is_told_to(clusters):
    go: Any = partial(train, model, Broken(), "dp=2", cluster=clusters(2), steps=4, batch=12, loss=mse, progress=False)
    # Rank 1 has it first. By its update rank 0 has it a step later, and the driver may hear of that one first.
    with pytest.warns(UserWarning, match="the loss is nan in step (2, rank 1|3, rank 0), micro-batch 0") as seen:
        run = go(on_nan="warn")
    assert len([one for one in seen if "the loss is nan" in str(one.message)]) == 1
    assert [math.isnan(loss) for loss in run.losses] == [False, False, True, True]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        go(on_nan="ignore")
    with pytest.raises(PlanError, match="on_nan=never: unknown; possible are stop, warn, ignore"):
        go(on_nan="never")


def test_infinite_losses_are_found_too(clusters):
    x, y = Stream().batch(0, 12)
    y[5] = math.inf
    with pytest.raises(NotFinite, match="the loss is inf in step 0, rank 0, micro-batch 1"):
        train(model, (x, y), "microbatches=4", cluster=clusters(1), steps=2, loss=mse, progress=False)
