"""Layers may write into their input; the input of a piece of the graph does not change nevertheless.

The input may be needed again: it is rows of the data set, a message, or a leaf of the graph. The first run finds layers
that write into it: then everything is restored, and the piece runs again on a copy, as it always does from then on.
An error that has nothing to do with this is not tried again: it is the user's, and might not come a second time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from minipar.errors import RankError
from minipar.execution.layer_calls import Call, LayerCall, Made, Sizes
from minipar.models.tensors import Unchanged, map_tensors, overwrites


class UntouchedInputs:
    """Runs pieces of the graph so that their inputs do not change.

    layers   all that this rank holds
    sizes    what the layers' calls note; a run that is repeated on a copy must not change it
    """

    def __init__(self, layers: Mapping[int, nn.Module], sizes: Sizes) -> None:
        self.layers, self.sizes = layers, sizes
        self.overwriting = {layer for layer, module in layers.items() if overwrites(module)}
        self._tried: set[tuple[tuple[int, ...], bool]] = set()  # pieces, with or without a graph
        self._copied: set[tuple[int, ...]] = set()  # of these, the ones that write into what they are given

    def __call__(self, run: LayerCall, given: Any, call: Call) -> tuple[Any, Made]:
        """What the piece makes, and the input at which its graph begins: `given`, or leaves of the same numbers.

        RankError for layers that write into their input after all, when they have not done so the first time.
        """
        piece, key = call.piece, (call.piece, torch.is_grad_enabled())
        seen = Unchanged(given, () if call.target is None else call.target.y)
        if key in self._tried:
            made = self._run(run, given, call)
            if not seen.versions_are():
                layers = f"layers {piece[0]} to {piece[-1]}" if len(piece) > 1 else f"layer {piece[0]}"
                raise RankError(
                    f"{layers} wrote into their input, which they had not done before; a layer that does so now and "
                    "then must say so by an attribute `inplace = True`, so that it is given a copy"
                )
            return given, made
        copies = [t.detach().clone() for t in seen.tensors]
        modules = [module for layer in piece for module in self.layers[layer].modules()]
        buffers = [(m, name, b, b.clone()) for m in modules for name, b in m._buffers.items() if b is not None]
        sizes = dict(self.sizes)
        # (What is written into becomes a result of the layers' graph: the second run begins at leaves of its own.)
        given_again, target = map_tensors((given, call.target), lambda t: t.detach().requires_grad_(t.requires_grad))
        try:
            made = self._run(run, given, call._replace(unread=False))
            if seen.versions_are() and seen.equals(copies):
                # (A layer that is weighed is given a copy, so its writes were not seen: then the piece is tried again.)
                if self.sizes.keys() == sizes.keys() or self.overwriting.isdisjoint(piece[1:]):
                    self._tried.add(key)
                return given, made
            del made
        except Exception as error:  # torch refuses a write into a leaf, or into a view of one
            wrote = not seen.versions_are() or re.search("in-?place", str(error)) is not None
            if piece in self._copied or not wrote:
                raise
        with torch.no_grad():
            for tensor, copied in zip(seen.tensors, copies, strict=True):
                tensor.data.copy_(copied)
            for module, name, buffer, copied in buffers:
                module._buffers[name] = buffer
                buffer.copy_(copied)
        self.sizes.clear()
        self.sizes.update(sizes)
        self._copied.add(piece)
        made = self._run(run, given_again, call._replace(target=target))
        self._tried.add(key)
        return given_again, made

    def _run(self, run: LayerCall, given: Any, call: Call) -> Made:
        copied = call.piece in self._copied
        if copied or call.piece[0] in self.overwriting:
            given, call = map_tensors(given, torch.clone), call._replace(unread=False)
        if copied:
            call = call._replace(target=map_tensors(call.target, torch.clone))
        return run(given, call)
