"""The explorers' pages in a real browser, without any network: keys, pointer, play, table, saving, dark and narrow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minipar import Plan, simulate
from minipar_widgets import (
    CheckpointExplorer,
    CollectivePlayer,
    MemoryExplorer,
    PlanExplorer,
    ScheduleEditor,
    ScheduleExplorer,
    ServerView,
    ShardingExplorer,
    Timeline,
)
from minipar_widgets.base import Shown
from tests.browsers import accessible, barriers, browser
from tests.widgets.conftest import Seen

pytestmark = browser


def _server() -> Shown:
    program = Plan.parse("dp=3 sync=ps mode=async").compile(layers=4, steps=6)
    return ServerView(simulate(program, latency=0.1, stage_factors=(1, 1.2, 2, 1)))


def _plans() -> Shown:
    return PlanExplorer("llama3-8b", "h100", gpus=8, batch=64)


EXPLORERS = {
    "collective": CollectivePlayer,
    "memory": MemoryExplorer,
    "checkpoint": CheckpointExplorer,
    "server": _server,
    "sharding": ShardingExplorer,
    "plan": _plans,
}
OTHERS = {
    "schedules": lambda: ScheduleExplorer(schedule="gpipe"),
    "editor": lambda: ScheduleEditor("1f1b", stages=3, microbatches=4, schedule="test-pages"),
    "timeline": lambda: Timeline(
        simulate(Plan(pp=2, dp=2).compile(layers=4)), simulate(Plan(pp=2, dp=2).compile(layers=4))
    ),
}
KEYS = {
    "server": ("+", "ArrowRight", "ArrowDown", "-", "Home"),
    "sharding": ("ArrowUp", "ArrowUp", "ArrowRight", "Enter", "Home"),
    "plan": ("ArrowRight", "ArrowDown", "ArrowLeft", "End", "Home"),
}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    found = {}
    for name, make in {**EXPLORERS, **OTHERS}.items():
        found[name] = folder / f"{name}.html"
        make().to_html(found[name])
    return found


@pytest.mark.parametrize("name", EXPLORERS)
def test_keys_pointer_table_and_pictures(browser: Any, pages: dict[str, Path], name: str, tmp_path: Path) -> None:
    """On one page, one after the other: a page takes long to open."""
    seen = Seen(browser, pages[name])
    keys_walk_and_speak(seen, name)
    seen.page.mouse.move(0, 0)
    pointer_asks(seen)
    table_and_pictures(seen, tmp_path)
    seen.close()


def keys_walk_and_speak(seen: Seen, name: str) -> None:
    assert seen.colours() > 10
    seen.canvas.focus()
    heard = []
    for key in KEYS.get(name, ("ArrowRight", "ArrowRight", "ArrowLeft", "End", "Home")):
        seen.canvas.press(key)
        heard.append(seen.readout())
    assert all(heard)
    assert heard[0] != heard[1]
    assert len(set(heard)) >= 3
    assert seen.canvas.get_attribute("aria-label")
    assert seen.canvas.evaluate("el => getComputedStyle(el).outlineStyle") == "solid"


def pointer_asks(seen: Seen) -> None:
    box = seen.canvas.bounding_box()
    tip = seen.page.locator(".mp-tip").first
    said = set()
    for x in range(30, int(box["width"]), 47):
        for y in range(10, int(box["height"]), 31):
            seen.page.mouse.move(box["x"] + x, box["y"] + y)
            if tip.is_visible():
                said.add(tip.inner_text())
        if len(said) >= 3:
            break
    assert len(said) >= 3


def table_and_pictures(seen: Seen, tmp_path: Path) -> None:
    table = seen.page.get_by_role("button", name="show as table")
    assert table.get_attribute("aria-pressed") == "false"
    table.click()
    assert seen.page.locator(".mp-table tr").count() > 3
    for kind, begins in (("PNG", b"\x89PNG"), ("SVG", b"<svg")):
        with seen.page.expect_download() as download:
            seen.page.get_by_role("button", name=f"save {kind}").click()
        saved = tmp_path / download.value.suggested_filename
        download.value.save_as(saved)
        content = saved.read_bytes()
        assert content.startswith(begins)
        if kind == "SVG":
            import xml.etree.ElementTree as tree

            assert len(list(tree.fromstring(content).iter())) > 20


@pytest.mark.parametrize("name", [*EXPLORERS, *OTHERS])
def test_dark_and_narrow(browser: Any, pages: dict[str, Path], name: str) -> None:
    """What has no room waits behind a button, which the keyboard reaches, and nothing sticks out."""
    seen = Seen(browser, pages[name], width=400, colours="dark")
    assert seen.page.locator(".minipar").first.get_attribute("data-dark") == "true"
    assert seen.colours() > 10
    if name in EXPLORERS:
        nothing_sticks_out(seen)
    head, more = seen.page.locator(".mp-lines").first, seen.page.locator(".mp-more").first
    line = float(head.evaluate("(el) => parseFloat(getComputedStyle(el).lineHeight)"))
    seen.page.wait_for_function("document.querySelector('.mp-head').dataset.folded")
    assert head.bounding_box()["height"] <= 2 * line + 2
    whole = head.evaluate("(el) => el.scrollHeight")
    assert whole > 2 * line + 6
    assert more.get_attribute("aria-expanded") == "false"
    more.press("Enter")
    assert more.get_attribute("aria-expanded") == "true"
    assert head.bounding_box()["height"] >= whole - 1 > 2 * line
    more.press("Enter")
    assert head.bounding_box()["height"] <= 2 * line + 2
    bar, others = seen.page.locator(".mp-toolbar").first, seen.page.get_by_label("more tools").first
    assert bar.bounding_box()["height"] <= 26
    tools = bar.locator(":scope > *:not([aria-label='more tools'])")
    hidden = [k for k in range(tools.count()) if not tools.nth(k).is_visible()]
    assert bool(hidden) == others.is_visible()
    if hidden:
        others.press("Enter")
        assert others.get_attribute("aria-expanded") == "true"
        assert all(tools.nth(k).is_visible() for k in range(tools.count()))
        assert bar.bounding_box()["height"] > 40
    seen.close()


def nothing_sticks_out(seen: Seen) -> None:
    wider = seen.page.evaluate("document.documentElement.scrollWidth - innerWidth")
    assert wider <= 0, f"{wider} pixels stick out"
    parts = "[...document.querySelectorAll('body *')].filter((one) => one.scrollWidth > one.clientWidth + 1)"
    scroll = f"{parts}.filter((one) => /auto|scroll/.test(getComputedStyle(one).overflowX)).map((one) => one.outerHTML)"
    assert seen.page.evaluate(scroll) == []
    images = seen.page.locator("picture img")
    for k in range(images.count()):  # drawn for this width: its words are as large as they were meant
        drawn, shown = images.nth(k).evaluate("(one) => [one.naturalWidth, one.clientWidth]")
        assert drawn == shown


@pytest.mark.many(6)
@accessible
@pytest.mark.parametrize("name", [*EXPLORERS, *OTHERS])
def test_nobody_is_kept_out(browser: Any, pages: dict[str, Path], name: str) -> None:
    """In light and in dark, with the keys and the table on the page; and `?` shows keys, each with what it does."""
    seen = Seen(browser, pages[name])
    keys = seen.page.get_by_label("keys", exact=True)
    assert not keys.is_visible()
    seen.canvas.press("?")
    assert keys.is_visible()
    told = dict(
        seen.page.eval_on_selector_all(
            ".mp-keys div", "all => all.map((one) => [...one.children].map((c) => c.innerText))"
        )
    )
    assert told["?"] == "these keys"
    assert told["t"] == "the same as a table"
    assert told["← →"]
    assert {"↑ ↓", "space", "+ -"} & set(told)
    seen.canvas.press("t")
    for colours in ("light", "dark"):
        seen.page.emulate_media(color_scheme=colours)
        assert barriers(seen.page) == []
    seen.close()


def test_it_plays_to_the_end(browser: Any, pages: dict[str, Path]) -> None:
    seen = Seen(browser, pages["collective"])
    seen.canvas.focus()
    for _ in range(5):
        seen.canvas.press(">")  # faster
    seen.canvas.press(" ")
    assert seen.page.get_by_role("button", name="pause").count() == 1
    seen.page.get_by_role("button", name="play", exact=True).wait_for(timeout=60_000)
    assert "4 of 4 ranks hold" in seen.readout()
    seen.close()


def test_reduced_motion_steps(browser: Any, pages: dict[str, Path]) -> None:
    seen = Seen(browser, pages["collective"], motion="reduce")
    seen.canvas.press("Home")
    before = seen.readout()
    seen.canvas.press(" ")
    seen.page.wait_for_function(f"document.querySelector('.mp-readout').textContent !== {before!r}")
    seen.canvas.press(" ")
    assert "rank 0 sends" in seen.readout()
    seen.close()


def test_tab_walks_the_steps_of_a_worker_and_lets_go(browser: Any, pages: dict[str, Path]) -> None:
    seen = Seen(browser, pages["server"])
    seen.canvas.focus()
    heard = []
    for _ in range(6):
        seen.canvas.press("Tab")
        heard.append(seen.readout())
    assert [text.partition(":")[0] for text in heard] == [f"worker 0, step {k}" for k in range(6)]
    seen.canvas.press("Tab")
    assert seen.page.evaluate("document.activeElement.tagName") != "CANVAS"
    seen.canvas.press("ArrowDown")
    assert seen.readout().startswith("worker 1: 6 steps")
    for key in ("Tab", "Escape"):
        seen.canvas.press(key)
        assert seen.page.evaluate("document.activeElement.tagName") == "CANVAS"
    seen.page.keyboard.press("Tab")  # in the midst of a worker's steps
    assert seen.page.evaluate("document.activeElement.tagName") != "CANVAS"
    seen.close()


def test_forms_are_fixed_by_clicks_and_keys(browser: Any, tmp_path: Path) -> None:
    """A page whose model asks Python here, as a kernel would be asked."""
    explorer = ShardingExplorer("MLP", "tp=2")
    view = explorer.view
    view.update(view.found.layer, explorer.mesh, (), explorer.links)
    text = explorer.to_html()
    answer = 'save_changes() { toKernel(state.asked).then((data) => model.set("data", data)); }'
    for before, after in (('"editable":false', '"editable":true'), ("save_changes() {}", answer)):
        assert text.count(before) == 1
        text = text.replace(before, after)
    (tmp_path / "page.html").write_text(text, encoding="utf-8")

    def ask(asked: Any) -> Any:
        view.asked = asked
        return view.data

    seen = Seen(browser, tmp_path / "page.html", own=True)
    seen.page.expose_function("toKernel", ask)
    seen.canvas.focus()
    for key in ("Home", *["ArrowDown"] * 4, *["ArrowRight"] * 3):  # from x in R to up in S2
        seen.canvas.press(key)
    assert seen.readout().startswith("up as S2 on tp: forward 1 collective, 16 MiB")
    seen.canvas.press("Enter")
    seen.page.wait_for_function("document.querySelector('.mp-readout').textContent.includes('S2 on tp (fixed by you)')")
    assert [tuple(pick) for pick in view.picks] == [("up", "tp", "S2")]
    seen.canvas.press("Enter")  # again: it is free
    seen.page.wait_for_function("document.querySelector('.mp-readout').textContent.includes('R on tp;')")
    assert view.picks == ()
    seen.canvas.press("z")
    seen.page.wait_for_function("document.querySelector('.mp-readout').textContent.includes('fixed by you')")
    assert [tuple(pick) for pick in view.picks] == [("up", "tp", "S2")]
    heights = 40 + 26 * 3 + 26 + 22 + 13  # x, norm.weight, norm, up.weight, a collective, and half of up
    box = seen.canvas.bounding_box()
    last = 0.0  # the rightmost column of the list is P
    for x in range(int(box["width"]) - 320, 200, -4):
        seen.page.mouse.move(box["x"] + x, box["y"] + heights)
        if seen.page.locator(".mp-tip").inner_text().startswith("up as P on tp"):
            last = x
            break
    assert last
    seen.page.mouse.click(box["x"] + last, box["y"] + heights + 26)  # gelu, in P: it cannot
    seen.page.wait_for_function("document.querySelector('.mp-readout').textContent.startsWith('cannot be: gelu')")
    assert seen.colours() > 10
    assert [tuple(pick) for pick in view.found.refused] == [("gelu", "tp", "P")]
    seen.canvas.press("z")
    seen.page.wait_for_function("!document.querySelector('.mp-readout').textContent.startsWith('cannot be')")
    assert view.found.refused == ()
    seen.page.get_by_role("button", name="fix nothing").click()
    seen.page.wait_for_function("document.querySelector('.mp-readout').textContent.includes('R on tp;')")
    assert view.picks == ()
    seen.close()


def wait_for_words(seen: Seen, place: str, words: str) -> None:
    seen.page.locator(place, has_text=words).first.wait_for()


def test_the_editor_walks_and_steps_but_changes_nothing(browser: Any, pages: dict[str, Path]) -> None:
    """Without a kernel it says why."""
    seen = Seen(browser, pages["editor"])
    wait_for_words(seen, ".mp-verdict", "✓ time 18")
    for key in ("ArrowRight", "ArrowDown", "ArrowRight"):
        seen.canvas.press(key)
    wait_for_words(seen, ".mp-readout", "F1: forward of micro-batch 1, stage 1, on rank 1, place 2 of 8")
    seen.canvas.press("Shift+ArrowRight")
    wait_for_words(seen, ".mp-readout", "No kernel")
    for _ in range(3):
        seen.canvas.press(".")
    wait_for_words(seen, ".mp-readout", "time 2 of 18: rank 0 F2 · rank 1 F1 · rank 2 F0")
    assert seen.page.get_by_role("button", name="undo").is_disabled()
    seen.page.locator("summary").click()
    assert '@minipar.schedule("test-pages")' in seen.page.locator("details pre").inner_text()
    seen.close()
