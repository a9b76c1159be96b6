"""Runs the lessons and keeps what is worth keeping of their outputs: `make lessons`.

    python tests/notebooks/refresh.py lessons/*.ipynb

A saved lesson must read well where nothing runs (GitHub), compare under nbval, and stay small. So: outputs and pictures
stay; state of widgets, the clock and the versions of this machine go. The hash of the sources that were run is stored,
so that a test sees when a lesson was edited and not run again.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def refresh(path: Path) -> None:
    """Run a notebook from its first cell on, in place; a cell that fails leaves the file as it was."""
    command = [sys.executable, "-m", "jupyter", "nbconvert", "--to", "notebook", "--execute", "--stdout"]
    done = subprocess.run([*command, str(path)], check=True, stdout=subprocess.PIPE, text=True)
    path.write_text(json.dumps(tidy(json.loads(done.stdout)), indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        refresh(Path(name))
