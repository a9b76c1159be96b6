"""The command line: JSON keys, exit codes, one-line errors that say what is possible."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from contextlib import nullcontext

import pytest

from minipar import Plan, cli, cluster, simulate
from minipar.cli import main


def call(capsys, *words: str) -> tuple[int, str, str]:
    code = main(words)
    out, err = capsys.readouterr()
    return code, out, err


def data(capsys, *words: str) -> dict:
    code, out, err = call(capsys, *words, "--json")
    assert (code, err) == (0, "")
    assert len(out.splitlines()) == 1
    return json.loads(out)


def test_simulate_gives_the_closed_form(capsys):
    found = data(capsys, "simulate", "pp=4 schedule=1f1b microbatches=8", "--layers", "4", "--forward", "1",
                 "--backward", "2", "--latency", "0.5")  # fmt: skip
    assert found["time"] == 41
    assert found["bubble_of_total"] == pytest.approx(1 - 24 / 41)
    assert found["bubble_of_ideal"] == pytest.approx(41 / 24 - 1)
    assert found["window_bubble"] == 17
    assert found["in_flight"] == [4, 3, 2, 1]
    assert found["weight_versions"] == [1, 1, 1, 1]
    assert found["staleness"] == [0, 0, 0, 0]
    assert found["messages_per_microbatch"] == 6
    assert found["instructions"] == 4 * 16 + 2 * 3 * 16 + 4


def test_simulate_stage_factors_and_halves(capsys):
    found = data(capsys, "simulate", "pp=2 schedule=gpipe microbatches=3", "--layers", "2", "--input-gradient", "0.5",
                 "--weight-gradient", "1.5", "--stage-factors", "1,3")  # fmt: skip
    # the slow rank: waits 1, three forwards of 3, three backwards of 6; then the fast rank's last backward of 2
    assert found["time"] == 1 + 9 + 18 + 2


def test_simulate_takes_the_layers_of_a_model(capsys):
    words = ("simulate", "pp=4 place=branches schedule=looped-bfs microbatches=2", "--model", "branchy")
    found = data(capsys, *words)
    # In each of two blocks rank 0 sends to three ranks and gets three answers; and the same backward.
    assert found["messages_per_microbatch"] == 2 * 2 * 6
    assert data(capsys, "simulate", "pp=2", "--model", "gpt-tiny")["time"] == 6
    code, _, err = call(capsys, "simulate", "pp=4 place=0,1,2", "--model", "branchy")
    assert (code, err) == (2, "minipar: place=0,1,2: puts no layer on rank 3; possible is pp=3, or another place\n")


def test_simulate_captures_a_model_whose_layers_ranks_share(capsys):
    found = data(capsys, "simulate", "tp=2 pp=2 microbatches=2", "--model", "gpt-tiny")
    assert found["time"] == (2 + 2 - 1) * 3
    assert found["in_flight"] == [2, 2, 1, 1]
    assert found["messages_per_microbatch"] == 2 * 2  # each of the two pipelines sends its own
    for words, model in (("ep=2", "gpt-moe-tiny"), ("context_parallel=2", "gpt-tiny")):
        assert data(capsys, "simulate", words, "--model", model)["time"] == pytest.approx(3)


def test_simulate_alone_takes_a_layer_for_each_stage_and_says_so(capsys):
    for words in ("pp=4 microbatches=8", "pp=2 schedule=interleaved chunks=2 microbatches=4", "tp=2 pp=2"):
        found = data(capsys, "simulate", words)
        assert found["time"] == simulate(words).time
    assert "2 equal layers, one for each stage" in found["model"]


def test_simulate_reads_well(capsys):
    code, out, _ = call(capsys, "simulate", "pp=2 microbatches=2", "--layers", "2")
    assert code == 0
    assert "bubble of total" in out


@pytest.fixture
def ranks(clusters, monkeypatch):
    """`minipar run` has the tests' ranks, where it would start some of its own."""
    monkeypatch.setattr(cluster, "Cluster", lambda size, device: nullcontext(clusters(size)))


