"""The exercises of lesson 05: reference solutions pass; stubs and plausible mistakes fail, and the reason is given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from minipar.program.collectives.own import Copy, Move, Reduce, Send, Setting
from minipar_course.exercise import check
from minipar_course.exercises import collectives as tasks


def stub(*arguments: object) -> Any:
    raise NotImplementedError("your code here")


def empty(setting: Setting, rank: int) -> Iterator[Move]:
    yield from ()


ALL = [tasks.RING_TIME, tasks.BROADCAST, tasks.RING, tasks.TWO_NODES]


@pytest.mark.parametrize("task", ALL)
def test_a_stub_is_told_that_nothing_is_written(task):
    verdict = check(stub, task)
    assert not verdict
    assert "nothing is written here yet" in verdict.reason


@pytest.mark.parametrize("task", ALL[1:])
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (empty, "no rank makes a move"),
        (lambda setting, rank: iter([Send(0, 1 - min(rank, 1))]), "needs a list of chunks"),
        (3, "3 is no function"),
    ],
)
def test_what_is_no_collective(task, answer, words):
    verdict = check(answer, task)
    assert not verdict
    assert words in verdict.reason
    assert verdict.hint


# the formula


def test_the_formula_of_the_ring():
    assert check(lambda p, n, a, b: 2 * (p - 1) * (a + n / p * b), tasks.RING_TIME)
    for formula, hint in tasks.RING_TIME.mistakes:
        assert check(formula, tasks.RING_TIME).hint == hint
    assert not check(lambda p, n, a, b: 6.6, tasks.RING_TIME)


# a broadcast


def doubling(setting: Setting, rank: int) -> Iterator[Move]:
    p, place, reach = setting.ranks, (rank - setting.root) % setting.ranks, 1
    while reach < p:
        if place < reach and place + reach < p:
            yield Send([0], (rank + reach) % p)
        elif reach <= place < 2 * reach:
            yield Copy([0], (rank - reach) % p)
        reach *= 2


def one_by_one(setting: Setting, rank: int) -> Iterator[Move]:
    if rank != setting.root:
        yield Copy([0], setting.root)
    else:
        yield from (Send([0], other) for other in range(setting.ranks) if other != rank)


def powers_only(setting: Setting, rank: int) -> Iterator[Move]:
    p, place, reach = setting.ranks, (rank - setting.root) % setting.ranks, 1
    while reach < p:
        yield Send([0], (rank + reach) % p) if place < reach else Copy([0], (rank - reach) % p)
        reach *= 2


def forgets_some(setting: Setting, rank: int) -> Iterator[Move]:
    if rank < 2:
        yield Send([0], 1) if rank == 0 else Copy([0], 0)


def test_the_reference_broadcast_passes():
    verdict = check(doubling, tasks.BROADCAST)
    assert verdict
    assert "3.3 ms of at most 3.3 ms" in verdict.reason


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (one_by_one, "takes 7.1 ms; the target is 3.3 ms", "rank 0 sends most: 7 tensors in 7 messages"),
        (powers_only, "with 8 ranks", "Send"),
        (forgets_some, "rank 2 must end with chunk(0), but never has it", "follow"),
    ],
)
def test_other_broadcasts_are_told_why(answer, reason, hint):
    verdict = check(answer, tasks.BROADCAST)
    assert not verdict
    assert reason in verdict.reason
    assert hint in verdict.hint


# the ring


def ring(setting: Setting, rank: int, again: type = Copy, first: type = Reduce, forget: int = 0) -> Iterator[Move]:
    p = setting.ranks
    right, left = (rank + 1) % p, (rank - 1) % p
    for step in range(p - 1):
        yield Send([(rank - 1 - step) % p], right)
        yield first([(rank - 2 - step) % p], left)
    for step in range(p - 1 - forget):
        yield Send([(rank - step) % p], right)
        yield again([(rank - 1 - step) % p], left)


def wrong_chunk(setting: Setting, rank: int) -> Iterator[Move]:
    for move in ring(setting, rank):
        yield move if isinstance(move, Send) else move._replace(chunks=[(c + 1) % setting.ranks for c in move.chunks])


def test_the_reference_ring_passes():
    verdict = check(ring, tasks.RING)
    assert verdict
    assert "6.6 ms of at most 6.6 ms; 1.75 tensors" in verdict.reason.replace(",", ";")


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (lambda s, r: ring(s, r, again=Reduce), "counts rank 0's 2 times", "added twice"),
        (wrong_chunk, "receive order differs from send order", "with the same chunks"),
        (lambda s, r: ring(s._replace(ranks=4), r), "with 2 ranks", "Send(chunks, to)"),
    ],
)
def test_other_rings_are_told_why(answer, reason, hint):
    verdict = check(answer, tasks.RING)
    assert not verdict
    assert reason in verdict.reason
    assert hint in verdict.hint


# two nodes


def two_nodes(setting: Setting, rank: int, whole: bool = False) -> Iterator[Move]:
    size = setting.ranks // 2
    node, place = divmod(rank, size)
    right, left = node * size + (place + 1) % size, node * size + (place - 1) % size
    other = (rank + size) % setting.ranks

    def chunks(k: int) -> list[int]:
        return [k % size, k % size + size]

    for step in range(size - 1):
        yield Send(chunks(place - 1 - step), right)
        yield Reduce(chunks(place - 2 - step), left)
    if whole:
        yield Send(chunks(place), other)
        yield Reduce(chunks(place), other)
    else:
        mine, theirs = place + node * size, place + (1 - node) * size
        yield Send([theirs], other)
        yield Reduce([mine], other)
        yield Send([mine], other)
        yield Copy([theirs], other)
    for step in range(size - 1):
        yield Send(chunks(place - step), right)
        yield Copy(chunks(place - 1 - step), left)


def test_the_reference_for_two_nodes_passes():
    verdict = check(two_nodes, tasks.TWO_NODES)
    assert verdict
    assert "3.36 ms of at most 3.4 ms" in verdict.reason
    assert "1.88 tensors in memory of at most 1.9" in verdict.reason


def test_a_flat_ring_sends_too_much_between_nodes():
    verdict = check(ring, tasks.TWO_NODES)
    assert not verdict
    assert "takes 14.05 ms; the target is 3.4 ms" in verdict.reason
    assert "Between the nodes, where links are slow, go 3.5 tensors" in verdict.hint


def test_faster_but_with_too_much_memory():
    verdict = check(lambda setting, rank: two_nodes(setting, rank, whole=True), tasks.TWO_NODES)
    assert not verdict
    assert "holds 2 tensors at once; the target is 1.9" in verdict.reason
    assert "let less come at a time" in verdict.hint


def test_right_in_one_size_only():
    def eight(setting: Setting, rank: int) -> Iterator[Move]:
        yield from two_nodes(setting._replace(ranks=8), rank)

    verdict = check(eight, tasks.TWO_NODES)
    assert not verdict
    assert "with 4 ranks on 2 nodes" in verdict.reason
