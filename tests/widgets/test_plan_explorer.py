"""The plan explorer: the search's own plans, pins, the front, other values, and pages without a kernel."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from minipar import PlanError
from minipar.costs.hardware import PRESETS
from minipar.models.sizes import MODELS, Transformer
from minipar.planner.exhaustive import Found, search
from minipar_widgets import PlanExplorer
from minipar_widgets.plan_explorer import PlanView, Question
from minipar_widgets.plan_model import (
    BUDGETS,
    KINDS,
    NEVER,
    PLANS,
    SEARCHED,
    Shelf,
    cells,
    clock,
    described,
    instead,
    percent,
    problem,
    solved,
    traded,
)

HERE = Question("llama3-8b", "h100", 8, 64)


def small(**more) -> PlanExplorer:
    return PlanExplorer("llama3-8b", "h100", **{"gpus": 8, "batch": 64, **more})


def fastest(found: Found) -> float:
    return min(one.time for one in found.best)


def asked(question: Question = HERE):
    q = question
    return problem(Shelf(), q.model, q.machine, q.gpus, q.batch, q.pins)


def test_plans_are_those_of_the_search() -> None:
    found = search("llama3-8b", "h100", nodes=2, gpus_per_node=8, batch=64, most=PLANS)
    view = small(gpus=16).view
    assert [one["words"] for one in view.data["plans"]] == [one.words for one in found.best]
    assert [one["seconds"] for one in view.data["plans"]] == [one.time for one in found.best]
    for plan, one in zip(view.data["plans"], found.best, strict=True):
        assert sum(plan["bytes"]) == one.memory == plan["total"]
        assert plan["bytes"] == [one.cost.bytes.get(kind, 0) for kind in KINDS]
    assert view.data["capacity"] == PRESETS["h100"].memory
    assert view.data["plans"][0]["over"] == "best"


@pytest.mark.parametrize("key", ["tp", "offload", "micro_batch_size"])
def test_a_pin_of_a_shown_value_leaves_plans_that_have_it(key: str) -> None:
    found = solved(asked())
    assert not isinstance(found, str)
    for value in {cells(one)[key] for one in found.best} - {NEVER}:
        pinned = solved(asked()._replace(pins=((key, value),)))
        assert not isinstance(pinned, str)
        assert {cells(one)[key] for one in pinned.best} == {value}
        assert fastest(pinned) >= fastest(found)


def test_pins_cost_what_the_search_says() -> None:
    explorer = small(pins="tp=4")
    free, pinned = solved(asked()), explorer.view.found
    assert not isinstance(free, str)
    assert not isinstance(pinned, str)
    slower = percent(pinned.plan.time / free.plan.time - 1)
    assert explorer.view.data["price"].startswith(f"costs {slower}: {clock(pinned.plan.time)} instead of ")
    assert f"costs {slower}" in repr(explorer)
    explorer.ask(pins={})
    assert explorer.view.data["price"] == ""
    explorer.ask(pins="tp=1")  # as the best plan has it
    assert explorer.view.data["price"].startswith("costs nothing")
    explorer.ask(gpus=4, pins="tp=2 pp=2")
    assert explorer.view.data["gpus"] == 4
    assert {(one["cells"]["tp"], one["cells"]["pp"]) for one in explorer.view.data["plans"]} == {("2", "2")}
    explorer.ask(pins="offload=activations,optimizer")
    assert explorer.view.data["plans"][0]["cells"]["offload"] == "activations,optimizer"


def test_other_values_are_the_searchs_and_a_pin_of_the_key_itself_does_not_count() -> None:
    rows = instead(asked(), "tp")
    for row in rows:
        pinned = solved(asked()._replace(pins=(("tp", row.value),)))
        assert not isinstance(pinned, str)
        assert row.plan is not None
        assert row.plan.cost.time == pytest.approx(min(one.cost.time for one in pinned.best))
    held = instead(asked()._replace(pins=(("tp", "8"),)), "tp")
    assert [row.value for row in held] == [row.value for row in rows]
    assert held[0].slower < 0  # tp=8 is slower than it
    with pytest.raises(PlanError, match="is not searched"):
        instead(asked(), "dp")


def test_the_front_falls_and_no_plan_is_better_than_it() -> None:
    points = [traded(asked(), k) for k in range(BUDGETS + 1)]
    front, found = points[-1], solved(asked())
    assert not isinstance(found, str)
    assert len(front) >= 4
    for before, after in pairwise(front):
        assert before.memory < after.memory
        assert before.time > after.time
    assert front[-1].time == fastest(found)
    for one in found.best:
        assert any(point.memory <= one.memory and point.time <= one.time for point in front)
    whole = found.front(4)
    assert front[0].memory == whole[0].memory  # the smallest plan of all


def test_the_browser_asks_and_is_answered() -> None:
    view = PlanView(Shelf(), HERE)
    json.dumps([view.data, view.more, view.options])
    question = {"model": "llama3-8b", "machine": "h100", "gpus": 16, "batch": 64, "pins": [["tp", "2"]]}
    view.asked = {"id": 5, **question}
    assert view.data["id"] == 5
    assert view.data["pins"] == [["tp", "2"]]
    assert view.more == {}
    for k in range(1, BUDGETS + 2):
        view._wanted(view, {"want": "front", "id": 5}, [])
        assert view.more["budgets"] == min(k, BUDGETS)
    view._wanted(view, {"want": "pp", "id": 5}, [])
    assert [row["value"] for row in view.more["pp"]] == [row.value for row in instead(view.problem_now, "pp")]
    view._wanted(view, {"want": "zero", "id": 4}, [])  # of a question before
    view._wanted(view, {"want": "dp", "id": 5}, [])
    assert set(view.more) == {"front", "budgets", "pp"}
    json.dumps(view.more)
    assert view.problem == ""


def test_where_no_plan_fits_the_view_says_what_would() -> None:
    explorer = small()
    explorer.ask(model="gpt3-175b", gpus=4)
    assert "no plan fits in 79.85 GB; the smallest needs" in explorer.view.data["problem"]
    assert "no plan fits" in repr(explorer)
    assert explorer.rows()[1][0] == "no plan"
    assert explorer.picture()
    assert explorer.view.problem == ""  # the controls stay
    explorer.ask(gpus=12)
    assert "gpus=12: must be a multiple of 8" in explorer.view.data["problem"]
    explorer.ask(model="llama3-8b", gpus=8, pins="tp=3")
    assert "tp=3: no plan for batch=64 on 8 devices has it; possible are tp=1, 2" in explorer.view.data["problem"]
    explorer.ask(pins="colour=blue")
    assert "colour" in explorer.view.data["problem"]


def test_errors_name_what_is_wrong() -> None:
    with pytest.raises(PlanError, match="no such preset"):
        PlanExplorer("gpt5")
    with pytest.raises(PlanError, match="no such preset"):
        PlanExplorer("llama3-8b", "abacus")
    with pytest.raises(PlanError, match="must be key=value, such as tp=8"):
        small(pins="tp")
    with pytest.raises(PlanError, match="gpus=0: must be a whole number"):
        small(gpus=0)


def test_models_and_machines_of_the_user() -> None:
    mine = Transformer(4, 512, 8, 512, 10_000, name="mine")
    explorer = PlanExplorer(mine, "h100 memory=20GB", gpus=2, batch=8)
    assert explorer.view.options["model"] == [*MODELS, "mine"]
    assert explorer.view.data["capacity"] == 20 * 10**9
    assert repr(explorer).startswith("plans for mine on 2 h100 memory=20GB, batch 8: ")


def test_a_page_has_its_answer_whole() -> None:
    view = small().view
    state = view.state()
    assert state["alive"] is False
    assert state["data"]["plans"] == [described(one, view.found.best[0]) for one in view.found.best]
    assert set(state["more"]) == {"front", "budgets", *(key for key in state["data"]["columns"] if key in SEARCHED)}
    assert state["more"]["budgets"] == BUDGETS
