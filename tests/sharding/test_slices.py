"""Layers that ranks share, on slices of sequences: which nodes carry what, and what is refused."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
from torch import Tensor, nn

from minipar import PlanError, models
from minipar.models.nodes import ShardedModel, SlicedNode
from minipar.models.parameter_groups import shape_of
from minipar.models.sliced import Sliced
from minipar.models.tensors import tensors
from minipar.program.mesh import Mesh
from minipar.sharding.propagation import sequence_parallel
from minipar.sharding.sharded import Graphs, capture_graphs, local_model
from tests.sharding import by_hand

TOKENS = torch.zeros(3, 10, dtype=torch.long)
SLICES = [range(4), range(4, 9), range(9, 10)]
GPT = partial(models.gpt, layers=2, width=16, heads=4, context=16, vocab=32)


class Running(Sliced):
    """A layer that carries a sum over tokens, of what its first matmul makes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward_slice(self, x: Tensor, start: int, carry: Tensor | None) -> tuple[Tensor, Tensor]:
        hidden = self.up(x)
        total = hidden.cumsum(1) if carry is None else hidden.cumsum(1) + carry
        return self.down(hidden * total), total[:, -1:]


class Crossing(Sliced):
    """A layer whose carry is read in front of a collective, and made behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward_slice(self, x: Tensor, start: int, carry: Tensor | None) -> tuple[Tensor, Tensor]:
        made = self.down(self.up(x if carry is None else x + carry)).tanh()
        return made, made[:, -1:]


@cache
def graphs(fused: bool) -> Graphs | None:
    """Of a GPT with tied weights. Capturing takes seconds."""
    return capture_graphs(GPT(fused=fused, tied=True), 2, TOKENS, SLICES)


def shared(model: nn.Sequential, example: Tensor = TOKENS, **more: object) -> ShardedModel:
    return local_model(model, 0, 2, example, slices=SLICES, **more)  # type: ignore[arg-type]


@pytest.mark.many(2)
@pytest.mark.parametrize("fused", [True, False])
def test_the_node_with_the_attention_carries_the_keys_and_values_of_its_heads(fused: bool) -> None:
    found = shared(GPT(fused=fused, tied=True), graphs=graphs(fused))
    carrying = [node for node in found if isinstance(node, SlicedNode) and node.carries]
    assert [node.title for node in carrying] == ["1.1", "2.1"]
    assert shape_of(found).carries == tuple(k for k, node in enumerate(found) if node in carrying)
    assert shape_of(found).whole == ""
    node = carrying[0]
    before = list(found)[list(found).index(node) - 1]
    value, carry = torch.randn(5, 4, 16), None
    for tokens in SLICES:
        given, _ = before(value[:, :1].expand(5, len(tokens), 16), tokens.start, None)
        _, carry = node(given, tokens.start, carry)
        assert [t.shape for t in tensors(carry)] == [(5, 2, tokens.stop, 4)] * 2  # of 4 heads


def test_a_carry_of_shards_stays_with_its_rank() -> None:
    """The layer has other names than the presets know, and no attention."""
    found = shared(nn.Sequential(Running(), Running()), torch.zeros(3, 10, 8))
    carrying = [node for node in found if isinstance(node, SlicedNode) and node.carries]
    assert [node.title for node in carrying] == ["0.0", "1.1"]
    _, carry = carrying[0](torch.zeros(5, 4, 8), 0, None)
    assert [t.shape for t in tensors(carry)] == [(5, 1, 8)]  # of 16


@pytest.mark.many(2)
@pytest.mark.parametrize("fused", [True, False])
def test_ranks_with_parts_of_the_tokens_carry_keys_and_values_of_all(fused: bool) -> None:
    slices = [range(6), range(6, 8), range(8, 10)]
    model = models.gpt(layers=1, width=16, heads=4, context=16, vocab=32, fused=fused)
    found = local_model(model, 1, Mesh(cp=2), TOKENS, {}, "S1", slices)
    (node,) = [node for node in found if isinstance(node, SlicedNode) and node.carries]
    assert node.title == "1.1"
    # The residual and the queries are its own; keys and values are gathered, and it makes parts of their gradients.
    assert node.forms.reads == "S1,S2,R,R"
    assert node.forms.grad_writes == "S1,S2,P,P"
    carry = None
    for tokens in slices:
        own = torch.randn(5, len(tokens) // 2, 16)
        queries, keys, values = (torch.randn(5, 4, n, 4) for n in (len(tokens) // 2, len(tokens), len(tokens)))
        output, carry = node((own, queries, keys, values), tokens.start, carry)
        assert output.shape == own.shape
        assert [t.shape for t in tensors(carry)] == [(5, 4, tokens.stop, 4)] * 2
        assert torch.equal(tensors(carry)[0][:, :, tokens.start :], keys)


def test_slices_that_ranks_cannot_share_are_refused() -> None:
    says = "context_parallel=2: slice 1 has 5 tokens, .*; possible are slices= of multiples of 2 tokens"
    with pytest.raises(PlanError, match=says):
        local_model(GPT(tied=True), 0, Mesh(cp=2), TOKENS, {}, "S1", SLICES, graphs(True))


def test_layers_that_take_whole_sequences_are_refused() -> None:
    with pytest.raises(PlanError, match=r"layer 0 \(Linear\) of this model takes whole sequences; possible are"):
        shared(nn.Sequential(nn.Linear(8, 8)), torch.zeros(3, 10, 8))
    with pytest.raises(PlanError, match="a method `shard`: they take whole sequences; possible is"):
        shared(by_hand.model(), torch.zeros(3, 10, 8))


def test_slices_whose_tokens_cannot_be_divided_are_refused() -> None:
    says = "slice 1 of 5 tokens: .*0.add.* dimension 1 has 5 elements, .*; the nearest choice is "
    with pytest.raises(PlanError, match=says):
        shared(GPT(tied=True), annotations=sequence_parallel(), graphs=graphs(True))


def test_a_carry_that_a_collective_would_change_is_refused() -> None:
    annotations = {"*.up": "S-1 on tp", "*.down": "P on tp"}
    says = "carry: is carried from slice to slice, but read by add, and a collective would come between .*possible"
    with pytest.raises(PlanError, match=says):
        shared(nn.Sequential(Crossing()), torch.zeros(3, 10, 8), annotations=annotations)
