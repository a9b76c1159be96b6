"""What ranks must agree on, when a run is checked: each rank notes facts, and after a pass they are compared.

    ALIKE   every rank has the same bits: a message as sent and as received, parameters after their update
    NEAR    every rank has the same numbers, but for rounding: what ranks that share a layer compute alike
    SUM     what the ranks had before a collective is, all together, what they have after it
    ONE     the shares of all ranks add up to 1: those of micro-batches in the mean loss
    WRONG   the rank has found by itself that something is wrong, and says what

A fact is a few numbers, so that comparing costs little: a checksum, or a tensor's product with fixed random weights.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from minipar.program import Program, order
from minipar.wording import several

ALIKE, NEAR, SUM, ONE, WRONG = "alike", "near", "sum", "one", "wrong"


class Fact(NamedTuple):
    """What one rank has found.

    rule       ALIKE, NEAR, SUM, ONE or WRONG
    what       what is compared, in the same words on all ranks
    at         the index of the rank's instruction that made it; -1: it was there before the first one
    ranks      those that must have this fact; of a message, first the rank that sends it
    numbers    ALIKE: a checksum. NEAR: the product with the weights, the norm. ONE: a share. SUM: the product before
               and after, the square of the norm before, and whether the value is whole on each rank, before and after
    tolerance  of the difference, as a part of the norm
    """

    rule: str
    what: str
    at: int
    ranks: tuple[int, ...]
    numbers: tuple[float, ...]
    tolerance: float = 0.0


class Broken(NamedTuple):
    """A fact that does not hold: the rank and the index of its instruction where it first does not, and why."""

    rank: int
    at: int
    why: str


def pack(facts: Sequence[Fact]) -> bytes:
    """Facts as bytes, for another rank."""
    return json.dumps(facts).encode()


def unpack(data: bytes) -> list[Fact]:
    """The facts that `pack` wrote."""
    return [Fact(rule, what, index, tuple(ranks), tuple(numbers), near)
            for rule, what, index, ranks, numbers, near in json.loads(data)]  # fmt: skip


def first_broken(program: Program, of_ranks: Sequence[Sequence[Fact]]) -> Broken | None:
    """The first instruction, in an order in which the program can run, where some fact of all ranks does not hold."""
    return first_of(program, all_broken(of_ranks))


def all_broken(of_ranks: Sequence[Sequence[Fact]]) -> list[Broken]:
    """Every fact of all ranks that does not hold."""
    found: list[Broken] = []
    together: dict[tuple[str, str, tuple[int, ...]], dict[int, Fact]] = {}
    for rank, facts in enumerate(of_ranks):
        for fact in facts:
            if fact.rule == WRONG:
                found.append(Broken(rank, fact.at, fact.what))
            else:
                together.setdefault((fact.rule, fact.what, fact.ranks), {})[rank] = fact
    return found + [broken for some in together.values() if (broken := _compare(some)) is not None]


def first_of(program: Program, found: Sequence[Broken]) -> Broken | None:
    """The one of them whose instruction comes first, in an order in which the program can run."""
    if not found:
        return None
    place = {(rank, index): k for k, (rank, index, *_) in enumerate(order(program))}
    return min(found, key=lambda broken: place.get((broken.rank, broken.at), -1))


def _compare(some: Mapping[int, Fact]) -> Broken | None:
    """Whether one fact holds over its ranks."""
    first = next(iter(some.values()))
    if first.rule == ONE:
        total, last = sum(fact.numbers[0] for fact in some.values()), max(some)
        if abs(total - 1) <= first.tolerance:
            return None
        return Broken(last, some[last].at, f"{first.what} add up to {total:.6g} instead of 1")
    absent = sorted(set(first.ranks) - set(some))
    if absent:
        last = max(some)
        who = f"{'rank' if len(absent) == 1 else 'ranks'} {', '.join(map(str, absent))}"
        return Broken(last, some[last].at, f"{first.what}: {who} took no part in it")
    return {ALIKE: _alike, NEAR: _near, SUM: _sum}[first.rule](some)


def _alike(some: Mapping[int, Fact]) -> Broken | None:
    counts = Counter(fact.numbers for fact in some.values())
    if len(counts) == 1:
        return None
    ((usual, most), (_, next_most), *_) = counts.most_common()
    least = next(rank for rank in reversed(next(iter(some.values())).ranks) if rank in some)  # (of two, who received)
    others = [rank for rank, fact in some.items() if fact.numbers != usual] if most > next_most else [least]
    odd = others[0]
    like = next(rank for rank, fact in some.items() if fact.numbers != some[odd].numbers)
    return Broken(odd, some[odd].at, f"{some[odd].what} is not the same on rank {odd} as on rank {like}")


def _near(some: Mapping[int, Fact]) -> Broken | None:
    first = min(some)
    product, norm = some[first].numbers
    for rank, fact in some.items():
        if not abs(fact.numbers[0] - product) <= fact.tolerance * max(norm, fact.numbers[1]):
            return Broken(rank, fact.at, f"{fact.what} is not the same on rank {rank} as on rank {first}")
    return None


def _sum(some: Mapping[int, Fact]) -> Broken | None:
    ranks = sorted(some)
    allowed = max(fact.tolerance for fact in some.values()) * math.sqrt(sum(f.numbers[2] for f in some.values()))
    before = [some[rank].numbers[0] for rank in ranks]
    expected = before[0] if some[ranks[0]].numbers[3] else sum(before)
    if not some[ranks[0]].numbers[4]:
        total = sum(some[rank].numbers[1] for rank in ranks)
        wrong = [] if abs(total - expected) <= allowed else ranks[-1:]
    else:
        wrong = [rank for rank in ranks if not abs(some[rank].numbers[1] - expected) <= allowed]
        total = some[wrong[0]].numbers[1] if wrong else expected
    if not wrong:
        return None
    who = f"all {several(len(ranks), 'rank')}" if len(wrong) == len(ranks) > 1 else f"rank {wrong[0]}"
    told = f"{some[wrong[0]].what}: on {who} it is not what the ranks gave"
    return Broken(wrong[0], some[wrong[0]].at, f"{told} (weighed sum {total:.6g} instead of {expected:.6g})")
