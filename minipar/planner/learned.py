"""A policy that learns choices from their times: REINFORCE on a cost graph. A contrast, not a planner.

    logits of every node --softmax--> 32 answers --time--> reward = - time of each, standardised
    logits <- logits + rate * (reward of an answer - mean reward) * (what was chosen - its chance)

Each node's choice is drawn by itself. `placement` has a policy that is a network, for nodes on ranks.

Source: Williams, "Simple Statistical Gradient-Following Algorithms", 1992; Mirhoseini et al., "Device Placement
Optimization with Reinforcement Learning", 2017.
"""

from __future__ import annotations

from time import perf_counter

import numpy as np

from minipar.errors import PlanError
from minipar.planner.answer import Answer, answer
from minipar.planner.cost_graph import CostGraph

SAMPLES = 32  # answers of one update


def learn(graph: CostGraph, seed: int = 0, updates: int = 150, rate: float = 0.5) -> Answer:
    """The fastest answer that the policy drew; the same one for the same seed.

    Errors: PlanError, if no answer that it drew was within the budget and went together.
    """
    began = perf_counter()
    random = np.random.default_rng(seed)
    logits = [np.zeros(len(node.labels)) for node in graph.nodes]
    best, best_time = None, float("inf")
    for _ in range(updates):
        chances = [np.exp(one - one.max()) / np.exp(one - one.max()).sum() for one in logits]
        drawn = np.stack([random.choice(len(chance), SAMPLES, p=chance) for chance in chances], axis=1)
        times = np.array([graph.seconds(choices) if graph.fits(choices) else np.inf for choices in drawn])
        k = int(np.argmin(times))
        if times[k] < best_time:
            best, best_time = tuple(int(x) for x in drawn[k]), float(times[k])
        worst = times[np.isfinite(times)].max(initial=0.0)
        reward = -np.log(np.where(np.isfinite(times), times, 4 * worst + 1e-30) + 1e-30)
        advantage = (reward - reward.mean()) / (reward.std() + 1e-9) / SAMPLES
        for node, chance in enumerate(chances):
            one_hot = np.eye(len(chance))[drawn[:, node]]
            logits[node] += rate * (advantage @ (one_hot - chance))
    if best is None:
        raise PlanError(f"learned: none of {updates * SAMPLES} drawn answers fits and goes together; try more updates")
    return answer(graph, "learned", best, began, tried=updates * SAMPLES)
