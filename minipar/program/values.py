"""The named values that a program's instructions read, write and free. Imports nothing of minipar.

output(2) mb0    saved(2) mb0    grad_output(2) mb0         of one layer and one micro-batch
carry(2) mb0     grad_carry(2) mb0                          what one slice of a sequence keeps for the next
param(2)         grad(2)         optimizer_state(2)         of one parameter group; *_shard: this rank's slice
param(2) v3      of an asynchronous program: the parameters after three updates
host(saved(2) mb0)               disk(param(2))             a copy in a slower tier
chunk(2)                         incoming(2 of 1)           of a tensor that a collective works on

How long a value lives:

output       The input of layer l is output(l-1), so that this lives until the backward of l has run. The sender's copy
             is freed when its SEND is done. A FORWARD that does not write `saved` runs its layers without autograd;
             then the output in front of the segment stays, as the checkpoint from which RECOMPUTE starts.
grad_output  With branches it is of an edge; edge l is the first one out of layer l, as in a chain. The backward of a
             layer whose output is read twice sums the gradients of its edges. The loss belongs to the forward of the
             last layer. Its own gradient is 1, so that the last backward reads no grad_output.
saved        is what autograd keeps of a layer beside its input. Layers before the first trainable one keep nothing,
             have no backward, and are freed by the next forward.
saved_weight is all that the weight half of a backward needs, the layer's input and its output's gradient included:
             BACKWARD_INPUT frees these. The first trainable layer has no input half.
carry        lives from the forward of a slice to its backward.
param        of a version v: the last instruction that needs it frees it. If that is STEP, it updates in place.
             Otherwise a version is never written to once it is there.
*_shard      Slices are filled up to equal size. A STEP on slices leaves the whole `param` out of date until
             ALL_GATHER. `buffer(g)` is the room for what a REDUCE_SCATTER receives. Parameters that stages share stay
             whole.
host, disk   never count as memory of the device. A copy is awaited where what it writes is first read, and until then
             nothing changes what it reads. An instruction on stream `host` reads and writes the host's values alone.

The rows of a batch are no values: the ranks with the first and the last layer hold them throughout. `Program.state`
says what a rank holds before and after a program; everything else is freed inside it.
"""

from __future__ import annotations

from typing import NamedTuple

TIERS = ("device", "host", "disk")  # from the fastest to the largest
LayerRun = tuple[int, int, int]  # a layer on a micro-batch: layer, micro-batch, step


class Value(NamedTuple):
    """A named piece of memory on one rank: `kind` of layer or parameter group `index`, for one micro-batch and step.

    Model state (`param`, `grad`, `optimizer_state`) belongs to no micro-batch and outlives a step: both are -1.
    Of a version of parameters, `step` is the number of updates before.
    Of what a collective receives (`incoming`), `microbatch` is the rank that it comes from.
    """

    kind: str
    index: int  # type: ignore[assignment]
    microbatch: int = -1
    step: int = -1

    def __str__(self) -> str:
        if self.kind == "incoming":
            return f"incoming({self.index} of {self.microbatch})"
        text = f"{self.kind}({self.index})"
        if self.microbatch >= 0:
            return f"{text} mb{self.microbatch}"
        return f"{text} v{self.step}" if self.kind == "param" and self.step >= 0 else text


def output(layer: int, microbatch: int, step: int = 0) -> Value:
    """What layer `layer` hands on for one micro-batch."""
    return Value("output", layer, microbatch, step)


def grad_output(layer: int, microbatch: int, step: int = 0) -> Value:
    """The gradient of the loss in `output(layer, microbatch)`; with branches, as it comes through edge `layer`."""
    return Value("grad_output", layer, microbatch, step)


def saved(layer: int, microbatch: int, step: int = 0) -> Value:
    """What autograd keeps of one layer for one micro-batch, besides the layer's input."""
    return Value("saved", layer, microbatch, step)


def saved_weight(layer: int, microbatch: int, step: int = 0) -> Value:
    """What the input half of one layer's backward leaves for the weight half."""
    return Value("saved_weight", layer, microbatch, step)


def carry(layer: int, microbatch: int, step: int = 0) -> Value:
    """What one layer keeps of a sequence for its later slices, such as keys and values; after one slice of it."""
    return Value("carry", layer, microbatch, step)


def grad_carry(layer: int, microbatch: int, step: int = 0) -> Value:
    """The gradient of the loss in `carry(layer, microbatch)`: what all later slices have added."""
    return Value("grad_carry", layer, microbatch, step)


def param(group: int, version: int = -1) -> Value:
    """The parameters of one group: a layer's own, or a set tied between layers. A version is a value of its own."""
    return Value("param", group, -1, version)


def version_of(value: Value) -> int:
    """How many updates came before these parameters; -1 of any other value, and where there is but one version."""
    return value.step if value.kind == "param" else -1


def grad(group: int) -> Value:
    """The gradient of one parameter group; every backward adds to it."""
    return Value("grad", group)


def optimizer_state(group: int) -> Value:
    """What the optimizer keeps for one parameter group (momentum, variance)."""
    return Value("optimizer_state", group)


def param_shard(group: int) -> Value:
    """This rank's slice of a group's trainable parameters, laid end to end; and the group's frozen ones, whole."""
    return Value("param_shard", group)


def grad_shard(group: int) -> Value:
    """This rank's slice of the gradient of one parameter group, summed over the replicas."""
    return Value("grad_shard", group)


def optimizer_shard(group: int) -> Value:
    """What the optimizer keeps for this rank's slice of one parameter group."""
    return Value("optimizer_shard", group)


def buffer(group: int) -> Value:
    """Room for what other ranks send of a group's gradient while a REDUCE_SCATTER is under way."""
    return Value("buffer", group)


def residual(group: int) -> Value:
    """What compressed messages have left out of this rank's gradients so far, and will send later."""
    return Value("residual", group)


def served(group: int) -> Value:
    """A parameter server's part of the parameters of one group."""
    return Value("served", group)


def served_state(group: int) -> Value:
    """What a parameter server's optimizer keeps for its part of one group."""
    return Value("served_state", group)


def pushed(group: int, worker: int, step: int) -> Value:
    """A server's part of the gradient of one group that a worker has pushed. (Its `microbatch` is the worker.)"""
    return Value("pushed", group, worker, step)


def norm() -> Value:
    """The length of the gradient of all parameters, over all ranks."""
    return Value("norm", 0)


def chunk(index: int) -> Value:
    """One piece of the tensor that a collective works on, as this rank has it."""
    return Value("chunk", index)


def incoming(index: int, source: int) -> Value:
    """What rank `source` has sent of a chunk, until it is added to this rank's own."""
    return Value("incoming", index, source)


def host(value: Value) -> Value:
    """The copy of a value in the host's memory."""
    return value._replace(kind=f"host {value.kind}")


def disk(value: Value) -> Value:
    """The copy of a value on the disk."""
    return value._replace(kind=f"disk {value.kind}")


def tier(value: Value) -> str:
    """Where a value is: one of TIERS."""
    first, _, rest = value.kind.partition(" ")
    return first if rest else "device"


def home(value: Value) -> Value:
    """The value on the device of which this one is a copy; a value on the device is its own."""
    return value._replace(kind=value.kind.rpartition(" ")[2]) if " " in value.kind else value
