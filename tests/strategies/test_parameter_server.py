"""Programs of parameter servers: bytes, order, verification, simulation by the rule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from minipar import Plan, Program, simulate, verify
from minipar.errors import PlanError, ProgramError
from minipar.program import Group, Op, Staleness
from minipar.program.server_rule import Consistency, Kind, Mode, Row
from minipar.program.shape import Shape
from minipar.program.verify.service import ages

MODES = ("sync", "async", "ssp:0", "ssp:2", "k-of-n:2/3")


def compiled(words="", steps=4, layers=5, **more):
    return Plan.parse(f"dp=3 sync=ps {words}").compile(layers=layers, steps=steps, **more)


@pytest.mark.parametrize("words", ["", "servers=2", "microbatches=3 accumulate=2 servers=3", "checkpoint=2",
                                   "bucket=0.000005 servers=2", "overlap=none bucket=none",
                                   "schedule=zb-h1 microbatches=4 servers=3"])  # fmt: skip
def test_sync_is_known_beforehand(words):
    program = compiled(words)
    trace = simulate(program, latency=0.1)
    assert trace.program is program, "simulated word for word"
    assert trace.staleness() == [0] * len(program.ranks)
    plan = Plan.parse(f"dp=3 sync=ps {words}")
    assert len(program.ranks) == plan.ranks == 3 + plan.servers
    assert Program.from_json(program.to_json()) == program
    # 2 n D bytes go through the servers in a step: n times in, n times out.
    moved = [sum(p.bytes for ins in row if ins.op in (Op.ACCEPT, Op.REPLY) for p in ins.parts)
             for row in program.ranks[3:]]  # fmt: skip
    assert sum(moved) == 4 * 2 * 3 * 5 * 4
    assert max(moved) - min(moved) <= 4 * 2 * 3 * 4


@pytest.mark.parametrize(
    ("choice", "sent"),
    # Bytes that a worker sends in a step: of 5 x 40 numbers in pieces of 40, and with two servers two of 20.
    [("none", 800), ("bf16", 400), ("topk:0.5", 5 * 20 * 8), ("topk:0.1", 5 * 4 * 8)],
)
@pytest.mark.parametrize("servers", [1, 2])
def test_what_is_pushed_is_smaller(choice, sent, servers):
    shape = Shape(5, tuple(Group((layer,), (160,)) for layer in range(5)))
    program = Plan.parse(f"dp=3 sync=ps servers={servers} compress={choice}").compile(shape, steps=2)
    for op in (Op.PUSH, Op.ACCEPT):
        moved = sum(part.bytes for row in program.ranks for ins in row if ins.op is op for part in ins.parts)
        assert moved == 2 * 3 * sent
    assert sum(part.bytes for row in program.ranks for ins in row if ins.op is Op.PULL for part in ins.parts) == 4800
    kept = {value.kind for value in program.state[0]}
    assert kept == {"param", "residual"} if choice.startswith("topk") else {"param"}
    assert simulate(program, latency=0.1).program is program


def test_a_gradient_is_pushed_after_its_weight_half():
    row = compiled("schedule=zb-h1 microbatches=2 bucket=none", steps=1, layers=2).ranks[0]
    assert [str(ins) for ins in row][-4:] == ["W 1 mb1", "PUSH 1 -> 3", "W 0 mb1", "PUSH 0 -> 3"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("servers", [1, 2])
def test_what_would_happen_keeps_its_contract(mode, servers):
    """A straggler at a fifth of the speed, on as many cores as ranks and on fewer."""
    program = compiled(f"mode={mode} servers={servers} microbatches=2", steps=10)
    factors = [5.0] + [1.0] * (2 + servers)
    for cores in (None, 2):
        trace = simulate(program, stage_factors=factors, latency=0.1, cores=cores)
        verify(trace.program)
        found = ages(trace.program)
        if mode in ("sync", "k-of-n:2/3"):
            assert all(late == 0 for *_, late in found)
        else:
            assert sorted((w, s) for w, s, _, _ in found) == [(w, s) for w in range(3) for s in range(10)]
        assert max(late for *_, late in found) == max(trace.staleness())
        assert len({update for _, _, update, _ in found}) == (10 if mode in ("sync", "k-of-n:2/3") else 30)


def test_servers_take_the_same_replicas():
    found = simulate(compiled("mode=k-of-n:1/3 servers=2", steps=3)).program
    verify(found)
    row = list(found.ranks[3])
    applied = next(k for k, ins in enumerate(row) if ins.op is Op.APPLY)
    taken = next(k for k, ins in enumerate(row) if ins.op is Op.ACCEPT)
    dropped = next(k for k, ins in enumerate(row) if ins.op is Op.ACCEPT and k > applied and not ins.step)
    other = row[dropped]._replace(frees=())
    gone, come = set(row[taken].writes), other.writes
    changed = row[applied]._replace(
        reads=(*come, *(v for v in row[applied].reads if v not in gone)),
        frees=(*come, *(v for v in row[applied].frees if v not in gone)),
    )
    row[taken] = row[taken]._replace(frees=row[taken].writes)
    with pytest.raises(ProgramError, match="of other replicas or steps than update 0 does elsewhere .on rank"):
        verify(found.with_rank(3, [*row[:applied], other, changed, *row[applied + 1 : dropped], *row[dropped + 1 :]]))


def test_who_waits_for_a_straggler():
    """sync, ssp and async end with the straggler's last step; k-of-n without it. Its parameters are the oldest."""
    time, fast = {}, {}
    for mode in MODES:
        trace = simulate(compiled(f"mode={mode}", steps=12), stage_factors=[5.0, 1, 1, 1])
        time[mode] = trace.time
        fast[mode] = max(trace.ends[1])
    assert time["sync"] == 12 * 15
    assert time["k-of-n:2/3"] < 12 * 3 + 15
    assert fast["async"] == 12 * 3
    assert fast["async"] < fast["ssp:2"] < fast["ssp:0"] == time["sync"] - 15 + 3
    assert simulate(compiled("mode=async", steps=12), stage_factors=[5.0, 1, 1, 1]).staleness()[0] == 10


