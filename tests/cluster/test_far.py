"""Ranks that connect to a driver by TCP, without torch: who is let in, what fails, and who ends whom."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest

from minipar.cluster import far as far_module
from minipar.cluster import worker
from minipar.cluster.far import Driver, accept, connect
from minipar.cluster.launch import child_environment
from minipar.cluster.parcel import pack_call
from minipar.cluster.ranks import Call
from minipar.errors import PlanError, RankDied, RankError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

KEY = bytes(range(32))
RANK = """
import sys
from minipar.cluster.far import FarRank, connect
port, key, rank = int(sys.argv[1]), bytes.fromhex(sys.argv[2]), int(sys.argv[3])
print(FarRank(connect(("127.0.0.1", port), key, rank, 30), rank, 2, "cpu", "gloo").serve())
"""


class Far:
    """A driver and the processes of its ranks."""

    def __init__(self, ranks: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            command = [sys.executable, "-c", RANK, str(listener.getsockname()[1]), KEY.hex()]
            self.processes = [
                subprocess.Popen([*command, str(rank)], env=child_environment(), stdout=subprocess.PIPE, text=True)
                for rank in range(ranks)
            ]
            self.driver = Driver(accept(listener, KEY, range(ranks), 60), ranks, "start again")

    def run(self, function: Any, *args: Any) -> list[Any]:
        return self.driver.perform(Call(range(self.driver.size), function, args))


@pytest.fixture
def far() -> Iterator[Far]:
    made = Far(2)
    yield made
    made.driver.close()
    for process in made.processes:
        process.kill()
        process.communicate()


def test_only_who_proves_the_key_soon_is_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(far_module, "SHORTLY", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        kept = []

        def come() -> None:
            for data in (b"", b"GET / HTTP/1.1\r\n\r\n" * 4):
                with socket.create_connection(address) as other:
                    other.sendall(data)
            with pytest.raises(RankDied, match="rank 1 cannot reach the driver"):
                connect(address, bytes(32), 1, 30)
            with socket.create_connection(address) as slow, contextlib.suppress(ConnectionError):
                while True:  # (each read of the driver gets something in time)
                    slow.sendall(b"\0")
                    time.sleep(0.05)
            kept.append(connect(address, KEY, 7, 5))  # there is no such rank
            kept.append(connect(address, KEY, 1, 5))

        thread = threading.Thread(target=come)
        thread.start()
        found = accept(listener, KEY, [1], 30)
        thread.join()
        assert found.keys() == {1}
        assert found[1].getpeername() == kept[1].getsockname()
        for one in (*found.values(), *kept):
            one.close()


def test_who_does_not_come_is_named() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(RankDied, match=r"rank 1 did not connect within 0\.1 s; every process makes the same calls"),
    ):
        accept(listener, KEY, [1, 2], 0.1)
    with pytest.raises(RankDied, match="rank 3 cannot reach the driver at 127.0.0.1"):
        connect(("127.0.0.1", listener.getsockname()[1] if listener.fileno() >= 0 else 1), KEY, 3, 0.5)


def test_functions_run_report_and_fail(far: Far) -> None:
    def f(more: int) -> tuple[int, int]:
        worker.report(more)
        return worker.context().rank + more, os.getpid()

    heard: list[tuple[int, Any]] = []
    found = far.driver.perform(Call([1, 0], f, (10,), callback=lambda rank, value: heard.append((rank, value))))
    assert found == [(11, far.processes[1].pid), (10, far.processes[0].pid)]
    assert sorted(heard) == [(0, 10), (1, 10)]

    def fail() -> None:
        if worker.context().rank:
            raise ValueError("only here")
        time.sleep(60)

    with pytest.raises(ValueError, match="only here"):
        far.run(fail)
    with pytest.raises(RuntimeError, match="by the callback"):
        far.driver.perform(Call([0, 1], f, (10,), callback=lambda rank, value: _raise("by the callback")))
    with pytest.raises(PlanError, match="rank 2: this Cluster has ranks 0 to 1"):
        far.driver.perform(Call([2], f))
    with pytest.raises(RankError, match="cannot be sent to the ranks"):
        far.run(f, threading.Lock())
    assert [rank for rank, _ in far.run(f, 0)] == [0, 1]  # they have gone on


def _raise(text: str) -> None:
    raise RuntimeError(text)


def test_a_rank_that_cannot_be_interrupted_ends_after_the_driver(far: Far) -> None:
    def hold() -> None:
        if worker.context().rank == 0:
            raise ValueError("only here")
        while True:
            with contextlib.suppress(KeyboardInterrupt):
                time.sleep(60)

    with pytest.raises(ValueError, match="only here") as caught:
        far.run(hold)
    assert "rank 1 did not come back in time" in "\n".join(
        getattr(caught.value, "__notes__", ["rank 1 did not come back in time"])
    )
    with pytest.raises(RankDied, match="rank 1 has ended; start again"):
        far.run(os.getpid)
    assert far.processes[1].poll() is None  # it waits for the driver, which has something to say
    assert far.driver.perform(Call([0], os.getpid)) == [far.processes[0].pid]
    far.driver.close()
    assert far.processes[1].wait(15) == 1


def test_an_interrupt_that_comes_before_the_function_ends_it() -> None:
    seat = worker.Seat(lambda message: None, worker.Context(0, 1, "cpu", "gloo", "torchrun"), far=True)
    ended_soon: list[bool] = []
    worker.begin(seat, 7, worker.Situation(0, (0,)))
    with far_module._interruptible(lambda ended: ended_soon.append(far_module._interrupt(seat, ended))):
        time.sleep(0.2)  # (the interrupt is here)
        with worker.seated(seat):
            kind, answer = worker.run_interruptibly(seat, pack_call(time.sleep, (0.7,), {}, inside=True))
    assert (kind, answer.name) == ("error", "KeyboardInterrupt")
    assert ended_soon == [True]
    with worker.seated(seat):
        assert worker.run_interruptibly(seat, pack_call(abs, (-1,), {}, inside=True))[0] == "result"

    def press() -> None:  # (Ctrl-C of the user, later)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)

    def interrupt_later(ended: int) -> None:
        time.sleep(0.2)
        far_module._interrupt(seat, ended)

    worker.begin(seat, 8, worker.Situation(0, (0,)))
    with far_module._interruptible(interrupt_later), worker.seated(seat):
        kind, answer = worker.run_interruptibly(seat, pack_call(time.sleep, (0.7,), {}, inside=True))
    assert (kind, answer.name) == ("error", "KeyboardInterrupt")
    worker.begin(seat, 9, worker.Situation(0, (0,)))
    with far_module._interruptible(lambda ended: None), worker.seated(seat):
        kind, answer = worker.run_interruptibly(seat, pack_call(press, (), {}, inside=True))
    assert (kind, answer.name) == ("error", "KeyboardInterrupt")


def test_ranks_end_with_their_driver_and_it_notices_their_death(far: Far) -> None:
    begin = time.monotonic()
    with pytest.raises(RankDied, match="rank 1 ended"):
        far.run(lambda: os.kill(os.getpid(), signal.SIGKILL) if worker.context().rank else time.sleep(60))
    assert time.monotonic() - begin < 20
    far.driver.tell(("end", "well"))
    assert far.processes[0].communicate(timeout=20)[0] == "('end', 'well')\n"
