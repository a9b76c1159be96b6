"""TeraPipe, executed: token slices give plain torch's gradients of whole sequences, over cuts and compositions."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from minipar import Plan, PlanError, models, simulate, train, verify
from minipar.costs.slicing import step_time
from minipar.execution.execution import Execution
from minipar.execution.measuring.profiler import profile
from minipar.models.parameter_groups import shape_of
from minipar.models.sliced import Sliced
from minipar.program import Op, Program, carry, grad_carry
from tests import comparing

pytestmark = pytest.mark.many(2)

GPT = partial(models.gpt, layers=4, width=16, heads=2, context=16, vocab=32)
RICH = partial(GPT, tied=True, dropout=0.2, fused=False)


def text(rows: int = 5, tokens: int = 10):
    generator = torch.Generator().manual_seed(rows)
    x, y = (torch.randint(32, (rows, tokens), generator=generator) for _ in range(2))
    y[0, : tokens // 2 + 1] = -100  # whole slices in which nothing counts
    return x, y


def frozen(layers: tuple[int, ...], model=RICH) -> nn.Module:
    made = model()
    for k in layers:
        made[k].requires_grad_(False)
    return made


class Each(Sliced):
    """A layer that treats every token by itself."""

    carries = False

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward_slice(self, x, start, carry):
        return torch.tanh(self.linear(x)), None


class Adding(Sliced):
    """A layer that carries a sum over tokens, of what its first matmul makes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward_slice(self, x, start, carry):
        hidden = self.up(x)
        total = hidden.cumsum(1) if carry is None else hidden.cumsum(1) + carry
        return self.down(hidden * total.tanh()), total[:, -1:]


def numbers(rows: int = 4, tokens: int = 7):
    generator = torch.Generator().manual_seed(7)
    return tuple(torch.randn(rows, tokens, 6, generator=generator, dtype=torch.float64) for _ in range(2))


def check(clusters, words: str, model=RICH, data=None, loss=nn.functional.cross_entropy) -> Execution:
    """Hold a plan to plain torch on whole sequences."""
    return comparing.check(clusters, Plan.parse(words), model, data or text(), loss=loss)


@pytest.mark.parametrize(
    "words",
    [
        "schedule=terapipe pp=4 slices=1,6,3 microbatches=2 checkpoint=2,4",
        "schedule=terapipe pp=2 slices=3 microbatches=7",  # more than rows: some micro-batches have none
        "schedule=terapipe tp=2 pp=2 slices=4,3,2,1",
        "schedule=seq1f1b context_parallel=2 pp=2 slices=2,6,2 microbatches=2 checkpoint=selective clip=1e9",
        "schedule=seq1f1b context_parallel=2 tp=2 slices=6,4 microbatches=2 batch_copies=2",
    ],
)
def test_slices_of_other_lengths_give_the_gradients_of_whole_sequences(clusters, words):
    """Ranks that share layers have parts of what is carried, or of each slice. (Equal slices: tests/fuzz/core.py.)"""
    check(clusters, words)


def test_ranks_that_share_other_layers_than_attentions_carry_parts_too(clusters):
    words = "tp=2 pp=2 schedule=terapipe slices=2,4,1"
    check(clusters, words, lambda: nn.Sequential(Each(), Adding(), Adding()), numbers(), nn.functional.mse_loss)


@pytest.mark.parametrize("layers", [(0, 1, 2), (3,), range(6)])
def test_frozen_layers(clusters, layers):
    check(clusters, "pp=2 schedule=terapipe slices=4,3,2,1", partial(frozen, tuple(layers), GPT))


def test_frozen_part_of_a_layer(clusters):
    """The first layer that is trained: its carries have no gradient."""
    check(clusters, "schedule=terapipe context_parallel=2 slices=4,6", _only_mlp)


def _only_mlp() -> nn.Module:
    made = frozen((0, 1), GPT)
    made[1].mlp.requires_grad_(True)
    return made


