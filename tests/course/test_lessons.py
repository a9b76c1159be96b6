"""The saved lessons and solutions: run after their last edit, small, readable without running, and without traces of
the machine that ran them.

nbval checks that their cells still give these outputs: `pytest` collects lessons/ and lessons/solutions/, too.
"""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest

from minipar_course.assignments import STUB
from tests.notebooks.refresh import KERNEL, source_hash, tidy

LESSONS = Path(__file__).parents[2] / "lessons"
NUMBERED = sorted(LESSONS.glob("[0-9][0-9]*_*.ipynb"))
SOLUTIONS = sorted(LESSONS.glob("solutions/[0-9][0-9]*_*.ipynb"))
MOST_BYTES = 1 << 20
WIDEST_LINE = 130  # characters of saved text; beyond, JupyterLab scrolls or wraps


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.fixture(params=NUMBERED, ids=lambda path: path.stem)
def lesson(request: pytest.FixtureRequest) -> dict[str, Any]:
    return load(request.param)


@pytest.fixture(params=[*NUMBERED, *SOLUTIONS], ids=lambda path: f"{path.parent.name}/{path.stem}")
def notebook(request: pytest.FixtureRequest) -> dict[str, Any]:
    return load(request.param)


def code(lesson: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in lesson["cells"] if cell["cell_type"] == "code"]


def outputs(cell: dict[str, Any], kind: str) -> list[Any]:
    return [output["data"][kind] for output in cell["outputs"] if kind in output.get("data", {})]


def text(cell: dict[str, Any]) -> str:
    """All that a cell shows as text, beside pictures."""
    streams = ["".join(output["text"]) for output in cell["outputs"] if output["output_type"] == "stream"]
    return "\n".join([*streams, *("".join(found) for found in outputs(cell, "text/plain"))])


def test_there_are_lessons_and_the_page_names_them() -> None:
    page = (LESSONS / "README.md").read_text()
    assert NUMBERED
    for path in NUMBERED:
        assert f"({path.name})" in page
    assert {path.name for path in SOLUTIONS} == {path.name for path in NUMBERED}


def test_it_was_run_as_it_is(notebook: dict[str, Any]) -> None:
    assert notebook["metadata"]["minipar"]["source_sha256"] == source_hash(notebook), (
        "edited since it was run: make lessons"
    )
    assert [cell["execution_count"] for cell in code(notebook)] == list(range(1, len(code(notebook)) + 1))


def test_it_says_nothing_of_the_machine_it_ran_on(notebook: dict[str, Any]) -> None:
    assert notebook["metadata"]["kernelspec"] == KERNEL
    assert set(notebook["metadata"]) == {"kernelspec", "language_info", "minipar"}
    assert notebook == tidy(json.loads(json.dumps(notebook)))
    for cell in code(notebook):
        assert not re.search(r"/home/|/tmp/|/root/|0x[0-9a-f]{6}", text(cell)), cell["id"]


def test_no_output_is_an_error_or_a_warning(notebook: dict[str, Any]) -> None:
    for cell in code(notebook):
        for output in cell["outputs"]:
            assert output["output_type"] != "error", cell["id"]
            assert output.get("name") != "stderr", cell["id"]


def test_it_is_small() -> None:
    for path in [*NUMBERED, *SOLUTIONS]:
        assert path.stat().st_size <= MOST_BYTES, path.name


def test_every_picture_has_words_and_a_caption(lesson: dict[str, Any]) -> None:
    cells, figures = lesson["cells"], 0
    for k, cell in enumerate(cells):
        shown = [output for output in cell.get("outputs", ()) if "image/png" in output.get("data", {})]
        for output in shown:
            assert base64.b64decode(output["data"]["image/png"]).startswith(b"\x89PNG")
            words = "".join(output["data"]["text/plain"])
            if "timeline" in words:  # (the text alternative of another picture is its caption)
                assert output["metadata"]["image/png"]["alt"] == words
        if shown:
            figures += 1
            caption = "".join(cells[k + 1]["source"])
            assert caption.startswith(f"*Figure {figures}. "), f"{cell['id']}: a caption must follow its picture"
    assert figures


def test_every_diagram_has_words_and_a_caption(lesson: dict[str, Any]) -> None:
    cells = lesson["cells"]
    for k, cell in enumerate(cells):
        for output in cell.get("outputs", ()):
            shown = "".join(output.get("data", {}).get("text/html", ""))
            if "data:image/svg+xml" in shown:
                assert shown.startswith('<img alt="')
                assert "".join(cells[k + 1]["source"]).startswith("*Diagram. "), cell["id"]


def test_measured_times_are_not_compared(notebook: dict[str, Any]) -> None:
    measured = [cell for cell in code(notebook) if re.search(r"\d ms measured|Measured timeline", text(cell))]
    for cell in measured:
        assert "nbval-ignore-output" in cell["metadata"].get("tags", ()), cell["id"]


def test_saved_text_fits_a_page(notebook: dict[str, Any]) -> None:
    for cell in code(notebook):
        shown = text(cell) if not outputs(cell, "image/png") else ""
        lines = [line for line in shown.splitlines() if len(line) > WIDEST_LINE]
        assert not lines, f"{cell['id']}: {lines}"


def test_every_exercise_refuses_its_stub(lesson: dict[str, Any]) -> None:
    """What the check said is saved, and compared by nbval; so are the verdicts of lessons/solutions."""
    stubs = [cell for cell in code(lesson) if STUB in "".join(cell["source"])]
    assert len(stubs) >= 3
    for cell in stubs:
        assert text(cell).startswith("not yet: nothing is written here yet")


def test_links_lead_somewhere(lesson: dict[str, Any]) -> None:
    for cell in lesson["cells"]:
        for target in re.findall(r"\]\(([^)#\s]+)\)", "".join(cell["source"])):
            assert target.startswith("https://") or (LESSONS / target).exists(), target


def test_an_edited_cell_is_noticed(lesson: dict[str, Any]) -> None:
    before = source_hash(lesson)
    lesson["cells"][0]["source"].append("prose may be edited without a run")
    assert source_hash(lesson) == before
    code(lesson)[-1]["source"].append("\n1")
    assert source_hash(lesson) != before


def test_tidying_joins_streams_and_drops_widgets() -> None:
    def stream(name: str, *lines: str) -> dict[str, Any]:
        return {"output_type": "stream", "name": name, "text": list(lines)}

    widget = {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}, "text/plain": ["a slider"]}
    cell = {
        "cell_type": "code",
        "metadata": {"execution": {"shell.execute_reply": "now"}, "tags": ["kept"]},
        "source": ["1"],
        "outputs": [stream("stdout", "a\n"), stream("stdout", "b\n", "c"), stream("stderr", "d"),
                    {"output_type": "display_data", "data": widget, "metadata": {}}],
    }  # fmt: skip
    found = tidy({"cells": [cell], "metadata": {"widgets": {"state": {}}}, "nbformat": 4, "nbformat_minor": 5})
    (kept,) = found["cells"]
    assert kept["metadata"] == {"tags": ["kept"]}
    assert kept["outputs"][:2] == [stream("stdout", "a\n", "b\n", "c"), stream("stderr", "d")]
    assert kept["outputs"][2]["data"] == {"text/plain": ["a slider"]}
    assert set(found["metadata"]) == {"kernelspec", "language_info", "minipar"}
