"""The update: a rank's STEP, and what passes have added to it, comes after the rank's last backward.

    ranks    F 0 | F 1 | B 1 | B 0 | AR 1 | AR 0          earlier passes change the two rows separately;
    update   NORM | STEP 0,1                              this pass joins them

With overlap=priority the update is part of the next step instead: see `priority.py`.
"""

from __future__ import annotations

from minipar.strategies.draft import Draft


def update_at_the_end(draft: Draft) -> Draft:
    """STEP, and what belongs to it, comes after the last backward."""
    return draft.each(lambda rank, row: [*row, *draft.update[rank]])
