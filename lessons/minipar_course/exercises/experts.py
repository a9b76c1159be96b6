"""Lesson 15: room in an expert, places in its queue, the balance loss, and experts on real ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn import functional

from minipar.models.table import room_of
from minipar_course.against import Comparison, descend, rows_of_rank
from minipar_course.exercises.building import batches
from minipar_course.exercises.kinds.built import Trained, Trial
from minipar_course.exercises.kinds.formula import Formula
from minipar_course.exercises.kinds.function import Function

# 1: room --------------------------------------------------------------------------------------------------------------

ROOM = Formula(
    ("tokens", "experts", "top", "capacity"),
    truth=lambda tokens, experts, top, capacity: room_of(capacity, int(tokens), int(top), int(experts)),
    cases=((64, 8, 2, 1.0), (64, 8, 2, 1.25), (100, 8, 1, 1.0), (10, 4, 2, 1.5), (512, 64, 2, 2.0), (7, 4, 1, 1.0)),
    mistakes=(
        (
            lambda tokens, experts, top, capacity: math.ceil(capacity * tokens / experts),
            "each token goes to `top` experts, so there are tokens * top choices to share out",
        ),
        (
            lambda tokens, experts, top, capacity: math.floor(capacity * tokens * top / experts),
            "rounded up: a place more rather than a token less",
        ),
        (
            lambda tokens, experts, top, capacity: capacity * tokens * top / experts,
            "an expert has a whole number of places: round up",
        ),
    ),
    judge_name="the engine",
)

# 2: places in a queue -------------------------------------------------------------------------------------------------


def _places(chosen: Sequence[int], room: int) -> list[int | None]:
    taken: dict[int, int] = {}
    found: list[int | None] = []
    for expert in chosen:
        place = taken.get(expert, 0)
        taken[expert] = place + 1
        found.append(place if place < room else None)
    return found


def _last_come(chosen: Sequence[int], room: int) -> list[int | None]:
    return list(reversed(_places(list(reversed(chosen)), room)))


def _one_queue(chosen: Sequence[int], room: int) -> list[int | None]:
    return [k if k < room else None for k in range(len(chosen))]


PLACES = Function(
    "places(chosen, room)",
    (
        ([0, 1, 0, 0, 1], 2), ([2, 2, 2, 2], 3), ([3, 1, 2, 0], 1), ([], 4), ([5, 5, 1, 5, 1, 1, 5], 2),
        ([0, 0, 0], 10),
    ),
    truth=_places,
    mistakes=(
        (_one_queue, "each expert has a queue of its own: count for each of them"),
        (_last_come, "who comes first keeps the place: the tokens of one row are taken in their order"),
        (
            lambda chosen, room: [None if p is None else p + 1 for p in _places(chosen, room)],
            "places are counted from 0",
        ),
    ),
    hint="keep for each expert how many have come so far",
)  # fmt: skip

# 3: the balance loss --------------------------------------------------------------------------------------------------


def _balance(chances: Sequence[Sequence[float]]) -> float:
    experts, tokens = len(chances[0]), len(chances)
    first = [max(range(experts), key=row.__getitem__) for row in chances]
    share = [first.count(expert) / tokens for expert in range(experts)]
    mean = [sum(row[expert] for row in chances) / tokens for expert in range(experts)]
    return experts * sum(f * p for f, p in zip(share, mean, strict=True))


BALANCE = Function(
    "balance(chances)",
    (
        ([[0.9, 0.1], [0.2, 0.8]],),
        ([[0.7, 0.2, 0.1], [0.6, 0.3, 0.1], [0.5, 0.1, 0.4]],),
        ([[0.25, 0.3, 0.2, 0.25], [0.1, 0.2, 0.3, 0.4]],),
        ([[0.6, 0.4]] * 5,),
    ),
    truth=_balance,
    mistakes=(
        (
            lambda chances: _balance(chances) / len(chances[0]),
            "times the number of experts, so that the value is 1 where all are equally busy",
        ),
        (
            lambda chances: len(chances[0]) * sum((sum(c) / len(chances)) ** 2 for c in zip(*chances, strict=True)),
            "one factor is the share of tokens that chose the expert, the other one the mean of its chances",
        ),
    ),
    hint="X * sum over experts of (share of tokens whose largest chance it is) * (mean of its chances)",
)

# 4: experts on real ranks ---------------------------------------------------------------------------------------------

WIDTH, HIDDEN, EXPERTS, ROWS, STEPS = 8, 16, 8, 64, 2


class Experts(nn.Module):
    """x + chance * expert(x): each row goes to the expert with the largest chance. `up` and `down`: of all experts."""

    def __init__(self, experts: int = EXPERTS) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(experts, WIDTH, HIDDEN) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(experts, HIDDEN, WIDTH) / HIDDEN**0.5)

    def forward(self, x: Tensor) -> Tensor:
        chance, chosen = self.gate(x).softmax(-1).max(-1)
        made = torch.zeros_like(x)
        for expert in range(len(self.up)):
            here = chosen == expert
            made = made.index_put((here.nonzero()[:, 0],), self.one(expert, x[here]))
        return x + chance[:, None] * made

    def one(self, expert: int, x: Tensor) -> Tensor:
        """What an expert makes of some rows."""
        found: Tensor = functional.gelu(x @ self.up[expert]) @ self.down[expert]
        return found


def experts_of_rank(model: nn.Module, rank: int, ranks: int) -> nn.Module:
    """A rank's experts, one block after another, and the whole gate."""
    assert isinstance(model, Experts)
    made = deepcopy(model)
    for name in ("up", "down"):
        whole = getattr(model, name)
        setattr(made, name, nn.Parameter(whole.detach().chunk(ranks)[rank].clone()))
    return made


