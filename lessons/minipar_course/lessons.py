"""The lessons as files, for `minipar lessons`: their folder, their names, and copies of them.

    checkout              lessons/NN_name.ipynb and lessons/solutions/NN_name.ipynb
    installed package     minipar/lessons/..., which the wheel carries (pyproject.toml)

A file that is already in the folder of a copy is left as it is: someone may have written answers in it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from minipar.errors import PlanError
from minipar_course.assignments import assignment, cleared, part, source

NAMES = "[0-9][0-9]*_*.ipynb"
WORKING_COPY = "minipar-lessons"


class Lesson(NamedTuple):
    """One notebook: its number, its title without the number, how many exercises it has, and where it is."""

    number: str
    title: str
    exercises: int
    path: Path


class Copied(NamedTuple):
    """Names of files, relative to the folder: written now, and found there and left as they are."""

    written: list[str]
    kept: list[str]


def folder() -> Path:
    """The folder of the lessons. PlanError if this installation has none."""
    home = Path(__file__).parents[1]
    for place in (home, home / "minipar" / "lessons"):
        if any(place.glob(NAMES)):
            return place
    raise PlanError("no lessons in this installation of minipar; a clone of its repository has them, and a wheel")


def in_checkout() -> bool:
    return folder() == Path(__file__).parents[1]


def lessons() -> list[Lesson]:
    """All lessons, by number."""
    return [_lesson(path) for path in sorted(folder().glob(NAMES))]


def find(name: str) -> Lesson:
    """The lesson with this number, such as 1 or "01", or with this beginning of its file's name."""
    known = lessons()
    found = [one for one in known if one.path.name.startswith(name.zfill(2) + "_" if name.isdigit() else name)]
    if len(found) != 1:
        raise PlanError(f"lesson {name}: unknown; possible are {', '.join(one.number for one in known)}")
    return found[0]


def _lesson(path: Path) -> Lesson:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    heading = source(notebook["cells"][0]).splitlines()[0].lstrip("# ")
    number, _, title = heading.partition(" · ")
    try:
        first, last = part(notebook)
    except PlanError:
        first = last = 0
    tasks = sum(source(cell).startswith("### Exercise") for cell in notebook["cells"][first:last])
    return Lesson(number, title, tasks, path)


def copy_lessons(target: Path) -> Copied:
    """Copy the lessons with their outputs, to read and to work in; with the solutions, to which they link."""
    home = folder()
    pages = [home / "README.md", *sorted(home.glob("*.ipynb")), *sorted(home.glob(f"solutions/{NAMES}"))]
    return _copied(target, ((path.relative_to(home), path.read_text(encoding="utf-8")) for path in pages))


def export(target: Path, solutions: bool = False) -> Copied:
    """Write the exercises as assignments: stubs and checks, with nbgrader's marks but without what it hides from
    students.

    solutions: write the teachers' version, with solution regions and hidden tests, for `nbgrader generate_assignment`.
    """
    made = []
    for path in sorted(folder().glob(f"solutions/{NAMES}")):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        notebook = cleared(notebook) if solutions else assignment(notebook)
        made.append((Path(path.name), json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"))
    return _copied(target, made)


def _copied(target: Path, files: Iterable[tuple[Path, str]]) -> Copied:
    done = Copied([], [])
    try:
        for name, text in files:
            path = target / name
            if path.exists():
                done.kept.append(str(name))
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            done.written.append(str(name))
    except OSError as error:
        raise PlanError(f"{target}: cannot be written ({error.strerror})") from None
    return done


def opening(name: str | None) -> list[str]:
    """The command that opens a lesson, or the folder of all, in JupyterLab.

    For an installed package it first makes a working copy in ./minipar-lessons, since nobody should write in
    site-packages.
    """
    program = shutil.which("jupyter-lab", path=str(Path(sys.executable).parent))
    if program is None:
        raise PlanError('JupyterLab is not installed beside this Python: pip install "minipar[lab]"')
    place = folder()
    chosen = find(name).path.name if name is not None else ""
    if not in_checkout():
        place = Path(WORKING_COPY)
        copy_lessons(place)
    return [program, str(place / chosen)]  # (python -m would take modules from the working directory)


def open_lesson(name: str | None) -> dict[str, Any]:
    """Open a lesson; returns when JupyterLab is closed."""
    command = opening(name)
    subprocess.run(command, check=False)
    return {"command": command}
