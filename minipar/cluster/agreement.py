"""What processes that torchrun started agree on before anything else: where they are, and on what all of them compute.

    rank 0 (host a)    claim: host a, wants auto, sees GPU x   ..+                     +..> cuda:0, nccl
    rank 1 (host a)    claim: host a, wants auto, sees GPU y   ..+... torch's Store ...+..> cuda:1, nccl
    rank 2 (host b)    claim: host b, wants auto, sees none    ..+                     +..> or one error on all ranks

Every rank writes its claim to the Store, and all decide by the same claims. So no host can decide by itself, and what
does not fit is one error, which names the ranks that differ.

MINIPAR_HOST     the name of this process's host: ranks of one name share memory. With commas the names of ranks 0, 1,
                 ...: "a,a,b,b" keeps ranks of one machine apart, as if they were on two. Default: this system since it
                 was started, and the namespaces that decide what its processes can share
MINIPAR_DEVICE   "cpu", "cuda", or "auto" (the default: a GPU for every rank if each can have its own, else the CPU)
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import secrets
import socket
import struct
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING

from minipar.cluster.output import name_ranks
from minipar.errors import PlanError, RankError
from minipar.wording import several

if TYPE_CHECKING:
    import torch.distributed as dist

# It is long, since ranks may start minutes apart; torchrun ends all of them when one does not start.
TIMEOUT = timedelta(minutes=30)
LOOPBACK = "127.0.0.1"
DEVICES = ("auto", "cpu", "cuda")
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NAMESPACES = ("mnt", "net", "pid")  # of files (sockets), of the network, of processes (memory files)
_ASK_FOR_ADDRESS = 0x8915  # Linux: SIOCGIFADDR


@dataclass(frozen=True)
class Agreement:
    """What one process knows when all have agreed.

    store      torch's Store, in which all of them can write
    device     "cpu" or "cuda:1", of this rank; backend: "gloo" or "nccl", of all
    hosts      by rank: a name that is the same for ranks of one host, which can share memory
    addresses  by rank: where other hosts reach its host; the loopback's, if there is only one machine
    token      a secret that only these processes know
    """

    store: dist.Store
    rank: int
    size: int
    device: str
    backend: str
    hosts: tuple[str, ...]
    addresses: tuple[str, ...]
    token: str


@dataclass(frozen=True)
class Claim:
    """What one process says of itself. `gpus` are the names of those that it sees, in its own order. Processes of one
    `network` share its loopback."""

    host: str
    machine: str
    network: str
    wants: str
    gpus: tuple[str, ...]
    nccl: bool
    address: str


_agreed: Agreement | None = None


def missing() -> list[str]:
    """The variables that torchrun would have set, and that are not; [] where it started this process."""
    return [name for name in _NEEDED if name not in os.environ]


def agree(device: str | None = None) -> Agreement:
    """What this process and all others of its torchrun agree on; the first call waits for all of them.

    device   what this process asks for; None: MINIPAR_DEVICE

    Raises RankError where torchrun's variables are missing; PlanError, on all ranks, where ranks differ, or where there
    is no GPU for who asks for one.
    """
    global _agreed
    if _agreed is None:
        if lacking := missing():
            raise RankError(f"torchrun did not start this process: {', '.join(lacking)} not set")
        import torch.distributed as dist

        store, rank, size = next(dist.rendezvous("env://", timeout=TIMEOUT))
        master = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        _agreed = meet(dist.PrefixStore("minipar", store), rank, size, device, master)
    return _agreed


def meet(
    store: dist.Store, rank: int, size: int, device: str | None = None, towards: tuple[str, int] | None = None
) -> Agreement:
    """Agree with the other processes that have this store. `towards`: an address by which this host's own is found."""
    store = _of_this_round(store, rank, size)
    wants = device or os.environ.get("MINIPAR_DEVICE") or "auto"
    mine = Claim(identity(rank), machine(), network(), wants, visible(), _has_nccl(), reachable(towards))
    claims, token = _exchange(store, "claim", rank, size, mine, secrets.token_hex(32))
    if len({claim.network for claim in claims}) > 1 and any(map(_loops, claims)):
        other = next((c.address for c in claims if c.network != mine.network and not _loops(c)), "")
        if _loops(mine) and other:  # (this host's own name leads to its loopback, as on many Linux systems)
            mine = replace(mine, address=reachable((other, 1)))
        claims, token = _exchange(store, "second claim", rank, size, mine, token)
        _check_addresses(claims)
    devices, backend = decide(claims)
    if rank == 0:
        _warn(claims, devices)
    hosts, addresses = tuple(claim.host for claim in claims), tuple(claim.address for claim in claims)
    return Agreement(store, rank, size, devices[rank], backend, hosts, addresses, token)


