"""Exercises have one source, the notebook with solutions: stubs, assignments, and the lessons' own part."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minipar.errors import PlanError
from minipar.strategies.schedules import registry
from minipar_course import assignments
from minipar_course.assignments import INSTALL, STUB, exercises, source, stripped, with_exercises, with_install
from minipar_course.exercises.kinds.built import Exchanged, Trained
from tests.notebooks.refresh import solutions_of

LESSONS = Path(__file__).parents[2] / "lessons"
WITH_SOLUTIONS = sorted(LESSONS.glob("solutions/*.ipynb"))


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.fixture(params=WITH_SOLUTIONS, ids=lambda path: path.stem)
def solved(request: pytest.FixtureRequest) -> Path:
    assert isinstance(request.param, Path)
    return request.param


def test_solutions_become_stubs_and_hidden_tests_go() -> None:
    text = """def f(x):
    y = x
    ### BEGIN SOLUTION
    z = y
    return z
    ### END SOLUTION


def g(x):
    if x:
        ### BEGIN SOLUTION
        return 1
        ### END SOLUTION
    return 2


print(1)
### BEGIN HIDDEN TESTS
assert f(2) == 2
### END HIDDEN TESTS"""
    made = stripped(text)
    assert (
        made
        == f"def f(x):\n    y = x\n    {STUB}\n\n\ndef g(x):\n    if x:\n        {STUB}\n    return 2\n\n\nprint(1)"
    )
    compile(made, "stub", "exec")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("### BEGIN SOLUTION\nx = 1\n### END SOLUTION", "outside of a function"),
        ("def f():\n    ### BEGIN SOLUTION\n    return 1", "BEGIN SOLUTION has no end"),
        ("def f():\n    ### END SOLUTION", "`### END SOLUTION` does not fit"),
        ("def f():\n    ### BEGIN SOLUTION\n    ### END HIDDEN TESTS", "`### END HIDDEN TESTS` does not fit"),
        ("### BEGIN HIDDEN TESTS\n### BEGIN HIDDEN TESTS", "`### BEGIN HIDDEN TESTS` does not fit"),
    ],
)
def test_wrong_marks_are_refused(text: str, words: str) -> None:
    with pytest.raises(PlanError) as caught:
        stripped(text)
    assert words in caught.value.reason


def test_a_lesson_holds_the_exercises_of_its_solutions(solved: Path) -> None:
    lesson = load(solved.parents[1] / solved.name)
    assert solutions_of(solved.parents[1] / solved.name) == solved
    first, last = assignments.part(lesson)
    made, written = exercises(load(solved)), lesson["cells"][first:last]
    edited = "the exercises were edited: python tests/notebooks/refresh.py lessons/*.ipynb"
    assert [source(cell) for cell in written] == [source(cell) for cell in made], edited
    assert [cell["metadata"] for cell in written] == [cell["metadata"] for cell in made], edited
    assert with_exercises(lesson, load(solved)) == lesson
    assert with_install(lesson) == lesson
    assert source(lesson["cells"][1]) == INSTALL


def test_an_edited_exercise_is_noticed() -> None:
    solutions = load(WITH_SOLUTIONS[0])
    lesson = load(solutions_of(WITH_SOLUTIONS[0]).parents[2] / WITH_SOLUTIONS[0].name)
    answer = next(cell for cell in solutions["cells"] if cell["metadata"].get("nbgrader", {}).get("solution"))
    answer["source"] = [source(answer).replace("def ", "def my_")]
    made = with_exercises(lesson, solutions)
    assert made != lesson
    changed = [cell for cell in made["cells"] if cell["cell_type"] == "code" and "def my_" in source(cell)]
    assert len(changed) == 1
    assert changed[0]["outputs"] == []
    assert len(made["cells"]) == len(lesson["cells"])


def test_the_form_of_the_solutions(solved: Path) -> None:
    """At least three exercises, each a text, an answer, and a check that asks for a verdict and for more."""
    cells = load(solved)["cells"]
    grading = [cell["metadata"].get("nbgrader", {}) for cell in cells]
    number = solved.name.partition("_")[0]
    answers = [k for k, g in enumerate(grading) if g.get("solution")]
    checks = [k for k, g in enumerate(grading) if g.get("grade")]
    assert len(answers) == len(checks) >= 3
    for n, (answer, check) in enumerate(zip(answers, checks, strict=True), start=1):
        common = {"schema_version": 3, "task": False}
        assert grading[answer] == {
            **common, "grade": False, "solution": True, "locked": False, "grade_id": f"{number}-{n}-answer",
        }  # fmt: skip
        assert grading[check] == {
            **common, "grade": True, "solution": False, "locked": True, "grade_id": f"{number}-{n}-check",
            "points": grading[check]["points"],
        }  # fmt: skip
        assert 1 <= grading[check]["points"] <= 3
        titles = [cell for cell in cells[:answer] if source(cell).startswith(f"### Exercise {n}: ")]
        assert len(titles) == 1
        assert "### BEGIN SOLUTION" in source(cells[answer])
        text = source(cells[check])
        assert text.index("verdict = exercise.check(") < text.index("\nprint(verdict)\nassert verdict")
        assert re.search(r"\bassert |verify\(", text.partition("### BEGIN HIDDEN TESTS")[2])


