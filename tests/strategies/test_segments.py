"""`checkpoint=`: its words, its errors, and which segments each choice gives."""

from random import Random

import pytest

from minipar import Backward, Forward, Plan, PlanError, simulate, verify
from minipar.costs.measured import Profile
from minipar.costs.recomputation import LayerCosts, recomputed
from minipar.program import Op
from minipar.strategies.segments import POSSIBLE, budget_of, in_flight, parse, schedules, text
from tests.fuzz.fingerprints import judge
from tests.interpreters import SIMPLE, shape
from tests.recomputing import ByLayer, words

# words ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "means"),
    [("selective", "selective"), ("4", 4), ("3,", (3,)), (["3", "4"], (3, 4)), ("100b", "100b")],
)  # fmt: skip
def test_what_can_be_chosen(given, means):
    assert parse(given) == means
    assert parse(text(means)) == means
    plan = Plan(checkpoint=given)
    assert plan.checkpoint == means
    assert Plan.parse(str(plan)) == plan
    assert len({plan, Plan(checkpoint=means)}) == 1


def test_budgets_in_bytes():
    assert [budget_of(word) for word in ("64MiB", "1.5gib", "2KiB", "7B")] == [64 << 20, 3 << 29, 2048, 7]
    assert [budget_of(choice) for choice in ("none", "sqrt", 4, (3, 7))] == [None] * 4


FORMS = f"must be {POSSIBLE}"
STARTS = "must be layers in ascending order, at which segments begin, such as 3,7,11"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("0", f"checkpoint=0: {FORMS}"),
        (2.5, f"checkpoint=2.5: {FORMS}"),
        ("0MiB", f"checkpoint=0MiB: {FORMS}"),
        ("3,3", f"checkpoint=3,3: {STARTS}"),
        ([1.5], f"checkpoint=[1.5]: {STARTS}"),
    ],
)
def test_refused_choices_name_what_is_possible(given, says):
    if says is None:
        assert parse(given) == int(given)
        return
    with pytest.raises(PlanError) as error:
        Plan(checkpoint=given)
    assert str(error.value).startswith(says)
    assert "\n" not in str(error.value)


COMPILE = "compile(..., costs=profile)"
COSTS = LayerCosts.equal(12, output=1 << 20, saved=3 << 20)


@pytest.mark.parametrize(
    ("plan", "costs", "says"),
    [
        ("checkpoint=13", None, "checkpoint=13: the model has 12 layers; possible are 1 to 12"),
        ("checkpoint=0,3", None, "checkpoint=0,3: segments begin at layers of the model; possible are 1 to 11"),
        (
            "checkpoint=64MiB",
            None,
            f"checkpoint=64MiB: a budget needs the sizes of the layers; give {COMPILE}, or choose sqrt, K or layers",
        ),
        ("checkpoint=2", LayerCosts.equal(5), "costs: of 5 layers, but the model has 12"),
        (
            "pp=3 microbatches=4 checkpoint=1MiB",
            COSTS,
            "checkpoint: a budget of 1.00MiB is too small; the least is 12.00MiB on stage 1, with 2 in flight",
        ),
    ],
)
def test_choices_that_do_not_fit_the_model(plan, costs, says):
    with pytest.raises(PlanError) as error:
        Plan.parse(plan).compile(layers=12, costs=costs)
    assert str(error.value) == says


@pytest.mark.parametrize("plan", ["", "pp=3 microbatches=4", "pp=3 microbatches=4 schedule=gpipe"])
def test_the_least_budget_that_is_named_will_do(plan):
    with pytest.raises(PlanError) as error:
        Plan.parse(f"{plan} checkpoint=1B").compile(layers=12, costs=COSTS)
    named = str(error.value).split("the least is ")[1].split()[0]
    verify(Plan.parse(f"{plan} checkpoint={named}").compile(layers=12, costs=COSTS))


# segments ------------------------------------------------------------------------------------------------------------


def segments(plan, model, costs=None):
    """Per stage the schedule in words, of which the backwards are left out."""
    plan = Plan.parse(plan)
    layout = plan.layout(shape(model) if isinstance(model, int) else model)
    actions = [plan.actions(stage) for stage in range(plan.pp)]
    found = schedules(plan.checkpoint, layout, actions, costs)
    return [" ".join(w for w in words(s).split() if w[0] == "R") for s in found]


def test_every_k_layers_counts_in_each_stage():
    assert segments("checkpoint=2 pp=2", 7) == ["R2* R3* R0* R1*", "R2* R0* R1*"]
    assert segments("checkpoint=5 pp=2", 7) == ["R0* R1* R2* R3*", "R0* R1* R2*"]


def test_a_list_of_layers_is_where_segments_begin():
    assert segments("checkpoint=3,4", 6) == ["R4* R5* R3* R0* R1* R2*"]
    assert segments("checkpoint=1,5 pp=2", 6) == ["R1* R2* R0*", "R2* R0* R1*"]


