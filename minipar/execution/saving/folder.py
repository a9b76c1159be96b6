"""A folder with a saved run. One file of it, the index, says what counts; it is replaced by one rename.

    folder/
      minipar.json                   the index: step, seed, plan, model, and where every element of every tensor is
      step-00000020-1f2e3d4c/        the files it names, one for each rank that wrote
        part-0.safetensors  part-0.json
        part-1.safetensors  part-1.json

A save writes a new step folder, flushes it to the disk, and then renames a new index over the old one. A save that
stops before that leaves a folder that no index names, and the run saved before still counts; the next save removes such
folders.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import operator
import os
import re
import secrets
import shutil
import stat
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from minipar.errors import SaveError

INDEX = "minipar.json"
FORMAT = 1
_STEP = re.compile(r"step-\d{8,}-[0-9a-f]{8}")
_ASIDE = re.compile(r"\.minipar-[0-9a-f]{8}")
_FILE = re.compile(r"part-\d+\.safetensors")
_STUMBLES = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError)


class SavedParameter(NamedTuple):
    """One parameter of a model, as the model itself has it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool


class Chunk(NamedTuple):
    """Neighbouring elements of a tensor: which, in which file, and their checksum."""

    start: int
    size: int
    file: str
    checksum: int


class SavedEntry(NamedTuple):
    """A saved tensor. `number`: it was a plain number."""

    shape: tuple[int, ...]
    dtype: str
    number: bool
    chunks: tuple[Chunk, ...]


class Call(NamedTuple):
    """Which call of `train` in a launch of torchrun has saved a run, and which steps that was to do."""

    launch: str
    number: int
    first: int
    steps: int


@dataclass(frozen=True)
class Header:
    """What was run. `step`: steps done; `optimizer`: its class, "" if nothing was trainable; `schedule`: the state of
    the scheduler, where there was one, as plain data; `call`: under torchrun, who has saved it."""

    step: int
    seed: int
    batch: int
    dtype: str
    plan: str
    optimizer: str
    model: tuple[SavedParameter, ...]
    schedule: dict[str, Any] | None = None
    call: Call | None = None


@dataclass(frozen=True)
class Saved:
    """A saved run: what its index says. `files`: the folder of its step."""

    folder: str
    files: str
    header: Header
    entries: dict[str, SavedEntry]

    def check_fits(self, model: tuple[SavedParameter, ...], optimizer: str) -> None:
        """SaveError, naming the first parameter that differs, if this was saved of another model or optimizer."""
        for k in range(max(len(model), len(self.header.model))):
            saved = self.header.model[k] if k < len(self.header.model) else None
            mine = model[k] if k < len(model) else None
            if saved != mine:
                raise SaveError(
                    f"{self.folder}: saved of another model: parameter {k} is {_text(saved)} there, and {_text(mine)} "
                    "here; go on with the model it was saved of"
                )
        before = self.header.optimizer
        if optimizer and before and optimizer != before:
            raise SaveError(
                f"{self.folder}: saved with the optimizer {before}, not {optimizer}; go on with optimizer= as it was"
            )


def _text(row: SavedParameter | None) -> str:
    if row is None:
        return "none"
    shape = "×".join(map(str, row.shape)) or "one number"
    return f"{row.name} ({shape}, {row.dtype}{'' if row.trainable else ', frozen'})"


# writing --------------------------------------------------------------------------------------------------------------


def new_token() -> str:
    """A new token, which is part of the names of one run's step folders and of no other's."""
    return secrets.token_hex(4)


def step_folder(folder: str, step: int, token: str) -> str:
    return os.path.join(folder, f"step-{step:08d}-{token}")


def path_of(folder: str | os.PathLike[str]) -> str:
    """The full path of what a user names; "~" is the home. SaveError for an empty name."""
    if not os.fspath(folder):
        raise SaveError("'': names no folder; possible is a path, such as 'runs/first'")
    return os.path.abspath(os.path.expanduser(folder))


