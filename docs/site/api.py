"""The API as pages: the public names, with what their docstrings say of shapes, units and errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import minipar
import minipar_widgets

PARTS = {
    "plans": ("Plans and programs", ("minipar.program", "minipar.strategies")),
    "predictions": (
        "Predictions and traces",
        ("minipar.prediction", "minipar.costs", "minipar.trace", "minipar.planner"),
    ),
    "runs": ("Runs", ("minipar.training", "minipar.execution", "minipar.cluster")),
    "errors": ("Errors", ("minipar.errors",)),
}


def pages(target: Path) -> list[str]:
    """Write a page for each part and return their names."""
    target.mkdir(parents=True)
    for name, (title, homes) in PARTS.items():
        own = {word: home for home, words in minipar._homes.items() for word in words if home.startswith(homes)}
        _write(target / f"{name}.rst", title, [f"{home}.{word}" for word, home in own.items()])
    views = [f"{home}.{word}" for home, words in minipar_widgets._homes.items() for word in words]
    _write(target / "views.rst", "Views", views)
    return [*PARTS, "views"]


def _write(path: Path, title: str, names: list[str]) -> None:
    lines = [title, "=" * len(title), ""]
    for name in names:
        home, _, word = name.rpartition(".")
        found = getattr(__import__(home, fromlist=[word]), word)
        kind = "autoclass" if isinstance(found, type) else "autofunction"
        members = ["   :members:"] if kind == "autoclass" and "views" not in path.name else []
        lines += [word, "-" * len(word), "", f".. {kind}:: {name}", *members, "   :no-index:", ""]
    path.write_text("\n".join(lines))


def plain(_: Any, __: str, ___: str, ____: Any, _____: Any, lines: list[str]) -> None:
    """Docstrings are plain text: sentences, and indented tables of arguments, which keep their shape."""
    made: list[str] = []
    block = False
    for line in lines:
        inside = line.startswith(" ") and bool(line.strip())
        if inside and not block:
            made += ["", ".. code-block:: text", ""]
        if block and not inside and line.strip():
            made.append("")
        block = inside or (block and not line.strip())
        made.append(f"   {line}" if block and line.strip() else text_of(line))
    lines[:] = made


def text_of(line: str) -> str:
    """A line of plain text, in which `code` is code and no other sign means anything."""
    parts = re.split(r"(`[^`]+`)", line)
    return "".join(f"`{part}`" if part[:1] == "`" else re.sub(r"([\\*_|`])", r"\\\1", part) for part in parts)
