"""Every two keys of a plan together, and many threes: `python -m tests.fuzz.matrix [--write docs/combinations.md]`.

What is tried comes from the table of keys: of each key all values or, if there are many, the examples of its domain.
A pair is two values of two keys, in a plan of 2 to 4 ranks that has what they need. It is trained beside plain torch
(`trial.py`), or refused:

    run                    equal to plain torch, or as near as numbers of 16 bits allow
    refused: fundamental   a row of exclusions.py which says so
    refused: not built     another row of it
    refused: other         it has nothing to act upon there, or does not fit the plan's sizes or the model
    FAILED                 a number differs, or an error: with the words of the plan

Of threes, plans with many keys at once are drawn until each three of values that no pair forbids was run in one of
them, or so many were drawn.
"""

from __future__ import annotations

import argparse
import atexit
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import combinations
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from minipar import Plan
from minipar.cluster import Cluster
from minipar.costs.recomputation import LayerCosts
from minipar.errors import PlanError
from minipar.strategies import schedules
from minipar.strategies.combinations import page
from minipar.strategies.exclusions import EXCLUSIONS, shown
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
PAIRS, THREES = "# What was run", "# Threes that were run"  # titles of docs/combinations.md


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
            if plan.place != "branches":
                # (Equal layers have neither the names of annotations nor the shapes of low rank.)
                low = plan.compress.startswith("powersgd")
                plain = replace(plan, annotations=(), compress="none" if low else plan.compress)
                plain.compile(layers=6, costs=_costs(plain))
            return words
        except PlanError as error:
            refused.append((words, str(error).split("\n")[0]))
        except Exception as error:
            return Found(tuple(chosen), FAILED, words, f"{type(error).__name__}: {error}".split("\n")[0])
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

WIDE = 20  # choices of a plan, at most
FEW = 20  # threes of a refused plan that are tried alone


class Threes:
    """A covering array: plans of many choices at once, until each three of values that no pair forbids was run in one.

    Each plan begins with a three that no plan has had yet, and takes the choice that adds most such threes, again and
    again, as long as the plan can be made. If a wide plan is refused when it runs, its new threes are tried alone where
    they are few, otherwise its first three. A three that was refused is in no later plan.
    `refused`: at first the pairs that were refused when they ran, though their plans can be made; then the threes that
    are refused though each two of them go together, and what was said.
    """

    def __init__(self, every: Sequence[Choice], seed: int = 0, refused: Collection[frozenset[Choice]] = ()) -> None:
        self.every = every
        two = ((one, other) for one, other in combinations(every, 2) if one.key != other.key)
        self.possible = {frozenset(pair) for pair in two if isinstance(plan_of(pair), str)} - {*refused}
        fits = {one: [c for c in every if frozenset((one, c)) in self.possible] for one in every}
        left = {
            frozenset((a, b, c)): None
            for a in every
            for b, c in combinations(fits[a], 2)
            if frozenset((b, c)) in self.possible
        }
        self.order = list(left)
        random.Random(seed).shuffle(self.order)
        self.left = set(left)
        self.refused: dict[frozenset[Choice], str] = {}
        self.covered: set[frozenset[Choice]] = set()
        self.alone: list[frozenset[Choice]] = []
        self.failed: list[Found] = []  # plans that cannot be made, and are not refused

    @property
    def share(self) -> float:
        """How much of all threes that go together were run."""
        return len(self.covered) / max(1, len(self.covered) + len(self.left))

    def draw(self) -> tuple[tuple[Choice, ...], str] | None:
        """The next plan and its words; None if no three is left."""
        while self.alone or self.order:
            alone = bool(self.alone)
            start = self.alone.pop() if alone else self.order.pop()
            if start not in self.left:
                continue
            chosen = sorted(start, key=self.every.index)
            words = plan_of(chosen)
            if isinstance(words, str):
                return (tuple(chosen), words) if alone else self._widened(chosen, words)
            if words.kind == FAILED:
                self.failed.append(words)
                self.left.discard(start)
            else:
                self._give_up(start, words.text)
        return None

    def settle(self, one: Found) -> None:
        """Note what became of a plan."""
        if one.kind == RUN:
            had = set(map(frozenset, combinations(one.choices, 3))) & self.left
            self.left -= had
            self.covered |= had
        elif one.kind == FAILED:
            pass  # (its threes are left, unless another plan has them)
        elif len(one.choices) == 3:
            self._give_up(frozenset(one.choices), one.text)
        else:
            new = [three for three in map(frozenset, combinations(one.choices, 3)) if three in self.left]
            self.alone += new if len(new) <= FEW else [frozenset(one.choices[:3])]

    def _widened(self, chosen: list[Choice], words: str) -> tuple[tuple[Choice, ...], str]:
        no = set(chosen)
        while len(chosen) < WIDE:
            barred = {more for three in self.refused if len(left := three.difference(chosen)) == 1 for more in left}
            gains = {
                more: sum(frozenset((more, a, b)) in self.left for a, b in combinations(chosen, 2))
                for more in self.every
                if more not in no | barred and all(frozenset((more, c)) in self.possible for c in chosen)
            }
            best = max(gains, key=lambda more: gains[more], default=None)
            if best is None or not gains[best]:
                break
            no.add(best)
            longer = plan_of([*chosen, best])
            if isinstance(longer, str):
                chosen, words = [*chosen, best], longer
            elif longer.kind == FAILED:
                self.failed.append(longer)
        return tuple(chosen), words

    def _give_up(self, three: frozenset[Choice], said: str) -> None:
        self.left.discard(three)
        self.refused[three] = said


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


