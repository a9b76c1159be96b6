"""Orders made by hand: words, the engine's verdict, and code that gives the same program again."""

from __future__ import annotations

import linecache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minipar import Plan, simulate, strategies
from minipar.errors import MiniparError, PlanError
from minipar.program import Backward, BackwardWeight, Forward
from minipar_widgets import judging, orders
from minipar_widgets.orders import Order

SCHEDULES = [s.name for s in strategies.schedules() if s.asynchronous is None and "slices" not in s.options]


def _changed(order: Order, rank: int, *words: str) -> Order:
    rows = list(order.words)
    rows[rank] = words
    return Order(tuple(rows), order.microbatches, order.stages)


def test_words_are_actions() -> None:
    for word in ("F0", "B12", "I3.1", "W2.3", "F7&", "F7.1&"):
        assert orders.word_of(orders.action_of(word)) == word
    assert orders.action_of("F7.1") == Forward(7, 1)
    assert orders.action_of("W2") == BackwardWeight(2)
    for word in ("", "X0", "F", "B-1", "B0&", "F0.", "F0 ", "f0", "F9999999"):
        with pytest.raises(PlanError, match="no action"):
            orders.action_of(word)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_can_be_taken_in_hand(name: str) -> None:
    """Taken from its name, its plan and its program alike; its times are those of the schedule itself."""
    plan = Plan(pp=4, microbatches=8, schedule=name)
    order = orders.order_of(name, 4, 8)
    program = plan.compile(layers=order.layers)
    assert order == orders.order_of(plan)
    if "&" not in str(order.words):  # (which a program no longer says)
        assert order.words == orders.order_of(program).words
    found = judging.judge(order, "test-by-hand")
    truth = simulate(program)
    assert found.reason == ""
    assert found.trace is not None
    assert (found.trace.starts, found.trace.ends) == (truth.starts, truth.ends)
    assert name in found.same_as or name == "interleaved"  # (which has a parameter more)
    ends = [span[1] for row in found.spans for span in row if span is not None]
    assert len(ends) == sum(map(len, order.words))
    assert max(ends) == truth.time


def test_asynchronous_and_sliced_schedules_are_refused_in_words() -> None:
    for name in ("pipedream", "ampnet", "terapipe"):
        with pytest.raises(PlanError, match="possible are .*1f1b"):
            orders.order_of(name)
    with pytest.raises(MiniparError, match="possible are up to 1000"):
        orders.order_of("gpipe", 16, 64)


def test_deadlock_names_the_guilty_and_shows_how_far_the_ranks_come() -> None:
    order = orders.order_of("gpipe", 2, 2)
    # rank 1 wants micro-batch 1 first, which rank 0 sends only after a backward that needs rank 1
    stuck = _changed(_changed(order, 0, "F0", "B0", "F1", "B1"), 1, "F1", "F0", "B1", "B0")
    found = judging.judge(stuck, "test-by-hand")
    assert found.trace is None
    assert "deadlock" in found.reason
    assert found.guilty == {(0, 1), (1, 0)}
    assert found.spans == (((0.0, 1.0), None, None, None), (None, None, None, None))


def test_missing_and_doubled_words_are_complaints_too() -> None:
    order = orders.order_of("gpipe", 2, 2)
    assert "missing" in judging.judge(_changed(order, 1, "F0", "F1", "B0"), "test-by-hand").reason
    assert "doubled" in judging.judge(_changed(order, 1, "F0", "F1", "B0", "B1", "B1"), "test-by-hand").reason
    assert "no action" in judging.judge(_changed(order, 1, "F0", "F1", "B0", "Q1"), "test-by-hand").reason
    assert "micro-batches count from 0 to 1" in judging.judge(_changed(order, 1, "F5"), "test-by-hand").reason


def test_a_forward_that_lost_its_backward_is_an_ordinary_one() -> None:
    assert orders.actions_of(["F0&", "B1", "F1&", "F2"]) == [Forward(0, 0, True), Backward(1), Forward(1), Forward(2)]
    assert orders.actions_of(["F0&", "B1"])[0].beside  # type: ignore[union-attr]
    assert not orders.actions_of(["F1&", "F2"])[0].beside  # type: ignore[union-attr]


def _programs(order: Order, name: str) -> tuple[str, str]:
    """The program of the registered order, and that of its exported code, which is run as a file of its own."""
    plan = Plan(pp=len(order.words), microbatches=order.microbatches, schedule=name)
    judging.register(order, name)
    registered = plan.compile(layers=order.layers, check=False)
    judging.register(_changed(order, 0, "F0"), name)  # so that only the code can bring it back
    text = orders.code(order, name)
    linecache.cache["exported.py"] = (len(text), None, text.splitlines(True), "exported.py")
    exec(compile(text, "exported.py", "exec"), {"__name__": "exported"})
    again = Plan(pp=len(order.words), microbatches=order.microbatches, schedule=name)
    return registered.text(limit=10_000), again.compile(layers=order.layers, check=False).text(limit=10_000)


@pytest.mark.parametrize("name", SCHEDULES)
def test_exported_code_gives_the_same_program(name: str) -> None:
    registered, exported = _programs(orders.order_of(name, 4, 8), "test-by-hand")
    assert registered == exported


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_order_of_a_rank_is_judged_and_exported(data: st.DataObject) -> None:
    """Whatever is dragged where: a prediction or a complaint, never an exception; what can run is exported as it is."""
    order = orders.order_of(data.draw(st.sampled_from(["1f1b", "zb-h1", "zb-v", "chimera"])), 2, 4)
    for rank in range(2):
        order = _changed(order, rank, *data.draw(st.permutations(order.words[rank])))
    found = judging.judge(order, "test-by-hand")
    assert (found.trace is None) == bool(found.reason)
    assert all(place[1] < len(order.words[place[0]]) for place in found.guilty)
    if found.trace is not None:
        registered, exported = _programs(order, "test-by-hand")
        assert registered == exported


def test_names_of_functions_are_python() -> None:
    for name, function in (("by-hand", "by_hand"), ("7", "by_hand"), ("class", "by_hand"), ("mine", "mine")):
        text = orders.code(orders.order_of("gpipe", 2, 2), name)
        assert f"def {function}(rank, stages, microbatches):" in text


def test_code_of_another_size_is_refused_in_words() -> None:
    exec(orders.code(orders.order_of("gpipe", 2, 2), "test-sized"), {})
    with pytest.raises(PlanError, match="possible are pp=2 microbatches=2"):
        Plan(pp=3, microbatches=2, schedule="test-sized").compile(layers=3)
    judging.register(orders.order_of("gpipe", 2, 2), "test-sized")
    with pytest.raises(PlanError, match="possible are pp=2 microbatches=2"):
        Plan(pp=3, microbatches=2, schedule="test-sized").compile(layers=3)
