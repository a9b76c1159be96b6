"""How a run with parameter servers is saved: servers have what is trained, and worker 0 the rest.

    server 0    | APPLY 9 | write | REPLY ...       all servers follow one order, and write after the same update
    server 1    | APPLY 9 | write | REPLY ...
    worker 0    PULL 10 | write | F B PUSH ...      frozen parameters and buffers, when it has that version
    driver                          name the files in the index, once all have written theirs

The files are those of any run (`execution/saving`), so that a run goes on with other servers, other workers, or none.
At the end of a run all servers have the same version in every mode. During a run workers are at one step only in modes
sync and k-of-n.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from minipar.cluster import worker
from minipar.execution.saving.contents import SavedSlice
from minipar.execution.saving.folder import Header, commit, step_folder, writing
from minipar.execution.saving.keeping import Share, Storing
from minipar.models.tensors import count_bytes

Pieces = Callable[[], Iterator[SavedSlice]]


class Wrote(NamedTuple):
    """A rank has written its part of a step, and the state of the scheduler, if it has one."""

    step: int
    schedule: dict[str, Any] | None


@dataclass
class Part:
    """In a rank: it writes part number `part` of what is saved. `steps`: of the run."""

    storing: Storing
    part: int
    steps: int
    _done: int = 0  # the last step that was written

    def reached(self, version: int, pieces: Pieces, optimizer: str = "", schedule: Any = lambda: None) -> None:
        """`version` updates are made: write the part of the last step that is to be saved, if it is not there yet."""
        every = self.storing.every
        due = version // every * every if every else 0
        if self._done < due < self.steps:
            self._done, step = due, self.storing.first + due
            self._write(step, pieces, optimizer)
            worker.report(Wrote(step, schedule()))

    def end(self, header: Header, pieces: Pieces, optimizer: str = "", share: float = 1.0) -> Share:
        """At the end of the run: write the part, and bring it to the driver, if that is wanted. `share`: what this rank
        has of the whole state."""
        header = replace(header, optimizer=optimizer)
        if self.storing.folder:
            self._write(header.step, pieces, optimizer, again=True)
        if self.storing.keep == 0:
            return self.storing.brought(header, (), 1)
        found = list(pieces())
        return self.storing.brought(header, found, round(sum(count_bytes(piece.values) for piece in found) / share))

    def _write(self, step: int, pieces: Pieces, optimizer: str, again: bool = False) -> None:
        from minipar.execution.saving.storage import write

        path = step_folder(self.storing.folder, step, self.storing.token)
        if again or not os.path.exists(os.path.join(path, f"part-{self.part}.json")):  # (by an earlier process)
            with writing(self.storing.folder):
                write(path, self.part, optimizer, pieces())


@dataclass
class Saving:
    """In the driver: the index names a step when all its parts are written.

    header   of the run; step and schedule are those of a save
    parts    how many ranks write
    """

    storing: Storing
    header: Header
    parts: int
    _heard: dict[int, dict[int, Wrote]] = field(default_factory=dict)  # what each rank has said of a step
    _before: str = ""

    def heard(self, rank: int, wrote: Wrote) -> None:
        """A rank has written its part of a step. It counts once, although it may say so again when it starts again."""
        found = self._heard.setdefault(wrote.step, {})
        found[rank] = wrote
        if len(found) < self.parts:
            return
        del self._heard[wrote.step]
        schedule = next((one.schedule for one in found.values() if one.schedule is not None), None)
        self._commit(wrote.step, schedule, clean=False)
        if self._before:
            shutil.rmtree(self._before, ignore_errors=True)
        self._before = step_folder(self.storing.folder, wrote.step, self.storing.token)

    def finish(self, last: Header) -> None:
        """All ranks have written the last step."""
        if self.storing.folder:
            self._commit(last.step, last.schedule, clean=True)

    def _commit(self, step: int, schedule: dict[str, Any] | None, clean: bool) -> None:
        with writing(self.storing.folder):
            header = replace(self.header, step=step, schedule=schedule)
            commit(self.storing.folder, step, self.storing.token, self.parts, header, clean)
