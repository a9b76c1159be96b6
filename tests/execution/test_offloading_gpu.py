"""Offload on a GPU: pinned memory, copies at the same time as computation, bytes that return to the allocator."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from minipar import Cluster, Plan, train
from minipar.execution.memory.stores import host_store
from minipar.execution.streams import streams_of
from tests.execution.test_offloading import ALL, blocks, mse, pairs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]


@pytest.mark.parametrize(
    "text", ["offload=activations", "offload=optimizer", "offload=parameters", ALL, f"{ALL} offload_to=disk",
             "host_layers=0"]
)  # fmt: skip
def test_the_same_losses(text):
    # (activations count where the peak is not in the update, whose temporary values are as many as the parameters)
    adam, sgd = partial(torch.optim.AdamW, lr=1e-3), partial(torch.optim.SGD, lr=0.1, foreach=False)
    activations = text == "offload=activations"
    with Cluster(1, device="cuda") as cluster:
        runs = [
            train(blocks, pairs(2048 if activations else 32), Plan.parse(words), cluster=cluster, steps=3, loss=mse,
                  progress=False, optimizer=sgd if activations else adam, memory=True)
            for words in ("microbatches=1", text)
        ]  # fmt: skip
    assert runs[1].losses == pytest.approx(runs[0].losses, rel=1e-5)
    assert runs[1].peak_memory[0] < runs[0].peak_memory[0]


def test_buffers_of_a_step_are_used_again():
    streams = streams_of(torch.device("cuda", torch.cuda.current_device()))
    store, tensor = host_store(streams), torch.randn(1 << 20, device="cuda")
    store.put("x", tensor).result()
    kept = store._kept["x"]
    assert kept.is_pinned()
    store.fetch("x", into := torch.empty_like(tensor)).result()
    assert torch.equal(into, tensor)
    store.drop("x")
    store.put("y", tensor).result()
    assert store._kept["y"].data_ptr() == kept.data_ptr()
    store.close()
