"""Programs: how they are printed, their properties, and JSON in both directions."""

import json
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given

from minipar import Plan, Program, verify
from minipar.program import Instruction, Op, Value, grad, grad_output, optimizer_state, output, param, saved, span
from tests.interpreters import compiled, programs, shape


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ((), ""),
        ((3,), "3"),
        ((3, 4), "3:5"),
        ((0, 3, 4), "0,3:5"),
        ((2, 1, 0), "2,1,0"),
        ((0, 1, 2, 5, 7, 8), "0:3,5,7:9"),
    ],
)
def test_layer_numbers_are_printed_short(layers, text):
    assert span(layers) == text


def test_instructions_print_on_one_line():
    program = compiled("pp=2 dp=2 microbatches=2 bucket=flat", 6)
    assert [str(ins) for ins in program.ranks[0]] == [
        "F 0:3 mb0",
        "SEND output(2) mb0 -> 1",
        "F 0:3 mb1",
        "SEND output(2) mb1 -> 1",
        "RECV grad_output(2) mb0 <- 1",
        "B 0:3 mb0",
        "RECV grad_output(2) mb1 <- 1",
        "B 0:3 mb1",
        "ALL_REDUCE 2,1,0 over 0,2",
        "STEP 0:3",
    ]
    assert str(Instruction(Op.SEND, (1,), 0, 0)) == "SEND 1 mb0"  # of hand, and wrong, but it prints


def test_values_print_as_in_the_text_books():
    assert str(output(3, 2)) == "output(3) mb2"
    assert str(grad_output(3, 2)) == "grad_output(3) mb2"
    assert str(saved(0, 0)) == "saved(0) mb0"
    assert [str(v) for v in (param(1), grad(1), optimizer_state(1))] == ["param(1)", "grad(1)", "optimizer_state(1)"]


def test_model_state_belongs_to_no_microbatch_and_no_step():
    assert param(2) == Value("param", 2, -1, -1)
    assert output(2, 1, 3) == Value("output", 2, 1, 3) != output(2, 1, 2)


def test_a_program_as_text():
    program = compiled("pp=2 microbatches=2", 2)
    text = str(program).split("\n")
    assert text[0] == "program dp=1 pp=2 schedule=1f1b microbatches=2: 2 ranks, 18 instructions"
    assert text[1:3] == ["rank 0: layers 0, 9 instructions", "     0  F 0 mb0"]
    assert program.text(rank=1, limit=2).split("\n")[1:] == [
        "rank 1: layers 1, 9 instructions", "     0  RECV output(0) mb0 <- 0", "     1  F 1 mb0", "  ... 7 more",
    ]  # fmt: skip
    assert repr(program) == "<Program 'dp=1 pp=2 schedule=1f1b microbatches=2': 2 ranks, 18 instructions>"
    assert len(program) == 18


def test_a_program_never_changes():
    program = compiled("pp=2", 2)
    with pytest.raises(FrozenInstanceError):
        program.ranks = ()
    with pytest.raises(AttributeError):
        program.ranks[0][0].microbatch = 3
    before = program.ranks
    other = program.with_rank(1, [])
    assert program.ranks is before
    assert other.ranks == (before[0], ())
    assert other.state == program.state
    assert {program: 1}[compiled("pp=2", 2)] == 1  # equal by value, and a key


def test_what_a_program_knows_of_itself():
    program = compiled("pp=2 dp=3", shape(4, tied=[(0, 3)], frozen=[0]))
    assert program.replicas == 3
    assert [program.replica(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]
    assert program.placement == ((0, 1), (2, 3)) * 3
    assert program.groups_of_layer == ((0, 4), (1,), (2,), (3, 4))
    assert program.first_trainable == 0  # by the tied set
    assert compiled("", shape(4, frozen=[0, 1])).first_trainable == 2
    assert compiled("", shape(2, frozen=[0, 1])).first_trainable == 2


@given(programs(shared=True))
def test_json_gives_an_equal_program(program):
    text = json.dumps(program.to_json())
    again = Program.from_json(json.loads(text))
    assert again == program
    assert again.name == program.name
    verify(again)


def test_values_are_written_once_in_json():
    data = Plan(pp=2, microbatches=2).compile(layers=4).to_json()
    assert data["format"] == "minipar-program/1"
    assert len({tuple(v) for v in data["values"]}) == len(data["values"])
