"""A worker computes as any rank does, one step after another; its parameters come from servers, its gradients go there.

PULL    parameters that have come are copied into the layers
F, B    as in any program
PUSH    gradients are handed to the connections, which send them from the host's memory
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from minipar.cluster import worker
from minipar.comm import missing
from minipar.comm.communicator import Communicator
from minipar.execution.emulation import Delays, EmulatedDevice
from minipar.execution.execution import Job
from minipar.execution.executor import Executor
from minipar.models.losses import counted
from minipar.models.tensors import laid_out, take_rows
from minipar.program import Instruction, Op, Program, Synchronous, Value
from minipar.server.pushing import Servers


class Worker(Executor):
    """One worker's model, and its step, which is the same each time.

    servers   None while it warms up: nothing is pulled or pushed
    rows      of the present step: those of this worker, and all
    pushed    the gradients of the present step, as they were pushed, by name
    """

    def __init__(self, program: Program, rank: int, model: nn.Module, job: Job, delays: Delays | None = None) -> None:
        self.servers: Servers | None = None
        self.rows: tuple[float, float] = 0, 0
        self.pushed: dict[str, Tensor] = {}
        self.own_loss = job.loss
        comm = NoPeers(rank, len(program.ranks))
        super().__init__(_first_step(program), comm, model, job.loss, job.optimizer, job.seed, delays)
        self.do |= {Op.PULL: self._pull, Op.PUSH: self._push}

    def follow(self, program: Program, delays: Delays | None = None) -> None:
        super().follow(program, delays)
        self.device = None if delays is None else _Lasting(delays)

    def _pull(self, index: int, ins: Instruction) -> None:
        """Copy parameters that have come into the layers. Of a layer that two servers have a part of, both PULLs do."""
        if self.servers is None:
            return
        if index == 0:
            self.pushed.clear()
            self.servers.weight = self.rows = self._weights()
        for p in (p for g in ins.layers for p in self.groups[g]):
            p.data.copy_(self.servers.pull(self.names[id(p)]))
        if self.device is not None:
            self.device.arrived(self.servers.arrived, index)

    def _push(self, index: int, ins: Instruction) -> None:
        """Send gradients, or the parts of them that one server keeps."""
        device = self.device if self.device is not None and self.device.delays.links else None
        occupied, delay = device.delays.transfer.get(index, (0.0, 0.0)) if device is not None else (0.0, 0.0)
        if self.servers is not None:
            if device is not None:
                self.servers.timing = device.now + delay, occupied
            with self._aside():  # (what is sent is the host's)
                params = {self.names[id(p)]: p for g in ins.layers for p in self.groups[g]}
                for name, p in params.items():
                    if name not in self.pushed:
                        self.pushed[name] = self._gradient(p, self.servers.pull(name))
                self.servers.push({name: self.pushed[name] for name in params}, ins.peer - self.program.workers)
        if device is not None:
            device.wait(device.now + occupied, index)
        for value in ins.frees:
            for p in self.groups[value.index] if value.kind == "grad" else ():
                if self.watch is not None and p.grad is not None:
                    self.watch.given(p.grad)  # (it may be what was pushed, which stays until the next step)
                p.grad = None

    def _gradient(self, p: nn.Parameter, like: Tensor) -> Tensor:
        """The gradient of a parameter on the host, of the type in which servers keep it."""
        gradient = missing.like(p) if p.grad is None else p.grad
        return laid_out(gradient.to("cpu", like.dtype))

    def size(self, value: Value) -> int:
        """Bytes of a value. With precision=bf16 only the servers have parameters as wide as the program says."""
        whole = super().size(value)
        return whole // 2 if value.kind == "param" and self.program.narrow else whole

    def _weights(self) -> tuple[float, float]:
        """How much this worker's rows weigh in the present step, and all rows."""
        part = self.compute.rows.part(0)
        mine = range(part.rows[0].start - part.start, part.rows[-1].stop - part.start)
        return counted(take_rows(part.y, mine), self.own_loss), part.weight


@dataclass
class _Lasting(EmulatedDevice):
    """A device whose time goes on from one step to the next, since nothing separates them."""

    def begin(self) -> None:
        self.overruns = []


class NoPeers(Communicator):
    """The place among the ranks of a worker, which has the whole model: it has connections with servers only."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.device = rank, size, torch.device(worker.context().device)

    @property
    def posts(self) -> bool:
        return False

    def prepare(
        self, members: Iterable[tuple[int, ...]], peers: Iterable[int] = (), algorithm: str | None = None
    ) -> None: ...

    def close(self) -> None: ...


def _first_step(program: Program) -> Program:
    """The first step of all workers, without servers."""
    rows = [tuple(ins for ins in row if ins.step == 0) for row in program.ranks[: program.workers]]
    servers = [()] * (len(program.ranks) - program.workers)
    return replace(program, ranks=(*rows, *servers), steps=1, contract=Synchronous())
