"""Tasks of lesson 19: machines of a job, what to read in a trace, a hang, and how often to save."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from minipar.program.mesh import Mesh
from minipar_course.exercises.kinds.function import Function

# Exercise 1: which groups cross the slow cable -----------------------------------------------------------------------


def _crossing(tp: int, pp: int, dp: int, gpus: int) -> list[str]:
    mesh = Mesh(dp=dp, pp=pp, tp=tp)
    groups = {axis: [mesh.group(rank, axis) for rank in range(tp * pp * dp)] for axis in ("tp", "pp", "dp")}
    return [axis for axis, some in groups.items() if any(len({r // gpus for r in group}) > 1 for group in some)]


CROSSING = Function(
    "crossing(tp, pp, dp, gpus)",
    ((2, 2, 4, 8), (8, 4, 2, 8), (2, 4, 2, 8), (4, 1, 2, 8), (16, 1, 2, 8), (2, 2, 2, 2), (1, 4, 4, 8), (2, 3, 2, 4)),
    truth=_crossing,
    mistakes=(
        (
            lambda tp, pp, dp, gpus: [axis for axis, n in (("tp", tp), ("pp", pp), ("dp", dp)) if n > gpus],
            "a group of two may cross, too: its ranks need not be neighbours. How far apart are its first and last?",
        ),
        (
            lambda tp, pp, dp, gpus: [a for a, n in (("dp", dp), ("pp", pp * dp), ("tp", tp * pp * dp)) if n > gpus],
            "you number dp as the innermost axis; neighbours are ranks of tp, then of pp, then of dp",
        ),
        (
            lambda tp, pp, dp, gpus: ["dp"] if tp * pp * dp > gpus else [],
            "with many ranks in tp or pp their groups do not fit on a machine either",
        ),
    ),
    hint="ranks of tp are neighbours, those of pp are tp apart, those of dp tp * pp; rank r is on host r // gpus",
)

# Exercise 2: the line for each machine --------------------------------------------------------------------------------


def _line(hosts: int, gpus: int, head: str, job: str) -> list[str]:
    return [f"--nnodes={hosts}", f"--nproc-per-node={gpus}", "--rdzv-backend=c10d", f"--rdzv-endpoint={head}:29500",
            f"--rdzv-id={job}", "train.py"]  # fmt: skip


def _line_problem(given: Any, hosts: int, gpus: int, head: str, job: str) -> str:
    """Judged by torchrun's own parser."""
    from torch.distributed.run import get_args_parser

    words = [str(word) for word in given]
    try:
        options = get_args_parser().parse_args(words)
    except SystemExit:
        return f"gives {' '.join(words)!r}, which torchrun does not take"
    if options.standalone:
        return "starts a job of its own on each machine"
    found = {
        "--nnodes": (options.nnodes, hosts), "--nproc-per-node": (options.nproc_per_node, gpus),
        "--rdzv-backend": (options.rdzv_backend, "c10d"), "--rdzv-endpoint": (options.rdzv_endpoint, f"{head}:29500"),
        "--rdzv-id": (options.rdzv_id, job), "the script": (options.training_script, "train.py"),
    }  # fmt: skip
    for name, (mine, right) in found.items():
        if str(mine) != str(right):
            return f"asks for {name} {mine or 'nothing'}; right is {right}"
    return "is right, but numbers the machines by hand: another line for each" if options.node_rank else ""


LINE = Function(
    "line(hosts, gpus, head, job)",
    ((2, 4, "node7", "first"), (16, 8, "a100-01", "llama"), (3, 1, "localhost", "x")),
    problem=_line_problem,
    mistakes=(
        (lambda h, g, head, job: _line(h, h * g, head, job), "--nproc-per-node counts the processes of one machine"),
        (lambda h, g, head, job: ["--standalone", *_line(h, g, head, job)[:2], "train.py"],
         "--standalone is for one machine: how would the others find it?"),
        (lambda h, g, head, job: [*_line(h, g, head, job)[:-2], "train.py"],
         "two jobs may meet at one address: --rdzv-id says which one a machine belongs to"),
    ),
    hint="--nnodes, --nproc-per-node, --rdzv-backend=c10d, --rdzv-endpoint=HOST:29500, --rdzv-id, and the script",
)  # fmt: skip

