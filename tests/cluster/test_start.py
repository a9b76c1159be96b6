"""How ranks start, and that they leave nothing behind: busy drivers, data loaders, several clusters at once."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
from pathlib import Path

import cloudpickle
import pytest
import torch

from minipar.cluster import Cluster, worker
from minipar.cluster.launch import interpreter
from minipar.comm import communicator
from minipar.errors import RankDied

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROOT = Path(__file__).parents[2]


def left(pids: list[int], seconds: float) -> list[int]:
    """Which of these processes are still there after at most so many seconds."""

    def there(pid: int) -> bool:
        try:
            return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False

    deadline = time.monotonic() + seconds
    while (found := [pid for pid in pids if there(pid)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def test_ranks_have_what_the_driver_imported_of_the_package() -> None:
    import minipar.execution.executor

    def f() -> tuple[bool, int]:
        return "minipar.execution.executor" in sys.modules, threading.active_count()

    assert minipar.execution.executor.__name__ in sys.modules
    with Cluster(1, device="cpu", start="fork") as one:
        assert one.run(f) == [(True, 1)]


def test_several_clusters_run_at_once_from_threads() -> None:
    def f(k: int) -> list[float]:
        total: list[float] = []
        for _ in range(20):
            total = communicator.create().allreduce([float(k)])
        return total

    found: dict[int, list[list[float]]] = {}

    def drive(k: int) -> None:
        with Cluster(2, device="cpu", start="fork") as one:
            for _ in range(5):
                found[k] = one.run(f, k)

    threads = [threading.Thread(target=drive, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {k: [[2.0 * k]] * 2 for k in range(3)}


@pytest.mark.skipif(sys.platform != "linux", reason="a scheduling policy of Linux")
def test_ranks_are_batch_jobs_and_the_driver_is_not() -> None:
    with Cluster(1, device="cpu", start="fork") as one:
        assert one.run(lambda: os.sched_getscheduler(0)) == [os.SCHED_BATCH]
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux sends a signal when the thread of a parent ends")
def test_the_folder_goes_only_with_the_whole_driver() -> None:
    """A killed driver's threads end one after the other. The helper hears of the first one's end, when the driver's
    process is still there; it must wait for it."""
    script = f"""
        import ctypes, os, signal, threading, time
        from minipar.cluster import Cluster, launch

        cluster = Cluster(1, device="cpu", start="fork")
        helper, = launch._zygotes.values()
        print(launch.scratch_folder(), helper._process.pid, flush=True)
        threading.Thread(target=lambda: (time.sleep(0.5), os.kill(os.getpid(), signal.SIGKILL))).start()
        ctypes.CDLL(None).syscall({93 if platform.machine() == "aarch64" else 60}, 0)  # ends only this thread
    """
    driver = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    with driver:
        assert driver.stdout is not None
        folder, helper = driver.stdout.readline().split()
    assert driver.returncode == -signal.SIGKILL
    assert left([int(helper)], 20) == []
    assert not os.path.exists(folder)


def test_the_loaders_of_a_rank_end_with_it() -> None:
    def load() -> int:
        loader = torch.utils.data.DataLoader(list(range(1000)), num_workers=1, persistent_workers=True)
        sys.modules["__main__"].__dict__["kept"] = iter(loader)
        next(sys.modules["__main__"].__dict__["kept"])
        children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
        return int(children[0])

    with Cluster(2, device="cpu", start="fork") as one:
        loaders = one.run(load)
        with pytest.raises(Exception, match="signal 9"):
            one.run_on([0], lambda: os.kill(os.getpid(), signal.SIGKILL))
        assert left(loaders[:1], 2) == []
        assert left(loaders[1:], 0) == loaders[1:]
    assert left(loaders, 2) == []


def settings_of_glibc() -> tuple[str, str | None, bool]:
    """What the process of this rank was started with, what the user's code sees of that, and what it does: whether a
    tensor of 40 MB is in the heap, and not in pages of its own, which are given back with it."""
    with open(f"/proc/{os.getppid()}/environ") as file:
        found = [line for line in file.read().split("\0") if line.startswith("GLIBC_TUNABLES=")]
    tensor = torch.empty(10 << 20)
    heap = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("[heap]")]
    ends = [[int(end, 16) for end in part.split("-")] for part in heap]
    told = "".join(found).removeprefix("GLIBC_TUNABLES=")
    return told, os.environ.get("GLIBC_TUNABLES"), any(first <= tensor.data_ptr() < last for first, last in ends)


@pytest.mark.parametrize("keep", [True, False])
def test_ranks_keep_freed_memory_or_are_plain(keep: bool) -> None:
    with Cluster(2, device="cpu", start="fork", keep_freed_memory=keep) as one:
        for told, seen, kept in one.run(settings_of_glibc):
            assert told.partition(":")[0] == ("glibc.malloc.hugetlb=1" if keep else "")  # (glibc cuts it as it reads)
            assert seen is None
            assert kept is keep


def poisoned() -> bool:
    torch.ones(1000, dtype=torch.float64)
    return bool((torch.empty(1000, dtype=torch.float64) > 1e300).all())


def test_a_rank_in_another_one_s_place_has_the_settings_of_its_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    with Cluster(2, device="cpu") as one:
        assert one.run(poisoned) == [False, False]
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.perturb=128")
    with Cluster(2, device="cpu") as one:
        monkeypatch.delenv("GLIBC_TUNABLES")
        os.kill(one.run(os.getpid)[0], signal.SIGKILL)
        with contextlib.suppress(RankDied):  # (which is told, unless the death was seen before the run began)
            one.run(poisoned)
        assert one.run(poisoned) == [True, True]


DRIVER = """
    import sys
    sys.path[:0] = {path!r}
    import pdb, torch
    from minipar import Cluster
    from minipar.training import plainly
    sys.path.insert(0, "")  # as a notebook does, after it has started
    import helpers
    with Cluster(1, device="cpu", start="fork") as one:
        print(one.run(helpers.answer))
    plainly.prepare()
