"""What it costs to move a tensor between any two of its forms, there and back, all at once.

`sharding.repartition.path` finds one way; a cost graph needs all of them. A step is a move on one axis of the mesh, as
there. All shortest ways together are the algorithm of Floyd and Warshall: a way from a to b through c is the way from
a to c, and that from c to b. The gradient takes the forward's way back, in conjugate forms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from minipar.errors import PlanError
from minipar.program.mesh import Mesh
from minipar.sharding.forms import Form, I, P, Placement, R, S, local_shape
from minipar.sharding.repartition import DEFAULT_LINK, Link, Path, backward, steps_from

Table = NDArray[np.float64]
STEP = 1e-15  # seconds: of two ways that cost the same, the one with fewer steps is taken


@dataclass(frozen=True, eq=False)
class Moves:
    """Seconds from each form to each other one, forward and of the gradient back; infinite where there is no way."""

    place: Mapping[Form, int]
    forward: Table
    backward: Table

    def table(self, starts: Sequence[Form], ends: Sequence[Form], training: bool) -> Table:
        """Seconds from each of some forms to each of others; `training`: with the gradient's way back."""
        at = np.ix_([self.place[form] for form in starts], [self.place[form] for form in ends])
        found: Table = self.forward[at] + self.backward[at] if training else self.forward[at].copy()
        return found


def moves(
    shape: Sequence[int],
    itemsize: int,
    mesh: Mesh,
    links: Mapping[str, Link],
    forms: Sequence[Form],
    stored: bool = False,
) -> Moves:
    """The moves of a tensor between the given forms, over any others.

    stored   whether it is a parameter, which may be read as a part of a sum: the first rank has it, the others zeros
    """
    axes = forms[0].axes
    costs = tuple(links.get(axis, DEFAULT_LINK) for axis in axes)
    pieces = tuple(
        tuple(sorted({f.placements[k] for f in forms if _special(f.placements[k])}, key=str)) for k in range(len(axes))
    )
    return _all_moves(tuple(shape), itemsize, mesh, axes, costs, pieces, stored)


@lru_cache(maxsize=512)
def _all_moves(
    shape: tuple[int, ...],
    itemsize: int,
    mesh: Mesh,
    axes: tuple[str, ...],
    costs: tuple[Link, ...],
    pieces: tuple[tuple[Placement, ...], ...],
    stored: bool,
) -> Moves:
    plain = (I, R, P, *(S(d) for d in range(len(shape))))
    every = [Form(axes, found) for found in product(*((*plain, *more) for more in pieces)) if same_pieces(found)]
    place = {form: k for k, form in enumerate(every)}
    links = dict(zip(axes, costs, strict=True))
    count = len(every)
    forward, back = np.full((count, count), np.inf), np.full((count, count), np.inf)
    np.fill_diagonal(forward, 0.0)
    np.fill_diagonal(back, 0.0)
    for form, k in place.items():
        if not _fits(shape, form, mesh):
            continue
        ends = [form, *(form.put(axis, p) for axis, more in zip(axes, pieces, strict=True) for p in more)]
        ends += [form.put(axis, P) for axis in axes] if stored else []
        for end in ends:
            for step in steps_from(form, end, shape, itemsize, mesh, costs):
                after = form.put(step.axis, step.after)
                if after not in place or (step.after == P and not (stored and step.before == I)):
                    continue
                j = place[after]
                forward[k, j] = step.seconds + STEP
                back[k, j] = backward(Path(form, after, (step,)), shape, itemsize, mesh, links).seconds
    for via in range(count):
        through = forward[:, via, None] + forward[None, via, :]
        better = through < forward
        forward = np.where(better, through, forward)
        back = np.where(better, back[:, via, None] + back[None, via, :], back)
    return Moves(place, np.where(forward < 1e3 * STEP, 0.0, forward), back)


def _special(p: Placement) -> bool:
    """Whether a placement is no plain shard: cut in pieces, or in unequal blocks."""
    return p.pieces > 1 or p.unequal


def same_pieces(placements: Sequence[Placement]) -> bool:
    """Whether axes that cut the same dimension cut it in the same pieces."""
    pieces = {(p.dim, p.pieces) for p in placements if p.kind == "S"}
    return len(pieces) == len({dim for dim, _ in pieces})


def _fits(shape: Sequence[int], form: Form, mesh: Mesh) -> bool:
    try:
        local_shape(shape, form, mesh)
    except PlanError:
        return False
    return True
