"""Bytes on every rank: what the papers print, rules of sharding, and `minipar memory`."""

from __future__ import annotations

import json
import time

import pytest

from minipar.cli import main
from minipar.costs import analytic
from minipar.costs.analytic import Division
from minipar.costs.hardware import PRESETS
from minipar.costs.quantities import size
from minipar.errors import PlanError
from minipar.models import shapes
from minipar.models.sizes import llama
from minipar.prediction.on_paper import per_rank
from minipar.prediction.plan_numbers import PRECISIONS
from minipar.prediction.rank_memory import RankMemory, states
from minipar.strategies.plan import Plan

GiB = 2**30


def ranks(text: str, model: str, batch: int | None = None) -> list[RankMemory]:
    return per_rank(Plan.parse(text), model, batch)


def test_zero_table_2_largest_models_on_a_v100() -> None:
    memory = 32 * 10**9
    for stage, billions in ((0, 2.0), (1, 7.6), (2, 14.4), (3, 128.0)):
        assert states(int(billions * 1e9), 64, stage).total <= memory
        assert states(int((billions + 0.1) * 1e9), 64, stage).total > memory


def test_korthikanti_activations_on_the_first_stage() -> None:
    # 1F1B holds L layers' worth on the first stage, however many stages there are; the embedding's mask comes on top.
    size = 2048 * 12288
    split = "split=13,12,12,12,12,12,12,13"
    for checkpoint, each in (("none", 114), ("selective", 34), ("1", 2)):
        text = f"pp=8 microbatches=16 precision=bf16 checkpoint={checkpoint} {split}"
        first = ranks(text, "korthikanti-175b flash=false")[0]
        mask = 8 * size
        assert first.held == 96 * each * size + mask
        assert first.activations >= first.held
    assert f"{96 * 34 * size / GiB / 8:.1f}" == "9.6"  # the table's TP + SP + selective


def test_states_of_a_real_model_follow_the_table() -> None:
    parameters = sum(sum(group.tensors) for group in shapes.shape("gpt3-175b", element_size=1).groups)
    for zero, part in ((0, 18), (1, 6 + 12 / 64), (2, 2 + 16 / 64), (3, 16 / 64)):
        for rank in ranks(f"dp=64 zero={zero} precision=bf16", "gpt3-175b"):
            found = rank.parameters + rank.gradients + rank.optimizer
            assert found == pytest.approx(part * parameters, rel=1e-6)
    (alone,) = ranks("precision=float32", "gpt3-175b")
    assert (alone.parameters, alone.gradients, alone.optimizer) == (4 * parameters, 4 * parameters, 8 * parameters)
    (sharded_by_one,) = ranks("zero=3", "gpt3-175b")
    assert sharded_by_one.optimizer == alone.optimizer


def test_shards_are_rounded_up() -> None:
    assert states(10, 4, 3) == states(12, 4, 3)
    assert states(10, 4, 1, PRECISIONS["float32"]).optimizer == 3 * 8


