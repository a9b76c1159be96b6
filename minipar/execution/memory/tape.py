"""Record what one layer allocates and frees, in order, alone on one device: its forward, and its backward.

    root --Source--> input --layer--> output --Sink-->        Source and Sink take the place of the neighbours: they
         <--------- input gradient <-------- gradient         give and take what the neighbours would, and keep nothing

So all memory that remains is kept by this layer. `prediction/memory.py` lays the tapes of all layers along a program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from minipar.execution import sliced
from minipar.execution.measuring.profiler import OptimizerFactory
from minipar.execution.measuring.walk import Visit, between_nodes, of_output, walk
from minipar.execution.memory.storages import FollowedStorage, Storages
from minipar.execution.split_backward import input_half, weight_half
from minipar.models import randomness
from minipar.models.parameter_groups import parameters_of
from minipar.models.tensors import (
    copied,
    differentiable,
    find_overwriting,
    given_to,
    map_tensors,
    tensors,
)
from minipar.prediction.recorded import Back, LayerTape, Lie, Tape, Tapes, Workspace

Loss = Callable[[Any, Any], Tensor]


class _Recorder(Storages):
    """Every change in order. `role` says what a storage is; one without a role is temporary."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.log: list[tuple[int, FollowedStorage]] = []

    def changed(self, held: FollowedStorage, delta: int) -> None:
        self.log.append((delta, held))

    def role(self, value: Any, kind: str) -> None:
        """Say what a value's storages are, unless they are something already (an output may be the input itself)."""
        for tensor in tensors(value):
            held = self.held_by(tensor)
            if held is not None and not held.kind:
                held.kind = kind

    def name_the_rest(self, kind: str) -> None:
        """Storages without a role that are still alive get this role; those that have died were temporary."""
        self.settle()
        for _, held in self.log:
            held.kind = held.kind or ("temporary" if held() is None else kind)

    def take(self) -> Tape:
        """What happened since the last call."""
        self.settle()
        log, self.log = self.log, []
        return tuple((delta, held.kind or "temporary") for delta, held in log if held.kind != "sink")


