"""split=auto: by the simulator as good as every other split of few layers, and never worse than the usual ones."""

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minipar import DeviceSpec, Plan, PlanError, models, simulate
from minipar.costs import analytic
from minipar.costs.measured import Profile
from minipar.costs.partition import partition
from minipar.costs.recomputation import LayerCosts
from minipar.prediction.program_costs import ProgramCosts
from minipar.program import Group
from minipar.program.shape import Shape, uniform
from minipar.strategies.splitting import fastest

ROWS = 2
PLANS = (
    "pp=3 microbatches=4",
    "pp=2 schedule=interleaved chunks=2 microbatches=4",
    "pp=3 schedule=zb-v microbatches=4",
    "pp=4 schedule=chimera microbatches=4",
    "pp=3 schedule=gpipe microbatches=3 accumulate=2",
    "pp=2 schedule=dualpipe-v microbatches=4",
    "pp=4 schedule=dualpipe microbatches=8",
    "pp=3 schedule=zb-h1 microbatches=4",
    "pp=2 schedule=looped-bfs chunks=2 microbatches=3",
)


def profile(seconds, sizes, share=0.5, step=1e-3):
    """A profile of layers with these forwards; a backward takes twice the time, `share` of it for the input half."""
    n = len(seconds)
    whole = tuple(2 * t for t in seconds)
    return Profile(
        forward={ROWS: tuple(seconds)},
        backward={ROWS: whole},
        output_bytes={ROWS: tuple(sizes)},
        grad_output_bytes={ROWS: tuple(sizes)},
        saved_bytes={ROWS: (0,) * n},
        parameter_bytes=(4,) * n,
        gradient_bytes=(4,) * n,
        optimizer_bytes=(0,) * n,
        step_seconds=step,
        backward_input={ROWS: tuple(share * t for t in whole)},
        backward_weight={ROWS: tuple((1 - share) * t for t in whole)},
    )


def splits(layers, stages):
    for cuts in itertools.combinations(range(1, layers), stages - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, layers)))


def stages_of(plan):
    return 1 + max(map(max, plan.placement()))


