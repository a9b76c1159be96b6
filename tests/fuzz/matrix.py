"""Every two keys of a plan together, and many threes: `python -m tests.fuzz.matrix [--write docs/combinations.md]`.

What is tried comes from the table of keys: of each key all values or, if there are many, the examples of its domain.
A pair is two values of two keys, in a plan of 2 to 4 ranks that has what they need. It is trained beside plain torch
(`trial.py`), or refused:

    run                    equal to plain torch, or as near as its own numbers allow (bfloat16, compressed sums)
    refused: fundamental   a row of exclusions.py which says so
    refused: not built     another row of it
    refused: other         it has nothing to act upon there, or does not fit the plan's sizes or the model
    FAILED                 a number differs, or an error: with the words of the plan

Of threes, plans with many keys at once are drawn until each three of values that no pair forbids was in one of them, or
so many were drawn.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from minipar import Plan
from minipar.cluster import Cluster
from minipar.costs.recomputation import LayerCosts
from minipar.errors import PlanError, ProgramError
from minipar.strategies import schedules
from minipar.strategies.exclusions import EXCLUSIONS, page, shown
from minipar.strategies.schedules.registry import OPTIONS
from tests.fuzz.trial import Outcome, trial

MOST_RANKS = 4
# Plans in which two choices are tried: the first of them that takes both.
BASES = (
    "dp=2 pp=2 microbatches=4", "dp=2 microbatches=4", "pp=2 microbatches=4", "microbatches=4", "dp=2", "pp=2",
    "dp=2 microbatches=4 overlap=none", "",
)  # fmt: skip
BY_HAND = ("extra_passes", "offload_folder")  # keys whose values are somebody's own
FUNDAMENTAL, NOT_BUILT, OTHER = "refused: fundamental", "refused: not built", "refused: other"
RUN, FAILED = "run", "FAILED"


@dataclass(frozen=True)
class Choice:
    """A value of a key, as words; `needs`: words that a plan must have beside it."""

    key: str
    value: str
    needs: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return f"{self.key}={self.value}"


@dataclass(frozen=True)
class Found:
    """What became of some choices: one of the outcomes above, the plan's words, and what was said."""

    choices: tuple[Choice, ...]
    kind: str
    words: str
    text: str = ""


@cache
def choices() -> tuple[Choice, ...]:
    """All values that are tried, key by key."""
    found = []
    for field in fields(Plan):
        row = field.metadata["key"]
        values = [shown(v) for v in row.domain.values if v != field.default] or list(row.domain.examples())
        needs = dict(word.split("=", 1) for word in (row.need.example.split() if row.need else ()))
        if field.name in OPTIONS:
            needs["schedule"] = next(s.name for s in schedules() if field.name in s.options)
        for value in values:
            if field.name != "schedule" or value != field.default:
                own = {key: v for key, v in needs.items() if key != field.name}
                found.append(Choice(field.name, value, tuple(own.items())))
    return tuple(found)


def pairs() -> Iterator[tuple[Choice, Choice]]:
    """All pairs of values of two keys."""
    for one, other in combinations(choices(), 2):
        if one.key != other.key:
            yield one, other


def plan_of(chosen: Sequence[Choice]) -> Found | str:
    """The words of a plan that makes these choices; or what refuses it in every base."""
    own = {choice.key: choice.value for choice in chosen}
    needs = {key: value for choice in chosen for key, value in choice.needs}
    refused: list[tuple[str, str]] = []
    for base in BASES:
        table = {**dict(word.split("=") for word in base.split()), **needs, **own}
        words = " ".join(f"{key}={value}" for key, value in table.items())
        try:
            plan = Plan.parse(table)
            if plan.ranks > MOST_RANKS:
                continue
            if plan.place != "branches" and not plan.annotations:  # (which are of other layers)
                plan.compile(layers=6, costs=_costs(plan))
            return words
        except PlanError as error:
            refused.append((words, str(error).split("\n")[0]))
        except ProgramError as error:
            return Found(tuple(chosen), FAILED, words, str(error))
    words, said = refused[-1] if refused else ("", "more ranks than there are")
    return Found(tuple(chosen), _kind(said), words, said)


