"""minipar: every strategy for training in parallel as one program that is verified, simulated, executed and drawn.

Names load on first use, so that a plan, a simulation and a widget never import torch.
"""

from __future__ import annotations

import importlib
from typing import Any

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

    magic.load(ipython)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
