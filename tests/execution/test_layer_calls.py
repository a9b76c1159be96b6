"""A rank's layers get the additions that its program needs, and no others."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

from minipar import Plan
from minipar.execution.compute import Compute
from minipar.models import randomness
from minipar.models.parameter_groups import shape_of
from minipar.program import Program


def around(run: Any) -> list[str]:
    """The names of the functions around a module, from the outermost one inwards."""
    inner = inspect.getclosurevars(run).nonlocals.get("run")
    return [run.__name__, *around(inner)] if inner is not None else []


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)),
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
        nn.Linear(4, 4),
        nn.Linear(4, 3),
    ]


def compiled(text: str) -> Program:
    return Plan.parse(text).compile(shape_of(layers()))


@pytest.mark.parametrize(
    ("text", "added"),
    [
        ("dp=1", [["call_by_row"], [], [], []]),
        (
            "checkpoint=1",
            [["call_by_row", "call_shortened"], ["call_remembering", "call_shortened"], ["call_shortened"], []],
        ),
        ("offload=activations microbatches=2", [["call_by_row", "call_keeping"], ["call_keeping"], [], []]),
    ],
)
def test_a_layer_gets_what_its_program_needs(text: str, added: list[list[str]]) -> None:
    program, model = compiled(text), nn.Sequential(*layers())
    randomness.replace_dropout(model, 0)
    compute = Compute(program, 0, torch.device("cpu"), list(model), nn.functional.mse_loss)
    compute.follow(program)
    for layer, names in enumerate(added):
        measuring = [] if "call_keeping" in names else ["call_weighed"]
        loss = ["call_with_loss"] if layer == 3 else []
        assert around(compute.calls[layer]) == ["call_seeded", *names, *measuring, *loss]
