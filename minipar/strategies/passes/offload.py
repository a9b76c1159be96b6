"""Offload: values that are not needed for some time are kept in the host's memory or on the disk, and fetched in time.

    offload=activations     what autograd keeps; with checkpoint= also the checkpoints
                            F0 | OFFLOAD saved(0) | F1 | OFFLOAD saved(1) | F2 | F3 | B3 | FETCH saved(1) | B2 |
                            FETCH saved(0) | B1 | B0       copies run beside the computation, one backward ahead
    offload=parameters      FETCH param(0) | FETCH param(1) | F0 | FETCH param(2) | F1 ...      freed after each use
    offload=optimizer       B1 | OFFLOAD grad(1) | B0 | OFFLOAD grad(0)
                            STEP 0 on the host | FETCH param(0) | STEP 1 on the host | FETCH param(1)

Sources: Ren et al., "ZeRO-Offload", ATC 2021 (gradients go to the host, parameters come back: 2 P bytes each way);
Rajbhandari et al., "ZeRO-Infinity", SC 2021 (parameters, and the disk); Rhu et al., "vDNN", MICRO 2016 (activations).

With offload_to=disk an optimizer state and its copy of the parameters are fetched to the host for their group's STEP,
and written back after it. Copies in one direction run in order. What autograd keeps is copied while one compute
instruction runs. The compute instruction after that waits for the copy. So the memory is free at that point of the
program, whether the link is fast or slow. Two gradients may be under way to the host while the next one is computed;
each is freed when the program waits for its copy.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter

from minipar.program import (
    COLLECTIVES,
    Instruction,
    Op,
    Value,
    disk,
    host,
    optimizer_shard,
    optimizer_state,
    param,
    param_shard,
)
from minipar.strategies.draft import Draft
from minipar.strategies.rewriting import also_free, computes, copy_of, insert, of_groups, stays, uses

BESIDE = 1  # compute instructions that run while a saved value is copied away
IN_FLIGHT = 2  # gradients that are copied away at the same time; a third one waits for the first
SOON = 3  # a value that is read at most so many compute instructions after it was made stays on the device


@dataclass(frozen=True)
class Away:
    """What is offloaded, and to where (see `Plan`).

    what         kinds of values: activations, optimizer, parameters
    to           host or disk
    prefetch     how many layers ahead parameters are fetched
    sharded      groups of which the rank has a slice of the optimizer's state
    """

    what: tuple[str, ...]
    to: str
    prefetch: int
    sharded: frozenset[int]

    @staticmethod
    def of(draft: Draft, rank: int) -> Away:
        """The rules of a rank, from the plan and from what the rank holds."""
        plan, held = draft.plan, draft.state[rank]
        sharded = frozenset(value.index for value in held if value.kind == "optimizer_shard")
        return Away(tuple(plan.offload), plan.offload_to, plan.prefetch, sharded)

    @property
    def far(self) -> Callable[[Value], Value]:
        """The function that names a value's offloaded copy."""
        return disk if self.to == "disk" else host

    def updated(self, group: int) -> Value:
        """The parameters that a STEP on the host updates."""
        return param_shard(group) if group in self.sharded else param(group)


def offload(draft: Draft) -> Draft:
    """Values that are not needed for some time are kept on the host or the disk, and fetched in time."""
    rules = [Away.of(draft, rank) for rank in range(draft.layout.pp)]

    def rewrite(rank: int, row: Sequence[Instruction]) -> Sequence[Instruction]:
        rule, held = rules[rank], draft.state[rank]
        row = _fetch_parameters(row, rule, held) if "parameters" in rule.what else row
        row = _offload_activations(row, rule) if "activations" in rule.what else row
        return _offload_gradients(row, rule, held, draft.step) if "optimizer" in rule.what else row

    moved = draft.each(rewrite).each_update(lambda rank, row: _update(row, rules[rank]))
    return moved.each_state(lambda rank, held: _state(held, rules[rank]))


def _state(state: Iterable[Value], rule: Away) -> set[Value]:
    """What a rank holds between steps; `state` is what it would hold without offload."""
    found: set[Value] = set()
    for value in state:
        away = value.kind in ("param", "param_shard") and "parameters" in rule.what
        if value.kind in ("optimizer_state", "optimizer_shard") and "optimizer" in rule.what:
            away = True
            if "parameters" not in rule.what:
                found.add(rule.far(rule.updated(value.index)))
        found.add(rule.far(value) if away else value)
    return found


def _update(update: Sequence[Instruction], rule: Away) -> list[Instruction]:
    """A rank's update with one STEP for each group, which runs on the host if the optimizer's state is there."""
    if not {"optimizer", "parameters"}.intersection(rule.what):
        return list(update)
    return [each for ins in update for each in (_by_group(ins, rule) if ins.op is Op.STEP else [ins])]


def _by_group(step: Instruction, rule: Away) -> list[Instruction]:
    """A STEP as one for each group. What it needs is copied before the STEP of the group before it, and what is kept
    away is copied back after the STEP of the group after it."""
    steps: list[Instruction] = []
    before: list[tuple[int, Instruction]] = []
    fetched: list[tuple[int, Instruction]] = []  # new parameters, to the device
    after: list[tuple[int, Instruction]] = []
    for k, g in enumerate(step.layers):
        own, number = of_groups(step, (g,)), step.step
        here = next(v for v in own.writes if v.kind in ("param", "param_shard"))  # what the device has
        if "optimizer" not in rule.what:
            steps.append(own)
            before.append((k - 1, copy_of(Op.FETCH, rule.far(here), here, number)))
            after.append((k + 1, copy_of(Op.OFFLOAD, here, rule.far(here), number, (here,))))
            continue
        whole = "parameters" not in rule.what
        updated = rule.updated(g) if whole else here
        kept = (updated, optimizer_shard(g) if g in rule.sharded else optimizer_state(g))
        gradients = tuple(host(v) for v in own.reads if v.kind in ("grad", "grad_shard"))
        there = tuple(map(host, kept))
        steps.append(own._replace(reads=gradients + there, writes=there, frees=gradients, stream="host"))
        if whole:
            fetched.append((k, copy_of(Op.FETCH, host(updated), here, number)))
        if rule.to == "disk":
            # (the host's copy must stay until the device has been given the new parameters)
            waits = (here,) if whole else ()
            before += [(k - 1, copy_of(Op.FETCH, disk(v), host(v), number)) for v in kept]
            after += [(k + 1, copy_of(Op.OFFLOAD, host(v), disk(v), number, (host(v),), waits)) for v in kept]
    return insert(steps, before, [*fetched, *after])


