"""A GPT whose perceptrons are mixtures of experts, as a list of layers: each token goes through a few experts only.

    tokens (B, T) -> [Embedding] -> (x, aux) -> [MixtureBlock] -> ... -> (x, aux) -> [MixtureHead] -> (logits, aux)

x is (B, T, width). aux (B,) is the load-balance loss of each row, summed over the blocks so far. A block's mixture:

    scores (B, T, X) --route--> weights, slots (B, T, top)     which experts, and which place in an expert's queue
    x (B, T, width) --dispatch--> sent (X, B * C, width)       each expert's tokens; an empty place is zeros
    sent --experts--> outputs (X, B * C, width)
    outputs --combine--> (B, T, width)                         of each token the weighted sum of what its experts made

An expert takes at most C = ceil(capacity * T * top / X) tokens of a row, in the order of the tokens. A later token is
dropped by this expert: it gets nothing from it, and only the residual remains. Each row is routed by itself, so the
results are the same however a batch is split, into micro-batches, over replicas or over the ranks of ep.

Each of route, dispatch and combine is one operator, since which token goes where depends on the data, which the letters
of a sharding rule cannot say. Where ranks share experts (ep), every rank dispatches its own rows. So `sent` is cut in
its second dimension, and experts read it cut in the first one: the all-to-all between them, and the one back, follow.

With `capacity=None` no token is dropped, and no place is empty. The queues of all experts then lie behind each other,
one for each choice of a token, and `counts` says how long they are:

    scores (B, T, X) --route--> weights, slots (B, T, top)     --count--> counts (B, X), of each row and expert
    x (B, T, width) --dispatch_all--> sent (B * T * top, width)            by expert, then row, then token
    sent --feed_experts--> made --combine_all--> (B, T, width)

There the ranks send each other unequal parts (`program/forms.py`, U0 and U1), after they have told each other `counts`.
Nothing there is about other tokens of the row but the attention. So with `balance=False`, without the balance loss of
whole rows, the layers take sequences slice by slice, and each slice's tokens go to their experts by themselves.

Sources: Shazeer et al., 2017 (top-k gate); Lepikhin et al., "GShard", 2020 (groups, capacity); Fedus et al., "Switch
Transformers", 2021 (balance loss); Wang et al., "Auxiliary-Loss-Free Load Balancing", 2024 (training without one).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula

from minipar.errors import PlanError
from minipar.models.initial import initialise
from minipar.models.nodes import Node
from minipar.models.sliced import Sliced
from minipar.models.table import Mixture, check_mixture, of_whole_rows, room_of
from minipar.models.transformer import Attention, Seen

Carried = tuple[Tensor, Tensor]  # x (B, T, width) and aux (B,)


def mixture(
    layers: int = 4,
    width: int = 64,
    heads: int = 4,
    context: int = 64,
    vocab: int = 256,
    experts: int = 8,
    top: int = 2,
    capacity: float | None = 1.25,
    balance: bool = True,
) -> nn.Sequential:
    """A GPT of `layers` blocks with `experts` perceptrons each, of which every token goes to `top`.

    capacity   how many tokens an expert takes of a row, as a multiple of what it gets if all are equally busy; None: as
               many as choose it, and none is dropped
    balance    whether the balance loss of each row is found; without it there are zeros in its place

    With `capacity=None` and `balance=False` it takes slices of sequences, as `gpt` does.

    An `nn.Sequential` of `layers` + 2 layers. Input: tokens (B, T), integers below `vocab`, T at most `context`.
    Output: logits (B, vocab, T) and the balance loss of each row (B,), which `mixture_loss` takes. Initial values come
    from `torch.initial_seed()` and the parameters' names. Errors: `PlanError` for sizes that make no model.
    """
    check_mixture(Mixture(layers, width, heads, context, vocab, experts, top, capacity, balance))
    with torch.random.fork_rng(devices=[]):  # torch first draws values of its own, which are not used
        blocks = [MixtureBlock(width, heads, experts, top, capacity, balance) for _ in range(layers)]
        model = nn.Sequential(Embedding(vocab, context, width), *blocks, MixtureHead(width, vocab))
    initialise(model)
    return model


class Embedding(Sliced):
    """From tokens (B, T) to their vectors (B, T, width), each plus that of its position, and zeros (B,)."""

    carries = False

    def __init__(self, vocab: int, context: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab, width)
        self.position = nn.Embedding(context, width)

    def forward_slice(self, x: Tensor, start: int, carry: None) -> tuple[Carried, None]:
        embedded = self.token(x) + self.position(torch.arange(start, start + x.shape[1], device=x.device))
        return (embedded, torch.zeros_like(embedded[:, 0, 0])), None


class MixtureBlock(Sliced):
    """One transformer block: attention, then the mixture. Each comes after a norm, and is added to the vectors.

    Its carry is that of `transformer.Block`: keys and values of all tokens so far.
    """

    def __init__(self, width: int, heads: int, experts: int, top: int, capacity: float | None, balance: bool) -> None:
        super().__init__()
        self.balance, self.whole = balance, of_whole_rows(capacity, balance)
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, fused=True)
        self.norm2 = nn.LayerNorm(width)
        self.mixture = MixtureLayer(width, experts, top, capacity)

    def forward_slice(self, x: Carried, start: int, carry: Seen | None) -> tuple[Carried, Seen]:
        vectors, aux = x
        seen, carry = self.attention(self.norm1(vectors), carry)
        vectors = vectors + seen
        mixed, balance = self.mixture(self.norm2(vectors))
        return (vectors + mixed, aux + balance if self.balance else aux.clone()), carry


class MixtureLayer(nn.Module):
    """A mixture of perceptrons, (B, T, width) to the same shape, and its balance loss (B,)."""

    def __init__(self, width: int, experts: int, top: int, capacity: float | None) -> None:
        super().__init__()
        self.top, self.capacity = top, capacity
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = Experts(experts, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        room = room_of(self.capacity, x.shape[1], self.top, self.experts.count)
        weights, slots, balance = torch.ops.minipar.route(self.gate(x), self.top, room)
        if self.capacity is None:
            operators, experts = torch.ops.minipar, self.experts
            counts = operators.count(slots, experts.count)
            sent = operators.dispatch_all(counts, x, slots)
            outputs = operators.feed_experts(counts, sent, experts.up, experts.down)
            return operators.combine_all(counts, outputs, weights, slots), balance
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


class MixtureHead(Sliced):
    """From vectors (B, T, width) to logits (B, vocab, T); the balance loss (B,) goes through."""

    carries = False

    def __init__(self, width: int, vocab: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, vocab, bias=False)

    def forward_slice(self, x: Carried, start: int, carry: None) -> tuple[Carried, None]:
        vectors, aux = x
        return (self.logits(self.norm(vectors)).transpose(1, 2), aux.clone()), None


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


# The operators --------------------------------------------------------------------------------------------------------

Note = Callable[[Tensor, Tensor, int, int], None]  # chosen (B, T, top) and slots, number of experts, room
_NOTING: ContextVar[Note | None] = ContextVar("_NOTING", default=None)  # whom `route` tells where tokens go


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
    note = _NOTING.get()
    if note is not None:
        note(chosen, slots, experts, room)
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


def combine(outputs: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
    """What each token gets: outputs (X, B * room, d), weights and slots (B, T, top) to (B, T, d)."""
    rows, tokens, top = slots.shape
    experts, queue, width = outputs.shape
    room, row = queue // rows, torch.arange(rows, device=slots.device).view(rows, 1, 1)
    taken = slots.clamp(min=0)
    where = taken // room * queue + row * room + taken % room
    found = outputs.reshape(experts * queue, width).index_select(0, where.view(-1)).view(rows, tokens, top, width)
    return (found * (weights * (slots >= 0))[..., None]).sum(2)


# Without a capacity ---------------------------------------------------------------------------------------------------
# Slots are those of `route` with as much room as a row has tokens, T: expert * T + place in the row's queue.


def count(slots: Tensor, experts: int) -> Tensor:
    """How many tokens of each row chose each expert: slots (B, T, top) to (B, X)."""
    rows, tokens, _ = slots.shape
    chosen = (slots // tokens).view(rows, -1)
    return torch.zeros(rows, experts, dtype=slots.dtype, device=slots.device).scatter_add(
        1, chosen, torch.ones_like(chosen)
    )


def dispatch_all(counts: Tensor, x: Tensor, slots: Tensor) -> Tensor:
    """The tokens of all experts, one for each choice, by expert, row and token: x (B, T, d), slots (B, T, top) to
    (B * T * top, d). `counts` (B, X) says how many of them each row and expert has."""
    rows, tokens, width = x.shape
    order = (slots // tokens).flatten().argsort(stable=True)
    return x.reshape(rows * tokens, width).index_select(0, order // slots.shape[-1])


def feed_experts(counts: Tensor, sent: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """What each expert makes of its tokens: counts (B, X) and sent (N, d) in the order of experts to (N, d).

    up (X, d, f), down (X, f, d). An expert without tokens makes nothing, and its gradient is zero.
    """
    parts = zip(sent.split(counts.sum(0).tolist()), up, down, strict=True)
    return torch.cat([functional.gelu(own @ into) @ out for own, into, out in parts])


def feed_experts_back(
    gradient: Tensor, counts: Tensor, sent: Tensor, up: Tensor, down: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of sent, up and down, from that of what the experts made. What is within an expert is computed
    again. It is (N, f), the largest tensor of a layer; nothing else depends on it."""
    sizes = counts.sum(0).tolist()
    of_sent, of_up, of_down = torch.empty_like(sent), torch.empty_like(up), torch.empty_like(down)
    places = of_sent.split(sizes)
    for k, (grad, own) in enumerate(zip(gradient.split(sizes), sent.split(sizes), strict=True)):
        inside = own @ up[k]
        torch.mm(functional.gelu(inside).t(), grad, out=of_down[k])
        back = torch.ops.aten.gelu_backward(grad @ down[k].t(), inside)
        torch.mm(own.t(), back, out=of_up[k])
        torch.mm(back, up[k].t(), out=places[k])
    return of_sent, of_up, of_down


