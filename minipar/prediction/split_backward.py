"""Predicted memory of backwards in halves: the tapes of each half, played along a walk (see `prediction/memory.py`).

I 2:4      When a piece of the graph is done, what autograd saved for this half is freed. Three things stay: gradients
           that have reached operations with parameters, what these operations saved, and the piece's input. It stays
           because operations hold the operations before them, up to the leaves of the graph.
W 2:4      All of this is freed, and gradients of the parameters appear.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minipar.prediction.recorded import frees
from minipar.program import Instruction, LayerRun, grad, grad_output

if TYPE_CHECKING:
    from minipar.prediction.memory import Storage, Walk


def input_half(walk: Walk, ins: Instruction) -> None:
    """Play the tapes of a BACKWARD_INPUT."""
    i, step = ins.microbatch, ins.step
    above = walk.sum_of_gradients(ins)
    held = above is not None  # whether the walk holds it: it is such a sum, or a gradient between two pieces
    if above is None and (out := walk.program.wiring.out[ins.layers[-1]]):
        read = walk.named(grad_output(out[0], i, step), ins.reads)
        above = walk.live.get(read)  # the instruction's frees free it
    for piece in reversed(walk.pieces[ins.layers, i]):
        given, received, inner = above, above, False
        freed: list[tuple[int, int]] = []
        for layer in reversed(piece):
            built = _play(walk, (layer, i, step), received, freed)
            if inner and built is not received:
                walk.release(received, "walk")
            received, inner = built, True
        for delta, layer in freed:
            walk.change(delta, "activations", layer)
        holds = piece[0] > walk.program.first_trainable and any(walk.groups(layer)[0] for layer in piece)
        for layer in piece:
            _let_go(walk, (layer, i, step), inputs=layer > piece[0] or not holds)
        if held and received is not given:
            walk.release(given, "walk")
        above, held = received, True
    walk.arriving = []
    walk.hand_back(ins, [above] if above is not None else [])


def _play(walk: Walk, key: LayerRun, received: Storage | None, freed: list[tuple[int, int]]) -> Storage | None:
    """Play the input half of one layer. Returns the gradient of its input. `freed` gets what is freed when the piece is
    done."""
    layer, i, _ = key
    built, stays = 0, True
    for delta, what in walk.tape(layer, i).input_half:
        if what == "saved":
            walk.saved[key] = walk.saved.get(key, 0) + delta
            freed.append((delta, layer))
        elif what == "left":
            walk.saved[key] = walk.saved.get(key, 0) + delta
            walk.change(delta, "activations", layer)
        elif what == "grad_output":
            stays = stays and delta > 0
        elif what == "grad_input":
            built += delta
            walk.change(delta, "activations", layer - 1)
        elif what == "temporary":
            walk.change(delta, "temporary", layer)
    if received is not None and stays and walk.groups(layer)[0]:
        walk.hold(received, f"left of {key}")
        walk.left[key] = received
    if built:
        return walk.storage(built, layer - 1)
    if received is not None and layer > walk.program.first_trainable:
        walk.hold(received, "walk")
        return received  # the layer returns the gradient that it received
    return None


def _let_go(walk: Walk, key: LayerRun, *, inputs: bool) -> None:
    """Release the layer's output, and with `inputs` its inputs, if the weight half does not need them."""
    later = walk.tape(key[0], key[1]).weight_half
    if inputs and not frees(later, "input"):
        walk.let_go_of_inputs(key)
    if not frees(later, "output"):
        walk.let_go_of_output(key)


def weight_half(walk: Walk, ins: Instruction) -> None:
    """Play the tapes of a BACKWARD_WEIGHT."""
    copied: list[int] = []
    for layer in reversed(ins.layers):
        key = layer, ins.microbatch, ins.step
        groups, fresh = walk.groups(layer)
        tape = walk.tape(layer, ins.microbatch)
        left = walk.saved.pop(key, 0)
        for delta, what in tape.weight_half if fresh else tape.weight_later:
            if what in ("saved", "left"):
                left += delta
                walk.change(delta, "activations", layer)
            elif what == "input":
                walk.let_go_of_inputs(key)
            elif what == "output":
                walk.let_go_of_output(key)
            elif what == "grad_output" and delta < 0:
                walk.release(walk.left.pop(key, None), f"left of {key}")
            elif what == "gradient":
                walk.change(delta, walk.kind_of_gradient(groups), layer)
            elif what == "temporary":
                walk.change(delta, "temporary", layer)
        walk.change(-left, "activations", layer)
        walk.let_go_of_inputs(key)
        walk.let_go_of_output(key)
        walk.release(walk.left.pop(key, None), f"left of {key}")
        copied += walk.fill(layer, groups, fresh)
    for g in copied:  # they have been copied into their buckets
        walk.change(-walk.sizes.size(walk.rank, grad(g)), "temporary", walk.layer_of(g))
