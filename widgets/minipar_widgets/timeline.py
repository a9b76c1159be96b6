"""Timeline: one trace, or a measured one under its prediction, as a picture one can zoom, walk and ask."""

from __future__ import annotations

from typing import Any

import traitlets

from minipar import captions
from minipar.errors import MiniparError
from minipar.trace import Trace
from minipar_widgets import words
from minipar_widgets.base import View
from minipar_widgets.columns import KINDS, MOST, Columns, columns


class Timeline(View):
    """A lane per rank and stream, the memory under it.

    trace      what is shown: predicted or measured
    predicted  another trace of the same ranks, drawn above it, instruction for instruction if the programs are the same

    What cannot be drawn is said in words in the widget's place. `update(trace, predicted)` shows something else.
    """

    name = "timeline"
    about = traitlets.Dict().tag(sync=True)
    start = traitlets.Bytes(b"").tag(sync=True)
    length = traitlets.Bytes(b"").tag(sync=True)
    kind = traitlets.Bytes(b"").tag(sync=True)
    number = traitlets.Bytes(b"").tag(sync=True)

    def __init__(self, trace: Trace, predicted: Trace | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.update(trace, predicted)

    def update(self, trace: Trace, predicted: Trace | None = None) -> None:
        """Show another trace, or two."""
        self.traces = [trace] if predicted is None else [predicted, trace]
        with self.hold_sync():
            try:
                captions.check(self.traces)
                count = sum(len(t.program) for t in self.traces)
                if count > MOST:
                    raise MiniparError(f"{count:,} events are too many for one picture; possible are {MOST:,}")
                self._fill(columns(self.traces))
                self.problem = ""
            except MiniparError as error:
                self.problem = str(error)
            self.refresh()

    def _fill(self, found: Columns) -> None:
        self.columns = found
        clock = captions.clock(self.traces)
        self.start, self.length = found.start.tobytes(), found.length.tobytes()
        self.kind, self.number = found.kind.tobytes(), found.number.tobytes()
        self.about = {
            "unit": clock.unit,
            "kinds": KINDS,
            "traces": captions.names(self.traces),
            "span": max(t.time for t in self.traces) * clock.scale,
            "ranks": len(self.traces[0].program.ranks),
            "lanes": [[lane.trace, lane.rank, lane.stream, lane.first, lane.last] for lane in found.lanes],
        }

    def summary(self) -> str:
        return " | ".join(trace.summary() for trace in self.traces)

    def caption(self) -> str:
        return "\n".join(captions.facts(trace) for trace in self.traces)

    def rows(self) -> list[list[str]]:
        rows = [["trace", "rank", "busy", "idle", "peak memory"]]
        for trace, name in zip(self.traces, captions.names(self.traces), strict=True):
            for rank, peak in enumerate(trace.peak_memory()):
                busy = captions.duration(trace, trace.busy[rank])
                rows.append([name, str(rank), busy, f"{captions.idle(trace, rank):.1%}", captions.amount(trace, peak)])
        return rows

    def picture(self, dark: bool = False) -> bytes:
        return words.picture(self.caption(), dark)
