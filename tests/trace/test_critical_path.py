"""The critical path: a chain whose durations add up to the makespan, through messages and collectives."""

import itertools
from dataclasses import replace

import pytest

from minipar import Plan, simulate
from minipar.program import Group, Instruction, Op, Program, Value
from minipar.trace import Trace


class Costs:
    """Every cost differs, and messages and collectives take time."""

    def compute(self, rank, ins):
        return {Op.FORWARD: 1.0, Op.BACKWARD: 2.1, Op.STEP: 0.3}[ins.op] * len(ins.layers) * (1 + 0.07 * (rank % 3))

    def transfer(self, rank, ins):
        return 0.4 + 0.05 * rank, 0.15

    def collective(self, ins):
        return 0.9

    def size(self, rank, value):
        return 8


def is_chain(trace):
    """Each event of the path begins when the one before it ends; returns the sum of the durations."""
    path = trace.critical_path()
    assert path[0].start == trace.span[0]
    assert path[-1].end == trace.span[1]
    total = path[0].duration
    for before, event in itertools.pairwise(path):
        if event.instruction.op is Op.RECV:
            assert before.instruction.op is Op.SEND
            assert (before.rank, event.rank) == (event.instruction.peer, before.instruction.peer)
            assert before.instruction.reads == event.instruction.writes
            total += event.end - before.end  # the delay; a receive is posted long before
        else:
            assert event.start == before.end
            assert event.rank == before.rank or before.instruction.op is Op.ALL_REDUCE
            total += event.duration
    return total


FACTORS = {"equal": (), "slower": (1, 1.4, 1.8, 2.2), "faster": (2, 1.7, 1.4, 1.1), "one": (1, 1, 3, 1)}


@pytest.mark.many(4)
@pytest.mark.parametrize("factors", FACTORS)
@pytest.mark.parametrize("latency", [0, 0.3, 2.0])
@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "eager-1f1b"])
def test_durations_and_latencies_add_up_to_the_makespan(schedule, latency, factors):
    for dp, m, cores in itertools.product((1, 2), (1, 3, 8), (None, 2)):
        program = Plan(pp=4, dp=dp, schedule=schedule, microbatches=m).compile(layers=8)
        trace = simulate(program, latency=latency, stage_factors=FACTORS[factors], cores=cores)
        assert is_chain(trace) == pytest.approx(trace.time, abs=1e-9)


