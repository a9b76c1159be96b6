"""A model cut into layers. Its parameters keep the names that they have in the original model.

Layered     an nn.Sequential whose state and parameters have the original names
Holder      a layer that holds modules of the original at the original paths
check       checks on an example that the layers give the model's output and gradients
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minipar.errors import PlanError
from minipar.models.tensors import count_bytes, count_rows, differentiable, tensors
from minipar.wording import several

TOLERANCE = 1e-6  # relative to the largest number: torch may choose other kernels for other memory layouts


class Crossing(NamedTuple):
    """What one layer gives to the next one for the example: names of values, and bytes for each row."""

    names: tuple[str, ...]
    bytes_per_row: float


@dataclass(frozen=True)
class Report:
    """How a model was cut: in what way, and for each layer its name, its number of parameters, and what it gives to the
    next one."""

    model: str
    way: str
    layers: tuple[str, ...]
    parameters: tuple[int, ...]
    crossings: tuple[Crossing, ...]
    error: float | None

    @property
    def title(self) -> str:
        """Such as "5 layers, cut between its blocks"."""
        return self.way if len(self.layers) == 1 else f"{several(len(self.layers), 'layer')}, {self.way}"

    def __str__(self) -> str:
        lines = [f"{self.model}: {self.title}"]
        for k, (name, count) in enumerate(zip(self.layers, self.parameters, strict=True)):
            lines.append(f"  {k:>3}  {name}  ({several(count, 'parameter')})")
            if k < len(self.crossings):
                crossing = self.crossings[k]
                lines.append(f"       | {', '.join(crossing.names)}: {crossing.bytes_per_row:,.0f} bytes a row")
        checked = "not checked" if self.error is None else f"largest relative difference {self.error:.1e}"
        return "\n".join([*lines, f"  outputs and gradients on the example: {checked}"])


class Layered(nn.Sequential):
    """Layers of a model; `named_parameters`, `state_dict` and `load_state_dict` use the original model's names.

    report   how it was cut, to be printed
    """

    report: Report

    def __init__(self, layers: Mapping[str, nn.Module], model: nn.Module) -> None:
        super().__init__()
        self.original: dict[str, str] = {}
        for name, layer in layers.items():
            self.add_module(name, layer)
        known = {id(p): name for name, p in model.named_parameters()}
        missing = known.keys() - {id(p) for p in self.parameters()}
        if missing:
            names = sorted(known[one] for one in missing)
            raise PlanError(
                f"model: {type(model).__name__} has parameters that its output does not use: {', '.join(names[:4])}"
                f"{' ...' * (len(names) > 4)}; remove them, or cut the model by hand into an nn.Sequential"
            )
        here = super().named_parameters(remove_duplicate=False)
        self.original = {name: known.get(id(p), _path(name)) for name, p in here}
        given = {id(t): name for name, t in reversed(model.state_dict(keep_vars=True).items())}
        own_state = super().state_dict(keep_vars=True)
        self.stored = {name: given.get(id(t), _path(name)) for name, t in own_state.items()}  # here -> original
        held = {id(t): name for name, t in own_state.items()}
        self.keys = {name: held[id(t)] for name, t in model.state_dict(keep_vars=True).items() if id(t) in held}
        name_dropouts(model)
        own, modes = {id(m) for m in model.modules()}, {path: m.training for path, m in model.named_modules()}
        for path, module in self.named_modules():
            if id(module) not in own:
                module.training = modes.get(_path(path), model.training)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in super().named_parameters("", recurse, remove_duplicate):
            yield f"{prefix}{'.' * bool(prefix)}{self.original.get(name, name)}", parameter

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        found = super().state_dict(*args, **kwargs)
        if args or kwargs.get("prefix") or kwargs.get("destination") is not None:
            return found  # the caller wants the state of a larger model
        return type(found)((name, found[mine]) for name, mine in self.keys.items())

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        found = {here: state_dict[name] for here, name in self.stored.items() if name in state_dict}
        rest = {name: tensor for name, tensor in state_dict.items() if name not in {*self.keys, *self.stored.values()}}
        return super().load_state_dict(found | rest, strict, assign)


def name_dropouts(model: nn.Module) -> None:
    """Say to dropouts by which names their masks are drawn: those in the model."""
    for name, module in model.named_modules():
        if type(module) is nn.Dropout:
            module.row_name = name


def _path(name: str) -> str:
    """The path in the original model: the name without the layer's name at its beginning."""
    return name.partition(".")[2]


