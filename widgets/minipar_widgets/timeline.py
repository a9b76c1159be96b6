"""Timeline: one trace, or a measured one under its prediction, as a picture with zoom, keys and details of events.

Timeline(simulate("pp=4 microbatches=8"))           a trace
Timeline(run), Timeline(run.trace, run.predicted)   a run: what was measured under what was predicted
Timeline(run.trace.compare(other))                  a comparison
"""

from __future__ import annotations

import os
import threading
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from minipar.errors import MiniparError, PlanError
from minipar.trace import Trace, labels
from minipar.trace.comparison import Comparison, level
from minipar.trace.drawing import FEW_RANKS
from minipar.trace.figure import plain
from minipar.trace.idleness import REASONS, idle_split
from minipar.trace.shades import Shades
from minipar.wording import several
from minipar_widgets.base import View
from minipar_widgets.columns import KINDS, MOST, Columns, columns, labelled
from minipar_widgets.details import Arrays, details
from minipar_widgets.host import traitlets
from minipar_widgets.packing import pack

if TYPE_CHECKING:
    from minipar.training.training import Run

AT_ONCE = 3_000  # up to so many events, the details come with the first picture; else the page asks for them later
LARGE = 30_000  # with more events, the words and the static picture leave out memory, which takes seconds to find
MANY = 300_000  # with more events, there are no texts, causes, idle times and memory curves


