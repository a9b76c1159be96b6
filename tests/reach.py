"""Which statements of the package some runs execute: what a reader of that run has to walk through.

    python -m tests.reach "dp=2" "pp=2 microbatches=4"     a table of each plan: statements, by room
    python -m tests.reach "dp=2" --functions               also by function, the longest first
    python -m tests.reach --script FILE [ARGUMENTS]        of any script, such as one that runs many plans
    python -m tests.reach --never --script FILE            the functions that are never entered

A statement counts if coverage.py has it inside a function, and if any process executed it: the driver, the zygote or a
rank. Whatever ends by os._exit saves what it has before.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CONFIGURATION = """
[run]
parallel = true
source = {source}
data_file = {folder}/coverage
patch = subprocess, _exit, fork
disable_warnings = no-data-collected, module-not-measured, couldnt-parse, no-sysmon
"""
# The driver kills its ranks when a cluster is closed: what they executed is saved before.
SAVING = """
import coverage
from minipar import Cluster

def saved_before(close):
    def closing(self):
        if self._close.alive:
            self.run(lambda: coverage.Coverage.current().save())
        close(self)
    return closing

Cluster.close = saved_before(Cluster.close)
"""
TRAIN = """
import sys
from minipar import data, models, train
train(lambda: models.build("gpt-tiny"), data.for_model("gpt-tiny"), sys.argv[1], steps=3, progress=False)
"""


class Reached(NamedTuple):
    """Statements of one function: how many it has, and how many were executed."""

    file: str
    function: str
    statements: int
    executed: int


def measure(script: str, *arguments: str) -> list[Reached]:
    """All functions of minipar, with what a script of Python executes of them."""
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder, "settings")
        settings.write_text(CONFIGURATION.format(source=ROOT / "minipar", folder=folder))
        Path(folder, "script.py").write_text(SAVING + script)
        paths = [str(ROOT), str(ROOT / "widgets"), str(ROOT / "lessons")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        coverage = [sys.executable, "-m", "coverage"]
        rc = f"--rcfile={settings}"
        subprocess.run(
            [*coverage, "run", rc, str(Path(folder, "script.py")), *arguments], check=True, cwd=ROOT, env=environment
        )
        subprocess.run([*coverage, "combine", rc, "--quiet"], check=True, cwd=folder)
        subprocess.run([*coverage, "json", rc, "--quiet", "-o", "report.json"], check=True, cwd=folder)
        report = json.loads(Path(folder, "report.json").read_text())
    found = []
    for path, file in report["files"].items():
        name = str(Path(folder, path).resolve().relative_to(ROOT / "minipar"))
        for function, there in file["functions"].items():
            if function:  # (what stands outside of functions has the name "")
                summary = there["summary"]
                found.append(Reached(name, function, summary["num_statements"], summary["covered_lines"]))
    return found


def by_room(found: list[Reached]) -> Counter[str]:
    """Executed statements of each room."""
    rooms: Counter[str] = Counter()
    for one in found:
        rooms[one.file.split("/")[0].removesuffix(".py")] += one.executed
    return +rooms


def show(title: str, found: list[Reached], functions: bool, never: bool) -> None:
    rooms = by_room(found)
    print(f"{title}: {rooms.total()} statements in functions are executed, of {sum(one.statements for one in found)}")
    for room, count in rooms.most_common():
        print(f"  {count:6} {room}")
    if functions:
        for one in sorted(found, key=lambda one: -one.executed):
            if one.executed:
                print(f"  {one.executed:6} of {one.statements:4}  {one.file}: {one.function}")
    if never:
        for one in sorted(found):
            if not one.executed:
                print(f"  {one.statements:6} {one.file}: {one.function}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.reach", description=__doc__.split("\n")[0])
    parser.add_argument("plans", nargs="*", metavar="PLAN", help="plans that train gpt-tiny, or the script's arguments")
    parser.add_argument("--script", metavar="FILE", help="measure this script instead")
    parser.add_argument("--functions", action="store_true", help="each function that was entered")
    parser.add_argument("--never", action="store_true", help="each function that was not")
    options = parser.parse_args()
    if options.script:
        script = Path(options.script).read_text()
        show(options.script, measure(script, *options.plans), options.functions, options.never)
        return
    for plan in options.plans:
        show(plan, measure(TRAIN, plan), options.functions, options.never)


if __name__ == "__main__":
    main()
