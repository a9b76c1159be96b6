"""Batches that have no rows to train on are refused with the step and the way out, whenever they come."""

from __future__ import annotations

import sys

import cloudpickle
import pytest
import torch
from torch import nn

from minipar import RankError, train
from minipar.data.batches import check_batch

cloudpickle.register_pickle_by_value(sys.modules[__name__])

X, Y = torch.randn(8, 6), torch.randint(0, 3, (8,))


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ((X.numpy(), Y.numpy()), r"step 2: x has a numpy.ndarray, .*; possible is torch.from_numpy\(\.\.\.\)"),
        ((X, Y.tolist()), "step 2: y has a list, whose rows cannot be divided"),
        ((("a", "b"), Y), "step 2: x has a tuple, whose rows"),
        (((X, X.numpy()), Y), "step 2: x has a numpy.ndarray"),
        ((X[:0], Y[:0]), "step 2: has 0 rows; a step needs at least one: choose fewer steps"),
        ((X, Y[:5]), "step 2: x has 8 rows, but y has 5"),
        (({"x": X, "edges": X.T}, Y[:4]), r"y has 4 rows, and no tensor of x has as many: x\['x'\] \(8, 6\)"),
        (((X, X.to_sparse()), Y), r"x\[1\] is a sparse tensor, .*; possible is a dense one, such as x\[1\].to_dense"),
        ((X, Y, Y), "step 2: is a tuple of 3; possible is a pair"),
        (X, "step 2: is a Tensor; possible is a pair"),
        (None, "step 2: is a NoneType; possible is a pair"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_a_batch_without_rows_is_refused(batch: object, words: str) -> None:
    with pytest.raises(RankError, match=words):
        check_batch(batch, "step 2")


class FromStepTwo:
    def __init__(self, wrong: object) -> None:
        self.wrong = wrong

    def batch(self, step: int, size: int) -> object:
        if step >= 2 and self.wrong == "end":
            raise StopIteration
        return self.wrong if step >= 2 else (X, Y)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))


@pytest.mark.many(3)
@pytest.mark.parametrize("plan", ["dp=2", "pp=2 microbatches=2", "sync=ps dp=2"])
@pytest.mark.parametrize("wrong", [(X.numpy(), Y.numpy()), (X[:0], Y[:0]), "end"], ids=["numpy", "empty", "end"])
def test_a_run_ends_at_the_step(clusters, plan: str, wrong: object) -> None:
    with pytest.raises(RankError, match="data: step 2: "):
        train(model, FromStepTwo(wrong), plan, cluster=clusters(2 + ("ps" in plan)), steps=4, batch=8,
              progress=False)  # fmt: skip
