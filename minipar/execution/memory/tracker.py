"""The memory of one rank while it runs its program: every live storage, what it is, whose, and since which instruction.

    tracker = Tracker(executor, capacity=64 << 20)     takes in the layers and buffers that the executor holds
    with tracker:
        executor.run(...)
    tracker.series_of_passes()                         what happened in the last passes

The kind of a storage is known when the instruction that made it has ended:

    parameters    registered: parameters and buffers of the layers that the rank holds, frozen ones included
    gradients     a parameter's `.grad`, and the buckets that hold gradients
    optimizer     in the optimizer's state after a STEP
    buffers       a message's, until it was received, or made for a SEND or a collective
    activations   made by a FORWARD, RECOMPUTE or BACKWARD and still alive (a received message becomes one)
    data          the rows of the step that the rank works on
    temporary     freed before its instruction had ended

A storage belongs to the layer whose forward ran, or whose output's gradient was computed last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from minipar.costs.device import DeviceSpec
from minipar.errors import DeviceOutOfMemory
from minipar.execution.executor import Executor
from minipar.execution.memory.storages import FollowedStorage, Storages
from minipar.models.tensors import differentiable, tensors
from minipar.program import BACKWARDS, Op, Program, grad_shard, version_of
from minipar.trace.memory_series import Series, by_kind, mib, owners

# The method before `noting_hooks` replaces it: a split backward notes the hooks that layers register, and does not
# split where there are some. The tracker's hook may run in both halves: it only says which layer is at work.
_register_hook: Any = torch.Tensor.register_hook

SERIES = 8  # how many of the last passes keep everything

_COMPUTE = (Op.FORWARD, Op.RECOMPUTE, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)


class Tracker(Storages):
    """Follows the storages of an executor; see the top of the module. It is entered for every pass.

    capacity   bytes that the device holds: the allocation that crosses it raises DeviceOutOfMemory. It counts what
               the tracker counts, and nothing of what the driver, the data set or a check keep on the host.
    wanted     whether somebody asks for the series of passes
    """

    def __init__(self, executor: Executor, capacity: int | None = None, wanted: bool = True) -> None:
        super().__init__(executor.comm.device.type)
        self.executor, self.capacity, self.wanted = executor, capacity, wanted
        self.highest = 0
        self.passes: dict[int, Series] = {}  # the last ones, by number
        self.index, self.layer = -1, -1
        self.series = Series()
        self._fresh: list[FollowedStorage] = []  # made by the instruction that runs now
        # Its changes, whose kinds are not all known yet.
        self._open: list[tuple[float, int, FollowedStorage | None, str]] = []
        self._data = self._batches = 0
        self._hooks: list[Any] = []
        self._layer_of = {id(p): layer for layer, module in self._layers() for p in module.parameters()}
        at_home = executor.state.at_home
        self._lines = [line for line in executor.state.lines if line.number not in at_home]  # with something here
        for line in self._lines:
            self._layer_of |= {id(copy): self._layer_of.get(id(p), -1) for copy, p in line.copies()}
        for layer, module in self._layers():
            self._watch_layer(layer, module)
        self.take_in()
        self.series = Series()  # records everything from now on
        self._begin()
        executor.watch = self

    def _layers(self) -> list[tuple[int, nn.Module]]:
        """The layers that are computed on the device."""
        compute = self.executor.compute
        return [(layer, module) for layer, module in compute.layers.items() if layer not in compute.on_host]

    def take_in(self) -> None:
        """Register what the executor holds now: layers, gradients, optimizer states."""
        for layer, module in self._layers():
            for tensor in (*module.parameters(), *module.buffers()):
                self.register(tensor, "parameters", layer)
        for line in self._lines:
            for copy, _ in line.copies():
                self.register(copy, line.copies_are, self._layer_of[id(copy)])
        for views in self.executor.buckets.buffers.values():
            for buffer in views:
                self.register(buffer, "gradients")
        if self.executor.buckets.compressor is not None:
            for left_out in self.executor.buckets.compressor.residuals.values():
                self.register(left_out, "buffers")
        self._find_states()
        self._settle()

    def close(self) -> None:
        """Leave the executor and its layers as they were before."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self.executor.watch is self:
            self.executor.watch = None

    # what the executor tells -----------------------------------------------------------------------------------------

    def at(self, index: int) -> None:
        """The rank has come to an instruction: classify the storages that the one before it made."""
        self._settle()
        ins = self.executor.instructions[index]
        self.index = index
        self.layer = ins.layers[-1] if ins.op in BACKWARDS else -1
        if len(self.executor.compute.rows.parts) != self._batches:
            self._count_data()

    def _count_data(self) -> None:
        """Count the rows of a step: on the host a view of the data set's tensors, but the device holds a copy."""
        compute = self.executor.compute
        self._batches = len(compute.rows.parts)
        delta = compute.data_bytes() - self._data
        if self._batches and delta:
            self._data += delta
            self.live += delta
            self._open.append((time.perf_counter(), delta, None, "data"))
            self._check(delta)

    def received(self, content: Any) -> None:
        """A message was received: its buffers are activations from now on."""
        self.settle()
        now = time.perf_counter()
        for tensor in tensors(content):
            held = self.held_by(tensor)
            if held is not None and held.kind == "buffers":  # (one that this instruction made has no kind yet)
                self._open.append((now, -held.nbytes, held, "buffers"))
                self._open.append((now, held.nbytes, held, "activations"))
                held.kind = "activations"

    def given(self, tensor: torch.Tensor) -> None:
        """A tensor is the host's from now on, and does not count."""
        self.settle()
        held = self.held_by(tensor)
        if held is not None:
            self.live -= held.nbytes
            self._open.append((time.perf_counter(), -held.nbytes, held, held.kind))
            self.leave(held)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """While entered, new memory belongs to the host and does not count."""
        before, self._taking = self._taking, False
        try:
            yield
        finally:
            self._taking = before  # (it may be entered within itself)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if error[0] is not None:
            self.close()  # so that nothing of the rank outlives the error
            return
        self._settle()
        self.index = self.layer = -1
        if self.device_type == "cuda":
            self.series.device.update(allocator(self.executor.comm.device))
        number = max(self.passes, default=-1) + 1
        self.passes[number], self.series = self.series, Series()
        self.passes.pop(number - SERIES, None)
        self._begin()

    @property
    def last(self) -> Series | None:
        """The series of the last pass, if it is wanted."""
        found = self.series_of_passes()
        return found[max(found)] if found else None

    def series_of_passes(self) -> dict[int, Series]:
        """The series, by pass, if they are wanted. The `highest` of each is the most that any pass needed."""
        found = self.passes if self.wanted else {}
        return {k: replace(series, highest=self.highest) for k, series in found.items()}

    def _begin(self) -> None:
        before: dict[tuple[str, int], int] = {("data", -1): self._data} if self._data else {}
        for held in self.everything():
            owner = held.kind, held.layer
            before[owner] = before.get(owner, 0) + held.nbytes
        self.series.before.update(before)

    # what the storages tell ------------------------------------------------------------------------------------------

    def changed(self, held: FollowedStorage, delta: int) -> None:
        """A storage was allocated, freed, or has another size now."""
        self._open.append((time.perf_counter(), delta, held, held.kind))
        if not held.kind and delta == held.nbytes:
            held.layer = self.layer
            self._fresh.append(held)
        if delta > 0:
            self._check(delta)

    def _check(self, request: int) -> None:
        self.highest = max(self.highest, self.live)
        if self.capacity is not None and self.live > self.capacity:
            raise self._full(request)

    def _settle(self) -> None:
        """The instruction has ended: decide the kind of each storage that it made."""
        self.settle()
        executor = self.executor
        ins = executor.instructions[self.index] if self.index >= 0 else None
        if ins is not None and ins.op is Op.STEP:
            self._find_states()
            self._find_versions()
        elif ins is not None and ins.op is not Op.FORWARD:
            moved = ins.reads + ins.writes  # (only the last piece of a gradient writes it)
            self._find_gradients(value.index for value in moved if value.kind in ("grad", "grad_shard"))
        for held in self._fresh:
            if not held.kind:
                if held() is None:
                    held.kind = "temporary"
                elif ins is None or ins.op not in _COMPUTE:
                    held.kind = "buffers" if ins is None or ins.op is not Op.STEP else "temporary"
                else:
                    held.kind = "activations"
        self._fresh.clear()
        self._flush()

    def _flush(self) -> None:
        for moment, delta, held, kind in self._open:
            own_kind = held.kind if held is not None else ""
            layer = held.layer if held is not None else -1
            self.series.add(moment, self.index, delta, kind or own_kind or "temporary", layer)
        self._open.clear()

    def _find_gradients(self, groups: Iterator[int]) -> None:
        for g in groups:
            line, state = self.executor.state.lines[g], self.executor.state
            layer = self._layer_of.get(id(line.params[0]), -1) if line.params else -1
            for p in line.params:
                if p.grad is not None:
                    self._name(p.grad, "gradients", self._layer_of.get(id(p), -1))
            for part in state.live.get(grad_shard(g), ()):
                self._name(part, "gradients", layer)

    def _find_states(self) -> None:
        for optimizer in self.executor.optimizers.values():
            for p, state in optimizer.state.items():
                for tensor in state.values():
                    if isinstance(tensor, torch.Tensor) and tensor.device.type == self.device_type:
                        self._name(tensor, "optimizer", self._layer_of.get(id(p), -1))

    def _find_versions(self) -> None:
        for value, found in self.executor.live.items():
            if version_of(value) >= 0:
                for p, tensor in zip(self.executor.groups[value.index], found, strict=True):
                    self._name(tensor, "parameters", self._layer_of.get(id(p), -1))

    def _name(self, tensor: torch.Tensor, kind: str, layer: int) -> None:
        held = self.held_by(tensor)
        if held is None:
            self.register(tensor, kind, layer)
        elif not held.kind:
            held.kind, held.layer = kind, layer

    # layers ----------------------------------------------------------------------------------------------------------

    def _watch_layer(self, layer: int, module: nn.Module) -> None:
        def before(module: nn.Module, args: Any) -> None:
            self.layer = layer

        def after(module: nn.Module, args: Any, output: Any) -> None:
            for tensor in differentiable(output):
                if tensor.requires_grad:
                    _register_hook(tensor, partial(_at_layer, self, layer))

        self._hooks += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]

    def _full(self, request: int) -> Exception:
        executor = self.executor
        self._find_gradients(iter(range(len(executor.groups))))
        self._find_states()
        ins = executor.instructions[self.index] if self.index >= 0 else None
        unknown = "activations" if ins is not None and ins.op in (Op.FORWARD, Op.RECOMPUTE) else "temporary"
        found: dict[tuple[str, int], int] = {("data", -1): self._data} if self._data else {}
        for held in self.everything():
            owner = held.kind or unknown, held.layer
            found[owner] = found.get(owner, 0) + held.nbytes
        doing = "holding its layers and buffers" if ins is None else str(ins)
        assert self.capacity is not None
        return out_of_memory(executor.program, executor.comm.rank, doing, found, request, self.capacity)


