"""Bytes and operations of a model's layers from formulas, without building or running the model. No torch here.

    layer_costs("gpt3-175b", rows=1)                            a model by name
    layer_costs(GPT(layers=48, width=12288), rows=1)            a model by its numbers, of `minipar.models.table`
    layer_costs(sizes("llama3-8b"), rows=1)                     or of `minipar.models.sizes`

This is the only place where bytes of activations and shards of parameters are counted. What predicts memory or time
(prediction/) adds them up.

A transformer block of width h, a heads, s tokens a row, b rows keeps for its backward, in 16-bit numbers,

    s b h (34 + 5 a s / h)    everything, including its input
    s b h  34                 without the attention core, which is computed again ("selective")
    s b h   2                 only its input ("full" recomputation)

With e bytes a number these are s b h (16 e + 2) for all but the core, where 2 is for the masks of dropout, one byte
each; and s b h (2 e + 1) a s / h for the core: softmax, its mask, and the masked result.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, section 4.
These formulas count a block as the paper's authors ran it. minipar's own layers differ, and `fused=True` counts every
byte of them. Attention is one kernel that keeps no s x s matrix, but one number for each row of it. Masks are as wide
as the numbers that they mask. Norms keep two numbers a token. The loss keeps probabilities in addition to the logits.

Several ranks may also share a transformer's blocks. A `Division` says what one of these ranks holds and saves.

    tp = 2     every matrix is cut in two: by heads, hidden numbers, or words of the vocabulary. Norms, and the biases
               after second matrices, are whole on both ranks. So is what norms save, unless `sequence` divides it, too
    cp = 2     each rank has half of the tokens of every row
    ep = 4     each block has `experts` MLPs instead of one, shared out over 4 ranks; every token goes to `top` of them.
               Gradients of experts are summed over a fourth of the ranks that have the same other parameters

Sources: Shoeybi et al., "Megatron-LM", 2019; Korthikanti et al. 2022, section 4 (`sequence`); Lepikhin et al.,
"GShard", 2020, and Fedus et al., "Switch Transformers", 2021 (experts). All experts are assumed to be equally busy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import Any

from minipar.costs.recomputation import LayerCosts
from minipar.models import table
from minipar.models.sizes import Chain, Sizes, Transformer, of_preset, sizes
from minipar.models.table import GPT, Preset, check_gpt
from minipar.program import Group

FLOAT, INTEGER = 4, 8  # bytes: FLOAT of statistics, and of logits in the paper; INTEGER of positions


# division -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Division:
    """How ranks share the blocks of a transformer. By default they do not.

    tp        number of tensor-parallel ranks
    sequence  whether these ranks divide norms, dropout and the inputs of blocks by tokens
    ep        number of ranks that share out the experts; each works on rows of its own
    cp        number of ranks that share out the tokens of every row
    even      whether these have as many pairs of tokens each, and leave out those that a causal mask hides
    """

    tp: int = 1
    sequence: bool = False
    ep: int = 1
    cp: int = 1
    even: bool = True


WHOLE = Division()


# parameters ----------------------------------------------------------------------------------------------------------


@lru_cache(64)
def groups(model: Sizes | GPT, division: Division = WHOLE) -> tuple[tuple[Group, ...], int]:
    """Parameter groups of one rank's part, with sizes in numbers, and how many of them (the last ones) are experts
    that other ranks do not have."""
    if isinstance(model, GPT):
        check_gpt(model)
        model = of_preset(model)
    if isinstance(model, Chain):
        return tuple(Group((l,), (layer.parameters,)) for l, layer in enumerate(model.chain)), 0
    h, f, t, last = model.hidden, model.ffn, division.tp, model.layers + 1

    def first(inputs: int, outputs: int, bias: bool) -> tuple[int, ...]:  # cut by outputs, as is its bias
        return inputs * _part(outputs, t), *([_part(outputs, t)] if bias else [])

    def second(inputs: int, outputs: int, bias: bool) -> tuple[int, ...]:  # cut by inputs; its whole bias is added once
        return _part(inputs, t) * outputs, *([outputs] if bias else [])

    def perceptron(inner: int, bias: bool) -> tuple[int, ...]:
        return *first(h, inner, bias) * (2 if model.gated else 1), *second(inner, h, bias)

    mlp = perceptron(f, model.expert_bias if model.experts else model.bias)
    norm = (h,) if model.rms else (h, h)
    *before, (mixed, _, _) = model.attention_matrices
    attention = second(mixed, h, model.bias)
    for a, b, is_cut in before:
        attention = (*attention, *(first(a, b, model.bias) if is_cut else (a * b,)))
    here = mlp * (model.experts // division.ep if model.experts else 1)
    separate = model.experts > 0 and division.ep > 1
    router = (h * model.experts,) if model.experts else ()
    around = (*norm, *attention, *norm)
    block = (*around, *router, *perceptron(model.shared, False) * (model.shared > 0), *(() if separate else here))
    plain = (*around, *perceptron(model.dense_ffn, model.bias))
    words, position = _part(model.vocabulary, t) * h, (model.sequence * h,) * model.learned
    middle = [Group((layer,), block if layer > model.dense else plain) for layer in range(1, last)]
    tied = [Group((0, last), (words,))] if model.tied else []
    ends = (position, norm) if model.tied else ((words, *position), (*norm, words))
    experts = [Group((layer,), here) for layer in range(1 + model.dense, last)] if separate else []
    return (Group((0,), ends[0]), *middle, Group((last,), ends[1]), *tied, *experts), len(experts)


def _part(size: int, ranks: int) -> int:
    return -(-size // ranks)


# activations ---------------------------------------------------------------------------------------------------------


def block_bytes(
    gpt: GPT, rows: int, element: int = 2, *, selective: bool = False, tp: int = 1, sequence_parallel: bool = False
) -> int:
    """Bytes that one block keeps for one micro-batch on each of `tp` tensor-parallel ranks (the paper's table 2), its
    input included.

    element             bytes of a number
    selective           whether the attention core is computed again
    sequence_parallel   whether norms, dropout and inputs are divided, too, so that everything is divided
    """
    division = Division(tp, sequence_parallel)
    costs = layer_costs(gpt, rows, element, fused=False, selective=selective, division=division)
    return costs.saved[1] + costs.output[0]


def layer_costs(
    model: Preset | Sizes | str,
    rows: float,
    element: int = 4,
    *,
    fused: bool | None = None,
    selective: bool = False,
    division: Division = WHOLE,
    **overrides: Any,
) -> LayerCosts:
    """Every layer of a model for a micro-batch of `rows` rows; times are operations (divide them by FLOP/s).

    model        numbers, or a name or words that `models.sizes.sizes` knows
    rows         of one rank
    fused        True: bytes that minipar's own layers save; False: bytes of the papers. Default: False for the name of
                 a published model, otherwise True
    selective    blocks without what their attention core saves
    division     the costs are those of one rank of this division; all experts are equally busy
    overrides    numbers that replace the model's

    Errors: `PlanError` for an unknown name or number.
    """
    chosen = _known(model, overrides)
    if fused is not None and isinstance(chosen, Transformer):
        chosen = replace(chosen, flash=fused)
    return costs_of(chosen, rows, element, division, selective)


def _known(model: Preset | Sizes | str, overrides: Mapping[str, Any]) -> Sizes:
    if isinstance(model, str):
        return named(model, **overrides)
    model = replace(model, **overrides) if overrides else model
    return model if isinstance(model, (Transformer, Chain)) else of_preset(model)


@lru_cache(256)
def costs_of(
    model: Sizes, rows: float, element: int, division: Division, selective: bool = False, operators: bool = False
) -> LayerCosts:
    """As `layer_costs`, of a model by its numbers as they are. With `operators` blocks keep what attention and
    every second matrix product give (torchtitan's selective checkpoint), and all else runs again."""
    if isinstance(model, Chain):
        return _chain(model, rows, element)
    return _transformer(model, rows, element, selective, operators, division)


def named(name: str, **overrides: Any) -> Sizes:
    """A model by its name, for counting layer by layer: a published GPT with the attention of its papers, which keeps
    matrices of sequence x sequence. (`minipar estimate` has one kernel for it, unless the words are flash=false.)"""
    if name not in table.names():
        return sizes(name)
    model = of_preset(table.numbers(name, **overrides), name)
    return replace(model, flash=False) if name in table.PUBLISHED and isinstance(model, Transformer) else model


def _chain(model: Chain, rows: float, element: int) -> LayerCosts:
    output = tuple(ceil(element * rows * layer.output) for layer in model.chain)
    kept = [element * rows * layer.saved for layer in model.chain]
    saved = [max(0, ceil(size - before)) for size, before in zip(kept, (0, *output), strict=False)]
    saved[-1] += FLOAT * (rows > 0)  # the loss
    forward = tuple(layer.flops * rows for layer in model.chain)
    return LayerCosts(forward, tuple(2 * x for x in forward), output, tuple(saved), output)


def _shares(division: Division) -> tuple[Callable[[float], int], Callable[[float], int]]:
    """What a tensor-parallel rank has of what is divided; and of what all have, unless they divide the tokens."""

    def cut(number: float) -> int:
        return ceil(number / division.tp)

    return cut, cut if division.sequence else ceil


def _transformer(
    m: Transformer, rows: float, element: int, selective: bool, operators: bool, division: Division
) -> LayerCosts:
    e, own = element, m.flash  # minipar's own layers, or those of the papers
    tokens = rows * m.sequence / division.cp
    size = tokens * m.hidden
    mask = m.dropout * (e if own else 1) * size  # of one dropout
    statistics = own * 2 * (1 if m.rms else 2) * FLOAT * tokens
    core = 0.0 if selective else core_numbers(m, tokens, e)
    logits = (e if own else FLOAT) * tokens * m.vocabulary
    loss = own * (2 * FLOAT * tokens + FLOAT)

    cut, whole = _shares(division)
    # inputs of the first matrices and of the second norm; queries, keys, values and the output of attention; the MLP
    heads = m.queries + m.keys + m.values + m.mixed
    block = whole(e * tokens * (3 * m.hidden + m.latent + m.query_latent) + 2 * mask + statistics)
    block += cut(e * tokens * heads + core)
    if m.built and division.tp > 1:  # (its two sums are nodes: what is handed to them and what they hand on is kept)
        block += whole(4 * e * size)
    routed, balance = tokens, 0.0
    if m.experts:  # what routing and combination save of tokens, of their choices, and of places in the queues
        choices, routed, balance = tokens * m.top, round(tokens * m.top * m.capacity, 6), own * e * rows
        queue = e * routed * m.hidden
        if own:
            queue += e * m.experts * (tokens + rows) + INTEGER * routed
            queue += choices * (2 * INTEGER + 1 + 2 * e + e * m.hidden)
            loss += INTEGER * (rows + 1)
        else:
            queue += FLOAT * tokens * m.experts
        block += whole(queue)
    block += cut(e * (m.shared * tokens + (0 if m.dropless else m.ffn * routed)) * (3 if m.gated else 2))
    if operators:
        kept = [e * tokens * width / (division.tp if cut_there else 1) for _, width, _, cut_there in m.products[::2]]
        block = ceil(sum(kept)) + cut(e * tokens * m.mixed + core)
    between, last = whole(e * size + balance), cut(logits) + ceil(balance)
    output = (*(between,) * (m.layers + 1), last)
    embed = whole(mask + own * m.learned * INTEGER * m.sequence / division.cp)
    saved = (embed, *(block,) * m.layers, whole(e * size + loss) + own * cut(FLOAT * tokens * m.vocabulary))
    forward = (0.0, *(m.block_flops * rows,) * m.layers, m.head_flops * rows)
    forward = tuple(flops / division.tp / division.cp for flops in forward)
    return LayerCosts(forward, tuple(2 * x for x in forward), output, saved, (whole(e * size), *output[1:]))


def workspace(model: Sizes, rows: float, element: int, division: Division = WHOLE) -> tuple[int, int]:
    """Bytes that a block's backward needs for a moment, those of the gradients between its perceptron's matrices and of
    their input; and how many logits there are."""
    if isinstance(model, Chain):
        return 0, 0
    m = model
    tokens = rows * m.sequence / division.cp
    inner = m.ffn * (2 if m.gated else 1) * (m.top * m.capacity if m.experts else 1) / division.tp
    return ceil(element * tokens * (inner + m.hidden)), ceil(tokens * m.vocabulary / division.tp)


@lru_cache(256)
def weight_costs(
    model: Sizes, rows: float, element: int, division: Division = WHOLE
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Bytes of a backward in halves, for each layer and one micro-batch: what the input half makes and leaves, and all
    that waits for the weight half.

    The input half leaves the gradient of every output of a matrix or a norm. The weight half multiplies it by the
    matrix's or norm's input, which waits with it; queries, masks and the inputs of activations do not. A layer of a
    chain counts as one matrix with an activation.
    """
    e = element
    if isinstance(model, Chain):
        built, kept, before = [], [], 0.0
        for l, layer in enumerate(model.chain):
            trains = layer.parameters > 0
            built.append(ceil(e * rows * max(0.0, layer.saved - before) * trains))
            kept.append(
                built[-1] + ceil(e * rows * (before if l else layer.saved) * trains)
            )  # (no input half in the first)
            before = layer.output
        return tuple(built), tuple(kept)
    m = model
    tokens = rows * m.sequence / division.cp
    size = e * tokens * m.hidden
    statistics = m.flash * (1 if m.rms else 2) * FLOAT * tokens  # of one norm
    routed = round(tokens * m.top * m.capacity, 6) if m.experts else tokens
    inner = 0.0 if m.dropless else e * routed * m.ffn

    cut, whole = _shares(division)
    queue = e * routed * m.hidden if m.experts else size  # what second matrices of the MLP hand on
    router = e * tokens * m.experts
    block = whole(3 * size + queue + router) + cut(
        inner * (2 if m.gated else 1) + e * tokens * (m.queries + m.keys + m.values)
    )
    inputs = whole(4 * size + 2 * statistics + queue * (m.experts > 0)) + cut(size + inner)
    mask = m.dropout * (e if m.flash else 1) * tokens * m.hidden
    embed = whole(mask + m.flash * m.learned * INTEGER * m.sequence / division.cp)
    head = cut(e * tokens * m.vocabulary) + whole(size)
    built = [whole(size), *[block] * m.layers, head]
    kept = [built[0] + embed, *[block + inputs] * m.layers, head + whole(2 * size + statistics)]
    return tuple(built), tuple(kept)


def core_numbers(m: Transformer, tokens: float, element: int) -> float:
    """Bytes that the attention core keeps of so many tokens in addition to queries, keys and values: a number for each
    row of scores, if it is one kernel; otherwise the scores, and with dropout its mask and its result."""
    if m.flash:
        return FLOAT * m.heads * tokens
    return (2 * element + 1 if m.dropout else element) * m.heads * tokens * m.sequence


# operations ----------------------------------------------------------------------------------------------------------


def input_flops(
    model: Preset | Sizes | str,
    rows: float,
    *,
    selective: bool = False,
    division: Division = WHOLE,
    **overrides: Any,
) -> tuple[float, ...]:
    """Operations of the input half of each layer's backward; the weight half has the rest. The arguments are those of
    `layer_costs`.

    A matrix of parameters takes as many operations for the gradient of its input as for its own. The attention core has
    no parameters: its whole backward is in the input half, and so is its forward if that runs again (`selective`). In
    GPT-2 small the input half of a block has 59 % of the operations.
    """
    chosen = _known(model, overrides)
    whole = costs_of(chosen, rows, FLOAT, division).backward
    if not isinstance(chosen, Transformer):
        return tuple(flops / 2 for flops in whole)
    core = chosen.core_flops * rows / division.tp / division.cp * (2 if selective else 1)
    first, *blocks, head = (flops / 2 for flops in whole)
    return first, *(half + core for half in blocks), head
