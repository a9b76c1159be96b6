"""A campaign of faults: `python -m tests.faults.campaign [--count N] [--seed S] [--seconds T] [--write FILE]`.

A case is a training on real ranks by some strategy, and one fault at a random moment of it:

    signal     the driver sends SIGKILL, SIGTERM, SIGSEGV, SIGABRT or SIGSTOP to a rank
    inside     a rank, in a forward, in the loss or in the optimizer: raises, calls sys.exit or os._exit, reaches a
               limit of memory, or finds its descriptors closed
    kind       all of these, as a rank begins an instruction of some kind: F, B, SEND, RECV, ALL_REDUCE, STEP, ...
    save       all of these while the run is being saved, or the disk is full
    button     SIGINT reaches the driver, once or twice
    start      a rank is killed while another one is started again
    close      all of these, or SIGINT, while the cluster is closed
    driver     the driver itself is killed, or a notebook's kernel: as it starts or trains

Of each it is noted whether the error was *explained* (a class of ours or the rank's own exception, the rank by its
number, and the cause), how long it took to arrive, whether the next training on the same cluster gives the losses of an
undisturbed one (*healed*), and what was *left behind*: processes, descriptors, files. A save that was disturbed must be
whole, or not be there. `make soak` runs 1,000 faults in 30 minutes and writes docs/reliability.md; a test
tries three.

Faults of trainings and stop buttons come first, on one cluster with the machine to itself: how long it takes until they
are told is a figure of this page. What is slow and asks for no time (saves, drivers, kernels) comes after them, on two
clusters side by side. Long use and the inputs of parsers come last, beside each other.

A cluster is kept, and healed after each fault. A driver that is to be killed is forked, and not started anew, and so is
a kernel, but for one in ten, which jupyter_client starts: a process spends seconds with imports. Both are killed at a
random moment of their lives, from the first line on.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import multiprocessing
import os
import random
import resource
import signal
import statistics
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from minipar import Cluster, train
from minipar.cluster import notes, worker
from minipar.cluster.processes import die_with_parent, ends
from minipar.errors import MiniparError
from minipar.execution.saving.folder import INDEX, open_folder
from minipar.program import Program
from minipar.training.training import Run

ROOT = Path(__file__).parents[2]
RANKS = 4
STRATEGIES = (
    "dp=4",
    "dp=4 bucket=0.001 overlap=priority",
    "dp=4 zero=1",
    "dp=4 zero=2",
    "dp=4 zero=3",
    "dp=4 compress=bf16",
    "dp=3 sync=ps",
    "dp=4 accumulate=2",
    "pp=4 schedule=gpipe microbatches=4",
    "pp=4 schedule=1f1b microbatches=4",
    "pp=2 chunks=2 dp=2 schedule=interleaved microbatches=4",
    "pp=4 schedule=zb-h1 microbatches=8",
    "pp=4 schedule=chimera microbatches=4",
    "pp=4 schedule=pipedream microbatches=4",
    "pp=4 schedule=ampnet microbatches=4",
    "pp=4 schedule=1f1b microbatches=4 checkpoint=1",
    "dp=2 pp=2 zero=1 microbatches=4",
    "dp=4 offload=activations",
    "tp=4",
    "tp=2 dp=2",
)
# The order in which their updates happen is not the same in each run.
ANY_ORDER = ("pp=4 schedule=ampnet microbatches=4", "dp=3 sync=ps")
SIGNALS = {
    "SIGKILL": signal.SIGKILL,
    "SIGTERM": signal.SIGTERM,
    "SIGSEGV": signal.SIGSEGV,
    "SIGABRT": signal.SIGABRT,
    "SIGSTOP": signal.SIGSTOP,
}
INSIDE = ("raise", "sys.exit", "os._exit", "memory", "descriptors")
PLACES = ("forward", "loss", "optimizer")
SAVE = "save"  # before a file of a save is flushed to the disk
SAVED = ("dp=4 zero=3", "pp=4 schedule=1f1b microbatches=4", "dp=2 pp=2 zero=1 microbatches=4")
# The parts of a campaign, with their shares of the time: faults and stop buttons, of which it is measured when they are
# told; saves, drivers and kernels; long use, and inputs of parsers.
SHARES = {"timed": 0.5, "others": 0.35, "inputs": 0.15}
STEPS, ROWS = 4, 16
BEGUN, TRAINED = SIGNS = ("begun", "trained")  # files by which a driver says how far it is
LIMIT = 60  # seconds for a case
SLOW = 1.2  # seconds; what is told later is printed at once
_TRIES = 4  # to meet a training, save, or place with a fault
PATIENCE = 3.0  # seconds; a stopped rank is only noticed by those who wait for it


class TookTooLong(BaseException):
    """A case did not end."""


class Broken(Exception):
    """What a rank raises in a case "raise"."""


@dataclass
class Trip:
    """Do something bad in one rank, at one place, at the n-th time that it is reached there."""

    what: str = ""
    where: str = ""
    rank: int = -1
    count: int = 0
    reached: int = 0
    stamp: str = ""  # a file for the moment at which it happened

    def __call__(self, where: str) -> None:
        if where != self.where or not worker.in_rank() or worker.context().rank != self.rank:
            return
        self.reached += 1
        if self.reached == self.count:
            Path(self.stamp).write_text(repr(time.monotonic()))
            _do(self.what)


def _do(what: str) -> None:
    if what in SIGNALS:
        os.kill(os.getpid(), SIGNALS[what])
    if what == "raise":
        raise Broken("this was asked for")
    if what == "sys.exit":
        sys.exit(3)
    if what == "os._exit":
        os._exit(3)
    if what == "memory":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**20, resource.RLIM_INFINITY))
        try:
            torch.zeros(2**26).add_(1)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    if what == "descriptors":
        os.closerange(3, 1024)


_note, _fsync = notes.note, os.fsync


def follow(trip: Trip) -> None:
    """Let a trip hear of every instruction that this rank begins, or of every file that it saves, if it waits
    for one."""

    run = worker._rank.run if worker._rank is not None else 0

    def reached(where: str) -> None:
        if worker._rank is not None and worker._rank.run == run:  # (a later run may find this optimizer as it was left)
            trip(where)

    def note(label: bytes) -> None:
        _note(label)
        reached(kind_of(label.decode()))

    def fsync(descriptor: int) -> None:
        reached(SAVE)
        _fsync(descriptor)

    notes.note = note if trip.where and trip.where not in (*PLACES, SAVE) else _note
    os.fsync = fsync if trip.where == SAVE else _fsync


def kind_of(instruction: str) -> str:
    """The first word of an instruction's text, such as ALL_REDUCE."""
    return instruction.split(" ", 1)[0].rstrip("\0")


