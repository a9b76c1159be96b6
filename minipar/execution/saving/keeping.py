"""How a run's state travels: from ranks into a folder, from a folder into ranks, and from ranks to the driver.

    train(..., save=folder, save_every=100)     every rank writes its share, in parallel, while it has it
    run = train(...); run.save(folder)          each rank's share came back with its results (up to `KEEP` bytes
                                                in all), and the driver writes it

Both write the same files, and all shares together hold every element once, however many replicas there are.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from minipar.errors import SaveError
from minipar.execution.executor import Executor
from minipar.execution.lines import Slice, assemble
from minipar.execution.saving.contents import (
    Outline,
    by_kind,
    collect,
    everything,
    optimizer_name,
    read_one,
    read_whole,
    restore,
    schedule_of,
)
from minipar.execution.saving.folder import (
    Call,
    Header,
    Saved,
    alone,
    commit,
    discard,
    flush,
    new_token,
    open_folder,
    path_of,
    prepare,
    step_folder,
    writing,
)
from minipar.execution.saving.storage import Reading, save_file, write
from minipar.models.tensors import count_bytes

KEEP = 64 << 20  # up to so many bytes of parameters and optimizer states return to the driver, so that `run.save` works

_WAYS = "possible: train(..., keep=True), or train(..., save=folder)"


@dataclass(frozen=True)
class Share:
    """What a rank brought back of its state: pieces, or the reason why not."""

    header: Header
    pieces: tuple[Slice, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Storing:
    """What the ranks are to do about saving.

    saved    the saved run to go on from
    folder   write there at the end and, if `every` is not 0, every so many steps; "": nowhere
    keep     bring the state to the driver if it has at most so many bytes in all; None: however large it is
    call     under torchrun, which call this is
    """

    saved: Saved | None = None
    folder: str = ""
    every: int = 0
    token: str = ""
    keep: int | None = 0
    call: Call | None = None

    @property
    def first(self) -> int:
        """The first step of the run."""
        return 0 if self.saved is None else self.saved.header.step

    def begin(self, executor: Executor, outline: Outline) -> None:
        """In a rank that has not begun: take what was saved."""
        if self.saved is None:
            return
        self.saved.check_fits(outline.rows, optimizer_name(executor))
        with executor.all_here():
            restore(executor, outline, Reading(self.saved, executor.cuts))
        if executor.state.update.schedule is not None:
            executor.state.update.schedule.load(self.saved.header.schedule)

    def plainly(self) -> dict[str, dict[str, Any]] | None:
        """What was saved, as whole tensors by name: parameters, buffers, and the optimizer's states of each parameter.
        None if the run starts from the beginning."""
        if self.saved is None:
            return None
        return read_whole(Reading(self.saved))

    def due(self, step: int) -> bool:
        """Whether the run is saved after so many steps, wherever it ends."""
        return self.every > 0 and (step - self.first) % self.every == 0

    def after(self, executor: Executor, outline: Outline, header: Header, last: bool, updates: int) -> None:
        """In a rank, after some steps: write its share, if it is time. All ranks call this.

        updates   of this run so far
        """
        if not self.folder or not (last or self.due(header.step)):
            return
        comm, step = executor.comm, header.step
        header = replace(header, schedule=schedule_of(executor, updates))
        with writing(self.folder), executor.all_here():
            path = step_folder(self.folder, step, self.token)
            write(path, comm.rank, optimizer_name(executor), collect(executor, outline))
        comm.barrier()
        if comm.rank == 0:
            with writing(self.folder):
                commit(self.folder, step, self.token, comm.size, header)

    def share(self, executor: Executor, outline: Outline, header: Header, updates: int = 0) -> Share:
        """In a rank, at the end: its share for the driver, if that is wanted. All ranks call this."""
        header = replace(header, optimizer=optimizer_name(executor))
        if self.keep == 0:
            return self.brought(header, (), 1)
        pieces: list[Slice] = []
        reason = ""
        with executor.all_here():
            try:
                header = replace(header, schedule=schedule_of(executor, updates))
                pieces = list(collect(executor, outline))
            except SaveError as error:  # no error yet, since it may not be needed; `run.save` raises it
                reason = error.reason
            total = torch.tensor([count_bytes([piece.values for piece in pieces])])
            executor.comm.iallreduce(total, tuple(range(executor.comm.size)), "bytes of the state").wait()
            # What the host has here only for this moment must be copied.
            share = self.brought(header, pieces, int(total), executor.copies is not None)
            return replace(share, pieces=(), reason=reason) if reason else share

    @staticmethod
    def model(executor: Executor, outline: Outline) -> list[Slice]:
        """In a rank: what it has of parameters and buffers, by itself."""
        with executor.all_here():
            copied = executor.copies is not None
            return [piece._replace(values=_by_itself(piece.values, copied)) for piece in everything(executor, outline)]

    def brought(self, header: Header, pieces: Sequence[Slice], total: int, copied: bool = False) -> Share:
        """Pieces for the driver, `copied` or not, if it wants the state of the run, which has `total` bytes."""
        if self.keep is None or total <= self.keep:
            return Share(header, tuple(piece._replace(values=_by_itself(piece.values, copied)) for piece in pieces))
        why = "was not kept"
        if self.keep:
            why = f"has {total / 2**20:.1f} MiB, of which up to {self.keep / 2**20:.0f} are kept unasked"
        return Share(header, reason=f"its state {why}; {_WAYS}")

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """In the driver, around what saves: no other driver saves there meanwhile, and if it fails, what was half
        written is removed."""
        with alone(self.folder):
            try:
                yield
            except BaseException:
                discard(self.folder, self.token)
                raise


NOTHING = Storing()


def storing(
    resume: str | os.PathLike[str] | None, save: str | os.PathLike[str] | None, every: int, keep: bool | None
) -> Storing:
    """What `train` was asked for. SaveError for a folder without a saved run, and one that cannot be written."""
    return Storing(
        None if resume is None else open_folder(resume),
        "" if save is None else prepare(save),
        every,
        new_token(),
        KEEP if keep is None else None if keep else 0,
    )


# in the driver --------------------------------------------------------------------------------------------------------


def save(shares: Sequence[Share], folder: str | os.PathLike[str]) -> None:
    """Write what the ranks brought back. SaveError if they did not, or if it cannot be written."""
    header, pieces = _joined(shares, "run.save")
    path, token = prepare(folder), new_token()
    with Storing(folder=path, token=token).around(), writing(path):
        write(step_folder(path, header.step, token), 0, header.optimizer, pieces)
        commit(path, header.step, token, 1, header)


def export(shares: Sequence[Share], path: str | os.PathLike[str]) -> None:
    """Write the whole model that the ranks brought back to one safetensors file."""
    _export(model_of(shares, "run.export"), path)


def model_of(shares: Sequence[Share], what: str) -> dict[str, Tensor]:
    """The parameters and buffers that the ranks returned, each whole, by name. Errors name the caller, `what`."""
    found = whole_of(shares, what)
    return {**found["parameters"], **found["buffers"]}


def whole_of(shares: Sequence[Share], what: str) -> dict[str, dict[str, Any]]:
    """What the ranks returned, as whole tensors by name: parameters, buffers, and each parameter's states."""
    _, pieces = _joined(shares, what)
    numbers = {piece.key for piece in pieces if piece.number}
    return by_kind((key, whole.item() if key in numbers else whole) for key, whole in assemble(pieces).items())


