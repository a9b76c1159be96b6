"""The gallery notebook as people use it: in a real JupyterLab, with a browser, and without any network.

Run all cells, move a slider, drag a block, run on real ranks, save, and open the saved notebook without a kernel.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.browsers import CHROMIUM, FLAGS, barriers, browser
from tests.notebooks.refresh import tidy

pytestmark = browser
ROOT = Path(__file__).parents[2]
WAIT = 60_000  # ms, for whatever is waited for: the machine may be slow
# anywidget reports a widget whose module has not loaded after two seconds; beside other tests it may take longer.
PATIENT = "AbortSignal.timeout = (wait => ms => wait.call(AbortSignal, Math.max(ms, 60_000)))(AbortSignal.timeout)"


# What other packages add to JupyterLab, and what these tests do not need. It would start later with it.
SERVER = ("ipyparallel", "jupyter_server_terminals", "nbgrader.server_extensions.assignment_list",
          "nbgrader.server_extensions.course_list", "nbgrader.server_extensions.formgrader",
          "nbgrader.server_extensions.validate_assignment", "notebook", "notebook_shim")  # fmt: skip
BROWSER = ("@jupyter/nbgrader", "@jupyter-notebook/lab-extension", "ipyparallel-labextension", "jupyterlab-plotly")


def put(path: Path, value: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


@contextmanager
def lab(folder: Path) -> Iterator[str]:
    """A private JupyterLab in a folder; its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    own = {f"JUPYTER_{name}": str(folder / name.lower()) for name in ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR")}
    own |= {
        "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
    }
    settings = {  # no news from outside; and every cell is drawn, not only those in sight
        "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
        "notebook-extension/tracker": {"windowingMode": "none"},
    }
    for name, value in settings.items():
        put(folder / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings", value)
    config = folder / "config_dir"
    off = {"ServerApp": {"jpserver_extensions": dict.fromkeys(SERVER, False)}}
    put(config / "jupyter_server_config.json", off)
    put(config / "labconfig" / "page_config.json", {"disabledExtensions": dict.fromkeys(BROWSER, True)})
    paths = os.pathsep.join([str(ROOT), str(ROOT / "widgets")])
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}", "--port-retries=0",
        "--IdentityProvider.token=", f"--ServerApp.root_dir={folder / 'work'}", "--LabApp.expose_app_in_browser=True",
    ]  # fmt: skip
    with (folder / "lab.log").open("w") as log:
        server = subprocess.Popen(
            command, env={**os.environ, **own, "PYTHONPATH": paths}, stdout=log, stderr=log, start_new_session=True
        )
        try:
            address = f"http://127.0.0.1:{port}"
            until = time.monotonic() + 60
            while True:
                try:
                    urllib.request.urlopen(f"{address}/api/status", timeout=2).read()
                    break
                except OSError:
                    assert server.poll() is None, (folder / "lab.log").read_text()
                    assert time.monotonic() < until, (folder / "lab.log").read_text()
                    time.sleep(0.1)
            yield address
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            try:
                server.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait(15)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    from playwright import sync_api as playwright

    folder = tmp_path_factory.mktemp("lab")
    (folder / "work").mkdir()
    playwright.expect.set_options(timeout=WAIT)
    with lab(folder) as address, playwright.sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = chromium.new_page()
        page.set_default_timeout(WAIT)
        seen = Watched(page)
        page.goto(f"{address}/lab?reset", wait_until="domcontentloaded")
        page.wait_for_function("window.jupyterapp !== undefined", timeout=WAIT)
        page.evaluate("async () => { await window.jupyterapp.restored; }")  # (then it knows its themes)
        yield Lab(folder, page, seen)
        chromium.close()