def test_carries_have_the_bytes_of_keys_and_values(clusters):
    found = profile(list(GPT()), text(2), slices=[range(4), range(4, 7), range(7, 10)])
    token = 2 * 16 * 4  # bytes of the key and the value of one token
    # of the first slice they are views of the tensor that holds the queries, too; the last one carries nothing on
    assert [found.carry_bytes[2 * 3 + j][1] for j in range(3)] == [2 * 4 * token * 3 // 2, 2 * 7 * token, 0]
    assert [found.grad_carry_bytes[2 * 3 + j][1] for j in range(3)] == [2 * 4 * token, 2 * 7 * token, 0]
    assert found.carry_bytes[6][0] == found.carry_bytes[6][5] == 0
    done = check(clusters, "pp=2 schedule=terapipe slices=4,3,3", GPT, text(2))
    assert done.trace.size(0, carry(1, 1)) == 2 * 7 * 2 * token  # (float64)
    assert done.trace.size(0, grad_carry(1, 0)) == 2 * 4 * 2 * token


# programs ------------------------------------------------------------------------------------------------------------


def compiled(words: str, layers: int = 8) -> Program:
    return Plan.parse(f"schedule=terapipe {words}").compile(layers=layers)


@pytest.mark.parametrize("p", [1, 4])
@pytest.mark.parametrize("lengths", [(4, 3, 2, 2), (11,) * 3])
def test_time_is_the_closed_form(p, lengths):
    trace = simulate(compiled(f"pp={p} slices={','.join(map(str, lengths))}"), forward=1, backward=2)
    assert trace.time == pytest.approx(3 * step_time(lengths, p, lambda n, _: n * len(lengths) / sum(lengths)))
    assert trace.in_flight() == [len(lengths)] * p
    assert trace.messages_per_microbatch() == 2 * (p - 1)


def test_programs_verify_and_go_through_json():
    for words in (
        "pp=4 slices=16 microbatches=3",
        "pp=2 dp=2 slices=3,2,1 accumulate=2 zero=3 checkpoint=1",
        "pp=2 tp=2 context_parallel=2 ep=2 slices=2",
    ):
        program = compiled(words)
        verify(program)
        assert Program.from_json(program.to_json()) == program
    verify(Plan.parse("pp=8 schedule=terapipe slices=64").compile(layers=8, steps=2))
    whole = compiled("pp=2 slices=1")
    assert not any(v.kind == "carry" for row in whole.ranks for ins in row for v in ins.writes)


def test_inference_frees_each_carry_at_the_next_slice():
    program = compiled("pp=2 slices=4 inference=true", 2)
    second = [ins for ins in program.ranks[0] if ins.op is Op.FORWARD][1]
    assert carry(0, 0) in second.frees
    assert carry(0, 1) in second.writes


@pytest.mark.parametrize(
    ("words", "budget"), [("schedule=seq1f1b slices=4 microbatches=3", 2.5), ("schedule=terapipe slices=20,10,6,4", 6)]
)
def test_a_budget_of_memory_is_kept(clusters, words, budget):
    """Slices differ in size, and what they hand on is larger and larger: keys and values of all tokens so far."""
    run = train(
        partial(models.gpt, layers=6, width=64, heads=2, context=64, vocab=32, tied=True, dropout=0.2),
        text(7, 40), f"pp=2 {words} checkpoint={budget}MiB", cluster=clusters(2), steps=1, batch=7, memory=True,
        loss=nn.functional.cross_entropy, dtype=torch.float64, progress=False, check=True,
    )  # fmt: skip
    assert run.max_error() <= 1e-12
    assert any(ins.op is Op.RECOMPUTE for row in run.program.ranks for ins in row)
    for rank in (0, 1):
        assert run.trace.peak_by_kind(rank)["activations"] <= budget * 2**20


def test_a_budget_that_slices_do_not_fit_in_is_refused(clusters):
    with pytest.raises(PlanError, match=r"a budget of .* is too small; the least is \d"):
        train(
            RICH, text(), "pp=2 schedule=terapipe slices=2 checkpoint=1KiB", cluster=clusters(2), steps=1,
            loss=nn.functional.cross_entropy, progress=False,
        )  # fmt: skip


# refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("pp=2 slices=3", "slices=3: schedule=1f1b has none; possible with seq1f1b, terapipe"),
        ("schedule=terapipe slices=3,x", "slices=3,x: must be how many slices, or their lengths in tokens, such"),
        ("schedule=terapipe slices=0", "slices=0: must be how many slices, or their lengths in tokens, such"),
    ],
)
def test_plans_that_cannot_be(words, says):
    with pytest.raises(PlanError) as error:
        Plan.parse(words).compile(layers=4)
    assert str(error.value).startswith(says)
    assert "\n" not in str(error.value)


def test_models_and_data_that_cannot_be_cut(clusters):
    says = r"schedule=terapipe: layer 0 \(Sequential\) of this model takes whole sequences; possible are causal models"
    with pytest.raises(PlanError, match=says):
        Plan.parse("pp=2 schedule=terapipe").compile(models.shape("mlp-digits"))
    linear = partial(nn.Sequential, Each(), nn.Linear(6, 6))
    one = {"cluster": clusters(2), "steps": 1, "progress": False}
    with pytest.raises(PlanError, match=r"layer 1 \(Linear\) of this model takes whole sequences"):
        train(linear, numbers(), "pp=2 schedule=terapipe", **one)
    with pytest.raises(PlanError, match=r"slices=4,3: sums to 7, but a sequence has 10 tokens"):
        train(GPT, text(), "pp=2 schedule=terapipe slices=4,3", **one)
    with pytest.raises(PlanError, match=r"slices=12: a sequence has 10 tokens; possible are 1 to 10 slices"):
        train(GPT, text(), "pp=2 schedule=terapipe slices=12", **one)
    with pytest.raises(PlanError, match=r"tensors of shapes \(5, 10\), \(5,\) cannot be cut into slices of tokens"):
        train(GPT, (text()[0], torch.zeros(5)), "pp=2 schedule=terapipe", **one)


def test_shapes_of_presets_say_what_is_carried():
    slices = {"capacity": None, "balance": False}
    for name, numbers in (("gpt-tiny", {}), ("mlp-digits", {}), ("gpt-moe-tiny", {}), ("gpt-moe-tiny", slices)):
        given, real = models.shape(name, **numbers), shape_of(list(models.build(name, **numbers)))
        assert (given.carries, given.whole) == (real.carries, real.whole)
