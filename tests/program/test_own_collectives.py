"""A user's own collectives: the program that a generator of moves makes, and what is refused."""

from __future__ import annotations

import itertools

import pytest

from minipar import PlanError, ProgramError, verify
from minipar.program import collectives
from minipar.program.collectives import direct, ring
from minipar.program.collectives.own import Copy, Reduce, Send, own_program


@pytest.mark.parametrize(
    "collective", ["allreduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce"]
)
def test_it_is_what_the_engines_own_moves_make(collective):
    file = direct if collective == "all_to_all" else ring
    name = "direct" if collective == "all_to_all" else "ring"
    for ranks, root in ((1, 0), (4, 2), (5, 0)):
        known = collectives.program(collective, name, ranks, 1003, root=root)
        mine = own_program(collective, getattr(file, collective), ranks, 1003, root=root)
        assert (mine.ranks, mine.chunks, mine.state, mine.final) == (
            known.ranks,
            known.chunks,
            known.state,
            known.final,
        )
        verify(mine)


def test_another_number_of_chunks():
    def pieces(setting, rank):
        for piece in range(3):
            yield Send([piece], 1) if rank == 0 else Copy([piece], 0)

    verify(made := own_program("broadcast", pieces, 2, 100, chunks=3))
    assert made.chunks == (33, 33, 34)


@pytest.mark.parametrize(
    ("moves", "words"),
    [
        (lambda setting, rank: None, "rank 0: gave None"),
        (lambda setting, rank: ["send"], "rank 0: yields 'send', which is no move"),
        (lambda setting, rank: [Send(0, 1)], "needs a list of chunks, which count from 0 to 1"),
        (lambda setting, rank: [Send(None, 1)], "needs a list of chunks"),
        (lambda setting, rank: [Reduce([2], 1)], "needs a list of chunks"),
        (lambda setting, rank: [Reduce([0.5], 1)], "needs a list of chunks"),
        (lambda setting, rank: [Send([0], 0)], "needs another rank, and they count from 0 to 1"),
        (lambda setting, rank: [Send([0], 2)], "needs another rank"),
        (lambda setting, rank: [Send([0], "1")], "needs another rank"),
        (lambda setting, rank: itertools.repeat(Send([0], 1 - rank)), "does a loop end?"),
    ],
)  # fmt: skip
def test_what_is_no_move(moves, words):
    with pytest.raises(PlanError) as raised:
        own_program("allreduce", moves, 2, 100)
    assert words in str(raised.value)


def test_a_rank_that_is_forgotten_is_named():
    """It has no instruction that could have freed what it lacks."""

    def two_of_three(setting, rank):
        if rank < 2:
            yield Send([0], 1) if rank == 0 else Copy([0], 0)

    with pytest.raises(ProgramError, match=r"rank 2 must end with chunk\(0\), but never has it"):
        verify(own_program("broadcast", two_of_three, 3, 100))
