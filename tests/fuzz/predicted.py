"""Predicted beside measured, for all keys of a plan that go together: `python -m tests.fuzz.predicted [--write PAGE]`.

For each two keys the first of their values that go together (matrix.py) is trained twice: once with every allocation
followed, for the peak of memory of each rank; and once on emulated devices that are so slow that the machine's cores
do not matter, for the time of a step. What was predicted before the run is compared. Such a run mostly sleeps, so
several plans are tried at once.
"""

from __future__ import annotations

import argparse
import atexit
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from itertools import combinations
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch

from minipar import Plan, models
from minipar.cluster.ranks import Ranks
from minipar.errors import PlanError
from minipar.training.training import Run, train
from tests.fuzz.matrix import BY_HAND, Clusters, choices, plan_of, with_section
from tests.fuzz.trial import model_for

MEMORY, TIME = 0.01, 0.05  # how far a prediction may be from what is measured
# Slow: a collective of two ranks takes a busy machine some milliseconds, which must be little of what it takes here.
DEVICE = "flops=20MFLOP/s bandwidth=4MB/s latency=10ms host_bandwidth=8MB/s disk_bandwidth=4MB/s"
SLOWER = "flops=5MFLOP/s bandwidth=1MB/s latency=40ms host_bandwidth=2MB/s disk_bandwidth=1MB/s"
TITLE = "# What was predicted"
BATCH, STEPS = 16, 4
SIZES = {"width": 32, "heads": 2, "context": 16, "vocab": 64}


@dataclass(frozen=True)
class Compared:
    """A plan, and the relative errors of its predictions: of the worst rank's peak, and of the time of a step (None:
    not measured). `slower`: on the slower devices; `refused`: why there are none; `failed`: an error that
    refuses nothing."""

    words: str
    memory: float | None = None
    time: float | None = None
    slower: bool = False
    refused: str = ""
    failed: str = ""

    @property
    def off(self) -> bool:
        """Whether its time is too far from the predicted one."""
        return abs(self.time or 0.0) > TIME

    @property
    def missed(self) -> bool:
        return bool(self.failed) or abs(self.memory or 0.0) > MEMORY or self.off

    def __str__(self) -> str:
        memory = "" if self.memory is None else f"{self.memory:+.2%}"
        time = "" if self.time is None else f"{self.time:+.1%}"
        mark = "FAILED" if self.failed else "MISS" if self.missed else ""
        return f"{mark:6} {memory:>8} {time:>7}  {self.words}  {self.refused}{self.failed}"


