"""The editor's page without a kernel, in a real browser: it plays, keys select blocks, and it says why nothing can be
moved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minipar_widgets import ScheduleEditor
from tests.browsers import CHROMIUM, FLAGS, browser

pytestmark = browser
COUNT = """canvas => { const c = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  const seen = new Set(); for (let k = 0; k < c.length; k += 4) seen.add(c[k] << 16 | c[k + 1] << 8 | c[k + 2]);
  return [0x0072B2, 0xE69F00].every((colour) => seen.has(colour)) }"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        found = play.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        found.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_plays_and_walks_but_does_not_change(chromium: Any, tmp_path: Path, scheme: Any) -> None:
    from playwright import sync_api as playwright

    ScheduleEditor("1f1b", stages=3, microbatches=4, schedule="test-page").to_html(tmp_path / "page.html")
    errors: list[str] = []
    page = chromium.new_page(viewport={"width": 900, "height": 600}, color_scheme=scheme)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: message.type == "error" and errors.append(message.text))
    page.goto((tmp_path / "page.html").as_uri())
    canvas, readout = page.locator("canvas"), page.locator(".mp-readout")
    page.wait_for_function("document.querySelector('canvas').width > 300")
    assert canvas.evaluate(COUNT)
    playwright.expect(page.locator(".mp-verdict")).to_contain_text("✓ time 18")
    canvas.focus()
    for key in ("ArrowRight", "ArrowDown", "ArrowRight"):
        canvas.press(key)
    playwright.expect(readout).to_contain_text("F1: forward of micro-batch 1, stage 1, on rank 1, place 2 of 8")
    canvas.press("Shift+ArrowRight")
    playwright.expect(readout).to_contain_text("No kernel")
    for _ in range(3):
        canvas.press(".")
    playwright.expect(readout).to_contain_text("time 2 of 18: rank 0 F2 · rank 1 F1 · rank 2 F0")
    canvas.press("Tab")
    playwright.expect(readout).to_contain_text("place 3 of 8")
    page.get_by_role("button", name="show as table").click()
    assert page.locator("table tr").count() == 4
    page.locator("summary").click()
    assert '@minipar.schedule("test-page")' in page.locator("details pre").inner_text()
    assert page.get_by_role("button", name="undo").is_disabled()
    page.close()
    assert errors == []
