"""The family of schedules that one rule generates contains the schedules of the papers."""

from __future__ import annotations

import pytest

from minipar import Plan, PlanError, simulate, verify
from minipar.strategies import schedule
from minipar.strategies.layout import wave
from minipar.strategies.schedules import registry
from minipar.strategies.schedules.list_scheduler import forward_first, list_schedule
from tests.fuzz.verify_interpreter import judge

MEMBERS = {
    "gpipe": lambda p, m: {"ahead": lambda d: m, "rule": forward_first},
    "naive": lambda p, m: {"ahead": lambda d: m if d else 1},
    "1f1b": lambda p, m: {"ahead": lambda d: p - d},
    "eager-1f1b": lambda p, m: {"ahead": lambda d: 2 * (p - 1 - d) + 1},
    "zb-h1": lambda p, m: {"ahead": lambda d: p - d, "waiting": lambda d: d, "rule": forward_first},
    "zb-h2": lambda p, m: {"ahead": lambda d: 2 * (p - d) - 1, "waiting": lambda d: 2 * d, "rule": forward_first},
}


@pytest.mark.parametrize("name", MEMBERS)
def test_papers_are_members(name):
    for p in (1, 2, 3, 4, 8):
        for m in (1, 2, 4, 7, 8, 15, 20):
            if m < {"zb-h1": p, "zb-h2": 2 * p - 1}.get(name, 1):
                continue  # (with fewer micro-batches weight halves fill gaps that the paper leaves)
            plan = Plan(pp=p, microbatches=m, schedule=name)
            assert list_schedule(p, m, **MEMBERS[name](p, m)) == [plan.actions(rank) for rank in range(p)]


@pytest.fixture
def own_schedules(monkeypatch):
    monkeypatch.setattr(registry, "_schedules", dict(registry._schedules))


@pytest.mark.usefixtures("own_schedules")
@pytest.mark.parametrize("waiting", [None, lambda d: 2])
@pytest.mark.parametrize("placement", [None, wave])
def test_any_limits_give_a_program_that_runs_and_keeps_them(waiting, placement):
    chunks = 1 if placement is None else 2
    keys = {} if placement is None else {"placement": wave, "chunks": 2}
    for more in (1, 2, 5):

        @schedule("family", **keys)
        def family(rank, ranks, microbatches, more=more):
            made = list_schedule(
                ranks, microbatches, ahead=lambda d: chunks * ranks + more, waiting=waiting, times=(1, 1.5, 0.5), **keys
            )
            yield from made[rank]

        for p, m in ((1, 3), (2, 5), (4, 8)):
            program = Plan(pp=p, microbatches=m, schedule="family").compile(layers=2 * p)
            verify(program)
            assert judge(program) == ""
            room = chunks * p + more + (0 if waiting is None else 2)
            assert max(simulate(program).in_flight()) <= room / chunks


def test_limits_that_let_nothing_go_on():
    with pytest.raises(PlanError, match="list scheduler: its limits stop it after 0 actions of rank 0"):
        list_schedule(2, 4, ahead=lambda d: 0)
    with pytest.raises(PlanError, match="list scheduler: its limits stop it after"):
        list_schedule(2, 4, ahead=lambda d: 1, placement=wave, chunks=2)  # its only one waits for the next chunk
