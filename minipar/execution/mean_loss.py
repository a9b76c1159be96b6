"""The mean loss of a step, to which every micro-batch, and every slice of sequences, adds its share.

    loss of a step = the sum over micro-batches of (mean loss of a micro-batch * what it counts / what the step counts)

What is counted are rows, or target elements, or what the loss itself counts: see `models/losses.py`.

A loss that is not a finite number is found where it is computed, before any update uses it. (Of an asynchronous program
on a GPU, as soon as the host knows it.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minipar.errors import MiniparError, NotFinite, PlanError, RankError
from minipar.execution import naming_layers
from minipar.execution.following import Warned
from minipar.execution.streams import Later
from minipar.models.losses import Own, Trial, counted, counts_elements, is_mean, says_count, sum_and_count
from minipar.models.tensors import differentiable, map_tensors, single
from minipar.program import Program

Loss = Callable[[Any, Any], Tensor]

ON_NAN = ("stop", "warn", "ignore")


class Target(NamedTuple):
    """What the output of the last layer is compared with.

    y        the targets of a micro-batch, or of a slice of it
    counts   how much they count in a mean
    whole    how much all targets of the step count
    """

    y: Any
    counts: float
    whole: float


class MeanLoss:
    """A rank's shares of the mean loss.

    every   of an asynchronous program, how many micro-batches make one update: each of them has a mean of its own, and
            so has each replica's
    means   how many of these an update is the mean of
    """

    def __init__(self, loss: Loss, program: Program, rank: int, later: Later) -> None:
        self.later = later
        self.loss, self.rank, self.narrow = loss, rank, bool(program.narrow)
        self.every = program.every
        self.means = (self.every or 1) * program.replicas
        # Tests the loss on what it is given, where it may be no mean of its parts; `tried`: in which step that is now.
        # (The model's own loss would have to be computed again, of the batch.)
        known = is_mean(loss) or isinstance(loss, Own) or getattr(loss, "adds_up", False)
        self.trial = Trial(loss) if not known and _is_split(program) else None
        self.tried = -1

    def target(self, y: Any, mine: Any, share: float, weight: float) -> Target:
        """The target of an instruction.

        y       the targets of its micro-batch
        mine    the targets of its tokens; `share` is their part of a row's tokens
        weight  how much the step's batch counts
        """
        own = None if self.every is None else counted(y, self.loss)
        whole = weight if own is None else (own or 1) * self.means
        if not (counts_elements(y) or says_count(self.loss)):  # (then rows are counted, and a slice has part of each)
            whole /= share
        return Target(mine, counted(mine, self.loss), whole)

    def __call__(self, output: Any, target: Target) -> Tensor:
        """The share of one output of the last layer. Errors: RankError for a loss that is no mean, or that fails."""
        y, counts, whole = target
        if counts == 0:  # every target is ignored: torch's mean would be 0/0
            return torch.stack([t.sum() for t in self._read(output, y)]).sum() * 0.0
        try:
            value: Any = self.loss(map_tensors(output, single) if self.narrow else output, y)
        except MiniparError:
            raise
        except Exception as error:
            raise naming_layers.raised("the loss", error, f"on rank {self.rank}", (output, y)) from error
        value, count = sum_and_count(value)
        if count is not None:
            self.later.check(count, partial(_check_count, counts))
            value = value / counts
        if self.trial is not None and self.tried >= 0 and self.trial.is_due(self.tried, y):
            self.trial(map_tensors(output, single) if self.narrow else output, y, self.tried)
        share: Tensor = value * (counts / whole)
        return share

    def _read(self, output: Any, y: Any) -> list[Tensor]:
        """The tensors of an output that the loss depends on: no graph is entered that plain torch does not enter."""
        found = [t for t in differentiable(output) if t.requires_grad]
        if isinstance(self.loss, Own):  # (what it makes of nothing is 0/0)
            return [t for t in found if t.dim()] or [t.nan_to_num() for t in found]
        if len(found) < 2:
            return found or differentiable(output)
        leaves: list[Tensor] = []

        def leaf(tensor: Tensor) -> Tensor:
            detached = tensor.detach()
            if tensor.requires_grad:
                leaves.append(detached.requires_grad_())
            return single(detached) if self.narrow else detached

        value: Any = self.loss(map_tensors(output, leaf), y)
        value = value[0] if isinstance(value, tuple) else value
        if not value.requires_grad:
            return found
        grads = torch.autograd.grad(value, leaves, allow_unused=True)
        return [tensor for tensor, grad in zip(found, grads, strict=True) if grad is not None] or found


def _is_split(program: Program) -> bool:
    """Whether a rank computes the loss of a part of each batch's rows."""
    return program.microbatches * program.replicas > 1 and program.slice_count == 1


def _check_count(counts: float, count: float) -> None:
    if abs(count - counts) > 1e-6 * counts:
        raise RankError(
            f"the loss gave (sum, count) with count {count:g}, but its targets weigh {counts:g}; say what it counts, "
            "of y alone, with minipar.models.losses.weighted(loss, count=lambda y: ...)"
        )


def check_choice(on_nan: str) -> str:
    """`on_nan` itself; PlanError if it is unknown."""
    if on_nan not in ON_NAN:
        raise PlanError(f"on_nan={on_nan}: unknown; possible are {', '.join(ON_NAN)}")
    return on_nan


class Finite:
    """In a rank: checks the loss of each micro-batch that it computes.

    on_nan   "stop": NotFinite at the first one that is not finite; "warn": `report` it once; "ignore": nothing
    """

    def __init__(self, rank: int, on_nan: str, report: Callable[[Warned], None]) -> None:
        self.rank, self.on_nan, self._report = rank, on_nan, report

    def __call__(self, value: float, step: int, microbatch: int, rows: range) -> None:
        """Check the loss of these rows of a step's batch."""
        if self.on_nan == "ignore" or math.isfinite(value):
            return
        what = f"the loss is {value} in step {step}, rank {self.rank}, micro-batch {microbatch}"
        of = f"rows {rows.start} to {rows.stop - 1} of the batch"
        if self.on_nan == "stop":
            error = NotFinite(
                f"{what} ({of}); possible: a smaller learning rate, clip=1.0 in the plan, a look at these rows, "
                'or train(..., on_nan="warn") to go on'
            )
            error.step, error.rank, error.microbatch = step, self.rank, microbatch
            raise error
        self.on_nan = "ignore"
        self._report(Warned(f'{what} ({of}); the run goes on, as on_nan="warn" says'))
