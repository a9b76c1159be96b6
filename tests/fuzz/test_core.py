"""The core's keys together: a plan for each two of their values equals plain torch, and a wrong engine does not."""

from __future__ import annotations

import pytest
import torch

from minipar import PlanError
from tests.fuzz import core, seeded

PLANS = core.committed()


@pytest.mark.parametrize("words", PLANS)
def test_a_plan_equals_plain_torch(clusters, words: str) -> None:
    assert core.differs(words, clusters) == ""


@pytest.mark.parametrize(
    "words",
    [
        "tp=2 dp=2 overlap=priority microbatches=4 model=frozen bucket=0.0001 accumulate=2",
        "context_parallel=2 dp=2 overlap=priority microbatches=4 model=tied",
        "ep=2 dp=2 overlap=priority microbatches=4",
        "tp=2 host_layers=0 microbatches=4 model=frozen checkpoint=sqrt",
        "host_layers=0,2 offload=activations microbatches=4 model=dropout checkpoint=1 offload_to=disk",
    ],
)
def test_pairs_beside_the_core_that_need_no_code_of_their_own(clusters, words: str) -> None:
    assert core.differs(words, clusters) == ""


def test_freed_memory_of_the_ranks_is_poisoned(clusters) -> None:
    """What the plans rely on: memory that was freed, or is not filled yet, holds no plausible numbers."""
    assert clusters(2).run(freed) == [True, True]


def freed() -> bool:
    torch.ones(1000, dtype=torch.float64)
    return bool((torch.empty(1000, dtype=torch.float64) > 1e300).all())


@pytest.mark.many(max(1, len(PLANS) // 6))
@pytest.mark.parametrize("words", PLANS)
def test_its_memory_is_as_predicted(clusters, words: str) -> None:
    assert core.memory_error(words, clusters) <= 0.01


@pytest.mark.parametrize("mistake", seeded.MISTAKES)
def test_a_mistake_in_the_engine_is_seen(clusters, mistake: str) -> None:
    words, _ = seeded.MISTAKES[mistake]
    ranks = clusters(core.read(words).plan.ranks)
    ranks.run(seeded.plant, mistake)
    try:
        if mistake == "other initial values":
            with pytest.raises(PlanError, match="makes other numbers on each rank"):  # (a run finds that by itself)
                core.differs(words, clusters)
        else:
            assert core.differs(words, clusters) != ""
    finally:
        ranks.run(seeded.mend)
    assert core.differs(words, clusters) == ""


def test_each_two_values_that_go_together_are_in_a_plan() -> None:
    """Of those that are in none, every one is refused in every base."""
    assert 80 <= len(PLANS) <= 110
    left = set(core.sets_of(2)).difference(*(core.shown_by(words, 2) for words in PLANS))
    assert len(left) < 0.3 * len(set(core.sets_of(2)))
    together = [" ".join(map("=".join, sorted(pair))) for pair in left if core.possible(pair)]
    assert not together


def test_wide_plans_show_all_pairs_that_they_are_given() -> None:
    """With the first plan refused when it runs, as models and ranks do it."""
    refused: list[str] = []

    def tried(words: str) -> bool:
        if not refused:
            refused.append(words)
        return words not in refused

    plans = core.cover(2, PLANS[3:], 100, tried)
    assert plans
    lost = set().union(*(core.shown_by(words, 2) for words in PLANS))
    assert lost <= set().union(*(core.shown_by(words, 2) for words in [*PLANS[3:], *plans]))
