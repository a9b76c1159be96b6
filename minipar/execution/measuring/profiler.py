"""Measure a model: its shape, and what each of its layers costs, one layer at a time on one device.

layer l:   detached output of l-1 --forward--> output --backward--> gradients      (timed, counted, weighed)

And what slices of a sequence cost, t(length, context), for `minipar.costs.slicing`. `walk` brings their inputs.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from minipar.costs.measured import Profile
from minipar.errors import MiniparError, PlanError
from minipar.execution import autograd_entry, naming_layers, sliced
from minipar.execution.measuring.walk import Visit, between_nodes, of_output, walk
from minipar.execution.measuring.weighing import Weights, weigh
from minipar.execution.split_backward import input_half, left, weight_half
from minipar.execution.streams import synchronize
from minipar.execution.tails import Tails
from minipar.models.parameter_groups import groups_of
from minipar.models.tensors import (
    copied,
    count_bytes,
    count_rows,
    detach,
    differentiable,
    find_overwriting,
    given_to,
    map_tensors,
    overwrites,
    tensors,
)

Loss = Callable[[Any], Tensor]
Clock = Callable[[], float]
OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def profile(
    model: Iterable[nn.Module],
    batch: tuple[Any, Any],
    loss: Callable[[Any, Any], Tensor] = nn.functional.cross_entropy,
    rows: Sequence[int] | None = None,
    repeats: int = 3,
    threads: int = 1,
    optimizer: OptimizerFactory = torch.optim.SGD,
    slices: Sequence[range] = (),
    recompute: bool = False,
    on_host: Collection[int] = (),
    host_steps: bool = False,
    halves: bool = True,
    flops: bool = True,
) -> Profile:
    """Time and weigh each layer of `model` for every number of rows in `rows`, and one step of `optimizer`.

    batch     (x, y): tensors, or tuples of tensors, with at least max(rows) rows; micro-batches of n rows are their
              first n
    loss      loss(output, y) -> a scalar
    rows      sizes of micro-batches; default: all rows of the batch
    repeats   times are medians of so many, after one run to warm up
    recompute also time each layer as the end of a recomputation (not of slices)
    on_host   layers that a rank with a GPU computes on its host: they are measured there
    host_steps   also time, beside a GPU, the optimizer's step on the host
    halves    also time the two halves of each backward: the gradients of inputs, and those of weights
    flops     also count operations
    threads   CPU threads that a layer may use. With one, times are of that thread's own work, so that other programs
              on the machine do not disturb them; with more, and on a GPU, they are by the clock

    slices    token slices of the rows, each behind those before it: then slice j of n rows has the key n * slices + j

    Layers are timed one at a time, in the order of a training step: forwards first, backwards last, so that the caches
    hold what they would hold in one. The model is left as it was, with its buffers and gradients, on the device where
    it is, and so is the state of the random generators: every layer is measured on a copy.

    Errors: `PlanError` for rows that the batch cannot give, or less than 1 repeat.
    """
    if repeats < 1:
        raise PlanError(f"repeats={repeats}: must be at least 1")
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise PlanError(f"batch: must be a pair (x, y) of rows and targets, not a {type(batch).__name__}")
    layers, between = list(model), between_nodes(model)
    held = groups_of(layers)
    first = min((min(h.layers) for h in held if h.trainable), default=len(layers))
    device = next((p.device for h in held for p in (*h.trainable, *h.frozen)), torch.device("cpu"))
    places = [torch.device("cpu") if l in on_host else device for l in range(len(layers))] if on_host else []
    clock = _stopwatch(device, threads)
    costs: dict[int, list[dict[str, Any]]] = {}
    walked = walk(model, batch, [count_rows(batch[0])] if rows is None else rows, slices, device, between)
    warm = partial(_warmed_up, layers, naming_layers.names_of(model), loss, first, 2 * flops, places)
    with _undisturbed(device, threads):
        for key, run in _runs(walked, warm):
            for each in run if recompute and not slices else ():
                with _naming(each.title, each.value):
                    each.recompute(repeats, clock)
            costs.setdefault(key, []).extend(_time_run(run, repeats, clock, halves))
        trained = [h.trainable for h in held]
        step_seconds, optimizer_bytes = _measure_step(trained, optimizer, repeats, clock)
        host_step_seconds = 0.0
        if host_steps and device.type != "cpu":
            copies = [[p.detach().cpu() for p in group] for group in trained]
            host_step_seconds, _ = _measure_step(copies, optimizer, repeats, clock)

    names = dict.fromkeys(name for found in costs.values() for one in found for name in one)
    tables: dict[str, Any] = {
        name: {key: tuple(one[name] for one in found) for key, found in costs.items()} for name in names
    }
    tables |= {} if between is None else between.tables()
    return Profile(
        parameter_bytes=tuple(count_bytes([*h.trainable, *h.frozen]) for h in held),
        gradient_bytes=tuple(count_bytes(list(h.trainable)) for h in held),
        optimizer_bytes=optimizer_bytes,
        step_seconds=step_seconds,
        host_step_seconds=host_step_seconds,
        **tables,
    )


# one layer ------------------------------------------------------------------------------------------------------------


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _attention_backward_flops(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(gradient, query, key, value))


# Operations that torch's counter does not know: attention on the CPU has operators of its own.
_FLOPS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}


@dataclass
class _Measured:
    """One layer under measurement: a copy of it, its input, the loss if it is the last, and what was found so far."""

    layer: nn.Module
    run: sliced.Alone
    title: str  # in errors
    value: Any
    loss: Loss | None
    input_gradient: bool
    weights: Weights
    flops: tuple[int, ...]
    given: int  # bytes of its input, unless that is the rows themselves
    seconds: dict[str, list[float]]
    left: list[int] = field(default_factory=list)  # bytes between the halves of its backward

    def forward(self, clock: Clock) -> tuple[Any, list[Tensor]]:
        """A timed forward: the input as a leaf, and the tensors that a backward starts from."""
        given = detach(self.value, self.input_gradient)
        start = clock()
        _, ends = _forward(self.run, self.loss, given_to(self.layer, given))
        self.seconds["forward"].append(clock() - start)
        return given, ends

    def recompute(self, repeats: int, clock: Clock) -> None:
        """Time the forward as the executor runs it where nobody reads the output, if that is any shorter."""
        self.seconds["recompute"] = []
        if self.loss or overwrites(self.layer):
            return
        tails = Tails()
        for k in range(repeats + 1):
            given = detach(self.value, self.input_gradient)
            start = clock()
            output = tails.run(0, self.layer, given)
            if k:
                self.seconds["recompute"].append(clock() - start)
            graph = [get_gradient_edge(t) for t in differentiable(output) if t.requires_grad]
            del output
            tails.settle()
            del graph
            if not tails.shortens(0, given):
                return


def _runs(walked: Iterable[Visit], warm: Callable[[Visit], _Measured]) -> Iterator[tuple[int, list[_Measured]]]:
    """Neighbouring layers that are timed together, each weighed and warmed up: as many as keep `_KEPT` bytes."""
    run: list[_Measured] = []
    kept = 0
    for visit in walked:
        run.append(warm(visit))
        kept += run[-1].weights.saved + run[-1].weights.output
        if kept >= _KEPT or visit.last:
            yield visit.key, run
            run, kept = [], 0


def _warmed_up(
    layers: Sequence[nn.Module],
    names: Sequence[str],
    loss: Callable[[Any, Any], Tensor],
    first: int,
    count: int,
    places: Sequence[torch.device],
    visit: Visit,
) -> _Measured:
    """A copy of a layer, weighed in a forward and a first backward.

    first    the first layer with something to train
    count    of how many of the two the operations are counted
    places   where each layer computes, if that is not where it is
    """
    l, layer, value, target = visit.number, copied(layers[visit.number]), visit.given, visit.target
    if places:
        layer, value, target = layer.to(places[l]), _on(places[l], value), _on(places[l], target)
    final = partial(of_output, loss, target) if visit.last else None
    given = detach(value, l > first)
    run = sliced.Alone(layer, visit.start, visit.carried, visit.more, l >= first)
    title = naming_layers.title(l, layer, names) + " or the loss" * visit.last
    counters = [FlopCounterMode(display=False, custom_mapping=_FLOPS) for _ in range(count)]
    with _naming(title, given):
        if find_overwriting(layer, given, run):
            raise PlanError(
                f"{naming_layers.title(l, layer, names)}: changes a tensor of its input in place, with which another "
                "one shares memory, as a view does; between layers each is sent by itself. Possible is clone() before"
            )
        with counters[0] if counters else nullcontext():
            kept = partial(_kept_anyway, target, run)
            output, ends, weights = weigh(layer, partial(_forward, run, final), given, kept)
        known = [*tensors(given), *layer.parameters(), *layer.buffers()]
        carry, gradient = sliced.carry_sizes(run.handed_on, known)
        weights = weights._replace(carry=carry, grad_carry=gradient)
        visit.carried = detach(run.handed_on)
        # Gradients of the same size would arrive from the next layer. This backward allocates the weights' gradients,
        # which the timed ones add to, as all micro-batches but one do.
        with counters[1] if counters else nullcontext():
            if ends:
                autograd_entry.backward([get_gradient_edge(end) for end in ends], _ones(ends))
    visit.output = detach(output)
    counted = tuple(counter.get_total_flops() for counter in counters)
    before = count_bytes(value) if l else 0
    return _Measured(layer, run, title, value, final, l > first, weights, counted, before, defaultdict(list))


@contextmanager
def _naming(title: str, given: Any) -> Iterator[None]:
    """An error in the block names the layer."""
    try:
        yield
    except MiniparError:
        raise
    except Exception as error:
        raise naming_layers.raised(title, error, "in the profile, before the run", given) from error


def _forward(run: sliced.Alone, loss: Loss | None, given: Any) -> tuple[Any, list[Tensor]]:
    """A layer's output, and the tensors that a backward starts from: the loss, or what can have a gradient; of a slice
    also what it hands on."""
    output = run(given)
    ends = [loss(output)] if loss else differentiable(output)
    return output, [end for end in ends + differentiable(run.handed_on) if end.requires_grad]


def _kept_anyway(target: Any, run: sliced.Alone) -> list[Tensor]:
    """The loss's targets; for a slice also what the layer takes and carries on beside its input and output."""
    return tensors((target, run.given, run.handed_on))


