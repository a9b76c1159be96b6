"""What every explorer has besides its views: names of slider handles for screen readers (in Jupyter's own sliders the
name is only beside the handle), and words above the views that take two lines at most."""

from __future__ import annotations

from minipar_widgets.host import PAGE, anywidget
from minipar_widgets.inline import SOURCES, inline

EXPLORER = "minipar-explorer"  # the CSS class of the elements in which js/names.js searches
FOLDING = "" if PAGE else (SOURCES / "folding.css").read_text(encoding="utf-8")  # (a page has the files themselves)


class Names(anywidget.AnyWidget):
    """An invisible widget. It names the handles of all sliders of its explorer, also of sliders that appear later, and
    folds its heads."""

    _esm = "" if PAGE else inline(SOURCES / "names.js")
    _css = FOLDING


def head(words: str) -> str:
    """Words above a view, as HTML: what does not fit on two lines waits behind a button."""
    button = '<button type="button" class="mp-more" aria-expanded="false" hidden>more</button>'
    return f'<div class="mp-head"><div class="mp-lines">{words}</div>{button}</div>'


def page_head(words: str, place: str) -> str:
    """The head of a part of a page; `place` is an id that nothing else on the page has."""
    script = inline(SOURCES / "head.js").replace("export default {", "const head = {")
    return (
        f'<style>{FOLDING}</style>\n<div id="{place}">{head(words)}</div>\n'
        f'<script type="module">\n{script}head.start("{place}");\n</script>\n'
    )
