"""Lesson 16: mistakes are told what is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np

from minipar_course.exercise import check
from minipar_course.exercises import searches as tasks
from tests.course.exercises.test_building import is_told


def reinforce(sign: float = 1.0, baseline: bool = True) -> Any:
    def update(logits: Any, drawn: Any, times: Any) -> Any:
        chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        reward = (times.mean() - times) / times.std() if baseline else -times
        picked = np.eye(logits.shape[1])[drawn]
        return logits + sign * 0.5 * np.einsum("s,snc->nc", reward, picked - chances) / len(times)

    return update


def test_a_policy_that_learns_the_wrong_thing() -> None:
    is_told(check(reinforce(sign=-1.0), tasks.UPDATE), "the target is", "it learns what is slow")
    is_told(check(reinforce(baseline=False), tasks.UPDATE), "the target is", "the mean of all that were drawn|nothing")