def _with(gates: str = "summed", factor: float = 1.0) -> Callable[[Trial], nn.Module]:
    """All ranks in one process, with a mistake.

    gates    "summed": their gradients as they should be; "own": each rank trains its gate by its own rows
    factor   that the gradients of experts are too large by
    """

    def train(trial: Trial) -> nn.Module:
        model = trial.first
        assert isinstance(model, Experts)
        own = [deepcopy(model.gate) for _ in range(trial.ranks)]
        for batch in trial.batches:
            losses = []
            for rank, gate in enumerate(own):
                x, y = rows_of_rank(batch, rank, trial.ranks)
                model.gate = gate
                losses.append(trial.loss(model(x), y))
            for each in (model, *own):
                each.zero_grad()
            torch.stack(losses).sum().backward()
            descend((model.up, model.down), trial.lr * factor / trial.ranks)
            if gates == "summed":
                mean = torch.stack([gate.weight.grad for gate in own if gate.weight.grad is not None]).mean(0)
                for gate in own:
                    gate.weight.grad = mean
            descend((each for gate in own for each in gate.parameters()), trial.lr)
        model.gate = own[trial.rank]
        return model

    return train


def _ranks_factor(gates: str) -> Callable[[Trial], nn.Module]:
    return lambda trial: _with(gates, float(trial.ranks))(trial)


def _tokens_only(found: Comparison) -> tuple[str, str] | None:
    ranks = len(found.ranks)
    # There and back, forward and backward, of a rank's rows; parts are not equal. The gate's sum, and how many come.
    rows = 4 * ROWS // ranks * WIDTH * 8
    enough = STEPS * (1.5 * rows + 2 * EXPERTS * WIDTH * 8 * (ranks - 1) / ranks + 64 * ranks)
    sent = sum(rank.sent for rank in found.ranks) / ranks
    if sent <= enough:
        return None
    return (
        f"a rank sends {sent / enough:.1f} times the bytes that are needed",
        "a row goes to the rank of its expert, and to no other one: all_to_all_single with the sizes of the parts",
    )


EXPERT_PARALLEL = Trained(
    "my_experts(layer, batches, loss, lr)",
    Experts,
    batches(ROWS, STEPS, WIDTH, WIDTH),
    ranks=(2, 4),
    praise="rows go to the ranks of their experts and back, and to nobody else",
    lr=0.3,
    part=experts_of_rank,
    mistakes=(
        (_with("own"), "the experts are right; the gate is on every rank: its gradients must be summed, divided by p"),
        (
            _ranks_factor("summed"),
            "the gate is right; an expert's gradient is the sum over all ranks' losses, each a mean of its own rows",
        ),
        (
            _ranks_factor("own"),
            "each rank's loss is the mean of its own rows: divide by p, and sum the gradients of the gate",
        ),
    ),
    cheap=(_tokens_only,),
    hint="sort the rows by expert, exchange counts, exchange rows, compute, exchange back, and undo the sorting; "
    "backward the same parts go the other way",
)
