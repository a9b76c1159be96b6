"""Exhaustive search over the plans for a model on a machine: formulas for all, pruned by bounds, the best simulated.

    found = search("gpt3-175b", "a100-80gb", nodes=128, gpus_per_node=8, batch=1536)
    print(found)                      the best plans, with time, memory and reasons
    found.pin("tp=4")                 search again with a choice that is fixed
    found.explain("tp")               what each value of a key would cost instead
    found.front()                     the least time for each size of memory

    ways to compute a micro-batch   tp=8 pp=8 rows=1 checkpoint=selective ...     bound: what the slowest rank computes
      each with every schedule      interleaved, 3 chunks                         bound: that, and the schedule's bubble
        each with what is shared    zero=1; zero=2 reduce=step; ...               the formula: time and memory

A bound is what no plan below it is faster than: sums, copies and gathered parameters only add to it. The open one with
the smallest bound is next, and the search ends where that is no better than the worst plan of the list. So what was
left out is not better. Plans that do not fit are left out, too, if nothing can wait on the host. A formula takes a
small part of a millisecond (`closed_form`).

The formulas of the schedules that are searched are exact for equal ranks. Where stages differ, they are a few per cent
away: the best plans are simulated and sorted again, and a plan that is not in the list could be faster by as much.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heapify, heappop, heappush
from html import escape
from textwrap import wrap
from time import perf_counter
from typing import Any

from minipar.costs.hardware import Hardware, hardware
from minipar.costs.rates import Calibration
from minipar.errors import PlanError
from minipar.models.sizes import Sizes, sizes
from minipar.planner.planned import PlanDifference, Planned, difference
from minipar.planner.reasons import advice, reasons
from minipar.planner.space import INNER, OUTER, RESERVE, Space, space
from minipar.planner.way_out import nothing_fits, smallest
from minipar.prediction.closed_form import Cost, closed_form
from minipar.prediction.estimating import estimate
from minipar.prediction.plan_numbers import PlanNumbers
from minipar.prediction.plan_words import check
from minipar.prediction.published import like
from minipar.prediction.rank_memory import host_of_node
from minipar.prediction.replica import by_simulation, helps
from minipar.program.rows import MOST_ROWS
from minipar.strategies import keys
from minipar.strategies.schedules.registry import find
from minipar.wording import several

WORK = ("matrix products", "other operators", "recomputation", "collectives of shared layers")
SIMULATED = 20  # of the best plans
USUAL = ("1f1b", "interleaved", "gpipe")  # schedules that every system has
WIDTH = 100  # columns of a table


@dataclass(frozen=True)
class Found:
    """What a search found: the plan to take, and then the fastest ones.

    best      of those plans that are as fast as the fastest one, as far as published rows show, the one with the fewest
              mechanisms comes first
    searched  how many plans the space has
    tried     for how many of them a formula was computed: all others are no faster than the last of `best`
    seconds   that the search took
    bound     seconds: no formula that was not computed gives less; 0 where all were computed
    """

    space: Space
    best: tuple[Planned, ...]
    searched: int
    tried: int
    seconds: float
    bound: float = 0.0

    @property
    def plan(self) -> Planned:
        """The one to take."""
        return self.best[0]

    def pin(self, pins: str | Mapping[str, Any]) -> Found:
        """Search again with some keys fixed: "tp=4 zero=1". Errors: as `search`."""
        return solve(self.space.pinned(pins), most=len(self.best))

    def explain(self, key: str) -> Alternatives:
        """What each value of a key would cost instead, where all others may change along with it. All times are those
        of formulas.

        Errors: PlanError for a key that is not searched.
        """
        return alternatives(self.space, key, self.plan)

    def difference(self, plan: str | Planned) -> PlanDifference:
        """What another plan for the same problem has and takes otherwise than the fastest one, by formulas.

        plan   its words, as `estimate` reads them. Errors: PlanError, as `estimate`
        """
        if isinstance(plan, Planned):
            return difference(self.plan, plan)
        where = self.space
        given = plan if "precision=" in plan else f"{plan} precision={where.precision}"
        found = estimate(given, where.model, where.machine, where.batch)
        if found.by == "replica" and not found.numbers.options and find(found.numbers.schedule).form is not None:
            cost = closed_form(found.numbers, where.model, where.machine)
            return difference(self.plan, Planned(found.numbers, cost))
        return difference(self.plan, found)

    def front(self, points: int = 6) -> tuple[Planned, ...]:
        """The fastest plans for less and less memory, from the smallest to the fastest one."""
        return front(self.space, self.plan, points)

    def __repr__(self) -> str:
        return str(self)  # (a Python prompt shows the table, too)

    def table(self) -> list[tuple[str, ...]]:
        """A row of text per plan."""
        rows: list[tuple[str, ...]] = [("plan", "step", "TFLOP/s", "memory", "over the best")]
        for one in self.best:
            rows.append(
                (one.words, f"{one.time:.4g} s", f"{one.tflops_per_gpu:.4g}", f"{one.memory / 1e9:.3g} GB",
                 f"{one.time / self.plan.time - 1:.1%}")
            )  # fmt: skip
        return rows

    def __str__(self) -> str:
        shared = [word for word in self.plan.words.split() if all(word in one.words.split() for one in self.best)]
        lines = (
            wrap(f"all plans: {' '.join(shared)}", WIDTH, break_on_hyphens=False)
            if shared and len(self.best) > 1
            else []
        )
        rows = [(*row[1:], row[0]) for row in self.table()]
        widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]) - 1)]
        for *numbers, plan in rows:
            start = "".join(f"{cell.ljust(w)}  " for cell, w in zip(numbers, widths, strict=True))
            own = " ".join(word for word in plan.split() if word not in shared or len(self.best) == 1)
            lines += wrap(
                own or "as above",
                WIDTH,
                initial_indent=start,
                subsequent_indent=" " * len(start),
                break_on_hyphens=False,
            )
        lines += ["", *self.plan.reasons]
        if any(one.time < self.plan.time for one in self.best):
            lines.append(
                "Which of the first plan and those that take less time is faster lies within the error of estimates: "
                "the first one has the fewest mechanisms."
            )
        lines.append(
            f"{several(self.searched, 'plan')} in {self.seconds:.2f} s: {self.tried} by formulas, and no other has a "
            "faster formula"
        )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """The table that a notebook shows."""
        head, *rows = self.table()
        lines = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>"]
        lines += ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
        return "<table>" + "".join(lines) + "</table>"


def search(
    model: str | Sizes,
    devices: str | Hardware | Calibration,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    batch: int = 1,
    *,
    pins: str | Mapping[str, Any] = "",
    memory: int | str | None = None,
    most: int = SIMULATED,
    simulate: bool = True,
    runs: bool = False,
    to: str = "",
) -> Found:
    """The fastest plans for a model, and how much is known about all others.

    model, devices, nodes, gpus_per_node   as for `minipar.estimate`; default: the machine's own nodes, or one
    batch     rows of a step over all replicas
    pins      keys that are fixed: "tp=8 zero=1"
    memory    bytes of a device that may be used, or words such as "70GB"; default: all but RESERVE of them
    most      how many plans to return
    simulate  whether the best ones are simulated where their stages differ
    runs      whether only plans count that minipar itself can run
    to        "megatron", "deepspeed" or "torchtitan": only plans that this system runs, too, as `export` says them

    Errors: PlanError for an unknown model, hardware, key or value, and where no plan fits: with the smallest memory,
    and the smallest number of nodes, that would do.
    """
    machine = hardware(devices)
    changed: dict[str, Any] = {"nodes": keys.whole_number("nodes", nodes if nodes is not None else machine.nodes or 1)}
    if gpus_per_node is not None:
        changed["per_node"] = keys.whole_number("gpus-per-node", gpus_per_node)
    if memory is not None:
        changed["memory"] = memory
    rows, reserve = keys.whole_number("batch", batch, most=MOST_ROWS), RESERVE if memory is None else 0.0
    found = space(sizes(model), replace(machine, **changed), rows, pins, reserve)
    return solve(replace(found, runs=runs, to=to), keys.whole_number("most", most), simulate)


def solve(space: Space, most: int = SIMULATED, simulate: bool = True) -> Found:
    """The fastest plans of a space. Errors: PlanError where none fits."""
    began = perf_counter()
    best, tried, bound = _by_formulas(space, most)
    if not best:
        raise PlanError(nothing_fits(space))
    plans = _simulated(space, best) if simulate else best
    plans.sort(key=lambda one: one.time)
    plans = _plainest_first(space, plans)[:most]

    explained = tuple(replace(one, reasons=reasons(one, space)) for one in plans)
    return Found(space, explained, space.count, tried, perf_counter() - began, bound)


def _by_formulas(space: Space, most: int) -> tuple[list[Planned], int, float]:
    """The fastest plans that fit, how many formulas were computed, and the bound at which the search ended."""
    best: list[tuple[float, int, Planned]] = []
    tried = 0
    ways: list[tuple[float, int, PlanNumbers, bool]] = []  # bound, number, plan, whether its schedule is chosen
    for numbers in space.outer():
        tried += 1
        bound = _bound(space, numbers, WORK)
        if bound is not None:
            ways.append((bound, tried, numbers, False))
    heapify(ways)
    while ways:
        bound, _, numbers, scheduled = heappop(ways)
        limit = best[-1][0] if len(best) >= most else float("inf")
        if bound >= limit:
            return [one for _, _, one in best], tried, bound
        if not scheduled:
            for built in space.scheduled(numbers):
                tried += 1
                bound = _bound(space, built, (*WORK, "bubble"))
                if bound is not None and bound < limit:
                    heappush(ways, (bound, tried, built, True))
            continue
        for built in space.sharing(numbers):
            limit = best[-1][0] if len(best) >= most else float("inf")
            tried += 1
            found = _fitting(space, built, limit)
            if found is not None:
                insort(best, (found.cost.time, tried, found))
                del best[most:]
    return [one for _, _, one in best], tried, 0.0


def _bound(space: Space, numbers: PlanNumbers, parts: tuple[str, ...]) -> float | None:
    """Seconds that every plan takes which computes and orders micro-batches like this one; None if it cannot be.

    A formula's parts are m times those of the slowest rank. Without a schedule, the first micro-batch goes through all
    ranks, whose mean is at least what the slowest one takes, divided by their number.
    """
    try:
        cost = _cost(numbers, space.model, _any_memory(space.machine))
    except PlanError:
        return None
    total = sum(cost.seconds.get(part, 0.0) for part in parts)
    m = numbers.microbatches
    return total if "bubble" in parts else total * (m - 1 + 1 / numbers.pp) / m


@lru_cache(1 << 14)
def _cost(numbers: PlanNumbers, model: Sizes, machine: Hardware) -> Cost:
    """What the formulas give, whatever memory a device has: searches for less memory ask for the same plans again."""
    return closed_form(numbers, model, machine)


@lru_cache(64)
def _any_memory(machine: Hardware) -> Hardware:
    return replace(machine, memory=1)


def _fitting(space: Space, numbers: PlanNumbers, limit: float) -> Planned | None:
    """A plan, if it can be, is faster than the limit and fits; with something on the host, if it fits only so."""
    try:
        cost = _cost(numbers, space.model, _any_memory(space.machine))
        away = sum(cost.bytes.get(kind, 0) for kind in {kind for what in space.domains["offload"] for kind in what})
        if cost.time >= limit or cost.memory - away > space.machine.memory:
            return None
        plain = [numbers] if () in space.domains["offload"] else []
        for chosen in (*plain, *space.offloaded(numbers)):
            if chosen is not numbers:
                cost = _cost(chosen, space.model, _any_memory(space.machine))
            on_host = host_of_node(cost.host, chosen, space.machine)
            if cost.memory <= space.machine.memory and on_host <= space.machine.host_memory:
                if cost.time >= limit:
                    return None
                check(chosen, space.model, space.machine)
                found = Planned(chosen, cost)
                if space.to:
                    found.plan.export(space.to)
                return found if not space.runs or found.plan else None
    except PlanError:
        pass
    return None


def _plainest_first(space: Space, best: list[Planned]) -> list[Planned]:
    """The plans, before them the one with the fewest mechanisms whose time is within the error bar of the best one's:
    which of them is faster nobody knows."""
    first = best[0]
    bar = like(first.time, first.numbers, space.model, space.machine)
    usual = {**space.domains, "reduce": space.domains["reduce"][:1]}
    usual["offload"] = tuple(what for what in space.domains["offload"] if not what) or space.domains["offload"]
    usual["schedule"] = tuple(one for one in space.domains["schedule"] if one[0] in USUAL) or space.domains["schedule"]
    for schedules in (usual["schedule"], usual["schedule"][:1]):  # (the plainest one stands first)
        plain, _, _ = _by_formulas(replace(space, domains={**usual, "schedule": schedules}), 1)
        for one in _simulated(space, plain):
            if one.numbers not in [known.numbers for known in best] and one.time <= first.time * (1 + bar.error):
                best = [*best, one]
    equal = [one for one in best if one.time <= first.time * (1 + bar.error)]
    chosen = min(equal, key=lambda one: (mechanisms(one.numbers), one.time))
    return [chosen, *(one for one in best if one is not chosen)]


def mechanisms(numbers: PlanNumbers) -> int:
    """How many things a plan does that plain data parallelism does not. An axis counts twice, and so do sums of
    gradients after each micro-batch of a pipeline."""
    n = numbers
    axes = sum(size > 1 for size in (n.tp, n.pp, n.cp, n.ep, n.zero if n.pp > 1 else 1))
    rest = (n.zero > 0) + (n.zero > 1) + (n.zero > 2) + (not n.every and n.zero > 1) + bool(n.checkpoint)
    return 2 * axes + rest + 2 * len(n.offload) + 2 * (n.pp > 1 and n.schedule not in USUAL) + (n.chunks > 1)


def _simulated(space: Space, best: list[Planned]) -> list[Planned]:
    """The plans with the simulator's time where it says more than a formula."""
    built = []
    for one in best:
        n = one.numbers
        if helps(n, space.model, space.machine):
            cost = closed_form(n, space.model, space.machine, by_simulation(n))
            one = replace(one, simulated=cost.time)
        built.append(one)
    return built


