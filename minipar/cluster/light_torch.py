"""Torch's optimizers and its counter of FLOPs without torch's compiler, until somebody needs the compiler.

Making an optimizer, taking a step and counting FLOPs import `torch._dynamo`, only to tell the compiler what it should
leave alone. That takes as long as importing torch, in each rank, however it was started. As long as nobody has imported
the compiler, nothing can be compiled, and there is nothing to tell.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

_COMPILER = "torch._dynamo"


def postpone_compiler() -> None:
    """Let the optimizers and the counter of this process work as they are until the compiler is imported, then as torch
    made them.

    Does nothing where torch is built differently: there they import the compiler as ever.
    """
    import torch

    optimizer = getattr(getattr(torch, "optim", None), "Optimizer", None)
    disable = getattr(torch, "_disable_dynamo", None)
    if optimizer is None or disable is None:
        return
    hidden = disable(_nothing).__code__  # the code that all functions share which torch hides from the compiler
    for function in [*vars(optimizer).values(), *vars(_counter()).values()]:
        if getattr(function, "__code__", None) is hidden:
            # Where torch remembers what the compiler made of it.
            function.__wrapped__.__dynamo_disable = _plain(function)
    decorate = getattr(sys.modules[optimizer.__module__], "_use_grad_for_differentiable", None)
    if decorate is not None:
        decorated = decorate(_nothing).__code__
        for kind in _below(optimizer):
            if getattr(kind.__dict__.get("step"), "__code__", None) is decorated:
                kind.step = _plain_step(kind.step)


def _nothing() -> None: ...


def _counter() -> Any:
    """The class whose method sees every operation while FlopCounterMode counts."""
    try:
        from torch.utils import flop_counter
    except ImportError:
        return object
    return getattr(flop_counter, "_FlopCounterMode", object)


def _below(kind: Any) -> Iterator[Any]:
    for found in kind.__subclasses__():
        yield found
        yield from _below(found)


def _plain(function: Any) -> Callable[..., Any]:
    plain = function.__wrapped__

    def call(*args: Any, **kwargs: Any) -> Any:
        if _COMPILER in sys.modules:
            plain.__dynamo_disable = None  # torch then asks the compiler
            return function(*args, **kwargs)
        return plain(*args, **kwargs)

    return call


def _plain_step(step: Any) -> Callable[..., Any]:
    import torch

    plain = step.__wrapped__

    @functools.wraps(plain)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _COMPILER in sys.modules:
            return step(self, *args, **kwargs)
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return plain(self, *args, **kwargs)

    return call
