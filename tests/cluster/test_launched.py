"""torchrun's processes as ranks. A start of torchrun costs seconds, so each makes many checks: under_torchrun.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minipar.cluster import Cluster, launched
from minipar.cluster.launch import child_environment
from tests.cluster import under_torchrun

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("under_torchrun.py")
MODULE = """
from functools import partial
import torch
from minipar import models

def build():
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(32, 6, generator=generator), torch.randint(10, (32,), generator=generator)
    return partial(models.mlp, (6, 16, 10)), rows
"""


def torchrun(ranks: int, what: str, folder: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a function of the script on so many ranks. If it takes too long, torchrun is told to end its processes."""
    words = [*options, f"--nproc-per-node={ranks}", str(SCRIPT), what, str(folder)]
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    environment = {**child_environment(), "OMP_NUM_THREADS": "1", **variables}
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            out, err = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            process.terminate()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def found(folder: Path, what: str) -> list[dict[str, Any]]:
    """What each rank has found, in rank order."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{what}-[0-9]*.json"))]


class Launches:
    """Two launches of one run, on two ranks and then on four, and what they left in a folder: a plan and a module are
    there, too. The first one is begun again once, and fails."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "plan.toml").write_text("dp = 2\nmicrobatches = 2\n")
        (folder / "mine.py").write_text(MODULE)
        same = "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-id=again"
        path = os.pathsep.join([str(folder), *filter(None, sys.path)])
        self.failed = torchrun(2, "interrupted", folder, *same, "--max-restarts=1", PYTHONPATH=path, TMPDIR=str(folder))
        self.after = found(folder, "interrupted")
        self.done = torchrun(4, "interrupted", folder, *same, MINIPAR_HOST="a,a,b,b")


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Launches:
    return Launches(tmp_path_factory.mktemp("launches"))


@pytest.fixture(scope="module")
def two(launches: Launches) -> list[dict[str, Any]]:
    ranks = found(launches.folder, "two")
    assert len(ranks) == 2, launches.failed.stderr[-4000:]
    return ranks


@pytest.fixture(scope="module")
def over_gloo() -> Iterator[Cluster]:
    with Cluster(2, device="cpu", transport="gloo") as cluster:
        yield cluster


@pytest.mark.parametrize("plan", under_torchrun.TWO)
def test_two_ranks_train_as_a_local_cluster_does(two: list[dict[str, Any]], over_gloo: Cluster, plan: str) -> None:
    run = under_torchrun.trained(plan, over_gloo)
    for rank in two:
        assert rank[plan]["losses"] == run.losses  # bit for bit
        assert rank[plan]["error"] < 1e-12  # of gradients, against plain torch
        assert rank[plan]["ranks"] == len(run.trace.starts)
        assert rank[plan]["recorded"]
        assert 0 <= rank[plan]["begin"] < rank[plan]["time"]


def test_all_processes_return_what_rank_0_returns(two: list[dict[str, Any]]) -> None:
    assert len(two) == 2
    assert two[0]["pid"] != two[1]["pid"]
    different = {"pid", "seen", "cluster", "size", "refused", "raised", "unpicklable", "different", "command"}
    assert {key: two[0][key] for key in two[0].keys() - different} == {
        key: two[1][key] for key in two[1].keys() - different
    }


def test_no_process_imports_torchs_compiler(two: list[dict[str, Any]]) -> None:
    assert [rank["compiler"] for rank in two] == [False, False]


def test_functions_run_on_all_ranks_or_some(two: list[dict[str, Any]]) -> None:
    assert two[0]["sums"] == [3, 3]
    assert two[0]["one"] == [[two[1]["pid"], "1"]]


def test_what_is_impossible_is_refused_on_all_ranks(two: list[dict[str, Any]]) -> None:
    for rank in two:
        assert rank["cluster"]["kind"] == "RankError"
        assert "2 processes are the ranks; leave cluster= out" in rank["cluster"]["text"]
        assert rank["size"]["kind"] == "PlanError"
        assert "dp=4 pp=1 needs 4 ranks, but torchrun started 2 (WORLD_SIZE)" in rank["size"]["text"]
        assert "possible is on_death=abort" in rank["refused"]["text"]
        assert "cannot be pickled" in rank["unpicklable"]["text"]


def test_different_calls_are_an_error_on_all_ranks(two: list[dict[str, Any]]) -> None:
    for rank in two:
        assert rank["different"]["kind"] == "RankError"
        assert "rank 0 is at train, and rank 1 at evaluate" in rank["different"]["text"]


