"""An error in a schedule names the rank and the action as its author wrote them."""

import itertools

import pytest

import minipar
from minipar import Backward, BackwardInput, BackwardWeight, Forward, Plan, PlanError, ProgramError
from minipar.strategies import as_written
from minipar.strategies.schedules import registry

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


@pytest.mark.parametrize("action", [Forward(-1), Forward(2), Forward(0, 1), Forward("0"), "Forward(0)", None])
def test_actions_that_are_none(action):
    minipar.schedule("mine")(lambda rank, *_: iter([action]))
    with pytest.raises(PlanError, match="schedule=mine"):
        Plan(microbatches=2, schedule="mine").compile(layers=2)
