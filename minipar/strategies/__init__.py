"""One file an idea: schedules, and the passes that turn them into programs. No torch here.

Importing the package registers the built-in schedules.
"""

from minipar.strategies.schedules import (
    gpipe,
    interleaved,
    looped_bfs,
    naive,
    one_f_one_b,
    terapipe,
    zb_v,
    zero_bubble,
)

# isort: split
from minipar.strategies.schedules import chimera, dualpipe, dualpipe_v

# isort: split
from minipar.strategies.schedules import (  # (without flushes; last in lists)
    ampnet,
    pipedream,
    pipedream_2bw,
    pipedream_vertical,
)
from minipar.strategies.schedules.registry import find, schedule, schedules

__all__ = [
    "ampnet", "chimera", "dualpipe", "dualpipe_v", "find", "gpipe", "interleaved", "looped_bfs", "naive", "one_f_one_b",
    "pipedream", "pipedream_2bw", "pipedream_vertical", "schedule", "schedules", "terapipe", "zb_v",
    "zero_bubble",
]  # fmt: skip
