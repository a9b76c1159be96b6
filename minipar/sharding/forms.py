"""Forms: how a tensor lies on the ranks of a mesh, one placement for each axis.

    placement   every rank of the axis has          its gradient is
    R           the whole value                     P: each rank has a part of a sum
    I           the whole value                     I: whole, too
    P           a part of a sum                     R: whole
    S0, S1 ...  a block of dimension 0, 1, ...      the same block

R and I are the same numbers; they differ in what the gradient is, and so in where a gradient is summed. Parameters and
what the ranks compute alike are I: their gradients are computed alike and need no sum. Where I is read by an operator
that computes a part only, it is read as R: nothing moves forward, and backward the gradient's parts are summed. That
is Megatron's f; its g is P read as I. The other convention, R everywhere, sums the gradient of every parameter that
was not cut once more, at the end of the step: also that of a norm which all ranks compute alike.

The blocks of a dimension are cut by the outer (first) axis first, then each of them by the next axis. `S0:3` cuts
each of 3 equal pieces of dimension 0 and gives a rank its block of each piece: the queries, keys and values of a fused
projection. This is how a rank gets whole heads of all three. Source of the letters: Alpa, DTensor, spmd_types.

Blocks may be unequal: of a packed tensor, whose entries another tensor counts, U0 and U1 are the blocks of dimension 0
that belong to equal blocks of dimension 0 or 1 of the counts (unequal.py). Such are the tokens of experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from minipar.errors import PlanError
from minipar.program.mesh import Mesh


@dataclass(frozen=True)
class Placement:
    """How a tensor lies on one axis: `kind` R, I, P or S; of S the dimension, and the pieces that are cut.

    counted   where the blocks are unequal, the dimension of their counts that is cut; -1: they are equal
    """

    kind: str
    dim: int = -1
    pieces: int = 1
    counted: int = -1

    @property
    def whole(self) -> bool:
        """Whether every rank has all of the value."""
        return self.kind in ("R", "I")

    @property
    def unequal(self) -> bool:
        """Whether ranks have blocks of sizes that only the data tell."""
        return self.counted >= 0

    def __str__(self) -> str:
        if self.kind != "S":
            return self.kind
        if self.unequal:
            return f"U{self.counted}"
        return f"S{self.dim}" if self.pieces == 1 else f"S{self.dim}:{self.pieces}"


R, I, P = Placement("R"), Placement("I"), Placement("P")
_CONJUGATE = {"R": P, "P": R, "I": I}


def S(dim: int, pieces: int = 1) -> Placement:
    """A block of dimension `dim` for each rank; of each of `pieces` equal pieces of it, where there are several."""
    return Placement("S", dim, pieces)


def U(counted: int) -> Placement:
    """An unequal block of dimension 0 for each rank: what an equal block of the counts' dimension `counted` counts."""
    return Placement("S", 0, 1, counted)


def conjugate(placement: Placement) -> Placement:
    """How the gradient lies of a value that lies so."""
    return _CONJUGATE.get(placement.kind, placement)


def placement(text: str, rank: int | None = None, what: str = "") -> Placement:
    """From `R`, `I`, `P`, `S1`, `S-1`, `S1:3` or `U1`. `rank`: of the tensor, which dimensions below 0 need.

    Errors: PlanError for other text, or a dimension that the tensor does not have.
    """
    word = text.strip()
    if word in ("R", "I", "P"):
        return Placement(word)
    if word in ("U0", "U1") and rank != 0:
        return U(int(word[1]))
    found = re.fullmatch(r"S(-?\d+)(?::(\d+))?", word)
    pieces = int(found[2] or 1) if found else 0
    if found is None or pieces < 1:
        raise PlanError(
            f"{_named(what)}form {text!r}: must be R (whole), P (part of a sum), I (whole, its gradient too) or S and "
            "a dimension, such as S0, S-1, or S0:3 (of each of 3 pieces); U0 or U1 (unequal blocks of what is counted)"
        )
    dim = int(found[1])
    if rank is not None and not -rank <= dim < rank:
        ways = f"S0 to S{rank - 1}, or R" if rank > 1 else "S0 or R" if rank else "R"
        raise PlanError(f"{_named(what)}form {word}: the tensor has {_dimensions(rank)}; possible are {ways}")
    return S(dim + rank if dim < 0 and rank is not None else dim, pieces)


