"""Rules: how an operator may be divided over one axis of the mesh, as einsum letters, one line an operator.

    rule("aten::linear", "...k,nk+n->...n", linear=(0, 1, 2))

A letter stands for a dimension. The ranks of an axis may divide one letter among them; then every tensor that has it is
a shard (S) of that dimension. Where the letter is not in the output, the ranks have parts of a sum (P). Tensors without
the letter are read whole (R: their gradient is a sum over the ranks). From the line above, on one axis:

    n   R,S0,S0 -> S1      column parallel          b (any of ...)   S0,R,R -> S0      data parallel
    k   S1,S1,P -> P       row parallel             none             I,I,I -> I        every rank computes all of it

The gradients lie in the conjugate forms (forms.py), so the backward pass needs no rule of its own.

    ,     factors of a product            ...   any dimensions
    +     terms of a sum                  k!    this letter is never divided

Where a letter is summed over, and a term does not have it, as a bias, then that term is read as P: otherwise every rank
would add all of it.

`linear` says in which inputs the operator is linear: these may be P, with what they are multiplied by whole. A line may
come from a function of the operator and its shapes, where arguments decide (`dim` of a softmax). A dimension may be a
product of letters, as (t h e) of a fused projection that a view takes apart; dividing h is then the form S:t.

Some operators can be divided along a letter if they communicate on the way: these ways have names (`variants`), and say
which collectives they need. Many lists of rules agree on this content; see Mesh-TensorFlow, GSPMD, nnScaler, Shardy.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from minipar.errors import PlanError
from minipar.sharding.forms import I, P, Placement, R, S, U, divides
from minipar.sharding.graph import Operator, Shape, Slot

Factors = tuple[tuple[str, int], ...]  # of one dimension: letters and sizes, the slowest first


@dataclass(frozen=True)
class Line:
    """A rule for given shapes.

    inputs, outputs   of each tensor the factors of each dimension; none where it is only 1 element that is broadcast
    terms             which inputs are multiplied in each term of the sum
    fixed             letters that are never divided
    unbroken          letters that are divided in one piece only (no S0:3): their order matters
    linear            inputs that may be P
    """

    inputs: tuple[tuple[Factors, ...], ...]
    outputs: tuple[tuple[Factors, ...], ...]
    terms: tuple[tuple[int, ...], ...]
    fixed: frozenset[str] = frozenset()
    unbroken: frozenset[str] = frozenset()
    linear: frozenset[int] = frozenset()

    @property
    def letters(self) -> tuple[str, ...]:
        """The letters that may be divided."""
        found = dict.fromkeys(letter for t in (*self.inputs, *self.outputs) for dim in t for letter, _ in dim)
        return tuple(letter for letter in found if letter not in self.fixed)


@dataclass(frozen=True)
class Inside:
    """A collective within an operator: what it is, elements on each rank before it, phase (forward or backward)."""

    op: str
    elements: int
    phase: str
    why: str


@dataclass(frozen=True)
class Choice:
    """One way to divide an operator over one axis.

    name      the letter, or the name of the variant; "whole": every rank computes all of it; "sum": on parts of a sum
    ins, outs the placement of each input as it is read, and of each output as it is written
    inside    collectives within the operator
    exclusive whether only one axis may divide the operator in such a way: what a rank does depends on its number
    """

    name: str
    ins: tuple[Placement, ...]
    outs: tuple[Placement, ...]
    inside: tuple[Inside, ...] = ()
    exclusive: bool = False

    def __str__(self) -> str:
        return f"{','.join(map(str, self.ins))} -> {','.join(map(str, self.outs))}"

    @property
    def divided(self) -> bool:
        """Whether the ranks do different parts of the work."""
        return any(p.kind == "S" for p in (*self.ins, *self.outs))


Shapes = Sequence[Shape]
LineOf = Callable[[Operator, Shapes, Shapes], "str | Line"]
VariantsOf = Callable[[Operator, Shapes, Shapes, int], Iterable[Choice]]


@dataclass(frozen=True)
class Rule:
    """`line`: the letters, or a function that gives them. `light`: it costs nothing to follow its neighbours' forms."""

    op: str
    line: str | LineOf
    linear: tuple[int, ...] = ()
    light: bool = False
    unbroken: str = ""
    variants: VariantsOf | None = None

    def of(self, operator: Operator, ins: Shapes, outs: Shapes) -> Line:
        """The letters of every dimension. Errors: PlanError for a line that does not fit the shapes."""
        found = self.line if isinstance(self.line, str) else self.line(operator, ins, outs)
        if isinstance(found, Line):
            return found
        return parse(found, ins, outs, self.linear, self.unbroken, self.op)


