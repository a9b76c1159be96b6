"""The timeline as people use it, in a real Chromium on its offline page: pointer, keys, play, names of any text."""

from __future__ import annotations

import dataclasses
import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from minipar import Plan, simulate
from minipar.trace import Trace, tables
from minipar.training import notebook
from minipar_widgets import Timeline
from tests.browsers import browser
from tests.widgets.conftest import Seen

pytestmark = browser

PROGRAM = Plan(pp=4, microbatches=8).compile(layers=8)
FOUR = simulate(PROGRAM, latency=0.25)
SLOWER = simulate(PROGRAM, forward=1.25, backward=2.0, latency=0.25, stage_factors=(1, 1.3, 1, 1))


class Page(Seen):
    """A page with one timeline."""

    def settle(self) -> None:
        """Wait until what was asked for is drawn: two frames."""
        self.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def pixels(self) -> np.ndarray:
        self.settle()
        shot = self.page.locator("canvas").screenshot()
        return np.asarray(Image.open(io.BytesIO(shot)).convert("RGB")).astype(int)

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)
        self.settle()

    def readout(self) -> str:
        self.settle()
        return super().readout()


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """Opens a widget's page. At the end nothing has gone wrong in it, and it has asked for nothing outside."""
    pages = []

    def open_page(widget: Any, width: int = 1100) -> Page:
        path = tmp_path / "page.html"
        widget.to_html(path)
        pages.append(Page(browser, path, width=width))
        return pages[-1]

    yield open_page
    for one in pages:
        one.close()


def _share(pixels: np.ndarray, colour: str) -> float:
    rgb = [int(colour[k : k + 2], 16) for k in (1, 3, 5)]
    return float((abs(pixels - rgb).sum(2) < 30).mean())


def test_page_draws_without_a_network(opened: Any) -> None:
    pixels = opened(Timeline(FOUR)).pixels()
    assert 0.01 < _share(pixels, "#0072B2") < _share(pixels, "#E69F00") < 0.5


# In an attribute, in text, in a comment, in a script, and in JSON inside of a script.
NAMES = [
    '"><img src=x onerror="window.hacked=1">',
    "' onmouseover='window.hacked=1' x='",
    "--><svg onload=window.hacked=1><!--",
    "</script><script>window.hacked=1</script><!--<script>",
    "</title></style></textarea><iframe srcdoc='<script>parent.hacked=1</script>'>",
    "]]><script>window.hacked=1</script>${window.hacked=1}`;window.hacked=1//\u2028",
]


