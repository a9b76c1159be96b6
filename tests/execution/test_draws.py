"""A layer's random numbers, and the buffers that its forward updates, do not depend on how often its forward runs on a
micro-batch."""

from __future__ import annotations

import hashlib
import sys
import warnings
from functools import partial

import cloudpickle
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minipar import Plan, train
from minipar.models import randomness
from minipar.models.randomness import draw_seed, split_sensitive
from minipar.models.selective_checkpoint import Recomputed, choose
from minipar.training.reference import Masks
from tests.comparing import check, trained
from tests.toys import rows

pytestmark = pytest.mark.many(3)

cloudpickle.register_pickle_by_value(sys.modules[__name__])

WIDTH = 6


class Noise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rand_like(x)


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.linear(x), 0.4, training=self.training)


class Attention(nn.Module):
    """Attention over the columns of a row, with dropout inside."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(1, 6)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x.unsqueeze(-1)).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.3).sum(-1)


class DropPath(nn.Module):
    """Drops whole rows, and now and then draws nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if x[0, 0] > 0:
            return x + self.linear(x)
        return x + self.linear(x) * torch.bernoulli(torch.full((len(x), 1), 0.6, dtype=x.dtype)) / 0.6


class Counting(nn.Module):
    """Scales by a number that it counts up, in place, and adds what it has seen: by new tensors, one of them a plain
    attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        before, self.last = self.last, x.detach().mean(0)
        x = x if before is None else x + before
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.linear(x) / self.calls.clone() + self.mean


def random_layers() -> nn.Sequential:
    layers = [nn.Linear(WIDTH, WIDTH), Noise(), Dropped(), Attention(), DropPath(), nn.AlphaDropout(0.2)]
    return nn.Sequential(*layers, nn.Dropout1d(0.3), nn.Linear(WIDTH, WIDTH))


def counting_layers() -> nn.Sequential:
    norm = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Counting(), nn.BatchNorm1d(WIDTH), norm, nn.Linear(WIDTH, WIDTH))


ONE_PART = ["pp=4 schedule=gpipe checkpoint=2", "dp=1 pp=1"]


@pytest.mark.parametrize("text", ONE_PART)
def test_layers_that_draw_equal_plain_torch_where_the_batch_is_not_split(clusters, text):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(clusters, Plan.parse(f"{text} microbatches=1"), random_layers, rows(9), steps=3)


@pytest.mark.parametrize("text", ONE_PART)
def test_layers_that_count_equal_plain_torch_where_the_batch_is_not_split(clusters, text):
    check(clusters, Plan.parse(f"{text} microbatches=1"), counting_layers, rows(9), steps=3)


def losses(clusters, model, text: str) -> list[float]:
    plan = Plan.parse(text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found = train(model, rows(12), plan, cluster=clusters(plan.ranks), steps=4, loss=F.mse_loss, progress=False,
                      optimizer=partial(torch.optim.SGD, lr=0.1), dtype=torch.float64)  # fmt: skip
    return found.losses


@pytest.mark.parametrize(
    "text",
    ["pp=2 microbatches=4 schedule=zb-h1", "pp=2 microbatches=4 schedule=dualpipe", "dp=2 zero=3"],
)
@pytest.mark.parametrize("model", [random_layers, counting_layers])
def test_recomputation_changes_nothing(clusters, model, text):
    assert losses(clusters, model, text) == pytest.approx(losses(clusters, model, f"{text} checkpoint=1"), abs=1e-12)


def test_the_seed_of_a_layers_draws():
    assert draw_seed(0, 0, 0, 0) == 1102193517190199599
    text = "\0".join(["draws", "1", "2", "3", "4", "5"])
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    assert draw_seed(1, 2, 3, 4, 5) == int.from_bytes(digest, "little") % 2**63
    numbers = {draw_seed(*where) for where in [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]}
    assert len(numbers) == 5
    assert draw_seed(0, 0, 0, 0, 7) not in numbers


def test_a_module_that_is_two_layers_draws_twice():
    noise = Noise()
    model = nn.Sequential(noise, nn.Sequential(noise), noise)
    masks = Masks(model, 3)
    x, found = torch.ones(2, WIDTH), []
    for layer in (0, 1, 2):
        torch.manual_seed(draw_seed(3, 4, 5, layer))
        found.append(torch.rand_like(x))
    masks.at(4, 5)
    torch.testing.assert_close(model(x), x * noise.weight**3 * found[0] * found[1] * found[2])


def test_layers_that_draw_or_count_are_named_once():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), Noise(), nn.BatchNorm1d(WIDTH), Counting())
    before = torch.get_rng_state()
    found = split_sensitive(model, torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0)))
    assert [text.split()[0] for text in found] == ["3", "2", "4"]
    assert "draws random numbers" in found[1]
    assert "buffers" in found[2]
    assert torch.equal(torch.get_rng_state(), before)
    assert model[4].calls == 0


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class AcrossRows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x[None], x[None], x[None])[0]


class Distances(nn.Module):
    """Gives each row as many numbers as there are rows."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, torch.cdist(x, x)


