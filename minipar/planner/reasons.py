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
from minipar.models.sizes import Transformer
from minipar.planner.planned import Planned
from minipar.planner.space import Space
from minipar.prediction.closed_form import Cost, closed_form
from minipar.prediction.plan_numbers import PlanNumbers
from minipar.prediction.plan_words import check


def reasons(found: Planned, space: Space) -> tuple[str, ...]:
    """A sentence for each choice of a plan that matters."""
    told = [_whole_model(found, space), *_tensor(found, space), *_pipeline(found, space), *_zero(found, space)]
    told += [*_recomputation(found, space), *_rows(found, space), *_offload(found), _where(found)]
    return tuple(text for text in told if text)


def advice(found: Planned, space: Space) -> str:
    """Which strategies this problem asks for, in the words of the guidelines."""
    n = found.numbers
    alone = _one_replica(space)
    if alone is not None and alone.memory <= space.machine.memory:
        first = (
            "Data parallel suffices: one device can hold the model, its gradients and its optimizer "
            f"({alone.memory / 1e9:.3g} of {space.machine.memory / 1e9:.3g} GB)."
        )
    elif n.pp * n.tp * n.ep == 1:
        first = "Data parallel with shared state suffices: one device cannot hold all state, and its share fits."
    else:
        first = "Data parallel does not suffice: one device cannot hold the model with its gradients and optimizer."
    more = []
    if n.zero:
        shared = {1: "the optimizer's state", 2: "the optimizer's state and gradients", 3: "parameters, too"}[n.zero]
        more.append(f"Use optimizer parallel (ZeRO {n.zero}): {n.dp * n.cp * n.ep} replicas share out {shared}.")
    if n.tp > 1:
        more.append(f"Use operator-level parallel inside nodes (tp={n.tp}), where links are fast.")
    if n.pp > 1:
        more.append(
            f"Use a pipeline (pp={n.pp}): the model divides into stages of {space.model.layers // n.pp} or so equal "
            "layers, and stages send little."
        )
    if n.ep > 1:
        more.append(f"Use expert parallel (ep={n.ep}): experts are most of the parameters.")
    return " ".join([first, *more])


def _one_replica(space: Space) -> Cost | None:
    """Data parallel alone, with one row at a time."""
    if space.batch % space.devices:
        return None
    plan = PlanNumbers(dp=space.devices, microbatches=space.batch // space.devices, precision=space.precision)
    return _cost(plan, space)


def _cost(numbers: PlanNumbers, space: Space) -> Cost | None:
    """What a plan costs; None if it cannot be."""
    try:
        check(numbers, space.model, space.machine)
        return closed_form(numbers, space.model, space.machine)
    except PlanError:
        return None


def _beside(found: Planned, space: Space, changed: PlanNumbers) -> str:
    """How a plan with one other choice does: how much slower, or that it does not fit, or cannot be."""
    cost = _cost(changed, space)
    if cost is None:
        return "is not possible"
    if cost.memory > space.machine.memory:
        return f"does not fit ({cost.memory / 1e9:.3g} of {space.machine.memory / 1e9:.3g} GB)"
    return f"takes {cost.time / found.cost.time - 1:+.1%}"


def _whole_model(found: Planned, space: Space) -> str:
    n, alone = found.numbers, _one_replica(space)
    if alone is None:
        return ""
    fits = alone.memory <= space.machine.memory
    if n.pp * n.tp * n.ep * n.cp > 1 and not fits:
        return (
            f"Data parallel alone does not fit: a device would need {alone.memory / 1e9:.4g} GB, and has "
            f"{space.machine.memory / 1e9:.3g}."
        )
    if fits and n.pp * n.tp == 1:
        return f"One device can hold the model ({alone.memory / 1e9:.3g} GB), so data parallel suffices."
    return ""


def _moved(n: PlanNumbers, space: Space, **changed: int) -> PlanNumbers | None:
    """The plan with another tp or pp, on as many devices: dp and micro-batches change along."""
    made = n._replace(tp=changed.get("tp", n.tp), pp=changed.get("pp", n.pp))
    if made.chunks > 1 and space.model.layers % (made.pp * made.chunks):
        return None
    others = made.tp * made.pp * made.cp * made.ep
    if space.devices % others:
        return None
    dp = space.devices // others
    if dp < 1 or space.batch % (dp * int(n.rows)):
        return None
    return made._replace(dp=dp, microbatches=space.batch // dp // int(n.rows))


def _tensor(found: Planned, space: Space) -> list[str]:
    n, inside = found.numbers, space.machine.per_node
    if not isinstance(space.model, Transformer) or (n.tp == 1 and inside == 1):
        return []
    told = []
    if n.tp > 1:
        sent = found.cost.seconds.get("collectives of shared layers", 0.0)
        where = "one node" if n.tp <= inside else "several nodes"
        told.append(
            f"tp={n.tp} shares each layer among GPUs of {where}; its collectives take {sent / found.cost.time:.0%}."
        )
    beside = []
    for tp in (n.tp // 2, n.tp * 2):
        other = _moved(n, space, tp=tp) if tp >= 1 else None
        if other is not None and not (tp == 1 and n.sequence_parallel):
            beside.append(f"tp={tp} {_beside(found, space, other)}")
    return [*told, f"Beside it, {' and '.join(beside)}."] if beside and told else told


def _pipeline(found: Planned, space: Space) -> list[str]:
    n = found.numbers
    if n.pp == 1:
        return []
    bubble = found.cost.seconds.get("bubble", 0.0)
    how = f", {n.chunks} chunks a rank" if n.chunks > 1 else ""
    share = f"{bubble / found.cost.time:.1%}"
    told = [f"pp={n.pp} ({n.schedule}{how}) divides {space.model.layers} layers; its bubble takes {share}."]
    beside = []
    for pp in (n.pp // 2, n.pp * 2):
        other = _moved(n, space, pp=pp) if pp >= 1 else None
        if other is not None:
            beside.append(f"pp={pp} {_beside(found, space, other)}")
    return [*told, f"Beside it, {' and '.join(beside)}."] if beside else told


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
        return ["Nothing runs again: all activations fit."]
    again = found.cost.seconds.get("recomputation", 0.0)
    less = n._replace(checkpoint=0)
    share = f"{again / found.cost.time:.1%}"
    return [
        f"checkpoint={n.checkpoint} runs {share} of the step again; without it the plan {_beside(found, space, less)}."
    ]


def _rows(found: Planned, space: Space) -> list[str]:
    n = found.numbers
    twice = int(n.rows) * 2
    if space.batch % (n.dp * twice):
        return []
    other = n._replace(rows=float(twice), microbatches=space.batch // n.dp // twice)
    return [f"micro_batch_size={n.rows:g}: with {twice} rows the plan {_beside(found, space, other)}."]


def _offload(found: Planned) -> list[str]:
    n = found.numbers
    return [f"{' and '.join(n.offload)} wait on the host: otherwise the plan does not fit."] if n.offload else []


def _where(found: Planned) -> str:
    parts = sorted(found.cost.seconds.items(), key=lambda one: -one[1])[:3]
    return "Most time goes to " + ", ".join(f"{part} ({s / found.cost.time:.0%})" for part, s in parts) + "."
