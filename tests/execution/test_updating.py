"""One optimizer and one scheduler for the whole model under every plan, compared with plain torch loops."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import minipar
from minipar import PlanError, SaveError, StepInfo, resume, train
from minipar.execution.saving.folder import open_folder
from minipar.execution.updating import Form, OptimizerSchedule, Update
from tests.toys import Tied

pytestmark = pytest.mark.many(3)

cloudpickle.register_pickle_by_value(sys.modules[__name__])

mse = nn.functional.mse_loss


@dataclass(frozen=True)
class Stream:
    """Other rows at every step, so that a run that goes on at the wrong one has other losses."""

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        return tuple(torch.randn(size, 6, generator=generator, dtype=torch.float64) for _ in range(2))


def model() -> nn.Sequential:
    """Matrices, biases, a norm, a frozen bias, a tie between the first and the last layer."""
    first = nn.Linear(6, 6)
    layers = [first, nn.LayerNorm(6), nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6), Tied(first)]
    layers[2].bias.requires_grad_(False)
    layers[2].weight.rate, layers[4].weight = 0.02, Slow(layers[4].weight.data)
    return nn.Sequential(*layers)


class Slow(nn.Parameter):
    """Says by its class how it is trained."""


def recipe(named_parameters: Any) -> torch.optim.Optimizer:
    """The usual one: no decay for biases and norms; another rate for the head, which is only a bias here."""
    decayed = [p for name, p in named_parameters if name.endswith("weight") and not name.startswith("1.")]
    head = [p for name, p in named_parameters if name == "5.bias"]
    others = [p for name, p in named_parameters if name in ("0.bias", "1.weight", "1.bias", "4.bias")]
    assert len(decayed) + len(head) + len(others) == len(named_parameters)
    groups = [
        {"params": decayed, "weight_decay": 0.5},
        {"params": others, "weight_decay": 0.0, "betas": (0.8, 0.9)},
        {"params": head, "lr": 0.05, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


def by_shape(parameters: Any) -> torch.optim.Optimizer:
    matrices = [p for p in parameters if p.dim() > 1]
    others = [p for p in parameters if p.dim() <= 1]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}])


def by_place(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": parameters[:-1], "lr": 0.1}, {"params": parameters[-1:], "lr": 0.7}])


def by_mark(parameters: Any) -> torch.optim.Optimizer:
    rates = [0.3 if isinstance(p, Slow) else getattr(p, "rate", 0.1) for p in parameters]
    return torch.optim.SGD([{"params": [p], "lr": rate} for p, rate in zip(parameters, rates, strict=True)])


COSINE = partial(lr_scheduler.CosineAnnealingLR, T_max=5)
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def factors(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    """One function for each group of the whole model."""
    return lr_scheduler.LambdaLR(optimizer, [lambda s: 1 / (1 + s), lambda s: 0.5**s, lambda s: 1.0 + s])


def warm_up(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    first = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    return lr_scheduler.SequentialLR(optimizer, [first, lr_scheduler.ExponentialLR(optimizer, 0.7)], milestones=[2])


def plainly(
    make: Callable[..., torch.optim.Optimizer],
    scheduler: Callable[..., Any] | None = None,
    steps: int = 4,
    names: bool = False,
    clip: float = math.inf,
) -> tuple[list[float], dict[str, Tensor], list[StepInfo]]:
    """Losses, parameters at the end, and what is known of each step, of a plain torch loop."""
    torch.manual_seed(0)
    net = model().double()
    trained = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
    optimizer = make(trained if names else [p for _, p in trained])
    schedule = scheduler(optimizer) if scheduler is not None else None
    told = []
    for step in range(steps):
        x, y = Stream().batch(step, 13)
        loss = mse(net(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_([p for _, p in trained], clip)
        told.append(StepInfo(step, loss.item(), tuple(group["lr"] for group in optimizer.param_groups), norm.item()))
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
    return [info.loss for info in told], {name: p.detach() for name, p in net.named_parameters()}, told


def trained(
    clusters, tmp_path, text: str, optimizer: Any, steps: int = 4, **options: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and parameters at the end of the same under a plan."""
    from safetensors.torch import load_file

    plan = minipar.Plan.parse(text)
    run = train(model, Stream(), plan, cluster=clusters(plan.ranks), steps=steps, batch=13, loss=mse,
                optimizer=optimizer, dtype=torch.float64, progress=False, **options)  # fmt: skip
    if plan.sync == "ps":
        return run.losses, run.service.parameters
    if "offload" in text:  # (parameters that are away are not brought back; the losses depend on them)
        return run.losses, {}
    run.export(tmp_path / "model.safetensors")
    return run.losses, load_file(tmp_path / "model.safetensors")


def same(found: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-11)
    for name, values in found[1].items():
        assert torch.allclose(values, expected[1][name], rtol=0, atol=1e-11), name


