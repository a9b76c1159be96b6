"""The schedule explorer: every schedule, texts for impossible settings, fast answers to sliders, and a real run."""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Iterator

import pytest

from minipar import Plan, schedule, simulate, strategies
from minipar.program import Backward, Forward
from minipar_widgets import ScheduleExplorer, exploring
from minipar_widgets.exploring import Settings, explore


@pytest.mark.parametrize("name", [s.name for s in strategies.schedules() if not s.name.startswith("test-")])
def test_every_schedule_is_explored(name: str) -> None:
    found = explore(Settings(name, 4, 8, chunks=2))
    assert found.problem == ""
    assert found.trace is not None
    assert len(exploring.table(found)) == 5
    plan = Plan.parse(found.trace.program.name)
    old, versions = exploring.settled(plan)
    assert (max(old) > 0) == plan.asynchronous
    run = simulate(
        plan.compile(layers=exploring.layers_of(plan), steps=plan.settling_steps if plan.asynchronous else 1)
    )
    assert list(old) == run.staleness()
    assert list(versions) == run.weight_versions()
    most = re.findall(r"\d+|one", exploring.staleness(found))
    assert int(most[0]) == max(old) or (name == "ampnet" and int(most[0]) > max(old))  # (which decides as it runs)
    assert most[1] == str(max(versions)).replace("1", "one")


def test_costs_are_those_of_the_sliders() -> None:
    found = explore(Settings("gpipe", 2, 3, ratio=3, latency=0.5, factors=(1, 2)))
    truth = simulate(
        Plan(pp=2, microbatches=3, schedule="gpipe").compile(layers=2), backward=3, latency=0.5, stage_factors=(1, 2)
    )
    assert found.trace is not None
    assert found.trace.time == truth.time


def test_programs_are_kept_but_not_those_of_a_schedule_that_has_changed() -> None:
    def of(order: list[int]) -> float:
        @schedule("test-explored")
        def explored(rank: int, stages: int, microbatches: int) -> Iterator[Forward | Backward]:
            yield from map(Forward, range(microbatches))
            yield from map(Backward, order)

        found = explore(Settings("test-explored", 2, 2))
        assert found.trace is not None
        return found.trace.ends[1][5]

    program = explore(Settings("gpipe", 2, 2)).program
    assert explore(Settings("gpipe", 2, 2, ratio=3)).program is program
    assert of([0, 1]) == of([0, 1])
    assert explore(Settings("test-explored", 2, 2)).program is not None
    of([1, 0])
    text = str(explore(Settings("test-explored", 2, 2)).program)
    assert text.index("B 0 mb1") < text.index("B 0 mb0")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"schedule": "chimera", "stages": 3}, "is odd"),
        ({"schedule": "zb-h2", "microbatches": 3}, "cannot fill pp=4"),
        ({"schedule": "interleaved", "microbatches": 2}, "possible are microbatches=4 or more"),
    ],
)
def test_impossible_settings_are_answered_in_place(given: dict[str, object], words: str) -> None:
    explorer = ScheduleExplorer()
    explorer.set(**given)
    assert words in explorer.timeline.problem
    assert words in repr(explorer)
    assert explorer.start.disabled
    explorer.begin()  # nothing to run
    assert explorer.rows() == []
    assert base64.b64decode(explorer._repr_mimebundle_()[0]["image/png"]).startswith(b"\x89PNG")
    explorer.set(schedule="1f1b", stages=4, microbatches=8)
    assert explorer.timeline.problem == ""
    assert not explorer.start.disabled


def test_what_only_verify_sees_takes_the_picture_s_place() -> None:
    """It can be simulated, and so is drawn first; but its gradients would be wrong."""

    @schedule("test-short")
    def short(rank: int, stages: int, microbatches: int) -> Iterator[Forward | Backward]:
        for i in range(microbatches - 1):
            yield Forward(i)
            yield Backward(i)

    assert exploring.predict(Settings("test-short", 2, 2)).problem == ""
    explorer = ScheduleExplorer(schedule="test-short", stages=2, microbatches=2)
    assert "micro-batch 1 is missing" in explorer.timeline.problem
    assert explorer.start.disabled


