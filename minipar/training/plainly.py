"""The driver's side of the reference: a job goes to a process that knows nothing of the engine; see `reference.py`.

    driver    job as plain values --> process of plain torch --> losses, gradients, parameters, buffers
                                      (started by the path of reference.py; it never imports minipar, unless the user's
                                      own code does. Before it, the file light_torch.py keeps torch's compiler out)

The process is started at the first job and kept for the next ones. Where ranks are forked, it is a fork as well: it was
made when their helper had imported torch, but nothing of the engine except what starts ranks, and it forgets that. Else
it is a new interpreter, which takes as long as importing torch. It is killed if the driver is interrupted while it
waits for it, and ends when the driver ends.
"""

from __future__ import annotations

import atexit
import io
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minipar.cluster import launch, light_torch, parcel
from minipar.cluster.failures import rebuilt
from minipar.cluster.processes import describe_status
from minipar.errors import RankDied, RankError
from minipar.execution.execution import Job
from minipar.execution.saving.keeping import Storing
from minipar.execution.updating import plain_schedule, takes_names
from minipar.models.losses import Own, Weighted
from minipar.trace.recorded_order import RecordedOrder
from minipar.training import reference
from minipar.training.reference import Reference

Report = Callable[[int], None]
# Torch's compiler is not needed, and takes as long to import as torch: `light_torch.py`, which knows nothing of the
# engine either, keeps optimizers from importing it. Nor is anything collected that modules make: that is a fifth.
_START = (
    "import gc, runpy, sys; gc.disable(); light, path = sys.argv.pop(1), sys.argv.pop(1); "
    "runpy.run_path(light)['postpone_compiler'](); gc.enable(); runpy.run_path(path, run_name='__main__')"
)


class Start(NamedTuple):
    """Where plain torch begins.

    step       the number of its first step
    saved      parameters, buffers, and each parameter's optimizer states, whole and by name; None: those of a new model
    schedule   the state of the scheduler, as torch's own objects
    """

    step: int = 0
    saved: Mapping[str, Mapping[str, Any]] | None = None
    schedule: dict[str, Any] | None = None

    @staticmethod
    def of(storing: Storing) -> Start:
        """Where a run begins. (It may save to the same folder, so this is read before.)"""
        schedule = None if storing.saved is None else plain_schedule(storing.saved.header.schedule)
        return Start(storing.first, storing.plainly(), schedule)


BEGINNING = Start()


def train_reference(
    job: Job, work: int | RecordedOrder, threads: int = 1, report: Report = lambda step: None, **options: Any
) -> Reference:
    """Run a job in plain torch, on so many threads.

    report     called with every step that is done
    options    as of `task_of`

    Raises what the user's code raises there, with its traceback in a note; RankDied if the process dies; ValueError if
    the log uses what does not exist.
    """
    return ask(task_of(job, work, **options), threads, report)


def task_of(
    job: Job,
    work: int | RecordedOrder,
    *,
    keep_gradients: bool = True,
    clip: float | None = None,
    inference: bool = False,
    start: Start = BEGINNING,
    data: Any = None,
    given: Sequence[Mapping[str, Tensor]] = (),
    shaken: float = 0.0,
) -> dict[str, Any]:
    """What `reference.run` needs: what the user gave, and plain values, without classes of the engine.

    work       so many steps of the whole batch; or the log of what was done, which is replayed
    data       in place of the job's
    given      gradients that updates use in place of its own: see `reference.Job`
    shaken     how much the parameters are changed before
    """
    if isinstance(work, int):
        # (nothing is split)
        loss = None if isinstance(job.loss, Own) else job.loss.loss if isinstance(job.loss, Weighted) else job.loss
        plain: Any = {"steps": work, "inference": inference}
    else:
        loss, plain = job.loss, (tuple(map(tuple, work.entries)), *work[1:])
    return {
        "work": plain,
        "model": job.model,
        "data": job.data if data is None else data,
        "batch": job.batch,
        "dtype": job.dtype,
        "evaluate": bool(job.evaluate),
        "saved": start.saved,
        "shaken": shaken,
        "job": {
            "loss": loss,
            "optimizer": job.optimizer,
            "seed": job.seed,
            "clip": clip,
            "first": start.step,
            "keep_gradients": keep_gradients,
            "by_name": takes_names(job.optimizer),
            "scheduler": job.scheduler,
            "schedule": start.schedule,
            "given": given,
        },
    }


