"""What a program promises of the parameters that it computes with, and who keeps them. Imports nothing of minipar.

A synchronous program is one of a step, or of a few. An asynchronous one (`Staleness`) is a program of a whole run,
since nothing separates one step from the next: the loss of a micro-batch is its own mean divided by `every`, or its
share of the step's mean where `every` is None, and a STEP's `step` is the number of the update. Where ranks decide as
they run (`Program.in_flight`), simulator and executor return the program as it happened. Messages of a link stay in
order, so that all that is decided is how forwards and backwards alternate.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Synchronous:
    """Every forward of step s uses the parameters after exactly s updates; an update uses every micro-batch once."""


@dataclass(frozen=True)
class Local:
    """Every replica updates its own parameters with the gradients of its own rows, each micro-batch of it once. After
    every `steps` updates, and at the end, they are averaged over the replicas, and at no other time."""

    steps: int


@dataclass(frozen=True)
class Staleness:
    """An update may use gradients of parameters that are up to `bound` updates older; None: any number.

    versions   of its parameters that a rank may hold at once; None: any number
    every      micro-batches of an update, each with the mean loss of its own rows, of which the update takes the mean;
               None: all micro-batches of a step, with the mean loss of its rows
    stashed    a backward uses the version that its forward used; otherwise the newest one
    """

    bound: int | None = None
    versions: int | None = None
    every: int | None = None
    stashed: bool = True


Contract = Synchronous | Local | Staleness


@dataclass(frozen=True)
class Serving:
    """The last `servers` ranks are parameter servers, and follow a rule of `program.server_rule`: `mode`."""

    servers: int = 1
    mode: str = "sync"
