"""The exercises of lesson 05: plausible mistakes fail, and the reason is given."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from minipar.program.collectives.own import Copy, Move, Reduce, Send, Setting
from minipar_course.exercise import check
from minipar_course.exercises import collectives as tasks


def empty(setting: Setting, rank: int) -> Iterator[Move]:
    yield from ()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (empty, "no rank makes a move"),
        (lambda setting, rank: iter([Send(0, 1 - min(rank, 1))]), "needs a list of chunks"),
        (3, "3 is no function"),
    ],
)
def test_what_is_no_collective(answer, words):
    verdict = check(answer, tasks.BROADCAST)
    assert not verdict
    assert words in verdict.reason
    assert verdict.hint


# a broadcast


def one_by_one(setting: Setting, rank: int) -> Iterator[Move]:
    if rank != setting.root:
        yield Copy([0], setting.root)
    else:
        yield from (Send([0], other) for other in range(setting.ranks) if other != rank)


def forgets_some(setting: Setting, rank: int) -> Iterator[Move]:
    if rank < 2:
        yield Send([0], 1) if rank == 0 else Copy([0], 0)


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (one_by_one, "takes 7.1 ms; the target is 3.3 ms", "rank 0 sends most: 7 tensors in 7 messages"),
        (forgets_some, "rank 2 must end with chunk(0), but never has it", "follow"),
    ],
)
def test_other_broadcasts_are_told_why(answer, reason, hint):
    verdict = check(answer, tasks.BROADCAST)
    assert not verdict
    assert reason in verdict.reason
    assert hint in verdict.hint


# the ring


def ring(setting: Setting, rank: int, again: type = Copy) -> Iterator[Move]:
    p = setting.ranks
    right, left = (rank + 1) % p, (rank - 1) % p
    for step in range(p - 1):
        yield Send([(rank - 1 - step) % p], right)
        yield Reduce([(rank - 2 - step) % p], left)
    for step in range(p - 1):
        yield Send([(rank - step) % p], right)
        yield again([(rank - 1 - step) % p], left)


def wrong_chunk(setting: Setting, rank: int) -> Iterator[Move]:
    for move in ring(setting, rank):
        yield move if isinstance(move, Send) else move._replace(chunks=[(c + 1) % setting.ranks for c in move.chunks])


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (lambda s, r: ring(s, r, again=Reduce), "counts rank 0's 2 times", "added twice"),
        (wrong_chunk, "receive order differs from send order", "with the same chunks"),
    ],
)
def test_other_rings_are_told_why(answer, reason, hint):
    verdict = check(answer, tasks.RING)
    assert not verdict
    assert reason in verdict.reason
    assert hint in verdict.hint


# two nodes


def whole_between_nodes(setting: Setting, rank: int) -> Iterator[Move]:
    """Both ranks of a place send all that they have of it, and not each the half that the other one sums."""
    size = setting.ranks // 2
    node, place = divmod(rank, size)
    right, left = node * size + (place + 1) % size, node * size + (place - 1) % size
    other = (rank + size) % setting.ranks

    def chunks(k: int) -> list[int]:
        return [k % size, k % size + size]

    for step in range(size - 1):
        yield Send(chunks(place - 1 - step), right)
        yield Reduce(chunks(place - 2 - step), left)
    yield Send(chunks(place), other)
    yield Reduce(chunks(place), other)
    for step in range(size - 1):
        yield Send(chunks(place - step), right)
        yield Copy(chunks(place - 1 - step), left)


def test_a_flat_ring_sends_too_much_between_nodes():
    verdict = check(ring, tasks.TWO_NODES)
    assert not verdict
    assert "takes 14.05 ms; the target is 3.4 ms" in verdict.reason
    assert "Between the nodes, where links are slow, go 3.5 tensors" in verdict.hint


def test_faster_but_with_too_much_memory():
    verdict = check(whole_between_nodes, tasks.TWO_NODES)
    assert not verdict
    assert "holds 2 tensors at once; the target is 1.9" in verdict.reason
    assert "let less come at a time" in verdict.hint
