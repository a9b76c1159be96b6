"""Model state of one rank: parameters, gradients and optimizer, each whole or a slice, and the collectives on them.

    group g, N = 2      flat    [ weight . . . . . . | bias . 0 ]     every p.data is a view of it
                        part                  [ . . . . . . . . ]     an nn.Parameter, on which the optimizer works

Where parameters are gathered (ZeRO-3) the flat storage has size 0 in between. It is resized, never replaced: what
autograd saved (the transpose of a weight) is a view of this storage, and finds its values there again.

With precision=bf16 flats and parameters are bfloat16; the optimizer has float32 ones, slices or whole copies, of which
the former are made anew after every STEP. Gradients travel as bfloat16, and slices are added up in float32.

A parameter that nothing uses gets a gradient of zero, as soon as gradients are sent (weight decay then acts on it).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minipar.comm.buckets import Buckets
from minipar.comm.communicator import Communicator
from minipar.comm.handles import Handle, Then
from minipar.execution.correction import ByStaleness
from minipar.execution.updating import Count, Part, Piece, Run, Update, whole_piece
from minipar.execution.weight_stash import Stash
from minipar.models.tensors import count_bytes
from minipar.program import (
    Instruction,
    Op,
    Program,
    Value,
    grad_shard,
    home,
    norm,
    optimizer_shard,
    param,
    version_of,
)
from minipar.program.verify.staleness import delay
from minipar.strategies.passes import host_layers


class Slice(NamedTuple):
    """A run of neighbouring elements of a tensor of this shape, from `start` on, in memory order."""

    shape: tuple[int, ...]
    start: int
    values: Tensor


class State:
    """What one rank holds of the model, kept from step to step.

    groups[g]   trainable parameters of group g that this rank's layers use
    parts[g]    this rank's slice of them, end to end, where the group is sharded
    wide[g]     float32 copies of them with precision=bf16, where the group is not sharded
    stash       versions of the parameters of an asynchronous program
    masters[g]  copies on the host of what this rank owns of them, where STEP works on the host
    pieces[g]   what the optimizer updates of them: the parameters, the slice, or runs of it where its parameters are in
                several groups of the user's optimizer
    """

    def __init__(
        self,
        program: Program,
        comm: Communicator,
        groups: list[list[nn.Parameter]],
        update: Update,
        names: Mapping[int, str],
    ) -> None:
        instructions = program.ranks[comm.rank]
        self.program, self.comm, self.groups = program, comm, groups
        self.update, self.names = update, names
        self.narrow = program.precision == "bf16"
        self.flats: dict[int, Tensor] = {}
        self.parts: dict[int, nn.Parameter] = {}
        held = set(map(home, program.state[comm.rank])) if program.state else set()
        for g in sorted(program.sharded):
            if optimizer_shard(g) in held:
                self._slice(g)
        _, self.at_home = host_layers.computed(instructions)  # groups of layers that are computed on the host
        self.masters: dict[int, list[nn.Parameter]] = {
            g: [nn.Parameter(p.detach().to("cpu", copy=True)) for p in self.owned(g)]
            for ins in instructions
            if ins.op is Op.STEP and ins.stream == "host"
            for g in ins.layers
            if g not in self.at_home
        }
        self.wide: dict[int, list[nn.Parameter]] = {}
        for g, params in enumerate(groups if self.narrow else ()):
            if g not in self.masters and g not in self.parts:
                self.wide[g] = [nn.Parameter(p.detach().clone()) for p in params]
            for p in params if g not in self.parts else ():
                p.data = p.data.to(torch.bfloat16)
        self.stash = Stash(program, comm.rank, groups)
        self.sums: dict[tuple[int, ...], Tensor] = {}  # of the gradients of a bucket, this rank's slices
        self.squares = torch.zeros(1, dtype=torch.float64, device=comm.device)
        sizes = [sum(group.tensors) for group in program.groups]
        self.buckets = Buckets(instructions, groups, sizes, comm, program.compress, program.algorithm or None)
        steps = dict.fromkeys(ins.layers for ins in instructions if ins.op is Op.STEP)
        self.cuts: dict[int, list[tuple[nn.Parameter, int, int]]] = {}
        self.pieces = {g: self._pieces(g) for layers in steps for g in layers}
        late = delay(program, comm.rank) if isinstance(update.factory, ByStaleness) else None
        self.updates: dict[tuple[int, ...], Part] = {
            layers: update.part([piece for g in layers for piece in self.pieces[g]], late) for layers in steps
        }
        self.optimizers = {layers: part.optimizer for layers, part in self.updates.items()}
        self.measured: dict[int, float] | None = None  # of each step's gradients the squares, if somebody asks
        self.count = Count(dict.fromkeys(steps, 0))

    def _pieces(self, g: int) -> list[Piece]:
        """What the optimizer updates of a group."""
        if g not in self.parts:
            pairs = zip(self.groups[g], self.trained(g), strict=True)
            return [whole_piece(self.names[id(p)], own) for p, own in pairs]
        part, group_of = self.trained(g)[0], self.update.group_of
        names = tuple(self.names[id(p)] for p in self.groups[g])
        runs = [Run(self.names[id(p)], tuple(p.shape), begin, end, at) for p, begin, end, at in self.places(g)]
        if len({group_of.get(name) for name in names}) == 1:
            return [Piece(part, names, tuple(runs), True)]
        found: list[Piece] = []
        self.cuts[g] = []
        for run in runs:
            last = found[-1] if found else None
            if last is not None and group_of.get(last.names[0]) == group_of.get(run.name):
                before = last.runs[-1]
                place = before.place + before.end - before.begin
                found[-1] = last._replace(names=(*last.names, run.name), runs=(*last.runs, run._replace(place=place)))
                own, begin, _ = self.cuts[g][-1]
                self.cuts[g][-1] = own, begin, run.place + run.end - run.begin
            else:
                own = nn.Parameter(part.data[:0])
                found.append(Piece(own, (run.name,), (run._replace(place=0),), True))
                self.cuts[g].append((own, run.place, run.place + run.end - run.begin))
        for own, begin, end in self.cuts[g]:
            own.data = part.data[begin:end]
        return found

    def _slice(self, g: int) -> None:
        """Lay a group's parameters end to end, and take this rank's slice."""
        params = self.groups[g]
        n, k = self.program.replicas, self.program.replica(self.comm.rank)
        count = sum(p.numel() for p in params)
        size = max(1, -(-count // n))
        flat = torch.zeros(size * n, dtype=params[0].dtype, device=self.comm.device)
        torch.cat([p.data.reshape(-1) for p in params], out=flat[:count])
        part = flat[k * size : (k + 1) * size]
        apart = self.narrow or g in self.program.scattered
        self.parts[g] = nn.Parameter(part.clone() if apart else part)
        if self.narrow:
            flat = flat.to(torch.bfloat16)
        start = 0
        for p in params:
            p.data = flat[start : start + p.numel()].view(p.shape)
            start += p.numel()
        self.flats[g] = flat
        self.release(param(g))

    def owned(self, g: int) -> Sequence[nn.Parameter]:
        """What a rank updates of a group: its slice, or the parameters themselves."""
        return [self.parts[g]] if g in self.parts else self.groups[g]

    def trained(self, g: int) -> Sequence[nn.Parameter]:
        """What the optimizer works on for a group: what the rank owns, or copies of it, on the host or in float32."""
        return self.masters.get(g) or self.wide.get(g) or self.stash.leading.get(g) or self.owned(g)

    def release(self, value: Value) -> None:
        """Let the gathered parameters of a group go."""
        g = value.index
        if version_of(value) >= 0:
            self.stash.release(value)
        elif value.kind == "param" and g in self.parts and g in self.program.scattered:
            self.flats[g].untyped_storage().resize_(0)

    # collectives -----------------------------------------------------------------------------------------------------

    def start(self, ins: Instruction, share: float = 1.0) -> list[Handle]:
        """Start a collective; what it writes counts when all handles were waited for.

        share   where parameters are averaged, how much those of this rank weigh
        """
        if ins.op is Op.ALL_REDUCE and ins.reads[0].kind == "param":
            return self._average(ins, share)
        if ins.op is Op.REDUCE_SCATTER:
            return [self._reduce_scatter(ins)]
        if ins.op is Op.ALL_GATHER:
            return [handle for g in ins.layers for handle in self._all_gather(g, ins.group)]
        if ins.op is Op.NORM:
            return [self._norm(ins)]
        return self.buckets.all_reduce(ins, self.comm)

    def _average(self, ins: Instruction, share: float) -> list[Handle]:
        """Average parameters over the replicas, in one message for each dtype: a sum of what was weighed before."""
        handles: list[Handle] = []
        whole = [p for g in ins.layers for p in self.trained(g)]
        for dtype in dict.fromkeys(p.dtype for p in whole):
            params = [p for p in whole if p.dtype == dtype]
            flat = torch.cat([p.detach().reshape(-1) for p in params]).mul_(share)
            views = [v.view(p.shape) for v, p in zip(flat.split([p.numel() for p in params]), params, strict=True)]

            def spread(params: list[nn.Parameter] = params, views: list[Tensor] = views) -> None:
                torch._foreach_copy_([p.data for p in params], views)
                self._narrow(ins.layers)

            handles.append(Then(self.comm.iallreduce(flat, ins.group, str(ins)), spread))
        return handles

    def _narrow(self, groups: Iterable[int]) -> None:
        """What layers compute with, anew from what the optimizer works on, with precision=bf16."""
        for g in groups:
            for own, p in zip(self.wide.get(g, ()), self.groups[g], strict=False):
                p.data.copy_(own.data)

    def _all_gather(self, g: int, ranks: tuple[int, ...]) -> list[Handle]:
        flat = self.flats[g]
        flat.untyped_storage().resize_(flat.numel() * flat.element_size())
        return self.comm.iall_gather(self.parts[g].data, flat, ranks)

    def _reduce_scatter(self, ins: Instruction) -> Handle:
        parts = [self.parts[g] for g in ins.layers]
        total = sum(part.numel() for part in parts)
        packed = self._pack(ins.layers, total)
        add = grad_shard(ins.layers[0]) in ins.reads
        if not add:
            self.sums[ins.layers] = torch.empty(total, dtype=parts[0].dtype, device=self.comm.device)
            places = self.sums[ins.layers].split([part.numel() for part in parts])
            for part, place in zip(parts, places, strict=True):
                part.grad = place
        return self.comm.ireduce_scatter(packed, self.sums[ins.layers], ins.group, add)

    def _pack(self, groups: tuple[int, ...], total: int) -> Tensor:
        """Whole gradients of some groups in one message: first what goes to the first rank, and so on; they are freed.

        A parameter may lie across the border of two slices.
        """
        n = self.program.replicas
        packed = torch.empty(n * total, dtype=self.groups[groups[0]][0].dtype, device=self.comm.device)
        rows = packed.view(n, total)
        grads: list[Tensor] = []
        places: list[Tensor] = []
        column = 0
        for g in groups:
            size = self.parts[g].numel()
            start = 0
            for p in self.groups[g]:
                grad = None if p.grad is None else p.grad.reshape(-1)
                for begin, end, rank, place in _runs(start, p.numel(), size):
                    target = rows[rank, column + place :][: end - begin]
                    if grad is None:  # a parameter that nothing used, or micro-batches without rows
                        target.zero_()
                    else:
                        grads.append(grad[begin:end])
                        places.append(target)
                p.grad = None
                start += p.numel()
            for begin, end, rank, place in _runs(start, n * size - start, size):
                rows[rank, column + place :][: end - begin].zero_()
            column += size
        if grads:
            torch._foreach_copy_(places, grads)
        return packed

    def _norm(self, ins: Instruction) -> Handle:
        """Sum the squares of all gradients, each counted once: a slice here, or the part of this one of its holders."""
        self.squares.zero_()
        self._add_squares(ins.layers, self.squares)
        return self.comm.iallreduce(self.squares, ins.group)

    def _add_squares(self, groups: Iterable[int], total: Tensor) -> None:
        """Add the squares of this rank's part of the gradients of some groups."""
        for g in groups:
            holders = 1 if g in self.parts else max(1, self.program.holders[g])
            for p in self.owned(g) if g in self.wide else self.trained(g):
                if p.grad is not None:
                    total += torch.linalg.vector_norm(p.grad).double().to(total.device) ** 2 / holders

    # the step --------------------------------------------------------------------------------------------------------

    def scale(self, ins: Instruction) -> None:
        """Before a STEP: clip the gradients, if it reads their norm; make room for the next version."""
        self.stash.make_next(ins)
        for g in ins.layers:
            for own, p in zip(self.wide.get(g, ()), self.groups[g], strict=False):
                own.grad = None if p.grad is None else p.grad.to(own.dtype)
        if self.measured is not None:
            total = torch.zeros(1, dtype=torch.float64)
            self._add_squares(ins.layers, total)
            self.measured[ins.step] = self.measured.get(ins.step, 0.0) + total.item()
        if norm() not in ins.reads or self.program.clip is None:
            return
        factor = min(1.0, self.program.clip / (self.squares.sqrt().item() + 1e-6))
        if factor < 1:
            for p in (p for g in ins.layers for p in self.trained(g) if p.grad is not None):
                assert p.grad is not None
                p.grad.mul_(factor)

    def step(self, ins: Instruction) -> None:
        """Update what a STEP works on, and let its gradients go."""
        part, schedule = self.updates[ins.layers], self.update.schedule
        number = self.count.next(ins.layers)
        if schedule is not None:
            part.follow(schedule.at(number))
        for g in ins.layers:
            for own, begin, end in self.cuts.get(g, ()):
                base = self.trained(g)[0]
                own.data = base.data[begin:end]
                own.grad = None if base.grad is None else base.grad[begin:end]
        if part.which:
            part.optimizer.step()
        for g in ins.layers:
            for own in (*self.wide.get(g, ()), *(own for own, _, _ in self.cuts.get(g, ()))):
                own.grad = None
        self._narrow(ins.layers)
        self.buckets.clear(ins.layers)
        self.stash.forget_gradients(ins.layers)
        for g in ins.layers:
            if g in self.parts:
                self.parts[g].grad = None
            for p in self.masters.get(g, ()):
                p.grad = None
        self.sums = {groups: sums for groups, sums in self.sums.items() if groups[0] not in ins.layers}

    def forget_gradient(self, g: int) -> None:
        """Let the gradient of a group go from the device: it is on its way to the host."""
        self.buckets.clear([g])
        if g in self.parts:
            self.parts[g].grad = None
            self.sums = {
                groups: sums
                for groups, sums in self.sums.items()
                if any(self.parts[k].grad is not None for k in groups)
            }

    def optimizer_tensors(self, g: int) -> list[Tensor]:
        """What the optimizer keeps for a group, in a fixed order, single numbers left out."""
        states = self._states(g)
        return [t for state in states for t in state.values() if isinstance(t, Tensor) and t.dim()]

    def _states(self, g: int) -> list[dict[str, Any]]:
        """What the optimizer keeps for each piece of a group."""
        pieces = [piece.parameter for piece in self.pieces.get(g, ())]
        return [o.state[p] for o in self.optimizers.values() for p in pieces if p in o.state]

    def gradients(self, groups: Iterable[int]) -> list[tuple[nn.Parameter, Tensor | Slice]]:
        """Copies of the gradients of some groups, or of this rank's slices of them, on the CPU."""
        found: list[tuple[nn.Parameter, Tensor | Slice]] = []
        for g in groups:
            if g not in self.parts:
                for p, own in zip(self.groups[g], self.trained(g), strict=True):
                    grad = torch.zeros_like(own) if own.grad is None else own.grad
                    found.append((p, grad.to("cpu", copy=True)))
                continue
            whole = self.trained(g)[0].grad
            assert whole is not None
            for p in self.groups[g]:
                if p.numel() == 0:  # no slice has any of it
                    found.append((p, Slice(tuple(p.shape), 0, torch.zeros(0, dtype=whole.dtype))))
            for p, begin, end, place in self.places(g):
                values = whole[place : place + end - begin].to("cpu", copy=True)
                found.append((p, Slice(tuple(p.shape), begin, values)))
        return found

    def places(self, g: int) -> list[tuple[nn.Parameter, int, int, int]]:
        """What this rank's slice of a group consists of: elements begin to end of a parameter, from a place on."""
        found, size, k, start = [], self.parts[g].numel(), self.program.replica(self.comm.rank), 0
        for p in self.groups[g]:
            runs = _runs(start, p.numel(), size)
            found += [(p, begin, end, place) for begin, end, rank, place in runs if rank == k]
            start += p.numel()
        return found

    def size(self, value: Value) -> int:
        """Bytes of a value of no micro-batch, as measured."""
        g = value.index
        if value.kind == "norm":
            return count_bytes(self.squares)
        if value.kind == "residual":
            return count_bytes(self.groups[g])
        part, frozen = count_bytes(self.parts.get(g)), self.program.groups[g].frozen
        if value.kind in ("optimizer_state", "optimizer_shard"):
            states = self._states(g)
            own = count_bytes(self.wide.get(g))
            if self.narrow and g not in self.program.scattered:
                own += part
            return sum(count_bytes(list(state.values())) for state in states) + own
        if value.kind == "grad":
            return count_bytes(self.groups[g])
        if value.kind == "param" and g not in self.parts:
            return sum(self.program.groups[g].tensors) + frozen
        flat = self.flats[g].numel() * self.flats[g].element_size()
        sizes = {
            "param": flat + (0 if g in self.program.scattered else frozen),
            "param_shard": part + frozen,
            "grad_shard": part,
            "buffer": flat,
        }
        return sizes[value.kind]


def _runs(start: int, count: int, size: int) -> list[tuple[int, int, int, int]]:
    """Elements start to start + count of what is cut into slices of `size`, slice by slice.

    Of each run: its begin and end, counted from `start`; the slice; and its place in the slice.
    """
    found = []
    at = start
    while at < start + count:
        k, place = divmod(at, size)
        end = min(start + count, (k + 1) * size)
        found.append((at - start, end - start, k, place))
        at = end
    return found


def assemble(slices: Sequence[Slice]) -> Tensor:
    """The whole tensor of which the ranks have brought all slices."""
    whole = torch.zeros(slices[0].shape, dtype=slices[0].values.dtype)
    flat = whole.view(-1)
    for part in slices:
        flat[part.start : part.start + part.values.numel()] = part.values
    return whole
