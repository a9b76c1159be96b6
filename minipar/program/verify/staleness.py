"""How stale gradients are, how many versions of the parameters are alive, and whether a program keeps its contract.

F mb0 v0 | F mb1 v0 | B mb0 | STEP v1 | B mb1 | STEP v2      mb1 used v0, and went into the update of v1: 1 update old

The first functions read only the instructions of one rank. `StaleContents` is the verifier's fifth check of
asynchronous programs. For each rank and parameter group it follows the versions that are alive, the version that the
forward of each micro-batch used, and the contributions to the gradient (a bit for each layer, step and micro-batch). A
STEP must make the next version from the newest one. It must use as many whole micro-batches as the contract `Staleness`
says, and no gradient may be staler than the contract allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from minipar.program import (
    BACKWARDS,
    COMPUTE,
    Instruction,
    Op,
    Program,
    Staleness,
    Value,
    grad,
    param,
    version_of,
)
from minipar.program.verify.contents import Contents
from minipar.wording import several

Versions = tuple[int | None, int | None]
StepMicrobatch = tuple[int, int]  # step, micro-batch


def versions_of(row: Iterable[Instruction]) -> Iterator[Versions]:
    """For each instruction of a rank, the version of the parameters that it used, and the version that it made."""
    updates = 0
    for ins in row:
        named = max(map(version_of, ins.reads), default=-1)
        used = None if ins.op not in COMPUTE else named if named >= 0 else updates
        if ins.op is not Op.STEP:
            yield used, None
            continue
        written = max(map(version_of, ins.writes), default=-1)  # (an update may have several STEPs)
        updates = written if written >= 0 else updates + 1
        yield used, updates


def stalest(row: Sequence[Instruction]) -> int:
    """The largest number of updates between the version that a forward used and the version that its gradient
    updated."""
    used: dict[tuple[int, int], int] = {}
    waiting: list[tuple[int, int]] = []
    most = 0
    for ins, (version, _) in zip(row, versions_of(row), strict=True):
        if ins.op is Op.FORWARD:
            used.setdefault((ins.step, ins.microbatch), version or 0)
        elif ins.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
            waiting.append((ins.step, ins.microbatch))
        elif ins.op is Op.STEP:
            most = max([most, *((version or 0) - used[key] for key in waiting if key in used)])
            waiting = []
    return most


def alive(row: Sequence[Instruction]) -> int:
    """The largest number of versions of its parameters that a rank holds; 1 in a synchronous program."""
    return max([1, *(count for _, _, count in _versions_held(row))])


def _versions_held(row: Iterable[Instruction]) -> Iterator[tuple[int, int, int]]:
    """For each update of parameters: its place, the group, and how many versions of that the rank then holds."""
    there: dict[int, set[Value]] = {}
    for index, ins in enumerate(row):
        for value in (*ins.reads, *ins.writes):
            if version_of(value) >= 0:
                there.setdefault(value.index, set()).add(value)
        for value in ins.frees:
            if version_of(value) >= 0:
                there[value.index].discard(value)
        if ins.op is not Op.FORWARD and ins.op not in BACKWARDS:
            yield from ((index, v.index, len(there[v.index])) for v in ins.writes if version_of(v) >= 0)


def delay(program: Program, rank: int) -> int:
    """How stale a rank's gradients can be, before it runs; if ranks decide as they run, the bound of the contract."""
    if not isinstance(program.contract, Staleness):
        return 0
    return stalest(program.ranks[rank]) if program.contract.stashed else program.contract.bound or 0


