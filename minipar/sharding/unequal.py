"""Unequal shards: a packed tensor of which ranks have as many rows as a tensor of counts says.

    counts (B, X)      how many entries row b has for expert x; n ranks have equal parts of its rows, or of its columns
    packed (N, ...)    all these entries, by column, then by row; N is the sum of the counts

    U0   rank k has the entries of the k-th part of the rows of the counts, by column, then by row
    U1   rank k has those of the k-th part of the columns

From U0 to U1 each rank sends to each other one the entries of its rows and of the other's columns. A rank that gets
entries of some columns from all ranks sorts them by column: those of one column then lie in the order of the ranks,
which is that of the rows. So what an expert reads does not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Table = list[list[list[int]]]  # [j][k]: of each column of rank k's part, the entries of the rows of rank j's part


def table_of(counts: Tensor, ranks: int) -> Table:
    """How many entries the rows of each rank have for the columns of each rank, from the counts (B, X) of all."""
    rows, columns = counts.shape
    found: Table = counts.view(ranks, rows // ranks, ranks, columns // ranks).sum(1).tolist()
    return found


def sizes(table: Table, of: int) -> list[list[int]]:
    """How many entries each rank sends to each other one, on the way from U`of` to the other form."""
    moved = [[sum(own) for own in row] for row in table]
    return moved if of == 0 else [list(column) for column in zip(*moved, strict=True)]


def parts(packed: Tensor, table: Table, of: int, index: int) -> list[Tensor]:
    """What rank `index`, which has its shard U`of`, has for each rank, so that all have the other form."""
    if of == 0:
        return list(packed.split([sum(own) for own in table[index]]))
    return _by_rank(packed, [row[index] for row in table])


def joined(came: Sequence[Tensor], table: Table, of: int, index: int) -> Tensor:
    """The shard U`of` of rank `index`, from what it got of each rank."""
    return torch.cat(list(came)) if of == 0 else _by_column(came, [row[index] for row in table])


def cut(packed: Tensor, table: Table, of: int) -> list[Tensor]:
    """The shards U`of` of all ranks, from the whole packed tensor."""
    if of == 0:
        return _by_rank(packed, _all_columns(table))
    return list(packed.split([sum(map(sum, column)) for column in zip(*table, strict=True)]))


def whole(shards: Sequence[Tensor], table: Table, of: int) -> Tensor:
    """The whole packed tensor, from the shards U`of` of all ranks."""
    return _by_column(shards, _all_columns(table)) if of == 0 else torch.cat(list(shards))


def _all_columns(table: Table) -> list[list[int]]:
    return [[size for own in row for size in own] for row in table]


def _by_rank(packed: Tensor, each: list[list[int]]) -> list[Tensor]:
    """Entries that lie by column, and in a column by rank, as those of each rank by column.

    each   of each rank, how many entries it has in each column
    """
    pieces = iter(packed.split([size for column in zip(*each, strict=True) for size in column]))
    by_column = [[next(pieces) for _ in each] for _ in each[0]]
    return [torch.cat(own) for own in zip(*by_column, strict=True)]


def _by_column(shards: Sequence[Tensor], each: list[list[int]]) -> Tensor:
    """Entries of each rank, which lie by column, as all of them by column, and in a column by rank."""
    by_rank = [shard.split(own) for shard, own in zip(shards, each, strict=True)]
    return torch.cat([piece for column in zip(*by_rank, strict=True) for piece in column])