def _time_run(run: list[_Measured], repeats: int, clock: Clock, halves: bool) -> list[dict[str, Any]]:
    """The layers of a run, forwards in order and backwards in reverse; then again with backwards in `halves`. Gives for
    each layer what `Profile` says of it, by the names of its tables."""
    for backward in [_backward] * repeats + [_halves] * ((repeats + 1) // 2 * halves):
        graphs = []
        for each in run:
            with _naming(each.title, each.value):
                graphs.append(each.forward(clock))
        for each in reversed(run):
            with _naming(each.title, each.value):
                backward(each, graphs.pop(), clock)
    return [_columns(each) for each in run]


def _columns(layer: _Measured) -> dict[str, Any]:
    """(Where a recomputation is a whole forward, it was not timed again.)"""
    found: dict[str, Any] = {name: median(times or layer.seconds["forward"]) for name, times in layer.seconds.items()}
    weights = layer.weights
    found |= {"output_bytes": weights.output, "grad_output_bytes": weights.grad_output, "saved_bytes": weights.saved}
    found |= {"carry_bytes": weights.carry, "grad_carry_bytes": weights.grad_carry}
    found |= dict(zip(("forward_flops", "backward_flops"), layer.flops, strict=False))
    if layer.left:
        found["saved_weight_bytes"] = layer.left[0]
    return found


def _backward(layer: _Measured, graph: tuple[Any, list[Tensor]], clock: Clock) -> None:
    """Time a whole backward."""
    ends = graph[1]
    edges, gradients = [get_gradient_edge(end) for end in ends], _ones(ends)
    start = clock()
    if ends:
        autograd_entry.backward(edges, gradients)
    layer.seconds["backward"].append(clock() - start if ends else 0.0)


def _halves(layer: _Measured, graph: tuple[Any, list[Tensor]], clock: Clock) -> None:
    """Time a backward in halves; what the input half leaves."""
    given, ends = graph
    gradients = _ones(ends)
    inputs = [t for t in differentiable(given) if t.requires_grad]
    parameters = [p for p in layer.layer.parameters() if p.requires_grad]
    start = clock()
    edges = [get_gradient_edge(end) for end in ends]
    arrived = input_half(edges, gradients, inputs, parameters)[1]
    middle = clock()
    if not layer.left:
        kept = [*layer.layer.parameters(), *layer.layer.buffers()]
        everything = layer.weights.saved + layer.given + count_bytes(gradients)
        layer.left.append(sum(left(arrived, kept)) if inputs or not ends else everything)
        middle = clock()
    weight_half(arrived)
    layer.seconds["backward_weight"].append(clock() - middle if arrived else 0.0)
    layer.seconds["backward_input"].append(middle - start if inputs and ends else 0.0)


def _ones(ends: Sequence[Tensor]) -> list[Tensor]:
    return [torch.ones_like(end) for end in ends]


# Bytes that autograd keeps of the layers that are timed together: more than the caches next to a core hold, and few
# compared with a device's memory.
_KEPT = 64 * 2**20


def _stopwatch(device: torch.device, threads: int) -> Clock:
    """Reads seconds: of the thread's own work where one thread of the CPU does it all, of the clock elsewhere."""
    read = time.thread_time if device.type == "cpu" and threads == 1 else time.perf_counter

    def clock() -> float:
        synchronize(device)
        return read()

    return clock


def _measure_step(
    groups: Sequence[Sequence[Tensor]], factory: OptimizerFactory, repeats: int, clock: Clock
) -> tuple[float, tuple[int, ...]]:
    """Seconds of an optimizer step over copies of all parameters, and the bytes it keeps for each group."""
    copies = [[nn.Parameter(p.detach().clone()) for p in group] for group in groups]
    everything = [p for group in copies for p in group]
    if not everything:
        return 0.0, (0,) * len(groups)
    for p in everything:
        p.grad = torch.full_like(p, 1e-3)
    optimizer = factory(everything)
    optimizer.step()  # creates the state
    seconds = []
    for _ in range(repeats):
        start = clock()
        optimizer.step()
        seconds.append(clock() - start)
    kept = (count_bytes([list(optimizer.state.get(p, {}).values()) for p in group]) for group in copies)
    return median(seconds), tuple(kept)


@contextmanager
def _undisturbed(device: torch.device, threads: int) -> Iterator[None]:
    """Set the number of threads; restore it, and the random generators, whatever happens inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.enable_grad():
            yield
    finally:
        torch.set_num_threads(before)


def _on(device: torch.device, value: Any) -> Any:
    return map_tensors(value, lambda t: t.to(device))
