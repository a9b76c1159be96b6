"""Operations that a recomputation leaves out are not needed: gradients are bit by bit those of the whole layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from minipar import Cluster, Plan, data, models
from minipar.execution import tails as module_under_test
from minipar.execution.execution import Job, execute, profile_job
from minipar.execution.tails import Tails
from minipar.models.parameter_groups import shape_of
from minipar.program import Op
from minipar.training.plainly import train_reference
from minipar.training.reference import gradient_error
from minipar.training.training import _of_layers

WIDTH = 8


@pytest.fixture(autouse=True)
def every_tail_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_under_test, "WORTH", {"cpu": -1.0})
    monkeypatch.setattr(module_under_test, "is_known", lambda layer: True)  # (`Of` below uses torch's operations only)


def gradients(module: nn.Module, x: Tensor, run: Callable[[Any], Any], settle: Callable[[], None]) -> list[Tensor]:
    """Of the parameters and the input, for a gradient of ones."""
    module.zero_grad()
    x = x.detach().requires_grad_()
    output = run(x)
    edge, ones = get_gradient_edge(output), torch.ones(output.shape)
    del output
    settle()
    torch.autograd.backward([edge], [ones])
    assert x.grad is not None
    return [x.grad, *(p.grad for p in module.parameters() if p.grad is not None)]


def check(module: nn.Module, x: Tensor | None = None, runs: int = 3, tails: Tails | None = None) -> bool:
    """Assert equal gradients in several runs; whether the last ones were shortened."""
    x = torch.randn(4, WIDTH) if x is None else x
    tails = tails or Tails()
    for _ in range(runs):
        found = gradients(module, x, partial(tails.run, 0, module), tails.settle)
        expected = gradients(module, x, module, lambda: None)
        assert len(found) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    return tails.shortens(0, x)


class Of(nn.Module):
    """A layer from a function of (module, x), with two linear maps."""

    def __init__(self, compute: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.compute = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), compute
        self.kept: Any = None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.compute(self, x)


class Cube(torch.autograd.Function):
    """Keeps its own output where autograd's hooks do not see it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.result = x * x * x
        return ctx.result * 1.0

    @staticmethod
    def backward(ctx: Any, received: Tensor) -> Tensor:  # type: ignore[override]
        return received * ctx.result


def test_train_measures_recomputations_as_they_run() -> None:
    job, plan = Job(partial(models.gpt, layers=2), data.stdlib_text(), 4), Plan.parse("pp=2 schedule=zb-v checkpoint=1")
    with Cluster(1) as cluster:
        (facts,) = cluster.run_on([0], profile_job, job, (4,), plan=_of_layers(plan))
    assert len(facts.profile.recompute[4]) == 4


def test_the_last_product_and_the_sum_of_a_residual_block_are_left_out() -> None:
    block = models.build("gpt-tiny", layers=1)[1]
    x = torch.randn(2, 16, 64)
    tails = Tails()
    assert check(block, x, tails=tails)
    done: list[str] = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            done.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with Count():
        block(x)
        whole, done[:] = list(done), []
        tails.run(0, block, x.requires_grad_())
    assert whole.count("addmm") - done.count("addmm") == 1
    assert whole.count("add") - done.count("add") == 1


