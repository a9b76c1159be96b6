"""Data that is already on your disk: the standard library's source text, scikit-learn's digits, and your own files.

    text = data.stdlib_text(context=64)
    x, y = text.batch(step=0, size=32)                      # tensors (32, 64), (32, 64)
    x, y = text.batch(step=0, size=32, rows=range(8, 16))   # rows 8 to 15 of the same batch, on any rank

    epochs = data.Epochs(data.Tokens("corpus.bin", context=64), seed=1)     # each row once an epoch, in another order
    x, y = epochs.batch(step=1000, size=32, rows=range(8))                  # the file may be larger than memory
    for step, (x, y) in data.stream(epochs, 32, rank, {"dp": 4}): ...       # a rank's rows, for your own loop

    rows = data.Rows(dataset, seed=1)           # a torch Dataset; train(data=dataset) does the same
    batches = data.Batches(loader)              # a torch DataLoader, or any iterable of batches; so does data=loader

A data set object has only a few settings, so it is small when pickled. It reads its data in the process that needs
them. This package imports torch only when a batch is made.
"""

from __future__ import annotations

from typing import Any

from minipar.data.files import Records, Tokens
from minipar.data.images import Digits, digits
from minipar.data.loading import Batches, Rows
from minipar.data.order import Order
from minipar.data.sharing import replica_of, rows_of, stream
from minipar.data.sources import Epochs, Source
from minipar.data.text import Text, Windows, stdlib_text
from minipar.errors import PlanError
from minipar.models.table import GPT, Branchy, Mixture, preset

__all__ = [
    "Batches",
    "Digits",
    "Epochs",
    "Order",
    "Records",
    "Rows",
    "Source",
    "Text",
    "Tokens",
    "Windows",
    "digits",
    "for_model",
    "replica_of",
    "rows_of",
    "stdlib_text",
    "stream",
]


def for_model(name: str, seed: int = 0, **overrides: Any) -> Source:
    """The data set that fits a preset of `minipar.models`; `overrides` as given to `models.build`.

    Errors: `PlanError` for an unknown preset or number, or a model of a size that its data cannot fill.
    """
    chosen = preset(name, **overrides)
    if isinstance(chosen, (GPT, Mixture)):
        if chosen.vocab < Text.vocab:
            raise PlanError(f"vocab={chosen.vocab}: the text of {name} has {Text.vocab} different bytes")
        return Text(chosen.context, seed=seed)
    if isinstance(chosen, Branchy):
        return Digits(seed=seed)
    inputs, classes = chosen.widths[0], chosen.widths[-1]
    if chosen.data == "digits":
        if inputs != Digits.inputs or classes < Digits.classes:
            raise PlanError(
                f"widths={chosen.widths}: digits go from {Digits.inputs} numbers to {Digits.classes} classes"
            )
        return Digits(seed=seed)
    if classes < Windows.vocab:
        raise PlanError(f"widths={chosen.widths}: the text has {Windows.vocab} different bytes, so as many classes")
    return Windows(inputs, seed=seed)
