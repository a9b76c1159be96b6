"""Plain torch code as graphs; sharded, simulated in one process, and compared with the layer itself."""

from __future__ import annotations

import linecache
from collections import Counter
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch import nn

from minipar import Plan, PlanError, data, models, train
from minipar.execution.execution import Job
from minipar.models.parameter_groups import shape_of
from minipar.program.mesh import Mesh
from minipar.sharding import (
    capture,
    capture_layer,
    capture_model,
    cutting,
    megatron,
    propagate_model,
    propagation,
    rule,
    sequence_parallel,
    sharded,
    two_dimensional,
)
from minipar.sharding.cutting import CapturedNode
from minipar.sharding.rules import RULES
from minipar.sharding.sharded import local_model
from tests.sharding.running import check

pytestmark = pytest.mark.many(6)

TOKENS = torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(1))
NUMBERS = {"layers": 2, "width": 32, "heads": 4, "context": 16, "vocab": 64}
MESHES = [Mesh(tp=2), Mesh(tp=4), Mesh(dp=2, tp=2)]


def rows(mesh):
    return "S0 on dp" if "dp" in dict(mesh) else "I"


def counted(sharding, parameters=False):
    return Counter((c.op, c.phase) for c in sharding.collectives() if c.parameter == parameters)


MEGATRON = {("all_reduce", "forward"): 2, ("all_reduce", "backward"): 2}
SEQUENCE = {
    ("all_gather", "forward"): 2, ("reduce_scatter", "forward"): 2,
    ("reduce_scatter", "backward"): 2, ("all_gather", "backward"): 2,
}  # fmt: skip


@cache
def captured_gpt(fused):
    model = models.gpt(fused=fused, **NUMBERS).double()
    return model, capture_model(model, TOKENS)


