"""When a parameter server applies gradients, and when it answers: the rule that simulator and real servers both follow.

A worker's clock is the number of its next step; the version is the number of updates so far.

    sync          update v takes the gradients of step v of all workers; who has pushed waits for it
    async         every gradient is an update of its own, at once; nobody waits
    ssp:S         the same, but a worker whose clock is more than S ahead of the slowest one's waits before it pulls
                  (Ho et al., NIPS 2013: a gradient of step c has seen every update up to step c - S - 1)
    k-of-n:K/N    update v takes the first K gradients of step v; what comes later is dropped, and its worker goes on
                  at the present version (Chen et al. 2016, backup workers)

Workers are members from the start, before they have been heard of: otherwise the first one would go on alone. One that
is removed is waited for no longer. An update is the gradient of the mean over the rows that it takes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from minipar.errors import PlanError

MODES = "sync, async, ssp:S, k-of-n:K/N"


@dataclass(frozen=True)
class Mode:
    """A mode as a plan spells it: `bound` is S of ssp, `count` and `of` are K and N of k-of-n."""

    kind: str = "sync"
    bound: int = 0
    count: int = 0
    of: int = 0

    @staticmethod
    def parse(text: object, workers: int) -> Mode:
        """A mode for so many workers; PlanError that says what is possible."""
        kind, _, rest = str(text).partition(":")
        if kind in ("sync", "async") and not rest:
            return Mode(kind)
        if kind == "ssp" and rest.isdecimal():
            return Mode(kind, bound=int(rest))
        count, _, of = rest.partition("/")
        if kind != "k-of-n" or not (count.isdecimal() and of.isdecimal()):
            raise PlanError(f"mode={text}: unknown; possible are {MODES}")
        if int(of) != workers:
            raise PlanError(f"mode={text}: N must be the number of workers, {workers}")
        if not 1 <= int(count) <= workers:
            raise PlanError(f"mode={text}: K must be from 1 to N, {workers}")
        return Mode(kind, count=int(count), of=int(of))

    def __str__(self) -> str:
        return {"ssp": f"ssp:{self.bound}", "k-of-n": f"k-of-n:{self.count}/{self.of}"}.get(self.kind, self.kind)

    @property
    def each(self) -> bool:
        """Whether every gradient is an update of its own."""
        return self.kind in ("async", "ssp")

    def staleness(self, workers: int) -> int | None:
        """The most updates that can come between a worker's parameters and its gradient; None: any number.

        With ssp each other worker can push at most 2 S + 1 times in between: its clock was at most S behind the
        worker's at the pull, and cannot get further than S + 1 ahead of it.
        """
        return {"async": None, "ssp": (workers - 1) * (2 * self.bound + 1)}.get(self.kind, 0)


SYNC = Mode()


class Kind(IntEnum):
    """What happened, in the order of a server's log."""

    JOIN = 1  # a worker is there (again)
    ANSWER = 2  # it gets the parameters of `version`, to work on `step`
    TAKE = 3  # its gradient of `step` goes into update `version`
    DROP = 4  # its gradient came too late, when `version` updates had been made
    APPLY = 5  # update `version` is made
    LEAVE = 6  # it is done
    REMOVE = 7  # it is waited for no longer


JOIN, ANSWER, TAKE, DROP, APPLY, LEAVE, REMOVE = Kind  # (names of their own are found faster than members)


class Row(NamedTuple):
    """One line of the order in which servers did things; every server does the same. APPLY has no worker and step."""

    kind: Kind
    worker: int
    step: int
    version: int


