"""execute() for parameter servers: workers and servers on real processes, and the program as it happened.

    rank 0, 1, ...   a worker: for each step it pulls, walks its instructions, pushes, and reports to the driver
    the last ranks   a server: follows the rule, and brings back the order of what it did
    driver           waits; where on_death=continue it starts ranks that die again, and all others of their replica

The result can be replayed exactly: `reference.py` reads only the order (in plain torch, in a process of its own).
"""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minipar.cluster import agreement, launch, worker
from minipar.cluster.local import Cluster
from minipar.cluster.members import Revived
from minipar.cluster.ranks import Ranks
from minipar.comm import clocks, communicator
from minipar.comm.communicator import Communicator
from minipar.errors import PlanError, RankDied, SaveError, ServerClosed
from minipar.execution.elementwise import check_update
from minipar.execution.emulation import Delays, Pacing
from minipar.execution.execution import Execution, Job
from minipar.execution.finite import Finite
from minipar.execution.following import Observer, Paced, Warned, warn_once
from minipar.execution.memory.watching import Watching
from minipar.execution.saving.contents import collect_untrained, outline_of, restore_untrained
from minipar.execution.saving.folder import Header
from minipar.execution.saving.keeping import NOTHING, Share, Storing
from minipar.execution.updating import Form, Update, class_name, forms_of
from minipar.models.losses import counted
from minipar.models.nodes import Cut
from minipar.models.parameter_groups import parameters_of
from minipar.models.tensors import count_bytes, dtype_name, layers_of, take_rows
from minipar.prediction.emulated import EmulatedCosts
from minipar.prediction.service import Times, timed
from minipar.prediction.service import key_of as place_of
from minipar.program import Instruction, Op, Portion, Program, Value, piece_in, portions
from minipar.program.rows import split_rows
from minipar.program.server_rule import Kind, Mode, Row
from minipar.server import pushing, rendezvous, snapshot
from minipar.server.checking import CheckedShard, CheckedWorker, Comparison, Noted
from minipar.server.lives import Again, Life, Lives
from minipar.server.process import Served, Server, Settings, serve
from minipar.server.rendezvous import Meeting
from minipar.server.saving import Part, Saving, Wrote
from minipar.server.shard import Division, ParameterKey, key_of, pieces_of, view
from minipar.server.steps import Progress, Step, losses_of
from minipar.server.working import Apart, Worker
from minipar.strategies import served_order
from minipar.strategies.passes.compress import keeps_residual
from minipar.strategies.served_order import completed
from minipar.strategies.shares import Shares, kept_shares, parts_of, shares_of
from minipar.trace import Trace
from minipar.trace.lifetimes import series_of
from minipar.trace.memory_series import Series

_REVIVALS = 100  # deaths of ranks in one run after which it goes on
_TRIES = 3  # deaths of one rank, without a step in between, after which it is not started again


@dataclass(frozen=True)
class Service:
    """What parameter servers did in a run.

    order        of updates and answers, the same at all servers; its workers are the replicas, or their stages
                 (`Program.served_workers`)
    deaths       ranks that died and were started again, with the reason of each death; the others of their replicas,
                 which begin again with them, are not told
    silent       (worker, step, seconds) of workers that were removed
    received     bytes of gradients, per server
    sent         bytes of parameters, per server
    parameters   at the end, by name
    """

    order: list[Row] = field(repr=False)
    deaths: list[str]
    silent: list[tuple[int, int, float]]
    received: list[int]
    sent: list[int]
    parameters: dict[str, Tensor] = field(repr=False)

    @property
    def dropped(self) -> int:
        """Gradients that came too late (k-of-n)."""
        return sum(row.kind is Kind.DROP for row in self.order)


