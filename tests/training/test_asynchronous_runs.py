"""Asynchronous pipelines on real ranks: equal to a replay of their recorded order in plain torch, for every order."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch

from minipar import Plan, PlanError, execute, resume, train, verify
from minipar.execution.correction import ByStaleness
from minipar.execution.execution import Execution, Job
from minipar.models.parameter_groups import shape_of
from minipar.models.tensors import layers_of
from minipar.trace.recorded_order import UPDATE, RecordedOrder, order_of
from minipar.training.plainly import train_reference as replay
from minipar.training.reference import Reference, gradient_error
from tests.toys import rows, toy

pytestmark = pytest.mark.many(3)

mse, cross_entropy = torch.nn.functional.mse_loss, torch.nn.functional.cross_entropy
SGD, MOMENTUM = partial(torch.optim.SGD, lr=0.3), partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
MODEL = partial(toy, ("linear", "tuples", "dropout", "in-place", "unused"), frozen=(2,))


def run(clusters, text, optimizer=SGD, model=MODEL, data=None, steps=3, loss=mse) -> tuple[Job, Execution]:
    plan = Plan.parse(text)
    job = Job(model, data or rows(17), loss=loss, optimizer=optimizer, dtype=torch.float64)
    program = plan.compile(shape_of(layers_of(job.build())), steps=steps)
    return job, execute(program, job, cluster=clusters(plan.ranks))


def errors(done: Execution, plain: Reference) -> tuple[float, float]:
    pairs = zip(done.gradients, plain.gradients, strict=True)
    losses = zip(done.losses, plain.losses, strict=True)
    return max(gradient_error(a, b) for a, b in pairs), max(abs(a - b) for a, b in losses)


PLANS = [
    "pp=4 schedule=pipedream-vertical microbatches=5",
    "pp=4 schedule=pipedream microbatches=3 checkpoint=1 split=2,4,2,1",
    "pp=4 schedule=ampnet microbatches=5 in_flight=6 update_every=4",
    "dp=2 pp=2 schedule=pipedream-2bw microbatches=2 bucket=none checkpoint=1",
]


@pytest.mark.parametrize("text", PLANS)
def test_every_run_equals_the_replay_of_its_order(clusters, text):
    job, done = run(clusters, text, MOMENTUM)
    worst = errors(done, replay(job, order_of(done.program)))
    assert max(worst) <= 1e-12, worst


def test_the_measured_trace_is_as_stale_as_the_papers_say(clusters):
    for schedule, pairs in {
        "pipedream": [(3, 4), (2, 3), (1, 2), (0, 1)],
        "pipedream-vertical": [(3, 4)] * 4,
        "pipedream-2bw": [(1, 2)] * 4,
    }.items():
        _, done = run(clusters, f"pp=4 schedule={schedule} microbatches=4")
        assert list(zip(done.trace.staleness(), done.trace.weight_versions(), strict=True)) == pairs
        used = {e.version_used for e in done.trace.events_of(0) if e.stream == "compute"}
        assert used == set(range(max(used) + 1))


def test_ampnet_returns_the_program_as_it_happened(clusters):
    _, done = run(clusters, "pp=4 schedule=ampnet microbatches=8 in_flight=6", steps=2)
    program = done.program
    assert program.in_flight is None
    assert done.trace.program is program
    assert [len(row) for row in done.trace.starts] == [len(row) for row in program.ranks]
    for starts, ends, row in zip(done.trace.starts, done.trace.ends, program.ranks, strict=True):
        compute = [k for k, ins in enumerate(row) if ins.stream == "compute"]
        assert all(ends[a] <= starts[b] for a, b in itertools.pairwise(compute))
    assert max(done.trace.staleness()) <= program.contract.bound == 5


# the replay can fail --------------------------------------------------------------------------------------------------


def changed(order: RecordedOrder, rank: int, change) -> RecordedOrder:
    """The order with every entry of a rank changed; None leaves one out."""
    entries = [change(e) if e.rank == rank else e for e in order.entries]
    return order._replace(entries=tuple(e for e in entries if e is not None))


@pytest.fixture(scope="module")
def recorded(clusters):
    return run(clusters, "pp=2 schedule=pipedream microbatches=5", MOMENTUM)


def test_another_version_is_another_run(recorded):
    job, done = recorded
    order = order_of(done.program)

    def older(e):
        return e._replace(version=1) if e.version == 2 and e.what != UPDATE else e

    assert min(errors(done, replay(job, changed(order, 0, older)))) > 1e-6

    def forward_only(e):
        return older(e) if e.what == "forward" else e

    assert min(errors(done, replay(job, changed(order, 0, forward_only)))) > 1e-6
    with pytest.raises(ValueError, match="Entry.rank=0, what='forward', .* uses what does not exist"):
        replay(job, changed(order, 0, lambda e: e._replace(version=99) if e.what == "forward" else e))


def test_an_order_that_cannot_be_is_refused(recorded):
    job, done = recorded
    order = order_of(done.program)
    with pytest.raises(ValueError, match="rank=0, what='backward', microbatch=0.* uses what does not exist"):
        replay(job, changed(order, 1, lambda e: None if e.what == "backward" and e.microbatch == 0 else e))
    with pytest.raises(PlanError, match="has no recorded order"):
        order_of(Plan(pp=2).compile(layers=4))


# train, save, correct -------------------------------------------------------------------------------------------------


def test_train_checks_against_the_replay_and_saves(clusters, tmp_path):
    options = {"cluster": clusters(2), "dtype": torch.float64, "loss": mse, "progress": False, "check": True}
    text = "pp=2 schedule=pipedream microbatches=4"
    first = train(MODEL, rows(12), text, steps=2, optimizer=MOMENTUM, save=str(tmp_path), **options)
    assert first.max_error() <= 1e-12
    assert first.losses == pytest.approx(first.reference.losses, abs=1e-12)
    assert len(first.losses) == 8
    assert first.predicted.staleness() == first.trace.staleness() == [1, 0]
    again = resume(tmp_path, MODEL, rows(12), steps=2, optimizer=MOMENTUM, **options)
    assert again.first_step == 2
    assert again.max_error() <= 1e-12
    plain = resume(tmp_path, MODEL, rows(12), "pp=2", steps=1, optimizer=MOMENTUM, **options)  # under another plan
    assert plain.max_error() <= 1e-12
    with pytest.raises(PlanError, match="save_every=1: schedule=pipedream has no flush"):
        train(MODEL, rows(12), text, steps=2, save=str(tmp_path), save_every=1, **options)
    with pytest.raises(PlanError, match="memory=True: schedule=ampnet"):
        train(MODEL, rows(12), "pp=2 schedule=ampnet", steps=1, memory=True, **options)


@pytest.mark.parametrize("more", ["", "dp=2 bucket=none precision=bf16"])
def test_memory_of_stashed_versions_is_predicted(clusters, more):
    model = partial(toy, ("linear", "linear"), width=200)
    plan = Plan.parse(f"pp=2 schedule=pipedream-vertical microbatches=4 {more}")
    run = train(model, tuple(t.float() for t in rows(16, 200)), plan, cluster=clusters(plan.ranks), steps=2, loss=mse,
                progress=False, memory=True)  # fmt: skip
    for predicted, measured in zip(run.predicted.peak_memory(), run.trace.peak_memory(), strict=True):
        assert measured == pytest.approx(predicted, rel=2e-2 if plan.precision == "bf16" else 2e-3)  # (rows: float32)
    assert all(run.trace.memory(rank).kinds["gradients"][-1] == 0 for rank in range(plan.ranks))
    own = 2 * (200 * 200 + 200) * (2 if plan.precision == "bf16" else 4)
    parameters = [run.trace.peak_by_kind(rank)["parameters"] for rank in range(plan.ranks)]
    assert parameters == [run.predicted.peak_by_kind(rank)["parameters"] for rank in range(plan.ranks)]
    assert parameters == [2 * own, 2 * own] * plan.dp


# bfloat16 -------------------------------------------------------------------------------------------------------------

NARROW = partial(toy, ("linear", "linear", "dropout"), frozen=(1,))


@pytest.mark.parametrize(
    "text", ["pp=2 schedule=pipedream microbatches=4", "pp=2 schedule=ampnet microbatches=4 in_flight=3"]
)
def test_bf16_uses_the_versions_of_the_order(clusters, text):
    """Within bfloat16's 8 bits of what the order makes in float64, and far from what version 0 alone would make."""
    plan = Plan.parse(f"{text} precision=bf16")
    job = Job(NARROW, rows(16), loss=mse, optimizer=SGD, dtype=torch.float64)
    done = execute(plan.compile(shape_of(layers_of(job.build())), steps=4), job, cluster=clusters(plan.ranks))
    order = order_of(done.program)
    older = tuple(e if e.what == UPDATE else e._replace(version=0) for e in order.entries)
    near, far = (errors(done, replay(job, o)) for o in (order, order._replace(entries=older)))
    assert near[0] < 0.05
    assert far[0] > 5 * near[0]


