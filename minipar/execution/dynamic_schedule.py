"""A rank that decides as it runs, by the rule of `strategies.ampnet`: it works on what has arrived, backwards first.

The rank's program gives the instructions of each forward and backward, with their messages, in one possible order.
Links keep their order, so the rank knows which message comes next on each of them, and checks whether it has arrived.
If none has, the rank waits. Its decisions, in order, are the program as it happened.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from minipar.cluster import notes
from minipar.cluster.ranks import Ranks
from minipar.comm.links import Links
from minipar.errors import PlanError
from minipar.program import Action, Forward, Instruction, Program, Staleness, Value, grad_output, output
from minipar.strategies.rewriting import ActionKey, actions_of
from minipar.strategies.schedules.ampnet import choose

_LOOK = 0.05  # seconds of a wait, after which the rank checks again
_SOON = 2e-4  # the same while the message of an emulated device is under way


def check_carrier(cluster: Ranks, what: str) -> None:
    """PlanError, naming `what` is to run, where ranks cannot see whether a message is here: over gloo and NCCL a
    receive is posted, and then waited for."""
    carrier = cluster.carrier
    if carrier == "local" or cluster.size == 1:
        return
    over, way = ("NCCL", "device='cpu'") if carrier == "nccl" else ("transport='gloo'", "transport='local'")
    raise PlanError(
        f"{what}: its ranks decide as they run by the messages that are here, which nobody sees over {over}; "
        f"possible are Cluster({cluster.size}, {way}) and the other schedules"
    )


class DynamicSchedule:
    """The walk of one rank through its program, in the order that it decides; kept from pass to pass.

    order      forwards and backwards as they were decided
    executed   indices of instructions as they were walked
    """

    def __init__(self, program: Program, rank: int, links: Links) -> None:
        assert isinstance(program.contract, Staleness)
        assert program.in_flight is not None
        self.program, self.rank, self.links = program, rank, links
        self.total = program.steps * program.microbatches
        self.blocks: dict[ActionKey, list[int]] = {}
        for k, action in enumerate(actions_of(program, rank)):
            self.blocks.setdefault(action, []).append(k)
        held = program.placement[rank]
        self.before, self.after = held[0] - 1, held[-1]  # the layers whose outputs and gradients arrive

    def walk(self) -> Iterator[tuple[int, Instruction]]:
        """Yield the instructions with their indices, in the order that the rank decides."""
        row, ranks, m = self.program.ranks[self.rank], len(self.program.ranks), self.program.microbatches
        self.order: list[Action] = []
        self.executed: list[int] = []
        forwards = backwards = 0
        since = 0.0  # when the rank began to wait, if it does
        while forwards + backwards < 2 * self.total:
            outputs = forwards + self._here(output(self.before, *self._place(forwards)), self.rank - 1, forwards)
            gradient = grad_output(self.after, *self._place(backwards))
            gradients = backwards + self._here(gradient, self.rank + 1, backwards, forwards)
            assert self.program.in_flight is not None
            action = choose(
                self.rank, ranks, self.total, self.program.in_flight, forwards, backwards, outputs, gradients
            )
            if action is None:
                since = since or time.monotonic()
                self._wait(forwards, backwards, since)
                continue
            if since:
                notes.going_on()
                since = 0.0
            there = isinstance(action, Forward)
            step, i = divmod(action.microbatch, m)
            forwards, backwards = forwards + there, backwards + (not there)
            self.order.append(action)
            for index in self.blocks[there, i, step]:
                self.executed.append(index)
                yield index, row[index]

    def _place(self, k: int) -> tuple[int, int]:
        step, i = divmod(k, self.program.microbatches)
        return i, step

    def _here(self, value: Value, peer: int, k: int, begun: int | None = None) -> bool:
        """Whether the k-th message from a peer has arrived. (A micro-batch that has not begun has no gradient yet.)"""
        if not 0 <= peer < len(self.program.ranks) or k >= (self.total if begun is None else begun):
            return False
        arrival = self.links.look((value,), peer)
        return arrival is not None and arrival <= time.perf_counter()

    def _wait(self, forwards: int, backwards: int, since: float) -> None:
        """Wait until some message arrives, or for a short time."""
        peers = [self.rank - 1] * (self.rank > 0 and forwards < self.total)
        peers += [self.rank + 1] * (self.rank + 1 < len(self.program.ranks) and backwards < forwards)
        if self.links.emulated:
            time.sleep(_SOON)
            return
        notes.waiting("recv from rank " + " or rank ".join(map(str, peers)), since)
        self.links.wait_for_any(peers, _LOOK)
