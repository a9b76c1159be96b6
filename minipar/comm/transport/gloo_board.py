"""Where the ranks of a group on several hosts announce their collectives: small collectives of a gloo group.

    announced    8 bytes of each rank (a hash, a flag)       all-gather; the hashes differ: a mismatch
    differs      160 bytes of each rank (a text)             all-gather, for the error on every rank
    small rows   as many bytes as the call says              all-gather, once all hashes are known to be equal

What is gathered first has one size whatever ranks call, since gloo aborts the process where sizes differ.

It does what the board of one machine does (board.py), but for one collective at a time: the next one is announced when
this one has started. So all members start everything in this group in one order, the collectives themselves included,
whenever each of them finds time for it.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from minipar.comm.transport.board import HASH_BITS

_TEXT = 160
_SLICE = timedelta(milliseconds=50)  # of a wait in native code: an interrupt can come this late
_NAP = 5e-4
_FLAG, _HERE = 1 << HASH_BITS, 1 << 62


class GlooBoard:
    """The board of one group, in one of its ranks, which is member `index`. `group`: torch's gloo group of these ranks;
    not used where there is one member only."""

    most = 0  # no tensor is summed here: gloo's own sum is as fast

    def __init__(self, members: tuple[int, ...], index: int, group: Any) -> None:
        self.members, self.index, self._group = members, index, group
        self._settled = 0
        self._text = ""
        self._small: Tensor | None = None
        self._words: Tensor | None = None  # of all members, for the collective that is announced now
        self._rows: Tensor | None = None  # the small tensors of all, as bytes
        self._work: Any = None  # what is under way of these two

    def unlink(self) -> None:
        """There is no file."""

    def room(self, number: int) -> bool:
        """Whether collective `number` (from 1 on) may be announced."""
        return number == self._settled + 1

    def announce(self, number: int, hashed: int, flag: bool, text: str, small: Tensor | None) -> int:
        """Announce it; returns its word, which is not 0. RuntimeError when a member is gone."""
        word = _HERE | flag << HASH_BITS | hashed
        self._text, self._small, self._rows = text, small, None
        self._words, self._work = self._gather(torch.tensor([word]))
        return word

    def _gather(self, mine: Tensor) -> tuple[Tensor, Any]:
        """Start to gather a tensor of all members; a row each."""
        if len(self.members) == 1 or not mine.numel():
            return mine.expand(len(self.members), -1), None
        into = torch.empty(len(self.members) * mine.numel(), dtype=mine.dtype)
        return into.view(len(self.members), -1), self._group._allgather_base(into, mine)

    def compare(self, number: int, word: int) -> bool | None:
        """Whether all have announced the same; None while that is not known, or the small tensors are not all here.
        RuntimeError when a member is gone."""
        if not self._arrived():
            return None
        assert self._words is not None
        if any(other | _FLAG != word | _FLAG for other in self._heard):
            return False
        if self._small is not None and self._rows is None:
            self._rows, self._work = self._gather(self._small.contiguous().view(-1).view(torch.uint8))
        return True if self._arrived() else None

    def _arrived(self) -> bool:
        work = self._work
        if work is not None:
            if not work.is_completed():
                return False
            self._work = None
            work.wait()  # (which raises what went wrong)
        return True

    @property
    def _heard(self) -> list[int]:
        assert self._words is not None
        found: list[int] = self._words.view(-1).tolist()
        return found

    def sleep(self, number: int) -> None:
        """Sleep until what is under way has arrived, or for 50 ms."""
        work = self._work
        if work is None:
            time.sleep(_NAP)
        else:
            pause(work)

    def settle(self, number: int) -> None:
        """The collective has started, or never will: the next one can be announced."""
        self._settled = number
        self._small = self._rows = self._words = self._work = None

    def flags(self, number: int) -> list[bool]:
        """The flag of each member."""
        return [bool(word & _FLAG) for word in self._heard]

    def small(self, number: int, k: int, like: Tensor) -> Tensor:
        """The small tensor of the k-th member, which has this form."""
        assert self._rows is not None
        return self._rows[k].clone().view(like.dtype).view(like.shape)

    def texts(self, number: int) -> list[str]:
        """What each member has announced. All members call this, since all have seen that their hashes differ."""
        mine = torch.frombuffer(bytearray(self._text.encode()[:_TEXT].ljust(_TEXT, b"\0")), dtype=torch.uint8)
        found, work = self._gather(mine)
        if work is not None:
            while not work.is_completed():
                pause(work)
            work.wait()
        return [bytes(row.tolist()).split(b"\0", 1)[0].decode(errors="replace") for row in found]


def pause(work: Any) -> None:
    """Wait for a work of gloo, for a slice at most. What went wrong is not raised here."""
    try:
        work.wait(_SLICE)
    except RuntimeError:  # the time is over, which does nothing else to a collective; or the work has failed
        return