RULES: dict[str, Rule] = {}


def rule(
    op: str | Iterable[str],
    line: str | LineOf,
    linear: tuple[int, ...] = (),
    light: bool = False,
    unbroken: str = "",
    variants: VariantsOf | None = None,
) -> None:
    """Add the rule of an operator, or of several; in place of the one that it had.

    op        "aten::linear", "mylib::op"
    line      letters, such as "bk,kn->bn"; or a function (operator, input shapes, output shapes) that gives them
    linear    numbers of the inputs in which it is linear: these may be parts of a sum
    light     True for what may follow the forms of its neighbours first: elementwise operators, views
    unbroken  letters whose order matters: never divided as S0:3

    `check_rule` says whether it is right. Errors: PlanError for a line that cannot be read.
    """
    for name in (op,) if isinstance(op, str) else op:
        if "::" not in name:
            raise PlanError(f"rule of {name!r}: the operator needs its library, such as 'aten::linear' or 'mylib::op'")
        if isinstance(line, str):
            _split(line, name)
        RULES[name] = Rule(name, line, linear, light, unbroken, variants)


# Reading a line -------------------------------------------------------------------------------------------------------


def _split(line: str, op: str) -> tuple[list[list[str]], list[str]]:
    """Terms of factors, and outputs."""
    text = line.replace(" ", "")
    left, arrow, right = text.partition("->")
    terms = [term.split(",") for term in left.split("+")]
    outputs = right.split(",")
    for tensor in [*(factor for term in terms for factor in term), *outputs]:
        if not arrow or not re.fullmatch(r"(\.\.\.!?)?([a-zA-Z]!?)*", tensor):
            raise PlanError(
                f"rule of {op}: {line!r} cannot be read; write letters for dimensions, such as 'bk,kn->bn', "
                "'...k,nk+n->...n' or 'bs!->bs!'"
            )
    return terms, outputs


def _letters(tensor: str, rank: int, op: str, fewer: bool = True) -> tuple[list[str], set[str]]:
    """A letter for each dimension, and those that are marked with !; those of ... are .1, .2 from behind."""
    marked = set(re.findall(r"([a-zA-Z])!", tensor))
    before, dots, after = tensor.rpartition("...")
    after_fixed = after.startswith("!")
    letters = re.findall(r"[a-zA-Z]", after)
    front = re.findall(r"[a-zA-Z]", before)
    free = rank - len(letters) - len(front)
    if dots:
        if free < 0:
            raise PlanError(f"rule of {op}: {tensor!r} has more dimensions than the tensor, which has {rank}")
        middle = [f".{k}" for k in range(free, 0, -1)]
        marked |= set(middle) if after_fixed else set()
        return [*front, *middle, *letters], marked
    if free > 0 or (free < 0 and not fewer):
        raise PlanError(f"rule of {op}: {tensor!r} has {len(letters)} dimensions, and the tensor {rank}")
    return letters[len(letters) - rank :], marked


def parse(
    line: str, ins: Shapes, outs: Shapes, linear: Iterable[int] = (), unbroken: str = "", op: str = "operator"
) -> Line:
    """A line for given shapes. Inputs that an operator was not given are left out at the end.

    Errors: PlanError for a line that does not fit.
    """
    terms, outputs = _split(line, op)
    flat = [factor for term in terms for factor in term]
    if len(ins) > len(flat) or len(outs) != len(outputs):
        raise PlanError(
            f"rule of {op}: {line!r} is of {len(flat)} inputs and {len(outputs)} outputs, and the operator has "
            f"{len(ins)} and {len(outs)}"
        )
    fixed: set[str] = set()
    labelled: list[list[str]] = []
    for tensor, shape in [*zip(flat, ins, strict=False), *zip(outputs, outs, strict=True)]:
        letters, marked = _letters(tensor, len(shape), op)
        fixed |= marked
        labelled.append(letters)
    shapes = [*ins, *outs]
    largest: dict[str, int] = {}
    for letters, shape in zip(labelled, shapes, strict=True):
        for letter, size in zip(letters, shape, strict=True):
            largest[letter] = max(size, largest.get(letter, 1))
    factors = tuple(
        tuple(
            ((letter, size),) if size > 1 or largest[letter] == 1 else () for letter, size in zip(ls, sh, strict=True)
        )
        for ls, sh in zip(labelled, shapes, strict=True)
    )
    numbers: list[tuple[int, ...]] = []
    start = 0
    for term in terms:
        numbers.append(tuple(k for k in range(start, start + len(term)) if k < len(ins)))
        start += len(term)
    given, built = factors[: len(ins)], factors[len(ins) :]
    return Line(
        given, built, tuple(term for term in numbers if term), frozenset(fixed), frozenset(unbroken), frozenset(linear)
    )


