"""A run as it goes on: moments of real ranks, not too many of them, and the picture in a terminal."""

from __future__ import annotations

import io
import time
from functools import partial
from itertools import pairwise

import pytest

from minipar import Plan, data, models
from minipar.following import EVERY, Following, Moment, News, Screen, Telling
from minipar.training import train
from tests.conftest import Clusters


def test_moments_of_a_real_run(clusters: Clusters) -> None:
    moments: list[tuple[float, Moment]] = []
    run = train(
        partial(models.mlp, widths=(32, 64, 64, 64, 256)), data.for_model("mlp-tiny"), "pp=2 microbatches=4",
        cluster=clusters(2), steps=30, batch=16, progress=False, watch=lambda m: moments.append((time.monotonic(), m)),
    )  # fmt: skip
    last = moments[-1][1]
    assert (last.step, last.steps) == (30, 30)
    assert last.losses == pytest.approx(run.losses)
    assert all(b - a >= EVERY * 0.9 for (a, _), (b, _) in pairwise(moments[:-1]))
    assert [m.step for _, m in moments] == sorted({m.step for _, m in moments})
    seen = [m.trace for _, m in moments if m.trace is not None]
    assert seen
    assert seen[-1].program is run.program
    assert 0 < seen[-1].time < 60
    assert len(seen[-1].busy) == 2
    assert min(seen[-1].busy) > 0


def _programs(count: int) -> list:  # type: ignore[type-arg]
    return [Plan(pp=2, microbatches=2).compile(layers=2)] * count


def test_driver_waits_for_all_ranks_and_limits_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("minipar.following.time.monotonic", lambda: clock[0])
    done: list[int] = []
    seen: list[Moment] = []
    programs = _programs(100)
    follow = Following(programs, done.append, seen.append)
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
    telling = Telling(True)
    told = [telling.news(k, [], [5 + 0.02 * k], [5.01 + 0.02 * k]).times is not None for k in range(50)]
    assert 9 <= sum(told) <= 11
    assert Telling(False).news(0, [1.0], [1.0], [2.0]) == News(0, [1.0], None)


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
