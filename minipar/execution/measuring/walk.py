"""One walk through a model's layers, one at a time on one device: for all that is measured of single layers.

layer l:   what its edges bring, as the layers before have left it --> output --> the layers that read it

Slices of sequences come one after another, with what each layer carries on to the next one:

tokens     |------ context ------|-- length --|          the context runs first, so that its keys and values are there
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from minipar.errors import PlanError
from minipar.execution import repartition
from minipar.models.network import edges_of
from minipar.models.nodes import ShardedModel
from minipar.models.tensors import count_bytes, map_tensors, take_rows, take_tokens, tensors
from minipar.program.edges import wiring
from minipar.program.forms import COUNTS, Forms, needed, pairs


@dataclass
class Visit:
    """A layer of the walk, whose `output` (and for a slice, `carried`) the caller sets before it walks on.

    key       of the tables of a profile: the rows n, or n * slices + the slice
    number    of the layer
    given     its input
    target    of the loss, if it is the last layer
    start     the first token of a slice; None: whole sequences
    more      whether there is another slice behind it
    carried   what the layer has carried on in the slice before
    """

    key: int
    number: int
    given: Any
    last: bool
    target: Any
    start: int | None
    more: bool
    carried: Any = None
    output: Any = None


def walk(
    model: Iterable[nn.Module],
    batch: tuple[Any, Any],
    rows: Iterable[int],
    slices: Sequence[range],
    device: torch.device,
    between: Between | None,
) -> Iterator[Visit]:
    """Every layer for every number of rows, and for every slice. PlanError for rows that the batch cannot give."""
    count = len(list(model))
    inputs = wiring(edges_of(model), count).inputs
    until = {a: l for l, read in enumerate(inputs) for a in read}  # the last one that reads it
    for n in sorted(set(rows)):
        whole = _rows(batch[0], n, device), _rows(batch[1], n, device)
        carried: dict[int, Any] = {}
        for j, tokens in enumerate(slices or [None]):
            key, start, more = (
                n * max(1, len(slices)) + j,
                None if tokens is None else tokens.start,
                j + 1 < len(slices),
            )
            value, target = whole if tokens is None else take_tokens(whole, tokens)
            if between is not None:
                value, target = map(between.part, (value, target))
            change = None if between is None else between.anew(key, n)
            outputs: dict[int, Any] = {}
            for l in range(count):
                if l:
                    value = outputs[inputs[l][0]] if len(inputs[l]) == 1 else tuple(outputs[a] for a in inputs[l])
                    value = value if change is None else change(l, value)
                    outputs = {a: output for a, output in outputs.items() if until[a] > l}
                last = l == count - 1
                visit = Visit(key, l, value, last, target if last else None, start, more, carried.get(l))
                yield visit
                outputs[l], carried[l] = visit.output, visit.carried


def of_output(loss: Callable[[Any, Any], Tensor], target: Any, output: Any) -> Tensor:
    """A loss with its arguments in another order, so that `partial` makes a function of the output of it."""
    return loss(output, target)


def _rows(value: Any, n: int, device: torch.device) -> Any:
    have = min((len(t) for t in tensors(value)), default=0)
    if not 1 <= n <= have:
        raise PlanError(f"rows={n}: must be from 1 to {have}, the rows of the data given")
    return map_tensors(take_rows(value, range(n)), lambda t: t.to(device))


# between sharded nodes ------------------------------------------------------------------------------------------------


def between_nodes(model: Any) -> Between | None:
    """What lies between the nodes of a model, if it is sharded."""
    return Between(model.forms, model.counts, model.inputs) if isinstance(model, ShardedModel) else None


class Between:
    """What lies between the nodes of a sharded model: collectives, of which one rank alone knows only the sizes."""

    def __init__(self, forms: Sequence[Forms], counts: Sequence[int], inputs: str) -> None:
        self.forms, self.counts, self.inputs = forms, counts, inputs
        self.found: dict[int, list[tuple[int, int, int, int, int]]] = {}

    def part(self, values: Any) -> Any:
        """What one rank has of rows or targets."""
        return repartition.part_of_batch(values, self.inputs, [(0, count) for count in self.counts])

    def anew(self, key: int, rows: int) -> Callable[[int, Any], Any]:
        """A new pass through all nodes, with other rows. Gives a function of a node and what was written for it."""
        sizes = self.found[key] = []

        def change(node: int, written: Any) -> Any:
            before, after = self.forms[node - 1], self.forms[node]
            read = repartition.on_one_rank(written, before.writes, after.reads, self.counts, rows)
            gradients = repartition.in_gradient(read, after.reads)
            sizes.append(
                (
                    count_bytes(read),
                    count_bytes(gradients),
                    _changed(tensors(written), before.writes, after.reads),
                    _changed(gradients, after.grad_writes, before.grad_reads),
                    _changed(tensors(written), before.writes, after.reads, counts=True),
                )
            )
            return read

        return change

    def tables(self) -> dict[str, dict[int, tuple[int, ...]]]:
        """Those of `Profile`, by their names; the last node's output is read by nobody."""
        names = ("read_bytes", "grad_written_bytes", "changing_bytes", "grad_changing_bytes", "counts_bytes")
        return {
            name: {key: (*(size[k] for size in sizes), 0) for key, sizes in self.found.items()}
            for k, name in enumerate(names)
        }


def _changed(found: Sequence[Tensor], before: str, after: str, counts: bool = False) -> int:
    """Bytes of the tensors that change their form; those that are gathered as counts, or all others."""
    if before == needed(after):
        return 0
    changes = zip(found, pairs(before, needed(after)), strict=True)
    return count_bytes([t for t, (old, new) in changes if old != new and (COUNTS in new) is counts])
