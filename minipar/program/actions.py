"""What a schedule yields: forwards and backwards of micro-batches through chunks. Imports nothing of minipar."""

from __future__ import annotations

from dataclasses import dataclass, field


# (Not tuples: Forward(0) and Backward(0) must differ.)
@dataclass(frozen=True, slots=True)
class Forward:
    """A schedule's action: run the forward of micro-batch `microbatch` through chunk `chunk` of this rank.

    beside   the next backward is part of the same work, because kernels of both overlap (DualPipe). The output of the
             forward is sent when both are done
    """

    microbatch: int
    chunk: int = 0
    beside: bool = field(default=False, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Backward:
    """A schedule's action: the whole backward of one micro-batch through one chunk."""

    microbatch: int
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class BackwardInput:
    """A schedule's action: only the gradient of the chunk's input (the zero-bubble papers' B)."""

    microbatch: int
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class BackwardWeight:
    """A schedule's action: only the gradient of the chunk's weights (the zero-bubble papers' W)."""

    microbatch: int
    chunk: int = 0


Action = Forward | Backward | BackwardInput | BackwardWeight
