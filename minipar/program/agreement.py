"""Whether ranks agree: on the messages of each link, and on the collectives of each group and their order."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from minipar.program.diagnostics import at, refuse, wrong
from minipar.program.forms import WHOLE, along, in_words, lacking, parts_of
from minipar.program.instructions import (
    COLLECTIVES,
    PARTNERS,
    SERVICE,
    Instruction,
    Op,
    message,
    repartitions,
)  # fmt: skip
from minipar.program.values import Value, home

if TYPE_CHECKING:
    from minipar.program import Program


def check_links(program: Program, ranks: Collection[int]) -> None:
    """The receiver of each link receives what the sender sends, in the same order. This includes pushes and replies of
    parameter servers, unless these have not decided yet. `ranks` are the ranks to look at, as in `order`. Errors:
    ProgramError."""
    sides: dict[Op, dict[tuple[int, int], list[tuple[object, int]]]] = {
        op: {} for pair in PARTNERS.items() for op in pair
    }
    replica = [program.replica(rank) for rank in range(len(program.ranks))]
    for rank in ranks:
        for index, ins in enumerate(program.ranks[rank]):
            op, peer = ins.op, ins.peer
            if op not in sides:
                continue
            if not 0 <= peer < len(program.ranks) or peer == rank:
                raise wrong(program, rank, index, f": there is no other rank {peer}")
            if op not in SERVICE and replica[peer] != replica[rank]:
                raise wrong(program, rank, index, f": rank {peer} works on the rows of another replica")
            if op not in SERVICE and program.sharing > 1 and program.shard(peer) != program.shard(rank):
                _check_places(program, rank, index)
            link = (rank, peer) if op in PARTNERS else (peer, rank)
            content = (ins.layers, ins.step) if op in SERVICE else message(ins)
            sides[op].setdefault(link, []).append((content, index))
    for giver, taker in PARTNERS.items():
        if program.undecided and giver in SERVICE:
            continue
        for source, target in sorted(sides[giver].keys() | sides[taker].keys()):
            given, taken = sides[giver].get((source, target), []), sides[taker].get((source, target), [])
            here, there = [content for content, _ in given], [content for content, _ in taken]
            n = _first_difference(here, there)
            if n is None:
                continue
            if n < len(there) and there[n] not in here[n:]:
                place = taken[n][1]
                reason = f"receive without send: {at(program, target, place)}, not sent by rank {source}"
                reason += _sent_otherwise(there[n], here[n:])
                raise refuse(program, target, place, reason)
            if n < len(here) and here[n] not in there[n:]:
                index = given[n][1]
                reason = f"send without receive: {at(program, source, index)}, not taken by rank {target}"
                raise refuse(program, source, index, reason)
            x, y = at(program, source, given[n][1]), at(program, target, taken[n][1])
            raise refuse(program, target, taken[n][1], f"receive order differs from send order: {x} meets {y}")


def _check_places(program: Program, rank: int, index: int) -> None:
    """Of ranks that share layers, those in different places have other rows, or other parts of a value, along the axes
    on which the rows are cut, or the value is."""
    ins = program.ranks[rank][index]
    both = zip(program.sharing_axes, program.places(rank), program.places(ins.peer), strict=True)
    for axis, (name, own, other) in enumerate(both):
        rows = parts_of(program.inputs or WHOLE, axis + 1)[axis] != WHOLE
        cut = next((value for value in message(ins) if along(value.form, axis)), None)
        if own != other and (rows or cut):
            what = "works on other rows" if rows else f"has another part of {cut}"
            possible = program.sharers(ins.peer)[program.shard(rank)]
            raise wrong(program, rank, index, f": rank {ins.peer} {what} along {name}; possible is rank {possible}")


def _sent_otherwise(taken: object, given: Sequence[object]) -> str:
    """Of values that nobody sends so: in which form they are sent, if it is another one."""
    assert isinstance(taken, tuple)
    wanted = [value for value in taken if isinstance(value, Value)]
    for sent in given:
        found = [value for value in sent if isinstance(value, Value)] if isinstance(sent, tuple) else []
        if found and [v._replace(form="") for v in found] == [v._replace(form="") for v in wanted]:
            forms = f"{in_words(found[0].form)}, and {wanted[0]} is received, {in_words(wanted[0].form)}"
            return f"; it sends {found[0]}, {forms}{lacking(found[0].form, wanted[0].form)}"
    return ""


def _first_difference(a: Sequence[object], b: Sequence[object]) -> int | None:
    """The first position at which two sequences differ, the end of the shorter one included."""
    if a == b:
        return None
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def check_groups(program: Program, ranks: Collection[int]) -> None:
    """All ranks of a group start the same collectives, in the same order. `ranks` are the ranks to look at, as in
    `order`. Errors: ProgramError."""
    calls: dict[tuple[int, ...], dict[int, list[int]]] = {}
    for rank in ranks:
        for index, ins in enumerate(program.ranks[rank]):
            if ins.op in COLLECTIVES:
                if rank not in ins.group:
                    raise wrong(program, rank, index, f": rank {rank} is not of that group")
                if list(ins.group) != sorted(set(ins.group)):
                    what = ": the ranks of a group ascend, each once; possible is"
                    raise wrong(program, rank, index, f"{what} group={tuple(sorted(set(ins.group)))}")
                calls.setdefault(ins.group, {}).setdefault(rank, []).append(index)
    for group, by_rank in calls.items():
        first = group[0]
        for rank in group[1:]:
            if rank not in ranks and 0 <= rank < len(program.ranks):
                continue  # (the rank that stands for it does the same)
            mine, theirs = by_rank.get(first, []), by_rank.get(rank, [])
            here = [_call(program.ranks[first][index]) for index in mine]
            there = [_call(program.ranks[rank][index]) for index in theirs]
            n = _first_difference(here, there)
            if n is None:
                continue
            if n < len(here) and here[n] not in there[n:]:
                reason = f"collective without partner: {at(program, first, mine[n])}; rank {rank} never joins"
                reason += _where(program.ranks[first][mine[n]])
                raise refuse(program, first, mine[n], reason)
            if n < len(there) and there[n] not in here[n:]:
                reason = f"collective without partner: {at(program, rank, theirs[n])}; rank {first} never joins"
                reason += _where(program.ranks[rank][theirs[n]])
                raise refuse(program, rank, theirs[n], reason)
            x, y = at(program, first, mine[n]), at(program, rank, theirs[n])
            raise refuse(program, rank, theirs[n], f"collectives in different order: {x} meets {y}")


def _where(ins: Instruction) -> str:
    """Of a collective of forms that some ranks join: what is missing or too much."""
    return f"; {ins.op.value} is missing there, or superfluous here" if repartitions(ins) else ""


def _call(ins: Instruction) -> tuple[object, ...]:
    """What all ranks of a collective must agree on."""
    # (a NORM works on all ranks, each with its own groups)
    kind = home(ins.reads[0]).kind if ins.op is Op.ALL_REDUCE and ins.reads else ""
    if repartitions(ins):
        kind = f"{ins.reads[0]} -> {ins.writes[0] if ins.writes else ''}"
    # (ranks recognise a sum by its name)
    name = ins.name if ins.op is Op.ALL_REDUCE else ""
    return ins.op, kind, () if ins.op is Op.NORM else ins.layers, ins.microbatch, ins.parts, ins.step, name
