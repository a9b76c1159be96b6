"""Lesson 03: the best segment length; segments as an order of instructions; 64 layers in 12 units of memory."""

from __future__ import annotations

import math

from minipar.costs.recomputation import LayerCosts, at_once, every, in_segments, memory, time
from minipar_course.exercises.kinds.function import Function
from minipar_course.exercises.kinds.order import B, Case, Device, F, MiB, Order, R, ms, program_of

__all__ = ["DEVICE", "LENGTH", "SEGMENTS", "TWELVE", "B", "F", "R", "program_of"]

FORWARD, BACKWARD = 10 * ms, 20 * ms


def _costs(layers: int, output: int = 1, saved: int = 0) -> LayerCosts:
    return LayerCosts.equal(layers, output * MiB, saved * MiB, FORWARD, BACKWARD)


# 1: the best length ---------------------------------------------------------------------------------------------------


def _peak(length: int, layers: int, output: int, saved: int) -> float:
    """MiB at the peak, with segments of `length` layers with outputs of `output` MiB that save `saved` MiB more."""
    chain = _costs(layers, output, saved).chain(0, layers)
    return memory(chain, at_once(in_segments(layers, every(layers, length))))[1] / MiB


def _not_least(given: int, layers: int, output: int, saved: int) -> str:
    if isinstance(given, bool) or not isinstance(given, int) or not 1 <= given <= layers:
        return f"gives {given!r}; a length is a whole number from 1 to {layers}"
    peaks = {length: _peak(length, layers, output, saved) for length in range(1, layers + 1)}
    best = min(peaks, key=peaks.__getitem__)
    if peaks[given] <= 1.1 * peaks[best]:
        return ""
    return f"gives {given}, with a peak of {peaks[given]:g} MiB; segments of {best} need {peaks[best]:g} MiB"


LENGTH = Function(
    "length(layers, output, saved)",
    ((64, 1, 0), (64, 1, 3), (100, 2, 2), (144, 1, 8), (36, 4, 0), (9, 1, 1), (1, 1, 1)),
    problem=_not_least,
    mistakes=(
        (
            lambda n, output, saved: round(math.sqrt(n)),
            (
                "that is right for layers that save nothing but their output; a segment holds `saved` for "
                "each of its layers, too"
            ),
        ),
        (
            lambda n, output, saved: max(1, min(n, round(math.sqrt(n * (output + saved) / output)))),
            "upside down: if a layer saves much, should its segment be longer or shorter?",
        ),
        (
            lambda n, output, saved: max(1, min(n, round(math.sqrt(n * output / max(1, saved))))),
            "what a segment holds for each layer is its output and what it saves besides",
        ),
    ),
    hint="peak = checkpoints + one segment = (N / s) output + s (output + saved); where is that least?",
)


# 2: segments ----------------------------------------------------------------------------------------------------------


def _segments(layers: int, length: int) -> Case:
    """A case with the targets of minipar's own schedule, whose last segment does not run again."""
    costs = _costs(layers)
    schedule = at_once(in_segments(layers, every(layers, length)))
    chain = costs.chain(0, layers)
    return Case((layers, length), Device(costs), time(chain, schedule), memory(chain, schedule)[1])


SEGMENTS = Order(
    "segments(layers, length)",
    tuple(_segments(*case) for case in ((64, 8), (10, 3), (12, 1), (7, 7))),
    hint="which segment goes backward right after its own forward, and need not run again?",
)


# 3: less --------------------------------------------------------------------------------------------------------------


def _triangle(layers: int) -> Case:
    """Every layer but the last runs forward twice, in k + 1 units; k (k + 1) / 2 is at least the number of layers."""
    k = next(k for k in range(1, layers + 1) if k * (k + 1) // 2 >= layers)
    most = layers * (FORWARD + BACKWARD) + (layers - 1) * FORWARD
    return Case((layers,), Device(_costs(layers)), most, (k + 1) * MiB)


DEVICE = Device(_costs(64))
TWELVE = Order("mine(layers)", tuple(map(_triangle, (64, 10, 28, 1))))
