"""Forms that follow from a few fixed ones, what moves then, and mistakes. Graphs are written by hand: no torch."""

from __future__ import annotations

from collections import Counter

import pytest

from minipar import PlanError
from minipar.program.mesh import Mesh
from minipar.sharding.forms import Form, I, P, R
from minipar.sharding.graph import Graph, Layer, Operator, Slot, Tensor
from minipar.sharding.propagation import Preset, propagate, propagate_model

TP = Mesh(tp=2)


def perceptron(batch: int = 8, width: int = 16, inner: int = 32, bias: bool = True) -> Graph:
    """x -> norm -> up -> gelu -> down -> + x"""
    shapes = {
        "x": (batch, width), "norm.weight": (width,), "up.weight": (inner, width), "up.bias": (inner,),
        "down.weight": (width, inner), "down.bias": (width,), "n": (batch, width), "u": (batch, inner),
        "g": (batch, inner), "d": (batch, width), "y": (batch, width),
    }  # fmt: skip
    kinds = {name: "parameter" for name in shapes if "." in name} | {"x": "input"}
    tensors = {name: Tensor(name, shape, kind=kinds.get(name, "value")) for name, shape in shapes.items()}
    b = [("up.bias",), ("down.bias",)] if bias else [(), ()]
    norm = {"input": Slot(0), "normalized_shape": [width], "weight": Slot(1)}
    operators = (
        Operator("norm", "aten::layer_norm", ("x", "norm.weight"), ("n",), norm),
        Operator("up", "aten::linear", ("n", "up.weight", *b[0]), ("u",)),
        Operator("gelu", "aten::gelu", ("u",), ("g",)),
        Operator("down", "aten::linear", ("g", "down.weight", *b[1]), ("d",)),
        Operator("add", "aten::add", ("x", "d"), ("y",)),
    )
    return Graph(operators, tensors, ("x",), ("y",))


def texts(found, *names):
    return [str(found.forms[name]) for name in names]


def counted(found):
    return Counter((c.op, c.phase) for c in found.collectives() if not c.parameter)


def test_two_annotations_are_megatrons_layer():
    found = propagate(perceptron(), {"up": "S-1 on tp", "down": "P on tp"}, TP)
    assert texts(found, "up.weight", "up.bias", "u", "g", "down.weight", "d") == [
        "S0 on tp", "S0 on tp", "S1 on tp", "S1 on tp", "S1 on tp", "P on tp",
    ]  # fmt: skip
    assert texts(found, "x", "n", "y", "norm.weight", "down.bias") == ["I"] * 5
    assert counted(found) == {("all_reduce", "forward"): 1, ("all_reduce", "backward"): 1}
    assert [(c.value, c.phase) for c in found.collectives()] == [("d", "forward"), ("n", "backward")]  # g and f
    assert found.read("up", "n") == Form(("tp",), (R,))
    assert found.read("down", "down.bias") == Form(("tp",), (P,))
    assert found.local("down.weight") == (16, 16)


@pytest.mark.parametrize(
    "annotations",
    [
        {"up": "S-1 on tp"},
        {"up.weight": "S0 on tp"},
        {"gelu": "S1 on tp"},
        {"down.weight": "S1 on tp"},
        {"up.bias": "S0 on tp"},
    ],
)
def test_one_annotation_is_enough(annotations):
    """Forward and backward: whichever tensor is fixed, the same layer follows."""
    found = propagate(perceptron(), annotations, TP)
    assert texts(found, "up.weight", "g", "down.weight", "d") == ["S0 on tp", "S1 on tp", "S1 on tp", "P on tp"]


def test_nothing_fixed_is_computed_whole():
    found = propagate(perceptron(), {}, TP)
    assert set(texts(found, *found.forms)) == {"I"}
    assert found.collectives() == ()


def test_rows_of_the_batch_follow_the_input():
    mesh = Mesh(dp=2, tp=2)
    given = {"x": Form.parse("S0 on dp", mesh)}
    found = propagate(perceptron(), {"up": "S-1 on tp"}, mesh, given)
    assert texts(found, "n", "u", "d", "y") == ["S0 on dp", "S0 on dp, S1 on tp", "S0 on dp, P on tp", "S0 on dp"]
    sums = [c for c in found.collectives() if c.axis == "dp"]
    assert {c.value for c in sums} == {"norm.weight", "up.weight", "up.bias", "down.weight", "down.bias"}
    assert all((c.op, c.phase, c.parameter) == ("all_reduce", "backward", True) for c in sums)
    weight = next(c for c in sums if c.value == "up.weight")
    assert weight.bytes == 32 * 16 * 4 // 2  # tp has cut it in half


