"""Engines of ipyparallel as ranks. They take seconds to start, so all tests share two."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import torch

import minipar
from minipar import Cluster, PlanError, RankDied, RankError, communicator, models, train
from minipar.cluster import magic, worker
from minipar.cluster.attached import Attached
from tests.cluster.test_ranks import NAMES
from tests.conftest import Clusters

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    ipyparallel = pytest.importorskip("ipyparallel", reason="engines need pip install 'minipar[engines]'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        patch.setenv("OMP_NUM_THREADS", "1")
        engines = ipyparallel.Cluster(n=2, log_level=40)
        found = engines.start_and_connect_sync(activate=False)
    try:
        found.wait_for_engines(2, timeout=60, interactive=False)
        yield found
    finally:
        engines.stop_cluster_sync()


@pytest.fixture
def attached(client: Any) -> Iterator[Attached]:
    with Cluster.attach(client) as ranks:
        yield ranks


def hello() -> tuple[int, int]:
    print("hello from Python")
    os.system("echo hello from a child")
    return communicator.create().allreduce(worker.context().rank + 1), os.getpid()


def fail() -> None:
    if worker.context().rank == 1:
        raise ValueError("only here")
    time.sleep(60)


def test_a_client_without_engines_is_refused() -> None:
    with pytest.raises(RankError, match="no engine has registered; start some"):
        Cluster.attach(SimpleNamespace(ids=[]))


def test_functions_run_and_their_output_appears_here(attached: Attached, capfd: pytest.CaptureFixture[str]) -> None:
    assert (attached.size, attached.device, attached.state) == (2, "cpu", "ready")
    assert [name for name in sorted(NAMES) if not hasattr(attached, name)] == []
    results = attached.run(hello)
    assert [total for total, _ in results] == [3, 3]
    assert len({os.getpid(), *(pid for _, pid in results)}) == 3
    lines = re.sub(r"^\[.*?\] ", "", capfd.readouterr().out, flags=re.MULTILINE).splitlines()
    assert set(lines) == {"hello from Python", "hello from a child"}
    heard: list[tuple[int, Any]] = []
    attached.run_with(lambda rank, value: heard.append((rank, value)), Attached.report, "here")
    assert sorted(heard) == [(0, "here"), (1, "here")]


def test_an_error_is_raised_here_and_the_engines_go_on(attached: Attached) -> None:
    begin = time.monotonic()
    with pytest.raises(ValueError, match="only here") as caught:
        attached.run(fail)
    assert time.monotonic() - begin < 20
    note = "\n".join(getattr(caught.value, "__notes__", [str(caught.value.__cause__)]))
    assert "raised on rank 1:" in note
    assert "rank 0 was interrupted at" in note
    assert [total for total, _ in attached.run(hello)] == [3, 3]


def test_engines_train_as_a_local_cluster_does(attached: Attached, clusters: Clusters) -> None:
    rows = torch.randn(16, 6), torch.randint(10, (16,))
    for plan in ("pp=2 microbatches=4", "dp=2 zero=1"):
        both = [
            train(partial(models.mlp, (6, 12, 10)), rows, plan, cluster=ranks, steps=3, check=True, progress=False)
            for ranks in (attached, clusters(2))
        ]
        assert both[0].losses == both[1].losses
        assert both[0].max_error() < 1e-5
    with pytest.raises(PlanError, match="needs 4 ranks, but 2 engines are attached"):
        train(partial(models.mlp, (6, 12, 10)), rows, "dp=4", cluster=attached)


def test_cells_run_on_them(attached: Attached, capsys: pytest.CaptureFixture[str]) -> None:
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell()
    magic.load(shell, minipar._communicator)
    shell.user_ns["engines"] = attached
    shell.run_line_magic("ranks", "engines")
    shell.run_line_magic("ranks", "")
    shell.run_cell_magic("ranks", "", "x = torch.full((2,), rank + 1.0)\nprint('in a cell')\ncomm.allreduce(x)")
    shell.run_cell_magic("ranks", "--only 1 --out kept", "float(x.sum())")  # (variables are kept)
    out = capsys.readouterr().out
    assert "2 ranks on cpu: ready" in out
    assert "in a cell" in out
    assert "ranks 0-1 => tensor([3., 3.])\n" in out
    assert shell.user_ns["kept"] == [4.0]
    with pytest.raises(PlanError, match=r"%%ranks 4: 2 were given; %ranks close"):
        shell.run_cell_magic("ranks", "4", "1")
    shell.run_line_magic("ranks", "close")
    assert attached.state == "ready"


def test_closed_ranks_are_engines_again(client: Any) -> None:
    ranks = Cluster.attach(client)
    pids = [pid for _, pid in ranks.run(hello)]
    ranks.close()
    ranks.close()
    assert ranks.state == "closed"
    with pytest.raises(RankError, match="closed; attach again"):
        ranks.run(hello)
    assert client[:].apply_sync(os.getpid) == pids


def test_an_engine_that_dies_is_named(client: Any) -> None:
    with Cluster.attach(client) as ranks:
        with pytest.raises(RankDied, match="rank 1 ended"):
            ranks.run(lambda: os.kill(os.getpid(), signal.SIGKILL) if worker.context().rank else time.sleep(60))
        assert ranks.state == "1 of 2 engines left; attach again"
        with pytest.raises(RankDied, match="rank 1 has ended"):
            ranks.run(hello)
