"""macOS by substitution: driver and ranks run without what only Linux has; macos/sitecustomize.py takes it away.

The ranks are fresh interpreters, collectives go through gloo, and no process can be watched by a descriptor.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import cloudpickle
import pytest
import torch

from minipar import Cluster
from minipar.cluster import launch, processes
from minipar.comm import communicator
from minipar.errors import RankError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

MACOS = Path(__file__).parent / "macos"

DRIVER = """
import os, pathlib, signal, sys, time, warnings
from functools import partial
import torch
from minipar import Cluster, communicator, data, models, train
from minipar.cluster import launch, worker
from minipar.errors import RankDied

def messages():
    comm = communicator.create()
    total = comm.allreduce(torch.arange(5000, dtype=torch.int16))
    long = comm.all_gather(torch.full((200_000,), float(comm.rank)))
    got = torch.empty(100_000)
    sent = comm.isend(torch.full((100_000,), 7.0), 1 - comm.rank)
    comm.irecv(got, 1 - comm.rank).wait()
    sent.wait()
    return comm.transport, int(total[5]), float(long.sum()), float(got.sum())

def die():
    comm = communicator.create()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.allreduce(torch.ones(5000))

def hold():
    import ctypes, subprocess
    program = subprocess.Popen(["sleep", "60"])  # a program that knows nothing of pipes
    worker.report([os.getpid(), program.pid])
    ctypes.PyDLL(None).sleep(60)  # keeps the interpreter to itself

def files():
    return sorted(str(path) for path in pathlib.Path(launch.scratch_folder()).rglob("*"))

with Cluster(2) as cluster:
    assert worker.in_rank() is False and cluster.run(lambda: not hasattr(os, "pidfd_open")) == [True] * 2
    transports, *numbers = zip(*cluster.run(messages))
    assert transports == ("gloo (no anonymous files in memory on darwin)", "gloo (rank 0 has none)"), transports
    assert numbers == [(10, 10), (2e5, 2e5), (7e5, 7e5)], numbers
    try:
        cluster.run(die)
    except RankDied as error:
        assert "rank 1 was killed by signal 9" in str(error), error
    else:
        raise AssertionError("nobody noticed")
    assert [found[1] for found in cluster.run(messages)] == [10] * 2
    assert cluster.run(os.path.exists, launch.scratch_folder()) == [True] * 2
    losses = [
        train(partial(models.build, "mlp-wide"), data.for_model("mlp-wide"), plan, cluster=cluster, steps=2, batch=8,
              progress=False).losses
        for plan in ("dp=2", "pp=2 microbatches=2", "sync=ps mode=sync")
    ]
    assert torch.allclose(torch.tensor(losses), torch.tensor(losses[:1] * 3), atol=1e-5), losses
    pids = cluster.run(os.getpid)
assert files() == [], files()
for pid in pids:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        continue
    raise AssertionError(pid)
cluster = Cluster(1)
cluster.run_with(lambda rank, pids: (print(*pids, flush=True), os.kill(os.getpid(), signal.SIGKILL)), hold)
"""


def test_ranks_train_are_replaced_and_end_with_their_driver(tmp_path: Path) -> None:
    path = os.pathsep.join([str(MACOS), *filter(None, sys.path)])
    # (macOS calls the loopback lo0, which is not here)
    environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path), "GLOO_SOCKET_IFNAME": "lo"}
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(DRIVER)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert found.stderr == ""
    assert found.returncode == -signal.SIGKILL
    assert re.fullmatch(r"\d+ \d+\n", found.stdout), found.stdout
    pids = [int(number) for number in found.stdout.split()]
    deadline = time.monotonic() + 20
    while (left := [pid for pid in pids if not _ended(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


def _ended(pid: int) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def test_sockets_of_a_long_temporary_folder_are_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def total() -> int:
        comm = communicator.create()
        if comm.rank == 0:
            comm.isend(torch.ones(3), 1).wait()
        else:
            comm.irecv(torch.empty(3), 0).wait()
        return int(comm.allreduce(1))

    long = tmp_path / ("long" * 20)
    long.mkdir()
    monkeypatch.setattr(launch, "_folders", {})
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    try:
        with Cluster(2, device="cpu") as cluster:
            assert cluster.run(total) == [2, 2]
        assert launch.scratch_folder().startswith(("/tmp/minipar-", "/var/tmp/minipar-"))
    finally:
        shutil.rmtree(launch.scratch_folder())


def test_where_sockets_have_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    macos = "/var/folders/zz/zyxvpxvq6csfxvn_n0000000000000/T"  # what TMPDIR is there
    made = []
    monkeypatch.setattr(os, "access", lambda path, how: True)
    monkeypatch.setattr(tempfile, "mkdtemp", lambda prefix, dir: made.append(dir) or f"{dir}/{prefix}12345678")
    for folder in (macos, f"/{'x' * 55}", f"/{'x' * 56}"):
        monkeypatch.setattr(launch, "_folders", {})
        monkeypatch.setattr(tempfile, "tempdir", folder)
        longest = f"{launch.scratch_folder()}/cluster-12345678/1000-10.1023"
        assert len(longest) <= 103
    assert made == [macos, f"/{'x' * 55}", "/tmp"]
    monkeypatch.setattr(os, "access", lambda path, how: False)
    with pytest.raises(RankError, match="set TMPDIR to a folder whose path has at most 56 bytes"):
        launch.scratch_folder()
    launch._folders.clear()  # (the last name was never made)


def test_the_end_of_a_process_is_seen_without_a_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        for _ in range(2):
            assert not processes.ends(process.pid, 0.01)
            monkeypatch.delattr(os, "pidfd_open", raising=False)
    finally:
        process.kill()
    assert processes.ends(process.pid, 5)  # not reaped yet
    process.wait(5)
    assert processes.ends(process.pid, 0.01)