def test_what_is_tied_between_stages_stays_whole() -> None:
    tied = 256 * 64
    for zero, shares in ((1, (1, 1, 4)), (2, (1, 4, 4)), (3, (4, 4, 4))):
        first = ranks(f"pp=2 dp=4 zero={zero} precision=bf16", "gpt-tiny-tied")[0]
        rest = 64 * 64 + 2 * (12 * 64**2 + 13 * 64)  # positions and two blocks
        each = (2, 2, 12) if zero < 2 else (2, 4, 12) if zero == 2 else (4, 4, 8)
        wanted = [w * tied + e * rest // n for w, e, n in zip((2, 2, 12), each, shares, strict=True)]
        assert [first.parameters, first.gradients, first.optimizer] == wanted


def test_buffers_of_sharding() -> None:
    block = 12 * 64**2 + 13 * 64
    embed, head = (256 + 64) * 64, 256 * 64 + 2 * 64
    assert embed < block
    gathered = ranks("zero=3 dp=2 precision=bf16 bucket=none", "gpt-tiny")[0].buffers
    assert gathered == 2 * 2 * block + 2 * 2 * block  # parameters of two layers, gradients of two
    assert ranks("zero=2 dp=2 bucket=none", "gpt-tiny")[0].buffers == 4 * 2 * block
    assert ranks("zero=2 dp=2 bucket=flat", "gpt-tiny")[0].buffers == 4 * (4 * block + embed + head)
    assert ranks("zero=1 dp=2", "gpt-tiny")[0].buffers == 0
    assert ranks("zero=3", "gpt-tiny")[0].buffers == 0
    # a bucket is full at 0.25 MiB: head and first block, two blocks, one block and the embedding
    assert ranks("zero=2 dp=2 bucket=0.25", "gpt-tiny")[0].buffers == 4 * (3 * block + max(head, embed))


@pytest.mark.parametrize(
    ("words", "budget"),
    [("", 10), ("schedule=interleaved", 12), ("schedule=chimera", 12), ("schedule=zb-h1", 28), ("schedule=zb-v", 40)],
)
def test_budget_is_kept(words: str, budget: int) -> None:
    """Several stages of a rank share it; weight halves wait."""
    text, model, batch = f"pp=4 microbatches=8 checkpoint={budget}MiB {words}", "gpt-demo", 16
    for rank in ranks(text, model, batch):
        assert rank.activations + rank.buffers <= budget * 2**20


def test_rows_of_a_replica_follow_the_split_of_the_batch() -> None:
    found = ranks("dp=3", "mlp-wide", 4)  # 2, 1, 1 rows
    assert found[0].activations > found[1].activations == found[2].activations > 0
    assert ranks("dp=3", "mlp-wide", 2)[2].activations == 0
    assert ranks("dp=3 microbatches=2", "mlp-wide") == ranks("dp=3 microbatches=2", "mlp-wide", 6)


def test_offload_moves_bytes_to_the_host() -> None:
    (plain,) = ranks("microbatches=2", "gpt2-small")
    for kinds in ("optimizer", "parameters", "activations", "optimizer,parameters"):
        (found,) = ranks(f"microbatches=2 offload={kinds}", "gpt2-small")
        for kind in ("optimizer", "parameters"):
            assert getattr(found, kind) == (0 if kind in kinds else getattr(plain, kind))
        assert found.total + found.host == plain.total + found.buffers
        assert found.host > 0
        assert found.total < plain.total
    (found,) = ranks("offload=none", "gpt2-small")
    assert found.host == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("zero=4", "zero=4: must be a whole number from 0 to 3"),
        ("zero=", "must be key=value"),
        ("checkpoint=9", "checkpoint=9: the model has 6 layers; possible are 1 to 6"),
        ("precision=fp8", "precision=fp8: unknown; possible are float32, bf16"),
        ("pp=two", "pp=two: must be a whole number"),
    ],
)
def test_what_cannot_be_is_refused_with_what_is_possible(text: str, says: str) -> None:
    with pytest.raises(PlanError, match=says) as caught:
        ranks(text, "gpt-tiny")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("word", ["selective", "operators"])
def test_parts_of_a_layer_that_run_again_need_attention(word: str) -> None:
    with pytest.raises(PlanError, match=f"checkpoint={word}: mlp-tiny has no attention"):
        ranks(f"checkpoint={word}", "mlp-tiny")


def test_by_operator_a_block_keeps_attention_and_every_second_product() -> None:
    """Of queries, keys, values, output, gate, up and down the first, third, fifth and seventh are kept."""
    model = llama(2, 64, 4, 32, 100, kv_heads=2, ffn=160)
    for tp in (1, 2):
        costs = analytic.costs_of(model, 3, 2, Division(tp, True), operators=True)
        numbers = (64 + 32 + 64 + 160) / tp + 64  # queries, values, what attention gives, gate; what down gives
        assert costs.saved[1] == 3 * 32 * (2 * numbers + 4 * 4 / tp)


