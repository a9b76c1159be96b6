"""Lesson 11: a backward in halves; ZB-H1; a schedule with less bubble than ZB-H1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minipar.wording import several
from minipar_course.exercises.kinds.schedule import Target
from minipar_course.exercises.kinds.verdict import Verdict, raised

CLOSE = 1e-9  # relative; the halves are computed in float64


@dataclass(frozen=True)
class Halves:
    """The backward of y = tanh(x @ w.T) as two functions, judged by autograd.

    input_half(w, y, grad_y) -> (grad_x, left)      the gradient for the stage before, and what the other half needs
    weight_half(x, left) -> grad_w                  runs at any later time
    """

    sizes: tuple[tuple[int, int, int], ...] = ((5, 3, 4), (1, 6, 2), (7, 2, 2))  # rows, inputs, outputs

    def judge(self, answer: Any) -> Verdict:
        if not isinstance(answer, (tuple, list)) or len(answer) != 2 or not all(map(callable, answer)):
            return Verdict(False, "that is not a pair of functions", "exercise.check((input_half, weight_half), ...)")
        for rows, inputs, outputs in self.sizes:
            verdict = _compare(answer[0], answer[1], rows, inputs, outputs)
            if verdict is not None:
                return verdict
        return Verdict(True, f"both halves together are autograd's backward, in {len(self.sizes)} sizes")


def _compare(input_half: Callable[..., Any], weight_half: Callable[..., Any], *size: int) -> Verdict | None:
    """What is wrong with the halves in one size; None if nothing."""
    import torch

    rows, inputs, outputs = size
    generator = torch.Generator().manual_seed(rows)
    x, w, grad_y = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((rows, inputs), (outputs, inputs), (rows, outputs))
    )
    x.requires_grad_()
    w.requires_grad_()
    y = torch.tanh(x @ w.T)
    right_x, right_w = torch.autograd.grad(y, (x, w), grad_y)
    x, w, y = x.detach(), w.detach(), y.detach()
    what = f"with {several(rows, 'row')}, {inputs} inputs and {outputs} outputs"
    try:
        made = input_half(w, y, grad_y)
    except Exception as error:
        return raised(error, f"{what}, your input half")
    if not isinstance(made, (tuple, list)) or len(made) != 2:
        return Verdict(False, f"{what}, your input half gives no pair", "it must `return grad_x, left`")
    grad_x, left = made
    if not _close(grad_x, right_x):
        hint = "it is grad_z @ w, where z = x @ w.T and grad_z = grad_y * (1 - y ** 2)"
        if _close(grad_x, grad_y @ w):
            hint = "that would be right for y = x @ w.T; tanh comes first on the way back: its derivative is 1 - y ** 2"
        return Verdict(False, f"{what}, grad_x {_shape(grad_x, right_x)}", hint)
    products = _products()
    try:
        with products:
            grad_w = weight_half(x, left)
    except Exception as error:
        return raised(error, f"{what}, your weight half")
    if not _close(grad_w, right_w):
        hint = "it is grad_z.T @ x; grad_z is what the input half should leave"
        if _close(grad_w, right_w.T):
            hint = "that is its transpose: grad_w has a row for each output, as w has"
        elif _close(grad_w, grad_y.T @ x):
            hint = "that was made of grad_y; leave the gradient *behind* the tanh, which your input half has already"
        return Verdict(False, f"{what}, grad_w {_shape(grad_w, right_w)}", hint)
    grad_z = grad_y * (1 - y**2)
    if products.count > 1 or not any(_close(each, grad_z) or _close(each, grad_z.T) for each in _tensors(left)):
        reason = f"{what}, the numbers are right, but your weight half computes again what your input half knew"
        return Verdict(False, reason, "leave the gradient behind the tanh; then one product is all that is left to do")
    return None


def _tensors(left: Any) -> list[Any]:
    """The tensors in what the input half left, which may be one, or several in lists, tuples and dicts."""
    if isinstance(left, dict):
        left = list(left.values())
    return [one for part in left for one in _tensors(part)] if isinstance(left, list | tuple) else [left]


def _products() -> Any:
    """A context that counts the products of matrices that are computed in it."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Products(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += func.overloadpacket.__name__ in ("mm", "bmm", "addmm", "baddbmm", "dot", "mv")
            return func(*args, **(kwargs or {}))

    return Products()


def _close(given: Any, right: Any) -> bool:
    import torch

    if not isinstance(given, torch.Tensor) or given.shape != right.shape:
        return False
    return bool((given - right).abs().max() <= CLOSE * right.abs().max())


def _shape(given: Any, right: Any) -> str:
    shape = tuple(getattr(given, "shape", ()))
    if shape != tuple(right.shape):
        return f"has the shape {shape}; it must be {tuple(right.shape)}" if shape else f"is {given!r}, not a tensor"
    return "has the right shape, but other numbers than autograd's"


HALVES = Halves()

ZB_H1 = Target(stages=4, microbatches=8, time=27, activations=4, like="zb-h1")

TWO_CHUNKS = Target(stages=4, microbatches=8, time=26, activations=5)
