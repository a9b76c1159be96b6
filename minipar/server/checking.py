"""Run-time checks with parameter servers (`check=true`): workers and servers note facts, and the driver compares them.

    worker 0   PULL  ...  PUSH ----------.      what a worker pulls is what the server has left of its last update, and
    worker 1   PULL  ...  PUSH ----------|      what it pushes is what the server takes; between the two it checks what
    server     REPLY      ACCEPT, APPLY  |      it computes, as any rank does (`execution/checking.py`)
                                         v      an update is of the sum of what was taken, each gradient once; it
    driver                           compare    changes parameters, to finite numbers; all servers clip it to one norm

In mode sync each step is compared as soon as it is over, and steps that overlap are compared at the end. In the other
modes servers decide as they run, and only the whole order says which instruction came first: all steps are compared at
the end. A gradient that came too late for an update counts nowhere, and neither do the facts of its step; what workers
have alike is compared in steps that all of them have done. What is pushed in fewer bytes (compress=) is checked as it
was unpacked, and not on its way.

With on_death=continue what a rank has noted may die with it, and steps are done again. So all is compared at the end:
of a step that was done again what was noted last, and only facts that all of their ranks have noted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from minipar.execution import facts
from minipar.execution.checking import CheckedExecutor, checksum, failure, is_finite, left_alone, weighed_together
from minipar.execution.facts import ALIKE, ONE, SUM, WRONG, Broken, Fact
from minipar.program import Instruction, Op, Portion, Program, Value, portions
from minipar.program.server_rule import Kind, Mode, Row
from minipar.server.pushing import Servers
from minipar.server.shard import Gradients, Pushed, Shard, view
from minipar.server.working import Worker


class At(NamedTuple):
    """An instruction of a server, which does not know its program: of several with these, that of a parameter group, or
    of a piece of one, by its name."""

    op: Op
    peer: int
    step: int
    group: str


class Noted(NamedTuple):
    """What a rank has noted until the end of a step. A worker's facts are all of this step, and count its instructions
    from the first one; those of a server come with their instructions."""

    rank: int
    step: int
    facts: Sequence[Fact]
    places: Sequence[At] = ()


def _pulled(name: str, step: int, server: int, worker: int) -> str:
    return f"param({name}) of step {step} from {server} to {worker}"


def _taken(name: str, step: int, worker: int, server: int) -> str:
    return f"grad({name}) of step {step} from {worker} to {server}"


# workers --------------------------------------------------------------------------------------------------------------


class CheckedWorker(CheckedExecutor, Worker):
    """A worker that checks what it computes, and notes what it pulls and pushes."""

    def __init__(self, program: Program, *given: Any) -> None:
        self.whole = program  # (an executor has one step of it)
        super().__init__(program, *given)

    def serve(self, servers: Servers, first: int, numbers: Mapping[Portion, int]) -> None:
        """Work with these servers from now on. The program's first step has this number. `numbers` of what servers
        serve by itself."""
        self.servers, self.first_step, self.numbers = servers, first, numbers

    def noted(self) -> Noted:
        """What was noted in the last step."""
        return Noted(self.comm.rank, self._now, self.facts)

    @property
    def _now(self) -> int:
        return self.base - self.first_step

    def _fail(self, rank: int, index: int, why: str) -> None:
        before = next(k for k, ins in enumerate(self.whole.ranks[rank]) if ins.step == self._now)
        raise failure(self.whole, Broken(rank, before + index, why), self.first_step)

    def _compare(self) -> None: ...  # (the driver does)

    def _first_seen(self, value: Value, index: int) -> None: ...  # (parameters come by PULLs)

    def _serve(self, index: int, ins: Instruction) -> None:
        if ins.op is Op.PUSH:
            with self._aside():
                self._unchanged(ins, ins.layers)
                for one in portions(ins) if self.program.compress == "none" else ():
                    gradients = [self._pushed(one.group, p) for p in self.groups[one.group]]
                    what = _taken(str(one), self._now + ins.step, self.comm.rank, ins.peer)
                    self._note(ALIKE, what, index, (self.comm.rank, ins.peer), [self._part(one, gradients, ins.peer)])
        super()._serve(index, ins)
        if ins.op is Op.PULL:
            with self._aside():
                self._came(index, ins)
        for value in ins.frees:  # (its gradients begin again from nothing)
            self.grads.pop(value.index, None)

    def _came(self, index: int, ins: Instruction) -> None:
        """Parameters have come: they are the server's, and the layers have them. (In a step that is void they have
        not.)"""
        if self.servers.void:
            return
        for one in portions(ins):
            g, own = one.group, self.groups[one.group]
            values = [self.servers.here(self.names[id(p)]) for p in own]
            what = _pulled(str(one), self._now + ins.step, ins.peer, self.comm.rank)
            self._note(ALIKE, what, index, (ins.peer, self.comm.rank), [self._part(one, values, ins.peer)])
            if not self._is_here(g):
                continue
            held = self._version(ins.writes, g)
            self.holds[held] = checksum([value.to(p.dtype) for value, p in zip(values, own, strict=True)])
            if not self.offloading.keeps(g) and self._parameters(held) != self.holds[held]:
                self._here(ins, f"{held} is not what was pulled")

    def _part(self, one: Portion, values: Sequence[Tensor], peer: int) -> int:
        """The checksum of the part of a group's tensors that a server keeps."""
        server, number = peer - self.whole.workers, self.numbers[one]
        names = [self.names[id(p)] for p in self.groups[one.group]]
        parts = (self.servers.part(name, value, server, number) for name, value in zip(names, values, strict=True))
        return checksum([part for part in parts if part is not None])


