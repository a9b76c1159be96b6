"""A rank that waits for its GPU says so in its notes, as one that waits for a message does.

While torch waits for a GPU it spins: the rank uses a whole core, as if it were busy. Where ranks wait for each other
over NCCL, that is what all of them do: a receive is a kernel that ends when the message has come, and a rank waits for
the kernel. From outside nobody sees whether a GPU computes or waits for a message; the watchdog only sees for how long.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from minipar.cluster import notes

P = ParamSpec("P")
T = TypeVar("T")
_WORDS = "its GPU, in "


def tell() -> None:
    """In a rank with a GPU: from now on torch's `synchronize` of a device, an event or a stream says that it waits.
    (What waits inside of torch's own code, such as `Tensor.item`, does not: such a rank counts as busy.)"""
    import torch

    owners: dict[str, Any] = {"": torch.cuda, "Event.": torch.cuda.Event, "Stream.": torch.cuda.Stream}
    for name, owner in owners.items():
        owner.synchronize = told(owner.synchronize, f"torch.cuda.{name}synchronize")


def told(wait: Callable[P, T], name: str) -> Callable[P, T]:
    """A function that waits for a GPU, and says so if the rank's main thread calls it."""

    @functools.wraps(wait)
    def waiting(*args: P.args, **kwargs: P.kwargs) -> T:
        if threading.current_thread() is not threading.main_thread():
            return wait(*args, **kwargs)
        notes.waiting(_WORDS + name, time.monotonic())
        try:
            return wait(*args, **kwargs)
        finally:
            notes.going_on()

    return waiting


def is_one(operation: str) -> bool:
    """Whether an operation of a rank's notes is such a wait."""
    return operation.startswith(_WORDS)
