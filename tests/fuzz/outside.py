"""Models, losses and optimizers that nobody here wrote: what other people's code does and an engine does not expect.

    OUTSIDE      kinds of layers: a backward of their own, hooks, complex numbers, rows that are routed or mixed, ...
    LOSSES       means that count in ways of their own, from a random step on; and losses that are no means
    OPTIMIZERS   momentum, decay, groups, state by parameter, and some that look at several parameters at once
    words(...)   plans over all keys

`campaign.py` draws every second pair from here. It goes through `train`, as a user's would, and plain torch judges it.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from minipar import Plan, PlanError
from minipar.models import losses
from tests.fuzz import models, plans
from tests.fuzz.models import Made, With, function, kind, parameter, simple, whole_of

_BEFORE = set(models.KINDS)


# layers ---------------------------------------------------------------------------------------------------------------


class Doubled(torch.autograd.Function):
    """Hands on its input; its backward is not the derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return ctx.factor * g, None


class OwnLinear(torch.autograd.Function):
    """x times w, with half of the gradient for w."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return g @ w.T, 0.5 * x.reshape(-1, x.shape[-1]).T @ g.reshape(-1, g.shape[-1])


class Rounded(torch.autograd.Function):
    """Straight-through: rounded to quarters, with the gradient of the identity where the input is small."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * (x.abs() < 2)


class Experts(nn.Module):
    """Each row goes to one of a few experts; those without rows get no gradient. Rows below `least` go nowhere."""

    def __init__(self, width: int, count: int, least: float) -> None:
        super().__init__()
        self.router, self.least = nn.Linear(width, count), least
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        said, chosen = self.router(x).softmax(-1).max(-1)
        out = x
        for number, expert in enumerate(self.experts):
            mine = (chosen == number) & (x.sum(-1) > self.least)
            if mine.any():
                out = out.index_put((mine,), expert(x[mine]) * said[mine].unsqueeze(-1) + x[mine])
        return out


