r"""Graphs of work and their placements: a placement becomes a Program, and `simulate` says how long a step takes.

        b               placement 0 1 0 1 of a, b, c, d          rank 0   F a | F c | ...
      /   \                                                      rank 1         F b | F d | ...
    a       d           any node on any rank: its nodes need not be neighbours, and branches run in parallel
      \   /
        c               (a chain is the graph whose nodes have one successor each)

The order on each rank is that of a pipeline that starts a micro-batch every tau, the work of the busiest rank: an
instruction's place is the time at which it could begin if ranks had nothing else to do, plus tau for each micro-batch
before. These times grow along every edge, so no order can deadlock. Messages are inserted by the pass that all plans
use (`strategies/passes/transfers.py`), and the program goes to the simulator that all plans go to.

These programs hold no parameters and free nothing: they only compare placements, and are not meant for `verify`. To
train a model with these edges (`minipar.models.network.Network`) on a placement, use `Plan(pp=ranks, place=placement)`,
whose programs are verified (`strategies/branches.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import itemgetter

from minipar.errors import PlanError
from minipar.prediction.simulator import simulate
from minipar.program import Group, Instruction, Op, Program, Value, grad_output, output, saved
from minipar.strategies.passes.transfers import insert_transfers
from minipar.wording import several


@dataclass(frozen=True)
class Graph:
    """Work with dependencies, for one micro-batch.

    costs      time of each node, forward and backward together; a third of it is the forward
    sizes      bytes of each node's output, which every successor gets, and of its gradient, which comes back
    edges      (from, to), with from < to: nodes are in topological order; default a chain
    bandwidth  bytes per unit of time of each link
    """

    costs: tuple[float, ...]
    sizes: tuple[float, ...] = ()
    edges: tuple[tuple[int, int], ...] | None = None
    bandwidth: float = 1.0

    def __post_init__(self) -> None:
        n = len(self.costs)
        sizes = tuple(self.sizes) or (0.0,) * n
        edges = tuple((k, k + 1) for k in range(n - 1)) if self.edges is None else tuple(sorted(set(self.edges)))
        object.__setattr__(self, "costs", tuple(self.costs))
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "edges", edges)
        if not n or len(sizes) != n or min(self.costs) <= 0 or min(sizes) < 0 or not self.bandwidth > 0:
            raise PlanError(
                f"graph of {several(n, 'node')}: each needs a cost above 0 and a size of at least 0, bandwidth above 0"
            )
        for a, b in edges:
            if not 0 <= a < b < n:
                raise PlanError(f"edge {a}, {b}: must go from a node to a later one, of 0 to {n - 1}")

    @cached_property
    def before(self) -> tuple[tuple[int, ...], ...]:
        """For each node its predecessors."""
        return tuple(tuple(a for a, b in self.edges or () if b == k) for k in range(len(self.costs)))

    @cached_property
    def out_edges(self) -> tuple[tuple[int, ...], ...]:
        """For each node the numbers of the edges that leave it."""
        return tuple(tuple(e for e, (a, _) in enumerate(self.edges or ()) if a == k) for k in range(len(self.costs)))

    @property
    def is_chain(self) -> bool:
        return self.edges == tuple((k, k + 1) for k in range(len(self.costs) - 1))


@dataclass(frozen=True)
class GraphCosts:
    """What the instructions of a placed graph cost: the simulator's costs."""

    graph: Graph

    def compute(self, rank: int, ins: Instruction) -> float:
        return self.graph.costs[ins.layers[0]] * (1 if ins.op is Op.FORWARD else 2) / 3

    def transfer(self, rank: int, ins: Instruction) -> tuple[float, float]:
        return sum(self.size(rank, value) for value in ins.reads) / self.graph.bandwidth, 0.0

    def collective(self, ins: Instruction) -> float:
        return 0.0

    def size(self, rank: int, value: Value) -> float:
        if value.kind == "grad_output":  # of an edge
            return self.graph.sizes[(self.graph.edges or ())[value.index][0]]
        return self.graph.sizes[value.index]