def test_segments_begin_at_the_first_trainable_layer():
    model = shape(6, frozen=[0, 1])
    assert segments("checkpoint=2", model) == ["R2* R3* R0* R1*"]  # counted from layer 2
    assert segments("checkpoint=1,4", model) == ["R2* R3* R0* R1*"]
    assert segments("checkpoint=2 pp=3", model) == ["", "R0* R1*", "R0* R1*"]
    assert segments("checkpoint=sqrt pp=2", model) == ["R0*", "R2* R0* R1*"]
    assert segments("checkpoint=9MiB pp=3", model, LayerCosts.equal(6)) == ["", "", ""]


def test_sqrt_takes_sizes_and_microbatches_in_flight_into_account():
    def lengths(plan, layers, costs=None):
        program = Plan.parse(f"{plan} checkpoint=sqrt").compile(layers=layers, costs=costs)
        return [max(len(i.layers) for i in row if i.op is Op.RECOMPUTE) for row in program.ranks]

    assert lengths("", 64) == [8]
    assert lengths("", 64, LayerCosts.equal(64, saved=3)) == [4]
    assert lengths("pp=4 microbatches=9", 64) == [8, 7, 6, 4]  # 4, 3, 2, 1 in flight: the square root of 16 f
    assert lengths("pp=2 microbatches=9 schedule=gpipe", 32) == [12, 12]


def test_micro_batches_in_flight():
    assert in_flight([Forward(0), Backward(0), Forward(1), Backward(1)]) == 1
    assert in_flight([Forward(0), Forward(1), Backward(0), Forward(2), Backward(1), Backward(2)]) == 2
    assert in_flight([]) == 1


# budgets -------------------------------------------------------------------------------------------------------------


def unequal(layers, seed):
    random = Random(seed)
    times = [tuple(random.uniform(0.5, 2) for _ in range(layers)) for _ in range(2)]
    output, saved = (tuple(random.randrange(most // 4, most) for _ in range(layers)) for most in (10**6, 5 * 10**6))
    return LayerCosts(*times, output, saved, output)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("schedule", SIMPLE)
@pytest.mark.parametrize("plan", ["microbatches=2", "pp=2 microbatches=5", "pp=3 split=6,4,2 microbatches=4 dp=2"])
def test_simulated_memory_stays_within_the_budget(plan, schedule, fused, monkeypatch):
    if not fused:
        monkeypatch.setattr("minipar.strategies.passes.fuse.fuse", lambda instructions, *_: list(instructions))
    costs = unequal(12, 3)
    plain = Plan.parse(f"{plan} schedule={schedule}").compile(layers=12)
    most = max(simulate(plain, ByLayer(costs)).peak_memory())
    times = []
    for part in (1.3, 0.8, 0.6):
        budget = int(part * most)
        program = Plan.parse(f"{plan} schedule={schedule} checkpoint={budget}B").compile(layers=12, costs=costs)
        verify(program)
        assert judge(program) == ""
        trace = simulate(program, ByLayer(costs))
        assert max(trace.peak_memory()) <= budget
        times.append(sum(trace.busy))
    assert times == sorted(times)
    assert times[0] == pytest.approx(sum(simulate(plain, ByLayer(costs)).busy))
    assert times[2] > 1.001 * times[0]


def test_frozen_layers_and_their_outputs_fit_into_the_budget_too(monkeypatch):
    monkeypatch.setattr("minipar.strategies.passes.fuse.fuse", lambda instructions, *_: list(instructions))
    costs, model = unequal(9, 5), shape(9, frozen=[0, 1, 2, 3])
    for plan in ("microbatches=3", "pp=2 microbatches=3 schedule=gpipe", "pp=3 microbatches=4"):
        with pytest.raises(PlanError) as error:
            Plan.parse(f"{plan} checkpoint=1B").compile(model, costs=costs)
        named = str(error.value).split("the least is ")[1].split()[0]
        program = Plan.parse(f"{plan} checkpoint={named}").compile(model, costs=costs)
        assert judge(program) == ""
        assert max(simulate(program, ByLayer(costs)).peak_memory()) <= budget_of(named)


def test_a_profile_gives_the_sizes():
    costs = unequal(4, 1)
    tables = {8: costs.forward}, {8: costs.backward}, {8: costs.output}, {8: costs.gradient}, {8: costs.saved}
    profile = Profile(*tables, (0,) * 4, (0,) * 4, (0,) * 4, 0.0)
    plan = Plan(checkpoint=f"{sum(costs.saved) // 2 + sum(costs.output)}B")
    program = plan.compile(layers=4, costs=profile)
    assert program == plan.compile(layers=4, costs=costs)
    assert any(ins.op is Op.RECOMPUTE for ins in program.ranks[0])


def test_a_small_budget_lets_layers_run_more_than_twice():
    costs = LayerCosts.equal(32)
    plan = Plan(checkpoint="6B")
    layout = plan.layout(shape(32))
    (schedule,) = schedules(plan.checkpoint, layout, [plan.actions(0)], costs)
    assert recomputed(schedule) > 32
    program = plan.compile(layers=32, costs=costs)
    assert judge(program) == ""
    assert simulate(program, ByLayer(costs)).time == 3 * 32 + recomputed(schedule)
