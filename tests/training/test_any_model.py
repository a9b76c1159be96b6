"""Models with a forward of their own go into `train` as they are. Beside them: a loop in plain torch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minipar
from minipar import PlanError
from minipar.execution.execution import Job
from minipar.execution.saving.keeping import model_of
from minipar.models import cut_bytes, tracing
from minipar.models.tracing import in_layers
from tests.plain_loop import assert_equals_plain_torch, rows

WORDS, WIDTH, TOKENS = 13, 12, 6


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.ones(TOKENS, TOKENS).tril().view(1, 1, TOKENS, TOKENS) == 0)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.size()
        parts = self.qkv(self.norm(x)).split(width, dim=2)
        q, k, v = (part.view(rows, tokens, 2, width // 2).transpose(1, 2) for part in parts)
        scores = (q @ k.transpose(-2, -1)).masked_fill(self.mask[:, :, :tokens, :tokens], float("-inf"))
        return x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(rows, tokens, width))


class GPT(nn.Module):
    """As it is published: an assertion on the length, tied embeddings, and (logits, loss)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)  # (a name that layers might want for themselves, and nothing uses it)
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(WORDS, WIDTH), "wpe": nn.Embedding(TOKENS, WIDTH), "drop": nn.Dropout(0.1),
                "h": nn.ModuleList([Attention() for _ in range(3)]), "ln_f": nn.LayerNorm(WIDTH),
            }
        )  # fmt: skip
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        assert idx.size(1) <= TOKENS, "too long"
        places = torch.arange(idx.size(1), device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(places))
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(self.transformer.ln_f(x)), None


class Speech(nn.Module):
    """Recurrent layers, and two arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(WORDS, WIDTH), nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)
        self.turn, self.head = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, loud: Tensor) -> tuple[Tensor, None]:
        found, _ = self.lstm(self.embed(ids) * loud[:, None, None])
        return self.head(self.turn(found)[0]), None


class Adaptive(nn.Module):
    """How often its layer runs depends on the input: it can be one layer only."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.halt = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 1)
        self.steps = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> tuple[Tensor, None]:
        rows = []
        for row in self.embed(ids):
            for step in self.steps:
                if float(self.halt(row).detach().mean()) < 0.1:
                    row = torch.tanh(step(row))
            rows.append(row)
        return self.head(torch.stack(rows)), None


def ids(seed: int = 0) -> Tensor:
    return torch.randint(WORDS, (13, TOKENS), generator=torch.Generator().manual_seed(seed))


def loud() -> Tensor:
    return torch.linspace(0.5, 2.0, 13)


def loss(output: Any, wanted: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output[0].flatten(0, 1), wanted.flatten())


MODELS = {"gpt": (GPT, ids()), "speech": (Speech, (ids(), loud())), "adaptive": (Adaptive, {"ids": ids()})}
SGD = partial(torch.optim.SGD, lr=0.5, momentum=0.5)
PLANS = ["dp=2", "dp=2 zero=2 accumulate=2", "dp=2 zero=3", "pp=2 microbatches=3", "pp=2 dp=2 checkpoint=1"]


def called(model: nn.Module, x: Any) -> Any:
    if isinstance(x, dict):
        return model(**x)
    return model(*(t.double() if t.is_floating_point() else t for t in (x if isinstance(x, tuple) else (x,))))


@pytest.mark.many(3)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", MODELS)
def test_trains_as_plain_torch_does(clusters, name, plan):
    make, x = MODELS[name]
    if name == "gpt":

        def make() -> nn.Module:
            model = GPT()
            model.transformer.drop.p = 0.0
            return model

    if name == "adaptive" and "pp" in plan:
        with pytest.raises(PlanError, match=r"more stages than layers.*one layer, since .*test_any_model.py, line"):
            minipar.train(make, (x, ids(1)), plan, cluster=clusters(minipar.Plan.parse(plan).ranks), loss=loss)
        return
    run = assert_equals_plain_torch(clusters, plan, make, (x, ids(1)), loss, SGD, call=called)
    assert run.cut.startswith("one layer, since" if name == "adaptive" else f"{4 if name == 'speech' else 5} layers")


class Called(nn.Sequential):
    """Layers, and more around them than their forward."""

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) * 2


