"""A run while it runs: moments of real ranks, not too many of them, and the picture in a terminal."""

from __future__ import annotations

import io
from functools import partial
from itertools import pairwise

import pytest

from minipar import Plan, data, models
from minipar.execution import following
from minipar.execution.following import (
    EVERY,
    Following,
    Moment,
    News,
    Reporter,
    Screen,
)
from minipar.training.training import train
from tests.conftest import Clusters


def test_moments_of_a_real_run(clusters: Clusters) -> None:
    moments: list[Moment] = []
    run = train(
        partial(models.mlp, widths=(32, 64, 64, 64, 256)), data.for_model("mlp-tiny"), "pp=2 microbatches=4",
        cluster=clusters(2), steps=30, batch=16, progress=False, watch=moments.append,
    )  # fmt: skip
    last = moments[-1]
    assert (last.step, last.steps) == (30, 30)
    assert last.losses == pytest.approx(run.losses)
    assert all(b.seconds - a.seconds >= EVERY - 1e-9 for a, b in pairwise(moments[:-1]))
    assert [m.step for m in moments] == sorted({m.step for m in moments})
    seen = [m.trace for m in moments if m.trace is not None]
    assert seen
    assert seen[-1].program is run.program
    assert 0 < seen[-1].time < 60
    assert len(seen[-1].busy) == 2
    assert min(seen[-1].busy) > 0


def _programs(count: int) -> list:  # type: ignore[type-arg]
    return [Plan(pp=2, microbatches=2).compile(layers=2)] * count


def test_driver_waits_for_all_ranks_and_limits_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("minipar.execution.following.time.monotonic", lambda: clock[0])
    done: list[int] = []
    seen: list[Moment] = []
    programs = _programs(100)
    follow = Following(programs, lambda k, loss: done.append(k), seen.append)
    rows = programs[0].ranks
    for k in range(100):
        clock[0] = 0.01 * k
        for rank in range(2):
            assert len(done) == k
            ends = [float(i) for i in range(len(rows[rank]))]
            follow(rank, News(k, [0.5 * k if rank else 0.0], (ends, ends) if k % 7 == 0 else None))
    assert done == list(range(100))
    assert len(seen) == 10  # 0.1 s apart, and the last one
    assert seen[-1].step == 100
    assert seen[-1].losses == [0.5 * k for k in range(100)]
    assert seen[-1].trace is not None


def test_ranks_tell_their_times_now_and_then() -> None:
    program = _programs(1)[0]
    reporter = Reporter(True, program)
    reported = [reporter.news(k, [], [5 + 0.02 * k], [5.01 + 0.02 * k]).times is not None for k in range(50)]
    assert 9 <= sum(reported) <= 11
    assert Reporter(False, program).news(0, [1.0], [1.0], [2.0]) == News(0, [1.0], None)


def test_servers_workers_tell_while_they_run(clusters: Clusters) -> None:
    moments: list[Moment] = []
    run = train(
        partial(models.mlp, widths=(32, 64, 64, 256)), data.for_model("mlp-tiny"), "dp=2 sync=ps mode=async",
        cluster=clusters(3), steps=200, batch=16, progress=False, watch=moments.append,
    )  # fmt: skip
    assert [m.step for m in moments] == sorted(m.step for m in moments)
    assert moments[-1].step == 200
    assert moments[-1].losses == run.losses
    assert all(len(m.losses) == m.step for m in moments)
    halfway = [m for m in moments if 0 < m.step < 200]
    assert halfway


def test_a_pipeline_without_flushes_tells_its_losses(clusters: Clusters) -> None:
    moments: list[Moment] = []
    run = train(
        partial(models.mlp, widths=(32, 64, 64, 256)), data.for_model("mlp-tiny"),
        "dp=2 pp=2 schedule=pipedream microbatches=2", cluster=clusters(4), steps=150, batch=16, progress=False,
        watch=moments.append,
    )  # fmt: skip
    assert [m.step for m in moments] == sorted(m.step for m in moments)
    assert any(0 < m.step < 150 for m in moments)
    for m in moments:
        assert m.losses == pytest.approx(run.losses[: len(m.losses)])
    assert len(moments[-1].losses) == len(run.losses) == 300


def test_screen_draws_over_itself_in_a_terminal_and_once_elsewhere() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    moments = [Moment(k, 3, [3.0 - k] * k, None, 0.1 * k) for k in (1, 2, 3)]
    terminal, file = Terminal(), io.StringIO()
    for moment in moments:
        Screen(terminal)(moment)
        Screen(file)(moment)
    assert file.getvalue() == "[##############################] step 3 of 3, loss 0.0000, 100.0 ms a step\n"
    screen, terminal = Screen(terminal), Terminal()
    screen._file = terminal
    for moment in moments:
        screen(moment)
    assert terminal.getvalue().count("\x1b[1A\x1b[J") == 2


def test_the_time_of_a_step_is_without_the_start_and_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 102.5, 102.75, 103.0, 103.5])  # it begins, and steps 1 to 4 are done
    monkeypatch.setattr(following.time, "monotonic", lambda: next(clock))
    lines: list[str] = []
    tell = following.Paced(lambda moment: lines.append(moment.line()), 4)
    for step in (1, 2, 3, 4):
        tell(step, lambda: [1.0], lambda: None)
    assert lines == [
        "step 1 of 4, loss 1.0000, 2.5 s for the start and the first step",
        "step 2 of 4, loss 1.0000, 250.0 ms a step",
        "step 3 of 4, loss 1.0000, 250.0 ms a step",
        "step 4 of 4, loss 1.0000, 333.3 ms a step",
    ]
