"""What the worker of a page asks Python for: views, and what a reader of the page has written.

    live = Live()
    live.answer({"do": "open", "view": "ScheduleExplorer", "address": "schedule=zb-v&stages=4"})
    {"changes": [...], "address": "...", "problem": ""}

A request and an answer are plain data. Texts of an address and of an editor come back as texts, never as HTML.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from minipar.errors import MiniparError, PlanError
from minipar.prediction.simulator import simulate
from minipar.strategies.plan import Plan
from minipar.trace import Trace
from minipar_widgets.addresses import address_of, words_of
from minipar_widgets.arguments import one_of
from minipar_widgets.base import Explorer, View
from minipar_widgets.collective_player import CollectiveView
from minipar_widgets.host import ui
from minipar_widgets.page import Page
from minipar_widgets.timeline import Timeline
from minipar_widgets.writing import judged


class Simulated(Explorer):
    """A view of a trace, with a plan that is simulated for it."""

    def __init__(self, kind: type[Any], plan: str, layers: int) -> None:
        self.view = kind(_trace(plan, layers))
        self.controls = {
            "plan": ui.Text(plan, description="plan", layout={"width": "min(44em, 100%)"}),
            "layers": ui.BoundedIntText(layers, min=1, max=128, description="layers"),
        }
        super().__init__([ui.HBox(list(self.controls.values()), layout={"flex_flow": "row wrap"}), self.view])
        for control in self.controls.values():
            control.observe(self._changed, "value")

    def _changed(self, _: Any) -> None:
        try:
            self.view.update(_trace(self.controls["plan"].value, self.controls["layers"].value))
        except MiniparError as error:
            self.view.problem = str(error)
            self.view.refresh()


def _trace(words: str, layers: int) -> Trace:
    """One step; of plans with servers six, with a slow worker. Errors: MiniparError."""
    plan = Plan.parse(words)
    if plan.sync != "ps":
        return simulate(plan.compile(layers=layers), latency=0.1)
    slow = tuple(1.0 + rank % 3 * 0.5 for rank in range(plan.ranks))
    return simulate(plan.compile(layers=layers, steps=6), latency=0.1, stage_factors=slow)


SIMULATED = {
    "ServerView": ("sync=ps mode=async dp=3", 4),
    "Timeline": ("pp=4 dp=2 zero=1 microbatches=8", 8),
}
VIEWS = (
    "ScheduleExplorer", "ScheduleEditor", "CollectivePlayer", "MemoryExplorer", "CheckpointExplorer",
    "ShardingExplorer", "PlanExplorer", "ServerView", "Timeline",
)  # fmt: skip


def made(name: str) -> Explorer | View:
    """The view of a name, as it is at first."""
    kind = getattr(import_module("minipar_widgets"), one_of("view", name, VIEWS))
    if name in SIMULATED:
        return Simulated(kind, *SIMULATED[name])
    given = ("llama3-8b", "h100", 64, 512) if name == "PlanExplorer" else ()  # (a search that takes a second)
    found: Explorer | View = kind(*given)
    return found


class Live:
    """One view of a page, or one text that its reader writes."""

    def __init__(self) -> None:
        self._page: Page | None = None
        self._view: Explorer | View | None = None
        self._first: dict[str, str] = {}

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """What the page has to know after a request: `open` (view, address), `set` (id, values), `send` (id, content).
        What cannot be is the `problem`, and nothing changes."""
        if request["do"] == "write":
            return self._written(request)
        if request["do"] == "exercise":
            checked = import_module("minipar_course.in_page").checked
            passed, verdict, line = checked(str(request["imports"]), str(request["code"]))
            return {"passed": passed, "verdict": verdict, "line": line}
        problem = ""
        try:
            if request["do"] == "open":
                self._view = made(str(request["view"]))
                self._page, self._first = Page(self._view), self._view.address()
                self._view.follow(words_of(str(request["address"])))
            elif self._page is None:
                raise PlanError("no view is open")
            elif request["do"] == "set":
                self._page.set(request["id"], request["values"])
            else:
                self._page.send(request["id"], request["content"])
        except (MiniparError, ValueError) as error:
            problem = str(error)
        if self._page is None or self._view is None:
            return {"changes": [], "address": "", "problem": problem}
        words = {name: text for name, text in self._view.address().items() if text != self._first.get(name)}
        return {"changes": self._page.changes(), "address": address_of(words), "problem": problem}

    def _written(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """What the engine says of a text (`code`, `stages`, `microbatches`), and the picture if it can run."""
        found = judged(str(request["code"]), int(request["stages"]), int(request["microbatches"]))
        said = {"reason": found.reason, "line": found.line, "details": found.details, "facts": found.facts}
        if found.collective is not None:
            name, kind = found.collective
            view: View = CollectiveView(kind, name, int(request["stages"]), 4 << 20)
            said |= {"facts": view.label} if not view.problem else {"reason": view.problem}
        elif found.trace is not None:
            view = Timeline(found.trace)
        else:
            return {**said, "changes": []}
        return {**said, "changes": [] if said["reason"] else Page(view).changes()}


_LIVE = Live()


def answer(request: str) -> tuple[str, list[bytes]]:
    """The same for a worker: JSON, in which `{"bytes": k}` stands for the k-th of the bytes beside it."""
    parts: list[bytes] = []

    def apart(value: Any) -> Any:
        if not isinstance(value, bytes):
            return list(value) if isinstance(value, (tuple, set, frozenset)) else str(value)
        parts.append(value)
        return {"bytes": len(parts) - 1}

    return json.dumps(_LIVE.answer(json.loads(request)), default=apart), parts
