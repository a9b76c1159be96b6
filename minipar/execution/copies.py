"""The copies of one rank between its device and the slower tiers: what OFFLOAD and FETCH do.

    OFFLOAD saved(2) mb0 -> host     live[host saved(2) mb0]  gets room on the host; a copy starts
    ...                              an instruction that reads the copy, or the end of the pass, waits for it
    (the copy has arrived)           what the OFFLOAD frees is freed
    FETCH saved(2) mb0 <- host       room on the device; a copy back

A copy goes from one entry of the table to another. What differs is where the room comes from: what autograd saved gets
new storages (`saved_tensors.py`), model state comes back into the storages that views of it know (they are resized to 0
in between, never replaced), and everything else gets new tensors. Of an entry on the disk the table has tensors without
memory.

Copies run on threads, one for each direction; those between a GPU and the host's memory run on streams of the GPU
(streams.py), and the stream that computes waits where a thread would. The rank's own thread starts them, and frees what
they have copied.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from threading import Event
from typing import Any

import torch
from torch import Tensor, nn

from minipar.execution.lines import Line
from minipar.execution.memory.disk import DiskStore, Ledger
from minipar.execution.saved_tensors import SavedTensors
from minipar.execution.state import State
from minipar.execution.streams import Copy, Mark, StreamCopy, Streams, on_host
from minipar.models.tensors import count_bytes, map_tensors, resize, tensors
from minipar.program import COPIES, Instruction, LayerRun, Op, Program, Value, home, tier

_GRADIENTS = ("grad", "grad_shard")


class TierCopy:
    """A copy that is under way.

    copies     of its tensors, in order
    on_stream  whether they run on a stream of the device: then its computation waits for them, and not the host
    """

    def __init__(self, ins: Instruction, streams: Streams, copies: Sequence[Copy], nbytes: int) -> None:
        self.ins, self.streams, self.copies, self.nbytes = ins, streams, copies, nbytes
        self.keeps: Any = None  # what must not be freed before
        self.on_stream = bool(copies) and isinstance(copies[-1], StreamCopy)
        self.end: float | None = None  # on the emulated device
        self.awaited = False
        self._arrived = Event()

    def when_copied(self, act: Callable[[], None]) -> None:
        """Call `act` when the bytes are where they should be; perhaps from another thread, or at once."""
        last = self.copies[-1] if self.copies else None
        if isinstance(last, Future):
            last.add_done_callback(lambda _: act())  # (they go in order)
        else:
            act()

    def mark(self) -> Mark:
        """When a copy on a stream ends."""
        last = self.copies[-1]
        assert isinstance(last, StreamCopy)
        return last.end

    def arrive(self) -> None:
        """The copy counts as done."""
        self._arrived.set()

    @property
    def arrived(self) -> bool:
        if self.on_stream and not self._arrived.is_set() and self.copies[-1].done():
            self._arrived.set()
        return self._arrived.is_set()

    def wait(self) -> None:
        """Go on when it has arrived: the host, or the device with what is computed from now on."""
        self.awaited = True
        if self.on_stream and self.copies:  # (it may be settled already)
            self.streams.follow(self.copies[-1])
            self._arrived.set()
        self._arrived.wait()

    def raise_error(self) -> None:
        """Raise what went wrong, if something did."""
        for copy in self.copies if not self.on_stream else ():
            error = copy.exception()
            if error is not None:
                raise error

    @property
    def may_be_freed(self) -> bool:
        """Whether what it has copied may be freed now. What autograd keeps and gradients are freed only when the
        program waits for their copy: the memory that a step needs should not depend on the link's speed."""
        any_time = self.ins.op is Op.FETCH or self.ins.reads[0].kind not in ("saved", *_GRADIENTS)
        return self.arrived and (self.awaited or any_time)


