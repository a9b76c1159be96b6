"""Kernels of lessons that are forked (tests/notebooks/warm.py): one that dies takes nothing with it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from minipar.cluster.processes import ends
from tests.notebooks import warm

RANKS = """
import os
from minipar import Cluster
cluster = Cluster(2, device="cpu")
found = [os.getpid(), *cluster.run(os.getpid)]
"""


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Starts kernels as nbval does."""
    from jupyter_client.provisioning import local_provisioner
    from nbval.kernel import CURRENT_ENV_KERNEL_NAME, start_new_kernel

    monkeypatch.setattr(local_provisioner, "launch_kernel", local_provisioner.launch_kernel)
    warm.pytest_configure()
    started: list[Any] = []

    def kernel() -> Any:
        started.append(start_new_kernel(60, CURRENT_ENV_KERNEL_NAME))
        return started[-1]

    yield kernel
    for manager, client in started:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def processes_of(client: Any) -> list[int]:
    """A kernel and the ranks of a cluster that it starts."""
    reply = client.execute_interactive(RANKS, user_expressions={"pids": "found"}, timeout=60)
    assert reply["content"]["status"] == "ok", reply["content"]
    text = reply["content"]["user_expressions"]["pids"]["data"]["text/plain"]
    return [int(word) for word in text.strip("[]").split(",")]


@pytest.mark.ranks
def test_a_kernel_that_dies_leaves_nothing_and_the_next_one_runs(start: Any) -> None:
    for _ in range(2):
        manager, client = start()
        pids = processes_of(client)
        assert len({*pids, os.getpid()}) == 4
        assert manager.is_alive()
        os.kill(pids[0], 9)
        assert all(ends(pid, 30) for pid in pids)
        assert manager.provisioner.process.wait(30) is not None  # (the fork server tells it a moment after the end)
        assert not manager.is_alive()
