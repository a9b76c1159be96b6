"""Randomness as a function of the seed, the step, the rows and the layer, never of the order of calls.

`nn.Dropout` draws from a generator in the order of calls. So it is replaced by one that draws for each row of the whole
batch separately. Then every split of the batch has the same dropout: it does not matter which rank computes a row, and
in which micro-batch.

    row r of layer "3.drop"  ->  64-bit key  ->  element j is kept if hash(key, j) is at least p

Everything else that draws (`torch.rand_like`, `F.dropout`, dropout inside an attention) uses torch's generators. These
are seeded by `draw_seed` before each layer runs: a layer that runs again on the same micro-batch draws the same
numbers. Other micro-batches have other first rows and draw other numbers, so the result depends on how the batch is
split. So are the global generators of Python and NumPy, for layers whose code names them.
"""

from __future__ import annotations

import hashlib
import math
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from minipar.errors import PlanError, RankError
from minipar.models.network import edges_of
from minipar.models.reached import reached
from minipar.models.tensors import (
    EMPTIED,
    SHADOW,
    copied,
    count_rows,
    items_of,
    map_tensors,
    rebuilt,
    take_rows,
    tensors,
)
from minipar.program.edges import wiring

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # the 64-bit golden ratio, as a signed number
_MIX1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX2 = 0x94D049BB133111EB - (1 << 64)


