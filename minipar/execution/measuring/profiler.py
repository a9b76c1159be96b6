"""Measure a model: its shape, and what each of its layers costs, one layer at a time on one device.

layer l:   detached output of l-1 --forward--> output --backward--> gradients      (timed, counted, weighed)

And what slices of a sequence cost, t(length, context), for `minipar.costs.slicing`:

tokens     |------ context ------|-- length --|          the context runs first, so that its keys and values are there
"""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from minipar.costs.measured import Profile
from minipar.errors import MiniparError, PlanError
from minipar.execution import autograd_entry, naming_layers, repartition, sliced
from minipar.execution.measuring.weighing import Weights, weigh
from minipar.execution.split_backward import input_half, left, weight_half
from minipar.execution.streams import synchronize
from minipar.execution.tails import Tails
from minipar.models.network import edges_of
from minipar.models.nodes import ShardedModel
from minipar.models.parameter_groups import groups_of
from minipar.models.tensors import (
    count_bytes,
    count_rows,
    detach,
    differentiable,
    find_overwriting,
    map_tensors,
    overwrites,
    take_tokens,
    tensors,
)
from minipar.program.edges import wiring
from minipar.program.forms import COUNTS, Forms, needed, pairs

Loss = Callable[[Any], Tensor]
OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def _of_output(loss: Callable[[Any, Any], Tensor], target: Any, output: Any) -> Tensor:
    return loss(output, target)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


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
    threads   CPU threads that a layer may use. With one, times are of that thread's own work, so that other programs
              on the machine do not disturb them; with more, and on a GPU, they are by the clock

    slices    token slices of the rows, each behind those before it: then slice j of n rows has the key n * slices + j

    Layers are timed one at a time, in the order of a training step: forwards first, backwards last, so that the caches
    hold what they would hold in one. The model is left as it was, with its buffers and gradients, on the device where
    it is, and so is the state of the random generators: every layer is measured on a copy.

    Errors: `PlanError` for rows that the batch cannot give, or less than 1 repeat.
    """
    between = between_nodes(model)
    layers, names = list(model), naming_layers.names_of(model)
    if repeats < 1:
        raise PlanError(f"repeats={repeats}: must be at least 1")
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise PlanError(f"batch: must be a pair (x, y) of rows and targets, not a {type(batch).__name__}")
    x, y = batch
    held, inputs = groups_of(layers), wiring(edges_of(model), len(layers)).inputs
    trainable_from = min((min(h.layers) for h in held if h.trainable), default=len(layers))
    device = next((p.device for h in held for p in (*h.trainable, *h.frozen)), torch.device("cpu"))
    places = [torch.device("cpu") if l in on_host else device for l in range(len(layers))] if on_host else []
    clock = _Stopwatch(device, threads)
    costs: dict[int, list[_LayerCost]] = {}
    with _undisturbed(device, threads):
        for n in sorted(set(rows if rows is not None else [count_rows(x)])):
            whole = _rows(x, n, device), _rows(y, n, device)
            carried: dict[int, Any] = {}
            for j, tokens in enumerate(slices or [None]):
                key = n * max(1, len(slices)) + j
                given, wanted = whole if tokens is None else take_tokens(whole, tokens)
                if between is not None:
                    given, wanted = map(between.part, (given, wanted))
                here = None if tokens is None else (tokens.start, j < len(slices) - 1, carried)
                costs[key] = []
                found = None if between is None else between.anew(key, n)
                for run in _runs(layers, inputs, given, (loss, wanted), trainable_from, found, here, names, places):
                    if recompute and tokens is None:
                        for each in run:
                            each.recompute(repeats, clock)
                    costs[key] += _time_run(run, repeats, clock, halves)
        trained = [h.trainable for h in held]
        step_seconds, optimizer_bytes = _measure_step(trained, optimizer, repeats, clock)
        host_step_seconds = 0.0
        if host_steps and device.type != "cpu":
            copies = [[p.detach().cpu() for p in group] for group in trained]
            host_step_seconds, _ = _measure_step(copies, optimizer, repeats, clock)

    def table(column: Callable[[_LayerCost], Any]) -> dict[int, tuple[Any, ...]]:
        return {n: tuple(map(column, found)) for n, found in costs.items()}

    return Profile(
        forward=table(lambda c: c.forward),
        backward=table(lambda c: c.backward),
        output_bytes=table(lambda c: c.weights.output),
        grad_output_bytes=table(lambda c: c.weights.grad_output),
        saved_bytes=table(lambda c: c.weights.saved),
        saves_output=tuple(any(found[l].weights.saves_output for found in costs.values()) for l in range(len(layers))),
        parameter_bytes=tuple(sum(map(_bytes, (*h.trainable, *h.frozen))) for h in held),
        gradient_bytes=tuple(sum(map(_bytes, h.trainable)) for h in held),
        optimizer_bytes=optimizer_bytes,
        step_seconds=step_seconds,
        host_step_seconds=host_step_seconds,
        backward_input=table(lambda c: c.input_half) if halves else {},
        backward_weight=table(lambda c: c.weight_half) if halves else {},
        forward_flops=table(lambda c: c.forward_flops),
        backward_flops=table(lambda c: c.backward_flops),
        saved_weight_bytes=table(lambda c: c.left) if halves else {},
        carry_bytes=table(lambda c: c.weights.carry),
        grad_carry_bytes=table(lambda c: c.weights.grad_carry),
        recompute=table(lambda c: c.recompute) if recompute and not slices else {},
        **({} if between is None else between.tables()),
    )


# forms ----------------------------------------------------------------------------------------------------------------


def between_nodes(model: Any) -> Between | None:
    """What lies between the nodes of a model, if it is sharded."""
    return Between(model.forms, model.counts, model.inputs) if isinstance(model, ShardedModel) else None


class Between:
    """What lies between the nodes of a sharded model: collectives, of which one rank alone knows only the sizes."""

    def __init__(self, forms: Sequence[Forms], counts: Sequence[int], inputs: str) -> None:
        self.forms, self.counts, self.inputs = forms, counts, inputs
        self.found: dict[int, list[tuple[int, int, int, int, int]]] = {}

    def part(self, values: Any) -> Any:
        """What one rank has of rows or targets."""
        return repartition.part_of_batch(values, self.inputs, [(0, count) for count in self.counts])

    def anew(self, key: int, rows: int) -> Callable[[int, Any], Any]:
        """A new pass through all nodes, with other rows. Gives a function of a node and what was written for it."""
        sizes = self.found[key] = []

        def change(node: int, written: Any) -> Any:
            before, after = self.forms[node - 1], self.forms[node]
            read = repartition.on_one_rank(written, before.writes, after.reads, self.counts, rows)
            gradients = repartition.in_gradient(read, after.reads)
            sizes.append(
                (
                    count_bytes(read),
                    count_bytes(gradients),
                    _changed(tensors(written), before.writes, after.reads),
                    _changed(gradients, after.grad_writes, before.grad_reads),
                    _changed(tensors(written), before.writes, after.reads, counts=True),
                )
            )
            return read

        return change

    def tables(self) -> dict[str, dict[int, tuple[int, ...]]]:
        """Those of `Profile`, by their names; the last node's output is read by nobody."""
        names = ("read_bytes", "grad_written_bytes", "changing_bytes", "grad_changing_bytes", "counts_bytes")
        return {
            name: {key: (*(size[k] for size in sizes), 0) for key, sizes in self.found.items()}
            for k, name in enumerate(names)
        }


