"""Line charts: what they draw, and the text that replaces them."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from minipar import PlanError
from minipar.program import Mesh
from minipar.sharding import matrix
from minipar.trace.charts import MANY, lines, repartitions
from minipar.trace.figure import _on_any_page

CURVES = {"ring": [(1000.0, 12.6), (64e6, 140.0)], "tree": [(1000.0, 1.2), (64e6, 768.0)]}


def test_a_chart_shows_itself_and_says_what_it_shows() -> None:
    figure: Any = lines(CURVES, x="bytes", y="ms", title="Allreduce", log="xy")
    data, metadata = figure._repr_mimebundle_()
    words = (
        "Allreduce: ms over bytes. ring from 12.6 at 1000 to 140 at 6.4e+07; tree from 1.2 at 1000 to 768 at 6.4e+07."
    )
    assert data["text/plain"] == metadata["image/png"]["alt"] == words
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")


def test_curves_differ_in_more_than_colour() -> None:
    (axes,) = lines(CURVES, x="bytes", y="ms").axes
    drawn = axes.get_lines()
    assert [list(line.get_ydata()) for line in drawn] == [[12.6, 140.0], [1.2, 768.0]]
    for of in ("get_color", "get_linestyle", "get_marker"):
        assert len({getattr(line, of)() for line in drawn}) == 2
    assert axes.get_ylim()[0] == 0.0
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["ring", "tree"]


@pytest.mark.parametrize(("log", "scales"), [("", "linear linear"), ("x", "log linear"), ("xy", "log log")])
def test_axes(log: str, scales: str) -> None:
    (axes,) = lines({"one": [(1.0, 1.0), (2.0, 3.0)]}, x="a", y="b", log=log).axes
    assert f"{axes.get_xscale()} {axes.get_yscale()}" == scales
    assert axes.get_legend() is None


def test_a_short_logarithmic_axis_has_plain_numbers() -> None:
    (axes,) = lines({"one": [(1.0, 2.2), (256.0, 85.0)], "two": [(4.0, 3.0)]}, x="a", y="b", log="xy").axes
    axes.figure.canvas.draw()
    for ticks in (axes.get_xticklabels(), axes.get_yticklabels()):
        words = [tick.get_text() for tick in ticks]
        assert {"5", "10", "20", "50"} <= set(words)
    (axes,) = lines({"one": [(1.0, 1.0), (1e6, 1e6)]}, x="a", y="b", log="xy").axes
    axes.figure.canvas.draw()
    assert "10^{3}" in " ".join(tick.get_text() for tick in axes.get_xticklabels())


def test_markers_do_not_hide_a_long_line() -> None:
    (axes,) = lines({"long": [(float(k), 1.0) for k in range(MANY + 1)]}, x="a", y="b").axes
    assert axes.get_lines()[0].get_marker() in ("", "None")


def test_nothing_to_draw() -> None:
    with pytest.raises(PlanError, match="no curves"):
        lines({}, x="a", y="b")
    with pytest.raises(PlanError, match="curve 'ring' has no points"):
        lines({"ring": []}, x="a", y="b")


def luminance(colour: Any) -> float:
    from matplotlib.colors import to_rgb

    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_prices_of_repartition_can_be_read_on_their_cells_on_any_page() -> None:
    prices = matrix((1024, 1024), 4, Mesh(tp=4))
    figure: Any = repartitions(prices)
    image = figure.axes[0].get_images()[0]
    cells = [image.cmap(image.norm(1.0 * seconds))[:3] for row in prices.seconds for seconds in row]
    assert len(figure.axes[0].texts) == len(cells)
    with _on_any_page(figure):
        for text, cell in zip(figure.axes[0].texts, cells, strict=True):
            light, dark = sorted((luminance(text.get_color()), luminance(cell)), reverse=True)
            assert (light + 0.05) / (dark + 0.05) > 4, text.get_text()
