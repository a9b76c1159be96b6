"""verify accepts correct programs, and every program that it accepts is correct. The judge computes with numbers
in place of tensors, and shares no code with the verifier."""

from graphlib import CycleError, TopologicalSorter
from itertools import permutations, product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import minipar
from minipar import Backward, Forward, Plan, ProgramError, simulate, verify
from minipar.prediction.plain_simulator import start_and_end
from minipar.program import Op, grad
from minipar.strategies.schedules import registry
from tests.fuzz.fingerprints import judge
from tests.interpreters import (
    RandomCosts,
    compiled,
    renamed,
    shapes,
)


def refusal(program) -> str:
    """Why verify refuses a program, or nothing. It may refuse with ProgramError only."""
    try:
        verify(program)
    except ProgramError as error:
        return error.reason or "no reason"
    return ""


def accepted(program) -> bool:
    reason = refusal(program)
    assert reason != "no reason"
    assert "\n" not in reason
    return not reason


def assert_sound(program, what: str) -> bool:
    """What verify accepts must be right, and run in the simulator as in the plain one. Whether it is accepted."""
    if not accepted(program):
        return False
    assert judge(program) == "", what
    costs = RandomCosts(len(program))
    trace = simulate(program, costs)
    assert (trace.starts, trace.ends) == start_and_end(program, costs), what
    return True


# wrong programs ------------------------------------------------------------------------------------------------------

# schedules made at random --------------------------------------------------------------------------------------------


@pytest.fixture
def own_schedules(monkeypatch):
    monkeypatch.setattr(registry, "_schedules", dict(registry._schedules))


@st.composite
def orders(draw):
    """For each stage an order of forwards and backwards: any at all, or one with each backward after its forward."""
    stages, m = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    actions = [*map(Forward, range(m)), *map(Backward, range(m))]
    chosen = []
    for _ in range(stages):
        order = draw(st.permutations(actions))
        kind = draw(st.integers(0, 5))
        if kind:  # put each micro-batch's two actions in the right order
            places = {action: k for k, action in enumerate(order)}
            for i in range(m):
                a, b = sorted((places[Forward(i)], places[Backward(i)]))
                order[a], order[b] = Forward(i), Backward(i)
        if kind == 1:
            order.pop(draw(st.integers(0, len(order) - 1)))
        chosen.append(order)
    return stages, m, chosen


@pytest.mark.usefixtures("own_schedules")
@given(orders(), st.integers(1, 2), st.sampled_from(["none", "flat"]), st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_schedules_are_refused_or_run(order, replicas, bucket, data):
    stages, m, chosen = order
    minipar.schedule("random")(lambda rank, *_: chosen[rank])
    plan = Plan(pp=stages, dp=replicas, microbatches=m, schedule="random", bucket=bucket)
    program = plan.compile(data.draw(shapes(stages + 1)), steps=data.draw(st.integers(1, 2)), check=False)
    if not assert_sound(program, str(chosen)):
        assert judge(program), f"{chosen} was refused, but is right"


def can_run(chosen) -> bool:
    """Whether some order of all actions keeps each stage's order and the pipeline's: nobody waits in a circle."""
    after = {}
    for stage, order in enumerate(chosen):
        for before, action in zip((None, *order), order, strict=False):
            waits = after.setdefault((stage, action), set())
            if before is not None:
                waits.add((stage, before))
            neighbour = stage - 1 if isinstance(action, Forward) else stage + 1
            if 0 <= neighbour < len(chosen):
                waits.add((neighbour, action))
            if isinstance(action, Backward):
                waits.add((stage, Forward(action.microbatch)))
    try:
        TopologicalSorter(after).prepare()
    except CycleError:
        return False
    return True


@pytest.mark.usefixtures("own_schedules")
@pytest.mark.parametrize("stages", [1, 3])
def test_exactly_the_orders_without_a_circle_run(stages):
    actions = [*map(Forward, range(2)), *map(Backward, range(2))]
    orders = [o for o in permutations(actions) if all(o.index(Forward(i)) < o.index(Backward(i)) for i in (0, 1))]
    assert len(orders) == 6
    run = 0
    for chosen in product(orders, repeat=stages):
        minipar.schedule("chosen")(lambda rank, *_, chosen=chosen: chosen[rank])
        program = Plan(pp=stages, microbatches=2, schedule="chosen").compile(layers=stages, check=False)
        reason = refusal(program)
        assert (reason == "") == can_run(chosen), chosen
        assert reason == "" or reason.startswith("deadlock: ranks wait for each other in a circle, ")
        assert (reason == "") == (judge(program) == "")
        run += reason == ""
    assert 0 < run <= 6**stages


def test_the_judge_finds_what_it_is_there_for():
    """(A judge that says "right" to everything would let every test above pass.)"""
    program = compiled("pp=2 dp=2 microbatches=2 bucket=none", 4)
    assert judge(program) == ""
    first, last = program.ranks[0], program.ranks[1]
    k = next(k for k, ins in enumerate(first) if ins.op is Op.ALL_REDUCE)
    other = first[k]._replace(layers=(0,), reads=(grad(0),), writes=(grad(0),))
    swapped = [renamed(ins, 1 - ins.microbatch) if ins.microbatch >= 0 else ins for ins in first]
    early = program.with_rank(0, [*first[: k - 1], first[k], first[k - 1], *first[k + 1 :]])
    wrong = [
        (program.with_rank(0, [ins for ins in first if ins.op is not Op.SEND]), "ranks wait for ever at ['B 0:2 mb0'"),
        (
            program.with_rank(0, [ins for ins in first if ins.op is not Op.ALL_REDUCE]),
            "ranks wait for ever at ['STEP 0:2']",
        ),
        (program.with_rank(0, swapped), "KeyError: Value(kind='output', index=1, microbatch=0"),
        (program.with_rank(0, first[:-1]), "rank 0 ends with grad(0), or without it"),
        (early, "which is under way"),
        (program.with_rank(1, [ins for ins in last if ins.op is not Op.FORWARD]), "which is not there"),
        (
            program.with_rank(0, [*first[:k], first[k + 1], other, *first[k + 2 :]]),
            "meet in different collectives",
        ),
        (program.with_rank(1, [*last, last[-2]]), "which is not there"),
    ]
    for mutant, says in wrong:
        assert says in judge(mutant)
        assert judge(mutant)
