"""Model state of one rank: parameters, gradients and optimizer, and the collectives on them.

Each parameter group has an `Owner`, which is chosen when the rank is built and knows in which form the rank has it.
What works on several groups at once is here: collectives, the norm of all gradients, a STEP.

A parameter that nothing uses has no gradient, as in plain torch (`comm/missing.py`). But where it is in a slice with
others (ZeRO), or where what is sent is the largest part of a sum (compress=topk, powersgd), it has one of zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from minipar.comm.buckets import Buckets
from minipar.comm.communicator import Communicator
from minipar.comm.handles import Handle, Then
from minipar.comm.missing import is_missing
from minipar.execution.correction import ByStaleness
from minipar.execution.owners import Owner, Slice, Wide
from minipar.execution.parameter_slices import SlicedGroup, pack_gradients
from minipar.execution.parameter_versions import Versions
from minipar.execution.updating import OptimizerPart, Update
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
    version_of,
)
from minipar.program.verify.staleness import delay
from minipar.strategies.rewriting import computed_on_host


class State:
    """What one rank holds of the model, kept from step to step.

    groups[g]   trainable parameters of group g that this rank's layers use
    owners[g]   who owns them
    slices[g]   those of the owners that have a slice
    versions    whether instructions name versions of some parameters
    measured    the squares of each step's gradients, if somebody asks
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
        self.program, self.comm, self.groups, self.update = program, comm, groups, update
        _, self.at_home = computed_on_host(instructions)  # groups of layers that are computed on the host
        self.owners = choose_owners(program, comm, groups, self.at_home)
        self.slices = {owner.number: owner for owner in self.owners if isinstance(owner, SlicedGroup)}
        self.versions = any(isinstance(owner, Versions) for owner in self.owners)
        self.sums: dict[tuple[int, ...], Tensor] = {}  # of the gradients of a bucket, this rank's slices
        self.squares = torch.zeros(1, dtype=torch.float64, device=comm.device)
        sizes = [sum(group.tensors) for group in program.groups]
        self.buckets = Buckets(instructions, groups, sizes, comm, program.compress, program.algorithm or None)
        steps = dict.fromkeys(ins.layers for ins in instructions if ins.op is Op.STEP)
        for g in dict.fromkeys(g for layers in steps for g in layers):
            self.owners[g].make_pieces(names, update.group_of)
        age = delay(program, comm.rank) if isinstance(update.factory, ByStaleness) else None
        self.updates: dict[tuple[int, ...], OptimizerPart] = {
            layers: update.part([piece for g in layers for piece in self.owners[g].pieces], age) for layers in steps
        }
        self.optimizers = {layers: part.optimizer for layers, part in self.updates.items()}
        self.measured: dict[int, list[Tensor]] | None = None

    def begin(self) -> None:
        """A new pass through the program."""
        for owner in self.owners:
            owner.begin()

    def show(self, values: Iterable[Value]) -> None:
        """Let the layers see the versions of parameters among some values."""
        for value in values:
            if version_of(value) >= 0:
                self.owners[value.index].show(value)

    def release(self, value: Value) -> None:
        """Free the parameters of a group."""
        self.owners[value.index].release(value)

    # collectives -----------------------------------------------------------------------------------------------------

    def start(self, ins: Instruction, share: float = 1.0) -> list[Handle]:
        """Start a collective; what it writes counts when all handles were waited for.

        share   where parameters are averaged, how much those of this rank weigh
        """
        if ins.op is Op.ALL_REDUCE and ins.reads[0].kind == "param":
            return self._average(ins, share)
        if ins.op is Op.REDUCE_SCATTER:
            return self._reduce_scatter(ins)
        if ins.op is Op.ALL_GATHER:
            return [handle for g in ins.layers for handle in self.slices[g].gather(self.comm, ins.group)]
        if ins.op is Op.NORM:
            return [self._norm(ins)]
        return self.buckets.all_reduce(ins, self.comm)

    def _average(self, ins: Instruction, share: float) -> list[Handle]:
        """Average parameters over the replicas, in one message for each dtype: a sum of tensors with weights."""
        handles: list[Handle] = []
        whole = [p for g in ins.layers for p in self.owners[g].trained]
        for dtype in dict.fromkeys(p.dtype for p in whole):
            params = [p for p in whole if p.dtype == dtype]
            flat = torch.cat([p.detach().reshape(-1) for p in params]).mul_(share)
            views = [v.view(p.shape) for v, p in zip(flat.split([p.numel() for p in params]), params, strict=True)]

            def spread(params: list[nn.Parameter] = params, views: list[Tensor] = views) -> None:
                torch._foreach_copy_([p.data for p in params], views)
                for g in ins.layers:
                    self.owners[g].show_update()

            handles.append(Then(self.comm.iallreduce(flat, ins.group, str(ins)), spread))
        return handles

    def _reduce_scatter(self, ins: Instruction) -> list[Handle]:
        slices = [self.slices[g] for g in ins.layers]
        message, add = pack_gradients(slices, self.comm.device), grad_shard(ins.layers[0]) in ins.reads
        for p in (p for each in slices for p in each.params):
            p.grad = None
        if not add:
            self._make_sums(ins.layers)
        return [self.comm.ireduce_scatter(message, self.sums[ins.layers], ins.group, add)]

    def _make_sums(self, layers: tuple[int, ...]) -> None:
        """Make room for this rank's slices of the gradients of a bucket."""
        slices = [self.slices[g] for g in layers]
        sizes = [each.size for each in slices]
        self.sums[layers] = torch.empty(sum(sizes), dtype=slices[0].part.dtype, device=self.comm.device)
        for each, place in zip(slices, self.sums[layers].split(sizes), strict=True):
            each.part.grad = place

    def _norm(self, ins: Instruction) -> Handle:
        """Sum the squares of all gradients, each counted once: a slice here, or the part of this one of its holders."""
        self.squares.zero_()
        for g in ins.layers:
            self.owners[g].add_squares(self.squares)
        return self.comm.iallreduce(self.squares, ins.group)

    # the step --------------------------------------------------------------------------------------------------------

    def scale(self, ins: Instruction) -> None:
        """Before a STEP: give the optimizer its gradients, and clip them if the STEP reads their norm."""
        for g in ins.layers:
            self.owners[g].take_gradients(ins)
            for k in self.buckets.missing.pop(g, ()) if g not in self.slices else ():
                own = self.owners[g].trained[k]
                if own.grad is not None and is_missing(own.grad):
                    own.grad = None
        if self.measured is not None:
            place = torch.device("cpu") if ins.stream == "host" else self.comm.device
            total = torch.zeros(1, dtype=torch.float64, device=place)
            for g in ins.layers:
                self.owners[g].add_squares(total)
            self.measured.setdefault(ins.step, []).append(total)
        if norm() not in ins.reads or self.program.clip is None:
            return
        grads = [p.grad for g in ins.layers for p in self.owners[g].trained if p.grad is not None]
        if self.squares.device.type == "cpu":
            factor = min(1.0, self.program.clip / (self.squares.sqrt().item() + 1e-6))
            for grad in grads if factor < 1 else ():
                grad.mul_(factor)
            return
        wanted = self.program.clip / (self.squares.sqrt() + 1e-6)  # stays on the device: the host does not wait for it
        wanted = torch.where(wanted < 1, wanted, 1.0)
        for grad in grads:
            grad.mul_(wanted.to(grad.device))

    def step(self, ins: Instruction) -> None:
        """Update what a STEP works on, and free its gradients."""
        part, schedule = self.updates[ins.layers], self.update.schedule
        if schedule is not None:
            part.follow(schedule.at(part.done))
        part.done += 1
        if part.which:
            part.optimizer.step()
        for g in ins.layers:
            self.owners[g].finish_update()
        self._forget_sums(ins.layers)

    def forget_gradient(self, g: int) -> None:
        """Free the device's gradient of a group, which is on its way to the host."""
        self.owners[g].let_gradient_go()
        self._forget_sums([g])

    def _forget_sums(self, groups: Iterable[int]) -> None:
        """Forget the summed gradients of some groups, which begin again from nothing."""
        self.buckets.clear(groups)
        self.sums = {
            layers: sums
            for layers, sums in self.sums.items()
            if any(self.slices[g].part.grad is not None for g in layers)
        }

    # questions -------------------------------------------------------------------------------------------------------

    def gradients(self, groups: Iterable[int]) -> list[tuple[nn.Parameter, Tensor | Slice]]:
        """Copies of the gradients of some groups, or of this rank's slices of them, on the CPU."""
        return [pair for g in groups for pair in self.owners[g].gradients()]

    def optimizer_tensors(self, g: int) -> list[Tensor]:
        """What the optimizer keeps for a group, in a fixed order, single numbers left out."""
        states = self._states(g)
        return [t for state in states for t in state.values() if isinstance(t, Tensor) and t.dim()]

    def _states(self, g: int) -> list[dict[str, Any]]:
        """What the optimizer keeps for each piece of a group."""
        pieces = [piece.parameter for piece in self.owners[g].pieces]
        return [o.state[p] for o in self.optimizers.values() for p in pieces if p in o.state]

    def size(self, value: Value) -> int:
        """Bytes of a value of no micro-batch, as measured."""
        if value.kind == "norm":
            return count_bytes(self.squares)
        if value.kind == "residual":
            return count_bytes(self.groups[value.index])
        states = self._states(value.index) if value.kind in ("optimizer_state", "optimizer_shard") else []
        return sum(count_bytes(list(state.values())) for state in states) + self.owners[value.index].nbytes(value.kind)


