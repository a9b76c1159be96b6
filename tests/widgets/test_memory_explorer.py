"""The memory explorer: the formula's numbers, in groups, compared with a device; a plotly figure; a real run."""

from __future__ import annotations

import re

import pytest
from plotly import graph_objects

from minipar.costs.quantities import size
from minipar.models import table
from minipar.models.table import PRESETS
from minipar.prediction.on_paper import model_of, per_rank
from minipar.prediction.rank_memory import KINDS
from minipar.strategies.plan import Plan
from minipar_widgets import MemoryExplorer
from minipar_widgets.inline import SOURCES
from minipar_widgets.memory_explorer import MemoryView
from minipar_widgets.memory_model import FACES, HATCHES, Choice, Memory, why_not_run

CHOICE = Choice(Plan.parse("dp=2 pp=4 microbatches=8 zero=1 precision=bf16"), "gpt2-medium", rows=2)


def test_bars_are_the_formula_s_for_every_rank() -> None:
    memory = Memory.of(CHOICE)
    whole = per_rank(CHOICE.plan, "gpt2-medium", 2 * 8 * 2)
    assert sorted(rank for ranks in memory.groups for rank in ranks) == list(range(8))
    for ranks in memory.groups:
        assert {whole[rank] for rank in ranks} == {memory.details[ranks[0]].memory}
    assert memory.worst in memory.groups[0]
    assert max(rank.total for rank in whole) == whole[memory.worst].total
    figure = MemoryExplorer(str(CHOICE.plan), "gpt2-medium", rows=2).figure()
    assert len(graph_objects.Figure(figure).data) == len(KINDS)  # plotly accepts it
    for trace, kind in zip(figure["data"], KINDS, strict=True):
        assert trace["name"] == kind
        assert [x * 2**30 for x in trace["x"]] == pytest.approx([getattr(whole[g[0]], kind) for g in memory.groups])
        assert trace["orientation"] == "h"
    assert len({(one["marker"]["color"], one["marker"]["pattern"]["shape"]) for one in figure["data"]}) == len(KINDS)


def test_all_models_of_estimates_are_offered() -> None:
    explorer = MemoryExplorer("dp=2 pp=2 microbatches=4 precision=bf16", "llama3-8b")
    options = explorer.controls["model"].options
    assert [name for name in options if name in PRESETS] == list(options[: len(PRESETS)])
    assert {"llama2-70b", "mixtral-8x7b", "resnet-50", "gpt3-175b", "own numbers"} <= set(options)
    assert explorer.view.memory is not None
    assert explorer.view.memory.details[0].memory == per_rank(explorer.choice.plan, "llama3-8b")[0]
    explorer.controls["model"].value = "mixtral-8x7b"
    shown = {name for name in ("tp", "experts", "top", "ep") if not explorer.controls[name].layout.display}
    assert shown == {"tp", "ep"}
    before = explorer.view.memory.details[0].memory.parameters
    explorer.controls["ep"].value = 2
    assert explorer.view.memory.details[0].memory.parameters < before
    explorer.controls["model"].value = "resnet-50"
    assert not explorer.problem


def test_controls_change_what_is_shown() -> None:
    explorer = MemoryExplorer("dp=8 pp=4 microbatches=8 precision=bf16", "megatron-18b")
    assert "Does not fit" in explorer.summary()
    before = explorer.view.data
    explorer.controls["zero"].value = 3
    assert explorer.view.data != before
    assert "Fits" in explorer.summary()
    explorer.controls["model"].value = "own numbers"
    explorer.controls["layers"].value = 12
    assert explorer.choice.numbers["layers"] == 12
    assert explorer.view.memory is not None
    own = model_of("gpt2-xl", **explorer.choice.numbers)
    assert explorer.view.memory.details[0].memory == per_rank(explorer.choice.plan, own, 64)[0]
    explorer.controls["device"].value = "own"
    explorer.controls["capacity"].value = 0.001
    assert explorer.choice.capacity == 10**6
    assert "Does not fit" in explorer.summary()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"model": "gpt-tiny", "pp": 8}, "pp=8: more stages than layers"),
        ({"tp": 16}, "tp=16: must divide 25 heads"),
        ({"zero": 1, "offload": ("parameters",)}, "offload=parameters: not together with zero=1"),
    ],
)
def test_what_cannot_be_is_said_in_words(settings: dict[str, object], says: str) -> None:
    explorer = MemoryExplorer()
    for name, value in settings.items():
        explorer.controls[name].value = value
    assert says in explorer.problem
    assert says in repr(explorer)
    assert explorer.view.table == []
    assert explorer.chart.output.outputs == ()
    assert explorer.run_button.disabled
    assert says in explorer.to_html()
    assert explorer._repr_mimebundle_()[0]["image/png"]


