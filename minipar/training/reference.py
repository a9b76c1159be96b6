"""The reference that every strategy must equal: the user's model as it is, the whole batch, one process, no engine.

This file shares nothing with the engine: it imports the standard library, torch and cloudpickle, and runs in a process
of its own (`plainly.py` starts it by this file's path and talks to it). So a mistake of the engine cannot be here as
well, unless somebody makes it twice. It implements again what the engine documents, in the plainest way:

    model     made after torch.manual_seed(seed); converted to `dtype` as `convert` says; in the modes that it has
    step      value = loss(model(x), y); value.backward(); clip; update           x, y: the whole batch
    dropout   nn.Dropout in training mode has other random numbers than torch's: see `Masks`; `replaced` lists these
    draws     torch's generators are seeded before each layer, as the engine seeds them: see `Masks`, too

Besides the synchronous step there are plain loops for strategies that give other numbers than one device: Local SGD, a
recorded order of an asynchronous pipeline, one of parameter servers, and one of servers of such pipelines.
"""

from __future__ import annotations

import _thread
import copy
import ctypes
import gc
import hashlib
import math
import os
import pickle
import random
import signal
import socket
import struct
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import cloudpickle
import torch
from torch import Tensor, nn

Loss = Callable[[Any, Any], Any]
Factory = Callable[[Any], torch.optim.Optimizer]
Batches = Callable[[int], tuple[Any, Any]]
Begin = Callable[[nn.Module, "torch.optim.Optimizer | None"], None]


@dataclass(frozen=True)
class Reference:
    """What plain torch makes of a job.

    losses       of every step, before its update
    gradients    of every update by parameter name (empty if not kept)
    parameters   after the last step, by name
    buffers      after the last step, by name
    statistics   names of those buffers that are statistics of a batch (running mean and variance of norms in training
                 mode): training with a split batch cannot give the same ones
    replaced     names of the modules whose random numbers were replaced by those that the engine draws
    seconds      of a step
    """

    losses: list[float]
    gradients: list[dict[str, Tensor]]
    parameters: dict[str, Tensor] = field(default_factory=dict, repr=False)
    buffers: dict[str, Tensor] = field(default_factory=dict, repr=False)
    statistics: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    seconds: float = 0.0


# the model ------------------------------------------------------------------------------------------------------------