class WithPenalty(nn.Module):
    """Hands on a number of the whole batch beside its rows."""

    def forward(self, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return x[0], x[0].square().sum()


def test_layers_whose_rows_see_each_other_are_named():
    torch.manual_seed(0)
    layers = [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), Centred(), AcrossRows(), Distances(),
              WithPenalty()]  # fmt: skip
    for dtype in (torch.float32, torch.float64):
        model = nn.Sequential(*layers).to(dtype)
        for rows_given in (2, 5):
            torch.manual_seed(0)
            found = split_sensitive(model, torch.randn(rows_given, WIDTH, dtype=dtype) / 4)
            assert [text.split()[0] for text in found] == ["3", "4", "5", "6"]
            assert all("change each other's results" in text for text in found)


class _ByNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient / gradient.norm()


class OwnBackward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _ByNorm.apply(x)


class Hooked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient / gradient.abs().max())
        return x


def test_layers_whose_rows_see_each_others_gradients_are_named():
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), OwnBackward(), nn.GELU(), Hooked(), nn.Linear(WIDTH, 4)]
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        found = split_sensitive(nn.Sequential(*layers).to(dtype), torch.randn(9, WIDTH, dtype=dtype))
        assert [text.split()[0] for text in found] == ["2", "4"]
        assert all("change each other's gradients" in text for text in found)


class Teacher(nn.Module):
    """Has a moving average of its weight, which begins as the weight itself."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.linear, self.share = nn.Linear(WIDTH, WIDTH), share
        self.register_buffer("average", self.linear.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.lerp_(self.linear.weight, self.share)
        return self.linear(x) + F.linear(x, self.average.clone())


def test_a_moving_average_of_parameters_is_named_and_a_copy_of_them_is_not():
    found = split_sensitive(nn.Sequential(Teacher(0.1), Teacher(1.0)), torch.randn(3, WIDTH))
    assert [text.split()[0] for text in found] == ["0"]
    assert "each micro-batch changes its buffers" in found[0]


def test_a_split_batch_is_said_to_depend_on_the_split(clusters):
    options = {"steps": 1, "loss": F.mse_loss, "progress": False, "dtype": torch.float64}
    with pytest.warns(UserWarning, match=r"split into 3 parts.*1 \(Noise: draws random numbers"):
        train(random_layers, rows(9), "microbatches=3", cluster=clusters(1), **options)


class NoisyPart(Recomputed):
    def compute(self, *inputs: Tensor) -> Tensor:
        return inputs[0].exp() * torch.rand_like(inputs[0])


def test_a_part_that_runs_again_draws_the_same():
    part = NoisyPart()
    found = []
    for again in (False, True):
        choose([part], again)
        x = torch.linspace(0, 1, 5).requires_grad_()
        torch.manual_seed(3)
        y = part(x)
        after = torch.get_rng_state()
        torch.manual_seed(4)
        elsewhere = torch.get_rng_state()
        y.sum().backward()
        assert torch.equal(torch.get_rng_state(), elsewhere)
        found.append((y.detach(), x.grad, after))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_callers_generators_are_left_alone():
    sources = randomness.generators(torch.device("cpu"))
    before = torch.get_rng_state()
    with randomness.untouched(sources):
        randomness.reseed(sources, 1)
    assert torch.equal(torch.get_rng_state(), before)


class Tokens(nn.Module):
    """Drops in rows that it has made of (rows, tokens), as mixtures of experts do."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens, self.drop = tokens, nn.Dropout(0.4)

    def forward(self, x):
        return self.drop(x.reshape(len(x) * self.tokens, -1)).reshape(x.shape)


def same_dropout_twice() -> nn.Sequential:
    drop = nn.Dropout(0.4)
    return nn.Sequential(nn.Linear(6, 6), drop, Tokens(3), nn.Linear(6, 6), drop, nn.Linear(6, 6))


def test_dropout_of_flattened_rows_and_one_that_is_used_twice(clusters):
    check(clusters, Plan.parse("dp=2 microbatches=2 checkpoint=2"), same_dropout_twice, rows(10), steps=3)