def model_in(folder: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The parameters and buffers of a saved run, each whole, by name. SaveError."""
    reading = Reading(open_folder(folder))
    keys = [key for key in reading.everything() if not key.startswith("optimizer/")]
    return {key.partition("/")[2]: read_one(reading, key) for key in keys}


def _export(tensors: Mapping[str, Tensor], path: str | os.PathLike[str]) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype is torch.complex128:
            raise SaveError(
                f"{name}: is of {tensor.dtype}, which a safetensors file cannot hold; export a model of dtype=float32, "
                "or save the run (run.save), which can"
            )
    target = path_of(path)
    aside = f"{target}.{new_token()}"
    try:
        with writing(target):
            save_file(dict(tensors), aside)
            flush(aside)
            os.replace(aside, target)
            flush(os.path.dirname(target))
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise


def _joined(shares: Sequence[Share], what: str) -> tuple[Header, list[Slice]]:
    reason = next((share.reason for share in shares if share.reason), "" if shares else f"no state was kept; {_WAYS}")
    if reason:
        raise SaveError(f"{what}: {reason}")
    optimizer = next((share.header.optimizer for share in shares if share.header.optimizer), "")
    return replace(shares[0].header, optimizer=optimizer), [piece for share in shares for piece in share.pieces]


def _by_itself(values: Tensor, copied: bool) -> Tensor:
    """The same elements on the CPU, in memory that holds nothing else (all of which would travel with them)."""
    here = values.detach().cpu()
    return here.clone() if copied or here.untyped_storage().nbytes() != count_bytes(here) else here
