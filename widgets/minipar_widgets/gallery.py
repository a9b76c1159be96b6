"""docs/gallery.md: a small static picture of every view, with its caption; made by a command.

    python -m minipar_widgets.gallery [FOLDER]       default: docs/, where `make gallery` runs it

Everything in it is predicted, so that it comes out the same on every machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import minipar_widgets as views
from minipar import Plan, simulate
from minipar_widgets.base import Shown

HEAD = """# Gallery

All views of `minipar_widgets`, as the static pictures that stand for them where nothing runs. In JupyterLab they are
alive: `lessons/explorer.ipynb` has all of them on one page, and `widget.to_html("page.html")` makes a page of each
that works without a kernel. Made by `make gallery`.
"""


@dataclass(frozen=True)
class Exhibit:
    """One view: what it is called, two sentences, the line that makes it, and the same to be called."""

    name: str
    says: str
    line: str
    make: Callable[[], Shown]


def exhibits() -> list[Exhibit]:
    """Every view, in the order of the notebook."""
    return [
        Exhibit(
            "ScheduleExplorer",
            "Sliders for the schedule, the sizes and what things cost; timeline, memory, staleness and program "
            "follow at once. *run it* trains on real ranks and puts the measured timeline under the predicted one.",
            'ScheduleExplorer(schedule="zb-h1", stages=4, microbatches=8)',
            partial(_explorer, schedule="zb-h1", stages=4, microbatches=8),
        ),
        Exhibit(
            "ScheduleEditor",
            "A small schedule taken in hand: drag a block, or move it with the keyboard, and the engine verifies the "
            "order at once. What comes of it plays step by step, and is exported as code.",
            'ScheduleEditor("1f1b", stages=4, microbatches=6)',
            partial(_editor, "1f1b", stages=4, microbatches=6),
        ),
        Exhibit(
            "Timeline",
            "One trace, or a measured one under its prediction: zoom, walk from event to event, ask what waits for "
            "what. Traces of torch's own profiler open in it, too.",
            "Timeline(simulate(program))",
            _timeline,
        ),
    ]


def _explorer(**given: object) -> Shown:
    return views.ScheduleExplorer(**given)


def _editor(start: str, **given: object) -> Shown:
    return views.ScheduleEditor(start, **given)


def _timeline() -> Shown:
    program = Plan(pp=4, microbatches=8, schedule="1f1b", dp=2).compile(layers=8)
    return views.Timeline(simulate(program, latency=0.2))


def write(folder: Path) -> list[Path]:
    """Write gallery.md and gallery/*.png; what was written."""
    pictures = folder / "gallery"
    pictures.mkdir(parents=True, exist_ok=True)
    text, written = [HEAD], []
    for exhibit in exhibits():
        widget = exhibit.make()
        path = pictures / f"{exhibit.name}.png"
        path.write_bytes(widget.picture())
        written.append(path)
        caption = widget.caption().replace("\n", " ")
        text.append(
            f"## {exhibit.name}\n\n{exhibit.says}\n\n```python\n{exhibit.line}\n```\n\n"
            f"![{widget.summary()}](gallery/{exhibit.name}.png)\n\n*{caption}*\n"
        )
    page = folder / "gallery.md"
    page.write_text("\n".join(text), encoding="utf-8")
    return [page, *written]


if __name__ == "__main__":
    for made in write(Path(sys.argv[1] if len(sys.argv) > 1 else "docs")):
        print(f"{made}: {made.stat().st_size / 1000:.1f} kB")
