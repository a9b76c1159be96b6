"""The correct result of a pair of model and plan: plain torch loops that share no code with the engine.

    whole(...)      the whole batch and the original model: every synchronous plan must equal it
    replayed(...)   the log of replicas that train alone, of parameter servers, or of a pipeline without flushes

One thing in the model is replaced: nn.Dropout draws from a generator in call order; the dropout that replaces it has a
mask that is a function of (seed, step, row, name). It is written here a second time, from that definition.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from minipar.execution.execution import Job
from minipar.trace.recorded_order import RecordedOrder
from minipar.training import plainly, reference
from tests.fuzz.models import Spec, build, loss_of

GOLDEN, FIRST, SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
Batches = Callable[[int], tuple[Tensor, Tensor]]
Loss = Callable[[Any, Any], Tensor]
Make = Callable[[Any], torch.optim.Optimizer]


@dataclass
class Result:
    """Per step the loss and the gradients by name; parameters and buffers after the last step."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


class DropoutByRow(nn.Module):
    """Keeps element j (from 1) of row r where splitmix64(key of r + j GOLDEN), as a number in [0, 1), is at least p.

    The key of a row is splitmix64(r GOLDEN + hash of the seed, the module's name and the step).
    """

    def __init__(self, p: float, name: str, where: dict[str, int]) -> None:
        super().__init__()
        self.p, self.name, self.where = p, name, where

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        words = "\0".join(map(str, (self.where["seed"], self.name, self.where["step"])))
        base = np.frombuffer(hashlib.blake2b(words.encode(), digest_size=8).digest(), "<u8")[0]
        rows = np.arange(self.where["row"], self.where["row"] + len(x), dtype=np.uint64)
        columns = np.arange(1, x[0].numel() + 1, dtype=np.uint64)
        with np.errstate(over="ignore"):
            bits = _splitmix(_splitmix(rows * GOLDEN + base)[:, None] + columns * GOLDEN)
        uniform = torch.from_numpy((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53).view(x.shape)
        return x * (uniform >= self.p).to(x.dtype) / (1 - self.p)


def _splitmix(z: Any) -> Any:
    z = (z ^ (z >> np.uint64(30))) * FIRST
    z = (z ^ (z >> np.uint64(27))) * SECOND
    return z ^ (z >> np.uint64(31))


def draw_by_row(model: nn.Module, where: dict[str, int]) -> None:
    """Replace every nn.Dropout of a model."""
    made: dict[nn.Module, DropoutByRow] = {}  # one that is used twice has the name of its first place
    for name, module in [*model.named_modules()]:
        for child, old in [*module._modules.items()]:
            if type(old) is nn.Dropout:
                if old not in made:
                    made[old] = DropoutByRow(old.p, f"{name}.{child}" if name else child, where)
                setattr(module, child, made[old].train(old.training))


class Plain:
    """A model in plain torch: whole, with its optimizer, and where its dropouts are."""

    def __init__(
        self, model: nn.Module, loss: Loss, seed: int, optimizer: Make, nudge: float = 0.0, scheduler: Any = None
    ) -> None:
        self.where, self.model, self.loss = {"seed": seed, "step": 0, "row": 0}, model, loss
        draw_by_row(self.model, self.where)
        self.named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if nudge:
            generator = torch.Generator().manual_seed(1)
            for p in self.model.parameters():
                p.data *= 1 + nudge * (torch.rand(p.shape, generator=generator, dtype=torch.float64) - 0.5)
        self.optimizer = optimizer_of(optimizer, self.named) if self.named else None
        self.scheduler = scheduler(self.optimizer) if scheduler and self.optimizer else None

    def value(self, x: Tensor, y: Tensor, step: int, row: int = 0) -> Tensor:
        """The mean loss of these rows, which begin at `row` of the whole batch."""
        value: Any = self.loss(self.output(x, step, row), y)
        return value[0] / value[1] if isinstance(value, tuple) else value

    def output(self, x: Tensor, step: int, row: int) -> Any:
        self.where |= {"step": step, "row": row}
        return self.model(x.clone())

    def update(self) -> None:
        """What a loop does after its backward."""
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()

    def taken(self, there: bool = False) -> dict[str, Tensor]:
        """The gradients, by name; 0 where there is none. there: only those that there are."""
        grads = {name: p.grad for name, p in self.named.items() if p.grad is not None or not there}
        return {n: torch.zeros_like(self.named[n]) if g is None else g.to_dense().clone() for n, g in grads.items()}

    def close(self, result: Result) -> Result:
        result.parameters = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        named = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        result.buffers = {name: b.clone() for name, b in self.model.state_dict().items() if name not in named}
        return result


def optimizer_of(optimizer: Make, named: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of parameters: of pairs with their names if its parameter is called so."""
    pairs = "named_parameters" in inspect.signature(optimizer).parameters
    return optimizer([*named.items()] if pairs else [*named.values()])


def plain_of(spec: Spec, seed: int, optimizer: Make, nudge: float = 0.0, scheduler: Any = None) -> Plain:
    """The model of a spec. `nudge`: how much to change the parameters at first."""
    return Plain(build(spec), loss_of(spec.loss), seed, optimizer, nudge, scheduler)


def whole(plain: Plain, batches: Batches, steps: int, clip: float | None = None, inference: bool = False) -> Result:
    """Train as anyone would: the whole batch, one process."""
    result = Result()
    if inference:
        plain.model.eval()
        with torch.no_grad():
            result.losses = [plain.value(*batches(step), step).item() for step in range(steps)]
        return plain.close(result)
    for step in range(steps):
        value = plain.value(*batches(step), step)
        if value.requires_grad:
            value.backward()
        if clip is not None and plain.named:
            torch.nn.utils.clip_grad_norm_(plain.named.values(), clip)
        result.losses.append(value.item())
        result.gradients.append(plain.taken())
        plain.update()
    return plain.close(result)


def replayed(job: Job, log: RecordedOrder, clip: float | None = None, nudge: float = 0.0) -> Result:
    """Train by the log of a run, by the process of plain torch itself, which shares nothing with the engine.

    nudge   how much to change the parameters at first
    """
    found = reference.run(plainly.task_of(job, log, clip=clip, shaken=nudge))
    kept = job.build().state_dict()  # (buffers that are not persistent are not saved)
    buffers = {name: b for name, b in found.buffers.items() if name in kept}
    return Result(found.losses, found.gradients, found.parameters, buffers)
