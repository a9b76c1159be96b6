"""A GPT whose perceptrons are mixtures of experts, as a list of layers: each token goes through a few experts only.

    tokens (B, T) -> [Embedding] -> (x, aux) -> [MixtureBlock] -> ... -> (x, aux) -> [MixtureHead] -> (logits, aux)

x is (B, T, width). aux (B,) is the load-balance loss of each row, summed over the blocks so far. A block's mixture:

    scores (B, T, X) --route--> weights, slots (B, T, top)     which experts, and which place in an expert's queue
    x (B, T, width) --dispatch--> sent (X, B * C, width)       each expert's tokens; an empty place is zeros
    sent --experts--> made (X, B * C, width)
    made --combine--> (B, T, width)                            of each token the weighted sum of what its experts made

An expert takes at most C = ceil(capacity * T * top / X) tokens of a row, in the order of the tokens. A later token is
dropped by this expert: it gets nothing from it, and only the residual remains. Each row is routed by itself, so the
results are the same however a batch is split, into micro-batches, over replicas or over the ranks of ep.

Each of route, dispatch and combine is one operator, since which token goes where depends on the data, which the letters
of a sharding rule cannot say. Where ranks share experts (ep), every rank dispatches its own rows. So `sent` is cut in
its second dimension, and experts read it cut in the first one: the all-to-all between them, and the one back, follow.

Sources: Shazeer et al., 2017 (top-k gate); Lepikhin et al., "GShard", 2020 (groups, capacity); Fedus et al., "Switch
Transformers", 2021 (balance loss).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from minipar.errors import PlanError
from minipar.models.initial import initialise
from minipar.models.table import Mixture, check_mixture, room_of
from minipar.models.transformer import Attention

Carried = tuple[Tensor, Tensor]  # x (B, T, width) and aux (B,)


def mixture(
    layers: int = 4,
    width: int = 64,
    heads: int = 4,
    context: int = 64,
    vocab: int = 256,
    experts: int = 8,
    top: int = 2,
    capacity: float = 1.25,
) -> nn.Sequential:
    """A GPT of `layers` blocks with `experts` perceptrons each, of which every token goes to `top`.

    capacity   how many tokens an expert takes of a row, as a multiple of what it gets if all are equally busy

    An `nn.Sequential` of `layers` + 2 layers. Input: tokens (B, T), integers below `vocab`, T at most `context`.
    Output: logits (B, vocab, T) and the balance loss of each row (B,), which `mixture_loss` takes. Initial values come
    from `torch.initial_seed()` and the parameters' names. Errors: `PlanError` for sizes that make no model.
    """
    check_mixture(Mixture(layers, width, heads, context, vocab, experts, top, capacity))
    with torch.random.fork_rng(devices=[]):  # torch first draws values of its own, which are not used
        blocks = [MixtureBlock(width, heads, experts, top, capacity) for _ in range(layers)]
        model = nn.Sequential(Embedding(vocab, context, width), *blocks, MixtureHead(width, vocab))
    initialise(model)
    return model


class Embedding(nn.Module):
    """From tokens (B, T) to their vectors (B, T, width), each plus that of its position, and zeros (B,)."""

    def __init__(self, vocab: int, context: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab, width)
        self.position = nn.Embedding(context, width)

    def forward(self, tokens: Tensor) -> Carried:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return x, torch.zeros_like(x[:, 0, 0])


class MixtureBlock(nn.Module):
    """One transformer block: attention, then the mixture. Each comes after a norm, and is added to the vectors."""

    def __init__(self, width: int, heads: int, experts: int, top: int, capacity: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, fused=True)
        self.norm2 = nn.LayerNorm(width)
        self.mixture = MixtureLayer(width, experts, top, capacity)

    def forward(self, carried: Carried) -> Carried:
        x, aux = carried
        x = x + self.attention(self.norm1(x))[0]
        made, balance = self.mixture(self.norm2(x))
        return x + made, aux + balance


class MixtureLayer(nn.Module):
    """A mixture of perceptrons, (B, T, width) to the same shape, and its balance loss (B,)."""

    def __init__(self, width: int, experts: int, top: int, capacity: float) -> None:
        super().__init__()
        self.top, self.capacity = top, capacity
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = Experts(experts, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        room = room_of(self.capacity, x.shape[1], self.top, self.experts.count)
        weights, slots, balance = torch.ops.minipar.route(self.gate(x), self.top, room)
        sent = torch.ops.minipar.dispatch(x, slots, self.experts.count, room)
        return torch.ops.minipar.combine(self.experts(sent), weights, slots), balance


class Experts(nn.Module):
    """Perceptrons side by side: of each expert its own tokens, (X, tokens, width) to the same shape."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.count = count
        self.up = nn.Parameter(torch.empty(count, width, 4 * width))
        self.down = nn.Parameter(torch.empty(count, 4 * width, width))

    def forward(self, sent: Tensor) -> Tensor:
        return torch.bmm(functional.gelu(torch.bmm(sent, self.up)), self.down)