PLANS = [
    "dp=2 zero=2 microbatches=2 bucket=none",
    "dp=2 pp=2 zero=3 microbatches=2",
    "dp=2 zero=3 offload=optimizer,parameters",
    "pp=2 schedule=zb-h1 microbatches=3 clip=1e6",
    "dp=2 sync=ps servers=2 bucket=flat",
]


@pytest.mark.parametrize("text", PLANS)
def test_groups_by_name_and_a_scheduler_are_plain_torch_s(clusters, tmp_path, text):
    """Three groups with a rate each: a stage has nothing of some of them, and slices cross their borders."""
    expected = plainly(recipe, factors, names=True)
    same(trained(clusters, tmp_path, text, recipe, scheduler=factors), expected)
    other = plainly(recipe, names=True)
    assert other[0] != pytest.approx(expected[0], rel=1e-6), "the scheduler changes something"


@pytest.mark.parametrize("optimizer", [by_shape, by_place, by_mark, partial(torch.optim.Adagrad, lr=0.1,
                                                                           initial_accumulator_value=0.3)])  # fmt: skip
@pytest.mark.parametrize("text", ["dp=2 zero=3", "pp=2 microbatches=2", "dp=2 sync=ps"])
def test_groups_by_shape_or_place_are_those_of_the_whole_model(clusters, tmp_path, text, optimizer):
    """A slice is flat, and a stage's last parameter is not the model's; some optimizers begin with a state."""
    same(trained(clusters, tmp_path, text, optimizer), plainly(optimizer))


ONE_CYCLE = partial(lr_scheduler.OneCycleLR, max_lr=0.4, total_steps=9)


@pytest.mark.parametrize(
    ("text", "scheduler"), [("dp=2 pp=2 zero=1 microbatches=3", ONE_CYCLE), ("dp=2 overlap=priority", warm_up)]
)
def test_the_scheduler_steps_once_a_step(clusters, tmp_path, text, scheduler):
    """Not per micro-batch, not per optimizer of a rank; what it does to momentum is done, too."""
    same(trained(clusters, tmp_path, text, MOMENTUM, 6, scheduler=scheduler), plainly(MOMENTUM, scheduler, 6))


def test_with_bf16_the_float32_parameters_are_grouped(clusters):
    """Rounding differs from plain torch's; with rates of 0 nothing moves but the head."""

    def head_only(named_parameters: Any) -> torch.optim.Optimizer:
        head = [p for name, p in named_parameters if name.startswith("4.")]
        rest = [p for name, p in named_parameters if not name.startswith("4.")]
        return torch.optim.SGD([{"params": rest, "lr": 0.0}, {"params": head}], lr=0.5)

    for text in ("dp=2 zero=2 precision=bf16", "pp=2 precision=bf16"):
        runs = [
            train(model, Stream(), text, cluster=clusters(2), steps=steps, batch=12, loss=mse, optimizer=head_only,
                  progress=False, keep=True)
            for steps in (1, 3)
        ]  # fmt: skip
        before, after = ({(p.key, p.start): p.values for s in run.shares for p in s.pieces} for run in runs)
        for key, values in before.items():
            if key[0].startswith("parameters/"):
                assert torch.equal(values, after[key]) != key[0].startswith("parameters/4."), key


def test_without_flush_it_steps_once_an_update(clusters):
    """The replay of the recorded order, in plain torch, has the same scheduler and groups."""
    text = "pp=4 schedule=pipedream microbatches=3"

    def untied() -> nn.Sequential:
        return nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 6))

    def groups(named_parameters: Any) -> torch.optim.Optimizer:
        weights = [p for name, p in named_parameters if name == "0.weight"]
        others = [p for name, p in named_parameters if name != "0.weight"]
        return torch.optim.SGD([{"params": weights, "lr": 0.2}, {"params": others}], lr=0.05)

    options: dict[str, Any] = {"cluster": clusters(4), "steps": 4, "batch": 12, "loss": mse,
                               "dtype": torch.float64, "progress": False}  # fmt: skip
    run = train(untied, Stream(), text, optimizer=groups, scheduler=COSINE, check=True, **options)
    assert run.max_error() <= 1e-12
    plain = train(untied, Stream(), text, optimizer=groups, **options)
    assert run.losses[:2] != pytest.approx(plain.losses[:2], rel=1e-9) or run.losses[-1] != plain.losses[-1]


