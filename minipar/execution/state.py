"""Model state of one rank: the entries of parameters, gradients and versions in its table, and what is done to them.

    param(2)            the tensors of the layers' parameters, or the flat storage that they are views of
    param(2) v3         a version of them; the layers use the one that an instruction reads
    param_shard(2)      this rank's slice, and all frozen parameters
    grad_shard(2)       its slice of the gradient: a part of what one sum of several groups has given
    host param(2) ...   copies in slower tiers (copies.py)

Autograd keeps the gradient of a parameter as its `.grad`, and an optimizer its own states: `contents` finds these
there. A parameter that nothing uses has no gradient, as in plain torch (`comm/missing.py`): it does not decay. Of a
slice (ZeRO) the optimizer has a part for each parameter. Only where what is sent is the largest part of a sum
(compress=topk, powersgd), an unused parameter has a gradient of zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minipar.comm.buckets import Buckets
from minipar.comm.communicator import Communicator
from minipar.comm.handles import Handle
from minipar.comm.missing import is_missing
from minipar.execution.correction import ByStaleness
from minipar.execution.lines import Line, Place, pack_gradients
from minipar.execution.updating import OptimizerPart, Update
from minipar.models.tensors import count_bytes, dtype_named, resize
from minipar.program import (
    Instruction,
    Op,
    Program,
    Value,
    grad,
    grad_shard,
    home,
    norm,
    optimizer_shard,
    param,
    tier,
    version_of,
)
from minipar.program.verify.staleness import delay
from minipar.strategies.rewriting import computed_on_host

Table = dict[Value, Any]  # every value that a rank has now
_GRADIENTS = ("grad", "grad_shard")
_STATES = ("optimizer_state", "optimizer_shard")


class State:
    """What one rank holds of the model, kept from step to step.

    live        the rank's table
    groups[g]   trainable parameters of group g that this rank's layers use
    lines[g]    the forms in which the rank has them
    held        the values that it has between steps
    shown[g]    the version that the layers use, where instructions name versions of a group
    measured    the squares of each step's gradients, if somebody asks
    """

    def __init__(
        self,
        program: Program,
        comm: Communicator,
        groups: list[list[nn.Parameter]],
        update: Update,
        names: Mapping[int, str],
        live: Table,
    ) -> None:
        row = program.ranks[comm.rank]
        self.program, self.comm, self.groups, self.update, self.live = program, comm, groups, update, live
        self.names = names
        self.held = program.state[comm.rank] if program.state else frozenset()
        _, self.at_home = computed_on_host(row)  # groups of layers that are computed on the host
        self.lines = lines_of(program, comm, groups, self.at_home)
        self.returning = {v for ins in row if ins.op in (Op.FETCH, Op.ALL_GATHER) for v in ins.writes} - self.held
        for value in self.held:
            if tier(value) == "device" and home(value).kind in ("param", "param_shard"):
                live[value] = self.place_of(value)
        self.shown: dict[int, Value] = {v.index: v for v in self.held if version_of(v) >= 0}
        self.sums: dict[tuple[int, ...], Tensor] = {}  # of the gradients of a bucket, this rank's slices
        self.squares = torch.zeros(1, dtype=torch.float64, device=comm.device)
        sizes = [sum(group.tensors) for group in program.groups]
        self.buckets = Buckets(row, groups, sizes, comm, program.compress, program.algorithm or None)
        steps = dict.fromkeys(ins.layers for ins in row if ins.op is Op.STEP)
        for g in dict.fromkeys(g for layers in steps for g in layers):
            self.lines[g].give(names)
        age = delay(program, comm.rank) if isinstance(update.factory, ByStaleness) else None
        self.updates: dict[tuple[int, ...], OptimizerPart] = {
            layers: update.part([part for g in layers for part in self.lines[g].updated], age) for layers in steps
        }
        self.optimizers = {layers: part.optimizer for layers, part in self.updates.items()}
        self.measured: dict[int, list[Tensor]] | None = None

    # the table -------------------------------------------------------------------------------------------------------

    def contents(self, value: Value) -> list[Tensor | None]:
        """The tensors of an entry of model state: of a gradient one for each parameter, None where it has none."""
        line, kind = self.lines[value.index], home(value).kind
        if value in self.live and not (kind in _STATES and tier(value) == "host"):
            return list(self.live[value])
        if kind == "grad" and (tier(value) == "device" or value.index in self.at_home):
            return [p.grad for p in line.params]
        if kind in _STATES:
            return list(self.optimizer_tensors(value.index))
        return [None] * len(line.trained)

    def place_of(self, value: Value) -> list[Tensor]:
        """Where parameters lie on the device, whether they are there now or not."""
        line = self.lines[value.index]
        gathered = value.kind == "param" and line.place is not None
        return [line.flat] if gathered else line.here

    def begin(self) -> None:
        """A new pass through the program: the newest version is its version 0."""
        for g in self.shown:
            alive = sorted(v for v in self.live if v.kind == "param" and v.index == g)
            newest = [self.live.pop(v) for v in alive][-1]
            self.live[param(g, 0)] = newest
            self._show(param(g, 0))

    def show(self, value: Value) -> None:
        """Let the layers use this version of their parameters."""
        if self.shown.get(value.index, value) != value:
            self._show(value)

    def _show(self, value: Value) -> None:
        self.lines[value.index].show(self.live[value])
        self.shown[value.index] = value

    def release(self, value: Value) -> None:
        """The program frees parameters: a version, but never the newest; or what comes back before it is read again."""
        if version_of(value) >= 0:
            newest = max(v for v in self.live if v.kind == "param" and v.index == value.index)
            if value != newest and self.live.pop(value, None) and self.shown[value.index] == value:
                self._show(newest)
        elif value in self.returning and value in self.live:
            resize(self.live.pop(value), False)

    # collectives -----------------------------------------------------------------------------------------------------

    def start(self, ins: Instruction) -> list[Handle]:
        """Start a collective; what it writes counts when all handles were waited for."""
        if ins.op is Op.ALL_REDUCE and ins.reads[0].kind == "param":
            return self._average(ins)
        if ins.op is Op.REDUCE_SCATTER:
            return self._reduce_scatter(ins)
        if ins.op is Op.ALL_GATHER:
            return [handle for g in ins.layers for handle in self._gather(param(g), ins.group)]
        if ins.op is Op.NORM:
            self.squares.zero_()
            self._add_squares(ins.reads, self.squares)
            return [self.comm.iallreduce(self.squares, ins.group)]
        return self.buckets.all_reduce(ins, self.comm)

    def _average(self, ins: Instruction) -> list[Handle]:
        """Average parameters over the replicas, in one message for each dtype."""
        handles: list[Handle] = []
        whole = [p for g in ins.layers for p in self.lines[g].trained]
        for dtype in dict.fromkeys(p.dtype for p in whole):
            params = [p for p in whole if p.dtype == dtype]
            flat = torch.cat([p.detach().reshape(-1) for p in params]).div_(self.program.replicas)
            views = [v.view(p.shape) for v, p in zip(flat.split([p.numel() for p in params]), params, strict=True)]

            def spread(params: list[nn.Parameter] = params, views: list[Tensor] = views) -> None:
                torch._foreach_copy_([p.data for p in params], views)
                for g in ins.layers:
                    self.lines[g].round_into([p.data for p in self.lines[g].params])

            handles.append(self.comm.iallreduce(flat, ins.group, str(ins)).then(spread))
        return handles

    def _reduce_scatter(self, ins: Instruction) -> list[Handle]:
        """Sum the gradients of some groups, and keep this rank's slices. An entry is a part of the sum of all; it adds
        to the sum that it reads."""
        lines = [self.lines[g] for g in ins.layers]
        message = pack_gradients(lines, self.comm.device)
        for p in (p for line in lines for p in line.params):
            p.grad = None
        if grad_shard(ins.layers[0]) in ins.reads:
            return [self.comm.ireduce_scatter(message, self.sums[ins.layers], ins.group, True)]
        sizes = [line.size for line in lines]
        total = torch.empty(sum(sizes), dtype=lines[0].part.dtype, device=self.comm.device)
        self.sums[ins.layers] = total
        self.live.update(
            {grad_shard(line.number): [part] for line, part in zip(lines, total.split(sizes), strict=True)}
        )
        return [self.comm.ireduce_scatter(message, total, ins.group, False)]

    def _gather(self, value: Value, ranks: tuple[int, ...]) -> list[Handle]:
        """Start to gather the parameters of layers from the slices of all ranks."""
        line = self.lines[value.index]
        resize([line.flat], True)
        self.live[value] = [line.flat]
        return self.comm.iall_gather(line.part.data, line.flat, ranks)

    def _add_squares(self, values: Iterable[Value], total: Tensor) -> None:
        """Add the squares of all gradients among some values, each counted once: a slice here, or the part of this one
        of its holders."""
        for value in values:
            for gradient in self.contents(value) if home(value).kind in _GRADIENTS else ():
                if gradient is not None:
                    square = torch.linalg.vector_norm(gradient).double().to(total.device) ** 2
                    total += square / self.lines[value.index].holders

    # the step --------------------------------------------------------------------------------------------------------

    def prepare(self, ins: Instruction) -> None:
        """Before a STEP: give the optimizer its gradients, clipped if the STEP reads their norm, and room for the next
        version."""
        found = {v.index: v for v in ins.reads if home(v).kind in _GRADIENTS}
        for g in ins.layers:
            line, gradients = self.lines[g], self.contents(found.get(g, grad(g)))
            for k in self.buckets.missing.pop(g, ()) if line.place is None else ():
                gradient = gradients[k]
                if gradient is not None and is_missing(gradient):
                    gradients[k] = None
            line.take(gradients, line.unused(gradients[0]) if line.absent and gradients[0] is not None else ())
        for value in ins.writes if self.shown else ():
            if version_of(value) >= 0:
                self._make_room(value, ins.frees)
        if self.measured is not None:
            place = torch.device("cpu") if ins.stream == "host" else self.comm.device
            total = torch.zeros(1, dtype=torch.float64, device=place)
            self._add_squares(found.values(), total)
            self.measured.setdefault(ins.step, []).append(total)
        if norm() in ins.reads and self.program.clip is not None:
            self._clip([p.grad for g in ins.layers for p in self.lines[g].trained if p.grad is not None])

    def give_zeros(self, ins: Instruction) -> None:
        """Of a replica that trains by itself and has no rows in this step: so decay and momentum go on."""
        for g in ins.layers:
            for own in self.lines[g].trained:
                own.grad = torch.zeros_like(own)

    def _make_room(self, value: Value, frees: Sequence[Value]) -> None:
        """Room for the next version, in the place of the newest one if nothing needs that any more."""
        line, newest = self.lines[value.index], value._replace(step=value.step - 1)
        if newest in frees:
            self.live[value] = self.live.pop(newest)
            if self.shown[value.index] == newest:
                self.shown[value.index] = value
        else:
            self.live[value] = [tensor.clone() for tensor in self.live[newest]]
        for own, tensor in zip(line.trained, self.live[value], strict=True):
            if not line.wide:
                own.data = tensor

    def _clip(self, gradients: Sequence[Tensor]) -> None:
        assert self.program.clip is not None
        if self.squares.device.type == "cpu":
            factor = min(1.0, self.program.clip / (self.squares.sqrt().item() + 1e-6))
            for gradient in gradients if factor < 1 else ():
                gradient.mul_(factor)
            return
        wanted = self.program.clip / (self.squares.sqrt() + 1e-6)  # stays on the device: the host does not wait for it
        wanted = torch.where(wanted < 1, wanted, 1.0)
        for gradient in gradients:
            gradient.mul_(wanted.to(gradient.device))

    def step(self, ins: Instruction) -> None:
        """Update what a STEP works on, and free its gradients."""
        part, schedule = self.updates[ins.layers], self.update.schedule
        if schedule is not None:
            part.follow(schedule.at(part.done))
        part.done += 1
        if part.which:
            part.optimizer.step()
        versions = {v.index: v for v in ins.writes if version_of(v) >= 0}
        for g in ins.layers:
            line = self.lines[g]
            self.forget_gradient(g)
            line.round_into(self.live[versions[g]] if g in versions else [p.data for p in line.params])

    def forget_gradient(self, g: int) -> None:
        """Free the device's gradient of a group, which was used, or is on its way to the host."""
        self.lines[g].forget_gradients()
        self.buckets.filled.discard(g)  # (it begins again from nothing)
        if self.live.pop(grad_shard(g), None):
            self.sums = {key: sum_ for key, sum_ in self.sums.items() if any(grad_shard(k) in self.live for k in key)}

    # questions -------------------------------------------------------------------------------------------------------

    def optimizer_tensors(self, g: int) -> list[Tensor]:
        """What the optimizer keeps for a group, in a fixed order, single numbers left out."""
        states = self._states(g)
        return [t for state in states for t in state.values() if isinstance(t, Tensor) and t.dim()]

    def _states(self, g: int) -> list[dict[str, Any]]:
        """What the optimizer keeps for each part of a group."""
        given = [part.parameter for part in self.lines[g].updated]
        return [o.state[p] for o in self.optimizers.values() for p in given if p in o.state]

    def size(self, value: Value) -> int:
        """Bytes of a value of no micro-batch, as measured."""
        if value.kind == "norm":
            return count_bytes(self.squares)
        if value.kind == "residual":
            return count_bytes(self.groups[value.index])
        states = self._states(value.index) if value.kind in _STATES else []
        return sum(count_bytes(list(state.values())) for state in states) + self.lines[value.index].nbytes(value.kind)


