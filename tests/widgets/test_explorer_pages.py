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
    exploring,
)
from minipar_widgets.base import Shown
from minipar_widgets.exploring import Settings
from tests.browsers import accessible, barriers, browser
from tests.widgets.conftest import Seen

pytestmark = browser


def _server() -> Shown:
    program = Plan.parse("dp=3 sync=ps mode=async").compile(layers=4, steps=6)
    return ServerView(simulate(program, latency=0.1, stage_factors=(1, 1.2, 2, 1)))


def _plans() -> Shown:
    return PlanExplorer("llama3-8b", "h100", gpus=8, batch=64, grid={"gpus": (8, 16), "batches": (64,)})


EXPLORERS = {
    "collective": CollectivePlayer,
    "memory": MemoryExplorer,
    "checkpoint": CheckpointExplorer,
    "server": _server,
    "sharding": ShardingExplorer,
    "plan": _plans,
}
OTHERS = {
    "schedules": lambda: ScheduleExplorer(
        schedule="gpipe",
        grid={"schedules": ("gpipe", "zb-v", "chimera"), "stages": (2, 3, 4), "microbatches": (4, 8)},
    ),
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


def test_sliders_of_a_page_show_what_the_engine_says(browser: Any, pages: dict[str, Path]) -> None:
    """Without a kernel: each choice with its own result, or the reason why there is none and nothing beside it."""
    seen = Seen(browser, pages["schedules"])
    caption, problem, head = (seen.page.locator(name).first for name in (".mp-caption", ".mp-problem", "h1"))
    schedule, stages = (seen.page.get_by_label(name, exact=True) for name in ("schedule", "stages (ranks)"))

    def shown(name: str, count: int) -> None:
        found = exploring.explore(Settings(name, count, 8))
        if found.trace is None:
            seen.page.get_by_role("alert").filter(has_text=found.problem.splitlines()[0]).wait_for()
            assert not seen.canvas.is_visible()
            assert not caption.is_visible()
            facts = found.problem.splitlines()[0]
        else:
            seen.page.wait_for_function(
                "(words) => document.querySelector('.mp-caption').textContent.includes(words)",
                arg=exploring.facts(found).partition(" · staleness")[0],
            )
            assert not problem.is_visible()
            assert seen.canvas.is_visible()
            facts = exploring.facts(found)
        assert facts in head.inner_text()
        assert f"{name}, {count} stages" in head.inner_text()

    shown("gpipe", 4)
    for name, count in (("zb-v", 4), ("chimera", 4), ("chimera", 3), ("zb-v", 3), ("gpipe", 2)):
        schedule.select_option(name)
        stages.fill(str(count - 2))
        shown(name, count)
    for k in (0, 1, 2, 1, 0, 2):  # faster than the page opens a schedule's results
        schedule.select_option(index=k % 3)
        stages.evaluate("(el, k) => { el.value = k; el.dispatchEvent(new Event('input')); }", k)
    shown("chimera", 4)
    seen.close()


def test_sliders_of_memory_judge_again(browser: Any, pages: dict[str, Path]) -> None:
    seen = Seen(browser, pages["memory"])
    other = MemoryExplorer()
    seen.page.locator(".mp-more").click()  # stays open for the next verdict
    for name, value, place in (("dp", 2, 1), ("pp", 1, 0), ("ZeRO stage", 3, 3)):
        seen.page.get_by_label(name, exact=True).fill(str(place))
        other.controls["zero" if name == "ZeRO stage" else name].value = value
        seen.page.locator(".mp-fit", has_text=other.view.memory.verdict.partition(": ")[2]).wait_for()
        assert str(other.choice) in seen.page.locator("h1").inner_text()
        assert seen.readout().startswith(f"{other.view.data['groups'][0]['label']}: ")
    assert seen.page.locator(".mp-more").get_attribute("aria-expanded") == "true"
    seen.page.locator(".mp-more").click()
    term = seen.page.locator(".mp-term", has_text="optimizer").first
    for ask in (term.hover, term.focus):  # it explains itself to the pointer and to the keyboard
        ask()
        assert "what Adam keeps" in term.get_by_role("tooltip").inner_text()
        seen.page.mouse.move(0, 0)
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


def test_plans_of_a_page_answer_sliders_and_pins_from_its_table(browser: Any, pages: dict[str, Path]) -> None:
    seen = Seen(browser, pages["plan"])
    caption, pins = seen.page.locator(".mp-caption"), seen.page.locator(".mp-pins")
    seen.page.get_by_role("button", name="show as table").click()
    before = caption.inner_text()
    gpus = seen.page.get_by_role("slider", name="GPUs")
    gpus.focus()
    gpus.press("ArrowRight")
    assert gpus.get_attribute("aria-valuetext") == "16"
    seen.page.wait_for_function(f"document.querySelector('.mp-caption').textContent !== {before!r}")
    seen.canvas.focus()
    seen.canvas.press("Enter")  # tp=1 of the best plan, with 16 GPUs
    wait_for_words(seen, ".mp-readout", "not computed for this page")
    seen.page.get_by_role("button", name="free tp=1").click()
    gpus.press("ArrowLeft")
    seen.page.wait_for_function(f"document.querySelector('.mp-caption').textContent === {before!r}")
    assert "best plan" in seen.readout()
    seen.canvas.focus()
    for key in ("Home", "ArrowLeft", "End"):  # (tp is the first column)
        seen.canvas.press(key)
    for _ in range(8):
        if seen.readout().startswith("tp=8"):
            break
        seen.canvas.press("ArrowUp")
    seen.canvas.press("Enter")
    wait_for_words(seen, ".mp-pins", "costs +")
    assert seen.page.get_by_role("button", name="free tp=8").count() == 1
    assert "tp=8" in seen.page.locator(".mp-table").inner_text()
    seen.canvas.press("z")
    wait_for_words(seen, ".mp-pins", "nothing is pinned")
    assert caption.inner_text() == before
    assert "free" not in pins.inner_text()
    seen.close()


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
