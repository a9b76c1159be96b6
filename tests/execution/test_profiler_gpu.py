"""The profile of a model on a GPU, of which a plan leaves something to the host."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from minipar import profile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]


def test_what_the_host_computes_is_timed_there():
    """(Each of these layers takes the GPU well below a millisecond, and one core of the host many of them.)"""
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4))).cuda()
    x, y = torch.randn(512, 2048), torch.randn(512, 2048)
    for host in (1, 3):
        found = profile(
            model, (x, y), nn.functional.mse_loss, optimizer=partial(torch.optim.Adam, lr=1e-3), on_host={host},
            host_steps=True,
        )  # fmt: skip
        for table in (found.forward, found.backward):
            slowest, *others = sorted(table[512], reverse=True)
            assert table[512][host] == slowest > 5 * max(others)
        assert found.host_step_seconds > 5 * found.step_seconds > 0
    assert all(p.is_cuda for p in model.parameters())
    assert profile(model, (x, y), nn.functional.mse_loss).host_step_seconds == 0
