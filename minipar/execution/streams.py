"""What the executor needs of a rank's device: the time, work beside the computation, and what the host waits for.

On a CPU work is done when its call returns. On a GPU a call only puts work in a queue (a stream), and the host goes on:

    host     F0 | RECV | B0 | ...                the walk runs ahead of the device
    compute  |-- F0 --|......|-- B0 --|          kernels; here the stream waits for the message, and the host does not
    recv 1        |---- message ----|            a receive that was posted ahead fills its buffer meanwhile

So the host must wait for nothing that a posted receive is part of: its peer may send only after this rank has gone on.
`torch.cuda.synchronize` waits for every stream, and thereby for such receives.

                    on a CPU (`HostStreams`)           on a GPU (`CudaStreams`)
    mark            a clock reading                    an event on the stream that computes
    ended           None: who waits reads the clock    an event on a stream that waits for these operations alone
    copy            a thread for each line             a stream for each line
    reading         the number                         a copy to pinned memory, which arrives later
    times           the clock readings                 the same, from events and one moment known to both clocks
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from minipar.cluster import threads
from minipar.comm.handles import Handle

Mark = Any  # a clock reading (float), or an event


class Copy(Protocol):
    """A copy under way."""

    def done(self) -> bool: ...
    def result(self) -> None:
        """The host waits for it."""

    def exception(self) -> BaseException | None: ...


@dataclass(frozen=True)
class StreamCopy:
    """A copy on a stream of the device.

    end      the event behind it
    tensors  what it reads and writes: nobody may get their memory before it is done, or followed
    """

    end: Any
    tensors: tuple[Tensor, ...] = ()

    def done(self) -> bool:
        return bool(self.end.query())

    def result(self) -> None:
        self.end.synchronize()

    def exception(self) -> None:
        return None


class Reading(Protocol):
    """A number of the device that the host will know."""

    def known(self) -> bool: ...
    def value(self) -> float:
        """The number; the host waits for it."""


class Streams(Protocol):
    """A rank's device.

    runs_ahead   whether the host goes on while the device works
    """

    runs_ahead: bool

    def begin(self) -> None:
        """A pass begins. The host waits for the device, once, and both clocks are read."""

    def mark(self) -> Mark:
        """The moment at which everything computed so far is done."""

    def ended(self, handles: Sequence[Handle], line: Hashable) -> Mark | None:
        """The moment at which messages or a collective end, which have just begun. Those of one line end in order.
        None: who waits for them knows."""

    def wait(self, mark: Mark) -> None:
        """The host waits for a moment."""

    def times(self, marks: Sequence[Mark]) -> list[float]:
        """Moments as readings of the host's clock (`time.perf_counter`). The host waits for them."""

    def place(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor of the host on the device, of this dtype."""

    def reading(self, number: Tensor | float) -> Reading:
        """A number that the device has, or will have."""

    def copy(self, source: Tensor, into: Tensor, line: str, after: Copy | None = None) -> Copy:
        """Start to copy between device and host beside the computation: behind all that is computed so far, behind the
        copies of the same line, and behind another copy."""

    def follow(self, copy: Copy) -> None:
        """What is computed from now on comes after a copy."""

    def room(self, like: Tensor) -> Tensor:
        """Memory of the host for a tensor, from which and to which `copy` is fast."""

    def give_back(self, room: Tensor, after: Copy | None) -> None:
        """`room` is not needed any more once a copy is done."""

    def close(self) -> None:
        """End threads, and free memory."""


def streams_of(device: torch.device) -> Streams:
    """What a rank on this device uses."""
    return CudaStreams(device) if device.type == "cuda" else HostStreams(device)


def on_host(tensor: Tensor, pinned: bool = True) -> Tensor:
    """A copy of a tensor in the host's memory; of one on a GPU in pinned memory, from which copies need not wait. That
    cannot be resized: for what must be, say `pinned=False`."""
    found = tensor.to("cpu", copy=True)
    return found.pin_memory() if tensor.is_cuda and pinned else found


def synchronize(device: torch.device) -> None:
    """Wait for everything that a device was given. For measurements of one thing alone: a rank that walks a program
    must not call it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# a CPU ----------------------------------------------------------------------------------------------------------------


class _Number(float):
    """A number that the host knows."""

    def known(self) -> bool:
        return True

    def value(self) -> float:
        return float(self)


class HostStreams:
    """A rank that computes on the host's own cores: nothing runs ahead."""

    runs_ahead = False

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")
        self._threads: dict[str, threads.InTurn] = {}
        self.mark: Callable[[], Mark] = time.perf_counter

    def begin(self) -> None: ...

    def ended(self, handles: Sequence[Handle], line: Hashable) -> Mark | None:
        return None

    def wait(self, mark: Mark) -> None: ...

    def times(self, marks: Sequence[Mark]) -> list[float]:
        return marks if isinstance(marks, list) else list(marks)

    def place(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return tensor.to(self.device, dtype or tensor.dtype)

    def reading(self, number: Tensor | float) -> Reading:
        return _Number(number)

    def copy(self, source: Tensor, into: Tensor, line: str, after: Copy | None = None) -> Copy:
        if line not in self._threads:
            self._threads[line] = threads.InTurn(f"copies ({line})")

        def work() -> None:
            if after is not None:
                after.result()
            into.copy_(source)

        found: Future[None] = self._threads[line].submit(work)
        return found

    def follow(self, copy: Copy) -> None:
        copy.result()

    def room(self, like: Tensor) -> Tensor:
        return torch.empty_like(like, device="cpu")

    def give_back(self, room: Tensor, after: Copy | None) -> None: ...

    def close(self) -> None:
        for thread in self._threads.values():
            thread.shutdown()


# a GPU ----------------------------------------------------------------------------------------------------------------


class _Arriving:
    """A number on its way to pinned memory."""

    def __init__(self, place: Tensor, end: torch.cuda.Event) -> None:
        self._place, self._end = place, end

    def known(self) -> bool:
        return bool(self._end.query())

    def value(self) -> float:
        self._end.synchronize()
        return float(self._place)


class CudaStreams:
    """A rank that computes on a GPU, on the stream that is current when it begins."""

    runs_ahead = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._lines: dict[Hashable, torch.cuda.Stream] = {}
        self._pool = PinnedPool(lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True))

    def begin(self) -> None:
        self._base = self.mark()
        self._base.synchronize()
        self._clock = time.perf_counter()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def ended(self, handles: Sequence[Handle], line: Hashable) -> torch.cuda.Event | None:
        # Not the stream that computes: it would wait, and only from the reader on it has to.
        with torch.cuda.stream(self._line(line)):
            followed = [handle.on_stream() for handle in handles]
            return self.mark() if followed and all(followed) else None

    def wait(self, mark: Mark) -> None:
        if not isinstance(mark, float):
            mark.synchronize()

    def times(self, marks: Sequence[Mark]) -> list[float]:
        return [self._time(mark) for mark in marks]

    def _time(self, mark: Mark) -> float:
        if isinstance(mark, float):
            return mark
        mark.synchronize()
        return self._clock + self._base.elapsed_time(mark) / 1e3

    def place(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        tensor = tensor.to(dtype or tensor.dtype)
        # From memory that is not pinned the host would wait for the copy.
        return (tensor.pin_memory() if tensor.device.type == "cpu" else tensor).to(self.device, non_blocking=True)

    def reading(self, number: Tensor | float) -> Reading:
        if not isinstance(number, Tensor) or not number.is_cuda:
            return _Number(number)
        place = torch.empty(number.shape, dtype=number.dtype, pin_memory=True)
        place.copy_(number.detach(), non_blocking=True)
        return _Arriving(place, self.mark())

    def copy(self, source: Tensor, into: Tensor, line: str, after: Copy | None = None) -> StreamCopy:
        stream = self._line(line)
        stream.wait_event(self.mark())  # what makes the source, and who used the memory of `into` before
        if isinstance(after, StreamCopy):
            stream.wait_event(after.end)
        with torch.cuda.stream(stream):
            into.copy_(source, non_blocking=True)
            return StreamCopy(self.mark(), (source, into))

    def follow(self, copy: Copy) -> None:
        if isinstance(copy, StreamCopy):
            torch.cuda.current_stream(self.device).wait_event(copy.end)
        else:
            copy.result()

    def room(self, like: Tensor) -> Tensor:
        return self._pool.take(like.shape, like.dtype)

    def give_back(self, room: Tensor, after: Copy | None) -> None:
        self._pool.give(room, after)

    def close(self) -> None:
        self._pool.clear()

    def _line(self, line: Hashable) -> torch.cuda.Stream:
        if line not in self._lines:
            self._lines[line] = torch.cuda.Stream(self.device)
        return self._lines[line]


class PinnedPool:
    """Buffers of the host that are made once: to pin memory takes longer than to copy it.

    empty   makes a flat tensor of so many bytes
    """

    def __init__(self, empty: Callable[[int], Tensor]) -> None:
        self._empty = empty
        self._free: dict[int, list[tuple[Tensor, Copy | None]]] = {}

    def take(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A tensor in a free buffer of its size, or in a new one."""
        size = shape.numel() * dtype.itemsize
        free = self._free.get(size, [])
        k = next((k for k, (_, last) in enumerate(free) if last is None or last.done()), None)
        buffer = self._empty(size) if k is None else free.pop(k)[0]
        return buffer.view(dtype).view(shape)

    def give(self, tensor: Tensor, after: Copy | None) -> None:
        """Take back what `take` has given; `after`: the last copy that uses it."""
        flat = tensor.view(-1).view(torch.uint8)
        self._free.setdefault(flat.numel(), []).append((flat, after))

    def clear(self) -> None:
        self._free.clear()


# numbers that are looked at later -------------------------------------------------------------------------------------


class Later:
    """Checks of numbers that the device has computed. On a CPU each check runs at once."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._open: list[tuple[Reading, Callable[[float], None]]] = []

    def check(self, number: Tensor | float, call: Callable[[float], None]) -> None:
        """Call `call` with a number, now or in `settle`."""
        reading = self._streams.reading(number)
        if not self._open and reading.known():
            call(reading.value())
        else:
            self._open.append((reading, call))

    def settle(self, wait: bool) -> None:
        """Run the checks of numbers that are known, in order; with `wait` all of them."""
        while self._open and (wait or self._open[0][0].known()):
            reading, call = self._open.pop(0)
            call(reading.value())


def read_all(numbers: Iterable[Tensor | float], streams: Streams) -> list[float]:
    """Numbers of the device; the host waits for them."""
    return [reading.value() for reading in [streams.reading(number) for number in numbers]]
