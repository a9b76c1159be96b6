"""Strategies: from a plan to a program. No torch here.

    schedules/   the order of forwards and backwards on each rank: one file a schedule, a generator
    passes/      rewrites of a step: one file a pass
    plan.py      `Plan`, what the user chooses; keys.py the domain of each key; exclusions.py what excludes what
    layout.py    which rank holds which layers
    draft.py     what passes work on; rewriting.py and buckets.py: functions that passes share
    compile.py   the passes of a plan, in their order, and the program that they make

The ranks of one pipeline are neighbours: rank = replica x pp + stage. Importing the package registers the built-in
schedules.
"""

from minipar.strategies.schedules import (
    gpipe,
    interleaved,
    looped_bfs,
    naive,
    one_f_one_b,
    seq1f1b,
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
