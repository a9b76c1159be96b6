"""The cheapest way between forms, and the way of the gradient."""

from __future__ import annotations

import pytest

from minipar import PlanError
from minipar.costs.alpha_beta import collective_seconds
from minipar.program.mesh import Mesh
from minipar.sharding.forms import Form, I, P, R, S
from minipar.sharding.repartition import backward, letters, matrix, path
from minipar.trace.charts import repartitions

LINE, GRID = Mesh(x=4), Mesh(x=2, y=2)
SHAPE = (1024, 1024)  # of 4 bytes each: 4 MiB

# ms by hand and by an independent program: 1 us, 1 GB/s.
TABLE_OF_A_LINE = """
        R      S0     S1
R     0.000  0.000  0.000
S0    3.149  0.000  0.789
S1    3.149  0.789  0.000
P     6.297  3.149  3.149
"""
TABLE_OF_A_GRID = """
        RR    RS0   S0R   S0S0  S0S1  S1S0
RR    0.000 0.000 0.000 0.000 0.000 0.000
RS0   2.098 0.000 2.098 1.575 1.050 0.000
RP    4.196 2.098 2.099 1.050 1.050 1.050
S0R   2.098 2.098 0.000 0.000 0.000 1.050
S0S0  3.148 2.624 1.050 0.000 0.525 2.099
S0S1  3.148 2.099 1.050 0.525 0.000 2.099
S0P   4.197 3.149 2.099 1.050 1.050 2.099
PR    4.196 2.099 2.098 1.575 1.050 1.050
PP    6.295 4.197 4.197 3.148 3.148 3.148
"""


def form(text, mesh=GRID):
    return Form.parse(text, mesh, 2)


@pytest.mark.parametrize(("mesh", "table"), [(LINE, TABLE_OF_A_LINE), (GRID, TABLE_OF_A_GRID)])
def test_the_matrix(mesh, table):
    header, *lines = table.strip().splitlines()
    found = matrix(SHAPE, 4, mesh)
    row, column = ({letters(f): k for k, f in enumerate(forms)} for forms in (found.rows, found.columns))
    for line in lines:
        name, *numbers = line.split()
        ours = [f"{1e3 * found.seconds[row[name]][column[other]]:.3f}" for other in header.split()]
        assert ours == numbers, name
    assert str(found).split()[: len(found.columns)] == list(column)


def test_the_matrix_is_drawn():
    found = matrix(SHAPE, 4, GRID)
    figure = repartitions(found)
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_xticklabels()] == list(map(letters, found.columns))
    assert [label.get_text() for label in axes.get_yticklabels()] == list(map(letters, found.rows))
    assert [text.get_text() for text in axes.texts] == [f"{1e3 * s:.3g}" for row in found.seconds for s in row]
    assert figure.alt == str(found)


def test_a_hierarchical_sum_is_found():
    way = path(form("P"), form("R"), SHAPE, 4, GRID)
    assert [(s.op, s.axis) for s in way.steps] == [("reduce_scatter", "x"), ("all_reduce", "y"), ("all_gather", "x")]
    flat = 2 * collective_seconds("all_reduce", 2, 4 * 2**20, 1e-6, 1e-9)
    assert (round(1e3 * way.seconds, 2), round(1e3 * flat, 2)) == (6.3, 8.39)
    text = way.explain()
    assert "1. reduce_scatter over x: the parts are summed, and each rank keeps its block of dimension 0" in text


def test_a_dimension_that_is_cut_twice():
    way = path(form("S0 on x, S0 on y"), form("R on x, S0 on y"), SHAPE, 4, GRID)
    assert [(s.op, s.axis) for s in way.steps] == [("all_to_all", "y"), ("all_gather", "x"), ("all_to_all", "y")]


def test_a_slice_comes_before_a_sum():
    way = path(form("P on x, R on y"), form("R on x, S0 on y"), SHAPE, 4, GRID)
    assert [(s.op, s.axis) for s in way.steps] == [("slice", "y"), ("all_reduce", "x")]


def test_slow_axes_carry_less():
    """Over an axis that is slow and one that is fast, the sum is scattered over the fast one first."""
    way = path(form("P"), form("R"), SHAPE, 4, GRID, {"x": (1e-5, 1e-8), "y": (1e-6, 1e-10)})
    assert [(s.op, s.axis) for s in way.steps] == [("reduce_scatter", "y"), ("all_reduce", "x"), ("all_gather", "y")]


@pytest.mark.parametrize(
    ("start", "end", "there", "back"),
    [
        (P, R, "all_reduce", "all_reduce"),
        (P, I, "all_reduce", "none"),  # Megatron's g
        (I, R, "none", "all_reduce"),  # Megatron's f
        (P, S(1), "reduce_scatter", "all_gather"),
        (S(1), R, "all_gather", "reduce_scatter"),
        (S(1), I, "all_gather", "slice"),
        (I, S(1), "slice", "all_gather"),
        (R, S(0), "slice", "pad"),
        (S(0), S(1), "all_to_all", "all_to_all"),
        (I, P, "pad", "none"),  # a bias of a partial sum
        (R, I, "none", "pad"),
    ],
)
def test_the_gradients_way_is_a_lookup(start, end, there, back):
    way = path(Form(("x",), (start,)), Form(("x",), (end,)), (8, 8), 4, LINE)
    assert [s.op for s in way.steps] == [there]
    returned = backward(way, (8, 8), 4, LINE)
    assert [s.op for s in returned.steps] == [back]
    assert returned.start == way.end.conjugate()
    assert returned.end == way.start.conjugate()


def test_only_the_innermost_axis_lets_go():
    """From S0S0 the outer axis alone would leave blocks that do not lie one behind the other."""
    way = path(form("S0 on x, S0 on y"), form("R on x, S0 on y"), SHAPE, 4, GRID)
    assert way.steps[0].axis == "y"
    with pytest.raises(PlanError, match="cannot cut"):
        path(form("R"), form("S0 on x"), (3, 4), 4, GRID, what="x")


def test_one_rank_sends_nothing():
    alone = Mesh(x=1)
    way = path(Form(("x",), (P,)), Form(("x",), (R,)), SHAPE, 4, alone)
    assert way.collectives == ()
    assert way.seconds == 0


def test_costs_of_collectives():
    assert collective_seconds("all_gather", 4, 100, 1, 1) == 3 * 101
    assert collective_seconds("all_reduce", 4, 100, 1, 1) == 6 * 26
    with pytest.raises(PlanError, match="broadcast"):
        collective_seconds("broadcast", 4, 100, 1, 1)
