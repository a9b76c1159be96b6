"""The sharding explorer: forms that follow from clicks, collectives, blocks, and mistakes where they are."""

from __future__ import annotations

import json
from collections import Counter
from itertools import product

import pytest

from minipar import PlanError
from minipar.costs.alpha_beta import collective_seconds
from minipar.program.mesh import Mesh
from minipar.sharding import Form, Graph, Layer, Operator, Tensor, megatron, propagate
from minipar_widgets import ShardingExplorer
from minipar_widgets.sharding_explorer import ShardingView
from minipar_widgets.sharding_model import (
    EXAMPLES,
    STRATEGIES,
    Pick,
    block,
    example,
    explore,
    outlook,
    picked,
    picks_of,
    strategy,
    totals,
)

BOTH, TP = Mesh(dp=2, tp=2), Mesh(tp=4)
LINKS = {"dp": (2e-5, 1e-10), "tp": (2e-5, 1e-10)}


def forms(found, axis="tp"):
    return {row.own: row.forms[axis] for row in found.rows}


@pytest.mark.parametrize(
    ("letters", "expected", "moves"),
    [
        ("R", {"A": "R", "B": "R", "C": "R"}, []),
        ("S0", {"A": "S0", "B": "R", "C": "S0"}, [("backward", "all_reduce", "B")]),
        ("S1", {"A": "R", "B": "S1", "C": "S1"}, [("backward", "all_reduce", "A")]),
        ("P", {"A": "S1", "B": "S0", "C": "P"}, [("forward", "all_reduce", "C")]),
    ],
)
def test_a_click_on_the_product_fills_in_both_factors(letters, expected, moves):
    found = explore(example("matmul"), TP, [Pick("C", "tp", letters)])
    assert forms(found) == expected
    assert [(move.phase, move.op, move.value) for move in found.moves] == moves
    assert found.fixed == {"C": {"tp": letters}}


def test_megatrons_mlp_has_one_all_reduce_each_way_with_the_formulas_bytes_and_time():
    found = explore(example("MLP"), TP, strategy("MLP", "Megatron", TP), LINKS)
    assert [(m.phase, m.op, m.value, m.before, m.after) for m in found.moves] == [
        ("backward", "all_reduce", "norm", "P", "R"), ("forward", "all_reduce", "down", "P", "R"),
    ]  # fmt: skip
    nbytes = 16 * 256 * 1024 * 4
    for move in found.moves:
        assert move.bytes == nbytes
        assert move.seconds == pytest.approx(collective_seconds("all_reduce", 4, nbytes, *LINKS["tp"]))
    names = [row.own for row in found.rows]
    assert [names[move.at] for move in found.moves] == ["up", "y"]  # before who needs the value otherwise
    assert totals(found.moves) == "forward 1 collective, 16 MiB, 2.64 ms; backward 1 collective, 16 MiB, 2.64 ms"


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("mesh", [BOTH, TP], ids=str)
def test_every_click_is_kept_or_refused_with_its_reason(name, mesh):
    layer = example(name)
    begin = explore(layer, mesh, ())
    assert begin.moves == ()
    assert all(letters == "R" for row in begin.rows for letters in row.forms.values())
    for row in begin.rows:
        for axis, letters in ((axis, one) for axis, some in row.offered.items() for one in some):
            found = explore(layer, mesh, [Pick(row.name, axis, letters)], LINKS)
            if found.problem:
                assert found.picks == ()
                assert found.moves == ()
                assert found.rows[found.where].name == row.name
                assert "nearest choice" in found.problem
                continue
            assert found.rows[begin.rows.index(row)].forms[axis] == letters
            # collectives are those of propagation, and one that adds up what is handed on in parts
            handed = sum(move.at == len(found.rows) for move in found.moves)
            assert (handed > 0) == any(p == "P" for p in found.rows[-1].forms.values())


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategies_hold_on_every_mesh_and_cost_what_propagation_says(name):
    for words, mesh in product(STRATEGIES[name], (BOTH, TP, Mesh(dp=2), Mesh(dp=4, tp=4))):
        picks = strategy(name, words, mesh)
        found = explore(example(name), mesh, picks, LINKS)
        assert found.problem == ""
        assert {pick.axis for pick in picks} <= {axis for axis, _ in mesh}
        for pick in picks:
            row = next(row for row in found.rows if row.name == pick.tensor)
            assert row.forms[pick.axis] == pick.letters
    values = {"MLP": {"up": "S2 on tp", "down": "P on tp"}, "attention": {"q": "S1 on tp"}, "matmul": {"C": "S1 on tp"}}
    given = values[name]
    found = explore(example(name), TP, picks_of(example(name), given, TP), LINKS)
    direct = propagate(example(name), given, TP, links=LINKS)
    assert Counter((m.op, m.phase, m.value, m.bytes, m.seconds) for m in found.moves) == Counter(
        (c.op, c.phase, c.value, c.bytes, c.time) for c in direct.collectives()
    )


