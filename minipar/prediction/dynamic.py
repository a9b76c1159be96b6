"""simulate() of programs whose ranks decide as they run: it finds the order that the rule gives at these costs.

    rank 1   F0 |arrived: output of mb1, gradient of mb0| -> B0, since backwards come first

Each rank follows `choose` in `strategies/schedules/ampnet.py`, which depends on what has arrived at the rank. The
result is the program as it happened, in a fixed order. The simulator then walks it like any other program.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import fields, is_dataclass, replace
from typing import Any

from minipar.costs.protocol import Costs
from minipar.prediction.streams import Link
from minipar.program import Action, Forward, Op, Program, Staleness
from minipar.strategies.passes.versions import as_it_happened, blocks_of
from minipar.strategies.schedules.ampnet import decide


def as_decided(program: Program, costs: Costs) -> Program:
    """The program as it would happen at these costs."""
    assert isinstance(program.contract, Staleness)
    assert program.in_flight is not None
    ranks, m = len(program.ranks), program.microbatches
    total = m * program.steps
    SEND, RECV = Op.SEND, Op.RECV
    blocks = [blocks_of(program, rank) for rank in range(ranks)]
    links: dict[tuple[int, int], Link] = defaultdict(Link)

    def run(rank: int, action: Action, now: float) -> tuple[float, float]:
        step, i = divmod(action.microbatch, m)
        there = isinstance(action, Forward)
        arrival = now
        for ins in blocks[rank].get((there, i, step), ()):
            if ins.op is SEND:
                link = links[rank, ins.peer]
                link.send(now, *costs.transfer(rank, ins))
                arrival = link[-1]
            elif ins.op is not RECV:
                now += costs.compute(rank, ins)
        return now, arrival

    return as_it_happened(program, decide(ranks, total, program.in_flight, run), known=blocks)


def fitted(costs: Any, program: Program) -> Any:
    """The same costs for the program as it happened."""
    if not is_dataclass(costs) or not hasattr(costs, "program"):
        return costs
    parts = {f.name: getattr(costs, f.name) for f in fields(costs) if f.init}
    inner = {name: fitted(part, program) for name, part in parts.items() if hasattr(part, "program")}
    return replace(costs, **(inner | {"program": program}))  # type: ignore[type-var]
