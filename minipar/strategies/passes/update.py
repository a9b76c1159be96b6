"""The update: a rank's STEP, and what passes have put around it, stands behind its last backward.

    ranks    F 0 | F 1 | B 1 | B 0 | AR 1 | AR 0          passes change both by themselves,
    update   NORM | STEP 0,1                              until this one joins them

With overlap=priority it stands in the next step instead: see `priority.py`.
"""

from __future__ import annotations

from minipar.strategies.draft import Draft


def update_at_the_end(draft: Draft) -> Draft:
    """STEP, with what belongs to it, stands behind the last backward."""
    return draft.each(lambda rank, row: [*row, *draft.update[rank]])
