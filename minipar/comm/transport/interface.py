"""What the rest of `comm` needs of a transport, which carries tensors from rank to rank.

`Gloo`, `LocalTransport` and `Nccl` are the transports. Each fact in which they differ is an attribute or a
method here, so that no caller has to know which of them it has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from minipar.comm.transport.arena import Arena

if TYPE_CHECKING:
    from minipar.comm.transport.sockets import Sockets


class Work(Protocol):
    """An operation under way, as torch's process groups return it."""

    def wait(self) -> object: ...
    def is_completed(self) -> bool: ...


class StreamWork:
    """An operation on a stream of the GPU: `wait` returns at once, and the current stream waits in its place."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def wait(self) -> None:
        self.work.wait()

    def is_completed(self) -> bool:
        return bool(self.work.is_completed())

    def on_stream(self) -> bool:
        """Let the current stream wait, and this thread go on."""
        self.work.synchronize()
        return True


class _Done:
    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True


DONE = _Done()  # for a send that is done at once


class Messages(Protocol):
    """Messages from one rank to another. A peer is a number among all ranks; tensors are contiguous."""

    keeps_memory: bool
    """Whether a send keeps the memory that it still needs. If not, the caller keeps the tensor until it is done."""

    def send(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """Start sending; never blocks. ConnectionError or RuntimeError, here or from `wait`, when the peer is gone."""

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """Start receiving into a tensor of the sent size and dtype: it is filled when `wait` has returned."""

    def warm_up(self, peers: Iterable[int]) -> None:
        """Connect with these ranks now. All ranks call it together, each with those that it exchanges messages with."""


class Transport(ABC):
    """How one rank reaches all others. Every rank of a world makes the same one."""

    name: str
    on_host: bool
    """Whether tensors are in host memory, and the thread that calls `wait` waits for them; else the stream of a GPU."""
    without: str
    """Why groups have no shared memory; "" as long as they have."""

    @property
    @abstractmethod
    def messages(self) -> Messages:
        """Its messages. The first use may wait for all ranks."""

    @property
    def reader(self) -> Sockets | None:
        """The same messages, if a waiting rank reads them itself: it can check whether one is here, or find another one
        first. None: a message arrives sooner if its receive is posted sooner, and its size must be known then."""
        return None

    @abstractmethod
    def process_group(self, members: tuple[int, ...]) -> Any:
        """torch's process group of these ranks, whose collectives are in backend.py. It is made at the first use, which
        waits for all members and which nothing can interrupt."""

    @abstractmethod
    def announcing(self, kind: str, members: tuple[int, ...]) -> Any:
        """gloo's process group in which ranks without shared memory announce their collectives of one kind."""

    @abstractmethod
    def memory(self, kind: str, members: tuple[int, ...]) -> Arena | None:
        """Memory that these ranks share for one kind of collectives; made by all of them together. None: they have
        none, and announce in `announcing`."""

    def lost(self, members: tuple[int, ...]) -> int | None:
        """One of these ranks whose host no longer answers, if that is known. A process group does not notice it."""
        return None

    @property
    def native(self) -> bool:
        """Whether native code may still read or write the tensors of what is under way, after `close`, too."""
        return True

    @abstractmethod
    def close(self, under_way: bool) -> None:
        """Close the messages: what was not delivered is lost. Close process groups too, unless something is
        `under_way`: closing a group waits for that, which may take for ever if a peer has failed."""
