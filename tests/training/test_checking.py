"""A run compares some of its steps with plain torch by itself: seeded mistakes are named, and right runs are not."""

from __future__ import annotations

import sys
from functools import partial

import cloudpickle
import pytest
import torch
from torch import Tensor, nn

from minipar import CheckError, Cluster, MiniparError, train
from minipar.cluster import worker
from minipar.training.checking import Checked, Difference, beyond, passes_to_check
from tests.toys import rows, toy

cloudpickle.register_pickle_by_value(sys.modules[__name__])

mse = nn.functional.mse_loss
ADAMW = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1)


class Counting(nn.Module):
    """Has a buffer that says how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(x * self.scale)


def counting() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), Counting(), nn.Linear(6, 6))


model = partial(toy, ("unused", "linear", "dropout"), tied=True, frozen=(2,))


def go(ranks, words, **more):
    keys = {"model": model, "steps": 4, "loss": mse, "optimizer": ADAMW, "progress": False, "batch": 9}
    return train(data=rows(9), plan=words, cluster=ranks, **{**keys, **more})


# mistakes, seeded in the ranks ----------------------------------------------------------------------------------------


def doubled_gradient():
    """Rank 1 adds twice its gradient to the sum."""
    from minipar.comm.buckets import Buckets

    right = Buckets.all_reduce

    def wrong(self, ins, comm):
        for p in (p for g in ins.layers for p in self.groups[g] if p.grad is not None):
            p.grad *= 1 + worker.context().rank
        return right(self, ins, comm)

    Buckets.all_reduce = wrong


def skipped_update():
    """Rank 1 leaves its parameters as they are."""
    from minipar.execution.state import State

    right = State.step

    def wrong(self, ins):
        if worker.context().rank == 1:
            for part in self.updates.values():
                part.optimizer.step = lambda: None
        right(self, ins)

    State.step = wrong


def forgotten_buffer():
    """What a layer has counted is lost when a step ends."""
    from minipar.execution.state import State

    right = State.begin

    def wrong(self):
        right(self)
        _zero_buffers()

    State.begin = wrong


def _zero_buffers():
    import gc

    for layer in gc.get_objects():
        if type(layer).__name__ == "Counting":
            layer.calls.zero_()


def wrong_mean():
    """A micro-batch counts as much as all of them."""
    from minipar.execution import mean_loss

    right = mean_loss.MeanLoss.target

    def wrong(self, y, mine, share, weight):
        return right(self, y, mine, share, weight / 2)

    mean_loss.MeanLoss.target = wrong


def stale_momentum():
    """From the second step on the optimizer has forgotten what it had."""
    from minipar.execution.state import State

    right = State.step

    def wrong(self, ins):
        for optimizer in self.optimizers.values():
            for kept in optimizer.state.values():
                kept["exp_avg"].zero_()
        right(self, ins)

    State.step = wrong


@pytest.mark.parametrize(
    ("mistake", "words", "says"),
    [
        (doubled_gradient, "dp=2", r"step 0: the gradient of .* differs from plain torch's by"),
        (
            skipped_update,
            "dp=2",
            r"step 0: parameter .* on rank 1 differs .* its gradient is right, so its update is wrong on 1 rank of 2",
        ),
        (forgotten_buffer, "pp=2", r"step 0: buffer 1.calls on rank 0 differs"),
        (
            wrong_mean,
            "dp=2",
            r"step 0: the gradient of .* \(2 times plain torch's\); with plan 'dp=2.*so does the loss",
        ),
        (stale_momentum, "dp=2 zero=1", r"step 2: parameter .* of its step"),
    ],
)
def test_a_mistake_is_named(mistake, words, says):
    made = counting if mistake is forgotten_buffer else model
    with Cluster(2, device="cpu") as own:  # (ranks with a mistake are of no use to other tests)
        assert go(own, words, model=made).checked.steps == [0, 2]
        own.run(mistake)
        with pytest.raises(CheckError, match=says) as caught:
            go(own, words, model=made)
        assert caught.value.step in (0, 2)
        assert go(own, words, model=made, check=False).checked.steps == []


# no mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "words",
    ["dp=2", "dp=2 zero=1", "dp=2 zero=2 clip=0.1", "dp=2 zero=3 offload=parameters",
     "pp=2 microbatches=1 checkpoint=1", "dp=2 zero=1 offload=optimizer", "dp=2 precision=bf16",
     "dp=2 zero=1 precision=bf16", "dp=2 overlap=priority", "pp=2 schedule=zb-h1 microbatches=3",
     "dp=2 local_steps=2", "tp=2"],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:the batch is split")
@pytest.mark.many(2)
def test_what_is_right_is_not_an_error(clusters, words, dtype):
    found = go(clusters(2), words, dtype=dtype)
    assert found.checked.steps[0] == 0
    assert len(found.checked.steps) > 1
    assert found.max_error() < (0.02 if "bf16" in words else 1e-5 if dtype is torch.float32 else 1e-11)


def test_a_parameter_that_the_optimizer_does_not_have_has_the_gradient_of_one_step(clusters):
    """Its zero_grad() leaves that alone, and clip= asks for it."""

    def of_the_head(parameters):
        return torch.optim.SGD(parameters[-2:], lr=0.1)

    options = {"cluster": clusters(2), "steps": 3, "loss": mse, "optimizer": of_the_head, "progress": False}
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    assert train(model, rows(9), "dp=2 clip=0.1", check=True, **options).max_error() < 1e-5


def test_a_gradient_that_is_rounding_alone_is_no_mistake(clusters):
    """Adam makes a whole step of it, of any sign; and what is nearly learned is a small difference of numbers."""

    class Shifted(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y - y.mean(1, keepdim=True) + x.mean(1, keepdim=True)

    def shifted():
        made = nn.Sequential(Shifted(6, 6), Shifted(6, 6))
        with torch.no_grad():
            for layer in made:
                layer.weight.copy_(torch.eye(6))
                layer.bias.fill_(0.5)  # (the mean is taken out again)
        return made

    x = rows(9)[0].float()
    found = train(
        shifted, (x, x + 1e-4), "dp=2", cluster=clusters(2), steps=4, loss=mse, optimizer=ADAMW, progress=False
    )
    assert found.checked.steps == [0, 2]


class Narrow(nn.Linear):
    """Its products are in float32, whatever the type of its parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x.float() @ self.weight.float()).to(x.dtype) + self.bias


