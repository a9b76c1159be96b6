"""execute() for parameter servers: workers and servers on real processes, and the program as it happened.

    rank 0, 1, ...   a worker: for each step it pulls, walks its instructions, pushes, and reports to the driver
    the last ranks   a server: follows the rule, and brings back the order of what it did
    driver           waits; where on_death=continue it starts workers that die again

The result can be replayed exactly: `reference.py` reads only the order (in plain torch, in a process of its own).
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from minipar.cluster import agreement, launch, worker
from minipar.cluster.children import Revived
from minipar.cluster.ranks import Ranks
from minipar.comm import clocks, communicator
from minipar.errors import RankDied, SaveError, ServerClosed
from minipar.execution.emulation import Delays, Pacing
from minipar.execution.execution import Execution, Job
from minipar.execution.following import Observer, Paced, Warned, Warnings
from minipar.execution.mean_loss import Finite
from minipar.execution.memory.tracker import Watching, watching_of
from minipar.execution.saving.contents import Outline, collect, outline_of, restore_layers
from minipar.execution.saving.folder import Header
from minipar.execution.saving.keeping import NOTHING, Share, Storing
from minipar.execution.saving.storage import Reading
from minipar.execution.updating import Form, Update, check_update, class_name, forms_of
from minipar.models.parameter_groups import parameters_of
from minipar.models.tensors import copied, count_bytes, dtype_name, layers_of
from minipar.prediction.program_costs import ProgramCosts
from minipar.prediction.service import Times, key_of, timed
from minipar.program import Op, Program, Value
from minipar.program.server_rule import Kind, Mode, Row
from minipar.server.process import Served, Server
from minipar.server.pushing import Servers
from minipar.server.saving import Part, Saving
from minipar.server.shard import Line, Settings, Shard, clip, form_of, pieces_of, squares
from minipar.server.working import Worker
from minipar.strategies import served_order
from minipar.strategies.passes.compress import keeps_residual
from minipar.strategies.served_order import Blocks, completed
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
    received     bytes of gradients, per server
    sent         bytes of parameters, per server
    parameters   at the end, by name
    """

    order: list[Row] = field(repr=False)
    deaths: list[str]
    received: list[int]
    sent: list[int]
    parameters: dict[str, Tensor] = field(repr=False)

    @property
    def dropped(self) -> int:
        """Gradients that came too late (k-of-n)."""
        return sum(row.kind is Kind.DROP for row in self.order)


@dataclass(frozen=True)
class Task:
    """What every rank must know of a run; the keys of the settings are those of the job's model.

    slow      delays of emulated devices, one for each worker
    """

    job: Job
    program: Program
    settings: Settings
    storing: Storing
    keep_gradients: bool
    slow: list[Delays] | None
    watching: Watching | None


class Step(NamedTuple):
    """A step that a worker has done: its share of the mean loss, its `rows` of the `of` rows of the step, and gradients
    by parameter name (if kept). Also when each instruction ran, and what happened to the worker's memory, if that was
    followed."""

    worker: int
    step: int
    loss: float
    rows: float
    of: float
    gradients: dict[str, Tensor]
    times: Sequence[tuple[float, float]] = ()
    series: Series | None = None


