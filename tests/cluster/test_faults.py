"""What goes wrong while ranks start, end, or are called back: each is told, and the next call works."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minipar import Cluster
from minipar.cluster import members, notes, stacks, watchdog, worker
from minipar.cluster.interrupt import Interrupts
from minipar.cluster.watchdog import Watchdog
from minipar.comm.transport import board
from minipar.errors import RankError
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
    start = members.Members._start

    def while_it_starts(self: members.Members, rank: int) -> None:
        start(self, rank)
        if rank == 0:
            os.kill(pids[1], signal.SIGKILL)
            time.sleep(0.1)

    monkeypatch.setattr(members.Members, "_start", while_it_starts)
    os.kill(pids[0], signal.SIGKILL)
    time.sleep(0.1)
    with pytest.warns(RuntimeWarning, match="anew") as told:
        after = cluster.run(os.getpid)
    assert not set(after) & set(pids)
    assert {str(one.message).split()[1] for one in told} == {"0", "1"}


def test_nobody_waits_is_no_deadlock() -> None:
    watch = Watchdog(0.01)
    assert watch.look([], []) is None
    time.sleep(0.02)
    assert watch.look([], []) is None


# interrupts


def test_a_second_interrupt_is_told_with_what_was_lost(clusters: Clusters, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = clusters(2)
    collect = members.Members.collect

    def pressed(self: members.Members, heard: Any, *rest: Any, **more: Any) -> None:
        if heard.run and (heard.called_back or heard.waiting):
            signal.raise_signal(signal.SIGINT)
        collect(self, heard, *rest, **more)

    pids = cluster.run(os.getpid)
    with monkeypatch.context() as patch:
        patch.setattr(members.Members, "collect", pressed)
        with pytest.raises(KeyboardInterrupt, match=r"ranks 0, 1 did not come back .* the state there is lost"):
            cluster.run(time.sleep, 60)
    assert not set(cluster.run(os.getpid)) & set(pids)


def test_a_held_interrupt_comes_at_the_end_and_a_second_one_at_once() -> None:
    interrupts, reached = Interrupts(), []
    with pytest.raises(KeyboardInterrupt), interrupts.shielded():  # noqa: PT012
        with interrupts.shielded():
            signal.raise_signal(signal.SIGINT)
            reached.append("inside")
        reached.append("outside")
    with pytest.raises(KeyboardInterrupt), interrupts.shielded():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        reached.append("never")
    assert reached == ["inside", "outside"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupted_start_and_end_leave_no_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    with Cluster(1) as cluster:
        before = descriptors()
        kill = members.launch.Forked.kill

        def pressed(self: Any) -> None:
            signal.raise_signal(signal.SIGINT)
            kill(self)

        another = Cluster(2)
        with monkeypatch.context() as patch:
            patch.setattr(members.launch.Forked, "kill", pressed)
            with pytest.raises(KeyboardInterrupt):
                another.close()
        another.close()
        fork = members.launch.fork

        def while_it_forks(*given: Any) -> Any:
            signal.raise_signal(signal.SIGINT)
            return fork(*given)

        with monkeypatch.context() as patch:
            patch.setattr(members.launch, "fork", while_it_forks)
            with pytest.raises(KeyboardInterrupt):
                Cluster(2)
        assert descriptors() == before
        assert cluster.run(int) == [0]


@pytest.fixture
def seat() -> Any:
    """This process as a rank that an interrupt reaches."""
    seat = worker.Seat(lambda message: None, 0, 1, "cpu", "gloo", "local")
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
    for module, name, make in (
        ("pwrite", "rank-", lambda: notes.Page(str(tmp_path))),
        ("posix_fallocate", "board", lambda: board.Board(str(tmp_path / "board"), (0, 1), 0)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(os, module, full)
            with pytest.raises(
                RankError, match=rf"temporary folder {tmp_path} .*No space left on device; free"
            ) as told:
                make()
        assert "\n" not in str(told.value)
        assert name
    assert descriptors() == before


def test_pages_and_boards_have_all_their_room_before_they_are_mapped(tmp_path: Path) -> None:
    page = notes.Page(str(tmp_path))
    made = board.Board(str(tmp_path / "board"), (0, 1), 0)
    for path in tmp_path.iterdir():
        found = path.stat()
        assert found.st_blocks * 512 >= found.st_size, path
    page.close()
    made.unlink()
