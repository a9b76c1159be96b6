"""What ranks print, line by line, with the rank's name."""

from __future__ import annotations

import os
import sys

_CHUNK = 1 << 16
_DRAIN = 1 << 26  # bytes read at most at the end of a run; a process that a rank started may print for ever


class Printer:
    """Prints what comes out of one rank's pipe, whole lines only."""

    def __init__(self, rank: int, descriptor: int) -> None:
        self.descriptor = descriptor
        self.open = True
        self._prefix = f"[rank {rank}] "
        self._rest = b""
        os.set_blocking(descriptor, False)

    def pump(self, limit: int = _CHUNK) -> None:
        """Print the lines that are complete, reading at most about `limit` bytes; never blocks."""
        total = 0
        while self.open and total < limit:
            try:
                data = os.read(self.descriptor, _CHUNK)
            except BlockingIOError:
                break
            self.open = bool(data)
            total += len(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            self._print(lines)

    def finish(self) -> None:
        """Print all that is there, also a last line that has no end."""
        self.pump(_DRAIN)
        if self._rest:
            rest, self._rest = self._rest, b""
            self._print([rest])

    def _print(self, lines: list[bytes]) -> None:
        if lines:
            text = [self._prefix + line.decode("utf-8", "replace").rstrip("\r") + "\n" for line in lines]
            sys.stdout.write("".join(text))
            sys.stdout.flush()