def combine_all(counts: Tensor, outputs: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
    """What each token gets: outputs (B * T * top, d) in the order of `dispatch_all`, weights and slots (B, T, top) to
    (B, T, d). Of `counts` (B, X) it may be given those of more rows."""
    rows, tokens, top = slots.shape
    order = (slots // tokens).flatten().argsort(stable=True)
    where = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
    found = outputs.index_select(0, where).view(rows, tokens, top, outputs.shape[-1])
    return (found * weights[..., None]).sum(2)


_LIBRARY = torch.library.Library("minipar", "FRAGMENT")
_LIBRARY.define("route(Tensor scores, int top, int room) -> (Tensor, Tensor, Tensor)")
_LIBRARY.define("dispatch(Tensor x, Tensor slots, int experts, int room) -> Tensor")
_LIBRARY.define("combine(Tensor made, Tensor weights, Tensor slots) -> Tensor")
_LIBRARY.define("count(Tensor slots, int experts) -> Tensor")
_LIBRARY.define("dispatch_all(Tensor counts, Tensor x, Tensor slots) -> Tensor")
_LIBRARY.define("feed_experts(Tensor counts, Tensor sent, Tensor up, Tensor down) -> Tensor")
_LIBRARY.define("combine_all(Tensor counts, Tensor made, Tensor weights, Tensor slots) -> Tensor")
_LIBRARY.define(
    "feed_experts_back(Tensor gradient, Tensor counts, Tensor sent, Tensor up, Tensor down) -> (Tensor, Tensor, Tensor)"
)
for _function in (route, dispatch, combine, count, dispatch_all, combine_all):
    _LIBRARY.impl(_function.__name__, _function, "CompositeImplicitAutograd")
# Where the experts' tokens begin is known only when they are there. So these two have a gradient of their own, and what
# captures a layer need not look into them.
_LIBRARY.impl("feed_experts", feed_experts, "CompositeExplicitAutograd")
_LIBRARY.impl("feed_experts_back", feed_experts_back, "CompositeExplicitAutograd")
torch.library.register_fake("minipar::feed_experts", lambda counts, sent, up, down: torch.empty_like(sent))
torch.library.register_fake("minipar::feed_experts_back", lambda _, __, *given: tuple(map(torch.empty_like, given)))


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _back(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return None, *torch.ops.minipar.feed_experts_back(gradient, *ctx.saved_tensors)


torch.library.register_autograd("minipar::feed_experts", _back, setup_context=_keep)


@register_flop_formula(torch.ops.minipar.feed_experts)
def _flops(counts: Sequence[int], sent: Sequence[int], up: Sequence[int], *_: Any, **__: Any) -> int:
    return 4 * sent[0] * up[1] * up[2]


@register_flop_formula(torch.ops.minipar.feed_experts_back)
def _flops_back(_: Any, counts: Sequence[int], sent: Sequence[int], up: Sequence[int], *__: Any, **___: Any) -> int:
    return 10 * sent[0] * up[1] * up[2]  # four products of matrices, and one again


# How busy the experts are ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """How busy the experts of a mixture are with some rows.

    layers    number of each layer that has experts
    tokens    of each of these layers and each expert, how many tokens chose it
    dropped   how many of them it had no place for
    room      how many tokens it could take; None: any number, without a capacity
    """

    layers: tuple[int, ...]
    tokens: tuple[tuple[int, ...], ...]
    dropped: tuple[tuple[int, ...], ...]
    room: int | None

    def __str__(self) -> str:
        width = max((len(f"{n} (-{n})") for counts in self.tokens for n in counts), default=0)
        most = "all of them" if self.room is None else f"up to {self.room}"
        lines = [f"tokens that chose each expert (dropped by it); an expert takes {most}"]
        for layer, counts, lost in zip(self.layers, self.tokens, self.dropped, strict=True):
            cells = (f"{n} (-{gone})" if gone else str(n) for n, gone in zip(counts, lost, strict=True))
            shown = "  ".join(f"{cell:<{width}}" for cell in cells)
            lines.append(f"layer {layer:<3} {shown}  {sum(lost) / max(1, sum(counts)):.1%} dropped")
        return "\n".join(line.rstrip() for line in lines)


def routes(layer: nn.Module) -> bool:
    """Whether a layer may send tokens to experts: a node may, since only its graph says what it computes."""
    return isinstance(layer, Node) or any(isinstance(module, MixtureLayer) for module in layer.modules())


class LoadCount:
    """Counts which experts tokens choose while layers are called: `with count.at(layer): layer(x)`."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], _Counted] = {}  # of each layer and each mixture in it
        self._quiet: set[int] = set()  # layers that have no experts
        self._last: dict[int, object] = {}  # of each layer the rows that were counted last

    @contextmanager
    def at(self, layer: int, rows: object = None) -> Iterator[None]:
        """Count what happens within this block as of a layer. `rows` names its rows: the same ones are counted once,
        where a layer is called again on them."""
        if layer in self._quiet or (rows is not None and self._last.get(layer) == rows):
            yield
            return
        called, self._last[layer] = 0, rows

        def note(chosen: Tensor, slots: Tensor, experts: int, room: int) -> None:
            nonlocal called
            tokens = chosen.flatten().bincount(minlength=experts)
            dropped = chosen[slots < 0].bincount(minlength=experts)
            new = _Counted(tokens, dropped, room * len(chosen), room < slots.shape[1])
            key = layer, called
            self._found[key] = self._found[key].plus(new) if key in self._found else new
            called += 1

        before = _NOTING.set(note)
        try:
            yield
        finally:
            _NOTING.reset(before)
        if not called:
            self._quiet.add(layer)

    def load(self, numbers: Sequence[int] = ()) -> Load | None:
        """What was counted; None if there are no experts. `numbers`: of each layer the one to show, if another one."""
        if not self._found:
            return None
        layers, found = zip(
            *((numbers[layer] if numbers else layer, counted) for (layer, _), counted in sorted(self._found.items())),
            strict=True,
        )
        limited = [counted.room for counted in found if counted.limited]
        tokens, dropped = (tuple(tuple(one[k].tolist()) for one in found) for k in range(2))
        return Load(layers, tokens, dropped, max(limited, default=None))


class _Counted(NamedTuple):
    tokens: Tensor
    dropped: Tensor
    room: int
    limited: bool  # whether an expert can have more tokens than room

    def plus(self, other: _Counted) -> _Counted:
        tokens, dropped = self.tokens + other.tokens, self.dropped + other.dropped
        return _Counted(tokens, dropped, self.room + other.room, self.limited or other.limited)


def total(loads: Sequence[Load]) -> Load:
    """The load of some rows and others, or of some layers and others."""
    found: dict[tuple[int, int], list[tuple[int, Load]]] = {}
    for load in loads:
        for k, layer in enumerate(load.layers):
            found.setdefault((layer, load.layers[:k].count(layer)), []).append((k, load))
    every = [parts for _, parts in sorted(found.items())]
    rooms = [sum(load.room or 0 for _, load in parts) for parts in every]
    return Load(
        tuple(layer for layer, _ in sorted(found)),
        tuple(_sums([load.tokens[k] for k, load in parts]) for parts in every),
        tuple(_sums([load.dropped[k] for k, load in parts]) for parts in every),
        max(rooms) or None,
    )


def _sums(rows: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*rows, strict=True)))


def mixture_load(model: nn.Sequential, x: Any) -> Load:
    """How many tokens go to each expert of each layer of a mixture, and how many of them are dropped.

    x   tokens (B, T), as the model takes them

    `minipar.trace.charts.expert_load` draws it. What the ranks of a run counted is `Run.expert_load`. Errors:
    `PlanError` for a model without experts.
    """
    count = LoadCount()
    with torch.no_grad():
        for number, layer in enumerate(model):
            with count.at(number):
                x = layer(x)
    load = count.load()
    if load is None:
        raise PlanError("mixture_load: the model has no experts; possible is one such as models.build('gpt-moe-tiny')")
    return load
