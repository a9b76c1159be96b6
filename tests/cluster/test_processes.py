"""A killed process leaves no processes and no files behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minipar.cluster import processes

SLEEPER = "import os, time; os.setsid(); print(flush=True); time.sleep(60)"

linux = pytest.mark.skipif(sys.platform != "linux", reason="shared memory has names on Linux")


def sleeper() -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()  # it leads a group of its own now
    return process


@linux
def test_shared_memory_of_a_killed_group_is_removed() -> None:
    process = sleeper()
    own = Path(f"/dev/shm/torch_{process.pid}_17_0")
    other = Path(f"/dev/shm/torch_{process.pid}7_17_0")  # of another process, whose pid begins alike
    try:
        own.touch()
        other.touch()
        processes.kill_group(process.pid)
        assert process.wait(5) == -9
        assert not own.exists()
        assert other.exists()
    finally:
        for path in (own, other):
            path.unlink(missing_ok=True)
        assert process.stdout is not None
        process.stdout.close()


@linux
def test_shared_memory_of_a_living_process_stays(tmp_path: Path) -> None:
    process = sleeper()
    kept = tmp_path / f"torch_{process.pid}_1_0"
    kept.touch()
    started = time.monotonic()
    processes.remove_shared(process.pid, str(tmp_path))
    assert kept.exists()
    assert time.monotonic() - started < 5
    os.kill(process.pid, 9)
    processes.remove_shared(process.pid, str(tmp_path))
    assert not kept.exists()
    process.wait(5)
    assert process.stdout is not None
    process.stdout.close()