def test_run_equals_plain_torch(capsys, ranks):
    found = data(capsys, "run", "pp=2 dp=2 microbatches=4 schedule=1f1b", "--model", "gpt-tiny-tied", "--steps", "2",
                 "--batch", "10", "--check", "--dtype", "float64", "--ranks", "4", "--seed", "3")  # fmt: skip
    assert found["losses"] == pytest.approx(found["reference_losses"], rel=1e-12)
    assert found["losses"][1] < found["losses"][0]
    assert found["max_gradient_error"] <= 1e-12
    for key in ("time", "bubble_of_total"):
        assert set(found[key]) == {"predicted", "measured"}
        assert found[key]["measured"] > 0
    assert len(found["peak_memory"]) == len(found["bytes_sent"]) == 4
    for peak in found["peak_memory"]:
        kinds = {"parameters", "gradients", "optimizer", "activations", "buffers", "data", "temporary"}
        assert set(peak["by_kind"]) == kinds
        assert sum(peak["by_kind"].values()) == peak["measured"]
        assert isinstance(peak["predicted"], int)
    assert all(isinstance(sent, int) and sent > 0 for sent in found["bytes_sent"])
    links = {"0 -> 1", "1 -> 0", "2 -> 3", "3 -> 2", "0 -> 0,2", "2 -> 0,2", "1 -> 1,3", "3 -> 1,3"}
    assert links | {f"{rank} -> 0,1,2,3" for rank in range(4)} == set(found["bytes_by_link"])  # the last: what is tied
    assert set(found["bytes_by_kind"]) == {"activations", "gradients"}
    assert sum(found["bytes_by_link"].values()) == sum(found["bytes_by_kind"].values()) == sum(found["bytes_sent"])


def test_run_without_check_has_no_gradient_error(capsys):
    found = data(capsys, "run", "dp=2", "--model", "mlp-tiny", "--steps", "1", "--batch", "4")
    assert "max_gradient_error" not in found
    code, out, _ = call(capsys, "run", "dp=2", "--model", "mlp-tiny", "--steps", "1", "--batch", "4", "--check")
    assert code == 0
    assert "max gradient error" in out
    assert "rank 1" in out


def test_schedules_lists_what_plan_takes(capsys):
    names = [entry["name"] for entry in data(capsys, "schedules")["schedules"]]
    assert {"gpipe", "1f1b", "eager-1f1b", "naive"} <= set(names)
    code, out, _ = call(capsys, "schedules")
    assert code == 0
    assert all(name in out for name in names)


REFUSED = [
    (["simulate", "pp=5", "--layers", "4"], ["pp=5", "1 to 4"]),
    (["simulate", "pp=4 microbatches=0", "--layers", "4"], ["microbatches=0", "at least 1"]),
    (["simulate", "pp=x", "--layers", "4"], ["pp=x", "whole number"]),
    (["simulate", "schedule=2f2b", "--layers", "4"], ["2f2b", "gpipe", "1f1b"]),
    (["simulate", "stages=4", "--layers", "4"], ["stages", "possible are dp, pp"]),
    (["simulate", "pp", "--layers", "4"], ["'pp'", "key=value"]),
    (["simulate", "pp=2", "--layers", "many"], ["--layers", "many", "whole number"]),
    (["simulate", "pp=2", "--layers", "0"], ["--layers", "1 or more"]),
    (["simulate", "pp=2", "--layers", "2", "--forward", "nan"], ["--forward", "finite"]),
    (["simulate", "pp=2", "--layers", "2", "--latency", "-1"], ["--latency", "at least 0"]),
    (["simulate", "pp=2", "--layers", "2", "--stage-factors", "1,2,3"], ["stage_factors", "2 stages"]),
    (["simulate", "pp=2", "--layers", "2", "--model", "gpt-tiny"], ["--layers", "not allowed"]),
    (["run", "pp=2", "--model", "gpt-huge", "--steps", "1"], ["gpt-huge", "gpt-tiny"]),
    (["run", "pp=2 dp=2", "--model", "gpt-tiny", "--steps", "1", "--ranks", "3"], ["--ranks 3", "4 ranks"]),
    (["run", "dp=300", "--model", "gpt-tiny", "--steps", "1"], ["300 ranks", "up to 64", "minipar estimate"]),
    (["run", "pp=7", "--model", "gpt-tiny", "--steps", "1"], ["pp=7", "6"]),
    (["run", "pp=2", "--model", "gpt-tiny", "--steps", "0"], ["--steps"]),
    (["run", "pp=2", "--model", "gpt-tiny", "--steps", "1", "--dtype", "int8"], ["--dtype", "float64"]),
    (["bench", "everything"], ["everything", "simulator"]),
    (["fly"], ["fly", "simulate"]),
]


