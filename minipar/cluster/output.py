"""Show what ranks print, line by line, with the rank's name: the same line of several ranks once, progress of one rank.

A line is held for `HOLD` seconds, or until all ranks of the run have printed it, and then shown for all that have:
`[ranks 0-3] loaded`. The lines of a rank stay in order. Progress bars, which rewrite their line by carriage returns,
are shown for the first rank of the run only; if it has none, finished ones of others are shown as the run ends. A run
can have other rules (`Show`).
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

HOLD = 0.25  # seconds: nobody notices, and short runs always look the same
_REDRAW = 0.1  # seconds between two states of a progress bar
_AHEAD = 50  # in how many lines of another rank the same line is searched
_CHUNK = 1 << 16
_DRAIN = 1 << 26  # bytes read at most at the end of a run; a process that a rank started may print for ever
_LONGEST = 1 << 20  # bytes of a line; a longer one is cut, since it may never end
_CURSOR = re.compile(r"\x1b\[[0-9;]*[A-HJKf]")  # cursor moves, which make no sense among lines of several ranks


class _Printed(NamedTuple):
    text: str
    when: float


@dataclass(frozen=True)
class Show:
    """How the output of a run is shown.

    most    characters of each rank that are shown, the rest is only counted; None: all
    quiet   nothing is shown
    """

    most: int | None = None
    quiet: bool = False


USUAL = Show()


@dataclass(eq=False)
class Output:
    """What the ranks of one cluster have printed and is not shown yet."""

    _held: dict[int, deque[_Printed]] = field(default_factory=dict)
    _active: tuple[int, ...] = ()
    _bar: str = ""  # the present state of the first rank's bar
    _has_bars: bool = False  # whether the first rank has shown one in this run
    _aside: list[tuple[int, str]] = field(default_factory=list)  # finished bars of other ranks
    _drawn: str = ""  # the text in the last line of the screen
    _drawn_at: float = 0.0
    _how: Show = USUAL
    _taken: Counter[int] = field(default_factory=Counter)  # characters of each rank that are shown, or will be
    _cut: Counter[int] = field(default_factory=Counter)  # those that are not

    def begin(self, ranks: Iterable[int], how: Show = USUAL) -> None:
        """A new run of these ranks: lines are folded among them."""
        self.flush()
        self._how = how
        self._active = tuple(sorted(ranks))
        self._has_bars = False

    def line(self, rank: int, text: str) -> None:
        """A line without its end."""
        if self._has_room(rank, len(text) + 1):
            self._held.setdefault(rank, deque()).append(_Printed(text, time.monotonic()))

    def bar(self, rank: int, text: str) -> None:
        """The present state of a progress bar; "" if the bar was erased."""
        if rank in self._active[:1] and not self._how.quiet:
            self._bar, self._has_bars = text, True

    def bar_ended(self, rank: int, text: str) -> None:
        """The last state of a progress bar."""
        if rank in self._active[:1]:
            self.bar(rank, "")
            self.line(rank, text)
        else:
            self._aside.append((rank, text))

    def _has_room(self, rank: int, size: int) -> bool:
        """Whether so many characters more of a rank are shown. They are counted."""
        most = self._how.most
        room = most is None or (not self._cut[rank] and self._taken[rank] + size <= most)
        (self._taken if room else self._cut)[rank] += size
        return room and not self._how.quiet

    def show(self) -> float | None:
        """Print what is due, all at once. Returns the seconds until something else is; None if there is nothing."""
        if self._empty:
            return None
        self._write(self._fold(time.monotonic()))
        due = [self._due(held) for held in self._held.values() if held]
        if self._wanted != self._drawn:
            due.append(self._drawn_at + _REDRAW)
        return max(0.0, min(due) - time.monotonic()) if due else None

    def flush(self) -> None:
        """Print everything."""
        if self._empty:
            return
        if self._bar:  # (the rank ended before its bar did)
            self.bar_ended(self._active[0], self._bar)
        for rank, text in self._aside:
            if not self._has_bars:
                self.line(rank, text)
        self._aside.clear()
        lines = self._fold(float("inf"))
        if not self._how.quiet:
            cut = sorted((+self._cut).items())
            lines += [f"[rank {rank}] ... and {count:,} characters more" for rank, count in cut]
        self._taken.clear()
        self._cut.clear()
        self._write(lines)

    @property
    def _empty(self) -> bool:
        """Whether nothing was printed since `flush`, and no bar is on the screen."""
        return not (self._taken or self._cut or self._bar or self._drawn or self._aside)

    def _due(self, held: deque[_Printed]) -> float:
        """When the first of these lines has to be shown."""
        return held[0].when + (HOLD if len(self._active) > 1 else 0.0)

    @property
    def _wanted(self) -> str:
        return f"[rank {self._active[0]}] {self._bar}" if self._bar else ""

    def _fold(self, now: float) -> list[str]:
        shown: list[str] = []
        while True:
            waiting = {rank: held for rank, held in self._held.items() if held}
            if not waiting:
                return shown
            due = [rank for rank, held in waiting.items() if self._due(held) <= now]
            text = waiting[min(due or waiting)][0].text  # by rank, so that short runs always look the same
            heads = [rank for rank, held in waiting.items() if held[0].text == text]
            if not due and len(heads) < len(self._active):
                return shown
            group = []
            for rank, held in sorted(waiting.items()):
                depth = next((k for k, line in enumerate(held) if k > _AHEAD or line.text == text), len(held))
                if depth < len(held) and held[depth].text == text:
                    shown += [f"[rank {rank}] {held.popleft().text}" for _ in range(depth)]
                    held.popleft()
                    group.append(rank)
            shown.append(f"[{name_ranks(group)}] {text}")

    def _write(self, lines: list[str]) -> None:
        bar = self._wanted
        redraw = bar != self._drawn and (not bar or time.monotonic() >= self._drawn_at + _REDRAW)
        if not lines and not redraw:
            return
        parts = []
        if self._drawn:
            parts.append("\r" + " " * len(self._drawn) + "\r")
        parts += [f"{line}\n" for line in lines]
        parts.append(bar)
        self._drawn, self._drawn_at = bar, time.monotonic()
        if not getattr(sys.stdout, "closed", sys.stdout is None):  # (a daemon has none)
            sys.stdout.write("".join(parts))
            sys.stdout.flush()


def name_ranks(ranks: Iterable[int]) -> str:
    """`rank 2`, `ranks 0-3`, `ranks 0, 2`."""
    ranks = sorted(ranks)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"


@dataclass(eq=False)
class Printer:
    """Reads one pipe of one rank, which never blocks; gives whole lines and states of progress bars to the Output."""

    rank: int
    descriptor: int
    output: Output
    open: bool = True
    _rest: bytes = b""

    def pump(self, limit: int = _CHUNK) -> None:
        """Read the output that has arrived, at most about `limit` bytes; never blocks."""
        total = 0
        while self.open and total < limit:
            try:
                data = os.read(self.descriptor, _CHUNK)
            except BlockingIOError:
                break
            self.open = bool(data)
            total += len(data)
            self.take(data)

    def take(self, data: bytes) -> None:
        """This has been printed."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST and b"\r" not in self._rest:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            self._complete(line)
        before, back, state = self._rest.rpartition(b"\r")
        if back and (state or before):
            self._rest = back + state  # (earlier states are not needed any more)
            self.output.bar(self.rank, _text(state).rstrip())

    def finish(self) -> None:
        """Read all output that has arrived, also a last line without an end."""
        self.pump(_DRAIN)
        rest, self._rest = self._rest, b""
        if rest.strip():
            self._complete(rest)

    def _complete(self, line: bytes) -> None:
        _, back, state = line.rstrip(b"\r").rpartition(b"\r")
        text = _text(state)
        if not back:
            if text or b"\x1b" not in line:  # (a line of cursor moves alone is not shown)
                self.output.line(self.rank, text)
        elif text.strip():
            self.output.bar_ended(self.rank, text.rstrip())
        else:
            self.output.bar(self.rank, "")


def _text(data: bytes) -> str:
    return _CURSOR.sub("", data.decode("utf-8", "replace"))