def test_an_error_of_one_rank_is_raised_on_all_and_they_go_on(two: list[dict[str, Any]]) -> None:
    for rank in two:
        assert (rank["raised"]["kind"], rank["raised"]["text"]) == ("ValueError", "only here")
        assert "raised on rank 1:" in rank["raised"]["notes"]
        assert 'raise ValueError("only here")' in rank["raised"]["notes"]
        assert "rank 0 was interrupted at" in rank["raised"]["notes"]
        assert rank["raised"]["took"] < 10
        assert rank["stopped"] < 40  # what came after it


def test_rank_0_calls_back_and_ends_the_run(two: list[dict[str, Any]]) -> None:
    assert two[0]["seen"] == [0, 1, 2, 3, 4]
    assert two[1]["seen"] == []
    assert two[0]["stopped"] == two[1]["stopped"] < 40


def test_a_saved_run_goes_on_under_another_plan(two: list[dict[str, Any]], over_gloo: Cluster) -> None:
    whole = under_torchrun.trained("pp=2", over_gloo, steps=5)
    assert two[0]["resumed"] == pytest.approx(whole.losses[3:], rel=1e-12)
    assert two[0]["evaluated"] == pytest.approx(whole.losses[3], rel=1e-12)
    losses, after, times = zip(*two[0]["loop"], strict=True)
    assert losses == pytest.approx(whole.losses[:3], rel=1e-12)
    assert after == pytest.approx(whole.losses[1:4], rel=1e-12)
    assert min(times) > 0


def test_four_ranks_on_two_hosts_that_share_no_memory_train_as_a_local_cluster_over_gloo(launches: Launches) -> None:
    ranks = found(launches.folder, "four")
    assert len(ranks) == 4, launches.done.stderr[-4000:]
    with Cluster(4, device="cpu", transport="gloo") as cluster:
        for plan in under_torchrun.FOUR:
            run = under_torchrun.trained(plan, cluster)
            for rank in ranks:
                assert rank[plan]["losses"] == run.losses  # bit for bit
                assert rank[plan]["error"] < 1e-12


def test_a_launch_that_is_killed_and_fails_goes_on_and_at_last_on_other_ranks(
    launches: Launches, over_gloo: Cluster
) -> None:
    failed = launches.failed
    assert failed.returncode == 1
    assert "exitcode: -9" in failed.stderr
    assert failed.stderr.count('raise ValueError("the loss of rank 1")') == 1  # one traceback, on rank 0
    assert "raised on rank 1:" in failed.stderr
    assert not launches.after
    assert not list(launches.folder.glob("minipar-*"))  # temporary folders of processes that were killed

    whole = under_torchrun.trained("dp=2", over_gloo, steps=12).losses
    begins = []
    for attempt in range(3):
        lines = [line.split() for line in (launches.folder / f"begin-{attempt}").read_text().splitlines()]
        begins.append(int(lines[0][0]))
        for step, loss in lines:  # on the same number of ranks bit for bit
            assert float(loss) == pytest.approx(whole[int(step)], rel=1e-12 if attempt == 2 else 0)
    assert begins[0] == 0
    assert begins[1] in (2, 4)
    assert begins[2] in (6, 8, 10)
    ranks = found(launches.folder, "interrupted")
    assert len(ranks) == 4, launches.done.stderr[-4000:]
    for rank in ranks:
        assert rank["first"] == begins[2]
        assert rank["losses"] == pytest.approx(whole[begins[2] :], rel=1e-12)
        assert rank["error"] < 1e-12


def test_the_command_line_runs_under_torchrun_and_rank_0_prints(two: list[dict[str, Any]]) -> None:
    for rank in two:
        assert rank["command"]["status"] == 0, rank["command"]["err"]
    result = json.loads(two[0]["command"]["out"])
    assert two[1]["command"]["out"] == ""
    assert result["losses"] == pytest.approx(result["reference_losses"], rel=1e-5)
    assert result["max_gradient_error"] < 1e-5
    assert len(result["bytes_sent"]) == 2


def test_another_world_size_than_the_plans_is_one_line(launches: Launches) -> None:
    assert launches.done.returncode == 1  # torchrun's; minipar's own status is 2
    (line,) = [line for line in launches.done.stderr.splitlines() if line.startswith("minipar: ")]
    assert line.startswith("minipar: plan dp=2 pp=1 needs 2 ranks, but torchrun started 4 (WORLD_SIZE); give it ")
    assert "exitcode: 2" in launches.done.stderr


def test_outside_of_torchrun_nothing_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    assert not launched.started()
    assert launched.given_or_here(None) is None
    assert os.environ.get("RANK") is None
