"""Offload on a GPU: pinned memory, copies at the same time as computation, bytes that return to the allocator."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch

from minipar import Cluster, Plan, train
from minipar.execution.memory.stores import HostStore
from tests.execution.test_offloading import ALL, blocks, mse, pairs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]


@pytest.mark.parametrize(
    "text", ["offload=activations", "offload=optimizer", "offload=parameters", ALL, "host_layers=0"]
)
def test_the_same_losses(text):
    with Cluster(1, device="cuda") as cluster:
        runs = [
            train(blocks, pairs(), Plan.parse(words), cluster=cluster, steps=3, loss=mse, progress=False,
                  optimizer=partial(torch.optim.AdamW, lr=1e-3), memory=True)
            for words in ("microbatches=1", text)
        ]  # fmt: skip
    assert runs[1].losses == pytest.approx(runs[0].losses, rel=1e-5)
    assert runs[1].peak_memory[0] < runs[0].peak_memory[0]


def test_copies_are_pinned_and_as_fast_as_the_link_allows():
    store, tensor = HostStore(), torch.randn(64 << 20, device="cuda")
    store.put("x", tensor).result()
    assert store._kept["x"].is_pinned()
    start = time.perf_counter()
    store.put("x", tensor).result()
    seconds = time.perf_counter() - start
    back = torch.empty_like(tensor)
    store.fetch("x", back).result()
    assert torch.equal(back, tensor)
    assert tensor.numel() * 4 / seconds > 1e9
    store.close()
