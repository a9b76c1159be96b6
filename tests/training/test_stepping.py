"""A loop of the user's own over the steps of a training: the numbers of `train`, and free ranks when it is left."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
from torch import nn

from minipar import MiniparError, PlanError, RankError, evaluate, resume, stepping, train
from tests.toys import rows, toy

mse = nn.functional.mse_loss
model = partial(toy, ("linear", "dropout"), tied=True)
KEYS = {"steps": 5, "batch": 9, "loss": mse, "optimizer": partial(torch.optim.AdamW, lr=0.01), "dtype": torch.float64}


def loop(ranks, words, **more):
    return stepping(model, rows(9), words, cluster=ranks, **{**KEYS, **more})


@pytest.mark.parametrize("words", ["dp=2 zero=3", "pp=2 microbatches=3 schedule=zb-h1", "tp=2", "dp=2 local_steps=2"])
@pytest.mark.parametrize("check", ["auto", True, False])
@pytest.mark.many(2)
def test_it_gives_what_train_gives(clusters, words, check, tmp_path):
    ranks, sgd = clusters(2), {"optimizer": partial(torch.optim.SGD, lr=0.1)} if "local" in words else {}
    run = train(model, rows(9), words, cluster=ranks, progress=False, check=False, **{**KEYS, **sgd})
    found = [(step.step, step.loss) for step in loop(ranks, words, check=check, save=tmp_path / "saved", **sgd)]
    seen = [1, 3, 4] if "local" in words else range(5)
    assert found == [(k, run.losses[k]) for k in seen]
    run.save(tmp_path / "whole")
    states = [evaluate(model, rows(9), state=tmp_path / name, cluster=clusters(1), loss=mse, dtype=torch.float64).loss
              for name in ("saved", "whole")]  # fmt: skip
    assert states[0] == states[1]


def test_a_step_can_be_evaluated_saved_and_looked_at(clusters, tmp_path):
    ranks, held = clusters(2), rows(13)
    losses, found = [], []
    for step in loop(ranks, "pp=2 microbatches=2"):
        losses.append(step.loss)
        found.append(step.evaluate(held).loss)
        assert step.trace.time > 0
        if step.step == 2:
            step.save(tmp_path)
    for k in (0, 2, 4):
        part = train(model, rows(9), "pp=2 microbatches=2", cluster=ranks, progress=False, **{**KEYS, "steps": k + 1})
        assert part.losses == losses[: k + 1]
        state = evaluate(model, held, "pp=2 microbatches=2", state=part, cluster=ranks, loss=mse, dtype=torch.float64)
        assert state.loss == pytest.approx(found[k], rel=1e-12)
    rest = resume(tmp_path, model, rows(9), "dp=2", cluster=ranks, progress=False, **{**KEYS, "steps": 2})
    assert rest.losses == pytest.approx(losses[3:], rel=1e-9)


def test_a_loop_that_is_left_frees_its_ranks(clusters):
    ranks, kept = clusters(2), []
    whole = train(model, rows(9), "dp=2", cluster=ranks, progress=False, **KEYS).losses
    for step in loop(ranks, "dp=2"):
        kept.append(step)
        if step.step == 2:
            break
    assert _waiting(ranks) == 0
    with pytest.raises(MiniparError, match="step 1: the loop has left it"):
        kept[1].evaluate(rows(9))

    def failing():
        for step in loop(ranks, "dp=2"):
            kept.append(step.step / 0)

    with pytest.raises(ZeroDivisionError):
        failing()
    assert _waiting(ranks) == 0
    forgotten = loop(ranks, "dp=2")
    next(forgotten)
    assert _waiting(ranks) == 2
    del forgotten
    gc.collect()
    assert _waiting(ranks) == 0
    assert train(model, rows(9), "dp=2", cluster=ranks, progress=False, **KEYS).losses == whole


def _waiting(ranks):
    """How many ranks are in the middle of a run."""

    def here():
        from minipar.execution import execution

        return len(execution._kept)

    return sum(ranks.run(here))


def test_another_run_ends_a_loop_that_waits(clusters):
    ranks = clusters(2)
    waiting = loop(ranks, "dp=2")
    first = next(waiting)
    train(model, rows(9), "pp=2", cluster=ranks, progress=False, **KEYS)
    with pytest.raises(RankError, match="another one has begun on its ranks"):
        first.save("never")
    with pytest.raises(RankError, match="another one has begun on its ranks"):
        next(waiting)


@pytest.mark.parametrize("words", ["pp=2 schedule=pipedream", "dp=2 sync=ps"])
def test_what_has_no_steps_is_refused(words):
    with pytest.raises(PlanError, match="has no steps that begin and end one after another"):
        next(stepping(model, rows(9), words))
    with pytest.raises(TypeError, match="unexpected keyword argument 'step_count'"):
        next(stepping(model, rows(9), "dp=2", step_count=3))
