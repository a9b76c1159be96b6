"""What ranks were doing when something went wrong: failures, deaths, the stop button, and deadlocks.

Time bounds are generous: the machine may be busy.
"""

from __future__ import annotations

import ctypes
import linecache
import os
import re
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NoReturn

import cloudpickle
import pytest
import torch

from minipar.cluster import Cluster, notes, stacks, watchdog, worker
from minipar.cluster.watchdog import Seen, Watchdog
from minipar.comm import communicator
from minipar.errors import Deadlock, PlanError, RankDied

# Ranks cannot import this file by name; its functions travel as those of a notebook do.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

PATIENCE = 0.6


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(3, device="cpu", patience=PATIENCE) as made:
        yield made


@pytest.fixture
def state(cluster: Cluster) -> Callable[[], list[Any]]:
    """Leave something in every rank; gives what is there later, None where it is lost."""

    def leave() -> None:
        communicator.create().barrier()
        sys.modules["__main__"].kept = worker.context().rank  # type: ignore[attr-defined]

    cluster.run(leave)
    return lambda: cluster.run(lambda: getattr(sys.modules["__main__"], "kept", None))


def rank() -> int:
    return worker.context().rank


def sums() -> Any:
    return communicator.create().allreduce([1.0])


def cell(source: str) -> Callable[[], Any]:
    """A function `f` of a notebook cell: only the driver knows its text."""
    name = f"<cell {abs(hash(source))}>"
    source = textwrap.dedent(source)
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    namespace: dict[str, Any] = {"communicator": communicator, "torch": torch, "time": time, "rank": rank}
    exec(compile(source, name, "exec"), namespace)
    function: Callable[[], Any] = namespace["f"]
    return function


def interrupted(cluster: Cluster, function: Callable[[], Any], after: float = 0.4) -> tuple[KeyboardInterrupt, float]:
    """Press the stop button while a function runs; the exception, and the seconds until it came."""
    sent: list[float] = []

    def press() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(after, press)
    timer.start()
    try:
        cluster.run(function)
    except KeyboardInterrupt as error:
        return error, time.monotonic() - sent[0]
    finally:
        timer.cancel()
    raise AssertionError("it ended by itself")


# A rank raises


def test_the_note_shows_where_the_others_waited(cluster: Cluster, state: Callable[[], list[Any]]) -> None:
    f = cell("""
        def f():
            comm = communicator.create()
            if comm.rank == 1:
                comm.irecv(torch.empty(4), 0, 7).wait()  # for nothing
            if comm.rank == 0:
                time.sleep(30)  # busy
            time.sleep(0.2)
            raise ValueError('of rank two')
    """)
    started = time.monotonic()
    with pytest.raises(ValueError, match="of rank two") as caught:
        cluster.run(f)
    assert time.monotonic() - started < 3
    (note,) = caught.value.__notes__
    assert note.startswith("raised on rank 2:\n")
    assert re.search(r'meanwhile rank 0 was at work:\n  File "<cell \d+>", line 7, in f\n    time.sleep\(30\)', note)
    assert "meanwhile rank 1 was waiting in recv from rank 0 tag 7:\n" in note
    assert "comm.irecv(torch.empty(4), 0, 7).wait()  # for nothing" in note
    assert "lost" not in note
    assert state() == [0, 1, 2]
    assert cluster.run(sums) == [[3.0]] * 3


def test_a_lost_peer_is_shown_as_a_wait_and_not_as_an_error(cluster: Cluster) -> None:
    def f() -> None:
        comm = communicator.create()
        comm.barrier()
        if comm.rank == 0:
            comm.irecv(torch.empty(1), 1, 5).wait()
        if comm.rank == 1:
            comm.isend(torch.empty(1), 0, 4).wait()
            comm.close()  # rank 0 loses its peer, and says so first
            time.sleep(0.1)
            raise KeyError("the cause")

    with pytest.raises(KeyError, match="the cause") as caught:
        cluster.run(f)
    (note,) = caught.value.__notes__
    assert "raised on rank 1:" in note
    assert "meanwhile rank 0 was waiting for a peer, in vain:" in note
    assert "comm.irecv(torch.empty(1), 1, 5).wait()" in note
    assert "ConnectionError" not in note


# A rank dies


