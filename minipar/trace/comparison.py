"""Two traces of one program side by side, instruction by instruction: usually the measured one under the predicted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minipar.errors import MiniparError
from minipar.program import Op
from minipar.trace import Event, Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from minipar_widgets import Timeline


#: How long an instruction took against the other trace; below these shares of its time there it counts so.
LEVELS = (("much shorter", 0.75), ("shorter", 0.95), ("alike", 1.05), ("longer", 1.25), ("much longer", float("inf")))


def comparable(a: Trace, b: Trace) -> bool:
    """Whether two traces are of the same instructions."""
    return [[i[:4] for i in row] for row in a.program.ranks] == [[i[:4] for i in row] for row in b.program.ranks]


def level(duration: float, other: float) -> int:
    """The position in `LEVELS` of a duration against another one."""
    if other <= 0:
        return 2 if duration <= 0 else 4
    return next(k for k, (_, most) in enumerate(LEVELS) if duration / other <= most)


def levels(trace: Trace, other: Trace, rank: int) -> list[tuple[float, float, int]]:
    """Each compute instruction of a rank as it ran: start, end, and its `level` against the other trace."""
    times = trace.starts[rank], trace.ends[rank], other.starts[rank], other.ends[rank]
    found = zip(trace.program.ranks[rank], *times, strict=True)
    return [(a, b, level(b - a, d - c)) for ins, a, b, c, d in found if ins.stream == "compute" and b > a]


@dataclass(frozen=True)
class Comparison:
    """Two traces of one program: `trace` (usually measured) under `other` (usually predicted)."""

    trace: Trace
    other: Trace

    def __post_init__(self) -> None:
        if not comparable(self.trace, self.other):
            raise MiniparError(
                f"compare: the traces are of different programs ({self.trace.program.name!r}, "
                f"{self.other.program.name!r}); only the same instructions can be compared"
            )

    def rows(self) -> list[tuple[Event, Event]]:
        """Each instruction as it ran in both, rank by rank."""
        return list(zip(self.trace.events, self.other.events, strict=True))

    def table(self, limit: int = 20) -> str:
        """The instructions whose durations differ most, as text. (Receives are left out, because they have no
        duration.)"""
        from minipar.trace import labels

        clock = labels.clock([self.trace])
        rows = [pair for pair in self.rows() if pair[0].instruction.op is not Op.RECV]
        rows.sort(key=lambda pair: -abs(pair[0].duration - pair[1].duration))
        unit = clock.unit if clock.unit == "ms" else "  "
        lines = [f"{'rank':>4} {'instruction':<28} {self.trace.kind:>12} {self.other.kind:>12} {'difference':>12}"]
        for a, b in rows[:limit]:
            x, y = a.duration * clock.scale, b.duration * clock.scale
            lines.append(f"{a.rank:>4} {a.instruction!s:<28} {x:>9.3f} {unit} {y:>9.3f} {unit} {x - y:>+9.3f} {unit}")
        return "\n".join(line.rstrip() for line in lines)

    def summary(self) -> str:
        """One line on how well the two agree."""
        from minipar.trace import labels

        ratio = self.trace.time / self.other.time if self.other.time else float("nan")
        times = [f"{labels.duration(trace, trace.time)} {trace.kind}" for trace in (self.trace, self.other)]
        return (
            f"time {', '.join(times)} "
            f"({ratio:.2f}x); bubble of total {self.trace.bubble_of_total():.1%} and {self.other.bubble_of_total():.1%}"
        )

    def __repr__(self) -> str:
        return f"<{self.summary()}>"

    def plot(self, **options: Any) -> Figure:
        """Both timelines on one time axis, the prediction outlined above, the measurement filled below."""
        from minipar.trace import drawing

        return drawing.draw([self.other, self.trace], **options)

    def show(self, **options: Any) -> Timeline:
        """Both timelines as an interactive picture, with the difference of each instruction:
        `minipar_widgets.Timeline`."""
        from minipar_widgets import Timeline

        return Timeline(self.trace, self.other, **options)
