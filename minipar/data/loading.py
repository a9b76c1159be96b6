"""torch's data sets for `train`: a Dataset is read row by row, and a DataLoader or any iterable batch by batch.

Rows        For a Dataset, the rows of a step are a function of (seed, step), so each rank reads its own rows.
Batches     An iterable knows no step numbers, and one that shuffles gives other batches each time that it is read. So
            the driver reads it once before the run, and writes the batches into files of a temporary folder. Ranks and
            the reference read their rows of each batch from there.
"""

from __future__ import annotations

import inspect
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NoReturn

from minipar.data.order import Order
from minipar.errors import PlanError
from minipar.wording import several

if TYPE_CHECKING:
    from torch import Tensor

Pair = Callable[[Any], tuple[Any, Any]]


@dataclass(frozen=True)
class Pairing:
    """What of a batch is x, which the model is given, and what is y, which the loss is given.

    own     the model makes its loss itself: x is the whole batch, and y as well
    takes   the names of what the model's forward takes; None: not known
    """

    own: bool = False
    takes: frozenset[str] | None = None

    def __call__(self, batch: Any) -> tuple[Any, Any]:
        """(x, y). Of a pair the second is y, and so is the last of several. Of a dict y is "labels", or else what
        forward takes nothing of by name.

        Errors: PlanError for any other batch. For such a batch give `Rows(..., pair=...)` or `Batches(..., pair=...)`.
        """
        batch = dict(batch) if isinstance(batch, Mapping) else batch
        if self.own:
            return batch, batch
        if isinstance(batch, (tuple, list)) and len(batch) > 1:
            return batch[0] if len(batch) == 2 else tuple(batch[:-1]), batch[-1]
        if isinstance(batch, dict):
            x = {key for key in batch if key in self.takes} if self.takes else set()
            x = {*batch} - {"labels"} if "labels" in batch else x
            y = [batch[key] for key in batch if key not in x]
            if x and y:
                wanted = y[0] if len(y) == 1 else {key: batch[key] for key in batch if key not in x}
                return {key: batch[key] for key in batch if key in x}, wanted
        return _unpaired(batch)


