"""Ranks that do the same on other rows or shards: whoever looks at one of them finds what is found at all of them."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from minipar import DeviceSpec, Plan, Program, ProgramError, pass_, simulate, verify
from minipar.costs.unit import UnitCosts
from minipar.models.shapes import shape
from minipar.prediction import on_paper
from minipar.prediction.plain_simulator import start_and_end
from minipar.prediction.program_costs import ProgramCosts, microbatch_rows
from minipar.program import COMPUTE, Instruction, Op, Value
from minipar.program.repeated import Repeated, _inside

PLANS = (
    "dp=3 pp=2 microbatches=3",
    "dp=2 pp=2 microbatches=4 schedule=interleaved clip=1",
    "dp=3 pp=2 microbatches=3 schedule=zb-v bucket=none",
    "dp=2 pp=2 microbatches=2 zero=2 checkpoint=1",
    "dp=2 pp=2 microbatches=2 zero=3 prefetch=1",
    "dp=2 pp=2 microbatches=2 offload=activations,parameters",
    "dp=2 microbatches=2 overlap=priority bucket=0.000005",
    "dp=2 microbatches=2 compress=topk:0.5 bucket=none",
    "dp=2 pp=2 schedule=terapipe slices=2",
    "tp=3 pp=2 microbatches=2 clip=1",
    "dp=2 tp=3 microbatches=2 sequence_parallel=true bucket=none clip=1",
    "dp=2 tp=2 pp=2 microbatches=2 sequence_parallel=true zero=3 checkpoint=1",
    "dp=2 tp=2 microbatches=2 batch_copies=2",
    "dp=3 context_parallel=2 pp=2 microbatches=2",
    "dp=2 ep=2 pp=2 microbatches=2",
    "dp=2 ep=2 context_parallel=2 tp=2 pp=2 microbatches=2 sequence_parallel=true clip=1",
)


def compiled(words: str, steps: int = 2) -> Program:
    plan = Plan.parse(words)  # (layers that ranks share have five nodes)
    return plan.compile(layers=2 if plan.sharing > 1 else 4, steps=steps, check=False)


def rank_by_rank(program: Program) -> Program:
    """The same program, written out for every rank."""
    return replace(program, ranks=tuple(program.ranks))


def is_whole(ranks: Repeated) -> bool:
    """Whether every message stays inside of a pipeline, and every group has the ranks of all replicas, or shards, of
    which it has any: those of minipar's own passes do."""
    mesh = ranks.mesh

    def whole(stage: int, ins: Instruction) -> tuple[int, ...]:
        if _inside(ins):
            known = all(0 <= rank < mesh.size for rank in ins.group)
            return mesh.group(mesh.rank(pp=stage), *(ranks._along(ins.group) if known else mesh.sharing))
        stages = {mesh.coordinates(rank)["pp"] for rank in ins.group if 0 <= rank < mesh.size}
        axes = ((*mesh.sharing,) if ins.op is Op.NORM else ()) + (() if ranks._within(ins.group) else ("dp",))
        return tuple(sorted(rank for stage in stages for rank in mesh.group(mesh.rank(pp=stage), *axes)))

    return all(
        (ins.peer == -1 and ins.group == whole(stage, ins)) if ins.group else -1 <= ins.peer < len(ranks.rows)
        for stage, row in enumerate(ranks.rows)
        for ins in row
    )


