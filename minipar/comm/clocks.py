"""What clocks of several hosts differ by, measured with messages.

    rank 0           12.0 ... 12.4              its own clock
                     ^ ping  | pong: 12.2
    another host   7.0 ............ 7.6         the pong was made about half way: its clock is 12.2 - 7.3 = 4.9 behind

The faster the answer, the less can be wrong: half of the time between ping and pong, whatever way each of them took. So
the fastest of several counts. Ranks of one host have one clock. Clocks also drift, by up to a few parts in a hundred
thousand; so a run measures before and after, and times between are corrected in proportion.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

import torch

from minipar.comm.communicator import Communicator

_TIMES = 12  # pings
_TAG = 0x5FFFFFF0  # none that programs use


class Reading(NamedTuple):
    """At the time `at` of this rank's clock (time.perf_counter) that of rank 0 was `seconds` ahead, with an error of at
    most `error` seconds."""

    at: float
    seconds: float
    error: float


def read(comm: Communicator) -> Reading:
    """Compare this rank's clock with that of rank 0. All ranks call this together."""
    first = [comm.hosts.index(host) for host in comm.hosts]  # the rank that measures for each rank's host
    found = Reading(time.perf_counter(), 0.0, 0.0)
    if len(set(first)) == 1:
        return found
    for rank in sorted(set(first) - {0}):
        if comm.rank == 0:
            _answer(comm, rank)
        elif comm.rank == rank:
            found = min((_ask(comm) for _ in range(_TIMES)), key=lambda one: one.error)
    rows = comm.all_gather([list(found[1:])])
    return Reading(time.perf_counter(), *rows[first[comm.rank]])


def _ask(comm: Communicator) -> Reading:
    pong = torch.zeros(1, dtype=torch.float64)
    begin = time.perf_counter()
    ping = comm.isend(torch.zeros(1), 0, _TAG)
    comm.receive(pong, 0, _TAG)
    end = time.perf_counter()
    ping.wait()
    return Reading(end, pong.item() - (begin + end) / 2, (end - begin) / 2)


def _answer(comm: Communicator, rank: int) -> None:
    ping, pong = torch.zeros(1), torch.zeros(1, dtype=torch.float64)
    for _ in range(_TIMES):
        comm.receive(ping, rank, _TAG)
        pong[0] = time.perf_counter()
        comm.isend(pong, rank, _TAG).wait()


def corrected(times: Iterable[float], before: Reading, after: Reading) -> list[float]:
    """Times of this rank's clock on that of rank 0, by what was read before and after them."""
    if not (before.seconds or after.seconds):
        return list(times)
    slope = (after.seconds - before.seconds) / max(after.at - before.at, 1e-9)
    return [t + before.seconds + (t - before.at) * slope for t in times]
