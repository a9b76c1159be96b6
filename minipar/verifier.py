"""verify(program): proof that a program can run, or the shortest explanation of why not.

Four questions, each with its own kind of evidence:
  1. each rank alone       every read has a producer before it, nothing is written twice, used after it was freed, leaked
  2. each replica          every layer runs every micro-batch forward and backward, exactly once
  3. each link and group   the sends of a link are its receives, in order; collectives agree on all ranks of a group
  4. all ranks together    walking the lists by the rule of execution ends (no deadlock), and every STEP finds the sum
                           of all micro-batches of all replicas in its gradients, each exactly once, and every
                           forward and backward the parameters that the contract promises
"""

from __future__ import annotations

from minipar.errors import Deadlock, ProgramError
from minipar.program import COLLECTIVES, Instruction, Op, Program, Value, span


def verify(program: Program) -> None:
    """Silent if the program can run; otherwise ProgramError (or its sub-class for deadlocks) says why not.

    Takes about 3 microseconds an instruction.
    """
    for rank in range(len(program.ranks)):
        _check_rank(program, rank)
    for replica in range(program.replicas):
        _check_microbatches(program, replica)
    _check_links(program)
    _check_groups(program)
    _Walk(program).run()


class ProgramDeadlock(ProgramError, Deadlock):
    """A program whose ranks would wait for each other for ever; `details` is the cycle."""


def at(program: Program, rank: int, index: int) -> str:
    """An instruction as messages name it: rank, position, text."""
    return f"rank {rank} instruction {index} `{program.ranks[rank][index]}`"


def _refuse(program: Program, rank: int, index: int, reason: str) -> ProgramError:
    instructions = program.ranks[rank]
    low, high = max(0, index - 3), min(len(instructions), index + 3)
    lines = [f"  {'->' if k == index else '  '} {k:4d}  {instructions[k]}" for k in range(low, high)]
    return ProgramError(reason, f"rank {rank}:\n" + "\n".join(lines))


# 1. each rank alone -------------------------------------------------------------------------------------------------


def _check_rank(program: Program, rank: int) -> None:
    live: set[Value] = set(program.state[rank]) if program.state else set()
    for index, ins in enumerate(program.ranks[rank]):
        for value in ins.reads:
            if value not in live:
                raise _no_producer(program, rank, index, value)
        for value in ins.writes:
            if value in live and value.microbatch >= 0:
                raise _written_twice(program, rank, index, value)
        live.update(ins.writes)
        for value in ins.frees:
            if value not in live:
                raise _refuse(program, rank, index, f"{at(program, rank, index)} frees {value}, which is not there")
            live.remove(value)
    if program.state:
        for value in sorted(live - program.state[rank]):
            writer = max(k for k, ins in enumerate(program.ranks[rank]) if value in ins.writes)
            reason = f"{value} is never freed: written by {at(program, rank, writer)}"
            raise _refuse(program, rank, writer, reason)
        for value in sorted(program.state[rank] - live):
            raise ProgramError(f"{value} of rank {rank} must outlive the program, but is freed")


def _no_producer(program: Program, rank: int, index: int, value: Value) -> ProgramError:
    where = at(program, rank, index)
    writers = [k for k, ins in enumerate(program.ranks[rank]) if value in ins.writes]
    freers = [k for k in range(index) if value in program.ranks[rank][k].frees]
    if freers:
        reason = f"{where} reads {value} after {at(program, rank, freers[-1])} freed it"
    elif writers and value.kind == "saved":
        reason = f"backward before forward: {where} needs {value} of {at(program, rank, writers[0])}"
    elif writers:
        reason = f"{where} reads {value} before {at(program, rank, writers[0])} writes it"
    elif value.kind == "saved":
        reason = f"backward before forward: {where} needs {value}, but rank {rank} never runs that forward"
    else:
        others = [
            r for r in range(len(program.ranks))
            if program.replica(r) == program.replica(rank) and any(value in ins.writes for ins in program.ranks[r])
        ]  # fmt: skip
        hint = f"; rank {others[0]} has it, but does not send it here" if others else ""
        reason = f"{where} reads {value}, which has no producer{hint}"
    return _refuse(program, rank, index, reason)


def _written_twice(program: Program, rank: int, index: int, value: Value) -> ProgramError:
    first = next(k for k in range(index) if value in program.ranks[rank][k].writes)
    ins = program.ranks[rank][index]
    what = f"micro-batch {ins.microbatch} is doubled" if ins.op is Op.FORWARD else f"{value} is written twice"
    reason = f"{what}: {at(program, rank, first)} and {at(program, rank, index)} both write {value}"
    return _refuse(program, rank, index, reason)


