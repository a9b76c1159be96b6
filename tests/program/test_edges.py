"""Edges between layers: their numbers, their text, and edges that are refused."""

import pytest

from minipar.errors import PlanError
from minipar.program import edges

#     1 - 2
#   /       \
# 0           4 - 5
#   \       /
#       3
FORK = edges.numbered([(3, 4), (0, 3), (2, 4), (0, 1), (1, 2), (4, 5)], 6)


def test_an_edge_has_the_number_of_its_layer_unless_the_layer_has_several():
    assert FORK == ((0, 1), (1, 2), (2, 4), (3, 4), (4, 5), (0, 3))
    assert all(FORK[layer][0] == layer for layer in range(5))
    assert edges.numbered([(0, 1), (1, 2)], 3) == (), "a chain needs no edges"
    assert edges.numbered([], 1) == ()


def test_wiring():
    found = edges.wiring(FORK, 6)
    assert found.inputs == ((), (0,), (1,), (0,), (2, 3), (4,))
    assert found.into == ((), (0,), (1,), (5,), (2, 3), (4,))
    assert found.out == ((0, 5), (1,), (2,), (3,), (4,), ())
    assert found.chained == {2, 5}, "layer 3 follows 2, but reads 0"
    chain = edges.wiring((), 3)
    assert chain == edges.Wiring(((), (0,), (1,)), ((), (0,), (1,)), ((0,), (1,), ()), frozenset({1, 2}))


def test_branches_lie_between_layers_that_every_path_goes_through():
    assert edges.side_by_side(FORK, 6) == [[[1, 2], [3]]]
    assert edges.side_by_side((), 6) == []
    skip = edges.numbered([(0, 1), (1, 2), (0, 2), (2, 3)], 4)
    assert edges.side_by_side(skip, 4) == [[[1]]]
    crossed = edges.numbered([(0, 1), (0, 2), (1, 3), (2, 3), (1, 4), (2, 4), (3, 5), (4, 5)], 6)
    assert edges.side_by_side(crossed, 6) == [[[1, 2, 3, 4]]], "branches that exchange something are one"


@pytest.mark.parametrize(
    ("given", "layers", "message"),
    [
        ([(0, 1), (1, 4), (1, 2)], 3, "edge 1 -> 4: no layer 4; possible are 0 to 2"),
        ([(0, 1), (1, -1), (1, 2)], 3, "edge 1 -> -1: no layer -1"),
        ([(0, 1), (1, 2), (2, 1), (2, 3)], 4, "edge 2 -> 1: closes a circle, 2 -> 1 -> 2"),
        ([(0, 1), (1, 2), (2, 3), (3, 1), (3, 4)], 5, "edge 3 -> 1: closes a circle, 3 -> 1 -> 2 -> 3"),
        ([(0, 1), (1, 1), (1, 2)], 3, "edge 1 -> 1: closes a circle, 1 -> 1"),
        ([(0, 2), (2, 1), (1, 3)], 4, "edge 2 -> 1: goes backward; list the layers so that each stands behind"),
        ([(0, 1), (0, 1), (1, 2)], 3, "edge 0 -> 1: given twice"),
        ([(0, 1), (1, 3), (2, 3)], 4, "layer 2 reads nothing"),
        ([(0, 1), (0, 2), (1, 3)], 4, "nobody reads the output of layer 2"),
        ([(0, 1, 2)], 3, r"edge \(0, 1, 2\): must be a pair of layer numbers"),
        ([(0, "a")], 3, r"edge \(0, 'a'\): must be a pair"),
        ([3], 3, "edge 3: must be a pair"),
    ],
)
def test_refusals(given, layers, message):
    with pytest.raises(PlanError, match=message) as error:
        edges.numbered(given, layers)
    assert "\n" not in str(error.value)
