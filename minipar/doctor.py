"""What works on this machine: versions, cores, memory, devices, and whether ranks can start and communicate."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
import time
from typing import Any

from minipar.prediction.oversubscription import available_cores


def examine() -> dict[str, Any]:
    """Facts about the machine, and the outcome of a real two-rank sum."""
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": available_cores(),
        "memory": _memory(),
    }
    for package in ("torch", "numpy", "matplotlib", "jupyterlab", "ipywidgets", "anywidget", "plotly", "sklearn"):
        facts[package] = _version(package)
    facts |= _try_ranks()
    return facts


def _memory() -> str:
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return "unknown"
    return f"{size / 2**30:.1f} GiB"


def _version(package: str) -> str:
    if importlib.util.find_spec(package) is None:
        return "not installed"
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version({"sklearn": "scikit-learn"}.get(package, package))
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