class Copies:
    """What one rank whose program copies tensors has away from its device, kept from step to step.

    kept     per layer, micro-batch and step: what autograd keeps of it
    layers   of the whole model; `mine` are those of this rank
    """

    def __init__(
        self,
        program: Program,
        state: State,
        kept: dict[LayerRun, SavedTensors],
        layers: Sequence[nn.Module],
        mine: Iterable[nn.Module],
        streams: Streams,
    ) -> None:
        self.state, self.live, self.kept, self.streams = state, state.live, kept, streams
        self.under_way: list[TierCopy] = []
        self._rooms: dict[Value, StreamCopy | None] = {}  # on the host, with the last copy on a stream that uses each
        copies = [ins for ins in program.ranks[state.comm.rank] if ins.op in COPIES]
        fetched = {ins.writes[0] for ins in copies if ins.op is Op.FETCH}
        # Groups whose parameters are not on the device between steps.
        self.away = {v.index for v in fetched & state.returning if v.kind in ("param", "param_shard")}
        frozen = frozen_parameters(program, layers, mine)
        for g in self.away:
            state.lines[g].frozen = frozen[g]
        self.ledger = Ledger("host", program.room)
        on_disk = any(tier(value) == "disk" for ins in copies for value in (ins.reads[0], ins.writes[0]))
        self.disk = DiskStore(program.folder or None, program.room) if on_disk else None
        # (after an error nobody calls `close`: then the finalizer does the same)
        self._finish = weakref.finalize(self, _close, streams, self.disk)
        # What is kept in a slower tier between steps; layers that are computed on the host never move.
        self.held = sorted(v for v in state.held if tier(v) != "device" and v.index not in state.at_home)
        self.masters: dict[int, list[Tensor]] = {}  # what the optimizer works on on the host, and frozen parameters
        self._begin()

    def close(self) -> None:
        """End the threads and free everything, files included."""
        self._finish()

    def _begin(self) -> None:
        """Move everything to where it is kept between steps."""
        resized = {v.index for v in self.held if tier(v) == "disk"}
        for g in self.away:
            for p in (*self.state.lines[g].owned, *self.state.lines[g].frozen):
                if p.untyped_storage().nbytes() != count_bytes(p) or not p.is_contiguous():
                    p.data = p.data.clone(memory_format=torch.contiguous_format)  # a storage of its own, to be resized
        for g, line in enumerate(self.state.lines):
            if not line.on_device:
                self.masters[g] = self._masters(line, g in resized)
        for value in self.held:
            if "param" in value.kind or tier(value) == "disk":  # (some optimizers have their states from the start)
                self._put(value)
        for g in self.away:
            resize(self.state.lines[g].here, False)

    def _masters(self, line: Line, resized: bool) -> list[Tensor]:
        """What the host has of a group whose optimizer works there; `resized` between steps, as pinned memory cannot
        be."""
        for master in line.trained if resized else ():
            if not master.untyped_storage().resizable():
                master.data = master.data.clone()
        return [*(p.data for p in line.trained), *(on_host(p.data, pinned=not resized) for p in line.frozen)]

    def _put(self, value: Value) -> None:
        """Make the entry of what is kept in a slower tier, of what is in memory."""
        found = self._in_memory(value)
        if tier(value) == "disk":
            assert self.disk is not None
            self.live[value] = [torch.empty_like(t, device="meta") for t in found]
            for copy in [self.disk.put((value, k), t) for k, t in enumerate(found)]:
                copy.result()
            resize(found, False)
        else:
            self.ledger.take(value, count_bytes(found))
            self.live[value] = found if value.index in self.masters else [on_host(t) for t in found]

    def _in_memory(self, value: Value) -> list[Tensor]:
        """Where an entry of model state is while it is in memory, or would be."""
        if "param" not in value.kind:
            return self.state.optimizer_tensors(value.index)
        return self.masters.get(value.index) or self.state.lines[value.index].here

    @contextmanager
    def all_here(self) -> Iterator[None]:
        """Between steps: while entered, everything is in memory, to be saved or restored."""
        stored = [value for value in self.held if tier(value) == "disk" or value.index not in self.masters]
        for value in stored:
            found = self._in_memory(value)
            resize(found, True)
            for k, (copied, tensor) in enumerate(zip(self.live.get(value, ()), found, strict=False)):
                if self.disk is not None and tier(value) == "disk":
                    self.disk.fetch((value, k), tensor).result()
                else:
                    tensor.copy_(copied)
        for g in self.away:
            resize(self.state.lines[g].here, True)
            for master, tensor in zip(self.masters.get(g, ()), self.state.lines[g].here, strict=False):
                tensor.copy_(master)
        yield
        for g in self.away:
            for master, tensor in zip(self.masters.get(g, ()), self.state.lines[g].here, strict=False):
                master.copy_(tensor)
        for value in stored:
            self._put(value)
        for g in self.away:
            resize(self.state.lines[g].here, False)

    # copies ----------------------------------------------------------------------------------------------------------

    def start(self, ins: Instruction) -> TierCopy:
        """Start the copy of an OFFLOAD or FETCH. (What it makes on the host is made here: call it aside.)"""
        source, target = ins.reads[0], ins.writes[0]
        content = self._content(source)
        if content is None:  # a micro-batch without rows
            return self._noted(TierCopy(ins, self.streams, (), 0))
        room = self._room(target, content)
        old, new = tensors(content), tensors(room)
        near = target if ins.op is Op.OFFLOAD else source  # (on the host, or on the disk)
        copies: list[Copy] = []
        for k, (a, b) in enumerate(zip(old, new, strict=True)):
            if tier(near) == "disk":
                assert self.disk is not None
                copies.append(self.disk.put((near, k), a) if near is target else self.disk.fetch((near, k), b))
            else:
                copies.append(self.streams.copy(a.detach(), b, ins.op.value, self._rooms.get(near)))
        if copies and isinstance(copies[-1], StreamCopy):
            self._rooms[near] = replace(copies[-1], tensors=())
        copy = TierCopy(ins, self.streams, copies, count_bytes(old if ins.op is Op.OFFLOAD else new))
        if home(source).kind in _GRADIENTS:
            copy.keeps = old
            self.state.forget_gradient(source.index)
        return self._noted(copy)

    def _noted(self, copy: TierCopy) -> TierCopy:
        self.under_way.append(copy)
        return copy

    def _content(self, value: Value) -> Any:
        """The tensors that a copy reads; None of a micro-batch without rows."""
        kind = home(value).kind
        if kind == "saved" and tier(value) == "device":
            found = self.kept.get((value.index, value.microbatch, value.step))
            if found is None:
                return None
            for slot in found.slots:
                slot.check()
            return [slot.bytes() for slot in found.slots]
        if value.microbatch >= 0:
            return self.live.get(value)
        if tier(value) == "device" and "param" in kind:
            return self.state.lines[value.index].here
        return self.state.contents(value)

    def _room(self, target: Value, content: Any) -> Any:
        """Where a copy goes to. What is on the way is the table's entry from now on."""
        where, line = tier(target), self.state.lines[target.index] if target.microbatch < 0 else None
        if where == "device" and home(target).kind == "saved":
            return [slot.make() for slot in self.kept[target.index, target.microbatch, target.step].slots]
        if line is not None and where == "device":
            if target.index in self.away:  # (others may be part of a larger storage)
                resize(line.here, True)
                self.live[target] = line.here
            return line.here
        if line is not None and home(target).kind in _GRADIENTS:
            pairs = zip(content, line.trained, strict=True)
            content = [own if gradient is not None else None for gradient, own in pairs]  # (in the optimizer's type)
        elif line is not None and where == "host" and ("param" not in target.kind or target.index in self.masters):
            self.live[target] = self._in_memory(target)
            resize(self.live[target], True)
        if target not in self.live or where == "disk":
            if where == "host":
                self.ledger.take(target, count_bytes(content))
                self._rooms[target] = None
            self.live[target] = map_tensors(content, partial(self._empty, where))
        return self.live[target]

    def _empty(self, where: str, like: Tensor) -> Tensor:
        """An empty tensor in a tier; of the disk, one without memory."""
        if where == "host":
            return self.streams.room(like)
        place = self.state.comm.device if where == "device" else torch.device("meta")
        return torch.empty(like.shape, dtype=like.dtype, device=place)

    def settle(self) -> None:
        """Free what has been copied away, on the rank's own thread. Raises StoreError where a copy has failed."""
        for copy in [copy for copy in self.under_way if copy.may_be_freed]:
            self.under_way.remove(copy)
            copy.raise_error()
            copy.copies, copy.keeps = (), None  # (a future refers to its callback: both would keep each other alive)
            for value in copy.ins.frees:
                self.release(value)

    def finish(self) -> None:
        """Wait for all copies."""
        for copy in self.under_way:
            copy.wait()
        self.settle()
        self.host_waits(list(self._rooms))

    def host_waits(self, values: Iterable[Value]) -> None:
        """The host reads these values itself: wait for copies that only the device's computation has followed."""
        for value in values:
            if (last := self._rooms.get(value)) is not None:
                last.result()

    def brought(self, value: Value) -> list[Tensor]:
        """What a FETCH has brought back."""
        found = self._content(value)
        return [] if found is None else tensors(found)

    def release(self, value: Value) -> None:
        """A value is freed that has been copied, or is a copy."""
        kind, where = home(value).kind, tier(value)
        if where == "device":
            if kind == "saved":
                found = self.kept.get((value.index, value.microbatch, value.step))
                if found is not None:
                    found.let_go()
            elif value.microbatch >= 0:
                self.live.pop(value, None)
            elif kind not in _GRADIENTS:
                self.state.release(value)
            return
        content, ours = tensors(self.live.pop(value, None)), value in self._rooms
        last = self._rooms.pop(value, None)
        if where == "disk":
            assert self.disk is not None
            for k in range(len(content)):
                self.disk.drop((value, k))
        elif value.microbatch < 0 and kind not in _GRADIENTS:
            resize(content, False)
        elif ours:
            self.ledger.drop(value)
            for tensor in content:
                self.streams.give_back(tensor, last)


def _close(streams: Streams, disk: DiskStore | None) -> None:
    streams.close()
    if disk is not None:
        disk.close()


def frozen_parameters(
    program: Program, layers: Sequence[nn.Module], held: Iterable[nn.Module]
) -> list[list[nn.Parameter]]:
    """Per group the frozen parameters of the layers that a rank holds; `layers` are all of the model."""
    holders: dict[nn.Parameter, list[int]] = {}
    for k, layer in enumerate(layers):
        for p in layer.parameters():
            if not p.requires_grad:
                holders.setdefault(p, []).append(k)
    group_of = {group.layers: g for g, group in enumerate(program.groups)}
    found: list[list[nn.Parameter]] = [[] for _ in program.groups]
    for p in dict.fromkeys(p for layer in held for p in layer.parameters()):
        if p in holders:
            found[group_of[tuple(holders[p])]].append(p)
    return found
