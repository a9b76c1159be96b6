"""Programs of parameter servers: bytes, order, verification, simulation by the rule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from minipar import Plan, Program, simulate, verify
from minipar.costs.unit import UnitCosts
from minipar.errors import PlanError, ProgramError
from minipar.program import Group, Op, Portion, Staleness, grad
from minipar.program.server_rule import Consistency, Kind, Mode, Row, Rules
from minipar.program.shape import Shape, divided, uniform
from minipar.program.verify.service import ages
from minipar.server.shard import ParameterKey, pieces_of
from minipar.strategies.shares import GRAIN, parts_of, portions_of, shares_of

MODES = ("sync", "async", "ssp:0", "ssp:2", "k-of-n:2/3")


def compiled(words="", steps=4, layers=5, **more):
    return Plan.parse(f"dp=3 sync=ps {words}").compile(layers=layers, steps=steps, **more)


@pytest.mark.parametrize("words", ["", "servers=2", "microbatches=3 accumulate=2 servers=3", "checkpoint=2",
                                   "bucket=0.000005 servers=2", "overlap=none bucket=none",
                                   "overlap=priority servers=2", "pp=2 microbatches=2",
                                   "pp=4 servers=2 overlap=priority schedule=gpipe",
                                   "pp=2 schedule=chimera microbatches=4",
                                   "pp=2 chunks=2 schedule=interleaved microbatches=2",
                                   "pp=2 schedule=zb-h1 microbatches=4 overlap=priority servers=3"])  # fmt: skip
def test_sync_is_known_beforehand(words):
    program = compiled(words)
    trace = simulate(program, latency=0.1)
    assert trace.program is program, "simulated word for word"
    assert trace.staleness() == [0] * len(program.ranks)
    plan = Plan.parse(f"dp=3 sync=ps {words}")
    assert len(program.ranks) == plan.ranks == 3 * plan.pp + plan.servers
    assert Program.from_json(program.to_json()) == program
    # 2 n D bytes go through the servers in a step: n times in, n times out.
    moved = [sum(p.bytes for ins in row if ins.op in (Op.ACCEPT, Op.REPLY) for p in ins.parts)
             for row in program.ranks[3 * plan.pp :]]  # fmt: skip
    copies = 2 if plan.copies else 1
    assert sum(moved) == copies * 4 * 2 * 3 * 5 * 4
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


class ByBytes(UnitCosts):
    """A layer's forward takes 1 and its backward 1; a byte to or from a server takes 1."""

    def transfer(self, rank, ins):
        return float(sum(part.bytes for part in ins.parts)) if ins.op is not Op.PULL else 0.0, 0.0


def by_priority(words="", sizes=(8, 8, 16), steps=2, time=None):
    shape = Shape(len(sizes), tuple(Group((k,), (size,)) for k, size in enumerate(sizes)))
    plan = Plan.parse(f"sync=ps overlap=priority {words}")
    own = time or len(sizes)
    return plan.compile(shape, steps=steps, costs_of=lambda program: ByBytes(program, own, own))


def test_what_the_next_forward_needs_first_is_pushed_and_pulled_first():
    """The last layer's gradient is ready first, and its message is long: meanwhile those of the others become ready."""
    program = by_priority()
    worker, server = ([str(ins) for ins in row] for row in program.ranks)
    assert worker[-10:] == [
        "PULL 2 <- 1", "PULL 0 <- 1", "F 0 mb0", "PULL 1 <- 1", "F 1:3 mb0", "B 2 mb0", "PUSH 2 -> 1", "B 0:2 mb0",
        "PUSH 0 -> 1", "PUSH 1 -> 1",
    ]  # fmt: skip
    assert server[3:12] == [
        "ACCEPT 2 <- 0", "APPLY 2", "REPLY 2 -> 0", "ACCEPT 0 <- 0", "APPLY 0", "REPLY 0 -> 0", "ACCEPT 1 <- 0",
        "APPLY 1", "REPLY 1 -> 0",
    ]  # fmt: skip
    trace = simulate(program, ByBytes(program, 3, 3))
    place = {str(ins): k for k, ins in enumerate(program.ranks[0]) if ins.step == 1}
    sent = [k for k, ins in enumerate(program.ranks[1]) if str(ins) == "REPLY 0 -> 0"][1]
    assert trace.starts[0][place["F 0 mb0"]] == trace.ends[1][sent], "a forward waits for its own layer alone"
    assert trace.starts[0][place["F 1:3 mb0"]] > trace.ends[0][place["F 0 mb0"]]


