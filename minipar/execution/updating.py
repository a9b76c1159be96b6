"""One optimizer and one scheduler for the whole model, as the user makes them; every rank updates its parts by them.

    optimizer(all parameters)      group 0  lr 0.1, decay     embed.weight   1.weight   head.weight
                                   group 1  lr 0.1, none      1.bias         head.bias
    rank 0, which has layer 1      group 0  its slice, or all, of 1.weight
                                   group 1  its slice, or all, of 1.bias

The user's function is always given every trainable parameter of the model, in the model's order, with the shape that it
has there: what it decides by name, by shape or by position holds under every plan. What it is given are stand-ins that
take no memory. The optimizer of a rank is made by the same function; then its stand-ins are replaced by what the rank
updates, and groups of which it has nothing are left out.

The scheduler steps once for each update of the whole model. A rank has several optimizers where parameters are updated
one after another, so each of them asks for the settings of its next update by number.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from minipar.errors import MiniparError, PlanError, SaveError
from minipar.execution.correction import ByStaleness
from minipar.models.tensors import dtype_name, dtype_named

Plain = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
ByName = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
Optimizer = Plain | ByName
Scheduler = Callable[[torch.optim.Optimizer], LRScheduler]
GroupSettings = list[dict[str, Any]]  # of every group of the whole model's optimizer, without its parameters


@dataclass(frozen=True)
class Named:
    """A function that makes an optimizer of (name, parameter) pairs; see `named`."""

    make: ByName

    def __call__(self, named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return self.make(named_parameters)


def named(make: ByName) -> ByName:
    """Say that a function makes an optimizer of (name, parameter) pairs; its argument may have any name.

    A function whose first parameter is called `named_parameters` is given such pairs anyway. The names are those of
    the whole model's `named_parameters()`, a tied parameter has the first of its names.
    """
    return Named(make)


def takes_names(factory: Any) -> bool:
    """Whether a function that makes an optimizer is to be given (name, parameter) pairs."""
    while isinstance(factory, ByStaleness):
        factory = factory.make
    if isinstance(factory, Named):
        return True
    try:
        first = next(iter(inspect.signature(factory).parameters), "")
    except (TypeError, ValueError):  # a callable without a signature
        return False
    return first == "named_parameters"


def make(factory: Any, pairs: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """What a user's function makes of these parameters, given with their names if it wants them."""
    given = list(pairs)
    optimizer = factory(given if takes_names(factory) else [p for _, p in given])
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise PlanError(f"optimizer: made a {type(optimizer).__name__}; it must make a torch.optim.Optimizer")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise PlanError(
            f"optimizer {type(optimizer).__name__}: its step() needs a closure that computes the loss again, which no "
            "program does; possible is one whose step() works from the gradients alone, such as SGD, Adam or AdamW"
        )
    return optimizer


class Form(NamedTuple):
    """What is known everywhere of a trainable parameter; `marks`: its class and attributes, which may say its group."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    marks: tuple[type, dict[str, Any]] = (nn.Parameter, {})

    def marked(self, values: Tensor) -> nn.Parameter:
        """A parameter of these values that looks like this one."""
        found = nn.Parameter(values)
        found.__class__, more = self.marks
        vars(found).update(more)
        return found


def forms_of(model: nn.Module) -> tuple[Form, ...]:
    """The trainable parameters of a whole model, in its order."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return tuple(Form(name, tuple(p.shape), p.dtype, (type(p), vars(p))) for name, p in trained)


class Updated(NamedTuple):
    """What an optimizer of a rank updates: a parameter of the model; or, `sliced`, a flat one that has the elements
    from `begin` on of the model's parameter of this name and shape."""

    parameter: nn.Parameter
    name: str
    shape: tuple[int, ...]
    begin: int = 0
    sliced: bool = False


def whole_piece(name: str, parameter: nn.Parameter) -> Updated:
    return Updated(parameter, name, tuple(parameter.shape))


@dataclass
class OptimizerPart:
    """An optimizer of a rank. `which[k]`: the group of the whole model's optimizer that its group k is a part of;
    `done`: updates of this run."""

    optimizer: torch.optim.Optimizer
    which: list[int]
    done: int = 0

    def follow(self, settings: GroupSettings) -> None:
        """Take the settings of the whole model's groups."""
        for group, k in zip(self.optimizer.param_groups, self.which, strict=True):
            group.update(settings[k])


