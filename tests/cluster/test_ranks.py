"""`Ranks`: what they have, and that everything that takes a cluster takes any of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch

from minipar import PlanError, data, evaluate, models, train
from minipar.cluster import Cluster
from minipar.cluster.launched import Launched
from minipar.cluster.ranks import MOST_LOCAL, Ranks
from tests.conftest import Clusters

NAMES = {name for name in (*vars(Ranks), *Ranks.__annotations__) if not name.startswith("_")} - {"perform"}


class Passing:
    """Ranks that pass on to others what `Ranks` promises, and nothing else."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.asked: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        if name not in NAMES:
            raise AssertionError(f"{name} is not promised")
        self.asked.add(name)
        return getattr(self._ranks, name)


def test_a_cluster_has_everything(clusters: Clusters) -> None:
    assert {"size", "device", "run", "run_on", "run_with", "report"} < NAMES
    assert {name for name in NAMES if hasattr(clusters(2), name)} == NAMES


@pytest.mark.parametrize("plan", ["pp=2 microbatches=2 schedule=1f1b"])
def test_training_needs_only_what_ranks_promise(clusters: Clusters, plan: str) -> None:
    ranks = Passing(clusters(2))
    model = partial(models.mlp, (8, 6, 10))
    given: Any = ranks
    rows = torch.randn(8, 8), torch.randint(10, (8,))
    run = train(model, rows, plan, cluster=given, steps=2, progress=False, check=True)
    assert run.max_error() < 1e-5
    found = evaluate(model, rows, plan, state=run, cluster=given)
    assert found.count == 8
    assert {"size", "device", "run_on", "run_with", "run"} <= ranks.asked


def test_another_number_of_ranks_is_refused(clusters: Clusters) -> None:
    with pytest.raises(PlanError, match=r"plan dp=4 .*needs 4 ranks, but the cluster has 2"):
        train(partial(models.mlp, (4, 2)), data.digits(), "dp=4", cluster=clusters(2), steps=1)


def test_a_rank_reports_by_the_cluster_as_well(clusters: Clusters) -> None:
    heard: list[tuple[int, Any]] = []
    report: Callable[[Any], None] = Cluster.report
    ranks: Iterable[int] = range(2)
    clusters(2).run_with(lambda rank, value: heard.append((rank, value)), report, "here")
    assert sorted(heard) == [(rank, "here") for rank in ranks]


@pytest.mark.parametrize("kind", [Cluster, Launched])
def test_calls_are_made_in_one_place(kind: type) -> None:
    assert issubclass(kind, Ranks)
    assert {"run", "run_on", "run_with", "run_reviving", "report"} & vars(kind).keys() == set()


@pytest.mark.parametrize("n", [10**9, 10**5000, MOST_LOCAL + 1], ids=["a-billion", "endless", "one-more"])
def test_more_ranks_than_a_machine_can_have_are_refused_in_one_line(n: int) -> None:
    with pytest.raises(PlanError, match=r"^n=.*: one machine has room for at most 4,096 ranks$"):
        Cluster(n)
