"""Layers that ranks share, on real ranks: bytes and memory are as predicted, and nodes make what they should."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from minipar import Cluster, Plan, models, train
from minipar.execution.execution import Job
from minipar.models.tensors import tensors
from minipar.program import Mesh, Op
from minipar.sharding import capture_layer
from tests.sharding import by_hand

mse = nn.functional.mse_loss
ROWS = 13  # which no number of micro-batches or replicas divides
Model = Callable[[], nn.Sequential]
MODELS: dict[str, Model] = {"megatron": by_hand.model, "sequence": by_hand.sequence_model}


def batch(model: Model, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = () if model is by_hand.model else (4,)
    x, y = (torch.randn(rows, *tokens, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y


@pytest.mark.ranks
def test_new_ranks_have_torch_export_where_the_driver_has_it() -> None:
    capture_layer(nn.Linear(2, 2), torch.ones(3, 2))
    with Cluster(1, device="cpu") as cluster:
        assert cluster.run(lambda: "torch.export._trace" in sys.modules) == [True]


# bytes and memory -----------------------------------------------------------------------------------------------------


def trained(clusters, model: Model, text: str, **more):
    cluster = clusters(Plan.parse(text).ranks)
    return train(
        model, batch(model, 16), text, loss=mse, dtype=torch.float64, cluster=cluster, progress=False,
        **{"steps": 2, "check": True, **more},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("model", "text"),
    [("megatron", "tp=2 microbatches=2"), ("sequence", "tp=2 dp=2 zero=1"), ("megatron", "tp=2 pp=2 checkpoint=1")],
)
def test_bytes_and_memory_are_as_predicted(clusters, model: str, text: str) -> None:
    found = trained(clusters, MODELS[model], text)
    assert found.max_error() < 1e-12
    assert found.bytes_sent == found.predicted.bytes_sent()
    assert found.trace.peak_memory() == found.predicted.peak_memory()


def test_a_gradient_may_cross_a_link_in_another_form_than_its_output(clusters) -> None:
    """Each rank sends its shard of a partial sum to the next stage, and gets the whole gradient back."""
    found = trained(clusters, by_hand.partial_model, "tp=2 pp=2 split=2,2 microbatches=2")
    sent = [[ins.reads[0].form for ins in found.program.ranks[rank] if ins.op is Op.SEND] for rank in (0, 2)]
    assert sent == [["S1"] * 2, [""] * 2]
    assert found.max_error() < 1e-12
    assert found.bytes_sent == found.predicted.bytes_sent()
    assert found.trace.peak_memory() == found.predicted.peak_memory()


# saving ---------------------------------------------------------------------------------------------------------------


class _Made(TorchDispatchMode):
    """Where tensors are made."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.devices |= {t.device.type for t in tensors(made)}
        return made


def test_nodes_make_their_tensors_where_their_input_is() -> None:
    """The layers were captured on the host, and their code names a device where it makes positions and a mask. (The
    device here, "meta", has shapes and no values; a GPU refuses a tensor of the host.)"""
    model = partial(models.gpt, layers=1, width=8, heads=2, context=8, vocab=16, fused=False)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    job = Job(model, (tokens, tokens), 2, nn.functional.cross_entropy)
    nodes = job.share(job.build(), 0, Mesh(tp=2), "", 1).to("meta")
    with _Made() as made:
        value = tokens.to("meta")
        for node in list(nodes)[:3]:
            value = node(value)
    assert made.devices == {"meta"}
