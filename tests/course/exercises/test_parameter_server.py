"""The exercises of lesson 07: reference solutions pass; stubs and plausible mistakes fail, and the reason is given."""

from __future__ import annotations

from typing import Any

import pytest

from minipar_course.exercise import check
from minipar_course.exercises import parameter_server as tasks


def stub(*arguments: object) -> Any:
    raise NotImplementedError("your code here")


@pytest.mark.parametrize("task", [tasks.SERVER_BYTES, tasks.MAY_PULL, tasks.UPDATE, tasks.STRAGGLER])
def test_a_stub_is_told_that_nothing_is_written(task):
    verdict = check(stub, task)
    assert not verdict
    assert verdict.reason == "nothing is written here yet"


def test_bytes_at_a_server():
    assert check(lambda workers, nbytes, servers: 2 * workers * nbytes / servers, tasks.SERVER_BYTES)
    for formula, hint in tasks.SERVER_BYTES.mistakes:
        assert check(formula, tasks.SERVER_BYTES).hint == hint


# who may pull


def may_pull(worker, clocks, bound):
    return clocks[worker] - min(clocks.values()) <= bound


def test_the_reference_rule_passes():
    assert check(may_pull, tasks.MAY_PULL)


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (lambda w, c, b: True, "worker 0 may pull, though it is 2 ahead of the slowest one", "the bound is 1"),
        (lambda w, c, b: max(c.values()) - min(c.values()) <= b, "worker 1 must wait, though it is only 2 ahead", ""),
        (True, "True is no function", "def may_pull"),
    ],
)
def test_other_rules_are_told_why(answer, reason, hint):
    verdict = check(answer, tasks.MAY_PULL)
    assert not verdict
    assert reason in verdict.reason
    assert hint in verdict.hint


def test_an_answer_that_changes_the_clocks_changes_nothing():
    def greedy(worker, clocks, bound):
        allowed = may_pull(worker, clocks, bound)
        clocks.clear()
        return allowed

    assert check(greedy, tasks.MAY_PULL)


# k of n


def my_update(arrived, version, k, members):
    ready = [worker for worker, step in arrived if step == version]
    need = min(k, members)
    take = sorted(ready[:need]) if len(ready) >= need else []
    return take, sorted(worker for worker, step in arrived if step < version)


def test_the_reference_update_passes():
    assert check(my_update, tasks.UPDATE)
    for arrived, _, _, members in tasks.UPDATE.cases:
        assert all(worker < members for worker, _ in arrived), "the servers know all who push"


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        *tasks.UPDATE.mistakes,
        (lambda arrived, version, k, members: ([], []), "take the first min(k, members)"),
        (lambda arrived, version, k, members: None, "return"),
        (lambda arrived, version, k, members: 3, "take the first"),
    ],
)
def test_other_updates_are_told_why(answer, hint):
    verdict = check(answer, tasks.UPDATE)
    assert not verdict
    assert hint in verdict.hint


# a straggler


def test_the_reference_plan_passes():
    verdict = check(lambda: "dp=4 sync=ps mode=k-of-n:3/4 servers=2", tasks.STRAGGLER)
    assert verdict
    assert "0.81 s, staleness 0, 12.0 MB at a server, 6 gradients dropped" in verdict.reason


@pytest.mark.parametrize(
    ("words", "reason", "hint"),
    [
        ("dp=4 sync=ps servers=2", "3.11 s, staleness 0", "for whom do the quick workers wait?"),
        ("dp=4 sync=ps mode=k-of-n:1/4 servers=2", "45 gradients dropped", "take more of the gradients"),
        (7, "7 is no plan", "a text such as"),
    ],
)
def test_other_plans_are_told_why(words, reason, hint):
    verdict = check(words, tasks.STRAGGLER)
    assert not verdict
    assert reason in verdict.reason
    assert hint in verdict.hint