# 2. each replica ----------------------------------------------------------------------------------------------------

_HALVES = {
    Op.FORWARD: ("forward",),
    Op.BACKWARD: ("input gradient", "weight gradient"),
    Op.BACKWARD_INPUT: ("input gradient",),
    Op.BACKWARD_WEIGHT: ("weight gradient",),
}


def _check_microbatches(program: Program, replica: int) -> None:
    seen: dict[tuple[str, int, int, int], tuple[int, int]] = {}
    for rank, instructions in enumerate(program.ranks):
        if program.replica(rank) != replica:
            continue
        for index, ins in enumerate(instructions):
            for half in _HALVES.get(ins.op, ()):
                for layer in ins.layers:
                    key = (half, layer, ins.microbatch, ins.step)
                    if key in seen:
                        where = at(program, *seen[key])
                        reason = f"micro-batch {ins.microbatch} is doubled: the {half} of layer {layer} runs in"
                        raise _refuse(program, rank, index, f"{reason} {where} and in {at(program, rank, index)}")
                    seen[key] = (rank, index)
    back = range(program.first_trainable, program.layers)
    need = program.steps * program.microbatches * (program.layers + 2 * len(back))
    wanted = {"forward": range(program.layers), "input gradient": back, "weight gradient": back}
    if len(seen) == need and all(0 <= k[2] < program.microbatches and k[3] < program.steps for k in seen):
        return
    for half, layers in wanted.items():
        for step in range(program.steps):
            for i in range(program.microbatches):
                for layer in layers:
                    if (half, layer, i, step) not in seen:
                        name = "forward" if half == "forward" else "backward"
                        raise ProgramError(
                            f"micro-batch {i} is missing: no rank of replica {replica} runs the {name} of layer {layer}"
                            f" on it (step {step})"
                        )
    rank, index = next(
        place for (half, layer, i, step), place in seen.items()
        if not (layer in wanted[half] and 0 <= i < program.microbatches and 0 <= step < program.steps)
    )  # fmt: skip
    raise _refuse(program, rank, index, f"{at(program, rank, index)} works on a layer or micro-batch that is not there")


# 3. each link and group ---------------------------------------------------------------------------------------------


def _check_links(program: Program) -> None:
    sends: dict[tuple[int, int], list[tuple[Value, int]]] = {}
    receives: dict[tuple[int, int], list[tuple[Value, int]]] = {}
    for rank, instructions in enumerate(program.ranks):
        for index, ins in enumerate(instructions):
            if ins.op is not Op.SEND and ins.op is not Op.RECV:
                continue
            if not 0 <= ins.peer < len(program.ranks) or ins.peer == rank:
                raise _refuse(program, rank, index, f"{at(program, rank, index)}: there is no other rank {ins.peer}")
            if ins.op is Op.SEND:
                sends.setdefault((rank, ins.peer), []).append((ins.reads[0], index))
            else:
                receives.setdefault((ins.peer, rank), []).append((ins.writes[0], index))
    for link in sorted(sends.keys() | receives.keys()):
        source, target = link
        sent, received = sends.get(link, []), receives.get(link, [])
        for (value, index), (other, place) in zip(sent, received, strict=False):
            if value != other:
                reason = (
                    f"receive order differs from send order: {at(program, source, index)}"
                    f" meets {at(program, target, place)}"
                )
                raise _refuse(program, target, place, reason)
        if len(sent) > len(received):
            index = sent[len(received)][1]
            raise _refuse(
                program, source, index, f"send without receive: {at(program, source, index)}, not taken by rank {target}"
            )
        if len(received) > len(sent):
            index = received[len(sent)][1]
            raise _refuse(
                program, target, index, f"receive without send: {at(program, target, index)}, not sent by rank {source}"
            )


