"""The time of a pipeline by simulation, where its schedule has no formula, or where its stages differ: one
replica, at two numbers of micro-batches that are p apart (p is the number of ranks), from which the time grows evenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from minipar.costs.hardware import Hardware
from minipar.models.sizes import Sizes
from minipar.prediction.closed_form import Ends, stage_times
from minipar.prediction.plan_numbers import PlanNumbers
from minipar.prediction.rank_memory import pipeline
from minipar.prediction.simulator import simulate
from minipar.program import Instruction, Op, Program, Value
from minipar.strategies.plan import Plan
from minipar.strategies.schedules.registry import Times, find

ACTIONS = 20_000  # of a replica, about: it takes a second
UNEVEN = 0.1  # by how much the slowest stage may exceed the mean, for a formula that is 1 % off at most


def helps(numbers: PlanNumbers, model: Sizes, machine: Hardware) -> bool:
    """Whether a simulated replica, which is not too large, says more about a step than the schedule's formula does.

    A formula's ranks are alike.
    """
    n = numbers
    if n.pp == 1:
        return False
    if find(n.schedule).form is None or n.options:
        return True
    if actions(n) > ACTIONS:
        return False
    seconds = [stage.both for stage in stage_times(n, model, machine)]
    return max(seconds) * len(seconds) > (1 + UNEVEN) * sum(seconds)


def actions(numbers: PlanNumbers) -> int:
    """How many actions a simulated replica has, about, in units of a forward with its backward."""
    n = numbers
    return n.pp * min(n.microbatches // n.rounds, 4 * n.pp) * n.chunks


def by_simulation(numbers: PlanNumbers) -> Ends:
    """When each rank of a plan's pipeline has done its last micro-batch, as a function of the times of the stages."""
    return partial(_ends, numbers)


def _ends(numbers: PlanNumbers, stages: Sequence[Times]) -> list[float]:
    n, plan, stages = numbers, replace(pipeline(numbers), microbatches=1), tuple(stages)
    p, count = n.pp, n.microbatches // n.rounds
    few = 2 * p + count % p
    if plan.asynchronous:  # (the pipeline is always full; what remains is the time of a micro-batch more)
        each = (max(_replica(plan, 3 * p, stages)) - max(_replica(plan, 2 * p, stages))) / p
        return [n.microbatches * each] * p
    if count <= few + p:
        last = _replica(plan, count, stages)
    else:
        first, second = _replica(plan, few, stages), _replica(plan, few + p, stages)
        last = [a + (count - few) * (b - a) / p for a, b in zip(first, second, strict=True)]
    return [(n.rounds - 1) * max(last) + end for end in last]


@lru_cache(256)
def _replica(plan: Plan, count: int, stages: tuple[Times, ...]) -> list[float]:
    """When the ranks of one replica end a step with so many micro-batches."""
    program = _program(plan, count)
    return [max(ends) for ends in simulate(program, ByStage(program, stages, plan.slice_count)).ends]


@lru_cache(32)
def _program(plan: Plan, count: int) -> Program:
    built = replace(plan, microbatches=count)
    return built.compile(layers=1 + max(map(max, built.placement())), check=False)


@dataclass(frozen=True)
class ByStage:
    """Costs of a program with one layer for each stage. A message occupies its link as long as it takes.

    slices   of a micro-batch, which takes `stages` as a whole
    """

    program: Program
    stages: tuple[Times, ...]
    slices: int = 1

    def compute(self, rank: int, ins: Instruction) -> float:
        return sum(_part(self.stages[layer], ins.op) for layer in ins.layers) / self.slices

    def transfer(self, rank: int, ins: Instruction) -> tuple[float, float]:
        return self.stages[self.program.source(ins.reads[0])].message / self.slices, 0.0

    def collective(self, ins: Instruction) -> float:
        return sum(self.stages[stage].copies for stage in ins.layers)

    def size(self, rank: int, value: Value) -> float:
        return 0.0


def _part(times: Times, op: Op) -> float:
    if op is Op.FORWARD:
        return times.forward
    if op is Op.BACKWARD:
        return times.input_gradient + times.weight_gradient
    return {Op.BACKWARD_INPUT: times.input_gradient, Op.BACKWARD_WEIGHT: times.weight_gradient}.get(op, 0.0)