def _of_this_round(store: dist.Store, rank: int, size: int) -> dist.Store:
    """A part of the store that only these processes know. torchrun keeps its store when it starts all processes again,
    with what those before have written.

    Rank 0 names the part, and gives back what each rank has written there. So a rank that has read the name of an
    earlier part notices it, and reads the name again.
    """
    import torch.distributed as dist

    if rank == 0:
        name = secrets.token_hex(8)
        store.set("round", name)
        part = dist.PrefixStore(name, store)
        for k in range(1, size):
            part.set(f"welcome {k}", part.get(f"hello {k}").decode())
        return part
    mine, nap = secrets.token_hex(8), 0.01
    while True:
        part = dist.PrefixStore(store.get("round").decode(), store)
        part.set(f"hello {rank}", mine)
        time.sleep(nap)
        if part.check([f"welcome {rank}"]) and part.get(f"welcome {rank}").decode() == mine:
            return part
        nap = min(2 * nap, 0.2)


def _exchange(
    store: dist.Store, key: str, rank: int, size: int, mine: Claim, token: str
) -> tuple[tuple[Claim, ...], str]:
    """The claims of all ranks, and the token of rank 0. Rank 0 collects them, so that each rank reads one value."""
    store.set(f"{key} {rank}", json.dumps(asdict(mine)))
    if rank == 0:
        found = [json.loads(store.get(f"{key} {k}").decode()) for k in range(size)]
        store.set(f"{key}s", json.dumps([found, token]))
    found, token = json.loads(store.get(f"{key}s").decode())
    return tuple(Claim(**{**one, "gpus": tuple(one["gpus"])}) for one in found), token


# devices --------------------------------------------------------------------------------------------------------------


def decide(claims: Sequence[Claim]) -> tuple[tuple[str, ...], str]:
    """The device of every rank, and the backend of all. PlanError where ranks differ, or have no GPU and ask for it."""
    wants = claims[0].wants
    _check_same("ranks ask for different devices", [repr(claim.wants) for claim in claims], "Ask for one on all.")
    if wants not in DEVICES:
        raise PlanError(f"device={wants!r}: must be one of {', '.join(map(repr, DEVICES))}")
    cpu = ("cpu",) * len(claims), "gloo"
    own = _own_gpus(claims)
    if wants == "cpu" or (wants == "auto" and not any(_all_have_one(claims, own).values())):
        return cpu
    way_out = "Give every rank a GPU of its own, or ask for device='cpu' (MINIPAR_DEVICE=cpu)."
    if wants == "auto":
        have = ["one" if gpu is not None else "none" for gpu in own]
        _check_same("device='auto': ranks differ in whether they have a GPU of their own", have, way_out)
    lacking = [rank for rank, claim in enumerate(claims) if not claim.gpus]
    if lacking:
        raise PlanError(
            f"device='cuda': {name_ranks(lacking)} of {len(claims)}: no GPU that torch can use is there", way_out
        )
    # NCCL refuses two ranks on one GPU; gloo then carries the data through host memory.
    each = None not in own
    nccl = each and all(claim.nccl for claim in claims)
    shared = [k % len(claim.gpus) for k, claim in zip(_places(claims), claims, strict=True)]
    used = [index if gpu is None or not each else gpu for index, gpu in zip(shared, own, strict=True)]
    return tuple(f"cuda:{index}" for index in used), "nccl" if nccl else "gloo"


def _own_gpus(claims: Sequence[Claim]) -> list[int | None]:
    """For each rank the index, in its own order, of a GPU that no other rank has; None if none is left for it.

    Each process may see all GPUs of its host, or only its own one, under the index 0 in all of them.
    """
    taken: set[tuple[str, str]] = set()
    found: list[int | None] = []
    for claim, place in zip(claims, _places(claims), strict=True):
        free = [index for index, gpu in enumerate(claim.gpus) if (claim.machine, gpu) not in taken]
        index = place if place in free else next(iter(free), None)
        if index is not None:
            taken.add((claim.machine, claim.gpus[index]))
        found.append(index)
    return found


def _places(claims: Sequence[Claim]) -> list[int]:
    """The place of each rank among those of its machine."""
    return [[one.machine for one in claims[:rank]].count(claim.machine) for rank, claim in enumerate(claims)]


