"""PlanExplorer: which strategy for a model on a machine, and why; pin a choice, and see what it costs.

PlanExplorer("gpt3-175b", "a100-80gb", gpus=1024, batch=1536)    presets, words or dataclasses, as `search` takes them
explorer.ask(gpus=512, pins="tp=8")                              what a click or a slider asks
explorer.view.found                                              the search's own answer
explorer.to_html("page.html")                                    a page with this one answer
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import log
from typing import Any

from minipar.costs.hardware import Hardware
from minipar.costs.rates import Calibration
from minipar.errors import PlanError
from minipar.models.sizes import Sizes
from minipar.planner.exhaustive import Found
from minipar.planner.reasons import advice
from minipar.prediction.rank_memory import KINDS
from minipar_widgets.arguments import one_of
from minipar_widgets.base import Explorer, View
from minipar_widgets.host import traitlets
from minipar_widgets.memory_model import FACES, HATCHES
from minipar_widgets.plan_model import (
    BUDGETS,
    HEADS,
    SEARCHED,
    Pins,
    Problem,
    Shelf,
    clock,
    columns,
    described,
    gigabytes,
    instead,
    price,
    problem,
    searched,
    solved,
    traded,
)
from minipar_widgets.sketch import Sketch, wrapped

GPUS = tuple(2**k for k in range(14))
BATCHES = tuple(sorted({2**k for k in range(14)} | {3 * 2**k for k in range(3, 12)}))


@dataclass(frozen=True)
class Question:
    """What the controls say: names and numbers, and the pins as (key, value), the newest one last."""

    model: str
    machine: str
    gpus: int
    batch: int
    pins: Pins = ()

    def __str__(self) -> str:
        pins = f", with {' '.join(f'{k}={v}' for k, v in self.pins)}" if self.pins else ""
        return f"{self.model} on {self.gpus} {self.machine}, batch {self.batch}{pins}"


class PlanView(View):
    """The best plans for one question; `ask(question)` shows another one. The browser asks by itself."""

    name = "plan"
    options = traitlets.Dict().tag(sync=True)  # of each control its values
    data = traitlets.Dict().tag(sync=True)  # the answer: see `_data`
    more = traitlets.Dict().tag(sync=True)  # what takes longer: the front, and for keys what other values would cost
    asked = traitlets.Dict().tag(sync=True)  # by the browser: {"id": n, "model": ..., "pins": [[key, value]]}
    alive = traitlets.Bool(True).tag(sync=True)  # whether somebody can answer

    def __init__(self, shelf: Shelf, question: Question) -> None:
        super().__init__()
        self.shelf, self.question, self._id = shelf, question, 0
        self.found: Found | str = ""
        self.options = {
            "model": list(shelf.models),
            "machine": list(shelf.machines),
            "gpus": sorted({*GPUS, question.gpus}),
            "batch": sorted({*BATCHES, question.batch}),
        }
        self.observe(lambda change: self._asked(change["new"]), "asked")
        self.on_msg(self._wanted)
        self.ask(question)

    @property
    def problem_now(self) -> Problem:
        """What is asked, as the planner takes it. Errors: PlanError."""
        q = self.question
        return problem(self.shelf, q.model, q.machine, q.gpus, q.batch, q.pins)

    def ask(self, question: Question) -> None:
        """Show the best plans for another question; where there are none, the reason stands in their place."""
        self.question = question
        try:
            self.found = solved(self.problem_now)
        except PlanError as error:
            self.found = str(error)
        with self.hold_sync():
            self.more = {}
            self.data = self._data()
            self.refresh()

    def _asked(self, asked: dict[str, Any]) -> None:
        if not asked:
            return
        self._id = max(self._id, int(asked["id"]))
        pins = tuple((str(key), str(value)) for key, value in asked["pins"])
        self.ask(Question(str(asked["model"]), str(asked["machine"]), int(asked["gpus"]), int(asked["batch"]), pins))

    def _wanted(self, _: Any, content: Any, __: Any) -> None:
        """The browser asks for one thing at a time, so that no slider waits for long."""
        want = str(content.get("want", ""))
        if content.get("id") == self._id and (want == "front" or want in SEARCHED):
            self.find(want)

    def find(self, what: str) -> None:
        """Find the next budget of the front (`front`), or what each value of a key would cost."""
        if isinstance(self.found, str):
            return
        if what == "front":
            done = min(BUDGETS, int(self.more.get("budgets", 0)) + 1)
            plans = traded(self.problem_now, done)
            front = [described(one, self.found.plan) for one in plans]
            self.more = {**self.more, "front": front, "budgets": done}
        elif what not in self.more:
            rows = instead(self.problem_now, what)
            best = self.found.plan
            self.more = {
                **self.more,
                what: [
                    {
                        "value": row.value, "reason": row.reason,
                        "plan": described(row.plan, best) if row.plan else None,
                        "price": price(best, row.plan) if row.plan else "",
                    }
                    for row in rows
                ],
            }  # fmt: skip

    def find_all(self) -> None:
        """Find the whole front, and the values of all keys that are shown."""
        if isinstance(self.found, str):
            return
        while self.more.get("budgets", 0) < BUDGETS:
            self.find("front")
        for key in self.data["columns"]:
            if key in SEARCHED:
                self.find(key)

    def state(self) -> dict[str, Any]:
        """The traits for a page without a kernel: it has this one answer, whole."""
        self.find_all()
        return {**super().state(), "alive": False}

    def _data(self) -> dict[str, Any]:
        q, found = self.question, self.found
        data: dict[str, Any] = {
            "id": self._id, "model": q.model, "machine": q.machine, "gpus": q.gpus, "batch": q.batch,
            "pins": [list(pin) for pin in q.pins], "heads": HEADS, "searched": list(SEARCHED), "kinds": list(KINDS),
            "budgets": BUDGETS, "plans": [], "columns": [], "problem": "", "price": "", "count": "",
            "capacity": self.shelf.machines[q.machine].memory,
            "device": f"{q.machine}, {gigabytes(self.shelf.machines[q.machine].memory)}",
        }  # fmt: skip
        if isinstance(found, str):
            return {**data, "problem": found}
        plans = [described(one, found.plan) for one in found.best]
        return {
            **data, "plans": plans, "columns": columns(found.best, q.pins), "price": self._price(found),
            "count": searched(found),
        }  # fmt: skip

    def _price(self, found: Found) -> str:
        """What the pins cost together; nothing without pins."""
        if not self.question.pins:
            return ""
        free = solved(self.problem_now._replace(pins=()))
        return "without pins no plan fits" if isinstance(free, str) else price(free.plan, found.plan)

    def summary(self) -> str:
        found = self.found
        if isinstance(found, str):
            return f"plans for {self.question}: {found.splitlines()[0]}"
        best, costs = found.plan, f"; {self.data['price']}" if self.data["price"] else ""
        return (
            f"plans for {self.question}: {clock(best.time)}, {best.tflops_per_gpu:.4g} TFLOP/s each, "
            f"{gigabytes(best.memory)} of {gigabytes(found.space.machine.memory)} with {best.words}{costs}"
        )

    def caption(self) -> str:
        if isinstance(self.found, str):
            return ""
        return "\n".join([advice(self.found.plan, self.found.space), *self.found.plan.reasons, searched(self.found)])

    def rows(self) -> list[list[str]]:
        if isinstance(self.found, str):
            return [["what", "why"], ["no plan", self.found]]
        table = [["plan", "step", "over the best", "TFLOP/s", "memory", "why"]]
        for one in self.data["plans"]:
            table.append([one["words"], one["time"], one["over"], one["tflops"], one["memory"], one["why"]])
        return table

    def picture(self, dark: bool | None = False) -> bytes:
        if isinstance(self.found, str):
            from minipar_widgets import words

            return words.picture(f"{self.question}: {self.found}", dark)
        while self.more.get("budgets", 0) < BUDGETS:
            self.find("front")
        return _picture(self, self.found, dark)


# The still picture ----------------------------------------------------------------------------------------------------

_WIDE, _LEFT, _ROW, _BAR, _SHOWN = 940, 12, 38, 190, 4


def _picture(view: PlanView, found: Found, dark: bool | None) -> bytes:
    """The best plans with their memory, and below the front and the reasons."""
    plans, keys = view.data["plans"][:_SHOWN], view.data["columns"]
    table = 48 + _ROW * len(plans)
    lines = [line for text in found.plan.reasons for line in wrapped(text, 80)]
    sketch = Sketch(_WIDE, table + 40 + max(240, 28 + 16 * len(lines)), dark)
    look = sketch.look
    sketch.text(_LEFT, 13, str(view.question), size=13)
    if view.data["price"]:
        room = _WIDE - 2 * _LEFT - sketch.measure(str(view.question), 13) - 20
        sketch.text(_WIDE - _LEFT, 13, sketch.cut(view.data["price"], room, 11), look.warn, 11, "rm")
    wide = {
        key: 16 + max(sketch.measure(text, 11) for text in (HEADS[key], *(one["cells"][key] for one in plans)))
        for key in keys
    }
    start = _LEFT + 122
    bar = _WIDE - _BAR - 62
    scale = min(1.0, (bar - 14 - start) / sum(wide.values()))
    pinned = {key for key, _ in view.question.pins}
    x = float(start)
    at: dict[str, float] = {}
    for key in keys:
        at[key] = x + wide[key] * scale / 2
        sketch.text(at[key], 36, HEADS[key], look.ink if key in pinned else look.muted, 10, "mm")
        x += wide[key] * scale
    sketch.text(bar, 36, f"memory of {view.data['device']}", look.muted, 10)
    for k, one in enumerate(plans):
        y = 48 + _ROW * k
        sketch.rect(_LEFT, y, _WIDE - 2 * _LEFT, 1, look.rule)
        sketch.text(_LEFT, y + 12, one["time"], size=12)
        sketch.text(_LEFT + 112, y + 12, one["over"], look.muted, 11, "rm")
        for key in keys:
            value, half = one["cells"][key], wide[key] * scale / 2
            same = k and value == plans[0]["cells"][key]
            if key in pinned:
                for thick in (0.0, 1.0):
                    left, wide_edge = at[key] - half + 2 + thick, 2 * (half - 2 - thick)
                    sketch.rect(left, y + 3 + thick, wide_edge, 18 - 2 * thick, edge=look.ink)
            sketch.text(at[key], y + 12, value, look.muted if same else look.ink, 11, "mm")
        sketch.text(start, y + 28, sketch.cut(one["why"], bar - start - 14, 10), look.muted, 10)
        sketch.rect(bar, y + 6, _BAR, 14, edge=look.muted)
        left = float(bar)
        for kind, size in zip(KINDS, one["bytes"], strict=True):
            length = size / view.data["capacity"] * _BAR
            sketch.rect(left, y + 6, length, 14, FACES[kind], "#444444", HATCHES[kind])
            left += length
        sketch.text(bar + _BAR + 6, y + 13, one["memory"], size=10)
    x, y = float(_LEFT), table + 14
    for kind in KINDS:
        sketch.rect(x, y - 6, 14, 12, FACES[kind], "#444444", HATCHES[kind])
        sketch.text(x + 19, y, kind, look.muted, 10)
        x += 34 + sketch.measure(kind, 10)
    _draw_front(sketch, view, found, table + 40)
    sketch.text(_WIDE / 2 + 20, table + 40, "Why the best one is as it is", size=12)
    for k, line in enumerate(lines):
        sketch.text(_WIDE / 2 + 20, table + 60 + 16 * k, line, look.muted, 10)
    return sketch.png()


def _draw_front(sketch: Sketch, view: PlanView, found: Found, top: float) -> None:
    """Time against memory: the front as steps, the best plans as rings, the device's memory as a dashed line."""
    look, front = sketch.look, view.more["front"]
    left, right, bottom = _LEFT + 48.0, _WIDE / 2 - 10, top + 190
    capacity = view.data["capacity"]
    times = [one["seconds"] for one in (*front, *view.data["plans"])]
    low, high = min(times) * 0.96, max(times) * 1.04
    most = max(capacity, *(one["total"] for one in front)) * 1.04

    def at(one: Mapping[str, Any]) -> tuple[float, float]:
        height = log(one["seconds"] / low) / log(high / low)
        return left + one["total"] / most * (right - left), bottom - height * (bottom - top - 16)

    sketch.text(_LEFT, top, "Time of a step against memory of a device", size=12)
    for tick in round_times(low, high):
        y = at({"seconds": tick, "total": 0})[1]
        sketch.line([(left, y), (right, y)], look.rule)
        sketch.text(left - 6, y, clock(tick), look.muted, 10, "rm")
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = left + part * capacity / most * (right - left)
        sketch.text(x, bottom + 12, gigabytes(part * capacity) if part else "0", look.muted, 10, "mm")
    x = left + capacity / most * (right - left)
    sketch.line([(x, top + 12), (x, bottom)], look.warn, 1.5, dashed=True)
    points = [at(one) for one in front]
    steps = [points[0]]
    for (_, y0), (x1, y1) in pairwise(points):
        steps += [(x1, y0), (x1, y1)]
    sketch.line([*steps, (x, points[-1][1])], "#0072B2" if not sketch.dark else "#56B4E9", 2)
    for one in view.data["plans"]:
        sketch.dot(*at(one), 4, look.paper, look.ink)
    for point in points:
        sketch.dot(*point, 4, "#0072B2" if not sketch.dark else "#56B4E9", look.paper)