def _check_groups(program: Program) -> None:
    calls: dict[tuple[int, ...], dict[int, list[int]]] = {}
    for rank, instructions in enumerate(program.ranks):
        for index, ins in enumerate(instructions):
            if ins.op in COLLECTIVES:
                if rank not in ins.group:
                    raise _refuse(program, rank, index, f"{at(program, rank, index)}: rank {rank} is not of that group")
                calls.setdefault(ins.group, {}).setdefault(rank, []).append(index)
    for group, by_rank in calls.items():
        first = group[0]
        mine = by_rank.get(first, [])
        for rank in group[1:]:
            theirs = by_rank.get(rank, [])
            for a, b in zip(mine, theirs, strict=False):
                x, y = program.ranks[first][a], program.ranks[rank][b]
                if (x.op, x.layers, x.parts, x.step) != (y.op, y.layers, y.parts, y.step):
                    reason = f"collectives in different order: {at(program, first, a)} meets {at(program, rank, b)}"
                    raise _refuse(program, rank, b, reason)
            if len(mine) != len(theirs):
                who, other = (first, rank) if len(mine) > len(theirs) else (rank, first)
                index = by_rank[who][min(len(mine), len(theirs))]
                raise _refuse(
                    program, who, index, f"collective without partner: {at(program, who, index)}; rank {other} never joins"
                )


# 4. all ranks together ----------------------------------------------------------------------------------------------


