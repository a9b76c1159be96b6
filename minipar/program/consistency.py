"""What a program promises about the parameters that it computes with, and who keeps them. Imports nothing of minipar.

A synchronous program has one step, or a few. An asynchronous program (`Staleness`) is the program of a whole run,
because nothing separates one step from the next. Its loss of a micro-batch is the micro-batch's own mean divided by
`every`, or its share of the step's mean where `every` is None. A STEP's `step` is the number of the update. Where ranks
decide as they run (`Program.in_flight`), simulator and executor return the program as it happened. Messages of a link
stay in order, so ranks decide only in what order forwards and backwards alternate.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Synchronous:
    """Every forward of step s uses the parameters after exactly s updates; an update uses every micro-batch once."""


@dataclass(frozen=True)
class Local:
    """Every replica updates its own parameters with the gradients of its own rows, and uses each of its micro-batches
    once. The parameters are averaged over the replicas after every `steps` updates and at the end, and at no other
    time."""

    steps: int


@dataclass(frozen=True)
class Staleness:
    """An update may use gradients that were computed from older parameters.

    bound      how many updates older they may be; None: any number
    versions   how many versions of its parameters a rank may hold at once; None: any number
    every      how many micro-batches an update uses: each has the mean loss of its own rows, and the update takes the
               mean of these. None: all micro-batches of a step, with the mean loss over the step's rows
    stashed    True: a backward uses the version that its forward used; False: it uses the newest version
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
