"""The lessons as pages, from the outputs that they were saved with; exercises that need no ranks are checked there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from docs.site import starting

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / "lessons"
NAMES = "[0-9][0-9]*_*.ipynb"
WIDGET = "application/vnd.jupyter.widget-view+json"
PAGES = tuple(sorted((ROOT / "docs").glob("*.md")))
ALONE = "in JupyterLite, without what needs torch or real ranks"
_CHECK = re.compile(r"exercise\.check\(\w+, tasks\.\w+\)")


def pages(target: Path, names: Sequence[str] = (), notebooks: Sequence[Path] = ()) -> None:
    """Write the lessons of these names (default: all) with their solutions, and an index. `notebooks` are those that
    JupyterLite has, too."""
    chosen = [path for path in sorted(HOME.glob(NAMES)) if not names or path.name in names]
    parts = [*chosen, *(HOME / "solutions" / path.name for path in chosen)]
    known = dict.fromkeys((*parts, *PAGES), "")
    (target / "solutions").mkdir(parents=True)
    answers = {path: exercises(path) for path in chosen}
    passing = starting.passing([one for found in answers.values() for one in found.values()])
    for path in parts:
        notebook = prepared(json.loads(path.read_text()), path, known)
        if path in answers:
            add_exercises(notebook, {k: one for k, one in answers[path].items() if one in passing})
        if path in notebooks:
            place = (
                f'<p><a href="../lite/notebooks/index.html?path={path.name}">Run it in the browser</a>: {ALONE}.</p>'
            )
            notebook["cells"].insert(1, {"cell_type": "markdown", "metadata": {}, "id": "lite", "source": place})
        (target / path.relative_to(HOME)).write_text(json.dumps(notebook))
    solutions = "# Solutions\n\n" + tree([path.stem for path in chosen])
    (target / "solutions" / "index.md").write_text(solutions)
    (target / "index.md").write_text(index((HOME / "README.md").read_text(), chosen, known))


def exercises(path: Path) -> dict[int, tuple[str, str]]:
    """For each cell of a lesson that has a stub and checks it by `tasks`: the imports before it, and a cell that solves
    it, from the solutions. Errors: SystemExit if an exercise has no solution."""
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    solved = solutions(HOME / "solutions" / path.name)
    found: dict[int, tuple[str, str]] = {}
    imports: list[str] = []
    for k, cell in enumerate(cells):
        text = "".join(cell["source"])
        if "raise NotImplementedError" in text and (check := _CHECK.search(text)):
            if check[0] not in solved:
                raise SystemExit(f"{path.name}: no solution has {check[0]}")
            found[k] = "\n".join(dict.fromkeys(imports)), f"{solved[check[0]]}\n\n{check[0]}"
        imports += imports_of(text)
    return found


def imports_of(text: str) -> list[str]:
    """The imports of a cell, without torch's, which no page has."""
    found = re.findall(r"^(?:import|from) [^\n(]+(?:\([^)]*\))?", text, re.MULTILINE)
    return [line for line in found if not line.split()[1].startswith(("torch", "importlib"))]


def solutions(path: Path) -> dict[str, str]:
    """For each check the cell before it: the answer."""
    found, before = {}, ""
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "code":
            text = "".join(cell["source"])
            for check in _CHECK.findall(text):
                found.setdefault(check, before)
            before = text
    return found


def add_exercises(notebook: dict[str, Any], chosen: Mapping[int, tuple[str, str]]) -> None:
    """Put an editor in the place of each of these code cells, with the cell's own text."""
    cells: list[dict[str, Any]] = []
    number = -1
    for cell in notebook["cells"]:
        number += cell["cell_type"] == "code"
        if cell["cell_type"] != "code" or number not in chosen:
            cells.append(cell)
        else:
            code, imports = (
                escape(text).replace("\n", "&#10;") for text in ("".join(cell["source"]), chosen[number][0])
            )
            place = f'<div class="mp-exercise" data-code="{code}" data-imports="{imports}"></div>'
            cells.append({"cell_type": "markdown", "metadata": {}, "id": f"editor-{number}", "source": place})
    if chosen:
        script = '<script type="module" src="../_static/site/live/exercise.js"></script>'
        cells.append({"cell_type": "markdown", "metadata": {}, "id": "editors", "source": script})
    notebook["cells"] = cells


def prepared(notebook: dict[str, Any], path: Path, known: Mapping[Path, str]) -> dict[str, Any]:
    """A notebook for myst-nb: pictures with their alternative text, no live widgets, links within the site only."""
    notebook["metadata"]["language_info"]["pygments_lexer"] = "ipython3"
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = within("".join(cell["source"]), path, known)
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            data.pop(WIDGET, None)
            if not data and "data" in output:
                data["text/plain"] = "(interactive: run the lesson)"
            words = output.get("metadata", {}).get("image/png", {}).get("alt")
            if "image/png" in data:
                cell["metadata"]["mystnb"] = {"image": {"alt": words or "see the caption below"}}
    return notebook


def within(text: str, path: Path, known: Iterable[Path]) -> str:
    """Links of a file of the repository, for its page: to other pages as they are there, to other files as text."""
    pages_here = set(known)

    def link(found: re.Match[str]) -> str:
        words, (target, mark, part) = found[1], found[2].partition("#")
        if not target or "://" in target:
            return found[0]
        file = (path.parent / target).resolve()
        if not file.exists():
            raise SystemExit(f"{path.name} links to {target}, which does not exist")
        if file not in pages_here or file.suffix not in (".md", ".ipynb"):
            return found[0] if found[0].startswith("!") else f"{words} (`{file.relative_to(ROOT).as_posix()}`)"
        up = "../" * (len(place(path).parts) - 1)
        return f"[{words}]({up}{place(file).as_posix()}{mark}{part})"

    return re.sub(r"!?\[([^\]]+)\]\(([^)\s]+)\)", link, text)


def place(path: Path) -> Path:
    """Where a file's page is in the site."""
    return Path("learn") / path.relative_to(HOME) if path.is_relative_to(HOME) else path.relative_to(ROOT)


def index(page: str, chosen: Sequence[Path], known: Iterable[Path]) -> str:
    """The first page of the lessons: their own, and the order of all pages."""
    listed = {path.name for path in chosen}
    rows = [row for row in page.splitlines() if (m := re.search(r"\]\((\d\d_[^)]+)\)", row)) is None or m[1] in listed]
    text = within("\n".join(rows), HOME / "README.md", known)
    return f"{text}\n\n{tree([path.stem for path in chosen], 'Lessons')}\n{tree(['solutions/index'], 'Further')}"


def tree(names: Sequence[str], title: str = "") -> str:
    """Pages in the order in which they are read; with a title in the navigation only, else as a list."""
    options = [":maxdepth: 1", *([":hidden:", f":caption: {title}"] if title else [])]
    return "\n".join(["```{toctree}", *options, "", *names, "```", ""])