def execute_served(
    program: Program,
    job: Job,
    cluster: Ranks,
    *,
    on_death: str = "abort",
    keep_gradients: bool = False,
    report: Callable[[int], None] = lambda done: None,
    watch: Observer | None = None,
    slow: list[Delays] | None = None,
    pacing: Pacing | None = None,
    snapshot_every: int | None = None,
    patience: float | None = 30.0,
    storing: Storing = NOTHING,
    memory: bool = False,
) -> tuple[Execution, Service]:
    """Run all steps of a program with parameter servers. Returns the execution, and what the servers did.

    watch            called with a `Moment` of the run at most ten times a second
    on_death         "abort": the death of a rank is raised; "continue": it starts again and goes on
    slow             delays of emulated devices, one for each worker
    pacing           of the servers, where links are emulated, too
    snapshot_every   updates between two snapshots of the servers; default with on_death="continue": 10
    patience         seconds after which a worker that is gone is removed, and one that was stopped after half a second;
                     the servers wait for one that computes, however long it takes
    memory           follow every storage of the workers: the trace then has `series`. What servers keep is on their
                     hosts: their series are those of the values that the program names
    storing          go on from a saved run; save this one; bring its state back in `Execution.shares`

    Raises RankDied where a rank dies again and again without doing a step in between; SaveError.
    """
    assert program.serving is not None
    servers, workers = program.serving.servers, program.workers
    stages = workers // program.replicas
    mode = Mode.parse(program.serving.mode, program.replicas)
    every = snapshot_every or (10 if on_death == "continue" else None)
    folder = tempfile.mkdtemp(prefix="servers-", dir=launch.scratch_folder())
    steps: dict[tuple[int, int], Step] = {}
    deaths: list[str] = []
    tries: Counter[int] = Counter()  # deaths of each rank since something was done
    warned: set[str] = set()
    stopped: set[tuple[str, int, int]] = set()  # ranks of servers, and their processes
    progress, tell = Progress(program), Paced(watch, program.steps)
    comparison = Comparison(program, storing.first, on_death == "continue")
    lives = Lives(folder, program.ranks_of_replicas)

    def hear(rank: int, fact: Any) -> None:
        if isinstance(fact, Again):
            lives.willing.add(rank)
        elif isinstance(fact, Revived):
            progress.gone(rank)
            if not lives.died(rank):
                return
            deaths.append(fact.line)
            tries[rank] += 1
            if tries[rank] >= _TRIES:
                what = "a step" if rank < workers else "a new step of any worker"
                times = f"{_TRIES} times without {what} in between"
                raise RankDied(f"{fact.line}. It died {times}: to start it again does not help")
        elif isinstance(fact, Step):
            new = (fact.worker, fact.step) not in steps
            for one in [one for one in tries if one == rank or (new and one >= workers)]:
                del tries[one]
            steps[fact.worker, fact.step] = fact
            report(len(steps))
            if watch is not None:
                progress.heard(fact)
                if progress.done < program.steps:  # (else the run is over soon, and its final losses are shown then)
                    tell(progress.done, lambda: progress.losses, lambda: progress.trace)
        elif isinstance(fact, Noted):
            comparison.heard(fact)
        elif isinstance(fact, Wrote):
            saving.heard(rank, fact)
        elif isinstance(fact, Warned):
            warn_once(fact, warned)
        elif isinstance(fact, int):
            report(fact)
        elif fact[0] == "silent":
            progress.gone(fact[1])
            cluster.end_rank(fact[1])
        elif fact[0] == "stopped" and fact not in stopped:  # (every worker may say so)
            stopped.add(fact)
            cluster.end_rank(fact[1])

    if storing.folder and keeps_residual(program.compress):
        raise SaveError(
            f"plan {program.name!r}: what compress={program.compress} has left out of the gradients waits on every "
            "worker, and is not saved; possible are compress=none, bf16, fp16"
        )
    try:
        processes: tuple[int, ...] = ()
        if isinstance(cluster, Cluster):  # (of this machine)
            processes = tuple(cluster.run_on(range(len(program.ranks)), os.getpid))
        ((keys, forms, header),) = cluster.run_on([0], _open, job, program, folder, storing)
        saving = Saving(storing, header, servers + stages, on_death == "continue")
        settings = Settings(
            workers, program.served_steps, job.optimizer, mode, every, patience, on_death, True, pacing, job.scheduler,
            forms, program.clip, program.compress, storing.saved, processes, division_of(program),
            _checked(program), program.served_workers, program.rules,
        )  # fmt: skip
        revivals = _REVIVALS if on_death == "continue" else 0
        with storing.around():
            found = cluster.run_reviving(
                revivals, hear, _take_part, job, program, folder, settings, keep_gradients, slow, watch is not None,
                header, storing, Watching(memory, None if cluster.emulates is None else cluster.emulates.memory),
            )  # fmt: skip
            shares = [share for _, share in (*found[workers:], *found[:stages])]
            saving.finish(shares[0].header)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    steps |= {(one.worker, one.step): one for told, _ in found[:workers] for one in told}
    served: list[Served] = [one for one, _ in found[workers:]]
    execution, service = _result(program, keys, steps, served, deaths, keep_gradients, job.batch)
    comparison.finish(execution.trace.program, service.order)
    tell(program.steps, lambda: execution.losses, lambda: progress.trace)
    return replace(execution, shares=shares), service


