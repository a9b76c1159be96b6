"""Process groups made directly, without torch's global default group: several clusters, generations and users' own
`init_process_group` can live side by side."""

from __future__ import annotations

import math
import os
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from minipar.errors import RankError
from minipar.program.mesh import Mesh
from minipar.wording import several

# Long, since gloo also uses it for connecting, and the driver sees the death of a rank by itself.
TIMEOUT = timedelta(minutes=30)


def gloo_device(loopback: bool) -> Any:
    """gloo's network device; one serves all groups of a rank (each has a thread of its own)."""
    if loopback:
        return dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
    name = os.environ.get("GLOO_SOCKET_IFNAME")
    if name:
        return dist.ProcessGroupGloo.create_device(interface=name)
    return dist.ProcessGroupGloo.create_default_device()


def gloo_group(store: dist.Store, rank: int, size: int, device: Any) -> Any:
    """A gloo group; returns when all its `size` members have called."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [device]
    options._timeout = TIMEOUT
    return dist.ProcessGroupGloo(store, rank, size, options)


class GlooMessages:
    """Point-to-point messages through gloo, for ranks that are not all on one machine."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        """Start sending; complete when the peer has received."""
        return self.group.send([tensor], peer, tag)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        """Start receiving into a tensor of the sent size and dtype."""
        return self.group.recv([tensor], peer, tag)

    def readable(self, peers: Sequence[int], seconds: float) -> bool:
        """Refused: gloo cannot say whether a message is there."""
        raise RankError("ranks that decide as they run look for messages; possible are ranks on one machine")


def nccl_group(store: dist.Store, rank: int, size: int, members: tuple[int, ...]) -> Any:
    """An NCCL group; its communicators are made at the first use."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = TIMEOUT
    options.global_ranks_in_group = list(members)
    return dist.ProcessGroupNCCL(store, rank, size, options)


def warm_up(group: Any, device: torch.device) -> None:
    """Make the NCCL communicators of a group now, in the order in which all ranks make their groups."""
    group.allreduce([torch.zeros(1, device=device)]).wait()
    torch.cuda.synchronize(device)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor on a GPU in pinned memory; complete when this returns."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return host


def agree_on_boards(store: dist.Store, rank: int) -> str:
    """How the files of one machine's boards begin; they have names only while groups are made."""
    if rank == 0:
        store.set("boards", os.path.join(tempfile.gettempdir(), f"minipar-{secrets.token_hex(16)}"))
    return str(store.get("boards").decode())


def along_axis(axis: int | str, mesh: Mapping[str, int], size: int) -> list[int]:
    """For each rank a number that those along an axis of the mesh have in common."""
    if axis not in mesh:
        raise RankError(f"split: {axis!r} is no axis of the mesh; possible are {', '.join(mesh)}")
    if math.prod(mesh.values()) != size or min(mesh.values()) < 1:
        raise RankError(
            f"split: a mesh of {' x '.join(map(str, mesh.values()))} has no place for {several(size, 'rank')} exactly"
        )
    known = Mesh(mesh)
    return [known.group(rank, str(axis))[0] for rank in range(size)]
