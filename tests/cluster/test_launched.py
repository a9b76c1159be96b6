"""torchrun's processes as ranks. A start of torchrun costs seconds, so each makes many checks: see under_torchrun.py."""

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
from tests.conftest import Clusters

SCRIPT = Path(__file__).with_name("under_torchrun.py")
STANDALONE = ("--standalone",)


def torchrun(ranks: int, what: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a function of the script on so many ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", *(options or STANDALONE), f"--nproc-per-node={ranks}"]
    environment = {**child_environment(), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, str(SCRIPT), what, str(folder)], capture_output=True, text=True, timeout=300, env=environment
    )


def found(folder: Path) -> list[dict[str, Any]]:
    """What each rank has found, in rank order."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("[0-9]*.json"))]


def ended_well(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("two")
    ended_well(torchrun(2, "two", folder))
    return found(folder)


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
    different = {"pid", "seen", "cluster", "size", "refused", "raised", "unpicklable"}
    assert {key: two[0][key] for key in two[0].keys() - different} == {
        key: two[1][key] for key in two[1].keys() - different
    }


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


def test_four_ranks_train_as_a_local_cluster_does(tmp_path: Path, clusters: Clusters) -> None:
    ended_well(torchrun(4, "four", tmp_path))
    ranks = found(tmp_path)
    assert len(ranks) == 4
    for plan in under_torchrun.FOUR:
        run = under_torchrun.trained(plan, clusters(4))
        for rank in ranks:
            assert rank[plan]["losses"] == run.losses
            assert rank[plan]["error"] < 1e-12


def test_an_error_ends_all_with_its_traceback_once(tmp_path: Path) -> None:
    done = torchrun(2, "fail", tmp_path)
    assert done.returncode == 1
    assert done.stderr.count('raise ValueError("the loss of rank 1")') == 1
    assert "raised on rank 1:" in done.stderr
    assert "Root Cause (first observed failure):\n[0]:" in done.stderr  # it was rank 0 that said why
    assert not found(tmp_path)


def test_different_calls_are_one_error(tmp_path: Path) -> None:
    done = torchrun(2, "differ", tmp_path)
    assert done.returncode == 1
    assert "rank 0 is at train, and rank 1 at evaluate" in done.stderr


def test_a_killed_rank_is_started_again_and_the_run_goes_on(tmp_path: Path, over_gloo: Cluster) -> None:
    ended_well(torchrun(2, "die", tmp_path, "--standalone", "--max-restarts=1"))
    whole = under_torchrun.trained("dp=2", over_gloo, steps=8)
    for rank in found(tmp_path):
        assert rank["attempt"] == 1
        assert rank["first"] in (4, 6)
        assert rank["losses"] == whole.losses[rank["first"] :]
        assert rank["error"] < 1e-12


def test_another_launch_of_the_same_name_goes_on_with_another_number_of_ranks(
    tmp_path: Path, over_gloo: Cluster
) -> None:
    same = "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-id=again"
    done = torchrun(2, "die", tmp_path, *same)
    assert done.returncode == 1
    assert "Signal 9" in done.stderr
    ended_well(torchrun(4, "die", tmp_path, *same))
    whole = under_torchrun.trained("dp=2", over_gloo, steps=8)
    ranks = found(tmp_path)
    assert len(ranks) == 4
    for rank in ranks:
        assert rank["first"] in (4, 6)
        assert rank["losses"] == pytest.approx(whole.losses[rank["first"] :], rel=1e-12)


def test_outside_of_torchrun_nothing_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    assert not launched.started()
    assert launched.given_or_here(None) is None
    assert os.environ.get("RANK") is None
