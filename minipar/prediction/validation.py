"""Predictions beside published numbers: `minipar validate`.

    measured    seconds of a step on 17 devices and stacks (published.csv): numbers are fitted on every second row, and
                the others are held out. Both halves are shown
    memory      published peaks
    exact       parameters, operations, ZeRO's table 1, memory of activations: formulas against formulas
    ranking     which of several plans is faster

Sources: those of published.csv; Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", SC 2021 (table 1, figures 12 and 13); Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models", 2022 (tables 3 and 5, figure 1); Rajbhandari et al., "ZeRO", 2020 (table 1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any, NamedTuple

from minipar.costs.analytic import Division, layer_costs
from minipar.costs.hardware import PRESETS, Hardware
from minipar.models.sizes import MODELS, Transformer
from minipar.prediction.closed_form import Cost, closed_form
from minipar.prediction.estimating import estimate
from minipar.prediction.plan_numbers import PlanNumbers, Precision
from minipar.prediction.published import Published, halves, rows
from minipar.prediction.rank_memory import pipeline, states
from minipar.strategies import segments

A100 = PRESETS["a100-80gb"]
MEGATRON = Precision(2, 4, 12, 2)  # its gradients are in float32: 18 bytes a parameter
LIMITS = {"exact": (0.005, 0.005), "memory": (0.10, 0.25)}  # mean and worst error
MEAN, WORST, FEW = 0.10, 0.25, 5  # of seconds, in rows that were held out; fewer rows say little


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

    tier        "exact" or "memory"
    table       where the number was published
    what        the case, and what was measured of it
    unit        of both numbers
    published, predicted   the two numbers
    digit       half of the last digit that was printed: an exact prediction may differ by so much
    """

    tier: str
    table: str
    what: str
    unit: str
    published: float
    predicted: float
    digit: float = 0.0

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
        cost = closed_form(selective(found), replace(model, flash=False), A100)
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
    blocks = _transformer(row.model).layers // row.pp
    costs = layer_costs(row.model, row.rows, 2, selective=checkpoint == "selective", division=Division(8, sequence))
    numbers = selective(row)
    kept = segments.in_flight(pipeline(numbers).actions(0)) / row.chunks
    return kept * blocks * (costs.output[0] + costs.saved[1])