def test_a_death_names_rank_signal_and_operation(cluster: Cluster) -> None:
    def f() -> None:
        comm = communicator.create()
        comm.barrier()
        if comm.rank == 1:
            pid = os.getpid()
            threading.Timer(0.2, lambda: (worker.report(time.monotonic()), os.kill(pid, signal.SIGKILL))).start()
        if comm.rank != 0:
            comm.allreduce([1.0, 2.0])
        else:
            time.sleep(30)

    when: list[float] = []
    with pytest.raises(RankDied) as caught:
        cluster.run_with(lambda _, moment: when.append(moment), f)
    assert time.monotonic() - when[0] < 1
    first = str(caught.value).splitlines()[0]
    assert first.startswith("rank 1 was killed by signal 9 (SIGKILL")
    assert first.endswith("last seen in allreduce of a list of 2 float64 for sum over 0,1,2")
    assert "meanwhile rank 0 was at work:" in str(caught.value)
    assert "meanwhile rank 2 was waiting in allreduce of a list of 2 float64 for sum over 0,1,2:" in str(caught.value)
    assert cluster.run(sums) == [[3.0]] * 3


# The stop button


def waits(comm: Any, where: str) -> None:
    if where == "allreduce":
        comm.allreduce([1.0])
    elif where == "algorithm":
        comm.iallreduce(torch.ones(3), (0, 1, 2), algorithm="ring").wait()
    elif where == "recv":
        comm.irecv(torch.empty(3), (comm.rank + 1) % 3, 1).wait()
    elif where == "group":
        comm.prepare([(0, 1), (0, 2), (1, 2)])


@pytest.mark.parametrize("where", ["allreduce", "algorithm", "recv", "group"])
def test_stop_reaches_a_waiting_rank_and_keeps_its_state(
    cluster: Cluster, state: Callable[[], list[Any]], where: str
) -> None:
    def f() -> None:
        comm = communicator.create()
        if comm.rank == 0:
            time.sleep(60)
        waits(comm, where)
        time.sleep(60)

    pids = cluster.run(os.getpid)
    error, seconds = interrupted(cluster, f)
    assert seconds < 1
    assert str(error) == "the ranks were interrupted"
    assert cluster.state == "ready"
    assert cluster.run(sums) == [[3.0]] * 3
    assert state() == [0, 1, 2]
    assert cluster.run(os.getpid) == pids


def torchs_default_group() -> None:
    """Made in a run of its own: a rank whose store is not up yet is tried again only after up to a second."""
    import torch.distributed as dist

    dist.init_process_group("gloo")


def test_stop_kills_what_waits_in_native_code_and_says_so(cluster: Cluster, state: Callable[[], list[Any]]) -> None:
    def f() -> None:
        import torch.distributed as dist

        if dist.get_rank() == 1:
            time.sleep(60)
        dist.all_reduce(torch.ones(1))

    cluster.run(torchs_default_group)
    error, seconds = interrupted(cluster, f)
    assert seconds < 1.5
    assert str(error).endswith("\nranks 0, 2 did not come back in time and were killed: the state there is lost")
    assert state() == [None, 1, None]
    assert cluster.run(sums) == [[3.0]] * 3


def test_an_interrupt_between_runs_or_within_a_report_does_no_harm(cluster: Cluster) -> None:
    pids = cluster.run(os.getpid)
    for pid in pids:
        os.kill(pid, signal.SIGINT)  # an idle rank does not mind
    time.sleep(0.1)
    assert cluster.run(os.getpid) == pids

    def f() -> None:
        while True:
            worker.report("x" * 100_000)  # most of the time a message is half written

    for _ in range(3):
        error, seconds = interrupted(cluster, f, 0.2)
        assert seconds < 1.5
        assert str(error) == "the ranks were interrupted"
        assert cluster.run(os.getpid) == pids


# Deadlocks


def test_a_deadlock_lists_every_rank(cluster: Cluster, state: Callable[[], list[Any]]) -> None:
    f = cell("""
        def f():
            comm = communicator.create()
            if comm.rank == 0:
                comm.irecv(torch.empty(1), 1, 4).wait()  # never sent
            if comm.rank == 1:
                comm.iallreduce(torch.ones(2), (0, 1)).wait()
    """)
    started = time.monotonic()
    with pytest.raises(Deadlock) as caught:
        cluster.run(f)
    assert PATIENCE < time.monotonic() - started < PATIENCE + 5
    reason, *lines = str(caught.value).splitlines()
    assert reason == "ranks 0-1 wait for what does not come: no progress for 0.6 s (cluster.patience)"
    assert re.fullmatch(r"rank 0: recv from rank 1 tag 4, since \d\d:\d\d:\d\d \(\d+\.\d s\)", lines[0])
    assert re.fullmatch(r'  File "<cell \d+>", line 5, in f', lines[1])
    assert lines[2] == "    comm.irecv(torch.empty(1), 1, 4).wait()  # never sent"
    assert lines[3].startswith("rank 1: the making of a group over 0,1, since ")
    assert lines[5].strip() == "comm.iallreduce(torch.ones(2), (0, 1)).wait()"
    assert lines[6:] == ["rank 2: finished"]
    assert state() == [0, 1, 2]
    assert cluster.run(sums) == [[3.0]] * 3