def hash64(*words: object) -> int:
    """A signed 64-bit number from any words; the same words give the same number in every process."""
    digest = hashlib.blake2b("\0".join(map(str, words)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def draw_seed(seed: int, step: int, first_row: int, layer: int, first_token: int = 0) -> int:
    """The number that torch's generators are seeded with before a layer runs forward, also in a recomputation.

    seed, step    the run's seed, and its step, from 0
    first_row     the first row of the micro-batch, counted in the whole batch
    layer         the layer's number in the model, from 0; a module that is used as two layers has two numbers
    first_token   for a slice of sequences, its first token

    The number is a BLAKE2b hash of 8 bytes, read as a little-endian number without its highest bit. The text that is
    hashed is the word `draws` and then the decimal numbers `seed`, `step`, `first_row`, `layer` and `first_token`, with
    a zero byte between each two. In Python:

        text = "\\0".join(["draws", *map(str, (seed, step, first_row, layer, first_token))])
        int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") % 2**63

    Python's `random` is seeded with this number, and `numpy.random` with it modulo 2**32.
    """
    return hash64("draws", seed, step, first_row, layer, first_token) % (1 << 63)


def generators(device: torch.device) -> list[torch.Generator]:
    """The generators that a layer on this device draws from, unless it has its own: those of the CPU and of the
    device."""
    if device.type != "cuda":
        return [torch.default_generator]
    torch.cuda.init()
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


def reseed(sources: Iterable[torch.Generator], number: int) -> None:
    """Seed generators with the same number."""
    for source in sources:
        source.manual_seed(number)


def dice_of(layer: nn.Module) -> list[Any]:
    """The generators of Python and NumPy that a layer's code or attributes reach: global ones, and its own."""
    elsewhere = lambda one: EMPTIED in getattr(one, "__dict__", ())  # noqa: E731  (modules that other layers call)
    found = [g for _, g in reached(layer, "layer", elsewhere)]
    numpy = sys.modules.get("numpy")
    kinds = (random.Random,) if numpy is None else (random.Random, numpy.random.RandomState, numpy.random.Generator)
    return [g for g in found if isinstance(g, kinds) and not isinstance(g, random.SystemRandom)]


def is_global(generator: Any) -> bool:
    """Whether it is the one that functions of `random` or of `numpy.random` draw from."""
    numpy = sys.modules.get("numpy")
    return generator is random._inst or (numpy is not None and generator is numpy.random.mtrand._rand)


def state_of(generator: Any) -> Any:
    """The state of a generator of torch, Python or NumPy."""
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def restore(generator: Any, state: Any) -> None:
    """Give a generator a state that it had."""
    if hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


@contextmanager
def rolled(dice: Sequence[Any], number: int) -> Iterator[None]:
    """In the block the global generators of Python and NumPy are seeded with a number; then they are as before."""
    states = [state_of(one) for one in dice]
    for one in dice:
        one.seed(number if isinstance(one, random.Random) else number % (1 << 32))
    try:
        yield
    finally:
        for one, state in zip(dice, states, strict=True):
            restore(one, state)


@contextmanager
def initial(seed: int) -> Iterator[None]:
    """In the block a model is made: the global generators of torch, Python and NumPy begin with its seed."""
    with torch.random.fork_rng(devices=[]), rolled([random._inst, sys.modules["numpy"].random.mtrand._rand], seed):
        torch.manual_seed(seed)
        yield


@contextmanager
def untouched(sources: Sequence[torch.Generator]) -> Iterator[None]:
    """After the block the generators have the same state as before it."""
    states = [source.get_state() for source in sources]
    try:
        yield
    finally:
        for source, state in zip(sources, states, strict=True):
            source.set_state(state)


class RowDropout(nn.Module):
    """Dropout whose mask depends only on (seed, layer name, step, global row). `at` says which rows come next.

    For a slice of a sequence (rows, tokens, ...) `at` also says where its tokens begin, so that the slice gets its part
    of the whole sequence's mask. A layer may make several rows from each row of the batch (as a view of (rows, tokens)
    does). These are counted as several rows, so that the mask is still that of the whole batch.
    """

    def __init__(self, p: float, seed: int, name: str) -> None:
        super().__init__()
        self.p = p
        self.seed = seed
        self.name = name
        self.step = 0
        self.first_row = 0
        self.first_token = 0
        self.rows = 0

    def forward(self, x: Tensor) -> Tensor:
        """x of shape (rows, ...) -> the same shape. Elements are 0 with probability p, and the others are scaled up."""
        return self.of_part(x, x.shape, lambda kept: kept)

    def of_part(self, x: Tensor, whole: Sequence[int], cut: Callable[[Tensor], Tensor]) -> Tensor:
        """The same for a part of a tensor of shape `whole` = (rows, ...); `cut` takes that part of the whole mask."""
        if not self.training or self.p == 0.0:
            return x
        if self.p == 1.0:
            return x * 0.0
        return x * cut(self._uniform(whole, x.device) >= self.p).to(x.dtype).div_(1.0 - self.p)

    def _uniform(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Numbers in [0, 1), one per element: splitmix64 of the row's key and the element's position in the row."""
        base, length = hash64(self.seed, self.name, self.step), shape[0]
        each = length // self.rows if self.rows and length % self.rows == 0 else 1
        rows = torch.arange(self.first_row * each, self.first_row * each + length, device=device)
        key = _mix(rows * _GOLDEN + base).view(-1, 1)
        count = math.prod(shape[1:]) if length else 0
        before = self.first_token * (count // shape[1]) if self.first_token and count else 0
        position = torch.arange(before + 1, before + count + 1, device=device) * _GOLDEN
        bits = _mix(key + position).bitwise_right_shift_(11).bitwise_and_((1 << 53) - 1)
        return bits.double().mul_(2.0**-53).view(tuple(shape))


def _mix(z: Tensor) -> Tensor:
    z = (z ^ (z >> 30 & (1 << 34) - 1)) * _MIX1
    z = (z ^ (z >> 27 & (1 << 37) - 1)) * _MIX2
    return z ^ (z >> 31 & (1 << 33) - 1)


def replace_dropout(model: nn.Module, seed: int) -> None:
    """Replace every `nn.Dropout` of a model, in place, by one whose mask is a function of the global row.

    Its name is that in the model. One that was taken out of another model has the name there in `row_name`.
    """
    named = list(model.named_modules())  # (a module that is used twice is here once)
    copies = {
        id(m): RowDropout(m.p, seed, getattr(m, "row_name", name)).train(m.training)
        for name, m in named
        if type(m) is nn.Dropout
    }
    for _, module in named:
        for name, child in list(module._modules.items()):
            if id(child) in copies:
                module._modules[name] = copies[id(child)]


# Layers of these modules draw by row only, change no buffers, and treat rows one by one: tests say so.
_OWN = tuple(f"minipar.models.{name}" for name in ("transformer", "mixture_gpt", "inception", "perceptron"))


def split_sensitive(
    model: nn.Module, x: Any = None, own_loss: bool = False, writable: tuple[bool, bool] = (True, True)
) -> list[str]:
    """Modules and layers, by name, whose result depends on how the batch is split.

    x          rows to run copies of a sequential model's layers on, to find which of them draw, change their buffers,
               or have rows that change each other's results
    own_loss   single numbers that the last layer gives are the model's loss, and no results of rows
    writable   whether a layer's forward may write into its frozen parameters, and into trained ones; else PlanError
    """
    found = []
    for name, module in model.named_modules():
        kind = type(module).__name__
        if not module.training and getattr(module, "running_mean", None) is not None:
            continue  # (a norm that uses its stored statistics)
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            found.append(f"{name} ({kind}: statistics of a micro-batch)")
        elif not module.training:
            continue
        elif isinstance(module, nn.modules.dropout._DropoutNd) and type(module) is not nn.Dropout and module.p:
            found.append(f"{name} ({kind}: only nn.Dropout draws by row)")
        elif isinstance(module, nn.MultiheadAttention) and module.dropout:
            found.append(f"{name} ({kind}: its inner dropout does not draw by row)")
    ours = all(type(layer).__module__ in _OWN for layer in model._modules.values())
    named = [text.split()[0] for text in found]
    for name, what in () if ours or x is None else _seen(model, x, own_loss, writable):
        if not any(f"{other}.".startswith(f"{name}.") for other in named):
            found.append(f"{name} ({type(model._modules[name]).__name__}: {what})")
    for name, p in model.named_parameters():
        if p.requires_grad and (p._backward_hooks or p._post_accumulate_grad_hooks) and not _adds_up(p):
            found.append(f"{name} (its hook is given the gradient of a micro-batch)")
    return found


def _adds_up(parameter: nn.Parameter) -> bool:
    """Whether hooks of a parameter make of a sum of gradients the sum of what they make of each."""
    kept, found = parameter.grad, []
    parts = [torch.linspace(-1, 1, parameter.numel()).view_as(parameter).to(parameter) ** k for k in (1, 2)]
    for gradient in (*parts, parts[0] + parts[1]):
        parameter.grad = None
        (parameter * gradient).real.sum().backward()
        found.append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    parameter.grad = kept
    return torch.allclose(found[0] + found[1], found[2], rtol=1e-3, atol=1e-6)


def _seen(
    model: nn.Module, x: Any, own_loss: bool, writable: tuple[bool, bool] = (True, True)
) -> list[tuple[str, str]]:
    """Runs copies of a sequential model's layers; names those that draw, change their buffers, or mix rows."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    sources, found = generators(device), []
    outputs: dict[int, Any] = {}
    layers = {name: layer for name, layer in model._modules.items() if layer is not None}
    inputs = wiring(edges_of(model), len(layers)).inputs
    # A layer that cannot run is reported later, when it is measured; not so an error that does not come again.
    once: Exception | None = None
    with untouched(sources), torch.no_grad(), suppress(Exception):
        for number, (name, layer) in enumerate(layers.items()):
            holder = nn.Sequential(copied(layer))
            replace_dropout(holder, 0)
            rows = count_rows(x) if not inputs[number] else 0
            several = [outputs[k] for k in inputs[number]] or [take_rows(x, range(rows))]
            read = map_tensors(several[0] if len(several) == 1 else tuple(several), lambda t: t.to(device))
            given = map_tensors(read, torch.clone)
            states = [source.get_state() for source in sources]
            buffers = {key: t.clone() for key, t in holder.named_buffers()}
            numbers, written = numbers_of(holder), _written(holder)
            before = {key: (p, p._version, p.data_ptr()) for key, p in holder[0].named_parameters()}
            try:
                outputs[number] = holder[0](given)
            except Exception as error:
                holder[0](given)
                kind, where = type(layers[name]).__name__, "in a trial of its rows, before the run"
                once = RankError(f"layer {number} ({kind}) {where}: {type(error).__name__}: {error}")
                once.__cause__ = error
                break
            changed = [key for key, (p, *known) in before.items() if known != [p._version, p.data_ptr()]]
            if key := next((key for key in changed if not writable[before[key][0].requires_grad]), ""):
                once = PlanError(
                    f"layer {number} ({type(layers[name]).__name__}): its forward writes into its parameter {key}, of "
                    "which this plan has copies. Possible are a parametrization (torch.nn.utils.parametrize), a hook "
                    "of the optimizer (register_step_post_hook), a buffer; or one rank with the whole batch"
                )
                break
            if any(not torch.equal(s.get_state(), state) for s, state in zip(sources, states, strict=True)):
                found.append((name, "draws random numbers for a micro-batch; only nn.Dropout draws by row"))
            elif dice_of(holder[0]):
                found.append((name, "may draw from Python's or NumPy's generators; only nn.Dropout draws by row"))
            elif any(not torch.equal(t, buffers.get(key, t)) for key, t in holder.named_buffers()):
                found.append((name, "each micro-batch changes its buffers"))
            elif (after := numbers_of(holder)) != numbers:
                key = next(key for key, number in after.items() if numbers.get(key) != number)
                found.append((name, f"each micro-batch changes its {key}"))
            elif _mixes_rows(holder[0], read, outputs[number], rows, own_loss and number == len(layers) - 1):
                found.append((name, "rows of a micro-batch change each other's results"))
            elif _mixes_gradients(holder[0], read, rows or count_rows(read)):
                found.append((name, "rows of a micro-batch change each other's gradients"))
            elif _written(holder) != written and _follows_parameters(holder, read):
                found.append((name, "each micro-batch changes its buffers"))
    if once is not None:
        raise once
    return found


def numbers_of(layer: nn.Module) -> dict[str, Any]:
    """The attributes of a layer's modules that are numbers, such as counters."""
    return {
        f"{name}.{key}".split(".", 1)[-1]: number
        for name, module in layer.named_modules()
        for key, number in vars(module).items()
        if isinstance(number, (int, float)) and not isinstance(module, RowDropout)
    }


def _mixes_rows(layer: nn.Module, given: Any, output: Any, rows: int, own_loss: bool) -> bool:
    """Whether a layer gives half of some rows another output when the rest is not there. Sums of other lengths round in
    another way, which does not count. Tensors of another length are given whole."""
    rows, halves = rows or count_rows(given), []
    kept = [k for k, t in enumerate(tensors(output)) if t.dim() or not own_loss]
    with suppress(Exception):  # (a layer may need all of its rows; whether it may be cut is then said elsewhere)
        for part in (range(rows // 2), range(rows // 2, rows)) if rows > 1 else ():
            at(row_dropouts(layer), 0, part.start)
            half = _half(given, part, rows)
            halves.append(tensors(layer(half)))
    values = list(zip(tensors(output), *halves, strict=True)) if len(halves) == 2 else []
    return any(_differ(values[k][0], values[k][1:]) for k in kept if values)


def _mixes_gradients(layer: nn.Module, given: Any, rows: int) -> bool:
    """Whether the gradients of a few rows are others than those of their halves. A function's own backward and hooks of
    tensors may look at all rows, such as one that divides a gradient by its norm."""
    some = min(rows, 4)
    if some < 2 or any(t.dim() and len(t) != rows for t in tensors(given)):
        return False

    def gradients(part: range) -> list[Tensor | None]:
        at(row_dropouts(layer), 0, part.start)
        cut = map_tensors(_half(given, part, rows), lambda t: t.requires_grad_(t.is_floating_point()))
        output = tensors(layer(map_tensors(cut, torch.clone)))
        ends = [t for t in output if t.requires_grad and t.dim() and len(t) == len(part)]
        leaves = [t for t in (*tensors(cut), *layer.parameters()) if t.requires_grad]
        for leaf in leaves:
            leaf.grad = None
        whole = [torch.linspace(-1, 2, some * (t.numel() // len(part))).view(some, *t.shape[1:]).to(t) for t in ends]
        torch.autograd.backward(ends, [t[part.start : part.stop] for t in whole])
        return [leaf.grad for leaf in leaves]

    with suppress(Exception), warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        whole, *halves = (gradients(range(a, b)) for a, b in ((0, some), (0, some // 2), (some // 2, some)))
        apart, largest = 0.0, 0.0
        for one, *two in zip(whole, *halves, strict=True):
            there = [g for g in two if g is not None]
            if one is None or one.is_sparse or not there or not one.numel():
                continue
            by_row = len(one) == some and all(len(g) < some for g in there)
            both = torch.cat(there) if by_row else torch.stack(there).sum(0)
            apart = max(apart, float((one - both).abs().max()))
            largest = max(largest, float(one.abs().max()))
        eps = max((torch.finfo(g.dtype).eps for g in whole if g is not None), default=0.0)
        return apart > max(1e-3, 32 * eps) * largest
    return False


def _written(layer: nn.Module) -> list[tuple[int, int]]:
    """Which buffers a layer has, and how often each was written to."""
    return [(id(t), t._version) for t in layer.buffers()]


def _follows_parameters(holder: nn.Sequential, given: Any) -> bool:
    """Whether a layer that writes to its buffers brings them nearer to its parameters each time, as a moving average
    does. As long as both are equal, as at first, the buffers do not change."""
    found: list[dict[str, Tensor]] = []
    with suppress(Exception):
        for by in (1.1, 1.0):
            for p in holder.parameters():
                p.mul_(by)
            holder[0](map_tensors(given, torch.clone))
            found.append({key: t.clone() for key, t in holder.named_buffers()})
    return len(found) == 2 and any(not torch.equal(t, found[1].get(key, t)) for key, t in found[0].items())


def _half(value: Any, part: range, count: int) -> Any:
    """These rows of what a layer is given, also of the tensors of which only the shape is handed on."""
    if isinstance(value, tuple) and value[:1] == (SHADOW,):
        return (SHADOW, len(part), *value[2:]) if value[1] == count else value
    if isinstance(value, (tuple, list)):
        return rebuilt(type(value), [_half(one, part, count) for one in value])
    if items := items_of(value):
        return rebuilt(type(value), [_half(one, part, count) for one in items.values()], list(items), value)
    if not isinstance(value, Tensor):
        return value
    return (value[part.start : part.stop] if value.dim() and len(value) == count else value).clone()


def _differ(whole: Tensor, parts: Sequence[Tensor]) -> bool:
    """Whether a tensor is another one than its parts are, row by row; or, without rows, than each of them."""
    if not (whole.is_floating_point() or whole.is_complex()):
        return False
    by_row = all(p.dim() for p in parts) and whole.dim() > 0 and len(whole) == sum(map(len, parts))
    same = [torch.cat(list(parts))] if by_row and len({p.shape[1:] for p in parts}) == 1 else parts
    scale = float(whole.abs().max()) if whole.numel() else 0.0
    bound = (1e-3 if torch.finfo(whole.dtype).bits < 64 else 1e-12) * max(scale, 1e-30)
    return not all(p.shape == whole.shape and torch.allclose(p, whole, 0, bound, equal_nan=True) for p in same)


def row_dropouts(layer: nn.Module) -> list[RowDropout]:
    """The row-wise dropouts of a layer."""
    return [module for module in layer.modules() if isinstance(module, RowDropout)]


def at(dropouts: Iterable[RowDropout], step: int, first_row: int, first_token: int = 0, rows: int = 0) -> None:
    """Tell dropouts which rows they get next: those from `first_row` on, in the whole batch of `step`.

    first_token   for a slice of sequences, whose tokens are dimension 1: its first token
    rows          how many rows of the batch there are; 0: as many as the tensor has
    """
    for dropout in dropouts:
        dropout.step = step
        dropout.first_row = first_row
        dropout.first_token = first_token
        dropout.rows = rows
