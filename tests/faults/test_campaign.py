"""The campaign of faults in a short form: every fault is explained and healed, and nothing is left behind."""

from __future__ import annotations

import math
import random

from tests.faults.campaign import SAVED, cases, part, table


def test_a_few_faults_are_explained_and_healed():
    timed, others = cases(10)
    todo = [*timed[:2], *timed[2::6], *others]
    random.Random(3).shuffle(todo)
    found = part(todo, seed=3, end=math.inf, show=False, strategies=(*SAVED, "dp=3 sync=ps"))
    problems = [problem for one in found.tallies for problem in one.problems]
    assert not problems, "\n".join(problems)
    tried = sum(one.tried for one in found.tallies)
    assert tried >= len(todo) - 2  # (a fault that came after its training each time is not counted)
    assert f"| all | {tried} | 100.0 % |" in table(found)
