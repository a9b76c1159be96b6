"""One self-contained HTML page for a trace, or two: the picture, and the same as tables. It loads nothing.

heading, intro, facts      texts that the caller gives
the picture                inline SVG, light and dark
sections                   further parts with headings, such as a table of losses
the same as a table        numbers per rank; every instruction, in a part that opens
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from minipar.trace import Trace, labels
from minipar.trace.figure import INK, MUTED, PAPER, RULE, WIRE

MANY_ROWS = 2_000
ALL = "all"
Section = tuple[str, str]


def page(
    traces: Sequence[Trace],
    path: str | os.PathLike[str] | None = None,
    *,
    heading: str = "",
    intro: str = "",
    facts: Sequence[tuple[str, object]] = (),
    sections: Sequence[Section] = (),
    **options: Any,
) -> str:
    """The page as text; or, if `path` is given, the path that it was written to.

    heading     default: `Timeline, ` and the kinds of the traces, such as `Timeline, predicted and measured`
    intro       a paragraph of plain text under it
    facts       (name, value) pairs, shown as a list under the intro; plain text
    sections    (heading, HTML) pairs, shown under the picture in this order. The heading is plain text, the HTML is
                taken as it is; `table(...)` makes some
    options     of `drawing.draw`, for the picture
    """
    from minipar.trace.drawing import svg  # not at the top, because drawing imports this module

    labels.check(traces)
    heading = heading or f"Timeline, {' and '.join(dict.fromkeys(trace.kind for trace in traces))}"
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(str(value))}</dd></div>" for name, value in facts)
    body = [
        f"<h1>{escape(heading)}</h1>",
        f"<p>{escape(intro)}</p>" if intro else "",
        f'<dl class="facts">{items}</dl>' if items else "",
        "<figure>",
        _scrolling("timeline", _themed(svg(traces, **options))),
        f"<figcaption>{'<br>'.join(escape(trace.summary()) for trace in traces)}</figcaption>",
        "</figure>",
        *(f"<section><h2>{escape(title)}</h2>{html}</section>" for title, html in sections),
        "<section><h2>The same as a table</h2>",
        *(_per_rank(trace, name) for trace, name in zip(traces, labels.names(traces), strict=True)),
        _instructions(traces),
        "</section>",
    ]
    text = _PAGE.format(title=escape(heading), style=_STYLE, body="\n".join(part for part in body if part))
    if path is None:
        return text
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    return os.fspath(path)


def table(header: Sequence[object], rows: Iterable[Sequence[object]], caption: str = "") -> str:
    """An HTML table of plain text. Columns of numbers are right-aligned, and a wide table scrolls by itself."""
    body = [list(map(str, row)) for row in rows]
    right = [all(_numeric(cell) for cell in column if cell) for column in zip(*body, strict=True)] or [False] * len(
        header
    )
    side = [' class="n"' if numeric else "" for numeric in right]
    head = "".join(f'<th scope="col"{at}>{escape(str(cell))}</th>' for cell, at in zip(header, side, strict=True))
    lines = "\n".join(
        "<tr>" + "".join(f"<td{at}>{escape(cell)}</td>" for cell, at in zip(row, side, strict=True)) + "</tr>"
        for row in body
    )
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return _scrolling(
        caption or "table", f"<table>{title}<thead><tr>{head}</tr></thead>\n<tbody>{lines}</tbody></table>"
    )


def _scrolling(label: str, html: str) -> str:
    """A part of the page that scrolls sideways by itself when it is wider than the page. The keyboard can scroll it."""
    return f'<div class="wide" tabindex="0" role="region" aria-label="{escape(label)}">{html}</div>'


def _numeric(cell: str) -> bool:
    """Whether a cell holds a number. A column of numbers is right-aligned."""
    try:
        float(cell.rstrip("%x").replace(",", ""))
    except ValueError:
        return cell == ALL
    return True


def _per_rank(trace: Trace, name: str) -> str:
    clock = labels.clock([trace])
    mib = trace.unit == "bytes"
    ranks = range(len(trace.program.ranks))
    peaks, sent, flight = trace.peak_memory(), trace.bytes_sent(), trace.in_flight()
    by_kind = [trace.peak_by_kind(rank) for rank in ranks]
    kinds = [kind for kind in by_kind[0] if mib and any(held[kind] for held in by_kind)]
    busy = [trace.busy[rank] * clock.scale for rank in ranks]
    whole = trace.time * clock.scale

    def row(label: object, work: float, time: float, memory: Sequence[object], rest: Sequence[object]) -> list[object]:
        idle = max(0.0, time - work)
        shares = [f"{idle / time:.1%}" if time else "", f"{idle / work:.1%}" if work else ""]
        return [label, shown(work), shown(idle), *shares, *memory, *rest]

    def shown(time: float) -> str:
        return labels.number(time, whole) if labels.in_seconds(trace) else f"{time:.6g}"

    def size(x: float) -> str:
        return labels.mebibytes(x) if mib else f"{x:g}"

    rows = [
        row(
            rank, busy[rank], whole,
            [size(peaks[rank]), *(size(by_kind[rank][kind]) for kind in kinds)],
            [*([labels.mebibytes(sent[rank])] if mib else []), f"{flight[rank]:g}"],
        )
        for rank in ranks
    ]  # fmt: skip
    total = [labels.mebibytes(sum(sent))] if mib else []
    rows.append(
        row(
            "all", sum(busy), whole * len(ranks), [size(max(peaks)), *("" for _ in kinds)], [*total, f"{max(flight):g}"]
        )
    )
    unit = f" ({clock.unit})"
    memory_unit = "MiB" if mib else "activations"
    header = [
        "rank", "busy" + unit, "idle" + unit, "bubble of total", "bubble of ideal", f"peak memory ({memory_unit})",
        *(f"of it {kind}" for kind in kinds), *(["sent (MiB)"] if mib else []), "in flight (micro-batches)",
    ]  # fmt: skip
    return table(header, rows, f"{name}: {labels.facts(trace)}")


def _instructions(traces: Sequence[Trace]) -> str:
    """Every instruction, in a part that opens. Two traces of the same program are side by side, others one by one."""
    if len(traces) == 2 and traces[0].program.ranks != traces[1].program.ranks:
        return "".join(_instructions([trace]) for trace in traces)
    clock, names = labels.clock(traces), labels.names(traces)
    program = traces[0].program
    most = max(1, MANY_ROWS // len(program.ranks))
    rows: list[list[object]] = []
    for rank, row in enumerate(program.ranks):
        for index, ins in enumerate(row[:most]):
            times = [
                f"{x:,.3f}"
                for trace in traces
                for x in (
                    (trace.starts[rank][index] - trace.span[0]) * clock.scale,
                    max(0.0, trace.ends[rank][index] - trace.starts[rank][index]) * clock.scale,
                )
            ]
            rows.append([rank, index, ins, ins.stream, *times, f"{traces[0].sent(rank, ins):,}"])
    cut = len(rows) < len(program)
    label = f"Instructions: {len(rows):,} of {len(program):,}" + (f", the first {most} of each rank" if cut else "")
    label += f" ({' and '.join(names)})"
    columns = [
        f"{name + ' ' if len(traces) == 2 else ''}{what} ({clock.unit})"
        for name in names
        for what in ("start", "duration")
    ]
    header = ["rank", "index", "instruction", "stream", *columns, "bytes sent"]
    return f"<details><summary>{escape(label)}</summary>{table(header, rows, label)}</details>"


def _themed(svg: str) -> str:
    """The picture with the colours of the paper as variables, so that the page's dark mode changes them."""
    for colour, name in ((INK, "ink"), (MUTED, "muted"), (RULE, "rule"), (PAPER, "paper"), (WIRE, "wire")):
        svg = svg.replace(colour, f"var(--{name})")
    return svg


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""