@dataclass(frozen=True)
class Form:
    """A placement for each axis of a mesh, the outer axis first."""

    axes: tuple[str, ...]
    placements: tuple[Placement, ...]

    def on(self, axis: str) -> Placement:
        """The placement on an axis; I on one that the form does not have."""
        return dict(self.items()).get(axis, I)

    def put(self, axis: str, placement: Placement) -> Form:
        """The same form with another placement on an axis."""
        changed = (placement if name == axis else old for name, old in self.items())
        return Form(self.axes, tuple(changed))

    def items(self) -> Iterator[tuple[str, Placement]]:
        """Axes and their placements."""
        return zip(self.axes, self.placements, strict=True)

    def conjugate(self) -> Form:
        """The form of the gradient."""
        return Form(self.axes, tuple(conjugate(p) for p in self.placements))

    def __str__(self) -> str:
        """As `parse` reads it: axes on which the tensor is I are left out."""
        if len(set(self.placements)) <= 1 and all(p.whole for p in self.placements):
            return str(self.placements[0]) if self.placements else "I"
        return ", ".join(f"{p} on {axis}" for axis, p in self.items() if p != I)

    @staticmethod
    def parse(text: str, mesh: Mesh, rank: int | None = None, what: str = "") -> Form:
        """From `S1 on tp`, `S0 on dp, S2 on tp`, or `R`, which then stands for all axes. Other axes are I.

        `rank`: of the tensor; `what`: names it in errors. Errors: PlanError for what cannot be read, an unknown axis
        or one that is named twice, or a dimension that the tensor does not have.
        """
        return Form(axes_of(mesh), tuple({**dict(whole(mesh).items()), **parsed(text, mesh, rank, what)}.values()))


def parsed(text: str, mesh: Mesh, rank: int | None = None, what: str = "") -> dict[str, Placement]:
    """What a text says of each axis that it names. Errors: as `Form.parse`."""
    axes = axes_of(mesh)
    found: dict[str, Placement] = {}
    for word in text.split(","):
        letter, on, axis = (part.strip() for part in word.partition(" on "))
        if not on:
            if "," in text:
                raise PlanError(f"{_named(what)}form {text!r}: of several placements each needs ` on ` and an axis")
            return dict.fromkeys(axes, placement(letter, rank, what))
        if axis not in axes:
            known = f"possible are {', '.join(axes)}" if axes else "the mesh has none that tensors lie on"
            raise PlanError(f"{_named(what)}form {text!r}: {axis!r} is no axis of the mesh; {known}")
        if axis in found:
            raise PlanError(f"{_named(what)}form {text!r}: {axis} is named twice; a tensor lies one way on an axis")
        found[axis] = placement(letter, rank, what)
    return found


def axes_of(mesh: Mesh) -> tuple[str, ...]:
    """The axes on which tensors lie: all but `pp`, along which ranks have other layers."""
    return tuple(name for name, _ in mesh if name != "pp")


def whole(mesh: Mesh) -> Form:
    """I on every axis."""
    axes = axes_of(mesh)
    return Form(axes, (I,) * len(axes))


def local_shape(shape: Sequence[int], form: Form, mesh: Mesh, what: str = "") -> tuple[int, ...]:
    """What one rank has of a tensor. Uneven blocks are refused: all ranks have the same shape.

    Errors: PlanError with the tensor (`what`), the dimension, its size and the nearest possible choice.
    """
    local = tuple(shape)
    for axis, p in form.items():
        local = cut(local, p, mesh.length(axis), axis, what)
    return local


def cut(shape: Sequence[int], p: Placement, ranks: int, axis: str = "", what: str = "") -> tuple[int, ...]:
    """The shape of one rank's part on one axis; of unequal blocks the mean. Errors: as `local_shape`."""
    if p.kind != "S":
        return tuple(shape)
    if p.unequal:
        return (shape[0] // ranks, *shape[1:])
    if p.dim >= len(shape):
        raise PlanError(f"{_named(what)}form {p}: the tensor has {_dimensions(len(shape))}; {nearest(shape, p, ranks)}")
    size = shape[p.dim]
    if size % (p.pieces * ranks):
        pieces = f" in {p.pieces} pieces" if p.pieces > 1 else ""
        where = f" of {axis}={ranks}" if axis else ""
        raise PlanError(
            f"{_named(what)}form {p}{f' on {axis}' if axis else ''}: dimension {p.dim} has {size} elements, which "
            f"{ranks} ranks{where} cannot cut into equal blocks{pieces}; {nearest(shape, p, ranks)}"
        )
    return (*shape[: p.dim], size // ranks, *shape[p.dim + 1 :])


def divides(shape: Sequence[int], p: Placement, ranks: int) -> bool:
    """Whether all ranks of an axis get equal parts, or are not meant to."""
    return p.kind != "S" or p.unequal or (p.dim < len(shape) and shape[p.dim] % (p.pieces * ranks) == 0)


def nearest(shape: Sequence[int], p: Placement, ranks: int) -> str:
    """What is possible instead of a cut that is not: other sizes of the axis, and other dimensions."""
    ways = []
    if p.dim < len(shape) and shape[p.dim]:
        fitting = [n for n in range(2, ranks + 1) if shape[p.dim] % (n * p.pieces) == 0]
        if fitting:
            ways.append(f"{p} over {max(fitting)} ranks")
    others = [d for d, size in enumerate(shape) if d != p.dim and size and size % ranks == 0]
    others.sort(key=lambda d: abs(d - p.dim))
    ways += [f"S{d} ({shape[d]} elements)" for d in others[:2]]
    return f"the nearest choice is {' or '.join([*ways, 'R (whole)'])}"


def _dimensions(rank: int) -> str:
    return f"{rank} dimension{'s' * (rank != 1)}"


def _named(what: str) -> str:
    return f"{what}: " if what else ""