class MixtureHead(nn.Module):
    """From vectors (B, T, width) to logits (B, vocab, T); the balance loss (B,) goes through."""

    def __init__(self, width: int, vocab: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, vocab, bias=False)

    def forward(self, carried: Carried) -> Carried:
        x, aux = carried
        return self.logits(self.norm(x)).transpose(1, 2), aux.clone()


def mixture_loss(output: Carried, y: Tensor, balance: float = 0.01) -> Tensor:
    """Cross entropy plus `balance` times the balance loss, both means over the tokens that count: a scalar.

    output   logits (B, vocab, T) and the balance loss of each row (B,), as `mixture` gives them
    y        targets (B, T); -100 does not count

    A row's balance loss counts as often as the row has targets. So the loss of a batch is the weighted mean of the
    losses of its parts, as `train` needs it. Where all targets count, this is the plain mean over the rows.
    """
    logits, aux = output
    counted = (y != -100).sum(-1)
    mean = (aux * counted).sum() / counted.sum()
    return functional.cross_entropy(logits, y) + balance * mean


# The three operators --------------------------------------------------------------------------------------------------


def route(scores: Tensor, top: int, room: int) -> tuple[Tensor, Tensor, Tensor]:
    """Which experts each token goes to.

    scores (B, T, X), room: tokens of a row that an expert takes. Returns
    weights (B, T, top)   a softmax over the scores of the experts that the token chose
    slots (B, T, top)     expert * room + place in its queue; -1 where the expert has no place left
    balance (B,)          X * sum over experts of (its share of the choices * its mean probability): 1 if all are
                          equally busy, X if all tokens go to one expert
    """
    best, chosen = scores.topk(top, -1)
    rows, tokens, experts = scores.shape
    choices = functional.one_hot(chosen.reshape(rows, tokens * top), experts)
    place = ((choices.cumsum(1) - 1) * choices).sum(-1).view(rows, tokens, top)
    slots = torch.where(place < room, chosen * room + place, torch.full_like(place, -1))
    share = choices.sum(1).to(scores.dtype) / (tokens * top)
    balance = experts * (share * scores.softmax(-1).mean(1)).sum(-1)
    return best.softmax(-1), slots, balance


def dispatch(x: Tensor, slots: Tensor, experts: int, room: int) -> Tensor:
    """The tokens of each expert: x (B, T, d) and slots (B, T, top) to (X, B * room, d). Empty places are zeros."""
    rows, tokens, width = x.shape
    top, queues = slots.shape[-1], experts * room
    # Which token is in each place: of an empty one a token behind the last. What is dropped goes behind the last place.
    where = torch.where(slots < 0, torch.full_like(slots, queues), slots).view(rows, tokens * top)
    numbers = torch.arange(tokens, device=x.device).repeat_interleave(top).expand(rows, -1)
    token = slots.new_full((rows, queues + 1), tokens).scatter(1, where, numbers)[:, :-1]
    token = token + torch.arange(rows, device=x.device)[:, None] * (tokens + 1)
    token = token.view(rows, experts, room).transpose(0, 1).reshape(-1)
    padded = functional.pad(x, (0, 0, 0, 1)).view(rows * (tokens + 1), width)
    return padded.index_select(0, token).view(experts, rows * room, width)


