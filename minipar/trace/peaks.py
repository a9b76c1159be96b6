"""The peaks of all ranks, which a notebook shows as a table, with a picture of the rank that needs most."""

from __future__ import annotations

from collections.abc import Iterable

from minipar.trace import Trace
from minipar.trace.memory_series import ALL_KINDS, Peak, mib
from minipar.trace.tables import image, table


class Peaks(list[Peak]):
    """`Run.memory`: for each rank its measured peak. A notebook shows them as a table, and the rank that needs most as
    a picture."""

    def __init__(self, peaks: Iterable[Peak], trace: Trace) -> None:
        super().__init__(peaks)
        self.trace = trace

    def __repr__(self) -> str:
        """A line for each rank."""
        held = (", ".join(f"{kind} {mib(size)}" for kind, size in peak.by_kind.items() if size) for peak in self)
        return "\n".join(
            f"rank {rank}: {mib(peak.bytes)} in {self._moment(rank, peak)}: {kinds}"
            for rank, (peak, kinds) in enumerate(zip(self, held, strict=True))
        )

    def _repr_html_(self) -> str:
        from minipar.trace import memory_picture

        kinds = [kind for kind in ALL_KINDS if any(peak.by_kind[kind] for peak in self)]
        rows = [
            (rank, mib(peak.bytes), self._moment(rank, peak), *(mib(peak.by_kind[kind]) for kind in kinds))
            for rank, peak in enumerate(self)
        ]
        most = max(range(len(self)), key=lambda rank: self[rank].bytes)
        ranks = table(("rank", "peak", "reached in", *kinds), rows, "measured peak of each rank, and what held it")
        return ranks + image(memory_picture.owners(self.trace, most, f"memory of rank {most}, which needs most"))

    def _moment(self, rank: int, peak: Peak) -> str:
        return str(self.trace.program.ranks[rank][peak.index]) if peak.index >= 0 else "what is there before the step"
