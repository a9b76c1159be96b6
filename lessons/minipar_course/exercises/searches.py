"""Lesson 16: the time of a plan, the best plan of a chain, one within a budget, a policy that learns, two levels."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minipar.planner.brute_force import brute_force
from minipar.planner.chain import chain
from minipar.planner.cost_graph import CostGraph, Edge, Node
from minipar.planner.stages import stage_costs, stages
from minipar_course.exercises.kinds.function import Function
from minipar_course.exercises.kinds.verdict import Verdict, raised

Costs = Sequence[Sequence[float]]  # of each node, the seconds of each choice
Moves = Sequence[Sequence[Sequence[float]]]  # of each node but the last, seconds of [its choice][the next one's]
Problem = tuple[list[list[float]], list[list[list[float]]]]

# 1: the time of a plan ------------------------------------------------------------------------------------------------


def graph_of(costs: Costs, moves: Moves, memory: Costs = (), budget: float | None = None) -> CostGraph:
    """A chain of decisions as the planner takes it."""
    sizes = memory or [[0.0] * len(one) for one in costs]
    nodes = tuple(
        Node(f"node {k}", tuple(map(str, range(len(own)))), tuple(own), tuple(size))
        for k, (own, size) in enumerate(zip(costs, sizes, strict=True))
    )
    edges = tuple(Edge(k, k + 1, np.array(table, dtype=float)) for k, table in enumerate(moves))
    return CostGraph(nodes, edges, budget)


def plan_time(costs: Costs, moves: Moves, choices: Sequence[int]) -> float:
    return graph_of(costs, moves).seconds(choices)


def a_chain(nodes: int, choices: int, seed: int) -> Problem:
    """Costs and moves of a chain, made of small whole numbers; to stay with a choice costs nothing."""
    chosen = random.Random(seed)
    costs = [[float(chosen.randint(1, 9)) for _ in range(choices)] for _ in range(nodes)]
    moves = [
        [[0.0 if i == j else float(chosen.randint(1, 9)) for j in range(choices)] for i in range(choices)]
        for _ in range(nodes - 1)
    ]
    return costs, moves


_CHAINS = [a_chain(n, c, seed) for seed, (n, c) in enumerate(((1, 2), (2, 2), (3, 3), (5, 3), (7, 2)))]

PLAN_TIME = Function(
    "plan_time(costs, moves, choices)",
    tuple((costs, moves, [(3 * k + 1) % len(own) for k, own in enumerate(costs)]) for costs, moves in _CHAINS),
    truth=plan_time,
    mistakes=(
        (
            lambda costs, moves, choices: sum(own[i] for own, i in zip(costs, choices, strict=True)),
            "that is the work alone; what lies otherwise than it is read has to move, too",
        ),
        (
            lambda costs, moves, choices: plan_time(costs, [list(zip(*m, strict=True)) for m in moves], choices),
            "moves[k] has the choice of node k first, and that of node k + 1 second",
        ),
    ),
    hint="costs[k][choices[k]] for every node, and moves[k][choices[k]][choices[k + 1]] between neighbours",
)

# 2: the best plan of a chain ------------------------------------------------------------------------------------------


def _not_choices(given: Any, costs: Costs) -> str:
    counts = list(given)
    if len(counts) != len(costs):
        return f"gives {len(counts)} choices; there are {len(costs)} nodes"
    for k, (i, own) in enumerate(zip(counts, costs, strict=True)):
        if isinstance(i, bool) or i != int(i) or not 0 <= i < len(own):
            return f"gives {i!r} for node {k}; its choices are 0 to {len(own) - 1}"
    return ""


def _slower(given: Any, costs: Costs, moves: Moves) -> str:
    problem = _not_choices(given, costs)
    if problem:
        return problem
    graph = graph_of(costs, moves)
    took, best = graph.seconds([int(i) for i in given]), chain(graph)
    if took <= best.time + 1e-9:
        return ""
    return f"gives {list(given)}, which takes {took:g}; {list(best.choices)} takes {best.time:g}"


def cheapest_alone(costs: Costs, moves: Moves) -> list[int]:
    """Each node takes its own cheapest choice."""
    return [min(range(len(own)), key=own.__getitem__) for own in costs]


def cheapest_next(costs: Costs, moves: Moves) -> list[int]:
    """Each node takes what is cheapest after the node before it."""
    found = [min(range(len(costs[0])), key=costs[0].__getitem__)]
    for own, table in zip(costs[1:], moves, strict=True):
        found.append(min(range(len(own)), key=lambda j: own[j] + table[found[-1]][j]))
    return found


BEST_CHAIN = Function(
    "best_chain(costs, moves)",
    (*(tuple(one) for one in _CHAINS), a_chain(30, 3, 7), a_chain(60, 4, 8)),
    problem=_slower,
    mistakes=(
        (cheapest_alone, "each node has its cheapest choice; but the moves between them cost, too"),
        (
            cheapest_next,
            "who goes step by step cannot know what comes: keep, for each choice of a node, the best way to it",
        ),
    ),
    hint="best[j] = own cost of j + min over i of (best way to i + moves[i][j]); remember the choices of the best way",
)

# 3: within a budget of memory -----------------------------------------------------------------------------------------


def with_memory(nodes: int, choices: int, seed: int, share: float) -> tuple[list[Any], list[Any], list[Any], float]:
    """A chain in which what is quick needs much memory; the budget is this share of what the fastest plan needs."""
    costs, moves = a_chain(nodes, choices, seed)
    memory = [[float(12 - cost) for cost in own] for own in costs]
    fastest = chain(graph_of(costs, moves, memory)).memory
    least = sum(min(own) for own in memory)
    return costs, moves, memory, float(round(max(least, share * fastest)))


def _over_budget(given: Any, costs: Costs, moves: Moves, memory: Costs, budget: float) -> str:
    problem = _not_choices(given, costs)
    if problem:
        return problem
    graph = graph_of(costs, moves, memory, budget)
    choices = [int(i) for i in given]
    if not graph.fits(choices):
        return f"gives a plan that needs {graph.memory(choices):g}; the budget is {budget:g}"
    best = _exact(graph)
    took = graph.seconds(choices)
    if took <= best + 1e-9:
        return ""
    return f"gives a plan that fits and takes {took:g}; there is one that fits and takes {best:g}"


def _exact(graph: CostGraph) -> float:
    if graph.plans <= 10_000:
        return brute_force(graph).time
    from minipar.planner.intra import ilp

    return ilp(graph).time


WITHIN = Function(
    "within(costs, moves, memory, budget)",
    tuple(with_memory(n, c, seed, share) for seed, (n, c, share) in enumerate(
        ((2, 2, 0.9), (4, 3, 0.8), (6, 3, 0.7), (8, 3, 0.85), (20, 3, 0.75)), start=20)),
    problem=_over_budget,
    mistakes=(
        (lambda costs, moves, memory, budget: chain(graph_of(costs, moves)).choices,
         "that is the best plan without a budget: one more row of the linear program says sum of memory <= budget"),
        (lambda costs, moves, memory, budget: [min(range(len(own)), key=own.__getitem__) for own in memory],
         "that is the plan with the least memory; there is room for a faster one"),
    ),
    hint="minimise the same sum as in section 3; memory[k][i] is one more coefficient of the same variables",
)  # fmt: skip

# 4: a policy that learns ----------------------------------------------------------------------------------------------

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Learning:
    """update(logits, drawn, times) -> new logits: one step of REINFORCE, judged by where `updates` of them lead.

    logits (n, c)      of each of n nodes a number for each of c choices; chances are their softmax
    drawn (s, n)       s plans that were drawn by these chances, and times (s,), what each of them takes
    """

    nodes: int = 12
    choices: int = 3
    updates: int = 120
    samples: int = 32
    seeds: int = 3
    share: float = 0.25  # of the way from the mean of random plans to the best plan that may be left

    def judge(self, answer: Any) -> Verdict:
        if not callable(answer):
            return Verdict(False, f"{answer!r} is no function", "def update(logits, drawn, times): ...")
        costs, moves = a_chain(self.nodes, self.choices, 3)
        graph = graph_of(costs, moves)
        best = chain(graph).time
        first, last = [], []
        for seed in range(self.seeds):
            try:
                begin, end = self._learn(answer, graph, np.random.default_rng(seed))
            except _NotLogits as error:
                return Verdict(False, str(error), "return a new array of the same shape: logits + rate * ...")
            except Exception as error:
                return raised(error, "your update")
            first.append(begin)
            last.append(end)
        begin, end = float(np.mean(first)), float(np.mean(last))
        found = f"plans that the policy draws take {begin:.1f} at first, {end:.1f} after {self.updates} updates"
        target = best + self.share * (begin - best)
        if end <= target:
            return Verdict(True, f"{found}; the best of all plans takes {best:g}")
        if end > begin + 0.1 * (begin - best):
            hint = "it learns what is slow: a plan that takes less than the mean must become more likely"
        elif end > begin - 0.1 * (begin - best):
            hint = "it learns next to nothing: is what was drawn made more likely, and by how much?"
        else:
            hint = "compare each plan with the mean of all that were drawn, in units of their spread"
        return Verdict(False, f"{found}; the target is {target:.1f}", hint)

    def _learn(self, update: Callable[..., Any], graph: CostGraph, chance: np.random.Generator) -> tuple[float, float]:
        """The mean time of what is drawn before the first update, and after the last one."""
        logits = np.zeros((self.nodes, self.choices))
        means = []
        for _ in range(self.updates + 1):
            drawn = draw(logits, self.samples, chance)
            times = np.array([graph.seconds(choices) for choices in drawn])
            means.append(float(times.mean()))
            given = update(logits.copy(), drawn.copy(), times.copy())
            if not isinstance(given, np.ndarray) or given.shape != logits.shape or not np.isfinite(given).all():
                shape = given.shape if isinstance(given, np.ndarray) else type(given).__name__
                raise _NotLogits(f"your update gives {shape}; it must give finite logits of shape {logits.shape}")
            logits = given
        return means[0], means[-1]


class _NotLogits(Exception):
    pass


def draw(logits: Floats, samples: int, chance: np.random.Generator) -> NDArray[np.int64]:
    """Plans that are drawn by these chances, (samples, nodes)."""
    return np.argmax(logits + chance.gumbel(size=(samples, *logits.shape)), axis=2)


UPDATE = Learning()

# 5: two levels --------------------------------------------------------------------------------------------------------

Division = Sequence[tuple[int, int]]  # of each stage: layers, devices


def step_of(division: Division, times: dict[int, list[float]], microbatches: int) -> float:
    """The time of a step: stages in order, each with its layers and its devices."""
    took, first = [], 0
    for layers, devices in division:
        took.append(sum(times[devices][first : first + layers]))
        first += layers
    return sum(took) + (microbatches - 1) * max(took)


def _worse(given: Any, times: dict[int, list[float]], devices: int, microbatches: int) -> str:
    division = [(int(layers), int(count)) for layers, count in given]
    layers = len(next(iter(times.values())))
    if sum(n for n, _ in division) != layers or any(n < 1 for n, _ in division):
        return f"gives {division}, which has {sum(n for n, _ in division)} layers; there are {layers}"
    if any(count not in times for _, count in division):
        return f"gives {division}; a stage may have {', '.join(map(str, times))} devices"
    if sum(count for _, count in division) != devices:
        return f"gives {division}, which has {sum(count for _, count in division)} devices; all {devices} must be used"
    took, best = step_of(division, times, microbatches), best_division(times, devices, microbatches)
    if took <= step_of(best, times, microbatches) + 1e-9:
        return ""
    return f"gives {division}: {took:g}; {best} takes {step_of(best, times, microbatches):g}"


def best_division(times: dict[int, list[float]], devices: int, microbatches: int) -> list[tuple[int, int]]:
    """The planner's answer: submeshes of one node."""
    meshes = [(1, count) for count in times]
    found = stages(stage_costs([times[count] for count in times], meshes), 1, devices, microbatches)
    return [(stage.last - stage.first, stage.submesh[1]) for stage in found.stages]


