"""Inter-operator parallelism: stages of layers, and a part of the cluster for each of them.

    cluster    node 0  [ 0 1 2 3 ]          layers   0 1 2 | 3 4 5 6 | 7 8 9
               node 1  [ 4 5 6 7 ]          submesh   1x2      1x2      1x4

    a step of m micro-batches takes    sum of t_i  +  (m - 1) max of t_i            t_i: stage i on its submesh

A submesh is 1, 2, 4, ... devices of one node, or several whole nodes: such rectangles always tile the cluster. Given a
bound on the slowest stage, the least sum is a dynamic program over (stages behind, first layer, devices left):

    least(s, k, d) = min over i, submesh of  t(k..i on submesh) + least(s - 1, i + 1, d - its devices),   t <= bound

The times of all stages are the possible bounds. The least sum falls as the bound grows. So no plan whose slowest stage
takes a < t <= b is faster than least(b) + (m - 1) a, and where this is no better than what was found, no bound between
a and b has to be tried. The most promising interval is halved first. A stage with s stages behind holds the activations
of s + 1 micro-batches under 1F1B, so memory says whether it may be there.

Where a bound admits a plan, its real slowest stage may be faster than the bound; the plan is judged by that.

Sources: Zheng et al., "Alpa", 2022, section 5.2; Narayanan et al., "PipeDream", 2019.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from time import perf_counter

import numpy as np

from minipar.costs.partition import step_time
from minipar.errors import PlanError
from minipar.planner.cost_graph import Table
from minipar.wording import several

Submesh = tuple[int, int]  # nodes, devices of each of them


@dataclass(frozen=True)
class Stage:
    """Layers first..last - 1 on a submesh, the seconds of a micro-batch and the bytes of a device."""

    first: int
    last: int
    submesh: Submesh
    time: float
    memory: float = 0.0

    def __str__(self) -> str:
        return f"layers {self.first}..{self.last - 1} on {self.submesh[0]}x{self.submesh[1]}: {self.time:.4g} s"


@dataclass(frozen=True)
class Staged:
    """Stages in order, and the time of a step: sum(t) + (microbatches - 1) max(t).

    search   seconds that the search took
    bounds   how many bounds on the slowest stage were tried
    """

    stages: tuple[Stage, ...]
    microbatches: int
    time: float
    search: float = 0.0
    bounds: int = 0

    @property
    def split(self) -> tuple[int, ...]:
        """Layers of each stage, as the plan key `split` takes them."""
        return tuple(stage.last - stage.first for stage in self.stages)

    def __str__(self) -> str:
        head = f"{several(len(self.stages), 'stage')}, {several(self.microbatches, 'micro-batch')}: {self.time:.4g} s"
        return "\n".join([head, *map(str, self.stages)])


@dataclass(frozen=True)
class StageCosts:
    """What each stage would cost on each submesh.

    time[k, i, j]         seconds of a micro-batch of layers i..j-1 on submesh k, forward and backward; infinite where
                          it is not possible
    memory[k, i, j]       bytes of a device for parameters; activations[k, i, j] for each micro-batch under way
    """

    submeshes: tuple[Submesh, ...]
    time: Table
    memory: Table = field(default_factory=lambda: np.zeros(()))
    activations: Table = field(default_factory=lambda: np.zeros(()))

    @property
    def layers(self) -> int:
        """How many there are."""
        return self.time.shape[1] - 1


def submeshes(nodes: int, per_node: int) -> tuple[Submesh, ...]:
    """Parts of a cluster that a stage may have: powers of two of one node's devices, all of them, or whole nodes."""
    within = [2**k for k in range(per_node.bit_length()) if 2**k < per_node]
    return (*((1, m) for m in within), *((n, per_node) for n in range(1, nodes + 1)))


def stage_costs(
    times: Sequence[Sequence[float]],
    meshes: Sequence[Submesh],
    memory: Sequence[Sequence[float]] | None = None,
    activations: Sequence[Sequence[float]] | None = None,
) -> StageCosts:
    """The costs of all stages from those of layers: `times[k][l]` is layer l on submesh k. A stage is the sum."""

    def sums(numbers: Sequence[Sequence[float]] | None) -> Table:
        if numbers is None:
            return np.zeros((len(times), len(times[0]) + 1, len(times[0]) + 1))
        given = np.array(numbers, dtype=float)
        before = np.concatenate([np.zeros((len(given), 1)), np.cumsum(np.where(np.isinf(given), 0.0, given), 1)], 1)
        broken = np.concatenate([np.zeros((len(given), 1)), np.cumsum(np.isinf(given), 1)], 1)
        total = before[:, None, :] - before[:, :, None]
        return np.where(broken[:, None, :] > broken[:, :, None], np.inf, total)

    return StageCosts(tuple(meshes), sums(times), sums(memory), sums(activations))


