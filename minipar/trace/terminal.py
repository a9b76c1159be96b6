"""A timeline in letters and digits, for terminals and logs.

rank 0  000111222333......aaaaaabbbbbbccccccdddddd
rank 1  ...000aaaaaa111bbbbbb222cccccc333dddddd...
"""

from __future__ import annotations

import math
import string
import textwrap

from minipar.errors import MiniparError
from minipar.trace import Trace, labels
from minipar.wording import several

# The letters of a cell: one for each micro-batch (after 9 comes 0 again, after z comes a), or one for all.
SIGNS = {
    "forward": string.digits,
    "backward": string.ascii_lowercase,
    "input gradient": string.ascii_lowercase,
    "weight gradient": string.ascii_uppercase,
    "recompute": "~",
    "optimizer step": "#",
    "reduce": string.digits,
}
WORDS = {
    "forward": "0-9 forward of that micro-batch",
    "backward": "a-z backward (a = 0)",
    "input gradient": "a-z input gradient (a = 0)",
    "weight gradient": "A-Z weight gradient (A = 0)",
    "recompute": "~ recompute",
    "optimizer step": "# optimizer step",
    "reduce": "0-9 reduce of that chunk",
}
MANY_RANKS = 64


def text(trace: Trace, width: int = 100) -> str:
    """A line per rank, at most `width` characters wide, with a time axis, a legend and the trace's facts below.

    Each cell shows the compute instruction that takes the largest part of the cell's time. Communication is not shown.
    Errors: MiniparError for an empty trace, or a width below 30.
    """
    labels.check([trace])
    if width < 30:
        raise MiniparError(f"width={width}: must be at least 30 characters")
    clock = labels.clock([trace])
    ranks = len(trace.program.ranks)
    names = [labels.rank_name(trace.program, rank) for rank in range(min(ranks, MANY_RANKS))]
    margin = max(len(f"rank {ranks - 1}"), *map(len, names)) + 2
    whole = trace.time * clock.scale or 1.0
    scale = (width - margin) / whole  # cells per unit of time
    if not labels.in_seconds(trace) and scale >= 1:
        scale = int(scale)  # equal times look equal
    cells = max(1, round(whole * scale))
    lines = [name.ljust(margin) + _lane(trace, rank, clock.scale * scale, cells) for rank, name in enumerate(names)]
    if ranks > MANY_RANKS:
        lines.append(f"... and {several(ranks - MANY_RANKS, 'more rank')}")
    kinds = {labels.kind_of(ins) for row in trace.program.ranks for ins in row}
    legend = [WORDS[kind] for kind in WORDS if kind in kinds]
    lines.append(" " * margin + _axis(whole, cells, clock.unit))
    for words in ("; ".join([*legend, ". idle"]), f"{trace.kind}: {labels.facts(trace)}", trace.note):
        lines += textwrap.wrap(words, width)
    return "\n".join(lines)


def _lane(trace: Trace, rank: int, scale: float, cells: int) -> str:
    shares: list[dict[str, float]] = [{} for _ in range(cells)]
    for ins, start, end in zip(trace.program.ranks[rank], trace.starts[rank], trace.ends[rank], strict=True):
        signs = SIGNS.get(labels.kind_of(ins))
        if signs is None:
            continue
        sign = signs[max(0, labels.number_of(trace.program, ins)) % len(signs)]
        begin, finish = (start - trace.span[0]) * scale, (end - trace.span[0]) * scale
        for cell in range(int(begin), min(cells, int(finish) + 1)):
            part = min(finish, cell + 1) - max(begin, cell)
            shares[cell][sign] = shares[cell].get(sign, 0.0) + part
    return "".join(max([".", *share], key=lambda s: share.get(s, 1 - sum(share.values()))) for share in shares)


def _axis(whole: float, cells: int, unit: str) -> str:
    """`0        10        20   ms`: round numbers; each begins at its place on the axis."""
    power = 10.0 ** math.floor(math.log10(whole))
    step = next(part * power for part in (2, 1, 0.5, 0.2) if whole / (part * power) >= 3)
    axis = ""
    for k in range(int(whole / step) + 1):
        place, label = round(k * step / whole * cells), f"{k * step:g}"
        if place + len(label) <= cells:
            axis = axis.ljust(place) + label + " "
    return f"{axis}  {unit}"
