"""evaluate(): a model's loss and other metrics over data, by forwards only, on the ranks of a plan.

    every micro-batch    output, y  ->  sum and count of the loss, and of each metric    (ranks with the last layer)
    at the end           sum of the sums / sum of the counts                             (the driver)

So each row (or target element) counts once, however the data are divided: into batches (the last one may be shorter),
over replicas, and into micro-batches.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minipar.cluster import Cluster, worker
from minipar.cluster.launched import driven, given_or_here
from minipar.cluster.ranks import Ranks, check_size
from minipar.comm import communicator
from minipar.data import loading
from minipar.errors import PlanError, SaveError
from minipar.execution.execution import Job, Loss, Model
from minipar.execution.executor import Executor
from minipar.execution.saving import keeping
from minipar.models.losses import Own, counted
from minipar.models.network import edges_of
from minipar.models.own_loss import TRIED, find_count
from minipar.models.parameter_groups import shape_of
from minipar.models.tensors import count_rows, layers_of, map_tensors, mark_undivided, take_rows, tensors, undivided
from minipar.program import Program
from minipar.program.shape import Shape
from minipar.strategies.keys import whole_number
from minipar.strategies.plan import Plan

Metric = Callable[[Any, Any], tuple[Any, Any]]  # (output, y) -> (sum, count)


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` found.

    loss      the mean over everything that is counted
    count     how much is counted: rows, or target elements
    metrics   by name, the sum of each over its count
    outputs   of all rows in the order of the data, on the CPU, if they were asked for
    """

    loss: float
    count: float
    metrics: dict[str, float] = field(default_factory=dict)
    outputs: Any = field(default=None, repr=False)


