"""Costs of a collective's program by the alpha-beta model: `simulate(program, AlphaBeta(program, alpha, beta, gamma))`.

alpha is the latency of a message in seconds, beta seconds for each of its bytes, gamma seconds for adding a byte. The
overhead of a message keeps its rank from sending the next one, as its bytes do; latencies of several messages overlap.
"""

from __future__ import annotations

from dataclasses import dataclass

from minipar.errors import PlanError
from minipar.program import Instruction, Program, Value


@dataclass(frozen=True)
class AlphaBeta:
    """`far`: alpha and beta of messages between ranks of different nodes, where there are several `nodes` (groups of
    neighbours); default the same as inside. PlanError for negative numbers."""

    program: Program
    alpha: float
    beta: float
    gamma: float = 0.0
    overhead: float = 0.0
    nodes: int = 1
    far: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        for name in ("alpha", "beta", "gamma", "overhead"):
            number = getattr(self, name)
            if not 0 <= number < float("inf"):
                raise PlanError(f"{name}={number}: must be a finite number of at least 0")

    def compute(self, rank: int, ins: Instruction) -> float:
        """Seconds of a REDUCE."""
        return self.gamma * sum(part.bytes for part in ins.parts)

    def transfer(self, rank: int, ins: Instruction) -> tuple[float, float]:
        """Seconds for which a SEND occupies the link and its rank's port, and how much later it arrives."""
        near = self._node(rank) == self._node(ins.peer)
        alpha, beta = (self.alpha, self.beta) if near or self.far is None else self.far
        return self.overhead + beta * sum(self.size(rank, value) for value in ins.reads), alpha

    def collective(self, ins: Instruction) -> float:
        """A collective's program has none inside."""
        return 0.0

    def size(self, rank: int, value: Value) -> int:
        """Bytes of a chunk."""
        return self.program.chunks[value.index]

    def _node(self, rank: int) -> int:
        return rank * self.nodes // len(self.program.ranks)


def collective_seconds(op: str, ranks: int, nbytes: float, alpha: float, beta: float) -> float:
    """Seconds of a collective on a ring (all-to-all: of direct messages) of `ranks` ranks.

    op       "all_reduce", "reduce_scatter", "all_gather" or "all_to_all"
    nbytes   that each rank has before it
    alpha    seconds of a message; beta: seconds for each byte

    All-gather (n - 1)(alpha + b beta); reduce-scatter and all-to-all (n - 1) alpha + (n - 1)/n b beta; all-reduce is a
    reduce-scatter and an all-gather of what it leaves.
    """
    if op not in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all"):
        raise PlanError(f"{op}: must be all_reduce, reduce_scatter, all_gather or all_to_all")
    share = nbytes if op == "all_gather" else nbytes / ranks
    return (2 if op == "all_reduce" else 1) * (ranks - 1) * (alpha + share * beta)
