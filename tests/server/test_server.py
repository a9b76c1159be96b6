"""The parameter server: every mode against a plain torch loop that reads only the recorded order; faults; bad input."""

from __future__ import annotations

import ctypes
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
from minipar.program.server_rule import Kind, Mode, Row, Rules
from minipar.server import process, pushing, rendezvous, snapshot
from minipar.server.connection import Connection
from minipar.server.framing import HEADER, Message, What
from minipar.server.process import Settings
from minipar.server.rendezvous import Introduction
from minipar.server.shard import Shard, key_of, pieces_of
from minipar.server.switchboard import Switchboard
from minipar.strategies.shares import cut
from tests.comm import kills

WORKERS = kills.WORKERS


def keys():
    return [key_of(k, v) for k, v in enumerate(kills.initial())]


def train(cluster, folder, mode, optimizer="momentum", tcp=False, steps=8, slow=0.002, **more):
    servers = cluster.size - WORKERS
    rendezvous.open_folder(str(folder), keys(), servers, tcp)
    settings = Settings(WORKERS, steps, kills.OPTIMIZERS[optimizer], Mode.parse(mode, WORKERS), **more)
    found = cluster.run(kills.take_part, str(folder), settings, "", -1, 0, slow, True)
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


@pytest.mark.parametrize("number", range(10))
def test_killed_at_any_point_nothing_is_lost(clusters, number):
    """Ten of the campaign of `make thorough`: two for each point."""
    case = kills.draw(number, 3)
    assert kills.run(case, clusters(WORKERS + case.servers)), "the victim never came to its end"


@pytest.mark.slow
def test_a_longer_campaign():
    assert sum(kills.campaign(8, 11).values()) == 8


def test_a_gradient_that_waits_for_the_norm_of_its_update_is_kept_though_its_worker_begins_anew():
    taken, part = (SimpleNamespace(worker=1, life=7, step=step) for step in (0, 1))
    let_go, server = [], object.__new__(process.Server)
    server.shard = SimpleNamespace(pushed={(1, 7): taken, (1, 8): part}, let_go=let_go.append)
    server.arrivals = SimpleNamespace(forget=lambda worker, life: None)
    server.gathering = None
    server.clipping = process.Clipping(None, [taken], {}, 0.0, {})
    server._forget(1, 9)
    assert let_go == [part]


def test_what_a_scheduler_said_is_kept_until_the_last_stage_has_used_it():
    server, forgotten = object.__new__(process.Server), []
    server.settings, server.rule = SimpleNamespace(rules=2), Rules(Mode("async"), workers=2, steps=3, rules=2)
    server.shard = SimpleNamespace(apply=lambda taken, gradients, number: None, forget=forgotten.append)
    server.reach = server.updated = lambda _: None
    server._save_if_due = lambda: None
    server._note = lambda start, end, row: None
    for stage, step in ((0, 0), (0, 1), (1, 0), (0, 2), (1, 1)):
        server.rule.push(stage, step)
        _, row = server.rule.decide()
        server._apply(row, [], {}, 0.0)
    assert forgotten == [0, 0, 1, 1, 2]  # stage 0 makes update 2 while stage 1 still needs the settings of update 1


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


def slowly(folder, settings):
    """Like `take_part`, but worker 1 computes for long in its second step, without letting another thread run."""
    rank = worker.context().rank
    if rank >= WORKERS:
        return process.serve(folder, rank - WORKERS, settings, kills.initial(), report=worker.report)
    ps = pushing.connect(folder, rank)
    while (step := ps.next_step()) is not None:
        if rank == 1 and step == 1:
            ctypes.PyDLL(None).usleep(1_500_000)  # (which keeps the interpreter's lock)
        for k in range(3):
            ps.push(k, kills.gradient(ps.pull(k), step, rank, k))
    return None


@pytest.mark.parametrize("on_death", ["abort", "continue"])
def test_a_worker_that_computes_for_long_is_waited_for(clusters, tmp_path, on_death):
    """Three times as long as a worker that hangs would be waited for."""
    rendezvous.open_folder(str(tmp_path), keys())
    settings = Settings(WORKERS, 3, kills.OPTIMIZERS["sgd"], patience=0.5, on_death=on_death)
    heard = []
    found = clusters(4).run_reviving(0, lambda rank, fact: heard.append(fact), slowly, str(tmp_path), settings)
    assert heard == []
    assert found[3].silent == []
    assert [row[1:3] for row in found[3].order if row[0] == Kind.TAKE] == [(w, s) for s in range(3) for w in range(3)]