class _Source(torch.autograd.Function):
    """Gives the layer a tensor that somebody else holds, and takes its gradient."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, tensor: Tensor, take: Callable[[Tensor], None]) -> Tensor:
        ctx.take = take
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.take(gradients[0])
        return None, None, None


class _Sink(torch.autograd.Function):
    """A scalar that depends on some tensors but keeps nothing of them; its backward makes a gradient for each."""

    @staticmethod
    def forward(ctx: Any, give: Callable[[Any], None], *ends: Tensor) -> Tensor:
        ctx.give = give
        ctx.forms = [(end.shape, end.dtype, end.device) for end in ends]
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ones = [torch.ones(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.forms]
        ctx.give(ones)
        return None, *ones


def record(
    model: Iterable[nn.Module],
    batch: tuple[Any, Any],
    loss: Loss,
    rows: Sequence[int],
    optimizer: OptimizerFactory,
    split: bool = False,
    slices: Sequence[range] = (),
) -> Tapes:
    """The tapes of every layer for every number of rows in `rows`, and the workspace of an optimizer step.

    Arguments and the keys of slices are as for `minipar.profile`; `split`: also record backwards in halves. Every layer
    runs on a copy.
    """
    layers = list(model)
    copies = copied(nn.Sequential(*layers))
    randomness.replace_dropout(copies, 0)
    chain = [layer for layer in copies._modules.values() if layer is not None]
    trainable = [l for l, layer in enumerate(layers) if any(p.requires_grad for p in layer.parameters())]
    first = min(trainable, default=len(layers))
    device = next((p.device for p in copies.parameters()), torch.device("cpu"))
    found: dict[int, tuple[LayerTape, ...]] = {}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.enable_grad():
        for visit in walk(model, batch, rows, slices, device, between_nodes(model)):
            tape = _one_layer(chain[visit.number], visit, loss, first, split)
            found[visit.key] = (*found.get(visit.key, ()), tape)
    buffers = tuple(sum(b.numel() * b.element_size() for b in layer.buffers()) for layer in layers)
    groups = parameters_of(layers)
    flat = [[_flat(group)] if group else [] for group in groups]
    spaces = (_workspace(some, len(layers), optimizer, device.type) for some in (groups, flat))
    return Tapes(found, buffers, *spaces)


def _one_layer(layer: nn.Module, visit: Visit, loss: Loss, first: int, split: bool) -> LayerTape:
    """A layer's tapes: without a graph; forward and first backward; a later backward; halves. Sets what the walk asks
    for."""
    if visit.start is None:
        find_overwriting(layer, visit.given)
    before = visit.carried
    with torch.no_grad():
        recorder, given = _given(visit, None)
        run = _runner(layer, visit, before, recorder, False)
        with recorder:
            output = run(given_to(layer, given))
            recorder.role(output, "output")
            recorder.role(run.handed_on, "carry")
            del given
        plain = recorder.take()
        visit.output, visit.carried = map_tensors(output, torch.clone), map_tensors(run.handed_on, torch.clone)
        del output, run
    if visit.number < first:
        return LayerTape(plain)
    end = partial(of_output, loss, visit.target) if visit.last else None
    tapes: dict[bool, list[Tape]] = {False: [], True: []}
    lies, back = tuple[Lie, ...](), None
    for halves in (True, False) if split else (False,):
        recorded = partial(_with_graph, layer, visit, before, end, first, halves)
        forward, backward, half, lies, back = recorded()
        later = recorded()[1]
        tapes[halves] = [half, backward, later] if halves else [forward, backward, later]
        for p in layer.parameters():
            p.grad = None
    return LayerTape(plain, *tapes[False], *tapes[True])._replace(lies=lies, back=back)  # type: ignore[arg-type]


class _Lying:
    """Finds out where some tensors lie: in storages that were given, or in others."""

    def __init__(self, recorder: _Recorder, given: Sequence[FollowedStorage | None], outputs: Sequence[Tensor]) -> None:
        numbers = {id(held): k for k, held in reversed(list(enumerate(given)))}
        self.found = [recorder.held_by(tensor) for tensor in outputs]
        own = dict.fromkeys(id(held) for held in self.found if id(held) not in numbers)
        self.numbers = numbers | {key: -1 - k for k, key in enumerate(own)}
        self.bytes = [0 if held is None else held.nbytes for held in self.found]

    def lies(self) -> tuple[Lie, ...]:
        """To be asked when nobody but the graph holds an output; () where a tensor is not followed."""
        if None in self.found:
            return ()
        return tuple(
            Lie(self.numbers[id(held)], size, held() is not None)
            for held, size in zip(self.found, self.bytes, strict=True)
            if held is not None
        )


def _runner(layer: nn.Module, visit: Visit, before: Any, recorder: _Recorder, trains: bool) -> sliced.Alone:
    """The layer as a function of its input. For a slice it also takes the carry before, which somebody else holds."""
    before = map_tensors(before, lambda t: t.detach().clone())
    for tensor in tensors(before):
        recorder.register(tensor, "carried")
    recorder.take()
    return sliced.Alone(layer, visit.start, before, visit.more, trains)


def _with_graph(
    layer: nn.Module, visit: Visit, before: Any, final: Callable[[Any], Tensor] | None, first: int, halves: bool
) -> tuple[Tape, Tape, Tape, tuple[Lie, ...], Back | None]:
    """Tapes of a forward and its backward, or of a backward in halves; and where the tensors of the output and the
    gradients of the input lie."""
    root = torch.zeros((), requires_grad=True)
    arrived: dict[int, Tensor] = {}
    fresh = [p for p in layer.parameters() if p.grad is None]
    inner = visit.number > first  # (a gradient of its input is wanted)
    recorder, given = _given(visit, (root, arrived.__setitem__) if inner else None)
    run = _runner(layer, visit, before, recorder, True)
    with recorder:
        output = run(given_to(layer, given))
        end = final(output) if final else None
        recorder.role(output, "output")
        recorder.role(run.handed_on, "carry")
        recorder.name_the_rest("saved")
        forward = recorder.take()
        lying = _Lying(recorder, [recorder.held_by(tensor) for tensor in tensors(given)], tensors(output))
        inputs = len(differentiable(visit.given)) if inner else 0
        seeds: list[FollowedStorage | None] = []
        smooth = len(differentiable(output)) if end is None else 0

        def seeded(seeding: list[Tensor]) -> None:
            recorder.role(seeding, "grad_output")
            seeds.extend(map(recorder.held_by, seeding))

        ends = [t for t in differentiable(output) if t.requires_grad] if end is None else []
        more = [t for t in differentiable(run.handed_on) if t.requires_grad]
        carries = bool(more)
        last = [end] if end is not None else [_Sink.apply(seeded, *ends)]
        last += [_Sink.apply(lambda seeding: recorder.role(seeding, "grad_carried"), *more)] if more else []
        recorder.role(last, "sink")  # (but the loss is the layer's, and has a role already)
        leaves, run.handed_on = differentiable(run.given), None
        recorder.take()
        del output, ends, given, end, more
        freed_first = recorder.take()  # what is freed now was not held by the graph
        lies = lying.lies()
        edges = [get_gradient_edge(one) for one in last if one.requires_grad]
        del last
        input_tape: Tape = ()
        if halves:
            parameters = [p for p in layer.parameters() if p.requires_grad]
            _, left = input_half(edges, [None] * len(edges), [root] if inner else [], parameters)
            del edges
            recorder.role(list(arrived.values()), "grad_input")
            recorder.name_the_rest("left")
            input_tape, freed_first = freed_first + recorder.take(), ()
            weight_half(left)
            del left
        else:
            if edges:
                torch.autograd.backward(edges, [None] * len(edges))
            del edges
            recorder.role(list(arrived.values()), "grad_input")
            recorder.role([leaf.grad for leaf in leaves], "grad_carry")
        recorder.role([p.grad for p in fresh if p.grad is not None], "gradient")
        back = None
        if not halves and not carries and len(seeds) == smooth and sorted(arrived) == list(range(inputs)):
            found = _Lying(recorder, seeds, [arrived[k] for k in range(inputs)]).lies()
            recorder.settle()
            numbers = {id(held): k for k, held in enumerate(seeds)}
            freed = tuple(numbers[id(held)] for delta, held in recorder.log if delta < 0 and id(held) in numbers)
            back = Back(found, smooth, freed) if len(found) == inputs else None
        backward = recorder.take()
    return forward, freed_first + backward, input_tape, lies, back


def _given(visit: Visit, source: Any) -> tuple[_Recorder, Any]:
    """The layer's input, held by nobody else, and a recorder that knows it."""
    device = next((t.device.type for t in tensors(visit.given)), "cpu")
    recorder = _Recorder(device)
    own = map_tensors(visit.given, lambda t: t.detach().clone())
    for tensor in tensors(own):
        recorder.register(tensor, "input")
    smooth = {id(t): k for k, t in enumerate(differentiable(own))}

    def hand_on(tensor: Tensor) -> Tensor:
        if not source or id(tensor) not in smooth:
            return tensor
        result: Tensor = _Source.apply(source[0], tensor, partial(source[1], smooth[id(tensor)]))
        return result

    recorder.take()
    return recorder, map_tensors(own, hand_on)


