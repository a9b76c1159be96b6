"""Everything that reads what somebody else wrote, and inputs for it: nearly right ones, and any.

Each of `PARSERS` either takes its input or refuses it in one line, with an error of ours, in little time and memory.
`test_parsers.py` tries a few inputs of each; `tests/faults/campaign.py` many, and prints a table.
"""

from __future__ import annotations

import contextlib
import copy
import gzip
import io
import json
import os
import resource
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from minipar import Plan, cli
from minipar.cluster import magic
from minipar.costs.device import DeviceSpec
from minipar.errors import MiniparError, ProgramError
from minipar.execution.lines import Slice
from minipar.execution.saving import keeping
from minipar.execution.saving.folder import INDEX, Header, SavedParameter, _checksum, open_folder
from minipar.execution.saving.keeping import Share
from minipar.execution.saving.storage import Reading
from minipar.program import Program
from minipar.program.verify.verifier import verify
from minipar.trace import Trace

SECONDS = 2.0  # of a core, for one input
MEMORY = 200 << 20  # bytes that the peak of this process may grow, for one input

odd = st.one_of(
    st.none(), st.booleans(), st.sampled_from([-1, 0, 1, 2, 3, 10**9, 10**30, -(10**9), 0.5, -0.0, 1e308, 1e-308]),
    st.sampled_from([float("nan"), float("inf"), "", "x", "\x00", "1", "\ud800", "{}"]),
    st.sampled_from([[], {}, [[]], {"": None}, [0, 0]]),
    st.text(max_size=5),
)  # fmt: skip
number = st.sampled_from(["0", "1", "2", "3", "4", "8", "-1", "1.5", "1e9", "1000000", "1000000000", "9" * 50, "x", ""])


@st.composite
def changed(draw: Any, sound: Callable[[], Any]) -> Any:
    """A JSON value in which a few places, anywhere, are something else, twice there, or missing."""
    found = copy.deepcopy(sound())
    for _ in range(draw(st.integers(1, 3))):
        holder, key = None, None
        at = found
        while isinstance(at, (dict, list)) and at and (holder is None or draw(st.integers(0, 4))):
            holder = at
            key = draw(st.sampled_from(sorted(at))) if isinstance(at, dict) else draw(st.integers(0, len(at) - 1))
            at = at[key]
        if holder is None:
            return copy.deepcopy(draw(odd))
        what = draw(st.integers(0, 5))
        if what == 0:
            del holder[key]
        elif what == 1 and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(at))
        else:
            holder[key] = copy.deepcopy(draw(odd))
    return found


def words(names: list[str], values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Words such as `pp=4`, and some that are none."""
    word = st.builds("{}={}".format, st.sampled_from(names), values) | st.text(max_size=8)
    return st.lists(word, max_size=5).map(" ".join)


def _values() -> st.SearchStrategy[str]:
    choices = [
        "1f1b",
        "gpipe",
        "interleaved",
        "zb-h1",
        "true",
        "false",
        "none",
        "auto",
        "ps",
        "host",
        "disk",
        "0,1",
        "5,3",
    ]
    return number | st.sampled_from(choices) | st.lists(number, min_size=1, max_size=4).map(",".join)


def _plan_names() -> list[str]:
    return list(Plan.__dataclass_fields__)


plans = words(_plan_names(), _values())


def read_plan(text: str) -> None:
    plan = Plan.parse(text)
    str(plan)


def read_plan_file(text: str) -> None:
    with _file(text.encode("utf-8", "surrogatepass"), "plan.toml") as path:
        Plan.load(path)


toml = st.one_of(
    st.lists(st.builds("{} = {}".format, st.sampled_from(_plan_names()), _values()), max_size=5).map("\n".join),
    st.text(max_size=40),
)


@cache
def a_program() -> Any:
    plan = Plan.parse("pp=2 dp=2 microbatches=2 zero=1 checkpoint=1")
    return json.loads(json.dumps(plan.compile(layers=4).to_json()))


def read_program(data: Any) -> None:
    verify(Program.from_json(data))


@cache
def a_profile() -> Any:
    """What torch's profiler writes."""
    with torch.profiler.profile() as found:
        torch.nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)).sum().backward()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        found.export_chrome_trace(path)
        data = json.loads(Path(path).read_text())
    data["traceEvents"] = [event for event in data["traceEvents"] if event.get("ph") == "X"][:12]
    return data


