"""Random models, each determined by one number.

    spec = draw(random.Random(7), unsplit=False)
    model = build(spec)            an nn.Sequential (or a Network) in float64, the same in every process

A spec is a list of `Entry`s, one for each layer: its kind, the seed of its numbers, and its input. `KINDS` has one
function for each kind of layer: it takes a random generator and the layer's input (the shape of a row, without the
number of rows, and the dtype), and returns a module, or None if such a layer does not fit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from minipar.models.network import Network
from minipar.models.selective_checkpoint import Recomputed
from minipar.models.sliced import Sliced

VOCABULARY = 11


@dataclass(frozen=True)
class Entry:
    """One layer.

    shape, dtype  of one row of what it is given (of the first part, if that is a tuple)
    first         it is given a tuple, changes its first part, and hands on the others
    sources       with branches: the layers whose outputs it is given, added up; (): the one before
    freeze        "", "all", or "some": which of its parameters are not trained
    still         it is in eval mode
    of            an earlier layer whose weight it shares (kind "tied"), or that it is once more ("again")
    """

    kind: str
    seed: int
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float64
    first: bool = False
    sources: tuple[int, ...] = ()
    freeze: str = ""
    still: bool = False
    of: int = -1

    def __str__(self) -> str:
        marks = [
            str(list(self.shape)),
            "on first" if self.first else "",
            f"from {','.join(map(str, self.sources))}" if self.sources else "",
            f"frozen {self.freeze}" if self.freeze else "",
            "eval" if self.still else "",
            f"of {self.of}" if self.of >= 0 else "",
        ]
        return f"{self.kind} ({'; '.join(filter(None, marks))})"


@dataclass(frozen=True)
class Spec:
    """A model and its data. `loss`: "mse", "l1", "classes" (some targets do not count); `given`: see `Rows`."""

    seed: int
    entries: tuple[Entry, ...]
    rows: int
    loss: str
    given: str = "steps"

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        return tuple((a, l) for l, e in enumerate(self.entries) if l for a in (e.sources or (l - 1,)))

    def __str__(self) -> str:
        lines = [f"  {l}  {entry}" for l, entry in enumerate(self.entries)]
        return "\n".join([f"{self.rows} rows, loss {self.loss}, data {self.given}", *lines])


# layers ---------------------------------------------------------------------------------------------------------------


class With(nn.Module):
    """A layer that is a function of (itself, x), with parameters and buffers by name."""

    def __init__(self, function: Callable[[Any, Any], Any], **held: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in held.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value, persistent=not name.startswith("table"))
            else:
                setattr(self, name, value)

    def forward(self, x: Any) -> Any:
        return self.function(self, x)


class OnFirst(nn.Module):
    """Takes a tuple or a dict, and changes its first part."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Any) -> Any:
        if isinstance(x, dict):
            return {key: self.layer(part) if k == 0 else part for k, (key, part) in enumerate(x.items())}
        return (self.layer(x[0]), *x[1:])


class Sum(nn.Module):
    """Takes a tuple of outputs of other layers, and adds them up for its own."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: tuple[Tensor, ...]) -> Any:
        total = x[0]
        for k, part in enumerate(x[1:]):
            total = total + part * 0.5 if k % 2 else total - part * 0.25
        return self.layer(total)


class Twice(torch.autograd.Function):
    """x and w to (x w, sin x, where x is positive): two outputs with gradients, and one without."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Any:
        ctx.save_for_backward(x, w)
        mask = x > 0
        ctx.mark_non_differentiable(mask)
        return x * w, torch.sin(x), mask

    @staticmethod
    def backward(ctx: Any, a: Tensor, b: Tensor, _: Any) -> Any:
        x, w = ctx.saved_tensors
        return a * w + b * torch.cos(x), (a * x).reshape(-1, x.shape[-1]).sum(0)


