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
from typing import Any

from minipar.cluster import worker
from minipar.execution.lines import Slice
from minipar.execution.saving.folder import Header, commit, step_folder, writing
from minipar.execution.saving.keeping import Share, Storing
from minipar.execution.saving.storage import write
from minipar.models.tensors import count_bytes


@dataclass
class Part:
    """In a rank: it writes one part of what is saved, and reports it by a header.

    number     of the part
    header     of the run as it is saved at its end
    pieces     of this rank
    schedule   gives the state of the scheduler
    """

    storing: Storing
    number: int
    header: Header
    pieces: Callable[[], Iterator[Slice]]
    schedule: Callable[[], dict[str, Any] | None] = lambda: None
    _done: int = 0  # the last step that was written

    def reached(self, version: int) -> None:
        """`version` updates are made: write the part of the last step that is to be saved, if it is not there yet."""
        every, first = self.storing.every, self.storing.first
        due = version // every * every if every else 0
        if self._done < due < self.header.step - first:
            self._done = due
            path = step_folder(self.storing.folder, first + due, self.storing.token)
            if not os.path.exists(os.path.join(path, f"part-{self.number}.json")):  # (by an earlier process)
                self._write(path)
            worker.report(replace(self.header, step=first + due, schedule=self.schedule()))

    def end(self, share: float = 1.0) -> Share:
        """At the end of the run: write the part, and bring it to the driver, if that is wanted. `share`: what this rank
        has of the whole state."""
        header = replace(self.header, schedule=self.schedule())
        if self.storing.folder:
            self._write(step_folder(self.storing.folder, header.step, self.storing.token))
        found = list(self.pieces()) if self.storing.keep != 0 else []
        whole = round(sum(count_bytes(piece.values) for piece in found) / share)
        return self.storing.brought(header, found, max(1, whole))

    def _write(self, path: str) -> None:
        with writing(self.storing.folder):
            write(path, self.number, self.header.optimizer, self.pieces())


@dataclass
class Saving:
    """In the driver: the index names a step when so many parts of it are written."""

    storing: Storing
    parts: int
    _heard: dict[int, dict[int, Header]] = field(default_factory=dict)  # what each rank has said of a step
    _before: str = ""

    def heard(self, rank: int, header: Header) -> None:
        """A rank has written its part of a step. It counts once, although it may say so again when it starts again."""
        found = self._heard.setdefault(header.step, {})
        found[rank] = header
        if len(found) == self.parts:
            del self._heard[header.step]
            self.commit(next((one for one in found.values() if one.schedule is not None), header), clean=False)
            if self._before:
                shutil.rmtree(self._before, ignore_errors=True)
            self._before = step_folder(self.storing.folder, header.step, self.storing.token)

    def commit(self, header: Header, clean: bool = True) -> None:
        """All ranks have written this step. `clean`: and nothing is written any more."""
        if self.storing.folder:
            with writing(self.storing.folder):
                commit(self.storing.folder, header.step, self.storing.token, self.parts, header, clean)
