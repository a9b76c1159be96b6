"""Collectives by algorithm: who sends what to whom, as a Program that verifies, simulates, is drawn, and runs.

    program("allreduce", "ring", 4, 1 << 20)            Send and Reduce, in order, on every rank
    cost("allreduce", "ring", 4, 1 << 20, ...)          its time in closed form, by alpha, beta and gamma

alpha is the latency of a message, beta seconds for each byte on a link, gamma seconds for adding a byte. A rank sends
one message after another and receives from several at once; a message is there when its bytes have passed, and alpha.
One file an algorithm; nothing here imports torch. `comm/playing.py` runs a program on tensors.
"""

from __future__ import annotations

from functools import lru_cache

from minipar.comm.algorithms import direct, double_tree, halving_doubling, hierarchical, ring, tree
from minipar.comm.algorithms.moves import Algorithm, Rates, Setting, bounds, lay_out
from minipar.errors import PlanError
from minipar.program import Program
from minipar.wording import several

COLLECTIVES = ("allreduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all")
OPERATIONS = ("sum", "max", "min", "avg")
PIECE = 1 << 20  # bytes; what is pipelined travels in pieces of about that much
PIECES = 64  # at most

_ALGORITHMS: dict[str, Algorithm] = {
    "ring": ring.ALGORITHM,
    "tree": tree.ALGORITHM,
    "double-tree": double_tree.ALGORITHM,
    "halving-doubling": halving_doubling.ALGORITHM,
    "hierarchical": hierarchical.ALGORITHM,
    "direct": direct.ALGORITHM,
}


def names(collective: str) -> tuple[str, ...]:
    """The algorithms for a collective. PlanError for an unknown one."""
    if collective not in COLLECTIVES:
        raise PlanError(f"collective {collective!r}: unknown; possible are {', '.join(COLLECTIVES)}")
    return tuple(name for name, one in _ALGORITHMS.items() if collective in one.moves)


@lru_cache(256)
def program(
    collective: str,
    algorithm: str,
    ranks: int,
    nbytes: int,
    *,
    root: int = 0,
    nodes: int = 1,
    op: str = "sum",
    item: int = 1,
) -> Program:
    """The program of a collective on `ranks` ranks. The same object for the same arguments.

    nbytes   of the whole tensor: what an allreduce, a broadcast or a reduce works on, what a reduce_scatter begins
             and an all_gather ends with, what each rank of an all_to_all sends
    root     of a broadcast or a reduce
    nodes    of the hierarchical algorithm: how many groups of neighbours the ranks form
    op       one of OPERATIONS
    item     bytes of an element, which no chunk splits
    Errors: PlanError for an unknown or unsuitable algorithm, a root that is not there, ranks that nodes do not divide.
    """
    chosen, setting = _select(collective, algorithm, ranks, nbytes, root, nodes)
    if op not in OPERATIONS:
        raise PlanError(f"op={op!r} is not known; possible are {', '.join(OPERATIONS)}")
    if item < 1 or nbytes % item:
        raise PlanError(f"nbytes={nbytes}: no whole number of elements of {item} bytes")
    count = chosen.chunks(collective, setting)
    own = ranks if collective == "all_to_all" else count  # there each rank's tensor is cut by itself
    cuts = [bounds(nbytes // item, own, c % own) for c in range(count)]
    sizes = tuple((last - first) * item for first, last in cuts)
    name = f"{collective} by {algorithm}, {several(ranks, 'rank')}" + (f", {op}" if op != "sum" else "")
    return lay_out(name, collective, setting, chosen.moves[collective], sizes)


def cost(
    collective: str,
    algorithm: str,
    ranks: int,
    nbytes: int,
    alpha: float,
    beta: float,
    gamma: float,
    overhead: float = 0.0,
    *,
    root: int = 0,
    nodes: int = 1,
) -> float:
    """Seconds of a collective in closed form; each algorithm's file says where it is exact, and where a bound.

    alpha    seconds of latency of a message
    beta     seconds for each byte of a message
    gamma    seconds for adding each byte
    overhead seconds for which a message keeps its rank from sending the next one, besides beta; alpha overlaps
    Errors: as `program`.
    """
    chosen, setting = _select(collective, algorithm, ranks, nbytes, root, nodes)
    return chosen.cost(collective, setting, nbytes, Rates(alpha, beta, gamma, overhead))


def _select(
    collective: str, algorithm: str, ranks: int, nbytes: int, root: int, nodes: int
) -> tuple[Algorithm, Setting]:
    possible = names(collective)
    if algorithm not in possible:
        known = "makes no sense" if algorithm in _ALGORITHMS else "is unknown"
        raise PlanError(f"{collective}: algorithm {algorithm!r} {known}; possible are {', '.join(possible)}")
    if ranks < 1:
        raise PlanError(f"ranks={ranks}: must be at least 1")
    if nbytes < 0:
        raise PlanError(f"nbytes={nbytes}: must be at least 0")
    if not 0 <= root < ranks:
        raise PlanError(f"root={root}: there is no such rank; possible are 0 to {ranks - 1}")
    if nodes < 1 or ranks % nodes:
        divisors = [str(n) for n in range(1, ranks + 1) if ranks % n == 0]
        raise PlanError(f"nodes={nodes}: does not divide {several(ranks, 'rank')}; possible are {', '.join(divisors)}")
    chosen = _ALGORITHMS[algorithm]
    pieces = max(1, min(PIECES, nbytes // (PIECE * chosen.parts))) if collective in chosen.pipelined else 1
    return chosen, Setting(ranks, root, nodes, pieces)
