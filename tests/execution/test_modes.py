"""The user chooses a model's modes and types: frozen norms, dropout switched off, rotary tables, mixed types."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from minipar import Plan, PlanError, resume, train
from minipar.execution.dtypes import check_narrow, convert, main_type, narrow
from minipar.execution.execution import Job, execute
from minipar.models.parameter_groups import shape_of
from minipar.training.reference import build
from minipar.training.reference import convert as convert_plainly
from tests.toys import rows

mse = nn.functional.mse_loss


def run(clusters, model, text, **more):
    plan = Plan.parse(text)
    options = {"steps": 3, "loss": mse, "dtype": torch.float64, "check": True, "progress": False}
    options["optimizer"] = partial(torch.optim.SGD, lr=0.1)
    return train(model, rows(12), plan, cluster=clusters(plan.ranks), **(options | more))


def frozen_norm() -> nn.Sequential:
    """A norm that is not to see the batch, and dropout that is off, in a model that trains."""
    norm = nn.BatchNorm1d(6)
    norm.running_mean.copy_(torch.arange(6.0))
    norm.running_var.fill_(4.0)
    layers = [nn.Linear(6, 6), norm.eval(), nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5).eval()), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(6, 6))


def frozen_norm_alone() -> nn.Sequential:
    return nn.Sequential(*(layer for layer in frozen_norm() if not isinstance(layer, nn.Dropout)))


MODES = ["pp=2 microbatches=3 checkpoint=1", "dp=2 sync=ps"]


@pytest.mark.filterwarnings("error:not equal to one device's")  # (it is)
@pytest.mark.parametrize("text", MODES)
def test_what_is_in_evaluation_mode_stays_so(clusters, text):
    found = run(clusters, frozen_norm_alone, text)
    assert found.max_error() <= 1e-12
    assert found.losses == pytest.approx(found.reference.losses, rel=1e-12)


def test_modes_beside_dropout_that_is_on_memory_and_a_saved_run(clusters, tmp_path):
    first = run(clusters, frozen_norm, "pp=2 microbatches=2", memory=True, save=tmp_path)
    assert first.max_error() <= 1e-12
    again = resume(tmp_path, frozen_norm, rows(12), "dp=2", steps=2, loss=mse, cluster=clusters(2), check=True,
                   progress=False, optimizer=partial(torch.optim.SGD, lr=0.1))  # fmt: skip
    assert again.max_error() <= 1e-12


def with_dropout() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.BatchNorm1d(6), nn.Linear(6, 6))


def test_inference_is_evaluation_unless_asked(clusters):
    text = "inference=true pp=2 microbatches=3"
    torch.manual_seed(0)
    model = with_dropout().double().eval()
    x, y = rows(12)
    expected = mse(model(x), y).item()
    found = run(clusters, with_dropout, text)
    assert found.losses == pytest.approx([expected] * 3, rel=1e-12)
    assert found.reference.losses == pytest.approx([expected] * 3, rel=1e-12)
    asked = run(clusters, partial(nn.Sequential, nn.Linear(6, 6), nn.Dropout(0.5)), text, keep_modes=True)
    assert asked.losses == pytest.approx(asked.reference.losses, rel=1e-12)
    assert len(set(asked.losses)) == 3, "dropout is on, and another one in every step"
    plan = Plan.parse(text)
    program = plan.compile(shape_of(with_dropout()))
    job = Job(with_dropout, rows(12), loss=mse, dtype=torch.float64)
    assert execute(program, job, cluster=clusters(plan.ranks)).losses == pytest.approx([expected], rel=1e-12)


# types ----------------------------------------------------------------------------------------------------------------


class Rotary(nn.Module):
    """Turns pairs of numbers by angles in a complex table, and counts in an integer buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.polar(torch.ones(3), torch.tensor([0.3, 1.1, 2.0])))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        turned = torch.view_as_complex(x.view(len(x), 3, 2).to(self.table.real.dtype)) * self.table
        return torch.view_as_real(turned).reshape(len(x), 6).to(x.dtype)


