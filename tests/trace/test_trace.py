"""Traces: numbers compared with closed forms, memory of a program made by hand, JSON both ways, comparisons."""

import itertools
from dataclasses import replace
from typing import ClassVar

import pytest

from minipar import MiniparError, Plan, simulate
from minipar.program import Group, Instruction, Op, Part, Program, Value
from minipar.trace import Trace, labels
from tests.interpreters import compiled, shape

MiB = 2**20
SIZES = [(1, 1), (2, 1), (2, 5), (3, 2), (4, 4), (4, 8), (8, 3), (8, 16)]
PEAKS = {
    "gpipe": lambda p, m, d: m,
    "1f1b": lambda p, m, d: min(p - d, m),
    "eager-1f1b": lambda p, m, d: min(2 * (p - 1 - d) + 1, m),
}


class Bytes:
    """Costs in seconds and bytes, of round numbers."""

    table: ClassVar = {"param": 7, "grad": 7, "optimizer_state": 14, "output": 3, "grad_output": 2, "saved": 5}

    def compute(self, rank, ins):
        return {Op.FORWARD: 0.002, Op.BACKWARD: 0.004, Op.STEP: 0.001}[ins.op] * len(ins.layers)

    def transfer(self, rank, ins):
        return 0.0005, 0.0001

    def collective(self, ins):
        return 0.003

    def size(self, rank, value):
        return self.table[value.kind] * MiB


@pytest.mark.parametrize(("schedule", "pm"), list(itertools.product(PEAKS, SIZES)))
def test_closed_forms_of_pipelines(schedule, pm):
    p, m = pm
    trace = simulate(Plan(pp=p, schedule=schedule, microbatches=m).compile(layers=2 * p), forward=1.0, backward=2.0)
    assert trace.time == (m + p - 1) * 3
    assert trace.bubble_of_total() == pytest.approx((p - 1) / (m + p - 1))
    assert trace.bubble_of_ideal() == pytest.approx((p - 1) / m)
    assert trace.window_bubble() == pytest.approx((p - 1) * 3)
    assert trace.in_flight() == [PEAKS[schedule](p, m, d) for d in range(p)]
    assert trace.peak_memory() == trace.in_flight()  # in units of a rank's activations nothing else counts
    assert trace.messages_per_microbatch() == 2 * (p - 1)
    assert trace.staleness() == [0] * p
    assert trace.weight_versions() == [1] * p


@pytest.mark.parametrize(
    ("schedule", "latency", "time"),
    [
        ("gpipe", 0.25, 34.5), ("gpipe", 0.5, 36), ("gpipe", 1, 39),
        ("1f1b", 0.25, 37), ("1f1b", 0.5, 41), ("1f1b", 1, 49),
        ("eager-1f1b", 0.25, 34.5), ("eager-1f1b", 0.5, 36), ("eager-1f1b", 1, 39),
    ],
)  # fmt: skip
def test_bubbles_grow_with_the_latency_of_a_hop(schedule, latency, time):
    trace = simulate(Plan(pp=4, schedule=schedule, microbatches=8).compile(layers=4), latency=latency)
    assert trace.time == pytest.approx(time)
    assert trace.bubble_of_total() == pytest.approx(1 - 24 / time)
    assert trace.bubble_of_ideal() == pytest.approx(time / 24 - 1)


def test_staleness_and_versions_over_several_steps():
    trace = simulate(Plan(pp=3, dp=2, microbatches=4).compile(layers=3, steps=3))
    assert trace.staleness() == [0] * 6
    for rank in range(6):
        events = list(trace.events_of(rank))
        steps = [e for e in events if e.instruction.op is Op.STEP]
        assert [(e.version_used, e.version_applied) for e in steps] == [(0, 1), (1, 2), (2, 3)]
        assert all(e.version_used == e.instruction.step for e in events if e.instruction.op is Op.FORWARD)
        assert all(e.version_used is None for e in events if e.stream != "compute")


def test_staleness_is_counted_where_a_gradient_is_applied_late():
    """Forward of the second step before the first update: its gradient misses one update."""
    f, b = (lambda s, op=op: Instruction(op, (0,), 0, s, stream="compute") for op in (Op.FORWARD, Op.BACKWARD))
    step = [Instruction(Op.STEP, (0,), -1, s) for s in (0, 1)]
    trace = by_hand([[f(0), f(1), b(0), step[0], b(1), step[1]]], times=[(k, k + 1) for k in range(6)])
    assert trace.staleness() == [1]


