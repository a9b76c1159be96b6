"""A small GPT as a list of layers: embedding, blocks, head.

tokens (B, T) -> [Embed] -> (B, T, width) -> [Block] -> ... -> [Block] -> (B, T, width) -> [Head] -> (B, vocab, T)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from minipar.errors import PlanError
from minipar.models.initial import initialise
from minipar.models.selective_checkpoint import Recomputed
from minipar.models.sliced import Sliced
from minipar.models.table import GPT, check_gpt

Seen = tuple[Tensor, Tensor]  # keys and values


def gpt(
    layers: int = 4,
    width: int = 64,
    heads: int = 4,
    context: int = 64,
    vocab: int = 256,
    tied: bool = False,
    dropout: float = 0.0,
    fused: bool = True,
) -> nn.Sequential:
    """A GPT of `layers` transformer blocks: an `nn.Sequential` of `layers` + 2 layers (embedding, blocks, head).

    Input: tokens (B, T), integers below `vocab`, T at most `context`. Output: logits (B, vocab, T), as
    `torch.nn.functional.cross_entropy(output, targets)` takes them for targets (B, T). The batch is the first dimension
    of every value in between, so it can be split anywhere.

    `tied`: the head's weight is the same Parameter object as the token embedding. `dropout`: the probability in the
    `nn.Dropout`s after the embedding, and after the attention and the MLP of each block; with 0 there are none.
    `fused`: attention by one kernel, which keeps no scores; otherwise attention as in the paper, so that
    checkpoint=selective
    saves memory. Initial values come from `torch.initial_seed()` and the parameters' names.
    Errors: `PlanError` for sizes that make no model, or a text longer than `context`.
    """
    check_gpt(GPT(layers, width, heads, context, vocab, tied, dropout))
    with torch.random.fork_rng(devices=[]):  # torch first draws values of its own, which are not used
        embed = Embed(vocab, context, width, dropout)
        blocks = [Block(width, heads, dropout, fused) for _ in range(layers)]
        head = Head(width, vocab)
    if tied:
        head.logits.weight = embed.token.weight
    model = nn.Sequential(embed, *blocks, head)
    initialise(model)
    return model


class Embed(Sliced):
    """From tokens (B, T) to vectors (B, T, width): the token's vector plus its position's vector."""

    def __init__(self, vocab: int, context: int, width: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab, width)
        self.position = nn.Embedding(context, width)
        self.dropout = _dropout(dropout)

    carries = False

    def forward_slice(self, x: Tensor, start: int, carry: None) -> tuple[Tensor, None]:
        end, context = start + x.shape[1], self.position.num_embeddings
        if end > context:
            raise PlanError(f"text of {end} tokens: this model's context is {context}")
        where = torch.arange(start, end, device=x.device)
        return self.dropout(self.token(x) + self.position(where)), None


class Block(Sliced):
    """One transformer block, (B, T, width) to the same shape: attention, then the MLP. Each comes after a norm, and is
    added to the block's vectors.

    Its carry is the keys and values of all tokens so far, (B, heads, T, width / heads) each.
    """

    def __init__(self, width: int, heads: int, dropout: float, fused: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, fused)
        self.dropout1 = _dropout(dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout2 = _dropout(dropout)

    def forward_slice(self, x: Tensor, start: int, carry: Seen | None) -> tuple[Tensor, Seen]:
        seen, carry = self.attention(self.norm1(x), carry)
        x = x + self.dropout1(seen)
        return x + self.dropout2(self.mlp(self.norm2(x))), carry


class Attention(nn.Module):
    """Causal self-attention, (B, T, width) to the same shape: position t attends to positions 0 to t.

    For a slice of a text it takes the keys and values of the tokens before, and returns those of all tokens so far.
    """

    def __init__(self, width: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.core = Core() if fused else PlainCore()
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, earlier: Seen | None = None) -> tuple[Tensor, Seen]:
        batch, length, width = x.shape
        query, key, value = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        if earlier is not None:
            key, value = torch.cat([earlier[0], key], 2), torch.cat([earlier[1], value], 2)
        seen = self.core(query, key, value)
        return self.out(seen.transpose(1, 2).reshape(batch, length, width)), (key, value)


class Core(Recomputed):
    """From queries, keys and values (B, heads, T, width / heads) to the attention's result, which has the queries'
    shape.

    For a slice there are only the queries of the last positions. It is one kernel of torch, which keeps one number for
    each row of the T x T scores.
    """

    def compute(self, *inputs: Tensor) -> Tensor:
        query, key, value = inputs
        if query.shape[-2] == key.shape[-2]:
            return functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=~_later(query, key))


class PlainCore(Recomputed):
    """The same as in the paper: scores and their softmax are whole (B, heads, T, T) tensors."""

    def compute(self, *inputs: Tensor) -> Tensor:
        query, key, value = inputs
        scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
        return scores.masked_fill(_later(query, key), float("-inf")).softmax(-1) @ value


def _later(query: Tensor, key: Tensor) -> Tensor:
    """The keys that a query must not attend to, (queries, keys): those after it. The queries are of the last
    positions."""
    length, total = query.shape[-2], key.shape[-2]
    return torch.ones(length, total, dtype=torch.bool, device=query.device).triu(1 + total - length)


class Head(Sliced):
    """From vectors (B, T, width) to logits (B, vocab, T)."""

    carries = False

    def __init__(self, width: int, vocab: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, vocab, bias=False)

    def forward_slice(self, x: Tensor, start: int, carry: None) -> tuple[Tensor, None]:
        return self.logits(self.norm(x)).transpose(1, 2), None


def _dropout(probability: float) -> nn.Module:
    # With probability 0 there is no dropout module, so that one can see whether a model has dropout.
    return nn.Dropout(probability) if probability else nn.Identity()
