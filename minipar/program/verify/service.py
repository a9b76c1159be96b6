"""How the verifier checks a program with parameter servers: can it run, and does it keep its contract?

  1. each worker   In every step it runs each micro-batch forward and backward exactly once, after it has pulled its
                   parameters and before it pushes its gradients, which are then complete.
  2. each link     A server accepts the pushes of a worker in order. A worker pulls what the server replies. Where these
                   are pieces of a group, they are all of it together, and do not overlap.
  3. all together  Walking the lists ends. All parameters of a replica's step have one version, on all its ranks. An
                   update takes the gradients of all ranks of a replica or none, on all servers those of the same
                   replicas, each once, and none of parameters that are older than the contract allows. In mode sync
                   an update takes all gradients of a step; in modes async and ssp those of one replica. Where stages do
                   not wait for each other, this holds for each stage of a replica.

In the other modes servers decide as they run. Their program has no instructions for servers before it has run; then
the first question is checked, and that the workers do not wait for each other for ever.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable

from minipar.errors import PlanError, ProgramError
from minipar.program import (
    COPIES,
    Instruction,
    Op,
    Portion,
    Program,
    Staleness,
    Turn,
    Value,
    grad,
    home,
    param,
    piece_in,
    piece_of,
    portions,
    pushed,
    repartitions,
    residual,
    served,
    served_state,
)  # fmt: skip
from minipar.program.diagnostics import at, refuse
from minipar.program.rule import Place
from minipar.program.server_rule import Mode
from minipar.wording import several


def check_workers(program: Program) -> None:
    """Check the first question. Errors: ProgramError."""
    _check_names(program)
    if program.virtual_workers:  # (virtual_workers.py follows their versions)
        for rank in range(program.workers):
            _check_pushes(program, rank)
        return
    every = not isinstance(program.contract, Staleness) or program.undecided
    replicas: dict[tuple[int, int], list[int]] = defaultdict(list)  # by replica, and shard of its layers
    for rank in range(program.workers):
        replicas[program.replica(rank), program.shard(rank)].append(rank)
    for ranks in replicas.values():
        done: dict[tuple[str, int, int], set[int]] = defaultdict(set)
        for rank in ranks:
            _check_steps(program, rank, every)
            _check_worker(program, rank, done)
        for step in sorted({ins.step for ins in program.ranks[ranks[0]] if ins.op is Op.PULL}):
            _check_whole(program, ranks, step, done)


def _check_pushes(program: Program, rank: int) -> None:
    """A rank pushes each gradient to each server once in an update."""
    found: set[tuple[int, int, Portion]] = set()
    for index, ins in enumerate(program.ranks[rank]):
        for portion in portions(ins) if ins.op is Op.PUSH else ():
            if (ins.step, ins.peer, portion) in found:
                reason = f"{at(program, rank, index)} pushes grad({portion}) of update {ins.step} again"
                raise refuse(program, rank, index, reason)
            found.add((ins.step, ins.peer, portion))


def _check_steps(program: Program, rank: int, every: bool) -> None:
    """A worker pulls parameters for its steps; if `every`, for all of them."""
    steps = {ins.step for ins in program.ranks[rank] if ins.op is Op.PULL}
    if lost := set(range(program.steps)) - steps if every else ():
        raise ProgramError(f"rank {rank} leaves step {min(lost)} out: it pulls no parameters for it")
    if more := steps - set(range(program.steps)):
        raise ProgramError(
            f"rank {rank} pulls parameters for step {min(more)}; steps count from 0 to {program.steps - 1}"
        )


def _check_worker(program: Program, rank: int, done: dict[tuple[str, int, int], set[int]]) -> None:
    """A rank does nothing twice, and pushes what is complete. `done`: by what, layer and step, the micro-batches of
    which the ranks of its replica have done it so far."""
    wanted: dict[tuple[int, int], set[int]] = defaultdict(set)  # (layer, step) -> micro-batches that it runs forward
    for ins in program.ranks[rank]:
        for layer in ins.layers if ins.op is Op.FORWARD else ():
            wanted[layer, ins.step].add(ins.microbatch)
    back: dict[tuple[int, int], set[int]] = defaultdict(set)
    pushed: dict[tuple[int, int], set[tuple[int, Portion]]] = defaultdict(set)  # by group and step, with the server
    for index, ins in enumerate(program.ranks[rank]):
        what = "forward" if ins.op is Op.FORWARD else "backward" if ins.op in _GRADIENTS else ""
        for layer in ins.layers if what else ():
            if ins.microbatch in done[what, layer, ins.step]:
                reason = f"micro-batch {ins.microbatch} is doubled: {at(program, rank, index)} is not the first"
                raise refuse(program, rank, index, reason)
            done[what, layer, ins.step].add(ins.microbatch)
            if what == "backward":
                back[layer, ins.step].add(ins.microbatch)
        for portion in portions(ins) if ins.op is Op.PUSH else ():
            g = portion.group
            if (ins.peer, portion) in pushed[g, ins.step]:
                reason = f"{at(program, rank, index)} pushes grad({portion}) of step {ins.step} again"
                raise refuse(program, rank, index, reason)
            pushed[g, ins.step].add((ins.peer, portion))
            for layer in program.groups[g].layers:
                if lost := wanted.get((layer, ins.step), set()) - back.get((layer, ins.step), set()):
                    reason = f"{at(program, rank, index)} pushes before the gradient is complete: grad({g}) lacks"
                    raise refuse(program, rank, index, f"{reason} micro-batch {min(lost)} (layer {layer})")
    held = {g for layer, _ in back for g in program.groups_of_layer[layer] if program.groups[g].trainable}
    for step in sorted({step for _, step in wanted}):
        for g in sorted(held):
            if not pushed[g, step]:
                raise ProgramError(f"rank {rank} never pushes grad({g}) of step {step}")
            if wrong := _wrong(program, g, [portion for _, portion in pushed[g, step]]):
                raise ProgramError(f"rank {rank} pushes grad({g}) of step {step} in pieces: {wrong}")


def _wrong(program: Program, group: int, found: Collection[Portion]) -> str:
    """What is wrong with the pieces of a group; "" if they are all of it, or if there are none."""
    if not any(portion.form for portion in found):
        return ""
    at = 0
    for portion in sorted(found):
        if portion.start != at or portion.end <= at:
            return f"{portion} comes after byte {at}"
        at = portion.end
    size = sum(program.groups[group].tensors)
    return "" if at == size else f"they end at byte {at} of {size}"


def _check_whole(program: Program, ranks: list[int], step: int, done: dict[tuple[str, int, int], set[int]]) -> None:
    """The ranks of a replica run the forward of every layer on every micro-batch, and the backward of all that is
    trained."""
    who, runs = f"rank {ranks[0]} does not", "run"
    if len(ranks) > 1:
        who, runs = f"none of the ranks {', '.join(map(str, ranks))}", "runs"
    for layer in range(program.layers):
        for what in ("forward", "backward") if layer >= program.first_trainable else ("forward",):
            if lost := set(range(program.microbatches)) - done[what, layer, step]:
                reason = f"micro-batch {min(lost)} is missing: {who} {runs} the {what} of layer {layer} on it"
                raise ProgramError(f"{reason} (step {step})")


_GRADIENTS = (Op.BACKWARD, Op.BACKWARD_WEIGHT)
_WORK = (Op.FORWARD, Op.RECOMPUTE, Op.BACKWARD_INPUT, *_GRADIENTS)
_MOVES = (Op.SEND, Op.RECV, *COPIES)


def _check_names(program: Program) -> None:
    """Every message between a worker and a server names groups that the server keeps, and the values of these
    groups."""
    assert program.serving is not None
    if program.serving.mode != "sync" and not isinstance(program.contract, Staleness):
        contract = type(program.contract).__name__
        raise ProgramError(f"mode={program.serving.mode} with contract {contract}: possible is Staleness, or mode sync")
    try:
        Mode.parse(program.serving.mode, program.replicas)
    except PlanError as error:
        raise ProgramError(f"serving: {error}") from None
    if program.virtual_workers and not isinstance(program.contract, Staleness):
        contract = type(program.contract).__name__
        raise ProgramError(f"serving: steps overlap, with contract {contract}; possible is Staleness")
    if program.virtual_workers and program.serving.mode.startswith("k-of-n"):
        raise ProgramError(
            f"serving: steps overlap, with mode={program.serving.mode}, in which replicas leave steps out; possible "
            "are sync, async, ssp"
        )
    servers = range(program.workers, len(program.ranks))
    shares = {rank: {v.index for v in program.state[rank] if v.kind == "served"} for rank in servers}
    for rank, row in enumerate(program.ranks):
        pulled: dict[int, dict[tuple[int, Portion], int]] = {}  # group -> server and portion -> step
        applied: Counter[Portion] = Counter()  # updates of each of them
        for index, ins in enumerate(row):
            works = rank < program.workers
            changes = works and repartitions(ins)  # (of ranks that share layers)
            known = (*_WORK, *_MOVES, Op.PULL, Op.PUSH) if works else (Op.ACCEPT, Op.APPLY, Op.REPLY)
            if ins.op not in known and not changes:
                who = "worker" if works else "server"
                raise refuse(
                    program, rank, index, f"{at(program, rank, index)}: rank {rank} is a {who}, which does not"
                )
            if ins.stream == "host" and ins.op not in _WORK:
                raise refuse(program, rank, index, f"{at(program, rank, index)}: only layers are computed on the host")
            if ins.op in _MOVES or changes:
                continue
            if ins.op in _WORK:
                _check_work(program, rank, index, pulled, shares)
                continue
            server = ins.peer if works else rank
            partners = servers if works else range(program.workers)
            if ins.op is not Op.APPLY and ins.peer not in partners:
                raise refuse(program, rank, index, f"{at(program, rank, index)}: rank {ins.peer} is no partner for it")
            # (Layers can be updated one by one, and stages.)
            some = ins.op is not Op.APPLY or program.serving.mode == "sync" or program.virtual_workers
            whole = set(ins.layers) if some else shares[server]
            if piece_of(ins) is not None and len(ins.layers) > 1:
                raise refuse(program, rank, index, f"{at(program, rank, index)}: a piece is of one group")
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
            applied.update(portions(ins) if ins.op is Op.APPLY else ())
            for portion in portions(ins) if ins.op is Op.PULL else ():
                found = pulled.setdefault(portion.group, {})
                if found.get((server, portion)) == ins.step:
                    reason = f"{at(program, rank, index)} pulls param({portion}) of step {ins.step} again"
                    raise refuse(program, rank, index, f"{reason}; possible is once")
                found[server, portion] = ins.step


def _check_work(
    program: Program,
    rank: int,
    index: int,
    pulled: dict[int, dict[tuple[int, Portion], int]],
    shares: dict[int, set[int]],
) -> None:
    """A layer uses the parameters that were pulled for its step, and a backward writes the gradients of all of them."""
    ins = program.ranks[rank][index]
    for g in {g for layer in ins.layers for g in program.groups_of_layer[layer] if program.groups[g].trainable}:
        here = [key for key, step in pulled.get(g, {}).items() if step == ins.step or program.virtual_workers]
        for server in sorted({s for s, share in shares.items() if g in share} - {server for server, _ in here}):
            reason = f"{at(program, rank, index)} uses param({g}), which was not pulled from rank {server} for step"
            raise refuse(program, rank, index, f"{reason} {ins.step}")
        if wrong := _wrong(program, g, [portion for _, portion in here]):
            reason = f"{at(program, rank, index)} uses param({g}), which was pulled in pieces for step {ins.step}: "
            raise refuse(program, rank, index, reason + wrong)
        if ins.op in _GRADIENTS and grad(g) not in map(home, ins.writes):
            raise refuse(program, rank, index, f"{at(program, rank, index)} makes grad({g}), but does not write it")


def _check_values(program: Program, rank: int, index: int, applied: Counter[Portion]) -> None:
    """A message names the values of its groups. An update names all values that it changes."""
    ins, where = program.ranks[rank][index], at(program, rank, index)
    groups = ins.layers
    reads, writes = set(ins.reads), set(ins.writes)
    if ins.op is Op.APPLY:
        state = {kind(g) for g in groups for kind in (served, served_state)}
        gradients = {v for v in reads if v.kind == "pushed"}
        right = writes == state <= reads and gradients <= set(ins.frees)
        right &= all(piece_in(value) == piece_of(ins) for value in gradients)
        for one in portions(ins):
            if ins.step != applied[one]:
                reason = f"{where} is update {applied[one]} of group {one} at its server, but is called step {ins.step}"
                raise refuse(program, rank, index, reason)
    elif ins.op is Op.ACCEPT:
        accepted = tuple(pushed(one.group, ins.peer, ins.step, one.form) for one in portions(ins))
        right = ins.writes == accepted and not reads
    elif ins.op is Op.PULL:
        version = ins.step if program.virtual_workers else -1
        right = set(map(home, writes)) == {param(g, version) for g in groups} and not reads
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
    """Check the third question, as far as servers have instructions. `turns` is `order(program)`. Errors:
    ProgramError."""
    versions = _Versions(program)
    for rank, index, ins, waited, _ in turns:
        if ins is None or program.undecided:
            continue
        if ins.op is Op.PULL:
            versions.pull(rank, index, ins, versions.replied[waited[0].source])
        elif ins.op is Op.REPLY:
            versions.reply(rank, index, ins)
        elif ins.op is Op.APPLY:
            versions.apply(rank, index, ins)


class _Versions:
    """The versions of the parameters while a program is walked.

    Workers of the rule (`Program.served_workers`) are replicas, or their stages.

    version   for each server and portion, the number of its updates
    holders   for each group, the ranks that hold it
    replied   for each REPLY, the version that it sent
    used      for each worker of the rule and step, the version that it has pulled for it
    applied   (server, portion, rank, step) of each gradient that went into an update
    taken     for each rule and update, what the first server to make it has taken: that server, and workers of the rule
              with their steps
    into      for each worker of the rule and step, the update that has taken its gradients
    bound     how many updates may be made between a pull and the update with the gradients of its step; None: any
              number
    """

    def __init__(self, program: Program) -> None:
        assert program.serving is not None
        self.program = program
        mode, contract = Mode.parse(program.serving.mode, program.replicas), program.contract
        self.each = mode.each
        self.synchronous, self.bound = not isinstance(contract, Staleness), getattr(contract, "bound", 0)
        if program.virtual_workers:  # (whose contract is that of the pipeline)
            self.synchronous, self.bound = mode.kind == "sync", mode.staleness(program.replicas)
        self.worker = {rank: number for number, ranks in enumerate(program.served_workers) for rank in ranks}
        self.version: Counter[tuple[int, Portion]] = Counter()
        self.holders: dict[int, set[int]] = defaultdict(set)
        for worker in range(program.workers):
            for ins in program.ranks[worker]:
                for g in ins.layers if ins.op is Op.PUSH else ():
                    self.holders[g].add(worker)
        self.replied: dict[Place, int] = {}
        self.used: dict[tuple[int, int], int] = {}
        self.applied: set[tuple[int, Portion, int, int]] = set()
        self.taken: dict[tuple[int, int], tuple[int, set[tuple[int, int]]]] = {}
        self.into: dict[tuple[int, int], int] = {}

    def reply(self, rank: int, index: int, ins: Instruction) -> None:
        found = {self.version[rank, portion] for portion in portions(ins)}
        if len(found) > 1:
            reason = f"{at(self.program, rank, index)} sends groups after {min(found)} and after {max(found)} updates"
            raise refuse(self.program, rank, index, f"{reason}; possible is one version")
        self.replied[rank, index] = max(found)

    def pull(self, rank: int, index: int, ins: Instruction, version: int) -> None:
        where, step = at(self.program, rank, index), (self.worker[rank], ins.step)
        if self.used.setdefault(step, version) != version:
            reason = f"{where} brings version {version}, but other parameters of this step are of"
            raise refuse(self.program, rank, index, f"{reason} version {self.used[step]}")
        number, k = step
        alone = self.program.virtual_workers and not self.synchronous
        if alone and k and version <= self.into.get((number, k - 1), version):
            reason = f"{where} brings parameters after {several(version, 'update')}, without the replica's own update"
            raise refuse(self.program, rank, index, f"{reason} {k - 1}; possible is one that has it")
        if self.synchronous and version != ins.step:
            reason = (
                f"{where} brings parameters after {several(version, 'update')}; a synchronous program "
                f"promises {ins.step}"
            )
            raise refuse(self.program, rank, index, reason)

    def apply(self, rank: int, index: int, ins: Instruction) -> None:
        program, where = self.program, at(self.program, rank, index)
        found: dict[int, set[tuple[int, int]]] = defaultdict(set)
        for value in ins.reads:
            if value.kind == "pushed":
                found[value.index].add((value.microbatch, value.step))
        bound = self.bound
        for portion in portions(ins):
            g, update = portion.group, self.version[rank, portion]
            workers = {(self.worker[other], step) for other, step in found[g]}
            if not self.synchronous:
                rule = self.worker[min(self.holders[g], default=0)] % program.rules
                other, first = self.taken.setdefault((rule, update), (rank, workers))
                if workers != first:
                    reason = f"{where} takes gradients of grad({g}) of other replicas or steps than update {update}"
                    raise refuse(program, rank, index, f"{reason} does elsewhere (on rank {other})")
                if self.each and len(workers) > 1:
                    reason = f"{where} takes gradients of {several(len(workers), 'replica')} or steps"
                    mode = program.serving.mode if program.serving else ""
                    raise refuse(program, rank, index, f"{reason}; with mode={mode} each is an update of its own")
                self.into |= dict.fromkeys(workers, update)
                everyone = ((w, step) for number, step in workers for w in program.served_workers[number])
                if lost := {(w, step) for w, step in everyone if w in self.holders[g]} - found[g]:
                    reason = f"{where} takes grad({g}) of a part of replica {program.replica(min(lost)[0])}"
                    raise refuse(program, rank, index, f"{reason}: that of rank {min(lost)[0]} is not read")
            if not found[g]:
                raise refuse(program, rank, index, f"{where} takes no gradient of grad({g})")
            for worker, step in sorted(found[g]):
                if (rank, portion, worker, step) in self.applied:
                    reason = f"{where} takes what rank {worker} pushed of grad({g}) in step {step} twice"
                    raise refuse(program, rank, index, reason)
                self.applied.add((rank, portion, worker, step))
                late = update - self.used[self.worker[worker], step]
                if bound is not None and late > bound:
                    reason = f"{where} takes a gradient of rank {worker} that is {several(late, 'update')} old"
                    raise refuse(program, rank, index, f"{reason}; possible are at most {bound}")
            missing = {(worker, update) for worker in self.holders[g]} - found[g] if self.synchronous else ()
            if missing:
                reason = f"{where} comes before all gradients are there: rank {min(missing)[0]}'s of step {update}"
                raise refuse(program, rank, index, f"{reason} is not read")
            self.version[rank, portion] += 1


def sent_and_taken(program: Program) -> tuple[dict[tuple[int, int], int], dict[tuple[int, int], int]]:
    """Of pipelines without flushes, for each rank and step: after how many updates of its layers its parameters were
    sent, and which update has taken its gradients."""
    given: dict[tuple[int, int], int] = {}
    into: dict[tuple[int, int], int] = {}
    for row in program.ranks[program.workers :]:
        made: Counter[int] = Counter()
        for ins in row:
            if ins.op is Op.REPLY:
                given.setdefault((ins.peer, ins.step), made[ins.layers[0]])
            elif ins.op is Op.APPLY:
                into |= dict.fromkeys(((v.microbatch, v.step) for v in ins.reads if v.kind == "pushed"), ins.step)
                made.update(ins.layers)
    return given, into


def staleness(program: Program) -> list[int]:
    """For each worker, the largest number of updates between the parameters that it pulled and the update that took its
    gradient; 0 for servers."""
    worst = [0] * len(program.ranks)
    for worker, _, _, late in ages(program):
        worst[worker] = max(worst[worker], late)
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


def _parted(program: Program, rank: int, index: int, value: Value) -> bool:
    """Whether another part of a pushed gradient goes to a server before the gradient is written again."""
    mine = program.ranks[rank][index]
    for ins in program.ranks[rank][index + 1 :]:
        if value in ins.writes:
            return False
        if ins.op is Op.PUSH and value in ins.reads:
            return (ins.peer, portions(ins)) != (mine.peer, portions(mine))
    return False
