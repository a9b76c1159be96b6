"""Measure a model: its shape, and what each of its layers costs, one layer at a time on one device.

layer l:   detached output of l-1 --forward--> output --backward--> gradients      (timed, and what autograd saved)
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minipar.costs.measured import Profile
from minipar.costs.shapes import Shape
from minipar.errors import PlanError
from minipar.program import Group
from minipar.tensors import count_bytes, detach, differentiable, map_tensors, overwrites, storages, tensors

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def shape_of(model: Iterable[nn.Module]) -> Shape:
    """The layers and parameter groups of a model, an `nn.Sequential` or any list of layers.

    First one group per layer, of the parameters that no other layer holds; then one per set of layers that hold the
    same Parameter objects (tied weights). Sizes in bytes. Errors: `PlanError` for a model without layers.
    """
    layers = list(model)
    groups = tuple(
        Group(holders, tuple(map(_bytes, trainable)), sum(map(_bytes, frozen)))
        for holders, trainable, frozen in _groups(layers)
    )
    name = getattr(model, "name", "")
    return Shape(len(layers), groups, name if isinstance(name, str) else "")


def parameters_of(model: Iterable[nn.Module]) -> list[list[nn.Parameter]]:
    """For each group of `shape_of(model)`, in the same order, its trainable Parameter objects."""
    return [trainable for _, trainable, _ in _groups(list(model))]


class _Held(NamedTuple):
    layers: tuple[int, ...]
    trainable: list[nn.Parameter]
    frozen: list[nn.Parameter]


def _groups(layers: Sequence[nn.Module]) -> list[_Held]:
    holders: dict[nn.Parameter, list[int]] = {}  # a Parameter hashes by identity
    for l, layer in enumerate(layers):
        for parameter in layer.parameters():
            holders.setdefault(parameter, []).append(l)
    groups = {(l,): _Held((l,), [], []) for l in range(len(layers))}
    for parameter, found in holders.items():
        group = groups.setdefault(tuple(found), _Held(tuple(found), [], []))  # type: ignore[arg-type]
        (group.trainable if parameter.requires_grad else group.frozen).append(parameter)
    return list(groups.values())


def _of_output(loss: Callable[[Any, Any], Tensor], target: Any, output: Any) -> Tensor:
    return loss(output, target)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def profile(
    model: Iterable[nn.Module],
    x: Any,
    y: Any,
    loss: Callable[[Any, Any], Tensor],
    rows: Sequence[int],
    repeats: int = 3,
    threads: int = 1,
    optimizer: OptimizerFactory = torch.optim.SGD,
) -> Profile:
    """Time and weigh each layer of `model` for every number of rows in `rows`, and one step of `optimizer`.

    `x` and `y` are tensors, or tuples of tensors, with at least max(rows) rows; micro-batches of n rows are their
    first n. `loss(output, y)` gives a scalar. Times are medians of `repeats` after one run to warm up, on `threads`
    CPU threads, on the device where the model is. The model is left as it was, with its buffers and gradients, and
    so is the state of the random generators: every layer is measured on a copy.

    Errors: `PlanError` for rows that x or y cannot give, or less than 1 repeat.
    """
    layers = list(model)
    if repeats < 1:
        raise PlanError(f"repeats={repeats}: must be at least 1")
    held = _groups(layers)
    trainable_from = min((min(h.layers) for h in held if h.trainable), default=len(layers))
    device = next((p.device for h in held for p in (*h.trainable, *h.frozen)), torch.device("cpu"))
    costs: dict[int, list[_LayerCost]] = {}
    with _undisturbed(device, threads):
        for n in sorted(set(rows)):
            value, target = _rows(x, n, device), _rows(y, n, device)
            costs[n] = []
            for l, layer in enumerate(layers):
                final = (loss, target) if l == len(layers) - 1 else None
                value, cost = _measure(copy.deepcopy(layer), value, final, l > trainable_from, repeats, device)
                costs[n].append(cost)
        step_seconds, optimizer_bytes = _measure_step([h.trainable for h in held], optimizer, repeats, device)
    return Profile(
        forward={n: tuple(c.forward for c in found) for n, found in costs.items()},
        backward={n: tuple(c.backward for c in found) for n, found in costs.items()},
        output_bytes={n: tuple(c.weights.output for c in found) for n, found in costs.items()},
        grad_output_bytes={n: tuple(c.weights.grad_output for c in found) for n, found in costs.items()},
        saved_bytes={n: tuple(c.weights.saved for c in found) for n, found in costs.items()},
        saves_output=tuple(any(found[l].weights.saves_output for found in costs.values()) for l in range(len(layers))),
        parameter_bytes=tuple(sum(map(_bytes, (*h.trainable, *h.frozen))) for h in held),
        gradient_bytes=tuple(sum(map(_bytes, h.trainable)) for h in held),
        optimizer_bytes=optimizer_bytes,
        step_seconds=step_seconds,
    )


class Weights(NamedTuple):
    """Bytes that a layer's forward leaves: see `Profile` for what each means."""

    output: int
    grad_output: int
    saved: int
    saves_output: bool


