"""A plan as torchtitan's configuration, the TOML of `--job.config_file`.

Source of the names and of what goes together: torchtitan's own config/job_config.py, distributed/ and models/llama3/,
and the schedules of torch.distributed.pipelining, which it runs.
"""

from __future__ import annotations

import json
import math
from typing import Any

from minipar.errors import PlanError
from minipar.strategies.exporting.rules import HOST_ONLY, Export, Given, Item, Rule, sequence_of_tp, silent, translated

VERSION = "torchtitan 0.2.2"
SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "looped-bfs": "LoopedBFS",
    "zb-v": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}


def _parallel(**settings: Any) -> Item:
    return Item({"parallelism": settings})


def _replicas(given: Given) -> Item:
    """Replicas with whole parameters are DDP, others FSDP. Without ZeRO there is nothing else on the mesh."""
    plan = given.plan
    if plan.zero == 1:  # (the rule of zero refuses it)
        return Item()
    if plan.zero >= 2:
        sharded = {"fsdp_reshard_after_forward": "always" if plan.zero == 3 else "never"}
        return _parallel(data_parallel_replicate_degree=1, data_parallel_shard_degree=given.replicas, **sharded)
    if plan.dp > 1 and plan.pp * plan.tp > 1:
        raise given.refuse("has replicas of whole parameters only without pp and tp", "zero=2 or zero=3, or dp=1")
    return _parallel(data_parallel_replicate_degree=plan.dp, data_parallel_shard_degree=1)


def _tensor(given: Given) -> Item:
    if not given.plan.sequence_parallel:
        raise given.refuse("divides the sequence between divided operators", f"tp={given.value} sequence_parallel=true")
    return _parallel(tensor_parallel_degree=given.value)


def _shares(name: str, what: str) -> Rule:
    """The rule of ranks that share sequences or experts, over which FSDP shards, too."""

    def rule(given: Given) -> Item:
        if given.plan.zero < 2:
            raise given.refuse(f"shards all parameters over {what}, too", "zero=2 or zero=3 with it")
        note = f"Parameters are sharded over {what}, too, not only over replicas."
        return Item({"parallelism": {name: given.value}}, (note,))

    return rule


def _schedule(given: Given) -> Item:
    plan = given.plan
    if given.value not in SCHEDULES:
        raise given.refuse("has no such order", f"one of {', '.join(SCHEDULES)}")
    if plan.pp == 1:
        if given.value != "1f1b":
            raise given.refuse("orders micro-batches only in a pipeline", "schedule=1f1b, or pp=2")
        return Item()
    return _parallel(pipeline_parallel_schedule=SCHEDULES[given.value], pipeline_parallel_microbatch_size=given.rows)