# Exercise 3: exposed communication ------------------------------------------------------------------------------------

Spans = Sequence[tuple[float, float]]


def exposed(compute: Spans, messages: Spans) -> float:
    """Seconds in which a message is on its way and nothing is computed."""
    marks = sorted({time for span in (*compute, *messages) for time in span})

    def during(spans: Spans, start: float, end: float) -> bool:
        return any(a <= start and end <= b for a, b in spans)

    return float(sum(b - a for a, b in pairwise(marks) if during(messages, a, b) and not during(compute, a, b)))


def _idle(compute: Spans, messages: Spans) -> float:
    every = (*compute, *messages)
    return exposed([], [(min(a for a, _ in every), max(b for _, b in every))]) - exposed([], compute)


EXPOSED = Function(
    "exposed(compute, messages)",
    (
        ([(0, 10)], [(6, 14)]),
        ([(0, 4), (6, 10)], [(3, 7)]),
        ([(0, 10)], [(2, 5), (4, 8)]),
        ([(0, 5)], [(4, 9), (7, 12)]),
        ([(0, 5), (20, 25)], [(6, 9)]),
        ([(0, 3)], []),
    ),
    truth=exposed,
    mistakes=(
        (lambda compute, messages: sum(b - a for a, b in messages), "what is hidden by computing costs nothing"),
        (
            lambda compute, messages: _idle(compute, messages),
            "in a part of this time nothing is sent: that is a bubble",
        ),
        (
            lambda compute, messages: sum(exposed(compute, [one]) for one in messages),
            "where two messages are on their way, the time counts once",
        ),
    ),
    hint="cut the time at every start and end; a piece counts if a message covers it and no computing does",
)

# Exercise 4: launch gaps ----------------------------------------------------------------------------------------------


def launch_gaps(kernels: Sequence[tuple[float, float, float]]) -> float:
    """Of (launched, started, ended), in order: seconds that the GPU waited for the host's next launch."""
    total = 0.0
    for (_, _, before), (launched, _, _) in pairwise(kernels):
        total += max(0.0, launched - before)
    return total


LAUNCH_GAPS = Function(
    "launch_gaps(kernels)",
    (
        ([(0, 5, 10), (8, 15, 20)],),
        ([(0, 5, 10), (30, 35, 40), (41, 46, 50)],),
        ([(0, 5, 50), (1, 50, 90), (2, 90, 99)],),
        ([(0, 5, 10)],),
        ([(0, 2, 10), (4, 12, 20), (60, 64, 70), (61, 75, 80)],),
    ),
    truth=launch_gaps,
    mistakes=(
        (
            lambda kernels: float(sum(b[1] - a[2] for a, b in pairwise(kernels))),
            "a part of the gap is the way of a launch to the GPU: the host had called in time",
        ),
        (
            lambda kernels: float(sum(b[0] - a[2] for a, b in pairwise(kernels))),
            "a launch before the end of the kernel before is no gap: it may not make others smaller",
        ),
        (
            lambda kernels: float(sum(b[0] - a[0] for a, b in pairwise(kernels))),
            "the host's launches may be far apart while the GPU is busy",
        ),
    ),
    hint="from the end of a kernel to the launch of the next one, where the launch comes later",
)

# Exercise 5: who left the row -----------------------------------------------------------------------------------------

Records = dict[int, list[tuple[int, str, int]]]


def culprit(records: Records) -> tuple[int, list[int]]:
    """The first number at which ranks differ, and the ranks that differ from most; (0, []) if none does."""
    for number in sorted({seq for entries in records.values() for seq, _, _ in entries}):
        at = {rank: next((e[1:] for e in entries if e[0] == number), None) for rank, entries in records.items()}
        usual, _ = Counter(at.values()).most_common(1)[0]
        apart = sorted(rank for rank, entry in at.items() if entry != usual)
        if apart:
            return number, apart
    return 0, []


