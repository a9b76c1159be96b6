"""A host that is cut off in the middle of a run: two network namespaces take the place of two machines."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from minipar.cluster.launch import child_environment
from minipar.execution.saving.folder import open_folder
from tests.cluster.test_launched import SCRIPT

pytestmark = pytest.mark.slow
A, B = (f"minipar-{os.getpid()}-{host}" for host in "ab")
ENDPOINT = "10.77.0.1:29400"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[None]:
    """Two namespaces, joined by a cable."""
    if shutil.which("ip") is None:
        pytest.skip("needs iproute2")
    try:
        ip("netns", "add", A)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are not permitted here: {error.stderr.decode().strip()}")
    try:
        ip("netns", "add", B)
        ip("link", "add", "cable", "netns", A, "type", "veth", "peer", "name", "cable", "netns", B)
        for number, name in enumerate((A, B), 1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "cable")
            for device in ("lo", "cable"):
                ip("-n", name, "link", "set", device, "up")
        yield
    finally:
        end_all()
        for name in (A, B):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def end_all() -> None:
    """End all processes of the two hosts."""
    for name in (A, B):
        found = subprocess.run(["ip", "netns", "pids", name], check=False, capture_output=True, text=True)
        for pid in map(int, found.stdout.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def start(host: str, number: int, folder: Path) -> subprocess.Popen[bytes]:
    words = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d"]
    words += [f"--rdzv-endpoint={ENDPOINT}", "--rdzv-id=cut", f"--local-addr=10.77.0.{number}"]
    words += [f"--rdzv-conf=is_host={int(number == 1)}", str(SCRIPT), "cut", str(folder)]
    with open(folder / f"log-{number}", "wb") as log:
        return subprocess.Popen(
            ["ip", "netns", "exec", host, sys.executable, *words],
            env={**child_environment(), "OMP_NUM_THREADS": "1"}, stdout=log, stderr=log,
        )  # fmt: skip


def wait_for(path: Path, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path.name} did not come within {seconds:g} s"
        time.sleep(0.05)


def test_a_host_that_is_cut_off_is_reported_within_ten_seconds(hosts: None, tmp_path: Path) -> None:
    both = [start(A, 1, tmp_path), start(B, 2, tmp_path)]
    try:
        wait_for(tmp_path / "now", 200)
        begin = time.time()
        ip("-n", B, "link", "set", "cable", "down")
        wait_for(tmp_path / "over-0", 60)
        wait_for(tmp_path / "over-1", 60)
        assert float((tmp_path / "over-0").read_text()) - begin < 10
        time.sleep(1.0)  # (it writes its traceback)
        text = (tmp_path / "log-1").read_text()
        assert "rank 1" in text
        assert "Error: rank 1 is gone, or its host is cut off" in text or "RankDied: rank 1 ended" in text
        assert open_folder(tmp_path / "saved").header.step >= 30  # from which the run goes on
    finally:
        end_all()  # (torchrun itself waits minutes for the other host)
        for process in both:
            process.wait(60)
