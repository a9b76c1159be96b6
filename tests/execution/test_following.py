"""A run while it runs: moments of real ranks, not too many of them, and the picture in a terminal."""

from __future__ import annotations

import io
import math
from collections import Counter
from functools import partial
from itertools import pairwise

import pytest

from minipar import Plan, data, models, simulate
from minipar.execution import following
from minipar.execution.following import (
    EVERY,
    Following,
    Moment,
    News,
    Reporter,
    Screen,
    Stretch,
    UnderWay,
    Walked,
    window,
)
from minipar.execution.streams import HostStreams
from minipar.program import Op, message
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
    for m in halfway:
        assert m.trace is not None
        assert len(m.trace.program.ranks) == 2  # the workers
        assert "what the servers do is in the trace of the whole run" in m.trace.note


def test_time_of_a_step_as_soon_as_all_ranks_have_told_it() -> None:
    program = Plan(pp=2, microbatches=2, schedule="pipedream").compile(layers=2, steps=4)
    ran = simulate(program)
    now = UnderWay(program)

    def tell(rank: int, first: int, until: int, time: float, losses: dict[int, float]) -> None:
        walked = [(k, k, ran.starts[rank][k], ran.ends[rank][k]) for k in range(first, until)]
        now.heard(rank, Stretch(0, time, walked, losses))

    half = next(k for k, ins in enumerate(program.ranks[1]) if ins.step == 2 and ins.op is Op.FORWARD)
    tell(1, 0, half, ran.starts[1][half], {0: 4.0, 1: 3.0, 2: 2.0, 3: 1.0})
    assert now.done == 0
    tell(0, 0, len(program.ranks[0]), math.inf, {})
    assert now.done == 2
    assert now.losses == [4.0, 3.0, 2.0, 1.0]
    trace = now.trace
    assert trace is not None
    assert trace.note.startswith("the time of step 1;")  # rank 1 has not told yet what it did until the end of step 2
    tell(1, half, len(program.ranks[1]), math.inf, {4: 1.0, 5: 1.0, 6: 1.0, 7: 0.5})
    assert now.done == 4
    assert now.losses[-1] == 0.5
    trace = now.trace
    assert trace is not None
    places = [(r, k) for r, row in enumerate(program.ranks) for k, ins in enumerate(row) if ins.step == 3]
    own = [(r, k) for r, k in places if program.ranks[r][k].op in (Op.FORWARD, Op.BACKWARD)]
    first, last = min(ran.starts[r][k] for r, k in own), max(ran.ends[r][k] for r, k in own)
    for rank, row in enumerate(program.ranks):
        there = [
            ins for k, ins in enumerate(row)
            if ins.stream == "compute" and ran.ends[rank][k] > first and ran.starts[rank][k] < last
        ]  # fmt: skip
        assert [ins for ins in trace.program.ranks[rank] if ins.stream == "compute"] == there


def test_window_has_both_ends_of_its_messages() -> None:
    program = Plan(pp=2, microbatches=2, schedule="pipedream").compile(layers=2, steps=4)
    ran = simulate(program, latency=0.5)
    rows = [list(zip(row, ran.starts[r], ran.ends[r], strict=True)) for r, row in enumerate(program.ranks)]
    for first in range(20):
        trace = window(program, rows, float(first), first + 4.0, "")
        ends = Counter(message(ins) for row in trace.program.ranks for ins in row if ins.op in (Op.SEND, Op.RECV))
        assert set(ends.values()) <= {2}
        assert all(trace.program.ranks[r][e.index] is e.instruction for r in range(2) for e in trace.events_of(r))


def test_receives_that_have_not_arrived_are_told_later() -> None:
    told: list[Stretch] = []
    walked = Walked(told.append, 0.0)
    starts, ends = [0.0, 1.0, 2.0], [1.0, 1.0, 3.0]
    walked.begin(starts, ends, [0.0], HostStreams())
    walked(range(3), waiting=[1])
    ends[1] = 5.0
    walked(range(3), last=True)
    assert [one.walked for one in told] == [[(0, 0, 0.0, 1.0), (2, 2, 2.0, 3.0)], [(1, 1, 1.0, 5.0)]]
    assert told[-1].until == math.inf


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
