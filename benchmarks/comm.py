"""Collectives by algorithm beside torch's own on gloo, in the terms of nccl-tests: time, algorithm and bus bandwidth.

    algorithm bandwidth    bytes of the whole tensor / seconds
    bus bandwidth          algorithm bandwidth times 2 (p - 1)/p for an allreduce, times (p - 1)/p for a reduce-scatter
                           or an all-gather: it can be compared with the rate of a link, for any number of ranks p

All contestants of a size take turns in one run of the ranks, so that noise affects all of them; ratios are of medians.
The prediction is made before, from `calibrate`, which runs none of these algorithms.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from benchmarks.harness import Row
from minipar import Cluster, calibrate
from minipar.comm import communicator
from minipar.prediction import choice
from minipar.program import collectives

RANKS = (2, 4)
SIZES = tuple(4**k << 10 for k in range(9))  # 1 KB to 64 MB
LARGEST = SIZES[-1]
COLLECTIVES = ("allreduce", "reduce_scatter", "all_gather")
GLOO, SHARED = "gloo", "shared memory"
MUSTS = {("allreduce", 2): 1.0, ("allreduce", 4): 1.2}  # time of our ring / time of gloo, at 64 MB; for the others:
MUST = 0.5


@dataclass(frozen=True)
class Point:
    """The time of one contestant, in seconds; `predicted` is None for torch's own collectives."""

    collective: str
    ranks: int
    size: int
    name: str
    seconds: float
    predicted: float | None

    @property
    def bandwidth(self) -> float:
        """Algorithm bandwidth in bytes a second."""
        return self.size / self.seconds

    @property
    def bus_bandwidth(self) -> float:
        """Bus bandwidth in bytes a second."""
        hops = 2 if self.collective == "allreduce" else 1
        return self.bandwidth * hops * (self.ranks - 1) / self.ranks


def _torchs_own(collective: str, x: torch.Tensor, part: torch.Tensor) -> Callable[[], object]:
    """A collective of torch.distributed. Its name depends on the version of torch."""
    if collective == "allreduce":
        return lambda: dist.all_reduce(x)
    if collective == "reduce_scatter":
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return lambda: scatter(part, x)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return lambda: gather(x, part)


