"""Whole models on real ranks that share their layers: gradients equal those of plain torch in a process of its own."""

from __future__ import annotations

import gc
from collections import Counter
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import minipar
from minipar import Plan, PlanError, data, models, train
from minipar.comm.communicator import Communicator
from minipar.execution.execution import Job, execute
from minipar.execution.repartition import on_one_rank
from minipar.models.parameter_groups import shape_of
from minipar.models.tensors import map_tensors, tensors
from minipar.program import Mesh, Program, repartitions
from minipar.program.forms import needed
from minipar.sharding import capture_layer, experts, sequence_parallel
from minipar.sharding.sharded import local_model
from tests import outside

pytestmark = [pytest.mark.many(6), pytest.mark.usefixtures("captured_for_all_tests")]

VOCAB, TOKENS, ROWS = 32, 6, 12
# Models ---------------------------------------------------------------------------------------------------------------


def gpt(**numbers) -> nn.Sequential:
    return models.gpt(**{"layers": 2, "width": 32, "heads": 4, "context": TOKENS, "vocab": VOCAB, **numbers})


def gpt2(**options) -> nn.Sequential:
    T = outside.transformers()
    numbers = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 8}
    silent = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return models.from_transformers(T.GPT2LMHeadModel(T.GPT2Config(**{**numbers, **silent, **options})))


def llama(**options) -> nn.Sequential:
    T = outside.transformers()
    numbers = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 8,
    }  # fmt: skip
    return models.from_transformers(T.LlamaForCausalLM(T.LlamaConfig(**{**numbers, **options})))


TRANSFORMERS = {
    "gpt2, dropout": partial(gpt2, resid_pdrop=0.1, embd_pdrop=0.2),
    "llama, grouped keys": llama,
    "llama, tied": partial(llama, attn_implementation="eager", num_key_value_heads=8, tie_word_embeddings=True),
}


class Attention(nn.Module):
    """A block whose names no preset knows."""

    def __init__(self, width: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.before = nn.LayerNorm(width)
        self.seen = nn.ModuleList([nn.Linear(width, 3 * width)] if fused else [nn.Linear(width, width)] * 0)
        if not fused:
            self.seen.extend(nn.Linear(width, width) for _ in range(3))
        self.mixed, self.heads = nn.Linear(width, width), heads

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        made = self.seen[0](y).chunk(3, -1) if len(self.seen) == 1 else [one(y) for one in self.seen]
        query, key, value = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in made)
        y = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.mixed(y.transpose(1, 2).flatten(2))


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 4))


def convolutions(norm: bool = False) -> nn.Sequential:
    first = [nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8)] if norm else [nn.Conv2d(1, 8, 3)]
    rest = nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 4)
    return nn.Sequential(*first, *rest)


def attentions() -> nn.Sequential:
    return nn.Sequential(Attention(16, 4, fused=False), Attention(16, 4, fused=True))


