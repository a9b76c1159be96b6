"""Plans as TOML files: what is written, that it is stable, and what errors say; and words that only commands read."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest

from minipar import Forward, Plan, PlanError, schedule
from minipar.cli import main
from minipar.program import collectives
from minipar.strategies import draft, plan_file
from minipar.strategies.micro_batch_size import without_micro_batch_size
from minipar.strategies.schedules import registry
from tests.strategies.test_exclusions import OTHER

PLANS = [
    "",
    "pp=4 microbatches=8 split=7,7,6,6 schedule=1f1b",
    "dp=3 pp=2 microbatches=8 clip=1.5 bucket=7,3 checkpoint=3, offload=optimizer,activations zero=1 accumulate=2",
    "dp=2 zero=3 reduce=step prefetch=2 precision=bf16 offload=parameters offload_to=disk offload_folder=/tmp/a",
    "dp=4 sync=ps mode=k-of-n:2/4 servers=2 on_death=continue",
    "pp=2 place=0,1,0,1,1,0 bucket=0.5 dp=2 checkpoint=64MiB",
    "pp=2 schedule=terapipe slices=4,3,2,2",
    "tp=2 sequence_parallel=true annotations=*.mlp.0=S-1@tp;*.mlp.2=P@tp,S0@dp",
    "dp=2 compress=topk:0.01 overlap=none",
    "dp=2 clip=1e-5",
]


@pytest.fixture(autouse=True)
def own_things(monkeypatch):
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(registry, "_schedules", dict(registry._schedules))
    monkeypatch.setattr(draft, "_passes", {})
    monkeypatch.setattr(collectives, "_own", {})


def test_the_file_of_a_plan(tmp_path):
    plan = Plan(tp=2, microbatches=8, annotations={"*.mlp.0": "S-1 on tp", "*.mlp.2": "P on tp"})
    plan.save(tmp_path / "plan.toml")
    assert (tmp_path / "plan.toml").read_text() == (
        f"# A plan of minipar {plan_file.VERSION}. Keys that are not here have their defaults: see `minipar keys`.\n"
        "# ranks that share each layer: they divide its operators (tensor parallelism)\n"
        "tp = 2\n"
        "# micro-batches of each replica and round\n"
        "microbatches = 8\n"
        "\n"
        "# the forms of some operators' outputs or of parameters, by patterns of their names; those of all others "
        "follow. Default: of the names that the presets know, or what the operators allow\n"
        "[annotations]\n"
        '"*.mlp.0" = "S-1 on tp"\n'
        '"*.mlp.2" = "P on tp"\n'
    )


@pytest.mark.parametrize("words", PLANS)
def test_what_was_loaded_is_saved_with_the_same_bytes(words, tmp_path):
    plan, first, second = Plan.parse(words), tmp_path / "a.toml", tmp_path / "b.toml"
    plan.save(first)
    found = Plan.load(first)
    assert found == plan
    found.save(second)
    assert second.read_bytes() == first.read_bytes()
    names = [line.split(" = ")[0] for line in first.read_text().splitlines() if " = " in line and line[0] not in '#"']
    order = [field.name for field in fields(Plan)]
    assert names == sorted(names, key=order.index)
    assert set(names) == {f.name for f in fields(Plan) if getattr(plan, f.name) != f.default} - {"annotations"}


def test_every_key_is_written_and_read():
    tried = set()
    for key, values in OTHER.items():
        for value in values:
            for others in ({}, {"tp": 2}, {"tp": 2, "microbatches": 2}, {"dp": 2, "zero": 3},
                               {"dp": 2, "sync": "ps"}, {"schedule": "interleaved"},
                           {"schedule": "chimera", "pp": 2}, {"schedule": "terapipe"}, {"schedule": "ampnet"},
                           {"offload": "optimizer", "offload_to": "disk"}, {"pp": 2}, {"pp": 4},
                           {"dp": 2, "overlap": "none"}):  # fmt: skip
                try:
                    plan = Plan.parse({**others, key: value})
                except PlanError:
                    continue
                if getattr(plan, key) != getattr(Plan(), key) and key not in ("extra_passes",):
                    assert Plan.parse(str(plan)) == plan
                    content = plan_file.text(plan)
                    assert plan_file.read(content, "a file") == plan_file.read(content + "\n", "a file") == plan
                    tried.add(key)
    assert tried >= set(OTHER) - {"extra_passes"}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("pp = 2\nddp = 3\n", "f.toml, line 2: plan key 'ddp': unknown; possible are dp, pp"),
        ("\n\npp = 'two'\n", "f.toml, line 3: pp=two: must be a whole number of at least 1"),
        ("zero = 7", "f.toml, line 1: zero=7: must be a whole number from 0 to 3"),
        ("pp = = 2", "f.toml: is no TOML (Invalid value (at line 1, column 6)); possible are lines such as pp = 2"),
        ("pp = 2\npp = 3", "f.toml: is no TOML (Cannot overwrite a value"),
        ("[pp]\na = 1", "f.toml, line 1: [pp] is a table; possible are lines such as pp = 2"),
        ("clip = 1\noverlap = 'priority'", "f.toml, line 2: overlap=priority: not together with clip=1.0"),
        ("[annotations]\n'*.0' = 'S0 on tp'", "f.toml, line 1: annotations=*.0=S0@tp: is of ranks that share layers"),
        ("tp = 2\n[annotations]\n'*.0' = 3", "f.toml, line 2: annotations={'*.0': 3}: must be none, or patterns of"),
    ],
)
def test_errors_name_the_file_and_the_line(content, says):
    with pytest.raises(PlanError) as caught:
        plan_file.read(content, "f.toml")
    assert caught.value.reason.startswith(says)


def test_files_that_cannot_be_read_or_written(tmp_path):
    with pytest.raises(PlanError, match="none.toml: cannot be read"):
        Plan.load(tmp_path / "none.toml")
    with pytest.raises(PlanError, match="cannot be written"):
        Plan().save(tmp_path / "no folder" / "plan.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(PlanError, match="is no text"):
        Plan.load(tmp_path / "bytes.toml")


def test_what_is_your_own_is_refused_with_the_way_out(tmp_path):
    @schedule("mine")
    def mine(rank, ranks, microbatches):
        yield Forward(0)

    with pytest.raises(PlanError) as caught:
        Plan(pp=2, schedule="mine").save(tmp_path / "plan.toml")
    assert "schedule=mine: is your own" in caught.value.reason
    assert "replace(Plan.load(path), schedule='mine')" in caught.value.reason
    assert not (tmp_path / "plan.toml").exists()

    @collectives.collective("my-sum")
    def moves(setting, rank):
        return
        yield

    with pytest.raises(PlanError, match="algorithm=my-sum: is your own"):
        plan_file.text(Plan(dp=2, algorithm="my-sum", overlap="none"))


def test_annotations_are_a_key_like_others():
    words = "tp=2 annotations=*.mlp.0=S-1@tp;*.mlp.2=P@tp,S0@dp"
    plan = Plan.parse(words)
    assert dict(plan.annotations) == {"*.mlp.0": "S-1 on tp", "*.mlp.2": "P on tp, S0 on dp"}
    assert Plan.parse(str(plan)) == plan == Plan(tp=2, annotations=dict(plan.annotations))
    assert words.split()[1] in str(plan)
    assert hash(plan) == hash(Plan.parse(words))
    for wrong in ("*.0", "*.0=", "=S0 on tp", {"*.0": ""}, {3: "P"}, [("a",)], 7, {"a b": "P"}, {"a": "P;Q"}):
        with pytest.raises(PlanError, match="annotations=.*must be none, or patterns"):
            Plan(tp=2, annotations=wrong)
    with pytest.raises(PlanError, match="'a' is there twice"):
        Plan(tp=2, annotations="a=P@tp;a=P@tp")
    with pytest.raises(PlanError, match="equal layers have no names"):
        plan.compile(layers=4)


# Plans with micro_batch_size=b, as searches print them ----------------------------------------------------------------


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
    assert without_micro_batch_size(text, batch) == (words, rows)
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
        without_micro_batch_size(text, batch)


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
