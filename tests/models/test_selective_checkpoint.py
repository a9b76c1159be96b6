"""checkpoint=selective: the attention core runs again in backward: same gradients, fewer bytes, as predicted."""

from __future__ import annotations

import sys
from functools import partial

import cloudpickle
import pytest
import torch
from torch import Tensor, nn

from minipar import Plan, PlanError, models, train
from minipar.models.randomness import RowDropout
from minipar.models.selective_checkpoint import Recomputed, check, choose
from minipar.program import Program
from minipar.training.training import Run

pytestmark = pytest.mark.many(6)

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Noisy(Recomputed):
    """Doubles what a dropout leaves of its first input, and counts how often."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = RowDropout(0.5, 0, "noisy")
        self.calls = 0

    def compute(self, *inputs: Tensor) -> Tensor:
        self.calls += 1
        a, b = inputs
        return self.dropout(a).exp() * b


def gradients(again: bool) -> tuple[list[Tensor], int]:
    part = Noisy()
    choose([part], again)
    a = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3).requires_grad_()
    b = torch.ones(4, 3, dtype=torch.float64)  # needs no gradient
    part.dropout.step, part.dropout.first_row = 3, 5
    out = part(a, b)
    part.dropout.step, part.dropout.first_row = 4, 0  # another micro-batch came in between
    out.sum().backward()
    assert b.grad is None
    return [out.detach(), a.grad], part.calls


def test_runs_again_with_the_same_dropout() -> None:
    plain, once = gradients(False)
    found, twice = gradients(True)
    assert (once, twice) == (1, 2)
    assert all(torch.equal(x, y) for x, y in zip(plain, found, strict=True))


def test_without_gradients_it_runs_once() -> None:
    part = Noisy()
    choose([part], True)
    with torch.no_grad():
        part(torch.ones(2, 2), torch.ones(2, 2))
    assert part.calls == 1


def test_what_cannot_run_again_is_refused() -> None:
    with pytest.raises(PlanError, match="checkpoint=selective: no layer of this model has a part"):
        check([nn.Linear(2, 2)])

    class Learned(Recomputed):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

    with pytest.raises(PlanError, match="checkpoint=selective: Learned has parameters"):
        check([Learned()])
    with pytest.raises(NotImplementedError, match="Learned needs a method compute"):
        Learned()(torch.ones(1))


def test_both_cores_are_the_same_function() -> None:
    inputs = torch.randint(64, (3, 16))
    fused, plain = (models.gpt(2, 32, 4, 16, 64, fused=fused).double() for fused in (True, False))
    assert fused.state_dict().keys() == plain.state_dict().keys()
    torch.testing.assert_close(fused(inputs), plain(inputs), rtol=1e-12, atol=1e-12)


gpt = partial(models.gpt, layers=4, width=32, heads=4, context=64, vocab=64, dropout=0.1, tied=True, fused=False)
TOKENS = tuple(torch.randint(64, (2, 9, 64), generator=torch.Generator().manual_seed(0)))


def run(clusters, text: str, model=gpt, **options) -> Run:
    return train(
        model, TOKENS, text, cluster=clusters(Plan.parse(text).ranks), steps=2, batch=9, dtype=torch.float64,
        progress=False, **options,
    )  # fmt: skip


def test_bytes_are_fewer_and_as_predicted(clusters) -> None:
    without, selective = (
        run(clusters, f"pp=2 microbatches=2 {words}", memory=True) for words in ("", "checkpoint=selective")
    )
    scores = 4 * 64 * 64 * 8  # of one row in one block
    saved = [a.by_kind["activations"] - b.by_kind["activations"] for a, b in
             zip(without.memory, selective.memory, strict=True)]  # fmt: skip
    # Two blocks on each stage; the first stage holds both micro-batches, the second one. One block's scores are
    # there again while it goes backward.
    assert saved[0] > (2 * 9 - 5) * scores
    assert saved[1] > (2 * 5 - 5) * scores * 0.9
    for got, expected in zip(selective.memory, selective.predicted.peak_memory(), strict=True):
        assert got.bytes == pytest.approx(expected, rel=0.02)


def test_programs_keep_the_choice() -> None:
    program = Plan.parse("checkpoint=selective").compile(layers=3)
    assert program.selective
    assert Program.from_json(program.to_json()) == program
    assert not Plan().compile(layers=3).selective
