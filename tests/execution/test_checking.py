"""check=true: nothing is found in what is right, and every seeded bug is, where it first is wrong."""

from __future__ import annotations

import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from minipar import Plan, train
from minipar.data import stdlib_text
from minipar.errors import CheckFailed
from minipar.execution import checking, facts
from minipar.execution.execution import Execution, Job, execute
from minipar.execution.facts import ALIKE, NEAR, ONE, SUM, Fact
from minipar.execution.mean_loss import Target
from minipar.models import gpt
from minipar.models.parameter_groups import shape_of
from minipar.program.mesh import Mesh
from minipar.server.serving import execute_served
from minipar.training.training import annotations_of
from tests.execution import seeded_bugs
from tests.execution.seeded_bugs import BUGS
from tests.toys import rows, toy

pytestmark = pytest.mark.many(6)

EASY = partial(toy, ("linear", "linear"))
GPT = partial(gpt, layers=2)
HARD = partial(toy, ("linear", "tuples", "dropout", "in-place", "unused"), tied=True, frozen=(1,))
UNTIED = partial(HARD, tied=False)  # (stages that update at different times share no parameters)


def run(clusters, text: str, model=HARD, passes: int = 2) -> Execution:
    """Run a plan, without profile and prediction."""
    plan = Plan.parse(text)
    rate = 0.02 if plan.asynchronous else 0.5  # (which updates more often)
    optimizer = partial(torch.optim.SGD, lr=rate, momentum=0.9)
    model = UNTIED if model is HARD and plan.asynchronous else model
    if plan.sharing > 1 or model is GPT:
        job = Job(GPT, stdlib_text(), 8, optimizer=optimizer, annotations=annotations_of(plan))
        made = job.build()
        alone = plan.sharing == 1
        shape = shape_of(list(made) if alone else job.share(made, 0, Mesh(plan.shared), plan.inputs, plan.cut))
    else:
        dtype = torch.float32 if plan.precision == "bf16" else torch.float64
        job = Job(
            model,
            rows(16 if model is EASY else 17),
            loss=torch.nn.functional.mse_loss,
            optimizer=optimizer,
            dtype=dtype,
        )
        shape = shape_of(list(job.build()))
    if plan.sync == "ps":
        program = plan.compile(shape, steps=passes)
        return execute_served(program, job, clusters(plan.ranks), on_death=plan.on_death, keep_gradients=True)[0]
    return execute(plan.compile(shape), job, cluster=clusters(plan.ranks), passes=passes, check=False)


RIGHT = [
    "microbatches=3",
    "dp=4 microbatches=2 bucket=none",
    "pp=2 schedule=gpipe microbatches=3 accumulate=2",
    "pp=2 dp=2 microbatches=3 clip=0.1",
    "pp=2 schedule=interleaved chunks=2 microbatches=4",
    "pp=2 schedule=zb-h1 microbatches=4 checkpoint=2",
    "dp=2 zero=1 compress=none",
    "dp=2 pp=2 zero=2 microbatches=2",
    "dp=2 zero=3 microbatches=3 accumulate=2",
    "dp=2 zero=2 precision=bf16 clip=1.0",
    "dp=2 compress=bf16",
    "dp=2 algorithm=ring overlap=none",
    "pp=4 schedule=dualpipe microbatches=8",
    "pp=2 inference=true microbatches=2",
    "tp=2 dp=2 sequence_parallel=true zero=2 microbatches=2",
    "context_parallel=2",
    "offload=optimizer,parameters,activations offload_to=disk microbatches=2 checkpoint=3",
    "dp=2 zero=2 offload=optimizer clip=0.1 microbatches=2",
    "dp=2 offload=optimizer precision=bf16",
    "dp=2 zero=3 offload=parameters microbatches=2",
    "dp=2 pp=2 overlap=priority bucket=0.0001 microbatches=3",
    "dp=2 sync=ps servers=2 microbatches=3 bucket=0.0001 clip=0.1",
    "pp=2 sync=ps servers=2 microbatches=2 offload=parameters",
    "sync=ps precision=bf16 servers=2",
    "dp=2 sync=ps compress=topk:0.5",
    "dp=2 pp=2 sync=ps servers=2 schedule=pipedream microbatches=3",
    "pp=2 schedule=pipedream microbatches=5",
    "pp=2 schedule=pipedream-vertical microbatches=4 precision=bf16",
    "pp=2 schedule=ampnet microbatches=4 in_flight=1 update_every=3",  # (of which the order is known)
]


