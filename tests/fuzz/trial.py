"""One plan on real ranks beside plain torch, whatever its keys: `trial("dp=2 zero=1", ranks)` gives an `Outcome`.

equal     losses and gradients of every step within 1e-10 of plain torch, in float64
near      the same within the plan's own tolerance (numbers of 16 bits)
refused   PlanError: its text
WRONG     a number differs
CRASH     any other error
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from minipar import Plan, models
from minipar.cluster.ranks import Ranks
from minipar.costs.recomputation import LayerCosts
from minipar.errors import PlanError
from minipar.execution.execution import Execution, Job, execute
from minipar.models.inception import Stem
from minipar.models.network import edges_of
from minipar.models.parameter_groups import shape_of
from minipar.program import Program
from minipar.program.mesh import Mesh
from minipar.server.serving import execute_served
from minipar.trace.recorded_order import RecordedOrder, local_order, order_of, served_order
from minipar.training import plainly
from minipar.training.reference import Reference, gradient_error, run
from minipar.training.training import annotations_of
from tests.comparing import captured

BOUND = 1e-10
# Plain torch leaves nothing out of its sums. So a plan that does is run, and then once more with so much sent that
# nothing is left out: all numbers, or a rank at which each matrix is sent as it is.
WHOLE = {"topk": "topk:1", "powersgd": "powersgd:1000"}
STEPS = 3
cross_entropy = torch.nn.functional.cross_entropy
sgd = partial(torch.optim.SGD, lr=0.2)


@dataclass(frozen=True)
class Outcome:
    kind: str
    text: str = ""

    @property
    def failed(self) -> bool:
        return self.kind in ("WRONG", "CRASH")


def smooth(blocks: int, width: int) -> nn.Module:
    """The model with branches, without rectifiers: where a compressed sum switches one, a gradient jumps."""
    model = models.branchy(blocks, width)
    for part in model.modules():
        for name, child in part.named_children():
            if isinstance(child, Stem):
                setattr(part, name, nn.Sequential(nn.Unflatten(1, (1, 8, 8)), child.convolution, nn.Tanh()))
            elif isinstance(child, nn.ReLU):
                setattr(part, name, nn.Tanh())
    return model


def _tokens(rows: int = 16, tokens: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x, y = (torch.randint(16, (rows, tokens), generator=generator) for _ in range(2))
    y[0, : tokens // 2] = -100  # (micro-batches and slices do not count alike)
    return x, y


def _pictures(rows: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return torch.rand(rows, 64, generator=generator), torch.randint(10, (rows,), generator=generator)


SMALL = {"width": 8, "heads": 2, "context": 8, "vocab": 16}
MODELS: dict[str, tuple[Callable[[], Any], Any]] = {
    "gpt": (partial(models.gpt, layers=4, dropout=0.1, fused=False, **SMALL), _tokens()),
    "tied": (partial(models.gpt, layers=4, tied=True, fused=False, **SMALL), _tokens()),
    "mixture": (partial(models.mixture, layers=4, experts=2, capacity=None, **SMALL), _tokens(32)),
    "mixture in slices": (
        partial(models.mixture, layers=4, experts=2, capacity=None, balance=False, **SMALL),
        _tokens(32),
    ),
    "branches": (partial(smooth, blocks=1, width=2), _pictures()),
}


def model_for(plan: Plan) -> str:
    """The model that a plan is tried on."""
    if plan.ep > 1:
        return "mixture in slices" if plan.slice_count > 1 else "mixture"
    return "branches" if plan.place == "branches" else "gpt"


def trial(words: str, ranks: Callable[[int], Ranks], name: str = "", steps: int = STEPS) -> Outcome:
    """What becomes of a plan."""
    try:
        plan = Plan.parse(words)
        compiled, job, nodes = _compiled(plan, name or model_for(plan), ranks)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            done, expected = _run(plan, compiled, job, nodes, name or model_for(plan), ranks(plan.ranks), steps)
    except PlanError as error:
        return Outcome("refused", str(error).split("\n")[0])
    except Exception as error:
        return Outcome("CRASH", f"{type(error).__name__}: {error}".split("\n")[0])
    outcome = _judged(plan, done, expected)
    whole = WHOLE.get(plan.compress.partition(":")[0], plan.compress)
    if plan.compress != whole and not outcome.failed:
        return trial(words.replace(f"compress={plan.compress}", f"compress={whole}"), ranks, name, steps)
    return outcome


def _compiled(
    plan: Plan, name: str, ranks: Callable[[int], Ranks]
) -> tuple[Callable[[int], Program], Job, tuple[int, ...]]:
    """What makes its program of so many steps; the job; how many nodes each layer has, if ranks share layers."""
    model, data = MODELS[name]
    job = Job(model, data, loss=_loss(name), optimizer=sgd, dtype=torch.float64, evaluate=plan.inference)
    built = job.build()
    if plan.sharing > 1:
        job = captured(replace(job, annotations=annotations_of(plan)), plan.sharing, plan.cut, ranks(plan.ranks))
        shape = shape_of(job.share(built, 0, Mesh(plan.shared), plan.inputs, plan.cut))
    else:
        shape = replace(shape_of(built), names=tuple(built._modules), edges=edges_of(built))
    unit = (1.0,) * shape.layers
    costs = LayerCosts(unit, unit, (1000,) * shape.layers, (2000,) * shape.layers, (1000,) * shape.layers)
    return lambda steps: plan.compile(shape, steps=steps, costs=costs), job, shape.nodes


def _loss(name: str) -> Any:
    return models.mixture_loss if name.startswith("mixture") else cross_entropy


def _run(
    plan: Plan,
    compiled: Callable[[int], Program],
    job: Job,
    nodes: tuple[int, ...],
    name: str,
    ranks: Ranks,
    steps: int,
) -> tuple[Execution, Reference]:
    if plan.sync == "ps":
        done, service = execute_served(compiled(steps), job, ranks, on_death=plan.on_death, keep_gradients=True)
        if plan.mode == "sync":
            return done, _plain(name, steps, plan.clip)
        return done, _replayed(job, served_order(service.order, plan.dp, plan.total_microbatches), plan.clip)
    block = steps if plan.asynchronous else plan.block(steps)
    rest = compiled(steps % block) if steps % block else None
    done = execute(compiled(block), job, cluster=ranks, passes=steps // block, rest=rest, check=False)
    if plan.asynchronous:
        return done, _replayed(job, order_of(done.program, nodes))
    if plan.local_steps and plan.dp > 1 and not plan.inference:
        return done, _replayed(job, local_order(steps, plan.dp, plan.total_microbatches, plan.local_steps), plan.clip)
    return done, _plain(name, steps, plan.clip, plan.inference)


def _replayed(job: Job, order: RecordedOrder, clip: float | None = None) -> Reference:
    """What plain torch makes of the recorded order."""
    return run(plainly.task_of(job, order, clip=clip))


@cache
def _plain(name: str, steps: int, clip: float | None, inference: bool = False) -> Reference:
    model, data = MODELS[name]
    job = Job(model, data, loss=_loss(name), optimizer=sgd, dtype=torch.float64, evaluate=inference)
    with torch.random.fork_rng(devices=[]):
        return run(plainly.task_of(job, steps, clip=clip, inference=inference))


def tolerance(plan: Plan) -> float:
    """How far gradients may be from those of plain torch in float64. Infinite if something is left out of sums."""
    exact = dict.fromkeys(("none", *WHOLE.values()), BOUND)
    sums = {**exact, "bf16": 2e-2, "fp16": 2e-3}.get(plan.compress, math.inf)
    return max(sums, 0.1) if plan.precision == "bf16" else sums


def _judged(plan: Plan, done: Execution, expected: Reference) -> Outcome:
    bound = tolerance(plan)
    if len(done.losses) != len(expected.losses):
        return Outcome("WRONG", f"{len(done.losses)} losses, not {len(expected.losses)}")
    worst, where = 0.0, ""
    for step, (a, b) in enumerate(zip(done.losses, expected.losses, strict=True)):
        error = abs(a - b) / max(1.0, abs(b))
        if not error <= worst:
            worst, where = error, f"loss of step {step}"
    if not plan.inference:
        if len(done.gradients) != len(expected.gradients):
            return Outcome("WRONG", f"gradients of {len(done.gradients)} updates, not {len(expected.gradients)}")
        for step, (mine, theirs) in enumerate(zip(done.gradients, expected.gradients, strict=True)):
            error = gradient_error(mine, theirs)
            if not error <= worst:
                worst, where = error, f"gradient of step {step}"
    if not worst <= bound:
        return Outcome("WRONG", f"{worst:.1e} ({where})")
    return Outcome("equal" if worst <= BOUND else "near", f"{worst:.1e}")
