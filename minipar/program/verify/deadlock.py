"""Why ranks wait for each other in a circle: the refusal of a program that would never end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minipar.errors import Deadlock, ProgramError
from minipar.program import Value
from minipar.program.verify.diagnostics import at

if TYPE_CHECKING:
    from minipar.program.verify.walk import Walk


class ProgramDeadlock(ProgramError, Deadlock):
    """A program whose ranks would wait for each other for ever; `details` is the cycle."""


def deadlock(walk: Walk, stuck: list[int]) -> ProgramError:
    """The circle among the ranks that are stuck."""
    waits: dict[int, tuple[int, Value]] = {}
    for rank in stuck:
        ins, pending = walk.program.ranks[rank][walk.place[rank]], walk.pending[rank]
        value = next(v for v in ins.reads if v in pending and not walk.ready(rank, pending[v]))
        kind, where, k = pending[value]
        if kind == "recv":
            other = int(where)  # type: ignore[call-overload]
        else:
            counts = walk.joined[where]  # type: ignore[index]
            other = next(r for r, n in zip(where, counts, strict=True) if n <= k)  # type: ignore[call-overload]
        waits[rank] = (other, value)
    path = [stuck[0]]
    while waits.get(path[-1], (path[-1],))[0] not in path:
        path.append(waits[path[-1]][0])
    cycle = path[path.index(waits[path[-1]][0]) :] if path[-1] in waits else path
    lines = [
        f"  {at(walk.program, r, walk.place[r])} waits for {waits[r][1]} of rank {waits[r][0]},\n"
        f"    which comes after {at(walk.program, waits[r][0], walk.place[waits[r][0]])}"
        for r in cycle
    ]
    chain = " -> ".join(map(str, [*cycle, cycle[0]]))
    error = ProgramDeadlock(f"deadlock: ranks wait for each other in a circle, {chain}", "\n".join(lines))
    error.places = tuple((r, walk.place[r]) for r in cycle)
    return error
