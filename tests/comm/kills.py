"""A campaign of random kills: `python -m tests.comm.kills [CASES] [SEED]`. `make thorough` runs it, tests use parts.

Each case trains a few numbers on 3 workers and 1 or 2 servers in a random mode, and ends one worker with SIGKILL at a
random point of its own work. The result must be as if nothing had happened: the parameters are exactly those
of a replay of the recorded order in plain torch, and the order contains every gradient.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from tqdm.auto import tqdm

from minipar.cluster import Cluster, worker
from minipar.errors import ServerClosed
from minipar.program.server_rule import Kind, Mode
from minipar.server import pushing
from minipar.server.process import Server
from minipar.server.pushing import Servers
from minipar.server.shard import Settings, Shard, form_of

WORKERS = 3
POINTS = ("push", "pull", "compute")
MODES = ("sync", "async", "ssp:0", "ssp:2", "k-of-n:2/3")
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adam": partial(torch.optim.Adam, lr=0.1),
}


def initial():
    made = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=made, dtype=torch.float64) for shape in ((7, 5), (3,), (11,))]


def gradient(values, step, who, k):
    """Of no model in particular, but of these parameters, this step and this worker."""
    made = torch.Generator().manual_seed(step * 100 + who * 10 + k)
    return values - torch.randn(values.shape, generator=made, dtype=torch.float64) + torch.sin(values)


@dataclass(frozen=True)
class Kill:
    """End this process when it reaches a point for the n-th time; once in a case, however often it starts again."""

    folder: str
    point: str = ""
    count: int = 0
    seen: Counter = None

    def __call__(self, point):
        if point != self.point:
            return
        self.seen[point] += 1
        if self.seen[point] == self.count:
            try:
                os.close(os.open(f"{self.folder}/killed", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
            os.kill(os.getpid(), signal.SIGKILL)


def note(folder, name, *facts):
    """One line in a file, which outlives its writer."""
    with open(f"{folder}/{name}.log", "a") as file:
        file.write(json.dumps(facts) + "\n")


def notes(folder, name):
    path = f"{folder}/{name}.log"
    return [json.loads(line) for line in open(path)] if os.path.exists(path) else []


def settings_of(folder, servers, mode="sync", workers=WORKERS, steps=8, **more):
    """What servers and workers of the numbers know of each other."""
    keys = tuple(form_of(str(k), v) for k, v in enumerate(initial()))
    return Settings(str(folder), keys, workers, steps, Mode.parse(mode, workers), servers, **more)


def server_of(settings, number, optimizer=OPTIMIZERS["sgd"]):
    return Server(settings, number, Shard(settings, number, initial(), optimizer))


def take_part(settings, optimizer, point="", victim=-1, count=0, slow=0.0):
    """In a rank: a worker, or one of the servers after them."""
    rank = worker.context().rank
    reach = Kill(settings.folder, point if rank == victim else "", count, Counter())
    note(settings.folder, "pids", os.getpid())
    if rank >= WORKERS:
        return server_of(settings, rank - WORKERS, optimizer).run()
    send = pushing.send

    def send_and_reach(to, message, parts=()):
        send(to, message, parts)
        reach(message["what"])

    with contextlib.suppress(ServerClosed), pytest.MonkeyPatch.context() as patch:
        patch.setattr(pushing, "send", send_and_reach)
        ps = Servers(settings, rank)
        while (step := ps.next_step()) is not None:
            reach("pull")
            if rank == 0 and slow:
                time.sleep(slow)
            for k in range(3):
                found = gradient(ps.pull(str(k)), step, rank, k)
                reach("compute")
                ps.push({str(k): found})
    return None


def replay(order, optimizer, rows=lambda take: 1, of=1):
    """Plain torch, reading only the order: the parameters, and which gradients went into them."""
    values = [torch.nn.Parameter(v) for v in initial()]
    update = optimizer(values)
    seen, taking, taken, stale = {}, [], [], []
    for kind, who, step, version in order:
        if kind is Kind.ANSWER:
            seen[who, step] = [p.detach().clone() for p in values], version
        elif kind is Kind.TAKE:
            taking.append((who, step))
            stale.append(version - seen[who, step][1])
        elif kind is Kind.APPLY:
            for k, p in enumerate(values):
                parts = [gradient(seen[w, s][0][k], s, w, k) for w, s in taking]
                p.grad = sum(parts[1:], parts[0])
                if len(parts) > 1:
                    p.grad = p.grad * (1 / len(parts))
            update.step()
            taken.append(taking)
            taking = []
    return torch.cat([p.detach().reshape(-1) for p in values]), taken, stale


@dataclass(frozen=True)
class Case:
    point: str
    mode: str
    servers: int
    optimizer: str
    victim: int
    count: int
    slow: float
    steps: int = 8


def draw(number, seed):
    """Case `number` of a campaign: the points come in turn, all else at random."""
    dice = random.Random(f"{seed}/{number}")
    point, servers = POINTS[number % len(POINTS)], dice.choice((1, 2))
    victim = dice.randrange(WORKERS)
    most = {"push": 21, "compute": 21, "pull": 8}[point]
    mode = dice.choice(MODES)
    if mode == "k-of-n:2/3" and victim == 0:
        victim = 1  # (a straggler may not get far)
    count = dice.randint(1, most // 2 if mode == "k-of-n:2/3" else most)
    return Case(point, mode, servers, dice.choice(list(OPTIMIZERS)), victim, count, dice.choice((0.0, 0.003)))


def run(case, cluster):
    """Run a case; AssertionError says what is not as it must be. Whether its victim came to its end."""
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        settings, optimizer = settings_of(folder, case.servers, case.mode, steps=case.steps), OPTIMIZERS[case.optimizer]
        mode, kill = settings.mode, (case.point, case.victim, case.count, case.slow)
        found = cluster.run_reviving(1, lambda rank, fact: None, take_part, settings, optimizer, *kill)
        served = found[WORKERS:]
        values, taken, stale = replay(served[0].order, optimizer)
        mine = torch.cat([one.values.view(torch.float64) for one in served])
        assert torch.equal(mine, values), f"parameters differ by {(mine - values).abs().max()}"
        steps = range(case.steps)
        if mode.each:
            assert sorted(t for update in taken for t in update) == [(w, s) for w in range(WORKERS) for s in steps]
        else:
            need = WORKERS if mode.kind == "sync" else mode.count
            assert [{s for _, s in update} for update in taken] == [{s} for s in steps]
            assert all(len({w for w, _ in update}) == need for update in taken)
        bound = mode.staleness(WORKERS)
        assert bound is None or max(stale) <= bound
        left = [pid for (pid,) in notes(folder, "pids") if not member(pid, cluster) and alive(pid)]
        assert not left, f"processes {left} are left"
        return os.path.exists(f"{folder}/killed")


def member(pid, cluster):
    return pid in {one.process.pid for one in cluster._members.ranks.values()}


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def campaign(cases, seed, show=print):
    """Run cases 0, 1, ... until so many have ended a process; how many, by point."""
    ended: Counter = Counter()
    clusters = {servers: Cluster(WORKERS + servers, device="cpu") for servers in (1, 2)}
    pids = set()
    number = 0
    progress = tqdm(total=cases, desc="processes killed", disable=None)
    try:
        while sum(ended.values()) < cases:
            case = draw(number, seed)
            try:
                killed = run(case, clusters[case.servers])
                ended[case.point] += killed
                progress.update(killed)
            except BaseException:
                show(f"case {number} of seed {seed}: {case}")
                raise
            number += 1
            for cluster in clusters.values():
                pids |= {one.process.pid for one in cluster._members.ranks.values()}
    finally:
        progress.close()
        for cluster in clusters.values():
            cluster.close()
    left = [pid for pid in pids if alive(pid)]
    assert not left, f"processes {left} are left"
    return ended


if __name__ == "__main__":
    cases, seed = (int(word) for word in (*sys.argv[1:], *("120", "0")[len(sys.argv) - 1 :]))
    begin = time.monotonic()
    ended = campaign(cases, seed)
    text = ", ".join(f"{ended[point]} at {point}" for point in POINTS)
    print(
        f"{sum(ended.values())} processes killed ({text}) in {time.monotonic() - begin:.0f} s: nothing lost, none left"
    )
