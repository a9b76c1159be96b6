"""The data of the schedule explorer for given settings: the program, its prediction, its staleness. No widget is here.

After a slider moves, the picture must follow within 100 ms, for 16 stages and 64 micro-batches. So programs are kept:
a new ratio, latency or slow stage changes costs, and needs no new program. And `predict` comes before `complaint`, so
that the picture need not wait for verify.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from minipar import strategies
from minipar.errors import MiniparError, PlanError
from minipar.prediction.simulator import simulate
from minipar.program import Program, Staleness, Value
from minipar.program.verify.verifier import verify
from minipar.strategies.plan import Plan
from minipar.strategies.schedules.ampnet import with_equal_times
from minipar.trace import Trace, labels
from minipar.wording import several
from minipar_widgets.arguments import number, one_of, whole

STAGES, MICROBATCHES, CHUNKS = 16, 64, 4  # the most that the explorer offers
RATIOS, LATENCIES, FACTORS = (0.5, 4.0), (0.0, 2.0), (0.5, 3.0)  # the least and the most
KEPT = 16  # programs


@dataclass(frozen=True)
class Settings:
    """The values of the sliders.

    chunks    stages on each rank; None: the schedule's own number
    ratio     time of a backward, if a forward takes 1
    latency   of a message, in the same unit
    factors   for each stage, how many times slower its rank computes; (): all ranks are equally fast
    """

    schedule: str = "1f1b"
    stages: int = 4
    microbatches: int = 8
    chunks: int | None = None
    ratio: float = 2.0
    latency: float = 0.0
    factors: tuple[float, ...] = ()

    def plan(self) -> Plan:
        """The plan; PlanError if the schedule is impossible with these numbers."""
        takes = strategies.find(self.schedule).options
        chunks = self.chunks if "chunks" in takes else None
        if "slices" in takes:  # then the micro-batches are slices of one sequence
            return Plan(pp=self.stages, slices=self.microbatches, schedule=self.schedule, chunks=chunks)
        return Plan(pp=self.stages, microbatches=self.microbatches, schedule=self.schedule, chunks=chunks)


def check(settings: Settings) -> Settings:
    """The settings, if the explorer has controls for them. PlanError, with what is possible, if it has not."""
    large = "; larger ones are drawn by Timeline(simulate(Plan(...).compile(layers=...)))"
    one_of("schedule", settings.schedule, [schedule.name for schedule in strategies.schedules()])
    whole("stages", settings.stages, 1, STAGES, large)
    whole("microbatches", settings.microbatches, 1, MICROBATCHES, large)
    if settings.chunks is not None:
        whole("chunks", settings.chunks, 1, CHUNKS)
    number("ratio", settings.ratio, *RATIOS)
    number("latency", settings.latency, *LATENCIES)
    if not isinstance(settings.factors, (tuple, list)) or len(settings.factors) > settings.stages:
        raise PlanError(
            f"factors={settings.factors!r}: possible are up to {several(settings.stages, 'number')}, one a stage"
        )
    for factor in settings.factors:
        number("factors", factor, *FACTORS)
    return settings


@dataclass(frozen=True)
class Found:
    """The result of settings: a prediction, or the reason why there is none.

    program     it is here even if `verify` refuses it
    problem     the reason in one line, and further lines with the evidence; empty if there is a prediction
    """

    plan: Plan | None = None
    program: Program | None = None
    trace: Trace | None = None
    problem: str = ""


def predict(settings: Settings) -> Found:
    """Compile and simulate. Impossible settings give a `Found.problem`. `checked` adds what verify says."""
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
    """`found` if verify accepts its program; otherwise verify's complaint in the place of the prediction."""
    why = complaint(found.plan) if found.plan is not None and found.trace is not None else ""
    return Found(found.plan, found.program, problem=why) if why else found


def explore(settings: Settings) -> Found:
    """`predict`, and then `verify`."""
    return checked(predict(settings))


def complaint(plan: Plan) -> str:
    """Why verify refuses the plan's program; empty if it accepts it."""
    return _complaint(plan, _generator(plan))


def settled(plan: Plan) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """For each rank, in a run that is long enough: the number of updates between the version that a forward used and
    the version that its gradient went into; and the versions of its parameters that are alive at once."""
    return _settled(plan, _generator(plan))


def _generator(plan: Plan) -> object:
    """Part of the key of kept programs: a schedule that is edited by hand changes, and its name stays the same."""
    return strategies.find(plan.schedule).generate


def layers_of(plan: Plan) -> int:
    """One layer for each stage; schedules that cut sequences need a model of at least three (see running.py)."""
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
    """Both follow from the order alone, so times do not matter."""
    if not plan.asynchronous:
        return (0,) * plan.pp, (1,) * plan.pp
    program = plan.compile(layers=layers_of(plan), steps=plan.settling_steps, check=False)
    if program.in_flight is not None:  # (its ranks choose their next instruction by what has arrived)
        trace = simulate(program)
    else:
        nothing = [[0.0] * len(row) for row in program.ranks]
        trace = Trace(program, nothing, nothing, _no_size, unit="activations")
    return tuple(trace.staleness()), tuple(trace.weight_versions())


def _no_size(rank: int, value: Value) -> float:
    return 0.0


def forget() -> None:
    """Forget all kept programs and orders (for benchmarks)."""
    for kept in (_program, _complaint, _settled, with_equal_times):
        kept.cache_clear()


# words ----------------------------------------------------------------------------------------------------------------


def facts(found: Found) -> str:
    """One line: time, both bubbles, peak memory, staleness."""
    assert found.trace is not None
    return f"{labels.facts(found.trace)} · {staleness(found)}"


def staleness(found: Found) -> str:
    """How old the weights were with which gradients were computed, as the program promises it and verify checks it."""
    assert found.program is not None
    contract = found.program.contract
    if not isinstance(contract, Staleness):
        return "staleness 0, one version of the weights"
    versions = "one version" if contract.versions == 1 else f"up to {contract.versions} versions"
    return f"staleness at most {contract.bound}, {versions} of the weights"


def table(found: Found) -> list[list[str]]:
    """For each rank idle time, activations alive at once, staleness and versions; the header is the first row."""
    assert found.trace is not None
    assert found.plan is not None
    held = found.trace.in_flight()
    old, versions = settled(found.plan)
    head = ["rank", "idle", "activations at once", "staleness", "versions of weights"]
    rows = zip(range(len(held)), held, old, versions, strict=True)
    return [head, *([str(r), f"{labels.idle(found.trace, r):.1%}", f"{n:g}", str(s), str(v)] for r, n, s, v in rows)]