def takes_of(model: Any) -> frozenset[str] | None:
    """The names of what the forward of a model takes, where they are known: of a module, or of a class of them."""
    while isinstance(model, partial):
        model = model.func
    kind = model if isinstance(model, type) else type(model)
    forward = getattr(kind, "forward", None)
    taken = [] if forward is None else list(inspect.signature(forward).parameters.values())[1:]
    several = {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
    return frozenset(p.name for p in taken) if taken and not several & {p.kind for p in taken} else None


pair = Pairing()


def _unpaired(batch: Any) -> NoReturn:
    kind = f"a dict of {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
    if isinstance(batch, (tuple, list)):
        kind += f" of {len(batch)}"
    raise PlanError(
        f"data: a batch is {kind}, which does not say what is x and what is y; give pairs (x, y) or dicts with "
        "'labels', or say it: data.Batches(loader, pair=lambda batch: (batch['image'], batch['class'])); or, if the "
        "model itself gives its loss, loss=None"
    )


@dataclass(frozen=True)
class Rows:
    """The rows of a torch Dataset (with a length and numbered rows), epoch by epoch: `train(data=Rows(dataset))`.

    dataset   `dataset[k]` is row k: a pair (x, y), or a dict, such as a Hugging Face data set has
    seed      seed of the orders: the order of an epoch is a function of (seed, epoch)
    shuffle   False: every epoch has the order of the data
    last      "smaller": rows that do not fill a batch are a smaller batch; "dropped": they are left out of this epoch
    collate   makes a batch from a list of rows. The default stacks rows, as torch does (numbers in lists as well, and
              without what is text); then each rank reads only its own rows. With another function (such as one that
              pads to the longest row) each rank reads the whole batch
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
        from minipar.models.tensors import take_rows

        if self.collate is None:
            return self.pair(stacked([self.dataset[k] for k in self.order.rows(step, size, rows).tolist()]))
        whole = self.pair(self.collate([self.dataset[k] for k in self.order.rows(step, size).tolist()]))
        return whole if rows is None else (take_rows(whole[0], rows), take_rows(whole[1], rows))


def stacked(rows: list[Any]) -> Any:
    """A batch of rows. Of dicts with lists of numbers, as Hugging Face's data sets give them, a tensor for each key;
    what is text is left out. Errors: PlanError for lists of unequal lengths."""
    import torch
    from torch.utils.data import default_collate

    if not isinstance(rows[0], Mapping):
        return default_collate(rows)
    found = {}
    for key, first in rows[0].items():
        column, inner = [row[key] for row in rows], first
        while isinstance(inner, (list, tuple)) and inner:
            inner = inner[0]
        if isinstance(inner, str):
            continue
        if isinstance(first, (list, tuple)):
            kind = torch.float64 if isinstance(inner, float) else None  # (as torch stacks single numbers)
            column = [torch.tensor(each, dtype=kind) for each in column]
        if isinstance(column[0], torch.Tensor) and len({each.shape for each in column}) > 1:
            lengths = ", ".join(str(len(each)) for each in column[:4])
            raise PlanError(
                f"data: {key!r} has rows of unequal length ({lengths} ...), which cannot be stacked; pad them, or say "
                "how: data.Rows(dataset, collate=transformers.DataCollatorWithPadding(tokenizer))"
            )
        found[key] = default_collate(column)
    return found


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
    """Batches in a folder, with one file for each step.

    pairing     gives (x, y) of what is in a file
    undivided   the tensors of x that have no rows, in any of the batches
    """

    folder: str
    first: int
    pairing: Pair
    undivided: frozenset[str] = frozenset()

    def batch(self, step: int, size: int) -> tuple[Any, Any]:
        import torch

        # (the profile reads step 0, even if the run begins with a later step)
        return self.pairing(torch.load(self._path(max(step, self.first)), mmap=True, weights_only=False))

    def _path(self, step: int) -> str:
        return os.path.join(self.folder, f"{step}.pt")


@dataclass(frozen=True)
class _Paired:
    """A data set with `batch(step, size)`, for a model that makes its loss itself."""

    source: Any
    pairing: Pair

    def batch(self, step: int, size: int) -> tuple[Any, Any]:
        return self.pairing(self.source.batch(step, size))


def indexed(data: Any, seed: int, size: int, pairing: Pairing = pair) -> Any:
    """One batch as (x, y); a data set with numbered rows, such as torch's and Hugging Face's, as `Rows`; rows that come
    one after the other as `Batches`; any other data unchanged."""
    if isinstance(data, Mapping) and any(hasattr(part, "column_names") for part in data.values()):
        raise PlanError(f"data: a dict of data sets, {', '.join(map(str, data))}; give one of them")
    if isinstance(data, (tuple, Mapping)):
        return pairing(data)
    if isinstance(data, (Rows, Batches)):
        return replace(data, pair=pairing) if data.pair is pair else data
    foreign = hasattr(data, "column_names")  # (Hugging Face's data sets have a `batch` that is something else)
    if hasattr(data, "batch") and not foreign:
        return _Paired(data, pairing) if pairing.own and not isinstance(data, _Files) else data
    from torch.utils.data import DataLoader, Dataset, IterableDataset

    if isinstance(data, IterableDataset):
        return Batches(DataLoader(data, batch_size=size, collate_fn=stacked), pairing)
    if isinstance(data, Dataset) or foreign:
        return Rows(data, seed, pair=pairing)
    return Batches(data, pairing) if isinstance(data, Iterable) else data


@contextmanager
def read_ahead(
    data: Any, steps: int, first: int, seed: int, size: int, pairing: Pairing = pair
) -> Iterator[tuple[Any, int]]:
    """Gives (data whose batches can be read by step number, rows of a step), for `steps` steps from step `first` on.

    Errors: PlanError if an iterable has no batch for some step, or a batch that is not x and y.
    """
    data = indexed(data, seed, size, pairing)
    if not isinstance(data, Batches):
        yield data, size
        return
    import torch

    from minipar.data.batches import check_batch
    from minipar.models.tensors import undivided

    own, whole = data.pair is pairing and pairing.own, frozenset[str]()
    with tempfile.TemporaryDirectory(prefix="minipar-batches-") as folder:
        files = _Files(folder, first, pairing if own else pair)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(hash((seed, first)))
            for step, batch in zip(range(first, first + steps), _again(data.batches, steps), strict=False):
                x, y = data.pair(batch)
                rows = check_batch((x, y), f"data: batch {step}")
                whole |= undivided(x, y)
                if step == first:
                    size = rows
                torch.save(_compact(x if own else (x, y)), files._path(step))
        yield replace(files, undivided=whole), size


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