def equal(layers, stages):
    return tuple(layers // stages + (s < layers % stages) for s in range(stages))


def by_chain(costs, plan):
    """What the partition by gpipe's formula gives, with links of 1.5 GB/s."""
    times = [a + b for a, b in zip(costs.forward[ROWS], costs.backward[ROWS], strict=True)]
    sizes = [2 * size for size in costs.output_bytes[ROWS]]
    microbatches = plan.total_microbatches
    return partition(times, stages_of(plan), microbatches, activations=sizes, bandwidth=1.5e9).split


def timed(plan, costs, device=None):
    """What gives the simulated seconds of a program."""

    def time_of(program):
        rows = ROWS * plan.dp * plan.total_microbatches
        return simulate(program, ProgramCosts(program, costs, rows, device or DeviceSpec())).time

    return time_of


def step(plan, costs, shape, split, device=None):
    """The simulated seconds of a step with this split."""
    return timed(plan, costs, device)(replace(plan, split=split).compile(shape, costs=costs, check=False))


def auto(plan, costs, shape, time_of=None):
    """The split that the plan takes."""
    return replace(plan, split="auto").layout(shape, costs, time_of=time_of).split


@pytest.mark.parametrize("text", [text for text in PLANS if "dualpipe " not in text])  # (its programs are long)
@settings(deadline=None, max_examples=4, derandomize=True)
@given(st.data())
def test_equal_to_brute_force_over_all_splits(text, data):
    plan = Plan.parse(text)
    layers = stages_of(plan) + data.draw(st.integers(0, 3))
    large = data.draw(st.sampled_from([10, 10**7]))
    dice = random.Random(data.draw(st.integers(0, 10**6)))
    seconds = [dice.choice([0.0, 1e-3, dice.uniform(1, 9) * 1e-3]) for _ in range(layers)]
    costs = profile(seconds, [dice.randrange(large) for _ in range(layers)], data.draw(st.sampled_from([0.3, 0.5])))
    every = {split: step(plan, costs, uniform(layers), split) for split in splits(layers, stages_of(plan))}
    assert every[auto(plan, costs, uniform(layers), timed(plan, costs))] == pytest.approx(min(every.values()), rel=1e-9)


@pytest.mark.parametrize("keys", ["tp=2", "tp=2 sequence_parallel=true", "context_parallel=2"])
def test_layers_that_ranks_share_stay_whole(keys):
    """The split counts the model's own layers, and is that of as many layers which take as long."""
    plan, dice = Plan.parse(f"pp=2 schedule=interleaved microbatches=2 {keys}"), random.Random(5)
    shape = plan._uniform(7)
    times = tuple(dice.uniform(1, 9) for _ in range(shape.layers))
    own = tuple(sum(times[first:end]) for first, end in itertools.pairwise(shape.firsts))
    of_nodes, of_layers = (LayerCosts(each, each, *[(0,) * len(each)] * 3) for each in (times, own))
    split = auto(Plan.parse("pp=2 schedule=interleaved microbatches=2"), of_layers, uniform(7))
    ends = [shape.firsts[end] for end in itertools.accumulate(split, initial=0)]
    assert auto(plan, of_nodes, shape) == tuple(b - a for a, b in itertools.pairwise(ends))


@pytest.mark.parametrize("text", PLANS[:4])
def test_the_search_comes_within_one_percent_of_the_best_split(text):
    plan = replace(Plan.parse(text), microbatches=8)
    dice = random.Random(text)
    layers, stages = 9, stages_of(plan)
    costs = profile([dice.uniform(1, 9) * 1e-3 for _ in range(layers)], [dice.randrange(10**7)] * layers)
    every = {split: step(plan, costs, uniform(layers), split) for split in splits(layers, stages)}
    found = every[auto(plan, costs, uniform(layers), timed(plan, costs))]
    usual = every[equal(layers, stages)], every[by_chain(costs, plan)]
    assert found <= min(1.01 * min(every.values()), *usual)


def test_the_search_ends_early_with_large_programs():
    tried = []

    def time_of(split):
        tried.append(split)
        return abs(split[0] - 90)  # (the best split is far away)

    starts = [(50, 50), (49, 51)]
    assert fastest(starts, time_of, 10**9) == starts[1]
    assert not tried  # not even two programs of this size
    assert fastest(starts, time_of, 10_000)[0] == 51
    assert len(tried) == 4
    assert fastest(starts, time_of, 1) == (90, 10)
    assert fastest(starts, lambda split: 1.0, 1) == (50, 50)


def test_the_links_are_those_of_the_device():
    """A cut is cheap after layer 1. On slow links the pipeline is cut there, on fast ones in the middle."""
    plan = Plan.parse("pp=2 microbatches=6")
    costs = profile([1e-3] * 6, [10**6, 10, 10**6, 10**6, 10**6, 10**6])
    fast, slow = DeviceSpec(bandwidth="100GB/s", latency=0), DeviceSpec(bandwidth="10MB/s", latency=0)
    found = [auto(plan, costs, uniform(6), timed(plan, costs, device)) for device in (fast, slow)]
    assert found == [(3, 3), (2, 4)]


def test_sums_over_replicas_count():
    """With replicas, sums of large gradients decide too; without a judge nobody knows what they take."""
    plan = Plan.parse("pp=2 dp=2 microbatches=4")
    costs = replace(profile([1e-3] * 6, [10] * 6), gradient_bytes=(4, 4, 4, 4, 4 * 10**7, 4 * 10**7))
    shape = Shape(6, tuple(Group((layer,), (size,)) for layer, size in enumerate(costs.gradient_bytes)))
    every = {split: step(plan, costs, shape, split) for split in splits(6, 2)}
    without, found = auto(plan, costs, shape), auto(plan, costs, shape, timed(plan, costs))
    assert every[found] == pytest.approx(min(every.values()))
    assert every[found] < every[without]


def test_times_of_any_unit_have_free_messages():
    costs = analytic.layer_costs("gpt-tiny", 1)
    plan = Plan.parse("pp=2 split=auto microbatches=4")
    program = plan.compile(models.shape("gpt-tiny"), costs=costs)
    times = [a + b for a, b in zip(costs.forward, costs.backward, strict=True)]
    assert [len(held) for held in program.placement] == list(partition(times, 2, 4).split)
    assert str(plan) == "dp=1 pp=2 schedule=1f1b microbatches=4 split=auto"
    assert plan.layout(uniform(6), LayerCosts.equal(6)).split == (3, 3)


@pytest.mark.parametrize("text", ["pp=2 schedule=ampnet microbatches=4", "pp=3 schedule=pipedream microbatches=4"])
def test_schedules_without_a_flush(text):
    plan = Plan.parse(text)
    costs = profile([5e-3, *[1e-3] * 6], [10] * 7)
    assert sum(auto(plan, costs, uniform(7), timed(plan, costs))) == 7


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (None, "split=auto: needs what the layers cost.*profile"),
        (LayerCosts.equal(3), "costs: of 3 layers, but the model has 4"),
    ],
)
def test_errors_say_what_is_possible(costs, message):
    with pytest.raises(PlanError, match=message):
        Plan.parse("pp=2 split=auto").compile(layers=4, costs=costs)
