"""Arrays for the browser: many arrays in one binary trait, each aligned so that JavaScript can read it in place.

data, layout = pack({"start": float64 array, "kind": uint8 array})
layout = {"start": ["f8", offset in bytes, count], ...}          unpack() in js/shared.js reads it

Whole numbers from 0 travel in the narrowest type that holds them all: most indices need one or two bytes of four.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

Layout = dict[str, list[Any]]
_TYPES = ("f8", "f4", "u4", "u2", "i4", "u1")


def pack(arrays: Mapping[str, np.ndarray]) -> tuple[bytes, Layout]:
    """The arrays as bytes, and the position of each. Types: float64, float32, uint32, uint16, int32,
    uint8."""
    parts: list[bytes] = []
    layout: Layout = {}
    at = 0
    for name, array in arrays.items():
        code = array.dtype.str[1:]
        if code not in _TYPES:
            raise TypeError(
                f"{name}: {array.dtype} is no type that the browser reads; possible are {', '.join(_TYPES)}"
            )
        if code in ("u4", "u2", "i4") and len(array) and array.min() >= 0:
            array = array.astype(np.min_scalar_type(array.max()))
            code = array.dtype.str[1:]
        data = array.astype(array.dtype.newbyteorder("<")).tobytes()
        layout[name] = [code, at, len(array)]
        padding = -len(data) % 8
        parts += [data, bytes(padding)]
        at += len(data) + padding
    return b"".join(parts), layout
