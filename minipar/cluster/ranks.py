"""`Ranks`: what training needs of ranks, wherever they are.

Cluster     processes that this driver started, on its machine (local.py)
Launched    processes that torchrun started, on any number of machines; the first one is also the driver (launched.py)

Each of them says how it carries out a `Call`; `Ranks` makes calls of the methods that users know.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from minipar.cluster import worker
from minipar.cluster.output import USUAL, Show
from minipar.costs.device import DeviceSpec
from minipar.errors import PlanError
from minipar.wording import several

Callback = Callable[[int, Any], None]

# Before it computes anything, a rank takes 4 MB of memory, and 4 descriptors of its driver: so many ranks take 16 GB,
# and as many descriptors as a process rarely may have.
MOST_LOCAL = 4096


@dataclass(frozen=True)
class Call:
    """A function to call on ranks, in the order of `ranks`.

    callback    gets what a rank reports
    revivals    how many times a rank that dies is started again, and calls the function again
    show        how what the ranks print is shown
    """

    ranks: Iterable[int]
    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None
    callback: Callback | None = None
    revivals: int = 0
    show: Show = USUAL


class Ranks(ABC):
    """Processes, numbered from 0, that run functions for a driver. A function that is run finds its own number by
    `worker.context()`, and reaches the other ranks by `communicator.create()`. Everything that takes a cluster takes
    any object with these attributes and methods.

    size        the number of ranks
    size_hint   how many they are and, where that helps, how to get others, in words that follow what a plan needs
    device      where they compute: "cpu" or "cuda"
    threads     torch's threads in each of them
    carrier     what carries the tensors of programs: "local" (messages that a waiting rank reads), "gloo" or "nccl"
    emulates    the device that every rank emulates; None if they emulate none
    """

    size: int
    size_hint: str
    device: str
    threads: int
    carrier: str
    emulates: DeviceSpec | None = None

    @abstractmethod
    def end_rank(self, rank: int) -> None:
        """End the process of a rank that hangs; called from a callback of `run_with` or `run_reviving`."""

    @abstractmethod
    def perform(self, call: Call) -> list[Any]:
        """Carry out a call; the results in the order of its ranks. `run` and the others make one."""

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call `function(*args, **kwargs)` on every rank; the results in rank order.

        Functions and classes may come from a notebook cell. What ranks print appears here, line by line.
        When a rank fails, its own exception is raised, with its traceback there as a note; RankDied when its process
        ended; Deadlock when all wait for each other (see `patience`); RankError when an argument or a result cannot
        be sent. After an interrupt the ranks keep their state, except those that the message names.
        """
        return self.perform(Call(range(self.size), function, args, kwargs))

    def run_on(self, ranks: Iterable[int], function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """`run` on these ranks only; the results in the order of `ranks`."""
        return self.perform(Call(ranks, function, args, kwargs))

    def run_with(self, callback: Callback, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """`run`, calling `callback(rank, value)` in the driver for each `worker.report(value)` as it arrives. (Where
        the driver is itself a rank: at the latest when it reports next.)"""
        return self.perform(Call(range(self.size), function, args, kwargs, callback))

    def run_reviving(
        self, revivals: int, callback: Callback, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> list[Any]:
        """`run_with`, but the run goes on when a rank dies: the rank is started again and calls the function again,
        while the others are still in theirs, and `callback` gets a `Revived`. This happens for `revivals` deaths; the
        next one is raised. A rank that was stopped (SIGSTOP) is ended, so that it starts again. It is for ranks that
        use no process groups.

        PlanError for any revivals where the driver has not started the ranks, and cannot start one again.
        """
        return self.perform(Call(range(self.size), function, args, kwargs, callback, revivals))

    @staticmethod
    def report(value: Any) -> None:
        """In a function that a rank runs: send `value` to the callback of `run_with`; it is `worker.report`."""
        worker.report(value)


def check_size(ranks: Ranks | None, count: int, what: str) -> None:
    """PlanError if these ranks are not `count`; `what` needs so many. None: no ranks were given."""
    if ranks is not None and ranks.size != count:
        raise PlanError(f"{what} needs {several(count, 'rank')}, but {ranks.size_hint}")


def check_ranks(ranks: Iterable[int], size: int) -> tuple[int, ...]:
    """Chosen ranks as a tuple; PlanError for one that is not there, or is named twice."""
    chosen = tuple(ranks)
    for rank in chosen:
        if not isinstance(rank, int) or not 0 <= rank < size:
            raise PlanError(f"rank {rank!r}: this Cluster has ranks 0 to {size - 1}")
    if len(set(chosen)) != len(chosen):
        raise PlanError(f"ranks {chosen}: each rank can be named once")
    return chosen
