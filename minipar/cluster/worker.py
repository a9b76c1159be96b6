"""What runs inside a rank: its set-up, its loop, and the functions that user code can call there.

A rank reads a `Setup`, answers that it is ready, then runs one function after another until its socket ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from minipar.cluster import failures, notes, stacks, threads, wire
from minipar.cluster.light_torch import postpone_compiler
from minipar.cluster.parcel import Parcel, pack, unpack
from minipar.cluster.processes import (
    LOST_DRIVER,
    end,
    flush_native,
    open_standard_streams,
    tie_grandchildren,
    yield_to_others,
)
from minipar.errors import PlanError, RankError

_IMPORT = "<frozen importlib._bootstrap>"  # where Python imports modules
_COMM = str(Path(__file__).parents[1] / "comm") + os.sep
_SOON = 0.01  # seconds until an interrupt is tried again


@dataclass(frozen=True)
class Setup:
    """The first message to a rank: its number, and the driver's paths and environment, which it takes over."""

    rank: int
    size: int
    device: str  # "auto", "cpu" or "cuda"
    transport: str  # "local" or "gloo"
    threads: int
    path: tuple[str, ...]
    folder: str
    environment: dict[str, str]
    page: str  # the file of its notes


@dataclass(frozen=True)
class Situation:
    """What is new in each run. `generation` changes whenever ranks were replaced or a run failed: groups of an
    earlier generation must not be used again. `active` are the ranks that take part."""

    generation: int
    active: tuple[int, ...]
    store: str = ""  # path of the file where the ranks of this generation meet; "": at torchrun's own store
    port: int = 0  # for users' own process groups; 0: that of torchrun


@dataclass(frozen=True)
class Context:
    """What a rank knows about itself. `device` is "cpu" or "cuda:1". `backend` is "gloo" or "nccl", for tensors on the
    device. `transport` is "local" or "gloo", for tensors on the CPU; "torchrun": `comm` decides. `store`: see
    `Situation`."""

    rank: int
    size: int
    device: str
    backend: str
    transport: str
    generation: int = -1  # (before the first run)
    active: tuple[int, ...] = ()
    store: str = ""


@dataclass(eq=False)
class Seat:
    """The one mutable record of this process as a rank.

    deliver   takes a message for the driver
    far       the driver may be on another machine, so that no memory file can be passed to it
    """

    deliver: Callable[[tuple[Any, ...]], None]
    context: Context
    far: bool = False
    run: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)  # user threads may report while the loop answers
    outdated: Callable[[], None] | None = None
    # When the driver's SIGINT may raise KeyboardInterrupt: at most once in each run, and only while it runs.
    interruptible: bool = False
    holding: bool = False
    missed: bool = False
    taken: int = 0  # the last run whose signal of the driver has come

    def send(self, message: tuple[Any, ...]) -> None:
        """Send one message to the driver. An interrupt waits until that is done: after half a message, the next ones
        could not be read."""
        if threading.get_ident() != threading.main_thread().ident:
            with self.lock:
                self.deliver(message)
            return
        self.holding = True
        try:
            with self.lock:
                self.deliver(message)
        finally:
            self.holding = False
            if self.missed:
                self.missed = False
                self.interrupt()

    def interrupt(self, frame: FrameType | None = None) -> None:
        """Handle SIGINT. A module that is half imported would be unusable for good: its import comes to its end. A
        signal of the driver may be late; one that was for an earlier run does nothing."""
        asked = notes.interrupted()
        of_earlier_run = asked not in (0, self.taken, self.run)
        self.taken = asked
        if of_earlier_run:
            return
        if self.holding:
            self.missed = True
        elif self.interruptible and _imports(frame):
            try:
                threads.start(partial(self._interrupt_again, self.run), "interrupts this rank after an import")
            except RankError:  # no memory for a thread: the import is cut short
                self.interruptible = False
                raise KeyboardInterrupt from None
        elif self.interruptible:
            self.interruptible = False
            _note_cut(frame)
            raise KeyboardInterrupt

    def _interrupt_again(self, run: int) -> None:
        time.sleep(_SOON)
        main = threading.main_thread().ident
        if self.interruptible and self.run == run and main is not None:
            signal.pthread_kill(main, signal.SIGINT)


