"""split=auto in an estimate: the search of strategies/splitting.py, with the times and links of a machine."""

from __future__ import annotations

from minipar.costs.analytic import input_flops, layer_costs
from minipar.costs.hardware import Hardware
from minipar.models.sizes import Chain, Sizes
from minipar.prediction.closed_form import layer_works, line
from minipar.prediction.plan_numbers import PlanNumbers, own_layers
from minipar.strategies.plan import Plan
from minipar.strategies.schedules.registry import find


def fastest_split(numbers: PlanNumbers, model: Sizes, machine: Hardware | None) -> tuple[int, ...]:
    """The layers of each stage with which a step takes least time. Without a machine the times are operations, and
    messages are free. Errors: PlanError for more stages than layers."""
    from minipar.strategies.splitting import Times, fastest  # (it needs NumPy)

    n, schedule = numbers, find(numbers.schedule)
    rows, element = n.rows / n.ep, n.bytes.activation
    selective = n.checkpoint == "selective"
    costs = layer_costs(model, rows, element, selective=selective, division=n.division)
    if machine is None:
        forward, whole = list(costs.forward), list(costs.backward)
        first = list(input_flops(model, rows, selective=selective, division=n.division))
        latency, per_byte = 0.0, 0.0
    else:
        works = layer_works(n, model, machine)
        forward = [work.matrix + work.memory + work.sent for work in works]
        whole = [sum(work.back) + work.sent_back + work.core * selective for work in works]
        first = [back - work.inner for back, work in zip(whole, works, strict=True)]
        link = line(n, machine)
        latency, per_byte = link.latency, link.occupied(1) / n.tp
    if n.checkpoint and not selective:  # (a budget may run fewer layers again)
        blocks = range(own_layers(model)) if n.ends or isinstance(model, Chain) else range(1, own_layers(model) - 1)
        for layer in blocks:
            whole[layer] += forward[layer]
            first[layer] += forward[layer]
    second = [back - one for back, one in zip(whole, first, strict=True)]
    nothing = [0.0] * len(forward)
    times = Times(
        (forward, whole, first, second), nothing, nothing, (costs.output, costs.gradient), (latency, per_byte)
    )
    options = dict(n.options) | {key: n.chunks for key in ("chunks", "slices") if key in schedule.options}
    plan = Plan(pp=n.pp, schedule=n.schedule, microbatches=n.microbatches // n.rounds, **options)
    placement = plan.placement()
    stages = 1 + max(map(max, placement))
    return fastest(times, stages, [plan.actions(rank) for rank in range(n.pp)], placement, plan.microbatches)[0]
