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
from tests.execution.over_namespaces import DECIDING, LIMITED, PLANS, near, trained

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

    def limit(self, rate: str | None) -> None:
        """Give both ends of the cable a bandwidth, such as "100mbit"; None: as fast as it is."""
        for name, cable in zip(self.names, self.cables, strict=True):
            words = ["tc", "-n", name, "qdisc", "replace" if rate else "del", "dev", cable, "root"]
            words += ["tbf", "rate", rate, "burst", "64kb", "latency", "1s"] if rate else []
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            if done.returncode:
                raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")

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


@pytest.fixture(scope="module")
def running(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Any], Path]]:
    """The script under one torchrun for several tests, since starting it costs 15 seconds of a core; and its folder. It
    waits for a folder of each part's name before it goes on."""
    folder = tmp_path_factory.mktemp("hosts")
    started = hosts.torchrun("plans,slow,slower", folder)
    try:
        yield started, folder
    finally:
        for process in started:
            process.terminate()
        finish(started)


@pytest.mark.extra("execution/test_over_hosts.py::test_losses_and_gradients")
def test_plans_on_two_hosts(running: tuple[list[Any], Path]) -> None:
    """Losses are those of one machine over gloo, bit for bit; gradients those of plain torch."""
    started, folder = running
    (folder / "plans").mkdir()
    found = [wait_for(folder / f"plans/{k}.json", started) for k in range(len(PLANS) + len(DECIDING))]
    with Cluster(4, device="cpu", transport="gloo") as four:
        for plan, one in zip(PLANS, found, strict=False):
            assert one["losses"] == trained(plan, four).losses, plan
    for plan, one in zip((*PLANS, *DECIDING), found, strict=True):
        assert one["error"] <= 1e-12, plan
        assert one["clock_error"] > 0, plan


@pytest.mark.extra("execution/test_emulation.py::test_the_measured_step_is_the_predicted_one")
def test_steps_on_slow_cables_take_as_long_as_predicted(hosts: Hosts, running: tuple[list[Any], Path]) -> None:
    """Within 15 %, in one of three attempts. Other work on the machine makes steps
    longer, but little: the ranks compute a few milliseconds of a step of 1 to 3 seconds. (At 200 Mbit/s the cores
    count: beside eight other busy processes, a step of `pp=4` took 25 % longer.)"""
    started, folder = running
    (folder / "plans").mkdir(exist_ok=True)
    wait_for(folder / f"plans/{len(PLANS) + len(DECIDING) - 1}.json", started)
    for name, rate, limited in (("slow", "100mbit", LIMITED[1:]), ("slower", "50mbit", LIMITED[:1])):
        try:
            hosts.limit(rate)
        except OSError as error:
            pytest.skip(f"no limit of bandwidth: it needs tc with tbf ({error})")
        try:
            (folder / name).mkdir()
            for number, (plan, *_) in enumerate(limited):
                found = wait_for(folder / f"{name}/{number}.json", started)
                assert near(**found), (rate, plan, found)
        finally:
            hosts.limit(None)
    finish(started)
    assert [process.returncode for process in started] == [0, 0]


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