def prepare(folder: str | os.PathLike[str]) -> str:
    """Make a folder ready to be saved to; its full path. SaveError if nothing can be written there, or another run
    saves there now."""
    path = path_of(folder)
    with writing(path):
        os.makedirs(path, exist_ok=True)
        with alone(path):
            probe = _aside(path, new_token())
            _write(probe, b"")
            os.unlink(probe)
    return path


@contextlib.contextmanager
def alone(folder: str) -> Iterator[None]:
    """While entered, no other driver saves to a folder. SaveError if one does."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # (some file systems know no locks)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SaveError(f"{folder}: another run saves there now; possible is another folder") from None
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def writing(folder: str) -> Iterator[None]:
    """Around code that writes to a folder: turn the system's errors into a SaveError of one line."""
    try:
        yield
    except SaveError:
        raise
    except Exception as error:
        if not isinstance(error, OSError) and not type(error).__module__.startswith("safetensors"):
            raise
        reason = error.strerror if isinstance(error, OSError) else None
        raise SaveError(
            f"{folder}: cannot save there: {reason or error}; what was saved there before still counts; possible: "
            "free some room, or another folder"
        ) from error


def write_fragment(path: str, part: int, optimizer: str, entries: dict[str, SavedEntry]) -> None:
    """Note what one writer has written to a step folder, and see that it is on the disk."""
    text = json.dumps({"optimizer": optimizer, "entries": entries})
    _write(os.path.join(path, f"part-{part}.json"), text.encode())
    flush(path)


def commit(folder: str, step: int, token: str, parts: int, header: Header, clean: bool = True) -> None:
    """Make a step folder the one that the index names, once all its parts are written. Then remove the others, unless
    another one may be written just now (`clean`)."""
    path = step_folder(folder, step, token)
    entries: dict[str, dict[str, Any]] = {}
    optimizer = ""
    for part in range(parts):
        with open(os.path.join(path, f"part-{part}.json"), encoding="utf-8") as file:
            fragment = json.load(file)
        optimizer = optimizer or fragment["optimizer"]
        for key, (shape, dtype, number, chunks) in fragment["entries"].items():
            entry = entries.setdefault(key, {"shape": shape, "dtype": dtype, "number": number, "chunks": []})
            entry["chunks"] += chunks
    for key, entry in entries.items():
        entry["chunks"].sort()
        if not _complete(entry["shape"], entry["chunks"]):
            raise SaveError(f"{folder}: the ranks did not bring all elements of {key} once each; nothing was saved")
    index = {"format": FORMAT, "files": os.path.basename(path), **asdict(header), "optimizer": optimizer}
    index |= {"model": [list(row) for row in header.model], "tensors": entries}
    text = json.dumps({"index": index, "checksum": _checksum(index)})
    flush(folder)
    _write(_aside(folder, token), text.encode())
    os.replace(_aside(folder, token), os.path.join(folder, INDEX))
    flush(folder)
    if clean:
        _clean(folder, os.path.basename(path))


def _aside(folder: str, token: str) -> str:
    """The path to which an index is written before it is renamed."""
    return os.path.join(folder, f".minipar-{token}")


def _clean(folder: str, counts: str, token: str = "") -> None:
    """Remove the step folder of a token, or all of them, and indices that were not renamed; keep folder `counts`."""
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if _STEP.fullmatch(name) and name.endswith(token) and name != counts:
            shutil.rmtree(path, ignore_errors=True)
        elif _ASIDE.fullmatch(name) and name.endswith(token):
            with contextlib.suppress(OSError):
                os.unlink(path)


def discard(folder: str, token: str) -> None:
    """Remove what a failed save has left behind."""
    with contextlib.suppress(OSError, SaveError):
        counts = os.path.basename(open_folder(folder).files) if os.path.exists(os.path.join(folder, INDEX)) else ""
        _clean(folder, counts, token)


