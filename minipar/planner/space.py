"""The space of plans for a model, a machine and a batch: what each key of a plan may be, and all plans of these.

    tp           1 2 4 8          divisors of the devices and of the heads        keys that change the work of a
    pp           1 2 4 8 16 ...   divisors of the devices, at most a stage        micro-batch: the outer loop
    checkpoint   none selective 1 for each layer
    schedule     1f1b, interleaved with 2, 3, 4, ... chunks, ...                  keys that change how a step is made
    zero         0 1 2 3                                                          of it: the inner loop
    dp           what is left of the devices; microbatches: what is left of the batch

Words and reading of values are those of the table of keys (`Plan`). A pin (`tp=8`) leaves one value of a key.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from math import isqrt
from typing import Any

from minipar.costs.hardware import Hardware
from minipar.errors import PlanError
from minipar.models.sizes import Sizes, Transformer
from minipar.prediction.plan_numbers import PRECISIONS, PlanNumbers
from minipar.prediction.plan_words import default_precision, own_gradient
from minipar.strategies import keys
from minipar.strategies.keys import OFFLOADS
from minipar.strategies.plan import Plan
from minipar.strategies.schedules import registry
from minipar.strategies.segments import INSIDE

OUTER = ("tp", "context_parallel", "ep", "pp", "micro_batch_size", "sequence_parallel", "checkpoint")
INNER = ("schedule", "zero", "reduce", "overlap", "offload")
NAMES = {"context_parallel": "cp", "micro_batch_size": "rows"}  # of keys the field of PlanNumbers, where it has another
LARGEST_ROWS = 64
RESERVE = 0.06  # of a device's memory, which plans leave: for the allocator's slack, and for buffers of libraries
LONG = 8_192  # tokens of a sequence from which on it is worth sharing


@dataclass(frozen=True)
class Space:
    """All plans that are searched.

    model, machine   as formulas read them; the machine has its nodes
    batch            rows of a step
    domains          of each key its values; a schedule is (name, chunks)
    precision        of all plans
    gradient         bytes of their whole gradients, as in `PlanNumbers`
    pins             what was fixed
    runs             whether only plans count that minipar itself can run
    to               a system that must be able to run them, too: megatron, deepspeed or torchtitan; "": none
    """

    model: Sizes
    machine: Hardware
    batch: int
    domains: Mapping[str, tuple[Any, ...]]
    precision: str = "bf16"
    gradient: int = 0
    pins: Mapping[str, Any] = field(default_factory=dict)
    runs: bool = False
    to: str = ""

    @property
    def devices(self) -> int:
        """How many there are."""
        return self.machine.nodes * self.machine.per_node

    def outer(self) -> Iterator[PlanNumbers]:
        """A plan for each way in which a micro-batch can be computed, with the plainest schedule."""
        d = self.domains
        for tp in d["tp"]:
            for cp in d["context_parallel"]:
                for ep in d["ep"]:
                    for pp in d["pp"]:
                        dp, rest = divmod(self.devices, tp * cp * ep * pp)
                        if rest or not dp or dp not in self._replicas(dp) or self.batch % dp:
                            continue
                        for rows in d["micro_batch_size"]:
                            if self.batch // dp % rows or rows % ep:
                                continue  # (ranks of ep have parts of the rows)
                            for sequence in d["sequence_parallel"]:
                                if sequence and tp == 1:
                                    continue
                                for checkpoint in d["checkpoint"]:
                                    yield PlanNumbers(
                                        dp, pp, tp, cp, ep, "1f1b", 1, self.batch // dp // rows, float(rows),
                                        checkpoint=checkpoint, sequence_parallel=sequence, precision=self.precision,
                                        gradient=self.gradient,
                                    )  # fmt: skip

    def _replicas(self, dp: int) -> tuple[int, ...]:
        known = self.domains.get("dp", ())
        return known or (dp,)

    def scheduled(self, outer: PlanNumbers) -> Iterator[PlanNumbers]:
        """The same way to compute micro-batches with every schedule that can be."""
        for name, chunks in self.domains["schedule"] if outer.pp > 1 else self.domains["schedule"][:1]:
            if divides(self.model.layers, outer.pp, chunks):
                yield outer._replace(schedule=name, chunks=chunks)

    def sharing(self, plan: PlanNumbers) -> Iterator[PlanNumbers]:
        """The same plan with all that replicas may share out, and when."""
        d, shared = self.domains, plan.dp * plan.cp * plan.ep > 1
        for zero in d["zero"] if shared else [z for z in d["zero"] if z == 0]:
            for every in d["reduce"] if zero == 3 else d["reduce"][:1]:  # (ZeRO 2 once a step is ZeRO 1)
                for overlap in d["overlap"] if shared else d["overlap"][:1]:
                    yield plan._replace(zero=zero, every=every == "microbatch", overlap=overlap != "none")

    def inner(self, outer: PlanNumbers) -> Iterator[PlanNumbers]:
        """All plans that compute micro-batches in this way, without offload."""
        for plan in self.scheduled(outer):
            yield from self.sharing(plan)

    def offloaded(self, plan: PlanNumbers) -> Iterator[PlanNumbers]:
        """The same plan with something on the host. This costs time, so it is tried where the plan does not fit."""
        for what in self.domains["offload"]:
            if what:
                yield plan._replace(offload=what)

    @property
    def count(self) -> int:
        """How many plans there are."""
        known: dict[tuple[int, bool], int] = {}
        total = 0
        for outer in self.outer():
            key = outer.pp, outer.dp * outer.cp * outer.ep > 1
            if key not in known:
                known[key] = sum(1 for _ in self.inner(outer))
            total += known[key]
        return total * max(1, len(self.domains["offload"]))

    def pinned(self, pins: str | Mapping[str, Any]) -> Space:
        """The same space with some keys fixed: "tp=8 zero=1". Errors: PlanError for an unknown key or value."""
        if not isinstance(pins, (str, Mapping)):
            raise PlanError(f"pins {pins!r}: must be words such as 'tp=8 zero=1', or a table of these keys")
        values = _words(pins) if isinstance(pins, str) else dict(pins)
        asked = dict(values)
        known = {f.name: f for f in fields(Plan)}
        keys.check_keys(values, [*OUTER, *INNER, "dp", "chunks", "precision"])
        domains, precision = dict(self.domains), self.precision
        chunks = values.pop("chunks", None)
        for key, given in values.items():
            if key == "micro_batch_size":
                domains[key] = (keys.whole_number(key, given),)
                continue
            if key == "precision" and given in PRECISIONS:
                precision = str(given)
                continue
            value = known[key].metadata["key"].domain.read(key, given)
            if key == "precision":
                precision = value
            elif key == "schedule":
                if registry.find(value).form is None:
                    possible = ", ".join(one.name for one in registry.schedules() if one.form is not None)
                    raise PlanError(
                        f"schedule={value}: its time has no formula, so it is not searched; possible are {possible}; "
                        "minipar.estimate simulates the others"
                    )
                own = tuple(one for one in domains[key] if one[0] == value)
                domains[key] = own or tuple((value, c) for c in _chunks(value, self.model.layers))
            elif key == "checkpoint":
                domains[key] = (_checkpoint(value),)
            else:
                domains[key] = (value,)
        if chunks is not None:
            wanted = keys.whole_number("chunks", chunks)
            names = dict.fromkeys(name for name, _ in domains["schedule"])
            every = [(name, count) for name in names for count in _chunks(name, self.model.layers)]
            domains["schedule"] = tuple(one for one in every if one[1] == wanted)
            if not domains["schedule"]:
                possible = ", ".join(map(str, sorted({count for _, count in every})))
                raise PlanError(f"chunks={chunks}: no schedule that is searched has so many; possible are {possible}")
        return replace(self, domains=domains, precision=precision, pins={**self.pins, **asked})


def space(
    model: Sizes, machine: Hardware, batch: int, pins: str | Mapping[str, Any] = "", reserve: float = RESERVE
) -> Space:
    """The space for a model on a machine that has its nodes. `reserve`: the part of each device's memory to leave.

    Errors: PlanError for a batch that no number of replicas divides, and for pins as `Space.pinned`.
    """
    machine = replace(machine, memory=int(machine.memory * (1 - reserve)))
    devices = machine.nodes * machine.per_node
    transformer = isinstance(model, Transformer)
    divisors = _divisors(devices)
    heads = model.heads if isinstance(model, Transformer) else 1
    kv = model.kv_heads if isinstance(model, Transformer) else 1
    experts = model.experts if isinstance(model, Transformer) else 0
    sequence = model.sequence if isinstance(model, Transformer) else 1
    selective = ("selective",) if isinstance(model, Transformer) and not model.flash else ()
    domains: dict[str, tuple[Any, ...]] = {
        "tp": tuple(n for n in divisors if heads % n == 0 and kv % n == 0 and n <= 4 * machine.per_node),
        "context_parallel": tuple(
            n for n in divisors if n == 1 or (sequence >= LONG and sequence % n == 0 and sequence // n >= 2048)
        ),
        "ep": tuple(n for n in divisors if n == 1 or (experts and experts % n == 0)),
        "pp": tuple(n for n in divisors if n <= model.layers),
        "micro_batch_size": tuple(n for n in range(1, min(batch, LARGEST_ROWS) + 1) if n & (n - 1) == 0),
        "sequence_parallel": (False, True) if transformer else (False,),
        "checkpoint": (0, *selective, 1),
        "schedule": tuple(_schedules(model.layers)),
        "zero": (0, 1, 2, 3),
        "reduce": ("microbatch", "step"),
        "overlap": ("backward",),
        "offload": ((), *((what,) for what in OFFLOADS[:2]), OFFLOADS[:2]),
    }
    found = Space(model, machine, batch, domains, default_precision(model, machine), own_gradient(model))
    return found.pinned(pins) if pins else found


def _divisors(number: int) -> list[int]:
    """All divisors, the smallest first. Those above the root are quotients of those below."""
    low = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return sorted({*low, *(number // n for n in low)})


def _schedules(layers: int) -> Iterator[tuple[str, int]]:
    """Schedules whose time is a formula, with their chunks; the plainest one first."""
    yield "1f1b", 1
    for one in registry.schedules():
        if one.form is not None and one.name != "1f1b":
            for chunks in _chunks(one.name, layers):
                yield one.name, chunks


def _chunks(name: str, layers: int) -> tuple[int, ...]:
    one = registry.find(name)
    if "chunks" not in one.options:
        return (one.chunks,)
    return tuple(v for v in range(2, 9) if layers % v == 0 or (layers + 2) % v == 0) or (one.chunks,)


def divides(layers: int, pp: int, chunks: int) -> bool:
    """Whether stages have equal numbers of blocks, with embedding and head counted as blocks or not (as Megatron may
    count them)."""
    return chunks == 1 or layers % (pp * chunks) == 0 or (layers + 2) % (pp * chunks) == 0


def _checkpoint(value: Any) -> int | str:
    """A value of the plan's key as formulas take it."""
    if value == "none":
        return 0
    if value in INSIDE or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    words = ",".join(map(str, value)) if isinstance(value, tuple) else value
    raise PlanError(
        f"checkpoint={words}: is not searched; possible are none, selective, operators, or a number of layers such as 1"
    )


def _words(text: str) -> dict[str, str]:
    """Pins in words, with spaces or commas between them; a value such as that of offload may have commas, too."""
    return keys.words(re.sub(r",(?=\s|\w+=|$)", " ", text))
