"""Forms: how the ranks of a tensor-parallel group have a value between them.

    R    whole: every rank has all of it
    P    a partial sum: the value is the sum of what the ranks have
    M    a partial maximum: the value is the largest of what the ranks have, element by element
    S0   a shard: rank k has the k-th of equal parts of dimension 0; S1, S2, ... of another dimension.
         S0:3 cuts dimension 0 in 3 pieces first, such as queries, keys and values, and each rank has a part of each

    U0   an unequal shard: rank k has the entries that the k-th of equal parts of the counts count, cut in dimension 0;
         U1: in dimension 1. The counts are the last tensor N in front of it in the same value
    N    the counts of unequal shards, whole: (B, X), how many entries row b has for column x

A value of several tensors has a letter for each, such as "R,P". The text is empty where all of them are whole, as are
the values of every program without tensor parallelism.

Of what a node reads a letter may also be

    C1   the value is whole, and the rank takes its shard of dimension 1: nothing is sent

A layer that is sharded is cut into nodes where forms change. `Forms` says of a node in which forms it takes and gives
values. A value that is read in another form than it was written in gets a collective, as one that is read on another
rank gets a SEND and a RECV:

    written P, read R    ALL_REDUCE               written S1, read R    ALL_GATHER
    written M, read R    ALL_REDUCE               written S1, read S2   ALL_TO_ALL
    written P, read S1   REDUCE_SCATTER           written U0, read U1   ALL_TO_ALL, of parts of different sizes
    written S0, read N   ALL_GATHER               written S1, read C1:3 ALL_GATHER

Ranks may share layers along several axes of the mesh, such as tp and context_parallel. A letter then has a part for
each axis, in the order of `mesh.SHARING`: "S1/P" is a shard of dimension 1 along the first axis, and a partial sum
along the second. What is left out at the end is R. A collective changes one axis. Where several axes cut one dimension,
the first one cuts first, and each axis behind it cuts what that has left: so the last axis is gathered first.

Which sizes unequal shards have only the data tell, as with the tokens of experts. So ranks first gather the counts,
then exchange the entries. A gradient of unequal shards has the counts in front of it, too: it goes back as they came.

Source: the letters are those of GSPMD (Xu et al., 2021) and of torch's DTensor: replicate, partial, shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import NamedTuple

from minipar.program.instructions import Op
from minipar.program.values import Value

WHOLE, PARTIAL, MOST, COUNTS = "R", "P", "M", "N"


class Forms(NamedTuple):
    """The forms in which a node takes and gives values; all of them texts, such as "" or "R,P".

    reads        its input: what the node before it gives
    writes       its output
    grad_reads   the gradient of its output, where its backward takes it: a letter for each tensor of numbers with
                 fractions, since others have no gradient, and for counts (N)
    grad_writes  the gradient of its input, as its backward gives it
    """

    reads: str = ""
    writes: str = ""
    grad_reads: str = ""
    grad_writes: str = ""


def letters(form: str, count: int = 0) -> tuple[str, ...]:
    """The letter of each tensor; of a value that is whole, `count` times "R"."""
    return tuple(form.split(",")) if form else (WHOLE,) * count


def text_of(found: tuple[str, ...]) -> str:
    """The text of some letters: "" where all tensors are whole."""
    return "" if all(letter == WHOLE for letter in found) else ",".join(found)


def parts_of(letter: str, count: int = 0) -> list[str]:
    """A letter's part on each axis, at least `count` of them."""
    found = letter.split("/")
    return found + [WHOLE] * (count - len(found))


def letter_of(parts: Sequence[str], whole: str = WHOLE) -> str:
    """The letter with these parts, one for each axis. What is `whole` at the end is left out."""
    last = max((k for k, part in enumerate(parts) if part != whole), default=0)
    return "/".join(parts[: last + 1])


def axes_in(*forms: str) -> int:
    """On how many axes some values do not lie whole, those in front of the last one included; at least 1."""
    return 1 + max(letter.count("/") for form in forms for letter in letters(form, 1))


def along(form: str, axis: int) -> str:
    """The form on one axis alone, by its number."""
    if axis == 0 and "/" not in form:
        return form
    return text_of(tuple(parts_of(letter, axis + 1)[axis] for letter in letters(form)))


def on_axes(forms: Sequence[str]) -> str:
    """The form of a value that has these forms along the axes, the first one first."""
    if len(forms) == 1:
        return forms[0]
    count = max(len(letters(form)) for form in forms)
    return text_of(tuple(map(letter_of, zip(*(letters(form, count) for form in forms), strict=True))))


def rows_left(letter: str, axis: int, counts: Sequence[int], rows: int) -> int:
    """Of the rows of a micro-batch those that are left to an axis, where axes before it cut the same dimension by rows.
    `counts`: how many ranks there are along each axis."""
    parts = parts_of(letter, len(counts))
    for before in range(min(axis, len(counts))):
        if parts[before][0] == "S" and ":" in parts[axis] and parts[before][1:] == parts[axis][1:].split(":")[0]:
            rows //= counts[before]
    return rows


def changed_axis(before: str, after: str) -> int | None:
    """The only axis on which two forms differ; None if there are several, or none."""
    found = [k for k in range(axes_in(before, after)) if along(before, k) != along(after, k)]
    return found[0] if len(found) == 1 else None


def pairs(before: str, after: str) -> list[tuple[str, str]]:
    """For each tensor of a value its letter before and after."""
    count = max(len(letters(before)), len(letters(after)))
    return list(zip(letters(before, count), letters(after, count), strict=True))


