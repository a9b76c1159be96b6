"""Why a plan is as it is, in words: each choice against what stands beside it, and the guidelines for strategies.

The guidelines are those of MindSpore's pages on choosing a strategy:

    data parallel        the data is large, and one device can hold the model
    optimizer parallel   replicas hold the same: they share out the optimizer's state (ZeRO)
    pipeline             a device cannot hold the model, and it divides into stages of equal work
    operator-level       a device cannot hold the model, or one layer of it, and links are fast

Numbers come from the same formulas as the search's.
"""

from __future__ import annotations

from minipar.errors import PlanError
from minipar.planner.planned import Planned, difference
from minipar.planner.space import Space
from minipar.prediction.closed_form import Cost, closed_form
from minipar.prediction.plan_numbers import PlanNumbers
from minipar.prediction.plan_words import check
from minipar.wording import several

MOST = 6


def reasons(found: Planned, space: Space) -> tuple[str, ...]:
    """At most MOST sentences: what does not fit, what mends it and what stands beside that, what it costs, where the
    time goes, and what nobody knows."""
    words = [_whole_model(found, space), *_tensor(found, space), *_pipeline(found, space)]
    words += [*_offload(found, space), *_zero(found, space), *_recomputation(found, space), _where(found)]
    words = [text for text in words if text]
    return (*words[: MOST - 1], words[-1]) if len(words) > MOST else tuple(words)


def advice(found: Planned, space: Space) -> str:
    """Which strategies this problem asks for, in the words of the guidelines."""
    n = found.numbers
    replica = _one_replica(space)
    if replica.memory <= space.machine.memory:
        holds = (
            "one device can hold the model, its gradients and its optimizer "
            f"({_gigabytes(replica.memory)} of {_gigabytes(space.machine.memory)} GB)"
        )
        if n.pp * n.tp * n.cp * n.ep == 1:
            first = f"Data parallel suffices: {holds}."
        elif space.batch % space.devices:
            near = space.batch // space.devices * space.devices
            batches = f"{near} or {near + space.devices}" if near else f"{space.devices}"
            first = (
                f"Data parallel would suffice: {holds}. But {several(space.devices, 'replica')} cannot divide a batch "
                f"of {space.batch} evenly; possible is batch={batches}."
            )
        else:
            first = f"Data parallel would suffice: {holds}. {_data_parallel(found, space)}"
    elif n.pp * n.tp * n.ep == 1:
        first = "Data parallel with shared state suffices: one device cannot hold all state, and its share fits."
    else:
        first = "Data parallel does not suffice: one device cannot hold the model with its gradients and optimizer."
    more = []
    if n.zero:
        shared = {1: "the optimizer's state", 2: "the optimizer's state and gradients", 3: "parameters, too"}[n.zero]
        more.append(f"Use optimizer parallel (ZeRO {n.zero}): {n.dp * n.cp * n.ep} replicas share out {shared}.")
    if n.tp > 1:
        inside = n.tp <= space.machine.per_node
        where = f"inside nodes (tp={n.tp}), where links are fast" if inside else f"over several nodes (tp={n.tp})"
        more.append(f"Use operator-level parallel {where}.")
    if n.pp > 1:
        each, rest = divmod(space.model.layers, n.pp)
        layers = f"{each} or {each + 1} layers" if rest else several(each, "layer")
        more.append(f"Use a pipeline (pp={n.pp}): the model divides into stages of {layers}, which send little.")
    if n.ep > 1:
        more.append(f"Use expert parallel (ep={n.ep}): experts are most of the parameters.")
    return " ".join([first, *more])


