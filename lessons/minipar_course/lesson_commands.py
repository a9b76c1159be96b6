"""`minipar lessons list | open | copy | export`, for people and scripts (--json)."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from minipar_course import lessons


def add(commands: Any) -> None:
    """Add `lessons` to the command line's commands."""
    text = "the course: its lessons, copies of them, and exercises as assignments"
    parser: argparse.ArgumentParser = commands.add_parser("lessons", help=text, description=text)
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")

    def action(name: str, run: Any, show: Any, text: str) -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text)
        made.add_argument("--json", action="store_true", help="print one JSON object")
        made.set_defaults(command=run, show=show)
        return made

    action("list", _list, _show_list, "all lessons, with their numbers of exercises")
    one = action("open", _open, _show_open, "open a lesson in JupyterLab (--json: only say by which command)")
    one.add_argument("lesson", nargs="?", help="its number (default: the folder of all)")
    one = action("copy", _copy, _show_copied, "copy the lessons, to work in; files that are there already stay")
    one.add_argument("folder", metavar="DIR", type=Path, help="where to")
    one = action("export", _export, _show_copied, "write the exercises as assignments for a class, without solutions")
    one.add_argument("folder", metavar="DIR", type=Path, help="where to")
    one.add_argument("--solutions", action="store_true", help="with solutions and hidden tests, as nbgrader's source")


def _list(options: argparse.Namespace) -> dict[str, Any]:
    found = [
        {"number": one.number, "title": one.title, "exercises": one.exercises, "file": one.path.name}
        for one in lessons.lessons()
    ]
    return {"folder": str(lessons.folder()), "lessons": found}


def _show_list(result: dict[str, Any]) -> str:
    rows = [f"{one['number']}  {one['title']} ({one['exercises']} exercises)" for one in result["lessons"]]
    return "\n".join([*rows, f"in {result['folder']}; `minipar lessons open 01` opens one in JupyterLab"])


def _open(options: argparse.Namespace) -> dict[str, Any]:
    return {"command": lessons.opening(options.lesson)} if options.json else lessons.open_lesson(options.lesson)


def _show_open(result: dict[str, Any]) -> str:
    return f"closed: {' '.join(result['command'])}"


def _copy(options: argparse.Namespace) -> dict[str, Any]:
    return _copied(options.folder, lessons.copy_lessons(options.folder))


def _export(options: argparse.Namespace) -> dict[str, Any]:
    return _copied(options.folder, lessons.export(options.folder, options.solutions))


def _copied(folder: Path, done: lessons.Copied) -> dict[str, Any]:
    return {"folder": str(folder), "written": done.written, "kept": done.kept}


def _show_copied(result: dict[str, Any]) -> str:
    lines = [f"{len(result['written'])} files written to {result['folder']}"]
    lines += [f"left as it was: {name}" for name in result["kept"]]
    return "\n".join(lines)
