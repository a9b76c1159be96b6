"""Schedules: what all have in common, errors in one of one's own, and the family of the list scheduler."""

from __future__ import annotations

import itertools

import pytest

import minipar
from minipar import Backward, BackwardInput, BackwardWeight, Forward, Plan, PlanError, ProgramError, simulate, verify
from minipar.strategies import as_written, find, schedule
from minipar.strategies.layout import wave
from minipar.strategies.schedules import registry
from minipar.strategies.schedules.list_scheduler import backward_first, list_schedule
from tests.fuzz.fingerprints import judge
from tests.interpreters import BUILT_IN


def forward_first(action):
    """Forwards come first, then backwards."""
    return (not isinstance(action, Forward), *backward_first(action))


def test_the_table_of_schedules():
    assert {"gpipe", "naive", "1f1b", "eager-1f1b"} <= set(BUILT_IN)
    for s in (find(name) for name in BUILT_IN):
        assert s.summary
        assert "\n" not in s.summary
        assert s.time
        assert s.peak
        assert s.paper


def test_registering_again_replaces():
    for count in (1, 2):

        @schedule("cell")
        def cell(rank, stages, microbatches, count=count):
            """Run again in a notebook."""
            yield from (Forward(i) for i in range(count))

    assert len(list(find("cell").generate(0, 1, 5))) == 2
    assert find("cell").summary == "Run again in a notebook."
    assert find("cell").time == ""
    assert Plan(schedule="cell").schedule == "cell"


# Errors in a schedule name the rank and the action as its author wrote them -------------------------------------------

F0, F1, B0, B1 = Forward(0), Forward(1), Backward(0), Backward(1)
RIGHT = [F0, F1, B0, B1]


@pytest.fixture(autouse=True)
def own_schedules(monkeypatch):
    monkeypatch.setattr(registry, "_schedules", dict(registry._schedules))


def refusal(rows) -> ProgramError:
    minipar.schedule("mine")(lambda rank, *_: iter(rows[rank]))
    with pytest.raises(ProgramError) as caught:
        Plan(pp=len(rows), microbatches=2, schedule="mine").compile(layers=2 * len(rows))
    return caught.value


@pytest.mark.parametrize(
    ("second", "says"),
    [
        ([F0, B1, F1, B0], "rank 1: Backward(1) comes before Forward(1)"),
        ([F0, F1, F0, B0, B1], "rank 1: Forward(0) comes twice, as actions 0 and 2"),
        ([F0, F1, B0], "rank 1 never yields Backward(1)"),
        ([F0, B0], "rank 1 never yields Forward(1)"),
        ([], "rank 1 never yields Forward(0)"),
        ([F0, B0, B1], "rank 1: Backward(1) comes without Forward(1)"),
        ([F0, F1, BackwardWeight(0), BackwardInput(0), B1], "BackwardWeight(0) comes before BackwardInput(0)"),
        ([F0, F1, BackwardInput(0), B1], "rank 1 never yields BackwardWeight(0)"),
        ([F0, F1, BackwardInput(0), B0], "Backward(0) comes after BackwardInput(0); possible is one of them"),
    ],
)
def test_rank_and_action(second, says):
    error = refusal([RIGHT, second])
    assert says in error.reason
    assert error.reason.startswith("schedule=mine: rank 1")
    assert "layer" not in error.reason


def test_what_no_rank_shows_alone_is_told_as_it_is():
    error = refusal([[F0, B0, F1, B1], [F0, F1, B0, B1]])
    assert error.reason == "deadlock: ranks wait for each other in a circle, 0 -> 1 -> 0"


def test_a_stage_with_nothing_to_train_needs_no_backward():
    """A mistake elsewhere is not told as one of this stage."""
    rows = [[F0, F1], RIGHT, [F0, F1, B0]]
    placement = [[0], [1], [2]]
    assert as_written.mistake(rows, placement, 2, trained={1, 2}) == "rank 2 never yields Backward(1)"
    assert as_written.mistake(rows, placement, 2, trained={0, 1, 2}) == "rank 0 never yields Backward(0)"


def test_a_schedule_that_never_ends():
    minipar.schedule("mine")(lambda rank, *_: (Forward(i % 2) for i in itertools.count()))
    with pytest.raises(PlanError, match=r"rank 0 yields more than 6 actions.*possible is a generator that ends"):
        Plan(microbatches=2, schedule="mine").compile(layers=2)


# The family of schedules that one rule generates contains those of the papers -----------------------------------------

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
