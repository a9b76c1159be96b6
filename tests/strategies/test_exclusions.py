"""The table of choices that exclude each other: two together are refused with a remedy; each alone is possible.
Every key has an effect, or is refused by name, in each way to make a program.
"""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from minipar import Plan, PlanError, Program
from minipar.cli import main
from minipar.strategies.combinations import ROWS, page
from minipar.strategies.exclusions import EXCLUSIONS, Exclusion, KeyValues, check
from minipar.strategies.plan import table

ROOT = Path(__file__).parents[2]

# For every choice of the table, words of a plan that makes it.
MADE = {
    "dp of 2 or more": "dp=2",
    "accumulate of 2 or more": "accumulate=2",
    "split": "split=8",
    "chunks": "chunks=1",
    "place": "place=0,0,0,0,0,0,0,0",
    "bucket": "bucket=2",
    "bucket=flat, 4x or layers": "bucket=flat",
    "bucket=auto": "bucket=auto",
    "overlap=none, priority": "overlap=none",
    "overlap=priority": "overlap=priority",
    "local_steps": "local_steps=2",
    "compress": "compress=bf16",
    "compress=topk, powersgd": "compress=topk:0.5",
    "host_layers": "host_layers=0",
    "offload": "offload=optimizer",
    "offload=optimizer, parameters": "offload=optimizer",
    "pp of 2 or more": "pp=2",
    "zero=1, 2, 3": "zero=1",
    "zero=1, 2": "zero=2",
    "zero=2, 3": "zero=2 dp=2",
    "inference": "inference=true",
    "clip": "clip=1",
    "precision=bf16": "precision=bf16",
    "offload=parameters": "offload=parameters",
    "sync=ps": "sync=ps",
    "slices": "schedule=terapipe slices=2",
    "algorithm": "algorithm=ring",
    "tp of 2 or more": "tp=2",
    "context_parallel of 2 or more": "context_parallel=2",
    "ep of 2 or more": "ep=2",
    "batch_copies of 2 or more": "tp=2 microbatches=2 batch_copies=2",
    "compress=powersgd": "compress=powersgd:1",
    "compress=bf16, fp16": "compress=fp16",
    "compress=topk": "compress=topk:0.5",
    "schedule without flushes": "schedule=pipedream dp=2",
    "schedule without flushes, of one replica": "schedule=pipedream",
    "schedule that decides as it runs": "schedule=ampnet",
    "schedule with copies of a stage": "schedule=chimera pp=2 microbatches=4",
    "schedule that places stages": "schedule=zb-v microbatches=4",
    "schedule of groups of micro-batches": "schedule=interleaved microbatches=4",
}


def words(*choices: KeyValues) -> str:
    """A plan that makes these choices, and no other that an exclusion before theirs would refuse."""
    table = dict(word.split("=") for choice in choices for word in MADE[choice.words].split())
    return " ".join(f"{key}={value}" for key, value in table.items())


def title(row: Exclusion) -> str:
    return f"{row.one.words} with {row.other.words}"


def test_every_choice_is_tried() -> None:
    assert {choice.words for row in EXCLUSIONS for choice in (row.one, row.other)} == set(MADE)


@pytest.mark.parametrize("row", EXCLUSIONS, ids=title)
def test_what_the_table_excludes_is_refused_with_both_keys_and_a_way_out(row: Exclusion) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.parse(words(row.one, row.other)).compile(layers=8)
    told = str(caught.value)
    for choice in (row.one, row.other):
        assert f"{choice.key}=" in told
    assert "not together with" in told
    assert f"; {'fundamental' if row.fundamental else 'not built'}); possible is " in told


@pytest.mark.parametrize("row", EXCLUSIONS, ids=title)
def test_each_of_the_two_alone_is_possible(row: Exclusion) -> None:
    for choice in (row.one, row.other):
        assert choice.chosen(Plan.parse(words(choice))) or choice.after_compile


def test_a_plan_that_is_taken_makes_no_two_excluded_choices() -> None:
    for text in ("dp=2 zero=3 offload=parameters", "pp=2 dp=2 schedule=zb-h1 clip=1", "dp=2 sync=ps mode=async"):
        plan = Plan.parse(text)
        check(plan)
        check(plan, compiled=True)


def test_every_key_has_a_line_of_help_and_a_domain() -> None:
    assert list(table()) == [field.name for field in fields(Plan)]
    for name, row in table().items():
        assert row["help"], name
        assert row["domain"], name
        assert f"    {name} " in str(Plan.__doc__)
    assert table()["zero"]["values"] == [0, 1, 2, 3]
    assert table()["overlap"]["values"] == ["none", "backward", "priority"]


