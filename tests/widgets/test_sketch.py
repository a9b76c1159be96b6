"""The static pictures' drawing surface: signs that its font does not have are written otherwise."""

from __future__ import annotations

import pytest

from minipar_widgets.sketch import Sketch


def drawn(text: str) -> bytes:
    sketch = Sketch(200, 30)
    sketch.text(5, 15, text)
    return sketch.png()


@pytest.mark.parametrize(
    ("text", "plain"), [("292 µs", "292 us"), ("2 × 3", "2 x 3"), ("a → b", "a -> b"), ("−1", "-1")]
)
def test_a_sign_that_the_font_lacks_is_written_otherwise(text: str, plain: str) -> None:
    assert drawn(text) == drawn(plain)
    assert drawn(text) != drawn("")
