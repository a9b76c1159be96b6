"""The parameter server: every mode against a plain torch loop that reads only the recorded order; faults; bad input."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from multiprocessing.connection import answer_challenge, deliver_challenge
from pathlib import Path
from threading import Event

import pytest
import torch

from minipar.cluster import Cluster, threads, worker
from minipar.errors import RankDied, RankError, ServerClosed
from minipar.execution.updating import Form
from minipar.program.server_rule import Kind
from minipar.server import messages, process
from minipar.server.process import Server
from minipar.server.pushing import Servers
from minipar.server.shard import Line, Settings, pieces_of
from minipar.strategies.shares import cut
from tests.comm import kills

WORKERS = kills.WORKERS


def train(cluster, folder, mode, optimizer="momentum", slow=0.002):
    settings = kills.settings_of(folder, cluster.size - WORKERS, mode)
    served = cluster.run(kills.take_part, settings, kills.OPTIMIZERS[optimizer], slow=slow)[WORKERS:]
    return served[0].order, torch.cat([s.values.view(torch.float64) for s in served]), served


@pytest.mark.parametrize("mode", kills.MODES)
@pytest.mark.parametrize(("servers", "optimizer", "hosts"), [(1, "sgd", "a,b,c,d"), (2, "adam", "")])
def test_parameters_are_those_of_the_recorded_order(tmp_path, monkeypatch, mode, servers, optimizer, hosts):
    """Also of ranks that meet as if each had a host of its own."""
    monkeypatch.setenv("MINIPAR_HOST", hosts)
    with Cluster(WORKERS + servers, device="cpu") as cluster:
        order, mine, served = train(cluster, tmp_path, mode, optimizer)
    assert (tmp_path / "0").exists() is (hosts == "")
    values, taken, stale = kills.replay(order, kills.OPTIMIZERS[optimizer])
    assert torch.equal(mine, values)
    bound = kills.settings_of("", 1, mode).mode.staleness(WORKERS)
    assert bound is None or max(stale) <= bound
    if mode.startswith("k-of-n"):
        assert all(len(update) == 2 for update in taken)
        dropped = [(row.worker, row.step) for row in order if row.kind is Kind.DROP]
        assert not set(dropped) & {t for update in taken for t in update}
    else:
        done = sorted(t for update in taken for t in update)
        assert done == [(w, s) for w in range(WORKERS) for s in range(8)]
    size = 8 * sum(map(torch.Tensor.numel, kills.initial()))
    pushes = sum(row.kind in (Kind.TAKE, Kind.DROP) for row in order)
    late = WORKERS if mode.startswith("k-of-n") else 0  # gradients that nobody waited for at the end
    assert pushes * size <= sum(one.received for one in served) <= (pushes + late) * size


def late_server(settings):
    """Like `take_part`; server 1 is late in saying who it is."""

    def late(to, header, parts=()):
        if header.get("what") == "server":
            time.sleep(0.5)
        messages.send(to, header, parts)

    with pytest.MonkeyPatch.context() as patch:
        if worker.context().rank == WORKERS + 1:
            patch.setattr(process, "send", late)
        return kills.take_part(settings, kills.OPTIMIZERS["sgd"])


def test_workers_begin_when_the_servers_know_each_other(clusters, tmp_path):
    """Or server 1 would miss the first rows of the order, and all would wait for ever."""
    served = clusters(WORKERS + 2).run(late_server, kills.settings_of(tmp_path, 2))[WORKERS:]
    mine = torch.cat([one.values.view(torch.float64) for one in served])
    assert torch.equal(mine, kills.replay(served[0].order, kills.OPTIMIZERS["sgd"])[0])


def test_a_worker_that_comes_as_the_servers_end_is_told_so(tmp_path):
    """Its connection ends after both have proved who they are."""
    settings = kills.settings_of(tmp_path, 1)

    def meet_and_end(listener: socket.socket) -> None:
        found = messages.connection_of(listener.accept()[0])
        deliver_challenge(found, settings.secret)
        answer_challenge(found, settings.secret)
        found.close()

    with messages.listen(str(tmp_path), 0) as listener:
        threads.start(partial(meet_and_end, listener), "ends")
        with pytest.raises(ServerClosed, match="worker 0: server 0 has ended"):
            Servers(settings, 0)


def test_a_straggler_holds_up_only_those_who_wait_for_it(clusters, tmp_path):
    """Who is ahead of whom when it pulls, by mode, with a worker that sleeps."""
    gaps = {}
    for mode in ("sync", "async", "ssp:0", "ssp:2"):
        (tmp_path / mode).mkdir()
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


def hang(settings, marker):
    """Like `take_part`, but worker 1 stops for ever in its second step, the first time."""
    rank = worker.context().rank
    if rank >= WORKERS:
        return kills.server_of(settings, rank - WORKERS).run()
    ps = Servers(settings, rank)
    if rank == 1 and os.path.exists(marker):
        open(f"{marker} back", "w").close()
    while (step := ps.next_step()) is not None:
        if rank == 1 and step == 1 and not os.path.exists(marker):
            open(marker, "w").close()
            os.kill(os.getpid(), signal.SIGSTOP)
        while rank == 0 and step == 3 and not os.path.exists(f"{marker} back"):
            time.sleep(0.01)  # so that it comes back before all is over
        for k in range(3):
            ps.push({str(k): kills.gradient(ps.pull(str(k)), step, rank, k)})
    return None


def test_a_worker_that_was_stopped_is_ended_and_comes_back(clusters, tmp_path):
    """Others go on meanwhile; the rank starts again and joins."""
    cluster, heard = clusters(4), []
    settings, begun = kills.settings_of(tmp_path, 1, "async", steps=6), time.monotonic()
    found = cluster.run_reviving(1, lambda *fact: heard.append(fact), hang, settings, str(tmp_path / "marker"))
    assert time.monotonic() - begun < 10
    ((rank, death),) = heard
    assert rank == 1
    assert "rank 1 was stopped (SIGSTOP), so that it was ended" in death.line
    order = found[3].order
    assert torch.equal(found[3].values.view(torch.float64), kills.replay(order, kills.OPTIMIZERS["sgd"])[0])
    assert sum(row.kind is Kind.JOIN and row.worker == 1 for row in order) == 2


def test_a_server_that_dies_ends_the_run(clusters, tmp_path):
    """Also where its death is not what another rank waits for: the other server has nothing to do with it."""
    with pytest.raises(RankDied, match="rank 4"):
        clusters(5).run(kills.take_part, kills.settings_of(tmp_path, 2), partial(DiesAtThird, lr=0.1))


class DiesAtThird(torch.optim.SGD):
    """Ends the process of server 1 in its third update."""

    made = 0

    def step(self, closure=None):
        self.made += 1
        if self.made == 3 and worker.context().rank == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(closure)


def test_a_death_ends_the_run_where_that_is_wanted(clusters, tmp_path):
    settings = kills.settings_of(tmp_path, 1, on_death="abort")
    with pytest.raises(RankDied, match="rank 1"):
        clusters(4).run(kills.take_part, settings, kills.OPTIMIZERS["sgd"], "compute", 1, 5)


# in one process: servers and workers in threads


@contextmanager
def serving(folder: Path, servers: int = 1, workers: int = 2) -> Iterator[tuple[Settings, list[Server]]]:
    """Servers of so many workers that serve meanwhile."""
    settings = kills.settings_of(folder, servers, "async", workers, steps=4)
    made = [kills.server_of(settings, k) for k in range(servers)]
    ended = [threads.start(server.run, "serves") for server in made]
    yield settings, made
    assert all(one.wait(20) for one in ended)


def steps_of(settings: Settings, who: int, begin: Event | None = None) -> Event:
    """Do all steps of a worker in a thread of its own. The event is set when they are done."""

    def go() -> None:
        with closing(Servers(settings, who)) as ps:
            if begin is not None:
                begin.wait(30)
            while (step := ps.next_step()) is not None:
                for k in range(3):
                    ps.push({str(k): kills.gradient(ps.pull(str(k)), step, who, k)})

    return threads.start(go, "works")


def test_bad_pushes_are_refused_where_they_are_made(tmp_path):
    with serving(tmp_path) as (settings, _):
        other = steps_of(settings, 0)
        ps = Servers(settings, 1)
        ps.next_step()
        for bad, text in [
            (
                torch.zeros(3, 3, dtype=torch.float64),
                r"worker 1: push of key '1' as .*float64 \(3, 3\); .*float64 \(3,\)",
            ),
            (torch.zeros(3), r"worker 1: push of key '1' as .*float32 \(3,\); the servers have it as .*float64 \(3,\)"),
        ]:
            with pytest.raises(RankError, match=text):
                ps.push({"1": bad})
        with pytest.raises(
            RankError, match="worker 1: push of key 'w', which is unknown; the servers have '0', '1', '2'"
        ):
            ps.push({"w": torch.zeros(3)})
        with pytest.raises(RankError, match="worker 1: pull of key '9'"):
            ps.pull("9")
        ps.push({"1": torch.zeros(3, dtype=torch.float64)})
        with pytest.raises(RankError, match="worker 1: key '1' was pushed before in step 0"):
            ps.push({"1": torch.zeros(3, dtype=torch.float64)})
        with pytest.raises(RankError, match="step 0 is not done, key '0' was not pushed"):
            ps.next_step()
        ps.close()
        assert other.wait(20), "the other one is not disturbed"
        steps_of(settings, 1)  # (it comes back)
    with pytest.raises(ServerClosed, match="worker 1: push of key '1' at servers that have ended"):
        ps.push({"1": torch.zeros(3, dtype=torch.float64)})
    with pytest.raises(ServerClosed, match="server 0 of .* has ended"):
        Servers(settings, 2)


def test_a_worker_may_join_later(tmp_path):
    """One that nobody expected. Worker 0 is not done before it is there."""
    joined = Event()
    with serving(tmp_path, servers=2) as (settings, made):
        steps_of(settings, 0, joined)
        steps_of(settings, 1)
        later = steps_of(settings, 5)
        while not any(row.worker == 5 for row in made[0].served.order):
            time.sleep(0.01)
        joined.set()
        assert later.wait(20)
    values, taken, _ = kills.replay(made[0].served.order, kills.OPTIMIZERS["sgd"])
    assert torch.equal(torch.cat([one.served.values for one in made]).view(torch.float64), values)
    assert {w for update in taken for w, _ in update} == {0, 1, 5}


def test_strangers_harm_nobody(tmp_path, monkeypatch):
    """Nothing is heard, and nothing unpickled, before the proof."""
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, lambda *_: pytest.fail("unpickled"))
    with serving(tmp_path, workers=1) as (settings, made):
        with pytest.raises(Exception, match="rejected|digest"):
            messages.reach(settings.folder, 0, b"x" * 32)
        with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as loud:
            silent.connect(f"{tmp_path}/0")
            loud.connect(f"{tmp_path}/0")
            loud.sendall(b'\0\0\0\x40{"what": "worker", "number": 1, "session": 3}'.ljust(4096))
            assert steps_of(settings, 0).wait(20)
    assert {row.worker for row in made[0].served.order} <= {0, -1}


def test_a_message_is_read_into_its_place(tmp_path):
    """However it is cut on its way; and what ends in its middle is an error."""
    with messages.listen(str(tmp_path), 0) as listener, closing(socket.socket(socket.AF_UNIX)) as near:
        near.connect(listener.getsockname())
        far = messages.connection_of(listener.accept()[0])
        for size in (0, 1, 3_000_000):
            sent, into = torch.randn(size), torch.zeros(size)
            done = threads.start(
                partial(messages.send, messages.Connection(os.dup(near.fileno())), {"a": 1}, [sent]), ""
            )
            assert messages.receive(far) == {"a": 1}
            messages.read(far, into)
            assert torch.equal(sent, into)
            assert done.wait(20)
        near.sendall(b"x" * 100)
        near.shutdown(socket.SHUT_RDWR)
        with pytest.raises(EOFError):
            messages.read(far, torch.zeros(1000))
        far.close()


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


def test_every_type_is_where_it_can_be_read():
    """Parameters of several types beside each other, however they are cut."""
    types = (torch.float64, torch.bfloat16, torch.float32, torch.complex128, torch.float16)
    keys = [Form(str(k), (3 + 7 * k,), types[k % 5]) for k in range(12)]
    whole = Line(keys, pieces_of(keys, 1)[0])
    for value in whole.values(keys):
        value.fill_(1)
    for servers in (2, 3, 5):
        for pieces in pieces_of(keys, servers):
            part = Line(keys, pieces)
            part.bytes.copy_(whole.part(pieces))
            assert all(bool((one == 1).all()) for one in part.of.values())
