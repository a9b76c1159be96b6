"""`Launched`: the processes that torchrun started are the ranks, on one machine or many.

    torchrun --nnodes 2 --nproc-per-node 4 script.py      script.py calls train(...), as it does anywhere else

    rank 0      runs the script as a driver does, and its own share of every function as a rank
    the others  reach the same call of train(...), and run what rank 0 sends, until its call ends; then they return what
                rank 0 returns, or raise what it raises

So all processes go through the script in the same way, and what they do not share (files, progress, warnings) is rank
0's. `driven` makes such a call of a function.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import cloudpickle

from minipar.cluster import agreement, failures, launch, light_torch, worker
from minipar.cluster.far import LINGER, Driver, FarRank, accept, connect
from minipar.cluster.members import unpack
from minipar.cluster.parcel import Parcel, pack
from minipar.cluster.ranks import Call, Ranks
from minipar.errors import PlanError, RankError

P = ParamSpec("P")
T = TypeVar("T")

_PATIENCE = 300.0  # seconds until all ranks have to be at the same call for the first time


def started() -> bool:
    """Whether torchrun started this process, which is not inside a function that a rank runs."""
    return "TORCHELASTIC_RUN_ID" in os.environ and not agreement.missing() and not worker.in_rank()


def speaks() -> bool:
    """Whether this process prints what all of them would print: rank 0 of torchrun, or any other process."""
    return not started() or os.environ["RANK"] == "0"


def refuse(what: str) -> None:
    """RankError where torchrun has started the ranks already, so that `what` is not needed."""
    if started():
        raise RankError(
            f"{what} cannot be made under torchrun, whose {os.environ['WORLD_SIZE']} processes are the ranks; leave "
            "cluster= out, or use cluster=minipar.Launched.here()"
        )


class Launched(Ranks):
    """The processes that torchrun started, as ranks. `Launched.here()` gives it, the same one at every call.

    All processes make the same calls in the same order: those of `train`, `evaluate`, ... and of the methods here. Each
    returns what rank 0 returns, and raises what rank 0 raises. Ranks use torch's threads as torchrun set them
    (OMP_NUM_THREADS), and a GPU each where all can have one (see agreement.py).

    A few things of a `Cluster` are not here. Ranks emulate no device. One that dies is not started again by itself
    (`on_death=continue` is refused). And nobody looks for deadlocks: a plan is proved to have none before it runs, but
    functions of your own that wait for each other do so until torch's groups give up after 30 minutes, or for ever.

    Raises PlanError where hosts differ in their devices; RankDied where a process does not come.
    """

    def __init__(self) -> None:
        light_torch.postpone_compiler()
        import torch

        agreed = agreement.agree()
        self.rank, self.size = agreed.rank, agreed.size
        self.size_hint = (
            f"torchrun started {self.size} (WORLD_SIZE); give it another --nnodes or --nproc-per-node, or another plan"
        )
        self.device, self.threads = agreed.device.partition(":")[0], torch.get_num_threads()
        self.carrier = "nccl" if agreed.backend == "nccl" else "local"
        self._leading = False  # whether rank 0 is in a call that the others know of
        self._driver: Driver | None = None
        self._far: FarRank | None = None
        token = bytes.fromhex(agreed.token)
        if agreed.rank == 0:
            launch.tend(launch.scratch_folder())  # torchrun may kill this process
            with socket.create_server((agreed.addresses[0], 0), backlog=agreed.size) as listener:
                agreed.store.set("control", str(listener.getsockname()[1]))
                controls = accept(listener, token, range(1, agreed.size), _PATIENCE)
            self._driver = Driver(controls, agreed.size, "with --max-restarts torchrun starts all ranks again")
            self._driver.sit(agreed.device, agreed.backend)
        else:
            port = int(agreed.store.get("control"))
            control = connect((agreed.addresses[0], port), token, agreed.rank, _PATIENCE)
            self._far = FarRank(control, agreed.rank, agreed.size, agreed.device, agreed.backend)
            _be_silent(self._far)

    @staticmethod
    def here() -> Launched:
        """That of this process. RankError where torchrun did not start it, or inside a function that a rank runs."""
        global _here
        if worker.in_rank():
            raise RankError("Launched.here() inside a rank: call it in the script, outside of functions that ranks run")
        if _here is None:
            _here = Launched()
        return _here

    def __repr__(self) -> str:
        return f"Launched(rank {self.rank} of {self.size}, {self.device})"

    def end_rank(self, rank: int) -> None:
        """RankError: only torchrun ends its processes."""
        raise RankError(f"rank {rank} hangs, and only torchrun can end it")

    def perform(self, call: Call) -> list[Any]:
        if call.revivals:
            raise PlanError("on_death=continue: torchrun cannot start one rank again; possible is on_death=abort")

        def lead() -> list[Any]:
            assert self._driver is not None
            return self._driver.perform(call)

        return lead() if self._leading else self.on_rank_0("Launched.run", lead)

    def on_rank_0(self, name: str, call: Callable[[], T]) -> T:
        """What `call()` gives on rank 0, on all ranks. The others run what it needs of them meanwhile; their own `call`
        is not called. `name` must be the same everywhere.

        Raises, on all ranks, what it raises on rank 0; RankError where ranks differ in `name`.
        """
        if self._driver is not None:
            return self._lead(self._driver, name, call)
        assert self._far is not None
        found: T = _follow(self._far, name)
        return found

    def _lead(self, driver: Driver, name: str, call: Callable[[], T]) -> T:
        if self._leading:
            return call()  # (the others are in the outer call)
        driver.begin_call(name)
        self._leading = True
        try:
            result = call()
            end = "result", _packed(name, result)
        except BaseException as error:
            end = "error", _packed_error(error)
            raise
        finally:
            self._leading = False
            driver.tell(("end", *end))
        return result


def _packed(name: str, result: Any) -> Parcel:
    try:
        return pack(result, inside=True)
    except Exception as error:
        raise RankError(f"what {name} returned cannot be sent to the other ranks: {failures.said(error)}") from error


def _packed_error(error: BaseException) -> Parcel:
    with contextlib.suppress(Exception):
        return Parcel(cloudpickle.dumps(error))
    return Parcel(cloudpickle.dumps(RankError(f"rank 0 raised {failures.said(error)}")))


def _follow(far: FarRank, name: str) -> Any:
    """On another rank than 0: take part in its call until that ends."""
    rank = far.seat.context.rank
    with _shown_elsewhere():
        leads = far.await_call()
    if leads != name:
        wrong = RankError(
            f"rank 0 is at {leads}, and rank {rank} at {name}: under torchrun every process makes the same calls of "
            "minipar in the same order"
        )
        far.seat.send(("error", -1, failures.capture(wrong, hide=__file__)))
        with _shown_elsewhere():
            raise wrong
    with _shown_elsewhere():
        _, kind, parcel = far.serve()
        value = unpack(parcel, f"what {name} gave on rank 0")
        if kind == "error":
            raise value
    return value


@contextlib.contextmanager
def _shown_elsewhere() -> Iterator[None]:
    """What is raised here need not be shown: rank 0 or torchrun tells it."""
    try:
        yield
    except BaseException as error:
        error._shown_by_rank_0 = True  # type: ignore[attr-defined]
        raise


def _be_silent(far: FarRank) -> None:
    """Show no traceback of an error that rank 0 shows, too, and end after it: see `FarRank.await_end`."""
    before = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if getattr(error, "_shown_by_rank_0", False):
            far.await_end()
        else:
            before(kind, error, trace)

    sys.excepthook = show


def await_rank_0() -> None:
    """On another rank that ends with an error which rank 0 has, too: wait until that has ended, for torchrun ends all
    processes as soon as one of them fails."""
    if _here is not None and _here._far is not None:
        _here._far.await_end()
    else:
        time.sleep(LINGER)


_here: Launched | None = None


def given_or_here(cluster: Ranks | None) -> Ranks | None:
    """The ranks that were given; else those of torchrun, if it started this process; else None."""
    return Launched.here() if cluster is None and started() else cluster


def driven(function: Callable[P, T]) -> Callable[P, T]:
    """Under torchrun, rank 0 calls the function, and the other ranks run what it needs of them; all return what rank 0
    returns. Elsewhere the function is called as it is."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not started():
            return function(*args, **kwargs)
        return Launched.here().on_rank_0(function.__qualname__, lambda: function(*args, **kwargs))

    return call