def round_times(low: float, high: float) -> list[float]:
    """Round seconds between two times for an axis of their logarithm: 1, 2, 5, 10, ...; more where these are few."""
    for steps in ((1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9), tuple(k / 10 for k in range(10, 100))):
        found = [
            float(f"{step * 10.0**power:.3g}") for power in range(-7, 8) for step in steps
            if low <= step * 10.0**power <= high
        ]  # fmt: skip
        if len(found) >= 3:
            return found[:: max(1, len(found) // 5)]
    return [(low * high) ** 0.5]


# The explorer ---------------------------------------------------------------------------------------------------------


class PlanExplorer(Explorer):
    """Choose a model, a machine, GPUs and a batch; see the best plans, their memory, and why each loser loses.

    model      a name, words, or `Transformer(...)`, `Chain(...)`, as `planner.exhaustive.search` takes it
    hardware   a name, words, `Hardware(...)`, or a calibration
    gpus       how many there are: fewer than a node has, or whole nodes
    batch      rows of a step
    pins       keys that are fixed: "tp=8 zero=1"

    A click on a value pins it, and the search answers again. Where no plan fits, the view says what would do. Errors:
    PlanError for what is unknown, or impossible to ask.
    """

    view: PlanView

    def __init__(
        self,
        model: str | Sizes = "gpt3-175b",
        hardware: str | Hardware | Calibration = "a100-80gb",
        gpus: int = 1024,
        batch: int = 1536,
        pins: str | Mapping[str, Any] = "",
    ) -> None:
        shelf, name = Shelf().with_model(model)
        shelf, machine = shelf.with_machine(hardware)
        question = Question(name, machine, gpus, batch, _pins(pins))
        problem(shelf, name, machine, gpus, batch)  # (its errors are the caller's)
        self.view = PlanView(shelf, question)
        super().__init__([self.view])

    def ask(
        self,
        model: str | None = None,
        hardware: str | None = None,
        gpus: int | None = None,
        batch: int | None = None,
        pins: str | Mapping[str, Any] | None = None,
    ) -> None:
        """Ask again with something changed; what is not given stays as it is. Errors: PlanError for an unknown name."""
        shelf, question = self.view.shelf, self.view.question
        if model is not None:
            shelf, name = shelf.with_model(model)
            question = replace(question, model=name)
        if hardware is not None:
            shelf, name = shelf.with_machine(hardware)
            question = replace(question, machine=name)
        if gpus is not None:
            question = replace(question, gpus=gpus)
        if batch is not None:
            question = replace(question, batch=batch)
        if pins is not None:
            question = replace(question, pins=_pins(pins))
        self.view.shelf = shelf
        self.view.ask(question)

    def address(self) -> dict[str, str]:
        now = self.view.question
        pins = " ".join(f"{key}={value}" for key, value in now.pins)
        return {
            "model": now.model,
            "hardware": now.machine,
            "gpus": str(now.gpus),
            "batch": str(now.batch),
            "pins": pins,
        }

    def follow(self, words: Mapping[str, str]) -> None:
        for name in words:
            one_of("address", name, ("model", "hardware", "gpus", "batch", "pins"))
        counts = {name: words.get(name, "1") for name in ("gpus", "batch")}
        for name, text in counts.items():
            if not text.isdigit() or not 1 <= int(text) <= 10**6:
                raise PlanError(f"{name}={text!r}: must be a whole number from 1 on")
        given: dict[str, Any] = {name: int(text) if name in counts else text for name, text in words.items()}
        self.ask(**given)


def _pins(given: str | Mapping[str, Any]) -> Pins:
    """Pins as text. Errors: PlanError for words that are not key=value."""
    if isinstance(given, Mapping):
        return tuple((str(key), str(value)) for key, value in given.items())
    pairs = [word.partition("=") for word in given.split()]
    for key, equals, value in pairs:
        if not equals or not value:
            raise PlanError(f"pin {key!r}: must be key=value, such as tp=8")
    return tuple((key, value) for key, _, value in pairs)
