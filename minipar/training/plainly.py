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
import contextlib
import ctypes
import io
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import cloudpickle
import torch

from minipar.cluster import launch, light_torch
from minipar.cluster.processes import describe_status, readable
from minipar.errors import ProgramError, RankDied, RankError
from minipar.execution.execution import Job
from minipar.execution.saving.keeping import NOTHING, Storing
from minipar.execution.updating import plain_schedule, takes_names
from minipar.models.losses import Weighted
from minipar.program.server_rule import Kind, Row
from minipar.strategies.served_order import completed
from minipar.trace.recorded_order import RecordedOrder
from minipar.training import reference
from minipar.training.reference import Reference

Report = Callable[[int], None]
Saved = Mapping[str, Mapping[str, Any]] | None
# Torch's compiler is not needed, and takes as long to import as torch: `light_torch.py`, which knows nothing of the
# engine either, keeps optimizers from importing it. Nor is anything collected that modules make: that is a fifth.
_START = (
    "import gc, runpy, sys; gc.disable(); light, path = sys.argv.pop(1), sys.argv.pop(1); "
    "runpy.run_path(light)['postpone_compiler'](); gc.enable(); runpy.run_path(path, run_name='__main__')"
)


def train_reference(
    job: Job,
    steps: int,
    *,
    keep_gradients: bool = True,
    clip: float | None = None,
    inference: bool = False,
    storing: Storing = NOTHING,
    saved: Saved = None,
    replicas: tuple[int, int, int] | None = None,
    threads: int = 1,
    report: Report = lambda step: None,
) -> Reference:
    """Run a job in plain torch, on so many threads.

    replicas   for Local SGD: number of replicas, micro-batches of each, steps between averages
    saved      what `storing.plainly()` gave before the run, which may have saved to the same folder since; default: now
    report     called with every step that is done
    Raises what the user's code raises there, with its traceback in a note; RankDied if the process dies.
    """
    options: dict[str, Any] = {
        "steps": steps, "keep_gradients": keep_gradients, "first": storing.first, "clip": clip
    }  # fmt: skip
    if replicas is None:
        options |= {"inference": inference}
        return ask(task_of(job, "plain", options, storing, saved), threads, report)
    count, microbatches, every = replicas
    options |= {"replicas": count, "microbatches": microbatches, "every": every}
    return ask(task_of(job, "local", options, storing, saved), threads, report)


def replay_order(
    job: Job,
    order: RecordedOrder,
    *,
    keep_gradients: bool = True,
    storing: Storing = NOTHING,
    saved: Saved = None,
    threads: int = 1,
    report: Report = lambda step: None,
) -> Reference:
    """Run a job in plain torch by the recorded order of an asynchronous pipeline. ProgramError for an impossible order,
    which uses values that do not exist; other errors as for `train_reference`."""
    rows = tuple(tuple(tuple(entry) for entry in row) for row in order.ranks)
    options = {"order": (rows, *order[1:]), "keep_gradients": keep_gradients, "first": storing.first}
    return ask(task_of(job, "order", options, storing, saved), threads, report)


def replay_service(
    job: Job,
    order: list[Row],
    workers: int,
    steps: int,
    microbatches: int,
    threads: int = 1,
    clip: float | None = None,
    storing: Storing = NOTHING,
    saved: Saved = None,
) -> Reference:
    """Run a job in plain torch by the recorded order of parameter servers: every gradient is computed with the
    parameters that its worker was given, and every update uses the gradients that the servers took."""
    return ask(service_task(job, order, workers, steps, microbatches, clip, storing, saved), threads)


def service_task(
    job: Job,
    order: list[Row],
    workers: int,
    steps: int,
    microbatches: int,
    clip: float | None = None,
    storing: Storing = NOTHING,
    saved: Saved = None,
) -> dict[str, Any]:
    """What `reference.run` needs for such a replay."""
    events: list[tuple[Any, ...]] = []
    for what, row in _happened(order):
        of = {"answer": (row.worker, row.step), "arrive": (row.worker, row.step, row.kind is Kind.TAKE), "apply": ()}
        events.append((what, *of[what]))
    options = {"events": events, "steps": steps, "workers": workers, "microbatches": microbatches, "clip": clip}
    return task_of(job, "service", options | {"first": storing.first}, storing, saved)


def _happened(order: list[Row]) -> Iterator[tuple[str, Row]]:
    """What a replay needs of the servers' log: answers, gradients that arrived, and updates."""
    done = completed(order)
    wanted = {id(answer) for answer in done.values()}
    for k, row in enumerate(order):
        if id(row) in wanted:
            yield "answer", row
        elif k in done:
            yield "arrive", row
        elif row.kind is Kind.APPLY:
            yield "apply", row


def replay_stages(
    job: Job,
    order: RecordedOrder,
    rows: list[Row],
    *,
    keep_gradients: bool = True,
    storing: Storing = NOTHING,
    saved: Saved = None,
    threads: int = 1,
) -> Reference:
    """Run a job in plain torch by the recorded orders of replicas that are asynchronous pipelines, and of parameter
    servers that answer and update each stage by itself."""
    return ask(stages_task(job, order, rows, keep_gradients, storing, saved), threads)