def stages(
    costs: StageCosts,
    nodes: int,
    per_node: int,
    microbatches: int,
    budget: float | None = None,
    most: int | None = None,
) -> Staged:
    """The fastest stages that use the whole cluster.

    budget   bytes of a device
    most     the largest number of stages; default: as many as there are layers or devices

    Errors: PlanError where no division of the layers fits.
    """
    began = perf_counter()
    devices = nodes * per_node
    _check(costs, devices, microbatches)
    most = min(costs.layers, devices, most or costs.layers)
    bounds = np.unique(costs.time[np.isfinite(costs.time) & (costs.time > 0)])
    tried: dict[int, tuple[float, Staged | None]] = {}

    def within(k: int) -> tuple[float, Staged | None]:
        if k not in tried:
            tried[k] = _within(costs, devices, microbatches, budget, most, float(bounds[k]))
        return tried[k]

    best = within(len(bounds) - 1)[1] if len(bounds) else None
    if best is None:
        raise PlanError(_nothing(costs, nodes, per_node, budget))
    intervals = [(0.0, 0, len(bounds) - 1)]  # bounds low..high: no plan with such a slowest stage is faster than this
    while intervals:
        promise, low, high = heappop(intervals)
        if promise >= best.time * (1 - 1e-12):
            break
        middle = (low + high) // 2
        for a, b in ((low, middle), (middle + 1, high)) if low < high else ():
            least, found = within(b)
            if found is not None and found.time < best.time:
                best = found
            if math.isfinite(least):
                heappush(intervals, (least + (microbatches - 1) * float(bounds[a]), a, b))
    return Staged(best.stages, microbatches, best.time, perf_counter() - began, len(tried))


def _within(
    costs: StageCosts, devices: int, microbatches: int, budget: float | None, most: int, bound: float
) -> tuple[float, Staged | None]:
    """The least sum of stages of which none is slower than the bound, and these stages.

    How many stages are behind one decides about memory alone; where there is no budget, all numbers are one round.
    """
    count = costs.layers
    rounds = 1 if budget is None and most == min(count, devices) else most
    least = np.full((count + 1, devices + 1), np.inf)  # of layers k.. on d devices, with the stages of this round
    least[count, 0] = 0.0
    choice: list[Table] = []
    best = (math.inf, 0)
    for behind in range(rounds):
        after = np.full((count + 1, devices + 1), np.inf)
        picked = np.zeros((count + 1, devices + 1, 2), dtype=int)
        if rounds == 1:
            after[count, 0] = 0.0
        times = [_allowed(costs, k, behind, budget, bound) for k in range(len(costs.submeshes))]
        for first in range(count - 1, -1, -1):
            rest = after if rounds == 1 else least
            for k, (n, m) in enumerate(costs.submeshes):
                if n * m > devices:
                    continue
                total = times[k][first, first + 1 :, None] + rest[first + 1 :, : devices + 1 - n * m]  # [last, devices]
                last = np.argmin(total, axis=0)
                found = total[last, np.arange(total.shape[1])]
                better = found < after[first, n * m :]
                after[first, n * m :][better] = found[better]
                picked[first, n * m :, 0][better] = last[better] + first + 1
                picked[first, n * m :, 1][better] = k
        choice.append(picked)
        least = after
        best = min(best, (float(after[0, devices]), behind))
        if not np.isfinite(after).any():
            break
    if math.isinf(best[0]):
        return best[0], None
    return best[0], _read(costs, choice, best[1], devices, microbatches)


def _allowed(costs: StageCosts, k: int, behind: int, budget: float | None, bound: float) -> Table:
    """Times of stages on a submesh; infinite for those that are slower than the bound, or do not fit."""
    allowed = costs.time[k] <= bound * (1 + 1e-12)
    if budget is not None:
        allowed &= costs.memory[k] + (behind + 1) * costs.activations[k] <= budget * (1 + 1e-9)
    return np.where(allowed, costs.time[k], np.inf)


def _read(costs: StageCosts, choice: Sequence[Table], behind: int, devices: int, microbatches: int) -> Staged:
    """The stages that were chosen, from the first one."""
    first, left = 0, devices
    found: list[tuple[int, int, int]] = []
    while first < costs.layers:
        last, k = (int(x) for x in choice[behind if len(choice) > 1 else 0][first, left])
        found.append((first, last, k))
        first, left, behind = last, left - math.prod(costs.submeshes[k]), behind - 1
    built = []
    for s, (a, b, k) in enumerate(found):
        held = costs.memory[k, a, b] + (len(found) - s) * costs.activations[k, a, b]
        built.append(Stage(a, b, costs.submeshes[k], float(costs.time[k, a, b]), float(held)))
    return Staged(tuple(built), microbatches, step_time([stage.time for stage in built], microbatches))


def _check(costs: StageCosts, devices: int, microbatches: int) -> None:
    shape = (len(costs.submeshes), costs.layers + 1, costs.layers + 1)
    if costs.layers < 1 or any(table.shape != shape for table in (costs.time, costs.memory, costs.activations)):
        raise PlanError(f"stages: tables of {several(costs.layers, 'layer')} must all have the shape {shape}")
    if devices < 1 or microbatches < 1:
        raise PlanError(f"devices={devices}, microbatches={microbatches}: must be at least 1")


def _nothing(costs: StageCosts, nodes: int, per_node: int, budget: float | None) -> str:
    where = f"a cluster of {nodes}x{per_node} devices"
    if budget is None:
        return f"stages: no division of {several(costs.layers, 'layer')} uses all of {where}"
    least = min(
        float(np.min(np.diagonal(costs.memory[k] + costs.activations[k], offset=1).max()))
        for k in range(len(costs.submeshes))
    )
    return (
        f"budget={budget / 2**20:.1f}MiB: no stages fit on {where}; one layer alone needs {least / 2**20:.1f} MiB on "
        "the submesh that suits it best: possible is a larger budget, or more devices"
    )
