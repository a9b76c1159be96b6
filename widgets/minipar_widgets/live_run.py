"""A training run while it runs: progress, loss, and the timeline of the last step, at most ten updates a second.

    run = live(partial(models.gpt, layers=8), data.stdlib_text(), "pp=2 microbatches=8", steps=40)

In a notebook a widget is shown during the run (its *cancel*, or the notebook's stop button, ends the run), and a
picture afterwards, so that a saved notebook shows what happened. In a terminal text is shown (`following.Screen`).

While a cell runs, a kernel with subshells (ipykernel 7) receives a click on a button in another thread, if the page
supports that (JupyterLab 4.4). That thread then does the same as the notebook's stop button.
"""

from __future__ import annotations

import io
import signal
import threading
from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING, Any

from PIL import Image

from minipar.execution.following import Moment, Screen
from minipar_widgets import words
from minipar_widgets.base import Explorer
from minipar_widgets.base import live as in_notebook
from minipar_widgets.host import ui
from minipar_widgets.sketch import Sketch
from minipar_widgets.timeline import Timeline

if TYPE_CHECKING:
    from minipar.strategies.plan import Plan
    from minipar.training.training import Run

_WIDTH, _HEIGHT = 1000, 104
_LOSS = "#D55E00"


class Stopped(KeyboardInterrupt):
    """A run was cancelled or interrupted. A notebook shows this as one line, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [f"Stopped: {self}"]


class LiveRun(Explorer):
    """The widget that `live` shows. `heard(moment)` shows a moment of the run, `ended(how)` shows how it ended."""

    def __init__(self, plan: str = "", steps: int = 1) -> None:
        self.moment = Moment(0, steps, [], None, 0.0)
        self.plan, self.state_of_run = plan, "starting"
        self.cancelled = False
        self._going: threading.Thread | None = None  # the thread that trains, while `cancel` may interrupt it
        self._lock = threading.Lock()
        self.bar = ui.IntProgress(value=0, max=max(1, steps), layout={"width": "220px"})
        self.state_words = ui.HTML(value=_status("starting"))  # screen readers read it when it changes
        self.line = ui.Label(value="profile, calibrate, predict")
        self.stop = ui.Button(
            description="cancel", icon="stop", layout={"width": "100px"}, tooltip="end the run and its ranks"
        )
        self.stop.on_click(lambda _: self.cancel())
        self.curve = ui.HTML(value=self._chart(), layout={"width": "100%"})
        self.timeline: Timeline | None = None
        self.children: Any
        hears = hears_buttons()
        self.stop.disabled = not hears
        self.hint = ui.HTML(
            '<span style="opacity:.8">' + ("or interrupt" if hears else "Interrupt") + " the kernel (I, I)"
            + ("" if hears else " to stop") + "</span>"
        )  # fmt: skip
        row = [self.bar, self.stop, self.hint, self.state_words, self.line]
        layout = {"flex_flow": "row wrap", "align_items": "center", "width": "100%"}
        super().__init__([ui.Box(row, layout=layout), self.curve], layout={"width": "100%"})
        _by_page(self.stop)

    def heard(self, moment: Moment) -> None:
        """Show a moment of the run."""
        self.moment, self.state_of_run = moment, "running" if moment.step < moment.steps else "done"
        self.bar.max, self.bar.value = max(1, moment.steps), moment.step
        self.state_words.value, self.line.value = _status(self.state_of_run), moment.line()
        self.curve.value = self._chart()
        if moment.trace is not None:
            if self.timeline is None:
                self.timeline = Timeline(moment.trace)
                self.children = [*self.children[:2], self.timeline]
            else:
                self.timeline.update(moment.trace)
        if self.cancelled:  # (for runs in other threads: a signal can interrupt only the main thread)
            raise KeyboardInterrupt

    def begin(self) -> None:
        """From now until `over`, `cancel` can interrupt this thread."""
        with self._lock:
            self._going = threading.current_thread()

    def cancel(self) -> None:
        """Stop the run as the notebook's stop button does. Any thread may call this."""
        with self._lock:
            if self._going is None or self.cancelled:
                return
            self.cancelled = True
            if self._going is threading.main_thread() and self._going is not threading.current_thread():
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def over(self) -> None:
        """From now on `cancel` does nothing."""
        with self._lock:
            self._going = None

    def ended(self, how: str) -> None:
        """Show how the run ended: done, stopped, or the text of the error."""
        self.state_of_run = how
        self.state_words.value, self.line.value = _status(how), self.moment.line()

    def summary(self) -> str:
        return f"live run of {self.plan}: {self.state_of_run}, step {self.moment.step} of {self.moment.steps}"

    def caption(self) -> str:
        return f"{self.state_of_run}: {self.moment.line()}"

    def settings(self) -> dict[str, str]:
        return {"plan": self.plan, "steps": str(self.moment.steps)}

    def rows(self) -> list[list[str]]:
        return [["step", "loss"], *([str(k), f"{loss:.6f}"] for k, loss in enumerate(self.moment.losses))]

    def picture(self, dark: bool | None = False) -> bytes:
        """Progress and loss above, the last step's timeline below."""
        parts = [Image.open(io.BytesIO(self._curve(dark))).convert("RGBA")]
        if self.timeline is not None:
            parts.append(Image.open(io.BytesIO(self.timeline._png(dark))).convert("RGBA"))
        size = words.FINE * _WIDTH, sum(part.height for part in parts)
        whole = Image.new("RGBA", size, words.paper(dark).paper)
        top = 0
        for part in parts:
            whole.paste(part, (0, top))
            top += part.height
        return words.png(whole)

    def _chart(self) -> str:
        """The loss of every step so far, on an axis of all steps, in the colours of the page."""
        losses = self.moment.losses
        low, high = (min(losses), max(losses)) if losses else (0.0, 0.0)
        last = f"{losses[-1]:.4f}" if losses else ""
        across, shown = self._across(1000), _thinned(losses)
        dots = " ".join(f"{k * across:.1f},{60 - 56 * (x - low) / ((high - low) or 1.0):.1f}" for k, x in shown)
        said = f"loss of {self.plan}: {last}" if losses else f"loss of {self.plan}: not known yet"
        figure = (
            f'<svg role="img" aria-label="{escape(said)}" viewBox="0 0 1000 64" preserveAspectRatio="none" '
            'style="width:100%;height:64px;display:block;border-bottom:1px solid var(--jp-border-color1, #999)">'
            f'<polyline points="{dots}" fill="none" stroke="{_LOSS}" stroke-width="2" '
            'vector-effect="non-scaling-stroke"/></svg>'
        )
        sides = "display:flex;flex-direction:column;justify-content:space-between;flex:0 0 62px;font-size:11px"
        ends = (f"{high:.3f}", f"{low:.3f}") if losses else ("", "")
        return (
            '<div style="line-height:1.3;max-width:100%;font-variant-numeric:tabular-nums">'
            f"<div>loss of {escape(self.plan)}</div>"
            f'<div style="display:flex;gap:6px"><div style="{sides};text-align:right">'
            f"<span>{ends[0]}</span><span>{ends[1]}</span></div>"
            f'<div style="flex:1 1 auto;min-width:0">{figure}<div style="display:flex;justify-content:space-between;'
            f'font-size:11px"><span>0</span><span>step {self.moment.steps}</span></div></div>'
            f'<div style="{sides};justify-content:center">{last}</div></div></div>'
        )

    def _across(self, width: float) -> float:
        """The distance between neighbouring losses, if all losses of the run (a step may have several) take `width`."""
        count = len(self.moment.losses) * self.moment.steps / max(1, self.moment.step)
        return width / max(1.0, count - 1)

    def _curve(self, dark: bool | None) -> bytes:
        """The loss of every step so far, on an axis of all steps."""
        losses, sketch = self.moment.losses, Sketch(_WIDTH, _HEIGHT, dark)
        look = sketch.look
        sketch.text(4, 10, f"loss of {self.plan}" if self.plan else "loss")
        left, right, top, bottom = 74, _WIDTH - 66, 30, _HEIGHT - 18
        sketch.line([(left, bottom), (right, bottom)], look.rule)
        sketch.text(right, bottom + 3, f"step {self.moment.steps}", look.muted, 11, "rt")
        sketch.text(left, bottom + 3, "0", look.muted, 11, "mt")
        if losses:
            low, high = min(losses), max(losses)
            scale = (bottom - top) / ((high - low) or 1.0)
            across = self._across(right - left)
            dots = [(left + k * across, bottom - (loss - low) * scale) for k, loss in enumerate(losses)]
            if len(dots) > 1:
                sketch.line(dots, _LOSS, 2)
            x, y = dots[-1]
            sketch.dot(x, y, 3, _LOSS)
            sketch.text(left - 4, top, f"{high:.3f}", look.muted, 11, "rm")
            sketch.text(left - 4, bottom, f"{low:.3f}", look.muted, 11, "rm")
            sketch.text(_WIDTH - 2, min(y, bottom), f"{losses[-1]:.4f}", look.ink, 11, "rm")
        return sketch.png()


