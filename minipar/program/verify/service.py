"""How the verifier checks a program with parameter servers: can it run, and does it keep its contract?

  1. each worker   In every step it runs each micro-batch forward and backward exactly once (verifier.py), after it has
                   pulled its parameters and before it pushes its gradients, which are then complete.
  2. each link     A server accepts the pushes of a worker in order. A worker pulls what the server replies.
  3. all of them   Walking the lists ends. All parameters of a worker's step have one version. An update takes, on all
                   servers, the gradients of the same workers, each once, and none of parameters that are older than
                   the contract allows. In mode sync an update takes all gradients of a step; in modes async and ssp
                   that of one worker.

In the other modes servers decide as they run. Their program has no instructions for servers before it has run; then
the first question is checked.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from minipar.errors import PlanError, ProgramError
from minipar.program import (
    Instruction,
    Op,
    Program,
    Staleness,
    Turn,
    Value,
    grad,
    param,
    pushed,
    residual,
    served,
    served_state,
)  # fmt: skip
from minipar.program.diagnostics import wrong
from minipar.program.rule import Place
from minipar.program.server_rule import Mode
from minipar.program.verify import fields
from minipar.wording import several

_GRADIENTS = (Op.BACKWARD, Op.BACKWARD_WEIGHT)
_WORK = (Op.FORWARD, Op.RECOMPUTE, Op.BACKWARD_INPUT, *_GRADIENTS)


def check_workers(program: Program) -> None:
    """Check the first question. Errors: ProgramError."""
    _check_serving(program)
    for rank in range(len(program.ranks)):
        _check_names(program, rank)
    every = not isinstance(program.contract, Staleness) or program.undecided
    for rank in range(program.workers):
        _check_steps(program, rank, every)
        _check_worker(program, rank)


def _check_serving(program: Program) -> None:
    """The mode and the contract fit each other, and every worker is a replica."""
    assert program.serving is not None
    if program.workers != program.replicas:
        replicas = several(program.replicas, "replica")
        raise ProgramError(f"serving: {several(program.workers, 'worker')} for {replicas}; possible is one rank each")
    if program.serving.mode != "sync" and not isinstance(program.contract, Staleness):
        contract = type(program.contract).__name__
        raise ProgramError(f"mode={program.serving.mode} with contract {contract}: possible is Staleness, or mode sync")
    if program.serving.mode == "sync" and program.undecided:
        raise ProgramError("mode=sync: servers without instructions; what they do is known before the run")
    try:
        Mode.parse(program.serving.mode, program.replicas)
    except PlanError as error:
        raise ProgramError(f"serving: {error}") from None


def steps_of(program: Program, rank: int) -> Sequence[int]:
    """The steps for which a worker pulls parameters."""
    return sorted({ins.step for ins in program.ranks[rank] if ins.op is Op.PULL})


def _check_steps(program: Program, rank: int, every: bool) -> None:
    """A worker pulls parameters for its steps; if `every`, for all of them."""
    steps = set(steps_of(program, rank))
    if lost := set(range(program.steps)) - steps if every else ():
        raise ProgramError(f"rank {rank} leaves step {min(lost)} out: it pulls no parameters for it")
    if more := steps - set(range(program.steps)):
        raise ProgramError(
            f"rank {rank} pulls parameters for step {min(more)}; steps count from 0 to {program.steps - 1}"
        )


def _check_worker(program: Program, rank: int) -> None:
    """A worker takes one step after the other, and pushes every gradient once, when it is complete."""
    everything = set(range(program.microbatches))
    done: dict[tuple[int, int], set[int]] = defaultdict(set)  # (layer, step) -> micro-batches that have had a backward
    sent: dict[tuple[int, int], set[int]] = defaultdict(set)  # (group, step) -> servers that have the gradient
    present = 0
    for index, ins in enumerate(program.ranks[rank]):
        if ins.step < present:
            what = f" is of step {ins.step}, and step {present} has begun; possible is one"
            raise wrong(program, rank, index, f"{what} step after the other")
        present = ins.step
        for layer in ins.layers if ins.op in _GRADIENTS else ():
            done[layer, ins.step].add(ins.microbatch)
        for g in ins.layers if ins.op is Op.PUSH else ():
            if ins.peer in sent[g, ins.step]:
                raise wrong(program, rank, index, f" pushes grad({g}) of step {ins.step} again")
            sent[g, ins.step].add(ins.peer)
            for layer in program.groups[g].layers:
                if lost := everything - done[layer, ins.step]:
                    what = f" pushes before the gradient is complete: grad({g}) lacks"
                    raise wrong(program, rank, index, f"{what} micro-batch {min(lost)} (layer {layer})")
    for step in steps_of(program, rank):
        for g, group in enumerate(program.groups):
            if group.trainable and not sent[g, step]:
                raise ProgramError(f"rank {rank} never pushes grad({g}) of step {step}")


def _check_names(program: Program, rank: int) -> None:
    """Every message between a worker and a server names groups that the server keeps, and the values of these
    groups."""
    servers = range(program.workers, len(program.ranks))
    shares = {server: {v.index for v in program.state[server] if v.kind == "served"} for server in servers}
    pulled: dict[int, dict[int, int]] = {}  # group -> server -> step
    updates: Counter[int] = Counter()  # of each group
    works = rank < program.workers
    known = (*_WORK, Op.PULL, Op.PUSH) if works else (Op.ACCEPT, Op.APPLY, Op.REPLY)
    for index, ins in enumerate(program.ranks[rank]):
        if ins.op not in known:
            who = "worker" if works else "server"
            raise wrong(program, rank, index, f": rank {rank} is a {who}, which does not")
        if ins.stream == "host":
            raise wrong(program, rank, index, ": a worker computes nothing on the host")
        if ins.op in _WORK:
            _check_work(program, rank, index, pulled, shares)
            continue
        if type(ins.microbatch) is not int:
            fields.check_instruction(rank, index, ins)
        partners = servers if works else range(program.workers)
        if ins.op is not Op.APPLY and ins.peer not in partners:
            raise wrong(program, rank, index, f": rank {ins.peer} is no partner for it")
        server = ins.peer if works else rank
        here = set(ins.layers)
        right = here == shares[server] if ins.op is Op.APPLY else bool(here) and here <= shares[server]
        if not right or len(here) < len(ins.layers):
            groups = ", ".join(map(str, sorted(shares[server])))
            what = f": server {server} keeps groups {groups}; possible are these, each once"
            raise wrong(program, rank, index, what)
        _check_values(program, rank, index, updates)
        updates.update(ins.layers if ins.op is Op.APPLY else ())
        for g in ins.layers if ins.op is Op.PULL else ():
            found = pulled.setdefault(g, {})
            if found.get(server) == ins.step:
                raise wrong(program, rank, index, f" pulls param({g}) of step {ins.step} again; possible is once")
            found[server] = ins.step


def _check_work(
    program: Program, rank: int, index: int, pulled: dict[int, dict[int, int]], shares: dict[int, set[int]]
) -> None:
    """A layer uses the parameters that were pulled for its step, and a backward writes the gradients of all of them."""
    ins = program.ranks[rank][index]
    for g in {g for layer in ins.layers for g in program.groups_of_layer[layer] if program.groups[g].trainable}:
        here = {server for server, step in pulled.get(g, {}).items() if step == ins.step}
        for server in sorted({s for s, share in shares.items() if g in share} - here):
            what = f" uses param({g}), which was not pulled from rank {server} for step"
            raise wrong(program, rank, index, f"{what} {ins.step}")
        if ins.op in _GRADIENTS and grad(g) not in ins.writes:
            raise wrong(program, rank, index, f" makes grad({g}), but does not write it")


def _check_values(program: Program, rank: int, index: int, updates: Counter[int]) -> None:
    """A message names the values of its groups. An update names all values that it changes."""
    ins = program.ranks[rank][index]
    groups = ins.layers
    reads, writes = set(ins.reads), set(ins.writes)
    if ins.op is Op.APPLY:
        state = {kind(g) for g in groups for kind in (served, served_state)}
        gradients = {v for v in reads if v.kind == "pushed"}
        right = writes == state <= reads and gradients <= set(ins.frees)
        for g in groups:
            if ins.step != updates[g]:
                what = f" is update {updates[g]} of group {g} at its server, but is called step {ins.step}"
                raise wrong(program, rank, index, what)
    elif ins.op is Op.ACCEPT:
        right = ins.writes == tuple(pushed(g, ins.peer, ins.step) for g in groups) and not reads
    elif ins.op is Op.PULL:
        right = writes == set(map(param, groups)) and not reads
    else:
        left_out = set(map(residual, groups)) if ins.op is Op.PUSH and program.compress.startswith("topk") else set()
        named = set(map(grad if ins.op is Op.PUSH else served, groups))
        right = reads == named | left_out and writes == left_out
        kept = [v for v in reads - left_out - set(ins.frees) if not _pushed_later(program, rank, index, v)]
        if ins.op is Op.PUSH and kept:  # (a gradient that stays would be pushed again in the next step)
            raise wrong(program, rank, index, f" keeps {min(kept)}; possible is frees with all that is pushed")
    if not right:
        raise wrong(program, rank, index, " names other values than those of its groups")


def _pushed_later(program: Program, rank: int, index: int, value: Value) -> bool:
    """Whether another part of a pushed gradient goes to another server before the gradient is written again."""
    for ins in program.ranks[rank][index + 1 :]:
        if value in ins.writes:
            return False
        if ins.op is Op.PUSH and value in ins.reads:
            return ins.peer != program.ranks[rank][index].peer
    return False


def check_service(program: Program, turns: Iterable[Turn]) -> None:
    """Check the third question, as far as servers have instructions. `turns` is `order(program)`. Errors:
    ProgramError."""
    versions = _Versions(program)
    for rank, index, ins, waited, _ in turns:
        if ins is None or program.undecided:
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
    used      for each worker and step, the version that it has pulled for it
    applied   (server, group, worker, step) of each gradient that went into an update
    taken     for each update, what the first server to make it has taken: that server, and workers with their steps
    bound     how many updates may be made between a pull and the update with the gradients of its step; None: any
              number
    """

    def __init__(self, program: Program) -> None:
        assert program.serving is not None
        self.program = program
        self.mode = Mode.parse(program.serving.mode, program.replicas)
        self.synchronous = not isinstance(program.contract, Staleness)
        self.bound = getattr(program.contract, "bound", 0)
        self.version: Counter[int] = Counter()
        self.replied: dict[Place, int] = {}
        self.used: dict[tuple[int, int], int] = {}
        self.applied: set[tuple[int, int, int, int]] = set()
        self.taken: dict[int, tuple[int, set[tuple[int, int]]]] = {}

    def pull(self, rank: int, index: int, ins: Instruction, version: int) -> None:
        used = self.used.setdefault((rank, ins.step), version)
        if used != version:
            what = f" brings version {version}, but other parameters of this step are of version {used}"
            raise wrong(self.program, rank, index, what)
        if self.synchronous and version != ins.step:
            what = f" brings parameters after {several(version, 'update')}; a synchronous program promises {ins.step}"
            raise wrong(self.program, rank, index, what)

    def apply(self, rank: int, index: int, ins: Instruction) -> None:
        program, update = self.program, self.version[rank]
        found: dict[int, set[tuple[int, int]]] = {g: set() for g in ins.layers}  # group -> workers and steps
        for value in ins.reads:
            if value.kind == "pushed":
                found[value.index].add((value.microbatch, value.step))
        for g, workers in found.items():
            self._check_taken(rank, index, g, workers)
            missing = {(worker, update) for worker in range(program.workers)} - workers if self.synchronous else ()
            if missing:
                what = f" comes before all gradients are there: rank {min(missing)[0]}'s"
                raise wrong(program, rank, index, f"{what} of step {update} is not read")
        self.version[rank] += 1

    def _check_taken(self, rank: int, index: int, g: int, workers: set[tuple[int, int]]) -> None:
        """The gradients of a group that an update takes."""
        program, update = self.program, self.version[rank]
        other, first = self.taken.setdefault(update, (rank, workers))
        if not self.synchronous and workers != first:
            what = f" takes gradients of grad({g}) of other replicas or steps than update {update}"
            raise wrong(program, rank, index, f"{what} does elsewhere (on rank {other})")
        if self.mode.each and len(workers) > 1:
            what = f" takes gradients of {several(len(workers), 'replica')} or steps"
            raise wrong(program, rank, index, f"{what}; with mode={self.mode} each is an update of its own")
        if not workers:
            raise wrong(program, rank, index, f" takes no gradient of grad({g})")
        for worker, step in sorted(workers):
            if (rank, g, worker, step) in self.applied:
                what = f" takes what rank {worker} pushed of grad({g}) in step {step} twice"
                raise wrong(program, rank, index, what)
            self.applied.add((rank, g, worker, step))
            age = update - self.used[worker, step]
            if self.bound is not None and age > self.bound:
                what = f" takes a gradient of rank {worker} that is {several(age, 'update')} old"
                raise wrong(program, rank, index, f"{what}; possible are at most {self.bound}")


def staleness(program: Program) -> list[int]:
    """For each worker, the largest number of updates between the parameters that it pulled and the update that took its
    gradient; 0 for servers."""
    worst = [0] * len(program.ranks)
    for worker, _, _, age in ages(program):
        worst[worker] = max(worst[worker], age)
    return worst


def ages(program: Program) -> list[tuple[int, int, int, int]]:
    """For every gradient in an update: its worker, its step, the update, and its age in updates."""
    found: dict[tuple[int, int, int, int], None] = {}
    for row in program.ranks[program.workers :] if program.serving else ():
        used: dict[tuple[int, int], int] = {}
        version = 0
        for ins in row:
            if ins.op is Op.REPLY:
                used[ins.peer, ins.step] = version
            elif ins.op is Op.APPLY:
                taken = dict.fromkeys((v.microbatch, v.step) for v in ins.reads if v.kind == "pushed")
                found |= {(worker, step, ins.step, ins.step - used[worker, step]): None for worker, step in taken}
                version = ins.step + 1
    return list(found)
