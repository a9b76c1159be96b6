"""minipar: every strategy for training in parallel as one program that is verified, simulated, executed and drawn.

Names load on first use, so that a plan, a simulation and a widget never import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # type checkers and editors read this; a test checks that it equals the tables below
    from minipar import cluster as cluster
    from minipar import comm as comm
    from minipar import costs as costs
    from minipar import data as data
    from minipar import errors as errors
    from minipar import execution as execution
    from minipar import models as models
    from minipar import planner as planner
    from minipar import prediction as prediction
    from minipar import program as program
    from minipar import server as server
    from minipar import strategies as strategies
    from minipar import trace as trace
    from minipar import training as training
    from minipar.cluster import Cluster as Cluster
    from minipar.cluster.launched import Launched as Launched
    from minipar.comm import communicator as communicator
    from minipar.costs.device import DeviceSpec as DeviceSpec
    from minipar.errors import CheckError as CheckError
    from minipar.errors import CollectiveMismatch as CollectiveMismatch
    from minipar.errors import Deadlock as Deadlock
    from minipar.errors import DeviceOutOfMemory as DeviceOutOfMemory
    from minipar.errors import MiniparError as MiniparError
    from minipar.errors import NotFinite as NotFinite
    from minipar.errors import PlanError as PlanError
    from minipar.errors import ProgramError as ProgramError
    from minipar.errors import RankDied as RankDied
    from minipar.errors import RankError as RankError
    from minipar.errors import SaveError as SaveError
    from minipar.execution.execution import execute as execute
    from minipar.execution.following import StepInfo as StepInfo
    from minipar.execution.measuring.calibration import calibrate as calibrate
    from minipar.execution.measuring.profiler import profile as profile
    from minipar.execution.updating import named as named
    from minipar.planner.tuning import bucket_curve as bucket_curve
    from minipar.prediction.estimating import Estimate as Estimate
    from minipar.prediction.estimating import estimate as estimate
    from minipar.prediction.simulator import simulate as simulate
    from minipar.program import Backward as Backward
    from minipar.program import BackwardInput as BackwardInput
    from minipar.program import BackwardWeight as BackwardWeight
    from minipar.program import Forward as Forward
    from minipar.program import Instruction as Instruction
    from minipar.program import Mesh as Mesh
    from minipar.program import Program as Program
    from minipar.program.collectives import collective as collective
    from minipar.program.verify.verifier import verify as verify
    from minipar.strategies import schedule as schedule
    from minipar.strategies.draft import Draft as Draft
    from minipar.strategies.draft import pass_ as pass_
    from minipar.strategies.plan import Plan as Plan
    from minipar.trace import Trace as Trace
    from minipar.training.evaluation import Evaluation as Evaluation
    from minipar.training.evaluation import evaluate as evaluate
    from minipar.training.training import Run as Run
    from minipar.training.training import resume as resume
    from minipar.training.training import stepping as stepping
    from minipar.training.training import train as train

__version__ = "0.2.0"

_homes = {
    "minipar.program": ("Program", "Mesh", "Instruction", "Forward", "Backward", "BackwardInput", "BackwardWeight"),
    "minipar.strategies.plan": ("Plan",),
    "minipar.program.verify.verifier": ("verify",),
    "minipar.prediction.simulator": ("simulate",),
    "minipar.prediction.estimating": ("estimate", "Estimate"),
    "minipar.costs.device": ("DeviceSpec",),
    "minipar.trace": ("Trace",),
    "minipar.planner.tuning": ("bucket_curve",),
    "minipar.training.training": ("train", "stepping", "resume", "Run"),
    "minipar.execution.execution": ("execute",),
    "minipar.training.evaluation": ("evaluate", "Evaluation"),
    "minipar.execution.updating": ("named",),
    "minipar.execution.following": ("StepInfo",),
    "minipar.cluster": ("Cluster",),
    "minipar.cluster.launched": ("Launched",),
    "minipar.execution.measuring.profiler": ("profile",),
    "minipar.execution.measuring.calibration": ("calibrate",),
    "minipar.strategies": ("schedule",),
    "minipar.program.collectives": ("collective",),
    "minipar.strategies.draft": ("Draft", "pass_"),
    "minipar.errors": (
        "MiniparError",
        "CheckError",
        "PlanError",
        "ProgramError",
        "RankError",
        "RankDied",
        "Deadlock",
        "CollectiveMismatch",
        "DeviceOutOfMemory",
        "SaveError",
        "NotFinite",
    ),
}
_home_of = {name: home for home, names in _homes.items() for name in names}
_modules = {"communicator": "minipar.comm.communicator"}
_packages = (
    "cluster",
    "comm",
    "costs",
    "data",
    "errors",
    "execution",
    "models",
    "planner",
    "prediction",
    "program",
    "server",
    "strategies",
    "trace",
    "training",
)
_modules |= {name: f"minipar.{name}" for name in _packages}

__all__ = [*sorted(_home_of), *sorted(_modules)]


def __getattr__(name: str) -> Any:
    if name in _modules:
        value = importlib.import_module(_modules[name])
    elif name in _home_of:
        value = getattr(importlib.import_module(_home_of[name]), name)
    else:
        raise AttributeError(f"module 'minipar' has no attribute {name!r}")
    globals()[name] = value
    return value


def load_ipython_extension(ipython: Any) -> None:
    """`%load_ext minipar` calls this: then cells can begin with `%%ranks`."""
    from minipar.cluster import magic

    magic.load(ipython, _communicator)


def _communicator(comm: object) -> object:
    """The value of `comm` in a cell of `%%ranks`: a Communicator, made again after a failure; or the user's own."""
    from minipar.comm import communicator

    return communicator.create() if isinstance(comm, communicator.Communicator | None) else comm


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