def pacing_of(costs: EmulatedCosts) -> Pacing:
    """The part of a program's costs that emulated servers need."""
    program, each = costs.program, served_order.is_by_layer(costs.program)
    servers = range(program.workers, len(program.ranks))
    numbers = _numbers(program)
    replies = tuple(
        {
            (worker, ins.step, numbers[portions(ins)[0]] if each else -1): costs.transfer(
                server, served_order.reply(ins, worker)
            )
            for worker in range(program.workers)
            for ins in program.ranks[worker]
            if ins.op is Op.PULL and ins.peer == server
        }
        for server in servers
    )
    assert program.serving is not None
    rows = enumerate(program.ranks[: program.workers])
    first = [(ins, rank) for rank, row in rows for ins in row if ins.op is Op.PUSH and ins.step == 0]
    updates: list[dict[int, float]] = []
    for server, share in zip(servers, _kept(program), strict=True):
        if each:
            applies = (ins for ins in program.ranks[server] if ins.op is Op.APPLY and ins.step == 0)
            made = {numbers[portions(ins)[0]]: ins for ins in applies}
        else:
            made = {}
            for rule, ranks in enumerate(program.served_workers[: program.rules]):
                pushes = [push for push, rank in first if push.peer == server and (rank in ranks or program.rules == 1)]
                some = {one: share[one.group] for push in pushes for one in portions(push)}
                accepts = [served_order.accept(push, 0) for push in pushes]
                made |= {-1 - rule: served_order.update(some, 0, accepts)} if some else {}
        if not all(map(costs.delays, made.values())):
            return Pacing(replies, None)
        updates.append({g: costs.compute(server, ins) for g, ins in made.items()})
    return Pacing(replies, tuple(updates))


def division_of(program: Program) -> Division | None:
    """Which workers have which keys, where they do not all pull everything at once."""
    each = served_order.is_by_layer(program)
    if not each and program.workers == program.replicas:
        return None
    numbers = _numbers(program)
    held = tuple(
        tuple(dict.fromkeys(numbers[one] for ins in row if ins.op is Op.PULL for one in portions(ins)))
        for row in program.ranks[: program.workers]
    )
    owners = _owners(program)
    keys: list[list[int]] = [[] for _ in range(1 + max(numbers.values()))]
    for k, (one, _) in enumerate(owners):
        keys[numbers[one]].append(k)
    own = []
    for rank, some in enumerate(held):
        shards = {g: program.part(rank, g, "S") for g in {one.group for one in numbers if numbers[one] in some}}
        own.append(frozenset(k for k, (one, shard) in enumerate(owners) if shards.get(one.group, (-1, 0))[0] == shard))
    ahead = each and program.virtual_workers
    return Division(tuple(map(tuple, keys)), held, tuple(own), each, ahead)


def _served_alone(program: Program) -> list[Portion]:
    """Every group, or its pieces, where groups are served in pieces."""
    pieces = {one for ins in _first_pulls(program) for one in portions(ins) if one.form}
    wholes = set(range(len(program.groups))) - {one.group for one in pieces}
    return sorted([*pieces, *map(Portion, wholes)])


def _first_pulls(program: Program) -> list[Instruction]:
    return [ins for row in program.ranks[: program.workers] for ins in row if ins.op is Op.PULL and ins.step == 0]


def _numbers(program: Program) -> dict[Portion, int]:
    """Every group, or piece of one, with its number. Where some are updated and answered before others, those that are
    pulled together have the same number."""
    together = {one: {one} for one in _served_alone(program)}
    for ins in _first_pulls(program) if served_order.is_by_layer(program) else ():
        whole = set().union(*(together[one] for one in portions(ins)))
        together |= dict.fromkeys(whole, whole)
    first = {one: min(some) for one, some in together.items()}
    numbers = {one: k for k, one in enumerate(sorted(set(first.values())))}
    return {one: numbers[first[one]] for one in together}


def _parts(program: Program) -> Iterator[tuple[Portion, list[tuple[int, int, int]]]]:
    """Every group, or piece of one, with what it has of the tensors of its group."""
    for g, some in groupby(_served_alone(program), key=lambda one: one.group):
        mine = list(some)
        yield from zip(mine, parts_of(program.groups[g].tensors, mine), strict=True)


def _owners(program: Program) -> list[tuple[Portion, int]]:
    """For each key, as `_keys` makes them, what it is of, and of which shard."""
    return [
        (one, shard)
        for one, parts in _parts(program)
        for _ in parts
        for shard in range(program.part(0, one.group, "S")[1])
    ]


def _checked(program: Program) -> dict[str, tuple[int, ...]]:
    """The keys of what is compared by itself, by its name; none if nothing is."""
    found: dict[str, tuple[int, ...]] = {}
    for k, (one, _) in enumerate(_owners(program)) if program.checked else ():
        found[str(one)] = (*found.get(str(one), ()), k)
    return found


