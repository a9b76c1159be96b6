"""A rank that is killed, one that raises, and the stop button: each is explained and healed, and leaves nothing behind.

The campaign tries all other faults, at random moments.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.campaign import Campaign, Tally

PLAN = "dp=2 pp=2 zero=1 microbatches=4"
pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def campaign() -> Iterator[Campaign]:
    found = Campaign(3, (PLAN,))
    yield found
    found.close()


def good(found: Tally) -> bool:
    assert not found.problems, "\n".join(found.problems)
    return found.tried == found.explained == 1 and found.healed >= 1 and not found.left and not found.wrong


@pytest.mark.parametrize(("fault", "rank", "where"), [("SIGKILL", 2, "B"), ("raise", 1, "optimizer")])
def test_a_fault_inside_a_rank(campaign: Campaign, fault: str, rank: int, where: str) -> None:
    assert campaign.inside(PLAN, fault, rank, where, 2)
    assert good(campaign.tally(fault))


def test_the_stop_button(campaign: Campaign) -> None:
    campaign.guarded("button", (False,))  # (again if it was pressed after the training)
    assert good(campaign.tally("stop button"))
