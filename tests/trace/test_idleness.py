"""Why a rank does not compute: examples computed by hand; and in many plans, idle and busy times fill the span."""

from __future__ import annotations

from itertools import pairwise

import pytest

from minipar import Plan, Trace, simulate
from minipar.costs.unit import UnitCosts
from minipar.program import Instruction, Op, Program, Value
from minipar.trace.idleness import REASONS, Holders, idle_split, idle_times

PLANS = [
    "pp=4 microbatches=8",
    "pp=2 dp=2 microbatches=4 zero=1",
    "pp=4 schedule=zb-h1 microbatches=6",
    "dp=4 zero=3",
    "pp=4 schedule=interleaved chunks=2 microbatches=8",
]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("latency", [0.0, 0.3])
def test_idle_and_busy_fill_the_span(plan: str, latency: float) -> None:
    trace = simulate(Plan.parse(plan).compile(layers=16), forward=1.0, backward=2.2, latency=latency)
    for rank, row in enumerate(trace.program.ranks):
        pieces = idle_times(trace, rank)
        assert sum(p.end - p.start for p in pieces) == pytest.approx(trace.time - trace.busy[rank], abs=1e-9)
        assert sum(idle_split(trace, rank).values()) == pytest.approx(trace.time - trace.busy[rank], abs=1e-9)
        work = [(trace.starts[rank][k], trace.ends[rank][k]) for k, ins in enumerate(row) if ins.stream == "compute"]
        whole = sorted([(p.start, p.end) for p in pieces] + [w for w in work if w[1] > w[0]])
        for (_, end), (start, _) in pairwise(whole):
            assert start == pytest.approx(end, abs=1e-9)
        assert idle_split(trace, rank)["overhead"] == pytest.approx(0, abs=1e-9)  # a prediction knows none


def _trace(rows: list[list[tuple[Instruction, float, float]]]) -> Trace:
    program = Program(tuple(tuple(ins for ins, _, _ in row) for row in rows), 2, 1, ())
    times = [[[entry[k] for entry in row] for row in rows] for k in (1, 2)]
    return Trace(program, times[0], times[1], lambda rank, value: 0, "measured")


def test_wait_ends_when_the_message_is_there() -> None:
    x = Value("output", 0, 0, 0)
    compute = Instruction(Op.FORWARD, (0,), 0, 0)
    row = [
        (compute, 1.0, 2.0),
        (Instruction(Op.RECV, (0,), 1, 0, (), (x,), (), "recv 1", 1), 0.0, 5.0),
        (compute._replace(reads=(x,)), 5.5, 6.0),
        (compute, 6.25, 7.0),
    ]
    other = [(compute, 0.0, 8.0)]
    trace = _trace([row, other])
    assert [tuple(p) for p in idle_times(trace, 0)] == [
        (0.0, 1.0, "fill", 0, -1), (2.0, 5.0, "wait", 2, 1), (5.0, 5.5, "overhead", 2, -1),
        (6.0, 6.25, "overhead", 3, -1), (7.0, 8.0, "fill", -1, -1),
    ]  # fmt: skip
    assert idle_split(trace, 0) == dict(zip(REASONS, (2.0, 3.0, 0.75), strict=True))
    assert idle_times(trace, 1) == []


def test_imported_traces_wait_under_their_messages() -> None:
    compute = Instruction(Op.FORWARD, (), -1, 0, name="gemm")
    group = Instruction(Op.ALL_REDUCE, (), -1, 0, stream="group 0", group=(0,), name="nccl")
    trace = _trace([[(compute, 0, 1), (group, 0.5, 2), (group, 3, 4), (compute, 5, 6), (compute, 6.5, 7)]])
    assert [tuple(p)[:3] for p in idle_times(trace, 0)] == [
        (1, 2, "wait"), (2, 3, "overhead"), (3, 4, "wait"), (4, 5, "overhead"), (6, 6.5, "overhead"),
    ]  # fmt: skip


def test_the_rank_that_holds_up_another_one_is_named() -> None:
    trace = simulate(Plan.parse("pp=3 microbatches=2").compile(layers=3), latency=0.25)
    rows = trace.program.ranks
    found = Holders(trace)

    def said(rank: int) -> list[tuple[str, str]]:
        pairs = [(one, found.of(rank, one)) for one in idle_times(trace, rank)]
        return [(one.reason, f"{by[0]} {rows[by[0]][by[1]]}" if by else "") for one, by in pairs]

    assert said(0) == [("wait", "1 B 1 mb0"), ("wait", "1 B 1 mb1")]
    assert said(2)[0] == ("fill", "1 F 1 mb0")
    assert said(2)[-1] == ("fill", "0 STEP 0")  # at the end: the rank that ends last


def test_the_last_rank_of_a_collective_holds_up_the_others() -> None:
    class Costs(UnitCosts):
        def compute(self, rank: int, ins: Instruction) -> float:
            return super().compute(rank, ins) * (1 + rank)  # rank 1 is slow

    program = Plan.parse("dp=2").compile(layers=2)
    program = program.with_rank(1, program.ranks[1])  # (not as a copy of rank 0)
    trace = simulate(program, Costs(program))
    (waited, *_) = idle_times(trace, 0)
    assert waited.reason == "wait"
    by = Holders(trace).of(0, waited)
    assert by is not None
    assert f"{by[0]} {program.ranks[1][by[1]]}" == "1 B 0:2 mb0"
    assert [one for one in idle_times(trace, 1) if one.reason == "wait"] == []
