"""The parameter server: its messages beside gloo's, its bytes beside allreduce's, and its modes with a straggler.

Push and pull, of one key and of many, take turns with gloo's send and receive of the same bytes in both directions. The
straggler is an emulated device five times slower than the others. `server.png` shows loss over time.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import Row
from minipar import Cluster, DeviceSpec, Plan, data, models, train
from minipar.cluster import worker
from minipar.costs.unit import UnitCosts
from minipar.program import Op, Program
from minipar.program.server_rule import Mode
from minipar.server.process import Server
from minipar.server.pushing import Servers
from minipar.server.shard import Settings, Shard, form_of
from minipar.training.training import Run

SIZES = {"1 KB": 1 << 10, "64 KB": 1 << 16, "4 MB": 4 << 20, "40 MB": 40 << 20}
MANY = 100  # keys of a model with many small tensors
MODES = ("sync", "async", "ssp:3", "k-of-n:3/4")
_TURN = 10  # rounds of one turn
_FORWARD, _BACKWARD, _SLOWER = 0.004, 0.008, 5.0


def _messages(settings: Settings, size: int, keys: int, rounds: int) -> list[tuple[float, float]] | None:
    """On rank 0: seconds of a push of all keys and a pull, and seconds of gloo's sends and receives of the same
    tensors, which are all begun at once. Rank 1 answers gloo's messages; rank 2 is the parameter server.

    The two take turns of ten rounds: both run under the same load of the machine, each with warm caches.
    """
    rank = worker.context().rank
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    x, y = ([torch.zeros(size // 4) for _ in range(keys)] for _ in range(2))
    total = -(-rounds // _TURN) * _TURN
    if rank == 1:
        for _ in range(total):
            _gloo(dist.irecv, y, 0)
            _gloo(dist.isend, y, 0)
    settings = replace(settings, steps=total + 1)
    if rank == 2:
        Server(settings, 0, Shard(settings, 0, x, _NoUpdate)).run()
    if rank:
        return None
    ps = Servers(settings, 0)
    ps.next_step()
    ours, gloos = [], []
    for _ in range(total // _TURN):
        for _ in range(_TURN):
            start = time.perf_counter()
            _push(ps, x)
            ours.append(time.perf_counter() - start)
        for _ in range(_TURN):
            start = time.perf_counter()
            _gloo(dist.isend, x, 1)
            _gloo(dist.irecv, y, 1)
            gloos.append(time.perf_counter() - start)
    _push(ps, x)  # (after the last step the server ends, and sends no parameters)
    return list(zip(ours, gloos, strict=True))[_TURN:]


def _push(ps: Servers, gradients: list[torch.Tensor]) -> None:
    ps.push({str(k): gradient for k, gradient in enumerate(gradients)})
    ps.next_step()


def _gloo(begin: Any, tensors: list[torch.Tensor], peer: int) -> None:
    for work in [begin(tensor, peer) for tensor in tensors]:
        work.wait()


class _NoUpdate(torch.optim.Optimizer):
    """An optimizer that does nothing, so that only transport is measured: gloo's side adds nothing, either."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