def _kept(program: Program) -> Shares:
    """How many bytes of which groups each server keeps."""
    assert program.serving is not None
    return kept_shares(shares_of(program.groups, program.serving.servers), program.groups, program.sharing_mesh)


def _result(
    program: Program,
    keys: tuple[ParameterKey, ...],
    steps: dict[tuple[int, int], Step],
    served: list[Served],
    deaths: list[str],
    keep_gradients: bool,
    batch: int,
) -> tuple[Execution, Service]:
    order = [Row(*row) for row in served[0].order]
    wanted = [[(rank, order[k].step) for rank in program.served_workers[order[k].worker]] for k in completed(order)]
    together = [[steps[each] for each in some] for some in wanted if all(each in steps for each in some)]
    taken = [step for some in together for step in some]
    losses = losses_of(taken, program.losses)
    assert program.serving is not None
    gradients = [_summed(some) for some in together]
    if program.serving.mode != "sync":  # (else it was known before; another order of arrivals does not change it)
        program = served_order.as_it_happened(program, order, _kept(program))
    elif not any(one.silent for one in served):
        gradients = [_summed([t for t in taken if t.step == s], program.clip) for s in range(program.served_steps)]
    starts, ends = timed(program, _times(program, taken, served, keys))
    data = [max((t.data for t in taken if t.worker == rank), default=0) for rank in range(len(program.ranks))]
    zero = min((event.start for event in served[0].events if event.kind == Kind.ANSWER), default=0.0)
    starts, ends = ([[max(0.0, t - zero) for t in row] for row in rows] for rows in (starts, ends))
    error = max([0.0, *(one.clock_error for one in taken), *(one.clock_error for one in served)])
    size = _size(program, taken, served, batch)
    trace = Trace(program, starts, ends, size, "measured", "bytes", data, clock_error=error)
    if any(step.series is not None for step in taken):
        trace = replace(trace, series=_series(trace, taken, zero))
    service = Service(
        order,
        deaths,
        [worker for one in served for worker in one.silent],
        [one.received for one in served],
        [one.sent for one in served],
        _assembled(keys, served),
    )
    execution = Execution(program, losses, [trace.time], trace, gradients if keep_gradients else [])
    return execution, service


def _series(trace: Trace, taken: list[Step], zero: float) -> list[Series]:
    """What happened to the memory of workers, in all their steps, and to the values of servers."""
    program = trace.program
    found = []
    for w in range(program.workers):
        first: dict[int, int] = {}
        for k, ins in enumerate(program.ranks[w]):
            first.setdefault(program.pass_of(ins), k)
        steps = {step.step: step.series for step in taken if step.worker == w and step.series is not None}
        passes = [(first[s], steps[s]) for s in first if s in steps]
        whole = Series.joined(passes) if passes else Series()
        found.append(replace(whole, times=[max(0.0, t - zero) for t in whole.times]))
    return [*found, *(series_of(trace, rank) for rank in range(program.workers, len(program.ranks)))]


