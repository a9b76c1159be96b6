"""The site, in build/site: views that are alive in the page, a place to write schedules, the lessons and all documents.

    python -m docs.site.build build/site              static files, to be served by anything: python -m http.server
    python -m docs.site.build build/site 01_*.ipynb   with these lessons only, and without the API

Pages show the saved outputs of lessons. Errors: what Sphinx warns of, such as a link that leads nowhere, fails the
build. Needs npm for what package.json names, PyPI for JupyterLite's wheels (lite.py), and no network when it is read;
but for notebooks of JupyterLite that draw by matplotlib, which take it from Pyodide's server.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from docs.site import api, engine, lessons, lite, starting
from minipar import __version__

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
ADDRESS = "https://minipar.example.org/"  # where the site will be; README.md begins with it
SITE = "_static/site/live"
WIDE = ("index", "explore/*", "write")  # pages without columns at their sides
SETTINGS: dict[str, Any] = {
    "project": "minipar",
    "html_title": "minipar",
    "release": __version__,
    "extensions": ["myst_nb", "sphinx.ext.autodoc", "sphinx_copybutton"],
    "nb_execution_mode": "off",
    "myst_heading_anchors": 3,
    # Solutions have a title, and then exercises; hints have words among their code.
    "suppress_warnings": ["myst.header", "misc.highlighting_failure"],
    "html_theme": "pydata_sphinx_theme",
    "html_theme_options": {
        "logo": {"text": "minipar"},
        "navbar_align": "left",
        "navbar_persistent": ["search-button"],
        "secondary_sidebar_items": {part: ["page-toc"] for part in ("learn/**", "docs/**")},
        "footer_start": [],
        "footer_end": [],
        "show_toc_level": 2,
    },
    "html_context": {"default_mode": "auto"},
    "html_favicon": str(HERE / "static" / "favicon.svg"),
    "html_sidebars": {page: [] for page in WIDE},
    "html_static_path": [str(HERE / "static")],
    "html_css_files": ["site.css", "site/live/live.css"],
    "html_copy_source": False,
    "html_show_sourcelink": False,
    "html_show_sphinx": False,
    "html_show_copyright": False,
    "autodoc_member_order": "bysource",
    "autodoc_preserve_defaults": True,
    "autodoc_typehints_format": "short",
    "python_maximum_signature_line_length": 88,
}
VIEWS = {
    "ScheduleExplorer": ("Schedules", "Every schedule, predicted while you move the sliders."),
    "ScheduleEditor": ("A schedule by hand", "Move blocks: each order is verified, and predicted or refused."),
    "CollectivePlayer": ("Collectives", "How chunks travel from rank to rank, and what it costs."),
    "MemoryExplorer": ("Memory", "What a plan needs on each rank, beside what a device has."),
    "CheckpointExplorer": ("Recomputation", "What is kept and computed again, layer by layer."),
    "ShardingExplorer": ("Sharding", "Click the form of a tensor, and see which collectives follow."),
    "PlanExplorer": ("Plans", "The best plans for a model and a machine, and why."),
    "ServerView": ("Parameter servers", "Workers and servers over time, and how old gradients are."),
    "Timeline": ("Timeline", "Any plan, event by event, with its messages, critical path and memory."),
}


def build(target: Path, names: Sequence[str] = ()) -> None:
    """Write the site with these lessons (default: all, their solutions, and the API) to a folder, emptied first."""
    tools = None if names else lite.install(ROOT / "build" / "lite")
    notebooks = lite.chosen() if tools else []
    with tempfile.TemporaryDirectory() as work:
        pages = Path(work) / "pages"
        (pages / "explore").mkdir(parents=True)
        firsts = starting.first_pictures(list(VIEWS))
        (pages / "index.md").write_text(front(firsts["ScheduleExplorer"]))
        for name, (title, words) in VIEWS.items():
            (pages / "explore" / f"{name}.md").write_text(f"# {title}\n\n{words}\n\n{live(name, firsts[name], '../')}")
        (pages / "explore" / "index.md").write_text(explore(bool(notebooks)))
        (pages / "write.md").write_text(write())
        lessons.pages(pages / "learn", names, notebooks)
        documents(pages / "docs", whole=not names)
        shutil.rmtree(target, ignore_errors=True)
        site = Sphinx(
            str(pages), None, str(target), str(Path(work) / "doctrees"), "html", SETTINGS,
            status=None, warningiserror=True,
        )  # fmt: skip
        site.connect("autodoc-process-docstring", api.plain)
        site.connect("autodoc-process-signature", api.signature)
        site.build()
    if site.statuscode:
        raise SystemExit(site.statuscode)
    shutil.rmtree(target / ".doctrees", ignore_errors=True)
    for page in (target / "docs" / "api").glob("*.html"):  # (Sphinx makes a list of definitions of a signature's lines)
        page.write_text(page.read_text().replace("<dl>\n<dd>", '<dl role="presentation">\n<dd>'))
    modules = engine.install(ROOT / "build" / "npm")
    size = engine.build(target / "_static" / "site", modules)
    if tools:
        lite.build(target / "lite", modules, tools, ROOT / "build" / "wheels", notebooks)
    print(f"{target}: a page loads {size / 1000:.0f} kB of minipar; {len(notebooks)} notebooks in JupyterLite")


def html(text: str) -> str:
    return f"```{{raw}} html\n{text}\n```\n"


def doors(links: str) -> str:
    return html(f'<div class="mp-doors">{links}</div>')


def live(name: str, first: str, up: str = "") -> str:
    """A live view; its first picture is in the page."""
    data = first.replace("<", "\\u003c")
    return html(
        f'<div class="mp-live" data-view="{name}"><script type="application/json">{data}</script></div>'
        f'<script type="module" src="{up}{SITE}/live.js"></script>'
    )


def front(first: str) -> str:
    links = "".join(
        f'<a class="mp-door" href="{place}"><b>{name}</b><span>{words}</span></a>'
        for name, place, words in (
            ("Learn", "learn/index.html", "Lessons, one idea each, with exercises that are checked in the page."),
            ("Explore", "explore/index.html", "All views, alive in the page; and write a schedule of your own."),
            ("Use", "docs/index.html", "Train your own model: installation, documents, API."),
        )
    )
    parts = ("Learn <learn/index>", "Explore <explore/index>", "Write <write>", "Docs <docs/index>")
    tree = "\n".join(["```{toctree}", ":hidden:", "", *parts, "```", ""])
    words = (
        "Parallel training that you can see: every strategy is a program, which is verified, simulated, run and drawn."
    )
    return f"# minipar\n\n{words}\n\n{live('ScheduleExplorer', first)}\n{doors(links)}\n{tree}"


def explore(notebooks: bool) -> str:
    """The list of the views; and of notebooks, if there are any."""
    places = [(f"{name}.html", *words) for name, words in VIEWS.items()]
    if notebooks:
        words = (
            "JupyterLite: all views on one page, and lessons whose cells you change. It takes half a minute to start."
        )
        places.append(("../lite/lab/index.html?path=explorer.ipynb", "Notebooks", words))
    links = "".join(
        f'<a class="mp-door" href="{place}"><b>{escape(title)}</b><span>{escape(said)}</span></a>'
        for place, title, said in places
    )
    tree = "\n".join(["```{toctree}", ":hidden:", "", *VIEWS, "```", ""])
    words = "The engine itself runs in your browser, with nothing installed. Each view's address carries its state."
    return f"# Explore\n\n{words}\n\n{doors(links)}\n{tree}"


def write() -> str:
    """The page with the editor."""
    examples = json.dumps(starting.EXAMPLES).replace("<", "\\u003c")
    words = (
        "Write what each rank does, in order. The engine adds the messages, proves that it can run or says why not, "
        "and draws what it would cost. The text runs in your browser, for ten seconds at most; the link carries it.\n\n"
        'The same runs on real ranks after `pip install minipar`, with `train(..., Plan(schedule="mine"))`: '
        "[schedules](docs/schedules.md), [collectives and passes](docs/extending.md)."
    )
    place = (
        f'<div class="mp-write"><script type="application/json">{examples}</script></div>'
        f'<script type="module" src="{SITE}/write.js"></script>'
    )
    return f"# Write a schedule\n\n{words}\n\n{html(place)}"


def documents(target: Path, whole: bool) -> None:
    """All pages of docs/, and the API."""
    shutil.copytree(ROOT / "docs", target, ignore=shutil.ignore_patterns("site", "jupyter", "*.py", "demo.png"))
    names = sorted(path.stem for path in target.glob("*.md"))
    for name in names:
        path = ROOT / "docs" / f"{name}.md"
        (target / f"{name}.md").write_text(lessons.within(path.read_text(), path, dict.fromkeys(lessons.PAGES, "")))
    extra = api.pages(target / "api") if whole else []
    start = (ROOT / "README.md").read_text().partition("## Start")[2].partition("\n## ")[0]
    start = lessons.within(f"# Use\n\n## Start\n{start}", ROOT / "README.md", {})
    trees = lessons.tree(names, "Documents") + (lessons.tree([f"api/{name}" for name in extra], "API") if extra else "")
    (target / "index.md").write_text(f"{start}\n\n{trees}")


if __name__ == "__main__":
    build(Path(sys.argv[1]), sys.argv[2:])
