"""Lesson 05: the time of a ring; a broadcast by doubling; the ring allreduce; an allreduce for two nodes."""

from __future__ import annotations

from minipar.costs.alpha_beta import AlphaBeta
from minipar.prediction.simulator import simulate
from minipar.program import collectives
from minipar.program.collectives.own import Setting
from minipar_course.exercises.kinds.collective import Collective
from minipar_course.exercises.kinds.formula import Formula


def _ring_time(ranks: int, nbytes: int, alpha: float, beta: float) -> float:
    program = collectives.program("allreduce", "ring", int(ranks), int(nbytes))
    return simulate(program, AlphaBeta(program, alpha, beta)).time


RING_TIME = Formula(
    ("ranks", "nbytes", "alpha", "beta"),
    _ring_time,
    ((4, 400, 0.5, 0.01), (2, 400, 0.5, 0.01), (8, 800, 1, 0), (5, 1000, 0, 0.01), (1, 9, 1, 1), (64, 640, 0.1, 0.1)),
    (
        (lambda p, n, a, b: (p - 1) * (a + n / p * b), "that is the reduce-scatter; how do the others get the sums?"),
        (lambda p, n, a, b: 2 * p * (a + n / p * b), "how many steps until a chunk has met p ranks: p, or p - 1?"),
        (lambda p, n, a, b: 2 * (p - 1) * (a + n * b), "a message carries one chunk, not the whole tensor"),
        (lambda p, n, a, b: a + 2 * (p - 1) / p * n * b, "the bytes are right; how many messages follow each other?"),
        (lambda p, n, a, b: 2 * (p - 1) * a + 2 * n * b, "almost: with p ranks each sends a little less than 2 n"),
    ),
    hint="there are 2 (ranks - 1) steps, and in each of them one message of a chunk",
)  # fmt: skip

BROADCAST = Collective(
    "broadcast",
    (Setting(8), Setting(8, root=3), Setting(5, root=1), Setting(2), Setting(1), Setting(13)),
    nbytes=1_000_000,
    time=3.3e-3,
)
RING = Collective(
    "allreduce",
    (Setting(4), Setting(2), Setting(3), Setting(5), Setting(8), Setting(1)),
    nbytes=4_000_000,
    time=6.6e-3,
    memory=1.75,
)
TWO_NODES = Collective(
    "allreduce",
    (Setting(8, nodes=2), Setting(4, nodes=2), Setting(6, nodes=2), Setting(2, nodes=2)),
    nbytes=8_000_000,
    time=3.4e-3,
    memory=1.9,
    alpha=1e-5,
    beta=1e-10,
    far=(5e-5, 1e-9),
)