class Holder(nn.Module):
    """A layer that holds modules of another model, each at its path in that model."""

    def __init__(self, held: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for path, module in held.items():
            _, into, name = _place(self, path)
            into.add_module(name, module)


def _place(root: nn.Module, path: str) -> tuple[nn.Module, nn.Module, str]:
    """The root, the parent module of a path, and the name in it. Missing parents are made."""
    *parents, name = path.split(".")
    into = root
    for parent in parents:
        if parent not in into._modules:
            into.add_module(parent, nn.Module())
        into = into._modules[parent]  # type: ignore[assignment]
    return root, into, name


def hold_tensor(root: nn.Module, path: str, tensor: Tensor) -> None:
    """Let a layer hold a parameter or buffer at its path in another model."""
    _, into, name = _place(root, path)
    if isinstance(tensor, nn.Parameter):
        into.register_parameter(name, tensor)
    else:
        into.register_buffer(name, tensor, persistent=not name.startswith("_tensor_constant"))


# what is looked into --------------------------------------------------------------------------------------------------

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def units_of(model: nn.Module, fine: bool) -> dict[str, nn.Module]:
    """The modules of a model that are not looked into, by their paths: blocks, and what is called beside them."""
    modules = dict(model.named_modules())
    found: dict[str, nn.Module] = {}

    def walk(path: str, module: nn.Module) -> None:
        if path and is_unit(module, path, modules, fine):
            found[path] = module
            return
        for name, child in module._modules.items():
            if child is not None:
                walk(f"{path}.{name}" if path else name, child)

    walk("", model)
    return found


def is_unit(module: nn.Module, path: str, modules: Mapping[str, nn.Module], fine: bool) -> bool:
    """Whether a module is not looked into: an element of a container, one that torch.compile has wrapped, or one that
    has no container of blocks; if fine, one of torch's own, or one without modules."""
    if "_orig_mod" in module._modules:
        return True
    if fine:
        own = type(module).__module__.startswith("torch.nn.") and not isinstance(module, _CONTAINERS)
        return own or not module._modules
    if isinstance(module, _CONTAINERS):
        return is_inside(path, modules) or (isinstance(module, nn.Sequential) and not is_spine(module))
    return is_inside(path, modules) or not any(
        isinstance(part, _CONTAINERS) and (not isinstance(part, nn.Sequential) or is_spine(part))
        for part in module.modules()
    )


def is_inside(path: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether a module is inside a container; the elements of a container are blocks."""
    parents = path.split(".")[:-1]
    return any(isinstance(modules[".".join(parents[: k + 1])], _CONTAINERS) for k in range(len(parents)))


def is_spine(module: nn.Module) -> bool:
    """Whether the elements of a container are blocks: if two of them have parameters in several modules, or if four
    have parameters."""
    children = [child for child in module._modules.values() if child is not None]
    trained = [child for child in children if next(child.parameters(), None) is not None]
    compound = [child for child in trained if sum(bool(m._parameters) for m in child.modules()) > 1]
    return len(compound) >= 2 or len(trained) >= 4


def first_line(error: Exception) -> str:
    """What an error says: its first sentence."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].partition(". ")[0].rstrip(".")


def statement(error: Exception) -> str:
    """Where in the user's code an error arose, and the statement there."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])
    own = [one for one in frames if not one.filename.startswith(inside) and not one.filename.startswith("<eval")]
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno}: {own[-1].line})" if own else ""


def versions(modules: Mapping[str, nn.Module]) -> dict[str, list[int]]:
    """The versions of the buffers of modules: others after a call that has changed them."""
    return {path: [buffer._version for buffer in module.buffers()] for path, module in modules.items()}


@contextmanager
def undisturbed(model: nn.Module, but_attributes: bool = False) -> Iterator[None]:
    """After the block buffers, attributes of modules and the random generator have the same values as before it. (A
    forward may keep what it makes, and torch.fx gives it stand-ins.)"""
    buffers = [(b, b.clone()) for b in {id(b): b for b in model.buffers()}.values()]
    modules = [] if but_attributes else model.modules()
    attributes = [(own, dict(own)) for module in modules for own in (vars(module), module._buffers)]
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        for own, known in attributes:
            own.clear()
            own.update(known)
        for buffer, before in buffers:
            buffer.data.copy_(before)


def check(model: nn.Module, layers: Layered, example: Any, call: Callable[[nn.Module, Any], Any], way: str) -> Layered:
    """The layers with their report, if they compute the same as the model on the example.

    Buffers, gradients and the state of the random generator do not change. Errors: PlanError if output or gradients
    differ.
    """
    gradients = [(p, p.grad) for p in model.parameters()]
    found, kinds, draws = [], [], False
    try:
        with undisturbed(model):
            crossings = _crossings(layers, example)
        for run in (lambda: call(model, example), lambda: layers(example)):
            for p, _ in gradients:
                p.grad = None
            with undisturbed(model), torch.enable_grad():
                seeded = torch.manual_seed(0).get_state()
                output = run()
                draws |= not torch.equal(seeded, torch.get_rng_state())
                ends = [t for t in differentiable(output) if t.requires_grad]
                if ends:
                    # (With gradients given for the ends, torch would import sympy: two tenths of a second.)
                    parts = [(torch.linspace(-1, 1, t.numel()).view(t.shape).to(t) * t).sum() for t in ends]
                    reduce(torch.add, [part.real if part.is_complex() else part for part in parts]).backward()
            kinds.append(type(output))
            found.append((_outputs(output), [p.grad for p, _ in gradients]))
    finally:
        for p, before in gradients:
            p.grad = before
    (expected, wanted), (actual, got) = found
    error = max(_difference(actual, expected), _difference(got, wanted))
    if not error <= TOLERANCE:
        why = (
            "it draws random numbers; where it does so between its blocks, as by F.dropout of what they give, layers "
            "draw others: put an nn.Dropout there, or make its probability 0 (such as dropout=0.0 in the config)"
            if draws
            else "something in its forward depends on more than values that are handed on: cut it by hand into an "
            "nn.Sequential"
        )
        raise PlanError(
            f"model: {type(model).__name__} in layers gives another result on the example than as it was (relative "
            f"difference {error:.1e}); {why}"
        )
    if kinds[0] is not kinds[1]:
        names = [kind.__name__ for kind in kinds]
        raise PlanError(f"model: {type(model).__name__} gives a {names[0]}, and its layers give a {names[1]}")
    counts = tuple(sum(p.numel() for p in layer.parameters()) for layer in layers)
    layers.report = Report(type(model).__name__, way, tuple(layers._modules), counts, crossings, error)
    return layers


def _crossings(layers: Layered, example: Any) -> tuple[Crossing, ...]:
    """What each layer but the last gives to the next one."""
    value, rows, found = example, max(1, count_rows(example)), []
    with torch.no_grad():
        for layer in list(layers)[:-1]:
            value = layer(value)
            part = layer.__dict__.get("_minipar", [None])[-1]
            names = (
                part.names
                if part
                else getattr(layer, "gives", None) or (tuple(value) if isinstance(value, Mapping) else ("output",))
            )
            found.append(Crossing(tuple(str(name).removeprefix("model_") for name in names), count_bytes(value) / rows))
    return tuple(found)


def _outputs(output: Any) -> list[Tensor | None]:
    return [t.detach() for t in tensors(output)]


def _difference(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> float:
    """Largest difference relative to the largest number; infinite if tensors are missing or have other shapes."""
    if len(found) != len(expected):
        return float("inf")
    worst = largest = 0.0
    for a, b in zip(found, expected, strict=True):
        if a is None or b is None:
            if a is not b:
                return float("inf")
            continue
        if a.shape != b.shape:
            return float("inf")
        if a.numel():
            kind = torch.complex128 if a.is_complex() else torch.float64
            worst = max(worst, (a.to(kind) - b.to(kind)).abs().max().item())
            largest = max(largest, b.to(kind).abs().max().item())
    return worst / largest if largest else worst
