"""Lesson 18: its cells are the small engine, whose lists are minipar's programs; wrong answers are told why."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from minipar import Plan, ProgramError, models, verify
from minipar_course import small_engine
from minipar_course.assignments import solved, source
from minipar_course.exercises import engine as tasks
from minipar_course.small_engine import compiled, data_parallel, gpipe, one_f_one_b, recomputed, zero_1
from minipar_course.tuples import to_program, to_trace

LESSONS = Path(__file__).parents[3] / "lessons"
FILE = LESSONS / "minipar_course" / "small_engine.py"
SIZES = product((None, models.shape("gpt-tiny")), (1, 2, 3), (1, 4), (1, 3), (gpipe, one_f_one_b), (0, 1), (0, 1))


def cells(path: Path, beginning: str) -> list[str]:
    found = json.loads(path.read_text())["cells"]
    return [source(cell) for cell in found if cell["cell_type"] == "code" and cell["id"].startswith(beginning)]


# the engine ----------------------------------------------------------------------------------------------------------


def test_the_engine_has_at_most_three_hundred_lines() -> None:
    assert len(FILE.read_text().splitlines()) <= 300


def test_the_cells_of_the_lesson_are_the_engine() -> None:
    whole = FILE.read_text()
    shown = cells(LESSONS / "18_small_engine.ipynb", "engine-")
    written = [solved(cell) for cell in cells(LESSONS / "solutions" / "18_small_engine.ipynb", "answer-")]
    assert all(cell in whole for cell in shown)
    assert len([cell for cell in written if cell in whole]) == 4
    left = whole
    for cell in shown:
        left = left.replace(cell, "")
    assert "def " not in left  # (its imports, and what it says of itself)


def test_lists_are_the_programs_of_plans() -> None:
    for shape, p, m, dp, schedule, zero, again in SIZES:
        if zero and dp == 1:
            continue
        rows = compiled(schedule, p, m)
        rows = recomputed(rows) if again else rows
        rows = data_parallel(rows, dp) if dp > 1 else rows
        rows = zero_1(rows) if zero else rows
        mine = to_program(rows, p, shape)
        verify(mine)
        name = "gpipe" if schedule is gpipe else "1f1b"
        layers = p if shape is None else shape.layers
        plan = Plan(pp=p, dp=dp, microbatches=m, schedule=name, zero=zero, checkpoint=layers if again else "none")
        theirs = plan.compile(layers=p) if shape is None else plan.compile(shape)
        assert (mine.ranks, mine.state, mine.mesh) == (theirs.ranks, theirs.state, theirs.mesh), plan


def test_what_is_no_list_is_refused_and_times_make_a_trace() -> None:
    with pytest.raises(ProgramError, match=r"rank 0: \('F', 1, 2\) is no instruction"):
        to_program([[("F", 1, 2)]], 1)
    program = to_program(compiled(gpipe, 1, 1), 1)
    trace = to_trace(program, [[(5.0, 6.0), (6.0, 8.0), (8.0, 8.5)]])
    assert (trace.kind, trace.time, trace.busy) == ("measured", 3.5, [3.5])


# lists ---------------------------------------------------------------------------------------------------------------


def each(change: Callable[[list[Any]], list[Any]], make: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: [change(row) for row in make(*given)]


def sends_at_the_end(row: list[Any]) -> list[Any]:
    sends = [ins for ins in row if ins[:2] == ("SEND", "output")]
    first = next(k for k, ins in enumerate(row) if ins[0] == "STEP" or ins[:2] == ("RECV", "gradient"))
    others = [ins for ins in row[:first] if ins not in sends]
    return [*others, *(ins for ins in sends if ins in row[:first]), *row[first:]]


def recomputes_late(row: list[Any]) -> list[Any]:
    found = list(row)
    for k, ins in enumerate(row[:-1]):
        if ins[0] == "R" and row[k + 1][0] == "RECV":
            found[k : k + 2] = row[k + 1], ins
    return found


def recomputes_all_first(row: list[Any]) -> list[Any]:
    again = [ins for ins in row if ins[0] == "R"]
    found = [ins for ins in row if ins[0] != "R"]
    last = max((k for k, ins in enumerate(found) if ins[0] == "F0"), default=-1)
    first = min((k for k, ins in enumerate(found) if ins[0] == "B" or ins[:2] == ("RECV", "gradient")), default=0)
    return [*found[:first], *again, *found[first:]] if last < first else row


def without(*kinds: str) -> Callable[[list[Any]], list[Any]]:
    return lambda row: [ins for ins in row if ins[0] not in kinds]


def renamed(old: str, new: tuple[Any, ...]) -> Callable[[list[Any]], list[Any]]:
    return lambda row: [(*new, *ins[1:]) if ins[0] == old else ins for ins in row]


TOLD = [
    # the compiler
    (tasks.COMPILED, lambda *_: None, "gives NoneType, no list of lists", "one list of tuples for each rank"),
    (tasks.COMPILED, each(tasks._sends_first, compiled), "where ('F', 0) should be", "send it behind that"),
    (tasks.COMPILED, each(without("SEND", "RECV"), compiled), "where ('SEND'", "there are no messages"),
    (tasks.COMPILED, each(without("SEND"), compiled), "the lists never end", "a RECV waits for the SEND"),
    (tasks.COMPILED, each(without("B"), compiled), "lacks ('B', 0)", "stands in a list once"),
    (tasks.COMPILED, each(lambda row: row[:2] * 2 + row[2:], compiled), "once too often", "stands in a list once"),
    (tasks.COMPILED, lambda s, p, m: compiled(one_f_one_b, p, m), "does ('B', 0) where", "in which they were given"),
    (tasks.COMPILED, each(lambda row: [*row, ("SEND", "output", 9, 9)], compiled), "no rank 9", "nobody before it"),
    (tasks.COMPILED, each(lambda row: [*row, "STEP"], compiled), "no list of tuples", "a table of all tuples"),
    (
        tasks.COMPILED,
        each(sends_at_the_end, compiled),
        "does the right work, but it takes",
        "as soon as it is computed",
    ),
    # ZeRO-1
    (tasks.ZERO_1, lambda rows: rows, "where ('SCATTER'", "still updates all weights"),
    (tasks.ZERO_1, tasks._sums_whole, "where ('SCATTER'", "right, but wasteful"),
    (tasks.ZERO_1, each(without("GATHER"), zero_1), "where ('GATHER'", "get the others"),
    (tasks.ZERO_1, tasks._whole_step, "where ('STEP', (0, 1)) should be", "updates no more"),
    (tasks.ZERO_1, each(renamed("GATHER", ("SUM",)), zero_1), "STEP", "`verify` names the tuple"),
    (tasks.ZERO_1, each(lambda row: [*row, row[-1]], zero_1), "7 are enough", "that another one has not done"),
    # recomputation
    (tasks.RECOMPUTED, lambda rows: rows, "where ('F0', 0) should be", "keeps its graph"),
    (tasks.RECOMPUTED, each(without("R"), recomputed), "where ('R', 0) should be", "R runs the forward again"),
    (tasks.RECOMPUTED, each(renamed("F0", ("F",)), recomputed), "where ('F0', 0) should be", "make it F0"),
    (tasks.RECOMPUTED, tasks._everywhere, "where ('F', 0) should be", "wastes time"),
    (tasks.RECOMPUTED, each(recomputes_late, recomputed), "does nothing meanwhile", "before the RECV it runs"),
    (tasks.RECOMPUTED, each(recomputes_all_first, recomputed), "holds 3 graphs", "as late as you can"),
    # numbers
    (tasks.LENGTH, lambda r, p, m: 6 * m + 1, "your function gives", "have one neighbour"),
    (tasks.LENGTH, lambda r, p, m: 2 * m + 1, "your function gives", "count the messages"),
    (tasks.LENGTH, lambda r, p, m: tasks._length(r, p, m) - 1, "your function gives", "stands in each list once"),
    (tasks.BYTES, lambda *x: tasks._sent(*x) + x[-1] * x[4] * (1 - 1 / x[5]), "gives", "how many bytes more"),
    (tasks.BYTES, lambda *x: tasks._sent(*x) - x[4] * (1 - 1 / x[5]), "gives", "around the ring twice"),
    (tasks.BYTES, lambda *x: 2 * x[2] * x[3] + 2 * x[4] * (1 - 1 / x[5]), "gives", "at the end has one neighbour"),
    # who waits
    (tasks.STUCK, tasks._stuck_without_names, "right is {0:", "a message has a name"),
    (tasks.STUCK, tasks._stuck_without_collectives, "gives {}", "a SUM waits, too"),
    (tasks.STUCK, tasks._stuck_at_sends, "right is {1:", "isend returns at once"),
    # four engines
    (tasks.CULPRIT, lambda name: "the weight", "gives 'the weight'", "it is one of"),
    (tasks.CULPRIT, lambda name: "weight", 'with engine A it is not "weight"', "would be right, and 18 would not"),
    (tasks.CULPRIT, lambda name: "order", 'with engine A it is not "order"', "mixed up"),
    (tasks.CULPRIT, lambda name: "nothing", 'with engine A it is not "nothing"', "plain torch's for both"),
    (tasks.CULPRIT, lambda name: tasks._IS[name].replace("nothing", "early send"), "engine B", "before stage 0"),
]


@pytest.mark.parametrize(("task", "answer", "reason", "hint"), TOLD)
def test_wrong_and_wasteful_answers(task: Any, answer: Any, reason: str, hint: str) -> None:
    verdict = task.judge(answer)
    assert not verdict
    assert reason in verdict.reason
    assert hint in verdict.hint


@pytest.mark.parametrize("task", [tasks.COMPILED, tasks.ZERO_1, tasks.RECOMPUTED, tasks.CULPRIT, tasks.INTERPRETER])
def test_what_is_no_function_is_told_its_form(task: Any) -> None:
    assert "def " in task.judge(None).hint


# the interpreter -----------------------------------------------------------------------------------------------------


def interpreter(*edits: tuple[str, str]) -> Callable[..., Any]:
    """The small engine's, with changes in its source."""
    text = inspect.getsource(small_engine.interpret)
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    names: dict[str, Any] = {**vars(small_engine), "__name__": "__main__"}
    exec(text, names)
    return names["interpret"]


