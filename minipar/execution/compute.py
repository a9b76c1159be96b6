"""Forwards, recomputations and backwards of one rank: autograd's graph, cut where the program cuts it.

    F 0:4     input --layers 0,1--> detach --layers 2,3--> output      two pieces, if B 2:4 and B 0:2 are two
    B 2:4           the gradient of the second piece's input goes to the end of the first one
    B 0:2

A piece keeps only the edges of its graph, not its output; they are the entry of its last layer's `saved`. A forward
whose `saved` values are not written keeps no graph at all: a recomputation makes it later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial, reduce
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from minipar.comm import missing
from minipar.data.batches import Batch, BatchPart, BatchRows
from minipar.errors import MiniparError, RankError
from minipar.execution import autograd_entry, layer_calls, naming_layers, repartition
from minipar.execution.fitting import row_major
from minipar.execution.following import Midst
from minipar.execution.layer_calls import Call, LayerCall, Result, Sizes, UntouchedInputs
from minipar.execution.mean_loss import Finite, Loss, MeanLoss, Target
from minipar.execution.remembered import Remembered, will_run_again
from minipar.execution.saved_tensors import SavedTensors
from minipar.execution.sliced import SequenceState, carried, on_slices
from minipar.execution.split_backward import Arrived, input_half, left, noting_hooks, weight_half
from minipar.execution.streams import Later, Streams, streams_of
from minipar.execution.tails import Tails
from minipar.models import randomness
from minipar.models.mixture_gpt import LoadCount, routes
from minipar.models.tensors import count_bytes, detach, differentiable, dtype_named, map_tensors, take_rows
from minipar.program import (
    COPIES,
    Instruction,
    LayerRun,
    Op,
    Program,
    Value,
    grad_output,
    home,
    output,
    saved,
    saved_weight,
)
from minipar.program.forms import parts_of
from minipar.program.graph_cuts import pieces_of
from minipar.strategies.passes import offload
from minipar.strategies.rewriting import computed_on_host


class Compute:
    """The layers that a rank holds, and the graphs between their forward and backward, of a program that it is told to
    `follow`.

    rows     the rows of the batch that it works on
    losses   this rank's shares of the step's mean, per step of the program
    sizes    bytes of values as they were first measured
    kept     what autograd keeps of layers that are offloaded
    experts  counts which experts tokens go to; None without experts
    finite   checks the losses; None if nobody asks for it
    midst    reports them while a pass goes on; None if nobody asks for it
    later    checks of what the device has computed, at once or when the host knows it
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
        streams: Streams | None = None,
    ) -> None:
        held = program.placement[rank]
        self.posts = posts  # whether gradients that are sent must have the form of the output
        self.rank, self.device, self.seed, self.generators = rank, device, seed, randomness.generators(device)
        self.places = program.places(rank) if program.sharing > 1 else ()
        self.inputs = parts_of(program.inputs, len(self.places)) if self.places else []
        self.on_host, _ = computed_on_host(program.ranks[rank])
        self.layers = {layer: row_major(layers[layer]).to(self.place_of(layer)) for layer in held}
        self.remembered: dict[int, Remembered] = {}  # of layers that run again
        self.names: tuple[str, ...] = ()  # of all layers, for messages
        self.rows = BatchRows(program, rank, loss)
        self.streams = streams or streams_of(device)
        self.later = Later(self.streams)
        self.loss = MeanLoss(loss, program, rank, self.later)
        self.finite: Finite | None = None
        self.midst: Midst | None = None
        self.sizes: Sizes = {}
        # Bytes of values in another form, and of the tensors that change their form.
        self.form_sizes: dict[tuple[str, int, int, str], int] = {}
        self.kept: dict[LayerRun, SavedTensors] = {}
        self.trained: dict[tuple[int, ...], list[Tensor]] = {}
        self.tails: Tails | None = None  # of recomputations whose output nobody reads
        self.experts: LoadCount | None = None
        self.depends: bool | None = None  # whether a loss has depended on parameters; None before the first one
        self.untouched = UntouchedInputs(self.layers, self.sizes)

    def follow(self, program: Program) -> None:
        """Compute for this program from now on, on the same layers."""
        row = program.ranks[self.rank]
        self.program, self.pieces = program, pieces_of(program, self.rank)
        self.sequence = SequenceState(program) if program.slice_count > 1 else None
        self.again = will_run_again(program, self.rank)
        for layer in self.layers if self.again else ():
            self.remembered.setdefault(layer, Remembered(self.layers[layer]))
        # A forward whose backward is split must know of the hooks on tensors.
        self.noting = noting_hooks if any(ins.op is Op.BACKWARD_INPUT for ins in row) else nullcontext
        moving = {Op.SEND, Op.RECV, *COPIES} if self.posts else COPIES
        self.moved = {home(v) for ins in row if ins.op in moving for v in ins.reads}
        self.came = {home(v) for ins in row if ins.op in moving for v in ins.writes}
        self.calls = self._calls()

    def _calls(self) -> dict[int, LayerCall]:
        """How this rank calls each of its layers."""
        row = self.program.ranks[self.rank]
        passing = any(value.kind == "param" for ins in row for value in ins.frees)
        away = {(v.index, v.microbatch, v.step) for v in offload.offloaded(row)}
        ends = {ins.layers[-1] for ins in row if ins.op is Op.RECOMPUTE} - {self.program.layers - 1}
        return {layer: self._call_of(layer, passing, away, layer in ends) for layer in self.layers}

    def _call_of(self, layer: int, passing: bool, away: set[LayerRun], ends: bool) -> LayerCall:
        """How this rank calls a layer, from the module outwards.

        passing   whether parameters are freed while the program runs
        away      layers and micro-batches whose saved tensors are copied away
        ends      whether some recomputation ends with this layer
        """
        module, sizes, sequence = self.layers[layer], self.sizes, self.sequence
        run = layer_calls.plain(module) if sequence is None else on_slices(sequence, layer, module, sizes)
        beside = carried if sequence is not None else None
        if passing:
            run = layer_calls.copying_parameters(run, module)
        if layer == self.program.layers - 1:
            run = layer_calls.with_loss(run, self.loss)
        unweighed, run = run, layer_calls.weighed(run, layer, module, sizes, beside)
        if any(key[0] == layer for key in away):
            run = layer_calls.keeping(unweighed, run, layer, module, sizes, away, self.kept, beside)
        if ends and not (sequence or self.untouched.overwriting):
            self.tails = self.tails or Tails()
            run = layer_calls.shortened(run, layer, module, sizes, self.tails)
        if self.again and self.remembered[layer]:
            run = layer_calls.remembering(run, layer, self.remembered[layer], self.again)
        dropouts = randomness.row_dropouts(module)
        if dropouts:
            run = layer_calls.by_row(run, dropouts)
        if routes(module) and self.is_first("S0"):  # of ranks that route the same rows
            self.experts = self.experts or LoadCount()
            run = layer_calls.counting(run, layer, self.experts)
        dice = [g for g in randomness.dice_of(module) if randomness.is_global(g)]
        return layer_calls.seeded(run, getattr(module, "drawn_as", layer), self.seed, self.generators, dice)

    def place_of(self, layer: int) -> torch.device:
        """Where a layer is computed."""
        return torch.device("cpu") if layer in self.on_host else self.device

    def begin(self, batches: Callable[[int], Batch | BatchPart], base: int) -> None:
        """A new pass: its step s trains on `batches(base + s)`, the whole batch, or this rank's part of it."""
        self.rows.begin(batches, base)
        self.losses: list[Tensor | float] = [0.0] * self.program.losses
        if self.midst is not None:
            self.midst.begin(self.program.losses)

    def work(self, ins: Instruction, live: dict[Value, Any]) -> None:
        """Run a compute instruction on layers, of any kind. An error of a backward names the layers that it ran."""
        if ins.op is Op.FORWARD or ins.op is Op.RECOMPUTE:
            return self.forward(ins, live)
        run = self.backward_weight if ins.op is Op.BACKWARD_WEIGHT else self.backward
        try:
            run(ins, live)
        except MiniparError:
            raise
        except Exception as error:
            who = " and ".join(naming_layers.title(k, self.layers[k], self.names) for k in ins.layers)
            step = self.rows.base + ins.step
            where = f"in the backward on rank {self.rank}, micro-batch {ins.microbatch} of step {step}"
            raise naming_layers.raised(who, error, where) from error

    def check_depends(self) -> None:
        """Before the first update: RankError where no loss depends on a parameter, as plain torch raises there."""
        if self.depends is False:
            raise RankError(
                f"the loss of step {self.rows.base} depends on no parameter, so nothing can be trained; look for "
                "detach(), torch.no_grad() or .item() in the loss or in a layer"
            )

    # forward ---------------------------------------------------------------------------------------------------------

    def forward(self, ins: Instruction, live: dict[Value, Any]) -> None:
        """Run a forward or a recomputation. Random generators are left as they were."""
        if self.rows.count(ins):
            with randomness.untouched(self.generators):
                self._forward(ins, live)
            if self.tails is not None:
                self.tails.settle()

    def _forward(self, ins: Instruction, live: dict[Value, Any]) -> None:
        part = self.rows.part(ins.step)
        rows = part.rows[ins.microbatch]
        here = range(rows.start - part.start, rows.stop - part.start)
        value = self._input(ins, part.x, here, live)
        start = self.sequence.start(ins, value, self.layers[ins.layers[0]]) if self.sequence is not None else 0
        trained = {value.index for value in ins.writes if value.kind == "saved"}
        step, count = self.rows.base + ins.step, self.rows.count(ins)
        for piece in self.pieces[ins.layers, ins.microbatch]:
            if self.program.forms:
                reads = self.program.forms[piece[0]].reads
                value = repartition.own_shard(value, reads, self.places, self.rows.number(ins))
            trains, handed_on = piece[0] in trained, self._output(piece[-1], ins, written=True)
            # (`data` has a version of its own: writing into it would not spoil what other graphs have saved.)
            given = detach(map_tensors(value, lambda t: t.data), requires_grad=piece[0] > self.program.first_trainable)
            target = self._target(ins, part, here) if piece[-1] == self.program.layers - 1 else None
            unread = ins.op is Op.RECOMPUTE and piece[-1] == ins.layers[-1] and trains and handed_on not in ins.writes
            if self.loss.trial is not None:
                self.loss.tried = step if ins.op is Op.FORWARD else -1
            call = Call(piece, ins, step, rows, start, count, target, unread, live)
            noting = self.noting() if trains else nullcontext()
            with noting, nullcontext() if trains is torch.is_grad_enabled() else torch.set_grad_enabled(trains):
                given, (value, loss) = self.untouched(self._run_piece, given, call)
            if trains:
                ends = differentiable(value) if loss is None else [loss]
                edges = [(k, get_gradient_edge(end)) for k, end in enumerate(ends) if end.requires_grad]
                live[saved(piece[-1], ins.microbatch, ins.step)] = given, edges
            if loss is not None and trains:
                self.depends = bool(self.depends) or loss.requires_grad
            if loss is not None and ins.op is Op.FORWARD:
                self._note_loss(loss.detach(), ins, rows)
            value = detach(value)
            if handed_on in ins.writes:
                live[handed_on] = value

    def _input(self, ins: Instruction, x: Any, rows: range, live: dict[Value, Any]) -> Any:
        """The input of an instruction's layers: rows of the batch, or outputs of other layers."""
        if ins.layers[0] > 0:
            found = [live[self._output(a, ins)] for a in self.program.wiring.inputs[ins.layers[0]]]
            return found[0] if len(found) == 1 else tuple(found)
        narrow = self.program.narrow

        def placed(tensor: Tensor) -> Tensor:
            short = narrow and tensor.is_floating_point()
            return self._placed(0, tensor, dtype_named(narrow) if short else tensor.dtype)

        return map_tensors(self._part(take_rows(x, rows), ins), placed)

    def _placed(self, layer: int, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """A tensor of the batch, where a layer is computed."""
        return tensor.to(dtype) if layer in self.on_host else self.streams.place(tensor, dtype)

    def _part(self, value: Any, ins: Instruction) -> Any:
        """What an instruction works on of a micro-batch's rows or targets: a slice of sequences; of that, what this
        rank has where the ranks which share layers have it in parts."""
        if self.sequence is not None:
            value = self.sequence.cut(value, ins)
        return repartition.part_of_batch(value, self.program.inputs, self.places) if self.places else value

    def is_first(self, *different: str) -> bool:
        """Whether this rank is the first of those that share its layers and have the same of the batch: ranks have
        `different` parts of it along some axes."""
        return all(k == 0 or part in different for (k, _), part in zip(self.places, self.inputs, strict=True))

    def _output(self, layer: int, ins: Instruction, written: bool = False) -> Value:
        """The output of a layer, in the form in which an instruction reads or writes it."""
        value = output(layer, ins.microbatch, ins.step)
        form = self.program.form_of(value, ins.layers, written=written)
        return value._replace(form=form) if form else value

    def _gradient(self, edge: int, ins: Instruction, written: bool = False) -> Value:
        """The gradient that goes through an edge, in the form in which an instruction reads or writes it."""
        value = grad_output(edge, ins.microbatch, ins.step)
        form = self.program.form_of(value, ins.layers, written=written)
        return value._replace(form=form) if form else value

    def _target(self, ins: Instruction, part: BatchPart, rows: range) -> Target:
        """What the output of the last layer is compared with. (It is counted on the host, where it comes from.)"""
        y, last = take_rows(part.y, rows), self.program.layers - 1
        tokens = prod(count for (_, count), part in zip(self.places, self.inputs, strict=True) if part == "S1")
        share = (1.0 if self.sequence is None else self.sequence.share(y, ins)) / tokens
        target = self.loss.target(y, self._part(y, ins), share, part.weight)
        return target._replace(y=map_tensors(target.y, lambda t: self._placed(last, t, t.dtype)))

    def _run_piece(self, given: Any, call: Call) -> Result:
        """Run the layers of one piece of the graph, one after the other."""
        value, loss, layer = given, None, call.piece[0]
        try:
            for layer in call.piece:
                value, loss = self.calls[layer](value, call)
            if call.target is not None and loss is None:  # (without a graph: see `layer_calls.with_loss`)
                loss = self.loss(value, call.target)
        except MiniparError:
            raise
        except Exception as error:
            who = naming_layers.title(layer, self.layers[layer], self.names)
            where = f"on rank {self.rank}, micro-batch {call.ins.microbatch} of step {call.step}"
            raise naming_layers.raised(who, error, where, value) from error
        return value, loss

    def _note_loss(self, loss: Tensor, ins: Instruction, rows: range) -> None:
        """Add a micro-batch's loss to that of its step, or note it where each micro-batch has a mean of its own."""
        every = self.loss.every
        k = ins.step if every is None else ins.step * self.program.microbatches + ins.microbatch
        if self.finite is not None:
            check = partial(self.finite, step=self.rows.base + ins.step, microbatch=ins.microbatch, rows=rows)
            self.later.check(loss, check)
        if not self.is_first("S0", "S1"):
            return  # ranks that share the last layer and have the same rows have the same loss, which counts once
        part = (every or 1) * (self.rows.share(ins.step) if self.program.local_steps else 1)
        share = loss if part == 1 else loss * part
        self.losses[k] = self.losses[k] + share
        if self.midst is not None:
            self.later.check(share, partial(self.midst, k=k))

    # backward --------------------------------------------------------------------------------------------------------

    def backward(self, ins: Instruction, live: dict[Value, Any]) -> None:
        """Run a backward, or its input half: what that leaves is `saved_weight` (see `split_backward.py`)."""
        if not self.rows.count(ins):
            return
        received, given = self._arrived(ins, live), None
        for piece in reversed(self.pieces[ins.layers, ins.microbatch]):
            given, edges = live.pop(saved(piece[-1], ins.microbatch, ins.step))
            ends, grads = _reached(edges, self._taken(piece, ins, received) if self.program.forms else received)
            if self.sequence is not None:
                self.sequence.arriving(piece, ins, live, ends, grads)
            if ins.op is Op.BACKWARD_INPUT:
                found = self._input_half(piece, ins, given, ends, grads, live)
            else:
                if ends:
                    autograd_entry.backward(ends, grads, separate=autograd_entry.hooked(self._parameters(piece)))
                found = [t.grad for t in differentiable(given)]
            received = self._with_counts(found, given, piece) if self.program.forms else found
            if self.sequence is not None:
                self.sequence.hand_back(piece, ins, live)
        for layer in ins.layers if self.kept or self.again else ():  # what was kept for this backward
            self.kept.pop((layer, ins.microbatch, ins.step), None)
            if layer in self.remembered:
                self.remembered[layer].forget((ins.microbatch, ins.step))
        self._hand_back(ins, given, received, live)

    def _input_half(
        self,
        piece: tuple[int, ...],
        ins: Instruction,
        given: Any,
        ends: list[Any],
        grads: list[Any],
        live: dict[Value, Any],
    ) -> list[Tensor | None]:
        inputs, rows = differentiable(given) if piece[0] > self.program.first_trainable else [], self.rows.count(ins)
        found, arrived = input_half(ends, grads, inputs, self._parameters(piece))
        live[saved_weight(piece[-1], ins.microbatch, ins.step)] = arrived
        if ("saved_weight", piece[-1], rows) not in self.sizes:
            self._weigh_left(piece, arrived, rows, bool(inputs), given, grads)
        return found

    def backward_weight(self, ins: Instruction, live: dict[Value, Any]) -> None:
        """Run the weight half of a backward, from the gradients that the input half kept."""
        if self.rows.count(ins):
            for piece in reversed(self.pieces[ins.layers, ins.microbatch]):
                weight_half(live.pop(saved_weight(piece[-1], ins.microbatch, ins.step)))

    def _parameters(self, piece: tuple[int, ...]) -> list[Tensor]:
        """The parameters of some layers that are trained, each once."""
        if piece not in self.trained:
            mine = {id(p): p for layer in piece for p in self.layers[layer].parameters() if p.requires_grad}
            self.trained[piece] = list(mine.values())
        return self.trained[piece]

    def _weigh_left(
        self, piece: tuple[int, ...], arrived: list[Arrived], rows: int, split: bool, given: Any, grads: list[Any]
    ) -> None:
        """Note the bytes that each layer's input half left. If it did nothing (not `split`), it left everything."""
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
        """The gradients of the tensors of an instruction's output, each the sum over all layers that read it; None for
        a tensor where no reader has one. For the last layer of the model, None."""
        out = self.program.wiring.out[ins.layers[-1]]
        found = [self._read_gradient(self._gradient(e, ins), live) for e in out]
        if len(out) > 1:
            there = [[g for g in parts if g is not None] for parts in zip(*found, strict=True)]
            return [reduce(torch.add, parts) if parts else None for parts in there]
        return found[0] if found else None

    def _read_gradient(self, value: Value, live: dict[Value, Any]) -> Any:
        """A gradient without what says that it is missing. (Of one tensor on a device that is not asked: the
        device would have to be waited for.)"""
        found = live[value]
        if value not in self.came or not found or (len(found) == 1 and found[0] is not None and not found[0].is_cpu):
            return found
        return [None if g is not None and missing.is_missing(g) else g for g in found]

    def _taken(
        self, piece: tuple[int, ...], ins: Instruction, received: list[Tensor | None] | None
    ) -> list[Tensor | None] | None:
        """The gradients of a piece's output as its backward reads them: of some that are whole this rank's shard."""
        if received is None:
            return None
        form = self.program.forms[piece[-1]].grad_reads
        taken: list[Tensor | None] = repartition.own_shard(received, form, self.places, self.rows.number(ins))
        return repartition.without_counts(taken, form)

    def _with_counts(
        self, gradients: list[Tensor | None] | None, given: Any, piece: tuple[int, ...]
    ) -> list[Tensor | None] | None:
        """The gradients of a piece's input; those of unequal shards go with the counts that the piece was given."""
        if gradients is None:
            return None
        return repartition.with_counts(gradients, given, self.program.forms[piece[0]].reads)

    def _hand_back(
        self, ins: Instruction, given: Any, received: list[Tensor | None] | None, live: dict[Value, Any]
    ) -> None:
        """Write the gradients of an instruction's inputs, one value for each layer that an input comes from. A missing
        gradient has a number (`comm/missing.py`) if its value is copied, or sent by a transport that posts receives by
        their size."""
        first, layer = self.program.first_trainable, ins.layers[0]
        into = self.program.wiring.into[layer]
        reads = self.program.forms[layer].reads if self.program.forms else ""
        start = 0
        for k, (e, source) in enumerate(zip(into, self.program.wiring.inputs[layer], strict=True)):
            mine, places = received, repartition.in_gradient(given if len(into) == 1 else given[k], reads)
            if received is not None and len(into) > 1:
                mine, start = received[start : start + len(places)], start + len(places)
            if source >= first:
                value = self._gradient(e, ins, written=True)
                if mine is not None and value in self.moved:
                    mine = [missing.like(t) if g is None else g for t, g in zip(places, mine, strict=True)]
                live[value] = mine
                same = value.form == self.program.form_of(value, (source,), written=False)
                (self.weigh if same else self.weigh_form)(value, mine)

    def weigh(self, value: Value, content: Any) -> None:
        """Note the size of a value that this rank received, or of a gradient that it made."""
        key = (value.kind, self.program.source(value), self.rows.count(value))
        if key not in self.sizes:
            self.sizes[key] = count_bytes(content)

    def weigh_form(self, value: Value, content: Any) -> None:
        """Note the size of an output or a gradient in another form than that in which its own layer has it."""
        key = value.kind, value.index, self.rows.count(value), value.form
        if key not in self.form_sizes:
            self.form_sizes[key] = count_bytes(content)

    def data_bytes(self) -> int:
        """Bytes of input rows and targets that this rank keeps for its part of the batch."""
        return self.rows.nbytes(0 in self.layers, self.program.layers - 1 in self.layers)


def _reached(
    edges: Sequence[tuple[int, Any]], received: Sequence[Tensor | None] | None
) -> tuple[list[Any], list[Tensor | None]]:
    """Where a backward begins: the ends of a graph that a gradient has reached, and these gradients.

    edges      for each end, which tensor of the output it is, and its edge in the graph
    received   gradients of these tensors; None where there is none, as before a `detach`: plain torch runs no backward
               there either. If `received` is None, the end is the loss, whose gradient is 1
    """
    if received is None:
        return [edge for _, edge in edges], [None for _ in edges]
    reached = [(edge, received[k]) for k, edge in edges if received[k] is not None]
    return [edge for edge, _ in reached], [g for _, g in reached]
