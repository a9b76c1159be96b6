"""Predict the memory of ranks: tapes of single layers are played along the instructions of a program.

    F 0:2 mb0      tape of layer 0's forward | tape of layer 1's forward
    SEND           the output is freed
    B 0:2 mb0      tape of layer 1's backward | tape of layer 0's backward, gradients appear
    STEP           the optimizer's temporary memory

A tape cannot know who else holds a storage: an output lives until the executor, the layer that made it and the layer
that read it have all released it. This module follows these holders as the executor does.

Of layers that ranks share, a node may hand on a part of what it was given: (x, y) -> (x, z). Then the new value has the
storage of z, and holds that of x, too. A collective that gives z another form makes a new storage and leaves x alone.
The tapes say where each tensor of an output lies: several may be parts of one storage, as queries and keys are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from minipar.prediction.recorded import Back, GraphPiece, LayerTape, Sizes, Storage, Tape, Tapes, keeps
from minipar.prediction.split_backward import input_half, weight_half
from minipar.program import (
    COLLECTIVES,
    COMPUTE,
    COPIES,
    Instruction,
    Op,
    Program,
    Value,
    buffer,
    carry,
    grad,
    grad_carry,
    grad_output,
    home,
    output,
    param,
    param_shard,
    repartitions,
    tier,
    version_of,
)
from minipar.program.comm_volume import changing
from minipar.program.forms import letters, parts_of
from minipar.program.graph_cuts import pieces_of
from minipar.strategies.passes.compress import row_bytes, top
from minipar.trace import Trace
from minipar.trace.lifetimes import KINDS, series_of
from minipar.trace.memory_series import Series


def predict_memory(
    program: Program,
    rank: int,
    pieces: dict[tuple[GraphPiece, int], list[GraphPiece]],
    tapes: Tapes,
    sizes: Sizes,
    data: int,
    starts: Sequence[float],
    ends: Sequence[float],
) -> Series:
    """The series of one rank in one pass through its program, at the times of a predicted trace.

    pieces   where the executor cuts autograd's graph, as `minipar.program.graph_cuts.pieces_of` gives it
    data     bytes of the rows that the rank works on
    """
    walk = Walk(program, rank, pieces, tapes, sizes, data)
    now = min(starts, default=0.0)
    walk.post(program.receives_ahead)
    walk.spread(-1, now, now)
    for index, ins in enumerate(program.ranks[rank]):
        walk.instruction(ins)
        waits = ins.op in COMPUTE or ins.op is Op.PULL  # others run beside the walk
        begin, now = (starts[index], ends[index]) if waits else (now, now)
        walk.spread(index, begin, now)
    return walk.series


def with_memory(trace: Trace, tapes: Tapes, sizes: Sizes) -> Trace:
    """The same trace with `series`: what every rank allocates and frees, including temporary memory and messages.

    tapes   tapes of single layers (`minipar.execution.memory.tape.record`)
    sizes   sizes of the program's values and rows of its micro-batches, such as `ProgramCosts`
    """
    program = trace.program
    data = trace.data or [0] * len(program.ranks)
    series = [
        predict_memory(
            program, rank, pieces_of(program, rank), tapes, sizes, data[rank], trace.starts[rank], trace.ends[rank]
        )
        for rank in range(program.workers)
    ]
    series += [series_of(trace, rank) for rank in range(program.workers, len(program.ranks))]
    return replace(trace, series=series)


class Walk:
    """The memory of one rank while it walks through its list."""

    def __init__(
        self,
        program: Program,
        rank: int,
        pieces: dict[tuple[GraphPiece, int], list[GraphPiece]],
        tapes: Tapes,
        sizes: Sizes,
        data: int,
    ) -> None:
        self.program, self.rank, self.pieces, self.tapes, self.sizes = program, rank, pieces, tapes, sizes
        self.series = Series()
        self.changes: list[tuple[int, str, int]] = []
        self.live: dict[Value, Storage] = {}
        self.handed_on: dict[Value, list[Storage]] = {}  # storages of other values that a value holds, too
        self.lies: dict[Value, list[Storage | None]] = {}  # of a value: the storage of each of its tensors
        self.outside: list[Storage] = []  # those that come to a piece: the executor holds them until it is done
        self.arriving: list[Storage] = []  # those of the gradients that come to a layer; []: it is not known
        self.joined: dict[Value, int] = {}  # bytes of a value that is put together when it is first read
        self.read: dict[
            tuple[int, int, int], list[Storage]
        ] = {}  # (layer, micro-batch, step) -> inputs that the layer's graph holds
        self.outputs: dict[tuple[int, int, int], list[Storage]] = {}  # the same -> those of its output, held too
        self.saved: dict[tuple[int, int, int], int] = {}
        self.carried: dict[tuple[int, int, int], Storage] = {}  # carries that a layer's graph holds
        self.left: dict[tuple[int, int, int], Storage] = {}  # gradients that wait for a weight half
        self.messages: dict[Value, list[Storage]] = {}  # buffers of a collective, held until its result is read
        self.unpacked: dict[Value, list[int]] = {}  # bytes needed, once, to unpack the result of a compressed sum
        self.under_way: dict[tuple[int, ...], list[Storage]] = {}  # buffers of the pieces of a sum so far
        self.filled: set[int] = set()  # groups that have a gradient now
        self.brought: set[tuple[int, int, int]] = set()  # layers whose saved tensors were fetched: held to the end
        self.leaving: dict[Value, Storage] = {}  # what is freed when the rank waits for its copy
        self.state = program.state[rank] if program.state else frozenset()
        self.kept = {value.index for value in self.state if value.kind == "grad"}
        row = program.ranks[rank]
        self.receives: dict[int, list[tuple[Value, ...]]] = {}
        for ins in row:
            if ins.op is Op.RECV:
                self.receives.setdefault(ins.peer, []).append(ins.writes)
        self.posted = dict.fromkeys(self.receives, 0)
        self.reached = dict.fromkeys(self.receives, 0)
        before = self.series.before
        for value in (value for value in self.state if tier(value) == "device"):
            if program.serving is not None and value.kind == "residual":
                continue  # (what is pushed is the host's, and so is what it leaves out)
            owner = KINDS[value.kind], -1 if value.kind == "grad" else self.layer_of(value.index)
            before[owner] = before.get(owner, 0) + sizes.size(rank, value)
        for value in self.state:
            if version_of(value) >= 0:
                size, layer = sizes.size(rank, grad(value.index)), self.layer_of(value.index)
                self.live[value] = Storage(size, layer, "parameters", {"live"})
        for g in self._passed_on():
            owner = "optimizer", self.layer_of(g)
            before[owner] = before.get(owner, 0) + sizes.size(rank, param_shard(g))
        for layer in program.placement[rank]:
            before["parameters", layer] = before.get(("parameters", layer), 0) + tapes.buffers[layer]
        if data:
            before["data", -1] = data
        if program.compress.startswith("powersgd"):  # the right factors: the next step begins with them
            sums = {ins.layers: ins for ins in row if self._compresses(ins)}
            before["temporary", -1] = sum(self._factors(ins)[1] for ins in sums.values())

    def _passed_on(self) -> list[int]:
        """Groups whose bfloat16 parameters are whole, but whose float32 slice waits on the host or the disk."""
        if not self.program.narrow:
            return []
        away = {v.index for v in self.state if home(v).kind == "param_shard" and tier(v) != "device"}
        return [g for g in sorted(away) if param(g) in self.state]

    def layer_of(self, group: int) -> int:
        held = self.program.placement[self.rank]
        return next((layer for layer in self.program.groups[group].layers if layer in held), -1)

    # changes ---------------------------------------------------------------------------------------------------------

    def change(self, delta: int, kind: str, layer: int) -> None:
        if delta:
            self.changes.append((delta, kind, layer))

    def spread(self, index: int, start: float, end: float) -> None:
        """Write the changes of an instruction into the series, spread evenly over its time."""
        count = len(self.changes)
        for k, (delta, kind, layer) in enumerate(self.changes):
            self.series.add(start + (end - start) * (k + 1) / (count + 1), index, delta, kind, layer)
        self.changes.clear()

    def hold(self, storage: Storage, holder: str) -> None:
        storage.holders.add(holder)

    def release(self, storage: Storage | None, holder: str) -> None:
        if storage is not None and holder in storage.holders:
            storage.holders.discard(holder)
            if not storage.holders:
                self.change(-storage.size, storage.kind, storage.layer)

    def storage(self, size: int, layer: int) -> Storage:
        """A storage that the walk holds, and whose bytes are counted already."""
        return Storage(size, layer, holders={"walk"})

    def make(self, size: int, layer: int, holder: str, kind: str = "activations") -> Storage:
        self.change(size, kind, layer)
        return Storage(size, layer, kind, {holder})

    # instructions ----------------------------------------------------------------------------------------------------

    def instruction(self, ins: Instruction) -> None:
        for value in ins.reads:
            self.release(self.leaving.pop(value, None), "copy")
            if unpacked := self.unpacked.pop(value, []):
                self.change(unpacked[0], "temporary", -1)
                self.change(-unpacked.pop(), "temporary", -1)
            if value in self.joined:
                self.live[value] = self.make(self.joined.pop(value), value.index, "live", "buffers")
                if value in self.lies:
                    self.lies[value] = [self.live[value] if own is None else own for own in self.lies[value]]
            for message in self.messages.pop(value, ()):
                self.release(message, "message")
            storage = self.live.get(value)
            if storage is not None and storage.kind == "buffers":  # a message that is received now
                self.change(-storage.size, "buffers", storage.layer)
                self.change(storage.size, "activations", storage.layer)
                storage.kind = "activations"
        there = bool(ins.writes) and all(tier(value) != "device" for value in ins.writes)
        if there and not (ins.op in COPIES and home(ins.reads[0]).kind == "saved"):
            pass  # it changes only the host's memory
        elif ins.op in (Op.FORWARD, Op.RECOMPUTE):
            if self.sizes.rows(self.rank, ins.microbatch):
                self.forward(ins)
        elif ins.op is Op.BACKWARD:
            if self.sizes.rows(self.rank, ins.microbatch):
                self.backward(ins)
        elif ins.op is Op.BACKWARD_INPUT:
            if self.sizes.rows(self.rank, ins.microbatch):
                input_half(self, ins)
        elif ins.op is Op.BACKWARD_WEIGHT:
            if self.sizes.rows(self.rank, ins.microbatch):
                weight_half(self, ins)
        elif ins.op is Op.RECV:
            self.reached[ins.peer] += 1
            self.post(self.program.receives_ahead, ins.peer)
        elif ins.op in COPIES and home(ins.reads[0]).kind == "saved":
            size = self.saved.get(home(ins.reads[0])[1:4], 0)
            if ins.op is Op.OFFLOAD:
                self.leaving[ins.writes[0]] = Storage(size, ins.layers[0], holders={"copy"})
            else:
                self.change(size, "activations", ins.layers[0])
                self.brought.add(home(ins.reads[0])[1:4])
        elif ins.op is Op.STEP:
            self.versions(ins)
            need = self._workspace(ins.layers)
            self.change(need, "temporary", -1)
            self.change(-need, "temporary", -1)
        elif repartitions(ins):
            if self.sizes.rows(self.rank, ins.microbatch):
                self.repartition(ins)
        elif ins.op is Op.REDUCE_SCATTER:
            self.reduce_scatter(ins)
        elif ins.op is Op.ALL_REDUCE and ins.reads[0].kind == "param":
            size = sum(self.sizes.size(self.rank, grad(g)) for g in ins.layers)
            self._sent(ins, self.make(size, -1, "message", "buffers"))  # (parameters are averaged in a copy)
        elif self._compresses(ins):
            self.other(ins)
            self.compressed(ins)
        else:
            self.other(ins)
        leaves = self._leaves(ins)
        self.free(ins)
        if leaves is not None:
            self.change(leaves.size, leaves.kind, leaves.layer)
            self.leaving[ins.writes[0]] = leaves
        if ins.op is Op.STEP:
            self.filled -= set(ins.layers)

    def _leaves(self, ins: Instruction) -> Storage | None:
        """The gradient that an OFFLOAD copies away and then frees: it is there until the rank waits for the copy."""
        if ins.op is not Op.OFFLOAD or ins.reads[0] not in ins.frees:
            return None
        value = ins.reads[0]
        if value.kind == "grad_shard" and value in self.live:
            size, kind = self.live[value].size, self.live[value].kind
        elif value.kind == "grad" and value.index in self.filled - self.kept:
            size, kind = self.sizes.size(self.rank, value), "gradients"
        else:
            return None
        return Storage(size, self.layer_of(value.index), kind, {"copy"})

    def free(self, ins: Instruction) -> None:
        for value in ins.frees:
            if value.kind == "grad":
                if value.index in self.filled - self.kept:
                    self.change(-self.sizes.size(self.rank, value), "gradients", self.layer_of(value.index))
                self.filled.discard(value.index)
            else:
                self.lies.pop(value, None)
                storage = self.live.pop(value, None)
                self.release(storage, "live")
                self.release(storage, f"live {value}")
                for other in self.handed_on.pop(value, ()):
                    self.release(other, f"live {value}")

    def versions(self, ins: Instruction) -> None:
        """Make the next version of parameters, in place of the newest one if nothing needs that any more."""
        for value in ins.writes:
            if version_of(value) >= 0:
                before = value._replace(step=value.step - 1)
                size = self.sizes.size(self.rank, grad(value.index))
                in_place = self.live.pop(before, None) if before in ins.frees else None
                self.live[value] = in_place or self.make(size, self.layer_of(value.index), "live", "parameters")

    def reduce_scatter(self, ins: Instruction) -> None:
        """Gradients are packed into a message, which stays until it is summed with the messages of other ranks. These
        are read in memory that the ranks share, without a copy."""
        message = self.make(sum(self.sizes.size(self.rank, buffer(g)) for g in ins.layers), -1, "message", "buffers")
        self.free(ins)
        self.other(ins._replace(writes=tuple(v for v in ins.writes if v.kind != "buffer")))  # (they are the message)
        self._sent(ins, message)

    def repartition(self, ins: Instruction) -> None:
        """A collective that gives an output, or the gradient of one, another form, as `execution/repartition.py` runs
        it. Tensors whose form stays are not touched; the others are held until the new ones are read."""
        (source,), (target,) = ins.reads, ins.writes
        there = self.storages_of(source)
        changed = self.sizes.size(self.rank, changing(ins))
        stays = max(0, self.sizes.size(self.rank, source) - changed)
        built = max(0, self.sizes.size(self.rank, target) - stays)
        stay, new = self._parts(source, target)
        kept = _within(there, stays) if stay is None else [storage for storage in there if storage in stay]
        messages = [storage for storage in there if storage not in kept]
        rest = (
            0
            if stay is not None
            else min(stays - sum(one.size for one in kept), sum(one.size for one in messages) - changed)
        )
        if rest > 0 and messages and messages[0].size > rest:  # it has tensors of both
            messages[0].size -= rest
            kept.append(Storage(rest, messages[0].layer, messages[0].kind))
        for storage in messages:
            self.hold(storage, "message")
        for storage in kept:
            self.hold(storage, f"live {target}")
        self.handed_on[target] = kept
        if ins.op is Op.ALL_REDUCE or ins.op is Op.REDUCE_SCATTER:
            if ins.op is Op.REDUCE_SCATTER:  # all parts, behind each other
                messages.append(self.make(changed, -1, "message", "buffers"))
            self.live[target] = self.make(built, target.index, "live", "buffers")
            new = [self.live[target] if own is None else own for own in new]
        else:  # the parts of all ranks; of an exchange also what is given for them
            copies = len(ins.group) if ins.op is Op.ALL_GATHER else 2
            messages.append(self.make(copies * changed, -1, "message", "buffers"))
            self.joined[target] = built
        self.messages[target] = messages
        if stay is not None:
            self.lies[target] = new

    def _parts(self, source: Value, target: Value) -> tuple[list[Storage] | None, list[Storage | None]]:
        """The storages of tensors whose form stays; and that of each tensor, None for those that get a new one. (None,
        []) where it is not known which tensor lies where."""
        lies = self.lies_of(source)
        if not lies or None in lies:
            return None, []
        before, after = letters(source.form, len(lies)), letters(target.form, len(lies))
        if len(before) != len(lies) or len(after) != len(lies):
            return None, []  # (counts go with the gradients of unequal shards)
        new = [own if old == now else None for own, old, now in zip(lies, before, after, strict=True)]
        return [own for own in new if own is not None], new

    def storages_of(self, value: Value) -> list[Storage]:
        """The storages that a live value holds."""
        own = self.live.get(value)
        return [*([own] if own is not None else []), *self.handed_on.get(value, ())]

    def lies_of(self, value: Value) -> list[Storage | None]:
        """The storage of each tensor of a value; [] if it is not known. What another rank has sent is one storage."""
        storage = self.live.get(value)
        if value in self.lies or storage is None or self.handed_on.get(value) or self.program.edges:
            return self.lies.get(value, [])
        tape = self.tape(value.index, value.microbatch)
        return [storage] * (len(tape.lies) if value.kind == "output" else tape.back.given if tape.back else 0)

    def named(self, plain: Value, among: Sequence[Value]) -> Value:
        """A value as an instruction names it: with its form."""
        if not self.program.forms:
            return plain
        return next((one for one in among if one._replace(form="") == plain), plain)

    def _sent(self, ins: Instruction, *messages: Storage) -> None:
        """The messages of a sum, and those of its pieces before this one, stay until an instruction reads the sum."""
        found = self.under_way.setdefault(ins.layers, [])
        found += messages
        if ins.writes:
            self.messages |= dict.fromkeys(ins.writes, self.under_way.pop(ins.layers))

    def _unpacked_later(self, ins: Instruction, size: int) -> None:
        """What a sum writes is unpacked when the first of it is read."""
        once = [size]
        self.unpacked.update((value, once) for value in ins.writes)

    def _compresses(self, ins: Instruction) -> bool:
        """Whether this is a compressed sum of gradients."""
        return ins.op is Op.ALL_REDUCE and ins.reads[0].kind == "grad" and self.program.compress != "none"

    def compressed(self, ins: Instruction) -> None:
        """A compressed sum of gradients, as `comm.compression` computes it."""
        kind, _, _ = self.program.compress.partition(":")
        if kind == "topk":
            self._largest(ins)
        elif kind == "powersgd":
            first, second = self._factors(ins)
            self.change(first, "temporary", -1)  # single factors, which are then packed into one message
            self._sent(ins, self.make(first, -1, "message", "buffers"))
            self.change(-first, "temporary", -1)
            self._unpacked_later(ins, first + 2 * second)  # (single factors are packed here, too)
        else:
            self._sent(ins, self.make(sum(part.bytes for part in ins.parts), -1, "message", "buffers"))

    def _summed(self, ins: Instruction) -> list[int]:
        """Bytes of what each message of a sum leaves out, if it leaves out everything."""
        sizes = [size for g in ins.layers for size in self.program.groups[g].tensors]
        return [sum(sizes)] if ins.parts[0].layer < 0 else sizes

    def _factors(self, ins: Instruction) -> tuple[int, int]:
        """Bytes of the left factors of a sum's gradients, including gradients that are sent whole, and of the right
        factors."""
        first = second = 0
        parts = iter(ins.parts)
        for size in self._summed(ins):
            left = next(parts).bytes
            first += left
            if left < size:  # (factors are smaller than their gradient)
                second += next(parts).bytes
        return first, second

    def _largest(self, ins: Instruction) -> None:
        """For each message: the absolute values, the largest ones with their places, and the rows of all ranks."""
        messages: list[Storage] = []
        for size, part in zip(self._summed(ins), ins.parts, strict=True):
            row = part.bytes // len(ins.group)
            count = next(
                count for item in (4, 8, 2) if row_bytes(count := top(size // item, self.program.compress), item) == row
            )
            values, places = row - 4 * count, 8 * count
            for change in (size, values + places, -size - values):
                self.change(change, "temporary", -1)
            mine = self.make(row, -1, "walk", "buffers")
            for change in (values, -values):
                self.change(change, "temporary", -1)
            messages.append(self.make(part.bytes, -1, "message", "buffers"))
            self.change(-places, "temporary", -1)
            self.release(mine, "walk")
            self._unpacked_later(ins, places)
        self._sent(ins, *messages)

    def _workspace(self, groups: Sequence[int]) -> int:
        """Temporary memory of a STEP over some groups. Of a slice each parameter has a part.

        With precision=bf16 the tapes were recorded in bfloat16, but STEP works in float32, and makes float32 copies of
        whole gradients.
        """
        shards = [g for g in groups if Value("optimizer_shard", g) in self.state]
        others = [g for g in groups if g not in shards]
        whole = self.tapes.workspace.of(others)
        sliced = self._of_slices(shards)
        if not self.program.narrow:
            return max(whole, sliced)
        return 2 * max(whole + sum(self.sizes.size(self.rank, grad(g)) for g in others), sliced)

    def _of_slices(self, groups: Sequence[int]) -> int:
        """Temporary memory of a STEP over this rank's slices: that of the largest part, if the optimizer goes from part
        to part, and what is left of the part before."""
        flat, parts = self.tapes.flat_workspace, [0.0]
        for g in groups:
            tensors, ranks = self.program.groups[g].tensors, self.program.slicing(g, self.rank)
            size = -(-sum(tensors) // len(ranks))
            begin, start = ranks.index(self.rank) * size, 0
            for tensor in tensors:
                mine = min(start + tensor, begin + size) - max(start, begin)
                parts += [flat.groups[g] * mine / sum(tensors)] if mine > 0 else []
                start += tensor
        return round(sum(parts) if flat.together else max(b + flat.left * a for a, b in pairwise([*parts, 0.0])))

    def other(self, ins: Instruction) -> None:
        """Any other instruction: what it writes is allocated."""
        for value in ins.writes:
            if value.kind == "grad":
                if value.index not in self.filled and ins.op in COLLECTIVES:  # no backward had rows: it is zeros
                    self.filled.add(value.index)
                    if value.index not in self.kept:
                        self.change(self.sizes.size(self.rank, value), "gradients", self.layer_of(value.index))
            elif value not in self.live and value not in self.state:
                kind = KINDS.get(value.kind, "buffers")
                self.live[value] = self.make(self.sizes.size(self.rank, value), value.index, "live", kind)

    def post(self, ahead: int, *peers: int) -> None:
        """Allocate the buffers of receives that are posted now."""
        for peer in peers or self.receives:
            due = min(self.reached[peer] + ahead, len(self.receives[peer]))
            while self.posted[peer] < due:
                values = self.receives[peer][self.posted[peer]]
                self.posted[peer] += 1
                for value in values:
                    size = self.sizes.size(self.rank, value)
                    self.live[value] = self.make(size, self.program.source(value), "live", "buffers")

    # computing -------------------------------------------------------------------------------------------------------

    def tape(self, layer: int, microbatch: int) -> LayerTape:
        found = self.tapes.layers[self.sizes.rows(self.rank, microbatch)][layer]
        # (Where branches meet, gradients are summed and copied otherwise: it is not followed which tensor lies where.)
        return found._replace(lies=(), back=None) if self.program.edges else found

    def forward(self, ins: Instruction) -> None:
        i, step = ins.microbatch, ins.step
        saves = {value.index for value in ins.writes if value.kind == "saved"}
        inputs = [self.named(output(a, i, step), ins.reads) for a in self.program.wiring.inputs[ins.layers[0]]]
        given = [storage for value in inputs for storage in self.storages_of(value)]
        each = [self.lies_of(value) for value in inputs]
        lies = [own for found in each for own in found] if all(each) else []
        borrowed: list[Storage] = []  # inputs of pieces: the executor holds them until the instruction ends
        for piece in self.pieces[ins.layers, i]:
            trains = piece[0] in saves
            read_in = self._with_own_shards(piece[0], lies)
            if read_in is not lies:
                borrowed += [storage for storage in given if storage not in read_in]
                lies, given = read_in, [storage for storage in dict.fromkeys(read_in) if storage is not None]
            for layer in piece:
                key = layer, i, step
                tape = self.tape(layer, i)
                read = trains and (layer == piece[0] or keeps(tape.backward, "input"))
                for value in given:
                    self.hold(value, "walk")
                    if read:
                        self.hold(value, f"read by {key}")
                        self.read.setdefault(key, []).append(value)
                built = self._play_forward(tape.forward if trains else tape.plain, layer)
                own, lies = _own(built, tape, lies)
                if trains:
                    self.saved[key] = sum(size for size, what in tape.forward if what == "saved")
                    numbers = {-1 - lie.storage for lie in tape.lies if lie.kept and lie.storage < 0}
                    if lies or keeps(tape.backward, "output"):
                        self.outputs[key] = [storage for k, storage in enumerate(own) if not lies or k in numbers]
                        for storage in self.outputs[key]:
                            self.hold(storage, f"made by {key}")
                self._carry_on(ins, key, tape, trains)
                passed = self._handed_on(output(layer, i, step), built, given)
                if lies:
                    built, passed = own[0], [one for one in dict.fromkeys(lies) if one not in (None, own[0])]
                if layer == piece[0]:
                    borrowed += given
                for value in given:
                    if value not in borrowed and value not in passed:
                        self.release(value, "walk")
                given = [built, *passed]
            handed_on = self.named(output(piece[-1], i, step), ins.writes)
            if handed_on in ins.writes:
                self.release(self.live.pop(handed_on, None), "live")
                self.hold(built, "live")
                self.live[handed_on] = built
                for storage in passed:
                    self.hold(storage, f"live {handed_on}")
                self.handed_on[handed_on] = passed
                if lies:
                    self.lies[handed_on] = lies
        for storage in (*borrowed, *given):
            self.release(storage, "walk")

    def _with_own_shards(self, layer: int, lies: list[Storage | None]) -> list[Storage | None]:
        """Where the tensors lie that a node reads. The shard that it reads of a whole one is a copy."""
        form = self.program.forms[layer].reads if self.program.forms else ""
        if "C" not in form or not lies or None in lies:
            return lies
        places, found = self.program.places(self.rank), list[Storage | None]()
        for whole, letter in zip(lies, letters(form, len(lies)), strict=True):
            cut = zip(places, parts_of(letter, len(places)), strict=True)
            count = math.prod(n for (_, n), part in cut if part[0] == "C")
            found.append(whole if whole is None or count == 1 else self.make(whole.size // count, layer - 1, "walk"))
        return found

    def _handed_on(self, value: Value, built: Storage | None, given: Sequence[Storage]) -> list[Storage]:
        """The storages that a node was given and hands on: the value has more bytes than the node has made."""
        forms = self.program.forms
        if not forms:
            return []
        form = value.form or (forms[value.index].writes if value.kind == "output" else "")
        whole = self.sizes.size(self.rank, value._replace(form=form))
        return _within(given, whole - (built.size if built is not None else 0))

    def _carry_on(self, ins: Instruction, key: tuple[int, int, int], tape: LayerTape, trains: bool) -> None:
        """What a layer keeps of a slice for the next slice. Its bytes are counted already."""
        size = sum(delta for delta, what in (tape.forward if trains else tape.plain) if what == "carry")
        if not size:
            return
        built = self.storage(size, key[0])
        if trains and keeps(tape.backward, "carry"):
            self.hold(built, f"made by {key}")
            self.carried[key] = built
        if (value := carry(*key)) in ins.writes:
            self.hold(built, "live")
            self.live[value] = built
        self.release(built, "walk")

    def _play_forward(self, tape: Tape, layer: int) -> Storage:
        size = 0
        for delta, what in tape:
            if what == "output":
                size += delta
            if what != "input":
                self.change(delta, "temporary" if what == "temporary" else "activations", layer)
        return Storage(size, layer, holders={"walk"})

    def backward(self, ins: Instruction) -> None:
        i, step = ins.microbatch, ins.step
        summed = self.sum_of_gradients(ins)
        above = [summed] if summed is not None else []
        read = [value for value in ins.reads if value.kind == "grad_output"]
        lies = self.lies_of(read[0]) if len(read) == 1 else []
        self.arriving = [storage for storage in lies if storage is not None] if None not in lies else []
        copied: list[int] = []
        pieces = self.pieces[ins.layers, i]
        for piece in reversed(pieces):
            given = above  # the gradients that this piece got from the piece after it
            inner: list[Storage] = []  # the gradients between two layers of the piece
            self.outside = list(self.arriving)
            for layer in reversed(piece):
                inner = self._play_backward(layer, i, step, inner, copied, layer == piece[0])
            key = piece[0], i, step
            self.let_go_of_inputs(key)
            for storage in given:
                if storage not in inner:
                    self.release(storage, "walk")
            above = inner
        self.hand_back(ins, above)
        for g in copied:  # they have been copied into their buckets
            self.change(-self.sizes.size(self.rank, Value("grad", g)), "temporary", self.layer_of(g))

    def _play_backward(
        self, layer: int, i: int, step: int, received: list[Storage], copied: list[int], last: bool
    ) -> list[Storage]:
        """Play the backward of one layer. Returns the storages of the gradients of its input, which the walk holds.
        With `last` the executor holds the layer's input until the piece is done."""
        key = layer, i, step
        tape = self.tape(layer, i)
        arriving, self.arriving = self.arriving, []
        back = tape.back if tape.back is not None and len(arriving) == tape.back.given else None
        freed = iter(back.freed if back is not None else ())
        if back is not None:
            for k, storage in enumerate(arriving):
                self.hold(storage, f"arriving {k}")
            for storage in received:
                self.release(storage, "walk")
        leaves = self._copied_leaves(back, arriving, layer) if back is not None and last else {}
        groups, fresh = self.groups(layer)
        left = self.saved.pop(key, 0)
        built = carried = 0
        for delta, what in tape.backward if fresh else tape.later:
            if what == "saved":
                if key not in self.brought:
                    left += delta
                    self.change(delta, "activations", layer)
            elif what == "output":
                self.let_go_of_output(key)
            elif what == "input":
                if not last:
                    self.let_go_of_an_input(key, -delta)
            elif what == "grad_output":
                k = next(freed, -1) if delta < 0 else -1
                if k >= 0:
                    self.release(arriving[k], f"arriving {k}")
                elif delta < 0 and back is None:
                    for storage in received:
                        self.release(storage, "walk")
            elif what == "grad_input":
                built += delta
                self.change(delta, "activations", layer - 1)
            elif what == "carry":
                self.release(self.carried.pop(key, None), f"made by {key}")
            elif what == "grad_carry":
                carried += delta
                self.change(delta, "activations", layer)
            elif what == "gradient":
                self.change(delta, self.kind_of_gradient(groups), layer)
            elif what == "temporary":
                self.change(delta, "temporary", layer)
        self.release(self.carried.pop(key, None), f"made by {key}")
        if carried:
            self.live[grad_carry(layer, i - 1, step)] = Storage(carried, layer, holders={"live"})
        separate = self.given_to_each(layer, i, step, built)
        self.change(-left, "activations", layer)
        self.let_go_of_output(key)
        copied += self.fill(layer, groups, fresh)
        if back is not None:
            return self._handed_back(back, arriving, leaves, built, layer, separate)
        built += separate
        if not built and received and layer > self.program.first_trainable:
            return received  # the layer returns the gradient that it received
        for storage in received:
            self.release(storage, "walk")
        return [Storage(built, layer - 1, holders={"walk"})] if built else []

    def _copied_leaves(self, back: Back, arriving: Sequence[Storage], layer: int) -> dict[int, Storage]:
        """The gradients of a piece's inputs that are copies, by number. Autograd gives a leaf the gradient that the
        piece was given itself, or a copy if somebody else has it, too: the next leaf, or the executor."""
        taken: list[Storage] = list(self.outside)
        copies: dict[int, Storage] = {}
        for k, lie in enumerate(back.lies):
            if lie.storage >= 0 and arriving[lie.storage] in taken:
                copies[k] = self.make(lie.bytes, layer - 1, "walk")
            elif lie.storage >= 0:
                taken.append(arriving[lie.storage])
        return copies

    def _handed_back(
        self,
        back: Back,
        arriving: Sequence[Storage],
        leaves: Mapping[int, Storage],
        built: int,
        layer: int,
        separate: int,
    ) -> list[Storage]:
        """The storages of the gradients of a layer's input: those that it has made, of so many bytes together, and
        those of gradients that it was given, or of copies of them for `leaves`. `apart`: bytes of copies for several
        inputs."""
        sizes = {lie.storage: lie.bytes for lie in back.lies if lie.storage < 0}
        if sum(sizes.values()) == built and not separate:
            own = {k: Storage(size, layer - 1, holders={"walk"}) for k, size in sizes.items()}
            own |= dict(enumerate(arriving))
            self.arriving = [leaves.get(k) or own[lie.storage] for k, lie in enumerate(back.lies)]
            found = list(dict.fromkeys(self.arriving))
        else:
            found = [Storage(built + separate, layer - 1, holders={"walk"})] if built + separate else []
            for storage in leaves.values():
                self.release(storage, "walk")
        for storage in found:
            self.hold(storage, "walk")
        for k, storage in enumerate(arriving):
            self.release(storage, f"arriving {k}")
        return found

    def let_go_of_inputs(self, key: tuple[int, int, int]) -> None:
        """The graph of a layer releases its inputs."""
        for storage in self.read.pop(key, ()):
            self.release(storage, f"read by {key}")

    def let_go_of_an_input(self, key: tuple[int, int, int], size: int) -> None:
        """The graph of a layer releases one of several inputs: it may need the others longer."""
        held = self.read.get(key, [])
        one = next((storage for storage in held if storage.size == size), None)
        if one is None:
            return self.let_go_of_inputs(key)
        held.remove(one)
        self.release(one, f"read by {key}")

    def let_go_of_output(self, key: tuple[int, int, int]) -> None:
        """The graph of a layer releases what it holds of its output."""
        for storage in self.outputs.pop(key, ()):
            self.release(storage, f"made by {key}")

    # branches: an output gets a gradient from each of its readers, and a layer may have several inputs

    def sum_of_gradients(self, ins: Instruction) -> Storage | None:
        """The sum of the gradients of an output with several readers; None if there is one reader, whose gradient the
        instruction frees."""
        layer = ins.layers[-1]
        out = self.program.wiring.out[layer]
        if len(out) < 2:
            return None
        size = self.sizes.size(self.rank, grad_output(out[0], ins.microbatch, ins.step))
        if len(out) > 2:  # a new sum and the sum before it exist together
            self.change(2 * size, "temporary", layer)
            self.change(-2 * size, "temporary", layer)
        return self.make(size, layer, "walk")

    def given_to_each(self, layer: int, i: int, step: int, built: int) -> int:
        """The gradients of several inputs are separate tensors. Counts and returns the bytes that they need beyond
        `built`.

        (A join's backward gives parts of one tensor, which are copied where they are needed.)
        """
        into = self.program.wiring.into[layer]
        if len(into) < 2 or layer <= self.program.first_trainable:
            return 0
        more = sum(self.sizes.size(self.rank, grad_output(e, i, step)) for e in into) - built
        self.change(more, "activations", layer - 1)
        return more

    def hand_back(self, ins: Instruction, built: list[Storage]) -> None:
        """Pass the gradients of an instruction's inputs, which the walk holds, to the layers that made these inputs."""
        found = built[0] if built else None
        first, layer = self.program.first_trainable, ins.layers[0]
        into, inputs = self.program.wiring.into[layer], self.program.wiring.inputs[layer]
        separate = len(into) > 1 and ins.op is Op.BACKWARD
        if separate:
            self.arriving = []
            for storage in built:
                self.release(storage, "walk")
        given = [storage for value in ins.reads if value.kind == "grad_output" for storage in self.storages_of(value)]
        for e, source in zip(into, inputs, strict=True):
            value = self.named(grad_output(e, ins.microbatch, ins.step), ins.writes)
            if source < first:
                continue
            self.handed_on[value] = built[1:] if self.arriving else self._handed_on(value, found, given)
            if self.arriving:
                self.lies[value] = list(self.arriving)
            for storage in self.handed_on[value]:
                self.hold(storage, f"live {value}")
            if separate:
                self.live[value] = self.make(self.sizes.size(self.rank, value), source, "live")
            elif found is not None:
                self.hold(found, f"live {value}")  # an input half gives parts of one tensor
                self.live[value] = found
        for storage in built:
            self.release(storage, "walk")

    # gradients -------------------------------------------------------------------------------------------------------

    def groups(self, layer: int) -> tuple[list[int], list[int]]:
        """The trainable groups of a layer, and which of them have no gradient yet."""
        groups = [g for g in self.program.groups_of_layer[layer] if self.program.groups[g].trainable]
        return groups, [g for g in groups if g not in self.filled]

    def kind_of_gradient(self, groups: Sequence[int]) -> str:
        """The kind of memory of a new gradient. If it is copied into a bucket, it is temporary, and the bucket
        counts."""
        return "temporary" if self.kept.intersection(groups) else "gradients"

    def fill(self, layer: int, groups: Sequence[int], fresh: Sequence[int]) -> list[int]:
        """The gradients of a layer have appeared. Returns the groups whose gradients are copied into a bucket."""
        copied = []
        for g in groups if fresh else ():
            if g not in fresh:  # tied to another layer, whose backward has made this gradient already
                kind = "temporary" if g in self.kept else "gradients"
                self.change(-self.sizes.size(self.rank, Value("grad", g)), kind, layer)
            else:
                self.filled.add(g)
                if g in self.kept:
                    copied.append(g)
        return copied