class Worked(NamedTuple):
    """What a worker brings back at the end: bytes of the values of its program and of input rows, and by how much times
    may be wrong against those of another host. (It reports each step when it is done.)"""

    sizes: dict[Value, int]
    data: int
    clock_error: float


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
    storing: Storing = NOTHING,
    memory: bool = False,
) -> tuple[Execution, Service]:
    """Run all steps of a program with parameter servers. Returns the execution, and what the servers did.

    watch            called with a `Moment` of the run at most ten times a second
    on_death         of a worker: "abort": its death is raised; "continue": it starts again and goes on. That of a
                     server is raised
    slow             delays of emulated devices, one for each worker
    pacing           of the servers, where links are emulated, too
    memory           follow every storage of the workers: the trace then has `series`. What servers keep is on their
                     hosts: their series are those of the values that the program names
    storing          go on from a saved run; save this one; bring its state back in `Execution.shares`

    Raises RankDied where a worker dies again and again without doing a step in between; SaveError.
    """
    assert program.serving is not None
    servers, workers = program.serving.servers, program.workers
    if storing.folder and keeps_residual(program.compress):
        raise SaveError(f"{_unsaved(program)}; possible are compress=none, bf16, fp16")
    steps: dict[tuple[int, int], Step] = {}
    deaths: list[str] = []
    tries: Counter[int] = Counter()  # deaths of each worker since it has done a step
    warnings, saving, show = Warnings(), Saving(storing, servers + 1), Paced(watch, program.steps)
    blocks: list[Blocks] = [served_order.blocks_of(program, worker) for worker in range(workers)]

    def hear(rank: int, fact: Any) -> None:
        if isinstance(fact, Revived):
            if rank >= workers:
                raise RankDied(f"{fact.line}. Its part of the parameters is lost; possible is to resume a saved run")
            deaths.append(fact.line)
            tries[rank] += 1
            if tries[rank] >= _TRIES:
                times = f"{_TRIES} times without a step in between"
                raise RankDied(f"{fact.line}. It died {times}: to start it again does not help")
        elif isinstance(fact, Step):
            tries.pop(rank, None)
            steps[rank, fact.step] = fact
            report(len(steps))
            done = len(steps) // workers
            if done < program.steps:  # (else the run is over soon, and its final losses are shown then)
                show(done, lambda: losses_of(steps.values(), done), lambda: None)
        elif isinstance(fact, Header):
            saving.heard(rank, fact)
        elif isinstance(fact, Warned):
            warnings(rank, fact)

    folder = tempfile.mkdtemp(prefix="servers-", dir=launch.scratch_folder())
    groups = tuple(g for g, group in enumerate(program.groups) for _ in group.tensors)  # of each key
    mode = Mode.parse(program.serving.mode, workers)
    settings = Settings(folder, (), workers, program.steps, mode, servers, groups, on_death, program.clip,
                        program.compress, pacing)  # fmt: skip
    task = Task(job, program, settings, storing, keep_gradients, slow, watching_of(memory, cluster.emulates))
    try:
        with storing.around() if storing.folder else contextlib.nullcontext():
            revivals = _REVIVALS if on_death == "continue" else 0
            found = cluster.run_reviving(revivals, hear, _take_part, task)
            shares = [share for _, share in (*found[workers:], found[0])]
            saving.commit(shares[0].header)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    worked, served = ([one for one, _ in some] for some in (found[:workers], found[workers:]))
    execution, service = _result(task, blocks, steps, worked, served, deaths)
    show(program.steps, lambda: execution.losses, lambda: None)
    return replace(execution, shares=shares), service


def pacing_of(costs: ProgramCosts) -> Pacing:
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
    task: Task, blocks: list[Blocks], steps: dict[tuple[int, int], Step], worked: list[Worked], served: list[Served],
    deaths: list[str],
) -> tuple[Execution, Service]:  # fmt: skip
    program, order = task.program, served[0].order
    assert program.serving is not None
    wanted = [(order[k].worker, order[k].step) for k in completed(order)]
    taken = [steps[one] for one in wanted if one in steps]
    losses = losses_of(taken, program.losses)
    gradients = [step.gradients for step in taken]
    if program.serving.mode != "sync":  # (else it was known before; another order of arrivals does not change it)
        program = served_order.as_it_happened(program, order, shares_of(program.groups, len(served)))
    else:
        gradients = [_summed([t for t in taken if t.step == s], program.clip) for s in range(program.steps)]
    times: Times = {}
    for t in taken:
        for k, (ins, span) in enumerate(zip(blocks[t.worker][t.step], t.times, strict=True)):
            times[key_of(t.worker, ins, k)] = span
    for one in served:
        times |= one.times
    zero = min((start for (_, op, *_), (start, _) in times.items() if op is Op.REPLY), default=0.0)
    starts, ends = ([[max(0.0, t - zero) for t in row] for row in rows] for rows in timed(program, times))
    data = [one.data for one in worked] + [0] * len(served)
    error = max(one.clock_error for some in (worked, served) for one in some)
    trace = Trace(program, starts, ends, _size(task, worked, served), "measured", "bytes", data, clock_error=error)
    if any(step.series is not None for step in taken):
        trace = replace(trace, series=_series(trace, taken, zero))
    received, sent = [one.received for one in served], [one.sent for one in served]
    parameters = _assembled(served[0].keys, served)
    execution = Execution(program, losses, [trace.time], trace, gradients if task.keep_gradients else [])
    return execution, Service(order, deaths, received, sent, parameters)