def by_hand(ranks, times, sizes=None, state=(), data=()):
    """A trace of one rank from instructions and (start, end) pairs; `sizes` by kind of value."""
    program = Program(tuple(map(tuple, ranks)), 1, 2, (Group((0,), (4,)),), state=state)
    starts, ends = ([[pair[k] for pair in times]] for k in (0, 1))
    return Trace(program, starts, ends, lambda rank, value: (sizes or {}).get(value.kind, 0), "measured", data=data)


def test_memory_of_a_program_made_by_hand():
    param, state = Value("param", 0), Value("optimizer_state", 0)
    out, saved, grad = Value("output", 0, 0, 0), Value("saved", 0, 0, 0), Value("grad", 0)
    second = Value("saved", 0, 1, 0)
    row = [
        Instruction(Op.FORWARD, (0,), 0, 0, (param,), (out, saved)),  # 10 to 12
        Instruction(Op.BACKWARD, (0,), 0, 0, (saved, out), (grad,), (saved, out)),  # 12 to 15
        Instruction(Op.FORWARD, (0,), 1, 0, (param,), (second,)),  # 15 to 17, after the frees at 15
        Instruction(Op.BACKWARD, (0,), 1, 0, (second,), (grad,), (second,)),  # 17 to 20, adds to grad
        Instruction(Op.STEP, (0,), -1, 0, (grad, param, state), (param, state), (grad,)),  # 20 to 21
    ]
    sizes = {"param": 100, "optimizer_state": 200, "output": 10, "saved": 40, "grad": 100}
    times = [(10.0, 12.0), (12.0, 15.0), (15.0, 17.0), (17.0, 20.0), (20.0, 21.0)]
    trace = by_hand([row], times, sizes, (frozenset({param, state}),), data=(5,))
    curve = trace.memory(0)
    at = dict(zip(curve.times, curve.total, strict=True))  # the last of each moment
    assert at == {10.0: 355, 12.0: 455, 15.0: 445, 20.0: 405, 21.0: 305}
    assert curve.times == sorted(curve.times)
    assert trace.peak_memory() == [455]  # 15.0 never holds both micro-batches: frees come first
    assert 405 in [total for time, total in zip(curve.times, curve.total, strict=True) if time == 15.0]
    held = {kind: size for kind, size in trace.peak_by_kind(0).items() if size}
    assert held == {"parameters": 100, "gradients": 100, "optimizer": 200, "activations": 50, "data": 5}
    assert all(sum(values) == total for *values, total in zip(*curve.kinds.values(), curve.total, strict=True))
    assert trace.span == (10.0, 21.0)
    assert trace.time == 11
    assert trace.busy == [11]
    assert trace.bubble_of_total() == 0


def test_a_copy_with_other_times_or_data_has_its_own_memory():
    trace = simulate(Plan(pp=2, microbatches=2).compile(layers=2), Bytes())
    before = trace.peak_memory()
    assert [b - a for a, b in zip(before, replace(trace, data=[1000, 3]).peak_memory(), strict=True)] == [1000, 3]
    late = replace(
        trace, starts=[[s + 9 for s in row] for row in trace.starts], ends=[[e + 9 for e in row] for row in trace.ends]
    )
    assert late.memory(0).times[0] == 9


def test_bytes_on_the_wire():
    plan = Plan(pp=2, dp=2, microbatches=4, bucket="flat")
    trace = simulate(plan.compile(layers=4), Bytes())
    reduced = 2 * 7 * MiB  # the gradients of two layers; a ring of 2 sends 2 * 1/2 of them
    assert trace.bytes_sent() == [4 * 3 * MiB + reduced, 4 * 2 * MiB + reduced] * 2
    messages = {(0, 1): 12 * MiB, (1, 0): 8 * MiB, (2, 3): 12 * MiB, (3, 2): 8 * MiB}
    groups = {(0, (0, 2)): reduced, (2, (0, 2)): reduced, (1, (1, 3)): reduced, (3, (1, 3)): reduced}
    assert trace.bytes_by_link() == messages | groups
    assert trace.bytes_by_kind() == {"activations": 40 * MiB, "gradients": 4 * reduced}
    assert sum(event.bytes for event in trace.events) == sum(trace.bytes_sent())
    assert simulate(plan.compile(layers=4)).bytes_sent() == [0] * 4  # units of activations are no bytes


