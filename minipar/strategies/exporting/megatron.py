"""A plan as flags of Megatron-LM, such as `pretrain_gpt.py` takes.

Source of the names and of what goes together: Megatron-LM's own arguments.py, as megatron-core's package has it.
"""

from __future__ import annotations

import shlex
from itertools import groupby
from typing import Any

from minipar.errors import PlanError
from minipar.models.table import Mixture
from minipar.strategies.exporting.rules import (
    EACH_MICROBATCH,
    HOST_ONLY,
    Export,
    Given,
    Item,
    Rule,
    rounds,
    sequence_of_tp,
    setting,
    silent,
    translated,
)  # fmt: skip

VERSION = "megatron-core 0.19.2"
NUMBER = 4  # bytes: gradients are added up and sent in float32


def _sequence_parallel(given: Given) -> Item:
    sequence_of_tp(given)
    return Item({"--sequence-parallel": True})


def _experts(given: Given) -> Item:
    if given.transformer is not None and not given.transformer.experts:
        raise given.refuse("is given a model without experts", "ep=1, or a mixture such as gpt-moe-tiny")
    note = f"Megatron-LM counts ranks of ep as replicas: its data-parallel size is {given.replicas}."
    return Item({"--expert-model-parallel-size": given.value}, (note,))


def _schedule(given: Given) -> Item:
    if given.value not in ("1f1b", "interleaved"):
        raise given.refuse("runs 1F1B, plain or interleaved", "schedule=1f1b, schedule=interleaved")
    if given.value == "interleaved" and given.plan.pp == 1:
        raise given.refuse("interleaves only where there is a pipeline", "schedule=1f1b, or pp=2")
    return Item()


def _split(given: Given) -> Item:
    """Blocks of each stage: `E` and `L` are embedding and head, `t` is a block."""
    plan = given.plan
    if plan.pp == 1 and not plan.chunks:
        return Item()
    if given.value == "auto":
        raise given.refuse(
            "has no profile to cut layers by", "layers of each stage such as split=7,7,6,6, or split=even"
        )
    layers = given.layers_of_stages()
    if layers is None:
        note = (
            "Without a model its own split holds: equal numbers of blocks, the embedding with the first stage and the "
            "head with the last. Give model= for that of the plan."
        )
        chunks = len(plan.placement()[0])
        return Item({"--num-virtual-stages-per-pipeline-rank": chunks} if chunks > 1 else {}, (note,))
    stages, last = [], sum(layers) - 1
    first = 0
    for count in layers:
        names = ["E" if l == 0 else "L" if l == last else "t" for l in range(first, first + count)]
        runs = [(name, len(list(run))) for name, run in groupby(names)]
        stages.append("".join(name if length == 1 else f"{name}*{length}" for name, length in runs))
        first += count
    return Item({"--pipeline-model-parallel-layout": "|".join(stages)})


def _bucket(given: Given) -> Item:
    if given.plan.zero >= 2:
        raise given.refuse("sends the gradients of sharded parameters by modules", "no bucket=")
    if given.plan.overlap == "none":
        if given.value == "flat":
            return Item()
        raise given.refuse("sends one message if it does not overlap", "bucket=flat, or overlap=backward")
    if isinstance(given.value, str) and given.value.endswith("x"):
        return Item({"--ddp-num-buckets": int(given.value[:-1])})
    if isinstance(given.value, str | tuple):
        raise given.refuse("counts the numbers of a bucket, or buckets", "a size such as bucket=25, or bucket=4x")
    return Item({"--ddp-bucket-size": max(1, round(given.value * 2**20 / NUMBER))})


def _overlap(given: Given) -> Item:
    if given.value == "priority":
        raise given.refuse("sends gradients during the backward, or after it", "overlap=backward, overlap=none")
    unshared = given.replicas * given.plan.context_parallel == 1
    return Item({} if given.value == "none" or unshared else {"--overlap-grad-reduce": True})


def _checkpoint(given: Given) -> Item:
    value = given.value
    if value == "selective":
        return Item({"--recompute-granularity": "selective"})
    if isinstance(value, int):
        settings = {"--recompute-granularity": "full", "--recompute-method": "uniform", "--recompute-num-layers": value}
        note = "Megatron-LM counts segments in blocks: embedding and head are not recomputed."
        return Item(settings, (note,))
    raise given.refuse(
        "recomputes segments of equal numbers of blocks", f"checkpoint={_near(given)}, checkpoint=selective"
    )


def _near(given: Given) -> int:
    """A number of layers near the square root of those of a stage."""
    layers = given.layers_of_stages()
    return max(1, round(max(layers) ** 0.5)) if layers else 1


def _zero(given: Given) -> Item:
    if given.value == 1:
        return Item({"--use-distributed-optimizer": True})
    sharded = "optim_grads" if given.value == 2 else "optim_grads_params"
    settings: dict[str, Any] = {
        "--use-distributed-optimizer": True,
        "--use-megatron-fsdp": True,
        "--data-parallel-sharding-strategy": sharded,
        "--ckpt-format": "fsdp_dtensor",
    }
    return Item(settings, ("Its FSDP needs CUDA_DEVICE_MAX_CONNECTIONS unset, or above 1.",))


def _prefetch(given: Given) -> Item:
    if given.plan.zero < 3:
        return Item()
    if given.value > 1:
        raise given.refuse("says only whether parameters come ahead, not how far", "prefetch=1, prefetch=0")
    if given.value == 1 and given.plan.overlap == "none" and given.replicas > 1:
        return Item({}, ("It gathers parameters ahead only together with overlap=backward.",))
    return Item({"--overlap-param-gather": True} if given.value and given.replicas > 1 else {})


