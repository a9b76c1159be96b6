"""The code of the lessons fits the cells of a laptop's browser, where a longer line is cut off."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

LESSONS = Path(__file__).parents[2] / "lessons"
WIDEST_CODE = 96  # characters


@pytest.mark.parametrize("path", sorted(LESSONS.rglob("*.ipynb")), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_line_of_code_fits_its_cell(path: Path) -> None:
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    lines = [line for cell in cells for line in "".join(cell["source"]).splitlines()]
    assert lines
    assert not [line for line in lines if len(line) > WIDEST_CODE]