def test_a_ring_of_four_sends_three_halves():
    group, grad = (0, 1, 2, 3), Value("grad", 0)
    ins = Instruction(
        Op.ALL_REDUCE, (0,), -1, 0, (grad,), (grad,), (), "group 0,1,2,3", -1, group, (Part(Op.ALL_REDUCE, 0, 80),)
    )
    trace = by_hand([[ins]], [(0, 1)], {"grad": 80})
    assert trace.sent(0, ins) == 120
    assert trace.busy == [0]


def test_summary_says_units():
    program = Plan(pp=4, microbatches=8).compile(layers=4)
    assert simulate(program).summary() == (
        f"predicted trace: 4 ranks, {len(program)} instructions, time 33, bubble 27.3% of total (37.5% of ideal), "
        "peak memory 4 activations"
    )
    summary = simulate(Plan(microbatches=2).compile(layers=1), Bytes()).summary()
    # two of (2 ms forward, 4 ms backward), a step of 1 ms; 7 + 14 + 7 of state and gradient, 5 + 3 of a micro-batch
    assert "time 13.00 ms, bubble 0.0% of total (0.0% of ideal), peak memory 36.00 MiB" in summary


@pytest.mark.parametrize("words", ["pp=2 microbatches=4", "pp=2 microbatches=4 checkpoint=2", "microbatches=3"])
@pytest.mark.parametrize("frozen", [[], [0], [0, 1, 2], list(range(10))])
def test_activations_are_those_of_the_layers_that_keep_something(words, frozen):
    """Frozen layers at the model's beginning keep nothing. Every line that tells the peak tells the same one."""
    trace = simulate(compiled(words, shape(10, frozen=frozen)))
    assert trace.peak_memory() == pytest.approx(trace.in_flight())
    told = labels.amount(trace, max(trace.peak_memory()))
    assert trace.summary().endswith(f"peak memory {told}")
    assert not trace.in_flight()[0] or told in labels.facts(trace)


def test_comparing_different_programs_is_refused():
    a, b = (simulate(Plan(pp=2, schedule=s, microbatches=4).compile(layers=2)) for s in ("gpipe", "1f1b"))
    with pytest.raises(MiniparError, match="different programs .*gpipe"):
        a.compare(b)
    with pytest.raises(MiniparError, match="only the same instructions can be compared"):
        simulate(Plan(pp=2, microbatches=3).compile(layers=2)).compare(b)


def test_comparison_instruction_by_instruction():
    program = Plan(pp=2, microbatches=4).compile(layers=2)
    predicted = simulate(program, Bytes())
    slow = next(k for k, ins in enumerate(program.ranks[1]) if str(ins) == "B 1 mb2")
    ends = [list(row) for row in predicted.ends]
    ends[1][slow] += 0.0025
    both = replace(predicted, kind="measured", ends=ends).compare(predicted)
    assert len(both.rows()) == len(program)
    assert all(a[:3] == b[:3] for a, b in both.rows())
    head, first, *rest = both.table().splitlines()
    assert head.split() == ["rank", "instruction", "measured", "predicted", "difference"]
    assert first.split() == ["1", "B", "1", "mb2", "6.500", "ms", "4.000", "ms", "+2.500", "ms"]
    assert all(line.endswith("+0.000 ms") for line in rest)
    assert not any("RECV" in line for line in rest)
    assert len(both.table(limit=3).splitlines()) == 4
    assert f"time {predicted.time * 1e3:.2f} ms measured" in both.summary()
    assert "(1.00x); bubble of total" in both.summary()


def test_a_comparison_in_units_of_the_forward_speaks_of_no_milliseconds():
    program = Plan(pp=2, microbatches=4).compile(layers=2)
    both = simulate(program, forward=2.0, backward=4.0).compare(simulate(program))
    assert " ms" not in both.table() + both.summary()
    assert both.summary().startswith("time 30 predicted, 15 predicted (2.00x)")
    assert both.table(limit=1).splitlines()[1].split()[-3:] == ["4.000", "2.000", "+2.000"]
