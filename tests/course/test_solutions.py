"""The solutions of the lessons, run in this process: their checks pass and print what the notebooks show.

nbval compares the same in a kernel of its own for each notebook, which takes seconds to start. `make test` leaves to it
the one that needs ranks (`tests/everything.py`); a plain `pytest` runs the others both ways.
"""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from minipar.strategies import draft
from minipar.strategies.schedules import registry
from minipar_course.assignments import source
from tests import everything
from tests.lending import lend

IN_A_KERNEL = everything.ROOT / everything.SOLUTION
HERE = sorted({*IN_A_KERNEL.parent.glob("*.ipynb")} - {IN_A_KERNEL})


def test_the_one_in_a_kernel_needs_ranks() -> None:
    assert "Cluster(" in IN_A_KERNEL.read_text()


@pytest.mark.parametrize("path", HERE, ids=lambda path: path.stem)
def test_it_passes_and_prints_what_is_saved(
    path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    lend(lambda ranks: request.getfixturevalue("clusters")(ranks), monkeypatch)
    monkeypatch.setattr(registry, "_schedules", dict(registry._schedules))
    monkeypatch.setattr(draft, "_passes", dict(draft._passes))
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "code":
            with redirect_stdout(io.StringIO()) as said:
                exec(compile(source(cell), f"{path.name}, {cell['id']}", "exec"), names)
            assert {output["name"] for output in cell["outputs"]} <= {"stdout"}
            assert said.getvalue() == "".join(line for output in cell["outputs"] for line in output["text"])