def numbers(*shape: int) -> Tensor:
    return torch.randn(ROWS, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


UNNAMED = {
    "perceptron": (perceptron, numbers(8), numbers(4)),
    "convolutions": (convolutions, numbers(1, 8, 8), numbers(4)),
    "attention": (attentions, numbers(TOKENS, 16), numbers(TOKENS, 16)),
}


# Running --------------------------------------------------------------------------------------------------------------


def run(clusters, model, given, plan, **options):
    settings = {"steps": 2, "batch": ROWS, "dtype": torch.float64, "check": True, "progress": False, **options}
    ranks = minipar.Plan.parse(plan).ranks
    return train(model, given, plan, cluster=clusters(ranks), **settings)


def texts() -> tuple[Tensor, Tensor]:
    ids = torch.randint(VOCAB, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
    return ids, ids


def trained(clusters, model, plan, **options):
    """On a batch of texts."""
    return run(clusters, model, texts(), plan, **options)


def right(found, error: float = 1e-12) -> None:
    assert found.max_error() < error
    assert found.losses == pytest.approx(found.reference.losses, rel=error)


# Tests ----------------------------------------------------------------------------------------------------------------


@pytest.mark.many(2)
@pytest.mark.parametrize("plan", ["tp=4", "pp=2 tp=2 microbatches=2 sequence_parallel=true"])
@pytest.mark.parametrize("model", TRANSFORMERS)
def test_models_of_transformers(clusters, model, plan):
    right(trained(clusters, TRANSFORMERS[model], plan, loss=models.next_token_loss))


@pytest.mark.many(2)
@pytest.mark.parametrize("model", UNNAMED)
def test_models_without_known_names(clusters, model):
    build, x, y = UNNAMED[model]
    found = run(clusters, build, (x, y), "pp=2 tp=2 microbatches=3", loss=functional.mse_loss)
    right(found)
    assert any(form.grad_writes or form.writes for form in found.program.forms)  # something was divided


LAYERS, WIDTH = 3, 32
WHOLE = ROWS * TOKENS * WIDTH * 8  # bytes of what goes from layer to layer
LOGITS = ROWS * TOKENS * VOCAB * 8


def kinds(program: Program) -> tuple[Counter[str], Counter[str]]:
    """How many collectives of each op change forms on rank 0: forward, and backward."""
    row = [ins for ins in program.ranks[0] if repartitions(ins)]
    forward, backward = (
        Counter(ins.op.name for ins in row if ins.reads[0].kind == kind) for kind in ("output", "grad_output")
    )
    return forward, backward


def partial_bytes(program: Program) -> int:
    """Bytes of the parameters of which every rank makes a part of the gradient."""
    return sum(sum(group.tensors) for group in program.groups if group.form == "P")


@pytest.mark.parametrize("ranks", [2, 4])
def test_collectives_of_a_layer_are_megatrons(clusters, ranks):
    """Two all-reduces forward and two backward in each layer, one behind the tokens and one in front of the logits."""
    found = trained(clusters, partial(gpt, layers=LAYERS), f"tp={ranks}", steps=1)
    sums = 2 * LAYERS + 1
    assert kinds(found.program) == ({"ALL_REDUCE": sums, "ALL_GATHER": 1}, {"ALL_REDUCE": sums})  # logits, for the loss
    sent = (2 * 2 * sums * WHOLE + LOGITS) * (ranks - 1) // ranks
    assert not partial_bytes(found.program)
    assert found.bytes_sent == [sent] * ranks
    assert [round(size / found.program.steps) for size in found.predicted.bytes_sent()] == [sent] * ranks


def test_collectives_of_sequence_parallelism(clusters):
    """Where Megatron has an all-reduce, it has a reduce-scatter and an all-gather, of the same bytes together: each
    sends (n-1)/n of the value, and an all-reduce twice that. Source: Korthikanti et al., 2022, section 4.2.2."""
    ranks = 2
    found = trained(clusters, partial(gpt, layers=LAYERS), f"tp={ranks} sequence_parallel=true", steps=1)
    pairs = 2 * LAYERS + 1
    assert kinds(found.program) == (
        {"ALL_GATHER": pairs + 1, "REDUCE_SCATTER": pairs},  # and the logits, for the loss
        {"ALL_GATHER": pairs, "REDUCE_SCATTER": pairs},
    )
    others = Counter(ins.op.name for ins in found.program.ranks[0] if ins.group and not repartitions(ins))
    assert set(others) == {"ALL_REDUCE"}  # gradients of norms and of biases behind rows
    moved = (2 * (pairs + pairs) * WHOLE + LOGITS) * (ranks - 1) // ranks
    summed = 2 * partial_bytes(found.program) * (ranks - 1) // ranks
    assert summed
    assert found.bytes_sent == found.predicted.bytes_sent() == [moved + summed] * ranks
    assert found.trace.bytes_by_kind() == {"activations": moved * ranks, "gradients": summed * ranks}


_given: list[tuple[str, int]] = []  # in a rank: what it has given to collectives, and how many bytes


def count_messages() -> None:
    """In a rank: from now on it notes the bytes of every tensor that goes through a collective of its communicator."""
    for name in ("iallreduce", "ireduce_scatter", "iall_gather"):
        plain = getattr(Communicator, name)

        def noting(self, tensor, *rest, name=name, plain=plain, **options):
            _given.append((name, (rest[0] if name == "iall_gather" else tensor).nbytes))
            return plain(self, tensor, *rest, **options)

        noting.plain = plain  # type: ignore[attr-defined]
        setattr(Communicator, name, noting)


def counted_messages() -> list[tuple[str, int]]:
    """In a rank: ends that, and gives what was noted."""
    for name in ("iallreduce", "ireduce_scatter", "iall_gather"):
        setattr(Communicator, name, getattr(Communicator, name).plain)
    found = list(_given)
    _given.clear()
    return found


@pytest.mark.parametrize("annotations", [None, sequence_parallel()], ids=["megatron", "sequence"])
def test_what_ranks_give_to_collectives_is_what_the_trace_says(clusters, annotations):
    """Counted in the communicator, below everything that knows forms."""
    plan = Plan(tp=2, sequence_parallel=annotations is not None)
    job = Job(partial(gpt, layers=LAYERS), texts(), ROWS, dtype=torch.float64, annotations=annotations)
    program = plan.compile(shape_of(job.share(job.build(), 0, Mesh(tp=2), "", 1)))
    cluster = clusters(2)
    cluster.run(count_messages)
    try:
        found = execute(program, job, cluster=cluster)
    finally:
        noted = cluster.run(counted_messages)
    hops = {"iallreduce": 2, "ireduce_scatter": 1, "iall_gather": 1}
    noted = [[one for one in of_rank if one[1] > 8] for of_rank in noted]  # (one number: whether all models are alike)
    assert [sum(hops[name] * size // 2 for name, size in of_rank) for of_rank in noted] == found.trace.bytes_sent()
    values = Counter(name for name, size in noted[0] if size == WHOLE)
    pairs = 2 * (2 * LAYERS + 1)  # forward and backward
    wanted = {"ireduce_scatter": pairs, "iall_gather": pairs} if annotations else {"iallreduce": pairs}
    assert values == Counter(wanted) + Counter(iall_gather=1)  # (the logits have as many numbers)


# Memory ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt-tiny", "gpt-moe-tiny"])
def test_nodes_leave_nothing_to_the_garbage_collector(name):
    """What a node's backward has used is freed at once: no circle of references holds it."""
    x, _ = data.for_model(name).batch(0, 4)
    whole, axis = models.build(name), "ep" if "moe" in name else "tp"
    nodes = local_model(whole, 0, 2, x, experts() if axis == "ep" else None, "S0" if axis == "ep" else "")
    value = x[:2] if axis == "ep" else x
    gc.collect()
    gc.freeze()  # (what is there already need not be looked at again)
    gc.disable()
    try:
        for k, node in enumerate(nodes):
            read = needed(node.forms.reads)
            given = on_one_rank(value, nodes.forms[k - 1].writes, read, [2], 4) if k else value
            given = map_tensors(given, lambda t: t.detach().requires_grad_(t.is_floating_point()))
            made = node(given)
            ends = [t for t in tensors(made) if t.grad_fn is not None]
            if ends:
                torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])
            value = map_tensors(made, torch.Tensor.detach)
            del given, made, ends
            assert gc.collect() == 0, node.title
    finally:
        gc.enable()
        gc.unfreeze()


# What is refused ------------------------------------------------------------------------------------------------------


class Average(nn.Module):
    """Keeps a mean of what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        self.seen.mul_(0.5)
        self.seen.add_(y.detach().mean(0))
        return self.second(y)


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(self.first(x), 0.5)


class ByNorm(torch.optim.SGD):
    """Divides each gradient by its norm, for which a rank needs all of it."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad /= parameter.grad.norm()
        return super().step(closure)


class Growing:
    """Longer sequences in each step."""

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        return numbers(TOKENS + step, 16), numbers(TOKENS + step, 16)


def odd() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 3))


