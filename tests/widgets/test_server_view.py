"""The server view: versions, staleness, stragglers and absences, as the trace has them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from minipar import Plan, simulate, train
from minipar.program.verify.service import ages
from minipar.trace import Trace
from minipar_widgets import ServerView
from minipar_widgets.server_model import served
from tests.server.test_serving import KillsOnce
from tests.toys import toy


def trace(words: str, steps: int = 6, factors: tuple[float, ...] = ()) -> Trace:
    plan = Plan.parse(words)
    factors = (*factors, *(1.0,) * (plan.ranks - len(factors)))
    return simulate(plan.compile(layers=4, steps=steps), forward=1.0, backward=2.0, latency=0.1, stage_factors=factors)


@pytest.mark.parametrize(
    "words",
    [
        "dp=3 sync=ps mode=async",
        "dp=4 sync=ps mode=ssp:1 servers=2",
        "dp=3 sync=ps",
        "dp=3 sync=ps servers=2",
        "dp=4 sync=ps mode=k-of-n:3/4",
    ],
)
def test_versions_and_staleness_are_the_trace_s(words: str) -> None:
    one = trace(words, factors=(1, 1.2, 2.5))
    found = served(one)
    workers = len(found.workers)
    assert [w.staleness for w in found.workers] == one.staleness()[:workers]
    late = {(w.rank, s.step): (s.update, s.late) for w in found.workers for s in w.steps if s.update >= 0}
    assert late == {(worker, step): (update, old) for worker, step, update, old in ages(one.program)}
    assert list(found.updates) == sorted(found.updates)
    assert len(found.servers) == Plan.parse(words).servers
    for worker in found.workers:
        for step in worker.steps:
            assert step.pull[0] <= step.pull[1] <= step.push[0] + 1e-9 <= step.push[1] + 1e-9
            assert step.update < 0 or step.applied >= step.push[1] - 1e-9
            # as many updates as the server had done when it answered
            assert step.version <= sum(time <= step.pull[1] + 1e-9 for time in found.updates)


def test_gradients_that_come_too_late_are_dropped() -> None:
    found = served(trace("dp=4 sync=ps mode=k-of-n:3/4", factors=(1, 1, 1, 2.2)))
    assert [w.dropped for w in found.workers] == [0, 0, 0, 3]
    assert len(found.updates) == 6
    view = ServerView(found.trace)
    assert "3 gradients dropped" in view.caption()
    assert sum(row[6] == "dropped" for row in view.rows()) == 3


def test_stragglers_are_named() -> None:
    found = served(trace("dp=4 sync=ps mode=async", factors=(1, 1.1, 1, 2)))
    assert [w.slow for w in found.workers] == [False, False, False, True]
    assert found.workers[3].slowness == pytest.approx(2.0, rel=0.1)
    assert "slow: its steps take" in ServerView(found.trace).caption()


def test_absence_is_a_time_without_a_word() -> None:
    one = trace("dp=3 sync=ps mode=async")
    assert not any(w.away for w in served(replace(one, kind="measured")).workers)
    starts, ends = [list(row) for row in one.starts], [list(row) for row in one.ends]
    for k, ins in enumerate(one.program.ranks[1]):
        if ins.step >= 3:
            starts[1][k] += 40
            ends[1][k] += 40
    found = served(Trace(one.program, starts, ends, one.size, "measured", one.unit))
    assert [w.away for w in found.workers][::2] == [(), ()]
    ((begin, end),) = found.workers[1].away
    assert begin == pytest.approx(found.workers[1].steps[2].push[1])
    assert end - begin == pytest.approx(40)
    assert "away from" in ServerView(found.trace).caption()


def test_a_worker_that_died_and_came_back(clusters, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """A real run: rank 1 is killed in its third step, and started again."""
    run = train(
        partial(toy, ("linear",)), KillsOnce(str(tmp_path / "killed"), 1),
        "dp=3 sync=ps mode=async on_death=continue", cluster=clusters(4), steps=6, batch=9,
        loss=torch.nn.functional.mse_loss, progress=False,
    )  # fmt: skip
    view = ServerView(run.trace, run.service)
    assert view.problem == ""
    assert view.found is not None
    assert [bool(w.away) for w in view.found.workers] == [False, True, False]
    assert "worker 1: 6 steps" in view.caption().replace("Worker", "worker")
    assert "rank 1" in view.caption().splitlines()[-1]
    assert view.data["unit"] == "ms"


def test_words_where_nothing_can_be_shown() -> None:
    plain = simulate(Plan(pp=2, microbatches=2).compile(layers=4))
    assert "has no parameter servers; possible are plans with sync=ps" in ServerView(plain).problem
    one = trace("dp=2 sync=ps")
    broken = Trace(one.program, one.starts, [[-1.0 for _ in row] for row in one.ends], one.size)
    assert "a duration must be a finite number of at least 0" in ServerView(broken).problem
    template = Plan.parse("dp=2 sync=ps mode=async").compile(layers=2, steps=2)
    unfinished = replace(template, ranks=(*template.ranks[:2], ()))
    never = Trace(
        unfinished, [[0.0] * len(r) for r in unfinished.ranks], [[1.0] * len(r) for r in unfinished.ranks], one.size
    )
    assert "is known when they have done it" in ServerView(never).problem
    view = ServerView(plain)
    view.update(one)
    assert view.problem == ""


def test_too_many_steps_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minipar_widgets.server_model.MOST_STEPS", 10)
    assert "18 steps are too many for one picture; possible are 10" in ServerView(trace("dp=3 sync=ps")).problem
