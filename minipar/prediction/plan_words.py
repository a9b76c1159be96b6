"""Plans in words, or as objects, and the same plans as the numbers that formulas read.

    table_of("tp=8 pp=8 micro_batch_size=1 checkpoint=1")     the keys and their values
    numbers_of(table, model, machine, batch)                  PlanNumbers
    words(numbers)                                            the words again
    check(numbers, model, machine)                            an error for what cannot be, on any device

`micro_batch_size=b` may stand for `microbatches=m`. `gradients=` (float32 or bf16) says in what whole gradients are
summed; without it the stack does. Without precision= it is what the hardware is made for: bf16, or float32 on a laptop
and for models that minipar builds. `prefetch`, `clip` and `algorithm` change nothing in an estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

from minipar.costs.analytic import layer_costs
from minipar.costs.hardware import MOST_DEVICES, Hardware
from minipar.costs.stacks import STACKS
from minipar.errors import PlanError
from minipar.models.sizes import Chain, Sizes, Transformer, ends_are_layers
from minipar.prediction.closed_form import closed_form
from minipar.prediction.plan_numbers import FLOAT, PRECISIONS, PlanNumbers, own_layers, placement_of, split_of
from minipar.prediction.rank_memory import in_flight, pipeline
from minipar.prediction.replica import actions, by_simulation
from minipar.program.rows import MOST_ROWS
from minipar.strategies import exclusions, keys, segments
from minipar.strategies.layout import check_split, even_split
from minipar.strategies.plan import Plan
from minipar.strategies.schedules.registry import find
from minipar.wording import did_you_mean, several

ROWS, GRADIENTS = "micro_batch_size", "gradients"
# Keys that change an estimate, keys that do not, and the only value that an estimate knows of the others.
_READ = (
    "dp", "pp", "tp", "context_parallel", "ep", "schedule", "chunks", "group", "slices", "doubling", "microbatches",
    "accumulate", "split", "zero", "reduce", "checkpoint", "sequence_parallel", "overlap", "offload", "precision",
    "in_flight", "update_every", "batch_copies", "bucket",
)  # fmt: skip
_FREE = ("prefetch", "clip", "algorithm", "offload_to", "offload_folder", "offload_limit", "on_death")
_OWN: dict[str, Callable[[str, Any], Any]] = {  # keys that a plan to run does not have
    ROWS: partial(keys.whole_number, most=MOST_ROWS),
    GRADIENTS: keys.one_of("float32", "bf16").read,
}
_OPTIONS = ("group", "doubling", "in_flight", "update_every")  # of schedules, which their formulas do not know


def table_of(plan: str | Mapping[str, Any] | Plan) -> dict[str, Any]:
    """The keys that a plan gives, with their values. Errors: PlanError for an unknown key or value."""
    if isinstance(plan, Plan):
        every = {f.name: (getattr(plan, f.name), f.default) for f in fields(Plan)}
        given = {key: value for key, (value, usual) in every.items() if value != usual or key == "precision"}
    elif isinstance(plan, (str, Mapping)):
        given = {**(keys.words(plan) if isinstance(plan, str) else plan)}
    else:
        raise PlanError(f"plan {plan!r}: must be a Plan, words such as 'pp=2 dp=2', or a table of these keys")
    known = {f.name: f for f in fields(Plan)}
    keys.check_keys(given, [*known, *_OWN])
    found: dict[str, Any] = {}
    for key, value in given.items():
        keys.check_size(key, value)
        read = _OWN[key] if key in _OWN else known[key].metadata["key"].domain.read
        found[key] = value if key == "precision" and value in PRECISIONS else read(key, value)
        if key not in (*_READ, *_FREE, *_OWN) and found[key] != known[key].default:
            raise PlanError(f"{key}={value}: estimates have no formula for it; possible is a plan without {key}=")
    return found


def numbers_of(
    table: Mapping[str, Any],
    model: Sizes,
    machine: Hardware | None = None,
    batch: int | None = None,
    stack: str | None = None,
) -> PlanNumbers:
    """A plan's table (`table_of`) as numbers.

    machine   what fills in dp= and precision=, and decides split=auto; None: the plan's own defaults
    stack     the software, a key of STACKS; None: the one that fits the plan
    Errors: PlanError for a batch that cannot be divided so, and for a split of another number of layers.
    """
    get = table.get
    pp, tp, cp, ep = (int(get(key, 1)) for key in ("pp", "tp", "context_parallel", "ep"))
    devices = machine.nodes * machine.per_node if machine else 1
    dp = int(get("dp", 0)) or max(1, devices // (pp * tp * cp * ep))
    if dp * pp * tp * cp * ep > MOST_DEVICES:
        axes = f"dp={dp} pp={pp} tp={tp} context_parallel={cp} ep={ep}"
        raise PlanError(f"{axes}: the plan needs more than {MOST_DEVICES} devices; possible are smaller numbers")
    schedule = find(get("schedule", "1f1b"))
    schedule.check("chunks", get("chunks"))
    chunks = get("chunks") or schedule.chunks
    if "slices" in schedule.options:
        cut = get("slices") or pp
        chunks = cut if isinstance(cut, int) else len(cut)
    count, rows = _microbatches(table, dp, batch)
    precision = get("precision") or default_precision(model, machine)
    if stack and stack not in STACKS:
        raise PlanError(f"stack={stack}: no such software; there are {', '.join(STACKS)}{did_you_mean(stack, STACKS)}")
    choice = get("checkpoint", "none")
    checkpoint = 0 if choice == "none" else choice
    rounds = get("accumulate", 1) if "microbatches" in table else 1
    bucket, gradient = get("bucket"), {"bf16": 2, "float32": FLOAT}.get(get(GRADIENTS, ""), own_gradient(model))
    numbers = PlanNumbers(
        dp, pp, tp, cp, ep, schedule.name, chunks, count, rows, get("zero", 0), checkpoint,
        get("sequence_parallel", False), get("overlap", "backward") != "none",
        get("reduce", "microbatch") == "microbatch",
        tuple(get("offload", ())), precision, (), stack or "", gradient, rounds,
        None if bucket == "auto" else bucket,
        tuple((key, table[key]) for key in _OPTIONS if table.get(key) not in (None, False)),
    )  # fmt: skip
    segments.check_layers(numbers.checkpoint, own_layers(model))
    split = get("split")
    if split == "auto":
        split_of(numbers, model)  # (it refuses more stages than layers)
        return numbers._replace(split=_fastest_split(numbers, model, machine))
    if isinstance(split, (str, tuple, list)) and split != "even":
        placement = placement_of(numbers)
        counts = keys.split(split, 1 + max(map(max, placement)), pp, len(placement[0]))
        assert isinstance(counts, tuple)
        check_split(counts, own_layers(model))
        return numbers._replace(split=counts)
    return numbers


def default_precision(model: Sizes, machine: Hardware | None = None) -> str:
    """What a plan trains in that does not say it: the models that minipar builds in float32, as it runs them."""
    built = isinstance(model, Transformer) and model.built
    return "float32" if built or (machine is not None and not machine.mixed) else "bf16"


def own_gradient(model: Sizes) -> int:
    """Bytes of a 16-bit parameter's whole gradient in minipar's own runs; 0 for models that it does not build."""
    return 2 * (isinstance(model, Transformer) and model.built)


def _microbatches(table: Mapping[str, Any], dp: int, batch: int | None) -> tuple[int, float]:
    """How many micro-batches a replica has, and how many rows each of them has."""
    rounds, rows = table.get("accumulate", 1), table.get(ROWS)
    count = table["microbatches"] * rounds if "microbatches" in table else None
    if batch is None:
        count = count or rounds
        if dp * count * (rows or 1) > MOST_ROWS:
            text = f"microbatches={count}" + (f" {ROWS}={rows}" if rows else "")
            raise PlanError(f"{text}: with dp={dp} a step has more than {MOST_ROWS} rows; possible are fewer of them")
        return count, float(rows or 1)
    batch = keys.whole_number("batch", batch, most=MOST_ROWS)
    parts = dp * (rows or count or rounds)
    each, rest = divmod(batch, parts)
    if rest or not each:
        what = f"{ROWS}={rows}" if rows else several(parts // dp, "equal micro-batch")
        possible = f"are batch={each * parts} or {(each + 1) * parts}" if each else f"is batch={parts}"
        raise PlanError(f"batch={batch}: no multiple of dp={dp} x {what}; possible {possible}")
    if not rows:
        return parts // dp, float(each)
    if count not in (None, each):
        raise PlanError(f"microbatches={count}: batch={batch} dp={dp} {ROWS}={rows} make {each}; give one of them")
    return each, float(rows)


def words(numbers: PlanNumbers) -> str:
    """The plan in the words that `estimate` reads, without those that say what is so anyway."""
    n, options = numbers, find(numbers.schedule).options
    bucket = "" if n.bucket is None else segments.text(n.bucket)  # type: ignore[arg-type]
    ordered = [("schedule", n.schedule, ""), *((key, n.chunks, 0) for key in ("chunks", "slices") if key in options)]
    ordered += [*((key, value, None) for key, value in n.options), ("split", ",".join(map(str, n.split)), "")]
    found: list[tuple[str, Any, Any]] = [
        ("dp", n.dp, 0), ("pp", n.pp, 0), ("tp", n.tp, 1), ("context_parallel", n.cp, 1), ("ep", n.ep, 1),
        ("sequence_parallel", n.sequence_parallel, False), *(ordered if n.pp > 1 else ()),
        ("microbatches", n.microbatches // n.rounds, 0), ("accumulate", n.rounds, 1), (ROWS, f"{n.rows:g}", ""),
        ("zero", n.zero, 0), ("checkpoint", segments.text(n.checkpoint), "0"), ("overlap", n.overlap or "none", True),
        ("reduce", n.every or n.zero < 2 or "step", True), ("bucket", bucket, ""), ("offload", ",".join(n.offload), ""),
        ("precision", n.precision, ""),
        (GRADIENTS, "float32" if n.gradient == FLOAT else "", ""),
    ]  # fmt: skip
    return " ".join(
        f"{key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value, usual in found if value != usual
    )  # fmt: skip


# what can be ----------------------------------------------------------------------------------------------------------


def check(numbers: PlanNumbers, model: Sizes, machine: Hardware | None = None) -> None:
    """Refuse a plan that cannot be on any device. Errors: PlanError, which says what is possible."""
    n = numbers
    devices = machine.nodes * machine.per_node if machine else 0
    if machine and devices and n.ranks != devices:
        dp, left = divmod(devices, n.ranks // n.dp)
        nodes, rest = divmod(n.ranks, machine.per_node)
        others = f"tp, pp, context_parallel and ep that divide {devices} together"
        raise PlanError(
            f"plan {words(n)}: needs {several(n.ranks, 'device')}, but {several(machine.nodes, 'node')} of "
            f"{machine.per_node} are {devices}; possible is "
            + (f"dp={dp}" if not left else f"nodes={nodes}" if not rest else others)
        )
    if isinstance(model, Chain):
        for key, size in (("tp", n.tp), ("context_parallel", n.cp), ("ep", n.ep)):
            if size > 1:
                raise PlanError(
                    f"{key}={size}: formulas divide transformers, and {model.name or 'this model'} is a chain of "
                    f"layers without heads; possible are {key}=1, or the numbers of a transformer of its size, such as "
                    "'llama layers=32 hidden=4096 heads=32 sequence=4096 vocabulary=32000'"
                )
    else:
        divides("tp", n.tp, model.heads, f"{model.heads} heads")
        if "slices" in find(n.schedule).options and n.chunks > model.sequence:
            raise PlanError(f"slices={n.chunks}: more than the {model.sequence} tokens of a row; possible are fewer")
        divides("context_parallel", n.cp, model.sequence, f"{model.sequence} tokens of a row")
        if n.ep > 1 and not model.experts:
            raise PlanError(f"ep={n.ep}: {model.name or 'the model'} has no experts; possible is ep=1")
        divides("ep", n.ep, model.experts, f"{model.experts} experts")
    if n.sequence_parallel and n.tp == 1:
        raise PlanError("sequence_parallel=true: is of ranks that share layers; possible is tp=2")
    split_of(n, model)
    in_flight(pipeline(n), 0)  # (a schedule's generator refuses what it cannot order)


def divides(key: str, size: int, whole: int, what: str) -> None:
    """Refuse ranks that cannot have equal parts. Errors: PlanError, which says how many can."""
    if whole % size:
        possible = ", ".join(str(k) for k in range(1, min(whole, MOST_DEVICES) + 1) if whole % k == 0)
        raise PlanError(f"{key}={size}: must divide {what}; possible are {possible}")


def refusal(table: Mapping[str, Any], numbers: PlanNumbers) -> str:
    """Why minipar cannot run a plan; "": it can."""
    if numbers.precision in ("fp8", "mxfp8", "nvfp4"):
        return f"precision={numbers.precision}: has no operators of torch's own here; possible are float32 and bf16"
    given = {key: value for key, value in table.items() if key not in (ROWS, GRADIENTS)}
    given |= {"dp": numbers.dp, "microbatches": numbers.microbatches}
    given.pop("accumulate", None)
    try:
        exclusions.check(Plan(**given), compiled=True)
    except PlanError as error:
        return error.reason
    return ""


def _fastest_split(numbers: PlanNumbers, model: Sizes, machine: Hardware | None) -> tuple[int, ...]:
    """The layers of each stage with which a step takes least time. Without a machine it is the best split for gpipe, by
    the layers' operations. Errors: PlanError for more stages than layers."""
    from minipar.costs.partition import partition  # (it needs NumPy)
    from minipar.strategies.splitting import fastest

    n = numbers
    costs = layer_costs(model, n.rows / n.ep, n.bytes.activation, division=n.division)
    work = [a + b for a, b in zip(costs.forward, costs.backward, strict=True)]
    if n.checkpoint and n.checkpoint not in segments.INSIDE:  # (a budget may run fewer layers again)
        for layer in range(len(work)) if ends_are_layers(model) else range(1, len(work) - 1):
            work[layer] += costs.forward[layer]
    equal = even_split(own_layers(model), len(split_of(n, model)))
    usual = partition(work, len(equal), n.microbatches // n.rounds).split
    if machine is None:
        return usual

    def time_of(split: tuple[int, ...]) -> float:
        chosen = n._replace(split=split)
        return closed_form(chosen, model, machine, by_simulation(chosen)).time

    return fastest([equal, usual], time_of, actions(n))