WIDE = numbers(8), numbers(4)
SEVERAL = {
    "no names": (
        (perceptron, WIDE), {"plan": "tp=2 sequence_parallel=true"},
        "the preset divides nothing here: no operator has one of its names .*by_operators",
    ),
    "optimizer": ((perceptron, WIDE), {"optimizer": partial(ByNorm, lr=0.1)}, "ByNorm: .* element by element"),
    "longer sequences": ((attentions, Growing()), {}, "x has the shape .*, and .* in the first batch"),
}  # fmt: skip


def capture_once() -> None:
    """In a rank: loads what torch.export needs. A rank that is stopped while it loads that cannot use it any more."""
    capture_layer(nn.Linear(2, 2), torch.zeros(3, 2))


@pytest.mark.parametrize("case", SEVERAL)
def test_refusals_name_what_is_possible(clusters, case):
    (model, given), options, words = SEVERAL[case]
    settings = {"loss": functional.mse_loss, "check": False, **options}
    clusters(2).run(capture_once)
    with pytest.raises(PlanError, match=words):
        run(clusters, model, given, settings.pop("plan", "tp=2"), **settings)


@pytest.mark.parametrize("model", [odd, lambda: nn.Sequential(Drawing()), lambda: nn.Sequential(Average())])
def test_what_cannot_be_divided_is_computed_whole(clusters, model):
    count = 3 if model is odd else 8
    given = numbers(count), numbers(3 if model is odd else 4)
    clusters(2).run(capture_once)
    with pytest.warns(UserWarning, match="computed whole"):
        run(clusters, model, given, "tp=2", loss=functional.mse_loss, check=False)


