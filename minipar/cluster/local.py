"""`Cluster`: persistent local ranks that live on between the cells of a notebook."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import cloudpickle

from minipar.cluster import launch, worker
from minipar.cluster.failures import as_exception
from minipar.cluster.members import Callback, Members, check_owner
from minipar.errors import PlanError, RankError

_DEVICES = ("auto", "cpu", "cuda")
_STARTS = ("auto", "fork", "spawn")


class Cluster:
    """`n` processes on this machine, one for each rank, that run functions for the driver.

    `device`: "cpu", "cuda" (rank r uses GPU r modulo the number of GPUs), or "auto" (cuda where each rank can have
    a GPU of its own, else cpu). `start`: "fork" (from a helper process that imported torch; milliseconds), "spawn"
    (fresh interpreters; seconds), or "auto" (fork on Linux). `threads`: torch's threads in each rank.

    Ranks keep their state between runs, start anew by themselves when one was lost, and end with the driver, however
    it ends. Use it in a `with` block, or let it live on and `close()` it, or leave that to the end of the session.

    Raises PlanError for values that cannot be, RankError inside a rank.
    """

    def __init__(self, n: int, device: str = "auto", start: str = "auto", threads: int = 1) -> None:
        _check_count("n", n)
        _check_count("threads", threads)
        _check_choice("device", device, _DEVICES)
        _check_choice("start", start, _STARTS)
        if worker.in_rank():
            raise RankError("a Cluster cannot be made inside a rank; make it in the driver")
        if os.name != "posix":
            raise RankError("Cluster needs Linux or macOS; on Windows use it under WSL")
        if start == "auto":
            start = "fork" if sys.platform == "linux" else "spawn"
        if start == "fork" and sys.platform != "linux":
            raise PlanError("start='fork' needs Linux; use start='spawn'")
        self._folder = tempfile.mkdtemp(prefix="cluster-", dir=launch.scratch_folder())
        self._members = Members(n, device, start, threads)
        self._close = weakref.finalize(self, _end, self._members, self._folder)  # also at exit
        self._busy = threading.Lock()
        self._run = 0
        try:
            self._members.heal()
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._members.size

    @property
    def device(self) -> str:
        """"cpu" or "cuda", as the ranks have it."""
        devices = {member.device.partition(":")[0] for member in self._members.ranks.values()}
        return devices.pop() if len(devices) == 1 else self._members.device

    @property
    def state(self) -> str:
        """"ready", "busy", "closed", or how many ranks are alive."""
        if not self._close.alive:
            return "closed"
        if self._busy.locked():
            return "busy"
        alive = self._members.alive
        return "ready" if alive == self.size else f"{alive} of {self.size} ranks alive"

    def __repr__(self) -> str:
        return f"Cluster({self.size} ranks, {self.device}, {self.state})"

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call `function(*args, **kwargs)` on every rank; the results in rank order.

        Functions and classes may come from a notebook cell. What ranks print appears here, line by line.
        When a rank fails, its own exception is raised, with its traceback there as a note; RankDied when its process
        ended; RankError when an argument or a result cannot be sent.
        """
        return self._call(range(self.size), None, function, args, kwargs)

    def run_on(self, ranks: Iterable[int], function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """`run` on these ranks only; the results in the order of `ranks`."""
        return self._call(ranks, None, function, args, kwargs)

    def run_with(self, callback: Callback, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """`run`, calling `callback(rank, value)` in the driver for each `worker.report(value)` as it arrives."""
        return self._call(range(self.size), callback, function, args, kwargs)

    def _call(
        self,
        ranks: Iterable[int],
        callback: Callback | None,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> list[Any]:
        check_owner(self._members)
        if not self._close.alive:
            raise RankError("this Cluster is closed; make a new one")
        active = _check_ranks(ranks, self.size)
        blob = _pack(function, args, kwargs)
        if not self._busy.acquire(blocking=False):
            raise RankError("this Cluster is busy with another run")
        try:
            answers = self._exchange(active, callback, blob)
        finally:
            self._busy.release()
        return [_unpack(rank, answers[rank]) for rank in active]

    def _exchange(self, active: tuple[int, ...], callback: Callback | None, blob: bytes) -> dict[int, bytes]:
        members = self._members
        members.heal()
        self._run += 1
        os.makedirs(self._folder, exist_ok=True)
        store = os.path.join(self._folder, f"generation-{members.generation}")
        situation = worker.Situation(members.generation, active, store, _free_port())
        message = ("run", self._run, situation, tuple(sys.path), blob)
        answers: dict[int, Any] = {}
        try:
            for rank in active:
                members.send(rank, message)
            answers, failures = members.collect(active, self._run, callback)
        except BaseException:  # an interrupt, or an error in the callback: what still runs is stopped
            members.stop(set(active) - set(answers))
            members.generation += 1
            raise
        if failures:
            answered = {failure.rank for failure in failures} | set(answers)
            late = [rank for rank in active if rank not in answered]
            members.stop(late)
            members.generation += 1
            raise as_exception(failures, late)
        return {rank: blob for rank, (_, blob) in answers.items()}

    def close(self) -> None:
        """End all ranks. A second call does nothing."""
        self._close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _end(members: Members, folder: str) -> None:
    members.close()
    if os.getpid() == members.owner:
        shutil.rmtree(folder, ignore_errors=True)


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise PlanError(f"{name}={value!r}: must be a whole number of at least 1")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise PlanError(f"{name}={value!r}: must be one of {', '.join(map(repr, choices))}")


def _check_ranks(ranks: Iterable[int], size: int) -> tuple[int, ...]:
    chosen = tuple(ranks)
    for rank in chosen:
        if not isinstance(rank, int) or not 0 <= rank < size:
            raise PlanError(f"rank {rank!r}: this Cluster has ranks 0 to {size - 1}")
    if len(set(chosen)) != len(chosen):
        raise PlanError(f"ranks {chosen}: each rank can be named once")
    return chosen


def _pack(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    if not callable(function):
        raise RankError(f"cluster.run needs a function to call, not a {type(function).__name__}")
    try:
        return cloudpickle.dumps((function, args, kwargs))
    except Exception as error:
        raise RankError(f"the function or an argument cannot be sent to the ranks: {error}") from error


def _unpack(rank: int, blob: bytes) -> Any:
    try:
        return cloudpickle.loads(blob)
    except Exception as error:
        kind = type(error).__name__
        raise RankError(f"the result of rank {rank} cannot be loaded in the driver: {kind}: {error}") from error


def _free_port() -> int:
    """A port for users' own `init_process_group`; new for each run, so that no old store answers there."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
