"""Collectives of the three variants: how many, how large, in which order and where."""

import pytest
from hypothesis import given

from minipar import Plan, verify
from minipar.errors import PlanError
from minipar.program import Group, Op, Part, Synchronous, grad
from minipar.program.shape import Shape
from minipar.strategies.buckets import MiB
from tests.fuzz.fingerprints import judge
from tests.interpreters import compiled, programs, shape


def collectives(program, rank=0):
    return [ins for ins in program.ranks[rank] if ins.op is Op.ALL_REDUCE]


def listing(program, rank=0):
    return [str(ins) for ins in program.ranks[rank] if ins.op in (Op.BACKWARD, Op.ALL_REDUCE, Op.STEP)]


LARGE = Shape(4, tuple(Group((k,), (3 * MiB, MiB)) for k in range(4)))  # 4 MiB a layer, in two tensors


def test_per_parameter():
    program = compiled("dp=2 microbatches=2 bucket=none", LARGE)
    assert listing(program)[1:] == [
        "B 3 mb1", "ALL_REDUCE 3 over 0,1", "B 2 mb1", "ALL_REDUCE 2 over 0,1",
        "B 1 mb1", "ALL_REDUCE 1 over 0,1", "B 0 mb1", "ALL_REDUCE 0 over 0,1", "STEP 0:4",
    ]  # fmt: skip
    assert listing(program)[0] == "B 0:4 mb0"  # only the last micro-batch's gradients are complete
    for ins, g in zip(collectives(program), (3, 2, 1, 0), strict=True):
        assert ins.parts == (Part(Op.ALL_REDUCE, g, 3 * MiB), Part(Op.ALL_REDUCE, g, MiB))  # a message per tensor
        assert ins.reads == ins.writes == (grad(g),)
        assert ins.group == (0, 1)
        assert ins.stream == "group 0,1"


def test_one_flat_buffer():
    program = compiled("dp=2 microbatches=2 bucket=flat", LARGE)
    assert listing(program) == ["B 0:4 mb0", "B 0:4 mb1", "ALL_REDUCE 3,2,1,0 over 0,1", "STEP 0:4"]
    (ins,) = collectives(program)
    assert ins.parts == (Part(Op.ALL_REDUCE, -1, 16 * MiB),)
    assert ins.reads == ins.writes == (grad(3), grad(2), grad(1), grad(0))


@pytest.mark.parametrize(
    ("bucket", "groups"),
    [
        (1, ["3", "2", "1", "0"]),  # never less than a layer
        (4, ["3", "2", "1", "0"]),  # full at 4 MiB
        (5, ["3,2", "1,0"]),
        (8, ["3,2", "1,0"]),
        (9, ["3,2,1", "0"]),  # the last one takes what is left
        (100, ["3,2,1,0"]),
    ],
)
def test_buckets_by_size_in_reverse_order(bucket, groups):
    program = compiled(f"dp=2 bucket={bucket}", LARGE)
    found = collectives(program)
    assert [",".join(map(str, ins.layers)) for ins in found] == groups
    assert [ins.parts[0].bytes for ins in found] == [len(ins.layers) * 4 * MiB for ins in found]
    assert all(len(ins.parts) == 1 for ins in found)


@pytest.mark.parametrize(
    ("bucket", "groups"),
    [
        ("1x", ["3,2,1,0"]),
        ("2x", ["3,2", "1,0"]),
        ("3x", ["3", "2,1", "0"]),
        ("4x", ["3", "2", "1", "0"]),
        ("9x", ["3", "2", "1", "0"]),  # no more than there are layers
        ("2,", ["3,2", "1,0"]),
        ("3,1", ["3", "2,1", "0"]),
        ("0,", ["3,2,1,0"]),
    ],
)
def test_buckets_by_number_and_by_their_last_layers(bucket, groups):
    program = compiled(f"dp=2 bucket={bucket}", LARGE)
    assert [",".join(map(str, ins.layers)) for ins in collectives(program)] == groups
    verify(program)
    assert str(Plan.parse(str(Plan.parse(f"dp=2 bucket={bucket}")))) == f"dp=2 pp=1 bucket={bucket}"


