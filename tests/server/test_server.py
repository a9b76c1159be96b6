"""The parameter server: every mode against a plain torch loop that reads only the recorded order; faults; bad input."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from contextlib import closing
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from minipar.cluster import stacks, worker
from minipar.cluster.members import Revived
from minipar.errors import RankDied, RankError, ServerClosed
from minipar.program.server_rule import Kind, Mode, Row
from minipar.server import process, pushing, rendezvous
from minipar.server.connection import Connection
from minipar.server.framing import Message, What
from minipar.server.process import Settings
from minipar.server.shard import Shard, digest, key_of, pieces_of
from minipar.strategies.shares import cut
from tests.comm import kills

WORKERS = kills.WORKERS


def keys():
    return [key_of(k, v) for k, v in enumerate(kills.initial())]


def train(cluster, folder, mode, optimizer="momentum", tcp=False, steps=8, slow=0.002, **more):
    servers = cluster.size - WORKERS
    rendezvous.open_folder(str(folder), keys(), servers, tcp)
    settings = Settings(WORKERS, steps, kills.OPTIMIZERS[optimizer], Mode.parse(mode, WORKERS), **more)
    found = cluster.run(kills.take_part, str(folder), settings, "", -1, 0, slow)
    served = found[WORKERS:]
    return [Row(*row) for row in served[0].order], torch.cat([s.values.view(torch.float64) for s in served]), served


@pytest.mark.parametrize("mode", kills.MODES)
@pytest.mark.parametrize(("servers", "optimizer", "tcp"), [(1, "sgd", True), (2, "adam", False)])
def test_parameters_are_those_of_the_recorded_order(clusters, tmp_path, mode, servers, optimizer, tcp):
    order, mine, served = train(clusters(WORKERS + servers), tmp_path, mode, optimizer, tcp)
    values, taken, stale = kills.replay(order, kills.OPTIMIZERS[optimizer])
    assert torch.equal(mine, values)
    bound = Mode.parse(mode, WORKERS).staleness(WORKERS)
    assert bound is None or max(stale) <= bound
    if mode.startswith("k-of-n"):
        assert all(len(update) == 2 for update in taken)
        dropped = [(row.worker, row.step) for row in order if row.kind is Kind.DROP]
        assert not set(dropped) & {t for update in taken for t in update}
    else:
        done = sorted(t for update in taken for t in update)
        assert done == [(w, s) for w in range(WORKERS) for s in range(8)]
    size = sum(key.nbytes for key in keys())
    pushes = sum(row.kind in (Kind.TAKE, Kind.DROP) for row in order)
    late = WORKERS if mode.startswith("k-of-n") else 0  # gradients that nobody waited for at the end
    assert pushes * size <= sum(one.received for one in served) <= (pushes + late) * size


def test_a_straggler_holds_up_only_those_who_wait_for_it(clusters, tmp_path):
    """Who is ahead of whom when it pulls, by mode, with a worker that sleeps."""
    gaps = {}
    for mode in ("sync", "async", "ssp:0", "ssp:2"):
        order, _, _ = train(clusters(4), tmp_path / mode, mode, slow=0.03)
        clocks, gaps[mode] = dict.fromkeys(range(WORKERS), 0), 0
        for row in order:
            if row.kind is Kind.TAKE:
                clocks[row.worker] = row.step + 1
            elif row.kind is Kind.ANSWER and row.step < 8:
                gaps[mode] = max(gaps[mode], clocks[row.worker] - min(clocks.values()))
    assert gaps["sync"] == gaps["ssp:0"] == 0
    assert gaps["ssp:2"] == 2  # the bound, and it is reached
    assert gaps["async"] > 3


# faults


@pytest.mark.parametrize("number", range(6))
def test_killed_at_any_point_nothing_is_lost(clusters, number):
    """Six of the campaign of `make thorough`: two for each point."""
    case = kills.draw(number, 3)
    assert kills.run(case, clusters(WORKERS + case.servers)), "the victim never came to its end"


@pytest.mark.slow
def test_a_longer_campaign():
    assert sum(kills.campaign(8, 11).values()) == 8


def test_a_gradient_that_waits_for_the_norm_of_its_update_is_kept_though_its_worker_begins_anew():
    taken, part = (SimpleNamespace(worker=1, session=7, step=step) for step in (0, 1))
    let_go, server = [], object.__new__(process.Server)
    server.shard = SimpleNamespace(pushed={(1, 7): taken, (1, 8): part}, let_go=let_go.append)
    server.clipping = process.Clipping(None, [taken], {}, 0.0, {})
    server._forget(1, 9)
    assert let_go == [part]


def hang(folder, settings, marker):
    """Like `take_part`, but worker 1 stops for ever in its second step, the first time."""
    rank = worker.context().rank
    if rank >= WORKERS:
        return process.serve(folder, rank - WORKERS, settings, kills.initial(), report=worker.report)
    ps = pushing.connect(folder, rank)
    if rank == 1 and os.path.exists(marker):
        open(f"{marker} back", "w").close()
    while (step := ps.next_step()) is not None:
        if rank == 1 and step == 1 and not os.path.exists(marker):
            open(marker, "w").close()
            os.kill(os.getpid(), signal.SIGSTOP)
        while rank == 0 and step == 3 and not os.path.exists(f"{marker} back"):
            time.sleep(0.01)  # so that it comes back before all is over
        for k in range(3):
            ps.push(k, kills.gradient(ps.pull(k), step, rank, k))
    return None


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_worker_that_hangs_is_timed_out_and_comes_back(clusters, tmp_path, mode):
    """Others go on after half a second, not after the patience, also in sync; the rank starts again and joins."""
    cluster, heard = clusters(4), []

    def listen(rank, fact):
        if isinstance(fact, Revived):
            return
        heard.append(fact)
        cluster.end_rank(fact[1])

    rendezvous.open_folder(str(tmp_path), keys())
    settings = Settings(WORKERS, 6, kills.OPTIMIZERS["sgd"], Mode.parse(mode, WORKERS))
    found = cluster.run_reviving(1, listen, hang, str(tmp_path), settings, str(tmp_path / "marker"))
    assert heard == [("silent", 1)]
    ((who, step, seconds),) = found[3].silent
    assert (who, step) == (1, 1)
    assert 0.5 <= seconds < 10
    order = [Row(*row) for row in found[3].order]
    assert torch.equal(found[3].values.view(torch.float64), kills.replay(order, kills.OPTIMIZERS["sgd"])[0])
    assert sum(row.kind is Kind.JOIN and row.worker == 1 for row in order) == 2


class Watched:
    """A server of workers 0 and 1 that looks for silent ones when a test says so: at times, and at states of their
    processes (11 and 12), that the test makes up. Its patience is 3 seconds."""

    def __init__(self, folder, monkeypatch):
        rendezvous.open_folder(str(folder), keys())
        settings = Settings(2, 4, kills.OPTIMIZERS["sgd"], patience=3.0)
        self.now, self.states, self.said, self.lines = 0.0, {11: "S", 12: "R"}, [], {}
        monkeypatch.setattr(
            process, "time", SimpleNamespace(monotonic=lambda: self.now, perf_counter=time.perf_counter)
        )
        monkeypatch.setattr(stacks, "cpu_and_state", lambda pid: (0, self.states.get(pid, "")))
        self.server = process.Server(str(folder), 0, settings, kills.initial(), self.said.append, lambda _: None)
        for who in range(2):
            self.connect(who, 11 + who)

    def connect(self, who, pid):
        near, self.lines[who] = socket.socketpair()
        peer = self.server.board.adopt(near)
        peer.digest, peer.process = digest(keys(), 1), pid
        self.server._hello(peer, Message(What.HELLO, worker=who, number=7))

    def members(self, at, state="R"):
        """The workers that still take part after a look at this time, when process 12 was in this state."""
        self.now, self.states[12] = at, state
        self.server._look_for_silent()
        return self.server.rule.members

    def close(self):
        for line in self.lines.values():
            line.close()
        self.server.board.close()


@pytest.fixture
def watched(tmp_path, monkeypatch):
    with closing(Watched(tmp_path, monkeypatch)) as made:
        yield made


def test_a_worker_that_dies_after_a_long_step_has_time_to_come_back(watched):
    assert watched.members(10) == {0, 1}, "it computes"
    watched.now = 10.1
    watched.lines[1].close()
    watched.server.board.wait(5)
    assert list(watched.server.workers) == [0]
    assert watched.members(13, "") == {0, 1}
    assert watched.members(13.2, "") == {0}
    assert watched.said == [], "it has ended, or is starting again"


def test_a_worker_that_was_stopped_is_found_after_half_a_second(watched):
    """However late the server comes to look, and if it is not continued; one over TCP, or that a debugger holds, after
    the patience."""
    assert watched.members(10) == {0, 1}
    assert watched.members(10.2, "T") == {0, 1}
    assert watched.members(10.8) == {0, 1}
    assert watched.members(20, "T") == {0, 1}
    assert watched.members(20.4, "T") == {0, 1}
    assert watched.members(20.6, "T") == {0}
    assert watched.said == [("silent", 1)]
    for pid in (0, 12):
        watched.connect(1, pid)
        assert watched.members(watched.now + 2.9, "t") == {0, 1}
        assert watched.members(watched.now + 0.2, "t") == {0}
    assert watched.said == 3 * [("silent", 1)]


def test_a_server_that_dies_ends_the_run(clusters, tmp_path):
    """Also where its death is not what another rank waits for: the other server has nothing to do with it."""
    settings = Settings(WORKERS, 8, partial(DiesAtThird, lr=0.1))
    rendezvous.open_folder(str(tmp_path), keys(), 2)
    with pytest.raises(RankDied, match="rank 4"):
        clusters(5).run(kills.take_part, str(tmp_path), settings, "", -1, 0, 0.0)


class DiesAtThird(torch.optim.SGD):
    """Ends the process of server 1 in its third update."""

    made = 0

    def step(self, closure=None):
        self.made += 1
        if self.made == 3 and worker.context().rank == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(closure)


def test_a_death_ends_the_run_where_that_is_wanted(clusters, tmp_path):
    settings = Settings(WORKERS, 8, kills.OPTIMIZERS["sgd"], on_death="abort")
    rendezvous.open_folder(str(tmp_path), keys())
    with pytest.raises(RankDied, match="rank 1"):
        clusters(4).run(kills.take_part, str(tmp_path), settings, "compute", 1, 5, 0.0)


# in one process: a server in a thread


@pytest.fixture
def one_server(tmp_path):
    folder = str(tmp_path)
    handle = rendezvous.open_folder(folder, keys())
    settings = Settings(2, 4, kills.OPTIMIZERS["sgd"], Mode("async"))
    result = []
    thread = threading.Thread(target=lambda: result.append(process.serve(folder, 0, settings, kills.initial())))
    thread.start()
    yield folder, handle, result
    for who in range(2):
        if not handle.closed:
            pushing.connect(folder, who).close()
    thread.join(20)
    assert not thread.is_alive()


def steps_of(folder, who, begin=lambda: None):
    ps = pushing.connect(folder, who)
    begin()
    while (step := ps.next_step()) is not None:
        for k in range(3):
            ps.push(k, kills.gradient(ps.pull(k), step, who, k))


def all_at_once(*calls):
    """A worker waits at its end until all are done, so each has a thread of its own."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_bad_pushes_are_refused_where_they_are_made(one_server):
    folder, _, _ = one_server
    ps = pushing.connect(folder, 1)
    ps.next_step()
    for bad, text in [
        (torch.zeros(3, 3, dtype=torch.float64), r"worker 1: push of key 1 as float64 \(3, 3\); .* float64 \(3,\)"),
        (torch.zeros(3), r"worker 1: push of key 1 as float32 \(3,\); the servers have it as float64 \(3,\)"),
    ]:
        with pytest.raises(RankError, match=text):
            ps.push(1, bad)
    with pytest.raises(RankError, match="worker 1: push of key 'w', which is unknown; the servers have 0, 1, 2"):
        ps.push("w", torch.zeros(3))
    with pytest.raises(RankError, match="worker 1: pull of key 9"):
        ps.pull(9)
    ps.push(1, torch.zeros(3, dtype=torch.float64))
    with pytest.raises(RankError, match="worker 1: key 1 was pushed before in step 0"):
        ps.push(1, torch.zeros(3, dtype=torch.float64))
    with pytest.raises(RankError, match="step 0 is not done, key 0 was not pushed"):
        ps.next_step()
    ps.close()
    steps_of(folder, 0)  # the other one is not disturbed