def test_every_model_has_numbers_or_words() -> None:
    explorer = MemoryExplorer("", "gpt-tiny")
    for name in table.names():
        explorer.controls["model"].value = name
        assert explorer.problem or explorer.view.memory is not None
        assert name in repr(explorer) or explorer.problem


def test_what_has_no_part_is_not_asked_for() -> None:
    """Experts that were switched off, and a model that is no transformer, leave nothing that cannot be undone."""
    explorer = MemoryExplorer()
    explorer.controls["experts"].value, explorer.controls["ep"].value = 8, 8
    explorer.controls["tp"].value = 4  # 25 heads
    explorer.controls["experts"].value = 0
    assert "tp=4" in explorer.problem
    explorer.controls["model"].value = "mlp-wide"
    assert explorer.problem == ""
    assert explorer.controls["tp"].layout.display == "none"


def test_only_small_models_are_run() -> None:
    assert "too large to be built" in why_not_run(CHOICE)
    assert "ranks are many" in why_not_run(Choice(Plan(dp=8), "gpt-tiny"))
    assert why_not_run(Choice(Plan(dp=2), "gpt-tiny")) == ""
    explorer = MemoryExplorer()
    assert explorer.run_button.disabled
    assert "too large" in explorer.run_button.tooltip


def test_measured_points_are_the_run_s() -> None:
    """A real run on two ranks: points in figure, view and table; the formula is near it."""
    explorer = MemoryExplorer("pp=2 microbatches=2", "gpt-tiny", rows=4)
    explorer.measure()
    peaks = explorer.view.measured
    assert len(peaks) == 2, explorer.note.value
    assert "measured on rank" in explorer.note.value
    assert explorer.view.memory is not None
    for rank, found in enumerate(peaks):
        formula = explorer.view.memory.details[rank].memory
        assert found["parameters"] == formula.parameters
        assert found["optimizer"] == pytest.approx(formula.optimizer, rel=0.01)
    scatter = explorer.figure()["data"][-1]
    assert scatter["name"] == "measured"
    assert [x * 2**20 for x in scatter["x"]] == pytest.approx(
        [sum(peaks[g[0]].values()) for g in explorer.view.memory.groups]
    )
    assert explorer.view.data["groups"][0]["measured"] == sum(peaks[explorer.view.memory.worst].values())
    assert [row[0] for row in explorer.rows()[-2:]] == ["measured: rank 0", "measured: rank 1"]
    assert size(sum(peaks[1].values())) in explorer.rows()[-1]
    explorer.controls["zero"].value = 1  # another plan has not been run
    assert explorer.view.measured == ()


def test_a_run_of_other_ranks_is_refused() -> None:
    view = MemoryView(Choice(Plan(dp=2), "gpt-tiny"), [{"parameters": 1}])
    assert view.problem == "the measured run has 1 rank, the plan 2"


def test_colours_and_hatches_are_those_of_the_browser() -> None:
    text = (SOURCES / "shared.js").read_text()
    found = dict(re.findall(r'^  "(\w+)": \["(#\w+)", "[^"]*"\],$', text, re.MULTILINE))
    marks = dict(re.findall(r'^  "(\w+)": \["#\w+", "([^"]*)"\],$', text, re.MULTILINE))
    for kind in KINDS:
        assert FACES[kind].lower() == found[kind].lower()
        assert HATCHES[kind] == marks[kind].replace("\\\\", "\\")
