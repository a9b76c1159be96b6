"""What a search found runs: on two and four ranks, with the gradients of plain torch."""

import pytest
import torch
from torch import nn

from minipar import models, sharding, train
from minipar.models.counting import chain_of
from minipar.planner.exhaustive import search
from minipar.planner.forms_found import operator_problem
from minipar.planner.intra import ilp
from minipar.planner.operator_graph import Machine
from minipar.program.mesh import Mesh


def model():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))


def test_the_forms_of_the_linear_program_are_trained(clusters):
    captured = sharding.capture_model(model(), torch.zeros(12, 8))
    machine = Machine(1e9, 1e9, {"tp": (1e-6, 1e-10)})
    problem = operator_problem(captured.layers, Mesh(tp=2), machine, gathered=False, outputs="R")
    found = ilp(problem.graph)
    assert found.time < problem.propagated().time
    said = problem.annotations(found)
    assert len(set(said.values())) > 2, "forms of several kinds"
    torch.manual_seed(0)
    x, y = torch.randn(12, 8), torch.randn(12, 4)
    run = train(
        model, (x, y), "tp=2", steps=2, batch=12, loss=nn.functional.mse_loss, dtype=torch.float64, check=True,
        annotations=said, progress=False, cluster=clusters(2),
    )  # fmt: skip
    assert run.max_gradient_error() < 1e-12
    assert run.predicted.time > 0 < run.trace.time, "predicted beside measured"


def test_a_plan_of_the_search_is_trained(clusters):
    found = search("mlp-tiny", "laptop", 1, 2, 8, runs=True, most=3, pins="pp=2 micro_batch_size=2 zero=0")
    plan = found.plan.plan
    assert plan.ranks == 2
    x = torch.randn(8, 32)
    with torch.no_grad():
        y = torch.randn_like(models.build("mlp-tiny")(x))
    run = train(
        lambda: models.build("mlp-tiny"), (x, y), plan, steps=1, batch=8, loss=nn.functional.mse_loss,
        dtype=torch.float64, check=True, progress=False, cluster=clusters(2),
    )  # fmt: skip
    assert run.max_gradient_error() < 1e-12


class Block(nn.Module):
    def __init__(self, width, frozen=False):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width)
        if frozen:
            self.wide.requires_grad_(False)
            self.norm.bias.requires_grad_(False)

    def forward(self, x):
        return x + self.narrow(torch.tanh(self.wide(self.norm(x))))


def own():
    """Five layers, which neither 2 nor 4 stages divide evenly: tied ends, and a block that is partly frozen."""
    embed, head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
    head.weight = embed.weight
    return nn.Sequential(embed, Block(8), Block(8, frozen=True), Block(8), head)


def of_tokens(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def trained(plan, cluster, annotations=None):
    """The gradient's error of a model of one's own, by a plan that was found."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randint(0, 20, (12, 6), generator=generator) for _ in range(2))
    run = train(
        own, (x, y), plan, steps=2, batch=12, loss=of_tokens, dtype=torch.float64, check=True, progress=False,
        annotations=annotations, cluster=cluster,
    )  # fmt: skip
    assert run.predicted.time > 0 < run.trace.time, "predicted beside measured"
    return run.max_gradient_error()


@pytest.mark.many(2)
@pytest.mark.parametrize(
    ("ranks", "pins", "keys"),
    [
        (2, "", {}),
        (2, "zero=3 checkpoint=1", {"zero": 3, "dp": 2}),
        (4, "", {}),
        (4, "pp=4", {"pp": 4}),
        (4, "pp=2 schedule=1f1b zero=2", {"pp": 2, "dp": 2, "zero": 2}),
    ],
)
def test_the_best_plan_for_a_model_of_ones_own_is_trained(ranks, pins, keys, clusters):
    example = torch.zeros(1, 6, dtype=torch.long)
    found = search(chain_of(own(), example), "laptop", 1, ranks, 12, runs=True, most=3, pins=pins)
    plan = found.plan.plan
    assert plan.ranks == ranks
    assert {key: getattr(plan, key) for key in keys} == keys
    assert trained(plan, clusters(ranks)) < 1e-12


@pytest.mark.parametrize(("ranks", "plan"), [(2, "tp=2"), (4, "tp=2 pp=2 split=3,2 zero=1"), (4, "tp=2 dp=2 zero=1")])
def test_the_forms_for_a_model_of_ones_own_are_trained(ranks, plan, clusters):
    captured = sharding.capture_model(own(), torch.zeros(12, 6, dtype=torch.long))
    machine = Machine(1e9, 1e9, {"tp": (1e-6, 1e-10)})
    problem = operator_problem(captured.layers, Mesh(tp=2), machine, gathered=False, outputs="R")
    found = ilp(problem.graph)
    assert found.time < problem.propagated().time
    said = problem.annotations(found)
    assert {"P on tp", "S0 on tp", "S1 on tp"} <= set(said.values())
    assert trained(plan, clusters(ranks), said) < 1e-12
