"""When a parameter server applies gradients, and when it answers: the simulator and real servers follow this rule.

A worker is a replica, of one rank: it has pushed when all servers have its gradient. Its clock is the number of its
next step; the version is the number of updates so far.

    sync          update v takes the gradients of step v of all workers; a worker that has pushed waits for the update
    async         every gradient is an update of its own, at once; nobody waits
    ssp:S         as async, but a worker whose clock is more than S ahead of the slowest one's waits before it pulls
                  (Ho et al., NIPS 2013: a gradient of step c has seen every update up to step c - S - 1)
    k-of-n:K/N    update v takes the first K gradients of step v; later ones are dropped, and their workers continue
                  with the newest version (Chen et al. 2016, backup workers)

All workers are members from the start, even before the server hears from them: otherwise the first worker would train
alone. One that dies stays a member until it comes back and finishes. An update uses the gradient of the mean loss over
all rows that the gradients in it were computed from.
"""

from __future__ import annotations

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
        """The mode that `text` names, for so many workers. Errors: PlanError, which says what is possible."""
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
        """The largest number of updates between a worker's parameters and its gradient; None: any number.

        With ssp each other worker can push at most 2 S + 1 times in between. At the pull its clock was at most S behind
        the worker's clock, and it cannot get more than S + 1 ahead of it.
        """
        return {"async": None, "ssp": (workers - 1) * (2 * self.bound + 1)}.get(self.kind, 0)


SYNC = Mode()


class Kind(IntEnum):
    """What happened, in the order of a server's log."""

    JOIN = 1  # a worker connects, for the first time or again
    ANSWER = 2  # a worker gets the parameters of `version`, to work on `step`
    TAKE = 3  # a worker's gradient of `step` goes into update `version`
    DROP = 4  # a worker's gradient came too late, when `version` updates had been made
    APPLY = 5  # update `version` is made
    LEAVE = 6  # a worker has finished: nobody waits for it any longer


JOIN, ANSWER, TAKE, DROP, APPLY, LEAVE = Kind  # (module variables are looked up faster than members of an Enum)


class Row(NamedTuple):
    """One line of the servers' log. All servers have the same log. In an APPLY, worker and step are -1."""

    kind: Kind
    worker: int
    step: int
    version: int


@dataclass
class Consistency:
    """The state of the rule. `join`, `push`, `ask` and `leave` tell it what workers did; `decide` says what to do
    next."""

    mode: Mode
    workers: int
    steps: int
    version: int = 0
    members: set[int] = field(default_factory=set)
    clocks: dict[int, int] = field(default_factory=dict)  # worker -> its clock, also if it is no member now
    pushed: dict[int, int] = field(default_factory=dict)  # worker -> step of its waiting gradient, in order of arrival
    absent: set[int] = field(
        default_factory=set
    )  # workers that have asked for nothing yet; the others wait for them before they begin
    asking: dict[int, None] = field(default_factory=dict)  # workers that wait for parameters, in order of asking

    def __post_init__(self) -> None:
        self.each = self.mode.each
        self.members.update(range(self.workers))
        self.clocks.update(dict.fromkeys(range(self.workers), 0))

    # what workers did

    def join(self, worker: int) -> Row:
        """A worker connects, for the first time or again. In ssp a worker that nobody expected gets the slowest
        member's clock."""
        clock = self.clocks.get(worker, 0)
        if worker not in self.members and self.members and self.mode.kind == "ssp":
            clock = max(clock, self._slowest())
        self.clocks[worker] = clock
        self.members.add(worker)
        self.asking.pop(worker, None)
        return Row(JOIN, worker, self._step(worker), self.version)

    def push(self, worker: int, step: int) -> None:
        """The whole gradient of a worker's step has arrived."""
        if not self.known(worker, step):
            self.pushed[worker] = step

    def known(self, worker: int, step: int) -> bool:
        """Whether this gradient has arrived before: then this second copy is not needed."""
        return self.pushed.get(worker) == step or step < self.clocks.get(worker, 0)

    def ask(self, worker: int) -> None:
        """A worker asks for the parameters of its next step."""
        self.absent.discard(worker)
        self.asking[worker] = None

    def leave(self, worker: int) -> Row:
        """A worker has finished, so that nobody waits for it any longer."""
        self.members.discard(worker)
        return Row(LEAVE, worker, self.clocks[worker], self.version)

    @property
    def over(self) -> bool:
        """Whether no worker takes part any more."""
        return not self.members

    # what to do next

    def decide(self) -> list[Row]:
        """The next action that is ready: an update (its TAKEs and APPLY), a DROP or an ANSWER. An empty list means:
        wait."""
        rows = self._update() if self.pushed else []
        if not rows and self.asking and not self.absent:
            rows = self._reply()
        return rows

    def _update(self) -> list[Row]:
        """An update or a DROP of gradients that have arrived; empty if none is ready."""
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
            first = sorted(ready[:need])  # summed in order of workers: in sync mode the order of arrival changes no bit
            return self._note([*(Row(TAKE, w, self.version, self.version) for w in first), self._apply()])
        return []

    def _reply(self) -> list[Row]:
        """An ANSWER to the first asking worker that may get parameters; empty if there is none."""
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
        """How far a worker's clock is ahead of the slowest member's: with ssp at most S at a pull, S + 1 after a
        push."""
        return self.clocks[worker] - min(self.clocks[w] for w in self.members | {worker})

    def _note(self, rows: list[Row]) -> list[Row]:
        for row in rows:
            self.follow(row)
        return rows

    def follow(self, row: Row) -> None:
        """Change the state as a row of the log says: a row just decided here, or one read from a recorded log."""
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
