"""A plan that was found, with its time and memory; and two of them apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from minipar.prediction.closed_form import Cost
from minipar.prediction.estimating import Estimate
from minipar.prediction.plan_numbers import PlanNumbers
from minipar.prediction.plan_words import words
from minipar.strategies.plan import Plan


@dataclass(frozen=True)
class Planned:
    """One plan that was found.

    numbers, cost   the plan as formulas read it, and what they say of it
    simulated       seconds of a step by simulating one replica; None: the stages are alike, or it was not simulated
    reasons         why its choices are as they are, in words
    """

    numbers: PlanNumbers
    cost: Cost = field(repr=False)
    simulated: float | None = None
    reasons: tuple[str, ...] = ()

    @property
    def time(self) -> float:
        """Seconds of a step: simulated, where it was; otherwise by the formula."""
        return self.cost.time if self.simulated is None else self.simulated

    @property
    def memory(self) -> int:
        """Bytes on the fullest device."""
        return self.cost.memory

    @property
    def words(self) -> str:
        """The plan as `estimate` reads it."""
        return words(self.numbers)

    @property
    def tflops_per_gpu(self) -> float:
        """10^12 operations a second of each device, those that recomputation adds included."""
        return self.cost.flops / self.time / self.numbers.ranks / 1e12

    @property
    def plan(self) -> Plan:
        """The plan for `train`. Errors: PlanError for a plan that minipar cannot run, with the reason."""
        own = (word for word in self.words.split() if not word.startswith(("micro_batch_size=", "gradients=")))
        return Plan.parse(" ".join(own))

    def __str__(self) -> str:
        return f"{self.time:.4g} s, {self.memory / 1e9:.3g} GB: {self.words}"

    def as_dict(self) -> dict[str, Any]:
        """What the command line prints."""
        return {
            "plan": self.words,
            "time": self.time,
            "tflops_per_gpu": self.tflops_per_gpu,
            "memory": self.memory,
            "reasons": list(self.reasons),
        }


@dataclass(frozen=True)
class PlanDifference:
    """Two plans apart: keys with other values, seconds and bytes by what they go to, second minus first."""

    keys: tuple[tuple[str, str, str], ...]
    seconds: Mapping[str, float]
    bytes: Mapping[str, int]

    @property
    def reason(self) -> str:
        """What makes the second one slower, in words: at most two parts."""
        more = sorted(((s, part) for part, s in self.seconds.items() if s > 0), reverse=True)
        shown = [(round(s, 9), part) for s, part in more[:2] if s > 0.01 * more[0][0]]  # (not what sums are off by)
        return ", ".join(f"{part} {s:+.3g} s" for s, part in shown)

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        lines = [f"{name}: {a or '-'} -> {b or '-'}" for name, a, b in self.keys]
        lines += [f"{part}: {s:+.4g} s" for part, s in self.seconds.items() if s]
        if len(lines) > len(self.keys):
            lines.append(f"a step: {sum(self.seconds.values()):+.4g} s")
        return "\n".join([*lines, *(f"{kind}: {size / 1e9:+.3g} GB" for kind, size in self.bytes.items() if size)])


def difference(before: Planned | Estimate, after: Planned | Estimate) -> PlanDifference:
    """Two plans for one problem, apart."""
    one, two = (dict(w.split("=", 1) for w in words(p.numbers).split()) for p in (before, after))
    names = dict.fromkeys((*one, *two))
    changed = tuple((k, one.get(k, ""), two.get(k, "")) for k in names if one.get(k) != two.get(k))
    a, b = before.cost, after.cost
    seconds = {p: b.seconds.get(p, 0.0) - a.seconds.get(p, 0.0) for p in dict.fromkeys((*a.seconds, *b.seconds))}
    sizes = {k: b.bytes.get(k, 0) - a.bytes.get(k, 0) for k in dict.fromkeys((*a.bytes, *b.bytes))}
    return PlanDifference(changed, seconds, sizes)