# Choices --------------------------------------------------------------------------------------------------------------


def choices(
    operator: Operator,
    ins: Shapes,
    outs: Shapes,
    ranks: int,
    wanted: Iterable[tuple[int, Placement]] = (),
) -> tuple[Choice, ...]:
    """Every way to divide an operator over an axis of `ranks` ranks; the last one is "whole".

    ins, outs   the shapes of its inputs and outputs, on the axes that are outer to this one already divided
    wanted      placements (of input k, or of output k - len(ins)) whose pieces are possible, too: S1:3

    Letters that do not divide evenly are left out. An operator without a rule is computed whole.
    """
    found: dict[object, Choice] = {}
    known = RULES.get(operator.op)
    line = known.of(operator, ins, outs) if known is not None else None
    # Of some operators there is a form with other tensors, such as x.to(y): it is computed whole.
    if known is not None and line is not None and (len(line.inputs), len(line.outputs)) == (len(ins), len(outs)):
        asked = [(letter, 1) for letter in line.letters]
        for k, p in wanted:
            hint = _letter_of(line, k, p, ranks)
            if hint is not None and hint not in asked:
                asked.append(hint)
        every = [choice for letter, pieces in asked for choice in _divided(line, letter, pieces, ranks)]
        every += list(_sums(line))
        if known.variants is not None:
            every += [replace(c, exclusive=c.name != "rows") for c in known.variants(operator, ins, outs, ranks)]
        for choice in every:
            shapes = [*zip(ins, choice.ins, strict=True), *zip(outs, choice.outs, strict=True)]
            if all(divides(shape, p, ranks) for shape, p in shapes):
                found.setdefault((choice.ins, choice.outs, choice.name if choice.inside else None), choice)
    return (*found.values(), whole(operator))


def whole(operator: Operator, placement: Placement = I) -> Choice:
    """Every rank computes all of it. With R each has a part of the gradients."""
    return Choice("whole", (placement,) * len(operator.inputs), (placement,) * len(operator.outputs))


def _place(dims: tuple[Factors, ...], letter: str, pieces: int) -> Placement | None:
    """Where a tensor with these dimensions is cut, if a letter is cut in pieces."""
    for d, factors in enumerate(dims):
        before = 1
        for name, size in factors:
            if name == letter:
                return S(d, before * pieces)
            before *= size
    return None


def _sizes(line: Line, letter: str) -> list[int]:
    every = (*line.inputs, *line.outputs)
    return [size for dims in every for factors in dims for name, size in factors if name == letter]


