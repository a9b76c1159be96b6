"""How long the schedule explorer takes from a slider's move to the picture, with 16 ranks and 64 micro-batches.

Every schedule is measured; schedules with chunks have two chunks on a rank, which makes 32 stages. One row is for the
largest value of the slider of chunks: 64 stages, with four times the instructions of 1F1B.
"""

from __future__ import annotations

import time
from statistics import median

from benchmarks.harness import Row
from minipar import strategies
from minipar.program.collector import paused
from minipar_widgets import Timeline, exploring
from minipar_widgets.exploring import Found, Settings

MOST = 100.0  # ms


def measure(quick: bool = False) -> list[Row]:
    times: dict[str, tuple[float, float]] = {}
    for schedule in strategies.schedules():
        settings = Settings(schedule.name, exploring.STAGES, exploring.MICROBATCHES, chunks=2)
        if exploring.predict(settings).trace is not None:
            times[schedule.name] = _times(settings, 1 if quick else 5)
    most = _times(Settings("interleaved", exploring.STAGES, exploring.MICROBATCHES, chunks=4), 1 if quick else 5)
    first = max(times, key=lambda name: times[name][0])
    again = max(times, key=lambda name: times[name][1])
    what = "explorer, 16 ranks x 64 micro-batches"
    return [
        Row(f"{what}, 1f1b: until the picture", times["1f1b"][0], "ms", MOST, None),
        Row(f"{what}: the slowest schedule", times[first][0], "ms", MOST, None, first),
        Row(f"{what}: the median schedule", median(new for new, _ in times.values()), "ms", None, MOST),
        Row(f"{what}: interleaved, 4 chunks a rank", most[0], "ms", None, MOST, "64 stages"),
        Row(f"{what}, costs alone changed: the slowest", times[again][1], "ms", None, MOST, again),
    ]


def _times(settings: Settings, rounds: int) -> tuple[float, float]:
    """Milliseconds of a move that makes a new program, and of a move that only changes its costs."""
    found = exploring.predict(settings)
    assert found.trace is not None
    view = Timeline(found.trace)
    view.at_once = 1_000  # as in the explorer
    new, kept = [], []
    for _ in range(rounds):
        exploring.forget()
        new.append(_seconds(view, settings))
        kept.append(_seconds(view, settings))
    return median(new) * 1e3, median(kept) * 1e3


def _seconds(view: Timeline, settings: Settings) -> float:
    start = time.perf_counter()
    with paused():
        found: Found = exploring.predict(settings)
        assert found.trace is not None
        view.update(found.trace)
    return time.perf_counter() - start
