"""Every key of a plan has an effect, or is refused by name, in each of the three ways to make a program."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from minipar import Plan, PlanError, Program

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
        (
            "dp=2 schedule=pipedream sync=ps",
            "sync=ps: not together with schedule=pipedream (parameter servers serve re",
        ),
        ("pp=2 schedule=pipedream bucket=none", "bucket=none: not together with schedule=pipedream (one replica su"),
        ("pp=2 schedule=ampnet compress=bf16", "compress=bf16: not together with schedule=ampnet"),
        ("dp=2 mode=async", "mode=async: is of parameter servers; possible is sync=ps"),
    ],
)
def test_what_has_nothing_to_act_upon_is_refused(words: str, says: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.parse(words)
    assert str(caught.value).startswith(says)
