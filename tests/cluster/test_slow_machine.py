"""Clusters on a machine that stops processes for a while at any moment: what is late counts as what it is."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from minipar.cluster import Cluster, children, launch, notes, worker, zygote
from minipar.cluster.children import Children
from minipar.errors import RankDied, RankError

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(3, device="cpu") as made:
        made.run(lambda: setattr(worker, "kept", True))
        yield made


def keeps(cluster: Cluster) -> list[bool]:
    """Whether ranks have what the first run left in them: none of them was started again."""
    return cluster.run(lambda: hasattr(worker, "kept"))


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="ranks are not forked from a helper here")
def test_an_interrupt_that_comes_after_its_run_is_none(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The helper process, which sends it, is stopped meanwhile."""
    helper = launch.zygote(cluster._members.settings)._process.pid
    monkeypatch.setattr(children, "GRACE_AFTER_FAILURE", 30.0)
    look = Children.look

    def stop(self: Children, ranks: Any) -> dict[int, str]:
        os.kill(helper, signal.SIGSTOP)
        return look(self, ranks)

    def fail() -> None:
        if worker.context().rank == 0:
            raise ValueError("only here")
        time.sleep(0.4)

    def go_on() -> str:
        time.sleep(0.6)
        return "fine"

    try:
        monkeypatch.setattr(Children, "look", stop)
        with pytest.raises(ValueError, match="only here"):
            cluster.run(fail)
        threading.Timer(0.3, os.kill, (helper, signal.SIGCONT)).start()
        assert cluster.run(go_on) == ["fine"] * 3
    finally:
        os.kill(helper, signal.SIGCONT)
    assert all(keeps(cluster))


def test_an_interrupt_that_comes_before_the_function_ends_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(children, "GRACE_AFTER_FAILURE", 30.0)
    begun = tmp_path / "begun"

    def be_late() -> None:
        assert worker._rank is not None
        while notes.interrupted() <= worker._rank.run:  # (that of the run before)
            time.sleep(0.01)
        time.sleep(0.1)  # (and the signal is here)

    def prepare() -> None:
        if worker.context().rank == 1:
            worker.when_outdated(be_late)
        elif worker.context().rank == 0:
            raise ValueError("so that groups are made again")

    def fail() -> None:
        if worker.context().rank == 0:
            raise ValueError("only here")
        if worker.context().rank == 1:
            begun.touch()
        time.sleep(60)

    with pytest.raises(ValueError, match="so that"):
        cluster.run(prepare)
    with pytest.raises(ValueError, match="only here"):
        cluster.run(fail)
    assert not begun.exists()
    assert all(keeps(cluster))


def test_an_answer_counts_that_came_in_time_and_is_read_late(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    listen = Children._listen

    def stopped(self: Children, member: Any, heard: Any) -> None:
        listen(self, member, heard)
        if heard.called_back and member.rank == 1:
            time.sleep(2.0)  # (longer than an interrupted rank has; 2 has answered meanwhile)

    def fail() -> None:
        if worker.context().rank == 0:
            raise ValueError("only here")
        try:
            time.sleep(60)
        except KeyboardInterrupt:
            if worker.context().rank == 2:
                time.sleep(0.05)
            raise

    monkeypatch.setattr(children, "GRACE_AFTER_FAILURE", 1.5)
    monkeypatch.setattr(Children, "_listen", stopped)
    with pytest.raises(ValueError, match="only here"):
        cluster.run(fail)
    monkeypatch.undo()
    assert all(keeps(cluster))


def _no_room(*_: object) -> int:
    raise OSError(errno.EAGAIN, "no room for a process")


def _help(control: socket.socket, driver: int) -> None:
    zygote._fork = _no_room  # type: ignore[assignment]
    assert zygote._serve(control, driver, set())


def test_a_helper_that_cannot_fork_says_so_and_goes_on() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, open(os.devnull) as null:
        helper = multiprocessing.get_context("fork").Process(target=_help, args=(theirs, os.getpid()))
        helper.start()
        for number in range(2):
            socket.send_fds(ours, [pickle.dumps((number, "fork", []))], [null.fileno()] * 3)
            ours.settimeout(30)
            found, error = pickle.loads(ours.recv(4096))
            assert (found, error.errno) == (number, errno.EAGAIN)
        ours.sendall(pickle.dumps((0, "end")))
        helper.join(30)
        assert helper.exitcode == 0


def test_no_room_for_a_rank_is_told(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    no_room = OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    monkeypatch.setattr(launch.Zygote, "ask", lambda *_, **__: no_room)
    with pytest.raises(RankError, match="rank 0 cannot be started: Resource temporarily unavailable"):
        Cluster(1, device="cpu")
    monkeypatch.undo()
    assert all(keeps(cluster))


def test_the_end_of_a_rank_is_noticed_beside_many_open_files(cluster: Cluster) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] != resource.RLIM_INFINITY and limits[1] < 2000:
        pytest.skip("a process may not have so many files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(2000, limits[0]), limits[1]))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with pytest.raises(RankDied, match="rank 1 was killed by signal 9"):
            cluster.run(lambda: os.kill(os.getpid(), 9) if worker.context().rank == 1 else None)
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert cluster.run(lambda: worker.context().rank) == [0, 1, 2]
