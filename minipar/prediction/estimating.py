"""estimate(plan, model, devices): seconds and bytes of a training step, before anything is built or run.

    found = minipar.estimate("tp=8 pp=8 dp=16 micro_batch_size=1 checkpoint=1", "gpt3-175b", "a100-80gb", batch=1536)
    found.time, found.tflops_per_gpu, found.mfu, found.memory, found.breakdown
    print(found)

plan      as for `Plan`, but estimates know more than minipar can run: `found.note` says so (plan_words.py)
model     a preset's name, words or a table of numbers, a dataclass (models/sizes.py), or a torch module with `example`
devices   a preset's name, words or a table of numbers, a dataclass (costs/hardware.py), or a calibration

There are two ways to an answer, and `found.by` says which one it was:

    formula   the time is that of closed_form.py, with the formula of the schedule
    replica   a schedule, or an option of it, without a formula, or stages that differ: one replica is simulated
              (replica.py)

The memory is the same formula in both of them (rank_memory.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from minipar.costs.hardware import Hardware, hardware
from minipar.costs.rates import Calibration
from minipar.errors import PlanError
from minipar.models.sizes import Sizes, sizes
from minipar.prediction import fitting
from minipar.prediction.closed_form import Cost, closed_form
from minipar.prediction.plan_numbers import PlanNumbers
from minipar.prediction.plan_words import check, numbers_of, refusal, table_of, words
from minipar.prediction.published import Bar, like
from minipar.prediction.rank_memory import RankMemory, host_of_node, of_ranks
from minipar.prediction.replica import by_simulation, helps
from minipar.strategies import keys
from minipar.strategies.plan import Plan
from minipar.wording import several


@dataclass(frozen=True)
class Estimate:
    """What a plan is expected to take.

    numbers   the plan as the formulas read it
    model, machine   as they read these
    cost      time and memory, with their parts
    note      why minipar itself cannot run this plan; "": it can
    by        who answered: "formula", or "replica", which was simulated
    """

    numbers: PlanNumbers
    model: Sizes
    machine: Hardware
    cost: Cost
    note: str = ""
    by: str = "formula"

    @property
    def bar(self) -> Bar:
        """How far the time may be off, from published rows that are like this plan."""
        return like(self.time, self.numbers, self.model, self.machine)

    @property
    def low(self) -> float:
        """Seconds that a step takes at least, as far as published rows show; `rows` is how many there are."""
        return self.bar.low

    @property
    def high(self) -> float:
        """Seconds that a step takes at most, as `low`."""
        return self.bar.high

    @property
    def rows(self) -> int:
        """How many published rows are like this plan."""
        return self.bar.rows

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
    def ranks(self) -> list[RankMemory]:
        """Bytes on each rank of one pipeline, by kind. Ranks that share layers, and replicas, have the same."""
        return [found.memory for found in of_ranks(self.numbers, self.model)]

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
        """Whether the fullest device can hold it, and the host what waits there."""
        return self.memory <= self.machine.memory and self.host <= self.machine.host_memory

    @property
    def host(self) -> int:
        """Bytes that wait on the host of a node, of all its devices."""
        return host_of_node(self.cost.host, self.numbers, self.machine)

    @property
    def plan(self) -> str:
        """The plan in words."""
        return words(self.numbers)

    def __repr__(self) -> str:
        return str(self)  # (what a notebook shows)

    def __str__(self) -> str:
        """A small table."""
        name = self.model.name or type(self.model).__name__
        rows = [
            f"{name} on {several(self.numbers.ranks, 'device')}, {self.machine.name}: {self.plan}",
            f"step             {_seconds(self.time)}, {several(self.numbers.batch, 'row')}",
            f"may be off       {self.bar}",
            f"software         {self.numbers.software}",
            f"each device      {self.tflops_per_gpu:.4g} TFLOP/s; {self.mfu:.1%} of the peak without what runs again",
            f"memory           {self.memory / 1e9:.3g} GB of {self.machine.memory / 1e9:.3g}"
            + ": does not fit" * (self.memory > self.machine.memory),
        ]
        if self.host:
            rows.append(
                f"host             {self.host / 1e9:.3g} GB of {self.machine.host_memory / 1e9:.3g} in each node"
            )
        rows.append("")
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
    model: Any,
    devices: str | Hardware | Calibration,
    batch: int | None = None,
    *,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    simulate: bool = False,
    stack: str | None = None,
    example: Any = None,
) -> Estimate:
    """Time and memory of a step of `batch` rows. It says whether the plan fits (`fits`), and does not refuse it if not.

    batch           rows of a step over all replicas; default: micro_batch_size (or 1) rows in each micro-batch
    nodes           how many nodes there are; then a plan without dp= has as many replicas as fill them
    gpus_per_node   in place of the hardware's own number
    simulate        simulate one replica even where the schedule has a formula
    stack           the software, a key of costs/stacks.py's STACKS; default: the one that fits the plan
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

        model = chain_of(model, example)
    chosen = sizes(model)
    if isinstance(plan, PlanNumbers):
        numbers, note = plan, ""
    else:
        table = table_of(plan)
        numbers = numbers_of(table, chosen, machine, batch, stack)
        note = refusal(table, numbers)
    check(numbers, chosen, machine)
    walked = simulate or helps(numbers, chosen, machine)
    cost = closed_form(numbers, chosen, machine, by_simulation(numbers) if walked else None)
    return Estimate(numbers, chosen, machine, cost, note, "replica" if walked else "formula")


def way_out(found: Estimate) -> str:
    """What a plan that does not fit needs: the memory of a device, the smallest number of devices of this kind, or
    another plan on as many devices."""
    machine = found.machine
    if found.memory <= machine.memory:
        return (
            f"needs {found.host / 1e9:.4g} GB on the host of a node, but {machine.name} has "
            f"{machine.host_memory / 1e9:.4g} GB there; possible is less in offload="
        )
    text = (
        f"needs {found.memory / 1e9:.4g} GB, but {machine.name} has {machine.memory / 1e9:.4g} GB; it fits devices of "
        f"{ceil(found.memory / 1e8) / 10:g} GB"
    )
    more = fitting.smallest(found.numbers, found.model, replace(machine, nodes=0))
    if more is not None:
        text += f", or {several(more.ranks, 'device')} of this kind, such as with {words(more)}"
    ways = fitting.ways_of_numbers(found.numbers, found.model, machine)
    if ways:
        text += "; on as many devices it fits with "
        text += " or with ".join(f"{change} ({size / 1e9:.4g} GB)" for change, size in ways)
    return text


def report(found: Estimate) -> dict[str, Any]:
    """The estimate as a dictionary for scripts. Errors: PlanError for a plan that does not fit, with what would."""
    if not found.fits:
        raise PlanError(f"plan {found.plan}: {way_out(found)}")
    names = ("time", "low", "high", "rows", "host", "tflops_per_gpu", "mfu", "memory", "breakdown", "memory_breakdown")
    return {
        **{name: getattr(found, name) for name in (*names, "plan", "note", "by")},
        "stack": found.numbers.software,
        "model": found.model.name,
        "hardware": found.machine.name,
        "devices": found.numbers.ranks,
        "batch": round(found.numbers.batch),
        "text": str(found),
    }
