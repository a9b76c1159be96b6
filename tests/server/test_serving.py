"""Training with parameter servers on real processes: equal to plain torch, or to the replay of the recorded order."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import ExitStack
from functools import lru_cache, partial
from itertools import product

import pytest
import torch

from minipar import Cluster, DeviceSpec, Plan, simulate, train, verify
from minipar.cli import main
from minipar.cluster import worker
from minipar.errors import Deadlock, PlanError, RankDied
from minipar.execution.emulation import Pace
from minipar.execution.execution import Job
from minipar.prediction.program_costs import ProgramCosts
from minipar.program import Op
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
    if "bf16" in words or "fp16" in words:
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
        "dp=2 sync=ps servers=2 compress=bf16",
        "sync=ps servers=3 microbatches=2 compress=fp16",
    ],
)
def test_sync_equals_plain_torch(clusters, words):
    found = run(clusters, words)
    near = 1e-2 if "bf16" in words or "fp16" in words else 1e-12
    assert found.max_error() <= near
    for mine, plain in zip(found.losses, found.reference.losses, strict=True):
        assert abs(mine - plain) <= near * max(1.0, abs(plain))


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
    assert found.max_error() <= 1e-12
    for mine, plain in zip(found.losses, found.reference.losses, strict=True):
        assert abs(mine - plain) <= 1e-12 * max(1.0, abs(plain))
    bound = found.program.contract.bound
    assert bound is None or max(found.trace.staleness()) <= bound
    assert len(found.step_times) == 1


def test_every_update_is_clipped_and_of_what_was_pushed(clusters):
    """Two servers have parts of each gradient, and one norm."""
    words = "dp=2 sync=ps mode=async servers=2 microbatches=2 clip={} compress=topk:1"
    clipped, free = (run(clusters, words.format(norm)) for norm in (0.05, 1000))
    assert clipped.max_error() <= 1e-12
    job = Job(MODEL, rows(17), 32, mse, partial(torch.optim.SGD, lr=0.5), 0, torch.float64)
    other = replay(job, served_order(clipped.service.order, 2, 2))  # the same order without clipping
    assert max((other.parameters[k] - v).abs().max() for k, v in clipped.service.parameters.items()) > 1e-3
    assert free.service.order  # (a norm that is never reached: `run` has replayed it, too)


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
    assert 1e-6 < several.max_error() < 0.1


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


@pytest.mark.parametrize("count", [7, 3])
def test_uneven_rows(clusters, count):
    assert run(clusters, "dp=3 sync=ps microbatches=2", rows(count)).max_error() <= 1e-12
    assert run(clusters, "dp=3 sync=ps mode=async", rows(count)).max_error() <= 1e-12


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
    found = train(partial(toy, ("linear",)), data, f"dp=3 sync=ps mode={mode} on_death=continue",
                  cluster=clusters(4), steps=4, batch=9, loss=mse, dtype=torch.float64, check=True,
                  progress=False)  # fmt: skip
    assert os.path.exists(data.marker)
    (death,) = found.service.deaths
    assert "rank 1" in death
    assert found.max_error() <= 1e-12
    assert all(loss == loss for loss in found.losses)


def test_a_worker_dies_and_all_end(clusters, tmp_path):
    with pytest.raises(RankDied, match="rank 1"):
        train(partial(toy, ("linear",)), KillsOnce(str(tmp_path / "killed"), 1), "dp=3 sync=ps mode=async",
              cluster=clusters(4), steps=4, batch=9, loss=mse, progress=False)  # fmt: skip


@pytest.mark.parametrize(
    ("words", "other"),
    [
        ("dp=2 pp=2", "pp=1"),
        ("dp=2 tp=2", "tp=1"),
        ("dp=2 context_parallel=2", "context_parallel=1"),
        ("dp=2 ep=2", "ep=1"),
        ("dp=2 schedule=pipedream", "a synchronous schedule"),
        ("dp=2 overlap=priority", "overlap=backward"),
        ("dp=2 offload=parameters", "offload=none"),
        ("dp=2 host_layers=0", "host_layers=none"),
        ("dp=2 schedule=terapipe slices=2", "no slices="),
    ],
)
def test_what_is_not_built_is_said(words, other):
    with pytest.raises(PlanError, match=f"replicas of one rank.*; not built.*possible is {other}.* or sync=allreduce"):
        Plan.parse(f"{words} sync=ps")


def test_what_does_not_go_together(clusters):
    with pytest.raises(PlanError, match="LBFGS: its step.. needs a closure"):
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


@pytest.mark.parametrize("on_death", ["abort", "continue"])
def test_a_server_that_was_stopped_is_named(clusters, tmp_path, on_death):
    marker = tmp_path / "marker"
    optimizer = partial(StopsOnce, marker=str(marker), victim=3)
    with pytest.raises((Deadlock, RankDied), match=r"rank 3.* stopped \(SIGSTOP\)"):
        train(partial(toy, ("linear",)), rows(9), f"dp=2 sync=ps servers=2 on_death={on_death}", cluster=clusters(4),
              steps=5, loss=mse, optimizer=optimizer, progress=False)  # fmt: skip
    assert time.monotonic() - float(marker.read_text()) < 2.0


@pytest.mark.parametrize("on_death", ["abort", "continue"])
def test_a_server_dies_and_all_end(clusters, tmp_path, on_death):
    optimizer = partial(StopsOnce, marker=str(tmp_path / "marker"), victim=3, how=signal.SIGKILL)
    with pytest.raises(RankDied, match="rank 3 was killed") as caught:
        train(partial(toy, ("linear",)), rows(9), f"dp=2 sync=ps servers=2 on_death={on_death}", cluster=clusters(4),
              steps=5, loss=mse, optimizer=optimizer, progress=False)  # fmt: skip
    if on_death == "continue":
        assert "possible is to resume a saved run" in str(caught.value)


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
    assert found.max_error() <= 1e-5
    assert found.trace.time == pytest.approx(found.predicted.time, rel=0.05)
    # The servers decide as they run; so the program that it turned out to be is compared with its own time, too.
    expected = simulate(found.program, ProgramCosts(found.program, device=LINKS))
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
    pace, said = Pace(), []
    pace.hear(time.perf_counter() - 0.03)
    begin = pace.now
    for _ in range(2):
        pace.work(0.02, lambda *span: said.append(span))
    while not pace.idle:
        pace.go_on()
    assert said == [(begin, begin + 0.02), (begin + 0.02, begin + 0.02 + 0.02)]
    assert time.perf_counter() >= begin + 0.04, "nothing ends before its time"


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


def detached():
    return torch.nn.Sequential(torch.nn.Linear(6, 6), Detached(), torch.nn.Linear(6, 6))


class Detached(torch.nn.Module):
    def forward(self, x):
        return x.detach()


def test_a_layer_that_no_gradient_reaches(clusters):
    found = run(clusters, "dp=2 sync=ps mode=ssp:0", model=detached, steps=2)
    reached = {(name, bool(g.any())) for each in found.gradients for name, g in each.items()}
    assert reached == {("0.weight", False), ("0.bias", False), ("2.weight", True), ("2.bias", True)}
