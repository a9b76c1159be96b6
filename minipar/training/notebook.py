"""What a notebook shows of a run: a table of its ranks, and a small picture. Elsewhere a run is one line."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING, Any

from minipar.trace import Trace
from minipar.trace.memory_series import ALL_KINDS, Peak, mib
from minipar.trace.webpage import table

if TYPE_CHECKING:
    from minipar.training.training import Run

MANY = 5_000  # instructions; a picture of more takes seconds, and shows nothing at this size


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
        return ranks + _image(memory_picture.owners(self.trace, most, f"memory of rank {most}, which needs most"))

    def _moment(self, rank: int, peak: Peak) -> str:
        return str(self.trace.program.ranks[rank][peak.index]) if peak.index >= 0 else "what is there before the step"


def html(run: Run) -> str:
    """The run as HTML: its line, what each rank did in the traced step, and the step measured beside predicted."""
    from minipar.trace import drawing

    trace, predicted = run.trace, run.predicted
    idle, expected = ([1 - busy / one.time if one.time else 0.0 for busy in one.busy] for one in (trace, predicted))
    rows = [
        (rank, f"{idle[rank]:.1%}", f"{expected[rank]:.1%}", mib(run.peak_memory[rank]), mib(run.bytes_sent[rank]))
        for rank in range(len(trace.program.ranks))
    ]
    ranks = table(("rank", "idle", "idle, predicted", "peak memory", "sent in a step"), rows, "the measured step")
    small = len(trace.program) + len(predicted.program) <= MANY
    shown = _image(drawing.draw([predicted, trace], width=8, memory=False)) if small else ""
    return f"<p>{escape(repr(run).strip('<>'))}</p>{ranks}{shown}"


def _image(figure: Any) -> str:
    """A picture as part of a page. It is as small as one that a notebook shows by itself."""
    data, about = figure._repr_mimebundle_()
    one = about["image/png"]
    return f'<img src="data:image/png;base64,{data["image/png"]}" width="{one["width"]}" alt="{escape(one["alt"])}">'
