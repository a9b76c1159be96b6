"""The gradient contract on real GPUs: NCCL where every rank has its own, gloo through host memory where they share."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from minipar import Cluster, Plan
from tests.comparing import check
from tests.toys import rows, toy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]


@pytest.mark.parametrize("text", ["pp=2 microbatches=4", "dp=2 microbatches=2", "pp=2 dp=2 microbatches=4"])
def test_gradients_on_gpus(text):
    plan = Plan.parse(text)
    with Cluster(plan.ranks, device="cuda") as cluster:
        check(lambda ranks: cluster, plan, partial(toy, ("linear", "tuples", "dropout"), tied=True), rows(12))
