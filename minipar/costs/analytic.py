"""Bytes and operations of a model's layers from formulas, without building or running the model. No torch here.

    layer_costs("gpt3-175b", rows=1)                            a model by name, of `minipar.models.table`
    layer_costs(GPT(layers=48, width=12288), rows=1)            a model by its numbers

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

Several ranks may also share a transformer's blocks. `tp`, `ep` and `experts` of a `Division` say what one of these
ranks holds and saves.

    tp = 2     every matrix is cut in two: by heads, hidden numbers, or words of the vocabulary. Norms, and the biases
               after second matrices, are whole on both ranks. So is what norms save, unless `sequence` divides it, too
    ep = 4     each block has `experts` MLPs instead of one, shared out over 4 data-parallel ranks; every token goes to
               `top` of them. Gradients of experts are summed over only dp / ep ranks

Sources: Shoeybi et al., "Megatron-LM", 2019; Korthikanti et al. 2022, section 4 (`sequence`); Lepikhin et al.,
"GShard", 2020, and Fedus et al., "Switch Transformers", 2021 (experts). All experts are assumed to be equally busy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from minipar.costs.recomputation import LayerCosts
from minipar.errors import PlanError
from minipar.models import table
from minipar.models.table import GPT, MLP, Branchy, Mixture, Preset, check_gpt, convolutions
from minipar.program import Group

FLOAT, INTEGER = 4, 8  # bytes: FLOAT of statistics, and of logits in the paper; INTEGER of positions


# division -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Division:
    """How ranks share the blocks of a transformer. By default they do not.

    tp        number of tensor-parallel ranks
    sequence  whether these ranks divide norms, dropout and the inputs of blocks by tokens
    experts   number of expert MLPs of each block; 0: one MLP for all tokens
    top       number of experts that a token goes to
    ep        number of data-parallel ranks that share out the experts
    """

    tp: int = 1
    sequence: bool = False
    experts: int = 0
    top: int = 1
    ep: int = 1

    def check(self, model: Preset, dp: int) -> None:
        """Refuse a division that is impossible for a model on `dp` data-parallel ranks. Errors: PlanError."""
        for key in ("tp", "top", "ep"):
            if getattr(self, key) < 1:
                raise PlanError(f"{key}={getattr(self, key)}: must be a whole number of at least 1")
        if self != WHOLE and not isinstance(model, GPT):
            raise PlanError("tp and ep: formulas are for transformers; possible is tp=1 ep=1 experts=0")
        if isinstance(model, GPT) and model.heads % self.tp:
            divisors = [str(n) for n in range(1, model.heads + 1) if model.heads % n == 0]
            raise PlanError(f"tp={self.tp}: must divide {model.heads} heads; possible are {', '.join(divisors)}")
        if self.ep > 1 and not self.experts:
            raise PlanError(f"ep={self.ep}: there are no experts to share out; possible is ep=1, or experts=8")
        if self.experts and not 1 <= self.top <= self.experts:
            raise PlanError(f"top={self.top}: a token goes to at most {self.experts} experts")
        if self.ep > 1 and (self.experts % self.ep or dp % self.ep):
            possible = [str(n) for n in range(1, dp + 1) if dp % n == 0 and self.experts % n == 0]
            raise PlanError(
                f"ep={self.ep}: must divide dp={dp} and experts={self.experts}; possible are {', '.join(possible)}"
            )

    @property
    def here(self) -> int:
        """Experts of a block on one rank."""
        return self.experts // self.ep


WHOLE = Division()


# parameters ----------------------------------------------------------------------------------------------------------


def block_parameters(gpt: GPT) -> int:
    """Number of parameters in one transformer block: 12 h^2 in matrices, 13 h in biases and norms."""
    return 12 * gpt.width**2 + 13 * gpt.width


def _mixture_parameters(model: Mixture) -> int:
    """As many as a GPT without its MLPs, and experts without biases, and their gate."""
    width = model.width
    block = 4 * width**2 + 8 * width + model.experts * (width + 8 * width**2)
    return model.layers * block + (2 * model.vocab + model.context + 2) * width


def parameters(model: Preset) -> int:
    """Number of parameters in the whole model."""
    if isinstance(model, MLP):
        return sum(a * b + b for a, b in pairwise(model.widths))
    if isinstance(model, Branchy):
        return sum((given * side**2 + 1) * made for given, made, side in convolutions(model))
    if isinstance(model, Mixture):
        return _mixture_parameters(model)
    tokens = (1 if model.tied else 2) * model.vocab
    return model.layers * block_parameters(model) + (tokens + model.context + 2) * model.width


def groups(gpt: GPT, division: Division) -> tuple[tuple[Group, ...], int]:
    """Parameter groups of one rank's part, with sizes in numbers, and how many of them (the last ones) are experts."""
    check_gpt(gpt)
    h, t, last = gpt.width, division.tp, gpt.layers + 1

    def first(inputs: int, outputs: int) -> tuple[int, int]:  # cut by outputs, as is its bias
        return inputs * _part(outputs, t), _part(outputs, t)

    def second(inputs: int, outputs: int) -> tuple[int, int]:  # cut by inputs; its whole bias is added once
        return _part(inputs, t) * outputs, outputs

    norm, mlp = (h, h), (*first(h, 4 * h), *second(4 * h, h))
    router = (h * division.experts,) if division.experts else ()
    block = (*norm, *first(h, 3 * h), *second(h, h), *norm, *(router or mlp))
    words, position = _part(gpt.vocab, t) * h, gpt.context * h
    middle = [Group((layer,), block) for layer in range(1, last)]
    tied = [Group((0, last), (words,))] if gpt.tied else []
    ends = (position,) if gpt.tied else (words, position), norm if gpt.tied else (*norm, words)
    experts = [Group((layer,), mlp * division.here) for layer in range(1, last)] if division.experts else []
    return (Group((0,), ends[0]), *middle, Group((last,), ends[1]), *tied, *experts), len(experts)


