"""Which algorithm is the fastest for a collective, by the rates of a calibrated cluster.

Each algorithm's program is simulated. Ranks share cores and memory, so a message costs more if more ranks send at the
same time. Its rates are between those of one message alone and those of messages of all ranks at the same time:

    tree, 4 ranks    round 0    two of four ranks send      a third of the way between
                     round 1    one rank sends              alone
    ring, 4 ranks    always     all send                    all together
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from minipar.costs.alpha_beta import AlphaBeta
from minipar.costs.links import Line
from minipar.costs.rates import Calibration, LinearCost
from minipar.prediction.simulator import simulate
from minipar.program import Instruction, Op, Program, Value, collectives, order

BACKEND = "backend"  # the name of gloo's or NCCL's own algorithm


class CalibratedCosts:
    """The costs of a collective's program on a calibrated cluster, for `simulate`. Times in seconds, sizes in bytes."""

    def __init__(self, program: Program, rates: Calibration) -> None:
        self.program, self.add = program, rates.add
        ranks = len(program.ranks)
        uncontended, (all_, further) = rates.uncontended, rates.exchanged(ranks)
        rounds_of = _rounds(program)
        senders = Counter(turn for sends in rounds_of for turn in set(sends.values()))  # how many ranks send in a round
        self.lines: list[dict[Instruction, tuple[float, LinearCost]]] = []
        for rounds in rounds_of:
            lines: dict[Instruction, tuple[float, LinearCost]] = {}
            for ins, turn in rounds.items():
                share = (senders[turn] - 1) / max(1, ranks - 1)
                one = _between(uncontended, all_, share)
                overhead = min(one.fixed, _between(uncontended, further, share).fixed)
                lines[ins] = one.fixed - overhead, LinearCost(overhead, one.per_byte)
            self.lines.append(lines)

    def compute(self, rank: int, ins: Instruction) -> float:
        """Seconds of a REDUCE."""
        return self.add.at(sum(part.bytes for part in ins.parts))

    def transfer(self, rank: int, ins: Instruction) -> tuple[float, float]:
        """Seconds for which a SEND occupies its rank's port, and how much later it arrives."""
        latency, port = self.lines[rank][ins]
        return port.at(sum(self.program.chunks[value.index] for value in ins.reads)), latency

    def collective(self, ins: Instruction) -> float:
        """0: a collective's program contains no collectives."""
        return 0.0

    def size(self, rank: int, value: Value) -> int:
        """Bytes of a chunk."""
        return self.program.chunks[value.index]


def predicted(
    collective: str, ranks: int, nbytes: int, rates: Calibration, *, root: int = 0, nodes: int = 1
) -> dict[str, float]:
    """Seconds of a collective by each algorithm; for an allreduce also by the backend's own, under the name "backend".

    Errors: PlanError for an unknown collective, nodes that do not divide the ranks, rates without messages.
    """
    found = {
        name: seconds(collective, name, ranks, nbytes, rates, root=root, nodes=nodes)
        for name in collectives.names(collective)
    }
    return found | ({BACKEND: rates.sum_over(ranks, nbytes)} if collective == "allreduce" else {})


def seconds(
    collective: str, algorithm: str, ranks: int, nbytes: int, rates: Calibration, *, root: int = 0, nodes: int = 1
) -> float:
    """Seconds of a collective by one algorithm. Errors: as in `predicted`."""
    program = collectives.program(collective, algorithm, ranks, nbytes, root=root, nodes=nodes)
    return simulate(program, CalibratedCosts(program, rates)).time if ranks > 1 else 0.0


def by_links(collective: str, algorithm: str, ranks: int, nbytes: int, line: Line) -> float:
    """Seconds of a collective by one algorithm, on links of one kind."""
    program = collectives.program(collective, algorithm, ranks, nbytes)
    costs = AlphaBeta(program, line.latency, line.occupied(1))
    return simulate(program, costs).time if ranks > 1 else 0.0


@lru_cache(1024)
def choose(collective: str, ranks: int, nbytes: int, rates: Calibration, *, root: int = 0, nodes: int = 1) -> str:
    """The fastest algorithm by `predicted`; "backend" is the backend's own. Errors: as in `predicted`."""
    seconds = predicted(collective, ranks, nbytes, rates, root=root, nodes=nodes)
    return min(seconds, key=seconds.__getitem__)


def _between(a: LinearCost, b: LinearCost, share: float) -> LinearCost:
    return LinearCost(*(x + (y - x) * share for x, y in zip(a, b, strict=True)))


def _rounds(program: Program) -> list[dict[Instruction, int]]:
    """For each SEND of a rank, its round. It is later than the rounds of the rank's earlier sends, and of the sends
    that the rank has waited for."""
    known: list[dict[Instruction, int]] = [{} for _ in program.ranks]
    turn = [0] * len(program.ranks)
    sent: dict[tuple[int, int], int] = {}
    for rank, index, ins, waited, _ in order(program):
        turn[rank] = max([turn[rank], *(sent[wait.source] + 1 for wait in waited)])
        if ins is not None and ins.op is Op.SEND:
            known[rank][ins] = sent[rank, index] = turn[rank]
            turn[rank] += 1
    return known
