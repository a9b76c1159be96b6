"""Forwards, recomputations and backwards of one rank: autograd's graph, cut where the program cuts it.

    F 0:4     given --layers 0,1--> detach --layers 2,3--> handed on      two pieces, if B 2:4 and B 0:2 are two
    B 2:4           the gradient of the second piece's input goes to the end of the first one
    B 0:2

Of a piece only the graph's edges are kept, not its output. A forward whose `saved` values are not written keeps no
graph at all: a recomputation makes it later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minipar.data.batches import Batch, Part, part_of_whole
from minipar.errors import MiniparError, RankError
from minipar.execution import autograd_entry, naming_layers, sliced
from minipar.execution.finite import Finite
from minipar.execution.fitting import row_major
from minipar.execution.measuring.weighing import weigh
from minipar.execution.remembered import Remembered, will_run_again
from minipar.execution.saved_tensors import Kept
from minipar.execution.sequence_state import Carrying, Run
from minipar.execution.split_backward import Arrived, input_half, left, noting_hooks, weight_half
from minipar.execution.tails import Tails
from minipar.models import randomness
from minipar.models.losses import counted, counts_elements, says_count
from minipar.models.tensors import (
    Unchanged,
    count_bytes,
    detach,
    differentiable,
    map_tensors,
    overwrites,
    single,
    take_rows,
    tensors,
)
from minipar.program import (
    COPIES,
    Instruction,
    Local,
    Op,
    Program,
    Staleness,
    Synchronous,
    Value,
    grad_output,
    home,
    output,
)
from minipar.program.graph_cuts import pieces_of
from minipar.strategies.passes import host_layers, offload

Loss = Callable[[Any, Any], Tensor]


class _Work(NamedTuple):
    """One piece of the graph that a forward is to make: some layers, and what they are given.

    final   of the last layer the targets, and what the whole batch counts
    rows    of the micro-batch in the batch; start: the first token of a slice
    """

    piece: tuple[int, ...]
    given: Any
    final: tuple[Any, float] | None
    ins: Instruction
    rows: range
    start: int
    live: dict[Value, Any]


def _told(backward: Callable[[Compute, Instruction, dict[Value, Any]], None]) -> Any:
    """An exception in a backward is told with the layers that it is of: those of one call of autograd's engine."""

    def run(self: Compute, ins: Instruction, live: dict[Value, Any]) -> None:
        try:
            backward(self, ins, live)
        except MiniparError:
            raise
        except Exception as error:
            who = " and ".join(naming_layers.title(k, self.layers[k], self.names) for k in ins.layers)
            step = self.base + ins.step
            where = f"in the backward on rank {self.rank}, micro-batch {ins.microbatch} of step {step}"
            raise naming_layers.raised(who, error, where) from error

    return run


