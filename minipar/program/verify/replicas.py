"""What the walk must know of replicas: gradients that are summed piece by piece, parameters that differ for a while."""

from __future__ import annotations

from functools import reduce
from operator import and_
from typing import TYPE_CHECKING

from minipar.program import Instruction, grad, piece_of
from minipar.program.verify.diagnostics import at, refuse
from minipar.wording import several

if TYPE_CHECKING:
    from minipar.program.verify.walk import Walk


def piece(walk: Walk, rank: int, index: int, ins: Instruction, total: int) -> int:
    """A piece of a gradient is summed; the one that writes the gradient is the last: what all pieces have."""
    g, where = ins.layers[0], at(walk.program, rank, index)
    begin, end = piece_of(ins) or (0, 0)
    pieces = walk.pieces.setdefault((ins.group, g), [])
    if any(a < end and begin < b for a, b, _ in pieces):
        raise refuse(walk.program, rank, index, f"{where} sums bytes of grad({g}) that were summed before")
    pieces.append((begin, end, total))
    if grad(g) not in ins.writes:
        return total
    del walk.pieces[ins.group, g]
    size = sum(walk.program.groups[g].tensors)
    known = sum(b - a for a, b, _ in pieces)
    if known != size or max(b for _, b, _ in pieces) > size:
        reason = f"{where} is the last piece of grad({g}), of which {known} of {size} bytes were summed"
        raise refuse(walk.program, rank, index, reason)
    return reduce(and_, (found for *_, found in pieces))


def averaged(walk: Walk, rank: int, index: int, group: int, versions: dict[int, int]) -> None:
    """The replicas' own parameters of a group are averaged: after as many updates each, and by all of them."""
    found = {walk.program.replica(r) for r in versions}
    if len(set(versions.values())) > 1 or len(found) < walk.program.replicas:
        updates = ", ".join(f"{n} on rank {r}" for r, n in versions.items())
        reason = f"{at(walk.program, rank, index)} averages param({group}) after different numbers of updates, or"
        raise refuse(walk.program, rank, index, f"{reason} not of all replicas: {updates}")
    step, done = walk.program.ranks[rank][index].step, walk.version[rank].get(group, 0)
    due = done % walk.local == 0 or done == walk.program.steps  # (if it is not, the next forward says so)
    if due and done != step + 1:
        reason = f"{at(walk.program, rank, index)} averages param({group}) after {several(done, 'update')}, but weighs"
        raise refuse(
            walk.program, rank, index, f"{reason} replicas by their rows of step {step}; possible is step {done - 1}"
        )
    for r in versions:
        walk.apart[r][group] = 0


def alone(walk: Walk, rank: int, index: int, group: int, foreign: int) -> None:
    """A STEP of a replica by itself, which `foreign` contributions of other replicas must not reach."""
    if not walk.local:
        return
    walk.apart[rank][group] = walk.apart[rank].get(group, 0) + 1
    if foreign:
        where, whose = at(walk.program, rank, index), walk.name(group, foreign)
        raise refuse(walk.program, rank, index, f"{where}: the replica's own update of param({group}) uses {whose}")


def in_round(walk: Walk, rank: int, index: int, group: int) -> None:
    """What a forward or backward uses was averaged when it was due, and not at another time."""
    ins, found = walk.program.ranks[rank][index], walk.apart[rank][group]
    if found != ins.step % walk.local:
        reason = (
            f"{at(walk.program, rank, index)} of step {ins.step} uses param({group}) after "
            f"{several(found, 'update')} by its"
        )
        reason += f" replica alone; the program promises {ins.step % walk.local}"
        raise refuse(walk.program, rank, index, f"{reason}, with an average after every {walk.local}")
