"""The pictures in the schedules' files agree with the simulated programs, cell by cell.

    zb-h1, p=3, m=4, ...          the name of the schedule where the file has several, and what it is given
    rank 0  F0 F1 F2       I0     a cell for each unit of time: what is computed, of which micro-batch

Cells of a picture are equally wide. Lower case is the second chunk of a rank. Where there are several versions of the
parameters, `F3:1` is a forward that uses version 1, and `B1|2` the end of a backward, after which there is version 2.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass

import pytest

from minipar import Plan, simulate
from minipar.program import Instruction, Op
from minipar.strategies import schedules
from minipar.strategies.schedules.registry import find
from minipar.trace import Trace

LETTERS = {Op.FORWARD: "F", Op.BACKWARD: "B", Op.BACKWARD_INPUT: "I", Op.BACKWARD_WEIGHT: "W"}
MODULES = sorted({s.generate.__module__ for s in schedules() if s.generate.__module__.startswith("minipar.")})
CELL = re.compile(r"[FBIWfbiw]\d+(:\d+)?(\|\d+)?")


@dataclass(frozen=True)
class Picture:
    """What a file shows: the schedule, what it is given, and the cells."""

    schedule: str
    given: dict[str, str]
    rows: tuple[tuple[str, ...], ...]


def pictures(module: str) -> list[Picture]:
    """The pictures in a file's docstring."""
    text = importlib.import_module(module).__doc__ or ""
    names = [s.name for s in schedules() if s.generate.__module__ == module]
    found = []
    for header, body in re.findall(r"^    ((?=.*\bp=\d)\S.*)\n((?:    rank \d+  .*\n)+)", text, re.MULTILINE):
        given = dict(re.findall(r"\b([a-z_]+)=(\w+)", header))
        name = next((name for name in names if header.startswith(f"{name}, ")), names[0])
        lines = [line[len("    rank 0  ") :] for line in body.splitlines()]
        width = 1 + max(len(cell) for line in lines for cell in re.findall(r"\S+", line) if CELL.fullmatch(cell))
        found.append(Picture(name, given, tuple(_cells(line, width) for line in lines)))
    return found


def _cells(line: str, width: int) -> tuple[str, ...]:
    """The cells of a row, without what is said beside it."""
    cells: list[str] = []
    for k in range(0, len(line), width):
        cell = line[k : k + width].strip()
        if cell and not CELL.fullmatch(cell):
            break
        cells.append(cell)
    return tuple("\0".join(cells).rstrip("\0").split("\0"))


def drawn(trace: Trace, versions: bool, updates: bool, most: int = 1000) -> list[tuple[str, ...]]:
    """The same of a trace in whole units of time."""
    program, rows = trace.program, []
    for rank, instructions in enumerate(program.ranks):
        cells = [""] * most
        end = 0
        for index, ins in enumerate(instructions):
            if ins.op is Op.STEP and updates:
                cells[end - 1] += f"|{max(v.step for v in ins.writes if v.kind == 'param')}"
            if ins.op not in LETTERS:
                continue
            start, end = round(trace.starts[rank][index]), round(trace.ends[rank][index])
            assert abs(trace.ends[rank][index] - end) < 1e-9, "the picture has whole units of time"
            layers = ins.layers if ins.op is Op.FORWARD else tuple(reversed(ins.layers))
            each = (end - start) // len(layers)
            for k, layer in enumerate(layers):
                cells[start + k * each : start + (k + 1) * each] = [_cell(ins, layer, trace, rank, versions)] * each
        rows.append(tuple("\0".join(cells).rstrip("\0").split("\0")))
    return rows


def _cell(ins: Instruction, layer: int, trace: Trace, rank: int, versions: bool) -> str:
    """What a unit of time is of; every stage is one layer."""
    program = trace.program
    letter = LETTERS[ins.op]
    if Plan.parse(program.name).placement()[rank].index(layer):
        letter = letter.lower()
    number = ins.step * program.microbatches + ins.microbatch
    used = max((v.step for v in ins.reads if v.kind == "param"), default=-1)
    return f"{letter}{number}" + (f":{used}" if versions and ins.op is Op.FORWARD else "")


def simulated(picture: Picture) -> list[tuple[str, ...]]:
    keys = {"p": "pp", "m": "microbatches"}
    plan = Plan.parse(
        {keys.get(key, key): value for key, value in picture.given.items()} | {"schedule": picture.schedule}
    )
    program = plan.compile(layers=1 + max(map(max, plan.placement())), steps=9 if plan.asynchronous else 1)
    unit = len(program.share[0])  # (times are of a rank's whole share)
    trace = simulate(program, forward=unit, backward=2 * unit)
    cells = [cell for row in picture.rows for cell in row]
    return drawn(trace, any(":" in cell for cell in cells), any("|" in cell for cell in cells))


@pytest.mark.parametrize("module", MODULES)
def test_the_pictures_are_what_happens(module: str) -> None:
    found = pictures(module)
    doc = importlib.import_module(module).__doc__ or ""
    assert len(found) == len(re.findall(r"\brank 0  ", doc)) > 0, "a schedule's file shows what it does, in this form"
    for picture in found:
        happened = simulated(picture)
        assert len(picture.rows) == len(happened) == int(picture.given["p"])
        endless = find(picture.schedule).asynchronous is not None  # (of these the beginning is shown)
        for rank, (shown, real) in enumerate(zip(picture.rows, happened, strict=True)):
            assert len(shown) > 10
            assert shown == (real[: len(shown)] if endless else real), f"{picture.schedule}, rank {rank}"


def test_a_wrong_cell_is_found() -> None:
    """The test above can fail: another letter, another number, another place."""
    (picture,) = pictures("minipar.strategies.schedules.zb_v")
    happened = simulated(picture)
    for wrong in ("w2", "W3", ""):
        row = (*picture.rows[1][:-3], wrong, *picture.rows[1][-2:])
        assert row != happened[1]
    assert picture.rows[1] == happened[1]


def test_looped_bfs_with_one_chunk_is_gpipe_from_the_last() -> None:
    """The order of GPipe's figure: the same time and memory."""
    plans = [Plan.parse(f"pp=3 microbatches=4 schedule={words}") for words in ("gpipe", "looped-bfs chunks=1")]
    first, last = (simulate(plan.compile(layers=3)) for plan in plans)
    assert (first.time, first.in_flight()) == (last.time, last.in_flight())
    back = [ins.microbatch for ins in last.program.ranks[0] if ins.op is Op.BACKWARD]
    assert back == [3, 2, 1, 0]
