"""Learned placement: a policy network puts nodes on ranks, and learns from the step time that the simulator gives.

    node 0 --LSTM--> rank 2 --LSTM--> rank 0 --LSTM--> ...         one placement, node by node
               features of the node, ranks of its predecessors, work of every rank so far
    reward  = - sqrt(step time / ideal time)                       of each of 16 placements
    policy  <- policy + rate * (reward - mean reward of the other 15) * gradient of log probability

The idea is Mirhoseini et al.'s ("Device Placement Optimization with Reinforcement Learning", 2017), who measured real
steps, for many hours on many machines. Here it serves as a contrast, not as a planner: `compare` gives hill climbing
and random search as many calls of the same simulator, adds the dynamic program's answer, and says which one is best.

The dynamic program gives each rank neighbours in topological order, as pipelines need, and finds the best such division
(`minipar.costs.partition`). The other methods may put any node on any rank: they can balance work better, but send
more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from minipar.costs.partition import partition
from minipar.errors import PlanError
from minipar.planner.graphs import Graph, step_time
from minipar.wording import several

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SAMPLES = 16  # placements of one update of the policy
HIDDEN = 32
Placement = tuple[int, ...]
Search = Callable[["Simulator"], Iterator[tuple[Placement, float]]]


class OutOfCalls(Exception):
    """The budget is used up."""


class Simulator:
    """Gives step times of placements, and counts every call, also for a placement that was tried before."""

    def __init__(self, graph: Graph, ranks: int, microbatches: int, budget: int) -> None:
        self.graph, self.ranks, self.microbatches, self.budget = graph, ranks, microbatches, budget
        self.known: dict[Placement, float] = {}
        self.calls = 0

    def __call__(self, placement: Iterable[int]) -> float:
        if self.calls == self.budget:
            raise OutOfCalls
        self.calls += 1
        key = tuple(int(rank) for rank in placement)
        if key not in self.known:
            self.known[key] = step_time(self.graph, key, self.microbatches)
        return self.known[key]


@dataclass(frozen=True)
class Found:
    """What one search found.

    method, placement, time   its name, the best placement, and its step time
    curve                     the best time so far, after each call of the simulator
    """

    method: str
    placement: Placement
    time: float
    curve: tuple[float, ...]


@dataclass(frozen=True)
class SearchComparison:
    """Searches on one graph, the best first.

    ideal   step time if all work were divided evenly and messages were free: no placement is faster
    """

    graph: Graph
    ranks: int
    microbatches: int
    budget: int
    ideal: float
    found: tuple[Found, ...]

    def table(self) -> list[tuple[str, ...]]:
        """A row of text per method: step time, step time / ideal, calls of the simulator, placement."""
        head = ("method", "step time", "over ideal", "simulator calls", "placement")
        rows = [
            (
                f.method,
                f"{f.time:.1f}",
                f"{f.time / self.ideal:.2f}",
                str(len(f.curve)),
                "".join(map(_digit, f.placement)),
            )
            for f in self.found
        ]
        return [head, *rows]

    def __str__(self) -> str:
        rows = self.table()
        widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
        return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)

    def _repr_html_(self) -> str:
        """The table that a notebook shows."""
        head, *rows = self.table()
        lines = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>"]
        lines += ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
        return "<table>" + "".join(lines) + "</table>"

    def plot(self, width: float = 10) -> Figure:
        """The best time so far over calls of the simulator, for each search; the dynamic program as a line."""
        from minipar.trace.figure import MUTED, RULE, picture, ruled

        looks = {
            "learned policy": ("#CC79A7", "s"),
            "hill climbing": ("#009E73", "o"),
            "random search": ("#56B4E9", "^"),
        }
        figure: Any = picture()(figsize=(width, 0.42 * width), layout="constrained")
        axes = figure.add_subplot()
        for one in self.found:
            if one.method in looks:
                colour, marker = looks[one.method]
                marked = [k for k in (0, 9, 99, len(one.curve) - 1) if k < len(one.curve)]
                calls = range(1, len(one.curve) + 1)
                axes.plot(calls, one.curve, color=colour, label=one.method, marker=marker, markevery=marked)
            else:
                axes.axhline(one.time, color="#E69F00", linestyle="--", label=f"{one.method} (no search)")
        axes.axhline(self.ideal, color=MUTED, linestyle=":", label="ideal: work divided evenly, messages free")
        axes.set_xscale("log")
        axes.set_xlabel("calls of the simulator")
        axes.set_ylabel("step time of the best placement so far")
        nodes = len(self.graph.costs)
        title = (
            f"{several(nodes, 'node')} on {several(self.ranks, 'rank')}, {several(self.microbatches, 'micro-batch')}"
        )
        ruled(axes, title)
        axes.grid(color=RULE, linewidth=0.6)
        figure.legend(loc="outside right upper", frameon=False, fontsize=8)
        figure.alt = "; ".join(f"{f.method} {f.time:.1f}" for f in self.found)
        return figure


def _digit(rank: int) -> str:
    return str(rank) if rank < 10 else f"[{rank}]"


def compare(graph: Graph, ranks: int, microbatches: int = 4, budget: int = 640, seed: int = 0) -> SearchComparison:
    """Place a graph by a learned policy, random search and hill climbing, each with `budget` calls of the simulator,
    and by the dynamic program, which needs none; the same result for the same seed on the same machine.

    Errors: `PlanError` for fewer than 2 ranks or nodes, or no budget.
    """
    if min(ranks, len(graph.costs)) < 2 or min(microbatches, budget) < 1:
        raise PlanError(
            f"ranks={ranks}, {several(len(graph.costs), 'node')}, microbatches={microbatches}, budget={budget}: "
            "must be at least 2, 2, 1 and 1"
        )
    placement = contiguous(graph, ranks, microbatches)
    time = step_time(graph, placement, microbatches)
    found = [Found("dynamic program", placement, time, ())]
    searches: dict[str, Search] = {
        "learned policy": lambda simulator: learn(simulator, seed),
        "hill climbing": lambda simulator: climb(simulator, seed),
        "random search": lambda simulator: sample_randomly(simulator, seed),
    }
    for method, search in searches.items():
        found.append(_run(method, search, Simulator(graph, ranks, microbatches, budget)))
    ideal = microbatches * sum(graph.costs) / ranks
    return SearchComparison(graph, ranks, microbatches, budget, ideal, tuple(sorted(found, key=lambda one: one.time)))


def _run(method: str, search: Search, simulator: Simulator) -> Found:
    best: Placement = ()
    best_time, curve = float("inf"), []
    try:
        for placement, time in search(simulator):
            if time < best_time:
                best, best_time = placement, time
            curve.append(best_time)
    except OutOfCalls:
        pass
    return Found(method, best, best_time, tuple(curve))


def contiguous(graph: Graph, ranks: int, microbatches: int) -> Placement:
    """The dynamic program's placement: stages of neighbours in topological order.

    A cut between two nodes of that order costs the outputs that cross it, of nodes before it that a node after it
    reads, once in each direction.
    """
    last = [max((b for a, b in graph.edges or () if a == k), default=k) for k in range(len(graph.costs))]
    crossing = [
        2 * sum(graph.sizes[a] for a in range(k + 1) if last[a] > k) / graph.bandwidth for k in range(len(graph.costs))
    ]
    stages = min(ranks, len(graph.costs))
    split = partition(graph.costs, stages, microbatches, activations=crossing).split
    return tuple(stage for stage, layers in enumerate(split) for _ in range(layers))


def sample_randomly(simulator: Simulator, seed: int) -> Iterator[tuple[Placement, float]]:
    """Random placements."""
    random = np.random.default_rng(seed)
    while True:
        placement = tuple(random.integers(simulator.ranks, size=len(simulator.graph.costs)).tolist())
        yield placement, simulator(placement)


def climb(simulator: Simulator, seed: int) -> Iterator[tuple[Placement, float]]:
    """Move one node, or swap two, and keep that unless the step gets slower. If nothing helps, start again."""
    random = np.random.default_rng(seed)
    n, ranks = len(simulator.graph.costs), simulator.ranks
    while True:
        now = random.integers(ranks, size=n)
        time = simulator(now)
        yield tuple(now.tolist()), time
        failures = 0
        while failures < 4 * n:
            other = now.copy()
            a, b = random.integers(n, size=2)
            if random.random() < 0.5:
                other[a] = random.integers(ranks)
            else:
                other[a], other[b] = now[b], now[a]
            found = simulator(other)
            yield tuple(other.tolist()), found
            failures = 0 if found < time else failures + 1
            if found <= time:
                now, time = other, found


class Policy(nn.Module):
    """Probabilities of placements, node by node in topological order."""

    def __init__(self, graph: Graph, ranks: int) -> None:
        super().__init__()
        self.graph, self.ranks = graph, ranks
        n = len(graph.costs)
        features = torch.tensor(
            [
                [graph.costs[k] * n / sum(graph.costs), graph.sizes[k] * n / (sum(graph.sizes) or 1),
                 len(graph.before[k]), len(graph.out_edges[k]), k / n]
                for k in range(n)
            ]
        )  # fmt: skip
        self.register_buffer("features", features)
        self.cell = nn.LSTMCell(features.shape[1] + 2 * ranks, HIDDEN)
        self.head = nn.Linear(HIDDEN, ranks)
        nn.init.zeros_(self.head.weight)  # so that it begins with even chances
        nn.init.zeros_(self.head.bias)

    def sample(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """`count` placements (count, nodes), their log probabilities (count,), and the mean entropy of a choice."""
        graph, ranks = self.graph, self.ranks
        state: tuple[Tensor, Tensor] | None = None
        load = torch.zeros(count, ranks)
        chosen: list[Tensor] = []
        of_rank: list[Tensor] = []  # one-hot
        log_probability, entropy = torch.zeros(count), torch.zeros(())
        for k, cost in enumerate(graph.costs):
            before = [of_rank[a] for a in graph.before[k]]
            near = torch.stack(before).mean(0) if before else torch.zeros(count, ranks)
            given = torch.cat([self.features[k].expand(count, -1), near, load], dim=1)  # type: ignore[index]
            state = self.cell(given, state)
            choice = torch.distributions.Categorical(logits=self.head(state[0]))
            rank = choice.sample()
            log_probability = log_probability + choice.log_prob(rank)
            entropy = entropy + choice.entropy().mean() / len(graph.costs)
            chosen.append(rank)
            of_rank.append(nn.functional.one_hot(rank, ranks).float())
            load = load + of_rank[-1] * cost * ranks / sum(graph.costs)
        return torch.stack(chosen, dim=1), log_probability, entropy


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread: the policy's operators are so small that several would mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def learn(
    simulator: Simulator, seed: int, rate: float = 1e-2, entropy_bonus: float = 0.02
) -> Iterator[tuple[Placement, float]]:
    """REINFORCE. The baseline of a placement is the mean reward of the other placements of its update, so that it does
    not bias the gradient."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = Policy(simulator.graph, simulator.ranks)
        generator = torch.get_rng_state()
    optimizer = torch.optim.Adam(policy.parameters(), lr=rate)
    ideal = simulator.microbatches * sum(simulator.graph.costs) / simulator.ranks
    updates = max(1, simulator.budget // SAMPLES)
    update = 0
    while True:
        with one_thread(), torch.random.fork_rng(devices=[]):  # (the caller's generator stays as it is meanwhile)
            torch.set_rng_state(generator)
            placements, log_probability, entropy = policy.sample(SAMPLES)
            generator = torch.get_rng_state()
        rewards = []
        for placement in placements.tolist():
            time = simulator(placement)
            rewards.append(-((time / ideal) ** 0.5))
            yield tuple(placement), time
        reward = torch.tensor(rewards)
        others = (reward.sum() - reward) / (SAMPLES - 1)
        advantage = (reward - others) / (reward.std() + 1e-6)
        bonus = entropy_bonus * max(0.0, 1 - update / updates)
        loss = -(advantage * log_probability).mean() - bonus * entropy
        optimizer.zero_grad()
        with one_thread():
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
        update += 1