def _costs(plan: Plan) -> LayerCosts:
    layers = plan._uniform(6).layers
    unit = (1.0,) * layers
    return LayerCosts(unit, unit, (1000,) * layers, (2000,) * layers, (1000,) * layers)


def _kind(said: str) -> str:
    """Which kind of refusal a message is."""
    for row in EXCLUSIONS:
        if f"({row.why}; {row.kind}); possible is {row.possible}" in said:
            return FUNDAMENTAL if row.fundamental else NOT_BUILT
    return OTHER


def tried(chosen: Sequence[Choice], ranks: Callable[[int], Any]) -> Found:
    """Run a plan with these choices, if there is one."""
    words = plan_of(chosen)
    return words if isinstance(words, Found) else ran(chosen, words, trial(words, ranks))


def ran(chosen: Sequence[Choice], words: str, outcome: Outcome) -> Found:
    kind = FAILED if outcome.failed else _kind(outcome.text) if outcome.kind == "refused" else RUN
    return Found(tuple(chosen), kind, words, f"{outcome.kind} {outcome.text}")


# threes ---------------------------------------------------------------------------------------------------------------


def wide_plans(count: int, every: Sequence[Choice], seed: int = 0) -> Iterator[tuple[tuple[Choice, ...], str, float]]:
    """Plans of many of these choices at once, their words, and how much of all possible threes they have had so far."""
    dice = random.Random(seed)
    two = (pair for pair in combinations(every, 2) if pair[0].key != pair[1].key)
    possible = {frozenset(pair) for pair in two if isinstance(plan_of(pair), str)}
    partners = {one: [c for c in every if frozenset((one, c)) in possible] for one in every}
    threes = {
        frozenset((a, b, c))
        for a in every
        for b, c in combinations(partners[a], 2)
        if b.key != c.key and frozenset((b, c)) in possible
    }
    left, total = set(threes), max(1, len(threes))
    given_up: set[frozenset[Choice]] = set()
    for _ in range(count):
        open_ = left - given_up
        if not open_:
            return
        start = min(dice.sample(sorted(open_, key=lambda t: sorted(map(str, t))), 1), key=str)
        chosen = list(start)
        words = plan_of(chosen)
        if not isinstance(words, str):  # (three that do not go together, though each two do)
            if words.kind == FAILED:
                raise ProgramError(f"{words.words}: {words.text}")
            given_up.add(start)
            total -= 1
            continue
        for more in dice.sample(every, len(every)):
            fits = all(frozenset((more, c)) in possible for c in chosen)
            if fits and len(chosen) < 9 and isinstance(longer := plan_of([*chosen, more]), str):
                chosen, words = [*chosen, more], longer
        left -= set(map(frozenset, combinations(chosen, 3)))
        yield tuple(chosen), words, 1 - len(left - given_up) / max(1, total)


# the command ----------------------------------------------------------------------------------------------------------