def test_a_closed_server_says_so(one_server):
    folder, _, _ = one_server
    ps = pushing.connect(folder, 1)
    ps.close()
    steps_of(folder, 0)
    with pytest.raises(ServerClosed, match="worker 1: push of key 1"):
        ps.push(1, torch.zeros(3, dtype=torch.float64))
    with pytest.raises(ServerClosed, match="have ended"):
        pushing.connect(folder, 2)


def test_a_worker_may_join_later(one_server):
    """One that nobody expected, by what stands in the folder. Worker 0 is not done before it is there."""
    folder, _, result = one_server
    joined = threading.Event()
    begin = {0: partial(joined.wait, 30), 1: lambda: None, 5: joined.set}
    all_at_once(*(partial(steps_of, folder, who, begin[who]) for who in (0, 5, 1)))
    while not result:
        time.sleep(0.01)
    values, taken, _ = kills.replay(result[0].order, kills.OPTIMIZERS["sgd"])
    assert torch.equal(result[0].values.view(torch.float64), values)
    assert {w for update in taken for w, _ in update} == {0, 1, 5}


def test_strangers_and_nonsense_harm_nobody(one_server):
    folder, handle, _ = one_server
    pushing.connect(folder, 1).close()  # so that the server is there
    with pytest.raises((ConnectionError, RankError)):
        Connection(handle.address(0), b"x" * 32).receive()
    with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as loud:
        silent.connect(handle.address(0).removeprefix("unix:"))
        loud.connect(handle.address(0).removeprefix("unix:"))
        loud.sendall(os.urandom(4096))
        for message, data in [
            (Message(What.PUSH, 0, 0), b"y" * 100),
            (Message(What.HELLO), b"{}"),
            (Message(What.HELLO, worker=0, number=1), bytes(32)),
            (Message(77), b""),
        ]:
            line = Connection(handle.address(0), handle.token)
            line.send(message, data)
            assert line.receive().what == What.REFUSED
            line.close()
        steps_of(folder, 0)


