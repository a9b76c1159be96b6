"""Plans as flags and configuration of other systems: what they say, what is refused, and what the systems' own parsers
read.

The parsers are tried where they are installed. The names and types that they had stand in `exported_names.py`, so that
these are checked always.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import shlex
from dataclasses import fields
from itertools import pairwise

import pytest

from minipar import Backward, BackwardInput, BackwardWeight, Forward, Plan, PlanError
from minipar.models.table import GPT, Mixture
from minipar.program.shape import uniform
from minipar.strategies import exporting, plan_file
from minipar.strategies.exporting import deepspeed, megatron, torchtitan
from minipar.strategies.exporting.rules import NOTHING_LIKE_IT, Export
from tests.strategies import exported_names as names
from tests.strategies.test_exclusions import OTHER

SMALL = GPT(layers=10, width=64, heads=4, context=32, vocab=128)
MEGATRON = [
    "",
    "dp=4",
    "dp=4 overlap=none bucket=flat",
    "dp=4 bucket=16 zero=1 clip=0.5 precision=bf16",
    "dp=2 bucket=4x",
    "tp=2 pp=2 dp=2 microbatches=4 sequence_parallel=true checkpoint=1 zero=1",
    "pp=4 microbatches=8 split=4,3,3,2",
    "pp=3 microbatches=6 checkpoint=selective",
    "pp=4 schedule=interleaved microbatches=8 group=8 checkpoint=2",
    "pp=2 schedule=interleaved chunks=3 microbatches=4 dp=2",
    "context_parallel=2 dp=2 accumulate=3",
    "dp=2 zero=1 offload=optimizer",
    "dp=4 zero=2",
    "dp=4 zero=3 precision=bf16 checkpoint=1",
    "dp=4 zero=3 overlap=none prefetch=0",
]
DEEPSPEED = [
    "",
    "dp=4 microbatches=2 accumulate=3 clip=1",
    "dp=4 compress=bf16 overlap=none",
    "dp=2 pp=4 microbatches=8 zero=1 checkpoint=2",
    "dp=4 zero=1 bucket=16 overlap=none",
    "dp=4 zero=2 precision=bf16 bucket=16 offload=optimizer",
    "dp=4 zero=3 checkpoint=1 offload=optimizer,parameters prefetch=2",
    "dp=4 zero=3 offload=parameters offload_to=disk offload_folder=/nvme",
    "dp=2 tp=2 zero=1",
    "dp=2 context_parallel=2 zero=3",
    "dp=2 ep=2",
]
TORCHTITAN = [
    "",
    "dp=4 microbatches=2 accumulate=3 clip=1 precision=bf16",
    "dp=4 zero=2 checkpoint=1",
    "dp=4 zero=3 precision=bf16 offload=optimizer,parameters",
    "dp=2 pp=2 tp=2 sequence_parallel=true zero=3 microbatches=4 accumulate=2 reduce=step",
    "pp=4 microbatches=8 split=4,3,3,2",
    "pp=2 microbatches=4 schedule=gpipe",
    "pp=4 microbatches=8 schedule=interleaved",
    "pp=4 microbatches=6 schedule=interleaved group=6",
    "pp=2 microbatches=4 schedule=interleaved chunks=3",
    "pp=2 microbatches=4 schedule=looped-bfs",
    "pp=2 microbatches=4 schedule=zb-v",
    "pp=2 microbatches=4 schedule=dualpipe-v",
    "context_parallel=2 dp=2 zero=3",
    "dp=2 ep=2 zero=2",
]
SYSTEMS = {"megatron": MEGATRON, "deepspeed": DEEPSPEED, "torchtitan": TORCHTITAN}
ALL = [(system, words) for system, some in SYSTEMS.items() for words in some]


def sizes(plan: Plan) -> dict:
    """A model and a batch that fit the plan."""
    model = Mixture(layers=10) if plan.ep > 1 else SMALL
    return {"model": model, "batch": 2 * plan.dp * plan.ep * plan.total_microbatches}


@pytest.mark.parametrize("sized", [False, True])
@pytest.mark.parametrize(("system", "words"), ALL)
def test_an_export_has_only_what_the_system_knows(system, words, sized):
    plan = Plan.parse(words)
    if not sized and (plan.chunks == 3 or plan.prefetch == 2) and system != "megatron":
        with pytest.raises(PlanError, match="model="):
            plan.export(system)
        return
    found = plan.export(system, **(sizes(plan) if sized else {}))
    rows = 2 if sized else 1
    shares = plan.dp * plan.ep
    if system == "megatron":
        said = names.check_flags(found.values)
        assert shlex.split(found.text.replace("\\\n", " ")) == found.values
        assert said["--micro-batch-size"] == rows
        assert said["--global-batch-size"] == rows * shares * plan.total_microbatches
        assert said.get("--tensor-model-parallel-size", 1) == plan.tp
        assert said.get("--num-layers", 10) == 10
    elif system == "deepspeed":
        names.check_table(found.values, names.DEEPSPEED)
        assert json.loads(found.text) == found.values
        batch = found.values["train_micro_batch_size_per_gpu"] * found.values["gradient_accumulation_steps"]
        assert batch * shares == found.values["train_batch_size"] == rows * shares * plan.total_microbatches
    else:
        names.check_table(found.values, names.TORCHTITAN)
        assert plan_file.tomllib.loads(found.text) == found.values
        training, parallel = found.values["training"], found.values["parallelism"]
        ranks = math.prod(parallel.get(f"{axis}_degree", 1) for axis in (
            "data_parallel_replicate", "data_parallel_shard", "tensor_parallel", "pipeline_parallel",
            "context_parallel"))  # fmt: skip
        assert ranks == plan.ranks
        rounds = training["global_batch_size"] / (training["local_batch_size"] * shares)
        assert rounds == (plan.accumulate if plan.pp > 1 else plan.total_microbatches)
    assert str(found) == found.text
    assert found.version in (names.MEGATRON_VERSION, names.DEEPSPEED_VERSION, names.TORCHTITAN_VERSION)


def flags(words: str, **more) -> dict:
    return names.check_flags(Plan.parse(words).export("megatron", **more).values)


def test_flags_of_megatron():
    said = flags("tp=8 pp=4 dp=2 microbatches=16 sequence_parallel=true zero=1 precision=bf16 clip=1 checkpoint=1",
                 model="gpt3-175b", batch=64)  # fmt: skip
    assert said == {
        "--num-layers": 96, "--hidden-size": 12288, "--ffn-hidden-size": 49152, "--num-attention-heads": 96,
        "--seq-length": 2048, "--max-position-embeddings": 2048, "--vocab-size": 50257, "--attention-dropout": 0.1,
        "--hidden-dropout": 0.1, "--pipeline-model-parallel-size": 4, "--tensor-model-parallel-size": 8,
        "--sequence-parallel": True, "--pipeline-model-parallel-layout": "Et*24|t*25|t*24|t*23L",
        "--overlap-grad-reduce": True, "--recompute-granularity": "full", "--recompute-method": "uniform",
        "--recompute-num-layers": 1, "--use-distributed-optimizer": True, "--clip-grad": 1.0, "--bf16": True,
        "--micro-batch-size": 2, "--global-batch-size": 64,
    }  # fmt: skip
    assert flags("dp=2 bucket=16")["--ddp-bucket-size"] == 4 * 2**20  # 16 MiB of float32
    assert flags("")["--clip-grad"] == 0  # its own default is 1, a plan's is no clipping
    moe = flags("ep=2", model="gpt-moe-tiny")
    assert (moe["--expert-model-parallel-size"], moe["--num-experts"], moe["--moe-router-topk"]) == (2, 8, 2)
    assert flags("pp=2", model="gpt-tiny")["--pipeline-model-parallel-layout"] == "Et*2|t*2L"
    assert "--untie-embeddings-and-output-weights" in flags("", model="gpt-tiny")
    assert flags("pp=2 schedule=interleaved microbatches=2")["--num-virtual-stages-per-pipeline-rank"] == 2
    assert Plan(tp=2).export("megatron", nodes=1).launch[:2] == ("env", "CUDA_DEVICE_MAX_CONNECTIONS=1")


def test_models_of_others_have_their_sizes(tmp_path):
    said = flags("tp=8", model="llama3-8b")
    assert (said["--num-query-groups"], said["--ffn-hidden-size"], said["--normalization"]) == (8, 14336, "RMSNorm")
    assert {"--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights"} <= said.keys()
    deepseek = flags("ep=8", model="deepseek-v3")
    assert (deepseek["--qk-head-dim"], deepseek["--qk-pos-emb-head-dim"], deepseek["--v-head-dim"]) == (128, 64, 128)
    assert deepseek["--moe-layer-freq"] == "([0]*3+[1]*58)"
    assert (deepseek["--ffn-hidden-size"], deepseek["--moe-ffn-hidden-size"]) == (18432, 2048)
    file = tmp_path / "config.json"
    file.write_text(
        '{"model_type": "qwen3", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 32, '
        '"vocab_size": 96, "max_position_embeddings": 128, "intermediate_size": 192, "tie_word_embeddings": true}'
    )
    own = flags("pp=2", model=str(file))
    assert (own["--pipeline-model-parallel-layout"], own["--kv-channels"]) == ("Et*2|t*2L", 32)
    assert "--untie-embeddings-and-output-weights" not in own
    plan = Plan.parse("dp=2 zero=3 prefetch=1")
    titan = plan.export("torchtitan", str(file))
    assert titan.values["training"]["seq_len"] == 128
    ahead = plan.export("deepspeed", str(file)).values["zero_optimization"]["stage3_prefetch_bucket_size"]
    assert (
        ahead == 64 * (2 * 128 + 2 * 128) + 3 * 64 * 192 + 2 * 64
    )  # queries, keys and values and output, SwiGLU, norms


def test_configuration_of_deepspeed():
    plan = Plan.parse("dp=4 zero=3 precision=bf16 bucket=16 offload=optimizer clip=1 prefetch=2 microbatches=2")
    found = plan.export("deepspeed", "gpt2-small", batch=64)
    assert found.values == {
        "train_batch_size": 64, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2,
        "zero_optimization": {
            "stage": 3, "overlap_comm": True, "reduce_bucket_size": 8 * 2**20,
            "stage3_prefetch_bucket_size": 2 * 7_087_872, "offload_optimizer": {"device": "cpu"},
        },
        "gradient_clipping": 1.0, "bf16": {"enabled": True},
    }  # fmt: skip
    pipeline = Plan.parse("pp=4 dp=2 microbatches=8 checkpoint=2").export("deepspeed", nodes=2)
    assert pipeline.values["pipeline"] == {"stages": 4, "partition": "uniform", "activation_checkpoint_interval": 2}
    assert any("num_stages=4" in note for note in pipeline.notes)
    assert any("activation_checkpoint_interval=2" in note for note in pipeline.notes)
    assert pipeline.launch[:3] == ("deepspeed", "--num_nodes=2", "--num_gpus=4")


def test_recomputation_by_operator_is_torchtitans():
    plan = Plan.parse("dp=2 zero=3 checkpoint=operators")
    found = plan.export("torchtitan", batch=4)
    assert found.values["activation_checkpoint"] == {"mode": "selective", "selective_ac_option": "op"}
    with pytest.raises(PlanError, match="checkpoint=operators: Megatron-LM"):
        plan.export("megatron", batch=4)
    with pytest.raises(PlanError, match="checkpoint=operators: .* not run; possible are selective or 1"):
        plan.compile(layers=4)


def test_configuration_of_torchtitan():
    plan = Plan.parse("dp=2 pp=2 tp=2 sequence_parallel=true zero=3 microbatches=4 accumulate=2 split=3,2 clip=0.5")
    found = plan.export("torchtitan", batch=32)
    assert found.values == {
        "activation_checkpoint": {"mode": "none"},
        "parallelism": {
            "data_parallel_replicate_degree": 1, "data_parallel_shard_degree": 2,
            "fsdp_reshard_after_forward": "always", "pipeline_parallel_degree": 2, "tensor_parallel_degree": 2,
            "pipeline_parallel_schedule": "1F1B", "pipeline_parallel_microbatch_size": 2,
            "module_fqns_per_model_part": [["tok_embeddings", "layers.0", "layers.1"], ["layers.2", "norm", "output"]],
        },
        "training": {
            "local_batch_size": 8, "global_batch_size": 32, "max_norm": 0.5, "mixed_precision_param": "float32",
        },
    }  # fmt: skip
    assert Plan().export("torchtitan", "gpt2-small").values["training"]["seq_len"] == 1024


@pytest.mark.parametrize(
    ("system", "words", "says"),
    [
        (
            "megatron",
            "pp=2 schedule=zb-h1 microbatches=4",
            (
                "schedule=zb-h1: Megatron-LM runs 1F1B, plain or interleaved; possible is schedule=1f1b, "
                "schedule=interleaved"
            ),
        ),
        (
            "megatron",
            "dp=2 overlap=priority",
            "overlap=priority: Megatron-LM sends gradients during the backward",
        ),
        (
            "deepspeed",
            "pp=2 split=5,7",
            "split=5,7: DeepSpeed divides layers evenly, by parameters or by their type",
        ),
        (
            "torchtitan",
            "dp=2 pp=2",
            "dp=2: torchtitan has replicas of whole parameters only without pp and tp; possible",
        ),
        (
            "torchtitan",
            "dp=2 bucket=10",
            "bucket=10: torchtitan has nothing like it; possible is no bucket=",
        ),
    ],
)
def test_what_a_system_cannot_express_is_refused(system, words, says):
    with pytest.raises(PlanError) as caught:
        Plan.parse(words).export(system, SMALL)
    assert caught.value.reason.startswith(says)
    assert "possible" in caught.value.reason or "sums to" in caught.value.reason


def test_a_script_for_torchrun():
    plan = Plan.parse("dp=2 pp=2 microbatches=2")
    found = plan.export("torchrun", "gpt-tiny", batch=16, nodes=2)
    assert " ".join(found.launch) in found.text
    assert found.launch[-2:] == ("--nproc-per-node=2", "train.py")
    call = next(one for one in ast.walk(ast.parse(found.text)) if getattr(one, "func", None) and one.args[2:])
    assert Plan.parse(ast.literal_eval(call.args[2])) == plan
    assert "HOST" not in plan.export("torchrun", "gpt-tiny").text
    with pytest.raises(PlanError, match="model=None: the script builds it; possible are .*gpt-tiny"):
        plan.export("torchrun")


def test_all_refusals_are_told_at_once():
    with pytest.raises(PlanError) as caught:
        Plan.parse("pp=2 schedule=zb-h1 microbatches=4 checkpoint=sqrt clip=1").export("megatron")
    assert caught.value.reason.startswith("schedule=zb-h1")
    assert caught.value.details.startswith("checkpoint=sqrt")


def outcome(plan: Plan, system: str) -> tuple[Export | None, str]:
    """The export of a plan, or why there is none."""
    try:
        return plan.export(system, SMALL), ""
    except PlanError as error:
        return None, str(error)


@pytest.mark.parametrize("system", exporting.systems())
def test_no_key_is_passed_over(system):
    """Every value of every key changes the export, or is refused, or told in a note."""
    default = {"megatron": megatron, "deepspeed": deepspeed, "torchtitan": torchtitan}[system].RULES
    assert set(default) | set(NOTHING_LIKE_IT) <= {field.name for field in fields(Plan)}
    bases = ["dp=2", "dp=2 zero=3", "dp=2 zero=1 offload=optimizer", "tp=2 sequence_parallel=true",
             "pp=2 microbatches=4 schedule=interleaved", "dp=2 sync=ps", "dp=2 overlap=none"]  # fmt: skip
    told = {"offload_folder"}  # (of the disk alone)
    refused = set()
    for base in bases:
        plain, _ = outcome(Plan.parse(base), system)
        table = dict(word.split("=") for word in base.split())
        for key, values in OTHER.items():
            for value in values:
                try:
                    plan = Plan.parse({**table, key: value})
                except PlanError:
                    continue
                if plan == Plan.parse(base):
                    continue
                found, why = outcome(plan, system)
                if found is None:
                    refused.add(key)
                    assert plain is None or key in why, (base, key, value, why)
                    continue
                same = plain is not None and (found.values, found.notes) == (plain.values, plain.notes)
                alone = key == "overlap" and plan.dp == 1  # (then nothing is summed)
                alone |= key == "chunks" and plan.placement() == Plan.parse(base).placement()  # (the default, said)
                assert not same or alone or key in told, (base, key, value)
    assert refused >= {"local_steps", "schedule", "split", "algorithm", "inference", "sync", "annotations"}


def test_wrong_sizes_are_refused():
    plan = Plan.parse("dp=4 microbatches=3")
    with pytest.raises(PlanError, match="the nearest possible: 24 and 36"):
        plan.export("deepspeed", batch=32)
    with pytest.raises(PlanError, match="the nearest possible: 12"):
        plan.export("deepspeed", batch=5)
    with pytest.raises(PlanError, match="6 GPUs, but plan dp=4 pp=1 microbatches=3 needs 4; possible .* or dp=6"):
        plan.export("megatron", nodes=3, gpus_per_node=2)
    with pytest.raises(PlanError, match="nodes=0: must be a whole number of at least 1"):
        plan.export("megatron", nodes=0)
    with pytest.raises(PlanError, match="'nemo': unknown; possible are megatron, deepspeed, torchtitan, torchrun"):
        plan.export("nemo")
    with pytest.raises(PlanError, match="no such preset"):
        plan.export("megatron", "gpt-9")
    with pytest.raises(PlanError, match="trains transformers"):
        plan.export("megatron", "branchy")
    assert plan.export("megatron", gpus_per_node=2).launch[1:3] == ("--nnodes=2", "--nproc-per-node=2")


# the systems themselves -----------------------------------------------------------------------------------------------


def of_system(name: str):
    return pytest.importorskip(name, reason=f"{name} is not installed", exc_type=ImportError)


@pytest.fixture(scope="module")
def parser():
    arguments = of_system("megatron.training.arguments")
    return arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


def test_megatron_has_these_flags(parser):
    known = {option: action for action in parser._actions for option in action.option_strings}
    for name, kind in names.MEGATRON.items():
        action = known[name]
        if kind is True:
            assert action.nargs == 0, name
        elif isinstance(kind, tuple):
            assert set(kind) <= set(action.choices), name
        else:
            assert action.type is kind or name == "--moe-layer-freq", name


@pytest.mark.parametrize("words", MEGATRON)
def test_megatron_reads_the_flags(parser, words, monkeypatch):
    layout = of_system("megatron.core.transformer.pipeline_parallel_layer_layout")
    arguments = of_system("megatron.training.arguments")
    plan = Plan.parse(words)
    export = plan.export("megatron", **sizes(plan))
    args = parser.parse_args([*export.values, "--lr", "0.1", "--train-iters", "10", "--no-gradient-accumulation-fusion",
                              "--transformer-impl", "local"])  # fmt: skip
    assert args.tensor_model_parallel_size == plan.tp
    assert args.global_batch_size == 2 * plan.dp * plan.total_microbatches
    if args.pipeline_model_parallel_layout:
        stages = layout.PipelineParallelLayerLayout.parse_str_to_list(args.pipeline_model_parallel_layout)
        assert tuple(map(len, stages)) == plan.layout(uniform(12)).split
    # Its own check of what goes together, which fills in what follows from the sizes.
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1" if "CUDA_DEVICE_MAX_CONNECTIONS=1" in export.launch else "8")
    monkeypatch.setattr(arguments, "get_device_arch_version", lambda: 9)
    args.rank, args.world_size = 0, plan.ranks
    arguments.validate_args(args)
    assert args.data_parallel_size == plan.dp
    chunks = len(plan.placement()[0])
    assert (args.virtual_pipeline_model_parallel_size or 1) == chunks


class Replicas:
    """What DeepSpeed asks of the ranks: how many have other rows."""

    def __init__(self, count: int) -> None:
        self.count = count

    def get_data_parallel_world_size(self) -> int:
        return self.count


@pytest.mark.parametrize("words", DEEPSPEED)
def test_deepspeed_reads_the_configuration(words, monkeypatch):
    config = of_system("deepspeed.runtime.config")
    monkeypatch.setattr(config.dist, "get_rank", lambda: 0)
    plan = Plan.parse(words)
    values = plan.export("deepspeed", **sizes(plan)).values
    read = config.DeepSpeedConfig(json.loads(json.dumps(values)), mpu=Replicas(plan.dp * plan.ep))
    assert read.train_micro_batch_size_per_gpu == 2
    assert read.gradient_accumulation_steps == plan.total_microbatches
    assert int(read.zero_optimization_stage) == plan.zero
    assert read.bfloat16_config.enabled == (plan.precision == "bf16")
    assert read.gradient_clipping == (plan.clip or 0)
    assert read.tensor_parallel_config.autotp_size == (plan.tp if plan.tp > 1 else 0)
    if plan.offload:
        zero = read.zero_config
        device = "cpu" if plan.offload_to == "host" else "nvme"
        for kind, there in (("optimizer", zero.offload_optimizer), ("parameters", zero.offload_param)):
            assert (there is not None and there.device == device) == (kind in plan.offload)
    if plan.ep > 1:
        assert read.expert_parallel_config.autoep_size == plan.ep


def test_deepspeed_divides_layers_as_an_even_split():
    utils = of_system("deepspeed.runtime.utils")
    for layers, stages in ((12, 4), (13, 4), (26, 4), (7, 3)):
        ends = utils.partition_uniform(num_items=layers, num_parts=stages)
        counts = tuple(b - a for a, b in pairwise(ends))
        assert counts == Plan(pp=stages, microbatches=stages).layout(uniform(layers)).split


@pytest.mark.parametrize("words", TORCHTITAN)
def test_torchtitan_reads_the_configuration(words, tmp_path):
    config = of_system("torchtitan.config")
    if not hasattr(config, "JobConfig"):
        pytest.skip("this version of torchtitan reads no TOML")
    plan = Plan.parse(words)
    (tmp_path / "plan.toml").write_text(plan.export("torchtitan", **sizes(plan)).text)
    read = config.ConfigManager().parse_args(["--job.config_file", str(tmp_path / "plan.toml")])
    shape = read.parallelism
    assert shape.tensor_parallel_degree == plan.tp
    assert shape.pipeline_parallel_degree == plan.pp
    assert shape.data_parallel_replicate_degree * shape.data_parallel_shard_degree == plan.dp * plan.ep
    assert read.training.global_batch_size == 2 * plan.dp * plan.ep * plan.total_microbatches
    assert read.training.max_norm == (plan.clip or math.inf)
    assert read.activation_checkpoint.mode == ("full" if plan.checkpoint == 1 else "none")
    dims = of_system("torchtitan.distributed").ParallelDims
    dims(shape.data_parallel_replicate_degree, shape.data_parallel_shard_degree, shape.context_parallel_degree,
         shape.tensor_parallel_degree, shape.pipeline_parallel_degree, shape.expert_parallel_degree, 1,
         plan.ranks)  # fmt: skip


def test_torchtitan_divides_layers_as_an_even_split():
    pipelines = of_system("torchtitan.distributed.pipeline_parallel")
    for blocks, stages in ((10, 4), (11, 4), (24, 4), (24, 8)):
        parts = pipelines.generate_llm_fqn_per_model_part(stages, blocks)
        counts = [len(part) for part in parts]
        counts[-1] -= 1  # norm and output are one layer of minipar
        assert tuple(counts) == Plan(pp=stages, microbatches=stages).layout(uniform(blocks + 2)).split


class Stage:
    """What a schedule of torch asks of a stage before it runs."""

    def __init__(self, rank: int, ranks: int, index: int, count: int) -> None:
        self.group_rank, self.group_size, self.group = rank, ranks, None
        self.stage_index, self.num_stages = index, count
        self.is_first, self.is_last = index == 0, index == count - 1
        self.has_backward, self.submod, self.device, self.stage_index_to_group_rank = True, None, "cpu", {}


@pytest.mark.slow
def test_torch_runs_the_same_orders():
    """What torchtitan runs are these schedules of torch: each rank does the same actions in the same order."""
    schedules = of_system("torch.distributed.pipelining.schedules")
    for name in torchtitan.SCHEDULES.values():
        assert schedules.get_schedule_class(name)
    kinds = {"FORWARD": Forward, "FULL_BACKWARD": Backward, "BACKWARD_INPUT": BackwardInput,
             "BACKWARD_WEIGHT": BackwardWeight}  # fmt: skip
    for words in ("schedule=interleaved microbatches=8", "schedule=interleaved microbatches=6 group=6 chunks=3",
                  "schedule=looped-bfs microbatches=6", "schedule=zb-v microbatches=8",
                  "schedule=dualpipe-v microbatches=8", "schedule=dualpipe-v microbatches=12"):  # fmt: skip
        plan = Plan.parse(f"pp=4 {words}")
        plan.export("torchtitan", SMALL if plan.chunks == 3 else None)  # (it is not refused)
        placement = plan.placement()
        count = sum(map(len, placement))
        stages = [Stage(0, plan.pp, stage, count) for stage in placement[0]]
        made = schedules.get_schedule_class(torchtitan.SCHEDULES[plan.schedule])(
            stages, n_microbatches=plan.microbatches, loss_fn=None, scale_grads=False
        )
        for rank in range(plan.pp):
            actions = [one for one in made.pipeline_order[rank] if one is not None]
            flat = [one for action in actions for one in action.sub_actions or (action,)]
            theirs = [(kinds[one.computation_type.name], one.microbatch_index, one.stage_index) for one in flat]
            ours = [(type(one), one.microbatch, placement[rank][one.chunk]) for one in plan.actions(rank)]
            assert theirs == ours, (words, rank)