def test_a_mistake_stands_at_the_operator_that_it_names_and_the_forms_stay():
    layer = example("MLP")
    good = strategy("MLP", "Megatron", TP)
    before = explore(layer, TP, good)
    found = explore(layer, TP, [*good, Pick("gelu", "tp", "P")])
    assert found.rows[found.where].own == "gelu"
    assert found.problem.startswith("gelu (aten::gelu) cannot write gelu as P on tp")
    assert forms(found) == forms(before)
    assert found.picks == good
    assert found.refused == (Pick("gelu", "tp", "P"),)
    # of two tensors that contradict each other, the operator between them is named, not the one that was clicked
    found = explore(layer, TP, [Pick("up", "tp", "S2"), Pick("up.weight", "tp", "S1")])
    assert found.rows[found.where].own == "up"
    assert "annotations do not fit together" in found.problem
    # a dimension that does not divide is no operator's mistake: it stands at its tensor
    odd = Layer(Graph((Operator("y", "aten::relu", ("x",), ("y",)),), {"x": Tensor("x", (3, 8), kind="input"),
                      "y": Tensor("y", (3, 8))}, ("x",), ("y",)))  # fmt: skip
    found = explore(odd, TP, [Pick("y", "tp", "S0")])
    assert found.rows[found.where].own == "y"
    assert "3 elements, which 4 ranks" in found.problem


def test_an_input_follows_where_nothing_is_said_of_it():
    layer = example("MLP")
    found = explore(layer, BOTH, [Pick("up", "tp", "S1"), Pick("x", "dp", "S0")])
    assert found.rows[0].forms == {"dp": "S0", "tp": "S1"}
    assert explore(layer, BOTH, [Pick("x", "tp", "P")]).rows[0].forms["tp"] == "P"


@pytest.mark.parametrize("text", ["R", "S0 on dp", "S0 on dp, S0 on tp", "S0 on dp, S1 on tp", "S1:3 on tp", "P on tp"])
def test_blocks_together_are_the_tensor_and_as_many_copies_as_forms_say(text):
    shape, form = (8, 12), Form.parse(text, BOTH, 2)
    held: Counter[tuple[int, int]] = Counter()
    for rank in range(4):
        rows, columns = block(shape, form, BOTH, rank)
        for a, b in product(rows, columns):
            held.update(product(range(*a), range(*b)))
    copies = 4
    for p in form.placements:
        copies //= 2 if p.kind == "S" else 1
    assert held == dict.fromkeys(product(range(8), range(12)), copies)


def test_blocks_of_a_fused_projection_are_whole_heads_of_each_piece():
    form = Form.parse("S0:3 on tp", Mesh(tp=2), 1)
    assert block((12,), form, Mesh(tp=2), 0) == (((0, 2), (4, 6), (8, 10)),)
    assert block((12,), form, Mesh(tp=2), 1) == (((2, 4), (6, 8), (10, 12)),)
    outer = Form.parse("S0 on dp, S0 on tp", BOTH, 1)
    assert [block((8,), outer, BOTH, rank)[0] for rank in range(4)] == [((0, 2),), ((2, 4),), ((4, 6),), ((6, 8),)]


