"""A schedule without a formula: one replica with equal ranks is simulated, at 2p and 3p micro-batches (p is the number
of ranks), from which the time grows evenly."""

from __future__ import annotations

from dataclasses import replace

from minipar.prediction.plan_numbers import PlanNumbers, copies_of
from minipar.prediction.rank_memory import in_flight, pipeline, versions_of
from minipar.prediction.simulator import simulate
from minipar.strategies.plan import Plan
from minipar.strategies.schedules.registry import ClosedForm, Times, find


def form_of(numbers: PlanNumbers) -> ClosedForm:
    """The formulas of a plan's schedule: those beside its generator, or of a simulated replica where there are none, or
    where the plan has options that they do not know."""
    form = find(numbers.schedule).form
    return by_simulation(numbers) if form is None or numbers.options else form


def by_simulation(numbers: PlanNumbers) -> ClosedForm:
    """The formulas of a schedule, by simulating one replica with equal ranks at 2p and 3p micro-batches."""
    plan = replace(pipeline(numbers), microbatches=1)
    slices = plan.slice_count

    def time(times: Times, p: int, m: int, v: int) -> float:
        few = [m] if m <= 3 * p else [2 * p, 3 * p]
        found = [_replica(plan, count, times) for count in few]
        if plan.asynchronous:  # (the pipeline is always full; what remains is the time of a micro-batch more)
            one, two = _replica(plan, 2 * p, times), _replica(plan, 3 * p, times)
            return m * (two - one) / p
        return found[0] if len(found) == 1 else found[0] + (m - 2 * p) * (found[1] - found[0]) / p

    def kept(p: int, m: int, v: int, d: int) -> float:
        made = replace(plan, microbatches=min(m, 3 * p))
        count = len(made.placement()[d])
        return in_flight(made.actions(d), [1 / count] * count) / slices

    return ClosedForm(time, kept, copies_of(numbers), lambda p, d: versions_of(numbers, d), exact=False)


def _replica(plan: Plan, count: int, times: Times) -> float:
    """Seconds of one replica's step with so many micro-batches."""
    made = replace(plan, microbatches=count)
    cut = made.slice_count
    program = made.compile(layers=1 + max(map(max, made.placement())), check=False)
    return simulate(
        program,
        forward=times.forward / cut,
        backward=(times.both - times.forward) / cut,
        input_gradient=times.input_gradient / cut,
        weight_gradient=times.weight_gradient / cut,
        latency=times.message,
    ).time
