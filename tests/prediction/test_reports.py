"""`minipar memory`: JSON keys, the table, large plans in little time, and errors of one line."""

from __future__ import annotations

import json
import time

import pytest

from minipar.cli import main

KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers")


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
        assert rank["total"] == sum(rank[kind] for kind in KINDS)
        assert rank["activations"] >= rank["activations_held"] > 0
    states = found["per_rank"][0]["parameters"] + found["per_rank"][0]["gradients"] + found["per_rank"][0]["optimizer"]
    assert states == pytest.approx(16 * 174_604_259_328 / 8, rel=1e-6)
    assert found["fits"] == []


def test_batch_and_the_hardware_that_holds_it(capsys):
    small, large = (data(capsys, "pp=2", "--model", "gpt2-xl", "--batch", rows) for rows in ("1", "20"))
    assert large["per_rank"][0]["activations"] == 20 * small["per_rank"][0]["activations"]
    assert small["fits"] == ["v100", "a100-40gb", "a100-80gb", "h100", "h200", "b200"]
    assert set(large["fits"]) < set(small["fits"])
    assert (small["batch"], data(capsys, "dp=2 microbatches=3", "--model", "mlp-tiny")["batch"]) == (1, 6)


def test_the_table_reads_well(capsys):
    code, out, _ = memory(capsys, "dp=2 pp=2 microbatches=4", "--model", "gpt2-xl", "--batch", "8")
    lines = out.splitlines()
    assert code == 0
    assert lines[0] == "gpt2-xl, dp=2 pp=2 microbatches=4, 8 rows a step: GiB on each rank"
    assert lines[1].split() == ["ranks", *KINDS, "total"]
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
