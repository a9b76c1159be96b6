"""The loop that a rank runs: the executor of a Program on real tensors and real messages.

    live[value]       every value that the rank has: outputs, gradients, graphs, parameters and their versions, slices,
                      copies on the host and on the disk
    pending[value]    what is on its way: a message, a copy, the result of a collective

    for each instruction, in order:
        wait for what it reads
        FORWARD, RECOMPUTE, BACKWARD, STEP                 compute now
        SEND, RECV, collectives, OFFLOAD, FETCH            start, and go on
        drop what it frees

It is an interpreter: it knows no strategy. What it needs of the device, a CPU or a GPU, is in `streams`: on a GPU "now"
means to put it in the device's queue, "wait" that the device waits, and the walk goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from minipar.cluster import notes
from minipar.comm.communicator import Communicator
from minipar.comm.links import Links
from minipar.data.batches import Batch, BatchPart
from minipar.errors import RankError
from minipar.execution import naming_layers, repartition
from minipar.execution.compute import Compute
from minipar.execution.copies import Copies
from minipar.execution.dtypes import check_narrow, narrow
from minipar.execution.dynamic_schedule import DynamicSchedule
from minipar.execution.emulation import Delays, EmulatedDevice, Joined, end_of, stamp_later
from minipar.execution.fitting import check_fit
from minipar.execution.lines import Slice
from minipar.execution.mean_loss import Loss
from minipar.execution.state import State, Table
from minipar.execution.streams import Mark, Streams, read_all, streams_of
from minipar.execution.updating import Optimizer, Scheduler, Update, check_update, forms_of
from minipar.models import randomness, selective_checkpoint
from minipar.models.network import edges_of
from minipar.models.nodes import Cut
from minipar.models.parameter_groups import parameters_of
from minipar.models.tensors import count_bytes, dtype_named, layers_of
from minipar.program import (
    BACKWARDS,
    COLLECTIVES,
    COMPUTE,
    COPIES,
    SERVICE,
    Action,
    Instruction,
    Op,
    Program,
    Synchronous,
    Value,
    home,
    repartitions,
    tier,
    version_of,
)
from minipar.strategies.passes.versions import without_versions

if TYPE_CHECKING:
    from minipar.execution.memory.tracker import Tracker
    from minipar.trace.memory_series import Series

_ON_LAYERS = (Op.FORWARD, Op.RECOMPUTE, *BACKWARDS)
_USED_UP = ("grad", "grad_shard")  # who uses a gradient frees it, as autograd's `.grad`
_LATER = object()  # an instruction was started, and notes its end itself


@dataclass
class PassRecord:
    """What a rank brings back of one pass through its program. Times are clock readings in seconds."""

    losses: list[float]  # per step of the program: this rank's share of the mean (0 where it does not hold the end)
    starts: list[float]
    ends: list[float]
    gradients: list[list[tuple[Slice, Cut | None]]] = field(default_factory=list)  # of each update, with their cuts
    overruns: list[int] = field(default_factory=list)  # instructions that took longer than the emulated device
    order: list[Action] = field(default_factory=list)  # of a rank that decides as it runs: what it decided
    sizes: dict[Value, int] = field(default_factory=dict)  # bytes of its values
    data: int = 0  # bytes of its rows
    series: Series | None = None  # of its memory, if that was followed


class _Prepared(NamedTuple):
    """What the loop needs to know of an instruction, computed once."""

    label: bytes  # says what this rank was doing, if it dies
    arriving: tuple[Value, ...]  # what it reads that it may have to wait for
    fleeting: tuple[Value, ...]  # parameters that it reads and that are not always here
    versions: tuple[Value, ...]  # of parameters, that it reads
    by_host: tuple[Value, ...]  # what the host reads for it, of which perhaps only the device knows that it has arrived
    graded: tuple[int, ...]  # groups whose gradients it writes
    dropped: tuple[Value, ...]  # what it frees of micro-batches on the device
    released: tuple[Value, ...]  # what it frees of model state, and in slower tiers
    mark: Callable[[], Mark]  # when it begins and ends
    timed: bool  # whether the emulated device computes it


def _prepared(instructions: Sequence[Instruction], streams: Streams) -> list[_Prepared]:
    moving = (Op.RECV, *COLLECTIVES, *COPIES)
    moved = {value for ins in instructions if ins.op in moving for value in ins.writes}
    freed = {value for ins in instructions for value in ins.frees if value.kind in ("param", "param_shard")} & moved

    def prepared(ins: Instruction) -> _Prepared:
        passing = [v for v in ins.frees if v.microbatch >= 0 and tier(v) == "device"]
        return _Prepared(
            notes.label(str(ins)),
            tuple([value for value in ins.reads if value in moved]),
            tuple([value for value in ins.reads if value in freed]),
            tuple([value for value in ins.reads if version_of(value) >= 0]) if ins.op is not Op.STEP else (),
            tuple([v for v in ins.reads if tier(v) == "host" and (ins.stream == "host" or ins.op in COLLECTIVES)]),
            tuple([value.index for value in ins.writes if value.kind == "grad"]),
            tuple(passing),
            tuple([v for v in ins.frees if v not in passing and v.kind not in _USED_UP]),
            time.perf_counter if ins.stream == "host" else streams.mark,
            ins.op in COMPUTE,
        )

    return [prepared(ins) for ins in instructions]


class _Coming(NamedTuple):
    """Values that are on their way, and which instruction started that. `wait` returns the end, if it is not noted."""

    started: int
    values: tuple[Value, ...]
    wait: Callable[[], Mark | None]


def _arrive(joined: Joined, stamp: Callable[[], None]) -> None:
    """The ranks of an emulated device's collective are there: note its end when the devices would be done."""
    joined.arrived()
    end = end_of(joined)
    if end is not None:
        stamp_later(end, stamp)