def test_weights_that_lie_otherwise_are_gathered():
    """ZeRO: rows stay where they are, and the weight comes; its gradient is scattered."""
    mesh = Mesh(dp=2)
    found = propagate(perceptron(), {"*.weight": "S0 on dp"}, mesh, {"x": Form.parse("S0 on dp", mesh)})
    assert texts(found, "u", "up.weight") == ["S0 on dp", "S0 on dp"]
    moved = [c for c in found.collectives() if c.value == "up.weight"]
    assert [(c.op, c.phase) for c in moved] == [("all_gather", "forward"), ("reduce_scatter", "backward")]


def test_what_an_operator_writes_says_whether_weights_or_values_move():
    given = {"x": Form.parse("S0 on tp", TP)}
    free = propagate(perceptron(), {"up.weight": "S0 on tp"}, TP, given)
    fixed = propagate(perceptron(), {"up.weight": "S0 on tp", "up": "S1 on tp"}, TP, given)
    assert texts(free, "u") == ["S0 on tp"]
    assert texts(fixed, "u") == ["S1 on tp"]
    assert fixed.read("up", "n").on("tp") == R


def test_a_value_that_several_read_in_one_form_moves_once():
    tensors = {name: Tensor(name, (8, 8)) for name in ("n", "a", "b", "c")}
    tensors |= {
        name: Tensor(name, (8, 8), kind=k) for name, k in (("x", "input"), ("p", "parameter"), ("q", "parameter"))
    }
    operators = (
        Operator("n", "aten::relu", ("x",), ("n",)),
        Operator("first", "aten::linear", ("n", "p"), ("a",)),
        Operator("second", "aten::linear", ("n", "q"), ("b",)),
        Operator("mul", "aten::mul", ("a", "b"), ("c",)),
    )
    found = propagate(Graph(operators, tensors, ("x",), ("c",)), {"first": "S1 on tp"}, TP)
    (move,) = found.repartitions
    assert (move.value, move.readers) == ("n", ("first", "second"))
    assert counted(found) == {("all_reduce", "backward"): 1}


def test_values_without_gradient_cost_nothing_backward():
    graph = perceptron()
    tensors = {**graph.tensors, "n": Tensor("n", (8, 16), differentiable=False)}
    found = propagate(Graph(graph.operators, tensors, ("x",), ("y",)), {"up": "S1 on tp"}, TP)
    assert counted(found) == {("all_reduce", "forward"): 1}


def test_operators_without_a_rule_are_computed_whole():
    graph = perceptron()
    odd = tuple(Operator("odd", "mylib::odd", ("u",), ("g",)) if op.name == "gelu" else op for op in graph.operators)
    found = propagate(Graph(odd, graph.tensors, ("x",), ("y",)), {"up": "S1 on tp"}, TP)
    assert found.read("odd", "u").on("tp") == I
    assert ("all_gather", "forward") in counted(found)
    assert texts(found, "g", "down.weight") == ["I", "I"]


def test_annotations_never_change():
    found = propagate(perceptron(), {"up": "S1 on tp", "gelu": "S0 on tp", "down.weight": "S1 on tp"}, TP)
    assert texts(found, "u", "g", "down.weight") == ["S1 on tp", "S0 on tp", "S1 on tp"]
    (move,) = [m for m in found.repartitions if m.value == "u"]
    assert [s.op for s in move.forward.steps] == ["all_to_all"]
    whole = propagate(perceptron(), {"up": "S1 on tp", "down.weight": "R"}, TP)
    assert texts(whole, "down.weight") == ["I"]