class Layer(nn.Linear):
    """A layer that trips."""

    def __init__(self, trip: Trip, width: int, out: int) -> None:
        super().__init__(width, out)
        self.trip = trip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.trip("forward")
        return torch.tanh(super().forward(x))


def build(trip: Trip | None, layers: int = 8, width: int = 16) -> list[nn.Module]:
    """Layers; of a plan that divides operators, without a trip inside, because operators are captured there."""
    made: list[nn.Module] = []
    for _ in range(layers):
        made.append(nn.Sequential(nn.Linear(width, width), nn.Tanh()) if trip is None else Layer(trip, width, width))
    return made


def loss(output: torch.Tensor, y: torch.Tensor, trip: Trip) -> torch.Tensor:
    trip("loss")
    return nn.functional.cross_entropy(output, y)


class Descent(torch.optim.SGD):
    """An optimizer that trips."""

    def __init__(self, parameters: Any, trip: Trip) -> None:
        super().__init__(parameters, lr=0.1)
        self.trip = trip
        follow(trip)

    def step(self, closure: Any = None) -> Any:
        self.trip("optimizer")
        return super().step(closure)


def training(cluster: Cluster, plan: str, trip: Trip | None = None, more: int = 0, **given: Any) -> list[float]:
    """Train a few steps, and some more; the losses."""
    return [float(each) for each in trained(cluster, plan, trip, more, **given).losses]


def trained(cluster: Cluster, plan: str, trip: Trip | None = None, more: int = 0, **given: Any) -> Run:
    """Train a few steps, and some more."""
    trip = trip or Trip()
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(ROWS, 16, generator=generator), torch.randint(0, 16, (ROWS,), generator=generator)
    captured = "tp=" in plan
    return train(
        partial(build, None if captured else trip),
        (x, y),
        plan,
        cluster=cluster,
        batch=ROWS,
        steps=STEPS + more,
        loss=partial(loss, trip=trip) if not captured else nn.functional.cross_entropy,
        optimizer=partial(Descent, trip=trip),
        progress=False,
        **given,
    )


def _within_ranks(error: BaseException) -> bool:
    """Whether an error was raised while ranks ran something."""
    return any("_exchange" in frame.name for frame in traceback.extract_tb(error.__traceback__))


def _await_end(pid: int) -> None:
    """Wait until all threads of a process have ended: the first one may be gone while another still has its files."""
    assert ends(pid, LIMIT)


def _await_file(folder: str, name: str) -> None:
    while not os.path.exists(os.path.join(folder, name)):  # (a case has a limit)
        time.sleep(0.005)


# What a case left behind ----------------------------------------------------------------------------------------------


def processes(of: int = 0) -> set[int]:
    """All descendants of a process, or this one, that live."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                parents[int(entry.name)] = int(fields[1])
    found, more = set[int](), {of or os.getpid()}
    while more:
        more = {pid for pid, parent in parents.items() if parent in more} - found
        found |= more
    return found


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# One row of the table -------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What happened in all cases of one kind."""

    name: str
    tried: int = 0
    explained: int = 0
    healed: int = 0
    left: int = 0
    wrong: int = 0
    seconds: list[float] = field(default_factory=list)
    said: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def row(self) -> str:
        median = statistics.median(self.seconds) if self.seconds else 0.0
        worst = max(self.seconds, default=0.0)
        share = f"{100 * self.explained / self.tried:.1f} %" if self.tried else ""
        return (
            f"| {self.name} | {self.tried} | {share} | {median:.2f} s | {worst:.2f} s "
            f"| {self.healed} | {self.left} | {self.wrong} |"
        )


