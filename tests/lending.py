"""Ranks for what starts some by itself, such as `train` without a cluster: the tests' own, which run already."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

from minipar.cluster import Cluster
from minipar.execution import execution
from minipar.training import evaluation, training
from minipar_course import against
from minipar_course.exercises.kinds import built


def lend(clusters: Callable[[int], Cluster], patch: pytest.MonkeyPatch) -> None:
    """From now on these modules use the tests' ranks, where they would start plain ones for a call."""

    def lent(ranks: int, device: str = "auto", **others: Any) -> AbstractContextManager[Cluster]:
        if device in ("auto", "cpu") and set(others) <= {"patience"}:
            return nullcontext(clusters(ranks))
        return Cluster(ranks, device=device, **others)

    for module in (against, built, evaluation, execution, training):
        patch.setattr(module, "Cluster", lent)