def losses_of(taken: Iterable[Step], count: int) -> list[float]:
    """The mean loss of each step, over the rows of the workers that did it."""
    whole, rows, of = [0.0] * count, [0.0] * count, [0.0] * count
    for one in taken:
        if one.step < count:
            whole[one.step] += one.loss
            rows[one.step] += one.rows
            of[one.step] = one.of
    return [loss * (all_ / n) if n and n != all_ else loss for loss, n, all_ in zip(whole, rows, of, strict=True)]


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


def _size(task: Task, worked: list[Worked], served: list[Served]) -> Callable[[int, Value], int]:
    """Bytes of a value, as they were measured."""
    shares = shares_of(task.program.groups, len(served))
    states: Counter[tuple[int, int]] = Counter()
    for number, one in enumerate(served):
        for k, kept in one.states.items():
            states[number, task.settings.groups[k]] += kept

    def size(rank: int, value: Value) -> int:
        if rank < len(worked):
            return worked[rank].sizes.get(_of_any_step(value), 0)
        number = rank - len(worked)
        return states[number, value.index] if value.kind == "served_state" else shares[number].get(value.index, 0)

    return size


def _of_any_step(value: Value) -> Value:
    """A value of a worker's first step: every step has the same ones."""
    return value._replace(step=0) if value.microbatch >= 0 else value


def _summed(steps: list[Step], most: float | None) -> dict[str, Tensor]:
    """The gradient of a step: the sum of the workers' parts, clipped as the servers clip it."""
    found: dict[str, Tensor] = {}
    for step in sorted(steps, key=lambda t: t.worker):
        for name, gradient in step.gradients.items():
            found[name] = found[name] + gradient if name in found else gradient
    if most is not None:
        numbered = dict(enumerate(found.values()))
        clip(numbered, squares(numbered), most)
    return found


def _assembled(keys: tuple[Form, ...], served: list[Served]) -> dict[str, Tensor]:
    """The parameters at the end, from the servers' parts."""
    line = Line(keys, pieces_of(keys, 1)[0])
    for pieces, one in zip(pieces_of(keys, len(served)), served, strict=True):
        line.part(pieces).copy_(one.values)
    return {key.name: values for key, values in zip(keys, line.values(keys), strict=True)}


def _unsaved(program: Program) -> str:
    return f"plan {program.name!r}: what compress={program.compress} has left out of the gradients is not saved"


# in the ranks ---------------------------------------------------------------------------------------------------------


