"""Lesson 14: parts of tensors, forms of a product, forms by name; a sharded MLP and a sharded loss on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from minipar import sharding
from minipar.errors import MiniparError
from minipar.program import Mesh
from minipar.sharding import Operator, choices
from minipar.wording import several
from minipar_course.against import Comparison, descend
from minipar_course.exercises.building import batches
from minipar_course.exercises.kinds.built import Trained, Trial
from minipar_course.exercises.kinds.function import Function
from minipar_course.exercises.kinds.verdict import Verdict, raised

# 1: parts of a tensor -------------------------------------------------------------------------------------------------


def _part(shape: tuple[int, ...], form: str, ranks: int) -> tuple[int, ...]:
    placement = sharding.Form.parse(f"{form} on tp", Mesh(tp=ranks))
    return sharding.local_shape(shape, placement, Mesh(tp=ranks))


PART = Function(
    "part_of(shape, form, ranks)",
    (
        ((8, 6), "R", 2), ((8, 6), "S0", 2), ((8, 6), "S1", 3), ((8, 6), "P", 4), ((4, 10, 12), "S2", 4),
        ((4, 10, 12), "S1", 5), ((16,), "S0", 8), ((4, 12, 8), "P", 2),
    ),
    truth=_part,
    mistakes=(
        (
            lambda shape, form, ranks: tuple(n // ranks for n in shape) if form[0] == "S" else shape,
            "a form such as S1 cuts one dimension: its number stands behind the S",
        ),
        (
            lambda shape, form, ranks: _part(shape, "S0" if form == "P" else form, ranks),
            "a part of a sum is as large as the whole: each rank has one number for every number",
        ),
    ),
    hint="form[0] says what it is; of an S, int(form[1:]) is the dimension that is cut",
)  # fmt: skip

# 2: the form of a product ---------------------------------------------------------------------------------------------

_MATMUL = Operator("matmul", "aten::mm", ("x", "w"), ("y",))
_FORMS = ("R", "P", "S0", "S1")


def _product(x: str, w: str) -> str | None:
    """The form of x @ w on one axis; None where the parts that the ranks have do not fit each other."""
    found = {
        tuple(str(p).replace("I", "R") for p in one.ins): str(one.outs[0]).replace("I", "R")
        for one in choices(_MATMUL, [(8, 8), (8, 8)], [(8, 8)], ranks=2)
    }
    return found.get((x, w))


def _told(given: Any, x: str, w: str) -> str:
    right = _product(x, w)
    if given == (right or "no"):
        return ""
    return f"gives {given!r}; right is {right or 'no'!r}"


PRODUCT = Function(
    "form_of_product(x, w)",
    tuple((x, w) for x in _FORMS for w in _FORMS),
    problem=_told,
    mistakes=(
        (
            lambda x, w: "S0" if x == "S0" and w == "R" else "no" if (x, w) not in {("R", "R"), ("R", "S1")} else w,
            "x cut by columns and w cut by rows fit: each rank multiplies its columns by its rows, a part of the sum",
        ),
        (
            lambda x, w: "P" if "P" in (x, w) else _product(x, w) or "no",
            "(a + b)(c + d) is not ac + bd: only one of the two factors may be a part of a sum, and the other is whole",
        ),
    ),
    hint="rank 0 multiplies what it has, rank 1 what it has: what do the two results have to do with x @ w?",
)

# 3: forms by name -----------------------------------------------------------------------------------------------------

RANKS = 4


class Gated(nn.Module):
    """A perceptron with a gate, as in Llama: three matmuls, and a small one behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(32, 128, bias=False), nn.Linear(32, 128, bias=False)
        self.down, self.head = nn.Linear(128, 32, bias=False), nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.down(functional.silu(self.gate(x)) * self.up(x)))
        return found


@lru_cache(maxsize=1)
def gated() -> sharding.Captured:
    """The captured `Gated`, with 64 rows."""
    return sharding.capture_model(nn.Sequential(Gated()), torch.zeros(64, 32))


