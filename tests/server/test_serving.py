"""Training with parameter servers on real processes: equal to plain torch, or to the replay of the recorded order."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from contextlib import ExitStack
from functools import lru_cache, partial
from itertools import product

import pytest
import torch

from minipar import Cluster, DeviceSpec, Plan, models, simulate, train, verify
from minipar.cli import main
from minipar.cluster import worker
from minipar.errors import PlanError, RankDied, RankError
from minipar.execution.emulation import Pace
from minipar.execution.execution import Job
from minipar.models.parameter_groups import shape_of
from minipar.models.selective_checkpoint import Recomputed
from minipar.prediction.emulated import EmulatedCosts
from minipar.program import Op
from minipar.server.framing import bytes_of
from minipar.server.packing import Packer, unpack
from minipar.server.serving import execute_served
from minipar.trace.recorded_order import served_order
from minipar.training.plainly import train_reference as replay
from tests.toys import rows, toy

pytestmark = pytest.mark.many(6)

MODEL = partial(toy, ("linear", "tuples", "dropout", "in-place", "unused"), tied=True, frozen=(1,))
mse = torch.nn.functional.mse_loss


def run(clusters, words, data=None, model=MODEL, steps=4, optimizer=None, loss=mse, **more):
    plan = Plan.parse(words)
    optimizer = optimizer or partial(torch.optim.SGD, lr=0.5)
    data = data or rows(17)
    found = train(model, data, plan, cluster=clusters(plan.ranks), steps=steps, loss=loss, optimizer=optimizer,
                  dtype=torch.float64, check=True, progress=False, **more)  # fmt: skip
    verify(found.program)
    assert found.trace.program == found.program
    job = Job(model, data, 32, loss, optimizer, 0, torch.float64)
    again = replay(job, served_order(found.service.order, plan.dp, plan.total_microbatches), clip=plan.clip)
    if "bf16" in words:
        return found
    for name, values in found.service.parameters.items():
        assert (again.parameters[name] - values).abs().max() <= 1e-12, name
    return found


@pytest.mark.many(4)
@pytest.mark.parametrize(
    "words",
    [
        "dp=3 sync=ps",
        "dp=2 sync=ps servers=2 microbatches=3 bucket=0.0001",
        "dp=2 sync=ps microbatches=2 accumulate=2 checkpoint=2 overlap=none",
        "dp=2 sync=ps servers=2 clip=0.1 compress=topk:1",
        "dp=2 sync=ps schedule=zb-h1 microbatches=2 bucket=none checkpoint=1 clip=0.1",
        "dp=2 sync=ps microbatches=3 offload=activations checkpoint=1",
        "dp=2 sync=ps servers=2 microbatches=2 offload=parameters,activations offload_to=disk",
        "sync=ps servers=3 microbatches=2 host_layers=0,8 offload=parameters",
        "dp=2 sync=ps overlap=priority microbatches=3",
        "dp=4 sync=ps servers=2 overlap=priority checkpoint=2",
        "dp=3 sync=ps servers=2 overlap=priority bucket=0.00005 microbatches=2 check=true",
        "dp=2 sync=ps servers=2 overlap=priority compress=bf16 bucket=0.00005 host_layers=0,8",
        "dp=2 sync=ps overlap=priority microbatches=2 offload=parameters prefetch=2 bucket=0.0001",
        "pp=2 sync=ps servers=2 overlap=priority microbatches=2 offload=parameters,activations offload_to=disk",
        "pp=2 dp=2 sync=ps microbatches=3",
        "pp=2 sync=ps servers=2 schedule=gpipe microbatches=2 clip=0.1 overlap=none",
        "pp=2 dp=2 sync=ps servers=2 overlap=priority microbatches=2",
        "pp=2 dp=2 sync=ps servers=2 overlap=priority bucket=0.00005 microbatches=2 compress=topk:1",
        "pp=2 sync=ps schedule=zb-h1 microbatches=4 overlap=priority",
        "pp=2 dp=2 sync=ps schedule=chimera microbatches=4 bucket=none",
        "pp=2 sync=ps schedule=interleaved chunks=2 microbatches=2 offload=activations checkpoint=1",
        "pp=4 sync=ps servers=2 microbatches=2 offload=parameters",
    ],
)
def test_sync_equals_plain_torch(clusters, words):
    found = run(clusters, words)
    near = 1e-2 if "bf16" in words else 1e-12
    assert found.max_gradient_error() <= near
    for mine, plain in zip(found.losses, found.reference.losses, strict=True):
        assert abs(mine - plain) <= near * max(1.0, abs(plain))


def text(count):
    tokens = torch.randint(16, (count, 8), generator=torch.Generator().manual_seed(0))
    return tokens, tokens.roll(-1, 1)


SMALL = {"width": 8, "heads": 2, "context": 8, "vocab": 16}


def partly_frozen():
    model = models.gpt(layers=2, tied=True, fused=False, **SMALL)
    for name, p in model.named_parameters():
        p.requires_grad_(not name.startswith("1."))
    return model


@pytest.mark.many(8)
@pytest.mark.parametrize(
    "words",
    [
        "tp=2 sync=ps servers=2 microbatches=2",
        "dp=2 tp=2 sync=ps microbatches=2 clip=0.1 check=true",
        "tp=2 sequence_parallel=true sync=ps overlap=priority servers=2 check=true",
        "dp=2 tp=2 sync=ps overlap=priority servers=2 bucket=0.0002 check=true",
        "dp=2 context_parallel=2 sync=ps microbatches=2 bucket=none",
        "pp=2 tp=2 sync=ps microbatches=2 offload=parameters",
        "ep=2 dp=2 sync=ps clip=0.1 check=true",
    ],
)
def test_ranks_that_share_layers_pull_and_push_what_they_have(clusters, words):
    optimizer = partial(torch.optim.SGD, lr=0.5, momentum=0.9)
    if "ep=2" in words:
        model = partial(models.mixture, layers=2, experts=2, capacity=None, **SMALL)
        found = run(clusters, words, text(8), model, 3, optimizer, models.mixture_loss)
    else:
        found = run(clusters, words, text(7), partly_frozen, 3, optimizer, torch.nn.functional.cross_entropy)
    assert found.max_gradient_error() <= 1e-12
    assert found.max_parameter_error() <= 1e-12
    for mine, plain in zip(found.losses, found.reference.losses, strict=True):
        assert abs(mine - plain) <= 1e-12 * max(1.0, abs(plain))


class Late:
    """Rows of uneven number, for which the first ranks wait."""

    def __init__(self, ranks, made):
        self.ranks, self.made = ranks, made

    def batch(self, step, size):
        if worker.in_rank() and worker.context().rank in self.ranks:
            time.sleep(0.03)
        return tuple(values.roll(step, 0) for values in self.made)


@pytest.mark.many(8)
@pytest.mark.parametrize(
    "words",
    [
        "pp=2 dp=2 sync=ps mode=async microbatches=3 check=true",
        "pp=2 dp=2 sync=ps servers=2 mode=k-of-n:1/2 microbatches=2 clip=0.1 check=true",
        "pp=2 dp=2 sync=ps servers=2 mode=ssp:1 schedule=zb-h1 microbatches=3 overlap=none bucket=none",
        "pp=2 dp=2 sync=ps mode=async schedule=chimera microbatches=4 compress=topk:1",
        "pp=2 dp=2 sync=ps servers=2 mode=async schedule=interleaved chunks=2 microbatches=2 offload=parameters",
        "dp=2 tp=2 sync=ps servers=2 mode=k-of-n:1/2 microbatches=2 check=true",
        "dp=2 tp=2 sync=ps mode=async sequence_parallel=true clip=0.1 check=true",
        "dp=2 context_parallel=2 sync=ps servers=2 mode=ssp:0 microbatches=2 bucket=none",
        "ep=2 dp=2 sync=ps servers=2 mode=async check=true",
    ],
)
def test_a_replica_of_several_ranks_replays_as_one_worker(clusters, words):
    """Its ranks are given one version by every server, and an update takes all of their gradients. (`run` has compared
    the parameters at the end, too.)"""
    if "pp=2" in words:
        found = run(clusters, words, Late((0, 1), rows(17)), steps=5, batch=17)
    elif "ep=2" in words:
        model = partial(models.mixture, layers=2, experts=2, capacity=None, **SMALL)
        found = run(clusters, words, Late((0, 1), text(8)), model, 4, loss=models.mixture_loss, batch=8)
    else:
        loss = torch.nn.functional.cross_entropy
        found = run(clusters, words, Late((0, 1), text(7)), partly_frozen, 4, loss=loss, batch=7)
    assert found.max_gradient_error() <= 1e-12
    for mine, plain in zip(found.losses, found.reference.losses, strict=True):
        assert abs(mine - plain) <= 1e-12 * max(1.0, abs(plain))
    stale, bound = found.trace.staleness(), found.program.contract.bound
    assert stale[0] == stale[1], "the two ranks of the late replica"
    assert bound is None or max(stale) <= bound
    if "async" in words:
        assert stale[0] > 0
    if "k-of-n" in words:
        assert found.service.dropped > 0


def test_sync_equals_allreduce(clusters):
    """The same model, rows and optimizer with both."""
    served = run(clusters, "dp=2 sync=ps servers=2", steps=3)
    plan = Plan.parse("dp=2")
    reduced = train(MODEL, rows(17), plan, cluster=clusters(2), steps=3, loss=mse, dtype=torch.float64, check=True,
                    optimizer=partial(torch.optim.SGD, lr=0.5), progress=False)  # fmt: skip
    for mine, other in zip(served.gradients, reduced.gradients, strict=True):
        assert all((mine[name] - other[name]).abs().max() <= 1e-12 for name in mine)


@pytest.mark.parametrize("mode", ["async", "ssp:1", "k-of-n:2/3"])
@pytest.mark.parametrize("optimizer", [None, partial(torch.optim.AdamW, lr=0.01)])
def test_recorded_order_replays_exactly(clusters, mode, optimizer):
    found = run(clusters, f"dp=3 sync=ps mode={mode} microbatches=2", optimizer=optimizer, steps=5)
    assert found.max_gradient_error() <= 1e-12
    for mine, plain in zip(found.losses, found.reference.losses, strict=True):
        assert abs(mine - plain) <= 1e-12 * max(1.0, abs(plain))
    bound = found.program.contract.bound
    assert bound is None or max(found.trace.staleness()) <= bound
    assert len(found.step_times) == 1


def test_every_update_is_clipped_and_of_what_was_pushed(clusters):
    """Two servers have parts of each gradient, and one norm."""
    words = "dp=2 sync=ps mode=async servers=2 microbatches=2 clip={} compress=topk:1"
    clipped, free = (run(clusters, words.format(norm)) for norm in (0.05, 1000))
    assert clipped.max_gradient_error() <= 1e-12
    job = Job(MODEL, rows(17), 32, mse, partial(torch.optim.SGD, lr=0.5), 0, torch.float64)
    other = replay(job, served_order(clipped.service.order, 2, 2))  # the same order without clipping
    assert max((other.parameters[k] - v).abs().max() for k, v in clipped.service.parameters.items()) > 1e-3
    assert free.service.order  # (a norm that is never reached: `run` has replayed it, too)


def test_slices_of_sequences(clusters):
    tokens = torch.randint(32, (5, 10), generator=torch.Generator().manual_seed(0))
    words = "dp=2 sync=ps mode=async schedule=terapipe slices=3 microbatches=2"
    model = partial(models.gpt, layers=2, width=16, heads=2, context=16, vocab=32)
    found = run(clusters, words, (tokens, tokens.roll(-1, 1)), model, 3, loss=torch.nn.functional.cross_entropy)
    assert found.max_gradient_error() <= 1e-12


def test_bf16_with_one_worker_is_that_of_one_device(clusters):
    """Servers add up and keep the job's own type, of which the worker has a rounded copy."""
    model = partial(toy, ("linear", "linear", "dropout"), frozen=(1,))
    data = tuple(t.float() for t in rows(16))
    options = {"steps": 4, "loss": mse, "optimizer": partial(torch.optim.SGD, lr=0.5, momentum=0.9), "progress": False}
    served = train(model, data, "sync=ps servers=2 precision=bf16", cluster=clusters(3), **options)
    alone = train(model, data, "precision=bf16", cluster=clusters(1), **options)
    assert served.losses == alone.losses
    assert all(value.dtype is torch.float32 for value in served.service.parameters.values())
    several = train(model, data, "dp=2 sync=ps mode=async precision=bf16", cluster=clusters(3), check=True, **options)
    assert 1e-6 < several.max_gradient_error() < 0.1