def stages_task(
    job: Job,
    order: RecordedOrder,
    rows: list[Row],
    keep_gradients: bool = True,
    storing: Storing = NOTHING,
    saved: Saved = None,
) -> dict[str, Any]:
    """What `reference.run` needs for such a replay."""
    events: list[tuple[Any, ...]] = []
    for what, row in _happened(rows):
        of = (-1 - row.worker,) if what == "apply" else (*divmod(row.worker, len(order.ranks)), row.step)
        events.append((what, *of))
    own = tuple(tuple(tuple(entry) for entry in row) for row in order.ranks)
    options = {"order": (own, *order[1:]), "events": events, "keep_gradients": keep_gradients, "first": storing.first}
    return task_of(job, "stages", options, storing, saved)


def task_of(
    job: Job, kind: str, options: Mapping[str, Any], storing: Storing = NOTHING, saved: Saved = None
) -> dict[str, Any]:
    """What `reference.run` needs: what the user gave, and plain values."""
    loss = job.loss.loss if kind == "plain" and isinstance(job.loss, Weighted) else job.loss  # (nothing is split)
    return {
        "kind": kind,
        "model": job.model,
        "data": job.data,
        "batch": job.batch,
        "loss": loss,
        "optimizer": job.optimizer,
        "seed": job.seed,
        "dtype": job.dtype,
        "by_name": takes_names(job.optimizer),
        "scheduler": job.scheduler,
        "schedule": None if storing.saved is None else plain_schedule(storing.saved.header.schedule),
        "evaluate": bool(job.evaluate),
        "saved": storing.plainly() if saved is None else saved,
        "options": dict(options),
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
        except reference.ImpossibleOrder as error:
            raise ProgramError(str(error)) from error
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
            self.process, self.control = launch.take_spare(reference.__file__, stdin) or _interpreter(stdin)
        except BaseException:
            os.close(self._life)
            raise
        finally:
            os.close(stdin)
        self.asked = self.ready = False
        self._status: int | None = None  # once it was ended

    @property
    def alive(self) -> bool:
        if self._status is not None or self.process.wait(0) is not None:
            return False
        # A helper that is gone does not say that this process, which it forked, has gone with it.
        told = bool(readable([self.control.fileno()], 0))
        return not told or bool(self.control.recv(1, socket.MSG_PEEK))

    def await_ready(self) -> None:
        if not self.ready:
            reference.receive(self.control)
            self.ready = True

    def ask(self, task: Mapping[str, Any], threads: int, report: Report) -> Reference:
        data = _pickled(task)
        self.await_ready()
        self.asked = True
        here = {"path": list(sys.path), "folder": os.getcwd(), "environment": dict(os.environ)}
        job = {**here, "threads": threads, "task": data}
        reference.send(self.control, job)
        while True:
            kind, *rest = reference.receive(self.control)
            if kind == "report":
                report(rest[0])
                continue
            self.asked = False
            if kind == "error":
                raise _error(*rest)
            (found,) = rest
            gradients = [reference.unpacked(one) for one in found.pop("gradients")]
            parameters, buffers = (reference.unpacked(found.pop(name)) for name in ("parameters", "buffers"))
            return Reference(gradients=gradients, parameters=parameters, buffers=buffers, **found)

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
    try:
        process = subprocess.Popen(
            command,
            pass_fds=(theirs.fileno(),),
            stdin=stdin,
            start_new_session=True,  # the notebook's stop button signals the kernel's whole group
            env=launch.child_environment(),
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
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


def _error(name: str, message: str, text: str, data: bytes | None) -> Exception:
    """What the user's code raised there, with its traceback as a note."""
    error: Any = None
    if name == reference.ImpossibleOrder.__name__:
        return reference.ImpossibleOrder(message)
    if data is not None:
        with contextlib.suppress(Exception):  # such as a class whose __init__ takes other arguments than Exception's
            error = cloudpickle.loads(data)
    note = f"raised in plain torch, in a process of its own:\n{text.rstrip()}"
    if not isinstance(error, Exception):
        return RankError(f"plain torch, in a process of its own, raised {name}: {message}", note)
    if hasattr(error, "add_note"):  # Python 3.11 and later
        error.add_note(note)
    else:
        error.__cause__ = RankError(f"plain torch raised {name}: {message}", note)
    return error


# Pickling: tensors that share memory share it in the other process as well. torch's own pickling of single tensors
# would not keep that.


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.storage.TypedStorage):
            typed = torch.storage.TypedStorage
            return partial(typed, wrap_storage=obj._untyped_storage, dtype=obj.dtype, _internal=True), ()
        if isinstance(obj, torch.UntypedStorage):
            if not obj.nbytes():
                return torch.UntypedStorage, (0,)
            whole = obj.cpu()
            data = ctypes.string_at(whole.data_ptr(), whole.nbytes())
            return partial(torch.UntypedStorage.from_buffer, dtype=torch.uint8), (data,)
        return super().reducer_override(obj)


def _pickled(task: Mapping[str, Any]) -> bytes:
    with io.BytesIO() as file:
        try:
            _Pickler(file, 5).dump(dict(task))
        except Exception as error:
            raise RankError(f"the reference cannot be sent to its process: {type(error).__name__}: {error}") from error
        return file.getvalue()
