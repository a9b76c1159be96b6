"""Two hosts of two ranks with networks of their own (Linux's network namespaces), joined by one cable.

Where making these is not permitted, these tests are skipped; test_over_hosts.py keeps ranks apart without them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minipar.cluster import Cluster
from minipar.cluster.launch import child_environment
from minipar.execution.saving.folder import open_folder
from tests.execution.over_namespaces import trained

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("over_namespaces.py")
ROOT = SCRIPT.parents[2]
WITHIN = 10.0  # seconds in which a host that was cut off is reported


class Hosts:
    """Two network namespaces, and torchrun in each of them."""

    def __init__(self) -> None:
        self.names = [f"minipar-{os.getpid()}-{k}" for k in (0, 1)]
        self.cables = [f"mp{os.getpid()}{end}" for end in "ab"]

    def make(self) -> None:
        for name in self.names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        a, b = self.cables
        ip("link", "add", a, "netns", self.names[0], "type", "veth", "peer", "name", b, "netns", self.names[1])
        for k, (name, cable) in enumerate(zip(self.names, self.cables, strict=True), 1):
            ip("-n", name, "addr", "add", f"10.77.0.{k}/24", "dev", cable)
            ip("-n", name, "link", "set", cable, "up")

    def end(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def cut(self, off: bool = True) -> None:
        """Unplug the cable, or plug it in again."""
        ip("-n", self.names[0], "link", "set", self.cables[0], "down" if off else "up")

    def torchrun(self, what: str, folder: Path) -> list[subprocess.Popen[str]]:
        """Start the script with two ranks on each host."""
        words = ["--nnodes=2", "--nproc-per-node=2", "--master-addr=10.77.0.1", "--master-port=29511"]
        environment = {
            **child_environment(),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'widgets'}",
        }
        environment.pop("MINIPAR_HOST", None)
        started = []
        for k, name in enumerate(self.names):
            command = ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", *words]
            command += [f"--node-rank={k}", str(SCRIPT), what, str(folder)]
            started.append(
                subprocess.Popen(
                    command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT
                )
            )
        return started


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    if sys.platform != "linux" or shutil.which("ip") is None:
        pytest.skip("no network namespaces: they need Linux and iproute2")
    made = Hosts()
    try:
        made.make()
    except OSError as error:
        made.end()
        pytest.skip(f"no network namespaces: they need rights that are not here ({error})")
    yield made
    made.end()


def finish(started: list[subprocess.Popen[str]], seconds: float = 180.0) -> list[str]:
    """Wait until all have ended; what they wrote as errors."""
    told = []
    try:
        for process in started:
            told.append(process.communicate(timeout=seconds)[1])
    finally:
        for process in started:
            process.terminate()
    return told


def wait_for(path: Path, started: list[subprocess.Popen[str]], seconds: float = 300.0) -> dict[str, Any]:
    """What is in a file of the script, as soon as it is there."""
    until = time.monotonic() + seconds
    while not path.exists():
        if any(process.poll() for process in started):
            pytest.fail("\n".join(finish(started)))
        assert time.monotonic() < until, f"{path.name} did not come"
        time.sleep(0.05)
    return json.loads(path.read_text() or "{}")


@pytest.mark.extra("cluster/test_far.py::test_a_rank_that_cannot_be_interrupted_ends_after_the_driver")
@pytest.mark.many(4)
@pytest.mark.parametrize("what", ["cut", "sums"])
def test_a_host_that_is_cut_off_is_reported(hosts: Hosts, tmp_path: Path, what: str) -> None:
    """In mid-step. Nothing hangs on either side, and another number of ranks goes on from the last save."""
    folder = tmp_path / what
    folder.mkdir()
    started = hosts.torchrun(what, tmp_path)
    try:
        wait_for(folder / "begun", started)
        hosts.cut()
        at = time.time()
        for host in (0, 2):
            until = time.time() + 4 * WITHIN
            while not (reports := [r for r in (host, host + 1) if (folder / f"reported-{r}.json").exists()]):
                assert time.time() < until, f"no rank of host {host // 2} has reported"
                time.sleep(0.05)
            report = json.loads((folder / f"reported-{reports[0]}.json").read_text())
            assert report["at"] - at <= WITHIN, report
            assert "rank" in report["text"]
    finally:
        for process in started:
            process.terminate()
        finish(started)
        hosts.cut(False)
    if what == "cut":
        saved = open_folder(folder / "saved")
        assert saved.header.step >= 10
        with Cluster(2, device="cpu") as two:
            run = trained("pp=2 microbatches=2", two, steps=2, resume=folder / "saved")
            assert len(run.losses) == 2
