"""How an exception gets from a rank to the driver: captured as plain data, sorted by weight, and raised again.

A rank cannot see the source of a notebook cell, so it sends file names and line numbers, and the driver, which holds
the cells, writes the traceback.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import cloudpickle

from minipar.cluster import stacks
from minipar.cluster.output import name_ranks
from minipar.errors import Deadlock, MiniparError, RankDied, RankError

AT_WORK = "at work"  # what a rank does that waits for nobody
_CAUSE = "The above exception was the direct cause of the following exception:"
_CONTEXT = "During handling of the above exception, another exception occurred:"
# Words by which gloo, NCCL and the stores report the loss of a peer, in RuntimeErrors.
_LOST_PEER = re.compile(r"gloo|nccl|by peer|connectfullmesh|socket|store->|timed out|broken pipe", re.IGNORECASE)
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_ENGINE = tuple(os.path.join(_PACKAGE, room, "") for room in ("comm", "cluster", "server"))
_TORCH = os.path.join("torch", "distributed", "")
_LIBRARIES, _INSTALLED = os.path.dirname(os.__file__) + os.sep, f"{os.sep}site-packages{os.sep}"


@dataclass(frozen=True)
class ChainedException:
    """One exception of a chain: how it is linked to the one before, its frames, and its own last lines."""

    link: str
    frames: tuple[tuple[str, int, str, str], ...]  # file name, line number, function, source line or ""
    text: str


@dataclass(frozen=True)
class Remote:
    """What a rank says about an exception."""

    name: str
    message: str
    segments: tuple[ChainedException, ...]
    pickled: bytes | None
    lost_peer: bool
    of_system: bool = False  # an OSError, MemoryError or RuntimeError


@dataclass(frozen=True)
class Failure:
    """How one rank failed: an exception, or (remote None) its death of this cause. `last`: what it did then."""

    rank: int
    remote: Remote | None
    cause: str = "ended without an answer"
    last: str = ""

    @property
    def reason(self) -> str:
        """What happened, in words that follow the rank's name."""
        if self.remote is None:
            return self.cause + (f"; last seen {self.last}" if self.last else "")
        return f"raised {self.remote.name}: {self.remote.message}"

    @property
    def lost_peer(self) -> bool:
        """Whether another rank that is gone was the reason."""
        return self.remote is not None and self.remote.lost_peer

    @property
    def line(self) -> str:
        """One line that names the rank and the reason."""
        return f"rank {self.rank} {self.reason}"


def capture(error: BaseException, hide: str) -> Remote:
    """In the rank: turn an exception into data. Frames of the file `hide` (the rank's own loop) are left out,
    and those of functions with a variable `__tracebackhide__`, as in pytest and IPython."""
    text = _text(error)
    message = _first_line(text)
    pickled: bytes | None = None
    if isinstance(error, SystemExit):
        message = f"sys.exit({'' if error.code is None else message}) was called; return instead"
    elif isinstance(error, Exception) and text is not None:
        with contextlib.suppress(Exception):  # the driver then raises RankError with the same text
            pickled = cloudpickle.dumps(error)
    name = type(error).__name__
    of_system = isinstance(error, OSError | MemoryError | RuntimeError) and not isinstance(error, MiniparError)
    return Remote(name, message, tuple(_segments(error, hide)), pickled, lost_peer(error), of_system)


def said(error: BaseException) -> str:
    """The class of an error and the first line of its text."""
    return f"{type(error).__name__}: {_first_line(_text(error))}"


def _first_line(text: str | None) -> str:
    return "(its text cannot be made)" if text is None else (text.strip() or "(no message)").splitlines()[0]


def _text(error: BaseException) -> str | None:
    """The text of an error; None if its own `__str__` fails."""
    try:
        return str(error)
    except BaseException:
        return None


def lost_peer(error: BaseException) -> bool:
    """Whether an error says that another rank is gone."""
    if isinstance(error, RuntimeError):
        return _LOST_PEER.search(_text(error) or "") is not None
    return isinstance(error, ConnectionError)


def _segments(error: BaseException, hide: str) -> list[ChainedException]:
    """The chain of an exception, the oldest first."""
    segments: list[ChainedException] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        older, link = current.__cause__, _CAUSE
        if older is None and not current.__suppress_context__:
            older, link = current.__context__, _CONTEXT
        text = "".join(traceback.format_exception_only(type(current), current))
        segments.append(ChainedException("" if older is None else link, _frames(current.__traceback__, hide), text))
        current = older
    return segments[::-1]


def _frames(tb: TracebackType | None, hide: str) -> tuple[tuple[str, int, str, str], ...]:
    found = []
    for frame, line_number in traceback.walk_tb(tb):
        code = frame.f_code
        if code.co_filename != hide and "__tracebackhide__" not in frame.f_locals:
            # (An interrupt can come at an instruction that belongs to no line: then there is no number, or -1.)
            number = line_number if line_number and line_number > 0 else code.co_firstlineno
            source = linecache.getline(code.co_filename, number, frame.f_globals).strip()
            found.append((code.co_filename, number, code.co_name, source))
    return tuple(found)


def traceback_text(remote: Remote) -> str:
    """In the driver: the remote traceback as Python would print it, with the lines of notebook cells."""
    parts: list[str] = []
    for segment in remote.segments:
        if segment.link:
            parts.append(f"\n{segment.link}\n\n")
        if segment.frames:
            parts.append("Traceback (most recent call last):\n")
            summary = traceback.StackSummary.from_list(
                [(file, number, name, source or None) for file, number, name, source in segment.frames]
            )
            parts.extend(summary.format())
        parts.append(segment.text)
    return "".join(parts).rstrip()


