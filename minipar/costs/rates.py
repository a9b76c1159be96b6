"""What a calibration measured of a cluster, as plain numbers: rates of computing, of messages, of collectives.

`minipar.calibrate` (in `execution/measuring/calibration.py`) measures them. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median
from typing import NamedTuple

from minipar.errors import PlanError
from minipar.wording import several


class LinearCost(NamedTuple):
    """Seconds for moving bytes: `fixed + size * per_byte`, both at least 0."""

    fixed: float
    per_byte: float

    def at(self, size: float) -> float:
        """Seconds for `size` bytes."""
        return self.fixed + size * self.per_byte

    @property
    def bandwidth(self) -> float:
        """Bytes a second of a very long message; infinite if bytes cost nothing."""
        return 1 / self.per_byte if self.per_byte else math.inf

    def __str__(self) -> str:
        return f"{self.fixed * 1e6:8.1f} us  {self.bandwidth / 1e9:8.2f} GB/s"


def fit(points: Sequence[tuple[float, float]]) -> LinearCost:
    """The line through points (bytes, seconds) with the least squares of *relative* errors, so that short messages
    count as much as long ones. Errors: PlanError for seconds that are not positive."""
    if not points or any(not 0 < seconds < math.inf for _, seconds in points):
        raise PlanError(f"fit: needs positive finite seconds, not {[seconds for _, seconds in points]}")
    u = [1 / seconds for _, seconds in points]
    v = [size / seconds for size, seconds in points]
    uu, vv, uv = (math.fsum(a * b for a, b in zip(*pair, strict=True)) for pair in ((u, u), (v, v), (u, v)))
    if vv == 0:
        return LinearCost(math.fsum(u) / uu, 0.0)
    determinant = uu * vv - uv * uv
    if determinant > 1e-12 * uu * vv:
        fixed = (math.fsum(u) * vv - math.fsum(v) * uv) / determinant
        per_byte = (math.fsum(v) * uu - math.fsum(u) * uv) / determinant
        if fixed >= 0 and per_byte >= 0:
            return LinearCost(fixed, per_byte)
        if per_byte < 0:
            return LinearCost(math.fsum(u) / uu, 0.0)
    return LinearCost(0.0, math.fsum(v) / vv)


FREE = LinearCost(0.0, 0.0)


def _as_ring(known: Mapping[int, LinearCost], members: int, size: float) -> float:
    """Seconds of a collective over so many ranks, by the lines of those numbers that are known: of another number the
    nearest one is scaled as for a ring."""
    near = min(known, key=lambda n: (abs(n - members), n))
    line = known[near]
    steps, share = (members - 1) / (near - 1), (members - 1) / members / ((near - 1) / near)
    return line.fixed * steps + line.per_byte * size * share


class Copies(NamedTuple):
    """Seconds for copying one tensor from the device to a slower tier, and back. The defaults are for an ordinary
    machine.
    """

    to_host: LinearCost = LinearCost(1e-4, 1 / 4e9)
    from_host: LinearCost = LinearCost(1e-4, 1 / 4e9)
    to_disk: LinearCost = LinearCost(2e-3, 1 / 4e8)
    from_disk: LinearCost = LinearCost(2e-3, 1 / 4e8)


ORDINARY = Copies()


@dataclass(frozen=True)
class Calibration:
    """Rates of a cluster, measured on it. Times in seconds, sizes in bytes.

    device          "cpu" or "cuda"
    ranks           how many ranks were measured
    cores           CPU cores that the ranks share; None if each rank has a device of its own
    flops_of_one    floating-point operations a second of one rank's matrix product while the others wait
    flops_of_each   the same on each rank while all compute
    concurrency     how many times the work of one rank alone all ranks do together: at least 1, at most `ranks` and
                    `cores`. It is less than both if ranks slow each other down (caches, memory, switches)
    links           (a, b, line) for each measured pair of ranks: the time of a message from its start to its arrival
    send, receive   the part of that time in which the sending or receiving rank works, and can do nothing else
    allreduce       (size of the group, time of a sum over it), while all groups of that size do the same
    exchange        (size of the group, time of a message to the next rank of the group together with one from the rank
                    before, time of each further message that follows at once), while all groups do the same
    uncontended     time of such a message while no other rank sends
    add             time of adding what was received, while all ranks add
    hosts           by rank, the number of its host; empty: all are on one. Ranks of two hosts share the cable between
                    them. `links` then has one pair of ranks for each two hosts
    filling         how much of the cable's rate one message between two hosts takes: 1 if it leaves nothing for others
    across          (collective, size of the group, its time) for groups that are on several hosts: one rank of each
                    host, and all ranks
    """

    device: str
    ranks: int
    cores: int | None
    flops_of_one: float
    flops_of_each: float
    concurrency: float
    links: tuple[tuple[int, int, LinearCost], ...]
    send: LinearCost
    receive: LinearCost
    allreduce: tuple[tuple[int, LinearCost], ...]
    exchange: tuple[tuple[int, LinearCost, LinearCost], ...] = ()
    uncontended: LinearCost = FREE
    add: LinearCost = FREE
    hosts: tuple[int, ...] = ()
    filling: float = 1.0
    across: tuple[tuple[str, int, LinearCost], ...] = ()

    def hosts_of(self, ranks: Iterable[int]) -> frozenset[int]:
        """The hosts of these ranks."""
        return frozenset(self.hosts[rank] if rank < len(self.hosts) else 0 for rank in ranks)

    def message(self, a: int, b: int) -> LinearCost:
        """The cost of a message between two ranks. If this link was not measured: the median of those between the same
        hosts, or of those that also stay in a host or leave it, or of all."""
        at = self.hosts_of((a, b))
        found = [line for c, d, line in self.links if {a, b} == {c, d}]
        found = found or [line for c, d, line in self.links if self.hosts_of((c, d)) == at]
        found = found or [line for c, d, line in self.links if len(self.hosts_of((c, d))) == len(at)]
        found = found or [line for *_, line in self.links]
        if not found:
            raise PlanError(f"calibration of {self.ranks} rank: knows no links; calibrate a cluster of 2 or more ranks")
        return LinearCost(median(line.fixed for line in found), median(line.per_byte for line in found))

    def transfer(self, a: int, b: int, size: float) -> tuple[float, float]:
        """(seconds that a message occupies its link, seconds until it arrives), without the work of the two ranks."""
        line = self.message(a, b)
        occupied = size * (line.per_byte - self.send.per_byte - self.receive.per_byte)
        return max(0.0, occupied), max(0.0, line.fixed - self.send.fixed - self.receive.fixed)

    def sum_over(self, members: int, size: float) -> float:
        """Seconds of an allreduce of `size` bytes over so many ranks; of one host, where they fit on it. For a number
        of ranks that was not measured, the nearest one is scaled as for a ring."""
        if members < 2:
            return 0.0
        known = {n: line for kind, n, line in self.across if kind == "allreduce"} | dict(self.allreduce)
        if not known:
            raise PlanError(
                f"calibration of {self.ranks} rank: knows no collectives; calibrate a cluster of 2 or more ranks"
            )
        return _as_ring(known, members, size)

    def collective(self, kind: str, group: Sequence[int], size: float) -> float | None:
        """Seconds of an "allreduce", "all_gather" or "reduce_scatter" of `size` bytes over a group that is on several
        hosts. None for a group on one host, and where none was measured."""
        known = {n: line for name, n, line in self.across if name == kind}
        return _as_ring(known, len(group), size) if known and len(self.hosts_of(group)) > 1 else None

    def exchanged(self, members: int) -> tuple[LinearCost, LinearCost]:
        """The cost of a message in a collective of so many ranks, while all of them send; and of each further message.

        Errors: PlanError if none were measured."""
        known = {n: (one, further) for n, one, further in self.exchange}
        if not known:
            raise PlanError(f"calibration of {self.ranks} rank: knows no exchanges; calibrate a cluster of 2 or more")
        return known[min(known, key=lambda n: (abs(n - members), n))]

    def _rows(self) -> list[tuple[str, str]]:
        where = "a device each" if self.cores is None else several(self.cores, "core")
        machines = f" of {several(len(set(self.hosts)), 'host')}" if self.hosts else ""
        rows = [
            ("ranks", f"{self.ranks} on {self.device}, {where}{machines}"),
            (
                "matrix product",
                f"{self.flops_of_one / 1e9:.1f} GFLOP/s alone, {self.flops_of_each / 1e9:.1f} each of all",
            ),
            ("all together do", f"the work of {self.concurrency:.2f} ranks"),
        ]
        rows += [(f"message {a} - {b}", str(line)) for a, b, line in self.links]
        if self.links:
            rows += [("  of it, the sender works", str(self.send)), ("  of it, the receiver works", str(self.receive))]
            rows += [
                ("adding what was received", str(self.add)),
                ("message of a collective alone", str(self.uncontended)),
            ]
        for n, one, more in self.exchange:
            rows += [(f"exchange among {n}", str(one)), ("  each further message", str(more))]
        rows += [(f"allreduce over {n}", str(line)) for n, line in self.allreduce]
        rows += [(f"{kind} over {n}, across hosts", str(line)) for kind, n, line in self.across]
        if self.across:
            rows += [("a message between hosts takes", f"{self.filling:.0%} of the cable's rate")]
        return rows

    def __str__(self) -> str:
        """One line for each rate: the fixed time of a message, and its bytes a second."""
        rows = self._rows()
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name.ljust(width)}  {text}" for name, text in rows)

    def _repr_html_(self) -> str:
        """The table that a notebook shows."""
        rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in self._rows())
        return f"<table>{rows}</table>"
