"""How a rank calls a layer: the module itself, and around it only what this rank's program needs of this layer.

    seeded(by_row(remembering(shortened(weighed(with_loss(plain(module)))))))

Every function here wraps one call in another one and adds one idea. `Compute` chooses among them when a rank is built,
so that a layer runs without the wrappers that it does not need.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minipar.errors import RankError
from minipar.execution.mean_loss import MeanLoss, Target
from minipar.execution.measuring.weighing import weigh
from minipar.execution.remembered import Remembered
from minipar.execution.saved_tensors import SavedTensors
from minipar.execution.tails import Tails
from minipar.models import randomness
from minipar.models.mixture_gpt import LoadCount
from minipar.models.tensors import Unchanged, count_bytes, map_tensors, overwrites, tensors
from minipar.program import Instruction, LayerRun, Op, Value

Result = tuple[Any, Tensor | None]  # a layer's output; and of the last layer of a model, the loss
Sizes = dict[tuple[str, int, int], int]  # bytes of values as they were first met: (kind, layer, rows) -> bytes


class Call(NamedTuple):
    """What is called: the layers of one piece of the graph, on one micro-batch or a slice of it.

    step        of the run
    batch_rows  the rows of the micro-batch in the step's batch
    start       the first token of a slice
    rows        how many rows there are, as `BatchRows.count` says: equal numbers mean equal shapes
    target      for the piece with the last layer of the model; else None
    unread      whether only the graph of the piece is needed, and nobody reads the numbers of its output
    """

    piece: tuple[int, ...]
    ins: Instruction
    step: int
    batch_rows: range
    start: int
    rows: int
    target: Target | None
    unread: bool
    live: dict[Value, Any]


LayerCall = Callable[[Any, Call], Result]  # of the layer's input
Beside = Callable[[int, Call], list[Any]]  # what a layer takes and gives beside its input and output


def plain(module: nn.Module) -> LayerCall:
    """The module alone."""
    return lambda x, call: (module(x), None)


def with_loss(run: LayerCall, loss: MeanLoss) -> LayerCall:
    """Call the last layer of a model together with the loss of its output, in the same graph.

    There are two places for the loss, since each can do what the other cannot. Here what autograd keeps of the loss is
    weighed and copied away with what it keeps of the layer. But every call around this one holds the layer's input
    until it returns. Without a graph nobody needs that input any more: then `Compute` asks for the loss after these
    calls, so that the input and what the loss makes are never there together.
    """

    def call_with_loss(x: Any, call: Call) -> Result:
        output, _ = run(x, call)
        assert call.target is not None
        return output, loss(output, call.target) if torch.is_grad_enabled() else None

    return call_with_loss


def counting(run: LayerCall, layer: int, count: LoadCount) -> LayerCall:
    """Count which experts tokens go to: in the forward, and not again in a recomputation."""

    def call_counting(x: Any, call: Call) -> Result:
        if call.ins.op is not Op.FORWARD:
            return run(x, call)
        with count.at(layer, (call.step, call.ins.microbatch, call.start)):
            return run(x, call)

    return call_counting


def copying_parameters(run: LayerCall, module: nn.Module) -> LayerCall:
    """For a layer whose parameters are freed: copy an output that is a parameter, or a view of one."""

    def call_copying(x: Any, call: Call) -> Result:
        output, loss = run(x, call)
        own = {p.untyped_storage().data_ptr() for p in module.parameters()}
        return map_tensors(output, lambda t: t.clone() if t.untyped_storage().data_ptr() in own else t), loss

    return call_copying


def weighed(run: LayerCall, layer: int, module: nn.Module, sizes: Sizes, beside: Beside | None = None) -> LayerCall:
    """Note the bytes of the layer's output, and of the tensors that autograd saves, once for each number of rows.

    beside   what the layer takes and gives beside its input and output
    """

    def call_weighed(x: Any, call: Call) -> Result:
        rows = call.rows
        if ("saved", layer, rows) in sizes:
            return run(x, call)
        if not torch.is_grad_enabled():
            result = run(x, call)
            if ("output", layer, rows) not in sizes:
                sizes["output", layer, rows] = count_bytes(result[0])
            return result
        output, loss, weights = weigh(
            module, lambda given: run(given, call), x, lambda: (_targets(call), beside(layer, call) if beside else ())
        )
        sizes["output", layer, rows] = weights.output
        sizes["grad_output", layer, rows] = weights.grad_output
        sizes["saved", layer, rows] = weights.saved
        return output, loss

    return call_weighed


def keeping(
    run: LayerCall,
    otherwise: LayerCall,
    layer: int,
    module: nn.Module,
    sizes: Sizes,
    away: Container[LayerRun],
    kept: dict[LayerRun, SavedTensors],
    beside: Beside | None = None,
) -> LayerCall:
    """For micro-batches whose saved tensors are copied away and back: see `saved_tensors.py`.

    away        the layers and micro-batches for which that is so; all others are called as `otherwise`
    kept        gets what autograd keeps of them
    beside      gives what goes from slice to slice of a sequence, which stays
    """

    def call_keeping(x: Any, call: Call) -> Result:
        key = layer, call.ins.microbatch, call.ins.step
        if key not in away or not torch.is_grad_enabled():
            return otherwise(x, call)
        given = x, _targets(call), beside(layer, call) if beside else ()
        found = SavedTensors([*tensors(given), *module.parameters(), *module.buffers()])
        with found.saving():
            output, loss = run(x, call)
        found.settle(tensors((output, beside(layer, call) if beside else ())))
        kept[key] = found
        sizes["output", layer, call.rows] = count_bytes(output)
        sizes["grad_output", layer, call.rows] = count_bytes([t for t in tensors(output) if t.requires_grad])
        sizes["saved", layer, call.rows] = found.nbytes
        return output, loss

    return call_keeping


def shortened(run: LayerCall, layer: int, module: nn.Module, sizes: Sizes, tails: Tails) -> LayerCall:
    """At the end of a recomputation whose output nobody reads, leave out what its backward does not need."""

    def call_shortened(x: Any, call: Call) -> Result:
        if call.unread and layer == call.piece[-1] and ("saved", layer, call.rows) in sizes:
            return tails.run(layer, module, x), None
        return run(x, call)

    return call_shortened


def remembering(run: LayerCall, layer: int, remembered: Remembered, again: Container[LayerRun]) -> LayerCall:
    """A layer with buffers or generators of its own runs again as it ran the first time.

    again   layers and micro-batches that run forward more than once
    """

    def call_remembering(x: Any, call: Call) -> Result:
        ins = call.ins
        if (layer, ins.microbatch, ins.step) not in again:
            return run(x, call)
        as_then = remembered.first if ins.op is Op.FORWARD else remembered.again
        with as_then((ins.microbatch, ins.step)):
            return run(x, call)

    return call_remembering


def by_row(run: LayerCall, dropouts: Sequence[randomness.RowDropout]) -> LayerCall:
    """Tell the dropouts of a layer which rows of the whole batch it is given."""

    def call_by_row(x: Any, call: Call) -> Result:
        rows = call.batch_rows
        randomness.at(dropouts, call.step, rows.start, call.start, len(rows))
        return run(x, call)

    return call_by_row


def seeded(
    run: LayerCall, layer: int, seed: int, generators: Sequence[torch.Generator], dice: Sequence[Any] = ()
) -> LayerCall:
    """Seed torch's generators, so that a layer's draws depend on the seed, the step, the rows and the layer alone.

    dice   the global generators of Python and NumPy that the layer's code names, which are seeded as well
    """

    def call_seeded(x: Any, call: Call) -> Result:
        number = randomness.draw_seed(seed, call.step, call.batch_rows.start, layer, call.start)
        randomness.reseed(generators, number)
        if not dice:
            return run(x, call)
        with randomness.rolled(dice, number):
            return run(x, call)

    return call_seeded


def _targets(call: Call) -> Any:
    return () if call.target is None else call.target.y


class UntouchedInputs:
    """Runs pieces of the graph so that their inputs do not change, though layers may write into what they are given.

    The input may be needed again: it is rows of the data set, a message, or a leaf of the graph. The first run finds
    layers that write into it: then everything is restored, and the piece runs again on a copy, as it always does from
    then on. An error that has nothing to do with this is not tried again: it is the user's, and might not come a second
    time.

    layers   all that this rank holds
    sizes    what the layers' calls note; a run that is repeated on a copy must not change it
    """

    def __init__(self, layers: Mapping[int, nn.Module], sizes: Sizes) -> None:
        self.layers, self.sizes = layers, sizes
        self.overwriting = {layer for layer, module in layers.items() if overwrites(module)}
        self._tried: set[tuple[tuple[int, ...], bool]] = set()  # pieces, with or without a graph
        self._reached: dict[tuple[int, ...], bool] = {}
        self._copied: set[tuple[int, ...]] = set()  # of these, the ones that write into what they are given

    def __call__(self, run: LayerCall, given: Any, call: Call) -> tuple[Any, Result]:
        """What the piece makes, and the input at which its graph begins: `given`, or leaves of the same numbers.

        RankError for layers that write into their input after all, when they have not done so the first time.
        """
        piece, key = call.piece, (call.piece, torch.is_grad_enabled())
        seen = Unchanged(given, () if call.target is None else call.target.y)
        if key in self._tried:
            result = self._run(run, given, call)
            if not seen.versions_are():
                layers = f"layers {piece[0]} to {piece[-1]}" if len(piece) > 1 else f"layer {piece[0]}"
                raise RankError(
                    f"{layers} wrote into their input, which they had not done before; a layer that does so now and "
                    "then must say so by an attribute `inplace = True`, so that it is given a copy"
                )
            return given, result
        copies = [t.detach().clone() for t in seen.tensors]
        modules = [module for layer in piece for module in self.layers[layer].modules()]
        buffers = [(m, name, b, b.clone()) for m in modules for name, b in m._buffers.items() if b is not None]
        sizes = dict(self.sizes)
        # (What is written into becomes a result of the layers' graph: the second run begins at leaves of its own.)
        given_again, target = map_tensors((given, call.target), lambda t: t.detach().requires_grad_(t.requires_grad))
        try:
            result = self._run(run, given, call._replace(unread=False))
            if seen.versions_are() and seen.equals(copies):
                # (A layer that is weighed is given a copy, so its writes were not seen: then the piece is tried again.)
                if self.sizes.keys() == sizes.keys() or self.overwriting.isdisjoint(piece[1:]):
                    self._tried.add(key)
                return given, result
            del result
        except Exception as error:  # torch refuses a write into a leaf, or into a view of one
            wrote = not seen.versions_are() or re.search("in-?place", str(error)) is not None
            if piece in self._copied or not wrote:
                raise
        with torch.no_grad():
            for tensor, copied in zip(seen.tensors, copies, strict=True):
                if not torch.equal(tensor, copied):  # (one that is expanded cannot be written into)
                    tensor.data.copy_(copied)
            for module, name, buffer, copied in buffers:
                module._buffers[name] = buffer
                buffer.copy_(copied)
        self.sizes.clear()
        self.sizes.update(sizes)
        self._copied.add(piece)
        result = self._run(run, given_again, call._replace(target=target))
        self._tried.add(key)
        return given_again, result

    def _may_reach(self, piece: tuple[int, ...]) -> bool:
        """Whether a layer that writes into its input is the first one, or comes behind such as may hand theirs on at
        times. (Torch's own always do the same, so that the first run finds it.)"""
        if piece not in self._reached:
            known = {k for k in piece if all(type(m).__module__[:6] == "torch." for m in self.layers[k].modules())}
            ends = next((k for k in piece if k in self.overwriting | known), -1)
            self._reached[piece] = ends in self.overwriting
        return self._reached[piece]

    def _run(self, run: LayerCall, given: Any, call: Call) -> Result:
        copied = call.piece in self._copied
        if copied or self._may_reach(call.piece):
            target = map_tensors(call.target, torch.clone) if copied else call.target
            given, call = map_tensors(given, torch.clone), call._replace(unread=False, target=target)
        return run(given, call)
