"""A worker computes as any rank does, one step after another, or in one go where steps overlap; its parameters come
from servers, its gradients go there.

PULL    parameters that have come are copied into the layers, when the first server's part of them is pulled; those of a
        layer that comes in pieces, when the last piece is
F, B    as in any program
PUSH    gradients, or pieces of them, are handed to the connections, which send them from the host's memory
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from minipar.cluster import worker
from minipar.comm import missing
from minipar.comm.communicator import Communicator
from minipar.data.batches import Batch, BatchPart
from minipar.execution.emulation import Delays, EmulatedDevice
from minipar.execution.execution import Job
from minipar.execution.executor import Executor, PassRecord
from minipar.execution.parameter_versions import Versions
from minipar.program import Instruction, Op, Portion, Program, Synchronous, Value, home, portions, tier

Push = Callable[[nn.Parameter, Tensor, int, Portion], None]  # parameter, gradient, rank of the server, what is sent


def _nothing(*_: object) -> None: ...


class Worker(Executor):
    """One worker's layers, and its part of a step, which is the same in all steps.

    bring    called with the place of a PULL and what it pulls, to bring that here
    put      called with the parameters of a group that are here, and the tensors into which they are to be copied; none
             of those that are kept on the host or the disk
    push     called with a parameter, its gradient, the server that is to get it, and what that gets of the gradient
    pace     called with the place of a PUSH before its first gradient
    """

    def __init__(
        self, program: Program, comm: Communicator, model: nn.Module, job: Job, delays: Delays | None = None
    ) -> None:
        self.bring: Callable[[int, list[Portion]], None] = _nothing
        self.put: Callable[[Value, list[Tensor]], None] = _nothing
        self.push: Push = _nothing
        self.pace: Callable[[int], None] = _nothing
        self.here: set[Portion] = set()  # what is here for this step, or of this version
        self.rooms: dict[int, list[Tensor]] = {}  # by group, for parameters of which some parts are to come
        self.version = 0
        self.leaving: dict[int, Tensor] = {}  # gradients of which not all pieces are pushed, by parameter
        super().__init__(_one_pass(program), comm, model, job.loss, job.optimizer, job.seed, delays)

    def run(
        self, batches: Callable[[int], Batch | BatchPart], base: int = 0, keep_gradients: bool = False
    ) -> PassRecord:
        self.here.clear()
        self.rooms.clear()
        self.version = 0
        return super().run(batches, base, keep_gradients)

    def follow(self, program: Program, delays: Delays | None = None) -> None:
        super().follow(program, delays)
        self.pulled: dict[int, set[Portion]] = {}  # what is pulled of each group
        for one in (one for ins in self.instructions if ins.op is Op.PULL for one in portions(ins)):
            self.pulled.setdefault(one.group, set()).add(one)
        self.device = None if delays is None else _Lasting(delays)

    def _serve(self, index: int, ins: Instruction) -> None:
        if ins.op is Op.PULL:
            if self.program.virtual_workers and ins.step != self.version:
                self.here.clear()
                self.version = ins.step
            if wanted := [one for one in portions(ins) if one not in self.here]:
                for g in dict.fromkeys(one.group for one in wanted):
                    self.rooms[g] = self.rooms.get(g) or self._room(g, ins)
                self.bring(index, wanted)
                self.here.update(wanted)
                for g in (one.group for one in wanted if self._is_here(one.group)):
                    (value,) = (value for value in ins.writes if value.index == g)
                    self.put(value, self.rooms.pop(g))
            return
        self.pace(index)
        with self._aside():  # (what is sent is the host's)
            for one in portions(ins):
                for p in self.groups[one.group]:
                    self.push(p, self._pushed(one.group, p), ins.peer, one)
        device = self.device
        if device is not None and device.delays.links:
            device.wait(device.now + device.delays.transfer.get(index, (0.0, 0.0))[0], index)
        for value in ins.frees:
            for p in self.groups[value.index] if home(value).kind == "grad" else ():
                self.leaving.pop(id(p), None)
                if self.watch is not None and p.grad is not None:
                    self.watch.given(p.grad)  # (the connections keep it until servers have it)
                p.grad = None

    def _pushed(self, g: int, p: nn.Parameter) -> Tensor:
        """What is pushed of a parameter's gradient. Of one that all ranks have whole that share a layer, only the first
        of them pushes something."""
        if id(p) not in self.leaving:
            first = self.program.is_first(self.comm.rank, self.program.groups[g].form, "S", "P")
            self.leaving[id(p)] = missing.like(p) if p.grad is None or not first else p.grad
        return self.leaving[id(p)]

    def _room(self, g: int, ins: Instruction) -> list[Tensor]:
        """The tensors into which a group's parameters come: those of the layers, or of a new version."""
        owner = self.state.owners[g]
        if self.offloading.keeps(g):
            return []
        if isinstance(owner, Versions) and ins.step:
            with self._aside() if tier(ins.writes[0]) == "host" else nullcontext():
                return owner.room_for_next(ins)
        return [p.data for p in self.groups[g]]

    def _is_here(self, g: int) -> bool:
        """Whether all that is pulled of a group is here for this step."""
        return self.here.issuperset(self.pulled[g])


@dataclass
class _Lasting(EmulatedDevice):
    """A device whose time goes on from one step to the next, since nothing separates them."""

    def begin(self) -> None:
        self.links.clear()  # (of copies, which have all ended, as collectives have)
        self.latest.clear()
        self.overruns = []


class Apart(Communicator):
    """The place among the ranks of a worker that has the whole model. It has connections with servers only."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.device = rank, size, torch.device(worker.context().device)

    @property
    def posts(self) -> bool:
        return False

    def prepare(
        self, members: Iterable[tuple[int, ...]], peers: Iterable[int] = (), algorithm: str | None = None
    ) -> None: ...

    def close(self) -> None: ...


def _one_pass(program: Program) -> Program:
    """The workers alone: their first step, or all of them where steps overlap."""
    servers = [()] * (len(program.ranks) - program.workers)
    if program.virtual_workers:
        return replace(program, ranks=(*program.ranks[: program.workers], *servers))
    rows = [tuple(ins for ins in row if ins.step == 0) for row in program.ranks[: program.workers]]
    return replace(program, ranks=(*rows, *servers), steps=1, contract=Synchronous())
