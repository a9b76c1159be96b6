"""The result of a check, also of an answer that raised an exception."""

from __future__ import annotations

import os
import textwrap
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import minipar

WIDTH = 88
_OURS = tuple(str(folder) + os.sep for folder in (Path(minipar.__file__).parent, Path(__file__).parents[2]))


@dataclass(frozen=True)
class Verdict:
    """The result of a check. It is shown in words, and true if the answer passed: `assert check(...)` grades it.

    reason     one sentence: what was met, or what is wrong
    hint       how to find the mistake
    evidence   lines of the program, or the line where the answer's own code failed
    """

    passed: bool
    reason: str
    hint: str = ""
    evidence: str = ""

    def __bool__(self) -> bool:
        return self.passed

    def __repr__(self) -> str:
        lines = [f"{'passed' if self.passed else 'not yet'}: {self.reason}"]
        lines += ["  " + line for line in self.evidence.splitlines()]
        lines += [f"hint: {self.hint}"] if self.hint else []
        # A notebook breaks longer lines in the middle of a word.
        return "\n".join(textwrap.fill(line, WIDTH, subsequent_indent="      ") for line in lines)


class Task(Protocol):
    """What an exercise asks for."""

    def judge(self, answer: Any) -> Verdict: ...


def raised(error: Exception, what: str) -> Verdict:
    """A verdict on an answer that raised an exception: the exception, and the last line of the answer that led to it.

    what   the call that raised it, such as "for stages=4 your function"
    """
    if isinstance(error, NotImplementedError):
        return Verdict(False, "nothing is written here yet", "put your own lines in the place of the `raise`")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_OURS)]
    line = f"line {frames[-1].lineno}: {frames[-1].line}" if frames and frames[-1].line else ""
    hint = "check its arguments" if isinstance(error, TypeError) and not frames else "mend that line first"
    if "NoneType" in str(error):
        hint = (
            "something is None there: a `.grad` is, until a backward has reached it, and for a tensor without "
            "requires_grad; so is what a function without `return` gives"
        )
    reason = str(getattr(error, "reason", error))
    return Verdict(False, f"{what} raised {type(error).__name__}: {reason}", hint, line)
