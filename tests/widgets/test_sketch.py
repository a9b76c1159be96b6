"""The drawing surface of static pictures draws all kinds of signs."""

from __future__ import annotations

import pytest

from minipar_widgets.sketch import Sketch


def drawn(text: str) -> bytes:
    sketch = Sketch(200, 30)
    sketch.text(5, 15, text)
    return sketch.png()


@pytest.mark.parametrize("text", ["292 µs", "2 × 3", "a → b", "−1", "√9", "Σ g"])
def test_signs_are_drawn_and_not_boxes(text: str) -> None:
    sign = next(sign for sign in text if sign > "~")
    assert drawn(text) != drawn(text.replace(sign, "\ufffe"))
    assert drawn(text) != drawn(text.replace(sign, ""))
    assert drawn(text) != drawn("")