def test_what_is_left_out_is_pushed_later(clusters):
    """Error feedback, against a loop in plain torch: of one worker, whose parameters no server cuts."""
    steps, model = 5, partial(toy, ("linear", "linear"))
    found = train(model, rows(8), "sync=ps compress=topk:0.3", cluster=clusters(2), steps=steps, loss=mse,
                  dtype=torch.float64, optimizer=partial(torch.optim.SGD, lr=0.5), progress=False)  # fmt: skip
    job = Job(model, rows(8), 32, mse, partial(torch.optim.SGD, lr=0.5), 0, torch.float64)
    plain = job.build()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    left = {name: torch.zeros_like(p) for name, p in plain.named_parameters()}
    for step in range(steps):
        x, y = job.batches(step)
        mse(plain(x), y).backward()
        for name, p in plain.named_parameters():
            whole = (p.grad + left[name]).flatten()
            chosen = whole.abs().topk(max(1, -(-3 * len(whole) // 10))).indices
            sent = torch.zeros_like(whole)
            sent[chosen] = whole[chosen]
            left[name], p.grad = (whole - sent).view_as(p), sent.view_as(p)
        optimizer.step()
        optimizer.zero_grad()
    for name, p in plain.named_parameters():
        assert (found.service.parameters[name] - p).abs().max() <= 1e-12, name
    assert found.service.received[0] == sum(part.bytes for row in found.program.ranks for ins in row
                                            if ins.op is Op.PUSH for part in ins.parts)  # fmt: skip


def test_a_step_that_is_void_takes_nothing_away():
    gradients = torch.tensor([3.0, -4.0, 1.0, 0.5], dtype=torch.float64)
    packer, there = Packer("topk:0.5"), torch.zeros(4, dtype=torch.float64)
    for _ in range(2):  # the second time as if servers had gone back
        unpack(bytes_of(packer.pack((0, 0), gradients)), there, "topk:0.5")
        assert there.tolist() == [3, -4, 0, 0]
        packer.void()
    packer.pack((0, 0), gradients)
    packer.step_is_over()
    unpack(bytes_of(packer.pack((0, 0), gradients / 2)), there, "topk:0.5")
    assert there.tolist() == [0, -2, 1.5, 0] or there.tolist() == [1.5, -2, 0, 0]


@pytest.mark.parametrize("count", [7, 3])
def test_uneven_rows(clusters, count):
    assert run(clusters, "dp=3 sync=ps microbatches=2", rows(count)).max_gradient_error() <= 1e-12
    assert run(clusters, "dp=3 sync=ps mode=async", rows(count)).max_gradient_error() <= 1e-12


class KillsOnce:
    """Rows that end the rank which asks for those of step 2 first, once; or stop it, as SIGSTOP does."""

    def __init__(self, marker, victim, how=signal.SIGKILL):
        self.marker, self.victim, self.how = marker, victim, how

    def batch(self, step, size):
        if step == 2 and worker.in_rank() and worker.context().rank == self.victim:
            try:
                os.close(os.open(self.marker, os.O_CREAT | os.O_EXCL))
                os.kill(os.getpid(), self.how)
            except FileExistsError:
                pass
        made = torch.Generator().manual_seed(step)
        return torch.randn(size, 6, generator=made), torch.randn(size, 6, generator=made)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_worker_dies_and_comes_back(clusters, tmp_path, mode):
    data = KillsOnce(str(tmp_path / "killed"), 1)
    found = train(partial(toy, ("linear",)), data, f"dp=3 sync=ps mode={mode} on_death=continue check=true",
                  cluster=clusters(4), steps=4, batch=9, loss=mse, dtype=torch.float64, check=True,
                  progress=False)  # fmt: skip
    assert os.path.exists(data.marker)
    (death,) = found.service.deaths
    assert "rank 1" in death
    assert found.max_gradient_error() <= 1e-12
    assert all(loss == loss for loss in found.losses)


@pytest.mark.many(3)
@pytest.mark.parametrize(
    ("words", "victim", "how"),
    [
        ("pp=2 dp=2 sync=ps mode=async microbatches=3 check=true", 1, signal.SIGKILL),
        ("dp=2 tp=2 sync=ps servers=2 check=true", 2, signal.SIGKILL),
        ("pp=2 sync=ps mode=ssp:1 microbatches=2", 1, signal.SIGSTOP),
        ("pp=2 dp=2 sync=ps microbatches=2 servers=2", 0, signal.SIGKILL),
        ("dp=2 tp=2 sync=ps mode=k-of-n:2/2", 3, signal.SIGKILL),
        ("dp=2 tp=2 sync=ps servers=2", 1, signal.SIGSTOP),
    ],
)
def test_a_rank_dies_and_its_replica_begins_again(clusters, tmp_path, words, victim, how):
    """The ranks beside it wait for its messages; only its own death is told. (A replica that was stopped is removed, so
    that others go on; where it is the only one, servers wait for it.)"""
    data = KillsOnce(str(tmp_path / "killed"), victim, how)
    plan = Plan.parse(f"{words} on_death=continue")
    found = train(partial(toy, ("linear", "linear")), data, plan, cluster=clusters(plan.ranks), steps=4, batch=9,
                  loss=mse, dtype=torch.float64, check=True, progress=False)  # fmt: skip
    assert os.path.exists(data.marker)
    (death,) = found.service.deaths
    assert f"rank {victim}" in death
    assert found.max_gradient_error() <= 1e-12
    assert found.max_parameter_error() <= 1e-12
    for mine, plain in zip(found.losses, found.reference.losses, strict=True):
        assert abs(mine - plain) <= 1e-12 * max(1.0, abs(plain))
    assert clusters(plan.ranks).run(lambda: 7) == [7] * plan.ranks


class DiesInBackward(torch.nn.Linear):
    """Ends its process in the backward of step 2, once, when other workers have pushed and servers have updated what
    they can. (`armed` by the rows of that step.)"""

    armed = ""

    def forward(self, input):
        found = super().forward(input)
        if found.requires_grad:
            found.register_hook(self.dies)
        return found

    def dies(self, gradient):
        if DiesInBackward.armed and not os.path.exists(DiesInBackward.armed):
            time.sleep(0.3)
            os.close(os.open(DiesInBackward.armed, os.O_CREAT | os.O_EXCL))
            os.kill(os.getpid(), signal.SIGKILL)


class Arms(KillsOnce):
    """Rows that let `DiesInBackward` end the rank which asks for those of step 2."""

    def batch(self, step, size):
        here = step == 2 and worker.in_rank() and worker.context().rank == self.victim
        DiesInBackward.armed = self.marker if here else ""
        made = torch.Generator().manual_seed(step)
        return torch.randn(size, 6, generator=made), torch.randn(size, 6, generator=made)


def with_a_layer_that_dies(place):
    layers = [torch.nn.Linear(6, 6) for _ in range(4)]
    layers[place] = DiesInBackward(6, 6)
    return torch.nn.Sequential(*layers)


@pytest.mark.many(3)
@pytest.mark.parametrize(
    ("words", "victim", "place"),
    [
        ("dp=2 sync=ps check=true", 1, 0),  # all later layers are updated with what it has pushed
        ("dp=3 sync=ps servers=2 bucket=0.00005 microbatches=2 check=true", 2, 1),
        ("dp=2 sync=ps servers=2 bucket=0.00005", 0, 3),  # it has pushed nothing
        ("dp=2 sync=ps bucket=none", 1, None),  # before its step
        ("dp=2 pp=2 sync=ps servers=2 bucket=0.00005 microbatches=2 check=true", 1, 3),
        ("dp=2 pp=2 sync=ps servers=2 microbatches=2", 2, 0),  # the other rank of its replica has pushed everything
        ("dp=2 sync=ps servers=2 offload=parameters bucket=0.00005", 1, 1),
    ],
)
def test_by_priority_a_worker_dies_and_begins_its_step_again(clusters, tmp_path, words, victim, place):
    """Some layers are updated with what it has pushed: it gets them as they were, and pushes the rest."""
    marker, plan = str(tmp_path / "killed"), Plan.parse(f"{words} overlap=priority on_death=continue")
    data = KillsOnce(marker, victim) if place is None else Arms(marker, victim)
    model = partial(with_a_layer_that_dies, place or 0)
    found = train(model, data, plan, cluster=clusters(plan.ranks), steps=5, batch=9, loss=mse, dtype=torch.float64,
                  optimizer=partial(torch.optim.Adam, lr=0.01), check=True, progress=False)  # fmt: skip
    assert os.path.exists(marker)
    (death,) = found.service.deaths
    assert f"rank {victim}" in death
    assert found.max_gradient_error() <= 1e-12
    assert found.max_parameter_error() <= 1e-12
    for mine, plain in zip(found.losses, found.reference.losses, strict=True):
        assert abs(mine - plain) <= 1e-12 * max(1.0, abs(plain))


class StopsInUpdate(torch.optim.SGD):
    """Ends or stops the process of a server in one of its updates of a layer, or a piece of one, once."""

    def __init__(self, parameters, marker, victim, at, how):
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.marker, self.victim, self.at, self.how, self.made = marker, victim, at, how, 0

    def step(self, closure=None):
        self.made += 1
        here = self.made == self.at and worker.in_rank() and worker.context().rank == self.victim
        if here and not os.path.exists(self.marker):
            os.close(os.open(self.marker, os.O_CREAT | os.O_EXCL))
            os.kill(os.getpid(), self.how)
        return super().step(closure)


@pytest.mark.many(2)
@pytest.mark.parametrize(
    ("words", "victim", "how", "at"),
    [
        ("dp=2 sync=ps check=true", 2, signal.SIGKILL, 15),
        ("dp=2 sync=ps servers=2 bucket=0.00005", 3, signal.SIGSTOP, 40),
        ("dp=2 sync=ps", 2, signal.SIGKILL, 2),
        ("dp=2 pp=2 sync=ps servers=2 microbatches=2", 4, signal.SIGKILL, 8),
    ],
)
def test_by_priority_a_server_dies_and_all_go_back(clusters, tmp_path, words, victim, how, at):
    """To the beginning, or to a snapshot of all servers with as many updates of every layer."""
    marker, plan = str(tmp_path / "killed"), Plan.parse(f"{words} overlap=priority on_death=continue")
    layers = [torch.nn.Linear(6, 6) for _ in range(4)]
    optimizer = partial(StopsInUpdate, marker=marker, victim=victim, at=at, how=how)
    job = Job(partial(torch.nn.Sequential, *layers), rows(9), 9, mse, optimizer, 0, torch.float64)
    program = plan.compile(shape_of(job.build()), steps=6)
    done, service = execute_served(program, job, clusters(plan.ranks), on_death="continue", snapshot_every=1)
    assert os.path.exists(marker)
    (death,) = service.deaths
    assert f"rank {victim} was killed" in death
    plain = job.build()
    stepping = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(6):
        x, y = job.batches(step)
        loss = mse(plain(x), y)
        assert abs(done.losses[step] - loss.item()) <= 1e-12
        stepping.zero_grad()
        loss.backward()
        stepping.step()
    for name, p in plain.named_parameters():
        assert (service.parameters[name] - p).abs().max() <= 1e-12, name


@pytest.mark.parametrize(
    ("words", "layers"),
    [
        ("dp=3 sync=ps mode=async", ("linear",)),
        ("dp=2 pp=2 sync=ps mode=async schedule=pipedream microbatches=2", ("linear", "linear")),
    ],
)
def test_a_worker_dies_and_all_end(clusters, tmp_path, words, layers):
    plan = Plan.parse(words)
    with pytest.raises(RankDied, match="rank 1"):
        train(partial(toy, layers), KillsOnce(str(tmp_path / "killed"), 1), plan, cluster=clusters(plan.ranks),
              steps=4, batch=9, loss=mse, progress=False)  # fmt: skip


def test_what_does_not_go_together(clusters):
    with pytest.raises(PlanError, match="otherwise than the whole one|cannot update slices"):
        train(partial(toy, ("linear",)), rows(8), "dp=2 sync=ps", cluster=clusters(3), loss=mse, steps=1,
              optimizer=torch.optim.LBFGS, progress=False)  # fmt: skip


@pytest.mark.slow
def test_the_command_line(capsys):
    words = ["run", "dp=3 sync=ps mode=async", "--model", "mlp-digits", "--steps", "3", "--dtype", "float64"]
    assert main([*words, "--check", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["max_gradient_error"] <= 1e-12
    assert len(found["staleness"]) == len(found["bytes_sent"]) == len(found["peak_memory"]) == 4
    assert found["server_bytes"]["predicted"] == found["server_bytes"]["measured"]
    parameters = found["bytes_sent"][0]
    assert found["server_bytes"]["measured"] == [6 * parameters]
    assert found["allreduce_bytes"] == round(2 * 2 / 3 * parameters)


def test_a_real_straggler(clusters):
    """An emulated device per rank, the first five times slower: only k-of-n gets by without it."""
    from minipar import Cluster

    def costs(program):
        from minipar.costs.unit import UnitCosts

        return UnitCosts(program, 0.004, 0.008, stage_factors=[5.0] + [1.0] * (len(program.ranks) - 1))

    times = {}
    with Cluster(4, device=DeviceSpec(costs=costs)) as cluster:
        for mode in ("sync", "k-of-n:2/3"):
            found = train(partial(toy, ("linear",)), rows(9), f"dp=3 sync=ps mode={mode}", cluster=cluster, steps=8,
                          loss=mse, progress=False)  # fmt: skip
            times[mode] = found.trace.time
    assert times["sync"] > 8 * 0.06
    assert times["k-of-n:2/3"] < times["sync"]


class Counting(Recomputed):
    """A product of two readings of its input, and how often it was computed, in a file."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def compute(self, *inputs):
        with open(self.path, "a") as file:
            file.write("x")
        return inputs[0] * inputs[0].tanh()


def with_core(path):
    return [torch.nn.Linear(6, 6), torch.nn.Sequential(Counting(path), torch.nn.Linear(6, 6)), torch.nn.Linear(6, 6)]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_core_of_a_layer_runs_again_in_the_backward(clusters, tmp_path, mode):
    calls = {}
    for words in ("none", "selective"):
        path = tmp_path / words
        plan = f"dp=2 sync=ps mode={mode} checkpoint={words}"
        found = train(partial(with_core, str(path)), rows(8), plan, loss=mse, cluster=clusters(3), steps=3, batch=8,
                      dtype=torch.float64, check=True, progress=False)  # fmt: skip
        assert found.program.selective == (words == "selective")
        assert found.max_gradient_error() <= 1e-12
        calls[words] = path.stat().st_size
    assert calls["selective"] >= calls["none"] + 2 * 3  # (one backward each, two workers, three steps)


def test_a_model_without_a_core_is_refused(clusters):
    with pytest.raises(PlanError, match="checkpoint=selective: no layer of this model has a part"):
        train(partial(toy, ("linear",)), rows(8), "dp=2 sync=ps checkpoint=selective", cluster=clusters(3), loss=mse,
              progress=False)  # fmt: skip


class Slow(torch.nn.Linear):
    """Takes long, and lets no other thread of its process run meanwhile."""

    def forward(self, input):
        ctypes.PyDLL(None).usleep(800_000)
        return super().forward(input)


@pytest.mark.parametrize("on_death", ["abort", "continue"])
def test_a_forward_that_takes_longer_than_the_patience(clusters, on_death):
    """Also the first one, before the first step."""
    layers = [Slow(6, 6), torch.nn.Linear(6, 6)]
    program = Plan.parse("dp=2 sync=ps").compile(shape_of(layers), steps=1)
    job = Job(lambda: torch.nn.Sequential(*layers), rows(8), 8, mse, partial(torch.optim.SGD, lr=0.1), 0, torch.float64)
    done, service = execute_served(program, job, clusters(3), on_death=on_death, patience=0.3)
    assert len(done.losses) == 1
    assert service.silent == service.deaths == []


class StopsOnce(torch.optim.SGD):
    """Stops the process of a server that makes its second update, as SIGSTOP does, once."""

    def __init__(self, parameters, marker, victim=2, how=signal.SIGSTOP):
        super().__init__(parameters, lr=0.1)
        self.marker, self.made, self.victim, self.how = marker, 0, victim, how

    def step(self, closure=None):
        self.made += 1
        here = self.made == 2 and worker.in_rank() and worker.context().rank == self.victim
        if here and not os.path.exists(self.marker):
            with open(self.marker, "w") as file:
                file.write(repr(time.monotonic()))
            os.kill(os.getpid(), self.how)
        return super().step(closure)


@pytest.mark.parametrize(("on_death", "servers"), [("abort", 1), ("abort", 2), ("continue", 1), ("continue", 2)])
def test_a_server_that_was_stopped_is_named_or_started_again(clusters, tmp_path, on_death, servers):
    """In a second, and not after its patience of 30; also the last one, for which the first one waits."""
    layers, marker, last = [torch.nn.Linear(6, 6)], tmp_path / "marker", 1 + servers
    program = Plan.parse(f"dp=2 sync=ps servers={servers} check=true").compile(shape_of(layers), steps=3)
    optimizer = partial(StopsOnce, marker=str(marker), victim=last)
    job = Job(lambda: torch.nn.Sequential(*layers), rows(8), 8, mse, optimizer, 0, torch.float64)
    if on_death == "continue":
        done, service = execute_served(program, job, clusters(last + 1), on_death=on_death, snapshot_every=1)
        assert len(done.losses) == 3
        assert len(service.deaths) == 1
        assert f"rank {last} was killed" in service.deaths[0]
        return
    name = rf"worker \d: server {servers - 1} \(process \d+\) was stopped \(SIGSTOP\)"
    with pytest.raises(RankError, match=name) as caught:
        execute_served(program, job, clusters(last + 1), on_death=on_death)
    assert time.monotonic() - float(marker.read_text()) < 2.0
    said = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ()), str(caught.value.__cause__ or "")])
    if sys.version_info >= (3, 11):
        assert f"meanwhile rank {last} was stopped (SIGSTOP)" in said


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_dies_and_replicas_of_several_ranks_begin_again(clusters, tmp_path, how):
    """What they are at is void, also for a rank that waits for another one of its replica."""
    optimizer = partial(StopsOnce, marker=str(tmp_path / "marker"), victim=5, how=how)
    words = "dp=2 pp=2 sync=ps servers=2 microbatches=2 on_death=continue"
    found = train(partial(toy, ("linear", "linear")), rows(9), words, cluster=clusters(6), steps=5, loss=mse,
                  optimizer=optimizer, dtype=torch.float64, check=True, progress=False)  # fmt: skip
    assert os.path.exists(tmp_path / "marker")
    (death,) = found.service.deaths
    assert "rank 5 was killed" in death
    assert found.max_gradient_error() <= 1e-12
    assert found.max_parameter_error() <= 1e-12


def stops_in(victim):
    """A model whose making stops the process of one rank."""
    if worker.context().rank == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
    return torch.nn.Sequential(torch.nn.Linear(6, 6))


@pytest.mark.parametrize("victim", [1, 2])
def test_a_rank_that_was_stopped_before_it_connects_or_listens_is_named(clusters, victim):
    program = Plan.parse("dp=2 sync=ps").compile(shape_of([torch.nn.Linear(6, 6)]), steps=3)
    job = Job(partial(stops_in, victim), rows(8), 8, mse, partial(torch.optim.SGD, lr=0.1), 0, torch.float64)
    who, began = {1: "worker 1", 2: r"worker \d: server 0"}[victim], time.monotonic()
    with pytest.raises(RankError, match=who + r" \(process \d+\) was stopped \(SIGSTOP\)"):
        execute_served(program, job, clusters(3))
    assert time.monotonic() - began < 10


class KillsAlways(KillsOnce):
    """Rows that end the rank which asks for those of step 2, every time."""

    def batch(self, step, size):
        if step == 2 and worker.in_rank() and worker.context().rank == self.victim:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().batch(step, size)


def test_to_start_a_worker_again_that_always_dies_ends_with_an_error(clusters):
    with pytest.raises(RankDied, match=r"rank 1 .*It died 3 times without a step in between: .* does not help"):
        train(partial(toy, ("linear",)), KillsAlways("", 1), "dp=2 sync=ps on_death=continue", cluster=clusters(3),
              steps=4, batch=9, loss=mse, progress=False)  # fmt: skip
    assert clusters(3).run(lambda: 7) == [7, 7, 7]


def shortest(run):
    """Of up to eight runs the first that takes as long as was predicted: longer where other processes take the cores.
    On emulated devices a run is never shorter; it is where a server decides as it runs, and does not wait for a worker
    that is late."""
    for _ in range(8):
        found = run()
        assert found.program.serving.mode != "sync" or found.trace.time >= 0.95 * found.predicted.time
        if found.trace.time == pytest.approx(found.predicted.time, rel=0.05):
            break
    return found


def four_layers():
    return torch.nn.Sequential(*(torch.nn.Linear(40, 40) for _ in range(4)))


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("mode", ["sync", "async", "ssp:1", "k-of-n:2/3"])
def test_emulated_links_reach_the_servers(emulated, mode, servers):
    """26 KB there and back for each of three workers, and a message's latency: as long as was predicted."""
    both = tuple(torch.randn(2, 12, 40, generator=torch.Generator().manual_seed(0)))
    plan = f"dp=3 sync=ps servers={servers} mode={mode} bucket=0.01"

    found = shortest(lambda: train(four_layers, both, plan, cluster=emulated(3 + servers), steps=3, batch=12, loss=mse,
                                   dtype=torch.float32, progress=False, check=True))  # fmt: skip
    verify(found.program)
    assert found.max_gradient_error() <= 1e-5
    assert found.trace.time == pytest.approx(found.predicted.time, rel=0.05)
    # The servers decide as they run; so the program that it turned out to be is compared with its own time, too.
    expected = simulate(found.program, EmulatedCosts(found.program, LINKS))
    assert found.trace.time == pytest.approx(expected.time, rel=0.05)
    if mode == "sync":  # in the other modes servers decide as they run, and may do better than was predicted
        assert expected.time == pytest.approx(found.predicted.time)
        assert found.trace.time >= 0.99 * found.predicted.time, "nothing ends before the device would end it"
        assert expected.time > 3 * (0.18 + 2 * 0.02 + 0.026)
        for server, op in product(range(3, 3 + servers), (Op.ACCEPT, Op.APPLY)):
            pairs = zip(ends(found.trace, server, op), ends(expected, server, op), strict=True)
            assert all(mine >= 0.99 * other for mine, other in pairs), "nothing ends before the device would end it"


def test_a_server_works_when_its_device_does():
    """However late its process hears of that: a machine may stop all processes for a while."""
    pace, told = Pace(), []
    pace.hear(time.perf_counter() - 0.03)
    begin = pace.now
    for _ in range(2):
        pace.work(0.02, lambda *span: told.append(span))
    while not pace.idle:
        pace.go_on()
    assert told == [(begin, begin + 0.02), (begin + 0.02, begin + 0.02 + 0.02)]
    assert time.perf_counter() >= begin + 0.04, "nothing ends before its time"


@pytest.mark.parametrize("words", ["dp=2 sync=ps servers=2 overlap=priority bucket=none",
                                   "dp=2 sync=ps servers=2 overlap=priority bucket=0.004",
                                   "pp=2 sync=ps microbatches=2",
                                   "pp=2 dp=2 sync=ps servers=2 mode=k-of-n:2/2 microbatches=2",
                                   "pp=2 dp=2 sync=ps servers=2 mode=async schedule=pipedream microbatches=2",
                                   "dp=2 sync=ps bucket=flat schedule=pipedream-2bw microbatches=2"])  # fmt: skip
def test_emulated_links_of_layers_one_by_one_and_of_pipelines(emulated, words):
    both = tuple(torch.randn(2, 12, 40, generator=torch.Generator().manual_seed(0)))
    found = shortest(lambda: train(four_layers, both, words, cluster=emulated(Plan.parse(words).ranks), steps=3,
                                   batch=12, loss=mse, progress=False, check=True))  # fmt: skip
    assert found.max_gradient_error() <= 1e-5
    assert found.trace.time == pytest.approx(found.predicted.time, rel=0.05)


def test_emulated_links_of_ranks_that_share_layers():
    """Their collectives take the time of links, and so do messages with servers."""
    words, model = "tp=2 sync=ps servers=2", partial(models.gpt, layers=1, **SMALL)
    # (Slow: what four processes need on two cores for a collective must be little of what the link takes.)
    with Cluster(4, device=DeviceSpec(flops=1e7, bandwidth=4e5, latency=0.08)) as cluster:
        found = shortest(lambda: train(model, text(8), words, cluster=cluster, steps=2, progress=False, check=True,
                                       loss=torch.nn.functional.cross_entropy))  # fmt: skip
    assert found.max_gradient_error() <= 1e-5
    assert found.trace.time == pytest.approx(found.predicted.time, rel=0.05)


LINKS = DeviceSpec.parse("forward=60ms backward=120ms bandwidth=1MB/s latency=20ms")


@pytest.fixture(scope="module")
def emulated():
    """Clusters by their number of ranks, of emulated devices."""
    with ExitStack() as stack:
        yield lru_cache(lambda ranks: stack.enter_context(Cluster(ranks, device=LINKS)))


def ends(trace, rank, op):
    """When instructions of a rank end, in order, after the first of all ranks begins. Which of several equal workers is
    served first differs."""
    first = min(map(min, trace.starts))
    row = zip(trace.program.ranks[rank], trace.ends[rank], strict=True)
    return sorted(end - first for ins, end in row if ins.op is op)


def test_emulated_links_by_a_function():
    """A latency that only the device's own function knows."""
    from minipar.costs.unit import UnitCosts

    def costs(program):
        return UnitCosts(program, 0.02, 0.04, latency=0.05, stage_factors=[1.0, 2.0, 1.0])

    with Cluster(3, device=DeviceSpec(costs=costs)) as cluster:
        found = shortest(lambda: train(four_layers, tuple(torch.randn(2, 8, 40)), "dp=2 sync=ps", cluster=cluster,
                                       steps=4, batch=8, loss=mse, progress=False))  # fmt: skip
    assert found.predicted.time == pytest.approx(4 * (0.12 + 2 * 0.05))
    assert found.trace.time == pytest.approx(found.predicted.time, rel=0.05)


def detached():
    return torch.nn.Sequential(torch.nn.Linear(6, 6), Detached())


class Detached(torch.nn.Module):
    def forward(self, x):
        return x.detach()


def test_a_model_that_no_gradient_reaches(clusters):
    found = run(clusters, "dp=2 sync=ps mode=ssp:0", model=detached, steps=2)
    assert all(not g.any() for each in found.gradients for g in each.values())
