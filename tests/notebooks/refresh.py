"""Run the lessons and save the useful part of their outputs: `make lessons`.

    python tests/notebooks/refresh.py lessons/*.ipynb lessons/solutions/*.ipynb
    python tests/notebooks/refresh.py --generated lessons/*.ipynb     only writes what comes from elsewhere

Before a lesson runs, its exercises are written again from lessons/solutions/, and the cell that installs a missing
minipar is inserted (lessons/minipar_course/assignments.py).

A saved lesson must be readable where nothing runs (GitHub), compare under nbval, and stay small. So outputs and
pictures are kept; widget states, times and version numbers of this machine are removed. The hash of the sources that
were run is stored, so that a test finds lessons that were edited and not run again.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from minipar_course.assignments import with_exercises, with_install

KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def source_hash(notebook: dict[str, Any]) -> str:
    """Of the code cells, in order: text and tags."""
    code = [
        ["".join(cell["source"]), cell["metadata"].get("tags", [])]
        for cell in notebook["cells"]
        if cell["cell_type"] == "code"
    ]
    return hashlib.sha256(json.dumps(code).encode()).hexdigest()


def tidy(notebook: dict[str, Any]) -> dict[str, Any]:
    """A notebook as it is stored, its outputs as they are but for what belongs to this machine or this moment."""
    for cell in notebook["cells"]:
        cell["metadata"].pop("execution", None)
        cell["metadata"].pop("widgets", None)
        if "outputs" in cell:
            cell["outputs"] = _joined(cell["outputs"])
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if len(data) > 1:  # a picture or text stands beside it
                data.pop("application/vnd.jupyter.widget-view+json", None)
    run = source_hash(notebook)
    metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}, "minipar": {"source_sha256": run}}
    return {**notebook, "metadata": metadata}


def _joined(outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Neighbouring pieces of one stream as one: how a stream was cut differs from run to run."""
    kept: list[dict[str, Any]] = []
    for output in outputs:
        if kept and output["output_type"] == kept[-1]["output_type"] == "stream" and output["name"] == kept[-1]["name"]:
            kept[-1]["text"] = "".join([*kept[-1]["text"], *output["text"]]).splitlines(keepends=True)
        else:
            kept.append(output)
    return kept


def solutions_of(path: Path) -> Path:
    """Where the solutions of a lesson are."""
    return path.parent / "solutions" / path.name


def write(path: Path, notebook: dict[str, Any]) -> None:
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def write_generated(path: Path) -> None:
    """Write what a lesson has from elsewhere anew: its part "Exercises", and the cell that installs minipar."""
    if solutions_of(path).exists():
        lesson, solutions = (json.loads(one.read_text()) for one in (path, solutions_of(path)))
        write(path, with_install(with_exercises(lesson, solutions)))


def refresh(path: Path) -> None:
    """Run a notebook from its first cell on, in place; a cell that fails leaves the outputs as they were."""
    write_generated(path)
    command = [sys.executable, "-m", "jupyter", "nbconvert", "--to", "notebook", "--execute", "--stdout"]
    done = subprocess.run([*command, str(path)], check=True, stdout=subprocess.PIPE, text=True)
    write(path, tidy(json.loads(done.stdout)))


if __name__ == "__main__":
    do = write_generated if "--generated" in sys.argv else refresh
    for name in sys.argv[1:]:
        if not name.startswith("--"):
            do(Path(name))
