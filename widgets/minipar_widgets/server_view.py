"""ServerView: parameter servers and their workers over time, and how old the parameters of gradients are."""

from __future__ import annotations

from typing import Any

from minipar.errors import MiniparError
from minipar.trace import Trace, labels
from minipar.trace.figure import LOOKS
from minipar.wording import several
from minipar_widgets.base import View
from minipar_widgets.host import traitlets
from minipar_widgets.server_model import Served, Worker, served
from minipar_widgets.sketch import Sketch, ticks

_HUES = ("#0072B2", "#D55E00", "#009E73", "#AA4499", "#999933", "#7A7A7A", "#CC79A7", "#8C6D31")
_KINDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient", "R": "recompute"}


class ServerView(View):
    """Workers and servers of a trace of a plan with sync=ps, simulated or run.

    service   of the run (`run.service`): which workers died, and when they came back. Without it, a worker that sends
              no message for a long time between two steps counts as away

    `update(trace, service)` shows another one.
    """

    name = "server"
    data = traitlets.Dict().tag(sync=True)

    def __init__(self, trace: Trace, service: Any = None) -> None:
        super().__init__()
        self.found: Served | None = None
        self.update(trace, service)

    def update(self, trace: Trace, service: Any = None) -> None:
        """Show another trace. If that is impossible, the widget shows the reason instead."""
        self.deaths = list(service.deaths) if service is not None else []
        with self.hold_sync():
            try:
                self.found = served(trace, service.order if service is not None else ())
                self.data = self._data(self.found)
                self.problem = ""
            except MiniparError as error:
                self.found, self.problem = None, str(error)
            self.refresh()

    def _data(self, one: Served) -> dict[str, Any]:
        clock = labels.clock([one.trace])
        s = clock.scale
        return {
            "unit": "ms" if labels.in_seconds(one.trace) else "forwards",
            "time": one.trace.time * s,
            "updates": [time * s for time in one.updates],
            "servers": [
                [[a.what, a.start * s, a.end * s, a.peer, a.step, a.version] for a in acts] for acts in one.servers
            ],
            "workers": [
                {
                    "rank": w.rank,
                    "slow": w.slow,
                    "away": [[a * s, b * s] for a, b in w.away],
                    "steps": [
                        [x.step, x.pull[0] * s, x.pull[1] * s, [[op, a * s, b * s] for op, a, b in x.work],
                         x.push[0] * s, x.push[1] * s, x.version, x.update, x.applied * s, x.late]
                        for x in w.steps
                    ],
                }
                for w in one.workers
            ],
            "words": [self._words(w) for w in one.workers],
        }  # fmt: skip

    def _words(self, worker: Worker) -> str:
        """A worker in a sentence."""
        assert self.found is not None
        trace = self.found.trace
        facts = [several(len(worker.steps), "step"), f"at most {several(worker.staleness, 'update')} late"]
        if worker.slow:
            facts.append(f"slow: its steps take {worker.slowness:.2f} times the median")
        if worker.dropped:
            facts.append(f"{several(worker.dropped, 'gradient')} dropped")
        facts += [f"away from {labels.duration(trace, a)} to {labels.duration(trace, b)}" for a, b in worker.away]
        return f"worker {worker.rank}: {', '.join(facts)}"

    def summary(self) -> str:
        assert self.found is not None
        one = self.found
        program, late = one.trace.program, [w.staleness for w in one.workers]
        count = several(len(one.servers), "server")
        return (
            f"{one.trace.kind} trace of mode={one.mode}, {several(program.workers, 'worker')} and {count}: "
            f"{len(one.updates)} "
            f"updates in {labels.duration(one.trace, one.trace.time)}; staleness at most {', '.join(map(str, late))}"
        )

    def caption(self) -> str:
        assert self.found is not None
        said = [self._words(w) for w in self.found.workers if w.slow or w.away or w.dropped]
        text = (
            "Servers update (green, with the version), receive and answer; workers wait (thin), compute (with the "
            "version that they were given) and push. Below, the version: the server's as steps, each worker's as a "
            "line from its pull to its update; the number at a line's end is how many updates late it came."
        )
        return "\n".join([text, *(f"{one[0].upper()}{one[1:]}." for one in said), *self.deaths])

    def rows(self) -> list[list[str]]:
        assert self.found is not None
        trace = self.found.trace
        rows = [["worker", "step", "asked at", "began at", "pushed at", "version", "update", "updates late"]]
        for worker in self.found.workers:
            for x in worker.steps:
                times = [labels.duration(trace, t) for t in (x.pull[0], x.pull[1], x.push[1])]
                fate = [str(x.update), str(x.late)] if x.update >= 0 else ["dropped", ""]
                rows.append([str(worker.rank), str(x.step), *times, str(x.version), *fate])
        return rows

    def picture(self, dark: bool | None = False) -> bytes:
        assert self.found is not None
        return _picture(self.found, dark)


