"""Lesson 02: find the memory of a program; buffers for inference; gradients that are used at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minipar.costs.recomputation import LayerCosts
from minipar.prediction.simulator import simulate
from minipar.program import Instruction, Program, Value
from minipar.strategies.plan import Plan
from minipar_course.exercises.kinds.function import Function
from minipar_course.exercises.kinds.order import STEP, B, Case, Device, F, MiB, Order, R, ms, program_of

__all__ = ["BUFFERS", "DEVICE", "GRADIENTS", "PEAK", "STEP", "B", "F", "R", "program_of"]


# 1: the peak of a program ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sizes:
    """Costs with sizes of values; every instruction takes the same time."""

    of: Callable[[Value], float]

    def compute(self, rank: int, ins: Instruction) -> float:
        return 1.0

    def transfer(self, rank: int, ins: Instruction) -> tuple[float, float]:
        return 0.0, 0.0

    def collective(self, ins: Instruction) -> float:
        return 0.0

    def size(self, rank: int, value: Value) -> float:
        return self.of(value)


def size(value: Value) -> int:
    """Bytes of a value: outputs 3, what is saved 5, parameters and gradients 7, optimizer states 14."""
    return {"output": 3, "grad_output": 3, "saved": 5, "optimizer_state": 14}.get(value.kind, 7)


def saved_only(value: Value) -> int:
    """Bytes of a value, if only what is saved counted: 1 each."""
    return int(value.kind == "saved")


def _peak(program: Program, size: Callable[[Value], int]) -> float:
    return simulate(program, _Sizes(size)).peak_memory()[0]


def _walked(at_start: bool, writes_first: bool, twice: bool) -> Callable[[Program, Callable[[Value], int]], int]:
    """A walk through a program that makes some mistakes."""

    def peak(program: Program, size: Callable[[Value], int]) -> int:
        live = list(program.state[0]) if at_start else []
        most = sum(map(size, live))
        for ins in program.ranks[0]:
            made = [value for value in ins.writes if twice or value not in live]
            live += made if writes_first else []
            most = max(most, sum(map(size, live))) if writes_first else most
            live = [value for value in live if value not in ins.frees]
            live += [] if writes_first else [value for value in made if value not in ins.frees]
            most = max(most, sum(map(size, live)))
        return most

    return peak


PEAK = Function(
    "peak(program, size)",
    tuple(
        (Plan.parse(words).compile(layers=layers), chosen)
        for words, layers, chosen in (
            ("dp=1", 4, size),
            ("microbatches=3 schedule=gpipe", 4, size),
            ("checkpoint=2", 6, size),
            ("checkpoint=1 microbatches=2", 4, saved_only),
            ("inference=true", 5, size),
        )
    ),
    truth=_peak,
    mistakes=(
        (
            _walked(False, True, False),
            "parameters and optimizer states are there before the first instruction, too: program.state",
        ),
        (
            _walked(True, False, False),
            "while an instruction runs, what it reads and what it writes are both there: free afterwards",
        ),
        (
            _walked(True, True, True),
            ("a gradient that is written again is added to in place: a value that is there already takes no more"),
        ),
        (_walked(False, True, True), "begin with program.state, and count a value that is written again only once"),
    ),
    hint="walk: first add what is new among the writes, look at the total, then take off what is freed",
)


# 2: buffers for inference ---------------------------------------------------------------------------------------------


def _clash(given: Sequence[int], last_read: Sequence[int]) -> str:
    count = len(last_read)
    if len(given) != count:
        return f"gives {len(given)} buffers; there are {count} outputs"
    least = 0
    for layer in range(count):
        alive = [k for k in range(layer) if last_read[k] >= layer]
        least = max(least, 1 + len(alive))
        for k in alive:
            if given[k] == given[layer]:
                what = f"layer {layer} overwrites the output of layer {k}, which is read until layer {last_read[k]}"
                return f"gives {list(given)}: {what}"
    used = len(set(given))
    return "" if used == least else f"gives {list(given)}, {used} buffers; {least} are enough"


BUFFERS = Function(
    "buffers(last_read)",
    (
        ([1, 2, 3, 4],),
        ([1, 2, 3, 4, 5, 6, 7],),
        ([1, 4, 3, 4, 5],),
        ([3, 2, 3, 6, 5, 6, 7],),
        ([1],),
        ([5, 5, 5, 5, 5],),
    ),
    problem=_clash,
    mistakes=(
        (
            lambda last_read: [l % 2 for l in range(len(last_read))],
            (
                "two in turn are right for a chain; here an output is read later than by the next layer, and "
                "must wait somewhere"
            ),
        ),
        (
            lambda last_read: list(range(len(last_read))),
            "that never uses a buffer again: which of them holds nothing that will be read?",
        ),
    ),
    hint="go layer by layer: the buffers of outputs that will still be read are taken; use the first one that is not",
)


# 3: gradients that are used as soon as they are made ------------------------------------------------------------------


def _device(layers: int) -> Device:
    """8 MiB of parameters a layer, Adam's two moments for them, 1 MiB of output, 3 MiB more that autograd keeps."""
    costs = LayerCosts.equal(layers, MiB, 3 * MiB, 10 * ms, 20 * ms)
    return Device(costs, parameters=(8 * MiB,) * layers, optimizer=2.0)


def _least(layers: int) -> float:
    """Parameters and states, all activations, the gradients of one layer and of its input."""
    return (24 * layers + 4 * layers + 8 + (layers > 1)) * MiB


DEVICE = _device(8)
GRADIENTS = Order(
    "mine(layers)",
    tuple(Case((layers,), _device(layers), layers * 30 * ms, _least(layers)) for layers in (8, 1, 2, 5)),
)
