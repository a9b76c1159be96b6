"""What a reader of a page has written: a schedule, a collective or a pass. It is executed, and judged by the engine.

    found = judged(code, stages=4, microbatches=8)
    found.reason, found.line          why it is refused, and the line of the text that this is about; "" if it can run
    found.trace                       otherwise the prediction

The text is Python and may do whatever Python can: who calls this sees to it that it can do no harm, and that it ends.
"""

from __future__ import annotations

import ast
import linecache
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import minipar
from minipar import strategies
from minipar.errors import MiniparError, PlanError, ProgramError
from minipar.prediction.simulator import simulate
from minipar.program import Backward, BackwardInput, BackwardWeight, Forward
from minipar.program.collectives.own import Copy, Reduce, Send
from minipar.program.verify.verifier import verify
from minipar.strategies.plan import Plan
from minipar.trace import Trace, labels
from minipar_widgets import judging, orders

FILE = "your text"  # its name in a traceback
KINDS = ("schedule", "collective", "pass_")
_GIVEN: dict[str, Any] = {
    "minipar": minipar, "Forward": Forward, "Backward": Backward, "BackwardInput": BackwardInput,
    "BackwardWeight": BackwardWeight, "Plan": Plan, "Send": Send, "Reduce": Reduce, "Copy": Copy,
}  # fmt: skip


@dataclass(frozen=True)
class Judged:
    """What the engine says of a text.

    line      of the text, counted from 1, where the mistake is; 0: nobody knows
    details   further lines, with the evidence
    facts     what it costs, if it can run
    trace     of a schedule or a pass; `collective`, its name and kind, for the player
    """

    reason: str = ""
    line: int = 0
    details: str = ""
    facts: str = ""
    trace: Trace | None = None
    collective: tuple[str, str] | None = None


def judged(code: str, stages: int = 4, microbatches: int = 8) -> Judged:
    """Execute a text and judge what it registers: the last schedule, collective or pass in it."""
    try:
        kind, name, extra = _registered(code)
        linecache.cache[FILE] = len(code), None, code.splitlines(keepends=True), FILE  # (for messages that quote it)
        space = {**_GIVEN, "__name__": "__main__"}
        exec(compile(code, FILE, "exec"), space)
        if kind == "collective":
            return Judged(collective=(name, str(extra)))
        if kind == "pass_":
            return _of_pass(name, stages, microbatches)
        return _of_schedule(name, stages, microbatches)
    except SyntaxError as error:
        return Judged(f"{error.msg}", error.lineno or 0)
    except MiniparError as error:
        return Judged(error.reason, line_of(error), error.details)
    except Exception as error:
        return Judged(f"{type(error).__name__}: {error}", line_of(error))


def line_of(error: BaseException) -> int:
    """The last line of the text that led to an error; 0 if none did."""
    now: BaseException | None = error
    while now is not None:
        for frame in reversed(traceback.extract_tb(now.__traceback__)):
            if frame.filename == FILE:
                return frame.lineno or 0
        now = now.__cause__ or now.__context__
    return 0


def _registered(code: str) -> tuple[str, str, str]:
    """What a text registers last: the decorator, the name, and a collective's kind. Errors: PlanError, SyntaxError."""
    found = ("", "", "")
    for part in ast.walk(ast.parse(code, FILE)):
        for one in getattr(part, "decorator_list", ()):
            if isinstance(one, ast.Call) and one.args and isinstance(one.args[0], ast.Constant):
                word = one.func.attr if isinstance(one.func, ast.Attribute) else getattr(one.func, "id", "")
                second = one.args[1] if len(one.args) > 1 else None
                if word in KINDS:
                    extra = str(second.value) if isinstance(second, ast.Constant) else "allreduce"
                    found = (word, str(one.args[0].value), extra)
    if not found[0]:
        raise PlanError('there is nothing to judge: possible is a function with @minipar.schedule("mine") above it')

    return found


def _of_schedule(name: str, stages: int, microbatches: int) -> Judged:
    plan = Plan(pp=stages, microbatches=microbatches, schedule=name)
    order = orders.order_of(plan)
    found = judging.judge(order, orders.HAND)
    if found.trace is not None:
        others = [one for one in found.same_as if one != name]
        same = f" · this is {', '.join(others)}" if others else ""
        return Judged(facts=labels.facts(found.trace) + same, trace=found.trace)
    line = 0
    if found.guilty:
        rank, place = min(found.guilty)
        line = _lines(plan, rank)[place]
    return Judged(found.reason, line, found.details)


def _lines(plan: Plan, rank: int) -> list[int]:
    """For each action of a rank the line of the text that yielded it."""
    schedule = strategies.find(plan.schedule)
    given = {"chunks": plan.chunks or schedule.chunks}
    options = {key: given[key] for key in schedule.options if key in given}
    made = schedule.generate(rank, plan.pp, plan.microbatches, **options)
    found: list[int] = []
    frame = getattr(made, "gi_frame", None)
    items: Iterable[Any] = made
    for _ in items:
        found.append(frame.f_lineno if frame is not None else 0)
    return found


def _of_pass(name: str, stages: int, microbatches: int) -> Judged:
    plan = Plan(pp=stages, microbatches=microbatches, extra_passes=name)
    program = plan.compile(layers=2 * stages, check=False)
    try:
        verify(program)
    except ProgramError as error:
        return Judged(error.reason, 0, error.details)
    trace = simulate(program)
    return Judged(facts=labels.facts(trace), trace=trace)
