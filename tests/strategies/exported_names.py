"""Names and types of the settings of other systems that exports use, as their own parsers had them in these versions.

`tests/strategies/test_exporting.py` holds every export to these tables, and these tables to the systems themselves
where they are installed.
"""

from __future__ import annotations

from typing import Any

MEGATRON_VERSION = "megatron-core 0.19.2"
# A flag: the type of its value; True for a flag without a value; or the possible words.
MEGATRON: dict[str, Any] = {
    "--num-layers": int,
    "--hidden-size": int,
    "--ffn-hidden-size": int,
    "--num-attention-heads": int,
    "--seq-length": int,
    "--max-position-embeddings": int,
    "--vocab-size": int,
    "--attention-dropout": float,
    "--hidden-dropout": float,
    "--untie-embeddings-and-output-weights": True,
    "--swiglu": True,
    "--disable-bias-linear": True,
    "--normalization": ("LayerNorm", "RMSNorm"),
    "--position-embedding-type": ("learned_absolute", "rope"),
    "--group-query-attention": True,
    "--num-query-groups": int,
    "--kv-channels": int,
    "--multi-latent-attention": True,
    "--q-lora-rank": int,
    "--kv-lora-rank": int,
    "--qk-head-dim": int,
    "--qk-pos-emb-head-dim": int,
    "--v-head-dim": int,
    "--num-experts": int,
    "--moe-ffn-hidden-size": int,
    "--moe-shared-expert-intermediate-size": int,
    "--moe-layer-freq": str,  # (its parser has a function of its own for lists)
    "--moe-router-topk": int,
    "--moe-expert-capacity-factor": float,
    "--pipeline-model-parallel-size": int,
    "--tensor-model-parallel-size": int,
    "--context-parallel-size": int,
    "--expert-model-parallel-size": int,
    "--sequence-parallel": True,
    "--pipeline-model-parallel-layout": str,
    "--num-virtual-stages-per-pipeline-rank": int,
    "--microbatch-group-size-per-virtual-pipeline-stage": int,
    "--micro-batch-size": int,
    "--global-batch-size": int,
    "--recompute-granularity": ("full", "selective"),
    "--recompute-method": ("uniform", "block"),
    "--recompute-num-layers": int,
    "--use-distributed-optimizer": True,
    "--use-megatron-fsdp": True,
    "--data-parallel-sharding-strategy": ("no_shard", "optim", "optim_grads", "optim_grads_params"),
    "--ckpt-format": ("torch", "torch_dist", "torch_dcp", "fsdp_dtensor"),
    "--overlap-grad-reduce": True,
    "--overlap-param-gather": True,
    "--ddp-bucket-size": int,
    "--ddp-num-buckets": int,
    "--clip-grad": float,
    "--bf16": True,
    "--optimizer-cpu-offload": True,
    "--use-precision-aware-optimizer": True,
}

DEEPSPEED_VERSION = "deepspeed 0.19.8"
_OFFLOAD = {"device": ("none", "cpu", "nvme"), "nvme_path": str}
DEEPSPEED: dict[str, Any] = {
    "train_batch_size": int,
    "train_micro_batch_size_per_gpu": int,
    "gradient_accumulation_steps": int,
    "gradient_clipping": float,
    "communication_data_type": ("fp16", "bf16", "fp32"),
    "sequence_parallel_size": int,
    "bf16": {"enabled": bool},
    "pipeline": {"stages": int, "partition": str, "activation_checkpoint_interval": int},
    "tensor_parallel": {"autotp_size": int},
    "expert_parallel": {"enabled": bool, "autoep_size": int},
    "zero_optimization": {
        "stage": int,
        "overlap_comm": bool,
        "reduce_bucket_size": int,
        "stage3_prefetch_bucket_size": int,
        "offload_optimizer": _OFFLOAD,
        "offload_param": _OFFLOAD,
    },
}

TORCHTITAN_VERSION = "torchtitan 0.2.2"
TORCHTITAN: dict[str, Any] = {
    "activation_checkpoint": {"mode": ("selective", "full", "memory_budget", "none"), "selective_ac_option": str},
    "parallelism": {
        "data_parallel_replicate_degree": int,
        "data_parallel_shard_degree": int,
        "fsdp_reshard_after_forward": ("default", "always", "never"),
        "tensor_parallel_degree": int,
        "pipeline_parallel_degree": int,
        "module_fqns_per_model_part": list,
        "pipeline_parallel_schedule": str,
        "pipeline_parallel_microbatch_size": int,
        "context_parallel_degree": int,
        "expert_parallel_degree": int,
    },
    "training": {
        "local_batch_size": int,
        "global_batch_size": int,
        "seq_len": int,
        "max_norm": float,
        "enable_cpu_offload": bool,
        "mixed_precision_param": ("bfloat16", "float32"),
    },
}


def check_flags(flags: list[str]) -> dict[str, Any]:
    """The values of Megatron-LM's flags. AssertionError for a flag or a value that it does not know."""
    found: dict[str, Any] = {}
    words = list(flags)
    while words:
        name = words.pop(0)
        kind = MEGATRON[name]
        if kind is True:
            found[name] = True
            continue
        value = words.pop(0)
        assert not isinstance(kind, tuple) or value in kind, name
        found[name] = value if isinstance(kind, tuple) else kind(value)
        assert name not in words, f"{name} is there twice"
    return found


def check_table(values: dict[str, Any], known: dict[str, Any]) -> None:
    """AssertionError for a setting, or a value, that a system does not know."""
    for name, value in values.items():
        kind = known[name]
        if isinstance(kind, dict):
            check_table(value, kind)
        elif isinstance(kind, tuple):
            assert value in kind, name
        else:
            assert type(value) is kind, name
