"""A plotly figure among other widgets: as plain data, drawn by JupyterLab's plotly in the page's colours."""

from __future__ import annotations

import base64
from collections.abc import Callable
from html import escape
from typing import Any

from minipar_widgets.host import ui
from minipar_widgets.words import FINE

_PLOTLY = "application/vnd.plotly.v1+json"
# The figure has no background; its text takes the page's colour, so that it can be read on a dark page. The height is
# repeated because JupyterLab draws again when its theme changes, and a figure that is scrolled out of sight then has
# no height.
_STYLE = """<style>
.PLACE .js-plotly-plot text { fill: var(--jp-ui-font-color1, CanvasText) !important; }
.PLACE .js-plotly-plot .bglayer rect, .PLACE .js-plotly-plot .legend .bg { fill: none !important; }
.PLACE .js-plotly-plot, .PLACE .js-plotly-plot .svg-container { min-height: HEIGHTpx; }
</style>"""


class Chart(ui.VBox):
    """The place of a figure. `height` pixels are reserved, so that nothing jumps while a new figure is drawn."""

    def __init__(self, height: int) -> None:
        self.output, self.paper = ui.Output(layout={"min_height": f"{height}px"}), ui.HTML()
        self.place = f"minipar-chart-{height}"  # (a page may have several, of different heights)
        self.output.add_class(self.place)
        super().__init__([self.paper, self.output])

    def show(self, figure: Any, words: str) -> None:
        """Draw a plotly figure, or nothing if it is None. Where it cannot be drawn, `words` are shown."""
        if figure is None:
            self.output.outputs = ()
            return
        height = str(figure["layout"]["height"])
        self.paper.value = _STYLE.replace("PLACE", self.place).replace("HEIGHT", height)
        self.output.layout.min_height = f"{height}px"
        drawn = figure | {"config": {"displaylogo": False, "responsive": True}}
        data = {_PLOTLY: drawn, "text/plain": words}
        self.output.outputs = ({"output_type": "display_data", "data": data, "metadata": {}},)


def layout(height: int, x: str, y: str = "") -> dict[str, Any]:
    """What all figures here have in common: no background, a legend below, thin grey lines."""
    grid = {"gridcolor": "rgba(128,128,128,0.3)", "zerolinecolor": "rgba(128,128,128,0.5)", "automargin": True}
    return {
        "height": height,
        "margin": {"l": 10, "r": 20, "t": 34, "b": 44},
        "legend": {"orientation": "h", "y": 0, "yref": "container", "yanchor": "bottom", "traceorder": "normal"},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"size": 12},
        "xaxis": {"title": {"text": x}, **grid},
        "yaxis": {"title": {"text": y}, **grid},
    }


WIDE, NARROW = 900, 360  # pixels of a picture on a page, and of one on a page that is narrower than 640


def picture(line: str, draw: Callable[[bool, int], bytes]) -> str:
    """HTML of a PNG, `draw(dark, width)`, with others for dark and for narrow pages. None is wider than its page."""
    sources = ""
    for width, wide in ((NARROW, "(max-width: 640px) and "), (WIDE, "")):
        for dark, theme in ((True, "(prefers-color-scheme: dark)"), (False, "(prefers-color-scheme: light)")):
            image = base64.b64encode(draw(dark, width)).decode()
            sources += f'<source media="{wide}{theme}" srcset="data:image/png;base64,{image} {FINE}x">'
    last = f'<img alt="{escape(line)}" style="max-width:100%" src="data:image/png;base64,{image}">'
    return f"<picture>{sources}{last}</picture>"
