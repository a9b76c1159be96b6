"""The named values that a program's instructions read, write and free. Imports nothing of minipar.

output(2) mb0    saved(2) mb0    grad_output(2) mb0         of one layer and one micro-batch
carry(2) mb0     grad_carry(2) mb0                          what one slice of a sequence keeps for the next
param(2)         grad(2)         optimizer_state(2)         of one parameter group; *_shard: this rank's slice
param(2) v3                                                 the parameters after three updates (asynchronous programs)
host(saved(2) mb0)               disk(param(2))             a copy in a slower tier
chunk(2)                         incoming(2 of 1)           a part of a tensor that a collective works on

How long a value lives:

output       The input of layer l is output(l-1). It lives until the backward of layer l has run. The sender's copy is
             freed when its SEND is done. A FORWARD that does not write `saved` runs its layers without autograd. Then
             the input of the segment stays as the checkpoint from which RECOMPUTE starts.
grad_output  In a model with branches it belongs to an edge. Edge l is the first one out of layer l, as in a chain. The
             backward of a layer whose output is read twice sums the gradients of its edges. The forward of the last
             layer computes the loss. The loss's own gradient is 1, so the last backward reads no grad_output.
saved        This is what autograd keeps of a layer, apart from the layer's input. Layers before the first trainable
             one keep nothing and have no backward. The next forward frees their outputs.
saved_weight This is all that the weight half of a backward needs, including the layer's input and the gradient of its
             output, which BACKWARD_INPUT frees. The first trainable layer has no input half.
carry        It lives from the forward of a slice to its backward.
param        The last instruction that needs a version v frees it. If that instruction is a STEP, it updates the
             version in place. Otherwise a version does not change after it was written.
*_shard      Slices are padded to equal size. After a STEP on slices the whole `param` is out of date until ALL_GATHER.
             `buffer(g)` is the memory that a REDUCE_SCATTER receives into. Parameters that stages share stay whole.
host, disk   They never count as memory of the device. The first instruction that reads the target of a copy waits for
             the copy. Until then nothing changes the source of the copy. An instruction on stream `host` reads and
             writes only values of the host.

The rows of a batch are not values: the ranks with the first and the last layer hold them all the time. `Program.state`
says what a rank holds before and after a program. Every other value is freed inside the program.
"""

from __future__ import annotations

from typing import NamedTuple

TIERS = ("device", "host", "disk")  # from the fastest to the largest
LayerRun = tuple[int, int, int]  # a layer on a micro-batch: layer, micro-batch, step


class Value(NamedTuple):
    """A named piece of memory on one rank.

    `kind` says what it is, `index` is its layer or parameter group; `microbatch` and `step` say what it is made for.
    Model state (`param`, `grad`, `optimizer_state`) belongs to no micro-batch and outlives a step: both are -1.
    For a version of parameters, `step` is the number of updates before it.
    For what a collective receives (`incoming`), `microbatch` is the rank that sent it.
    `form` says how the ranks of a tensor-parallel group share it (see `forms.py`); "": each of them has all of it. Of a
    gradient that a worker pushes in pieces it says which bytes this one has, such as "0:8".
    """

    kind: str
    index: int  # type: ignore[assignment]
    microbatch: int = -1
    step: int = -1
    form: str = ""

    def __str__(self) -> str:
        if self.kind == "incoming":
            return f"incoming({self.index} of {self.microbatch})"
        text = f"{self.kind}({self.index})" + (f"[{self.form}]" if self.form else "")
        if self.microbatch >= 0:
            return f"{text} mb{self.microbatch}"
        return f"{text} v{version_of(self)}" if version_of(self) >= 0 else text


def output(layer: int, microbatch: int, step: int = 0) -> Value:
    """The output of layer `layer` for one micro-batch."""
    return Value("output", layer, microbatch, step)


def grad_output(layer: int, microbatch: int, step: int = 0) -> Value:
    """The gradient of the loss with respect to `output(layer, microbatch)`. With branches, `layer` is the number of an
    edge, and this is the part of the gradient that comes back through it."""
    return Value("grad_output", layer, microbatch, step)


def saved(layer: int, microbatch: int, step: int = 0) -> Value:
    """What autograd keeps of one layer for one micro-batch, besides the layer's input."""
    return Value("saved", layer, microbatch, step)


def saved_weight(layer: int, microbatch: int, step: int = 0) -> Value:
    """What the input half of one layer's backward leaves for the weight half."""
    return Value("saved_weight", layer, microbatch, step)


def carry(layer: int, microbatch: int, step: int = 0) -> Value:
    """What one layer keeps after one slice of a sequence for the later slices, such as keys and values."""
    return Value("carry", layer, microbatch, step)


def grad_carry(layer: int, microbatch: int, step: int = 0) -> Value:
    """The gradient of the loss with respect to `carry(layer, microbatch)`: the sum over all later slices."""
    return Value("grad_carry", layer, microbatch, step)


def param(group: int, version: int = -1) -> Value:
    """The parameters of one group: a layer's own, or a set tied between layers. A version is a value of its own."""
    return Value("param", group, -1, version)


_PARAMETERS = frozenset(f"{where}{kind}" for where in ("", "host ", "disk ") for kind in ("param", "param_shard"))


def version_of(value: Value) -> int:
    """How many updates came before these parameters; -1 for any other value, and where there is only one version."""
    return value.step if value.kind in _PARAMETERS else -1


def grad(group: int) -> Value:
    """The gradient of one parameter group; every backward adds to it."""
    return Value("grad", group)


def optimizer_state(group: int) -> Value:
    """What the optimizer keeps for one parameter group (momentum, variance)."""
    return Value("optimizer_state", group)


def param_shard(group: int) -> Value:
    """This rank's slice of a group's trainable parameters, concatenated; and all of the group's frozen parameters."""
    return Value("param_shard", group)


def grad_shard(group: int) -> Value:
    """This rank's slice of the gradient of one parameter group, summed over the replicas."""
    return Value("grad_shard", group)


def optimizer_shard(group: int) -> Value:
    """What the optimizer keeps for this rank's slice of one parameter group."""
    return Value("optimizer_shard", group)


def buffer(group: int) -> Value:
    """Memory for the parts of a group's gradient that other ranks send while a REDUCE_SCATTER is under way."""
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
    """The norm of the gradient of all parameters, over all ranks."""
    return Value("norm", 0)


def chunk(index: int) -> Value:
    """One piece of the tensor that a collective works on, as this rank has it."""
    return Value("chunk", index)


def incoming(index: int, source: int) -> Value:
    """The chunk as rank `source` has sent it, until it is added to this rank's own chunk."""
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
    """The value on the device that this value is a copy of; a value on the device itself is returned unchanged."""
    return value._replace(kind=value.kind.rpartition(" ")[2]) if " " in value.kind else value