SUM = "dist.all_reduce(gradients, group=groups[ranks])"
EACH = "[dist.all_reduce(p.grad, group=groups[ranks]) for p in stage.layers.parameters()]"


@pytest.mark.parametrize(
    ("edit", "reason", "hint"),
    [
        (tasks._EDITS["weight"], "not plain torch's", "but one with more rows counts more"),
        (("* (len(ys[i]) / rows)", ""), "not plain torch's", "multiply it by its part of all `rows`"),
        ((SUM, "pass"), "on 4 ranks the parameters", "SUM adds the gradients of all ranks"),
        (tasks._EDITS["order"], "not plain torch's", "is what arrives what was sent"),
        (("stage.step(", "stage.updates("), "AttributeError", "mend that line"),
        ((SUM, EACH), "it sums gradients 4 times in a step", "one all_reduce of stage.gradients"),
        (("graphs.pop(i)", "graphs[i]"), "a rank holds up to", "graphs.pop(i)"),
    ],
    ids=["equal parts", "no part", "no sum", "order", "error", "many sums", "graphs stay"],
)
def test_wrong_and_wasteful_interpreters(edit: tuple[str, str], reason: str, hint: str, clusters: Any) -> None:
    verdict = tasks.INTERPRETER.judge(interpreter(edit), clusters)
    assert not verdict
    assert reason in verdict.reason
    assert hint in verdict.hint


def test_the_four_engines_do_what_the_lesson_says(clusters: Any) -> None:
    right, all_wrong, first_stage = [False] * 3, [True] * 3, [False, True, False]
    shown = {("A", 16): all_wrong, ("B", 18): right, ("C", 16): first_stage, ("D", 16): right, ("D", 18): all_wrong}
    for (name, rows), wrong in shown.items():
        seen = tasks.evidence(name, rows, clusters(2))
        assert [error > 1e-5 for error in (seen.loss_error, *seen.gradient_error)] == wrong, name