def test_large_layers_go_in_pieces_which_can_be_overtaken():
    """P3: what is left of a large layer waits while a small one, which the next forward needs earlier, goes."""
    program = by_priority(f"bucket={16 / 2**20}", sizes=(8, 8, 64))
    worker, server = ([str(ins) for ins in row if ins.step == 1] for row in program.ranks)
    assert worker == [
        "PULL 2[0:16] <- 1", "PULL 0 <- 1", "F 0 mb0", "PULL 1 <- 1", "F 1 mb0", "PULL 2[16:32] <- 1",
        "PULL 2[32:48] <- 1", "PULL 2[48:64] <- 1", "F 2 mb0", "B 2 mb0", "PUSH 2[0:16] -> 1", "B 0:2 mb0",
        "PUSH 0 -> 1", "PUSH 1 -> 1", "PUSH 2[16:32] -> 1", "PUSH 2[32:48] -> 1", "PUSH 2[48:64] -> 1",
    ]  # fmt: skip
    assert server[-6:] == [
        "ACCEPT 2[16:32] <- 0", "APPLY 2[16:32]", "ACCEPT 2[32:48] <- 0", "APPLY 2[32:48]", "ACCEPT 2[48:64] <- 0",
        "APPLY 2[48:64]",
    ]  # fmt: skip
    whole, pieces = (by_priority(f"bucket={size}", (8, 8, 64), 4, 60) for size in ("none", 16 / 2**20))
    times = [simulate(program, ByBytes(program, 60, 60)).time for program in (whole, pieces)]
    assert times[1] < 0.9 * times[0]
    (freed,) = [ins for ins in pieces.ranks[0] if ins.op is Op.PUSH and ins.step == 0 and grad(2) in ins.frees]
    assert str(freed) == "PUSH 2[48:64] -> 1"


@pytest.mark.parametrize("words", ["servers=2", "servers=3 dp=2", "servers=2 pp=2 microbatches=2", "compress=topk:0.5",
                                   "servers=2 compress=bf16"])  # fmt: skip
def test_pieces_are_all_of_each_layer_wherever_servers_cut_it(words):
    program = by_priority(f"bucket={32 / 2**20} {words}", sizes=(40, 24, 200), steps=2)
    trace = simulate(program, ByBytes(program, 3, 3))
    assert trace.program is program
    assert trace.staleness() == [0] * len(program.ranks)
    assert Program.from_json(program.to_json()) == program
    for op in (Op.ACCEPT, Op.REPLY, Op.APPLY):
        rows = program.ranks[program.workers :]
        assert max(part.bytes for row in rows for ins in row for part in ins.parts if ins.op is op) <= 32 + GRAIN
    pulled = sum(part.bytes for ins in program.ranks[0] if ins.op is Op.PULL for part in ins.parts)
    layers = program.placement[0]
    assert pulled == 2 * sum(sum(group.tensors) for group in program.groups if set(group.layers) & set(layers))
    if "servers=2" in words and "pp" not in words:  # the pieces of a layer go to its servers by turns
        sent = [ins.peer for ins in program.ranks[0] if ins.op is Op.PUSH and ins.layers == (2,) and not ins.step]
        assert sent[:4] == [program.workers, program.workers + 1] * 2


