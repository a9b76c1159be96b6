"""The reference that every strategy must equal: plain torch, the whole batch at once, one process, no executor."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minipar import randomness
from minipar.costs.profiled import split_rows
from minipar.losses import counted
from minipar.tensors import count_rows, take_rows


class Reference(NamedTuple):
    """Per step the loss, and the gradient of every trainable parameter by name (empty if not kept)."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]


def train_plainly(
    model: nn.Module,
    batches: Callable[[int], tuple[Any, Any]],
    loss: Callable[[Any, Any], Tensor],
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    steps: int,
    seed: int = 0,
    keep_gradients: bool = True,
    report: Callable[[int], None] = lambda step: None,
    clip: float | None = None,
    first: int = 0,
    begin: Callable[[nn.Module, torch.optim.Optimizer | None], None] = lambda model, optimizer: None,
) -> Reference:
    """Train `model` for `steps` steps, as anyone would without minipar. The model is changed in place.

    clip    scale gradients down to this norm; those that are kept are scaled
    first   the first step, after what `begin(model, optimizer)` put into both
    """
    randomness.replace_dropout(model, seed)
    model.train()
    names = {name: p for name, p in model.named_parameters() if p.requires_grad}
    update = optimizer(list(names.values())) if names else None
    begin(model, update)
    result = Reference([], [])
    for step in range(first, first + steps):
        x, y = batches(step)
        randomness.at(randomness.row_dropouts(model), step, 0)
        value = loss(model(x), y)
        if names:
            value.backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(names.values(), clip)
        result.losses.append(value.item())
        if keep_gradients:
            result.gradients.append(
                {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in names.items()}
            )
        if update:
            update.step()
            update.zero_grad()
        report(step - first)
    return result


def train_locally(
    model: nn.Module,
    batches: Callable[[int], tuple[Any, Any]],
    loss: Callable[[Any, Any], Tensor],
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    steps: int,
    replicas: int,
    microbatches: int,
    every: int,
    seed: int = 0,
    keep_gradients: bool = True,
    report: Callable[[int], None] = lambda step: None,
    first: int = 0,
    begin: Callable[[nn.Module, torch.optim.Optimizer | None], None] = lambda model, optimizer: None,
) -> Reference:
    """The same of Local SGD: copies of the model, each with its optimizer and its rows, averaged after `every` steps
    and the last one, by the rows of each. Losses and gradients are averages, too, those of one step."""
    randomness.replace_dropout(model, seed)
    model.train()
    copies = [model, *(copy.deepcopy(model) for _ in range(replicas - 1))]
    named = [{name: p for name, p in each.named_parameters() if p.requires_grad} for each in copies]
    updates = [optimizer(list(names.values())) for names in named]
    for each, update in zip(copies, updates, strict=True):
        begin(each, update)
    result, rows_of = Reference([], []), [0] * replicas
    for step in range(first, first + steps):
        x, y = batches(step)
        rows = split_rows(count_rows(x), replicas * microbatches)
        total, gradients = 0.0, {name: torch.zeros_like(p) for name, p in named[0].items()}
        for r, each in enumerate(copies):
            mine = range(rows[r * microbatches].start, rows[(r + 1) * microbatches - 1].stop)
            if not mine:
                continue
            own = take_rows(y, mine)
            share = counted(own, loss) / counted(y, loss)
            randomness.at(randomness.row_dropouts(each), step, mine.start)
            value = loss(each(take_rows(x, mine)), own)
            value.backward()
            total += value.item() * share
            rows_of[r] += counted(own, loss)
            for name, p in named[r].items():
                gradients[name] += 0 if p.grad is None else p.grad * share
            updates[r].step()
            updates[r].zero_grad()
        result.losses.append(total)
        if keep_gradients:
            result.gradients.append(gradients)
        if (step - first + 1) % every == 0 or step == first + steps - 1:
            weights = [count / sum(rows_of) for count in rows_of]
            for name in named[0]:
                mean = torch.stack([w * names[name].detach() for w, names in zip(weights, named, strict=True)]).sum(0)
                for names in named:
                    names[name].data.copy_(mean)
            rows_of = [0] * replicas
        report(step - first)
    return result


def gradient_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """max |g - g1| over all elements / max |g1| over all parameters: 0 is perfect; a missing gradient is infinite."""
    if found.keys() != expected.keys():
        return float("inf")
    largest = max((g.abs().max().item() for g in expected.values() if g.numel()), default=0.0)
    worst = max(
        ((found[name].cpu() - g.cpu()).abs().max().item() for name, g in expected.items() if g.numel()), default=0.0
    )
    return worst / largest if largest else worst
