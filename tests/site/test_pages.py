"""The site in a real browser, from a server on this machine: live views, addresses, what readers write, exercises."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from docs.site import build, engine, lessons, lite, starting
from minipar_widgets import exploring
from minipar_widgets.addresses import words_of
from minipar_widgets.base import Explorer
from minipar_widgets.collective_player import CollectiveView
from minipar_widgets.exploring import Settings
from minipar_widgets.live import VIEWS, made
from minipar_widgets.writing import judged
from tests.browsers import accessible, barriers, browser
from tests.site.conftest import LESSON, Opened, needs_npm

pytestmark = [*browser, needs_npm]
ADDRESSES = {
    "ScheduleExplorer": "schedule=zb-h1&stages=5",
    "ScheduleEditor": "stages=2&microbatches=2&order=F0.F1.B1.B0-F1.F0.B0.B1",
    "CollectivePlayer": "collective=all_gather&ranks=6",
    "MemoryExplorer": "dp=4&pp=2&zero=3",
    "CheckpointExplorer": "layers=24",
    "ShardingExplorer": "dp=1&tp=4",
    "PlanExplorer": "model=gpt2-small&gpus=8&batch=64",
    "ServerView": "plan=sync=ps+mode=ssp:1+dp=2",
    "Timeline": "plan=pp=2+dp=2+zero=3",
}


def narrow(page: Any) -> bool:
    """Whether nothing of the page is wider than the window."""
    return bool(page.evaluate("document.scrollingElement.scrollWidth <= innerWidth"))


def harmless(page: Any) -> bool:
    """Whether nothing of `<img src=x onerror=hacked=1>` is there as HTML."""
    return bool(page.evaluate("typeof hacked === 'undefined' && !document.querySelector('img[src=x]')"))


def wide(page: Any) -> bool:
    """The same in a window of 1280 pixels, which the page then has."""
    page.set_viewport_size({"width": 1280, "height": 900})
    return narrow(page)


SHORT = [
    "index.html", "explore/index.html", *(f"explore/{name}.html" for name in VIEWS), "write.html", "learn/index.html",
    "docs/index.html", "docs/combinations.html", "search.html?q=bubble",
]  # fmt: skip


@accessible
def test_pages_are_for_everybody_in_a_browser_without_python_too(opened: Opened) -> None:
    """At 390 and 1280 pixels, light or dark, first pictures and all; axe finds nothing."""
    for number, path in enumerate(SHORT):
        page = opened(path, width=390, colours=("light", "dark")[number % 2], live=False, python=False)
        assert narrow(page), path
        if path.startswith("explore/") and "index" not in path:
            page.locator(".mp-status", has_text="This browser has no workers").wait_for()
            page.locator("canvas").first.wait_for()
        assert barriers(page) == [], path
        assert wide(page), path
        page.close()


def test_the_front_page_has_a_picture_at_once_and_then_answers_to_keys(opened: Opened) -> None:
    page = opened("index.html", live=False)
    page.wait_for_function("document.querySelector('canvas')?.width > 300")
    assert page.locator(".mp-live").get_attribute("data-live") is None, "the picture comes before Python"
    assert "time 33" in page.locator(".mp-caption").inner_text()
    assert page.locator(".mp-status").inner_text().startswith("loading")
    page.wait_for_selector(".mp-live[data-live]")
    stages = page.get_by_label("stages (ranks)")
    stages.focus()
    stages.press("ArrowRight")
    page.get_by_label("schedule", exact=True).focus()
    page.keyboard.type("zb-v")
    found = exploring.explore(Settings("zb-v", 5, 8))
    page.locator(".mp-caption", has_text=exploring.facts(found).partition(" · staleness")[0]).wait_for()
    page.wait_for_function("location.hash === '#schedule=zb-v&stages=5'")
    assert page.locator("a.mp-door").count() == 3
    page.evaluate("location.hash = 'stages=99&schedule=<img src=x onerror=hacked=1>'")
    page.locator(".mp-said", has_text="possible are").wait_for()
    assert harmless(page)


@accessible
@pytest.mark.many(9)
@pytest.mark.parametrize("name", VIEWS)
def test_views_show_what_the_engine_says_here(opened: Opened, name: str) -> None:
    """An address that another page made is opened; the view says what it says in this Python; axe finds nothing."""
    view = made(name)
    view.follow(words_of(ADDRESSES[name]))
    shown = view.views[0] if isinstance(view, Explorer) else view
    page = opened(f"explore/{name}.html#{ADDRESSES[name]}", width=390)
    assert page.locator(".mp-said").inner_text() == ""
    page.locator(".minipar canvas").first.press("t")  # (the tool waits behind a button where there is little room)
    cells = page.locator(".mp-table td").all_inner_texts()
    assert cells == [cell for row in shown.rows()[1:] for cell in row]
    assert narrow(page)
    for colours in ("light", "dark"):
        page.emulate_media(color_scheme=colours)
        assert barriers(page) == []
    assert wide(page)
    for word in (*words_of(ADDRESSES[name]), "other"):  # links of somebody who means harm
        page.evaluate("(word) => { location.hash = `${word}=<img src=x onerror=hacked=1>`; }", word)
        page.wait_for_function(
            "(words) => [...document.querySelectorAll('.mp-said, .mp-problem')].some("
            "(place) => words.some((word) => place.innerText.includes(word)))",
            arg=[word, "<img"],
        )
        assert harmless(page)


MINE = starting.EXAMPLES[0][1]
WRONG = {
    "a backward is missing": MINE.replace("reversed(range(microbatches))", "range(1, microbatches)"),
    "ranks wait for each other": starting.EXAMPLES[1][1],
    "no such name": MINE.replace("Forward(i)", "Forward(j)"),
    "no Python": MINE.replace("def mine", "dev mine"),
}
HOSTILE = """
import js, sys
seen = [name for name in ("document", "window", "fetch", "postMessage", "localStorage") if hasattr(js, name)]
try:
    from pyodide.code import run_js
    names = ("document", "fetch", "postMessage", "indexedDB", "BroadcastChannel", "XMLHttpRequest", "importScripts")
    seen += [name for name in names if run_js(f"typeof {name}") != "undefined"]