@pytest.mark.parametrize(
    ("before", "after", "scheduler"),
    [("pp=2", "dp=2 zero=3", warm_up), ("dp=2", "pp=2", partial(lr_scheduler.MultiStepLR, milestones=[1, 1, 3]))],
)
def test_resumed_it_goes_on_as_if_it_had_not_stopped(clusters, tmp_path, before, after, scheduler):
    expected, _, _ = plainly(MOMENTUM, scheduler, 6)
    options: dict[str, Any] = {"loss": mse, "optimizer": MOMENTUM, "scheduler": scheduler, "progress": False,
                               "cluster": clusters(2)}  # fmt: skip
    first = train(model, Stream(), before, steps=3, batch=13, dtype=torch.float64, save=tmp_path, **options)
    second = resume(tmp_path, model, Stream(), after, steps=3, check=True, **options)
    assert first.losses + second.losses == pytest.approx(expected, rel=1e-11)
    assert second.reference.losses == pytest.approx(expected[3:], rel=1e-11)
    text = (tmp_path / "minipar.json").read_text()
    assert "schedule" in json.loads(text)["index"]


def test_groups_and_scheduler_are_resumed(clusters, tmp_path):
    """By run.save as well. States of slices that groups cut belong to the same elements under another plan."""
    expected, _, _ = plainly(recipe, factors, 6, names=True)
    options: dict[str, Any] = {"loss": mse, "optimizer": recipe, "scheduler": factors, "progress": False}
    first = train(
        model, Stream(), "dp=2 zero=2", steps=2, batch=13, dtype=torch.float64, cluster=clusters(2), **options
    )
    first.save(tmp_path / "a")
    second = resume(tmp_path / "a", model, Stream(), "pp=4 microbatches=2", steps=2, cluster=clusters(4),
                    save=tmp_path / "b", **options)  # fmt: skip
    for text, ranks in (("dp=2 pp=2 zero=3", 4), ("dp=2 zero=1 offload=optimizer offload_to=disk", 2)):
        third = resume(tmp_path / "b", model, Stream(), text, steps=2, cluster=clusters(ranks), **options)
        assert first.losses + second.losses + third.losses == pytest.approx(expected, rel=1e-11), text


def test_another_scheduler_than_the_saved_one_is_said(clusters, tmp_path):
    options: dict[str, Any] = {"loss": mse, "optimizer": MOMENTUM, "progress": False, "cluster": clusters(1)}
    train(model, Stream(), "", steps=2, batch=13, dtype=torch.float64, save=tmp_path, scheduler=COSINE, **options)
    with pytest.warns(UserWarning, match="saved with the scheduler .*CosineAnnealingLR, and goes on without one"):
        resume(tmp_path, model, Stream(), steps=1, **options)
    with pytest.warns(UserWarning, match=r"CosineAnnealingLR; .*ExponentialLR begins anew"):
        resume(tmp_path, model, Stream(), steps=1, scheduler=partial(lr_scheduler.ExponentialLR, gamma=0.5), **options)
    assert open_folder(tmp_path).header.step == 2


class Decay(lr_scheduler.LRScheduler):
    """A user's own; `notes` cannot be saved."""

    notes: Any = None

    def get_lr(self) -> list[float]:
        return [group["lr"] * (1.0 if self.last_epoch == 0 else 0.9) for group in self.optimizer.param_groups]


def test_what_cannot_be_is_refused_by_name(clusters, tmp_path):
    go: Any = partial(train, model, Stream(), "dp=2 zero=1", cluster=clusters(2), batch=13, loss=mse, progress=False)
    with pytest.raises(PlanError, match=r"scheduler ReduceLROnPlateau: step\(\) needs metrics"):
        go(scheduler=lr_scheduler.ReduceLROnPlateau)
    with pytest.raises(PlanError, match="scheduler: made a float"):
        go(scheduler=lambda optimizer: 0.1)
    own = model()
    with pytest.raises(PlanError, match="optimizer SGD: has a parameter .* that it was not given"):
        go(optimizer=lambda parameters: torch.optim.SGD(own.parameters(), lr=0.1))
    with pytest.raises(PlanError, match="optimizer: made a list"):
        go(optimizer=lambda parameters: parameters)

    def noting(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        made = Decay(optimizer)
        made.notes = object()
        return made

    with pytest.raises(SaveError, match="notes is a object, which cannot be saved"):
        go(scheduler=noting, steps=1, save=tmp_path)
    assert len(go(scheduler=noting, steps=1).losses) == 1


def test_torch_s_own_optimizers_take_names() -> None:
    forms = (Form("a.weight", (2, 3), torch.float32), Form("a.bias", (3,), torch.float32))
    update = Update(minipar.named(partial(torch.optim.AdamW, lr=0.1)), forms)
    assert update.whole.param_groups[0]["param_names"] == ["a.weight", "a.bias"]
    assert update.group_of == {"a.weight": 0, "a.bias": 0}


def test_settings_of_past_updates_are_let_go() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = OptimizerSchedule(optimizer, partial(lr_scheduler.ExponentialLR, gamma=0.5))
    assert [schedule.at(k)[0]["lr"] for k in (2, 0, 1)] == [0.25, 1.0, 0.5]
    schedule.forget(2)
    assert list(schedule._settings) == [2]
