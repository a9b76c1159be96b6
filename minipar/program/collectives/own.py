"""A collective of your own: a generator of moves, as in the files beside this one, becomes a Program.

def mine(setting, rank):                          setting.ranks, setting.root, setting.nodes
    yield Send([rank], (rank + 1) % setting.ranks)
    ...

own_program("allreduce", mine, 4, 1 << 20)        verify it, simulate it, draw it, play it on tensors
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from minipar.errors import PlanError
from minipar.program import Program
from minipar.program.collectives.moves import (
    Algorithm,
    Copy,
    Move,
    Moves,
    Reduce,
    Send,
    Setting,
    lay_out,
    sizes_of,
    usual,
)
from minipar.wording import several

__all__ = ["Copy", "Move", "Reduce", "Send", "Setting", "own_program"]

MOST = 10_000  # largest number of moves of a rank: a generator that never ends must not hang a notebook


def own_program(
    collective: str,
    moves: Moves,
    ranks: int,
    nbytes: int,
    *,
    root: int = 0,
    nodes: int = 1,
    chunks: int | None = None,
) -> Program:
    """The program of a collective on `ranks` ranks that the user's generator `moves(setting, rank)` describes.

    chunks   how many chunks the tensor is cut into; default one for each rank (in an all_to_all one for each pair of
             ranks, in a broadcast and a reduce only one)
    The other arguments are those of `collectives.program`. The program is not verified. Errors: PlanError for a value
    that is no move, or a move that names a chunk or a rank that does not exist; and whatever the generator raises.
    """
    setting = Setting(ranks, root, nodes)
    built = algorithm(collective, moves, chunks)
    name, sizes = f"{collective} by hand, {several(ranks, 'rank')}", sizes_of(collective, setting, built, nbytes)
    return lay_out(name, collective, setting, built.moves[collective], sizes)


def algorithm(collective: str, moves: Moves, chunks: int | None = None) -> Algorithm:
    """The user's moves as an algorithm for one collective. Each move that they yield is checked."""

    def count(collective: str, setting: Setting) -> int:
        return usual(collective, setting) if chunks is None else chunks

    def checked(setting: Setting, rank: int) -> Iterator[Move]:
        built: Any = moves(setting, rank)
        if not isinstance(built, Iterable):
            raise PlanError(f"rank {rank}: gave {built!r}; moves are yielded: `yield Send([0], 1)`")
        for k, move in enumerate(islice(built, MOST + 1)):
            if k == MOST:
                raise PlanError(f"rank {rank}: yields more than {MOST} moves; does a loop end?")
            yield _checked(move, rank, setting.ranks, count(collective, setting))

    return Algorithm({collective: checked}, None, count)


def joined(first: Algorithm, second: Algorithm) -> Algorithm:
    """One algorithm that has the collectives of both. Where both have one, the second algorithm's is used."""

    def count(collective: str, setting: Setting) -> int:
        return (second if collective in second.moves else first).chunks(collective, setting)

    return Algorithm({**first.moves, **second.moves}, None, count)


def _checked(move: Any, rank: int, ranks: int, chunks: int) -> Move:
    """The move, with its chunks as a tuple. Errors: PlanError if it is no valid move."""
    if not isinstance(move, (Send, Reduce, Copy)):
        raise PlanError(f"rank {rank}: yields {move!r}, which is no move; possible are Send, Reduce, Copy")
    named, peer = move
    if not isinstance(named, Sequence) or not all(isinstance(c, int) and 0 <= c < chunks for c in named):
        raise PlanError(f"rank {rank}: {move} needs a list of chunks, which count from 0 to {chunks - 1}")
    if not isinstance(peer, int) or not 0 <= peer < ranks or peer == rank:
        raise PlanError(f"rank {rank}: {move} needs another rank, and they count from 0 to {ranks - 1}")
    return type(move)(tuple(named), peer)
