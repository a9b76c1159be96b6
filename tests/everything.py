"""The tests, as make runs them: python tests/everything.py [--fast] [PYTEST_ARGUMENTS]

All of them (`make test`): first the tests of ranks and messages, with nothing beside them, because they measure time.
Then two halves of about equal work, side by side: the lessons with a few folders, and all other folders.

With --fast (`make check`): the tests of the packages below `cluster`, which plan, draw and predict, in two halves side
by side, without tests that need ranks or are slow. tests/test_repository.py compares FAST with the packages.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ALONE = ("tests/cluster", "tests/comm", "tests/server")
BESIDE = ("tests/widgets", "tests/course", "tests/planner")
FAST = (
    ("tests/program", "tests/strategies"),
    ("tests/prediction", "tests/trace", "tests/costs", "tests/data", "tests/models"),
)
NOTHING = 5  # pytest's status when the arguments select no test


def side_by_side(one: list[str], other: list[str]) -> list[int]:
    """Run pytest twice at once. What the second one says is printed when both have ended. Their statuses."""
    pytest = [sys.executable, "-m", "pytest"]
    with tempfile.TemporaryFile("w+") as told:
        beside = subprocess.Popen([*pytest, *other], cwd=ROOT, stdout=told, stderr=subprocess.STDOUT)
        try:
            found = [subprocess.call([*pytest, *one], cwd=ROOT), beside.wait()]
        finally:
            beside.kill()
        told.seek(0)
        print(told.read())
    return found


def main(arguments: list[str]) -> int:
    if "--fast" in arguments:
        given = ["-m", "not ranks and not slow", *(word for word in arguments if word != "--fast")]
        found = side_by_side([*FAST[0], *given], [*FAST[1], *given])
    else:
        found = [subprocess.call([sys.executable, "-m", "pytest", *ALONE, *arguments], cwd=ROOT)]
        others = [f"--ignore={folder}" for folder in (*ALONE, *BESIDE)]
        found += side_by_side(["tests", *others, *arguments], ["lessons", *BESIDE, *arguments])
    return next((status for status in found if status not in (0, NOTHING)), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
