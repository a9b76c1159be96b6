"""One chain of layers, forward and backward on one device, move by move: the data of the checkpoint explorer.

The schedule is the one that `checkpoint=` compiles to (`strategies/segments.py`); `costs/recomputation.course` counts
the memory. This module computes only the times, and when each value is made and freed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import NamedTuple

from minipar.costs import analytic
from minipar.costs.recomputation import (
    Chain,
    LayerCosts,
    Level,
    Move,
    at_once,
    course,
    every,
    in_segments,
    keep_everything,
    memory,
    square_root,
    time,
)
from minipar.errors import PlanError
from minipar.program import Op
from minipar.program.shape import uniform
from minipar.strategies import segments
from minipar.strategies.plan import Plan
from minipar_widgets.running import device

MOST_LAYERS = 64
WIDTH = 256  # of the layers that can be run
MODEL = "mlp-tiny"  # the model whose widths are replaced
STEPS = 4  # of a measured run
ROW = 12e-6  # seconds of a layer's forward on the emulated device, for each row: some times what the work takes


@dataclass(frozen=True)
class Layers:
    """The chain: `count` equal layers.

    rows = 0   each layer has an output of 1 unit, saves `saved` units for its backward, and takes 1 unit of time for
               its forward, `backward` units for its backward
    rows > 0   each layer is a Linear with GELU, WIDTH wide, for so many rows; memory is in bytes
    """

    count: int = 16
    saved: int = 1
    backward: float = 2.0
    rows: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.count <= MOST_LAYERS:
            raise PlanError(f"layers={self.count}: possible are 2 to {MOST_LAYERS}")

    @property
    def widths(self) -> tuple[int, ...]:
        return (WIDTH,) * (self.count + 1)

    @property
    def costs(self) -> LayerCosts:
        if self.rows:
            return analytic.layer_costs(MODEL, self.rows, widths=self.widths)
        return LayerCosts.equal(self.count, 1, self.saved, 1.0, self.backward)

    @property
    def chain(self) -> Chain:
        return self.costs.chain(0, self.count)

    @property
    def forward(self) -> float:
        """Seconds of a layer's forward on the emulated device of a measurement."""
        return ROW * self.rows


class Point(NamedTuple):
    """Segments of `length` layers (0: nothing is recomputed): the peak of memory, and the whole time."""

    length: int
    peak: int
    time: float


class Life(NamedTuple):
    """The life of a value: from the end of the move that makes it (`first`) to the end of the move that frees it
    (`last`)."""

    kind: str  # "output" or "saved"
    layer: int
    first: int
    last: int


@dataclass(frozen=True)
class Tape:
    """A schedule of a chain, and what it costs."""

    layers: Layers
    word: str
    moves: tuple[Move, ...]

    @cached_property
    def chain(self) -> Chain:
        return self.layers.chain

    @cached_property
    def levels(self) -> list[Level]:
        return course(self.chain, self.moves)

    @cached_property
    def ends(self) -> list[float]:
        """When each move ends. Each move begins when the one before it ends."""
        chain = self.chain
        return list(accumulate((chain.backward if m.op is Op.BACKWARD else chain.forward)[m.layer] for m in self.moves))

    @property
    def peak(self) -> int:
        return max(level.during for level in self.levels)

    @property
    def again(self) -> int:
        """How many layers run forward again."""
        return sum(move.op is Op.RECOMPUTE for move in self.moves)

    @cached_property
    def lifetimes(self) -> list[Life]:
        found = []
        open_: dict[tuple[str, int], int] = {}

        def end(kind: str, layer: int, k: int) -> None:
            if (kind, layer) in open_:
                found.append(Life(kind, layer, open_.pop((kind, layer)), k))

        last = len(self.chain) - 1
        for k, move in enumerate(self.moves):
            if move.op is Op.BACKWARD:
                end("saved", move.layer, k)
                end("output", move.layer - 1, k)
                if move.layer == last:
                    end("output", last, k)
                continue
            if move.hands:
                open_.setdefault(("output", move.layer), k)
            if move.saves:
                open_.setdefault(("saved", move.layer), k)
            if move.drops:
                end("output", move.layer - 1, k)
        return sorted(found, key=lambda life: (life.first, life.layer))


def tape(layers: Layers, word: str) -> Tape:
    """The schedule that `checkpoint=word` means for these layers: "none", "sqrt", K, a budget ("5B", "2MiB") or the
    layers at which segments begin. PlanError, with what is possible, if the word is impossible for these layers."""
    plan = Plan(checkpoint=word)
    if plan.checkpoint == "selective":
        raise PlanError("checkpoint=selective: is for attention; possible are none, sqrt, K, a budget, or layers")
    layout = plan.layout(uniform(layers.count))
    (found,) = segments.schedules(plan.checkpoint, layout, [plan.actions(0)], layers.costs)
    return Tape(layers, word, at_once(found) if found else keep_everything(layers.count))


def curve(layers: Layers) -> list[Point]:
    """Peak and time without recomputation, and for segments of every length, as `checkpoint=K` makes them."""
    chain, found = layers.chain, []
    for length in range(layers.count + 1):
        moves = at_once(in_segments(layers.count, every(layers.count, length) if length else ()))
        found.append(Point(length, memory(chain, moves)[1], time(chain, moves)))
    return found


def best_length(layers: Layers) -> int:
    """The length that `checkpoint=sqrt` takes: sqrt(N a_in / a_saved), which is sqrt(N) if a_saved = a_in."""
    return square_root(layers.count, layers.chain)


class MeasuredStep(NamedTuple):
    """A measured step with segments of `length` layers: peak bytes of activations on the rank, and seconds."""

    length: int
    peak: int
    seconds: float


def lengths_to_measure(count: int, most: int = 6) -> list[int]:
    """0 (no recomputation), and lengths from 1 to all layers, about equally far apart on a logarithmic scale."""
    steps = [round(count ** (k / (most - 2))) for k in range(most - 1)]
    return sorted({0, *steps})


def measure(layers: Layers, lengths: Sequence[int], steps: int = STEPS) -> list[MeasuredStep]:
    """Train the layers on one real rank of this machine, for each length. The tracker finds the bytes. The seconds are
    those of the fastest step but the first. The rank emulates a device that takes longer than the work, so that they do
    not depend on what else this machine does. Imports torch."""
    if not layers.rows:
        raise PlanError("measure: layers in units are on paper only; possible are Linear and GELU")
    import torch

    from minipar import data, models
    from minipar.cluster import Cluster
    from minipar.training.training import train

    source, chain = data.for_model(MODEL, widths=layers.widths), layers.chain
    emulated = device(layers.forward * layers.count, sum(chain.backward) / sum(chain.forward), 0.0, ())
    found = []
    with Cluster(1, device=emulated) as cluster:
        for length in lengths:
            run = train(
                partial(models.build, MODEL, widths=layers.widths),
                source,
                f"checkpoint={length or 'none'}",
                cluster=cluster,
                steps=steps,
                batch=layers.rows,
                optimizer=partial(torch.optim.SGD, lr=0.1),
                memory=True,
                progress=False,
            )
            peak = max(run.trace.memory(0).kinds["activations"])
            found.append(MeasuredStep(length, int(peak), min(run.step_times[1:] or run.step_times)))
    return found