HEAD = (
    "| fault | tried | explained | until the error, median | worst | healed | left behind | wrong |\n"
    "|---|---|---|---|---|---|---|---|"
)
# What the message of a fault must contain, one of each.
CAUSES = {
    "SIGKILL": ("killed", "SIGKILL"),
    "SIGTERM": ("SIGTERM", "terminated"),
    "SIGSEGV": ("SIGSEGV", "segmentation"),
    "SIGABRT": ("SIGABRT", "aborted"),
    "SIGSTOP": ("stopped", "SIGSTOP"),
    "raise": ("this was asked for",),
    "sys.exit": ("exit",),
    "os._exit": ("exit",),
    "memory": ("memory", "allocate"),
    "descriptors": ("descriptor",),
}


def explained(error: BaseException, fault: str, rank: int) -> bool:
    """Whether an error is of our classes or the rank's own, and names the rank and the cause."""
    text = "\n".join([str(error), *getattr(error, "__notes__", [])])
    own = isinstance(error, MiniparError | Broken) or (
        fault == "memory" and isinstance(error, RuntimeError | MemoryError)
    )
    return own and f"rank {rank}" in text and any(word.lower() in text.lower() for word in CAUSES[fault])


class Campaign:
    """Cases, one after another, on clusters that are kept until one does not heal."""

    def __init__(self, seed: int, strategies: tuple[str, ...] = STRATEGIES) -> None:
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts what runs in its background like this
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self.random = random.Random(seed)
        self.strategies = strategies
        self.tallies: dict[str, Tally] = {}
        self.right: dict[str, list[float]] = {}
        self.times: dict[str, float] = {}
        self.saving: dict[str, float] = {}  # seconds of a training that is saved after every step
        self.lives: dict[str, float] = {}  # seconds from the start of a driver to the end of its second training
        self.longer: dict[str, list[float]] = {}  # losses of a training of twice as many steps
        self.programs: dict[str, Program] = {}
        self.kinds: dict[str, list[int]] = {}  # faults at each kind of instruction: tried, explained
        self.cluster = Cluster(RANKS, device="cpu", patience=PATIENCE)
        from jupyter_client.utils import run_sync

        run_sync(asyncio.sleep)(0)  # (clients of kernels share an event loop, which keeps three descriptors open)
        for plan in strategies:
            training(self.cluster, plan)
            began = time.monotonic()
            run = trained(self.cluster, plan)
            self.right[plan], self.programs[plan] = [float(each) for each in run.losses], run.program
            self.times[plan] = time.monotonic() - began
        gc.collect()
        self.processes, self.descriptors = processes(), descriptors()

    def tally(self, name: str) -> Tally:
        return self.tallies.setdefault(name, Tally(name))

    def guarded(self, name: str, given: tuple[Any, ...]) -> None:
        """One case, which is a problem if it does not end in a minute: the others go on, on a new cluster."""

        def late(*_: object) -> None:
            raise TookTooLong(f"no end within {LIMIT} s")

        before = signal.signal(signal.SIGALRM, late)
        signal.alarm(LIMIT)
        try:
            for _ in range(_TRIES):
                if getattr(self, name)(*given) is not False:  # (a fault that came too late was not tried)
                    break
        except BaseException as error:
            tally = self.tally(f"case that failed: {name}")
            tally.tried += 1
            tally.problems.append("".join(traceback.format_exception(error))[-2000:])
            signal.alarm(LIMIT)
            self.cluster.close()
            self.cluster = Cluster(RANKS, device="cpu", patience=PATIENCE)
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)

    def one(self) -> bool:
        """One random fault. Returns whether it came in time."""
        plan, dice = self.random.choice(self.strategies), self.random.random()
        if dice < 0.35:
            return self._signal(plan, self.random.choice(tuple(SIGNALS)))
        if dice < 0.65:
            where = "optimizer" if "tp=" in plan else self.random.choice(PLACES)
            what, rank, count = (
                self.random.choice(INSIDE),
                self.random.randrange(RANKS),
                self.random.randrange(1, STEPS),
            )
            return self.inside(plan, what, rank, where, count) is not None
        return self._at_instruction(plan)

    def _at_instruction(self, plan: str) -> bool:
        """A fault as a rank begins an instruction: of a kind that was not tried often yet."""
        program = self.programs[plan]
        rank = self.random.randrange(program.workers)  # (servers do what comes: they begin no instruction of a list)
        texts = [kind_of(str(ins)) for ins in program.ranks[rank]]
        kind = min(sorted(set(texts)), key=lambda one: (self.kinds.get(one, [0])[0], self.random.random()))
        times = texts.count(kind) * (STEPS // program.steps)
        what = self.random.choice((*INSIDE, *SIGNALS))
        good = self.inside(plan, what, rank, kind, self.random.randint(1, times))
        if good is not None:
            tried, told = self.kinds.get(kind, [0, 0])
            self.kinds[kind] = [tried + 1, told + good]
        return good is not None

    def _signal(self, plan: str, name: str) -> bool:
        rank, after = self.random.randrange(RANKS), self.random.uniform(0, self.times[plan])
        pid = self.cluster.run(os.getpid)[rank]
        sent: list[float] = []

        def send() -> None:
            sent.append(time.monotonic())
            os.kill(pid, SIGNALS[name])

        timer = threading.Timer(after, send)
        error = self._disturbed(plan, None, timer)
        if error is None:  # it came when the training was over: who calls next is told, or finds the rank replaced
            if name == "SIGSTOP":
                error = self._disturbed(plan, None, None)
            else:
                _await_end(pid)
        self._judge(plan, name, rank, error, sent)
        return error is not None

    def inside(self, plan: str, what: str, rank: int, where: str, count: int) -> bool | None:
        """A fault inside a rank. Returns whether it was explained; None if that place was not reached."""
        with tempfile.NamedTemporaryFile() as stamp:
            trip = Trip(what, where, rank, count, stamp=stamp.name)
            error = self._disturbed(plan, trip, None)
            moment = Path(stamp.name).read_text()
        if not moment:  # (a rank without the last layer reaches no loss)
            return None
        if error is None:
            self.tally(what).tried += 1
            self.tally(what).problems.append(f"{what} of rank {rank} at {where} {count}, {plan}: nothing was said")
        return self._judge(plan, what, rank, error, [float(moment)])

    def start(self) -> None:
        """A rank is killed while another one starts again: both are there in the next run."""
        tally = self.tally("SIGKILL during a start")
        pids = self.cluster.run(os.getpid)
        one, other = self.random.sample(range(RANKS), 2)
        os.kill(pids[one], signal.SIGKILL)
        _await_end(pids[one])
        sent: list[float] = []

        def kill() -> None:
            sent.append(time.monotonic())
            os.kill(pids[other], signal.SIGKILL)

        timer = threading.Timer(self.random.uniform(0, 0.06), kill)
        timer.start()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                self.cluster.run(time.sleep, 0.05)
            except MiniparError as error:
                tally.seconds.append(time.monotonic() - sent[0])
                told_of = explained(error, "SIGKILL", other)
            else:
                told_of = any(f"rank {other} " in str(each.message) for each in told)
            timer.join()
            _await_end(pids[other])
            if not told_of:  # it came after the run
                self.cluster.run(_nothing)
                told_of = any(f"rank {other} " in str(each.message) for each in told)
        tally.tried += 1
        tally.explained += told_of
        self._heal(self.random.choice(self.strategies), tally.name, tally)

    def _disturbed(
        self, plan: str, trip: Trip | None, timer: threading.Timer | None, **given: Any
    ) -> tuple[BaseException, float] | None:
        """Train; what was raised, and when. None if the fault came too late, or was not reached."""
        if timer is not None:
            timer.start()
        try:
            training(self.cluster, plan, trip, **given)
        except BaseException as error:
            return error, time.monotonic()
        finally:
            if timer is not None:
                timer.join()
        return None

    def _judge(
        self, plan: str, fault: str, rank: int, found: tuple[BaseException, float] | None, sent: list[float]
    ) -> bool:
        tally, good = self.tally(fault), False
        if found is not None:
            good = self._note_error(tally, plan, fault, rank, found, sent[0])
            del found
        self._heal(plan, fault, tally)
        return good

    def _note_error(
        self, tally: Tally, plan: str, fault: str, rank: int, found: tuple[BaseException, float], sent: float
    ) -> bool:
        """Count what was raised, and when; whether it was explained."""
        error, when = found
        tally.tried += 1
        tally.seconds.append(when - sent)
        if when - sent > SLOW:
            tqdm.write(f"{tally.name} of rank {rank}, {plan}: told after {when - sent:.1f} s: {str(error)[:600]}")
        good = explained(error, fault, rank)
        tally.explained += good
        first = str(error).splitlines()[0] if str(error) else repr(error)
        tally.said[f"{type(error).__name__}: {first[:100]}"] += 1
        if not good:
            tally.problems.append(f"{tally.name}, rank {rank}, {plan}: {type(error).__name__}: {str(error)[:300]}")
        return good

    def _heal(
        self, plan: str, fault: str, tally: Tally, right: list[float] | None = None, resume: str | None = None
    ) -> None:
        """The next training must be as if nothing had happened, and nothing must be left behind. `right`: its losses,
        if it resumes a saved run."""
        right = right or self.right[plan]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                losses = training(self.cluster, plan, resume=resume)
        except BaseException as error:
            tally.problems.append(f"after {fault}, {plan}: not healed: {type(error).__name__}: {str(error)[:300]}")
            self.cluster.close()
            self.cluster = Cluster(RANKS, device="cpu", patience=PATIENCE)
            return
        tally.healed += 1
        if plan not in ANY_ORDER and losses != right:
            tally.wrong += 1
            again = "resumed, " if resume else ""
            tally.problems.append(f"after {fault}, {again}{plan}: {losses} in place of {right}")
        gc.collect()
        if descriptors() > self.descriptors or len(processes()) > len(self.processes):
            tally.left += 1
            tally.problems.append(
                f"after {fault}, {plan}: {descriptors()} descriptors ({self.descriptors} before), "
                f"{len(processes())} processes ({len(self.processes)} before)"
            )
            self.descriptors, self.processes = max(descriptors(), self.descriptors), processes()

    # the stop button --------------------------------------------------------------------------------------------------

    def button(self, double: bool) -> bool:
        """SIGINT to the driver, at a random moment of a training; once, or again after a moment."""
        plan = self.random.choice(self.strategies)
        tally = self.tally("stop button, twice" if double else "stop button")
        sent: list[float] = []

        def press() -> None:
            time.sleep(self.random.uniform(0, self.times[plan]))
            sent.append(time.monotonic())
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            if double:
                time.sleep(self.random.uniform(0, 0.1))
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            finished.set()

        thread = threading.Thread(target=press)
        error: BaseException | None = None
        when = 0.0
        finished = threading.Event()
        thread.start()
        try:
            training(self.cluster, plan)
        except KeyboardInterrupt as stopped:
            error, when = stopped, time.monotonic()
        _let_interrupts_come(finished)  # the second one may arrive at any moment, until its thread has ended
        if error is not None:
            tally.tried += 1
            good = "the ranks were interrupted" in str(error) or not _within_ranks(error)
            tally.explained += good
            tally.seconds.append(when - sent[0])
            if not good:
                tally.problems.append(f"{tally.name}, {plan}: {''.join(traceback.format_exception(error))[-1500:]}")
            error = error.with_traceback(None)
        self._heal(plan, tally.name, tally)
        return error is not None

    # saves ------------------------------------------------------------------------------------------------------------

    def save(self) -> bool:
        """Something happens to a rank while the run is being saved. What is in the folder is whole, and goes on as the
        run would have gone on, or there is nothing. Some signals come at any moment, all else before a file is
        flushed."""
        what = "SIGKILL" if self.random.random() < 0.8 else self.random.choice((*SIGNALS, *INSIDE))
        tally, plan, rank = self.tally(f"{what} during a save"), self.random.choice(SAVED), self.random.randrange(RANKS)
        if plan not in self.saving:
            with tempfile.TemporaryDirectory() as folder:
                began = time.monotonic()
                training(self.cluster, plan, save=os.path.join(folder, "run"), save_every=1)
                self.saving[plan] = time.monotonic() - began
            self.longer[plan] = training(self.cluster, plan, more=STEPS)
        with tempfile.TemporaryDirectory() as folder:
            saved, stamp, sent = os.path.join(folder, "run"), os.path.join(folder, "stamp"), list[float]()
            pid, trip, timer = self.cluster.run(os.getpid)[rank], None, None
            if what in SIGNALS and self.random.random() < 0.25:

                def kill() -> None:
                    sent.append(time.monotonic())
                    os.kill(pid, SIGNALS[what])

                timer = threading.Timer(self.random.uniform(0.1, 0.8) * self.saving[plan], kill)
            else:
                # (a rank flushes a file in each save, so that each of these moments comes)
                trip = Trip(what, SAVE, rank, self.random.randint(1, STEPS), stamp=stamp)
            found = self._disturbed(plan, trip, timer, save=saved, save_every=1)
            if timer is not None and found is None:  # it came after the training: the next run is told, or heals it
                if what != "SIGSTOP":
                    _await_end(pid)
                with warnings.catch_warnings(), contextlib.suppress(MiniparError):
                    warnings.simplefilter("ignore")
                    self.cluster.run(_nothing)
            if trip is not None and os.path.exists(stamp):
                sent.append(float(Path(stamp).read_text()))
            if found is not None:
                self._note_error(tally, plan, what, rank, found, sent[0])
            elif trip is not None and sent:
                tally.tried += 1
                tally.problems.append(f"{tally.name}, rank {rank}, {plan}: nothing was said")
            in_time = found is not None
            del found
            if os.path.exists(os.path.join(saved, INDEX)):
                self._go_on(tally, plan, saved)
            else:
                self._heal(plan, tally.name, tally)
        return in_time

    def _go_on(self, tally: Tally, plan: str, saved: str) -> None:
        """What was saved is resumed: the steps that follow are those of a run that nobody disturbed."""
        try:
            step = open_folder(saved).header.step
        except MiniparError as error:
            tally.wrong += 1
            tally.problems.append(f"after {tally.name}, {plan}: a save that cannot be resumed: {str(error)[:300]}")
            return self._heal(plan, tally.name, tally)
        right = self.longer[plan][step : step + STEPS]
        self._heal(plan, tally.name, tally, right, resume=saved)

    def full_disk(self) -> None:
        """The disk is full in the middle of a save: that is told, and what was saved before still counts."""
        tally = self.tally("full disk during a save")
        plan = self.random.choice(SAVED[:2])
        with tempfile.TemporaryDirectory() as folder:
            saved = os.path.join(folder, "run")
            training(self.cluster, plan, save=saved)
            room = self.random.randrange(2_500)
            self.cluster.run(_limit_files, room)
            try:
                training(self.cluster, plan, save=saved, save_every=1, resume=saved, more=STEPS)
            except BaseException as error:
                tally.tried += 1
                tally.explained += isinstance(error, MiniparError) and "cannot save" in str(error)
                if not isinstance(error, MiniparError):
                    tally.problems.append(
                        f"full disk ({room} bytes), {plan}: {type(error).__name__}: {str(error)[:300]}"
                    )
            finally:
                self.cluster.run(_limit_files, resource.RLIM_INFINITY)
            try:
                training(self.cluster, plan, resume=saved)
            except MiniparError as error:
                tally.wrong += 1
                tally.problems.append(f"after a full disk, {plan}: {str(error)[:300]}")
        self._heal(plan, tally.name, tally)

    # closing ----------------------------------------------------------------------------------------------------------

    def closing(self) -> None:
        """Something happens to a rank, or the driver gets SIGINT, while a cluster is closed: its ranks and files go."""
        name = self.random.choice((*SIGNALS, *INSIDE, "stop button"))
        tally, cluster = self.tally(f"{name} during close"), Cluster(RANKS, device="cpu")
        pids, folder = cluster.run(os.getpid), cluster._members.folder
        rank, after, finished = self.random.randrange(RANKS), self.random.uniform(0, 0.02), threading.Event()
        if name in INSIDE:
            cluster.run_on([rank], _do_later, name, after)

        def disturb() -> None:
            time.sleep(after)
            if name == "stop button":
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            elif name in SIGNALS and _lives(pids[rank]):
                os.kill(pids[rank], SIGNALS[name])
            finished.set()

        thread, began = threading.Thread(target=disturb), time.monotonic()
        thread.start()
        try:
            cluster.close()
        except KeyboardInterrupt:
            pass
        except Exception as error:
            tally.problems.append(f"{name} during close: {type(error).__name__}: {error}")
            tally.wrong += 1
        tally.seconds.append(time.monotonic() - began)
        _let_interrupts_come(finished)
        cluster.close()
        tally.tried += 1
        tally.explained += 1  # (whoever closes it has nothing to be told)
        left = [one for one in pids if _lives(one)]
        tally.healed += not left
        if left or os.path.exists(folder):
            tally.problems.append(f"after {name} during close: {len(left)} processes, {os.path.exists(folder)}")
        del cluster
        self._heal(self.random.choice(self.strategies), tally.name, tally)
        tally.healed -= 1  # (that of the other cluster, which says that nothing was left)

    # drivers ----------------------------------------------------------------------------------------------------------

    def driver(self) -> None:
        """The driver is killed: its ranks and their files go, too."""
        plan = self.random.choice(self.strategies)
        with tempfile.TemporaryDirectory() as folder:
            child = _fork(partial(drive, plan, folder))
            self._end_driver(self.tally("SIGKILL of the driver"), child, plan, folder)

    def kernel(self, fresh: bool) -> None:
        """The same of a notebook's kernel; a fresh one is started by jupyter_client, and not forked."""
        from jupyter_client import BlockingKernelClient, KernelManager, connect

        plan = self.random.choice(self.strategies)
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "connection.json")
            manager = KernelManager(connection_file=file) if fresh else None
            if manager is not None:
                manager.start_kernel(cwd=str(ROOT))
                pid = manager.provisioner.pid
            else:
                connect.write_connection_file(file)
                pid = _fork(partial(_be_kernel, file))
            client = BlockingKernelClient(connection_file=file)
            try:
                client.load_connection_file()
                client.start_channels()
                inside = os.path.join(folder, "inside")
                os.mkdir(inside)
                client.execute(f"from tests.faults.campaign import drive; drive({plan!r}, {inside!r})")
                self._end_driver(self.tally("SIGKILL of a kernel"), pid, plan, inside, manager)
            finally:
                client.stop_channels()
                client.context.term()
                if manager is not None:
                    manager.shutdown_kernel(now=True)
                    manager.context.term()

    def _end_driver(self, tally: Tally, pid: int, plan: str, folder: str, manager: Any = None) -> None:
        """Kill a driver, whose files are in a folder, between its first line and its third training."""
        _await_file(folder, BEGUN)
        if plan not in self.lives:
            began = time.monotonic()
            _await_file(folder, TRAINED)
            self.lives[plan] = time.monotonic() - began + self.times[plan]
        else:
            time.sleep(self.random.uniform(0, self.lives[plan]))
        below = processes(pid)
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        if manager is None:
            os.waitpid(pid, 0)
        while time.monotonic() < began + 5 and any(_lives(one) for one in below):
            time.sleep(0.01)
        tally.tried += 1
        tally.explained += 1  # (there is nobody to whom it could be explained)
        tally.seconds.append(time.monotonic() - began)
        while time.monotonic() < began + 5 and _ours(folder):
            time.sleep(0.01)
        left = [one for one in below if _lives(one)]
        if left or _ours(folder):
            tally.left += 1
            tally.problems.append(f"after {tally.name}, {plan}: {len(left)} processes, {_ours(folder)}")
        tally.healed += not left

    def close(self) -> None:
        self.cluster.close()


