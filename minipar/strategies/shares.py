"""Which server keeps which part of which tensor: the parameters are concatenated and cut into parts of equal bytes.

    tensors    |----- 0 -----|- 1 -|--------------------- 2 ---------------------|
    servers    |---------- 0 -----------|---------- 1 -----------|------- 2 ------|      tensor 2 is cut

Where ranks have shards of a tensor, all of its shards are cut at the same place. So every server has as much of each,
and ranks that share layers send and receive the same.

Where layers are served one by one, what a server has of a layer can be cut further, into about equal pieces that are
pushed, updated and pulled by themselves:

    layer 2    |------- 0 ------||-------- 1 --------|------- 1 ------||------ 2 ------|

Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import accumulate, groupby, pairwise, product
from typing import NamedTuple

from minipar.errors import PlanError
from minipar.program import Group, Instruction, Op, Part, Portion, Value, home, residual
from minipar.program.mesh import Mesh
from minipar.program.shape import Shape
from minipar.strategies.passes.compress import keeps_residual, pushed_bytes

GRAIN = 16  # bytes: no cut is inside an element, whatever its type


class Piece(NamedTuple):
    """Bytes `start` to `stop` of a tensor. They begin at byte `place` of what their server keeps."""

    tensor: int
    start: int
    stop: int
    place: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def cut(
    sizes: Sequence[int], servers: int, alignment: Sequence[int] = (), copies: Sequence[int] = ()
) -> list[list[Piece]]:
    """For each server, its pieces of tensors with these sizes in bytes, in order.

    alignment   for each tensor, what its `place` is a multiple of, if tensors of several types are stored together;
                default: 1 for all
    copies      how many tensors of each size there are, one after another, which are cut alike; default: 1 of each
    """
    total, number = sum(sizes), 0
    found: list[list[Piece]] = [[] for _ in range(servers)]
    before = 0
    place = [0] * servers
    for tensor, size in enumerate(sizes):
        ideal = [total * k // servers - before for k in range(1, servers)]
        edges = [0, *(size if at >= size else max(at, 0) // GRAIN * GRAIN for at in ideal), size]
        align, count = alignment[tensor] if alignment else 1, copies[tensor] if copies else 1
        for server, copy in product(range(servers), range(count)):
            start, stop = edges[server], edges[server + 1]
            if stop > start:
                at = -(-place[server] // align) * align
                found[server].append(Piece(number + copy, start, stop, at))
                place[server] = at + stop - start
        before, number = before + size, number + count
    return found


def message(op: Op, groups: Sequence[int], share: dict[int, int], step: int, peer: int) -> Instruction:
    """A PUSH, ACCEPT, REPLY or PULL: it moves the parts of some groups that one server keeps. `share` has their
    bytes."""
    here = tuple(g for g in groups if g in share)
    parts = tuple(Part(op, g, share[g]) for g in here)
    return Instruction(op, here, -1, step, stream=f"{op.value.lower()} {peer}", peer=peer, parts=parts)


Shares = list[dict[int, int]]  # for each server: parameter group -> bytes of it that the server keeps


def pushes_of(
    gradients: Mapping[int, Value], groups: Sequence[int], sent: Shares, choice: str, step: int, first: int
) -> list[Instruction]:
    """The PUSHes of some groups' gradients, one to each server that keeps something of them. The last one of each
    gradient frees it.

    sent     for each server, in how many bytes its parts of gradients are pushed
    choice   the plan's `compress`
    first    the rank of the first server
    """
    found = []
    last = {g: max(server for server, share in enumerate(sent) if g in share) for g in groups}
    for server, share in enumerate(sent):
        push = message(Op.PUSH, groups, share, step, first + server)
        left = left_out(push.layers, choice)
        frees = tuple(gradients[g] for g in push.layers if last[g] == server)
        push = push._replace(reads=(*(gradients[g] for g in push.layers), *left), writes=left, frees=frees)
        found += [push] if push.layers else []
    return found


def shares_of(groups: Sequence[Group], servers: int, sent: Callable[[int], int] = lambda size: size) -> Shares:
    """For each server, how many bytes of which parameter groups it keeps.

    sent   bytes of a piece -> those that are counted, such as what is sent of its gradient
    """
    owner = [(g, size) for g, group in enumerate(groups) for size in group.tensors]
    found: Shares = [{} for _ in range(servers)]
    for server, pieces in enumerate(cut([size for _, size in owner], servers)):
        for piece in pieces:
            g = owner[piece.tensor][0]
            found[server][g] = found[server].get(g, 0) + sent(piece.size)
    return found


def checked_shares(groups: Sequence[Group], servers: int, states: Sequence[Collection[Value]]) -> Shares:
    """Which server has which part of the parameters. Errors: PlanError if a server would have none, and if a
    stage has none that are trained. `states`: what the stages hold."""
    nothing = [group.layers[0] for group in groups if group.trainable and not sum(group.tensors)]
    if nothing:
        raise PlanError(
            f"sync=ps: all parameters of layer {nothing[0]} are empty, and no server can hold them; possible is "
            "requires_grad=False"
        )
    shares = shares_of(groups, servers)
    if not all(shares):
        size = sum(size for group in groups for size in group.tensors)
        raise PlanError(f"servers={servers}: too many for parameters of {size} bytes")
    for rank, state in enumerate(states):
        if not any(home(value).kind == "param" and value.index in share for share in shares for value in state):
            raise PlanError(
                f"sync=ps pp={len(states)}: stage {rank} has no parameters that are trained, and every rank works "
                "with the servers; possible is another split="
            )
    return shares


Portions = list[dict[Portion, tuple[int, ...]]]  # for each server: what it serves by itself -> bytes of each tensor


def portions_of(groups: Sequence[Group], servers: int, most: float) -> Portions:
    """For each server, what it serves by itself where layers are served one by one: all that it keeps of a group, or
    pieces of that of at most so many bytes, in the order of their bytes.

    A piece ends at a multiple of GRAIN bytes of a tensor, so that it may be somewhat larger. If a group is cut
    anywhere, all that servers keep of it are pieces.
    """
    ends = [list(accumulate(group.tensors, initial=0)) for group in groups]
    owner = [(g, begin) for g, group in enumerate(groups) for begin in ends[g][: len(group.tensors)]]
    runs: list[dict[int, list[tuple[int, int, int]]]] = []  # group -> begin of a tensor, and what is kept of it
    for pieces in cut([size for group in groups for size in group.tensors], servers):
        mine = [(*owner[piece.tensor], piece) for piece in pieces]
        runs.append(
            {g: [(b, b + p.start, b + p.stop) for _, b, p in some] for g, some in groupby(mine, key=lambda one: one[0])}
        )
    edges = [{g: _edges(some, most) for g, some in found.items()} for found in runs]
    whole = {g for g in range(len(groups)) if all(len(found.get(g, ())) < 3 for found in edges)}
    return [
        {
            Portion(g) if g in whole else Portion(g, start, end): tuple(
                min(end, stop) - max(start, begin) for _, begin, stop in runs[server][g] if begin < end and start < stop
            )
            for g, places in found.items()
            for start, end in pairwise(places)
        }
        for server, found in enumerate(edges)
    ]


def parts_of(sizes: Sequence[int], some: Sequence[Portion]) -> list[list[tuple[int, int, int]]]:
    """What each portion of a group has, which together are all of it: tensors of these sizes, and from which byte to
    which. An empty tensor is part of one of them."""
    found: list[list[tuple[int, int, int]]] = [[] for _ in some]
    begin = 0
    for tensor, size in enumerate(sizes):
        here = [k for k, one in enumerate(some) if one.start < begin + size and (begin < one.end or not one.form)]
        for k in here or [next(k for k, one in enumerate(some) if begin <= one.end or not one.form)]:
            stop = min(size, some[k].end - begin) if some[k].form else size
            found[k].append((tensor, max(0, some[k].start - begin), stop))
        begin += size
    return found


def _edges(runs: Sequence[tuple[int, int, int]], most: float) -> list[int]:
    """Where pieces of consecutive bytes begin and end."""
    first, last = runs[0][1], runs[-1][2]
    count = int(-(-(last - first) // max(most, GRAIN)))
    places = {first, last}
    for k in range(1, count):
        ideal = first + k * (last - first) // count
        tensor = max(begin for begin, start, _ in runs if start <= ideal)
        places.add(max(first, tensor + (ideal - tensor) // GRAIN * GRAIN))
    return sorted(places)


def whole(share: Mapping[int, int]) -> dict[Portion, int]:
    """What a server keeps, all of each group served by itself."""
    return {Portion(g): size for g, size in share.items()}


def piece(op: Op, portion: Portion, size: int, step: int, peer: int) -> Instruction:
    """A PUSH or a PULL of what is served by itself, in so many bytes."""
    part = Part(op, portion.group, size, portion.start, portion.end)
    return Instruction(op, (portion.group,), -1, step, stream=f"{op.value.lower()} {peer}", peer=peer, parts=(part,))


def kept_shares(shares: Shares, groups: Sequence[Group], sharing: Mesh) -> Shares:
    """What servers keep, from what each rank has of it: of a group of which the ranks have shards, all shards.
    `sharing`: the axes along which ranks share layers."""
    return [{g: size * groups[g].shards(sharing) for g, size in share.items()} for share in shares]


def pushed_in(shape: Shape, sizes: Iterable[int], choice: str) -> int:
    """In how many bytes a worker pushes parts of gradients of these bytes. `choice` is the plan's `compress`."""
    item = shape.itemsize
    return sum(pushed_bytes(size // item, item, choice) for size in sizes)


def left_out(groups: Iterable[int], choice: str) -> tuple[Value, ...]:
    """What stays with a worker of gradients that it pushes."""
    return tuple(map(residual, groups)) if keeps_residual(choice) else ()


def held_between(row: Sequence[Instruction], state: frozenset[Value]) -> frozenset[Value]:
    """What a worker holds between steps. (It frees its gradients when they are pushed.)"""
    kept = {value for ins in row for value in ins.writes if value.kind == "residual"}
    return frozenset(value for value in state if home(value).kind == "param") | kept


def pushed_shares(shape: Shape, servers: int, choice: str) -> Shares:
    """For each server, the bytes in which a worker pushes its parts of gradients."""
    return shares_of(shape.groups, servers, lambda size: pushed_in(shape, [size], choice))
