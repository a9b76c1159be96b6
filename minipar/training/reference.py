"""The reference that every strategy must equal: the user's model as it is, the whole batch, one process, no engine.

This file shares nothing with the engine: it imports the standard library, torch and cloudpickle, and runs in a process
of its own (`plainly.py` starts it by this file's path and talks to it). So a mistake of the engine cannot be here as
well, unless somebody makes it twice. It implements again what the engine documents, in the plainest way:

    model     made after torch.manual_seed(seed); converted to `dtype` as `convert` says; in the modes that it has
    step      value = loss(model(x), y); value.backward(); clip; update           x, y: the whole batch
    dropout   nn.Dropout in training mode has other random numbers than torch's: see `Masks`
    draws     torch's generators are seeded before each layer, as the engine seeds them: see `Masks`, too

What gives other numbers than one device (pipelines without flushes, parameter servers, Local SGD) is replayed from a
log of what was done, in the same plain way.
"""

from __future__ import annotations

import _thread
import copy
import gc
import hashlib
import inspect
import io
import math
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import cloudpickle
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

Loss = Callable[[Any, Any], Any]
Batches = Callable[[int], tuple[Any, Any]]
Named = dict[str, Tensor]


@dataclass(frozen=True)
class Reference:
    """What plain torch makes of a job.

    losses       of every step, before its update
    gradients    of every update by parameter name (empty if not kept)
    parameters   after the last step, by name
    buffers      after the last step, by name
    statistics   names of those buffers that are statistics of a batch (running mean and variance of norms in training
                 mode): training with a split batch cannot give the same ones
    seconds      of a step
    moved        how far the elements of each parameter have moved at most, in one step after another (not of a replay)
    remembers    what modules or the optimizer keep between steps that is not saved with them
    eps          the largest relative rounding to which the model narrows its numbers (of a shaken job)
    """

    losses: list[float]
    gradients: list[Named]
    parameters: Named = field(default_factory=dict, repr=False)
    buffers: Named = field(default_factory=dict, repr=False)
    statistics: tuple[str, ...] = ()
    seconds: float = 0.0
    moved: dict[str, float] = field(default_factory=dict, repr=False)
    remembers: tuple[str, ...] = ()
    eps: float = 0.0


# the model ------------------------------------------------------------------------------------------------------------


def build(model: Any, seed: int, dtype: torch.dtype, x: Any = None, evaluate: bool = False) -> nn.Module:
    """The user's model: a module, a list of layers, or a function that makes one of these.

    x          rows, by which lazy modules find their sizes
    evaluate   put it in evaluation mode; else every module has the mode that the user gave it
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        sys.modules["numpy"].random.seed(seed % 2**32)  # (torch has imported it)
        built = model if isinstance(model, (nn.Module, list, tuple)) else model()
        if isinstance(built, (list, tuple, nn.ModuleList)):
            built = nn.Sequential(*built)
        if any(map(nn.parameter.is_lazy, [*built.parameters(), *built.buffers()])):
            modes = {module: module.training for module in built.modules()}
            with torch.no_grad():
                call(built.eval(), every_tensor(x, lambda t: t.float() if t.is_floating_point() else t))
            for module, mode in modes.items():
                module.training = mode
    convert(built, dtype)
    return built.eval() if evaluate else built


def call(model: nn.Module, x: Any) -> Any:
    """The output for rows x: a model with a forward of its own is given them as its arguments."""
    if getattr(type(model), "forward", None) is nn.Sequential.forward or hasattr(model, "edges"):
        return model(x)
    args, named = ((), dict(x)) if isinstance(x, Mapping) else (x if isinstance(x, (tuple, list)) else (x,), {})
    try:
        inspect.signature(model.forward).bind(*args, **named)
    except TypeError:  # (it takes all of it as one argument)
        return model(x)
    except ValueError:  # (what torch.jit has compiled has no signature)
        pass
    return model(*args, **named)


def convert(model: nn.Module, dtype: torch.dtype) -> None:
    """Give the numbers of a model this type, in place, as `number_type` says. A model of mixed types stays as it is."""
    tensors = {id(t): t for t in [*model.parameters(), *model.buffers()] if t.is_floating_point() or t.is_complex()}
    if len({t.real.dtype if t.is_complex() else t.dtype for t in tensors.values()}) > 1:
        return
    converted = {key: tensor.detach().to(number_type(tensor, dtype)) for key, tensor in tensors.items()}
    for parameter in model.parameters():
        if id(parameter) in converted:
            parameter.data = converted[id(parameter)]
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) in converted:
                module._buffers[name] = converted[id(buffer)]


def number_type(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The type of a tensor whose numbers, or the parts of whose complex numbers, become `dtype`; integers stay."""
    if tensor.is_complex():
        return {torch.float32: torch.complex64, torch.float64: torch.complex128}.get(dtype, tensor.dtype)
    return dtype if tensor.is_floating_point() else tensor.dtype