_SUM = [(1, "all_reduce", 400), (2, "all_reduce", 900), (3, "all_reduce", 400), (4, "barrier", 0)]
_SKIPPED: Records = {0: _SUM, 1: [_SUM[0], (2, "all_reduce", 400), (3, "barrier", 0)], 2: _SUM}
_LATE: Records = {0: _SUM, 1: _SUM, 2: _SUM[:2], 3: _SUM}
_OTHER: Records = {0: _SUM, 1: _SUM, 2: [*_SUM[:2], (3, "all_gather", 400)], 3: [*_SUM[:2], (3, "all_gather", 400)],
                   4: _SUM}  # fmt: skip


CULPRIT = Function(
    "culprit(records)",
    ((_SKIPPED,), (_LATE,), (_OTHER,), ({0: _SUM, 1: _SUM},)),
    truth=culprit,
    mistakes=(
        (
            lambda records: culprit({r: [(n, op, 0) for n, op, _ in entries] for r, entries in records.items()}),
            "two sums of other sizes are other sums: compare the bytes, too",
        ),
        (
            lambda records: culprit({rank: entries[-1:] for rank, entries in records.items()}),
            "the last entries show where it hangs, not where it went wrong: look for the first difference",
        ),
        (
            lambda records: (culprit(records)[0], [min(records, key=lambda rank: len(records[rank]))]),
            "who has fewest entries may have waited for somebody else: compare what stands at the same number",
        ),
    ),
    hint="for each number in order: what has each rank there? Where one has something else than most, or nothing, stop",
)

# Exercise 6: how often to save ----------------------------------------------------------------------------------------


def goodput(work: float, save: float, restart: float, failure: float) -> float:
    """The part of the time that is work which stays, if after each `work` seconds `save` seconds are spent to save.

    Failures come at random, every `failure` seconds in the mean; each costs `restart` seconds and the work since the
    last save (Daly, 2006, equation 13).
    """
    return work / (failure * math.exp(restart / failure) * math.expm1((work + save) / failure))


def young(save: float, failure: float) -> float:
    """Seconds between saves (Young, 1974)."""
    return math.sqrt(2 * save * failure)


def _save_problem(given: Any, step: float, save: float, restart: float, hosts: int, days: float) -> str:
    if isinstance(given, bool) or not isinstance(given, int):
        return f"gives {given!r}: a whole number of steps is asked for"
    if given < 1:
        return f"gives {given}: it must be 1 at least"
    failure = days * 86400 / hosts
    mine = goodput(given * step, save, restart, failure)
    best = max(1, round(young(save, failure) / step))
    most = max(goodput(k * step, save, restart, failure) for k in range(max(1, best // 2), 2 * best + 2))
    if mine >= 0.995 * most:
        return ""
    saving = save / (given * step + save)
    lost = f"goodput {mine:.1%}; {most:.1%} is possible"
    if given < best:
        return f"gives {given}: right, but wasteful: {saving:.0%} of the time is spent on saving ({lost})"
    return f"gives {given}: too much is computed again after a failure ({lost})"


def _steps(between: Callable[[float, float], float]) -> Callable[..., int]:
    """Steps between saves; `between`: seconds, of a save and between failures."""
    return lambda step, save, restart, hosts, days: max(1, round(between(save, days * 86400 / hosts) / step))


SAVE_EVERY = Function(
    "save_every(step, save, restart, hosts, days)",
    ((2.0, 30.0, 300.0, 128, 365.0), (20.0, 60.0, 600.0, 2048, 180.0), (0.5, 5.0, 60.0, 4, 100.0)),
    problem=_save_problem,
    mistakes=(
        (
            lambda step, save, restart, hosts, days: max(1, round(young(save, days * 86400) / step)),
            "that is for one machine: when one of `hosts` machines fails, all of them stop",
        ),
        (
            _steps(lambda save, failure: math.sqrt(save * failure)),
            "a failure costs half an interval in the mean: 2 stands under the root",
        ),
        (_steps(lambda save, failure: failure), "once per failure: then half of the work is lost each time"),
    ),
    hint="seconds between failures of the whole job: days * 86400 / hosts; between saves: sqrt(2 * save * that)",
)

__all__ = ["CROSSING", "CULPRIT", "EXPOSED", "LAUNCH_GAPS", "LINE", "SAVE_EVERY", "culprit", "exposed",
           "goodput", "launch_gaps", "young"]  # fmt: skip
