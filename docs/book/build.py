"""The course as a static site, from the outputs that the notebooks were saved with: `make book`.

    python docs/book/build.py build/book

Runs no cell and needs no network, neither while it builds nor when it is read. Index: lessons/README.md. Errors: what
Sphinx warns of, such as a link that leads nowhere, fails the build.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from minipar import __version__

ROOT = Path(__file__).resolve().parents[2]
NAMES = "[0-9][0-9]*_*.ipynb"
PAGES = ("docs/schedules.md",)  # beside the lessons
WIDGET = "application/vnd.jupyter.widget-view+json"
SETTINGS: dict[str, Any] = {
    "project": "minipar",
    "html_title": "minipar: the course",
    "release": __version__,
    "extensions": ["myst_nb"],
    "nb_execution_mode": "off",
    "myst_heading_anchors": 3,
    "suppress_warnings": ["myst.header"],  # solutions have a title, and then exercises
    "html_theme": "alabaster",
    "html_theme_options": {
        "description": "parallel training that you can see",
        "fixed_sidebar": True,
        "page_width": "1120px",
        "font_family": "system-ui, sans-serif",
        "head_font_family": "system-ui, sans-serif",
    },
    "html_sidebars": {"**": ["about.html", "searchfield.html", "navigation.html"]},
    "html_static_path": [str(Path(__file__).parent / "static")],
    "html_css_files": ["book.css"],
    "html_copy_source": False,
    "html_show_sphinx": False,
    "html_show_copyright": False,
}


def build(target: Path, names: Sequence[str] = ()) -> None:
    """Write the site of these lessons (default: all, and their solutions) to a folder, which is emptied first."""
    lessons = sorted((ROOT / "lessons").glob(NAMES))
    chosen = [path for path in lessons if not names or path.name in names]
    parts = [*chosen, *(path.parent / "solutions" / path.name for path in chosen)]
    with tempfile.TemporaryDirectory() as work:
        pages = Path(work) / "pages"
        (pages / "solutions").mkdir(parents=True)
        for path in parts:
            notebook = prepared(json.loads(path.read_text()), path, parts)
            (pages / path.relative_to(ROOT / "lessons")).write_text(json.dumps(notebook))
        for name in PAGES:
            shutil.copy(ROOT / name, pages)
        (pages / "solutions" / "index.md").write_text("# Solutions\n\n" + tree([path.stem for path in chosen]))
        (pages / "index.md").write_text(index((ROOT / "lessons" / "README.md").read_text(), chosen))
        shutil.rmtree(target, ignore_errors=True)
        site = Sphinx(
            str(pages), None, str(target), str(Path(work) / "doctrees"), "html", SETTINGS,
            status=None, warningiserror=True,
        )  # fmt: skip
        site.build()
    if site.statuscode:
        raise SystemExit(site.statuscode)
    shutil.rmtree(target / ".doctrees", ignore_errors=True)


def prepared(notebook: dict[str, Any], path: Path, pages: Sequence[Path]) -> dict[str, Any]:
    """A notebook for myst-nb: pictures with their alternative text, no live widgets, links within the site only."""
    notebook["metadata"]["language_info"]["pygments_lexer"] = "ipython3"
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = within("".join(cell["source"]), path, pages)
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            data.pop(WIDGET, None)
            if not data and "data" in output:
                data["text/plain"] = "(interactive: run the lesson)"
            words = output.get("metadata", {}).get("image/png", {}).get("alt")
            if "image/png" in data:
                cell["metadata"]["mystnb"] = {"image": {"alt": words or "see the caption below"}}
    return notebook


def within(text: str, path: Path, pages: Sequence[Path]) -> str:
    """Links to files of the repository that are no pages of the site, as text."""

    def link(found: re.Match[str]) -> str:
        words, target = found[1], found[2].partition("#")[0]
        if not target or "://" in target:
            return found[0]
        file = (path.parent / target).resolve()
        if not file.exists():
            raise SystemExit(f"{path.name} links to {target}, which does not exist")
        name = file.relative_to(ROOT).as_posix()
        if name in PAGES:
            return f"[{words}]({'../' * (path.parent.name == 'solutions')}{file.name})"
        return found[0] if file in pages else f"{words} (`{name}`)"

    return re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", link, text)


def index(page: str, lessons: Sequence[Path]) -> str:
    """The first page: the lessons' own, and the order of all pages."""
    listed = {path.name for path in lessons}
    rows = [row for row in page.splitlines() if (m := re.search(r"\]\((\d\d_[^)]+)\)", row)) is None or m[1] in listed]
    text = within("\n".join(rows), ROOT / "lessons" / "README.md", lessons)
    further = ["solutions/index", *(Path(name).stem for name in PAGES)]
    return f"{text}\n\n{tree([path.stem for path in lessons], 'Lessons')}\n{tree(further, 'Further')}"


def tree(names: Sequence[str], title: str = "") -> str:
    """Pages in the order in which they are read; with a title in the navigation only, else as a list."""
    options = [":maxdepth: 1", *([":hidden:", f":caption: {title}"] if title else [])]
    return "\n".join(["```{toctree}", *options, "", *names, "```", ""])


if __name__ == "__main__":
    build(Path(sys.argv[1]), sys.argv[2:])