def long_use(runs: int, trainings: int, seconds: float) -> str:
    """Warm runs and trainings, for so many seconds at most: a line that says what has grown. Every strategy has trained
    twice before: the second time a rank still takes memory from the system, which it keeps and uses again."""
    end = time.monotonic() + seconds
    done = [0, 0]
    with Cluster(RANKS, device="cpu") as cluster:
        for _ in range(20):
            cluster.run(_nothing)
        for plan in 2 * STRATEGIES:
            training(cluster, plan)
        before, mine, below = cluster.run(_holds), _holds(), len(processes())
        while done[1] < trainings and time.monotonic() < end:
            training(cluster, STRATEGIES[done[1] % len(STRATEGIES)])
            done[1] += 1
        while done[0] < runs and time.monotonic() < end + 0.1 * seconds:
            cluster.run(_nothing)
            done[0] += 1
        after, now = cluster.run(_holds), _holds()
        more = len(processes()) - below
    grown = [max(0, b - a) for a, b in zip(mine, now, strict=True)]
    inside = [max(max(0, b[k] - a[k]) for a, b in zip(before, after, strict=True)) for k in range(3)]
    return (
        f"{done[0]:,} warm runs and {done[1]} trainings: {max(0, more)} processes more; the driver grew by "
        f"{grown[0]} descriptors, {grown[1]} threads and {grown[2] / 2**20:.1f} MiB; a rank at most by "
        f"{inside[0]} descriptors, {inside[1]} threads and {inside[2] / 2**20:.1f} MiB."
    )


