"""`make book`: the site can be built and read without a network."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[2]
FIRST = "01_one_program_four_readers"
OFFLINE = """
import runpy, socket, sys
def refuse(*_):
    raise AssertionError("the book asked for the network")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
script, *sys.argv[1:] = sys.argv[1:]
runpy.run_path(script, run_name="__main__")
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("myst_nb")
    target = tmp_path_factory.mktemp("site") / "book"
    command = [sys.executable, "-c", OFFLINE, str(ROOT / "docs" / "book" / "build.py"), str(target), f"{FIRST}.ipynb"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return target


def test_pages_and_their_contents(site: Path) -> None:
    index, lesson = (site / "index.html").read_text(), (site / f"{FIRST}.html").read_text()
    assert f'href="{FIRST}.html"' in index
    assert f'href="{FIRST}.html"' in (site / "schedules.html").read_text(), "the navigation is on every page"
    assert f'href="{FIRST}.html"' in (site / "solutions" / "index.html").read_text()
    assert "4 ranks, 164 instructions" in lesson, "saved outputs are shown"
    assert "<details>" in lesson
    assert "importlib.util" not in lesson, "the cell that installs minipar is for notebooks"
    assert "step_time" in (site / "solutions" / f"{FIRST}.html").read_text()


def test_pictures_have_words(site: Path) -> None:
    pictures = re.findall(r"<img [^>]*>", (site / f"{FIRST}.html").read_text())
    assert len(pictures) == 4
    for picture in pictures:
        assert re.search(r'alt="[^"]*(timeline of 4 ranks|ScheduleExplorer 1f1b, 4 stages)', picture)


def test_nothing_comes_from_elsewhere_and_no_link_is_dead(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) >= 5
    for page in pages:
        text = page.read_text()
        for tag, target in re.findall(r'<(a|link|script|img|iframe)\b[^>]*?(?:src|href)="([^"]+)"', text):
            if "://" in target:
                assert tag == "a", f"{page.name} loads {target}"
            elif not target.startswith(("#", "mailto:", "data:")):
                assert (page.parent / unquote(re.split("[?#]", target)[0])).exists(), f"{page.name} links to {target}"
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?https?:|@import", style.read_text()), style.name