# servers --------------------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """Which server this is, of how many; how many workers there are, whose ranks come before those of servers; and the
    keys of each parameter group, or piece of one, by its name."""

    number: int
    servers: int
    workers: int
    groups: Mapping[str, tuple[int, ...]]


class CheckedShard(Shard):
    """A shard that notes what it takes, adds up, changes and sends.

    tensors   those that it keeps something of, by parameter group, or piece of one
    updating  those that its optimizer updates
    left      checksums of all that it keeps of a group, as the last update has left it
    sums      checksums of gradients, as they were summed or clipped
    """

    def __init__(self, place: Place, compress: str, clipped: bool, *given: Any) -> None:
        super().__init__(*given)
        self.place, self.compress, self.clipped = place, compress, clipped
        here = {g: [k for k in keys if k in self.by_tensor] for g, keys in place.groups.items()}
        self.tensors = {g: keys for g, keys in here.items() if keys}
        grouped = {id(p) for some in self.optimizer.param_groups for p in some["params"]} if self.optimizer else ()
        self.updating = {k for k, p in self.own.items() if id(p) in grouped}
        self.left: dict[str, int] = {}
        self.sums: dict[str, int] = {}
        self._version = 0
        self._facts: list[Fact] = []
        self._places: list[At] = []

    def noted(self) -> Noted:
        """What was noted since the last call, where the last update is made."""
        found = Noted(self.place.workers + self.place.number, self.updates - 1, self._facts, self._places)
        self._facts, self._places = [], []
        return found

    def _note(self, at: At, rule: str, what: str, ranks: Sequence[int], numbers: Sequence[float], near: float = 0.0,
              ) -> None:  # fmt: skip
        self._facts.append(Fact(rule, what, len(self._places), tuple(ranks), tuple(map(float, numbers)), near))
        self._places.append(at)

    def _wrong(self, at: At, why: str) -> None:
        self._note(at, WRONG, why, (), ())

    @property
    def _rank(self) -> int:
        return self.place.workers + self.place.number

    def _holds(self, g: str) -> int:
        return checksum([self.own[k].data for k in self.tensors[g]])

    def _values(self, k: int, before: bool) -> Tensor:
        return view(self.before, self.keys[k], self.by_tensor[k]) if before else self.own[k].data

    def _unchanged(self, g: str, at: At) -> None:
        now = self._holds(g)
        if self.left.setdefault(g, now) != now:
            self._wrong(at, f"param({g}) is not what the last update of it has left")

    def _groups(self, tensors: Collection[int]) -> Iterator[str]:
        """The groups of some tensors."""
        return (g for g, mine in self.tensors.items() if not set(mine).isdisjoint(tensors))

    def _weighed(self, g: str, gradients: Gradients) -> tuple[float, float, float]:
        return weighed_together((gradients.get(k), self.own[k].numel()) for k in self.tensors[g])

    def combine(
        self,
        taken: Sequence[Pushed],
        tensors: Collection[int] | None = None,
        scale: float = 1.0,
        number: int | None = None,
    ) -> Gradients:
        self._version = self.updates if tensors is None or not taken else taken[0].step if number is None else number
        groups = list(self._groups(self.by_tensor if tensors is None else tensors))
        each = {pushed.worker: pushed for pushed in taken}
        before = {g: [self._accepted(g, pushed) for pushed in each.values()] for g in groups}
        gradients = super().combine(taken, tensors, scale, number)
        for g in groups if taken and self.optimizer is not None else ():
            after, _, near = self._weighed(g, gradients)
            product, square = scale * sum(b[0] for b in before[g]), scale**2 * sum(b[1] for b in before[g])
            near = max([near, *(b[2] for b in before[g])])
            what = f"the sum of grad({g}) in update {self._version}"
            self._note(self._apply(g), SUM, what, (self._rank,), (product, after, square, True, True), near)
            self.sums[g] = checksum(gradients.get(k) for k in self.tensors[g])
        return gradients

    def _apply(self, g: str) -> At:
        return At(Op.APPLY, -1, self._version, g)

    def _accepted(self, g: str, pushed: Pushed) -> tuple[float, float, float]:
        """A worker's gradient of a group was taken: note what it is; its product, square and tolerance."""
        found = {k: pushed.room.of[k] for k in self.tensors[g] if k in pushed.held}
        at = At(Op.ACCEPT, pushed.worker, pushed.step, g)
        if found and self.compress == "none" and not pushed.passed_on:  # (its worker notes what it has pushed again)
            what = _taken(g, pushed.step, pushed.worker, self._rank)
            self._note(at, ALIKE, what, (pushed.worker, self._rank), [checksum(found.values())])
        if not all(map(is_finite, found.values())):
            self._wrong(at, f"grad({g}) from {pushed.worker} has numbers that are infinite or no numbers")
        return self._weighed(g, found)

    def restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        super().restore(tensors, facts)
        self.left, self.sums, self._facts, self._places = {}, {}, [], []

    def clip(self, gradients: Gradients, whole: float, most: float) -> float:
        before = {g: self._weighed(g, gradients) for g in self._groups(gradients)}
        factor = super().clip(gradients, whole, most)
        first = self._apply(next(iter(self.tensors)))
        ranks = range(self.place.workers, self.place.workers + self.place.servers)
        self._note(first, ALIKE, f"the norm of update {self._version}", ranks, [whole, factor])
        for g, (product, square, near) in before.items():
            what = f"the clipped grad({g}) in update {self._version}"
            numbers = (factor * product, self._weighed(g, gradients)[0], factor**2 * square, True, True)
            self._note(self._apply(g), SUM, what, (self._rank,), numbers, near)
            self.sums[g] = checksum(gradients.get(k) for k in self.tensors[g])
        return factor

    def step(self, gradients: Gradients, number: int | None = None) -> None:
        groups = list(self._groups(gradients)) if self.optimizer is not None else []
        rate = min(self.update.rates_at(self.updates if number is None else number), default=0.0)
        before, largest = {}, {}
        for g in groups:
            self._unchanged(g, self._apply(g))
            if checksum(gradients.get(k) for k in self.tensors[g]) != self.sums[g]:
                self._wrong(self._apply(g), f"grad({g}) was changed since it was summed")
            trained = [k for k in self.tensors[g] if k in gradients and gradients[k].numel() and k in self.updating]
            before[g] = {k: self.own[k].detach().clone() for k in trained}
            largest[g] = max([float(gradients[k].abs().max()) for k in trained], default=0.0)
        super().step(gradients, number)
        for g in groups:
            if not all(is_finite(self.own[k]) for k in self.tensors[g]):
                self._wrong(self._apply(g), f"param({g}) has numbers that are infinite or no numbers")
            after = [self.own[k].detach() for k in before[g]]
            if not self.clipped and left_alone(list(before[g].values()), after, largest[g], rate):
                self._wrong(self._apply(g), f"param({g}) was not changed, though its gradient is not zero")
            self.left[g] = self._holds(g)

    def sent(self, worker: int, step: int, keys: Collection[int], before: bool = False) -> None:
        """Some tensors are sent to a worker, for this step of it; as they were `before` their last update."""
        for g in self._groups(keys):
            at = At(Op.REPLY, worker, step, g)
            if not before:
                self._unchanged(g, at)
            mine = checksum([self._values(k, before) for k in self.tensors[g] if k in keys])
            self._note(at, ALIKE, _pulled(g, step, self._rank, worker), (self._rank, worker), [mine])


