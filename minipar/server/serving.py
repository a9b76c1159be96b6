"""execute() for parameter servers: workers and servers on real processes, and the program as it happened.

    rank 0, 1, ...   a worker: for each step it pulls, walks its instructions, pushes, and reports to the driver
    the last ranks   a server: follows the rule, and brings back the order of what it did
    driver           waits; where on_death=continue it starts workers that die again

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
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minipar.cluster import agreement, launch, worker
from minipar.cluster.local import Cluster
from minipar.cluster.members import Revived
from minipar.cluster.ranks import Ranks
from minipar.comm import clocks, communicator
from minipar.errors import RankDied, SaveError, ServerClosed
from minipar.execution.emulation import Delays, Pacing
from minipar.execution.execution import Execution, Job
from minipar.execution.following import Observer, Paced, Warned, Warnings
from minipar.execution.mean_loss import Finite
from minipar.execution.memory.tracker import Watching, watching_of
from minipar.execution.saving.contents import collect_untrained, outline_of, restore_untrained
from minipar.execution.saving.folder import Header
from minipar.execution.saving.keeping import NOTHING, Share, Storing
from minipar.execution.updating import Form, Update, check_update, class_name, forms_of
from minipar.models.parameter_groups import parameters_of
from minipar.models.tensors import count_bytes, dtype_name, layers_of
from minipar.prediction.emulated import EmulatedCosts
from minipar.prediction.service import Times, key_of, timed
from minipar.program import Op, Program, Value
from minipar.program.rows import split_rows
from minipar.program.server_rule import Kind, Mode, Row
from minipar.server import pushing, rendezvous, shard
from minipar.server.process import Served, Server, Settings, serve
from minipar.server.rendezvous import Meeting
from minipar.server.saving import Part, Saving, Wrote
from minipar.server.shard import ParameterKey, pieces_of
from minipar.server.steps import Progress, Step, losses_of
from minipar.server.working import Worker
from minipar.strategies import served_order
from minipar.strategies.passes.compress import keeps_residual
from minipar.strategies.served_order import completed
from minipar.strategies.shares import shares_of
from minipar.trace import Trace
from minipar.trace.lifetimes import series_of
from minipar.trace.memory_series import Series

_REVIVALS = 100  # deaths of ranks in one run after which it goes on
_TRIES = 3  # deaths of one rank, without a step in between, after which it is not started again


@dataclass(frozen=True)
class Service:
    """What parameter servers did in a run.

    order        of updates and answers, the same at all servers
    deaths       workers that died and were started again, with the reason of each death
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
    patience: float | None = 30.0,
    storing: Storing = NOTHING,
    memory: bool = False,
) -> tuple[Execution, Service]:
    """Run all steps of a program with parameter servers. Returns the execution, and what the servers did.

    watch            called with a `Moment` of the run at most ten times a second
    on_death         of a worker: "abort": its death is raised; "continue": it starts again and goes on. That of a
                     server is raised
    slow             delays of emulated devices, one for each worker
    pacing           of the servers, where links are emulated, too
    patience         seconds after which a worker that is gone is removed, and one that was stopped after half a second;
                     the servers wait for one that computes, however long it takes
    memory           follow every storage of the workers: the trace then has `series`. What servers keep is on their
                     hosts: their series are those of the values that the program names
    storing          go on from a saved run; save this one; bring its state back in `Execution.shares`

    Raises RankDied where a worker dies again and again without doing a step in between; SaveError.
    """
    assert program.serving is not None
    servers, workers = program.serving.servers, program.workers
    if storing.folder and keeps_residual(program.compress):
        raise SaveError(f"{_unsaved(program)}; possible are compress=none, bf16, fp16")
    folder = tempfile.mkdtemp(prefix="servers-", dir=launch.scratch_folder())
    steps: dict[tuple[int, int], Step] = {}
    deaths: list[str] = []
    tries: Counter[int] = Counter()  # deaths of each worker since it has done a step
    warnings = Warnings()
    progress, show = Progress(program), Paced(watch, program.steps)

    def hear(rank: int, fact: Any) -> None:
        if isinstance(fact, Revived):
            if rank >= workers:
                raise RankDied(f"{fact.line}. Its part of the parameters is lost; possible is to resume a saved run")
            progress.gone(rank)
            deaths.append(fact.line)
            tries[rank] += 1
            if tries[rank] >= _TRIES:
                times = f"{_TRIES} times without a step in between"
                raise RankDied(f"{fact.line}. It died {times}: to start it again does not help")
        elif isinstance(fact, Step):
            tries.pop(rank, None)
            steps[fact.worker, fact.step] = fact
            report(len(steps))
            if watch is not None:
                progress.heard(fact)
                if progress.done < program.steps:  # (else the run is over soon, and its final losses are shown then)
                    show(progress.done, lambda: progress.losses, lambda: progress.trace)
        elif isinstance(fact, Wrote):
            saving.heard(rank, fact)
        elif isinstance(fact, Warned):
            warnings(rank, fact)
        elif isinstance(fact, int):
            report(fact)
        elif fact[0] == "silent":
            progress.gone(fact[1])
            cluster.end_rank(fact[1])

    try:
        processes: tuple[int, ...] = ()
        if isinstance(cluster, Cluster):  # (of this machine)
            processes = tuple(cluster.run_on(range(len(program.ranks)), os.getpid))
        ((keys, forms, header),) = cluster.run_on([0], _open, job, program, folder, storing)
        saving = Saving(storing, header, servers + 1)
        settings = Settings(
            workers, program.steps, job.optimizer, Mode.parse(program.serving.mode, workers), patience, on_death, True,
            pacing, job.scheduler, forms, program.clip, program.compress, storing.saved, processes,
        )  # fmt: skip
        watching = watching_of(memory, cluster.emulates)
        revivals = _REVIVALS if on_death == "continue" else 0
        with storing.around() if storing.folder else contextlib.nullcontext():
            found = cluster.run_reviving(
                revivals, hear, _take_part, job, program, folder, settings, keep_gradients, slow, watch is not None,
                header, storing, watching,
            )  # fmt: skip
            shares = [share for _, share in (*found[workers:], found[0])]
            saving.finish(shares[0].header)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    steps |= {(one.worker, one.step): one for done, _ in found[:workers] for one in done}
    execution, service = _result(program, keys, steps, [one for one, _ in found[workers:]], deaths, keep_gradients, job)
    show(program.steps, lambda: execution.losses, lambda: progress.trace)
    return replace(execution, shares=shares), service