def test_pieces_end_at_multiples_of_a_grain_of_their_tensor():
    groups = [Group((0,), (12, 100)), Group((1,), (8,))]
    (one,) = portions_of(groups, 1, 40)
    assert one == {Portion(0, 0, 28): (12, 16), Portion(0, 28, 60): (32,), Portion(0, 60, 112): (52,), Portion(1): (8,)}
    first, second = portions_of(groups, 2, 1000)
    assert first == {Portion(0): (12, 48)}
    assert second == {Portion(0): (52,), Portion(1): (8,)}
    first, second = portions_of(groups, 2, 40)
    assert list(first) == [Portion(0, 0, 28), Portion(0, 28, 60)]
    assert list(second) == [Portion(0, 60, 76), Portion(0, 76, 112), Portion(1)]
    assert parts_of((12, 0, 100), [Portion(0, 0, 28), Portion(0, 28, 112)]) == [[(0, 0, 12), (1, 0, 0), (2, 0, 16)],
                                                                               [(2, 16, 100)]]  # fmt: skip


def test_the_size_of_pieces_is_that_with_which_the_next_forward_ends_earliest():
    """A large last layer, whose message the first layer's would wait for: pieces let it pass."""
    sizes = (4 * 4096, 4 * 4096, 64 * 4096)

    def program(bucket):
        return by_priority(f"bucket={bucket}", sizes, 3, 100_000)

    auto = program("auto")
    largest = max(ins.parts[0].bytes for ins in auto.ranks[0] if ins.op is Op.PUSH)
    assert largest in [sizes[2] >> k for k in range(1, 7)]
    times = {b: simulate(program(b), ByBytes(program(b), 100_000, 100_000)).time for b in ("auto", "none")}
    assert times["auto"] < 0.95 * times["none"]


def test_layers_served_one_by_one_are_faster():
    """The last answer of a step is that of one layer, and not of all."""
    times = {}
    for overlap in ("backward", "priority"):
        shape = Shape(4, tuple(Group((k,), (8,)) for k in range(4)))
        program = Plan.parse(f"sync=ps bucket=none overlap={overlap}").compile(shape, steps=4)
        times[overlap] = simulate(program, ByBytes(program, 40, 40)).time
    assert times["priority"] < 0.9 * times["backward"]


@pytest.mark.parametrize("words", ["tp=2", "tp=2 sequence_parallel=true microbatches=2 overlap=priority"])
def test_ranks_that_share_layers_are_workers_of_their_own(words):
    shape = divided(uniform(2), 2, "sequence" in words)
    groups = tuple(group._replace(tensors=tuple(8 * size for size in group.tensors)) for group in shape.groups)
    program = Plan.parse(f"dp=3 sync=ps servers=2 {words}").compile(replace(shape, groups=groups), steps=2)
    trace = simulate(program, latency=0.1)
    assert trace.program is program
    assert trace.staleness() == [0] * len(program.ranks)
    assert Program.from_json(program.to_json()) == program
    moved = [sum(p.bytes for ins in row if ins.op is Op.PUSH for p in ins.parts) for row in program.ranks[:6]]
    assert set(moved) == {2 * sum(sum(group.tensors) for group in program.groups)}
    updated = [p for row in program.ranks[6:] for ins in row if ins.op is Op.APPLY and ins.step == 0 for p in ins.parts]
    for g, group in enumerate(program.groups):  # (servers have every shard)
        count = 2 if group.form == "S" else 1
        assert sum(part.bytes for part in updated if part.layer == g) == count * sum(group.tensors)
    rank, first = program.ranks[1], next(ins for ins in program.ranks[1] if ins.group)
    with pytest.raises(ProgramError, match="rank 1 never pushes"):
        verify(program.with_rank(1, [ins for ins in rank if ins.op is not Op.PUSH or ins.step]))
    with pytest.raises(ProgramError):
        verify(program.with_rank(1, [ins for ins in rank if ins is not first]))
    with pytest.raises(ProgramError, match="again"):
        verify(program.with_rank(1, [ins for ins in rank for _ in range(1 + (ins.op is Op.PUSH and not ins.step))]))


