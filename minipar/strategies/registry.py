"""Schedules by name: the order in which a rank runs the forwards and backwards of its micro-batches.

A schedule is a generator `f(rank, stages, microbatches)` of actions (`Forward(i)`, `Backward(i)`, ...) for one rank of
a pipeline; rank d runs stage d. `@schedule("name")` makes it known to `Plan`, the command line, simulate and run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from minipar.errors import PlanError
from minipar.program import Action

Generator = Callable[[int, int, int], Iterator[Action]]


@dataclass(frozen=True)
class Schedule:
    """A registered schedule: its name, its generator, and the facts that `minipar schedules` prints."""

    name: str
    generate: Generator
    paper: str = ""
    time: str = ""
    peak: str = ""

    @property
    def summary(self) -> str:
        return (self.generate.__doc__ or "").strip().split("\n")[0]


_schedules: dict[str, Schedule] = {}


def schedule(name: str, *, paper: str = "", time: str = "", peak: str = "") -> Callable[[Generator], Generator]:
    """Decorator: register a schedule under `name` (registering again replaces, so a notebook cell can be re-run).

    paper, time, peak   source, closed-form step time and peak activations, shown by `minipar schedules`
    """
    if not name or any(c.isspace() or c in "=," for c in name):
        raise PlanError(f"schedule name {name!r}: must be one word without '=' and ','")

    def register(generate: Generator) -> Generator:
        _schedules[name] = Schedule(name, generate, paper, time, peak)
        return generate

    return register


def find(name: str) -> Schedule:
    """The schedule called `name`, or a PlanError that lists what there is."""
    if not isinstance(name, str) or name not in _schedules:
        raise PlanError(f"schedule={name}: unknown; possible are {', '.join(_schedules)}")
    return _schedules[name]


def schedules() -> tuple[Schedule, ...]:
    """All registered schedules, in the order of registration."""
    return tuple(_schedules.values())
