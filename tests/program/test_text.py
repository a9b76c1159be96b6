"""Programs as text: everything that `to_json` writes can be read again; errors name a missing or wrong field."""

import json

import pytest

from minipar import Plan, Program, ProgramError
from tests.fuzz.verify_mutants import valid


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
    (9, ["a"], "group=('a',) must be a tuple of ranks"),
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
