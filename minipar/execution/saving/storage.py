"""torch.distributed.checkpoint with an index in JSON and tensors in safetensors files, read under any plan.

torch plans and reshards: which saved chunks overlap what is wanted, and where. Its own storage keeps the plan in a
pickle, which could run anything when it is loaded; so planner and storage are extended here, as torch provides for.
Every tensor is one line of elements in memory order, and its chunks are runs of them: so the slices of ZeRO, which
begin and end anywhere in a parameter, are chunks like any other.

`write` and `Reading.fill` do step by step what torch's `save` and `load` do in one process: torch's own functions would
communicate with other processes as soon as a user has made a process group.
"""

from __future__ import annotations

import ctypes
import math
import os
import zlib
from collections.abc import Iterable
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    StorageReader,
    StorageWriter,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from minipar.errors import SaveError
from minipar.execution.saving.contents import SavedSlice
from minipar.execution.saving.folder import Chunk, Saved, SavedEntry, flush, write_fragment
from minipar.models.tensors import dtype_name, dtype_named

PIECE = 16 << 20  # bytes; what is longer is cut, so that whoever wants a part of it reads little more

Pieces = dict[str, dict[int, Tensor]]  # key -> first element -> elements


# writing --------------------------------------------------------------------------------------------------------------


def write(path: str, part: int, optimizer: str, pieces: Iterable[SavedSlice]) -> None:
    """Write some pieces to a step folder, as its part number `part`. OSError and SafetensorError as they come."""
    forms: dict[str, SavedSlice] = {}
    lines: Pieces = {}
    for piece in pieces:
        forms[piece.key] = piece
        line = lines.setdefault(piece.key, {})
        size = max(1, PIECE // piece.values.element_size())
        for start in range(0, piece.values.numel(), size):
            line[piece.start + start] = piece.values[start : start + size]
    planner, writer = SlicesSavePlanner(forms), FolderWriter(path, part, optimizer, forms)
    planner.set_up_planner(lines, writer.storage_meta(), True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    writer.finish(metadata, [writer.write_data(plan, planner).wait()])


class SlicesSavePlanner(DefaultSavePlanner):
    """Plans the saving of `Pieces`; `forms` has a piece of each key, for its shape."""

    def __init__(self, forms: dict[str, SavedSlice]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.forms = forms

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([
            self._item(key, start, values) for key, line in self.state_dict.items() for start, values in line.items()
        ])  # fmt: skip
        return self.plan

    def _item(self, key: str, start: int, values: Tensor) -> WriteItem:
        size = torch.Size((math.prod(self.forms[key].shape),))
        data = TensorWriteData(_chunk(start, values.numel()), TensorProperties(dtype=values.dtype), size)
        return WriteItem(MetadataIndex(key, (start,)), WriteItemType.SHARD, tensor_data=data)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        values: Tensor = self.state_dict[index.fqn][index.offset[0]]
        return values


class FolderWriter(StorageWriter):
    """Writes one safetensors file, and beside it in JSON what it holds."""

    def __init__(self, path: str, part: int, optimizer: str, forms: dict[str, SavedSlice]) -> None:
        super().__init__()
        self.path, self.part, self.optimizer, self.forms = path, part, optimizer, forms

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        os.makedirs(self.path, exist_ok=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = f"part-{self.part}.safetensors"
        tensors: dict[str, Tensor] = {}
        kept: list[Tensor] = []
        seen: set[int] = set()
        results = []
        for item in plan.items:
            values = planner.resolve_data(item)
            assert isinstance(values, Tensor)
            assert item.index.offset is not None
            values, start = values.detach().cpu(), item.index.offset[0]
            if values.data_ptr() in seen:  # states may share their memory; safetensors wants each its own
                values = values.clone()
            seen.add(values.data_ptr())
            kept.append(values)  # (so that its memory stays alive until the file is written)
            values = _apart(values)
            # (complex numbers as pairs: safetensors does not know all of their types)
            tensors[_entry(item.index.fqn, start)] = torch.view_as_real(values) if values.is_complex() else values
            chunk = Chunk(start, values.numel(), name, checksum(values))
            results.append(WriteResult(item.index, values.numel() * values.element_size(), chunk))
        file = os.path.join(self.path, name)
        save_file(tensors, file)
        flush(file)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        chunks: dict[str, list[Chunk]] = {key: [] for key in self.forms}
        for result in (result for of_one in results for result in of_one):
            chunks[result.index.fqn].append(result.storage_data)
        entries = {
            key: SavedEntry(form.shape, dtype_name(form.values.dtype), form.number, tuple(chunks[key]))
            for key, form in self.forms.items()
        }
        write_fragment(self.path, self.part, self.optimizer, entries)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # torch must never choose this class automatically


# reading --------------------------------------------------------------------------------------------------------------


class Reading:
    """What was saved, to be read in pieces of any size. It keeps its files open."""

    def __init__(self, saved: Saved) -> None:
        self.saved = saved
        self.reader = FolderReader(saved)
        self.metadata = self.reader.read_metadata()
        self.reader.set_up_storage_reader(self.metadata, True)
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
        return entry.shape, dtype_of(entry.dtype), entry.number

    def states(self, name: str) -> list[str]:
        """Names of the optimizer's states of a parameter."""
        return self._states.get(name, [])

    def scalars(self) -> set[str]:
        """Names of the optimizer's states that are one number for a parameter of any size."""
        return self._scalars

    def fill(self, wanted: dict[tuple[str, int], Tensor]) -> None:
        """Fill each 1-dimensional tensor on the CPU with the elements of (key, start)."""
        lines: Pieces = {}
        for (key, start), values in wanted.items():
            if values.numel():
                lines.setdefault(key, {})[start] = values
        planner = SlicesLoadPlanner()
        planner.set_up_planner(lines, self.metadata, True)
        plans = planner.create_global_plan([self.reader.prepare_local_plan(planner.create_local_plan())])
        plan = planner.finish_plan(self.reader.prepare_global_plan(plans)[0])
        self.reader.read_data(plan, planner).wait()


class SlicesLoadPlanner(DefaultLoadPlanner):
    """Plans the loading of `Pieces`, in which torch finds the saved chunks that overlap each of them."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for key, line in self.state_dict.items():
            saved = self.metadata.state_dict_metadata[key]
            assert isinstance(saved, TensorStorageMetadata)
            wanted = [_chunk(start, values.numel()) for start, values in line.items()]
            items += create_read_items_for_chunk_list(key, saved, wanted)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        values: Tensor = self.state_dict[index.fqn][index.offset[0]]
        return values


class FolderReader(StorageReader):
    """Reads the files of a saved run, each chunk with its checksum; torch's own planner can use it, too."""

    def __init__(self, saved: Saved) -> None:
        super().__init__()
        self.saved = saved
        self.files: dict[str, Any] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        tensors: dict[str, Any] = {}
        places = {}
        for key, entry in self.saved.entries.items():
            chunks = [_chunk(chunk.start, chunk.size) for chunk in entry.chunks]
            size = torch.Size((math.prod(entry.shape),))
            tensors[key] = TensorStorageMetadata(TensorProperties(dtype=dtype_of(entry.dtype)), size, chunks)
            places.update({MetadataIndex(key, (chunk.start,)): chunk for chunk in entry.chunks})
        return Metadata(tensors, storage_data=places)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.places = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            chunk = self.places[item.storage_index]
            values = self._chunk(item.storage_index.fqn, chunk)
            start = item.storage_offsets[0]
            target = planner.resolve_tensor(item).detach()
            target.copy_(values[start : start + item.lengths[0]])
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

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

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


def dtype_of(name: str) -> torch.dtype:
    """A dtype by its name. SaveError for one that this version of torch does not know."""
    try:
        return dtype_named(name)
    except ValueError as error:
        raise SaveError(str(error)) from error


def checksum(values: Tensor) -> int:
    """The CRC-32 of a line of elements."""
    return zlib.crc32(values.contiguous().view(torch.uint8).numpy().data) if values.numel() else 0


def _apart(values: Tensor) -> Tensor:
    """The same memory as another storage: one that NumPy has seen cannot be resized again, which ZeRO needs."""
    size = values.numel() * values.element_size()
    if size == 0:
        return values
    return torch.frombuffer((ctypes.c_char * size).from_address(values.data_ptr()), dtype=values.dtype)


def _chunk(start: int, count: int) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size((start,)), torch.Size((count,)))


def _entry(key: str, start: int) -> str:
    return f"{key}@{start}"