def _imports(frame: FrameType | None) -> bool:
    """Whether a module is being imported by what runs in a frame."""
    while frame is not None:
        if frame.f_code.co_filename == _IMPORT:
            return True
        frame = frame.f_back
    return False


def _communicates(frame: FrameType | None) -> str:
    """The call of a communicator that what runs in a frame is in the middle of; "" if it is in none."""
    found = ""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_COMM):
            found = frame.f_code.co_name
        frame = frame.f_back
    return found


_rank: Seat | None = None
_cut_short = ""  # the call of this process's communicator in whose middle an interrupt came


def _note_cut(frame: FrameType | None) -> None:
    global _cut_short
    _cut_short = _cut_short or _communicates(frame)


def check_whole() -> None:
    """RankError if an interrupt has cut short a call of this rank's communicator, and the user's code has caught it:
    half a message may be left, or one that nobody reads, and what is received next would be wrong."""
    if _cut_short:
        way_out = "let the function end: the next run makes a new one"
        if _rank is None:
            way_out = "close() it on all ranks, and communicator.create() makes a new one"
        raise RankError(
            f"an interrupt came in the middle of {_cut_short}, after which this communicator is of no use; {way_out}"
        )


def groups_renewed() -> None:
    """This process has another communicator than before."""
    global _cut_short
    _cut_short = ""


def note_interrupts() -> None:
    """In a script of torchrun, which is a rank as a whole: an interrupt in the middle of a call of its communicator is
    remembered from now on. It raises KeyboardInterrupt as before; a handler of the user's own stays."""
    main = threading.current_thread() is threading.main_thread()
    if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _on_interrupt_of_script)


def _on_interrupt_of_script(number: int, frame: FrameType | None) -> None:
    _note_cut(frame)
    signal.default_int_handler(number, frame)


def on_interrupt(_: int, frame: FrameType | None) -> None:
    """The handler of SIGINT in a rank."""
    if _rank is not None:
        _rank.interrupt(frame)


def in_rank() -> bool:
    """Whether this process is a rank of a Cluster (or was forked by one)."""
    return _rank is not None


@contextlib.contextmanager
def seated(seat: Seat) -> Iterator[None]:
    """Be a rank meanwhile: a process that also does other things is one while it runs a function."""
    global _rank
    before, _rank = _rank, seat
    try:
        yield
    finally:
        _rank = before


def context() -> Context:
    """This rank's own number, device and run. RankError outside a rank."""
    if _rank is None:
        raise RankError("this is not a rank: call it in a function given to cluster.run")
    return _rank.context


def when_outdated(call: Callable[[], None]) -> None:
    """Call `call` once, before the first run of the next generation, for which groups must be made again. RankError
    outside a rank."""
    context()
    assert _rank is not None
    _rank.outdated = call


def report(value: Any) -> None:
    """Send `value` to the driver now; it goes to the callback of `cluster.run_with` (and nowhere without one).

    RankError outside a rank, or when the value cannot be pickled.
    """
    context()
    assert _rank is not None
    try:
        parcel = pack(value, _rank.far)
    except Exception as error:
        raise RankError(
            f"report: a {type(value).__name__} cannot be sent to the driver: {failures.said(error)}"
        ) from error
    _rank.send(("report", _rank.run, parcel))


class _DriverGone(Exception):
    """The driver cannot be reached from this process."""


def serve(control: socket.socket) -> None:
    """Be a rank until the driver is gone; never returns."""
    status = 1
    try:
        _serve(control)
    except _DriverGone:
        status = LOST_DRIVER
    except BaseException:  # an error of minipar itself: show it
        traceback.print_exc()
    finally:
        flush()
        end(status)  # and everything that this process has started


