"""What the schedule explorer shows for given settings: the program, its prediction, its staleness. No widget here.

Every change of a slider comes through `explore`, which has 100 ms for 16 stages and 64 micro-batches. So programs are
kept: what they cost (ratio, latency, slow stages) changes without compiling and verifying them again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from minipar import captions, strategies
from minipar.errors import MiniparError
from minipar.plan import Plan
from minipar.program import Program, Value
from minipar.simulator import simulate
from minipar.trace import Trace
from minipar.verifier import verify

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
        takes = "chunks" in strategies.find(self.schedule).options
        return Plan(
            pp=self.stages,
            microbatches=self.microbatches,
            schedule=self.schedule,
            chunks=self.chunks if takes else None,
        )


@dataclass(frozen=True)
class Found:
    """What comes of settings: a prediction, or in words why there is none.

    program     there is one, too, where `verify` refuses it
    problem     one line, with the evidence in further ones; empty if there is a prediction
    staleness   per rank of a long run: updates between the version a forward used and the one its gradient went into
    versions    per rank the versions of its parameters that are alive at once
    """

    program: Program | None = None
    trace: Trace | None = None
    problem: str = ""
    staleness: tuple[int, ...] = ()
    versions: tuple[int, ...] = ()


def explore(settings: Settings) -> Found:
    """Compile, verify and simulate; impossible settings are answered in words."""
    program = None
    try:
        plan = settings.plan()
        generate = strategies.find(plan.schedule).generate  # a schedule made by hand may have changed under its name
        program = _program(plan, generate)
        _verified(plan, generate)
        trace = simulate(
            program, backward=settings.ratio, latency=settings.latency, stage_factors=settings.factors[: plan.pp]
        )
        return Found(trace.program, trace, "", *_settled(plan, generate))
    except MiniparError as error:
        return Found(program, problem=str(error))


def layers_of(plan: Plan) -> int:
    """A layer for each stage; schedules that cut sequences need a model of at least three (see running.py)."""
    stages = 1 + max(map(max, plan.placement()))
    return stages if "slices" not in strategies.find(plan.schedule).options else stages * -(-3 // stages)


@lru_cache(KEPT)
def _program(plan: Plan, generate: object) -> Program:
    return plan.compile(layers=layers_of(plan), check=False)


@lru_cache(KEPT)
def _verified(plan: Plan, generate: object) -> None:
    verify(_program(plan, generate))


@lru_cache(KEPT)
def _settled(plan: Plan, generate: object) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Staleness and versions of a run long enough; they follow from the order alone, so times do not matter."""
    if not plan.asynchronous:
        return (0,) * plan.pp, (1,) * plan.pp
    program = plan.compile(layers=layers_of(plan), steps=plan.settling_steps, check=False)
    if program.in_flight is not None:  # whose ranks decide by what has arrived
        trace = simulate(program)
    else:
        nothing = [[0.0] * len(row) for row in program.ranks]
        trace = Trace(program, nothing, nothing, _no_size, unit="activations")
    return tuple(trace.staleness()), tuple(trace.weight_versions())


def _no_size(rank: int, value: Value) -> float:
    return 0.0


# words ----------------------------------------------------------------------------------------------------------------


def facts(found: Found) -> str:
    """One line: time, both bubbles, peak memory, staleness."""
    assert found.trace is not None
    return f"{captions.facts(found.trace)} · {staleness(found)}"


def staleness(found: Found) -> str:
    """How old the weights are that gradients were made of."""
    old, versions = max(found.staleness), max(found.versions)
    if old == 0 and versions == 1:
        return "staleness 0: one version of the weights"
    return f"staleness {old} (rank {found.staleness.index(old)}), up to {versions} versions of the weights"


def table(found: Found) -> list[list[str]]:
    """Per rank idle time, activations at once, staleness and versions; the header first."""
    assert found.trace is not None
    held = found.trace.in_flight()
    head = ["rank", "idle", "activations at once", "staleness", "versions of weights"]
    return [
        head,
        *(
            [str(r), f"{captions.idle(found.trace, r):.1%}", f"{held[r]:g}", *_pair(found, r)]
            for r in range(len(found.trace.program.ranks))
        ),
    ]


def _pair(found: Found, rank: int) -> Iterable[str]:
    return str(found.staleness[rank]), str(found.versions[rank])
