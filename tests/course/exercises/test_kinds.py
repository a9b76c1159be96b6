"""Kinds of tasks that several lessons share: a function judged by cases, a pass over programs.

The mistakes of every formula and function that a lesson asks for are tried here; those of other tasks have files of
their own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from minipar.program import Op, Program
from minipar.trace import Trace
from minipar_course.assignments import source
from minipar_course.exercise import Formula, Function, Rewrite, check
from minipar_course.exercises.kinds.function import same

SOLUTIONS = Path(__file__).parents[3] / "lessons" / "solutions"

# a function


def halves(numbers: list[float]) -> tuple[list[float], list[float]]:
    k = (len(numbers) + 1) // 2
    return numbers[:k], numbers[k:]


def cut_low(numbers: list[float]) -> tuple[list[float], list[float]]:
    return numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :]


CASES = (([1, 2, 3, 4],), ([5, 6, 7],), ([8],))
TRUE = Function(
    "halves(numbers)", CASES, truth=halves,
    mistakes=((cut_low, "who gets the odd one?"), (len, "a length")),
)  # fmt: skip


def uneven(given: Any, numbers: list[float]) -> str:
    a, b = given
    return "" if sorted([*a, *b]) == sorted(numbers) else f"has {len(a)} and {len(b)} numbers; each belongs in one half"


ANY = Function("halves(numbers)", CASES, problem=uneven, hint="count them")


def test_a_function_that_is_right_everywhere_passes() -> None:
    verdict = check(halves, TRUE)
    assert verdict
    assert verdict.reason == "halves is right in all 3 cases"
    assert check(lambda xs: (xs[:1], xs[1:]), ANY), "where many answers are right, each of them passes"


@pytest.mark.parametrize(
    ("answer", "task", "reason", "hint"),
    [
        (3, TRUE, "3 is no function", "def halves(numbers): ..."),
        (None, TRUE, "None is no function", "def halves(numbers): ..."),
        (lambda xs: None, TRUE, "halves([1, 2, 3, 4]) gives None", "does it end with `return ...`?"),
        (cut_low, TRUE, "halves([5, 6, 7]) gives ([5], [6, 7]); right is ([5, 6], [7])", "who gets the odd one?"),
        (lambda xs: ([], xs), TRUE, "([], [1, 2, 3, 4]); right is ([1, 2], [3, 4])", "it is right in 0 of 3 cases"),
        (lambda xs, k: xs, TRUE, "halves([1, 2, 3, 4]) raised TypeError", "check its arguments"),
        (lambda xs: xs[9], TRUE, "halves([1, 2, 3, 4]) raised IndexError", "mend that line first"),
        (lambda xs: (xs[:1], xs[2:]), ANY, "halves([1, 2, 3, 4]) has 1 and 2 numbers", "count them"),
        (lambda xs: 7, ANY, "gives 7, which cannot be read as an answer", "count them"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(answer: Any, task: Function, reason: str, hint: str) -> None:
    verdict = check(answer, task)
    assert not verdict
    assert reason in verdict.reason
    assert hint in verdict.hint


def test_a_stub_and_arguments_that_an_answer_changes() -> None:
    def nothing(numbers: list[float]) -> None:
        raise NotImplementedError("your code here")

    assert check(nothing, TRUE).reason == "nothing is written here yet"

    def clears(numbers: list[float]) -> object:
        found = halves(list(numbers))
        numbers.clear()
        return found

    assert check(clears, TRUE)
    assert CASES[0] == ([1, 2, 3, 4],)


def test_same() -> None:
    assert same([1, (2.0, {"a": 3})], (1.0, [2 + 1e-12, {"a": 3}]))
    assert not same(True, 1)
    assert not same(1, True)
    assert not same("ab", ["a", "b"])
    assert not same([1, 2], [1])
    assert not same({"a": 1}, {"b": 1})
    assert not same(1.0, 1.001)
    assert not same(None, 0)


# a pass


def identity(program: Program) -> Program:
    return program


def sends_at_once(program: Program) -> Program:
    """Every SEND directly after what makes its value."""
    for rank, row in enumerate(program.ranks):
        made = [ins for ins in row if ins.op is not Op.SEND]
        for send in (ins for ins in row if ins.op is Op.SEND):
            k = next(k for k, ins in enumerate(made) if send.reads[0] in ins.writes)
            made.insert(k + 1, send)
        program = program.with_rank(rank, made)
    return program


def late(program: Program) -> Program:
    """Sends at the end: the other side waits."""
    row = program.ranks[0]
    sends = [ins for ins in row if ins.op is Op.SEND]
    return program.with_rank(0, [*(ins for ins in row if ins.op is not Op.SEND), *sends])


def without(op: Op) -> Callable[[Program], Program]:
    def drop(program: Program) -> Program:
        row = program.ranks[1]
        k = next(k for k, ins in enumerate(row) if ins.op is op)
        return program.with_rank(1, [*row[:k], *row[k + 1 :]])

    return drop


PLANS = (("pp=2 microbatches=4", 4), ("pp=3 microbatches=3 schedule=1f1b", 3))


def sends(before: Trace, after: Trace) -> str:
    rows = [(trace.program.ranks[0][0].op.value, len(trace.program)) for trace in (before, after)]
    return "" if rows[0] == rows[1] else "the number of lines changed"


def test_a_pass_that_keeps_the_work_passes() -> None:
    verdict = check(sends_at_once, Rewrite(PLANS, time=15, activations=2, problem=sends))
    assert verdict
    assert verdict.reason == "what your pass makes can run and does the same work, for 2 programs"


@pytest.mark.parametrize(
    ("answer", "task", "reason", "hint"),
    [
        ("gpipe", Rewrite(PLANS), "'gpipe' is no function", "a pass is a function"),
        (lambda program: None, Rewrite(PLANS), "your pass gives NoneType, not a Program", "with_rank"),
        (lambda program: program.rank[0], Rewrite(PLANS), "raised AttributeError", "mend that line"),
        (without(Op.FORWARD), Rewrite(PLANS), "does other work: rank 1 lacks F of layer 2 mb0", "must stay"),
        (without(Op.STEP), Rewrite(PLANS), "does other work: rank 1 lacks STEP of layer 2", "must stay"),
        (without(Op.RECV), Rewrite(PLANS), "cannot run: ", "`verify` names the instruction"),
        (late, Rewrite(PLANS), "cannot run: ", "`verify` names the instruction"),
        (identity, Rewrite(PLANS, time=14), "it takes 15 units (15 before your pass); the target is 14", "draw both"),
        (identity, Rewrite(PLANS, activations=1), "rank 0 holds 2 activations; the target is 1", "freed earlier"),
        (identity, Rewrite(PLANS, problem=lambda was, now: "no line moved"), "no line moved", "print program.text"),
    ],
)  # fmt: skip
def test_passes_that_do_not(answer: Any, task: Rewrite, reason: str, hint: str) -> None:
    verdict = check(answer, task)
    assert not verdict
    assert reason in verdict.reason
    assert "\n" not in verdict.reason
    assert hint in verdict.hint


def test_a_stub_of_a_pass() -> None:
    def mine(program: Program) -> Program:
        raise NotImplementedError("your code here")

    assert check(mine, Rewrite(PLANS, time=15)).reason == "nothing is written here yet"


def test_doubled_work_is_seen() -> None:
    def twice(program: Program) -> Program:
        row = list(program.ranks[0])
        return program.with_rank(0, [row[0], *row])

    assert "rank 0 does too much: F of layer 0 mb0" in check(twice, Rewrite(PLANS)).reason


# the functions of all lessons


def functions() -> Iterator[Formula | Function]:
    """The formulas and functions that the lessons ask for, as their checks name them."""
    for path in sorted(SOLUTIONS.glob("*.ipynb")):
        text = "\n".join(map(source, json.loads(path.read_text())["cells"]))
        modules = re.findall(r"^from minipar_course\.exercises import (\w+)(?: as (\w+))?$", text, re.MULTILINE)
        known = {short or name: import_module(f"minipar_course.exercises.{name}") for name, short in modules}
        for module, name in re.findall(r"^verdict = exercise\.check\(.+, (\w+)\.(\w+)\)$", text, re.MULTILINE):
            task = getattr(known[module], name)
            if isinstance(task, Formula | Function):
                yield task


FUNCTIONS = list(functions())


def test_functions_know_mistakes() -> None:
    assert len(FUNCTIONS) > 30
    assert all(len(task.mistakes) >= 2 for task in FUNCTIONS)


@pytest.mark.parametrize("task", FUNCTIONS)
def test_each_mistake_is_told_by_its_own_hint(task: Formula | Function) -> None:
    for mistake, hint in task.mistakes:
        assert check(mistake, task).hint == hint
