"""Every error minipar raises on purpose: one line first, details after.

The first line names the thing, the value and the way out; `details` (a schedule excerpt, a remote traceback)
follows on its own lines, so that a notebook shows the reason before the evidence.
"""

from __future__ import annotations


class MiniparError(Exception):
    """Base class. `str(error)` is the one-line reason, then the details."""

    def __init__(self, reason: str, details: str = "") -> None:
        super().__init__(reason, details)
        self.reason = reason
        self.details = details

    def __str__(self) -> str:
        return f"{self.reason}\n{self.details}" if self.details else self.reason


class PlanError(MiniparError):
    """A plan that cannot be: a bad key, a bad value, or sizes that do not fit together."""


class ProgramError(MiniparError):
    """A program that cannot run, with the shortest explanation of why not."""


class RankError(MiniparError):
    """A rank misused something, or its exception could not be brought to the driver as it was."""


class RankDied(MiniparError):
    """A rank's process ended without an answer (killed, crashed, out of memory)."""


class Deadlock(MiniparError):
    """Ranks wait for each other and none can go on."""
