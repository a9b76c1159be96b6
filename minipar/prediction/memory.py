"""Predict the memory of ranks: tapes of single layers are played along the instructions of a program.

    F 0:2 mb0      tape of layer 0's forward | tape of layer 1's forward
    SEND           the output is freed
    B 0:2 mb0      tape of layer 1's backward | tape of layer 0's backward, gradients appear
    STEP           the optimizer's temporary memory

A tape cannot know who else holds a storage: an output lives until the executor, the layer that made it and the layer
that read it have all released it. This module follows these holders as the executor does.

Of layers that ranks share, a node may hand on a part of what it was given: (x, y) -> (x, z). Then the new value has the
storage of z, and holds that of x, too. A collective that gives z another form makes a new storage and leaves x alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from minipar.prediction.recorded import GraphPiece, LayerTape, Sizes, Storage, Tape, Tapes, keeps
from minipar.prediction.split_backward import input_half, weight_half
from minipar.program import (
    COLLECTIVES,
    COMPUTE,
    COPIES,
    Instruction,
    Op,
    Program,
    Value,
    carry,
    grad,
    grad_carry,
    grad_output,
    grad_shard,
    home,
    output,
    param,
    param_shard,
    repartitions,
    tier,
    version_of,
)
from minipar.program.comm_volume import changing
from minipar.program.graph_cuts import pieces_of
from minipar.strategies.passes import host_layers
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
    sizes   sizes of the program's values and rows of its micro-batches, such as `ProfiledCosts`
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
        self.joined: dict[Value, int] = {}  # bytes of a value that is put together when it is first read
        self.read: dict[
            tuple[int, int, int], list[Storage]
        ] = {}  # (layer, micro-batch, step) -> inputs that the layer's graph holds
        self.made: dict[tuple[int, int, int], Storage] = {}  # the same -> its own output, if its graph holds that
        self.saved: dict[tuple[int, int, int], int] = {}
        self.carried: dict[tuple[int, int, int], Storage] = {}  # carries that a layer's graph holds
        self.left: dict[tuple[int, int, int], Storage] = {}  # gradients that wait for a weight half
        self.messages: dict[Value, list[Storage]] = {}  # buffers of a collective, held until its result is read
        self.unpacked: dict[Value, int] = {}  # bytes needed to unpack the result of a compressed sum
        self.filled: set[int] = set()  # groups that have a gradient now
        self.brought: set[tuple[int, int, int]] = set()  # layers whose saved tensors were fetched: held to the end
        self.leaving: dict[Value, Storage] = {}  # what is freed when the rank waits for its copy
        self.state = program.state[rank] if program.state else frozenset()
        self.kept = {value.index for value in self.state if value.kind == "grad"}
        row = program.ranks[rank]
        self.receives: dict[int, list[tuple[Value, ...]]] = {}
        self.of_step: dict[int, Counter[int]] = {}  # peer -> how many of the receives are of each step
        for ins in row:
            if ins.op is Op.RECV:
                self.receives.setdefault(ins.peer, []).append(ins.writes)
                self.of_step.setdefault(ins.peer, Counter())[ins.step] += 1
        self.step = 0
        self.posted = dict.fromkeys(self.receives, 0)
        self.reached = dict.fromkeys(self.receives, 0)
        before = self.series.before
        for value in (value for value in self.state if tier(value) == "device"):
            if program.serving is not None and value.kind == "residual":
                continue  # (what is pushed is the host's, and so is what it leaves out)
            owner = KINDS[value.kind], -1 if value.kind == "grad" else self.layer_of(value.index)
            before[owner] = before.get(owner, 0) + sizes.size(rank, value)
        _, at_home = host_layers.computed(row)
        for value in self.state:
            if version_of(value) >= 0 and tier(value) == "device":
                size, layer = self._size_of_version(value), self.layer_of(value.index)
                self.live[value] = Storage(size, layer, "parameters", {"live"})
            elif version_of(value) >= 0 and value.index not in at_home:  # (frozen ones have no versions, and stay)
                owner = "parameters", self.layer_of(value.index)
                frozen = sizes.size(rank, home(value)) - self._size_of_version(value)
                before[owner] = before.get(owner, 0) + frozen
        for g in self._passed_on():
            owner = "optimizer", self.layer_of(g)
            before[owner] = before.get(owner, 0) + sizes.size(rank, param_shard(g))
        for layer in program.placement[rank]:
            before["parameters", layer] = before.get(("parameters", layer), 0) + tapes.buffers[layer]
        if data:
            before["data", -1] = data
        if program.compress.startswith("powersgd"):  # the right factors: the next step begins with them
            before["temporary", -1] = sum(self._factors(ins)[1] for ins in row if self._compresses(ins))

    def _passed_on(self) -> list[int]:
        """Groups whose bfloat16 parameters are whole, but whose float32 slice waits on the host or the disk."""
        if self.program.precision != "bf16":
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
        if self.program.serving is not None and ins.step > self.step:
            self.step = ins.step
            self.post(self.program.receives_ahead)
        for value in ins.reads:
            self.release(self.leaving.pop(value, None), "copy")
            unpacked = self.unpacked.pop(value, 0)
            self.change(unpacked, "temporary", -1)
            self.change(-unpacked, "temporary", -1)
            if value in self.joined:
                self.live[value] = self.make(self.joined.pop(value), value.index, "live", "buffers")
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
        elif ins.op is Op.FETCH and version_of(ins.writes[0]) >= 0:
            self.versions(ins)
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
        """The gradient, or the version of parameters, that an OFFLOAD copies away and then frees: it is there until the
        rank waits for the copy."""
        if ins.op is not Op.OFFLOAD or ins.reads[0] not in ins.frees:
            return None
        value = ins.reads[0]
        if (value.kind == "grad_shard" or version_of(value) >= 0) and value in self.live:
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
                storage = self.live.pop(value, None)
                self.release(storage, "live")
                self.release(storage, f"live {value}")
                for other in self.handed_on.pop(value, ()):
                    self.release(other, f"live {value}")

    def _size_of_version(self, value: Value) -> int:
        """Bytes of the trainable parameters, or of a slice of them."""
        sliced = home(value).kind == "param_shard"
        return self.sizes.size(self.rank, grad_shard(value.index) if sliced else grad(value.index))

    def versions(self, ins: Instruction) -> None:
        """Make the next version of parameters, in place of the newest one if nothing needs that any more."""
        for value in ins.writes:
            if version_of(value) >= 0:
                before = value._replace(step=value.step - 1)
                size = self._size_of_version(value)
                in_place = self.live.pop(before, None) if before in ins.frees else None
                self.live[value] = in_place or self.make(size, self.layer_of(value.index), "live", "parameters")

    def reduce_scatter(self, ins: Instruction) -> None:
        """Gradients are packed into a message, which stays until it is summed with the messages of other ranks. These
        are read in memory that the ranks share, without a copy."""
        buffers = [value for value in ins.writes if value.kind == "buffer"]
        size = sum(self.sizes.size(self.rank, value) for value in buffers)
        message = self.make(size, -1, "message", "buffers")
        self.free(ins)
        if self.program.compress != "none":  # in shorter numbers, which the sum comes in, too
            short = sum(part.bytes for part in ins.parts)
            self.release(message, "message")
            message = self.make(short + short // len(ins.group), -1, "message", "buffers")
        self.other(ins._replace(writes=tuple(value for value in ins.writes if value.kind != "buffer")))
        for value in ins.writes:
            if value.kind != "buffer":
                self.messages[value] = [message]

    def repartition(self, ins: Instruction) -> None:
        """A collective that gives an output, or the gradient of one, another form, as `execution/repartition.py` runs
        it. Tensors whose form stays are not touched; the others are held until the new ones are read."""
        (source,), (target,) = ins.reads, ins.writes
        there = self.storages_of(source)
        changed = self.sizes.size(self.rank, changing(ins))
        stays = max(0, self.sizes.size(self.rank, source) - changed)
        made = max(0, self.sizes.size(self.rank, target) - stays)
        kept = _within(there, stays)
        messages = [storage for storage in there if storage not in kept]
        rest = min(stays - sum(one.size for one in kept), sum(one.size for one in messages) - changed)
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
            self.live[target] = self.make(made, target.index, "live", "buffers")
        else:  # the parts of all ranks; of an exchange also what is given for them
            copies = len(ins.group) if ins.op is Op.ALL_GATHER else 2
            messages.append(self.make(copies * changed, -1, "message", "buffers"))
            self.joined[target] = made
        self.messages[target] = messages

    def storages_of(self, value: Value) -> list[Storage]:
        """The storages that a live value holds."""
        own = self.live.get(value)
        return [*([own] if own is not None else []), *self.handed_on.get(value, ())]

    def named(self, plain: Value, among: Sequence[Value]) -> Value:
        """A value as an instruction names it: with its form."""
        if not self.program.forms:
            return plain
        return next((one for one in among if one._replace(form="") == plain), plain)

    def _sent(self, ins: Instruction, *messages: Storage) -> None:
        """The messages of a sum stay until an instruction reads the sum."""
        for value in ins.writes:
            self.messages[value] = list(messages)

    def _compresses(self, ins: Instruction) -> bool:
        """Whether this is a compressed sum of whole gradients."""
        return ins.op is Op.ALL_REDUCE and home(ins.reads[0]).kind == "grad" and self.program.compresses(ins)

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
            self.unpacked[ins.writes[0]] = first + second
        else:
            self._sent(ins, self.make(sum(part.bytes for part in ins.parts), -1, "message", "buffers"))

    def _summed(self, ins: Instruction) -> list[int]:
        """Bytes of what each message of a sum leaves out, if it leaves out everything: of its part of the residual."""
        sizes = [size * self._wider // self._unit(ins) for g in ins.layers for size in self.program.groups[g].tensors]
        return [sum(sizes)] if ins.parts[0].layer < 0 else sizes

    def _unit(self, ins: Instruction) -> int:
        """How many times as large as they are the program says that the gradients of a sum, and its parts, are: with
        precision=bf16 it may have the sizes of float32."""
        real = sum(self.sizes.size(self.rank, grad(g)) for g in ins.layers)
        said = sum(sum(self.program.groups[g].tensors) for g in ins.layers)
        return max(1, round(said / real)) if real else 1

    @property
    def _wider(self) -> int:
        """How many times as large as a gradient its residual is."""
        return 2 if self.program.precision == "bf16" else 1

    def _factors(self, ins: Instruction) -> tuple[int, int]:
        """Bytes of the left factors of a sum's gradients, including gradients that are sent whole, and of the right
        factors."""
        first = second = 0
        parts = iter(ins.parts)
        for size in self._summed(ins):
            left = next(parts).bytes // self._unit(ins)
            first += left
            if left < size:  # (factors are smaller than their gradient)
                second += next(parts).bytes // self._unit(ins)
        return first, second

    def _largest(self, ins: Instruction) -> None:
        """For each message: the absolute values, the largest ones with their places, and the rows of all ranks."""
        messages: list[Storage] = []
        for size, part in zip(self._summed(ins), ins.parts, strict=True):
            rows, wider = part.bytes // self._unit(ins), self._wider
            row = rows // len(ins.group)
            count = next(
                count
                for item in (4, 8, 2)
                if row_bytes(count := top(size // item, self.program.compress), item // wider) == row
            )
            values, places = row - 4 * count, 8 * count
            for change in (size, values * wider + places, -size - values * wider):
                self.change(change, "temporary", -1)
            mine = self.make(row, -1, "walk", "buffers")
            both = values if wider == 1 else values * wider + values  # (and rounded)
            for change in (both, -both):
                self.change(change, "temporary", -1)
            messages.append(self.make(rows, -1, "message", "buffers"))
            self.change(-places, "temporary", -1)
            self.release(mine, "walk")
            self.unpacked[ins.writes[0]] = places
        self._sent(ins, *messages)

    def _workspace(self, groups: Sequence[int]) -> int:
        """Temporary memory of a STEP over some groups. The slices of sharded groups are parameters of their own.

        With precision=bf16 the tapes were recorded in bfloat16, but STEP works in float32, and makes float32 copies of
        whole gradients.
        """
        shards = [g for g in groups if Value("optimizer_shard", g) in self.state]
        others = [g for g in groups if g not in shards]
        whole = self.tapes.workspace.of(others)
        slices = max([1, *(len(self.program.slicing(g, self.rank)) for g in shards)])
        sliced = self.tapes.flat_workspace.of(shards) // slices
        if self.program.precision != "bf16":
            return max(whole, sliced)
        return 2 * max(whole + sum(self.sizes.size(self.rank, grad(g)) for g in others), sliced)

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
        """Allocate the buffers of receives that are posted now. (A worker of parameter servers runs every step by
        itself, and posts nothing for the next one.)"""
        for peer in peers or self.receives:
            due = min(self.reached[peer] + ahead, len(self.receives[peer]))
            if self.program.serving is not None:
                due = min(due, sum(count for step, count in self.of_step[peer].items() if step <= self.step))
            while self.posted[peer] < due:
                values = self.receives[peer][self.posted[peer]]
                self.posted[peer] += 1
                for value in values:
                    size = self.sizes.size(self.rank, value)
                    self.live[value] = self.make(size, self.program.source(value), "live", "buffers")

    # computing -------------------------------------------------------------------------------------------------------

    def tape(self, layer: int, microbatch: int) -> LayerTape:
        return self.tapes.layers[self.sizes.rows(self.rank, microbatch)][layer]

    def forward(self, ins: Instruction) -> None:
        i, step = ins.microbatch, ins.step
        saves = {value.index for value in ins.writes if value.kind == "saved"}
        inputs = (self.named(output(a, i, step), ins.reads) for a in self.program.wiring.inputs[ins.layers[0]])
        given = [storage for value in inputs for storage in self.storages_of(value)]
        borrowed: list[Storage] = []  # inputs of pieces: the executor holds them until the instruction ends
        for piece in self.pieces[ins.layers, i]:
            trains = piece[0] in saves
            for layer in piece:
                key = layer, i, step
                tape = self.tape(layer, i)
                read = trains and (layer == piece[0] or keeps(tape.backward, "input"))
                for value in given:
                    self.hold(value, "walk")
                    if read:
                        self.hold(value, f"read by {key}")
                        self.read.setdefault(key, []).append(value)
                made = self._play_forward(tape.forward if trains else tape.plain, layer)
                if trains:
                    self.saved[key] = sum(size for size, what in tape.forward if what == "saved")
                    if keeps(tape.backward, "output"):
                        self.hold(made, f"made by {key}")
                        self.made[key] = made
                self._carry_on(ins, key, tape)
                passed = self._handed_on(output(layer, i, step), made, given)
                if layer == piece[0]:
                    borrowed += given
                for value in given:
                    if value not in borrowed and value not in passed:
                        self.release(value, "walk")
                given = [made, *passed]
            handed_on = self.named(output(piece[-1], i, step), ins.writes)
            if handed_on in ins.writes:
                self.release(self.live.pop(handed_on, None), "live")
                self.hold(made, "live")
                self.live[handed_on] = made
                for storage in passed:
                    self.hold(storage, f"live {handed_on}")
                self.handed_on[handed_on] = passed
        for storage in (*borrowed, *given):
            self.release(storage, "walk")

    def _handed_on(self, value: Value, made: Storage | None, given: Sequence[Storage]) -> list[Storage]:
        """The storages that a node was given and hands on: the value has more bytes than the node has made."""
        forms = self.program.forms
        if not forms:
            return []
        form = value.form or (forms[value.index].writes if value.kind == "output" else "")
        whole = self.sizes.size(self.rank, value._replace(form=form))
        return _within(given, whole - (made.size if made is not None else 0))

    def _carry_on(self, ins: Instruction, key: tuple[int, int, int], tape: LayerTape) -> None:
        """What a layer keeps of a slice for the next slice. Its bytes are counted already."""
        size = sum(delta for delta, what in (tape.forward or tape.plain) if what == "carry")
        if not size:
            return
        made = self.storage(size, key[0])
        if keeps(tape.backward, "carry"):
            self.hold(made, f"made by {key}")
            self.carried[key] = made
        if (value := carry(*key)) in ins.writes:
            self.hold(made, "live")
            self.live[value] = made
        self.release(made, "walk")

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
        above = self.sum_of_gradients(ins)
        copied: list[int] = []
        pieces = self.pieces[ins.layers, i]
        for piece in reversed(pieces):
            given = above  # the gradient that this piece got from the piece after it
            inner: Storage | None = None  # the gradient between two layers of the piece
            for layer in reversed(piece):
                inner = self._play_backward(layer, i, step, inner, copied, layer == piece[0])
            key = piece[0], i, step
            self.let_go_of_inputs(key)
            self.release(given, "walk")
            above = inner
        self.hand_back(ins, above)
        for g in copied:  # they have been copied into their buckets
            self.change(-self.sizes.size(self.rank, Value("grad", g)), "temporary", self.layer_of(g))

    def _play_backward(
        self, layer: int, i: int, step: int, received: Storage | None, copied: list[int], last: bool
    ) -> Storage | None:
        """Play the backward of one layer. Returns the gradient of its input. With `last` the executor holds the layer's
        input until the piece is done."""
        key = layer, i, step
        tape = self.tape(layer, i)
        groups, fresh = self.groups(layer)
        left = self.saved.pop(key, 0)
        made = carried = 0
        for delta, what in tape.backward if fresh else tape.later:
            if what == "saved":
                if key not in self.brought:
                    left += delta
                    self.change(delta, "activations", layer)
            elif what == "output":
                self.release(self.made.pop(key, None), f"made by {key}")
            elif what == "input":
                if not last:
                    self.let_go_of_inputs(key)
            elif what == "grad_output":
                if delta < 0:
                    self.release(received, "walk")
            elif what == "grad_input":
                made += delta
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
        made += self.given_to_each(layer, i, step, made)
        self.change(-left, "activations", layer)
        self.release(self.made.pop(key, None), f"made by {key}")
        copied += self.fill(layer, groups, fresh)
        if not made and received is not None and layer > self.program.first_trainable:
            return received  # the layer returns the gradient that it received
        self.release(received, "walk")
        return Storage(made, layer - 1, holders={"walk"}) if made else None

    def let_go_of_inputs(self, key: tuple[int, int, int]) -> None:
        """The graph of a layer releases its inputs."""
        for storage in self.read.pop(key, ()):
            self.release(storage, f"read by {key}")

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

    def given_to_each(self, layer: int, i: int, step: int, made: int) -> int:
        """The gradients of several inputs are separate tensors. Counts and returns the bytes that they need beyond
        `made`.

        (A join's backward gives parts of one tensor, which are copied where they are needed.)
        """
        into = self.program.wiring.into[layer]
        if len(into) < 2 or layer <= self.program.first_trainable:
            return 0
        more = sum(self.sizes.size(self.rank, grad_output(e, i, step)) for e in into) - made
        self.change(more, "activations", layer - 1)
        return more

    def hand_back(self, ins: Instruction, found: Storage | None) -> None:
        """Pass the gradient of an instruction's inputs, which the walk holds, to the layers that made these inputs."""
        first, layer = self.program.first_trainable, ins.layers[0]
        into, inputs = self.program.wiring.into[layer], self.program.wiring.inputs[layer]
        apart = len(into) > 1 and ins.op is Op.BACKWARD
        if apart:
            self.release(found, "walk")
        given = [storage for value in ins.reads if value.kind == "grad_output" for storage in self.storages_of(value)]
        for e, source in zip(into, inputs, strict=True):
            value = self.named(grad_output(e, ins.microbatch, ins.step), ins.writes)
            if source < first:
                continue
            self.handed_on[value] = self._handed_on(value, found, given)
            for storage in self.handed_on[value]:
                self.hold(storage, f"live {value}")
            if apart:
                self.live[value] = self.make(self.sizes.size(self.rank, value), source, "live")
            elif found is not None:
                self.hold(found, f"live {value}")  # an input half gives parts of one tensor
                self.live[value] = found
        self.release(found, "walk")

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


def _within(storages: Sequence[Storage], size: int) -> list[Storage]:
    """Those of some storages that together have at most so many bytes, the largest first."""
    found: list[Storage] = []
    for storage in sorted(storages, key=lambda one: -one.size):
        if 0 < storage.size <= size and storage not in found:
            found.append(storage)
            size -= storage.size
    return found
