"""The Python stacks of ranks that are at work, waiting, or stuck in native code.

The driver sends a signal; faulthandler, in the rank, writes the stack of the main thread behind the rank's page
(notes.py). It works even if the rank's interpreter does not run, or its lock is not free. The rank writes only file
names and line numbers: the source lines come from the driver, which has the cells of the notebook.
"""

from __future__ import annotations

import faulthandler
import linecache
import os
import re
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from minipar.cluster.launch import Process
from minipar.cluster.notes import Page

_ALL = signal.SIGRTMIN + 5 if sys.platform == "linux" else 0  # asks for all threads
SECONDS = 0.06  # that ranks have to answer; a rank that is stopped, or gone, never answers
_SHOWN = 8  # frames, the innermost ones
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_ESCAPED = re.compile(r"\\(?:x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})")
_ENTRY = f'"{Path(__file__).with_name("worker.py")}"'
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_COMM = os.path.join(_PACKAGE, "comm", "")
_THREADS = re.escape(str(Path(__file__).with_name("threads.py")))
_HELPERS = re.compile(rf"{os.sep}tqdm{os.sep}_monitor\.py|{_THREADS}")
_LIBRARIES = (_PACKAGE, os.path.dirname(os.__file__) + os.sep)
_TORCH = os.path.join("torch", "distributed", "")
_FILES = os.path.join("torch", "distributed", "checkpoint", "")  # writes and reads files; it waits in the others' code

Frame = tuple[str, int, str]  # file name, line number, function
Entry = tuple[int, Process, Page]


# In a rank


def answer(descriptor: int) -> None:
    """Write the main thread's stack to `descriptor` whenever the driver sends the signal, and on Linux those of all
    threads for another signal."""
    file = os.fdopen(descriptor, "w", closefd=False)
    faulthandler.register(signal.SIGUSR1, file, all_threads=False)
    if _ALL:
        faulthandler.register(_ALL, file, all_threads=True)


# In the driver


def ask(ranks: Iterable[Entry]) -> dict[int, list[Frame]]:
    """The stacks of these (rank, process, page), the outermost frame first; no entry for those that do not answer."""
    return {rank: _parse(text) for rank, text in _ask(ranks, signal.SIGUSR1).items()}


def has_foreign_threads(rank: Entry) -> bool:
    """Whether this (rank, process, page), whose threads all sleep, has or may have Python threads of the user: beside
    the main one and those of this package or of tqdm."""
    answers = _ask([rank], _ALL) if _ALL else {}
    if rank[0] not in answers:
        return True
    blocks = re.split(r"^(?:Current t|T)hread 0x.*$", answers[rank[0]], flags=re.MULTILINE)
    return not all(_ENTRY in block or _HELPERS.search(block) for block in blocks if block.strip())


def _ask(ranks: Iterable[Entry], number: int) -> dict[int, str]:
    """What faulthandler writes in these (rank, process, page)."""
    left = {}
    for rank, process, page in ranks:
        page.cut()
        process.signal(number)
        left[rank] = page
    found: dict[int, str] = {}
    deadline = time.monotonic() + SECONDS
    while left and time.monotonic() < deadline:
        for rank, page in list(left.items()):
            text = page.appended()
            if _complete(text):
                found[rank] = text
                del left[rank]
        if left:
            time.sleep(0.001)
    return found


def _complete(text: str) -> bool:
    """Whether the text has all frames above the rank's own loop (faulthandler writes 100 at most)."""
    return text.endswith("\n") and (_ENTRY in text or text.endswith("  ...\n"))


def _parse(text: str) -> list[Frame]:
    """What faulthandler wrote, without the rank's own loop."""
    frames = []
    for line in text.splitlines():
        match = _FRAME.fullmatch(line)
        if match is None:
            continue
        if f'"{match[1]}"' == _ENTRY:
            break
        name = _ESCAPED.sub(lambda escaped: chr(int(escaped[0][2:], 16)), match[1])
        frames.append((name, int(match[2]), match[3]))
    return frames[::-1]


def waits_in_torch(frames: list[Frame]) -> bool:
    """Whether a stack ends in torch's own communication."""
    return bool(frames) and _TORCH in frames[-1][0] and _FILES not in frames[-1][0]


def where(frames: list[Frame]) -> str:
    """The innermost line of a stack in the user's own code, or else the innermost line; "" for an empty stack."""
    installed = f"{os.sep}site-packages{os.sep}"
    own = [frame for frame in frames if not frame[0].startswith(_LIBRARIES) and installed not in frame[0]]
    return text(own[-1:] or frames[-1:])


def text(frames: list[Frame], indent: str = "  ") -> str:
    """A stack as Python would print it, without the inside of the communicator."""
    inside = next((k for k, frame in enumerate(frames) if frame[0].startswith(_COMM)), len(frames))
    shown = frames[:inside] or frames
    own = [frame for frame in shown if not frame[0].startswith(_PACKAGE)]
    lines = []
    for name, number, function in (own or shown)[-_SHOWN:]:
        lines.append(f'{indent}File "{name}", line {number}, in {function}')
        source = linecache.getline(name, number).strip()
        if source:
            lines.append(f"{indent}  {source}")
    return "\n".join(lines)


def cpu_and_state(pid: int) -> tuple[int, str]:
    """Ticks of CPU time that a process has used, and its state as Linux names it ("T": stopped); (0, "") where
    that is not known."""
    if sys.platform != "linux":
        return 0, ""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0, ""
    return int(fields[11]) + int(fields[12]), fields[0]


def stopped(pid: int) -> bool:
    """Whether a process of this machine was stopped (SIGSTOP): it does nothing until it is continued. False where that
    is not known, and for one that a debugger holds."""
    return cpu_and_state(pid)[1] == "T"


def sleeps(pid: int) -> bool:
    """Whether every thread of a process waits for an event; False where that is not known."""
    try:
        tasks = [Path(f"/proc/{pid}/task/{task}/stat").read_text() for task in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return False
    return all(task.rpartition(")")[2].split()[0] == "S" for task in tasks)