def drive(plan: str, folder: str) -> None:
    """A driver that trains until it is killed. Its files are in `folder`, and its signs, see `SIGNS`."""
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    Path(folder, BEGUN).touch()
    with Cluster(RANKS, device="cpu") as cluster:
        training(cluster, plan)
        Path(folder, TRAINED).touch()
        while True:
            training(cluster, plan)


def _fork(run: Callable[[], None]) -> int:
    """A child that runs this silently until it is killed, with this process at the latest."""
    parent, child = os.getpid(), os.fork()
    if child:
        return child
    try:
        die_with_parent(parent)
        os.setsid()
        silent = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(silent, stream)
        tqdm.set_lock(threading.RLock())  # (the one of the parent may be held by a driver that was killed)
        run()
    finally:
        os._exit(1)


def _be_kernel(file: str) -> None:
    """What `python -m ipykernel_launcher -f FILE` does, in a process that has imported what it needs."""
    import asyncio

    from ipykernel.kernelapp import IPKernelApp

    asyncio.set_event_loop(asyncio.new_event_loop())
    IPKernelApp.launch_instance(argv=["-f", file])


def _let_interrupts_come(finished: threading.Event) -> None:
    """Wait until the thread that interrupts this one has finished, whatever arrives meanwhile."""
    while True:
        try:
            while not finished.is_set():  # (`join` takes a thread for ended when it is interrupted)
                time.sleep(0.01)
            time.sleep(0.02)
            return
        except KeyboardInterrupt:
            continue


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _ours(folder: str) -> list[str]:
    """What is in a folder, but for the signs of a driver, and the cache that torch keeps for its compiler."""
    return [name for name in os.listdir(folder) if name not in SIGNS and not name.startswith("torchinductor_")]


