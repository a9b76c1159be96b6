"""execute(): programs on real ranks, also programs that no pass has made; and programs that it refuses."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn

from minipar import Plan, PlanError, data, execute, models, train, verify
from minipar.errors import ProgramError
from minipar.execution.execution import Job
from minipar.models.parameter_groups import shape_of
from minipar.program import Op
from minipar.training.plainly import train_reference
from minipar.training.reference import gradient_error
from tests.interpreters import mutations
from tests.toys import rows, toy

MODEL = partial(toy, ("linear", "tuples", "dropout"), tied=True)


def job(model=MODEL, **options) -> Job:
    options.setdefault("loss", nn.functional.mse_loss)
    return Job(model, rows(12), dtype=torch.float64, **options)


def compiled(text: str, model=MODEL, **options):
    return Plan.parse(text).compile(shape_of(list(model())), **options)


def test_several_steps_in_one_program_are_several_steps(clusters):
    program = compiled("pp=2 microbatches=3", steps=3)
    found = execute(program, job(), cluster=clusters(2), passes=2)
    plain = train_reference(job(), 6)
    assert found.losses == pytest.approx(plain.losses, rel=1e-12)
    for mine, expected in zip(found.gradients, plain.gradients, strict=True):
        assert gradient_error(mine, expected) < 1e-12


def test_the_measured_trace_is_of_the_program_that_ran(clusters):
    program = compiled("pp=2 dp=2 microbatches=3")
    trace = execute(program, job(), cluster=clusters(4), passes=3).trace
    assert trace.program is program
    assert trace.kind == "measured"
    for rank, instructions in enumerate(program.ranks):
        starts, ends = trace.starts[rank], trace.ends[rank]
        assert all(e - s >= 0 for s, e in zip(starts, ends, strict=True))
        compute = [k for k, ins in enumerate(instructions) if ins.stream == "compute"]
        for a, b in pairwise(compute):
            assert ends[a] <= starts[b]  # one loop, in order
    sends = {(r, i.peer, str(i.reads[0])): trace.starts[r][k] for r, row in enumerate(program.ranks)
             for k, i in enumerate(row) if i.op is Op.SEND}  # fmt: skip
    for rank, row in enumerate(program.ranks):
        for k, ins in enumerate(row):
            if ins.op is Op.RECV:
                assert trace.ends[rank][k] >= sends[ins.peer, rank, str(ins.writes[0])]


def test_bytes_are_those_of_the_tensors(clusters):
    model = partial(toy, ("linear", "linear"))
    program = compiled("pp=2 dp=2 microbatches=2 bucket=flat", model)
    trace = execute(program, job(model), cluster=clusters(4)).trace
    message = 12 // 4 * 6 * 8  # rows x width x float64
    gradients = 2 * (6 * 6 + 6) * 8
    links = dict.fromkeys([(0, 1), (1, 0), (2, 3), (3, 2)], 2 * message)
    groups = dict.fromkeys([(0, (0, 2)), (2, (0, 2)), (1, (1, 3)), (3, (1, 3))], gradients)
    assert trace.bytes_by_link() == links | groups
    assert trace.bytes_by_kind() == {"activations": 8 * message, "gradients": 4 * gradients}
    assert trace.bytes_sent() == [2 * message + gradients] * 4


class Growing(nn.Module):
    """Hands on something of another shape at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x).repeat(1, self.calls)


def growing():
    return nn.Sequential(Growing(), nn.AdaptiveAvgPool1d(6), nn.Linear(6, 6))


@pytest.mark.parametrize("microbatches", [2, 1])
def test_a_shape_that_changes_is_announced_again(clusters, microbatches):
    """In the same pass or in the next one."""

    def losses(plan, ranks):
        program = compiled(f"{plan} microbatches={microbatches}", growing)
        return execute(program, job(growing), passes=3, cluster=clusters(ranks)).losses

    assert losses("pp=2 split=1,2", 2) == losses("dp=1", 1)


def test_loss_must_be_a_scalar(clusters):
    program = compiled("pp=2")
    with pytest.raises(Exception, match="must be a scalar"):
        execute(program, job(loss=partial(nn.functional.mse_loss, reduction="none")), cluster=clusters(2))


def test_more_stages_than_layers_are_refused_before_ranks_start(monkeypatch):
    def start(*_: object) -> None:
        raise AssertionError("ranks are started")

    monkeypatch.setattr("minipar.training.training.Cluster", start)
    model, given = partial(models.build, "gpt-tiny", layers=6), data.for_model("gpt-tiny")
    made, before = model(), torch.random.get_rng_state()
    for words, told in (
        ("pp=64", r"pp=64: more stages than layers \(8\); possible are 1 to 8"),
        ("pp=9 schedule=interleaved chunks=2 microbatches=9", r"pp=9: more stages than layers"),
    ):
        with pytest.raises(PlanError, match=told):
            train(model, given, words)
    with pytest.raises(PlanError, match="pp=64: more stages"):
        train(made, given, "pp=64")
    assert torch.equal(torch.random.get_rng_state(), before)
    with pytest.raises(AssertionError, match="started"):  # (a model that only a rank can make is counted there)
        train(lambda: 1 / 0, given, "pp=64")


def test_refusals(clusters):
    program = compiled("pp=2")
    with pytest.raises(PlanError, match="needs 2 ranks, but the cluster has 4"):
        execute(program, job(), cluster=clusters(4))
    with pytest.raises(Exception, match="compiled for another model"):
        execute(program, job(partial(toy, ("linear",))), cluster=clusters(2))
    with pytest.raises(PlanError, match="a Sequential without layers"):
        execute(program, job([]), cluster=clusters(2))
    with pytest.raises(PlanError, match="data=int"):
        Job(MODEL, 3)
    with pytest.raises(PlanError, match="batch=0"):
        Job(MODEL, data.stdlib_text(), batch=0)


@pytest.mark.parametrize(("text", "seed"), [("pp=4 microbatches=3", 1), ("pp=2 dp=2 microbatches=2 bucket=0.0001", 2)])
def test_mutants_that_verify_accepts_still_give_the_right_gradients(clusters, text, seed):
    """Whatever random change verify lets pass is a program that runs, and runs right."""
    program = compiled(text)
    cluster = clusters(len(program.ranks))
    plain = train_reference(job(), 1)
    tried = 0
    for what, mutant in mutations(program, seed, 400):
        if tried == 12 or mutant.ranks == program.ranks or refused(mutant):
            continue
        found = execute(mutant, job(), cluster=cluster)
        assert gradient_error(found.gradients[0], plain.gradients[0]) < 1e-12, what
        tried += 1
    assert tried == 12


def refused(program) -> bool:
    try:
        verify(program)
    except ProgramError:
        return True
    return False


def test_what_would_train_something_else_is_refused(clusters):
    program = compiled("pp=2 microbatches=2")
    with pytest.raises(PlanError, match="reduction='sum'"):
        job(loss=partial(nn.functional.mse_loss, reduction="sum"))
    x, y = rows(12)
    with pytest.raises(Exception, match="x has 12 rows, but y has 9"):
        execute(program, Job(MODEL, (x, y[:9]), loss=nn.functional.mse_loss), cluster=clusters(2))


def test_a_program_that_would_wait_for_ever_is_refused_before_it_is_run(clusters):
    program = compiled("pp=2 microbatches=2")
    silent = program.with_rank(1, [ins for ins in program.ranks[1] if ins.op is not Op.SEND])
    with pytest.raises(ProgramError, match="rank 1"):
        execute(silent, job(), cluster=clusters(2))
