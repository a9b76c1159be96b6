"""Local SGD: when replicas are averaged, what verify refuses, exact replays, and convergence."""

import sys
from dataclasses import dataclass
from functools import partial

import cloudpickle
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from minipar import Plan, Program, resume, simulate, train, verify
from minipar.errors import PlanError, ProgramError, SaveError
from minipar.program import Local, Op
from tests.fuzz.fingerprints import judge
from tests.interpreters import compiled, shape
from tests.toys import rows, toy

pytestmark = pytest.mark.many(3)

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def listing(program, rank=0):
    return [str(ins) for ins in program.ranks[rank]]


def test_replicas_are_averaged_after_so_many_steps_and_at_the_end():
    program = compiled("dp=2 local_steps=2 bucket=none", 2, steps=3)
    step, average = ["F 0:2 mb0", "B 0:2 mb0", "STEP 0:2"], ["ALL_REDUCE 0 over 0,1", "ALL_REDUCE 1 over 0,1"]
    assert listing(program) == [*step, *step, *average, *step, *average]
    assert program.contract == Local(2)
    assert Program.from_json(program.to_json()) == program
    verify(program)
    assert judge(program) == ""
    assert compiled("local_steps=2", 2, steps=2).contract == Local(2)  # one replica has nothing to average
    verify(compiled("local_steps=2", 2, steps=2))


def test_messages_of_a_round_are_those_of_one_step():
    model = shape(4, size=1000)
    per_step = [
        sum(part.bytes for ins in compiled(f"dp=2 {words}", model, steps=6).ranks[0] for part in ins.parts if ins.group)
        for words in ("", "local_steps=1", "local_steps=3", "local_steps=6")
    ]
    assert per_step == [48000, 48000, 16000, 8000]
    assert simulate(compiled("dp=2 local_steps=3", model, steps=3)).time > 0


def test_what_breaks_the_promise_is_refused():
    program = compiled("dp=2 local_steps=2", 2, steps=4)
    row = list(program.ranks[0])
    k = next(k for k, ins in enumerate(row) if ins.op is Op.ALL_REDUCE)

    def both(rows):
        mutant = program
        for rank in (0, 1):
            mutant = mutant.with_rank(rank, rows)
        return mutant

    gradients = compiled("dp=2 bucket=flat overlap=none", 2).ranks[0][2]
    for rows_, says in [
        (
            [*row[:k], *row[k + 1 :]],
            "of step 2 uses param(0) after 2 updates by its replica alone; the program promises 0",
        ),
        (row[:-1], "ends with param(0) of its own: after its last STEP it is not averaged over the replicas"),
        (
            [*row[: k - 1], row[k], row[k - 1], *row[k + 1 :]],
            "`STEP 0:2` of step 1 uses param(0) after 0 updates by its replica alone; the program promises 1",
        ),
        ([*row[: k - 2], row[k], *row[k - 2 : k], *row[k + 1 :]], "after 0 updates by its replica alone; the program"),
        ([*row[:2], gradients, *row[2:]], "the replica's own update of param(0) uses micro-batch 0 of replica"),
    ]:
        mutant = both(rows_)
        with pytest.raises(ProgramError) as caught:
            verify(mutant)
        assert says in str(caught.value)
        assert judge(mutant)
    early = program.with_rank(1, [*row[:2], row[k], *row[2:k], *row[k + 1 :]])
    with pytest.raises(ProgramError, match="averages param"):
        verify(early)
    synchronous = compiled("dp=2 bucket=none", 2)
    average = row[k]
    with pytest.raises(ProgramError, match="sums parameters; possible with contract Local"):
        verify(synchronous.with_rank(0, [*synchronous.ranks[0], average]))


# on ranks -------------------------------------------------------------------------------------------------------------

MODEL = partial(toy, ("linear", "tuples", "dropout", "in-place", "unused"), frozen=(1,))
SGD = partial(torch.optim.SGD, lr=0.3)
MOMENTUM, ADAMW = partial(torch.optim.SGD, lr=0.3, momentum=0.9), partial(torch.optim.AdamW, lr=0.01)


def run(plan, cluster, steps, optimizer=SGD, count=17, model=MODEL, data=None, loss=nn.functional.mse_loss, **options):
    return train(
        model, data or rows(count), plan, cluster=cluster, steps=steps, optimizer=optimizer, dtype=torch.float64,
        loss=loss, progress=False, **options,
    )  # fmt: skip


@pytest.mark.many(4)
@pytest.mark.parametrize(
    ("plan", "optimizer"),
    [
        *(("dp=2 local_steps=3", optimizer) for optimizer in (SGD, MOMENTUM, ADAMW)),
        ("dp=2 pp=2 local_steps=3 schedule=zb-h1 microbatches=4", SGD),
        ("dp=2 pp=2 local_steps=3 schedule=interleaved chunks=2 microbatches=2 checkpoint=1", MOMENTUM),
    ],
)
def test_replays_exactly(clusters, plan, optimizer):
    """7 steps: two rounds of three, and one that is shorter. Each replica's losses and gradients, in plain torch."""
    found = run(plan, clusters(Plan.parse(plan).ranks), 7, optimizer, check=True)
    assert found.program.steps == 3
    assert found.max_error() <= 1e-12
    assert found.losses == pytest.approx(found.reference.losses, rel=1e-12)


