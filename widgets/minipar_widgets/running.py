"""A training run that a widget starts. It uses real ranks, has its own thread, shows progress, and can be stopped.

The ranks emulate the device that the sliders describe, so that the measured timeline has the shape of the predicted
one. torch is not imported before the first run starts. That run waits for it for some seconds; later ones do not,
because a helper process that has torch stays, and makes new ranks in a tenth of a second.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from minipar.costs.device import DeviceSpec
from minipar.costs.unit import UnitCosts
from minipar.errors import MiniparError
from minipar.program import Program
from minipar.strategies.plan import Plan
from minipar.wording import several

if TYPE_CHECKING:
    from minipar.cluster import Cluster
    from minipar.execution.following import Moment
    from minipar.training.training import Run

Tell = Callable[[int, int, str], None]  # steps done, steps in all, and what the run is doing
Done = Callable[["Run | None", str], None]  # the run, or None and the reason


def device(forward: float, ratio: float, latency: float, factors: tuple[float, ...]) -> DeviceSpec:
    """An emulated device: a micro-batch's forward on one rank takes `forward` seconds; the rest is in proportion."""
    given: dict[str, Any] = {"forward": forward, "backward": forward * ratio, "latency": forward * latency}
    name = " ".join(f"{key}={seconds * 1e3:g}ms" for key, seconds in given.items() if seconds)
    if factors and set(factors) != {1.0}:
        name += f" factors={','.join(f'{x:g}' for x in factors)}"
    return DeviceSpec(costs=partial(_costs, stage_factors=factors, **given), name=name)


def _costs(program: Program, **given: Any) -> UnitCosts:
    return UnitCosts(program, **given)


def task(plan: Plan, layers: int) -> tuple[Callable[[], Any], Any]:
    """A small model of `layers` layers, and its data: a perceptron, or a GPT for schedules that cut sequences."""
    from minipar import data, models

    if plan.slice_count > 1:
        context = max(32, plan.slice_count)
        return partial(models.gpt, layers=layers - 2, width=32, heads=2, context=context), data.stdlib_text(context)
    return partial(models.mlp, widths=(32, *[64] * (layers - 1), 256)), data.for_model("mlp-tiny")


class Attempt:
    """One run, from `start()` to the call of `done`. Both `tell` and `done` are called in the run's own thread."""

    def __init__(self, plan: Plan, layers: int, device: DeviceSpec, steps: int, tell: Tell, done: Done) -> None:
        self._arguments = (plan, layers, device, steps)
        self._tell, self._done = tell, done
        self._cluster: Cluster | None = None
        self._lock = threading.Lock()
        self.cancelled = False
        self._over = threading.Event()

    def start(self) -> None:
        """Begin in a thread of its own. If none can begin, `done` is called at once, with the reason."""
        from minipar.cluster import threads

        try:
            self._over = threads.start(self._work, "trains for a widget")
        except MiniparError as error:
            self._over.set()
            self._done(None, str(error))

    def wait(self, timeout: float | None = None) -> None:
        """Wait until it is over."""
        self._over.wait(timeout)

    def cancel(self) -> None:
        """End the ranks, whatever they are doing. `done` is called soon afterwards."""
        with self._lock:
            self.cancelled = True
            if self._cluster is not None:
                _end(self._cluster)

    def _work(self) -> None:
        run, words = None, ""
        try:
            run = self._train()
        except MiniparError as error:
            words = str(error)
        except Exception as error:  # the widget shows every error; none is lost in the thread
            words = f"{type(error).__name__}: {error}"
        self._done(None, "stopped") if self.cancelled else self._done(run, words)

    def _watch(self, moment: Moment) -> None:
        self._tell(moment.step, moment.steps, moment.line())

    def _train(self) -> Run:
        plan, layers, spec, steps = self._arguments
        if "torch" not in sys.modules:
            self._tell(0, steps, "loading torch, which takes some seconds the first time")
        from minipar.training.training import train

        self._tell(0, steps, f"starting {several(plan.ranks, 'process')}")
        from minipar.cluster import Cluster

        cluster = Cluster(plan.ranks, device=spec)
        try:
            with self._lock:
                self._cluster = cluster
                if self.cancelled:
                    raise MiniparError("stopped")
            self._tell(0, steps, "profile and prediction")
            model, source = task(plan, layers)
            rows = plan.total_microbatches
            watch = self._watch
            return train(model, source, plan, cluster=cluster, steps=steps, batch=rows, progress=False, watch=watch)
        finally:
            with self._lock:
                self._cluster = None
            cluster.close()


def _end(cluster: Cluster) -> None:
    for rank in range(cluster.size):
        cluster.end_rank(rank)