def spawned(arguments: list[str]) -> None:
    """A rank as a fresh interpreter, where forking is not wanted: slower to start, otherwise the same.

    arguments   [CONTROL, LIFE, DRIVER_PID]; LIFE is the read end of a pipe that the driver holds open
    """
    control, life, driver = (int(argument) for argument in arguments)
    open_standard_streams()
    _guard(life, control)
    if os.getppid() != driver:
        return  # the driver ended before the guard was there
    yield_to_others()
    postpone_compiler()
    serve(socket.socket(fileno=control))


def _guard(life: int, control: int) -> None:
    """Fork a process that kills this rank's process group, itself included, when the pipe ends. (Nothing that a fork
    would disturb is imported yet.)"""
    if os.fork():
        os.close(life)
        return
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for descriptor in (control, 1, 2):  # by their ends the driver sees that the rank has ended
            os.close(descriptor)
        os.read(life, 1)
        os.killpg(0, signal.SIGKILL)
    finally:
        os._exit(70)


def _serve(control: socket.socket) -> None:
    global _rank
    setup: Setup = _receive(control)
    _take_over(setup, control)
    try:
        device, backend = _choose_device(setup)
    except PlanError as error:
        _send(control, ("refused", 0, error.reason))
        _receive(control)  # the driver stops this rank
    _rank = Seat(partial(_send, control), Context(setup.rank, setup.size, device, backend, setup.transport))
    _rank.send(("ready", 0, device))
    while True:
        run, situation, path, parcel = _receive(control)
        begin(_rank, run, situation)
        os.environ["MASTER_PORT"] = str(situation.port)
        if sys.path != list(path):
            sys.path[:] = path
        kind, answer = run_interruptibly(_rank, parcel)
        del parcel
        flush()
        _rank.send((kind, run, answer))
        del answer


def _receive(control: socket.socket) -> Any:
    try:
        return wire.receive(control)
    except (EOFError, OSError) as error:
        raise _DriverGone(_DriverGone.__doc__) from error


def _send(control: socket.socket, message: tuple[Any, ...]) -> None:
    try:
        wire.send(control, message)
    except OSError as error:
        raise _DriverGone(_DriverGone.__doc__) from error


