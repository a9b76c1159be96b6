"""Values between layers, and rows: dicts and None as well as tuples; tensors of changing length."""

from __future__ import annotations

import sys
from collections import OrderedDict
from functools import partial
from types import SimpleNamespace

import cloudpickle
import pytest
import torch
from torch import Tensor, nn

import minipar
from minipar import Plan
from minipar.errors import RankError
from minipar.models.tensors import allocate, check_rows, map_tensors, opaque, spec, tensors
from tests.comparing import check, trained
from tests.toys import rows

pytestmark = pytest.mark.many(3)

# Ranks cannot import this file by name; its functions travel as those of a notebook do.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SGD = partial(torch.optim.SGD, lr=0.1)


class Own(dict):
    """A dict of a type of its own."""


def value(make=torch.zeros):
    x = make(2, 3)
    return {"b": x, "a": (None, [make(2), "mode", 3]), 7: OrderedDict(skip=make(2, 1), off=False), "size": x.shape}


def test_helpers_look_into_dicts_in_their_order():
    found = map_tensors(value(), lambda t: t + 1)
    assert [tuple(t.shape) for t in tensors(found)] == [(2, 3), (2,), (2, 1)]
    assert all(t.min() == 1 for t in tensors(found))
    assert list(found) == ["b", "a", 7, "size"]
    assert found["a"][0] is None
    assert found["a"][1][1:] == ["mode", 3]
    assert type(found[7]) is OrderedDict
    assert found["size"] == torch.Size([2, 3])
    assert type(map_tensors(Own(x=torch.zeros(1)), lambda t: t)) is Own


def test_a_form_makes_the_same_structure_again():
    made = allocate(spec(value()), torch.device("cpu"))
    assert spec(made) == spec(value())
    assert type(made[7]) is OrderedDict
    assert made["size"] == torch.Size([2, 3])
    assert made["a"][0] is None


def test_values_that_cannot_be_looked_into_are_named():
    assert opaque(value()) is None
    assert opaque([{"cache": SimpleNamespace()}]) == "types:SimpleNamespace"
    with pytest.raises(TypeError, match="keys are strings or numbers"):
        spec({(1, 2): torch.zeros(1)})


def test_rows_that_differ_are_refused_by_name():
    assert check_rows({"ids": torch.zeros(4, 2), "mask": [torch.zeros(4)], "none": None}, "x") == 4
    with pytest.raises(RankError, match=r"x\['mask'\]\[0\] of shape \(3,\) has 3 rows, but x\['ids'\] has 4"):
        check_rows({"ids": torch.zeros(4, 2), "mask": [torch.zeros(3)]}, "x")
    with pytest.raises(RankError, match=r"x\[1\]: a single number has no rows"):
        check_rows((torch.zeros(4), torch.tensor(1.0)), "x")


class Open(nn.Module):
    """Takes the rows as a dict or a tuple, hands on a dict with None, constants, integers and a nested tuple."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        x, gate = (x["x"], x["gate"]) if isinstance(x, dict) else x
        hidden = torch.tanh(self.linear(x))
        return {"hidden": hidden, "skip": (x * hidden, None), "count": torch.arange(len(x)), "gate": gate, "mode": "a"}


class Middle(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, given):
        assert given["skip"][1] is None
        assert given["mode"] == "a"
        assert given["count"].tolist() == list(range(len(given["hidden"])))
        return given | {"hidden": torch.sigmoid(self.linear(given["hidden"] * given["gate"]))}


class Close(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * width, width)

    def forward(self, given):
        return self.linear(torch.cat([given["hidden"], given["skip"][0]], 1))


def dicts(width: int = 6) -> nn.Sequential:
    return nn.Sequential(Open(width), Middle(width), nn.Identity(), Middle(width), Close(width))


def batch(kind: type, width: int = 6, count: int = 10):
    x, y = rows(count, width)
    gate = torch.rand(count, 1, dtype=torch.float64)
    return ({"x": x, "gate": gate} if kind is dict else (x, gate)), y


@pytest.mark.parametrize(
    "plan",
    ["pp=2 schedule=zb-h1 microbatches=4", "dp=2 zero=3 microbatches=2", "pp=2 microbatches=2 offload=activations"],
)
@pytest.mark.parametrize("kind", [dict, tuple])
def test_dicts_and_none_between_layers(clusters, plan, kind):
    trained(clusters, Plan.parse(plan), dicts, batch(kind), steps=4)


class Trimmed(nn.Module):
    """Hands on the tokens before the last 0 of its rows: another length, and another form, in each micro-batch."""

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        longest = int((ids != 0).sum(1).max())
        return ids[:, :longest], None if longest % 2 else torch.ones(len(ids), longest)


class Weighted(nn.Module):
    """Embeds tokens, weighs them where weights came along, and hands the skip on, in a tuple or a list."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(11, width)

    def forward(self, given):
        ids, weights = given
        x = self.table(ids)
        return (x, ids) if weights is None else [x * weights[..., None].to(x), x, ids]


class Pooled(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, given):
        return self.linear(given[0]).sum(1) + (given[1].mean(1) if isinstance(given, list) else 0)


def trimming(width: int = 6) -> nn.Sequential:
    return nn.Sequential(Trimmed(), Weighted(width), Pooled(width), nn.Linear(width, 6))


class Padded:
    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        lengths = torch.randint(1, 9, (size, 1), generator=generator)
        ids = torch.randint(1, 11, (size, 9), generator=generator)
        return torch.where(torch.arange(9) < lengths, ids, 0), torch.randn(size, 6, generator=generator)


def test_a_form_may_change_with_every_micro_batch(clusters):
    """Gradients travel back while outputs of other forms are on their way."""

    def losses(plan: str) -> list[float]:
        return minipar.train(
            trimming, Padded(), plan, cluster=clusters(minipar.Plan.parse(plan).ranks), steps=5, batch=12,
            loss=nn.functional.mse_loss, optimizer=SGD, dtype=torch.float64, progress=False, check=False,
        ).losses  # fmt: skip

    assert losses("pp=4 microbatches=6 split=1,1,1,1") == pytest.approx(losses("microbatches=6"), rel=1e-12)


def test_what_cannot_be_looked_into_is_refused(clusters):
    class Cached(nn.Module):
        def forward(self, x):
            return x, SimpleNamespace(cache=x)

    with pytest.raises(Exception, match="hands on a types:SimpleNamespace, which minipar cannot look into"):
        minipar.train(
            [nn.Linear(6, 6), Cached(), nn.Linear(6, 6)], rows(4), "pp=2", cluster=clusters(2), progress=False
        )


class HandsOnItsParameter(nn.Module):
    """Hands on a parameter of its own, and a view of another, as a table of positions that later layers read."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias, self.table = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(3, width))

    def forward(self, x):
        return x, self.bias, self.table[1]


class UsesThem(nn.Module):
    def forward(self, given):
        x, bias, row = given
        return x * bias + row


def tables(width: int = 192) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, width), HandsOnItsParameter(width), UsesThem(), nn.Linear(width, 6))


@pytest.mark.parametrize("text", ["dp=2 zero=3 checkpoint=1", "pp=2 offload=parameters microbatches=2"])
def test_a_layer_may_hand_on_its_own_parameters(clusters, text):
    """Also where their memory is let go of when the layer has run."""
    check(clusters, Plan.parse(text), tables, rows(8), steps=4)