@dataclass
class Consistency:
    """The state of the rule. `happened` notes what came from outside; `decide` says what is to be done next."""

    mode: Mode
    workers: int
    steps: int
    version: int = 0
    members: set[int] = field(default_factory=set)
    clocks: dict[int, int] = field(default_factory=dict)  # of all who were ever members
    pushed: dict[int, int] = field(default_factory=dict)  # worker -> step of a gradient that waits, in order of arrival
    absent: set[int] = field(
        default_factory=set
    )  # who have asked for nothing yet; the others wait for them before they begin
    asking: dict[int, None] = field(default_factory=dict)  # workers that wait for parameters, in order of asking

    def __post_init__(self) -> None:
        self.each = self.mode.each
        self.members.update(range(self.workers))
        self.clocks.update(dict.fromkeys(range(self.workers), 0))

    # what comes from outside

    def join(self, worker: int) -> Row:
        """A worker is there, for the first time or again. One that was removed from ssp begins with the slowest."""
        clock = self.clocks.get(worker, 0)
        if worker not in self.members and self.members and self.mode.kind == "ssp":
            clock = max(clock, self._slowest())
        self.clocks[worker] = clock
        self.members.add(worker)
        self.asking.pop(worker, None)
        return Row(JOIN, worker, self._step(worker), self.version)

    def push(self, worker: int, step: int) -> None:
        """The whole gradient of a worker's step is there."""
        if not self.known(worker, step):
            self.pushed[worker] = step

    def known(self, worker: int, step: int) -> bool:
        """Whether this gradient has been here before: then a second one is of no use."""
        return self.pushed.get(worker) == step or step < self.clocks.get(worker, 0)

    def ask(self, worker: int) -> None:
        """A worker wants the parameters of its next step."""
        self.absent.discard(worker)
        self.asking[worker] = None

    def leave(self, worker: int, removed: bool = False) -> Row:
        """A worker is done, or is no longer waited for."""
        self.members.discard(worker)
        self.absent.discard(worker)
        self.asking.pop(worker, None)
        return Row(REMOVE if removed else LEAVE, worker, self.clocks.get(worker, 0), self.version)

    # what is to be done

    def decide(self) -> list[Row]:
        """The next thing that is ready: an update (its TAKEs and APPLY), a DROP, an ANSWER; empty: wait."""
        rows = self._update() if self.pushed else []
        if not rows and self.asking and not self.absent:
            rows = self._reply()
        return rows

    def _update(self) -> list[Row]:
        """What becomes of gradients that are there."""
        for worker, step in self.pushed.items():
            if self.each:
                return self._note([Row(TAKE, worker, step, self.version), self._apply()])
            if step < self.version:
                return self._note([Row(DROP, worker, step, self.version)])
        ready = [worker for worker, step in self.pushed.items() if step == self.version]
        need = len(self.members.union(ready))
        if self.mode.kind == "k-of-n":
            need = min(need, self.mode.count)
        if ready and len(ready) >= need:
            first = sorted(ready[:need])  # summed in the order of workers, so that arrival changes no bit of sync
            return self._note([*(Row(TAKE, w, self.version, self.version) for w in first), self._apply()])
        return []

    def _reply(self) -> list[Row]:
        """Whoever may have parameters: the first of those who ask."""
        for worker in self.asking:
            if worker not in self.pushed and self._may_go_on(worker):
                return self._note([Row(ANSWER, worker, self._step(worker), self.version)])
        return []

    def _apply(self) -> Row:
        return Row(APPLY, -1, -1, self.version)

    def _step(self, worker: int) -> int:
        return self.clocks[worker] if self.each else self.version

    def _may_go_on(self, worker: int) -> bool:
        clock = self.clocks[worker]
        return self.mode.kind != "ssp" or clock >= self.steps or self.gap(worker) <= self.mode.bound

    def _slowest(self) -> int:
        return min(self.clocks[w] for w in self.members)

    def gap(self, worker: int) -> int:
        """How far a worker's clock is ahead of the slowest member's. At a pull it is at most S, after a push S + 1."""
        return self.clocks[worker] - min(self.clocks[w] for w in self.members | {worker})

    def _note(self, rows: list[Row]) -> list[Row]:
        for row in rows:
            self.follow(row)
        return rows

    def follow(self, row: Row) -> None:
        """Come to the state after a row: of one's own decision, or of an order that is read again."""
        kind, worker, step, _ = row
        if kind is APPLY:
            self.version += 1
        elif kind is TAKE or kind is DROP:
            self.pushed.pop(worker, None)
            self.clocks[worker] = step + 1
        elif kind is ANSWER:
            self.asking.pop(worker, None)
        elif kind is JOIN:
            self.members.add(worker)
            if self.each:
                self.clocks[worker] = step
            else:
                self.clocks.setdefault(worker, 0)
        else:
            self.members.discard(worker)
            self.asking.pop(worker, None)


def again(mode: Mode, workers: int, steps: int, order: Iterable[Row]) -> Consistency:
    """The state of the rule after an order."""
    rule = Consistency(mode, workers, steps)
    for row in order:
        rule.follow(row)
    return rule