def test_controls_move_what_is_shown() -> None:
    explorer = ScheduleExplorer(schedule="gpipe", stages=2, microbatches=2)
    assert explorer.chunks.disabled
    before = explorer.timeline.data
    explorer.microbatches.value = 5
    assert explorer.now.microbatches == 5
    assert explorer.timeline.data != before
    assert "5 micro-batches" in explorer.summary()
    explorer.schedule.value = "looped-bfs"
    assert not explorer.chunks.disabled
    explorer.chunks.value = 3
    assert len(explorer.found.program.placement[0]) == 3  # type: ignore[union-attr]
    explorer.schedule.value = "1f1b"
    assert explorer.chunks.value == 1  # what it has, while it takes no other number
    explorer.schedule.value = "looped-bfs"
    assert explorer.chunks.value == 3
    explorer.stages.value = 3
    assert len(explorer._rows.children) == 3
    explorer._factors[2].value = 2.0
    assert explorer.now.factors == (1.0, 1.0, 2.0)
    assert explorer.settings()["imbalance"] == "1, 1, 2"
    page = explorer.to_html()
    assert "<dt>imbalance</dt><dd>1, 1, 2</dd>" in page


def test_moving_a_slider_is_quick() -> None:
    """The budget, 100 ms, is benchmarked; here only that nothing has become slower by an order of magnitude."""
    explorer = ScheduleExplorer(schedule="1f1b", stages=16, microbatches=63)
    best = 9.0
    for m in (64, 62, 61):
        start = time.process_time()
        explorer.microbatches.value = m
        best = min(best, time.process_time() - start)
    assert best < 2.0


def test_run_it_on_real_ranks_measured_under_predicted() -> None:
    explorer = ScheduleExplorer(schedule="1f1b", stages=2, microbatches=4, latency=0.2, factors=(1, 1.5))
    explorer.forward.value, explorer.steps.value = 20, 2
    heard: list[int] = []
    explorer.progress.observe(lambda change: heard.append(change["new"]), "value")
    explorer.begin()
    assert explorer.start.disabled
    assert not explorer.cancel.disabled
    shown = explorer.settings()
    for control, late in (
        (explorer.stages, 4),
        (explorer.schedule, "zb-v"),
        (explorer._factors[1], 2),
        (explorer.steps, 9),
    ):
        control.value = late  # as a page says that does not know yet that a run goes on
    assert explorer.settings() == shown
    assert [explorer.stages.value, explorer.schedule.value, explorer._factors[1].value, explorer.steps.value] == [
        2, "1f1b", 1.5, 2,
    ]  # fmt: skip
    explorer.wait(120)
    assert explorer.run is not None, explorer.report.value
    assert [trace.kind for trace in explorer.timeline.traces] == ["predicted", "measured"]
    assert 2 in heard
    predicted = explorer.found.trace
    assert predicted is not None
    assert explorer.run.predicted.time == pytest.approx(predicted.time * 0.020)
    assert explorer.run.trace.time == pytest.approx(explorer.run.predicted.time, rel=1.0)
    assert explorer.cancel.disabled
    assert not explorer.start.disabled
    assert "loss" in explorer.report.value
    explorer.forward.value = 25  # a run of another device: it is not shown beside this one
    assert [trace.kind for trace in explorer.timeline.traces] == ["predicted"]
    assert "loss" not in explorer.report.value


def test_a_run_is_cancelled() -> None:
    explorer = ScheduleExplorer(schedule="gpipe", stages=2, microbatches=8)
    explorer.forward.value, explorer.steps.value = 50, 20  # half a minute
    steps: list[int] = []
    explorer.progress.observe(lambda change: steps.append(change["new"]), "value")
    explorer.begin()
    start = time.monotonic()
    while "step 1 of 20" not in explorer.report.value and time.monotonic() < start + 60:
        time.sleep(0.05)
    explorer.stop()
    explorer.wait(60)
    assert explorer.run is None
    assert "stopped" in explorer.report.value
    assert not explorer.start.disabled
    assert explorer.progress.value == 0
    assert 0 < max(steps) < 10  # it did not go on to its end in the background
