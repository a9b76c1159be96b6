"""Gradient buckets: gradients are views of one flat buffer, so that a bucket is summed as one message, without copies.

    bucket {3, 2}    [ grad of 3.weight | 3.bias | 2.weight | 2.bias ]     p.grad is a view of its slice

    in pieces        [ 1st piece | 2nd piece | last ]                          messages of their own, in any order

The gradients of a step's first backward are copied in, so that the buffer need not be cleared. Later backwards add to
the views in place. Where there is none, the sum says whether any rank has one (missing.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import InitVar, dataclass, field

import torch
from torch import Tensor, nn

from minipar.comm import missing
from minipar.comm.communicator import Communicator
from minipar.comm.compression import Compressor
from minipar.comm.handles import Handle
from minipar.errors import RankError
from minipar.models.tensors import laid_out
from minipar.program import Instruction, Op, piece_of


@dataclass(eq=False)
class Buckets:
    """The gradient buffers of one rank, one for each ALL_REDUCE of its program (and dtype).

    groups[g] are the trainable parameters of group g on this rank.
    """

    instructions: InitVar[Sequence[Instruction]]
    groups: Sequence[Sequence[nn.Parameter]]
    sizes: Sequence[int]  # of the groups, in bytes as the program knows them
    comm: InitVar[Communicator]
    compress: InitVar[str] = "none"
    algorithm: str | None = None
    buffers: dict[tuple[int, ...], list[Tensor]] = field(default_factory=dict)
    views: dict[int, list[Tensor]] = field(default_factory=dict)
    filled: set[int] = field(default_factory=set)
    missing: dict[int, list[int]] = field(default_factory=dict)  # of each group, the parameters without a gradient here
    under_way: dict[tuple[int, ...], list[Handle]] = field(default_factory=dict)  # pieces that are being summed

    def __post_init__(self, instructions: Sequence[Instruction], comm: Communicator, compress: str) -> None:
        for ins in instructions:
            summed = ins.op is Op.ALL_REDUCE and ins.reads[0].kind == "grad"  # (and no average of parameters)
            flat = summed and any(part.layer < 0 for part in ins.parts)
            if flat and ins.layers not in self.buffers:
                self.buffers[ins.layers] = self._allocate(ins.layers, comm.device)
        self.compressor = None if compress == "none" else Compressor(comm, compress, self.algorithm)
        if self.compressor is not None:
            for each in (ins for ins in instructions if ins.op is Op.ALL_REDUCE):
                for key, whole, _ in self._messages(each):
                    self.compressor.prepare(key, whole)

    def _allocate(self, layers: tuple[int, ...], device: torch.device) -> list[Tensor]:
        sizes: dict[torch.dtype, int] = {}
        for g in layers:
            for p in self.groups[g]:
                sizes[p.dtype] = sizes.get(p.dtype, 0) + p.numel()
        buffers = {dtype: torch.zeros(size, dtype=dtype, device=device) for dtype, size in sizes.items()}
        used = dict.fromkeys(sizes, 0)
        for g in layers:
            self.views[g] = []
            for p in self.groups[g]:
                start = used[p.dtype]
                used[p.dtype] = start + p.numel()
                self.views[g].append(buffers[p.dtype][start : used[p.dtype]].view(p.shape))
        return list(buffers.values())

    def fill(self, group: int) -> None:
        """After a backward of a group: its first gradients of the step move into the buffer."""
        if group in self.filled or group not in self.views:
            return
        self.filled.add(group)
        grads, places = [], []
        self._note_missing(group)
        for p, view in zip(self.groups[group], self.views[group], strict=True):
            if p.grad is None:
                missing.fill(view)
            else:
                grads.append(p.grad)
                places.append(view)
            p.grad = view
        if grads:
            torch._foreach_copy_(places, grads)

    def _note_missing(self, group: int) -> None:
        self.missing[group] = [k for k, p in enumerate(self.groups[group]) if p.grad is None]

    def all_reduce(self, ins: Instruction, comm: Communicator) -> list[Handle]:
        """Start summing the gradients of an ALL_REDUCE over its group of ranks."""
        for g in ins.layers:
            self.fill(g)  # a rank whose micro-batches had no rows has none
        compressor = self.compressor
        if piece := piece_of(ins):
            parts = self._cut(ins, piece)
            handles = [comm.iallreduce(part, ins.group, str(ins), self.algorithm) for part in parts]
            if not ins.writes:
                self.under_way.setdefault(ins.layers, []).extend(handles)
                return handles
            return self.under_way.pop(ins.layers, []) + handles  # waiting for the last piece waits for all
        if compressor is not None:
            for g in ins.layers if ins.layers not in self.buffers else ():
                self._note_missing(g)
                for p in self.groups[g]:
                    p.grad = missing.like(p) if p.grad is None else laid_out(p.grad)
            return [
                handle
                for key, flat, shapes in self._messages(ins)
                for handle in compressor.all_reduce(key, flat, shapes, ins.group, str(ins))
            ]
        if ins.layers in self.buffers:
            buffers = self.buffers[ins.layers]
            return [comm.iallreduce(buffer, ins.group, str(ins), self.algorithm) for buffer in buffers]
        handles = []
        for g in ins.layers:
            self._note_missing(g)
            for p in self.groups[g]:
                if p.grad is None:
                    p.grad = missing.like(p)
                else:
                    p.grad = laid_out(p.grad)
                handles.append(comm.iallreduce(p.grad, ins.group, str(ins), self.algorithm))
        return handles

    def _messages(self, ins: Instruction) -> Iterator[tuple[tuple[int, ...], Tensor, list[torch.Size]]]:
        """The messages of an ALL_REDUCE: a name, a flat tensor of gradients end to end, and their shapes."""
        if ins.layers in self.buffers:
            if len(self.buffers[ins.layers]) != 1:
                raise RankError(f"{ins}: gradients of several dtypes are not compressed together; bucket=none can")
            yield ins.layers, self.buffers[ins.layers][0], [p.shape for g in ins.layers for p in self.groups[g]]
            return
        for g in ins.layers:
            for k, p in enumerate(self.groups[g]):
                yield (g, k), (p if p.grad is None else p.grad), [p.shape]

    def _cut(self, ins: Instruction, piece: tuple[int, int]) -> list[Tensor]:
        """The parts of a bucket's buffers that make up a piece, which is in bytes as the program counts them."""
        buffers, size = self.buffers[ins.layers], sum(self.sizes[g] for g in ins.layers)
        count = sum(buffer.numel() for buffer in buffers)
        begin, end = (round(at * count / size) for at in piece)
        parts, start = [], 0
        for buffer in buffers:
            part = buffer[max(0, begin - start) : max(0, end - start)]
            parts += [part] if part.numel() else []
            start += buffer.numel()
        return parts
