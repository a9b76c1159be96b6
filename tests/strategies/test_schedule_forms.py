"""The closed forms beside the schedules' generators, against the simulator: times, latency, activations."""

from __future__ import annotations

from itertools import product

import pytest

from minipar import Plan, simulate
from minipar.strategies import schedules
from minipar.strategies.schedules.registry import Times, find
from minipar.trace import Trace

SYNCHRONOUS = [one.name for one in schedules() if one.form is not None and one.asynchronous is None]
EQUAL = Times(1.0, 1.0, 1.0)
OTHERS = (Times(1.0, 1.25, 0.75), Times(2.0, 1.5, 1.0), Times(1.0, 2.0, 1.0))
CASES = ((2, 4), (2, 6), (4, 8), (4, 12))


SLICED = ("seq1f1b", "terapipe")


def run(name: str, p: int, m: int, times: Times, **keys: int) -> Trace:
    plan = Plan(pp=p, microbatches=m, schedule=name, **keys)  # type: ignore[arg-type]
    program = plan.compile(layers=1 + max(map(max, plan.placement())), check=False)
    cut = plan.slice_count
    f, i, w, message = times
    return simulate(
        program, forward=f / cut, backward=(i + w) / cut, input_gradient=i / cut, weight_gradient=w / cut,
        latency=message,
    )  # fmt: skip


def chunks_of(name: str) -> tuple[int, ...]:
    return (2, 3) if find(name).options[:1] == ("chunks",) else (find(name).chunks,)


def keys_of(name: str, v: int) -> dict[str, int]:
    return {key: v for key in ("chunks", "slices") if key in find(name).options}


def test_every_schedule_with_an_order_has_a_form() -> None:
    assert [one.name for one in schedules() if one.form is None] == ["ampnet"]


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_times_are_those_of_the_simulator(name: str) -> None:
    form = find(name).form
    assert form is not None
    for (p, m), v in product(CASES, chunks_of(name)):
        v = p if name in SLICED else v
        assert form.time(EQUAL, p, m, v) == pytest.approx(run(name, p, m, EQUAL, **keys_of(name, v)).time)
        for times in OTHERS:
            found = run(name, p, m, times, **keys_of(name, v)).time
            assert form.time(times, p, m, v) == pytest.approx(found, rel=1e-9 if form.exact else 0.06)


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_short_messages_delay_as_in_the_simulator(name: str) -> None:
    """Of two pipelines the number of waits is not so simple; there the form is near."""
    form = find(name).form
    assert form is not None
    short = EQUAL._replace(message=0.01)
    for (p, m), v in product(CASES, chunks_of(name)):
        v = p if name in SLICED else v
        found = run(name, p, m, short, **keys_of(name, v)).time - run(name, p, m, EQUAL, **keys_of(name, v)).time
        made = form.time(short, p, m, v) - form.time(EQUAL, p, m, v)
        assert made == pytest.approx(found, rel=0.5 if name in ("chimera", "dualpipe", *SLICED) else 1e-6)


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_what_ranks_keep_is_what_the_simulator_counts(name: str) -> None:
    form = find(name).form
    assert form is not None
    if name in SLICED:  # (a slice is a micro-batch there)
        return
    for (p, m), v in product(CASES, chunks_of(name)):
        kept = run(name, p, m, EQUAL, **keys_of(name, v)).in_flight()
        assert [form.in_flight(p, m, v, d) for d in range(p)] == pytest.approx(kept)


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw", "pipedream-vertical"])
def test_without_a_flush_a_step_takes_its_work(name: str) -> None:
    form = find(name).form
    assert form is not None
    few, many = (
        simulate(Plan(pp=3, microbatches=6, schedule=name).compile(layers=3, steps=steps), forward=1, backward=2).time
        for steps in (4, 8)
    )
    assert form.time(Times(1, 1, 1), 3, 6, 1) == pytest.approx((many - few) / 4)
    assert [form.versions(3, d) for d in range(3)] == {
        "pipedream": [3, 2, 1], "pipedream-2bw": [2, 2, 2], "pipedream-vertical": [3, 3, 3],
    }[name]  # fmt: skip