def _root(what: str) -> nn.Module:
    kind = Called if what == "a call of its own" else nn.Sequential
    model = kind(nn.Linear(6, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    if what == "a hook":
        model.register_forward_hook(lambda module, given, output: output * 2)
    elif what == "a hook of gradients":
        model.register_full_backward_pre_hook(lambda module, gradients: (gradients[0] * 2,))
    elif what == "a forward of its own":
        own = model.forward
        model.forward = lambda x: own(x) * 2  # type: ignore[method-assign]
    return model


@pytest.mark.filterwarnings("ignore:.*computed whole")
@pytest.mark.parametrize("what", ["a hook", "a hook of gradients", "a forward of its own", "a call of its own"])
def test_what_the_root_of_a_sequential_does_is_not_left_out(clusters, what):
    assert_equals_plain_torch(clusters, "dp=2", partial(_root, what), rows(), nn.functional.cross_entropy, SGD)


def test_dropout_draws_as_the_unmodified_model_does(clusters):
    """The reference is the user's own model; masks go by the names of its modules."""
    options = {"loss": loss, "dtype": torch.float64, "progress": False, "check": True}
    run = minipar.train(GPT, (ids(), ids(1)), "pp=2 microbatches=2", cluster=clusters(2), steps=2, **options)
    assert run.max_error() < 1e-12


def test_a_module_itself_and_evaluation(clusters):
    model = Speech().double()
    data = (ids(), loud()), ids(1)
    options = {"loss": loss, "dtype": torch.float64, "progress": False}
    run = minipar.train(model, data, "dp=2", cluster=clusters(2), steps=1, **options)
    wanted = loss(model(ids(), loud().double()), ids(1)).item()
    assert run.losses[0] == pytest.approx(wanted, rel=1e-12)
    with torch.no_grad():
        for name, tensor in model_of(run.shares, "test").items():
            model.state_dict(keep_vars=True)[name].copy_(tensor)
    found = minipar.evaluate(Speech, data, "pp=2", cluster=clusters(2), state=run, loss=loss, dtype=torch.float64)
    assert found.loss == pytest.approx(loss(model(ids(), loud().double()), ids(1)).item(), rel=1e-12)


@pytest.mark.parametrize("make", [GPT, Speech, Adaptive])
def test_how_a_model_is_cut_is_read_by_other_ranks(make):
    """What is read holds the other model's own parameters, and computes what that does."""
    x, first, second = (ids(), loud()) if make is Speech else ids(), make().eval(), make().eval()
    layers = in_layers(first, x)
    read = cut_bytes.read(cut_bytes.written(layers, first), second)
    assert list(read._modules) == list(layers._modules)
    assert {n: id(p) for n, p in read.named_parameters()} == {n: id(p) for n, p in second.named_parameters()}
    assert torch.equal(read(x)[0], (second(*x) if make is Speech else second(x))[0])
    assert read.report == layers.report


def test_a_model_is_captured_once(monkeypatch):
    """Whatever the plan; another model, or another first batch, is captured anew."""
    captured, in_layers_ = [], tracing.in_layers
    monkeypatch.setattr(cut_bytes, "_known", {})
    monkeypatch.setattr(tracing, "in_layers", lambda *given: captured.append(given) or in_layers_(*given))

    def made(rate: float = 0.1) -> nn.Module:
        model = GPT()
        model.transformer.drop.p = rate
        return model

    def built(make: Any, *more: Any) -> nn.Module:
        return Job(make, (ids(), ids(1)), 13, loss, *more).built()[0]

    first, again = built(made), built(made, SGD, 3)
    assert len(captured) == 1
    assert torch.equal(first.eval()(ids())[0], built(made).eval()(ids())[0])
    assert [n for n, _ in again.named_parameters()] == [n for n, _ in first.named_parameters()]
    assert built(partial(made, 0.2))[-1] is not None
    assert len(captured) == 2
    Job(made, (ids(2), ids(1)), 13, loss).built()
    assert len(captured) == 3


class LightGCN(nn.Module):
    """gusye1234/LightGCN-PyTorch: users and items are nodes of a sparse graph, over which their tables are averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(5, 4), nn.Embedding(7, 4)
        links = (torch.arange(35).view(5, 7) % 3 == 0).float()
        graph = torch.zeros(12, 12)
        graph[:5, 5:], graph[5:, :5] = links, links.t()
        self.register_buffer("graph", (graph / graph.sum(1, keepdim=True).clamp(min=1)).to_sparse().coalesce())

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        nodes = torch.cat([self.user.weight, self.item.weight])
        seen = [nodes]
        for _ in range(2):
            seen.append(torch.sparse.mm(self.graph, seen[-1]))
        users_, items_ = torch.stack(seen).mean(0).split([5, 7])
        return (users_[users] * items_[items]).sum(1)


@pytest.mark.filterwarnings("ignore:.*computed whole")  # (torch.export takes no buffer with the name `graph`)
@pytest.mark.parametrize("plan", ["dp=2 zero=2", "tp=2"])
def test_a_sparse_buffer(clusters, plan):
    """It is the model's, and nothing of it is saved."""
    x = torch.arange(12) % 5, torch.arange(12) % 7
    data = x, torch.linspace(-1, 1, 12)
    run = assert_equals_plain_torch(
        clusters, plan, LightGCN, data, nn.functional.mse_loss, SGD, call=lambda m, x: m(*x)
    )
    assert list(model_of(run.shares, "test")) == ["user.weight", "item.weight"]


@pytest.mark.parametrize("keep", [set, list, lambda ids: dict.fromkeys(ids, 0.01)], ids=["set", "list", "dict"])
def test_an_optimizer_that_knows_parameters_by_their_ids_is_refused(keep):
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    head = keep(map(id, model[1].parameters()))

    def optimizer(parameters):
        known = [p for p in parameters if id(p) in head]
        rest = [p for p in parameters if id(p) not in head]
        return torch.optim.SGD([{"params": known, "lr": 0.01}, {"params": rest}], lr=0.1)

    with pytest.raises(
        PlanError, match="head.* has the id\\(\\) of a parameter, 1.weight; .* Possible are groups by name"
    ):
        minipar.train(model, rows(), "", loss=nn.functional.mse_loss, optimizer=optimizer, progress=False)
