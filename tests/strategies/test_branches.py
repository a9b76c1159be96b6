"""Programs of models with branches: they verify, take the time computed by hand, and refuse impossible plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minipar import Plan, models, simulate, verify
from minipar.errors import MiniparError, PlanError, ProgramError
from minipar.prediction import on_paper
from minipar.program import Group, Op, Program, edges, grad_output, output
from minipar.program.shape import Shape, uniform
from minipar.trace import terminal

DIAMOND = replace(uniform(4), edges=edges.numbered([(0, 1), (0, 2), (1, 3), (2, 3)], 4))


def shape_of(pairs: list[tuple[int, int]], layers: int, **changes: object) -> Shape:
    return replace(uniform(layers), edges=edges.numbered(pairs, layers), **changes)  # type: ignore[arg-type]


def of_layers(program: Program, latency: float = 0.0) -> float:
    """Step time where a layer's forward takes 1 and its backward 2."""
    own = [len(held) for held in program.placement]
    return simulate(program, forward=1, backward=2, stage_factors=own, latency=latency).time


@pytest.mark.parametrize("m", [1, 2, 5])
@pytest.mark.parametrize("c", [0.0, 0.25, 1.5])
def test_time_of_a_diamond_by_hand(m: int, c: float) -> None:
    """rank 0: 0, 1, 3; rank 1: 2. The way of a micro-batch is 0, 1 beside 2, 3, and back; four messages."""
    for schedule in ("1f1b", "gpipe", "naive"):
        plan = Plan(pp=2, place=(0, 0, 1, 0), schedule=schedule, microbatches=m)
        assert of_layers(plan.compile(DIAMOND), c) == pytest.approx(m * (9 + 4 * c))
    looped = Plan(pp=2, place="branches", schedule="looped-bfs", microbatches=m).compile(DIAMOND)
    assert looped.placement == ((0, 1, 3), (2,))
    if m >= 1 + c:  # rank 0 is always busy, and waits for no message
        assert of_layers(looped, c) == pytest.approx(9 * m)
    alone = Plan(microbatches=m).compile(DIAMOND)
    assert of_layers(alone, c) == 12 * m


def test_branches_in_stages_of_neighbours_run_side_by_side() -> None:
    """Four stages in a row, but only three deep: GPipe's (m + 3) 3 becomes (m + 2) 3."""
    for schedule in ("gpipe", "1f1b"):
        plan = Plan(pp=4, schedule=schedule, microbatches=6)
        assert simulate(plan.compile(DIAMOND)).time == pytest.approx((6 + 2) * 3)
        assert simulate(plan.compile(layers=4)).time == pytest.approx((6 + 3) * 3)


def test_a_fork_adds_up_a_gradient_of_each_edge_and_frees_its_output_last() -> None:
    rows = Plan(pp=2, place="branches").compile(DIAMOND).ranks
    fork = next(ins for ins in rows[0] if ins.op is Op.BACKWARD and ins.layers == (0,))
    assert {grad_output(0, 0), grad_output(3, 0)} <= set(fork.frees)
    frees = [str(ins) for row in rows for ins in row if output(0, 0) in ins.frees]
    assert frees == ["B 1 mb0", "B 2 mb0"], "the last reader on each rank"
    assert [str(ins) for ins in rows[1]] == [
        "RECV output(0) mb0 <- 0", "F 2 mb0", "SEND output(2) mb0 -> 0", "RECV grad_output(2) mb0 <- 0", "B 2 mb0",
        "SEND grad_output(3) mb0 -> 0", "STEP 2",
    ]  # fmt: skip


def test_only_chains_within_a_model_are_fused() -> None:
    program = Plan().compile(shape_of([(0, 1), (1, 2), (0, 3), (2, 4), (3, 4), (4, 5)], 6))
    assert [str(ins) for ins in program.ranks[0]] == [
        "F 0 mb0", "F 1:3 mb0", "F 3 mb0", "F 4:6 mb0", "B 4:6 mb0", "B 3 mb0", "B 1:3 mb0", "B 0 mb0", "STEP 0:6",
    ]  # fmt: skip


PLANS = [
    "microbatches=2",
    "pp=3 schedule=gpipe microbatches=2",
    "pp=2 schedule=interleaved microbatches=4",
    "pp=2 schedule=looped-bfs microbatches=3",
    "pp=3 schedule=zb-h1 microbatches=4",
    "pp=2 schedule=zb-v microbatches=3",
    "pp=2 schedule=chimera microbatches=2",
    "pp=2 schedule=dualpipe microbatches=4",
    "pp=2 schedule=dualpipe-v microbatches=4",
    "pp=2 dp=2 zero=3 microbatches=3",
    "pp=2 dp=2 overlap=priority",
    "pp=2 offload=optimizer,parameters microbatches=2",
    "pp=2 inference=true microbatches=3",
    "pp=2 clip=1.0 accumulate=2",
    "pp=3 checkpoint=2 schedule=zb-h1 microbatches=3",
    "pp=2 checkpoint=sqrt offload=activations microbatches=4",
]