def test_shards_are_cut_alike_over_servers():
    keys = [ParameterKey("a", (5, 4), "float32", (0, k, 2, 1)) for k in (0, 1)] + [ParameterKey("b", (7,), "float64")]
    found = pieces_of(keys, 2)
    assert [[(p.tensor, p.start, p.stop) for p in pieces] for pieces in found] == [
        [(0, 0, 64), (1, 0, 64)], [(0, 64, 80), (1, 64, 80), (2, 0, 56)]
    ]  # fmt: skip
    assert shares_of([Group((0,), (80,), form="S"), Group((1,), (56,))], 2) == [{0: 64}, {0: 16, 1: 56}]


def test_refused_orders_of_layers():
    """A layer that is used before its parameters are there, left out, updated twice or of another version."""
    program = by_priority("dp=2")
    worker, server = list(program.ranks[0]), list(program.ranks[2])
    first = next(k for k, ins in enumerate(worker) if str(ins) == "PULL 1 <- 2")
    with pytest.raises(ProgramError, match=r"uses param\(1\), which was not pulled"):
        verify(program.with_rank(0, [*worker[:first], worker[first + 1], worker[first], *worker[first + 2 :]]))
    with pytest.raises(ProgramError, match="uses param|without"):
        verify(program.with_rank(0, [*worker[:first], *worker[first + 1 :]]))
    applied = next(k for k, ins in enumerate(server) if ins.op is Op.APPLY)
    with pytest.raises(ProgramError, match="is update 1 of group 2"):
        verify(program.with_rank(2, [*server[: applied + 1], *server[applied:]]))
    late = [*server[:applied], server[applied + 1], server[applied], *server[applied + 2 :]]
    with pytest.raises(ProgramError, match="brings .* version|after 0 updates; a synchronous program promises 1"):
        verify(program.with_rank(2, late))


def test_refused_pieces():
    """A piece that is left out everywhere, used before it is there, updated twice, or of another size than it is
    elsewhere."""
    program = by_priority(f"dp=2 bucket={16 / 2**20}", sizes=(8, 8, 64))
    ranks = [list(row) for row in program.ranks]

    def without(op, text):
        return replace(
            program,
            ranks=tuple(tuple(i for i in row if not (i.op in op and text in str(i))) for row in ranks),
        )

    with pytest.raises(ProgramError, match=r"pushes grad\(2\) of step 0 in pieces: 2.32:48. comes after byte 16"):
        verify(without((Op.PUSH, Op.ACCEPT), "2[16:32]"))
    with pytest.raises(ProgramError, match=r"pushes grad\(2\) of step 0 in pieces: they end at byte 48 of 64|keeps"):
        verify(without((Op.PUSH, Op.ACCEPT), "2[48:64]"))
    with pytest.raises(ProgramError, match=r"uses param\(2\), which was pulled in pieces for step 0: 2.32:48. comes"):
        verify(without((Op.PULL, Op.REPLY), "2[16:32]"))
    worker, server = ranks[0], ranks[2]
    pulled = next(k for k, ins in enumerate(worker) if str(ins) == "PULL 2[48:64] <- 2")
    with pytest.raises(ProgramError, match=r"which was pulled in pieces for step 0: they end at byte 48 of 64"):
        verify(program.with_rank(0, [*worker[:pulled], worker[pulled + 1], worker[pulled], *worker[pulled + 2 :]]))
    with pytest.raises(ProgramError, match=r"pulls param\(2.48:64.\) of step 0 again|without"):
        verify(program.with_rank(0, [*worker[: pulled + 1], *worker[pulled:]]))
    applied = next(k for k, ins in enumerate(server) if str(ins) == "APPLY 2[16:32]")
    with pytest.raises(ProgramError, match=r"is update 1 of group 2.16:32."):
        verify(program.with_rank(2, [*server[: applied + 1], *server[applied:]]))
    other = server[applied]._replace(parts=(server[applied].parts[0]._replace(start=32, end=48),))
    with pytest.raises(ProgramError, match="names other values"):
        verify(program.with_rank(2, [*server[:applied], other, *server[applied + 1 :]]))
    both = server[applied]._replace(layers=(1, 2))
    with pytest.raises(ProgramError, match="a piece is of one group"):
        verify(program.with_rank(2, [*server[:applied], both, *server[applied + 1 :]]))


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


