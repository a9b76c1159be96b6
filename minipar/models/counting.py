"""A torch model of your own as numbers for `minipar.estimate`, counted on meta tensors: nothing is computed.

    chain = chain_of(model, example)                     a layer for each child of an nn.Sequential
    minipar.estimate("dp=8 zero=1", chain, "h100", batch=256)

Any other module counts as one layer; `models.from_torch(model, example)` cuts it into layers first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from minipar.errors import PlanError
from minipar.models.dispatch_mode import DispatchMode
from minipar.models.sizes import Chain, ChainLayer
from minipar.models.tensors import copied, saving_hooks


def chain_of(model: nn.Module, example: Any, name: str = "") -> Chain:
    """Operations, parameters and sizes of a model's layers, by a forward on meta tensors.

    model     an nn.Sequential of layers, or any module as one layer
    example   its input: tensors of one or more rows, which are its first dimension
    Errors: PlanError for what is no torch module, and for a model that does not run on meta tensors, such as one that
    looks into its numbers.
    """
    if not isinstance(model, nn.Module):
        raise PlanError(f"model {str(model)!r}: is no torch module, and needs no example=; possible is it without one")
    layers = copied(model).to("meta")
    x = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), example)
    sizes = [leaf.shape[0] for leaf in tree_leaves(example) if isinstance(leaf, Tensor) and leaf.ndim]
    if not sizes:
        raise PlanError(f"chain_of: the example {example!r} has no tensor; give one row of input or more")
    rows, found = sizes[0], []
    for layer in layers if isinstance(layers, nn.Sequential) else [layers]:
        counter = _Counter({id(parameter) for parameter in layer.parameters()})
        try:
            with counter, saving_hooks(counter.keep, lambda tensor: tensor):
                x = layer(*x) if isinstance(x, tuple) and not isinstance(layers, nn.Sequential) else layer(x)
        except (RuntimeError, NotImplementedError) as error:
            reason = str(error).split("\n")[0]
            raise PlanError(f"chain_of: {type(layer).__name__} does not run on meta tensors: {reason}") from None
        outputs = [leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor)]
        found.append(
            ChainLayer(
                counter.flops / rows,
                sum(parameter.numel() for parameter in layer.parameters()),
                sum(leaf.numel() for leaf in outputs) / rows,
                sum(counter.saved.values()) / rows,
                counter.moved / rows,
                counter.smallest,
            )
        )
        x = tree_map_only(Tensor, lambda tensor: tensor.detach().requires_grad_(tensor.is_floating_point()), x)
    return Chain(tuple(found), name or type(model).__name__)


class _Counter(DispatchMode):
    """Counts operations of matrix products and convolutions, numbers that operators move, and what autograd keeps."""

    def __init__(self, parameters: set[int]) -> None:
        super().__init__()
        self.parameters = parameters
        self.flops = self.moved = 0
        self.saved: dict[int, int] = {}
        self.smallest = 1e9
        self._alive: list[Tensor] = []

    def keep(self, tensor: Tensor) -> Tensor:
        """What autograd keeps: each storage once, and no parameters."""
        whole = tensor._base if tensor._base is not None else tensor
        if id(whole) not in self.parameters:
            self._alive.append(whole)  # (so that no other tensor gets its id)
            self.saved[id(whole)] = whole.numel()
        return tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        written = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        count: Callable[..., int] | None = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=out)
            sides = [size for tensor in read[-2:] for size in tensor.shape[-2:] if tensor.ndim > 1]
            self.smallest = min([self.smallest, *map(float, sides)])
        elif not func.is_view:
            self.moved += sum(tensor.numel() for tensor in (*read, *written))
        return out