class Compute:
    """The layers that a rank holds, the rows that it works on, and the graphs between their forward and backward.

    Losses are this rank's shares of the step's mean, per step of the program. `sizes` are bytes of values as they
    were first met: (kind, layer, rows) -> bytes.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        device: torch.device,
        layers: Sequence[nn.Module],
        loss: Loss,
        seed: int = 0,
        posts: bool = False,
    ) -> None:
        held = program.placement[rank]
        self.posts = posts  # whether gradients that are sent must have the form of the output
        self.seed, self.generators = seed, randomness.generators(device)
        self.rank, self.device, self.loss = rank, device, loss
        self.on_host, _ = host_layers.computed(program.ranks[rank])
        self.layers = {layer: row_major(layers[layer]).to(self.place_of(layer)) for layer in held}
        self.dropouts = {layer: randomness.row_dropouts(layers[layer]) for layer in held}
        self.remembered = {layer: Remembered(layers[layer]) for layer in held}
        self.names: tuple[str, ...] = ()  # of all layers, for messages
        self.every = program.contract.every if isinstance(program.contract, Staleness) else None
        self.overwriting = {layer for layer in held if overwrites(self.layers[layer])}
        self.tried: set[tuple[tuple[int, ...], bool]] = set()  # pieces of layers, with or without a graph
        self.copied: set[tuple[int, ...]] = set()  # of these, the ones that write into what they are given
        self.follow(program)
        self.finite: Finite | None = None  # looks at the losses
        self.sizes: dict[tuple[str, int, int], int] = {}
        self.offloaded = {
            (v.index, v.microbatch, v.step) for v in offload.offloaded(program.ranks[rank])
        }  # of what autograd keeps, what will be copied away
        self.kept: dict[tuple[int, int, int], Kept] = {}
        self.left: dict[tuple[int, int, int], list[Arrived]] = {}  # between the halves of a backward
        self.trained: dict[tuple[int, ...], list[Tensor]] = {}
        self.graphs: dict[tuple[int, int, int], tuple[Any, list[tuple[int, Any]]]] = {}
        self.tails = Tails()
        # Parameters whose memory comes and goes: what a layer hands on must not lie in it.
        self.passing = any(value.kind == "param" for ins in program.ranks[rank] for value in ins.frees)
        self.plain: set[tuple[tuple[int, ...], int, bool]] = set()  # layers of which all is known, with rows and graph

    def work(self, ins: Instruction, live: dict[Value, Any]) -> None:
        """A compute instruction on layers, of whatever kind."""
        kinds = {Op.BACKWARD: self.backward, Op.BACKWARD_INPUT: self.backward_input}
        kinds[Op.BACKWARD_WEIGHT] = self.backward_weight
        kinds.get(ins.op, self.forward)(ins, live)

    def follow(self, program: Program) -> None:
        """Compute for this program from now on, on the same layers."""
        self.program, self.pieces = program, pieces_of(program, self.rank)
        self.carrying = Carrying(program)
        self.again = will_run_again(program, self.rank)
        row = program.ranks[self.rank]
        self.split = any(ins.op is Op.BACKWARD_INPUT for ins in row)
        moving = {Op.SEND, *COPIES} if self.posts else COPIES
        self.moved = {home(v) for ins in row if ins.op in moving for v in ins.reads}

    def _given(self, tensor: Tensor) -> Tensor:
        """An input tensor where and as the layers want it."""
        narrow = self.program.precision == "bf16" and tensor.is_floating_point()
        return tensor.to(self.place_of(0), torch.bfloat16 if narrow else tensor.dtype)

    def place_of(self, layer: int) -> torch.device:
        """Where a layer is computed."""
        return torch.device("cpu") if layer in self.on_host else self.device

    def _to_end(self, tensor: Tensor) -> Tensor:
        """A target, where the last layer is."""
        return tensor.to(self.place_of(self.program.layers - 1))

    def begin(self, batches: Callable[[int], Batch | Part], base: int) -> None:
        """A new pass: its step s trains on `batches(base + s)`, the whole batch, or this rank's part of it."""
        self.base, self.batches = base, batches
        self.batch: dict[int, Part] = {}
        self.counts: dict[int, list[int]] = {}
        self.weights: dict[int, tuple[float, float]] = {}  # what the loss is a mean of, and the whole batch
        self.losses: list[Tensor | float] = [0.0] * self.program.losses

    def batch_of(self, step: int) -> Part:
        """What this rank has of the batch of a step."""
        if step not in self.batch:
            if isinstance(self.program.contract, (Synchronous, Local)):
                self.batch.clear()  # the step before is through
            found = self.batches(self.base + step)
            if not isinstance(found, Part):
                found = part_of_whole(found, self.program, self.rank, self.loss)
            weight = found.weight
            if isinstance(self.program.contract, Local):  # the mean is over the replica's rows; all are there
                own = take_rows(found.y, range(found.rows[0].start - found.start, found.rows[-1].stop - found.start))
                found = found._replace(weight=counted(own, self.loss))
            self.weights[step] = (found.weight, weight)
            self.batch[step] = found
        return self.batch[step]

    def share(self, step: int, steps: int = 1) -> float:
        """How much this rank's loss weighs in that of all replicas, in `steps` steps to this one."""
        if not isinstance(self.program.contract, Local):
            return 1.0
        found = [self.weights[s] for s in range(step - steps + 1, step + 1)]
        whole = sum(weight for _, weight in found)
        return sum(own for own, _ in found) / whole if whole else 1.0

    def rows(self, value: Value | Instruction) -> int:
        """Rows of a micro-batch. Of a slice a number that says which one it is, too: equal numbers, equal forms."""
        counts = self.counts.get(value.step)
        if counts is None:
            rows, slices = self.batch_of(value.step).rows, self.carrying.count
            counts = [len(part) * slices + i % slices if part else 0 for i, part in enumerate(rows)]
            self.counts[value.step] = counts
        return counts[value.microbatch]

    def forward(self, ins: Instruction, live: dict[Value, Any]) -> None:
        """A forward or a recomputation. Generators are left as they were."""
        with randomness.untouched(self.generators):
            self._forward(ins, live)

    def _forward(self, ins: Instruction, live: dict[Value, Any]) -> None:
        part = self.batch_of(ins.step)
        rows = part.rows[ins.microbatch]
        if not rows:
            return
        here = range(rows.start - part.start, rows.stop - part.start)
        if ins.layers[0] == 0:
            value = map_tensors(self._cut(take_rows(part.x, here), ins), self._given)
        else:
            found = [live[output(a, ins.microbatch, ins.step)] for a in self.program.wiring.inputs[ins.layers[0]]]
            value = found[0] if len(found) == 1 else tuple(found)
        kept = {value.index for value in ins.writes if value.kind == "saved"}
        start = self.carrying.start(ins, value) if self.carrying.count > 1 else 0
        for piece in self.pieces[ins.layers, ins.microbatch]:
            trains = piece[0] in kept
            # (`data` has a version of its own: writing into it would not spoil what other graphs have saved.)
            given = detach(map_tensors(value, lambda t: t.data), requires_grad=piece[0] > self.program.first_trainable)
            final: tuple[Any, float] | None = None
            if piece[-1] == self.program.layers - 1:
                y = map_tensors(take_rows(part.y, here), self._to_end)
                final = self._cut(y, ins), self._weight(y, part.weight) / self._share(y, ins)
            noting = noting_hooks() if trains and self.split else nullcontext()
            with noting, nullcontext() if trains is torch.is_grad_enabled() else torch.set_grad_enabled(trains):
                given, result, ends = self._run_apart(_Work(piece, given, final, ins, rows, start, live))
            if trains:
                edges = [
                    (k, torch.autograd.graph.get_gradient_edge(end)) for k, end in enumerate(ends) if end.requires_grad
                ]
                self.graphs[piece[-1], ins.microbatch, ins.step] = (given, edges)
            value = result
            handed_on = output(piece[-1], ins.microbatch, ins.step)
            if handed_on in ins.writes:
                live[handed_on] = value
        del value, result, ends
        self.tails.settle()

    def _cut(self, value: Any, ins: Instruction) -> Any:
        """The tokens of the slice that an instruction works on."""
        slices = self.program.slices
        return value if self.carrying.count == 1 else sliced.cut(value, slices, ins.microbatch % self.carrying.count)

    def _share(self, y: Any, ins: Instruction) -> float:
        """The part of the rows' weight in the mean that a slice has, where rows are counted and not their tokens."""
        whole = self.carrying.count == 1 or counts_elements(y) or says_count(self.loss)
        return 1.0 if whole else sliced.share(y, self.program.slices, ins.microbatch % self.carrying.count)

    def _run_apart(self, work: _Work) -> tuple[Any, Any, list[Tensor]]:
        """The same as `_run_piece`, which leaves what it is given as it was, and with that, as the graph begins there.

        Layers may write into their input, where that is the piece's (a leaf, somebody else's rows or message). They are
        found the first time: then all is put back, and they run once more, on a copy, as they do from then on.
        """
        piece, given, final, *_ = work
        targets = final[0] if final else ()
        key = piece, torch.is_grad_enabled()
        seen = Unchanged(given, targets)
        if key in self.tried:
            found = self._run_piece(work)
            if not seen.versions_are():
                layers = f"layers {piece[0]} to {piece[-1]}" if len(piece) > 1 else f"layer {piece[0]}"
                raise RankError(
                    f"{layers} wrote into their input, which they had not done before; a layer that does so now and "
                    "then must say so by an attribute `inplace = True`, so that it is given a copy"
                )
            return given, *found
        copies = map_tensors((given, targets), lambda t: t.detach().clone())
        modules = [module for layer in piece for module in self.layers[layer].modules()]
        buffers = [(m, name, b, b.clone()) for m in modules for name, b in m._buffers.items() if b is not None]
        losses, sizes = list(self.losses), dict(self.sizes)
        # (What is written into becomes a result of the layers' graph: the second run begins at leaves of its own.)
        given_again, again = map_tensors((given, final), lambda t: t.detach().requires_grad_(t.requires_grad))
        try:
            found = self._run_piece(work, whole=True)
            if seen.versions_are() and seen.equals(copies):
                # (A layer that is weighed gets a copy of its own, behind which nothing is seen: once more, then.)
                if self.sizes.keys() == sizes.keys() or self.overwriting.isdisjoint(piece[1:]):
                    self.tried.add(key)
                return given, *found
            del found
        except Exception:
            if piece in self.copied:
                raise
        with torch.no_grad():
            for tensor, copied in zip(seen.tensors, tensors(copies), strict=True):
                tensor.data.copy_(copied)
            for module, name, buffer, copied in buffers:
                module._buffers[name] = buffer
                buffer.copy_(copied)
        self.losses[:] = losses
        self.sizes.clear()
        self.sizes.update(sizes)
        self.plain = {kind for kind in self.plain if kind[0] != piece}
        self.copied.add(piece)
        found = self._run_piece(work._replace(given=given_again, final=again))
        self.tried.add(key)
        return given_again, *found

    def _run_piece(self, work: _Work, whole: bool = False) -> tuple[Any, list[Tensor]]:
        """Layers of one piece of the graph: what they hand on (cut off), and the tensors that backward starts from.

        whole   leave nothing out
        """
        piece, given, final, ins, rows, start, live = work
        size = self.rows(ins)
        handed_on = output(piece[-1], ins.microbatch, ins.step) in ins.writes
        # Of the last layer of a recomputation whose output is not handed on, nobody reads the output's numbers.
        ends_here = ins.op is Op.RECOMPUTE and piece[-1] == ins.layers[-1] and torch.is_grad_enabled()
        apart = piece[0] in self.overwriting or piece in self.copied
        value = map_tensors(given, torch.clone) if apart else given
        unread = piece[-1] if ends_here and not (final or handed_on or self.overwriting or apart or whole) else None
        if final and piece in self.copied:
            final = map_tensors(final[0], torch.clone), final[1]
        ends: list[Tensor] = []
        kind = piece, size, torch.is_grad_enabled()
        step = self.base + ins.step
        layer = piece[0]
        try:
            for layer in piece:
                randomness.reseed(self.generators, randomness.draw_seed(self.seed, step, rows.start, layer, start))
                if kind in self.plain and layer != piece[-1]:
                    value = self._apart_from_parameters(layer, self.layers[layer](value))
                    continue
                if self.dropouts[layer]:
                    randomness.at(self.dropouts[layer], step, rows.start, start, len(rows))
                loss = self._scaled_loss(*final) if final and layer == piece[-1] else None
                key = layer, ins.microbatch, ins.step
                module = self.layers[layer]
                run = Run(self.carrying, layer, module, ins, start, live) if self.carrying.count > 1 else None
                new = run is not None and ("carry", layer, size) not in self.sizes
                known = [*tensors(value), *module.parameters(), *module.buffers()] if new else []
                with self._remembering(layer, ins):
                    if key in self.offloaded and torch.is_grad_enabled():
                        given_here = [*tensors(value), *(tensors(final[0]) if final else ())]
                        kept = Kept([*given_here, *module.parameters(), *module.buffers()])
                        with kept.saving():
                            value = module(value)
                            ends = [loss(value)] if loss else []
                        kept.settle(tensors(value))
                        self.kept[key] = kept
                        self.sizes["output", layer, size] = count_bytes(value)
                        self.sizes["grad_output", layer, size] = count_bytes(
                            [t for t in tensors(value) if t.requires_grad]
                        )
                        self.sizes["saved", layer, size] = kept.nbytes
                    elif ("saved", layer, size) in self.sizes or not torch.is_grad_enabled():
                        if run is None and layer == unread:
                            value = self.tails.run(layer, module, value)
                        else:
                            value = (run or module)(value)
                        ends = [loss(value)] if loss else []
                        if ("output", layer, size) not in self.sizes:
                            self.sizes["output", layer, size] = count_bytes(value)
                    else:
                        value, ends, weights = weigh(module, value, loss, final[0] if final else (), run)
                        self.sizes["output", layer, size] = weights.output
                        self.sizes["grad_output", layer, size] = weights.grad_output
                        self.sizes["saved", layer, size] = weights.saved
                value = self._apart_from_parameters(layer, value)
                if run is not None and new:
                    self.sizes["carry", layer, size], self.sizes["grad_carry", layer, size] = run.sizes(known)
        except MiniparError:
            raise
        except Exception as error:
            who = naming_layers.title(layer, self.layers[layer], self.names)
            where = f"on rank {self.rank}, micro-batch {ins.microbatch} of step {step}"
            raise naming_layers.raised(who, error, where, value) from error
        special = any(self.dropouts[layer] or self.remembered[layer] for layer in piece)
        if not self.offloaded and self.carrying.count == 1 and not special:
            self.plain.add(kind)
        if not final:
            ends = differentiable(value)
        elif ins.op is Op.FORWARD:
            k = ins.step if self.every is None else ins.step * self.program.microbatches + ins.microbatch
            part, found = self.every or self.share(ins.step), ends[0].detach()
            if self.finite is not None:
                self.finite(found, self.base + ins.step, ins.microbatch, rows)
            self.losses[k] = self.losses[k] + (found if part == 1 else found * part)
        return detach(value), ends

    def _apart_from_parameters(self, layer: int, value: Any) -> Any:
        """What a layer hands on. Where it is a parameter, or a view of one, which will be let go of, it is copied."""
        if not self.passing:
            return value
        own = {p.untyped_storage().data_ptr() for p in self.layers[layer].parameters()}
        return map_tensors(value, lambda t: t.clone() if t.untyped_storage().data_ptr() in own else t)

    def _remembering(self, layer: int, ins: Instruction) -> AbstractContextManager[None]:
        """While entered, a layer runs forward: for the first time, or as it did then."""
        remembered = self.remembered[layer]
        if not remembered or (layer, ins.microbatch, ins.step) not in self.again:
            return nullcontext()
        return (remembered.first if ins.op is Op.FORWARD else remembered.again)((ins.microbatch, ins.step))

    def _forget(self, ins: Instruction) -> None:
        """The backward of some layers has run: they will not run again."""
        for layer in ins.layers if self.again else ():
            self.remembered[layer].forget((ins.microbatch, ins.step))

    def _weight(self, y: Any, weight: float) -> float:
        """What the micro-batch's targets count against: those of the step, or (so many times) the micro-batch's own."""
        return weight if self.every is None else (counted(y, self.loss) or 1) * self.every

    def _scaled_loss(self, y: Any, weight: float) -> Callable[[Any], Tensor]:
        """The micro-batch's share of the step's mean loss: its own mean, times its part of what counts."""
        mine = counted(y, self.loss)

        def loss(result: Any) -> Tensor:
            if mine == 0:  # every target is ignored: torch's mean would be 0/0
                return torch.stack([t.sum() for t in differentiable(result)]).sum() * 0.0
            try:
                value: Any = self.loss(map_tensors(result, single) if self.program.precision == "bf16" else result, y)
            except MiniparError:
                raise
            except Exception as error:
                raise naming_layers.raised("the loss", error, f"on rank {self.rank}", (result, y)) from error
            if isinstance(value, tuple):
                value, count = value
                if abs(float(count) - mine) > 1e-6 * mine:
                    raise RankError(
                        f"the loss gave (sum, count) with count {float(count):g}, but its targets weigh {mine:g}; say "
                        "what it counts, of y alone, with losses.weighted(loss, count=lambda y: ...)"
                    )
                value = value / mine
            if value.dim():
                raise RankError(f"the loss has shape {tuple(value.shape)}; it must be a scalar, the mean over the rows")
            share: Tensor = value * (mine / weight)
            return share

        return loss

    @_told
    def backward(self, ins: Instruction, live: dict[Value, Any]) -> None:
        i, step = ins.microbatch, ins.step
        if not self.rows(ins):
            return
        received, given = self._arrived(ins, live), None
        for piece in reversed(self.pieces[ins.layers, i]):
            given, edges = self.graphs.pop((piece[-1], i, step))
            ends, grads = _reached(edges, received)
            if self.carrying.count > 1:
                self.carrying.arriving(piece, ins, live, ends, grads)
            if ends:
                autograd_entry.backward(ends, grads, alone=autograd_entry.hooked(self._parameters(piece)))
            received = [t.grad for t in differentiable(given)]
            if self.carrying.count > 1:
                self.carrying.hand_back(piece, ins, live)
        for layer in ins.layers if self.kept else ():
            self.kept.pop((layer, i, step), None)
        self._forget(ins)
        self._hand_back(ins, given, received, live)

    @_told
    def backward_input(self, ins: Instruction, live: dict[Value, Any]) -> None:
        """The input half of a backward; what it leaves is `saved_weight`. See `execution/split_backward.py`."""
        i, step = ins.microbatch, ins.step
        if not self.rows(ins):
            return
        received, given = self._arrived(ins, live), None
        for piece in reversed(self.pieces[ins.layers, i]):
            given, edges = self.graphs.pop((piece[-1], i, step))
            inputs = differentiable(given) if piece[0] > self.program.first_trainable else []
            ends, grads = _reached(edges, received)
            found, arrived = input_half(ends, grads, inputs, self._parameters(piece))
            self.left[piece[-1], i, step] = arrived
            if ("saved_weight", piece[-1], self.rows(ins)) not in self.sizes:
                self._weigh_left(piece, arrived, self.rows(ins), bool(inputs), given, grads)
            received = found
        self._forget(ins)
        self._hand_back(ins, given, received, live)

    @_told
    def backward_weight(self, ins: Instruction, live: dict[Value, Any]) -> None:
        """The weight half, from where the input half left off."""
        if self.rows(ins):
            for piece in reversed(self.pieces[ins.layers, ins.microbatch]):
                weight_half(self.left.pop((piece[-1], ins.microbatch, ins.step)))

    def _parameters(self, piece: tuple[int, ...]) -> list[Tensor]:
        """The parameters of some layers that are trained, each once."""
        if piece not in self.trained:
            mine = {id(p): p for layer in piece for p in self.layers[layer].parameters() if p.requires_grad}
            self.trained[piece] = list(mine.values())
        return self.trained[piece]

    def _weigh_left(
        self, piece: tuple[int, ...], arrived: list[Arrived], rows: int, split: bool, given: Any, grads: list[Any]
    ) -> None:
        """Note what each layer's input half left; of one that is not split, all that there was."""
        owner = {id(p): layer for layer in piece for p in self.layers[layer].parameters()}
        found = dict.fromkeys(piece, 0)
        if split:
            known = [t for layer in piece for t in (*self.layers[layer].parameters(), *self.layers[layer].buffers())]
            for one, size in zip(arrived, left(arrived, known), strict=True):
                found[owner[id(one.parameters[0])]] += size
        elif arrived:
            before = count_bytes(given) if piece[0] else 0
            found[piece[0]] = self.sizes["saved", piece[0], rows] + before + count_bytes(grads)
        self.sizes.update({("saved_weight", layer, rows): size for layer, size in found.items()})

    def _arrived(self, ins: Instruction, live: dict[Value, Any]) -> list[Tensor | None] | None:
        """The gradient of what an instruction hands on, the sum of all readers', each tensor's None where no reader has
        one; None of the last layer."""
        out = self.program.wiring.out[ins.layers[-1]]
        found = [live[grad_output(e, ins.microbatch, ins.step)] for e in out]
        if len(out) > 1:
            there = [[g for g in parts if g is not None] for parts in zip(*found, strict=True)]
            return [reduce(torch.add, parts) if parts else None for parts in there]
        return found[0] if found else None

    def _hand_back(
        self, ins: Instruction, given: Any, received: list[Tensor | None] | None, live: dict[Value, Any]
    ) -> None:
        """The gradients of an instruction's inputs, each to the layer that it is from. Where there is none, zeros are
        sent by a transport that posts receives by their size, and copied."""
        first, layer = self.program.first_trainable, ins.layers[0]
        into = self.program.wiring.into[layer]
        start = 0
        for k, (e, source) in enumerate(zip(into, self.program.wiring.inputs[layer], strict=True)):
            mine, places = received, differentiable(given if len(into) == 1 else given[k])
            if received is not None and len(into) > 1:
                mine, start = received[start : start + len(places)], start + len(places)
            if source >= first:
                value = grad_output(e, ins.microbatch, ins.step)
                if mine is not None and value in self.moved:
                    mine = [torch.zeros_like(t) if g is None else g for t, g in zip(places, mine, strict=True)]
                live[value] = mine
                self.weigh(value, mine)

    def weigh(self, value: Value, content: Any) -> None:
        """Note the size of a value that this rank got or made at the border of its layers."""
        key = (value.kind, self.program.source(value), self.rows(value))
        if key not in self.sizes:
            self.sizes[key] = count_bytes(content)

    def data_bytes(self) -> int:
        """Bytes of input rows and targets that this rank keeps for its part of the batch."""
        total = 0
        for x, y, start, rows, _ in self.batch.values():
            mine = range(rows[0].start - start, rows[-1].stop - start)
            if 0 in self.layers:
                total += count_bytes(take_rows(x, mine))
            if self.program.layers - 1 in self.layers:
                total += count_bytes(take_rows(y, mine))
        return total


def _reached(
    edges: Sequence[tuple[int, Any]], received: Sequence[Tensor | None] | None
) -> tuple[list[Any], list[Tensor | None]]:
    """Where a backward begins: the ends of a graph that a gradient has reached, and these gradients.

    edges      of each end which tensor of the output it is
    received   gradients of these tensors; None where there is none, as in front of a `detach`, whose layers have no
               backward in plain torch either. Without `received` the end is the loss, whose gradient is 1
    """
    if received is None:
        return [edge for _, edge in edges], [None for _ in edges]
    reached = [(edge, received[k]) for k, edge in edges if received[k] is not None]
    return [edge for edge, _ in reached], [g for _, g in reached]