# the driver -----------------------------------------------------------------------------------------------------------


class Comparison:
    """In the driver: what all ranks have noted of a program's steps. Raises CheckFailed.

    first      the number of the program's first step
    reviving   whether ranks that die start again
    """

    def __init__(self, program: Program, first: int, reviving: bool) -> None:
        assert program.serving is not None
        self.program, self.first, self.reviving = program, first, reviving
        in_steps = Mode.parse(program.serving.mode, program.replicas).kind == "sync" and not program.virtual_workers
        self.early = in_steps and not reviving
        self._noted: dict[tuple[int, int], Noted] = {}  # by rank and step, what is to be compared at the end
        self._facts: dict[int, dict[int, list[Fact]]] = defaultdict(lambda: defaultdict(list))
        self._places: dict[tuple[int, int], list[At]] = defaultdict(list)  # of servers' facts, by step and rank
        self._done = dict.fromkeys(range(len(program.ranks)), -1)
        self._next = 0  # step to be compared

    def heard(self, noted: Noted) -> None:
        """A rank has noted something. A step that is over on all ranks is compared, unless that must wait."""
        if not self.early:
            self._noted.pop((noted.rank, noted.step), None)  # (so that what was noted last comes last)
            self._noted[noted.rank, noted.step] = noted
            return
        self._file(noted)
        self._done[noted.rank] = noted.step
        while self._next <= min(self._done.values()):
            self._compare(self.program, [self._next])
            self._next += 1

    def _file(self, noted: Noted) -> None:
        """Put facts to those of the same step."""
        for fact in noted.facts:
            step, at = noted.step, fact.at
            if noted.places:
                place = noted.places[fact.at]
                step = 0 if self.program.virtual_workers else place.step  # (there workers note all at their end)
                mine = self._places[step, noted.rank]
                at = len(mine)
                mine.append(place)
            self._facts[step][noted.rank].append(fact._replace(at=at))

    def finish(self, program: Program, order: Sequence[Row]) -> None:
        """The run is over: compare what was not compared yet, with the program as it happened."""
        for noted in self._noted.values():
            self._file(noted)
        taken = {
            (rank, row.step) for row in order if row.kind is Kind.TAKE for rank in program.served_workers[row.worker]
        }
        for step, of_ranks in self._facts.items():
            for rank, some in of_ranks.items():
                some[:] = [fact for fact in some if self._counts(rank, step, fact, taken)]
            noted_by = {(rank, fact.rule, fact.what) for rank, some in of_ranks.items() for fact in some}
            for some in of_ranks.values() if self.reviving else ():
                some[:] = [f for f in some if self._is_whole(f, noted_by)]
        self._compare(program, sorted(self._facts))

    def _counts(self, rank: int, step: int, fact: Fact, taken: Collection[tuple[int, int]]) -> bool:
        """Whether a fact is of a gradient that an update has taken; one of several workers, of theirs. `taken`: by
        worker and step."""
        if rank >= self.program.workers:
            at = self._places[step, rank][fact.at]
            return at.op is Op.APPLY or (at.peer, at.step) in taken
        others = [other for other in self._ranks(fact) if other < self.program.workers]
        return all((other, step) in taken for other in {rank, *others})

    def _is_whole(self, fact: Fact, noted_by: Collection[tuple[int, str, str]]) -> bool:
        """Whether all ranks that a fact is about have noted it; of each replica one that knows its share."""
        whom = self.program.ranks_of_replicas if fact.rule == ONE else [(rank,) for rank in fact.ranks]
        return all(any((rank, fact.rule, fact.what) in noted_by for rank in some) for some in whom)

    def _ranks(self, fact: Fact) -> Sequence[int]:
        """The ranks that a fact is about: the shares of a mean loss, about all replicas."""
        return range(self.program.workers) if fact.rule == ONE else fact.ranks

    def _compare(self, program: Program, steps: Sequence[int]) -> None:
        found: list[Broken] = []
        for step in steps:
            of_ranks = self._facts.pop(step, {})
            for broken in facts.all_broken([of_ranks.get(rank, []) for rank in range(len(program.ranks))]):
                found.append(broken._replace(at=self._index(program, step, broken)))
        if (first := facts.first_of(program, found)) is not None:
            raise failure(program, first, self.first)

    def _index(self, program: Program, step: int, broken: Broken) -> int:
        """The place in a program of the instruction that has noted something."""
        row = program.ranks[broken.rank]
        if broken.rank < program.workers:
            return broken.at + next(k for k, ins in enumerate(row) if ins.step == step)
        op, peer, of_step, group = self._places[step, broken.rank][broken.at]
        asked = op, peer, of_step
        return next(
            k for k, ins in enumerate(row) if (ins.op, ins.peer, ins.step) == asked and group in map(str, portions(ins))
        )
