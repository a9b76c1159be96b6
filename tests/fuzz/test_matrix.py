"""Keys that go together, on real ranks beside plain torch: chosen plans, and parts of the matrix (`matrix.py`)."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path

import pytest

from minipar import Plan
from minipar.strategies.exclusions import EXCLUSIONS
from tests.fuzz import matrix
from tests.fuzz.trial import trial

PLANS = [  # each has what once was refused, or what is easy to get wrong
    # the slices of ZeRO are those of all copies of a stage
    "dp=2 pp=2 schedule=chimera microbatches=4 zero=1 clip=0.1",
    "pp=4 schedule=dualpipe microbatches=8 zero=1 bucket=0.0001",
    "dp=2 pp=2 schedule=dualpipe microbatches=4 zero=1 offload=optimizer checkpoint=1",
    "pp=4 schedule=chimera microbatches=8 doubling=true zero=1 overlap=none host_layers=0,1",
    # replicas that train alone
    "dp=2 pp=2 local_steps=2 microbatches=4 schedule=chimera clip=0.1",
    "dp=2 local_steps=2 offload=optimizer,parameters offload_to=disk",
    "dp=2 local_steps=2 host_layers=0,2 clip=0.1",
    "dp=2 pp=2 local_steps=2 schedule=terapipe slices=3",
    # 16 bits
    "dp=2 zero=2 compress=fp16 microbatches=2",
    "dp=2 pp=2 microbatches=2 overlap=priority compress=bf16 host_layers=0 bucket=0.0001",
    "dp=2 compress=topk:0.5 offload=optimizer,parameters",
    "dp=2 pp=2 zero=1 compress=topk:1 microbatches=4 schedule=chimera",
    "dp=2 zero=3 compress=powersgd:2 microbatches=2 offload=optimizer,parameters",
    # by priority
    "dp=2 pp=2 microbatches=2 overlap=priority offload=optimizer,activations bucket=auto",
    "dp=2 pp=2 microbatches=2 overlap=priority host_layers=0,5 offload=optimizer offload_to=disk",
    "dp=2 pp=2 microbatches=2 overlap=priority offload=parameters bucket=0.0001",
    "dp=2 microbatches=2 overlap=priority offload=optimizer,parameters prefetch=2 host_layers=1",
    "dp=2 pp=2 overlap=priority compress=topk:1 microbatches=2",
    "dp=2 tp=2 overlap=priority zero=2 bucket=0.0001 microbatches=2",
    # an algorithm of one's choice
    "dp=2 pp=2 microbatches=2 overlap=none algorithm=ring zero=1 clip=0.1",
    "dp=4 overlap=none algorithm=halving-doubling zero=3 host_layers=1 bucket=none",
    "dp=4 algorithm=ring microbatches=2 bucket=0.0001",
    "dp=4 algorithm=ring overlap=priority zero=2 bucket=0.0001 check=true",
    "dp=2 pp=2 algorithm=tree schedule=pipedream microbatches=4",
    # activations that are away, or run again
    "pp=2 schedule=zb-h1 microbatches=4 offload=activations",
    "pp=2 schedule=dualpipe-v microbatches=4 offload=activations,parameters checkpoint=1",
    "pp=4 schedule=terapipe slices=4,2,1,1 microbatches=2 offload=activations checkpoint=1",
    "pp=2 schedule=zb-v microbatches=4 checkpoint=60KiB",
    "pp=2 schedule=interleaved microbatches=4 checkpoint=60KiB",
    # slices
    "pp=4 schedule=seq1f1b slices=2 microbatches=4 checkpoint=1 offload=activations",
    "dp=2 pp=2 schedule=seq1f1b slices=4,3,1 microbatches=2 zero=3",
    "dp=2 pp=2 schedule=terapipe slices=3 host_layers=0,4,5 microbatches=2",
    "dp=2 pp=2 schedule=seq1f1b slices=2 microbatches=2 place=0,1,1,0,1,0",
    # layers on the host
    "dp=2 pp=2 zero=3 host_layers=0,2,5 microbatches=2 clip=0.1",
]
BRANCHES = [
    "dp=2 pp=2 place=branches checkpoint=1 microbatches=3",
    "pp=2 checkpoint=1 schedule=zb-h1 microbatches=3 offload=activations",
    "pp=4 place=branches checkpoint=2 microbatches=2 schedule=gpipe",
    "pp=2 place=branches host_layers=1,2,4 microbatches=2 offload=activations",
]
PARTS = 800
THREES = ("dp=2", "zero=1", "zero=3", "clip=0.1", "offload=optimizer", "compress=bf16", "local_steps=2")


@pytest.mark.many(14)
@pytest.mark.parametrize("words", PLANS)
def test_a_plan_equals_plain_torch(clusters, words: str) -> None:
    short = "compress=bf16" in words or "compress=fp16" in words  # numbers of 16 bits
    assert trial(words, clusters).kind == ("near" if short else "equal")


@pytest.mark.many(4)
@pytest.mark.parametrize("words", BRANCHES)
def test_a_plan_of_branches_equals_plain_torch(clusters, words: str) -> None:
    assert trial(words, clusters, "branches").kind == "equal"


@pytest.mark.many(PARTS)
@pytest.mark.parametrize("part", range(PARTS))
def test_a_part_of_the_matrix(clusters, part: int) -> None:
    """Every so many-th pair of values. (`make soak` runs the whole matrix by its command, and threes.)"""
    for pair in list(matrix.pairs())[part::PARTS]:
        found = matrix.tried(pair, clusters)
        assert found.kind != matrix.FAILED, f"{found.words}: {found.text}"


def test_the_matrix_follows_the_table_of_keys() -> None:
    """Each key is tried, and a choice of each row of exclusions is among what is tried."""
    tried = {choice.key for choice in matrix.choices()}
    assert tried == {field.name for field in fields(Plan)} - set(matrix.BY_HAND)
    made = []
    for choice in matrix.choices():
        words = matrix.plan_of([choice])
        assert isinstance(words, str) or words.kind == matrix.OTHER  # (branches alone need a model that has them)
        made += [Plan.parse(words)] if isinstance(words, str) else []
    two = (
        "dp=2 overlap=priority bucket=auto",
        "sync=ps overlap=priority",
        "schedule=pipedream",
        "sync=ps schedule=pipedream-2bw",
    )
    for words in two:  # (choices that two keys make)
        made.append(Plan.parse(words))
    for row in EXCLUSIONS:
        for side in (row.one, row.other):
            assert any(side.chosen(plan) for plan in made), side.words


def test_a_refusal_is_known_by_its_row() -> None:
    one = {str(choice): choice for choice in matrix.choices()}
    for pair, kind in (
        (("zero=2", "local_steps=2"), matrix.FUNDAMENTAL),
        (("schedule=naive", "in_flight=2"), matrix.OTHER),
    ):
        found = matrix.plan_of([one[word] for word in pair])
        assert isinstance(found, matrix.Found)
        assert found.kind == kind
    assert isinstance(matrix.plan_of([one["zero=2"], one["compress=bf16"]]), str)


def test_wide_plans_have_all_threes_in_the_end() -> None:
    some = [choice for choice in matrix.choices() if str(choice) in THREES]
    covering = matrix.Threes(some)
    threes = set(covering.left)
    drawn = []
    while (plan := covering.draw()) is not None:
        drawn.append(plan[0])
        kind = matrix.OTHER if len(drawn) <= 2 else matrix.RUN  # (the first is refused, and then a three of it)
        covering.settle(matrix.Found(plan[0], kind, plan[1], "dp=2: no"))
    assert len(drawn) < len(threes)
    assert len(drawn[0]) > 3
    assert len(drawn[1]) == 3
    assert set(drawn[1]) < set(drawn[0])
    assert covering.refused == {frozenset(drawn[1]): "dp=2: no"}
    assert not any(set(drawn[1]) <= set(plan) for plan in drawn[2:])
    assert covering.covered | set(covering.refused) == threes
    assert not covering.covered & set(covering.refused)
    assert covering.share == 1


def test_what_was_said_of_refused_threes_is_counted() -> None:
    said = [
        "refused slices=4: 'a|b' has 3 tokens, of 2 ranks; possible is 5",
        "slices=2: 'c' has 1 tokens, of 2 ranks",
        "no",
    ]
    assert matrix._reasons(said) == [
        "| threes | refused with, for example |", "|---:|---|",
        "| 2 | slices=2: 'c' has 1 tokens, of 2 ranks |", "| 1 | no |",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("wanted", "base"),
    [
        (("tp=2", "schedule=chimera", "annotations=*.mlp.0=S-1@tp"), "pp=2"),
        (("tp=2", "compress=powersgd:1"), "dp=2"),
    ],
)
def test_a_base_is_found_in_which_all_choices_act(wanted: tuple[str, ...], base: str) -> None:
    words = matrix.plan_of([choice for choice in matrix.choices() if str(choice) in wanted])
    assert isinstance(words, str)
    assert base in words.split()


def test_a_three_that_fails_is_neither_run_nor_refused() -> None:
    covering = matrix.Threes([choice for choice in matrix.choices() if str(choice) in THREES])
    plan = covering.draw()
    assert plan is not None
    for some in (plan[0], plan[0][:3]):
        covering.settle(matrix.Found(some, matrix.FAILED, plan[1]))
    assert not covering.covered
    assert not covering.refused
    assert not covering.alone
    assert frozenset(plan[0][:3]) in covering.left


def test_a_section_of_a_page_takes_the_place_of_the_one_with_its_title() -> None:
    page = "# Keys\n\n| a |\n\n# Run\n\nold\n\n## and its part\n\n# Predicted\n\nkept\n"
    assert matrix.with_section(page, "# Run\n\nnew") == "# Keys\n\n| a |\n\n# Run\n\nnew\n\n# Predicted\n\nkept\n"
    assert matrix.with_section(page, "# Keys\n\nb").startswith("# Keys\n\nb\n\n# Run\n\nold\n")
    assert matrix.with_section(page, "# Threes\n\nnew") == f"{page}\n# Threes\n\nnew\n"


def test_a_run_of_one_key_leaves_the_pairs_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, committed = tmp_path / "page.md", Path(__file__).parents[2] / "docs" / "combinations.md"
    page.write_text(committed.read_text())
    one = next(pair for pair in matrix.pairs() if isinstance(matrix.plan_of(pair), matrix.Found))
    monkeypatch.setattr(matrix, "pairs", lambda: iter([one]))
    monkeypatch.setattr(sys, "argv", ["matrix", "--with", one[0].key, "--threes", "0", "--write", str(page)])
    assert matrix.main() == 0
    assert page.read_text() == committed.read_text()
