"""The timeline at 100 thousand and 1 million events: time to the first picture, redraws while panning, hover, PNG.

First paint = Timeline(trace) in Python + the time from `render` to the end of the first paint in Chromium. (The
notebook's websocket between the two is not measured.) A redraw is the time between two callbacks of one animation
frame: the first is requested before the widget's own, the second after it. The windows reach from the whole trace to a
thousandth of it, drawn at 1100 CSS pixels.
"""

from __future__ import annotations

import tempfile
import time
from functools import cache
from pathlib import Path
from statistics import median

from benchmarks.harness import Row
from minipar import Plan, Trace, simulate
from minipar.program import Program
from minipar_widgets import Timeline

_RENDER = "widget.render({ model, el });"
_TIMED = f"""const begun = performance.now();
{_RENDER}
requestAnimationFrame(() => (window.firstPaint = performance.now() - begun));"""

#: Milliseconds of each redraw, while keys pan and zoom.
REDRAWS = """async ([keys, count]) => {
  const canvas = document.querySelector("canvas"), times = [];
  for (let k = 0; k < count; k++) {
    times.push(await new Promise((done) => {
      let begun;
      requestAnimationFrame(() => (begun = performance.now()));
      canvas.dispatchEvent(new KeyboardEvent("keydown", { key: keys[k % keys.length], bubbles: true }));
      requestAnimationFrame(() => done(performance.now() - begun));
    }));
  }
  return times;
}"""
#: Milliseconds of each answer to the pointer, without the redraw.
HOVERS = """async (count) => {
  const canvas = document.querySelector("canvas"), place = canvas.getBoundingClientRect(), times = [];
  for (let k = 0; k < count; k++) {
    const at = { clientX: place.left + 100 + (k * 37) % (place.width - 180), clientY: place.top + 60 + (k * 17) % 300 };
    const begun = performance.now();
    canvas.dispatchEvent(new PointerEvent("pointermove", at));
    times.push(performance.now() - begun);
    await new Promise(requestAnimationFrame);
  }
  return times;
}"""


@cache
def _step() -> Trace:
    return simulate(Plan(pp=64, microbatches=256).compile(layers=64, check=False), latency=0.1)


def long_trace(events: int) -> Trace:
    """1F1B on 64 ranks; the same step is repeated until there are about `events` events."""
    trace = _step()
    one, again = trace.program, max(1, round(events / len(trace.program)))
    program = Program(tuple(row * again for row in one.ranks), one.layers, one.microbatches, one.groups, one.mesh)
    starts, ends = (
        [[t + k * trace.time for k in range(again) for t in row] for row in rows] for rows in (trace.starts, trace.ends)
    )
    return Trace(program, starts, ends, trace.size)


def measure(quick: bool = False) -> list[Row]:
    rows = [Row("JavaScript of a Timeline", len(Timeline._esm) / 1000, "kB", 50)]
    for events, paint, redraw in ((100_000, 0.3, 8.0), (1_000_000, 1.0, 16.0)):
        trace = long_trace(events)
        made = []
        for _ in range(2 if quick else 4):
            start = time.perf_counter()
            widget = Timeline(trace)
            made.append(time.perf_counter() - start)
        word = "1 M" if events == 1_000_000 else "100 k"
        python = median(made[1:])  # the first one also computes what the trace caches (span, busy time)
        start = time.perf_counter()
        _ = widget.picture() if events == 1_000_000 else None
        picture = time.perf_counter() - start
        note = f"{len(widget.data) / 1e6:.1f} MB; the first time {made[0]:.2f} s"
        rows.append(Row(f"{word} events: Timeline(trace)", python, "s", note=note))
        found = _browser(widget, quick)
        if found is None:
            rows.append(Row(f"{word} events: no Chromium or playwright here", 0.0))
            continue
        shown, times, hovers = found
        rows += [
            Row(f"{word} events: in the browser to the first paint", median(shown) / 1e3, "s"),
            Row(f"{word} events: first paint", python + median(shown) / 1e3, "s", paint),
            Row(f"{word} events: redraw, median", median(times), "ms"),
            Row(f"{word} events: redraw, 95 of 100", _part(times, 0.95), "ms", redraw),
            Row(f"{word} events: answer to the pointer, 95 of 100", _part(hovers, 0.95), "ms", None, 2.0),
        ]
        if events == 1_000_000:
            rows.append(Row(f"{word} events: static picture", picture * 1e3, "ms", None, 50))
    return rows


def _part(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def _browser(widget: Timeline, quick: bool) -> tuple[list[float], list[float], list[float]] | None:
    """Milliseconds of first paints, redraws, and answers to the pointer. None if there is no browser."""
    from tests.browsers import CHROMIUM, FLAGS, MISSING

    if MISSING:
        return None
    from playwright.sync_api import sync_playwright

    shown: list[float] = []
    times: list[float] = []
    hovers: list[float] = []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as play:
        path = Path(folder) / "page.html"
        page_text = widget.to_html()
        assert _RENDER in page_text
        path.write_text(page_text.replace(_RENDER, _TIMED), encoding="utf-8")
        browser = play.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        for _ in range(2 if quick else 3):
            page = browser.new_page(viewport={"width": 1160, "height": 900})
            page.goto(path.as_uri())
            page.wait_for_function("window.firstPaint > 0", timeout=60_000)
            shown.append(float(page.evaluate("window.firstPaint")))
            keys = ["ArrowRight", "ArrowLeft", "+", "ArrowRight", "ArrowRight", "-", "ArrowLeft", "+"]
            times += page.evaluate(REDRAWS, [keys, 40 if quick else 100])
            hovers += page.evaluate(HOVERS, 40 if quick else 100)
            page.close()
        browser.close()
    return shown, times, hovers
