"""How the verifier follows versions of parameters that come from servers (HetPipe).

    F mb0 v0 | F mb1 v0 | B mb0 | PUSH 0 | PULL v1 | B mb1 | PUSH 1 | PULL v2      mb1 used v0, and went into update 1

What a rank pushes waits here, by group and update, until all ranks that hold the group have pushed theirs. Together it
is what an update takes, and it is checked as that of a STEP is when a rank has pulled the version that the update made:
from every server that keeps a part of it. The last update is pulled by nobody, and is checked at the end. In modes
async and ssp an update is of one replica. The version that it pulls next has its own updates up to that one, as
service.py checks, and any number of the others'.

A rank is at one version with the servers: it pulls some of v1 before it pushes to update 1, and has pulled all of v1
and pushed all of its update before it pulls any of v2.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from minipar.errors import ProgramError
from minipar.program import Instruction, Op, Program, Turn, grad, home, param, version_of
from minipar.program.verify.staleness import StaleContents

_OF_SERVERS = (Op.ACCEPT, Op.APPLY, Op.REPLY)


class ServedContents(StaleContents):
    """The contents of values on ranks that push updates and pull versions.

    keepers   for each group, the servers that keep some of it
    holders   for each group, the ranks that push its gradient
    pushed    (group, update) -> what each rank has pushed
    last      (rank, group) -> the place of the last PUSH of it
    pulled    (rank, group, version) -> the servers from which it was pulled
    at        for each rank, the version that it pulls and then pushes to; -1 before the first one
    unchecked (rank, place, group, update) of versions that were pulled before it was known what they are made of
    """

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.own_updates = program.serving is not None and program.serving.mode != "sync"
        self.keepers: dict[int, set[int]] = defaultdict(set)
        for server in range(program.workers, len(program.ranks)):
            for value in program.state[server]:
                if value.kind == "served":
                    self.keepers[value.index].add(server)
        self.holders: dict[int, set[int]] = defaultdict(set)
        for rank in range(program.workers):
            for ins in program.ranks[rank]:
                for g in ins.layers if ins.op is Op.PUSH else ():
                    self.holders[g].add(rank)
        self.pushed: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
        self.last: dict[tuple[int, int], int] = {}
        self.pulled: dict[tuple[int, int, int], set[int]] = defaultdict(set)
        self.at = [-1] * program.workers
        self.unchecked: list[tuple[int, int, int, int]] = []

    def follow(self, turns: Iterable[Turn]) -> None:
        super().follow(turn for turn in turns if turn[2] is None or turn[2].op not in _OF_SERVERS)
        for each in self.unchecked:
            self._check_made(*each)
        for (rank, g), index in self.last.items():
            if self.at[rank] not in map(version_of, self.alive[rank].get(g, ())):
                raise ProgramError(f"rank {rank} ends without {param(g, self.at[rank])}, its newest version")
            self._check_made(rank, index, g, self.program.ranks[rank][index].step)

    def _serve(self, rank: int, index: int, ins: Instruction) -> None:
        known, at = self.known[rank], self.at[rank]
        if ins.op is Op.PUSH:
            if ins.step != at:
                raise self._refuse(rank, index, f"pushes to update {ins.step} after a PULL of v{at}; possible is {at}")
            for value in ins.frees:
                if home(value).kind == "grad":
                    self.pushed[value.index, at][rank] = known.pop(value, 0)
                    self.last[rank, value.index] = index
            return
        if ins.step not in (at, at + 1):
            raise self._refuse(rank, index, f"pulls v{ins.step} after v{at}; possible is v{at + 1}")
        if ins.step != at:
            self._check_done(rank, index, at)
            self.at[rank] = ins.step
        for value in ins.writes:
            g, here = value.index, self.pulled[rank, value.index, ins.step]
            here.add(ins.peer)
            if here == self.keepers[g] and ins.step:
                if self.program.undecided:  # (then a PULL waits for nothing, and other ranks may push later)
                    self.unchecked.append((rank, index, g, ins.step - 1))
                else:
                    self._check_made(rank, index, g, ins.step - 1)
                known[value._replace(step=-1)] = ins.step
        self._make(rank, index, ins)

    def _check_done(self, rank: int, index: int, at: int) -> None:
        """Before the next version a rank has pulled all of this one, and has pushed all of its update."""
        for g, ranks in self.holders.items() if at >= 0 else ():
            if rank in ranks and self.pulled[rank, g, at] != self.keepers[g]:
                raise self._refuse(rank, index, f"comes before all of {param(g, at)} is pulled")
            if rank in ranks and rank not in self.pushed[g, at]:
                raise self._refuse(rank, index, f"comes before {grad(g)} is pushed to update {at}")

    def _compute(self, rank: int, index: int, ins: Instruction) -> None:
        for value in ins.reads:
            if version_of(value) < 0 or not self.trained[value.index]:
                continue
            here = self.pulled[rank, value.index, value.step]
            for server in sorted(self.keepers[value.index] - here):
                raise self._refuse(rank, index, f"uses {value}, which was not pulled from rank {server}")
        super()._compute(rank, index, ins)

    def _check_made(self, rank: int, index: int, g: int, update: int) -> None:
        """An update takes what all ranks have pushed for it, or those of one replica; of a shard, those that have it.
        (What ranks that share a layer have alike, the first of them pushes.)"""
        made, program, form = 0, self.program, self.program.groups[g].form
        mine = program.part(rank, g, "S")
        for other in sorted(self.holders[g]):
            if program.part(other, g, "S") != mine or not program.is_first(other, form, "S", "P"):
                continue
            if self.own_updates and program.replica(other) != program.replica(rank):
                continue
            found = self.pushed[g, update].get(other, 0)
            if made & found:
                raise self._refuse(rank, index, f"counts {self.name(g, made & found)} twice")
            made |= found
        self._check_update(rank, index, g, update, made)

    def _later(self, rank: int, index: int) -> bool:
        row = self.program.ranks[rank]
        update = row[index].step - (row[index].op is Op.PULL)
        return any(ins.op is Op.PUSH and ins.step > update for ins in row)

    def _check_updated(self, rank: int) -> None:
        """A rank pushes the gradients of all trainable parameters that it holds."""
        program = self.program
        for value in sorted(program.state[rank]):
            g = value.index
            held = home(value).kind == "param" and program.groups[g].trainable
            if held and (rank, g) not in self.last:
                raise ProgramError(f"rank {rank} holds {value}, but never pushes {grad(g)}")
