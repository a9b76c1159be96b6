"""torch's data sets for `train`: a Dataset is read row by row, and a DataLoader or any iterable batch by batch.

Rows        For a Dataset, the rows of a step are a function of (seed, step), so each rank reads its own rows.
Batches     An iterable knows no step numbers, and one that shuffles gives other batches each time that it is read. So
            the driver reads it once before the run, and writes the batches into files of a temporary folder. Ranks and
            the reference read their rows of each batch from there.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from minipar.data.order import Order
from minipar.errors import PlanError
from minipar.wording import several

if TYPE_CHECKING:
    from torch import Tensor

Pair = Callable[[Any], tuple[Any, Any]]


def pair(batch: Any) -> tuple[Any, Any]:
    """x and y of a batch. The batch is a pair (x, y), or a dict with "labels", where y is the labels and x is the rest.

    Errors: PlanError for any other batch. For such a batch give `Rows(..., pair=...)` or `Batches(..., pair=...)`.
    """
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    if isinstance(batch, Mapping) and "labels" in batch and len(batch) > 1:
        return {key: part for key, part in batch.items() if key != "labels"}, batch["labels"]
    kind = f"a dict of {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
    if isinstance(batch, (tuple, list)):
        kind += f" of {len(batch)}"
    raise PlanError(
        f"data: a batch is {kind}, which does not say what is x and what is y; give pairs (x, y) or dicts with "
        "'labels', or say it: data.Batches(loader, pair=lambda batch: (batch['image'], batch['class']))"
    )


@dataclass(frozen=True)
class Rows:
    """The rows of a torch Dataset (with a length and numbered rows), epoch by epoch: `train(data=Rows(dataset))`.

    dataset   `dataset[k]` is row k: a pair (x, y), or a dict with "labels"
    seed      seed of the orders: the order of an epoch is a function of (seed, epoch)
    shuffle   False: every epoch has the order of the data
    last      "smaller": rows that do not fill a batch are a smaller batch; "dropped": they are left out of this epoch
    collate   makes a batch from a list of rows. The default is torch's function, which stacks rows; then each rank
              reads only its own rows. With another function (such as one that pads to the longest row) each rank reads
              the whole batch
    pair      gives (x, y) of a collated batch; default: `pair`

    Rows that draw random numbers (augmentation) must draw them as a function of k. Otherwise the reference gets other
    numbers; and with your own `collate`, so does each rank.
    """

    dataset: Any
    seed: int = 0
    shuffle: bool = True
    last: str = "smaller"
    collate: Callable[[list[Any]], Any] | None = None
    pair: Pair = pair

    def __post_init__(self) -> None:
        Order(1, self.seed, self.last, self.shuffle)
        for name in ("__len__", "__getitem__"):
            if not hasattr(self.dataset, name):
                raise PlanError(
                    f"data={type(self.dataset).__name__}: has no {name}; rows are taken from data sets with a length "
                    "and numbered rows, others are read with data.Batches"
                )

    @cached_property
    def order(self) -> Order:
        """The order of the rows."""
        return Order(len(self.dataset), self.seed, self.last, self.shuffle)

    def steps(self, size: int) -> int:
        """The number of steps in an epoch. Errors: `PlanError` for a batch with more rows than an epoch."""
        return self.order.steps(size)

    def length(self, step: int, size: int) -> int:
        """The number of rows in the batch of one step: `size`, or fewer at the end of an epoch."""
        return self.order.place(step, size)[2]

    def batch(self, step: int, size: int, rows: range | None = None) -> tuple[Any, Any]:
        """The batch of one step, or only its `rows`."""
        from torch.utils.data import default_collate

        from minipar.models.tensors import take_rows

        if self.collate is None:
            return self.pair(default_collate([self.dataset[k] for k in self.order.rows(step, size, rows).tolist()]))
        whole = self.pair(self.collate([self.dataset[k] for k in self.order.rows(step, size).tolist()]))
        return whole if rows is None else (take_rows(whole[0], rows), take_rows(whole[1], rows))


@dataclass(frozen=True)
class Batches:
    """The batches of a torch DataLoader, or of any iterable: `train(data=Batches(loader))`.

    Before the run the driver reads one batch for each step. An iterable that can be read again (a DataLoader, a list)
    begins again when it ends; a generator must have a batch for every step. The first batch sets `batch=` of `train`;
    the others may have more or fewer rows. torch's generator is seeded with (seed of `train`, first step), so the same
    call gives the same batches, and a resumed run gives other ones.

    pair   gives (x, y) of a batch; default: `pair`
    """

    batches: Iterable[Any]
    pair: Pair = pair


@dataclass(frozen=True)
class _Files:
    """Batches in a folder, with one file for each step."""

    folder: str
    first: int

    def batch(self, step: int, size: int) -> tuple[Any, Any]:
        import torch

        # (the profile reads step 0, even if the run begins with a later step)
        found = torch.load(self._path(max(step, self.first)), mmap=True, weights_only=False)
        return found[0], found[1]

    def _path(self, step: int) -> str:
        return os.path.join(self.folder, f"{step}.pt")


def indexed(data: Any, seed: int) -> Any:
    """A torch Dataset as `Rows`; any other data unchanged."""
    if isinstance(data, tuple) or hasattr(data, "batch"):
        return data
    from torch.utils.data import Dataset, IterableDataset

    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        return Rows(data, seed)
    return data


@contextmanager
def read_ahead(data: Any, steps: int, first: int, seed: int, size: int) -> Iterator[tuple[Any, int]]:
    """Gives (data whose batches can be read by step number, rows of a step), for `steps` steps from step `first` on.

    Errors: PlanError if an iterable has no batch for some step, or a batch that is not x and y.
    """
    data = indexed(data, seed)
    if isinstance(data, tuple) or not isinstance(data, (Batches, Iterable)) or hasattr(data, "batch"):
        yield data, size
        return
    import torch

    from minipar.data.batches import check_batch

    given = data if isinstance(data, Batches) else Batches(data)
    with tempfile.TemporaryDirectory(prefix="minipar-batches-") as folder:
        files = _Files(folder, first)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(hash((seed, first)))
            for step, batch in zip(range(first, first + steps), _again(given.batches, steps), strict=False):
                found = given.pair(batch)
                rows = check_batch(found, f"data: batch {step}")
                if step == first:
                    size = rows
                torch.save(_compact(found), files._path(step))
        yield files, size


def _again(batches: Iterable[Any], steps: int) -> Iterator[Any]:
    """So many batches. It begins the iterable again when it ends. Errors: PlanError if that is impossible."""
    found = 0
    while found < steps:
        before, running = found, iter(batches)
        for batch in running:
            yield batch
            found += 1
            if found == steps:
                return
        if running is batches or found == before:
            again = "it cannot be read again" if running is batches and found else "it gave none"
            raise PlanError(
                f"data: {type(batches).__name__} ended after {several(found, 'batch')}, but there are "
                f"{several(steps, 'step')}: step {found} has none, and {again}; choose fewer steps, or give an "
                "iterable that begins again, such as a DataLoader"
            )


def _compact(value: Any) -> Any:
    """The value with copies of tensors that are views: otherwise their whole storages would be saved."""
    from minipar.models.tensors import map_tensors

    def own(tensor: Tensor) -> Tensor:
        return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor

    return map_tensors(value, own)