class Update:
    """The user's optimizer and scheduler of a whole model.

    group_of   of each parameter by name its group; those that are in none are not updated
    Raises PlanError where the optimizer cannot be made of these parameters, or has others.
    """

    def __init__(self, factory: Optimizer, forms: Sequence[Form], scheduler: Scheduler | None = None) -> None:
        self.factory, self.forms = factory, tuple(forms)
        self.whole, stands = self._make(factory)
        names = {id(p): name for name, p in stands.items()}
        self.group_of: dict[str, int] = {}
        self.schedule: OptimizerSchedule | None = None
        if not stands:
            return
        for k, group in enumerate(self.whole.param_groups):
            for p in group["params"]:
                if id(p) not in names:
                    raise PlanError(
                        f"optimizer {self.name}: has a parameter of shape {tuple(p.shape)} that it was not given; "
                        "make it of the parameters that the function is called with"
                    )
                self.group_of[names[id(p)]] = k
        if scheduler is not None:
            self.schedule = OptimizerSchedule(self.whole, scheduler)

    @property
    def name(self) -> str:
        """The class of the optimizer."""
        return type(self.whole).__name__

    @property
    def scheduler(self) -> str:
        """The class of the scheduler; "" without one."""
        return "" if self.schedule is None else class_name(self.schedule.scheduler)

    def _make(self, factory: Any) -> tuple[torch.optim.Optimizer, dict[str, nn.Parameter]]:
        stands = {form.name: form.marked(torch.zeros((), dtype=form.dtype).expand(form.shape)) for form in self.forms}
        if not stands:  # nothing is trained
            return torch.optim.SGD([nn.Parameter(torch.zeros(0))], lr=0.0), stands
        try:
            return make(factory, stands.items()), stands
        except MiniparError:
            raise
        except Exception as error:
            function = getattr(factory, "func", factory)  # (of a partial)
            name = getattr(function, "__name__", type(function).__name__)
            raise PlanError(f"optimizer {name}: cannot be made of this model's parameters: {error}") from error

    def rates_at(self, update: int) -> tuple[float, ...]:
        """The learning rates of an update, one for each group of the whole model's optimizer."""
        if not self.forms:
            return ()
        found = settings_of(self.whole) if self.schedule is None else self.schedule.at(update)
        return tuple(float(group.get("lr", float("nan"))) for group in found)

    def part(self, pieces: Sequence[Updated], staleness: int | None = None) -> OptimizerPart:
        """The optimizer of some pieces. staleness: their gradients are so many updates old (see `correction`)."""
        optimizer, stands = self._make(self.factory)
        if isinstance(self.factory, ByStaleness) and staleness is not None:
            self.factory.slow(optimizer, staleness)
        before, which = dict(optimizer.state), []
        optimizer.state.clear()
        for k, group in enumerate(optimizer.param_groups):
            mine = [piece for piece in pieces if self.group_of.get(piece.name) == k]
            group["params"][:] = [piece.parameter for piece in mine]
            if "param_names" in group:
                group["param_names"] = [piece.name for piece in mine]
            for piece in mine:
                state = before.get(stands[piece.name])
                if state:
                    optimizer.state[piece.parameter] = {key: _elements(piece, value) for key, value in state.items()}
            if mine:
                which.append(k)
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
        return OptimizerPart(optimizer, which)

    def of_group(self, k: int) -> Plain:
        """Makes an optimizer of any parameters, with the settings of one group."""
        return partial(self._like, k)

    def _like(self, k: int, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer, _ = self._make(self.factory)
        chosen = optimizer.param_groups[k]
        first = next(iter(chosen["params"]), None)
        before = {} if first is None else optimizer.state.get(first, {})
        optimizer.state.clear()
        chosen["params"][:] = parameters
        chosen.pop("param_names", None)
        optimizer.param_groups[:] = [chosen]
        for p in parameters if before else ():  # (what a state begins with is the same for every element)
            optimizer.state[p] = {
                key: v.reshape(-1)[:1].expand(p.shape).clone() if isinstance(v, Tensor) and v.dim() else _copy(v)
                for key, v in before.items()
            }
        return optimizer

    @property
    def largest(self) -> int:
        """The group with the most elements."""
        counts = [0] * len(self.whole.param_groups)
        for form in self.forms:
            if form.name in self.group_of:
                counts[self.group_of[form.name]] += torch.Size(form.shape).numel()
        return max(range(len(counts)), key=counts.__getitem__, default=0)


def _elements(piece: Updated, value: Any) -> Any:
    """What a state of a whole parameter begins with, of the elements of a piece."""
    if not isinstance(value, Tensor) or value.shape != piece.shape or not value.dim():
        return _copy(value)
    mine = value.reshape(-1)[piece.begin :][: piece.parameter.numel()] if piece.sliced else value
    return mine.clone(memory_format=torch.preserve_format).to(piece.parameter.device)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


# whether a part can be updated by itself -----------------------------------------------------------------------------


def check_update(update: Update, why: str, divided: bool = True, sliced: bool = True) -> None:
    """Try a model's optimizer as a plan uses it; PlanError, with `why`, where parameters are not updated as in torch.

    divided   whether one call of step() has less than all parameters of the model
    sliced    whether it has slices of parameters
    """
    for k in range(len(update.whole.param_groups) if sliced else 0):
        check_elementwise(update.of_group(k), why, update.name)
    if _is_torchs(update.whole):
        return
    error: Exception | None = None
    for longest in (4, None) if update.forms else ():  # (an optimizer may refuse the small shapes of the first trial)
        try:
            return _check_parts(update, why, divided, longest)
        except MiniparError:
            raise
        except Exception as found:
            error = found
    if error is not None:
        raise PlanError(f"optimizer {update.name}: step() fails for this model's parameters: {error}") from error


def _is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is one of torch's, without hooks: these update each parameter by its own gradient."""
    return (
        type(optimizer).__module__.startswith("torch.optim.")
        and not (optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
        and "step" not in vars(optimizer)
    )


def _check_parts(update: Update, why: str, divided: bool, longest: int | None) -> None:
    """Compare the user's optimizer with those that `Update.part` makes: of all parameters, and of halves of them.

    longest   parameters of the trial have at most so many elements along each dimension
    """
    forms = [f._replace(shape=tuple(min(n, longest or n) for n in f.shape), dtype=torch.float64) for f in update.forms]
    start, gradients = _trial({form.name: form.shape for form in forms})
    marked = {form.name: form.marked for form in forms}
    small, names = Update(update.factory, forms), list(start)
    expected, again = (_stepped(partial(make, update.factory), start, gradients, seed, marked) for seed in (0, 1))
    if any(not torch.allclose(expected[n], again[n], 0, 0, equal_nan=True) for n in names):
        raise PlanError(
            f"optimizer {update.name}: draws random numbers in step(), and ranks would draw others than one device; "
            "possible is a torch.Generator of its own, which it makes with the same seed on all ranks"
        )
    halves = [[names[0::2], names[1::2]], [names[: len(names) // 2], names[len(names) // 2 :]]] if divided else []

    def of(pairs: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return small.part([whole_piece(name, p) for name, p in pairs]).optimizer

    for parts in [[names], *halves]:
        alone = f"; {why}, which updates some parameters without the others" if len(parts) > 1 else ""
        found: dict[str, Tensor] = {}
        try:
            for part in filter(None, parts):
                found |= _stepped(of, {n: start[n] for n in part}, [{n: g[n] for n in part} for g in gradients])
        except Exception as error:
            raise PlanError(f"optimizer {update.name}: cannot update these parameters: {error}{alone}") from error
        wrong = [n for n, v in expected.items() if not torch.allclose(found[n], v, 1e-9, 1e-12, equal_nan=True)]
        if wrong and alone:
            raise PlanError(
                f"optimizer {update.name}: updates {wrong[0]} otherwise if it has not all parameters of the model, as "
                f"for a norm over all of them{alone}; possible are clip= in the plan for such a norm, or a plan of dp= "
                "alone, with zero=0"
            )
        if wrong:
            raise PlanError(
                f"optimizer {update.name}: does not update {wrong[0]} by the parameters in its param_groups; it must "
                "read them there in every step, since ranks put their own in the place of those that it was made of"
            )


def _stepped(
    make: Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer],
    start: dict[str, Tensor],
    gradients: list[dict[str, Tensor]],
    seed: int = 0,
    marked: Mapping[str, Callable[[Tensor], nn.Parameter]] = {},
) -> dict[str, Tensor]:
    """Parameters after a few steps. `seed`: of what draws in them; `marked`: makes some of them."""
    parameters = {name: marked.get(name, nn.Parameter)(values.clone()) for name, values in start.items()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        optimizer = make(list(parameters.items()))
        for step in gradients:
            for name, p in parameters.items():
                p.grad = step[name].clone()
            optimizer.step()
    return {name: p.detach() for name, p in parameters.items()}


def check_elementwise(factory: Plain, why: str, name: str = "") -> None:
    """Try an optimizer on a small model, whole and in two flat halves; PlanError if the updates differ.

    `why` says in the error who needs it; `name` what the optimizer is called there.
    """
    start, gradients = _trial({"matrix": (6, 4), "vector": (4,)})
    function = getattr(factory, "func", factory)  # (of a partial)
    name = name or getattr(function, "__name__", type(function).__name__)

    def stepped(some: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        given = [{key: some(values) for key, values in one.items()} for one in (start, *gradients)]
        return _stepped(lambda pairs: factory([p for _, p in pairs]), given[0], given[1:])

    try:
        whole = stepped(torch.clone)
        halves = [stepped(partial(_half, k)) for k in (0, 1)]
    except Exception as error:
        raise PlanError(f"optimizer {name}: cannot update slices of parameters ({error}); {why}") from error
    for key, values in whole.items():
        found = torch.cat([half[key] for half in halves])
        if not torch.allclose(found, values.reshape(-1), rtol=1e-9, atol=1e-12):
            raise PlanError(
                f"optimizer {name}: updates a slice of a parameter otherwise than the whole one; {why}, which needs "
                "an optimizer that works element by element, such as SGD, Adam or AdamW"
            )


def _half(k: int, values: Tensor) -> Tensor:
    return values.reshape(-1).chunk(2)[k]


def _trial(shapes: Mapping[str, Sequence[int]]) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Small parameters, and the gradients of a few steps, of different size."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        start = {name: torch.randn(tuple(shape), dtype=torch.float64) for name, shape in shapes.items()}
        sizes = (1e-3, 1.0, 1e3) * 3  # (some of what an optimizer does begins a few steps later)
        return start, [{name: size * torch.randn_like(v) for name, v in start.items()} for size in sizes]


# settings and their scheduler -----------------------------------------------------------------------------------------


def settings_of(optimizer: torch.optim.Optimizer) -> GroupSettings:
    """What the groups of an optimizer say, without their parameters."""
    return [
        {key: _copy(value) for key, value in group.items() if key not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]


class OptimizerSchedule:
    """What a scheduler makes of the settings, update by update, counted from 0 in this run.

    Raises PlanError if it is not a scheduler whose `step()` needs no arguments.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: Scheduler) -> None:
        self.optimizer, self.scheduler = optimizer, make_scheduler(scheduler, optimizer)
        self._settings = {0: settings_of(optimizer)}
        self._last = 0

    def at(self, update: int) -> GroupSettings:
        """The settings of an update. Those that were forgotten cannot be had again."""
        while self._last < update:
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # (or the scheduler warns)
            self.scheduler.step()
            self._last += 1
            self._settings[self._last] = settings_of(self.optimizer)
        return self._settings[update]

    def forget(self, update: int) -> None:
        """Forget the settings of the updates before this one."""
        self.at(update)
        self._settings = {k: found for k, found in self._settings.items() if k >= update}

    def saved(self, update: int) -> dict[str, Any]:
        """What `load` takes, as plain JSON data, after `update` updates. (`at` was not called for a later update.)"""
        settings = self.at(update)
        return {
            "class": class_name(self.scheduler),
            "state": _plain(self.scheduler.state_dict(), "scheduler"),
            "settings": [{k: _plain(v, k) for k, v in group.items() if _is_number(v)} for group in settings],
        }

    def load(self, saved: dict[str, Any] | None) -> None:
        """Go on from a saved state, if it is that of a scheduler of the same class."""
        load_scheduler(self.scheduler, self.optimizer, saved)
        self._last, self._settings = 0, {0: settings_of(self.optimizer)}


def make_scheduler(make: Scheduler, optimizer: torch.optim.Optimizer) -> LRScheduler:
    """The user's scheduler of an optimizer; PlanError if its `step()` needs arguments."""
    scheduler = make(optimizer)
    step = getattr(scheduler, "step", None)
    if not callable(step) or not hasattr(scheduler, "state_dict"):
        raise PlanError(f"scheduler: made a {type(scheduler).__name__}; it must make a torch.optim.lr_scheduler of it")
    asked = [
        name for name, p in inspect.signature(step).parameters.items()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]  # fmt: skip
    if asked:
        raise PlanError(
            f"scheduler {type(scheduler).__name__}: step() needs {', '.join(asked)}, which no rank has before the step "
            "is over on all of them; possible is one that goes by the number of the step, such as CosineAnnealingLR"
        )
    return scheduler


def load_scheduler(scheduler: LRScheduler, optimizer: torch.optim.Optimizer, saved: dict[str, Any] | None) -> None:
    """Put a saved state into a scheduler of the same class, and the settings that it had made into its optimizer."""
    if saved is None or saved["class"] != class_name(scheduler):
        return
    settings, groups = saved["settings"], optimizer.param_groups
    if len(settings) != len(groups):
        raise SaveError(
            f"optimizer: has {len(groups)} parameter groups, but was saved with {len(settings)}; go on with the "
            "optimizer= that it was saved with"
        )
    for group, found in zip(groups, settings, strict=True):
        group.update({key: _found(value) for key, value in found.items()})
    scheduler.load_state_dict(_found(saved["state"]))


def other_scheduler(saved: dict[str, Any] | None, mine: str) -> str:
    """The warning for a run that goes on without the scheduler it was saved with, or "" if none is needed."""
    before = "" if saved is None else saved["class"]
    if before == mine or not before:
        return ""
    if not mine:
        return f"saved with the scheduler {before}, and goes on without one: learning rates are the optimizer's own"
    return f"saved with the scheduler {before}; {mine} begins anew"


def plain_schedule(saved: dict[str, Any] | None) -> dict[str, Any] | None:
    """A saved state as torch's own objects: the scheduler's class and state, and its optimizer's settings by group."""
    if saved is None:
        return None
    return {"class": saved["class"], "state": _found(saved["state"]), "settings": [
        {key: _found(value) for key, value in group.items()} for group in saved["settings"]
    ]}  # fmt: skip


# as JSON --------------------------------------------------------------------------------------------------------------


def class_name(scheduler: object) -> str:
    return f"{type(scheduler).__module__}.{type(scheduler).__qualname__}"


def _is_number(value: Any) -> bool:
    """Whether a setting is something that a scheduler may change: numbers, and pairs of them such as betas."""
    if isinstance(value, (tuple, list)):
        return all(map(_is_number, value))
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)


def _plain(value: Any, where: str) -> Any:
    """A value as JSON data that `_found` reads: tables and tuples say what they are."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [_plain(v, where) for v in value]
    if isinstance(value, tuple):
        return {"tuple": [_plain(v, where) for v in value]}
    if isinstance(value, dict):
        kind = "counter" if isinstance(value, Counter) else "table"
        return {kind: [[_plain(k, where), _plain(v, f"{where}.{k}")] for k, v in value.items()]}
    if isinstance(value, Tensor) and value.numel() == 1:
        return {"tensor": value.item(), "dtype": dtype_name(value.dtype), "dim": value.dim()}
    raise SaveError(
        f"{where} is a {type(value).__name__}, which cannot be saved; possible are numbers, texts, and lists of them"
    )


def _found(data: Any) -> Any:
    """What `_plain` wrote down."""
    if isinstance(data, list):
        return [_found(v) for v in data]
    if not isinstance(data, dict):
        return data
    if "tensor" in data:
        return torch.full((1,) * data["dim"], data["tensor"], dtype=dtype_named(data["dtype"]))
    if "tuple" in data:
        return tuple(_found(v) for v in data["tuple"])
    pairs = next(iter(data.values()))
    table = {_found(k): _found(v) for k, v in pairs}
    return Counter(table) if "counter" in data else table
