"""A function of anything, such as a partitioner or a rule of a server."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from minipar_course.exercises.kinds.verdict import Verdict, raised

LONGEST = 60  # characters of a value in a sentence


@dataclass(frozen=True)
class Function:
    """A function that is tried on cases. It must give what `truth` gives, or anything that `problem` does not refuse.

    signature  how it is called, such as "cut(times, stages)"
    cases      tuples of arguments, of which it gets copies; enough of them that no constant is right
    truth      gives the one right answer to a case (numbers must agree to 1e-9, sequences element by element)
    problem    if many answers are right: (given, *case) -> what is wrong with it, "" if nothing
    mistakes   wrong functions that are often written, each with the hint that its author needs
    hint       what to say if no mistake was recognised
    """

    signature: str
    cases: tuple[tuple[Any, ...], ...]
    truth: Callable[..., Any] | None = None
    problem: Callable[..., str] | None = None
    mistakes: tuple[tuple[Callable[..., Any], str], ...] = ()
    hint: str = ""

    def judge(self, answer: Any) -> Verdict:
        name = self.signature.partition("(")[0]
        if not callable(answer):
            return Verdict(False, f"{_short(answer)} is no function", f"def {self.signature}: ...")
        given: list[Any] = []
        for case in self.cases:
            try:
                given.append(answer(*copy.deepcopy(case)))
            except Exception as error:
                return raised(error, call(name, case))
        texts = [self._wrong(one, case) for one, case in zip(given, self.cases, strict=True)]
        wrong = [k for k, text in enumerate(texts) if text]
        if not wrong:
            return Verdict(True, f"{name} is right in all {len(self.cases)} cases")
        k = wrong[0]
        hint = "does it end with `return ...`?" if given[k] is None else self._recognised(given) or self.hint
        hint = hint or f"it is right in {len(texts) - len(wrong)} of {len(texts)} cases"
        return Verdict(False, f"{call(name, self.cases[k])} {texts[k]}", hint)

    def _wrong(self, given: Any, case: tuple[Any, ...]) -> str:
        """What is wrong with the answer to one case; empty if nothing."""
        if given is None:
            return "gives None"
        if self.problem is not None:
            try:
                return self.problem(given, *copy.deepcopy(case))
            except Exception as error:  # (the answer has another form than was asked for)
                return f"gives {_short(given)}, which cannot be read as an answer ({type(error).__name__}: {error})"
        assert self.truth is not None, "a task has a truth or says what a problem is"
        right = self.truth(*copy.deepcopy(case))
        return "" if same(given, right) else f"gives {_short(given)}; right is {_short(right)}"

    def _recognised(self, given: list[Any]) -> str:
        for function, hint in self.mistakes:
            try:
                values = [function(*copy.deepcopy(case)) for case in self.cases]
            except Exception:  # (this mistake gives no answer to some case, so it was not made)
                continue
            if all(same(x, y) for x, y in zip(given, values, strict=True)):
                return hint
        return ""


def same(given: Any, right: Any) -> bool:
    """Whether two answers are equal: numbers to 1e-9, sequences and mappings element by element, of any type."""
    if isinstance(right, bool) or isinstance(given, bool):
        return isinstance(right, bool) and isinstance(given, bool) and given == right
    if isinstance(right, Real):
        return isinstance(given, Real) and math.isclose(given, right, rel_tol=1e-9, abs_tol=1e-9)
    if isinstance(right, Mapping):
        return (
            isinstance(given, Mapping) and given.keys() == right.keys() and all(same(given[k], right[k]) for k in right)
        )
    if isinstance(right, Sequence) and not isinstance(right, str):
        alike = isinstance(given, Sequence) and not isinstance(given, str) and len(given) == len(right)
        return alike and all(map(same, given, right))
    return bool(given == right)


def call(name: str, case: tuple[Any, ...]) -> str:
    """A case as it is written in code."""
    return f"{name}({', '.join(_short(argument) for argument in case)})"


def _short(value: Any) -> str:
    text = getattr(value, "__name__", None) if callable(value) else None
    text = text or repr(value)
    return text if len(text) <= LONGEST else text[: LONGEST - 4] + " ..."
