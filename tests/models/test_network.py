"""Models with branches on real ranks: plain torch's loss and gradients, whatever the placement."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from minipar import Plan, train
from minipar.comm.links import Links
from minipar.errors import MiniparError, PlanError
from minipar.execution.measuring.profiler import profile
from minipar.models.network import Network
from minipar.models.parameter_groups import shape_of
from minipar.program import Op
from minipar.training.training import Run
from tests.toys import Fork, InPlace, Join, Tied, rows

pytestmark = pytest.mark.many(3)

mse = nn.functional.mse_loss


class First(nn.Module):
    """Uses the first part of a tuple; what it leaves has a gradient of zero from here."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: tuple[Tensor, tuple[Tensor, Tensor]]) -> Tensor:
        return self.linear(x[0])


class Sum(nn.Module):
    """Joins any number of branches; autograd then gives all of them the same gradient tensor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, given: tuple[Tensor, ...]) -> Tensor:
        assert isinstance(given, tuple)
        return torch.tanh(self.linear(torch.stack(given).sum(0)))


def toy(width: int = 6, tied: bool = False, frozen: tuple[int, ...] = (), skip: bool = False) -> Network:
    """A fork of tensors into a fork of tuples and a branch that works in place; with a skip around all of it."""
    first = nn.Linear(width, width)
    layers: list[nn.Module] = [
        first,
        Fork(width),
        Join(width),
        First(width),
        InPlace(width),
        nn.Sequential(nn.Linear(width, width), nn.Dropout(0.3)),
        Sum(width),
        Tied(first) if tied else nn.Linear(width, width),
    ]
    edges = [(0, 1), (1, 2), (1, 3), (0, 4), (4, 5), (2, 6), (3, 6), (5, 6), (6, 7)]
    if skip:
        layers[7] = Sum(width)
        edges += [(0, 7), (4, 7)]
    for k in frozen:
        for p in layers[k].parameters():
            p.requires_grad_(False)
    return Network(layers, edges)


def check(clusters, text: str, model, data=None, steps: int = 2, **options: object) -> Run:
    plan = Plan.parse(text)
    run = train(
        model, data or rows(17), plan, cluster=clusters(plan.ranks), steps=steps, loss=options.pop("loss", mse),
        optimizer=partial(torch.optim.SGD, lr=0.5), dtype=torch.float64, check=True, progress=False, **options,
    )  # fmt: skip
    assert run.max_error() <= 1e-12
    for mine, plain in zip(run.losses, run.reference.losses, strict=True):
        assert abs(mine - plain) <= 1e-12 * max(1.0, abs(plain))
    return run


PLANS = [
    "pp=2 place=branches microbatches=3",
    "pp=2 place=branches schedule=looped-bfs microbatches=4",
    "pp=2 place=1,0,1,0,1,0,1,0 schedule=zb-h1 microbatches=3",
    "pp=2 schedule=chimera microbatches=4",
    "pp=4 place=0,1,1,2,3,3,0,0 schedule=looped-bfs microbatches=3",
    "pp=2 dp=2 place=branches microbatches=2 zero=3",
    "pp=2 dp=2 place=branches schedule=looped-bfs overlap=priority bucket=0.0001",
    "dp=3 sync=ps mode=async",
]


@pytest.mark.parametrize("text", PLANS)
def test_every_placement_equals_plain_torch(clusters, text):
    check(clusters, text, partial(toy, tied=True, frozen=(3,)))


@pytest.mark.parametrize("text", ["pp=2 place=0,1,0,1,0,1,0,0 microbatches=3", "pp=4 microbatches=4"])
@pytest.mark.parametrize("frozen", [(0, 1, 2, 3), (0, 4, 5), tuple(range(8))])
def test_frozen_layers_and_a_skip_around_everything(clusters, text, frozen):
    check(clusters, text, partial(toy, skip=True, frozen=frozen), rows(11))


def test_measured_and_profiled_sizes_are_those_of_each_edge(clusters):
    run = check(clusters, "pp=2 place=branches microbatches=2", toy, rows(8))
    for rank in range(2):
        for ins in run.program.ranks[rank]:
            for value in (*ins.reads, *ins.writes):
                if value.kind in ("output", "grad_output"):
                    assert run.trace.size(rank, value) == run.predicted.size(rank, value) > 0, f"{value} on rank {rank}"


def test_no_two_messages_have_the_same_tag():
    program = Plan(pp=2, place=(0, 1) * 4, microbatches=3).compile(shape_of(toy(skip=True)))
    assert len(program.edges) > program.layers
    sent = {v for row in program.ranks for ins in row if ins.op is Op.SEND for v in ins.reads}
    links = Links(program, SimpleNamespace(rank=0), lambda value: 1)
    assert len({links.tag(value) for value in sent}) == len(sent)


def test_plain_torch_gives_every_reader_what_was_made():
    net = Network([nn.Identity(), nn.ReLU(inplace=True), nn.Identity(), Difference()], [(0, 1), (0, 2), (1, 3), (2, 3)])
    x = torch.tensor([[-1.0, 2.0]])
    assert torch.equal(net(x.clone()), torch.tensor([[1.0, 0.0]]))


class Difference(nn.Module):
    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        return given[0] - given[1]


def test_a_profile_gives_joins_what_they_read():
    model = toy().double()
    found = profile(model, rows(5), mse, [5], repeats=1)
    number = 5 * 6 * 8
    assert found.output_bytes[5] == (number, 2 * number + 5 * 8, *(number,) * 6)
    assert len(found.forward[5]) == 8
    assert shape_of(model).edges == model.edges != ()
    assert shape_of(list(model)).edges == ()


def test_refusals(clusters):
    with pytest.raises(PlanError, match="edge 2 -> 1: closes a circle"):
        Network([nn.Identity() for _ in range(4)], [(0, 1), (1, 2), (2, 1), (2, 3)])
    program = Plan(pp=2).compile(layers=8)
    from minipar.execution.execution import Job, execute

    job = Job(toy, rows(4), loss=mse, dtype=torch.float64)
    with pytest.raises(MiniparError, match="compiled for another model: with edges of a chain, not"):
        execute(program, job, cluster=clusters(2))
    for text, message in {
        "pp=2 schedule=pipedream": "schedule=pipedream: is for chains",
    }.items():
        with pytest.raises(PlanError, match=message):
            train(toy, rows(4), text, cluster=clusters(2), steps=1, loss=mse, progress=False)
