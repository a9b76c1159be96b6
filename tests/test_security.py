"""What SECURITY.md says: who may connect, who may read the files, and that nothing is unpickled before the key."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import secrets
import socket
import stat
import struct
import threading
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from minipar.cluster import far, launch, threads
from minipar.comm import communicator
from minipar.comm.transport import sockets
from minipar.comm.transport.sockets import Far, Sockets
from minipar.execution.memory.disk import DiskStore
from minipar.execution.updating import Form
from minipar.server import messages, process
from minipar.server.process import Server
from minipar.server.pushing import Servers
from minipar.server.shard import Settings, Shard
from tests.conftest import Clusters

TOKEN = secrets.token_bytes(32)
BOMB = pickle.dumps(eval)  # if this were unpickled, `unpickled` would say so
STRANGERS = {
    "no key": b"",
    "a wrong key": struct.pack("!32sI", bytes(32), 0) * 4,
    "garbage": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + BOMB,
    "too much": secrets.token_bytes(1 << 20) * 4,
}


@pytest.fixture
def unpickled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was unpickled in this process."""
    found: list[str] = []
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, lambda *_, name=name: found.append(name))
    return found


def come(address: Any, said: bytes, goes_on: bool = False) -> socket.socket:
    """A stranger that says this, as far as it is heard."""
    one = socket.create_connection(address)
    one.settimeout(0.2)
    try:
        one.sendall(said)
        if not goes_on:
            one.shutdown(socket.SHUT_WR)
    except OSError:
        pass
    return one


@pytest.mark.parametrize("said", STRANGERS.values(), ids=STRANGERS)
def test_a_driver_of_ranks_elsewhere_lets_in_who_has_the_key(said: bytes, unpickled: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address, kept = listener.getsockname(), []

        def both() -> None:
            kept.append(come(address, said))
            kept.append(far.connect(address, TOKEN, 1, 5))

        thread = threading.Thread(target=both)
        thread.start()
        found = far.accept(listener, TOKEN, [1], 20)
        thread.join()
        assert found[1].getpeername() == kept[1].getsockname()
        for one in (*found.values(), *kept):
            one.close()
    assert not unpickled


@pytest.mark.parametrize("said", STRANGERS.values(), ids=STRANGERS)
def test_messages_between_hosts_are_of_ranks_alone(tmp_path: Path, said: bytes, unpickled: list[str]) -> None:
    store = dist.HashStore()
    ends = [Sockets(k, str(tmp_path / f"{k}"), Far(frozenset((1 - k,)), "127.0.0.1", store, TOKEN)) for k in range(2)]
    with closing(ends[0]) as a, closing(ends[1]) as b, closing(come(b.listeners[1].getsockname(), said)):
        a.send(torch.ones(1), 1, 3)
        b.receive(into := torch.zeros(1), 0, 3).wait()
        assert into.item() == 1.0
        assert set(b.incoming) == {0}
    assert not unpickled


def test_a_rank_does_not_wait_for_a_stranger_that_says_a_byte_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "_PROOF", 0.3)
    store, said = dist.HashStore(), list[int]()
    ends = [Sockets(k, str(tmp_path / f"{k}"), Far(frozenset((1 - k,)), "127.0.0.1", store, TOKEN)) for k in range(2)]
    with closing(ends[0]) as a, closing(ends[1]) as b, closing(come(b.listeners[1].getsockname(), b"", True)) as slow:
        thread = threading.Thread(target=drip, args=(slow, said))
        thread.start()
        a.send(torch.ones(1), 1, 3)
        b.receive(into := torch.zeros(1), 0, 3).wait()
        assert into.item() == 1.0
        thread.join(20)
        assert len(said) < 20


def drip(slow: socket.socket, said: list[int]) -> None:
    with contextlib.suppress(OSError):
        while True:
            said.append(slow.send(b"\0"))
            time.sleep(0.1)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    """A parameter server of one worker, over TCP."""
    store = dist.HashStore()
    monkeypatch.setattr(messages, "_place", lambda folder: (store, "127.0.0.1"))
    settings = Settings("", (Form("w", (2,), torch.float32),), workers=1, steps=1)
    return Server(settings, 0, Shard(settings, 0, [torch.zeros(2)], partial(torch.optim.SGD, lr=1.0)))


@pytest.mark.parametrize("said", STRANGERS.values(), ids=STRANGERS)
def test_a_parameter_server_hears_who_proves_the_key(server: Server, said: bytes, unpickled: list[str]) -> None:
    ended, (store, _) = threads.start(server.run, "serves"), messages._place("")
    store.wait(["0"])
    stranger = come(tuple(json.loads(store.get("0"))), said)
    with closing(Servers(server.settings, 0)) as ps:
        while ps.next_step() is not None:
            ps.push({"w": torch.ones(2)})
    assert ended.wait(10)
    assert {row.worker for row in server.served.order} == {0, -1}
    assert server.served.values.view(torch.float32).tolist() == [-1.0, -1.0]
    stranger.close()
    assert not unpickled


def test_nor_does_a_parameter_server(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "SHORTLY", 0.3)
    ended, (store, _), said = threads.start(server.run, "serves"), messages._place(""), list[int]()
    store.wait(["0"])
    with closing(come(tuple(json.loads(store.get("0"))), b"", True)) as slow:
        drip(slow, said)  # (until the server hangs up)
    with closing(Servers(server.settings, 0)) as ps:
        while ps.next_step() is not None:
            ps.push({"w": torch.ones(2)})
    assert ended.wait(10)


def modes(folder: str) -> dict[str, int]:
    """The permissions of a folder and of everything below it."""
    found = {folder: stat.S_IMODE(os.lstat(folder).st_mode)}
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = os.path.join(place, name)
            found[path] = stat.S_IMODE(os.lstat(path).st_mode)
    return found


def under_no_umask() -> dict[str, int]:
    os.umask(0)
    comm = communicator.create()
    comm.barrier()
    from minipar.cluster import worker

    return modes(os.path.dirname(worker.context().store))


@pytest.mark.ranks
def test_files_are_their_user_s_alone_whatever_the_umask(clusters: Clusters, tmp_path: Path) -> None:
    cluster = clusters(2)
    cluster.run(int)
    inside: dict[str, int] = cluster.run(under_no_umask)[0]
    cluster.run(os.umask, 0o022)
    before = os.umask(0)
    try:
        meeting = str(tmp_path / "server")
        os.mkdir(meeting, 0o700)
        messages.listen(meeting, 0).close()
        store = DiskStore(str(tmp_path))
        found = inside | modes(meeting) | modes(launch.scratch_folder())
        found["offload"] = stat.S_IMODE(os.fstat(store.file).st_mode)
        store.close()
    finally:
        os.umask(before)
    sockets = [name for name in inside if re.search(r"/\d+-\d+\.[01]$", name)]
    assert len(sockets) == 2  # of both ranks (lanes of algorithms have more, by the hash of their group)
    assert {name: oct(mode) for name, mode in found.items() if mode & 0o077} == {}


def test_the_page_names_the_tests() -> None:
    """SECURITY.md says what is held by which test."""
    root = Path(__file__).parents[1]
    page = (root / "SECURITY.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)`", page)
    assert len(named) >= 5
    for path in named:
        assert (root / path).is_file(), path
