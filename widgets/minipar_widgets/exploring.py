"""What the schedule explorer shows for given settings: the program, its prediction, its staleness. No widget here.

A slider has 100 ms for 16 stages and 64 micro-batches. So programs are kept, since what they cost (ratio, latency, slow
stages) changes without compiling them again; and `predict` comes before `complaint`, so that the picture need not wait
for verify.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from minipar import strategies
from minipar.errors import MiniparError
from minipar.prediction.simulator import simulate
from minipar.program import Program, Staleness, Value
from minipar.program.verify.verifier import verify
from minipar.strategies.plan import Plan
from minipar.strategies.schedules.ampnet import with_equal_times
from minipar.trace import Trace, labels

STAGES, MICROBATCHES, CHUNKS = 16, 64, 4  # the most that the explorer offers
KEPT = 16  # programs


@dataclass(frozen=True)
class Settings:
    """What the sliders say.

    chunks    stages on each rank; None: what the schedule says
    ratio     time of a backward, where a forward takes 1
    latency   of a message, in the same unit
    factors   how much slower each stage's rank computes; (): all alike
    """

    schedule: str = "1f1b"
    stages: int = 4
    microbatches: int = 8
    chunks: int | None = None
    ratio: float = 2.0
    latency: float = 0.0
    factors: tuple[float, ...] = ()

    def plan(self) -> Plan:
        """The plan; PlanError where the schedule does not take these numbers."""
        takes = strategies.find(self.schedule).options
        chunks = self.chunks if "chunks" in takes else None
        if "slices" in takes:  # then these are its micro-batches, all of one sequence
            return Plan(pp=self.stages, slices=self.microbatches, schedule=self.schedule, chunks=chunks)
        return Plan(pp=self.stages, microbatches=self.microbatches, schedule=self.schedule, chunks=chunks)


@dataclass(frozen=True)
class Found:
    """What comes of settings: a prediction, or in words why there is none.

    program     there is one, too, where `verify` refuses it
    problem     one line, with the evidence in further ones; empty if there is a prediction
    """

    plan: Plan | None = None
    program: Program | None = None
    trace: Trace | None = None
    problem: str = ""


def predict(settings: Settings) -> Found:
    """Compile and simulate; impossible settings are answered in words. `complaint` says whether verify agrees."""
    plan = program = None
    try:
        plan = settings.plan()
        program = _program(plan, _generator(plan))
        trace = simulate(
            program, backward=settings.ratio, latency=settings.latency, stage_factors=settings.factors[: plan.pp]
        )
    except MiniparError as error:
        why = complaint(plan) if plan is not None and program is not None else ""
        return Found(plan, program, problem=why or str(error))
    return Found(plan, trace.program, trace)


def checked(found: Found) -> Found:
    """The same, or verify's complaint instead of the prediction."""
    why = complaint(found.plan) if found.plan is not None and found.trace is not None else ""
    return Found(found.plan, found.program, problem=why) if why else found


def explore(settings: Settings) -> Found:
    """`predict`, and then `verify`."""
    return checked(predict(settings))


def complaint(plan: Plan) -> str:
    """What verify says against the plan's program; empty if nothing."""
    return _complaint(plan, _generator(plan))


def settled(plan: Plan) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Per rank of a run long enough: the updates between the version a forward used and the one its gradient went
    into, and the versions of its parameters that are alive at once."""
    return _settled(plan, _generator(plan))


def _generator(plan: Plan) -> object:
    """Belongs to the key of what is kept: a schedule made by hand may have changed under its name."""
    return strategies.find(plan.schedule).generate


def layers_of(plan: Plan) -> int:
    """A layer for each stage; schedules that cut sequences need a model of at least three (see running.py)."""
    stages = 1 + max(map(max, plan.placement()))
    return stages if "slices" not in strategies.find(plan.schedule).options else stages * -(-3 // stages)


@lru_cache(KEPT)
def _program(plan: Plan, generate: object) -> Program:
    return plan.compile(layers=layers_of(plan), check=False)


@lru_cache(KEPT)
def _complaint(plan: Plan, generate: object) -> str:
    try:
        verify(_program(plan, generate))
    except MiniparError as error:
        return str(error)
    return ""


@lru_cache(KEPT)
def _settled(plan: Plan, generate: object) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """They follow from the order alone, so times do not matter."""
    if not plan.asynchronous:
        return (0,) * plan.pp, (1,) * plan.pp
    program = plan.compile(layers=layers_of(plan), steps=plan.settling_steps, check=False)
    if program.in_flight is not None:  # (whose ranks decide by what has arrived)
        trace = simulate(program)
    else:
        nothing = [[0.0] * len(row) for row in program.ranks]
        trace = Trace(program, nothing, nothing, _no_size, unit="activations")
    return tuple(trace.staleness()), tuple(trace.weight_versions())


def _no_size(rank: int, value: Value) -> float:
    return 0.0


def forget() -> None:
    """Keep no programs, and no orders either (for benchmarks)."""
    for kept in (_program, _complaint, _settled, with_equal_times):
        kept.cache_clear()


# words ----------------------------------------------------------------------------------------------------------------


def facts(found: Found) -> str:
    """One line: time, both bubbles, peak memory, staleness."""
    assert found.trace is not None
    return f"{labels.facts(found.trace)} · {staleness(found)}"


def staleness(found: Found) -> str:
    """How old the weights are that gradients were made of: what the program promises, and verify holds it to."""
    assert found.program is not None
    contract = found.program.contract
    if not isinstance(contract, Staleness):
        return "staleness 0, one version of the weights"
    versions = "one version" if contract.versions == 1 else f"up to {contract.versions} versions"
    return f"staleness at most {contract.bound}, {versions} of the weights"


def table(found: Found) -> list[list[str]]:
    """Per rank idle time, activations at once, staleness and versions; the header first."""
    assert found.trace is not None
    assert found.plan is not None
    held = found.trace.in_flight()
    old, versions = settled(found.plan)
    head = ["rank", "idle", "activations at once", "staleness", "versions of weights"]
    rows = zip(range(len(held)), held, old, versions, strict=True)
    return [head, *([str(r), f"{labels.idle(found.trace, r):.1%}", f"{n:g}", str(s), str(v)] for r, n, s, v in rows)]