def test_buckets_by_number_have_about_one_size():
    sizes = (9, 1, 1, 1, 8, 2, 2, 6)
    model = Shape(8, tuple(Group((k,), (size * MiB,)) for k, size in enumerate(sizes)))
    found = collectives(compiled("dp=2 bucket=3x", model))
    assert [ins.parts[0].bytes // MiB for ins in found] == [10, 10, 10]


@pytest.mark.parametrize("word", ["0x", "-1x", "x", "1.5x", "3,,1", ",", "automatic", "0"])
def test_a_bucket_that_is_none_is_refused(word):
    with pytest.raises(PlanError, match=r"bucket=.*: must be a size in MiB above 0, none .* 4x, or the layers"):
        Plan.parse(f"bucket={word}")
    with pytest.raises(PlanError, match="bucket=9,1: the model has 4 layers"):
        compiled("dp=2 bucket=9,1", LARGE)


def test_a_bucket_starts_as_soon_as_it_is_full():
    overlapped = compiled("dp=2 microbatches=2 bucket=5", LARGE)
    assert listing(overlapped) == [
        "B 0:4 mb0", "B 2:4 mb1", "ALL_REDUCE 3,2 over 0,1", "B 0:2 mb1", "ALL_REDUCE 1,0 over 0,1", "STEP 0:4",
    ]  # fmt: skip
    after = compiled("dp=2 microbatches=2 bucket=5 overlap=none", LARGE)
    assert listing(after) == [
        "B 0:4 mb0", "B 0:4 mb1", "ALL_REDUCE 3,2 over 0,1", "ALL_REDUCE 1,0 over 0,1", "STEP 0:4",
    ]  # fmt: skip


def test_a_collective_follows_the_last_backward_of_all_rounds():
    program = compiled("dp=2 microbatches=2 accumulate=2 bucket=none", 1)
    assert listing(program) == ["B 0 mb0", "B 0 mb1", "B 0 mb2", "B 0 mb3", "ALL_REDUCE 0 over 0,1", "STEP 0"]


def test_groups_of_a_pipeline_are_its_stages():
    program = compiled("pp=2 dp=3 bucket=none", 4)
    assert [[ins.group for ins in collectives(program, rank)] for rank in range(6)] == [
        [(0, 2, 4)] * 2, [(1, 3, 5)] * 2,
    ] * 3  # fmt: skip
    assert [ins.layers for ins in collectives(program, 3)] == [(3,), (2,)]


def test_a_tied_set_is_summed_over_its_stages_and_replicas_at_the_end():
    program = compiled("pp=2 dp=2 bucket=none", shape(4, tied=[(0, 3)], size=5))
    for rank, own, first, second in ((0, (0, 2), 1, 0), (1, (1, 3), 3, 2), (2, (0, 2), 1, 0), (3, (1, 3), 3, 2)):
        found = collectives(program, rank)
        assert [(ins.layers, ins.group) for ins in found] == [
            ((first,), own), ((second,), own), ((4,), (0, 1, 2, 3)),
        ]  # fmt: skip
        assert found[-1].parts == (Part(Op.ALL_REDUCE, 4, 5),)
        assert judge(program) == ""


def test_a_set_tied_within_a_stage_is_complete_after_its_first_layer():
    program = compiled("dp=2 bucket=none", shape(3, tied=[(1, 2)]))
    assert [ins.layers for ins in collectives(program)] == [(2,), (3,), (1,), (0,)]
    assert listing(program)[:5] == [
        "B 2 mb0", "ALL_REDUCE 2 over 0,1", "B 1 mb0", "ALL_REDUCE 3 over 0,1", "ALL_REDUCE 1 over 0,1",
    ]  # fmt: skip


def test_several_tied_sets_of_the_same_ranks_share_a_collective():
    program = compiled("pp=2 bucket=flat", shape(4, tied=[(0, 3), (1, 2)]))
    for rank in (0, 1):
        assert [(ins.layers, ins.group, ins.parts[0].bytes) for ins in collectives(program, rank)] == [
            ((4, 5), (0, 1), 8),
        ]  # fmt: skip


def test_buffers_stay_from_step_to_step_where_buckets_are_used():
    flat, single = compiled("dp=2 bucket=flat", 2), compiled("dp=2 bucket=none", 2)
    assert grad(0) in flat.state[0]
    assert grad(0) not in single.state[0]
    assert flat.ranks[0][-1].frees == ()
    assert set(single.ranks[0][-1].frees) == {grad(0), grad(1)}


@given(programs())
def test_all_ranks_of_a_group_call_the_same_collectives_in_the_same_order(program):
    for rank in range(len(program.ranks)):
        for ins in collectives(program, rank):
            assert rank in ins.group
            calls = [
                [(one.layers, one.parts, one.step) for one in collectives(program, r) if one.group == ins.group]
                for r in ins.group
            ]
            assert all(call == calls[0] for call in calls)
            sizes = sum(size for g in ins.layers for size in program.groups[g].tensors)
            same = [one for one in collectives(program, rank) if (one.layers, one.step) == (ins.layers, ins.step)]
            assert sum(part.bytes for one in same for part in one.parts) == sizes
    for step in range(program.steps):
        for rank, held in enumerate(program.state):
            done = [ins for ins in collectives(program, rank) if ins.step == step and ins.writes]
            reduced = [g for ins in done for g in ins.layers]
            assert len(reduced) == len(set(reduced))
            if program.replicas > 1 and program.contract == Synchronous():
                trainable = {v.index for v in held if v.kind == "param" and program.groups[v.index].trainable}
                assert set(reduced) == trainable - program.sharded