def read_kineto(data: Any) -> None:
    Trace.from_kineto(data if isinstance(data, dict) else [data])


def read_kineto_file(data: bytes) -> None:
    with _file(data, "trace.json.gz") as path:
        Trace.from_kineto(path)


@st.composite
def packed(draw: Any) -> bytes:
    """A compressed trace, of which some bytes differ, or a short file that is long when it is unpacked."""
    if not draw(st.integers(0, 9)):
        return _bomb()
    data = bytearray(gzip.compress(json.dumps(draw(changed(a_profile))).encode("utf-8", "replace"), 1))
    for _ in range(draw(st.integers(0, 3))):
        data[draw(st.integers(0, len(data) - 1))] ^= draw(st.integers(1, 255))
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data)


@cache
def _bomb() -> bytes:
    """1.5 MB that become 1.5 GB."""
    return gzip.compress(bytes(16 << 20), 9) * 96


def read_device(text: str) -> None:
    str(DeviceSpec.parse(text))


device = words(
    ["latency", "bandwidth", "memory", "flops", "far", "host", "disk", "node", "up", "down"],
    number
    | st.sampled_from(["1ms", "5GB/s", "-1ms", "1e400s", "nan", "infms", "1GiB", "10MB/s", "1us", "99999999999999GB"]),
) | st.sampled_from(["pcie", "nvlink", "a100-80gb", "pcie latency=1ms"])


@cache
def a_save() -> Any:
    """The files of a save, by their names."""
    with tempfile.TemporaryDirectory() as folder:
        _save(folder)
        return json.loads(Path(folder, INDEX).read_text())["index"]


def _save(folder: str) -> None:
    header = Header(3, 0, 8, "float32", "dp=1 pp=1", "", (SavedParameter("0.weight", (6, 2), "float32", True),))
    slices = (Slice("parameters/0.weight", (6, 2), 0, torch.arange(12.0)),)
    keeping.save([Share(header, slices)], folder)


@cache
def _saved() -> str:
    folder = tempfile.mkdtemp(prefix="minipar-parsers-")
    _save(folder)
    return folder


def read_save(index: Any) -> None:
    """An index with the right checksum, whatever it says, beside the files of a whole save."""
    folder = _saved()
    if isinstance(index, dict) and isinstance(index.get("files"), str) and index["files"] == a_save()["files"]:
        index = {**index, "files": next(path.name for path in Path(folder).iterdir() if path.is_dir())}
    with contextlib.suppress(ValueError, TypeError):
        Path(folder, INDEX).write_text(json.dumps({"index": index, "checksum": _checksum(index)}))
    _read_all(folder)


def read_save_text(text: str) -> None:
    folder = _saved()
    Path(folder, INDEX).write_bytes(text.encode("utf-8", "surrogatepass"))
    _read_all(folder)


def _read_all(folder: str) -> None:
    saved = open_folder(folder)
    reading = Reading(saved)
    for key in reading.everything():
        shape, dtype, _ = reading.form(key)
        size = 1
        for each in shape:
            size *= each
        assert size <= 1 << 20, "a size that no file has was accepted"
        values = torch.full((size,), -7, dtype=dtype)
        reading.fill({(key, 0): values})


deep = st.integers(1, 5).map(lambda k: "[" * 10**k) | st.integers(1, 5).map(lambda k: '{"a":' * 10**k)
texts = st.text(max_size=40) | deep


def read_cell(line: str) -> None:
    magic._parse(line, 4)


cell = st.lists(
    st.sampled_from(["4", "2", "--only", "0", "1,2", "0-3", "--out", "x", "--in", "a,b", "--quiet", "9" * 11, "-1"])
    | number | st.text(max_size=6), max_size=5,
).map(" ".join)  # fmt: skip


def read_command(arguments: list[str]) -> None:
    """A command line: it ends with a status, and says on stderr what is wrong, without a traceback."""
    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        try:
            status = cli.main(arguments)
        except SystemExit as left:
            status = left.code if isinstance(left.code, int) else 1
    assert "Traceback" not in said.getvalue()
    assert status == 0 or said.getvalue(), "it fails and does not say why"