class _Walk:
    """The rule of execution without time: each rank walks until it reads something that has not arrived."""

    def __init__(self, program: Program) -> None:
        ranks = range(len(program.ranks))
        self.program = program
        self.place = [0 for _ in ranks]
        # value -> what must happen before it can be read: ("recv", source, k) or ("join", group, k)
        self.pending: list[dict[Value, tuple[str, object, int]]] = [{} for _ in ranks]
        self.sent: dict[tuple[int, int], int] = {}
        self.received: dict[tuple[int, int], int] = {}
        self.joined: dict[tuple[int, ...], list[int]] = {}  # collectives finished per group, then arrivals per member
        self.arrived: dict[tuple[tuple[int, ...], int], int] = {}
        self.sums: list[dict[int, int]] = [{} for _ in ranks]  # per rank and group: a bit per contribution
        self.version: list[dict[int, int]] = [{} for _ in ranks]
        self.bits = [self._slots(g) for g in range(len(program.groups))]

    def _slots(self, group: int) -> dict[int, int]:
        """For each layer of a group, the position of its first contribution bit."""
        size = self.program.replicas * self.program.microbatches
        return {layer: k * size for k, layer in enumerate(self.program.groups[group].layers)}

    def run(self) -> None:
        ranks = range(len(self.program.ranks))
        moved = True
        while moved:
            moved = False
            for rank in ranks:
                moved = self._advance(rank) or moved
        stuck = [r for r in ranks if self.place[r] < len(self.program.ranks[r])]
        if stuck:
            raise self._deadlock(stuck)
        for rank in ranks:
            for group, mask in self.sums[rank].items():
                if mask and self.program.groups[group].trainable:
                    raise ProgramError(f"rank {rank} never applies grad({group}): it has no STEP for it after its last use")

    def _ready(self, rank: int, wait: tuple[str, object, int]) -> bool:
        kind, where, k = wait
        if kind == "recv":
            return self.sent.get((where, rank), 0) > k  # type: ignore[arg-type]
        return self.arrived.get((where, k), 0) == len(where)  # type: ignore[arg-type]

    def _advance(self, rank: int) -> bool:
        instructions, pending = self.program.ranks[rank], self.pending[rank]
        start = index = self.place[rank]
        replica = self.program.replica(rank)
        sums, version = self.sums[rank], self.version[rank]
        while index < len(instructions):
            ins = instructions[index]
            op = ins.op
            if pending:
                for value in ins.reads:
                    if value in pending:
                        if not self._ready(rank, pending[value]):
                            self.place[rank] = index
                            return index > start
                        del pending[value]
            if op is Op.RECV:
                k = self.received.get((ins.peer, rank), 0)
                self.received[ins.peer, rank] = k + 1
                pending[ins.writes[0]] = ("recv", ins.peer, k)
            elif op is Op.SEND:
                self.sent[rank, ins.peer] = self.sent.get((rank, ins.peer), 0) + 1
            elif op is Op.ALL_REDUCE:
                self._join(rank, index, ins)
            elif op is Op.STEP:
                self._check_step(rank, index, ins)
            else:
                for value in ins.reads:
                    if value.kind == "param" and version.get(value.index, 0) != ins.step:
                        if self.program.groups[value.index].trainable:
                            raise self._wrong_version(rank, index, value.index)
                if op is Op.BACKWARD or op is Op.BACKWARD_WEIGHT:
                    bit = replica * self.program.microbatches + ins.microbatch
                    for value in ins.writes:
                        if value.kind == "grad":
                            slots = self.bits[value.index]
                            for layer in ins.layers:
                                if layer in slots:
                                    sums[value.index] = sums.get(value.index, 0) | 1 << (slots[layer] + bit)
            index += 1
        self.place[rank] = index
        return index > start

    def _join(self, rank: int, index: int, ins: Instruction) -> None:
        counts = self.joined.setdefault(ins.group, [0] * len(ins.group))
        member = ins.group.index(rank)
        k = counts[member]
        counts[member] += 1
        for value in ins.writes:
            self.pending[rank][value] = ("join", ins.group, k)
        self.arrived[ins.group, k] = self.arrived.get((ins.group, k), 0) + 1
        if self.arrived[ins.group, k] < len(ins.group):
            return
        for g in ins.layers:
            total = 0
            for r in ins.group:
                if total & self.sums[r].get(g, 0):
                    raise _refuse(
                        self.program, rank, index,
                        f"{at(self.program, rank, index)} counts {self._name(g, total & self.sums[r][g])} twice:"
                        f" grad({g}) was summed over these ranks before",
                    )  # fmt: skip
                total |= self.sums[r].get(g, 0)
            for r in ins.group:
                self.sums[r][g] = total

    def _check_step(self, rank: int, index: int, ins: Instruction) -> None:
        size = self.program.replicas * self.program.microbatches
        for g in ins.layers:
            full = (1 << size * len(self.program.groups[g].layers)) - 1
            missing = full & ~self.sums[rank].get(g, 0)
            if missing:
                raise _refuse(
                    self.program, rank, index,
                    f"{at(self.program, rank, index)} comes before its gradients are complete:"
                    f" grad({g}) lacks {self._name(g, missing)}",
                )  # fmt: skip
            self.sums[rank][g] = 0
            done = self.version[rank].get(g, 0)
            if ins.step != done:
                raise _refuse(
                    self.program, rank, index,
                    f"{at(self.program, rank, index)} is update {done} of grad({g}), but belongs to step {ins.step}",
                )  # fmt: skip
            self.version[rank][g] = done + 1

    def _wrong_version(self, rank: int, index: int, group: int) -> ProgramError:
        ins, done = self.program.ranks[rank][index], self.version[rank].get(group, 0)
        return _refuse(
            self.program, rank, index,
            f"{at(self.program, rank, index)} of step {ins.step} uses param({group}) after {done} updates;"
            f" a synchronous program promises {ins.step}",
        )  # fmt: skip

    def _name(self, group: int, mask: int) -> str:
        """The first contribution in a mask, in words."""
        bit = (mask & -mask).bit_length() - 1
        slot, rest = divmod(bit, self.program.replicas * self.program.microbatches)
        replica, i = divmod(rest, self.program.microbatches)
        layer = self.program.groups[group].layers[slot]
        return f"micro-batch {i}" + (f" of replica {replica}" if self.program.replicas > 1 else "") + f" (layer {layer})"

    def _deadlock(self, stuck: list[int]) -> ProgramError:
        waits: dict[int, tuple[int, Value]] = {}
        for rank in stuck:
            ins = self.program.ranks[rank][self.place[rank]]
            value = next(v for v in ins.reads if v in self.pending[rank] and not self._ready(rank, self.pending[rank][v]))
            kind, where, k = self.pending[rank][value]
            if kind == "recv":
                other = int(where)  # type: ignore[call-overload]
            else:
                counts = self.joined[where]  # type: ignore[index]
                other = next(r for r, n in zip(where, counts, strict=True) if n <= k)  # type: ignore[call-overload]
            waits[rank] = (other, value)
        path = [stuck[0]]
        while waits.get(path[-1], (path[-1],))[0] not in path:
            path.append(waits[path[-1]][0])
        cycle = path[path.index(waits[path[-1]][0]) :] if path[-1] in waits else path
        lines = [
            f"  {at(self.program, r, self.place[r])} waits for {waits[r][1]} of rank {waits[r][0]}, "
            f"which comes after {at(self.program, waits[r][0], self.place[waits[r][0]])}"
            for r in cycle
        ]
        chain = " -> ".join(map(str, [*cycle, cycle[0]]))
        return ProgramDeadlock(f"deadlock: ranks wait for each other in a circle, {chain}", "\n".join(lines))


def describe(program: Program) -> str:
    """One line that a notebook can print after a successful verify."""
    held = ", ".join(span(layers) for layers in program.placement)
    return f"{program.name}: {len(program.ranks)} ranks, {len(program)} instructions, layers {held}: verified"
