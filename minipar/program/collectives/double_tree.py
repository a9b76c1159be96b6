"""Two binary trees, each for half of the tensor: an inner rank of one is a leaf of the other, so all ports are busy.

Source: Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009; NCCL's
double binary tree.

    broadcast from 0, 7 more ranks (places 1 to 7)        first half                second half
                                                              0                         0
    the root feeds both trees; the second is the first        4                         3
    with every rank one place further (mirrored, where     2     6                   1     5
    their number is even)                                 1 3   5 7                 7 2   4 6

    reduce: the same arrows, upwards. Pieces follow each other through the trees, so the depth costs only latency.

With p ranks, d = floor(log2(p - 1)) + 1 links from the root down, n bytes, k pieces of n / (2 k) in each tree:

    collective    steps        bytes that a rank sends       time, at most
    broadcast     d + k - 1    n; a leaf of both trees 0     d (alpha + 2 n/k beta) + n beta
    reduce        d + k - 1    n; the root 0                 d (alpha + 2 n/k (beta + gamma)) + n max(beta, gamma)
    allreduce     twice that   2 n                           the sum of both
"""

from __future__ import annotations

from collections.abc import Iterator

from minipar.program.collectives.moves import Algorithm, Copy, Move, Rates, Reduce, Send, Setting, in_turn


def _relatives(place: int, count: int) -> tuple[int, list[int]]:
    """Parent and children of a place from 1 to `count` in the first tree; 0 is the root above both trees.

    From left to right, the places in the tree are 1, 2, 3, ... The height of a place above the leaves is the number of
    times that 2 divides it.
    """
    height = place & -place
    parent = (place ^ height) | height << 1
    if parent > count:
        parent = place ^ height
    children = [place - height // 2] if height > 1 else []
    reach = height // 2
    while reach and place + reach > count:
        reach //= 2
    return parent, children + ([place + reach] if reach else [])


def _in_tree(tree: int, place: int, count: int) -> tuple[int, list[int]]:
    """The parent of a rank's place in one of the two trees, and its children, as places of ranks; -1: no parent."""
    if place == 0:
        return -1, [_out(tree, 1 << count.bit_length() - 1, count)] if count else []
    parent, children = _relatives(_into(tree, place, count), count)
    return _out(tree, parent, count) if parent else 0, [_out(tree, child, count) for child in children]


def _into(tree: int, place: int, count: int) -> int:
    """The position in a tree of the rank at `place`."""
    if tree == 0:
        return place
    return place % count + 1 if count % 2 else count + 1 - place


def _out(tree: int, position: int, count: int) -> int:
    """The place of the rank that has this position in a tree."""
    if tree == 0:
        return position
    return (position - 2) % count + 1 if count % 2 else count + 1 - position


def reduce(setting: Setting, rank: int) -> Iterator[Move]:
    """A rank's moves. First it sends all pieces of the half in whose tree it is a leaf: there it waits for nobody."""
    p, root, k = setting.ranks, setting.root, setting.pieces
    place = (rank - root) % p
    family = {tree: _in_tree(tree, place, p - 1) for tree in (0, 1)}
    for piece in range(k):
        for tree, (parent, children) in family.items():
            if parent >= 0 and not children:
                yield Send([tree * k + piece], (parent + root) % p)
    for piece in range(k):
        for tree, (parent, children) in family.items():
            for child in children:
                yield Reduce([tree * k + piece], (child + root) % p)
            if parent >= 0 and children:
                yield Send([tree * k + piece], (parent + root) % p)


def broadcast(setting: Setting, rank: int) -> Iterator[Move]:
    """A rank's moves: each piece goes to the children as soon as it has arrived."""
    p, root, k = setting.ranks, setting.root, setting.pieces
    place = (rank - root) % p
    for piece in range(k):
        for tree in (0, 1):
            parent, children = _in_tree(tree, place, p - 1)
            if parent >= 0:
                yield Copy([tree * k + piece], (parent + root) % p)
            for child in children:
                yield Send([tree * k + piece], (child + root) % p)


allreduce = in_turn(reduce, broadcast)
_MOVES = {"allreduce": allreduce, "broadcast": broadcast, "reduce": reduce}


def cost(collective: str, setting: Setting, size: float, rates: Rates) -> float:
    """Seconds at most, by the table above."""
    p, k = setting.ranks, setting.pieces
    if p == 1:
        return 0.0
    deep, piece = (p - 1).bit_length(), size / (2 * k)
    port, add = rates.port(piece), piece * rates.gamma
    down = deep * (rates.alpha + 4 * port) + 2 * k * port
    up = deep * (rates.alpha + 4 * (port + add)) + 2 * k * max(port, add)
    return {"allreduce": up + down, "broadcast": down, "reduce": up}[collective]


def chunks(collective: str, setting: Setting) -> int:
    """How many chunks the tensor is cut into: the pieces of the first half, then those of the second."""
    return 2 * setting.pieces


ALGORITHM = Algorithm(_MOVES, cost, chunks, tuple(_MOVES), parts=2)
