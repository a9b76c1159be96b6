"""Published measurements beside predictions: the rows of published.csv, and how far an estimate may be off.

    rows()                       all rows: a plan, a model, devices and a stack in the words of `minipar estimate`, and
                                 what was measured
    halves()                     the rows that the numbers of costs/stacks.py are fitted on, and the others
    like(numbers, model, ...)    how far rows like a plan are off: an error bar

A row with a reason (`why`) cannot be explained in these words, and counts nowhere. `ratio` is the prediction divided by
what was measured; benchmarks/fit_efficiency.py writes it.
"""

from __future__ import annotations

import csv
from functools import lru_cache
from hashlib import sha256
from itertools import groupby
from math import log
from pathlib import Path
from typing import NamedTuple

from minipar.costs.hardware import PRESETS, Hardware
from minipar.models.sizes import Sizes, Transformer, sizes
from minipar.prediction.plan_numbers import PlanNumbers
from minipar.prediction.plan_words import numbers_of, table_of

TABLE = Path(__file__).with_name("published.csv")
NEAR = 12  # rows that an error bar is taken from


class Published(NamedTuple):
    """A row. `gpu` may have words after the device's name; `batch` are rows of a step, which takes `seconds`;
    `memory_gib` is the fullest device's peak, 0 if it is not known."""

    id: str
    gpu: str
    stack: str
    plan: str
    model: str
    batch: int
    seconds: float
    memory_gib: float
    source: str
    why: str
    ratio: float

    @property
    def pair(self) -> tuple[str, str]:
        """Its device and its stack."""
        return self.gpu.split()[0], self.stack


@lru_cache(1)
def rows() -> tuple[Published, ...]:
    """All rows, in the order of the file."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        return tuple(
            Published(
                row["id"], row["gpu"], row["stack"], row["plan"], row["model"], int(row["batch"]),
                float(row["seconds"]), float(row["memory_gib"] or 0), row["source"], row["why"],
                float(row["ratio"] or 0),
            )
            for row in csv.DictReader(file)
        )  # fmt: skip


def halves() -> tuple[list[Published], list[Published]]:
    """Rows that numbers are fitted on, and those that are held out: of each device and stack every second one, in the
    order of the hashes of their names."""
    found: tuple[list[Published], list[Published]] = [], []
    counted = sorted((row for row in rows() if not row.why), key=lambda row: (row.pair, _hash(row.id)))
    for _, group in groupby(counted, key=lambda row: row.pair):
        for k, row in enumerate(group):
            found[k % 2].append(row)
    return found


def _hash(text: str) -> str:
    return sha256(text.encode()).hexdigest()


class Bar(NamedTuple):
    """How far an estimate may be off: the seconds of a step lie between, as far as `rows` rows show, which are off by
    `error` on the average. Without rows the seconds are unknown, and low and high are the estimate itself."""

    low: float
    high: float
    rows: int
    error: float

    def __str__(self) -> str:
        if not self.rows:
            return "no published row is like it, so nobody knows how far it is off"
        return f"{self.low:.4g} to {self.high:.4g} s; {self.rows} published rows like this: {self.error:.0%}"


def like(time: float, numbers: PlanNumbers, model: Sizes, machine: Hardware) -> Bar:
    """The error bar of an estimate of `time` seconds: from at most NEAR rows of its device and stack, those nearest in
    size, sequence, devices, precision and kind. One row in ten may be farther away, on either side."""
    if not isinstance(model, Transformer):
        return Bar(time, time, 0, 0.0)
    here = _place(numbers, model)
    kin = PRESETS.get(machine.like, machine)
    name = kin.name if kin.flops == machine.flops else machine.name  # (rows of a faster or slower device tell nothing)
    known = _places().get((name, numbers.software), ())
    near = sorted(known, key=lambda one: sum(abs(a - b) for a, b in zip(here, one[0], strict=True)))[:NEAR]
    if not near:
        return Bar(time, time, 0, 0.0)
    ratios = sorted(ratio for _, ratio in near)
    tenth = len(ratios) // 10
    error = sum(abs(ratio - 1) for ratio in ratios) / len(ratios)
    return Bar(time / max(1.0, ratios[-1 - tenth]), time / min(1.0, ratios[tenth]), len(ratios), error)


def _place(n: PlanNumbers, model: Transformer) -> tuple[float, ...]:
    exotic = 3.0 * (n.precision in ("fp8", "mxfp8", "nvfp4")), 3.0 * (model.experts > 0), 2.0 * (n.pp > 1)
    return log(model.parameters), log(model.sequence), log(n.ranks) / 2, *exotic


@lru_cache(1)
def _places() -> dict[tuple[str, str], list[tuple[tuple[float, ...], float]]]:
    found: dict[tuple[str, str], list[tuple[tuple[float, ...], float]]] = {}
    for row in rows():
        if row.ratio and not row.why:
            model = sizes(row.model)
            assert isinstance(model, Transformer)
            numbers = numbers_of(table_of(row.plan), model, None, row.batch, row.stack)
            found.setdefault(row.pair, []).append((_place(numbers, model), row.ratio))
    return found
