"""Pages whose code is run: the blocks of a Markdown page, in order, in one namespace."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def blocks(page: str) -> Iterator[tuple[int, str]]:
    """The Python blocks of a page in docs/, each with the line on which it begins."""
    text = (DOCS / page).read_text()
    for found in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield text[: found.start()].count("\n") + 2, found[1]


def run(page: str) -> dict[str, object]:
    """The names that are defined when all blocks of a page have run; what a block raises names its line."""
    space: dict[str, object] = {"__name__": "a_page"}  # of no module, so that ranks are sent its functions themselves
    for line, block in blocks(page):
        exec(compile("\n" * (line - 1) + block, str(DOCS / page), "exec"), space)
    return space
