"""Each kind of message over gloo alone, as ranks on several machines send it: equal to plain torch.

The oracle is that of the random campaign (tests/fuzz): plain torch without any code of the engine. An asynchronous plan
is compared with a replay of the order in which its ranks worked. Neither rows nor layers divide evenly.

Over gloo a receive is posted with its size before the message is there. So three things differ from the ranks of one
machine, and each has a test below: the output of a layer has one form for each number of rows, a gradient that is None
arrives as zeros, and ranks cannot look for messages, as those of AMPNet do: it is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial

import cloudpickle
import pytest
import torch
from torch import nn

from minipar import Cluster, Plan, data, execute, models, train
from minipar.comm import communicator
from minipar.errors import PlanError, RankError
from minipar.execution.execution import Job
from minipar.models.parameter_groups import shape_of
from tests.execution.test_execution import growing
from tests.fuzz.campaign import Pair, Ranks, judge
from tests.fuzz.models import Entry, Spec, build, data_of, mse
from tests.toys import rows

pytestmark = pytest.mark.many(3)

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def chain(rows: int, shape: tuple[int, ...], *kinds: str, given: str = "steps") -> Spec:
    return Spec(rows, tuple(Entry(kind, k, shape) for k, kind in enumerate(kinds)), rows, "mse", given)


CHAIN = chain(17, (4,), "linear", "fork-skip", "join", "dropout", "unused", "linear-relu-inplace", "slow-twice",
              "tied-inside", "linear")  # fmt: skip
TOKENS = chain(7, (6, 4), "running", "each", "looking", "each", "running")
DETACHED = chain(7, (4,), "linear", "detach", "linear", given="pair")
BRANCHES = {0: (), 1: (0,), 2: (0,), 3: (1, 2), 4: (3,)}
DIAMOND = Spec(4, tuple(Entry("linear", k, (4,), sources=of) for k, of in BRANCHES.items()), 9, "mse")

OF_CHAINS = [  # one for each kind of message
    "dp=4 bucket=flat overlap=none algorithm=ring microbatches=2",
    "dp=4 bucket=0.0001 overlap=priority microbatches=3",
    "dp=4 zero=2 bucket=0.0001 microbatches=3 reduce=step",
    "dp=2 pp=2 zero=3 microbatches=3",
    "dp=4 local_steps=2 microbatches=2",
    "pp=4 schedule=1f1b microbatches=8 checkpoint=sqrt",
    "pp=2 schedule=interleaved chunks=2 microbatches=5 group=3 split=1,3,3,2",
    "pp=2 dp=2 schedule=chimera microbatches=2 bucket=0.0001 clip=0.1",
    "pp=2 dp=2 schedule=dualpipe-v microbatches=4 zero=1",
    "pp=4 schedule=pipedream microbatches=5 split=2,4,2,1",
    "pp=4 inference=true microbatches=3",
    "dp=3 sync=ps mode=ssp:1 servers=1 on_death=continue",
]
NOT_EXACT = ["dp=4 compress=bf16", "dp=2 compress=topk:0.5", "dp=2 pp=2 compress=powersgd:1", "pp=2 precision=bf16"]
CASES = [
    *((text, CHAIN) for text in (*OF_CHAINS, *NOT_EXACT)),
    ("dp=2 pp=2 schedule=terapipe slices=2 microbatches=2 zero=1", TOKENS),
    ("pp=2 place=0,0,1,1,0 schedule=looped-bfs microbatches=3", DIAMOND),
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    made, before = Ranks("gloo"), torch.get_num_threads()
    assert made(2).transport == made(4).transport == "gloo"
    torch.set_num_threads(1)
    yield made
    torch.set_num_threads(before)
    made.close()


def pair(text: str, spec: Spec = CHAIN, steps: int = 2) -> Pair:
    words = dict(word.split("=", 1) for word in text.split())
    return Pair(0, spec, tuple(words.items()), steps, lr=0.3, momentum=0.0)


@pytest.mark.many(4)
@pytest.mark.parametrize(("text", "spec"), CASES, ids=[text for text, _ in CASES])
def test_every_kind_of_message_equals_plain_torch(ranks, text, spec):
    found = judge(pair(text, spec), ranks)
    assert found.kind == ("ran" if text in NOT_EXACT else "equal"), found.text


SHARED = [
    ("gpt-tiny", "tp=2 pp=2 sequence_parallel=true microbatches=2"),
    ("gpt-tiny", "context_parallel=2"),
    ("gpt-moe-tiny", "ep=2 microbatches=2"),
]


@pytest.mark.many(3)
@pytest.mark.usefixtures("captured_for_all_tests")
@pytest.mark.parametrize(("name", "text"), SHARED)
def test_ranks_that_share_layers(ranks, name, text):
    """Sums, gathers, scatters and exchanges of activations over gloo give plain torch's gradients."""
    plan = Plan.parse(text)
    model, loss = partial(models.build, name, layers=2), models.loss_of(name)
    found = train(
        model, data.for_model(name), plan, cluster=ranks(plan.ranks), steps=2, batch=4, loss=loss, check=True,
        dtype=torch.float64, progress=False,
    )  # fmt: skip
    assert found.max_error() < 1e-12


def test_a_form_that_changes_is_refused():
    program = Plan.parse("pp=2 microbatches=2 split=1,2").compile(shape_of(list(growing())))
    with Cluster(2, device="cpu", transport="gloo") as two:
        job = Job(growing, rows(12), loss=nn.functional.mse_loss, dtype=torch.float64)
        with pytest.raises(RankError, match="another form than before"):
            execute(program, job, cluster=two)
        assert two.run(lambda: communicator.create().allreduce(1)) == [2, 2]


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_a_gradient_that_is_none_arrives_as_zeros(ranks, decay):
    """Plain SGD does the same with both. Weight decay does not: it leaves alone a parameter without a gradient."""
    job = Job(partial(build, DETACHED), data_of(DETACHED), 7, mse, partial(torch.optim.SGD, lr=0.3, weight_decay=decay))
    program = Plan.parse("pp=2 split=1,2").compile(shape_of(list(job.build())))
    found = execute(program, job, cluster=ranks(2), passes=3, check=False).losses
    for zeros in (False, True):
        model = build(DETACHED).float()
        optimizer, losses = job.optimizer(model.parameters()), []
        for _ in range(3):
            value = mse(model(job.data[0].float()), job.data[1].float())
            value.backward()
            if zeros:
                for p in model[0].parameters():
                    p.grad = torch.zeros_like(p)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(value.item())
        assert (found == pytest.approx(losses, rel=1e-5)) == (zeros or not decay)


def unused() -> nn.Module:
    raise AssertionError("a model was made of a plan that is refused")


def test_ranks_that_decide_as_they_run_are_refused_before_anything_runs(ranks):
    plan, over = Plan.parse("pp=2 schedule=ampnet microbatches=3"), ranks(2)
    refusal = r"schedule=ampnet.*transport='gloo'.*Cluster\(2, transport='local'\)"
    with pytest.raises(PlanError, match=refusal):
        train(unused, rows(12), plan, cluster=over, progress=False)
    with pytest.raises(PlanError, match=refusal):
        execute(plan.compile(layers=4), Job(unused, rows(12)), cluster=over)
