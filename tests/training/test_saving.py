"""A run saved under one plan is loaded under any other, bit by bit, and training goes on as if it had not stopped."""

from __future__ import annotations

import math
import os
import resource
import sys
from dataclasses import dataclass, replace
from functools import partial

import cloudpickle
import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

import minipar
from minipar import Plan, PlanError, RankDied, SaveError, resume, train
from minipar.cluster import Cluster, worker
from minipar.comm import communicator
from minipar.execution.execution import Execution, Job, execute
from minipar.execution.executor import Executor
from minipar.execution.lines import Slice
from minipar.execution.saving import keeping, storage
from minipar.execution.saving.contents import outline_of
from minipar.execution.saving.folder import Saved, open_folder
from minipar.execution.saving.keeping import Share, Storing
from minipar.execution.saving.storage import Reading
from minipar.models.parameter_groups import shape_of
from tests.execution.test_updating import Stream
from tests.toys import rows, toy

pytestmark = pytest.mark.many(3)

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules["tests.execution.test_updating"])

mse = torch.nn.functional.mse_loss
MODEL = partial(toy, ("linear", "tuples", "dropout"), tied=True, frozen=(1,))
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=0.01)
ALONE = "dp=1 pp=1"
PLANS = [
    ALONE,
    "pp=4 schedule=gpipe microbatches=2",
    "dp=4 zero=2 bucket=none",
    "dp=2 zero=3 prefetch=0",
    "dp=2 pp=2 zero=3 microbatches=2",
    "pp=2 schedule=zb-v microbatches=3",
]


def job(model=MODEL, optimizer=ADAM, data=None, **options) -> Job:
    options.setdefault("dtype", torch.float64)
    return Job(model, data or Stream(), 12, mse, optimizer, seed=3, **options)


def run(clusters, text: str, work: Job, steps: int, **storing) -> Execution:
    program = Plan.parse(text).compile(shape_of(list(work.build())))
    cluster = clusters(len(program.ranks))
    return execute(program, work, cluster=cluster, passes=steps, keep_gradients=False, storing=Storing(**storing))


def saved_by(clusters, text: str, work: Job, folder, steps: int = 2) -> Saved:
    run(clusters, text, work, steps, folder=str(folder), token="0123abcd")
    return open_folder(folder)


def read(saved: Saved) -> dict[str, Tensor]:
    """Every saved tensor, whole."""
    reading, found = Reading(saved), {}
    for key, entry in saved.entries.items():
        found[key] = torch.empty(math.prod(entry.shape), dtype=storage.dtype_of(entry.dtype))
        reading.fill({(key, 0): found[key]})
        found[key] = found[key].view(entry.shape)
    return found


def assembled(shares: list[Share]) -> dict[str, Tensor]:
    """Every tensor of which the ranks brought shares, each element once."""
    found: dict[str, Tensor] = {}
    times: dict[str, Tensor] = {}
    for share in shares:
        assert not share.reason
        for key, shape, start, values, _ in share.pieces:
            flat = found.setdefault(key, torch.zeros(shape, dtype=values.dtype)).view(-1)
            flat[start : start + len(values)] = values
            times.setdefault(key, torch.zeros(math.prod(shape)))[start : start + len(values)] += 1
    assert all((count == 1).all() for count in times.values())
    return found


def taken(work: Job, program, saved: Saved) -> Share:
    """In a rank: what it takes of a saved run, before any step."""
    comm, model, storing = communicator.create(), work.build(), Storing(saved=saved, keep=None)
    outline = outline_of(model)
    executor = Executor(program, comm, model, work.loss, work.optimizer, work.seed)
    storing.begin(executor, outline)
    return storing.share(executor, outline, saved.header)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """The same tensors, bit by bit."""
    assert a.keys() == b.keys()
    for key, values in a.items():
        assert values.dtype == b[key].dtype, key
        assert values.shape == b[key].shape, key
        assert torch.equal(values, b[key]), key


