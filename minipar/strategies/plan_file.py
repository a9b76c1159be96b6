"""A plan as a file, in TOML: one key a line, in the order of the key table, without what has its default.

    # A plan of minipar 0.2.0. Keys that are not here have their defaults: see `minipar keys`.
    # ranks of the pipeline
    pp = 4
    # micro-batches of each replica and round
    microbatches = 16

    # the forms of some operators' outputs or of parameters, by patterns of their names; ...
    [annotations]
    "*.mlp.0" = "S-1 on tp"

The text depends only on the plan, so that two plans can be compared with `diff`, and a file that is loaded and saved
keeps its bytes.
"""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from minipar.errors import PlanError
from minipar.program import collectives
from minipar.strategies.schedules import registry

if TYPE_CHECKING:
    from minipar.strategies.plan import Plan

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

VERSION = "0.2.0"  # of minipar, whose root a room below cannot import; a test compares the two


def save(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan to a file. Errors: PlanError as of `text`, and where the file cannot be written."""
    content = text(plan)
    try:
        Path(path).write_text(content, "utf-8", newline="\n")
    except OSError as error:
        raise PlanError(f"{path}: cannot be written ({error.strerror}); possible is another folder") from None


def load(path: str | os.PathLike[str]) -> Plan:
    """The plan of a file. Errors: PlanError; it names the file, and the line of the key that it is about."""
    try:
        content = Path(path).read_text("utf-8")
    except OSError as error:
        raise PlanError(f"{path}: cannot be read ({error.strerror}); possible is a file that Plan.save wrote") from None
    except UnicodeDecodeError:
        raise PlanError(f"{path}: is no text; possible is a file that Plan.save wrote") from None
    return read(content, str(path))


def text(plan: Plan) -> str:
    """The content of a plan's file. Errors: PlanError for a schedule, pass or collective of the user's own: another
    process would not know it by its name."""
    _check_own(plan)
    lines = [f"# A plan of minipar {VERSION}. Keys that are not here have their defaults: see `minipar keys`."]
    for field in fields(plan):
        value = getattr(plan, field.name)
        if value == field.default:
            continue
        if field.name == "annotations":  # (the last key: what follows a table's head belongs to it)
            lines += ["", f"# {field.metadata['key'].help}", "[annotations]"]
            lines += [f"{_written(pattern)} = {_written(form)}" for pattern, form in value]
        else:
            lines += [f"# {field.metadata['key'].help}", f"{field.name} = {_written(value)}"]
    return "\n".join(lines) + "\n"


def read(content: str, name: str) -> Plan:
    """The plan of such a text; `name` is what errors call it. Errors: PlanError."""
    from minipar.strategies.plan import Plan

    try:
        table = tomllib.loads(content)
    except ValueError as error:
        raise PlanError(f"{name}: is no TOML ({error}); possible are lines such as pp = 2") from None
    for key, value in table.items():
        if isinstance(value, dict) and key != "annotations":
            raise PlanError(
                f"{name}{_line(content, key)}: [{key}] is a table; possible are lines such as pp = 2, and the table "
                "[annotations]"
            )
    try:
        return Plan.parse(table)
    except PlanError as error:
        about = re.match(r"(?:plan key ')?(\w+)", error.reason)
        line = _line(content, about[1]) if about and about[1] in table else ""
        raise PlanError(f"{name}{line}: {error.reason}", error.details) from None


def _check_own(plan: Plan) -> None:
    own = "possible is to save the plan without it, and to give it in code: replace(Plan.load(path), {}={!r})"
    if not registry.find(plan.schedule).generate.__module__.startswith("minipar."):
        raise PlanError(
            f"schedule={plan.schedule}: is your own, and a file has only its name; "
            + own.format("schedule", plan.schedule)
        )
    if plan.extra_passes:
        raise PlanError(
            f"extra_passes={','.join(plan.extra_passes)}: are your own, and a file has only their names; "
            + own.format("extra_passes", plan.extra_passes)
        )
    if collectives.registered(plan.algorithm) is not None:
        raise PlanError(
            f"algorithm={plan.algorithm}: is your own, and a file has only its name; "
            + own.format("algorithm", plan.algorithm)
        )


def _written(value: object) -> str:
    """A value as TOML. A text of JSON is one of TOML, but for one control character."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_written, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)


def _line(content: str, key: str) -> str:
    """Where a key stands, in words."""
    for number, line in enumerate(content.splitlines(), 1):
        if re.match(rf"\s*(\[\s*)?[\"']?{re.escape(key)}[\"']?\s*[\]=.]", line):
            return f", line {number}"
    return ""
