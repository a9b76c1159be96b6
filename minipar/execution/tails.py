"""A recomputation stops early: operations at a layer's end whose numbers its backward does not read are not run again.

    forward      h = gelu(u)     y = x + h W + b
    recompute    h = gelu(u)     y: memory of its size, with nothing in it

The backward of `h W + b` reads h and W, and that of a sum reads nothing: so nobody reads y, unless the program sends it
or gives it to another layer. In a block of a transformer this last product is a third of the forward. The graph of
autograd is made as always.

The first run finds these operations, by what still exists when the output is freed: tensors saved by autograd, or kept
by a nested checkpoint, for example. Later runs follow that list, operation by operation; a layer that then does
something else runs again as a whole, and is never shortened from then on.

Why that is right: a number that is missing is the result of an operation in the list. There are three ways to read it.
The caller could, but promises not to. An operation could, but then its own result is missing as well, or it is not the
operation in the list. And code could read it without an operation, as `numpy()` and kernels of extensions do. That is
not seen, so only layers are shortened whose code is known not to do it: modules of torch.nn and minipar.models, without
hooks. All others run whole.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from minipar.models import randomness
from minipar.models.dispatch_mode import DispatchMode

# Following the list costs 10 to 25 us an operation: so many floating-point operations take about as long. Of a step of
# transformer blocks with recomputation of every layer, width 384 on one core, 4 to 6 % is saved; with widths up to 128
# the same would cost as much, so there it is not done.
WORTH = {"cpu": 2e6, "cuda": 5e8}
_UNKNOWABLE = (torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class _Signature(NamedTuple):
    """The form of an operation's inputs and of its result: enough to replace the result of a call of the same form."""

    form: tuple[Any, ...]
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class _Step(NamedTuple):
    operation: Any
    signature: _Signature | None  # None: a view, or something that is never left out


class _Tail(NamedTuple):
    steps: tuple[_Step, ...]
    needed: int  # the last operation that must run


_HOST = torch.device("cpu")

# Packages whose modules compute by torch's operations alone.
_KNOWN = ("torch.nn.", "minipar.models.", "minipar.models.randomness", "minipar.models.selective_checkpoint")


def is_known(layer: nn.Module) -> bool:
    """Whether a layer's code is known to read numbers by torch's operations only: all its modules', without hooks."""
    return not torch.nn.modules.module._has_any_global_hook() and all(
        f"{type(module).__module__}.".startswith(_KNOWN)
        and "forward" not in module.__dict__
        and not (module._forward_hooks or module._forward_pre_hooks)
        for module in layer.modules()
    )


class Tails:
    """What is known of some layers' ends: by layer and form of its input."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], _Tail | None] = {}
        self._watching: tuple[tuple[Any, ...], _Reads] | None = None

    def run(self, layer: int, module: nn.Module, given: Any) -> Any:
        """The module's output, as the root of its graph; its numbers may be missing, and nobody may read them.

        Once the caller has dropped the output, but not its graph, and before the next run, it calls `settle`.
        """
        key = layer, *_form(tree_leaves(given))
        if key not in self._known and not is_known(module):
            self._known[key] = None
        if key not in self._known:
            watch = _Reads()
            with watch:
                output = module(given)
            self._watching = key, watch
            return output
        tail = self._known[key]
        if tail is None:
            return module(given)
        sources = randomness.generators(next((x.device for x in tree_leaves(given) if isinstance(x, Tensor)), _HOST))
        states = [source.get_state() for source in sources]
        with _Shorter(tail) as shorter:
            output = module(given)
        if shorter.followed:
            return output
        self._known[key] = None
        if not shorter.skipped:
            return output
        for source, state in zip(sources, states, strict=True):
            source.set_state(state)
        return module(given)

    def settle(self) -> None:
        """The output of the watched run is freed: what still exists of that run may be read, and must be computed."""
        if self._watching is not None:
            key, watch = self._watching
            self._known[key] = watch.tail()
            self._watching = None

    def shortens(self, layer: int, given: Any) -> bool:
        """Whether a run of this layer on such an input leaves something out."""
        return self._known.get((layer, *_form(tree_leaves(given)))) is not None


class _Reads(DispatchMode):
    """Lists operations, and finds the last one whose result is needed."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[_Step] = []
        self.flops: list[float] = []
        self.needed = -1
        self.storages: list[tuple[int, StorageWeakRef]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        index = len(self.steps)
        signature = None
        if not _is_view(func):
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor):
                    self.storages.append((index, StorageWeakRef(tensor.untyped_storage())))
            if _is_plain(func) and isinstance(result, Tensor) and result.layout is torch.strided:
                form = _form(tree_leaves((args, kwargs)))
                signature = _Signature(form, tuple(result.shape), result.stride(), result.dtype, result.device)
            else:
                self.needed = index
        self.steps.append(_Step(func, signature))
        count = flop_registry.get(func.overloadpacket)
        self.flops.append(count(*args, **kwargs, out_val=result) if count and signature else 0)
        return result

    def tail(self) -> _Tail | None:
        """What may be left out; None if that is nothing, or too little to be worth it."""
        for index, storage in self.storages:
            if index > self.needed and not storage.expired():
                self.needed = index
        left_out = sum(self.flops[self.needed + 1 :])
        devices = {step.signature.device.type for step in self.steps[self.needed + 1 :] if step.signature}
        worth = max((WORTH.get(device, float("inf")) for device in devices), default=float("inf"))
        return _Tail(tuple(self.steps), self.needed) if left_out > worth * len(self.steps) else None


class _Shorter(DispatchMode):
    """Runs a known list of operations, and makes empty tensors for those that nobody needs."""

    def __init__(self, tail: _Tail) -> None:
        super().__init__()
        self.tail, self.count, self.same, self.skipped = tail, 0, True, False

    @property
    def followed(self) -> bool:
        """Whether the list was followed to its end."""
        return self.same and self.count == len(self.tail.steps)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        k, steps = self.count, self.tail.steps
        self.count += 1
        self.same = self.same and k < len(steps) and steps[k].operation is func
        if self.same and k > self.tail.needed:
            known = steps[k].signature
            if known is not None:
                self.same = known.form == _form(tree_leaves((args, kwargs)))
                if self.same:
                    self.skipped = True
                    return torch.empty_strided(known.size, known.stride, dtype=known.dtype, device=known.device)
        return func(*args, **kwargs)


def _form(leaves: list[Any]) -> tuple[Any, ...]:
    """Everything about arguments but the numbers in tensors. (Dataclasses, which have no leaves, have no hash.)"""
    return tuple(
        (tuple(x.shape), x.stride(), x.dtype, x.device)
        if isinstance(x, Tensor)
        else (type(x), x if callable(type(x).__hash__) else None)
        for x in leaves
    )


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _is_plain(func: Any) -> bool:
    """Whether it makes one new tensor, depends on nothing but its arguments, and changes nothing."""
    schema = func._schema
    one_result = len(schema.returns) == 1 and schema.returns[0].alias_info is None
    return one_result and not schema.is_mutable and not any(tag in func.tags for tag in _UNKNOWABLE)