def _at_layer(tracker: Tracker, layer: int, gradient: Any) -> None:
    tracker.layer = layer


def allocator(device: torch.device) -> dict[str, int]:
    """What CUDA's allocator has given out and reserved, now and at most since the last call."""
    stats = {
        "allocated": torch.cuda.memory_allocated(device),
        "most_allocated": torch.cuda.max_memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
        "most_reserved": torch.cuda.max_memory_reserved(device),
    }
    torch.cuda.reset_peak_memory_stats(device)
    return stats


# for a whole run ------------------------------------------------------------------------------------------------------


Watching = Callable[[Executor], Tracker]


def watching_of(series: bool, device: DeviceSpec | None) -> Watching | None:
    """What follows the memory of a rank's executor from now on: if its `series` are wanted, or if an emulated device
    limits it. `execute` sends it to its ranks; there it raises DeviceOutOfMemory if the layers do not fit."""
    capacity = None if device is None else device.memory
    return partial(Tracker, capacity=capacity, wanted=series) if series or capacity is not None else None


# when the device is full ----------------------------------------------------------------------------------------------


def out_of_memory(
    program: Program, rank: int, doing: str, held: Mapping[tuple[str, int], int], request: int, capacity: int
) -> DeviceOutOfMemory:
    """The error of an allocation of `request` bytes, which `held`, bytes by (kind, layer), includes already."""
    kinds = {kind: size for kind, size in by_kind(dict(held)).items() if size}
    needed = sum(kinds.values())
    largest = sorted(kinds, key=lambda kind: -kinds[kind])
    ways = ways_out(program, kinds, needed)
    summary = ", ".join(f"{kind} {mib(kinds[kind])}" for kind in largest[:3])
    error = DeviceOutOfMemory(
        f"rank {rank}: {doing} needs {mib(request)} more, which makes {mib(needed)} of the {mib(capacity)} that its "
        f"device holds ({summary}); possible: {'; '.join(ways)}",
        "\n".join(["largest owners:", *(f"  {_owner(*one)}" for one in owners(dict(held))[:6])]),
    )
    error.rank, error.instruction, error.capacity, error.needed = rank, doing, capacity, needed
    error.by_kind, error.ways_out = kinds, ways
    return error


def _owner(kind: str, layer: int, size: int) -> str:
    return f"{mib(size):>12}  {kind}" + (f" of layer {layer}" if layer >= 0 else "")


# Changes of a plan that make a kind smaller. `train` says in their place which plans are predicted to fit.
_ROWS = "a smaller batch, or more micro-batches of fewer rows each"
_SMALLER = {
    "parameters": "zero=3 over more replicas, or a larger pp: fewer model states on each rank",
    "gradients": "zero=2 over more replicas: gradients in slices",
    "optimizer": "zero=1 over more replicas, or offload=optimizer: its states in slices, or on the host",
    "activations": "checkpoint=sqrt: recompute activations instead of keeping them",
}


def ways_out(program: Program, kinds: Mapping[str, int], needed: int) -> tuple[str, ...]:
    """Three changes, those for the largest kinds first."""
    known = {kind: way for kind, way in _SMALLER.items() if program.serving is None or kind == "activations"}
    large = [known.get(kind, _ROWS) for kind in sorted(kinds, key=lambda kind: -kinds[kind])]
    return tuple(dict.fromkeys([*large, _ROWS, f"a device with at least {mib(needed)}", "a smaller model"]))[:3]
