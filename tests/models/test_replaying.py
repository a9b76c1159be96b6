"""Models whose forward cannot be traced: layers that run it again, each up to its own block."""

from __future__ import annotations

import pickle
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from minipar import models
from minipar.errors import PlanError
from tests.plain_loop import assert_equals_plain_torch

WIDTH = 6


class Cache:
    """What a forward hands to its blocks, and every block writes into."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []


class Block(nn.Module):
    def __init__(self, turn: bool = False) -> None:
        super().__init__()
        self.turn = turn
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, mask: Tensor, table: tuple[Tensor, Tensor], cache: Cache) -> tuple[Tensor, None]:
        cache.seen.append(x)
        found = self.linear(self.norm(x) * mask + table[self.turn])
        return x + torch.tanh(found), None


class Odd(nn.Module):
    """It looks at the values of its input, makes a mask, a table and a cache, and changes what it has made in place."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, WIDTH)
        self.first = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("scale", torch.linspace(1, 2, WIDTH))
        self.drop = nn.Dropout(0.3)
        self.blocks = nn.ModuleList([Block(k % 2 == 1) for k in range(blocks)])
        self.head = nn.Linear(WIDTH, 9)
        self.head.weight = self.embed.weight
        self.never = nn.Linear(2, 2)

    def forward(self, ids: Tensor, keep: Tensor | None = None) -> dict[str, Tensor]:
        mask = torch.ones_like(ids) if keep is None or bool(keep.all()) else keep
        mask = mask[:, :, None].to(self.embed.weight.dtype)
        h = self.drop(self.embed(ids))
        h[:, 0] += self.first
        start, cache = h, Cache()
        table = (self.scale * 0.1, -self.scale * 0.1)
        for block in self.blocks:
            h = block(h, mask=mask, table=table, cache=cache)[0]
        return {"logits": self.head(h + 0.5 * start).mean(1), "tokens": ids.float().mean(1)}


def example(kind: str = "dict"):
    ids = torch.arange(8).view(2, 4)
    keep = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    return {"dict": {"ids": ids, "keep": keep}, "tuple": (ids, keep), "alone": ids}[kind]


def odd(kind: str = "dict"):
    return models.from_torch(Odd(), example(kind))


@pytest.mark.parametrize("kind", ["dict", "tuple", "alone"])
def test_layers_do_what_the_model_does(kind):
    model = Odd()
    layers = models.from_torch(model, example(kind))
    assert layers.report.error < 1e-6
    assert list(layers._modules) == ["embed", "blocks_0", "blocks_1", "blocks_2", "head"]
    assert {n: id(p) for n, p in layers.named_parameters()} == {n: id(p) for n, p in model.named_parameters()}
    assert layers.state_dict().keys() == model.state_dict().keys()
    layers.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()})


def test_what_crosses_a_cut_is_what_later_layers_need():
    report = odd().report
    # the head reads the dropout's output, so that it crosses every cut; of the embedding only its shape is known
    assert [crossing.names for crossing in report.crossings] == [
        ("input", "drop"), ("input", "drop", "blocks.0"), ("input", "drop", "blocks.1"), ("input", "drop", "blocks.2"),
    ]  # fmt: skip
    assert report.crossings[0].bytes_per_row == 4 * 8 + 4 * 8 + 4 * WIDTH * 4


def test_a_layer_holds_what_it_uses_and_nothing_else():
    layers = odd()
    held = [{name.partition(".")[2] for name, _ in layer.named_parameters(prefix="x")} for layer in layers]
    block = ("norm.weight", "norm.bias", "linear.weight", "linear.bias")
    assert held[0] == {"embed.weight"}
    assert held[1] == {f"blocks.0.{name}" for name in block} | {"first"}
    assert held[-1] == {"head.weight", "head.bias", "never.weight", "never.bias"} | {"first"}
    ghost = layers[1].get_submodule("blocks.2").linear.weight
    assert ghost.shape == (WIDTH, WIDTH)
    assert ghost.untyped_storage().nbytes() == 4


def test_pickled_layers_are_layers():
    layers = pickle.loads(pickle.dumps(odd().eval()))
    assert not any(layer.__dict__["_minipar"][0].training for layer in layers)
    model = Odd().eval()
    model.load_state_dict(layers.state_dict())
    assert torch.equal(layers(example())["logits"], model(**example())["logits"])


