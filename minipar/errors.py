"""Every error that minipar raises on purpose: one line first, details after it.

The first line names the key, its value, and what is possible instead; `details` (a schedule excerpt, a remote
traceback) follow on their own lines, so that a notebook shows the reason first.
"""

from __future__ import annotations

import sys
import sysconfig
import traceback
from pathlib import Path

# Folders whose lines say nothing about a mistake in a plan.
_INSIDE = {"site-packages", "minipar_course", "minipar_widgets"}


class MiniparError(Exception):
    """Base class. `str(error)` is the one-line reason, then the details."""

    def __init__(self, reason: str, details: str = "") -> None:
        super().__init__(reason, details)
        self.reason = reason
        self.details = details

    def __str__(self) -> str:
        return f"{self.reason}\n{self.details}" if self.details else self.reason

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of its traceback: the lines of the user that led here, then the reason.

        The inside of minipar is left out, because it says nothing to somebody who made a mistake in a plan.
        `%xmode Verbose` shows everything.
        """
        shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
        if shell is not None and shell.InteractiveTB.mode == "Verbose":
            whole: list[str] = shell.InteractiveTB.structured_traceback(type(self), self, self.__traceback__)
            return whole
        paths = sysconfig.get_paths()
        hidden = (str(Path(__file__).parent), paths["stdlib"], paths["purelib"], paths["platlib"], "<string>")
        lines = []
        for frame in traceback.extract_tb(self.__traceback__):
            if not frame.filename.startswith(hidden) and not _INSIDE.intersection(Path(frame.filename).parts):
                cell = shell.compile.format_code_name(frame.filename) if shell is not None else None
                where = f"{' '.join(cell)}" if cell else f'File "{frame.filename}"'
                lines.append(f"{where}, line {frame.lineno}, in {frame.name}\n    {frame.line}")
        return [*lines, f"{type(self).__name__}: {self}"]


class PlanError(MiniparError):
    """An impossible plan: a bad key, a bad value, or sizes that do not fit together.

    operator   the one of a layer that cannot be divided so; "" if the error is about something else
    shared     the parameter that layers share, and would have in different forms
    layer      the number of the layer that ranks cannot share so; None if the error is about something else
    """

    operator: str = ""
    shared: str = ""
    layer: int | None = None


class ProgramError(MiniparError):
    """A program that cannot run, with the shortest explanation of why not.

    places   (rank, index) of the instructions that it names, if any
    """

    places: tuple[tuple[int, int], ...] = ()


class RankError(MiniparError):
    """A rank misused something, or its exception could not be sent to the driver as it was."""


class NotFinite(RankError):
    """The loss of a micro-batch is not a number, or infinite.

    step, rank, microbatch   where it was found, before the update of that step
    """

    step: int = -1
    rank: int = -1
    microbatch: int = -1


class CheckError(MiniparError):
    """A run differs from plain torch by more than rounding.

    step        the first one in which it does
    parameter   the one that differs most; "" where none does
    """

    step: int = -1
    parameter: str = ""


class CollectiveMismatch(RankError):
    """Ranks of a group started different collectives; nothing was sent. The error names the collective of each rank."""


class ServerClosed(RankError):
    """A parameter server got a request after it had ended."""


class RankDied(MiniparError):
    """A rank's process ended without an answer (killed, crashed, out of memory)."""


class DeviceOutOfMemory(MiniparError, MemoryError):
    """A rank needed more than its device holds.

    rank, instruction   where it happened
    capacity, needed    bytes that the device has, and that would have been live
    by_kind             bytes in use by kind, the allocation that crossed the limit included
    ways_out            changes that would make it fit
    """

    rank: int = -1
    instruction: str = ""
    capacity: int = 0
    needed: int = 0
    by_kind: dict[str, int] = {}  # noqa: RUF012
    ways_out: tuple[str, ...] = ()


class StoreError(MiniparError):
    """A slower tier (host memory, disk) has no room, cannot be written, or returned other data than were written."""


class SaveError(MiniparError):
    """A run could not be saved, or a saved run does not exist, is damaged, or is of another model."""


class Deadlock(MiniparError):
    """Ranks wait for each other and none can go on."""
