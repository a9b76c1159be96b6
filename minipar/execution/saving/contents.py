"""What a run must save, cut into pieces: parameters, optimizer states and buffers, as every rank holds some of them.

    parameters/4.weight           [ . . . . . . . . . . . . ]     in memory order, whatever its shape is
    optimizer/exp_avg/4.weight    [ . . . . . . . . . . . . ]
    optimizer/step/4.weight       one number
                                    rank 0  rank 1  rank 2        pieces: runs of neighbouring elements

Names and elements are those of the model and of nothing else, so that a piece means the same under every plan. A rank
takes from these lines what its own plan gives it: whole tensors, or the slices of ZeRO.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from minipar.errors import SaveError
from minipar.execution.executor import Executor
from minipar.execution.lines import Slice
from minipar.execution.saving.folder import SavedParameter
from minipar.execution.updating import Updated, whole_piece
from minipar.models.nodes import Cut, Node
from minipar.models.tensors import dtype_name, layers_of
from minipar.strategies.passes.compress import keeps_residual

if TYPE_CHECKING:
    from minipar.execution.saving.storage import Reading

SMALL = 1 << 20  # bytes; what is larger, and held by several ranks, is written by all of them, a part each


@dataclass(frozen=True)
class Outline:
    """What every rank knows of a whole model before it lets go of the layers that are not its own."""

    rows: tuple[SavedParameter, ...]
    layers_of: dict[str, tuple[int, ...]]  # parameter -> layers that have it
    prefixes: tuple[str, ...]  # of the names in each layer


def outline_of(model: nn.Module) -> Outline:
    """The outline of a model that is whole."""
    layers: dict[int, list[int]] = {}
    for l, layer in enumerate(layers_of(model)):
        for p in layer.parameters():
            layers.setdefault(id(p), []).append(l)
    found = dict(model.named_parameters())
    cuts: Mapping[str, Cut] = getattr(model, "cuts", {})
    shapes = {name: cuts[name].whole_shape(p.shape) if name in cuts else tuple(p.shape) for name, p in found.items()}
    return Outline(
        tuple(SavedParameter(name, shapes[name], dtype_name(p.dtype), p.requires_grad) for name, p in found.items()),
        {name: tuple(layers[id(p)]) for name, p in found.items()},
        tuple(name for name, layer in model._modules.items() if layer is not None),
    )


# out ------------------------------------------------------------------------------------------------------------------


def optimizer_name(executor: Executor) -> str:
    """What updates this rank's parameters; "" where nothing does."""
    return next((optimizer_class(optimizer) for optimizer in executor.state.optimizers.values()), "")


def schedule_of(executor: Executor, updates: int) -> dict[str, Any] | None:
    """The state of the scheduler after so many updates of this run, if there is one."""
    schedule = executor.state.update.schedule
    return None if schedule is None else schedule.saved(updates)


def held(executor: Executor) -> Iterator[tuple[Updated, str]]:
    """What a rank has of the model's parameters: what its optimizers update, whole or in slices, and all others whole.
    Each with the form of its group."""
    seen: set[int] = set()
    for line in executor.state.lines:
        if line.updated or line.place is not None:
            seen |= {id(p) for p in line.params if p.numel() or line.place is None}  # (no slice has any of one without)
            yield from ((piece, line.group.form) for piece in line.pieces())
    for p in nn.ModuleList(executor.compute.layers.values()).parameters():
        if id(p) not in seen:
            yield whole_piece(executor.names[id(p)], p), getattr(p, "minipar_form", "")


def collect(executor: Executor, outline: Outline, served: bool = False) -> Iterator[Slice]:
    """This rank's share of what must be saved: all ranks together bring each element once. No copies are made.

    served   servers have what is trained, and the first worker brings the rest
    """
    program, rank = executor.program, executor.comm.rank
    kept = {id(p): values for o in executor.state.optimizers.values() for p, values in o.state.items()}
    if program.local_steps and any(v is not None for own in kept.values() for v in own.values()):
        raise SaveError(
            f"plan {program.name!r}: optimizer states differ between replicas that train by themselves, and "
            "are not saved; possible: an optimizer without states, such as SGD without momentum"
        )
    if keeps_residual(program.compress) and not served:
        raise SaveError(
            f"plan {program.name!r}: what compress={program.compress} has left out of the gradients "
            "waits on every rank, and is not saved; possible are compress=none, bf16, fp16"
        )
    for piece, form in held(executor):
        if not program.is_first(rank, form, "S") or (
            served and piece.parameter.requires_grad and piece.parameter.numel()
        ):
            continue  # (ranks that share layers have the same of what they have whole)
        holders = [rank] if piece.sliced else _holders(executor, outline.layers_of[piece.name])
        k, n = holders.index(rank), 1 if served else len(holders)
        for mine in elements_of(piece, kept.get(id(piece.parameter), {})):
            for part in _share(mine, k, n):
                yield from part.of_whole(executor.cuts.get(parameter_of(part.key)))
    for l, layer in executor.compute.layers.items():  # replicas may differ in buffers: those of the first one count
        if program.is_first(rank, "") and rank == _holders(executor, (l,))[0]:
            yield from _slices(layer, outline.prefixes[l])


