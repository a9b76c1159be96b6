"""Costs of a program from a profile, for which each layer of the model was measured alone on one device."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass, field

from minipar.costs.links import Line
from minipar.costs.measured import Profile
from minipar.costs.rates import ORDINARY, Calibration, Copies
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
    tier,
)
from minipar.program.comm_volume import NAMES, by_algorithm, changes, hops, of_collective, of_message
from minipar.program.forms import COUNTS
from minipar.program.rows import split_rows
from minipar.strategies.shares import shares_of

_SECONDS = {Op.BACKWARD: "backward", Op.BACKWARD_INPUT: "backward_input", Op.BACKWARD_WEIGHT: "backward_weight"}


def microbatch_rows(batch: int, replicas: int, microbatches: int) -> tuple[int, ...]:
    """The different numbers of rows that micro-batches of a step have. A profile must measure each of them."""
    return tuple(sorted({len(r) for r in split_rows(batch, replicas * microbatches)} - {0}))


@dataclass(frozen=True)
class ProfiledCosts:
    """Seconds and bytes of a program's instructions and values, for a step of `batch` rows.

    latency      seconds that every message takes in addition to its bytes
    bandwidth    bytes a second of every link
    copies       rates of copies to the host or the disk, and back
    calibration  the cluster's calibration; None: none. With it messages and collectives cost what was measured, and
                 latency and bandwidth are not used. The sender's own work on a message is part of the compute
                 instruction before the SEND. The receiver's is part of the first instruction that reads the message

    The defaults are what gloo reaches over the loopback of an ordinary machine.
    """

    program: Program
    profile: Profile
    batch: int
    latency: float = 2e-4
    bandwidth: float = 1.5e9
    copies: Copies = ORDINARY
    calibration: Calibration | None = None
    _rows: list[range] = field(default_factory=list, init=False, repr=False, compare=False)
    _shares: list[dict[int, int]] = field(default_factory=list, init=False, repr=False, compare=False)
    _messages: list[dict[Instruction, float]] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._rows.extend(split_rows(self.batch, self.program.replicas * self.program.row_microbatches))
        if self.calibration is not None and any(ins.op is Op.SEND for row in self.program.ranks for ins in row):
            self._messages.extend(self._work_on_messages(rank) for rank in range(len(self.program.ranks)))

    def rows(self, rank: int, microbatch: int) -> int:
        """The number of rows of a micro-batch of the rank's replica; for a slice, the profile's key: rows * slices +
        its number."""
        i, j = divmod(microbatch, self.program.slice_count)
        count = len(self._rows[self.program.replica(rank) * self.program.row_microbatches + i])
        return count * self.program.slice_count + j if count else 0

    def rows_of(self, rank: int) -> int:
        """Rows of a step that the rank's replica works on."""
        count = self.program.row_microbatches
        first = self.program.replica(rank) * count
        return sum(map(len, self._rows[first : first + count]))

    def compute(self, rank: int, ins: Instruction) -> float:
        seconds = self._without_messages(rank, ins)
        return seconds + self._messages[rank].get(ins, 0.0) if self._messages else seconds

    def even(self, rank: int, other: int) -> bool:
        """Whether the replicas of two ranks have as many rows in their micro-batches, and no link is used by itself."""
        count = self.program.row_microbatches
        first, second = (self.program.replica(each) * count for each in (rank, other))
        mine, others = ([len(rows) for rows in self._rows[k : k + count]] for k in (first, second))
        return mine == others and not self.shares and not any(self._messages)

    def _work_on_messages(self, rank: int) -> dict[Instruction, float]:
        """Seconds that a rank works on sending and receiving, by the compute instruction that they are part of."""
        assert self.calibration is not None
        found: dict[Instruction, float] = {}
        received: dict[Value, tuple[Value, ...]] = {}  # value -> all values of its message
        before: Instruction | None = None
        for ins in self.program.ranks[rank]:
            if ins.op is Op.RECV:
                received.update(dict.fromkeys(ins.writes, ins.writes))
            elif ins.op is Op.SEND and before is not None:
                size = sum(self.size(rank, value) for value in ins.reads)
                found[before] = found.get(before, 0.0) + (self.calibration.send.at(size) if size else 0.0)
            elif ins.op in COMPUTE:
                for came in {received[value] for value in ins.reads if value in received}:
                    size = sum(self.size(rank, value) for value in came)
                    found[ins] = found.get(ins, 0.0) + (self.calibration.receive.at(size) if size else 0.0)
                    for value in came:
                        del received[value]
                before = ins
        return found

    def _step_seconds(self, on_host: bool) -> float:
        """Of an update of all parameters."""
        return (on_host and self.profile.host_step_seconds) or self.profile.step_seconds

    def _without_messages(self, rank: int, ins: Instruction) -> float:
        """Seconds of a compute instruction, without messages."""
        if ins.op is Op.STEP:
            whole = sum(self.profile.gradient_bytes)
            part = sum(self.size(rank, v) for v in ins.reads if home(v).kind in ("grad", "grad_shard"))
            return self._step_seconds(ins.stream == "host") * part / whole if whole else 0.0
        if ins.op is Op.APPLY:  # (a server sums the gradients, and updates its part)
            whole, part = sum(self.profile.gradient_bytes), sum(piece.bytes for piece in ins.parts)
            taken = sum(self.size(rank, value) for value in ins.reads if value.kind == "pushed")
            summing = max(0, taken - part) * self.copies.to_host.per_byte
            return (self._step_seconds(True) * part / whole if whole else 0.0) + summing
        rows = self.rows(rank, ins.microbatch)
        if rows == 0:
            return 0.0
        table: dict[int, tuple[float, ...]] = getattr(self.profile, _SECONDS.get(ins.op, "forward"))
        seconds = sum(table[rows][layer] for layer in ins.layers)
        if ins.op is Op.RECOMPUTE and self.profile.recompute:
            last = ins.layers[-1]
            if output(last, ins.microbatch, ins.step) not in ins.writes:
                seconds += self.profile.recompute[rows][last] - self.profile.forward[rows][last]
        return seconds

    def transfer(self, rank: int, ins: Instruction) -> tuple[float, float]:
        if ins.op in COPIES:
            value, copies = ins.reads[0], self.copies
            on_disk = any(tier(value) == "disk" for value in (ins.reads[0], ins.writes[0]))
            away = ins.op is Op.OFFLOAD
            if on_disk:
                line = copies.to_disk if away else copies.from_disk
            else:
                line = copies.to_host if away else copies.from_host
            count = max(1, len(self.program.groups[value.index].tensors)) if value.microbatch < 0 else 1
            return self.size(rank, value) * line.per_byte + count * line.fixed, 0.0
        size = of_message(self.size, rank, ins)
        if size and self.calibration is not None:
            if ins.op in SERVICE:  # (the work of both ranks counts as the server's time)
                line = self.calibration.message(rank, ins.peer)
                return size * line.per_byte, line.fixed
            return self.calibration.transfer(rank, ins.peer, size)
        return Line(self.latency, self.bandwidth).message(size)

    def collective(self, ins: Instruction) -> float:
        n = len(ins.group)
        size, messages = of_collective(self.program, self.size, ins.group[0], ins), max(1, len(ins.parts))
        if by_algorithm(self.program, ins):
            return messages * self._by_algorithm(NAMES[ins.op], n, round(size / messages))
        if self.calibration is not None:
            if self.calibration.hosts:
                kind = {Op.REDUCE_SCATTER: "reduce_scatter", Op.ALL_GATHER: "all_gather"}.get(ins.op, "allreduce")
                across = self.calibration.collective(kind, ins.group, size / messages)
                if across is not None:
                    return messages * across
            # (measured for sums, in which the bytes travel twice)
            return hops(ins) / 2 * messages * self.calibration.sum_over(n, size / messages)
        return hops(ins) * Line(self.latency, self.bandwidth).ring(n, size, messages)

    @property
    def shares(self) -> bool:
        """Whether ranks are on several hosts, and share the cables between them."""
        return self.calibration is not None and len(set(self.calibration.hosts)) > 1

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

    def _by_algorithm(self, collective: str, ranks: int, nbytes: int) -> float:
        """Seconds of a collective by the program's own algorithm."""
        from minipar.prediction import choice  # (choice imports the simulator)

        if self.calibration is not None:
            return choice.seconds(collective, self.program.algorithm, ranks, nbytes, self.calibration)
        return choice.by_links(collective, self.program.algorithm, ranks, nbytes, self.latency, 1 / self.bandwidth)

    def size(self, rank: int, value: Value) -> int:
        value = home(value)
        if value.kind in ("served", "served_state", "pushed"):
            return self._size_on_server(rank, value)
        if value.microbatch >= 0:
            rows = self.rows(rank, value.microbatch)
            if self.program.forms and (table := self._table_of(value)):
                return table[rows][value.index] if rows else 0
            tables = {
                "output": self.profile.output_bytes,
                "grad_output": self.profile.grad_output_bytes,
                "saved": self.profile.saved_bytes,
                "saved_weight": self.profile.saved_weight_bytes,
                "carry": self.profile.carry_bytes,
                "grad_carry": self.profile.grad_carry_bytes,
            }
            return tables[value.kind][rows][self.program.source(value)] if rows else 0
        sizes = {
            "param": self.profile.parameter_bytes,
            "grad": self.profile.gradient_bytes,
            "optimizer_state": self.profile.optimizer_bytes,
        }
        if value.kind in sizes and value.index not in self.program.sharded:
            if value.kind == "optimizer_state" and self.program.narrow:
                return 2 * (sizes[value.kind][value.index] + self.profile.gradient_bytes[value.index])
            return sizes[value.kind][value.index]
        return self._size_of_slice(value)

    def _table_of(self, value: Value) -> dict[int, tuple[int, ...]]:
        """With tensor parallelism, the sizes of an output or a gradient that is not in its own node's form."""
        forms, profile = self.program.forms, self.profile
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

    def _size_on_server(self, rank: int, value: Value) -> int:
        """Bytes of a parameter server's part of a group: of its parameters, a gradient, or its optimizer's state."""
        if not self._shares and self.program.serving is not None:
            self._shares.extend(shares_of(self.program.groups, self.program.serving.servers))
        g = value.index
        part = self._shares[rank - self.program.workers].get(g, 0)
        whole = max(1, self.profile.gradient_bytes[g])
        return self.profile.optimizer_bytes[g] * part // whole if value.kind == "served_state" else part

    def _size_of_slice(self, value: Value) -> int:
        """Bytes of a value of a sharded group (slices are padded to equal size), or of no group.

        With precision=bf16 the profile has bfloat16 parameters, but slices are float32, so they are twice as large.
        """
        if value.kind == "norm":
            return 8
        if value.kind == "residual":  # (with precision=bf16 it is float32)
            return self.profile.gradient_bytes[value.index] * (2 if self.program.narrow else 1)
        g = value.index
        n = max(1, self.program.holders[g] // self.program.sharing)
        whole = self.profile.gradient_bytes[g]
        frozen = self.profile.parameter_bytes[g] - whole
        part = -(-whole // (4 * n)) * 4
        wide = 2 if self.program.narrow else 1
        master = part * wide if wide > 1 and g not in self.program.scattered else 0
        sizes = {
            "param": part * n + (0 if g in self.program.scattered else frozen),
            "param_shard": part * wide + frozen,
            "grad": whole,
            "grad_shard": part * wide,
            "buffer": part * n,
            "optimizer_shard": -(-self.profile.optimizer_bytes[g] // n) * wide + master,
        }
        return sizes[value.kind]
