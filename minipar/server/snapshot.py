"""Snapshots of a parameter server on the disk: at any moment, and after any crash, each one is whole or does not exist.

    snapshot-3.0 .tmp  -> written, flushed, renamed, the folder flushed ->  snapshot-3.0      (number 3 of server 0)

The two newest stay: while one server is still writing number n, another may have it already, so that number n - 1 is
the newest that all have. A snapshot is a safetensors file: tensors by name, and one JSON text. Such a file cannot have
complex tensors, so these are stored as pairs of real numbers.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

KEPT = 2


def _path(folder: str, server: int, number: int) -> str:
    return os.path.join(folder, f"snapshot-{number}.{server}")


def numbers(folder: str, server: int) -> list[int]:
    """The snapshots of a server that can be read, oldest first."""
    found = []
    there: list[str] = []
    with contextlib.suppress(FileNotFoundError):  # another server, which has ended, has removed the empty folder
        there = os.listdir(folder)
    for name in there:
        head, _, rest = name.partition("-")
        number, _, owner = rest.partition(".")
        if head == "snapshot" and owner == str(server) and number.isdecimal():
            with contextlib.suppress(SafetensorError, OSError), safe_open(_path(folder, server, int(number)), "pt"):
                found.append(int(number))
    return sorted(found)


def write(
    folder: str,
    server: int,
    number: int,
    tensors: dict[str, Tensor],
    facts: dict[str, Any],
    reach: Callable[[str], None] = lambda point: None,
) -> None:
    """Write a snapshot, and remove those before the last two. `reach` is called before and after it is renamed."""
    path = _path(folder, server, number)
    pairs = [name for name, tensor in tensors.items() if tensor.is_complex()]
    real = {name: torch.view_as_real(tensors[name].resolve_conj()) for name in pairs}
    about = {"facts": json.dumps(facts), "complex": json.dumps(pairs)}
    data = save({name: tensor.contiguous() for name, tensor in (tensors | real).items()}, about)
    with open(os.open(f"{path}.tmp", os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    reach("snapshot")
    os.rename(f"{path}.tmp", path)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    reach("snapshot")
    for old in numbers(folder, server)[:-KEPT]:
        os.unlink(_path(folder, server, old))


def read(folder: str, server: int, number: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and facts of a snapshot."""
    with safe_open(_path(folder, server, number), "pt") as file:
        about = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        for name in json.loads(about["complex"]):
            tensors[name] = torch.view_as_complex(tensors[name].clone())  # (it may lie at any multiple of 8 bytes)
        return tensors, json.loads(about["facts"])
    raise AssertionError


def remove_after(folder: str, server: int, number: int) -> None:
    """Remove the snapshots after this number, to which all servers have gone back."""
    for later in numbers(folder, server):
        if later > number:
            os.unlink(_path(folder, server, later))
