"""Run-time checks of a rank (`check=true`): an executor that looks at what its instructions read and write.

    here, at once               a value is read as it was written: activations, parameters and gradients in between
                                every backward adds to a gradient once, beginning from nothing, in all micro-batches
                                a STEP uses the gradients that were summed, and changes its parameters
                                what was copied away comes back as it went
                                nothing is infinite or no number
                                a micro-batch's loss counts as much as its targets do
    over ranks, after a pass    messages arrive as they were sent; sums are the sums of what the ranks had
                                what ranks have alike is alike: parameters, gradients, buffers, whole values of layers
                                that ranks share; slices put together are the whole; an average is that of all
                                the shares of all micro-batches in the mean loss add up to 1
                                (what workers and parameter servers compare: `server/checking.py`)

Without flushes a version of the parameters is what the update that made it has left, whichever instruction reads it: so
a backward uses the version of its forward wherever the program says so (weight stashing). Such a run is one pass, and
what ranks compare is compared at its end.

The first instruction where one of them breaks is named. A rank has this executor, or the plain one: without checks none
of this is there. Results do not change; a step takes longer, since every value is read a second time.

What it cannot find: what is wrong in the same way on every rank, and consistent, such as a wrong layer, loss function,
optimizer or data set, rows in another order, or two mistakes that cancel out. A wrong sum that differs by less than a
thousandth of its norm (in float32) is taken for rounding. Compressed sums are only compared between ranks, and of
exchanges between experts only how much they moved. A message that never comes is no case for it, but a Deadlock. To
compare with plain torch there is `train(..., check=True)`.
"""

from __future__ import annotations

import ctypes
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from minipar.data.batches import Batch, BatchPart
from minipar.errors import CheckFailed
from minipar.execution import facts
from minipar.execution.emulation import Delays
from minipar.execution.executor import Executor, PassRecord
from minipar.execution.facts import ALIKE, NEAR, ONE, SUM, Broken, Fact
from minipar.execution.mean_loss import Target
from minipar.execution.owners import Owner
from minipar.execution.parameter_slices import SlicedGroup
from minipar.execution.parameter_versions import Versions
from minipar.execution.repartition import rows_between
from minipar.models.losses import option, scalar
from minipar.models.tensors import tensors
from minipar.program import (
    BACKWARDS,
    MOVED,
    Instruction,
    Op,
    Program,
    Value,
    home,
    param,
    piece_of,
    repartitions,
    tier,
)
from minipar.program.forms import PARTIAL, WHOLE, along, changed_axis, letters, shard_of
from minipar.sharding.nodes import Cut

_PERIOD = 65_537  # of the weights; a prime, so that no size of a tensor is a multiple of it by chance
_NEAR = {torch.float64: 1e-9, torch.float32: 1e-3}  # of sums, as a part of their norm; of shorter types 0.1
_SHARE = 1e-5  # the shares of a step add up to 1 within this
_MISSING = object()


# numbers that stand for tensors ---------------------------------------------------------------------------------------


def _several(content: Any) -> list[Tensor | None]:
    """The tensors of a value; of a list of gradients also the places that have none."""
    return content if isinstance(content, list) else list(tensors(content))


def checksum(found: Iterable[Tensor | None]) -> int:
    """A number that differs where shapes or bits differ. A gradient that is not there is like one of zeros."""
    total = 0
    for tensor in found:
        if tensor is None or not _norm(tensor):
            total = zlib.crc32(b"0", total)
            continue
        flat = tensor.detach().reshape(-1).contiguous().cpu()
        total = zlib.crc32(str(tuple(tensor.shape)).encode(), total)
        # (not by `.numpy()`: a storage that was given to NumPy cannot be resized any more, as ZeRO does)
        total = zlib.crc32((ctypes.c_char * (flat.numel() * flat.itemsize)).from_address(flat.data_ptr()), total)
    return total


def _norm(tensor: Tensor) -> float:
    """Its norm, with many digits whatever the tensor has: an exchange is judged by the squares of what it moved."""
    flat = tensor.detach().reshape(-1)
    wide = flat if flat.is_floating_point() or flat.is_complex() else flat.double()
    dtype = torch.complex128 if flat.is_complex() else torch.float64
    return float(torch.linalg.vector_norm(wide, dtype=dtype)) if flat.numel() else 0.0