def test_branches_are_refused(clusters):
    with pytest.raises(PlanError, match="the model has branches, and layers that 2 ranks share are those of chains"):
        run(clusters, partial(models.build, "branchy"), data.for_model("branchy"), "tp=2", check=False)


# Other ways to run ----------------------------------------------------------------------------------------------------


class Giving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"made": self.first(x), "given": x}


class Taking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 4), nn.Linear(8, 4)

    def forward(self, both: dict[str, Tensor]) -> Tensor:
        return self.first(both["made"].relu()) + self.second(both["given"])


def test_layers_that_hand_on_dictionaries(clusters):
    right(run(clusters, lambda: nn.Sequential(Giving(), Taking()), WIDE, "pp=2 tp=2", loss=functional.mse_loss))


def test_micro_batches_in_step(clusters):
    right(trained(clusters, gpt, "tp=2 batch_copies=2 microbatches=3 sequence_parallel=true"))


def test_stored_statistics_stay_whole(clusters):
    given = numbers(1, 8, 8), numbers(4)
    found = run(clusters, partial(convolutions, norm=True), given, "tp=2", loss=functional.mse_loss)
    right(found)


def test_fewer_rows_than_micro_batches(clusters):
    x, y = numbers(8)[:2], numbers(4)[:2]
    for words in ("tp=2 microbatches=3", "dp=2 tp=2 zero=1 microbatches=2"):
        right(run(clusters, perceptron, (x, y), words, loss=functional.mse_loss, batch=2, memory=True))


def test_inference(clusters):
    plain = trained(clusters, gpt, "dp=2 inference=true", check=False, steps=1).losses
    assert trained(clusters, gpt, "tp=2 inference=true", check=False, steps=1).losses == pytest.approx(plain, rel=1e-12)


def test_evaluate(clusters):
    found = trained(clusters, gpt, "tp=2")
    options = {"state": found, "batch": ROWS, "dtype": torch.float64}
    alone = minipar.evaluate(gpt, texts(), "dp=2", cluster=clusters(2), **options).loss
    assert minipar.evaluate(gpt, texts(), "tp=2", cluster=clusters(2), **options).loss == pytest.approx(
        alone, rel=1e-12
    )
