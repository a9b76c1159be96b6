"""Forms: the letters, the collectives between them, and programs whose layers take and give them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from minipar import Plan, ProgramError, verify
from minipar.program import Forms, Group, Op, Program, grad_output, output
from minipar.program.forms import (
    along,
    changed_axis,
    collective_of,
    in_words,
    is_form,
    letter_of,
    letters,
    needed,
    on_axes,
    pairs,
    parts_of,
    rows_left,
    shard_of,
    steps,
    text_of,
)
from minipar.program.shape import Shape


def test_letters_of_one_tensor_and_of_several() -> None:
    assert letters("P") == ("P",)
    assert letters("R,S1,P") == ("R", "S1", "P")
    assert letters("") == ()
    assert letters("", 2) == ("R", "R")
    assert text_of(("R", "R")) == ""
    assert text_of(("R", "P")) == "R,P"
    assert text_of(letters("R,S1,P")) == "R,S1,P"


def test_pairs_take_a_whole_value_to_have_as_many_tensors_as_the_other_side() -> None:
    assert pairs("R,P", "") == [("R", "R"), ("P", "R")]
    assert pairs("", "S0,R") == [("R", "S0"), ("R", "R")]
    assert pairs("", "") == []
    with pytest.raises(ValueError, match="zip"):
        pairs("P,P", "R,S0,S1")


@pytest.mark.parametrize("form", ["", "R", "P", "M", "S0", "S12", "S1:3", "S0:2r", "R,P", "S0,R,M", "N,S0,U1", "U0"])
def test_forms_of_values(form: str) -> None:
    assert is_form(form)
    assert is_form(form, read=True)


@pytest.mark.parametrize("form", ["C0", "C1:3", "R,C1"])
def test_a_shard_of_what_is_whole_is_read_and_never_written(form: str) -> None:
    assert is_form(form, read=True)
    assert not is_form(form)


@pytest.mark.parametrize(
    "form", ["X", "S", "S-1", "SS", "S1:", "S1:r", "S1:3x", "P,", ",", "r", "P1", "S0:3:2", "R P", "U", "U2", "N0"]
)
def test_what_is_no_form(form: str) -> None:
    assert not is_form(form)
    assert not is_form(form, read=True)


def test_which_dimension_is_cut_and_into_how_many_pieces_first() -> None:
    assert shard_of("S1", 4) == (1, 1)
    assert shard_of("S0:3", 4) == (0, 3)
    assert shard_of("S0:2r", 4) == (0, 8)  # two for each of four rows
    assert shard_of("C2:3", 4) == (2, 3)


def test_what_a_node_reads_a_shard_of_is_whole() -> None:
    assert needed("C1") == ""
    assert needed("R,C1") == ""
    assert needed("C0,S1") == "R,S1"
    assert needed("R,P") == "R,P"


def test_a_letter_has_a_part_for_each_axis() -> None:
    assert parts_of("S0/P", 3) == ["S0", "P", "R"]
    assert letter_of(["S0", "R", "R"]) == "S0"
    assert letter_of(["R", "R"]) == "R"
    assert along("S0/P,R/S1,R", 1) == "P,S1,R"
    assert along("S0,R", 1) == ""
    assert on_axes(["", "P,R"]) == "R/P,R"
    assert on_axes([along("S0/P,R/S1", k) for k in range(2)]) == "S0/P,R/S1"
    assert is_form("S0/P,R/S1:2r")
    assert not is_form("S0/C1")
    assert is_form("S0/C1", read=True)
    assert needed("S1/C1,R/C1") == "S1,R"
    assert in_words("S0/P") == "a shard of dimension 0 by a partial sum"


def test_axes_change_one_after_the_other_the_last_one_first() -> None:
    assert steps("S1/S1", "") == [(Op.ALL_GATHER, "S1"), (Op.ALL_GATHER, "")]
    assert steps("S1/P", "S2/R") == [(Op.ALL_REDUCE, "S1"), (Op.ALL_TO_ALL, "S2")]
    assert steps("S1/S2,R/P", "S1/R,R/R") == [(Op.ALL_GATHER, "S1,R/P"), (Op.ALL_REDUCE, "S1,R")]
    assert changed_axis("S1/P", "S1") == 1
    assert changed_axis("S1/P", "R/R") is None
    assert changed_axis("S1/P", "S1/P") is None


def test_an_axis_cuts_before_those_that_cut_what_it_leaves() -> None:
    """The last axis first would give ranks other parts than those that the form promises."""
    assert steps("P/P", "S1/S1") == [(Op.REDUCE_SCATTER, "S1/P"), (Op.REDUCE_SCATTER, "S1/S1")]
    assert steps("S1/P", "R/S1") == [(Op.ALL_GATHER, "R/P"), (Op.REDUCE_SCATTER, "R/S1")]
    assert steps("P/S1", "S1/S1") == [(None, "S1/S1")]
    assert steps("P/S1", "S2/S1") == [(Op.REDUCE_SCATTER, "S2/S1")]


def test_rows_that_are_left_to_an_axis() -> None:
    assert rows_left("S0/S0:1r", 1, (2, 2), 12) == 6  # the first axis has half of the rows
    assert rows_left("S1/S0:1r", 1, (2, 2), 12) == 12
    assert rows_left("S0/S0", 1, (2, 2), 12) == 12
    assert rows_left("S0:1r", 0, (2, 2), 12) == 12


def test_words() -> None:
    assert in_words("") == "whole"
    assert in_words("P") == "a partial sum"
    assert in_words("M") == "a partial maximum"
    assert in_words("S1") == "a shard of dimension 1"
    assert in_words("R,P") == "(whole, a partial sum)"
    assert in_words("N,U1") == "(counts of unequal shards, an unequal shard by dimension 1 of its counts)"


@pytest.mark.parametrize(
    ("before", "after", "op"),
    [
        ("P", "R", Op.ALL_REDUCE),
        ("M", "R", Op.ALL_REDUCE),
        ("S0", "R", Op.ALL_GATHER),
        ("S1:3", "R", Op.ALL_GATHER),
        ("P", "S1", Op.REDUCE_SCATTER),
        ("S0", "S1", Op.ALL_TO_ALL),
        ("S0:3", "S0", None),  # what two ranks have in common has other sizes: gathered, and read as C0
        ("U0", "U1", Op.ALL_TO_ALL),
        ("S0", "N", Op.ALL_GATHER),
        ("U0", "R", None),
        ("S0", "U0", None),
        ("P", "U0", None),
        ("M", "S1", None),  # first to a whole maximum, of which each rank takes its shard
        ("R", "S1", None),  # nothing is sent: a node reads C1
        ("R", "P", None),
        ("S1", "P", None),
        ("P", "M", None),
    ],
)
def test_collectives_between_two_forms(before: str, after: str, op: Op | None) -> None:
    assert collective_of(before, after) is op


def test_steps_take_tensors_that_need_the_same_collective_together() -> None:
    assert steps("", "") == steps("P", "P") == []
    assert steps("P", "") == [(Op.ALL_REDUCE, "")]
    assert steps("R,P", "") == [(Op.ALL_REDUCE, "")]
    assert steps("P,P", "") == [(Op.ALL_REDUCE, "")]
    assert steps("P,S1", "") == [(Op.ALL_REDUCE, "R,S1"), (Op.ALL_GATHER, "")]
    assert steps("S1,P,S0", "R,S1,R") == [(Op.ALL_GATHER, "R,P,R"), (Op.REDUCE_SCATTER, "R,S1,R")]
    assert steps("S0,R", "S1,R") == [(Op.ALL_TO_ALL, "S1,R")]
    assert steps("", "S1") == [(None, "S1")]
    assert steps("S0,S0,U0", "N,S0,U1") == [(Op.ALL_GATHER, "N,S0,U0"), (Op.ALL_TO_ALL, "N,S0,U1")]


# programs ------------------------------------------------------------------------------------------------------------

# A node whose output is sharded, one that reads a shard of a whole value and writes a partial sum, and a whole one.
FORMS = (
    Forms(writes="S1", grad_reads="S1"),
    Forms(reads="S1", writes="P", grad_reads="C0", grad_writes="S1"),
    Forms(reads="S0", writes="", grad_writes="S0"),
)
GROUPS = (Group((0,), (8,), form="S"), Group((1,), (8,), 4, "P"), Group((2,), (8,)))


def program(words: str = "tp=2", steps: int = 1) -> Program:
    shape = Shape(3, GROUPS, "three nodes", names=("up", "down", "sum"), forms=FORMS, nodes=(1, 1, 1))
    return Plan.parse(words).compile(shape, steps=steps)


def test_the_form_of_a_value_is_that_of_the_layer_that_writes_or_reads_it() -> None:
    found = program()
    assert found.form_of(output(0, 0), (0,), written=True) == "S1"
    assert found.form_of(output(0, 0), (1,), written=False) == "S1"
    assert found.form_of(output(1, 0), (0, 1), written=True) == "P"
    assert found.form_of(output(1, 0), (2,), written=False) == "S0"
    assert found.form_of(grad_output(1, 0), (2,), written=True) == "S0"
    assert found.form_of(grad_output(1, 0), (1,), written=False) == ""  # C0: each rank takes its shard of the whole
    assert found.form_of(grad_output(0, 0), (1,), written=True) == "S1"
    assert found.form_of(grad_output(0, 0), (0,), written=False) == "S1"


def test_where_forms_differ_a_collective_stands_and_nowhere_else() -> None:
    row = [str(ins) for ins in program().ranks[0] if ins.group]
    assert row == [
        "REDUCE_SCATTER output(1)[P] mb0 -> S0 over 0,1",
        "ALL_GATHER grad_output(1)[S0] mb0 -> R over 0,1",
        "ALL_REDUCE 1 over 0,1",  # of the group of which every rank makes a part of the gradient
    ]


def test_ranks_that_share_layers() -> None:
    found = program("tp=2 pp=3 dp=2")
    assert found.sharing == 2
    assert [found.shard(rank) for rank in range(12)] == [0, 1] * 6
    assert found.sharers(7) == (6, 7)
    assert [found.replica(rank) for rank in range(12)] == [0] * 6 + [1] * 6
    plain = Plan(pp=2).compile(layers=2)
    assert (plain.sharing, plain.shard(1), plain.sharers(1)) == (1, 0, (1,))


def test_layers_are_called_by_their_names() -> None:
    assert program().title(1) == "1 (down)"
    assert replace(program(), names=()).title(1) == "1"


@pytest.mark.parametrize("words", ["tp=2", "tp=4 microbatches=2 checkpoint=2", "tp=2 pp=3 dp=2 zero=2 clip=1"])
def test_a_program_with_forms_as_json_and_back(words: str) -> None:
    found = program(words, steps=2)
    data = json.loads(json.dumps(found.to_json()))
    again = Program.from_json(data)
    assert again == found
    assert again.forms == FORMS
    assert again.names == ("up", "down", "sum")
    assert [group.form for group in again.groups] == ["S", "P", ""]
    assert again.groups[1].frozen == 4
    verify(again)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("forms", (Forms(writes="X"), *FORMS[1:]), "forms="),
        ("forms", (Forms(reads="S"), *FORMS[1:]), "forms="),
        ("forms", ("P", *FORMS[1:]), "forms="),
        ("forms", FORMS[:2], "forms: of 2 layers, but the program has 3"),
        ("edges", ((0, 1), (1, 2), (0, 2)), "forms: of layers in a row only"),
        ("groups", (GROUPS[0]._replace(form="R"), *GROUPS[1:]), "groups="),
        ("names", ("up", 1, "sum"), "names="),
    ],
)
def test_fields_with_impossible_values_are_refused(field: str, value: object, says: str) -> None:
    with pytest.raises(ProgramError) as caught:
        verify(replace(program(), **{field: value}))
    assert says in str(caught.value)
