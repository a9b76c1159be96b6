"""Seconds of messages on links of one kind, for all that predict: a latency, and bytes / bandwidth.

A ring passes parts on: each of n ranks sends n - 1 messages, which together have (n - 1) / n of the bytes. This is an
all-gather, or a reduce-scatter; a sum is both, one after the other.
"""

from __future__ import annotations

from typing import NamedTuple


class Line(NamedTuple):
    """A link: seconds before a message arrives, and bytes a second; None: infinitely many."""

    latency: float
    bandwidth: float | None

    def occupied(self, size: float) -> float:
        """Seconds for which so many bytes occupy the link."""
        return size / self.bandwidth if self.bandwidth else 0.0

    def message(self, size: float) -> tuple[float, float]:
        """(seconds that a message occupies the link, seconds after that before it arrives); nothing takes no time."""
        return (self.occupied(size), self.latency) if size else (0.0, 0.0)

    def ring(self, ranks: int, size: float, messages: int = 1) -> float:
        """Seconds of one way around a ring of ranks, in which `size` bytes are gathered or summed in so many parts."""
        return messages * (ranks - 1) * self.latency + self.occupied((ranks - 1) / ranks * size)
