"""A page in a real browser, which the tests of pages without a kernel use one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browsers import CHROMIUM, FLAGS


@pytest.fixture(scope="module", name="browser")
def _browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        opened = play.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        opened.new_page()  # which most tests use, one after the other: a new one costs half a second
        yield opened
        opened.close()


class Seen:
    """A page, what it complained of, and what it asked for."""

    def __init__(
        self, browser: Any, path: Path, own: bool = False, width: int = 1000, colours: str = "light", motion: str = ""
    ) -> None:
        self.own = own
        self.page = browser.new_page() if own else browser.contexts[0].pages[0]
        self.page.set_viewport_size({"width": width, "height": 900})
        self.page.emulate_media(color_scheme=colours, reduced_motion=motion or "no-preference")
        self.errors: list[str] = []
        self.outside: list[str] = []
        self.heard = {"console": self._complain, "pageerror": self._fail, "request": self._ask}
        for event, hear in self.heard.items():
            self.page.on(event, hear)
        self.page.goto(path.as_uri())
        self.canvas = self.page.locator("canvas").first
        self.canvas.wait_for()
        self.page.wait_for_function("document.querySelector('canvas').width > 300 || innerWidth < 500")

    def _complain(self, message: Any) -> None:
        if message.type == "error":
            self.errors.append(message.text)

    def _fail(self, error: Any) -> None:
        self.errors.append(str(error))

    def _ask(self, request: Any) -> None:
        if not request.url.startswith(("file:", "data:", "blob:", "about:")):
            self.outside.append(request.url)

    def readout(self) -> str:
        return str(self.page.locator(".mp-readout").first.text_content())

    def colours(self) -> int:
        """How many colours the canvas has: one or two if it is blank."""
        return int(self.page.evaluate(
            """() => {
              const c = document.querySelector('canvas'), found = new Set();
              const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
              for (let k = 0; k < d.length; k += 4) found.add(d[k] << 16 | d[k + 1] << 8 | d[k + 2]);
              return found.size;
            }"""
        ))  # fmt: skip

    def close(self) -> None:
        assert self.errors == []
        assert self.outside == []
        if self.own:
            self.page.close()
            return
        for event, hear in self.heard.items():
            self.page.remove_listener(event, hear)
        self.page.mouse.move(0, 0)
