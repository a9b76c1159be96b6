"""The partition of a chain as an integer linear program, beside the dynamic program of `minipar.costs.partition`.

    u[l, s] = 1 if layer l lies on stage s or before it            u[., 0]  1 1 1 0 0 0
                                                                   u[., 1]  1 1 1 1 1 0        stages 0 0 0 1 1 2

    minimise    sum over s of t_s  +  (m - 1) T                    T: the slowest stage
    subject to  t_s <= T
                u[l + 1, s] <= u[l, s]                             a stage is a run of neighbours
                u[l, s] <= u[l, s + 1]                             stages are in order
                at least one layer on every stage
    where       t_s = sum of cost_l (u[l, s] - u[l, s-1]) / speed_s  +  sum of cut_l (u[l, s] - u[l+1, s])

The last difference is 1 exactly at the cut behind stage s. Everything is linear in u and T, so a general solver finds
the optimum, and its relaxation (u between 0 and 1) bounds it from below. Needs scipy, whose `milp` calls HiGHS.

Source of the objective: Zheng et al., "Alpa", 2022. The dynamic program is much faster; this form takes any further
linear constraint (memory of a stage, layers that must be together), which the dynamic program does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

from minipar.costs.partition import Partition, checked, stage_times, step_time
from minipar.errors import PlanError


@dataclass(frozen=True)
class LinearPartition(Partition):
    """A partition as the solver found it.

    bound    the optimum of the relaxation, in which layers may be divided: no partition is faster
    """

    bound: float = 0.0


def partition_by_milp(
    costs: Sequence[float],
    stages: int,
    microbatches: int = 1,
    *,
    speeds: Sequence[float] | None = None,
    activations: Sequence[float] | None = None,
    bandwidth: float = 1.0,
    seconds: float = 60.0,
) -> LinearPartition:
    """The partition of least sum(t) + (microbatches - 1) max(t), by HiGHS; arguments as for `partition`.

    seconds   that the solver may take
    Errors: `PlanError` as for `partition`, where scipy is not installed, and where the solver ran out of time.
    """
    if find_spec("scipy") is None:
        raise PlanError("linear programs are solved by scipy, which is not installed: pip install scipy")
    from scipy.optimize import milp

    work, cuts, rates = checked(costs, stages, microbatches, speeds, activations, bandwidth)
    problem = _problem(np.array(work), np.array(cuts), np.array(rates), microbatches)
    count = len(work) * stages
    binary = np.arange(count + 1) < count
    options = {"time_limit": seconds, "mip_rel_gap": 0.0}
    solved = milp(**problem, integrality=binary.astype(int), options=options)
    if solved.status != 0:
        raise PlanError(f"partition_by_milp: no optimum after {seconds:g} s ({solved.message}); allow more seconds")
    relaxed = milp(**problem, options={"time_limit": seconds})
    on = np.round(solved.x[:count]).reshape(len(work), stages).sum(axis=0)
    split = tuple(int(n) for n in np.diff(on, prepend=0))
    times = stage_times(costs, split, speeds=speeds, activations=activations, bandwidth=bandwidth)
    return LinearPartition(split, times, step_time(times, microbatches), float(relaxed.fun))


def _problem(work: np.ndarray, cuts: np.ndarray, rates: np.ndarray, microbatches: int) -> dict[str, Any]:
    """Objective, bounds and constraints for `milp`; the variables are u row by row, then T."""
    from scipy.optimize import Bounds, LinearConstraint

    n, p = len(work), len(rates)

    def at(layer: int, stage: int) -> int:
        return layer * p + stage

    rows: list[np.ndarray] = []  # each row times the variables is at least `least`
    least: list[float] = []
    times = np.zeros((p, n * p + 1))
    layers_on = np.zeros((p, n * p + 1))
    for s in range(p):
        for l in range(n):
            for stage, sign in ((s, 1), (s - 1, -1)):
                if stage >= 0:
                    times[s, at(l, stage)] += sign * work[l] / rates[s]
                    layers_on[s, at(l, stage)] += sign
            if l + 1 < n:  # (there is no cut after the last layer)
                times[s, at(l, s)] += cuts[l]
                times[s, at(l + 1, s)] -= cuts[l]
    slowest = np.zeros(n * p + 1)
    slowest[-1] = 1.0
    for s in range(p):
        rows += [slowest - times[s], layers_on[s]]
        least += [0.0, 1.0]
        for l in range(n):
            for later in (
                [at(l, s + 1), at(l, s)] if s + 1 < p else None,
                [at(l, s), at(l + 1, s)] if l + 1 < n else None,
            ):
                if later:
                    row = np.zeros(n * p + 1)
                    row[later] = 1.0, -1.0
                    rows.append(row)
                    least.append(0.0)
    lower, upper = np.zeros(n * p + 1), np.ones(n * p + 1)
    upper[-1] = np.inf
    lower[[at(l, p - 1) for l in range(n)]] = 1.0
    return {
        "c": times.sum(axis=0) + (microbatches - 1) * slowest,
        "bounds": Bounds(lower, upper),
        "constraints": LinearConstraint(np.array(rows), np.array(least), np.inf),
    }