@dataclass(frozen=True)
class Annotated:
    """annotations() -> {name: form} for `Gated` on 4 ranks: how many bytes each rank stores and sends.

    stored   parameters' elements on a rank, at most
    sent     elements that go into collectives of a step on a rank, at most
    """

    stored: int
    sent: int

    def measure(self, annotations: dict[str, str]) -> tuple[int, int, tuple[sharding.Collective, ...]]:
        """Elements stored and sent by a rank, and the collectives. PlanError for forms that cannot be."""
        captured, mesh = gated(), Mesh(tp=RANKS)
        found = sharding.propagate_model(captured.layers, annotations, mesh)
        (one,) = found.shardings
        graph = captured.layers[0].graph
        stored = sum(_count(one.local(name)) for name in graph.parameters)
        collectives = found.collectives()
        return stored, sum(each.bytes for each in collectives) // 4, collectives

    def judge(self, answer: Any) -> Verdict:
        if not callable(answer):
            return Verdict(False, f"{answer!r} is no function", "def annotations(): ...")
        try:
            given = answer()
        except Exception as error:
            return raised(error, "your function")
        if not isinstance(given, dict):
            return Verdict(False, f"your function gives {given!r}", 'return names and forms: {"0.gate": "S1 on tp"}')
        try:
            stored, sent, collectives = self.measure(given)
        except MiniparError as error:
            return Verdict(False, f"these forms cannot be: {error.reason}", "the line above names what is possible")
        told = "\n".join(f"{one.op} {one.why}: {one.bytes // 4:,} numbers ({one.phase})" for one in collectives)
        found = f"a rank stores {stored:,} numbers and sends {sent:,} in {several(len(collectives), 'collective')}"
        if stored > self.stored:
            hint = "a matmul whose output is S1 or P divides its weight; one that is not named may stay whole"
            return Verdict(False, f"{found}; it may store {self.stored:,}", hint, told)
        if sent > self.sent:
            hint = "columns, then rows: which operator reads the shard that another one writes, without a gather?"
            return Verdict(False, f"{found}; it may send {self.sent:,}", hint, told)
        return Verdict(True, found, evidence=told)