@driven
def evaluate(
    model: Model,
    data: Any,
    plan: Plan | str = "",
    *,
    state: Any = None,
    cluster: Ranks | None = None,
    batches: int | None = None,
    batch: int = 32,
    loss: Loss | None = torch.nn.functional.cross_entropy,
    metrics: Mapping[str, Metric] | None = None,
    outputs: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Evaluation:
    """A model's mean loss over data: in eval mode, without gradients, on the ranks of a plan. Nothing is changed.

    model       as for `train`
    data        a pair (x, y) or a torch Dataset, which are cut into batches; a DataLoader or any iterable of batches;
                or a data set with `batch(step, size)`, of which `batches` are taken
    plan        only its layout is used: replicas, stages, micro-batches and precision. (Parameters are whole on the
                ranks that have them; ranks for parameter servers become further replicas.)
    state       the parameters: a `Run`, a folder with a saved run, or a state dict; default: those that the model has
    batch       rows of a batch, where the data do not say
    loss        loss(output, y) -> scalar mean, or (sum, count); None: the model's own, as in `train`
    metrics     functions by name; each takes (output, y) and gives (sum, count), such as (number right, number)
    outputs     bring the model's outputs back, too

    Raises PlanError where plan, model and data do not fit together; SaveError for a state of another model.
    """
    plan = Plan.parse(plan)
    loss = Own() if loss is None else loss
    pairing = loading.Pairing(isinstance(loss, Own), loading.takes_of(model))
    given, batch, count = _batches(data, batch, batches, pairing)
    job = Job(model, given, batch, loss, seed=seed, dtype=dtype, evaluate=True)
    values = state_of(state)
    cluster = given_or_here(cluster)
    check_size(cluster, plan.ranks, f"plan {plan}")
    with nullcontext(cluster) if cluster is not None else Cluster(plan.ranks) as ranks:
        ((shape, job),) = ranks.run_on([0], _shape, job, plan.dp * plan.total_microbatches)
        program = layout_of(plan, shape).compile(shape)
        found = ranks.run(_evaluate, job, program, values, count, dict(metrics or {}), outputs)
    return _joined_totals([one for one in found if one is not None], dict(metrics or {}), outputs)


def layout_of(plan: Plan, shape: Shape) -> Plan:
    """The plan that evaluates on the ranks on which this one trains. Ranks that share layers have whole ones here, and
    other rows each."""
    if plan.sync == "ps":
        return Plan(dp=plan.ranks, microbatches=plan.microbatches, inference=True)
    split = plan.split if isinstance(plan.split, tuple) and len(plan.split) == plan.pp else None
    return Plan(
        dp=plan.dp * plan.sharing,
        pp=plan.pp,
        schedule="gpipe",
        microbatches=plan.microbatches,
        split=split,
        place=plan.place,
        precision=plan.precision,
        inference=True,
    )


# data and parameters --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Listed:
    """A list of batches."""

    pairs: tuple[tuple[Any, Any], ...]

    def batch(self, step: int, size: int) -> tuple[Any, Any]:
        return self.pairs[step]


def _batches(data: Any, size: int, batches: int | None, pairing: loading.Pairing) -> tuple[Any, int, int]:
    """A data set, rows of a batch, and how many batches of it there are."""
    size = whole_number("batch", size)
    count = None if batches is None else whole_number("batches", batches)
    data = loading.indexed(data, 0, size, pairing)
    if isinstance(data, loading.Rows):  # each row once, in the order of the data
        data = replace(data, shuffle=False, last="smaller")
        size = min(size, max(1, len(data.dataset)))
        found, there = data, data.steps(size) if len(data.dataset) else 0
    elif isinstance(data, tuple) and len(data) == 2:
        return _batches(loading.Batches(_cut(data, size), lambda found: found), size, batches, pairing)
    elif hasattr(data, "batch"):
        if count is None:
            raise PlanError("evaluate: say how many batches of the data set, batches=; it does not end by itself")
        return data, size, count
    elif isinstance(data, loading.Batches):
        pairs = tuple(data.pair(each) for each in islice(data.batches, count))
        found, there = _Listed(pairs), len(pairs)
    else:
        raise PlanError(
            f"data={type(data).__name__}: possible are a pair (x, y), a torch Dataset or DataLoader, an iterable of "
            "batches, or a data set with batch(step, size)"
        )
    if not there:
        raise PlanError("evaluate: the data have no rows")
    if count is not None and count > there:
        raise PlanError(f"batches={count}: the data have {there}")
    return found, size, count or there


def _cut(pair: tuple[Any, Any], size: int) -> Iterator[tuple[Any, Any]]:
    """The rows of a pair (x, y) in batches, in memory of their own; the last one may be smaller."""
    x, y = pair
    marked = mark_undivided(x, undivided(x, y))
    for first in range(0, count_rows(marked), size):
        part = partial(take_rows, rows=range(first, first + size))
        rows = map_tensors(part(marked), torch.clone)
        yield rows, rows if y is x else map_tensors(part(y), torch.clone)


def state_of(state: Any) -> dict[str, Tensor]:
    """Parameters and buffers by name: of a `Run`, a folder with a saved run, or a state dict; {} for None."""
    if state is None:
        return {}
    if isinstance(state, Mapping):
        return {str(name): values.detach().cpu() for name, values in state.items() if isinstance(values, Tensor)}
    service = getattr(state, "service", None)
    if service is not None:  # (parameter servers return them themselves)
        return dict(service.parameters)
    if hasattr(state, "shares"):
        return keeping.model_of(state.shares, "evaluate(state=run)")
    if isinstance(state, (str, os.PathLike)):
        return keeping.model_in(state)
    raise PlanError(
        f"state={type(state).__name__}: possible are a Run, a folder with a saved run, a state dict, or None"
    )


def load(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Put values into a whole model by name. A tied tensor may be named once. SaveError if they do not fit it."""
    mine: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    mine |= dict(model.named_buffers(remove_duplicate=False))
    for name, given in values.items():
        if name not in mine:
            raise SaveError(f"state: has {name}, but the model has none of that name; give the state of this model")
        if given.shape != mine[name].shape:
            shapes = f"{tuple(given.shape)} there, and {tuple(mine[name].shape)} in the model"
            raise SaveError(f"state: {name} has shape {shapes}")
    filled = {id(mine[name]) for name in values}
    for name in model.state_dict().keys() & mine.keys():
        if id(mine[name]) not in filled:
            raise SaveError(f"state: has no {name}; give the state of this model, whole")
    with torch.no_grad():
        for name, given in values.items():
            mine[name].copy_(given)


# in the ranks ---------------------------------------------------------------------------------------------------------


class _Totals(NamedTuple):
    """What a rank with the last layer found: sums and counts, of the loss first; outputs of each batch."""

    sums: list[float]
    counts: list[float]
    outputs: list[list[Any]]


class _Adding:
    """Takes the place of the loss in the last layer: it adds up what is asked for, micro-batch by micro-batch."""

    ignore_index = torch.iinfo(torch.int64).min  # no target has this value, so no micro-batch is skipped
    adds_up = True  # each call is of rows that count once: it is not to be tried on others

    def __init__(self, loss: Loss, metrics: Mapping[str, Metric], outputs: bool) -> None:
        self.loss, self.metrics, self.wanted = loss, metrics, outputs
        self.totals = _Totals([0.0] * (1 + len(metrics)), [0.0] * (1 + len(metrics)), [])

    def __call__(self, output: Any, y: Any) -> Tensor:
        sums, counts, kept = self.totals
        for k, metric in enumerate((self._loss, *self.metrics.values())):
            total, count = metric(output, y)
            sums[k] += float(total)
            counts[k] += float(count)
        if self.wanted:
            kept[-1].append(map_tensors(output, lambda t: t.detach().to("cpu", copy=True)))
        return torch.zeros(())

    def _loss(self, output: Any, y: Any) -> tuple[Any, Any]:
        count = counted(y, self.loss)
        if not count:
            return 0.0, 0
        found: Any = self.loss(output, y)
        return found if isinstance(found, tuple) else (float(found) * count, count)


def _shape(job: Job, parts: int) -> tuple[Shape, Job]:
    """The shape of a model; and the job, which knows what the model's own loss counts."""
    model, cut = job.built()
    job = replace(job, cut=cut)
    if isinstance(job.loss, Own):
        job = replace(job, loss=Own(find_count(job.loss, model, job.sample(TRIED)[0][0], parts)[0]))
    return replace(shape_of(layers_of(model)), names=tuple(model._modules), edges=edges_of(model)), job


def _evaluate(
    job: Job,
    program: Program,
    values: Mapping[str, Tensor],
    batches: int,
    metrics: Mapping[str, Metric],
    outputs: bool,
) -> _Totals | None:
    """In every rank: run its part of all batches. Returns the sums; None on a rank without the last layer."""
    rank = worker.context().rank
    model = job.build()
    if values:
        load(model, values)
    adding = _Adding(job.loss, metrics, outputs)
    executor = Executor(program, communicator.create(), model, adding, torch.optim.SGD, job.seed)
    del model
    seen = replace(job, loss=adding)
    with closing(executor):
        for step in range(batches):
            adding.totals.outputs.append([])
            executor.run(lambda s: seen.part(s, program, rank), step)
    return adding.totals if program.layers - 1 in program.placement[rank] else None


def _joined_totals(found: Sequence[_Totals], metrics: Mapping[str, Metric], outputs: bool) -> Evaluation:
    sums, counts = ([sum(column) for column in zip(*(one[k] for one in found), strict=True)] for k in (0, 1))
    means = [total / count if count else float("nan") for total, count in zip(sums, counts, strict=True)]
    parts = [part for step in zip(*(one.outputs for one in found), strict=True) for rank in step for part in rank]
    return Evaluation(
        means[0], counts[0], dict(zip(metrics, means[1:], strict=True)), _joined(parts) if outputs else None
    )


def _joined(parts: Sequence[Any]) -> Any:
    """The rows of several outputs of one structure, one after the other."""
    columns = zip(*map(tensors, parts), strict=True)
    return map_tensors(parts[0], lambda first: (torch.cat if first.dim() else torch.stack)(list(next(columns))))
