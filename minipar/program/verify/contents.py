"""What every value contains while a program is walked: the verifier's fifth check.

For a gradient the verifier follows its contributions, with one bit for each (layer, replica, micro-batch). If every
rank that shares a layer makes a part of the gradient, each part has its own bit. For a parameter and its optimizer's
state the verifier follows the number of updates. One table, `known[rank][value]`, has both. A copy is an assignment,
and a sum over ranks is a union. Slices are values like whole ones, and collectives make one from the other. So a STEP
can check whether its gradients are complete, and a forward whether its parameters have the version that the contract
promises.

`order` (rule.py) gives the instructions, each after everything that it waits for.

If it gives only those of ranks that stand for others, a collective still has what every rank adds to it. What another
rank has is what the first one has, with its own replica and part in the place of theirs:

    micro-batches of replica    0   1   2               0   1   2
    rank 0 has                  1 1 0 0 0 0   rank 2    0 0 0 0 1 1      so their sum over ranks 0, 1, 2 has all, once
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import lru_cache, reduce
from operator import and_

from minipar.errors import ProgramError
from minipar.program import (
    COPIES,
    Instruction,
    Op,
    Program,
    Turn,
    Value,
    grad,
    grad_shard,
    home,
    param,
    param_shard,
    piece_of,
    repartitions,
    tier,
)  # fmt: skip
from minipar.program.diagnostics import wrong
from minipar.program.rule import Place
from minipar.wording import several

_STATES = ("optimizer_state", "optimizer_shard")


class Contents:
    """What the values of all ranks contain, while the program is walked.

    ranks     those whose instructions `follow` gets; by default all
    known     for each rank: a gradient -> its contributions, any other value -> the number of its updates
    brought   what each rank adds to a collective that other ranks have not joined yet
    pieces    for a gradient that is summed in pieces: begin, end and contributions of each piece so far
    local     how many updates a replica does alone before parameters are averaged; 0: it does none alone
    unaveraged  for each rank: group -> how many of these updates it did since the last average
    updated   for each rank: group -> how many of them it has had in all
    bits      for each group: layer -> the position of the layer's first contribution bit
    first_bit  for each rank: how far after that position the bits of its replica begin
    own       how many micro-batches of each replica have bits
    parts     for each group: how many ranks make a part of its gradient for one micro-batch
    """

    def __init__(self, program: Program, ranks: Collection[int] | None = None) -> None:
        self.program = program
        self.ranks = frozenset(range(len(program.ranks)) if ranks is None else ranks)
        self.known: list[dict[Value, int]] = [{} for _ in range(len(program.ranks))]
        self.brought: dict[Place, dict[int, int]] = {}
        self.pieces: dict[tuple[tuple[int, ...], int], list[tuple[int, int, int]]] = {}
        self.local = program.local_steps
        self.unaveraged: list[dict[int, int]] = [{} for _ in range(len(program.ranks))]
        self.updated: list[dict[int, int]] = [{} for _ in range(len(program.ranks))]
        self.own = self._microbatches()
        self.first_bit = [program.replica(rank) * self.own for rank in range(len(program.ranks))]
        self.parts = [program.part(0, g, "P")[1] for g in range(len(program.groups))]
        self.bits = [self._slots(g) for g in range(len(program.groups))]

    def _microbatches(self) -> int:
        """How many micro-batches of a replica are counts apart."""
        return self.program.microbatches

    def _slots(self, group: int) -> dict[int, int]:
        """For each layer of a group, the position of its first contribution bit."""
        size = self.program.replicas * self.own * self.parts[group]
        return {layer: k * size for k, layer in enumerate(self.program.groups[group].layers)}

    def follow(self, turns: Iterable[Turn]) -> None:
        """Check every instruction in the order of `turns`, then the end. Errors: ProgramError for the first that is
        wrong."""
        SEND, RECV, STEP = Op.SEND, Op.RECV, Op.STEP
        for rank, index, ins, _, joined in turns:
            if ins is None:
                self._check_end(rank)
                continue
            op = ins.op
            if op is SEND or op is RECV:
                continue
            if op is STEP:
                self._check_step(rank, index, ins)
            elif op in COPIES:
                self._copy(rank, index, ins)
            elif repartitions(ins):
                continue  # (its forms are looked at in forms.py, and in step with all ranks by `order`)
            elif ins.group:
                self.brought[rank, index] = self._bring(rank, ins)
                if joined:
                    brought = {r: self.brought.pop((r, k)) for r, k in joined}
                    self._collect(rank, index, ins, self._of_all(ins, brought))
            else:
                self._compute(rank, index, ins)

    # the end

    def _check_end(self, rank: int) -> None:
        """At the end of a rank no gradient is left without a STEP, and all copies of a parameter have had the same
        updates."""
        program, known = self.program, self.known[rank]
        for value, found in known.items():
            if "grad" in value.kind and found and program.groups[value.index].trainable:
                raise ProgramError(f"rank {rank} never applies {value}: it has no STEP for it after its last backward")
        for value, updates in known.items():
            if value.kind != "param_shard" or value.index in program.scattered:
                continue
            if known.get(param(value.index), 0) != updates:
                raise ProgramError(
                    f"rank {rank} ends with {param(value.index)} of which it has updated its slice only: it has no"
                    " ALL_GATHER for it after its last STEP"
                )
        if program.state:
            self._check_updated(rank)
            self._check_tiers(rank)
        for group, updates in self.unaveraged[rank].items():
            if updates:
                raise ProgramError(
                    f"rank {rank} ends with param({group}) of its own: after its last STEP it is not averaged over"
                    " the replicas"
                )

    def _check_updated(self, rank: int) -> None:
        """A rank has a STEP for every trainable parameter and optimizer state that it holds."""
        program, STEP = self.program, Op.STEP
        row = program.ranks[rank]
        updated = {g for op, ins in zip(program.ops[rank], row, strict=True) if op is STEP for g in ins.layers}
        for value in sorted(program.state[rank]):
            kept = home(value).kind in ("param", "param_shard", *_STATES)
            if kept and value.index not in updated and program.groups[value.index].trainable:
                raise ProgramError(f"rank {rank} holds {value}, but has no STEP for it")

    def _check_tiers(self, rank: int) -> None:
        """At the end all copies of a parameter or an optimizer state have had the same updates, in all tiers."""
        known = self.known[rank]
        newest: dict[int, int] = {}  # group -> the most updates of its copies in slower tiers
        for value, updates in known.items():
            if tier(value) != "device" and "grad" not in value.kind:
                newest[value.index] = max(newest.get(value.index, 0), updates)
        for value in sorted(self.program.state[rank]) if newest else ():
            copied = home(value).kind != "residual" and (tier(value) != "device" or "param" in value.kind)
            found = known.get(value, 0)
            if copied and value.index in newest and found != newest[value.index]:
                raise ProgramError(
                    f"rank {rank} ends with {value} after {several(found, 'update')}, but with another"
                    f" copy after {newest[value.index]}: it was not copied after the last STEP"
                )

    # copies, forwards and backwards

    def _copy(self, rank: int, index: int, ins: Instruction) -> None:
        source, target = ins.reads[0], ins.writes[0]
        if source.microbatch >= 0:
            return
        known = self.known[rank]
        found = known.get(source, 0)
        if home(source).kind == "param":
            self._check_round(rank, index, source.index, found)
        newer = known.get(target, 0) if "grad" not in target.kind else 0
        if newer > found:
            what = f" writes {source} after {several(found, 'update')} over {target} after"
            raise self._refuse(rank, index, f"{what} {newer}: an update is lost")
        if (
            "grad" in source.kind
        ):  # the device's gradient is empty after it was copied to the host, even if its bucket stays
            known.pop(source, None)
        slice_of_it = home(source).kind == "param_shard" and target.kind == "param"
        known[param_shard(target.index) if slice_of_it else target] = found

    def _compute(self, rank: int, index: int, ins: Instruction) -> None:
        """A forward or backward uses the parameters of its step. A backward adds to gradients."""
        known = self.known[rank]
        for value in ins.reads:
            kind = value[0]
            if kind != "param" and kind != "host param":
                continue
            if known.get(value, 0) == ins.step:
                self._check_round(rank, index, value.index, ins.step)
            elif self.program.groups[value.index].trainable:
                done = several(known.get(value, 0), "update")
                what = f" of step {ins.step} uses {value} after {done}"
                raise self._refuse(rank, index, f"{what}; a synchronous program promises {ins.step}")
        op = ins.op
        if op is Op.BACKWARD or op is Op.BACKWARD_WEIGHT:
            self._contribute(rank, ins, self.first_bit[rank] + ins.microbatch)

    def _contribute(self, rank: int, ins: Instruction, bit: int) -> None:
        known = self.known[rank]
        for value in ins.writes:
            kind = value[0]
            if kind == "grad" or kind == "host grad":
                slots, parts = self.bits[value.index], self.parts[value.index]
                for layer in ins.layers:
                    if layer in slots:
                        own = bit if parts == 1 else bit * parts + self.program.part(rank, value.index, "P")[0]
                        known[value] = known.get(value, 0) | 1 << (slots[layer] + own)

    # collectives

    def _bring(self, rank: int, ins: Instruction) -> dict[int, int]:
        """What a rank adds to a collective, by group. It is recorded when the rank joins, because it can change
        later."""
        known = self.known[rank]
        if ins.op is Op.ALL_GATHER:
            return {g: known.get(param_shard(g), 0) for g in ins.layers}
        if ins.op is Op.REDUCE_SCATTER:
            freed = {value.index for value in ins.frees if value.kind == "grad"}
            return {g: known.pop(grad(g), 0) if g in freed else known.get(grad(g), 0) for g in ins.layers}
        if _averages(ins):
            return {v.index: known.get(v, 0) for v in ins.reads}
        return {v.index: known.get(v, 0) for v in ins.reads if "grad" in v.kind and v.index in ins.layers}

    def _of_all(self, ins: Instruction, brought: dict[int, dict[int, int]]) -> dict[int, dict[int, int]]:
        """What all ranks add to a collective. (Of a NORM, which only looks at it, those in `ranks` are enough.)"""
        if len(brought) == len(ins.group) or ins.op is Op.NORM:
            return brought
        masks = ins.op is not Op.ALL_GATHER and not _averages(ins)
        found, first = {}, self.program.representatives
        for r in ins.group:
            added = brought[first[r]]
            found[r] = {g: self._as_on(r, g, mask) for g, mask in added.items()} if masks else added
        return found

    def _given(self, of_each: Iterable[int]) -> list[int]:
        """Those of some ranks whose instructions are followed."""
        return [r for r in of_each if r in self.ranks]

    def _as_on(self, rank: int, group: int, mask: int) -> int:
        """The contributions that a rank has, from those that the rank which stands for it has."""
        program, parts = self.program, self.parts[group]
        count = self.own * parts
        size = program.replicas * count * len(program.groups[group].layers)
        mask = _turned(mask, program.replicas, count, program.replica(rank), size)
        return _turned(mask, parts, 1, program.part(rank, group, "P")[0], size) if parts > 1 else mask

    def _collect(self, rank: int, index: int, ins: Instruction, brought: dict[int, dict[int, int]]) -> None:
        """All ranks have joined a collective: set what they know now. `brought` has what each rank added, by group."""
        if ins.op is Op.NORM:
            return self._check_norm(rank, index, brought)
        for g in ins.layers:
            of_each = {r: found[g] for r, found in brought.items()}
            if ins.op is Op.ALL_GATHER:
                self._gather(rank, index, g, of_each)
            elif _averages(ins):
                self._average(rank, index, g, of_each)
            else:
                self._sum(rank, index, ins, g, of_each)

    def _sum(self, rank: int, index: int, ins: Instruction, g: int, of_each: dict[int, int]) -> None:
        total = 0
        for found in of_each.values():
            if total & found:
                raise self._twice(rank, index, g, total & found)
            total |= found
        if piece_of(ins):
            total = self._add_piece(rank, index, ins, total)
            if not ins.writes:
                return
        for r in self._given(of_each):
            if ins.op is Op.ALL_REDUCE:
                self.known[r][grad(g)] = total
                continue
            before = self.known[r].get(grad_shard(g), 0)
            if before & total:
                raise self._twice(rank, index, g, before & total)
            self.known[r][grad_shard(g)] = before | total

    def _add_piece(self, rank: int, index: int, ins: Instruction, total: int) -> int:
        """Add a summed piece of a gradient. The last piece writes the gradient: then return what all pieces contain."""
        g = ins.layers[0]
        begin, end = piece_of(ins) or (0, 0)
        pieces = self.pieces.setdefault((ins.group, g), [])
        if any(a < end and begin < b for a, b, _ in pieces):
            raise self._refuse(rank, index, f" sums bytes of grad({g}) that were summed before")
        pieces.append((begin, end, total))
        if not ins.writes:
            return total
        del self.pieces[ins.group, g]
        size = sum(self.program.groups[g].tensors)
        summed, last = sum(b - a for a, b, _ in pieces), max(b for _, b, _ in pieces)
        if summed != size or last > size:
            what = f" is the last piece of grad({g}), of which {summed} of {size} bytes were summed"
            raise self._refuse(rank, index, what)
        return reduce(and_, (found for *_, found in pieces))

    def _twice(self, rank: int, index: int, group: int, mask: int) -> ProgramError:
        program, ins = self.program, self.program.ranks[rank][index]
        why = f"grad({group}) was summed over these ranks before"
        if program.sharing > 1:
            if not program.groups[group].form and len({program.shard(r) for r in ins.group}) > 1:
                why = f"every rank that shares the layer has all of grad({group})"
            why += f"; {ins.op.value} is superfluous"
        return self._refuse(rank, index, f" counts {self.name(group, mask)} twice: {why}")

    def _gather(self, rank: int, index: int, group: int, updates: dict[int, int]) -> None:
        """All slices of a group are gathered: they must have the same version on all ranks."""
        if len(set(updates.values())) > 1:
            counts = ", ".join(f"{n} on rank {r}" for r, n in updates.items())
            raise self._refuse(rank, index, f" gathers slices after different numbers of updates: {counts}")
        for r in self._given(updates):
            self.known[r][param(group)] = updates[r]

    def _average(self, rank: int, index: int, group: int, updates: dict[int, int]) -> None:
        """The parameters of a group are averaged: all replicas must take part, each after the same number of
        updates."""
        found = {self.program.replica(r) for r in updates}
        if len(set(updates.values())) > 1 or len(found) < self.program.replicas:
            counts = ", ".join(f"{n} on rank {r}" for r, n in updates.items())
            what = f" averages param({group}) after different numbers of updates, or"
            raise self._refuse(rank, index, f"{what} not of all replicas: {counts}")
        for r in self._given(updates):
            if updates[r] != (newest := self.updated[r].get(group, 0)):
                what = f" averages param({group}) after {several(updates[r], 'update')}"
                raise self._refuse(rank, index, f"{what}, of which rank {r} has done {newest}")
        step, done = self.program.ranks[rank][index].step, updates[rank]
        due = done % self.local == 0 or done == self.program.updates  # (if it is not due, the next use is refused)
        if due and done != step + 1:
            what = (
                f" averages param({group}) after {several(done, 'update')}, but weighs replicas by their rows of step"
            )
            raise self._refuse(rank, index, f"{what} {step}; possible is step {done - 1}")
        for r in self._given(updates):
            self.unaveraged[r][group] = 0  # (of a copy in another tier it is known how many updates it has had)

    def _check_round(self, rank: int, index: int, group: int, updates: int) -> None:
        """The parameters that an instruction uses, or copies, were averaged when it was due, and at no other time.
        `updates` is how many they have had."""
        if not self.local or updates != self.updated[rank].get(group):
            return
        ins, found = self.program.ranks[rank][index], self.unaveraged[rank][group]
        due = updates % self.local if updates < self.program.updates else 0
        if found != due:
            what = f" of step {ins.step} uses param({group}) after {several(found, 'update')} by its replica alone; the"
            raise self._refuse(rank, index, f"{what} program promises {due}, with an average after every {self.local}")

    def _check_norm(self, rank: int, index: int, brought: dict[int, dict[int, int]]) -> None:
        """A NORM counts all gradients, and each of them is complete."""
        holds: list[set[int]] = [set() for _ in self.program.groups]
        for r in self.ranks if self.program.state else ():
            for value in self.program.state[r]:
                if home(value).kind in _STATES:
                    holds[value.index].add(r)
        for g, group in enumerate(self.program.groups):
            if not group.trainable:
                continue
            counted, holders = {r for r, found in brought.items() if g in found}, holds[g]
            if counted != holders:
                what = f" counts grad({g}) on ranks {sorted(counted)}; it is on"
                raise self._refuse(rank, index, f"{what} {sorted(holders)}")
            for r in counted:
                self._check_complete(rank, index, grad(g), brought[r][g])

    # updates

    def _all(self, group: int, rank: int = 0) -> int:
        """All contributions that the gradient of a group must have before a STEP. Where replicas train alone, these are
        only the contributions of the rank's own replica."""
        count = self.own * self.parts[group]
        size = self.program.replicas * count
        if not self.local:
            return (1 << size * len(self.program.groups[group].layers)) - 1
        own = ((1 << count) - 1) << self.program.replica(rank) * count
        return sum(own << first for first in self.bits[group].values())

    def _check_step(self, rank: int, index: int, ins: Instruction) -> None:
        if ins.stream == "host":
            return self._check_step_on_host(rank, index, ins)
        known = self.known[rank]
        for g in ins.layers:
            sliced = grad_shard(g) in ins.reads
            gradient, updated = (grad_shard(g), param_shard(g)) if sliced else (grad(g), param(g))
            found = known.get(gradient, 0)
            self._check_complete(rank, index, gradient, found)
            if self.local:
                self._step_of_replica(rank, index, g, found & ~self._all(g, rank))
            known[gradient] = 0
            done = known.get(updated, 0)
            if ins.step != done:
                raise self._refuse(rank, index, f" is update {done} of {gradient}, but belongs to step {ins.step}")
            known[updated] = done + 1
        for value in ins.writes:
            if value.kind in _STATES:
                known[value] = ins.step + 1

    def _check_step_on_host(self, rank: int, index: int, ins: Instruction) -> None:
        known = self.known[rank]
        for value in ins.reads:
            found = known.get(value, 0)
            if "grad" in value.kind:
                self._check_complete(rank, index, value, found)
                if self.local:
                    self._step_of_replica(rank, index, value.index, found & ~self._all(value.index, rank))
                known[value] = 0
                for gradient in (grad(value.index), grad_shard(value.index)):  # (those in a bucket stay allocated)
                    known.pop(gradient, None)
            elif value.kind.startswith("host ") and found != ins.step:
                raise self._refuse(rank, index, f" is update {found} of {value}, but belongs to step {ins.step}")
        for value in ins.writes:
            known[value] = ins.step + 1

    def _check_complete(self, rank: int, index: int, gradient: Value, found: int) -> None:
        missing = self._all(gradient.index, rank) & ~found
        if missing:
            what = f"{gradient} lacks {self.name(gradient.index, missing)}{self._lacking_sum(rank, gradient, missing)}"
            raise self._refuse(rank, index, f" comes before its gradients are complete: {what}")

    def _lacking_sum(self, rank: int, gradient: Value, missing: int) -> str:
        """With tensor parallelism, the sum that a gradient lacks: over ranks that share its layer, or over replicas."""
        program, g = self.program, gradient.index
        if program.sharing == 1:
            return ""
        for bit in (k for k in range(missing.bit_length()) if missing >> k & 1):
            rest, part = divmod(bit, self.parts[g])
            replica = rest % (program.replicas * program.microbatches) // program.microbatches
            mine = program.part(rank, g, "P")[0]
            own = bit - part + mine  # (what this rank makes itself of the same micro-batch)
            if part != mine and not missing >> own & 1 and self.parts[g] > 1:
                ranks = ",".join(map(str, program.sharers(rank, program.spread(g, "P"))))
                return f"; ALL_REDUCE of grad({g}) over {ranks}, the ranks that share its layer, is missing"
            if replica != program.replica(rank):
                return f"; ALL_REDUCE of grad({g}) over replicas is missing"
        return ""  # (a micro-batch of its own)

    def _step_of_replica(self, rank: int, index: int, group: int, foreign: int) -> None:
        """A STEP of a replica alone: of parameters that are averaged when it is due, and at no other time. There may be
        no `foreign` contributions, which are those of other replicas."""
        self._check_round(rank, index, group, self.updated[rank].get(group, 0))
        self.unaveraged[rank][group] = self.unaveraged[rank].get(group, 0) + 1
        self.updated[rank][group] = self.program.ranks[rank][index].step + 1
        if foreign:
            whose = self.name(group, foreign)
            raise self._refuse(rank, index, f": the replica's own update of param({group}) uses {whose}")

    def _refuse(self, rank: int, index: int, what: str) -> ProgramError:
        """The error for an instruction; `what` follows its name."""
        return wrong(self.program, rank, index, what)

    def name(self, group: int, mask: int) -> str:
        """The first contribution in a mask, in words."""
        bit = (mask & -mask).bit_length() - 1
        bit, part = divmod(bit, self.parts[group])
        slot, rest = divmod(bit, self.program.replicas * self.own)
        replica, place = divmod(rest, self.own)
        step, i = divmod(place, self.program.microbatches)
        layer = self.program.title(self.program.groups[group].layers[slot])
        whose = f" of step {step}" if self.own > self.program.microbatches else ""
        whose += f" of replica {replica}" if self.program.replicas > 1 else ""
        which = f"part {part} of " if self.parts[group] > 1 else ""
        return f"{which}micro-batch {i}{whose} (layer {layer})"


def _averages(ins: Instruction) -> bool:
    """Whether a collective averages parameters."""
    return ins.op is Op.ALL_REDUCE and bool(ins.reads) and ins.reads[0].kind == "param"


def _turned(mask: int, fields: int, width: int, by: int, size: int) -> int:
    """A mask of `size` bits, cut into runs of `fields` fields of `width` bits: in each run every field moves up by so
    many places, and the last ones to the beginning."""
    low = _lowest((fields - by) * width, fields * width, size)
    return (mask & low) << by * width | (mask & ~low) >> (fields - by) * width


@lru_cache(64)
def _lowest(count: int, run: int, size: int) -> int:
    """A mask of `size` bits with the lowest `count` bits of every run of `run` bits."""
    return ((1 << size) - 1) // ((1 << run) - 1) * ((1 << count) - 1)
