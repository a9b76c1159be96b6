"""`minipar lessons`: the lessons as files; and nbgrader, which accepts the solutions unchanged."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minipar.cli import main
from minipar_course import lessons
from minipar_course.assignments import STUB, source

LESSONS = Path(__file__).parents[2] / "lessons"
NAMES = sorted(path.name for path in LESSONS.glob(lessons.NAMES))
FIRST = next(name for name in NAMES if name.startswith("01"))
FEW = NAMES[1::5]


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    result = said(capsys, "lessons", "list")
    assert Path(result["folder"]) == LESSONS
    assert [one["file"] for one in result["lessons"]] == NAMES
    for one in result["lessons"]:
        assert one["file"].startswith(one["number"] + "_")
        assert one["title"]
        assert one["exercises"] >= 3
    assert main(["lessons", "list"]) == 0
    assert "01  One program, four readers (3 exercises)" in capsys.readouterr().out


def test_copy_leaves_what_is_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "mine"
    written = said(capsys, "lessons", "copy", str(target))["written"]
    assert [*NAMES, "README.md"] == sorted(name for name in written if "/" not in name and name != "explorer.ipynb")
    assert [name for name in written if "/" in name] == [f"solutions/{name}" for name in NAMES]
    for name in written:
        assert (target / name).read_bytes() == (LESSONS / name).read_bytes()
    (target / FIRST).write_text("my answers")
    (target / "README.md").unlink()
    again = said(capsys, "lessons", "copy", str(target))
    assert again["written"] == ["README.md"]
    assert again["kept"] == written[1:]
    assert (target / FIRST).read_text() == "my answers"
    assert main(["lessons", "copy", str(target)]) == 0
    assert f"left as it was: {FIRST}" in capsys.readouterr().out


def test_export(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    students, teachers = tmp_path / "students", tmp_path / "teachers"
    assert said(capsys, "lessons", "export", str(students))["written"] == NAMES
    assert said(capsys, "lessons", "export", str(teachers), "--solutions")["written"] == NAMES
    for name in NAMES:
        text = (students / name).read_text()
        assert STUB in "".join(map(source, json.loads(text)["cells"]))
        assert "SOLUTION" not in text
        assert "HIDDEN" not in text
        kept, given = load(teachers / name), load(LESSONS / "solutions" / name)
        assert [source(cell) for cell in kept["cells"]] == [source(cell) for cell in given["cells"]]
        assert not any(cell.get("outputs") for cell in kept["cells"])


def test_what_cannot_be(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for arguments, words in [
        (("open", "77"), "lesson 77: unknown; possible are 0"),
        (("open", "nothing"), "lesson nothing: unknown"),
        (("copy", str(file)), "cannot be written"),
        (("export", str(file / "below")), "cannot be written"),
        ((), "the following arguments are required: ACTION"),
    ]:
        assert main(["lessons", *arguments]) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1
    monkeypatch.setattr(lessons, "__file__", str(tmp_path / "package" / "course" / "lessons.py"))
    assert main(["lessons", "list"]) == 2
    assert "no lessons in this installation" in capsys.readouterr().err


def test_open(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = [str(Path(sys.executable).parent / "jupyter-lab")]
    assert said(capsys, "lessons", "open", "1")["command"] == [*begin, str(LESSONS / FIRST)]
    assert said(capsys, "lessons", "open", "01_one")["command"] == [*begin, str(LESSONS / FIRST)]
    assert said(capsys, "lessons", "open")["command"] == [*begin, str(LESSONS)]
    asked: list[list[str]] = []
    monkeypatch.setattr(lessons.subprocess, "run", lambda command, check: asked.append(command))
    assert main(["lessons", "open", "1"]) == 0
    assert asked == [[*begin, str(LESSONS / FIRST)]]
    assert capsys.readouterr().out.startswith("closed: ")

    # Installed: the lessons are a folder of the package, and a working copy is opened.
    package = tmp_path / "minipar"
    shutil.copytree(LESSONS, package / "lessons")
    monkeypatch.setattr(lessons, "__file__", str(tmp_path / "minipar_course" / "lessons.py"))
    monkeypatch.chdir(tmp_path)
    assert said(capsys, "lessons", "open", "1")["command"] == [*begin, str(Path("minipar-lessons") / FIRST)]
    assert sorted(path.name for path in (tmp_path / "minipar-lessons").glob(lessons.NAMES)) == NAMES


@pytest.fixture(scope="module")
def grading(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """nbgrader on a course of one assignment: solutions, as `minipar lessons export --solutions` writes them.

    Every fifth lesson, and with --thorough all: nbgrader takes seconds for each.
    """
    apps = pytest.importorskip("nbgrader.apps")
    from traitlets.config import Config

    home = tmp_path_factory.mktemp("course")
    lessons.export(home / "source" / "minipar", solutions=True)
    for name in set(NAMES) - set(NAMES if pytestconfig.getoption("--thorough") else FEW):
        (home / "source" / "minipar" / name).unlink()
    config = Config()
    config.CourseDirectory.root = str(home)
    config.ClearSolutions.code_stub = {"python": STUB}
    config.Exchange.root = str(home / "exchange")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)  # where `alembic` is, which it calls
        api = apps.NbGraderAPI(config=config)
        done = api.generate_assignment("minipar", create=True)
        assert done["success"], done["log"]
        yield home, api


def test_nbgrader_makes_the_same_assignments(grading: Any, tmp_path: Path) -> None:
    home, _ = grading
    lessons.export(tmp_path)
    names = sorted(path.name for path in (home / "source" / "minipar").glob(lessons.NAMES))
    assert set(FEW) <= set(names) <= set(NAMES)
    for name in names:
        released, exported = load(home / "release" / "minipar" / name), load(tmp_path / name)
        remarks = ["solution" in cell["metadata"].get("tags", ()) for cell in released["cells"]]
        theirs = [source(cell) for cell, remark in zip(released["cells"], remarks, strict=True) if not remark]
        assert theirs == [source(cell) for cell in exported["cells"]], name


@pytest.mark.slow
def test_nbgrader_grades_without_a_browser(grading: Any) -> None:
    """Full marks for the solutions, none for the stubs, and a wrong answer loses what it is worth."""
    home, api = grading
    solved = load(home / "source" / "minipar" / FIRST)
    wrong = json.loads(json.dumps(solved))
    answer = next(c for c in wrong["cells"] if c["metadata"].get("nbgrader", {}).get("grade_id") == "01-3-answer")
    answer["source"] = source(answer).replace("range(0, microbatches, 2)", "range(0, microbatches, 3)")
    stubs = load(home / "release" / "minipar" / FIRST)
    points = {}
    for student, notebook in [("ada", solved), ("bob", wrong), ("eve", stubs)]:
        folder = home / "submitted" / student / "minipar"
        folder.mkdir(parents=True)
        (folder / FIRST).write_text(json.dumps(notebook))
        done = api.autograde("minipar", student, create=True)
        assert done["success"], done["log"]
        with api.gradebook as gradebook:
            points[student] = gradebook.find_submission_notebook(Path(FIRST).stem, "minipar", student).score
    assert points == {"ada": 6.0, "bob": 3.0, "eve": 0.0}
