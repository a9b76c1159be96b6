"""Arrays for the browser: many arrays in one binary trait, each aligned so that JavaScript can read it in place.

data, layout = pack({"start": array("d", ...), "kind": array("B", ...)})
layout = {"start": ["f8", offset in bytes, count], ...}          unpack() in js/shared.js reads it

Whole numbers from 0 travel in the narrowest type that holds them all: most indices need one or two bytes of four.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping
from typing import Any

Layout = dict[str, list[Any]]
_TYPES = {"d": "f8", "f": "f4", "I": "u4", "H": "u2", "i": "i4", "B": "u1"}  # of `array`, and what JavaScript reads


def pack(arrays: Mapping[str, array[Any]]) -> tuple[bytes, Layout]:
    """The arrays as bytes, and the position of each. Errors: TypeError for types that no browser reads."""
    parts: list[bytes] = []
    layout: Layout = {}
    at = 0
    for name, given in arrays.items():
        code = given.typecode
        if code not in _TYPES:
            raise TypeError(f"{name}: {code!r} is no type that the browser reads; possible are {', '.join(_TYPES)}")
        if code in "IHi" and given and min(given) >= 0:
            most = max(given)
            code = "B" if most < 1 << 8 else "H" if most < 1 << 16 else "I"
        column = array(code, given) if code != given.typecode or sys.byteorder == "big" else given
        if sys.byteorder == "big":
            column.byteswap()
        data = column.tobytes()
        layout[name] = [_TYPES[code], at, len(column)]
        padding = -len(data) % 8
        parts += [data, bytes(padding)]
        at += len(data) + padding
    return b"".join(parts), layout