def _precision(given: Given) -> Item:
    note = "With --bf16 gradients are added up in float32 there; --grad-reduce-in-bf16 sums them as minipar does."
    return Item({"--bf16": True}, (note,))


def _offload(given: Given) -> Item:
    if given.value != ("optimizer",):
        raise given.refuse("keeps parameters on the device, and activations of whole layers", "offload=optimizer")
    if given.plan.zero != 1:
        raise given.refuse("offloads its distributed optimizer", "zero=1 with offload=optimizer, or offload=none")
    return Item({"--optimizer-cpu-offload": True, "--use-precision-aware-optimizer": True})


RULES: dict[str, Rule] = {
    "dp": silent,  # (what is left of the ranks)
    "pp": setting("--pipeline-model-parallel-size"),
    "tp": setting("--tensor-model-parallel-size"),
    "sequence_parallel": _sequence_parallel,
    "context_parallel": setting("--context-parallel-size"),
    "ep": _experts,
    "schedule": _schedule,
    "microbatches": silent,  # (what is left of the batch)
    "accumulate": rounds,
    "split": _split,
    "chunks": silent,  # (see split)
    "group": setting("--microbatch-group-size-per-virtual-pipeline-stage"),
    "bucket": _bucket,
    "overlap": _overlap,
    "checkpoint": _checkpoint,
    "zero": _zero,
    "reduce": EACH_MICROBATCH,
    "prefetch": _prefetch,
    "clip": lambda given: Item({"--clip-grad": given.value or 0.0}),  # (its own default is 1)
    "precision": _precision,
    "offload": _offload,
    "offload_to": HOST_ONLY,
}
ALWAYS = ("split", "overlap", "prefetch", "clip")


def export(given: Given) -> Export:
    """The flags. Errors: PlanError for what they cannot say."""
    plan = given.plan
    found = translated(given, RULES, ALWAYS)
    settings: dict[str, Any] = {**_model(given), **found.settings}
    settings |= {"--micro-batch-size": given.rows, "--global-batch-size": given.batch}
    pairs = [[name] if value is True else [name, str(value)] for name, value in settings.items()]
    flags = [word for pair in pairs for word in pair]
    lines = [shlex.join(pair) for pair in pairs]
    one_queue = (
        plan.tp > 1 or plan.context_parallel > 1
    ) and plan.zero < 2  # (collectives start in the order of calls)
    launch = (
        *(("env", "CUDA_DEVICE_MAX_CONNECTIONS=1") if one_queue else ()),
        "torchrun", f"--nnodes={given.nodes}", f"--nproc-per-node={given.gpus}", "pretrain_gpt.py", "FLAGS",
    )  # fmt: skip
    yours = "Data, tokenizer, optimizer and number of steps are yours to add"
    yours += "." if given.model else ", and the sizes of the model."
    more = (
        "Of the model the flags have sizes, gates, norms and biases. Positions without parameters are said as rotary "
        "ones, since it has no ALiBi. Their base, windows of attention, and how experts are chosen are yours to add."
    )
    rotary = given.transformer is not None and not given.transformer.learned
    notes = (*found.notes, yours, more) if rotary else (*found.notes, yours)
    return Export(given.system, VERSION, flags, " \\\n".join(lines) + "\n", launch, notes)


def _model(given: Given) -> dict[str, Any]:
    """The sizes of a model."""
    model, numbers = given.transformer, given.model
    if numbers is None:
        return {}
    if model is None:
        raise PlanError(f"model {numbers}: {given.system} trains transformers; possible is a GPT such as gpt3-175b")
    dropout = getattr(numbers, "dropout", False)
    settings: dict[str, Any] = {
        "--num-layers": model.layers,
        "--hidden-size": model.hidden,
        "--ffn-hidden-size": model.dense_ffn or model.ffn,
        "--num-attention-heads": model.heads,
        "--seq-length": model.sequence,
        "--max-position-embeddings": model.sequence,
        "--vocab-size": model.vocabulary,
        "--attention-dropout": 0.1 if dropout is True else float(dropout),
        "--hidden-dropout": 0.1 if dropout is True else float(dropout),
    }
    said = {
        "--untie-embeddings-and-output-weights": not model.tied,
        "--swiglu": model.gated,
        "--disable-bias-linear": not model.bias,
        "--group-query-attention": model.kv_heads < model.heads,
        "--multi-latent-attention": bool(model.latent),
    }
    settings |= {name: True for name, there in said.items() if there}
    settings |= {"--normalization": "RMSNorm"} if model.rms else {}
    settings |= {} if model.learned else {"--position-embedding-type": "rope"}
    settings |= {"--num-query-groups": model.kv_heads} if model.kv_heads < model.heads else {}
    if model.latent:
        settings |= {"--q-lora-rank": model.query_latent} if model.query_latent else {}
        settings |= {
            "--kv-lora-rank": model.latent, "--qk-head-dim": model.head_dim - model.rope,
            "--qk-pos-emb-head-dim": model.rope, "--v-head-dim": model.value_dim,
        }  # fmt: skip
    elif model.head_dim * model.heads != model.hidden:
        settings["--kv-channels"] = model.head_dim
    if model.experts:
        settings |= {"--num-experts": model.experts, "--moe-router-topk": model.top, "--moe-ffn-hidden-size": model.ffn}
        settings |= {"--moe-shared-expert-intermediate-size": model.shared} if model.shared else {}
        capacity = numbers.capacity if isinstance(numbers, Mixture) else None
        settings |= {} if capacity is None else {"--moe-expert-capacity-factor": capacity}
        if model.dense:
            settings["--moe-layer-freq"] = f"([0]*{model.dense}+[1]*{model.layers - model.dense})"
    return settings