@pytest.mark.parametrize(
    ("compute", "shorter"),
    [
        (lambda m, x: m.down(m.up(x).tanh()), True),
        (lambda m, x: x + m.down(torch.relu(m.up(x))), True),
        (lambda m, x: m.down(m.up(x)).tanh(), False),  # tanh's backward reads its own output
        (lambda m, x: (m.up(x) * m.down(x)) + 1, True),  # both factors are needed, their product is not
        (lambda m, x: m.down(m.up(x)).reshape(-1, 2, WIDTH // 2).transpose(1, 2).reshape(x.shape), True),
        (lambda m, x: Cube.apply(m.down(x)), True),  # (the product with 1)
        (lambda m, x: checkpoint(lambda h: torch.exp(m.up(h)), m.down(x), use_reentrant=False) * 2, None),
        (lambda m, x: m.down(x).add_(1), False),  # it writes in place
        (lambda m, x: m.down(x)[:, torch.arange(WIDTH - 1, -1, -1)], False),  # what comes before a needed index stays
    ],
)
def test_gradients_are_equal(compute: Callable[[Any, Tensor], Tensor], shorter: bool | None) -> None:
    found = check(Of(compute))
    assert shorter is None or found == shorter


def test_what_the_layer_keeps_for_itself_is_computed() -> None:
    def keeping(m: Of, x: Tensor) -> Tensor:
        m.kept = m.down(x)
        return m.kept + m.up(x)

    layer, tails = Of(keeping), Tails()
    x = torch.randn(4, WIDTH)
    check(layer, x, tails=tails)
    tails.run(0, layer, x)
    assert torch.equal(layer.kept, layer.down(x))


def test_a_layer_that_does_something_else_next_time_runs_whole() -> None:
    def changing(m: Of, x: Tensor) -> Tensor:
        y = m.down(m.up(x))
        return y if m.calls <= 2 else y.exp()  # (exp needs the number that was left out before)

    layer, tails = Of(changing), Tails()
    x = torch.randn(4, WIDTH)
    check(layer, x, runs=1, tails=tails)
    assert tails.shortens(0, x)
    layer.calls = 2
    found = gradients(layer, x, partial(tails.run, 0, layer), tails.settle)
    expected = gradients(layer, x, layer, lambda: None)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not tails.shortens(0, x)


@dataclass
class Pair:
    first: Tensor
    second: Tensor | None = None


def test_a_layer_that_takes_a_dataclass_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    layer, x = Of(lambda m, pair: m.down(m.up(pair.first))), torch.randn(4, WIDTH)
    assert torch.equal(Tails().run(0, layer, Pair(x)), layer(Pair(x)))


class WithNumpy(torch.autograd.Function):
    """Computes with numpy, past torch's operations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.factor = torch.from_numpy(2 * x.detach().numpy())
        return x * x

    @staticmethod
    def backward(ctx: Any, received: Tensor) -> Tensor:  # type: ignore[override]
        return received * ctx.factor


def test_a_layer_of_unknown_code_runs_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(module_under_test, "WORTH", {"cpu": -1.0})
    assert not check(Of(lambda m, x: WithNumpy.apply(m.down(m.up(x)))))
    linear = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    assert check(linear)
    seen: list[Any] = []
    linear[0].register_forward_hook(lambda module, given, output: seen.append(output.detach().numpy().copy()))
    assert not check(linear)


def test_random_operations_run_in_their_turn() -> None:
    layer = Of(lambda m, x: nn.functional.dropout(m.down(x), 0.5) @ torch.eye(WIDTH))
    tails, x = Tails(), torch.randn(4, WIDTH)
    for seed in range(3):
        torch.manual_seed(seed)
        found = gradients(layer, x, partial(tails.run, 0, layer), tails.settle)
        after = torch.rand(1)
        torch.manual_seed(seed)
        expected = gradients(layer, x, layer, lambda: None)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert torch.equal(torch.rand(1), after)


OPERATIONS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "up": lambda m, x: m.up(x), "down": lambda m, x: m.down(x), "tanh": lambda m, x: x.tanh(),
    "square": lambda m, x: x * x, "view": lambda m, x: x.reshape(-1, 2).reshape(x.shape), "double": lambda m, x: x + x,
    "norm": lambda m, x: nn.functional.layer_norm(x, (WIDTH,)), "in place": lambda m, x: (x * 1).mul_(2),
    "softmax": lambda m, x: x.softmax(-1), "nested": lambda m, x: checkpoint(m.up, x, use_reentrant=False),
    "turn": lambda m, x: x.flip(-1), "max": lambda m, x: torch.maximum(x, m.down(x)),
    "sort": lambda m, x: x.sort(-1)[0],
    "mask": lambda m, x: torch.where(x > 0, x, 0.1 * x), "cube": lambda m, x: Cube.apply(x),
}  # fmt: skip


@given(st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=1, max_size=6), st.booleans())
def test_any_chain_of_operations(names: list[str], residual: bool) -> None:
    def compute(m: Of, x: Tensor) -> Tensor:
        y = x
        for name in names:
            y = OPERATIONS[name](m, y)
        return x + y if residual else y

    torch.manual_seed(len(names))
    check(Of(compute), runs=2)


@pytest.fixture(scope="module")
def cluster() -> Any:
    with Cluster(2, device="cpu") as found:
        yield found


def test_a_run_gives_plain_torchs_gradients_on_layers_large_enough(cluster: Cluster) -> None:
    """Large enough, with 2 or 3 rows, to be shortened in the ranks, which know nothing of this file's threshold;
    the layers are known."""

    def build() -> nn.Sequential:
        model = models.build("gpt-tiny", layers=3, width=256, context=128, vocab=64).double()
        for parameter in model[2].parameters():
            parameter.requires_grad_(False)
        return model

    tokens = torch.randint(64, (5, 129), generator=torch.Generator().manual_seed(0))
    batch = tokens[:, :-1], tokens[:, 1:]
    program = Plan.parse("dp=2 zero=3 checkpoint=1").compile(shape_of(build()))
    job = Job(build, batch, 5, dtype=torch.float64)
    done, plain = execute(program, job, cluster=cluster, passes=2), train_reference(job, 2)
    errors = [gradient_error(mine, other) for mine, other in zip(done.gradients, plain.gradients, strict=True)]
    assert max(errors) < 1e-12
    assert any(ins.op is Op.RECOMPUTE for ins in program.ranks[0])
