"""`check_rule`: whether a rule is right, on numbers, forward and backward, in one process.

The inputs are laid on n ranks as the rule says, the operator runs on each rank's part, and the outputs are joined again
as the rule says: they must be those of the whole operator. The gradients are laid and joined in the conjugate forms.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from minipar.errors import PlanError
from minipar.sharding import forms, local
from minipar.sharding.graph import Operator, Slot
from minipar.sharding.rules import RULES, Choice, choices, rule

TOLERANCE = 1e-9  # in float64


def operator_of(
    function: Callable[..., Any], *given: Any, name: str = "", **options: Any
) -> tuple[Operator, list[Tensor]]:
    """A call of a torch operator, or of a function, as an `Operator`, and its tensors.

    `name`: the operator's, such as "mylib::op"; default that of torch.
    """
    if isinstance(function, torch._ops.OpOverload):
        schema = function._schema
        names = [argument.name for argument in schema.arguments]
        name = name or schema.name
        defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    else:
        parameters = inspect.signature(function).parameters.values()
        names = [parameter.name for parameter in parameters]
        name = name or f"function::{getattr(function, '__name__', 'operator')}"
        defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    named = {**defaults, **dict(zip(names, given, strict=False)), **options}
    tensors: list[Tensor] = []

    def replaced(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value)
            return Slot(len(tensors) - 1)
        if isinstance(value, (list, tuple)) and any(isinstance(one, Tensor) for one in value):
            return [replaced(one) for one in value]
        return value

    arguments = {key: replaced(named[key]) for key in names if key in named}
    inputs = tuple(f"input {k}" for k in range(len(tensors)))
    operator = Operator(name, name, inputs, ("output",), arguments, function)
    return operator, tensors


def check_rule(
    function: Callable[..., Any],
    *given: Any,
    name: str = "",
    line: str = "",
    choice: Choice | None = None,
    ranks: int = 2,
    pieces: Sequence[tuple[int, forms.Placement]] = (),
    **options: Any,
) -> tuple[Choice, ...]:
    """Verify every choice of an operator's rule on `ranks` ranks, forward and gradients; the choices.

    function, given, options   an operator of torch or of your own, and what to call it with
    name                       under which its rule stands, such as "mylib::op"; default torch's name
    line                       try this rule instead; it is not kept
    choice                     only this one, right or wrong
    pieces                     placements such as (0, S(2, 3)) of inputs that shall be tried, too

    Errors: PlanError for the first choice that is wrong, with what differs.
    """
    operator, tensors = operator_of(function, *given, name=name, **options)
    doubles = [t.detach().double() if t.is_floating_point() else t for t in tensors]
    expected = local.call(operator, doubles)
    expected = tuple(expected) if isinstance(expected, (list, tuple)) else (expected,)
    operator = Operator(
        operator.name, operator.op, operator.inputs, tuple(f"output {k}" for k in range(len(expected))),
        operator.options, operator.call,
    )  # fmt: skip
    ins, outs = [tuple(t.shape) for t in doubles], [tuple(t.shape) for t in expected]
    if choice is not None:
        possible: tuple[Choice, ...] = (choice,)
    else:
        kept = RULES.get(operator.op)
        try:
            if line:
                rule(operator.op, line)
            elif kept is None:
                raise PlanError(
                    f"{operator.op} has no rule; add one with rule({operator.op!r}, 'bk,kn->bn') or the like"
                )
            possible = choices(operator, ins, outs, ranks, pieces)
        finally:
            if line:
                RULES.pop(operator.op)
                if kept is not None:
                    RULES[operator.op] = kept
    for one in possible:
        _verify(operator, doubles, one, ranks)
    return possible


def _verify(operator: Operator, inputs: Sequence[Tensor], choice: Choice, ranks: int) -> None:
    title = f"rule of {operator.op}, {choice} on {ranks} ranks"
    whole = [t.clone().requires_grad_(t.is_floating_point()) for t in inputs]
    found = local.call(operator, whole)
    expected = tuple(found) if isinstance(found, (list, tuple)) else (found,)
    counts = inputs[operator.inputs.index(operator.counts)] if operator.counts else None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        laid = [local.cut(t.detach(), p, ranks, counts) for t, p in zip(inputs, choice.ins, strict=True)]
        gradients = [torch.randn_like(t) if t.requires_grad else torch.zeros_like(t) for t in expected]
        cuts = [local.cut(g, forms.conjugate(p), ranks, counts) for g, p in zip(gradients, choice.outs, strict=True)]
    parts = [[one[k].requires_grad_(one[k].is_floating_point()) for one in laid] for k in range(ranks)]
    shapes = [forms.cut(tuple(t.shape), p, ranks) for t, p in zip(expected, choice.outs, strict=True)]
    try:
        done = local.side_by_side(
            {
                (k,): local.run(operator, {"x": choice}, {"x": local.Place(k, ranks)}, parts[k], shapes)
                for k in range(ranks)
            }
        )
    except (RuntimeError, ValueError, IndexError) as error:
        raise PlanError(f"{title}: it does not run on a part", str(error)) from error
    built = [done[k,] for k in range(ranks)]
    for j, (want, p) in enumerate(zip(expected, choice.outs, strict=True)):
        _compare(f"{title}: output {j} joined as {p}", want, [rank[j] for rank in built], p, counts)
    _gradients(title, operator, choice, whole, expected, gradients, parts, built, cuts, counts)


def _gradients(
    title: str,
    operator: Operator,
    choice: Choice,
    whole: Sequence[Tensor],
    expected: Sequence[Tensor],
    gradients: Sequence[Tensor],
    parts: Sequence[Sequence[Tensor]],
    built: Sequence[Sequence[Tensor]],
    cuts: Sequence[Sequence[Tensor]],
    counts: Tensor | None,
) -> None:
    wanted = [t for t in whole if t.requires_grad]
    live = [j for j, t in enumerate(expected) if t.requires_grad]
    if not wanted or not live:
        return
    reference = torch.autograd.grad(
        [expected[j] for j in live], wanted, [gradients[j] for j in live], allow_unused=True
    )
    outputs = [(built[k][j], cuts[j][k]) for k in range(len(parts)) for j in live if built[k][j].requires_grad]
    flat = [t for rank in parts for t in rank if t.requires_grad]
    got: Sequence[Tensor | None] = [None] * len(flat)
    if outputs:
        got = torch.autograd.grad([o for o, _ in outputs], flat, [g for _, g in outputs], allow_unused=True)
    each = len(flat) // len(parts)
    numbers = [k for k, t in enumerate(whole) if t.requires_grad]
    for position, k in enumerate(numbers):
        want: Tensor | None = reference[position]
        if want is None:
            continue
        p = forms.conjugate(choice.ins[k])
        ranks = [got[rank * each + position] for rank in range(len(parts))]
        filled = [torch.zeros_like(parts[r][k]) if g is None else g for r, g in enumerate(ranks)]
        _compare(f"{title}: the gradient of {operator.inputs[k]} joined as {p}", want, filled, p, counts)


def _compare(
    title: str, want: Tensor, parts: Sequence[Tensor], placement: forms.Placement, counts: Tensor | None
) -> None:
    joined = local.join(parts, placement, counts)
    if joined is None:
        raise PlanError(f"{title}: the ranks do not have the same")
    if joined.shape != want.shape:
        raise PlanError(f"{title}: its shape is {tuple(joined.shape)} instead of {tuple(want.shape)}")
    if joined.dtype == torch.bool or not joined.is_floating_point():
        equal = torch.equal(joined, want)
    else:
        equal = torch.allclose(joined, want, rtol=TOLERANCE, atol=TOLERANCE * max(1.0, _largest(want)), equal_nan=True)
    if not equal:
        far = (joined.detach().double() - want.detach().double()).abs().nan_to_num(posinf=0.0).max()
        raise PlanError(f"{title}: differs from the whole operator by up to {float(far):.2g}")


def _largest(tensor: Tensor) -> float:
    return float(tensor.detach().abs().nan_to_num(posinf=0.0, neginf=0.0).max()) if tensor.numel() else 0.0