def _nothing() -> None:
    pass


def _do_later(what: str, after: float) -> None:
    """In a rank: do something bad soon, in a thread, while the rank waits for what comes next."""

    def do() -> None:
        time.sleep(after)
        with contextlib.suppress(Exception):  # (there is nobody to whom a thread could raise it)
            _do(what)

    threading.Thread(target=do, daemon=True).start()


def _limit_files(size: int) -> None:
    """No file of this process may become longer."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def _holds() -> tuple[int, int, int]:
    """Of this process: descriptors, threads, and bytes of memory."""
    gc.collect()
    fields = Path("/proc/self/statm").read_text().split()
    return descriptors(), threading.active_count(), int(fields[1]) * resource.getpagesize()


@dataclass
class Found:
    """What a part of the campaign has found."""

    tallies: list[Tally]
    kinds: dict[str, list[int]]


Case = tuple[str, tuple[Any, ...]]  # a method of a campaign, and its arguments


def cases(count: int) -> tuple[list[Case], list[Case]]:
    """So many random faults, and the others in proportion: those that are timed, and those that run side by side."""
    timed: list[Case] = [("button", (double,)) for double in (False, True) for _ in range(count // 10)]
    for name, number in {"one": count, "start": count // 20, "closing": count // 20}.items():
        timed += [(name, ())] * number
    others: list[Case] = [("kernel", (k % 10 == 9,)) for k in range(count // 10)]
    for name, number in {"save": count // 4, "full_disk": count // 20, "driver": count // 10}.items():
        others += [(name, ())] * number
    return timed, others


def part(todo: list[Case], seed: int, end: float, show: bool, strategies: tuple[str, ...] = STRATEGIES) -> Found:
    """Run these cases one after another, until the time is over. SAVED must be among the strategies."""
    campaign = Campaign(seed, strategies)
    for name, given in tqdm(todo, disable=not show, desc="faults"):
        if time.monotonic() > end:
            break
        campaign.guarded(name, given)
    campaign.close()
    return Found(list(campaign.tallies.values()), campaign.kinds)


def _beside(run: Callable[[], Any]) -> Callable[[], Any]:
    """Run a function in a process of its own, forked now; what is returned waits for its result."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(False)
    process = context.Process(target=lambda: theirs.send(run()))
    process.start()
    theirs.close()

    def result() -> Any:
        found = ours.recv()
        process.join()
        return found

    return result


