"""The loop that a rank runs: the executor of a Program on real tensors and real messages.

    for each instruction, in order:
        wait for what it reads (messages and collectives that are on their way)
        FORWARD, BACKWARD, STEP     compute now
        SEND, RECV, ALL_REDUCE      start, and go on

It is an interpreter: it knows no strategy. Autograd's graph of a forward is cut wherever some instruction begins or
ends, so that the backward of each piece is an instruction of its own and can be followed by a message.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from minipar import randomness
from minipar.comm.buckets import Buckets
from minipar.comm.communicator import Communicator
from minipar.comm.links import Links
from minipar.costs.profiled import split_rows
from minipar.costs.profiler import parameters_of, shape_of, weigh
from minipar.errors import RankError
from minipar.losses import counted
from minipar.program import Instruction, Op, Program, Value, grad_output, output
from minipar.tensors import (
    count_bytes,
    count_rows,
    detach,
    differentiable,
    layers_of,
    map_tensors,
    overwrites,
    take_rows,
)

Loss = Callable[[Any, Any], Tensor]
Batch = tuple[Any, Any]


@dataclass
class Record:
    """What a rank brings back of one pass through its program. Times are clock readings in seconds."""

    losses: list[float]  # per step of the program: this rank's share of the mean (0 where it does not hold the end)
    starts: list[float]
    ends: list[float]
    gradients: list[dict[str, Tensor]] = field(default_factory=list)


class Executor:
    """One rank's part of a program: layers, optimizer, links and buffers, kept from step to step.

    layers      all layers of the model; those that this rank does not hold may be of any kind, and are let go
    loss        loss(output, y) -> scalar mean over the rows (or target elements) of a micro-batch
    optimizer   makes an optimizer of a list of parameters
    """

    def __init__(
        self,
        program: Program,
        comm: Communicator,
        model: nn.Module | Sequence[nn.Module],
        loss: Loss,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        seed: int = 0,
    ) -> None:
        container = model if isinstance(model, nn.Module) else nn.Sequential(*model)
        randomness.replace_dropout(container, seed)
        layers: list[nn.Module] = layers_of(container)
        _check_fit(program, layers)
        self.program, self.comm, self.loss = program, comm, loss
        self.instructions = program.ranks[comm.rank]
        held = program.placement[comm.rank]
        self.layers = {layer: layers[layer].to(comm.device).train() for layer in held}
        self.dropouts = {layer: randomness.row_dropouts(layers[layer]) for layer in held}
        own = {id(p) for layer in self.layers.values() for p in layer.parameters()}
        self.groups = [[p for p in params if id(p) in own] for params in parameters_of(layers)]
        self.names = {id(p): name for name, p in container.named_parameters() if id(p) in own}
        self.buckets = Buckets(self.instructions, self.groups, comm.device)
        comm.prepare({ins.group for ins in self.instructions if ins.group})
        self.optimizers = {
            ins.layers: optimizer([p for g in ins.layers for p in self.groups[g]])
            for ins in self.instructions
            if ins.op is Op.STEP
        }
        self.overwriting = {layer for layer in held if overwrites(self.layers[layer])}
        self.pieces = _pieces(program, comm.rank)
        self.links = Links(program, comm, self._rows)
        self.sizes: dict[tuple[str, int, int], int] = {}  # (kind, layer, rows) -> bytes
        self.live: dict[Value, Any] = {}
        self.graphs: dict[tuple[int, int, int], tuple[Any, list[tuple[int, Any]]]] = {}
        self.base = 0

    def run(self, batches: Callable[[int], Batch], base: int = 0, keep_gradients: bool = False) -> Record:
        """One pass through the program; its step s trains on `batches(base + s)`, the whole batch of all replicas.

        keep_gradients   copy every gradient as it is when its STEP begins
        """
        program, instructions = self.program, self.instructions
        self.base, self.batches = base, batches
        self.batch: dict[int, tuple[Any, Any, list[range], int]] = {}
        self.counts: dict[int, list[int]] = {}
        self.gradients: list[dict[str, Tensor]] = [{} for _ in range(program.steps)]
        self.keep_gradients = keep_gradients
        self.losses: list[Tensor | float] = [0.0] * program.steps
        size = len(instructions)
        starts, self.ends = [0.0] * size, [0.0] * size
        ends, clock = self.ends, time.perf_counter
        links = self.links
        self.pending: dict[Value, tuple[int, Any]] = {}  # value -> (index of its writer, peer or handles)
        pending = self.pending
        posted: dict[int, list[float]] = {}
        cuda = self.comm.device.type == "cuda"
        links.start()
        begin = clock()
        for index, ins in enumerate(instructions):
            op = ins.op
            if op is Op.RECV:
                times = posted.setdefault(ins.peer, [])
                times.append(clock())
                k = len(times) - 1 - program.receives_ahead
                starts[index] = times[k] if k >= 0 else begin
                ends[index] = times[-1]
                links.reach(ins.peer)
                pending[ins.writes[0]] = (index, ins.peer)
                continue
            if pending:
                for value in ins.reads:
                    if value in pending:
                        self._await(value)
            starts[index] = clock()
            if op is Op.FORWARD:
                self._forward(ins)
            elif op is Op.BACKWARD:
                self._backward(ins)
            elif op is Op.SEND:
                value = ins.reads[0]
                links.send(value, self.live.get(value), ins.peer)
            elif op is Op.ALL_REDUCE:
                self._all_reduce(index, ins)
            elif op is Op.STEP:
                self._step(ins)
            else:
                raise RankError(f"{ins}: no executor for {op.name}")
            if cuda and ins.stream == "compute":
                torch.cuda.synchronize(self.comm.device)  # the clock must see the device's work
            ends[index] = clock()
            for value in ins.frees:
                self.live.pop(value, None)
        for value in list(pending):
            self._await(value)
        links.finish()
        return Record([float(loss) for loss in self.losses], starts, ends, self.gradients)

    # waiting ---------------------------------------------------------------------------------------------------------

    def _await(self, value: Value) -> None:
        """Wait for a message, or for the collective that writes a value."""
        index, what = self.pending.pop(value)
        if isinstance(what, int):
            if self._rows(value):
                self.live[value] = self.links.receive(value, what)
                self._weigh(value)
            self.ends[index] = time.perf_counter()
            return
        for handle in what:
            handle.wait()
        for other in self.instructions[index].writes:
            self.pending.pop(other, None)
        self.ends[index] = self.ends[index] or time.perf_counter()

    # instructions ----------------------------------------------------------------------------------------------------

    def _batch(self, step: int) -> tuple[Any, Any, list[range], int]:
        """x and y of a step, the rows of each micro-batch of this rank's replica, and what all rows weigh."""
        if step not in self.batch:
            x, y = self.batches(self.base + step)
            count = self.program.microbatches
            if count_rows(x) != count_rows(y):
                raise RankError(f"x has {count_rows(x)} rows, but y has {count_rows(y)}; each row needs its target")
            rows = split_rows(count_rows(x), self.program.replicas * count)
            mine = self.program.replica(self.comm.rank) * count
            self.batch[step] = (x, y, rows[mine : mine + count], counted(y, self.loss))
        return self.batch[step]

    def _rows(self, value: Value | Instruction) -> int:
        counts = self.counts.get(value.step)
        if counts is None:
            counts = self.counts[value.step] = [len(rows) for rows in self._batch(value.step)[2]]
        return counts[value.microbatch]

    def _forward(self, ins: Instruction) -> None:
        x, y, slices, weight = self._batch(ins.step)
        rows = slices[ins.microbatch]
        if not rows:
            return
        device = self.comm.device
        if ins.layers[0] == 0:
            value = map_tensors(take_rows(x, rows), lambda t: t.to(device))
        else:
            value = self.live[output(ins.layers[0] - 1, ins.microbatch, ins.step)]
        for piece in self.pieces[ins.layers, ins.microbatch]:
            trains = piece[0] >= self.program.first_trainable
            given = detach(value, requires_grad=piece[0] > self.program.first_trainable)
            final = None
            if piece[-1] == self.program.layers - 1:
                final = map_tensors(take_rows(y, rows), lambda t: t.to(device)), weight
            with torch.set_grad_enabled(trains):
                result, ends = self._run_piece(piece, given, final, ins, rows)
            if trains:
                edges = [
                    (k, torch.autograd.graph.get_gradient_edge(end)) for k, end in enumerate(ends) if end.requires_grad
                ]
                self.graphs[piece[-1], ins.microbatch, ins.step] = (given, edges)
            value = result
        self.live[output(ins.layers[-1], ins.microbatch, ins.step)] = value

    def _run_piece(
        self, piece: tuple[int, ...], given: Any, final: tuple[Any, int] | None, ins: Instruction, rows: range
    ) -> tuple[Any, list[Tensor]]:
        """Layers of one piece of the graph: what they hand on (cut off), and the tensors that backward starts from."""
        size = len(rows)
        value = map_tensors(given, torch.clone) if piece[0] in self.overwriting else given
        ends: list[Tensor] = []
        for layer in piece:
            if self.dropouts[layer]:
                randomness.at(self.dropouts[layer], self.base + ins.step, rows.start)
            loss = self._scaled_loss(*final) if final and layer == piece[-1] else None
            if ("output", layer, size) in self.sizes:
                value = self.layers[layer](value)
                ends = [loss(value)] if loss else []
            else:
                value, ends, weights = weigh(self.layers[layer], value, loss, final[0] if final else ())
                self.sizes["output", layer, size] = weights.output
                self.sizes["grad_output", layer, size] = weights.grad_output
                self.sizes["saved", layer, size] = weights.saved
        if final:
            self.losses[ins.step] = self.losses[ins.step] + ends[0].detach()
        else:
            ends = differentiable(value)
        return detach(value), ends

    def _scaled_loss(self, y: Any, weight: int) -> Callable[[Any], Tensor]:
        """The micro-batch's share of the step's mean loss: its own mean, times its part of what counts."""
        mine = counted(y, self.loss)

        def loss(result: Any) -> Tensor:
            if mine == 0:  # every target is ignored: torch's mean would be 0/0
                return torch.stack([t.sum() for t in differentiable(result)]).sum() * 0.0
            value = self.loss(result, y)
            if value.dim():
                raise RankError(f"the loss has shape {tuple(value.shape)}; it must be a scalar, the mean over the rows")
            return value * (mine / weight)

        return loss

    def _backward(self, ins: Instruction) -> None:
        i, step = ins.microbatch, ins.step
        if not self._rows(ins):
            return
        first, final = self.program.first_trainable, self.program.layers - 1
        received = None if ins.layers[-1] == final else self.live[grad_output(ins.layers[-1], i, step)]
        for piece in reversed(self.pieces[ins.layers, i]):
            given, edges = self.graphs.pop((piece[-1], i, step))
            grads = [None if received is None else received[k] for k, _ in edges]
            if edges:
                torch.autograd.backward([edge for _, edge in edges], grads)
            received = [torch.zeros_like(t) if t.grad is None else t.grad for t in differentiable(given)]
        if ins.layers[0] > first:
            value = grad_output(ins.layers[0] - 1, i, step)
            self.live[value] = received
            self._weigh(value)
        for value in ins.writes:
            if value.kind == "grad":
                self.buckets.fill(value.index)

    def _all_reduce(self, index: int, ins: Instruction) -> None:
        handles = self.buckets.all_reduce(ins, self.comm)
        for value in ins.writes:
            self.pending[value] = (index, handles)
        if handles:
            ends, clock = self.ends, time.perf_counter

            def stamp() -> None:
                ends[index] = clock()

            handles[-1].when_done(stamp)

    def _step(self, ins: Instruction) -> None:
        if self.keep_gradients:
            kept = self.gradients[ins.step]
            for p in (p for g in ins.layers for p in self.groups[g]):
                kept[self.names[id(p)]] = (torch.zeros_like(p) if p.grad is None else p.grad).to("cpu", copy=True)
        self.optimizers[ins.layers].step()
        self.buckets.clear(ins.layers)

    def _weigh(self, value: Value) -> None:
        """Note the size of a value that this rank got or made at the border of its layers."""
        key = (value.kind, value.index, self._rows(value))
        if key not in self.sizes:
            self.sizes[key] = count_bytes(self.live[value])

    def size(self, value: Value) -> int:
        """Bytes of a value on this rank, as measured when it was there."""
        if value.microbatch >= 0:
            return self.sizes.get((value.kind, value.index, self._rows(value)), 0)
        params = self.groups[value.index]
        if value.kind == "param":
            group = self.program.groups[value.index]
            return sum(group.tensors) + group.frozen
        if value.kind == "grad":
            return count_bytes(params)
        states = [o.state[p] for o in self.optimizers.values() for p in params if p in o.state]
        return sum(count_bytes(list(state.values())) for state in states)

    def data_bytes(self) -> int:
        """Bytes of input rows and targets that this rank keeps for its part of the batch."""
        total = 0
        for x, y, slices, _ in self.batch.values():
            mine = range(slices[0].start, slices[-1].stop)
            if 0 in self.layers:
                total += count_bytes(take_rows(x, mine))
            if self.program.layers - 1 in self.layers:
                total += count_bytes(take_rows(y, mine))
        return total


