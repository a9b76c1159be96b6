"""Revolve and rotor, compared with a search of all schedules."""

from itertools import product
from math import inf
from random import Random

import pytest

from minipar import PlanError, verify
from minipar.costs.recomputation import Chain, LayerCosts, halves, keep_everything, memory, moves, recomputed, time
from minipar.costs.reversal import minimum, needed, rotor
from minipar.program import Op
from tests.fuzz.fingerprints import judge
from tests.recomputing import single_device

# rotor ---------------------------------------------------------------------------------------------------------------


def every_draft(layers):
    """Every order of forwards, recomputations and backwards in which no layer is saved twice at a time."""

    def back(layer, draft, there):
        if layer < 0:
            yield draft
            return
        if layer in there:
            yield from back(layer - 1, [*draft, (Op.BACKWARD, layer, False)], there - {layer})
            return
        for start in range(layer + 1):
            if there.isdisjoint(range(start, layer + 1)):
                for flags in product([False, True], repeat=layer - start):
                    again = [(Op.RECOMPUTE, start + k, saves) for k, saves in enumerate((*flags, True))]
                    yield from back(layer, draft + again, there | {l for _, l, saves in again if saves})

    for flags in product([False, True], repeat=layers):
        first = [(Op.FORWARD, layer, saves) for layer, saves in enumerate(flags)]
        yield from back(layers - 1, first, {layer for layer, saves in enumerate(flags) if saves})


def persistent(schedule):
    """Whether an output that was left behind stays until the backward that needs it."""
    return all(
        not move.drops or move.op is Op.BACKWARD or (k and schedule[k - 1][:2] != (Op.BACKWARD, move.layer - 1)
                                                     and schedule[k - 1].layer == move.layer - 1)
        for k, move in enumerate(schedule)
    )  # fmt: skip


def best_times(costs, in_flight):
    """For each budget from 0 the least time of the schedules (time, held, peak) that fit."""
    sizes = [((in_flight - 1) * held + peak, spent) for spent, held, peak in costs]
    return [min((t for size, t in sizes if size <= b), default=inf) for b in range(max(s for s, _ in sizes) + 2)]


@pytest.mark.parametrize("layers", [1, 2, 3, 4])
@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_rotor_is_as_fast_as_the_best_of_all_schedules_in_every_budget(layers, in_flight):
    schedules = [moves(draft) for draft in every_draft(layers)]
    assert len(schedules) == [0, 2, 6, 24, 120][layers]
    if in_flight == 1:  # backward follows at once: nothing is recomputed first
        schedules = [s for s in schedules if halves(s)[1][0].op is Op.BACKWARD]
    else:
        schedules = [s for s in schedules if persistent(s)]
    random = Random(layers)
    tight = 0
    for _ in range(8 if layers < 3 else 2):
        times, sizes = [[tuple(random.randint(*r) for _ in range(layers)) for _ in range(3)] for r in ((1, 5), (0, 4))]
        chain = Chain(times[0], times[1], *sizes, random.randint(0, 3), random.random() < 0.6)
        best = best_times([(time(chain, s), *memory(chain, s)) for s in schedules], in_flight)
        for budget, least in enumerate(best):
            try:
                found = rotor(chain, budget, in_flight)
            except PlanError:
                assert least == inf
                continue
            assert time(chain, found) == least
            assert needed(chain, found, in_flight) <= budget
            tight += recomputed(found) > 0
        smallest = next(budget for budget, least in enumerate(best) if least < inf)
        assert minimum(chain, in_flight) == smallest
    assert tight or layers == 1


def test_with_enough_memory_nothing_is_recomputed():
    chain = LayerCosts.equal(20, saved=3).chain(0, 20)
    plain = keep_everything(20)
    assert rotor(chain, memory(chain, plain)[1]) == plain
    assert recomputed(rotor(chain, memory(chain, plain)[1] - 1)) == 1


def unequal(layers, seed=0):
    """Layers with odd sizes of megabytes, which have no common divisor."""
    random = Random(seed)
    times = [tuple(random.uniform(0.5, 1.5) for _ in range(layers)) for _ in range(2)]
    sizes = [tuple(random.randrange(10**6, 4 * 10**6) for _ in range(layers)) for _ in range(3)]
    return Chain(*times, sizes[0], tuple(4 * x for x in sizes[1]), sizes[0])


@pytest.mark.parametrize("in_flight", [1, 3])
def test_real_sizes_are_rounded_to_the_safe_side(in_flight):
    chain = unequal(24)
    plain = needed(chain, keep_everything(24), in_flight)
    before = -1
    for part in (0.9, 0.6, 0.3, 0.15):
        found = rotor(chain, int(part * plain), in_flight)
        assert needed(chain, found, in_flight) <= part * plain
        assert recomputed(found) > before
        before = recomputed(found)


@pytest.mark.parametrize("in_flight", [1, 4])
def test_a_budget_that_is_too_small_is_refused_with_one_that_will_do(in_flight):
    chain = unequal(10)
    with pytest.raises(PlanError) as error:
        rotor(chain, 1000, in_flight)
    assert str(error.value).startswith("budget of 1000 bytes: too small; with all recomputation it takes ")
    least = int(str(error.value).split()[-1])
    assert least == minimum(chain, in_flight)
    assert needed(chain, rotor(chain, least, in_flight), in_flight) <= least
    with pytest.raises(PlanError):
        rotor(chain, int((0.99 if in_flight == 1 else 0.9) * least), in_flight)


def test_a_schedule_in_which_layers_run_three_times_is_a_program():
    chain = LayerCosts.equal(16).chain(0, 16)
    schedule = rotor(chain, minimum(chain))
    runs = [sum(m.layer == 0 and m.op is not Op.BACKWARD for m in schedule)]
    assert runs[0] >= 3
    program = single_device(16, schedule, microbatches=2)
    verify(program)
    assert judge(program) == ""
