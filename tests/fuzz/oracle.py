"""The correct result of a pair of model and plan: plain torch loops that share no code with the engine.

    whole(...)     the whole batch and the original model: every synchronous plan must equal it
    locally(...)   replicas that train alone, and are averaged: local_steps
    served(...)    the recorded order of parameter servers
    stale(...)     the recorded order of a pipeline without flushes

One thing in the model is replaced: nn.Dropout draws from a generator in call order; the dropout that replaces it has a
mask that is a function of (seed, step, row, name). It is written here a second time, from that definition.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.fuzz.models import LOSSES, Spec, build, loss_of, whole_of

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
        return self.mean(self.output(x, step, row), y)

    def mean(self, output: Any, y: Tensor) -> Tensor:
        value: Any = self.loss(output, y)
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


def parts(rows: int, count: int) -> list[range]:
    """So many runs of neighbouring rows, the first ones larger by one."""
    each, more = divmod(rows, count)
    starts = [k * each + min(k, more) for k in range(count + 1)]
    return [range(a, b) for a, b in pairwise(starts)]


def weight(y: Tensor, ignored: int = -100) -> int:
    """How many targets count: of classes those that are not ignored; else all rows."""
    return int((y != ignored).sum()) if y.dtype is torch.int64 else len(y)


def padding(spec: Spec) -> int:
    """The class of targets that its loss does not count."""
    return 0 if LOSSES[spec.loss][1] == "padded" else -100


def locally(
    spec: Spec, batches: Batches, steps: int, seed: int, optimizer: Make, replicas: int, microbatches: int, every: int,
    nudge: float = 0.0, scheduler: Any = None,
) -> Result:  # fmt: skip
    """Local SGD: copies that train by themselves, averaged after every so many steps and the last. One
    that counts nothing in a step has a gradient of zeros."""
    copies = [plain_of(spec, seed, optimizer, nudge, scheduler) for _ in range(replicas)]  # (a deep copy has no hooks)
    first, result, ignored = copies[0], Result(), padding(spec)
    for step in range(steps):
        x, y = batches(step)
        cut = parts(len(x), replicas * microbatches)
        loss, gradients = 0.0, {name: torch.zeros_like(p) for name, p in first.named.items()}
        for r, plain in enumerate(copies):
            mine = slice(cut[r * microbatches].start, cut[(r + 1) * microbatches - 1].stop)
            own, total = weight(y[mine], ignored), weight(y, ignored)
            if not own:
                if mine.start == mine.stop:
                    for p in plain.named.values():
                        p.grad = torch.zeros_like(p)
                elif (nothing := whole_of(plain.output(x[mine], step, mine.start))).requires_grad:
                    (nothing.sum() * 0).backward()
                plain.update()
                continue
            value = plain.value(x[mine], y[mine], step, mine.start)
            if value.requires_grad:
                value.backward()
            loss += value.item() * own / total
            for name, g in plain.taken().items():
                gradients[name] += g * (own / total)
            plain.update()
        result.losses.append(loss)
        result.gradients.append(gradients)
        if (step + 1) % every == 0 or step == steps - 1:
            for name in first.named:
                mean = torch.stack([plain.named[name].detach() for plain in copies]).mean(0)
                for plain in copies:
                    plain.named[name].data.copy_(mean)
    return first.close(result)


def served(
    spec: Spec, batches: Batches, order: Sequence[Any], seed: int, optimizer: Make, workers: int,
    microbatches: int, clip: float | None = None, nudge: float = 0.0, scheduler: Any = None,
) -> dict[str, Tensor]:  # fmt: skip
    """The parameters after a recorded order of parameter servers: rows of (kind, worker, step, version).

    A gradient is of the parameters that its worker was last answered with; an update is of the mean over the rows that
    it takes, and a worker's rows of a step are those of its micro-batches.
    """
    plain, ignored = plain_of(spec, seed, optimizer, nudge, scheduler), padding(spec)
    seen: dict[tuple[int, int], dict[str, Tensor]] = {}
    taking: list[tuple[int, int]] = []
    for row in order:
        kind = row.kind.name
        if kind == "ANSWER":
            seen[row.worker, row.step] = {name: p.detach().clone() for name, p in plain.named.items()}
        elif kind == "TAKE":
            taking.append((row.worker, row.step))
        elif kind == "APPLY":
            now = {name: p.detach().clone() for name, p in plain.named.items()}
            total: dict[str, Tensor] = {}
            rows = of = 0
            for worker, step in taking:
                x, y = batches(step)
                cut = parts(len(x), workers * microbatches)
                mine = slice(cut[worker * microbatches].start, cut[(worker + 1) * microbatches - 1].stop)
                own, of = weight(y[mine], ignored), weight(y, ignored)
                if mine.start == mine.stop:
                    continue
                rows += own
                for name, p in plain.named.items():
                    p.data.copy_(seen[worker, step][name])
                if own:
                    value = plain.value(x[mine], y[mine], step, mine.start) * (own / of)
                else:  # (rows that count nothing have a gradient of zeros)
                    value = whole_of(plain.output(x[mine], step, mine.start)).sum() * 0
                if value.requires_grad:
                    value.backward()
                for name, g in plain.taken(there=True).items():
                    total[name] = total[name] + g if name in total else g
                plain.model.zero_grad()
            for name, p in plain.named.items():
                p.data.copy_(now[name])
                p.grad = total[name] * (of / (rows or of)) if name in total else None
            if clip is not None and plain.named:
                torch.nn.utils.clip_grad_norm_(plain.named.values(), clip)
            plain.update()
            taking = []
    return {name: p.detach().clone() for name, p in plain.named.items()}


def stale(
    spec: Spec, batches: Batches, program: Any, seed: int, optimizer: Make, nudge: float = 0.0, scheduler: Any = None
) -> Result:
    """A pipeline without flushes, by what its ranks did: which forward or backward with which version, and updates.

    On every rank a micro-batch has a model of its own, with the version that its forward used; before its backward this
    becomes the version that the backward used, as weights of which no version is kept change under a graph. Replicas
    of a rank come together for each update.
    """
    plain, result, ignored = plain_of(spec, seed, optimizer, nudge), Result(), padding(spec)
    layers = [layer for layer in plain.model._modules.values() if layer is not None]
    every, m = program.contract.every, program.microbatches
    waiting = [_done(row, m) for row in program.ranks]
    replicas = dict(program.mesh)["dp"]
    stages = len(waiting) // replicas  # rank r has stage r % stages of replica r // stages
    held = [[layers[l] for l in program.placement[s]] for s in range(stages)]
    names = {id(p): name for name, p in plain.named.items()}
    mine = [{names[id(p)]: p for layer in part for p in layer.parameters() if id(p) in names} for part in held]
    versions = [{0: _copy(own)} for own in mine]
    optimizers = [optimizer_of(optimizer, own) if own else None for own in mine]
    schedulers = [scheduler(own) if scheduler and own else None for own in optimizers]
    sums: list[dict[str, Tensor]] = [{} for _ in mine]
    given: dict[tuple[int, int], Any] = {}  # (rank, micro-batch) -> what the rank before handed on
    arrived: dict[tuple[int, int], list[Tensor | None]] = {}
    graphs: dict[tuple[int, int], Any] = {}
    count = max((i for row in waiting for what, i, _ in row if what == "F"), default=-1) + 1
    result.losses = [0.0] * (count if every is not None else count // m)
    last = stages - 1

    def forward(r: int, i: int, version: int) -> None:
        x, y = batches(i // m)
        replica, s = divmod(r, stages)
        rows = parts(len(x), m * replicas)[replica * m + i % m]
        x, target = x[rows.start : rows.stop], y[rows.start : rows.stop]
        start = x if s == 0 else given.pop((r, i))
        own = plain_of(spec, seed, optimizer)
        for name in mine[r % stages]:
            own.named[name].data.copy_(versions[r % stages][version][name])
        leaves = _tree(start, lambda t: t.detach().requires_grad_(s > 0 and (t.is_floating_point() or t.is_complex())))
        value = _tree(leaves, torch.clone)
        ends: list[Tensor] = []
        if rows:
            own.where |= {"step": i // m, "row": rows.start}
            for layer in [[*own.model._modules.values()][l] for l in program.placement[s]]:
                value = layer(value)
            ends = _differentiable(value)
            if s == last:
                share = (
                    1 / every / replicas if every is not None else weight(target, ignored) / (weight(y, ignored) or 1)
                )
                share = share if weight(target, ignored) else 0.0
                ends = [plain.mean(value, target) * share if share else whole_of(value).sum() * 0]
                result.losses[i if every is not None else i // m] += ends[0].item() * (every or 1)
        graphs[r, i] = leaves, ends, own
        if s < last:
            given[r + 1, i] = value if rows else start

    def backward(r: int, i: int, version: int) -> None:
        leaves, ends, own = graphs.pop((r, i))
        s = r % stages
        for name in mine[r % stages]:
            own.named[name].data.copy_(versions[r % stages][version][name])
        into = arrived.pop((r, i), [None] * len(ends))
        pairs = [
            (t, g) for t, g in zip(ends, into, strict=bool(ends)) if t.requires_grad and (g is not None or s == last)
        ]
        if pairs:
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        if s:
            arrived[r - 1, i] = [t.grad for t in _differentiable(leaves)]
        for name in mine[r % stages]:
            if (g := own.named[name].grad) is not None:
                sums[r % stages][name] = sums[r % stages][name] + g if name in sums[r % stages] else g

    def update(s: int, version: int) -> None:
        while len(result.gradients) < version:
            result.gradients.append({})
        newest = versions[s][max(versions[s])]
        for name, p in mine[s].items():
            p.data, p.grad = newest[name].clone(), sums[s].get(name)
            result.gradients[version - 1][name] = torch.zeros_like(p) if p.grad is None else p.grad.clone()
        own = optimizers[s]
        if own is not None:
            own.step()
        if schedulers[s] is not None:
            schedulers[s].step()
        versions[s][version] = _copy(mine[s])
        sums[s] = {}

    moved = True
    while moved:
        moved = False
        for r, row in enumerate(waiting):
            while row:
                what, i, version = row[0]
                if what == "F" and r % stages and (r, i) not in given:
                    break
                if what == "B" and r % stages < last and (r, i) not in arrived:
                    break
                together = waiting[r % stages :: stages] if what == "U" else [row]
                if any(other[:1] != [row[0]] for other in together):
                    break
                for other in together:
                    other.pop(0)
                moved = True
                if what != "U":
                    (forward if what == "F" else backward)(r, i, version)
                    continue
                update(r % stages, version)
    assert not any(waiting), "an order that cannot be"
    for own, made in zip(mine, versions, strict=True):
        for name, p in own.items():
            p.data = made[max(made)][name]
    return plain.close(result)


def _done(row: Sequence[Any], microbatches: int) -> list[tuple[str, int, int]]:
    """What a rank did, in order: ("F" or "B", micro-batch of the run, version used) or ("U", -1, version made).

    A forward or backward in several pieces is one, with the version that those of its pieces used that have parameters.
    """
    found: dict[tuple[str, int], int] = {}
    for ins in row:
        i = ins.step * microbatches + ins.microbatch
        used = [v.step for v in ins.reads if v.kind == "param"]
        if ins.op.name == "STEP":
            version = ins.step + 1
            found["U", version] = version
        elif ins.op.name in ("FORWARD", "BACKWARD"):
            key = ins.op.name[0], i
            found[key] = max([found.get(key, 0), *used])
    return [(what, -1 if what == "U" else i, version) for (what, i), version in found.items()]


def _copy(named: dict[str, Any]) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in named.items()}


def _tree(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A value with each of its tensors changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _tree(part, change) for key, part in value.items()}
    return type(value)(_tree(part, change) for part in value) if isinstance(value, (tuple, list)) else value


def _differentiable(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _tree(value, lambda t: found.append(t) or t if t.is_floating_point() or t.is_complex() else t)
    return found
