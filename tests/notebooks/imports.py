"""What the process imports that the kernels of lessons are forked from (`warm.py`), and nothing else: no thread may run
here, and no picture may be drawn."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import threading

from minipar.cluster.processes import die_with_parent

die_with_parent(os.getppid(), signal.SIGKILL)
os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")  # as ipykernel does, before matplotlib
gc.disable()  # (a fifth of the time of imports would be spent on collections)
for name in (
    "torch", "torch.export._trace", "torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.optim",
    "numpy", "scipy.optimize", "matplotlib.pyplot", "IPython", "ipykernel.kernelapp", "ipykernel.ipkernel",
    "ipykernel.zmqshell", "ipywidgets", "anywidget", "minipar.training.training", "minipar.cluster.zygote",
    "minipar.trace.figure", "minipar_course.exercises.kinds", "minipar_widgets",
):  # fmt: skip
    with contextlib.suppress(ImportError):  # (a kernel that needs it will say what is wrong with it)
        importlib.import_module(name)
with contextlib.suppress(ImportError):  # (its own lock would be a semaphore, which a killed kernel leaves behind)
    from tqdm.auto import tqdm

    tqdm.set_lock(threading.RLock())
gc.freeze()  # so that no collection of a kernel copies all pages
gc.enable()
