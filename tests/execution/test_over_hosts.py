"""Strategies on two hosts, kept apart on this machine: between them are TCP and gloo, within them shared memory.

The losses and gradients are those of ranks that all go through gloo, bit for bit, where sums cross the hosts; and those
of plain torch within the contract.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import cloudpickle
import pytest
import torch
from torch import nn

from minipar import Mesh, Plan, execute
from minipar.cluster import Cluster
from minipar.comm import communicator
from minipar.execution.execution import Execution, Job, _warn_of_hosts
from minipar.execution.saving.folder import open_folder
from minipar.execution.saving.keeping import Storing
from minipar.models.parameter_groups import shape_of
from tests.execution.test_over_gloo import pair
from tests.fuzz.campaign import Ranks, judge
from tests.toys import rows, toy

pytestmark = pytest.mark.many(2)

cloudpickle.register_pickle_by_value(sys.modules[__name__])

MODEL = partial(toy, ("linear", "tuples", "linear", "linear", "in-place", "linear", "unused", "linear"), tied=True)
SGD, ADAM = partial(torch.optim.SGD, lr=0.3), partial(torch.optim.AdamW, lr=0.01)

PLANS = [
    "dp=4 bucket=0.0001 microbatches=2",
    "dp=4 zero=3 prefetch=2 microbatches=2",
    "pp=4 schedule=interleaved microbatches=4",
]


@pytest.fixture(scope="module")
def apart() -> Iterator[Ranks]:
    """Clusters whose first two ranks are on one host, and the others on another one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINIPAR_HOST", "left,left,right,right")
        made = Ranks()
        yield made
        made.close()


@pytest.fixture(scope="module")
def by_gloo() -> Iterator[Cluster]:
    with Cluster(4, device="cpu", transport="gloo") as four:
        yield four


def job(optimizer: partial[torch.optim.Optimizer] = SGD) -> Job:
    return Job(MODEL, rows(17), 32, nn.functional.mse_loss, optimizer, seed=3, dtype=torch.float64)


def run(cluster: Cluster, text: str, steps: int, work: Job, storing: Storing | None = None) -> Execution:
    program = Plan.parse(text).compile(shape_of(list(work.build())))
    more = {} if storing is None else {"storing": storing}
    return execute(program, work, cluster=cluster, passes=steps, **more)


def plain(work: Job) -> dict[str, torch.Tensor]:
    """The gradients of the first step, by plain torch."""
    model, (x, y) = work.build(), work.batches(0)
    nn.functional.mse_loss(model(x), y).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("text", PLANS)
def test_losses_and_gradients(apart: Ranks, by_gloo: Cluster, text: str) -> None:
    found, same = (run(cluster, text, 2, job()) for cluster in (apart(4), by_gloo))
    assert found.losses == same.losses
    for mine, other in zip(found.gradients, same.gradients, strict=True):
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[name], other[name]) for name in mine)
    expected = plain(job())
    size = max(float(g.abs().max()) for g in expected.values())
    assert max(float((found.gradients[0][name] - g).abs().max()) for name, g in expected.items()) <= 1e-12 * size
    assert 0 < found.trace.clock_error < 0.05
    assert same.trace.clock_error == 0


@pytest.mark.parametrize(
    "text",
    [
        "dp=3 sync=ps mode=async on_death=continue",
        "pp=4 schedule=ampnet microbatches=3",  # its ranks look for messages, those of the other host included
    ],
)
def test_orders_that_are_replayed(apart: Ranks, text: str) -> None:
    found = judge(pair(text), apart)
    assert found.kind == "equal", found.text


def test_a_run_is_saved_and_goes_on(apart: Ranks, tmp_path) -> None:
    whole = run(apart(4), "dp=2 pp=2 zero=3 microbatches=2", 4, job(ADAM)).losses
    first = run(
        apart(4), "dp=2 pp=2 zero=3 microbatches=2", 2, job(ADAM), Storing(folder=str(tmp_path), token="0123abcd")
    )
    rest = run(apart(4), "dp=2 pp=2 zero=3 microbatches=2", 2, job(ADAM), Storing(saved=open_folder(tmp_path)))
    assert first.losses + rest.losses == whole
    assert run(apart(4), "pp=4", 2, job(ADAM), Storing(saved=open_folder(tmp_path))).losses == pytest.approx(
        whole[2:], rel=1e-9
    )


@pytest.mark.parametrize(("hosts", "warns"), [("aabb", False), ("abab", True), ("aaaa", False)])
def test_who_shares_layers_across_hosts_is_told(recwarn: pytest.WarningsRecorder, hosts: str, warns: bool) -> None:
    _warn_of_hosts(replace(Plan.parse("dp=4").compile(layers=2), mesh=Mesh(dp=2, tp=2)), tuple(hosts))
    assert [str(one.message)[:5] for one in recwarn] == ["tp=2:"] * warns


def test_they_really_are_apart(apart: Ranks, by_gloo: Cluster) -> None:
    assert apart(4).run(lambda: communicator.create().hosts) == [("left", "left", "right", "right")] * 4
    assert by_gloo.run(lambda: communicator.create().hosts) == [("",) * 4] * 4