@pytest.mark.many(2)
@pytest.mark.parametrize("fused", [True, False], ids=["sdpa", "explicit"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("preset", [megatron, sequence_parallel])
def test_gpt(fused, mesh, preset):
    model, captured = captured_gpt(fused)
    found = check(model, TOKENS, preset(), mesh, rows(mesh), captured=captured)
    block = found.shardings[1]
    assert str(block.forms["attention.qkv.weight"].on("tp")) == "S0:3"
    assert str(block.forms["mlp.2.weight"].on("tp")) == "S1"
    if "dp" not in dict(mesh):
        assert counted(block) == (MEGATRON if preset is megatron else SEQUENCE)
        norms = {} if preset is megatron else {("all_reduce", "backward"): 4}  # two weights, two biases
        assert counted(block, parameters=True) == norms


def test_places_of_megatrons_all_reduces():
    captured = capture_model(models.gpt(**NUMBERS), TOKENS)
    found = propagate_model(captured.layers, megatron(), Mesh(tp=2))
    places = [(c.phase, c.why) for c in found.shardings[1].collectives()]
    assert places == [
        ("forward", "attention.out -> add"), ("forward", "mlp.2 -> add_1"),
        ("backward", "norm1 -> attention.qkv"), ("backward", "norm2 -> mlp.0"),
    ]  # fmt: skip


def test_two_dimensions():
    found = check(models.gpt(**NUMBERS), TOKENS, two_dimensional(), Mesh(dp=2, tp=2), "S0 on dp")
    assert str(found.forms()["1.mlp.0.weight"]) == "S1 on dp, S0 on tp"
    weight = [(c.op, c.phase) for c in found.collectives() if c.value == "1.mlp.0.weight"]
    assert weight == [("all_gather", "forward"), ("reduce_scatter", "backward")]


def test_context_parallel():
    """Each rank has a part of every text, from the tokens to the logits."""
    found = check(models.gpt(**NUMBERS), TOKENS, {}, Mesh(cp=2), "S1 on cp")
    assert str(found.shardings[1].forms["linear_3"]) == "S1 on cp"
    forward = Counter(c.op for c in found.shardings[1].collectives() if c.phase == "forward")
    assert forward == {"all_gather": 2}


def test_tied_embeddings():
    found = check(models.gpt(tied=True, **NUMBERS), TOKENS, megatron(), Mesh(tp=2))
    assert str(found.forms()["0.token.weight"]) == "S0 on tp"
    assert "3.logits.weight" not in found.forms()


def test_the_loss_of_cut_logits():
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("targets", TOKENS)

        def forward(self, logits):
            return nn.functional.cross_entropy(logits, self.targets)

    model = nn.Sequential(*models.gpt(**NUMBERS), Loss())
    found = check(model, TOKENS, megatron(), Mesh(cp=2, tp=2), "S1 on cp")  # a part of the rows, and of the classes
    losses = found.shardings[-1].operators[-1]
    assert {axis: choice.name for axis, choice in losses.choices.items()} == {"cp": "rows", "tp": "vocabulary"}
    found = check(model, TOKENS, megatron(), Mesh(dp=2, tp=2), "I")
    inside = [c for c in found.shardings[-1].collectives() if c.axis == "tp"]
    assert [(c.op, c.phase, c.bytes) for c in inside] == [("all_reduce", "forward", 8 * 32)] * 3  # float64, 32 tokens


def test_layers_of_the_network_with_branches():
    network = models.branchy(blocks=1)
    stem = network[0](torch.randn(4, 64))
    assert [op.name for op in capture_layer(network[0], torch.randn(4, 64))[0].graph.operators] == [
        "view", "convolution", "relu",
    ]  # fmt: skip
    join, _ = capture_layer(network[7], (stem, stem))
    assert [op.op for op in join.graph.operators] == ["aten::cat"]
    pool, _ = capture_layer(network[6], stem)
    assert [op.name for op in pool.graph.operators] == ["0", "1", "2"]


# Coverage, names, and what is captured once ---------------------------------------------------------------------------


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return torch.flip(self.linear(x), [1])


def test_coverage():
    captured = capture_model(nn.Sequential(nn.Linear(8, 8), Odd()), torch.randn(4, 8))
    assert captured.coverage.missing == ("aten::flip",)
    assert str(captured.coverage).splitlines() == [
        "aten::flip       1  no rule: falls back to whole  layer 1, 1.flip",
        "aten::linear     2  rule                          layer 0, 0",
    ]
    rule("aten::flip", lambda operator, ins, outs: "bn!->bn!")
    try:
        assert captured.coverage.missing == ()
        check(nn.Sequential(Odd()), torch.randn(4, 8, dtype=torch.float64), {"linear|*.linear": "S0 on dp"}, Mesh(dp=2))
    finally:
        del RULES["aten::flip"]


def test_names():
    captured = capture_model(models.gpt(**NUMBERS), TOKENS)
    second = captured.layers[2]
    assert second.own("mlp.0.weight") == "2.mlp.0.weight"
    assert second.own("mlp.0") == "2.mlp.0"
    assert second.own("attention.view") == "2.attention.view"
    assert [second.own(op.name) for op in second.graph.operators][-1] == "2.add_1"


def test_code_without_gradients():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.scale = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))

        def forward(self, x):
            with torch.no_grad():
                size = (x * self.scale).abs().mean(-1, keepdim=True)
            return x * self.weight / size

    layer, _ = capture_layer(Scaled(), torch.randn(4, 8))
    assert {op.op: op.detached for op in layer.graph.operators} == {
        "aten::mul": False, "aten::abs": True, "aten::mean": True, "aten::div": False,
    }  # fmt: skip
    assert not layer.graph.tensors["mean"].differentiable
    given = torch.randn(4, 8, dtype=torch.float64)
    check(nn.Sequential(nn.Linear(8, 8), Scaled()), given, {"0": "S1 on tp"}, Mesh(tp=2))