def ask(task: Mapping[str, Any], threads: int = 1, report: Report = lambda step: None) -> Reference:
    """Let this driver's process of plain torch do a job."""
    with _lock:
        process = _process()
        try:
            return process.ask(task, threads, report)
        except (EOFError, ConnectionError) as error:
            status = describe_status(process.end())
            raise RankDied(f"the process of plain torch, which train(check=True) compares with, {status}") from error
        finally:
            if process.asked:  # the answer was not waited for
                process.end()


def prepare() -> None:
    """Start this driver's process of plain torch, if there is none yet, and wait until it has imported torch: else the
    import would disturb a measurement."""
    with _lock:
        _process().await_ready()


class Plain:
    """A process of plain torch. `asked`: it has a job whose answer has not come yet."""

    def __init__(self) -> None:
        stdin, self._life = os.pipe()  # when it closes, the process knows that the driver has ended
        self.process: launch.Process
        try:
            self.process, control = launch.take_spare(reference.__file__, stdin) or _interpreter(stdin)
        finally:
            os.close(stdin)
        self.control = Connection(control.detach())
        self.asked = self.ready = False
        self._status: int | None = None  # once it was ended

    @property
    def alive(self) -> bool:
        if self._status is not None or self.process.wait(0) is not None:
            return False
        # A helper that is gone does not say that this process, which it forked, has gone with it.
        try:
            if self.control.poll():
                self.await_ready()
            return not self.control.poll()
        except (EOFError, OSError):
            return False

    def await_ready(self) -> None:
        if not self.ready:
            self._receive()
            self.ready = True

    def _receive(self) -> Any:
        try:
            return self.control.recv()
        except OSError as error:  # (it ended while it wrote)
            raise EOFError from error

    def ask(self, task: Mapping[str, Any], threads: int, report: Report) -> Reference:
        data = _pickled(task)
        self.await_ready()
        self.asked = True
        here = {"path": list(sys.path), "folder": os.getcwd(), "environment": dict(os.environ)}
        job = {**here, "threads": threads, "task": data}
        self.control.send(job)
        while True:
            kind, *rest = self._receive()
            if kind == "report":
                report(rest[0])
                continue
            self.asked = False
            if kind == "error":
                name, message, text, pickled = rest
                note = f"raised in plain torch, in a process of its own:\n{text.rstrip()}"
                raise rebuilt(pickled, f"plain torch, in a process of its own, raised {name}: {message}", note)
            return Reference(**torch.load(io.BytesIO(rest[0]), weights_only=True))

    def end(self) -> int:
        """Kill it; returns its exit status."""
        self.asked = False
        if self._status is None:
            self.process.kill()
            status = self.process.wait(10)
            self._status = -signal.SIGKILL if status is None else status
            os.close(self._life)
            self.control.close()
        return self._status


def _interpreter(stdin: int) -> tuple[launch.Process, socket.socket]:
    """A new interpreter for reference.py, and the driver's end of its socket."""
    ours, theirs = socket.socketpair()
    command = [*launch.interpreter(_START), light_torch.__file__, reference.__file__, str(theirs.fileno())]
    with theirs:
        process = subprocess.Popen(
            command,
            pass_fds=(theirs.fileno(),),
            stdin=stdin,
            start_new_session=True,  # the notebook's stop button signals the kernel's whole group
            env=launch.child_environment(),
        )
    return launch.Spawned(process), ours


_lock = threading.RLock()
_processes: dict[int, Plain] = {}  # by the driver's pid, so that a process that it forks does not use the same one


def _process() -> Plain:
    pid = os.getpid()
    found = _processes.get(pid)
    if found is not None and not found.alive:
        found.end()
        found = None
    if found is None:
        found = _processes[pid] = Plain()
    return found


@atexit.register
def _end_all() -> None:
    found = _processes.pop(os.getpid(), None)
    if found is not None:
        found.end()


def _pickled(task: Mapping[str, Any]) -> bytes:
    """The task with the user's objects. Tensors that share memory share it in the other process as well."""
    with io.BytesIO() as file:
        try:
            torch.save(dict(task), file, pickle_module=parcel, pickle_protocol=5)
        except Exception as error:
            raise RankError(f"the reference cannot be sent to its process: {type(error).__name__}: {error}") from error
        return file.getvalue()