def _group(given: Given) -> Item:
    """torch takes m // (m // p) micro-batches through a chunk before the next."""
    plan = given.plan
    if plan.schedule != "interleaved" or plan.pp == 1:
        return Item()
    turns = max(1, plan.microbatches // plan.pp)
    if plan.microbatches % turns:
        possible = f"microbatches={plan.microbatches // plan.pp * plan.pp} without group="
        raise given.refuse(
            f"takes {plan.microbatches} micro-batches with pp={plan.pp} in {turns} equal groups", possible
        )
    group = plan.microbatches // turns
    if (given.value or plan.pp) != group:
        raise given.refuse(
            f"takes {plan.microbatches} micro-batches with pp={plan.pp} in groups of {group}", f"group={group}"
        )
    return Item()


def _split(given: Given) -> Item:
    """Its own division is even, with embedding and head as one layer each, as here. Others are lists of modules."""
    plan = given.plan
    if plan.pp == 1 or plan.place is not None:
        return Item()
    if given.value == "auto":
        raise given.refuse(
            "has no profile to cut layers by", "layers of each stage such as split=7,7,6,6, or split=even"
        )
    chunks = len(plan.placement()[0])
    own = 1 if plan.schedule in ("gpipe", "1f1b") else 2
    if given.value is None and chunks == own:
        return Item()
    layers = given.layers_of_stages()
    if layers is None:
        raise PlanError(
            f"chunks={plan.chunks}: {given.system} needs the modules of each stage; possible are split= with the "
            f"layers of each, model=, or chunks={own}"
        )
    names = ["tok_embeddings", *(f"layers.{l}" for l in range(sum(layers) - 2)), "norm"]
    parts: list[list[str]] = []
    for count in layers:
        parts.append(names[:count])
        names = names[count:]
    parts[-1].append("output")
    return _parallel(module_fqns_per_model_part=parts)


def _overlap(given: Given) -> Item:
    if given.value == "priority":
        raise given.refuse("sends gradients during the backward", "overlap=backward")
    if given.value == "none" and given.replicas > 1:
        raise given.refuse("always overlaps gradients with the backward", "overlap=backward")
    return Item()


def _checkpoint(given: Given) -> Item:
    mode = {"none": "none", 1: "full", "operators": "selective"}.get(given.value)
    if mode is None:
        raise given.refuse("recomputes blocks, or operators", "checkpoint=1, checkpoint=operators, checkpoint=none")
    more = {"selective_ac_option": "op"} if mode == "selective" else {}
    return Item({"activation_checkpoint": {"mode": mode, **more}})


def _zero(given: Given) -> Item:
    if given.value == 1:
        raise given.refuse("shards gradients together with the optimizer's state", "zero=2")
    note = "FSDP shards parameters from the end of a backward to the next forward, which gathers them once."
    return Item({}, (note,) if given.value == 2 else ())


def _reduce(given: Given) -> Item:
    """In a pipeline torch sums sharded gradients after the last micro-batch, without one after each."""
    plan = given.plan
    if plan.zero < 2:
        return Item()
    if given.value == "step" and plan.pp == 1:
        raise given.refuse("sums sharded gradients after each micro-batch", "reduce=microbatch")
    if given.value == "microbatch" and plan.pp > 1:
        return Item({}, ("In a pipeline gradients are summed once a step, as with reduce=step.",))
    return Item()


def _prefetch(given: Given) -> Item:
    if given.plan.zero == 3:
        raise given.refuse("gathers the parameters of one block ahead", "prefetch=1")
    return Item()


def _precision(given: Given) -> Item:
    plan = given.plan
    if given.value == "float32":
        return Item({"training": {"mixed_precision_param": "float32"}})
    if plan.zero < 2 and plan.pp * plan.tp > 1:
        raise given.refuse("mixes precisions by FSDP, or without pp and tp", "zero=2, zero=3, or precision=float32")
    return Item({"training": {"mixed_precision_param": "bfloat16"}}, ("Gradients are summed in float32 there.",))


def _offload(given: Given) -> Item:
    if set(given.value) != {"optimizer", "parameters"} or given.plan.zero < 3:
        raise given.refuse("offloads what FSDP shards, all of it", "offload=optimizer,parameters with zero=3")
    return Item({"training": {"enable_cpu_offload": True}})


RULES: dict[str, Rule] = {
    "dp": _replicas,
    "pp": lambda given: _parallel(pipeline_parallel_degree=given.value),
    "tp": _tensor,
    "sequence_parallel": sequence_of_tp,
    "context_parallel": _shares("context_parallel_degree", "ranks that share sequences"),
    "ep": _shares("expert_parallel_degree", "ranks that share experts"),
    "schedule": _schedule,
    "microbatches": silent,  # (local_batch_size)
    "accumulate": silent,  # (global_batch_size)
    "split": _split,
    "chunks": silent,  # (see split)
    "group": _group,
    "overlap": _overlap,
    "checkpoint": _checkpoint,
    "zero": _zero,
    "reduce": _reduce,
    "prefetch": _prefetch,
    "clip": lambda given: Item({"training": {"max_norm": given.value or math.inf}}),  # (its own default is 1)
    "precision": _precision,
    "offload": _offload,
    "offload_to": HOST_ONLY,
}
ALWAYS = ("dp", "schedule", "split", "group", "checkpoint", "reduce", "precision", "clip")


def export(given: Given) -> Export:
    """The configuration. Errors: PlanError for what it cannot say."""
    plan = given.plan
    found = translated(given, RULES, ALWAYS)
    local = given.rows * (plan.microbatches if plan.pp > 1 else 1)  # (without a pipeline it takes one after another)
    training: dict[str, Any] = {"local_batch_size": local, "global_batch_size": given.batch}
    if given.transformer is not None:
        training["seq_len"] = given.transformer.sequence
    values = {**found.settings, "training": training | dict(found.settings.get("training", {}))}
    values = {name: values[name] for name in sorted(values)}
    notes = (*found.notes, "Model, data and optimizer are yours to add: [model] has name and flavor.")
    launch = (
        "torchrun", f"--nnodes={given.nodes}", f"--nproc-per-node={given.gpus}", "-m", "torchtitan.train",
        "--job.config_file", "FILE.toml",
    )  # fmt: skip
    return Export(given.system, VERSION, values, _toml(values, notes), launch, notes)


def _toml(values: dict[str, Any], notes: tuple[str, ...]) -> str:
    lines = [f"# {note}" for note in notes]
    for section, settings in values.items():
        lines += ["", f"[{section}]"]
        lines += [f"{name} = {'inf' if value == math.inf else json.dumps(value)}" for name, value in settings.items()]
    return "\n".join(lines) + "\n"
