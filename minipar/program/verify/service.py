"""How the verifier checks a program with parameter servers: can it run, and does it keep its contract?

  1. each worker   In every step it runs each micro-batch forward and backward exactly once, after it has pulled its
                   parameters and before it pushes its gradients, which are then complete.
  2. each link     A server accepts the pushes of a worker in order. A worker pulls what the server replies.
  3. all together  Walking the lists ends. All parameters of a step have one version. An update takes each gradient
                   once, and no gradient of parameters that are older than the contract allows. In mode sync an update
                   takes all gradients of a step.

In the other modes servers decide as they run. Their program has no instructions for servers before it has run; then
only the first question is checked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from minipar.errors import ProgramError
from minipar.program import (
    COPIES,
    Instruction,
    Op,
    Program,
    Staleness,
    Turn,
    Value,
    grad,
    home,
    param,
    pushed,
    residual,
    served,
    served_state,
)  # fmt: skip
from minipar.program.diagnostics import at, refuse
from minipar.program.rule import Place
from minipar.wording import several


def check_workers(program: Program) -> None:
    """Check the first question. Errors: ProgramError."""
    _check_names(program)
    wanted = program.microbatches
    for rank in range(program.workers):
        done: dict[tuple[str, int, int], set[int]] = defaultdict(set)
        pushed: dict[tuple[int, int], set[int]] = defaultdict(set)
        for index, ins in enumerate(program.ranks[rank]):
            what = "forward" if ins.op is Op.FORWARD else "backward" if ins.op in _GRADIENTS else ""
            for layer in ins.layers if what else ():
                if ins.microbatch in done[what, layer, ins.step]:
                    reason = f"micro-batch {ins.microbatch} is doubled: {at(program, rank, index)} is not the first"
                    raise refuse(program, rank, index, reason)
                done[what, layer, ins.step].add(ins.microbatch)
            for g in ins.layers if ins.op is Op.PUSH else ():
                if ins.peer in pushed[g, ins.step]:
                    reason = f"{at(program, rank, index)} pushes grad({g}) of step {ins.step} again"
                    raise refuse(program, rank, index, reason)
                pushed[g, ins.step].add(ins.peer)
                for layer in program.groups[g].layers:
                    there = done["backward", layer, ins.step]
                    if len(there) < wanted:
                        i = min(set(range(wanted)) - there)
                        reason = f"{at(program, rank, index)} pushes before the gradient is complete: grad({g}) lacks"
                        raise refuse(program, rank, index, f"{reason} micro-batch {i} (layer {layer})")
        steps = {ins.step for ins in program.ranks[rank] if ins.op is Op.PULL}
        every = not isinstance(program.contract, Staleness) or not any(program.ranks[program.workers :])
        if lost := set(range(program.steps)) - steps if every else ():
            raise ProgramError(f"rank {rank} leaves step {min(lost)} out: it pulls no parameters for it")
        if more := steps - set(range(program.steps)):
            raise ProgramError(
                f"rank {rank} pulls parameters for step {min(more)}; steps count from 0 to {program.steps - 1}"
            )
        for step in sorted(steps):
            for layer in range(program.layers):
                if len(done["forward", layer, step]) < wanted:
                    i = min(set(range(wanted)) - done["forward", layer, step])
                    reason = f"micro-batch {i} is missing: rank {rank} does not run the forward of layer {layer}"
                    raise ProgramError(f"{reason} on it (step {step})")
            for g, group in enumerate(program.groups):
                if group.trainable and not pushed[g, step]:
                    raise ProgramError(f"rank {rank} never pushes grad({g}) of step {step}")


_GRADIENTS = (Op.BACKWARD, Op.BACKWARD_WEIGHT)
_WORK = (Op.FORWARD, Op.RECOMPUTE, Op.BACKWARD_INPUT, *_GRADIENTS)


def _check_names(program: Program) -> None:
    """Every message between a worker and a server names groups that the server keeps, and the values of these
    groups."""
    assert program.serving is not None
    if (program.serving.mode == "sync") == isinstance(program.contract, Staleness):
        contract = type(program.contract).__name__
        raise ProgramError(
            f"mode={program.serving.mode} with contract {contract}: sync is Synchronous, others Staleness"
        )
    servers = range(program.workers, len(program.ranks))
    shares = {rank: {v.index for v in program.state[rank] if v.kind == "served"} for rank in servers}
    for rank, row in enumerate(program.ranks):
        pulled: dict[int, dict[int, int]] = {}  # group -> server -> step
        applied = 0
        for index, ins in enumerate(row):
            works = rank < program.workers
            if ins.op not in ((*_WORK, *COPIES, Op.PULL, Op.PUSH) if works else (Op.ACCEPT, Op.APPLY, Op.REPLY)):
                who = "worker" if works else "server"
                raise refuse(
                    program, rank, index, f"{at(program, rank, index)}: rank {rank} is a {who}, which does not"
                )
            if ins.stream == "host" and ins.op not in _WORK:
                raise refuse(program, rank, index, f"{at(program, rank, index)}: only layers are computed on the host")
            if ins.op in COPIES:
                continue
            if ins.op in _WORK:
                _check_work(program, rank, index, pulled, shares)
                continue
            server = ins.peer if works else rank
            partners = servers if works else range(program.workers)
            if ins.op is not Op.APPLY and ins.peer not in partners:
                raise refuse(program, rank, index, f"{at(program, rank, index)}: rank {ins.peer} is no partner for it")
            whole = shares[server] if ins.op is Op.APPLY else set(ins.layers)
            if (
                not ins.layers
                or len(set(ins.layers)) < len(ins.layers)
                or not whole <= set(ins.layers) <= shares[server]
            ):
                told = ", ".join(map(str, sorted(shares[server])))
                reason = (
                    f"{at(program, rank, index)}: server {server} keeps groups {told}; possible are these, each once"
                )
                raise refuse(program, rank, index, reason)
            _check_values(program, rank, index, applied)
            applied += ins.op is Op.APPLY
            for g in ins.layers if ins.op is Op.PULL else ():
                if pulled.get(g, {}).get(server) == ins.step:
                    reason = f"{at(program, rank, index)} pulls param({g}) of step {ins.step} again; possible is once"
                    raise refuse(program, rank, index, reason)
                pulled.setdefault(g, {})[server] = ins.step


def _check_work(
    program: Program, rank: int, index: int, pulled: dict[int, dict[int, int]], shares: dict[int, set[int]]
) -> None:
    """A layer uses the parameters that were pulled for its step, and a backward writes the gradients of all of them."""
    ins = program.ranks[rank][index]
    for g in {g for layer in ins.layers for g in program.groups_of_layer[layer] if program.groups[g].trainable}:
        for server, share in shares.items():
            if g in share and pulled.get(g, {}).get(server) != ins.step:
                reason = f"{at(program, rank, index)} uses param({g}), which was not pulled from rank {server} for step"
                raise refuse(program, rank, index, f"{reason} {ins.step}")
        if ins.op in _GRADIENTS and grad(g) not in map(home, ins.writes):
            raise refuse(program, rank, index, f"{at(program, rank, index)} makes grad({g}), but does not write it")


def _check_values(program: Program, rank: int, index: int, applied: int) -> None:
    """A message names the values of its groups. An update names all values that it changes."""
    ins, where = program.ranks[rank][index], at(program, rank, index)
    groups = ins.layers
    reads, writes = set(ins.reads), set(ins.writes)
    if ins.op is Op.APPLY:
        state = {kind(g) for g in groups for kind in (served, served_state)}
        gradients = {v for v in reads if v.kind == "pushed"}
        right = writes == state <= reads and gradients <= set(ins.frees)
        if ins.step != applied:
            raise refuse(
                program, rank, index, f"{where} is update {applied} of its server, but is called step {ins.step}"
            )
    elif ins.op is Op.ACCEPT:
        right = ins.writes == tuple(pushed(g, ins.peer, ins.step) for g in groups) and not reads
    elif ins.op is Op.PULL:
        right = set(map(home, writes)) == set(map(param, groups)) and not reads
    else:
        left_out = set(map(residual, groups)) if ins.op is Op.PUSH and program.compress.startswith("topk") else set()
        named = set(map(grad if ins.op is Op.PUSH else served, groups))
        right = set(map(home, reads)) == named | left_out and writes == left_out
        kept = [v for v in reads - left_out - set(ins.frees) if not _parted(program, rank, index, v)]
        if ins.op is Op.PUSH and kept:  # (a gradient that stays would be pushed again in the next step)
            reason = f"{where} keeps {min(kept)}; possible is frees with all that is pushed"
            raise refuse(program, rank, index, reason)
    if not right:
        raise refuse(program, rank, index, f"{where} names other values than those of its groups")


def check_service(program: Program, turns: Iterable[Turn]) -> None:
    """Check the third question, if servers have instructions. `turns` is `order(program)`. Errors: ProgramError."""
    versions = _Versions(program)
    for rank, index, ins, waited, _ in turns:
        if ins is None:
            continue
        if ins.op is Op.PULL:
            versions.pull(rank, index, ins, versions.replied[waited[0].source])
        elif ins.op is Op.REPLY:
            versions.replied[rank, index] = versions.version[rank]
        elif ins.op is Op.APPLY:
            versions.apply(rank, index, ins)


class _Versions:
    """The versions of the parameters while a program is walked.

    version   for each server, the number of its updates
    replied   for each REPLY, the version that it sent
    used      for each worker and step, the version from which its gradients are computed
    applied   (server, group, worker, step) of each gradient that went into an update
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.version = [0] * len(program.ranks)
        self.replied: dict[Place, int] = {}
        self.used: dict[tuple[int, int], int] = {}
        self.applied: set[tuple[int, int, int, int]] = set()

    def pull(self, rank: int, index: int, ins: Instruction, version: int) -> None:
        where, synchronous = at(self.program, rank, index), not isinstance(self.program.contract, Staleness)
        if self.used.setdefault((rank, ins.step), version) != version:
            reason = f"{where} brings version {version}, but another server's parameters of this step are of"
            raise refuse(self.program, rank, index, f"{reason} version {self.used[rank, ins.step]}")
        if synchronous and version != ins.step:
            reason = (
                f"{where} brings parameters after {several(version, 'update')}; a synchronous program "
                f"promises {ins.step}"
            )
            raise refuse(self.program, rank, index, reason)

    def apply(self, rank: int, index: int, ins: Instruction) -> None:
        program, where, update = self.program, at(self.program, rank, index), self.version[rank]
        found: dict[int, set[tuple[int, int]]] = defaultdict(set)
        for value in ins.reads:
            if value.kind == "pushed":
                found[value.index].add((value.microbatch, value.step))
        for g in ins.layers:
            if found[g] != found[ins.layers[0]] or not found[g]:
                raise refuse(program, rank, index, f"{where} takes other gradients of grad({g}) than of the rest")
            for worker, step in found[g]:
                if (rank, g, worker, step) in self.applied:
                    reason = f"{where} takes what rank {worker} pushed of grad({g}) in step {step} twice"
                    raise refuse(program, rank, index, reason)
                self.applied.add((rank, g, worker, step))
        contract = program.contract
        for worker, step in found[ins.layers[0]] if ins.layers else ():
            late = update - self.used[worker, step]
            bound = contract.bound if isinstance(contract, Staleness) else 0
            if bound is not None and late > bound:
                reason = f"{where} takes a gradient of rank {worker} that is {several(late, 'update')} old"
                raise refuse(program, rank, index, f"{reason}; its contract allows {bound}")
        if not isinstance(contract, Staleness):
            missing = {(worker, update) for worker in range(program.workers)} - found[ins.layers[0]]
            if missing:
                worker = min(missing)[0]
                reason = f"{where} comes before all gradients are there: rank {worker}'s of step {update} is not read"
                raise refuse(program, rank, index, reason)
        self.version[rank] += 1


