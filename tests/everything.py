"""The tests, as make runs them: python tests/everything.py [--fast] [PYTEST_ARGUMENTS]

All of them (`make test`): first the tests of ranks and of messages side by side, because they mind the clock, and
beside them only what yields to them: lint, and tests that compute. Then everything else, in parts: each part is a
pytest of its own, and four more run at once than there are cores, because tests of ranks wait much. (With seven more
they take longer: ranks that wait for each other keep their cores busy.) The longest parts and those that wait most
begin first, and others keep the cores busy to the end. Parts are few, because each one imports torch and starts the
processes that ranks are forked from: 6 seconds of a core.

With --fast (`make check`): lint, and beside it the tests of the rooms below `cluster`, which plan, draw and predict.
Those that need ranks, and the slow ones, are left out. tests/test_repository.py compares FAST with the rooms.

What a part says is printed when it ends; a table at the end has the seconds of all, and how many seconds of a core
they used.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FIRST = (("tests/cluster",), ("tests/comm", "tests/server"))
# Those that mostly wait, for processes to start: torchrun, spawned ranks.
PATIENT = (
    *(f"tests/cluster/test_{name}.py" for name in ("launched", "macos")),
    "tests/docs/test_cluster_page.py",
)
# What runs beside FIRST: hardly any of these tests needs ranks.
BESIDE = ("tests/costs", "tests/planner", "tests/program", "tests/trace")
OTHERS = ("all other tests",)
# Folders that are run together, in this order, and in how many parts.
LONG: tuple[tuple[tuple[str, ...], int], ...] = (
    (PATIENT, 1),
    (("tests/execution",), 1),
    (("tests/sharding", "tests/training"), 1),
    (OTHERS, 1),
    (("tests/widgets",), 1),
    (("tests/site",), 1),
    (("lessons",), 2),
    (("tests/course", "tests/docs"), 1),
    (("tests/strategies", "tests/fuzz"), 1),
)
SOLUTION = "lessons/solutions/05_allreduce.ipynb"  # tests/course/test_solutions.py runs the others, without kernels
MORE = 4  # parts that run at once beyond the number of cores
FAST = (
    ("tests/strategies", "tests/sharding"),
    ("tests/program", "tests/prediction", "tests/trace", "tests/costs", "tests/data", "tests/models"),
)
NOTHING = 5  # pytest's status when the arguments select no test
# For parts without notebooks: the options of pyproject.toml without nbval, which takes 2 seconds to import.
NO_NOTEBOOKS = ("-pno:nbval", "--override-ini=addopts=-ra --strict-markers --import-mode=importlib")
NOTEBOOKS = ("-ptests.notebooks.warm",)  # their kernels are forked


@dataclass
class Part:
    """A process of `make test`: what it is called, its command, and how it went. `yields`: whether it runs only while
    all others wait."""

    name: str
    command: list[str]
    yields: bool = False
    seconds: float = 0.0
    core: float = 0.0  # seconds of a core, of its own and of the processes that it waited for
    status: int | None = None

    @property
    def failed(self) -> bool:
        return self.status not in (0, NOTHING)


def pytest(name: str, *arguments: str) -> Part:
    options = NOTEBOOKS if name.startswith("lessons") else NO_NOTEBOOKS
    return Part(name, [sys.executable, "-m", "pytest", *options, *arguments])


def lint() -> Part:
    return Part("lint", ["make", "--no-print-directory", "lint"])


def parts_of(folders: tuple[str, ...], count: int) -> list[list[str]]:
    """The test files of folders (or files), dealt out like cards: the long lessons stand side by side."""
    found = [
        [ROOT / each] if each.endswith(".py") else (ROOT / each).rglob("*.ipynb" if each == "lessons" else "test_*.py")
        for each in (("tests",) if folders == OTHERS else folders)
    ]
    files = sorted(chain(*found))
    paths = [str(path.relative_to(ROOT)) for path in files if ".ipynb_checkpoints" not in path.parts]
    apart = () if folders == PATIENT else PATIENT
    if folders == OTHERS:
        apart = (*chain(*FIRST), *BESIDE, *chain(*(some for some, _ in LONG if some != OTHERS)))
    kept = [path for path in paths if path == SOLUTION or not path.startswith(("lessons/solutions/", *apart))]
    return [kept[k::count] for k in range(count)]


def first(given: list[str]) -> list[Part]:
    """What `make test` runs first."""
    left = [f"--ignore={path}" for path in PATIENT]
    clock = [pytest(" ".join(folders), *folders, *left, *given) for folders in FIRST]
    return [*clock, *(replace(part, yields=True) for part in (lint(), pytest(" ".join(BESIDE), *BESIDE, *given)))]


def then(given: list[str]) -> list[Part]:
    """What `make test` runs after that: everything else."""
    found = []
    for folders, count in LONG:
        for k, files in enumerate(parts_of(folders, count)):
            found.append(pytest(" ".join(folders) + (f", part {k + 1}" if count > 1 else ""), *files, *given))
    return found


def fast(given: list[str]) -> list[Part]:
    """What `make check` runs."""
    tests = [pytest(" ".join(folders), *folders, "-m", "not ranks and not slow", *given) for folders in FAST]
    return [lint(), *tests]


def run(parts: list[Part], at_once: int) -> None:
    """Run processes, so many at once, in order of the list; print what each one said when it has ended."""
    # Many processes are started. Each would compile all of minipar if Python could not keep what it compiled.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    waiting = list(parts)
    running: list[tuple[Part, subprocess.Popen[bytes], Path, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    part, told = waiting.pop(0), Path(folder, str(len(waiting)))
                    with told.open("wb") as file:
                        process = subprocess.Popen(
                            part.command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT
                        )
                    if part.yields:
                        _yield_to_others(process.pid)
                    running.append((part, process, told, time.monotonic()))
                time.sleep(0.05)
                for each in list(running):
                    part, process, told, start = each
                    before = _used()
                    if process.poll() is None:
                        continue
                    running.remove(each)
                    part.status, part.core = process.returncode, _used() - before
                    part.seconds = time.monotonic() - start
                    print(f"\n== {part.name}\n{told.read_text(errors='replace')}", flush=True)
        finally:
            for _, process, _, _ in running:
                process.kill()


def _yield_to_others(pid: int) -> None:
    """Let a process, and those that it will start, run only while no other one wants its core. A low priority would not
    do: ranks are batch jobs, which wait for the end of another process's time slice."""
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.setpriority(os.PRIO_PROCESS, pid, 19)


def _used() -> float:
    """Seconds of a core that ended children have used."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(arguments: list[str]) -> int:
    given = [word for word in arguments if word != "--fast"]
    cores = os.cpu_count() or 1
    if "--fast" in arguments:
        parts = fast(given)
        run(parts, cores + 1)
    else:
        clock, others = first(given), then(given)
        run(clock, len(FIRST) + 1)
        run(others, cores + MORE)
        parts = [*clock, *others]
    print("\nseconds  of a core  status")
    for part in parts:
        print(f"{part.seconds:7.0f}  {part.core:9.0f}  {'failed' if part.failed else 'passed'}  {part.name}")
    return next((part.status or 1 for part in parts if part.failed), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