class NothingCounts:
    """Ten rows; in the first step no target counts."""

    def batch(self, step, batch):
        x, y = rows(10, classes=True)
        return x, torch.full_like(y, -100) if step == 0 else y


def test_an_average_of_steps_in_which_nothing_counts(clusters):
    found = run("dp=2 local_steps=1", clusters(2), 3, model=partial(toy, ("linear",)), data=NothingCounts(), batch=10,
                loss=nn.functional.cross_entropy, check=True)  # fmt: skip
    assert found.losses == pytest.approx(found.reference.losses, rel=1e-12)


# by hand --------------------------------------------------------------------------------------------------------------


def counted(output, y):
    kept = y != 1
    return (nn.functional.cross_entropy(output, y.clamp_min(0), reduction="none") * kept).sum(), kept.sum()


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


@dataclass(frozen=True)
class Classes:
    """Eleven rows a step. `nothing`: in the second and third step the first half of them counts nothing."""

    nothing: bool

    def batch(self, step, size):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(11, 6, generator=generator, dtype=torch.float64)
        y = torch.randint(3, (11,), generator=generator)
        if self.nothing and step in (1, 2):
            y[:6] = 1
        return x, y


def by_hand(data, loss, optimizer, replicas, every, steps):
    """Replicas, each on its rows with its own optimizer; after every few steps their parameters are their mean."""
    models = [small().double() for _ in range(replicas)]
    optimizers = [optimizer(list(model.parameters())) for model in models]
    sizes = [11 // replicas + (r < 11 % replicas) for r in range(replicas)]
    losses = []
    for step in range(steps):
        x, y = data.batch(step, 11)
        total = count = 0.0
        for model, own, x_, y_ in zip(models, optimizers, x.split(sizes), y.split(sizes), strict=True):
            own.zero_grad()
            value = loss(model(x_), y_)
            value, weight = value if isinstance(value, tuple) else (value * len(y_), torch.tensor(len(y_)))
            (value / weight.clamp_min(1)).backward()
            own.step()
            total, count = total + value.item(), count + weight.item()
        losses.append(total / count)
        if (step + 1) % every == 0 or step == steps - 1:
            with torch.no_grad():
                for same in zip(*(model.parameters() for model in models), strict=True):
                    mean = sum(p.clone() for p in same) / replicas
                    for p in same:
                        p.copy_(mean)
    return losses, dict(models[0].named_parameters())


DECAY = partial(torch.optim.SGD, lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.1)


@pytest.mark.many(3)
@pytest.mark.parametrize("nothing", [False, True])
@pytest.mark.parametrize("loss", [nn.functional.cross_entropy, counted])
@pytest.mark.parametrize("optimizer", [SGD, MOMENTUM, DECAY, ADAMW])
@pytest.mark.parametrize(
    "plan", ["dp=2 local_steps=2", "dp=2 local_steps=3 microbatches=3", "dp=4 local_steps=1", "dp=2 pp=2 local_steps=2"]
)
def test_equals_local_sgd_by_hand(clusters, tmp_path, plan, optimizer, loss, nothing):
    keys, data = Plan.parse(plan), Classes(nothing)
    found = run(plan, clusters(keys.ranks), 5, optimizer, model=small, data=data, loss=loss, batch=11, check=True)
    losses, parameters = by_hand(data, loss, optimizer, keys.dp, keys.local_steps, 5)
    assert found.losses == pytest.approx(losses, rel=1e-10)
    assert found.max_error() <= 1e-12
    if optimizer is not SGD:  # (states differ between replicas, so the run is not kept)
        return
    found.export(tmp_path / "model.safetensors")
    for name, values in load_file(tmp_path / "model.safetensors").items():
        assert torch.allclose(values, parameters[name], 1e-10, 1e-10), name


def test_saved_between_rounds_or_not_at_all(clusters, tmp_path):
    whole = run("dp=2 local_steps=2", clusters(2), 8)
    run("dp=2 local_steps=2", clusters(2), 4, save=tmp_path / "run", save_every=2)
    rest = resume(
        tmp_path / "run", MODEL, rows(17), steps=4, cluster=clusters(2), optimizer=SGD, progress=False,
        loss=nn.functional.mse_loss,
    )  # fmt: skip
    assert rest.losses == pytest.approx(whole.losses[4:], rel=1e-12)
    with pytest.raises(PlanError, match="save_every=3: the replicas differ .* multiples of local_steps=2"):
        run("dp=2 local_steps=2", clusters(2), 4, save=tmp_path / "run", save_every=3)
    with pytest.raises(SaveError, match="optimizer states differ between replicas that train by themselves"):
        run("dp=2 local_steps=2", clusters(2), 4, MOMENTUM).save(tmp_path / "other")
