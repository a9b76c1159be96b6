"""Predictions beside published numbers, row by row: `minipar validate`.

    exact       parameters, operations, ZeRO's table 1, memory of activations: formulas against formulas
    calibrated  seconds and TFLOP/s that were measured on A100s. Four constants of `Efficiency` were fitted on four of
                the rows (benchmarks/fit_efficiency.py); these are marked, and no average counts them
    ranking     which of several plans is faster

Sources: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021
(tables 1 and 2, figures 12 and 13); Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models", 2022 (tables 4 and 5, figure 1); Rajbhandari et al., "ZeRO", 2020 (table 1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

from minipar.costs.analytic import Division, layer_costs
from minipar.costs.hardware import PRESETS, Hardware
from minipar.models.sizes import MODELS, Transformer
from minipar.prediction.closed_form import Cost, block_work, closed_form
from minipar.prediction.plan_numbers import PlanNumbers, Precision
from minipar.prediction.rank_memory import states
from minipar.strategies.schedules.registry import find

A100 = PRESETS["a100-80gb"]
MEGATRON = Precision(2, 4, 12, 2)  # its gradients are in float32: 18 bytes a parameter
LIMITS = {"exact": (0.005, 0.005), "calibrated": (0.08, 0.15)}  # mean and worst error


class Narayanan(NamedTuple):
    """A row of table 1: t, p, d; rows of a step and of a micro-batch; chunks; TFLOP/s of each of n GPUs."""

    model: str
    tp: int
    pp: int
    dp: int
    batch: int
    rows: int
    chunks: int
    tflops: float
    billions: float


TABLE_1 = (
    Narayanan("megatron-1.7b", 1, 1, 32, 512, 16, 1, 137, 1.7),
    Narayanan("megatron-3.6b", 2, 1, 32, 512, 16, 1, 138, 3.6),
    Narayanan("megatron-7.5b", 4, 1, 32, 512, 16, 1, 142, 7.5),
    Narayanan("megatron-18b", 8, 1, 32, 1024, 8, 1, 135, 18.4),
    Narayanan("megatron-39b", 8, 2, 32, 1536, 4, 1, 138, 39.1),
    Narayanan("megatron-76b", 8, 4, 32, 1792, 2, 3, 140, 76.1),
    Narayanan("megatron-145b", 8, 8, 24, 2304, 2, 2, 148, 145.6),
    Narayanan("megatron-310b", 8, 16, 15, 2160, 1, 2, 155, 310.1),
    Narayanan("megatron-530b", 8, 35, 9, 2520, 1, 3, 163, 529.6),
    Narayanan("megatron-1t", 8, 64, 6, 3072, 1, 1, 163, 1008.0),
)
FITTED = ("megatron-1.7b", "megatron-18b", "megatron-310b")  # rows of table 1: Efficiency.matmul, half, near


class Korthikanti(NamedTuple):
    """A row of tables 3 and 5 and figure 1: p, chunks, rows of a step and of a micro-batch; seconds with full
    recomputation, and with sequence parallelism and selective recomputation; MFU of the latter; GiB of the first rank:
    states, activations with tp only, activations of the latter plan. (The paper's HFU is not here: it counts an
    attention core that runs again three times.)"""

    model: str
    pp: int
    chunks: int
    batch: int
    rows: int
    full: float
    selective: float
    mfu: float
    states: float
    none: float
    kept: float


TABLE_5 = (
    Korthikanti("korthikanti-22b", 1, 1, 4, 4, 1.42, 1.10, 0.415, 45.5625, 59.25, 9.5625),
    Korthikanti("korthikanti-175b", 8, 3, 64, 1, 18.13, 13.75, 0.514, 45.5625, 66.84375, 12.3515625),
    Korthikanti("korthikanti-530b", 35, 3, 280, 1, 49.05, 37.83, 0.560, 31.640625, 114.0234375, 23.076171875),
    Korthikanti("korthikanti-1t", 64, 1, 512, 1, 94.42, 71.49, 0.563, 32.958984375, 131.25, 26.5625),
)
TABLE_4 = (  # one layer of the 22B model: milliseconds forward and backward
    ("no recomputation", 0, False, 7.7, 11.9),
    ("sequence parallel", 0, True, 7.2, 11.8),
    ("full recomputation", 1, False, 7.7, 19.5),
    ("selective", "selective", False, 7.7, 13.2),
    ("selective, sequence parallel", "selective", True, 7.2, 13.1),
)


class Table2(NamedTuple):
    """A row of Narayanan's table 2: t and p (1 for ZeRO-3), rows of a step, GPUs, rows of a micro-batch, TFLOP/s."""

    model: str
    tp: int
    pp: int
    batch: int
    gpus: int
    rows: int
    tflops: float


