"""Where Chromium is, for the tests that drive it. Without it, or without playwright, they are skipped with a message.

MINIPAR_BROWSER=1 (which .ci/run sets) makes them run in any case, so that a missing browser makes them fail.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for path in map(shutil.which, NAMES) if path), "/usr/bin/chromium")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-quic", "--no-first-run",
    "--disable-component-update",
]  # fmt: skip
REQUIRED = os.environ.get("MINIPAR_BROWSER", "") not in ("", "0")
MISSING = [
    *([] if Path(CHROMIUM).exists() else ["Chromium (apt install chromium)"]),
    *([] if importlib.util.find_spec("playwright") else ['playwright (pip install "minipar[test]")']),
]

#: On a test that asks axe-core, which checks pages for people who hear them, or use them with the keyboard.
accessible = pytest.mark.skipif(
    not importlib.util.find_spec("axe_playwright_python") and not REQUIRED,
    reason='needs axe-playwright-python, which brings axe-core along (pip install "minipar[test]")',
)


def barriers(page: Any, where: str = "html") -> list[str]:
    """What axe-core finds serious or critical in a part of a page: the rule, how often, and the first element.

    JupyterLab gives a PNG no alternative text, though the output has one: such pictures are left out.
    """
    if not page.evaluate("'axe' in window"):
        page.evaluate((resources.files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8"))
    found = page.evaluate(
        "(where) => axe.run({ include: [where], exclude: ['.jp-RenderedImage img'] }, { resultTypes: ['violations'] })",
        where,
    )
    assert found["passes"], f"axe-core found no {where}"
    return [
        f"{one['id']} ({len(one['nodes'])}): {one['nodes'][0]['html'][:200]}: {one['nodes'][0]['failureSummary']}"
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
    ]


#: `pytestmark = browser` at the top of a module of such tests.
browser = [
    pytest.mark.browser,
    pytest.mark.skipif(bool(MISSING) and not REQUIRED, reason=f"browser tests need {' and '.join(MISSING)}"),
]