def live(model: Any, data: Any, plan: Plan | str, *, steps: int = 10, **options: Any) -> Run:
    """`minipar.train`, shown while it runs. It takes the arguments of `train`, and returns the same `Run`.

    *cancel*, the notebook's stop button, or Ctrl-C in a terminal, ends the run and its ranks (KeyboardInterrupt).
    """
    from minipar.training.training import train

    begin: Callable[..., Run] = train
    if not in_notebook():
        return begin(model, data, plan, steps=steps, watch=Screen(), **{"progress": False, **options})
    from IPython.display import display

    view = LiveRun(str(plan), steps)
    data_now, about = view._repr_mimebundle_()
    shown = display(data_now, metadata=about, raw=True, display_id=True)
    how = "done"
    try:
        view.begin()
        run = begin(model, data, plan, steps=steps, watch=view.heard, **{"progress": False, **options})
        view.over()
        return run
    except KeyboardInterrupt as error:
        how = "cancelled" if view.cancelled else "interrupted"
        raise Stopped("\n".join([f"{how} at {view.moment.line()}", *map(str, error.args)])) from None
    except Exception as error:
        how = f"failed ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
        raise
    finally:
        view.over()
        view.ended(how)
        static, about = view.static()
        if shown is not None:  # replace the widget with a picture, which remains when the kernel ends
            shown.update(static, metadata=about, raw=True)
        _close(view)


def hears_buttons() -> bool:
    """Whether the kernel can receive a click on a button while a cell runs."""
    if not in_notebook():
        return False
    from IPython import get_ipython

    kernel = getattr(get_ipython(), "kernel", None)
    return kernel is not None and "kernel subshells" in kernel.kernel_info.get("supported_features", ())


def _by_page(button: ui.Button) -> None:
    """Let the page choose where its messages about this button go: to a subshell.

    (ipykernel 7.4 would send them to the shell that used the button last. That shell runs the cell, and is busy.)
    """
    if button.comm is not None:
        vars(button.comm).pop("_reply_subshell_id", None)


def _status(state: str) -> str:
    return f'<span role="status" style="font-weight:bold">{escape(state)}</span>'


def _thinned(losses: list[float], most: int = 1000) -> list[tuple[int, float]]:
    """Every n-th loss with its position, and always the last one: about `most` of them at most."""
    every = -(-len(losses) // most) or 1
    return [(k, loss) for k, loss in enumerate(losses) if k % every == 0 or k == len(losses) - 1]


def _close(widget: ui.Widget) -> None:
    """Forget a widget and its parts. Otherwise the kernel would send their state to every page that opens."""
    for child in getattr(widget, "children", ()):
        _close(child)
    widget.close()
