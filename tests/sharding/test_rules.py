"""Every way to divide every operator, verified forward and backward on numbers; and rules that are wrong."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from minipar import PlanError
from minipar.sharding import local
from minipar.sharding.checking import check_rule, operator_of
from minipar.sharding.forms import I, P, R, S
from minipar.sharding.rules import RULES, Choice, choices, parse, rule

aten = torch.ops.aten
LINEAR = aten.linear.default
SDPA = aten.scaled_dot_product_attention.default
LOSS = aten.cross_entropy_loss.default
CONV = aten.conv2d.default
NORM = aten.layer_norm.default
BATCH_NORM = aten.batch_norm.default


def t(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape) + len(shape)), dtype=torch.float64)


def numbers(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(7))


HEADS = t(2, 4, 8, 6)  # rows, heads, tokens, width
MASK = torch.ones(8, 8, dtype=torch.bool).triu(1)
PIECES = {"pieces": [(0, S(2, 3))]}

# name, operator, arguments, and how many ways there are beside "whole"
CASES = [
    ("linear 3d", LINEAR, (t(4, 8, 12), t(16, 12)), {}, 6),
    ("linear with bias", LINEAR, (t(4, 8, 12), t(16, 12), t(16)), {}, 6),
    ("linear 2d", LINEAR, (t(4, 12), t(16, 12), t(16)), {}, 5),
    ("linear in pieces", LINEAR, (t(4, 8, 12), t(24, 12), t(24)), {"pieces": [(3, S(2, 3))]}, 7),
    ("mm", aten.mm.default, (t(4, 8), t(8, 12)), {}, 5),
    ("addmm", aten.addmm.default, (t(12), t(4, 8), t(8, 12)), {}, 5),
    ("addmm 2d bias", aten.addmm.default, (t(4, 12), t(4, 8), t(8, 12)), {}, 5),
    ("bmm", aten.bmm.default, (t(4, 8, 6), t(4, 6, 2)), {}, 6),
    ("baddbmm", aten.baddbmm.default, (t(4, 8, 2), t(4, 8, 6), t(4, 6, 2)), {}, 6),
    ("matmul 4d", aten.matmul.default, (t(2, 4, 8, 6), t(2, 4, 6, 8)), {}, 7),
    ("matmul broadcast", aten.matmul.default, (t(2, 4, 8, 6), t(6, 10)), {}, 7),
    ("matmul vector", aten.matmul.default, (t(4, 6), t(6)), {}, 4),
    ("matmul of vectors", aten.matmul.default, (t(6), t(6)), {}, 3),
    ("vector matmul", aten.matmul.default, (t(6), t(6, 4)), {}, 4),
    ("einsum", aten.einsum.default, ("bsd,hde->bhse", [t(2, 4, 6), t(2, 6, 8)]), {}, 7),
    ("gelu", aten.gelu.default, (t(4, 8, 6),), {}, 3),
    ("relu", aten.relu.default, (t(4, 8),), {}, 2),
    ("silu in pieces", aten.silu.default, (t(4, 2, 12),), PIECES, 4),
    ("pow", aten.pow.Tensor_Scalar, (t(4, 8).abs(), 3.0), {}, 2),
    ("add", aten.add.Tensor, (t(4, 8), t(4, 8)), {}, 3),
    ("add broadcast", aten.add.Tensor, (t(4, 6, 8), t(8)), {}, 4),
    ("add of a number", aten.add.Tensor, (t(4, 8), 1.0), {}, 2),
    ("sub", aten.sub.Tensor, (t(4, 1), t(4, 8)), {}, 3),
    ("mul", aten.mul.Tensor, (t(4, 8), t(4, 8)), {}, 4),
    ("mul broadcast", aten.mul.Tensor, (t(4, 8), t(4, 1)), {}, 4),
    ("mul by a number", aten.mul.Tensor, (t(4, 8), 0.5), {}, 3),
    ("div", aten.div.Tensor, (t(4, 8), t(4, 8) + 5), {}, 3),
    ("neg", aten.neg.default, (t(4, 8),), {}, 3),
    ("to", aten.to.dtype, (t(4, 8), torch.float64), {}, 2),
    ("to whole numbers", aten.to.dtype, (t(4, 8), torch.int64), {}, 2),
    ("where", aten.where.self, (t(4, 8) > 0, t(4, 8), t(4, 1)), {}, 2),
    ("masked fill", aten.masked_fill.Scalar, (t(2, 4, 8, 8), MASK, -1e9), {}, 4),
    ("sum of all", aten.sum.default, (t(4, 8),), {}, 3),
    ("sum", aten.sum.dim_IntList, (t(4, 8, 6), [1]), {}, 4),
    ("sum, dimension kept", aten.sum.dim_IntList, (t(4, 8, 6), [-1], True), {}, 4),
    ("mean", aten.mean.dim, (t(4, 8, 6), [1]), {}, 4),
    ("mean of two", aten.mean.dim, (t(2, 8, 4, 6), [2, 3]), {}, 5),
    ("amax", aten.amax.default, (t(4, 8), [1]), {}, 2),
    ("amin", aten.amin.default, (t(4, 8), [0], True), {}, 2),
    ("softmax", aten.softmax.int, (t(4, 8, 6), -1), {}, 3),
    ("log softmax", aten.log_softmax.int, (t(4, 8, 6), 1), {}, 3),
    ("cumsum", aten.cumsum.default, (t(4, 8, 6), 1), {}, 2),
    ("layer norm", NORM, (t(4, 8, 6), [6], t(6), t(6)), {}, 2),
    ("layer norm without weight", NORM, (t(4, 8, 6), [6]), {}, 2),
    ("layer norm of two", NORM, (t(4, 8, 6), [8, 6], t(8, 6), t(8, 6)), {}, 1),
    ("rms norm", aten.rms_norm.default, (t(4, 8, 6), [6], t(6)), {}, 2),
    ("view apart", aten.view.default, (t(4, 8, 6), [4, 8, 2, 3]), {}, 4),
    ("view of a fused projection", aten.view.default, (t(4, 8, 24), [4, 8, 3, 4, 2]),
     {"pieces": [(0, S(2, 3)), (1, S(4))]}, 5),
    ("view joined", aten.view.default, (t(4, 8, 6), [32, 6]), {}, 4),
    ("reshape of heads", aten.reshape.default, (t(4, 8, 4, 2), [4, 8, 8]), {}, 5),
    ("reshape that does not nest", aten.reshape.default, (t(6, 4), [4, 6]), {}, 2),
    ("flatten", aten.flatten.using_ints, (t(4, 8, 6), 1), {}, 4),
    ("unflatten", aten.unflatten.int, (t(4, 12), 1, [4, 3]), {}, 3),
    ("unsqueeze", aten.unsqueeze.default, (t(4, 8), 1), {}, 3),
    ("transpose", aten.transpose.int, (t(4, 8, 6), 1, -1), {}, 4),
    ("t", aten.t.default, (t(4, 8),), {}, 3),
    ("permute", aten.permute.default, (t(2, 4, 6, 8), [2, 0, 3, 1]), {}, 5),
    ("expand", aten.expand.default, (t(4, 1, 8), [4, 6, 8]), {}, 4),
    ("slice", aten.slice.Tensor, (t(4, 8, 6), 1, 2, 6), {}, 3),
    ("slice of all", aten.slice.Tensor, (t(4, 8), 1, 0, 9223372036854775807), {}, 3),
    ("select", aten.select.int, (t(4, 8, 6), 1, 2), {}, 3),
    ("unbind", aten.unbind.int, (t(3, 4, 8), 0), {}, 3),
    ("split of a fused projection", aten.split.Tensor, (t(4, 2, 24), 8, 2), PIECES, 4),
    ("uneven split", aten.split_with_sizes.default, (t(4, 24), [16, 4, 4], 1), {}, 2),
    ("chunk", aten.chunk.default, (t(4, 12), 2, 1), {}, 3),
    ("cat", aten.cat.default, ([t(4, 6), t(4, 6)], 1), {}, 3),
    ("uneven cat", aten.cat.default, ([t(4, 6), t(4, 2)], 1), {}, 2),
    ("stack", aten.stack.default, ([t(4, 6), t(4, 6)], 1), {}, 3),
    ("repeat interleave", aten.repeat_interleave.self_int, (t(4, 6), 3, 1), {}, 3),
    ("triu", aten.triu.default, (t(4, 8, 8),), {}, 1),
    ("embedding", aten.embedding.default, (t(10, 6), numbers(10, 4, 8)), {}, 5),
    ("embedding with padding", aten.embedding.default, (t(10, 6), numbers(10, 4, 8), 7), {}, 5),
    ("attention", SDPA, (HEADS,) * 3, {}, 4),
    ("causal attention", SDPA, (HEADS, HEADS, t(2, 4, 8, 2), None, 0.0, True), {}, 4),
    ("attention with a mask", SDPA, (HEADS, HEADS, HEADS, ~MASK), {}, 4),
    ("grouped attention", SDPA, (t(2, 8, 8, 6), HEADS, HEADS, None, 0.0, True), {"enable_gqa": True}, 4),
    ("cross entropy", LOSS, (t(8, 10), numbers(10, 8)), {}, 2),
    ("cross entropy of tokens", LOSS, (t(4, 10, 6), numbers(10, 4, 6), None, 1, 3), {}, 3),
    ("summed cross entropy", LOSS, (t(4, 10, 6), numbers(10, 4, 6), None, 2), {}, 3),
    ("cross entropy of each row", LOSS, (t(8, 10), numbers(10, 8), None, 0), {}, 2),
    ("dropout", aten.dropout.default, (t(4, 8), 0.5, False), {}, 2),
    ("convolution", CONV, (t(4, 6, 5, 5), t(8, 6, 3, 3), t(8), [1, 1], [1, 1]), {}, 5),
    ("convolution in groups", CONV, (t(4, 6, 5, 5), t(6, 3, 3, 3), None, [1, 1], [1, 1], [1, 1], 2), {}, 3),
    ("convolution of a sequence", aten.conv1d.default, (t(4, 6, 5), t(8, 6, 3)), {}, 5),
    ("convolution without a batch", CONV, (t(6, 5, 5), t(8, 6, 3, 3), t(8)), {}, 4),
    ("to another tensor's", aten.to.other, (t(4, 8), t(3)), {}, 0),
    ("view as another type", aten.view.dtype, (t(4, 8), torch.int64), {}, 2),
    ("pooling", aten.avg_pool2d.default, (t(4, 6, 8, 8), [3, 3], [1, 1], [1, 1]), {}, 3),
    ("max pooling", aten.max_pool2d.default, (t(4, 6, 8, 8), [2, 2]), {}, 2),
    ("batch norm", BATCH_NORM, (t(4, 6, 2), t(6), t(6), None, None, True, 0.1, 1e-5, False), {}, 1),
    ("group norm", aten.group_norm.default, (t(4, 6, 2), 2, t(6), t(6)), {}, 1),
]  # fmt: skip


@pytest.mark.parametrize(("call", "given", "options", "ways"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_every_choice(call, given, options, ways):
    found = check_rule(call, *given, **options)
    assert len(found) == ways + 1, [str(choice) for choice in found]
    assert found[-1].name == "whole"


# Wrong rules ----------------------------------------------------------------------------------------------------------

WRONG = [
    ("view that interleaves", aten.view.default, (t(4, 8, 6), [32, 6]), Choice("s", (S(1),), (S(0),)), "differs"),
    ("whole bias on parts of a sum", LINEAR, (t(4, 12), t(16, 12), t(16)),
     Choice("k", (S(1), S(1), R), (P,)), "output"),
    ("bias on each part", LINEAR, (t(4, 12), t(16, 12), t(16)), Choice("k", (S(1), S(1), I), (P,)), "output"),
    ("sum taken for a whole", LINEAR, (t(4, 12), t(16, 12)), Choice("k", (S(1), S(1)), (R,)), "do not have the same"),
    ("parts of a sum into gelu", aten.gelu.default, (t(4, 8),), Choice("sum", (P,), (P,)), "output"),
    ("number added to parts", aten.add.Tensor, (t(4, 8), 1.0), Choice("sum", (P,), (P,)), "output"),
    ("product of two sums", aten.mul.Tensor, (t(4, 8), t(4, 8)), Choice("sum", (P, P), (P,)), "output"),
    ("sum plus whole", aten.add.Tensor, (t(4, 8), t(4, 8)), Choice("sum", (P, R), (P,)), "output"),
    ("softmax of a part", aten.softmax.int, (t(4, 8), -1), Choice("r", (S(1),), (S(1),)), "output"),
    ("layer norm of a part", NORM, (t(4, 8), [8]), Choice("r", (S(1),), (S(1),)), "run"),
    ("weight of a sequence-parallel norm", NORM, (t(4, 8, 6), [6], t(6), t(6)),
     Choice("s", (S(1), I, I), (S(1),)), "gradient of input 1"),
    ("input of a column-parallel layer", LINEAR, (t(4, 12), t(16, 12)),
     Choice("n", (I, S(0)), (S(1),)), "gradient of input 0"),
    ("weight of data parallelism", LINEAR, (t(4, 12), t(16, 12)),
     Choice("b", (S(0), I), (S(0),)), "gradient of input 1"),
    ("fused projection without pieces", aten.view.default, (t(4, 8, 24), [4, 8, 3, 4, 2]),
     Choice("h", (S(2),), (S(3),)), "differs"),
    ("split without pieces", aten.split.Tensor, (t(4, 2, 24), 8, 2), Choice("h", (S(2),), (S(2),) * 3), "differs"),
    ("mean taken for a sum", aten.sum.dim_IntList, (t(4, 8), [1]), Choice("r", (S(1),), (R,)), "do not have the same"),
    ("mean of a part for the mean", aten.mean.dim, (t(4, 8), [1]), Choice("r", (S(1),), (R,)), "do not have the same"),
    ("maximum of a part", aten.amax.default, (t(4, 8), [1]), Choice("r", (S(1),), (P,)), "output"),
    ("convolution of half an image", CONV, (t(4, 6, 6, 6), t(8, 6, 3, 3), None, [1, 1], [1, 1]),
     Choice("h", (S(2), R), (S(2),)), "differs"),
    ("keys that are not gathered", SDPA, (HEADS,) * 3, Choice("s", (S(2), S(2), S(2)), (S(2),)), "differs"),
    ("losses of a part of the classes", LOSS, (t(8, 10), numbers(5, 8)), Choice("c", (S(1), I), (I,)), "same"),
    ("transposed shard", aten.transpose.int, (t(4, 8), 0, 1), Choice("a", (S(0),), (S(0),)), "shape"),
    ("batch norm of a part", BATCH_NORM, (t(4, 6, 2), None, None, None, None, True, 0.1, 1e-5, False),
     Choice("b", (S(0),), (S(0),)), "differs"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "given", "choice", "words"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_wrong_rules_are_found(call, given, choice, words):
    with pytest.raises(PlanError) as caught:
        check_rule(call, *given, choice=choice)
    assert words in str(caught.value)
    assert "rule of aten::" in str(caught.value)


# A user's own ---------------------------------------------------------------------------------------------------------


def gated(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(x @ gate) * (x @ up)


def test_a_rule_of_ones_own_in_a_line():
    given = (t(4, 6), t(6, 8), t(6, 8))
    with pytest.raises(PlanError, match="mylib::gated has no rule"):
        check_rule(gated, *given, name="mylib::gated")
    rule("mylib::gated", "bk!,k!n,k!n->bn")
    try:
        found = check_rule(gated, *given, name="mylib::gated")
        assert [str(choice) for choice in found] == ["S0,R,R -> S0", "R,S1,S1 -> S1", "I,I,I -> I"]
    finally:
        del RULES["mylib::gated"]


def test_a_wrong_line_is_found_and_not_kept():
    with pytest.raises(
        PlanError, match=r"rule of mylib::gated, S1,S0,S0 -> P on 2 ranks: output 0 joined as P: differs"
    ):
        check_rule(gated, t(4, 6), t(6, 8), t(6, 8), name="mylib::gated", line="bk,kn,kn->bn")
    assert "mylib::gated" not in RULES


@pytest.mark.parametrize("line", ["bk,kn", "b k -> b$", "b->->b", "b!!->b"])
def test_lines_that_cannot_be_read(line):
    with pytest.raises(PlanError, match="cannot be read"):
        rule("mylib::op", line)


def test_lines_that_do_not_fit():
    with pytest.raises(PlanError, match="is of 2 inputs"):
        parse("a,a->a", [(2,), (2,), (2,)], [(2,)])
    with pytest.raises(PlanError, match="dimensions"):
        parse("ab->ab", [(2, 2, 2)], [(2, 2, 2)])
    with pytest.raises(PlanError, match="needs its library"):
        rule("op", "a->a")


# Counting -------------------------------------------------------------------------------------------------------------


def inside(call, given, name, **options):
    operator, tensors = operator_of(call, *given, **options)
    result = local.call(operator, tensors)
    shapes = [tuple(x.shape) for x in tensors]
    found = choices(operator, shapes, [tuple(result.shape)], 2)
    choice = next(choice for choice in found if choice.name == name)
    return [(one.op, one.phase, one.elements) for one in choice.inside]


def test_collectives_inside():
    logits = t(4, 10, 6), numbers(10, 4, 6)
    assert inside(LOSS, logits, "vocabulary") == [("all_reduce", "forward", 24)] * 3
    assert inside(LOSS, logits, "rows") == [("all_reduce", "forward", 1)]
    softmax = inside(aten.softmax.int, (t(4, 8), -1), "online")
    assert softmax == [("all_reduce", "forward", 4)] * 2 + [("all_reduce", "backward", 4)]