def lines_of(
    program: Program, comm: Communicator, groups: list[list[nn.Parameter]], at_home: frozenset[int]
) -> list[Line]:
    """The line of each group on a rank.

    at_home   groups of layers that are computed on the host: the optimizer works there on the layers' own parameters
    """
    row = program.ranks[comm.rank]
    narrow = dtype_named(program.narrow) if program.narrow else None
    updates = any(ins.op is Op.STEP for ins in row)
    wide = bool(narrow) and updates and program.serving is None  # (else the servers have the wide ones, or nobody)
    held = program.state[comm.rank] if program.state else frozenset()
    sliced = {g for g in program.sharded if optimizer_shard(g) in set(map(home, held))}
    versions = {v.index for v in held if version_of(v) >= 0}
    on_host = {g for ins in row if ins.op is Op.STEP and ins.stream == "host" for g in ins.layers} - at_home
    found: list[Line] = []
    for g, params in enumerate(groups):
        shards, place = program.part(comm.rank, g, "S")[1], None
        holders = max(1, program.holders[g] // shards)
        if g in sliced:
            ranks, holders = program.slicing(g, comm.rank), program.sharing // shards
            place = Place(ranks.index(comm.rank), len(ranks), comm.device, g in program.scattered)
        separate = g in versions or program.in_flight is not None
        found.append(Line(g, params, program.groups[g], holders, place, narrow, wide, g not in on_host, separate))
    return found
