"""How a run under torchrun goes on after its processes were started again.

torchrun starts all processes again when one of them fails (--max-restarts), and so does a cluster's scheduler, with the
same --rdzv-id. The script then begins anew, and its `train(..., save=folder)` would, too. So rank 0 writes beside the
saved run which launch it is of:

    folder/launch.json      {"launch": rdzv-id, "calls": {"0": {"first": 0, "steps": 100, "tokens": ["1f2e3d4c"]}}}

A launch of the same name finds there where its own call began, and whether what is saved is this call's: by the token
in the name of the step's files. Then it does the steps that are left, from the saved one on. A run that is complete is
trained again, since nothing else gives its `Run`.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from typing import Any

from minipar.cluster import launched
from minipar.errors import SaveError
from minipar.execution.saving.folder import open_folder, writing
from minipar.execution.saving.keeping import Storing
from minipar.wording import several

FILE = "launch.json"

_calls = 0  # of train(save=...) in this process


@dataclass(frozen=True)
class Launch:
    """`name`: the same in all attempts of one launch. `restarted`: whether this is not the first one of torchrun's."""

    name: str
    restarted: bool


def this_launch() -> Launch | None:
    """That of this process; None where torchrun did not start it, or gave it no name and has not restarted it."""
    if not launched.started():
        return None
    name, again = os.environ["TORCHELASTIC_RUN_ID"], int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    return Launch(name, again) if name != "none" or again else None


def going_on(storing: Storing, steps: int) -> tuple[Storing, int]:
    """What a `train` that saves was asked for; or, where this is another attempt, to go on from its last save for the
    steps that are left. On rank 0, before the run."""
    global _calls
    launch = this_launch()
    if launch is None:
        return storing, steps
    number, _calls = str(_calls), _calls + 1
    path = os.path.join(storing.folder, FILE)
    calls = _read(path, launch.name)
    call = calls.get(number, {"first": storing.first, "steps": steps, "tokens": []})
    last = call["first"] + call["steps"]
    try:
        saved = open_folder(storing.folder) if call["tokens"] else None
    except SaveError:  # it had not come so far
        saved = None
    if saved is not None and saved.files.rpartition("-")[2] in call["tokens"]:
        if saved.header.step < last:
            storing, steps = replace(storing, saved=saved), last - saved.header.step
        elif storing.saved is not None and storing.saved.files == saved.files:
            raise SaveError(
                f"{storing.folder}: all {several(call['steps'], 'step')} of this run are done, and what it began with "
                "is replaced; resume from another folder than save, or give torchrun another --rdzv-id"
            )
    call["tokens"].append(storing.token)
    with writing(storing.folder):
        _write(path, {"launch": launch.name, "calls": {**calls, number: call}})
    return storing, steps


def _read(path: str, name: str) -> dict[str, Any]:
    """The calls of a launch; none if the file is of another one, or cannot be read."""
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        return dict(found["calls"]) if found["launch"] == name else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _write(path: str, value: dict[str, Any]) -> None:
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.new", path)