"""


def test_nothing_of_the_working_directory_runs_by_itself(tmp_path: Path) -> None:
    for name in ("tempfile", "random", "runpy", "pickle", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text(f"import sys; sys.stderr.write('{name} ran')\n")
    (tmp_path / "helpers.py").write_text("def answer(): return 42\n")
    script = textwrap.dedent(DRIVER.format(path=[entry for entry in sys.path if entry]))
    command = [sys.executable, "-I", "-c", script]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (found.stdout, found.stderr) == ("[42]\n", "")


def test_a_driver_s_own_calendar_is_its_ranks_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = os.path.dirname(os.__file__)
    monkeypatch.setattr(sys, "path", [str(tmp_path), "", Path("ignored"), home, *sys.path])
    code = interpreter("pass")[-1]
    assert code.startswith(f"import sys; sys.path[:] = [{home!r}, ")
    assert f"{str(tmp_path)!r}, {os.getcwd()!r}, " in code
    own = types.ModuleType("calendar")
    own.__file__ = str(tmp_path / "calendar.py")
    monkeypatch.setitem(sys.modules, "calendar", own)
    assert interpreter("pass")[-1].startswith(
        f"import sys; sys.path[:] = [{str(tmp_path)!r}, {os.getcwd()!r}, {home!r}"
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_that_the_driver_has_used() -> None:
    assert float(torch.ones(3, device="cuda").sum()) == 3
    for start in ("fork", "spawn"):
        with Cluster(2, device="cuda", start=start) as one:
            total = one.run(lambda: float(torch.ones(5, device=worker.context().device).sum()))
            assert total == [5.0, 5.0]
            moved = one.run(lambda x: x + 1, torch.zeros(4, device="cuda"))
            assert [x.cpu().tolist() for x in moved] == [[1.0] * 4] * 2