def test_outlook_says_what_a_click_would_give():
    found = explore(example("matmul"), BOTH, [Pick("A", "dp", "S0")], LINKS)
    told = outlook(found, LINKS)
    for row in found.rows:
        for axis, some in row.offered.items():
            for letters in some:
                fine, words = told[row.name][axis][letters]
                then = explore(found.layer, BOTH, picked(found.picks, Pick(row.name, axis, letters)), LINKS)
                assert fine == (not then.problem)
                assert words == (totals(then.moves) if fine else then.problem)


def test_a_captured_layer_can_be_handed_over():
    import torch

    from minipar import models, sharding

    captured = sharding.capture_model(models.build("gpt-tiny"), torch.zeros(4, 16, dtype=torch.long))
    explorer = ShardingExplorer(captured, "dp=2 tp=2", megatron())
    assert explorer.problem == ""
    explorer.layer.value = "layer 1"
    assert explorer.view.found is not None
    found = explorer.view.found
    assert found.problem == ""
    assert [(m.phase, m.op) for m in found.moves] == [("backward", "all_reduce"), ("forward", "all_reduce")] * 2
    assert forms(found)["1.attention.qkv"] == "S2:3"
    explorer.view.find_outlook("x")
    explorer.layer.value = "MLP"
    assert explorer.view.found.rows[0].own == "x"
    one = ShardingExplorer(captured.layers[1], Mesh(tp=2), {"*.mlp.0": "S2 on tp"})
    assert one.view.found is not None
    assert forms(one.view.found)["1.mlp.2.weight"] == "S1"
    assert "1.mlp.0 S2 on tp" in repr(one)


def test_the_browser_asks_and_is_answered():
    view = ShardingView(example("MLP"), TP, strategy("MLP", "Megatron", TP), LINKS)
    assert json.loads(json.dumps(view.data))["fixed"] == {"up": {"tp": "S2"}, "down": {"tp": "P"}}
    view.asked = {"id": 7, "picks": [["up", "tp", "S2"]]}
    assert view.picks == (Pick("up", "tp", "S2"),)
    assert view.data["id"] == 7
    assert view.data["rows"][7]["forms"] == {"tp": "P"}  # down follows
    view.asked = {"id": 8, "picks": [["up", "tp", "S2"], ["norm", "tp", "P"]]}
    assert view.data["bad"] == ["norm", "tp", "P"]
    assert view.data["picks"] == [["up", "tp", "S2"]]
    assert "cannot be: norm" in view.summary()
    assert "It cannot be: norm" in view.caption()
    assert view.problem == ""  # the rest can be seen
    assert view.outlook == {}
    view._wanted(view, {"want": "outlook", "tensor": "x"}, [])
    assert view.outlook["x"]["tp"]["S0"][0] is True
    assert view.state()["editable"] is False
    view.update(example("matmul"), Mesh(pp=2))
    assert "1 to 3 axes beside pp" in view.problem
    view.update(example("matmul"), Mesh(tp=32))
    assert "up to 16 ranks" in view.problem


def test_controls_choose_layer_mesh_strategy_and_links():
    explorer = ShardingExplorer()
    assert explorer.strategy.value == "Megatron"
    before = explorer.view.found.moves[0]
    explorer.rate.value = 1
    assert explorer.view.found.moves[0].seconds > before.seconds
    assert explorer.view.found.fixed["up"] == {"tp": "S2"}
    explorer.axes["dp"].value = 1
    assert explorer.view.found.mesh == Mesh(dp=1, tp=2)
    assert explorer.view.found.fixed == {"up": {"tp": "S2"}, "down": {"tp": "P"}}
    explorer.strategy.value = "nothing is fixed"
    assert explorer.view.found.moves == ()
    explorer.layer.value = "attention"
    assert explorer.strategy.value == "Megatron (heads)"
    assert explorer.settings()["layer"] == "attention"
    explorer.axes["tp"].value = 8
    explorer.axes["dp"].value = 4
    assert "up to 16 ranks" in explorer.problem
    with pytest.raises(PlanError, match="possible are matmul, MLP, attention"):
        ShardingExplorer("transformer")
    with pytest.raises(PlanError, match="must be axes and their sizes"):
        ShardingExplorer("MLP", "four")
