"""Tasks of lesson 14b: attention over a sequence that several ranks share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from minipar_course.exercises.kinds.built import Exchanged
from minipar_course.exercises.kinds.formula import Formula
from minipar_course.exercises.kinds.function import Function

HEADS, WIDTH = 4, 8

# Exercise 1: who gets which blocks ------------------------------------------------------------------------------------


def zigzag(ranks: int) -> list[list[int]]:
    """Of 2 * ranks blocks of a causal sequence: those of each rank, one from the beginning and one from the end."""
    return [[rank, 2 * ranks - 1 - rank] for rank in range(ranks)]


def _unbalanced(given: Any, ranks: int) -> str:
    """A block attends to itself and to all blocks before it: block b costs b + 1 (and half of one less)."""
    dealt = [list(row) for row in given]
    if len(dealt) != ranks:
        return f"gives blocks for {len(dealt)} ranks"
    if sorted(block for row in dealt for block in row) != list(range(2 * ranks)):
        return f"gives {dealt}: each of the blocks 0 to {2 * ranks - 1} must be there once"
    work = [sum(block + 0.5 for block in row) for row in dealt]
    most = max(work) / (sum(work) / ranks)
    late = work.index(max(work))
    return "" if most < 1.001 else f"is right, but wasteful: rank {late} computes {most:.2f} times the mean"


BLOCKS = Function(
    "blocks(ranks)",
    ((2,), (3,), (4,), (8,)),
    problem=_unbalanced,
    mistakes=(
        (
            lambda ranks: [[2 * r, 2 * r + 1] for r in range(ranks)],
            "neighbours: the last rank attends to everything, and the others wait for it",
        ),
        (
            lambda ranks: [[r, r + ranks] for r in range(ranks)],
            "better, but both blocks of the last rank are late ones",
        ),
        (lambda ranks: [[r, ranks - 1 - r] for r in range(ranks)], "there are 2 * ranks blocks: count from both ends"),
    ),
    hint="give each rank one block from the beginning, and one as far from the end",
)

# Exercises 2 and 3: attention on real ranks -------------------------------------------------------------------------


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each token attends to all: (..., tokens, width)."""
    return torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), -1) @ v


def parts(ranks: int, tokens: int) -> list[Tensor]:
    """For each rank queries, keys and values of its tokens, as one tensor (3, heads, tokens of the rank, width)."""
    generator = torch.Generator().manual_seed(tokens)
    whole = 4 * torch.randn(3, HEADS, tokens, WIDTH, dtype=torch.float64, generator=generator)
    return [part.clone() for part in whole.chunk(ranks, 2)]


def _of_rank(given: list[Tensor], rank: int) -> Tensor:
    return attention(*torch.cat(given, 2)).chunk(len(given), 1)[rank]


def _own_only(given: list[Tensor], rank: int) -> Tensor:
    return attention(*given[rank])


def _mean_of_parts(given: list[Tensor], rank: int) -> Tensor:
    """Each block's own softmax, and then the mean."""
    return torch.stack([attention(given[rank][0], k, v) for _, k, v in given]).mean(0)


def _not_rescaled(given: list[Tensor], rank: int) -> Tensor:
    """Each block's exp() counted from its own maximum."""
    q, tops, sums = given[rank][0], [], []
    for _, k, v in given:
        scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH)
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        tops.append(weights @ v)
        sums.append(weights.sum(-1, keepdim=True))
    return torch.stack(tops).sum(0) / torch.stack(sums).sum(0)


def _task(
    name: str, allowed: set[str], sent: Callable[[int, int], float], praise: str, wasteful: str, hint: str,
    mistakes: Sequence[tuple[Callable[[list[Tensor], int], Tensor], str]],
) -> Exchanged:  # fmt: skip
    return Exchanged(
        f"{name}(x)", ((2, 8), (4, 16)), _of_rank, sent, frozenset(allowed), praise, wasteful,
        ((_own_only, "each token must attend to the tokens of all ranks, not only of its own"), *mistakes),
        hint=hint, tensors=parts,
    )  # fmt: skip


RING = _task(
    "ring_attention",
    {"send", "recv"},
    lambda ranks, nbytes: (ranks - 1) * nbytes * 2 / 3,
    "keys and values go around once, and no rank ever holds those of more than two",
    "a rank passes on the keys and values that it just used: each block makes p - 1 steps, and queries stay",
    "for each block that comes: new maximum, old sums times exp(old maximum - new), add; at the end divide",
    (
        (_mean_of_parts, "a mean of softmaxes is no softmax: keep sums of exp(), and divide once, at the end"),
        (_not_rescaled, "when the maximum grows, what was summed before must be multiplied by exp(old - new)"),
    ),
)
ULYSSES = _task(
    "ulysses",
    {"all_to_all"},
    lambda ranks, nbytes: nbytes * 4 / 3 * (ranks - 1) / ranks,
    "of each of four tensors (p - 1)/p goes out: the more ranks, the less each sends",
    "one all-to-all for queries, keys and values together, one for the output: nothing goes to all",
    "before: cut the heads into p parts, send each to its rank; join what comes along the tokens; after: the same back",
    (
        (
            lambda given, rank: _of_rank(given, (rank + 1) % len(given)),
            "these are another rank's tokens: join what comes in the order of the ranks, both times",
        ),
        (
            lambda given, rank: _of_rank([torch.roll(one, 1, 1) for one in given], rank),
            "the heads come back in another order: join them by the rank that they come from",
        ),
    ),
)

# Exercise 4: who sends more -------------------------------------------------------------------------------------------

RATIO = Formula(
    ("ranks",),
    lambda p: p / 2,
    ((2,), (4,), (8,), (16,)),
    (
        (lambda p: p, "all-to-alls carry four tensors, queries, keys, values and the output; the ring two"),
        (lambda p: 1 / 2, "in a ring a rank sends p - 1 times all of its block, in an all-to-all p - 1 parts of p"),
        (lambda p: 2 * (p - 1) / p, "that is what a ring sends, in parts of the whole sequence: divide by the other's"),
    ),
    judge_name="the count",
    hint="with n numbers in a tensor of all tokens: the ring 2 (p - 1) n / p, the all-to-alls 4 (p - 1) n / p / p",
)

__all__ = ["BLOCKS", "RATIO", "RING", "ULYSSES", "attention", "parts", "zigzag"]