class Overwritten(torch.autograd.Function):
    """Doubles its input in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2


class Block(nn.Module):
    """A small transformer block, with nn.Dropout."""

    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix = Attention(width)
        self.drop = nn.Dropout(p)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(p))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.mix(self.norm(x)))
        return x + self.mlp(self.norm2(x))


class Attention(nn.Module):
    """Causal attention of one head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class Core(Recomputed):
    """The part of an attention that checkpoint=selective runs again; with nn.Dropout inside."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)

    def compute(self, *inputs: Tensor) -> Tensor:
        q, k, v = inputs
        return self.drop(torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, -1)) @ v


class WithCore(nn.Module):
    """Attention around a part that may be recomputed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.core = nn.Linear(width, 3 * width), Core()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.core(q, k, v)


class Each(Sliced):
    """A linear layer for each token, so that slices of a sequence are enough."""

    carries = False

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward_slice(self, x: Tensor, start: int, carry: Any) -> tuple[Tensor, None]:
        return torch.tanh(self.linear(x)), None


class Running(Sliced):
    """The sum of all tokens so far, each weighed; carries the sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(width))

    def forward_slice(self, x: Tensor, start: int, carry: Any) -> tuple[Tensor, Any]:
        total = (x * self.w).cumsum(1)
        if carry is not None:
            total = total + carry
        return torch.sin(total), total[:, -1:]


class Looking(Sliced):
    """Causal attention that carries keys and values."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward_slice(self, x: Tensor, start: int, carry: Any) -> tuple[Tensor, Any]:
        q, k, v = self.qkv(x).chunk(3, -1)
        if carry is not None:
            k, v = torch.cat([carry[0], k], 1), torch.cat([carry[1], v], 1)
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        return x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask), (k, v)


def parameter(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, dtype=dtype) * scale)


def _count(m: Any, x: Tensor) -> Tensor:
    m.count += 1
    return x * m.w


def _join(m: Any, x: Any) -> Tensor:
    """The first part, with something of each other part. Those of 5 dimensions, and of 1 if real, are not by row."""
    total, *others = _tensors(x)
    for k, part in enumerate(others):
        by_row = part.dim() != 5 and not (part.dim() == 1 and part.is_floating_point())
        part = torch.view_as_real(part) if part.is_complex() else part.to(total.dtype)
        if by_row and part.numel() and k % 3 < 2:
            total = total + part.reshape(len(total), -1).mean(1).view(-1, *[1] * (total.dim() - 1)) * (k + 1)
        elif not by_row:
            total = total * torch.cos(part.sum())
    return total * m.w


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for part in value for t in _tensors(part)] if isinstance(value, (tuple, list)) else []


def _assign(m: Any, x: Tensor, k: int, clone: bool) -> Tensor:
    x = x.clone() if clone else x
    x[..., :k] = x[..., :k] * m.w
    x[..., k:] *= 0.5
    return x


def _hooked(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x)
    if y.requires_grad:
        y.register_hook(lambda g: g * 1.5)
    if x.requires_grad:
        x.register_hook(lambda g: g + 0.25 * g)
    return torch.tanh(y)


def _module_hooks(width: int) -> nn.Module:
    layer = nn.Linear(width, width)
    layer.register_forward_hook(lambda m, args, out: out * 2)
    layer.register_forward_pre_hook(lambda m, args: (args[0] * 0.5,))
    return layer


def _backward_hook(width: int) -> nn.Module:
    layer = nn.Sequential(nn.Linear(width, width), nn.Tanh())
    layer.register_full_backward_hook(lambda m, given, arrived: tuple(None if g is None else g * 3 for g in given))
    return layer


def _scaled_gradient(width: int) -> nn.Module:
    layer = nn.Linear(width, width)
    layer.weight.register_hook(lambda g: g * 2)
    return layer


def _complex(m: Any, x: Tensor) -> Tensor:
    return torch.complex(x * m.a, torch.sin(x) * m.b)