@pytest.mark.parametrize("plan", ["pp=2 dp=2", "dp=4", "pp=4", "pp=2 dp=2 bucket=none", "dp=2 pp=2 overlap=none"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_messages_and_collectives_that_take_time_add_up(plan, schedule):
    for steps, m in ((1, 1), (1, 5), (3, 4)):
        program = Plan.parse(f"{plan} microbatches={m} schedule={schedule}").compile(layers=8, steps=steps)
        trace = simulate(program, Costs())
        assert is_chain(trace) == pytest.approx(trace.time, abs=1e-9)


def test_the_path_of_one_micro_batch_is_everything_in_turn():
    trace = simulate(Plan(pp=3, microbatches=1).compile(layers=3), latency=0.5)
    assert [f"{e.rank} {e.instruction}" for e in trace.critical_path()] == [
        "0 F 0 mb0", "0 SEND output(0) mb0 -> 1", "1 RECV output(0) mb0 <- 0",
        "1 F 1 mb0", "1 SEND output(1) mb0 -> 2", "2 RECV output(1) mb0 <- 1",
        "2 F 2 mb0", "2 B 2 mb0", "2 SEND grad_output(1) mb0 -> 1", "1 RECV grad_output(1) mb0 <- 2",
        "1 B 1 mb0", "1 SEND grad_output(0) mb0 -> 0", "0 RECV grad_output(0) mb0 <- 1",
        "0 B 0 mb0", "0 STEP 0",
    ]  # fmt: skip


def test_a_full_link_is_on_the_path():
    """Messages that take longer than the work: the path runs along the link, from SEND to SEND."""

    class Slow(Costs):
        def transfer(self, rank, ins):
            return 10.0, 0.0

    path = simulate(Plan(pp=2, schedule="gpipe", microbatches=4).compile(layers=2), Slow()).critical_path()
    sends = [str(e.instruction) for e in path if e.instruction.op is Op.SEND and e.rank == 0]
    assert sends == [f"SEND output(0) mb{i} -> 1" for i in range(4)]


def test_a_rank_that_only_passes_messages_on():
    """Rank 1 computes early, then relays: its SEND waits for its RECV, not for its own work."""
    value, own = Value("output", 0, 0, 0), Value("output", 1, 1, 0)
    program = Program((
        (Instruction(Op.FORWARD, (0,), 0, 0, (), (value,)),
         Instruction(Op.SEND, (0,), 0, 0, (value,), (), (value,), "send 1", 1)),
        (Instruction(Op.FORWARD, (1,), 1, 0, (), (own,)),
         Instruction(Op.RECV, (0,), 0, 0, (), (value,), (), "recv 0", 0),
         Instruction(Op.SEND, (0,), 0, 0, (value,), (), (value,), "send 2", 2)),
        (Instruction(Op.RECV, (0,), 0, 0, (), (value,), (), "recv 1", 1),
         Instruction(Op.FORWARD, (2,), 0, 0, (value,))),
    ), 3, 2, ())  # fmt: skip

    class Late(Costs):
        def compute(self, rank, ins):
            return 5.0 if rank == 0 else 1.0

    trace = simulate(program, Late())
    assert is_chain(trace) == pytest.approx(trace.time)
    path = [f"{e.rank} {e.instruction.op.name}" for e in trace.critical_path()]
    assert path == ["0 FORWARD", "0 SEND", "1 RECV", "1 SEND", "2 RECV", "2 FORWARD"]


def test_a_collective_is_shown_on_the_rank_that_joined_last():
    trace = simulate(Plan(dp=3).compile(layers=1), Costs())
    path = [f"{e.rank} {e.instruction.op.name}" for e in trace.critical_path()]
    assert path[:3] == ["2 FORWARD", "2 BACKWARD", "2 ALL_REDUCE"]  # rank 2 is the slowest
    assert path[3:] == ["2 STEP"]
    fast_end = [[*row[:-1], row[-1] + (5.0 if rank == 0 else 0.0)] for rank, row in enumerate(trace.ends)]
    path = [f"{e.rank} {e.instruction.op.name}" for e in replace(trace, ends=fast_end).critical_path()]
    assert path == ["2 FORWARD", "2 BACKWARD", "2 ALL_REDUCE", "0 STEP"]


def test_one_rank_and_no_instructions():
    trace = simulate(Plan(microbatches=2).compile(layers=1))
    assert len(trace.critical_path()) == 5
    assert Trace(Program(((),), 1, 1, (Group((0,)),)), [[]], [[]], lambda r, v: 0).critical_path() == []


def test_a_measured_send_that_was_held_up_is_what_its_receiver_waited_for():
    """The second SEND begins at 11, but its process sleeps until 40; the third is seen to end after its arrival."""
    out = [Value("output", 0, i, 0) for i in range(3)]
    first = [Instruction(Op.SEND, (0,), i, 0, (out[i],), (), (), "send 1", 1) for i in range(3)]
    second = []
    for i in range(3):
        second.append(Instruction(Op.RECV, (0,), i, 0, (), (out[i],), (), "recv 0", 0))
        second.append(Instruction(Op.FORWARD, (1,), i, 0, (out[i],), (), (out[i],)))
    starts, ends = [[10, 11, 60], [0, 10.5, 0, 40.5, 0, 60.5]], [[10.2, 40, 70], [10.5, 20, 40.5, 50, 60.5, 75]]
    trace = Trace(Program((tuple(first), tuple(second)), 2, 3, ()), starts, ends, lambda r, v: 0, "measured")
    assert [f"{e.rank} {e.instruction.op.name} {e.start}" for e in trace.critical_path()][-3:] == [
        "0 SEND 60", "1 RECV 0", "1 FORWARD 60.5",
    ]  # fmt: skip
    before = replace(trace, starts=[starts[0][:2], starts[1][:4]], ends=[ends[0][:2], ends[1][:4]])
    before = replace(before, program=Program((tuple(first[:2]), tuple(second[:4])), 2, 3, ()))
    assert [f"{e.rank} {e.instruction.op.name} {e.end}" for e in before.critical_path()][-3:] == [
        "0 SEND 40", "1 RECV 40.5", "1 FORWARD 50",
    ]  # fmt: skip


def test_a_message_that_was_there_long_ago_is_not_what_a_measured_rank_waited_for():
    """A measured RECV ends when its rank looks: rank 1 looks at 30 and 50, for messages sent by 21 and 31."""
    out = [Value("output", 0, i, 0) for i in range(3)]
    first, second = [], []
    for i in range(3):
        first.append(Instruction(Op.FORWARD, (0,), i, 0, (), (out[i],)))
        first.append(Instruction(Op.SEND, (0,), i, 0, (out[i],), (), (out[i],), "send 1", 1))
        second.append(Instruction(Op.RECV, (0,), i, 0, (), (out[i],), (), "recv 0", 0))
        second.append(Instruction(Op.FORWARD, (1,), i, 0, (out[i],), (), (out[i],)))
    program = Program((tuple(first), tuple(second)), 2, 3, ())
    starts = [[0, 10, 11, 20, 21, 30], [0, 13, 0, 30.5, 31, 50.5]]
    ends = [[10, 11, 20, 21, 30, 31], [12.5, 30, 30.2, 50, 50.3, 70]]
    measured = Trace(program, starts, ends, lambda r, v: 0, "measured")
    path = [f"{e.rank} {e.instruction}" for e in measured.critical_path()]
    assert path == [
        "0 F 0 mb0", "0 SEND output(0) mb0 -> 1", "1 RECV output(0) mb0 <- 0", "1 F 1 mb0", "1 F 1 mb1", "1 F 1 mb2",
    ]  # fmt: skip
    waited = replace(measured, ends=[[*ends[0][:4], 49, 49.5], ends[1]], starts=[[*starts[0][:4], 21, 49], starts[1]])
    waited = replace(
        waited, ends=[waited.ends[0], [*ends[1][:4], 51.2, 70]], starts=[waited.starts[0], [*starts[1][:5], 51.3]]
    )
    path = [f"{e.rank} {e.instruction}" for e in waited.critical_path()]
    assert path[-3:] == ["0 SEND output(0) mb2 -> 1", "1 RECV output(0) mb2 <- 0", "1 F 1 mb2"]
