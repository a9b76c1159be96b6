"""Collectives by algorithm: each is a Program that can be verified, simulated, drawn and run.

    program("allreduce", "ring", 4, 1 << 20)            Send and Reduce, in order, on every rank
    cost("allreduce", "ring", 4, 1 << 20, ...)          its time in closed form, from alpha, beta and gamma

alpha is the latency of a message in seconds, beta the seconds for each byte on a link, gamma the seconds for adding a
byte. A rank sends one message after another, and receives from several ranks at once. A message arrives alpha after all
its bytes have left the rank. Each algorithm has a file of its own. Nothing here imports torch. `comm/playing.py` runs a
program on tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from minipar.errors import PlanError
from minipar.program import Program
from minipar.program.collectives import direct, double_tree, halving_doubling, hierarchical, own, ring, tree
from minipar.program.collectives.moves import Algorithm, Moves, Rates, Setting, lay_out, sizes_of
from minipar.program.verify.verifier import verify
from minipar.wording import several

COLLECTIVES = ("allreduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all")
OPERATIONS = ("sum", "max", "min", "avg")
PIECE = 1 << 20  # bytes; a pipelined tensor travels in pieces of about this size
PIECES = 64  # the largest number of pieces

_ALGORITHMS: dict[str, Algorithm] = {
    "ring": ring.ALGORITHM,
    "tree": tree.ALGORITHM,
    "double-tree": double_tree.ALGORITHM,
    "halving-doubling": halving_doubling.ALGORITHM,
    "hierarchical": hierarchical.ALGORITHM,
    "direct": direct.ALGORITHM,
}


_own: dict[str, Algorithm] = {}  # registered by `collective`


def collective(name: str, kind: str = "allreduce", *, chunks: int | None = None) -> Callable[[Moves], Moves]:
    """Decorator: register a generator `moves(setting, rank)` of Send, Reduce and Copy as an algorithm of your own.

    kind     one of COLLECTIVES; decorate another generator with the same name for another kind
    chunks   how many chunks the tensor is cut into; the default is that of `own.own_program`

    Its name can then be used wherever "ring" can: in `program`, `comm.allreduce(algorithm=)`, `Plan(algorithm=)`.
    Its program is verified before it runs. Registering a name again replaces the algorithm. A rank knows the algorithms
    that were registered in its own process. In a function that is sent to ranks, give `algorithm=` the decorated
    generator itself: it travels with the function.

    Errors: PlanError for a name that is no word or is built in, or an unknown kind.
    """
    if not name or any(c.isspace() or c in "=,:" for c in name):
        raise PlanError(f"collective name {name!r}: must be one word without '=', ',' and ':'")
    if name in _ALGORITHMS or name in ("auto", "shared", "backend", "default"):
        raise PlanError(f"collective {name!r}: is built in; possible is another name")
    if kind not in COLLECTIVES:
        raise PlanError(f"collective {name!r}: kind={kind!r} is unknown; possible are {', '.join(COLLECTIVES)}")

    def register(moves: Moves) -> Moves:
        moves.algorithm = name, own.algorithm(kind, moves, chunks)  # type: ignore[attr-defined]  # (travels with it)
        known(moves)
        return moves

    return register


def add(name: str, algorithm: Algorithm) -> None:
    """Register an algorithm in this process. What its name means for other collectives stays registered."""
    before = _own.get(name)
    _own[name] = algorithm if before is None else own.joined(before, algorithm)
    program.cache_clear()


def known(algorithm: object) -> str | None:
    """The name of an algorithm, which is given by its name or as a decorated generator. A generator is registered in
    this process."""
    if algorithm is None or isinstance(algorithm, str):
        return algorithm
    found = getattr(algorithm, "algorithm", None)
    if not isinstance(found, tuple):
        raise PlanError(f"algorithm={algorithm!r}: must be a name, or a generator that @minipar.collective decorated")
    name, built = found
    if name not in _own or any(_own[name].moves.get(kind) is not moves for kind, moves in built.moves.items()):
        add(name, built)
    return str(name)


def registered(name: str) -> Algorithm | None:
    """The algorithm of your own that has this name; None for a built-in one."""
    return _own.get(name)


def names(collective: str) -> tuple[str, ...]:
    """The names of the algorithms for a collective, your own ones last. Errors: PlanError for an unknown collective."""
    if collective not in COLLECTIVES:
        raise PlanError(f"collective {collective!r}: unknown; possible are {', '.join(COLLECTIVES)}")
    return tuple(name for name, one in (_ALGORITHMS | _own).items() if collective in one.moves)


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
    """The program of a collective on `ranks` ranks. The same arguments give the same object.

    nbytes   size of the whole tensor: what an allreduce, a broadcast or a reduce works on, what a reduce_scatter begins
             with and an all_gather ends with, what each rank of an all_to_all sends
    root     the root of a broadcast or a reduce
    nodes    only for the hierarchical algorithm: how many groups of neighbours the ranks form
    op       one of OPERATIONS
    item     bytes of one element; no chunk splits an element
    Errors: PlanError for an unknown or unsuitable algorithm, a root that does not exist, or nodes that do not divide
    the ranks; ProgramError for an algorithm of your own that does not compute the collective.
    """
    chosen, setting = _select(collective, algorithm, ranks, nbytes, root, nodes)
    if op not in OPERATIONS:
        raise PlanError(f"op={op!r} is not known; possible are {', '.join(OPERATIONS)}")
    if item < 1 or nbytes % item:
        raise PlanError(f"nbytes={nbytes}: no whole number of elements of {item} bytes")
    sizes = sizes_of(collective, setting, chosen, nbytes, item)
    name = f"{collective} by {algorithm}, {several(ranks, 'rank')}" + (f", {op}" if op != "sum" else "")
    built = lay_out(name, collective, setting, chosen.moves[collective], sizes)
    if algorithm in _own:
        verify(built)
    return built


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
    """Seconds of a collective in closed form. Each algorithm's file says where this is exact and where it is a bound.

    alpha    seconds of latency of a message
    beta     seconds for each byte of a message
    gamma    seconds for adding each byte
    overhead seconds that each message occupies the port of its rank, in addition to beta for each byte. The latency
             alpha does not occupy the port
    Errors: as in `program`; and PlanError for an algorithm without a closed form.
    """
    chosen, setting = _select(collective, algorithm, ranks, nbytes, root, nodes)
    if chosen.cost is None:
        raise PlanError(
            f"algorithm {algorithm!r}: has no closed form; possible is simulate(program(...), AlphaBeta(...))"
        )
    return chosen.cost(collective, setting, nbytes, Rates(alpha, beta, gamma, overhead))


def _select(
    collective: str, algorithm: str, ranks: int, nbytes: int, root: int, nodes: int
) -> tuple[Algorithm, Setting]:
    possible = names(collective)
    if algorithm not in possible:
        known = "makes no sense" if algorithm in _ALGORITHMS or algorithm in _own else "is unknown"
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
    chosen = (_ALGORITHMS | _own)[algorithm]
    pieces = max(1, min(PIECES, nbytes // (PIECE * chosen.parts))) if collective in chosen.pipelined else 1
    return chosen, Setting(ranks, root, nodes, pieces)