def pacing_of(costs: EmulatedCosts) -> Pacing:
    """The part of a program's costs that emulated servers need."""
    program = costs.program
    assert program.serving is not None
    replies: list[dict[tuple[int, int], tuple[float, float]]] = []
    updates: list[float] = []
    delayed = True
    messages = [(worker, ins) for worker in range(program.workers) for ins in program.ranks[worker]]
    for server, share in enumerate(shares_of(program.groups, program.serving.servers), program.workers):
        own = [(worker, ins) for worker, ins in messages if ins.peer == server]
        pulls = [(worker, ins) for worker, ins in own if ins.op is Op.PULL]
        replies.append({(w, ins.step): costs.transfer(server, served_order.reply(ins, w)) for w, ins in pulls})
        accepts = [served_order.accept(ins, w) for w, ins in own if ins.op is Op.PUSH and ins.step == 0]
        update = served_order.update(share, 0, accepts)
        updates.append(costs.compute(server, update))
        delayed = delayed and costs.delays(update)
    return Pacing(tuple(replies), tuple(updates) if delayed else None)


def _result(
    program: Program,
    keys: tuple[ParameterKey, ...],
    steps: dict[tuple[int, int], Step],
    served: list[Served],
    deaths: list[str],
    keep_gradients: bool,
    job: Job,
) -> tuple[Execution, Service]:
    assert program.serving is not None
    order = [Row(*row) for row in served[0].order]
    wanted = [(order[k].worker, order[k].step) for k in completed(order)]
    taken = [steps[one] for one in wanted if one in steps]
    losses = losses_of(taken, program.losses)
    gradients = [step.gradients for step in taken]
    if program.serving.mode != "sync":  # (else it was known before; another order of arrivals does not change it)
        program = served_order.as_it_happened(program, order, shares_of(program.groups, len(served)))
    elif not any(one.silent for one in served):
        gradients = [_summed([t for t in taken if t.step == s], program.clip) for s in range(program.steps)]
    groups = [g for g, group in enumerate(program.groups) for _ in group.tensors]  # of each key
    starts, ends = timed(program, _times(program, taken, served, groups))
    data = [max((t.data for t in taken if t.worker == rank), default=0) for rank in range(len(program.ranks))]
    zero = min((event.start for event in served[0].events if event.kind == Kind.ANSWER), default=0.0)
    starts, ends = ([[max(0.0, t - zero) for t in row] for row in rows] for rows in (starts, ends))
    error = max([0.0, *(one.clock_error for one in taken), *(one.clock_error for one in served)])
    size = _size(program, taken, served, groups, job.batch)
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
        first = {ins.step: k for k, ins in reversed(list(enumerate(program.ranks[w])))}
        steps = {step.step: step.series for step in taken if step.worker == w and step.series is not None}
        passes = [(first[s], steps[s]) for s in sorted(first, key=first.__getitem__) if s in steps]
        whole = Series.joined(passes) if passes else Series()
        found.append(replace(whole, times=[max(0.0, t - zero) for t in whole.times]))
    return [*found, *(series_of(trace, rank) for rank in range(program.workers, len(program.ranks)))]


