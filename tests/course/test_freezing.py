"""Frozen notebooks: no widget state, pictures and text as they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minipar.cli import main
from minipar.errors import MiniparError
from minipar_course.freezing import STATE, VIEW, freeze, freeze_files


def _notebook(*outputs: dict[str, Any], state: bool = True) -> str:
    cells = [
        {"cell_type": "markdown", "metadata": {}, "source": ["text"]},
        {"cell_type": "code", "metadata": {}, "execution_count": 1, "source": ["w"],
         "outputs": [{"output_type": "display_data", "metadata": {}, "data": data} for data in outputs]},
    ]  # fmt: skip
    widgets = {"widgets": {STATE: {"state": {"a": {}, "b": {}}}}} if state else {}
    return json.dumps({"cells": cells, "metadata": {"kernelspec": {"name": "python3"}, **widgets}, "nbformat": 4})


WIDGET = {"model_id": "a"}


def test_pictures_and_text_stay_and_widgets_go() -> None:
    data = {VIEW: WIDGET, "image/png": "iVBO", "text/plain": ["a line, é"]}
    frozen = freeze(_notebook(data, {"text/plain": ["plain"]}))
    notebook = json.loads(frozen.text)
    outputs = [output["data"] for output in notebook["cells"][1]["outputs"]]
    assert outputs == [{"image/png": "iVBO", "text/plain": ["a line, é"]}, {"text/plain": ["plain"]}]
    assert notebook["metadata"] == {"kernelspec": {"name": "python3"}}
    assert "é" in frozen.text
    assert len(frozen.removed) == 2
    assert "2 widgets" in frozen.removed[0]
    assert freeze(frozen.text) == (frozen.text, [], [])  # once is enough


def test_widgets_without_a_picture_are_named() -> None:
    frozen = freeze(_notebook({VIEW: WIDGET, "text/plain": ["IntSlider(value=3)"]}, state=False))
    assert frozen.removed == []
    assert frozen.bare == ["cell 1: IntSlider(value=3)"]


def test_check_changes_nothing_and_says_what_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "one.ipynb"
    path.write_text(_notebook({VIEW: WIDGET, "image/png": "iVBO"}))
    before = path.read_text()
    with pytest.raises(SystemExit, match=r"one\.ipynb: would change: state of 2 widgets"):
        main(["notebooks", "freeze", "--check", str(tmp_path)])
    assert path.read_text() == before
    assert main(["notebooks", "freeze", str(tmp_path)]) == 0
    assert "1 notebooks, 1 frozen" in capsys.readouterr().out
    assert main(["notebooks", "freeze", "--check", "--json", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["changed"] == {}
    assert VIEW not in path.read_text()


def test_what_is_no_notebook_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MiniparError, match="no such notebook"):
        freeze_files([tmp_path / "none.ipynb"])
    (tmp_path / "bad.ipynb").write_text("{}")
    with pytest.raises(MiniparError, match="bad.ipynb: not a notebook"):
        freeze_files([tmp_path])


def test_committed_notebooks_are_frozen() -> None:
    root = Path(__file__).parents[2]
    assert freeze_files([root / "lessons"], check=True)["changed"] == {}