@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAM], ids=["momentum", "adam"])
@pytest.mark.parametrize("before", PLANS)
def test_saved_under_any_plan_and_loaded_under_any_other(clusters, tmp_path, before, optimizer, pytestconfig):
    """Tied across stages, frozen and dropout layers; `--thorough`: all pairs, else the same plan and two others."""
    apart = range(len(PLANS)) if pytestconfig.getoption("--thorough") else (0, 1, 4)
    others = [PLANS[(PLANS.index(before) + k) % len(PLANS)] for k in apart]
    work = job(optimizer=optimizer)
    whole = run(clusters, before, work, 4)
    saved = saved_by(clusters, before, work, tmp_path)
    assert (saved.header.step, saved.header.seed, saved.header.batch) == (2, 3, 12)
    assert Plan.parse(saved.header.plan) == Plan.parse(before)
    expected = read(saved)
    assert sum(key.startswith("optimizer/") for key in expected) >= 10
    for after in others:
        program = Plan.parse(after).compile(shape_of(list(work.build())))
        shares = clusters(len(program.ranks)).run(taken, work, program, saved)
        same(assembled(shares), expected)
        losses = run(clusters, after, work, 2, saved=saved).losses
        assert losses == pytest.approx(whole.losses[2:], rel=1e-12)
        if before == after:
            assert losses == whole.losses[2:]


def test_losses_depend_on_everything_that_is_saved(clusters, tmp_path):
    """What the test above compares would show a lost parameter, optimizer state, step counter or step number."""
    work = job()
    saved = saved_by(clusters, ALONE, work, tmp_path)
    right = run(clusters, ALONE, work, 2, saved=saved).losses
    later = replace(saved, header=replace(saved.header, step=3))
    assert run(clusters, ALONE, work, 2, saved=later).losses != pytest.approx(right, rel=1e-9)
    for kind in ("parameters/0", "optimizer/exp_avg/", "optimizer/exp_avg_sq/", "optimizer/step/"):
        changed = {key: values * 2 if key.startswith(kind) else values for key, values in read(saved).items()}
        pieces = tuple(Slice(key, values.shape, 0, values.view(-1)) for key, values in changed.items())
        keeping.save([Share(saved.header, pieces)], tmp_path / "changed")
        losses = run(clusters, ALONE, work, 2, saved=open_folder(tmp_path / "changed")).losses
        assert losses != pytest.approx(right, rel=1e-9), kind


def unused() -> nn.Sequential:
    return toy(("unused", "linear"))


@pytest.mark.parametrize(("before", "after"), [(ALONE, "pp=2 dp=2 zero=3"), ("dp=4 zero=3", ALONE)])
def test_a_parameter_that_nothing_used_yet(clusters, tmp_path, before, after):
    """torch has no state for it; a slice of ZeRO has zeros."""
    work = job(unused)
    whole = run(clusters, ALONE, work, 4).losses
    saved = saved_by(clusters, before, work, tmp_path)
    losses = run(clusters, after, work, 2, saved=saved).losses
    assert losses == pytest.approx(whole[2:], rel=1e-12)