class Masks:
    """Dropout as the engine documents it: whether an element is kept depends on its row and not on how many random
    numbers were drawn before. `step` and `row` (the first one) say what the model is given next.

        key of a row      mix(row * G + number of (seed, name, step))       all in 64 bits, unsigned
        element j of it   mix(key + (j + 1) * G) / 2**64 >= p: kept, and divided by 1 - p

    with G the golden ratio in 64 bits, and mix the last steps of splitmix64. Where a layer has made k rows of each of
    the `rows` that the model was given, they are counted from k times `row` on.

    All other modules draw from the generators of torch, Python or NumPy. Before each layer of the model these are
    seeded with a number that depends on (seed, step, row, number of the layer): see `seed_of`.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self.seed, self.step, self.row, self.rows = seed, 0, 0, 0
        for name, module in model.named_modules():
            if type(module) is nn.Dropout and module.training and module.p > 0:
                module.forward = partial(self._drop, module, getattr(module, "row_name", name))  # type: ignore[method-assign]
        layers = [layer for layer in model._modules.values() if layer is not None]
        self.numbers: dict[int, list[int]] = {}  # id of a module -> the numbers that it has as a layer
        for number, layer in enumerate(layers):
            self.numbers.setdefault(id(layer), []).append(number)
        for layer in {id(layer): layer for layer in layers}.values():
            if isinstance(layer, torch.jit.ScriptModule):  # (which takes no hooks)
                continue
            layer.register_forward_pre_hook(self._enter)
            layer.register_forward_hook(self._leave, always_call=True)
        self.at(0, 0)

    def at(self, step: int, row: int, layer: int = 0, rows: int = 0) -> None:
        """Say what the model is given next: `rows` rows of a step from `row` on. Its layers run from `layer` on."""
        self.step, self.row, self.rows, self.inside = step, row, rows, 0
        self.left = {key: [k for k in numbers if k >= layer] for key, numbers in self.numbers.items()}

    def _enter(self, layer: nn.Module, given: Any) -> None:
        if self.inside == 0 and self.left[id(layer)]:  # (a layer that runs inside of another one is not seeded)
            number = self.seed_of(self.left[id(layer)].pop(0))
            torch.default_generator.manual_seed(number)
            if torch.cuda.is_initialized():  # (torch.manual_seed would store a call for each kind of unused device)
                torch.cuda.manual_seed_all(number)
            random.seed(number)
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(number % 2**32)
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


def statistics_of(model: nn.Module) -> tuple[str, ...]:
    """Names of the buffers that are statistics of a batch: those of norms that keep running ones in training mode."""
    return tuple(
        f"{name}.{key}" if name else key
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.training and module.track_running_stats
        for key, _ in module.named_buffers(recurse=False)
    )


# the data and the loss ------------------------------------------------------------------------------------------------


def reader(data: Any, size: int, dtype: torch.dtype) -> Batches:
    """step -> (x, y), the whole batch: of a data set, of a dict by step, or always the same pair; of the types that
    `number_type` says. All are copies, since a layer or a loss may write into them."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(number_type(tensor, dtype), copy=True)

    def read(step: int) -> tuple[Any, Any]:
        if isinstance(data, dict):
            x, y = data[step]
        else:
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
        return kind(**parts) if hasattr(kind, "__dataclass_fields__") else kind(parts)
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
    """The length of most of its tensors."""
    lengths = [len(tensor) for tensor in tensors_in(value) if tensor.dim()]
    return max(lengths, key=lengths.count, default=0)


