"""Costs of a program: seconds of its instructions and bytes of its values, for a step of some rows.

    compute     an emulated device's own times; else operations / its FLOP/s; else the profile: each layer alone
    updates     an emulated device's own times (keywords of `UnitCosts` give an update none); else the profile
    messages    an emulated device's links; else as calibrated on the cluster; else as gloo over the loopback
    memory      as profiled

The profile is measured, or from formulas (on_paper.py). The executor delays real instructions and messages on emulated
devices by the same costs (execution/emulation.py), so that a measured timeline has the predicted shape.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from minipar.costs.device import THIS_MACHINE, DeviceSpec
from minipar.costs.links import Line
from minipar.costs.measured import Profile
from minipar.costs.protocol import Costs, even
from minipar.costs.rates import ORDINARY, Calibration, Copies
from minipar.costs.unit import UnitCosts
from minipar.errors import PlanError
from minipar.prediction import choice
from minipar.program import (
    COMPUTE,
    COPIES,
    SERVICE,
    Instruction,
    Op,
    Program,
    Value,
    home,
    output,
    repartitions,
    tier,
)
from minipar.program.comm_volume import NAMES, by_algorithm, changes, hops, of_collective, of_message
from minipar.program.forms import COUNTS
from minipar.program.rows import split_rows
from minipar.strategies.shares import shares_of

LOOPBACK = Line(2e-4, 1.5e9)  # what gloo reaches on an ordinary machine
_SECONDS = {Op.BACKWARD: "backward", Op.BACKWARD_INPUT: "backward_input", Op.BACKWARD_WEIGHT: "backward_weight"}


def microbatch_rows(batch: int, replicas: int, microbatches: int) -> tuple[int, ...]:
    """The different numbers of rows that micro-batches of a step have. A profile must measure each of them."""
    return tuple(sorted({len(r) for r in split_rows(batch, replicas * microbatches)} - {0}))


def as_emulated(profile: Profile, spec: DeviceSpec) -> Profile:
    """The profile with the times that layers would take on a device with spec.flops operations a second; without such a
    rate as it is."""
    rate = spec.flops
    if rate is None:
        return profile

    def seconds(operations: Mapping[int, Sequence[float]]) -> dict[int, tuple[float, ...]]:
        return {rows: tuple(n / rate for n in layers) for rows, layers in operations.items()}

    halves = [
        {rows: [profile.half_flops(rows, layer)[k] for layer in range(len(layers))]
         for rows, layers in profile.backward_flops.items()} for k in (0, 1)
    ]  # fmt: skip
    return replace(
        profile, forward=seconds(profile.forward_flops), backward=seconds(profile.backward_flops),
        backward_input=seconds(halves[0]), backward_weight=seconds(halves[1]), recompute={},
    )  # fmt: skip


@dataclass(frozen=True)
class ProgramCosts:
    """What a program costs, by the rates of an emulated device, of a calibrated cluster, or of an ordinary machine.

    profile      of the model's layers; None: nothing is asked that the device does not say
    batch        rows of a step
    device       that every rank emulates; what it does not say is as without it
    calibration  of the cluster: what messages and collectives cost. The sender's own work on a message is part of the
                 compute instruction before the SEND, the receiver's of the first instruction that reads the message
    copies       rates of copies to the host or the disk, and back
    """

    program: Program
    profile: Profile | None = None
    batch: int = 0
    device: DeviceSpec = THIS_MACHINE
    calibration: Calibration | None = None
    copies: Copies = ORDINARY

    @cached_property
    def _table(self) -> Costs | None:
        """The device's own times."""
        costs = self.device.costs
        if costs is None or callable(costs):
            return None if costs is None else costs(self.program)
        times: dict[str, Any] = dict(costs)
        return UnitCosts(self.program, **times)

    @cached_property
    def _rows(self) -> list[range]:
        return split_rows(self.batch, self.program.replicas * self.program.row_microbatches)

    @cached_property
    def _emulated(self) -> Profile:
        return as_emulated(self._known, self.device)

    @property
    def _known(self) -> Profile:
        if self.profile is None:
            what = f"device {self.device.name or self.device}: the time of an instruction, or the size of a message,"
            raise PlanError(f"{what} needs a profile of the model; use train(...)")
        return self.profile

    def _bytes(self, rank: int, value: Value) -> int:
        """The size of what is moved, which a profile must say."""
        return self.size(rank, value) if self._known else 0

    def rows(self, rank: int, microbatch: int) -> int:
        """The number of rows of a micro-batch of the rank's replica; for a slice, the profile's key: rows * slices +
        its number."""
        i, j = divmod(microbatch, self.program.slice_count)
        count = len(self._rows[self.program.replica(rank) * self.program.row_microbatches + i])
        return count * self.program.slice_count + j if count else 0

    def rows_of(self, rank: int) -> int:
        """Rows of a step that the rank's replica works on."""
        return sum(self._counts(rank))

    def _counts(self, rank: int) -> list[int]:
        """Rows of each micro-batch of the rank's replica."""
        count = self.program.row_microbatches
        first = self.program.replica(rank) * count
        return [len(rows) for rows in self._rows[first : first + count]]

    def even(self, rank: int, other: int) -> bool:
        """Whether what two ranks that do the same do costs the same: by the device's own times, and since their
        replicas have as many rows in their micro-batches and use no link by itself."""
        if self._table is not None and not even(self._table, rank, other):
            return False
        alike = self.profile is None or self._counts(rank) == self._counts(other)
        return alike and not self.shares and not any(self._messages)

    # seconds of instructions ------------------------------------------------------------------------------------------

    def delays(self, ins: Instruction) -> bool:
        """Whether a compute instruction takes the device's time rather than this machine's."""
        if self.device.costs is not None:
            return True
        return self.device.flops is not None and ins.op not in (Op.STEP, Op.APPLY) and ins.stream != "host"

    def compute(self, rank: int, ins: Instruction) -> float:
        if self._table is not None:
            return self._table.compute(rank, ins)
        if self.delays(ins):
            return self._alone(self._emulated, rank, ins)
        seconds = self._alone(self._known, rank, ins)
        return seconds + self._messages[rank].get(ins, 0.0) if self._messages else seconds

    def _alone(self, profile: Profile, rank: int, ins: Instruction) -> float:
        """Seconds of a compute instruction, without messages."""
        if ins.op is Op.STEP or ins.op is Op.APPLY:
            return self._update(profile, rank, ins)
        rows = self.rows(rank, ins.microbatch)
        if rows == 0:
            return 0.0
        table: dict[int, tuple[float, ...]] = getattr(profile, _SECONDS.get(ins.op, "forward"))
        seconds = sum(table[rows][layer] for layer in ins.layers)
        if ins.op is Op.RECOMPUTE and profile.recompute:
            last = ins.layers[-1]
            if output(last, ins.microbatch, ins.step) not in ins.writes:
                seconds += profile.recompute[rows][last] - profile.forward[rows][last]
        return seconds

    def _update(self, profile: Profile, rank: int, ins: Instruction) -> float:
        """Seconds of an update of some parameters; a server sums their gradients, too."""
        applies, whole = ins.op is Op.APPLY, sum(profile.gradient_bytes)
        seconds = profile.host_step_seconds if applies or ins.stream == "host" else 0.0
        seconds, summing = seconds or profile.step_seconds, 0.0
        if applies:
            part: float = sum(piece.bytes for piece in ins.parts)
            taken = sum(self.size(rank, value) for value in ins.reads if value.kind == "pushed")
            summing = max(0, taken - part) * self.copies.to_host.per_byte
        else:
            part = sum(self.size(rank, v) for v in ins.reads if home(v).kind in ("grad", "grad_shard"))
        return (seconds * part / whole if whole else 0.0) + summing

    @cached_property
    def _messages(self) -> list[dict[Instruction, float]]:
        """For each rank, the seconds that it works on sending and receiving, by the compute instruction that they are
        part of; nothing, if there are no messages or their rates are not calibrated."""
        if self.calibration is None or not any(ins.op is Op.SEND for row in self.program.ranks for ins in row):
            return []
        return [self._work_on_messages(self.calibration, rank) for rank in range(len(self.program.ranks))]

    def _work_on_messages(self, rates: Calibration, rank: int) -> dict[Instruction, float]:
        found: dict[Instruction, float] = {}
        received: dict[Value, tuple[Value, ...]] = {}  # value -> all values of its message
        before: Instruction | None = None
        for ins in self.program.ranks[rank]:
            if ins.op is Op.RECV:
                received.update(dict.fromkeys(ins.writes, ins.writes))
            elif ins.op is Op.SEND and before is not None:
                size = sum(self.size(rank, value) for value in ins.reads)
                found[before] = found.get(before, 0.0) + (rates.send.at(size) if size else 0.0)
            elif ins.op in COMPUTE:
                for came in {received[value] for value in ins.reads if value in received}:
                    size = sum(self.size(rank, value) for value in came)
                    found[ins] = found.get(ins, 0.0) + (rates.receive.at(size) if size else 0.0)
                    for value in came:
                        del received[value]
                before = ins
        return found

    # seconds of what is moved -----------------------------------------------------------------------------------------

    def transfer(self, rank: int, ins: Instruction) -> tuple[float, float]:
        device, rates = self.device, self.calibration
        if ins.op in COPIES:
            return self._copy(rank, ins), 0.0
        if device.links:
            if ins.op is Op.PULL:
                return 0.0, 0.0  # (the message is the server's REPLY)
            if device.bandwidth is not None:
                return device.line.message(of_message(self._bytes, rank, ins))
            by_function = self._table if device.messages_by_costs else None
            return by_function.transfer(rank, ins) if by_function is not None else (0.0, device.line.latency)
        size = of_message(self._bytes, rank, ins)
        if not size or rates is None:
            return LOOPBACK.message(size)
        if ins.op in SERVICE:  # (the work of both ranks counts as the server's time)
            line = rates.message(rank, ins.peer)
            return size * line.per_byte, line.fixed
        return rates.transfer(rank, ins.peer, size)

    def _copy(self, rank: int, ins: Instruction) -> float:
        value, rate = ins.reads[0], self.device.copy_bandwidth(ins)
        if rate is not None:
            return self._bytes(rank, value) / rate
        if self._table is not None:
            return 0.0
        copies, away = self.copies, ins.op is Op.OFFLOAD
        if any(tier(one) == "disk" for one in (value, ins.writes[0])):
            line = copies.to_disk if away else copies.from_disk
        else:
            line = copies.to_host if away else copies.from_host
        count = max(1, len(self.program.groups[value.index].tensors)) if value.microbatch < 0 else 1
        return self._bytes(rank, value) * line.per_byte + count * line.fixed

    def collective(self, ins: Instruction) -> float:
        device, program, n, messages = self.device, self.program, len(ins.group), max(1, len(ins.parts))
        if device.messages_by_costs and self._table is not None:
            return self._table.collective(ins)
        line, rates = (device.line, None) if device.links else (LOOPBACK, self.calibration)
        sizes = self._gradient if device.links and not repartitions(ins) else self._bytes
        size = of_collective(program, sizes, ins.group[0], ins)
        if by_algorithm(program, ins):
            one = NAMES[ins.op], program.algorithm, n, round(size / messages)
            return messages * (choice.by_links(*one, line) if rates is None else choice.seconds(*one, rates))
        if rates is None:
            return hops(ins) * line.ring(n, size, messages)
        if rates.hosts:
            kind = {Op.REDUCE_SCATTER: "reduce_scatter", Op.ALL_GATHER: "all_gather"}.get(ins.op, "allreduce")
            across = rates.collective(kind, ins.group, size / messages)
            if across is not None:
                return messages * across
        # (measured for sums, in which the bytes travel twice)
        return hops(ins) / 2 * messages * rates.sum_over(n, size / messages)

    def _gradient(self, _rank: int, value: Value) -> int:
        """Bytes of a gradient, which need no profile."""
        return sum(self.program.groups[value.index].tensors)

    @property
    def shares(self) -> bool:
        """Whether ranks are on several hosts, and share the cables between them."""
        return self.calibration is not None and len(set(self.calibration.hosts)) > 1 and not self.device.emulates

    def cables(self, rank: int, ins: Instruction) -> tuple[Collection[Hashable], float]:
        """Both directions of the cables of all hosts of a group; one of each host for a message. A message that cannot
        fill a cable leaves the rest of its rate to others."""
        found = self.calibration
        if found is None or not (ins.op is Op.SEND or ins.group):
            return (), 0.0
        hosts = found.hosts_of(ins.group or (rank, ins.peer))
        if len(hosts) < 2:
            return (), 0.0
        if ins.group:
            ends = [(host, way) for host in hosts for way in ("out", "in")]
            return ends, found.filling * self.collective(ins)
        here, there = found.hosts[rank], found.hosts[ins.peer]
        return ((here, "out"), (there, "in")), found.filling * self.transfer(rank, ins)[0]

    # bytes of values --------------------------------------------------------------------------------------------------

    def size(self, rank: int, value: Value) -> int:
        value, profile = home(value), self.profile
        if profile is None:
            unit: Any = self._table.size(rank, value) if self._table is not None else 0
            return unit  # (no bytes, but a part of what a rank keeps)
        if value.kind in ("served", "served_state", "pushed"):
            return self._size_on_server(profile, rank, value)
        if value.microbatch >= 0:
            rows = self.rows(rank, value.microbatch)
            if self.program.forms and (table := self._table_of(profile, value)):
                return table[rows][value.index] if rows else 0
            tables = {
                "output": profile.output_bytes,
                "grad_output": profile.grad_output_bytes,
                "saved": profile.saved_bytes,
                "saved_weight": profile.saved_weight_bytes,
                "carry": profile.carry_bytes,
                "grad_carry": profile.grad_carry_bytes,
            }
            return tables[value.kind][rows][self.program.source(value)] if rows else 0
        return self._size_of_group(profile, value)

    def _table_of(self, profile: Profile, value: Value) -> dict[int, tuple[int, ...]]:
        """With tensor parallelism, the sizes of an output or a gradient that is not in its own node's form."""
        forms = self.program.forms
        if changes(value):
            counted = changes(value) == "output" and COUNTS in forms[value.index + 1].reads
            if counted and COUNTS not in value.form:
                return profile.counts_bytes
            return profile.changing_bytes if changes(value) == "output" else profile.grad_changing_bytes
        if value.kind == "output" and value.form != forms[value.index].writes:
            return profile.read_bytes
        if value.kind == "grad_output" and value.form != forms[value.index].grad_reads:
            return profile.grad_written_bytes
        return {}

    @cached_property
    def _parts(self) -> Sequence[Mapping[int, int]]:
        """Of each parameter server, the bytes of its part of each group."""
        serving = self.program.serving
        return shares_of(self.program.groups, serving.servers) if serving is not None else []

    def _size_on_server(self, profile: Profile, rank: int, value: Value) -> int:
        """Bytes of a parameter server's part of a group: of its parameters, a gradient, or its optimizer's state."""
        g = value.index
        part = self._parts[rank - self.program.workers].get(g, 0)
        whole = max(1, profile.gradient_bytes[g])
        return profile.optimizer_bytes[g] * part // whole if value.kind == "served_state" else part

    def _size_of_group(self, profile: Profile, value: Value) -> int:
        """Bytes of what belongs to a parameter group. Slices of a sharded one are padded to equal size.

        With precision=bf16 the profile has bfloat16 parameters, but slices, masters and residuals are float32, so they
        are twice as large.
        """
        if value.kind == "norm":
            return 8
        program, g, wide = self.program, value.index, 2 if self.program.narrow else 1
        held, whole, state = profile.parameter_bytes[g], profile.gradient_bytes[g], profile.optimizer_bytes[g]
        if g not in program.sharded:
            kept = {"param": held, "grad": whole, "optimizer_state": state if wide == 1 else wide * (state + whole)}
            if value.kind in kept:
                return kept[value.kind]
        n = max(1, program.holders[g] // program.sharing)
        frozen, part, stays = held - whole, -(-whole // (4 * n)) * 4, g in program.scattered
        sizes = {
            "residual": whole * wide,
            "param": part * n + (0 if stays else frozen),
            "param_shard": part * wide + frozen,
            "grad": whole,
            "grad_shard": part * wide,
            "buffer": part * n,
            "optimizer_shard": -(-state // n) * wide + (part * wide if wide > 1 and not stays else 0),
        }
        return sizes[value.kind]
