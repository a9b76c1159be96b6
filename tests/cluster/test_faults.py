"""What goes wrong while ranks start, end, or are called back: each is told, and the next call works."""

from __future__ import annotations

import _thread
import errno
import gc
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from minipar import Cluster
from minipar.cluster import children, failures, launch, notes, threads, worker
from minipar.cluster.failures import Failure
from minipar.cluster.processes import ends, held
from minipar.comm import communicator, queues
from minipar.comm.transport import arena
from minipar.comm.transport.calls import Steps
from minipar.errors import RankDied, RankError, StoreError
from minipar.execution import emulation, streams
from minipar.execution.memory import disk
from tests.conftest import Clusters

pytestmark = pytest.mark.ranks


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


# deaths


def test_a_death_while_another_rank_starts_is_told_and_healed(
    clusters: Clusters, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = clusters(2)
    pids = cluster.run(os.getpid)
    start = children.Children._start

    def while_it_starts(self: children.Children, rank: int) -> None:
        start(self, rank)
        if rank == 0:
            os.kill(pids[1], signal.SIGKILL)
            assert ends(pids[1], 10)

    monkeypatch.setattr(children.Children, "_start", while_it_starts)
    os.kill(pids[0], signal.SIGKILL)
    assert ends(pids[0], 10)
    with pytest.warns(RuntimeWarning, match="anew") as told:
        after = cluster.run(os.getpid)
    assert not set(after) & set(pids)
    assert {str(one.message).split()[1] for one in told} == {"0", "1"}


def test_what_killed_ranks_left_where_they_met_goes(clusters: Clusters) -> None:
    cluster = clusters(2)
    assert cluster.run(lambda: communicator.create().allreduce(1)) == [2, 2]
    met = str(cluster._members.generation)
    for pid in cluster.run(os.getpid):
        os.kill(pid, signal.SIGKILL)
        assert ends(pid, 10)
    assert [name for name in os.listdir(cluster._members.folder) if name.startswith(met)]  # (they left it)
    with pytest.warns(RuntimeWarning, match="rank . was killed by signal 9 .* starts anew, without its state"):
        assert cluster.run(lambda: communicator.create().allreduce(1)) == [2, 2]
    assert not [name for name in os.listdir(cluster._members.folder) if name.split("-")[0] == met]


# interrupts


def test_a_held_interrupt_comes_at_the_end_and_a_second_one_at_once() -> None:
    reached, before = [], signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), held():  # noqa: PT012
        with held():
            signal.raise_signal(signal.SIGINT)
            reached.append("inside")
        reached.append("outside")
    with pytest.raises(KeyboardInterrupt), held():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        reached.append("never")
    assert reached == ["inside", "outside"]
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupted_start_and_end_leave_no_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    with Cluster(1) as cluster:
        before = descriptors()
        kill = launch.Forked.kill

        def pressed(self: Any) -> None:
            signal.raise_signal(signal.SIGINT)
            kill(self)

        another = Cluster(2)
        with monkeypatch.context() as patch:
            patch.setattr(launch.Forked, "kill", pressed)
            with pytest.raises(KeyboardInterrupt):
                another.close()
        another.close()
        fork = launch.fork

        def while_it_forks(*given: Any) -> Any:
            signal.raise_signal(signal.SIGINT)
            return fork(*given)

        with monkeypatch.context() as patch:
            patch.setattr(launch, "fork", while_it_forks)
            with pytest.raises(KeyboardInterrupt):
                Cluster(2)
        assert descriptors() == before
        assert cluster.run(int) == [0]