class Timeline(View):
    """A lane per rank and stream, and the memory under it.

    trace      a trace, predicted or measured; a run, which is shown under its prediction; or a comparison
    predicted  another trace of the same ranks, drawn above it, instruction by instruction if the programs are equal
    capacity   of the devices, in the unit of the memory (bytes), drawn as a line in the memory

    `update` shows another trace; `window` is the visible part, in the unit of the time axis; `selected` names the
    chosen event. If a trace cannot be drawn, the widget shows the reason instead.
    """

    name = "timeline"
    at_once = AT_ONCE  # an explorer sets a lower number, since it has little time
    _hurry = False  # whether the full table may come later, with the details
    about = traitlets.Dict().tag(sync=True)
    data = traitlets.Bytes(b"").tag(sync=True)
    more = traitlets.Dict().tag(sync=True)
    details = traitlets.Bytes(b"").tag(sync=True)
    window: Any = traitlets.List().tag(sync=True)
    selected = traitlets.Unicode("").tag(sync=True)

    def __init__(
        self, trace: Trace | Comparison | Run, predicted: Trace | None = None, capacity: float | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        for name, value in options.items():
            if not self.has_trait(name):  # (ipywidgets would leave it out in silence)
                raise PlanError(f"{name}={value!r}: no argument of Timeline; possible are predicted, capacity, layout")
        self._lock = threading.RLock()  # a page may ask (in a subshell) while a running cell shows another trace
        super().__init__(**options)
        self.on_msg(self._asked)
        self.update(trace, predicted, capacity)

    def update(
        self, trace: Trace | Comparison | Run, predicted: Trace | None = None, capacity: float | None = None
    ) -> None:
        """Show another trace, or two."""
        with self._lock:
            self._update(*_two(trace, predicted), capacity)

    def _update(self, trace: Trace, predicted: Trace | None, capacity: float | None) -> None:
        self.traces = [trace] if predicted is None else [predicted, trace]
        self.capacity = capacity
        self.found: tuple[Arrays, dict[str, Any]] | None = None
        with self.hold_sync():
            self.more, self.details = {}, b""
            try:
                self._check()
                self.columns = columns(self.traces)
                self.problem = ""
                self._fill(self.columns)
                if len(self.columns) <= self.at_once:
                    self.find_details()
                self._hurry = bool(self.about["later"])
            except MiniparError as error:
                self.problem, self.about = str(error), {}
            self.refresh()
        self._hurry = False

    def _check(self) -> None:
        if not all(isinstance(trace, Trace) for trace in self.traces):
            kinds = ", ".join(type(trace).__name__ for trace in self.traces)
            raise MiniparError(
                f"Timeline shows a Trace, not {kinds}; possible are simulate(...), a run, a comparison, from_kineto"
            )
        count = sum(len(trace.program) for trace in self.traces)
        if count > MOST:
            raise MiniparError(
                f"{count:,} events are more than one picture can show; possible are {MOST:,}: fewer ranks, steps or "
                "micro-batches show the same pattern"
            )
        labels.check(self.traces)

    @property
    def same(self) -> bool:
        """Whether there are two traces of one program, so that instructions can be compared."""
        if len(self.traces) < 2:
            return False
        try:
            Comparison(self.traces[1], self.traces[0])
        except MiniparError:
            return False
        return True

    def _fill(self, found: Columns) -> None:
        clock = labels.clock(self.traces)
        shown = {plain(KINDS[code]) for code in set(found.kind)}
        arrays = {key: getattr(found, key) for key in ("start", "length", "kind", "number", "index")}
        self.data, layout = pack(arrays)
        large, light = len(found) > LARGE, len(found) > MANY
        unit = 2**20 if self.traces[0].unit == "bytes" else 1
        self.about = {
            "layout": layout,
            "unit": clock.unit,
            "kinds": KINDS,
            "shown": [kind for kind in KINDS if kind in shown],
            "said": labels.legend(KINDS, labels.names(self.traces)),
            "shades": self._shades(),
            "per": found.per_step,
            "traces": labels.names(self.traces),
            "same": self.same,
            "span": max(t.time for t in self.traces) * clock.scale,
            "spans": [t.time * clock.scale for t in self.traces],
            "ranks": len(self.traces[0].program.ranks),
            "places": self._places(),
            "names": self._names(),
            "folded": self._folds(),
            "lanes": [
                [lane.trace, lane.rank, lane.stream, lane.first, lane.last, labelled(found, lane)]
                for lane in found.lanes
            ],
            "large": large,
            "light": light,
            "later": not light and len(found) > self.at_once,
            "highest": 0 if large else self._highest(),
            "capacity": self.capacity / unit if self.capacity else 0,
            "memory": not light and (large or any(max(trace.peak_memory()) for trace in self.traces)),
        }

    def _places(self) -> list[str]:
        """Where the ranks are on the mesh, if they share layers; otherwise nothing."""
        program = self.traces[0].program
        return [labels.place(program, rank) for rank in range(len(program.ranks))] if program.sharing > 1 else []

    def _names(self) -> list[str]:
        """What the ranks are called, where that is not `rank 3`."""
        program = self.traces[0].program
        names = [labels.rank_name(program, rank) for rank in range(len(program.ranks))] if program.serving else []
        return [f"{name} (rank {rank})" if name[0] == "s" else name for rank, name in enumerate(names)]

    def _shades(self) -> list[str]:
        """What the shades of bars stand for: chunks or directions."""
        return list(next((names for names in (Shades(trace.program).names for trace in self.traces) if names), ()))

    @property
    def levels(self) -> Sequence[int]:
        """For each event of a comparison, how long it took against its twin: a position in `comparison.LEVELS`."""
        found, first = self.columns, self.columns.places[0]
        kinds = array("B", b"\2" * len(found))
        for lane in found.lanes:
            if lane.trace and lane.stream == "compute":
                for k in range(lane.first, lane.last):
                    kinds[k] = level(found.length[k], found.length[first[lane.rank][found.index[k]]])
        return kinds

    def busier(self, rank: int) -> float:
        """How much more a rank computes in the second trace than in the first one."""
        first, second = (trace.busy[rank] for trace in self.traces)
        return second / first - 1 if first else 0.0

    def _folds(self) -> bool:
        """Whether a rank at first has one lane for both traces, with the difference under it."""
        return self.same and len(self.traces[0].program.ranks) > FEW_RANKS

    def _highest(self) -> int:
        """The rank with the highest memory."""
        peaks = self.traces[-1].peak_memory()
        return max(range(len(peaks)), key=peaks.__getitem__)

    def find_details(self) -> None:
        """Send texts, causes, idle times and memory, if they were not sent yet."""
        with self._lock:
            self._find_details()

    def _find_details(self) -> None:
        if self.found or self.problem or self.about["light"]:
            return
        self.found = arrays, facts = details(self.columns, self.about["memory"])
        with self.hold_sync():
            data, layout = pack(arrays)
            self.more = {**facts, "layout": layout, "highest": self._highest()}
            self.details = data
            if self.about["large"] or self.about["later"]:
                self.table = self.rows()  # now with the reasons of idle times, and with memory

    def _asked(self, _: Any, content: Any, __: Any) -> None:
        if content.get("want") == "details":
            self.find_details()

    def state(self) -> dict[str, Any]:
        self.find_details()
        return super().state()

    # words and picture -----------------------------------------------------------------------------------------------

    @property
    def _brief(self) -> bool:
        """Whether the words leave out memory: for large traces, and if no memory is known."""
        return bool(self.about["large"]) or not self.about["memory"]

    def summary(self) -> str:
        if not self._brief:
            return "; ".join(trace.summary() for trace in self.traces)
        return "; ".join(
            f"{t.kind} trace: {several(len(t.program.ranks), 'rank')}, "
            f"{several(len(t.program), 'instruction')}, {_times(t)}"
            for t in self.traces
        )

    def caption(self) -> str:
        lines, notes = [], []
        for trace, name in zip(self.traces, labels.names(self.traces), strict=True):
            if self._brief:
                note = f" · {len(trace.program):,} events: texts, causes and memory are shown of up to {MANY:,}"
                lines.append(f"{name}: {_times(trace)}{note if self.about['light'] else ''}")
            else:
                lines.append(f"{name}: {labels.facts(trace)}")
            notes += [trace.note] if trace.note else []
        return "\n".join(lines + notes)

    def rows(self) -> list[list[str]]:
        """For each rank and trace: busy and idle time, why it was idle, peak memory. (Large traces have the last two
        only after their details were found.)"""
        whole = self.found is not None or not (self.about["large"] or self._hurry)
        idle = [f"idle: {reason}" for reason in REASONS] if whole else []
        rows = [["trace", "rank", "busy", "idle", *idle, *(["peak memory"] if whole else [])]]
        for trace, name in zip(self.traces, labels.names(self.traces), strict=True):
            peaks = trace.peak_memory() if whole else []
            for rank, busy in enumerate(trace.busy):
                row = [name, str(rank), labels.duration(trace, busy), f"{labels.idle(trace, rank):.1%}"]
                if whole:
                    row += [labels.duration(trace, part) for part in idle_split(trace, rank).values()]
                    row.append(labels.amount(trace, peaks[rank]))
                rows.append(row)
        return rows

    def differences(self, limit: int = 20) -> str:
        """The instructions whose durations differ most between the two traces, as text."""
        if len(self.traces) < 2:
            raise MiniparError("differences: there is one trace; Timeline(trace, predicted) compares two")
        return Comparison(self.traces[1], self.traces[0]).table(limit)

    def to_perfetto(self, path: str | os.PathLike[str] | None = None) -> str:
        """The trace (of two, the measured one) for ui.perfetto.dev, as `Trace.to_perfetto` gives it."""
        return self.traces[-1].to_perfetto(path)

    def picture(self, dark: bool | None = False) -> bytes:
        if not self.about["large"]:
            self.find_details()
        from minipar_widgets.raster import raster

        return raster(self, dark)


def _two(shown: Any, predicted: Trace | None) -> tuple[Any, Trace | None]:
    """The trace to show and the one above it, of a trace, a comparison, or a run (which has both). A second one that is
    given counts."""
    if isinstance(shown, Comparison):
        return shown.trace, predicted or shown.other
    if isinstance(trace := getattr(shown, "trace", None), Trace):
        return trace, predicted or getattr(shown, "predicted", None)
    return shown, predicted


def _times(trace: Trace) -> str:
    """The times of a trace, without memory, which would take long to find."""
    return (
        f"time {labels.duration(trace, trace.time)}, bubble {trace.bubble_of_total():.1%} of total "
        f"({trace.bubble_of_ideal():.1%} of ideal)"
    )
