"""Data that is already on your disk: the Python standard library's own source text, and scikit-learn's digits.

    text = data.stdlib_text(context=64)
    x, y = text.batch(step=0, size=32)                      # tensors (32, 64), (32, 64)
    x, y = text.batch(step=0, size=32, rows=range(8, 16))   # rows 8 to 15 of the same batch, on any rank
    for x, y in text.shard(rank=1, size=4): ...             # one epoch, a quarter of it

A data set is a handful of settings: it pickles small, and reads its data in the process that first needs it.
This package imports torch only when a batch is made.
"""

from minipar.data.fitting import for_model
from minipar.data.images import Digits, digits
from minipar.data.sources import Source
from minipar.data.text import Text, Windows, stdlib_text, stdlib_windows

__all__ = ["Digits", "Source", "Text", "Windows", "digits", "for_model", "stdlib_text", "stdlib_windows"]