except ImportError:
    pass
raise ValueError(f"<img src=x onerror=hacked=1> reached {seen}")
@minipar.schedule("<b>x</b>")
def x(rank, stages, microbatches): pass
"""


def write(page: Any, text: str) -> Any:
    """Put a text into the editor and run it by key; its verdict."""
    page.locator(".cm-content").fill(text)
    before = page.locator(".mp-write").get_attribute("data-judged")
    page.locator(".cm-content").press("Control+Enter")
    page.wait_for_function("(n) => document.querySelector('.mp-write').dataset.judged > +n", arg=before)
    return page.locator(".mp-verdict")


@accessible
def test_texts_are_drawn_or_refused_beside_the_line_stopped_and_kept_in(opened: Opened) -> None:
    """Schedules, a collective and a pass; one that means harm reaches nothing; one that does not end is stopped."""
    page = opened("write.html", live=False, colours="dark", width=390)
    page.locator(".mp-verdict", has_text=judged(MINE).facts).wait_for()
    page.locator(".mp-stage-live canvas").wait_for()
    assert narrow(page)
    assert barriers(page) == []
    for text in WRONG.values():
        found = judged(text)
        verdict = write(page, text)
        said = verdict.inner_text()
        assert found.reason in said
        assert (
            (f"line {found.line}: " in said) == (found.line > 0) == (page.locator(".cm-lint-marker-error").count() > 0)
        )
        assert page.locator("canvas").count() == 0
    assert {judged(text).line for text in WRONG.values()} >= {0, 2, 4, 6}
    for name, text in starting.EXAMPLES[2:]:
        page.get_by_label("begin with").select_option(name)
        facts = judged(text).facts or CollectiveView("allreduce", "along-the-line", 4, 4 << 20).label
        page.locator(".mp-verdict", has_text=facts).wait_for()
        page.locator(".mp-stage-live canvas").first.wait_for()
    page.evaluate(
        "(code) => { location.hash = `code=${encodeURIComponent(code)}`; }", HOSTILE
    )  # a link of somebody else
    page.locator(".mp-verdict", has_text="reached []").wait_for()
    assert harmless(page)
    page.locator(".mp-write").evaluate("(place) => { place.dataset.limit = 2; }")
    assert "stopped after 2 seconds" in write(page, f"while True: pass\n{MINE}").inner_text()
    page.locator(".mp-write").evaluate("(place) => { delete place.dataset.limit; }")
    assert judged(MINE).facts in write(page, MINE).inner_text()


def test_exercises_are_checked_in_the_lesson(opened: Opened) -> None:
    page = opened(f"learn/{LESSON}.html", live=False, width=390)
    path = lessons.HOME / f"{LESSON}.ipynb"
    found = list(lessons.exercises(path).values())
    places = page.locator(".mp-exercise")
    assert places.count() == len(starting.passing(found)) == 3
    first = places.first
    first.scroll_into_view_if_needed()
    first.get_by_role("button", name="check").click()
    first.locator(".mp-verdict", has_text="not yet: nothing is written here yet").wait_for()
    first.locator(".cm-content").fill(found[0][1])
    first.get_by_role("button", name="check").click()
    first.locator(".mp-verdict", has_text="passed: ").wait_for()
    first.locator(".cm-content").fill("raise ValueError('<img src=x onerror=hacked=1>')")
    first.get_by_role("button", name="check").click()
    first.locator(".mp-verdict", has_text="<img src=x").wait_for()
    assert harmless(page)
    assert narrow(page)


def test_every_page_has_what_it_shows_and_every_link_leads_somewhere(site: Path) -> None:
    pages = [page for page in sorted(site.rglob("*.html")) if not {"_static", "lite"} & set(page.parts)]
    assert len(pages) > 30
    for page in pages:
        text = page.read_text()
        for tag, target in re.findall(r'<(a|link|script|img|iframe)\b[^>]*?(?:src|href)="([^"]+)"', text):
            if "://" in target:
                assert tag == "a", f"{page.name} loads {target}"
            elif not target.startswith(("#", "mailto:", "data:")):
                assert (page.parent / unquote(re.split("[?#]", target)[0])).exists(), f"{page.name} links to {target}"
        for picture in re.findall(r"<img [^>]*>", text):
            assert re.search(r'alt="[^"]+"', picture), f"{page.name}: {picture}"
    lesson = (site / "learn" / f"{LESSON}.html").read_text()
    assert "importlib.util" not in lesson, "the cell that installs minipar is for notebooks"
    assert "exact = (stages - 1)" not in re.sub(r"<details>.*?</details>", "", lesson, flags=re.DOTALL), "no solution"


def test_the_readme_begins_with_the_sites_address() -> None:
    start = (build.ROOT / "README.md").read_text().partition("\n## ")[0]
    assert re.search(r"\]\((https://[^)]+)\)", start)[1] == build.ADDRESS  # type: ignore[index]
    assert re.search(r"!\[[^\]]+\]\(docs/gallery/ScheduleExplorer\.png\)", start)


@pytest.mark.extra("site/test_lite.py::test_cells_on_real_ranks_are_left_out_and_what_needs_no_torch_stays")
def test_the_explorer_runs_in_jupyterlite(opened: Opened, site: Path) -> None:
    """The kernel starts with nothing from elsewhere, installs minipar, and views draw."""
    modules, tools = engine.install(engine.ROOT / "build" / "npm"), lite.install(engine.ROOT / "build" / "lite")
    assert tools
    lite.build(site / "lite", modules, tools, engine.ROOT / "build" / "wheels", [lessons.HOME / "explorer.ipynb"])
    page = opened("lite/notebooks/index.html?path=explorer.ipynb", live=False, strict=False)
    page.set_default_timeout(200_000)
    page.get_by_role("menuitem", name="Run").first.click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    page.locator(".mp-caption", has_text="time 33").first.wait_for()
    page.locator(".jp-OutputArea-output canvas").nth(2).wait_for()
