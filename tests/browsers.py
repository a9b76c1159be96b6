"""Where Chromium is, for the tests that drive it. Without it, or without playwright, they are skipped with a message.

MINIPAR_BROWSER=1 (which .ci/run sets) makes them run in any case, so that a missing browser makes them fail.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

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

#: `pytestmark = browser` at the top of a module of such tests.
browser = [
    pytest.mark.browser,
    pytest.mark.skipif(bool(MISSING) and not REQUIRED, reason=f"browser tests need {' and '.join(MISSING)}"),
]