class Executor:
    """One rank's part of a program: layers, optimizer, links and buffers, kept from step to step.

    model       all layers of the model; those that this rank does not hold may be of any kind, and are not kept
    loss        loss(output, y) -> scalar mean over the rows (or target elements) of a micro-batch
    optimizer   makes an optimizer of the whole model's parameters, given as a list, or as pairs with their names
    scheduler   makes a scheduler of it, which steps once for each update
    delays      of the emulated device, if this rank is one
    streams     what it needs of the rank's device; default: that of the communicator's
    """

    def __init__(
        self,
        program: Program,
        comm: Communicator,
        model: nn.Module | Sequence[nn.Module],
        loss: Loss,
        optimizer: Optimizer,
        seed: int = 0,
        delays: Delays | None = None,
        scheduler: Scheduler | None = None,
        streams: Streams | None = None,
    ) -> None:
        program = without_versions(program) if program.in_flight is not None else program
        container = model if isinstance(model, nn.Module) else nn.Sequential(*model)
        update = Update(optimizer, forms_of(container), scheduler)
        updated = [set(ins.layers) for ins in program.ranks[comm.rank] if ins.op is Op.STEP]
        if updated:
            trained = {g for g, group in enumerate(program.groups) if group.trainable}
            sliced = bool(program.sharded or getattr(container, "cuts", {}))
            why = f"program {program.name!r} " + ("shards optimizer states" if sliced else "has several updates a step")
            check_update(update, why, any(not trained <= found for found in updated), sliced)
        if program.narrow:
            check_narrow(container, program.precision)
        randomness.replace_dropout(container, seed)
        layers: list[nn.Module] = layers_of(container)
        check_fit(program, layers, edges_of(container))
        selective_checkpoint.choose(layers, program.selective)
        self.comm = comm
        self.streams = streams or streams_of(comm.device)
        self.compute = Compute(program, comm.rank, comm.device, layers, loss, seed, comm.posts, self.streams)
        self.compute.names = naming_layers.names_of(model)
        own = {id(p) for layer in self.compute.layers.values() for p in layer.parameters()}
        groups = [[p for p in params if id(p) in own] for params in parameters_of(layers)]
        self.cuts: Mapping[str, Cut] = getattr(container, "cuts", {})  # of parameters that sharing ranks have parts of
        self.names = {id(p): name for name, p in container.named_parameters() if id(p) in own}
        self.live: Table = {}
        self.pending: dict[Value, _Coming] = {}
        self.state = State(program, comm, groups, update, self.names, self.live)
        self.groups, self.buckets = groups, self.state.buckets
        mine = list(self.compute.layers.values())
        if program.narrow:
            # These are the tensors that are not trained: buffers, and frozen parameters before they are offloaded.
            narrow(nn.ModuleList(mine), dtype_named(program.narrow))
        self.copies: Copies | None = None
        if any(ins.op in COPIES for ins in program.ranks[comm.rank]):
            self.copies = Copies(program, self.state, self.compute.kept, layers, mine, self.streams)
        self.do: dict[Op, Callable[[int, Instruction], Any]] = {
            **dict.fromkeys(_ON_LAYERS, self._compute),
            **dict.fromkeys(COLLECTIVES, self._collective),
            **dict.fromkeys(COPIES, self._copy),
            **dict.fromkeys(SERVICE, self._serve),
            Op.SEND: self._send,
            Op.RECV: self._receive,
            Op.STEP: self._step,
        }
        self.watch: Tracker | None = None
        self.follow(program, delays)

    def follow(self, program: Program, delays: Delays | None = None) -> None:
        """Run this program from now on: the one that the executor was made for, or the same for fewer steps."""
        comm = self.comm
        self.program, self.instructions = program, program.ranks[comm.rank]
        self.compute.follow(program)
        groups = {ins.group for ins in self.instructions if ins.group}
        peers = {ins.peer for ins in self.instructions if ins.op in (Op.SEND, Op.RECV)}
        comm.prepare(groups, peers, program.algorithm or None)
        self.device = EmulatedDevice(delays) if delays is not None else None
        emulated = delays is not None and delays.links
        self.links: Links | None = None
        self.dynamic: DynamicSchedule | None = None
        if peers or program.in_flight is not None:
            self.links = Links(program, comm, self.compute.rows.count, emulated, self.streams.ended)
            self.dynamic = DynamicSchedule(program, comm.rank, self.links) if program.in_flight is not None else None
        self.prepared = _prepared(self.instructions, self.streams)

    def run(
        self, batches: Callable[[int], Batch | BatchPart], base: int = 0, keep_gradients: bool = False
    ) -> PassRecord:
        """One pass through the program; its step s trains on `batches(base + s)`: the whole batch, or this rank's part.

        keep_gradients   copy every gradient as its STEP uses it
        """
        compute, live, pending = self.compute, self.live, self.pending
        compute.begin(batches, base)
        self.state.begin()
        self.gradients: list[list[tuple[Slice, Cut | None]]] = [[] for _ in range(self.program.updates)]
        self.keep_gradients = keep_gradients
        size, streams, mark = len(self.instructions), self.streams, self.streams.mark
        self.starts: list[Mark] = [0.0] * size
        self.ends: list[Mark] = [0.0] * size
        self.posted: dict[int, list[Mark]] = {}  # when receives were posted, by peer
        starts, ends, links, copies = self.starts, self.ends, self.links, self.copies
        device, watch = self.device, self.watch
        streams.begin()
        if links is not None:
            links.start()
        self.begun = mark()
        if device is not None:
            device.begin()
        note, prepared, do = notes.note, self.prepared, self.do
        for index, ins in enumerate(self.instructions) if self.dynamic is None else self.dynamic.walk():
            line = prepared[index]
            note(line.label)
            if watch is not None:
                watch.at(index)
            if copies is not None:
                copies.settle()
            if pending:
                for value in line.arriving:
                    if value in pending:
                        self._await(value)
            for value in line.fleeting:
                if value not in live:
                    raise RankError(f"{ins}: {value} was freed, and was not brought back; the program must do that")
            for value in line.versions:
                self.state.show(value)
            if line.by_host and copies is not None:
                copies.host_waits(line.by_host)
            starts[index] = line.mark()
            end = do[ins.op](index, ins)
            if end is _LATER:
                continue
            if device is not None and line.timed:
                device.computed(index)
            ends[index] = line.mark() if end is None else end
            if watch is not None and end is None:
                streams.wait(ends[index])  # memory is followed on the host's clock, so the host may not run ahead
            for value in line.dropped:
                live.pop(value, None)
            for value in line.released:
                (self.state if copies is None else copies).release(value)
        while pending:
            self._await(next(iter(pending)))
        if links is not None:
            links.finish()
        if copies is not None:
            copies.finish()
        compute.later.settle(True)
        compute.check_depends()
        now = mark()
        ends[:] = [end or now for end in ends]  # (of pieces of a gradient only the last one was waited for)
        losses = read_all(compute.losses, streams)
        starts, ends = streams.times(starts), streams.times(ends)
        overruns = [] if device is None else device.overruns
        if self.dynamic is None:
            return PassRecord(losses, starts, ends, self.gradients, overruns)
        walked = self.dynamic.executed
        overran = [k for k, index in enumerate(walked) if index in overruns]
        starts, ends = ([times[index] for index in walked] for times in (starts, ends))
        return PassRecord(losses, starts, ends, self.gradients, overran, self.dynamic.order)

    # waiting ---------------------------------------------------------------------------------------------------------

    def _coming(self, index: int, values: Sequence[Value], wait: Callable[[], Mark | None]) -> None:
        """These values are on their way: whoever reads one of them calls `wait` first."""
        coming = _Coming(index, tuple(values), wait)
        for value in values:
            self.pending[value] = coming

    def _await(self, value: Value) -> None:
        """Wait for a message, a copy, or the collective that writes a value. (A GPU waits itself, and not its host.)"""
        index, values, wait = self.pending[value]
        for other in values:
            self.pending.pop(other, None)
        self.ends[index] = wait() or self.ends[index] or self.streams.mark()

    # instructions: each returns when it ends, None for now, or _LATER ------------------------------------------------

    def _compute(self, index: int, ins: Instruction) -> None:
        if ins.stream == "host":
            return self._on_host(ins)
        self.compute.work(ins, self.live)
        for group in self.prepared[index].graded:
            self.buckets.fill(group)
        return None

    def _on_host(self, ins: Instruction) -> None:
        """Compute layers on the host, with the host's values in place of the device's."""
        here = {home(value): self.live[value] for value in ins.reads if value in self.live}
        reads, writes, frees = (tuple(map(home, values)) for values in (ins.reads, ins.writes, ins.frees))
        plain = ins._replace(reads=reads, writes=writes, frees=frees)
        with self._aside():
            self.compute.work(plain, here)
        self.live.update({value: here[home(value)] for value in ins.writes if home(value) in here})

    def _send(self, index: int, ins: Instruction) -> None:
        contents = [self.live.get(value) for value in ins.reads]
        arrival = self.device.sent(index, ins.peer, count_bytes(contents)) if self.device is not None else 0.0
        assert self.links is not None
        self.links.send(ins.reads, contents, ins.peer, arrival)

    def _receive(self, index: int, ins: Instruction) -> object:
        """Post a receive: its transport may have begun with it when one so many messages before it was posted."""
        links = self.links
        assert links is not None
        times = self.posted.setdefault(ins.peer, [])
        times.append(self.starts[index])
        k = len(times) - 1 - self.program.receives_ahead
        self.starts[index] = times[k] if k >= 0 else self.begun
        self.ends[index] = times[-1]
        links.reach(ins.peer)

        def wait() -> Mark:
            end: Mark | None = None
            present = [value for value in ins.writes if self.compute.rows.count(value)]
            if present:
                contents, arrival, end = links.receive(ins.writes, ins.peer)
                for value, content in zip(present, contents, strict=True):
                    self.live[value] = content
                    self.compute.weigh(value, content)
                    if self.watch is not None:
                        self.watch.received(content)
                if self.device is not None:
                    self.device.arrived(arrival, index)
            return self.streams.mark() if end is None else end

        self._coming(index, ins.writes, wait)
        return _LATER

    def _collective(self, index: int, ins: Instruction) -> Mark | None:
        """Start a collective. Returns when it ends, if the device knows that; else it is noted when it has ended."""
        handles = (
            repartition.start(
                ins,
                self.live,
                self.comm,
                self.compute.rows.number(ins),
                self.compute.weigh_form,
                [count for _, count in self.compute.places],
            )
            if repartitions(ins)
            else self.state.start(ins)
        )
        ends, device, group = self.ends, self.device, ins.group
        joined = device.join(index, group, self.comm) if device is not None and device.delays.links else None

        def stamp() -> None:
            ends[index] = time.perf_counter()

        def wait() -> None:
            for handle in handles:
                handle.wait()
            if device is not None:
                device.ended(joined, index)
            if self.watch is not None and repartitions(ins) and ins.writes[0] in self.live:
                self.watch.received(self.live[ins.writes[0]])

        self._coming(index, [value for value in ins.writes if value not in ins.frees], wait)
        end = self.streams.ended(handles, group)
        if end is None and joined is not None:
            joined.handle.when_done(partial(_arrive, joined, stamp))
        elif end is None and handles:
            handles[-1].when_done(stamp)
        return end

    def _copy(self, index: int, ins: Instruction) -> object:
        copies, device = self.copies, self.device
        assert copies is not None
        with self._aside() if tier(ins.writes[0]) == "host" else nullcontext():
            copy = copies.start(ins)
        copy.end = device.copied(ins, copy.nbytes) if device is not None else None

        def wait() -> None:
            copy.wait()
            copies.settle()
            if copy.end is not None and device is not None:
                device.wait(copy.end, index)
            if self.watch is not None:
                self.watch.received(copies.brought(ins.writes[0]))

        self._coming(index, ins.writes, wait)
        if copy.on_stream:
            self.ends[index] = copy.mark()
            return _LATER

        def done() -> None:
            self.ends[index] = time.perf_counter()
            copy.arrive()

        copy.when_copied(done if copy.end is None else partial(stamp_later, copy.end, done))
        return _LATER

    def _serve(self, index: int, ins: Instruction) -> None:
        """Exchange something with a parameter server."""
        raise RankError(f"{ins}: no executor for {ins.op.name}")

    def _aside(self) -> AbstractContextManager[None]:
        """While entered, new memory belongs to the host and not to the device."""
        return nullcontext() if self.watch is None else self.watch.aside()

    def _step(self, index: int, ins: Instruction) -> None:
        with self._aside() if ins.stream == "host" else nullcontext():
            # Where receives of a later step may be posted already, the host does not wait for the losses of this one.
            self.compute.later.settle(isinstance(self.program.contract, Synchronous))
            self.compute.check_depends()
            self.state.prepare(ins)
            if self.program.local_steps and not any(self.compute.rows.part(ins.step).rows):
                self.state.give_zeros(ins)
            if self.keep_gradients:
                with self._aside():
                    self._keep(ins)
            self.state.step(ins)

    def _keep(self, ins: Instruction) -> None:
        """Copy the gradients that a STEP uses; of replicas that train by themselves, for their mean."""
        share = self.compute.rows.share(ins.step)
        for g in ins.layers:
            for own in self.state.lines[g].gradients(self.names):
                mine = own if share == 1 else own._replace(values=own.values * share)
                self.gradients[ins.step].append((mine, self.cuts.get(own.key)))

    @cached_property
    def optimizers(self) -> dict[tuple[int, ...], torch.optim.Optimizer]:
        """Those that work on the device."""
        steps = {ins.layers for ins in self.instructions if ins.op is Op.STEP and ins.stream != "host"}
        return {layers: found for layers, found in self.state.optimizers.items() if layers in steps}

    def all_here(self) -> AbstractContextManager[None]:
        """Between passes: while entered, everything is in memory, to be saved or restored."""
        self.state.begin()  # (the newest versions are those that the next pass begins with)
        return nullcontext() if self.copies is None else self.copies.all_here()

    def close(self) -> None:
        """End what was begun for copies; the run is over."""
        if self.copies is not None:
            self.copies.close()

    def size(self, value: Value) -> int:
        """Bytes of a value on this rank, as they were measured."""
        value = home(value)
        if value.microbatch >= 0:
            found = self.compute.form_sizes.get((value.kind, value.index, self.compute.rows.count(value), value.form))
            if found is not None:
                return found
            return self.compute.sizes.get((value.kind, self.program.source(value), self.compute.rows.count(value)), 0)
        return self.state.size(value)