def test_values_that_are_few_are_all_taken() -> None:
    for name, row in table().items():
        for value in row["values"]:
            made = {"schedule": "chimera"} if name == "doubling" else {}
            made |= {"sync": "ps"} if row["needs"] == "sync=ps" else {}
            made |= {"tp": "2"} if row["needs"] == "tp=2" else {}
            made |= {"zero": "2"} if row["needs"].startswith("zero") else {}
            made |= {"offload": "optimizer"} if row["needs"].startswith("offload=") else {}
            assert getattr(Plan.parse({**made, name: value}), name) == value


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["keys"]}
    assert list(rows) == list(table())
    (against,) = [e for e in rows["clip"]["excludes"] if e["key"] == "overlap"]
    assert against["fundamental"] is True
    assert "norm" in against["why"]
    assert main(["keys"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[: len(rows)]] == list(rows)
    assert max(map(len, lines)) <= 100
    assert main(["keys", "zero", "servers"]) == 0
    out = capsys.readouterr().out
    assert "zero=1, 2, 3: not with" in out
    assert "only with sync=ps" in out
    assert main(["keys", "zero", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)["keys"]] == ["zero"]
    assert main(["keys", "zeros"]) == 2
    assert "did you mean zero?" in capsys.readouterr().err


def test_the_page_is_made_from_the_table() -> None:
    written = (ROOT / "docs" / "combinations.md").read_text()
    assert written == page() + "\n"
    assert set(ROWS) <= set(table())
    assert len(written[: written.index("Contradictions:")].splitlines()) <= 45


# Every key has an effect, or is refused by name -----------------------------------------------------------------------

# Of every key a value that is not the default. (Where one is not possible at all, the refusal has to name its key.)
OTHER: dict[str, tuple[str, ...]] = {
    "dp": ("3",),
    "pp": ("3",),
    "tp": ("2",),
    "sequence_parallel": ("true",),
    "context_parallel": ("2",),
    "ep": ("2",),
    "batch_copies": ("2",),
    "schedule": ("gpipe", "interleaved", "chimera", "pipedream", "terapipe"),
    "microbatches": ("4",),
    "accumulate": ("2",),
    "split": ("3,5", "1,2,3,2"),
    "place": ("0,1,0,1,1,1,1,1",),
    "chunks": ("2",),
    "group": ("3",),
    "slices": ("2",),
    "doubling": ("true",),
    "in_flight": ("3",),
    "update_every": ("2",),
    "bucket": ("none", "0.000005", "3x", "2,5"),
    "overlap": ("none", "priority"),
    "local_steps": ("2",),
    "compress": ("bf16",),
    "checkpoint": ("2", "sqrt", "selective", "3,5"),
    "zero": ("1", "2", "3"),
    "reduce": ("step",),
    "prefetch": ("2",),
    "inference": ("true",),
    "clip": ("1",),
    "precision": ("bf16",),
    "offload": ("activations", "optimizer", "parameters"),
    "offload_to": ("disk",),
    "offload_folder": ("/somewhere",),
    "offload_limit": ("1MiB",),
    "host_layers": ("0",),
    "sync": ("ps",),
    "mode": ("async", "ssp:1", "k-of-n:1/2"),
    "servers": ("2",),
    "on_death": ("continue",),
    "algorithm": ("ring",),
    "extra_passes": ("of-nobody",),
    "annotations": ("*.mlp.0=S-1@tp",),
}
WORDS = [
    "dp=2 bucket=flat microbatches=2",
    "pp=2 dp=2 bucket=flat microbatches=2",
    "pp=2 dp=2 bucket=flat microbatches=2 schedule=zb-h1",
    "dp=2 bucket=flat microbatches=2 sync=ps",
    "dp=2 bucket=0.000005 microbatches=2 sync=ps",
    "dp=2 bucket=flat microbatches=2 sync=ps overlap=none",
    "dp=2 bucket=flat microbatches=4 sync=ps schedule=interleaved chunks=2 checkpoint=1",
    "dp=2 bucket=flat microbatches=2 sync=ps mode=ssp:2 servers=2",
    *(f"pp=2 dp=2 bucket=flat microbatches=2 schedule=pipedream{more}" for more in ("", "-2bw", "-vertical")),
    "pp=2 microbatches=2 schedule=pipedream",
    "tp=2 microbatches=2 dp=2 bucket=flat schedule=gpipe",
    "pp=2 microbatches=2 schedule=ampnet",
    "microbatches=2 schedule=pipedream",
]


def elsewhere(table: dict[str, str], key: str, value: str) -> bool:
    """Whether what a key changes is not in the program: `train` asks the plan, or one bucket is complete at the end."""
    late = key == "overlap" and value == "none" and table.get("bucket") == "flat"
    return late or (key == "on_death" and "sync" in table)


def outcome(table: dict[str, str]) -> Program | str:
    """The program of a plan, or why there is none."""
    try:
        return replace(Plan.parse(table).compile(layers=8, steps=4), name="")
    except PlanError as error:
        return str(error)


def test_every_key_is_tried() -> None:
    assert set(OTHER) == {field.name for field in fields(Plan)}


@pytest.mark.many(4)
@pytest.mark.parametrize("words", WORDS)
def test_no_key_is_passed_over(words: str) -> None:
    table = dict(word.split("=") for word in words.split())
    plain = outcome(table)
    assert isinstance(plain, Program)
    for key, values in OTHER.items():
        for value in values:
            if table.get(key) == value or elsewhere(table, key, value):
                continue
            found = outcome(table | {key: value})
            if isinstance(found, str):
                assert key in found, f"{key}={value} is refused without its name: {found}"
            else:
                assert found != plain, f"{key}={value} changes nothing"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("dp=2 reduce=step", "reduce=step: is of sharded gradients; possible is zero=2, zero=3"),
        (
            "dp=2 zero=2 prefetch=2",
            "prefetch=2: is of parameters that come layer by layer; possible is zero=3, offload",
        ),
        ("offload_to=disk", "offload_to=disk: is of what is offloaded; possible is offload=activations, optimizer"),
        ("offload=optimizer offload_folder=/x", "offload_folder=/x: is of what is offloaded to the disk"),
        ("dp=2 mode=async", "mode=async: is of parameter servers; possible is sync=ps"),
    ],
)
def test_what_has_nothing_to_act_upon_is_refused(words: str, says: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.parse(words)
    assert str(caught.value).startswith(says)