def _take_part(task: Task) -> tuple[Any, Share]:
    """What every rank does: the first ones are workers, the last ones servers. Returns what it brings back, and its
    share of the state."""
    job, program, storing = task.job, task.program, task.storing
    context, clock = worker.context(), clocks.Reading(0.0, 0.0, 0.0)
    if not context.store and len(set(agreement.agree().hosts)) > 1:
        clock = clocks.read(communicator.create())
    model = job.build()
    forms, outline = forms_of(model), outline_of(model)
    update = Update(job.optimizer, forms, job.scheduler)
    check_update(update, f"program {program.name!r} cuts parameters over servers")
    optimizer = class_name(update.whole) if forms else ""
    if storing.saved is not None:
        storing.saved.check_fits(outline.rows, optimizer)
    names = {id(p): name for name, p in model.named_parameters()}
    parameters = {names[id(p)]: p for group in parameters_of(layers_of(model)) for p in group}
    settings = replace(task.settings, keys=tuple(form_of(name, p) for name, p in parameters.items()))
    header = Header(storing.first + program.steps, job.seed, job.batch, dtype_name(job.dtype), program.name, optimizer,
                    outline.rows, call=storing.call)  # fmt: skip
    number = context.rank - program.workers
    if number < 0:
        return _be_worker(task, settings, context.rank, model, outline, header, clock)
    shard = Shard(settings, number, list(parameters.values()), job.optimizer, job.scheduler, forms)
    if storing.saved is not None:
        shard.resume(storing.saved)
    part = Part(storing, number, header, shard.saved, shard.saved_schedule)
    served = Server(settings, number, shard, part.reached).run()
    share = part.end(shard.line.bytes.nbytes / sum(map(count_bytes, parameters.values())))
    times = {key: (start + clock.seconds, end + clock.seconds) for key, (start, end) in served.times.items()}
    return replace(served, times=times, clock_error=clock.error), share


def _be_worker(
    task: Task, settings: Settings, rank: int, model: nn.Module, outline: Outline, header: Header, clock: clocks.Reading
) -> tuple[Worked, Share]:
    """Do steps until the servers have done all their updates; then bring what no server has of the state."""
    job, program, storing = task.job, task.program, task.storing
    if storing.saved is not None:
        names = {id(p): name for name, p in model.named_parameters()}
        layers = zip(layers_of(model), outline.prefixes, strict=True)
        restore_layers(layers, names, Reading(storing.saved), lambda p: not p.requires_grad)
    spare = copied(model)  # to warm up: first calls take longer, and should not count in the first step
    Worker(program, rank, spare, job).run(job.batches, storing.first)
    model.zero_grad()  # (a copy may use a weight of the model by a global name)
    one = Worker(program, rank, model, job, task.slow[rank] if task.slow else None)
    one.compute.finite = None if job.on_nan == "ignore" else Finite(rank, job.on_nan, worker.report)
    part = Part(storing, settings.servers, header, partial(collect, one, outline, served=True))
    with (
        contextlib.suppress(ServerClosed),  # (it was started again after the end)
        closing(Servers(settings, rank)) as one.servers,
    ):
        for step in _steps(task, one, one.servers, clock, part):
            worker.report(step)
    named = {value for ins in one.instructions for value in (*ins.reads, *ins.writes)} | program.state[rank]
    sizes = {_of_any_step(value): one.size(value) for value in named}
    share = part.end() if rank == 0 else Share(header)
    share = replace(share, reason=_unsaved(program)) if keeps_residual(program.compress) else share
    return Worked(sizes, one.compute.data_bytes(), clock.error), share


def _steps(task: Task, one: Worker, servers: Servers, clock: clocks.Reading, part: Part) -> Iterator[Step]:
    """The steps of a worker, by the clock of rank 0."""
    pulls = sum(ins.op is Op.PULL for ins in one.instructions)
    tracker = task.watching(one) if task.watching is not None else None
    begin = time.perf_counter()
    while (step := servers.next_step()) is not None:
        if one.comm.rank == 0:
            part.reached(servers.version)
        with tracker or contextlib.nullcontext():
            record = one.run(task.job.batches, task.storing.first + step)
        times = list(zip(record.starts, record.ends, strict=True))
        times[:pulls] = [(begin, times[pulls - 1][1])] * pulls  # (all of them are awaited at once)
        times = [(start + clock.seconds, end + clock.seconds) for start, end in times]
        series = None if tracker is None else tracker.last
        if series is not None:
            series = replace(series, times=[moment + clock.seconds for moment in series.times])
        gradients = dict(one.pushed) if task.keep_gradients else {}
        yield Step(one.comm.rank, step, record.losses[0], *one.rows, gradients, times, series)
        begin = time.perf_counter()
