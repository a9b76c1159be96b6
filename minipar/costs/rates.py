"""What a calibration found of a cluster, as plain numbers: rates of computing, of messages, of collectives.

`minipar.calibrate` (in `execution/measuring/calibration.py`) fills it. No torch here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from statistics import median
from typing import Any, NamedTuple

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
        """Bytes a second of what is very long; infinite where bytes cost nothing."""
        return 1 / self.per_byte if self.per_byte else math.inf

    def __str__(self) -> str:
        return f"{self.fixed * 1e6:8.1f} us  {self.bandwidth / 1e9:8.2f} GB/s"


def fit(points: Sequence[tuple[float, float]]) -> LinearCost:
    """The line through (bytes, seconds) with the least squares of *relative* errors: short messages count as much as
    long ones. Errors: PlanError for seconds that are not positive."""
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


_FREE = LinearCost(0.0, 0.0)


class Copies(NamedTuple):
    """Seconds of copying one tensor away from the device and back, by tier. The defaults are an ordinary machine's."""

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
    cores           CPU cores that the ranks share; None where each has a device of its own
    flops_alone     floating-point operations a second of one rank's matrix product while the others wait
    flops_together  the same on each rank while all compute
    concurrency     how many ranks' worth of work all ranks together get done: at least 1, at most `ranks` and `cores`;
                    less than both where ranks that compute at once are in each other's way (caches, memory, switches)
    links           (a, b, line) for each pair of ranks that was measured: a message from hand-over to arrival
    send, receive   the part of that in which the sending or receiving rank itself works, and can do nothing else
    allreduce       by size of the group: the time of a sum over it, while all groups of that size are at it
    exchange        the same of a message to the next rank of the group, and one from the rank before; and what each
                    further message takes that follows at once
    alone           the same of one message while no one else sends
    add             adding what was received, while all ranks do it
    """

    device: str
    ranks: int
    cores: int | None
    flops_alone: float
    flops_together: float
    concurrency: float
    links: tuple[tuple[int, int, LinearCost], ...]
    send: LinearCost
    receive: LinearCost
    allreduce: tuple[tuple[int, LinearCost], ...]
    exchange: tuple[tuple[int, LinearCost, LinearCost], ...] = ()
    alone: LinearCost = _FREE
    add: LinearCost = _FREE

    def message(self, a: int, b: int) -> LinearCost:
        """Seconds of a message between two ranks; the median of all links where that one was not measured."""
        found = [line for c, d, line in self.links if {a, b} == {c, d}] or [line for *_, line in self.links]
        if not found:
            raise PlanError(f"calibration of {self.ranks} rank: knows no links; calibrate a cluster of 2 or more ranks")
        return LinearCost(median(line.fixed for line in found), median(line.per_byte for line in found))

    def transfer(self, a: int, b: int, size: float) -> tuple[float, float]:
        """(seconds that a message occupies its link, seconds until it arrives), besides the work of the two ranks."""
        line = self.message(a, b)
        occupied = size * (line.per_byte - self.send.per_byte - self.receive.per_byte)
        return max(0.0, occupied), max(0.0, line.fixed - self.send.fixed - self.receive.fixed)

    def sum_over(self, members: int, size: float) -> float:
        """Seconds of an allreduce of `size` bytes over so many ranks; a ring is assumed between measured numbers."""
        if members < 2:
            return 0.0
        known = dict(self.allreduce)
        if not known:
            raise PlanError(
                f"calibration of {self.ranks} rank: knows no collectives; calibrate a cluster of 2 or more ranks"
            )
        near = min(known, key=lambda n: (abs(n - members), n))
        line = known[near]
        steps, share = (members - 1) / (near - 1), (members - 1) / members / ((near - 1) / near)
        return line.fixed * steps + line.per_byte * size * share

    def exchanged(self, members: int) -> tuple[LinearCost, LinearCost]:
        """Of a collective's messages among so many ranks, all of them at it: the time of one, and of each further one.
        PlanError where none were measured."""
        known = {n: (one, further) for n, one, further in self.exchange}
        if not known:
            raise PlanError(f"calibration of {self.ranks} rank: knows no exchanges; calibrate a cluster of 2 or more")
        return known[min(known, key=lambda n: (abs(n - members), n))]

    def to_json(self) -> str:
        """One JSON object; `from_json` reads it."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Calibration:
        """The calibration that `to_json` wrote. Errors: PlanError for text that is none."""
        try:
            given: dict[str, Any] = json.loads(text)
            given["links"] = tuple((a, b, LinearCost(*line)) for a, b, line in given["links"])
            given["allreduce"] = tuple((n, LinearCost(*line)) for n, line in given["allreduce"])
            given["exchange"] = tuple((n, LinearCost(*one), LinearCost(*more)) for n, one, more in given["exchange"])
            for name in ("send", "receive", "alone", "add"):
                given[name] = LinearCost(*given[name])
            return Calibration(**given)
        except (ValueError, TypeError, KeyError) as error:
            kind = type(error).__name__
            raise PlanError(
                f"calibration: not what Calibration.to_json wrote ({kind}: {error}); measure it anew"
            ) from None

    def _rows(self) -> list[tuple[str, str]]:
        where = "a device each" if self.cores is None else several(self.cores, "core")
        rows = [
            ("ranks", f"{self.ranks} on {self.device}, {where}"),
            (
                "matrix product",
                f"{self.flops_alone / 1e9:.1f} GFLOP/s alone, {self.flops_together / 1e9:.1f} each of all",
            ),
            ("all together do", f"the work of {self.concurrency:.2f} ranks"),
        ]
        rows += [(f"message {a} - {b}", str(line)) for a, b, line in self.links]
        if self.links:
            rows += [("  of it, the sender works", str(self.send)), ("  of it, the receiver works", str(self.receive))]
            rows += [("adding what was received", str(self.add)), ("message of a collective alone", str(self.alone))]
        for n, one, more in self.exchange:
            rows += [(f"exchange among {n}", str(one)), ("  each further message", str(more))]
        return rows + [(f"allreduce over {n}", str(line)) for n, line in self.allreduce]

    def __str__(self) -> str:
        """One line for each rate: seconds for the shortest, bytes a second for the longest."""
        rows = self._rows()
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name.ljust(width)}  {text}" for name, text in rows)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in self._rows())
        return f"<table>{rows}</table>"
