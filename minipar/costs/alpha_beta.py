"""Costs of a collective's program by the alpha-beta model: `simulate(program, AlphaBeta(program, alpha, beta, gamma))`.

alpha is the latency of a message in seconds, beta the seconds for each of its bytes, gamma the seconds for adding a
byte. During a message's overhead, and while its bytes are sent, its rank cannot send the next message. Latencies of
several messages overlap.
"""

from __future__ import annotations

from dataclasses import dataclass

from minipar.errors import PlanError
from minipar.program import Instruction, Program, Value


@dataclass(frozen=True)
class AlphaBeta:
    """alpha, beta, gamma and overhead in seconds, as the module says.

    nodes   number of nodes; neighbouring ranks are on the same node
    far     alpha and beta of messages between different nodes; default the same as inside a node
    Errors: PlanError for negative numbers.
    """

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
        """0: a collective's program contains no collectives."""
        return 0.0

    def size(self, rank: int, value: Value) -> int:
        """Bytes of a chunk."""
        return self.program.chunks[value.index]

    def _node(self, rank: int) -> int:
        return rank * self.nodes // len(self.program.ranks)
