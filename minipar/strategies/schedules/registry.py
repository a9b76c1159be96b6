"""Schedules by name: the order in which a rank runs the forwards and backwards of its micro-batches.

A schedule is a generator `f(rank, ranks, microbatches)` of actions (`Forward(i)`, `Backward(i)`, ...) for one rank of a
pipeline. `@schedule("name")` makes it known to `Plan`, the command line, simulate and run. A schedule with several
chunks on a rank yields `Forward(i, chunk)`, and its placement gives the stages of the chunks. A generator that has
parameters with names in `OPTIONS` gets the plan's keys of these names. If it cannot work with its arguments, it raises
a PlanError before its first action.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from minipar.errors import PlanError
from minipar.program import Action, Staleness
from minipar.strategies.layout import Placement, looped
from minipar.wording import did_you_mean

Generator = Callable[..., Iterator[Action]]  # its arguments: rank, ranks, microbatches, and options
OPTIONS = ("chunks", "group", "doubling", "slices", "in_flight", "update_every")


Used = Callable[[int, int, int, int, int], int]


def newest(rank: int, ranks: int, microbatch: int, microbatches: int, newest: int) -> int:
    """A version rule: a forward uses the newest version that its rank has."""
    return newest


@dataclass(frozen=True)
class Asynchronous:
    """What an asynchronous schedule needs in addition. Its order goes over all steps of a run, without a flush.

    version   (rank, ranks, micro-batch of the run, micro-batches of a step, newest version) -> the version that a
              forward uses
    promise   (ranks, keys of the plan) -> the contract; it raises PlanError if the keys do not fit
    decides   whether the ranks decide as they run; the schedule's order is then the one that equal times would give
    """

    version: Used
    promise: Callable[[int, Mapping[str, int]], Staleness]
    decides: bool = False


class Times(NamedTuple):
    """Seconds of one micro-batch on one rank's whole share of the layers, or on a stage; of its message to the next
    one; and of a step's sum of gradients over the stage's copies."""

    forward: float
    input_gradient: float
    weight_gradient: float
    message: float = 0.0
    copies: float = 0.0

    @property
    def both(self) -> float:
        """Seconds of forward and backward."""
        return self.forward + self.input_gradient + self.weight_gradient


# (times, p, m, v) -> seconds of a step of p equal ranks with m micro-batches and v chunks a rank. A message is short in
# comparison with a forward; it delays the next rank, and the rank that sends it goes on.
Form = Callable[[Times, int, int, int], float]


@dataclass(frozen=True)
class Schedule:
    """A registered schedule: its name, its generator, and the facts that `minipar schedules` prints."""

    name: str
    generate: Generator
    paper: str = ""
    time: str = ""
    peak: str = ""
    needs: str = ""
    placement: Placement = looped
    chunks: int = 1
    asynchronous: Asynchronous | None = None
    form: Form | None = field(default=None, compare=False)

    @property
    def summary(self) -> str:
        return (self.generate.__doc__ or "").strip().split("\n")[0]

    @cached_property
    def options(self) -> tuple[str, ...]:
        """The keys of a plan that the generator takes."""
        return tuple(name for name in OPTIONS if name in inspect.signature(self.generate).parameters)

    def check(self, key: str, value: object) -> None:
        """PlanError if a plan sets an option that this schedule does not have."""
        default = {"chunks": self.chunks, "doubling": False}.get(key)
        if value is not None and value != default and key not in self.options:
            others = ", ".join(s.name for s in _schedules.values() if key in s.options)
            has = f"has {self.chunks} a rank" if key == "chunks" else "has none"
            text = ",".join(map(str, value)) if isinstance(value, tuple) else value
            raise PlanError(f"{key}={text}: schedule={self.name} {has}; possible with {others}")


_schedules: dict[str, Schedule] = {}


def schedule(
    name: str,
    *,
    paper: str = "",
    time: str = "",
    peak: str = "",
    needs: str = "",
    placement: Placement = looped,
    chunks: int = 1,
    asynchronous: Asynchronous | None = None,
    form: Form | None = None,
    replace: bool = False,
) -> Callable[[Generator], Generator]:
    """Decorator: register a schedule under `name`. Registering a name again replaces it, so a notebook cell can be
    re-run. A schedule that minipar brings is replaced only with `replace=True`.

    paper, time, peak, needs   source, closed-form step time, peak activations and constraints, shown by
                               `minipar schedules`
    placement                  (rank, ranks, chunks) -> the stage of each chunk of the rank; default: chunk c of rank r
                               is stage c * ranks + r
    chunks                     default number of chunks per rank; only a generator with a parameter `chunks` can take
                               another number
    asynchronous               for a schedule without a flush: which versions it uses, and its contract
    form                       the exact time of a step, of equal ranks; without it, estimates simulate one replica
    Errors: PlanError for a name that is not one word, or that a schedule of minipar has.
    """
    if not name or any(c.isspace() or c in "=," for c in name):
        raise PlanError(f"schedule name {name!r}: must be one word without '=' and ','")

    def register(generate: Generator) -> Generator:
        if name in _schedules and not replace and _built_in(_schedules[name].generate) and not _built_in(generate):
            raise PlanError(
                f"schedule name {name!r}: minipar has a schedule of this name; choose another name, or say "
                "replace=True to use yours in its place until this process ends"
            )
        _schedules[name] = Schedule(name, generate, paper, time, peak, needs, placement, chunks, asynchronous, form)
        return generate

    return register


def _built_in(generate: Generator) -> bool:
    return str(generate.__module__).startswith(__name__.rpartition(".")[0])  # (code that is run has no module)


def find(name: str) -> Schedule:
    """The schedule called `name`. Errors: PlanError, which lists all schedules, for an unknown name."""
    if not isinstance(name, str) or name not in _schedules:
        raise PlanError(
            f"schedule={name}: unknown; possible are {', '.join(_schedules)}{did_you_mean(name, _schedules)}"
        )
    return _schedules[name]


def schedules() -> tuple[Schedule, ...]:
    """All registered schedules, in the order of registration."""
    return tuple(_schedules.values())
