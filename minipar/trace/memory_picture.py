"""A picture of what a rank's memory holds over time: parameters, gradients, activations ... on top of each other.

    owners(run.trace)

A notebook shows the figure by itself, with a description in words. Kinds differ in colour and hatch. Timelines, with
memory as one curve per rank, are in `drawing.py`. matplotlib loads on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minipar.errors import MiniparError
from minipar.trace import Trace, labels
from minipar.trace.figure import INK, MEMORY, PAPER, picture, ruled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 9.0, 3.1  # inches
MOST = 2000  # steps of a curve; of a longer curve only the highest step of each run is drawn


HATCHES = {"gradients": "//", "activations": "\\\\", "buffers": "xx", "temporary": ".."}
KINDS = ("optimizer", "parameters", "data", "gradients", "activations", "buffers", "temporary")  # from the bottom up:
# memory that stays comes first


def owners(trace: Trace, rank: int = 0, title: str = "") -> Figure:
    """Memory of a rank over time, stacked by kind, with its peak marked. The trace must know bytes; best it has
    `series`.

    Errors: MiniparError for a trace without bytes, or without that rank.
    """
    import numpy as np

    if trace.unit != "bytes":
        raise MiniparError("owners: this trace counts activations, not bytes; possible is a run's, or costs=profile")
    if not 0 <= rank < len(trace.program.ranks):
        raise MiniparError(f"owners: rank={rank}; possible are 0 to {len(trace.program.ranks) - 1}")
    curve = trace.memory(rank)
    times = (np.array([*curve.times, trace.span[1]]) - trace.span[0]) * 1e3
    total = np.array([*curve.total, curve.total[-1]]) / 2**20
    peak = int(total.argmax())
    kept = _thinned(total, peak)
    shown = [kind for kind in KINDS if max(curve.kinds[kind], default=0) > 0]
    columns = [np.array([*curve.kinds[kind], curve.kinds[kind][-1]])[kept] / 2**20 for kind in shown]

    held = trace.peak_by_kind(rank)
    words = ", ".join(f"{kind} {labels.mebibytes(held[kind])} MiB" for kind in KINDS if held[kind])
    alt = (
        f"{trace.kind.capitalize()} memory of rank {rank} over {labels.duration(trace, trace.time)}, by kind: "
        f"at its peak {labels.mebibytes(total[peak] * 2**20)} MiB, of which {words}."
    )
    figure = picture()(figsize=(WIDTH, HEIGHT), dpi=100, facecolor=PAPER)
    figure.alt = alt  # type: ignore[attr-defined]
    axes = figure.add_axes((0.08, 0.16, 0.75, 0.72), facecolor=PAPER)
    ruled(axes, title or trace.program.name)
    faces = axes.stackplot(times[kept], *columns, step="post", labels=shown)
    for face, kind in zip(faces, shown, strict=True):
        face.set(facecolor=MEMORY[kind], edgecolor=INK, linewidth=0.3, hatch=HATCHES.get(kind, ""))
    axes.plot(times[peak], total[peak], "v", color=INK, markersize=6, zorder=5)
    axes.annotate(
        f"{labels.mebibytes(total[peak] * 2**20)} MiB", (times[peak], total[peak]), (0, 6),
        textcoords="offset points", size=8, color=INK, ha="center",
    )  # fmt: skip
    axes.set(xlim=(0, float(times[-1]) or 1), ylim=(0, float(total[peak]) * 1.18 or 1))
    axes.set_xlabel("time (ms)", color=INK, fontsize=8.5)
    axes.set_ylabel("memory (MiB)", color=INK, fontsize=8.5)
    names = axes.get_legend_handles_labels()
    axes.legend(
        *(column[::-1] for column in names), loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=8,
        labelcolor=INK, handlelength=2.4, handleheight=1.1,
    )  # fmt: skip
    return figure


def _thinned(total: object, peak: int) -> list[int]:
    """The positions to draw: all of a short curve; for a long one the highest step of each run, and the peak."""
    import numpy as np

    values = np.asarray(total)
    if len(values) <= MOST:
        return list(range(len(values)))
    runs = np.array_split(np.arange(len(values)), MOST // 2)
    best = {int(run[values[run].argmax()]) for run in runs} | {0, peak, len(values) - 1}
    return sorted(best)
