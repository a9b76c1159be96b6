"""Functions that several passes use: to find where values are written and used, and to change and insert instructions.

A row is the list of instructions of one rank. A place is an instruction's number in its row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter

from minipar.program import (
    TRANSFERS,
    Instruction,
    Op,
    Part,
    Program,
    Value,
    grad,
    home,
    host,
    tier,
)
from minipar.strategies.buckets import Bucket, shared, split_buckets
from minipar.strategies.draft import Draft
from minipar.strategies.layout import Layout

Rewrite = Callable[[Sequence[Instruction]], Iterable[Instruction]]
Rounds = Callable[[int, Sequence[Instruction]], Iterable[Instruction]]
Placed = Iterable[tuple[int, Instruction]]  # each with a place of a row

# where ----------------------------------------------------------------------------------------------------------------


def last_writes(row: Sequence[Instruction], *kinds: str) -> dict[int, int]:
    """For values of these kinds: layer or group -> the place of the last instruction that writes it."""
    return {value[1]: k for k, ins in enumerate(row) for value in ins.writes if value[0] in kinds}


def uses(row: Sequence[Instruction], values: Container[Value]) -> dict[Value, list[int]]:
    """For each of the values, the places that read it; in the order of first uses."""
    found: dict[Value, list[int]] = {}
    for k, ins in enumerate(row):
        for value in ins.reads:
            if value in values:
                found.setdefault(value, []).append(k)
    return found


def computes(ins: Instruction) -> bool:
    """Whether this is a forward, backward or recomputation on the device."""
    return ins.stream == "compute" and ins.op is not Op.STEP


def stays(row: Sequence[Instruction], places: Sequence[int], ahead: int) -> Iterator[tuple[int, int]]:
    """The first and the last place of each time for which a value stays that is read at these places: from one to the
    next if no more than `ahead` layers work between them."""
    first = next(iter(places), 0)
    for k, then in pairwise([*places, len(row)]):
        if then == len(row) or not _soon(row, k, then, ahead):
            yield first, k
            first = then


def _soon(row: Sequence[Instruction], k: int, then: int, ahead: int) -> bool:
    """Whether no more than `ahead` layers work between two instructions."""
    others: set[tuple[int, ...]] = set()
    for between in range(k + 1, then):
        if computes(row[between]):
            others.add(row[between].layers)
        if len(others) > ahead:
            return False
    return True


def by_update(row: Sequence[Instruction], step: int, rewrite: Rounds) -> list[Instruction]:
    """The row in which `rewrite(number of the update, instructions)` has replaced those of each update. In the draft
    of a step that is the whole row, since its STEP comes later; without flushes it is what comes before the first STEP
    of each update."""
    ends = [k for k, ins in enumerate(row) if ins.op is Op.STEP]
    if not ends:
        return list(rewrite(step, row))
    result: list[Instruction] = []
    for start, end in pairwise([-1, *ends]):
        before = row[start + 1 : end]
        first = start < 0 or row[start].step != row[end].step
        result += [*(rewrite(row[end].step, before) if first else before), row[end]]
    return [*result, *row[ends[-1] + 1 :]]


# actions --------------------------------------------------------------------------------------------------------------

ActionKey = tuple[bool, int, int]  # forward or not, micro-batch, step


def action_of(ins: Instruction) -> ActionKey | None:
    """Which forward or backward an instruction of a micro-batch belongs to."""
    if ins.microbatch < 0:
        return None
    there = ins.op is Op.FORWARD or (ins.op in TRANSFERS and (ins.reads or ins.writes)[0].kind == "output")
    return there, ins.microbatch, ins.step


def actions_of(program: Program, rank: int) -> list[ActionKey]:
    """For each instruction of a rank, the action that it belongs to. An update belongs to the backward before it."""
    found = [action_of(ins) for ins in program.ranks[rank]]
    last, result = next(filter(None, found), (True, 0, 0)), []
    for action in found:
        last = action or last
        result.append(last)
    return result


# held by whom ---------------------------------------------------------------------------------------------------------


def summed(draft: Draft, rank: int) -> dict[int, tuple[int, ...]]:
    """The groups whose whole gradient the update of a rank reads, and that several ranks hold; each with these
    ranks."""
    steps = [ins for ins in draft.update[rank] if ins.op is Op.STEP]
    return shared(draft.layout, [value.index for ins in steps for value in ins.reads if value.kind == "grad"])


def keep_gradients(draft: Draft, groups: Sequence[Collection[int]]) -> Draft:
    """On each rank the gradients of these groups live in a communication buffer, which stays from step to step."""
    kept = [frozenset(map(grad, mine)) for mine in groups]

    def keep(rank: int, row: Sequence[Instruction]) -> list[Instruction]:
        return [
            ins._replace(frees=tuple(v for v in ins.frees if v not in kept[rank])) if ins.op is Op.STEP else ins
            for ins in row
        ]

    draft = draft.each(keep).each_update(keep)
    return draft.each_state(lambda rank, held: held | kept[rank])


def in_buckets(
    last: Mapping[int, int], sharing: Mapping[int, tuple[int, ...]], layout: Layout, bucket: Bucket, end: int | None
) -> list[tuple[int, list[int]]]:
    """Gradients in buckets, each of the same ranks, in the order in which backward completes them; each bucket with the
    place after which it is summed.

    last   for each of the gradients, the place where it is complete; `sharing`: the ranks that sum it
    end    the place after which all are summed; None: each where it is complete
    """
    ready = sorted(last, key=lambda g: (last[g], -g))
    found = []
    for ranks in dict.fromkeys(sharing[g] for g in ready):
        for groups in split_buckets([g for g in ready if sharing[g] == ranks], layout.shape.groups, bucket):
            found.append((max(last[g] for g in groups) if end is None else end, groups))
    return found


# changes --------------------------------------------------------------------------------------------------------------


def insert(row: Sequence[Instruction], before: Placed = (), after: Placed = ()) -> list[Instruction]:
    """The row with other instructions inserted before and after some of its places. Those of one place keep their
    order."""
    found = [(3 * k, ins) for k, ins in enumerate(row)]
    found += [(3 * k - 1, ins) for k, ins in before]
    found += [(3 * k + 1, ins) for k, ins in after]
    return [ins for _, ins in sorted(found, key=itemgetter(0))]


def also_free(row: Sequence[Instruction], values: Iterable[tuple[int, Value]]) -> list[Instruction]:
    """The row in which the instructions at these places also free these values."""
    result = list(row)
    for k, value in values:
        result[k] = result[k]._replace(frees=(*result[k].frees, value))
    return result


def free_at_last_read(row: Sequence[Instruction], fits: Callable[[Value], bool]) -> list[Instruction]:
    """The row in which the last instruction that reads one of these values frees it."""
    last = {value: k for k, ins in enumerate(row) for value in ins.reads if fits(value)}
    return also_free(row, [(k, value) for value, k in sorted(last.items())])


def of_groups(ins: Instruction, groups: tuple[int, ...]) -> Instruction:
    """The part of a STEP, or of a sum, that is of these groups."""
    reads, writes, frees = (
        tuple(v for v in values if v.index in groups) for values in (ins.reads, ins.writes, ins.frees)
    )
    return ins._replace(layers=groups, reads=reads, writes=writes, frees=frees)


def renamed(ins: Instruction, name: Callable[[Value], Value]) -> Instruction:
    """The instruction with every value replaced by `name(value)`."""
    reads, writes, frees = (tuple(map(name, values)) for values in (ins.reads, ins.writes, ins.frees))
    return ins._replace(reads=reads, writes=writes, frees=frees)


# instructions ---------------------------------------------------------------------------------------------------------


def collective(
    op: Op,
    groups: Sequence[int],
    ranks: tuple[int, ...],
    step: int,
    reads: Iterable[Value],
    writes: Iterable[Value],
    parts: Iterable[Part],
    frees: Iterable[Value] = (),
    microbatch: int = -1,
) -> Instruction:
    """A collective of these ranks on parameter groups. Collectives of the same ranks run one after another."""
    stream = "group " + ",".join(map(str, ranks))
    moved = tuple(reads), tuple(writes), tuple(frees)
    return Instruction(op, tuple(groups), microbatch, step, *moved, stream, -1, ranks, tuple(parts))


def all_reduce(groups: Sequence[int], layout: Layout, ranks: tuple[int, ...], step: int, bucket: Bucket) -> Instruction:
    """The ALL_REDUCE of some gradients, in one message; with bucket "none" in one message for each parameter tensor."""
    tensors = [(g, size) for g in groups for size in layout.shape.groups[g].tensors]
    parts = [Part(Op.ALL_REDUCE, g, size) for g, size in tensors]
    if bucket != "none":
        parts = [Part(Op.ALL_REDUCE, -1, sum(size for _, size in tensors))]
    values = tuple(map(grad, groups))
    return collective(Op.ALL_REDUCE, groups, ranks, step, values, values, parts)


def copy_of(
    op: Op, source: Value, target: Value, step: int, frees: tuple[Value, ...] = (), waits: tuple[Value, ...] = ()
) -> Instruction:
    """An OFFLOAD or FETCH on the stream of its direction. It also waits for the values in `waits`."""
    slower = tier(target if op is Op.OFFLOAD else source)
    stream = f"{'to' if op is Op.OFFLOAD else 'from'} {slower}"
    reads = tuple(dict.fromkeys((source, *waits)))
    return Instruction(op, (source.index,), source.microbatch, step, reads, (target,), frees, stream)


def in_two(ins: Instruction, on_host: Callable[[int], bool]) -> list[Instruction]:
    """A STEP as two: one on the device, and one on the host. `on_host` says whether a group's parameters are there."""
    there = tuple(g for g in ins.layers if on_host(g))
    here = tuple(g for g in ins.layers if g not in there)
    if not there:
        return [ins]
    both = [of_groups(ins, here), renamed(of_groups(ins, there), host)._replace(stream="host")]
    return [part for part in both if part.layers]


def computed_on_host(instructions: Sequence[Instruction]) -> tuple[frozenset[int], frozenset[int]]:
    """The layers that a rank computes on the host, and their parameter groups."""
    mine = [ins for ins in instructions if ins.op is Op.FORWARD and ins.stream == "host"]
    groups = {v.index for ins in mine for v in ins.reads if home(v).kind == "param"}
    return frozenset(layer for ins in mine for layer in ins.layers), frozenset(groups)