def test_names_of_any_text_run_nothing(opened: Any, tmp_path: Path) -> None:
    """Of instructions and traces, in widgets, pages, SVG, and what notebooks show."""
    events = [
        {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": 100 * k, "dur": 50}
        for k, name in enumerate(NAMES)
    ]
    trace = Trace.from_kineto({"traceEvents": events})
    program = dataclasses.replace(trace.program, name=NAMES[0])
    trace = dataclasses.replace(trace, program=program, note=NAMES[3])
    widget = Timeline(trace)
    widget.caption_text = NAMES[4]
    one = opened(widget)
    tab = one.page
    canvas = one.page.locator("canvas").bounding_box()
    for part in (0.2, 0.4, 0.6, 0.8):  # what is under the pointer is told, too
        one.page.mouse.move(canvas["x"] + part * canvas["width"], canvas["y"] + 40)
        one.settle()

    class Run:
        predicted, peak_memory, bytes_sent = trace, [0], [0]

        def __init__(self, name: str) -> None:
            self.trace, self.name = trace, name

        def __repr__(self) -> str:
            return f"<{self.name}>"

    shown = [
        tables.table(["name", *NAMES[1:]], [NAMES] * 2, NAMES[1]),
        widget._repr_mimebundle_()[0].get("text/html", ""),
        *(notebook.html(Run(name)) for name in NAMES),  # type: ignore[arg-type]
    ]
    trace.plot().savefig(tmp_path / "trace.svg")
    (tmp_path / "shown.html").write_text("<!doctype html><meta charset=utf-8>" + "".join(shown))
    hacked = [one.page.evaluate("window.hacked ?? null")]
    for name in ("trace.svg", "shown.html"):
        tab.goto((tmp_path / name).as_uri())
        one.settle()
        hacked.append(tab.evaluate("window.hacked ?? null"))
        assert tab.evaluate("document.querySelectorAll('iframe, [onerror], [onload], [onmouseover]').length") == 0, name
    assert hacked == [None] * 3
    tab.set_content(NAMES[2])  # (what these names do where they are not text)
    assert tab.evaluate("window.hacked") == 1


def test_pointer_tells_what_is_under_it(opened: Any) -> None:
    one = opened(Timeline(SLOWER, FOUR))
    canvas = one.page.locator("canvas").bounding_box()
    before = one.pixels()
    one.page.mouse.move(canvas["x"] + 90, canvas["y"] + 55)
    one.settle()
    tip = one.page.locator(".mp-tip").inner_text()
    assert "rank 0 · F 0:2 mb0" in tip
    assert "first 1, second 1.25: +0.25" in tip
    assert abs(one.pixels() - before).sum() > 0  # what it depends on is marked
    one.page.mouse.move(canvas["x"] + 400, canvas["y"] + canvas["height"] - 60)
    one.settle()
    assert "rank 0 holds 4 activations" in one.page.locator(".mp-tip").inner_text()
    assert "live: saved" in one.page.locator(".mp-tip").inner_text()
    one.page.mouse.move(canvas["x"] + 74 + 0.16 * (canvas["width"] - 136), canvas["y"] + 57)  # a gap of rank 0
    one.settle()
    tip = one.page.locator(".mp-tip").inner_text()
    assert "rank 0 idle (wait)" in tip
    assert "for RECV grad_output" in tip
    assert "rank 1 holds it up, with B" in tip
    one.page.mouse.move(canvas["x"] + canvas["width"] - 80, canvas["y"] + canvas["height"] - 60)
    one.settle()
    tip = one.page.locator(".mp-tip").bounding_box()  # left of the pointer
    assert canvas["x"] <= tip["x"] < tip["x"] + tip["width"] <= canvas["x"] + canvas["width"] - 80


def test_keys_zoom_walk_and_leave(opened: Any) -> None:
    one = opened(Timeline(FOUR))
    one.page.locator("canvas").focus()
    whole = one.pixels()
    one.press("+", "+", "Shift+ArrowRight")
    zoomed = one.pixels()
    assert abs(zoomed - whole).sum() > 0
    one.press("Home")
    assert abs(one.pixels() - whole).mean() < 0.01
    one.press("Tab")
    assert "rank 0, F 0:2 mb0" in one.readout().replace(" · ", ", ")
    one.press("Tab")
    assert "mb1" in one.readout()
    one.press("Shift+Tab")
    assert "mb0" in one.readout()
    one.press("ArrowRight", "ArrowRight")
    assert "mb2" in one.readout()
    one.press("ArrowLeft")
    assert "mb1" in one.readout()
    one.press("ArrowDown", "ArrowRight")
    assert "rank 1 · F 2:4 mb0" in one.readout()
    one.press("ArrowLeft")  # there is none before it
    assert "rank 1 · F 2:4 mb0" in one.readout()
    keys = one.page.get_by_label("keys", exact=True)
    assert not keys.is_visible()
    one.press("?")
    assert "the instruction before, the one after" in keys.inner_text()
    one.press("?")
    assert not keys.is_visible()
    assert one.page.evaluate("document.activeElement.tagName") == "CANVAS"
    one.press("i")
    assert "rank 1 idle (fill)" in one.readout()
    assert "waits with F 2:4 mb0 for RECV output(1) mb0 <- 0, rank 0 holds it up, with F 0:2 mb0" in one.readout()
    one.press("Escape", "Tab")
    assert one.page.evaluate("document.activeElement.tagName") != "CANVAS"
    assert one.page.locator("canvas").get_attribute("aria-label").startswith("predicted trace: 4 ranks")


def test_drag_selects_a_window_and_says_its_bubble(opened: Any) -> None:
    one = opened(Timeline(FOUR))
    whole = one.pixels()
    canvas = one.page.locator("canvas").bounding_box()
    one.page.mouse.move(canvas["x"] + 200, canvas["y"] + 90)
    one.page.mouse.down()
    one.page.mouse.move(canvas["x"] + 600, canvas["y"] + 90, steps=4)
    assert "bubble" in one.readout()
    assert "of total" in one.readout()
    assert "of ideal" in one.readout()
    one.page.mouse.up()
    assert abs(one.pixels() - whole).sum() > 0
    one.page.mouse.dblclick(canvas["x"] + 400, canvas["y"] + 90)
    one.page.mouse.move(5, 5)
    one.page.locator("canvas").focus()
    one.press("Escape")


def test_playback_steps_through_the_program(opened: Any) -> None:
    one = opened(Timeline(FOUR))
    one.page.locator("canvas").focus()
    one.press(".")
    assert "at 1: rank 0 F 0:2 mb1, rank 1 idle (fill)" in one.readout()
    one.press(".", ".")
    assert "rank 1 F 2:4 mb" in one.readout()
    one.press(",", ",")
    assert "at 1:" in one.readout()
    one.press(" ")
    one.page.wait_for_function("document.querySelector('.mp-readout').textContent.includes('rank 3 F')", timeout=30_000)
    one.press(" ")
    assert one.page.get_by_role("button", name="play").get_attribute("aria-pressed") == "false"


def test_buttons_mark_the_critical_path_and_messages(opened: Any) -> None:
    one = opened(Timeline(SLOWER, FOUR))
    plain = one.pixels()
    one.page.get_by_text("critical path", exact=True).click()
    path = one.pixels()
    assert path.shape == plain.shape
    assert abs(path - plain).sum() > 0
    assert re.match(r"critical path, \d+ instructions on 4 ranks: .* whole .*: .*forward", one.readout())
    one.page.get_by_role("button", name="arrows from send").click()
    assert abs(one.pixels() - path).sum() > 0
    one.page.get_by_text("streams", exact=True).click()
    assert one.page.locator("canvas").bounding_box()["height"] > 0
    one.page.get_by_text("differences", exact=True).click()
    assert "second" in one.readout()
    one.page.get_by_text("table", exact=True).click()
    assert one.page.locator(".mp-table tr").count() == 9


def test_a_folded_comparison_unfolds_on_a_click(opened: Any) -> None:
    program = Plan(pp=8, microbatches=4).compile(layers=8)
    one = opened(Timeline(simulate(program, stage_factors=(1, 2, 1, 1, 1, 1, 1, 0.5)), simulate(program)))
    pixels = one.pixels()
    assert _share(pixels, "#D55E00") > 0.001  # much longer
    assert _share(pixels, "#332288") > 0.001  # much shorter
    canvas = one.page.locator("canvas").bounding_box()
    one.page.mouse.click(canvas["x"] + 20, canvas["y"] + 68)
    assert one.readout() == "rank 0: both traces"
    assert one.page.locator("canvas").bounding_box()["height"] > canvas["height"]
    one.press("f")
    assert one.readout() == "rank 0: the difference"
    assert one.page.locator("canvas").bounding_box()["height"] == canvas["height"]


def test_bars_carry_layers_and_collectives_their_letters(opened: Any, tmp_path: Path) -> None:
    """Of data parallel runs. Collectives that take no time have letters beside them; legend and pointer name them."""
    program = Plan.parse("dp=2 zero=3 microbatches=2").compile(layers=4)
    one = opened(Timeline(simulate(program)), width=1280)
    with one.page.expect_download() as got:
        one.page.get_by_role("button", name="save SVG").click()
    got.value.save_as(tmp_path / "SVG")
    root = ET.fromstring((tmp_path / "SVG").read_text())
    words = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"3 mb0", "3 mb1", "0:2 mb1", "2:4 mb0", "AG 0", "AG 3", "all-gather (AG)"} <= words
    assert not {"F0", "B1"} & words
    one = opened(Timeline(simulate(program)), width=400)
    canvas = one.page.locator("canvas")
    canvas.focus()
    box, tips = canvas.bounding_box(), set()
    for x in range(74, 300, 2):  # along the lane of collectives
        one.page.mouse.move(box["x"] + x, box["y"] + 62)
        tips.add(one.page.locator(".mp-tip").text_content())
    assert any("rank 0 · AG · ALL_GATHER" in tip for tip in tips), tips