def _transport(quick: bool) -> list[Row]:
    """Throughput must not be below gloo's. gloo sends one message for each key."""
    rows = []
    with Cluster(3, device="cpu") as cluster:
        for name, size in SIZES.items():
            for keys in (1, MANY) if size < 1 << 20 else (1,):
                rounds = (20 if quick else 40) if keys * size >= 4 << 20 else (50 if quick else 400)
                folder = tempfile.mkdtemp(prefix="bench-server-")
                try:
                    known = tuple(form_of(str(k), torch.zeros(size // 4)) for k in range(keys))
                    settings = Settings(folder, known, 1, 1, Mode("async"))
                    times = cluster.run(_messages, settings, size, keys, rounds)[0]
                finally:
                    shutil.rmtree(folder)
                ours, gloo = median(a for a, _ in times), median(b for _, b in times)
                what = f"push and pull of {name}" if keys == 1 else f"push and pull of {keys} x {name}"
                rows += [
                    Row(what, ours * 1e3, "ms", note=f"{2 * keys * size / ours / 1e9:.2f} GB/s"),
                    Row(f"{what} / gloo send and recv", ours / gloo, "", 1.0),
                ]
    return rows


def _straggler(program: Program) -> UnitCosts:
    """Costs of devices, the first of which is five times slower than the others."""
    factors = [_SLOWER] + [1.0] * (len(program.ranks) - 1)
    return UnitCosts(program, _FORWARD, _BACKWARD, stage_factors=factors)


def _modes(quick: bool) -> tuple[list[Row], dict[str, Run]]:
    rows, runs = [], {}
    steps = 12 if quick else 60
    with Cluster(5, device=DeviceSpec(costs=_straggler)) as cluster:
        for mode in MODES:
            runs[mode] = run = train(
                partial(models.build, "mlp-digits"), data.for_model("mlp-digits"), f"dp=4 sync=ps mode={mode}",
                cluster=cluster, steps=steps, batch=64, optimizer=partial(torch.optim.SGD, lr=0.1), progress=False,
            )  # fmt: skip
            updates = sum(ins.op is Op.APPLY for ins in run.program.ranks[4])
            fast = median(run.trace.ends[rank][-1] for rank in (1, 2, 3))
            rows += [
                Row(f"one straggler, {mode}: gradients a second", _taken(run) / run.trace.time, "1/s",
                    note=f"{updates} updates, {run.service.dropped if run.service else 0} dropped"),
                Row(f"one straggler, {mode}: until the others are done", fast, "s",
                    note=f"staleness {max(run.trace.staleness())}, last loss {run.losses[-1]:.3f}"),
                Row(f"one straggler, {mode}: predicted / measured time", run.predicted.time / run.trace.time),
            ]  # fmt: skip
    return rows, runs


def _taken(run: Run) -> int:
    return sum(value.kind == "pushed" for ins in run.program.ranks[4] if ins.op is Op.APPLY for value in ins.reads[:4])


def _bytes() -> list[Row]:
    """The bytes of a step: those that a server receives and sends, and those that a rank of an allreduce sends."""
    plan = Plan.parse("dp=4 sync=ps")
    with Cluster(plan.ranks, device="cpu") as cluster, Cluster(4, device="cpu") as fewer:
        common: dict[str, Any] = {"steps": 3, "batch": 32, "progress": False}
        made, source = partial(models.build, "mlp-wide"), data.for_model("mlp-wide")
        served = train(made, source, plan, cluster=cluster, **common)
        reduced = train(made, source, "dp=4", cluster=fewer, **common)
    assert served.service is not None
    measured = (served.service.received[0] + served.service.sent[0]) / 3
    predicted = sum(p.bytes for ins in served.predicted.program.ranks[4] if ins.op in (Op.ACCEPT, Op.REPLY)
                    for p in ins.parts) / 3  # fmt: skip
    ring = reduced.bytes_sent[0]
    return [
        Row("bytes at the server, a step of 4 workers", measured / 2**20, "MiB"),
        Row("bytes at the server, predicted / measured", predicted / measured, "", 1.0),
        Row("bytes at the server / sent by a rank of an allreduce", measured / ring, note="formula: n^2 / (n - 1)"),
    ]


def _picture(runs: dict[str, Run], path: str) -> None:
    """Draw the loss over time, and the number of updates over time, for each mode."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for mode, run in runs.items():
        row, ends = run.program.ranks[1], run.trace.ends[1]
        moments = [ends[k] for k, ins in enumerate(row) if ins.op is Op.PUSH]
        done = [ins.step for ins in row if ins.op is Op.PUSH]
        left.plot(moments, [run.losses[s] for s in done], label=mode)
        applied = [k for k, ins in enumerate(run.program.ranks[4]) if ins.op is Op.APPLY]
        right.plot([run.trace.ends[4][k] for k in applied], range(1, len(applied) + 1), label=mode)
    left.set(xlabel="seconds", ylabel="loss of the step", title="a fast worker beside one that is 5 times slower")
    right.set(xlabel="seconds", ylabel="updates", title="updates of the server")
    left.legend()
    figure.savefig(path, dpi=120)


def measure(quick: bool = False) -> list[Row]:
    rows = _transport(quick) + _bytes()
    more, runs = _modes(quick)
    _picture(runs, os.path.join(tempfile.gettempdir() if quick else os.getcwd(), "server.png"))
    return rows + more
