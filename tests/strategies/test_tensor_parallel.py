"""Tensor parallelism of plans: its collectives are as many as the papers count, and stand where forms change."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from minipar import Plan, PlanError, Program, simulate
from minipar.program import Forms, Op, repartitions
from minipar.program.shape import Shape, uniform
from tests.interpreters import RandomCosts


@pytest.mark.parametrize("shared", ["tp=2", "ep=2", "context_parallel=2"])
def test_what_only_runs_forward_has_no_segments(shared):
    words = f"pp=2 microbatches=3 inference=true {shared}"
    plain = Plan.parse(words).compile(layers=6)
    assert Plan.parse(f"{words} checkpoint=2").compile(layers=6).ranks == plain.ranks


# how many collectives -------------------------------------------------------------------------------------------------


def changes(program: Program, rank: int = 0) -> Counter[tuple[str, Op]]:
    """The collectives between nodes on one rank, by the kind of their value and by op."""
    return Counter((ins.reads[0].kind, ins.op) for ins in program.ranks[rank] if repartitions(ins))


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(("layers", "m"), [(1, 1), (2, 1), (3, 4), (8, 2)])
def test_megatron_has_two_sums_a_layer_each_way(layers: int, m: int, tp: int) -> None:
    """2 forward, behind attention and perceptron, and 2 backward, in front of them."""
    found = changes(Plan(tp=tp, microbatches=m).compile(layers=layers))
    wanted = {("output", Op.ALL_REDUCE): 2 * layers * m, ("grad_output", Op.ALL_REDUCE): 2 * layers * m}
    assert found == Counter(wanted)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(("layers", "m"), [(1, 1), (3, 4)])
def test_sequence_parallel_has_gathers_and_scatters_in_their_place(layers: int, m: int, tp: int) -> None:
    """2 of each a layer and way; the output is gathered once more, for the loss."""
    found = changes(Plan(tp=tp, sequence_parallel=True, microbatches=m).compile(layers=layers))
    assert found == Counter(
        {
            ("output", Op.ALL_GATHER): (2 * layers + 1) * m,
            ("output", Op.REDUCE_SCATTER): 2 * layers * m,
            ("grad_output", Op.ALL_GATHER): 2 * layers * m,
            ("grad_output", Op.REDUCE_SCATTER): 2 * layers * m,
        }
    )


@pytest.mark.parametrize(("layers", "length"), [(4, 1), (4, 2), (6, 3), (3, 3)])
@pytest.mark.parametrize("m", [1, 3])
def test_what_runs_again_is_summed_again(layers: int, length: int, m: int) -> None:
    """With 1F1B on one stage the last segment's backward comes at once, so that it does not run again."""
    program = Plan(tp=2, microbatches=m, checkpoint=length).compile(layers=layers)
    found = changes(program)
    assert found["output", Op.ALL_REDUCE] == (2 * layers + 2 * (layers - length)) * m
    assert found["grad_output", Op.ALL_REDUCE] == 2 * layers * m


# groups of the mesh ---------------------------------------------------------------------------------------------------


def test_the_norm_is_that_of_all_ranks_and_counts_each_shard() -> None:
    program = Plan(tp=2, pp=2, dp=2, clip=1.0).compile(layers=2)
    for row in program.ranks:
        (found,) = [ins for ins in row if ins.op is Op.NORM]
        assert found.group == tuple(range(8))


def test_values_cross_stages_in_the_form_in_which_they_are_read() -> None:
    """A partial sum is summed before it is sent: the receiver reads what is whole."""
    program = Plan(tp=2, pp=2, sequence_parallel=True).compile(layers=2)
    sent = [value for row in program.ranks for ins in row if ins.op is Op.SEND for value in ins.reads]
    assert {value.form for value in sent} == {"S1"}
    plain = Plan(tp=2, pp=2).compile(layers=2)
    assert {value.form for row in plain.ranks for ins in row if ins.op is Op.SEND for value in ins.reads} == {""}


# fusing, shapes and plans ---------------------------------------------------------------------------------------------