def _count(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


ANNOTATED = Annotated(stored=3 * 32 * 128 // RANKS + 32 * 16, sent=64 * 32)

# 4: Megatron's MLP, on real ranks -------------------------------------------------------------------------------------

WIDTH, HIDDEN, ROWS = 16, 64, 16


class Block(nn.Module):
    """x + down(gelu(up(x))): whole, or a rank's hidden units of it."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(x)))


def two_blocks() -> nn.Module:
    return nn.Sequential(Block(), Block())


def _mine(tensor: Tensor, dim: int, rank: int, ranks: int) -> nn.Parameter:
    return nn.Parameter(tensor.detach().chunk(ranks, dim)[rank].clone())


def _blocks(model: nn.Module) -> list[Block]:
    return [each for each in model.children() if isinstance(each, Block)]


def hidden_of_rank(model: nn.Module, rank: int, ranks: int) -> nn.Module:
    """A rank's part of the blocks: rows of `up`, columns of `down`, and the whole bias of `down`."""
    made = nn.Sequential(*(Block(HIDDEN // ranks).double() for _ in model.children()))
    for part, whole in zip(_blocks(made), _blocks(model), strict=True):
        part.up.weight, part.up.bias = (_mine(one, 0, rank, ranks) for one in (whole.up.weight, whole.up.bias))
        part.down.weight = _mine(whole.down.weight, 1, rank, ranks)
        part.down.bias = nn.Parameter(whole.down.bias.detach().clone())
    return made


def _side_by_side(sum_gradients: bool, biases: bool = False) -> Callable[[Trial], nn.Module]:
    """The ranks' parts in one process, with a mistake; gives a whole model of which this rank's part is right.

    sum_gradients   whether the gradients of a block's input are summed over the ranks
    biases          whether each rank adds the bias before the sum
    """

    def train(trial: Trial) -> nn.Module:
        parts = [hidden_of_rank(trial.first, rank, trial.ranks) for rank in range(trial.ranks)]
        for x, y in trial.batches:
            now = [x] * trial.ranks
            for number in range(len(_blocks(trial.first))):
                blocks = [_blocks(part)[number] for part in parts]
                read = now if not sum_gradients else [_shared_gradient(now, r) for r in range(trial.ranks)]
                made = [
                    functional.linear(functional.gelu(block.up(one)), block.down.weight)
                    for block, one in zip(blocks, read, strict=True)
                ]
                if biases:
                    made = [one + block.down.bias for one, block in zip(made, blocks, strict=True)]
                now = [
                    one
                    + sum(made[other] if other == r else made[other].detach() for other in range(trial.ranks))
                    + (0 if biases else blocks[r].down.bias)
                    for r, one in enumerate(now)
                ]
            for part in parts:
                part.zero_grad()
            torch.stack([trial.loss(one, y) for one in now]).sum().backward()
            descend((each for part in parts for each in part.parameters()), trial.lr)
        return _joined(trial.first, parts, trial.rank)

    return train


class _Shared(torch.autograd.Function):
    """Gives the value of one rank; its gradient goes to the values of all, as an all-reduce would bring it."""

    @staticmethod
    def forward(ctx: Any, rank: int, *now: Tensor) -> Tensor:
        ctx.ranks = len(now)
        return now[rank].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return (None, *[gradients[0]] * ctx.ranks)


def _shared_gradient(now: list[Tensor], rank: int) -> Tensor:
    found: Tensor = _Shared.apply(rank, *now)
    return found


def _joined(first: nn.Module, parts: list[nn.Module], rank: int) -> nn.Module:
    whole = deepcopy(first)
    with torch.no_grad():
        for number, block in enumerate(_blocks(whole)):
            blocks = [_blocks(part)[number] for part in parts]
            block.up.weight.copy_(torch.cat([one.up.weight for one in blocks]))
            block.up.bias.copy_(torch.cat([one.up.bias for one in blocks]))
            block.down.weight.copy_(torch.cat([one.down.weight for one in blocks], 1))
            block.down.bias.copy_(blocks[rank].down.bias)
    return whole


_STEPS = 2


def _two_sums_a_block(found: Comparison) -> tuple[str, str] | None:
    ranks = len(found.ranks)
    enough = _STEPS * 2 * 2 * 2 * ROWS * WIDTH * 8 * (ranks - 1) / ranks  # 2 blocks, 2 directions, an all-reduce
    if found.sent <= 1.01 * enough:
        return None
    return (
        f"a rank sends {found.sent / enough:.1f} times the bytes that are needed",
        "one all_reduce of a block's output forward, one of its input's gradient backward; weights never move",
    )


MLP = Trained(
    "my_mlp(blocks, batches, loss, lr)",
    two_blocks,
    batches(ROWS, _STEPS, WIDTH, WIDTH),
    ranks=(2, 4),
    praise="Megatron's f and g: one sum a block and direction",
    share=lambda batch, rank, ranks: batch,
    part=hidden_of_rank,
    mistakes=(
        (
            _side_by_side(sum_gradients=False),
            "forward it is right; but each rank knows a part of the gradient of a block's input: sum them (f)",
        ),
        (
            _side_by_side(sum_gradients=True, biases=True),
            "the bias of `down` is added by every rank: p times in the sum",
        ),
    ),
    cheap=(_two_sums_a_block,),
    hint="two autograd functions: f does nothing forward and sums backward; g sums forward and does nothing backward",
)

# 5: cross entropy over a vocabulary that is divided -------------------------------------------------------------------

_TOKENS, _VOCABULARY = 16, 64


def _tokens() -> list[tuple[Tensor, Tensor]]:
    """Large numbers, so that exp() of a score overflows, and the classes that are right."""
    generator = torch.Generator().manual_seed(2)
    return [
        (
            1000 * torch.randn(_TOKENS, WIDTH, dtype=torch.float64, generator=generator),
            torch.randint(_VOCABULARY, (_TOKENS,), generator=generator),
        )
        for _ in range(_STEPS)
    ]


def classes_of_rank(model: nn.Module, rank: int, ranks: int) -> nn.Module:
    """A rank's rows of the weight of an `nn.Linear` without bias: the scores of its classes."""
    assert isinstance(model, nn.Linear)
    made = nn.Linear(model.in_features, model.out_features // ranks, bias=False).double()
    made.weight = _mine(model.weight, 0, rank, ranks)
    return made


def _loss(loss: Callable[[Tensor, Tensor, Trial], Tensor]) -> Callable[[Trial], nn.Module]:
    def train(trial: Trial) -> nn.Module:
        model = trial.first
        for x, y in trial.batches:
            model.zero_grad()
            loss(model(x), y, trial).backward()
            descend(model.parameters(), trial.lr)
        return model

    return train


def _own_classes_only(scores: Tensor, y: Tensor, trial: Trial) -> Tensor:
    parts = scores.chunk(trial.ranks, 1)
    picked = scores.gather(1, y[:, None])[:, 0]
    return torch.stack([part.logsumexp(1) for part in parts]).sum(0).sub(picked).mean()


def _own_maximum(scores: Tensor, y: Tensor, trial: Trial) -> Tensor:
    parts = [part - part.detach().amax(1, keepdim=True) for part in scores.chunk(trial.ranks, 1)]
    return torch.cat(parts, 1).logsumexp(1).sub(scores.gather(1, y[:, None])[:, 0]).mean()


def _three_numbers_a_token(found: Comparison) -> tuple[str, str] | None:
    ranks = len(found.ranks)
    enough = _STEPS * 3 * 2 * _TOKENS * 8 * (ranks - 1) / ranks
    if found.sent <= 1.01 * enough:
        return None
    return (
        f"a rank sends {found.sent / enough:.1f} times the bytes that are needed",
        "of each token three numbers are summed over the ranks; its scores stay where they are",
    )


CROSS_ENTROPY = Trained(
    "my_head(head, batches, loss, lr)",
    lambda: nn.Linear(WIDTH, _VOCABULARY, bias=False),
    _tokens(),
    ranks=(2, 4),
    praise="three numbers for each token, however many words there are",
    loss=functional.cross_entropy,
    lr=1e-3,
    share=lambda batch, rank, ranks: batch,
    part=classes_of_rank,
    mistakes=(
        (
            _loss(_own_classes_only),
            "each rank normalises over its own classes: the sum of exp() must be that of all ranks",
        ),
        (_loss(_own_maximum), "each rank subtracts its own maximum: the sums of exp() are then not comparable"),
    ),
    cheap=(_three_numbers_a_token,),
    hint="gradient of a score: exp(score - max) / sum, minus 1 for the right class, divided by the number of tokens; "
    "with the maximum and the sum of all ranks",
)

__all__ = ["ANNOTATED", "CROSS_ENTROPY", "MLP", "PART", "PRODUCT", "Annotated", "Block", "Gated", "gated"]
