"""Schedules of one chain: what they keep, what they cost, and the simple ways to choose one."""

import math
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minipar import PlanError, simulate, verify
from minipar.costs.measured import Profile
from minipar.costs.recomputation import (
    LayerCosts,
    at_once,
    chen,
    every,
    greedy,
    halves,
    in_segments,
    keep_everything,
    memory,
    moves,
    needed,
    recomputed,
    square_root,
    time,
)
from minipar.costs.reversal import rotor
from minipar.program import Op
from tests.fuzz.fingerprints import judge
from tests.recomputing import ByLayer, chains, drafts, single_device, words


def test_a_schedule_in_segments_reads_as_in_the_picture():
    schedule = at_once(in_segments(6, every(6, 2)))
    assert words(schedule) == "F0 F1 F2 F3 F4* F5* B5 B4 R2* R3* B3 B2 R0* R1* B1 B0"
    kept = [m.layer for m in schedule if m.op is Op.FORWARD and m.layer and not m.drops]
    assert kept == [2, 4, 5]  # their inputs stay: two checkpoints, and what the last segment needs
    again = [(m.layer, m.hands) for m in schedule if m.op is Op.RECOMPUTE]
    assert again == [(2, True), (3, False), (0, True), (1, False)]


def test_without_backward_at_once_the_last_segment_is_recomputed_too():
    assert words(in_segments(4, every(4, 2))) == "F0 F1 F2 F3 R2* R3* B3 B2 R0* R1* B1 B0"
    assert words(keep_everything(3)) == "F0* F1* F2* B2 B1 B0"
    assert at_once(keep_everything(3)) == keep_everything(3)
    assert recomputed(in_segments(4, every(4, 2))) == 4
    assert [len(half) for half in halves(keep_everything(3))] == [3, 3]


def test_layers_in_no_segment_keep_what_they_save():
    assert words(in_segments(4, [range(1, 3)])) == "F0* F1 F2 F3* B3 R1* R2* B2 B1 B0"


def test_the_last_segment_takes_what_is_left():
    assert every(7, 3) == (range(3), range(3, 6), range(6, 7))
    assert every(2, 9) == (range(2),)


@given(st.data())
def test_memory_and_time_are_those_of_the_simulated_program(data):
    """Any schedule, also one in which layers run many times, is a program: it verifies, and costs what is said here."""
    chain = data.draw(chains(data.draw(st.integers(1, 6)), ends=True, given=0))
    schedule = moves(data.draw(drafts(len(chain))))
    program = single_device(len(chain), schedule)
    verify(program)
    assert judge(program) == ""
    trace = simulate(program, ByLayer(chain))
    _, backward = halves(schedule)
    direct = schedule if backward[0].op is Op.BACKWARD else at_once(schedule)
    assert trace.peak_memory() == [memory(chain, direct)[1]]
    assert trace.time == pytest.approx(time(chain, direct))
    assert sum(ins.op is Op.RECOMPUTE for ins in program.ranks[0]) == recomputed(direct)


def test_a_forward_that_keeps_takes_no_more_than_the_recomputation_it_replaces():
    chain = LayerCosts.equal(12, output=2, saved=3).chain(0, 12)
    for length in range(1, 13):
        schedule = in_segments(12, every(12, length))
        assert memory(chain, at_once(schedule))[1] <= memory(chain, schedule)[1] + chain.output[0]
        assert time(chain, schedule) - time(chain, at_once(schedule)) == len(every(12, length)[-1])


# the length of segments ----------------------------------------------------------------------------------------------


def test_equal_layers_get_the_length_of_the_formula_or_one_that_needs_less():
    for layers, output, extra, flying in product((12, 48, 64), (1, 2), (0, 1, 3, 14), (1, 4)):
        chain = LayerCosts.equal(layers, output, extra).chain(0, layers)
        usual = min(layers, round(math.sqrt(layers * flying * output / (output + extra))))
        found = square_root(layers, chain, flying)
        assert abs(found - usual) <= 1
        assert found == usual or needs(chain, found, flying) < needs(chain, usual, flying)


def needs(chain, length, flying):
    """Bytes of `flying` micro-batches with segments of this length, counted layer by layer."""
    schedule = in_segments(len(chain), every(len(chain), length))
    return needed(chain, at_once(schedule) if flying == 1 else schedule, flying)


@given(st.data(), st.sampled_from([1, 2, 5]))
def test_uneven_layers_get_the_length_of_least_memory(data, flying):
    chain = data.draw(chains(data.draw(st.integers(1, 12))))
    every_length = [needs(chain, length, flying) for length in range(1, len(chain) + 1)]
    assert needs(chain, square_root(len(chain), chain, flying), flying) == min(every_length)