def test_what_computes_in_float32_is_compared_so():
    """... and a mistake in it is found all the same."""

    def narrow():
        return nn.Sequential(*(Narrow(6, 6) for _ in range(3)))

    with Cluster(2, device="cpu") as own:
        assert 1e-10 < go(own, "dp=2", model=narrow, dtype=torch.float64).max_error() < 1e-5
        own.run(doubled_gradient)
        with pytest.raises(CheckError, match="the gradient of"):
            go(own, "dp=2", model=narrow, dtype=torch.float64)


@pytest.mark.filterwarnings("ignore:the batch is split")
def test_it_says_why_nothing_was_compared(clusters):
    found = go(clusters(2), "dp=2", model=counting, steps=2)
    assert "the results of some layers depend on how" in str(found.checked)
    assert "nothing was compared" in repr(found)
    with pytest.raises(MiniparError, match=r"max_error: nothing .* possible is train\(..., check=True\)"):
        found.max_error()
    found = train(lambda: [nn.Linear(6, 6)], rows(8), "dp=2 compress=topk:0.5", cluster=clusters(2), steps=2, loss=mse,
                  progress=False)  # fmt: skip
    assert str(found.checked) == "nothing was compared with plain torch: compress=topk:0.5 changes gradients"


class Remembers(nn.Linear):
    """Knows in a plain attribute how often it was called."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) / self.calls


def test_what_no_state_has_ends_the_comparison(clusters):
    found = train(lambda: [Remembers(6, 6)], rows(8), "", cluster=clusters(1), steps=4, loss=mse, progress=False)
    assert found.checked.steps == [0]
    assert "later steps not: 0.calls changes from step to step" in str(found.checked)


def test_data_that_are_read_anew_are_no_mistake(clusters):
    class Drawn:
        def batch(self, step, size):
            return torch.randn(size, 6), torch.randn(size, 6)

    found = train(lambda: [nn.Linear(6, 6)], Drawn(), "", cluster=clusters(1), steps=2, loss=mse, progress=False)
    assert "the data give other rows when step 0 is read again" in str(found.checked)


def test_which_passes():
    assert passes_to_check(1, 0, 0.1, 1.0) == ([0], "")
    found, _ = passes_to_check(5000, 0, 0.1, 1.0)
    assert found[0] == 0
    assert [len(str(k)) for k in found[1:]] == [1, 2, 3, 4]
    assert passes_to_check(5000, 0, 1.0, 1.0)[0] == found[:2]
    assert passes_to_check(5000, 0, 3.0, 10.0) == ([], passes_to_check(9, 0, 3.0, 10.0)[1])
    assert passes_to_check(5000, 0, 3.0, 60.0)[0] == [0]
    assert str(Checked([0, 7], 3.2e-7)) == "checked: steps 0, 7: 3e-07"


def test_rounding_of_what_cancels():
    large = Difference("gradient", "w", 0, 0.0, 1.0, 1.0, 1e-7)
    nothing = Difference("gradient", "b", 0, 1e-3, 1e-9, 1e-9, 1e-7)
    update = Difference("parameter", "b", 0, 0.1, 1.0, 0.1, 1e-7)
    assert beyond([large, nothing, update], 2.0**-7) == [update]
    assert not beyond([large, nothing, update], 2.0**-7, given=False)  # (each made its update of its own rounding)
    half = Difference("gradient", "v", 0, 0.2, 0.2, 0.2, 2.0**-7)  # (of a model in bfloat16: twice what it should be)
    assert beyond([large, half], 2.0**-7) == [half]