@pytest.fixture
def seat() -> Any:
    """This process as a rank that an interrupt reaches."""
    seat = worker.Seat(lambda message: None, worker.Context(0, 1, "cpu", "gloo", "local"))
    before = signal.signal(signal.SIGINT, worker.on_interrupt)
    with worker.seated(seat):
        yield seat
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_waits_for_the_end_of_an_import(
    seat: worker.Seat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_to_import.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\nwhole = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seat.interruptible = True
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        import slow_to_import

        time.sleep(5)
    assert slow_to_import.whole
    assert not seat.interruptible  # at most once
    del sys.modules["slow_to_import"]


def test_an_interrupt_inside_a_context_of_torch_leaves_its_modes_as_they_were(clusters: Clusters) -> None:
    def entered() -> None:
        torch.no_grad().__enter__()
        torch.autocast("cpu").__enter__()
        signal.raise_signal(signal.SIGINT)

    cluster = clusters(1)
    with pytest.raises(RankError, match="KeyboardInterrupt"):
        cluster.run(entered)
    assert cluster.run(lambda: (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"))) == [(True, False)]


# no room


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_temporary_folder_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = descriptors()
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(RankError, match=rf"temporary folder {tmp_path} .*No space left on device; free") as told:
        notes.Page(str(tmp_path))
    assert "\n" not in str(told.value)
    assert descriptors() == before


# causes


def test_a_rank_without_descriptors_says_so(clusters: Clusters) -> None:
    def lose(seconds: float) -> None:
        os.closerange(3, 1024)
        time.sleep(seconds)

    for seconds in (0, 60):
        with pytest.raises(RankDied, match="^rank 0 lost its connection to the driver; were its descriptors closed"):
            clusters(1).run(lose, seconds)


def test_a_death_that_is_not_heard_yet_is_the_cause_of_a_lost_peer(clusters: Clusters) -> None:
    """Another process holds the socket of the rank that dies, so that the driver does not hear its end."""

    def f() -> None:
        comm = communicator.create()
        comm.barrier()
        if comm.rank == 1:
            seat = worker._rank
            held = seat.deliver.args[0].fileno()  # type: ignore[union-attr,attr-defined]
            subprocess.Popen(["sleep", "3"], pass_fds=(held,), start_new_session=True)
            comm.send(1, 0)
            os.kill(os.getpid(), signal.SIGTERM)
        comm.recv(1)
        comm.recv(1)

    with pytest.raises(RankDied, match=r"^rank 1 was killed by signal 15 \(SIGTERM\)"):
        clusters(2).run(f)


def raised_in(file: str, error: Exception, of_user: str = "/home/me/train.py") -> str:
    """The line of what the driver raises for an error of rank 1 with these frames."""
    remote = failures.capture(error, "")
    frames = ((of_user, 1, "f", ""), (file, 2, "g", ""))
    chain = (failures.ChainedException("", frames, str(error)),)
    found = failures.as_exception([Failure(1, replace(remote, segments=chain))], {}, [])
    return f"{type(found).__name__}: {found}".splitlines()[0]


def test_errors_of_the_system_that_ranks_meet_as_they_talk_get_a_class_and_the_rank() -> None:
    comm = str(Path(queues.__file__))
    saved = str(Path(failures.__file__).parents[1] / "execution" / "executor.py")
    torchs = f"{os.sep}torch{os.sep}distributed{os.sep}distributed_c10d.py"
    bad = OSError(errno.EBADF, "Bad file descriptor")
    assert raised_in(comm, bad) == "RankError: rank 1 raised OSError: [Errno 9] Bad file descriptor"
    assert raised_in(torchs, RuntimeError("store")).startswith("RankError: rank 1 raised RuntimeError: store")
    assert raised_in(comm, MemoryError("no more")) == "RankError: rank 1 raised MemoryError: no more"
    for theirs in (raised_in("/home/me/model.py", bad), raised_in(saved, bad)):
        assert theirs == "OSError: [Errno 9] Bad file descriptor"
    assert raised_in(comm, TypeError("a list")) == "TypeError: a list"
    assert raised_in(comm, StoreError("full")) == "StoreError: full"


def test_signals_go_by_the_parent_which_knows_its_children(clusters: Clusters) -> None:
    cluster = clusters(1)
    process = cluster._members.ranks[0].process
    other = subprocess.Popen(["sleep", "60"])
    try:
        launch.Forked(process.zygote, other.pid).signal(signal.SIGKILL)  # no child of the helper any more
        assert cluster.run(int) == [0]
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


# communication


def test_an_interrupted_collective_never_reports_success() -> None:
    made = arena.Arena(mmap.mmap(-1, arena.size(1)), (0,), 0, lambda _: None)
    queue = queues.Queue((0,), queues.Starter("starts collectives"))

    def steps() -> Steps:
        yield arena.Posts(made, (), 0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        queue.submit("a sum", steps())
    (one,) = queue.waiting
    for _ in range(2):
        with pytest.raises(RankError, match="was interrupted"):
            one.wait()
    queue.submit("another", (_ for _ in ())).wait()


def fails_with_collectives_under_way() -> None:
    comm = communicator.create()
    if comm.rank == 0:
        comm.iallreduce(torch.ones(300_000), (0, 1))
    if comm.rank == 1:
        raise ValueError("in between")
    comm.irecv(torch.empty(1), 1).wait()


def holds() -> tuple[int, int]:
    time.sleep(0.2)  # (a helper thread ends)
    gc.collect()
    maps = Path("/proc/self/smaps_rollup").read_text().split("Pss_Shmem:")[1].split()
    return len(os.listdir("/proc/self/fd")), int(maps[0])


def test_failed_runs_leave_nothing_in_the_ranks(clusters: Clusters) -> None:
    cluster = clusters(2)
    found = []
    for _ in range(4):
        with pytest.raises(ValueError, match="in between"):
            cluster.run(fails_with_collectives_under_way)
        cluster.run(lambda: communicator.create().barrier())
        found.append(cluster.run(holds))
    for (first, before), (last, after) in zip(found[1], found[-1], strict=True):
        assert last <= first
        assert after <= before + 512


def test_a_thread_that_cannot_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Idle(threads.Helper[int]):
        def turn(self) -> None: ...

    def refused(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_thread, "start_new_thread", refused)
    with pytest.raises(RankError, match="the thread that sends cannot start: can't start new thread; the limit"):
        Idle("sends").watch(1)


def test_a_thread_that_ends_before_its_first_line_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under a limit of memory, where Python's own start waits for ever: copies, interrupts, emulated moments."""
    monkeypatch.setattr(_thread, "start_new_thread", lambda *_: 0)
    monkeypatch.setattr(threading, "_start_new_thread", lambda *_: 0)
    monkeypatch.setattr(threads, "_LONGEST", 0.01)
    told = "cannot start: it ended before its first line; the limit of memory or threads"
    with pytest.raises(RankError, match=told):
        streams.HostStreams().copy(torch.ones(1), torch.ones(1), "cpu")
    with pytest.raises(RankError, match=told):
        disk.DiskStore().put("x", torch.ones(1))
    with pytest.raises(RankError, match=told):
        emulation.stamp_later(time.perf_counter() + 9, lambda: None)
    seat = worker.Seat(lambda message: None, worker.Context(0, 1, "cpu", "gloo", "local"))
    seat.interruptible = True
    with pytest.raises(KeyboardInterrupt):
        exec(compile("interrupt()", worker._IMPORT, "exec"), {"interrupt": lambda: seat.interrupt(sys._getframe())})


def test_a_thread_runs_functions_in_turn_and_ends() -> None:
    done: list[int] = []
    line = threads.InTurn("copies")
    last = [line.submit(lambda k=k: (time.sleep(0.01 * (2 - k)), done.append(k))) for k in range(3)][-1]
    with pytest.raises(ZeroDivisionError):
        line.submit(lambda: 1 // 0).result(10)
    assert last.done()
    line.shutdown()
    line.shutdown()
    assert done == [0, 1, 2]
    with pytest.raises(RankError, match="the thread that copies has ended"):
        line.submit(print)
