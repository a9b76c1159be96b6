"""What staleness does to training: one model, one learning rate, trained with and without flushes. Under a minute.

    curves()           runs each of METHODS on real ranks: the mean loss of every step
    replayed(seeds)    the same in this process, for several seeds, by the order that the simulator predicts
    plot(curves)       all of them in one picture
    bands(replayed)    of several seeds: their mean, and a band from the least to the largest

Every method gets the same rows in the same order, with the same learning rate and momentum. A synchronous method
updates once a step; PipeDream and AMPNet update after every micro-batch, by late gradients; PipeDream-2BW updates once
a step, one step late. The corrected methods begin with a lower learning rate on ranks whose gradients are later
(`correction.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

from minipar import data as datasets
from minipar import models
from minipar.cluster import Cluster
from minipar.cluster.ranks import Ranks
from minipar.execution.correction import ByStaleness, Factory
from minipar.execution.execution import Job, execute
from minipar.models.parameter_groups import shape_of
from minipar.models.tensors import layers_of
from minipar.prediction.simulator import simulate
from minipar.strategies.plan import Plan
from minipar.trace.recorded_order import RecordedOrder, order_of
from minipar.training.reference import Job as PlainJob
from minipar.training.reference import Replay, build, reader, train_plainly

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# name: schedule, whether its learning rate is corrected
METHODS: dict[str, tuple[str, bool]] = {
    "1F1B, synchronous": ("1f1b", False),
    "PipeDream": ("pipedream", False),
    "PipeDream, vertical sync": ("pipedream-vertical", False),
    "PipeDream-2BW": ("pipedream-2bw", False),
    "AMPNet, 8 in flight": ("ampnet in_flight=8", False),
    "PipeDream, vertical sync, corrected": ("pipedream-vertical", True),
    "AMPNet, 8 in flight, corrected": ("ampnet in_flight=8", True),
}
WIDTHS = (64,) * 8 + (10,)


def curves(
    steps: int = 40,
    *,
    ranks: int = 4,
    microbatches: int = 8,
    batch: int = 64,
    lr: float = 0.01,
    momentum: float = 0.9,
    methods: Mapping[str, tuple[str, bool]] = METHODS,
    cluster: Ranks | None = None,
    model: Any = partial(models.mlp, WIDTHS, activation=torch.nn.Tanh),
    data: Any = None,
    seed: int = 0,
) -> dict[str, list[float]]:
    """The mean loss of each step of each method; a step is `batch` rows in `microbatches` parts.

    cluster   of `ranks` ranks; default: made for this call
    data      default: the handwritten digits
    """
    found = {}
    with nullcontext(cluster) if cluster is not None else Cluster(ranks, device="cpu") as running:
        for name, plan, optimizer in _trained(methods, ranks, microbatches, steps, lr, momentum):
            job = Job(model, data or datasets.digits(seed), batch, optimizer=optimizer, seed=seed)
            shape = shape_of(layers_of(job.build()))
            whole = plan.asynchronous
            program = plan.compile(shape, steps=steps if whole else 1)
            passes = 1 if whole else steps
            done = execute(program, job, cluster=running, passes=passes, keep_gradients=False, check=False)
            found[name] = by_step(done.losses, steps)
    return found


def replayed(
    seeds: Sequence[int],
    steps: int = 40,
    *,
    ranks: int = 4,
    microbatches: int = 8,
    batch: int = 64,
    lr: float = 0.01,
    momentum: float = 0.9,
    methods: Mapping[str, tuple[str, bool]] = METHODS,
) -> dict[str, list[list[float]]]:
    """The curves of each method, one for each seed of rows and weights, without ranks.

    A loop of plain torch follows the order of the predicted run, in which a backward takes twice as long as a forward.
    """
    found: dict[str, list[list[float]]] = {name: [] for name in methods}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # (the matrices are small)
    for name, plan, optimizer in _trained(methods, ranks, microbatches, steps, lr, momentum):
        for seed in seeds:
            model = build(partial(models.mlp, WIDTHS, activation=torch.nn.Tanh), seed, torch.float32)
            batches = reader(datasets.digits(seed), batch, torch.float32)
            job = PlainJob(model, batches, torch.nn.functional.cross_entropy, optimizer, seed, keep_gradients=False)
            if plan.asynchronous:
                done = Replay(job, _order(plan, steps)).train()
            else:
                done = train_plainly(job, steps)
            found[name].append(by_step(done.losses, steps))
    torch.set_num_threads(threads)
    return found


def _trained(
    methods: Mapping[str, tuple[str, bool]], ranks: int, microbatches: int, steps: int, lr: float, momentum: float
) -> Iterator[tuple[str, Plan, Factory]]:
    """Of each method its name, its plan, and its optimizer."""
    plain = partial(torch.optim.SGD, lr=lr, momentum=momentum)
    for name, (schedule, correct) in methods.items():
        plan = Plan.parse(f"pp={ranks} microbatches={microbatches} schedule={schedule}")
        yield name, plan, ByStaleness(plain, steps * microbatches // 2) if correct else plain


@cache  # (it depends neither on the seed nor on the learning rate)
def _order(plan: Plan, steps: int) -> RecordedOrder:
    """In which order the ranks of an asynchronous plan work, as it is predicted."""
    program = plan.compile(layers=len(WIDTHS) - 1, steps=steps)
    return order_of(simulate(program, forward=1, backward=2).program)


def by_step(losses: Sequence[float], steps: int) -> list[float]:
    """For each step the mean over the losses of its mini-batches."""
    k = len(losses) // steps
    return [sum(losses[s * k : (s + 1) * k]) / k for s in range(steps)]


def plot(found: Mapping[str, Sequence[float]]) -> Figure:
    """The loss curves in one picture."""
    from minipar.trace.figure import RULE, picture, ruled

    figure: Any = picture()(figsize=(9, 4.2), layout="constrained")
    axes = figure.subplots()
    looks = (("#000000", "o"), ("#0072B2", "s"), ("#56B4E9", "^"), ("#009E73", "D"), ("#D55E00", "v"))
    kept: dict[str, tuple[str, str]] = {}
    for name, losses in found.items():
        base = name.removesuffix(", corrected")
        colour, marker = kept.setdefault(base, looks[len(kept) % len(looks)])
        every = max(1, len(losses) // 8)
        line = "--" if name != base else "-"
        axes.plot(losses, label=name, color=colour, linestyle=line, marker=marker, markevery=every, markersize=5)
    axes.set(xlabel="step", ylabel="mean loss of the step")
    ruled(axes, "Late gradients: same model, rows and learning rate")
    axes.grid(color=RULE, linewidth=0.6)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    figure.alt = "; ".join(f"{name}: {losses[0]:.2f} to {losses[-1]:.2f}" for name, losses in found.items())
    return figure


def bands(found: Mapping[str, Sequence[Sequence[float]]]) -> Figure:
    """For each method the mean of its curves, and a band from the least to the largest."""
    from minipar.trace.figure import RULE, picture, ruled

    figure: Any = picture()(figsize=(9, 4.2), layout="constrained")
    axes = figure.subplots()
    colours = ("#000000", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
    for k, (name, curves) in enumerate(found.items()):
        steps = list(zip(*curves, strict=True))
        colour, line = colours[k % len(colours)], ("-", "--", "-.", ":")[k % 4]
        axes.plot([sum(step) / len(step) for step in steps], label=name, color=colour, linestyle=line)
        least, largest = [min(step) for step in steps], [max(step) for step in steps]
        axes.fill_between(range(len(steps)), least, largest, color=colour, alpha=0.18)
    axes.set(xlabel="step", ylabel="mean loss of the step")
    ruled(axes, "Late gradients: means and bands of several seeds")
    axes.grid(color=RULE, linewidth=0.6)
    axes.xaxis.get_major_locator().set_params(integer=True)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    ends = {name: [curve[-1] for curve in curves] for name, curves in found.items()}
    figure.alt = "; ".join(f"{name}: at the end {min(end):.2f} to {max(end):.2f}" for name, end in ends.items())
    return figure
