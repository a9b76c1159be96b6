"""The rule of execution without time: the verifier's last question, whether all ranks together reach the end.

Each rank is walked as far as it can go, and again when what it waits for has been sent or joined. On the way every
gradient is followed as a set of contributions (layer, replica, micro-batch), a bit each, and every parameter by the
number of its updates; slices of both like wholes, of which a collective makes the other.
"""

from __future__ import annotations

from minipar.errors import ProgramError
from minipar.program import (
    COLLECTIVES,
    COPIES,
    Instruction,
    Local,
    Op,
    Program,
    Value,
    grad,
    grad_shard,
    home,
    host,
    param,
    piece_of,
    tier,
)
from minipar.program.verify import replicas
from minipar.program.verify.deadlock import deadlock
from minipar.program.verify.diagnostics import at, refuse
from minipar.wording import several

_STATES = ("optimizer_state", "optimizer_shard")


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
        self.shard_sums: list[dict[int, int]] = [{} for _ in ranks]
        self.shard_version: list[dict[int, int]] = [{} for _ in ranks]
        # what each member brought to a collective: per group its contributions, version, or weight in the norm
        self.brought: dict[tuple[tuple[int, ...], int], dict[int, dict[int, int]]] = {}
        # of a gradient that is summed piece by piece: (begin, end, contributions) of those that are
        self.pieces: dict[tuple[tuple[int, ...], int], list[tuple[int, int, int]]] = {}
        # of what is on the host or the disk: the contributions to a gradient, the version of anything else
        self.aside: list[dict[Value, int]] = [{} for _ in ranks]
        self.copying: list[dict[Value, Value]] = [{} for _ in ranks]  # what a copy reads -> what it writes
        local = program.contract.steps if isinstance(program.contract, Local) else 0
        self.local = local if program.replicas > 1 else 0  # so many updates a replica does by itself
        self.apart: list[dict[int, int]] = [{} for _ in ranks]  # and so many it has done, of each parameter
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
            raise deadlock(self, stuck)
        for rank in ranks:
            for group, mask in (*self.sums[rank].items(), *self.shard_sums[rank].items()):
                if mask and self.program.groups[group].trainable:
                    raise ProgramError(
                        f"rank {rank} never applies grad({group}): it has no STEP for it after its last backward"
                    )
            for group, updates in self.shard_version[rank].items():
                if group not in self.program.scattered and self.version[rank].get(group, 0) != updates:
                    raise ProgramError(
                        f"rank {rank} ends with param({group}) of which it has updated its slice only: it has no"
                        " ALL_GATHER for it after its last STEP"
                    )

            self._check_held(rank)
            self._check_tiers(rank)
            for group, updates in self.apart[rank].items():
                if updates:
                    raise ProgramError(
                        f"rank {rank} ends with param({group}) of its own: after its last STEP it is not averaged over"
                        " the replicas"
                    )

    def _check_held(self, rank: int) -> None:
        """Every copy of what is trained is updated on its rank."""
        if not self.program.state:
            return
        program, STEP = self.program, Op.STEP
        row = program.ranks[rank]
        updated = {g for op, ins in zip(program.ops[rank], row, strict=True) if op is STEP for g in ins.layers}
        for value in sorted(program.state[rank]):
            kept = home(value).kind in ("param", "param_shard", *_STATES)
            if kept and value.index not in updated and program.groups[value.index].trainable:
                raise ProgramError(f"rank {rank} holds {value}, but has no STEP for it")

    def _check_tiers(self, rank: int) -> None:
        """At the end all copies of a parameter or an optimizer state have seen the same updates."""
        updates: dict[int, int] = {}
        for value, version in self.aside[rank].items():
            if "grad" in value.kind:
                if version and self.program.groups[value.index].trainable:
                    reason = f"rank {rank} never applies {value}: it has no STEP for it after its last backward"
                    raise ProgramError(reason)
            else:
                updates[value.index] = max(updates.get(value.index, 0), version)
        for value in sorted(self.program.state[rank]) if updates and self.program.state else ():
            known = tier(value) != "device" or value.kind in ("param", "param_shard")
            if known and value.index in updates and self._note(rank, value) != updates[value.index]:
                raise ProgramError(
                    f"rank {rank} ends with {value} after {several(self._note(rank, value), 'update')}, "
                    f"but with another copy"
                    f" after {updates[value.index]}: it was not copied after the last STEP"
                )

    def _note(self, rank: int, value: Value) -> int:
        """The contributions to a gradient, the version of anything else."""
        tables = {"grad": self.sums, "grad_shard": self.shard_sums, "param": self.version}
        tables["param_shard"] = self.shard_version
        if value.kind in tables:
            return tables[value.kind][rank].get(value.index, 0)
        return self.aside[rank].get(value, 0)

    def _copy(self, rank: int, index: int, ins: Instruction) -> None:
        source, target = ins.reads[0], ins.writes[0]
        self.pending[rank][target] = ("copy", source, 0)
        self.copying[rank][source] = target
        if source.microbatch >= 0:
            return
        g, known = target.index, self._note(rank, source)
        newer = self._note(rank, target) if "grad" not in target.kind else 0
        if newer > known:
            reason = (
                f"{at(self.program, rank, index)} writes {source} after {several(known, 'update')} over {target} after"
            )
            raise refuse(self.program, rank, index, f"{reason} {newer}: an update is lost")
        if tier(target) != "device":
            self.aside[rank][target] = known
        elif target.kind == "param" and home(source).kind == "param":
            self.version[rank][g] = known
        elif target.kind in ("param", "param_shard"):  # (of a whole one the own slice)
            self.shard_version[rank][g] = known
        if source in ins.frees and source.kind in ("grad", "grad_shard"):
            (self.sums if source.kind == "grad" else self.shard_sums)[rank].pop(g, None)

    def ready(self, rank: int, wait: tuple[str, object, int]) -> bool:
        kind, where, k = wait
        if kind == "copy":
            return True
        if kind == "recv":
            return self.sent.get((where, rank), 0) > k  # type: ignore[arg-type]
        return self.arrived.get((where, k), 0) == len(where)  # type: ignore[arg-type]

    def _advance(self, rank: int) -> bool:
        instructions, pending = self.program.ranks[rank], self.pending[rank]
        start = index = self.place[rank]
        copying = self.copying[rank]
        while index < len(instructions):
            ins = instructions[index]
            op = ins.op
            if pending:
                for value in ins.reads:
                    if value in pending:
                        if not self.ready(rank, pending[value]):
                            self.place[rank] = index
                            return index > start
                        source = pending.pop(value)[1]
                        if copying and copying.get(source) == value:  # type: ignore[call-overload]
                            del copying[source]  # type: ignore[arg-type]
                for value in ins.writes + ins.frees:
                    if value in pending:
                        raise self._under_way(rank, index, value)
                    if value in copying:
                        raise self._under_way(rank, index, value, copying[value])
            if op is Op.RECV:
                k = self.received.get((ins.peer, rank), 0)
                self.received[ins.peer, rank] = k + 1
                for value in ins.writes:
                    pending[value] = ("recv", ins.peer, k)
            elif op is Op.SEND:
                self.sent[rank, ins.peer] = self.sent.get((rank, ins.peer), 0) + 1
            elif op in COLLECTIVES:
                self._join(rank, index, ins)
            elif op is Op.STEP:
                self._check_step(rank, index, ins)
            elif op in COPIES:
                self._copy(rank, index, ins)
            else:
                self._compute(rank, index, ins)
            index += 1
        self.place[rank] = index
        return index > start

    def _compute(self, rank: int, index: int, ins: Instruction) -> None:
        """Forwards and backwards: they use the parameters of their step, and add to gradients."""
        version = self.version[rank]
        for value in ins.reads:
            if value.kind == "param":
                done = version.get(value.index, 0)
            elif value.kind == "host param":
                done = self.aside[rank].get(value, 0)
            else:
                continue
            if done == ins.step:
                if self.local and value.index in self.apart[rank]:
                    replicas.in_round(self, rank, index, value.index)
            elif self.program.groups[value.index].trainable:
                raise self._wrong_version(rank, index, value.index)
        if ins.op is Op.BACKWARD or ins.op is Op.BACKWARD_WEIGHT:
            bit = self.program.replica(rank) * self.program.microbatches + ins.microbatch
            self._contribute(rank, ins, bit)

    def _contribute(self, rank: int, ins: Instruction, bit: int) -> None:
        sums, known = self.sums[rank], self.aside[rank]
        for value in ins.writes:
            if value.kind == "grad":
                slots = self.bits[value.index]
                for layer in ins.layers:
                    if layer in slots:
                        sums[value.index] = sums.get(value.index, 0) | 1 << (slots[layer] + bit)
            elif value.kind == "host grad":
                slots = self.bits[value.index]
                for layer in ins.layers:
                    if layer in slots:
                        known[value] = known.get(value, 0) | 1 << (slots[layer] + bit)

    def _under_way(self, rank: int, index: int, value: Value, target: Value | None = None) -> ProgramError:
        """`value` is being written; or read, by the copy that writes `target`."""
        row = self.program.ranks[rank]
        writer = max(k for k in range(index) if (target or value) in row[k].writes)
        verb = "frees" if value in row[index].frees else "writes"
        reason = f"{at(self.program, rank, index)} {verb} {value} while {at(self.program, rank, writer)} is under way"
        return refuse(self.program, rank, index, reason)

    def _join(self, rank: int, index: int, ins: Instruction) -> None:
        counts = self.joined.setdefault(ins.group, [0] * len(ins.group))
        member = ins.group.index(rank)
        k = counts[member]
        counts[member] += 1
        for value in ins.writes:
            if value not in ins.frees:
                self.pending[rank][value] = ("join", ins.group, k)
        self.arrived[ins.group, k] = self.arrived.get((ins.group, k), 0) + 1
        brought = self.brought.setdefault((ins.group, k), {})
        brought[rank] = self._bring(rank, ins)
        if self.arrived[ins.group, k] < len(ins.group):
            return
        del self.brought[ins.group, k]
        if ins.op is Op.NORM:
            self._check_norm(rank, index, brought)
        for g in ins.layers if ins.op is not Op.NORM else ():
            if ins.op is Op.ALL_GATHER:
                self._gathered(rank, index, g, {r: found[g] for r, found in brought.items()})
                continue
            if param(g) in ins.reads:
                replicas.averaged(self, rank, index, g, {r: found[g] for r, found in brought.items()})
                continue
            total = 0
            for r in ins.group:
                if total & brought[r][g]:
                    raise self._twice(rank, index, g, total & brought[r][g])
                total |= brought[r][g]
            if piece_of(ins):
                total = replicas.piece(self, rank, index, ins, total)
            for r in ins.group if grad(g) in ins.writes or not piece_of(ins) else ():
                if ins.op is Op.ALL_REDUCE:
                    whole = grad(g)
                    if whole in ins.reads:
                        self.sums[r][g] = total
                    else:
                        self.aside[r][host(whole)] = total
                    continue
                before = self.shard_sums[r].get(g, 0)
                if before & total:
                    raise self._twice(rank, index, g, before & total)
                self.shard_sums[r][g] = before | total

    def _bring(self, rank: int, ins: Instruction) -> dict[int, int]:
        """What a rank adds to a collective, as it is when the rank joins: later it may have changed."""
        if ins.op is Op.ALL_REDUCE and ins.reads and ins.reads[0].kind == "param":
            return {g: self.version[rank].get(g, 0) for g in ins.layers}
        if ins.op is Op.ALL_GATHER:
            return {g: self.shard_version[rank].get(g, 0) for g in ins.layers}
        if ins.op is Op.NORM:
            counted = [v for v in ins.reads if "grad" in v.kind and v.index in ins.layers]
            return {value.index: self._note(rank, value) for value in counted}
        sums = self.sums[rank]
        if ins.op is Op.ALL_REDUCE:
            return {value.index: self._note(rank, value) for value in ins.reads if "grad" in value.kind}
        freed = {value.index for value in ins.frees if value.kind == "grad"}
        return {g: sums.pop(g, 0) if g in freed else sums.get(g, 0) for g in ins.layers}

    def _twice(self, rank: int, index: int, group: int, mask: int) -> ProgramError:
        return refuse(
            self.program, rank, index,
            f"{at(self.program, rank, index)} counts {self.name(group, mask)} twice:"
            f" grad({group}) was summed over these ranks before",
        )  # fmt: skip

    def _gathered(self, rank: int, index: int, group: int, versions: dict[int, int]) -> None:
        """All slices of a group are together: they must be of one version, on all ranks."""
        if len(set(versions.values())) > 1:
            updates = ", ".join(f"{n} on rank {r}" for r, n in versions.items())
            reason = f"{at(self.program, rank, index)} gathers slices after different numbers of updates: {updates}"
            raise refuse(self.program, rank, index, reason)
        for r, version in versions.items():
            self.version[r][group] = version

    def _check_norm(self, rank: int, index: int, brought: dict[int, dict[int, int]]) -> None:
        """The norm is that of all gradients, each complete."""
        for g, group in enumerate(self.program.groups):
            if not group.trainable:
                continue
            counted = {r for r, found in brought.items() if g in found}
            holders = {
                r
                for r, held in enumerate(self.program.state)
                if any(home(v).kind in _STATES and v.index == g for v in held)
            }
            if counted != holders:
                reason = f"{at(self.program, rank, index)} counts grad({g}) on ranks {sorted(counted)}; it is on"
                raise refuse(self.program, rank, index, f"{reason} {sorted(holders)}")
            for r in counted:
                missing = self._all(g) & ~brought[r][g]
                if missing:
                    raise refuse(
                        self.program, rank, index,
                        f"{at(self.program, rank, index)} comes before the gradients are complete:"
                        f" grad({g}) lacks {self.name(g, missing)}",
                    )  # fmt: skip

    def _all(self, group: int, rank: int = 0) -> int:
        """Every contribution that the gradient of a group must have before a STEP; where replicas train by themselves,
        of the rank's own."""
        count = self.program.microbatches
        size = self.program.replicas * count
        if not self.local:
            return (1 << size * len(self.program.groups[group].layers)) - 1
        own = ((1 << count) - 1) << self.program.replica(rank) * count
        return sum(own << first for first in self.bits[group].values())

    def _check_step(self, rank: int, index: int, ins: Instruction) -> None:
        if ins.stream == "host":
            return self._check_step_on_host(rank, index, ins)
        for g in ins.layers:
            sliced = grad_shard(g) in ins.reads
            sums = (self.shard_sums if sliced else self.sums)[rank]
            versions = (self.shard_version if sliced else self.version)[rank]
            missing, more = self._all(g, rank) & ~sums.get(g, 0), sums.get(g, 0) & ~self._all(g, rank)
            if missing:
                raise refuse(
                    self.program, rank, index,
                    f"{at(self.program, rank, index)} comes before its gradients are complete:"
                    f" grad({g}) lacks {self.name(g, missing)}",
                )  # fmt: skip
            replicas.alone(self, rank, index, g, more)
            sums[g] = 0
            done = versions.get(g, 0)
            if ins.step != done:
                raise refuse(
                    self.program, rank, index,
                    f"{at(self.program, rank, index)} is update {done} of grad({g}), but belongs to step {ins.step}",
                )  # fmt: skip
            versions[g] = done + 1

    def _check_step_on_host(self, rank: int, index: int, ins: Instruction) -> None:
        where, known = at(self.program, rank, index), self.aside[rank]
        for value in ins.reads:
            found, g = self._note(rank, value), value.index
            if "grad" in value.kind:
                missing = self._all(g) & ~found
                if missing:
                    raise refuse(
                        self.program, rank, index,
                        f"{where} comes before its gradients are complete: {value} lacks {self.name(g, missing)}",
                    )  # fmt: skip
                known[value] = 0
                for sums in (self.sums, self.shard_sums):  # (one in a bucket stays, for the next step)
                    sums[rank].pop(g, None)
            elif value.kind.startswith("host ") and found != ins.step:
                raise refuse(
                    self.program, rank, index,
                    f"{where} is update {found} of {value}, but belongs to step {ins.step}",
                )  # fmt: skip
        for value in ins.writes:
            known[value] = ins.step + 1

    def _wrong_version(self, rank: int, index: int, group: int) -> ProgramError:
        ins, done = self.program.ranks[rank][index], self.version[rank].get(group, 0)
        return refuse(
            self.program, rank, index,
            f"{at(self.program, rank, index)} of step {ins.step} uses param({group}) after {several(done, 'update')};"
            f" a synchronous program promises {ins.step}",
        )  # fmt: skip

    def name(self, group: int, mask: int) -> str:
        """The first contribution in a mask, in words."""
        bit = (mask & -mask).bit_length() - 1
        slot, rest = divmod(bit, self.program.replicas * self.program.microbatches)
        replica, i = divmod(rest, self.program.microbatches)
        layer = self.program.groups[group].layers[slot]
        whose = f" of replica {replica}" if self.program.replicas > 1 else ""
        return f"micro-batch {i}{whose} (layer {layer})"