def first(output, wanted):
    return nn.functional.cross_entropy(output["logits"], wanted)


@pytest.mark.parametrize(
    "plan",
    ["pp=2 microbatches=3", "pp=2 dp=2 zero=1 microbatches=2", "dp=2 zero=3 checkpoint=sqrt", "pp=3 checkpoint=1"],
)
def test_trains_as_plain_torch_does(clusters, plan):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(9, (13, 4), generator=generator)
    keep = (torch.arange(4) < torch.randint(1, 5, (13, 1), generator=generator)).long()
    wanted = torch.randint(9, (13,), generator=generator)

    def silent() -> nn.Module:
        model = Odd()
        model.drop.p = 0.0
        return model

    def layers() -> nn.Module:
        return models.from_torch(silent(), example())

    x, sgd = {"ids": ids, "keep": keep}, partial(torch.optim.SGD, lr=0.1)
    assert_equals_plain_torch(clusters, plan, layers, (x, wanted), first, sgd)
    run = assert_equals_plain_torch(clusters, plan, silent, (x, wanted), first, sgd, call=lambda model, x: model(**x))
    assert run.cut == "5 layers, cut between its blocks, its forward runs in each layer"


class Drawing(Odd):
    def forward(self, ids: Tensor, keep: Tensor | None = None) -> dict[str, Tensor]:
        found = nn.functional.dropout(self.scale, 0.5)
        return {"logits": super().forward(ids, keep)["logits"] * found.sum()}


class Counting(Odd):
    def forward(self, ids: Tensor, keep: Tensor | None = None) -> dict[str, Tensor]:
        if bool((ids > 0).any()):
            self.scale += 1
        return super().forward(ids, keep)


class Normed(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, ids: Tensor, keep: Tensor | None = None) -> dict[str, Tensor]:
        h = self.embed(ids)
        for block in self.blocks if bool(ids.any()) else ():
            h = (
                self.norm(block.linear(h))
                if h.dim() < 3
                else block(self.norm(h), mask=1, table=(0, 0), cache=Cache())[0]
            )
        return {"logits": self.head(h)}


class Halting(Odd):
    def forward(self, ids: Tensor, keep: Tensor | None = None) -> dict[str, Tensor]:
        h = self.embed(ids)
        for block in self.blocks:
            if float(h.sum()) < 100:
                h = block(h, mask=1, table=(0, 0), cache=Cache())[0]
        return {"logits": self.head(h)}


class Policy(Odd):
    """torch.distributions looks whether its numbers are some; the ranks' forward, too."""

    def forward(self, ids: Tensor, keep: Tensor | None = None) -> dict[str, Tensor]:
        h = self.embed(ids)
        for block in self.blocks:
            h = torch.distributions.Normal(block(h, mask=1, table=(0, 0), cache=Cache())[0], self.scale).mean
        return {"logits": self.head(h)}


def test_what_is_only_checked_decides_nothing():
    report = models.from_torch(Policy(), example("alone")).report
    assert report.layers == ("embed", "blocks_0", "blocks_1", "blocks_2", "head")
    assert report.crossings[2].names == ("blocks.0", "blocks.1")  # (what a layer checks again must be there)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Halting, "decides by values that blocks.0 gives"),
        (Drawing, "gives another result on the example .*; it draws random numbers; .* put an nn.Dropout there"),
        (Counting, "buffer scale changes between the calls of modules"),
        (Normed, "module norm changes its buffers and is called in two layers"),
    ],
)
def test_refusals_say_why(model, reason):
    with pytest.raises(PlanError, match=reason):
        models.from_torch(model(), example())


class Short(Odd):
    def forward(self, ids: Tensor, keep: Tensor | None = None) -> dict[str, Tensor]:
        h = self.embed(ids)
        for block in list(self.blocks)[: int(ids.max())]:
            h = block(h, mask=1, table=(0, 0), cache=Cache())[0]
        return {"logits": self.head(h)}


def test_a_forward_that_calls_other_modules_later_is_named():
    layers = models.from_torch(Short(), {"ids": torch.full((2, 4), 5)})
    with pytest.raises(PlanError, match="calls head, and called blocks.2 there on the example"):
        layers({"ids": torch.full((2, 4), 2)})
