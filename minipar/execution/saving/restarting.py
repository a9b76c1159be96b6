"""How a run under torchrun goes on after its processes were started again.

torchrun starts all processes again when one of them fails (--max-restarts), and so does a cluster's scheduler, with the
same --rdzv-id. The script then begins anew, and its `train(..., save=folder)` would, too. So what is saved says which
call of which launch has saved it (`folder.Call`): the same call of another attempt finds there where it had begun, and
does the steps that are left. A run that is complete is trained again, since nothing else gives its `Run`.
"""

from __future__ import annotations

import os
from dataclasses import replace

from minipar.cluster import launched
from minipar.errors import SaveError
from minipar.execution.saving.folder import Call, open_folder
from minipar.execution.saving.keeping import Storing
from minipar.wording import several

_calls = 0  # of train(save=...) in this process


def this_launch() -> str:
    """A name that is the same in all attempts of this launch; "" where torchrun did not start this process, or gave it
    no name and has not restarted it."""
    if not launched.started():
        return ""
    name, again = os.environ["TORCHELASTIC_RUN_ID"], int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    return name if name != "none" or again else ""


def going_on(storing: Storing, steps: int) -> tuple[Storing, int]:
    """What a `train` that saves was asked for; or, where this is another attempt, to go on from its last save for the
    steps that are left. On rank 0, before the run."""
    global _calls
    launch = this_launch()
    if not launch:
        return storing, steps
    call, _calls = Call(launch, _calls, storing.first, steps), _calls + 1
    try:
        saved = open_folder(storing.folder)
    except SaveError:  # it had not come so far
        saved = None
    before = None if saved is None else saved.header.call
    if saved is not None and before is not None and before[:2] == call[:2]:
        left = before.first + before.steps - saved.header.step
        if left > 0:
            storing, steps, call = replace(storing, saved=saved), left, before
        elif storing.saved is not None and storing.saved.files == saved.files:
            raise SaveError(
                f"{storing.folder}: all {several(before.steps, 'step')} of this run are done, and what it began with "
                "is replaced; resume from another folder than save, or give torchrun another --rdzv-id"
            )
    return replace(storing, call=call), steps
