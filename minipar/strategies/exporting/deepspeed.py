"""A plan as DeepSpeed's configuration, the JSON of `--deepspeed_config`.

DeepSpeed trains a model that is yours. What it takes as arguments in your code (stages of a pipeline, recomputation)
stands in the notes.

Source of the names and of what goes together: DeepSpeed's own runtime/config.py, zero/config.py and pipe/engine.py.
"""

from __future__ import annotations

import json
from typing import Any

from minipar.strategies.exporting.rules import (
    EACH_MICROBATCH,
    Export,
    Given,
    Item,
    Rule,
    only_default,
    rounds,
    silent,
    translated,
)

VERSION = "deepspeed 0.19.8"


def _pipeline(given: Given) -> Item:
    note = (
        f"The code has to make the pipeline: deepspeed.pipe.PipelineModule(layers, num_stages={given.value}, "
        "partition_method='uniform')."
    )
    return Item({"pipeline": {"stages": given.value, "partition": "uniform"}}, (note,))


def _tensor(given: Given) -> Item:
    if given.plan.pp > 1:
        raise given.refuse("divides operators only without a pipeline", "tp=1, or pp=1")
    return Item(
        {"tensor_parallel": {"autotp_size": given.value}},
        ("AutoTP divides the operators whose names it knows, such as those of transformers.",),
    )


def _context_parallel(given: Given) -> Item:
    if given.plan.pp > 1:
        raise given.refuse("divides sequences only without a pipeline", "context_parallel=1, or pp=1")
    heads = given.transformer.heads if given.transformer is not None else 0
    if heads % given.value:
        divisors = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise given.refuse(f"exchanges tokens for heads, of which there are {heads}", f"one of {divisors}")
    note = (
        f"The code has to make the groups of {given.value} ranks that share sequences, and to wrap attention "
        "(deepspeed.sequence: Ulysses)."
    )
    return Item({"sequence_parallel_size": given.value}, (note,))


def _experts(given: Given) -> Item:
    if given.plan.pp > 1:
        raise given.refuse("shares experts only without a pipeline", "ep=1, or pp=1")
    note = (
        f"DeepSpeed counts ranks of ep as replicas: {given.replicas} together. AutoEP knows some models by name; a "
        f"model of your own uses deepspeed.moe.layer.MoE(..., ep_size={given.value})."
    )
    return Item({"expert_parallel": {"enabled": True, "autoep_size": given.value}}, (note,))


def _bucket(given: Given) -> Item:
    plan = given.plan
    if plan.zero == 0:
        raise given.refuse("has no such setting without ZeRO", "no bucket=, or zero=1")
    if isinstance(given.value, str | tuple):
        raise given.refuse("counts the numbers of a bucket", "a size such as bucket=25")
    size = max(1, round(given.value * 2**20 / (2 if plan.precision == "bf16" else 4)))
    return Item({"zero_optimization": {"reduce_bucket_size": size}})


def _overlap(given: Given) -> Item:
    plan = given.plan
    if given.value == "priority":
        raise given.refuse("sends gradients during the backward, or after it", "overlap=backward, overlap=none")
    if plan.zero == 0 or plan.pp > 1:  # (backward is the default, and changes only the time)
        overlapped = given.value == "backward" and given.replicas > 1
        note = "It sums gradients after the backward: without ZeRO, and in a pipeline, it does not overlap them."
        return Item({}, (note,) if overlapped else ())
    return Item({"zero_optimization": {"overlap_comm": given.value == "backward"}})


def _compress(given: Given) -> Item:
    if given.value not in ("bf16", "fp16"):
        raise given.refuse("sends whole gradients, in shorter numbers at most", "compress=bf16, compress=fp16")
    return Item({"communication_data_type": given.value})


def _checkpoint(given: Given) -> Item:
    value, pipeline = given.value, given.plan.pp > 1
    if isinstance(value, int) and pipeline:
        note = f"The code has to give PipelineModule activation_checkpoint_interval={value}."
        return Item({"pipeline": {"activation_checkpoint_interval": value}}, (note,))
    if value == 1:
        return Item({}, ("The code has to run each layer by deepspeed.checkpointing.checkpoint.",))
    nearest = "a number of layers such as checkpoint=1" if pipeline else "checkpoint=1"
    raise given.refuse("recomputes equal segments of a pipeline, or each layer by itself", nearest)


