"""Run the tests of the JavaScript, which are beside it: `node --test`, without any package."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from minipar_widgets.inline import SOURCES

NODE = shutil.which("node")


@pytest.mark.skipif(NODE is None, reason="no node (18 or newer) on this machine")
@pytest.mark.parametrize("path", sorted(SOURCES.glob("*.test.mjs")), ids=lambda path: path.name)
def test_module(path: object) -> None:
    assert NODE is not None
    done = subprocess.run([NODE, "--test", str(path)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
