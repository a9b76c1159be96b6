"""A campaign of faults: `python -m tests.faults.campaign [--count N] [--seed S] [--seconds T] [--write FILE]`.

A case is a training on real ranks by some strategy, and one fault at a random moment of it:

    signal     the driver sends SIGKILL, SIGTERM, SIGSEGV, SIGABRT or SIGSTOP to a rank
    inside     a rank, in a forward, in the loss or in the optimizer: raises, calls sys.exit or os._exit, reaches a
               limit of memory, or finds its descriptors closed
    save       a rank is killed while the run is being saved, or the disk is full
    button     SIGINT reaches the driver, once or twice
    start      a rank is killed while another one is started again
    driver     the driver itself is killed, or a notebook's kernel

Of each it is noted whether the error was *explained* (a class of ours or the rank's own exception, the rank by its
number, and the cause), how long it took to arrive, whether the next training on the same cluster gives the losses of an
undisturbed one (*healed*), and what was *left behind*: processes, descriptors, files. A save that was disturbed must be
whole, or not be there. `make soak` runs up to 1,000 faults in 30 minutes, and writes
docs/reliability.md; a test runs a few.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from minipar import Cluster, train
from minipar.cluster import worker
from minipar.errors import MiniparError
from tests.fuzz import parsers

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
STEPS, ROWS = 4, 16
PATIENCE = 3.0  # seconds; a stopped rank is only noticed by those who wait for it


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

    def step(self, closure: Any = None) -> Any:
        self.trip("optimizer")
        return super().step(closure)


def training(cluster: Cluster, plan: str, trip: Trip | None = None, more: int = 0, **given: Any) -> list[float]:
    """Train a few steps, and some more; the losses."""
    trip = trip or Trip()
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(ROWS, 16, generator=generator), torch.randint(0, 16, (ROWS,), generator=generator)
    captured = "tp=" in plan
    run = train(
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
    return [float(each) for each in run.losses]


def _within_ranks(error: BaseException) -> bool:
    """Whether an error was raised while ranks ran something."""
    return any("_exchange" in frame.name for frame in traceback.extract_tb(error.__traceback__))


def _await_end(pid: int, seconds: float) -> None:
    until = time.monotonic() + seconds
    while _lives(pid) and time.monotonic() < until:
        time.sleep(0.005)


# What a case left behind ----------------------------------------------------------------------------------------------


def processes() -> set[int]:
    """All descendants of this process that live."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                parents[int(entry.name)] = int(fields[1])
    found, more = set[int](), {os.getpid()}
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

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.tallies: dict[str, Tally] = {}
        self.right: dict[str, list[float]] = {}
        self.times: dict[str, float] = {}
        self.cluster = Cluster(RANKS, device="cpu", patience=PATIENCE)
        for plan in STRATEGIES:
            training(self.cluster, plan)
            began = time.monotonic()
            self.right[plan] = training(self.cluster, plan)
            self.times[plan] = time.monotonic() - began
        gc.collect()
        self.processes, self.descriptors = processes(), descriptors()

    def tally(self, name: str) -> Tally:
        return self.tallies.setdefault(name, Tally(name))

    def one(self) -> None:
        """One random fault."""
        plan = self.random.choice(STRATEGIES)
        if self.random.random() < 0.5:
            self._signal(plan, self.random.choice(tuple(SIGNALS)))
        else:
            self._inside(plan, self.random.choice(INSIDE))

    def _signal(self, plan: str, name: str) -> None:
        rank, after = self.random.randrange(RANKS), self.random.uniform(0, self.times[plan])
        pid = self.cluster.run(os.getpid)[rank]
        sent: list[float] = []

        def send() -> None:
            sent.append(time.monotonic())
            os.kill(pid, SIGNALS[name])

        timer = threading.Timer(after, send)
        error = self._disturbed(plan, None, timer, sent)
        if error is None:  # it came when the training was over: who calls next is told, or finds the rank replaced
            _await_end(pid, 0.0 if name == "SIGSTOP" else 2.0)
            if name == "SIGSTOP":
                error = self._disturbed(plan, None, None, sent)
        self._judge(plan, name, rank, error, sent)

    def _inside(self, plan: str, what: str) -> None:
        rank = self.random.randrange(RANKS)
        where = "optimizer" if "tp=" in plan else self.random.choice(PLACES)
        with tempfile.NamedTemporaryFile() as stamp:
            trip = Trip(what, where, rank, self.random.randrange(1, STEPS), stamp=stamp.name)
            error = self._disturbed(plan, trip, None, [])
            moment = Path(stamp.name).read_text()
        if not moment:  # (a rank without the last layer reaches no loss)
            return
        if error is None:
            self.tally(what).tried += 1
            self.tally(what).problems.append(f"{what} of rank {rank}, {plan}: nothing was said")
        self._judge(plan, what, rank, error, [float(moment)])

    def start(self) -> None:
        """A rank is killed while another one starts again: both are there in the next run."""
        tally = self.tally("SIGKILL during a start")
        pids = self.cluster.run(os.getpid)
        one, other = self.random.sample(range(RANKS), 2)
        os.kill(pids[one], signal.SIGKILL)
        _await_end(pids[one], 2.0)
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
            _await_end(pids[other], 2.0)
            if not told_of:  # it came after the run
                self.cluster.run(_nothing)
                told_of = any(f"rank {other} " in str(each.message) for each in told)
        tally.tried += 1
        tally.explained += told_of
        self._heal(self.random.choice(STRATEGIES), tally.name, tally)

    def _disturbed(
        self, plan: str, trip: Trip | None, timer: threading.Timer | None, sent: list[float]
    ) -> tuple[BaseException, float] | None:
        """Train; what was raised, and when. None if the fault came too late, or was not reached."""
        if timer is not None:
            timer.start()
        try:
            training(self.cluster, plan, trip)
        except BaseException as error:
            return error, time.monotonic()
        finally:
            if timer is not None:
                timer.join()
        return None

    def _judge(
        self, plan: str, fault: str, rank: int, found: tuple[BaseException, float] | None, sent: list[float]
    ) -> None:
        tally = self.tally(fault)
        if found is not None:
            error, when = found
            tally.tried += 1
            tally.seconds.append(when - sent[0])
            good = explained(error, fault, rank)
            tally.explained += good
            first = str(error).splitlines()[0] if str(error) else repr(error)
            tally.said[f"{type(error).__name__}: {first[:100]}"] += 1
            if not good:
                tally.problems.append(f"{fault} of rank {rank}, {plan}: {type(error).__name__}: {str(error)[:300]}")
            del error, found
        self._heal(plan, fault, tally)

    def _heal(self, plan: str, fault: str, tally: Tally) -> None:
        """The next training must be as if nothing had happened, and nothing must be left behind."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                losses = training(self.cluster, plan)
        except BaseException as error:
            tally.problems.append(f"after {fault}, {plan}: not healed: {type(error).__name__}: {str(error)[:300]}")
            self.cluster.close()
            self.cluster = Cluster(RANKS, device="cpu", patience=PATIENCE)
            return
        tally.healed += 1
        if plan not in ANY_ORDER and losses != self.right[plan]:
            tally.wrong += 1
            tally.problems.append(f"after {fault}, {plan}: {losses} in place of {self.right[plan]}")
        gc.collect()
        if descriptors() > self.descriptors or len(processes()) > len(self.processes):
            tally.left += 1
            tally.problems.append(
                f"after {fault}, {plan}: {descriptors()} descriptors ({self.descriptors} before), "
                f"{len(processes())} processes ({len(self.processes)} before)"
            )
            self.descriptors, self.processes = max(descriptors(), self.descriptors), processes()

    # the stop button --------------------------------------------------------------------------------------------------

    def button(self, double: bool) -> None:
        """SIGINT to the driver, at a random moment of a training; once, or again after a moment."""
        plan = self.random.choice(STRATEGIES)
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
        while True:  # the second one may arrive at any moment, until its thread has ended
            try:
                while not finished.is_set():  # (`join` takes a thread for ended when it is interrupted)
                    time.sleep(0.01)
                time.sleep(0.02)
                break
            except KeyboardInterrupt:
                continue
        if error is not None:
            tally.tried += 1
            tally.explained += "the ranks were interrupted" in str(error) or not _within_ranks(error)
            tally.seconds.append(when - sent[0])
            error = error.with_traceback(None)
        self._heal(plan, tally.name, tally)

    # saves ------------------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """A rank is killed while the run is being saved: what is in the folder can be resumed, or is refused."""
        tally = self.tally("SIGKILL during a save")
        plan = self.random.choice(
            ("dp=4 zero=3", "pp=4 schedule=1f1b microbatches=4", "dp=2 pp=2 zero=1 microbatches=4")
        )
        with tempfile.TemporaryDirectory() as folder:
            rank = self.random.randrange(RANKS)
            pid = self.cluster.run(os.getpid)[rank]
            began = time.monotonic()
            training(self.cluster, plan, save=os.path.join(folder, "measured"), save_every=1)
            length = time.monotonic() - began
            sent: list[float] = []

            def kill() -> None:
                sent.append(time.monotonic())
                os.kill(pid, signal.SIGKILL)

            timer = threading.Timer(self.random.uniform(0.2, 1) * length, kill)
            timer.start()
            try:
                training(self.cluster, plan, save=os.path.join(folder, "run"), save_every=1)
            except MiniparError as error:
                tally.tried += 1
                tally.seconds.append(time.monotonic() - sent[0])
                tally.explained += explained(error, "SIGKILL", rank)
                del error
            timer.join()
            time.sleep(0.1)  # until it is dead, if it was killed at the very end
            saved = os.path.join(folder, "run")
            if os.path.exists(saved):
                try:
                    training(self.cluster, plan, resume=saved)
                except MiniparError as error:
                    if "no saved" not in str(error) and "does not exist" not in str(error):
                        tally.wrong += 1
                        tally.problems.append(f"a save that cannot be resumed, {plan}: {str(error)[:300]}")
        self._heal(plan, tally.name, tally)

    def full_disk(self) -> None:
        """The disk is full in the middle of a save: that is told, and what was saved before still counts."""
        tally = self.tally("full disk during a save")
        plan = self.random.choice(("dp=4 zero=3", "pp=4 schedule=1f1b microbatches=4"))
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

    # drivers ----------------------------------------------------------------------------------------------------------

    def driver(self) -> None:
        """The driver is killed: its ranks and their files go, too."""
        tally = self.tally("SIGKILL of the driver")
        plan = self.random.choice(STRATEGIES)
        with tempfile.TemporaryDirectory() as folder:
            code = f"from tests.faults.campaign import drive; drive({plan!r}, {folder!r})"
            child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT)
            assert child.stdout is not None
            child.stdout.readline()
            time.sleep(self.random.uniform(0, 2 * self.times[plan]))
            self._end_driver(tally, child.pid, lambda: (child.kill(), child.wait()), plan, folder)
            child.stdout.close()

    def _end_driver(self, tally: Tally, pid: int, kill: Callable[[], Any], plan: str, folder: str) -> None:
        below = _below(pid)
        began = time.monotonic()
        kill()
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

    def kernel(self) -> None:
        """The same of a notebook's kernel."""
        from jupyter_client.manager import start_new_kernel

        tally = self.tally("SIGKILL of a kernel")
        plan = self.random.choice(STRATEGIES)
        with tempfile.TemporaryDirectory() as folder:
            manager, client = start_new_kernel(cwd=str(ROOT))
            try:
                client.execute(f"from tests.faults.campaign import drive; drive({plan!r}, {folder!r})")
                while "ready" not in str(client.get_iopub_msg(timeout=120)["content"].get("text", "")):
                    pass
                time.sleep(self.random.uniform(0, 2 * self.times[plan]))
                pid = manager.provisioner.pid
                self._end_driver(tally, pid, lambda: os.kill(pid, signal.SIGKILL), plan, folder)
            finally:
                client.stop_channels()
                manager.shutdown_kernel(now=True)
                self.descriptors = max(descriptors(), self.descriptors)  # (the client keeps some)

    # long use ---------------------------------------------------------------------------------------------------------

    def long_use(self, runs: int, trainings: int, seconds: float) -> str:
        """Warm runs and trainings, for so many seconds at most: a line that says what has grown."""
        end = time.monotonic() + seconds
        done = [0, 0]
        with Cluster(RANKS, device="cpu") as cluster:
            for _ in range(20):
                cluster.run(_nothing)
            for plan in STRATEGIES:
                training(cluster, plan)
            before, mine, below = cluster.run(_holds), _holds(), len(processes())
            while done[1] < trainings and time.monotonic() < end:
                training(cluster, STRATEGIES[done[1] % len(STRATEGIES)])
                done[1] += 1
            while done[0] < runs and time.monotonic() < end + 60:
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

    def close(self) -> None:
        self.cluster.close()


