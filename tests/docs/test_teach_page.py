"""The exercise of docs/teach.md tells a wrong answer from a right one, as the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "teach.md"


def test_its_exercise_judges(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    exec(compile(block, PAGE.name, "exec"), {"__name__": "a_page"})
    wrong, right = capsys.readouterr().out.split("passed: ")
    assert "one micro-batch at a time" in wrong
    assert right.startswith("your function agrees")
