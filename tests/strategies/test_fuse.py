"""Fusion: fewer instructions have the same effect, and keep their parts."""

from itertools import groupby, pairwise

import pytest
from hypothesis import given

from minipar import Plan, simulate, verify
from minipar.program import Instruction, Op, Part
from minipar.program.shape import Shape
from minipar.strategies.passes.fuse import FUSIBLE, fuse
from tests.fuzz.verify_interpreter import judge
from tests.interpreters import compiled, programs, shape


@pytest.fixture
def unfused(monkeypatch):
    """Plans compile without the last pass."""
    monkeypatch.setattr("minipar.strategies.passes.fuse.fuse", lambda instructions, *_: list(instructions))


def single(op, layer, i=0, step=0):
    return Instruction(op, (layer,), i, step)


def test_neighbouring_layers_of_one_microbatch_become_one():
    program = compiled("pp=1 microbatches=2", 3)
    assert [str(ins) for ins in program.ranks[0]] == ["F 0:3 mb0", "B 0:3 mb0", "F 0:3 mb1", "B 0:3 mb1", "STEP 0:3"]
    forward, backward = program.ranks[0][:2]
    assert forward.parts == tuple(Part(Op.FORWARD, k) for k in (0, 1, 2))
    assert backward.parts == tuple(Part(Op.BACKWARD, k) for k in (2, 1, 0))
    assert backward.layers == (0, 1, 2)


@pytest.mark.parametrize(
    "row",
    [
        [single(Op.FORWARD, 0), single(Op.FORWARD, 2)],  # a gap
        [single(Op.FORWARD, 1), single(Op.FORWARD, 0)],  # downwards
        [single(Op.BACKWARD, 0), single(Op.BACKWARD, 1)],  # upwards
        [single(Op.FORWARD, 0), single(Op.FORWARD, 1, i=1)],  # another micro-batch
        [single(Op.FORWARD, 0), single(Op.FORWARD, 1, step=1)],  # another step
        [single(Op.FORWARD, 1), single(Op.BACKWARD, 1)],  # another direction
        [single(Op.FORWARD, 0), single(Op.SEND, 0), single(Op.FORWARD, 1)],  # something between
        [single(Op.STEP, 0), single(Op.STEP, 1)],
    ],
)
def test_what_is_not_fused(row):
    assert fuse(row) == row


def effect(instructions):
    """What a sequence needs from outside, leaves behind, and takes away, one instruction after the other."""
    needs, made, gone = set(), set(), set()
    for ins in instructions:
        needs |= set(ins.reads) - made
        made |= set(ins.writes)
        gone |= set(ins.frees) - made
        made -= set(ins.frees)
    return needs, made, gone


@given(programs(most_microbatches=3))
def test_a_fused_instruction_has_the_net_effect_of_its_parts(program):
    plan = Plan.parse(program.name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minipar.strategies.passes.fuse.fuse", lambda instructions, *_: list(instructions))
        long = plan.compile(
            Shape(program.layers, program.groups, carries=program.carries), steps=program.steps, check=False
        )
    for before, after in zip(long.ranks, program.ranks, strict=True):
        assert all(len(ins.layers) == 1 for ins in before if ins.op in FUSIBLE)
        rest = iter(before)
        for ins in after:
            count = max(1, len(ins.parts)) if ins.op in FUSIBLE else 1
            run = [next(rest) for _ in range(count)]
            if count > 1:
                assert [(one.op, one.layers[0]) for one in run] == [(part.op, part.layer) for part in ins.parts]
            else:
                assert run == [ins]
            assert effect(run) == effect([ins])
        assert next(rest, None) is None
        # nothing that could be fused is left: two neighbours of the same kind and micro-batch do not touch
        for (op, _, _), same in groupby(after, key=lambda ins: (ins.op, ins.microbatch, ins.step)):
            edges = [ins.layers for ins in same]
            if op is Op.FORWARD:
                assert all(b[0] != a[-1] + 1 for a, b in pairwise(edges))


@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize("plan", ["pp=2 dp=2 microbatches=3 schedule=gpipe", "dp=3 checkpoint=2"])
def test_fusing_changes_neither_time_nor_memory_nor_gradients(plan, monkeypatch):
    model = shape(6, tied=[(0, 5)], frozen=[2])
    long = compiled(plan, model)
    monkeypatch.undo()
    short = compiled(plan, model)
    assert len(long) > len(short)
    verify(long)
    assert judge(long) == judge(short) == ""
    for latency in (0.0, 0.5):
        a, b = simulate(long, latency=latency), simulate(short, latency=latency)
        assert a.time == pytest.approx(b.time, abs=1e-9)
        assert a.busy == pytest.approx(b.busy, abs=1e-9)
        assert a.in_flight() == b.in_flight()