@st.composite
def graphs(draw: st.DrawFn) -> Shape:
    """Layers of which each reads some before it, with ties and frozen ones."""
    n = draw(st.integers(4, 9))
    pairs = set()
    for layer in range(1, n):
        pairs |= {(a, layer) for a in draw(st.sets(st.integers(0, layer - 1), min_size=1, max_size=3))}
    for layer in range(n - 1):
        if not any(a == layer for a, _ in pairs):
            pairs.add((layer, draw(st.integers(layer + 1, n - 1))))
    trained = [draw(st.booleans()) or layer == n - 1 for layer in range(n)]
    groups = [Group((layer,), (8,) if trained[layer] else (), 4) for layer in range(n)]
    if draw(st.booleans()):
        groups.append(Group((1, n - 1), (16,)))
    return shape_of(sorted(pairs), n, groups=tuple(groups))


@given(graphs(), st.sampled_from(PLANS), st.data())
def test_every_plan_of_every_graph_verifies(shape: Shape, text: str, data: st.DataObject) -> None:
    plan = Plan.parse(text)
    stages = 1 + max(map(max, plan.placement()))
    if stages <= shape.layers:
        program = plan.compile(shape, steps=2)  # compile verifies
        assert Program.from_json(program.to_json()) == replace(program, name=str(plan))
    single = plan.schedule in ("1f1b", "gpipe", "zb-h1", "looped-bfs")
    if single:
        place = data.draw(st.lists(st.integers(0, plan.pp - 1), min_size=shape.layers, max_size=shape.layers))
        if set(place) == set(range(plan.pp)):
            placed = replace(plan, place=tuple(place), split=None).compile(shape, steps=2)
            own = [{layer for layer, rank in enumerate(place) if rank == r} for r in range(plan.pp)]
            assert list(map(set, placed.placement)) == own * plan.dp
            simulate(placed)


def test_what_is_wrong_is_found() -> None:
    program = Plan(pp=2, place="branches", microbatches=2).compile(DIAMOND)
    row = program.ranks[0]
    k = next(k for k, ins in enumerate(row) if ins.op is Op.BACKWARD and ins.layers == (0,))
    partial = row[k]._replace(reads=tuple(v for v in row[k].reads if v != grad_output(3, 0)))
    with pytest.raises(ProgramError, match=r"needs grad_output\(3\), but does not read it"):
        verify(program.with_rank(0, [*row[:k], partial, *row[k + 1 :]]))
    k = next(k for k, ins in enumerate(row) if ins.op is Op.FORWARD and ins.layers == (3,))
    partial = row[k]._replace(reads=tuple(v for v in row[k].reads if v != output(2, 0)))
    with pytest.raises(ProgramError, match=r"needs output\(2\), but does not read it"):
        verify(program.with_rank(0, [*row[:k], partial, *row[k + 1 :]]))
    first, second = [ins for ins in row if ins.op is Op.FORWARD and ins.microbatch == 0][:2]
    fused = first._replace(layers=(0, 1), writes=first.writes + second.writes)
    rest = [fused if ins is first else ins for ins in row if ins is not second]
    with pytest.raises(ProgramError, match="F 0:2 mb0.*its layers are no chain"):
        verify(program.with_rank(0, rest))


def test_the_picture_says_where_branches_are() -> None:
    trace = simulate(Plan(pp=2, place="branches", microbatches=2).compile(DIAMOND), stage_factors=[3, 1])
    shown = terminal.text(trace, 80)
    assert "layers: rank 0 has 0:2,3, 1 has 2" in " ".join(shown.split())
    lanes = [line.split()[-1] for line in shown.splitlines()[:2]]
    assert lanes[0].count("0") == 3 * lanes[1].count("0"), shown
    assert "layers:" not in terminal.text(simulate(Plan(pp=2).compile(layers=4)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pp=2 place=some", "place=some: must be branches, or the rank of each layer, such as 0,0,1,1,0"),
        ("pp=2 place=0,,1,0", "place=0,,1,0: must be branches"),
        ("pp=2 place=0,0,2,0", "place=0,0,2,0: ranks of a pipeline with pp=2 are 0 to 1"),
        ("pp=3 place=0,0,2,0", "place=0,0,2,0: puts no layer on rank 1; possible is pp=2, or another place"),
        ("pp=2 place=0,1", "place=0,1: of 2 layers, but the model has 4"),
        ("pp=3 place=branches", "pp=3 place=branches: at most 2 branches are side by side; possible are 1 to 2"),
        ("pp=2 schedule=pipedream", "schedule=pipedream: is for chains, not of a model with branches"),
        ("pp=2 schedule=terapipe", "schedule=terapipe: is for chains"),
        ("pp=2 checkpoint=1MiB", "checkpoint=1MiB: a budget is for chains"),
    ],
)
def test_refusals(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message) as error:
        Plan.parse(text).compile(DIAMOND)
    assert "\n" not in str(error.value)


def test_a_chain_has_no_branches_to_place() -> None:
    with pytest.raises(PlanError, match="place=branches: the model has none side by side"):
        Plan(pp=2, place="branches").compile(layers=4)
    with pytest.raises(MiniparError, match="memory: no formula for branchy, whose layers branch"):
        on_paper.per_rank(Plan.parse("pp=2"), "branchy")


def test_branchy_is_placed_branch_by_branch() -> None:
    program = Plan(pp=4, place="branches", schedule="looped-bfs", microbatches=4).compile(models.shape("branchy"))
    assert program.placement == ((0, 1, 7, 8, 14, 15), (2, 3, 9, 10), (4, 5, 11, 12), (6, 13))
