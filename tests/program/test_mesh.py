"""Mesh: ranks and coordinates determine each other, and verify checks programs with them."""

from itertools import product

import pytest

import minipar
from minipar import Mesh, Plan, PlanError
from minipar.program.mesh import AXES


@pytest.mark.parametrize("sizes", [{"dp": 2, "pp": 3}, {"dp": 3, "pp": 1, "tp": 2, "ep": 2}, {"pp": 5}, {}])
def test_ranks_are_counted_with_the_last_axis_fastest(sizes):
    mesh = Mesh(**sizes)
    places = list(product(*map(range, sizes.values())))
    assert mesh.size == len(places)
    for rank, place in enumerate(places):
        coordinates = dict(zip(sizes, place, strict=True))
        assert mesh.coordinates(rank) == coordinates
        assert list(mesh.coordinates(rank)) == list(sizes)
        assert mesh.rank(**coordinates) == rank


def test_a_group_differs_along_its_axes_alone():
    mesh = Mesh(dp=2, pp=2, tp=2)
    assert mesh.group(5, "tp") == (4, 5)
    assert mesh.group(5, "pp") == (5, 7)
    assert mesh.group(5, "dp") == (1, 5)
    assert mesh.group(5, "dp", "tp") == (0, 1, 4, 5)
    assert mesh.group(5) == (5,)
    for rank in range(mesh.size):
        own = mesh.coordinates(rank)
        alike = [r for r in range(mesh.size) if mesh.coordinates(r)["pp"] == own["pp"]]
        assert mesh.group(rank, "dp", "tp") == tuple(alike)


@pytest.mark.parametrize(
    ("words", "each", "spanning"),
    [
        ("dp=2 pp=2 tp=2", 4, ("dp",)),  # tp and pp stay inside
        ("dp=2 pp=2 tp=2", 2, ("dp", "pp")),
        ("dp=2 pp=2 tp=2", 1, ("dp", "pp", "tp")),
        ("dp=2 pp=2 tp=2", 8, ()),
        ("pp=2 tp=4", 4, ("pp",)),
        ("dp=2 tp=4", 2, ("dp", "tp")),
        ("dp=2 tp=3", 4, ("dp", "tp")),  # hosts of 4, and ranks 3 4 5 share layers
        ("dp=3 zero=3", 2, ("dp",)),
    ],
)
def test_ranks_that_share_layers_are_on_one_host_first(words, each, spanning):
    plan = Plan.parse(words)
    mesh = Mesh(plan.compile(layers=4).mesh) if plan.tp == 1 else Mesh(dp=plan.dp, pp=plan.pp, tp=plan.tp)
    assert [name for name, _ in mesh] == [name for name in AXES if name in dict(mesh)]
    assert mesh.spanning([f"host {rank // each}" for rank in range(mesh.size)]) == spanning


def test_ranks_without_a_host_are_refused():
    with pytest.raises(PlanError, match="3 hosts of ranks: the mesh has 4 ranks"):
        Mesh(dp=2, pp=2).spanning("aab")


def test_it_is_a_tuple_of_axes():
    mesh = Mesh(dp=2, pp=3)
    assert mesh == (("dp", 2), ("pp", 3)) == Mesh({"dp": 2, "pp": 3}) == Mesh([("dp", 2), ("pp", 3)])
    assert repr(mesh) == "Mesh(dp=2, pp=3)"
    assert mesh.length("tp") == 1
    assert minipar.Mesh is Mesh


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        (lambda mesh: mesh.coordinates(6), "rank=6: must be from 0 to 5"),
        (lambda mesh: mesh.coordinates(-1), "rank=-1: must be from 0 to 5"),
        (lambda mesh: mesh.rank(pp=3), "pp=3: must be from 0 to 2"),
        (lambda mesh: mesh.rank(tp=0), "tp: no axis of the mesh; possible are dp, pp"),
        (lambda mesh: mesh.group(0, "tp"), "tp: no axis of the mesh; possible are dp, pp"),
    ],
)
def test_what_is_not_there_is_refused(ask, told):
    with pytest.raises(PlanError, match=told):
        ask(Mesh(dp=2, pp=3))