def program_of(graph: Graph, placement: Sequence[int], microbatches: int) -> Program:
    """The forward and backward of a step, node k on rank placement[k], as a program for `simulate`."""
    if len(placement) != len(graph.costs) or min(placement) < 0:
        raise PlanError(
            f"placement {tuple(placement)}: needs a rank of at least 0 for each of {several(len(graph.costs), 'node')}"
        )
    ranks = max(placement) + 1
    load = [0.0] * ranks
    for cost, rank in zip(graph.costs, placement, strict=True):
        load[rank] += cost
    tau = max(load)
    forward, backward = _earliest(graph, placement)
    timed: list[list[tuple[float, int, Instruction]]] = [[] for _ in range(ranks)]
    for k, i, run, back in _instructions(graph, microbatches):
        timed[placement[k]] += [(i * tau + forward[k], i, run), (i * tau + backward[k], i, back)]
    ordered = {rank: [ins for _, _, ins in sorted(found, key=itemgetter(0, 1))] for rank, found in enumerate(timed)}
    merged = insert_transfers(ordered)
    return Program(
        tuple(tuple(merged[rank]) for rank in range(ranks)),
        len(graph.costs),
        microbatches,
        tuple(Group((k,)) for k in range(len(graph.costs))),
        (("dp", 1), ("pp", ranks)),
        (frozenset(),) * ranks,
        name=f"placement {' '.join(map(str, placement))}",
    )


@lru_cache(maxsize=4)
def _instructions(graph: Graph, microbatches: int) -> list[tuple[int, int, Instruction, Instruction]]:
    """(node, micro-batch, its forward, its backward): what they read and write does not depend on the placement."""
    found = []
    for k in range(len(graph.costs)):
        gradients = [e for e, (_, b) in enumerate(graph.edges or ()) if b == k]
        for i in range(microbatches):
            given = tuple(output(a, i) for a in graph.before[k])
            run = Instruction(Op.FORWARD, (k,), i, 0, given, (output(k, i), saved(k, i)))
            needed = (saved(k, i), *(grad_output(e, i) for e in graph.out_edges[k]))
            built = tuple(grad_output(e, i) for e in gradients)
            found.append((k, i, run, Instruction(Op.BACKWARD, (k,), i, 0, needed, built, (saved(k, i),))))
    return found


def _earliest(graph: Graph, placement: Sequence[int]) -> tuple[list[float], list[float]]:
    """When each node's forward and backward could begin, if ranks had nothing else to do."""

    def hop(a: int, b: int) -> float:
        return graph.sizes[a] / graph.bandwidth if placement[a] != placement[b] else 0.0

    count = len(graph.costs)
    forward = [0.0] * count
    for k in range(count):
        forward[k] = max((forward[a] + graph.costs[a] / 3 + hop(a, k) for a in graph.before[k]), default=0.0)
    end = max(forward[k] + graph.costs[k] / 3 for k in range(count))
    backward = [end] * count
    for k in reversed(range(count)):
        for e in graph.out_edges[k]:
            b = (graph.edges or ())[e][1]
            backward[k] = max(backward[k], backward[b] + graph.costs[b] * 2 / 3 + hop(k, b))
    return forward, backward


def step_time(graph: Graph, placement: Sequence[int], microbatches: int) -> float:
    """Time of a step, by the simulator."""
    return simulate(program_of(graph, placement, microbatches), GraphCosts(graph)).time


def chain(costs: Sequence[float], sizes: Sequence[float] = (), bandwidth: float = 1.0) -> Graph:
    """A chain of layers."""
    return Graph(tuple(costs), tuple(sizes), None, bandwidth)


def inception(blocks: int = 3, bandwidth: float = 4.0) -> Graph:
    """A network of blocks of four branches of different work, joined at the end of each: 6 nodes a block.

    in ---> 1x1 ----------.
       |--> 3x3 -----------> join ---> ...
       |--> 5x5 ---------/
       '--> pool -------'
    """
    costs: list[float] = []
    sizes: list[float] = []
    edges: list[tuple[int, int]] = []
    for block in range(blocks):
        first = 6 * block
        costs += [2.0, 3.0, 9.0, 12.0, 3.0, 1.0]
        sizes += [4.0, 1.0, 2.0, 1.0, 1.0, 4.0]
        edges += [(first, first + k) for k in range(1, 5)] + [(first + k, first + 5) for k in range(1, 5)]
        if block:
            edges.append((first - 1, first))
    return Graph(tuple(costs), tuple(sizes), tuple(edges), bandwidth)
