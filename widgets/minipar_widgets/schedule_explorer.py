"""ScheduleExplorer: sliders for a schedule and its costs, with the timeline, the numbers and the program they give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from html import escape
from typing import TYPE_CHECKING, Any

from minipar import strategies
from minipar.errors import PlanError
from minipar.prediction.simulator import simulate
from minipar.program.collector import paused
from minipar.strategies.plan import Plan
from minipar.wording import several
from minipar_widgets import exploring, running
from minipar_widgets.arguments import one_of
from minipar_widgets.base import Explorer, real
from minipar_widgets.exploring import Found, Settings
from minipar_widgets.host import ui
from minipar_widgets.timeline import Timeline

if TYPE_CHECKING:
    from minipar.training.training import Run

LINES = 30  # how many lines of each rank's program are shown
_WIDE, _HALF = {"width": "330px"}, {"width": "200px"}
_LABEL = {"description_width": "120px"}


class ScheduleExplorer(Explorer):
    """Every schedule of `minipar schedules`, predicted while you move the sliders, and run when you press *run it*.

    settings   first values of the sliders; also as keywords: ScheduleExplorer(schedule="zb-h1", stages=4)
    found      the result of the settings: `found.trace` and `found.program`, or `found.problem`, a text
    run        the last real run, with `run.trace` and `run.predicted`; None before the first

    While a run goes on, the controls are locked: what it shows at its end belongs to them. Errors: PlanError for
    values that no slider has.
    """

    def __init__(self, settings: Settings | None = None, **given: Any) -> None:
        if settings is not None and not isinstance(settings, Settings):
            raise PlanError(f"ScheduleExplorer({settings!r}): must be Settings(...), or keywords such as {_EXAMPLE}")
        _known(given)
        now = exploring.check(replace(settings or Settings(), **given))
        rest = (1.0,) * (now.stages - len(now.factors)) if now.factors else ()
        self.now = replace(now, factors=(*now.factors, *rest))
        self.found = Found()
        self.run: Run | None = None
        self._attempt: running.Attempt | None = None
        self._ran: tuple[Settings, int, int] | None = None  # of the last run: see `_asked`
        self._setting = False
        self._chunks = self.now.chunks or 2
        self._make_controls()
        self.timeline = Timeline(simulate(Plan().compile(layers=1)))
        self.timeline.at_once = 1_000  # events; for more events the picture comes first, and the details later
        self._facts = ui.HTML()
        self._program = ui.HTML(layout={"flex": "1 1 260px", "min_width": "240px", "max_width": "100%"})
        wide = {"flex": "3 1 520px", "min_width": "280px", "min_height": "320px", "display": "block"}  # no jumps
        picture = ui.Box([self.timeline, self._facts], layout=wide)
        side_by_side = {"flex_flow": "row wrap", "align_items": "flex-start", "width": "100%"}
        super().__init__(
            [
                ui.Box(self._controls, layout={"flex_flow": "row wrap", "width": "100%"}),
                self._slower,
                ui.Box([picture, self._program], layout=side_by_side),
                ui.Box(
                    real("ScheduleExplorer()", *self._running),
                    layout={"flex_flow": "row wrap", "align_items": "center", "width": "100%"},
                ),
            ],
            layout={"width": "100%"},
        )
        self._tell()

    # controls ---------------------------------------------------------------------------------------------------------

    def _make_controls(self) -> None:
        now = self.now
        names = [schedule.name for schedule in strategies.schedules()]
        look: dict[str, Any] = {"style": _LABEL, "layout": _WIDE}
        self.schedule = ui.Dropdown(options=names, value=now.schedule, description="schedule", **look)
        self.stages = ui.IntSlider(now.stages, 1, exploring.STAGES, description="stages (ranks)", **look)
        self.microbatches = ui.IntSlider(
            now.microbatches, 1, exploring.MICROBATCHES, description="micro-batches", **look
        )
        self.chunks = ui.IntSlider(self._chunks, 1, exploring.CHUNKS, description="chunks a rank", **look)
        self.ratio = ui.FloatSlider(now.ratio, min=0.5, max=4, step=0.1, description="backward/forward", **look)
        self.latency = ui.FloatSlider(now.latency, min=0, max=2, step=0.05, description="latency/forward", **look)
        self._factors = [
            ui.FloatSlider(
                (*now.factors, *[1.0] * exploring.STAGES)[rank], min=0.5, max=3, step=0.1, description=f"rank {rank}",
                style={"description_width": "55px"}, layout={"width": "230px"}, readout_format=".1f",
            )
            for rank in range(exploring.STAGES)
        ]  # fmt: skip
        self._rows = ui.Box(self._factors[: now.stages], layout={"flex_flow": "row wrap"})
        self._slower = ui.Accordion([self._rows], titles=["imbalance: how much slower each rank computes"])
        self._controls: list[Any] = [
            self.schedule, self.stages, self.microbatches, self.chunks, self.ratio, self.latency,
        ]  # fmt: skip
        words = ("schedule", "stages", "microbatches", "chunks", "ratio", "latency")
        self.controls = dict(zip(words, self._controls, strict=True))
        self.controls |= {f"rank{rank}": factor for rank, factor in enumerate(self._factors)}
        for control in self.controls.values():
            control.observe(self._moved, "value")

        self.forward = ui.IntSlider(
            20, 5, 100, 5, description="a forward takes (ms)", style={"description_width": "140px"}, layout=_WIDE
        )
        self.steps = ui.IntSlider(3, 1, 20, description="steps", style={"description_width": "45px"}, layout=_HALF)
        self.start = ui.Button(
            description="run it", icon="play", tooltip="train on real ranks that emulate this device"
        )
        self.cancel = ui.Button(description="cancel", icon="stop", disabled=True, layout={"width": "100px"})
        self.progress = ui.IntProgress(0, 0, 1, layout={"width": "160px", "visibility": "hidden"})
        self.report = ui.HTML()
        self.start.on_click(lambda _: self.begin())
        self.cancel.on_click(lambda _: self.stop())
        for asked in (self.forward, self.steps):
            asked.observe(self._moved, "value")
        self._running = [self.forward, self.steps, self.start, self.cancel, self.progress, self.report]

    def _moved(self, _: Any) -> None:
        if self._setting:
            return
        if self._attempt is not None:  # it was moved before the page had heard of the lock
            self._put_back()
            return
        stages = self.stages.value
        self._chunks = self._chunks if self.chunks.disabled else self.chunks.value
        self.now = Settings(
            self.schedule.value,
            stages,
            self.microbatches.value,
            self._chunks,
            self.ratio.value,
            self.latency.value,
            tuple(slider.value for slider in self._factors[:stages]),
        )
        if len(self._rows.children) != stages:
            self._rows.children = self._factors[:stages]
        self._tell()

    def _put_back(self) -> None:
        """Let the controls show what the present run is one of."""
        assert self._ran is not None
        now, forward, steps = self._ran
        self._setting = True
        for control, value in (
            *zip(self._controls, (now.schedule, now.stages, now.microbatches), strict=False),
            (self.ratio, now.ratio), (self.latency, now.latency), *zip(self._factors, now.factors, strict=False),
            (self.forward, forward), (self.steps, steps),
        ):  # fmt: skip
            control.value = value
        self._show_chunks(strategies.find(now.schedule).chunks if not self._takes_chunks else self._chunks)
        self._setting = False

    def _show_chunks(self, count: int) -> None:
        self._setting, before = True, self._setting
        self.chunks.value = count
        self._setting = before

    def set(self, **given: Any) -> Found:
        """Move controls, as the mouse does, and return the result. The names are those of `Settings`."""
        controls = {
            name: getattr(self, name) for name in ("schedule", "stages", "microbatches", "chunks", "ratio", "latency")
        }
        _known(given)
        if self._attempt is not None:
            raise PlanError("set: a run goes on with the present settings; possible are stop() and wait()")
        exploring.check(replace(self.now, **{"factors": (), **given}))
        self._setting = True
        try:
            for name, value in given.items():
                if name == "factors":
                    for slider, factor in zip(self._factors, value, strict=False):
                        slider.value = factor
                elif name == "chunks":
                    self._chunks = value
                    self._show_chunks(value)
                else:
                    controls[name].value = value
        finally:
            self._setting = False
        self._moved(None)
        return self.found

    # what is shown ----------------------------------------------------------------------------------------------------

    def _tell(self) -> None:
        """Show the prediction as soon as it is known, and then what takes longer: verify's complaint, and details."""
        chosen = strategies.find(self.now.schedule)
        self._lock()
        self._show_chunks(chosen.chunks if not self._takes_chunks else self._chunks)
        with paused():
            self.found = exploring.predict(self.now)
            if self.found.trace is not None:
                self.timeline.update(self.found.trace)
                self._facts.value = _words(exploring.staleness(self.found))
                self.found = exploring.checked(self.found)
            found = self.found
            if found.trace is None:
                self.timeline.problem, self._facts.value = found.problem, _words("")
                self.timeline.refresh()
            nothing = "no program: no plan fits these numbers"
            self._program.value = _listing(found.program.text(limit=LINES) if found.program is not None else nothing)
        self._lock()
        if self._attempt is None and self._ran not in (None, self._asked):
            self.report.value = ""  # that of other settings

    def _lock(self) -> None:
        """Every control that cannot be used now is disabled: all of them during a run."""
        runs = self._attempt is not None
        for control in (*self._controls, *self._factors, self.forward, self.steps):
            control.disabled = runs
        self.chunks.disabled = runs or not self._takes_chunks
        self.start.disabled = runs or self.found.trace is None

    @property
    def _asked(self) -> tuple[Settings, int, int]:
        """What a run depends on: the settings, milliseconds of a forward, and steps."""
        return self.now, self.forward.value, self.steps.value

    @property
    def _takes_chunks(self) -> bool:
        return "chunks" in strategies.find(self.now.schedule).options

    # running ----------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start a real run of the present settings. It runs in its own thread; `stop` ends it."""
        if self._attempt is not None or self.found.trace is None:
            return
        now, plan = self.now, self.now.plan()
        spec = running.device(self.forward.value / 1e3, now.ratio, now.latency, now.factors)
        self.cancel.disabled = False
        self.progress.max, self.progress.layout.visibility = self.steps.value, "visible"
        layers = exploring.layers_of(plan)
        self._ran = self._asked
        self._attempt = running.Attempt(plan, layers, spec, self.steps.value, self._progress, self._ended)
        self._lock()
        self._attempt.start()

    def stop(self) -> None:
        """End the present run."""
        if self._attempt is not None:
            self.cancel.disabled = True
            self.report.value = _words("stopping")
            self._attempt.cancel()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the present run has ended."""
        if self._attempt is not None:
            self._attempt.wait(timeout)

    def _progress(self, done: int, steps: int, what: str) -> None:
        self.progress.value = done
        self.report.value = _words(what)

    def _ended(self, run: Run | None, words: str) -> None:
        self._attempt = None
        self.cancel.disabled = True
        self._lock()
        self.progress.layout.visibility = "hidden"
        self.progress.value = 0
        assert self._ran is not None
        title = f"run of {_named(self._ran[0])}: "
        if run is None:
            self.report.value = _words(title + words)
            return
        self.run = run
        self.timeline.update(run.trace, run.predicted)
        self._facts.value = ""
        error = f"{run.prediction_error:+.1%}".replace("+0.0%", "0.0%")
        self.report.value = _words(
            f"{title}loss {run.losses[0]:.3f} to {run.losses[-1]:.3f}; the prediction was off by {error}; "
            "move a slider to go on predicting"
        )

    # words, table, picture --------------------------------------------------------------------------------------------

    def settings(self) -> dict[str, str]:
        now = self.now
        factors = ", ".join(f"{x:g}" for x in now.factors) if set(now.factors) - {1.0} else "none"
        return {
            "schedule": now.schedule,
            "stages": str(now.stages),
            "micro-batches": str(now.microbatches),
            **({"chunks a rank": str(now.chunks)} if self._takes_chunks else {}),
            "backward / forward": f"{now.ratio:g}",
            "latency / forward": f"{now.latency:g}",
            "imbalance": factors,
        }

    def summary(self) -> str:
        what = f"ScheduleExplorer {_named(self.now)}"
        return f"{what}: {self.found.problem.splitlines()[0] if self.found.problem else exploring.facts(self.found)}"

    def caption(self) -> str:
        return self.timeline.caption()

    def picture(self, dark: bool | None = False) -> bytes:
        return self.timeline._png(dark)

    def rows(self) -> list[list[str]]:
        return exploring.table(self.found) if self.found.trace is not None else []


_EXAMPLE = 'ScheduleExplorer(schedule="zb-h1", stages=4)'


def _known(given: Mapping[str, Any]) -> None:
    names = [field.name for field in fields(Settings)]
    for name in given:
        one_of("setting", name, names)


def _named(now: Settings) -> str:
    return f"{now.schedule}, {several(now.stages, 'stage')}, {several(now.microbatches, 'micro-batch')}"


def _words(text: str) -> str:
    return f'<div role="status" aria-live="polite" style="line-height:1.4">{escape(text)}</div>'


def _listing(text: str) -> str:
    style = (
        "height:440px; width:0; min-width:100%; box-sizing:border-box; overflow:auto; white-space:pre; margin:0;"
        "font-family:var(--jp-code-font-family, monospace);"
        "padding:6px 8px; font-size:12px; line-height:1.35; color:inherit;"
        "background:var(--jp-layout-color1, transparent); border:1px solid var(--jp-border-color2, #aaa)"
    )
    return f'<pre tabindex="0" aria-label="the program" style="{style}">{escape(text)}</pre>'