def test_sizes_are_readable() -> None:
    assert [size(x) for x in (0, 999, 2048, 3 * 2**20, 5.5 * 2**30)] == [
        "0 B", "999 B", "2.00 KiB", "3.00 MiB", "5.50 GiB",
    ]  # fmt: skip


# The command ----------------------------------------------------------------------------------------------------------

COLUMNS = ("parameters", "gradients", "optimizer", "activations", "buffers")


def memory(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["memory", *words])
    out, err = capsys.readouterr()
    return code, out, err


def data(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    code, out, err = memory(capsys, *words, "--json")
    assert (code, err) == (0, "")
    assert len(out.splitlines()) == 1
    return json.loads(out)


def test_every_rank_has_every_kind_in_bytes(capsys):
    found = data(capsys, "zero=3 dp=8 checkpoint=sqrt", "--model", "gpt3-175b")
    assert len(found["per_rank"]) == 8
    for rank in found["per_rank"]:
        assert all(isinstance(size, int) and size >= 0 for size in rank.values())
        assert rank["total"] == sum(rank[kind] for kind in COLUMNS)
        assert rank["activations"] >= rank["activations_held"] > 0
    states = found["per_rank"][0]["parameters"] + found["per_rank"][0]["gradients"] + found["per_rank"][0]["optimizer"]
    assert states == pytest.approx(16 * 174_604_259_328 / 8, rel=1e-6)
    assert found["fits"] == []


def test_batch_and_the_hardware_that_holds_it(capsys):
    small, large = (data(capsys, "pp=2", "--model", "gpt2-xl", "--batch", rows) for rows in ("1", "20"))
    assert large["per_rank"][0]["activations"] == pytest.approx(20 * small["per_rank"][0]["activations"], rel=1e-3)
    assert small["fits"] == [name for name in PRESETS if name != "laptop"]
    assert set(large["fits"]) < set(small["fits"])
    assert (small["batch"], data(capsys, "dp=2 microbatches=3", "--model", "mlp-tiny")["batch"]) == (1, 6)


def test_the_table_reads_well(capsys):
    code, out, _ = memory(capsys, "dp=2 pp=2 microbatches=4", "--model", "gpt2-xl", "--batch", "8")
    lines = out.splitlines()
    assert code == 0
    assert lines[0] == "gpt2-xl, dp=2 pp=2 microbatches=4, 8 rows a step, bf16: GiB on each rank"
    assert lines[1].split() == ["ranks", *COLUMNS, "total"]
    assert [line[:5].strip() for line in lines[2:4]] == ["0, 2", "1, 3"]
    assert lines[4].startswith("fits on: ")
    assert lines[5].startswith("too large for: laptop (14.9 GiB)")
    assert len({len(line) for line in lines[1:4]}) == 1
    _, out, _ = memory(capsys, "zero=1 dp=100 offload=optimizer", "--model", "gpt-tiny")
    assert "MiB on each rank" in out
    assert "0 to 99" in out
    assert "host" in out
    assert "too large" not in out


def test_large_plans_answer_at_once(capsys):
    start = time.process_time()
    found = data(capsys, "zero=3 dp=1024 checkpoint=sqrt precision=bf16", "--model", "gpt3-175b")
    assert len(found["per_rank"]) == 1024
    _, out, _ = memory(capsys, "zero=1 dp=1024 pp=16 microbatches=64 precision=bf16", "--model", "megatron-1t")
    assert "0, 16, ... 16368 (1024)" in out
    assert time.process_time() - start < 20  # less than a second on a free machine


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("zero=5", "--model", "gpt-tiny"), "zero=5: must be a whole number from 0 to 3"),
        (("dp=2", "--model", "gpt5"), "no such preset; there are gpt2-small"),
        (("checkpoint=400", "--model", "gpt3-175b"), "possible are 1 to 98"),
        (("dp=2", "--model", "gpt-tiny", "--batch", "0"), "possible is 1 or more"),
        (("dp=2",), "--model"),
    ],
)
def test_what_cannot_be_is_one_line_and_status_2(capsys, words, says):
    code, out, err = memory(capsys, *words)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert says in err
