"""The checkpoint explorer: the tape is what plans compile to, its memory is the sum of live values, and there is a best
K."""

from __future__ import annotations

import math

import pytest

from minipar.errors import PlanError
from minipar.program import Op
from minipar.program.shape import uniform
from minipar.strategies.plan import Plan
from minipar_widgets import CheckpointExplorer
from minipar_widgets.checkpoint_explorer import CheckpointView
from minipar_widgets.checkpoint_model import Layers, best_length, curve, lengths_to_measure, measure, tape

WORDS = ["none", "sqrt", "1", "3", "5", "16", "3,7,11", "20B", "12B"]


@pytest.mark.parametrize(("saved", "word"), [*((1, word) for word in WORDS), *((3, word) for word in WORDS[:-1])])
def test_tape_is_the_program_s(saved: int, word: str) -> None:
    layers = Layers(16, saved, backward=2.5 - saved / 2)
    program = Plan(checkpoint=word).compile(uniform(16), costs=layers.costs)
    ran = []
    for ins in program.ranks[0]:
        if ins.op is not Op.STEP:
            order = ins.layers if ins.op is not Op.BACKWARD else sorted(ins.layers, reverse=True)
            ran += [(ins.op, layer) for layer in order]
    assert [(move.op, move.layer) for move in tape(layers, word).moves] == ran


@pytest.mark.parametrize(("saved", "word"), [*((2, word) for word in WORDS), (1, "5B"), (1, "4B")])
def test_memory_is_what_is_alive(saved: int, word: str) -> None:
    """Outputs, saved values and the gradient on its way, added up by their lives."""
    one = tape(Layers(16, saved), word)
    assert word not in ("5B", "4B") or any(m.op is Op.RECOMPUTE and m.drops for m in one.moves)
    chain = one.chain
    for k, (move, level) in enumerate(zip(one.moves, one.levels, strict=True)):
        alive = [life for life in one.lifetimes if life.first <= k < life.last]
        kept = sum(chain.output[life.layer] if life.kind == "output" else chain.saved[life.layer] for life in alive)
        gone = [m.layer for m in one.moves[: k + 1] if m.op is Op.BACKWARD]
        gradient = chain.gradient[gone[-1] - 1] if gone and gone[-1] else 0
        assert level.after == kept + gradient, (k, move)
        assert level.during >= level.after
    assert one.levels[-1].after == 0


def test_square_root_is_the_least_of_all_lengths() -> None:
    for count in (4, 9, 16, 25, 36, 64):
        layers = Layers(count, saved=0)
        points = curve(layers)
        least = min(point.peak for point in points[1:])
        assert best_length(layers) == round(math.sqrt(count))
        assert points[best_length(layers)].peak <= least + 1
        assert points[0].time < points[best_length(layers)].time <= points[0].time + count


@pytest.mark.parametrize(
    ("layers", "word", "says"),
    [
        (Layers(16), "2B", "too small; the least is"),
        (Layers(16), "17", "checkpoint=17: the model has 16 layers"),
        (Layers(16), "selective", "is for attention"),
        (Layers(16), "some", "must be none, sqrt"),
        (Layers(16), "9,3", "ascending order"),
    ],
)
def test_what_cannot_be_is_said_in_words(layers: Layers, word: str, says: str) -> None:
    view = CheckpointView(layers, word)
    assert says in view.problem
    assert view.table == []
    view.update(layers, "4")
    assert view.problem == ""
    with pytest.raises(PlanError, match="possible are 2 to 64"):
        Layers(65)


def test_controls_change_tape_and_curves() -> None:
    explorer = CheckpointExplorer()
    assert "checkpoint=sqrt" in explorer.summary()
    explorer.controls["way"].value = "every K layers"
    explorer.controls["length"].value = 8
    assert explorer.view.found is not None
    assert explorer.view.found.moves == tape(Layers(16), "8").moves
    explorer.controls["layers"].value = 6  # K follows
    assert explorer.word == "6"
    explorer.controls["way"].value = "a budget"
    explorer.controls["budget"].value = 5
    assert "too small" in explorer.problem
    assert "too small" in explorer.to_html()
    explorer.controls["budget"].value = 60
    assert explorer.problem == ""
    explorer.controls["way"].value = "layers"
    explorer.controls["starts"].value = "2,4"
    assert explorer.word == "2,4"
    explorer.controls["starts"].value = "2"
    assert explorer.word == "2,"
    assert explorer.problem == ""


def test_figure_has_the_sqrt_point_on_the_curve() -> None:
    explorer = CheckpointExplorer(25)
    explorer.controls["saved"].value = 0
    memory, time, star = explorer.figure()["data"]
    assert "√N = 5" in star["name"]
    assert star["x"] == [5]
    assert star["y"][0] == memory["y"][memory["x"].index(5)] == min(memory["y"])
    assert max(time["y"]) < 4 / 3 + 1e-9


def test_measured_runs_lie_near_the_curve() -> None:
    """Real layers on a real rank, for some lengths: the bytes of activations."""
    layers = Layers(8, rows=256)
    points = curve(layers)
    runs = measure(layers, [0, 3, 8], steps=4)
    for run in runs:
        # The formula counts layer by layer; the run has temporaries of a gradient besides.
        assert run.peak == pytest.approx(points[run.length].peak, rel=0.15)
    assert lengths_to_measure(16) == [0, 1, 2, 4, 8, 16]
    with pytest.raises(PlanError, match="on paper only"):
        measure(Layers(8), [1])