def _changed(found: Sequence[Tensor], before: str, after: str, counts: bool = False) -> int:
    """Bytes of the tensors that change their form; those that are gathered as counts, or all others."""
    if before == needed(after):
        return 0
    changes = zip(found, pairs(before, needed(after)), strict=True)
    return count_bytes([t for t, (old, new) in changes if old != new and (COUNTS in new) is counts])


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


class _LayerCost(NamedTuple):
    forward: float
    backward: float
    input_half: float
    weight_half: float
    weights: Weights
    forward_flops: int
    backward_flops: int
    left: int
    recompute: float


@dataclass
class _Measured:
    """One layer under measurement: a copy of it, its input, the loss if it is the last, and what was found so far."""

    layer: nn.Module
    value: Any
    loss: Loss | None
    input_gradient: bool
    weights: Weights
    flops: tuple[int, int]
    given: int  # bytes of its input, unless that is the rows themselves
    seconds: dict[str, list[float]]
    left: list[int] = field(default_factory=list)  # bytes between the halves of its backward
    slice: sliced.OneSlice | None = None

    def forward(self, clock: _Stopwatch) -> tuple[Any, list[Tensor]]:
        """A timed forward: the input as a leaf, and the tensors that a backward starts from."""
        given = detach(self.value, self.input_gradient)
        start = clock()
        output = (self.slice or self.layer)(map_tensors(given, torch.clone) if overwrites(self.layer) else given)
        ends = [self.loss(output)] if self.loss else differentiable(output)
        ends = [end for end in ends + differentiable(self.slice and self.slice.handed_on) if end.requires_grad]
        self.seconds["forward"].append(clock() - start)
        return given, ends

    def recompute(self, repeats: int, clock: _Stopwatch) -> None:
        """Time the forward as the executor runs it where nobody reads the output, if that is any shorter."""
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