def _tokens(rows: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(64, (rows, 16)), torch.randint(64, (rows, 16))


def _pictures() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(BATCH, 64), torch.randint(10, (BATCH,))


MODELS: dict[str, tuple[Callable[[], Any], Callable[[], Any], Any]] = {
    "gpt": (partial(models.gpt, layers=4, fused=False, **SIZES), _tokens, torch.nn.functional.cross_entropy),
    "mixture": (  # (ranks that share its experts divide the rows of a micro-batch)
        partial(models.mixture, layers=4, experts=2, capacity=None, **SIZES),
        partial(_tokens, 2 * BATCH),
        models.mixture_loss,
    ),
    "mixture in slices": (
        partial(models.mixture, layers=4, experts=2, capacity=None, balance=False, **SIZES),
        partial(_tokens, 2 * BATCH),
        models.mixture_loss,
    ),
    "branches": (partial(models.branchy, blocks=1, width=8), _pictures, torch.nn.functional.cross_entropy),
}


def plans() -> Iterator[str]:
    """The words of plans that have each two keys which go together, each plan once."""
    names = [field.name for field in fields(Plan) if field.name not in BY_HAND]
    every = sorted(choices(), key=lambda choice: choice.value == "branches")  # (which few other models have)
    seen = set()
    for one, other in combinations(names, 2):
        two = ((a, b) for a in every if a.key == one for b in every if b.key == other)
        words = next((found for pair in two if isinstance(found := plan_of(pair), str)), None)
        if words is not None and words not in seen:
            seen.add(words)
            yield words


def trained(words: str, cluster: Ranks, **options: Any) -> Run:
    model, data, loss = MODELS[model_for(Plan.parse(words))]
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = partial(torch.optim.Adam, lr=1e-3)
        rows = data()
        return train(
            model, rows, words, cluster=cluster, batch=len(rows[0]), steps=STEPS, loss=loss, optimizer=optimizer,
            progress=False, **options,
        )  # fmt: skip


def memory_error(words: str, cluster: Ranks) -> float:
    """Of the rank with the worst prediction."""
    run = trained(words, cluster, memory=True)
    two = zip(run.predicted.series, run.trace.series, strict=True)
    return max((a.peak().bytes / b.peak().bytes - 1 for a, b in two), key=abs)


def time_error(words: str, cluster: Ranks) -> float:
    return trained(words, cluster).prediction_error


def compared(words: str, here: Callable[[int], Ranks] | None, emulated: Callable[[int], Ranks] | None) -> Compared:
    """Of a plan: its memory on the ranks that are `here`, its time on `emulated` ones; None: not that one."""
    ranks = Plan.parse(words).ranks
    try:
        time = time_error(words, emulated(ranks)) if emulated is not None else None
        return Compared(words, memory_error(words, here(ranks)) if here is not None else None, time)
    except PlanError as error:
        return Compared(words, refused=str(error).split("\n")[0])
    except Exception as error:
        return Compared(words, failed=f"{type(error).__name__}: {error}".split("\n")[0])


def _compared_apart(words: str, timed: bool, followed: bool, device: str = DEVICE) -> Compared:
    """In a process of its own, with clusters that stay until something fails."""
    torch.set_num_threads(1)
    here, emulated = _clusters("cpu"), _clusters(device)
    found = compared(words, here if followed else None, emulated if timed else None)
    if found.failed:  # (its ranks may be of no use any more)
        here.close()
        emulated.close()
    return found


@cache
def _clusters(device: str) -> Clusters:
    made = Clusters(device)
    atexit.register(made.close)
    return made


def report(found: Sequence[Compared]) -> str:
    """What was predicted, as a part of docs/combinations.md."""
    ran = [one for one in found if not one.refused and not one.failed]
    peaks = [one.memory for one in ran if one.memory is not None]
    times = [one.time for one in ran if one.time is not None]
    again = sum(one.slower for one in ran)
    refused, failed = sum(bool(one.refused) for one in found), [one for one in found if one.failed]
    lines = [
        TITLE, "",
        f"Of {len(found)} plans that have each two keys which go together, {len(ran)} were trained with predictions:",
        f"of {len(peaks)} the peak of memory of the worst rank, and of {len(times)} the time of a step on",
        f"emulated devices ({DEVICE}).",
        "(Several plans run at once. What the cores really do is part of a step, too, and some plans keep them busy:",
        f"one whose time is off is measured again on devices that are four times as slow, as {again} were.)",
        f"Of {refused} nothing is predicted, or the model does not fit; {len(failed)} fail.",
        "",
        "| | plans | median error | worst | allowed | within |", "|---|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for name, errors, allowed in (("peak memory", peaks, MEMORY), ("step time", times, TIME)):
        sizes = sorted(map(abs, errors))
        if not sizes:
            lines.append(f"| {name} | 0 | not measured | | {allowed:.0%} | |")
            continue
        within = sum(size <= allowed for size in sizes)
        row = f"| {name} | {len(sizes)} | {median(sizes):.2%} | {sizes[-1]:.1%} | {allowed:.0%} |"
        lines.append(f"{row} {within} |")
    if missed := [one for one in ran if one.missed]:
        lines += ["", "| further away | peak memory | step time |", "|---|---:|---:|"]
        for one in missed:
            memory, time = ("" if error is None else f"{error:+.1%}" for error in (one.memory, one.time))
            lines.append(f"| {one.words} | {memory} | {time} |")
    lines += ["", *(f"FAILED {one.words}: {one.failed}" for one in failed)]
    return "\n".join([*lines, "Written by `python -m tests.fuzz.predicted --write docs/combinations.md`."])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.predicted", description=__doc__.split("\n")[0])
    parser.add_argument("--every", type=int, default=1, help="try every so many-th plan")
    parser.add_argument("--from", type=int, default=0, dest="first", help="begin with this one")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--at-once", type=int, default=4, help="so many plans at once")
    parser.add_argument("--timed", type=int, default=1, help="compare the time of every so many-th, too; 0: of none")
    parser.add_argument("--no-memory", action="store_true", help="compare times alone")
    parser.add_argument("--write", default="", metavar="PAGE", help="write the outcomes to this page")
    chosen = parser.parse_args()
    found, begin = [], time.monotonic()
    tried = list(plans())[chosen.first :: chosen.every]
    with ProcessPoolExecutor(chosen.at_once, get_context("spawn")) as pool:
        timed = [bool(chosen.timed) and k % chosen.timed == 0 for k in range(len(tried))]
        followed = not chosen.no_memory
        begun = [pool.submit(_compared_apart, words, time, followed) for words, time in zip(tried, timed, strict=True)]
        for one in begun:
            if time.monotonic() - begin > chosen.seconds:
                pool.shutdown(wait=False, cancel_futures=True)
                break
            found.append(one.result())
            print(found[-1], flush=True)
    # Where real work takes longer than the device should, its time shows in the step: again where it hardly counts.
    off = [k for k, one in enumerate(found) if one.off]
    with ProcessPoolExecutor(max(1, chosen.at_once // 2), get_context("spawn")) as pool:
        slower = [pool.submit(_compared_apart, found[k].words, True, False, SLOWER) for k in off]
        for k, one in zip(off, slower, strict=True):
            found[k] = replace(one.result(), memory=found[k].memory, slower=True)
            print(f"slower: {found[k]}", flush=True)
    print(f"{len(found)} plans in {time.monotonic() - begin:.0f} s, {sum(one.missed for one in found)} missed")
    if chosen.write:
        page = Path(chosen.write)
        page.write_text(with_section(page.read_text(), report(found)))
    return 1 if any(one.missed for one in found) else 0


if __name__ == "__main__":
    sys.exit(main())
