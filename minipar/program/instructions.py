"""Instructions: each is one line of what a rank does. `Op` names everything that a rank can do.

Actions are what a schedule yields: forwards and backwards of micro-batches through chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from minipar.program.values import Value, chunk, tier, version_of


class Op(str, Enum):
    """What an instruction does. Compared with `is`, never by its text.

    A loop over a whole program puts the members that it needs into local variables first: looking up a member of an
    Enum takes longer than comparing with it.
    """

    __hash__ = str.__hash__  # (the hash of an Enum is a Python function, which is slower)

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    RECOMPUTE = "R"
    STEP = "STEP"
    SEND = "SEND"
    RECV = "RECV"
    ALL_REDUCE = "ALL_REDUCE"
    REDUCE_SCATTER = "REDUCE_SCATTER"
    ALL_GATHER = "ALL_GATHER"
    ALL_TO_ALL = "ALL_TO_ALL"  # every rank has a part for every other one: shards of another dimension
    NORM = "NORM"  # an all-reduce of one number: the norm of all gradients together
    OFFLOAD = "OFFLOAD"  # a copy of a value to a slower tier
    FETCH = "FETCH"  # a copy back to a faster tier
    REDUCE = "REDUCE"  # adds a received chunk to the rank's own chunk
    PUSH = "PUSH"  # a worker sends gradients to a parameter server
    PULL = "PULL"  # a worker receives parameters from a server
    ACCEPT = "ACCEPT"  # a server receives what a worker pushed
    APPLY = "APPLY"  # a server updates its parameters
    REPLY = "REPLY"  # a server sends parameters to a worker


COMPUTE = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT, Op.RECOMPUTE, Op.STEP, Op.REDUCE)
BACKWARDS = (Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)  # from the last layer to the first
TRANSFERS = (Op.SEND, Op.RECV)
COLLECTIVES = (Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.ALL_GATHER, Op.ALL_TO_ALL, Op.NORM)
MOVED = ("output", "grad_output")  # kinds of values that go from layer to layer, and from rank to rank
COPIES = (Op.OFFLOAD, Op.FETCH)
PORT = "port"  # the stream of SENDs that leave a rank one after another, to whatever rank they go
PARTNERS = {Op.SEND: Op.RECV, Op.PUSH: Op.ACCEPT, Op.REPLY: Op.PULL}  # what sends a message, and what receives it
SERVICE = (Op.PUSH, Op.PULL, Op.ACCEPT, Op.APPLY, Op.REPLY)


class Part(NamedTuple):
    """One part of a fused instruction: a layer's compute, or one message of a collective, which sends so many `bytes`.

    `start` and `end`, if it is for a piece of a gradient only: the bytes of these; otherwise -1.
    """

    op: Op
    layer: int = -1
    bytes: int = 0
    start: int = -1
    end: int = -1


class Instruction(NamedTuple):
    """One line of a rank's program. Immutable, and printable on one line (`F 3:5 mb2`).

    `layers` are the layers computed, or the parameter groups that a collective or STEP works on. `reads`, `writes`
    and `frees` are local values; a value that was written before is updated in place. `parts` lists what was fused.
    `name`, if given, replaces the text: an imported trace has its own names.
    """

    op: Op
    layers: tuple[int, ...]
    microbatch: int
    step: int
    reads: tuple[Value, ...] = ()
    writes: tuple[Value, ...] = ()
    frees: tuple[Value, ...] = ()
    stream: str = "compute"
    peer: int = -1
    group: tuple[int, ...] = ()
    parts: tuple[Part, ...] = ()
    name: str = ""

    def __str__(self) -> str:
        if self.name:
            return self.name
        if self.op is Op.SEND and self.reads:
            return f"SEND {_moved(self.reads)} -> {self.peer}"
        if self.op is Op.RECV and self.writes:
            return f"RECV {_moved(self.writes)} <- {self.peer}"
        if self.op is Op.OFFLOAD and self.reads and self.writes:
            return f"OFFLOAD {self.reads[0]} -> {tier(self.writes[0])}"
        if self.op is Op.FETCH and self.reads and self.writes:
            return f"FETCH {self.writes[0]} <- {tier(self.reads[0])}"
        if repartitions(self):
            into = "" if self.op is Op.ALL_REDUCE else f" -> {self.writes[0].form or 'R'}"
            return f"{self.op.value} {self.reads[0]}{into} over {','.join(map(str, self.group))}"
        text = f"{self.op.value} {span(self.layers)}"
        text += f" mb{self.microbatch}" if self.microbatch >= 0 else ""
        if self.op not in TRANSFERS:  # in an asynchronous program, show the version that is used or made
            version = max(map(version_of, self.writes if self.op is Op.STEP else self.reads), default=-1)
            text += f" v{version}" if version >= 0 else ""
        if piece := piece_of(self):
            text += f"[{piece[0]}:{piece[1]}]"
        if self.group:
            text += " over " + ",".join(map(str, self.group))
        if self.op in SERVICE and self.peer >= 0:
            text += f" {'->' if self.op in (Op.PUSH, Op.REPLY) else '<-'} {self.peer}"
        return text


def repartitions(ins: Instruction) -> bool:
    """Whether this is a collective that gives an output, or the gradient of one, another form. It names no layers."""
    return bool(ins.group) and len(ins.reads) == 1 and ins.reads[0][0] in MOVED


def piece_of(ins: Instruction) -> tuple[int, int] | None:
    """First byte and end of the piece of a gradient that an ALL_REDUCE or a REDUCE_SCATTER sums; None if it is all of
    it. With a REDUCE_SCATTER these are bytes of all slices together: it sums as much of each of them."""
    if ins.op not in (Op.ALL_REDUCE, Op.REDUCE_SCATTER) or len(ins.parts) != 1 or ins.parts[0].start < 0:
        return None
    return ins.parts[0].start, ins.parts[0].end


def _moved(values: Sequence[Value]) -> str:
    if len(values) > 1 and values[0].kind in ("chunk", "incoming"):
        return f"{values[0].kind}({span([value.index for value in values])})"
    return ", ".join(map(str, values))


def message(ins: Instruction) -> tuple[Value, ...]:
    """The values that a SEND or RECV moves, as the sending rank names them."""
    moved = ins.reads if ins.op is Op.SEND else ins.writes
    return tuple(chunk(value.index) if value.kind == "incoming" else value for value in moved)


def span(layers: Sequence[int]) -> str:
    """Layer numbers as short text: `3` for one, `3:5` for 3 and 4, `0,3:5` with a gap."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1]:
            runs[-1][1] = layer + 1
        else:
            runs.append([layer, layer + 1])
    return ",".join(str(a) if b == a + 1 else f"{a}:{b}" for a, b in runs)


# actions of schedules ------------------------------------------------------------------------------------------------


# (Not tuples: Forward(0) and Backward(0) must differ.)
@dataclass(frozen=True, slots=True)
class Forward:
    """A schedule's action: run the forward of micro-batch `microbatch` through chunk `chunk` of this rank.

    beside   the next backward is part of the same work, because kernels of both overlap (DualPipe). The output of the
             forward is sent when both are done
    """

    microbatch: int
    chunk: int = 0
    beside: bool = field(default=False, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Backward:
    """A schedule's action: the whole backward of one micro-batch through one chunk."""

    microbatch: int
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class BackwardInput:
    """A schedule's action: only the gradient of the chunk's input (the zero-bubble papers' B)."""

    microbatch: int
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class BackwardWeight:
    """A schedule's action: only the gradient of the chunk's weights (the zero-bubble papers' W)."""

    microbatch: int
    chunk: int = 0


Action = Forward | Backward | BackwardInput | BackwardWeight