def drive(plan: str, folder: str) -> None:
    """A driver that trains until it is killed; its files are in `folder`. It says a line when it has begun."""
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    with Cluster(RANKS, device="cpu") as cluster:
        training(cluster, plan)
        print("ready", flush=True)
        while True:
            training(cluster, plan)


def _below(pid: int) -> list[int]:
    found, more = list[int](), [pid]
    while more:
        told = subprocess.run(["ps", "-o", "pid=", "--ppid", ",".join(map(str, more))], capture_output=True, text=True)
        more = [int(word) for word in told.stdout.split()]
        found += more
    return found


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _ours(folder: str) -> list[str]:
    """What is in a folder, but for the cache that torch keeps for its compiler."""
    return [name for name in os.listdir(folder) if not name.startswith("torchinductor_")]


def _nothing() -> None:
    pass


def _limit_files(size: int) -> None:
    """No file of this process may become longer."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def _holds() -> tuple[int, int, int]:
    """Of this process: descriptors, threads, and bytes of memory."""
    gc.collect()
    fields = Path("/proc/self/statm").read_text().split()
    return descriptors(), threading.active_count(), int(fields[1]) * resource.getpagesize()


def run(count: int, seed: int = 0, seconds: float = 1e9, show: bool = True, inputs: int = 0) -> tuple[str, list[str]]:
    """A campaign of `count` random faults, of the others in proportion, and of so many `inputs` of parsers: the page,
    and the problems. Of the seconds faults have three fifths, long use and inputs a fifth each."""
    end = time.monotonic() + 0.6 * seconds
    campaign = Campaign(seed)
    plan: list[Callable[[], None]] = [campaign.one] * count
    plan += [partial(campaign.button, False), partial(campaign.button, True)] * (count // 10)
    plan += [campaign.start] * (count // 20)
    plan += [campaign.save] * (count // 5) + [campaign.full_disk] * (count // 20)
    plan += [campaign.driver] * (count // 10) + [campaign.kernel] * (count // 100)
    campaign.random.shuffle(plan)
    for case in tqdm(plan, disable=not show, desc="faults"):
        if time.monotonic() > end:
            break
        case()
    campaign.close()
    tallies = list(campaign.tallies.values())
    total = Tally(
        "all", *(sum(getattr(one, k) for one in tallies) for k in ("tried", "explained", "healed", "left", "wrong"))
    )
    total.seconds = [second for one in tallies for second in one.seconds]
    parts = ["\n".join([HEAD, *(one.row() for one in sorted(tallies, key=lambda one: one.name)), total.row()])]
    problems = [problem for one in tallies for problem in one.problems]
    if inputs:
        parts.append(campaign.long_use(2 * count, count // 5, 0.2 * seconds))
        rows, more = parsers.campaign(inputs, 0.2 * seconds)
        parts.append(parsers.table(rows, more))
        problems += more
    return "\n\n".join(parts) + "\n", problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--count", type=int, default=1000, help="random faults, and a tenth to a fifth of each other kind"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--inputs", type=int, default=20000, help="inputs of parsers")
    parser.add_argument("--seconds", type=float, default=1500, help="stop after so many seconds, about")
    parser.add_argument("--write", help="a file for the table, such as docs/reliability.md")
    options = parser.parse_args()
    began = time.monotonic()
    page, problems = run(options.count, options.seed, options.seconds, inputs=options.inputs)
    print(page)
    for problem in problems:
        print(problem)
    if options.write:
        used, load = (time.monotonic() - began) / 60, os.getloadavg()[1]
        text = (
            f"Asked for were {options.count:,} random faults and {options.inputs:,} inputs, in {options.seconds:.0f} "
            f"seconds at most; it took {used:.0f} minutes on {os.cpu_count()} cores, whose load was {load:.0f}.\n"
        )
        write_between(Path(options.write), "campaign", f"{text}\n{page}")
    return bool(problems)


def write_between(path: Path, name: str, page: str) -> None:
    """Replace what stands between the two marks of this name in a page."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    before, _, rest = path.read_text().partition(begin)
    path.write_text(f"{before}{begin}{page}{end}{rest.partition(end)[2]}")


if __name__ == "__main__":
    sys.exit(main())