def test_what_cannot_be_captured():
    class Branches(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    with pytest.raises(PlanError, match=r"Branches: torch.export cannot capture this layer"):
        capture_layer(Branches(), torch.randn(4))
    with pytest.raises(PlanError, match="nn.Sequential of layers"):
        capture_model(Branches(), torch.randn(4))


def test_equal_layers_are_captured_once():
    captured = capture_model(models.gpt(**{**NUMBERS, "layers": 6}), TOKENS)
    assert len({id(layer.graph) for layer in captured.layers}) == 3
    other = models.gpt(**NUMBERS)
    other[2].dropout1 = nn.Dropout(0.5)
    assert len({id(layer.graph) for layer in capture_model(other, TOKENS).layers}) == 4
    frozen = models.gpt(**NUMBERS)
    frozen[2].requires_grad_(False)
    assert len({id(layer.graph) for layer in capture_model(frozen, TOKENS).layers}) == 4


def calls_of(monkeypatch, layers):
    """How often a model of so many blocks is captured, propagated and cut into nodes, a layer at a time."""
    counts = Counter()
    for module, name in ((capture, "capture_layer"), (propagation, "_propagate"), (cutting, "pieces_of")):
        plain = getattr(module, name)

        def counting(*given, plain=plain, name=name, **options):
            counts[name] += 1
            return plain(*given, **options)

        monkeypatch.setattr(module, name, counting)
    found = local_model(models.gpt(**{**NUMBERS, "layers": layers}), 0, 2, TOKENS)
    monkeypatch.undo()
    return counts, found


def test_equal_layers_are_captured_propagated_and_cut_once(monkeypatch):
    """The embedding, a block and the logits; each is captured with two numbers of rows."""
    for layers in (1, 48):
        counts, found = calls_of(monkeypatch, layers)
        assert counts == {"capture_layer": 6, "_propagate": 3, "pieces_of": 3}
    assert len(found.nodes) == 50
    shape = shape_of(found)
    assert {ins.group for ins in Plan(tp=2).compile(shape).ranks[0] if ins.group} == {(0, 1)}


@pytest.mark.parametrize("name", ["gpt-tiny", "gpt-moe-tiny"])
def test_ranks_share_one_capture(monkeypatch, name):
    """Rank 0 captures for all; the nodes are those that each rank would make itself."""
    job = Job(partial(models.build, name), data.for_model(name), batch=4)
    own, sent = job.share(job.build(), 1, Mesh(tp=2), "", 1), replace(job, graphs=job.capture(2, 1)[0])
    monkeypatch.setattr(sharded, "capture_model", None)
    shared = sent.share(job.build(), 1, Mesh(tp=2), "", 1)
    assert (shared.forms, shared.titles, shared.cuts) == (own.forms, own.titles, own.cuts)
    assert [str(node.recipe) for node in shared if isinstance(node, CapturedNode)] == [
        str(node.recipe) for node in own if isinstance(node, CapturedNode)
    ]
    with pytest.raises(TypeError):  # of another number of ranks it knows nothing
        sent.share(job.build(), 0, Mesh(tp=4), "", 1)


def may_capture(allowed: bool) -> None:
    """In a rank: whether it may capture a model."""
    sharded.capture_model = capture_model if allowed else None  # type: ignore[assignment]


def test_rank_0_captures_for_all(clusters):
    ranks = clusters(2)
    ranks.run_on([1], may_capture, False)
    try:
        run = train(
            partial(models.gpt, **NUMBERS), (TOKENS, TOKENS), "tp=2 schedule=terapipe slices=2", cluster=ranks, steps=2,
            dtype=torch.float64, check=True, progress=False,
        )  # fmt: skip
        assert run.max_error() < 1e-12
    finally:
        ranks.run_on([1], may_capture, True)


def test_a_process_that_captures_again_and_again_does_not_grow():
    """torch keeps the source of each graph for tracebacks."""
    layer, x = nn.Linear(2, 2), torch.ones(3, 2)
    capture_layer(layer, x)
    before = len(linecache.cache), len(torch.fx.graph_module._loader.eval_cache)
    capture_layer(layer, x)
    assert (len(linecache.cache), len(torch.fx.graph_module._loader.eval_cache)) == before
