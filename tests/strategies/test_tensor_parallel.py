"""Tensor parallelism of plans: every schedule verifies with it, and its collectives are as many as the papers count."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from minipar import Plan, PlanError, Program, simulate, verify
from minipar.prediction.plain_simulator import start_and_end
from minipar.program import BACKWARDS, Forms, Op, repartitions
from minipar.program.shape import Shape, uniform
from tests.interpreters import BUILT_IN, RandomCosts, brute_force, enough, even, stages_of

COPIED = ("chimera", "dualpipe")  # with copies of stages, whose gradients are summed whole
REST = (
    "dp=2 zero=1 clip=1 microbatches=4",
    "dp=2 zero=2 accumulate=2 microbatches=4 bucket=flat",
    "dp=2 zero=3 checkpoint=1 microbatches=4 reduce=step",
    "checkpoint=sqrt offload=optimizer microbatches=4",
    "dp=2 precision=bf16 bucket=none overlap=none microbatches=4",
    "dp=2 inference=true microbatches=4",
    "sequence_parallel=true dp=2 clip=1 microbatches=4",
)


def planned(words: str, schedule: str, pp: int, tp: int = 2) -> Plan:
    keys = dict(word.split("=") for word in words.split())
    keys |= {"tp": str(tp), "pp": str(pp), "schedule": schedule}
    keys["microbatches"] = str(enough(schedule, pp, int(keys["microbatches"])))
    return Plan.parse(keys)


@pytest.mark.many(12)
@pytest.mark.parametrize("rest", REST)
@pytest.mark.parametrize("schedule", BUILT_IN)
def test_every_schedule_verifies_and_is_predicted_as_the_rule_says(schedule: str, rest: str) -> None:
    if schedule in COPIED and ("zero" in rest or "offload" in rest):
        rest = "clip=1 checkpoint=1 dp=2 microbatches=4"
    pp = even(schedule, 2)
    program = planned(rest, schedule, pp).compile(layers=stages_of(schedule, pp), steps=2)
    costs = RandomCosts(7)
    as_the_rule_says(program, costs)


@pytest.mark.parametrize("shared", ["tp=2", "ep=2", "context_parallel=2"])
def test_what_only_runs_forward_has_no_segments(shared):
    words = f"pp=2 microbatches=3 inference=true {shared}"
    plain = Plan.parse(words).compile(layers=6)
    assert Plan.parse(f"{words} checkpoint=2").compile(layers=6).ranks == plain.ranks


@pytest.mark.parametrize("rest", ["schedule=gpipe", "schedule=1f1b checkpoint=1 dp=2 zero=2", "schedule=looped-bfs"])
@pytest.mark.parametrize("place", ["0,1,1,0", "1,0,1,1", "0,2,1,0"])
def test_layers_on_any_rank_do_too(place: str, rest: str) -> None:
    words = f"tp=2 pp={1 + max(map(int, place.split(',')))} place={place} microbatches=3 {rest}"
    as_the_rule_says(Plan.parse(words).compile(layers=4), RandomCosts(7))


@pytest.mark.parametrize("words", ["copies=2 dp=2 microbatches=4", "copies=3 sequence_parallel=true microbatches=5"])
def test_micro_batches_in_step_do_too(words: str) -> None:
    as_the_rule_says(Plan.parse(f"tp=2 batch_{words}").compile(layers=3, steps=2), RandomCosts(7))


def as_the_rule_says(program: Program, costs: RandomCosts) -> None:
    trace = simulate(program, costs)
    starts, ends = start_and_end(program, costs)
    assert [list(row) for row in trace.starts] == starts
    assert [list(row) for row in trace.ends] == ends


@pytest.mark.parametrize("words", ["tp=4 microbatches=2", "tp=2 pp=2 dp=2 microbatches=2 sequence_parallel=true"])
def test_times_are_the_least_that_the_rule_allows(words: str) -> None:
    program, costs = Plan.parse(words).compile(layers=2), RandomCosts(3)
    trace = simulate(program, costs)
    assert ([list(row) for row in trace.starts], [list(row) for row in trace.ends]) == brute_force(program, costs)


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


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved", "dualpipe-v"])
def test_stages_share_them_out(schedule: str) -> None:
    pp, m, layers = 2, 4, 8
    program = planned(f"microbatches={m}", schedule, pp).compile(layers=layers)
    per_stage = [changes(program, rank) for rank in program_ranks(program, tp=0)]
    total: Counter[tuple[str, Op]] = sum(per_stage, Counter())
    assert total == Counter({("output", Op.ALL_REDUCE): 2 * layers * m, ("grad_output", Op.ALL_REDUCE): 2 * layers * m})


def program_ranks(program: Program, tp: int) -> list[int]:
    """The ranks at one place of the axis tp."""
    return [rank for rank in range(len(program.ranks)) if program.shard(rank) == tp]


def test_inference_has_no_sums_backward() -> None:
    found = changes(Plan(tp=2, inference=True).compile(layers=3))
    assert found == Counter({("output", Op.ALL_REDUCE): 6})


def test_sharing_ranks_have_the_same_program_but_for_their_peers() -> None:
    program = Plan.parse("tp=2 pp=2 dp=2 zero=1 microbatches=2").compile(layers=4)
    for rank in program_ranks(program, tp=0):
        mine, other = program.ranks[rank], program.ranks[rank + 1]
        assert [(ins.op, ins.layers, ins.reads, ins.writes) for ins in mine] == [
            (ins.op, ins.layers, ins.reads, ins.writes) for ins in other
        ]
        for a, b in zip(mine, other, strict=True):
            assert (a.peer < 0 and b.peer < 0) or b.peer == a.peer + 1


# groups of the mesh ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", ["dp=2 pp=2 tp=2", "dp=2 pp=2 tp=4", "pp=2 tp=2 sequence_parallel=true"])
def test_collectives_are_of_the_groups_of_the_mesh(words: str) -> None:
    plan = Plan.parse(f"{words} microbatches=2")
    program = plan.compile(layers=4)
    mesh = plan.layout(uniform(4)).mesh
    assert [name for name, _ in program.mesh] == ["dp", "pp", "tp"]
    for rank, row in enumerate(program.ranks):
        place = mesh.coordinates(rank)
        for ins in row:
            if repartitions(ins):
                assert ins.group == mesh.group(rank, "tp")
                assert ins.stream == f"tp {','.join(map(str, ins.group))}"
            elif ins.group:
                assert ins.op is Op.ALL_REDUCE
                parts = all(program.groups[g].form == "P" for g in ins.layers)
                assert ins.group in ([mesh.group(rank, "tp")] if parts else []) + [mesh.group(rank, "dp")]
            elif ins.peer >= 0:
                other = mesh.coordinates(ins.peer)
                assert {**other, "pp": place["pp"]} == place
                assert abs(other["pp"] - place["pp"]) == 1
    assert all(mesh.rank(**mesh.coordinates(rank)) == rank for rank in range(plan.ranks))


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


def test_fusing_stops_at_collectives() -> None:
    row = Plan(tp=2).compile(layers=2).ranks[0]
    for ins in row:
        if ins.op is Op.FORWARD or ins.op in BACKWARDS:
            writers = ins.layers[:-1] if ins.op is Op.FORWARD else ins.layers[1:]  # whose value another one reads
            assert not any(node % 5 in (1, 3) for node in writers), ins  # after a partial sum comes a collective


def test_stages_have_whole_layers() -> None:
    program = Plan(tp=2, pp=2).compile(layers=3)
    assert [{node // 5 for node in held} for held in program.placement] == [{0, 1}, {0, 1}, {2}, {2}]


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


@pytest.mark.parametrize("key", ["tp", "context_parallel", "ep"])
def test_ranks_that_decide_as_they_run_share_no_layers(key: str) -> None:
    with pytest.raises(PlanError, match="ranks that share a layer must decide alike.*; possible is "):
        Plan.parse(f"{key}=2 pp=2 schedule=ampnet")


def test_an_algorithm_of_ones_choice_sums_gradients_beside_the_collectives_of_forms() -> None:
    program = Plan.parse("tp=2 dp=2 algorithm=ring overlap=none").compile(layers=2)
    verify(program)
    assert program.algorithm == "ring"
