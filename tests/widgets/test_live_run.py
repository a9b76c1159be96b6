"""The live run: a widget during the run, a picture afterwards; text without a notebook."""

from __future__ import annotations

import io
import threading
from functools import partial
from typing import Any

import pytest
from PIL import Image

from minipar import Plan, data, models, simulate
from minipar.execution.following import Moment
from minipar_widgets import LiveRun, base, live
from minipar_widgets.live_run import Stopped
from tests.conftest import Clusters

TRACE = simulate(Plan(pp=2, microbatches=4).compile(layers=4))


def test_moments_move_bar_curve_and_timeline() -> None:
    view = LiveRun("pp=2", 4)
    assert view.summary() == "live run of pp=2: starting, step 0 of 4"
    before = view.curve.value
    view.heard(Moment(1, 4, [3.0], None, 0.1))
    assert view.timeline is None
    view.heard(Moment(2, 4, [3.0, 2.5], TRACE, 0.2))
    first = view.timeline
    assert first in view.children
    view.heard(Moment(4, 4, [3.0, 2.5, 2.0, 1.5], TRACE, 0.4))
    assert view.timeline is first  # the same widget, with other data
    assert view.bar.value == 4
    assert view.curve.value != before
    view.ended("done")
    assert "done" in view.summary()
    assert view.rows()[-1] == ["3", "1.500000"]
    assert Image.open(io.BytesIO(view.picture())).height > 200
    assert "step 4 of 4" in view.caption()


class _Display:
    """IPython's display, to see what a notebook would keep."""

    def __init__(self) -> None:
        self.shown: list[dict[str, Any]] = []

    def __call__(self, bundle: dict[str, Any], **_: Any) -> _Display:
        self.shown.append(bundle)
        return self

    def update(self, bundle: dict[str, Any], **_: Any) -> None:
        self.shown.append(bundle)


@pytest.mark.parametrize("how", ["done", "interrupted", "cancelled"])
def test_notebook_keeps_a_picture_not_a_dead_widget(
    monkeypatch: pytest.MonkeyPatch, clusters: Clusters, how: str
) -> None:
    stops = how != "done"
    display = _Display()
    monkeypatch.setattr("minipar_widgets.live_run.in_notebook", lambda: True)
    monkeypatch.setattr("minipar_widgets.base.live", lambda: True)
    monkeypatch.setattr("IPython.display.display", display)
    if stops:
        heard = LiveRun.heard

        def interrupted(view: LiveRun, moment: Moment) -> None:
            heard(view, moment)
            if how == "interrupted":
                raise KeyboardInterrupt
            button = threading.Thread(target=view.stop.click)  # as a subshell does
            button.start()
            button.join()

        monkeypatch.setattr(LiveRun, "heard", interrupted)
    train = partial(
        live, partial(models.mlp, widths=(32, 64, 64, 256)), data.for_model("mlp-tiny"), "pp=2 microbatches=2",
        steps=4000 if stops else 4, batch=8, cluster=clusters(2),
    )  # fmt: skip
    if stops:
        with pytest.raises(Stopped, match=f"^{how} at step .* of 4000, loss") as stopped:
            train()
        assert stopped.value._render_traceback_()[0].startswith(f"Stopped: {how} at step")
        monkeypatch.setattr(LiveRun, "heard", heard)
        again = train(steps=2)  # the ranks are there again, and a button that was pressed too late does nothing
        assert len(again.losses) == 2
        display.shown = display.shown[:2]
    else:
        assert len(train().losses) == 4
    first, last = display.shown
    assert base._VIEW in first
    assert base._VIEW not in last
    assert how in last["text/plain"]
    assert len(last["image/png"]) > len(first["image/png"])


def test_cancel_before_and_after_a_run_does_nothing() -> None:
    view = LiveRun("pp=2", 4)
    view.stop.click()
    assert not view.cancelled
    view.begin()
    view.over()
    threading.Thread(target=view.cancel).start()
    assert not view.cancelled


def test_cancel_where_the_run_is_in_another_thread() -> None:
    view = LiveRun("pp=2", 4)
    threads = [threading.Thread(target=view.begin)]
    threads[0].start()
    threads[0].join()
    view.cancel()
    with pytest.raises(KeyboardInterrupt):
        view.heard(Moment(1, 4, [3.0], None, 0.1))


def test_losses_are_drawn_where_their_steps_are() -> None:
    view = LiveRun("pp=2", 4)
    view.heard(Moment(2, 4, [3.0, 2.5, 2.0, 1.0], None, 0.1))  # two a step
    assert 'points="0.0,4.0 142.9,18.0 285.7,32.0 428.6,60.0"' in view.curve.value
    view.heard(Moment(4, 4, [4.0 - k / 1000 for k in range(4000)], None, 0.1))
    points = view.curve.value.partition('points="')[2].partition('"')[0].split()
    assert len(points) == 1001
    assert points[-1] == "1000.0,60.0"


def test_terminal_gets_text(capsys: pytest.CaptureFixture[str], clusters: Clusters) -> None:
    live(
        partial(models.mlp, widths=(32, 64, 64, 256)), data.for_model("mlp-tiny"), "pp=2 microbatches=2",
        steps=3, batch=8, cluster=clusters(2),
    )  # fmt: skip
    text = capsys.readouterr().err
    assert "step 3 of 3, loss" in text
    assert "rank 1" in text
