"""The searches that `compare` runs side by side on a cost graph, each with few enough steps for a notebook."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from minipar.planner.annealing import anneal
from minipar.planner.answer import Answer
from minipar.planner.brute_force import brute_force
from minipar.planner.chain import chain
from minipar.planner.cost_graph import CostGraph
from minipar.planner.elimination import eliminate
from minipar.planner.greedy import greedy
from minipar.planner.intra import ilp
from minipar.planner.learned import learn

METHODS: Mapping[str, Callable[[CostGraph], Answer]] = {
    "ilp": ilp,
    "elimination": eliminate,
    "chain": chain,
    "annealing": partial(anneal, proposals=5000),
    "learned": partial(learn, updates=60),
    "greedy": greedy,
    "brute force": brute_force,
}