def _runs(
    layers: list[nn.Module],
    inputs: Sequence[Sequence[int]],
    value: Any,
    final: tuple[Callable[[Any, Any], Tensor], Any],
    trainable_from: int,
    between: Callable[[int, Any], Any] | None,
    here: tuple[int, bool, dict[int, Any]] | None = None,
    names: Sequence[str] = (),
    places: Sequence[torch.device] = (),
) -> Iterator[list[_Measured]]:
    """Neighbouring layers that are timed together, each weighed and warmed up: as many as keep `_KEPT` bytes.

    inputs   for each layer those whose outputs it reads
    between  of a layer and its input, as others have written it: as this layer reads it
    here     of a slice of sequences its first token, whether there is a next one, and by layer what was carried on
    places   where each layer computes; default: where it is
    """
    outputs: dict[int, Any] = {}
    until = {a: l for l, read in enumerate(inputs) for a in read}  # the last one that reads it
    run: list[_Measured] = []
    kept = 0
    for l, layer in enumerate(layers):
        layer, last = copy.deepcopy(layer), l == len(layers) - 1
        if l:
            value = outputs[inputs[l][0]] if len(inputs[l]) == 1 else tuple(outputs[a] for a in inputs[l])
            value = value if between is None else between(l, value)
            outputs = {a: output for a, output in outputs.items() if until[a] > l}
        if places:
            layer, value = layer.to(places[l]), _on(places[l], value)
        if places and last:
            final = final[0], _on(places[l], final[1])
        loss = partial(_of_output, *final) if last else None
        given = detach(value, l > trainable_from)
        part = None if here is None else sliced.OneSlice(layer, here[0], here[2].get(l), here[1], l >= trainable_from)
        try:
            find_overwriting(layer, given, part)
            with FlopCounterMode(display=False, custom_mapping=_FLOPS) as forward:
                output, ends, weights = weigh(
                    layer, partial(_forward, part or layer, loss), given, partial(_kept_anyway, last and final[1], part)
                )
            if here is not None and part is not None:
                ends = ends + differentiable(part.handed_on)
                carry, gradient = part.sizes([*tensors(given), *layer.parameters(), *layer.buffers()])
                weights = weights._replace(carry=carry, grad_carry=gradient)
                here[2][l] = detach(part.handed_on)
            # Gradients of the same size would arrive from the next layer. This backward allocates the weights'
            # gradients, which the timed ones add to, as all micro-batches but one do.
            ends = [end for end in ends if end.requires_grad]
            with FlopCounterMode(display=False, custom_mapping=_FLOPS) as backward:
                if ends:
                    autograd_entry.backward([get_gradient_edge(end) for end in ends], _ones(ends))
        except MiniparError:
            raise
        except Exception as error:
            who = naming_layers.title(l, layer, names) + " or the loss" * last
            raise naming_layers.raised(who, error, "in the profile, before the run", given) from error
        flops = forward.get_total_flops(), backward.get_total_flops()
        before = count_bytes(value) if l else 0
        run.append(_Measured(layer, value, loss, l > trainable_from, weights, flops, before, defaultdict(list)))
        run[-1].slice = part
        outputs[l] = detach(output)
        del output, ends, given
        kept += weights.saved + weights.output
        if kept >= _KEPT:
            yield run
            run, kept = [], 0
    if run:
        yield run


