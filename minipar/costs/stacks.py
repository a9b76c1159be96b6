"""What software reaches of a machine's peaks, and what it holds: one table of named numbers for each stack.

    stack = STACKS["megatron-core"]            what the stack does
    reached("h100", "megatron-core")           which part of the peaks it reaches on a device: `Efficiency`

megatron-2021        Megatron-LM as Narayanan et al. ran it: kernels that are not fused, attention of several operators,
                     float32 gradients, sums of input gradients in line with the backward
megatron-core        Megatron Core with Transformer Engine, since 2022 (Korthikanti et al.)
torch-fsdp           FSDP of torch, eager: float32 shards of all states, float32 logits
torch-fsdp-compile   FSDP2 with torch.compile, as in torchtitan
deepspeed            ZeRO of DeepSpeed

The numbers of `REACHED` are fitted on published rows (prediction/published.csv) by benchmarks/fit_efficiency.py: at
most six for each device and stack, none for a row or a model. The others are given.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple


@dataclass(frozen=True)
class Efficiency:
    """The part of each peak that programs reach.

    matmul   of the peak FLOP/s, by a matrix product that is very large in all three dimensions
    half     the smallest dimension of a matrix product that reaches half of that: a product whose smallest dimension
             is q reaches matmul * q / (q + half)
    flash    of the peak FLOP/s of 16-bit numbers, by attention as one kernel, for very long sequences; it computes half
             of the pairs of tokens
    narrow   of what 16-bit products reach of their peak, by products of 8-bit and 4-bit numbers of theirs
    memory   of the memory's bandwidth, by elementwise operators and optimizers
    near     of the bandwidth of the links inside a node
    far      of the bandwidth of the links between nodes
    beside   of the time in which collectives could go on beside computing
    routing  seconds of the forward of one layer of a mixture that its bytes and operations do not explain: counting
             tokens, and launching kernels for many experts
    kernel   seconds that the smallest operator takes
    """

    matmul: float = 0.7
    half: float = 190.0
    flash: float = 0.45
    narrow: float = 0.85
    memory: float = 0.75
    near: float = 0.8
    far: float = 0.75
    beside: float = 0.6
    routing: float = 5e-4
    kernel: float = 5e-6


PERFECT = Efficiency(1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0)


class Stack(NamedTuple):
    """What a stack does and holds.

    fused      whether the matrix product itself adds a weight gradient to the sum, and sums of input gradients over tp
               go on beside it
    flash      whether attention is one kernel
    even       whether ring attention takes half of the time of all pairs of tokens. That of torch does not: with 32,768
               tokens on each rank, torchtitan's rows of 1, 4 and 8 ranks take as long as all pairs in its later rounds
    gradient   bytes of a whole gradient where parameters have 2
    logits     bytes that the loss keeps and makes for each logit, with float32 copies
    divided    further ones where ranks share the vocabulary: torch's loss then is several operators, which make the
               float32 logits minus the largest one, and their exponentials (torch/distributed/tensor/parallel/loss.py)
    """

    fused: bool
    flash: bool
    even: bool
    gradient: int
    logits: float
    divided: float = 0.0


STACKS: dict[str, Stack] = {
    "megatron-2021": Stack(False, False, True, 4, 6.0),
    "megatron-core": Stack(True, True, True, 4, 6.0),
    "torch-fsdp": Stack(True, True, False, 2, 14.0, 8.0),
    "torch-fsdp-compile": Stack(True, True, False, 2, 14.0, 8.0),
    "deepspeed": Stack(True, True, True, 2, 14.0),
}

REACHED: dict[tuple[str, str], Efficiency] = {
    ("a100-40gb", "torch-fsdp"): Efficiency(matmul=0.774, half=206, flash=0.302, memory=0.674, beside=0.444, far=0.542),
    ("a100-80gb", "deepspeed"): Efficiency(matmul=0.741, half=218, memory=0.679, near=0.8, far=0.1, beside=0.54),
    ("a100-80gb", "megatron-2021"): Efficiency(matmul=0.945, half=163, memory=0.519, near=0.733, far=0.61, beside=0.6),
    ("a100-80gb", "megatron-core"): Efficiency(
        matmul=0.783, half=189, memory=0.696, near=0.879, far=0.788, beside=0.526
    ),
    ("a100-80gb", "torch-fsdp"): Efficiency(matmul=0.774, half=201, flash=0.311, memory=0.67, beside=0.582, far=0.769),
    ("a100-80gb", "torch-fsdp-compile"): Efficiency(
        matmul=0.7, half=210, flash=0.436, memory=0.713, beside=0.479, far=0.646
    ),
    ("b200", "megatron-core"): Efficiency(
        matmul=0.433, flash=0.373, narrow=1.2, memory=0.584, beside=0.412, routing=0.000556
    ),
    ("b300", "megatron-core"): Efficiency(
        matmul=0.341, flash=0.841, narrow=0.975, memory=0.95, beside=0.368, routing=0.000611
    ),
    ("gb200", "megatron-core"): Efficiency(
        matmul=0.599, flash=0.202, narrow=1.2, memory=0.614, beside=0.585, near=0.752
    ),
    ("gb300", "megatron-core"): Efficiency(
        matmul=0.755, flash=0.327, narrow=1.07, memory=0.5, beside=0.785, routing=0.000526
    ),
    ("h100", "megatron-core"): Efficiency(
        matmul=0.666, flash=0.737, narrow=1.03, memory=0.95, beside=0.434, routing=0.00019
    ),
    ("h100", "torch-fsdp"): Efficiency(matmul=0.641, half=228, flash=0.186, memory=0.455, beside=0.453, far=0.824),
    ("h100-500w", "torch-fsdp-compile"): Efficiency(
        matmul=0.515, flash=0.34, narrow=0.934, memory=0.496, beside=0.684, near=0.95
    ),
    ("h200", "torch-fsdp-compile"): Efficiency(
        matmul=0.844, half=202, near=0.311, memory=0.634, beside=0.507, far=0.603
    ),
}
# The device with the same chip, and the software that is most like a stack.
_KIN = {
    "a100-40gb": "a100-80gb", "b300": "b200", "gb200": "b200", "gb300": "b200", "h200": "h100", "h100-500w": "h100",
    "v100": "a100-80gb",
}  # fmt: skip
_LIKE = {
    "torch-fsdp": "torch-fsdp-compile", "torch-fsdp-compile": "torch-fsdp", "deepspeed": "torch-fsdp",
    "megatron-2021": "megatron-core", "megatron-core": "megatron-2021",
}  # fmt: skip


def reached(device: str, stack: str) -> Efficiency:
    """What a stack reaches on a device.

    Of a pair without rows matrix products, attention and links are as the same chip reaches them with the software that
    is most like it, since clocks, power and cables are the device's. What is the software's is as on other devices:
    which operators are fused (`memory`), what goes on beside computing, its short numbers, and its mixtures.
    """
    kin = _KIN.get(device, "h100")
    same = [
        REACHED[name, stack] for name in (device, kin, "h100", "h100-500w", "a100-80gb") if (name, stack) in REACHED
    ]
    if (device, stack) in REACHED or not same:
        return same[0] if same else Efficiency()
    order = ((kin, stack), (device, _LIKE[stack]), (kin, _LIKE[stack]))
    near = next((REACHED[pair] for pair in order if pair in REACHED), same[0])
    own = {key: getattr(same[0], key) for key in ("memory", "beside", "narrow", "routing")}
    return replace(near, **own)
