"""`Ranks`: what training needs of ranks, wherever they are.

Cluster     processes that this driver started, on its machine (local.py)
Launched    processes that torchrun started, on any number of machines; the first one is also the driver (launched.py)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from minipar.costs.device import DeviceSpec
from minipar.errors import PlanError
from minipar.wording import several

Callback = Callable[[int, Any], None]


class Ranks(Protocol):
    """Processes, numbered from 0, that run functions for a driver. A function that is run finds its own number by
    `worker.context()`, and reaches the other ranks by `communicator.create()`.

    Everything that takes a cluster takes any object with these properties and methods.
    """

    @property
    def size(self) -> int:
        """The number of ranks."""

    @property
    def device(self) -> str:
        """Where the ranks compute: "cpu" or "cuda"."""

    @property
    def threads(self) -> int:
        """Torch's threads in each rank."""

    @property
    def carrier(self) -> str:
        """What carries the tensors of programs: "local" (messages that a waiting rank reads), "gloo" or "nccl"."""

    @property
    def emulates(self) -> DeviceSpec | None:
        """The device that every rank emulates; None if they emulate none."""

    @property
    def size_hint(self) -> str:
        """How many ranks there are and, where that helps, how to get others, in words that follow what a plan needs."""

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call `function(*args, **kwargs)` on every rank; the results in rank order. Raises what a rank raises, with
        its traceback there as a note; RankDied when its process ended."""

    def run_on(self, ranks: Iterable[int], function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """`run` on these ranks only; the results in the order of `ranks`."""

    def run_with(self, callback: Callback, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """`run`, calling `callback(rank, value)` in the driver for each `report(value)` of a rank."""

    def run_reviving(
        self, revivals: int, callback: Callback, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> list[Any]:
        """`run_with`, but a rank that dies is started again, for so many deaths. PlanError where that cannot be."""

    def end_rank(self, rank: int) -> None:
        """End the process of a rank that hangs; called from a callback of `run_with` or `run_reviving`."""

    @staticmethod
    def report(value: Any) -> None:
        """In a function that a rank runs: send `value` to the callback of `run_with`."""


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
