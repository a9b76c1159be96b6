"""Data that is already on your disk: the standard library's source text, scikit-learn's digits, and your own files.

    text = data.stdlib_text(context=64)
    x, y = text.batch(step=0, size=32)                      # tensors (32, 64), (32, 64)
    x, y = text.batch(step=0, size=32, rows=range(8, 16))   # rows 8 to 15 of the same batch, on any rank
    for x, y in text.shard(rank=1, size=4): ...             # one epoch, a quarter of it

    epochs = data.Epochs(data.Tokens("corpus.bin", context=64), seed=1)     # each row once an epoch, in another order
    x, y = epochs.batch(step=1000, size=32, rows=range(8))                  # the file may be larger than memory
    for step, (x, y) in data.stream(epochs, 32, rank, {"dp": 4}): ...       # a rank's rows, for your own loop

    rows = data.Rows(dataset, seed=1)           # a torch Dataset; train(data=dataset) does the same
    batches = data.Batches(loader)              # a torch DataLoader, or any iterable of batches; so does data=loader

A data set object has only a few settings, so it is small when pickled. It reads its data in the process that needs
them. This package imports torch only when a batch is made.
"""

from minipar.data.epochs import Epochs
from minipar.data.files import Records, Tokens
from minipar.data.fitting import for_model
from minipar.data.images import Digits, digits
from minipar.data.loading import Batches, Rows
from minipar.data.order import Order
from minipar.data.sharing import Sampler, replica_of, rows_of, stream
from minipar.data.sources import Source
from minipar.data.text import Text, Windows, stdlib_text, stdlib_windows

__all__ = [
    "Batches",
    "Digits",
    "Epochs",
    "Order",
    "Records",
    "Rows",
    "Sampler",
    "Source",
    "Text",
    "Tokens",
    "Windows",
    "digits",
    "for_model",
    "replica_of",
    "rows_of",
    "stdlib_text",
    "stdlib_windows",
    "stream",
]
