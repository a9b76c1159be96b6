"""Programs of asynchronous pipelines: versions, staleness, closed forms, and what the verifier refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from minipar import Plan, PlanError, ProgramError, simulate, verify
from minipar.program import Group, Op, Program, Staleness, param
from minipar.program.shape import Shape
from minipar.strategies import find
from minipar.strategies.passes.versions import as_it_happened
from minipar.strategies.schedules.ampnet import choose
from minipar.trace.recorded_order import order_of

STASHED = ("pipedream", "pipedream-vertical", "pipedream-2bw")
ALL = (*STASHED, "ampnet")


def compiled(schedule: str, pp: int = 4, m: int = 8, steps: int = 3, layers: int | None = None, **keys) -> Program:
    return Plan(pp=pp, schedule=schedule, microbatches=m, **keys).compile(layers=layers or pp, steps=steps)


@pytest.mark.parametrize("m", [3, 4, 8])
@pytest.mark.parametrize(
    ("schedule", "stale", "versions"),
    [
        ("pipedream", [3, 2, 1, 0], [4, 3, 2, 1]),
        ("pipedream-vertical", [3, 3, 3, 3], [4, 4, 4, 4]),
        ("pipedream-2bw", [1, 1, 1, 1], [2, 2, 2, 2]),
    ],
)
def test_staleness_and_versions_of_four_stages(schedule, stale, versions, m):
    trace = simulate(compiled(schedule, m=m))
    assert trace.staleness() == stale
    assert trace.weight_versions() == versions
    assert trace.in_flight() == [4, 3, 2, 1]


@pytest.mark.parametrize("schedule", STASHED)
@pytest.mark.parametrize(("pp", "m", "steps"), [(1, 2, 3), (4, 3, 2), (8, 16, 2)])
@pytest.mark.parametrize(("forward", "backward"), [(1, 2), (2, 1), (1.5, 1.5)])
def test_one_fill_and_one_drain(schedule, pp, m, steps, forward, backward):
    trace = simulate(compiled(schedule, pp, m, steps), forward=forward, backward=backward)
    assert trace.time == pytest.approx((steps * m + pp - 1) * (forward + backward))
    assert trace.staleness()[0] == (min(1, steps - 1) if schedule == "pipedream-2bw" else min(pp, steps * m) - 1)


# reference/pipelines.md, 1.15: p=4, tF=1, tB=2
AMPNET = [
    (1, 1, 0.25, [0, 0, 0, 0]),
    (4, 1, 0.99, [3, 3, 3, 0]),
    (8, 1, 0.99, [7, 7, 4, 0]),
    (16, 1, 0.99, [12, 8, 4, 0]),
    (16, 4, 0.99, [3, 2, 1, 0]),
]


@pytest.mark.parametrize(("in_flight", "update_every", "utilisation", "stale"), AMPNET)
def test_utilisation_and_staleness_of_ampnet(in_flight, update_every, utilisation, stale):
    program = compiled("ampnet", m=300, steps=1, in_flight=in_flight, update_every=update_every)
    trace = simulate(program)
    verify(trace.program)
    assert round(1 - trace.bubble_of_total(), 2) == utilisation
    assert trace.staleness() == stale
    assert trace.weight_versions() == [1] * 4
    assert max(trace.in_flight()) <= in_flight
    assert max(stale) <= program.contract.bound
    assert program.in_flight == in_flight
    assert trace.program.in_flight is None


@pytest.mark.parametrize("schedule", STASHED)
@pytest.mark.parametrize("other", ["pipedream", "pipedream-vertical"])
def test_versions_are_given_and_freed_anew_in_the_same_order(schedule, other):
    program, plan = compiled(other), Plan(pp=4, schedule=other, microbatches=8)
    rules = find(schedule).asynchronous
    again = as_it_happened(
        replace(program, contract=rules.promise(4, plan.numbers)),
        [plan.actions(rank, 3) for rank in range(4)],
        rules.version,
    )
    verify(again)
    assert again.ranks == compiled(schedule).ranks


def test_ampnet_decides_by_what_has_arrived():
    slow = simulate(compiled("ampnet", steps=2), stage_factors=(1, 1, 3, 1), latency=0.5)
    assert [str(i) for i in slow.program.ranks[1]] != [str(i) for i in compiled("ampnet", steps=2).ranks[1]]
    again = simulate(slow.program, stage_factors=(1, 1, 3, 1), latency=0.5)
    assert again.time == slow.time  # the program as it happened, in its order, takes as long


def test_the_rule_takes_backwards_first():
    assert str(choose(1, 3, 8, 3, 2, 0, 3, 1)) == "Backward(microbatch=0, chunk=0)"
    assert str(choose(1, 3, 8, 3, 2, 1, 3, 1)) == "Forward(microbatch=2, chunk=0)"
    assert choose(1, 3, 8, 3, 3, 1, 3, 1) is None
    assert choose(0, 3, 8, 3, 3, 0, 0, 0) is None  # three are under way
    assert str(choose(2, 3, 8, 3, 1, 0, 1, 0)) == "Backward(microbatch=0, chunk=0)"  # the last rank waits for nobody


def test_a_version_is_freed_by_the_last_that_needs_it():
    row = compiled("pipedream", pp=2, m=4, steps=1).ranks[0]
    freed = {str(value): str(ins) for ins in row for value in ins.frees if value.kind == "param"}
    assert freed == {
        "param(0) v0": "B 0 mb1 v0", "param(0) v1": "B 0 mb2 v1", "param(0) v2": "B 0 mb3 v2",
        "param(0) v3": "STEP 0 v4",
    }  # fmt: skip
    last = compiled("pipedream", pp=2, m=4, steps=1).ranks[1]
    assert all(ins.op is Op.STEP for ins in last for value in ins.frees if value.kind == "param")  # in place


def test_recomputation_uses_the_stashed_version():
    count = 0
    for row in compiled("pipedream", layers=12, checkpoint=1).ranks:
        used = {ins[2:4]: {v.step for v in ins.reads if v.kind == "param"} for ins in row if ins.op is Op.FORWARD}
        for ins in row:
            if ins.op is Op.RECOMPUTE:
                assert {v.step for v in ins.reads if v.kind == "param"} == used[ins[2:4]]
                count += 1
    assert count > 100


# refused --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pp=4 schedule=pipedream-2bw microbatches=2", "microbatches=2 with pp=4.*third version.*microbatches=3"),
        ("pp=2 schedule=pipedream in_flight=2", "in_flight=2: schedule=pipedream has none; possible with ampnet"),
        ("pp=2 schedule=ampnet update_every=0", "update_every=0: must be a whole number of at least 1"),
    ],
)
def test_plans_that_cannot_be(text, words):
    with pytest.raises(PlanError, match=words) as caught:
        Plan.parse(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("schedule", ALL)
def test_ties_across_stages_are_refused_and_within_one_are_not(schedule):
    groups = (*(Group((layer,), (4,)) for layer in range(4)), Group((0, 3), (4,)))
    with pytest.raises(PlanError, match="layers 0, 3 share weights, but are on ranks 0, 1, which update at different"):
        Plan(pp=2, schedule=schedule, microbatches=4).compile(Shape(4, groups))
    within = (*(Group((layer,), (4,)) for layer in range(4)), Group((0, 1), (4,)))
    Plan(pp=2, schedule=schedule, microbatches=4).compile(Shape(4, within), steps=2)


def test_ampnet_needs_something_to_train_on_rank_0_and_no_recomputation():
    groups = (Group((0,), (), 4), *(Group((layer,), (4,)) for layer in range(1, 4)))
    with pytest.raises(PlanError, match="rank 0 has nothing to train"):
        Plan(pp=4, schedule="ampnet").compile(Shape(4, groups))
    Plan(pp=4, schedule="pipedream", microbatches=3).compile(Shape(4, groups), steps=2)
    with pytest.raises(PlanError, match="schedule=ampnet: keeps no weights, so that a layer that is recomputed"):
        Plan(pp=2, schedule="ampnet", checkpoint=1).compile(layers=6)


# mutations: each breaks one promise -----------------------------------------------------------------------------------


def broken(program: Program, rank: int, change) -> str:
    """What the verifier says of a program in which the instructions of one rank were changed."""
    row = list(program.ranks[rank])
    change(row)
    with pytest.raises(ProgramError) as caught:
        verify(program.with_rank(rank, row))
    return str(caught.value).split("\n")[0]


def at(row, text: str) -> int:
    return next(k for k, ins in enumerate(row) if str(ins) == text)


def test_a_backward_must_use_the_version_of_its_forward():
    def change(row):
        k = at(row, "B 0 mb1 v0")
        row[k] = row[k]._replace(reads=tuple(param(0, 1) if v == param(0, 0) else v for v in row[k].reads))

    assert "uses param(0) v1, but the forward of its micro-batch used v0" in broken(compiled("pipedream"), 0, change)


def test_without_a_stash_the_newest_version_must_be_used():
    def change(row):
        k = next(k for k, ins in enumerate(row) if ins.op is Op.STEP)
        row[k] = row[k]._replace(frees=tuple(v for v in row[k].frees if v.kind != "param"))
        k = next(k for k, ins in enumerate(row) if k > at(row, "STEP 0 v1") and ins.op is Op.FORWARD)
        old = tuple(param(0, 0) if v.kind == "param" else v for v in row[k].reads)
        row[k] = row[k]._replace(reads=old, frees=(*row[k].frees, param(0, 0)))

    assert "uses param(0) v0, which is not the newest, v1" in broken(compiled("ampnet"), 0, change)


def test_too_many_versions():
    def change(row):
        k = at(row, "B 0 mb1 v0")
        value = param(0, 0)
        row[k] = row[k]._replace(frees=tuple(v for v in row[k].frees if v != value))
        row[-1] = row[-1]._replace(reads=(*row[-1].reads, value), frees=(*row[-1].frees, value))

    program = compiled("pipedream", pp=2)
    assert "leaves 3 versions of param(0) alive; the program promises 2" in broken(program, 0, change)


def test_too_stale():
    program = compiled("pipedream-2bw", pp=2, m=4)
    tight = replace(program, contract=replace(program.contract, bound=0))
    with pytest.raises(ProgramError, match="applies a gradient of micro-batch 0 of step 1 that is 1 update old"):
        verify(tight)


def test_an_update_has_the_micro_batches_that_were_promised():
    def drop(row):
        k = at(row, "STEP 0 v1")
        del row[k]

    assert "reads param(0) v1" in broken(compiled("pipedream", pp=2), 0, drop)
    program = compiled("ampnet", pp=2, update_every=2)
    more = replace(program, contract=replace(program.contract, every=3))
    with pytest.raises(ProgramError, match="is an update of 2 micro-batches; the program promises 3"):
        verify(more)
    less = replace(program, contract=replace(program.contract, every=1))
    with pytest.raises(ProgramError, match="is an update of 2 micro-batches; the program promises 1"):
        verify(less)


def test_a_step_makes_the_next_version_of_the_newest():
    def change(row):
        k = at(row, "STEP 0 v2")
        row[k] = row[k]._replace(reads=tuple(param(0, 0) if v == param(0, 1) else v for v in row[k].reads))

    program = compiled("pipedream", pp=4)
    assert "does not update the newest parameters, param(0) v1" in broken(program, 0, change)


def test_an_update_has_the_gradients_of_all_replicas_once():
    program = compiled("pipedream", pp=1, m=2, dp=2)
    verify(program)

    def changed(change) -> str:
        rows = []
        for row in program.ranks:
            made = list(row)
            change(made, next(k for k, ins in enumerate(made) if ins.op is Op.ALL_REDUCE))
            rows.append(tuple(made))
        with pytest.raises(ProgramError) as caught:
            verify(replace(program, ranks=tuple(rows)))
        return str(caught.value).split("\n")[0]

    lacking = "grad(0) lacks micro-batch 0 of step 0 of replica 1; ALL_REDUCE of grad(0) over replicas is missing"
    assert lacking in changed(lambda row, k: row.pop(k))
    twice = changed(lambda row, k: row.insert(k, row[k]))
    assert (
        "counts micro-batch 0 of step 0 of replica 0 (layer 0) twice: grad(0) was summed over these ranks before"
        in twice
    )


def test_replicas_sum_while_the_backward_goes_on():
    program = compiled("pipedream-2bw", pp=1, m=2, steps=2, layers=3, dp=2, bucket="none")
    texts = [str(ins) for ins in program.ranks[0] if ins.step == 0 and ins.microbatch != 0]
    assert texts[1:] == [
        "B 2 mb1 v0", "ALL_REDUCE 2 over 0,1", "B 1 mb1 v0", "ALL_REDUCE 1 over 0,1", "B 0 mb1 v0",
        "ALL_REDUCE 0 over 0,1", "STEP 0:3 v1",
    ]  # fmt: skip


def test_a_gradient_that_is_never_applied():
    assert broken(compiled("pipedream", pp=2), 0, lambda row: row.pop()).startswith("rank 0 never applies grad(0)")


def test_a_synchronous_contract_does_not_hold():
    from minipar.program import Synchronous

    program = compiled("pipedream", pp=2)
    assert isinstance(program.contract, Staleness)
    with pytest.raises(ProgramError, match=r"rank 0 begins with param\(0\) v0; possible is"):
        verify(replace(program, contract=Synchronous()))


@pytest.mark.parametrize("name", STASHED)
def test_the_recorded_order_is_that_without_recomputation(name):
    """Also where the first part of a backward is of layers without parameters, which read no version."""
    one, none = (4,), ()
    groups = tuple(Group((l,), one if l in (0, 1, 3, 5) else none) for l in range(6))
    shape = Shape(6, groups)
    plain, again = (
        order_of(Plan.parse(f"pp=2 schedule={name} microbatches=3{rest}").compile(shape, steps=4)).entries
        for rest in ("", " checkpoint=1")
    )
    assert again == plain