def choose_owners(
    program: Program, comm: Communicator, groups: list[list[nn.Parameter]], at_home: frozenset[int]
) -> list[Owner]:
    """The owner of each group on a rank.

    at_home   groups of layers that are computed on the host: the optimizer works there on the layers' own parameters
    """
    instructions, narrow = program.ranks[comm.rank], program.precision == "bf16"
    updates = any(ins.op is Op.STEP for ins in instructions)
    wide = narrow and updates and program.serving is None  # (else the servers have the wide ones, or nobody)
    held = program.state[comm.rank] if program.state else frozenset()
    sliced = {g for g in program.sharded if optimizer_shard(g) in set(map(home, held))}
    kept = {v.index for v in held if version_of(v) >= 0}
    on_host = {g for ins in instructions if ins.op is Op.STEP and ins.stream == "host" for g in ins.layers} - at_home
    found: list[Owner] = []
    for g, params in enumerate(groups):
        group = program.groups[g]
        shards = program.part(comm.rank, g, "S")[1]
        holders = max(1, program.holders[g] // shards)
        for p in params if narrow and not wide else ():
            p.data = p.data.to(torch.bfloat16)
        if g in sliced:
            ranks = program.slicing(g, comm.rank)
            place = ranks.index(comm.rank), len(ranks), comm.device
            found.append(SlicedGroup(g, params, group, *place, narrow, g in program.scattered))
            found[g].holders = program.sharing // shards
        elif g in kept or program.in_flight is not None:
            found.append(Versions(g, params, group, holders, wide))
        elif wide and g not in on_host:
            found.append(Wide(g, params, group, holders))
        else:
            found.append(Owner(g, params, group, holders))
        if g in on_host and not found[g].masters:
            found[g].work_on_host()
        for p in params if narrow and g not in sliced else ():
            p.data = p.data.to(torch.bfloat16)
    return found