def test_computing_and_sleeping_are_no_deadlock(cluster: Cluster) -> None:
    def f() -> float:
        comm = communicator.create()
        end = time.monotonic() + 3 * PATIENCE
        if comm.rank == 0:
            while time.monotonic() < end:
                torch.ones(100).sum()
        if comm.rank == 1:
            time.sleep(3 * PATIENCE)
        total: float = comm.allreduce(1.0)
        return total

    assert cluster.run(f) == [3.0] * 3


def test_a_stopped_rank_is_told_while_the_others_work(cluster: Cluster) -> None:
    """Nobody waits for it yet, as when another rank captures a model: it is told all the same, after half a second."""
    pids = cluster.run(os.getpid)
    patience, cluster.patience = cluster.patience, 30.0

    def f() -> None:
        rank = communicator.create().rank
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        until = time.monotonic() + 20
        while rank != 1 and time.monotonic() < until:
            sum(range(1000))

    started = time.monotonic()
    with pytest.raises(Deadlock, match="^rank 1 cannot go on without help: no progress for 1 s") as caught:
        cluster.run(f)
    cluster.patience = patience
    assert time.monotonic() - started < 5
    assert "\nrank 0: at work\nrank 1: stopped (SIGSTOP) for at least 0." in str(caught.value)
    after = cluster.run(os.getpid)
    assert [a == b for a, b in zip(after, pids, strict=True)] == [True, False, True]
    assert cluster.run(sums) == [[3.0]] * 3


