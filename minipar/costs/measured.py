"""What a profile found, as plain numbers: picklable, JSON-able, readable without torch.

`minipar.costs.profiler.profile` fills it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Profile:
    """Seconds and bytes of a model, one layer at a time, on one device.

    The dicts are keyed by rows (the micro-batch sizes that were tried); each entry is in layer order. The last layer
    includes the loss, in its times and in what it saves; its output is what it hands to the loss.

    forward            median seconds of the layer's forward
    backward           median seconds of its whole backward: input gradient, and weight gradient added to an existing
                       one. 0.0 where there is nothing to differentiate (layers before the first trainable one)
    output_bytes       the tensors that the layer hands on, as a message would carry them
    grad_output_bytes  of these, the ones that get a gradient
    saved_bytes        distinct storages that autograd keeps of the layer from forward to backward, without the
                       parameters, the layer's input, the loss's targets, and the layer's own output
    saves_output       per layer, whether autograd keeps (part of) the layer's own output as well
    parameter_bytes    per parameter group (as in `shape_of`), trainable and frozen
    gradient_bytes     per parameter group, trainable only: the size of its gradient
    optimizer_bytes    per parameter group, what the optimizer keeps after a step
    step_seconds       one optimizer step over all trainable parameters
    """

    forward: dict[int, tuple[float, ...]]
    backward: dict[int, tuple[float, ...]]
    output_bytes: dict[int, tuple[int, ...]]
    grad_output_bytes: dict[int, tuple[int, ...]]
    saved_bytes: dict[int, tuple[int, ...]]
    saves_output: tuple[bool, ...]
    parameter_bytes: tuple[int, ...]
    gradient_bytes: tuple[int, ...]
    optimizer_bytes: tuple[int, ...]
    step_seconds: float
