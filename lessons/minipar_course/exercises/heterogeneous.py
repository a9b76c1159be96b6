"""Lesson 09: how fast a link must be; layers and activations on the host; a link too slow for all of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain, combinations

from minipar.costs.recomputation import LayerCosts
from minipar_course.exercises.kinds.formula import Formula
from minipar_course.exercises.kinds.function import Function
from minipar_course.exercises.kinds.order import FETCH, OFFLOAD, B, Case, Device, F, MiB, Order, R, ms, program_of

__all__ = [
    "BANDWIDTH",
    "FAST",
    "FETCH",
    "HOST_LAYERS",
    "OFFLOAD",
    "OFFLOADED",
    "SLOW",
    "SLOW_LINK",
    "B",
    "F",
    "R",
    "program_of",
]


# 1: in time, by a formula ---------------------------------------------------------------------------------------------

BANDWIDTH = Formula(
    ("saved", "forward", "backward"),
    lambda saved, forward, backward: 1000 * saved / min(forward, backward),
    ((3, 10, 20), (6, 10, 20), (3, 30, 20), (1, 5, 5), (8, 40, 16)),
    (
        (
            lambda saved, forward, backward: saved / min(forward, backward),
            "that is in MiB a ms; a second has 1000 of them",
        ),
        (
            lambda saved, forward, backward: 1000 * saved / forward,
            "and the way back, where the backward is the shorter one?",
        ),
        (
            lambda saved, forward, backward: 1000 * saved / backward,
            "and the way out, where the forward is the shorter one?",
        ),
        (lambda saved, f, b: 1000 * saved / (f + b), "out and back are two copies, each beside one of the two"),
    ),
    "the definition",
    "each of the two copies must be done within the time of what runs beside it",
)


# 2: layers on the host ------------------------------------------------------------------------------------------------

DEVICE_SPEED, HOST_SPEED, LINK = 1000, 20, 10  # operations a ms, and numbers that cross in a ms


def step_time(operations: Sequence[int], outputs: Sequence[int], host: Collection[int]) -> float:
    """Milliseconds of a step, forward and backward, with the layers `host` computed on the host.

    Where neighbours are in different places, the output between them crosses the link, and its gradient crosses back.
    (The input rows come from the host; nothing is overlapped.)
    """
    work = sum(3 * ops / (HOST_SPEED if l in host else DEVICE_SPEED) for l, ops in enumerate(operations))
    places = [l in host for l in range(len(operations))]
    return work + sum(2 * outputs[l] / LINK for l in range(len(places) - 1) if places[l] != places[l + 1])


def _best(parameters: Sequence[int], operations: Sequence[int], outputs: Sequence[int], capacity: int) -> float:
    layers = range(len(parameters))
    choices = chain.from_iterable(combinations(layers, k) for k in range(len(parameters) + 1))
    fits = (host for host in choices if sum(p for l, p in enumerate(parameters) if l not in host) <= capacity)
    return min(step_time(operations, outputs, host) for host in fits)


def _bad_choice(
    given: Collection[int],
    parameters: Sequence[int],
    operations: Sequence[int],
    outputs: Sequence[int],
    capacity: int,
) -> str:
    host = set(given)
    if not host <= set(range(len(parameters))):
        return f"gives {sorted(host)}; layers count from 0 to {len(parameters) - 1}"
    held = sum(p for l, p in enumerate(parameters) if l not in host)
    if held > capacity:
        return f"gives {sorted(host)}: the other layers take {held} on the device, which holds {capacity}"
    time, best = step_time(operations, outputs, host), _best(parameters, operations, outputs, capacity)
    if time <= 1.05 * best:
        return ""
    return f"gives {sorted(host)}: a step of {time:.1f} ms; {best:.1f} ms are possible"


def _by_size(parameters: Sequence[int], operations: Sequence[int], outputs: Sequence[int], capacity: int) -> set[int]:
    host: set[int] = set()
    for layer in sorted(range(len(parameters)), key=lambda l: -parameters[l]):
        if sum(p for l, p in enumerate(parameters) if l not in host) > capacity:
            host.add(layer)
    return host


HOST_LAYERS = Function(
    "host(parameters, operations, outputs, capacity)",
    (
        ([500, 40, 40, 40, 500], [1, 400, 400, 400, 500], [10, 10, 10, 10, 10], 700),
        ([40, 40, 40], [100, 100, 100], [5, 5, 5], 200),
        ([300, 30, 200, 30, 40], [2, 300, 4, 300, 300], [10, 400, 400, 10, 10], 400),
        ([100, 100, 100, 100, 300], [90, 2, 2, 90, 900], [9, 9, 9, 9, 9], 500),
        ([50, 60], [10, 10], [1, 1], 0),
    ),
    problem=_bad_choice,
    mistakes=(
        (lambda p, o, out, c: set(), "nothing on the host: does what is left fit?"),
        (lambda p, o, out, c: set(range(len(p))), "everything on the host: that fits, and is 50 times as slow"),
        (
            _by_size,
            "large is not enough: a layer for the host is large, cheap to compute, and does not tear up the chain",
        ),
        (
            lambda p, o, out, c: {0},
            "the first layer is often right, since nothing crosses before it; look at the sizes",
        ),
    ),
    hint="step_time(operations, outputs, host) tells the time of any choice; with few layers you can try them all",
)


# 2 and 3: activations that wait on the host ---------------------------------------------------------------------------


def _device(layers: int, copy: float) -> Device:
    """A layer's output has 1 MiB, and it saves 3 MiB more, which take `copy` ms in each direction."""
    return Device(LayerCosts.equal(layers, MiB, 3 * MiB, 10 * ms, 20 * ms), link=3 * MiB / (copy * ms))


FAST, SLOW = _device(8, 6), _device(8, 30)
OFFLOADED = Order(
    "mine(layers)",
    (Case((8,), FAST, 240 * ms, 15 * MiB), *(Case((layers,), _device(layers, 6)) for layers in (1, 2, 3))),
    hint="a FETCH that begins one backward earlier comes beside it",
)
SLOW_LINK = Order(
    "mine(layers)",
    (Case((8,), SLOW, 280 * ms, 15 * MiB), *(Case((layers,), _device(layers, 30)) for layers in (1, 2, 3, 5))),
    hint="a copy takes as long as three forwards: which layers are better run again (R) than sent away?",
)