class Scaled(nn.Linear):
    """Has a parameter that is one number, and one without elements."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.scale = nn.Parameter(torch.ones(()))
        self.nothing = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x):
        return super().forward(x) * self.scale + self.nothing.sum()


def normed() -> nn.Sequential:
    return nn.Sequential(Scaled(), nn.BatchNorm1d(6), nn.Linear(6, 6))


@pytest.mark.parametrize(("before", "after"), [(ALONE, "pp=2"), ("pp=2", "dp=2 zero=3")])
def test_buffers_empty_parameters_and_single_numbers(clusters, tmp_path, before, after):
    work = job(normed)
    saved = saved_by(clusters, before, work, tmp_path)
    expected = read(saved)
    assert expected["buffers/1.num_batches_tracked"] == 2
    assert expected["buffers/1.running_mean"].abs().sum() > 0
    assert expected["optimizer/exp_avg/0.scale"] != 0
    assert expected["parameters/0.nothing"].shape == (0, 3)
    program = Plan.parse(after).compile(shape_of(list(work.build())))
    found = assembled(clusters(len(program.ranks)).run(taken, work, program, saved))
    for key in expected.keys() | found.keys():
        if not key.startswith("optimizer") or "nothing" not in key:
            assert torch.equal(found[key], expected[key]), key
    if "dp" not in after:  # replicas normalise their own rows
        whole = run(clusters, before, work, 3).losses
        assert run(clusters, after, work, 1, saved=saved).losses == pytest.approx(whole[2:], rel=1e-12)


class Counting(torch.optim.Optimizer):
    """Keeps plain numbers, and a state that is not one number an element."""

    def __init__(self, parameters, rows_too: bool = False) -> None:
        super().__init__(parameters, {"lr": 0.1, "rows_too": rows_too})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                state["rate"] = state.get("rate", 1.0) * 0.5
                state["nothing"] = None
                if group["rows_too"] and p.dim() > 1:
                    state["row"] = state.get("row", 0) + p.grad.abs().sum(1)
                p.sub_(p.grad, alpha=group["lr"] * state["rate"] * state["count"])


def test_plain_numbers_come_back_as_such(clusters, tmp_path):
    work = job(optimizer=Counting)
    whole = run(clusters, ALONE, work, 4).losses
    saved = saved_by(clusters, ALONE, work, tmp_path)
    assert saved.entries["optimizer/count/0.weight"].number
    assert run(clusters, "dp=2 zero=3", work, 2, saved=saved).losses == pytest.approx(whole[2:], rel=1e-12)


def test_what_zero_cannot_slice(clusters, tmp_path):
    model = partial(toy, ("linear",))
    work = job(model, optimizer=partial(Counting, rows_too=True))
    saved = saved_by(clusters, ALONE, work, tmp_path)
    sliced = job(model, optimizer=Counting)
    with pytest.raises(SaveError, match=r"state 'row' of 0.weight has shape \(6,\), and cannot be sliced; .* zero=0"):
        run(clusters, "dp=2 zero=1", sliced, 1, saved=saved)
    assert run(clusters, "pp=2", work, 1, saved=saved).losses


def test_zero_goes_on_with_states_of_different_ages(clusters, tmp_path):
    model = partial(toy, ("linear",))
    saved = saved_by(clusters, ALONE, job(model), tmp_path)
    found = read(saved)
    found["optimizer/step/0.weight"] -= 1
    mixed = tmp_path / "mixed"
    keeping.save([Share(saved.header, tuple(Slice(k, v.shape, 0, v.view(-1)) for k, v in found.items()))], mixed)
    plain, sliced = (run(clusters, words, job(model), 3, saved=open_folder(mixed)) for words in (ALONE, "dp=2 zero=2"))
    assert sliced.losses == pytest.approx(plain.losses, rel=1e-12)


def test_states_that_cannot_be_saved_are_named(clusters, tmp_path):
    class Listing(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            self.state[self.param_groups[0]["params"][0]]["history"] = [1, 2]

    work = job(partial(toy, ()), optimizer=partial(Listing, lr=0.1))
    with pytest.raises(SaveError, match="state 'history' of 0.weight is a list; possible are tensors and numbers"):
        saved_by(clusters, ALONE, work, tmp_path)
    assert not list(tmp_path.iterdir())
    kept = run(clusters, ALONE, work, 1, keep=None)  # nobody asked: the run itself is not disturbed
    with pytest.raises(SaveError, match="history"):
        keeping.save(kept.shares, tmp_path)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("precision=bf16", "dp=2 zero=3 precision=bf16"),
        ("dp=2 zero=2 precision=bf16", ALONE),
        ("dp=2 zero=3 offload=optimizer", "pp=2 offload=optimizer"),
    ],
)
def test_what_the_optimizer_works_on_is_saved(clusters, tmp_path, before, after):
    """Its float32 copies and not the rounded parameters; its copies on the host."""
    work = job(dtype=torch.float32)
    saved = saved_by(clusters, before, work, tmp_path)
    expected = read(saved)
    assert expected["parameters/0.weight"].dtype == torch.float32
    program = Plan.parse(after).compile(shape_of(list(work.build())))
    found = assembled(clusters(len(program.ranks)).run(taken, work, program, saved))
    frozen = {"parameters/1.0.weight", "parameters/1.0.bias"}  # rounded only where the plan says so
    assert not torch.equal(expected["parameters/0.weight"], expected["parameters/0.weight"].bfloat16().float())
    same(*({key: values for key, values in each.items() if key not in frozen} for each in (found, expected)))
    own = dict(work.build().named_parameters())
    for key in frozen:
        assert torch.equal(found[key].bfloat16(), own[key.partition("/")[2]].bfloat16())
    whole, then = run(clusters, before, work, 4), run(clusters, after, work, 2, saved=saved)
    assert then.losses == pytest.approx(whole.losses[2:], abs=3e-3)


def test_replicas_share_the_writing(clusters, tmp_path):
    wide = partial(toy, (), width=600)
    work = Job(wide, rows(8, 600), loss=mse, optimizer=ADAM)
    program = Plan(dp=4).compile(shape_of(list(wide())))
    storing = Storing(folder=str(tmp_path), token="0123abcd")
    execute(program, work, cluster=clusters(4), keep_gradients=False, storing=storing)
    saved = open_folder(tmp_path)
    sizes = [os.path.getsize(os.path.join(saved.files, f"part-{k}.safetensors")) for k in range(4)]
    total = sum(4 * math.prod(entry.shape) for entry in saved.entries.values())
    assert total > 6 * 600 * 600 * 4
    assert max(sizes) < 1.1 * total / 4
    assert sum(sizes) < 1.1 * total


def test_long_tensors_are_cut_and_read_in_part(clusters, tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "PIECE", 64)
    kept = run(clusters, "dp=2 zero=3", job(), 1, keep=None)
    keeping.save(kept.shares, tmp_path)
    saved = open_folder(tmp_path)
    assert max(chunk.size for entry in saved.entries.values() for chunk in entry.chunks) == 8
    same(read(saved), assembled(kept.shares))
    part = torch.zeros(11, dtype=torch.float64)
    Reading(saved).fill({("parameters/0.weight", 5): part})
    assert torch.equal(part, read(saved)["parameters/0.weight"].view(-1)[5:16])


def test_another_model_or_optimizer(clusters, tmp_path):
    work = job(partial(toy, ("linear",)))
    saved = saved_by(clusters, ALONE, work, tmp_path)
    for model, message in [
        (partial(toy, ("linear", "linear")), r"parameter 4 is 2.weight \(6×6, float64\) there, and 2.0.weight"),
        (partial(toy, ("linear",), frozen=(0,)), r"0.weight \(6×6, float64\) there, and 0.weight \(.*, frozen\) here"),
        (partial(toy, ()), r"parameter 2 is 1.0.weight \(6×6, float64\) there, and 1.weight"),
    ]:
        with pytest.raises(SaveError, match=message):
            run(clusters, "pp=2", job(model), 1, saved=saved)
    with pytest.raises(SaveError, match=r"float64\) there, and 0.weight \(6×6, float32\) here"):
        run(clusters, ALONE, job(partial(toy, ("linear",)), dtype=torch.float32), 1, saved=saved)
    with pytest.raises(SaveError, match=r"torch.optim.adam.Adam, not torch.optim.sgd.SGD; go on with optimizer="):
        run(clusters, ALONE, job(partial(toy, ("linear",)), optimizer=MOMENTUM), 1, saved=saved)


# train, run.save, resume ----------------------------------------------------------------------------------------------


def trained(clusters, text: str, **options):
    options = {"loss": mse, "optimizer": ADAM, "dtype": torch.float64, "batch": 12, "seed": 3, **options}
    plan = Plan.parse(text)
    return train(MODEL, Stream(), plan, cluster=clusters(plan.ranks), progress=False, **options)


def test_train_save_resume(clusters, tmp_path):
    whole = trained(clusters, ALONE, steps=4)
    first = trained(clusters, "dp=2 zero=2", steps=2)
    first.save(tmp_path)
    options = {"loss": mse, "optimizer": ADAM, "progress": False}
    for plan in (None, ALONE, "pp=2 microbatches=2"):
        ranks = Plan.parse(plan or first.plan).ranks
        then = resume(tmp_path, MODEL, Stream(), plan, steps=2, cluster=clusters(ranks), check=True, **options)
        assert then.plan == Plan.parse(plan or first.plan)
        assert then.first_step == 2
        assert first.losses + then.losses == pytest.approx(whole.losses, rel=1e-12)
        assert then.losses == pytest.approx(then.reference.losses, rel=1e-12)
        assert then.max_error() < 1e-12
    then.save(tmp_path)
    assert open_folder(tmp_path).header.step == 4
    assert len(list(tmp_path.iterdir())) == 2  # the index, and one step


def test_saving_while_it_runs(clusters, tmp_path):
    folder = tmp_path / "new" / "run"
    run = trained(clusters, "pp=2", steps=3, save=folder, save_every=2, keep=False)
    assert open_folder(folder).header.step == 3
    assert len(list(folder.iterdir())) == 2
    with pytest.raises(SaveError, match=r"run.save: its state was not kept; possible: train\(..., keep=True\)"):
        run.save(tmp_path / "other")
    then = trained(clusters, "dp=2", steps=1, resume=folder)
    assert run.losses + then.losses == pytest.approx(trained(clusters, ALONE, steps=4).losses, rel=1e-12)


def test_a_run_goes_on_after_it_was_saved(clusters, tmp_path):
    work, text = job(), "dp=2 pp=2 zero=3"
    found = run(clusters, text, work, 3, folder=str(tmp_path), every=1, token="0123abcd")
    assert found.losses == run(clusters, text, work, 3).losses
    assert open_folder(tmp_path).header.step == 3


def test_only_small_states_come_back_unasked(clusters, tmp_path, monkeypatch):
    monkeypatch.setattr(keeping, "KEEP", 5000)
    with pytest.raises(SaveError, match=r"its state has 0.0 MiB, of which up to 0 are kept unasked.*save=folder"):
        trained(clusters, "dp=2", steps=1).save(tmp_path)
    trained(clusters, "dp=2", steps=1, keep=True).save(tmp_path)
    assert open_folder(tmp_path).header.step == 1


def test_shares_carry_nothing_but_their_elements(clusters):
    kept = run(clusters, "dp=4 zero=3", job(), 1, keep=None)
    state = sum(math.prod(piece.values.shape) for share in kept.shares for piece in share.pieces)
    memory = sum(piece.values.untyped_storage().nbytes() for share in kept.shares for piece in share.pieces)
    assert memory == 8 * state - 4 * sum(p.key.startswith("optimizer/step/") for s in kept.shares for p in s.pieces)


def test_export(clusters, tmp_path):
    run = trained(clusters, "dp=2 pp=2 zero=3", steps=2)
    run.export(tmp_path / "model.safetensors")
    run.save(tmp_path / "run")
    same(load_file(tmp_path / "model.safetensors"), keeping.model_in(tmp_path / "run"))
    model = Job(MODEL, Stream(), dtype=torch.float64).build()
    load_model(model, tmp_path / "model.safetensors")
    same({f"parameters/{name}": p.detach() for name, p in model.named_parameters()},
         {k: v for k, v in read(open_folder(tmp_path / "run")).items() if k.startswith("parameters/")})  # fmt: skip
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.safetensors", "run"]
    with pytest.raises(SaveError, match=r"cannot save there: .*No such file"):
        run.export(tmp_path / "nowhere" / "model.safetensors")


def test_wrong_requests(clusters, tmp_path):
    with pytest.raises(PlanError, match="save_every=0: must be"):
        trained(clusters, ALONE, save=tmp_path, save_every=0)
    with pytest.raises(PlanError, match="save_every=2: needs save=folder"):
        trained(clusters, ALONE, save_every=2)
    with pytest.raises(SaveError, match=r"no saved run there \(minipar.json: No such file.*run.save"):
        resume(tmp_path / "nowhere", MODEL, Stream())
    assert "SaveError" in dir(minipar)
    assert minipar.resume is resume


def test_a_plan_of_an_older_version_is_named(clusters, tmp_path, monkeypatch):
    saved = saved_by(clusters, ALONE, job(), tmp_path)
    older = replace(saved, header=replace(saved.header, plan="dp=2 check=true"))
    monkeypatch.setattr("minipar.training.training.open_folder", lambda folder: older)
    with pytest.raises(SaveError, match=r"was saved under 'dp=2 check=true', .*'check': unknown.* resume\(.*plan="):
        resume(tmp_path, MODEL, Stream())


@dataclass(frozen=True)
class Deadly(Stream):
    """Ends the process of rank 1 when it gets the rows of a step."""

    last: int = 5

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        if step == self.last and worker.in_rank() and worker.context().rank == 1:
            os._exit(9)
        return super().batch(step, size)


def test_a_rank_that_dies_costs_the_steps_since_the_last_save(clusters, tmp_path):
    work = job()
    whole = run(clusters, ALONE, work, 6).losses
    program = Plan(pp=2).compile(shape_of(list(work.build())))
    storing = Storing(folder=str(tmp_path), every=2, token="0123abcd")
    with Cluster(2, device="cpu") as own, pytest.raises(RankDied):
        execute(program, job(data=Deadly()), cluster=own, passes=8, keep_gradients=False, storing=storing)
    saved = open_folder(tmp_path)
    assert saved.header.step == 4
    assert run(clusters, "dp=2 zero=3", work, 2, saved=saved).losses == pytest.approx(whole[4:], rel=1e-12)


@dataclass(frozen=True)
class Filling(Stream):
    """Once it gives the rows of step 3, rank 1 can write files of 1000 bytes at most, as on a disk without room."""

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        if step == 3 and worker.in_rank() and worker.context().rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        return super().batch(step, size)


def test_a_rank_without_room_on_its_disk(clusters, tmp_path):
    """Its error is the run's; the save before counts, and nothing of the new one is left."""
    work = job(data=Filling())
    program = Plan(pp=2).compile(shape_of(list(work.build())))
    storing = Storing(folder=str(tmp_path), every=2, token="89abcdef")
    message = "cannot save there.*File too large.*before still counts.*free some room"
    with Cluster(2, device="cpu") as own, pytest.raises(SaveError, match=message):
        execute(program, work, cluster=own, passes=4, keep_gradients=False, storing=storing)
    assert open_folder(tmp_path).header.step == 2
    assert len(list(tmp_path.iterdir())) == 2
    whole = run(clusters, ALONE, job(), 4).losses
    assert run(clusters, "dp=2", job(), 2, saved=open_folder(tmp_path)).losses == pytest.approx(whole[2:], rel=1e-12)