@pytest.mark.parametrize(
    ("annotations", "words"),
    [
        ({"up": "S7 on tp"}, ["'up': up (u): form S7", "2 dimensions", "S0 to S1"]),
        ({"up.weight": "S0:3 on tp"}, ["up.weight", "dimension 0 has 32 elements", "nearest choice"]),
        ({"gelu": "P on tp"}, ["gelu (aten::gelu) cannot write g as P on tp", "parts of a sum", "S0 or S1 or R"]),
        ({"norm": "S1 on tp"}, ["norm (aten::layer_norm) cannot write n as S1", "all of that dimension", "S0 or R"]),
        ({"up": "S1 on tp", "u*": "S0 on tp"}, ["up: 'up' fixes it as S1 on tp, and 'u*' as S0"]),
        ({"up.weight": "S1 on tp", "up": "S1 on tp"},
         ["up (aten::linear): annotations do not fit together", "up.weight as S1", "u as S1", "R,S0,S0 -> S1"]),
        ({"up.weight": "P on tp"}, ["up.weight: form P on tp: it is given, not computed"]),
        ({"upp": "S1 on tp"}, ["'upp': no operator or parameter", "up"]),
        ({"up": "S1 on dp"}, ["'dp' is no axis of the mesh", "tp"]),
    ],
)  # fmt: skip
def test_mistakes_name_operator_tensor_and_the_nearest_choice(annotations, words):
    with pytest.raises(PlanError) as caught:
        propagate(perceptron(), annotations, TP)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


def test_sizes_that_do_not_divide():
    with pytest.raises(PlanError, match="up.weight: form S0 on tp: dimension 0 has 30 elements.*S0 over 3 ranks"):
        propagate(perceptron(inner=30), {"up.weight": "S0 on tp"}, Mesh(tp=4))
    with pytest.raises(PlanError, match=r"up.*\(u\).*30 elements"):
        propagate(perceptron(inner=30), {"up": "S1 on tp"}, Mesh(tp=4))


def test_an_operator_without_a_rule_cannot_be_fixed():
    graph = perceptron()
    odd = tuple(Operator("odd", "mylib::odd", ("u",), ("g",)) if op.name == "gelu" else op for op in graph.operators)
    with pytest.raises(
        PlanError, match=r"odd \(mylib::odd\) cannot write g as S1 on tp.*has no rule.*nearest choice is R"
    ):
        propagate(Graph(odd, graph.tensors, ("x",), ("y",)), {"odd": "S1 on tp"}, TP)


# Chains of layers -----------------------------------------------------------------------------------------------------


def chain(count: int) -> list[Layer]:
    graph = perceptron()
    names = [*(op.name for op in graph.operators), *graph.parameters]
    return [Layer(graph, {name: f"blocks.{k}.{name}" for name in names}) for k in range(count)]


def test_equal_layers_are_settled_once():
    found = propagate_model(chain(5), {"blocks.*.up": "S1 on tp"}, TP)
    assert len({id(sharding) for sharding in found.shardings}) == 1
    assert str(found.forms()["blocks.3.up.weight"]) == "S0 on tp"
    assert str(found.forms()["3:d"]) == "P on tp"
    order = [(c.value, c.phase) for c in found.collectives()]
    assert order[:2] == [("0:d", "forward"), ("1:d", "forward")]
    assert order[5:7] == [("4:n", "backward"), ("3:n", "backward")]


def test_what_one_layer_writes_the_next_is_given():
    graph = perceptron()
    half = Graph(graph.operators[:2], graph.tensors, ("x",), ("u",))
    rest = {**graph.tensors, "u": Tensor("u", (8, 32), kind="input")}
    other = Graph(graph.operators[2:4], rest, ("u",), ("d",))
    found = propagate_model([Layer(half), Layer(other)], {"up": "S1 on tp"}, TP)
    assert str(found.shardings[1].forms["down.weight"]) == "S1 on tp"
    (end,) = found.ends
    assert (end.value, str(end.forward.start), str(end.forward.end)) == ("d", "P on tp", "I")
    assert counted(found.shardings[0])[("all_reduce", "backward")] == 1


def test_shared_parameters_lie_alike():
    first, second = chain(2)
    names = {**second.names, "up.weight": first.names["up.weight"]}
    layers = [first, Layer(second.graph, names)]
    found = propagate_model(layers, {"blocks.0.up": "S1 on tp"}, TP)
    assert str(found.shardings[1].forms["up.weight"]) == "S0 on tp"


def test_a_preset_may_name_what_is_not_there():
    assert propagate_model(chain(1), Preset({"*.up": "S1 on tp", "*.qkv": "S-1:3 on tp"}), TP).collectives()
    with pytest.raises(PlanError, match="no operator or parameter"):
        propagate_model(chain(1), Preset({"*.qkv": "S-1:3 on tp"}), TP)