def _size(
    program: Program, taken: list[Step], served: list[Served], groups: list[int], batch: int
) -> Callable[[int, Value], int]:
    """Bytes of a value, as they were measured. `groups`: of each key."""
    shares = shares_of(program.groups, len(served))
    rows = [len(r) for r in split_rows(batch, program.workers * program.microbatches)]
    sizes: dict[tuple[str | int, ...], int] = {}
    for step in taken:
        sizes |= step.sizes
    states: Counter[tuple[int, int]] = Counter()
    for number, one in enumerate(served):
        for tensor, kept in one.states.items():
            states[number, groups[tensor]] += kept

    def size(rank: int, value: Value) -> int:
        g, server = value.index, rank - program.workers
        if value.kind in ("served", "pushed"):
            return shares[server].get(g, 0)
        if value.kind == "served_state":
            return states[server, g]
        if value.microbatch >= 0:
            count = rows[rank * program.microbatches + value.microbatch]
            return sizes.get((value.kind, program.source(value), count), 0)
        whole = sum(program.groups[g].tensors) + (program.groups[g].frozen if value.kind == "param" else 0)
        return whole // 2 if program.precision == "bf16" else whole

    return size


def _summed(steps: list[Step], clip: float | None) -> dict[str, Tensor]:
    """The gradient of a step: the sum of the workers' parts, clipped as the servers clip it."""
    found: dict[str, Tensor] = {}
    for step in sorted(steps, key=lambda t: t.worker):
        for name, gradient in step.gradients.items():
            found[name] = found[name] + gradient if name in found else gradient
    if clip is not None:
        factor = clip / (sum(torch.linalg.vector_norm(g).item() ** 2 for g in found.values()) ** 0.5 + 1e-6)
        found = {name: g * factor if factor < 1 else g for name, g in found.items()}
    return found


def _times(program: Program, taken: list[Step], served: list[Served], groups: list[int]) -> Times:
    """When instructions ran, as the ranks report it. `groups`: of each key."""
    times: Times = {}
    blocks = [served_order.blocks_of(program, worker) for worker in range(program.workers)]
    for t in taken:
        for k, (ins, span) in enumerate(zip(blocks[t.worker][t.step], t.times, strict=True)):
            times[key_of(t.worker, ins, k)] = span
    for rank, one in enumerate(served, program.workers):
        spans: dict[tuple[Op, int, int, int], list[tuple[float, float]]] = {}  # op, peer, step, group of an ACCEPT
        for event in one.events:
            if event.kind == 0:
                key = Op.ACCEPT, event.worker, event.step, groups[event.which]
            elif event.kind == Kind.APPLY:
                key = Op.APPLY, -1, event.which, -1
            else:
                key = Op.REPLY, event.worker, event.step, -1
            spans.setdefault(key, []).append((event.start, event.end))
        for ins in program.ranks[rank]:
            some = ins.layers if ins.op is Op.ACCEPT else (-1,)
            if here := [span for g in some for span in spans.get((ins.op, ins.peer, ins.step, g), ())]:
                times[key_of(rank, ins)] = min(a for a, _ in here), max(b for _, b in here)
    return times