def rows_in(value: Any, rows: range, count: int) -> Any:
    """These of so many rows; a tensor of another length, such as a mask of tokens, has none, and is whole."""

    def part(tensor: Tensor) -> Tensor:
        return tensor[rows.start : rows.stop] if tensor.dim() and len(tensor) == count else tensor

    return every_tensor(value, part)


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


def loss_in(output: Any, y: Any) -> Tensor:
    """The loss that a model made itself: what it gives, its `loss`, or the only single number in it."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if found is None:
        (found,) = [t for t in tensors_in(output) if not t.dim() and t.is_floating_point()]
    return found.reshape(())


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


class Job(NamedTuple):
    """What is trained, and how. The model is changed in place.

    model            an nn.Module, such as `build` makes
    batches          step -> (x, y), the whole batch, such as `reader` makes
    clip             scale the gradient of every update down to this norm
    first            the number of the first step
    report           called with every step that is done
    keep_gradients   of every update, as it was given to the optimizer
    by_name          the optimizer is made of pairs (name, parameter), else of parameters
    scheduler        makes a scheduler of it, which steps once after each update
    schedule         the scheduler's saved state (class, state, settings of the groups), used if it has the same class
    states           the optimizer's saved states: name of a parameter -> state -> value
    given            of each update the gradients that somebody else has found: after its own ones were kept, they are
                     what the optimizer is given, so that each step begins where that of the other began
    """

    model: nn.Module
    batches: Batches
    loss: Loss
    optimizer: Any
    seed: int = 0
    clip: float | None = None
    first: int = 0
    report: Callable[[int], None] = lambda step: None
    keep_gradients: bool = True
    by_name: bool = False
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    schedule: Mapping[str, Any] | None = None
    states: Mapping[str, Mapping[str, Any]] = {}
    given: Sequence[Named] = ()


class Update:
    """The job's optimizer and scheduler of some parameters. delay: how many updates old their gradients are."""

    def __init__(self, job: Job, named: Mapping[str, nn.Parameter], delay: int | None = None) -> None:
        self.trained = named.values()  # (also those that the optimizer does not update)
        self.optimizer: torch.optim.Optimizer = job.optimizer(list(named.items() if job.by_name else named.values()))
        if delay is not None and hasattr(job.optimizer, "slow"):  # (it has lower learning rates for old gradients)
            job.optimizer.slow(self.optimizer, delay)
        self.scheduler = None if job.scheduler is None else job.scheduler(self.optimizer)
        if job.schedule is not None and self.scheduler is not None:
            kind = type(self.scheduler)
            if job.schedule["class"] == f"{kind.__module__}.{kind.__qualname__}":
                for group, settings in zip(self.optimizer.param_groups, job.schedule["settings"], strict=True):
                    group.update(settings)
                self.scheduler.load_state_dict(job.schedule["state"])
        for name in job.states.keys() & named.keys():
            self.optimizer.state[named[name]] = {
                key: value.clone() if isinstance(value, Tensor) else value for key, value in job.states[name].items()
            }

    def step(self) -> None:
        """One update, after which there are no gradients."""
        self.optimizer.step()
        for p in self.trained:
            p.grad = None
        if self.scheduler is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # (torch warns if the optimizer has not stepped yet)
                self.scheduler.step()


# plain training -------------------------------------------------------------------------------------------------------