# What if --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Alternative:
    """One value of a key, and the best plan that has it; None, and why not, if there is none.

    slower   how much longer the formula says it takes than that of the plan it is compared with: 0.02 is 2 %
    """

    value: str
    plan: Planned | None
    slower: float
    reason: str

    def __str__(self) -> str:
        if self.plan is None:
            return f"{self.value}: {self.reason}"
        return f"{self.value}: {self.plan.time:.4g} s ({self.slower:+.1%}{f'; {self.reason}' if self.reason else ''})"


@dataclass(frozen=True)
class Alternatives:
    """All values of a key, the best one first. Times are those of formulas, also where the search simulated.

    best   the plan that they are compared with
    """

    key: str
    rows: tuple[Alternative, ...]
    best: Planned

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        lines = [f"{self.key}={row}" for row in self.rows]
        if self.best.simulated is not None:
            lines.append(
                f"These are times by formulas: the best plan has {self.best.cost.time:.4g} s, and "
                f"{self.best.simulated:.4g} s where it is simulated."
            )
        return "\n".join(lines)


def alternatives(space: Space, key: str, best: Planned) -> Alternatives:
    """What each value of a key would cost, by formulas. Errors: PlanError for a key that is not searched."""
    possible = (*OUTER, *INNER)
    if key not in possible:
        raise PlanError(f"key {key!r}: is not searched; possible are {', '.join(possible)}")
    values = dict.fromkeys(one[0] for one in space.domains[key]) if key == "schedule" else space.domains[key]
    rows = []
    for value in values:
        text = _text(key, value)
        own = [one for one in space.domains[key] if one[0] == value] if key == "schedule" else [value]
        small = replace(space, domains={**space.domains, key: tuple(own)}, pins={**space.pins, key: text})
        found, _, _ = _by_formulas(small, 1)
        if not found:
            rows.append(Alternative(text, None, float("inf"), _why_none(small)))
            continue
        plan = found[0]
        reason = difference(best, plan).reason
        if key == "schedule" and plan.numbers.pp == 1:
            reason = "with pp=1, which has no order of stages"
        rows.append(Alternative(text, plan, plan.cost.time / best.cost.time - 1, reason))
    rows.sort(key=lambda row: row.slower)
    return Alternatives(key, tuple(rows), best)


