"""The result of a profile as plain numbers. It can be pickled, written as JSON, and read without torch.

`minipar.profile` (in `execution/measuring/profiler.py`) measures them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from minipar.wording import several

_HEADER = (
    "layer", "forward ms", "backward ms", "input half", "weight half", "forward MFLOP", "backward MFLOP",
    "parameters MiB", "output MiB", "saved MiB",
)  # fmt: skip


@dataclass(frozen=True)
class Profile:
    """Seconds, operations and bytes of a model, one layer at a time, on one device.

    The keys of the dicts are numbers of rows (the micro-batch sizes that were measured); each entry is in layer order.
    The last layer includes the loss, in its times and in what it saves; its output is the loss's input.

    forward            median seconds of the layer's forward
    backward           median seconds of its whole backward: the input gradient, and the weight gradient added to an
                       existing one. 0.0 if there is nothing to differentiate (layers before the first trainable one)
    output_bytes       the layer's output tensors, as a message would carry them
    grad_output_bytes  those of its output tensors that get a gradient
    saved_bytes        distinct storages that autograd keeps of the layer from forward to backward, without the
                       parameters, the layer's input, the loss's targets, and the layer's own output
    parameter_bytes    for each parameter group (as in `shape_of`), its trainable and frozen parameters
    gradient_bytes     for each parameter group, the gradient of its trainable parameters
    optimizer_bytes    for each parameter group, the optimizer's state after a step
    step_seconds       one optimizer step over all trainable parameters
    host_step_seconds  the same on the host, beside a GPU; 0: as `step_seconds`. Measured only on request
    backward_input     median seconds of the input half: only the gradient of the layer's input, through all operations
                       inside the layer. 0.0 if no input gradient is needed
    backward_weight    median seconds of the weight half: the gradients of the layer's parameters, from the gradients
                       that the input half has computed inside the layer
    forward_flops      floating-point operations of the forward: products of matrices, convolutions, attention
    backward_flops     floating-point operations of the whole backward
    input_flops        those of its input half; empty if they were not counted
    carry_bytes        what the layer keeps of a slice of sequences for the next slice, such as keys and values
    grad_carry_bytes   the gradient of the carry
    saved_weight_bytes what the input half leaves for the weight half, including the layer's input and gradients
    recompute          median seconds of the layer's forward in a recomputation that ends with it: it leaves out
                       operations whose results no backward needs. Measured only on request

    With tensor parallelism the layers are nodes, and a rank has its shards of them. Then `output_bytes` counts the form
    that a node writes, `grad_output_bytes` counts the form that its backward reads, and each node also has:

    read_bytes         its output in the form that the next node reads
    grad_written_bytes the gradient of its output in the form that the next node's backward writes
    changing_bytes     the tensors of its output that change their form, as they are before the change
    grad_changing_bytes the same for the gradient of its output
    counts_bytes       the counts of unequal shards, which are gathered before these change
    """

    forward: dict[int, tuple[float, ...]]
    backward: dict[int, tuple[float, ...]]
    output_bytes: dict[int, tuple[int, ...]]
    grad_output_bytes: dict[int, tuple[int, ...]]
    saved_bytes: dict[int, tuple[int, ...]]
    parameter_bytes: tuple[int, ...]
    gradient_bytes: tuple[int, ...]
    optimizer_bytes: tuple[int, ...]
    step_seconds: float
    backward_input: dict[int, tuple[float, ...]] = field(default_factory=dict)
    backward_weight: dict[int, tuple[float, ...]] = field(default_factory=dict)
    forward_flops: dict[int, tuple[int, ...]] = field(default_factory=dict)
    backward_flops: dict[int, tuple[int, ...]] = field(default_factory=dict)
    saved_weight_bytes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    carry_bytes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    grad_carry_bytes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    recompute: dict[int, tuple[float, ...]] = field(default_factory=dict)
    read_bytes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    grad_written_bytes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    changing_bytes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    grad_changing_bytes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    counts_bytes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    input_flops: dict[int, tuple[int, ...]] = field(default_factory=dict)
    host_step_seconds: float = 0.0

    def half_flops(self, rows: int, layer: int) -> tuple[float, float]:
        """Operations of the input half and of the weight half of a layer's backward; equal ones if they were not
        counted."""
        whole = self.backward_flops[rows][layer]
        first = self.input_flops[rows][layer] if self.input_flops else whole / 2
        return first, whole - first

    def table(self, rows: int) -> list[tuple[str, ...]]:
        """For each layer, as text: times, operations and bytes for so many rows; the last line has the sums."""
        layers = range(len(self.forward[rows]))
        nothing = {rows: (0.0,) * len(layers)}
        columns: list[Sequence[float]] = [
            *(
                [t * 1e3 for t in (table or nothing)[rows]]
                for table in (self.forward, self.backward, self.backward_input, self.backward_weight)
            ),
            *([n / 1e6 for n in (table or nothing)[rows]] for table in (self.forward_flops, self.backward_flops)),
            [self.parameter_bytes[l] / 2**20 for l in layers],
            *([n / 2**20 for n in table[rows]] for table in (self.output_bytes, self.saved_bytes)),
        ]
        lines = [(str(l), *(f"{column[l]:.2f}" for column in columns)) for l in layers]
        return [*lines, ("all", *(f"{sum(column):.2f}" for column in columns))]

    def __str__(self) -> str:
        """A table of layers for each number of rows that was measured."""
        text = []
        for rows in self.forward:
            lines = [_HEADER, *self.table(rows)]
            widths = [max(len(line[k]) for line in lines) for k in range(len(_HEADER))]
            text.append(several(rows, "row"))
            text += ["  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in lines]
        return "\n".join([*text, self._rest()])

    def _repr_html_(self) -> str:
        """The tables that a notebook shows."""
        parts = []
        for rows in self.forward:
            head = "".join(f"<th>{escape(name)}</th>" for name in _HEADER)
            body = "".join(
                "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>" for line in self.table(rows)
            )
            caption = f"<caption>{several(rows, 'row')}</caption>"
            parts.append(f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
        return "".join([*parts, f"<p>{escape(self._rest())}</p>"])

    def _rest(self) -> str:
        tied = sum(self.parameter_bytes[len(next(iter(self.forward.values()), ())) :])
        shared = f"; parameters that layers share: {tied / 2**20:.2f} MiB" if tied else ""
        return f"optimizer step over all parameters: {self.step_seconds * 1e3:.2f} ms{shared}"
