"""Forms as text, their gradients', and what one rank has."""

from __future__ import annotations

import pytest

from minipar import PlanError
from minipar.program.mesh import Mesh
from minipar.sharding.forms import Form, I, P, R, S, U, axes_of, conjugate, cut, local_shape, placement, whole
from minipar.sharding.repartition import path

MESH = Mesh(dp=2, pp=3, tp=4)


@pytest.mark.parametrize(
    "text",
    [
        "S1 on tp",
        "S0 on dp, S2 on tp",
        "R",
        "I",
        "P on tp",
        "S0:3 on tp",
        "R on tp",
        "S0 on dp, P on tp",
        "S1 on dp, S1 on tp",
    ],
)
def test_text_is_read_and_written_alike(text):
    assert str(Form.parse(text, MESH, 3)) == text


def test_axes():
    assert axes_of(MESH) == ("dp", "tp")
    assert str(whole(MESH)) == "I"
    form = Form.parse("S1 on tp", MESH)
    assert (form.on("dp"), form.on("tp"), form.on("ep")) == (I, S(1), I)


def test_dimensions_from_behind():
    assert Form.parse("S-1 on tp", MESH, 3).on("tp") == S(2)
    assert placement("S-2:3", 2) == S(0, 3)


def test_unequal_blocks():
    form = Form.parse("U1 on tp", MESH, 2)
    assert form.on("tp") == U(1)
    assert str(form) == "U1 on tp"
    assert U(1).unequal
    assert not S(1).unequal
    assert conjugate(U(0)) == U(0)
    assert local_shape((10, 3), form, MESH) == (2, 3)  # the mean of 4 ranks
    with pytest.raises(PlanError, match="no way from U1 on tp to S0 on tp; possible are U0 and U1"):
        path(form, Form.parse("S0 on tp", MESH, 2), (12, 4), 4, MESH)
    assert [step.op for step in path(form, Form.parse("U0 on tp", MESH, 2), (10, 3), 4, MESH).steps] == ["all_to_all"]


def test_gradients_lie_in_conjugate_forms():
    assert [conjugate(p) for p in (R, P, I, S(1), S(0, 3))] == [P, R, I, S(1), S(0, 3)]
    form = Form.parse("P on dp, S1 on tp", MESH)
    assert str(form.conjugate()) == "R on dp, S1 on tp"
    assert form.conjugate().conjugate() == form


def test_local_shapes():
    assert local_shape((8, 12), Form.parse("S0 on dp, S1 on tp", MESH), MESH) == (4, 3)
    assert local_shape((8, 12), Form.parse("S0 on dp, S0 on tp", MESH), MESH) == (1, 12)
    assert local_shape((8, 12), Form.parse("P on dp", MESH), MESH) == (8, 12)
    assert local_shape((24, 2), Form.parse("S0:3 on tp", MESH), MESH) == (6, 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("S9 on tp", ["x: form S9", "2 dimensions", "S0 to S1"]),
        ("T on tp", ["'T'", "S0"]),
        ("S0:0 on tp", ["'S0:0'"]),
        ("S0 on xx", ["'xx' is no axis", "dp, tp"]),
        ("S0 on pp", ["'pp' is no axis"]),
        ("S0 on tp, S1 on tp", ["tp is named twice"]),
        ("S0, S1 on tp", ["` on `"]),
    ],
)
def test_text_that_cannot_be_read(text, words):
    with pytest.raises(PlanError) as caught:
        Form.parse(text, MESH, 2, "x")
    assert all(word in str(caught.value) for word in words)


def test_uneven_blocks_are_refused_with_the_nearest_choice():
    with pytest.raises(PlanError) as caught:
        local_shape((6, 8), Form.parse("S0 on tp", MESH), MESH, "linear: weight")
    text = str(caught.value)
    assert "linear: weight: form S0 on tp: dimension 0 has 6 elements" in text
    assert "4 ranks of tp=4" in text
    assert "S0 over 3 ranks or S1 (8 elements) or R (whole)" in text
    with pytest.raises(PlanError, match="in 3 pieces"):
        cut((8, 8), S(0, 3), 2, "tp")
    with pytest.raises(PlanError, match="1 dimension; the nearest choice is S0"):
        cut((8,), S(2), 2)