def _zero(given: Given) -> Item:
    if given.value > 1 and given.plan.pp > 1:
        raise given.refuse("has only ZeRO-1 in a pipeline", "zero=1, or pp=1")
    return Item({"zero_optimization": {"stage": given.value}})


def _prefetch(given: Given) -> Item:
    """The numbers of so many blocks. Only a model's sizes say how many these are."""
    plan = given.plan
    if plan.zero < 3:
        return Item()
    if given.value == 0:
        return Item({"zero_optimization": {"stage3_prefetch_bucket_size": 0}})
    if given.transformer is not None:
        numbers = given.transformer.block_parameters * given.value
        return Item({"zero_optimization": {"stage3_prefetch_bucket_size": numbers}})
    if given.is_default:
        return Item(
            {}, ("Parameters come ahead by 50 million numbers, its default; model= says how many a layer has.",)
        )
    raise given.refuse("counts the numbers that come ahead, not layers", "prefetch=1, prefetch=0, or model=")


def _offload(given: Given) -> Item:
    plan, wanted = given.plan, set(given.value)
    if "activations" in wanted:
        raise given.refuse("keeps activations on the device, but for inputs of recomputed layers", "checkpoint=1")
    if plan.zero == 0 or (plan.zero < 3 and "parameters" in wanted):
        least = 3 if "parameters" in wanted else 1
        raise given.refuse("offloads what ZeRO shares out", f"zero={least} with offload={','.join(given.value)}")
    device: dict[str, Any] = {"device": "cpu"}
    if plan.offload_to == "disk":
        if not plan.offload_folder:
            raise given.refuse("needs a folder on the disk", "offload_folder=, or offload_to=host")
        device = {"device": "nvme", "nvme_path": plan.offload_folder}
    kinds = {"optimizer": "offload_optimizer", "parameters": "offload_param"}
    return Item({"zero_optimization": {kinds[kind]: device for kind in given.value}})


RULES: dict[str, Rule] = {
    "dp": silent,  # (what is left of the ranks)
    "pp": _pipeline,
    "tp": _tensor,
    "sequence_parallel": only_default("has the whole sequence between divided operators", "sequence_parallel=false"),
    "context_parallel": _context_parallel,
    "ep": _experts,
    "schedule": only_default("runs 1F1B", "schedule=1f1b"),
    "microbatches": silent,  # (gradient_accumulation_steps, in a pipeline, too)
    "accumulate": rounds,
    "split": only_default("divides layers evenly, by parameters or by their type", "split=even"),
    "bucket": _bucket,
    "overlap": _overlap,
    "compress": _compress,
    "checkpoint": _checkpoint,
    "zero": _zero,
    "reduce": EACH_MICROBATCH,
    "prefetch": _prefetch,
    "clip": lambda given: Item({"gradient_clipping": given.value or 0.0}),  # (its own default is 1)
    "precision": lambda given: Item({"bf16": {"enabled": True}}),
    "offload": _offload,
    "offload_to": silent,  # (see offload)
    "offload_folder": silent,
}
ALWAYS = ("overlap", "prefetch", "clip")


def export(given: Given) -> Export:
    """The configuration. Errors: PlanError for what it cannot say."""
    found = translated(given, RULES, ALWAYS)
    values: dict[str, Any] = {
        "train_batch_size": given.batch,
        "train_micro_batch_size_per_gpu": given.rows,
        "gradient_accumulation_steps": given.plan.total_microbatches,
        **found.settings,
    }
    launch = (
        "deepspeed", f"--num_nodes={given.nodes}", f"--num_gpus={given.gpus}", "TRAIN.py",
        "--deepspeed", "--deepspeed_config", "FILE.json",
    )  # fmt: skip
    yours = "Model, data and optimizer are yours: the code gives them to deepspeed.initialize."
    return Export(given.system, VERSION, values, json.dumps(values, indent=2) + "\n", launch, (*found.notes, yours))
