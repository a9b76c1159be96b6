"""Costs of a program on emulated devices: numbers of the device's spec, and measured numbers for the rest.

    compute     spec.costs, else operations / spec.flops, else as measured on this machine
    updates     spec.costs (its keywords give an update no time), else as measured on this machine
    messages    bytes / spec.bandwidth after spec.latency; infinitely fast links if the spec has times but no rates
    memory      as profiled

The executor delays real instructions and messages by the same table (`emulation.py`). So a measured timeline has the
predicted shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from minipar.costs.device import DeviceSpec
from minipar.costs.links import Line
from minipar.costs.measured import Profile
from minipar.costs.protocol import Costs, even
from minipar.costs.unit import UnitCosts
from minipar.errors import PlanError
from minipar.prediction.profiled import ProfiledCosts
from minipar.program import COPIES, Instruction, Op, Program, Value, repartitions
from minipar.program.comm_volume import NAMES, by_algorithm, hops, of_collective, of_message


def as_emulated(profile: Profile, spec: DeviceSpec) -> Profile:
    """The profile with the times that layers would take on a device with spec.flops operations a second.

    Without such a rate it is the same profile.
    """
    if spec.flops is None:
        return profile
    rate = spec.flops

    def seconds(operations: Mapping[int, tuple[float, ...]]) -> dict[int, tuple[float, ...]]:
        return {rows: tuple(n / rate for n in layers) for rows, layers in operations.items()}

    def half(k: int) -> dict[int, tuple[float, ...]]:
        return {
            rows: tuple(profile.half_flops(rows, layer)[k] for layer in range(len(layers)))
            for rows, layers in profile.backward_flops.items()
        }

    return replace(
        profile,
        forward=seconds(profile.forward_flops),
        backward=seconds(profile.backward_flops),
        backward_input=seconds(half(0)),
        backward_weight=seconds(half(1)),
    )


@dataclass(frozen=True)
class EmulatedCosts:
    """Seconds and bytes of a program's instructions on devices of one kind.

    own     costs on this machine, for what the spec does not say; they are needed for flops and for sizes of
            activations
    """

    program: Program
    spec: DeviceSpec
    own: ProfiledCosts | None = None
    _table: list[Costs] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        costs = self.spec.costs
        if costs is not None:
            times: dict[str, Any] = {} if callable(costs) else dict(costs)
            self._table.append(costs(self.program) if callable(costs) else UnitCosts(self.program, **times))

    @property
    def computes(self) -> bool:
        """Whether the spec gives a speed of computing; otherwise instructions take as long as on this machine."""
        return bool(self._table) or self.spec.flops is not None

    @property
    def links(self) -> bool:
        """Whether the spec gives a speed of messages."""
        return bool(self._table) or self.spec.bandwidth is not None or self.spec.latency is not None

    def delays(self, ins: Instruction) -> bool:
        """Whether a compute instruction takes the device's time rather than this machine's."""
        return bool(self._table) or (
            self.spec.flops is not None and ins.op not in (Op.STEP, Op.APPLY) and ins.stream != "host"
        )

    def compute(self, rank: int, ins: Instruction) -> float:
        if self._table:
            return self._table[0].compute(rank, ins)
        own = self._own("the time of an instruction")
        if self.spec.flops is None or not self.delays(ins):
            return own.compute(rank, ins)
        return self._operations(own, rank, ins) / self.spec.flops

    def transfer(self, rank: int, ins: Instruction) -> tuple[float, float]:
        if ins.op in COPIES:
            return self._copy(rank, ins)
        if not self.links:
            return self._own("the time of a message").transfer(rank, ins)
        if ins.op is Op.PULL:
            return 0.0, 0.0  # (the message is the server's REPLY)
        if self.spec.bandwidth is None:
            by_function = self.transfers_by_function
            return self._table[0].transfer(rank, ins) if by_function else (0.0, self.spec.latency or 0.0)
        size = of_message(lambda rank, value: self._own("the size of a message").size(rank, value), rank, ins)
        return self._line.message(size)

    def even(self, rank: int, other: int) -> bool:
        """Whether what two ranks that do the same do costs the same: by the spec's own costs, and by this machine's."""
        used = [*self._table, *([self.own] if self.own is not None else [])]
        return all(even(costs, rank, other) for costs in used)

    def _copy(self, rank: int, ins: Instruction) -> tuple[float, float]:
        rate = self.spec.copy_bandwidth(ins)
        if rate is not None:
            return self._own("the size of a copy").size(rank, ins.reads[0]) / rate, 0.0
        return (0.0, 0.0) if self._table else self._own("the time of a copy").transfer(rank, ins)

    def collective(self, ins: Instruction) -> float:
        if not self.links:
            return self._own("the time of a collective").collective(ins)
        if self.transfers_by_function:
            return self._table[0].collective(ins)
        n = len(ins.group)
        if repartitions(ins):
            size = of_collective(self.program, self._own("the size of a message").size, ins.group[0], ins)
        else:
            size = of_collective(self.program, self._gradient, ins.group[0], ins)
        if by_algorithm(self.program, ins):
            from minipar.prediction import choice  # (choice imports the simulator)

            beta = 1 / self.spec.bandwidth if self.spec.bandwidth else 0.0
            each, name = round(size / max(1, len(ins.parts))), self.program.algorithm
            return len(ins.parts) * choice.by_links(NAMES[ins.op], name, n, each, self.spec.latency or 0.0, beta)
        return hops(ins) * self._line.ring(n, size, max(1, len(ins.parts)))

    @property
    def _line(self) -> Line:
        return Line(self.spec.latency or 0.0, self.spec.bandwidth)

    def _gradient(self, _rank: int, value: Value) -> int:
        """Bytes of a gradient, which need no profile."""
        return sum(self.program.groups[value.index].tensors)

    def size(self, rank: int, value: Value) -> float:
        if self.own is not None:
            return self.own.size(rank, value)
        return self._table[0].size(rank, value) if self._table else 0

    def _operations(self, own: ProfiledCosts, rank: int, ins: Instruction) -> float:
        rows = own.rows(rank, ins.microbatch)
        if rows == 0:
            return 0.0
        if ins.op in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT):
            second = ins.op is Op.BACKWARD_WEIGHT
            return sum(own.profile.half_flops(rows, layer)[second] for layer in ins.layers)
        forward = ins.op in (Op.FORWARD, Op.RECOMPUTE)
        table = own.profile.forward_flops if forward else own.profile.backward_flops
        return sum(table[rows][layer] for layer in ins.layers)

    @property
    def transfers_by_function(self) -> bool:
        """Whether messages, too, take the times of the spec's function."""
        return callable(self.spec.costs) and self.spec.bandwidth is None and self.spec.latency is None

    def _own(self, what: str) -> ProfiledCosts:
        if self.own is None:
            raise PlanError(
                f"device {self.spec.name or self.spec}: {what} needs a profile of the model; use train(...)"
            )
        return self.own
