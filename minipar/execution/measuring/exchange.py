"""What the messages of collectives cost: all ranks of a group send at once, as a collective's program has them do it.

    alone       rank 0 -> rank 1 -> rank 0                   a message while no one else sends
    one         rank 0 -> rank 1 -> rank 2 -> rank 0         a message to the next rank, and one from the one before
    several     the same, several messages in a row          what each further one takes

These are no algorithms: `play` runs them as it runs those. The memory is cold, as gradients are: each call works on
another part of a large tensor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median

import torch

from minipar.comm.communicator import Communicator
from minipar.comm.playing import play
from minipar.costs.rates import Line, fit
from minipar.program import Program
from minipar.program.collectives.moves import Copy, Move, Send, Setting, lay_out

SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 22)  # bytes of a message
SEVERAL = 4
_POOL = 64 << 20  # bytes

Gather = Callable[[list[float]], list[list[float]]]  # every rank's numbers, on all ranks


def exchange(
    comm: Communicator, group: tuple[int, ...], inside: bool, repeats: int, gather: Gather
) -> tuple[Line, Line]:
    """Seconds of one message within a group, and of each further one; all groups of the cluster at once.

    inside   whether this rank's group is complete; the others only wait
    """
    found = {count: _measure(comm, group, inside, repeats, count, gather) for count in (1, SEVERAL)}
    one = fit(list(zip(SIZES, found[1], strict=True)))
    further = [max(1e-9, (b - a) / (SEVERAL - 1)) for a, b in zip(found[1], found[SEVERAL], strict=True)]
    return one, fit(list(zip(SIZES, further, strict=True)))


def message_alone(comm: Communicator, repeats: int, gather: Gather) -> Line:
    """Seconds of a message from rank 0 to rank 1, or back, while the others wait. Of fewer than 2 ranks: nothing."""
    if comm.size < 2:
        return Line(0.0, 0.0)
    pool = torch.zeros(_POOL // 4, device=comm.device)
    times = []
    for size in SIZES:
        parts = pool.split(size // 4)

        def send(k: int, parts: tuple[torch.Tensor, ...] = parts) -> None:
            if comm.rank < 2:
                play(_there_and_back(), comm, parts[k % len(parts)], (0, 1))

        times.append(_time(comm, send, repeats, 1 if size > 1 << 16 else 8, gather) / 2)
    return fit(list(zip(SIZES, times, strict=True)))


def _there_and_back() -> Program:
    """Rank 1 sends back what it received, once it is there."""

    def moves(setting: Setting, rank: int) -> Iterator[Move]:
        there: list[Move] = [Send([0], 1 - rank), Copy([0], 1 - rank)]
        yield from there if rank == 0 else reversed(there)

    return lay_out("there and back", "allreduce", Setting(2), moves, (1,))


def adding(comm: Communicator, repeats: int, gather: Gather) -> Line:
    """Seconds for adding a received piece to its place in cold memory, on all ranks at once."""
    pool, piece = torch.zeros(_POOL // 4, device=comm.device), torch.zeros(max(SIZES) // 4, device=comm.device)
    times = []
    for size in SIZES:
        came = piece[: size // 4]
        places = pool.split(came.numel())

        def add(k: int, came: torch.Tensor = came, places: tuple[torch.Tensor, ...] = places) -> None:
            places[k * 7 % len(places)].add_(came)

        times.append(_time(comm, add, repeats, 1 if size > 1 << 16 else 8, gather))
    return fit(list(zip(SIZES, times, strict=True)))


def _measure(
    comm: Communicator, group: tuple[int, ...], inside: bool, repeats: int, count: int, gather: Gather
) -> list[float]:
    program = _shift(len(group), count)
    pool = torch.zeros(_POOL // 4, device=comm.device)
    times = []
    for size in SIZES:
        parts = pool.split(size // 4 * len(program.chunks))

        def send(k: int, parts: tuple[torch.Tensor, ...] = parts) -> None:
            if inside:
                play(program, comm, parts[k % len(parts)], group)

        times.append(_time(comm, send, repeats, 1 if size > 1 << 16 else 8, gather))
    return times


def _shift(ranks: int, count: int) -> Program:
    """Every rank sends `count` chunks to the next one, in as many messages."""

    def moves(setting: Setting, rank: int) -> Iterator[Move]:
        for k in range(count):
            yield Send([rank * count + k], (rank + 1) % ranks)
        for k in range(count):
            yield Copy([(rank - 1) % ranks * count + k], (rank - 1) % ranks)

    return lay_out("exchange", "allreduce", Setting(ranks), moves, (1,) * (ranks * count))


def _time(comm: Communicator, work: Callable[[int], None], repeats: int, calls: int, gather: Gather) -> float:
    """Seconds of one call on the slowest rank: the median of several runs."""
    times = []
    for k in range(max(3, min(repeats, 20)) + 1):
        comm.barrier()
        start = time.perf_counter()
        for call in range(calls):
            work(k * calls + call)
        if comm.device.type == "cuda":
            torch.cuda.synchronize(comm.device)
        times.append((time.perf_counter() - start) / calls)
    return median(max(column) for column in zip(*gather(times[1:]), strict=True))
