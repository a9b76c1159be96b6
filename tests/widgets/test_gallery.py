"""docs/gallery.md and lessons/explorer.ipynb show every view, by the same lines; and each view without a kernel."""

from __future__ import annotations

import base64
import io
import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import minipar_widgets
from minipar_widgets import gallery
from minipar_widgets.base import Shown
from tests.notebooks.refresh import source_hash, tidy

ROOT = Path(__file__).parents[2]
DOCS, NOTEBOOK = ROOT / "docs", ROOT / "lessons" / "explorer.ipynb"


made = cache(gallery.Exhibit.make)  # each view once, for all tests


def test_every_public_view_is_in_it() -> None:
    public = {name for name in minipar_widgets.__all__ if isinstance(getattr(minipar_widgets, name), type)}
    views = {name for name in public if issubclass(getattr(minipar_widgets, name), Shown)} - {"View", "Explorer"}
    assert views == {exhibit.name for exhibit in gallery.EXHIBITS}


def test_page_is_what_the_command_writes_and_small(
    tmp_path: Path, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pictures are drawn with --thorough alone. (lessons/explorer.ipynb draws those of the same views.)"""
    monkeypatch.setattr(gallery.Exhibit, "make", made)
    if not pytestconfig.getoption("--thorough"):
        monkeypatch.setattr(Shown, "_png", lambda self, dark: b"")
    written = gallery.write(tmp_path)
    assert (DOCS / "gallery.md").read_text() == (tmp_path / "gallery.md").read_text(), "run `make gallery`"
    for path in written[1:]:
        assert (DOCS / "gallery" / path.name).stat().st_size < 50_000  # (twice as fine as a page)
    assert sorted(p.name for p in (DOCS / "gallery").iterdir()) == sorted(p.name for p in written[1:])


@pytest.mark.parametrize("exhibit", gallery.EXHIBITS, ids=lambda exhibit: exhibit.name)
def test_every_view_is_on_the_notebook_s_page_with_its_words(exhibit: gallery.Exhibit) -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    texts = ["".join(cell["source"]) for cell in cells]
    k = texts.index(exhibit.code)
    assert texts[k - 1].endswith(f"\n\n{exhibit.says}")
    (output,) = cells[k]["outputs"]
    assert "image/png" in output["data"]
    line = "".join(output["data"]["text/plain"])
    assert line == output["metadata"]["image/png"]["alt"]
    if exhibit.measured:
        assert "nbval-ignore-output" in cells[k]["metadata"]["tags"]
    else:
        assert line == repr(made(exhibit))


@pytest.mark.parametrize("exhibit", gallery.EXHIBITS, ids=lambda exhibit: exhibit.name)
def test_every_way_of_showing(exhibit: gallery.Exhibit) -> None:
    """Without a kernel: a line, a picture for pages of any colour, dark and light ones, a table and a page."""
    view = made(exhibit)
    data, about = view._repr_mimebundle_()
    assert sorted(data) == ["image/png", "text/plain"]
    assert data["text/plain"] == about["image/png"]["alt"] == view.summary() == repr(view)
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(data["image/png"]))).convert("RGBA"))
    assert (pixels[:, :, 3] == 0).mean() > 0.3  # the page's own colour
    light, dark = (Image.open(io.BytesIO(view.picture(mode))).convert("L") for mode in (False, True))
    assert light.getpixel((2, 2)) > 200 > 60 > dark.getpixel((2, 2))
    assert len(view.rows()) > 1
    assert "<script" in view.to_html()


def test_notebook_was_run_as_it_is_and_is_frozen() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    assert notebook["metadata"]["minipar"]["source_sha256"] == source_hash(notebook), "edited since: make lessons"
    assert notebook == tidy(json.loads(json.dumps(notebook)))
    assert NOTEBOOK.stat().st_size < 350_000  # (its pictures are twice as fine as a page)
