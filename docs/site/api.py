"""The API as pages: the public names, with what their docstrings say of shapes, units and errors."""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import Path
from typing import Any

import minipar
import minipar_widgets

_ROW = re.compile(r"([^ `].*?) {2,}(\S.*)")
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


def signature(_: Any, __: str, ___: str, ____: Any, _____: Any, words: str | None, result: str | None) -> Any:
    """A signature that Sphinx can read: values that a dataclass makes are `...`."""
    return words and words.replace("<factory>", "..."), result


def plain(_: Any, __: str, ___: str, ____: Any, _____: Any, lines: list[str]) -> None:
    """Docstrings are plain text: sentences, tables of two columns, and code."""
    paragraphs = re.split(r"\n[ ]*\n", "\n".join(lines).strip("\n"))
    lines[:] = [line for text in paragraphs for line in [*_shown(text.split("\n")), ""]]


def _shown(parts: list[str]) -> list[str]:
    """A paragraph for Sphinx: what begins with two columns is a list, what else is indented is code."""
    text = [text_of(line) for line in takewhile(lambda line: line[:1] != " " and not _ROW.match(line), parts)]
    if rest := parts[len(text) :]:
        base = len(rest[0]) - len(rest[0].lstrip())
        rows: list[list[str]] = []
        for line in rest:
            row = _ROW.match(line.strip()) if not line[base : base + 1].isspace() else None
            if row:
                rows.append([row[1], row[2]])
            elif rows and line[base : base + 1].isspace():
                rows[-1].append(line.strip())
            else:
                return [*text, "", ".. code-block:: text", "", *(f"   {one}" for one in rest)]
        text += ["", *(f"* {text_of(f'`{name}`')}: {text_of(' '.join(words))}" for name, *words in rows)]
    return text


def text_of(line: str) -> str:
    """A line of plain text, in which `code` is code and no other sign means anything."""
    parts = re.split(r"(`[^`]+`)", line)
    return "".join(f"`{part}`" if part[:1] == "`" else re.sub(r"([\\*_|`])", r"\\\1", part) for part in parts)