def test_steps_of_different_versions_are_refused():
    trace = simulate(compiled("mode=async", steps=4), stage_factors=[5.0, 1, 1, 1])
    bad = replace(trace.program, contract=Staleness(1))
    with pytest.raises(ProgramError, match="takes a gradient of rank 0 that is . updates old; possible are at most 1"):
        verify(bad)


def test_a_replica_of_several_ranks_is_refused():
    program = replace(compiled(steps=1), mesh=(("dp", 1), ("pp", 3)))
    with pytest.raises(ProgramError, match="serving: 3 workers for 1 replica; possible is one rank each"):
        verify(program)


def test_refused_programs():
    program = compiled("microbatches=2", steps=2)
    row = program.ranks[3]
    apply = next(k for k, ins in enumerate(row) if ins.op is Op.APPLY)
    lacking = row[apply]._replace(
        reads=tuple(v for v in row[apply].reads if v.kind != "pushed" or v.microbatch != 1),
        frees=tuple(v for v in row[apply].frees if v.microbatch != 1),
    )
    with pytest.raises(ProgramError, match="rank 1's of step 0 is not read"):
        verify(program.with_rank(3, [*row[:apply], lacking, *row[apply + 1 :]]))
    swapped = [row[apply], *row[3:apply], *row[:3], *row[apply + 1 :]]
    with pytest.raises(ProgramError):
        verify(program.with_rank(3, swapped))
    with pytest.raises(ProgramError, match="deadlock"):
        verify(program.with_rank(3, [*row[3 : apply + 1], *row[:3], *row[apply + 1 :]]))
    with pytest.raises(ProgramError, match="receive order differs|without"):
        verify(program.with_rank(3, row[1:]))
    worker = program.ranks[0]
    early = [*worker[:3], worker[5], *worker[3:5], *worker[6:]]
    assert worker[5].op is Op.PUSH
    with pytest.raises(ProgramError, match="grad.* lacks micro-batch 1|no producer"):
        verify(program.with_rank(0, early))
    with pytest.raises(ProgramError, match="never pushes grad|send|receive"):
        verify(program.with_rank(0, [*worker[:5], *worker[6:]]))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("mode=fast", "mode=fast: unknown; possible are sync, async, ssp:S, k-of-n:K/N"),
        ("mode=ssp", "mode=ssp: unknown"),
        ("mode=ssp:-1", "unknown"),
        ("mode=k-of-n:4/3", "K must be from 1 to N, 3"),
        ("mode=k-of-n:0/3", "K must be from 1 to N, 3"),
        ("mode=k-of-n:1/2", "N must be the number of workers, 3"),
        ("servers=0", "servers=0: must be a whole number of at least 1"),
        ("servers=99", "servers=99: too many for parameters of 20 bytes"),
        ("on_death=pray", "on_death=pray: unknown; possible are abort, continue"),
    ],
)
def test_refused_plans(words, text):
    with pytest.raises(PlanError, match=text.replace("(", r"\(")):
        compiled(words)