def test_learning_rates_by_staleness(clusters):
    factory = ByStaleness(SGD, steps=4)
    job, done = run(clusters, "pp=4 schedule=pipedream microbatches=5", factory)
    assert max(errors(done, replay(job, order_of(done.program)))) <= 1e-12
    plain, _ = run(clusters, "pp=4 schedule=pipedream microbatches=5")
    assert max(errors(done, replay(plain, order_of(done.program)))) > 1e-6
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer, rates = SGD([parameter]), []
    factory.slow(optimizer, 4)
    optimizer.register_step_pre_hook(lambda o, args, kwargs: rates.append(o.param_groups[0]["lr"] / 0.3))
    for _ in range(6):
        parameter.grad = torch.ones(1)
        optimizer.step()
    assert rates == pytest.approx([4**-1, 4**-0.75, 4**-0.5, 4**-0.25, 1, 1])


def test_the_command_line(capsys):
    import json

    from minipar.cli import main

    assert main(["simulate", "pp=4 schedule=pipedream-2bw microbatches=8", "--layers", "4", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["time"], told["staleness"], told["weight_versions"]) == (33, [1] * 4, [2] * 4)
    plan = ["run", "pp=2 schedule=ampnet microbatches=4", "--model", "mlp-tiny", "--steps", "2", "--batch", "8"]
    assert main([*plan, "--check", "--dtype", "float64", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["max_gradient_error"] <= 1e-12
    assert told["losses"] == pytest.approx(told["reference_losses"], abs=1e-12)
    assert len(told["losses"]) == 8
    assert told["weight_versions"] == [1, 1]


def test_ampnet_waits_for_what_has_no_rows(clusters):
    """A rank takes up a micro-batch without rows when the rank before it is through with it; else the program as it
    happened could not happen."""
    plan = "pp=4 schedule=ampnet microbatches=6 in_flight=3 update_every=2"
    job, done = run(clusters, plan, steps=4, data=rows(2), model=partial(toy, ("linear",) * 3))
    verify(done.program)
    assert max(errors(done, replay(job, order_of(done.program)))) <= 1e-12