def _all_have_one(claims: Sequence[Claim], own: Sequence[int | None]) -> dict[str, bool]:
    """For each machine, whether all of its ranks have a GPU of their own."""
    found: dict[str, bool] = {}
    for claim, gpu in zip(claims, own, strict=True):
        found[claim.machine] = found.get(claim.machine, True) and gpu is not None
    return found


def _check_same(what: str, answers: Sequence[str], way_out: str) -> None:
    """PlanError if ranks have said different things, with the ranks that said each."""
    groups: dict[str, list[int]] = {}
    for rank, one in enumerate(answers):
        groups.setdefault(one, []).append(rank)
    if len(groups) > 1:
        shown = ", ".join(f"{one} ({name_ranks(ranks)})" for one, ranks in groups.items())
        raise PlanError(f"{what}: {shown}", way_out)


def _warn(claims: Sequence[Claim], devices: Sequence[str]) -> None:
    """Say what all agreed on and nobody may expect."""
    if claims[0].wants == "auto" and devices[0] == "cpu" and any(claim.gpus for claim in claims):
        count = len({(claim.machine, gpu) for claim in claims for gpu in claim.gpus})
        warnings.warn(
            f"{several(len(claims), 'rank')} compute on the CPU: there are {several(count, 'GPU')}, fewer than ranks "
            "on each host. With device='cuda' (MINIPAR_DEVICE=cuda) ranks share them",
            stacklevel=4,
        )


def visible() -> tuple[str, ...]:
    """The names of the GPUs that this process sees: two processes see the same one if and only if its names are."""
    import torch

    names = []
    for index in range(torch.cuda.device_count()):
        known = torch.cuda.get_device_properties(index)
        names.append(str(getattr(known, "uuid", f"{os.environ.get('CUDA_VISIBLE_DEVICES', '')} {index}")))
    return tuple(names)


def _has_nccl() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_nccl_available()


# places ---------------------------------------------------------------------------------------------------------------


def identity(rank: int) -> str:
    """The name of the host of this process, which is `rank`: see MINIPAR_HOST above."""
    given = os.environ.get("MINIPAR_HOST", "")
    if "," not in given:
        return given or " ".join([machine(), *map(_namespace, _NAMESPACES)])
    return hosts_of(rank + 1)[rank]


def hosts_of(size: int) -> tuple[str, ...]:
    """The names of the hosts of a Cluster's ranks: those in MINIPAR_HOST, if it keeps them apart, else one for all."""
    given = os.environ.get("MINIPAR_HOST", "")
    if "," not in given:
        return ("",) * size
    names = [name.strip() for name in given.split(",")]
    if size > len(names) or not all(names):
        raise PlanError(
            f"MINIPAR_HOST={given!r}: rank {size - 1} has no name there; give one name, or one for each rank"
        )
    return tuple(names[:size])


def machine() -> str:
    """A name of this system since it was started."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return socket.gethostname()


def network() -> str:
    """A name of the network that this process sees: of its machine, or of a part of it that is cut off."""
    return f"{machine()} {_namespace('net')}"


def _namespace(kind: str) -> str:
    """The number of this process's namespace of a kind; "" where the system has none."""
    with contextlib.suppress(OSError):
        return str(os.stat(f"/proc/self/ns/{kind}").st_ino)
    return ""


def reachable(towards: tuple[str, int] | None = None) -> str:
    """An IP address of this host at which others reach it: that of the interface GLOO_SOCKET_IFNAME; else that from
    which a message to `towards` would go (nothing is sent); else the loopback's."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if interface and (found := _address_of(interface)):
        return found
    if towards is None:
        return LOOPBACK
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, place in socket.getaddrinfo(*towards, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind, protocol) as probe, contextlib.suppress(OSError):
                probe.connect(place)
                return str(probe.getsockname()[0])
    return LOOPBACK


def _address_of(interface: str) -> str:
    """The IPv4 address of an interface; "" if it has none, or the system does not say it."""
    if sys.platform != "linux":
        return ""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        asked = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _ASK_FOR_ADDRESS, asked)[20:24])
    return ""


def _loops(claim: Claim) -> bool:
    return ipaddress.ip_address(claim.address.partition("%")[0]).is_loopback


def _check_addresses(claims: Sequence[Claim]) -> None:
    lost = [rank for rank, claim in enumerate(claims) if _loops(claim)]
    if lost:
        raise RankError(
            f"{name_ranks(lost)} of {len(claims)}: the address of their host is a loopback's, where other hosts do not "
            "reach it; set GLOO_SOCKET_IFNAME to the name of a network interface, such as eth0"
        )
