"""An exception of a rank as data: what the driver shows of it."""

from __future__ import annotations

import sys

from minipar.cluster import failures

# No instruction of a function has a line: how Python writes that, in 3.11 (8 instructions a byte) and before.
NO_LINES = b"\xff" * 20 if sys.version_info >= (3, 11) else b"\xfe\x80"


def stopped() -> None:
    raise KeyboardInterrupt


def test_a_frame_between_two_lines_is_shown_with_the_first_line_of_its_function():
    """An interrupt can come at an instruction that belongs to no line."""
    first = stopped.__code__.co_firstlineno
    stopped.__code__ = stopped.__code__.replace(co_linetable=NO_LINES)
    try:
        stopped()
    except KeyboardInterrupt as caught:
        error = caught
    remote = failures.capture(error, hide="")  # (out of the except: pytest cannot show such a frame)
    assert remote.segments[0].frames[-1] == (__file__, first, "stopped", "def stopped() -> None:")
    assert f"line {first}, in stopped\n" in failures.traceback_text(remote)