def _own(
    built: Storage, tape: LayerTape, given: Sequence[Storage | None]
) -> tuple[list[Storage], list[Storage | None]]:
    """The storages that a layer has made for its output, and that of each tensor of the output; [] if that is not
    known: then the output is one storage.

    made    all that it has made for its output; it becomes the first of these storages
    given   of each tensor that the layer was given, its storage
    """
    sizes = {lie.storage: lie.bytes for lie in tape.lies if lie.storage < 0}
    if sum(sizes.values()) != built.size or any(lie.storage >= len(given) for lie in tape.lies):
        return [built], []
    if not sizes:  # it hands on what it was given, or nobody knows
        return [built], [given[lie.storage] for lie in tape.lies]
    rest = [Storage(size, built.layer, built.kind, set(built.holders)) for size in list(sizes.values())[1:]]
    built.size = next(iter(sizes.values()))
    own = dict(zip(sizes, [built, *rest], strict=True))
    return [built, *rest], [own[lie.storage] if lie.storage < 0 else given[lie.storage] for lie in tape.lies]


def _within(storages: Sequence[Storage], size: int) -> list[Storage]:
    """Those of some storages that together have at most so many bytes, the largest first."""
    found: list[Storage] = []
    for storage in sorted(storages, key=lambda one: -one.size):
        if 0 < storage.size <= size and storage not in found:
            found.append(storage)
            size -= storage.size
    return found
