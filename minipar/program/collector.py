"""Pause Python's garbage collector while a large program is built or read.

Hundreds of thousands of live tuples make every collection a full scan, although tuples of tuples never form cycles.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Turn automatic collection off inside the block. Turn it on again afterwards, if it was on."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