def _part(size: int, ranks: int) -> int:
    return -(-size // ranks)


# activations ---------------------------------------------------------------------------------------------------------


def block_bytes(
    gpt: GPT, rows: int, element: int = 2, *, selective: bool = False, tp: int = 1, sequence_parallel: bool = False
) -> float:
    """Bytes that one block keeps for one micro-batch on each of `tp` tensor-parallel ranks (the paper's table 2).

    element             bytes of a number
    selective           whether the attention core is computed again
    sequence_parallel   whether norms, dropout and inputs are divided, too, so that everything is divided
    """
    size = gpt.context * rows * gpt.width
    alone = 4 * element + 2  # inputs of the norms and of the first matrix after each; masks after both halves
    core = 0 if selective else core_bytes(gpt, rows, element)
    return size * (alone / (tp if sequence_parallel else 1) + 12 * element / tp) + core / tp


def core_bytes(gpt: GPT, rows: int, element: int = 2) -> int:
    """Bytes that the attention core keeps in addition to queries, keys and values: matrices of a x s x s for every
    row."""
    return (2 * element + 1) * gpt.heads * gpt.context**2 * rows


def input_bytes(gpt: GPT, rows: int, element: int = 2) -> int:
    """Bytes of a block's input, or output, for one micro-batch."""
    return element * gpt.context * rows * gpt.width


def interleaved(stages: int, chunks: int) -> float:
    """The activations of the first stage in interleaved 1F1B, divided by those in ordinary 1F1B."""
    return 1 + (stages - 1) / (stages * chunks) if chunks > 1 else 1.0


def layer_costs(
    model: Preset | str,
    rows: int,
    element: int = 4,
    *,
    fused: bool | None = None,
    selective: bool = False,
    division: Division = WHOLE,
    **overrides: Any,
) -> LayerCosts:
    """Every layer of a model for a micro-batch of `rows` rows; times are operations (divide them by FLOP/s).

    model        numbers, or a name
    fused        True: bytes that minipar's own layers save; False: bytes of the papers. Default: False for the name of
                 a published model, otherwise True
    selective    blocks without what their attention core saves
    division     the costs are those of one rank of this division; its own experts get their share of the tokens
    overrides    numbers that replace the model's

    Errors: `PlanError` for an unknown name or number.
    """
    if isinstance(model, str):
        fused = model not in table.PUBLISHED if fused is None else fused
        model = table.numbers(model, **overrides)
    elif overrides:
        model = replace(model, **overrides)
    fused = fused is None or fused
    if isinstance(model, MLP):
        return _mlp(model, rows, element)
    if isinstance(model, Branchy):
        return _branchy(model, rows, element)
    if isinstance(model, Mixture):
        return _mixture(model, rows, element, selective)
    size, tokens = model.context * rows * model.width, model.context * rows
    masks = bool(model.dropout) * (element if fused else 1) * size  # mask of one dropout
    statistics = 4 * FLOAT * tokens * fused
    if fused:
        core = 0 if selective else FLOAT * model.heads * tokens
        logits, loss = element * tokens * model.vocab, 2 * FLOAT * tokens + FLOAT
        embed = masks + INTEGER * model.context
    else:
        core = 0 if selective else core_bytes(model, rows, element)
        logits, loss = FLOAT * tokens * model.vocab, 0
        embed = masks

    def cut(number: int) -> int:
        return -(-number // division.tp)

    def alone(number: int) -> int:  # tensor-parallel ranks all have this, unless they divide the tokens
        return cut(number) if division.sequence else number

    # inputs of the first matrices and of the second norm; queries, keys, values and the output of attention; the MLP
    block = alone(3 * element * size + 2 * masks + statistics) + cut(4 * element * size + core)
    mlps = division.top if division.experts else 1
    block += cut(8 * element * size * mlps)
    if division.experts:  # copies of what was sent to the experts, and the router's probabilities
        block += alone(element * size * mlps + FLOAT * tokens * division.experts)
    output = (*(alone(element * size),) * (model.layers + 1), cut(logits))
    saved = (alone(embed), *(block,) * model.layers, alone(element * size + loss) + cut(logits) * fused)
    flops = block_flops(model, rows) + 16 * rows * model.context * model.width**2 * (mlps - 1)
    forward = (0.0, *(flops / division.tp,) * model.layers, head_flops(model, rows) / division.tp)
    return LayerCosts(forward, tuple(2 * x for x in forward), output, saved, output)


def _mlp(mlp: MLP, rows: int, element: int) -> LayerCosts:
    # A layer saves what is between its Linear and its GELU. The last layer has no GELU; the loss saves probabilities.
    output = tuple(element * rows * width for width in mlp.widths[1:])
    forward = tuple(2.0 * rows * a * b for a, b in pairwise(mlp.widths))
    saved = (*output[:-1], output[-1] + FLOAT)
    return LayerCosts(forward, tuple(2 * x for x in forward), output, saved, output)


def _branchy(model: Branchy, rows: int, element: int) -> LayerCosts:
    # A ReLU saves only its output. The pooling layer saves the mean that is its convolution's input; the head saves the
    # mean over the image.
    image = model.inputs
    table = convolutions(model)
    pools = range(6, 7 * model.blocks, 7)
    made = [*((out or given) * image for given, out, _ in table[:-1]), model.classes]
    output = tuple(element * rows * size for size in made)
    saved = [element * rows * table[l][0] * image if l in pools else 0 for l in range(len(table))]
    saved[-1] = element * rows * table[-1][0] + output[-1] + FLOAT
    pixels = [image] * (len(table) - 1) + [1]
    forward = tuple(2.0 * rows * n * given * out * k * k for n, (given, out, k) in zip(pixels, table, strict=True))
    return LayerCosts(forward, tuple(2 * x for x in forward), output, tuple(saved), output)


def _mixture(model: Mixture, rows: int, element: int, selective: bool) -> LayerCosts:
    # Attention as in the GPT. Then what routing, dispatch and combination save of each token, of each of its choices,
    # and of each place in an expert's queue, whether a token is there or not. Without a capacity, where no place is
    # empty, nothing of what is within an expert is saved.
    tokens, width, heads = model.context * rows, model.width, model.heads
    choices, queue = tokens * model.top, model.places * rows
    size = element * tokens * width
    block = 3 * size + 4 * FLOAT * tokens + 4 * size + (0 if selective else FLOAT * heads * tokens)
    block += element * model.experts * (tokens + rows)  # probabilities; shares of the choices
    block += choices * (2 * INTEGER + 1 + 2 * element + element * width)
    block += queue * (INTEGER + element * width * (1 if model.capacity is None else 1 + 4 + 4))
    balance = element * rows
    logits = element * tokens * model.vocab
    output = (*(size + balance,) * (model.layers + 1), logits + balance)
    last = size + 2 * FLOAT * tokens + logits + FLOAT + INTEGER * (rows + 1)
    saved = (INTEGER * model.context, *(block,) * model.layers, last)
    flops = 8 * tokens * width**2 + core_flops(model, rows) + 2 * tokens * width * model.experts + 16 * queue * width**2
    forward = (0.0, *(float(flops),) * model.layers, float(head_flops(model, rows)))
    return LayerCosts(forward, tuple(2 * x for x in forward), output, saved, (size, *output[1:]))


# operations ----------------------------------------------------------------------------------------------------------


def input_flops(
    model: Preset | str,
    rows: int,
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
    whole = layer_costs(model, rows, division=division, **overrides).backward
    numbers = table.numbers(model, **overrides) if isinstance(model, str) else replace(model, **overrides)
    if not isinstance(numbers, (GPT, Mixture)):
        return tuple(flops / 2 for flops in whole)
    core = core_flops(numbers, rows) / division.tp * (2 if selective else 1)
    first, *blocks, head = (flops / 2 for flops in whole)
    return first, *(half + core for half in blocks), head


def block_flops(gpt: GPT, rows: int) -> int:
    """Operations of one block's forward: 24 b s h^2 in its matrices, 4 b s^2 h in its attention core."""
    return 24 * rows * gpt.context * gpt.width**2 + core_flops(gpt, rows)


def core_flops(gpt: GPT | Mixture, rows: int) -> int:
    """Operations of the attention core's forward. Selective recomputation adds these to each block."""
    return 4 * rows * gpt.context**2 * gpt.width


def head_flops(gpt: GPT | Mixture, rows: int) -> int:
    """Operations of the logits' forward."""
    return 2 * rows * gpt.context * gpt.width * gpt.vocab


def step_flops(gpt: GPT, batch: int, again: float = 0.0) -> float:
    """Operations of a training step over `batch` rows; a backward costs two forwards.

    again   how many forwards of the blocks recomputation adds: 1 for full, core_flops / block_flops for selective
    """
    return (3 + again) * gpt.layers * block_flops(gpt, batch) + 3 * head_flops(gpt, batch)