class Even:
    """Costs drawn from what an instruction does, and not from the rank; `asked` counts how often compute was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def draw(self, *name: object) -> float:
        return Random(str(name)).randrange(25) / 8

    def compute(self, rank: int, ins: Instruction) -> float:
        self.asked += 1
        return self.draw(ins.op, ins.layers, ins.microbatch, ins.step)

    def transfer(self, rank: int, ins: Instruction) -> tuple[float, float]:
        return self.draw(ins.reads), self.draw("latency", ins.reads)

    def collective(self, ins: Instruction) -> float:
        return self.draw(ins.op, len(ins.group), ins.step, () if ins.op is Op.NORM else ins.reads)

    def size(self, rank: int, value: Value) -> float:
        return 8 * self.draw(value)

    def even(self, rank: int, other: int) -> bool:
        return True


@pytest.mark.parametrize("words", PLANS)
def test_all_readers_find_the_same(words: str) -> None:
    program = compiled(words)
    plain, costs = rank_by_rank(program), Even()
    assert isinstance(program.ranks, Repeated)
    assert is_whole(program.ranks)  # (`compile` takes that for granted)
    assert program == plain
    assert plain == program
    assert hash(program.ranks) == hash(plain.ranks)
    assert len(program) == len(plain) == sum(map(len, plain.ranks))
    for name in ("ops", "placement", "share", "kept", "updates"):
        assert getattr(program, name) == getattr(plain, name)
    verify(program)
    verify(plain)
    one, other = simulate(program, costs), simulate(plain, costs)
    assert ([*map(list, one.starts)], [*map(list, one.ends)]) == start_and_end(plain, costs)
    assert (list(one.starts), list(one.ends)) == (list(other.starts), list(other.ends))
    assert len({id(row) for row in one.starts}) < len({id(row) for row in other.starts}) == len(plain.ranks)
    assert (one.span, one.busy, one.window_bubble()) == (other.span, other.busy, other.window_bubble())
    assert (one.peak_memory(), one.in_flight()) == (other.peak_memory(), other.in_flight())
    assert (one.bytes_sent(), one.bytes_by_link()) == (other.bytes_sent(), other.bytes_by_link())
    assert (one.staleness(), one.weight_versions()) == (other.staleness(), other.weight_versions())
    assert one.messages_per_microbatch() == other.messages_per_microbatch()
    assert one.summary() == other.summary()


def test_ranks_are_a_sequence_of_all_rows() -> None:
    program = compiled("dp=2 tp=2 pp=2 microbatches=2 clip=1")
    rows = tuple(program.ranks)
    assert (program.ranks[-1], program.ranks[2:5], len(program.ranks)) == (rows[-1], rows[2:5], 8)
    with pytest.raises(IndexError):
        program.ranks[8]
    sent = pickle.loads(pickle.dumps(program))
    assert sent == program
    assert isinstance(sent.ranks, Repeated)
    assert Program.from_json(json.loads(json.dumps(program.to_json()))) == program
    assert isinstance(program.with_rank(0, rows[0]).ranks, tuple)
    assert {ins.peer for ins in rows[5] if ins.op is Op.SEND} == {7}  # dp=1 pp=0 tp=1 -> dp=1 pp=1 tp=1


# mistakes -------------------------------------------------------------------------------------------------------------


def with_mistake(rows: Sequence[Sequence[Instruction]], random: Random) -> list[list[Instruction]]:
    """Rows of one pipeline with an instruction that is missing, doubled, early, or changed in a field."""
    found = [list(row) for row in rows]
    row = random.choice(found)
    k = random.randrange(len(row))
    if random.random() < 0.4:  # (a collective is what replicas and shards do together)
        k = random.choice([n for n, ins in enumerate(row) if ins.group] or [k])
    ins, kind = row[k], random.randrange(7)
    if kind == 0:
        del row[k]
    elif kind == 1:
        row.insert(random.randrange(len(row) + 1), ins)
    elif kind == 2:
        row.insert(random.randrange(len(row)), row.pop(k))
    elif kind == 3 and ins.microbatch > 0:
        row[k] = ins._replace(microbatch=ins.microbatch - 1)
    elif kind == 4:
        row[k] = ins._replace(step=1 - ins.step)
    else:
        name = random.choice(("reads", "writes", "frees", "layers"))
        row[k] = ins._replace(**{name: getattr(ins, name)[1:]})
    return found


@pytest.mark.many(6)
@pytest.mark.parametrize("words", PLANS)
def test_mistakes_in_all_replicas_are_refused_in_the_same_words(words: str) -> None:
    program, random, refused, tried = compiled(words), Random(words), 0, 0
    assert isinstance(program.ranks, Repeated)
    for _ in range(20):
        ranks = Repeated(with_mistake(program.ranks.rows, random), program.ranks.mesh)
        if not is_whole(ranks):
            continue
        mutant, told = replace(program, ranks=ranks), []
        for one in (mutant, rank_by_rank(mutant)):
            try:
                verify(one)
                told.append(("", "", ()))
            except ProgramError as error:
                told.append((error.reason, error.details, error.places))
        assert told[0] == told[1]
        tried, refused = tried + 1, refused + bool(told[0][0])
    assert tried > 15
    assert refused > 5


@pytest.mark.parametrize(
    "words", ["dp=3 pp=2 microbatches=3 bucket=flat", "dp=2 tp=2 microbatches=2 sequence_parallel=true"]
)
def test_a_sum_that_is_missing_or_doubled_is_found_where_only_one_replica_is_looked_at(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minipar.program.verify.verifier._MOST_REPEATED", 0)  # (what is found is not told of all ranks)
    program = compiled(words, steps=1)
    assert isinstance(program.ranks, Repeated)
    row = program.ranks.rows[0]
    for k in [n for n, ins in enumerate(row) if ins.op is Op.ALL_REDUCE and ins.reads[0].kind == "grad"]:
        for times, says in ((0, "gradients are complete"), (2, "twice")):
            mutant = (*row[:k], *times * (row[k],), *row[k + 1 :])
            ranks = Repeated((mutant, *program.ranks.rows[1:]), program.ranks.mesh)
            assert is_whole(ranks)
            with pytest.raises(ProgramError, match=says):
                verify(replace(program, ranks=ranks))
            assert len(ranks.known) == len(ranks.rows)


# who goes the plain way -----------------------------------------------------------------------------------------------


def test_ranks_that_differ_are_looked_at_one_by_one() -> None:
    program = compiled("dp=3 pp=2 microbatches=2")
    other = next(iter(program.state[4]))
    lacking = replace(program, state=(*program.state[:4], program.state[4] - {other}, *program.state[5:]))
    with pytest.raises(ProgramError, match="rank 4"):
        verify(lacking)
    factors = (1.0,) * 5 + (2.0,)  # the last rank is slower
    found = simulate(program, stage_factors=factors)
    costs = UnitCosts(program, stage_factors=factors)
    assert ([*map(list, found.starts)], [*map(list, found.ends)]) == start_and_end(program, costs)
    assert found.busy[5] == 2 * found.busy[1] == 2 * found.busy[3]


@pytest.mark.parametrize(("batch", "walked"), [(12, 2), (13, 4)])
def test_replicas_with_other_numbers_of_rows_are_simulated_one_by_one(batch: int, walked: int) -> None:
    plan = Plan.parse("dp=2 pp=2 microbatches=3 zero=1")
    measured = on_paper.profile("gpt-tiny", microbatch_rows(batch, 2, 3))
    program = plan.compile(shape("gpt-tiny"), check=False)
    for device in (DeviceSpec(), DeviceSpec.parse("flops=1GFLOP/s bandwidth=20MB/s")):
        costs = ProgramCosts(program, measured, batch, device)
        found, plain = simulate(program, costs), simulate(rank_by_rank(program), costs)
        assert (list(found.starts), list(found.ends)) == (list(plain.starts), list(plain.ends))
        assert (found.peak_memory(), found.bytes_sent()) == (plain.peak_memory(), plain.bytes_sent())
        assert len({id(row) for row in found.starts}) == walked


def test_what_does_not_repeat_a_pipeline_is_written_rank_by_rank() -> None:
    pass_("nothing")(lambda draft: draft)
    for words in ("pp=2 microbatches=2", "dp=2 sync=ps", "dp=2 extra_passes=nothing"):
        assert isinstance(compiled(words).ranks, tuple)


def test_factors_of_stages_are_those_of_all_ranks_that_share_them() -> None:
    found = simulate(compiled("dp=2 pp=2 tp=2 microbatches=2"), stage_factors=(1.0, 3.0))
    assert [round(time / found.busy[0]) for time in found.busy] == [1, 1, 3, 3, 1, 1, 3, 3]
    assert len({id(row) for row in found.starts}) == 2


# growth ---------------------------------------------------------------------------------------------------------------


def test_only_one_pipeline_is_made_checked_and_simulated() -> None:
    """A program of 512 ranks: what is made and visited are the rows of 4 of them."""
    program = Plan.parse("dp=32 pp=4 tp=4 microbatches=4 zero=1 clip=1").compile(layers=4)
    assert isinstance(program.ranks, Repeated)
    costs = Even()
    trace = simulate(program, costs)
    assert len(trace.bytes_sent()) == len(trace.peak_memory()) == len(trace.in_flight()) == 512
    assert trace.summary().startswith(f"predicted trace: 512 ranks, {len(program)} instructions")
    assert sorted(program.ranks.known) == [0, 4, 8, 12]
    own = sum(ins.op in COMPUTE for row in program.ranks.rows for ins in row)
    assert costs.asked == own < len(program) / 128
