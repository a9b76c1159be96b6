"""The parameter server: it takes gradients, updates its part of the parameters, and sends them to workers.

    worker  PUSH ...........> every server     each keeps its part of the gradient, and tells server 0 when it is whole
            PULL ...........> server 0         ANSWER <.......... every server
    server 0  decides what happens next (program/server_rule.py), and the others do the same, line by line

So there is one order of updates and answers for all servers: they always take the same gradients, in whatever order
these arrive at each server. Server 0 keeps that order, from which a run can be replayed exactly.

When a server dies, all servers go back to the newest snapshot that all of them have; workers connect again and go on
there. What was pushed and acknowledged before that snapshot is in it. A gradient has a name (worker, step, key), and
counts once, however often it is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing

from torch import Tensor

from minipar.server.ordering import Server
from minipar.server.served import Served, Settings


def serve(
    folder: str,
    number: int,
    settings: Settings,
    values: Sequence[Tensor],
    reach: Callable[[str], None] = lambda point: None,
    report: Callable[[object], None] = lambda fact: None,
) -> Served:
    """Be server `number` of those that `rendezvous.open_folder` made a folder for, until all workers are done.

    values   the initial parameters, in the order of the keys
    reach    called at the points where a fault campaign ends processes: "apply" and "snapshot"
    report   called with ("silent", worker) when a worker is removed, and with ("restored", number of the snapshot)

    A server that is started again in the same folder goes on from a snapshot.
    """
    server = Server(folder, number, settings, values, reach, report)
    with closing(server.board):
        return server.run()
