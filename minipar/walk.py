"""The rule of execution without time: the verifier's last question, whether all ranks together reach the end.

Each rank is walked as far as it can go, and again when what it waits for has been sent or joined. On the way every
gradient is followed as a set of contributions (layer, replica, micro-batch), a bit each, and every parameter by the
number of its updates.
"""

from __future__ import annotations

from minipar.errors import Deadlock, ProgramError
from minipar.program import Instruction, Op, Program, Value
from minipar.refusal import at, refuse


class ProgramDeadlock(ProgramError, Deadlock):
    """A program whose ranks would wait for each other for ever; `details` is the cycle."""


class Walk:
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
                    raise ProgramError(
                        f"rank {rank} never applies grad({group}): it has no STEP for it after its last backward"
                    )

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
                for value in ins.writes + ins.frees:
                    if value in pending:
                        raise self._under_way(rank, index, value)
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
                    if value.kind != "param" or version.get(value.index, 0) == ins.step:
                        continue
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

    def _under_way(self, rank: int, index: int, value: Value) -> ProgramError:
        row = self.program.ranks[rank]
        writer = max(k for k in range(index) if value in row[k].writes)
        verb = "frees" if value in row[index].frees else "writes"
        reason = f"{at(self.program, rank, index)} {verb} {value} while {at(self.program, rank, writer)} is under way"
        return refuse(self.program, rank, index, reason)

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
                    raise refuse(
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
                raise refuse(
                    self.program, rank, index,
                    f"{at(self.program, rank, index)} comes before its gradients are complete:"
                    f" grad({g}) lacks {self._name(g, missing)}",
                )  # fmt: skip
            self.sums[rank][g] = 0
            done = self.version[rank].get(g, 0)
            if ins.step != done:
                raise refuse(
                    self.program, rank, index,
                    f"{at(self.program, rank, index)} is update {done} of grad({g}), but belongs to step {ins.step}",
                )  # fmt: skip
            self.version[rank][g] = done + 1

    def _wrong_version(self, rank: int, index: int, group: int) -> ProgramError:
        ins, done = self.program.ranks[rank][index], self.version[rank].get(group, 0)
        return refuse(
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
        whose = f" of replica {replica}" if self.program.replicas > 1 else ""
        return f"micro-batch {i}{whose} (layer {layer})"

    def _deadlock(self, stuck: list[int]) -> ProgramError:
        waits: dict[int, tuple[int, Value]] = {}
        for rank in stuck:
            ins, pending = self.program.ranks[rank][self.place[rank]], self.pending[rank]
            value = next(v for v in ins.reads if v in pending and not self._ready(rank, pending[v]))
            kind, where, k = pending[value]
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
