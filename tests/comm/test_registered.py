"""A user's own collectives, by name: in calls of a communicator and in plans; wrong ones are refused."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import minipar
from minipar import Plan, PlanError, ProgramError, RankError, communicator
from minipar.comm import operations
from minipar.program import Op, Program, collectives
from minipar.program.collectives.own import Copy, Reduce, Send
from tests.comparing import trained
from tests.toys import rows, toy

pytestmark = pytest.mark.many(4)


@pytest.fixture(autouse=True)
def own_algorithms(monkeypatch):
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(collectives, "_own", {})


def to_and_fro(setting, rank, chunks=None):
    """Everything to rank 0, which adds it up, and back."""
    everything = range(chunks or setting.ranks)
    if rank:
        yield Send(everything, 0)
        yield Copy(everything, 0)
    else:
        for peer in range(1, setting.ranks):
            yield Reduce(everything, peer)
        for peer in range(1, setting.ranks):
            yield Send(everything, peer)


def test_it_is_known_by_its_name():
    minipar.collective("to-and-fro")(to_and_fro)
    assert collectives.names("allreduce")[-1] == "to-and-fro"
    assert "to-and-fro" not in collectives.names("broadcast")
    program = collectives.program("allreduce", "to-and-fro", 4, 400)
    assert program.chunks == (100,) * 4
    with pytest.raises(PlanError, match="has no closed form"):
        collectives.cost("allreduce", "to-and-fro", 4, 400, 1.0, 0.0, 0.0)
    with pytest.raises(PlanError, match="'to-and-fro' makes no sense"):
        collectives.program("broadcast", "to-and-fro", 4, 400)


def test_one_name_for_several_collectives_and_registering_again():
    @minipar.collective("star", "broadcast", chunks=1)
    def broadcast(setting, rank):
        for peer in range(setting.ranks) if rank == setting.root else ():
            if peer != rank:
                yield Send([0], peer)
        if rank != setting.root:
            yield Copy([0], setting.root)

    minipar.collective("star", "allreduce")(to_and_fro)
    assert len(collectives.program("broadcast", "star", 3, 99, root=1).chunks) == 1
    assert len(collectives.program("allreduce", "star", 3, 99).chunks) == 3
    minipar.collective("star", "allreduce", chunks=6)(partial(to_and_fro, chunks=6))
    assert len(collectives.program("allreduce", "star", 3, 99).chunks) == 6


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_communicator_plays_it(clusters, ranks):
    """Given as the generator, since the ranks are other processes than the one that registered it."""

    @minipar.collective("to-and-fro")
    def mine(setting, rank):
        everything = range(setting.ranks)
        for peer in range(1, setting.ranks) if rank == 0 else ():
            yield Reduce(everything, peer)
        for peer in range(1, setting.ranks) if rank == 0 else ():
            yield Send(everything, peer)
        if rank:
            yield Send(everything, 0)
            yield Copy(everything, 0)

    def sum_up(mine):
        comm = communicator.create()
        x = torch.arange(7.0) + comm.rank
        return comm.allreduce(x, algorithm=mine), comm.allreduce(x, algorithm="to-and-fro")

    expected = ranks * torch.arange(7.0) + sum(range(ranks))
    for found in clusters(ranks).run(sum_up, mine):
        assert all(torch.equal(one, expected) for one in found)


def test_a_rank_that_does_not_know_a_name_says_what_to_do(clusters):
    def sum_up():
        return communicator.create().allreduce(torch.ones(3), algorithm="nobody-knows")

    with pytest.raises(RankError, match=r"'nobody-knows' is not known on this rank.* the generator itself"):
        clusters(2).run(sum_up)


@pytest.mark.parametrize(
    "text",
    [
        "dp=4 algorithm=ring overlap=none bucket=none microbatches=2 clip=0.1",
        "pp=2 schedule=chimera microbatches=4 algorithm=to-and-fro overlap=none",
        "dp=2 algorithm=to-and-fro overlap=none compress=powersgd:6",  # (no factors would be smaller: all is sent)
    ],
)
def test_plans_sum_gradients_by_it(clusters, text):
    minipar.collective("to-and-fro")(to_and_fro)
    plan = Plan.parse(text)
    assert Plan.parse(str(plan)) == plan
    run = trained(clusters, plan, partial(toy, ("linear", "tuples", "dropout"), frozen=(1,)), rows(17), steps=4)
    assert run.program.algorithm == plan.algorithm
    assert Program.from_json(run.program.to_json()) == run.program
    row = run.program.ranks[0]
    sums = [k for k, ins in enumerate(row) if ins.op in (Op.ALL_REDUCE, Op.REDUCE_SCATTER)]
    assert sums
    assert all(run.predicted.ends[0][k] > run.predicted.starts[0][k] for k in sums)


def test_what_it_does_not_go_together_with():
    minipar.collective("mine")(to_and_fro)
    with pytest.raises(PlanError, match="algorithm=other: unknown; possible are default, ring, .*mine"):
        Plan(algorithm="other")
    for text in ("compress=topk:0.5", "local_steps=2", "zero=1"):
        with pytest.raises(PlanError, match="algorithm=mine: not together with"):
            Plan.parse(f"dp=2 algorithm=mine {text}")


def test_a_wrong_one_is_refused_before_it_runs(clusters):
    @minipar.collective("lossy")
    def lossy(setting, rank):
        if rank:
            yield Send([0], 0)
        elif setting.ranks > 1:
            yield Reduce([0], 1)

    with pytest.raises(ProgramError, match="rank 0 ends with"):
        collectives.program("allreduce", "lossy", 2, 100)
    with pytest.raises(ProgramError):
        clusters(2).run(lambda: communicator.create().allreduce(torch.ones(4), algorithm=lossy))


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("my ring", "allreduce", "must be one word"),
        ("ring", "allreduce", "is built in"),
        ("mine", "gossip", "kind='gossip' is unknown; possible are allreduce"),
    ],
)
def test_names_and_kinds_that_cannot_be(name, kind, words):
    with pytest.raises(PlanError, match=words):
        minipar.collective(name, kind)
    with pytest.raises(PlanError, match="a generator that @minipar.collective decorated"):
        collectives.known(to_and_fro_undecorated)


def to_and_fro_undecorated(setting, rank):
    yield from to_and_fro(setting, rank)


def test_what_some_ranks_have_played_before_disturbs_nobody(clusters):
    """Ranks 0 and 1 play more often than 2 and 3, and then all of them together."""
    assert clusters(4).run(_played_by_some) == [10.0 * 4] * 4


def _played_by_some() -> float:
    comm = communicator.create()
    mine = (0, 1) if comm.rank < 2 else (2, 3)
    for _ in range(5 if comm.rank < 2 else 2):
        operations.played_sum(comm, torch.ones(3), mine, "ring").wait()
    tensor = torch.full((4,), float(comm.rank + 1))
    operations.played_sum(comm, tensor, (0, 1, 2, 3), "tree").wait()
    return float(tensor.sum())


def test_programs_run_in_the_order_in_which_they_were_begun(clusters):
    """However ranks wait for them: half of the ranks wait for the last one first."""
    assert clusters(4).run(_waits_in_another_order) == [[10.0, 20.0, 30.0]] * 4


def _waits_in_another_order() -> list[float]:
    comm = communicator.create()
    sums = [torch.full((3,), (k + 1.0) * (comm.rank + 1)) for k in range(3)]
    handles = [comm.iallreduce(one, (0, 1, 2, 3), algorithm="ring") for one in sums]
    for handle in handles if comm.rank % 2 else reversed(handles):
        handle.wait()
    return [one[0].item() for one in sums]