def combine(made: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
    """What each token gets: made (X, B * room, d), weights and slots (B, T, top) to (B, T, d)."""
    rows, tokens, top = slots.shape
    experts, queue, width = made.shape
    room, row = queue // rows, torch.arange(rows, device=slots.device).view(rows, 1, 1)
    taken = slots.clamp(min=0)
    where = taken // room * queue + row * room + taken % room
    found = made.reshape(experts * queue, width).index_select(0, where.view(-1)).view(rows, tokens, top, width)
    return (found * (weights * (slots >= 0))[..., None]).sum(2)


_LIBRARY = torch.library.Library("minipar", "FRAGMENT")
_LIBRARY.define("route(Tensor scores, int top, int room) -> (Tensor, Tensor, Tensor)")
_LIBRARY.define("dispatch(Tensor x, Tensor slots, int experts, int room) -> Tensor")
_LIBRARY.define("combine(Tensor made, Tensor weights, Tensor slots) -> Tensor")
for _name, _function in (("route", route), ("dispatch", dispatch), ("combine", combine)):
    _LIBRARY.impl(_name, _function, "CompositeImplicitAutograd")


# How busy the experts are ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """How busy the experts of a mixture are with some rows.

    layers    number of each layer that has experts
    tokens    of each of these layers and each expert, how many tokens chose it
    dropped   how many of them it had no place for
    room      how many tokens it could take
    """

    layers: tuple[int, ...]
    tokens: tuple[tuple[int, ...], ...]
    dropped: tuple[tuple[int, ...], ...]
    room: int

    def __str__(self) -> str:
        width = max((len(f"{n} (-{n})") for counts in self.tokens for n in counts), default=0)
        lines = [f"tokens that chose each expert (dropped by it); an expert takes up to {self.room}"]
        for layer, counts, lost in zip(self.layers, self.tokens, self.dropped, strict=True):
            cells = (f"{n} (-{gone})" if gone else str(n) for n, gone in zip(counts, lost, strict=True))
            shown = "  ".join(f"{cell:<{width}}" for cell in cells)
            lines.append(f"layer {layer:<3} {shown}  {sum(lost) / max(1, sum(counts)):.1%} dropped")
        return "\n".join(line.rstrip() for line in lines)


def mixture_load(model: nn.Sequential, x: Any) -> Load:
    """How many tokens go to each expert of each layer of a mixture, and how many of them are dropped.

    x   tokens (B, T), as the model takes them

    `minipar.trace.charts.expert_load` draws it. Errors: `PlanError` for a model without experts.
    """
    found: list[tuple[int, MixtureLayer]] = [
        (number, module) for number, layer in enumerate(model) for module in layer.modules()
        if isinstance(module, MixtureLayer)
    ]  # fmt: skip
    if not found:
        raise PlanError("mixture_load: the model has no experts; possible is one such as models.build('gpt-moe-tiny')")
    scored: list[Tensor] = []
    hooks = [layer.gate.register_forward_hook(lambda _, __, scores: scored.append(scores)) for _, layer in found]
    try:
        with torch.no_grad():
            model(x)
    finally:
        for hook in hooks:
            hook.remove()
    tokens, dropped, room = [], [], 0
    for (_, layer), scores in zip(found, scored, strict=True):
        own = room_of(layer.capacity, scores.shape[1], layer.top, layer.experts.count)
        _, slots, _ = route(scores, layer.top, own)
        chosen = scores.topk(layer.top, -1)[1]
        tokens.append(_counts(chosen, layer.experts.count))
        dropped.append(_counts(chosen[slots < 0], layer.experts.count))
        room = own * len(scores)
    return Load(tuple(number for number, _ in found), tuple(tokens), tuple(dropped), room)


def _counts(chosen: Tensor, experts: int) -> tuple[int, ...]:
    return tuple(chosen.flatten().bincount(minlength=experts).tolist())
