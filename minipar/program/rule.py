"""order(program): the rule of execution, without time.

    for rank, position, instruction, waited, joined in order(program): ...

    rank 0   F 0 mb0 | SEND output(0) mb0 -> 1
    rank 1   RECV output(0) mb0 <- 0 | F 1 mb0          F waits for the output, which the SEND of rank 0 gives

A rank walks its list in order. It starts messages, copies and collectives when it reaches them. From then on the values
that they write are under way, and the first instruction that reads such a value waits for it. A server's ACCEPT and a
worker's PULL wait at once; a PULL from servers that have not decided yet waits for nobody. All code that must know who
waits for whom uses this module: the verifier, the check of collectives, the plain simulator. Only decisions that need a
clock are made elsewhere (event_loop.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from minipar.errors import Deadlock, ProgramError
from minipar.program.agreement import check_groups, check_links
from minipar.program.diagnostics import at, refuse
from minipar.program.instructions import COMPUTE, COPIES, PARTNERS, Instruction, Op
from minipar.program.values import Value

if TYPE_CHECKING:
    from minipar.program import Program

Place = tuple[int, int]  # rank, index of an instruction
Link = tuple[int, int, Op]  # the sender, the receiver, and the op of the sender: SEND, PUSH or REPLY
Stream = Link | tuple[int, ...]  # messages of a link, or collectives of a group; both keep their order
_GIVER = {taker: giver for giver, taker in PARTNERS.items()}
_MESSAGES = {*PARTNERS, *_GIVER}  # ops of two ranks: replicas of a whole model have none
_COPY: tuple[int, ...] = ()  # the stream of copies, which wait for nobody
_LOCAL = frozenset(COMPUTE)  # ops that no other rank takes part in


class ProgramDeadlock(ProgramError, Deadlock):
    """The ranks of a program would wait for each other for ever; `details` lists the circle of ranks."""


class Wait(NamedTuple):
    """A value that was under way and has arrived.

    writer   position of the rank's own instruction that writes it: a RECV, a copy, a collective, a PULL, an ACCEPT
    source   the instruction that it waited for: the other rank's SEND, PUSH or REPLY; the collective on the rank that
             joined it last; or the copy itself
    """

    value: Value
    writer: int
    source: Place


# What a rank does next: (rank, position in its list, instruction, waited, joined). The instruction is None at the end
# of the list, where the rank waits for everything that is still under way. `waited` has the values that it waited for.
# `joined` has the place of a collective on each of its ranks, if this rank is the last one to join it; otherwise it is
# empty. (A turn is a plain tuple, because there are many of them.)
Turn = tuple[int, int, Instruction | None, tuple[Wait, ...], tuple[Place, ...]]
# What is under way: the position of the rank's instruction that brings it, its stream, and its number in the stream.
_Coming = tuple[int, Stream, int]


def order(program: Program, ranks: Collection[int] | None = None) -> Iterator[Turn]:
    """Yields all instructions of all ranks, each after everything that it waits for.

    It walks one rank as far as possible, then the next one, and begins again until all ranks are at their ends.

    ranks   the ranks to walk, ascending; default: all. Where it walks only those that stand for others
            (`Program.representatives`), a collective waits for these: its other ranks join it at the same moment

    Yields `Turn`s: (rank, position, instruction or None, waited, joined).

    Errors: ProgramError if ranks do not agree on a message or a collective, or if an instruction changes a value that
    is under way; ProgramDeadlock (a ProgramError and a Deadlock) if ranks wait for each other in a circle.
    """
    walked = range(len(program.ranks)) if ranks is None else ranks
    if any(op in _MESSAGES for rank in walked for op in program.ops[rank]):
        check_links(program, walked)
    check_groups(program, walked)
    return _walk(program, walked)


def _walk(program: Program, ranks: Collection[int]) -> Iterator[Turn]:
    count = len(program.ranks)
    some = frozenset(ranks) if len(ranks) < count else None
    place = [0] * count
    coming: list[dict[Value, _Coming]] = [{} for _ in range(count)]
    copied: list[dict[Value, Value]] = [{} for _ in range(count)]  # for copies under way: source value -> target value
    given: dict[Stream, list[Place]] = {}  # the instruction that sent each message or completed each collective
    taken: dict[tuple[Stream, int], int] = {}  # how many of them each rank has received or joined
    joining: dict[tuple[Stream, int], list[Place]] = {}  # collectives that some of their ranks have joined
    SEND, RECV, nothing, undecided = Op.SEND, Op.RECV, (), program.undecided
    moved = True
    while moved:
        moved = False
        for rank in ranks:
            row, under_way, in_use = program.ranks[rank], coming[rank], copied[rank]
            for index in range(place[rank], len(row)):
                ins = row[index]
                op, _, _, _, reads, writes, frees, _, peer, group, _, _ = ins
                waited: tuple[Wait, ...] = nothing
                joined: tuple[Place, ...] = nothing
                if under_way:
                    if not under_way.keys().isdisjoint(reads):
                        blocked, waited = _arrive(rank, reads, under_way, in_use, given)
                        if blocked:
                            break
                    if in_use or not (under_way.keys().isdisjoint(writes) and under_way.keys().isdisjoint(frees)):
                        for v in writes + frees:
                            if v in under_way or v in in_use:
                                raise _changed_under_way(program, rank, index, v, in_use.get(v, v))
                if op in _LOCAL:
                    pass
                elif op is SEND:
                    given.setdefault((rank, peer, op), []).append((rank, index))
                elif op is RECV:
                    link = (peer, rank, SEND)
                    k = taken[link, rank] = taken.get((link, rank), 0) + 1
                    for v in writes:
                        under_way[v] = index, link, k - 1
                elif group:
                    k = taken[group, rank] = taken.get((group, rank), 0) + 1
                    members = joining.setdefault((group, k), [])
                    members.append((rank, index))
                    under_way.update({v: (index, group, k - 1) for v in writes if v not in frees})
                    if len(members) == (len(group) if some is None else len(some.intersection(group))):
                        joined = tuple(joining.pop((group, k)))
                        given.setdefault(group, []).append((rank, index))
                elif op in COPIES:
                    under_way[writes[0]] = index, _COPY, -1
                    in_use[reads[0]] = writes[0]
                elif op in PARTNERS:  # a PUSH or a REPLY
                    given.setdefault((rank, peer, op), []).append((rank, index))
                elif op in _GIVER and not undecided:  # an ACCEPT or a PULL, which waits at once
                    link = (peer, rank, _GIVER[op])
                    k = taken.get((link, rank), 0)
                    if len(given.get(link, ())) <= k:
                        break
                    taken[link, rank] = k + 1
                    waited = (Wait(writes[0], index, given[link][k]),)
                place[rank] = index + 1
                yield rank, index, ins, waited, joined
                moved = True
            if place[rank] == len(row):
                blocked, waited = _arrive(rank, tuple(under_way), under_way, in_use, given)
                if not blocked:
                    place[rank] += 1
                    yield rank, len(row), None, waited, ()
    if any(place[rank] < len(program.ranks[rank]) for rank in ranks):
        raise _deadlock(program, ranks, place, coming, given, taken)


def _arrive(
    rank: int,
    values: Iterable[Value],
    under_way: dict[Value, _Coming],
    in_use: dict[Value, Value],
    given: Mapping[Stream, list[Place]],
) -> tuple[bool, tuple[Wait, ...]]:
    """(True, ()) if one of the values has not arrived; else (False, the values that were under way and have
    arrived)."""
    waits = []
    for value in values:
        if value in under_way:
            writer, stream, number = under_way[value]
            if stream == _COPY:
                waits.append(Wait(value, writer, (rank, writer)))
            elif len(given.get(stream, ())) > number:
                waits.append(Wait(value, writer, given[stream][number]))
            else:
                return True, ()
    for value, _, _ in waits:
        under_way.pop(value, None)
        if in_use:
            for source in [source for source, target in in_use.items() if target == value]:
                del in_use[source]
    return False, tuple(waits)


def _changed_under_way(program: Program, rank: int, index: int, value: Value, target: Value) -> ProgramError:
    """The error for an instruction that changes `value` while it is being written, or while a copy reads it to write
    `target`."""
    row = program.ranks[rank]
    writer = max(k for k in range(index) if target in row[k].writes)
    verb = "frees" if value in row[index].frees else "writes"
    reason = f"{at(program, rank, index)} {verb} {value} while {at(program, rank, writer)} is under way"
    return refuse(program, rank, index, reason)


def _deadlock(
    program: Program,
    ranks: Collection[int],
    place: list[int],
    coming: list[dict[Value, _Coming]],
    given: Mapping[Stream, list[Place]],
    taken: Mapping[tuple[Stream, int], int],
) -> ProgramError:
    """The error that shows the circle of ranks that wait for each other."""
    waits: dict[int, tuple[int, Value]] = {}  # rank -> which rank it waits for, and for what
    for rank in ranks:
        if place[rank] >= len(program.ranks[rank]):
            continue
        ins = program.ranks[rank][place[rank]]
        if ins.op in _GIVER:  # an ACCEPT or a PULL
            waits[rank] = ins.peer, ins.writes[0]
        for value in ins.reads:
            _, stream, number = coming[rank].get(value, (0, _COPY, 0))
            if stream == _COPY or len(given.get(stream, ())) > number:
                continue
            if stream[-1] is Op.SEND:
                waits[rank] = int(stream[0]), value
            else:
                missing = (int(r) for r in stream if int(r) in ranks and taken.get((stream, int(r)), 0) <= number)
                waits[rank] = next(missing), value
            break
    path = [min(waits)]
    while waits[path[-1]][0] not in path:
        path.append(waits[path[-1]][0])
    circle = path[path.index(waits[path[-1]][0]) :]
    lines = [
        f"  {at(program, r, place[r])} waits for {waits[r][1]} of rank {waits[r][0]},\n"
        f"    which comes after {at(program, waits[r][0], place[waits[r][0]])}"
        for r in circle
    ]
    chain = " -> ".join(map(str, [*circle, circle[0]]))
    error = ProgramDeadlock(f"deadlock: ranks wait for each other in a circle, {chain}", "\n".join(lines))
    error.places = tuple((r, place[r]) for r in circle)
    return error
