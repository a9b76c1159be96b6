"""MemoryExplorer: the memory that a plan needs on every rank, by formula and kind, compared with a device's capacity
and with the measured memory of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from html import escape
from typing import Any

from minipar import strategies
from minipar.costs.analytic import Division
from minipar.costs.device import hardware, known_hardware
from minipar.costs.quantities import size
from minipar.errors import MiniparError, PlanError
from minipar.models.sizes import Transformer, names, sizes
from minipar.models.table import PRESETS
from minipar.prediction.rank_memory import KINDS
from minipar.strategies.plan import Plan
from minipar.wording import several
from minipar_widgets import chart, verdict
from minipar_widgets.arguments import one_of, whole
from minipar_widgets.base import Explorer, View, beside, real
from minipar_widgets.host import traitlets, ui
from minipar_widgets.memory_model import (
    FACES,
    HATCHES,
    MANY,
    Choice,
    Memory,
    figure,
    label,
    measure,
    scale_of,
    table,
    why_not_run,
)
from minipar_widgets.naming import head
from minipar_widgets.sketch import Sketch, ticks

Peaks = Sequence[Mapping[str, int]]
_OWN = "own numbers"
_POWERS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]


class MemoryView(View):
    """The formulas of one choice, with numbers; `update(choice, measured)` shows another one."""

    name = "memory"
    data = traitlets.Dict().tag(sync=True)

    def __init__(self, choice: Choice | None = None, measured: Peaks = ()) -> None:
        super().__init__()
        self.memory: Memory | None = None
        self.measured: Peaks = ()
        self.update(choice or Choice(), measured)

    def update(self, choice: Choice, measured: Peaks = ()) -> None:
        """Show another choice. If it is impossible, the widget shows the reason instead."""
        with self.hold_sync():
            try:
                self.memory, self.measured = Memory.of(choice), measured
                if measured and len(measured) != len(self.memory.details):
                    raise MiniparError(
                        f"the measured run has {several(len(measured), 'rank')}, the plan {len(self.memory.details)}"
                    )
                self.data = _data(self.memory, measured)
                self.problem = ""
            except (MiniparError, ValueError, OverflowError) as error:
                self.memory, self.problem = None, str(error)
            self.refresh()

    def summary(self) -> str:
        assert self.memory is not None
        return f"{self.memory.choice}: {self.memory.verdict}"

    def caption(self) -> str:
        return (
            "The formulas in letters and with numbers, for ranks that are alike; the dashed line is what the device "
            "has, a diamond what a run measured."
        )

    def rows(self) -> list[list[str]]:
        assert self.memory is not None
        rows = table(self.memory)
        for k, kind in enumerate(KINDS):
            term = self.memory.terms(self.memory.worst)[k]
            filled = f"{term.formula} = {term.filled}"
            rows.append([f"{kind} of {label([self.memory.worst])}", filled, size(term.bytes), term.note, *[""] * 5])
        for rank, found in enumerate(self.measured):
            rest = [size(found.get(kind, 0)) for kind in KINDS]
            rows.append([f"measured: rank {rank}", *rest, size(sum(found.values())), "", ""])
        return rows

    def picture(self, dark: bool | None = False) -> bytes:
        assert self.memory is not None
        return _picture(self.memory, self.measured, dark, chart.WIDE)


def _data(memory: Memory, measured: Peaks) -> dict[str, Any]:
    groups = []
    for k, ranks in enumerate(memory.groups):
        detail, found = memory.details[ranks[0]].memory, measured[ranks[0]] if measured else None
        groups.append({
            "label": label(ranks),
            "worst": k == 0 and len(memory.groups) > 1,
            "total": detail.total,
            "host": detail.host,
            "measured": sum(found.values()) if found else None,
            "terms": [[t.kind, t.bytes, t.formula, t.filled, t.note, found.get(t.kind, 0) if found else None]
                      for t in memory.terms(ranks[0])],
        })  # fmt: skip
    device = memory.choice.device or "the device"
    return {"groups": groups, "capacity": memory.choice.capacity, "device": device}


def _picture(memory: Memory, measured: Peaks, dark: bool | None, width: int) -> bytes:
    """The bars of all groups of ranks, and, where there is room, the formulas of the rank that needs most."""
    shown, formulas = memory.groups[:MANY], width == chart.WIDE
    unit, word = scale_of(memory)
    left, row = 150, 22
    sketch = Sketch(width, 64 + row * len(shown) + (26 + 34 * len(KINDS)) * formulas, dark)
    most = max(
        max(memory.details[ranks[0]].memory.total for ranks in shown), *(sum(m.values()) for m in measured or [{}])
    )
    near = memory.choice.capacity < 3 * most
    whole = max(most, memory.choice.capacity if near else 0) * 1.02
    scale = (width - left - 20) / whole
    bottom = 30 + row * len(shown)
    for tick in ticks(whole / unit, 6 if formulas else 3):
        x = left + tick * unit * scale
        sketch.line([(x, 28), (x, bottom)], sketch.look.rule)
        sketch.text(x, bottom + 10, f"{tick:g} {word}" if tick else "0", sketch.look.muted, 11, "mm")
    for k, ranks in enumerate(shown):
        x, y, held = float(left), 30 + row * k, memory.details[ranks[0]].memory
        worst = "worst: " if k == 0 and len(shown) > 1 else ""
        sketch.text(left - 6, y + row / 2 - 1, worst + label(ranks), size=11, anchor="rm")
        for kind in KINDS:
            length = getattr(held, kind) * scale
            sketch.rect(x, y + 2, length, row - 5, FACES[kind], "#444444", HATCHES[kind])
            x += length
        if measured:
            sketch.diamond(
                left + sum(measured[ranks[0]].values()) * scale, y + row / 2, 6, "#D55E00", sketch.look.paper
            )
    if near:
        x = left + memory.choice.capacity * scale
        sketch.line([(x, 26), (x, bottom + 2)], sketch.look.warn, 2, dashed=True)
        words = f"{memory.choice.device or 'capacity'} {size(memory.choice.capacity)}"
        sketch.text(x - 4 if x > width / 2 else x + 4, 14, words, sketch.look.warn, 11, "rm" if x > width / 2 else "lm")
    for k, term in enumerate(memory.terms(memory.worst) if formulas else ()):
        y = bottom + 36 + 34 * k
        sketch.rect(left - 22, y - 7, 14, 14, FACES[term.kind], "#444444", HATCHES[term.kind])
        sketch.text(left - 28, y, term.kind, size=12, anchor="rm")
        sketch.text(left, y - 7, sketch.cut(f"{size(term.bytes)} = {term.filled}", width - left - 8), size=12)
        sketch.text(
            left, y + 9, sketch.cut(f"{term.formula}: {term.note}", width - left - 8, 11), sketch.look.muted, 11
        )
    return sketch.png()


class MemoryExplorer(Explorer):
    """Choose a model, a device and a plan; see what every rank needs, why, and what to change so that it fits.

    plan    its first values: the keys that have a control here
    model   a name of the list
    rows    of each micro-batch
    grid    for which values a page without a kernel (`to_html`) has answers: {"model": ("gpt2-xl", "gpt3-175b"),
            "device": ("a100-80gb",), "dp": (1, 8), "pp": (1, 4), "zero": (0, 1), "checkpoint": ("none", "sqrt")}; what
            is not given: this model and device, and some values of the others

    `measure()`, or its button, runs a small choice on real ranks; `overlay(peaks)` shows peaks measured elsewhere.
    While a run goes on, the controls are locked. Errors: PlanError for what no control has.
    """

    def __init__(
        self,
        plan: str = "dp=8 pp=4 microbatches=8 precision=bf16",
        model: str = "gpt2-xl",
        rows: int = 1,
    ) -> None:
        chosen = _offered(Plan.parse(plan))
        whole("rows", rows, 1, 4096)
        style, layout = {"description_width": "7.5em"}, {"width": "19em"}
        both = {"style": style, "layout": layout}
        lazy = {**both, "continuous_update": False}

        def pick(name: str, options: Sequence[Any], value: Any) -> ui.Dropdown:
            options = list(options) if value in options else sorted({*options, value})
            return ui.Dropdown(options=options, value=value, description=name, **both)

        def number(name: str, value: int, most: int, least: int = 1) -> ui.BoundedIntText:
            return ui.BoundedIntText(value, min=least, max=most, description=name, **lazy)

        self.controls: dict[str, Any] = {
            "model": pick("model", [*sorted(names(), key=lambda name: name not in PRESETS), _OWN], model),
            "layers": number("layers", 48, 1000),
            "width": number("width", 1600, 100_000),
            "heads": number("heads", 25, 1000),
            "context": number("context", 1024, 1_000_000),
            "vocab": number("vocab", 50257, 1_000_000),
            "device": pick("device", [*known_hardware(), "own"], "a100-80gb"),
            "capacity": ui.BoundedFloatText(80, min=0.001, max=1e6, description="memory (GB)", **lazy),
            "dp": pick("dp", _POWERS, chosen.dp),
            "pp": pick("pp", [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64], chosen.pp),
            "tp": pick("tp (formula)", [1, 2, 4, 8, 16], chosen.tp),
            "sequence": ui.Checkbox(
                chosen.sequence_parallel, description="sequence parallel", indent=True, **both
            ),
            "experts": pick("experts", [0, 2, 4, 8, 16, 32, 64, 128], 0),
            "top": pick("experts a token", [1, 2, 4, 8], 1),
            "ep": pick("ep (formula)", [1, 2, 4, 8, 16, 32, 64], 1),
            "schedule": pick("schedule", _schedules(), chosen.schedule),
            "microbatches": number("micro-batches", chosen.microbatches, 1024),
            "rows": number("rows in each", rows, 4096),
            "zero": ui.IntSlider(chosen.zero, 0, 3, description="ZeRO stage", **lazy),
            "checkpoint": pick("recompute", ["none", "selective", "sqrt", "1", "2", "4"], str(chosen.checkpoint)),
            "offload": ui.SelectMultiple(
                options=["optimizer", "parameters", "activations"], value=chosen.offload, rows=3, description="offload",
                **both,
            ),
            "precision": pick("precision", ["float32", "bf16"], chosen.precision),
        }  # fmt: skip
        self.view = MemoryView()
        self.chart = chart.Chart(200)
        self.run_button = ui.Button(description="measure a run", icon="play", layout={"width": "13em", "flex": "none"})
        self.note = ui.HTML()
        self.verdict = ui.HTML()
        self._measured: tuple[str, Peaks] = ("", ())
        panel = ui.HBox(list(self.controls.values()), layout={"flex_flow": "row wrap"})
        ask = beside(self.run_button, self.note)
        super().__init__([self.verdict, panel, *real("MemoryExplorer()", ask), self.chart, self.view])
        for control in self.controls.values():
            control.observe(self._changed, "value")
        self.run_button.on_click(self.measure)
        self._changed()

    @property
    def choice(self) -> Choice:
        """The choice that the controls mean. Errors: PlanError."""
        now = {name: control.value for name, control in self.controls.items()}
        own = now["model"] == _OWN
        keys = ("layers", "width", "heads", "context", "vocab")
        model = "gpt2-xl" if own else now["model"]
        words = ("dp", "pp", "schedule", "microbatches", "zero", "checkpoint", "precision")
        plan = Plan(**{key: now[key] for key in words}, offload=tuple(now["offload"]))
        capacity = hardware(now["device"]).memory if now["device"] != "own" else now["capacity"] * 1e9
        tp = now["tp"] if self._transformer else 1
        more = now["experts"] if self._transformer and not self._experts else 0  # (a mixture has its own)
        division = Division(tp, now["sequence"] and tp > 1, now["ep"] if more or self._experts else 1)
        numbers = {key: now[key] for key in keys} if own else {}
        device = "" if now["device"] == "own" else now["device"]
        return Choice(plan, model, numbers, now["rows"], int(capacity or 0), device, division, more, now["top"])

    @property
    def _transformer(self) -> bool:
        """Whether tp and ep can divide the model."""
        name = self.controls["model"].value
        return name == _OWN or isinstance(sizes(name), Transformer)

    @property
    def _experts(self) -> int:
        """How many experts the model has of its own."""
        name = self.controls["model"].value
        chosen = None if name == _OWN else sizes(name)
        return chosen.experts if isinstance(chosen, Transformer) else 0

    def _changed(self, change: Any = None) -> None:
        now = {name: control.value for name, control in self.controls.items()}
        for name in ("layers", "width", "heads", "context", "vocab"):
            self.controls[name].layout.display = "" if now["model"] == _OWN else "none"
        self.controls["capacity"].layout.display = "" if now["device"] == "own" else "none"
        added = self._transformer and not self._experts
        shown = {"tp": self._transformer, "sequence": now["tp"] > 1, "experts": added}
        shown |= {"top": added and now["experts"], "ep": self._experts or (added and now["experts"])}
        for name, there in shown.items():
            self.controls[name].layout.display = "" if there else "none"
        choice = self._judge()
        reason = "no such plan" if choice is None else why_not_run(choice)
        self.run_button.disabled, self.run_button.tooltip = bool(reason), reason or "train two steps on this machine"
        note = "a real run: " + reason if reason else "" if self.view.measured else "two steps, on real ranks"
        self.note.value = "" if self.problem else escape(note)
        self.verdict.value = head(self.parts()["verdict"] or verdict.impossible(self.problem))
        self.view.layout.display = "none" if self.problem else ""  # (the verdict says why)
        drawn = None
        if self.view.memory is not None:  # (the view below names the colours; in a narrow page a legend takes the room)
            drawn = self.figure()
            drawn["layout"]["showlegend"] = False
        self.chart.show(drawn, self.view._line())

    def _judge(self) -> Choice | None:
        """Put the present choice into the view; None, and the reason in the choice's place, if it is impossible."""
        try:
            choice = self.choice
        except MiniparError as error:
            self.view.memory, self.view.problem = None, str(error)
            self.view.refresh()
            self.problem = self.view.problem
            return None
        self.view.update(choice, self._measured[1] if self._measured[0] == str(choice) else ())
        self.problem = self.view.problem
        return choice

    def caption(self) -> str:
        return "" if self.view.memory is None else self.view.memory.verdict

    def figure(self) -> Any:
        """The bars of all ranks, as data for plotly. MiniparError if there is nothing to draw."""
        if self.view.memory is None:
            raise MiniparError(self.view.problem)
        return figure(self.view.memory, self.view.measured)

    def measure(self, _: Any = None) -> None:
        """Run the choice for two steps on this machine, and show the measured peaks beside the formulas."""
        choice = self.choice
        said = f"run of {escape(str(choice))}"
        self._lock(True)
        self.note.value = f"{said} ..."
        try:
            self.overlay(measure(choice))
        except MiniparError as error:
            self.note.value = f"{said}: {escape(str(error))}"
        finally:
            self._lock(False)
            self.run_button.disabled = bool(why_not_run(choice))

    def _lock(self, locked: bool) -> None:
        for control in (*self.controls.values(), self.run_button):
            control.disabled = locked

    def overlay(self, peaks: Peaks) -> None:
        """Show measured peaks beside the formulas of the present choice: for each rank bytes by kind, as
        `trace.peak_by_kind(rank)` gives them."""
        self._measured = str(self.choice), list(peaks)
        self._changed()
        if self.view.memory is not None:
            found = sum(peaks[self.view.memory.worst].values())
            formula = self.view.memory.details[self.view.memory.worst].memory.total
            self.note.value = (
                f"measured on rank {self.view.memory.worst}: {size(found)}, by formula {size(formula)}; "
                "the run also has input rows and temporaries, which no formula here counts"
            )

    def settings(self) -> dict[str, str]:
        if self.view.memory is None:
            return {}
        one = self.view.memory.choice
        return {
            "model": one.model,
            "plan": str(one.plan),
            "rows": str(one.rows),
            "device": f"{one.device} {size(one.capacity)}",
        }

    def parts(self) -> dict[str, str]:
        """The verdict first; then the line need not repeat it, and the settings are in both."""
        if self.view.memory is None:
            return {"verdict": "", **super().parts()}
        return {
            "verdict": verdict.html(self.view.memory), "line": escape(str(self.view.memory.choice)), "settings": "",
        }  # fmt: skip

    def section(self, place: str = "widget") -> str:
        """The view, and the figure of all ranks as a picture: of the choice that is shown first."""
        view, pictures = self.view, ""
        if view.memory is not None:
            memory = view.memory
            pictures = chart.picture(self._line(), lambda dark, width: _picture(memory, view.measured, dark, width))
        return super().section(place) + pictures


def _offered(plan: Plan) -> Plan:
    """The plan, if the explorer has a control for each of its keys."""
    keys = ["dp", "pp", "tp", "sequence_parallel", "schedule", "microbatches", "zero", "checkpoint"]
    keys += ["offload", "precision"]
    usual: dict[str, Any] = {field.name: field.default for field in fields(Plan) if field.name in keys}
    rest = replace(plan, **usual)
    for field in fields(Plan):
        if getattr(rest, field.name) != field.default:
            raise PlanError(
                f"MemoryExplorer: no control for {field.name}={getattr(plan, field.name)}; possible are "
                f"{', '.join(keys)}, and `minipar memory` takes all keys"
            )
    one_of("schedule", plan.schedule, _schedules())
    whole("microbatches", plan.microbatches, 1, 1024)
    return plan


def _schedules() -> list[str]:
    """The schedules for which there is a formula: all except those that cut sequences."""
    return [one.name for one in strategies.schedules() if "slices" not in one.options]
