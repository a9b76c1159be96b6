"""The time of a step over the size of its buckets: predicted for every size, measured where there is a cluster.

curve = bucket_curve("dp=2", models.shape("mlp"), costs_of, job=job, cluster=cluster)
curve.best, curve.plot(), print(curve)

bucket      predicted   measured
none          41.0 ms    42.3 ms  ########################
1 MiB         33.5 ms    34.1 ms  ####################
4 MiB         31.2 ms    31.9 ms  ###################         <- best
flat          44.0 ms    45.2 ms  ##########################
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from minipar.costs.protocol import Costs
from minipar.errors import PlanError
from minipar.prediction.simulator import simulate
from minipar.program import Program
from minipar.program.shape import Shape
from minipar.strategies.buckets import Bucket, sizes
from minipar.strategies.plan import Plan
from minipar.trace.figure import RULE, picture, ruled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from minipar.cluster.ranks import Ranks
    from minipar.execution.execution import Job

COLOUR = "#CC79A7"  # of communication, as in all pictures
STEPS = 4  # in a program of which one step's messages travel during the next


@dataclass(frozen=True)
class BucketCurve:
    """Seconds of a step for each choice of `bucket`; choices with few large messages come last.

    measured   medians on the cluster; empty where none was given
    """

    plan: Plan
    buckets: tuple[Bucket, ...]
    predicted: tuple[float, ...]
    measured: tuple[float, ...] = ()

    @property
    def best(self) -> Bucket:
        """The choice that is predicted to be fastest."""
        return min(zip(self.predicted, range(len(self.buckets)), self.buckets, strict=True))[2]

    def _names(self) -> list[str]:
        return [f"{bucket:.3g} MiB" if isinstance(bucket, (int, float)) else str(bucket) for bucket in self.buckets]

    def __str__(self) -> str:
        """A line for each choice, with bars."""
        most = max((*self.predicted, *self.measured))
        lines = [f"{'bucket':<12}{'predicted':>12}" + f"{'measured':>12}" * bool(self.measured)]
        for k, name in enumerate(self._names()):
            seconds = self.measured[k] if self.measured else self.predicted[k]
            measured = f"{self.measured[k] * 1e3:>9.1f} ms" if self.measured else ""
            best = "  <- best" if self.buckets[k] == self.best else ""
            bar = "#" * round(40 * seconds / most) if most else ""
            lines.append(f"{name:<12}{self.predicted[k] * 1e3:>9.1f} ms{measured}  {bar}{best}")
        return "\n".join(lines)

    def plot(self, width: float = 7.0) -> Figure:
        """The curve as a matplotlib figure that shows itself: predicted outlined, measured filled."""
        figure = picture()(figsize=(width, 3.2), layout="constrained")
        axes, places = figure.subplots(), range(len(self.buckets))
        predicted, measured = ([t * 1e3 for t in times] for times in (self.predicted, self.measured))
        axes.plot(places, predicted, "o--", color=COLOUR, markerfacecolor="none", label="predicted")
        if measured:
            axes.plot(places, measured, "o-", color=COLOUR, label="measured")
        axes.set_xticks(list(places), self._names(), rotation=45, ha="right", fontsize=8)
        axes.set_ylim(0, 1.08 * max((*predicted, *measured)))
        axes.set_ylabel("step (ms)")
        axes.set_xlabel("bucket")
        ruled(axes, f"{self.plan}: best is {self._names()[self.buckets.index(self.best)]}")
        axes.grid(color=RULE, linewidth=0.6)
        axes.legend(loc="lower left", frameon=False, fontsize=8)
        figure.alt = f"Time of a step over the size of its buckets.\n{self}"  # type: ignore[attr-defined]
        return figure


def bucket_curve(
    plan: Plan | str,
    shape: Shape,
    costs_of: Callable[[Program], Costs],
    *,
    buckets: Sequence[Bucket] = (),
    job: Job | None = None,
    cluster: Ranks | None = None,
    passes: int = 6,
) -> BucketCurve:
    """The time of a step over the size of its buckets.

    shape      of the model
    costs_of   makes the costs of a program, as `simulate` takes them
    buckets    the choices; default: none, up to 10 sizes that make different buckets, and flat
    job        model and data, to be run for every choice on the `cluster`, `passes` times each

    Errors: PlanError for a plan without replicas, and what `compile` and `execute` raise.
    """
    plan = Plan.parse(plan)
    if plan.dp == 1:
        raise PlanError(f"plan {plan}: has one replica and no buckets; possible is dp=2 or more")
    chosen = tuple(replace(plan, bucket=bucket).messages for bucket in buckets) or _choices(plan, shape)
    programs = []
    for bucket in chosen:
        each = replace(plan, bucket=bucket)
        programs.append(each.compile(shape, steps=each.block(STEPS), costs_of=costs_of))
    predicted = tuple(simulate(program, costs_of(program)).time / program.steps for program in programs)
    measured: list[float] = []
    if job is not None and cluster is not None:
        from minipar.execution.execution import execute

        for program in programs:
            done = execute(program, job, cluster=cluster, passes=passes, keep_gradients=False)
            measured.append(done.trace.time / program.steps)
    return BucketCurve(plan, chosen, predicted, tuple(measured))


def _choices(plan: Plan, shape: Shape) -> tuple[Bucket, ...]:
    """Sizes that make different buckets (or, with priority, different pieces), between the two extreme choices."""
    if plan.overlap == "priority":
        largest = max(sum(group.tensors) for group in shape.groups) / 2**20
        return (*(largest / 2**k for k in range(7, -1, -1)), "none")
    found = sizes(plan.layout(shape))
    if len(found) > 10:
        found = sorted({found[round(k * (len(found) - 1) / 9)] for k in range(10)})
    return ("none", *found, "flat")
