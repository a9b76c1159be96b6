"""Whether a rank's memory is followed, and why: to see it, to bound it, or both. `execute` sends this to its ranks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import TracebackType

from minipar.execution.executor import Executor
from minipar.execution.memory.tracker import Tracker
from minipar.trace.memory_series import Series

SERIES = 8  # how many of the last passes keep everything


@dataclass(frozen=True)
class Watching:
    """series: bring back what happened; capacity: bytes of the emulated device, if it has a limit."""

    series: bool = False
    capacity: int | None = None

    def start(self, executor: Executor) -> Followed:
        """Follow the executor from now on, if there is a reason to. DeviceOutOfMemory if its layers do not fit."""
        wanted = self.series or self.capacity is not None
        return Followed(Tracker(executor, self.capacity) if wanted else None)


@dataclass
class Followed:
    """Entered for every pass of an executor through its program."""

    tracker: Tracker | None
    passes: int = 0
    series: dict[int, Series] = field(default_factory=dict)

    def __enter__(self) -> None:
        if self.tracker is not None:
            self.tracker.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self.tracker is None:
            return
        self.tracker.__exit__(kind, error, where)
        if error is not None:
            self.tracker.close()  # so that nothing of the rank outlives the error
            return
        self.series[self.passes] = self.tracker.take_series()
        self.series.pop(self.passes - SERIES, None)
        self.passes += 1

    @property
    def last(self) -> Series:
        """The series of the last pass."""
        assert self.tracker is not None
        return replace(self.series[self.passes - 1], highest=self.tracker.highest)

    def series_of_passes(self) -> dict[int, Series]:
        """The series that were kept, by pass. The `highest` of each is the most that any pass needed."""
        assert self.tracker is not None
        return {k: replace(series, highest=self.tracker.highest) for k, series in self.series.items()}
