"""The part of minipar that a page loads: it needs the standard library alone, is small, and says the same there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from docs.site import engine, starting

# Of its rooms a page has what needs no NumPy and no torch. What it has not is named here, by the reason.
LEFT_OUT = {
    "searches over operators": "minipar.planner.",
    "layers of torch": ("minipar.models.", "minipar.sharding."),
    "pictures, and runs that are followed": ("minipar_widgets.raster", "minipar_widgets.live_run"),
    "exercises on tensors and on searches": "minipar_course.",
}
VIEWS = """
import json, sys
sys.path[:0] = sys.argv[1:]
from minipar_widgets.addresses import words_of
from minipar_widgets.live import VIEWS, made
ADDRESSES = {
    "ScheduleExplorer": "schedule=zb-v&stages=6&microbatches=12&ratio=1.5&rank2=2",
    "ScheduleEditor": "schedule=gpipe&stages=2&microbatches=2&order=F0.F1.B1.B0-F1.F0.B0.B1",
    "CollectivePlayer": "collective=all_gather&ranks=6&nodes=2&far=4",
    "MemoryExplorer": "dp=4&pp=2&zero=3&offload=optimizer",
    "CheckpointExplorer": "layers=24&way=every+K+layers&length=3",
    "ShardingExplorer": "layer=attention&dp=1&tp=4",
    "PlanExplorer": "model=gpt2-small&gpus=8&batch=64&pins=tp=2",
    "ServerView": "plan=sync=ps+mode=ssp:1+dp=2",
    "Timeline": "plan=pp=2+dp=2+zero=3&layers=6",
}
found = {}
for name in VIEWS:
    view = made(name)
    view.follow(words_of(ADDRESSES[name]))
    said = {k: v for k, v in view.address().items() if k in words_of(ADDRESSES[name])}
    found[name] = [repr(view), view.rows(), said == words_of(ADDRESSES[name]) or [said, words_of(ADDRESSES[name])]]
print(json.dumps(found))
"""
NODE = """
import { readFileSync } from "node:fs";
import { loadPyodide } from "MODULES/pyodide/pyodide.mjs";
const py = await loadPyodide({ stdout: (line) => console.log(line) });
py.unpackArchive(new Uint8Array(readFileSync("PACKED")), "zip", { extractDir: "/minipar" });
py.runPython("import sys; sys.argv = ['', '/minipar']");
py.runPython(readFileSync("SCRIPT", "utf8"));
"""


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("engine")
    engine.pack(target)
    return target / "minipar.zip"


def test_the_engine_and_the_views_need_the_standard_library_alone(packed: Path) -> None:
    allowed = tuple(name for names in LEFT_OUT.values() for name in ([names] if isinstance(names, str) else names))
    refused = engine.refused()
    assert {name: why for name, why in refused.items() if not name.startswith(allowed)} == {}
    assert packed.stat().st_size <= engine.MOST == 640_000


@pytest.fixture(scope="module")
def here() -> str:
    """What the views say in this Python, with Jupyter's controls."""
    done = subprocess.run([sys.executable, "-c", VIEWS], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


def test_views_are_the_same_without_jupyter(packed: Path, here: str) -> None:
    shutil.unpack_archive(packed, packed.parent / "here")
    command = [sys.executable, "-I", "-S", "-c", VIEWS, str(packed.parent / "here")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(here)
    assert all(same is True for _, _, same in json.loads(here).values()), here


def test_what_needs_numpy_says_so() -> None:
    asked = {"do": "open", "view": "CheckpointExplorer", "address": "way=a+budget"}
    said = starting.alone("from minipar_widgets.live import Live\nfound = Live().answer(given)", asked)
    assert "needs NumPy, which is missing here; possible are none, sqrt" in json.dumps(said["changes"])


HARM = """
from minipar.errors import MiniparError
from minipar_widgets.live import VIEWS, made
from minipar_widgets.page import Page
found = []
for name in VIEWS:
    view = made(name)
    page = Page(view)
    for word in (*view.address(), "other"):
        try:
            view.follow({word: given})
            said = ""
        except MiniparError as error:
            said = str(error)
        changes = page.changes()
        said = said or [one["state"]["problem"] for one in changes if one["state"].get("problem")]
        shown = [one["state"]["value"] for one in changes if one["kind"] == "HTML" and "value" in one["state"]]
        found.append([name, word, bool(said), [text for text in shown if "<img" in text]])
"""


def test_what_an_address_says_is_refused_as_text() -> None:
    """Of all views, for each word of their addresses; test_pages.py tries it in a browser."""
    found = starting.alone(HARM, "<img src=x onerror=hacked=1>")
    assert [one for one in found if one[2:] != [True, []]] == []
    assert len(found) > 70


NPM = shutil.which("node") and shutil.which("npm")


@pytest.mark.skipif(not NPM and not os.environ.get("MINIPAR_BROWSER"), reason="needs node and npm")
def test_views_are_the_same_in_pyodide(packed: Path, here: str, tmp_path: Path) -> None:
    script, program = tmp_path / "views.py", tmp_path / "run.mjs"
    script.write_text(VIEWS)
    names = {"MODULES": engine.install(engine.ROOT / "build" / "npm"), "PACKED": packed, "SCRIPT": script}
    text = NODE
    for name, path in names.items():
        text = text.replace(name, path.as_posix())
    program.write_text(text)
    done = subprocess.run(["node", program], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == json.loads(here)
