"""The site with one lesson, served from this machine, and pages of it in a browser."""

from __future__ import annotations

import functools
import http.server
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from docs.site import engine
from tests.browsers import CHROMIUM, FLAGS

LESSON = "10_pipelines"
REQUIRED = os.environ.get("MINIPAR_BROWSER", "") not in ("", "0")
needs_npm = pytest.mark.skipif(
    not (shutil.which("node") and shutil.which("npm")) and not REQUIRED, reason="needs node and npm (apt install npm)"
)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("pydata_sphinx_theme")
    if given := os.environ.get("MINIPAR_SITE"):  # (one that is built)
        return Path(given)
    target = tmp_path_factory.mktemp("built") / "site"
    command = [sys.executable, "-m", "docs.site.build", str(target), f"{LESSON}.ipynb"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=engine.ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return target


@pytest.fixture(scope="session")
def address(site: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        opened = play.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield opened
        opened.close()


Opened = Callable[..., Any]


@pytest.fixture
def opened(address: str, chromium: Any) -> Iterator[Opened]:
    """Opens a page of the site. At its end nothing has gone wrong in it, and it has asked for nothing elsewhere."""
    pages, wrong = [], []

    def open_page(
        path: str,
        width: int = 1280,
        colours: str = "light",
        live: bool = True,
        strict: bool = True,
        python: bool = True,
    ) -> Any:
        page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=colours)
        if not python:  # (as a browser that cannot run it)
            page.add_init_script("delete globalThis.Worker")
        page.set_default_timeout(60_000)  # (a loaded machine starts Python in half of it)
        if strict:  # (JupyterLite looks for files that its server does not have)
            page.on("console", complain)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on(
            "request", lambda request: request.url.startswith((address, "data:", "blob:")) or wrong.append(request.url)
        )
        page.goto(address + path)
        if live:
            page.wait_for_selector(".mp-live[data-live]")
        pages.append(page)
        return page

    def complain(message: Any) -> None:  # (axe asks for a sheet that another one imports, at a wrong place)
        if message.type == "error" and not message.location["url"].endswith("/basic.css"):
            wrong.append(f"{message.text} {message.location['url']}")

    yield open_page
    for page in pages:
        page.close()
    assert wrong == []
