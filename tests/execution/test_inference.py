"""Forward only: the loss is plain torch's, nothing is kept, and memory does not grow with depth."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from minipar import Plan
from minipar.errors import PlanError
from minipar.execution.execution import Job, execute
from minipar.models.parameter_groups import shape_of
from minipar.program import Op

mse = nn.functional.mse_loss


def chain(depth: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(depth)))


def job(depth: int) -> Job:
    torch.manual_seed(1)
    return Job(chain(depth), (torch.randn(12, 32), torch.randn(12, 32)), loss=mse, dtype=torch.float64)


@pytest.mark.parametrize("text", ["dp=2", "pp=2 schedule=gpipe microbatches=3"])
def test_the_loss_is_plain_torch_s(clusters, text):
    plan = Plan.parse(text + " inference=true")
    program = plan.compile(shape_of(chain(8)))
    assert {ins.op for row in program.ranks for ins in row} <= {Op.FORWARD, Op.SEND, Op.RECV}
    done = execute(program, job(8), cluster=clusters(plan.ranks), passes=2)
    x, y = job(8).data
    with torch.no_grad():
        expected = mse(chain(8).double()(x.double()), y.double()).item()
    assert done.losses == pytest.approx([expected, expected], rel=1e-12)
    assert done.gradients == [{}, {}]


@pytest.mark.parametrize("text", ["", "pp=2 schedule=gpipe microbatches=2"])
def test_activations_do_not_grow_with_depth(clusters, text):
    peaks = []
    for depth in (4, 16):
        plan = Plan.parse(text + " inference=true")
        program = plan.compile(shape_of(chain(depth)))
        trace = execute(program, job(depth), cluster=clusters(plan.ranks)).trace
        peaks.append([trace.peak_by_kind(rank)["activations"] for rank in range(plan.ranks)])
        if not text:
            assert peaks[-1] <= [2 * 12 * 32 * 8]  # two buffers, in turn
    assert peaks[0] == peaks[1]


def test_what_is_neither_true_nor_false_is_refused() -> None:
    with pytest.raises(PlanError, match="inference=maybe: must be true or false"):
        Plan.parse("inference=maybe")
