"""What a run must save, cut into pieces: parameters, optimizer states and buffers, as every rank holds some of them.

    parameters/4.weight           [ . . . . . . . . . . . . ]     in memory order, whatever its shape is
    optimizer/exp_avg/4.weight    [ . . . . . . . . . . . . ]
    optimizer/step/4.weight       one number
                                    rank 0  rank 1  rank 2        pieces: runs of neighbouring elements

Names and elements are those of the model and of nothing else, so that a piece means the same under every plan. A rank
takes from these lines what its own plan gives it: whole tensors, or the slices of ZeRO.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from minipar.errors import SaveError
from minipar.execution.executor import Executor
from minipar.execution.saving.folder import SavedParameter
from minipar.execution.updating import Updated
from minipar.models.nodes import Cut, Node
from minipar.models.tensors import dtype_name, layers_of
from minipar.program import Program
from minipar.strategies.passes.compress import keeps_residual

if TYPE_CHECKING:
    from minipar.execution.saving.storage import Reading

SMALL = 1 << 20  # bytes; what is larger, and held by several ranks, is written by all of them, a part each


class SavedSlice(NamedTuple):
    """Neighbouring elements of a tensor of this shape, from `start` on. `number`: a plain number, made a tensor."""

    key: str
    shape: tuple[int, ...]
    start: int
    values: Tensor
    number: bool = False


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


def collect(executor: Executor, outline: Outline) -> Iterator[SavedSlice]:
    """This rank's share of what must be saved: all ranks together bring each element once. No copies are made."""
    pieces, cuts = _collect(executor, outline), executor.cuts
    if not cuts:
        return pieces
    return (part for piece in pieces for part in of_whole(piece, cuts.get(_parameter_of(piece.key))))


def of_whole(piece: SavedSlice, cut: Cut | None) -> Iterator[SavedSlice]:
    """A slice of a rank's part of a tensor, as slices of the whole tensor. `cut` says which part; None: it is whole."""
    local = tuple(piece.shape)
    if cut is None or len(local) <= cut.dim:
        if cut is None or cut.index == 0:  # (a state that is one number is the same for all parts)
            yield piece
        return
    whole = cut.whole_shape(local)
    for place, start, count in cut.runs(whole, piece.start, piece.start + piece.values.numel()):
        values = piece.values[start - piece.start :][:count]
        yield SavedSlice(piece.key, whole, place, values, piece.number)


def _parameter_of(key: str) -> str:
    """The parameter that a key is about: of parameters/NAME, or optimizer/STATE/NAME."""
    kind, _, name = key.partition("/")
    return name.partition("/")[2] if kind == "optimizer" else name


class _Local:
    """What was saved, as a rank has it that has parts of some parameters."""

    def __init__(self, source: Reading, cuts: Mapping[str, Cut]) -> None:
        self.source, self.cuts = source, cuts
        self.everything, self.states, self.scalars = source.everything, source.states, source.scalars

    def _cut(self, key: str) -> Cut | None:
        cut = None if key.startswith("buffers/") else self.cuts.get(_parameter_of(key))
        return cut if cut is not None and len(self.source.form(key)[0]) > cut.dim else None

    def form(self, key: str) -> tuple[tuple[int, ...], torch.dtype, bool]:
        shape, dtype, number = self.source.form(key)
        cut = self._cut(key)
        return (shape if cut is None else cut.local_shape(shape)), dtype, number

    def fill(self, wanted: dict[tuple[str, int], Tensor]) -> None:
        found: dict[tuple[str, int], Tensor] = {}
        for (key, begin), target in wanted.items():
            cut = self._cut(key)
            if cut is None:
                found[key, begin] = target
                continue
            whole = self.source.form(key)[0]
            for place, start, count in cut.runs(whole, begin, begin + target.numel()):
                found[key, place] = target[start - begin :][:count]
        self.source.fill(found)


