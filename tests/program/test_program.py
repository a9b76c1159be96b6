"""Programs: how they are printed, their properties, and JSON in both directions."""

import json
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given

from minipar import Plan, Program, ProgramError, verify
from minipar.program import Instruction, Op, Value, grad, grad_output, optimizer_state, output, param, saved, span
from tests.fuzz.verify_mutants import valid
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


@given(programs(shared=True, offload=True))
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


# Errors of programs as text -------------------------------------------------------------------------------------------


def text() -> dict:
    return json.loads(json.dumps(Plan(pp=2, microbatches=2).compile(layers=4).to_json()))


def test_programs_of_every_kind_are_read_again():
    for program in valid():
        assert Program.from_json(json.loads(json.dumps(program.to_json()))) == program, program.name


NEEDED = ("name", "layers", "microbatches", "steps", "mesh", "groups", "receives_ahead", "state", "ranks", "values")


@pytest.mark.parametrize("name", NEEDED)
def test_what_is_missing_is_named(name):
    data = text()
    del data[name]
    with pytest.raises(ProgramError, match=rf"^{name}: is missing; a program has name, layers"):
        Program.from_json(data)


LISTS = ("chunks", "final", "serving", "staleness", "carries", "edges")
FIELDS = [
    *[(name, odd) for name in (*NEEDED, *LISTS) for odd in (7.5, ["x"])],
    ("name", None), ("layers", "4"), ("layers", -1), ("groups", [[[0], [8]]]), ("groups", [["x", [8], 0]]),
    ("mesh", [["dp"]]), ("state", [[99]]), ("state", [[-1]]), ("values", [["param"]]), ("clip", "1"), ("precision", 32),
    ("compress", "zip"), ("room", "much"), ("in_flight", 0), ("slices", "x"), ("slices", None), ("selective", 1),
    ("folder", None), ("serving", [1, 2, 3]), ("staleness", [1, 2, 3, 4, 5, 6]), ("edges", [[0, 1, 2]]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "odd"), FIELDS)
def test_an_odd_field_is_named(name, odd):
    told = (name, "contract") if name == "staleness" else (name,)
    with pytest.raises(ProgramError) as caught:
        Program.from_json({**text(), name: odd})
    assert caught.value.reason.partition(":")[0].partition("=")[0] in told
    assert "\n" not in caught.value.reason


INSTRUCTIONS = [
    (0, "X", "must be as Program.to_json writes it"),
    (1, 7, "must be as Program.to_json writes it"),
    (1, "x", "layers=('x',) must be a tuple of whole numbers"),
    (2, None, "microbatch=None must be a whole number"),
    (3, "0", "step='0' must be a whole number"),
    (4, [-1], "must be as Program.to_json writes it"),
    (5, 3, "must be as Program.to_json writes it"),
    (7, 1, "stream=1 must be text"),
    (8, 0.5, "peer=0.5 must be a whole number"),
    (9, ["a"], "group=('a',) must be a tuple of whole numbers"),
    (10, [["SUM", 0]], "must be as Program.to_json writes it"),
]


@pytest.mark.parametrize(("place", "odd", "says"), INSTRUCTIONS)
def test_an_odd_instruction_is_named(place, odd, says):
    data = text()
    data["ranks"][1][2][place] = odd
    with pytest.raises(ProgramError) as caught:
        Program.from_json(data)
    assert "rank 1 instruction 2" in caught.value.reason
    assert says in caught.value.reason


@pytest.mark.parametrize("odd", [None, [], 3, "text"])
def test_something_else_is_refused(odd):
    with pytest.raises(ProgramError, match="must be a dictionary, as Program.to_json gives it"):
        Program.from_json(odd)