def test_a_second_interrupt_is_told_however_early_it_comes(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def press(*_: Any) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(Watchdog, "waits", press)
    error, _ = interrupted(cluster, lambda: time.sleep(60))
    assert str(error).endswith("ranks 0-2 did not come back in time and were killed: the state there is lost")
    monkeypatch.undo()
    assert cluster.run(sums) == [[3.0]] * 3


def test_a_long_message_to_a_stopped_rank_ends_it(cluster: Cluster) -> None:
    """The driver does not wait for ever until the rank takes it."""
    os.kill(cluster.run(os.getpid)[1], signal.SIGSTOP)
    with pytest.raises(RankDied, match=r"rank 1 was stopped \(SIGSTOP\) and did not take what it was sent"):
        cluster.run(len, "x" * (8 << 20))
    assert cluster.run(len, "x" * (8 << 20)) == [8 << 20] * 3


def test_torchs_own_collectives_are_found_by_their_stack(cluster: Cluster) -> None:
    f = cell("""
        def f():
            import torch.distributed as dist
            if dist.get_rank() != 2:
                dist.all_reduce(torch.ones(1))  # rank 2 does not come
    """)
    patience, cluster.patience = cluster.patience, 30.0
    cluster.run(torchs_default_group)
    cluster.patience = patience
    with pytest.raises(Deadlock) as caught:
        cluster.run(f)
    assert "rank 0: torch's own all_reduce, for at least " in str(caught.value)
    assert str(caught.value).count("dist.all_reduce(torch.ones(1))  # rank 2 does not come") == 2
    assert "rank 2: finished" in str(caught.value)
    assert cluster.run(sums) == [[3.0]] * 3


def spinning(seconds: float) -> None:
    """What a rank does while torch waits for a GPU."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_a_wait_for_a_gpu_that_spins_is_a_wait_but_for_longer(cluster: Cluster) -> None:
    f = cell("""
        def f():
            if rank() == 2:
                communicator.create().barrier()  # to which the others do not come
            notes.noted(spinning, 'torch.cuda.synchronize')(60)
    """)
    f.__globals__.update(spinning=spinning, notes=notes)
    cluster.run(sums)
    started = time.monotonic()
    cluster.patience = 0.2
    try:
        with pytest.raises(Deadlock) as caught:
            cluster.run(f)
    finally:
        cluster.patience = PATIENCE
    assert time.monotonic() - started > 5 * 0.2
    assert "rank 0: its GPU, in torch.cuda.synchronize, since " in str(caught.value)
    assert "rank 2: barrier over 0,1,2, since " in str(caught.value)
    cluster.run(sums)


def test_torchs_waits_for_a_gpu_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    owners = [torch.cuda, torch.cuda.Event, torch.cuda.Stream]
    for owner in owners:  # (so that they are put back)
        monkeypatch.setattr(owner, "synchronize", lambda *args: 7)
    notes.note_device_waits()
    said: list[str] = []
    monkeypatch.setattr(notes, "waiting", lambda what, since: said.append(what))
    assert [owner.synchronize() for owner in owners] == [7, 7, 7]
    assert said == [f"its GPU, in torch.cuda.{name}synchronize" for name in ("", "Event.", "Stream.")]
    assert all(map(notes.is_device_wait, said))
    assert not notes.is_device_wait("recv from rank 1 tag 7")


def test_patience_can_be_changed_and_must_be_seconds(cluster: Cluster) -> None:
    assert cluster.patience == PATIENCE
    cluster.patience = None
    try:
        error, _ = interrupted(cluster, lambda: sums() if rank() else None, after=3 * PATIENCE)
        first, second, *lines = str(error).splitlines()  # an interrupt tells what patience would have told
        assert first == "the ranks were interrupted"
        assert second == "ranks 1-2 wait for what does not come"
        assert lines[0] == "rank 0: finished"
        assert re.match(r"rank 1: allreduce of a list of 1 float64 for sum over 0,1,2, since ", lines[1])
        with pytest.raises(PlanError, match="patience=0: must be seconds above 0, or None"):
            cluster.patience = 0
        for value in (-1, True, "long"):
            with pytest.raises(PlanError, match="patience="):
                Cluster(2, patience=value)  # type: ignore[arg-type]
    finally:
        cluster.patience = PATIENCE
    assert cluster.run(sums) == [[3.0]] * 3


def test_native_code_that_holds_the_interpreter_is_seen(cluster: Cluster) -> None:
    def f() -> None:
        if rank() == 2:
            time.sleep(0.3)
            raise ValueError("now")
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            ctypes.PyDLL(None).sleep(60)

    with pytest.raises(ValueError, match="now") as caught:
        cluster.run(f)
    assert "meanwhile ranks 0-1 were at work:" in caught.value.__notes__[0]
    assert "ctypes.PyDLL(None).sleep(60)" in caught.value.__notes__[0]


def test_a_thread_of_the_user_may_wake_ranks_that_all_wait(cluster: Cluster) -> None:
    def f() -> float:
        comm = communicator.create()
        comm.barrier()
        if comm.rank == 0:
            threading.Timer(4.5, lambda: comm.isend(torch.ones(1), 1, 5).wait()).start()
        elif comm.rank == 1:
            comm.irecv(torch.empty(1), 0, 5).wait()
        total: float = comm.allreduce(1.0)
        return total

    patience, cluster.patience = cluster.patience, 30.0
    try:
        assert cluster.run(f) == [3.0] * 3
    finally:
        cluster.patience = patience


def test_a_rank_may_have_begun_to_wait_just_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only stacks show that ranks wait in torch's own communication, they must be the same a while later."""
    lines = [10]

    def stack(entries: Any) -> dict[int, list[stacks.Frame]]:
        return {rank: [("/lib/torch/distributed/distributed_c10d.py", lines[-1], "all_reduce")] for rank, *_ in entries}

    monkeypatch.setattr(watchdog, "_see", lambda *_: Seen("", 0.0, 0, False))
    monkeypatch.setattr(stacks, "ask", stack)
    monkeypatch.setattr(stacks, "stopped", lambda _: False)
    page: Any = None
    ranks: list[stacks.Entry] = [(rank, SimpleNamespace(pid=os.getpid()), page) for rank in (0, 1)]  # type: ignore[list-item]
    dog = Watchdog(1.0)
    assert dog.look(ranks) is None
    for line in (10, 20):
        lines.append(line)
        dog.same = 1.0
        assert dog.look(ranks) is None
        assert dog.same == pytest.approx(0.5, abs=0.4)  # (looked at again after half a second)
    dog.same = 1.0
    found = dog.look(ranks)
    assert found is not None
    assert "torch's own all_reduce" in found[0]