def test_keys_of_servers_need_servers():
    for words in ("mode=async", "servers=2", "on_death=continue", "sync=gossip"):
        with pytest.raises(PlanError, match=words.split("=")[0]):
            Plan.parse(f"dp=2 {words}")
    assert str(Plan.parse("dp=3 sync=ps mode=ssp:02")) == "dp=3 pp=1 sync=ps mode=ssp:2"


# the rule alone


def test_nobody_goes_on_before_those_who_were_expected():
    rule = Consistency(Mode.parse("sync", 2), 2, 5)
    rule.join(0)
    rule.ask(0)
    assert [row.kind for row in rule.decide()] == [Kind.ANSWER]
    rule.push(0, 0)
    rule.ask(0)
    assert rule.decide() == [], "worker 1 has not been heard of, but is expected"
    rule.push(1, 0)
    assert [row.kind for row in rule.decide()] == [Kind.TAKE, Kind.TAKE, Kind.APPLY]
    assert rule.decide() == [Row(Kind.ANSWER, 0, 1, 1)]


def test_where_all_begin_together_nobody_is_answered_before_the_last_has_asked():
    rule = Consistency(Mode.parse("async", 2), 2, 5)
    rule.absent = {0, 1}
    rule.join(0)
    rule.ask(0)
    assert rule.decide() == []
    rule.join(1)
    assert rule.decide() == [], "it is there, and not ready"
    rule.ask(1)
    assert rule.decide() == [Row(Kind.ANSWER, 0, 0, 0)]


def test_one_that_nobody_expected_begins_with_the_slowest():
    rule = Consistency(Mode.parse("ssp:1", 2), 2, 9)
    for step in range(3):
        rule.push(0, step)
        rule.decide()
    rule.ask(0)
    assert rule.decide() == [], "worker 1 is three steps behind"
    for step in range(2):
        rule.push(1, step)
        rule.decide()
    assert rule.join(2) == Row(Kind.JOIN, 2, 2, 5)
    read = Consistency(rule.mode, 2, 9)
    read.follow(rule.join(2))
    assert read.members == {0, 1, 2}
    assert read.clocks[2] == 2


def test_late_gradients_are_dropped_and_known_ones_void():
    rule = Consistency(Mode.parse("k-of-n:1/2", 2), 2, 9)
    rule.push(0, 0)
    assert [row.kind for row in rule.decide()] == [Kind.TAKE, Kind.APPLY]
    rule.push(0, 0)
    assert not rule.pushed, "a second time"
    rule.push(1, 0)
    rule.ask(1)
    assert rule.decide() == [Row(Kind.DROP, 1, 0, 1)]
    assert rule.decide() == [Row(Kind.ANSWER, 1, 1, 1)], "and it goes on at the present version"
