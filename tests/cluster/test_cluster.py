"""Cluster: starting, running, failing, healing and ending. Time bounds are generous: the machine may be busy."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

from minipar.cluster import Cluster, worker
from minipar.cluster.failures import Failure, Remote, root_cause
from minipar.comm import communicator
from minipar.errors import PlanError, RankDied, RankError

# Ranks cannot import this file by name; its functions travel as those of a notebook do.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROOT = Path(__file__).parents[2]


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(3, device="cpu") as made:
        yield made


def notes(error: BaseException) -> str:
    """The note of an error, or (before Python 3.11) what stands in its place."""
    return "\n".join([*getattr(error, "__notes__", []), str(error.__cause__ or ""), *map(str, error.args)])


def gone(pids: list[int], seconds: float = 5.0) -> list[int]:
    """Which of these processes are still there after at most so many seconds."""

    def alive(pid: int) -> bool:
        try:
            return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False

    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def wait_for_all() -> None:
    communicator.create().allreduce([1.0])


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment where torch is an empty stand-in: drivers that only start and end ranks start much faster."""
    folder = tmp_path_factory.mktemp("light") / "torch"
    folder.mkdir()
    (folder / "__init__.py").write_text("def set_num_threads(n): pass\n")
    (folder / "distributed.py").write_text("def is_available(): return False\n")
    (folder / "_dynamo.py").write_text("")
    return {**os.environ, "PYTHONPATH": f"{folder.parent}{os.pathsep}{ROOT}"}


def run_script(text: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(text)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)


# Running


def test_results_come_in_rank_order_with_arguments_as_given(cluster: Cluster) -> None:
    def f(a: int, *, function: str, ranks: list[int]) -> tuple[int, int, str, list[int]]:
        time.sleep(0.05 * (2 - worker.context().rank))  # the last rank answers first
        return worker.context().rank, a, function, ranks

    assert cluster.run(f, 5, function="x", ranks=[1]) == [(rank, 5, "x", [1]) for rank in range(3)]


def test_classes_and_closures_go_both_ways(cluster: Cluster) -> None:
    class Mine:
        def __init__(self, value: int) -> None:
            self.value = value

    offset = Mine(10)
    results = cluster.run(lambda: Mine(offset.value + worker.context().rank))
    assert [type(result) for result in results] == [Mine] * 3
    assert [result.value for result in results] == [10, 11, 12]


def test_driver_needs_no_torch_and_main_functions_travel(light: dict[str, str]) -> None:
    script = """
        import os, sys
        from minipar.cluster import Cluster
        class Own(Exception): pass
        def square(x): return x * x
        def fails(): raise Own(square(5))
        with Cluster(2, device="cpu") as cluster:
            print(cluster.run(square, 7))
            try: cluster.run(fails)
            except Own as error: print(type(error) is Own, error.args)
            pid = os.fork()
            if pid == 0:  # a copy of the driver can neither use nor end its ranks
                try: cluster.run(square, 1)
                except Exception as error: print("copy:", error, flush=True)
                cluster.close()
                os._exit(0)
            os.waitpid(pid, 0)
            print(cluster.run(square, 8))
        print("torch" in sys.modules)
    """
    result = run_script(script, light)
    assert result.stdout.splitlines() == [
        "[49, 49]",
        "True (25,)",
        "copy: this Cluster belongs to another process; make one here",
        "[64, 64]",
        "False",
    ], result.stderr
    assert result.stderr == ""