def _strided(width: int, how: int) -> nn.Module:
    layer = nn.Linear(width, width)
    value = layer.weight.detach()
    if how == 0:
        layer.weight = nn.Parameter(value.t().contiguous().t())
    elif how == 1:
        layer.weight = nn.Parameter(torch.cat([value, value], 1)[:, ::2])
    elif how == 2:
        layer.weight = nn.Parameter(torch.cat([value, value])[width // 2 : width // 2 + width])
    else:
        layer.bias = nn.Parameter(torch.stack([layer.bias.detach(), layer.bias.detach()], 1)[:, 0])
    return layer


Made = nn.Module | None
Kind = Callable[[random.Random, tuple[int, ...], torch.dtype], Made]
KINDS: dict[str, Kind] = {}
CLOSING = ("join", "pick")  # these take a tuple and hand on a tensor
SPLIT = ("batch-norm", "counter", "spectral")  # whose buffers or results feel how a batch is split


def kind(name: str, dims: Sequence[int] = (1, 2, 3), dtype: torch.dtype = torch.float64) -> Callable[[Kind], Kind]:
    """Register a kind of layer, for rows of so many dimensions and this dtype."""

    def register(make: Kind) -> Kind:
        def only(dice: random.Random, shape: tuple[int, ...], given: torch.dtype) -> Made:
            return make(dice, shape, given) if len(shape) in dims and given is dtype else None

        KINDS[name] = only
        return make

    return register


def simple(name: str, make: Callable[[int], nn.Module], dims: Sequence[int] = (1, 2, 3)) -> None:
    """Register a kind whose modules depend on the last dimension alone."""
    kind(name, dims)(lambda dice, shape, dtype: make(shape[-1]))


def function(name: str, run: Callable[[Any, Any], Any], dims: Sequence[int] = (1, 2, 3)) -> None:
    """Register a kind that is a function with a parameter `w` as long as the last dimension."""
    kind(name, dims)(lambda dice, shape, dtype: With(run, w=parameter(shape[-1])))


def plain(name: str, run: Callable[[Tensor], Any], dims: Sequence[int] = (1, 2, 3)) -> None:
    """Register a kind that is a function without parameters."""
    kind(name, dims)(lambda dice, shape, dtype: With(lambda m, x: run(x)))


simple("linear", lambda n: nn.Linear(n, n))
simple("linear-gelu", lambda n: nn.Sequential(nn.Linear(n, n), nn.GELU()))
simple("dropout", lambda n: nn.Sequential(nn.Linear(n, n), nn.Dropout(0.3)))
simple("dropout-alone", lambda n: nn.Dropout(0.2))
simple("relu-inplace", lambda n: nn.ReLU(inplace=True))
simple("linear-relu-inplace", lambda n: nn.Sequential(nn.Linear(n, n), nn.ReLU(inplace=True)))
simple("layer-norm", nn.LayerNorm)
simple("weight-norm", lambda n: parametrizations.weight_norm(nn.Linear(n, n)))
simple("module-hooks", _module_hooks)
simple("backward-hook", _backward_hook)
simple("parameter-hook", _scaled_gradient)
simple("tensor-hooks", lambda n: With(_hooked, linear=nn.Linear(n, n)))
simple("slow-twice", lambda n: With(lambda m, x: m.linear(torch.tanh(m.linear(x))), linear=nn.Linear(n, n)))
simple("block", lambda n: Block(n, 0.1), (2,))
simple("core", WithCore, (2,))
simple("gru", lambda n: With(lambda m, x: m.gru(x)[0], gru=nn.GRU(n, n, batch_first=True)), (2,))
simple("multihead", lambda n: With(lambda m, x: m.mha(x, x, x, need_weights=False)[0],
                                   mha=nn.MultiheadAttention(n, 1, batch_first=True)), (2,))  # fmt: skip
simple("each", Each, (2,))
simple("running", Running, (2,))
simple("looking", Looking, (2,))
simple(
    "tied-inside",
    lambda n: With(lambda m, x: F.linear(torch.sin(F.linear(x, m.w)), m.w.T), w=parameter(n, n, scale=n**-0.5)),
)
simple("unused", lambda n: With(lambda m, x: m.linear(x), linear=nn.Linear(n, n), never=parameter(3)))
simple("empty-only", lambda n: With(lambda m, x: x + m.none.sum(), none=parameter(0, 3)))
simple(
    "nested-checkpoint",
    lambda n: With(
        lambda m, x: checkpoint(m.a, x, use_reentrant=False),
        a=nn.Sequential(nn.Linear(n, n), nn.Sigmoid(), nn.Linear(n, n)),
    ),
)
function("scale", lambda m, x: x * m.w)
function("add-in-place", lambda m, x: x.add_(m.w))
function("param-only", lambda m, x: x + m.w * m.w)
function("detached", lambda m, x: x.detach() * m.w)
function("twice", lambda m, x: sum(Twice.apply(x, m.w)[:2]))
function("twice-mask", lambda m, x: (lambda a, b, mask: torch.where(mask, a, b))(*Twice.apply(x, m.w)))
function("overwritten", lambda m, x: Overwritten.apply(x * m.w))
function("expanded", lambda m, x: x.mean(-1, keepdim=True).expand_as(x) + x * m.w)
function("into-buffer", lambda m, x: torch.zeros_like(x).copy_(x * m.w))
function("no-grad-inside", lambda m, x: x * m.w + _without(x))
function("autograd-inside", lambda m, x: x + m.w * _inner(x))
function("fork-skip", lambda m, x: (torch.tanh(x * m.w), (x, torch.full((len(x),), 7))))
function("fork-parameter", lambda m, x: (x * 0.5, (m.w * 1.0)[None, None, None, None]))
function("fork-own-parameter", lambda m, x: (x, m.w))
function("fork-mask", lambda m, x: (lambda a, b, mask: (a, mask, b))(*Twice.apply(x, m.w)))
function("fork-none", lambda m, x: (x * m.w, None, 3))
function("fork-list", lambda m, x: (x * m.w, [x, x.detach()]))
function("fork-dict", lambda m, x: {"x": x * m.w, "mask": None, "more": {"skip": x, "n": 3}})
function("join", _join)
plain("fork-same", lambda x: (x, x))
plain("fork-view", lambda x: (x, x[..., :1]))
plain("fork-integers", lambda x: (x, x.argmax(-1)))
plain("relu_", F.relu_)
plain("tanh", torch.tanh)
plain("view", lambda x: x.view_as(x))
plain("transposed", lambda x: x.transpose(1, 2), (2, 3))
plain("flatten", lambda x: x.flatten(1))
plain("last-token", lambda x: x[:, -1], (2,))
plain("unsqueeze", lambda x: x.unsqueeze(1), (1, 2))
plain("repeat-expand", lambda x: x.unsqueeze(1).expand(-1, 2, -1), (1,))
plain("detach", lambda x: x.detach())
plain("fft-abs", lambda x: torch.fft.fft(x).abs())


def _without(x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cos(x)


def _inner(x: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        (found,) = torch.autograd.grad(torch.sin(leaf).sum(), leaf)
    return found


@kind("widths")
def _(dice: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Made:
    return nn.Linear(shape[-1], dice.randint(2, 7))


@kind("strided")
def _(dice: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Made:
    return _strided(shape[-1], dice.randrange(4))


@kind("assign")
def _(dice: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Made:
    k = dice.randint(1, shape[-1])
    return With(partial(_assign, k=k, clone=dice.random() < 0.5), w=parameter(k))


@kind("buffers")
def _(dice: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Made:
    run = [lambda m, x: x * m.table + m.shift, lambda m, x: x + m.shift * m.mask][dice.randrange(2)]
    n = shape[-1]
    return With(run, table=torch.rand(n), shift=torch.randn(n), mask=torch.rand(n) > 0.5)


@kind("rotary")
def _(dice: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Made:
    if shape[-1] % 2:
        return None
    turn = torch.polar(torch.ones(shape[-1] // 2), torch.randn(shape[-1] // 2))

    def run(m: Any, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex((x * m.w).reshape(*x.shape[:-1], -1, 2).contiguous())
        return torch.view_as_real(pairs * m.turn).flatten(-2)

    return With(run, w=parameter(shape[-1]), turn=turn)


@kind("group-norm", (1, 3))
def _(dice: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Made:
    return nn.GroupNorm(dice.choice([n for n in (1, 2, 3) if shape[0] % n == 0]), shape[0])


@kind("still-batch-norm")
def _(dice: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Made:
    return _batch_norm(shape).eval()


@kind("batch-norm")
def _(dice: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Made:
    return _batch_norm(shape)


def _batch_norm(shape: tuple[int, ...]) -> nn.Module:
    norm = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d)[len(shape) - 1](shape[0])
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    return norm


@kind("counter")
def _(dice: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Made:
    return With(_count, w=parameter(shape[-1]), count=torch.zeros((), dtype=torch.long))


@kind("spectral")
def _(dice: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Made:
    return parametrizations.spectral_norm(nn.Linear(shape[-1], shape[-1]))


@kind("conv", (3,))
def _(dice: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Made:
    return nn.Conv2d(shape[0], shape[0], 3, padding=1, bias=dice.random() < 0.7)


@kind("conv-last", (3,))
def _(dice: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Made:
    return nn.Conv2d(shape[0], shape[0], 3, padding=1).to(memory_format=torch.channels_last)


@kind("to-last", (3,))
def _(dice: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Made:
    return With(
        lambda m, x: m.conv(x.contiguous(memory_format=torch.channels_last)), conv=nn.Conv2d(shape[0], shape[0], 1)
    )


@kind("conv-stride", (3,))
def _(dice: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Made:
    return nn.Conv2d(shape[0], dice.randint(2, 4), 2, stride=2) if min(shape[1:]) >= 4 else None


@kind("to-image", (1,))
def _(dice: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Made:
    return nn.Sequential(nn.Linear(shape[0], 32), nn.Unflatten(1, (2, 4, 4)))


@kind("to-vector", (2, 3))
def _(dice: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Made:
    return nn.Sequential(nn.Flatten(), nn.Linear(int(torch.tensor(shape).prod()), 5))


@kind("shared-bias", (1, 2))
def _(dice: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Made:
    table = nn.Embedding(4, shape[-1])
    return With(
        lambda m, x: (x, m.table(torch.arange(3))[None, None, None], m.table.weight[None, None, None]), table=table
    )


@kind("to-complex", (1, 2))
def _(dice: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Made:
    return With(_complex, a=parameter(shape[-1]), b=parameter(shape[-1]))


@kind("complex-linear", (1, 2), torch.complex128)
def _(dice: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Made:
    weight = parameter(shape[-1], shape[-1], scale=shape[-1] ** -0.5, dtype=torch.complex128)
    return With(lambda m, x: x @ m.w, w=weight)


@kind("to-real", (1, 2), torch.complex128)
def _(dice: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Made:
    how = [
        lambda m, x: x.real + x.imag * 0.5,
        lambda m, x: torch.view_as_real(x).flatten(-2),
        lambda m, x: (x * x.conj()).real,
    ]
    return With(dice.choice(how))


@kind("embedding", (1, 2), torch.int64)
def _(dice: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Made:
    return nn.Embedding(VOCABULARY, dice.choice([3, 4, 5, 6, 8, 192 if dice.random() < 0.3 else 4]),
                        padding_idx=dice.choice([None, 1]), scale_grad_by_freq=False)  # fmt: skip


@kind("one-hot", (1,), torch.int64)
def _(dice: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Made:
    return With(lambda m, x: F.one_hot(x, VOCABULARY) * m.w, w=parameter(VOCABULARY))


KINDS["pick"] = lambda dice, shape, dtype: With(lambda m, x: whole_of(x))
SLICED = ("each", "running", "looking")
TURNS = {torch.int64: ("embedding", "embedding", "one-hot"),
         torch.complex128: ("complex-linear", "to-real", "to-real")}  # fmt: skip
OUTSIDE: list[str] = []  # kinds that only some pairs draw
COMMON = ("linear", "linear-gelu", "linear", "dropout", "layer-norm", "conv", "conv-last", "block", "relu-inplace")


class Tied(nn.Module):
    """Shares its weight with another layer."""

    def __init__(self, weight: nn.Parameter, transpose: bool) -> None:
        super().__init__()
        self.weight, self.transpose = weight, transpose
        self.bias = nn.Parameter(torch.zeros(weight.shape[0]))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.T if self.transpose else self.weight, self.bias)


class Listed(nn.Module):
    """Ties its weight to another layer's through a plain list, which torch does not register."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.held = [weight]
        self.scale = parameter(weight.shape[0])

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.held[0]) * self.scale


# a model --------------------------------------------------------------------------------------------------------------


def layer(entry: Entry, before: Sequence[nn.Module] = ()) -> Made:
    """The module of an entry; None where it does not fit."""
    dice = random.Random(entry.seed)
    torch.default_generator.manual_seed(entry.seed)  # (torch.manual_seed also tells all GPUs, which takes long)
    if entry.kind == "again":
        return before[entry.of]
    if entry.kind in ("tied", "listed"):
        weight = _square(before[entry.of])
        how = Listed if entry.kind == "listed" else partial(Tied, transpose=dice.random() < 0.5)
        made: Made = None if weight is None else how(weight)
    else:
        made = KINDS[entry.kind](dice, entry.shape, entry.dtype)
    if made is None:
        return None
    found = list(made.parameters())
    for p in found if entry.freeze == "all" else found[:: 2 - entry.seed % 2] if entry.freeze == "some" else ():
        p.requires_grad_(False)
    if entry.still:
        made.eval()
    if entry.first:
        made = OnFirst(made)
    return Sum(made) if len(entry.sources) > 1 else made


def _square(module: nn.Module) -> nn.Parameter | None:
    """The weight of a square linear layer in a module."""
    for part in module.modules():
        if isinstance(part, nn.Linear) and type(part) is nn.Linear and part.in_features == part.out_features:
            weight = dict(part.named_parameters(recurse=False)).get("weight")
            return weight
    return None


def build(spec: Spec) -> nn.Sequential:
    """The model, in float64, from the spec alone."""
    with torch.random.fork_rng(devices=[]):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            made: list[nn.Module] = []
            for entry in spec.entries:
                one = layer(entry, made)
                assert one is not None, entry
                made.append(one)
        finally:
            torch.set_default_dtype(before)
    if any(len(entry.sources) > 0 for entry in spec.entries):
        return Network(made, spec.edges)
    return nn.Sequential(*made)


def whole_of(value: Any) -> Tensor:
    """What the loss takes of the last layer's output."""
    return _tensors(value)[0]


def loss_of(kind: str) -> Any:
    """A loss by name: a mean over rows, or over those targets that count."""
    return LOSSES[kind][0]


def mse(output: Any, y: Tensor) -> Tensor:
    return F.mse_loss(whole_of(output), y)


def l1(output: Any, y: Tensor) -> Tensor:
    return F.smooth_l1_loss(whole_of(output), y)


def classes(output: Any, y: Tensor) -> Tensor:
    return F.cross_entropy(whole_of(output), y)


# Each with its targets: numbers; classes, of which some are -100; "padded", some of which are 0, from some step on.
LOSSES: dict[str, tuple[Any, str]] = {"mse": (mse, "numbers"), "l1": (l1, "numbers"), "classes": (classes, "classes")}


# drawing --------------------------------------------------------------------------------------------------------------


def draw(dice: random.Random, unsplit: bool = False, sliced: bool = False, odd_ones: Sequence[str] = ()) -> Spec:
    """A random spec. `unsplit`: with layers that feel how a batch is split; `sliced`: of layers that take slices;
    `odd_ones`: kinds of layers of which one in two is, in a model where nothing is forbidden."""
    seed = dice.randrange(10**6)
    wide = dice.random() < 0.25
    width = 192 if wide else dice.choice([4, 6, 8]) if odd_ones else dice.randint(3, 8)
    start = "sequence" if sliced else dice.choice(["vector"] * 4 + ["sequence"] * 3 + ["image"] * 2 + ["tokens"] * 2)
    shape: tuple[int, ...] = {
        "vector": (width,),
        "sequence": (dice.randint(2, 6), width),
        "image": (dice.randint(2, 4), *dice.choice([(4, 4), (5, 4), (6, 6)])) if not wide else (8, 12, 12),
        "tokens": (dice.randint(2, 6),),
    }[start]
    dtype = torch.int64 if start == "tokens" else torch.float64
    rows = dice.choice([1, 2, 3, 5, 7, 8, 8, 11, 12, 13, 16, 16, 20, 24] + ([200, 64] if wide else []))
    branchy = not sliced and dice.random() < 0.2
    frozen = dice.random() < 0.25
    odd = dice.random()  # how often a layer is of any kind at all, rather than a common one
    length = dice.choice([2, 3, 4, 4, 5, 5, 6, 7, 8, 9, 10])
    entries: list[Entry] = []
    made: list[nn.Module] = []
    shapes: list[tuple[tuple[int, ...], torch.dtype] | None] = []  # of what each layer hands on; None: a tuple
    sample = example(shape, dtype, 3, seed)
    names = [name for name in KINDS if name not in OUTSIDE]
    tries = 0
    while len(entries) < length and tries < 200:
        tries += 1
        tuples = not isinstance(sample, Tensor)
        head = whole_of(sample)
        given, kind_of = tuple(head.shape[1:]), head.dtype
        if head.dim() == 0 or head.numel() == 0 or head.numel() > 20000:
            break
        if sliced:
            name = dice.choice(SLICED)
        elif kind_of in TURNS:
            name = dice.choice(TURNS[kind_of])
        elif tuples and dice.random() < 0.35:
            name = dice.choice(CLOSING[:1] * 4 + CLOSING)
        elif dice.random() < 0.12 and entries:
            name = dice.choice(["tied", "again", "listed"] if odd_ones else ["tied", "again"])
        elif odd_ones and dice.random() < 0.4:
            name = dice.choice(odd_ones)
        else:
            name = dice.choice(names) if dice.random() < odd + 0.2 else dice.choice(COMMON)
        if (
            (name in SPLIT and not unsplit)
            or (name in CLOSING and not tuples)
            or (name.startswith("fork") and (tuples or branchy))
            or (
                name == "tensor-hooks" and (tuples or branchy) and not odd_ones
            )  # (a hook on x is one for all its readers)
        ):
            continue
        entry = Entry(name, dice.randrange(10**6), given, kind_of)
        if name == "shared-bias" and (tuples or branchy):
            continue
        if not odd_ones and tuples and ("place" in name or name.endswith("_") or name in ("assign", "overwritten")):
            continue  # (the parts may share memory, which is lost where ranks hand them on)
        if tuples and name not in CLOSING:
            entry = replace(entry, first=True)
        if name in ("tied", "again", "listed"):
            entry = replace(entry, of=dice.randrange(len(entries)))
            if name == "again":
                same = entries[entry.of]
                if (same.shape, same.dtype, same.first, same.sources) != (
                    given,
                    kind_of,
                    entry.first,
                    (),
                ) or same.kind in SPLIT:
                    continue
        elif frozen and dice.random() < 0.4:
            entry = replace(entry, freeze=dice.choice(["all", "all", "some"]))
        if dice.random() < 0.06 and name != "again":
            entry = replace(entry, still=True)
        if branchy and entries and name != "again" and not tuples:
            here = [l for l, form in enumerate(shapes[:-1]) if form == (given, kind_of)]
            if here and dice.random() < 0.5:
                more = dice.sample(here, min(len(here), dice.randint(1, 2)))
                entry = replace(entry, sources=tuple(sorted({*more, len(entries) - 1})))
        try:
            with in_float64():
                one = layer(entry, made)
                if one is None:
                    continue
                value = _fresh(sample)
                after = one((value,) * len(entry.sources) if len(entry.sources) > 1 else value)
        except (RuntimeError, ValueError, TypeError, AssertionError):
            continue
        entries.append(entry)
        made.append(one)
        sample = _fresh(after)
        shapes.append((tuple(after.shape[1:]), after.dtype) if isinstance(after, Tensor) else None)
    head = whole_of(sample)
    if head.is_complex() or not head.is_floating_point() or not entries:
        return draw(dice, unsplit, sliced, odd_ones)
    if not (unsplit or odd_ones or _by_row(made, entries)):
        return draw(dice, unsplit, sliced)
    classed = not sliced and head.dim() == 2 and head.shape[1] > 1 and dice.random() < 0.4
    known = [name for name, (_, targets) in LOSSES.items() if (targets != "numbers") == classed]
    usual = ["classes"] if classed else ["mse", "mse", "l1"]
    loss = dice.choice(known if odd_ones and dice.random() < 0.25 else usual)
    return Spec(seed, tuple(entries), rows, loss, dice.choice(["steps", "steps", "rows", "pair", "last"]))


def _by_row(made: Sequence[nn.Module], entries: Sequence[Entry]) -> bool:
    """Whether a row of the output depends on this row of the input alone."""
    spec = Spec(0, tuple(entries), 5, "mse")
    x = example(entries[0].shape, entries[0].dtype, 5, 0)
    model = build(spec).eval()
    with torch.no_grad():
        try:
            whole = whole_of(model(x.clone()))
            parts = [whole_of(model(x[rows].clone())) for rows in (slice(0, 1), slice(1, 5))]
        except (RuntimeError, ValueError):
            return False  # (an operation in place on what an earlier layer expanded; a norm of a single number)
        return len(whole) == 5 and len(parts[0]) == 1 and torch.allclose(whole, torch.cat(parts), equal_nan=True)


class in_float64:
    def __enter__(self) -> None:
        torch.set_default_dtype(torch.float64)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(torch.float32)


def _fresh(value: Any) -> Any:
    """The same values in memory of their own, without a graph."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, (tuple, list)):
        return type(value)(_fresh(part) for part in value)
    return {key: _fresh(part) for key, part in value.items()} if isinstance(value, dict) else value


def example(shape: tuple[int, ...], dtype: torch.dtype, rows: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.int64:
        return torch.randint(VOCABULARY, (rows, *shape), generator=generator)
    return torch.randn(rows, *shape, generator=generator, dtype=torch.float64)


# data -----------------------------------------------------------------------------------------------------------------


class Rows:
    """Rows and targets of a spec: those of each step differ, unless `given` is "pair".

    given   "steps": batch(step, size); "rows": with a parameter `rows`; "last": every third step has fewer rows
    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        first = spec.entries[0]
        with torch.no_grad():
            out = whole_of(build(spec).eval()(example(first.shape, first.dtype, 3, 0)))
        self.out = tuple(out.shape[1:])
        self.rows_of = len(out) // 3

    def whole(self, step: int) -> tuple[Tensor, Tensor]:
        spec = self.spec
        step = 0 if spec.given == "pair" else step
        count = max(1, spec.rows // 2) if spec.given == "last" and step % 3 == 2 else spec.rows
        seed = spec.seed * 31 + step
        x = example(spec.entries[0].shape, spec.entries[0].dtype, count, seed)
        generator = torch.Generator().manual_seed(seed + 1)
        targets = LOSSES[spec.loss][1]
        if targets == "numbers":
            return x, torch.randn(count, *self.out, generator=generator, dtype=torch.float64)
        y = torch.randint(self.out[0], (count,), generator=generator)
        if targets == "padded":
            y = y.clamp(min=1)
            if step >= spec.seed % 4:
                y[1:][torch.rand(count - 1, generator=generator) < 0.4] = 0
        elif spec.seed % 3 == 0:
            y[torch.rand(count, generator=generator) < 0.3] = -100
            y[0] = 0  # (of no targets at all there is no mean)
        return x, y

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        return self.whole(step)


class RowsByRange(Rows):
    """The same, for a rank that asks for its own rows."""

    def batch(self, step: int, size: int, rows: range | None = None) -> tuple[Tensor, Tensor]:
        x, y = self.whole(step)
        return (x, y) if rows is None else (x[rows.start : rows.stop], y[rows.start : rows.stop])

    def length(self, step: int, size: int) -> int:
        return len(self.whole(step)[0])


def data_of(spec: Spec) -> Any:
    """The data as a user would give it: a pair, or a set with `batch`."""
    if spec.given == "pair":
        return Rows(spec).whole(0)
    return RowsByRange(spec) if spec.given == "rows" else Rows(spec)