def build(model: Any, seed: int, dtype: torch.dtype, evaluate: bool = False) -> nn.Module:
    """The user's model: a module, a list of layers, or a function that makes one of these.

    evaluate   put it in evaluation mode; else every module has the mode that the user gave it
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = model if isinstance(model, (nn.Module, list, tuple)) else model()
    if isinstance(made, (list, tuple, nn.ModuleList)):
        made = nn.Sequential(*made)
    convert(made, dtype)
    return made.eval() if evaluate else made


def convert(model: nn.Module, dtype: torch.dtype) -> None:
    """Give the numbers of a model this type, in place: floating ones become `dtype`, complex ones the complex type
    whose parts are of `dtype`; integers and truth values stay. A model that mixes types is left as it is."""
    tensors = {id(t): t for t in [*model.parameters(), *model.buffers()] if t.is_floating_point() or t.is_complex()}
    if len({_part_type(t.dtype) for t in tensors.values()}) > 1:
        return
    complexes = {torch.float32: torch.complex64, torch.float64: torch.complex128}
    made: dict[int, Tensor] = {}
    for key, tensor in tensors.items():
        target = complexes.get(dtype, tensor.dtype) if tensor.is_complex() else dtype
        made[key] = tensor.detach().to(target)
    for parameter in model.parameters():
        if id(parameter) in made:
            parameter.data = made[id(parameter)]
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) in made:
                module._buffers[name] = made[id(buffer)]


def _part_type(dtype: torch.dtype) -> torch.dtype:
    return {torch.complex64: torch.float32, torch.complex128: torch.float64, torch.complex32: torch.float16}.get(
        dtype, dtype
    )


class Masks:
    """Dropout as the engine documents it: whether an element is kept depends on its row and not on how many random
    numbers were drawn before. `step` and `row` (the first one) say what the model is given next.

        key of a row      mix(row * G + number of (seed, name, step))       all in 64 bits, unsigned
        element j of it   mix(key + (j + 1) * G) / 2**64 >= p: kept, and divided by 1 - p

    with G the golden ratio in 64 bits, and mix the last steps of splitmix64. Where a layer has made k rows of each of
    the `rows` that the model was given, they are counted from k times `row` on.

    All other modules draw from torch's generators. Before each layer of the model these are seeded with a number that
    depends on (seed, step, row, number of the layer): see `seed_of`.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self.seed, self.step, self.row, self.rows = seed, 0, 0, 0
        self.names: list[str] = []
        for name, module in model.named_modules():
            if type(module) is nn.Dropout and module.training and module.p > 0:
                self.names.append(name)
                module.forward = partial(self._drop, module, name)  # type: ignore[method-assign]
        layers = [layer for layer in model._modules.values() if layer is not None]
        self.numbers: dict[int, list[int]] = {}  # id of a module -> the numbers that it has as a layer
        for number, layer in enumerate(layers):
            self.numbers.setdefault(id(layer), []).append(number)
        for layer in {id(layer): layer for layer in layers}.values():
            layer.register_forward_pre_hook(self._enter)
            layer.register_forward_hook(self._leave, always_call=True)
        self.at(0, 0)

    def at(self, step: int, row: int, layer: int = 0, rows: int = 0) -> None:
        """Say what the model is given next: `rows` rows of a step from `row` on. Its layers run from `layer` on."""
        self.step, self.row, self.rows, self.inside = step, row, rows, 0
        self.left = {key: [k for k in numbers if k >= layer] for key, numbers in self.numbers.items()}

    def _enter(self, layer: nn.Module, given: Any) -> None:
        if self.inside == 0 and self.left[id(layer)]:  # (a layer that runs inside of another one is not seeded)
            reseed(self.seed_of(self.left[id(layer)].pop(0)))
        self.inside += 1

    def _leave(self, layer: nn.Module, given: Any, result: Any) -> None:
        self.inside -= 1

    def seed_of(self, layer: int) -> int:
        """What torch's generators are seeded with before a layer runs."""
        words = "draws", self.seed, self.step, self.row, layer, 0  # (the last one is the first token)
        digest = hashlib.blake2b("\0".join(map(str, words)).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % 2**63

    def _drop(self, module: nn.Dropout, name: str, x: Tensor) -> Tensor:
        if not module.training:
            return x
        if module.p == 1:
            return x * 0
        text = f"{self.seed}\0{name}\0{self.step}".encode()
        start = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        golden = 0x9E3779B97F4A7C15
        first = self.row * (len(x) // self.rows if self.rows and len(x) % self.rows == 0 else 1)
        keys = torch.tensor([_signed((first + r) * golden + start) for r in range(len(x))], dtype=torch.int64)
        elements = torch.arange(1, x[:1].numel() + 1) * _signed(golden)
        bits = _shift(_mix(_mix(keys)[:, None] + elements[None, :]), 11)  # 53 bits, as in a double's mantissa
        kept = bits.to(torch.float64) / 2**53 >= module.p
        return x * (kept.view(x.shape).to(x.device, x.dtype) / (1 - module.p))


def reseed(number: int) -> None:
    """As torch.manual_seed. For a kind of device that nobody has used that stores the call, and a stack with it, each
    time; so here only the devices in use are seeded."""
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)


def _signed(number: int) -> int:
    number %= 1 << 64
    return number - (1 << 64) if number >> 63 else number


def _shift(numbers: Tensor, by: int) -> Tensor:
    """The 64 bits of each number shifted to the right; zeros come in from the left."""
    return torch.bitwise_and(torch.bitwise_right_shift(numbers, by), (1 << (64 - by)) - 1)


def _mix(numbers: Tensor) -> Tensor:
    numbers = torch.bitwise_xor(numbers, _shift(numbers, 30)) * _signed(0xBF58476D1CE4E5B9)
    numbers = torch.bitwise_xor(numbers, _shift(numbers, 27)) * _signed(0x94D049BB133111EB)
    return torch.bitwise_xor(numbers, _shift(numbers, 31))


def statistics_of(model: nn.Module) -> list[str]:
    """Names of the buffers that are statistics of a batch: those of norms that keep running ones in training mode."""
    kinds = nn.modules.batchnorm._NormBase
    return [
        f"{name}.{key}" if name else key
        for name, module in model.named_modules()
        if isinstance(module, kinds) and module.training and module.track_running_stats
        for key, _ in module.named_buffers(recurse=False)
    ]


# the data and the loss ------------------------------------------------------------------------------------------------


def reader(data: Any, size: int, dtype: torch.dtype) -> Batches:
    """step -> (x, y), the whole batch: of a data set, or always the same pair. Floating numbers become `dtype`, complex
    ones the matching type. All are copies, since a layer or a loss may write into them."""
    complexes = {torch.float32: torch.complex64, torch.float64: torch.complex128}

    def cast(tensor: Tensor) -> Tensor:
        if tensor.is_complex():
            return tensor.to(complexes.get(dtype, tensor.dtype), copy=True)
        return tensor.to(dtype if tensor.is_floating_point() else tensor.dtype, copy=True)

    def read(step: int) -> tuple[Any, Any]:
        x, y = data if isinstance(data, tuple) else data.batch(step, size)
        return every_tensor(x, cast), every_tensor(y, cast)

    return read


def every_tensor(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same value with every tensor inside tuples, lists and dicts changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        parts = {key: every_tensor(part, change) for key, part in value.items()}
        kind: Any = type(value)
        if kind is dict:
            return parts
        by_field: bool = hasattr(kind, "__dataclass_fields__")
        return kind(**parts) if by_field else kind(parts)
    if isinstance(value, (tuple, list)):
        found = [every_tensor(part, change) for part in value]
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors inside tuples, lists and dicts, in order."""
    found: list[Tensor] = []
    every_tensor(value, found.append)
    return found


def row_count(value: Any) -> int:
    return next((len(tensor) for tensor in tensors_in(value)), 0)


def rows_in(value: Any, rows: range) -> Any:
    return every_tensor(value, lambda tensor: tensor[rows.start : rows.stop])


def split_evenly(count: int, parts: int) -> list[range]:
    """Divide so many rows into so many parts, as equal as possible, the larger ones first."""
    sizes = [count // parts + (k < count % parts) for k in range(parts)]
    return [range(sum(sizes[:k]), sum(sizes[: k + 1])) for k in range(parts)]


def mean_of(value: Any) -> Tensor:
    """The mean that a loss gives: the value itself, or the quotient of (sum, count)."""
    found = value[0] / value[1] if isinstance(value, tuple) else value
    if not isinstance(found, Tensor):
        raise TypeError(f"the loss gave a {type(found).__name__}; it must be a scalar tensor, or (sum, count)")
    return found


def setting(loss: Any, name: str, default: Any = None) -> Any:
    """An option of a loss: a keyword of a partial, or an attribute of a loss module."""
    while isinstance(loss, partial):
        if name in loss.keywords:
            return loss.keywords[name]
        loss = loss.func
    return getattr(loss, name, default)


def weight_of(y: Any, loss: Loss) -> float:
    """How much these targets count in a mean: `loss.count(y)` if there is one. Else, for targets of whole numbers, the
    number that are not `ignore_index`, each with its class's weight. Else the number of rows."""
    count = setting(loss, "count")
    if callable(count):
        return float(count(y))
    first = next(iter(tensors_in(y)), None)
    if first is None or first.is_floating_point() or first.is_complex():
        return row_count(y)
    counted = first[first != setting(loss, "ignore_index", -100)]
    by_class = setting(loss, "weight")
    return float(len(counted)) if by_class is None else by_class[counted.to(by_class.device)].sum().item()


# the update -----------------------------------------------------------------------------------------------------------


class How(NamedTuple):
    """How the user's optimizer and scheduler are made.

    by_name     it is made of pairs (name, parameter), else of parameters
    scheduler   makes a scheduler of it, which steps once after each update
    saved       the scheduler's saved state (class, state, settings of the groups), used if it has the same class
    """

    by_name: bool = False
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    saved: Mapping[str, Any] | None = None


PLAIN = How()


class Update:
    """The user's optimizer and scheduler of some parameters. late: their gradients are so many updates old."""

    def __init__(self, optimizer: Any, how: How, named: Mapping[str, nn.Parameter], late: int | None = None) -> None:
        self.optimizer: torch.optim.Optimizer = optimizer(list(named.items() if how.by_name else named.values()))
        if late is not None and hasattr(optimizer, "slow"):  # (it has lower learning rates for late gradients)
            optimizer.slow(self.optimizer, late)
        self.scheduler = None if how.scheduler is None else how.scheduler(self.optimizer)
        if how.saved is not None and self.scheduler is not None:
            kind = type(self.scheduler)
            if how.saved["class"] == f"{kind.__module__}.{kind.__qualname__}":
                for group, settings in zip(self.optimizer.param_groups, how.saved["settings"], strict=True):
                    group.update(settings)
                self.scheduler.load_state_dict(how.saved["state"])

    def step(self, changes: bool = True) -> None:
        """One update, after which there are no gradients; without `changes` only the scheduler steps."""
        if changes:
            self.optimizer.step()
        self.optimizer.zero_grad()
        if self.scheduler is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # (torch warns if the optimizer has not stepped yet)
                self.scheduler.step()


# plain loops ----------------------------------------------------------------------------------------------------------


def train_plainly(
    model: nn.Module,
    batches: Batches,
    loss: Loss,
    optimizer: Factory,
    steps: int,
    seed: int = 0,
    keep_gradients: bool = True,
    report: Callable[[int], None] = lambda step: None,
    clip: float | None = None,
    first: int = 0,
    begin: Begin = lambda model, optimizer: None,
    inference: bool = False,
    how: How = PLAIN,
) -> Reference:
    """Train `model` for `steps` steps, as anyone would without minipar. The model is changed in place.

    clip        scale gradients down to this norm; those that are kept are scaled
    first       the number of the first step
    begin       called before it with model and optimizer, to restore a saved run
    inference   only compute the losses, and train nothing
    """
    masks = Masks(model, seed)
    statistics = statistics_of(model)
    names = {} if inference else {name: p for name, p in model.named_parameters() if p.requires_grad}
    update = Update(optimizer, how, names) if names else None
    begin(model, update.optimizer if update else None)
    losses: list[float] = []
    gradients: list[dict[str, Tensor]] = []
    start = time.perf_counter()
    for step in range(first, first + steps):
        x, y = batches(step)
        masks.at(step, 0)
        with torch.set_grad_enabled(not inference):
            value = mean_of(loss(model(x), y))
        if names and value.requires_grad:  # (after a detach nothing is trained)
            value.backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(names.values(), clip)
        losses.append(value.item())
        if keep_gradients:
            gradients.append(
                {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in names.items()}
            )
        if update:
            update.step()
        report(step - first)
    seconds = (time.perf_counter() - start) / steps
    return replace(_result(losses, gradients, model, masks, statistics), seconds=seconds)


def _result(
    losses: list[float],
    gradients: list[dict[str, Tensor]],
    model: nn.Module,
    masks: Masks,
    statistics: list[str],
) -> Reference:
    return Reference(
        losses,
        gradients,
        {name: p.detach().clone() for name, p in model.named_parameters()},
        {name: b.detach().clone() for name, b in model.named_buffers()},
        tuple(statistics),
        tuple(masks.names),
    )


def train_locally(
    model: nn.Module,
    batches: Batches,
    loss: Loss,
    optimizer: Factory,
    steps: int,
    replicas: int,
    microbatches: int,
    every: int,
    seed: int = 0,
    keep_gradients: bool = True,
    clip: float | None = None,
    report: Callable[[int], None] = lambda step: None,
    first: int = 0,
    begin: Begin = lambda model, optimizer: None,
    how: How = PLAIN,
    again: Callable[[], nn.Module] | None = None,
) -> Reference:
    """`train_plainly` for Local SGD: copies of the model, each with its optimizer and its rows, are averaged after
    every `every` steps and after the last one, weighted by their rows. The losses and gradients of a step are averages,
    too. Buffers are those of the first copy.

    clip    each copy scales its own gradient down to this norm
    again   makes the model once more (a copy would lack the hooks of its parameters)
    """
    copies = [model, *(again() if again else copy.deepcopy(model) for _ in range(replicas - 1))]
    masks = [Masks(each, seed) for each in copies]
    statistics = statistics_of(model)
    named = [{name: p for name, p in each.named_parameters() if p.requires_grad} for each in copies]
    updates = [Update(optimizer, how, names) for names in named]
    for each, update in zip(copies, updates, strict=True):
        begin(each, update.optimizer)
    losses: list[float] = []
    kept: list[dict[str, Tensor]] = []
    weights = [0.0] * replicas
    start = time.perf_counter()
    for step in range(first, first + steps):
        x, y = batches(step)
        rows = split_evenly(row_count(x), replicas * microbatches)
        whole = weight_of(y, loss)
        total, gradients = 0.0, {name: torch.zeros_like(p) for name, p in named[0].items()}
        for r, each in enumerate(copies):
            mine = range(rows[r * microbatches].start, rows[(r + 1) * microbatches - 1].stop)
            own = rows_in(y, mine)
            weight = weight_of(own, loss) if mine else 0.0
            if weight:
                masks[r].at(step, mine.start, rows=len(mine))
                value = mean_of(loss(each(rows_in(x, mine)), own))
                value.backward()
                if clip is not None:
                    torch.nn.utils.clip_grad_norm_(named[r].values(), clip)
                total += value.item() * weight / whole
                weights[r] += weight
                for name, p in named[r].items():
                    gradients[name] += 0 if p.grad is None else p.grad * (weight / whole)
            updates[r].step(changes=bool(weight))
        losses.append(total)
        if keep_gradients:
            kept.append(gradients)
        if (step - first + 1) % every == 0 or step == first + steps - 1:
            average(named, weights)
            weights = [0.0] * replicas
        report(step - first)
    seconds = (time.perf_counter() - start) / steps
    return replace(_result(losses, kept, model, masks[0], statistics), seconds=seconds)


def average(named: Sequence[Mapping[str, nn.Parameter]], weights: Sequence[float]) -> None:
    """Give the parameters of all copies their mean with these weights; if all are 0, the copies weigh alike."""
    shares = [w / sum(weights) if sum(weights) else 1 / len(weights) for w in weights]
    for name in named[0]:
        mean = torch.stack([w * names[name].detach() for w, names in zip(shares, named, strict=True)]).sum(0)
        for names in named:
            names[name].data.copy_(mean)


# a recorded order of an asynchronous pipeline -------------------------------------------------------------------------

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"


class ImpossibleOrder(Exception):
    """A recorded order is impossible: it uses something that does not exist."""


class Entry(NamedTuple):
    """One thing that a rank did: `what` with micro-batch `microbatch` (counted over the run); an update has none.

    version   of the rank's parameters: the one that a forward or backward used, or that an update made
    """

    what: str
    microbatch: int
    version: int


class Order(NamedTuple):
    """What every rank did, in its order; the same as `recorded_order.Order`, which documents it."""

    ranks: Sequence[Sequence[Entry]]
    layers: Sequence[Sequence[int]]
    microbatches: int
    every: int | None
    delays: Sequence[int]
    replicas: int = 1
    local: int = 0


def replay_order(
    model: nn.Module,
    batches: Batches,
    loss: Loss,
    optimizer: Factory,
    order: Order,
    seed: int = 0,
    keep_gradients: bool = True,
    report: Callable[[int], None] = lambda step: None,
    first: int = 0,
    begin: Begin = lambda model, optimizer: None,
    how: How = PLAIN,
    again: Callable[[], nn.Module] | None = None,
) -> Reference:
    """Train by a recorded order, and by nothing else: every version of the parameters is a copy, and every forward has
    its own leaves of the graph. Replicas that train alone are copies of the model, averaged as the order says, weighted
    by their rows if a step has one mean loss; losses, gradients and buffers are then as those of `train_locally`.
    Raises ImpossibleOrder.

    again   makes the model once more (a copy would lack the hooks of its parameters)
    """
    order = order._replace(ranks=[[Entry(*entry) for entry in row] for row in order.ranks])
    apart = range(order.replicas) if order.local else range(1)
    models = [model, *(again() if again else copy.deepcopy(model) for _ in apart[1:])]
    statistics = statistics_of(model)
    runs = []
    for r, each in zip(apart, models, strict=True):
        replicas = range(r, r + 1) if order.local else range(order.replicas)
        runs.append(_Ordered(each, batches, loss, optimizer, how, order, Masks(each, seed), first, replicas))
        _begin(runs[-1], each, begin)
    start, done, moved = time.perf_counter(), 0, True
    places = [0] * len(order.ranks)
    while moved:
        moved = False
        for r, row in enumerate(order.ranks):
            while places[r] < len(row) and runs[0].ready(r, row[places[r]]):
                entry = row[places[r]]
                for run in runs:
                    run.do(r, entry, places[r])
                if entry.what == UPDATE and order.local:
                    _average_versions(runs, r, entry.version)
                places[r] += 1
                moved = True
                if r == 0 and entry.what == FORWARD and (entry.microbatch + 1) % order.microbatches == 0:
                    report(entry.microbatch // order.microbatches)
                    done += 1
    for r, row in enumerate(order.ranks):
        if places[r] < len(row):
            raise ImpossibleOrder(f"the order cannot be: rank {r} waits for ever before {row[places[r]]}")
    losses = [sum(run.part(k) * run.losses[k] for run in runs) for k in range(len(runs[0].losses))]
    kept = [_mean_of(runs, k) for k in range(len(runs[0].gradients))] if keep_gradients else []
    found = _result(losses, kept, model, runs[0].masks, statistics)
    return replace(found, seconds=(time.perf_counter() - start) / max(1, done))


def _begin(run: _Ordered, model: nn.Module, begin: Begin) -> None:
    """Let the ranks of a replay begin with what a saved run had, if there is one."""
    for rank in run.ranks:
        if rank.update is not None:
            begin(model, rank.update.optimizer)
            rank.versions[0] = _copies(rank.named)


def _average_versions(runs: Sequence[_Ordered], r: int, version: int) -> None:
    """Average what an update of replicas that train alone has made, if it is due."""
    order, ranks = runs[0].order, [run.ranks[r] for run in runs]
    if version % order.local and version < max(entry.version for entry in order.ranks[r] if entry.what == UPDATE):
        return
    steps = range((version - 1) // order.local * order.local, version)
    average([rank.named for rank in ranks], [sum(map(run.weight, steps)) for run in runs])
    for rank in ranks:
        rank.versions[version] = _copies(rank.named)


def _mean_of(runs: Sequence[_Ordered], update: int) -> dict[str, Tensor]:
    """The gradient of an update, over replicas that train alone."""
    parts = [run.part(update) for run in runs]
    return {
        name: torch.stack([p * run.gradients[update][name] for p, run in zip(parts, runs, strict=True)]).sum(0)
        for name in runs[0].gradients[update]
    }


def _copies(named: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in named.items()}


def _smooth(value: Any) -> list[Tensor]:
    return [t for t in tensors_in(value) if t.is_floating_point() or t.is_complex()]


class _Rank:
    """What one rank has: its layers, the parameters that it trains by name, versions of them, and sums of gradients.

    Its optimizer is one of the whole model, as the user made it; only its own parameters have gradients when it steps.
    """

    def __init__(
        self,
        layers: list[nn.Module],
        names: dict[int, str],
        whole: dict[str, nn.Parameter],
        optimizer: Factory,
        how: How,
        delay: int,
    ) -> None:
        self.layers = nn.Sequential(*layers)
        self.named = {names[id(p)]: p for p in self.layers.parameters() if p.requires_grad}
        self.own = {name: names[id(p)] for name, p in self.layers.named_parameters(remove_duplicate=False)
                    if p.requires_grad}  # fmt: skip
        self.update = Update(optimizer, how, whole, delay) if self.named else None
        self.versions: dict[int, dict[str, Tensor]] = {0: _copies(self.named)}
        self.sums: dict[str, Tensor] = {}


class _Ordered:
    """The state of a replay by these replicas, whose gradients are added up. `outputs` and `arrived` are the values and
    gradients that ranks are given."""

    def __init__(
        self,
        model: nn.Module,
        batches: Batches,
        loss: Loss,
        optimizer: Factory,
        how: How,
        order: Order,
        masks: Masks,
        first: int,
        replicas: range,
    ) -> None:
        self.batches, self.loss, self.order, self.masks, self.first = batches, loss, order, masks, first
        self.replicas = replicas
        self._weights: dict[int, tuple[float, float]] = {}  # of steps: of these replicas, of all
        names = {id(p): name for name, p in model.named_parameters()}
        layers = [layer for layer in model._modules.values() if layer is not None]
        whole = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.ranks = [
            _Rank([layers[k] for k in held], names, whole, optimizer, how, delay)
            for held, delay in zip(order.layers, order.delays, strict=True)
        ]
        self.outputs: dict[tuple[int, int, int], Any] = {}  # keys: rank, micro-batch, replica
        self.arrived: dict[tuple[int, int, int], list[Tensor | None]] = {}
        self.graphs: dict[tuple[int, int, int], tuple[Any, list[Tensor], dict[str, Tensor]]] = {}
        count = 1 + max((e.microbatch for row in order.ranks for e in row), default=-1)
        self.losses = [0.0] * (count // order.microbatches if order.every is None else count)
        self.gradients: list[dict[str, Tensor]] = []
        self.last = [{e.version: k for k, e in enumerate(row)} for row in order.ranks]  # when a version is used last

    def ready(self, r: int, entry: Entry) -> bool:
        if entry.what == FORWARD:
            return r == 0 or (r, entry.microbatch, self.replicas[0]) in self.outputs
        if entry.what == BACKWARD:
            there = (r, entry.microbatch, self.replicas[0]) in self.graphs
            return there and (r == len(self.ranks) - 1 or (r, entry.microbatch, self.replicas[0]) in self.arrived)
        return True

    def do(self, r: int, entry: Entry, place: int) -> None:
        rank = self.ranks[r]
        if entry.what == UPDATE:
            self.step(r, entry.version)
        for replica in self.replicas:  # (one after another, as if there were one of them)
            if entry.what == FORWARD:
                self.forward(r, entry, replica)
            elif entry.what == BACKWARD:
                self.backward(r, entry, replica)
        newest = max(rank.versions)
        for version in [v for v in rank.versions if v != newest and self.last[r].get(v, -1) <= place]:
            del rank.versions[version]

    def version(self, r: int, entry: Entry) -> dict[str, Tensor]:
        if entry.version not in self.ranks[r].versions:
            raise ImpossibleOrder(f"the order cannot be: rank {r} has no version {entry.version} for {entry}")
        return self.ranks[r].versions[entry.version]

    def rows(self, i: int, replica: int) -> tuple[Any, Any, range, float]:
        """x, y and rows of a replica's micro-batch, and the weight of its own mean."""
        m, every = self.order.microbatches, self.order.every
        x, y = self.batches(self.first + i // m)
        rows = split_evenly(row_count(x), m * self.order.replicas)[m * replica + i % m]
        target = rows_in(y, rows)
        mine = weight_of(target, self.loss)
        share = (mine / self.weight(i // m) if every is None else 1 / (every * len(self.replicas))) if mine else 0.0
        return rows_in(x, rows), target, rows, share

    def weight(self, step: int) -> float:
        """How much these replicas weigh in a step: as their rows do, or alike, where micro-batches have own means."""
        return self.weights(step)[0]

    def part(self, step: int) -> float:
        """The part of these replicas in the weight of all."""
        own, whole = self.weights(step)
        return own / whole if own else 0.0

    def weights(self, step: int) -> tuple[float, float]:
        if self.order.every is not None:
            return float(len(self.replicas)), float(self.order.replicas)
        if step not in self._weights:
            m = self.order.microbatches
            x, y = self.batches(self.first + step)
            parts = split_evenly(row_count(x), m * self.order.replicas)
            mine = range(parts[m * self.replicas.start].start, parts[m * self.replicas.stop - 1].stop)
            self._weights[step] = weight_of(rows_in(y, mine), self.loss), weight_of(y, self.loss)
        return self._weights[step]

    def forward(self, r: int, entry: Entry, replica: int) -> None:
        i, rank = entry.microbatch, self.ranks[r]
        x, y, rows, share = self.rows(i, replica)
        leaves = {name: t.clone().requires_grad_() for name, t in self.version(r, entry).items()}
        given = every_tensor(
            x if r == 0 else self.outputs.pop((r, i, replica)),
            lambda t: t.detach().requires_grad_(r > 0 and (t.is_floating_point() or t.is_complex())),
        )
        value = every_tensor(given, torch.clone)  # (a layer may work in place)
        ends: list[Tensor] = []
        if rows:
            self.masks.at(self.first + i // self.order.microbatches, rows.start, self.order.layers[r][0], len(rows))
            own = {name: leaves[names] for name, names in rank.own.items()}
            value = torch.func.functional_call(rank.layers, own, (value,))
            ends = _smooth(value)
            if r == len(self.ranks) - 1:
                nothing = torch.stack([t.sum() for t in ends]).sum() * 0
                ends = [mean_of(self.loss(value, y)) * share if share else nothing]
                k = i if self.order.every is not None else i // self.order.microbatches
                self.losses[k] += ends[0].item() * (self.order.every or 1)
        self.graphs[r, i, replica] = given, ends, leaves
        self.outputs[r + 1, i, replica] = value

    def backward(self, r: int, entry: Entry, replica: int) -> None:
        i, rank = entry.microbatch, self.ranks[r]
        given, ends, leaves = self.graphs.pop((r, i, replica))
        for name, leaf in leaves.items():  # (the version that this backward uses may be another than the forward's)
            leaf.data.copy_(self.version(r, entry)[name])
        wanted = _smooth(given) if r else []
        arrived = self.arrived.pop((r, i, replica), [None] * len(ends))
        # (a micro-batch without rows has no graph)
        pairs = [(end, g) for end, g in zip(ends, arrived, strict=True) if end.requires_grad] if ends else []
        sources = [*(t for t in wanted if t.requires_grad), *leaves.values()]
        found: list[Tensor | None] = [None] * len(sources)
        if pairs and sources:
            starts, gradients = zip(*pairs, strict=True)
            found = list(torch.autograd.grad(starts, sources, gradients, allow_unused=True))
        if r:
            self.arrived[r - 1, i, replica] = [torch.zeros_like(t) if g is None else g
                                               for t, g in zip(wanted, found, strict=False)]  # fmt: skip
        for name, g in zip(leaves, found[len(wanted) :], strict=True):
            if g is not None:
                rank.sums[name] = rank.sums[name] + g if name in rank.sums else g

    def step(self, r: int, version: int) -> None:
        rank = self.ranks[r]
        while len(self.gradients) < version:
            self.gradients.append({})
        for name, p in rank.named.items():
            p.grad = rank.sums.get(name)
            self.gradients[version - 1][name] = torch.zeros_like(p) if p.grad is None else p.grad.clone()
        if rank.update is not None:
            rank.update.step()
        rank.sums = {}
        rank.versions[version] = _copies(rank.named)


# a recorded order of parameter servers --------------------------------------------------------------------------------


def replay_stages(
    model: nn.Module,
    batches: Batches,
    loss: Loss,
    optimizer: Factory,
    order: Order,
    events: Sequence[tuple[Any, ...]],
    seed: int = 0,
    keep_gradients: bool = True,
    first: int = 0,
    begin: Begin = lambda model, optimizer: None,
    how: How = PLAIN,
    again: Callable[[], nn.Module] | None = None,
) -> Reference:
    """Train replicas that are asynchronous pipelines in the recorded order of the servers, which answer and update each
    stage by itself:

        ("answer", replica, stage, step)   the stage's parameters are version `step` of this replica from now on
        ("arrive", replica, stage, step)   the gradient of the replica's update `step` of this stage goes into the next
                                           update of the stage
        ("apply", stage)                   an update of the stage, with what has arrived since the last one

    Between two events every replica goes on in its order, as far as its versions are there. The newest parameters are
    those of the first model. Gradients are in the order in which they arrived, each weighed as its replica's rows are.
    Raises ImpossibleOrder.
    """
    order = order._replace(ranks=[[Entry(*entry) for entry in row] for row in order.ranks])
    models = [model, *(again() if again else copy.deepcopy(model) for _ in range(1, order.replicas))]
    statistics = statistics_of(model)
    runs = []
    for r, each in enumerate(models):
        one = range(r, r + 1)
        runs.append(_Pushing(each, batches, loss, optimizer, how, order, Masks(each, seed), first, one))
        _begin(runs[-1], each, begin)
    stages = runs[0].ranks
    for run in runs:
        for rank in run.ranks:
            rank.versions.clear()
    places = [[0] * len(stages) for _ in runs]
    arrived: list[dict[str, Tensor]] = []
    taken: list[tuple[float, dict[str, Tensor]]] = []  # what part of all rows it is of, and its gradient of these rows
    for what, *rest in events:
        if what == "answer":
            replica, stage, version = rest
            runs[replica].ranks[stage].versions[version] = _copies(stages[stage].named)
            runs[replica].go_on(places[replica])
        elif what == "arrive":
            replica, stage, step = rest
            if (stage, step) not in runs[replica].pushed:
                raise ImpossibleOrder(f"the order cannot be: replica {replica} has not done update {step} of {stage}")
            found, part = runs[replica].pushed.pop((stage, step)), runs[replica].part(step)
            taken.append((part, found))
            named = stages[stage].named.items()
            arrived.append({name: part * found[name] if name in found else torch.zeros_like(p) for name, p in named})
        else:
            (stage,) = rest
            weight = sum(part for part, _ in taken) or 1.0
            for name, p in stages[stage].named.items():
                here = [part / weight * found[name] for part, found in taken if name in found]
                p.grad = torch.stack(here).sum(0) if here else None
            update = stages[stage].update
            if update is not None:
                update.step()
            taken = []
    for mine in places:
        for r, row in enumerate(order.ranks):
            if mine[r] < len(row):
                raise ImpossibleOrder(f"the order cannot be: rank {r} waits for ever before {row[mine[r]]}")
    losses = [sum(run.part(k) * run.losses[k] for run in runs) for k in range(len(runs[0].losses))]
    return _result(losses, arrived if keep_gradients else [], model, runs[0].masks, statistics)


class _Pushing(_Ordered):
    """A replica whose versions come from servers, to which it pushes what it would update with."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.pushed: dict[tuple[int, int], dict[str, Tensor]] = {}  # by rank and update

    def ready(self, r: int, entry: Entry) -> bool:
        return (entry.what == UPDATE or entry.version in self.ranks[r].versions) and super().ready(r, entry)

    def step(self, r: int, version: int) -> None:
        self.pushed[r, version - 1], self.ranks[r].sums = self.ranks[r].sums, {}

    def go_on(self, places: list[int]) -> None:
        """Do what is ready, from these places on."""
        moved = True
        while moved:
            moved = False
            for r, row in enumerate(self.order.ranks):
                while places[r] < len(row) and self.ready(r, row[places[r]]):
                    self.do(r, row[places[r]], places[r])
                    places[r] += 1
                    moved = True


def replay_service(
    model: nn.Module,
    batches: Batches,
    loss: Loss,
    optimizer: Factory,
    events: Sequence[tuple[Any, ...]],
    steps: int,
    workers: int,
    microbatches: int,
    seed: int = 0,
    clip: float | None = None,
    how: How = PLAIN,
    first: int = 0,
    begin: Begin = lambda model, optimizer: None,
) -> Reference:
    """Train in the recorded order of the servers, one event after another:

        ("answer", worker, step)          a worker got the current parameters, and did this step with them
        ("arrive", worker, step, taken)   its gradient arrived, and is part of the next update if it was taken
        ("apply",)                        an update, with the gradients that were taken since the last one

    There is a loss for each step; gradients are in the order in which they arrived.
    """
    masks, statistics = Masks(model, seed), statistics_of(model)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    update = Update(optimizer, how, named)
    begin(model, update.optimizer)
    there: dict[tuple[int, int], _Done] = {}
    arrived: list[_Done] = []
    taking: list[_Done] = []
    buffers: dict[int, dict[str, Tensor]] = {}  # of each worker, which has its own
    began, current = _buffers(model), 0
    for what, *rest in events:
        if what == "answer":
            worker, step = rest
            buffers[current], current = _buffers(model), worker
            _set_buffers(model, buffers.get(worker, began))
            there[worker, step] = _worker_step(
                model, batches, loss, named, masks, worker, first + step, workers, microbatches
            )
        elif what == "arrive":
            worker, step, taken = rest
            arrived.append(there.pop((worker, step)))
            if taken:
                taking.append(arrived[-1])
        else:
            weight, whole = sum(done.weight for done in taking), taking[0].whole
            for name, p in named.items():
                p.grad = None
                if any(name in done.used for done in taking):
                    p.grad = torch.stack([done.gradients[name] for done in taking]).sum(0)
                if p.grad is not None and 0 < weight != whole:  # the mean is over the rows whose gradients came
                    p.grad *= whole / weight
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(named.values(), clip)
            update.step()
            taking = []
    buffers[current] = _buffers(model)
    _set_buffers(model, buffers[0])
    losses = []
    for s in range(steps):
        here = [done for done in arrived if done.step == first + s]
        weight, value = sum(done.weight for done in here), sum(done.loss for done in here)
        losses.append(value * (here[0].whole / weight) if weight and weight != here[0].whole else value)
    return _result(losses, [done.gradients for done in arrived], model, masks, statistics)


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: b.detach().clone() for name, b in model.named_buffers()}


def _set_buffers(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    for name, b in model.named_buffers():
        b.data.copy_(values[name])


class _Done(NamedTuple):
    """A worker's step: its share of the mean loss and its gradient, what its rows weigh, and those of all workers."""

    step: int
    loss: float
    weight: float
    whole: float
    gradients: dict[str, Tensor]
    used: frozenset[str] = frozenset()  # the parameters that have a gradient


def _worker_step(
    model: nn.Module,
    batches: Batches,
    loss: Loss,
    named: dict[str, nn.Parameter],
    masks: Masks,
    worker: int,
    step: int,
    workers: int,
    microbatches: int,
) -> _Done:
    x, y = batches(step)
    parts = split_evenly(row_count(x), workers * microbatches)[worker * microbatches : (worker + 1) * microbatches]
    mine = range(parts[0].start, parts[-1].stop)  # (the division into micro-batches changes nothing)
    target = rows_in(y, mine)
    whole, weight = weight_of(y, loss), weight_of(target, loss)
    if not weight:
        return _Done(step, 0.0, 0.0, whole, {name: torch.zeros_like(p) for name, p in named.items()})
    masks.at(step, mine.start, rows=len(mine))
    value = mean_of(loss(model(rows_in(x, mine)), target)) * (weight / whole)
    found = torch.autograd.grad(value, list(named.values()), allow_unused=True) if value.requires_grad else ()
    gradients = {name: torch.zeros_like(p) for name, p in named.items()}
    there = {name: g for name, g in zip(named, found, strict=False) if g is not None}
    return _Done(step, value.item(), weight, whole, gradients | there, frozenset(there))


# a saved run ----------------------------------------------------------------------------------------------------------

Saved = Mapping[str, Any]  # "parameters", "buffers": name -> tensor; "states": name -> {state of its optimizer: value}


def go_on(saved: Saved, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Put a saved run's parameters, buffers and optimizer states into a model and its optimizer."""
    parameters = dict(model.named_parameters())
    for name, value in [*saved["parameters"].items(), *saved["buffers"].items()]:
        target = parameters[name] if name in parameters else model.get_buffer(name)
        with torch.no_grad():
            # (A run in bfloat16 saves rounded values. If the model's own value rounds to the saved one, it is kept.)
            if target.dtype == value.dtype or not torch.equal(target.to(value.dtype), value):
                target.copy_(value)
    if optimizer is None:
        return
    of = {id(p): name for name, p in parameters.items()}
    for group in optimizer.param_groups:
        for p in group["params"]:
            states = saved["states"].get(of[id(p)], {})
            if states:
                optimizer.state[p] = {key: value.clone() if isinstance(value, Tensor) else value
                                      for key, value in states.items()}  # fmt: skip


# errors ---------------------------------------------------------------------------------------------------------------


def gradient_error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """max |g - g1| over all elements / max |g1| over all parameters: 0 is perfect.

    It is infinite if one of the two has a gradient that the other does not have, or if shapes differ, or if a number is
    not finite. A tensor without elements is not compared. If every g1 is 0, the error is max |g|.
    """
    if found.keys() != expected.keys():
        return math.inf
    worst = largest = 0.0
    for name, other in expected.items():
        mine, g = found[name].detach().cpu(), other.detach().cpu()
        if mine.shape != g.shape:
            return math.inf
        if g.numel() == 0:
            continue
        if not (torch.isfinite(mine).all() and torch.isfinite(g).all()):
            return math.inf
        wide = torch.complex128 if g.is_complex() or mine.is_complex() else torch.float64
        largest = max(largest, g.to(wide).abs().max().item())
        worst = max(worst, (mine.to(wide) - g.to(wide)).abs().max().item())
    return worst / largest if largest else worst


# the process ----------------------------------------------------------------------------------------------------------
# The driver sends jobs, one after another; each answer is any number of ("report", step), and then ("result", ...) or
# ("error", ...). Every message is its length and a pickle of plain values; the user's objects are pickled inside of it.

_LENGTH = struct.Struct("!Q")


def send(sock: socket.socket, message: Any) -> None:
    """Write one message. OSError when the other end is gone."""
    data = pickle.dumps(message, protocol=5)
    sock.sendall(_LENGTH.pack(len(data)))
    sock.sendall(data)


def receive(sock: socket.socket) -> Any:
    """Read one message. EOFError when the other end is gone."""
    return pickle.loads(_read(sock, _LENGTH.unpack(_read(sock, _LENGTH.size))[0]))


def _read(sock: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        count = sock.recv_into(view[done:])
        if not count:
            raise EOFError
        done += count
    return data


def packed(named: Mapping[str, Tensor]) -> dict[str, Any]:
    """Tensors by name as plain data: (dtype, shape, bytes)."""
    found = {}
    for name, tensor in named.items():
        plain = tensor.detach().cpu().contiguous()
        size = plain.numel() * plain.element_size()
        data = ctypes.string_at(plain.data_ptr(), size) if size else b""
        found[name] = (str(plain.dtype).removeprefix("torch."), tuple(plain.shape), data)
    return found


def unpacked(named: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors that `packed` was given."""
    found = {}
    for name, (dtype, shape, data) in named.items():
        kind: torch.dtype = getattr(torch, dtype)
        found[name] = (torch.frombuffer(bytearray(data), dtype=kind) if data else torch.empty(0, dtype=kind)).view(
            shape
        )
    return found


def run(task: Mapping[str, Any], report: Callable[[int], None] = lambda step: None) -> Reference:
    """Run one job.

    kind        plain, local, order, service or stages: which of the loops above
    model, data, batch, loss, optimizer, seed, dtype      as the user gave them
    evaluate    the model is put in evaluation mode
    by_name, scheduler, schedule   as in `How`
    saved       what a saved run had, or None
    options     further arguments of the loop
    """
    model = build(task["model"], task["seed"], task["dtype"], task["evaluate"])
    batches = reader(task["data"], task["batch"], task["dtype"])
    options = dict(task["options"])
    options["how"] = How(task["by_name"], task["scheduler"], task["schedule"])
    if task["kind"] not in ("service", "stages"):
        options["report"] = report
    if task["saved"] is not None:
        options["begin"] = partial(go_on, task["saved"])
    if (
        task["kind"] in ("local", "order", "stages")
        and callable(task["model"])
        and not isinstance(task["model"], nn.Module)
    ):
        options["again"] = partial(build, task["model"], task["seed"], task["dtype"], task["evaluate"])
    if task["kind"] in ("order", "stages"):
        options["order"] = Order(*options["order"])
    loops: dict[str, Callable[..., Reference]] = {
        "plain": train_plainly,
        "local": train_locally,
        "order": replay_order,
        "service": replay_service,
        "stages": replay_stages,
    }
    return loops[task["kind"]](model, batches, task["loss"], task["optimizer"], seed=task["seed"], **options)


def _answer(sock: socket.socket, job: Mapping[str, Any]) -> None:
    """Do one job, and send its result or its error."""
    try:
        sys.path[:] = job["path"]
        os.chdir(job["folder"])
        os.environ.clear()
        os.environ.update(job["environment"])
        torch.set_num_threads(job["threads"])
        random.seed(0)
        found = run(cloudpickle.loads(job["task"]), lambda step: send(sock, ("report", step)))
        plain = {name: getattr(found, name) for name in ("losses", "statistics", "replaced", "seconds")}
        plain["gradients"] = [packed(one) for one in found.gradients]
        plain |= {name: packed(getattr(found, name)) for name in ("parameters", "buffers")}
        send(sock, ("result", plain))
    except OSError as error:
        if isinstance(error, ConnectionError):
            raise
        _tell(sock, error)
    except Exception as error:
        _tell(sock, error)
    except SystemExit as error:
        _tell(sock, RuntimeError(f"sys.exit({error.code!r}) was called; return instead"))


def _tell(sock: socket.socket, error: Exception) -> None:
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    data: bytes | None = None
    with suppress(Exception):  # (without it the driver still has the error's name and text)
        data = cloudpickle.dumps(error)
    send(sock, ("error", type(error).__name__, str(error), text, data))


def main(descriptor: int) -> None:
    """Serve jobs until the driver is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver kills this process instead

    def watch() -> None:
        """End this process when standard input closes: the driver holds its other end, and has ended then."""
        with suppress(OSError):
            while os.read(0, 1):
                pass
        os._exit(0)

    _thread.start_new_thread(watch, ())  # (threading's own start may wait for ever where memory is limited)
    sock = socket.socket(fileno=descriptor)
    gc.freeze()  # so that garbage collections after every job skip torch's own objects
    send(sock, ("ready",))
    with suppress(EOFError, ConnectionError):
        while True:
            _answer(sock, receive(sock))
            gc.collect()
            gc.freeze()  # (also the modules that the job imported)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
