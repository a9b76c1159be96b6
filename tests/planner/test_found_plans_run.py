"""What a search found runs: on two ranks, with the gradients of plain torch."""

import torch
from torch import nn

from minipar import models, sharding, train
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
