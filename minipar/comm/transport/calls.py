"""What ranks say of the collectives that they call, so that none runs into another one.

gloo aborts the process when sizes differ, and mixes up bytes when dtypes or the order differ; NCCL hangs. So the ranks
of a group exchange an announcement of each collective, and go on only if all have called the same:

    16 bytes: hash of what must agree | a text, for the error

In shared memory (arena.py) it stands beside the first piece of the data, and costs no wait of its own. Elsewhere it is
a small collective of gloo (gloo.py), which has one size whatever ranks call.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Generator, Sequence
from typing import Any, Protocol

from minipar.errors import CollectiveMismatch

LENGTH = 192  # bytes of an announcement
_HASH = 16


class Need(Protocol):
    """What the next step of a collective waits for."""

    def met(self) -> bool:
        """Whether it is there. RuntimeError or ConnectionError when a peer is gone, here or from the next step."""

    def sleep(self, short: bool) -> None:
        """Sleep until it may be there, for 50 ms at most, or (`short`) for half a millisecond."""


Steps = Generator[Need, None, Any]  # of a collective, on one rank; it may return a work of gloo or NCCL


@functools.lru_cache(4096)
def announcement(text: str, key: str | None = None) -> bytes:
    """What a rank says of a collective. All ranks must agree in `key`, or in `text` if there is no key."""
    words = text.encode()[: LENGTH - _HASH].ljust(LENGTH - _HASH, b"\0")
    return hashlib.blake2b((key or text).encode(), digest_size=_HASH).digest() + words


def compare(members: tuple[int, ...], calls: Sequence[bytes]) -> None:
    """CollectiveMismatch if the announcements of the members differ."""
    if any(call[:_HASH] != calls[0][:_HASH] for call in calls):
        texts = [call[_HASH:].rstrip(b"\0").decode(errors="replace") for call in calls]
        raise CollectiveMismatch(_difference(members, texts))


def _difference(members: tuple[int, ...], texts: Sequence[str]) -> str:
    """What differs: "allreduce of a list of 2 int64 for sum" and the like, by rank; the first two that differ first."""
    other = next((text for text in texts if text != texts[0]), texts[0])
    order = sorted(range(len(texts)), key=lambda k: (k != 0, k != texts.index(other), texts[k] == texts[0], k))
    names = {text.partition(" of ")[0] for text in texts}
    if len(names) == 1:
        calls = ", ".join(f"rank {members[k]} has {texts[k].partition(' of ')[2]}" for k in order)
        return f"{names.pop()}: ranks differ: {calls}"
    calls = ", ".join(f"rank {members[k]} calls {texts[k]}" for k in order)
    return f"ranks differ in their collectives (all must call the same ones, in one order): {calls}"
