"""Operator parallelism: how the tensors of a layer lie on the ranks of a mesh, and what has to move where.

    from minipar import sharding
    captured = sharding.capture_model(models.build("gpt-tiny"), tokens)     # torch.export, a layer at a time
    print(captured.coverage)                                                # operators with and without a rule
    found = sharding.propagate_model(captured.layers, sharding.megatron(), Mesh(dp=2, tp=2), inputs="S0 on dp")
    found.forms(), found.collectives()                                      # of every tensor; of the whole model

forms         a form: one placement (R, I, P, S0, S1, ...) for each axis of the mesh, and the gradient's form
rules         what an operator can do on an axis, as einsum letters, one line an operator; `rule` adds one
checking      `check_rule`: whether a rule is right, on numbers, in one process                           (torch)
repartition   the cheapest way from one form to another, its gradient's way, and the matrix of all
graph         a layer as operators and tensors: what capture gives
propagation   from a few forms that are fixed by name to those of all tensors; presets
automatic     the forms of a model whose names no preset knows
capture       plain torch code to graphs, the coverage table                                              (torch)
local         an operator on one rank's part of its tensors, with the collectives that it asks for        (torch)
simulated     a sharded layer on all ranks, in one process                                                (torch)

For who runs a sharded layer: `ModelSharding.shardings[l]` has the operators of layer l in order, each with the forms
that it reads (`ins`) and writes (`outs`), its local shapes and its choice on each axis; `forms` of what is stored; and
`repartitions`, which say between which operators what moves, in steps (`Path.steps`) forward and backward. A value that
several operators read in the same other form moves once. `Captured.programs[l]` is the exported program, in which
`Operator.node` names the node; `local.run` runs an operator on a part, and yields each collective inside of it.
Randomness is the caller's: an operator that draws, such as dropout, draws on each rank's part. Modules marked (torch)
import it when they are first used; this package does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minipar.sharding.automatic import by_operators, default
from minipar.sharding.forms import Form, I, P, Placement, R, S, conjugate, local_shape
from minipar.sharding.graph import Graph, Layer, Operator, Slot, Tensor
from minipar.sharding.propagation import (
    Collective,
    ModelSharding,
    Preset,
    Repartition,
    Sharding,
    experts,
    megatron,
    propagate,
    propagate_model,
    sequence_parallel,
    two_dimensional,
)
from minipar.sharding.repartition import Matrix, Path, Step, backward, matrix, path
from minipar.sharding.rules import RULES, Choice, Inside, Rule, choices, rule

if TYPE_CHECKING:
    from minipar.sharding.capture import Captured, Coverage, capture_layer, capture_model, coverage
    from minipar.sharding.checking import check_rule
    from minipar.sharding.simulated import gradients, simulate_layer

__all__ = [
    "RULES", "Captured", "Choice", "Collective", "Coverage", "Form", "Graph", "I", "Inside", "Layer", "Matrix",
    "ModelSharding", "Operator", "P", "Path", "Placement", "Preset", "R", "Repartition", "Rule", "S", "Sharding",
    "Slot", "Step", "Tensor", "backward", "by_operators", "capture_layer", "capture_model", "check_rule", "choices",
    "conjugate", "coverage", "default", "experts", "gradients", "local_shape", "matrix", "megatron", "path",
    "propagate", "propagate_model", "rule", "sequence_parallel", "simulate_layer", "two_dimensional",
]  # fmt: skip

_LAZY = {
    "Captured": "capture", "Coverage": "capture", "capture_layer": "capture", "capture_model": "capture",
    "coverage": "capture", "check_rule": "checking", "gradients": "simulated", "simulate_layer": "simulated",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f"minipar.sharding.{_LAZY[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