TABLE_2 = (
    Table2("gpt3-175b", 1, 1, 1536, 384, 4, 144),
    Table2("gpt3-175b", 1, 1, 1536, 768, 2, 88),
    Table2("gpt3-175b", 1, 1, 1536, 1536, 1, 44),
    Table2("megatron-530b", 1, 1, 2560, 640, 4, 138),
    Table2("megatron-530b", 1, 1, 2240, 1120, 2, 98),
    Table2("megatron-530b", 1, 1, 2240, 2240, 1, 48),
    Table2("gpt3-175b", 8, 12, 1536, 384, 1, 153),
    Table2("gpt3-175b", 8, 12, 1536, 768, 1, 149),
    Table2("gpt3-175b", 8, 12, 1536, 1536, 1, 141),
    Table2("megatron-530b", 8, 35, 2240, 560, 1, 171),
    Table2("megatron-530b", 8, 35, 2240, 1120, 1, 167),
    Table2("megatron-530b", 8, 35, 2240, 2240, 1, 159),
)
FITTED_ZERO = ("gpt3-175b", 384)  # the row of table 2 with ZeRO-3: Efficiency.beside

ZERO_RANKS = (1, 4, 16, 64, 256, 1024)
ZERO_TABLE = {  # GB of model states: for each model, and each number of ranks, stages 1, 2 and 3
    7.5e9: ((120, 120, 120), (52.5, 41.3, 30), (35.6, 21.6, 7.5), (31.4, 16.6, 1.88), (30.4, 15.4, 0.47),
            (30.1, 15.1, 0.12)),
    128e9: ((2048, 2048, 2048), (896, 704, 512), (608, 368, 128), (536, 284, 32), (518, 263, 8), (513, 257, 2)),
    1e12: ((16000, 16000, 16000), (7000, 5500, 4000), (4750, 2875, 1000), (4187, 2218, 250), (4046, 2054, 62.5),
           (4011, 2013, 15.6)),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One comparison.

    tier        "exact", "calibrated" or "ranking"
    table       where the number was published
    what        the case, and what was measured of it
    unit        of both numbers
    published, predicted   the two numbers
    digit       half of the last digit that was printed: an exact prediction may differ by so much
    fitted      whether constants were fitted on this row
    """

    tier: str
    table: str
    what: str
    unit: str
    published: float
    predicted: float
    digit: float = 0.0
    fitted: bool = False

    @property
    def error(self) -> float:
        """The prediction's relative error; positive if it is too large. What rounding explains is no error."""
        away = self.predicted - self.published
        away = max(0.0, abs(away) - self.digit * (1 + 1e-9)) * (1 if away > 0 else -1)
        return away / self.published


@dataclass(frozen=True)
class Claim:
    """A ranking: what should be so, the numbers that show it, and whether the predictions agree."""

    what: str
    numbers: str
    holds: bool


# exact ----------------------------------------------------------------------------------------------------------------


def exact() -> Iterator[Row]:
    """Rows that formulas must give to the printed digit."""
    for row in TABLE_1:
        model = _transformer(row.model)
        yield Row("exact", "Narayanan table 1", f"{row.model} parameters", "10^9", row.billions,
                  model.parameters / 1e9, 0.05)  # fmt: skip
    for row in TABLE_1:
        model, s = _transformer(row.model), 2048
        h, layers, v = model.hidden, model.layers, model.vocabulary
        formula = 96 * row.batch * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
        flops = closed_form(megatron(row), model, A100).flops
        yield Row("exact", "Narayanan equation 3", f"{row.model} operations", "10^18", formula / 1e18, flops / 1e18)
    for found in TABLE_5:
        model = _transformer(found.model)
        cost = closed_form(selective(found), model, A100)
        devices = 312e12 * 8 * found.pp * found.selective
        yield Row("exact", "Korthikanti table 5", f"{found.model} MFU at the published time", "%", 100 * found.mfu,
                  100 * cost.model_flops / devices, 0.05 + 0.5 * found.mfu / found.selective)  # fmt: skip
    for size, table in ZERO_TABLE.items():
        for ranks, line in zip(ZERO_RANKS, table, strict=True):
            for zero, gigabytes in enumerate(line, 1):
                held = states(int(size), ranks, zero).total / 1e9
                what = f"{size / 1e9:g}B, {ranks} ranks, stage {zero}"
                yield Row("exact", "ZeRO table 1", what, "GB", gigabytes, held, _digit(gigabytes))
    for found in TABLE_5:
        block, first = _first_rank(found, 0, False), _first_rank(found, "selective", True)
        parts = (_matrices(found), block, first)
        names = ("states", "activations, tp only", "activations, selective and sequence parallel")
        for what, published, size in zip(names, (found.states, found.none, found.kept), parts, strict=True):
            yield Row("exact", "Korthikanti figure 1", f"{found.model} {what}", "GiB", published, size / 2**30)


def _digit(number: float) -> float:
    """Half of the last digit of a number, or all of it where the paper cut digits off."""
    places = len(f"{number:g}".partition(".")[2])
    return float(10.0**-places)


def _transformer(name: str) -> Transformer:
    model = MODELS[name]
    assert isinstance(model, Transformer)
    return model


def _first_rank(row: Korthikanti, checkpoint: int | str, sequence: bool) -> float:
    """Bytes of activations of the first rank's blocks."""
    form = find("interleaved" if row.chunks > 1 else "1f1b").form
    assert form is not None
    blocks = _transformer(row.model).layers // row.pp
    costs = layer_costs(row.model, row.rows, 2, selective=checkpoint == "selective", division=Division(8, sequence))
    kept = form.in_flight(row.pp, row.batch // row.rows, row.chunks, 0)
    return kept * blocks * (costs.output[0] + costs.saved[1])


def _matrices(row: Korthikanti) -> float:
    """Bytes of model states of a rank's matrices: 18 bytes for each of 12 h^2 l / (t p) parameters."""
    model = _transformer(row.model)
    return states(12 * model.layers * model.hidden**2 // (8 * row.pp), 1, 0, MEGATRON).total


# calibrated -----------------------------------------------------------------------------------------------------------


def megatron(row: Narayanan) -> PlanNumbers:
    """The plan of a row of table 1: full recomputation, sums of gradients after the backward, kernels of 2021."""
    return PlanNumbers(
        dp=row.dp, pp=row.pp, tp=row.tp, schedule="interleaved" if row.chunks > 1 else "1f1b", chunks=row.chunks,
        microbatches=row.batch // row.dp // row.rows, rows=row.rows, checkpoint=1, overlap=False, fused=False,
    )  # fmt: skip


def full(row: Korthikanti) -> PlanNumbers:
    """The plan of table 5's first column: full recomputation."""
    return PlanNumbers(
        pp=row.pp, tp=8, schedule="interleaved" if row.chunks > 1 else "1f1b", chunks=row.chunks,
        microbatches=row.batch // row.rows, rows=row.rows, checkpoint=1,
    )  # fmt: skip


def selective(row: Korthikanti) -> PlanNumbers:
    """The plan of table 5's second column."""
    return full(row)._replace(checkpoint="selective", sequence_parallel=True)


def table_2(row: Table2) -> PlanNumbers:
    """The plan of a row of table 2: ZeRO-3 alone, or tensor and pipeline parallelism as in table 1."""
    dp = row.gpus // row.tp // row.pp
    given: dict[str, Any] = {"rows": row.rows, "microbatches": row.batch // dp // row.rows, "checkpoint": 1}
    if row.pp == 1:
        return PlanNumbers(dp=dp, zero=3, **given)
    return PlanNumbers(dp=dp, pp=row.pp, tp=row.tp, overlap=False, fused=False, **given)


def tflops(numbers: PlanNumbers, model: str, machine: Hardware = A100) -> float:
    """TFLOP/s of each GPU, with what runs again, as Narayanan counts them."""
    cost: Cost = closed_form(numbers, MODELS[model], machine)
    return cost.flops / cost.time / numbers.ranks / 1e12


def calibrated(machine: Hardware = A100) -> Iterator[Row]:
    """Rows that were measured."""
    for row in TABLE_1:
        yield Row("calibrated", "Narayanan table 1", row.model, "TFLOP/s", row.tflops,
                  tflops(megatron(row), row.model, machine), fitted=row.model in FITTED)  # fmt: skip
    for found in TABLE_5:
        for what, plan, published in (("full", full(found), found.full),
                                      ("selective, sequence parallel", selective(found), found.selective)):  # fmt: skip
            yield Row("calibrated", "Korthikanti table 5", f"{found.model} {what}", "s", published,
                      closed_form(plan, MODELS[found.model], machine).time)  # fmt: skip


def further(machine: Hardware = A100) -> Iterator[Row]:
    """Measured rows that no limit is set for: one layer's times, and table 2."""
    for what, checkpoint, sequence, forward, backward in TABLE_4:
        work = block_work(_transformer("korthikanti-22b"), machine, 2, 4, 8, 1, 1, sequence)
        there = work.matrix + work.memory + work.sent
        back = sum(work.back) + work.sent_back - machine.efficiency.beside * min(work.sent_back, work.inner)
        back += {0: 0.0, 1: work.matrix + work.memory + work.again, "selective": work.core}[checkpoint]
        yield Row("further", "Korthikanti table 4", f"forward, {what}", "ms", forward, 1e3 * there)
        yield Row("further", "Korthikanti table 4", f"backward, {what}", "ms", backward, 1e3 * back)
    for row in TABLE_2:
        way = "ZeRO-3" if row.pp == 1 else "PTD-P"
        yield Row("further", "Narayanan table 2", f"{row.model} {way}, {row.gpus} GPUs", "TFLOP/s", row.tflops,
                  tflops(table_2(row), row.model, machine),
                  fitted=row.pp == 1 and (row.model, row.gpus) == FITTED_ZERO)  # fmt: skip


# ranking --------------------------------------------------------------------------------------------------------------


def ranking(machine: Hardware = A100) -> Iterator[Claim]:
    """Which plan is faster, as the papers have it."""
    for name in ("gpt3-175b", "megatron-530b"):
        without_pipeline = [row for row in TABLE_2 if row.model == name and row.pp == 1]
        piped = [row for row in TABLE_2 if row.model == name and row.pp > 1]
        predicted, published = [], []
        for zero, ptd in zip(without_pipeline, piped, strict=True):
            predicted.append(tflops(table_2(ptd), name, machine) / tflops(table_2(zero), name, machine))
            published.append(ptd.tflops / zero.tflops)
        rising = all(a < b for a, b in pairwise(predicted))
        yield Claim(
            f"{name}: tensor and pipeline parallelism beat ZeRO-3, by more the more GPUs (Narayanan table 2)",
            f"{_listed(predicted)} times as fast; published {_listed(published)}",
            predicted[0] > 1 and rising,
        )
    model = replace(_transformer("megatron-530b"), layers=32, heads=128, name="162b")
    for batch in (32, 128):
        found = {}
        for tp in (2, 4, 8, 16, 32):
            numbers = PlanNumbers(pp=64 // tp, tp=tp, microbatches=batch, checkpoint=1, overlap=False, fused=False)
            found[tp] = closed_form(numbers, model, machine)
        rates = {tp: cost.flops / cost.time / 64 / 1e12 for tp, cost in found.items()}
        yield Claim(
            f"162B on 64 GPUs, {batch} rows: tp of the 8 GPUs of a node is best (Narayanan figure 13)",
            ", ".join(f"tp={tp}: {rate:.0f}" for tp, rate in rates.items()) + " TFLOP/s",
            max(rates, key=rates.__getitem__) == 8,
        )
    gains = []
    for batch in (12, 24, 48, 60):
        plain = PlanNumbers(pp=12, tp=8, microbatches=batch, checkpoint=1, overlap=False, fused=False)
        woven = plain._replace(schedule="interleaved", chunks=2)
        gains.append(tflops(woven, "gpt3-175b", machine) / tflops(plain, "gpt3-175b", machine))
    yield Claim(
        "175B on 96 GPUs, 12, 24, 48, 60 rows: interleaving helps, and less the larger the batch (Narayanan figure 12)",
        f"{_listed(gains)} times as fast",
        gains[0] > 1.05 and all(a > b for a, b in pairwise(gains)),
    )


def _listed(numbers: list[float]) -> str:
    return ", ".join(f"{number:.2f}" for number in numbers)


# the report -----------------------------------------------------------------------------------------------------------


def report() -> dict[str, Any]:
    """All rows, with means and worst errors of those on which nothing was fitted."""
    rows = [*exact(), *calibrated(), *further()]
    tiers: dict[str, Any] = {}
    for tier in ("exact", "calibrated", "further"):
        errors = [abs(row.error) for row in rows if row.tier == tier and not row.fitted]
        tiers[tier] = {"rows": len(errors), "mean": sum(errors) / len(errors), "worst": max(errors)}
        if tier in LIMITS:
            mean, worst = LIMITS[tier]
            tiers[tier] |= {"allowed_mean": mean, "allowed_worst": worst}
            tiers[tier]["holds"] = tiers[tier]["mean"] <= mean and tiers[tier]["worst"] <= worst
    claims = [*ranking()]
    e = A100.efficiency
    return {
        "rows": [
            {"tier": row.tier, "table": row.table, "what": row.what, "unit": row.unit, "published": row.published,
             "predicted": row.predicted, "error": row.error, "fitted": row.fitted}
            for row in rows
        ],
        "ranking": [{"what": one.what, "numbers": one.numbers, "holds": one.holds} for one in claims],
        "tiers": tiers,
        "fitted": {
            "constants": {"matmul": e.matmul, "half": e.half, "near": e.near, "beside": e.beside},
            "rows": [f"Narayanan table 1: {name}" for name in FITTED]
            + [f"Narayanan table 2: ZeRO-3, {FITTED_ZERO[0]}, {FITTED_ZERO[1]} GPUs"],
        },
        "given": {"memory": e.memory, "far": e.far, "lanes": e.lanes, "kernel": e.kernel},
        "holds": all(tier.get("holds", True) for tier in tiers.values()) and all(one.holds for one in claims),
    }  # fmt: skip


def show(result: dict[str, Any]) -> str:
    """The report as Markdown tables, which docs/estimate.md holds."""
    titles = {
        "exact": "Exact: formulas", "calibrated": "Calibrated: measured on A100s",
        "further": "Further measurements, without a limit",
    }  # fmt: skip
    lines = []
    for tier, title in titles.items():
        found = result["tiers"][tier]
        lines += [f"### {title}", "", "| table | case | published | predicted | error |", "|---|---|---:|---:|---:|"]
        for row in result["rows"]:
            if row["tier"] == tier:
                mark = " (fitted)" if row["fitted"] else ""
                lines.append(
                    f"| {row['table']} | {row['what']}{mark} | {row['published']:.5g} {row['unit']} | "
                    f"{row['predicted']:.5g} {row['unit']} | {_percent(row['error'])} |"
                )
        words = f"{found['rows']} rows on which nothing was fitted: mean error {found['mean']:.1%}, "
        words += f"worst {found['worst']:.1%}"
        if "holds" in found:
            words += f" (allowed {found['allowed_mean']:.1%}, {found['allowed_worst']:.1%})"
        lines += ["", words + ".", ""]
    lines += ["### Ranking", "", "| claim | predicted | |", "|---|---|---|"]
    for one in result["ranking"]:
        lines.append(f"| {one['what']} | {one['numbers']} | {'holds' if one['holds'] else 'does not hold'} |")
    fitted = result["fitted"]
    constants = ", ".join(f"{key} {value:.4g}" for key, value in fitted["constants"].items())
    given = ", ".join(f"{key} {value:.4g}" for key, value in result["given"].items())
    count = len(fitted["constants"])
    lines += ["", f"{count} constants were fitted ({constants}) on {len(fitted['rows'])} rows:"]
    lines += [f"{'; '.join(fitted['rows'])}.", f"Given, not fitted: {given}."]
    return "\n".join(lines)


def _percent(error: float) -> str:
    return "0" if abs(error) < 0.0005 else f"{error:+.1%}"
