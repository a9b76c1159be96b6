"""Exercises in a page, without Jupyter and without ranks: the cell that a reader filled in, checked by its own task.

    checked("from minipar_course.exercises import pipelines as tasks", "def fewest(stages, bubble): ...")

Errors in the text are verdicts, too.
"""

from __future__ import annotations

import ast
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from minipar_course import exercise
from minipar_course.exercises.kinds.verdict import Verdict
from minipar_widgets.writing import FILE, line_of


def checked(imports: str, code: str) -> tuple[bool, str, int]:
    """Whether a cell passes the tasks that it checks, the verdict in words, and the line of an error (0: none).

    imports   those of the lesson; what is not in a page, such as torch, is left out
    """
    found: list[Verdict] = []

    def check(answer: Any, task: Any) -> Verdict:
        found.append(exercise.check(answer, task))
        return found[-1]

    space: dict[str, Any] = {"__name__": "__main__"}
    for part in ast.parse(imports).body:
        with suppress(ImportError):
            exec(compile(ast.Module([part], []), "imports", "exec"), space)
    space["exercise"] = SimpleNamespace(**{**vars(exercise), "check": check})
    try:
        exec(compile(code, FILE, "exec"), space)
    except SyntaxError as error:
        return False, f"not yet: {error.msg}", error.lineno or 0
    except Exception as error:
        return False, f"not yet: {type(error).__name__}: {error}", line_of(error)
    if not found:
        return False, "not yet: the last line, exercise.check(...), is missing", 0
    return all(found), "\n".join(map(repr, found)), 0