def _scaled(layers: Sequence[float], devices: int, lost: float) -> dict[int, list[float]]:
    counts = [2**k for k in range(int(math.log2(devices)) + 1)]
    return {count: [one / count * (1 + lost * math.log2(count)) for one in layers] for count in counts}


TWO_LEVELS = Function(
    "two_levels(times, devices, microbatches)",
    (
        (_scaled([4.0, 4.0, 4.0, 4.0], 4, 0.2), 4, 8),
        (_scaled([8.0, 1.0, 1.0, 2.0], 4, 0.1), 4, 16),
        (_scaled([4.0, 4.0, 4.0, 4.0], 4, 0.05), 4, 1),
        (_scaled([1.0, 9.0, 2.0, 2.0, 5.0], 8, 0.3), 8, 12),
        (_scaled([3.0, 3.0, 3.0, 3.0, 12.0, 1.0], 8, 0.15), 8, 4),
    ),
    problem=_worse,
    mistakes=(
        (
            lambda times, devices, microbatches: [(len(times[1]), devices)],
            "one stage on all devices is intra-operator parallelism alone; a pipeline of stages may lose less",
        ),
        (
            lambda times, devices, microbatches: min(
                (one for one in divisions(len(times[1]), devices, (1,))),
                key=lambda one: step_of(one, times, microbatches),
                default=[(len(times[1]), devices)],
            ),
            "every stage has one device: that is a pipeline alone. A stage may have several",
        ),
    ),
    hint="try every number of layers and of devices for the first stage, and divide the rest in the same way",
)  # fmt: skip


def divisions(layers: int, devices: int, counts: Sequence[int]) -> list[list[tuple[int, int]]]:
    """All ways to cut layers into stages, and to give each of them one of `counts` devices, using all devices."""
    found = []
    for n in range(1, layers + 1):
        for sizes in product(counts, repeat=n):
            if sum(sizes) == devices:
                found += [list(zip(one, sizes, strict=True)) for one in _splits(layers, n)]
    return found


def _splits(layers: int, parts: int) -> list[list[int]]:
    if parts == 1:
        return [[layers]]
    return [[n, *rest] for n in range(1, layers - parts + 2) for rest in _splits(layers - n, parts - 1)]


__all__ = ["BEST_CHAIN", "PLAN_TIME", "TWO_LEVELS", "UPDATE", "WITHIN", "a_chain", "draw", "graph_of"]