def root_cause(failures: list[Failure]) -> Failure:
    """The failure that explains the others: a death, else a rank's own exception, else a lost connection.

    A rank that loses its peer often reports first, so the order of arrival decides only among equals.
    """

    def weight(failure: Failure) -> int:
        if failure.remote is None:
            return 0
        return 2 if failure.lost_peer else 1

    return min(failures, key=weight)


def as_exception(failures: list[Failure], doing: dict[int, str], lost: Iterable[int]) -> Exception:
    """The exception to raise in the driver: the root cause's own where it can be rebuilt, with a note that says
    which rank raised it, its traceback there, and what became of the other ranks.

    `doing`: what the ranks did that had not failed by then; `lost`: those of them that had to be killed. For a rank
    that only lost its peer, the note has the place where it waited, but not its error.
    """
    root = root_cause(failures)
    also: dict[int, str] = {}
    doing = dict(doing)
    for failure in failures:
        remote = failure.remote
        if failure is root:
            continue
        if remote is not None and remote.lost_peer and not root.lost_peer:
            doing[failure.rank] = f"waiting for a peer, in vain:\n{place(remote)}"
        else:
            also[failure.rank] = failure.reason
    others = [f"also: {name_ranks(ranks)} {reason}" for reason, ranks in _folded(also)]
    others += [f"meanwhile {name_ranks(ranks)} {_was(ranks)} {what}" for what, ranks in _folded(doing)]
    others += lost_state(lost)
    if root.remote is None:
        return RankDied(root.line, "\n".join(others))
    note = "\n".join([f"raised on rank {root.rank}:", traceback_text(root.remote), *others])
    return rebuilt(None if _is_of_engine(root.remote) else root.remote.pickled, root.line, note)


def rebuilt(pickled: bytes | None, line: str, note: str) -> Exception:
    """An exception of another process, with a note; where it cannot be loaded, a RankError that says this line."""
    error: object = None
    if pickled is not None:
        with contextlib.suppress(Exception):  # such as a class whose __init__ takes other arguments than Exception's
            error = cloudpickle.loads(pickled)
    if not isinstance(error, Exception) or _text(error) is None:
        return RankError(line, note)
    if hasattr(error, "add_note"):  # Python 3.11 and later
        error.add_note(note)
    else:
        error.__cause__ = RankError(line, note)
    return error


def _is_of_engine(remote: Remote) -> bool:
    """Whether an error of the system, such as that no memory is left, was met by this package while ranks talk, and not
    by the user's code: then it gets a class and a line that name the rank."""
    if not remote.of_system or not remote.segments:
        return False
    for file, *_ in reversed(remote.segments[-1].frames):
        if file.startswith(_PACKAGE) or _TORCH in file:
            return file.startswith(_ENGINE) or _TORCH in file
        if not file.startswith(_LIBRARIES) and _INSTALLED not in file:
            return False
    return False


def as_deadlock(
    stuck: dict[int, str], ranks: Iterable[int], seconds: float, patience: float, lost: Iterable[int]
) -> Deadlock:
    """The error for ranks that wait for each other, or were stopped; `stuck`: what each one waits for, of the
    `ranks` of this run. Nothing has changed for so many `seconds`, as long as the driver's `patience` or less, if it
    is sure."""
    wait, *lines = who_waits(stuck, ranks)
    why = (
        f"{patience:g} s (cluster.patience)" if seconds >= patience else f"{seconds:.0f} s, and none of them can go on"
    )
    return Deadlock(f"{wait}: no progress for {why}", "\n".join([*lines, *lost_state(lost)]))


def who_waits(stuck: dict[int, str], ranks: Iterable[int]) -> list[str]:
    """A line that names the ranks that are `stuck`, and what each of the `ranks` of a run waits for; no line if none
    is."""
    waiting = [rank for rank, text in stuck.items() if text != AT_WORK]
    if not waiting:
        return []
    lines = [f"rank {rank}: {stuck.get(rank, 'finished')}" for rank in sorted({*ranks, *stuck})]
    if len(waiting) < len(stuck):
        return [f"{name_ranks(waiting)} cannot go on without help", *lines]
    wait = "waits" if len(waiting) == 1 else "wait"
    return [f"{name_ranks(waiting)} {wait} for what does not come", *lines]


def note_of(error: BaseException) -> str | None:
    """The note of an exception that `as_exception` made, without the ranks that only lost a peer; else None."""
    notes = [
        *getattr(error, "__notes__", ())[-1:],
        getattr(error, "details", ""),
        getattr(error.__cause__, "details", ""),
    ]
    for note in notes:
        if isinstance(note, str) and note.startswith("raised on rank "):
            lines = note.splitlines()
            return "\n".join(line for line in lines if not (line.startswith("also: ") and _LOST_PEER.search(line)))
    return None


def lost_state(ranks: Iterable[int]) -> list[str]:
    """A line that says which ranks had to be killed; no line if there are none."""
    names = sorted(ranks)
    if not names:
        return []
    return [f"{name_ranks(names)} did not come back in time and {_was(names)} killed: the state there is lost"]


def _folded(texts: dict[int, str]) -> list[tuple[str, list[int]]]:
    """Each different text once, with the ranks that have it."""
    found: dict[str, list[int]] = {}
    for rank in sorted(texts):
        found.setdefault(texts[rank], []).append(rank)
    return list(found.items())


def place(remote: Remote) -> str:
    """Where it was raised: the Python stack, the innermost call first."""
    return stacks.text([frame[:3] for frame in remote.segments[-1].frames]) if remote.segments else ""


def _was(ranks: list[int]) -> str:
    return "was" if len(ranks) == 1 else "were"