def test_every_exercise_has_hints_in_three_levels(solved: Path) -> None:
    """A nudge and the formula in the text; the third, the code, is the solution, which other tests run."""
    answers = iter(cell for cell in load(solved)["cells"] if cell["metadata"].get("nbgrader", {}).get("solution"))
    texts = [source(cell) for cell in exercises(load(solved)) if source(cell).startswith("### Exercise ")]
    for text, answer in zip(texts, answers, strict=True):
        hints = re.findall(r"<details><summary>Hint (\d): ([^<]+)</summary>\n\n(.+?)\n\n</details>", text, re.DOTALL)
        titles = [("1", "a nudge"), ("2", "the formula"), ("3", "the code")]
        assert [hint[:2] for hint in hints] == titles, text.splitlines()[0]
        code = hints[2][2].removeprefix("```python\n").removesuffix("\n```")
        assert code == assignments.solved(source(answer))
        compile(code, "hint", "exec")


def test_there_are_exercises_enough_also_on_real_ranks() -> None:
    """At least 65, and of those called "build it" at least 16 are tried on real ranks."""
    titles, on_ranks = [], 0
    for path in WITH_SOLUTIONS:
        space: dict[str, Any] = {}
        for cell in load(path)["cells"]:
            titles += re.findall(r"^### Exercise .+", source(cell), re.MULTILINE)
            for line in re.findall(r"^(?:import|from) .+", source(cell), re.MULTILINE):
                exec(line, space)
            for task in re.findall(r"^verdict = exercise\.check\(.+, (\w+\.\w+)\)$", source(cell), re.MULTILINE):
                on_ranks += "build it" in titles[-1] and isinstance(eval(task, space), Trained | Exchanged)
    assert len(titles) >= 65
    assert on_ranks >= 16


def test_a_third_hint_is_the_lessons_and_not_an_assignments() -> None:
    solutions = load(WITH_SOLUTIONS[0])
    lesson = "".join(source(cell) for cell in exercises(solutions))
    assert lesson.count("Hint 3: the code") == lesson.count("### Exercise ") >= 3
    assert "return rank // pp, rank % pp" in lesson
    assert "return rank // pp, rank % pp" not in "".join(map(source, assignments.assignment(solutions)["cells"]))


def test_a_stub_can_be_run_and_is_not_passed(solved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every code cell of the lesson's part runs as students get it, and its check says that nothing is written yet."""
    monkeypatch.setattr(registry, "_schedules", dict(registry._schedules))
    space: dict[str, Any] = {"__name__": "__main__"}
    verdicts = 0
    for cell in exercises(load(solved)):
        if cell["cell_type"] == "code":
            text = source(cell)
            head, line, tail = text.rpartition("\nexercise.check(")
            exec(compile(head or text, str(cell["id"]), "exec"), space)
            if line:
                verdict = eval(f"exercise.check({tail}", space)
                assert not verdict
                assert verdict.reason == "nothing is written here yet", cell["id"]
                verdicts += 1
    assert verdicts >= 3


def test_an_assignment_keeps_what_nbgrader_knows(solved: Path) -> None:
    solutions, made = load(solved), assignments.assignment(load(solved))
    assert solutions == load(solved)
    text = json.dumps(made)
    assert "SOLUTION" not in text
    assert "HIDDEN" not in text
    assert "source_sha256" not in text
    assert [cell["metadata"] for cell in made["cells"]] == [
        cell["metadata"] for cell in solutions["cells"] if "solution" not in cell["metadata"].get("tags", ())
    ]
    assert not any(cell.get("outputs") for cell in made["cells"])


@pytest.mark.parametrize("installed", [True, False])
def test_the_first_cell_installs_minipar_only_where_it_is_missing(
    installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from IPython.core.inputtransformer2 import TransformerManager

    asked: list[tuple[str, str]] = []
    shell = SimpleNamespace(run_line_magic=lambda name, words: asked.append((name, words)))
    found = object() if installed else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found if name == "minipar" else 1 / 0)
    code = compile(TransformerManager().transform_cell(INSTALL), "cell", "exec")
    exec(code, {"get_ipython": lambda: shell})
    assert asked == ([] if installed else [("pip", "install --quiet anywidget ..")])
    assert (LESSONS / ".." / "pyproject.toml").exists()