def merged(parts: list[Found]) -> Found:
    """Parts of a campaign as one."""
    tallies: dict[str, Tally] = {}
    kinds: dict[str, list[int]] = {}
    for part in parts:
        for one in part.tallies:
            into = tallies.setdefault(one.name, Tally(one.name))
            for name in ("tried", "explained", "healed", "left", "wrong", "seconds", "problems"):
                setattr(into, name, getattr(into, name) + getattr(one, name))
            into.said.update(one.said)
        for kind, (tried, told) in part.kinds.items():
            before = kinds.get(kind, [0, 0])
            kinds[kind] = [before[0] + tried, before[1] + told]
    return Found(sorted(tallies.values(), key=lambda one: one.name), dict(sorted(kinds.items())))


def table(found: Found) -> str:
    """The rows of a part of a campaign, and all of them together."""
    total = merged([Found([replace(one, name="all") for one in found.tallies], {})]).tallies
    text = "\n".join([HEAD, *(one.row() for one in (*found.tallies, *total))])
    if found.kinds:
        told = ", ".join(f"{kind} {good} of {tried}" for kind, (tried, good) in found.kinds.items())
        text += f"\n\nExplained of the faults as a rank began an instruction of this kind: {told}."
    return text


def run(name: str, count: int, inputs: int, seed: int, seconds: float, jobs: int, show: bool) -> tuple[str, list[str]]:
    """A part of a campaign of `count` random faults, the others in proportion, and so many `inputs` of parsers: its
    section of the page, and the problems. `jobs`: clusters side by side, which share what is not timed."""
    if name == "inputs":
        from tests.fuzz import parsers  # (not above: a rank imports this file, too)

        used = _beside(partial(long_use, 2 * count, count // 5, 0.9 * seconds))
        rows, problems = parsers.campaign(inputs, seconds)
        return f"{used()}\n\n{parsers.table(rows, problems)}", problems
    timed, others = cases(count)
    todo, jobs = (timed, 1) if name == "timed" else (others, jobs)
    random.Random(seed).shuffle(todo)
    end = time.monotonic() + seconds
    shares = [partial(part, todo[k::jobs], seed + k, end, show and not k) for k in range(jobs)]
    found = merged([result() for result in [_beside(share) for share in shares]])
    return table(found), [problem for one in found.tallies for problem in one.problems]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--count", type=int, default=1000, help="random faults, and a tenth to a fifth of each other kind"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--inputs", type=int, default=20000, help="inputs of parsers")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="clusters side by side")
    parser.add_argument("--seconds", type=float, default=1700, help="stop after so many seconds, about")
    parser.add_argument("--only", choices=SHARES, help="only this part, in all of these seconds")
    parser.add_argument("--write", help="a file for the tables, such as docs/reliability.md")
    options = parser.parse_args()
    trouble = False
    for name, share in SHARES.items() if options.only is None else {options.only: 1.0}.items():
        began, load, seconds = time.monotonic(), os.getloadavg()[0], share * options.seconds
        page, problems = run(name, options.count, options.inputs, options.seed, seconds, options.jobs, show=True)
        trouble = trouble or bool(problems)
        used = (time.monotonic() - began) / 60
        asked = f"{options.inputs:,} inputs" if name == "inputs" else f"{options.count:,} random faults"
        page = (
            f"Of a campaign of {asked}, in {seconds / 60:.0f} minutes at most: it took {used:.0f} minutes on "
            f"{os.cpu_count()} cores; their load was {load:.1f} before.\n\n{page}\n"
        )
        print("\n".join([page, *problems]))
        if options.write:
            write_between(Path(options.write), name, page)
    return trouble


def write_between(path: Path, name: str, page: str) -> None:
    """Replace what stands between the two marks of this name in a page."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    before, _, rest = path.read_text().partition(begin)
    path.write_text(f"{before}{begin}{page}{end}{rest.partition(end)[2]}")


if __name__ == "__main__":
    sys.exit(main())
