"""Compressed sums of gradients, as a rank computes them; `strategies/passes/compress.py` explains them.

A message is a flat tensor of gradients, and the gradients are views of it. After waiting for its handles it holds the
sum over all ranks, or the part of the sum that compression keeps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minipar.comm.communicator import Communicator
from minipar.comm.handles import Handle
from minipar.errors import RankError
from minipar.models.tensors import dtype_name
from minipar.strategies.passes.compress import keeps_residual, low_rank, row_bytes, top

NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def narrowed(numbers: Tensor, choice: str) -> Tensor:
    """A message as 16-bit numbers. RankError for complex numbers, of which it would lose one half."""
    if numbers.is_complex():
        kind = dtype_name(numbers.dtype)
        raise RankError(f"compress={choice}: a gradient is {kind}, whose numbers are two; possible is compress=none")
    return numbers.to(NARROW[choice])


class Compressor:
    """One rank's compressed sums, and what they have left out so far, by the name of the message.

    algorithm   sums what is sent; None: the backend's own, or shared memory
    """

    def __init__(self, comm: Communicator, choice: str, algorithm: str | None = None) -> None:
        self.comm, self.choice, self.algorithm = comm, choice, algorithm
        self.kind, _, self.number = choice.partition(":")
        self.residuals: dict[tuple[int, ...], Tensor] = {}
        self.factors: dict[tuple[int, ...], Tensor] = {}  # Q of the last step, from which the next one starts

    def prepare(self, key: tuple[int, ...], like: Tensor) -> None:
        """Make room for the part that a message leaves out."""
        if keeps_residual(self.choice):
            wide = torch.float32 if like.dtype is torch.bfloat16 else like.dtype
            self.residuals[key] = torch.zeros(like.numel(), dtype=wide, device=like.device)

    def all_reduce(
        self, key: tuple[int, ...], flat: Tensor, shapes: Sequence[torch.Size], ranks: tuple[int, ...], name: str
    ) -> list[Handle]:
        """Start a sum. `shapes`: of the gradients that lie in `flat` one after another."""
        if not flat.numel():
            return []
        if self.kind in NARROW:
            low = narrowed(flat, self.kind)

            def widen() -> None:
                flat.copy_(low)

            return [self.comm.iallreduce(low, ranks, name, self.algorithm).then(widen)]
        residual = self.residuals[key]
        if self.kind == "topk":
            return self._largest(flat.view(-1), residual, ranks)
        return [self._factors(key, flat.view(-1), residual, shapes, ranks, name)]

    def _largest(self, flat: Tensor, residual: Tensor, ranks: tuple[int, ...]) -> list[Handle]:
        if flat.numel() >= 1 << 31:
            raise RankError(f"compress={self.choice}: a message of {flat.numel()} numbers; possible are up to 2^31 - 1")
        count, size = top(flat.numel(), self.choice), flat.element_size()
        residual += flat
        places = residual.abs().topk(count, sorted=False).indices
        row = torch.zeros(row_bytes(count, size), dtype=torch.uint8, device=flat.device)
        # The larger of both come first, so that each begins at a multiple of its size.
        at, where_at = (0, count * size) if size >= 4 else (count * 4, 0)
        row[at:][: count * size] = residual[places].to(flat.dtype).view(torch.uint8)
        row[where_at:][: count * 4] = places.to(torch.int32).view(torch.uint8)
        if residual.dtype == flat.dtype:
            residual[places] = 0
        else:  # (what rounding has left out is not sent either)
            residual[places] -= row[at:][: count * size].view(flat.dtype)
        rows = torch.empty(len(ranks) * len(row), dtype=torch.uint8, device=flat.device)

        def add() -> None:
            flat.zero_()
            for each in rows.view(len(ranks), -1):  # in the order of ranks: the same bits on all
                each = each.clone() if size > 8 else each  # (rows begin at multiples of 8 bytes)
                where, numbers = each[where_at:][: count * 4].view(torch.int32), each[at:][: count * size]
                flat.index_add_(0, where.long(), numbers.view(flat.dtype))  # (one at a time: they need room)

        handles = self.comm.iall_gather(row, rows, ranks)
        return [*handles[:-1], (handles[-1] if handles else Handle(None, None, set())).then(add)]

    def _factors(
        self,
        key: tuple[int, ...],
        flat: Tensor,
        residual: Tensor,
        shapes: Sequence[torch.Size],
        ranks: tuple[int, ...],
        name: str,
    ) -> Handle:
        residual += flat
        matrices: list[tuple[Tensor, Tensor]] = []  # matrices to send, each with the place of its sum
        plain: list[tuple[Tensor, Tensor]] = []
        widths: list[int] = []
        sizes = [shape.numel() for shape in shapes]
        for shape, source, target in zip(shapes, residual.split(sizes), flat.split(sizes), strict=True):
            found = low_rank(tuple(shape), int(self.number))
            if found is None:
                plain.append((source, target))
            else:
                matrices.append((source.view(found[0], found[1]), target.view(found[0], found[1])))
                widths.append(found[2])
        known = self.factors.get(key)
        if known is None:
            generator = torch.Generator().manual_seed(0)  # the same on all ranks
            count = sum(source.shape[1] * width for (source, _), width in zip(matrices, widths, strict=True))
            known = torch.randn(count, generator=generator, dtype=residual.dtype).to(flat.device)
        right = _cut(known, [source.shape[1] for source, _ in matrices], widths)
        left = [source @ q for (source, _), q in zip(matrices, right, strict=True)]
        first = torch.cat([*(p.reshape(-1) for p in left), *(source for source, _ in plain)])

        def second() -> None:
            left = _cut(first, [source.shape[0] for source, _ in matrices], widths)
            bases = [torch.linalg.qr(p).Q for p in left]
            start = sum(p.numel() for p in left)
            for source, target in plain:
                target.copy_(first[start : start + target.numel()])
                source.zero_()
                start += target.numel()
            if not matrices:
                return
            again = torch.cat([(s.T @ p).reshape(-1) for (s, _), p in zip(matrices, bases, strict=True)])
            self.comm.iallreduce(again, ranks, f"{name}, second", self.algorithm).wait()
            self.factors[key] = again
            right = _cut(again, [source.shape[1] for source, _ in matrices], widths)
            for (source, target), p, q in zip(matrices, bases, right, strict=True):
                if source.dtype == target.dtype:
                    torch.mm(p, q.T, out=target)
                else:
                    target.copy_(p @ q.T)
                source.sub_(target, alpha=1 / len(ranks))

        return self.comm.iallreduce(first, ranks, name, self.algorithm).then(second)


def _cut(flat: Tensor, rows: Sequence[int], widths: Sequence[int]) -> list[Tensor]:
    """Matrices of so many rows and columns, which lie one after another."""
    start, found = 0, []
    for n, width in zip(rows, widths, strict=True):
        found.append(flat[start : start + n * width].view(n, width))
        start += n * width
    return found