def test_the_optimizer_is_named_also_where_the_first_rank_has_none(clusters, tmp_path):
    work = job(partial(toy, ("linear",), frozen=(0,)))
    saved = saved_by(clusters, "pp=3 split=1,1,1", work, tmp_path)
    assert saved.header.optimizer == "torch.optim.adam.Adam"


class Rotated(nn.Module):
    """Turns pairs of numbers by a complex table, and by angles that are learned."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.polar(torch.ones(3), torch.arange(3.0)))
        self.turn = nn.Parameter(torch.polar(torch.ones(3), torch.arange(3.0)))

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.view_as_complex(x.reshape(len(x), 3, 2).contiguous()) * self.table * self.turn
        return torch.view_as_real(turned).reshape(x.shape)


def rotating() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), Rotated(), nn.Linear(6, 6))


def test_complex_parameters_and_buffers(clusters, tmp_path):
    before, after = "dp=2", "pp=2 microbatches=2"
    keys = {"loss": mse, "optimizer": MOMENTUM, "progress": False}
    given = {"batch": 8, "dtype": torch.float64, **keys}
    first, second = (clusters(Plan.parse(text).ranks) for text in (before, after))
    whole = train(rotating, Stream(), after, cluster=second, steps=4, check=True, **given)
    assert whole.max_error() <= 1e-12
    train(rotating, Stream(), before, cluster=first, steps=2, save=tmp_path / "run", **given)
    rest = resume(tmp_path / "run", rotating, Stream(), after, cluster=second, steps=2, **keys)
    for mine, plain in zip(rest.losses, whole.losses[2:], strict=True):
        assert mine == pytest.approx(plain, rel=1e-12)
    with pytest.raises(SaveError, match=r"1\.(table|turn): is of torch.complex128, which a safetensors file cannot"):
        rest.export(tmp_path / "model.safetensors")