def rotary() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), Rotary(), nn.Linear(6, 6))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_complex_tables_keep_their_imaginary_parts(clusters, dtype):
    found = run(clusters, rotary, "pp=2 microbatches=3", dtype=dtype)
    assert found.max_error() <= (1e-12 if dtype is torch.float64 else 1e-5)
    x, y = (part.to(dtype) for part in rows(12))
    torch.manual_seed(0)
    model = rotary()
    if dtype is torch.float64:
        for layer in (model[0], model[2]):
            layer.double()
        model[1].table = model[1].table.to(torch.complex128)
    assert found.losses[0] == pytest.approx(mse(model(x), y).item(), rel=1e-12 if dtype is torch.float64 else 1e-5)


class Wide(nn.Module):
    """Computes in float64 whatever it is given, with a table of that type."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0, 1, 6, dtype=torch.float64) + 1e-9)

    def forward(self, x):
        return (x.double() * self.scale).to(x.dtype)


def mixed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), Wide(), nn.Linear(6, 6))


def test_a_mixture_of_types_stays_or_is_refused_by_name(clusters):
    found = run(clusters, mixed, "pp=2 microbatches=2", dtype=torch.float32)
    assert found.max_error() <= 1e-5
    with pytest.raises(
        PlanError, match=r"dtype=float64: the model is of float32, but 1\.scale is float64; possible is"
    ):
        run(clusters, mixed, "microbatches=2")
    with pytest.raises(PlanError, match=r"precision=bf16: the model is of float32, but 1\.scale is float64"):
        run(clusters, mixed, "dp=2 precision=bf16", dtype=torch.float32)


@pytest.mark.parametrize("change", [convert, convert_plainly])
def test_conversion_of_a_model(change):
    """The engine's, and the reference's, which is written by itself."""
    model = rotary()
    model.append(model[0])  # used twice
    model[1].register_buffer("same", model[1].table)
    model[2].weight.requires_grad_(False)
    weight = model[0].weight
    change(model, torch.float64)
    assert model[0].weight is weight is model[3].weight
    assert weight.dtype is torch.float64
    assert model[1].table.dtype is torch.complex128
    assert model[1].same is model[1].table
    assert model[1].calls.dtype is torch.int64
    assert not model[2].weight.requires_grad
    assert model[1].table.imag.abs().min() > 0.1


def test_main_type_and_narrowing():
    assert main_type(mixed()) is torch.float32
    assert main_type(nn.Sequential(nn.ReLU())) is None
    assert main_type(nn.Sequential(Rotary())) is torch.float32
    model = rotary()
    check_narrow(model, "bf16")
    narrow(model, torch.bfloat16)
    assert model[0].weight.dtype is torch.bfloat16
    assert model[1].table.dtype is torch.complex64
    model[1].turn = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(PlanError, match=r"the model is of bfloat16, but 1\.turn is complex64|1\.turn is complex64, of"):
        check_narrow(model, "bf16")


def test_complex_inputs_become_the_matching_type():
    x = torch.randn(4, 6, dtype=torch.complex64)
    job = Job(rotary, (x, torch.arange(4)), dtype=torch.float64)
    given, target = job.batches(0)
    assert given.dtype is torch.complex128
    assert torch.equal(given.to(torch.complex64), x)
    assert target.dtype is torch.int64


def test_the_reference_builds_the_user_s_model_as_it_is():
    made = build(frozen_norm, 0, torch.float64)
    assert [layer.training for layer in made] == [True, False, True, True, True]
    assert not any(module.training for module in build(frozen_norm, 0, torch.float64, evaluate=True).modules())
    assert isinstance(build([nn.Linear(2, 2), nn.ReLU()], 0, torch.float32), nn.Sequential)


# what is left after the last step -------------------------------------------------------------------------------------


class Doubling(nn.Module):
    """Has a buffer that changes with every forward, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        self.scale *= 2
        return self.norm(x)


def doubling() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), Doubling(), nn.Linear(6, 6))


@pytest.mark.filterwarnings("ignore:the batch is split")
def test_buffers_after_the_last_step_are_compared(clusters):
    whole = run(clusters, doubling, "pp=2")
    assert whole.max_error() <= 1e-12
    names = {f"1.norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert set(whole.reference.statistics) == names
    assert run(clusters, doubling, "microbatches=2").max_error() > 1, "it was called twice as often"
