"""The kernel's side of the editor: its answers to the browser's requests."""

from __future__ import annotations

import base64

import pytest

from minipar import Plan, verify
from minipar_widgets import ScheduleEditor


def _swapped(editor: ScheduleEditor, rank: int, a: int, b: int) -> list[list[str]]:
    ranks = [list(row) for row in editor.words]
    ranks[rank][a], ranks[rank][b] = ranks[rank][b], ranks[rank][a]
    return ranks


def test_a_move_in_the_browser_is_judged_at_once() -> None:
    editor = ScheduleEditor("1f1b", stages=2, microbatches=4, schedule="test-editor")
    before = editor.trace
    assert before is not None
    assert editor.board["facts"].startswith("time 15 ")
    assert editor.board["facts"].endswith("this is 1f1b")
    first = editor.words
    editor.order = {"id": 7, "ranks": _swapped(editor, 0, 1, 2)}
    assert editor.board["id"] == 7
    assert [[b["word"] for b in row] for row in editor.board["ranks"]] == [list(row) for row in editor.words]
    assert editor.words != first
    assert editor.trace is not None
    assert editor.trace.time > before.time
    verify(Plan(pp=2, microbatches=4, schedule="test-editor").compile(layers=2))


def test_a_complaint_stands_in_place_and_names_the_blocks() -> None:
    editor = ScheduleEditor("gpipe", stages=2, microbatches=2, schedule="test-editor")
    editor.order = {"id": 2, "ranks": _swapped(editor, 1, 1, 3)}
    assert editor.trace is None
    assert editor.problem == ""  # the blocks stay, so that the order can be mended
    assert "backward before forward" in editor.complaint == editor.board["reason"]
    assert [b["word"] for row in editor.board["ranks"] for b in row if b["guilty"]] == ["B1"]
    assert editor.label.endswith(editor.complaint)
    editor.order = {"id": 3, "ranks": _swapped(editor, 1, 1, 3)}
    assert editor.complaint == ""


@pytest.mark.parametrize(
    ("start", "words"),
    [("pipedream", "no parts of one step"), ("nothing", "unknown; possible are"), ("zb-h2", "cannot fill pp=4")],
)
def test_bad_input_is_answered_in_words(start: str, words: str) -> None:
    editor = ScheduleEditor(start, stages=4, microbatches=4)
    assert words in editor.problem
    assert words in repr(editor)
    assert base64.b64decode(editor._repr_mimebundle_()[0]["image/png"]).startswith(b"\x89PNG")
    assert words in editor.to_html()
    editor.load("gpipe", 2, 2)
    assert editor.problem == ""


def test_a_program_changed_by_hand_is_taken_as_it_is() -> None:
    program = Plan(pp=2, microbatches=2, schedule="gpipe").compile(layers=4)
    row = list(program.ranks[1])
    backward = [k for k, ins in enumerate(row) if str(ins).startswith("B ")]
    row[backward[0]], row[backward[1]] = row[backward[1]], row[backward[0]]
    editor = ScheduleEditor(program.with_rank(1, row), schedule="test-editor")
    assert editor.words[1] == ("F0", "F1", "B1", "B0")
    assert editor.words[0] == ("F0", "F1", "B0", "B1")
