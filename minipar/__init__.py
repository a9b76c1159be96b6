"""minipar: every strategy for training in parallel as one program that is verified, simulated, executed and drawn.

Names load on first use, so that a plan, a simulation and a widget never import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers and editors read; a test holds it equal to the tables below
    from minipar import cluster as cluster
    from minipar import comm as comm
    from minipar import costs as costs
    from minipar import data as data
    from minipar import errors as errors
    from minipar import exercise as exercise
    from minipar import memory as memory
    from minipar import models as models
    from minipar import program as program
    from minipar import saving as saving
    from minipar import search as search
    from minipar import strategies as strategies
    from minipar.cluster import Cluster as Cluster
    from minipar.comm import communicator as communicator
    from minipar.comm.algorithms import collective as collective
    from minipar.costs.calibration import calibrate as calibrate
    from minipar.costs.device import DeviceSpec as DeviceSpec
    from minipar.costs.profiler import profile as profile
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
    from minipar.evaluation import Evaluation as Evaluation
    from minipar.evaluation import evaluate as evaluate
    from minipar.execution import execute as execute
    from minipar.following import StepInfo as StepInfo
    from minipar.plan import Plan as Plan
    from minipar.program import Backward as Backward
    from minipar.program import BackwardInput as BackwardInput
    from minipar.program import BackwardWeight as BackwardWeight
    from minipar.program import Forward as Forward
    from minipar.program import Instruction as Instruction
    from minipar.program import Program as Program
    from minipar.simulator import simulate as simulate
    from minipar.strategies import schedule as schedule
    from minipar.strategies.draft import Draft as Draft
    from minipar.strategies.draft import pass_ as pass_
    from minipar.trace import Trace as Trace
    from minipar.training import Run as Run
    from minipar.training import resume as resume
    from minipar.training import train as train
    from minipar.tuning import bucket_curve as bucket_curve
    from minipar.updating import named as named
    from minipar.verifier import verify as verify

__version__ = "0.1.0"

_homes = {
    "minipar.program": ("Program", "Instruction", "Forward", "Backward", "BackwardInput", "BackwardWeight"),
    "minipar.plan": ("Plan",),
    "minipar.verifier": ("verify",),
    "minipar.simulator": ("simulate",),
    "minipar.costs.device": ("DeviceSpec",),
    "minipar.trace": ("Trace",),
    "minipar.tuning": ("bucket_curve",),
    "minipar.training": ("train", "resume", "Run"),
    "minipar.execution": ("execute",),
    "minipar.evaluation": ("evaluate", "Evaluation"),
    "minipar.updating": ("named",),
    "minipar.following": ("StepInfo",),
    "minipar.cluster": ("Cluster",),
    "minipar.costs.profiler": ("profile",),
    "minipar.costs.calibration": ("calibrate",),
    "minipar.strategies": ("schedule",),
    "minipar.comm.algorithms": ("collective",),
    "minipar.strategies.draft": ("Draft", "pass_"),
    "minipar.errors": (
        "MiniparError",
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
_home_of["communicator"] = "minipar.comm.communicator"
_packages = (
    "cluster",
    "comm",
    "costs",
    "data",
    "errors",
    "exercise",
    "memory",
    "models",
    "program",
    "saving",
    "search",
    "strategies",
)
_modules_as_names = ("communicator",)

__all__ = [*sorted(_home_of), *_packages]


def __getattr__(name: str) -> Any:
    if name in _packages:
        return importlib.import_module(f"minipar.{name}")
    if name not in _home_of:
        raise AttributeError(f"module 'minipar' has no attribute {name!r}")
    module = importlib.import_module(_home_of[name])
    value = module if name in _modules_as_names else getattr(module, name)
    globals()[name] = value
    return value


def load_ipython_extension(ipython: Any) -> None:
    """What `%load_ext minipar` calls: cells can begin with `%%ranks`."""
    from minipar.cluster import magic

    magic.load(ipython, _communicator)


def _communicator(comm: object) -> object:
    """What `comm` is in a cell of `%%ranks`: made anew, also after a failure; left alone where it is the user's own."""
    from minipar.comm import communicator

    return communicator.create() if isinstance(comm, communicator.Communicator | None) else comm


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
