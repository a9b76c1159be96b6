"""What a layer's forward leaves in memory, by storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

from minipar.errors import RankError
from minipar.models.tensors import count_bytes, given_to, opaque, saving_hooks, storages, tensors

Rest = TypeVar("Rest")


class Weights(NamedTuple):
    """Bytes that a layer's forward leaves: see `Profile` for what each means."""

    output: int
    grad_output: int
    saved: int
    carry: int = 0
    grad_carry: int = 0


def weigh(
    layer: nn.Module, run: Callable[[Any], tuple[Any, Rest]], given: Any, known: Callable[[], Any] = tuple
) -> tuple[Any, Rest, Weights]:
    """Run a layer's forward, and weigh what is left.

    run     the layer as a function of its input: it gives the output, and whatever else the caller wants of it, such
            as the loss
    known   called after the forward: tensors that are kept anyway, such as the loss's targets, and do not count

    Returns what `run` gave, and the bytes.
    """
    saved: list[Tensor] = []
    parameters = {*layer.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.detach())
        return saved[-1]

    with saving_hooks(pack, lambda tensor: tensor):
        output, rest = run(given_to(layer, given))
    for name, p in layer.named_parameters():
        if p not in parameters:
            raise RankError(
                f"a layer ({type(layer).__name__}) registered its parameter {name} in its forward, after the optimizer "
                "was made, so that it would not be trained; possible is to register it in __init__"
            )
    hidden = opaque(output)
    if hidden is not None:
        raise RankError(
            f"a layer hands on a {hidden}, which minipar cannot look into; possible are tensors, None, numbers and "
            "strings, and tuples, lists and dicts of them"
        )
    given_before = storages([*tensors(given), *tensors(known()), *layer.parameters(), *layer.buffers()])
    handed_on = storages(tensors(output)).keys() - given_before.keys()
    kept = {key: size for key, size in storages(saved).items() if key not in given_before}
    weights = Weights(
        count_bytes(output),
        count_bytes([t for t in tensors(output) if t.requires_grad]),
        sum(size for key, size in kept.items() if key not in handed_on),
    )
    saved.clear()  # (autograd keeps `pack`, and so this list, until the last of them is used)
    return output, rest, weights
