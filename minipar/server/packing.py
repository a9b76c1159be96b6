"""Gradients that are pushed in fewer bytes: what a worker sends of a piece, and what the server makes of it.

    compress=bf16, fp16     [ 16-bit numbers ]
    compress=topk:0.01      [ the largest 1 % of the piece ][ where they are ]     the rest: in the next gradient

A server adds what it has unpacked, so all its modes work as with whole gradients. What topk has left out stays with the
worker.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minipar.comm.compression import NARROW, narrowed
from minipar.strategies.passes.compress import keeps_residual, pushed_bytes, top


class Packer:
    """A worker's end. `left` has what was left out of each piece until now, by key and server."""

    def __init__(self, choice: str) -> None:
        self.choice = choice
        self.left: dict[tuple[int, int], Tensor] = {}

    def pack(self, key: tuple[int, int], piece: Tensor) -> Tensor:
        """What is sent of a flat piece of a gradient."""
        if self.choice == "none":
            return piece
        if not keeps_residual(self.choice):
            return narrowed(piece, self.choice)
        whole = piece + self.left[key] if key in self.left else piece.clone()
        count, size = top(len(whole), self.choice), whole.element_size()
        places = whole.abs().topk(count, sorted=False).indices
        row = torch.zeros(pushed_bytes(len(whole), size, self.choice), dtype=torch.uint8)
        row[: count * size] = whole[places].view(torch.uint8)
        row[count * size :][: count * 4] = places.to(torch.int32).view(torch.uint8)
        whole[places] = 0
        self.left[key] = whole
        return row


def unpack(row: Tensor, into: Tensor, choice: str) -> None:
    """A server's end: the piece of a gradient that a worker has packed."""
    if not keeps_residual(choice):
        into.copy_(row.view(NARROW[choice]))
        return
    count, size = top(len(into), choice), into.element_size()
    places = row[count * size :][: count * 4].clone().view(torch.int32)  # (a copy begins where a type wants it)
    into.zero_()
    into[places.long()] = row[: count * size].view(into.dtype)