def train_plainly(job: Job, steps: int, inference: bool = False) -> Reference:
    """Train for so many steps, as anyone would without minipar. inference: only compute the losses."""
    model, masks = job.model, Masks(job.model, job.seed)
    names = {} if inference else {name: p for name, p in model.named_parameters() if p.requires_grad}
    update = Update(job, names) if names else None
    losses: list[float] = []
    gradients: list[Named] = []
    moved = dict.fromkeys(names, 0.0)
    before = memory_of(model, update)
    start = time.perf_counter()
    for k, step in enumerate(range(job.first, job.first + steps)):
        x, y = job.batches(step)
        masks.at(step, 0)
        with torch.set_grad_enabled(not inference):
            value = mean_of(job.loss(call(model, x), y))
        if names and value.requires_grad:  # (after a detach nothing is trained)
            value.backward()
            if job.clip is not None:
                torch.nn.utils.clip_grad_norm_(names.values(), job.clip)
        losses.append(value.item())
        if job.keep_gradients:
            gradients.append({n: torch.zeros_like(p) if p.grad is None else _dense(p.grad) for n, p in names.items()})
        for name, p in names.items() if job.given else ():
            if p.grad is not None and not p.grad.is_sparse:
                p.grad.copy_(job.given[k][name])
        there = {name: p.detach().clone() for name, p in names.items()} if job.keep_gradients else {}
        if update:
            update.step()
        moved.update((n, max(moved[n], _largest(names[n].detach() - old))) for n, old in there.items())
        job.report(step - job.first)
    seconds, now = (time.perf_counter() - start) / steps, memory_of(model, update)
    changed = tuple(name for name in now if now[name] != before.get(name))
    return _result(job, losses, gradients, seconds=seconds, moved=moved, remembers=changed)


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient.clone()


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


def _result(job: Job, losses: list[float], gradients: list[Named], **more: Any) -> Reference:
    parameters = {name: p.detach().clone() for name, p in job.model.named_parameters()}
    buffers = {name: b.detach().clone() for name, b in job.model.named_buffers()}
    return Reference(losses, gradients, parameters, buffers, statistics_of(job.model), **more)


def memory_of(model: nn.Module, update: Update | None) -> dict[str, bytes]:
    """What modules and the optimizer have beside what is saved, as bytes: other ones say that it has changed."""
    usual = {*vars(nn.Module()), "forward", "state", "param_groups", "defaults", "step"}
    owners = [*model.named_modules(), *([] if update is None else [("optimizer", update.optimizer)])]
    found = {}
    for name, owner in owners:
        for key, value in vars(owner).items():
            if key not in usual and not key.startswith(("_opt", "_zero", "_warned")):  # (torch's own)
                with suppress(Exception):  # (what cannot be pickled cannot be told apart)
                    found[f"{name}.{key}"] = cloudpickle.dumps(value)
    return found


def shake(model: nn.Module, by: float) -> None:
    """Change all trainable parameters by up to this part of themselves, as their rounding does."""
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.mul_(1 + by * (2 * torch.rand(p.shape, generator=draws, dtype=p.real.dtype) - 1))


class Roundings(TorchDispatchMode):
    """Sees to which types a model narrows its numbers: some compute in float32, whatever their parameters are."""

    eps = 0.0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # (else torch would import its compiler)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given, made = (
            [torch.finfo(t.dtype).eps for t in tensors_in(some) if t.is_floating_point()] for some in (args, found)
        )
        if given and max(made, default=0.0) > min(given):
            self.eps = max(self.eps, *made)
        return found


_TORCH = frozenset(vars(nn.Module()))  # attributes of every module


# the replay of a log --------------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """One thing that was done; the same as `recorded_order.Entry`, which documents it."""

    rank: int
    what: str
    microbatch: int
    version: int


class Order(NamedTuple):
    """A log of what was done; the same as `recorded_order.RecordedOrder`, which documents it."""

    entries: Sequence[Entry]
    layers: Sequence[Sequence[int]] = ()
    microbatches: int = 1
    every: int | None = None
    delays: Sequence[int] = ()
    replicas: int = 1
    local: bool = False
    served: bool = False


class _Owner:
    """Who updates parameters: a stage, or a replica that has its own.

    named      the parameters that it trains
    versions   copies of them
    sums       the gradients of the next update, by the rank that has added them up
    weights    how much the rows of these gradients weigh
    whole      how much all rows of a mean weigh
    """

    def __init__(self, named: dict[str, nn.Parameter], update: Update | None) -> None:
        self.named, self.optimizer, self.whole = named, update, 0.0
        self.versions: dict[int, Named] = {}
        self.sums: dict[int, Named] = {}
        self.weights: dict[int, float] = {}
        self.keep(0)

    def keep(self, version: int) -> None:
        """Copy the parameters as they are now."""
        self.versions[version] = {name: p.detach().clone() for name, p in self.named.items()}


