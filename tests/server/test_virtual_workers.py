"""Parameter servers with pipelines that never drain (HetPipe): stages push updates and pull versions of their own."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from minipar import Plan, resume, simulate, train, verify
from minipar.errors import ProgramError
from minipar.program import Op, Program, param
from minipar.program.verify.service import sent_and_taken
from minipar_widgets import ServerView
from tests.fuzz.trial import trial
from tests.fuzz.verify_interpreter import judge

WORDS = "dp=2 pp=2 sync=ps split=2,4"


def tied_and_frozen() -> nn.Module:
    layers = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)]
    layers[3].weight = layers[2].weight
    layers[5].bias.requires_grad = False
    return nn.Sequential(*layers)


@pytest.mark.many(2)
@pytest.mark.parametrize(
    "words",
    [
        "schedule=pipedream microbatches=2 servers=2",
        "schedule=pipedream-2bw microbatches=3",
        "schedule=pipedream-vertical microbatches=2 overlap=none",
        "schedule=pipedream microbatches=2 offload=parameters",
        "schedule=pipedream microbatches=2 servers=2 mode=async",
        "schedule=pipedream-2bw microbatches=3 mode=ssp:1 bucket=flat",
    ],
)
def test_numbers_are_right(clusters, tmp_path, words):
    """Those of a run that is watched, and of one that goes on after it."""
    plan, seen = Plan.parse(f"{WORDS} {words}"), []
    x, y = (torch.randn(13, n, generator=torch.Generator().manual_seed(n)) for n in (6, 3))
    given = tied_and_frozen, (x, y)
    keys = {"optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.5), "loss": nn.functional.mse_loss}
    keys |= {"cluster": clusters(plan.ranks), "check": True, "progress": False}
    keys |= {"scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=3, gamma=0.5)}
    run = train(*given, plan, steps=3, dtype=torch.float64, watch=seen.append, **keys)
    assert run.losses == pytest.approx(run.reference.losses, abs=1e-10)
    assert run.max_gradient_error() < 1e-10
    assert run.max_parameter_error() < 1e-10
    verify(run.program)
    assert seen[-1].losses == run.losses
    assert ": 3 steps, " in repr(run)
    if plan.mode != "sync":  # every gradient of a stage is an update of its own
        applied = [ins for row in run.program.ranks[4:] for ins in row if ins.op is Op.APPLY]
        assert {len({(v.microbatch, v.step) for v in ins.reads if v.kind == "pushed"}) for ins in applied} == {1}
        assert len(run.gradients) == 2 * 2 * run.program.updates
    run.save(tmp_path / "run")
    more = resume(tmp_path / "run", *given, steps=2, **keys)
    assert more.losses == pytest.approx(more.reference.losses, abs=1e-10)
    assert more.max_parameter_error() < 1e-10
    assert more.losses[0] < run.losses[0]


@pytest.mark.many(10)
@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("tp=2 pp=2 schedule=pipedream-2bw servers=2", "equal"),
        ("dp=2 pp=2 schedule=pipedream check=true servers=2 host_layers=0,3", "equal"),
        ("dp=2 ep=2 schedule=pipedream-vertical checkpoint=1", "equal"),
        ("dp=2 pp=2 schedule=pipedream-2bw precision=bf16 compress=topk:0.5", "near"),
        ("dp=2 context_parallel=2 schedule=pipedream-2bw check=true offload=activations", "equal"),
        ("dp=2 pp=2 schedule=pipedream compress=fp16 overlap=none", "near"),
        ("tp=2 dp=2 schedule=pipedream-2bw sequence_parallel=true batch_copies=2 servers=2", "equal"),
        ("pp=4 schedule=pipedream servers=2", "equal"),
        ("dp=4 schedule=pipedream-2bw", "equal"),
        ("pp=4 schedule=pipedream-vertical checkpoint=1", "equal"),
        ("schedule=pipedream-2bw servers=3", "equal"),
        ("dp=2 pp=2 schedule=pipedream-2bw offload=parameters offload_to=disk check=true", "equal"),
        ("dp=2 pp=2 schedule=pipedream offload=parameters,activations host_layers=2,3 checkpoint=1", "equal"),
        ("ep=2 pp=2 schedule=pipedream-vertical offload=parameters prefetch=2 servers=2", "equal"),
        ("dp=2 tp=2 schedule=pipedream-2bw offload=parameters precision=bf16", "near"),
        ("dp=2 pp=2 schedule=pipedream bucket=flat servers=2 check=true", "equal"),
        ("dp=2 tp=2 schedule=pipedream-2bw bucket=2x servers=3", "equal"),
        ("dp=2 pp=2 schedule=pipedream-vertical bucket=auto overlap=none offload=parameters", "equal"),
        ("dp=2 pp=2 schedule=pipedream mode=async check=true host_layers=0,3", "equal"),
        ("dp=2 tp=2 schedule=pipedream-2bw mode=async servers=2 check=true batch_copies=2", "equal"),
        ("dp=3 schedule=pipedream-2bw mode=ssp:1 compress=topk:0.5", "equal"),
        ("dp=2 pp=2 schedule=pipedream-vertical mode=ssp:0 offload=parameters checkpoint=1", "equal"),
        ("dp=2 ep=2 schedule=pipedream-2bw mode=async bucket=flat overlap=none", "equal"),
        ("pp=2 schedule=pipedream mode=async servers=2", "equal"),
        ("dp=2 pp=2 schedule=pipedream mode=async servers=2 check=true", "equal"),
        ("pp=2 tp=2 schedule=pipedream mode=ssp:0 servers=2 check=true", "equal"),
    ],
)
def test_numbers_are_right_with_other_keys(clusters, words, kind):
    assert trial(f"sync=ps microbatches=4 {words}", clusters).kind == kind


@pytest.mark.parametrize("words", ["pipedream-2bw mode=async", "pipedream-2bw", "pipedream mode=ssp:1"])
def test_a_replica_whose_targets_do_not_count(clusters, words):
    """In the first step those of replica 0, and in each step those of a whole micro-batch of replica 1."""
    y = torch.randint(3, (24,), generator=torch.Generator().manual_seed(0))
    y[:6] = y[9:12] = y[21:] = -100
    run = train(
        tied_and_frozen, (torch.randn(24, 6, generator=torch.Generator().manual_seed(1)), y),
        f"{WORDS} microbatches=2 schedule={words}", batch=12, steps=4, dtype=torch.float64, cluster=clusters(5),
        check=True, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.5), progress=False,
    )  # fmt: skip
    assert run.losses == pytest.approx(run.reference.losses, abs=1e-10)
    assert run.max_gradient_error() < 1e-10
    assert run.max_parameter_error() < 1e-10


def taken_out(row, k):
    return [*row[:k], *row[k + 1 :]]


def later(row, k, place):
    """The row in which instruction k comes just after the instruction at `place`."""
    return [*row[:k], *row[k + 1 : place + 1], row[k], *row[place + 1 :]]


def last(row, op):
    return max(k for k, ins in enumerate(row) if ins.op is op)


def first(row, op):
    return min(k for k, ins in enumerate(row) if ins.op is op)


def freed(row, k, value):
    return [*row[:k], row[k]._replace(frees=(*row[k].frees, value)), *row[k + 1 :]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: taken_out(row, last(row, Op.PULL)), "send without receive: .*REPLY"),
        (lambda row: taken_out(row, last(row, Op.PUSH)), "receive without send: .*ACCEPT"),
        (lambda row: later(row, first(row, Op.FORWARD) - 2, first(row, Op.FORWARD)), "not pulled from rank"),
        (lambda row: later(row, first(row, Op.BACKWARD), first(row, Op.PUSH)), r"reads grad\(3\) before"),
        (
            lambda row: freed(row, last(row, Op.BACKWARD), param(2, 3)),
            r"ends without param\(2\) v3, its newest version",
        ),
    ],
)
def test_mistakes_are_refused(change, message):
    program = Plan.parse("dp=2 pp=2 sync=ps schedule=pipedream microbatches=2 servers=2").compile(layers=4, steps=2)
    verify(program)
    rows = (program.ranks[0], tuple(change(program.ranks[1])), *program.ranks[2:])
    with pytest.raises(ProgramError, match=message):
        verify(replace(program, ranks=rows))


def test_a_version_is_pulled_when_the_one_before_is_done_with():
    """A connection is at one version, whatever servers could answer: layers 2 and 3 are on another one than 0 and 1."""
    program = Plan.parse("dp=2 sync=ps schedule=pipedream servers=2").compile(layers=4, steps=2)
    row = program.ranks[0]
    early = [ins for ins in row if ins.op is Op.PULL and ins.step == 1 and ins.layers[0] > 1]
    rest = [ins for ins in row if ins not in early]
    k = next(k for k, ins in enumerate(rest) if ins.op is Op.PUSH and ins.layers == (1,))
    with pytest.raises(ProgramError, match=r"comes before grad\(1\) is pushed to update 0"):
        verify(program.with_rank(0, [*rest[:k], *early, *rest[k:]]))


@pytest.mark.parametrize(
    "words", ["pp=2 schedule=pipedream", "pp=4 schedule=pipedream-vertical", "pp=2 schedule=pipedream-2bw"]
)
def test_what_is_stale_is_that_of_replicas_without_servers(words):
    alone, served = (
        simulate(
            Plan.parse(f"dp=2 microbatches=4 {words} {sync}").compile(layers=4, steps=3), forward=1.0, backward=2.0
        )
        for sync in ("", "sync=ps")
    )
    assert served.staleness() == [*alone.staleness(), 0]
    versions = zip(served.weight_versions(), alone.weight_versions(), strict=False)
    assert all(mine <= theirs for mine, theirs in versions)  # (what is pulled late is there late)
    assert served.time == pytest.approx(alone.time)  # (where nothing but computing takes time)


@pytest.mark.parametrize("words", ["mode=async", "mode=ssp:0", "mode=ssp:1 bucket=flat"])
def test_what_happens_is_simulated(words):
    """One replica takes three times as long; with ssp the other one waits for it, stage by stage."""

    program = Plan.parse(f"dp=2 pp=2 sync=ps schedule=pipedream servers=2 microbatches=2 {words}").compile(
        layers=4, steps=4
    )
    assert program.served_workers == ((0,), (1,), (2,), (3,))
    assert program.rules == 2
    assert program.undecided
    verify(program)
    trace = simulate(program, forward=1.0, backward=2.0, stage_factors=(1, 1, 3, 3, 1, 1))
    verify(trace.program)
    assert Program.from_json(trace.program.to_json()) == trace.program
    assert program.updates == 8
    given, into = sent_and_taken(trace.program)
    assert {rank for rank, _ in into} == {0, 1, 2, 3}
    late = {rank: max(into[rank, k] - given[rank, k] for k in range(8)) for rank in range(4)}
    bound = {"mode=async": 8, "mode=ssp:0": 1, "mode=ssp:1": 3}[words.split()[0]]
    assert max(late.values()) <= bound
    assert late[3] >= 3 or bound < 8  # the slow one's gradients are late
    assert all(stale >= late[rank] for rank, stale in enumerate(trace.staleness()[:4]))


def test_an_update_without_the_gradient_of_its_replica_is_refused():
    program = Plan.parse("dp=2 pp=2 sync=ps schedule=pipedream mode=async").compile(layers=4, steps=3)
    done = simulate(program, forward=1.0, backward=2.0, stage_factors=(1, 1, 3, 3, 1)).program
    verify(done)
    (server,) = done.ranks[4:]
    apply = first(server, Op.APPLY)
    rank = server[apply].reads[0].microbatch
    reply = next(k for k, ins in enumerate(server) if (ins.op, ins.peer, ins.step) == (Op.REPLY, rank, 1))
    assert apply < reply
    with pytest.raises(ProgramError, match=r"without the replica's own update 0; possible is one that has it"):
        verify(done.with_rank(4, later(list(server), apply, reply)))
    assert "without its own update" in judge(done.with_rank(4, later(list(server), apply, reply)))
    flushed = Plan.parse("dp=2 sync=ps").compile(layers=4)
    with pytest.raises(ProgramError, match="serving: steps overlap, with contract Synchronous; possible is Staleness"):
        verify(replace(flushed, serving=replace(flushed.serving, overlapping=True)))
    late = Plan.parse("dp=2 sync=ps mode=k-of-n:1/2").compile(layers=4)
    with pytest.raises(ProgramError, match="mode=k-of-n:1/3: N must be the number of workers, 2"):
        verify(replace(late, serving=replace(late.serving, mode="k-of-n:1/3")))
    alone = Plan.parse("dp=2 sync=ps schedule=pipedream mode=async").compile(layers=4, steps=2)
    verify(replace(alone, mesh=(("dp", 2),)))  # without an axis of stages there is one
    mixed = replace(done, serving=replace(done.serving, mode="k-of-n:1/2"))
    with pytest.raises(ProgramError, match="in which replicas leave steps out; possible are sync, async, ssp"):
        verify(mixed)


def test_an_update_of_several_replicas_is_refused():
    program = Plan.parse("dp=2 pp=2 sync=ps schedule=pipedream mode=async").compile(layers=4, steps=3)
    done = simulate(program, forward=1.0, backward=2.0).program
    (server,) = done.ranks[4:]
    last = [k for k, ins in enumerate(server) if ins.op is Op.APPLY and ins.layers == (0, 1)][-2:]
    one, two = (server[k] for k in last)
    both = one._replace(reads=tuple(dict.fromkeys(two.reads + one.reads)), frees=one.frees + two.frees)
    row = [both if k == last[1] else ins for k, ins in enumerate(server) if k != last[0]]
    with pytest.raises(
        ProgramError, match=r"takes gradients of 2 replicas or steps; with mode=async each is an update"
    ):
        verify(done.with_rank(4, row))
    half = one._replace(reads=one.reads[1:])
    with pytest.raises(ProgramError, match="takes gradients of grad.* of other replicas or steps than update"):
        verify(done.with_rank(4, [half if ins is one else ins for ins in server]))


def test_layers_of_a_bucket_are_updated_and_answered_together():
    def messages(bucket):
        plan = Plan.parse(f"dp=2 pp=2 sync=ps schedule=pipedream servers=2 bucket={bucket}")
        program = plan.compile(layers=8, steps=2)
        verify(program)
        row = program.ranks[4]
        return [sum(ins.op is op for ins in row) for op in (Op.ACCEPT, Op.APPLY, Op.REPLY)]

    assert messages("none") == [16, 8, 16]  # 4 layers at this server, 2 replicas, 2 updates
    assert messages("2x") == [8, 4, 8]
    assert messages("flat") == [4, 2, 4]


def test_the_view_of_servers_refuses_steps_that_overlap():
    program = Plan.parse("dp=2 pp=2 sync=ps schedule=pipedream microbatches=2").compile(layers=4)
    view = ServerView(simulate(program, forward=1.0, backward=2.0))
    assert "here steps overlap; possible is the Timeline" in view.problem
