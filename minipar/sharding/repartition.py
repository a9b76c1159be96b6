"""Repartition: the cheapest way from one form to another, in collectives over one axis of the mesh each.

    P -> R, I    all_reduce          S -> R, I    all_gather          R, I -> S    slice: no messages
    P -> S       reduce_scatter      S -> S       all_to_all          R <-> I      nothing
                                     U0 <-> U1    all_to_all          -> P         pad: zeros on all ranks but one

Of the axes that cut a dimension only the innermost may drop it, take it or change places: otherwise blocks would no
longer lie one behind the other. The cheapest way is the shortest path (Dijkstra) through all forms. It finds by itself
that a sum over two axes is best made hierarchically. Backward, the gradient goes the way back in conjugate forms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush

from minipar.costs.alpha_beta import collective_seconds
from minipar.errors import PlanError
from minipar.program.mesh import Mesh
from minipar.sharding.forms import Form, I, P, Placement, R, S, conjugate, divides, local_shape

Link = tuple[float, float]  # alpha in seconds, beta in seconds for each byte
DEFAULT_LINK: Link = (1e-6, 1e-9)  # 1 us, 1 GB/s
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")

# From one kind of placement to another, on one axis. All that is not a collective costs nothing.
_OPS = {
    ("P", "R"): "all_reduce", ("P", "I"): "all_reduce", ("P", "S"): "reduce_scatter",
    ("S", "R"): "all_gather", ("S", "I"): "all_gather", ("S", "S"): "all_to_all", ("S", "P"): "pad",
    ("R", "S"): "slice", ("R", "I"): "none", ("R", "P"): "pad",
    ("I", "S"): "slice", ("I", "R"): "none", ("I", "P"): "pad",
}  # fmt: skip
_WORDS = {
    "all_reduce": "the parts are summed",
    "reduce_scatter": "the parts are summed, and each rank keeps its block of dimension {after}",
    "all_gather": "every rank gets all blocks of dimension {before}",
    "all_to_all": "each rank gives blocks of dimension {before} for blocks of dimension {after}",
    "slice": "each rank keeps its block of dimension {after}",
    "pad": "the value stays where it is, with zeros elsewhere",
    "none": "nothing moves",
}


@dataclass(frozen=True)
class Step:
    """A move on one axis.

    op        all_reduce, reduce_scatter, all_gather, all_to_all; slice, pad or none, which send nothing
    bytes     that each rank has before it
    seconds   by the alpha-beta model
    """

    op: str
    axis: str
    before: Placement
    after: Placement
    bytes: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.op} over {self.axis} ({self.before} -> {self.after})"

    @property
    def sends(self) -> bool:
        """Whether it is a collective."""
        return self.op in COLLECTIVES

    def explain(self) -> str:
        """What happens, in words."""
        text = _WORDS[self.op].format(before=_dim(self.before), after=_dim(self.after))
        if not self.sends:
            return f"{self.op} on {self.axis}: {text}; no messages"
        return f"{self.op} over {self.axis}: {text}; {self.bytes} bytes on each rank, {self.seconds * 1e3:.3g} ms"


@dataclass(frozen=True)
class Path:
    """The steps from one form to another."""

    start: Form
    end: Form
    steps: tuple[Step, ...]

    @property
    def seconds(self) -> float:
        """Of all steps together."""
        return math.fsum(step.seconds for step in self.steps)

    @property
    def collectives(self) -> tuple[Step, ...]:
        """The steps that send something."""
        return tuple(step for step in self.steps if step.sends)

    def explain(self) -> str:
        """The steps in words, one on a line."""
        if not self.steps:
            return f"{self.start}: read as it lies"
        lines = [f"{k}. {step.explain()}" for k, step in enumerate(self.steps, 1)]
        return "\n".join([f"{self.start} -> {self.end}, {self.seconds * 1e3:.3g} ms", *lines])


def path(
    start: Form,
    end: Form,
    shape: Sequence[int],
    itemsize: int,
    mesh: Mesh,
    links: Mapping[str, Link] | None = None,
    what: str = "",
) -> Path:
    """The cheapest way from one form to another; of ways that cost the same, the one with the fewest steps.

    shape, itemsize   of the whole tensor, in elements and bytes
    links             (alpha, beta) of each axis; default 1 us and 1 GB/s

    Errors: PlanError, if one of the two forms cannot be, or there is no way.
    """
    for form in (start, end):
        local_shape(shape, form, mesh, what)
    known = links or {}
    costs = tuple(known.get(axis, DEFAULT_LINK) for axis in start.axes)
    found = _shortest(start, end, tuple(shape), itemsize, mesh, costs)
    if found is None:
        unequal = any(p.unequal for p in (*start.placements, *end.placements))
        other = "possible are U0 and U1 for both" if unequal else "read it as R (whole)"
        raise PlanError(f"{f'{what}: ' if what else ''}no way from {start} to {end}; {other}")
    return found


@lru_cache(maxsize=4096)
def _shortest(
    start: Form, end: Form, shape: tuple[int, ...], itemsize: int, mesh: Mesh, costs: tuple[Link, ...]
) -> Path | None:
    counter = 0
    # By seconds, rounded so that equal sums are equal however they were added up; then by the number of steps.
    queue: list[tuple[float, int, int, Form, tuple[Step, ...]]] = [(0.0, 0, 0, start, ())]
    done: set[Form] = set()
    while queue:
        seconds, count, _, form, steps = heappop(queue)
        if form == end:
            return Path(start, end, steps)
        if form in done:
            continue
        done.add(form)
        for step in steps_from(form, end, shape, itemsize, mesh, costs):
            after = form.put(step.axis, step.after)
            if after not in done:
                counter += 1
                cost = float(f"{seconds + step.seconds:.12g}")
                heappush(queue, (cost, count + 1, counter, after, (*steps, step)))
    return None


def steps_from(
    form: Form, end: Form, shape: tuple[int, ...], itemsize: int, mesh: Mesh, costs: tuple[Link, ...]
) -> Iterator[Step]:
    local = local_shape(shape, form, mesh)
    nbytes = math.prod(local) * itemsize
    for k, (axis, before) in enumerate(form.items()):
        ranks, inner = mesh.length(axis), form.placements[k + 1 :]
        taken = {p.dim for p in inner if p.kind == "S"}
        if before.kind == "S" and before.dim in taken:
            continue  # an inner axis cuts the same dimension, and has to let go of it first
        free = tuple(size * (ranks if before.kind == "S" and d == before.dim else 1) for d, size in enumerate(local))
        wanted = end.placements[k]
        targets = [R, I, *(S(d) for d in range(len(shape)))]
        targets += [wanted] if wanted not in targets else []
        for after in targets:
            if before.unequal != after.unequal:
                continue  # unequal blocks change places among themselves only
            if before.kind == after.kind == "S" and before.dim == after.dim and not before.unequal:
                continue  # other pieces of one dimension: their common parts have other sizes
            op = _OPS.get((before.kind, after.kind))
            if op is None or after == before or after.dim in taken or not divides(free, after, ranks):
                continue
            sends = op in COLLECTIVES and ranks > 1
            seconds = collective_seconds(op, ranks, nbytes, *costs[k]) if sends else 0.0
            yield Step(op if sends or op not in COLLECTIVES else "none", axis, before, after, nbytes, seconds)


def backward(
    way: Path, shape: Sequence[int], itemsize: int, mesh: Mesh, links: Mapping[str, Link] | None = None
) -> Path:
    """The way of the gradient: the steps back, each between conjugate forms. Looked up, not searched.

    R -> S is undone by zeros beside the block (pad), I -> R by an all-reduce, and P -> I by nothing.
    """
    known = links or {}
    form = way.end
    steps = []
    for step in reversed(way.steps):
        nbytes = math.prod(local_shape(shape, form, mesh)) * itemsize
        before, after = conjugate(step.after), conjugate(step.before)
        op = "none" if before == after else _OPS.get((before.kind, after.kind), "none")
        ranks = mesh.length(step.axis)
        sends = op in COLLECTIVES and ranks > 1
        seconds = 0.0
        if sends:
            seconds = collective_seconds(op, ranks, nbytes, *known.get(step.axis, DEFAULT_LINK))
        name = op if sends or op not in COLLECTIVES else "none"
        steps.append(Step(name, step.axis, before, after, nbytes, seconds))
        form = form.put(step.axis, step.before)
    return Path(way.end.conjugate(), way.start.conjugate(), tuple(steps))


@dataclass(frozen=True)
class Matrix:
    """Seconds from each form to each other one, to be drawn: `seconds[row][column]`."""

    rows: tuple[Form, ...]
    columns: tuple[Form, ...]
    seconds: tuple[tuple[float, ...], ...]
    paths: tuple[tuple[Path, ...], ...]

    def __str__(self) -> str:
        """The table in ms."""
        names = [letters(form) for form in self.columns]
        width = max(7, *(len(name) + 1 for name in [*names, *map(letters, self.rows)]))
        lines = ["".ljust(width) + "".join(name.rjust(width) for name in names)]
        for form, row in zip(self.rows, self.seconds, strict=True):
            lines.append(letters(form).ljust(width) + "".join(f"{1e3 * s:.3f}".rjust(width) for s in row))
        return "\n".join(lines)


def letters(form: Form) -> str:
    """A form without its axes, as in tables: `RS0`."""
    return "".join(map(str, form.placements))


def matrix(
    shape: Sequence[int],
    itemsize: int,
    mesh: Mesh,
    links: Mapping[str, Link] | None = None,
    dims: int = 2,
    rows: Sequence[Form] | None = None,
    columns: Sequence[Form] | None = None,
) -> Matrix:
    """What it costs to go from each form (R, S0, S1, ..., P on every axis) to each one without P.

    `dims`: how many dimensions may be cut; `rows`, `columns`: other forms than these. Forms that `shape` is too small
    for are left out.
    """
    every = list(_forms(mesh, (R, *(S(d) for d in range(min(dims, len(shape)))), P), shape))
    chosen = tuple(every if rows is None else rows)
    wanted = tuple([f for f in every if P not in f.placements] if columns is None else columns)
    ways = tuple(tuple(path(a, b, shape, itemsize, mesh, links) for b in wanted) for a in chosen)
    return Matrix(chosen, wanted, tuple(tuple(way.seconds for way in row) for row in ways), ways)


def _forms(mesh: Mesh, placements: Sequence[Placement], shape: Sequence[int]) -> Iterator[Form]:
    axes = tuple(name for name, _ in mesh if name != "pp")

    def extend(k: int, so_far: tuple[Placement, ...], local: tuple[int, ...]) -> Iterator[Form]:
        if k == len(axes):
            yield Form(axes, so_far)
            return
        ranks = mesh.length(axes[k])
        for p in placements:
            if divides(local, p, ranks):
                after = tuple(s // ranks if p.kind == "S" and d == p.dim else s for d, s in enumerate(local))
                yield from extend(k + 1, (*so_far, p), after)

    return extend(0, (), tuple(shape))


def _dim(p: Placement) -> str:
    if p.unequal:
        return f"0 (unequal ones, by dimension {p.counted} of their counts)"
    return f"{p.dim} (of each of {p.pieces} pieces)" if p.pieces > 1 else str(p.dim)
