"""A function of numbers, such as the time of a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minipar_course.exercises.kinds.verdict import Verdict, raised


@dataclass(frozen=True)
class Formula:
    """A function of numbers that must agree with `truth` in all cases.

    names      of the arguments, in order
    cases      arguments to try; enough of them that no constant agrees
    mistakes   wrong formulas that are often written, each with the hint that its author needs
    judge_name the name of the function that gives the right number
    hint       what to say if no mistake was recognised: where the right number comes from
    """

    names: tuple[str, ...]
    truth: Callable[..., float]
    cases: tuple[tuple[float, ...], ...]
    mistakes: tuple[tuple[Callable[..., float], str], ...] = ()
    judge_name: str = "the simulator"
    hint: str = ""

    def judge(self, answer: Any) -> Verdict:
        if not callable(answer):
            shape = f"def answer({', '.join(self.names)}): ..."
            return Verdict(False, f"{answer!r} is one number; the answer is a function for every size", shape)
        given: list[float] = []
        for case in self.cases:
            words = ", ".join(f"{name}={x:g}" for name, x in zip(self.names, case, strict=True))
            try:
                value = answer(*case)
            except Exception as error:
                return raised(error, f"for {words} your function")
            if value is None:
                return Verdict(False, f"for {words} your function gives None", "does it end with `return ...`?")
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                return Verdict(False, f"for {words} your function gives {value!r}", "it must return one number")
            given.append(float(value))
        right = [self.truth(*case) for case in self.cases]
        wrong = [k for k, (x, y) in enumerate(zip(given, right, strict=True)) if not _close(x, y)]
        if not wrong:
            return Verdict(True, f"your function agrees with {self.judge_name} in all {len(right)} cases")
        k = min(wrong, key=lambda k: math.prod(self.cases[k]))  # (the smallest one can be counted by hand)
        words = ", ".join(f"{name}={x:g}" for name, x in zip(self.names, self.cases[k], strict=True))
        reason = f"for {words} your function gives {given[k]:g}, {self.judge_name} {right[k]:g}"
        return Verdict(False, reason, self._recognised(given) or self._where(wrong) + self.hint)

    def _recognised(self, given: list[float]) -> str:
        for formula, hint in self.mistakes:
            if all(_close(x, formula(*case)) for x, case in zip(given, self.cases, strict=True)):
                return hint
        return ""

    def _where(self, wrong: list[int]) -> str:
        """If the answer is right in all cases in which one argument has one value, and in no other: that value."""
        agreed = [case for k, case in enumerate(self.cases) if k not in wrong]
        for k, name in enumerate(self.names):
            values = {case[k] for case in agreed}
            if len(values) == 1 and not values & {self.cases[j][k] for j in wrong}:
                return f"it is right only where {name}={values.pop():g}. "
        return ""


def _close(x: float, y: float) -> bool:
    return math.isclose(x, y, rel_tol=1e-9, abs_tol=1e-9)