class Clusters:
    """Clusters by size; new ones after an error."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.made: dict[int, Cluster] = {}

    def __call__(self, ranks: int) -> Cluster:
        if ranks not in self.made:
            self.made[ranks] = Cluster(ranks, device=self.device, patience=15.0)
        return self.made[ranks]

    def close(self) -> None:
        for cluster in self.made.values():
            cluster.close()
        self.made = {}


def report(found: Sequence[Found], threes: Sequence[Found], covered: float) -> str:
    """What was run and what was refused, as a part of docs/combinations.md."""
    names = [field.name for field in fields(Plan) if field.name not in BY_HAND]
    cells: dict[frozenset[str], Counter[str]] = {}
    for one in found:
        cells.setdefault(frozenset(c.key for c in one.choices), Counter())[one.kind] += 1
    sign = {RUN: "r", FUNDAMENTAL: "x", NOT_BUILT: "o", OTHER: "-", FAILED: "F"}
    counts = Counter(one.kind for one in found)
    wide = Counter(one.kind for one in threes)
    many = (
        f" Of {len(threes)} plans of up to nine keys, with {covered:.0%} of all possible threes of values,",
        f"{wide[RUN]} run, {wide[FAILED]} fail, and a model or its size refuses the others.",
    )
    told = (
        f"{len(found)} of {sum(1 for _ in pairs())} pairs of values of two keys were tried, each on 2 to 4 ranks",
        "beside plain torch in float64, within 1e-10 (bfloat16 and compressed sums within their own precision):",
        f"{counts[RUN]} run, {counts[FUNDAMENTAL]} are refused for a fundamental reason, {counts[NOT_BUILT]} because",
        f"nobody has built them, {counts[OTHER]} have nothing to act upon together or do not fit, and {counts[FAILED]}",
        "fail." + ("\n".join(many) if threes else ""),
        "",
        "`r` some values run, `x` some are refused for a fundamental reason, `o` some are not built, `-` none has",
        "anything to act upon; nothing: not tried.",
        "Written by `python -m tests.fuzz.matrix --write docs/combinations.md`.",
        "",
    )
    lines = ["# What was run", "", *told]
    lines.append("| | key | " + " | ".join(str(n) for n in range(1, len(names) + 1)) + " |")
    lines.append("|" + "---|" * (len(names) + 2))
    for n, one in enumerate(names, 1):
        row = []
        for other in names:
            kinds = cells.get(frozenset((one, other)), Counter())
            signs = "".join(sign[kind] for kind in (FAILED, RUN, FUNDAMENTAL, NOT_BUILT) if kinds[kind])
            row.append(signs or ("-" if kinds else " "))
        lines.append(f"| {n} | {one} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.matrix", description=__doc__.split("\n")[0])
    parser.add_argument("--every", type=int, default=1, help="try every so many-th pair; 0: none")
    parser.add_argument("--threes", type=int, default=1000, help="plans of many keys, at most")
    parser.add_argument("--seed", type=int, default=0, help="other plans of many keys")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--with", dest="key", default="", help="only pairs that have this key")
    parser.add_argument("--write", default="", metavar="PAGE", help="write the table and the outcomes to this page")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    ranks, begin = Clusters(), time.monotonic()

    def note(one: Found) -> Found:
        if one.kind == FAILED:
            print(f"FAILED {' '.join(map(str, one.choices))}: {one.words}: {one.text}", flush=True)
            ranks.close()
        return one

    found: list[Found] = []
    threes: list[Found] = []
    covered = 0.0
    try:
        wanted = [pair for pair in pairs() if not chosen.key or chosen.key in (pair[0].key, pair[1].key)]
        for pair in wanted[:: chosen.every] if chosen.every else ():
            if time.monotonic() - begin > chosen.seconds:
                break
            found.append(note(tried(pair, ranks)))
        told = f"{len(found)} of {len(wanted)} pairs in {time.monotonic() - begin:.0f} s:"
        print(told, Counter(one.kind for one in found), flush=True)
        for several, words, share in wide_plans(chosen.threes, choices(), chosen.seed) if chosen.threes else ():
            if time.monotonic() - begin > chosen.seconds:
                break
            threes.append(note(ran(several, words, trial(words, ranks))))
            covered = share
    finally:
        ranks.close()
    print(f"{len(threes)} plans, {covered:.0%} of threes, {time.monotonic() - begin:.0f} s:",
          Counter(f.kind for f in threes))  # fmt: skip
    if chosen.write:
        Path(chosen.write).write_text(f"{page()}\n\n{report(found, threes, covered)}\n")
    return 1 if any(one.kind == FAILED for one in (*found, *threes)) else 0


if __name__ == "__main__":
    sys.exit(main())