class Watched:
    """A server of workers 0 and 1 that looks for silent ones when a test says so: at times, and at states of their
    processes (11 and 12), that the test makes up. Its patience is 3 seconds."""

    def __init__(self, folder, monkeypatch):
        rendezvous.open_folder(str(folder), keys())
        settings = Settings(2, 4, kills.OPTIMIZERS["sgd"], patience=3.0)
        self.now, self.states, self.told, self.lines = 0.0, {11: "S", 12: "R"}, [], {}
        monkeypatch.setattr(
            process, "time", SimpleNamespace(monotonic=lambda: self.now, perf_counter=time.perf_counter)
        )
        monkeypatch.setattr(stacks, "cpu_and_state", lambda pid: (0, self.states.get(pid, "")))
        nothing = [lambda _: None] * 3
        self.server = process.Server(str(folder), 0, settings, kills.initial(), *nothing)
        self.server.report = self.told.append
        self.server._meet()
        for who in range(2):
            self.connect(who, 11 + who)

    def connect(self, who, pid):
        near, self.lines[who] = socket.socketpair()
        peer = self.server.board.adopt(near)
        peer.text = Introduction(self.server.digest, who, life=7).text()
        peer.process = pid
        self.server._hello(peer, Message(What.HELLO))

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
    assert watched.told == [], "it has ended, or is starting again"


def test_a_worker_that_computes_while_servers_go_back_is_waited_for(watched):
    """It notices only when it pushes. One that dies meanwhile is not waited for."""
    for _ in range(2):
        watched.server._meet()
        assert not watched.server.workers
        watched.now += 10
        assert watched.members(watched.now) == {0, 1}
    watched.connect(0, 11)
    assert watched.members(22.9, "") == {0, 1}
    assert watched.members(23.1, "") == {0}


def test_a_worker_that_was_stopped_while_servers_went_back_is_told(watched):
    watched.server._meet()
    assert watched.members(10, "T") == {0, 1}
    assert watched.members(10.6, "T") == {0}
    assert watched.told[-1] == ("silent", 1)


@pytest.mark.parametrize("state", ["T", "t"])
def test_a_worker_that_is_held_for_a_moment_in_a_long_step_is_waited_for(watched, state):
    assert watched.members(10) == {0, 1}
    assert watched.members(10.2, state) == {0, 1}
    assert watched.members(10.8) == {0, 1}
    assert watched.told == []


def test_a_worker_that_was_stopped_is_found_after_half_a_second(watched):
    """However late the server comes to look; one over TCP, or that a debugger holds, after the patience."""
    assert watched.members(10) == {0, 1}
    assert watched.members(20, "T") == {0, 1}
    assert watched.members(20.4, "T") == {0, 1}
    assert watched.members(20.6, "T") == {0}
    assert watched.told == [("silent", 1)]
    for pid in (0, 12):
        watched.connect(1, pid)
        assert watched.members(watched.now + 2.9, "t") == {0, 1}
        assert watched.members(watched.now + 0.2, "t") == {0}
    assert watched.told == 3 * [("silent", 1)]


def test_a_death_ends_the_run_where_that_is_wanted(clusters, tmp_path):
    settings = Settings(WORKERS, 8, kills.OPTIMIZERS["sgd"], on_death="abort")
    rendezvous.open_folder(str(tmp_path), keys())
    with pytest.raises(RankDied, match="rank 1"):
        clusters(4).run(kills.take_part, str(tmp_path), settings, "compute", 1, 5, 0.0, False)


def test_deaths_beyond_the_agreed_number_are_raised(clusters):
    with pytest.raises(RankDied, match="rank 0"):
        clusters(4).run_reviving(2, lambda rank, fact: None, die_always)
    assert clusters(4).run(rank_of) == [0, 1, 2, 3]


def die_always():
    if worker.context().rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def rank_of():
    return worker.context().rank


def test_a_snapshot_is_whole_or_not_there(tmp_path):
    folder, values = str(tmp_path), {"x": torch.arange(5)}

    def stop(point):
        raise KeyboardInterrupt

    for number in (1, 2, 3):
        snapshot.write(folder, 0, number, values, {"n": number})
    assert snapshot.numbers(folder, 0) == [2, 3]
    with pytest.raises(KeyboardInterrupt):
        snapshot.write(folder, 0, 4, values, {}, stop)
    assert snapshot.numbers(folder, 0) == [2, 3]
    (tmp_path / "snapshot-5.0").write_bytes((tmp_path / "snapshot-3.0").read_bytes()[:-8])
    assert snapshot.numbers(folder, 0) == [2, 3], "a damaged file is none"
    tensors, facts = snapshot.read(folder, 0, 3)
    assert torch.equal(tensors["x"], values["x"])
    assert facts == {"n": 3}
    assert snapshot.numbers(folder, 1) == []


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
    with pytest.raises(ServerClosed, match="worker 2"):
        pushing.connect(folder, 2)


def test_what_is_sent_twice_counts_once(one_server):
    """A connection that breaks before the acknowledgement: the same gradient is sent again, to the same servers."""
    folder, _, result = one_server

    def stutter(who):
        ps = pushing.connect(folder, who)
        while (step := ps.next_step()) is not None:
            for k in range(3):
                ps.push(k, kills.gradient(ps.pull(k), step, who, k))
                if (step + k) % 2:
                    ps.connections[0].socket.shutdown(socket.SHUT_RDWR)
            if step == 2 and ps.connections:
                ps._resend()

    all_at_once(lambda: stutter(0), lambda: stutter(1))
    while not result:
        time.sleep(0.01)
    values, taken, _ = kills.replay(result[0].order, kills.OPTIMIZERS["sgd"])
    assert torch.equal(result[0].values.view(torch.float64), values)
    assert sorted(t for update in taken for t in update) == [(w, s) for w in range(2) for s in range(4)]


