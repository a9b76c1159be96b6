"""What a notebook shows of a run: a table of its ranks, and a small picture. Elsewhere a run is one line."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from minipar.trace.memory_series import mib
from minipar.trace.tables import image, table

if TYPE_CHECKING:
    from minipar.training.training import Run

MANY = 5_000  # instructions; a picture of more takes seconds, and shows nothing at this size


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
    shown = image(drawing.draw([predicted, trace], width=8, memory=False)) if small else ""
    return f"<p>{escape(repr(run).strip('<>'))}</p>{ranks}{shown}"