def is_form(form: str, read: bool = False) -> bool:
    """Whether this text is a form of a value; or one that a node may read."""
    words = (WHOLE, PARTIAL, MOST, COUNTS, "U0", "U1")
    every = (part for letter in letters(form) for part in letter.split("/"))
    return all(part in words or _is_shard(part, "SC" if read else "S") for part in every)


def _is_shard(letter: str, first: str) -> bool:
    dim, colon, pieces = letter[1:].partition(":")
    return letter[:1] in first and dim.isdigit() and (pieces.removesuffix("r").isdigit() if colon else True)


def shard_of(letter: str, rows: int) -> tuple[int, int]:
    """Of a shard the dimension that is cut, and the pieces of it that are each cut, for a micro-batch of so many rows:
    `S0:3` has 3 of them, `S0:2r` two for each row."""
    dim, _, pieces = letter[1:].partition(":")
    count = int(pieces.removesuffix("r") or 1)
    return int(dim), count * rows if pieces.endswith("r") else count


def needed(form: str) -> str:
    """The form that a value must have where a node reads it so."""
    if "C" not in form:
        return form
    every = ([WHOLE if part[0] == "C" else part for part in letter.split("/")] for letter in letters(form))
    return text_of(tuple(map(letter_of, every)))


def form_of(forms: Sequence[Forms], value: Value, layers: Sequence[int], *, written: bool) -> str:
    """The form in which an instruction on these layers reads or writes an output, or the gradient of one; `forms` are
    those of all layers."""
    if value.kind == "output":
        inside = value.index in layers if written else value.index + 1 not in layers
        return forms[value.index].writes if inside else needed(forms[value.index + 1].reads)
    return forms[value.index + 1].grad_writes if written else needed(forms[value.index].grad_reads)


def collective_of(before: str, after: str) -> Op | None:
    """The collective that makes a tensor of the one letter into one of the other; None: there is no single one. Both
    letters are those on one axis."""
    if after == WHOLE and before in (PARTIAL, MOST):
        return Op.ALL_REDUCE
    if after in (WHOLE, COUNTS) and before[0] == "S":
        return Op.ALL_GATHER
    if before == PARTIAL and after[0] == "S":
        return Op.REDUCE_SCATTER
    other = before.partition(":")[0] != after.partition(":")[0]
    return Op.ALL_TO_ALL if other and before[0] == after[0] and before[0] in "SU" else None


def steps(written: str, read: str) -> list[tuple[Op | None, str]]:
    """The collectives that make the value of the one form into one of the other, each with the form behind it.

    One axis goes after the other, the last one first where that can be, and on each those tensors together that need
    the same collective. (None, form): no collective makes that of it.
    """
    for order in permutations(reversed(range(axes_in(written, read)))):
        now = [along(written, axis) for axis in range(len(order))]
        found: list[tuple[Op | None, str]] = []
        last, possible = written, True
        for axis in order:
            for op, form in _steps_along(now[axis], along(read, axis)):
                now[axis] = form
                found.append((op, on_axes(now)))
                possible = possible and axis_within(last, found[-1][1], axis) is None
                last = found[-1][1]
        if possible:
            return found
    return [(None, read)]


def axis_within(before: str, after: str, axis: int) -> int | None:
    """Of a value that changes its form along an axis, another axis along which it has parts of what this one has left,
    so that a collective along this axis would mix them up: an axis behind it that cuts the same dimension. In the same
    way the largest one of sums is made after these sums, and a sum of largest ones after these. None: there is none."""
    for old, new in pairs(before, after):
        parts = parts_of(old, axis + 1)
        changed = parts[axis], parts_of(new, axis + 1)[axis]
        for other in range(axis + 1, len(parts)) if changed[0] != changed[1] else ():
            inner = parts[other]
            cut = _dimension(inner)
            if (cut and cut in map(_dimension, changed)) or {inner, changed[0]} == {PARTIAL, MOST}:
                return other
    return None


def _dimension(part: str) -> tuple[str, bool] | None:
    """The dimension that shards are cut in. (Where rows and tokens are one dimension, its tokens are cut apart from its
    rows.)"""
    if part[0] not in "SU":
        return None
    return ("0", False) if part[0] == "U" else (part[1:].partition(":")[0], part.endswith("r"))


def _steps_along(written: str, read: str) -> list[tuple[Op | None, str]]:
    """The same on one axis."""
    now = [before for before, _ in pairs(written, read)]
    wanted = [after for _, after in pairs(written, read)]
    found: list[tuple[Op | None, str]] = []
    while now != wanted:
        first = next(k for k, (before, after) in enumerate(zip(now, wanted, strict=True)) if before != after)
        op = collective_of(now[first], wanted[first])
        now = [
            after if before != after and collective_of(before, after) is op else before
            for before, after in zip(now, wanted, strict=True)
        ]
        found.append((op, text_of(tuple(now))))
    return found


def lacking(before: str, after: str) -> str:
    """For messages: which collectives make the one form of the other."""
    ops = [op for op, _ in steps(before, after)]
    if not ops or None in ops:
        return "; no collective makes one of the other"
    words = " and ".join(op.value for op in ops if op is not None)
    return f"; {words} is missing between them"


_WORDS = {WHOLE: "whole", PARTIAL: "a partial sum", MOST: "a partial maximum", COUNTS: "counts of unequal shards"}
_WORDS |= {f"U{dim}": f"an unequal shard by dimension {dim} of its counts" for dim in range(2)}


def in_words(form: str) -> str:
    """A form as a reader says it: "whole", "a partial sum", "a shard of dimension 1"."""
    words = [" by ".join(map(_in_words, letter.split("/"))) for letter in letters(form, 1)]
    return words[0] if len(words) == 1 else "(" + ", ".join(words) + ")"


def _in_words(part: str) -> str:
    return _WORDS.get(part) or f"a shard of dimension {part[1:]}"