def test_where_there_is_no_server(tmp_path):
    with pytest.raises(RankError, match="no parameter server has its handle there"):
        pushing.connect(str(tmp_path), 0)
    rendezvous.open_folder(str(tmp_path), keys())
    assert os.stat(tmp_path / "handle.json").st_mode & 0o077 == 0, "the token is nobody else's"
    with pytest.raises(RankError, match=r"no server 0 at .* for 0.1 s \(server 0 has not started\)"):
        pushing.connect(str(tmp_path), 0, patience=0.1)
    with closing(socket.socket(socket.AF_UNIX)) as silent:
        silent.bind(f"{tmp_path}/0")
        rendezvous.read_handle(str(tmp_path)).meeting.publish("address 0", f"unix:{tmp_path}/0")
        with pytest.raises(RankError, match=r"no server 0 at .* for 0.1 s \(.*refused"):
            pushing.connect(str(tmp_path), 0, patience=0.1)
    with pytest.raises(RankError, match="servers=0: must be at least 1"):
        rendezvous.open_folder(str(tmp_path), keys(), 0)
    with pytest.raises(RankError, match="servers=99: too many"):
        rendezvous.open_folder(str(tmp_path), keys(), 99)


# the parts of servers


@pytest.mark.parametrize("servers", [1, 2, 3, 5])
def test_every_byte_has_one_server(servers):
    sizes = [8, 4000, 0, 12, 33 * 4, 1]
    parts = cut(sizes, servers)
    for tensor, size in enumerate(sizes):
        runs = [(p.start, p.stop) for pieces in parts for p in pieces if p.tensor == tensor]
        assert [a for a, _ in runs] == ([0, *[b for _, b in runs[:-1]]] if size else [])
        assert not runs or runs[-1][1] == size
    loads = [sum(p.size for p in pieces) for pieces in parts]
    assert max(loads) - min(loads) <= 48, "equal bytes, however large one tensor is"


def test_answers_on_their_way_keep_their_version():
    """An update while parameters are being sent to a slow reader goes to memory of its own."""
    values = kills.initial()
    shard = Shard(keys(), pieces_of(keys(), 1)[0], values, kills.OPTIMIZERS["sgd"])

    class Slow:
        busy = True

    before, kept = shard.flat, shard.flat.clone()
    shard.readers.append(Slow())
    for step in range(2):
        pushed = shard.pushing(0, 1, step, 1, 1)
        for piece in pushed.room.of.values():
            piece.fill_(1.0)
        pushed.missing.clear()
        shard.apply([pushed], shard.combine([pushed]))
        assert torch.equal(before, kept)
    assert not torch.equal(shard.flat, kept)
