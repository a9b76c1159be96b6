"""`Cluster.attach(client)`: the engines of ipyparallel are the ranks.

    import ipyparallel
    engines = ipyparallel.Cluster(engines="slurm", n=8)        # or ssh, mpi, pbs, local
    ranks = Cluster.attach(engines.start_and_connect_sync())   # as a Cluster: ranks.run(...), train(..., cluster=ranks)

ipyparallel starts the engines, and carries one call to each: `attend`, in which an engine connects to this driver by
TCP, finds the others at a store of its own, and is a rank until the driver closes (far.py). What the ranks print
appears here. Meanwhile an engine does nothing else.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from typing import Any, NamedTuple

from minipar.cluster import agreement, light_torch, worker
from minipar.cluster.far import Driver, FarRank, accept, connect
from minipar.cluster.ranks import Call, Ranks
from minipar.errors import PlanError, RankDied, RankError

_PATIENCE = 60.0  # seconds in which an engine must connect
_OUTSIDE = "192.0.2.1", 1  # an address of no host: the way to it begins at this host's own address


class Place(NamedTuple):
    """Where an engine is: the network that it sees, its address there, and a port of it that is free."""

    network: str
    address: str
    port: int


class Attached(Ranks):
    """Engines of ipyparallel as ranks, in the order of `client.ids`; `Cluster.attach` makes it.

    Ranks keep their state between runs, also when one fails. An engine that ends is not replaced: the next run raises
    RankDied. Ranks emulate no device, and nobody looks for deadlocks. Use it in a `with` block, or `close()` it: then
    the engines are ipyparallel's again.
    """

    def __init__(self, client: Any, threads: int = 1) -> None:
        ids = list(client.ids)
        if not ids:
            raise RankError("Cluster.attach: no engine has registered; start some, and wait_for_engines(n)")
        places = [Place(*one) for one in client[ids].apply_sync(_place)]
        here = _place()
        local = {place.network for place in places} == {here.network}
        self.size, self.threads = len(ids), threads
        self.size_hint = f"{self.size} engines are attached"
        token = secrets.token_hex(32)
        with socket.create_server(("127.0.0.1" if local else "", 0), backlog=len(ids)) as listener:
            address = agreement.LOOPBACK if local else here.address
            first = agreement.LOOPBACK if local else places[0].address
            variables = {"MASTER_ADDR": first, "MASTER_PORT": str(places[0].port), "WORLD_SIZE": str(len(ids))}
            driver = address, int(listener.getsockname()[1])
            self._calls = [
                client[one].apply_async(attend, driver, token, {**variables, **_numbers(rank, places)}, threads)
                for rank, one in enumerate(ids)
            ]
            try:
                controls = accept(listener, bytes.fromhex(token), range(len(ids)), _PATIENCE)
            except RankDied:
                for call in self._calls:
                    if call.ready():
                        call.get()  # (raises what went wrong in the engine)
                raise
        self._driver = Driver(controls, len(ids), "start another engine, and attach again", time.time_ns(), echo=True)
        self._closed = False
        devices = self.run(_device)
        self.device = devices[0][0].partition(":")[0]
        self.carrier = "nccl" if devices[0][1] == "nccl" else "local"

    @property
    def state(self) -> str:
        """One of "ready", "closed", or how many ranks are left."""
        if self._closed:
            return "closed"
        alive = sum(peer.alive for peer in self._driver.ranks.values())
        return "ready" if alive == self.size else f"{alive} of {self.size} engines left; attach again"

    def __repr__(self) -> str:
        return f"Attached({self.size} engines, {self.device}, {self.state})"

    def end_rank(self, rank: int) -> None:
        """RankError: only ipyparallel ends its engines."""
        raise RankError(f"rank {rank} hangs, and only ipyparallel can end its engine")

    def perform(self, call: Call) -> list[Any]:
        if call.revivals:
            raise PlanError("on_death=continue: no engine is started again; possible is on_death=abort")
        if self._closed:
            raise RankError("these ranks are closed; attach again")
        return self._driver.perform(call)

    def close(self) -> None:
        """Give the engines back. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._driver.tell(("end",))
            self._driver.close()

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _numbers(rank: int, places: list[Place]) -> dict[str, str]:
    """The variables by which torchrun would tell a process its numbers."""
    same = [k for k, place in enumerate(places) if place.network == places[rank].network]
    return {"RANK": str(rank), "LOCAL_RANK": str(same.index(rank)), "LOCAL_WORLD_SIZE": str(len(same))}


# In an engine


def _place() -> Place:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = int(probe.getsockname()[1])
    return Place(agreement.network(), agreement.reachable(_OUTSIDE), port)


def _device() -> tuple[str, str]:
    context = worker.context()
    return context.device, context.backend


def attend(driver: tuple[str, int], token: str, variables: dict[str, str], threads: int) -> None:
    """Be a rank of the driver at this address until it closes."""
    import torch

    rank, size = int(variables["RANK"]), int(variables["WORLD_SIZE"])
    control = connect(driver, bytes.fromhex(token), rank, _PATIENCE)
    before = dict(os.environ)
    os.environ.update(variables)
    torch.set_num_threads(threads)
    light_torch.postpone_compiler()
    try:
        agreement.forget()
        agreed = agreement.agree()
        far = FarRank(control, rank, size, agreed.device, agreed.backend, echo=True)
        far.serve()
    except RankDied:
        pass  # the driver has ended
    finally:
        os.environ.clear()
        os.environ.update(before)
        control.close()