def _take_over(setup: Setup, control: socket.socket) -> None:
    """Become like a fresh process of the driver, with its folder, module path and environment, and a new `__main__`."""
    signal.signal(signal.SIGINT, on_interrupt)
    # A grandchild must not hold this socket: when the socket ends, the driver concludes that the rank has ended.
    tie_grandchildren(control.close)
    # The streams are made again: those of the zygote were made for other files than the pipes that 1 and 2 are now.
    sys.stdout, sys.stderr = streams()
    faulthandler.enable()
    stacks.answer(notes.attach(setup.page))
    sys.path[:] = setup.path
    os.chdir(setup.folder)
    os.environ.clear()
    os.environ.update(setup.environment)
    rank, size = str(setup.rank), str(setup.size)
    os.environ.update(RANK=rank, WORLD_SIZE=size, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=size, MASTER_ADDR="127.0.0.1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    sys.argv = [""]
    sys.modules["__main__"] = types.ModuleType("__main__")
    random.seed()
    if "numpy.random" in sys.modules:  # forked ranks would all draw the same numbers
        sys.modules["numpy.random"].seed()
    import torch

    torch.set_num_threads(setup.threads)  # the first thing torch does here; a forked pool of threads would hang


def _choose_device(setup: Setup) -> tuple[str, str]:
    if setup.device == "cpu":
        return "cpu", "gloo"
    import torch

    count = torch.cuda.device_count()
    if setup.device == "auto" and count < setup.size:
        return "cpu", "gloo"
    if count == 0:
        raise PlanError("device='cuda': no GPU that torch can use is here; use device='cpu' or device='auto'")
    index = setup.rank % count
    torch.cuda.set_device(index)
    notes.note_device_waits()
    # (in autograd's own thread, which has not used the GPU before; cuBLAS then makes a context, and says so)
    warnings.filterwarnings("ignore", "Attempting to run cuBLAS, but there was no current CUDA context")
    # NCCL refuses two ranks on one GPU; gloo then carries the data through host memory.
    return f"cuda:{index}", "nccl" if count >= setup.size else "gloo"


def begin(rank: Seat, run: int, situation: Situation) -> None:
    """Get ready for a run: what belonged to an earlier generation is closed."""
    if rank.context.generation not in (-1, situation.generation):
        if rank.outdated is not None:
            rank.outdated()
            rank.outdated = None
        groups_renewed()
        _forget_default_group()
    rank.run = run
    rank.context = replace(
        rank.context, generation=situation.generation, active=situation.active, store=situation.store
    )


def _forget_default_group() -> None:
    """After a failure the user's own default group has lost its peers: destroy it, so that `init_process_group` works
    again."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        with contextlib.suppress(Exception):  # (it may be half destroyed)
            dist.destroy_process_group()


def run_interruptibly(rank: Seat, parcel: Parcel) -> tuple[str, Any]:
    """Run the function of a parcel: ("result", parcel) or ("error", failures.Remote). An interrupt ends it like an
    exception of the function, whenever it comes. What it changes of torch's settings ends with it."""
    notes.clear()
    rank.missed = False
    before = _settings()
    try:
        rank.interruptible = True
        if notes.interrupted() == rank.run:  # (the signal came before, or is on its way)
            rank.interruptible = False
            raise KeyboardInterrupt
        answer = _run(rank, parcel)
        rank.interruptible = False
    except KeyboardInterrupt as error:  # it came while the answer was made; a second one cannot come
        answer = "error", failures.capture(error, hide=__file__)
    finally:
        rank.interruptible = False
        notes.clear()
    _restore(before)
    return answer


def _settings() -> tuple[Any, ...]:
    """What torch's own settings are: of this process, and of this thread."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "is_grad_enabled"):
        return ()
    kinds = ("cpu", "cuda") if torch.cuda.is_initialized() else ("cpu",)
    return (
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.get_deterministic_debug_mode(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds},
    )


def _restore(settings: tuple[Any, ...]) -> None:
    """Give torch these settings again. So every call finds those that a new rank has, also on a rank that takes a dead
    one's place, and whatever an interrupt has left inside the beginning or end of one of torch's contexts."""
    if not settings or settings == _settings():
        return
    torch: Any = sys.modules["torch"]
    dtype, device, deterministic, count, grad, autocast = settings
    torch.set_default_dtype(dtype)
    torch.set_default_device(None if device.type == "cpu" else device)  # (None: torch looks at no call)
    torch.set_deterministic_debug_mode(deterministic)
    torch.set_num_threads(count)
    torch.set_grad_enabled(grad)
    for kind, (enabled, autocast_dtype) in autocast.items():
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, autocast_dtype)


def _run(rank: Seat, parcel: Parcel) -> tuple[str, Any]:
    try:
        try:
            function, args, kwargs = unpack(parcel)
        except Exception as error:
            raise RankError(
                f"the function or its arguments cannot be loaded in a rank: {failures.said(error)}"
            ) from error
        result = function(*args, **kwargs)
        try:
            return "result", pack(result, rank.far)
        except Exception as error:
            kind = type(result).__name__
            text = f"the result of rank {rank.context.rank}, a {kind}, cannot be pickled: {failures.said(error)}"
            raise RankError(text) from error
    except BaseException as error:  # a rank survives whatever its function does
        return "error", failures.capture(error, hide=__file__)


def streams() -> tuple[TextIO, TextIO]:
    """New streams of Python that write to the descriptors 1 and 2."""
    out, err = (open(number, "w", 1, "utf-8", "backslashreplace", closefd=False) for number in (1, 2))  # noqa: SIM115
    return out, err


def flush() -> None:
    """Write out what this process has printed, in Python and in native code."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # user code closed or replaced it
            stream.flush()
    flush_native()