def everything(executor: Executor, outline: Outline) -> Iterator[Slice]:
    """What this rank has of parameters and buffers, also what other ranks have, too: those that share or repeat its
    layers. No copies are made of parameters."""
    whole = [p for line in executor.state.lines if line.place is not None for p in line.params if not line.apart]
    pieces = [piece for piece, _ in held(executor)] + [whole_piece(executor.names[id(p)], p) for p in whole]
    for piece in pieces:  # (the layers may have more than the slices that are updated)
        for mine in elements_of(piece, {}):
            yield from mine.of_whole(executor.cuts.get(parameter_of(mine.key)))
    for l, layer in executor.compute.layers.items():
        yield from _slices(layer, outline.prefixes[l])


def _slices(layer: nn.Module, prefix: str) -> Iterator[Slice]:
    """Copies of the buffers of a layer."""
    for name, values in _buffers(layer, prefix):
        yield Slice(f"buffers/{name}", tuple(values.shape), 0, values.reshape(-1).clone())


def parameter_of(key: str) -> str:
    """The parameter that a key is about: of parameters/NAME, or optimizer/STATE/NAME; "" of a buffer's."""
    kind, _, name = key.partition("/")
    return {"optimizer": name.partition("/")[2], "parameters": name}.get(kind, "")


def elements_of(piece: Updated, kept: dict[str, Any]) -> Iterator[Slice]:
    """What a piece has of its parameter, and what the optimizer keeps of that: `kept`."""
    own, name, shape, begin, _ = piece
    yield Slice(f"parameters/{name}", shape, begin, own.detach().reshape(-1))
    for key, values, number in _states(name, kept):
        if values.shape == own.shape and not number:
            yield Slice(key, shape, begin, values.reshape(-1))
        elif begin == 0:
            yield Slice(key, tuple(values.shape), 0, values.reshape(-1), number)


def _states(name: str, values: dict[str, Any]) -> Iterator[tuple[str, Tensor, bool]]:
    """Key, tensor, and whether it is a plain number, of each state that an optimizer keeps of a parameter."""
    for state, value in values.items():
        key = f"optimizer/{state}/{name}"
        if isinstance(value, Tensor):
            yield key, value.detach(), False
        elif isinstance(value, (bool, int, float)):
            yield key, torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64), True
        elif value is not None:
            raise SaveError(
                f"optimizer state {state!r} of {name} is a {type(value).__name__}; possible are tensors and numbers"
            )


def _holders(executor: Executor, layers: Sequence[int]) -> list[int]:
    """The ranks that hold any of these layers, and have the same shard of them as this one."""
    program = executor.program
    found = [rank for rank, own in enumerate(program.placement) if not set(layers).isdisjoint(own)]
    return [r for r in found if program.shard(r) == program.shard(executor.comm.rank)] if program.sharing > 1 else found