def _picture(one: Served, dark: bool | None) -> bytes:
    """The lanes, and the versions under them."""
    width, left, lane, chart = 900, 106, 22, 150
    lanes = len(one.servers) + len(one.workers)
    sketch = Sketch(width, lanes * lane + chart + 34, dark)
    whole = one.trace.time or 1.0
    scale = (width - left - 12) / whole

    def at(time: float) -> float:
        return left + time * scale

    for k, acts in enumerate(one.servers):
        sketch.text(left - 6, (k + 0.5) * lane, f"server {k}", size=11, anchor="rm")
        for act in acts:
            tall, face = (lane - 4, "#009E73") if act.what == "updates" else (lane - 12, "#CC79A7")
            sketch.rect(
                at(act.start), k * lane + (lane - tall) / 2, max(1.5, (act.end - act.start) * scale), tall, face
            )
    for n, worker in enumerate(one.workers):
        y, slow = (len(one.servers) + n) * lane, "slow: " if worker.slow else ""
        sketch.text(left - 6, y + lane / 2, f"{slow}worker {worker.rank}", size=11, anchor="rm")
        sketch.rect(1, y + 5, 4, lane - 10, _HUES[n % len(_HUES)])
        for a, b in worker.away:
            sketch.rect(
                at(a), y + 2, at(b) - at(a), lane - 4, "#ffe1cc" if not dark else "#4a2410", sketch.look.warn, "x"
            )
        for x in worker.steps:
            sketch.rect(at(x.pull[0]), y + lane / 2 - 2, at(x.pull[1]) - at(x.pull[0]), 4, sketch.look.rule)
            for op, a, b in x.work:
                sketch.rect(
                    at(a), y + 2, max(1.0, at(b) - at(a)), lane - 4, LOOKS[_KINDS.get(op, "copy")].face, "#444444"
                )
            sketch.rect(at(x.push[0]), y + 6, max(1.0, at(x.push[1]) - at(x.push[0])), lane - 12, "#CC79A7")
            text = f"v{x.version}" if x.update >= 0 else "dropped"
            if at(x.push[1]) - at(x.pull[1]) > 8 + sketch.measure(text, 11):
                sketch.rect(at(x.pull[1]) + 2, y + 4, 4 + sketch.measure(text, 11), lane - 8, sketch.look.paper)
                sketch.text(at(x.pull[1]) + 4, y + lane / 2, text, size=11)
    top, high = lanes * lane + 10, max(1, len(one.updates))

    def height(version: float) -> float:
        return top + chart - 16 - version / high * (chart - 30)

    for mark in ticks(high, 5):
        sketch.line([(left, height(mark)), (width - 12, height(mark))], sketch.look.rule)
        sketch.text(left - 6, height(mark), f"v{mark:g}", sketch.look.muted, 11, "rm")
    for n, worker in enumerate(one.workers):
        hue = _HUES[n % len(_HUES)]
        shift = (n - (len(one.workers) - 1) / 2) * min(3.0, 24 / len(one.workers))
        for x in worker.steps:
            line = height(x.version) + shift
            sketch.line([(at(x.pull[1]), line), (at(x.applied), line)], hue, 2, dashed=bool(n % 2))
            if x.late:
                sketch.line([(at(x.applied), line), (at(x.applied), height(x.update))], hue, 1, dashed=True)
    points = [(float(left), height(0))]
    for k, time in enumerate(one.updates):
        points += [(at(time), height(k)), (at(time), height(k + 1))]
    sketch.line([*points, (width - 12.0, points[-1][1])], sketch.look.ink, 2)
    clock = labels.clock([one.trace])
    for tick in ticks(whole * clock.scale, 8):
        sketch.text(at(tick / clock.scale), top + chart, f"{tick:g}", sketch.look.muted, 11, "mm")
    sketch.text(width - 12, top + chart + 14, clock.label, sketch.look.muted, 11, "rm")
    return sketch.png()
