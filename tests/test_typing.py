"""What editors and type checkers know of the package."""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
import zipfile
from dataclasses import fields
from pathlib import Path

import minipar
from minipar import Plan

ROOT = Path(__file__).parent.parent

SCRIPT = """
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import minipar
from minipar import Cluster, Plan, Run, StepInfo, evaluate, models, named, resume, simulate, train


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def optimizer(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.1)


def right(output: Tensor, y: Tensor) -> tuple[Tensor, int]:
    return (output.argmax(1) == y).sum(), len(y)


def show(info: StepInfo) -> None:
    print(info.step, info.loss, info.learning_rate, info.gradient_norm)


data = torch.randn(8, 4), torch.randint(2, (8,))
plan = Plan(pp=2, microbatches=2, zero=1, checkpoint="sqrt", split=(2, 1), bucket=None, offload="optimizer")
with Cluster(plan.ranks) as cluster:
    run = train(model, data, plan, cluster=cluster, steps=3, optimizer=optimizer, callback=show, on_nan="warn",
                scheduler=partial(CosineAnnealingLR, T_max=3), loss=nn.functional.cross_entropy)
    train(model(), data, "pp=2", optimizer=partial(torch.optim.AdamW, lr=1e-3), scheduler=None)
    train(partial(models.gpt, layers=2), data, "", optimizer=named(partial(torch.optim.AdamW, lr=1e-3)))
    found = evaluate(model, data, plan, state=run, metrics={"right": right})
    resume("folder", model, data).save("other")
trace = simulate(plan.compile(layers=3), forward=1.0)
reveal_type(run)
reveal_type(found.loss)
reveal_type(trace.time)
reveal_type(minipar.Program)
Plan(pp="two")
Plan(zero=1, ppp=2)
train(model, data, plan, scheduler=0.1)
Run.nothing
"""


def test_a_user_s_script_is_checked(tmp_path):
    """Right lines pass, wrong ones are found, and nothing is Any."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    told = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", str(script)],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, "MYPYPATH": str(ROOT)},
    ).stdout  # fmt: skip
    lines = SCRIPT.splitlines()
    wrong = [k + 1 for k, line in enumerate(lines) if line.startswith(("Plan(", "train(", "Run.nothing"))]
    found = {int(line.split(":")[1]) for line in told.splitlines() if "script.py" in line and ": error:" in line}
    assert found == set(wrong), told
    for known in ('"minipar.training.training.Run"', '"float"', '"float"', "minipar.program.Program"):
        assert f"Revealed type is {known}" in told or known in told, told
    assert 'Revealed type is "Any"' not in told


def test_what_type_checkers_read_is_what_there_is():
    tree = ast.parse((ROOT / "minipar" / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    said = {name.asname: node.module for node in block.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert sorted(said) == sorted(minipar.__all__)
    for name, home in minipar._home_of.items():
        assert said[name] == (home if name != "communicator" else "minipar.comm"), name


def test_the_signature_of_a_plan_is_its_keys():
    signature = inspect.signature(Plan)
    assert list(signature.parameters) == [field.name for field in fields(Plan)]
    assert {name: p.default for name, p in signature.parameters.items()} == {f.name: f.default for f in fields(Plan)}
    assert signature.parameters["split"].annotation == "tuple[int, ...] | str | None"
    described = inspect.getdoc(Plan)
    missing = [f.name for f in fields(Plan) if f"\n{f.name} " not in described and f.name not in ("pp", "dp")]
    assert not missing, f"help(Plan) says nothing of {missing}"


def test_the_wheel_says_that_it_is_typed(tmp_path):
    from hatchling.builders.wheel import WheelBuilder

    (path,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    assert "minipar/py.typed" in zipfile.ZipFile(path).namelist()
