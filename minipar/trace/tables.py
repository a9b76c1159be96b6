"""What notebooks show of a run beside its pictures: tables and small images, as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any


def table(header: Sequence[object], rows: Iterable[Sequence[object]], caption: str = "") -> str:
    """An HTML table of plain text; a wide one scrolls by itself, and by keys."""
    head = "".join(f'<th scope="col">{escape(str(cell))}</th>' for cell in header)
    lines = "\n".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(caption or "table")}">'
        f"<table>{title}<thead><tr>{head}</tr></thead>\n<tbody>{lines}</tbody></table></div>"
    )


def image(figure: Any) -> str:
    """A picture as part of a page. It is as small as one that a notebook shows by itself."""
    data, about = figure._repr_mimebundle_()
    one = about["image/png"]
    return f'<img src="data:image/png;base64,{data["image/png"]}" width="{one["width"]}" alt="{escape(one["alt"])}">'