def _alone(device: str, chosen: tuple[Choice, ...], words: str = "") -> Found:
    """In a process of its own, whose clusters stay until something fails."""
    torch.set_num_threads(1)
    ranks = _clusters(device)
    one = ran(chosen, words, trial(words, ranks)) if words else tried(chosen, ranks)
    if one.kind == FAILED:  # (its ranks may be of no use any more)
        ranks.close()
    return one


@cache
def _clusters(device: str) -> Clusters:
    made = Clusters(device)
    atexit.register(made.close)
    return made


def _wide(pool: Executor, covering: Threes, at_once: int, device: str) -> Iterator[Found]:
    """What becomes of wide plans, so many of which are tried at once."""
    running: set[Future[Found]] = set()
    while True:
        while len(running) < at_once and (plan := covering.draw()) is not None:
            running.add(pool.submit(_alone, device, *plan))
        while covering.failed:
            yield covering.failed.pop()
        if not running:
            return
        done, running = wait(running, return_when=FIRST_COMPLETED)
        for one in done:
            covering.settle(one.result())
            yield one.result()


def report(found: Sequence[Found]) -> str:
    """Which pairs were run and which were refused, as a part of docs/combinations.md."""
    names = [field.name for field in fields(Plan) if field.name not in BY_HAND]
    cells: dict[frozenset[str], Counter[str]] = {}
    for one in found:
        cells.setdefault(frozenset(c.key for c in one.choices), Counter())[one.kind] += 1
    sign = {RUN: "r", FUNDAMENTAL: "x", NOT_BUILT: "o", OTHER: "-", FAILED: "F"}
    counts = Counter(one.kind for one in found)
    told = (
        f"{len(found)} of {sum(1 for _ in pairs())} pairs of values of two keys were tried, each on 2 to 4 ranks",
        "beside plain torch in float64, within 1e-10 (numbers of 16 bits within their own precision; where sums leave",
        "something out, a second run has it sent, too):",
        f"{counts[RUN]} run, {counts[FUNDAMENTAL]} are refused for a fundamental reason, {counts[NOT_BUILT]} because",
        f"nobody has built them, {counts[OTHER]} have nothing to act upon together or do not fit, and {counts[FAILED]}",
        "fail.",
        "",
        "`r` some values run, `x` some are refused for a fundamental reason, `o` some are not built, `-` none has",
        "anything to act upon; nothing: not tried.",
        "Written by `python -m tests.fuzz.matrix --write docs/combinations.md`.",
        "",
    )
    lines = [PAIRS, "", *told]
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


def report_of_threes(found: Sequence[Found], covering: Threes) -> str:
    """How many threes were run, as a part of docs/combinations.md."""
    wide = Counter(one.kind for one in found)
    told = (
        f"Of threes of values, {len(covering.covered)} were run ({covering.share:.1%} of those that can be), in",
        f"{wide[RUN]} plans of up to {WIDE} keys; {len(covering.refused)} are refused though each two of them go",
        f"together, and {wide[FAILED]} plans fail.",
        f"(A plan has at most {MOST_RANKS} ranks: beside two of dp=2, pp=2 and tp=2 none is left for the third.)",
        "Written by `python -m tests.fuzz.matrix --with place --write docs/combinations.md`, which leaves the pairs.",
        "",
    )
    return "\n".join([THREES, "", *told, *_reasons(covering.refused.values())])