def _flat(group: list[nn.Parameter]) -> nn.Parameter:
    """The parameters of a group laid end to end, in the type of the first one."""
    return nn.Parameter(torch.cat([p.detach().reshape(-1).to(group[0].dtype) for p in group]))


def _workspace(groups: list[list[nn.Parameter]], layers: int, factory: OptimizerFactory, device: str) -> Workspace:
    """What an optimizer step needs while it runs. The first `layers` groups are those of one layer each."""
    known: dict[tuple[Any, ...], int] = {}

    def most(parameters: list[nn.Parameter]) -> int:
        form = tuple((tuple(p.shape), p.dtype) for p in parameters)
        if form in known or not parameters:
            return known.get(form, 0)
        copies = [nn.Parameter(p.detach().clone()) for p in parameters]
        for p in copies:
            p.grad = torch.full_like(p, 1e-3)
        optimizer = factory(copies)
        optimizer.step()  # makes the state
        recorder = _Recorder(device)
        highest = 0
        with recorder:
            optimizer.step()
        level = 0
        recorder.settle()
        for delta, _ in recorder.log:
            level += delta
            highest = max(highest, level)
        known[form] = highest
        return highest

    tied = [g for g in range(layers, len(groups)) if groups[g]]
    trained = [g for g in range(len(groups)) if groups[g]]
    pairs = {
        (g, h): most(groups[g] + groups[h])
        for k, g in enumerate(trained)
        for h in {*trained[k + 1 : k + 2], *tied}
        if g < h
    }
    return Workspace(tuple(map(most, groups)), pairs, most([p for group in groups for p in group]))