def _collect(executor: Executor, outline: Outline) -> Iterator[SavedSlice]:
    """The same, in the shapes of this rank's parts."""
    state, rank = executor.state, executor.comm.rank
    kept = {id(p): values for o in state.optimizers.values() for p, values in o.state.items()}
    if executor.program.local_steps and any(v is not None for own in kept.values() for v in own.values()):
        raise SaveError(
            f"plan {executor.program.name!r}: optimizer states differ between replicas that train by themselves, and "
            "are not saved; possible: an optimizer without states, such as SGD without momentum"
        )
    if keeps_residual(executor.program.compress):
        raise SaveError(
            f"plan {executor.program.name!r}: what compress={executor.program.compress} has left out of the gradients "
            "waits on every rank, and is not saved; possible are compress=none, bf16, fp16"
        )
    slices = [line for line in state.lines if line.place is not None]
    seen = {id(p) for line in slices for p in line.params}
    trained = _trained(executor)
    for layer in executor.compute.layers.values():
        for p in layer.parameters():
            if id(p) in seen:
                continue
            seen.add(id(p))
            name, own = executor.names[id(p)], trained.get(id(p), p)
            holders = _holders(executor, outline.layers_of[name], _form(p))
            yield from _share(f"parameters/{name}", own, rank, holders)
            for key, values, number in _states(name, kept.get(id(own), {})):
                yield from _share(key, values, rank, holders, number)
    for line in slices:
        if not executor.program.is_first(rank, line.group.form, "S"):
            continue  # ranks that share layers have the same slices of what they have whole
        (part,) = line.trained
        for p in line.params:
            if p.numel() == 0:  # no slice has any of it
                yield SavedSlice(f"parameters/{executor.names[id(p)]}", tuple(p.shape), 0, p.data.reshape(-1))
        for p, begin, end, place in line.places():
            name, shape = executor.names[id(p)], tuple(p.shape)
            yield SavedSlice(f"parameters/{name}", shape, begin, part.detach()[place : place + end - begin])
        for piece in line.updated:
            yield from states_of_slice(piece, kept.get(id(piece.parameter), {}))
    yield from _own_buffers(executor, outline)


def _own_buffers(executor: Executor, outline: Outline) -> Iterator[SavedSlice]:
    """The buffers of the layers of which this is the first rank: replicas may differ in them."""
    for l, layer in executor.compute.layers.items():
        if executor.comm.rank == _holders(executor, (l,))[0]:
            for name, values in _buffers(layer, outline.prefixes[l]):
                yield SavedSlice(f"buffers/{name}", tuple(values.shape), 0, values.reshape(-1).clone())


def states_of_slice(piece: Updated, kept: dict[str, Any]) -> Iterator[SavedSlice]:
    """What an optimizer keeps of a slice, cut into the parameters that the slice has parts of."""
    for name, shape, begin, end, place in piece.runs:
        for key, values, number in _states(name, kept):
            if values.shape == piece.parameter.shape and not number:
                yield SavedSlice(key, shape, begin, values[place : place + end - begin])
            elif begin == 0:
                yield SavedSlice(key, tuple(values.shape), 0, values.reshape(-1), number)


def collect_untrained(executor: Executor, outline: Outline) -> Iterator[SavedSlice]:
    """What no server has of a worker's layers: frozen parameters, those without elements, and buffers. Of several
    workers with the same layers the first one has it."""
    layers = executor.compute.layers.values()
    rest = {id(p): p for layer in layers for p in layer.parameters() if not (p.requires_grad and p.numel())}
    for p in rest.values():
        name = executor.names[id(p)]
        if executor.comm.rank == _holders(executor, outline.layers_of[name], _form(p))[0]:
            found = SavedSlice(f"parameters/{name}", tuple(p.shape), 0, p.detach().reshape(-1))
            yield from of_whole(found, executor.cuts.get(name))
    yield from _own_buffers(executor, outline)


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


def _trained(executor: Executor) -> dict[int, nn.Parameter]:
    """What the optimizer works on for each whole trainable parameter, by its id: itself, or a copy on the host."""
    whole = [line for line in executor.state.lines if line.place is None]
    return {id(p): own for line in whole for p, own in zip(line.params, line.trained, strict=True)}


def _form(parameter: nn.Parameter) -> str:
    """The form of a parameter's group."""
    found: str = getattr(parameter, "minipar_form", "")
    return found