def _complete(shape: list[int], chunks: list[Any]) -> bool:
    end = 0
    for start, size, *_ in chunks:
        if start != end:
            return False
        end += size
    return end == math.prod(shape)


def _checksum(index: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(index, sort_keys=True).encode())


def _write(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def flush(path: str) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# reading --------------------------------------------------------------------------------------------------------------


def open_folder(folder: str | os.PathLike[str]) -> Saved:
    """What is saved in a folder. SaveError if there is nothing, or its index is damaged or impossible."""
    path = path_of(folder)
    index = os.path.join(path, INDEX)
    damaged = f"{index}: damaged: its checksum is another one; go on from another folder"
    try:
        with open(os.open(index, os.O_RDONLY | os.O_NONBLOCK), encoding="utf-8") as file:  # (a pipe would wait)
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise SaveError(f"{index}: is no file; go on from another folder")
            found = json.load(file)
    except OSError as error:
        raise SaveError(f"{path}: no saved run there ({INDEX}: {error.strerror}); run.save(folder) makes one") from None
    except (ValueError, RecursionError):
        raise SaveError(damaged) from None
    try:
        body = found["index"]
        sound = found["checksum"] == _checksum(body)
    except (KeyError, TypeError, ValueError, RecursionError):
        sound = False
    if not sound:
        raise SaveError(damaged)
    try:
        if body["format"] != FORMAT:
            raise SaveError(
                f"{index}: of format {body['format']!r:.40}, but this version of minipar reads format {FORMAT}"
            )
        return _saved(path, index, body)
    except _STUMBLES as error:
        raise SaveError(f"{index}: damaged: {type(error).__name__}: {str(error)[:200]}") from None


def _saved(path: str, index: str, body: dict[str, Any]) -> Saved:
    """What an index says. It may have been made by anybody: SaveError, or one of `_STUMBLES`, for what cannot be."""
    model = tuple(
        SavedParameter(_text_of(name), _sizes(shape), _text_of(dtype), bool(trainable))
        for name, shape, dtype, trainable in body["model"]
    )
    if not _STEP.fullmatch(body["files"]):
        raise SaveError(f"{index}: damaged: its files lie in {body['files']!r}")
    files = os.path.join(path, body["files"])
    entries = {}
    for key, entry in body["tensors"].items():
        chunks = tuple(Chunk(_size(start), _size(size), file, sum_) for start, size, file, sum_ in entry["chunks"])
        entries[key] = SavedEntry(_sizes(entry["shape"]), _text_of(entry["dtype"]), bool(entry["number"]), chunks)
        if not all(_FILE.fullmatch(chunk.file) for chunk in chunks):
            raise SaveError(f"{index}: damaged: {key} lies in a file outside of the folder")
        if not _complete(list(entries[key].shape), sorted(chunks)):
            raise SaveError(f"{index}: damaged: it does not have every element of {key} once")
        for chunk in chunks:
            file = os.path.join(files, chunk.file)
            if os.path.isfile(file) and chunk.size > os.path.getsize(file):  # (other faults are told when it is read)
                raise SaveError(f"{file}: cannot be read: it is too short for {key}; go on from another folder")
    known: dict[str, Any] = {key: _size(body[key]) for key in ("step", "batch")}
    known |= {key: _text_of(body[key]) for key in ("dtype", "plan", "optimizer")}
    schedule, seed = body.get("schedule"), operator.index(body["seed"])
    if not isinstance(schedule, dict | None):
        raise TypeError(f"schedule={schedule!r}")
    call = None
    if body.get("call") is not None:
        launch, *numbers = body["call"]
        call = Call(_text_of(launch), *_sizes(numbers))
    return Saved(path, files, Header(**known, seed=seed, schedule=schedule, call=call, model=model), entries)


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise TypeError(f"{value!r} is no size")
    return value


def _sizes(value: list[Any]) -> tuple[int, ...]:
    return tuple(_size(each) for each in value)


def _text_of(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value
