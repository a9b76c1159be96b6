"""Running an operator on one rank's part of its tensors.

Most operators run as they are; sizes among their arguments become those of the part. A few do something else on a part:
a lookup in some rows of a table, a mean, attention of some queries, and the variants with collectives inside. These are
generators: they yield a `Request` and are sent what the collective gave, so that the same code runs in one process, all
ranks side by side (`side_by_side`), and on real ranks, where each request becomes a collective of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from minipar.errors import PlanError
from minipar.sharding import unequal
from minipar.sharding.forms import Placement
from minipar.sharding.graph import Operator, Shape, Slot
from minipar.sharding.rules import Choice


@dataclass(frozen=True)
class Request:
    """An ALL_REDUCE that an operator needs: every rank of the axis makes the same one with its own tensor.

    reduce  "sum" or "max", which has no gradient
    whole   of a sum: what is computed of it, is computed alike on all ranks (I): backward nothing is summed
    """

    tensor: Tensor
    reduce: str = "sum"
    whole: bool = False


Running = Generator[Request, Tensor, tuple[Tensor, ...]]


@dataclass(frozen=True)
class Place:
    """Which rank of an axis this is, of how many."""

    index: int
    ranks: int


def run(
    operator: Operator,
    choices: Mapping[str, Choice],
    places: Mapping[str, Place],
    inputs: Sequence[Tensor],
    outputs: Sequence[Shape],
) -> Generator[tuple[str, Request], Tensor, tuple[Tensor, ...]]:
    """An operator on this rank's parts of its inputs.

    choices, places   for each axis how it is divided, and which rank this is
    outputs           local shapes of its outputs

    Yields (axis, request) for each collective, is sent the result, and returns the outputs. Errors: PlanError, if two
    axes both divide it in a way that is not simply a part.
    """
    special = {axis: built for axis, choice in choices.items() if (built := _special(operator, choice, inputs))}
    rows = [axis for axis, built in special.items() if built is _rows]
    means = [axis for axis, built in special.items() if built is _mean]
    others = [axis for axis in special if axis not in rows + means]
    if len(others) > 1 or (others and means) or (rows and any(special[axis] is not _vocabulary for axis in others)):
        raise PlanError(
            f"{operator.name} ({operator.op}): {' and '.join(special)} both divide it in ways that need more than a "
            "part of the inputs; let one of them read it whole"
        )
    inner = replace(operator, options={**operator.options, "reduction": 2}) if rows else operator
    found: tuple[Tensor, ...]
    if others:
        (axis,) = others
        running = special[axis](inner, choices[axis], places[axis], list(inputs), outputs)
        found = (yield from _on(axis, running)) if isinstance(running, Generator) else running
    else:
        found = _plain(inner, inputs, outputs)
    for axis in means:  # the mean of a part is one of several that are summed
        found = (found[0] / places[axis].ranks,)
    if rows and operator.option("reduction", 1) == 1:
        count = (inputs[1] != operator.option("ignore_index", -100)).sum().to(found[0].dtype)
        for axis in rows:
            count = yield axis, Request(count, whole=True)
        found = (found[0] / count,)
    return found


def _on(axis: str, running: Running) -> Generator[tuple[str, Request], Tensor, tuple[Tensor, ...]]:
    """The same, with the axis beside each request."""
    try:
        request = next(running)
        while True:
            answer = yield axis, request
            request = running.send(answer)
    except StopIteration as end:
        found: tuple[Tensor, ...] = end.value
        return found


Function = Callable[[Operator, Choice, Place, list[Tensor], Sequence[Shape]], Running | tuple[Tensor, ...]]


def _special(operator: Operator, choice: Choice, inputs: Sequence[Tensor]) -> Function | None:
    """What an operator does on a part, if that is not what it does on the whole."""
    op = operator.op.removeprefix("aten::")
    divided = {k: p.dim for k, p in enumerate(choice.ins) if p.kind == "S"}
    if op == "embedding" and divided.get(0) == 0:
        return _lookup
    if op == "mean" and 0 in divided and choice.outs[0].kind == "P":
        return _mean
    if choice.name == "online":
        return _online_maximum if op in ("amax", "amin") else _online_softmax
    if op == "scaled_dot_product_attention":
        queries = inputs[0].dim() - 2
        causal_part = operator.option("is_causal", False) and divided.get(0) == queries
        return _some_queries if causal_part else None
    if op == "cross_entropy_loss":
        losses: dict[str, Function] = {"rows": _rows, "vocabulary": _vocabulary}
        return losses.get(choice.name)
    if operator.op == "minipar::feed_experts" and choice.name == "experts":
        return _feed_own
    return None


# Arguments ------------------------------------------------------------------------------------------------------------

_SIZES = {
    "aten::view": "size", "aten::_unsafe_view": "size", "aten::reshape": "shape", "aten::expand": "size",
    "aten::broadcast_to": "size",
}  # fmt: skip


def call(operator: Operator, inputs: Sequence[Any], **changed: Any) -> Any:
    """Call the operator on tensors, some of its arguments changed."""
    options = {name: _filled(given, inputs) for name, given in {**operator.options, **changed}.items()}
    if isinstance(operator.call, torch._ops.OpOverload):
        positional = []
        for argument in operator.call._schema.arguments:
            if argument.kwarg_only or argument.name not in options:
                break
            positional.append(options.pop(argument.name))
        return operator.call(*positional, **options)
    return operator.call(**options)


def _filled(given: Any, inputs: Sequence[Any]) -> Any:
    """An argument with its tensors. (It is no function inside `call`: one that calls itself is a circle of references,
    and would hold the tensors until the garbage collector runs.)"""
    if isinstance(given, Slot):
        return inputs[given.index]
    if isinstance(given, (list, tuple)):
        return type(given)(_filled(one, inputs) for one in given)
    return given


def _plain(operator: Operator, inputs: Sequence[Tensor], outputs: Sequence[Shape]) -> tuple[Tensor, ...]:
    """The operator itself, with the sizes of the part."""
    changed: dict[str, Any] = {}
    shape = list(outputs[0]) if outputs else []
    if _SIZES.get(operator.op, "") in operator.options:
        changed[_SIZES[operator.op]] = shape
    elif operator.op in ("aten::split", "aten::split_with_sizes"):
        dim = int(operator.option("dim", 0))
        sizes = [part[dim] for part in outputs]
        changed = {"split_sizes": sizes} if "sizes" in operator.op else {"split_size": sizes[0]}
        if isinstance(operator.options.get("split_size"), (list, tuple)):
            changed = {"split_size": sizes}
    elif operator.op == "aten::unflatten":
        dim = int(operator.option("dim")) % inputs[0].dim()
        changed["sizes"] = shape[dim : dim + len(operator.option("sizes"))]
    if operator.detached:
        inputs = [tensor.detach() for tensor in inputs]
    found = call(operator, inputs, **changed)
    return tuple(found) if isinstance(found, (list, tuple)) else (found,)


# What is done on a part -----------------------------------------------------------------------------------------------


def _lookup(
    operator: Operator, choice: Choice, place: Place, inputs: list[Tensor], outputs: Sequence[Shape]
) -> tuple[Tensor, ...]:
    """Rows of the table that other ranks have are zeros here."""
    table, ids = inputs
    here = ids - place.index * table.shape[0]
    own = (here >= 0) & (here < table.shape[0])
    padding = int(operator.option("padding_idx", -1)) - place.index * table.shape[0]
    found = functional.embedding(here.clamp(0, table.shape[0] - 1), table)
    if operator.option("padding_idx", -1) >= 0:  # its row gets no gradient
        found = torch.where((here == padding)[..., None], found.detach(), found)
    return (torch.where(own[..., None], found, torch.zeros((), dtype=found.dtype, device=found.device)),)


def _mean(
    operator: Operator, choice: Choice, place: Place, inputs: list[Tensor], outputs: Sequence[Shape]
) -> tuple[Tensor, ...]:
    """The mean of a part; `run` divides it by the number of parts."""
    return _plain(operator, inputs, outputs)


def _rows(
    operator: Operator, choice: Choice, place: Place, inputs: list[Tensor], outputs: Sequence[Shape]
) -> tuple[Tensor, ...]:
    """The summed losses of a part of the rows; `run` divides them by the number of all rows that count."""
    return _plain(operator, inputs, outputs)


def _online_softmax(
    operator: Operator, choice: Choice, place: Place, inputs: list[Tensor], outputs: Sequence[Shape]
) -> Running:
    (x,) = inputs
    dtype = operator.option("dtype")
    x = x if dtype is None else x.to(dtype)
    dim = choice.ins[0].dim
    largest = yield Request(x.detach().amax(dim, True), reduce="max")
    shifted = x - largest
    total = yield Request(shifted.exp().sum(dim, True))
    return (shifted - total.log() if "log" in operator.op else shifted.exp() / total,)


def _online_maximum(
    operator: Operator, choice: Choice, place: Place, inputs: list[Tensor], outputs: Sequence[Shape]
) -> Running:
    (found,) = _plain(operator, inputs, outputs)
    sign = -1 if operator.op == "aten::amin" else 1
    largest = sign * (yield Request(sign * found.detach(), reduce="max"))
    return (torch.where(found == largest, found, largest),)


def _vocabulary(
    operator: Operator, choice: Choice, place: Place, inputs: list[Tensor], outputs: Sequence[Shape]
) -> Running:
    """Each rank has some classes of every row: three numbers a row are agreed on. Source: Megatron-LM."""
    logits, targets = inputs
    ignored = targets == operator.option("ignore_index", -100)
    largest = yield Request(logits.detach().amax(1), reduce="max")
    shifted = logits - largest.unsqueeze(1)
    total = yield Request(shifted.exp().sum(1), whole=True)
    here = targets - place.index * logits.shape[1]
    own = (here >= 0) & (here < logits.shape[1])
    picked = shifted.gather(1, here.clamp(0, logits.shape[1] - 1).unsqueeze(1)).squeeze(1)
    wanted = yield Request(torch.where(own, picked, torch.zeros_like(picked)), whole=True)
    losses = torch.where(ignored, torch.zeros_like(wanted), total.log() - wanted)
    reduction = operator.option("reduction", 1)
    if reduction == 0:
        return (losses,)
    return (losses.sum() / ((~ignored).sum() if reduction == 1 else 1),)


# Attention ------------------------------------------------------------------------------------------------------------


def _some_queries(
    operator: Operator, choice: Choice, place: Place, inputs: list[Tensor], outputs: Sequence[Shape]
) -> tuple[Tensor, ...]:
    """Causal attention of the queries of one part of the sequence to all keys."""
    query, key = inputs[:2]
    return (call(operator, inputs, is_causal=False, attn_mask=_causal(query, key, place.index * query.shape[-2])),)


def _causal(query: Tensor, key: Tensor, start: int) -> Tensor:
    """Which keys each query sees: those up to its own position. (queries, keys)"""
    rows = torch.arange(query.shape[-2], device=query.device) + start
    columns = torch.arange(key.shape[-2], device=query.device)
    return columns[None] <= rows[:, None]


# The mixture of experts -----------------------------------------------------------------------------------------------


def _feed_own(
    operator: Operator, choice: Choice, place: Place, inputs: list[Tensor], outputs: Sequence[Shape]
) -> tuple[Tensor, ...]:
    """Some of the experts, and all of their tokens."""
    counts, *others = inputs
    return (call(operator, [counts.chunk(place.ranks, 1)[place.index], *others]),)


# All ranks in one process ---------------------------------------------------------------------------------------------


def side_by_side(
    running: Mapping[tuple[int, ...], Generator[tuple[str, Request], Tensor, tuple[Tensor, ...]]],
    axes: Sequence[str] = ("x",),
) -> dict[tuple[int, ...], tuple[Tensor, ...]]:
    """Run all ranks of a mesh side by side, in one process; what each of them returns.

    running   of each rank, by its coordinates on the axes

    Gradients flow between the ranks as the collectives' own backwards would bring them. Errors: PlanError, if ranks of
    one group make different collectives.
    """
    results: dict[tuple[int, ...], tuple[Tensor, ...]] = {}
    answers: dict[tuple[int, ...], Tensor] = {}
    while True:
        requests: dict[tuple[int, ...], tuple[str, Request]] = {}
        for place, one in running.items():
            try:
                requests[place] = one.send(answers[place]) if answers else next(one)
            except StopIteration as end:
                results[place] = end.value
        if not requests:
            return results
        kinds = {(axis, request.reduce) for axis, request in requests.values()}
        if len(requests) != len(running) or len(kinds) != 1:
            raise PlanError("ranks of one axis made different collectives in the same operator")
        ((axis, _),) = kinds
        for group in groups(requests, list(axes).index(axis)):
            answers.update(zip(group, collective([requests[place][1] for place in group]), strict=True))


def groups(places: Iterable[tuple[int, ...]], k: int) -> list[list[tuple[int, ...]]]:
    """Coordinates of the ranks that differ on one axis alone."""
    found: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for place in places:
        found.setdefault((*place[:k], *place[k + 1 :]), []).append(place)
    return list(found.values())


def collective(requests: Sequence[Request]) -> list[Tensor]:
    """What each rank gets of a collective."""
    tensors, first = [request.tensor for request in requests], requests[0]
    if first.reduce == "max":
        return [torch.stack(tensors).amax(0)] * len(tensors)
    total = torch.stack(tensors).sum(0)
    # Whole: the same numbers, but each rank's gradient is that of its own part.
    return [total.detach() + (one - one.detach()) if first.whole else total for one in tensors]


# Cutting and joining --------------------------------------------------------------------------------------------------


def cut(tensor: Tensor, placement: Placement, ranks: int, counts: Tensor | None = None) -> list[Tensor]:
    """A tensor's part on each rank. Of P they are parts of a sum, drawn so that no part is zero.

    counts   of unequal parts, what they are counted by
    """
    if placement.unequal:
        assert counts is not None
        return unequal.cut(tensor, unequal.table_of(counts, ranks), placement.counted)
    if placement.kind == "S":
        pieces = tensor.chunk(placement.pieces, placement.dim)
        blocks = [piece.chunk(ranks, placement.dim) for piece in pieces]
        return [torch.cat([piece[k] for piece in blocks], placement.dim).clone() for k in range(ranks)]
    if placement.kind == "P":
        parts = [torch.randn_like(tensor) for _ in range(ranks - 1)]
        return [*parts, tensor - sum(parts)]
    return [tensor.clone() for _ in range(ranks)]


def join(parts: Sequence[Tensor], placement: Placement, counts: Tensor | None = None) -> Tensor | None:
    """The whole of what the ranks have; None where they should have the same, and do not. `counts`: as in `cut`."""
    if placement.unequal:
        assert counts is not None
        return unequal.whole(parts, unequal.table_of(counts, len(parts)), placement.counted)
    if placement.kind == "S":
        split = [part.chunk(placement.pieces, placement.dim) for part in parts]
        return torch.cat([one for piece in zip(*split, strict=True) for one in piece], placement.dim)
    if placement.kind == "P":
        return torch.stack(list(parts)).sum(0)
    same = all(torch.allclose(part, parts[0], rtol=1e-8, atol=1e-10, equal_nan=True) for part in parts)
    return parts[0] if same else None