def _shard(program: Program, rank: int, form: str) -> tuple[int, ...]:
    """Which part of a parameter of this form a rank has: its places along the axes that cut it."""
    both = zip(program.places(rank), form.split("/"), strict=False) if "S" in form else ()
    return tuple(place for (place, _), part in both if part == "S")


def _holders(executor: Executor, layers: Sequence[int], form: str = "") -> list[int]:
    """The ranks that hold any of these layers, and have the same part as this one of a parameter of this form."""
    program = executor.program
    found = [rank for rank, held in enumerate(program.placement) if not set(layers).isdisjoint(held)]
    if not form:
        return found
    own = _shard(program, executor.comm.rank, form)
    return [rank for rank in found if _shard(program, rank, form) == own]


def _share(key: str, values: Tensor, rank: int, holders: list[int], number: bool = False) -> Iterator[SavedSlice]:
    """The part that a rank brings of a tensor that all holders have."""
    flat, shape = values.detach().reshape(-1), tuple(values.shape)
    k, size = holders.index(rank), flat.numel()
    if flat.numel() * flat.element_size() > SMALL:
        size = -(-flat.numel() // len(holders))
    elif k > 0:
        return
    if k * size < flat.numel() or flat.numel() == 0:
        yield SavedSlice(key, shape, k * size, flat[k * size : (k + 1) * size], number)


def _buffers(layer: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """The buffers that belong to a layer's state, with their names in the model."""
    if isinstance(layer, Node):
        yield from layer.state.items()
        return
    parameters = {name for name, _ in layer.named_parameters(remove_duplicate=False)}
    for name, values in layer.state_dict().items():
        if name not in parameters and isinstance(values, Tensor):
            yield f"{prefix}.{name}", values


def optimizer_class(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


# in -------------------------------------------------------------------------------------------------------------------


def restore(executor: Executor, outline: Outline, saved: Reading) -> None:
    """Give a rank that has not begun what was saved, whatever plan it was saved under."""
    state, source = executor.state, _Local(saved, executor.cuts) if executor.cuts else saved
    slices = [(line, line.place) for line in state.lines if line.place is not None]
    seen = {id(p) for line, place in slices if place.scattered for p in line.params}
    trained = _trained(executor)
    for l, layer in executor.compute.layers.items():
        for p in layer.parameters():
            if id(p) not in seen:
                own: Tensor = trained.get(id(p), p)
                _copy(source, f"parameters/{executor.names[id(p)]}", own)
                if own is not p:
                    p.data.copy_(own.data)
            seen.add(id(p))
        for name, values in _buffers(layer, outline.prefixes[l]):
            _copy(source, f"buffers/{name}", values)
    for line, _ in slices:
        part, (mine,) = line.part, line.trained
        wanted = torch.zeros(part.numel(), dtype=part.dtype)
        source.fill({
            (f"parameters/{executor.names[id(p)]}", begin): wanted[place : place + end - begin]
            for p, begin, end, place in line.places()
        })  # fmt: skip
        for own in {id(mine): mine, id(part): part}.values():
            own.data.copy_(wanted)
        if not all(_alike(source, one) for one in line.updated):
            state.divide(line)
    names = {id(own): executor.names[p] for p, own in trained.items()}
    parts = {id(piece.parameter): piece for line, _ in slices for piece in line.updated}
    cuts = executor.cuts
    shapes = {
        row.name: cuts[row.name].local_shape(row.shape) if row.name in cuts else row.shape for row in outline.rows
    }
    for optimizer in state.optimizers.values():
        for own, settings in _parameters(optimizer):
            if id(own) in parts:
                found = _found_of_slice(source, parts[id(own)], shapes)
            else:
                found = _states_of(source, names[id(own)])
            _give(optimizer, own, settings, found)


def restore_untrained(
    layers: Sequence[nn.Module], names: Mapping[int, str], outline: Outline, source: Reading | _Local
) -> None:
    """Give a model that is whole the frozen parameters and the buffers that were saved."""
    for layer, prefix in zip(layers, outline.prefixes, strict=True):
        for p in layer.parameters():
            if not p.requires_grad:
                _copy(source, f"parameters/{names[id(p)]}", p)
        for name, values in _buffers(layer, prefix):
            _copy(source, f"buffers/{name}", values)


def restore_slices(pieces: Sequence[Updated], optimizer: torch.optim.Optimizer, source: Reading | _Local) -> None:
    """Give slices on the CPU, and the optimizer that updates them, what was saved."""
    shapes = {run.name: run.shape for piece in pieces for run in piece.runs}
    source.fill({
        (f"parameters/{name}", begin): piece.parameter.data[place : place + end - begin]
        for piece in pieces for name, _, begin, end, place in piece.runs
    })  # fmt: skip
    own = {id(piece.parameter): piece for piece in pieces}
    for parameter, settings in _parameters(optimizer):
        _give(optimizer, parameter, settings, _found_of_slice(source, own[id(parameter)], shapes))


def read_whole(source: Reading | _Local) -> dict[str, dict[str, Any]]:
    """All that was saved, as whole tensors by name: parameters, buffers, and each parameter's states."""
    found: dict[str, dict[str, Any]] = {"parameters": {}, "buffers": {}, "states": {}}
    for key in source.everything():
        kind, _, name = key.partition("/")
        if kind == "optimizer":
            state, _, name = name.partition("/")
            found["states"].setdefault(name, {})[state] = _state(source, key)
        else:
            found[kind][name] = read_one(source, key)
    return found


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Every parameter of an optimizer, with the settings of its group."""
    return ((p, group) for group in optimizer.param_groups for p in group["params"])


def _copy(source: Reading | _Local, key: str, target: Tensor) -> None:
    values, here = read_one(source, key), target.detach()
    if values.dtype == here.dtype or not torch.equal(here.to("cpu", values.dtype), values):
        here.copy_(values)  # (else it was rounded for precision=bf16, and the model itself has it as it was)


def read_one(source: Reading | _Local, key: str) -> Tensor:
    """What was saved under a key, whole."""
    shape, dtype, _ = source.form(key)
    flat = torch.empty(shape, dtype=dtype).view(-1)
    source.fill({(key, 0): flat})
    return flat.view(shape)


def _states_of(source: Reading | _Local, name: str) -> dict[str, Any]:
    """The states of a whole parameter."""
    return {state: _state(source, f"optimizer/{state}/{name}") for state in source.states(name)}


def _state(source: Reading | _Local, key: str) -> Any:
    """A state of an optimizer: a tensor, or a plain number."""
    value = read_one(source, key)
    return value.item() if source.form(key)[2] else value


def _found_of_slice(source: Reading | _Local, piece: Updated, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """The states of a rank's slice: elements of its parameters' states, end to end, and numbers that they have in
    common."""
    part, scalars = piece.parameter, source.scalars()
    found: dict[str, Any] = {}
    wanted: dict[tuple[str, int], Tensor] = {}
    for name in dict.fromkeys(run.name for run in piece.runs):
        for each in source.states(name):
            key = f"optimizer/{each}/{name}"
            shape, dtype, number = source.form(key)
            if each in scalars:
                value = read_one(source, key)
                found.setdefault(each, value.item() if number else value)
            elif shape != shapes[name]:
                raise SaveError(
                    f"optimizer state {each!r} of {name} has shape {shape}, and cannot be sliced; go on with zero=0"
                )
            elif each not in found:
                found[each] = torch.zeros(part.numel(), dtype=dtype)
    for name, _, begin, end, place in piece.runs:
        for each in source.states(name):
            if each not in scalars:
                wanted[f"optimizer/{each}/{name}", begin] = found[each][place : place + end - begin]
    source.fill(wanted)
    return found


def _alike(source: Reading | _Local, part: Updated) -> bool:
    """Whether the parameters of a slice have the same states, as after the same number of updates."""
    names = {run.name for run in part.runs}
    states = {tuple(sorted(source.states(name))) for name in names}
    return len(states) < 2 and all(
        len({float(read_one(source, f"optimizer/{each}/{name}")) for name in names}) == 1
        for each in (next(iter(states)) if states else ()) if each in source.scalars()
    )  # fmt: skip


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
