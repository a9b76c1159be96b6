"""Collectives that start only when all ranks of the group have announced the same one.

gloo aborts the process when sizes differ, and mixes up bytes when dtypes or the order differ; NCCL hangs. So:

    iallreduce(x) on rank 0     announce | not all there: queued          | all there and equal: into gloo
    iallreduce(x) on rank 1                        announce | all there and equal: into gloo at once

A tensor of up to board.SMALL bytes is summed on the board itself, by every rank in the same order: it needs no other
communication than the announcement.

No rank enters the backend before it has seen that everyone's announcement (board.py) equals its own, so a mismatch can
never reach the backend. The caller does not wait for that. Three can start a queued collective: its rank's `wait`, the
rank's next collective, or a helper thread. All three run `progress`, which starts what it can, in order. On the last
rank to announce on a board of one machine, the collective starts at once.

A mismatch is an error on every rank of the group, and counts as done: the group goes on with the next collective.
A collective in the group's shared memory (arena.py) is not over when it has started: the same three continue it, by
`advance`. Ranks on several hosts announce through gloo (gloo_board.py), a number of eight bytes for each collective.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from minipar.cluster import worker
from minipar.cluster.threads import Helper
from minipar.comm.transport.arena import Arena, Exchange
from minipar.comm.transport.board import fingerprint
from minipar.comm.transport.interface import Board
from minipar.comm.transport.shared_memory import fence
from minipar.errors import CollectiveMismatch

# Both get the flags of all members, in their order.
Start = Callable[[list[bool]], Any]  # gives a torch Work or an Exchange, or None where nothing has to be waited for
Reduce = Callable[[list[torch.Tensor], list[bool]], Any]  # the same, from the small tensors of all
_SLICE = timedelta(milliseconds=50)  # of a wait in native code: an interrupt can come this late
_LOOKS = 8  # before it sleeps: what comes at once need not wake it
_NAP = 5e-4
_ALL_THERE = 0.1  # seconds that the others have to announce theirs, so that a mismatch names every rank's
_names: dict[str, int] = {}


@dataclass(eq=False)
class Collective:
    """One collective: announced, then started, then complete. What `Handle` calls a work."""

    matcher: Matcher
    text: str
    number: int
    hashed: int
    flag: bool
    start: Start | None
    small: tuple[torch.Tensor, Reduce] | None = None
    exchange: Exchange | None = None
    word: int = 0  # its entry on the board, once it is there
    work: Any = None
    error: BaseException | None = None
    calls: list[Callable[[], None]] = field(default_factory=list)

    @property
    def label(self) -> str:
        """What it is, and among which ranks."""
        return f"{self.text} over {','.join(map(str, self.matcher.members))}"

    def begin(self) -> None:
        """Start it in the backend. Called once, by `Matcher.progress`."""
        start, board = self.start, self.matcher.board
        assert start is not None
        flags = board.flags(self.number)
        try:
            if self.exchange is not None:
                self.exchange.arena.line_up(self.exchange)
                self.work = self.exchange
            elif self.small is not None:
                fence()
                like, reduce = self.small
                self.work = reduce([board.small(self.number, k, like) for k in range(len(flags))], flags)
            else:
                self.work = start(flags)
        except Exception as error:
            self.error = error
        self.start = None
        for call in self.calls:
            self._call_when_done(call)

    def wait(self) -> None:
        """Return when it is complete; an interrupt can come between the steps of the wait. RankError for a mismatch;
        RuntimeError when a peer is gone."""
        if self.start is not None:
            self.matcher.wait_until_started(self)
        if self.error is not None:
            raise self.error
        if self.work is None:
            return
        if isinstance(self.work, Exchange) or not self.matcher.sliced:
            self.work.wait()
            return
        while True:
            try:
                self.work.wait(_SLICE)
                return
            except RuntimeError:
                # The error is of the time limit, which does nothing else to a collective, or of the collective itself.
                if self.work.is_completed():
                    self.work.wait()
                    return
            self.matcher.check()

    def is_completed(self) -> bool:
        """Whether it is complete or has failed, without blocking."""
        if self.start is not None:
            self.matcher.progress()
        return self.start is None and (self.work is None or bool(self.work.is_completed()))

    def on_stream(self) -> bool:
        """Let the current stream of the GPU wait for it, if this group works on streams; returns whether it did."""
        if self.matcher.sliced or self.work is None:
            return False
        self.work.synchronize()
        return True

    def when_done(self, call: Callable[[], None]) -> None:
        """Call `call` when it is complete, from another thread; never, if the backend cannot do that. (NCCL's future
        is done when the work is in the stream: `on_stream` is for these.)"""
        if not self.matcher.sliced:
            return
        with self.matcher.lock:
            if self.start is not None:
                self.calls.append(call)
                return
        self._call_when_done(call)

    def _call_when_done(self, call: Callable[[], None]) -> None:
        if self.work is None:
            call()
        elif isinstance(self.work, Exchange):
            self.work.when_done(call)
        else:
            with contextlib.suppress(RuntimeError):  # (the backend cannot do that)
                self.work.get_future().add_done_callback(lambda _: call())


@dataclass(eq=False)
class Matcher:
    """The collectives of one group, in order. `sliced`: whether the calling thread itself waits for works (gloo).
    `starter`: continues what nobody waits for. `lost`: gives a member whose host is known to be cut off."""

    members: tuple[int, ...]
    board: Board
    sliced: bool
    starter: Starter
    lost: Callable[[], int | None] = lambda: None
    arena: Arena | None = None  # where the group has one
    lock: threading.RLock = field(default_factory=threading.RLock)
    _number: int = 0
    _announced: int = 0
    _queue: deque[Collective] = field(default_factory=deque)

    def submit(
        self,
        text: str,
        start: Start,
        key: str | None = None,
        flag: bool = False,
        small: tuple[torch.Tensor, Reduce] | None = None,
        unattended: bool = True,
        exchange: Exchange | None = None,
    ) -> Collective:
        """Announce a collective, which starts now or later: the `exchange` in shared memory, or the function for the
        `small` tensors of all ranks, or `start`.

        text         what it is, for errors; all ranks must agree in `key`, or in `text` if there is no key
        unattended   whether it must go on while nobody waits for it (False if the caller waits at once)

        What the backend refuses at once is raised here.
        """
        worker.check_whole()
        hashed = _names.get(key or text)
        if hashed is None:
            if len(_names) > 4096:
                _names.clear()
            hashed = _names[key or text] = fingerprint(key or text)
        with self.lock:
            self._number += 1
            one = Collective(self, text, self._number, hashed, flag, start, small, exchange)
            if exchange is not None and not self._queue:
                exchange.begin()
            self._queue.append(one)
            self.progress()
            if unattended and self.sliced and not self.idle:
                self.starter.watch(self)
        if not self.sliced and one.start is not None:  # NCCL orders its work by the calling thread's stream
            self.wait_until_started(one)
        if one.error is not None and not isinstance(one.error, CollectiveMismatch):
            raise one.error
        return one

    def progress(self) -> bool:
        """Start what can be started; returns whether anything is left in the queue."""
        board = self.board
        with self.lock:
            while self._queue:
                first = self._queue[0]
                try:
                    while self._announced < self._number and board.room(self._announced + 1):
                        self._announce(board, self._queue[self._announced + 1 - first.number])
                    same = board.compare(first.number, first.word) if first.word else None
                    if same is None:
                        return True
                    if not same:
                        first.error = self._mismatch(board, first.number)
                except RuntimeError as error:  # a member is gone
                    same, first.error = False, error
                self._queue.popleft()
                if same:
                    first.begin()
                else:
                    first.start = None
                    if self.arena is not None:
                        self.arena.realign(first.exchange.begun if first.exchange is not None else 0)
                board.settle(first.number)
            return False

    def advance(self) -> None:
        """Start what can be started, and continue what is under way in shared memory."""
        self.progress()
        if self.arena is not None and not self.arena.attended:  # two threads would only be in each other's way
            self.arena.run()

    @property
    def idle(self) -> bool:
        """Whether nothing is queued, and nothing under way in shared memory."""
        return not self._queue and (self.arena is None or self.arena.idle)

    def doze(self) -> None:
        """Sleep for a short time, or until another rank has done its part in shared memory."""
        if self.arena is not None and not self._queue and not self.arena.attended:
            self.arena.sleep()
        else:
            time.sleep(_NAP)

    def _announce(self, board: Board, one: Collective) -> None:
        self._announced += 1
        small = None if one.small is None else one.small[0]
        one.word = board.announce(one.number, one.hashed, one.flag, one.text, small)

    def wait_until_started(self, one: Collective) -> None:
        """Return when all ranks have announced the same collective, or one of them another one."""
        looks = 0
        while one.start is not None:
            self.progress()
            looks += 1
            if one.start is None or looks < _LOOKS:
                continue
            self.check()
            if one.word:
                self.board.sleep(one.number)
            else:
                time.sleep(_NAP)  # there was no room for it yet

    def check(self) -> None:
        """ConnectionError if a member's host is known to be cut off."""
        gone = self.lost()
        if gone is not None:
            raise ConnectionError(f"rank {gone} is gone, or its host is cut off")

    def _mismatch(self, board: Board, number: int) -> CollectiveMismatch:
        deadline = time.monotonic() + _ALL_THERE
        while not all(texts := board.texts(number)) and time.monotonic() < deadline:
            time.sleep(1e-3)
        return CollectiveMismatch(difference(board.members, texts))