def _size(program: Program, taken: list[Step], served: list[Served], batch: int) -> Callable[[int, Value], int]:
    """Bytes of a value, as they were measured."""
    assert program.serving is not None
    shares, whole_shares = shares_of(program.groups, program.serving.servers), _kept(program)
    slices = program.slice_count
    rows = [len(r) for r in split_rows(batch, program.replicas * program.microbatches // slices)]
    sizes: dict[tuple[str | int, ...], int] = {}
    for step in taken:
        sizes |= step.sizes
    owners = _owners(program)
    states: dict[tuple[int, int], int] = {}
    for number, one in enumerate(served):
        for tensor, kept in one.states.items():
            key = number, owners[tensor][0].group
            states[key] = states.get(key, 0) + kept

    def size(rank: int, value: Value) -> int:
        g, server = value.index, rank - program.workers
        if piece := piece_in(value):
            return piece[1] - piece[0]
        if value.kind in ("served", "pushed"):
            return (whole_shares if value.kind == "served" else shares)[server].get(g, 0)
        if value.kind == "served_state":
            return states.get((server, g), 0)
        if value.microbatch >= 0:
            i, part = divmod(program.replica(rank) * program.microbatches + value.microbatch, slices)
            count = rows[i] * slices + part  # (as `BatchRows.count` says)
            found = sizes.get((value.kind, g, count, value.form))
            return sizes.get((value.kind, program.source(value), count), 0) if found is None else found
        whole = sum(program.groups[g].tensors) + (program.groups[g].frozen if value.kind == "param" else 0)
        return whole // 2 if program.precision == "bf16" else whole

    return size


def _summed(steps: list[Step], clip: float | None = None) -> dict[str, Tensor]:
    """The gradient of a step, or of a replica's: the sum of the workers' parts, clipped as the servers clip it."""
    found: dict[str, Tensor] = {}
    for step in sorted(steps, key=lambda t: t.worker):
        for name, gradient in step.gradients.items():
            found[name] = found[name] + gradient if name in found else gradient
    if clip is not None:
        factor = clip / (sum(torch.linalg.vector_norm(g).item() ** 2 for g in found.values()) ** 0.5 + 1e-6)
        found = {name: g * factor if factor < 1 else g for name, g in found.items()}
    return found


def _times(program: Program, taken: list[Step], served: list[Served], keys: tuple[ParameterKey, ...]) -> Times:
    """When instructions ran, as the ranks report it."""
    times: Times = {}
    blocks: list[dict[int, list[Any]]] = [{} for _ in range(program.workers)]
    for w in range(program.workers):
        for ins in program.ranks[w]:
            blocks[w].setdefault(program.pass_of(ins), []).append(ins)
    for t in (t for t in taken if t.times):
        for k, (ins, span) in enumerate(zip(blocks[t.worker][t.step], t.times, strict=True)):
            times[place_of(t.worker, ins, k)] = span
    numbers, owners = _numbers(program), _owners(program)
    rules = {rank: number % program.rules for number, ranks in enumerate(program.served_workers) for rank in ranks}
    for rank, one in enumerate(served, program.workers):
        pieces: dict[tuple[int, int, int], list[tuple[float, float]]] = {}
        # op, peer (of an update -1 - rule), step, of what (-1: of all)
        done: dict[tuple[Op, int, int, int], tuple[float, float]] = {}
        for event in one.events:
            span = event.start, event.end
            if event.kind == 0:
                number = numbers[owners[event.which][0]]
                pieces.setdefault((event.worker, event.step, number), []).append(span)
            elif event.kind == Kind.APPLY:
                done[Op.APPLY, event.worker, event.which, event.group] = span
            elif event.kind == Kind.ANSWER:
                done[Op.REPLY, event.worker, event.step, event.group] = span
        for ins in program.ranks[rank]:
            some, peer = [numbers[portion] for portion in portions(ins)], ins.peer
            if ins.op is Op.APPLY:  # (of the rule that has the ranks whose gradients it takes)
                peer = -1 - rules[next((value.microbatch for value in ins.reads if value.kind == "pushed"), 0)]
            both = ((ins.op, peer, ins.step, k) for k in (-1, *some[:1]))
            here = [done[key] for key in both if key in done]
            if ins.op is Op.ACCEPT:
                here = [span for k in some for span in pieces.get((ins.peer, ins.step, k), [])]
            if here:
                times[place_of(rank, ins)] = min(a for a, _ in here), max(b for _, b in here)
    return times


def _assembled(keys: tuple[ParameterKey, ...], served: list[Served]) -> dict[str, Tensor]:
    """The parameters at the end, from the servers' pieces."""
    found: dict[tuple[str, tuple[int, int, int, int] | None], Tensor] = {}  # by name and shard
    for key in keys:
        found.setdefault((str(key.name), key.cut), torch.empty(key.shape, dtype=key.type))
    for pieces, one in zip(pieces_of(keys, len(served)), served, strict=True):
        for piece in pieces:
            key = keys[piece.tensor]
            begin, size = (key.offset + piece.start) // key.type.itemsize, piece.size // key.type.itemsize
            found[str(key.name), key.cut].view(-1)[begin : begin + size] = view(one.values, key, piece)
    shards: dict[str, list[Tensor]] = {}
    for (name, _), values in found.items():
        shards.setdefault(name, []).append(values)
    cuts = {str(key.name): key.cut for key in keys}
    return {name: some[0] if (cut := cuts[name]) is None else Cut(*cut).joined(some) for name, some in shards.items()}


# in the ranks ---------------------------------------------------------------------------------------------------------


def _keys(job: Job, program: Program) -> Iterator[ParameterKey]:
    """The keys of the trainable parameters, group by group, or piece by piece where groups are served so. Of a
    parameter of which ranks have shards, or in which a piece ends, each of these is a key."""
    model = job.build_for(program, 0)
    names = {id(p): name for name, p in model.named_parameters()}
    cuts: Mapping[str, Cut] = getattr(model, "cuts", {})
    groups = parameters_of(layers_of(model))
    for one, parts in _parts(program):
        for tensor, start, stop in parts:
            p = groups[one.group][tensor]
            name, key = names[id(p)], key_of(names[id(p)], p)
            size = program.groups[one.group].tensors[tensor]
            if one.form and key.nbytes != size:
                raise PlanError(
                    f"program {program.name!r}: has pieces of parameters of {size} bytes, and {name} has "
                    f"{key.nbytes}; compile it for shape_of(the model)"
                )
            if stop - start < size:
                key = key._replace(part=(start // key.type.itemsize, stop // key.type.itemsize))
            if name in cuts:
                yield from (key._replace(cut=astuple(replace(cuts[name], index=k))) for k in range(cuts[name].count))
            else:
                yield key


def _values(job: Job, keys: Sequence[ParameterKey]) -> list[Tensor]:
    """The initial values of the keys."""
    whole = dict(job.build().named_parameters())
    found = ((key, whole[str(key.name)].detach()) for key in keys)
    return [key.of(values if key.cut is None else Cut(*key.cut).of(values)) for key, values in found]


def _open(
    job: Job, program: Program, folder: str, storing: Storing
) -> tuple[tuple[ParameterKey, ...], tuple[Form, ...], Header]:
    """The keys of the parameters, of which the handle is written for servers and workers; the parameters that the
    optimizer is made of; and the header of the run as it is saved at its end."""
    model = job.build()
    forms = forms_of(model)
    update = Update(job.optimizer, forms, job.scheduler)
    check_update(update, f"program {program.name!r} cuts parameters over servers")
    rows = outline_of(model).rows
    if storing.saved is not None:
        storing.saved.check_fits(rows, class_name(update.whole) if forms else "")
    keys = tuple(_keys(job, program))
    assert program.serving is not None
    rendezvous.open_folder(_meeting(folder), keys, program.serving.servers)
    last = storing.first + program.steps
    return keys, forms, Header(last, job.seed, job.batch, dtype_name(job.dtype), program.name, "", rows)


def _meeting(folder: str) -> Meeting:
    """Where servers and workers meet: in the driver's folder, if all are on this host, or in torch's Store."""
    context = worker.context()
    if not context.store:  # torchrun started this process
        agreed = agreement.agree()
        address = agreed.addresses[agreed.rank] if len(set(agreed.hosts)) > 1 else ""
        return Meeting(folder, dist.PrefixStore(folder, agreed.store), address)
    if len(set(agreement.apart(context.size))) > 1:
        return Meeting(folder, dist.FileStore(os.path.join(folder, "store")), agreement.LOOPBACK)
    return Meeting(folder)


def _leave(folder: str, server: int) -> None:
    """Remove what a server has left in the folder of its host, and the folder after the last one. (The driver removes
    it only on its own host, where other servers may still need it.)"""
    agreed = agreement.agree()
    if agreed.hosts[agreed.rank] == agreed.hosts[0]:
        return
    with contextlib.suppress(OSError):
        snapshot.remove_after(folder, server, -1)
        os.rmdir(folder)


def _take_part(
    job: Job,
    program: Program,
    folder: str,
    settings: Settings,
    keep_gradients: bool,
    slow: list[Delays] | None,
    watched: bool,
    header: Header,
    storing: Storing,
    watching: Watching,
) -> tuple[Any, Share]:
    """What every rank does: the first ones are workers, the last ones servers. Returns the steps of a worker or what a
    server brings back, and the rank's share of the state."""
    rank, meeting = worker.context().rank, _meeting(folder)
    stages = program.workers // program.replicas
    clock = clocks.Reading(0.0, 0.0, 0.0)
    dying = settings.on_death == "continue"  # (then every step is reported at once, as this rank may die)
    if meeting.address and not dying:  # (otherwise all are on one machine)
        clock = clocks.read(communicator.create())
    elif stages > 1 and not dying:
        communicator.create()  # (all ranks make it together)
    number = rank - program.workers
    servers = len(program.ranks) - program.workers
    part = Part(storing, number if number >= 0 else servers + rank, program.steps, dying)
    if rank >= program.workers:
        values = _values(job, rendezvous.read_handle(meeting).keys)
        shares: list[Share] = []

        def updated(server: Server) -> None:
            own = server.shard
            if isinstance(own, CheckedShard):
                worker.report(own.noted())
            part.reached(server.version, server.incarnation, own.saved, own.optimizer_name, own.saved_schedule)

        def ended(server: Server) -> None:
            own = server.shard
            last = replace(header, schedule=own.saved_schedule())
            here = max(1, own.nbytes) / max(1, sum(map(count_bytes, values)))
            shares.append(part.end(last, own.saved, own.optimizer_name, here))

        try:
            served = serve(meeting, number, settings, values, _nothing, _only_silence, updated, ended)
            ahead = clock.seconds
            events = [e._replace(start=e.start + ahead, end=e.end + ahead) for e in served.events]
            return replace(served, events=events, clock_error=clock.error), shares[0]
        finally:
            if not worker.context().store:
                _leave(folder, rank - program.workers)
    done: list[Step] = []

    def tell(step: Step) -> None:
        times = [(a + clock.seconds, b + clock.seconds) for a, b in step.times]
        step = step._replace(times=times, clock_error=clock.error)
        if step.series is not None:
            own = [t + clock.seconds for t in step.series.times]
            step = step._replace(series=replace(step.series, times=own))
        worker.report(step if dying else step._replace(gradients={}, series=None) if watched else rank)
        if not dying:
            done.append(step)

    made = job.build()
    outline = outline_of(made)
    if storing.saved is not None:
        from minipar.execution.saving.storage import Reading

        names = {id(p): name for name, p in made.named_parameters()}
        restore_untrained(layers_of(made), names, outline, Reading(storing.saved))
    if program.sharing > 1:
        made = job.share(made, program.shard(rank), program.sharing_mesh, program.inputs, program.slices)
        outline = outline_of(made)
    # To warm up: first calls take longer, and should not count in the first step. (A copy of a parameter has no form.)
    spare = copy.deepcopy(made) if program.sharing == 1 else job.build_for(program, rank)
    kind = CheckedWorker if program.checked else Worker
    with Life.of(folder, program, rank, dying) as life:
        comm = _communicator(program, rank, life)
        one = kind(program, comm, made, job, slow[rank] if slow else None)
        rest = partial(collect_untrained, one, outline)

        def begins(version: int, incarnation: int) -> None:
            if rank < stages and part.due(version, incarnation):
                with one.offloading.all_here():
                    part.reached(version, incarnation, rest)

        with contextlib.suppress(ServerClosed):  # (it was started again after the end)
            if not life.over:
                _work(job, one, spare, meeting, settings, keep_gradients, tell, storing.first, begins, watching, life)
        life.finish()
    if rank >= stages:
        one.offloading.close()
        return done, Share(header)
    with closing(one.offloading), one.offloading.all_here():
        share = part.end(header, rest)
    unsaved = f"plan {program.name!r}: what compress={program.compress} has left out of the gradients is not saved"
    return done, replace(share, reason=unsaved) if keeps_residual(program.compress) else share


def _communicator(program: Program, rank: int, life: Life) -> Communicator:
    """How a worker communicates with the others of its replica."""
    if program.workers == program.replicas or life.over:
        return Apart(rank, len(program.ranks))
    if not life.dying:
        return communicator.create()
    return life.meet(program.ranks_of_replicas[program.replica(rank)])


def _nothing(point: str) -> None: ...


def _only_silence(fact: object) -> None:
    if isinstance(fact, tuple) and fact[0] == "silent":
        worker.report(fact)


def _say_stopped(workers: int, server: int, process: int) -> None:
    """Tell the driver that a server was stopped: it is ended, and starts again."""
    worker.report(("stopped", workers + server, process))


def _work(
    job: Job,
    one: Worker,
    spare: nn.Module,
    meeting: Meeting,
    settings: Settings,
    keep_gradients: bool,
    tell: Callable[[Step], None],
    first: int,
    begins: Callable[[int, int], None],
    watching: Watching,
    life: Life,
) -> None:
    """Be a worker until the servers have done all their updates.

    spare    a copy of the worker's model
    first    the number of the program's first step
    begins   called when the parameters of a step are here, with their version and the servers' incarnation
    life     of the worker's replica
    """
    program, compute, rank, device = one.program, one.compute, one.comm.rank, one.device
    # At once, so that the servers see this worker's process.
    on_stop = None if settings.on_death == "abort" else partial(_say_stopped, program.workers)
    processes = settings.processes[program.workers :]
    ps = pushing.connect(
        meeting, rank, compress=program.compress, on_stop=on_stop, processes=processes, division=settings.division,
        on_rewind=life.void,
    )  # fmt: skip
    if not program.virtual_workers:  # (whose pass is the whole run)
        warm = Worker(program, one.comm, spare, job)
        with closing(warm.offloading):
            warm.run(job.batches, first)
    compute.finite = None if job.on_nan == "ignore" else Finite(rank, job.on_nan, worker.report)
    types = {key.name: key.type for key in ps.keys}
    transfers = {} if device is None or not device.delays.links else device.delays.transfer
    found: list[dict[str, Tensor]] = []  # gradients of this pass, by step
    there: dict[str, Tensor] = {}  # this step's gradients on the host, until all pieces are pushed
    counts, numbers = (0, 0), _numbers(program)
    counting = program.replica(rank) != program.replica(rank - 1) if rank else True  # (one rank of each replica)
    synchronous = settings.mode.kind == "sync"

    def begin_step() -> bool:
        if ps.next_step() is None:
            return False
        there.clear()
        found.append({})
        return True

    def weigh(step: int) -> tuple[int, int]:
        """Say how much the replica's rows weigh in a step, or update, and all rows."""
        if program.every is not None:  # (each micro-batch has a mean of its own)
            ps.weigh(1, program.replicas)
            return 1, program.replicas
        part = compute.rows.part(step)
        mine = range(part.rows[0].start - part.start, part.rows[-1].stop - part.start)
        of_replica, whole = _whole(counted(take_rows(part.y, mine), job.loss)), _whole(part.weight)
        ps.weigh(of_replica, whole)
        return of_replica, whole

    def bring(index: int, some: list[Portion]) -> None:
        nonlocal counts
        if program.virtual_workers:
            step = one.instructions[index].step
            if step > ps.step:
                if device is not None and device.delays.links:
                    ps.pace(device.now)
                begin_step()
            if not synchronous and not one.here:  # (where servers sum over all replicas, nothing is scaled)
                weigh(step)
        elif not one.here:
            of_replica, whole = weigh(0)
            counts = of_replica if counting else 0, whole
        for portion in some:
            ps.bring(numbers[portion])
            if device is not None:
                device.arrived(ps.arrived, index)

    def put(value: Value, targets: list[Tensor]) -> None:
        group = one.groups[value.index]
        values = [ps.pull(one.names[id(p)]) for p in group]
        if one.offloading.keeps(value.index):
            one.offloading.put_away(value, [v.to(p.dtype) for v, p in zip(values, group, strict=True)])
        elif not ps.void:  # (else nothing has come)
            for target, came in zip(targets, values, strict=True):
                target.copy_(came)

    def push(p: nn.Parameter, gradient: Tensor, peer: int, portion: Portion) -> None:
        name = one.names[id(p)]
        if name not in there:
            there[name] = gradient.to("cpu", types[name]).contiguous()  # (servers keep parameters on the CPU)
        gradient = there[name]
        if keep_gradients:
            found[-1][name] = gradient if name not in one.cuts else _alone(gradient, one.cuts[name])
        ps.push(name, gradient, peer - program.workers, numbers[portion])

    def pace(index: int) -> None:
        if device is not None and device.delays.links:
            occupied, delay = transfers.get(index, (0.0, 0.0))
            ps.pace(device.now + delay, occupied)

    together: list[slice[int, int, None]] = []
    place = 0
    for op, some in groupby(one.instructions, key=lambda ins: ins.op):
        count = len(list(some))
        together += [slice(place, place + count)] if op is Op.PULL else []
        place += count
    one.bring, one.put, one.push, one.pace = bring, put, push, pace
    if isinstance(one, CheckedWorker):
        one.serve(ps, first, numbers)
    tracker = watching.start(one)
    begin = time.perf_counter()
    while begin_step():
        step = ps.step
        begins(ps.version, ps.incarnation)
        with tracker:
            record = one.run(job.batches, first + step)
        if isinstance(one, CheckedWorker):
            worker.report(one.noted())
        if device is not None and device.delays.links:
            ps.pace(device.now)
        times = list(zip(record.starts, record.ends, strict=True))
        for run in together:  # (all pulls that follow each other are awaited together)
            since = times[run.start][0] if run.start else begin
            times[run] = [(since, times[run.stop - 1][1])] * (run.stop - run.start)
        sizes: dict[tuple[str | int, ...], int] = dict([*compute.sizes.items(), *compute.form_sizes.items()])
        series = tracker.last if watching.series else None
        whole = Step(rank, step, record.losses[0], *counts, found[0], times, sizes, compute.data_bytes(), series=series)
        tell(whole)
        for k in range(1, len(found)):  # (times and sizes of a pass are those of its first step)
            tell(Step(rank, k, record.losses[k], *counts, found[k]))
        found.clear()
        begin = time.perf_counter()


def _alone(gradient: Tensor, cut: Cut) -> Tensor:
    """A shard of a gradient in its place, among zeros: a sum over all shards is the whole."""
    return cut.joined([gradient if k == cut.index else torch.zeros_like(gradient) for k in range(cut.count)])


def _whole(count: float) -> int:
    if count != int(count):
        raise PlanError(
            f"sync=ps: the loss counts {count:g}, and servers count whole numbers; possible is sync=allreduce"
        )
    return int(count)