def in_order(program):
    """For each rank and step the update that took its gradient, and its age."""
    return {(w, s): (update, late) for w, s, update, late in ages(program)}


def shared_by_two(words, steps=4):
    shape = divided(uniform(2), 2)
    groups = tuple(group._replace(tensors=tuple(8 * size for size in group.tensors)) for group in shape.groups)
    return Plan.parse(f"dp=3 sync=ps {words}").compile(replace(shape, groups=groups), steps=steps)


@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("words", ["pp=2 microbatches=3", "pp=2 schedule=chimera microbatches=2 servers=2",
                                   "tp=2 servers=2"])  # fmt: skip
def test_all_ranks_of_a_replica_are_one_worker(mode, words):
    """They pull one version, and one update takes the gradients of all of them, on all servers; one is a straggler."""
    program = (shared_by_two if "tp" in words else compiled)(f"mode={mode} {words}", 6)
    verify(program)
    found = simulate(program, stage_factors=[1.0, 5.0] + [1.0] * (len(program.ranks) - 2), latency=0.1).program
    verify(found)
    assert Program.from_json(found.to_json()) == found
    taken = in_order(found)
    assert all(taken[w, s] == taken[w ^ 1, s] for w, s in taken)
    updates = [{ins.step for ins in row if ins.op is Op.APPLY} for row in found.ranks[6:]]
    assert updates == [set(range(6 if "k-of-n" in mode else 18))] * len(updates)
    assert max(late for _, late in taken.values()) >= (0 if "k-of-n" in mode else 2)


def test_workers_whose_servers_have_not_decided_may_not_wait_for_each_other_for_ever():
    program = compiled("mode=async pp=2 microbatches=2", steps=1)
    row = list(program.ranks[0])
    got = next(k for k, ins in enumerate(row) if ins.op is Op.RECV)
    with pytest.raises(ProgramError, match="send without receive|no producer|does not read"):
        verify(program.with_rank(0, [*row[:got], *row[got + 1 :]]))
    both = shared_by_two("mode=async tp=2", 1)
    row = list(both.ranks[0])
    first, second = [k for k, ins in enumerate(row) if ins.group][:2]
    row[first : second + 1] = [row[second], *row[first + 1 : second], row[first]]
    with pytest.raises(ProgramError):
        verify(both.with_rank(0, row))


def test_parts_of_a_replica_are_refused():
    found = simulate(shared_by_two("mode=async tp=2 servers=2"), stage_factors=[5.0] + [1.0] * 7).program
    verify(found)
    row = list(found.ranks[6])
    applied = next(k for k, ins in enumerate(row) if ins.op is Op.APPLY)
    mine = [v for v in row[applied].reads if v.kind == "pushed"]
    rank = max(v.microbatch for v in mine)

    def without(gone):
        return row[applied]._replace(
            reads=tuple(v for v in row[applied].reads if v not in gone),
            frees=tuple(v for v in row[applied].frees if v not in gone),
        )

    lost = [v for v in mine if v.microbatch == rank]
    free = next(k for k, ins in enumerate(row) if ins.op is Op.ACCEPT and set(ins.writes) & set(lost))
    accepts = [ins._replace(frees=ins.writes) if set(ins.writes) & set(lost) else ins for ins in row]
    assert free < applied
    with pytest.raises(ProgramError, match=rf"of a part of replica .: that of rank {rank} is not read"):
        verify(found.with_rank(6, [*accepts[:applied], without(lost), *accepts[applied + 1 :]]))
    reply = next(k for k, ins in enumerate(row) if ins.op is Op.REPLY and k > applied)
    answered = row[reply].peer
    later = next(k for k, ins in enumerate(row) if ins.op is Op.APPLY and k > reply)
    between = [ins for ins in row[reply + 1 : later + 1] if ins.peer != answered]
    assert len(between) == later - reply, "nothing of this rank comes in between"
    with pytest.raises(ProgramError, match="brings version ., but other parameters of this step are of version"):
        verify(found.with_rank(6, [*row[:reply], *row[reply + 1 : later + 1], row[reply], *row[later + 1 :]]))


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
        ("overlap=priority mode=ssp:1", "mode=ssp:1: not together with overlap=priority .*one version.*fundamental"),
        ("overlap=priority bucket=flat", "overlap=priority: not together with bucket=flat .gradients go in pieces"),
        ("zero=2", "sync=ps: not together with zero=2 .the servers hold"),
        ("offload=optimizer", "no worker has any.*possible is offload=parameters"),
        ("compress=powersgd:1", "compress=powersgd:1 .all ranks sum its factors together"),
        ("inference=yes", "possible is inference=false"),
    ],
)
def test_refused_plans(words, text):
    with pytest.raises(PlanError, match=text.replace("(", r"\(")):
        compiled(words)


