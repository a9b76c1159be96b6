"""ScheduleEditor: edit a small schedule by hand. You move blocks, and the engine checks and predicts each new order.

editor = ScheduleEditor("1f1b", stages=4, microbatches=8)      drag blocks, or select them and press Shift and arrow
editor.trace                                                   the prediction of the present order
editor.code()                                                  the present order as the code of a schedule
Plan(pp=4, microbatches=8, schedule="by-hand")                 it is registered, for plans, the explorer and train
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minipar.errors import MiniparError, PlanError
from minipar.program import Program
from minipar.strategies.plan import Plan
from minipar.trace import Trace, figure, labels
from minipar.trace.shades import repeated
from minipar.wording import several
from minipar_widgets import judging, orders
from minipar_widgets.arguments import one_of
from minipar_widgets.base import View
from minipar_widgets.host import traitlets
from minipar_widgets.judging import Judgement
from minipar_widgets.orders import Order
from minipar_widgets.sketch import Sketch

KINDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
LANE, LEFT, WIDTH = 30, 56, 900


class ScheduleEditor(View):
    """An order of forwards and backwards that is edited by hand; see the top of the file.

    start               a schedule's name, with `stages` and `microbatches`; a plan; or a program that a plan gave
    schedule            the name under which the order is registered; this is repeated after each change
    forward, backward   times of one micro-batch on one rank's whole share; `latency` of a message
    """

    name = "editor"
    board = traitlets.Dict().tag(sync=True)  # the engine's result for an order: see `_tell`
    order = traitlets.Dict().tag(sync=True)  # the order in the browser: {"id": n, "ranks": [["F0", ...], ...]}
    editable = traitlets.Bool(True).tag(sync=True)

    def __init__(
        self,
        start: str | Plan | Program = "1f1b",
        stages: int = 4,
        microbatches: int = 4,
        *,
        schedule: str = "by-hand",
        forward: float = 1.0,
        backward: float = 2.0,
        latency: float = 0.0,
    ) -> None:
        super().__init__()
        self.schedule = schedule
        self._costs = (forward, backward, latency)
        self._id, self._start = 0, "1f1b"
        self._now: Order | None = None
        self._judgement = Judgement(None)
        self.observe(lambda change: self._asked(change["new"]), "order")
        self.load(start, stages, microbatches)

    def load(self, start: str | Plan | Program, stages: int = 4, microbatches: int = 4) -> None:
        """Begin again with another order."""
        self._start = start if isinstance(start, str) else self._start
        try:
            found, self.problem = orders.order_of(start, stages, microbatches), ""
            self._id += 1
            self._judge(found)
        except MiniparError as error:
            self._now, self._judgement = None, Judgement(None)
            self._id += 1
            with self.hold_sync():
                self.problem = str(error)
                self.board = {"id": self._id, "ranks": [], "reason": str(error), "details": "", "facts": "", "code": ""}
                self.refresh()

    def address(self) -> dict[str, str]:
        if self._now is None:
            return {}
        ranks = "-".join(".".join(word.replace(".", ":") for word in row) for row in self._now.words)
        return {"schedule": self._start, "stages": str(len(self._now.words)),
                "microbatches": str(self._now.microbatches), "order": ranks}  # fmt: skip

    def follow(self, words: Mapping[str, str]) -> None:
        for name in words:
            one_of("address", name, ("schedule", "stages", "microbatches", "order"))
        counts = [words.get(name, "4") for name in ("stages", "microbatches")]
        if not all(text.isdigit() and 1 <= int(text) <= 64 for text in counts):
            raise PlanError(f"stages and microbatches {counts}: must be whole numbers from 1 to 64")
        self.load(words.get("schedule", "1f1b"), *map(int, counts))
        if "order" in words and self._now is not None:
            rows = [[word.replace(":", ".") for word in row.split(".")] for row in words["order"].split("-")]
            self._judge(Order(tuple(map(tuple, rows)), self._now.microbatches, self._now.stages))

    @property
    def trace(self) -> Trace | None:
        """The prediction of the present order; None if it cannot run."""
        return self._judgement.trace

    @property
    def complaint(self) -> str:
        """Why the order cannot run, in one line; empty if it can."""
        return self.problem or self._judgement.reason

    @property
    def words(self) -> orders.Words:
        """The present order: for each rank words such as `F0`."""
        return self._now.words if self._now is not None else ()

    def code(self) -> str:
        """The order as Python: a generator with `@minipar.schedule`, for a cell or a file."""
        return orders.code(self._now, self.schedule) if self._now is not None else ""

    def _asked(self, order: dict[str, Any]) -> None:
        if self._now is None or not order:
            return
        ranks = order.get("ranks", [])
        self._id = max(self._id, int(order.get("id", 0)))
        self._judge(Order(tuple(map(tuple, ranks)), self._now.microbatches, self._now.stages))

    def _judge(self, order: Order) -> None:
        self._now = order
        self._judgement = judging.judge(order, self.schedule, *self._costs)
        with self.hold_sync():
            self.board = self._tell()
            self.refresh()

    def _tell(self) -> dict[str, Any]:
        """Everything that the browser shows: the blocks with their times, and the texts."""
        assert self._now is not None
        order, found = self._now, self._judgement
        ranks: list[list[dict[str, Any]]] = []
        for rank, row in enumerate(order.words):
            ranks.append([])
            for k, word in enumerate(row):
                span = found.spans[rank][k]
                ranks[rank].append(
                    {
                        "word": word,
                        "kind": self._kind(rank, word),
                        "stage": order.stage(rank, word),
                        "microbatch": orders.action_of(word).microbatch,
                        "start": span[0] if span else None,
                        "end": span[1] if span else None,
                        "takes": self._takes(word),
                        "guilty": (rank, k) in found.guilty,
                    }
                )
        return {
            "id": self._id,
            "ranks": ranks,
            "reason": found.reason,
            "details": found.details,
            "facts": self._facts(),
            "code": self.code(),
        }

    def _kind(self, rank: int, word: str) -> str:
        """The kind of a block, in the shade of its chunk."""
        assert self._now is not None
        chunk = repeated(self._now.stage(rank, word) // len(self._now.words))
        return f"{KINDS[word[0]]} {chunk}" if chunk else KINDS[word[0]]

    def _takes(self, word: str) -> float:
        forward, backward, _ = self._costs
        assert self._now is not None
        return {"F": forward, "B": backward}.get(word[0], backward / 2) / self._now.chunks

    def _facts(self) -> str:
        found = self._judgement
        if found.trace is None:
            return ""
        same = f" · this is {' and '.join(found.same_as)}" if found.same_as else ""
        return labels.facts(found.trace) + same

    # words, table, picture --------------------------------------------------------------------------------------------

    def summary(self) -> str:
        assert self._now is not None
        size = f"{several(len(self.words), 'rank')}, {several(self._now.microbatches, 'micro-batch')}"
        return f"ScheduleEditor {self.schedule}: {size}; " + (
            f"cannot run: {self.complaint}" if self.complaint else self._facts()
        )

    def caption(self) -> str:
        return (
            "Each block is a forward (F), a backward (B) or one of its halves (I, W) of a micro-batch. Drag a block "
            "along its rank, or select it with the arrow keys and move it with Shift and arrow; the engine verifies "
            "every order. Messages are inserted by themselves."
        )

    def rows(self) -> list[list[str]]:
        trace = self.trace
        idle = [f"{labels.idle(trace, rank):.1%}" if trace else "" for rank in range(len(self.words))]
        held = [f"{n:g}" for n in trace.in_flight()] if trace else [""] * len(self.words)
        return [
            ["rank", "order", "idle", "activations held"],
            *([str(rank), " ".join(row), idle[rank], held[rank]] for rank, row in enumerate(self.words)),
        ]

    def picture(self, dark: bool | None = False) -> bytes:
        rows = self.board["ranks"]
        stop = max((b["end"] for row in rows for b in row if b["end"] is not None), default=0.0)
        lanes, whole = [], stop
        for row in rows:
            now, lane = stop, []
            for b in row:  # blocks that never run are drawn after those that ran, as in editor.js
                start, end = (b["start"], b["end"]) if b["end"] is not None else (now, now + b["takes"])
                now = max(now, end) if b["end"] is None else now
                whole = max(whole, end)
                lane.append((b, start, end))
            lanes.append(lane)
        scale = (WIDTH - LEFT - 12) / (whole or 1.0)
        sketch = Sketch(WIDTH, LANE * len(rows) + 34, dark)
        look = sketch.look
        for rank, lane in enumerate(lanes):
            top, tall = 4 + rank * LANE, LANE - 5
            sketch.text(6, top + LANE / 2 - 2, f"rank {rank}")
            for b, start, end in lane:
                colours, runs = figure.LOOKS[b["kind"]], b["end"] is not None
                left, wide = LEFT + start * scale, max((end - start) * scale - 1, 1)
                sketch.rect(left, top, wide, tall, colours.face if runs else "", colours.edge)
                for k in range(colours.bands if runs else 0):
                    sketch.rect(left + 1, top + tall - 5 - 4 * k, wide - 2, 3, colours.tone)
                for k in range(3 if b["guilty"] else 0):
                    sketch.rect(left + k, top + k, wide - 2 * k, tall - 2 * k, "", look.warn)
                if wide > 4 + 6.5 * len(b["word"]):
                    ink = colours.ink if runs else look.ink
                    sketch.text(left + wide / 2, top + tall / 2 - 2 * colours.bands, b["word"], ink, 11, "mm")
        line = f"cannot run: {self.complaint}" if self.complaint else self._facts()
        sketch.text(6, LANE * len(rows) + 18, line[:150], look.warn if self.complaint else look.ink)
        return sketch.png()

    def state(self) -> dict[str, Any]:
        """The traits for a page without a kernel: there the order can be played, but not changed."""
        return super().state() | {"editable": False}
