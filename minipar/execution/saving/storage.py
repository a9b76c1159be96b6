"""The tensors of a saved run: written as safetensors files with an index in JSON, and read under any plan.

Every tensor is one line of elements in memory order, and its chunks are runs of them: so the slices of ZeRO, which
begin and end anywhere in a parameter, are chunks like any other. Whoever wants some elements reads the chunks that have
any of them:

    saved     |---- rank 0 ----|---- rank 1 ----|      two chunks
    wanted               |-------------|               the end of the first and the beginning of the second one
"""

from __future__ import annotations

import ctypes
import os
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from minipar.cluster.processes import held
from minipar.errors import SaveError
from minipar.execution.lines import Slice
from minipar.execution.saving.contents import parameter_of
from minipar.execution.saving.folder import Chunk, Saved, SavedEntry, flush, write_fragment
from minipar.models.nodes import Cut
from minipar.models.tensors import dtype_name, dtype_named

with held():  # (what is half imported of it cannot be imported again)
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file

PIECE = 16 << 20  # bytes; what is longer is cut, so that whoever wants a part of it reads little more


# writing --------------------------------------------------------------------------------------------------------------


def write(path: str, part: int, optimizer: str, pieces: Iterable[Slice]) -> None:
    """Write some pieces to a step folder, as its part number `part`: one safetensors file, and beside it in JSON what
    it holds. OSError and SafetensorError as they come."""
    os.makedirs(path, exist_ok=True)
    name = f"part-{part}.safetensors"
    forms: dict[str, Slice] = {}
    chunks: dict[str, list[Chunk]] = {}
    tensors: dict[str, Tensor] = {}
    kept: list[Tensor] = []  # (so that their memory stays alive until the file is written)
    seen: set[int] = set()
    for piece in pieces:
        forms[piece.key] = piece
        size = max(1, PIECE // piece.values.element_size())
        for begin in range(0, piece.values.numel(), size):
            start = piece.start + begin
            values = piece.values[begin : begin + size].detach().cpu()
            if values.data_ptr() in seen:  # states may share their memory; safetensors wants each its own
                values = values.clone()
            seen.add(values.data_ptr())
            kept.append(values)
            values = _with_own_storage(values)
            # (complex numbers as pairs: safetensors does not know all of their types)
            tensors[_entry(piece.key, start)] = torch.view_as_real(values) if values.is_complex() else values
            chunks.setdefault(piece.key, []).append(Chunk(start, values.numel(), name, checksum(values)))
    file = os.path.join(path, name)
    save_file(tensors, file)
    flush(file)
    entries = {
        key: SavedEntry(form.shape, dtype_name(form.values.dtype), form.number, tuple(chunks.get(key, ())))
        for key, form in forms.items()
    }
    write_fragment(path, part, optimizer, entries)


# reading --------------------------------------------------------------------------------------------------------------


class Reading:
    """What was saved, to be read in pieces of any size, each chunk with its checksum. It keeps its files open.

    cuts   of parameters of which the reader has a part: it then asks for elements of that, and their states
    """

    def __init__(self, saved: Saved, cuts: Mapping[str, Cut] | None = None) -> None:
        self.saved, self.cuts = saved, cuts or {}
        self.files: dict[str, Any] = {}
        self._states: dict[str, list[str]] = {}
        self._scalars = {"step"}
        shapes = {row.name: row.shape for row in saved.header.model}
        for key, entry in saved.entries.items():
            kind, _, rest = key.partition("/")
            if kind == "optimizer":
                state, _, name = rest.partition("/")
                self._states.setdefault(name, []).append(state)
                if not entry.shape and shapes.get(name):
                    self._scalars.add(state)

    def everything(self) -> list[str]:
        """Everything that was saved."""
        return list(self.saved.entries)

    def form(self, key: str) -> tuple[tuple[int, ...], torch.dtype, bool]:
        """Shape and dtype of a tensor, and whether it was a plain number. SaveError if there is none."""
        entry = self.saved.entries.get(key)
        if entry is None:
            raise SaveError(f"{self.saved.folder}: has no {key}; go on with the model it was saved of")
        cut = self._cut(key)
        return entry.shape if cut is None else cut.local_shape(entry.shape), dtype_of(entry.dtype), entry.number

    def _cut(self, key: str) -> Cut | None:
        cut = self.cuts.get(parameter_of(key))
        return cut if cut is not None and len(self.saved.entries[key].shape) > cut.dim else None

    def states(self, name: str) -> list[str]:
        """Names of the optimizer's states of a parameter."""
        return self._states.get(name, [])

    def scalars(self) -> set[str]:
        """Names of the optimizer's states that are one number for a parameter of any size."""
        return self._scalars

    def fill(self, wanted: dict[tuple[str, int], Tensor]) -> None:
        """Fill each 1-dimensional tensor on the CPU with the elements of (key, start)."""
        for (key, begin), part in wanted.items():
            cut = self._cut(key)
            if cut is None:
                self._fill(key, begin, part)
                continue
            for start, at, count in cut.runs(self.saved.entries[key].shape, begin, begin + part.numel()):
                self._fill(key, start, part[at - begin :][:count])

    def _fill(self, key: str, start: int, target: Tensor) -> None:
        end = start + target.numel()
        for chunk in self.saved.entries[key].chunks:
            first, last = max(start, chunk.start), min(end, chunk.start + chunk.size)
            if first < last:
                found = self._chunk(key, chunk)[first - chunk.start : last - chunk.start]
                target.detach()[first - start : last - start].copy_(found)

    def _chunk(self, key: str, chunk: Chunk) -> Tensor:
        path = os.path.join(self.saved.files, chunk.file)
        try:
            if chunk.file not in self.files:
                if os.path.exists(path) and not os.path.isfile(path):  # (to open a pipe would wait for its other end)
                    raise SaveError(f"{path}: is no file; go on from another folder")
                self.files[chunk.file] = safe_open(path, framework="pt")
            values: Tensor = self.files[chunk.file].get_tensor(_entry(key, chunk.start))
        except (OSError, SafetensorError) as error:
            reason = "is not there" if not os.path.exists(path) else f"cannot be read: {error}"
            raise SaveError(f"{path}: {reason}; go on from another folder") from error
        dtype = dtype_of(self.saved.entries[key].dtype)
        if values.numel() != chunk.size * (2 if dtype.is_complex else 1) or values.dtype != dtype.to_real():
            raise SaveError(f"{path}: damaged: {key} is of another size or dtype there; go on from another folder")
        if dtype.is_complex:
            values = torch.view_as_complex(values.clone())  # (in a file it may lie at any multiple of 8 bytes)
        if checksum(values) != chunk.checksum:
            raise SaveError(f"{path}: damaged: the checksum of {key} is another one; go on from another folder")
        return values


def dtype_of(name: str) -> torch.dtype:
    """A dtype by its name. SaveError for one that this version of torch does not know."""
    try:
        return dtype_named(name)
    except ValueError as error:
        raise SaveError(str(error)) from error


def checksum(values: Tensor) -> int:
    """The CRC-32 of a line of elements."""
    return zlib.crc32(values.contiguous().view(torch.uint8).numpy().data) if values.numel() else 0


def _with_own_storage(values: Tensor) -> Tensor:
    """The same memory as another storage: one that NumPy has seen cannot be resized again, which ZeRO needs."""
    size = values.numel() * values.element_size()
    if size == 0:
        return values
    return torch.frombuffer((ctypes.c_char * size).from_address(values.data_ptr()), dtype=values.dtype)


def _entry(key: str, start: int) -> str:
    return f"{key}@{start}"