class Heads(nn.Module):
    """Attention under the names that presets of tensor parallelism know."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            one(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in (self.q_proj, self.k_proj, self.v_proj)
        )
        x = x + self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


def _halve(p: Tensor) -> None:
    assert p.grad is not None
    p.grad *= 0.5


def _hooked(width: int, where: str) -> nn.Module:
    layer = nn.Linear(width, width)
    if where == "accumulated":
        layer.weight.register_post_accumulate_grad_hook(_halve)
    elif where == "before":
        layer.register_full_backward_pre_hook(lambda m, given: tuple(g * 2 for g in given))
    elif where == "inside":
        return With(
            lambda m, x: m.outer(torch.tanh(m.linear(x))),
            linear=_hooked(width, "before"),
            outer=nn.Linear(width, width),
        )
    elif where == "clamped":
        layer.bias.register_hook(lambda g: g.sign() * 0.01)
    return nn.Sequential(layer, nn.Tanh())


def _old_weight_norm(width: int) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # (torch has a newer one)
        return nn.utils.weight_norm(nn.Linear(width, width))


def _lora(width: int) -> nn.Module:
    base = nn.Linear(width, width).requires_grad_(False)
    return With(lambda m, x: m.base(x) + x @ m.a @ m.b, base=base, a=parameter(width, 2), b=parameter(2, width))


def _mixed(m: Any, x: Tensor) -> Tensor:
    y = x.to(torch.complex128) @ m.w
    return y.real * 0.5 + y.imag


def _counted(m: Any, x: Tensor) -> Tensor:
    m.mean.mul_(0.9).add_(0.1 * x.detach().flatten(0, -2).mean(0))
    return (x - m.mean) * m.w


def _running(m: Any, x: Tensor) -> Tensor:
    return m.net(x)[0]


def _reentrant(width: int) -> nn.Module:
    part = nn.Sequential(nn.Linear(width, width), nn.Sigmoid())
    return With(lambda m, x: checkpoint(m.part, x * m.w, use_reentrant=True), part=part, w=parameter(width))


def _unregistered(width: int) -> nn.Module:
    layer = With(lambda m, x: x @ m.held["w"] + m.linear(x), linear=nn.Linear(width, width))
    layer.held = {"w": parameter(width, width, scale=0.3)}
    return layer


simple("doubled", lambda n: With(lambda m, x: Doubled.apply(torch.tanh(m.linear(x)), 2.0), linear=nn.Linear(n, n)))
simple("reversed", lambda n: With(lambda m, x: m.linear(Doubled.apply(x, -0.3)), linear=nn.Linear(n, n)))
simple("own-linear", lambda n: With(lambda m, x: OwnLinear.apply(x, m.w), w=parameter(n, n, scale=n**-0.5)))
simple("rounded", lambda n: With(lambda m, x: Rounded.apply(m.linear(x)), linear=nn.Linear(n, n)))
simple("straight", lambda n: With(lambda m, x: x + (torch.sign(x) - x).detach() * m.w, w=parameter(n)))
simple("hook-accumulated", partial(_hooked, where="accumulated"))
simple("hook-before", partial(_hooked, where="before"))
simple("hook-inside", partial(_hooked, where="inside"))
simple("hook-clamped", partial(_hooked, where="clamped"))
simple("old-weight-norm", _old_weight_norm)
simple("dropout-0", lambda n: nn.Sequential(nn.Linear(n, n), nn.Dropout(0.0, inplace=True)))
simple("lora", _lora)
simple("unregistered", _unregistered)
simple("complex-weight", lambda n: With(_mixed, w=parameter(n, n, scale=n**-0.5, dtype=torch.complex128)))
simple("polar", lambda n: With(lambda m, x: (x * torch.polar(torch.ones_like(m.w), m.w)).real + m.w, w=parameter(n)))
simple("changing-buffer", lambda n: With(_counted, w=parameter(n), mean=torch.zeros(n)))
simple("row-loop", lambda n: With(lambda m, x: torch.stack([m.linear(row) for row in x]), linear=nn.Linear(n, n)))
simple("vmap", lambda n: With(lambda m, x: torch.vmap(lambda row: torch.sin(row * m.w))(x), w=parameter(n)))
simple(
    "parameters",
    lambda n: With(lambda m, x: x * m.held[0] + m.held[1], held=nn.ParameterList([parameter(n), parameter(n)])),
)
simple("in-place-views", lambda n: With(lambda m, x: (lambda y: (y[..., :1].mul_(2), y)[1])(x * m.w), w=parameter(n)))
simple("lstm", lambda n: With(_running, net=nn.LSTM(n, n, batch_first=True)), (2,))
simple("two-ways", lambda n: With(_running, net=nn.GRU(n, n // 2 or 1, 2, batch_first=True, bidirectional=n > 1)), (2,))
simple("reentrant", _reentrant)
function("centred", lambda m, x: x - 0.5 * x.mean(0, keepdim=True) * m.w)
function("mixup", lambda m, x: (0.7 * x + 0.3 * x.flip(0)) * m.w)
function(
    "row-attention", lambda m, x: (torch.softmax(x.flatten(1) @ x.flatten(1).T, -1) @ x.flatten(1)).view_as(x) * m.w
)
function("row-scale", lambda m, x: x * m.w / (1 + x.std(unbiased=False)))
function("row-count", lambda m, x: x * m.w * (1 + 0.01 * len(x)))
for _name, _least in (("experts", -math.inf), ("rare-experts", 2.0), ("no-expert", 50.0)):
    simple(_name, partial(Experts, count=3, least=_least), (1, 2))


@kind("heads", (2,))
def _(dice: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Made:
    return Heads(shape[-1], 2) if shape[-1] % 2 == 0 else None


JUMPS = ("rounded", "straight", "experts", "rare-experts")  # numbers that are nearly equal give others
ACROSS_ROWS = ("centred", "mixup", "row-attention", "row-scale", "row-count", "changing-buffer")
models.OUTSIDE += [name for name in models.KINDS if name not in _BEFORE]


def build(spec: models.Spec) -> nn.Sequential:
    """The model of a spec. (A rank that is given this function imports this module, and so knows its kinds.)"""
    return models.build(spec)


# losses ---------------------------------------------------------------------------------------------------------------


def _each(output: Any, y: Tensor) -> tuple[Tensor, Tensor]:
    """The losses of targets, and which of them count: 0 is padding."""
    mask = (y != 0).to(torch.float64)
    return F.cross_entropy(whole_of(output), y, reduction="none") * mask, mask


def own_index(output: Any, y: Tensor) -> Tensor:
    return F.cross_entropy(whole_of(output), y, ignore_index=0)


def masked(output: Any, y: Tensor) -> Tensor:
    each, mask = _each(output, y)
    return each.sum() / mask.sum()


def sum_and_count(output: Any, y: Tensor) -> tuple[Tensor, Tensor]:
    each, mask = _each(output, y)
    return each.sum(), mask.sum()


def real_targets(y: Tensor) -> Tensor:
    return (y != 0).sum()


def class_weights(output: Any, y: Tensor) -> Tensor:
    o = whole_of(output)
    return F.cross_entropy(o, y, weight=torch.linspace(1, 2, o.shape[1], dtype=o.dtype))


def with_output(output: Any, y: Tensor) -> Tensor:
    o = whole_of(output)
    return F.cross_entropy(o, y, label_smoothing=0.1) + 0.1 * o.logsumexp(-1).square().mean()


def contrastive(output: Any, y: Tensor) -> Tensor:
    o = F.normalize(whole_of(output), dim=-1)
    return F.cross_entropy(o @ o.T, torch.arange(len(o)))


def root(output: Any, y: Tensor) -> Tensor:
    return F.mse_loss(whole_of(output), y).sqrt()


def two_tasks(output: Any, y: Tensor) -> Tensor:
    error, mask = whole_of(output) - y, y > 1
    return error.square().mean() + (error.abs() * mask).sum() / mask.sum().clamp(min=1)


def total(output: Any, y: Tensor) -> Tensor:
    return 0.1 * F.mse_loss(whole_of(output), y, reduction="sum")


def by_size(output: Any, y: Tensor) -> Tensor:
    """A mean of rows with weights of their own, which is a mean over rows."""
    return ((whole_of(output) - y).abs() * (1 + y.abs())).mean()


models.LOSSES |= {
    "own-index": (own_index, "padded"), "masked": (masked, "padded"), "sum-and-count": (sum_and_count, "padded"),
    "declared": (losses.weighted(own_index, count=real_targets), "padded"), "class-weights": (class_weights, "classes"),
    "weights": (nn.CrossEntropyLoss(label_smoothing=0.2), "classes"), "with-output": (with_output, "classes"),
    "contrastive": (contrastive, "classes"), "root": (root, "numbers"), "two-tasks": (two_tasks, "numbers"),
    "total": (total, "numbers"), "by-size": (by_size, "numbers"), "huber": (models.l1, "numbers"),
}  # fmt: skip


# optimizers -----------------------------------------------------------------------------------------------------------


class Lamb(torch.optim.Optimizer):
    """Each parameter moves by a part of its own norm (You et al., 2019, without the moments)."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def length(self, p: nn.Parameter) -> Any:
        return p.norm() / (p.grad.norm() + 1e-3)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * (group["lr"] * self.length(p)))