# activations --------------------------------------------------------------------------------------------------------


def _offload_activations(row: Sequence[Instruction], rule: Away) -> list[Instruction]:
    compute = [k for k, ins in enumerate(row) if computes(ins)]
    idle: dict[Value, int] = {}  # value -> the compute instruction after which nobody needs it for now
    copies: list[tuple[int, Instruction]] = []
    fetches: list[tuple[int, Instruction]] = []
    changed = list(row)
    for n, k in enumerate(compute):
        ins = row[k]
        for value in ins.reads:
            if value in idle and n - idle[value] > SOON:
                away, far = idle[value], rule.far(value)
                copies.append((compute[away], copy_of(Op.OFFLOAD, value, far, value.step, (value,))))
                fetches.append((compute[n - 1], copy_of(Op.FETCH, far, value, value.step, (far,))))
                waiting = compute[away + 1 + BESIDE]  # (the compute instruction after the next one waits for the copy)
                changed[waiting] = changed[waiting]._replace(reads=(*changed[waiting].reads, far))
        # An output is a checkpoint and can be offloaded, unless the graph of a layer that reads it keeps it, too.
        graph = any(value.kind == "saved" for value in ins.writes)
        idle |= {v: n for v in ins.writes if v.kind == "saved"}
        idle |= {v: n for v in ins.reads if v.kind == "output" and not graph and v not in ins.frees}
        for value in (v for v in ins.reads if v.kind == "output" and graph):
            idle.pop(value, None)
    return insert(changed, fetches, copies)


def offloaded(instructions: Iterable[Instruction]) -> frozenset[Value]:
    """The saved values that the program copies away."""
    return frozenset(ins.reads[0] for ins in instructions if ins.op is Op.OFFLOAD and ins.reads[0].kind == "saved")


# gradients ----------------------------------------------------------------------------------------------------------


def _offload_gradients(row: Sequence[Instruction], rule: Away, held: Collection[Value], step: int) -> list[Instruction]:
    """`held` is what the rank would hold between steps. Gradients in it are in a buffer that stays, so they are not
    freed."""
    last: dict[int, tuple[int, Value]] = {}  # group -> place where its gradient is complete, and the gradient's value
    used: dict[Value, int] = {}  # where each value is read last (a sum may wait for the one before it)
    for k, ins in enumerate(row):
        used.update(dict.fromkeys(ins.reads, k))
        for value in ins.writes:
            if value.kind in ("grad", "grad_shard"):
                last[value.index] = (k, value)
    collectives = [k for k, ins in enumerate(row) if ins.op in COLLECTIVES and ins.op is not Op.ALL_GATHER]
    done: list[tuple[int, Value]] = []
    for _, (k, value) in sorted(last.items(), key=lambda entry: entry[1]):
        if k in collectives:  # a copy waits for the collective's result, so first start the next collectives
            later = collectives.index(k) + IN_FLIGHT
            k = max(used.get(value, 0), collectives[later] if later < len(collectives) else len(row) - 1)
        done.append((k, value))
    copies: list[tuple[int, Instruction]] = []
    for k, value in sorted(done, key=itemgetter(0)):
        waits = copies[-IN_FLIGHT][1].writes if len(copies) >= IN_FLIGHT else ()
        frees = () if value in held else (value,)
        copies.append((k, copy_of(Op.OFFLOAD, value, host(value), step, frees, waits)))
    return insert(row, after=copies)


# parameters ---------------------------------------------------------------------------------------------------------


def _fetch_parameters(row: Sequence[Instruction], rule: Away, held: Collection[Value]) -> list[Instruction]:
    """Parameters are fetched before they are used, and freed after it."""
    compute = [k for k, ins in enumerate(row) if computes(ins)]
    fetches: list[tuple[int, Instruction]] = []
    last: list[tuple[int, Value]] = []
    kept = {v for v in held if v.kind in ("param", "param_shard")}
    for value, read in uses(row, kept).items():
        if value.kind == "param_shard":
            # A slice has the frozen parameters of its layers, too, so that it stays until those gathered from it are
            # freed.
            ends = [k for k, ins in enumerate(row) if param(value.index) in ins.frees]
            spans = [(k, min(end for end in ends if end >= k)) for k in read if row[k].op is not Op.STEP]
        else:
            spans = list(stays(row, [k for k in read if computes(row[k])], rule.prefetch))
        there: list[tuple[int, int]] = []  # places of a FETCH and of the last use after it
        for start, end in spans:
            fetched = min(start, compute[max(0, bisect_left(compute, start) - rule.prefetch)])
            if there and fetched <= there[-1][1]:  # it stays if it would be fetched again before it is freed
                there[-1] = there[-1][0], end
            else:
                there.append((fetched, end))
        fetches += [(k, copy_of(Op.FETCH, rule.far(value), value, row[end].step)) for k, end in there]
        last += [(end, value) for _, end in there]
    return insert(also_free(row, last), before=fetches)
