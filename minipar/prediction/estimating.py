"""estimate(plan, model, devices): seconds and bytes of a training step, before anything is built or run.

    found = minipar.estimate("tp=8 pp=8 dp=16 micro_batch_size=1 checkpoint=1", "gpt3-175b", "a100-80gb", batch=1536)
    found.time, found.tflops_per_gpu, found.mfu, found.memory, found.breakdown
    print(found)

plan      as for `Plan`, but estimates know more than minipar can run: `found.note` says so. `micro_batch_size=b` may
          stand for `microbatches=m`. Without precision=, it is what the hardware is made for: bf16, or float32 on a
          laptop
model     a preset's name, words or a table of numbers, a dataclass (models/sizes.py), or a torch module (`chain_of`)
devices   a preset's name, words or a table of numbers, a dataclass (costs/hardware.py), or a calibration

The time is that of `closed_form`. A schedule without a formula is simulated: one replica with equal ranks, at 2p and 3p
micro-batches (p is the number of ranks), from which the time grows evenly. `bucket`, `prefetch`, `clip` and `algorithm`
change nothing in an estimate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import product
from math import ceil, sqrt
from typing import Any

from minipar.costs.hardware import MOST_DEVICES, Hardware, hardware
from minipar.costs.rates import Calibration
from minipar.errors import PlanError
from minipar.models.sizes import Chain, Sizes, Transformer, sizes
from minipar.models.table import GPT, Mixture
from minipar.prediction.closed_form import Cost, PlanNumbers, block_work, closed_form
from minipar.prediction.memory_formula import in_flight, versions_of
from minipar.prediction.simulator import simulate as simulated
from minipar.program.rows import MOST_ROWS
from minipar.strategies import keys, segments
from minipar.strategies.layout import place
from minipar.strategies.plan import Plan
from minipar.strategies.schedules.registry import ClosedForm, Times, find
from minipar.wording import several

ROWS = "micro_batch_size"
# Keys that change an estimate, keys that do not, and the only value that an estimate knows of the others.
_READ = (
    "dp", "pp", "tp", "context_parallel", "ep", "schedule", "chunks", "group", "slices", "doubling", "microbatches",
    "accumulate", "split", "zero", "reduce", "checkpoint", "sequence_parallel", "overlap", "offload", "precision",
    "in_flight", "update_every", "batch_copies",
)  # fmt: skip
_FREE = ("bucket", "prefetch", "clip", "algorithm", "offload_folder", "offload_limit", "on_death")


@dataclass(frozen=True)
class Estimate:
    """What a plan is expected to take.

    numbers   the plan as the formulas read it
    model, machine   as they read these
    cost      time and memory, with their parts
    note      why minipar itself cannot run this plan; "": it can
    """

    numbers: PlanNumbers
    model: Sizes
    machine: Hardware
    cost: Cost
    note: str = ""

    @property
    def time(self) -> float:
        """Seconds of a step."""
        return self.cost.time

    @property
    def memory(self) -> int:
        """Bytes on the fullest device."""
        return self.cost.memory

    @property
    def breakdown(self) -> dict[str, float]:
        """Seconds of a step by what they go to, on the slowest rank; they add up to `time`."""
        return self.cost.seconds

    @property
    def memory_breakdown(self) -> dict[str, int]:
        """Bytes on the fullest device by kind; they add up to `memory`."""
        return self.cost.bytes

    @property
    def tflops_per_gpu(self) -> float:
        """10^12 operations a second of each device, those that recomputation adds included."""
        return self.cost.flops / self.time / self.numbers.ranks / 1e12

    @property
    def mfu(self) -> float:
        """Operations of the model (without what runs again) a second, as a part of the peak."""
        peak = self.machine.flops if self.numbers.bytes.activation < 4 else self.machine.flops32
        return self.cost.model_flops / self.time / self.numbers.ranks / peak

    @property
    def fits(self) -> bool:
        """Whether the fullest device can hold it."""
        return self.memory <= self.machine.memory

    @property
    def plan(self) -> str:
        """The plan in words."""
        return words(self.numbers, 2 if isinstance(self.model, Transformer) else 0)

    def __repr__(self) -> str:
        return str(self)  # (what a notebook shows)

    def __str__(self) -> str:
        """A small table."""
        name = self.model.name or type(self.model).__name__
        rows = [
            f"{name} on {several(self.numbers.ranks, 'device')}, {self.machine.name}: {self.plan}",
            f"step             {_seconds(self.time)}, {several(self.numbers.batch, 'row')}",
            f"each device      {self.tflops_per_gpu:.4g} TFLOP/s; {self.mfu:.1%} of the peak without what runs again",
            f"memory           {self.memory / 1e9:.3g} GB of {self.machine.memory / 1e9:.3g}"
            + ("" if self.fits else ": does not fit"),
            "",
        ]
        width = max(map(len, (*self.breakdown, *self.memory_breakdown)))
        for kind, seconds in self.breakdown.items():
            rows.append(f"  {kind:{width}}  {_seconds(seconds):>10}  {seconds / self.time:6.1%}")
        rows.append("")
        for kind, size in self.memory_breakdown.items():
            rows.append(f"  {kind:{width}}  {size / 1e9:7.2f} GB  {size / self.memory:6.1%}")
        return "\n".join([*rows, *(["", f"minipar itself cannot run it: {self.note}"] if self.note else [])])


def _seconds(time: float) -> str:
    return f"{time:.4g} s" if time >= 1 else f"{time * 1e3:.4g} ms"


def estimate(
    plan: str | Mapping[str, Any] | Plan | PlanNumbers,
    model: str | Sizes | GPT | Mixture | Mapping[str, Any] | Any,
    devices: str | Hardware | Calibration,
    batch: int | None = None,
    *,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    simulate: bool = False,
    fused: bool = True,
    example: Any = None,
) -> Estimate:
    """Time and memory of a step of `batch` rows. It says whether the plan fits (`fits`), and does not refuse it if not.

    batch           rows of a step over all replicas; default: micro_batch_size (or 1) rows in each micro-batch
    nodes           how many nodes there are; then a plan without dp= has as many replicas as fill them
    gpus_per_node   in place of the hardware's own number
    simulate        simulate one replica even where the schedule has a formula
    fused           whether kernels are those of Megatron since 2022 (`PlanNumbers.fused`)
    example         an input of one row or more, if `model` is a torch module (`models.counting.chain_of`)
    Errors: PlanError for an unknown name, key or number, and for a plan that cannot be: it says what is possible.
    """
    machine = hardware(devices)
    if gpus_per_node is not None:
        machine = replace(machine, per_node=keys.whole_number("gpus_per_node", gpus_per_node))
    if nodes is not None:
        machine = replace(machine, nodes=keys.whole_number("nodes", nodes))
    if example is not None:
        from minipar.models.counting import chain_of  # (it needs torch)

        module: Any = model
        model = chain_of(module, example)
    chosen = sizes(model)
    if isinstance(plan, PlanNumbers):
        numbers, form, note = plan, None, ""
    else:
        table = table_of(plan)
        numbers = numbers_of(table, chosen, machine, batch, fused)
        form, note = _special(table, numbers), _refusal(table, numbers)
    check(numbers, chosen, machine)
    if simulate or (form is None and find(numbers.schedule).form is None):
        form = form or by_simulation(numbers)
    return Estimate(numbers, chosen, machine, closed_form(numbers, chosen, machine, form), note)


# from words to numbers ------------------------------------------------------------------------------------------------


def table_of(plan: str | Mapping[str, Any] | Plan) -> dict[str, Any]:
    """The keys that a plan gives, with their values. Errors: PlanError for an unknown key or value."""
    if isinstance(plan, Plan):
        given = {f.name: getattr(plan, f.name) for f in fields(Plan) if getattr(plan, f.name) != f.default}
    elif isinstance(plan, str):
        given = {**keys.words(plan)}
    elif isinstance(plan, Mapping):
        given = dict(plan)
    else:
        raise PlanError(f"plan {plan!r}: must be a Plan, words such as 'pp=2 dp=2', or a table of these keys")
    known = {f.name: f for f in fields(Plan)}
    keys.check_keys(given, [*known, ROWS])
    found: dict[str, Any] = {}
    for key, value in given.items():
        if key == ROWS:
            found[key] = keys.whole_number(ROWS, value, most=MOST_ROWS)
            continue
        found[key] = known[key].metadata["key"].domain.read(key, value)
        if key not in (*_READ, *_FREE) and found[key] != known[key].default:
            raise PlanError(f"{key}={value}: estimates have no formula for it; possible is a plan without {key}=")
    return found


def numbers_of(
    table: Mapping[str, Any], model: Sizes, machine: Hardware, batch: int | None = None, fused: bool = True
) -> PlanNumbers:
    """A plan's table (`table_of`) as numbers. Errors: PlanError for a batch that cannot be divided so."""
    get = table.get
    pp, tp, cp, ep = (int(get(key, 1)) for key in ("pp", "tp", "context_parallel", "ep"))
    devices = machine.nodes * machine.per_node
    dp = int(get("dp", 0)) or max(1, devices // (pp * tp * cp * ep))
    if dp * pp * tp * cp * ep > MOST_DEVICES:
        largest = max(("dp", dp), ("pp", pp), ("tp", tp), ("context_parallel", cp), ("ep", ep), key=lambda one: one[1])
        possible = MOST_DEVICES // (dp * pp * tp * cp * ep // largest[1])
        raise PlanError(
            f"{largest[0]}={largest[1]}: the plan needs more than {MOST_DEVICES} devices; possible are "
            + (f"{largest[0]}=1 to {possible}" if possible else "smaller numbers")
        )
    schedule = find(get("schedule", "1f1b"))
    chunks = get("chunks") or schedule.chunks
    if "slices" in schedule.options:
        cut = get("slices") or pp
        chunks = cut if isinstance(cut, int) else len(cut)
    count, rows = _microbatches(table, dp, batch)
    precision = get("precision") or ("bf16" if machine.mixed else "float32")
    numbers = PlanNumbers(
        dp, pp, tp, cp, ep, schedule.name, chunks, count, rows, get("zero", 0), 0, get("sequence_parallel", False),
        get("overlap", "backward") != "none", get("reduce", "microbatch") == "microbatch", tuple(get("offload", ())),
        precision, (), fused,
    )  # fmt: skip
    split = get("split")
    if isinstance(split, (str, tuple, list)) and split not in ("auto", "even"):
        numbers = numbers._replace(split=_split(split, numbers, model))
    return numbers._replace(checkpoint=_checkpoint(get("checkpoint", "none"), numbers, model, machine))


def _microbatches(table: Mapping[str, Any], dp: int, batch: int | None) -> tuple[int, float]:
    """How many micro-batches a replica has, and how many rows each of them has."""
    rounds, rows = table.get("accumulate", 1), table.get(ROWS)
    count = table["microbatches"] * rounds if "microbatches" in table else None
    if batch is None:
        count = count or rounds
        if dp * count * (rows or 1) > MOST_ROWS:
            said = f"microbatches={count}" + (f" {ROWS}={rows}" if rows else "")
            raise PlanError(f"{said}: with dp={dp} a step has more than {MOST_ROWS} rows; possible are fewer of them")
        return count, float(rows or 1)
    batch = keys.whole_number("batch", batch, most=MOST_ROWS)
    if rows is not None:
        if batch % (dp * rows):
            below = batch // (dp * rows) * dp * rows
            possible = f"batch={below} or {below + dp * rows}" if below else f"batch={dp * rows}"
            raise PlanError(f"batch={batch}: no multiple of dp={dp} x {ROWS}={rows}; possible are {possible}")
        found = batch // (dp * rows)
        if count not in (None, found):
            raise PlanError(f"microbatches={count}: batch={batch} dp={dp} {ROWS}={rows} make {found}; give one of them")
        return found, float(rows)
    count = count or rounds
    if batch < dp * count:
        raise PlanError(f"batch={batch}: fewer rows than the {several(dp * count, 'micro-batch')} of dp={dp}")
    return count, float(ceil(batch / dp / count))


def _split(split: Any, numbers: PlanNumbers, model: Sizes) -> tuple[int, ...]:
    """Blocks of each rank, from layers of each stage. Embedding and head are layers, too, and a rank has its chunks."""
    placement = place(find(numbers.schedule).placement, numbers.pp, numbers.chunks, numbers.schedule)
    count = 1 + max(map(max, placement))
    counts = keys.split(split, count, numbers.pp, len(placement[0]))
    assert isinstance(counts, tuple)
    ends = 2 if isinstance(model, Transformer) else 0
    if sum(counts) != model.layers + ends:
        whole = model.layers + ends
        even = ",".join(str(whole // count + (k < whole % count)) for k in range(count))
        raise PlanError(
            f"split={','.join(map(str, counts))}: sums to {sum(counts)}, but the model has {whole} layers; possible is "
            f"split={even}"
        )
    if ends:
        counts = (counts[0] - 1, *counts[1:-1], counts[-1] - 1) if count > 1 else (counts[0] - 2,)
    return tuple(sum(counts[stage] for stage in stages) for stages in placement)


def _checkpoint(choice: Any, numbers: PlanNumbers, model: Sizes, machine: Hardware) -> int | str:
    """Blocks of a segment, or "selective"."""
    if choice == "none":
        return 0
    if choice == "selective":
        if isinstance(model, Chain) or model.flash:
            return 0  # there are no scores to keep
        return "selective"
    if segments.budget_of(choice) is not None:
        raise PlanError(f"checkpoint={choice}: estimates have no formula for a budget; possible are none, sqrt, K")
    here = ceil(model.layers / numbers.pp)
    if isinstance(choice, tuple):
        return max(1, ceil(model.layers / numbers.pp / max(1, len(choice) / numbers.pp)))
    if choice != "sqrt":
        return int(choice)
    if isinstance(model, Chain):
        saved = sum(layer.saved for layer in model.chain) / model.layers
        output = sum(layer.output for layer in model.chain) / model.layers
    else:
        n = numbers
        work = block_work(model, machine, n.bytes.activation, n.rows, n.tp, n.cp, n.ep, n.sequence_parallel)
        saved, output = work.saved, work.output
    return max(1, round(sqrt(here * output / saved)))


def words(numbers: PlanNumbers, ends: int = 2) -> str:
    """The plan in the words that `estimate` reads.

    ends   layers of the model beside its blocks, which `split` counts: embedding and head
    """
    n, default = numbers, PlanNumbers()
    found = [f"dp={n.dp}", f"pp={n.pp}"]
    for key, name in (("tp", "tp"), ("cp", "context_parallel"), ("ep", "ep")):
        if getattr(n, key) > 1:
            found.append(f"{name}={getattr(n, key)}")
    if n.sequence_parallel:
        found.append("sequence_parallel=true")
    if n.pp > 1:
        found.append(f"schedule={n.schedule}")
        if "chunks" in find(n.schedule).options:
            found.append(f"chunks={n.chunks}")
        if "slices" in find(n.schedule).options:
            found.append(f"slices={n.chunks}")
        if n.split and n.chunks == 1:
            counts = [n.split[0] + ends // 2, *n.split[1:-1], n.split[-1] + ends // 2]
            found.append(f"split={','.join(map(str, counts))}")
    found += [f"microbatches={n.microbatches}", f"{ROWS}={n.rows:g}"]
    if n.zero:
        found.append(f"zero={n.zero}")
    if n.checkpoint:
        found.append(f"checkpoint={n.checkpoint}")
    if n.overlap != default.overlap:
        found.append("overlap=none")
    if n.every != default.every and n.zero >= 2:
        found.append("reduce=step")
    if n.offload:
        found.append(f"offload={','.join(n.offload)}")
    if isinstance(n.precision, str):
        found.append(f"precision={n.precision}")
    return " ".join(found)


# what can be ----------------------------------------------------------------------------------------------------------


def check(numbers: PlanNumbers, model: Sizes, machine: Hardware) -> None:
    """Refuse a plan that cannot be on any device. Errors: PlanError, which says what is possible."""
    n = numbers
    devices = machine.nodes * machine.per_node
    if devices and n.ranks != devices:
        others = n.pp * n.tp * n.cp * n.ep
        if devices % others == 0:
            possible = f"dp={devices // others}"
        elif n.ranks % machine.per_node == 0:
            possible = f"nodes={n.ranks // machine.per_node}"
        else:
            possible = f"tp, pp, context_parallel and ep that divide {devices} together"
        raise PlanError(
            f"plan {words(n)}: needs {several(n.ranks, 'device')}, but {several(machine.nodes, 'node')} of "
            f"{machine.per_node} are {devices}; possible is {possible}"
        )
    if isinstance(model, Chain):
        for key, size in (("tp", n.tp), ("context_parallel", n.cp), ("ep", n.ep)):
            if size > 1:
                raise PlanError(f"{key}={size}: has a formula for transformers only; possible is {key}=1")
    else:
        if model.heads % n.tp:
            possible = ", ".join(str(k) for k in range(1, model.heads + 1) if model.heads % k == 0)
            raise PlanError(f"tp={n.tp}: must divide {model.heads} heads; possible are {possible}")
        if "slices" in find(n.schedule).options and n.chunks > model.sequence:
            raise PlanError(f"slices={n.chunks}: more than the {model.sequence} tokens of a row; possible are fewer")
        if model.sequence % n.cp:
            near = next(k for k in range(n.cp - 1, 0, -1) if model.sequence % k == 0)
            raise PlanError(
                f"context_parallel={n.cp}: must divide a sequence of {model.sequence} tokens; possible is {near}"
            )
        if n.ep > 1 and not model.experts:
            raise PlanError(f"ep={n.ep}: {model.name or 'the model'} has no experts; possible is ep=1")
        if n.ep > 1 and model.experts % n.ep:
            possible = ", ".join(str(k) for k in range(1, model.experts + 1) if model.experts % k == 0)
            raise PlanError(f"ep={n.ep}: must divide {model.experts} experts; possible are {possible}")
    if n.sequence_parallel and n.tp == 1:
        raise PlanError("sequence_parallel=true: is of ranks that share layers; possible is tp=2")
    stages = 1 + max(map(max, place(find(n.schedule).placement, n.pp, _stages(n), n.schedule)))
    if stages > model.layers:
        most = max(1, model.layers * n.pp // stages)
        raise PlanError(
            f"pp={n.pp} chunks={_stages(n)}: {stages} stages, more than layers ({model.layers}); possible are pp=1 to "
            f"{most}"
        )
    _check_schedule(n.schedule, n.pp, n.microbatches, n.chunks)


def _stages(numbers: PlanNumbers) -> int:
    return find(numbers.schedule).chunks if "slices" in find(numbers.schedule).options else numbers.chunks


@lru_cache(4096)
def _check_schedule(name: str, pp: int, count: int, chunks: int) -> None:
    """Let a schedule's generator refuse what it cannot order. It does so before its first action."""
    options: dict[str, Any] = {} if not find(name).options else {"chunks": chunks, "slices": chunks, "group": None}
    options |= {"doubling": False, "in_flight": None, "update_every": None}
    chosen = {key: value for key, value in options.items() if key in find(name).options}
    if find(name).asynchronous is None or not find(name).asynchronous.decides:  # type: ignore[union-attr]
        next(iter(find(name).generate(0, pp, count, **chosen)), None)


def _refusal(table: Mapping[str, Any], numbers: PlanNumbers) -> str:
    """Why minipar cannot run a plan; "": it can."""
    given = {key: value for key, value in table.items() if key != ROWS}
    given |= {"dp": numbers.dp, "microbatches": numbers.microbatches}
    given.pop("accumulate", None)
    try:
        Plan(**given)
    except PlanError as error:
        return error.reason
    return ""


# simulation of one replica --------------------------------------------------------------------------------------------


def _special(table: Mapping[str, Any], numbers: PlanNumbers) -> ClosedForm | None:
    """The formulas of a plan with options that its schedule's own formulas do not know; None: there are none."""
    names = ("group", "doubling", "in_flight", "update_every")
    options = {key: table[key] for key in names if table.get(key) not in (None, False)}
    return by_simulation(numbers, **options) if options else None


def by_simulation(numbers: PlanNumbers, **options: Any) -> ClosedForm:
    """The formulas of a schedule, by simulating one replica with equal ranks at 2p and 3p micro-batches.

    options   further keys of the plan that the schedule knows
    """
    n = numbers
    known = find(n.schedule).options
    for key in ("chunks", "slices"):
        if key in known:
            options[key] = n.chunks
    plan = Plan(pp=n.pp, schedule=n.schedule, **options)

    def time(times: Times, p: int, m: int, v: int) -> float:
        few = [m] if m <= 3 * p else [2 * p, 3 * p]
        found = [_replica(plan, count, times) for count in few]
        if plan.asynchronous:  # (the pipeline is always full; what remains is the time of a micro-batch more)
            one, two = _replica(plan, 2 * p, times), _replica(plan, 3 * p, times)
            return m * (two - one) / p
        return found[0] if len(found) == 1 else found[0] + (m - 2 * p) * (found[1] - found[0]) / p

    def kept(p: int, m: int, v: int, d: int) -> float:
        made = replace(plan, microbatches=min(m, 3 * p))
        count = len(made.placement()[d])
        return in_flight(made.actions(d), [1 / count] * count) / (1 if "slices" not in known else v)

    held = versions_of(plan) if plan.asynchronous else [1] * n.pp
    return ClosedForm(time, kept, 2 if plan.copies else 1, lambda p, d: held[d], exact=False)


def _replica(plan: Plan, count: int, times: Times) -> float:
    """Seconds of one replica's step with so many micro-batches."""
    made = replace(plan, microbatches=count)
    cut = made.slice_count
    program = made.compile(layers=1 + max(map(max, made.placement())), check=False)
    return simulated(
        program,
        forward=times.forward / cut,
        backward=(times.both - times.forward) / cut,
        input_gradient=times.input_gradient / cut,
        weight_gradient=times.weight_gradient / cut,
        latency=times.message,
    ).time


# what would fit -------------------------------------------------------------------------------------------------------


def way_out(found: Estimate) -> str:
    """What a plan that does not fit needs: the memory of a device, or the smallest number of devices of this kind."""
    n, model, machine = found.numbers, found.model, found.machine
    text = (
        f"needs {found.memory / 1e9:.4g} GB, but {machine.name} has {machine.memory / 1e9:.4g} GB; it fits devices of "
    )
    text += f"{ceil(found.memory / 1e8) / 10:g} GB"
    more = smallest(n, model, replace(machine, nodes=0))
    if more is not None:
        text += f", or {several(more.ranks, 'device')} of this kind, such as with {words(more)}"
    return text


def smallest(numbers: PlanNumbers, model: Sizes, machine: Hardware) -> PlanNumbers | None:
    """The plan with the fewest devices that fits, among those that differ only in tp, pp and dp; None: there is none.

    The number of rows of a step stays as it is, or grows with dp.
    """
    n = numbers
    shares = [1] if isinstance(model, Chain) else [
        t for t in _powers(machine.per_node) if model.heads % t == 0 and (t > 1 or not n.sequence_parallel)
    ]  # fmt: skip
    pipes = [p for p in range(1, model.layers // max(1, n.chunks) + 1) if model.layers % p == 0]
    copies = sorted({n.dp, *(_powers(4096) if n.zero else ())})
    for tp, pp, dp in sorted(product(shares, pipes, copies), key=lambda one: (one[0] * one[1] * one[2], -one[0])):
        count = max(1, n.microbatches * n.dp // dp) if n.zero else n.microbatches
        made = n._replace(tp=tp, pp=pp, dp=dp, microbatches=count, split=())
        try:
            check(made, model, machine)
            form = find(n.schedule).form or by_simulation(made)
            if closed_form(made, model, machine, form).memory <= machine.memory:
                return made
        except PlanError:
            continue
    return None


def _powers(most: int) -> list[int]:
    return [2**k for k in range(most.bit_length()) if 2**k <= most]


def report(found: Estimate) -> dict[str, Any]:
    """The estimate as a dictionary for scripts. Errors: PlanError for a plan that does not fit, with what would."""
    if not found.fits:
        raise PlanError(f"plan {found.plan}: {way_out(found)}")
    return {
        "time": found.time,
        "tflops_per_gpu": found.tflops_per_gpu,
        "mfu": found.mfu,
        "memory": found.memory,
        "breakdown": found.breakdown,
        "memory_breakdown": found.memory_breakdown,
        "plan": found.plan,
        "model": found.model.name,
        "hardware": found.machine.name,
        "devices": found.numbers.ranks,
        "batch": found.numbers.batch,
        "note": found.note,
        "text": str(found),
    }
