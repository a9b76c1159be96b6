"""`Cluster`: persistent local ranks that stay alive between the cells of a notebook."""

from __future__ import annotations

import math
import os
import sys
import weakref
from typing import Any

from minipar.cluster import launch, launched, worker
from minipar.cluster.children import Children
from minipar.cluster.processes import open_standard_streams
from minipar.cluster.ranks import MOST_LOCAL, Call, Ranks, check_ranks
from minipar.costs.device import DeviceSpec
from minipar.errors import PlanError, RankError
from minipar.wording import several

_DEVICES = ("auto", "cpu", "cuda")
_STARTS = ("auto", "fork", "spawn")
_TRANSPORTS = ("local", "gloo")


class Cluster(Ranks):
    """`n` processes on this machine, one for each rank, that run functions for the driver.

    `device`: "cpu", "cuda" (rank r uses GPU r modulo the number of GPUs), or "auto" (cuda where each rank can have
    a GPU of its own, else cpu); or a `DeviceSpec`, or text such as "pcie" that `DeviceSpec.parse` reads: ranks on the
    cpu that emulate this device. `start`: "fork" (from a helper process that imported torch; milliseconds), "spawn"
    (fresh interpreters; seconds), or "auto" (fork on Linux). `threads`: torch's threads in each rank.
    `keep_freed_memory`: let the C library keep what tensors free for the next ones (faster; the rank shrinks less).

    `transport`: what carries tensors on the CPU from rank to rank. "local": sockets and shared memory of this machine,
    which are fast and find many mistakes. "gloo": gloo over the network, for messages and collectives, as ranks on
    several machines use it. A layer's output then has one shape for each number of rows, a gradient that is None
    arrives as zeros, and strategies that decide as they run are refused; a rank that is stopped while it waits for a
    message starts again, without its state. (Tensors on GPUs of their own go through NCCL in both cases.)

    `patience`: seconds after which ranks that all wait for each other are a `Deadlock` (None: never). A rank that
    computes, sleeps or reads is never one, however long it takes; one that was stopped (SIGSTOP) is
    one after half a second. It can be changed between runs.

    Ranks keep their state between runs, also when one fails or a run is interrupted. A rank that was lost is started
    again at the next run, and all end with the driver, however it ends. Use the cluster in a `with` block, or `close()`
    it, or let it end with the session.

    Raises PlanError for impossible values, RankError inside a rank.
    """

    def __init__(
        self,
        n: int,
        device: str | DeviceSpec = "auto",
        start: str = "auto",
        threads: int = 1,
        keep_freed_memory: bool = True,
        patience: float | None = 30.0,
        transport: str = "local",
    ) -> None:
        _check_count("n", n, MOST_LOCAL)
        _check_count("threads", threads)
        _check_patience(patience)
        spec = None if device in _DEVICES else _spec(device)
        _check_choice("start", start, _STARTS)
        _check_choice("transport", transport, _TRANSPORTS)
        if worker.in_rank():
            raise RankError("a Cluster cannot be made inside a rank; make it in the driver")
        launched.refuse("a Cluster")
        if os.name != "posix":
            raise RankError("Cluster needs Linux or macOS; on Windows use it under WSL")
        if start == "auto":
            start = "fork" if sys.platform == "linux" else "spawn"
        if start == "fork" and sys.platform != "linux":
            raise PlanError("start='fork' needs Linux; use start='spawn'")
        open_standard_streams()
        where = device if isinstance(device, str) and spec is None else "cpu"
        self._members = Children(n, where, start, threads, launch.settings_of_glibc(keep_freed_memory), transport)
        self._close = weakref.finalize(self, self._members.close)  # also at the end of the session
        try:
            self._members.heal()
        except BaseException:
            self.close()
            raise
        devices = {rank.device for rank in self._members.ranks.values()}
        self.size, self.threads, self.transport, self.emulates = n, threads, transport, spec
        self.size_hint = f"the cluster has {n}"
        self.device = self._members.ranks[0].device.partition(":")[0]
        self.carrier = "nccl" if self.device == "cuda" and len(devices) == n else transport
        self._members.local = self.carrier == "local"
        self.patience = patience

    @property
    def patience(self) -> float | None:
        """Seconds without any progress, while all ranks wait for each other, until `Deadlock`; None: for ever."""
        return None if self._members.patience == math.inf else self._members.patience

    @patience.setter
    def patience(self, seconds: float | None) -> None:
        _check_patience(seconds)
        self._members.patience = math.inf if seconds is None else float(seconds)

    @property
    def state(self) -> str:
        """One of "ready", "busy", "closed", or how many ranks are alive (the others start at the next call)."""
        if not self._close.alive:
            return "closed"
        if self._members.busy.locked():
            return "busy"
        alive = sum(member.alive for member in self._members.ranks.values())
        return "ready" if alive == self.size else f"{alive} of {several(self.size, 'rank')} alive"

    @property
    def _what(self) -> str:
        emulated = "" if self.emulates is None else f" emulating {self.emulates}"
        return f"{self.device}{emulated}{' over gloo' if self.transport == 'gloo' else ''}"

    def __repr__(self) -> str:
        return f"Cluster({self.size} {'rank' if self.size == 1 else 'ranks'}, {self._what}, {self.state})"

    def end_rank(self, rank: int) -> None:
        """SIGKILL a rank, such as one that hangs; called from a callback of `run_with` or `run_reviving`."""
        self._members.end(check_ranks([rank], self.size)[0])

    def perform(self, call: Call) -> list[Any]:
        if os.getpid() != self._members.owner:
            raise RankError("this Cluster belongs to another process; make one here")
        if not self._close.alive:
            raise RankError("this Cluster is closed; make a new one")
        return self._members.perform(call)

    def close(self) -> None:
        """End all ranks. A second call does nothing; RankError while a run is going on."""
        if not self._members.busy.acquire(blocking=False):
            raise RankError("this Cluster is busy with a run; close it afterwards")
        try:
            self._close()
            if self._members.ranks:  # interrupted twice, the first time
                self._members.close()
        finally:
            self._members.busy.release()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_patience(seconds: object) -> None:
    possible = isinstance(seconds, int | float) and not isinstance(seconds, bool) and seconds > 0
    if seconds is not None and not possible:
        raise PlanError(f"patience={seconds!r}: must be seconds above 0, or None for no limit")


def _check_count(name: str, value: object, most: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise PlanError(f"{name}={value!r}: must be a whole number of at least 1")
    if most is not None and value > most:
        shown = value if value.bit_length() < 64 else "a number of very many digits"
        raise PlanError(f"{name}={shown}: one machine has room for at most {most:,} ranks")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise PlanError(f"{name}={value!r}: must be one of {', '.join(map(repr, choices))}")


def _spec(device: object) -> DeviceSpec:
    possible = f"must be {', '.join(map(repr, _DEVICES))}, or a DeviceSpec or its text"
    if not isinstance(device, (str, DeviceSpec)):
        raise PlanError(f"device={device!r}: {possible}")
    try:
        return DeviceSpec.parse(device)
    except PlanError as error:
        raise PlanError(f"device={device!r}: {possible} ({error.reason})") from None