def staleness(program: Program) -> list[int]:
    """For each worker, the largest number of updates between the parameters that it pulled and the update that took its
    gradient; 0 for servers."""
    worst = [0] * len(program.ranks)
    for worker, _, _, late in ages(program):
        worst[worker] = max(worst[worker], late)
    return worst


def ages(program: Program) -> list[tuple[int, int, int, int]]:
    """For every gradient in an update: its worker, its step, the update, and its age in updates."""
    used: dict[tuple[int, int], int] = {}
    found = []
    version = 0
    for ins in program.ranks[program.workers] if program.serving else ():
        if ins.op is Op.REPLY:
            used[ins.peer, ins.step] = version
        elif ins.op is Op.APPLY:
            taken = dict.fromkeys((v.microbatch, v.step) for v in ins.reads if v.kind == "pushed")
            found += [(worker, step, version, version - used[worker, step]) for worker, step in taken]
            version += 1
    return found


def _parted(program: Program, rank: int, index: int, value: Value) -> bool:
    """Whether another part of a pushed gradient goes to another server before the gradient is written again."""
    for ins in program.ranks[rank][index + 1 :]:
        if value in ins.writes:
            return False
        if ins.op is Op.PUSH and value in ins.reads:
            return ins.peer != program.ranks[rank][index].peer
    return False
