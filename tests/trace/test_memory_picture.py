"""The picture of memory by owner: texts, marks, and traces without bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from minipar import Plan, simulate
from minipar.costs.recomputation import LayerCosts
from minipar.errors import MiniparError
from minipar.trace import memory_picture
from minipar.trace.figure import MEMORY
from minipar.trace.memory_series import ALL_KINDS
from minipar_course.exercises.kinds.order import Device, program_of
from minipar_course.exercises.memory import STEP, B, F


def trace(layers=4):
    device = Device(LayerCosts.equal(layers, 1 << 20), (1 << 22,) * layers, 2.0)
    order = [(F, k) for k in range(layers)] + [(op, k) for k in reversed(range(layers)) for op in (B, STEP)]
    return simulate(program_of(order, device), device)


def test_every_kind_has_a_look_of_its_own():
    assert set(memory_picture.KINDS) == set(ALL_KINDS)
    assert set(MEMORY) == set(ALL_KINDS)
    assert len({(MEMORY[kind], memory_picture.HATCHES.get(kind, "")) for kind in ALL_KINDS}) == len(ALL_KINDS)


def test_words_and_areas():
    figure = memory_picture.owners(trace(), title="mine")
    assert figure.alt.startswith("Predicted memory of rank 0 over 12")
    assert "at its peak 57.00 MiB, of which optimizer 32.00 MiB, parameters 16.00 MiB, gradients 4.00 MiB" in figure.alt
    (axes,) = figure.axes
    shown = [text.get_text() for text in axes.get_legend().get_texts()]
    assert shown == ["activations", "gradients", "parameters", "optimizer"]  # as they lie, from the top
    assert axes.get_title(loc="left") == "mine"
    bundle, metadata = figure._repr_mimebundle_()
    assert metadata["image/png"]["alt"] == bundle["text/plain"] == figure.alt


def test_long_curves_keep_their_peak():
    values = np.sin(np.arange(100_000) / 1000)
    peak = int(values.argmax())
    kept = memory_picture._thinned(values, peak)
    assert len(kept) <= memory_picture.MOST
    assert {0, peak, 99_999} <= set(kept)


def test_what_cannot_be_drawn():
    with pytest.raises(MiniparError, match="counts activations, not bytes"):
        memory_picture.owners(simulate(Plan().compile(layers=2)))
    with pytest.raises(MiniparError, match="rank=1; possible are 0 to 0"):
        memory_picture.owners(trace(), rank=1)
    assert memory_picture.owners(replace(trace(1), note="x"))