def _assembled(keys: tuple[ParameterKey, ...], served: list[Served]) -> dict[str, Tensor]:
    """The parameters at the end, from the servers' pieces."""
    found = [torch.empty(key.shape, dtype=key.type) for key in keys]
    for pieces, one in zip(pieces_of(keys, len(served)), served, strict=True):
        for piece in pieces:
            key = keys[piece.tensor]
            place = slice(piece.start // key.type.itemsize, piece.stop // key.type.itemsize)
            found[piece.tensor].view(-1)[place] = shard.view(one.values, key, piece)
    return {str(key.name): values for key, values in zip(keys, found, strict=True)}


def _unsaved(program: Program) -> str:
    return f"plan {program.name!r}: what compress={program.compress} has left out of the gradients is not saved"


# in the ranks ---------------------------------------------------------------------------------------------------------


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
    names = {id(p): name for name, p in model.named_parameters()}
    keys = tuple(shard.key_of(names[id(p)], p) for group in parameters_of(layers_of(model)) for p in group)
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
    watching: Watching | None,
) -> tuple[Any, Share]:
    """What every rank does: the first ones are workers, the last ones servers. Returns the steps of a worker or what a
    server brings back, and the rank's share of the state."""
    rank, meeting = worker.context().rank, _meeting(folder)
    clock = clocks.Reading(0.0, 0.0, 0.0)
    reviving = settings.on_death == "continue"  # (then every step is reported at once, as this rank may die)
    if meeting.address and not reviving:  # (otherwise all are on one machine)
        clock = clocks.read(communicator.create())
    servers, number = len(program.ranks) - program.workers, rank - program.workers
    part = Part(storing, number if number >= 0 else servers + rank, program.steps)
    if number >= 0:
        return _be_server(job, meeting, number, settings, clock, header, part)
    done: list[Step] = []

    def hand_on(step: Step) -> None:
        times = [(a + clock.seconds, b + clock.seconds) for a, b in step.times]
        step = step._replace(times=times, clock_error=clock.error)
        if step.series is not None:
            own = [t + clock.seconds for t in step.series.times]
            step = step._replace(series=replace(step.series, times=own))
        worker.report(step if reviving else step._replace(gradients={}, series=None) if watched else rank)
        if not reviving:
            done.append(step)

    model = job.build()
    outline = outline_of(model)
    if storing.saved is not None:
        from minipar.execution.saving.storage import Reading

        names = {id(p): name for name, p in model.named_parameters()}
        restore_untrained(layers_of(model), names, outline, Reading(storing.saved))
    spare = copy.deepcopy(model)  # to warm up: first calls take longer, and should not count in the first step
    one = Worker(program, rank, model, job, slow[rank] if slow else None)
    rest = partial(collect_untrained, one, outline)
    begins = partial(part.reached, pieces=rest) if rank == 0 else lambda version: None
    with contextlib.suppress(ServerClosed):  # (it was started again after the end)
        _be_worker(job, one, spare, meeting, settings, keep_gradients, hand_on, storing.first, begins, watching)
    share = part.end(header, rest) if rank == 0 else Share(header)
    return done, replace(share, reason=_unsaved(program)) if keeps_residual(program.compress) else share


def _be_server(
    job: Job, meeting: Meeting, number: int, settings: Settings, clock: clocks.Reading, header: Header, part: Part
) -> tuple[Served, Share]:
    """Serve until all workers are done. Returns what a server brings back, and its share of the state."""
    whole = dict(job.build().named_parameters())
    values = [whole[str(key.name)] for key in rendezvous.read_handle(meeting).keys]
    shares: list[Share] = []

    def updated(server: Server) -> None:
        own = server.shard
        part.reached(own.updates, own.saved, own.optimizer_name, own.saved_schedule)

    def ended(server: Server) -> None:
        own = server.shard
        last = replace(header, schedule=own.saved_schedule())
        here = max(1, shard.length(own.pieces)) / max(1, sum(map(count_bytes, values)))
        shares.append(part.end(last, own.saved, own.optimizer_name, here))

    served = serve(meeting, number, settings, values, worker.report, updated, ended)
    events = [e._replace(start=e.start + clock.seconds, end=e.end + clock.seconds) for e in served.events]
    return replace(served, events=events, clock_error=clock.error), shares[0]


def _be_worker(
    job: Job,
    one: Worker,
    spare: nn.Module,
    meeting: Meeting,
    settings: Settings,
    keep_gradients: bool,
    hand_on: Callable[[Step], None],
    first: int,
    begins: Callable[[int], None],
    watching: Watching | None,
) -> None:
    """Do steps until the servers have done all their updates.

    spare    a copy of the worker's model
    first    the number of the program's first step
    begins   called when the parameters of a step are here, with their version
    """
    program, compute, rank, device = one.program, one.compute, one.comm.rank, one.device
    # At once, so that the servers see this worker's process.
    servers = settings.processes[program.workers :]
    ps = pushing.connect(meeting, rank, compress=program.compress, processes=servers)
    Worker(program, rank, spare, job).run(job.batches, first)
    compute.finite = None if job.on_nan == "ignore" else Finite(rank, job.on_nan, worker.report)
    one.servers = ps
    pulls = sum(ins.op is Op.PULL for ins in one.instructions)
    tracker = watching(one) if watching is not None else None
    begin = time.perf_counter()
    while (step := ps.next_step()) is not None:
        begins(ps.version)
        with tracker or contextlib.nullcontext():
            record = one.run(job.batches, first + step)
        if device is not None and device.delays.links:
            ps.pace(device.now)
        times = list(zip(record.starts, record.ends, strict=True))
        times[:pulls] = [(begin, times[pulls - 1][1])] * pulls  # (all of them are awaited at once)
        gradients = dict(one.pushed) if keep_gradients else {}
        series = None if tracker is None else tracker.last
        sizes: dict[tuple[str | int, ...], int] = dict(compute.sizes.items())
        whole = Step(rank, step, record.losses[0], *one.rows, gradients, times, sizes, compute.data_bytes(),
                     series=series)  # fmt: skip
        hand_on(whole)
        begin = time.perf_counter()