def _reasons(said: Collection[str]) -> list[str]:
    """A table of what was said, the most frequent first; texts that differ in numbers and values alone are one row."""
    found: dict[str, list[str]] = {}
    for text in said:
        short = text.removeprefix("refused ").split("; possible")[0].replace("|", "/")
        found.setdefault(re.sub(r"\d+|=\S+|'.*'", "", short)[:60], []).append(short)
    rows = sorted(found.values(), key=len, reverse=True)
    return ["| threes | refused with, for example |", "|---:|---|", *(f"| {len(row)} | {min(row)} |" for row in rows)]


def with_section(page: str, section: str) -> str:
    """A page with a section, which begins with its title, in place of the one with the same title or at the end."""
    title = section.split("\n")[0]
    before, _, old = f"\n{page}".partition(f"\n{title}\n")
    after = old[old.index("\n# ") + 1 :] if "\n# " in old else ""
    return "\n\n".join(part.strip("\n") for part in (before, section, after) if part.strip("\n")) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.matrix", description=__doc__.split("\n")[0])
    parser.add_argument("--every", type=int, default=1, help="try every so many-th pair; 0: none")
    parser.add_argument("--threes", type=int, default=10000, help="plans of many keys, at most")
    parser.add_argument("--seed", type=int, default=0, help="other plans of many keys")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--at-once", type=int, default=2, help="so many plans at once, each in a process of its own")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="what the ranks compute on")
    parser.add_argument(
        "--with",
        dest="key",
        default="",
        help="only pairs that have this key (place is the only one with a model of its own)",
    )
    parser.add_argument("--write", default="", metavar="PAGE", help="write the table and the outcomes to this page")
    chosen = parser.parse_args()
    begin = time.monotonic()

    def note(one: Found) -> Found:
        if one.kind == FAILED:
            print(f"FAILED {' '.join(map(str, one.choices))}: {one.words}: {one.text}", flush=True)
        return one

    def over() -> bool:
        return time.monotonic() - begin > chosen.seconds

    found: list[Found] = []
    threes: list[Found] = []
    covering: Threes | None = None
    wanted = [pair for pair in pairs() if not chosen.key or chosen.key in (pair[0].key, pair[1].key)]
    with ProcessPoolExecutor(chosen.at_once, get_context("spawn")) as pool:
        begun = [pool.submit(_alone, chosen.device, pair) for pair in (wanted[:: chosen.every] if chosen.every else ())]
        for one in begun:
            if over():
                break
            found.append(note(one.result()))
        told = f"{len(found)} of {len(wanted)} pairs in {time.monotonic() - begin:.0f} s:"
        print(told, Counter(one.kind for one in found), flush=True)
        if chosen.threes and not over():
            covering = Threes(choices(), chosen.seed, [frozenset(one.choices) for one in found if one.kind != RUN])
            for one in _wide(pool, covering, chosen.at_once, chosen.device):
                threes.append(note(one))
                if len(threes) % 50 == 0:
                    print(f"{len(threes)} plans, {covering.share:.1%} of threes", flush=True)
                if over() or len(threes) >= chosen.threes:
                    break
        pool.shutdown(wait=False, cancel_futures=True)
    share = covering.share if covering is not None else 0.0
    print(f"{len(threes)} plans, {share:.1%} of threes, {time.monotonic() - begin:.0f} s:",
          Counter(f.kind for f in threes))  # fmt: skip
    if chosen.write:
        path = Path(chosen.write)
        _, title, old = path.read_text().partition(f"\n{PAIRS}\n")
        text = f"{page()}\n{title}{old}"
        if found and not chosen.key:
            text = with_section(text, report(found))
        if covering is not None:
            text = with_section(text, report_of_threes(threes, covering))
        path.write_text(text)
    return 1 if any(one.kind == FAILED for one in (*found, *threes)) else 0


if __name__ == "__main__":
    sys.exit(main())
