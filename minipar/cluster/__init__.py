"""Ranks that run functions for a driver: `Cluster`, `launched.Launched`. Importing this package imports no torch.

What both have is `ranks.Ranks`, which everything takes that needs ranks. A `Cluster` starts its own, on this machine.
The processes of torchrun are started already, on any machines: what they agree on is in agreement.py, and rank 0 drives
the others over TCP (far.py, launched.py). How a driver runs a function on its ranks is in members.py, for both.

Ranks of a `Cluster` are forked from a helper process, the zygote, which has imported torch already. They run functions
for the driver, stay alive between the cells of a notebook, and are replaced when they die (children.py, worker.py,
zygote.py). A value is pickled once, its large buffers into a memory file that every receiver maps (parcel.py, wire.py).
Each rank writes what it does to a page that the driver has mapped, too (notes.py). faulthandler writes Python's stacks
behind that page (stacks.py), and from both watchdog.py decides whether ranks wait for each other for ever; a rank that
waits for its GPU says so there, too. A printed line is held for 250 ms, or until all ranks of the run have
printed it, and is shown once (output.py). `%%ranks` is in magic.py.

Ranks start with settings of glibc (launch.py). Freed memory is kept, since otherwise every temporary tensor of a
megabyte would go back to the system, which clears the same pages for the next one. And memory comes in huge pages where
Linux leaves that to programs. The user's own settings come last, so they win.
"""

from __future__ import annotations

from minipar.cluster.local import Cluster

__all__ = ["Cluster"]