@lru_cache(maxsize=8)
def _weights(dtype: torch.dtype, device: torch.device) -> Tensor:
    drawn = torch.rand(_PERIOD, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    signs = torch.where(torch.arange(_PERIOD) * 40_503 % 65_536 < 32_768, 1.0, -1.0)
    return ((drawn + 0.5) * signs).to(device, dtype)


def weighed(tensor: Tensor, at: int = 0) -> float:
    """The sum of a tensor's elements, each times a fixed random weight: that of its place, counted from `at`."""
    flat = tensor.detach().reshape(-1)
    dtype = torch.float64 if flat.dtype == torch.float64 else torch.float32
    weights, total, k = _weights(dtype, flat.device), 0.0, 0
    while k < flat.numel():
        begin = (at + k) % _PERIOD
        size = min(flat.numel() - k, _PERIOD - begin)
        total += float(torch.dot(flat[k : k + size].to(dtype), weights[begin : begin + size]))
        k += size
    return total


def weighed_together(found: Iterable[tuple[Tensor | None, int]]) -> tuple[float, float, float]:
    """Of tensors end to end, given with their sizes: the product with the weights, the square of the norm, and the
    tolerance."""
    at, total, square, near = 0, 0.0, 0.0, 1e-9
    for tensor, size in found:
        if tensor is not None:
            total, square = total + weighed(tensor, at), square + _norm(tensor) ** 2
            near = max(near, _tolerance(tensor.dtype))
        at += size
    return total, square, near


def _tolerance(dtype: torch.dtype) -> float:
    return _NEAR.get(dtype, 0.1)


def is_finite(tensor: Tensor) -> bool:
    return math.isfinite(_norm(tensor)) or bool(torch.isfinite(tensor).all())  # (a norm may overflow)


def left_alone(before: Sequence[Tensor], after: Sequence[Tensor], gradient: float, rate: float) -> bool:
    """Whether an update has changed nothing, though it should have. gradient: the largest element of its gradient."""
    largest = max([float(p.abs().max()) for p in before if p.numel()], default=0.0)
    due = min(rate, rate * gradient) > 1e-5 * largest and gradient > 0
    return due and all(torch.equal(p, old) for p, old in zip(after, before, strict=True))


def failure(program: Program, broken: Broken, base: int) -> CheckFailed:
    """The error that names an instruction where something is wrong. base: the number of the program's first step."""
    rank, index, why = broken
    row = program.ranks[rank]
    ins = row[index] if 0 <= index < len(row) else None
    step = base + (max(ins.step, 0) if ins is not None else 0)
    said = str(ins) if ins is not None else "before the first instruction"
    layers = tuple(ins.layers or [v.index for v in (*ins.reads, *ins.writes)][:1]) if ins is not None else ()
    named = f", layer {program.title(layers[0])}" if layers else ""
    error = CheckFailed(
        f"check: {why}; first at rank {rank}, step {step}, instruction {index}: {said}{named}",
        "Everything before it was as it should be. `print(run.program.text(rank))` shows the program around it.",
    )
    error.rank, error.step, error.index, error.instruction, error.layers = rank, step, index, said, layers
    return error


def _averages(ins: Instruction) -> bool:
    """Whether a collective averages parameters."""
    return ins.op is Op.ALL_REDUCE and home(ins.reads[0]).kind == "param"


class _Heard:
    """The user's loss, which also notes the mean that it last gave."""

    def __init__(self, given: Any) -> None:
        self.given, self.mean = given, 0.0

    def __call__(self, output: Any, y: Any) -> Any:
        value = self.given(output, y)
        self.mean = float(scalar(value).detach())
        return value

    def __getattr__(self, name: str) -> Any:
        found = option(self.given, name, _MISSING)
        if found is _MISSING:
            raise AttributeError(name)
        return found


# the executor ---------------------------------------------------------------------------------------------------------


class CheckedExecutor(Executor):
    """An executor that checks what it runs. Raises CheckFailed, which names the first instruction that is wrong.

    written    checksums of activations and their gradients, as they were written or as they arrived
    holds      checksums of the parameters of each group, or of each of their versions, as they were left
    grads      checksums of the gradients of each group, as they were left; a group without one has no gradient
    parts      the same of this rank's slices of them, once they were summed
    updated    checksums of this rank's slices of parameters, as their STEP has left them
    away       checksums of what was copied to a slower tier: saved values, parameters, optimizer states
    shares     of each step, how much of its mean loss this rank has computed
    forwards   of each step, in how many micro-batches with rows
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.facts: list[Fact] = []
        self.first: dict[tuple[Any, ...], Any] = {}  # what the first run of something did, which later ones do too
        self.buffers_before: dict[int, int] = {}
        self._going: dict[int, list[tuple[str, list[float]]]] = {}  # collectives under way: what they began with
        self._on_host_at = -1  # the instruction that the host computes
        super().__init__(*args, **kwargs)
        compute = self.compute
        for name in ("forward", "backward", "backward_input", "backward_weight"):
            setattr(compute, name, partial(self._computed, getattr(compute, name)))
        self._heard = compute.loss.loss = _Heard(compute.loss.loss)
        compute.loss.target = partial(self._target, compute.loss.target)  # type: ignore[method-assign]
        compute._note_loss = partial(self._share, compute._note_loss)  # type: ignore[method-assign]

    def follow(self, program: Program, delays: Delays | None = None) -> None:
        super().follow(program, delays)
        self.index = {id(ins): k for k, ins in enumerate(self.instructions)}
        places = {(ins.reads, ins.peer): k for k, ins in enumerate(self.instructions) if ins.op is Op.SEND}
        send = self.links.send

        def sent(message: tuple[Value, ...], contents: list[Any], peer: int, arrival: float = 0.0) -> None:
            with self._aside():
                self._moved(message, contents, self.comm.rank, peer, places[message, peer])
            send(message, contents, peer, arrival)

        self.links.send = sent  # type: ignore[method-assign]

    def run(
        self, batches: Callable[[int], Batch | BatchPart], base: int = 0, keep_gradients: bool = False
    ) -> PassRecord:
        self.base, self.facts, self._going, self.pending = base, [], {}, {}
        self.written: dict[Value, int] = {}
        self.holds: dict[Value, int] = {}
        self.grads: dict[int, int] = {}
        self.parts: dict[int, int] = {}
        self.updated: dict[Value, int] = {}
        self.away: dict[Value, int] = {}
        self._pieces: dict[int, tuple[float, float, float]] = {}  # of gradients that go in pieces: what they were
        self.shares: dict[int, float] = {}
        self.forwards: dict[int, int] = {}
        with self._aside():
            self.state.begin()  # (the newest version is the first one of this pass)
            self._begin()
        record = super().run(batches, base, keep_gradients)
        with self._aside():
            self._end()
        return record

    # where and what --------------------------------------------------------------------------------------------------

    def _fail(self, rank: int, index: int, why: str) -> None:
        raise failure(self.program, Broken(rank, index, why), self.base)

    def _here(self, ins: Instruction, why: str) -> None:
        self._fail(self.comm.rank, self._at(ins), why)

    def _at(self, ins: Instruction) -> int:
        """The index of an instruction; of one that the host computes under other names, that of the one that it is."""
        return self.index.get(id(ins), self._on_host_at)

    def _note(self, rule: str, what: str, index: int, ranks: Iterable[int], numbers: Sequence[float],
              tolerance: float = 0.0) -> None:  # fmt: skip
        self.facts.append(Fact(rule, what, index, tuple(ranks), tuple(map(float, numbers)), tolerance))

    def _held(self) -> Iterator[int]:
        """The groups that this rank has parameters of."""
        return (g for g, params in enumerate(self.groups) if params)

    def _alone(self) -> tuple[int, ...]:
        """Where replicas train by themselves, the ranks of this one."""
        program = self.program
        if not program.local_steps:
            return ()
        return tuple(r for r in range(program.workers) if program.replica(r) == program.replica(self.comm.rank))

    def _parts_of_rows(self) -> int:
        """Among how many of the ranks that share a layer a micro-batch is divided."""
        places = zip(self.program.places(self.comm.rank), self.compute.inputs, strict=True)
        return math.prod(count for (_, count), part in places if part in ("S0", "S1"))

    def _twins(self, g: int) -> tuple[int, ...]:
        """The ranks that have the same parameters of a group as this one."""
        program, me = self.program, self.comm.rank
        used = set(program.groups[g].layers)
        return tuple(
            rank
            for rank, held in enumerate(program.placement)
            if not used.isdisjoint(held) and program.part(rank, g, "S") == program.part(me, g, "S")
        )

    def _version(self, values: Iterable[Value], g: int) -> Value:
        """The parameters of a group among some values. (A rank that decides as it runs has only the newest version, and
        its number is known afterwards.)"""
        found = (home(v) for v in values if home(v).kind == "param" and v.index == g)
        return next(found, param(g)) if self.program.in_flight is None else param(g)

    def _of_update(self, ins: Instruction, g: int, made: bool) -> Value:
        """The parameters that a STEP begins with, or those that it, or the average after it, has `made`. (On the host
        they have no number.)"""
        value = self._version(ins.writes if made else ins.reads, g)
        unnamed = isinstance(self.state.owners[g], Versions) and self.program.in_flight is None and value.step < 0
        return param(g, ins.step + made) if unnamed else value

    def _is_there(self, value: Value) -> bool:
        """Whether parameters are in memory: those of ZeRO-3 only once they are gathered, offloaded ones while they are
        here, and versions until they are freed."""
        if any(home(coming) == value for coming in self.pending):  # (their memory is there, and they are not yet)
            return False
        own, owner = [p.data for p in self.groups[value.index]], self.state.owners[value.index]
        if isinstance(owner, Versions) and self.program.in_flight is None:
            own = owner.alive.get(value.step, [])
        return bool(own) and all(tensor.untyped_storage().nbytes() for tensor in own if tensor.numel())

    def _seen(self, g: int) -> int:
        """The checksum of a group's parameters as its layers see them."""
        return checksum([p.data for p in self.groups[g]])

    def _parameters(self, value: Value) -> int:
        """The checksum of parameters; of a version also while layers see another one."""
        owner = self.state.owners[value.index]
        if not isinstance(owner, Versions) or self.program.in_flight is not None:
            return self._seen(value.index)
        return checksum(owner.alive[value.step])

    def _left(self, owner: Owner, value: Value) -> int:
        """The checksum of a group's parameters as its optimizer has left them, perhaps in copies on the host."""
        pairs = zip(self.groups[owner.number], owner.masters, strict=True) if owner.masters else ()
        return checksum([m.data.to(p.dtype) for p, m in pairs]) if owner.masters else self._parameters(value)

    def _gradients(self, g: int) -> int:
        """The checksum of a group's gradients, on the device or, where the optimizer works there, on the host."""
        own, masters = self.groups[g], self.state.owners[g].masters
        if not masters or g in self.state.slices:
            return checksum([p.grad for p in own])
        pairs = zip(own, masters, strict=True)
        return checksum([m.grad if p.grad is None else p.grad.to(m.dtype) for p, m in pairs])

    def _slice(self, owner: SlicedGroup) -> Tensor | None:
        """This rank's slice of a summed gradient, on the device or on the host."""
        return owner.summed[0].grad if owner.part.grad is None else owner.part.grad

    # a pass ----------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """What was there before: parameters and buffers are alike on all ranks that have them."""
        for g in self._held():
            owner = self.state.owners[g]
            first = next((k for k, ins in enumerate(self.instructions)
                          if any(home(v).kind == "param" and v.index == g for v in ins.reads)), -1)  # fmt: skip
            value = self._version(self.instructions[first].reads, g)
            if self._is_there(value) and not (isinstance(owner, SlicedGroup) and owner.scattered):
                self._first_seen(value, first)
        for layer, module in self.compute.layers.items():
            self.buffers_before.setdefault(layer, checksum(module.buffers()))

    def _first_seen(self, value: Value, index: int) -> None:
        """A group's parameters are in memory for the first time: in between, replicas may be apart."""
        self.holds[value] = self._parameters(value)
        what = f"param({value.index}) at the beginning"
        self._note(ALIKE, what, index, self._twins(value.index), [self.holds[value]])

    def _end(self) -> None:
        """After the last instruction: the shares of the loss, buffers; then everything is compared."""
        program, rank = self.program, self.comm.rank
        last = {ins.step: k for k, ins in enumerate(self.instructions)
                if ins.op is Op.FORWARD and ins.layers[-1] == program.layers - 1}  # fmt: skip
        if self.compute.is_first("S0", "S1"):
            for step, index in last.items():
                share = self.shares.get(step, 0.0)
                of_all = f"the shares of micro-batches in the loss of step {self.base + step}"
                if self.compute.loss.every is not None:  # each micro-batch of a replica has a mean of its own
                    forwards = self.forwards.get(step, 0)
                    if forwards:
                        together = program.sharers(rank)  # (which have the other tokens or rows of it)
                        self._note(ONE, of_all, index, together, [share * self.compute.loss.means / forwards], _SHARE)
                elif self.compute.rows.share(step):  # (replicas that train by themselves have means of their own)
                    self._note(ONE, of_all, index, self._alone(), [share], _SHARE)
        for layer, module in self.compute.layers.items():
            found = checksum(module.buffers())
            if (
                found == self.buffers_before[layer]
                and program.sharing == 1
                and next(module.buffers(), None) is not None
            ):
                twins = tuple(r for r, held in enumerate(program.placement) if layer in held)
                index = max(k for k, ins in enumerate(self.instructions)
                            if layer in ins.layers and ins.op in (Op.FORWARD, *BACKWARDS))  # fmt: skip
                self._note(ALIKE, f"the buffers of layer {program.title(layer)}", index, twins, [found])
        for value in filter(self._is_there, self.holds):
            if self._parameters(value) != self.holds[value]:
                both = ((k, v) for k, ins in enumerate(self.instructions) for v in (*ins.reads, *ins.writes))
                index = max(k for k, v in both if home(v).kind == "param" and v.index == value.index)
                self._fail(rank, index, f"{value} is not what the last update of it has left")
        self._compare()

    def _compare(self) -> None:
        """Compare what all ranks have noted."""
        broken = facts.first_broken(self.program, self._of_all())
        if broken is not None:
            self._fail(*broken)

    def _of_all(self) -> list[list[Fact]]:
        """The facts of every rank."""
        if self.comm.size == 1:
            return [self.facts]
        data = facts.pack(self.facts)
        sizes = self.comm.all_gather(len(data))
        joined = bytes(self.comm.all_gather(torch.frombuffer(bytearray(data), dtype=torch.uint8)).tolist())
        ends = [sum(sizes[: k + 1]) for k in range(len(sizes))]
        return [facts.unpack(joined[end - size : end]) for size, end in zip(sizes, ends, strict=True)]

    # compute ---------------------------------------------------------------------------------------------------------

    def _computed(
        self, run: Callable[[Instruction, dict[Value, Any]], None], ins: Instruction, live: dict[Value, Any]
    ) -> None:
        with self._aside():
            self._read(ins, live)
            counted = self._counts(ins)
            if ins.op is Op.FORWARD and self.compute.rows.count(ins):
                self.forwards[ins.step] = self.forwards.get(ins.step, 0) + (ins.layers[-1] == self.program.layers - 1)
        run(ins, live)
        with self._aside():
            self._added(ins, counted)
            for value in ins.writes:
                if value in live:
                    self._made(ins, value, live[value])

    def _read(self, ins: Instruction, live: dict[Value, Any]) -> None:
        """What an instruction reads is as it was left."""
        for value in ins.reads:
            left = None if value not in live or tier(value) == "disk" else self.written.get(home(value))
            if left is not None and checksum(_several(live[value])) != left:
                self._here(ins, f"{value} was changed between the instruction that wrote it and this one")
            if value.kind != "param" or not self._is_there(held := self._version([value], value.index)):
                continue
            if held not in self.holds:
                self._first_seen(held, self._at(ins))
            elif self._seen(value.index) != self.holds[held]:
                self._here(ins, f"{value} is not what the last update of it has left")

    def _made(self, ins: Instruction, value: Value, content: Any) -> None:
        """A value is there: it is finite, and whole values are alike on the ranks that share the layer."""
        several = _several(content)
        self.written[home(value)] = checksum(several)
        rank, program = self.comm.rank, self.program
        if not all(tensor is None or is_finite(tensor) for tensor in several):
            self._here(ins, f"{value} has numbers that are infinite or no numbers")
        if program.sharing == 1 or value.kind not in MOVED:
            return
        for number, axis in enumerate(program.sharing_axes):
            for k, (tensor, letter) in enumerate(
                zip(several, letters(along(value.form, number), len(several)), strict=True)
            ):
                if tensor is not None and letter == WHOLE and tensor.is_floating_point():
                    what = f"{value} ({k}) of step {value.step} after {ins.op.name}" + f" along {axis}" * (number > 0)
                    numbers, near = [weighed(tensor), _norm(tensor)], _tolerance(tensor.dtype)
                    self._note(NEAR, what, self._at(ins), program.sharers(rank, (axis,)), numbers, near)

    # gradients -------------------------------------------------------------------------------------------------------

    def _graded(self, ins: Instruction) -> list[int]:
        return [value.index for value in ins.writes if value.kind == "grad" and self.groups[value.index]]

    def _counts(self, ins: Instruction) -> dict[int, tuple[Any, int]]:
        """Before a backward: the gradients that it adds to are as they were left. How often each was written to."""
        groups = self._graded(ins)
        for g in groups:
            found = self._gradients(g)
            if g not in self.grads and found != checksum([None] * len(self.groups[g])):
                self._here(ins, f"grad({g}) has something left over from before, and does not begin from nothing")
            if g in self.grads and found != self.grads[g]:
                self._here(ins, f"grad({g}) was changed between two backwards")
        return {id(p): (p.grad, -1 if p.grad is None else p.grad._version)
                for g in groups for p in self.groups[g]}  # fmt: skip

    def _added(self, ins: Instruction, counted: dict[int, tuple[Any, int]]) -> None:
        """After a backward: it has added to each gradient once, and to the same ones as for other micro-batches."""
        groups = self._graded(ins)
        if not groups or not self.compute.rows.count(ins):
            return
        fresh, versions, added = 0, {}, 0
        for g in groups:
            for p in self.groups[g]:
                before, version = counted[id(p)]
                if p.grad is None:
                    continue
                if before is None or p.grad is not before:
                    fresh, added = fresh + p.grad._version, added + 1
                else:  # (views of one bucket have one counter)
                    versions[id(p.grad if p.grad._base is None else p.grad._base)] = p.grad._version - version
        summing = any(not repartitions(self.instructions[index]) for index in self._going)
        if versions and summing:  # (which may write to the same bucket at this moment)
            for g in groups:
                self.grads[g] = self._gradients(g)
            return
        added += sum(versions.values())
        key = ins.op, ins.layers
        usual = self.first.setdefault((*key, "added"), added)
        if added < usual:
            self._here(ins, f"it added to {added} gradients of parameters, and to {usual} for another micro-batch")
        usual_fresh = self.first.setdefault((*key, "fresh"), fresh) if not versions else fresh
        if added > usual or fresh > usual_fresh:
            self._here(ins, "a gradient was written to twice: it would be counted more than once")
        for g in groups:
            self.grads[g] = self._gradients(g)

    def _unchanged(self, ins: Instruction, groups: Iterable[int]) -> None:
        """What is summed or used is what backwards and sums before it have left."""
        for g in groups:
            own = self.groups[g]
            if own and g in self.grads and self._gradients(g) != self.grads[g]:
                self._here(ins, f"grad({g}) was changed since it was last written")
            if not all(p.grad is None or is_finite(p.grad) for p in own):
                self._here(ins, f"grad({g}) has numbers that are infinite or no numbers")

    def _total(self, g: int) -> tuple[float, float, float]:
        """The gradient of a group: its product with the weights, the square of its norm, and the tolerance."""
        return weighed_together((p.grad, p.numel()) for p in self.groups[g])

    # the loss --------------------------------------------------------------------------------------------------------

    def _target(self, made: Callable[..., Target], *given: Any) -> Target:
        self._due = made(*given)
        return self._due

    def _share(self, note: Callable[..., None], loss: Tensor, ins: Instruction, rows: range) -> None:
        """How much a micro-batch's loss counts is how much its targets do."""
        due = self._due.counts / self._due.whole if self._due.counts else 0.0
        value, mean = float(loss), self._heard.mean
        if not (math.isfinite(value) and (math.isfinite(mean) or not due)):  # (of no targets there is no mean)
            note(loss, ins, rows)  # (which raises NotFinite, if it was asked to)
            self._here(ins, f"the loss is {value}")
        near = 1e-3 if loss.dtype in (torch.float32, torch.float64) else 0.05
        if due and abs(value - mean * due) > near * abs(mean * due):
            part = value / mean if mean else float("inf")
            self._here(ins, f"its loss counts {part:.6g} of the step's mean, and its targets {due:.6g}")
        share = 1 / self.compute.loss.means / self._parts_of_rows() if self._due.nothing else due
        self.shares[ins.step] = self.shares.get(ins.step, 0.0) + share
        note(loss, ins, rows)

    # messages and collectives ----------------------------------------------------------------------------------------

    def _moved(self, message: Sequence[Value], contents: Sequence[Any], source: int, target: int, index: int) -> None:
        for value, content in zip(message, contents, strict=True):
            if content is not None:
                found, what = checksum(_several(content)), f"{value} of step {value.step} from {source} to {target}"
                if source == self.comm.rank and self.written.get(home(value), found) != found:
                    self._fail(source, index, f"{value} was changed between the instruction that wrote it and this one")
                self._note(ALIKE, what, index, (source, target), [found])

    def _await(self, value: Value) -> None:
        index, what = self.pending[value]
        ins = self.instructions[index]
        super()._await(value)
        with self._aside():
            if isinstance(what, int):
                for other in ins.writes:
                    if other in self.live:
                        self._moved([other], [self.live[other]], what, self.comm.rank, index)
                        self._made(ins, other, self.live[other])
            elif ins.group:
                self._joined(index, ins)
            elif ins.op is Op.FETCH:
                self._came_back(ins)

    def _copy(self, index: int, ins: Instruction) -> None:
        if ins.op is Op.OFFLOAD:
            with self._aside():
                self.away[ins.reads[0]] = checksum(self.offloading.contents(ins.reads[0]))
        super()._copy(index, ins)

    def _came_back(self, ins: Instruction) -> None:
        """A FETCH has brought what an OFFLOAD has taken away."""
        (value,) = ins.writes
        if self.away.get(value, found := checksum(self.offloading.contents(value))) != found:
            self._here(ins, f"{value} is not what was copied to {ins.reads[0]}")

    def _on_host(self, ins: Instruction) -> None:
        self._on_host_at = self.index[id(ins)]
        super()._on_host(ins)

    def _collective(self, index: int, ins: Instruction) -> Any:
        with self._aside():
            self._going[index] = list(self._start(ins))
        end = super()._collective(index, ins)
        if ins.op is Op.REDUCE_SCATTER and ins.writes:  # (it has taken the whole gradients, which begin from nothing)
            for g in ins.layers:
                self.grads.pop(g, None)
        if not any(self.pending.get(value, (None,))[0] == index for value in ins.writes):
            with self._aside():
                if piece_of(ins) is None:
                    self._joined(index, ins)
        return end

    def _start(self, ins: Instruction) -> Iterator[tuple[str, list[float]]]:
        """What a collective begins with, by what is summed: product, square, whole, tolerance."""
        if repartitions(ins):
            self._read(ins, self.live)
            (source,), (target,) = ins.reads, ins.writes
            for k, (tensor, old, new, rows) in enumerate(self._changing(ins, self.live.get(source), source, target)):
                if tensor is not None:
                    product = self._of_form(tensor, old, old, new, ins, rows)
                    yield str(k), [product, _norm(tensor) ** 2, old == WHOLE, _tolerance(tensor.dtype)]
            return
        if ins.op in (Op.NORM, Op.ALL_GATHER) or not ins.reads:
            return
        if _averages(ins):
            weight = self._weight(ins)
            for g in ins.layers:
                product, square, near = self._trained(g)
                yield str(g), [product * weight, square * weight**2, False, near]
            return
        if piece_of(ins) is not None:  # what is summed is the same before the first piece and after the last
            (g,) = ins.layers
            if g not in self._pieces:
                self._unchanged(ins, [g])
                self._pieces[g] = self._brought(ins, g)
            if ins.writes:
                total, square, near = self._pieces.pop(g)
                yield str(g), [total, square, False, near]
            return
        self._unchanged(ins, ins.layers)
        for g in ins.layers:
            total, square, near = self._brought(ins, g)
            yield str(g), [total, square, False, near]

    def _brought(self, ins: Instruction, g: int) -> tuple[float, float, float]:
        """What this rank brings to a sum of a gradient, with the slice that it adds the sum to."""
        total, square, near = self._total(g)
        if ins.op is Op.REDUCE_SCATTER:
            owner = self.state.slices[g]
            before = owner.part.grad
            if before is not None and self._adds(ins, g):
                if g in self.parts and self.parts[g] != checksum([before]):
                    self._here(ins, f"grad_shard({g}) was changed between two sums")
                total += weighed(before, ins.group.index(self.comm.rank) * owner.size)
                square += _norm(before) ** 2
        return total, square, near

    def _trained(self, g: int) -> tuple[float, float, float]:
        """The parameters of a group, as its optimizer has them: product, square, tolerance."""
        return weighed_together((p.data, p.numel()) for p in self.state.owners[g].trained)

    def _adds(self, ins: Instruction, g: int) -> bool:
        return any(value.kind == "grad_shard" and value.index == g for value in ins.reads)

    def _changing(
        self, ins: Instruction, content: Any, source: Value, target: Value
    ) -> Iterator[tuple[Tensor | None, str, str, int]]:
        """The tensors of a value that change their form along an axis, with the letters before and after, and the rows
        that are left to this axis."""
        several = _several(content)
        axis = changed_axis(source.form, target.form) or 0
        olds, news = (letters(along(value.form, axis), len(several)) for value in (source, target))
        counts = [count for _, count in self.compute.places]
        rows = rows_between(source.form, target.form, counts, self.compute.rows.number(ins), len(several))
        for tensor, old, new, left in zip(several, olds, news, rows, strict=True):
            changes = old != new and tensor is not None and tensor.is_floating_point()
            yield (tensor if changes else None), old, new, left

    def _of_form(self, tensor: Tensor, letter: str, old: str, new: str, ins: Instruction, rows: int) -> float:
        """A rank's part of a value's product with the weights; of forms that weights do not fit, its squares."""
        if not all(each in (WHOLE, PARTIAL) or each[0] == "S" for each in (old, new)):
            return _norm(tensor) ** 2
        if letter in (WHOLE, PARTIAL):
            return weighed(tensor)
        dim, pieces = shard_of(letter, rows)
        cut = Cut(dim, ins.group.index(self.comm.rank), len(ins.group), pieces)
        shape = cut.whole_shape(tensor.shape)
        dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        weights = _weights(dtype, tensor.device)
        whole = weights.repeat(-(-math.prod(shape) // _PERIOD))[: math.prod(shape)].view(shape)
        return float((tensor.detach().to(dtype) * cut.of(whole)).sum(dtype=torch.float64))

    def _joined(self, index: int, ins: Instruction) -> None:
        """A collective has ended: what came of it is what the ranks gave, and alike where it is whole."""
        began = dict(self._going.pop(index, ()))
        if piece_of(ins) is not None:  # (all pieces before it have ended, too)
            for k in [k for k in self._going if k < index and self.instructions[k].layers == ins.layers]:
                del self._going[k]
        name = f"{ins} of step {ins.step}, micro-batch {ins.microbatch}"
        if repartitions(ins):
            (source,), (target,) = ins.reads, ins.writes
            if target not in self.live:
                return
            changes = self._changing(ins, self.live[target], source, target)
            for k, (tensor, old, new, rows) in enumerate(changes):
                if str(k) in began and tensor is not None:
                    product, square, whole, near = began[str(k)]
                    after = self._of_form(tensor, new, old, new, ins, rows)
                    numbers = [product, after, square, whole, new == WHOLE]
                    if "M" not in (old, new):
                        self._note(SUM, f"{name} ({k})", index, ins.group, numbers, near)
            self._made(ins, target, self.live[target])
            return
        if ins.op is Op.NORM:
            return self._note(ALIKE, f"the norm of step {ins.step}", index, ins.group, [float(self.state.squares)])
        if ins.op is Op.ALL_GATHER:
            return self._gathered(index, ins, name)
        for g in ins.layers:
            if not self.groups[g] or str(g) not in began:
                continue
            product, square, _, near = began[str(g)]
            if _averages(ins):
                after, _, _ = self._trained(g)
                made = self._of_update(ins, g, made=True)
                left = self.holds[made] = self._left(self.state.owners[g], made)
                self._note(SUM, f"{name}, group {g}", index, ins.group, [product, after, square, False, True], near)
                self._note(ALIKE, f"{name}, the average of {made}", index, ins.group, [left])
                continue
            if ins.op is Op.REDUCE_SCATTER:
                owner = self.state.slices[g]
                assert owner.part.grad is not None
                after = weighed(owner.part.grad, ins.group.index(self.comm.rank) * owner.size)
                if self.program.compress == "none":
                    numbers = [product, after, square, False, False]
                    self._note(SUM, f"{name}, group {g}", index, ins.group, numbers, near)
                self.parts[g] = checksum([owner.part.grad])
                continue
            after, _, _ = self._total(g)
            self.grads[g] = self._gradients(g)
            if self.program.compress == "none":
                self._note(SUM, f"{name}, group {g}", index, ins.group, [product, after, square, False, True], near)
            self._note(ALIKE, f"{name}, the sum of grad({g})", index, ins.group, [self.grads[g]])

    def _gathered(self, index: int, ins: Instruction, name: str) -> None:
        """Slices were gathered: each rank's own is in its place, and the whole is alike, so each is there once."""
        for g in ins.layers:
            owner = self.state.slices[g]
            k = ins.group.index(self.comm.rank)
            whole = self._version(ins.writes, g)
            part, flat = owner.gathered(whole)
            if whole._replace(kind="param_shard") in self.pending:  # (it is being fetched once more)
                part = None
            mine = flat[k * owner.size : (k + 1) * owner.size]
            if part is not None and self.updated.get(whole, found := checksum([part])) != found:
                self._here(ins, f"slice {k} of {whole} is not what the last update of it has left")
            if part is not None and checksum([mine]) != checksum([part.to(mine.dtype)]):
                self._here(ins, f"{whole} has something else where slice {k} of rank {self.comm.rank} belongs")
            self.holds[whole] = self._parameters(whole)
            self._note(ALIKE, f"{name}, {whole}", index, ins.group, [self.holds[whole]])

    # the step --------------------------------------------------------------------------------------------------------

    def _update(self, ins: Instruction) -> None:
        with self._aside():
            self._unchanged(ins, ins.layers)
            owners = [self.state.owners[g] for g in ins.layers if self.groups[g]]
            for value in (self._of_update(ins, g, made=False) for g in ins.layers):
                if value in self.holds and self._is_there(value) and self._parameters(value) != self.holds[value]:
                    self._here(ins, f"{value} is not what the last update of it has left")
            for owner in owners:
                if isinstance(owner, SlicedGroup) and (part := self._slice(owner)) is not None:
                    if not is_finite(part):
                        self._here(ins, f"grad_shard({owner.number}) has numbers that are infinite or no numbers")
                    if self.parts.get(owner.number) != checksum([part]):
                        self._here(ins, f"grad_shard({owner.number}) was changed since it was summed")
            before = {owner.number: [p.detach().clone() for p in owner.trained] for owner in owners}
            sizes = {owner.number: [0.0 if p.grad is None else float(p.grad.abs().max()) for p in owner.summed
                                    if p.numel()] for owner in owners}  # fmt: skip
            rate = min(self.state.update.rates_at(self.state.count.done.get(ins.layers, 0)), default=0.0)
        super()._update(ins)
        with self._aside():
            for owner in owners:
                self._stepped(ins, owner, before[owner.number], max(sizes[owner.number], default=0.0), rate)

    def _stepped(self, ins: Instruction, owner: Any, before: list[Tensor], gradient: float, rate: float) -> None:
        """A STEP has changed parameters that had a gradient, to finite numbers, and is over with the gradient."""
        g = owner.number
        if not all(is_finite(p) for p in owner.trained):
            self._here(ins, f"param({g}) has numbers that are infinite or no numbers")
        if self.program.clip is None and left_alone(before, owner.trained, gradient, rate):
            self._here(ins, f"param({g}) was not changed, though its gradient is not zero")
        self.grads.pop(g, None)
        self.parts.pop(g, None)
        made = self._of_update(ins, g, made=True)
        if isinstance(owner, SlicedGroup):
            self.updated[made] = checksum([p.data for p in owner.trained])
            if owner.scattered:
                self.holds.pop(made, None)
            elif not owner.apart and self._is_there(made):
                self.holds[made] = self._parameters(made)  # (the other slices are old until they are gathered)
            return
        self.holds[made] = self._left(owner, made)
        what = f"param({g}) after the STEP of step {ins.step}"
        alone = self._alone()
        twins = tuple(rank for rank in self._twins(g) if not alone or rank in alone)
        self._note(ALIKE, what, self.index[id(ins)], twins, [self.holds[made]])
