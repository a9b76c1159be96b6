"""Make the exercises of a lesson from their one source, a notebook with solutions: lessons/solutions/NN_name.ipynb.

    | cell, in nbgrader's convention                         | in the lesson           | in an assignment  |
    |--------------------------------------------------------|-------------------------|-------------------|
    | one code cell of imports                               | as it is                | as it is          |
    | ### Exercise 1: ...                                    | as it is                | as it is          |
    | answer: functions, ### BEGIN SOLUTION ... END SOLUTION | one cell: stubs, and    | stubs             |
    | check: verdict = exercise.check(mine, tasks.NAME), ... | exercise.check(mine, ...) | no hidden tests |
    | hints 1 and 2, folded, in the text                     | and a third: the code   | as it is          |

A stub is the function with `raise NotImplementedError` in the place of its solution. Here a notebook is the JSON of its
file (nbformat 4.5). Cells tagged `solution`, such as a remark on the answer, are left out of both.

An exercise has hints in three levels: a nudge, the formula, the code. The third is the solution itself, which is always
right; an assignment for a class does not have it.
"""

from __future__ import annotations

import copy
import re
from typing import Any

from minipar.errors import PlanError

Notebook = dict[str, Any]
Cell = dict[str, Any]

STUB = 'raise NotImplementedError("your code here")'
INSTALL = """import importlib.util

# Where minipar is missing, as on Google Colab, install it from the checkout this is in.
if importlib.util.find_spec("minipar") is None:
    %pip install --quiet anywidget .."""
HINT = "<details><summary>Hint "
_MARK = re.compile(r"(\s*)### (BEGIN|END) (SOLUTION|HIDDEN TESTS)\s*")
_CHECK = re.compile(r"^verdict = (exercise\.check\(.*\))$", re.MULTILINE)
_PART = re.compile(r"## (\d+ )?Exercises\b")


def source(cell: Cell) -> str:
    return "".join(cell["source"])


def stripped(text: str) -> str:
    """A cell's text with a stub in the place of each solution, and without hidden tests. Errors: PlanError."""
    kept: list[str] = []
    region = ""
    for line in text.split("\n"):
        mark = _MARK.fullmatch(line)
        if mark is None:
            kept += [] if region else [line]
        elif mark[2] == "BEGIN" and not region:
            region = mark[3]
            if region == "SOLUTION":
                if not mark[1]:
                    raise PlanError(f"a solution outside of a function would leave no stub: {text.splitlines()[0]}")
                kept.append(mark[1] + STUB)
        elif mark[2] == "END" and region == mark[3]:
            region = ""
        else:
            raise PlanError(f"`{line.strip()}` does not fit what is before it")
    if region:
        raise PlanError(f"### BEGIN {region} has no end")
    return "\n".join(kept).rstrip("\n")


def solved(text: str) -> str:
    """An answer with its solution, without the marks."""
    return "\n".join(line for line in text.split("\n") if not _MARK.fullmatch(line)).rstrip("\n")


def with_code(text: str, answer: str) -> str:
    """An exercise's text with its third hint, the code of the answer; as it is if it has no hints."""
    if HINT not in text:
        return text
    return f"{text}\n\n{HINT}3: the code</summary>\n\n```python\n{answer}\n```\n\n</details>"


def assignment(solutions: Notebook) -> Notebook:
    """The notebook for students: stubs, no hidden tests, no outputs; nbgrader's metadata of cells stays."""
    made = copy.deepcopy(solutions)
    made["cells"] = [cell for cell in made["cells"] if not _remark(cell)]
    for cell in made["cells"]:
        if cell["cell_type"] == "code":
            cell["source"] = stripped(source(cell)).splitlines(keepends=True)
    return cleared(made)


def cleared(notebook: Notebook) -> Notebook:
    """A notebook without outputs, and without the hash of the sources that were run."""
    made = copy.deepcopy(notebook)
    made["metadata"].pop("minipar", None)
    for cell in made["cells"]:
        if cell["cell_type"] == "code":
            cell |= {"outputs": [], "execution_count": None}
    return made


def exercises(solutions: Notebook) -> list[Cell]:
    """The cells of a lesson's part "Exercises": imports, and for each exercise its text and a stub with its check."""
    made: list[Cell] = []
    kept = [cell for cell in solutions["cells"] if not _remark(cell)]
    for given, cell in zip(kept, assignment(solutions)["cells"], strict=True):
        grading = cell["metadata"].get("nbgrader", {})
        if grading.get("solution") and made:
            text = with_code(source(made[-1]), solved(source(given)))
            made[-1]["source"] = text.splitlines(keepends=True)
        if grading.get("grade"):
            found = _CHECK.search(source(cell))
            if found is None:
                raise PlanError(f"cell {cell['id']}: a check cell has a line `verdict = exercise.check(...)`")
            made[-1]["source"] = f"{source(made[-1])}\n\n\n{found[1]}".splitlines(keepends=True)
        elif made or cell["cell_type"] == "code":  # (the lesson has a title of its own)
            tags = cell["metadata"].get("tags")
            cell["metadata"] = {"tags": tags} if tags else {}
            made.append(cell)
    for k, cell in enumerate(made):
        cell["id"] = f"exercises-{k}"
    return made


def with_exercises(lesson: Notebook, solutions: Notebook) -> Notebook:
    """A lesson with a new part "Exercises": all cells between the cell with that heading and the last cell.

    The outputs of an exercise stay if it has not changed. PlanError if there is no such heading.
    """
    first, last = part(lesson)
    had = {source(cell): cell for cell in lesson["cells"][first:last]}
    made = [{**had[source(cell)], "id": cell["id"]} if source(cell) in had else cell for cell in exercises(solutions)]
    return {**lesson, "cells": [*lesson["cells"][:first], *made, *lesson["cells"][last:]]}


def with_install(lesson: Notebook) -> Notebook:
    """A lesson with a cell after the title that installs minipar if it is missing, and else does nothing."""
    title, *others = lesson["cells"]
    had: dict[str, Any] = next((one for one in others if one["id"] == "install"), {})
    cell = {  # its keys in the order of a notebook that was run
        "cell_type": "code",
        "execution_count": had.get("execution_count"),
        "id": "install",
        "metadata": {"jupyter": {"source_hidden": True}, "tags": ["remove-cell"]},  # (the tag is for the book)
        "outputs": [],
        "source": INSTALL.splitlines(keepends=True),
    }
    return {**lesson, "cells": [title, cell, *(one for one in others if one["id"] != "install")]}


def part(lesson: Notebook) -> tuple[int, int]:
    """Where a lesson's exercises are: the index of the first cell, and of the one after the last."""
    cells = lesson["cells"]
    for k, cell in enumerate(cells):
        if cell["cell_type"] == "markdown" and any(map(_PART.match, source(cell).splitlines())):
            return k + 1, len(cells) - 1
    raise PlanError("a lesson needs a cell with the heading `## Exercises`, and one after the exercises")


def _remark(cell: Cell) -> bool:
    return "solution" in cell["metadata"].get("tags", ())