def _share(piece: Slice, k: int, n: int) -> Iterator[Slice]:
    """What the k-th of n holders brings of what all of them have."""
    count = piece.values.numel()
    size = -(-count // n) if piece.values.nbytes > SMALL else count
    if k * size < count or (count == k == 0):
        yield piece._replace(start=piece.start + k * size, values=piece.values[k * size : (k + 1) * size])


def _buffers(layer: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """The buffers that belong to a layer's state, with their names in the model. (One that is sparse is the model's: as
    an adjacency of all nodes it does not change.)"""
    if isinstance(layer, Node):
        yield from ((name, values) for name, values in layer.state.items() if values.layout is torch.strided)
        return
    parameters = {name for name, _ in layer.named_parameters(remove_duplicate=False)}
    for name, values in layer.state_dict().items():
        if name not in parameters and isinstance(values, Tensor) and values.layout is torch.strided:
            yield f"{prefix}.{name}", values


def optimizer_class(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


# in -------------------------------------------------------------------------------------------------------------------


def restore(executor: Executor, outline: Outline, source: Reading) -> None:
    """Give a rank that has not begun what was saved, whatever plan it was saved under."""
    state = executor.state
    updated = [line for line in state.lines if line.updated or line.place is not None]
    later = {id(p) for line in updated if line.place is None or line.place.scattered for p in line.params}
    layers = [(layer, outline.prefixes[l]) for l, layer in executor.compute.layers.items()]
    restore_layers(layers, executor.names, source, lambda p: id(p) not in later)
    restore_pieces([piece for line in updated for piece in line.pieces()], list(state.optimizers.values()), source)
    for line in updated:
        for own, other in zip(line.owned, line.trained, strict=True):  # (the optimizer may work on copies)
            own.data.copy_(other.data)


def restore_layers(
    layers: Iterable[tuple[nn.Module, str]],
    names: Mapping[int, str],
    source: Reading,
    wanted: Callable[[nn.Parameter], bool],
) -> None:
    """Give layers, each with its prefix, the parameters that are `wanted`, and the buffers that were saved."""
    for layer, prefix in layers:
        for p in layer.parameters():
            if wanted(p):
                _copy(source, f"parameters/{names[id(p)]}", p)
        for name, values in _buffers(layer, prefix):
            _copy(source, f"buffers/{name}", values)


def restore_pieces(pieces: Sequence[Updated], optimizers: Sequence[torch.optim.Optimizer], source: Reading) -> None:
    """Give what optimizers update, and the optimizers themselves, what was saved of it."""
    source.fill({
        (f"parameters/{piece.name}", piece.begin): piece.parameter.data.view(-1) for piece in pieces
    })  # fmt: skip
    own = {id(piece.parameter): piece for piece in pieces}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                _give(optimizer, p, group, _found_of(source, own[id(p)]))


def read_whole(source: Reading) -> dict[str, dict[str, Any]]:
    """All that was saved, as whole tensors by name: parameters, buffers, and each parameter's states."""
    return by_kind((key, _state(source, key)) for key in source.everything())


def by_kind(elements: Iterable[tuple[str, Any]]) -> dict[str, dict[str, Any]]:
    """Values by their keys, as parameters, buffers, and states of each parameter, by name."""
    found: dict[str, dict[str, Any]] = {"parameters": {}, "buffers": {}, "states": {}}
    for key, value in elements:
        kind, _, name = key.partition("/")
        if kind == "optimizer":
            state, _, name = name.partition("/")
            found["states"].setdefault(name, {})[state] = value
        else:
            found[kind][name] = value
    return found


def _copy(source: Reading, key: str, target: Tensor) -> None:
    values, here = read_one(source, key), target.detach()
    if values.dtype == here.dtype or not torch.equal(here.to("cpu", values.dtype), values):
        here.copy_(values)  # (else it was rounded for precision=bf16, and the model itself has it as it was)


def read_one(source: Reading, key: str) -> Tensor:
    """What was saved under a key, whole."""
    shape, dtype, _ = source.form(key)
    whole = torch.empty(shape, dtype=dtype)
    source.fill({(key, 0): whole.view(-1)})
    return whole


def _state(source: Reading, key: str) -> Any:
    """A state of an optimizer: a tensor, or a plain number."""
    value = read_one(source, key)
    return value.item() if source.form(key)[2] else value


def _found_of(source: Reading, piece: Updated) -> dict[str, Any]:
    """The states of what an optimizer updates: those of its parameter, or elements of them."""
    found: dict[str, Any] = {}
    for state in source.states(piece.name):
        key = f"optimizer/{state}/{piece.name}"
        saved, dtype, number = source.form(key)
        if number or state in source.scalars() or (saved != piece.shape and not piece.sliced):
            found[state] = _state(source, key)
        elif saved != piece.shape:
            raise SaveError(
                f"optimizer state {state!r} of {piece.name} has shape {saved}, and cannot be sliced; go on with zero=0"
            )
        else:
            found[state] = torch.zeros(piece.parameter.shape, dtype=dtype)
            source.fill({(key, piece.begin): found[state].view(-1)})
    return found


def _give(optimizer: torch.optim.Optimizer, p: Tensor, settings: dict[str, Any], found: dict[str, Any]) -> None:
    """Make these the states of a parameter. torch's `load_state_dict` would change the dtype of some.

    Numbers stay on the CPU, where torch's optimizers want them, unless their settings say otherwise.
    """
    there = bool(settings.get("capturable") or settings.get("fused"))
    states = {
        key: value.to(p.device) if isinstance(value, Tensor) and (there or value.dim() > 0 or p.dim() == 0) else value
        for key, value in found.items()
    }
    if states:
        optimizer.state[p] = states
