"""Interactive pictures of programs and traces for Jupyter: zoom, hover and keys in the browser, data from the engine.

Names load on first use. No widget imports torch.

    base.py             `View` and `Explorer`: a summary of one line, a caption, a picture, rows for the table, to_html
    <view>_model.py     computes what a view shows, with the engine; nothing in it depends on pixels
    columns.py          packs a trace into binary columns
    raster.py           draws the still picture by the same rule as js/lod.js
    js/*.js             plain modules with their tests beside them; inline.py joins them for a page

Python prepares the data and JavaScript draws them: the browser handles zoom, hover and keys without the kernel.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.2.0"

_homes = {
    "minipar_widgets.base": ("View", "Explorer"),
    "minipar_widgets.timeline": ("Timeline",),
    "minipar_widgets.live_run": ("live", "LiveRun"),
    "minipar_widgets.schedule_explorer": ("ScheduleExplorer",),
    "minipar_widgets.editor": ("ScheduleEditor",),
    "minipar_widgets.memory_explorer": ("MemoryExplorer",),
    "minipar_widgets.collective_player": ("CollectivePlayer",),
    "minipar_widgets.checkpoint_explorer": ("CheckpointExplorer",),
    "minipar_widgets.server_view": ("ServerView",),
    "minipar_widgets.sharding_explorer": ("ShardingExplorer",),
    "minipar_widgets.plan_explorer": ("PlanExplorer",),
}
_home_of = {name: home for home, names in _homes.items() for name in names}

__all__ = sorted(_home_of)


def __getattr__(name: str) -> Any:
    if name not in _home_of:
        raise AttributeError(f"module 'minipar_widgets' has no attribute {name!r}")
    value = getattr(importlib.import_module(_home_of[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