def lose(ps):
    ps.connections[0].socket.shutdown(socket.SHUT_RDWR)


def loses_again(ps, times):
    """A worker whose next connections are lost, too, while it sends everything again."""
    resend, left = ps._resend, iter(range(times))

    def again():
        if next(left, None) is not None:
            lose(ps)
        resend()

    ps._resend = again


@pytest.mark.parametrize("where", ["push", "acknowledge", "pull"])
def test_a_connection_that_is_lost_again_while_everything_is_sent_again(one_server, where):
    folder, _, _ = one_server
    ps, until = pushing.connect(folder, 1), time.monotonic() + 10

    def look():  # (which it does from time to time while it waits)
        if time.monotonic() > until:
            pytest.fail("it waits for ever")

    ps._look, send = look, ps._send
    assert ps.next_step() == 0
    loses_again(ps, 2)
    if where != "push":
        ps._send = lambda k, server: None  # (it is lost on its way)
    for k in range(3):
        if where == "push" and k == 2:
            lose(ps)
        ps.push(k, kills.gradient(ps.pull(k), 0, 1, k))
    if where != "push":
        ps._send = send
        lose(ps)
    if where == "acknowledge":
        ps.acknowledge()
    assert (ps.next_step(), ps.version) == (1, 1), "one update, in the end"


def test_a_worker_whose_connection_is_always_lost_says_so(one_server):
    folder, _, _ = one_server
    ps = pushing.connect(folder, 1, patience=0.5)
    ps.next_step()
    loses_again(ps, 1_000_000)
    lose(ps)
    with pytest.raises(RankError, match=r"worker 1: its connection is lost again and again for 0\.5 s \("):
        ps.push(0, kills.gradient(ps.pull(0), 0, 1, 0))


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
        Connection(handle.address(0), b"x" * 32, 2.0).receive()
    with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as loud:
        silent.connect(handle.address(0).removeprefix("unix:"))
        loud.connect(handle.address(0).removeprefix("unix:"))
        loud.sendall(os.urandom(4096))
        for message, data in [
            (Message(What.PUSH, 0, 0), b"y" * 100),
            (Message(What.HELLO), b"{}"),
            (Message(What.HELLO), b'{"keys": "other", "worker": 0, "life": 1, "server": -1, "snapshots": []}'),
            (Message(77), b""),
        ]:
            line = Connection(handle.address(0), handle.token, 2.0)
            line.send(message, data)
            assert line.receive().what == What.REFUSED
            line.close()
        steps_of(folder, 0)


def test_where_there_is_no_server(tmp_path):
    with pytest.raises(RankError, match="no parameter server has its handle there"):
        pushing.connect(str(tmp_path), 0)
    rendezvous.open_folder(str(tmp_path), keys())
    assert os.stat(tmp_path / "handle.json").st_mode & 0o077 == 0, "the token is nobody else's"
    with pytest.raises(RankError, match=r"worker 0: no server at .* for 0.1 s \(server 0 has not started\)"):
        pushing.connect(str(tmp_path), 0, patience=0.1)
    with closing(socket.socket(socket.AF_UNIX)) as silent:
        silent.bind(f"{tmp_path}/0")
        rendezvous.read_handle(str(tmp_path)).meeting.publish("address 0", f"unix:{tmp_path}/0")
        with pytest.raises(RankError, match=r"\(server 0 has ended: nobody listens at unix:"):
            pushing.connect(str(tmp_path), 0, patience=0.1)
        silent.listen()
        with pytest.raises(RankError, match=r"\(server 0 does not answer\)"):
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
        pushed.room.flat.view(torch.float64).fill_(1.0)
        pushed.missing.clear()
        shard.apply([pushed], shard.combine([pushed]))
        assert torch.equal(before, kept)
    assert not torch.equal(shard.flat, kept)


def test_many_small_messages_at_once_are_all_heard():
    """More than a connection's turn is long, taken in by one read: nothing more comes that would wake the server."""
    near, far = socket.socketpair()
    heard: list[Message] = []
    memory = memoryview(bytearray(8))
    with closing(socket.socket(socket.AF_UNIX)) as listener, closing(far):
        listener.bind("")
        listener.listen()
        board = Switchboard(
            listener, b"", lambda peer, message: memory[: message.size], lambda _, m: heard.append(m), lambda _: None
        )
        board.adopt(near)
        header = HEADER
        far.sendall(b"".join(header.pack(What.PUSH, k, 0, 0, 0, 0, 8, 0, 0) + bytes(8) for k in range(200)))
        for _ in range(20):
            board.wait(0.05)
        board.close()
    assert [message.key for message in heard] == list(range(200))