@pytest.mark.parametrize(("words", "said"), REFUSED, ids=lambda value: " ".join(value)[:40])
def test_what_cannot_be_is_refused_in_one_line(capsys, words, said):
    code, out, err = call(capsys, *words)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    for text in said:
        assert text in err


def test_without_a_command_it_lists_them_with_examples(capsys):
    code, out, err = call(capsys)
    assert (code, err) == (0, "")
    for name, example in cli.EXAMPLES.items():
        assert f"  {name} " in out
        cli._parser().parse_args(shlex.split(example)[1:])  # (it would raise PlanError)


def test_installed_command_and_exit_status():
    done = subprocess.run([sys.executable, "-m", "minipar.cli", "simulate", "pp=9", "--layers", "4"],
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


def test_simulate_needs_no_torch():
    code = "from minipar.cli import main; main(['simulate', 'pp=2', '--layers', '2'])"
    code = f"import sys; {code}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_too_large_for_a_number_or_for_the_memory(capsys):
    for words, said in (
        (["simulate", "pp=2", "--layers", "2", "--forward", "1e308", "--backward", "1e308"], "smaller"),
        (["simulate", "microbatches=100000000", "--layers", "2"], "possible are up to"),
        (["simulate", "pp=2", "--layers", "1000000000"], "1000000"),
        (["run", "dp=1", "--model", "mlp-tiny", "--steps", "1", "--seed", "9" * 30], "--seed"),
    ):
        code, _, err = call(capsys, *words, "--json")
        assert code == 2
        assert said in err
        assert len(err.splitlines()) == 1


def test_python_dash_m():
    done = subprocess.run([sys.executable, "-m", "minipar", "schedules"], capture_output=True, text=True, check=True)
    assert "1f1b" in done.stdout


def test_run_with_ranks_that_share_layers(capsys, ranks):
    words = "tp=2 sequence_parallel=true"
    found = data(capsys, "run", words, "--model", "gpt-tiny", "--steps", "2", "--check", "--dtype", "float64")
    assert found["max_gradient_error"] <= 1e-12
    assert found["losses"] == pytest.approx(found["reference_losses"], rel=1e-12)


def test_shard_gives_coverage_forms_and_collectives(capsys):
    found = data(capsys, "shard", "--model", "gpt-tiny", "--mesh", "tp=2", "--batch", "4")
    assert {"op": "aten::linear", "count": 17, "state": "rule"} in found["coverage"]
    assert found["forms"]["1.attention.qkv.weight"] == "S0:3 on tp"
    keys = {"op", "value", "axis", "bytes", "time", "phase"}
    assert all(set(one) == keys for one in found["collectives"])
    layer = [(one["op"], one["phase"]) for one in found["collectives"] if one["value"].startswith("1:")]
    assert layer == [("all_reduce", "forward")] * 2 + [("all_reduce", "backward")] * 2
    logits = {"op": "all_gather", "value": "5:transpose", "axis": "tp", "phase": "forward"}
    assert [one for one in found["collectives"] if one["op"] != "all_reduce"] == [
        {**logits, "bytes": 4 * 64 * 128 * 4, "time": pytest.approx(1e-6 + 4 * 64 * 128 * 4e-9)}
    ]
    assert {one["bytes"] for one in found["collectives"] if one["op"] == "all_reduce"} == {4 * 64 * 64 * 4}
    code, out, _ = call(capsys, "shard", "--model", "gpt-tiny", "--mesh", "dp=2,tp=2", "--sequence-parallel")
    parts = ["operators", "divided, by layer", "collectives of one layer", "reduce_scatter over tp"]
    assert (code, [out.index(part) for part in parts]) == (0, sorted(out.index(part) for part in parts))


def test_shard_takes_annotations(capsys):
    for rules in ("0.0=S1 on tp; 1.0 = P on tp", "0.0=S1@tp;1.0=P@tp"):
        found = data(capsys, "shard", "--model", "mlp-tiny", "--mesh", "tp=2", "--annotate", rules)
        assert [(one["op"], one["phase"]) for one in found["collectives"]] == [("all_reduce", "forward")]
        assert found["forms"]["1.0.weight"] == "S1 on tp"
    unnamed = data(capsys, "shard", "--model", "mlp-tiny", "--mesh", "tp=2")
    assert unnamed["annotations"] == {"0.0": "S1 on tp", "1.0": "P on tp", "2.0": "S1 on tp"}


def test_shard_over_two_axes(capsys):
    """Each half of the rows is divided by operators; the logits are gathered over tp, and stay a half over dp."""
    found = data(capsys, "shard", "--model", "gpt-tiny", "--mesh", "dp=2,tp=2", "--batch", "4")
    assert found["forms"]["1:linear_2"] == "S0 on dp, S2 on tp"
    last = [one for one in found["collectives"] if one["value"] == "5:transpose"]
    assert [(one["op"], one["axis"], one["bytes"]) for one in last] == [("all_gather", "tp", 2 * 64 * 128 * 4)]
    tokens = data(capsys, "shard", "--model", "gpt-tiny", "--mesh", "cp=2", "--batch", "4")
    assert not [one for one in tokens["collectives"] if one["value"] == "5:transpose"]


OWN_MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 4)])

    def forward(self, x, y):
        return nn.functional.mse_loss(self.blocks[1](self.blocks[0](x).tanh()), y)