class Together(Lamb):
    """SGD whose step has a length of its own: it looks at the norm of all gradients."""

    def length(self, p: nn.Parameter) -> Any:
        found = [q.grad for group in self.param_groups for q in group["params"] if q.grad is not None]
        return 1 / (0.1 + sum(g.abs().square().sum() for g in found) ** 0.5)


class Remembering(Lamb):
    """SGD with a step that gets shorter with each gradient that a parameter was given."""

    def length(self, p: nn.Parameter) -> Any:
        self.state[p]["seen"] = self.state[p].get("seen", 0) + 1
        return 1 / self.state[p]["seen"]


def grouped(named_parameters: Any, how: str, lr: float) -> torch.optim.Optimizer:
    """Groups by name and by form, as recipes have them."""
    named = [*named_parameters]
    flat = [p for _, p in named if p.dim() < 2]
    rest = [p for name, p in named if p.dim() >= 2 and not name.startswith("0.")]
    first = [p for name, p in named if p.dim() >= 2 and name.startswith("0.")]
    groups = [{"params": flat, "weight_decay": 0.0}, {"params": rest}, {"params": first, "lr": lr / 3}]
    groups = [group for group in groups if group["params"]]
    if how == "adamw":
        return torch.optim.AdamW(groups, lr=lr / 10, weight_decay=0.1)
    return torch.optim.SGD(groups, lr=lr, momentum=0.9, weight_decay=0.1)


