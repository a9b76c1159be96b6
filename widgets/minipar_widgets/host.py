"""Where the views live: in Jupyter, with traitlets and anywidget; or, without these, in a page (page.py).

    from minipar_widgets.host import PAGE, anywidget, traitlets, ui

One place decides; the same classes of views use either. What they may use of `ui` (ipywidgets), `traitlets` and
`anywidget` is what page.py has.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

PAGE = find_spec("anywidget") is None

if TYPE_CHECKING or not PAGE:
    import anywidget as anywidget
    import ipywidgets as ui
    import traitlets as traitlets
else:
    from minipar_widgets import page as ui  # type: ignore[no-redef]

    anywidget = traitlets = ui

__all__ = ["PAGE", "anywidget", "traitlets", "ui"]