option = st.sampled_from(
    ["--layers", "--steps", "--forward", "--latency", "--model", "--hardware", "--batch", "--nodes", "--to", "--json",
     "--markdown", "--stage-factors", "--backward", "--gpus-per-node", "--mesh", "--pin", "--best"]
)  # fmt: skip
command = st.tuples(
    st.sampled_from(["simulate", "memory", "estimate", "export", "keys", "schedules", "", "no-such"]),
    plans,
    st.lists(
        option | number | st.sampled_from(["gpt-tiny", "gpt3-175b", "a100-80gb", "megatron", "0,1", "tp=2"]), max_size=6
    ),
).map(lambda found: [found[0], found[1], *found[2]])  # fmt: skip


class Parser(NamedTuple):
    """A reader, and inputs for it."""

    read: Callable[[Any], None]
    inputs: st.SearchStrategy[Any]


PARSERS = {
    "plans": Parser(read_plan, plans),
    "plan files": Parser(read_plan_file, toml),
    "programs": Parser(read_program, changed(a_program)),
    "profiles": Parser(read_kineto, changed(a_profile)),
    "compressed traces": Parser(read_kineto_file, packed()),
    "devices": Parser(read_device, device),
    "saves": Parser(read_save, changed(a_save)),
    "texts of saves": Parser(read_save_text, texts),
    "cells": Parser(read_cell, cell),
    "commands": Parser(read_command, command),
}


@contextlib.contextmanager
def _file(data: bytes, name: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_bytes(data)
        yield path


@contextlib.contextmanager
def _limited() -> Any:
    """What would fill the memory is a MemoryError."""
    here = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (here + 4 * MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def check(name: str, data: Any) -> bool:
    """Whether an input was taken; else it was refused. AssertionError if neither, or if it took too much."""
    before, began = peak(), time.process_time()
    try:
        with _limited():
            PARSERS[name].read(data)
        taken = True
    except MiniparError as error:
        said = str(error)
        if (said.count("\n") or len(said) >= 2000) and not isinstance(error, ProgramError):
            raise AssertionError(f"more than a line: {said}") from error
        taken = False
    used = time.process_time() - began
    assert used < SECONDS, f"{used:.1f} s"
    assert peak() - before < MEMORY, f"{(peak() - before) >> 20} MiB"
    return taken


def campaign(count: int, seconds: float = 1e9) -> tuple[list[tuple[str, int, int]], list[str]]:
    """Try so many inputs, the same number for each parser: (parser, tried, taken) of each, and what was wrong."""
    rows, problems, end = [], [], time.monotonic() + seconds
    for position, name in enumerate(PARSERS):
        share = (end - time.monotonic()) / (len(PARSERS) - position)
        tried, taken = _try(name, -(-count // len(PARSERS)), time.monotonic() + share, problems)
        rows.append((name, tried, taken))
    return rows, problems


def _try(name: str, count: int, until: float, problems: list[str]) -> tuple[int, int]:
    found = {"tried": 0, "taken": 0}

    @settings(
        max_examples=count, deadline=None, database=None, derandomize=False,
        suppress_health_check=list(HealthCheck), phases=[Phase.generate],
    )  # fmt: skip
    @given(PARSERS[name].inputs)
    def one(data: Any) -> None:
        if time.monotonic() > until:
            return
        found["tried"] += 1
        try:
            found["taken"] += check(name, data)
        except Exception as error:
            problems.append(f"{name}: {data!r}"[:600] + f": {type(error).__name__}: {error}"[:300])

    one()
    return found["tried"], found["taken"]


def table(rows: list[tuple[str, int, int]], problems: list[str]) -> str:
    lines = ["| input | tried | taken | refused | wrong |", "|---|---|---|---|---|"]
    for name, tried, taken in rows:
        wrong = sum(one.startswith(f"{name}: ") for one in problems)
        lines.append(f"| {name} | {tried:,} | {taken:,} | {tried - taken - wrong:,} | {wrong} |")
    return "\n".join(lines)