O = torch.optim
OPTIMIZERS: dict[str, Callable[[float], Callable[[Any], O.Optimizer]]] = {
    "sgd": lambda lr: partial(O.SGD, lr=lr), "momentum": lambda lr: partial(O.SGD, lr=lr, momentum=0.9),
    "decay": lambda lr: partial(O.SGD, lr=lr, weight_decay=0.1, momentum=0.8, nesterov=True),
    "foreach": lambda lr: partial(O.SGD, lr=lr, weight_decay=0.1, foreach=True),
    "adamw": lambda lr: partial(O.AdamW, lr=lr / 10, weight_decay=0.1), "adam": lambda lr: partial(O.Adam, lr=lr / 10),
    "amsgrad": lambda lr: partial(O.Adam, lr=lr / 10, amsgrad=True, weight_decay=0.1),
    "adamw-foreach": lambda lr: partial(O.AdamW, lr=lr / 10, foreach=True),
    "rmsprop": lambda lr: partial(O.RMSprop, lr=lr / 10, momentum=0.5, eps=1e-3),
    "adagrad": lambda lr: partial(O.Adagrad, lr=lr, weight_decay=0.1), "nadam": lambda lr: partial(O.NAdam, lr=lr / 10),
    "lamb": lambda lr: partial(Lamb, lr=lr), "together": lambda lr: partial(Together, lr=lr),
    "remembering": lambda lr: partial(Remembering, lr=lr),
    "groups": lambda lr: partial(grouped, how="sgd", lr=lr),
    "groups-adamw": lambda lr: partial(grouped, how="adamw", lr=lr),
}  # fmt: skip
SCHEDULERS: dict[str, Any] = {
    "": None, "halved": partial(O.lr_scheduler.StepLR, step_size=1, gamma=0.5),
    "cosine": partial(O.lr_scheduler.CosineAnnealingLR, T_max=4),
}  # fmt: skip


# plans ----------------------------------------------------------------------------------------------------------------

SHARING: tuple[plans.Words, ...] = (
    {"tp": "2"}, {"tp": "2"}, {"tp": "2"}, {"tp": "2", "sequence_parallel": "true"}, {"context_parallel": "2"},
    {"ep": "2"}, {"tp": "2", "batch_copies": "2"}, {"tp": "2", "annotations": "*=S-1@tp"},
    {"tp": "2", "annotations": "*.weight=S0@tp"},
)  # fmt: skip
ALONE = ("offload_folder", "extra_passes")  # keys that need more than words


def words(dice: random.Random, facts: plans.Facts) -> plans.Words:
    """A plan over all keys: mostly of what goes together, and sometimes of anything."""
    for _ in range(40):
        found = _anything(dice) if dice.random() < 0.15 else _sharing(dice, facts)
        try:
            plan = Plan.parse(plans.text(found))
        except PlanError:
            if dice.random() < 0.02:
                break  # (to see the refusal)
            continue
        if plan.ranks <= plans.MOST_RANKS and plan.pp * (plan.chunks or 1) <= facts.layers:
            break
    return found


def _sharing(dice: random.Random, facts: plans.Facts) -> plans.Words:
    """A plan as `plans` draws them; a third of them with layers that ranks share."""
    found = plans.draw(dice, facts)
    if dice.random() < 0.6:
        return found
    return found | dice.choice(SHARING)


def _anything(dice: random.Random) -> plans.Words:
    """A few keys, each with any of its values."""
    keys = {name: key for name, key in plans_keys().items() if name not in ALONE}
    found = {}
    for name in dice.sample(sorted(keys), dice.randint(2, 6)):
        domain = keys[name].domain
        value = dice.choice([*domain.values, *domain.examples()] or ["2"])
        found[name] = str(value).lower() if isinstance(value, bool) else str(value)
    return found


def plans_keys() -> dict[str, Any]:
    """The keys of a plan, by name."""
    return {one.name: one.metadata["key"] for one in fields(Plan)}
