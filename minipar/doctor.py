"""What works on this machine: cores, memory, packages, devices, and whether ranks can start and communicate."""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from minipar.prediction.oversubscription import available_cores

PACKAGES = (
    "torch", "numpy", "matplotlib", "jupyterlab", "ipywidgets", "anywidget", "plotly", "sklearn", "transformers",
    "peft", "torchvision", "timm",
)  # fmt: skip
# transformers imports the rest of itself, and torchvision if that is installed, when a model is asked for.
STATEMENTS = {"transformers": "from transformers import GPT2LMHeadModel"}
DISTRIBUTIONS = {"sklearn": "scikit-learn"}
MISSING = "not installed"
WITH_TORCHVISION = ("torchvision", "timm", "transformers", "peft")  # these import it, too
PATIENCE = 120  # seconds for the imports
TRY = """
import os, sys
told = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # (what packages print is not read)
for statement in sys.argv[1:]:
    said = "fine"
    try:
        exec(statement)
    except BaseException as error:
        while error.__cause__ or error.__context__:
            error = error.__cause__ or error.__context__
        said = " ".join(f"{type(error).__name__}: {error}".split())
    print(said, file=told, flush=True)
"""


def examine() -> dict[str, Any]:
    """Facts about the machine, and the outcome of a real two-rank sum. `to mend` says what is broken, and a way out."""
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": available_cores(),
        "memory": _memory(),
    }
    facts |= {package: _version(package) for package in PACKAGES}
    broken = failures(package for package in PACKAGES if facts[package] != MISSING)
    mend = mending(facts, broken)
    facts |= {package: f"{facts[package]}, broken: {said}" for package, said in broken.items()}
    facts |= _try_ranks()
    if "two ranks" in facts:
        mend.append(f"two ranks {facts['two ranks']}")
    return facts | {"to mend": mend}


def failures(packages: Iterable[str]) -> dict[str, str]:
    """Of packages that cannot be imported, what the import says. They are imported in a process of their own."""
    found: dict[str, str] = {}
    left = list(packages)
    while left:
        statements = [STATEMENTS.get(package, f"import {package}") for package in left]
        try:
            child = subprocess.run(
                [sys.executable, "-c", TRY, *statements], capture_output=True, text=True, timeout=PATIENCE, check=False
            )
            out, end = child.stdout, f"the process ended with exit status {child.returncode}"
        except subprocess.TimeoutExpired as late:
            out, end = (late.stdout or b"").decode(), f"no end within {PATIENCE} s"
        told = out.splitlines()
        told += [end] * (len(told) < len(left))
        found |= {package: said for package, said in zip(left, told, strict=False) if said != "fine"}
        left = left[len(told) :]
    return found


def mending(versions: dict[str, str], broken: dict[str, str]) -> list[str]:
    """What to do about broken packages. torchvision works with one build of torch only."""
    torch, _, build = versions["torch"].partition("+")
    index = f" --index-url https://download.pytorch.org/whl/{build}" if build else ""
    found = []
    if "torchvision" in broken:
        found.append(
            f"torchvision {versions['torchvision']} does not fit torch {versions['torch']}, and nothing that imports it"
            " works, such as models of transformers. minipar does not need it: pip uninstall torchvision timm. Or take "
            f"both from one place: pip uninstall torchvision; pip install torch=={torch} torchvision{index}"
        )
        broken = {package: said for package, said in broken.items() if package not in WITH_TORCHVISION}
    return found + [f"{name}: pip install --force-reinstall {DISTRIBUTIONS.get(name, name)}" for name in broken]


def _memory() -> str:
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return "unknown"
    return f"{size / 2**30:.1f} GiB"


def _version(package: str) -> str:
    if importlib.util.find_spec(package) is None:
        return MISSING
    try:
        return version(DISTRIBUTIONS.get(package, package))
    except PackageNotFoundError:
        return "installed"


def _try_ranks() -> dict[str, Any]:
    from minipar.cluster import Cluster

    start = time.perf_counter()
    try:
        with Cluster(2) as cluster:
            started = time.perf_counter() - start
            sums = cluster.run(_sum)
            return {
                "first start of 2 ranks": f"{started:.2f} s",
                "two ranks sum [1,2,3] and [1,0,1]": " and ".join(map(str, sums)),
                "device of the ranks": cluster.device,
                "gpus": cluster.run_on([0], _gpus)[0],
            }
    except Exception as error:  # any error is a result here
        return {"two ranks": f"failed: {error}"}


def _sum() -> list[int]:
    from minipar.comm import communicator

    comm = communicator.create()
    return comm.allreduce([[1, 2, 3], [1, 0, 1]][comm.rank], op=sum)


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


if __name__ == "__main__":
    print(examine(), file=sys.stdout)
