"""What pages begin with: first pictures, texts in the editor, and which exercises a page can check.

All of it is found in a Python that has the standard library alone, as a page's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from docs.site import engine

EXAMPLES = [
    ("a schedule", '''@minipar.schedule("mine")
def mine(rank, stages, microbatches):
    for i in range(microbatches):
        yield Forward(i)
    for i in reversed(range(microbatches)):
        yield Backward(i)
'''),
    ("a schedule that gets stuck", '''@minipar.schedule("stuck")
def stuck(rank, stages, microbatches):
    for i in range(microbatches):
        if rank == 0:              # rank 0 wants the first gradient at once,
            yield Forward(i)
            yield Backward(i)
        else:                      # the others run all forwards first
            yield Forward(i)
    if rank:
        for i in range(microbatches):
            yield Backward(i)
'''),
    ("a collective", '''@minipar.collective("along-the-line", "allreduce")
def along_the_line(setting, rank):
    everything = range(setting.ranks)
    if rank > 0:
        yield Reduce(everything, rank - 1)     # add what comes from the left,
    if rank < setting.ranks - 1:
        yield Send(everything, rank + 1)       # hand the sum on,
        yield Copy(everything, rank + 1)       # and wait until the whole of it comes back
    if rank > 0:
        yield Send(everything, rank - 1)
'''),
    ("a pass", '''from minipar.strategies.passes.checkpoint import recompute
from minipar.strategies.segments import schedules

@minipar.pass_("some-microbatches", after="layers")
def some_microbatches(draft):
    """Layers run forward again for the first two micro-batches."""
    moves = schedules(1, draft.layout, draft.actions)
    def again(rank, row):
        chunks = [(draft.layout.trained(stage), moves[stage]) for stage in draft.layout.placement[rank]]
        return recompute(row, chunks, microbatches=range(2))
    return draft.each(again)
'''),
]  # fmt: skip
_FIRST = """
import base64, json
from minipar_widgets.live import made
from minipar_widgets.page import Page
def plain(value):
    return {"base64": base64.b64encode(value).decode()} if isinstance(value, bytes) else list(value)
found = {name: json.dumps(Page(made(name)).changes(), default=plain, separators=(",", ":")) for name in given}
"""
_PASS = """
from minipar_course.in_page import checked
found = []
for imports, code in given:
    try:
        found.append(checked(imports, code)[0])
    except ImportError:
        found.append(False)
"""


def alone(program: str, given: Any) -> Any:
    """Run a program, which makes `found` of `given`, in a Python without packages."""
    homes = [str(home) for home in engine.HOMES.values()]
    text = (
        f"import json, sys\nsys.path[:0] = {homes!r}\ngiven = json.load(sys.stdin)\n{program}\nprint(json.dumps(found))"
    )
    command = [sys.executable, "-I", "-S", "-c", text]
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def first_pictures(names: Sequence[str]) -> dict[str, str]:
    """For each view what a page shows before Python is there, as JSON."""
    found: dict[str, str] = alone(_FIRST, list(names))
    return found


def passing(answers: Sequence[tuple[str, str]]) -> set[tuple[str, str]]:
    """Of answers (imports, cell) those that a page can check: their solution passes without packages and ranks."""
    found = alone(_PASS, list(answers))
    return {answer for answer, passed in zip(answers, found, strict=True) if passed}
