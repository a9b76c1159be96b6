"""Numbers with units, as users write and read them: "20ms", "64MiB", "1GB/s", "312TFLOP/s"."""

from __future__ import annotations

import re

from minipar.errors import PlanError

_SIZES = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_UNITS = {
    "": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9,
    "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
    "flop": 1.0, "flops": 1.0, "mflop": 1e6, "gflop": 1e9, "tflop": 1e12, "mflops": 1e6, "gflops": 1e9, "tflops": 1e12,
}  # fmt: skip


def quantity(key: str, given: object, zero: bool = False) -> float:
    """A number of seconds, bytes or operations a second, from a number or text with a unit: "20ms", "64MiB",
    "1GB/s"."""
    number = None
    if isinstance(given, str):
        found = re.fullmatch(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)(?:/s)?\s*", given)
        if found and found[2].lower() in _UNITS:
            try:
                number = float(found[1]) * _UNITS[found[2].lower()]
            except ValueError:
                number = None
    elif isinstance(given, (int, float)) and not isinstance(given, bool):
        number = float(given)
    if number is None or not (0 <= number < float("inf")) or (number == 0 and not zero):
        raise PlanError(f"{key}={given!r}: must be a positive number, such as 1e9, '64MiB', '1GB/s' or '20ms'")
    return number


def size(count: float) -> str:
    """Bytes as text: `564.54 MiB`."""
    for unit, whole in _SIZES:
        if abs(count) >= whole:
            return f"{count / whole:,.2f} {unit}"
    return f"{count:,.0f} B"