class StaleContents(Contents):
    """The contents of values in a program whose contract is `Staleness`.

    used     for each rank: (group, step, micro-batch) -> the version that its forward used

    What is known of parameters is how many updates the newest version there has had.
    """

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        assert isinstance(program.contract, Staleness)
        self.contract = program.contract
        self.used: list[dict[tuple[int, int, int], int]] = [{} for _ in program.ranks]
        self.trained = [group.trainable for group in program.groups]

    def _microbatches(self) -> int:
        return self.program.microbatches * self.program.steps

    def _bit(self, rank: int, ins: Instruction) -> int:
        program = self.program
        return (program.replica(rank) * program.steps + ins.step) * program.microbatches + ins.microbatch

    def _compute(self, rank: int, index: int, ins: Instruction) -> None:
        used, known = self.used[rank], self.known[rank]
        for value in ins.reads:
            if value.kind != "param" or not self.trained[value.index]:
                continue
            g, version, newest = value.index, value.step, known.get(param(value.index), 0)
            if version < 0:
                raise self._refuse(rank, index, f" uses {value} without saying which version")
            key = g, ins.step, ins.microbatch
            own = used.setdefault(key, version) if ins.op is Op.FORWARD else used.get(key, version)
            if (self.contract.stashed or ins.op is Op.FORWARD) and own != version:
                raise self._refuse(rank, index, f" uses {value}, but the forward of its micro-batch used v{own}")
            if not self.contract.stashed and version != newest:
                raise self._refuse(rank, index, f" uses {value}, which is not the newest, v{newest}")
        if ins.op in BACKWARDS and ins.op is not Op.BACKWARD_INPUT:
            expected = {g for layer in ins.layers for g in self.program.groups_of_layer[layer] if self.trained[g]}
            if lost := expected - {value.index for value in ins.writes if value.kind == "grad"}:
                raise self._refuse(rank, index, f" makes {grad(min(lost))}, but does not write it")
            self._contribute(rank, ins, self._bit(rank, ins))

    def _copy(self, rank: int, index: int, ins: Instruction) -> None:
        raise self._refuse(rank, index, " copies to or from another tier; without flushes all stays on the device")

    def _check_step(self, rank: int, index: int, ins: Instruction) -> None:
        known = self.known[rank]
        for g in ins.layers:
            whole, gradient, newest = param(g), grad(g), known.get(param(g), 0)
            old, new = (param(g, newest + k) for k in (0, 1))
            if old not in ins.reads:
                raise self._refuse(rank, index, f" does not update the newest parameters, {old}")
            if new not in ins.writes:
                raise self._refuse(rank, index, f" does not make {new}")
            if ins.step != newest:
                raise self._refuse(rank, index, f" is update {newest} of {whole}, but is called step {ins.step}")
            if gradient not in ins.frees and not (self.program.state and gradient in self.program.state[rank]):
                raise self._refuse(rank, index, f" keeps {gradient}, which would go into the next update, too")
            if others := {v for v in ins.writes if v.kind == whole.kind and v.index == g} - {new}:
                raise self._refuse(rank, index, f" writes {min(others)}; possible is {new} alone")
            self._check_update(rank, index, g, newest, known.get(gradient, 0))
            known[gradient] = 0
            known[whole] = newest + 1

    def _check_end(self, rank: int) -> None:
        """As that of all contents; and a rank has held as many versions as the program promises, at most."""
        most = self.contract.versions
        for index, g, found in _versions_held(self.program.ranks[rank]):
            if most is not None and found > most:
                what = f" leaves {several(found, 'version')} of param({g}) alive; the program promises {most}"
                raise self._refuse(rank, index, what)
        super()._check_end(rank)

    def _check_update(self, rank: int, index: int, g: int, newest: int, contributions: int) -> None:
        """The gradient of an update has whole micro-batches, the same ones of all replicas, as many as the contract
        says, and none is too stale. `contributions` are its contributions."""
        program = self.program
        own = program.replica(rank)
        found = {
            replica: [self._places(contributions >> slot, replica) for slot in self.bits[g].values()]
            for replica in range(program.replicas)
        }
        places = found[own][0]
        for replica, of_layers in found.items():
            for other in of_layers:
                if other == places:
                    continue
                step, i = min(other ^ places)
                what = f" comes before its gradients are complete: grad({g}) lacks"
                if replica == own:
                    raise self._refuse(rank, index, f"{what} a layer of micro-batch {i} of step {step}")
                what += f" micro-batch {i} of step {step} of replica {replica}; ALL_REDUCE of grad({g})"
                raise self._refuse(rank, index, f"{what} over replicas is missing")
        if not places:
            raise self._refuse(rank, index, f" updates param({g}) without a gradient")
        every, m = self.contract.every, program.microbatches
        whole = {(newest, i) for i in range(m)} if every is None else places
        if places != whole:
            step, i = min(places ^ whole)
            raise self._refuse(rank, index, f" is update {newest}, but not of step {newest}: micro-batch {i} of {step}")
        if every is not None and len(places) != every and (len(places) > every or self._later(rank, index)):
            what = f" is an update of {several(len(places), 'micro-batch')}; the program promises {every}"
            raise self._refuse(rank, index, what)
        bound = self.contract.bound
        for step, i in sorted(places):
            stale = newest - self.used[rank].get((g, step, i), newest)
            if bound is not None and stale > bound:
                what = f" applies a gradient of micro-batch {i} of step {step} that is {several(stale, 'update')} old"
                raise self._refuse(rank, index, f"{what}; the program promises at most {bound}")

    def _later(self, rank: int, index: int) -> bool:
        """Whether the rank has another update after this one."""
        row = self.program.ranks[rank]
        return any(ins.op is Op.STEP and ins.step > row[index].step for ins in row[index + 1 :])

    def _places(self, mask: int, replica: int) -> set[StepMicrobatch]:
        """The (step, micro-batch) pairs of a mask whose lowest bits belong to one layer: those of one replica."""
        count = self.program.steps * self.program.microbatches
        mask = (mask >> replica * count) & ((1 << count) - 1)
        found = set()
        while mask:
            found.add(divmod((mask & -mask).bit_length() - 1, self.program.microbatches))
            mask &= mask - 1
        return found


def settled(program: Program, rank: int, live: set[Value]) -> set[Value]:
    """The values that are live at the end. The newest version of parameters gets the name of the version that the
    program began with."""
    newest: dict[Value, int] = {}
    for value in live:
        if version_of(value) >= 0:
            plain = value._replace(step=-1)
            newest[plain] = max(newest.get(plain, 0), value.step)
    first = {v._replace(step=-1): v for v in program.state[rank]} if program.state else {}

    def named(value: Value) -> Value:
        plain = value._replace(step=-1)
        return first.get(plain, value) if version_of(value) >= 0 and value.step == newest[plain] else value

    return set(map(named, live))