def _one_replica(space: Space) -> Cost:
    """Data parallel alone, with one row at a time."""
    count = max(1, space.batch // space.devices)
    plan = PlanNumbers(dp=space.devices, microbatches=count, precision=space.precision)
    return closed_form(plan, space.model, space.machine)


def _data_parallel(found: Planned, space: Space) -> str:
    """How much longer than a plan the best one takes that has replicas alone."""
    plain = space.pinned("tp=1 pp=1 context_parallel=1 ep=1 offload=none")
    built = [Planned(n, closed_form(n, space.model, space.machine)) for one in plain.outer() for n in plain.inner(one)]
    fitting = [one for one in built if one.memory <= space.machine.memory]
    if not fitting:
        return ""
    best = min(fitting, key=lambda one: one.time)
    more, reason = best.time / found.cost.time - 1, difference(found, best).reason
    return f"Beside this plan it takes {more:+.1%}{f' ({reason})' if reason else ''}."


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.3g}" if size < 1e12 else f"{size / 1e9:.0f}"


def _beside(found: Planned, space: Space, changed: PlanNumbers) -> str:
    """How a plan with one other choice does: how much slower, or that it does not fit, or why it cannot be."""
    try:
        check(changed, space.model, space.machine)
        cost = closed_form(changed, space.model, space.machine)
    except PlanError as error:
        return f"is not possible: {error.reason.partition(': ')[2] or error.reason}"
    if cost.memory > space.machine.memory:
        return f"does not fit ({_gigabytes(cost.memory)} of {_gigabytes(space.machine.memory)} GB)"
    return f"takes {cost.time / found.cost.time - 1:+.1%}"


def _whole_model(found: Planned, space: Space) -> str:
    n, replica = found.numbers, _one_replica(space)
    fits = replica.memory <= space.machine.memory
    if n.pp * n.tp * n.ep * n.cp > 1 and not fits:
        return (
            f"Data parallel alone does not fit: a device would need {_gigabytes(replica.memory)} GB, and has "
            f"{_gigabytes(space.machine.memory)}."
        )
    if fits and n.pp * n.tp == 1:
        return f"One device can hold the model ({replica.memory / 1e9:.3g} GB), so data parallel suffices."
    return ""


def _tensor(found: Planned, space: Space) -> list[str]:
    n = found.numbers
    if n.tp == 1:
        return []
    sent = found.cost.seconds.get("collectives of shared layers", 0.0)
    where = "one node" if n.tp <= space.machine.per_node else "several nodes"
    return [f"tp={n.tp} shares each layer among GPUs of {where}; its collectives take {sent / found.cost.time:.0%}."]


def _pipeline(found: Planned, space: Space) -> list[str]:
    n = found.numbers
    if n.pp == 1:
        return []
    how = f", {n.chunks} chunks a rank" if n.chunks > 1 else ""
    share = f"{found.cost.seconds.get('bubble', 0.0) / found.cost.time:.1%}"
    return [f"pp={n.pp} ({n.schedule}{how}) divides {space.model.layers} layers; its bubble takes {share}."]


def _zero(found: Planned, space: Space) -> list[str]:
    n = found.numbers
    replicas = n.dp * n.cp * n.ep
    if replicas == 1:
        return []
    if n.zero == 0:
        return [f"{replicas} replicas keep whole state: zero=1 {_beside(found, space, n._replace(zero=1))}."]
    return [
        f"zero={n.zero} shares state among {replicas} replicas; zero=0 {_beside(found, space, n._replace(zero=0))}."
    ]


def _recomputation(found: Planned, space: Space) -> list[str]:
    n = found.numbers
    if not n.checkpoint:
        return [] if n.offload else ["Nothing runs again: all activations fit."]
    again = found.cost.seconds.get("recomputation", 0.0)
    less = n._replace(checkpoint=0)
    share = f"{again / found.cost.time:.1%}"
    return [
        f"checkpoint={n.checkpoint} runs {share} of the step again; without it the plan {_beside(found, space, less)}."
    ]


def _offload(found: Planned, space: Space) -> list[str]:
    n = found.numbers
    if not n.offload:
        return []
    waits = "waits" if n.offload == ("optimizer",) else "wait"
    here = _beside(found, space, n._replace(offload=()))
    return [f"{' and '.join(n.offload)} {waits} on the host; otherwise the plan {here}."]


def _where(found: Planned) -> str:
    parts = sorted(found.cost.seconds.items(), key=lambda one: -one[1])[:3]
    return "Most time goes to " + ", ".join(f"{part} ({s / found.cost.time:.0%})" for part, s in parts) + "."