def test_a_stage_that_trains_nothing_is_refused():
    shape = Shape(2, (Group((0,), (), 8), Group((1,), (8,))))
    with pytest.raises(PlanError, match="stage 0 has no parameters that are trained, and every rank works with the"):
        Plan.parse("pp=2 sync=ps").compile(shape)


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
    rule.leave(1, removed=True)
    assert [row.kind for row in rule.decide()] == [Kind.TAKE, Kind.APPLY]
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


def test_one_that_was_removed_comes_back():
    rule = Consistency(Mode.parse("ssp:1", 2), 2, 9)
    for step in range(3):
        rule.push(0, step)
        rule.decide()
        if step == 1:
            rule.ask(0)
            assert rule.decide() == [], "worker 1 is two steps behind"
            rule.leave(1, removed=True)
            assert rule.decide() == [Row(Kind.ANSWER, 0, 2, 2)]
    assert rule.join(1) == Row(Kind.JOIN, 1, 3, 3), "with the slowest of the others"
    order = [rule.join(1)]
    assert Rules(rule.mode, 2, 9, order=order).members == {0, 1}


def test_stages_follow_rules_of_their_own():
    rules = Rules(Mode.parse("ssp:0", 2), 4, 2, rules=2)
    rules.absent = set(range(4))
    for worker in range(3):
        rules.ask(worker)
    assert [row.worker for _ in range(4) for row in rules.decide()] == [0, 2], "stage 1 of replica 1 is not there yet"
    rules.ask(3)
    assert rules.decide() == [Row(Kind.ANSWER, 1, 0, 0)]
    assert rules.decide() == [Row(Kind.ANSWER, 3, 0, 0)]
    rules.push(3, 0)
    assert rules.decide() == [Row(Kind.TAKE, 3, 0, 0), Row(Kind.APPLY, -2, -1, 0)]
    rules.push(2, 0)
    assert rules.decide() == [Row(Kind.TAKE, 2, 0, 0), Row(Kind.APPLY, -1, -1, 0)], "its own update 0"
    rules.ask(3)
    assert rules.decide() == [], "stage 1 of replica 0 is a step behind"
    rules.push(1, 0)
    order = rules.decide()
    assert order == [Row(Kind.TAKE, 1, 0, 1), Row(Kind.APPLY, -2, -1, 1)]
    assert rules.decide() == [Row(Kind.ANSWER, 3, 1, 2)]
    assert rules.version == 1
    assert (rules.clock(1), rules.known(1, 0), rules.known(0, 0)) == (1, True, False)
    for worker in range(4):
        assert not rules.over
        rules.leave(worker)
    assert rules.over
    read = Rules(rules.mode, 4, 2, 2, order)
    assert [rule.version for rule in read.each] == [0, 1]


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
