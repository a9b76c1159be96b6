"""The copies of one rank between its device and the slower tiers: what OFFLOAD and FETCH do.

    saved            what autograd keeps of a layer (`saved_tensors.py`): to a store, and the storages are freed
    grad             to the `.grad` of the parameters' copies on the host, on which the optimizer works
    param            from those copies, or from a store; on the device its storage has size 0 in between. It is resized,
                     never replaced: what autograd saved (the transpose of a weight) is a view of it
    host param,      the optimizer's copies and its state: to the disk and back
    host optimizer_state

Copies run on threads, one per tier and direction; those between a GPU and the host's memory run on streams of the GPU
(streams.py), and the stream that computes waits where a thread would. The rank's own thread starts them, and frees what
they have copied.
When a store has no room, the tensors stay where they are, the step goes on with them, and the error is raised at its
end: then parameters and optimizer are those after the step, and the run can go on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from threading import Event
from typing import Any

import torch
from torch import Tensor, nn

from minipar.errors import StoreError
from minipar.execution.memory.disk import DiskStore
from minipar.execution.memory.stores import Tier, host_store
from minipar.execution.saved_tensors import SavedTensors
from minipar.execution.state import State
from minipar.execution.streams import Copy, Mark, StreamCopy, Streams, on_host
from minipar.models.tensors import count_bytes, map_tensors, resize, tensors
from minipar.program import COPIES, Instruction, LayerRun, Op, Program, Value, home, host, tier


def _nothing() -> None:
    pass


def _any_time(ins: Instruction) -> bool:
    return ins.op is Op.FETCH or ins.reads[0].kind not in ("saved", "grad", "grad_shard")


class TierCopy:
    """A copy that is under way: `settle` when `arrived`, on the rank's own thread.

    copies     of its tensors, in order
    on_stream  whether they run on a stream of the device: then its computation waits for them, and not the host
    """

    def __init__(
        self,
        streams: Streams,
        copies: Sequence[Copy] = (),
        nbytes: int = 0,
        let_go: Callable[[], Any] = _nothing,
        failed: StoreError | None = None,
    ) -> None:
        self.streams, self.copies = streams, copies
        self.nbytes, self.let_go, self.failed = nbytes, let_go, failed
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

    def forget(self) -> None:
        """Drop all references (a future refers to its callback: without this, both would keep each other alive)."""
        self.copies, self.let_go = (), _nothing

    def error(self) -> StoreError | None:
        """Why it failed, if it did; errors of other kinds are raised."""
        for copy in self.copies if not self.on_stream else ():
            error = copy.exception()
            if isinstance(error, StoreError):
                self.failed = self.failed or error
            elif error is not None:
                raise error
        return self.failed


class Offloading:
    """What one rank whose program copies tensors has away from its device, kept from step to step.

    kept     per layer, micro-batch and step: what autograd keeps of it
    layers   of the whole model; `mine` are those of this rank
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        state: State,
        kept: dict[LayerRun, SavedTensors],
        layers: Sequence[nn.Module],
        mine: Iterable[nn.Module],
        streams: Streams,
    ) -> None:
        self.program, self.state, self.kept, self.streams = program, state, kept, streams
        self.stores: dict[str, Tier] = {}
        self.under_way: list[tuple[Instruction, TierCopy]] = []
        self.failed: StoreError | None = None
        self._to_host: dict[Value, Copy] = {}  # copies on streams that the host has not waited for
        self._stays: set[Value] = set()  # what could not be copied away
        self._away: set[int] = set()  # groups whose parameters are not on the device between steps
        self.frozen = frozen_parameters(program, layers, mine)
        copies = [ins for ins in program.ranks[rank] if ins.op in COPIES]
        self._begin(copies, program.state[rank] if program.state else frozenset())

    def close(self) -> None:
        """End the threads and free everything, files included."""
        self._finish()

    def _is_away(self, value: Value) -> bool:
        """Whether a group's parameters are not on the device between steps."""
        return value.kind in ("param", "param_shard") and value not in self.held

    def _begin(self, copies: Sequence[Instruction], held: frozenset[Value]) -> None:
        """Move everything to where it is kept between steps. `held`: what this rank has then."""
        self.device = self.state.comm.device
        self.held = frozenset(value for value in held if value.index not in self.state.at_home)  # (those never move)
        self._unwritten: dict[Value, Any] = {}  # contents that are on their way
        self._fixed: dict[int, list[Tensor]] = {}  # the host's copies of frozen parameters
        self._away = {g for ins in copies if ins.op is Op.FETCH for g in ins.layers if self._is_away(ins.writes[0])}
        self._on_disk = {v.index for v in self.held if tier(v) == "disk" and "param" in v.kind}
        self.stores["host"] = host_store(self.streams, self.program.room)
        if any(tier(value) == "disk" for ins in copies for value in (ins.reads[0], ins.writes[0])):
            self.stores["disk"] = DiskStore(self.program.folder or None, self.program.room)
        # (after an error nobody calls `close`: then the finalizer does the same)
        self._finish = weakref.finalize(self, _close, self.streams, list(self.stores.values()))
        for g in self._away:
            for p in (*self.state.owners[g].owned, *self.frozen[g]):
                if p.untyped_storage().nbytes() != _bytes([p]) or not p.is_contiguous():
                    p.data = p.data.clone(memory_format=torch.contiguous_format)  # a storage of its own, to be resized
        for g in self._on_disk:
            self.state.owners[g].make_resizable()
        for value in sorted(self.held):
            if tier(value) == "device" or "param" not in value.kind:
                continue
            store, masters = self.stores[tier(value)], self._masters(value.index)
            if tier(value) == "host" and masters:
                store.hold(value, _bytes(masters))
            else:
                for k, tensor in enumerate(masters or self._device(value.index)):
                    store.put((value, k), tensor).result()
                resize(masters, False)
        for g in self._away:
            resize(self._device(g), False)

    @contextmanager
    def all_here(self) -> Iterator[None]:
        """Between steps: while entered, everything is in memory, to be saved or restored."""
        away = [value for value in sorted(self.held) if tier(value) != "device"]
        stored = [value for value in away if tier(value) == "disk" or not self._masters(value.index)]
        for value in stored:
            found = self._elsewhere(value)
            if host(home(value)) not in self._stays and home(value) not in self._stays:
                resize(found, True)
                store = self.stores[tier(value)]
                for copy in [store.fetch((value, k), tensor) for k, tensor in enumerate(found)]:
                    copy.result()
        for g in self._away:
            resize(self._device(g), True)
            for master, tensor in zip(self._masters(g), self._device(g), strict=False):
                tensor.copy_(master)
        yield
        for g in self._away:
            for master, tensor in zip(self._masters(g), self._device(g), strict=False):
                master.copy_(tensor)
        for value in stored:
            for k, tensor in enumerate(self._elsewhere(value)):
                self.stores[tier(value)].put((value, k), tensor).result()
            resize(self._elsewhere(value), False)
        for g in self._away:
            resize(self._device(g), False)
        self._stays.clear()

    def _elsewhere(self, value: Value) -> list[Tensor]:
        """The tensors whose values a store keeps between steps as `value`."""
        masters = self._masters(value.index)
        if "param" not in value.kind:
            return self.state.optimizer_tensors(value.index)
        return masters or self._device(value.index)

    # the tensors of a value ------------------------------------------------------------------------------------------

    def _device(self, g: int) -> list[Tensor]:
        """What the device holds of a group between steps, or would: `param`, or `param_shard`."""
        frozen = self.frozen[g] if g in self._away else ()
        return [p.data for p in (*self.state.owners[g].owned, *frozen)]

    def _masters(self, g: int) -> list[Tensor]:
        """The host's copies of the same, if STEP works on them."""
        masters = self.state.owners[g].masters
        if not masters:
            return []
        if g in self._away and g not in self._fixed:
            self._fixed[g] = [on_host(p.data, pinned=g not in self._on_disk) for p in self.frozen[g]]
        return [*(p.data for p in masters), *self._fixed.get(g, ())]

    def _tensors(self, value: Value) -> list[Tensor]:
        """Parameters and optimizer states on the device or on the host."""
        if tier(value) == "device":
            return self._device(value.index)
        if "param" in value.kind:
            return self._masters(value.index)
        return self.state.optimizer_tensors(value.index)

    # copies ----------------------------------------------------------------------------------------------------------

    def start(self, ins: Instruction, live: dict[Value, Any]) -> TierCopy:
        """Start the copy of an OFFLOAD or FETCH. (What it makes on the host is made here: call it aside.)"""
        source, target = ins.reads[0], ins.writes[0]
        try:
            if home(source).kind == "saved":
                copy = self._saved(ins.op, source, target)
            elif home(source).kind in ("grad", "grad_shard"):
                copy = self._gradient(source.index)
            elif home(source).kind in ("output", "grad_output"):
                copy = self._hand_over(ins, live)
            elif ins.op is Op.OFFLOAD:
                copy = self._put(source, target)
            else:
                copy = self._fetch(ins)
        except StoreError as error:
            copy = TierCopy(self.streams, failed=error)
        self.under_way.append((ins, copy))
        last = copy.copies[-1] if copy.copies else None
        if isinstance(last, StreamCopy) and tier(target) == "host":
            self._to_host[target] = replace(last, tensors=())
        return copy

    def settle(self) -> None:
        """Free what has been copied away, on the rank's own thread.

        What autograd keeps and gradients are freed only when the program waits for their copy: the memory that a step
        needs should not depend on the link's speed.
        """
        for entry in [
            entry for entry in self.under_way if entry[1].arrived and (entry[1].awaited or _any_time(entry[0]))
        ]:
            self.under_way.remove(entry)
            ins, copy = entry
            error = copy.error()
            if error is None:
                copy.let_go()
                if ins.op is Op.OFFLOAD:
                    self._stays.discard(ins.reads[0])
            elif ins.op is Op.FETCH:
                raise error
            else:
                self._stays.add(ins.reads[0])
                self.failed = self.failed or copy.failed
            copy.forget()

    def finish(self) -> None:
        """Wait for all copies, and raise the error of the first one that failed."""
        for _, copy in self.under_way:
            copy.wait()
        self.settle()
        self.host_waits(list(self._to_host))
        failed, self.failed = self.failed, None
        if failed is not None:
            raise failed

    def host_waits(self, values: Iterable[Value]) -> None:
        """The host reads these values itself: wait for copies to it that only the device's computation has followed."""
        for value in values:
            copy = self._to_host.pop(value, None)
            if copy is not None:
                copy.result()

    def brought(self, value: Value) -> list[Tensor]:
        """What a FETCH has brought back of a micro-batch."""
        found = self.kept.get((value.index, value.microbatch, value.step)) if value.kind == "saved" else None
        return [] if found is None else [slot.bytes() for slot in found.slots]

    def release(self, value: Value) -> None:
        """Free the device's copy of a group's parameters, which another tier has, too."""
        g = value.index
        if g not in self._away or (value.kind == "param" and g in self.program.scattered):
            return
        if not any(value.index == g and "param" in value.kind for value in self._stays):
            resize(self._device(g), False)

    def _saved(self, op: Op, source: Value, target: Value) -> TierCopy:
        value = home(source)
        found = self.kept.get((value.index, value.microbatch, value.step))
        if found is None:  # a micro-batch without rows
            return TierCopy(self.streams)
        store = self.stores[tier(target if op is Op.OFFLOAD else source)]
        if value in self._stays:  # it could not be copied away
            self._stays.discard(value)
            _drop(store, [(value, k) for k in range(len(found.slots))])
            return TierCopy(self.streams)
        if op is Op.OFFLOAD:
            for slot in found.slots:
                slot.check()
            jobs = [store.put((value, k), slot.bytes()) for k, slot in enumerate(found.slots)]
            return TierCopy(self.streams, jobs, found.nbytes, found.let_go)
        keys: list[Hashable] = [(value, k) for k in range(len(found.slots))]
        jobs = [store.fetch(key, slot.make()) for key, slot in zip(keys, found.slots, strict=True)]
        return TierCopy(self.streams, jobs, found.nbytes, partial(_drop, store, keys))

    def _gradient(self, g: int) -> TierCopy:
        pairs = []
        for p, master in zip(self.state.owners[g].owned, self.state.owners[g].masters, strict=True):
            if p.grad is not None:
                master.grad = self.streams.room(master)
                pairs.append((p.grad, master.grad))
        self.state.forget_gradient(g)
        jobs = [self.streams.copy(*pair, Op.OFFLOAD.value) for pair in pairs]
        return TierCopy(self.streams, jobs, _bytes(a for a, _ in pairs), pairs.clear)  # (which hold the gradients)

    def _hand_over(self, ins: Instruction, live: dict[Value, Any]) -> TierCopy:
        """A checkpoint; or what layers on the host and layers on the device hand on to each other."""
        source, target = ins.reads[0], ins.writes[0]
        if source not in live:  # a micro-batch without rows
            return TierCopy(self.streams)
        content = live.pop(source)
        if target in self._stays:
            live[target] = self._unwritten.pop(target)
            self._stays.discard(target)
            return TierCopy(self.streams)
        live[target] = map_tensors(content, partial(self._room, tier(target)))
        old, new = list(tensors(content)), list(tensors(live[target]))
        if ins.op is Op.OFFLOAD:
            self._unwritten[source] = content
            store = self.stores[tier(target)]
            if tier(target) == "disk":
                jobs = [store.put((target, k), t) for k, t in enumerate(old)]
            else:
                store.hold(target, count_bytes(content))
                jobs = [self.streams.copy(a.detach(), b, ins.op.value) for a, b in zip(old, new, strict=True)]
            return TierCopy(self.streams, jobs, count_bytes(content), partial(self._unwritten.pop, source, None))
        store = self.stores[tier(source)]
        if tier(source) == "disk":
            keys: list[Hashable] = [(source, k) for k in range(len(new))]
            jobs = [store.fetch(key, t) for key, t in zip(keys, new, strict=True)]
        else:
            keys = [source]
            jobs = [self.streams.copy(a.detach(), b, ins.op.value) for a, b in zip(old, new, strict=True)]
        return TierCopy(self.streams, jobs, count_bytes(new), partial(_drop, store, keys))

    def _room(self, where: str, like: Tensor) -> Tensor:
        """An empty tensor in a tier; of the disk, one without memory."""
        if where == "host" and self.streams.runs_ahead:
            return self.streams.room(like)
        tiers = {"device": self.device, "host": torch.device("cpu"), "disk": torch.device("meta")}
        return torch.empty(like.shape, dtype=like.dtype, device=tiers[where])

    def _put(self, source: Value, target: Value) -> TierCopy:
        store = self.stores[tier(target)]
        found = self._tensors(source)
        jobs = [store.put((target, k), tensor) for k, tensor in enumerate(found)]
        return TierCopy(self.streams, jobs, _bytes(found), partial(resize, found, False))

    def _fetch(self, ins: Instruction) -> TierCopy:
        source, target = ins.reads[0], ins.writes[0]
        masters, found = self._masters(source.index), self._tensors(target)
        if target in self._stays:
            return TierCopy(self.streams)
        if tier(target) == "host" or target.index in self._away:  # (others may be part of a larger storage)
            resize(found, True)
        store = self.stores[tier(source)]
        if masters and (tier(source) == "host" or host(home(source)) in self._stays):
            jobs = [self.streams.copy(*pair, Op.FETCH.value) for pair in zip(masters, found, strict=True)]
        else:
            jobs = [store.fetch((source, k), tensor) for k, tensor in enumerate(found)]
        return TierCopy(self.streams, jobs, _bytes(found))


def _close(streams: Streams, stores: list[Tier]) -> None:
    streams.close()
    for store in stores:
        store.close()


def _drop(store: Tier, keys: Iterable[Hashable]) -> None:
    for key in keys:
        store.drop(key)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


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