class Replay:
    """Training by a log, entry by entry, and by nothing else. Every version of the parameters is a copy, and every
    forward has leaves of its own.

    order                an `Order`, or its fields
    outputs, arrived     the values and gradients that ranks are given, by (rank, micro-batch)
    """

    def __init__(self, job: Job, order: Sequence[Any]) -> None:
        log, model = Order(*order), job.model
        self.job, self.masks = job, Masks(model, job.seed)
        self.log = log = log._replace(entries=[Entry(*entry) for entry in log.entries])
        layers = [layer for layer in model._modules.values() if layer is not None]
        if log.layers and getattr(type(model), "forward", None) is not nn.Sequential.forward:
            raise ValueError(
                "stages with versions of their own are replayed one by one; that takes a model of layers, such as an "
                f"nn.Sequential, and {type(model).__name__} has a forward of its own"
            )
        self.stages: list[nn.Module] = [nn.Sequential(*(layers[k] for k in held)) for held in log.layers] or [model]
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        full = {id(p): name for name, p in self.trained.items()}
        self.places = [  # of each stage: where its modules have a parameter, and the model's name of that
            [(own, k, full[id(p)]) for m in stage.modules() for own in _holders(m)
             for k, p in (own.items() if isinstance(own, dict) else enumerate(own)) if id(p) in full]
            for stage in self.stages
        ]  # fmt: skip
        self.owners: list[_Owner] = []
        for replica in range(log.replicas if log.local else 1):
            whole = copy.deepcopy(self.trained) if replica else self.trained
            for places, delay in zip_longest(self.places, log.delays):
                update = Update(job, whole, delay) if places else None  # (of the whole model, as it was made)
                self.owners.append(_Owner({name: whole[name] for _, _, name in places}, update))
        self.outputs: dict[tuple[int, int], Any] = {}
        self.arrived: dict[tuple[int, int], list[Tensor | None]] = {}
        self.graphs: dict[tuple[int, int], tuple[Any, list[Tensor], Named, float, float]] = {}
        count = 1 + max((entry.microbatch for entry in log.entries), default=-1)
        self.losses = [0.0] * (-(-count // log.microbatches) if log.every is None else count)
        self.came = [(0.0, 0.0)] * len(self.losses)  # how much the rows of each loss weigh: those that came, and all
        self.gradients: list[Named] = []
        self.buffers = {0: [module._buffers for module in model.modules()]}  # of each replica, which has its own
        self.began = copy.deepcopy(self.buffers[0])

    def train(self) -> Reference:
        """Do what the log says. ValueError if it uses what does not exist."""
        log = self.log
        last = {(id(self.owner(e)), e.version): k for k, e in enumerate(log.entries)}  # when a version is used last
        for k, entry in enumerate(log.entries):
            getattr(self, entry.what)(entry)
            owner = self.owner(entry)
            for version in [v for v in owner.versions if v != max(owner.versions)]:
                if last.get((id(owner), version), -1) <= k:
                    del owner.versions[version]
            if entry.what == "forward" and entry.rank == 0 and (entry.microbatch + 1) % log.microbatches == 0:
                self.job.report(entry.microbatch // log.microbatches)
        self.use_buffers(0)
        if log.every is None:  # (a mean is over the rows that came)
            for k, (came, whole) in enumerate(self.came):
                self.losses[k] *= whole / came if came else 1.0
        return _result(self.job, self.losses, self.gradients if self.job.keep_gradients else [])

    def owner(self, entry: Entry) -> _Owner:
        return self.owners[entry.rank if self.log.local else entry.rank % len(self.stages)]

    def use_buffers(self, replica: int) -> None:
        if replica not in self.buffers:
            self.buffers[replica] = copy.deepcopy(self.began)
        for module, own in zip(self.job.model.modules(), self.buffers[replica], strict=True):
            module._buffers = own

    def give(self, stage: int, tensors: Mapping[str, Any]) -> None:
        """Let the modules of a stage have these tensors as parameters."""
        for own, key, name in self.places[stage]:
            own[key] = tensors[name]

    def rows(self, entry: Entry) -> tuple[Any, Any, range, float, float]:
        """x, y and rows of a replica's micro-batch, how much these weigh, and how much all rows of the mean do."""
        m, every, replica = self.log.microbatches, self.log.every, entry.rank // len(self.stages)
        x, y = self.job.batches(self.job.first + entry.microbatch // m)
        count = row_count(y)
        rows = split_evenly(count, m * self.log.replicas)[m * replica + entry.microbatch % m]
        target = rows_in(y, rows, count)
        weight, whole = weight_of(target, self.job.loss), weight_of(y, self.job.loss)
        if every is not None:  # micro-batches weigh alike
            weight, whole = float(weight != 0), float(every * self.log.replicas)
        return rows_in(x, rows, count), target, rows, weight, whole

    def forward(self, entry: Entry) -> None:
        stage, key = entry.rank % len(self.stages), (entry.rank, entry.microbatch)
        x, y, rows, weight, whole = self.rows(entry)
        leaves = {}
        for name, value in _existing(self.owner(entry).versions, entry.version, entry).items():
            leaves[name] = value.clone().requires_grad_()
            for hook in (self.trained[name]._backward_hooks or {}).values():
                leaves[name].register_hook(hook)
            for hook in (self.trained[name]._post_accumulate_grad_hooks or {}).values():
                leaves[name].register_post_accumulate_grad_hook(hook)
        given = every_tensor(
            _existing(self.outputs, key, entry) if stage else x,
            lambda t: t.detach().requires_grad_(stage > 0 and (t.is_floating_point() or t.is_complex())),
        )
        value = every_tensor(given, torch.clone)  # (a layer may work in place)
        ends: list[Tensor] = []
        if rows:
            self.use_buffers(entry.rank // len(self.stages))
            step = entry.microbatch // self.log.microbatches
            self.masks.at(self.job.first + step, rows.start, self.log.layers[stage][0] if stage else 0, len(rows))
            self.give(stage, leaves)
            value = call(self.stages[stage], value)
            self.give(stage, self.trained)
            ends = _smooth(value)
            if stage == len(self.stages) - 1:
                if weight:
                    ends = [mean_of(self.job.loss(value, y)) * (weight / whole)]
                else:
                    ends = [torch.stack([t.sum() for t in ends]).sum() * 0]
                k = step if self.log.every is None else entry.microbatch
                self.losses[k] += ends[0].item() * (self.log.every or 1)
                self.came[k] = self.came[k][0] + weight, whole
        self.graphs[key] = given, ends, leaves, weight, whole
        if stage < len(self.stages) - 1:
            self.outputs[entry.rank + 1, entry.microbatch] = value

    def backward(self, entry: Entry) -> None:
        stage, key, owner = entry.rank % len(self.stages), (entry.rank, entry.microbatch), self.owner(entry)
        given, ends, leaves, weight, whole = _existing(self.graphs, key, entry)
        arrived = [None] * len(ends) if stage == len(self.stages) - 1 else _existing(self.arrived, key, entry)
        for name, value in _existing(owner.versions, entry.version, entry).items():
            leaves[name].data.copy_(value)  # (it may be another version than the forward's)
        wanted = _smooth(given) if stage else []
        # (a micro-batch without rows has no graph)
        read = zip(ends, arrived, strict=True) if ends else ()
        pairs = [(end, g) for end, g in read if end.requires_grad and (g is not None or stage == len(self.stages) - 1)]
        sources = [*(t for t in wanted if t.requires_grad), *leaves.values()]
        found: list[Tensor | None] = [None] * len(sources)
        if pairs and sources:
            starts, gradients = zip(*pairs, strict=True)
            self.give(stage, leaves)  # (a layer may run forward again)
            for t in sources:
                t.grad = None
            torch.autograd.backward(starts, gradients)  # (a reentrant checkpoint does not go through autograd.grad)
            found = [t.grad for t in sources]
            self.give(stage, self.trained)
        if stage:
            self.arrived[entry.rank - 1, entry.microbatch] = found[: len(wanted)]
        sums = owner.sums.setdefault(entry.rank, {})
        for name, g in zip(leaves, found[len(wanted) :], strict=True):
            if g is not None:
                sums[name] = sums[name] + g if name in sums else g
        owner.weights[entry.rank] = owner.weights.get(entry.rank, 0.0) + weight
        owner.whole = whole
        for done in (self.graphs, self.outputs, self.arrived):
            done.pop(key, None)

    def update(self, entry: Entry) -> None:
        owner = self.owner(entry)
        weight, whole = sum(owner.weights.values()), owner.whole
        mean = self.log.every is None  # the rows of a step have one mean loss
        idle = self.log.local and not any(owner.sums.values())  # (a replica without rows has a gradient of zeros)
        for name, p in owner.named.items():
            found = [sums[name] for sums in owner.sums.values() if name in sums]
            came = whole / weight if mean and found and weight not in (0, whole) else 1.0
            p.grad = torch.stack(found).sum(0) * came if found else torch.zeros_like(p) if idle else None
        if self.job.clip is not None:
            torch.nn.utils.clip_grad_norm_(owner.named.values(), self.job.clip)
        if self.log.served:
            self.gradients += [_all_of(owner, sums) for sums in owner.sums.values()]
        else:
            self.gradients += [{} for _ in range(entry.version - len(self.gradients))]
            kept = self.gradients[entry.version - 1]
            for name, g in _all_of(owner, {n: p.grad for n, p in owner.named.items() if p.grad is not None}).items():
                part = g * (weight / whole) if self.log.local and whole else g.clone()
                kept[name] = kept[name] + part if name in kept else part
            for name, p in owner.named.items() if self.job.given else ():
                if p.grad is not None:
                    p.grad.copy_(self.job.given[entry.version - 1][name])
        if owner.optimizer is not None:
            owner.optimizer.step()
        owner.sums, owner.weights = {}, {}
        owner.keep(entry.version)

    def drop(self, entry: Entry) -> None:
        owner = self.owner(entry)
        self.gradients.append(_all_of(owner, owner.sums.pop(entry.rank)))
        del owner.weights[entry.rank]

    def average(self, entry: Entry) -> None:
        """Give all replicas their mean."""
        for name in self.owners[0].named:
            mean = torch.stack([owner.named[name].detach() for owner in self.owners]).sum(0) / len(self.owners)
            for owner in self.owners:
                owner.named[name].data.copy_(mean)
        for owner in self.owners:
            owner.keep(entry.version)


def _holders(module: nn.Module) -> list[Any]:
    """What may hold parameters of a module: its own table, and lists and dicts among its attributes. (LSTM has one.)"""
    return [
        module._parameters,
        *(v for k, v in vars(module).items() if isinstance(v, (list, dict)) and k not in _TORCH),
    ]


def _existing(found: Mapping[Any, Any], key: Any, entry: Entry) -> Any:
    if key not in found:
        raise ValueError(f"the order cannot be: {entry} uses what does not exist then")
    return found[key]


def _smooth(value: Any) -> list[Tensor]:
    return [t for t in tensors_in(value) if t.is_floating_point() or t.is_complex()]


def _all_of(owner: _Owner, gradients: Mapping[str, Tensor]) -> Named:
    """Gradients of all its parameters: zeros for those that have none."""
    return {name: gradients[name] if name in gradients else torch.zeros_like(p) for name, p in owner.named.items()}


# a saved run ----------------------------------------------------------------------------------------------------------


def go_on(saved: Mapping[str, Mapping[str, Tensor]], model: nn.Module) -> None:
    """Put the parameters and buffers of a saved run into a model."""
    parameters = dict(model.named_parameters())
    for name, value in [*saved["parameters"].items(), *saved["buffers"].items()]:
        target = parameters[name] if name in parameters else model.get_buffer(name)
        with torch.no_grad():
            # (A run in bfloat16 saves rounded values. If the model's own value rounds to the saved one, it is kept.)
            if target.dtype == value.dtype or not torch.equal(target.to(value.dtype), value):
                target.copy_(value)


# errors ---------------------------------------------------------------------------------------------------------------


def gradient_error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """max |g - g1| over all elements / max |g1| over all parameters: 0 is perfect.

    It is infinite if one of the two has a gradient that the other does not have, or if shapes differ, or if a number is
    not finite. A tensor without elements is not compared. If every g1 is 0, the error is max |g|.
    """
    if {name: t.shape for name, t in found.items()} != {name: t.shape for name, t in expected.items()}:
        return math.inf
    worst = largest = 0.0
    for name, other in expected.items():
        mine, g = found[name].detach().cpu(), other.detach().cpu()
        if not (torch.isfinite(mine).all() and torch.isfinite(g).all()):
            return math.inf
        if g.numel():
            wide = torch.complex128 if g.is_complex() or mine.is_complex() else torch.float64
            largest = max(largest, g.to(wide).abs().max().item())
            worst = max(worst, (mine.to(wide) - g.to(wide)).abs().max().item())
    return worst / largest if largest else worst


# the process ----------------------------------------------------------------------------------------------------------
# The driver sends jobs, one after another; each answer is any number of ("report", step), and then ("result", bytes) or
# ("error", ...). A message is of plain values; the user's objects and tensors are saved inside of it, as bytes.


def run(task: Mapping[str, Any], report: Callable[[int], None] = lambda step: None) -> Reference:
    """Run one job.

    model, data, batch, dtype   as the user gave them
    evaluate    the model is put in evaluation mode
    saved       parameters, buffers and states of a saved run, or None
    shaken      how much the parameters are changed before: see `shake`
    work        arguments of `train_plainly`, or the fields of an `Order`
    job         further fields of the `Job`
    """
    batches = reader(task["data"], task["batch"], task["dtype"])
    model = build(task["model"], task["job"]["seed"], task["dtype"], batches(task["job"]["first"])[0], task["evaluate"])
    saved = task["saved"] or {"parameters": {}, "buffers": {}, "states": {}}
    go_on(saved, model)
    given = {**task["job"], "loss": task["job"]["loss"] or loss_in}
    job = Job(model=model, batches=batches, report=report, states=saved["states"], **given)
    if task["shaken"]:
        shake(model, task["shaken"])
    with Roundings() if task["shaken"] else nullcontext() as seen:
        plain = isinstance(task["work"], dict)
        found = train_plainly(job, **task["work"]) if plain else Replay(job, task["work"]).train()
    return found if seen is None else replace(found, eps=seen.eps)


def _answer(connection: Connection, job: Mapping[str, Any]) -> tuple[Any, ...]:
    """Do one job; what is sent of its result or its error."""
    try:
        sys.path[:] = job["path"]
        os.chdir(job["folder"])
        os.environ.clear()
        os.environ.update(job["environment"])
        torch.set_num_threads(job["threads"])
        torch.set_default_dtype(torch.float32)  # (the model of an earlier job may have left others)
        torch.set_default_device(None)
        torch.set_deterministic_debug_mode(0)
        random.seed(0)
        task = torch.load(io.BytesIO(job["task"]), map_location="cpu", weights_only=False)
        found = run(task, lambda step: connection.send(("report", step)))
        result = io.BytesIO()
        torch.save(vars(found), result)
        return "result", result.getvalue()
    except (Exception, SystemExit) as error:
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        if isinstance(error, SystemExit):
            error = RuntimeError(f"sys.exit({error.code!r}) was called; return instead")
        data: bytes | None = None
        with suppress(Exception):  # (without it the driver still has the error's name and text)
            data = cloudpickle.dumps(error)
        return "error", type(error).__name__, str(error), text, data


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
    connection = Connection(descriptor)
    gc.freeze()  # so that garbage collections after every job skip torch's own objects
    connection.send(("ready",))
    with suppress(EOFError, OSError):
        while True:
            connection.send(_answer(connection, connection.recv()))
            gc.collect()
            gc.freeze()  # (also the modules that the job imported)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