def difference(members: tuple[int, ...], texts: list[str]) -> str:
    """What differs: "allreduce of a list of 2 int64 for sum" and the like, by rank."""
    known = {rank: text for rank, text in zip(members, texts, strict=True) if text}
    first = members[0] if members[0] in known else next(iter(known))
    others = [rank for rank in known if known[rank] != known[first]] or [rank for rank in known if rank != first]
    shown = [first, *others[:1], *others[1:]]
    names = {text.partition(" of ")[0] for text in known.values()}
    if len(names) == 1:
        calls = ", ".join(f"rank {rank} has {known[rank].partition(' of ')[2]}" for rank in shown)
        return f"{names.pop()}: ranks differ: {calls}"
    calls = ", ".join(f"rank {rank} calls {known[rank]}" for rank in shown)
    return f"ranks differ in their collectives (all must call the same ones, in one order): {calls}"


class Starter(Helper[Matcher]):
    """Starts queued collectives of all groups of a rank, and continues those in shared memory."""

    def turn(self) -> None:
        for matcher in list(self.waiting):
            matcher.advance()
            with matcher.lock, self.lock:  # so that nothing is queued between the check and the removal
                if matcher.idle:
                    self.waiting.discard(matcher)
        only = list(self.waiting)
        if len(only) == 1:
            only[0].doze()
        elif only:
            time.sleep(_NAP)
