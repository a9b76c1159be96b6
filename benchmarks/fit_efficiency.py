"""Fits the numbers of `minipar.costs.stacks.REACHED` on published rows: `python -m benchmarks.fit_efficiency`.

For each device and stack at most six numbers of `Efficiency`, on every second of its rows (`published.halves`), by
steps along one number after another. What is made small is the sum of the errors, not of their squares, so that a few
rows that are far away do not decide; a weak pull holds numbers that the rows say little about at the usual ones. With
--write, predictions of all rows go to published.csv, from which error bars are taken.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from math import exp, log

from minipar.costs.hardware import hardware
from minipar.costs.stacks import Efficiency
from minipar.models.sizes import Sizes, sizes
from minipar.prediction import published
from minipar.prediction.closed_form import closed_form
from minipar.prediction.estimating import estimate
from minipar.prediction.plan_numbers import PlanNumbers
from minipar.prediction.plan_words import numbers_of, table_of
from minipar.prediction.published import Published

USUAL = Efficiency()
LEAST, MOST = 0.1, 1.2  # of parts of a peak
PULL = 0.01
FEWEST = 3  # rows that tell something; a pair with less has the numbers of its nearest kin


def keys_of(stack: str, rows: Sequence[Published]) -> list[str]:
    """The numbers that rows of a stack can tell."""
    short = any("precision=" in row.plan for row in rows)
    mixed = any(getattr(sizes(row.model), "experts", 0) for row in rows)
    if stack == "megatron-2021" or all("flash=false" in row.model for row in rows[1:]):
        return ["matmul", "half", "memory", "near", "far", "beside"]
    if stack == "torch-fsdp" or not short:  # (rows of one length cannot tell attention from products)
        apart = len({getattr(sizes(row.model), "sequence", 0) for row in rows}) > 1
        return ["matmul", "half", "flash" if apart else "near", "memory", "beside", "routing" if mixed else "far"]
    return ["matmul", "flash", "narrow", "memory", "beside", "routing" if mixed else "near"]


@lru_cache(1024)
def _numbers(row: Published) -> tuple[PlanNumbers, Sizes]:
    model = sizes(row.model)
    return numbers_of(table_of(row.plan), model, hardware(row.gpu), row.batch, row.stack), model


def errors(rows: Sequence[Published], share: Efficiency) -> list[float]:
    """Logarithms of predicted / published seconds, by the schedules' formulas."""
    found = []
    for row in rows:
        numbers, model = _numbers(row)
        machine = replace(hardware(row.gpu), efficiency=share)
        found.append(log(closed_form(numbers, model, machine).time / row.seconds))
    return found


def fit(rows: Sequence[Published], keys: Sequence[str]) -> Efficiency:
    """The numbers of one device and stack."""
    point = [log(getattr(USUAL, key)) for key in keys]

    def share(at: Sequence[float]) -> Efficiency:
        given = {key: exp(x) for key, x in zip(keys, at, strict=True)}
        parts = [key for key in keys if key not in ("half", "routing")]
        given |= {key: min(MOST if key == "narrow" else 0.95, max(LEAST, given[key])) for key in parts}
        return replace(USUAL, **given)

    def cost(at: Sequence[float]) -> float:
        away = sum((x - log(getattr(USUAL, key))) ** 2 for key, x in zip(keys, at, strict=True))
        return sum((error**2 + 0.03**2) ** 0.5 for error in errors(rows, share(at))) + PULL * len(rows) * away

    best, step = cost(point), 0.4
    while step > 0.005:
        before = best
        for k in range(len(point)):
            for sign in (step, -step):
                moved = [x + sign * (j == k) for j, x in enumerate(point)]
                found = cost(moved)
                if found < best:
                    best, point = found, moved
                    break
        if best > before - 1e-4:
            step /= 2
    rounded = {key: float(f"{getattr(share(point), key):.3g}") for key in keys}
    return replace(USUAL, **rounded)


def write() -> None:
    """Predictions of all rows, as `minipar estimate` makes them, into published.csv."""
    with published.TABLE.open(newline="", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    for row, known in zip(table, published.rows(), strict=True):
        row["ratio"] = ""
        if not known.why:
            found = estimate(known.plan, known.model, known.gpu, known.batch, stack=known.stack)
            row["ratio"] = f"{found.time / known.seconds:.3f}"
    with published.TABLE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, table[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)


if __name__ == "__main__":
    if "--write" in sys.argv:
        write()
    else:
        for (gpu, stack), group in groupby(published.halves()[0], key=lambda row: row.pair):
            chosen = list(group)
            if len(chosen) < FEWEST:
                continue
            named = keys_of(stack, chosen)
            share = fit(chosen, named)
            print(f"    ({gpu!r}, {stack!r}): Efficiency({', '.join(f'{k}={getattr(share, k):g}' for k in named)}),")