def test_the_length_of_one_large_layer_among_small_ones():
    sizes = (1, 1, 1, 1, 1, 1, 1, 1, 200)
    chain = LayerCosts((1.0,) * 9, (2.0,) * 9, (16,) * 9, sizes, (16,) * 9).chain(0, 9)
    usual = round(math.sqrt(9 * sum(chain.output) / (sum(chain.output) + sum(sizes))))
    found = square_root(9, chain)
    assert (usual, found) == (2, 8)
    assert (needs(chain, usual, 1), needs(chain, found, 1)) == (296, 248)


def test_with_many_microbatches_in_flight_segments_are_longer():
    assert [square_root(16, None, f) for f in (1, 4, 16, 64)] == [4, 8, 16, 16]
    assert square_root(1) == 1


# Chen ----------------------------------------------------------------------------------------------------------------


def test_a_greedy_segment_ends_when_it_exceeds_the_limit():
    chain = LayerCosts((1,) * 5, (2,) * 5, (1, 1, 1, 1, 1), (3, 0, 0, 5, 0), (1,) * 5).chain(0, 5)
    assert greedy(chain, 4) == (range(2), range(2, 4), range(4, 5))
    assert greedy(chain, 0) == tuple(range(k, k + 1) for k in range(5))
    assert greedy(chain, 99) == (range(5),)


def segmentations(layers):
    """Every way to cut a chain into segments."""
    for cuts in product([False, True], repeat=layers - 1):
        starts = [0, *(k + 1 for k, cut in enumerate(cuts) if cut), layers]
        yield [range(a, b) for a, b in pairwise(starts)]


@given(st.data())
def test_chen_lies_between_the_best_segments_and_the_optimum(data):
    chain = data.draw(chains(data.draw(st.integers(1, 6)), ends=True))
    all_of_them = [at_once(in_segments(len(chain), cut)) for cut in segmentations(len(chain))]
    for budget in range(memory(chain, keep_everything(len(chain)))[1] + 2):
        possible = [time(chain, s) for s in all_of_them if memory(chain, s)[1] <= budget]
        try:
            found = chen(chain, budget)
        except PlanError:
            continue
        assert memory(chain, found)[1] <= budget
        assert time(chain, found) >= min(possible)
        assert time(chain, rotor(chain, budget)) <= time(chain, found)


def test_chen_on_equal_layers_is_the_best_equal_split():
    chain = LayerCosts.equal(64).chain(0, 64)
    even = [at_once(in_segments(64, every(64, length))) for length in range(1, 65)]
    assert time(chain, chen(chain, 16)) == min(time(chain, s) for s in even if memory(chain, s)[1] <= 16)
    with pytest.raises(PlanError, match=r"^budget of 15 bytes: below 16, the least that greedy segments can do$"):
        chen(chain, 15)
    assert memory(chain, chen(chain, 16))[1] == 16


# sizes ---------------------------------------------------------------------------------------------------------------


def profile():
    return Profile(
        forward={2: (1.0, 2.0), 4: (3.0, 4.0)},
        backward={2: (0.0, 5.0), 4: (0.0, 6.0)},
        output_bytes={2: (8, 16), 4: (16, 32)},
        grad_output_bytes={2: (4, 16), 4: (8, 32)},
        saved_bytes={2: (1, 2), 4: (3, 4)},
        parameter_bytes=(4, 4),
        gradient_bytes=(4, 4),
        optimizer_bytes=(0, 0),
        step_seconds=0.0,
    )


def test_layer_costs_of_a_profile():
    assert LayerCosts.of(profile(), 2) == LayerCosts((1.0, 2.0), (0.0, 5.0), (8, 16), (1, 2), (4, 16))
    assert LayerCosts.of(profile()).output == (16, 32)  # the largest micro-batch
    with pytest.raises(PlanError, match=r"^rows=3: not in the profile, which has 2, 4$"):
        LayerCosts.of(profile(), 3)


def test_a_part_of_the_model_as_a_chain():
    costs = LayerCosts((1, 2, 3), (4, 5, 6), (7, 8, 9), (1, 1, 2), (7, 8, 0))
    middle = costs.chain(1, 2)
    assert (middle.forward, middle.output, middle.saved, middle.gradient) == ((2,), (8,), (1,), (8,))
    assert (middle.given, middle.ends, len(middle)) == (7, False, 1)
    assert costs.chain(1, 3, first=1).given == 0  # nothing before it is trained
    assert costs.chain(1, 3).ends


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        (((1.0,), (1.0,), (1, 1), (1,), (1,)), "layer costs: 1, 1, 2, 1, 1 entries; tables need one a layer"),
        (((), (), (), (), ()), "layer costs: 0, 0, 0, 0, 0 entries"),
        (((-1.0,), (1.0,), (1,), (1,), (1,)), "layer costs: times and bytes must be finite numbers of at least 0"),
        (((1.0,), (math.nan,), (1,), (1,), (1,)), "layer costs: times and bytes must be finite"),
    ],
)
def test_refused_layer_costs(tables, says):
    with pytest.raises(PlanError) as error:
        LayerCosts(*tables)
    assert str(error.value).startswith(says)
