"""The settings of a group of parameter servers, and what each of them brings back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from minipar.execution.emulation import Pacing
from minipar.execution.updating import Form, Optimizer, Scheduler
from minipar.program.server_rule import SYNC, Kind, Mode, Row


@dataclass(frozen=True)
class Settings:
    """How a group of servers works.

    workers         expected from the start; more may come
    steps           of a worker (async, ssp), or updates (sync, k-of-n), after which everything ends
    optimizer       makes the optimizer of the whole model, of which each server has a part; it must work element by
                    element
    scheduler       makes a scheduler of it, which steps once for each update
    forms           the parameters that the optimizer is made of, in the model's order; (): the keys
    snapshot_every  updates between two snapshots; None: no snapshots, and the run ends when a server dies
    patience        seconds after which a worker that is gone or hangs is removed; None: never. Over a Unix socket a
                    worker hangs if its process was stopped, and not while that computes; over TCP, where the server
                    cannot see the process, it hangs if it sends nothing for so long
    on_death        "continue" without it, or "abort"
    together        whether no worker begins before all that are expected have asked for parameters
    pacing          of emulated devices; None: nothing is delayed
    """

    workers: int
    steps: int
    optimizer: Optimizer
    mode: Mode = SYNC
    snapshot_every: int | None = None
    patience: float | None = 30.0
    on_death: str = "continue"
    together: bool = False
    pacing: Pacing | None = None
    scheduler: Scheduler | None = None
    forms: tuple[Form, ...] = ()


class Event(NamedTuple):
    """What a server did, and when (time.perf_counter). `kind` 0: it received a piece of tensor `which`; otherwise as
    in Row, and `which` is the version."""

    kind: int
    worker: int
    step: int
    which: int
    start: float
    end: float
    bytes: int = 0


@dataclass
class Served:
    """What a server brings back. `order` is server 0's; `values` are its pieces of the parameters, as bytes."""

    values: Tensor
    order: list[Row] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    silent: list[tuple[int, int, float]] = field(default_factory=list)  # (worker, step, seconds) of removed workers
    restored: list[int] = field(default_factory=list)  # versions that this process went back to
    received: int = 0  # bytes of gradients
    sent: int = 0  # bytes of parameters
    states: dict[int, int] = field(default_factory=dict)  # bytes that the optimizer keeps, by tensor


def rows_of(table: Tensor) -> list[Row]:
    """An order, from the table of numbers by which a snapshot stores it."""
    return [Row(Kind(row[0]), *row[1:]) for row in table.tolist()]


class Arrivals:
    """At server 0: which servers have a gradient whole, and which workers pull before all servers have theirs."""

    def __init__(self, servers: int) -> None:
        self.servers = servers
        self.at: dict[tuple[int, int, int], set[int]] = {}  # worker, step, life
        self.early: set[int] = set()

    def coming(self, worker: int, step: int, life: int) -> None:
        """A gradient is on an emulated link: a pull of its worker waits for it."""
        self.at.setdefault((worker, step, life), set())

    def whole(self, worker: int, step: int, life: int, server: int) -> bool:
        """A gradient is whole at a server. Returns whether it is whole at all of them now."""
        if self.servers == 1:
            self.at.pop((worker, step, life), None)
            return True
        found = self.at.setdefault((worker, step, life), set())
        found.add(server)
        if len(found) < self.servers:
            return False
        del self.at[worker, step, life]
        return True

    def wait(self, worker: int) -> bool:
        """A worker pulls. Returns whether it must wait, since a gradient that it pushed is not at all servers yet."""
        if self.at and any(key[0] == worker for key in self.at):
            self.early.add(worker)
        return worker in self.early

    def awaited(self, worker: int) -> bool:
        """Whether a worker had pulled before its gradient was at all servers; forgets it."""
        there = worker in self.early
        self.early.discard(worker)
        return there

    def forget(self, worker: int, life: int) -> None:
        """A worker began again, with this number of its life: forget its earlier lives."""
        self.early.discard(worker)
        self.at = {key: found for key, found in self.at.items() if key[0] != worker or key[2] == life}
