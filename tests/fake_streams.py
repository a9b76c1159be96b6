"""A device layer without a device: ranks as threads of one process, whose "GPUs" are streams on a virtual clock.

Tensors are on the CPU (numbers can be compared) or on `meta` (then whoever reads a number on the host fails by itself).
Like a GPU's, messages, collectives and copies only enter a stream; their bytes move at the last moment that is allowed,
which is when somebody waits for them. So whoever reads too early, or frees too early, gets other numbers.

    FakeStreams   what `minipar.execution.streams` asks of a device. It fails (`HostBlocked`) when the host waits for it
                  while a receive is posted and not used: its sender may need this host to go on
    FakeComm      messages and collectives with the order of NCCL: of a pair, or of a group, one after the other
    resolve       the virtual clock: when everything on the tapes ran, or who waits for whom for ever
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minipar.comm.links import TENSORS
from minipar.execution.executor import Executor
from minipar.execution.streams import PinnedPool, StreamCopy, _Number
from minipar.program import Instruction, Op

HEADER = TENSORS - 1  # the tag of a header, which goes through the host, in the tags of a value
COMPUTE = "compute"
EVERYTHING = None


class HostBlocked(AssertionError):
    """The host waits for the device while a receive is posted and not used."""


# the tape of a rank ---------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Event:
    """A moment of a stream. `at`: on the virtual clock, once it is resolved; `bytes`: moves what a copy copies;
    `taken`: of a copy to the host, only reads it."""

    streams: FakeStreams
    at: float | None = None
    bytes: Callable[[], None] = lambda: None
    taken: Callable[[], None] | None = None
    passed: bool = False  # whether somebody who goes on after it has come by

    def reach(self) -> None:
        if not self.passed:
            self.passed = True
            self.bytes()

    def follow(self) -> None:
        """The device goes on after it. The host does not know yet what was copied to it."""
        if self.taken is None:
            self.reach()
        else:
            self.taken()

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.streams.block("for an event", self)
        self.reach()


@dataclass
class FakeStreams:
    """One rank's streams. `tape`: what the host did, in order: (stream, operation), or ("host", what it waits for)."""

    device: torch.device
    strict: bool = True
    tape: list[tuple[Hashable, Any]] = field(default_factory=list)
    outstanding: dict[int, str] = field(default_factory=dict)  # receives that are posted and not used
    runs_ahead = True

    def __post_init__(self) -> None:
        self._pool = PinnedPool(lambda size: torch.empty(size, dtype=torch.uint8, device=self.device))
        self._last: dict[str, list[Event]] = {}
        self._followed: list[Event] = []  # copies to the host

    def put(self, stream: Hashable, *operation: Any) -> None:
        self.tape.append((stream, operation))

    def record(self, stream: Hashable) -> Event:
        event = Event(self)
        self.put(stream, "record", event)
        return event

    def block(self, why: str, event: Event | None) -> None:
        """The host waits for an event, or for everything."""
        if self.strict and self.outstanding:
            raise HostBlocked(
                f"the host waits {why} while {', '.join(self.outstanding.values())} is posted and not used"
            )
        self.tape.append(("host", event))

    def run(self, seconds: float) -> None:
        """The computation takes so long."""
        self.put(COMPUTE, "run", seconds)

    def synchronize(self) -> None:
        """What `torch.cuda.synchronize` does."""
        self.block("for the whole device", EVERYTHING)

    def meet(self, number: int) -> None:
        """The hosts of all ranks wait for each other, as before a pass."""
        self.tape.append(("meet", number))

    # what the executor asks ------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self.mark().synchronize()

    def mark(self) -> Event:
        return self.record(COMPUTE)

    def ended(self, handles: Sequence[Any], line: Hashable) -> Event | None:
        for handle in handles:
            if not handle.on_stream():
                return None
        for handle in handles:
            while hasattr(handle, "_before"):  # (a `Then`)
                handle = handle._before
            self.put(("ends", line), "wait", handle.end)
        return self.record(("ends", line)) if handles else None

    def wait(self, mark: Any) -> None:
        if isinstance(mark, Event):
            mark.synchronize()

    def times(self, marks: Sequence[Any]) -> list[Any]:
        for mark in marks:
            self.wait(mark)
        return list(marks)  # (`resolve` makes numbers of them)

    def place(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return tensor.to(self.device, dtype or tensor.dtype, copy=True)

    def reading(self, number: Any) -> Any:
        return Number(number, self.mark()) if isinstance(number, Tensor) else _Number(number)

    def copy(self, source: Tensor, into: Tensor, line: str, after: Any = None) -> StreamCopy:
        self.put(line, "wait", self.mark())
        if after is not None:
            self.put(line, "wait", after.end)
        self.put(line, "run", 0.25)
        end = self.record(line)
        before = [*self._last.get(line, ()), *([after.end] if after is not None else [])]
        self._last[line], size = [end], source.untyped_storage().nbytes()
        read: list[Tensor] = []
        if line != Op.OFFLOAD.value:  # it comes after all that the computation has followed
            before += self._followed
            self._followed = []

        def take() -> None:
            if not read:
                for event in before:
                    event.follow() if line == Op.OFFLOAD.value else event.reach()
                assert source.untyped_storage().nbytes() == size > 0 or not source.numel(), "freed before it was copied"
                read.append(source.clone())

        def move() -> None:
            take()
            for event in before:  # of the same line, which goes in order
                event.reach()
            into.copy_(read[0])

        end.bytes, end.taken = move, take if line == Op.OFFLOAD.value else None
        return StreamCopy(end, (source, into))

    def follow(self, copy: Any) -> None:
        if not isinstance(copy, StreamCopy):
            return copy.result()
        self.put(COMPUTE, "wait", copy.end)
        self._followed += [copy.end] if copy.end.taken is not None else []
        return copy.end.follow()

    def room(self, like: Tensor) -> Tensor:
        return self._pool.take(like.shape, like.dtype)

    def give_back(self, room: Tensor, after: Any) -> None:
        self._pool.give(room, after)

    def close(self) -> None:
        self._pool.clear()


@dataclass
class Number:
    """A number that is on its way to the host."""

    number: Tensor
    event: Event

    def known(self) -> bool:
        return False

    def value(self) -> float:
        self.event.synchronize()
        return 0.0 if self.number.is_meta else float(self.number)


# messages and collectives ---------------------------------------------------------------------------------------------


class World:
    """What the ranks of one run share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.host: dict[tuple[int, int, int], deque[Tensor]] = defaultdict(deque)
        self.messages: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        self.joined: dict[tuple[tuple[int, ...], int], dict[int, tuple[str, Tensor]]] = defaultdict(dict)
        self.failed: BaseException | None = None

    def until(self, ready: Callable[[], bool], what: str) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: ready() or self.failed is not None, 60):
                raise AssertionError(f"{what} never came")
        if self.failed is not None and not ready():
            raise RuntimeError(f"{what}: another rank has failed") from self.failed

    @contextmanager
    def telling(self) -> Any:
        with self.changed:
            yield
            self.changed.notify_all()


class FakeHandle:
    """What has just begun. `end`: when it ends on its stream; `bytes` moves what it moves."""

    def __init__(self, comm: FakeComm, end: Event | None, bytes: Callable[[], None] = lambda: None) -> None:
        self.comm, self.end, self.bytes, self.over = comm, end, bytes, False

    def wait(self) -> None:
        if self.over:
            return
        self.over = True
        if self.end is not None:
            self.comm.streams.put(COMPUTE, "wait", self.end)
        self.comm.streams.outstanding.pop(id(self), None)
        self.bytes()

    def then(self, call: Callable[[], object]) -> FakeHandle:
        moves = self.bytes

        def both() -> None:
            moves()
            call()

        self.bytes = both
        return self

    def on_stream(self) -> bool:
        return self.end is not None

    def done(self) -> bool:
        return self.over

    def when_done(self, call: Callable[[], None]) -> None:
        raise AssertionError("a callback at the end of an operation on a stream: NCCL calls it when it is queued")


class FakeComm:
    """One rank's communicator, with the interface that the executor uses."""

    posts = True
    backend = "nccl"

    def __init__(self, world: World, rank: int, streams: FakeStreams) -> None:
        self.world, self.rank, self.size, self.streams = world, rank, world.size, streams
        self.device = streams.device
        self.sent: dict[int, int] = defaultdict(int)
        self.received: dict[int, int] = defaultdict(int)
        self.joined: dict[tuple[int, ...], int] = defaultdict(int)
        self.groups: set[tuple[int, ...]] = set()
        self.peers: set[int] = set()

    def prepare(self, members: Iterable[tuple[int, ...]], peers: Iterable[int] = (), *_: Any) -> None:
        self.groups |= set(members)
        self.peers |= set(peers)

    def isend(self, tensor: Tensor, peer: int, tag: int = 0) -> FakeHandle:
        world, way = self.world, (self.rank, peer)
        with world.telling():
            if tag % TENSORS == HEADER:
                world.host[(*way, tag)].append(tensor.clone())
                return FakeHandle(self, None)
            world.messages[way].append(tensor.detach().clone())
        return FakeHandle(self, self._on_pair("send", way, self.sent, peer))

    def irecv(self, tensor: Tensor, peer: int, tag: int = 0) -> FakeHandle:
        world, way = self.world, (peer, self.rank)
        if tag % TENSORS == HEADER:
            return FakeHandle(self, None, partial(self._header, tensor, (*way, tag)))
        k = self.received[peer]

        def move() -> None:
            world.until(lambda: len(world.messages[way]) > k, f"message {k} of {way}")
            came = world.messages[way][k]
            assert (came.shape, came.dtype) == (tensor.shape, tensor.dtype), f"message {k} of {way} is another one"
            tensor.copy_(came)

        handle = FakeHandle(self, self._on_pair("recv", way, self.received, peer), move)
        self.streams.outstanding[id(handle)] = f"the receive of message {k} from rank {peer}"
        return handle

    def _header(self, tensor: Tensor, key: tuple[int, int, int]) -> None:
        self.world.until(lambda: bool(self.world.host[key]), f"header {key}")
        tensor.copy_(self.world.host[key].popleft())

    def _on_pair(self, what: str, way: tuple[int, int], counts: dict[int, int], peer: int) -> Event:
        assert peer in self.peers, "the pair was not prepared"
        stream, k = ("messages", way), counts[peer]
        counts[peer] += 1
        self.streams.put(stream, "wait", self.streams.mark())
        self.streams.put(stream, what, way, k)
        return self.streams.record(stream)

    # collectives -----------------------------------------------------------------------------------------------------

    def _join(
        self, kind: str, given: Tensor, ranks: tuple[int, ...], finish: Callable[[list[Tensor]], None]
    ) -> FakeHandle:
        assert ranks in self.groups, "the group was not prepared"
        k = self.joined[ranks]
        self.joined[ranks] += 1
        world, key = self.world, (ranks, k)
        with world.telling():
            world.joined[key][self.rank] = kind, given.detach().clone()
        stream = ("group", ranks)
        self.streams.put(stream, "wait", self.streams.mark())
        self.streams.put(stream, "join", ranks, k)

        def move() -> None:
            world.until(lambda: len(world.joined[key]) == len(ranks), f"{kind} {k} of {ranks}")
            found = [world.joined[key][rank] for rank in ranks]
            assert len({(what, one.shape, one.dtype) for what, one in found}) == 1, f"{kind} {k} of {ranks} differs"
            finish([one for _, one in found])

        return FakeHandle(self, self.streams.record(stream), move)

    def iallreduce(self, tensor: Tensor, ranks: tuple[int, ...], name: str = "", algorithm: Any = None) -> FakeHandle:
        if len(ranks) == 1:
            return FakeHandle(self, None)
        place = tensor.detach()

        def finish(parts: list[Tensor]) -> None:
            place.copy_(sum(parts[1:], parts[0]))

        return self._join("all_reduce", tensor, ranks, finish)

    def ireduce_scatter(
        self, tensor: Tensor, into: Tensor, ranks: tuple[int, ...], add: bool = False, algorithm: Any = None
    ) -> FakeHandle:
        k, target = ranks.index(self.rank), into.detach().view(-1)

        def finish(parts: list[Tensor]) -> None:
            mine = [part.view(len(ranks), -1)[k] for part in parts]
            target.copy_(sum(mine[1:], mine[0] + target if add else mine[0]))

        return self._join("reduce_scatter", tensor, ranks, finish)

    def iall_gather(
        self, part: Tensor, into: Tensor, ranks: tuple[int, ...], algorithm: Any = None
    ) -> list[FakeHandle]:
        whole = into.detach().view(-1)

        def finish(parts: list[Tensor]) -> None:
            whole.copy_(torch.cat(parts))

        return [self._join("all_gather", part, ranks, finish)]

    def iall_to_all(self, tensor: Tensor, into: Tensor, ranks: tuple[int, ...], sizes: Any = None) -> FakeHandle:
        assert sizes is None
        k, flat = ranks.index(self.rank), into.detach().view(-1)

        def finish(parts: list[Tensor]) -> None:
            flat.copy_(torch.cat([part.view(len(ranks), -1)[k] for part in parts]))

        return self._join("all_to_all", tensor, ranks, finish)


# a run ----------------------------------------------------------------------------------------------------------------


def timed(executor: Executor, streams: FakeStreams, seconds: Callable[[Instruction], float], after: Any) -> None:
    """Let compute instructions take time on the stream that computes; `after` is called behind each of them."""

    def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(ins: Instruction, *rest: Any) -> None:
            call(ins, *rest)
            if ins.stream != "host":
                streams.run(seconds(ins))
                after(streams)

        return run

    for name in ("forward", "backward", "backward_weight"):
        setattr(executor.compute, name, wrap(getattr(executor.compute, name)))
    executor._step = wrap(executor._step)  # type: ignore[method-assign]


def run_ranks(size: int, rank: Callable[[World, int], Any]) -> list[Any]:
    """Run all ranks as threads; the first error is raised."""
    world, found = World(size), [None] * size

    def work(k: int) -> None:
        try:
            found[k] = rank(world, k)
        except BaseException as error:
            with world.telling():
                world.failed = world.failed or error

    threads = [threading.Thread(target=work, args=(k,), daemon=True) for k in range(size)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 120
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if world.failed is not None:
        raise world.failed
    assert not any(thread.is_alive() for thread in threads)
    return found


# the virtual clock ----------------------------------------------------------------------------------------------------


@dataclass
class Device:
    """One rank while its tape is resolved."""

    tape: list[tuple[Hashable, Any]]
    at: int = 0  # on the tape
    host: float = 0.0
    met: int = 0  # how often the hosts have met
    queues: dict[Hashable, deque[tuple[float, Any]]] = field(default_factory=lambda: defaultdict(deque))
    clocks: dict[Hashable, float] = field(default_factory=lambda: defaultdict(float))

    def walk(self) -> bool:
        """Let the host go on as far as it can; returns whether it went on."""
        before = self.at
        while self.at < len(self.tape):
            stream, what = self.tape[self.at]
            if stream == "meet":
                if self.met <= what:
                    break
            elif stream != "host":
                self.queues[stream].append((self.host, what))
            elif what is EVERYTHING:
                if any(self.queues.values()):
                    break
                self.host = max([self.host, *self.clocks.values()])
            elif what.at is None:
                break
            else:
                self.host = max(self.host, what.at)
            self.at += 1
        return self.at > before


def resolve(tapes: Sequence[list[tuple[Hashable, Any]]]) -> list[str]:
    """Give every event its time; messages and collectives take none. Returns what waits for ever."""
    devices = [Device(tape) for tape in tapes]
    meetings: dict[Any, dict[int, float]] = defaultdict(dict)  # who has come to a message or a collective, and when
    over: dict[Any, float] = {}

    def step(rank: int, device: Device, stream: Hashable) -> bool:
        queued, what = device.queues[stream][0]
        now = max(queued, device.clocks[stream])
        if what[0] == "run":
            now += what[1]
        elif what[0] == "record":
            what[1].at = now
        elif what[0] == "wait":
            if what[1].at is None:
                return False
            now = max(now, what[1].at)
        else:
            message = what[0] in ("send", "recv")
            key, wanted = (message, *what[1:]), 2 if message else len(what[1])
            meetings[key][rank] = now
            if key not in over and len(meetings[key]) == wanted:
                over[key] = max(meetings[key].values())
            if key not in over:
                return False
            now = over[key]
        device.queues[stream].popleft()
        device.clocks[stream] = now
        return True

    going = True
    while going:
        going = False
        for device in devices:
            going |= device.walk()
        if all(d.at < len(d.tape) and d.tape[d.at] == ("meet", d.met) for d in devices):
            together, going = max(d.host for d in devices), True
            for device in devices:
                device.host, device.met = together, device.met + 1
        for rank, device in enumerate(devices):
            for stream in list(device.queues):
                while device.queues[stream] and step(rank, device, stream):
                    going = True
    stuck = [f"host of rank {r}" for r, device in enumerate(devices) if device.at < len(device.tape)]
    return stuck + [
        f"rank {r}, {stream}: {queue[0][1][0]}"
        for r, device in enumerate(devices)
        for stream, queue in device.queues.items()
        if queue
    ]