def test_buckets_and_segments_are_named_by_layers_and_not_by_nodes() -> None:
    program = Plan.parse("tp=2 dp=2 bucket=1,").compile(layers=4)
    sums = [ins.layers for ins in program.ranks[0] if ins.op is Op.ALL_REDUCE and not repartitions(ins)]
    assert sums == [tuple(range(19, 4, -1)), tuple(range(4, -1, -1))]
    for words in ("tp=2 dp=2 bucket=4,", "tp=2 checkpoint=4,", "tp=2 pp=5"):
        with pytest.raises(PlanError, match="4"):
            Plan.parse(words).compile(layers=4)


def test_a_shape_that_does_not_say_how_it_is_divided_is_refused() -> None:
    tied = Shape(2, (*uniform(2).groups, uniform(2).groups[0]._replace(layers=(0, 1))))
    other = uniform(2, bytes_per_layer=8)
    for shape in (tied, other):
        with pytest.raises(PlanError, match="does not say how its layers are divided"):
            Plan(tp=2).compile(shape)
    assert Plan(tp=2).compile(uniform(2)) == Plan(tp=2).compile(layers=2) == Plan(tp=2).compile(2)


def test_branches_are_refused() -> None:
    edges = ((0, 1), (1, 3), (2, 3), (0, 2))
    model = replace(uniform(4), edges=edges, carries=())
    Plan().compile(model)
    divided = replace(model, forms=(Forms(),) * 4, nodes=(1,) * 4)
    with pytest.raises(PlanError, match=r"tp=2: cuts the layers of chains into nodes, not of a model with branches"):
        Plan(tp=2).compile(divided)


# micro-batches in step, and what is named by layers -------------------------------------------------------------------


def forwards(words: str, rank: int = 0) -> list[tuple[str, int]]:
    """Micro-batches of the computing instructions of a rank, in their order."""
    row = Plan.parse(words).compile(layers=1).ranks[rank]
    return [(ins.op.name[0], ins.microbatch) for ins in row if ins.op in (Op.FORWARD, Op.BACKWARD)]


def test_micro_batches_go_in_step_where_forward_and_backward_alternate() -> None:
    apart, together = (forwards(f"tp=2 microbatches=2{more}") for more in ("", " batch_copies=2"))
    assert apart == [("F", 0)] * 3 + [("B", 0)] * 3 + [("F", 1)] * 3 + [("B", 1)] * 3
    assert together == [("F", 0), ("F", 1)] * 3 + [("B", 0), ("B", 1)] * 3


class Costs(RandomCosts):
    """Each node takes 1, each collective 1."""

    def draw(self, *name: object) -> float:
        return 0.0 if "STEP" in str(name[2]) or name[0] in ("bandwidth", "latency") else 1.0


@pytest.mark.parametrize("words", ["tp=2 dp=2", "tp=2 sequence_parallel=true"])
def test_copies_take_less_time_where_collectives_cost_some(words: str) -> None:
    plans = [f"{words} bucket=none microbatches=4 batch_copies={copies}" for copies in (1, 2)]
    apart, together = (simulate(Plan.parse(plan).compile(layers=4), Costs(0)).time for plan in plans)
    assert together < apart


def test_copies_without_effect_are_refused() -> None:
    with pytest.raises(PlanError, match="batch_copies=2: is of ranks that share layers, with several micro-batches"):
        Plan(tp=2, batch_copies=2)


def test_partial_gradients_go_in_buckets() -> None:
    """Where replicas sum them again, they lie in the buckets of that sum already."""

    def sums(words: str) -> list[tuple[int, ...]]:
        row = Plan.parse(words).compile(layers=3).ranks[0]
        return [ins.layers for ins in row if ins.op is Op.ALL_REDUCE and not repartitions(ins)]

    assert sums("context_parallel=2") == [(2, 1, 0)]
    assert sums("context_parallel=2 bucket=none") == [(2,), (1,), (0,)]
    assert sums("context_parallel=2 bucket=1,") == [(2, 1), (0,)]
    assert sums("context_parallel=2 dp=2") == [(2,), (1,), (0,), (2, 1, 0)]


def test_places_are_named_by_layers_and_not_by_nodes() -> None:
    program = Plan.parse("tp=2 pp=2 place=0,1,0").compile(layers=3)
    assert [sorted({node // 5 for node in held}) for held in program.placement] == [[0, 2], [0, 2], [1], [1]]
    for words, says in (("tp=2 pp=2 place=0,1", "place=0,1: of 2 layers, but the model has 3"),):
        with pytest.raises(PlanError, match=says):
            Plan.parse(words).compile(layers=3)