def _check_fit(program: Program, layers: Sequence[nn.Module]) -> None:
    """Refuse a model with other layers, other ties, or more to train than the program was compiled for."""
    groups = shape_of(layers).groups
    planned = {group.layers: group.trainable for group in program.groups}
    same = len(layers) == program.layers and planned.keys() == {group.layers for group in groups}
    if not same or any(group.trainable and not planned[group.layers] for group in groups):
        raise RankError(
            f"program {program.name!r} was compiled for another model: {program.layers} layers with ties "
            f"{[g.layers for g in program.groups if len(g.layers) > 1]}, not {len(layers)} with "
            f"{[g.layers for g in groups if len(g.layers) > 1]}; compile it for minipar.costs.profiler.shape_of(model)"
        )


def _pieces(program: Program, rank: int) -> dict[tuple[tuple[int, ...], int], list[tuple[int, ...]]]:
    """For each compute instruction the runs of layers between which the graph must be cut.

    A cut is where some forward or backward of the same micro-batch begins, and before the first trainable layer.
    """
    cuts: dict[int, set[int]] = {}
    for ins in program.ranks[rank]:
        if ins.op in (Op.FORWARD, Op.BACKWARD):
            cuts.setdefault(ins.microbatch, {program.first_trainable}).add(ins.layers[0])
    pieces: dict[tuple[tuple[int, ...], int], list[tuple[int, ...]]] = {}
    for ins in program.ranks[rank]:
        if ins.op in (Op.FORWARD, Op.BACKWARD):
            runs: list[list[int]] = []
            for layer in ins.layers:
                if not runs or layer in cuts[ins.microbatch]:
                    runs.append([])
                runs[-1].append(layer)
            pieces[ins.layers, ins.microbatch] = [tuple(run) for run in runs]
    return pieces