def _matrices(row: Korthikanti) -> float:
    """Bytes of model states of a rank's matrices: 18 bytes for each of 12 h^2 l / (t p) parameters."""
    model = _transformer(row.model)
    return states(12 * model.layers * model.hidden**2 // (8 * row.pp), 1, 0, MEGATRON).total


# the plans of the papers' rows ---------------------------------------------------------------------------------------


def megatron(row: Narayanan) -> PlanNumbers:
    """The plan of a row of table 1: full recomputation, sums of gradients after the backward, kernels of 2021."""
    return PlanNumbers(
        dp=row.dp, pp=row.pp, tp=row.tp, schedule="interleaved" if row.chunks > 1 else "1f1b", chunks=row.chunks,
        microbatches=row.batch // row.dp // row.rows, rows=row.rows, checkpoint=1, overlap=False,
        stack="megatron-2021",
    )  # fmt: skip


def selective(row: Korthikanti) -> PlanNumbers:
    """The plan of table 5's second column."""
    return PlanNumbers(
        pp=row.pp, tp=8, schedule="interleaved" if row.chunks > 1 else "1f1b", chunks=row.chunks,
        microbatches=row.batch // row.rows, rows=row.rows, checkpoint="selective", sequence_parallel=True,
    )  # fmt: skip


def tflops(numbers: PlanNumbers, model: str, machine: Hardware = A100) -> float:
    """TFLOP/s of each GPU, with what runs again, as Narayanan counts them."""
    cost: Cost = closed_form(numbers, MODELS[model], machine)
    return cost.flops / cost.time / numbers.ranks / 1e12


# measured -------------------------------------------------------------------------------------------------------------


class Measured(NamedTuple):
    """What predictions of a device and a stack are worth, in one half of its published rows.

    half            "fitted" or "held out"
    rows, mean, worst, ratio   how many rows; errors of their times; the median of predicted / published
    """

    gpu: str
    stack: str
    half: str
    rows: int
    mean: float
    worst: float
    ratio: float

    @property
    def holds(self) -> bool:
        """Whether it is as good as it has to be: in what was held out, where that is more than a few rows."""
        return self.half == "fitted" or self.rows < FEW or (self.mean <= MEAN and self.worst <= WORST)


def measured(predict: Callable[[Published], float] = lambda row: row.ratio) -> Iterator[Measured]:
    """All devices and stacks. `predict` gives predicted / published of a row; default: what published.csv has."""
    for name, half in zip(("fitted", "held out"), halves(), strict=True):
        for (gpu, stack), group in groupby(half, key=lambda row: row.pair):
            ratios = sorted(predict(row) for row in group)
            errors = [abs(ratio - 1) for ratio in ratios]
            yield Measured(
                gpu, stack, name, len(errors), sum(errors) / len(errors), max(errors), ratios[len(ratios) // 2]
            )


def memory() -> Iterator[Row]:
    """Published peaks of memory."""
    for row in rows():
        if row.memory_gib and not row.why:
            found = estimate(row.plan, row.model, row.gpu, row.batch, stack=row.stack)
            yield Row("memory", row.pair[0], f"{row.model}, {row.plan}", "GiB", row.memory_gib, found.memory / 2**30)


# ranking --------------------------------------------------------------------------------------------------------------


def ranking(machine: Hardware = A100) -> Iterator[Claim]:
    """Which plan is faster, as the papers have it."""
    for name in ("gpt3-175b", "megatron-530b"):
        found_2 = [row for row in rows() if row.id.startswith(f"narayanan-2-{name}")]
        zeros = [row for row in found_2 if "zero" in row.id]
        predicted, published = [], []
        for zero, ptd in zip(zeros, [row for row in found_2 if "ptd" in row.id], strict=True):
            published.append(zero.seconds / ptd.seconds * ptd.batch / zero.batch)
            predicted.append(published[-1] * zero.ratio / ptd.ratio)
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
            numbers = PlanNumbers(
                pp=64 // tp, tp=tp, microbatches=batch, checkpoint=1, overlap=False, stack="megatron-2021"
            )
            found[tp] = closed_form(numbers, model, machine)
        rates = {tp: cost.flops / cost.time / 64 / 1e12 for tp, cost in found.items()}
        yield Claim(
            f"162B on 64 GPUs, {batch} rows: tp of the 8 GPUs of a node is best (Narayanan figure 13)",
            ", ".join(f"tp={tp}: {rate:.0f}" for tp, rate in rates.items()) + " TFLOP/s",
            max(rates, key=rates.__getitem__) == 8,
        )
    gains = []
    for batch in (12, 24, 48, 60):
        plain = PlanNumbers(pp=12, tp=8, microbatches=batch, checkpoint=1, overlap=False, stack="megatron-2021")
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
    """Formulas beside formulas, and measurements: what was fitted, and what was held out."""
    known, peaks, claims = [*exact()], [*memory()], [*ranking()]
    pairs = [*measured()]
    tiers: dict[str, Any] = {}
    for tier, found in (("exact", known), ("memory", peaks)):
        errors = [abs(row.error) for row in found]
        mean, worst = LIMITS[tier]
        tiers[tier] = {"rows": len(errors), "mean": sum(errors) / len(errors), "worst": max(errors)}
        tiers[tier] |= {"allowed_mean": mean, "allowed_worst": worst, "holds": tiers[tier]["mean"] <= mean}
        tiers[tier]["holds"] &= tiers[tier]["worst"] <= worst
    return {
        "rows": [
            {"tier": row.tier, "table": row.table, "what": row.what, "unit": row.unit, "published": row.published,
             "predicted": row.predicted, "error": row.error}
            for row in (*known, *peaks)
        ],
        "measured": [{**pair._asdict(), "holds": pair.holds} for pair in pairs],
        "unexplained": [{"id": row.id, "why": row.why} for row in rows() if row.why],
        "ranking": [{"what": one.what, "numbers": one.numbers, "holds": one.holds} for one in claims],
        "tiers": tiers,
        "holds": all(tier["holds"] for tier in tiers.values()) and all(one.holds for one in claims)
        and all(pair.holds for pair in pairs),
    }  # fmt: skip


def show(result: dict[str, Any]) -> str:
    """The report as Markdown tables, which docs/estimate.md holds."""
    lines = [
        "### Measured: seconds of a step",
        "",
        "| device | stack | half | rows | mean error | worst | median ratio |",
    ]
    lines.append("|---|---|---|---:|---:|---:|---:|")
    for one in result["measured"]:
        lines.append(f"| {one['gpu']} | {one['stack']} | {one['half']} | {one['rows']} | {one['mean']:.1%} | "
                     f"{one['worst']:.1%} | {one['ratio']:.2f} |")  # fmt: skip
    lines += ["", f"Held out, a mean error of {MEAN:.0%} and a worst one of {WORST:.0%} are allowed.", ""]
    for tier, title in {"memory": "Memory: published peaks", "exact": "Exact: formulas"}.items():
        found = result["tiers"][tier]
        lines += [f"### {title}", "", "| table | case | published | predicted | error |", "|---|---|---:|---:|---:|"]
        for row in result["rows"]:
            if row["tier"] == tier:
                lines.append(
                    f"| {row['table']} | {row['what']} | {row['published']:.5g} {row['unit']} | "
                    f"{row['predicted']:.5g} {row['unit']} | {_percent(row['error'])} |"
                )
        words = f"{found['rows']} rows: mean error {found['mean']:.1%}, worst {found['worst']:.1%}"
        words += f" (allowed {found['allowed_mean']:.1%}, {found['allowed_worst']:.1%})"
        lines += ["", words + ".", ""]
    lines += ["### Ranking", "", "| claim | predicted | |", "|---|---|---|"]
    for one in result["ranking"]:
        lines.append(f"| {one['what']} | {one['numbers']} | {'holds' if one['holds'] else 'does not hold'} |")
    lines += ["", "### Rows that these words cannot explain", "", "| reason | rows |", "|---|---:|"]
    reasons = [row["why"] for row in result["unexplained"]]
    lines += [f"| {why} | {reasons.count(why)} |" for why in dict.fromkeys(reasons)]
    return "\n".join(lines)


def _percent(error: float) -> str:
    return "0" if abs(error) < 0.0005 else f"{error:+.1%}"
