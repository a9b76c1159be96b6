"""All tests, as `make test` runs them: python tests/everything.py [PYTEST_ARGUMENTS]

First the tests of the cluster and of messages, which mind the clock, by themselves. Then the lessons, which mostly wait
for emulated devices, and a few folders of tests beside all others.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FIRST = ("tests/cluster", "tests/comm", "tests/server")
BESIDE = ("tests/widgets", "tests/course", "tests/data", "tests/planner", "tests/models")
NOTHING = 5  # pytest's status when the arguments select no test


def main(arguments: list[str]) -> int:
    pytest = [sys.executable, "-m", "pytest"]
    found = [subprocess.call([*pytest, *FIRST, *arguments], cwd=ROOT)]
    with tempfile.TemporaryFile("w+") as told:
        beside = subprocess.Popen(
            [*pytest, "lessons", *BESIDE, *arguments], cwd=ROOT, stdout=told, stderr=subprocess.STDOUT
        )
        try:
            others = [f"--ignore={folder}" for folder in (*FIRST, *BESIDE)]
            found.append(subprocess.call([*pytest, "tests", *others, *arguments], cwd=ROOT))
            found.append(beside.wait())
        finally:
            beside.kill()
        told.seek(0)
        print(told.read())
    return next((status for status in found if status not in (0, NOTHING)), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
