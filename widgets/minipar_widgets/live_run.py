"""A training run as it goes on: progress, loss, and the timeline of the last step, at most ten times a second.

    run = live(partial(models.gpt, layers=8), data.stdlib_text(), "pp=2 microbatches=8", steps=40)

In a notebook it is a widget while the run lasts (the stop button of the notebook ends it), and a picture afterwards, so
that a saved notebook shows what happened. In a terminal it is text (`following.Screen`).
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ipywidgets
from PIL import Image, ImageDraw

from minipar.following import Moment, Screen
from minipar_widgets import words
from minipar_widgets.base import Explorer
from minipar_widgets.base import live as in_notebook
from minipar_widgets.timeline import Timeline

if TYPE_CHECKING:
    from minipar.plan import Plan
    from minipar.training import Run

_WIDTH, _HEIGHT = 1000, 104


class LiveRun(Explorer):
    """What `live` shows. `heard(moment)` shows a moment of the run, `ended(words)` says how it ended."""

    def __init__(self, plan: str = "", steps: int = 1) -> None:
        self.moment = Moment(0, steps, [], None, 0.0)
        self.plan, self.state_of_run = plan, "starting"
        self.bar = ipywidgets.IntProgress(value=0, max=max(1, steps), description="", layout={"width": "220px"})
        self.line = ipywidgets.Label(value="profile, calibrate, predict")
        self.curve = ipywidgets.Image(value=self._curve(False), format="png", layout={"max_width": "100%"})
        self.timeline: Timeline | None = None
        self.children: Any
        super().__init__([ipywidgets.HBox([self.bar, self.line]), self.curve])

    def heard(self, moment: Moment) -> None:
        """Show a moment of the run."""
        self.moment, self.state_of_run = moment, "running" if moment.step < moment.steps else "done"
        self.bar.max, self.bar.value = max(1, moment.steps), moment.step
        self.line.value = moment.line()
        self.curve.value = self._curve(False)
        if moment.trace is None:
            return
        if self.timeline is None:
            self.timeline = Timeline(moment.trace)
            self.children = [self.children[0], self.curve, self.timeline]
        else:
            self.timeline.update(moment.trace)

    def ended(self, how: str) -> None:
        """Say how the run ended: done, stopped, or the error in words."""
        self.state_of_run = how
        self.line.value = f"{how}: {self.moment.line()}"

    def summary(self) -> str:
        return f"live run of {self.plan}: {self.state_of_run}, step {self.moment.step} of {self.moment.steps}"

    def caption(self) -> str:
        return f"{self.state_of_run}: {self.moment.line()}"

    def settings(self) -> dict[str, str]:
        return {"plan": self.plan, "steps": str(self.moment.steps)}

    def rows(self) -> list[list[str]]:
        return [["step", "loss"], *([str(k), f"{loss:.6f}"] for k, loss in enumerate(self.moment.losses))]

    def picture(self, dark: bool = False) -> bytes:
        """Progress and loss above, the last step's timeline below."""
        parts = [Image.open(io.BytesIO(self._curve(dark))).convert("RGB")]
        if self.timeline is not None:
            parts.append(Image.open(io.BytesIO(self.timeline._png(dark))).convert("RGB"))
        whole = Image.new("RGB", (_WIDTH, sum(part.height for part in parts)), words.paper(dark).paper)
        top = 0
        for part in parts:
            whole.paste(part, (0, top))
            top += part.height
        return words.png(whole)

    def _curve(self, dark: bool) -> bytes:
        """The loss of every step so far, on an axis of all steps."""
        look, losses = words.paper(dark), self.moment.losses
        image = Image.new("RGB", (_WIDTH, _HEIGHT), look.paper)
        draw = ImageDraw.Draw(image)
        draw.text((4, 4), f"loss of {self.plan}" if self.plan else "loss", fill=look.ink, font=words.font(12))
        left, right, top, bottom = 74, _WIDTH - 66, 30, _HEIGHT - 18
        draw.line((left, bottom, right, bottom), fill=look.rule)
        draw.text((right, bottom + 3), f"step {self.moment.steps}", fill=look.muted, font=words.font(11), anchor="ra")
        draw.text((left, bottom + 3), "0", fill=look.muted, font=words.font(11), anchor="ma")
        if losses:
            low, high = min(losses), max(losses)
            scale = (bottom - top) / ((high - low) or 1.0)
            count = max(len(losses), self.moment.steps, 2) - 1
            dots = [(left + k / count * (right - left), bottom - (loss - low) * scale) for k, loss in enumerate(losses)]
            draw.line(dots, fill="#D55E00", width=2)
            x, y = dots[-1]
            draw.ellipse((x - 3, y - 3, x + 3, y + 3), fill="#D55E00")
            draw.text((left - 4, top), f"{high:.3f}", fill=look.muted, font=words.font(11), anchor="rm")
            draw.text((left - 4, bottom), f"{low:.3f}", fill=look.muted, font=words.font(11), anchor="rm")
            draw.text(
                (_WIDTH - 2, min(y, bottom)), f"{losses[-1]:.4f}", fill=look.ink, font=words.font(11), anchor="rm"
            )
        return words.png(image)


def live(model: Any, data: Any, plan: Plan | str, *, steps: int = 10, **options: Any) -> Run:
    """`minipar.train` with its picture while it runs; takes what `train` takes, and gives its `Run`.

    The notebook's stop button, or Ctrl-C in a terminal, ends the run and its ranks (KeyboardInterrupt). Asynchronous
    plans are one program, so their picture comes at the end.
    """
    from minipar.training import train

    begin: Callable[..., Run] = train
    if not in_notebook():
        return begin(model, data, plan, steps=steps, watch=Screen(), **{"progress": False, **options})
    from IPython.display import display

    view = LiveRun(str(plan), steps)
    data_now, about = view._repr_mimebundle_()
    shown = display(data_now, metadata=about, raw=True, display_id=True)
    how = "done"
    try:
        return begin(model, data, plan, steps=steps, watch=view.heard, **{"progress": False, **options})
    except KeyboardInterrupt:
        how = "stopped"
        raise
    except Exception as error:
        how = f"failed ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
        raise
    finally:
        view.ended(how)
        static, about = view.static()
        if shown is not None:  # a picture in the place of the widget: it stays when the kernel is gone
            shown.update(static, metadata=about, raw=True)
        _close(view)


def _close(widget: ipywidgets.Widget) -> None:
    """Forget a widget and its parts: a living kernel would send their state to every page that opens."""
    for child in getattr(widget, "children", ()):
        _close(child)
    widget.close()
