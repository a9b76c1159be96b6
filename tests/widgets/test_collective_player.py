"""The collective player: the numbers on every rank, bytes compared with the lower bound, and texts for impossible
choices."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from minipar.errors import PlanError
from minipar.program import collectives
from minipar.trace import labels
from minipar_widgets import CollectivePlayer
from minipar_widgets.collective_model import Links, Play, number, play
from minipar_widgets.collective_player import CollectiveView

CASES = [
    (collective, algorithm, ranks, nodes)
    for collective in collectives.COLLECTIVES
    for algorithm in collectives.names(collective)
    for ranks in (2, 3, 8)
    for nodes in ((1, 2) if algorithm == "hierarchical" and ranks % 2 == 0 else (1,))
]


def expected(one: Play, root: int) -> list[dict[int, int]]:
    """What every rank has to hold at the end, by NumPy."""
    p, chunks = one.ranks, len(one.program.chunks)
    first = np.array([[number(r, c, p) for c in range(chunks)] for r in range(p)])
    total = first.sum(0)
    share = chunks // p
    if one.collective == "allreduce":
        return [dict(enumerate(total)) for _ in range(p)]
    if one.collective == "reduce_scatter":
        return [{c: total[c] for c in range(r * share, (r + 1) * share)} for r in range(p)]
    if one.collective == "all_gather":
        return [{c: first[c // share][c] for c in range(chunks)} for _ in range(p)]
    if one.collective == "broadcast":
        return [dict(enumerate(first[root])) for _ in range(p)]
    if one.collective == "reduce":
        return [dict(enumerate(total)) if r == root else {} for r in range(p)]
    return [{s * p + r: first[s][s * p + r] for s in range(p)} for r in range(p)]


@pytest.mark.parametrize(("collective", "algorithm", "ranks", "nodes"), CASES)
def test_ends_with_the_numbers_it_should(collective: str, algorithm: str, ranks: int, nodes: int) -> None:
    root = ranks - 1 if collective in ("broadcast", "reduce") else 0
    links = Links(1e-6, 1e-9, 1e-10)
    one = play(collective, algorithm, ranks, 5 << 20, root=root, nodes=nodes, links=links)
    for row, wanted in zip(one.last, expected(one, root), strict=True):
        assert {c: cell[0] for c, cell in enumerate(row) if cell is not None} == wanted
        if collective in ("allreduce", "reduce_scatter", "reduce"):
            assert all(cell is None or cell[1] == (1 << ranks) - 1 for cell in row)
    # what travels is what the program says, and nothing is below what must be
    assert [one.sent(rank) for rank in range(ranks)] == one.trace.bytes_sent()
    assert max(one.trace.bytes_sent()) >= one.least_bytes - ranks
    assert one.time >= one.least_time * (1 - 1e-9)
    for message in one.messages:
        assert 0 <= message.start < message.end <= one.time + 1e-12


def test_numbers_travel_when_they_are_there() -> None:
    """A message never carries a number that its sender gets later."""
    one = play("allreduce", "halving-doubling", 8, 1 << 20, links=Links(1e-6, 1e-9, 1e-9))
    for message in one.messages:
        cells = {c: one.first[message.source][c] for c in message.chunks}
        for change in one.changes:
            if change.time <= message.start + 1e-15 and change.rank == message.source and change.chunk in cells:
                cells[change.chunk] = change.cell
        assert tuple(cell[0] for cell in cells.values() if cell) == message.values


def test_ring_takes_its_closed_form_and_the_least_bytes() -> None:
    one = play("allreduce", "ring", 8, 8 << 20, links=Links(1e-5, 1e-10, 1e-11))
    assert one.time == pytest.approx(one.closed_form)
    assert max(map(one.sent, range(8))) == one.least_bytes == 2 * 7 / 8 * (8 << 20)
    assert set(one.by_link) == {(r, (r + 1) % 8) for r in range(8)}


def test_view_has_the_same_numbers_as_the_play() -> None:
    view = CollectiveView("allreduce", "ring", 4, 1 << 20)
    data = json.loads(json.dumps(view.play))
    assert view.found is not None
    assert data["last"] == [[list(cell) for cell in row] for row in view.found.last]  # type: ignore[arg-type]
    times = [change[0] for change in data["changes"]]
    assert times == sorted(times)
    assert data["moments"] == sorted(set(data["moments"]))
    assert len(view.rows()) == 1 + 4 + 4
    assert view.rows()[1] == ["0 to 1", "1,572,864", "6", "100.0%"]


def test_words_where_nothing_can_be_shown() -> None:
    assert "16" in CollectiveView("allreduce", "ring", 17, 8).problem
    assert "possible are ring" in CollectiveView("reduce_scatter", "tree", 4, 8).problem
    assert "choose 2 or more ranks" in CollectiveView("allreduce", "ring", 1, 8).problem
    view = CollectiveView("all_to_all", "direct", 12, 1 << 20)
    assert "too many to look at" in repr(view)
    assert view.rows is not None
    view.update("all_to_all", "direct", 4, 1 << 20)
    assert view.problem == ""
    with pytest.raises(PlanError):
        play("allreduce", "ring", 17, 8)


def test_only_what_is_possible_can_be_chosen() -> None:
    player = CollectivePlayer()
    player.algorithm.value = "tree"
    player.collective.value = "reduce_scatter"
    assert player.algorithm.value in collectives.names("reduce_scatter")
    assert player.root.layout.display == "none"
    player.collective.value = "broadcast"
    player.ranks.value = 12
    assert player.root.layout.display == ""
    player.root.value = 11
    player.ranks.value = 6
    assert player.root.value == 5
    assert list(player.nodes.options) == [1, 2, 3, 6]
    assert player.problem == ""


def test_static_pictures_have_no_sign_that_the_font_lacks() -> None:
    """A box is drawn for what the font has no sign for."""
    from minipar_widgets import base, words

    folders = [Path(base.__file__).parent, Path(labels.__file__).parent]
    said = "".join(path.read_text() for folder in folders for path in folder.glob("*.py"))
    box = words.font(12).getmask("\N{CJK UNIFIED IDEOGRAPH-4E00}")
    for sign in {sign for sign in said if sign > "~"}:
        mask = words.font(12).getmask(sign)
        assert (mask.getbbox(), bytes(mask)) != (box.getbbox(), bytes(box)), sign