def build():
    return Net, [(torch.randn(6, 8), torch.randn(6, 4))], None
"""


def test_a_model_of_one_s_own_with_its_own_loss(capsys, tmp_path, monkeypatch):
    (tmp_path / "net_of_mine.py").write_text(OWN_MODEL)
    monkeypatch.chdir(tmp_path)
    name = "--model", "net_of_mine:build"
    assert data(capsys, "run", "dp=2", *name, "--steps", "2", "--check")["max_gradient_error"] < 1e-5
    found = data(capsys, "memory", "pp=2", *name)
    assert found["batch"] == 6
    assert [rank["parameters"] for rank in found["per_rank"]] == [4 * (8 * 16 + 16), 4 * (16 * 4 + 4)]
    shard = data(capsys, "shard", *name, "--mesh", "tp=2")
    assert shard["forms"]["blocks.0.weight"] == "S0 on tp"
    assert shard["whole"] == {}


@pytest.mark.parametrize(("words", "reasons"), [
    ("--mesh tp=3", ["1.attention.qkv (linear)", "3 ranks of tp=3 cannot cut into equal blocks", "nearest choice is"]),
    ("--mesh dp=3", ["layer 0: x: form S0 on dp: dimension 0 has 16 elements", "S0 over 2 ranks"]),
    ("--mesh ep=2", ["ep=2: the model has no experts", "possible are dp=2 or a mixture"]),
    ("--mesh tx=2", ["'tx' is no axis of a mesh; possible are dp, pp, ep, cp, tp"]),
    ("--mesh tp", ["write axes and their sizes, such as dp=2,tp=2"]),
    ("--mesh tp=2 --annotate *.mlp.0=S7", ["1.mlp.0 (linear_2): form S7: the tensor has 3 dimensions", "S0 to S2"]),
    ("--mesh tp=2 --annotate *.mlp.1=P", ["1.mlp.1 (aten::gelu) cannot write gelu as P on tp, which '*.mlp.1' fixes",
                                          "the nearest choice is S0 or S1 or S2 or R"]),
    ("--mesh tp=2 --annotate *.mlp.0=P;*.0=S0", ["1.mlp.0: '*.mlp.0' fixes it as P on tp, and '*.0' as S0; keep one"]),
    ("--mesh tp=2 --annotate *.mlp.0.weight=S1;*.mlp.0=S-1", ["1.mlp.0 (aten::linear): annotations do not fit together",
                                                              "1.mlp.0.weight as S1", "the nearest choice is R,S0"]),
    ("--mesh tp=2 --annotate *.mlp.0.weight=P", ["1.mlp.0.weight: form P on tp: it is given", "possible are S0, S1"]),
    ("--mesh tp=2 --annotate *.mlp.0=S1_on_tx", ["1.mlp.0 (linear_2): form 'S1 on tx'", "possible are tp"]),
    ("--mesh tp=2 --annotate *.mlp.7=P", ["'*.mlp.7': no operator or parameter has such a name; the closest are"]),
    ("--mesh tp=2 --annotate *.mlp.0", ["must be none, or patterns of names with forms"]),
    ("--mesh dp=2 --sequence-parallel", ["possible is --mesh tp=2"]),
    ("--mesh tp=2 --model gpt-small", ["model 'gpt-small': no such preset; there are gpt-tiny"]),
    ("--mesh cp=2 --model mlp-tiny", ["--mesh cp=2: each rank has a part of the tokens, but the output 2:linear is I"]),
])  # fmt: skip
def test_shard_refuses_in_one_line(capsys, words, reasons):
    code, out, err = call(capsys, "shard", "--model", "gpt-tiny", *(word.replace("_", " ") for word in words.split()))
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert not [reason for reason in reasons if reason not in err], err


def test_export_writes_another_systems_configuration(capsys, tmp_path):
    found = data(capsys, "export", "dp=2 zero=2 clip=1", "--to", "deepspeed", "--batch", "8")
    assert json.loads(found["text"]) == found["values"]
    assert found["values"]["train_micro_batch_size_per_gpu"] == 4
    assert found["launch"][0] == "deepspeed"
    assert data(capsys, "export", "", "--to", "torchtitan")["values"]["training"]["max_norm"] == "inf"
    saved, written = tmp_path / "plan.toml", tmp_path / "flags"
    Plan(tp=2, pp=2, microbatches=2).save(saved)
    words = ("export", str(saved), "--to", "megatron", "--model", "gpt2-small", "--nodes", "2", "--gpus-per-node", "2")
    code, out, err = call(capsys, *words)
    assert code == 0
    assert out.startswith("--num-layers 12 \\\n")
    assert "torchrun --nnodes=2 --nproc-per-node=2 pretrain_gpt.py" in err
    code, again, _ = call(capsys, *words, "--output", str(written))
    assert (code, again, written.read_text()) == (0, f"{written}\n", out)


def test_export_refuses_in_one_line(capsys, tmp_path):
    code, out, err = call(capsys, "export", "pp=2 schedule=zb-h1 microbatches=4", "--to", "megatron")
    assert (code, out) == (2, "")
    assert err == (
        "minipar: schedule=zb-h1: Megatron-LM runs 1F1B, plain or interleaved; possible is schedule=1f1b, "
        "schedule=interleaved\n"
    )
    assert call(capsys, "export", "", "--to", "nemo")[0] == 2
    assert call(capsys, "export", str(tmp_path / "none.toml"), "--to", "megatron")[0] == 2
    code, _, err = call(capsys, "export", "", "--to", "megatron", "--output", str(tmp_path / "none" / "x"))
    assert (code, "cannot be written" in err) == (2, True)


@pytest.mark.parametrize("system", ["megatron", "torchtitan", "deepspeed"])
def test_what_is_planned_for_a_system_is_exported_as_it_is(capsys, system):
    model = ("--model", "llama3-8b", "--batch", "128")
    found = data(capsys, "plan", *model, "--hardware", "a100-40gb", "--nodes", "1", "--best", "3", "--to", system)
    for one in found["best"]:
        exported = data(capsys, "export", one["plan"], *model, "--to", system)
        assert exported["text"]


READS_TOML = pytest.mark.skipif(sys.version_info < (3, 11), reason="needs tomllib")


@pytest.mark.parametrize(("model", "reason"), [
    ("raises:build", "the function raised KeyError: 'x'"),
    ("nowhere_at_all:build", "possible is MODULE:FUNCTION"),
    ("raises:number", "is no function"),
    pytest.param("broken.toml", "is no TOML", marks=READS_TOML),
    pytest.param("none.toml", "No such file or directory; possible are", marks=READS_TOML),
])  # fmt: skip
def test_estimate_refuses_a_model_in_one_line(capsys, tmp_path, monkeypatch, model, reason):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "raises.py").write_text("number = 3\ndef build():\n    raise KeyError('x')\n")
    (tmp_path / "broken.toml").write_text("layers ==")
    code, out, err = call(capsys, "estimate", "", "--model", model, "--hardware", "h100")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert reason in err
