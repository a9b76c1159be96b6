"""docs/gallery.md shows every view, in small pictures, and is what the command writes."""

from __future__ import annotations

from pathlib import Path

import minipar_widgets
from minipar_widgets import gallery
from minipar_widgets.base import Shown

DOCS = Path(__file__).parents[2] / "docs"


def test_gallery_is_current_and_small(tmp_path: Path) -> None:
    written = gallery.write(tmp_path)
    assert (DOCS / "gallery.md").read_text() == (tmp_path / "gallery.md").read_text(), "run `make gallery`"
    for path in written[1:]:
        assert (DOCS / "gallery" / path.name).stat().st_size < 40_000
    assert sorted(p.name for p in (DOCS / "gallery").iterdir()) == sorted(p.name for p in written[1:])


def test_every_public_view_is_in_it() -> None:
    shown = {exhibit.name for exhibit in gallery.exhibits()}
    public = {name for name in minipar_widgets.__all__ if isinstance(getattr(minipar_widgets, name), type)}
    views = {name for name in public if issubclass(getattr(minipar_widgets, name), Shown)} - {"View", "Explorer"}
    assert views == shown
