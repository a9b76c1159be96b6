"""Where the ranks of a group that share a machine announce their collectives: a file that all have mapped.

Each rank has a ring of entries and writes one for each collective of the group, in order. An entry is one aligned
word of 8 bytes,

    | 16 bits: number of the collective | 1 bit: flag | 47 bits: hash of its text |

so that others see it as a whole or not at all. Each entry also has a text, for error messages, and room for a small
tensor. A word behind the ring says how many collectives the rank has settled, that is, read for the last time. The
entry for collective n + DEPTH overwrites that for n, but only when all ranks have settled n. Ranks that wait sleep on
one more word, the gong: the rank that announces a collective last writes its number there, and wakes all at once.

There is a `fence` (shared_memory.py) between a small tensor and the word that announces it, on both sides, and between
the last read of others' entries and the word that lets them be overwritten.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os

import torch

from minipar.comm.transport import shared_memory
from minipar.comm.transport.shared_memory import fence
from minipar.errors import RankError

DEPTH = 64
SMALL = 4096  # bytes of a tensor that travels on the board itself
_TEXT = 128
_SETTLED, _RING = DEPTH, DEPTH + 1  # words of a rank
HASH_BITS = 47
_NUMBERS = 1 << 16


def fingerprint(key: str) -> int:
    """A hash of a text, the same in every process."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") >> (64 - HASH_BITS)


def _reserve(file: int, size: int) -> None:
    """Take so many bytes of the disk: where there is no room, a store to the map would end the process."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # (not every file system can)
                raise


class Board:
    """The board of one group, in one of its ranks. `path` is the same for all and new for each group; `members` are
    their numbers among all ranks, `index` is this rank's place among them. RankError if the file cannot be made."""

    most = SMALL  # bytes of a tensor that is summed here

    def __init__(self, path: str, members: tuple[int, ...], index: int) -> None:
        self.path, self.members, self.index = path, members, index
        count = len(members)
        self._gong = count * _RING
        self._texts = (self._gong + 1) * 8
        self._tensors = -(-(self._texts + count * DEPTH * _TEXT) // SMALL) * SMALL
        size = self._tensors + count * DEPTH * SMALL
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                _reserve(file, size)
                os.ftruncate(file, size)  # to the same size, whoever comes first
                self._map = mmap.mmap(file, size)
            finally:
                os.close(file)
        except OSError as error:
            raise RankError(
                f"the temporary folder {os.path.dirname(path)} cannot be used: {error.strerror}; free some room there, "
                "or set TMPDIR"
            ) from error
        self._words = memoryview(self._map)[: self._texts].cast("Q")
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._rings = [k * _RING for k in range(count)]
        self._address = self._bytes.data_ptr() + 8 * self._gong
        self._others = [ring for k, ring in enumerate(self._rings) if k != index]

    def unlink(self) -> None:
        """Remove the file's name, once all ranks have mapped it."""
        if self.index == 0:
            os.unlink(self.path)

    def room(self, number: int) -> bool:
        """Whether entry `number` (from 1 on) of this rank may be written."""
        words = self._words
        return number <= DEPTH or all(words[ring + _SETTLED] >= number - DEPTH for ring in self._rings)

    def announce(self, number: int, hashed: int, flag: bool, text: str, small: torch.Tensor | None) -> int:
        """Write entry `number` of this rank; returns its word."""
        start = self._texts + (self.index * DEPTH + number % DEPTH) * _TEXT
        self._map[start : start + _TEXT] = text.encode()[:_TEXT].ljust(_TEXT, b"\0")
        fence()
        if small is not None:
            self.small(number, self.index, small).copy_(small)
            fence()
        word = (number % _NUMBERS) << 48 | flag << HASH_BITS | hashed
        self._words[self._rings[self.index] + number % DEPTH] = word
        fence()
        if self._complete(number):
            self._words[self._gong] = number
            shared_memory.wake(self._address)
        return word

    def _complete(self, number: int) -> bool:
        words, place, low = self._words, number % DEPTH, number % _NUMBERS
        return all(words[ring + place] >> 48 == low for ring in self._others)

    def sleep(self, number: int) -> None:
        """If a member's entry `number` is missing, sleep until some collective is announced by all, or for 50 ms."""
        value = self._words[self._gong]
        fence()
        if not self._complete(number):
            shared_memory.wait(self._address, value & 0xFFFFFFFF)

    def compare(self, number: int, word: int) -> bool | None:
        """Whether all entries agree with `word`, this rank's own: False as soon as one differs, None while some are
        missing."""
        words, place, flag = self._words, number % DEPTH, 1 << HASH_BITS
        complete = True
        for ring in self._others:
            other = words[ring + place]
            if other | flag != word | flag:
                if other >> 48 == word >> 48:
                    return False
                complete = False
        return True if complete else None

    def settle(self, number: int) -> None:
        """Say that this rank has read entry `number` of all ranks for the last time."""
        fence()
        self._words[self._rings[self.index] + _SETTLED] = number

    def flags(self, number: int) -> list[bool]:
        """The flag of each member's entry; all must be there."""
        return [bool(self._words[ring + number % DEPTH] >> HASH_BITS & 1) for ring in self._rings]

    def small(self, number: int, k: int, like: torch.Tensor) -> torch.Tensor:
        """The small tensor of the k-th member's entry, which has this form."""
        start = self._tensors + (k * DEPTH + number % DEPTH) * SMALL
        size = like.numel() * like.element_size()
        return self._bytes[start : start + size].view(like.dtype).view(like.shape)

    def texts(self, number: int) -> list[str]:
        """What each member announced under this number; "" for those that have not."""
        found = []
        for k, ring in enumerate(self._rings):
            start = self._texts + (k * DEPTH + number % DEPTH) * _TEXT
            there = self._words[ring + number % DEPTH] >> 48 == number % _NUMBERS
            fence()
            found.append(self._map[start : start + _TEXT].split(b"\0", 1)[0].decode(errors="replace") if there else "")
        return found