class Watched:
    """A page that may talk to this machine only, and whose complaints are kept."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.outside: list[str] = []
        self.errors: list[str] = []
        page.route("**/*", self._route)
        page.add_init_script(PATIENT)
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self.errors.append(f"{error}\n{error.stack}"))

    def _hear(self, message: Any) -> None:
        if message.type == "error":
            missing = message.location["url"] if message.text.startswith("Failed to load resource") else ""
            self.errors.append(f"{message.text} {missing}".strip())

    def _route(self, route: Any) -> None:
        if route.request.url.startswith(("http://127.0.0.1:", "data:", "blob:")):
            return route.continue_()
        self.outside.append(route.request.url)
        return route.abort()

    def open(self, path: str, kernel: bool = True) -> None:
        """A notebook in place of what is open; without a kernel, as a page that nobody has run."""
        self.page.evaluate(
            """async ([path, kernel]) => {
              await window.jupyterapp.restored;
              await window.jupyterapp.commands.execute('application:close-all');
              const open = {path, factory: 'Notebook'};
              if (!kernel) open.kernelPreference = {shouldStart: false, canStart: false, autoStartDefault: false};
              const panel = await window.jupyterapp.commands.execute('docmanager:open', open);
              await panel.context.ready;
              await panel.revealed;
              window.panel = panel;
              if (kernel) await panel.sessionContext.ready;
            }""",
            [path, kernel],
        )

    def run_all(self) -> None:
        self.page.wait_for_function("window.panel.sessionContext.session?.kernel?.status === 'idle'", timeout=WAIT)
        assert self.page.evaluate("window.jupyterapp.commands.execute('notebook:run-all-cells')") is True


@dataclass(frozen=True)
class Lab:
    """A JupyterLab and a browser with its page, which all tests share: each takes seconds to start."""

    folder: Path
    page: Any
    seen: Watched


def drag(page: Any, canvas: Any, start: float, end: float) -> None:
    """Take the block of rank 1 that runs at a time to another time, with the mouse; the whole takes 27."""
    box = canvas.bounding_box()
    left, scale = box["x"] + 58, (box["width"] - 72) / 27
    y = box["y"] + 6 + 1.5 * 36
    page.mouse.move(left + (start - 1.5) * scale, y)
    page.mouse.down()
    page.mouse.move(left + 10 * scale, y, steps=5)
    page.mouse.move(left + min(end, 26.9) * scale, y, steps=5)
    page.mouse.up()


# How cells of the gallery begin that are run with --thorough alone. The pages of their views are opened by
# test_explorer_pages.py, test_browser.py and test_live_run.py, and what they answer is asked by their own tests.
LATER = (
    "program =", "CheckpointExplorer(", "CollectivePlayer(", "served =", "ShardingExplorer(", "PlanExplorer(", "with ",
)  # fmt: skip


def code_cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def test_notebook_in_a_real_lab_without_network(shared: Lab, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """With the views of schedules and of memory, and with --thorough with all others."""
    from playwright import sync_api as playwright

    page, seen, thorough = shared.page, shared.seen, pytestconfig.getoption("--thorough")
    notebook = shared.folder / "work" / "explorer.ipynb"
    source = json.loads((ROOT / "lessons" / "explorer.ipynb").read_text())
    left_out = [cell for cell in source["cells"] if "".join(cell["source"]).startswith(LATER)]
    assert len(left_out) == len(LATER)
    source["cells"] = [cell for cell in source["cells"] if thorough or cell not in left_out]
    for cell in source["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
            if "".join(cell["source"]).startswith("PlanExplorer("):
                cell["source"] = 'PlanExplorer("llama3-8b", "h100", gpus=8, batch=64)'  # which is answered sooner
    notebook.write_text(json.dumps(source))
    page.set_viewport_size({"width": 1400, "height": 1000})
    seen.open("explorer.ipynb")
    seen.run_all()
    page.wait_for_function("window.panel.sessionContext.session.kernel.status === 'idle'", timeout=WAIT)

    explorer = page.locator(".jp-OutputArea-output:has(.noUi-handle)").first
    explorer.scroll_into_view_if_needed()
    caption = explorer.locator(".mp-caption").first
    before = caption.inner_text()
    assert "time 33" in before
    assert page.locator(".minipar-explorer .noUi-handle").count() > (20 if thorough else 10)
    assert page.locator(".minipar-explorer .noUi-handle:not([aria-label])").count() == 0
    assert explorer.get_by_role("slider", name="micro-batches").count() == 1
    handle = explorer.locator(".noUi-handle").nth(1)  # micro-batches
    handle.focus()
    handle.press("ArrowRight")
    playwright.expect(caption).to_contain_text("time 36")
    handle = explorer.locator(".noUi-handle").nth(0)  # stages
    handle.focus()
    handle.press("Home")
    handle.press("ArrowRight")
    playwright.expect(caption).to_contain_text("time 30")

    editor = page.locator(".minipar:has(.mp-verdict)").first
    editor.scroll_into_view_if_needed()
    verdict = editor.locator(".mp-verdict")
    fine = verdict.inner_text()
    assert fine.startswith("✓")
    canvas = editor.locator("canvas")
    canvas.focus()
    for key in ("ArrowRight", "End", *["Shift+ArrowLeft"] * 9):  # the last backward of rank 0 goes too far ahead
        canvas.press(key)
    playwright.expect(verdict).to_contain_text("cannot run")
    editor.get_by_role("button", name="back to the first order").click()
    playwright.expect(verdict).to_have_text(fine)
    drag(page, canvas, 4, 30)  # F1 of rank 1 goes to the end of it, and a backward needs it before
    playwright.expect(verdict).to_contain_text("cannot run")
    canvas.press("z")
    playwright.expect(verdict).to_have_text(fine)

    page.screenshot(path=tmp_path / "lab.png")
    assert explorer.get_by_role("button", name="run it").is_enabled()
    contradictions(page, thorough)
    for theme in ("JupyterLab Light", "JupyterLab Dark"):
        page.evaluate("(theme) => window.jupyterapp.commands.execute('apputils:change-theme', {theme})", theme)
        dark = str("Dark" in theme).lower()
        playwright.expect(page.locator(f'.minipar:not([data-dark="{dark}"])')).to_have_count(0)
        assert barriers(page, ".jp-OutputArea-output") == []
    page.evaluate("window.jupyterapp.commands.execute('apputils:change-theme', {theme: 'JupyterLab Light'})")

    page.evaluate("window.jupyterapp.commands.execute('docmanager:save')")
    page.wait_for_function("!window.panel.context.model.dirty")
    saved = code_cells(notebook)
    assert all(cell["execution_count"] for cell in saved)
    assert not [out for cell in saved for out in cell["outputs"] if out["output_type"] == "error"]
    pictures = [out for cell in saved for out in cell["outputs"] if "image/png" in out.get("data", {})]
    assert len(pictures) >= 3
    assert seen.errors == []

    page.evaluate("window.panel.sessionContext.shutdown()")
    notebook.with_name("saved.ipynb").write_text(json.dumps(tidy(json.loads(notebook.read_text()))))  # as committed
    seen.open("saved.ipynb", kernel=False)
    page.wait_for_selector(".jp-OutputArea-output img")
    assert page.locator(".jp-OutputArea-output img").count() >= 1
    assert "model not found" not in page.inner_text(".jp-Notebook")
    assert seen.outside == []
    # (ipywidgets' own manager does not expect a page without a kernel)
    assert [error for error in seen.errors if "jupyterlab-manager" not in error] == []


def contradictions(page: Any, thorough: bool) -> None:
    """Nothing stands beside another setting than its own: not after an impossible choice or quick changes."""
    from playwright import sync_api as playwright

    def output(inside: str) -> Any:
        return page.locator(f".jp-OutputArea-output:has({inside})").first

    memory = output(".mp-fit")
    verdict, tp, view = memory.locator(".mp-fit"), memory.get_by_label("tp (formula)"), memory.locator(".minipar").first
    fine = verdict.inner_text()
    tp.select_option("16")
    playwright.expect(verdict).to_contain_text("✗ No such plan: tp=16: must divide 25 heads")
    playwright.expect(view).not_to_be_visible()
    playwright.expect(memory.locator(".js-plotly-plot")).to_have_count(0)
    for value in ("16", "1", "16", "1"):
        tp.select_option(value)
    playwright.expect(verdict).to_have_text(fine, use_inner_text=True)
    playwright.expect(view).to_be_visible()

    if not thorough:
        return
    shards = output("canvas[aria-label^='sharding of']")
    axis = shards.get_by_role("slider", name="tp (ranks)")
    for key in ("End", "Home", "ArrowRight"):
        axis.press(key)
    playwright.expect(shards.locator("canvas")).to_have_attribute("aria-label", re.compile("on tp=2:"))

    plans = output("canvas[aria-label^='plans for']")
    gpus = plans.get_by_role("slider", name="GPUs")
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft"):
        gpus.press(key)
    chosen = gpus.get_attribute("aria-valuetext")
    playwright.expect(plans.locator("canvas")).to_have_attribute("aria-label", re.compile(f"on {chosen} h100"))


LIVE = """from functools import partial
from minipar import data, models
from minipar_widgets import live
live(partial(models.mlp, widths=(32, 64, 64, 256)), data.for_model("mlp-tiny"), "pp=2 microbatches=2", steps=100_000)"""


def test_live_run_is_cancelled_while_its_cell_runs(shared: Lab) -> None:
    """And in a dark JupyterLab on a light desktop."""
    from playwright import sync_api as playwright

    page, seen = shared.page, shared.seen
    notebook = shared.folder / "work" / "live.ipynb"
    cells = [
        {
            "cell_type": "code", "id": f"c{k}", "metadata": {}, "source": text, "outputs": [],
            "execution_count": None,
        }
        for k, text in enumerate([LIVE, "'not run'"])
    ]  # fmt: skip
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    whole = {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel}, "cells": cells}
    notebook.write_text(json.dumps(whole))
    page.set_viewport_size({"width": 1000, "height": 900})
    page.emulate_media(color_scheme="light")
    page.evaluate("window.jupyterapp.commands.execute('apputils:change-theme', {theme: 'JupyterLab Dark'})")
    del seen.errors[:], seen.outside[:]
    seen.open("live.ipynb")
    page.wait_for_function("window.panel.sessionContext.session?.kernel?.status === 'idle'", timeout=WAIT)
    page.evaluate("void window.jupyterapp.commands.execute('notebook:run-all-cells')")
    output = page.locator(".jp-CodeCell").first.locator(".jp-Cell-outputArea")
    playwright.expect(output).to_contain_text("of 100000, loss")
    timeline = output.locator(".minipar")
    playwright.expect(timeline).to_contain_text("measured: time")
    assert timeline.evaluate("(el) => el.dataset.dark") == "true"
    output.get_by_role("button", name="cancel").click()
    playwright.expect(output).to_contain_text("Stopped: cancelled at step")
    playwright.expect(output.locator("img")).to_be_visible()  # the picture, in the widget's place
    assert output.locator(".minipar").count() == 0
    page.evaluate("window.jupyterapp.commands.execute('docmanager:save')")
    page.wait_for_function("!window.panel.context.model.dirty")
    first, second = code_cells(notebook)
    texts = ["".join(out["data"]["text/plain"]) for out in first["outputs"] if "data" in out]
    assert texts[0].startswith("live run of pp=2 microbatches=2: cancelled, step ")
    assert second["outputs"] == []  # run all stops there
    assert seen.outside == []
    assert seen.errors == []
