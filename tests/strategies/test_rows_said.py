"""Plans with micro_batch_size=b, as searches print them, are read by commands that take a Plan and a batch."""

import json

import pytest

from minipar.cli import main
from minipar.errors import PlanError
from minipar.strategies.plan import Plan
from minipar.strategies.rows_said import rows_said


@pytest.mark.parametrize(
    ("text", "batch", "words", "rows"),
    [
        ("dp=2  pp=2", 7, "dp=2 pp=2", 7),
        ("dp=2 microbatches=3 micro_batch_size=4", None, "dp=2 microbatches=3", 24),
        ("dp=2 microbatches=3 micro_batch_size=4", 24, "dp=2 microbatches=3", 24),
        ("dp=2 micro_batch_size=4", 24, "dp=2 microbatches=3", 24),
        ("accumulate=2 micro_batch_size=4", 24, "accumulate=2 microbatches=3", 24),
        ("dp=2 micro_batch_size=4", None, "dp=2 microbatches=1", 8),
    ],
)
def test_the_same_words_and_the_rows_of_a_step(text, batch, words, rows) -> None:
    assert rows_said(text, batch) == (words, rows)
    Plan.parse(words)


@pytest.mark.parametrize(
    ("text", "batch", "told"),
    [
        ("dp=2 microbatches=3 micro_batch_size=4", 25, r"batch=25: .* have 24 rows .* possible is batch=24"),
        ("dp=2 micro_batch_size=4", 25, r"batch=25: .* possible is batch=24 or 32"),
        ("dp=2 micro_batch_size=4", 7, r"batch=7: .* possible is batch=8$"),
        ("micro_batch_size=0", None, r"micro_batch_size=0: must be a whole number from 1"),
        ("micro_batch_size", None, "must be key=value"),
    ],
)
def test_numbers_that_do_not_go_together(text, batch, told) -> None:
    with pytest.raises(PlanError, match=told):
        rows_said(text, batch)


def test_a_plan_object_has_no_such_key() -> None:
    told = r"'micro_batch_size': estimates and the command line read it; a Plan has microbatches=m instead"
    with pytest.raises(PlanError, match=told):
        Plan.parse("pp=2 micro_batch_size=2")
    with pytest.raises(PlanError, match=told):
        Plan(pp=2, micro_batch_size=2)  # type: ignore[call-arg]


def test_a_found_plan_is_exported_and_its_memory_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    found = ["plan", "--model", "gpt2-small", "--hardware", "a100-80gb", "--nodes", "1", "--batch", "64"]
    assert main([*found, "--best", "1", "--pin", "pp=2 schedule=1f1b tp=2", "--json"]) == 0
    words = json.loads(capsys.readouterr().out)["best"][0]["plan"]
    assert "micro_batch_size=" in words
    assert main(["export", words, "--to", "megatron", "--model", "gpt2-small", "--json"]) == 0
    flags = json.loads(capsys.readouterr().out)["values"]
    assert flags[flags.index("--global-batch-size") + 1] == "64"
    assert main(["memory", words, "--model", "gpt2-small", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["batch"] == 64
    assert len(told["per_rank"]) == 8
    assert main(["memory", "dp=99999999999", "--model", "gpt2-small"]) == 2
    assert "too many to list them; possible is" in capsys.readouterr().err
