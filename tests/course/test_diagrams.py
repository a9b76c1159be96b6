"""Concept diagrams: what they say is true of minipar's programs, and they can be read without being seen."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from minipar.errors import PlanError
from minipar.prediction.rank_memory import states
from minipar.program import collectives
from minipar.program.mesh import Mesh
from minipar_course import diagrams
from minipar_course.diagrams import Diagram

ALL = {
    "ring": diagrams.ring(4),
    "large ring": diagrams.ring(16),
    "pair": diagrams.ring(2),
    **{f"zero {stage}": diagrams.zero(4, stage) for stage in range(4)},
    "zero of two": diagrams.zero(2, 3),
    "zero of sixteen": diagrams.zero(16, 2),
    "server": diagrams.server(3),
    "servers": diagrams.server(4, 2),
    "tiers": diagrams.memory_tiers(),
    "mesh 1": diagrams.mesh(tp=4),
    "mesh 2": diagrams.mesh(dp=2, tp=4),
    "mesh 3": diagrams.mesh(dp=2, pp=2, tp=2),
    "matmul": diagrams.matmul_forms(),
    "chart": diagrams.decision_chart(),
}
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("made", ALL.values(), ids=ALL)
def test_it_is_a_picture_with_words_for_light_and_dark(made: Diagram) -> None:
    root = ElementTree.fromstring(made.svg)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    title = root.find(f"{SVG}title")
    assert title is not None
    assert title.text
    assert made.text.startswith(title.text)
    assert root.attrib["role"] == "img"
    assert root.attrib["aria-label"] in made.text
    assert "prefers-color-scheme:dark" in made.svg
    assert repr(made).replace("\n", " ") == made.text
    assert max(map(len, repr(made).splitlines())) <= diagrams.WIDTH
    assert made._repr_html_().startswith('<img alt="')
    assert "data:image/svg+xml;base64," in made._repr_html_()
    for text in root.iter(f"{SVG}text"):  # (a letter of DejaVu Sans is 0.55 of its size wide, in the mean)
        wide = 0.55 * float(text.attrib["font-size"]) * len(text.text or "")
        before = {"start": 0.0, "middle": 0.5, "end": 1.0}[text.attrib["text-anchor"]]
        x = float(text.attrib["x"]) - before * wide
        assert x >= -2, text.text
        assert x + wide <= width + 2, text.text
        assert float(text.attrib["y"]) <= height - 6, text.text
    for box in root.iter(f"{SVG}rect"):
        if box.attrib["class"] != "paper":
            assert float(box.attrib["y"]) + float(box.attrib["height"]) <= height


def test_the_ring_sends_what_the_program_sends() -> None:
    text = diagrams.ring(4).text
    for rank, row in enumerate(collectives.program("allreduce", "ring", 4, 4000).ranks):
        first = next(ins for ins in row if ins.op.value == "SEND")
        chunk = str(first).split("(")[1][0]
        assert f"rank {rank} sends chunk {chunk} to rank {first.peer}" in text


@pytest.mark.parametrize("stage", range(4))
def test_bytes_of_zero_are_the_formulas(stage: int) -> None:
    each = states(4_000_000, ranks=4, zero=stage).total / 4_000_000
    assert f"That is {each:.3g} bytes for each parameter" in diagrams.zero(4, stage).text


def test_groups_of_a_mesh_are_the_meshs() -> None:
    text = diagrams.mesh(dp=2, pp=2, tp=2).text
    for axis in ("dp", "pp", "tp"):
        assert f"along {axis} rank 0 works with {Mesh(dp=2, pp=2, tp=2).group(0, axis)}" in text


def test_what_has_no_room_is_refused() -> None:
    for make in (
        lambda: diagrams.ring(1),
        lambda: diagrams.ring(17),
        lambda: diagrams.zero(4, 4),
        lambda: diagrams.server(0),
        lambda: diagrams.mesh(),
        lambda: diagrams.mesh(dp=8, tp=8),
    ):
        with pytest.raises(PlanError, match="possible are|room for"):
            make()