def _letter_of(line: Line, k: int, p: Placement, ranks: int) -> tuple[str, int] | None:
    """The letter, and its pieces, that a placement of tensor k divides."""
    every = (*line.inputs, *line.outputs)
    if p.kind != "S" or k >= len(every) or p.dim >= len(every[k]):
        return None
    found, before = None, 1
    for letter, size in every[k][p.dim]:
        if p.pieces % before == 0 and size % (p.pieces // before * ranks) == 0:
            found = (letter, p.pieces // before)
        before *= size
    return found


def _divided(line: Line, letter: str, pieces: int, ranks: int) -> Iterator[Choice]:
    if letter in line.fixed or (letter in line.unbroken and pieces > 1):
        return
    if any(size % (pieces * ranks) for size in _sizes(line, letter)):
        return
    ins = [_place(dims, letter, pieces) for dims in line.inputs]
    outs = [_place(dims, letter, pieces) for dims in line.outputs]
    summed = all(p is None for p in outs)
    if summed:
        for term in line.terms:
            if all(ins[k] is None for k in term):  # a bias: one part of the sum only may have it
                part = next((k for k in term if k in line.linear), None)
                if part is None:
                    return
                ins[part] = P
    yield Choice(
        _readable(letter) + (f" in {pieces} pieces" if pieces > 1 else ""),
        tuple(R if p is None else p for p in ins),
        tuple(P if p is None else p for p in outs),
        exclusive=letter in line.unbroken,
    )


def _sums(line: Line) -> Iterator[Choice]:
    """Of an operator that is linear: parts of a sum in, parts of a sum out; one factor of every term is P."""
    options = [[k for k in term if k in line.linear] for term in line.terms]
    if not options or not all(options):
        return
    for turn in range(max(map(len, options))):
        parts = {term[min(turn, len(term) - 1)] for term in options}
        ins = tuple(P if k in parts else R for k in range(len(line.inputs)))
        yield Choice("sum", ins, (P,) * len(line.outputs))


def _readable(letter: str) -> str:
    return f"dimension {letter[1:]} before it" if letter.startswith(".") else letter


# The rules ------------------------------------------------------------------------------------------------------------


def _dim(operator: Operator, rank: int, name: str = "dim", default: int = -1) -> int:
    dim = int(operator.option(name, default))
    return dim + rank if dim < 0 else dim


def _named(rank: int) -> list[str]:
    return [f"d{k}" for k in range(rank)]


def _simple(
    ins: Sequence[Sequence[str]],
    outs: Sequence[Sequence[str]],
    ins_shapes: Shapes,
    outs_shapes: Shapes,
    fixed: Iterable[str] = (),
    linear: Iterable[int] = (),
    sums: bool = False,
) -> Line:
    """A line of one letter for each dimension; all inputs in one term, or each in its own (`sums`)."""

    def factors(names: Sequence[str], shape: Shape) -> tuple[Factors, ...]:
        return tuple(((n, s),) if n else () for n, s in zip(names, shape, strict=True))

    terms = tuple((k,) for k in range(len(ins))) if sums else (tuple(range(len(ins))),)
    return Line(
        tuple(map(factors, ins, ins_shapes)), tuple(map(factors, outs, outs_shapes)), terms, frozenset(fixed),
        linear=frozenset(linear),
    )  # fmt: skip


def _elementwise(operator: Operator, ins: Shapes, outs: Shapes) -> str:
    return ",".join(["..."] * len(ins)) + "->" + ",".join(["..."] * len(outs))


def _addition(operator: Operator, ins: Shapes, outs: Shapes) -> Line:
    # x + 1 is not linear: every rank would add 1 to its part.
    both = len(ins) == 2
    return parse("...+...->...", ins, outs, (0, 1) if both else (), op=operator.op)


def _product(operator: Operator, ins: Shapes, outs: Shapes) -> Line:
    return parse("...,...->...", ins, outs, (0, 1), op=operator.op)


def _quotient(operator: Operator, ins: Shapes, outs: Shapes) -> Line:
    return parse("...,...->...", ins, outs, (0,), op=operator.op)


def _cast(operator: Operator, ins: Shapes, outs: Shapes) -> Line:
    """To another type. A change of precision is not linear: a sum that is rounded is not the sum of rounded parts."""
    return parse("...->...", ins[:1], outs, (), op=operator.op)


def _all_fixed(operator: Operator, ins: Shapes, outs: Shapes) -> Line:
    """Along `dim` all elements are needed; other dimensions are free."""
    names = _named(len(ins[0]))
    return _simple([names], [names] * len(outs), ins, outs, [names[_dim(operator, len(names))]] if names else ())


def _reduction(linear: bool) -> LineOf:
    def line(operator: Operator, ins: Shapes, outs: Shapes) -> Line:
        if len(ins) > 1:  # the larger of two tensors
            return parse("...,...->...", ins, outs, op=operator.op)
        names = _named(len(ins[0]))
        dims = operator.option("dim")
        dims = range(len(names)) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
        gone = {names[d] for d in dims} if names else set()
        if operator.option("keepdim", False):
            left = ["" if name in gone else name for name in names]
        else:
            left = [name for name in names if name not in gone]
        # Of a maximum the ranks would have several candidates, not parts of a sum.
        fixed = () if linear else gone
        return _simple([names], [left] * len(outs), ins, outs, fixed, (0,) if linear else ())

    return line


def _view(operator: Operator, ins: Shapes, outs: Shapes) -> Line:
    """Dimensions that are taken apart or joined: their common factors, the slowest first."""
    given, built = _common_factors(ins[0], outs[0])
    # The same bits taken for another type are no linear function.
    return Line((given,), (built,), ((0,),), linear=frozenset() if "dtype" in operator.options else frozenset([0]))


def _common_factors(before: Shape, after: Shape) -> tuple[tuple[Factors, ...], tuple[Factors, ...]]:
    """Of two shapes with the same elements the factors that both are made of.

    (6, 8) and (2, 3, 8): a b, c against a, b, c. Where two dimensions have only a divisor in common, as 6 x 4 and
    4 x 6, that divisor is the first factor, and the rest of the group stays as it is.
    """
    names = (f"v{k}" for k in range(1000))
    left: list[list[tuple[str, int]]] = [[] for _ in before]
    right: list[list[tuple[str, int]]] = [[] for _ in after]
    if 0 in before or 0 in after:
        return tuple(map(tuple, left)), tuple(map(tuple, right))
    i = j = 0
    rest_left, rest_right = 1, 1
    while True:
        while rest_left == 1 and i < len(before):
            rest_left, i = before[i], i + 1
        while rest_right == 1 and j < len(after):
            rest_right, j = after[j], j + 1
        if rest_left == 1 or rest_right == 1:
            break
        common = math.gcd(rest_left, rest_right)
        if common in (rest_left, rest_right):
            name = next(names)
            left[i - 1].append((name, common))
            right[j - 1].append((name, common))
            rest_left, rest_right = rest_left // common, rest_right // common
            continue
        # Neither divides the other: only the common part, in front, lies at the same places in both.
        if common > 1:
            name = next(names)
            left[i - 1].append((name, common))
            right[j - 1].append((name, common))
        product_left, product_right = rest_left, rest_right
        while product_left != product_right:
            if product_left < product_right:
                product_left, i = product_left * before[i], i + 1
            else:
                product_right, j = product_right * after[j], j + 1
        rest_left = rest_right = 1
    return tuple(map(tuple, left)), tuple(map(tuple, right))


def _permutation(operator: Operator, ins: Shapes, outs: Shapes) -> Line:
    names = _named(len(ins[0]))
    rank = len(names)
    if "dims" in operator.options:
        order = [int(d) % rank for d in operator.option("dims")]
    elif rank < 2:
        order = list(range(rank))
    else:
        order = list(range(rank))
        a, b = (
            _dim(operator, rank, "dim0", 0 if rank == 2 else -2),
            _dim(operator, rank, "dim1", 1 if rank == 2 else -1),
        )
        order[a], order[b] = order[b], order[a]
    return _simple([names], [[names[d] for d in order]], ins, outs, linear=(0,))


def _expansion(operator: Operator, ins: Shapes, outs: Shapes) -> Line:
    return parse("...->...", ins, outs, (0,), op=operator.op)


def _slice(operator: Operator, ins: Shapes, outs: Shapes) -> Line:
    names = _named(len(ins[0]))
    dim = _dim(operator, len(names), default=0)
    fixed = [names[dim]] if ins[0][dim] != outs[0][dim] else []
    return _simple([names], [names], ins, outs, fixed, (0,))


def _selection(operator: Operator, ins: Shapes, outs: Shapes) -> Line:
    """One element, or each of them by itself (unbind), along `dim`."""
    names = _named(len(ins[0]))
    dim = _dim(operator, len(names), default=0)
    left = [name for k, name in enumerate(names) if k != dim]
    return _simple([names], [left] * len(outs), ins, outs, [names[dim]], (0,))


def _pieces(whole_shape: Shape, parts: Shapes, dim: int) -> tuple[tuple[Factors, ...], tuple[Factors, ...]] | None:
    """Of a dimension that consists of equal parts, one behind the other: the whole's factors, and a part's."""
    if len({part[dim] for part in parts}) != 1:
        return None
    names = _named(len(whole_shape))
    whole_factors = [((name, size),) for name, size in zip(names, whole_shape, strict=True)]
    part_factors = [((name, size),) for name, size in zip(names, parts[0], strict=True)]
    whole_factors[dim] = (("piece", len(parts)), (names[dim], parts[0][dim]))  # type: ignore[assignment]
    return tuple(whole_factors), tuple(part_factors)


def _split_line(operator: Operator, ins: Shapes, outs: Shapes) -> Line:
    dim = _dim(operator, len(ins[0]), default=0)
    found = _pieces(ins[0], outs, dim)
    if found is None:
        names = _named(len(ins[0]))
        return _simple([names], [names] * len(outs), ins, outs, [names[dim]], (0,))
    return Line((found[0],), (found[1],) * len(outs), ((0,),), frozenset(["piece"]), linear=frozenset([0]))


def _cat(operator: Operator, ins: Shapes, outs: Shapes) -> Line:
    dim = _dim(operator, len(outs[0]), default=0)
    terms = tuple((k,) for k in range(len(ins)))
    found = _pieces(outs[0], ins, dim)
    if found is None:
        names = _named(len(outs[0]))
        return _simple([names] * len(ins), [names], ins, outs, [names[dim]], range(len(ins)), sums=True)
    return Line((found[1],) * len(ins), (found[0],), terms, frozenset(["piece"]), linear=frozenset(range(len(ins))))


def _stack(operator: Operator, ins: Shapes, outs: Shapes) -> Line:
    names = _named(len(ins[0]))
    dim = _dim(operator, len(outs[0]), default=0)
    after = [*names[:dim], "new", *names[dim:]]
    return _simple([names] * len(ins), [after], ins, outs, ["new"], range(len(ins)), sums=True)


def _repeat_interleave(operator: Operator, ins: Shapes, outs: Shapes) -> Line:
    names = _named(len(ins[0]))
    if operator.option("dim") is None or not isinstance(operator.option("repeats"), int):
        return _simple([names], [["all"]], ins, outs, [*names, "all"])
    dim = _dim(operator, len(names))
    given = tuple(((n, s),) for n, s in zip(names, ins[0], strict=True))
    built: list[Factors] = [((n, s),) for n, s in zip(names, ins[0], strict=True)]
    built[dim] = ((names[dim], ins[0][dim]), ("again", operator.option("repeats")))
    return Line((given,), (tuple(built),), ((0,),), frozenset(["again"]), linear=frozenset([0]))


def _last_fixed(count: int) -> LineOf:
    def line(operator: Operator, ins: Shapes, outs: Shapes) -> Line:
        names = _named(len(ins[0]))
        return _simple([names], [names] * len(outs), ins, outs, names[len(names) - count :])

    return line


def _matmul(operator: Operator, ins: Shapes, outs: Shapes) -> Line:
    left, right = len(ins[0]), len(ins[1])
    if left == 1 and right == 1:
        text = "k,k->"
    elif left == 1:
        text = "k,...kn->...n"
    elif right == 1:
        text = "...mk,k->...m"
    else:
        text = "...mk,...kn->...mn"
    return parse(text, ins, outs, (0, 1), op=operator.op)


def _einsum(operator: Operator, ins: Shapes, outs: Shapes) -> Line:
    if "->" not in str(operator.option("equation")):
        names = [[f"{k}.{d}" for d in range(len(shape))] for k, shape in enumerate([*ins, *outs])]
        return _simple(names[: len(ins)], names[len(ins) :], ins, outs, [n for one in names for n in one])
    return parse(str(operator.option("equation")), ins, outs, range(len(ins)), op=operator.op)


def _layer_norm(operator: Operator, ins: Shapes, outs: Shapes) -> Line:
    """The dimensions that are normed are needed whole; weight and bias have them, too."""
    names = _named(len(ins[0]))
    last = len(operator.option("normalized_shape"))
    normed = names[len(names) - last :]
    return _simple([names, *([normed] * (len(ins) - 1))], [names], ins, outs, normed)


def _embedding(operator: Operator, ins: Shapes, outs: Shapes) -> Line:
    """Rows `v` of the table: a rank looks up what is its own, and gives zeros for the rest."""
    return parse("vd,...->...d", ins, outs, (0,), "v", operator.op)


def _convolution(operator: Operator, ins: Shapes, outs: Shapes) -> Line:
    """Channels are letters; a part of the image would need its neighbours' edges, so the image is never divided."""
    spatial = len(ins[1]) - 2
    batch = "b" * (len(ins[0]) == len(ins[1]))
    image, kernel, built = ("".join(f"{name}!" for name in names[:spatial]) for names in ("hwu", "yxz", "pqr"))
    text = f"{batch}i{image},oi{kernel}+o->{batch}o{built}"
    if operator.option("groups", 1) != 1:
        text = f"{batch}i!{image},o!j!{kernel}+o!->{batch}o!{built}"
    return parse(text, ins, outs, (0, 1, 2), op=operator.op)


def _pooling(operator: Operator, ins: Shapes, outs: Shapes) -> Line:
    rank = len(ins[0])
    names = _named(rank)
    free = rank - (2 if "2d" in operator.op else 1)
    built = [*names[:free], *(f"m{k}" for k in range(rank - free))]
    return _simple(
        [names], [built] * len(outs), ins, outs, [*names[free:], *built[free:]], (0,) if "avg" in operator.op else ()
    )


def _batch_norm(operator: Operator, ins: Shapes, outs: Shapes) -> Line:
    """Channels may be divided, unless the operator changes the stored statistics: every rank has all of these."""
    names = _named(len(ins[0]))
    changes = bool(operator.option("training", False)) and isinstance(operator.option("running_mean"), Slot)
    fixed = [n for k, n in enumerate(names) if k != 1 or changes]
    return _simple([names, *([names[1:2]] * (len(ins) - 1))], [names], ins, outs, fixed)


def _group_norm(operator: Operator, ins: Shapes, outs: Shapes) -> Line:
    names = _named(len(ins[0]))
    return _simple([names, *([names[1:2]] * (len(ins) - 1))], [names], ins, outs, names[1:])


# Attention: a query needs all keys, so their letter t is never divided. A rank that has some of the queries reads all
# keys and values: they are gathered.


def _attention_line(operator: Operator, ins: Shapes, outs: Shapes) -> Line:
    return parse("...se!,...t!e!,...t!f,...st!->...sf", ins, outs, (), "s", operator.op)


# Softmax and cross-entropy over a divided dimension: the ranks agree on the maximum and the sum of each row.


def _online(operator: Operator, ins: Shapes, outs: Shapes, ranks: int) -> Iterator[Choice]:
    if not ins[0]:
        return
    dim = _dim(operator, len(ins[0]))
    rows = math.prod(ins[0]) // ins[0][dim]
    inside = (
        Inside("all_reduce", rows, "forward", "the maximum of each row"),
        Inside("all_reduce", rows, "forward", "the sum of each row"),
        Inside("all_reduce", rows, "backward", "the gradient of the sums"),
    )
    yield Choice("online", (S(dim),), (S(dim),), inside)


def _online_maximum(operator: Operator, ins: Shapes, outs: Shapes, ranks: int) -> Iterator[Choice]:
    dims = operator.option("dim")
    dims = [dims] if isinstance(dims, int) else dims if dims else range(len(ins[0]))
    for dim in (d % len(ins[0]) for d in dims):
        inside = (Inside("all_reduce", math.prod(outs[0]), "forward", "the largest of each row"),)
        yield Choice("online", (S(dim),), (I,), inside)


def _cross_entropy_line(operator: Operator, ins: Shapes, outs: Shapes) -> Line:
    """Classes `c` are needed whole, and so are rows, whose mean needs their number: both have ways with collectives."""
    names = ["c"] if len(ins[0]) == 1 else ["b", "c", *(f"x{k}" for k in range(len(ins[0]) - 2))]
    rows = [name for name in names if name != "c"]
    classes = [["c"]] if len(ins) > 2 else []
    targets = rows if len(ins[1]) == len(rows) else names
    built = rows if operator.option("reduction", 1) == 0 else []
    fixed = names if built == [] else ["c"]
    return _simple([names, targets, *classes], [built], ins, outs, fixed)


def _cross_entropy_variants(operator: Operator, ins: Shapes, outs: Shapes, ranks: int) -> Iterator[Choice]:
    if len(ins[0]) < 2 or len(ins) > 2 or operator.option("label_smoothing", 0.0) or len(ins[1]) != len(ins[0]) - 1:
        return
    reduction = operator.option("reduction", 1)
    rows = math.prod(ins[1])
    if reduction:
        inside = (Inside("all_reduce", 1, "forward", "the number of rows that count"),) if reduction == 1 else ()
        for dim in (d for d in range(len(ins[0])) if d != 1):
            yield Choice("rows", (S(dim), S(max(0, dim - 1))), (P,), inside)
    yield Choice(
        "vocabulary", (S(1), I), (I,),
        tuple(
            Inside("all_reduce", rows, "forward", why)
            for why in ("the largest logit of each row", "the sum of each row", "the logit of each target")
        ),
    )  # fmt: skip


# A mixture with capacity, in three operators (models/mixture_gpt.py). Rows `b` are routed by themselves. An expert's
# queue (b c) has `c` places for each row, so a part of the rows is a part of the queue. Dividing experts would need
# other slots than those of all experts: they are whole here, and divided in the perceptrons between.


def _dispatch_line(operator: Operator, ins: Shapes, outs: Shapes) -> Line:
    given = parse("bt!d,bt!k!->d", ins, [ins[0][-1:]], op=operator.op)
    return Line(given.inputs, (_queues(outs[0], ins[0][0]),), ((0, 1),), _WITHIN, linear=frozenset([0]))


def _combine_line(operator: Operator, ins: Shapes, outs: Shapes) -> Line:
    given = parse("bt!k!,bt!k!->bt!d", ins[1:], outs, op=operator.op)
    built = _queues(ins[0], ins[1][0])
    return Line((built, *given.inputs), given.outputs, ((0, 1, 2),), _WITHIN, linear=frozenset([0, 1]))


_WITHIN = frozenset("tkxc")


def _queues(shape: Shape, rows: int) -> tuple[Factors, ...]:
    """Of each expert its queue, which is made of those of the rows, behind each other."""
    return (("x", shape[0]),), (("b", rows), ("c", shape[1] // rows)), (("d", shape[2]),)


# Without a capacity the queues are packed, and ranks have unequal parts of them: those of their rows (U0), or of their
# experts (U1). `counts` (b, x) says where they begin. Rows and experts occur in a packed dimension together, which no
# letter can say, so these ways have names. All of these operators have an argument `counts`.


def _dispatch_all_variants(operator: Operator, ins: Shapes, outs: Shapes, ranks: int) -> Iterator[Choice]:
    yield Choice("rows", (S(0), S(0), S(0)), (U(0),))


def _feed_variants(operator: Operator, ins: Shapes, outs: Shapes, ranks: int) -> Iterator[Choice]:
    yield Choice("rows", (S(0), U(0), R, R), (U(0),))
    yield Choice("experts", (R, U(1), S(0), S(0)), (U(1),))


def _combine_all_variants(operator: Operator, ins: Shapes, outs: Shapes, ranks: int) -> Iterator[Choice]:
    yield Choice("rows", (R, U(0), S(0), S(0)), (S(0),))


def _aten(names: str) -> tuple[str, ...]:
    return tuple(f"aten::{name}" for name in names.split())


rule("aten::linear", "...k,nk+n->...n", (0, 1, 2))
rule("aten::matmul", _matmul)
rule("aten::mm", "mk,kn->mn", (0, 1))
rule("aten::mv", "mk,k->m", (0, 1))
rule("aten::dot", "k,k->", (0, 1))
rule("aten::bmm", "bmk,bkn->bmn", (0, 1))
rule("aten::addmm", "mn+mk,kn->mn", (0, 1, 2))
rule("aten::baddbmm", "bmn+bmk,bkn->bmn", (0, 1, 2))
rule("aten::einsum", _einsum)
rule(_aten("conv1d conv2d conv3d"), _convolution)
rule("aten::embedding", _embedding)
rule("aten::scaled_dot_product_attention", _attention_line)
rule(_aten("softmax _softmax log_softmax _log_softmax"), _all_fixed, variants=_online)
rule(_aten("cumsum sort argsort cumprod logcumsumexp glu"), _all_fixed)
rule("aten::layer_norm", _layer_norm)
rule(_aten("rms_norm"), _layer_norm)
rule("aten::batch_norm", _batch_norm)
rule("aten::group_norm", _group_norm)
rule("aten::cross_entropy_loss", _cross_entropy_line, variants=_cross_entropy_variants)
rule("minipar::route", "bt!x!->bt!k!,bt!k!,b")
rule("minipar::dispatch", _dispatch_line)
rule("minipar::combine", _combine_line)
rule("minipar::count", "bt!k!->bx!")
rule("minipar::dispatch_all", "b!x!,b!t!d,b!t!k!->n!d", (1,), variants=_dispatch_all_variants)
rule("minipar::feed_experts", "b!x!,n!d!,x!d!f,x!fd!->n!d!", variants=_feed_variants)
rule("minipar::combine_all", "b!x!,n!d,b!t!k!,b!t!k!->b!t!d", (1, 2), variants=_combine_all_variants)

rule(_aten("sum mean"), _reduction(True))
rule(_aten("amax amin"), _reduction(False), variants=_online_maximum)
rule(_aten("max min argmax argmin any all prod var std logsumexp norm"), _reduction(False))
rule(_aten("avg_pool1d avg_pool2d adaptive_avg_pool2d max_pool2d adaptive_avg_pool1d"), _pooling)

_ELEMENTWISE = """
    relu gelu silu mish tanh sigmoid elu selu celu leaky_relu hardtanh hardswish hardsigmoid softplus exp log sin log1p
    expm1 cos tan erf sqrt rsqrt reciprocal abs square pow clamp clamp_min clamp_max sign round floor ceil logical_not
    bitwise_not __invert__ isnan isinf isfinite eq ne lt le gt ge __and__ __or__ __xor__ logical_and logical_or
    bitwise_and bitwise_or bitwise_xor maximum minimum masked_fill where ones_like zeros_like full_like remainder fmod
    floor_divide relu_ silu_ gelu_ atan2 rsub logsigmoid softsign relu6 nan_to_num dropout
"""
rule(_aten(_ELEMENTWISE), _elementwise, light=True)
rule(_aten("add sub add_ sub_"), _addition, light=True)
rule(_aten("mul mul_"), _product, light=True)
rule(_aten("div div_ true_divide"), _quotient, light=True)
rule(_aten("neg clone contiguous alias detach lift_fresh_copy positive"), "...->...", (0,), True)
rule(_aten("to _to_copy"), _cast, light=True)

rule(_aten("view reshape _unsafe_view flatten unflatten squeeze unsqueeze"), _view, light=True)
rule(_aten("permute transpose t numpy_T"), _permutation, light=True)
rule(_aten("expand broadcast_to"), _expansion, light=True)
rule(_aten("slice narrow"), _slice, light=True)
rule(_aten("select unbind"), _selection, light=True)
rule(_aten("split split_with_sizes chunk"), _split_line, light=True)
rule(_aten("cat concat"), _cat, light=True)
rule("aten::stack", _stack, light=True)
rule("aten::repeat_interleave", _repeat_interleave, light=True)
rule(_aten("tril triu"), _last_fixed(2), light=True)
