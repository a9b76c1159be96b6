"""Trace: when every instruction of a program ran, predicted or measured, and what follows from it.

A trace has the program and two numbers for each instruction: its start and its end. Bubbles, memory, bytes, the
critical path and pictures are computed from these. Times are seconds in measured traces, and the unit of the costs in
predicted ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from minipar.program import COMPUTE, Instruction, Op, Program, Value, comm_volume, version_of
from minipar.program.verify import service
from minipar.program.verify.staleness import alive
from minipar.trace.lifetimes import KINDS, lifetimes
from minipar.trace.memory_series import Curve, Series
from minipar.wording import several

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from minipar.trace.comparison import Comparison
    from minipar.trace.kineto import Source
    from minipar_widgets import Timeline


T = TypeVar("T")


class Event(NamedTuple):
    """One instruction as it ran. `version_used` and `version_applied` count updates of the rank's parameters."""

    rank: int
    index: int  # type: ignore[assignment]
    stream: str
    start: float
    end: float
    instruction: Instruction
    bytes: int
    version_used: int | None
    version_applied: int | None

    @property
    def duration(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Trace:
    """Start and end of every instruction of `program`; `starts[r][k]` belongs to `program.ranks[r][k]`.

    size     memory of a value on a rank, in `unit`
    kind     "predicted" or "measured"
    unit     "bytes", or "activations": 1 is what a rank keeps for one micro-batch
    data     bytes of input rows that each rank holds all the time
    note     a line that every picture shows (such as how the prediction was made)
    overruns for each rank, the indices of instructions whose real work took longer than on the emulated device
    series   for each rank, every change of its memory, including temporary memory: tracked in the run, or predicted
             from profiles of layers. Without it memory is computed from the values' lifetimes
    clock_error   of ranks on several hosts: seconds by which times of two hosts may be wrong against each other; what
             their clocks differ by was measured and taken out
    """

    program: Program
    starts: Sequence[Sequence[float]]
    ends: Sequence[Sequence[float]]
    size: Callable[[int, Value], float]
    kind: str = "predicted"
    unit: str = "bytes"
    data: Sequence[int] = ()
    note: str = ""
    overruns: Sequence[Sequence[int]] = ()
    series: Sequence[Series] = ()
    clock_error: float = 0.0
    _cache: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __repr__(self) -> str:
        return f"<{self.summary()}>"

    def summary(self) -> str:
        """One line with time, bubbles and peak memory."""
        peak = max(self.peak_memory(), default=0)
        memory = f"{peak / 2**20:.2f} MiB" if self.unit == "bytes" else several(round(peak, 3), "activation")
        time = f"{self.time * 1e3:.2f} ms" if self.kind == "measured" or self.unit == "bytes" else f"{self.time:g}"
        return (
            f"{self.kind} trace: {several(len(self.program.ranks), 'rank')}, "
            f"{several(len(self.program), 'instruction')}, time {time}, "
            f"bubble {self.bubble_of_total():.1%} of total ({self.bubble_of_ideal():.1%} of ideal), "
            f"peak memory {memory}"
        )

    # time ------------------------------------------------------------------------------------------------------------

    @cached_property
    def _alike(self) -> tuple[int, ...]:
        """For each rank the first one that does the same at the same times, and with values of the same sizes:
        `simulate` gives these ranks the same list of times."""
        first = self.program.representatives
        return tuple(
            one if self.starts[one] is self.starts[rank] and self.ends[one] is self.ends[rank] else rank
            for rank, one in enumerate(first)
        )

    def _of_each(self, found: Callable[[int], T]) -> list[T]:
        """`found(rank)` for every rank. It is asked only once for ranks that are alike."""
        known = {rank: found(rank) for rank in dict.fromkeys(self._alike)}
        return [known[rank] for rank in self._alike]

    @cached_property
    def span(self) -> tuple[float, float]:
        """First start and last end over all ranks. (Receives are posted early, so their starts do not count.)"""
        RECV, ranks = Op.RECV, sorted(set(self._alike))
        begun = chain.from_iterable(zip(self.program.ops[rank], self.starts[rank], strict=True) for rank in ranks)
        first = min((start for op, start in begun if op is not RECV), default=0.0)
        return first, max((max(self.ends[rank]) for rank in ranks if len(self.ends[rank])), default=0.0)

    @property
    def time(self) -> float:
        """Makespan: from the first start to the last end."""
        return self.span[1] - self.span[0]

    @property
    def events(self) -> list[Event]:
        """Every instruction as it ran, rank by rank in program order."""
        return [event for rank in range(len(self.program.ranks)) for event in self.events_of(rank)]

    def events_of(self, rank: int) -> Iterator[Event]:
        updates = dict.fromkeys(range(-1, len(self.program.groups)), 0)  # (-1: all groups of an imported trace)
        for index, ins in enumerate(self.program.ranks[rank]):
            groups = (self._groups_of(ins) if ins.op in COMPUTE else ()) or (-1,)
            used = min(updates[g] for g in groups) if ins.op in COMPUTE else None
            if used is not None and (named := max(map(version_of, ins.reads), default=-1)) >= 0:
                used = named
            applied = None
            if ins.op is Op.STEP:
                updates.update((g, updates[g] + 1) for g in groups)
                applied = min(updates[g] for g in groups)
            yield Event(
                rank, index, ins.stream, self.starts[rank][index], self.ends[rank][index], ins,
                self.sent(rank, ins), used, applied,
            )  # fmt: skip

    def _groups_of(self, ins: Instruction) -> tuple[int, ...]:
        """The trainable parameter groups that a compute instruction works on."""
        if ins.op is Op.STEP:
            return ins.layers if self.program.groups else ()  # (an imported trace has no groups)
        known = self._cache.setdefault("groups", {})
        if ins.layers not in known:
            found = {g for layer in ins.layers for g in self.program.groups_of_layer[layer]}
            known[ins.layers] = tuple(sorted(g for g in found if self.program.groups[g].trainable))
        return known[ins.layers]

    @cached_property
    def busy(self) -> list[float]:
        """For each rank, the time spent in compute instructions."""

        def of(rank: int) -> float:
            rows = zip(self.program.ranks[rank], self.starts[rank], self.ends[rank], strict=True)
            return sum(e - s for ins, s, e in rows if ins.stream == "compute")

        return self._of_each(of)

    def bubble_of_total(self) -> float:
        """Idle time over all ranks / (ranks x makespan)."""
        whole = len(self.busy) * self.time
        return max(0.0, 1 - sum(self.busy) / whole) if whole else 0.0

    def bubble_of_ideal(self) -> float:
        """Idle time over all ranks / busy time over all ranks."""
        work = sum(self.busy)
        return max(0.0, len(self.busy) * self.time - work) / work if work else 0.0

    def window_bubble(self) -> float:
        """The zero-bubble papers' measure: the maximum over ranks of (last end - first start) - busy time, of its
        compute."""
        windows = []
        for r in sorted(set(self._alike)):
            mine = [k for k, ins in enumerate(self.program.ranks[r]) if ins.stream == "compute"]
            if mine:
                windows.append(self.ends[r][mine[-1]] - self.starts[r][mine[0]] - self.busy[r])
        return max(0.0, max(windows, default=0.0))

    # memory and bytes ------------------------------------------------------------------------------------------------

    def memory(self, rank: int) -> Curve:
        """Memory of a rank over time: from `series` if the trace has it, otherwise from the values' lifetimes."""
        if not self.series and not self.data:
            rank = self._alike[rank]
        key = f"memory {rank}"
        if key in self._cache:
            return self._cache[key]
        curve = self.series[rank].curve(self.span[0]) if self.series else lifetimes(self, rank)
        self._cache[key] = curve
        return curve

    def peak_memory(self) -> list[int] | list[float]:
        """For each rank, the highest memory, in bytes (int), or in units of activations if no bytes are known."""
        peaks = [self.memory(rank).peak for rank in range(len(self.program.ranks))]
        return [round(peak) for peak in peaks] if self.unit == "bytes" else [round(peak, 9) for peak in peaks]

    def peak_by_kind(self, rank: int) -> dict[str, int]:
        """For each kind of memory, the bytes that a rank holds at the moment of its peak."""
        curve = self.memory(rank)
        k = max(range(len(curve.total)), key=curve.total.__getitem__, default=0)
        return {name: round(column[k]) for name, column in curve.kinds.items()}

    def in_flight(self) -> list[float]:
        """For each rank, the most activations held at the same time; 1 is one micro-batch in all layers of the rank's
        share.

        With a split backward they count until the weight half is done.
        """
        HALF, SEND, RECV = Op.BACKWARD_INPUT, Op.SEND, Op.RECV

        def of(rank: int) -> float:
            now = peak = 0
            for op, ins in zip(self.program.ops[rank], self.program.ranks[rank], strict=True):
                if op is SEND or op is RECV or op is HALF:  # (an input half leaves as much as it frees)
                    continue
                for value in ins.writes:
                    if value.kind == "saved":
                        now += 1
                if now > peak:
                    peak = now
                for value in ins.frees:
                    if value.kind == "saved" or value.kind == "saved_weight":
                        now -= 1
            kept = self.program.kept[rank]
            return peak / kept if kept else 0.0

        return [int(x) if x == int(x) else x for x in self.program.of_each(of)]

    def weight_versions(self) -> list[int]:
        """For each rank, the largest number of versions of its parameters; 1 in a synchronous program."""
        return list(self.program.of_each(lambda rank: alive(self.program.ranks[rank])))

    def staleness(self) -> list[int]:
        """For each rank, the largest number of updates between the version that a forward used and the version that its
        gradient updated."""
        if self.program.serving is not None:
            return service.staleness(self.program)

        def of(rank: int) -> int:
            used: dict[tuple[int, int, int], int] = {}
            open_: dict[int, list[tuple[int, int, int]]] = {}
            most = 0
            for event in self.events_of(rank):
                ins, version = event.instruction, event.version_used or 0
                for g in self._groups_of(ins) if ins.op in COMPUTE or ins.op is Op.STEP else ():
                    key = ins.step, ins.microbatch, g
                    if ins.op is Op.FORWARD:
                        used.setdefault(key, version)
                    elif ins.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
                        open_.setdefault(g, []).append(key)
                    elif ins.op is Op.STEP:
                        most = max([most, *(version - used[each] for each in open_.pop(g, ()) if each in used)])
            return most

        return list(self.program.of_each(of))

    def sent(self, rank: int, ins: Instruction) -> int:
        """Bytes that a rank puts on the wire for one instruction: of a collective on n ranks (n-1)/n of its size, and
        twice that of a sum."""
        return comm_volume.sent(self.program, self.size, rank, ins) if self.unit == "bytes" else 0

    def bytes_sent(self) -> list[int]:
        """For each rank, the bytes sent in the whole program."""
        return self._of_each(lambda rank: sum(self.sent(rank, ins) for ins in self.program.ranks[rank]))

    def bytes_by_link(self) -> dict[tuple[int, comm_volume.Receiver], int]:
        """Bytes sent for each (source, target). Of collectives the target is the group, within which the backend
        chooses the way."""
        return comm_volume.by_link(self.program, self.size) if self.unit == "bytes" else {}

    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes sent by all ranks together for each kind of value: parameters, gradients, activations (with their
        gradients), ..."""
        kinds: dict[str, int] = {}
        sent = comm_volume.by_kind(self.program, self.size) if self.unit == "bytes" else {}
        for kind, size in sent.items():
            kinds[KINDS[kind]] = kinds.get(KINDS[kind], 0) + size
        return dict(sorted(kinds.items()))

    def messages_per_microbatch(self) -> float:
        """Point-to-point messages per micro-batch of one replica."""
        sends = sum(ops.count(Op.SEND) for ops in self.program.ops)
        return sends / (self.program.replicas * self.program.microbatches * self.program.steps)

    # causes ----------------------------------------------------------------------------------------------------------

    def critical_path(self) -> list[Event]:
        """The chain of instructions whose times add up to the makespan, in order: each waited for the one before it."""
        from minipar.trace.critical_path import critical_path

        return critical_path(self)

    def compare(self, other: Trace) -> Comparison:
        """This trace beside another one of the same program, instruction by instruction."""
        from minipar.trace.comparison import Comparison

        return Comparison(self, other)

    # pictures --------------------------------------------------------------------------------------------------------

    def plot(self, **options: Any) -> Figure:
        """Timeline (a lane per rank) with the memory curves under it, as a matplotlib figure. See `drawing.draw`."""
        from minipar.trace import drawing

        return drawing.draw([self], **options)

    def show(self, **options: Any) -> Timeline:
        """The interactive picture, in which you can zoom, ask and play, with the options of `minipar_widgets.Timeline`;
        `show().to_html(path)` writes a page with it."""
        from minipar_widgets import Timeline

        return Timeline(self, **options)

    # in and out ------------------------------------------------------------------------------------------------------

    def to_perfetto(self, path: str | os.PathLike[str] | None = None) -> str:
        """Chrome Trace Event JSON, for ui.perfetto.dev and chrome://tracing; or the path. See
        `interchange.to_perfetto`."""
        from minipar.trace import interchange

        return interchange.to_perfetto(self, path)

    @staticmethod
    def from_kineto(sources: Source | Sequence[Source]) -> Trace:
        """A trace from files of torch's profiler, one per rank. See `kineto.from_kineto`."""
        from minipar.trace import kineto

        return kineto.from_kineto(sources)