def test_a_rank_looks_like_a_fresh_process_of_the_driver(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def look() -> dict[str, Any]:
        import torch

        names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME", "MINE"]
        return {
            "environment": [os.environ.get(name) for name in names],
            "threads": torch.get_num_threads(),
            "leads": os.getsid(0) == os.getpid() == os.getpgid(0),
            "folder": os.getcwd(),
            "random": float(np.random.rand()),
            "free": int(os.environ["MASTER_PORT"]) > 0,
        }

    monkeypatch.setenv("MINE", "set after the helper process started")
    with Cluster(2, device="cpu", threads=2) as other:
        seen = other.run(look)
    for rank, one in enumerate(seen):
        mine = "set after the helper process started"
        assert one["environment"] == [str(rank), "2", str(rank), "2", "127.0.0.1", "lo", mine]
        assert one["threads"] == 2
        assert one["leads"]
        assert one["free"]
        assert one["folder"] == os.getcwd()
    assert seen[0]["random"] != seen[1]["random"]
    assert cluster.run(look)[0]["threads"] == 1


def test_modules_found_later_in_the_driver_are_found_in_ranks(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "made_later.py").write_text("def f(): return 'found'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import made_later  # type: ignore[import-not-found]

    assert cluster.run(made_later.f) == ["found"] * 3


def test_run_on_some_ranks_in_the_order_asked_for(cluster: Cluster) -> None:
    assert cluster.run_on([2, 0], lambda: (worker.context().rank, worker.context().active)) == [
        (2, (2, 0)),
        (0, (2, 0)),
    ]
    assert cluster.run_on([], lambda: 1) == []
    with pytest.raises(PlanError, match="rank 3: this Cluster has ranks 0 to 2"):
        cluster.run_on([3], lambda: 1)
    with pytest.raises(PlanError, match="once"):
        cluster.run_on([1, 1], lambda: 1)


def test_reports_arrive_while_the_function_runs(cluster: Cluster) -> None:
    heard: list[tuple[int, Any, float]] = []

    def f() -> None:
        for i in range(3):
            worker.report({"i": i})
        time.sleep(0.8)

    cluster.run_with(lambda rank, value: heard.append((rank, value["i"], time.monotonic())), f)
    ended = time.monotonic()
    for rank in range(3):
        mine = [(value, when) for who, value, when in heard if who == rank]
        assert [value for value, _ in mine] == [0, 1, 2]
        assert ended - mine[0][1] > 0.1
    assert cluster.run(f) == [None] * 3  # without a callback they go nowhere
    with pytest.raises(RankError, match=r"report: a .*lock.* cannot be sent"):
        cluster.run(lambda: worker.report(threading.Lock()))
    with pytest.raises(RankError, match="not a rank"):
        worker.report(1)


def test_an_error_in_the_callback_ends_the_run(cluster: Cluster) -> None:
    def callback(rank: int, value: Any) -> None:
        cluster.run(lambda: 1)

    def f() -> None:
        worker.report(1)
        time.sleep(60)

    with pytest.raises(RankError, match="busy with another run"):
        cluster.run_with(callback, f)
    assert cluster.run(lambda: 1) == [1] * 3


def test_torchs_settings_end_with_the_call_that_changes_them() -> None:
    """So the ranks stay equal when one of them dies and another takes its place."""

    def change() -> None:
        import torch

        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_num_threads(3)
        torch.set_grad_enabled(False)
        torch.set_autocast_enabled("cpu", True)

    def settings() -> list[Any]:
        import torch

        x = torch.ones(1, requires_grad=True) * 2
        numbers = torch.get_num_threads(), torch.get_deterministic_debug_mode(), torch.is_autocast_enabled("cpu")
        return [str(x.dtype), str(x.device), x.requires_grad, *numbers]

    def change_and_fail() -> None:
        change()
        raise ValueError("only here")

    with Cluster(2, device="cpu") as cluster:
        fresh = cluster.run(settings)
        assert fresh == [["torch.float32", "cpu", True, 1, 0, False]] * 2
        cluster.run(change)
        assert cluster.run(settings) == fresh
        with pytest.raises(ValueError, match="only here"):
            cluster.run(change_and_fail)
        with pytest.raises(RankDied):
            cluster.run_on([0], os._exit, 3)
        assert cluster.run(settings) == fresh


# Output


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_driver_without_standard_streams(closed: str, light: dict[str, str], tmp_path: Path) -> None:
    script = """
        import os, sys
        from minipar.cluster import Cluster
        def f():
            print("out")
            print("err", file=sys.stderr)
            return os.isatty(0), os.fstat(1).st_ino != os.fstat(2).st_ino
        with Cluster(2, device="cpu") as cluster:
            found = cluster.run(f)
        open(sys.argv[1], "w").write(str(found))
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "found")]
    subprocess.run(["/bin/sh", "-c", f'"$0" "$@" {closed}', *command], cwd=ROOT, env=light, timeout=60, check=True)
    assert (tmp_path / "found").read_text() == str([(False, True)] * 2)


def test_output_appears_while_the_function_runs(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []

    class Stream:
        def write(self, text: str) -> None:
            seen.append(time.monotonic())

        def flush(self) -> None:
            pass

    monkeypatch.setattr(sys, "stdout", Stream())
    cluster.run_on([0], lambda: (print("now"), time.sleep(0.8)))
    assert time.monotonic() - seen[0] > 0.2


# Failures


def test_an_exception_that_cannot_be_rebuilt_becomes_a_rank_error(cluster: Cluster) -> None:
    class Odd(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__(f"{one} and {two}")

    class Stuck(Exception):
        def __reduce__(self) -> Any:
            raise TypeError("never")

    def odd() -> None:
        raise Odd(1, 2)

    def stuck() -> None:
        raise Stuck("here")

    class Silent(ValueError):
        def __str__(self) -> str:
            raise self

        __repr__ = __str__

    def silent() -> None:
        raise Silent

    def exit_silently() -> None:
        sys.exit(Silent())  # type: ignore[arg-type]

    class Never:
        def __reduce__(self) -> Any:
            raise Silent

    with pytest.raises(RankError, match=r"rank 1 raised Silent: \(its text cannot be made\)"):
        cluster.run_on([1], silent)
    with pytest.raises(RankError, match="rank 2 raised SystemExit"):
        cluster.run_on([2], exit_silently)
    with pytest.raises(RankError, match="the result of rank 0, a Never, cannot be pickled: Silent"):
        cluster.run_on([0], Never)
    with pytest.raises(RankError, match="an argument cannot be sent to the ranks: Silent"):
        cluster.run(print, Never())
    lock = threading.Lock()
    with pytest.raises(RankError, match=r"the function or an argument cannot be sent to the ranks: TypeError: .*lock"):
        cluster.run(lambda: lock.locked())
    with pytest.raises(RankError, match="rank 1 raised Odd: 1 and 2") as caught:
        cluster.run_on([1], odd)
    assert "in odd" in notes(caught.value)
    with pytest.raises(RankError, match="rank 0 raised Stuck: here"):
        cluster.run_on([0], stuck)


@pytest.mark.parametrize(
    ("end", "error", "text"),
    [
        (lambda: sys.exit(3), RankError, r"rank 1 raised SystemExit: sys.exit\(3\) was called"),
        (lambda: os._exit(7), RankDied, "rank 1 exited with status 7 without an answer"),
        (lambda: ctypes.string_at(0), RankDied, r"rank 1 was killed by signal 11 \(SIGSEGV"),
        (lambda: os.close(os.sysconf("SC_OPEN_MAX") + 5), OSError, "Bad file descriptor"),
        (threading.Lock, RankError, "the result of rank 1, a .*lock.*, cannot be pickled"),
    ],
    ids=["sys.exit", "os._exit", "segfault", "exception", "unpicklable"],
)
def test_every_way_to_end_is_told(
    cluster: Cluster, end: Callable[[], Any], error: type[Exception], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def f() -> Any:
        if worker.context().rank == 1:
            print("last words")
            return end()
        return None

    started = time.monotonic()
    with pytest.raises(error, match=text):
        cluster.run(f)
    assert time.monotonic() - started < 2
    output = capsys.readouterr().out
    assert "[rank 1] last words" in output
    assert ("[rank 1] Fatal Python error: Segmentation fault" in output) == ("SIGSEGV" in text)
    assert cluster.run(lambda: worker.context().rank) == [0, 1, 2]


def test_what_cannot_be_sent_is_told(cluster: Cluster) -> None:
    pids = cluster.run(os.getpid)
    with pytest.raises(RankError, match=r"an argument cannot be sent to the ranks: .*lock"):
        cluster.run(print, threading.Lock())
    with pytest.raises(RankError, match="needs a function to call, not a list"):
        cluster.run([1])  # type: ignore[arg-type]

    class OnlyHere:
        def __reduce__(self) -> Any:
            return (__import__, ("a_module_of_the_driver_alone",))

    with pytest.raises(RankError, match=r"cannot be loaded in a rank: ModuleNotFoundError"):
        cluster.run(print, OnlyHere())

    def result() -> Any:
        class OnlyThere:
            def __reduce__(self) -> Any:
                return (__import__, ("a_module_of_the_rank_alone",))

        return OnlyThere()

    with pytest.raises(RankError, match="the result of rank 0 cannot be loaded in the driver: ModuleNotFoundError"):
        cluster.run(result)
    assert cluster.run(os.getpid) == pids


def test_root_cause_is_a_death_then_an_own_exception_then_a_lost_connection() -> None:
    lost = Failure(0, Remote("RuntimeError", "closed by peer", (), None, lost_peer=True))
    own = Failure(1, Remote("ValueError", "mine", (), None, lost_peer=False))
    later = Failure(2, Remote("TypeError", "also mine", (), None, lost_peer=False))
    death = Failure(3, None, "was killed")
    assert root_cause([lost, own, later, death]) is death
    assert root_cause([lost, own, later]) is own
    assert root_cause([lost, later, own]) is later
    assert root_cause([lost]) is lost


def test_the_helper_process_may_die(light: dict[str, str]) -> None:
    script = """
        import os, signal, subprocess, time, warnings
        from minipar.cluster import Cluster
        cluster = Cluster(2, device="cpu")
        def f():
            return os.getpid(), os.getppid(), subprocess.Popen(["sleep", "60"]).pid
        (one, helper, first), (two, _, second) = cluster.run(f)
        os.kill(helper, signal.SIGKILL)
        time.sleep(0.3)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            print(cluster.run(lambda: 1))
        print([str(one.message) for one in caught])
        print(one, two, first, second)
    """
    result = run_script(script, light)
    results, warned, pids = result.stdout.splitlines()
    assert results == "[1, 1]"
    cause = "ended with the helper process that ranks are forked from, which has died"
    text = f"rank {{}} {cause}; it starts anew, without its state"
    assert warned == str([text.format(0), text.format(1)])
    assert gone([int(pid) for pid in pids.split()], 0.5) == []


def test_users_own_default_group_works_also_after_a_failure(cluster: Cluster) -> None:
    def f(fail: bool, keep: bool) -> float:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        x = torch.ones(1)
        dist.all_reduce(x)
        if fail:
            raise ValueError("before destroy")
        if not keep:
            dist.destroy_process_group()
        return float(x)

    assert cluster.run(f, False, False) == [3.0] * 3
    assert cluster.run(f, False, False) == [3.0] * 3
    with pytest.raises(ValueError, match="before destroy"):
        cluster.run(f, True, True)
    assert cluster.run(f, False, False) == [3.0] * 3


# Starting and ending


def test_close_ends_everything_and_is_told() -> None:
    def child() -> tuple[int, int]:
        process = subprocess.Popen(["sleep", "60"])
        return os.getpid(), process.pid

    with Cluster(2, device="cpu") as one:
        pids = [pid for pair in one.run(child) for pid in pair]
        folder = one._members.folder
        one.run(wait_for_all)
        assert os.listdir(folder)
        assert repr(one) == "Cluster(2 ranks, cpu, ready)"
    assert gone(pids, 0.5) == []
    assert not os.path.exists(folder)
    assert repr(one) == "Cluster(2 ranks, cpu, closed)"
    one.close()
    with pytest.raises(RankError, match="this Cluster is closed; make a new one"):
        one.run(lambda: 1)


def test_a_forgotten_cluster_ends_its_ranks() -> None:
    one = Cluster(2, device="cpu")
    pids = one.run(os.getpid)
    del one
    gc.collect()
    assert gone(pids, 0.5) == []


def test_closing_while_a_function_runs_is_refused(cluster: Cluster) -> None:
    with pytest.raises(RankError, match="busy with a run"):
        cluster.run_with(lambda rank, value: cluster.close(), lambda: (worker.report(1), time.sleep(60)))
    assert cluster.run(lambda: 1) == [1] * 3


def test_a_cluster_made_in_a_thread_outlives_it(light: dict[str, str]) -> None:
    # Linux ties a child to the thread that started it, the helper process too: hence a driver of its own here.
    script = """
        import threading, time
        from minipar.cluster import Cluster
        made = []
        def make():
            made.append(Cluster(2, device="cpu", start="fork"))
            made.append(Cluster(1, device="cpu", start="spawn"))
        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        time.sleep(0.2)
        print(*[cluster.run(lambda: 1) for cluster in made])
    """
    result = run_script(script, light)
    assert (result.stdout, result.stderr) == ("[1, 1] [1]\n", "")  # and nothing had to start anew


def test_no_cluster_inside_a_rank(cluster: Cluster) -> None:
    with pytest.raises(RankError, match="cannot be made inside a rank"):
        cluster.run(lambda: Cluster(2))


@pytest.mark.parametrize("n", [0, -1, 2.0, "4", True, None])
def test_a_number_of_ranks_that_cannot_be(n: Any) -> None:
    with pytest.raises(PlanError, match=f"n={n!r}: must be a whole number of at least 1"):
        Cluster(n)


@pytest.mark.parametrize(
    ("name", "value"), [("device", "gpu"), ("start", "thread"), ("threads", 0), ("transport", "nccl")]
)
def test_other_values_that_cannot_be(name: str, value: Any) -> None:
    with pytest.raises(PlanError, match=f"{name}={value!r}: must be"):
        Cluster(2, **{name: value})


@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(PlanError, match=r"^device='cuda': no GPU that torch can use is here; use") as caught:
        Cluster(2, device="cuda")
    assert "\n" not in str(caught.value)
    with Cluster(2, device="auto") as other:
        assert other.device == "cpu"


def test_a_broken_torch_is_told(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch is missing')\n")
    script = f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        from minipar.cluster import Cluster
        Cluster(2)
    """
    result = run_script(script, dict(os.environ))
    assert result.returncode == 1
    assert "could not start: ImportError: libtorch is missing" in result.stderr.splitlines()[-1]


# No process outlives its driver

DRIVER = """
    import os, subprocess, sys, threading, time
    from minipar.cluster import Cluster, launch, worker

    def busy(where):
        child = os.fork()
        if child == 0:
            if os.fork() == 0:
                time.sleep(60)
            time.sleep(60)
        program = subprocess.Popen(["sleep", "60"])
        children = open(f"/proc/{child}/task/{child}/children")
        while not (below := children.read().split()):
            children.seek(0)
        worker.report([program.pid, os.getppid(), os.getpid(), child, int(below[0])])
        if where == "python":
            time.sleep(60)
        elif where == "collective":
            from minipar.comm import communicator
            comm = communicator.create()
            if comm.rank == 0:
                time.sleep(60)
            comm.barrier()
        else:
            import ctypes
            ctypes.PyDLL(None).sleep(60)  # holds the interpreter

    heard = []
    def callback(rank, pids):
        heard.extend(pids)
        if len(heard) == 10:
            heard.append(launch.scratch_folder())
            if sys.argv[3] == "copy":
                copy = os.fork()  # holds every socket of the driver, and lives on
                if copy == 0:
                    os.close(1)
                    os.close(2)
                    time.sleep(60)
                heard.append(copy)
            print(*heard, flush=True)
            if sys.argv[3] == "exit":
                sys.exit(0)

    made = []
    def make():
        made.append(Cluster(2, device="cpu", start=sys.argv[1]))
    if sys.argv[3] == "copy":  # made by a thread, so that Linux cannot tie the helper process to the driver
        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
    else:
        make()
    made[0].run_with(callback, busy, sys.argv[2])
"""


@pytest.mark.parametrize(
    ("start", "where", "end"),
    [
        ("fork", "collective", "kill"),
        ("fork", "native", "copy"),
        ("fork", "python", "exit"),
        ("spawn", "native", "kill"),
    ],
)
def test_nothing_outlives_its_driver(start: str, where: str, end: str, light: dict[str, str]) -> None:
    command = [sys.executable, "-c", textwrap.dedent(DRIVER), start, where, end]
    environment = dict(os.environ) if where == "collective" else light
    driver = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    numbers, rest = driver.stdout.readline().split(" /")
    folder, *copy = f"/{rest}".split()
    pids = [int(number) for number in numbers.split()]
    programs, others = pids[::5], [pid for pid in pids if pid not in pids[::5]]
    assert len({*programs, *others}) == 9  # two ranks, their parent, and three processes below each rank
    try:
        if end != "exit":
            driver.kill()
        driver.wait(30)
        others = [pid for pid in others if pid != driver.pid]
        assert gone([*others, *programs]) == []
        deadline = time.monotonic() + 2
        while os.path.exists(folder) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not os.path.exists(folder)
    finally:
        driver.stdout.close()
        for pid in [*others, *programs, *map(int, copy)]:
            if pid != driver.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


# On GPUs


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu(), reason="needs a GPU")
def test_ranks_get_a_gpu_each_or_share() -> None:
    import torch

    count = torch.cuda.device_count()

    def f() -> tuple[str, str, int, list[float]]:
        x = torch.full((3,), float(worker.context().rank), device=worker.context().device)
        total = communicator.create().allreduce(x)
        return worker.context().device, worker.context().backend, torch.cuda.current_device(), total.tolist()

    for size in {count, count + 1}:
        with Cluster(size, device="cuda") as one:
            assert one.device == "cuda"
            backend = "nccl" if size <= count else "gloo"
            total = [float(size * (size - 1) // 2)] * 3
            assert one.run(f) == [(f"cuda:{rank % count}", backend, rank % count, total) for rank in range(size)]
    with Cluster(count + 1, device="auto") as one:
        assert one.device == "cpu"


def test_a_script_that_leaves_its_cluster_open_ends_quietly() -> None:
    code = "import torch; from minipar import Cluster; c = Cluster(2); print(c.run(lambda: 1))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[1, 1]\n"
    assert done.stderr == ""