class _LayerCost(NamedTuple):
    forward: float
    backward: float
    weights: Weights


def _measure(
    layer: nn.Module, value: Any, final: Final | None, input_gradient: bool, repeats: int, device: torch.device
) -> tuple[Any, _LayerCost]:
    """One layer on one micro-batch: its detached output, and what it cost. `final`: the loss and its targets."""
    loss = partial(_of_output, *final) if final else None
    known = final[1] if final else ()
    output, ends, weights = weigh(layer, detach(value, input_gradient), loss, known)  # warms up the forward, too
    result = detach(output)
    # Gradients of the same size would arrive from the next layer. The first backward allocates the weights' gradients,
    # which the timed ones add to, as all micro-batches but one do.
    ends = [end for end in ends if end.requires_grad]
    gradients = [torch.ones_like(end) for end in ends]
    if ends:
        torch.autograd.backward(ends, gradients)

    forwards, backwards = [], []
    for _ in range(repeats):
        given = detach(value, input_gradient)
        start = _now(device)
        output = layer(map_tensors(given, torch.clone) if overwrites(layer) else given)
        ends = [end for end in ([loss(output)] if loss else differentiable(output)) if end.requires_grad]
        middle = _now(device)
        if ends:
            torch.autograd.backward(ends, gradients)
        backwards.append(_now(device) - middle if ends else 0.0)
        forwards.append(middle - start)
        del output, ends  # freed here, not inside the next forward's time
    return result, _LayerCost(median(forwards), median(backwards), weights)


Loss = Callable[[Any], Tensor]
Final = tuple[Callable[[Any, Any], Tensor], Any]


def weigh(layer: nn.Module, given: Any, loss: Loss | None = None, known: Any = ()) -> tuple[Any, list[Tensor], Weights]:
    """Run a layer's forward, and the loss of its output if given, and weigh what is left.

    `known`: tensors that are kept anyway, such as the loss's targets, and count for nothing. Returns the output, the
    tensors from which a backward starts (the loss, or what can have a gradient), and the bytes.
    """
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.detach())
        return saved[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = layer(map_tensors(given, torch.clone) if overwrites(layer) else given)
        ends = [loss(output)] if loss else differentiable(output)
    given_before = storages([*tensors(given), *tensors(known), *layer.parameters(), *layer.buffers()])
    handed_on = storages(tensors(output)).keys() - given_before.keys()
    kept = {key: size for key, size in storages(saved).items() if key not in given_before}
    weights = Weights(
        count_bytes(output),
        count_bytes([t for t in tensors(output) if t.requires_grad]),
        sum(size for key, size in kept.items() if key not in handed_on),
        not handed_on.isdisjoint(kept),
    )
    return output, ends, weights


def _measure_step(
    groups: list[list[nn.Parameter]], factory: OptimizerFactory, repeats: int, device: torch.device
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
        start = _now(device)
        optimizer.step()
        seconds.append(_now(device) - start)
    state = [
        sum(_bytes(t) for p in group for t in optimizer.state.get(p, {}).values() if isinstance(t, Tensor))
        for group in copies
    ]
    return median(seconds), tuple(state)


@contextmanager
def _undisturbed(device: torch.device, threads: int) -> Iterator[None]:
    """Random generators and the number of threads as they were, whatever happens inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.enable_grad():
            yield
    finally:
        torch.set_num_threads(before)


def _rows(value: Any, n: int, device: torch.device) -> Any:
    have = min((len(t) for t in tensors(value)), default=0)
    if not 1 <= n <= have:
        raise PlanError(f"rows={n}: must be from 1 to {have}, the rows of the data given")
    return map_tensors(value, lambda t: t[:n].to(device))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