def _race(store: str, collective: str, size: int, rounds: int) -> dict[str, list[tuple[float, float, int]]]:
    """In a rank: for each contestant and round, the start and the end of its calls, and their number."""
    from minipar.comm.playing import play

    comm = communicator.create()
    everyone = tuple(range(comm.size))
    if not dist.is_initialized():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=comm.rank, world_size=comm.size)
    x, y = torch.zeros(size // 4), torch.zeros(size // 4)
    contestants = {GLOO: _torchs_own(collective, x, torch.zeros(size // 4 // comm.size))}
    parts = y.split(size // 4 // comm.size)
    in_memory: dict[str, Callable[[], object]] = {
        "allreduce": lambda: comm.iallreduce(y, everyone).wait(),
        "reduce_scatter": lambda: comm.ireduce_scatter(y, x[: len(parts[0])], everyone).wait(),
        "all_gather": lambda: comm.iall_gather(parts[comm.rank], y, everyone)[0].wait(),
    }
    contestants[SHARED] = in_memory[collective]
    for name in collectives.names(collective):
        nodes = 2 if name == "hierarchical" and comm.size > 2 else 1
        program = collectives.program(collective, name, comm.size, size, nodes=nodes, item=4)
        contestants[name] = lambda program=program: play(program, comm, y, everyone)  # type: ignore[misc]
    calls = max(1, min(20, (1 << 20) // size))
    times: dict[str, list[tuple[float, float, int]]] = {name: [] for name in contestants}
    names = list(contestants)
    for k in range(rounds + 2):
        for name in names[k % len(names) :] + names[: k % len(names)]:
            comm.barrier()
            start = time.perf_counter()
            for _ in range(calls):
                contestants[name]()
            if k >= 2:
                times[name].append((start, time.perf_counter(), calls))
    return times


def points(ranks: int, sizes: Sequence[int], rounds: int) -> list[Point]:
    """All contestants of all collectives and sizes, on `ranks` ranks."""
    found = []
    with Cluster(ranks, device="cpu") as cluster, tempfile.TemporaryDirectory() as folder:
        for collective in COLLECTIVES:
            rates = calibrate(cluster, seconds=1.0, progress=False)  # again: the machine's load changes
            for size in sizes:
                predicted = choice.predicted(collective, ranks, size, rates, nodes=2 if ranks > 2 else 1)
                runs = cluster.run(_race, os.path.join(folder, "store"), collective, size, rounds)
                for name in runs[0]:
                    columns = zip(*(run[name] for run in runs), strict=True)
                    seconds = [(max(e for _, e, _ in one) - min(s for s, _, _ in one)) / one[0][2] for one in columns]
                    found.append(Point(collective, ranks, size, name, median(seconds), predicted.get(name)))
    return found


def draw(found: Sequence[Point], path: str) -> None:
    """Bus bandwidth over size: a panel for each collective and number of ranks, a line for each contestant."""
    from matplotlib.figure import Figure

    kinds = sorted({(p.collective, p.ranks) for p in found}, key=lambda k: (COLLECTIVES.index(k[0]), k[1]))
    figure = Figure(figsize=(11, 3.2 * len(COLLECTIVES)), layout="constrained")
    panels = figure.subplots(len(COLLECTIVES), len(kinds) // len(COLLECTIVES), squeeze=False).flat
    everything = collectives.names("allreduce")  # a colour for each
    for axes, (collective, ranks) in zip(panels, kinds, strict=True):
        for name in (GLOO, SHARED, *collectives.names(collective)):
            mine = [p for p in found if (p.collective, p.ranks, p.name) == (collective, ranks, name)]
            sizes, rates = [p.size for p in mine], [p.bus_bandwidth / 1e9 for p in mine]
            colour, width = (
                ({GLOO: "black", SHARED: "grey"}[name], 2.2)
                if name in (GLOO, SHARED)
                else (f"C{everything.index(name)}", 1.4)
            )
            axes.loglog(sizes, rates, marker="o", markersize=3, label=name, color=colour, linewidth=width)
        axes.set_title(f"{collective.replace('_', '-')}, {ranks} ranks", fontsize=10)
        axes.set_xlabel("bytes")
        axes.set_ylabel("bus bandwidth (GB/s)")
        axes.legend(fontsize=7)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def _human(size: int) -> str:
    return f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} KB"


def _rows(found: Sequence[Point]) -> list[Row]:
    """A line for each point; then the errors of prediction, the loss if the algorithm is chosen by prediction, and the
    conditions."""
    gloos = {(p.collective, p.ranks, p.size): p.seconds for p in found if p.name == GLOO}
    rows, musts, errors = [], [], []
    for p in found:
        ratio = p.seconds / gloos[p.collective, p.ranks, p.size]
        words = f"{p.bandwidth / 1e9:.3f} GB/s algorithm, {p.bus_bandwidth / 1e9:.3f} GB/s bus, {ratio:.2f} of gloo"
        if p.predicted is not None:
            words += f", predicted {p.predicted * 1e6:.1f} us ({p.predicted / p.seconds - 1:+.0%})"
        what = f"{p.collective} of {_human(p.size)}, {p.ranks} ranks, {p.name}"
        rows.append(Row(what, p.seconds * 1e6, "us", note=words))
        if p.name == "ring" and p.size == LARGEST:
            must = MUSTS.get((p.collective, p.ranks), MUST)
            musts.append(Row(f"{what} / gloo", ratio, "", must))
    for collective, ranks in sorted({(p.collective, p.ranks) for p in found}):
        ours = [p for p in found if (p.collective, p.ranks) == (collective, ranks) and p.predicted is not None]
        for name in dict.fromkeys(p.name for p in ours):
            wrong = [abs(p.predicted / p.seconds - 1) for p in ours if p.name == name and p.predicted is not None]
            what = f"{collective}, {ranks} ranks, {name}: error of prediction"
            errors.append(Row(what, median(wrong) * 100, "%", note=f"median over sizes; largest {max(wrong):.0%}"))
        losses = []
        for size in sorted({p.size for p in ours}):
            field = [p for p in ours if p.size == size]
            chosen = min(field, key=lambda p: p.predicted or 0.0)
            losses.append(chosen.seconds / min(p.seconds for p in field))
        what = f"{collective}, {ranks} ranks, chosen by prediction / fastest"
        errors.append(Row(what, median(losses), "", note=f"median over sizes; largest {max(losses):.2f}"))
    return rows + errors + musts


def measure(quick: bool = False, picture: str | None = None) -> list[Row]:
    sizes = SIZES[::4] if quick else SIZES
    found = [point for ranks in RANKS for point in points(ranks, sizes, 5 if quick else 15)]
    if picture:
        draw(found, picture)
    return _rows(found)