def _forward(run: Callable[[Any], Any], loss: Loss | None, given: Any) -> tuple[Any, list[Tensor]]:
    """A layer's output, and the tensors that a backward starts from: the loss, or what can have a gradient."""
    output = run(given)
    return output, [loss(output)] if loss else differentiable(output)


def _kept_anyway(target: Any, part: sliced.OneSlice | None) -> list[Tensor]:
    """The loss's targets; for a slice also what the layer takes and carries on beside its input and output."""
    return [*tensors(target), *(tensors(part.beside) if part else ())]


def _time_run(run: list[_Measured], repeats: int, clock: _Stopwatch, halves: bool) -> list[_LayerCost]:
    """The layers of a run, forwards in order and backwards in reverse; then again with backwards in `halves`."""
    for _ in range(repeats):
        graphs = [each.forward(clock) for each in run]
        for each in reversed(run):
            _, ends = graphs.pop()
            edges, gradients = [get_gradient_edge(end) for end in ends], _ones(ends)
            start = clock()
            if ends:
                autograd_entry.backward(edges, gradients)
            each.seconds["backward"].append(clock() - start if ends else 0.0)
            del ends, edges
    if halves:
        _time_halves(run, (repeats + 1) // 2, clock)
    return [
        _LayerCost(
            median(each.seconds["forward"]),
            median(each.seconds["backward"]),
            median(each.seconds["input half"] or [0.0]),
            median(each.seconds["weight half"] or [0.0]),
            each.weights,
            *each.flops,
            each.left[0] if each.left else 0,
            median(each.seconds["recompute"] or each.seconds["forward"]),
        )
        for each in run
    ]


def _time_halves(run: list[_Measured], repeats: int, clock: _Stopwatch) -> None:
    """The layers of a run, forwards in order and backwards in reverse and in halves; what the input half leaves."""
    for _ in range(repeats):
        graphs = [each.forward(clock) for each in run]
        for each in reversed(run):
            given, ends = graphs.pop()
            gradients = _ones(ends)
            inputs = [t for t in differentiable(given) if t.requires_grad]
            parameters = [p for p in each.layer.parameters() if p.requires_grad]
            start = clock()
            edges = [get_gradient_edge(end) for end in ends]
            arrived = input_half(edges, gradients, inputs, parameters)[1]
            middle = clock()
            if not each.left:
                kept = [*each.layer.parameters(), *each.layer.buffers()]
                everything = each.weights.saved + each.given + count_bytes(gradients)
                each.left.append(sum(left(arrived, kept)) if inputs or not ends else everything)
                middle = clock()
            weight_half(arrived)
            each.seconds["weight half"].append(clock() - middle if arrived else 0.0)
            each.seconds["input half"].append(middle - start if inputs and ends else 0.0)
            del given, ends, edges, inputs, arrived


def _ones(ends: Sequence[Tensor]) -> list[Tensor]:
    return [torch.ones_like(end) for end in ends]


# Bytes that autograd keeps of the layers that are timed together: more than the caches next to a core hold, and few
# compared with a device's memory.
_KEPT = 64 * 2**20


class _Stopwatch:
    """Seconds: of the thread's own work where one thread of the CPU does it all, of the clock elsewhere."""

    def __init__(self, device: torch.device, threads: int) -> None:
        self.device = device
        self.read = time.thread_time if device.type == "cpu" and threads == 1 else time.perf_counter

    def __call__(self) -> float:
        synchronize(self.device)
        return self.read()


def _measure_step(
    groups: Sequence[Sequence[Tensor]], factory: OptimizerFactory, repeats: int, clock: _Stopwatch
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
    state = [
        sum(_bytes(t) for p in group for t in optimizer.state.get(p, {}).values() if isinstance(t, Tensor))
        for group in copies
    ]
    return median(seconds), tuple(state)


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


def _rows(value: Any, n: int, device: torch.device) -> Any:
    have = min((len(t) for t in tensors(value)), default=0)
    if not 1 <= n <= have:
        raise PlanError(f"rows={n}: must be from 1 to {have}, the rows of the data given")
    return map_tensors(value, lambda t: t[:n].to(device))