_STYLE = f"""
:root {{ color-scheme: light dark; --ink: {INK}; --muted: {MUTED}; --rule: {RULE}; --paper: {PAPER}; --wire: {WIRE}; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #ececec; --muted: #aaaaaa; --rule: #3a3a3a; --paper: #161616; --wire: #e3b1cd; }}
}}
@media print {{
  :root {{ color-scheme: light; --ink: {INK}; --muted: {MUTED}; --rule: {RULE}; --paper: {PAPER}; --wire: {WIRE}; }}
  .wide {{ overflow: visible !important; }}
  figure, tr {{ break-inside: avoid; }}
}}
body {{ margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }}
main {{ max-width: 1180px; margin: 0 auto; padding: 1.5rem 1.25rem 3rem; }}
h1 {{ font-size: 1.45rem; margin: 0 0 .5rem; }}
h2 {{ font-size: 1.1rem; margin: 2rem 0 .5rem; }}
p {{ max-width: 75ch; margin: .5rem 0; }}
.facts {{ display: flex; flex-wrap: wrap; gap: .4rem 2rem; margin: .75rem 0; }}
.facts dt {{ color: var(--muted); font-size: .85em; }}
.facts dd {{ margin: 0; font-variant-numeric: tabular-nums; }}
figure {{ margin: 1rem 0; }}
figcaption {{ color: var(--muted); font-size: .9em; }}
.wide {{ overflow-x: auto; }}
.wide > svg {{ display: block; width: 100%; min-width: 760px; height: auto; }}
table {{ border-collapse: collapse; margin: .5rem 0 1rem; font-size: .9em; font-variant-numeric: tabular-nums; }}
caption {{ text-align: left; color: var(--muted); padding-bottom: .3rem; }}
th, td {{ padding: .2rem .8rem .2rem 0; border-bottom: 1px solid var(--rule); text-align: left; }}
th {{ vertical-align: bottom; font-weight: 600; }}
.n {{ text-align: right; }}
summary {{ cursor: pointer; padding: .3rem 0; }}
:focus-visible {{ outline: 2px solid #0072B2; outline-offset: 2px; }}
@media (prefers-color-scheme: dark) {{ :focus-visible {{ outline-color: #56B4E9; }} }}
"""


def image(figure: Any) -> str:
    """A picture as part of a page. It is as small as one that a notebook shows by itself."""
    data, about = figure._repr_mimebundle_()
    one = about["image/png"]
    return f'<img src="data:image/png;base64,{data["image/png"]}" width="{one["width"]}" alt="{escape(one["alt"])}">'