@pytest.mark.many(20)
@pytest.mark.parametrize("text", RIGHT)
def test_what_is_right_passes_and_gives_the_same_numbers(clusters, text):
    plain, checked = run(clusters, text), run(clusters, f"{text} check=true")
    assert checked.losses == plain.losses
    for mine, theirs in zip(checked.gradients, plain.gradients, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("mode", ["async", "ssp:1", "k-of-n:2/3"])
def test_what_is_right_passes_where_servers_decide(clusters, mode):
    assert len(run(clusters, f"dp=3 sync=ps mode={mode} servers=1 check=true", passes=5).losses) == 5


def test_parameters_of_which_a_rank_has_only_its_slice_are_not_read(clusters):
    """The memory of the whole was given back: to read it would end the process."""
    run(clusters, "dp=2 zero=3 check=true", GPT)


def test_ranks_that_decide_as_they_run_pass_in_any_order(clusters):
    losses = run(clusters, "pp=4 schedule=ampnet microbatches=6 in_flight=4 check=true").losses
    assert len(losses) == 12


@pytest.mark.parametrize("name", BUGS)
def test_every_seeded_bug_is_found(clusters, name):
    bug = BUGS[name]
    cluster = clusters(Plan.parse(bug.plan).ranks)
    cluster.run(seeded_bugs.plant, name)
    try:
        with pytest.raises(CheckFailed, match=bug.why) as raised:
            run(clusters, f"{bug.plan} check=true", EASY, passes=3)
        error = raised.value
    finally:
        cluster.run(seeded_bugs.mend)
    assert error.instruction.split()[0] == bug.op, error.reason
    assert bug.rank in (None, error.rank), error.reason
    assert error.step >= 0
    assert error.index >= 0
    assert error.layers
    assert re.search(r"first at rank \d+, step \d+, instruction \d+: \w", error.reason)


@pytest.mark.many(3)
@pytest.mark.parametrize(
    ("name", "plan", "op", "rank"),
    [
        ("swapped message", "pp=2 schedule=pipedream microbatches=4", "RECV", 1),
        ("swapped message", "pp=2 schedule=ampnet microbatches=4", "RECV", 1),
        ("missing backward", "pp=2 schedule=pipedream microbatches=3", "B", 1),
        ("counted twice", "pp=2 schedule=pipedream-2bw microbatches=2", "B", None),
        ("doubled loss", "pp=2 schedule=pipedream-2bw microbatches=2", "F", 1),
        ("summed twice", "dp=2 schedule=pipedream microbatches=2", "STEP", None),
        ("update left out", "dp=2 schedule=pipedream microbatches=2", "STEP", 1),
        ("update left out", "pp=2 schedule=ampnet microbatches=4", "STEP", 1),
        ("wrong group", "dp=4 schedule=pipedream microbatches=2", "ALL_REDUCE", None),
    ],
)
def test_it_is_found_without_flushes_too(clusters, name, plan, op, rank):
    cluster = clusters(Plan.parse(plan).ranks)
    cluster.run(seeded_bugs.plant, name)
    try:
        with pytest.raises(CheckFailed) as raised:
            run(clusters, f"{plan} check=true", EASY, passes=1)
        error = raised.value
    finally:
        cluster.run(seeded_bugs.mend)
    assert error.instruction.split()[0] == op, error.reason
    assert rank in (None, error.rank), error.reason


@pytest.mark.many(6)
@pytest.mark.parametrize("name", [name for name in BUGS if name != "not a number"])
def test_without_the_check_nobody_notices(clusters, name):
    cluster = clusters(Plan.parse(BUGS[name].plan).ranks)
    cluster.run(seeded_bugs.plant, name)
    try:
        done = run(clusters, BUGS[name].plan, EASY)
        each = 1 if done.program.serving is not None else done.program.losses
        assert len(done.losses) == 2 * each
    finally:
        cluster.run(seeded_bugs.mend)


def test_a_run_after_a_failed_check_is_right(clusters):
    clusters(4).run(seeded_bugs.plant, "wrong group")
    with pytest.raises(CheckFailed):
        run(clusters, "dp=4 check=true", EASY)
    clusters(4).run(seeded_bugs.mend)
    run(clusters, "dp=4 check=true", EASY)


# facts ---------------------------------------------------------------------------------------------------------------


def first(*of_ranks: list[Fact]):
    return facts.first_broken(
        Plan.parse("dp=4").compile(layers=2), [facts.unpack(facts.pack(each)) for each in of_ranks]
    )


def fact(rule: str, *numbers: float, index: int = 1, ranks=(0, 1, 2), near: float = 1e-6) -> list[Fact]:
    return [Fact(rule, "it", index, ranks, numbers, near)]


@pytest.mark.parametrize(
    ("of_ranks", "rank", "why"),
    [
        ([fact(ALIKE, 7), fact(ALIKE, 8), fact(ALIKE, 7)], 1, "it is not the same on rank 1 as on rank 0"),
        ([fact(ALIKE, 7), fact(ALIKE, 7), []], 1, "it: rank 2 took no part in it"),
        ([fact(NEAR, 2.0, 1.0), fact(NEAR, 2.0, 1.0), fact(NEAR, 2.1, 1.0)], 2, "not the same on rank 2 as on rank 0"),
        ([fact(NEAR, 2.0, 1.0), fact(NEAR, float("nan"), 1.0), fact(NEAR, 2.0, 1.0)], 1, "not the same on rank 1"),
        ([fact(SUM, 1, 6, 1, 0, 1), fact(SUM, 2, 6, 1, 0, 1), fact(SUM, 3, 5, 1, 0, 1)], 2, "on rank 2 it is not what"),
        (
            [fact(SUM, 1, 2, 1, 0, 0), fact(SUM, 2, 2, 1, 0, 0), fact(SUM, 3, 3, 1, 0, 0)],
            2,
            "weighed sum 7 instead of 6",
        ),
        ([fact(ONE, 0.5), fact(ONE, 0.4), []], 1, "it add up to 0.9 instead of 1"),
    ],
)
def test_a_fact_that_does_not_hold(of_ranks, rank, why):
    found = first(*of_ranks)
    assert found is not None
    assert (found.rank, why in found.why) == (rank, True), found


def test_facts_that_hold_and_the_first_that_does_not():
    right = [fact(ALIKE, 7) + fact(SUM, 1, 3, 1, 0, 1), fact(ALIKE, 7) + fact(SUM, 1, 3, 1, 0, 1),
             fact(ALIKE, 7) + fact(SUM, 1, 3, 1, 0, 1)]  # fmt: skip
    assert first(*right) is None
    late, early = Fact(ONE, "late", 3, (), (0.5,)), Fact(ONE, "early", 0, (), (0.5,))
    found = first([late], [early])
    assert found is not None
    assert found.why.startswith("early")


def test_squares_of_short_numbers_are_not_rounded_to_them():
    """An exchange is judged by the squares of what it moved, before and after, on several ranks."""
    numbers = torch.full((100_000,), 1.0, dtype=torch.bfloat16)
    both = fact(SUM, checking._norm(numbers) ** 2, 100_000, 100_000, 0, 0, near=checking._tolerance(numbers.dtype))
    assert first(both, both, both) is None


@pytest.mark.parametrize("text", ["microbatches=3", "dp=2 microbatches=3"])
def test_a_micro_batch_without_targets_has_no_mean_to_be_checked(clusters, text):
    """Of classes that do not count torch's mean is no number, and the micro-batch's loss is 0."""
    x, y = rows(6)[0], torch.tensor([0, 0, 1, 0, 2, 1])
    loss = partial(torch.nn.functional.cross_entropy, weight=torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64))
    found = train(lambda: torch.nn.Sequential(torch.nn.Linear(x.shape[1], 3)), (x, y), f"{text} check=true",
                  cluster=clusters(Plan.parse(text).ranks), steps=2, progress=False, dtype=torch.float64, loss=loss,
                  check=True)  # fmt: skip
    assert found.max_gradient_error() < 1e-12


@pytest.mark.parametrize(
    ("counts", "mean", "right"), [(0, float("nan"), True), (2, float("nan"), False), (2, 1.5, True)]
)
def test_only_a_micro_batch_that_counts_needs_a_mean(counts, mean, right):
    """The loss of one that does not count is 0, whatever its mean is."""
    told: list[str] = []
    due, loss = Target(None, counts, 4), SimpleNamespace(every=None, means=1)
    one = SimpleNamespace(_due=due, _heard=SimpleNamespace(mean=mean), compute=SimpleNamespace(loss=loss), shares={})
    one._here = lambda ins, why: told.append(why)
    value = torch.tensor(0.75 if counts else 0.0)
    checking.CheckedExecutor._share(one, lambda *_: None, value, SimpleNamespace(step=0), range(2))
    assert not told if right else told == ["the loss is 0.75"]
