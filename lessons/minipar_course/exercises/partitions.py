"""Lesson 13: the time of unequal stages; the best cut of a chain; a search for placements; a plan that fits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minipar.costs.partition import partition, stage_times
from minipar.errors import MiniparError
from minipar.planner import graphs
from minipar.prediction.simulator import simulate
from minipar.program import Instruction, Op, Program, Value
from minipar.strategies.plan import Plan
from minipar.wording import several
from minipar_course.exercises.kinds.function import Function
from minipar_course.exercises.kinds.verdict import Verdict, raised


def _step_time(times: Sequence[float], microbatches: int) -> float:
    """The step time of a pipeline whose stages take these times; a third of each is the forward."""
    program = Plan(pp=len(times), microbatches=microbatches, schedule="gpipe").compile(layers=len(times))
    return simulate(program, forward=1 / 3, backward=2 / 3, stage_factors=times).time


STEP_TIME = Function(
    "step_time(times, microbatches)",
    (([3.0, 3.0, 3.0, 3.0], 8), ([9.0, 32.0, 6.0, 2.0], 8), ([1.0, 5.0], 3), ([4.0], 6), ([2.0, 7.0, 7.0, 1.0], 1)),
    truth=_step_time,
    mistakes=(
        (lambda t, m: m * max(t), "so long the slowest stage works; but the first micro-batch has to reach it, too"),
        (lambda t, m: m * sum(t), "that is one micro-batch at a time; in a pipeline they overlap"),
        (lambda t, m: (m + len(t) - 1) * max(t), "right for equal stages; through the quicker ones it is less to fill"),
        (lambda t, m: sum(t) + m * max(t), "the slowest stage is in the sum once already"),
        (lambda t, m: (m + len(t) - 1) * sum(t) / len(t), "the mean stage does not set the pace; which one does?"),
    ),
    hint="the first micro-batch goes through all stages; how long after it does each further one come out?",
)  # fmt: skip


# the best cut -------------------------------------------------------------------------------------------------------


def _chain(count: int, seed: int) -> list[float]:
    chosen = random.Random(seed)
    return [float(chosen.randint(1, 20)) for _ in range(count)]


def not_a_split(given: Any, layers: int, stages: int) -> str:
    """Why an answer is not a split; "" if it is one."""
    counts = list(given)
    if len(counts) != stages or any(isinstance(n, bool) or n != int(n) or n < 1 for n in counts):
        return f"gives {counts}; a split is {stages} numbers of layers, each of at least 1"
    if sum(counts) != layers:
        return f"gives {counts}, {several(sum(counts), 'layer')} together; there are {layers}"
    return ""


def _slower(given: Any, costs: Sequence[float], stages: int) -> str:
    problem = not_a_split(given, len(costs), stages)
    if problem:
        return problem
    took, best = stage_times(costs, [int(n) for n in given]), partition(costs, stages, microbatches=10**6)
    if max(took) <= max(best.times) * (1 + 1e-9):
        return ""
    slowest = took.index(max(took))
    better = f"with {list(best.split)} none takes more than {max(best.times):g}"
    return f"gives {list(given)}: stage {slowest} takes {max(took):g}; {better}"


def even(costs: Sequence[float], stages: int) -> list[int]:
    """The same number of layers in each stage, whatever they cost."""
    return [len(costs) // stages + (s < len(costs) % stages) for s in range(stages)]


def greedy(costs: Sequence[float], stages: int) -> list[int]:
    """Fill each stage until it has its share of the work."""
    share, count, held = sum(costs) / stages, 0, 0.0
    split: list[int] = []
    for k, cost in enumerate(costs):
        count, held = count + 1, held + cost
        left = len(costs) - k - 1
        if len(split) < stages - 1 and (held >= share or left == stages - 1 - len(split)):
            split.append(count)
            count, held = 0, 0.0
    return [*split, count]


CUT = Function(
    "cut(costs, stages)",
    (
        ([5.0, 3.0, 3.0, 8.0, 3.0, 9.0], 3),
        ([1.0, 8.0, 16.0, 16.0, 4.0, 2.0, 2.0, 1.0], 4),
        ([2.0, 2.0, 2.0], 3),
        ([7.0, 1.0], 1),
        (_chain(12, 1), 4),
        (_chain(16, 2), 5),
        (_chain(30, 3), 4),
    ),
    problem=_slower,
    mistakes=(
        (even, "equal numbers of layers are not equal work"),
        (greedy, "filling stage by stage cannot know what comes: what is left falls to the last one. Compare all ways"),
    ),
    hint="A(k, j) = min over i of max(A(k - 1, i), cost of layers i to j): fill that table, and go back through it",
)  # fmt: skip


# a search -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Search:
    """A search for a placement of a network with branches, judged by the simulator, which it may call `calls` times.

    search(time, nodes, ranks, calls, random) -> placement      time(placement) of a step; a rank for each node

    time    that the placements may take on average over `seeds` seeds
    """

    calls: int
    time: float
    blocks: int = 3
    ranks: int = 4
    microbatches: int = 2
    seeds: int = 4

    def judge(self, answer: Any) -> Verdict:
        if not callable(answer):
            return Verdict(False, f"{answer!r} is no function", "def search(time, nodes, ranks, calls, random): ...")
        graph = graphs.inception(self.blocks)
        nodes, found = len(graph.costs), []
        for seed in range(self.seeds):
            asked: list[tuple[int, ...]] = []

            def time(placement: Sequence[int], asked: list[tuple[int, ...]] = asked) -> float:
                if len(asked) == self.calls:
                    raise _OutOfCalls
                asked.append(tuple(int(rank) for rank in placement))
                return graphs.step_time(graph, asked[-1], self.microbatches)

            try:
                given = answer(time, nodes, self.ranks, self.calls, random.Random(seed))
                placement = [int(rank) for rank in given] if given is not None else None
            except _OutOfCalls:
                hint = "count your questions: `for _ in range(calls)`, and mind those before the loop"
                return Verdict(False, f"your search asked more than {self.calls} times", hint)
            except Exception as error:
                return raised(error, "your search")
            if placement is None or len(placement) != nodes or not all(0 <= r < self.ranks for r in placement):
                hint = (
                    f"return a list of {several(nodes, 'rank')} from 0 to {self.ranks - 1}: the best "
                    f"placement that you saw"
                )
                return Verdict(False, f"your search gives {given!r}, which is no placement", hint)
            found.append(graphs.step_time(graph, placement, self.microbatches))
        mean = sum(found) / len(found)
        told = f"with {self.seeds} seeds your placements take {_words(found)}, {mean:.1f} in the mean"
        if mean <= self.time + 1e-9:
            return Verdict(True, f"{told}; the target is {self.time:g}")
        hint = "do not begin anew each time: change a little of what was good, and keep the change if it is not worse"
        return Verdict(False, f"{told}; the target is {self.time:g}", hint)


class _OutOfCalls(Exception):
    pass


def _words(times: Sequence[float]) -> str:
    return ", ".join(f"{t:.1f}" for t in times)


SEARCH = Search(calls=400, time=86.5)


# a plan that fits ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerTable:
    """Costs of a program by layer, for one micro-batch: the time (a third of it forward), and what it keeps."""

    program: Program
    times: tuple[float, ...]
    kept: tuple[float, ...]

    def compute(self, rank: int, ins: Instruction) -> float:
        share = {Op.FORWARD: 1, Op.RECOMPUTE: 1, Op.BACKWARD: 2, Op.BACKWARD_INPUT: 1, Op.BACKWARD_WEIGHT: 1}
        return sum(self.times[layer] for layer in ins.layers) * share[ins.op] / 3 if ins.op in share else 0.0

    def transfer(self, rank: int, ins: Instruction) -> tuple[float, float]:
        return 0.0, 0.0

    def collective(self, ins: Instruction) -> float:
        return 0.0

    def size(self, rank: int, value: Value) -> float:
        return self.kept[value.index] if value.kind in ("saved", "saved_weight") else 0.0


@dataclass(frozen=True)
class Fit:
    """A plan with a target for time and one for memory, for layers of different kinds; judged by the simulator.

    plan() -> words such as "pp=4 microbatches=8 split=3,3,3,3"

    costs, kept   of each layer: its time for a micro-batch, and the bytes it keeps of one until its backward
    time, room    limits for the time of a step, and for the bytes that one rank keeps at any moment
    """

    costs: tuple[float, ...]
    kept: tuple[float, ...]
    ranks: int
    microbatches: int
    time: float
    room: float

    def measure(self, plan: Plan | str) -> tuple[float, list[float]]:
        """Time of a step, and what each rank keeps at most. PlanError for an impossible plan."""
        program = Plan.parse(plan).compile(layers=len(self.costs))
        trace = simulate(program, LayerTable(program, self.costs, self.kept))
        return trace.time, [float(peak) for peak in trace.peak_memory()]

    def judge(self, answer: Any) -> Verdict:
        if not callable(answer):
            return Verdict(False, f"{answer!r} is no function", "def plan(): ...")
        try:
            given = answer()
        except Exception as error:
            return raised(error, "your function")
        if not isinstance(given, (str, Plan)):
            hint = f'return words such as "pp={self.ranks} microbatches={self.microbatches} split=3,3,3,3"'
            return Verdict(False, f"your function gives {given!r}, not a plan", hint)
        try:
            chosen = Plan.parse(given)
            time, kept = self.measure(chosen)
        except MiniparError as error:
            return Verdict(False, f"that plan cannot be: {error.reason}", "the line above says what is possible")
        if chosen.dp > 1 or chosen.pp != self.ranks or chosen.total_microbatches != self.microbatches:
            asked = (
                f"one pipeline of {several(self.ranks, 'rank')}, with "
                f"{several(self.microbatches, 'micro-batch')} in a step"
            )
            return Verdict(False, f"your plan is not what was asked for: {asked}", f"you gave `{chosen}`")
        rank = kept.index(max(kept))
        found = f"it takes {time:g} units, and rank {rank} keeps {max(kept):g}"
        if max(kept) > self.room + 1e-9:
            hint = "early stages keep more micro-batches under 1F1B; give them less to keep of each"
            return Verdict(False, f"{found}; there is room for {self.room:g}", hint)
        if time > self.time + 1e-9:
            hint = "it fits. Which of those that fit has the least time? Let a loop try them: tasks.FIT.measure(plan)"
            return Verdict(False, f"{found}; the target is {self.time:g} units", hint)
        return Verdict(True, f"{found}; the targets are {self.time:g} units and room for {self.room:g}")


FIT = Fit(
    costs=(2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 4, 4),
    kept=(8, 8, 6, 6, 4, 4, 3, 3, 2, 2, 1, 1),
    ranks=4,
    microbatches=8,
    time=158,
    room=64,
)
