"""Costs from a profile: what a program would cost with this model's layers, measured one at a time on one device."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from minipar.costs.measured import Profile
from minipar.program import Instruction, Op, Program, Value


def split_rows(total: int, parts: int) -> list[range]:
    """`total` rows in `parts` runs of neighbours whose lengths differ by at most one, the longer ones first."""
    even, more = divmod(total, parts)
    edges = [k * even + min(k, more) for k in range(parts + 1)]
    return [range(a, b) for a, b in pairwise(edges)]


def microbatch_rows(batch: int, replicas: int, microbatches: int) -> tuple[int, ...]:
    """The different numbers of rows that micro-batches of a step have: what a profile must measure."""
    return tuple(sorted({len(r) for r in split_rows(batch, replicas * microbatches)} - {0}))


@dataclass(frozen=True)
class ProfiledCosts:
    """Seconds and bytes of a program's instructions and values, for a step of `batch` rows.

    latency     seconds that a message needs, however short
    bandwidth   bytes a second of every link

    The defaults are what gloo reaches over the loopback of an ordinary machine.
    """

    program: Program
    profile: Profile
    batch: int
    latency: float = 2e-4
    bandwidth: float = 1.5e9
    _rows: list[range] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._rows.extend(split_rows(self.batch, self.program.replicas * self.program.microbatches))

    def rows(self, rank: int, microbatch: int) -> int:
        """Rows of a micro-batch of the rank's replica."""
        return len(self._rows[self.program.replica(rank) * self.program.microbatches + microbatch])

    def rows_of(self, rank: int) -> int:
        """Rows of a step that the rank's replica works on."""
        return sum(self.rows(rank, i) for i in range(self.program.microbatches))

    def compute(self, rank: int, ins: Instruction) -> float:
        if ins.op is Op.STEP:
            whole = sum(self.profile.gradient_bytes)
            part = sum(self.profile.gradient_bytes[g] for g in ins.layers)
            return self.profile.step_seconds * part / whole if whole else 0.0
        rows = self.rows(rank, ins.microbatch)
        if rows == 0:
            return 0.0
        table = self.profile.forward if ins.op in (Op.FORWARD, Op.RECOMPUTE) else self.profile.backward
        return sum(table[rows][layer] for layer in ins.layers)

    def transfer(self, rank: int, ins: Instruction) -> tuple[float, float]:
        size = self.size(rank, ins.reads[0])
        return (size / self.bandwidth, self.latency) if size else (0.0, 0.0)

    def collective(self, ins: Instruction) -> float:
        n = len(ins.group)
        size = sum(self.size(ins.group[0], value) for value in ins.writes)
        return len(ins.parts) * 2 * (n - 1) * self.latency + 2 * (n - 1) / n * size / self.bandwidth

    def size(self, rank: int, value: Value) -> int:
        if value.microbatch >= 0:
            rows = self.rows(rank, value.microbatch)
            tables = {
                "output": self.profile.output_bytes,
                "grad_output": self.profile.grad_output_bytes,
                "saved": self.profile.saved_bytes,
            }
            return tables[value.kind][rows][value.index] if rows else 0
        sizes = {
            "param": self.profile.parameter_bytes,
            "grad": self.profile.gradient_bytes,
            "optimizer_state": self.profile.optimizer_bytes,
        }
        return sizes[value.kind][value.index]