def _text(key: str, value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(value) or "none"
    return (
        "none" if key == "checkpoint" and value == 0 else str(value).lower() if isinstance(value, bool) else str(value)
    )


def _why_none(space: Space) -> str:
    try:
        least = smallest(space)
    except PlanError as error:
        return error.reason
    return f"does not fit: at least {least.memory / 1e9:.4g} GB ({least.words})"


def front(space: Space, fastest: Planned, points: int = 6) -> tuple[Planned, ...]:
    """The fastest plans for `points` budgets between the smallest plan and the fastest one."""
    points = keys.whole_number("points", points, 2)
    least = smallest(space)
    found = [least, fastest]
    for k in range(1, points - 1):
        budget = round(least.memory + (fastest.memory - least.memory) * k / (points - 1))
        found += _by_formulas(replace(space, machine=replace(space.machine, memory=budget)), 1)[0]
    kept: list[Planned] = []
    for one in sorted(found, key=lambda p: (p.memory, p.time)):
        if not kept or one.time < kept[-1].time:
            kept.append(one)
    return tuple(kept)


def report(found: Found, key: str | None = None, with_front: bool = False, other: str | None = None) -> dict[str, Any]:
    """What a search found, for scripts and for people (`text`). `key`: also what its values would cost instead, by
    formulas. `other`: also what this plan has and takes otherwise."""
    words = advice(found.plan, found.space)
    text = [str(found), "", *wrap(words, WIDTH)]
    built: dict[str, Any] = {
        "best": [one.as_dict() for one in found.best],
        "searched": found.searched,
        "seconds": found.seconds,
        "tried": found.tried,
        "advice": words,
    }
    if key is not None:
        rows = found.explain(key)
        text += ["", str(rows)]
        built["explain"] = [
            {"value": row.value, "plan": row.plan.words if row.plan else None,
             "time": row.plan.cost.time if row.plan else None, "slower": row.slower if row.plan else None,
             "reason": row.reason}
            for row in rows.rows
        ]  # fmt: skip
    if other is not None:
        changes = found.difference(other)
        text += ["", f"the best plan -> {other}, by formulas", str(changes) or "they are the same"]
        built["diff"] = {
            "keys": [list(one) for one in changes.keys],
            "seconds": changes.seconds,
            "bytes": changes.bytes,
        }
    if with_front:
        plans = found.front()
        text.append("")
        for one in plans:
            line = f"{one.memory / 1e9:6.1f} GB  {one.time:.4g} s  {one.words}"
            text += wrap(line, WIDTH, subsequent_indent=" " * 12, break_on_hyphens=False)
        built["front"] = [one.as_dict() for one in plans]
    return {**built, "text": "\n".join(text)}
