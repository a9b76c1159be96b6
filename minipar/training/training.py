"""train(): run a plan on a cluster, with a model and data: first a prediction, then the run, to compare both."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from tqdm.auto import tqdm

from minipar.cluster import Cluster
from minipar.cluster.launched import driven, given_or_here, speaks
from minipar.cluster.ranks import Ranks, check_size
from minipar.costs.rates import Calibration
from minipar.data import loading
from minipar.errors import MiniparError, PlanError, SaveError
from minipar.execution.dynamic_schedule import check_carrier
from minipar.execution.emulation import delays
from minipar.execution.execution import (
    Execution,
    Job,
    Loss,
    Model,
    Running,
    captured_once,
    emulated_costs,
    profile_job,
    under_way,
)
from minipar.execution.following import Callback, Observer
from minipar.execution.lines import Slice
from minipar.execution.measuring.calibration import quick_calibration
from minipar.execution.saving import keeping, restarting
from minipar.execution.saving.folder import open_folder
from minipar.execution.updating import Optimizer, Scheduler, other_scheduler
from minipar.models.losses import Counting, Own, Weighted
from minipar.models.mixture_gpt import Load
from minipar.models.reached import check_ids
from minipar.models.tensors import dtype_named, layers_of
from minipar.prediction.advice import advising
from minipar.prediction.forecast import Facts, Forecast
from minipar.prediction.oversubscription import available_cores
from minipar.prediction.program_costs import as_emulated, microbatch_rows
from minipar.program import PRECISIONS, Program
from minipar.program.shape import Shape
from minipar.strategies.keys import whole_number
from minipar.strategies.plan import Plan
from minipar.trace import Trace
from minipar.trace.recorded_order import RecordedOrder, local_order, order_of, served_order
from minipar.training import own_program, plainly
from minipar.training.checking import TF32, Checked, Checker, cost_of, passes_to_check, pieces_of, why_different
from minipar.training.evaluation import Evaluation, evaluate
from minipar.training.plainly import Start
from minipar.training.reference import Reference
from minipar.wording import several

if TYPE_CHECKING:
    from minipar.server.serving import Service
    from minipar.trace.peaks import Peaks

FEW_STAGES = 8
Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True)
class Run(Execution):
    """What a training run gave: the `Execution` of its program, and what is known beside it.

    predicted     the trace that was predicted before the run
    step_times    seconds of every step; if a step begins before the one before it has ended, the mean over a program's
                  steps
    checked       which steps were compared with plain torch, and how far they were apart; or why none was
    reference     losses of plain torch on one process, if `reference` or `check` was asked for, and with `check` its
                  gradients
    first_step    0; for a resumed run, how many steps were done before
    cut           how a model with a forward of its own was cut into layers; "" for one that is layers
    service       what parameter servers did, with sync=ps; then program and traces are of the whole run, as it
                  happened, and the reference is a replay of its order, except in mode sync with flushes

    An asynchronous plan (schedule=pipedream, pipedream-vertical, pipedream-2bw, ampnet) has no steps that begin and end
    one after another. There a step is `batch` rows in `microbatches` parts; trace and prediction are of the whole run.
    There is a loss for each mini-batch: with pipedream and ampnet a micro-batch, with pipedream-2bw a step. And the
    reference is a replay of the recorded order, which `recorded_order.order_of(run.program)` gives.
    """

    plan: Plan
    predicted: Trace
    step_times: list[float]
    checked: Checked
    reference: Reference | None = None
    plain_time: float | None = None
    first_step: int = 0
    service: Service | None = None
    cut: str = ""

    @property
    def expert_load(self) -> Load:
        """How many tokens chose each expert of a mixture, and how many were dropped: over all ranks, micro-batches and
        steps, as they were counted while it ran. `print` shows it, `minipar.trace.charts.expert_load` draws it."""
        if self.load is None:
            raise MiniparError(
                "expert_load: nothing was counted; possible is the run of a model with experts, such as "
                "models.build('gpt-moe-tiny'), without parameter servers"
            )
        return self.load

    @property
    def prediction_error(self) -> float:
        """The relative error of the predicted step time; negative if the prediction was too short."""
        return self.predicted.time / self.trace.time - 1 if self.trace.time else 0.0

    @property
    def bytes_sent(self) -> list[int]:
        """Per rank the bytes sent in one step."""
        return [size // self.trace.program.steps for size in self.trace.bytes_sent()]

    @property
    def memory(self) -> Peaks:
        """Per rank the measured peak of the traced step: bytes, the instruction, and what held how much of it."""
        if not self.trace.series:
            raise MiniparError("memory: needs train(..., memory=True), which follows every allocation of the ranks")
        from minipar.trace.peaks import Peaks

        return Peaks((series.peak() for series in self.trace.series), self.trace)

    @property
    def peak_memory(self) -> list[int]:
        """Per rank the measured peak in bytes: of everything with `train(..., memory=True)`, else of the values that
        the program names, without what an instruction needs only while it runs."""
        return [int(peak) for peak in self.trace.peak_memory()]

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Save parameters, optimizer states and step to a folder, for `minipar.resume`; replaces a run saved there.

        At every moment the folder has one whole saved run, the old one or the new one. SaveError if it cannot be
        written, or if the ranks did not bring their state back: see `keep` of `train`. Under torchrun rank 0 does it.
        """
        if speaks():
            keeping.save(self.shares, folder)

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write the model's parameters, each whole and under its name, to one safetensors file; like `save`."""
        if speaks():
            keeping.export(self.shares, path)

    def max_error(self) -> float:
        """How far losses, gradients, parameters and buffers were from plain torch's in the steps that were compared
        (`checked` says which): the largest difference, relative to the largest element of plain torch of its kind.

        Parameters are those of every rank after the step. Statistics of norms are left out where a batch was split:
        those of a part cannot equal the whole batch's. MiniparError if nothing was compared.
        """
        if not self.checked.steps:
            raise MiniparError(f"max_error: {self.checked}; possible is train(..., check=True)")
        return self.checked.error

    def __repr__(self) -> str:
        each = 1e3 / self.program.steps
        steps = len(self.losses) * self.program.steps // self.program.losses
        return (
            f"<Run of {self.plan}: {several(steps, 'step')}, loss {self.losses[0]:.4f} -> "
            f"{self.losses[-1]:.4f}, "
            f"step {self.trace.time * each:.1f} ms measured, {self.predicted.time * each:.1f} ms predicted "
            f"({self.prediction_error:+.0%}), {self.checked}>"
        )

    def _repr_html_(self) -> str:
        from minipar.training import notebook  # (pictures, which a run without a notebook does not need)

        return notebook.html(self)


@driven
def train(
    model: Model,
    data: Any,
    plan: Plan | str | None = None,
    *,
    program: Program | Callable[[Shape], Program] | None = None,
    cluster: Ranks | None = None,
    steps: int = 10,
    batch: int = 32,
    loss: Loss | None = torch.nn.functional.cross_entropy,
    optimizer: Optimizer = partial(torch.optim.SGD, lr=0.1),
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    reference: bool = False,
    check: bool | str = "auto",
    progress: bool = True,
    memory: bool = False,
    calibration: Calibration | None = None,
    resume: str | os.PathLike[str] | None = None,
    save: str | os.PathLike[str] | None = None,
    save_every: int | None = None,
    keep: bool | None = None,
    watch: Observer | None = None,
    scheduler: Scheduler | None = None,
    keep_modes: bool = False,
    callback: Callback | None = None,
    on_nan: str = "stop",
    annotations: Mapping[str, str] | None = None,
) -> Run:
    """Train a model by a plan, on real processes.

    model       any nn.Module, or a function that makes one, such as partial(models.gpt, layers=12). An nn.Sequential
                (or a list) is layers; any other is cut into layers on rows of the first batch (`Run.cut` says how), and
                its forward is given x: a dict as its keyword arguments, a tuple as its arguments
    data        has `batch(step, size) -> (x, y)`, such as data.stdlib_text(); or one fixed pair (x, y); or a torch
                Dataset (see `data.Rows`), DataLoader, or iterable of batches (see `data.Batches`). x and y are tensors,
                or tuples or dicts of them, with the rows in dimension 0; sequences may have another length in each step
    plan        how it is trained in parallel; default one device, or what `program` was compiled from
    program     runs in place of the plan's own program: a program, or a function that makes one of the model's shape,
                such as lambda shape: mine(plan.compile(shape)). It is verified, and must agree with the plan's keys;
                `steps` must be a multiple of the program's steps
    cluster     ranks to run on, plan.ranks of them; default: those that torchrun started, or made for this call
    batch       rows of a step, over all replicas and micro-batches
    loss        loss(output, y) -> scalar mean over rows (or target elements); or (sum, count), or
                `losses.weighted(loss, count)`, for a mean over anything else that can be counted in y. None: the model
                is given the whole batch, and makes its loss itself: a scalar, `output.loss`, or the only scalar of a
                tuple. What it counts is found on a few rows
    optimizer   makes an optimizer of a list of the whole model's trainable parameters; or of a list of pairs
                (name, parameter), if its own parameter is called `named_parameters` or it is wrapped in `minipar.named`
    scheduler   makes a torch.optim.lr_scheduler of that optimizer, such as partial(CosineAnnealingLR, T_max=steps). It
                steps once after each update: that of a step, or of each mini-batch of an asynchronous plan
    keep_modes  with inference=true, leave every module in the mode that the model function gave it, for example to keep
                dropout on; else the model is put in evaluation mode. Training always leaves modes as they are
    reference   also train plain torch on one process, to compare the losses
    check       compare losses, gradients, parameters and buffers with plain torch: "auto" the first step and a few
                random later ones, if that is estimated to take at most 2 s or 5 % of the run, while the ranks wait;
                True every step (memory: twice the model per step); False none. `Run.checked` says what was compared
    memory      follow every allocation of the ranks, and predict every one: then both traces have `series`, and
                `Run.memory` says what held the peak (this takes time, so do not use it for timing)
    calibration of the cluster, from `calibrate(cluster)`, for the prediction; default: a quick one before the first run
                on this cluster
    resume      a folder with a saved run, of any plan: go on after its last step, with what is given here
    save        a folder that the ranks save the run to, at its end and after every `save_every` steps of it. If
                torchrun starts the processes again, the run goes on from the last save, also on other ranks
    keep        bring parameters and optimizer states back, for `Run.save`; default: if all are at most 64 MiB
    watch       called with a `following.Moment` at most ten times a second
    callback    called with a `StepInfo` of every step, in order: step, loss, learning rates, gradient norm. If it
                returns False, the run ends: the steps that the ranks have begun meanwhile are still part of it, and it
                is saved as at its end. If it raises an error, the run ends at once, unsaved. (For an asynchronous plan
                it is called after the run.)
    on_nan      what to do if the loss of a micro-batch is infinite or no number: "stop" raises NotFinite with step,
                rank and micro-batch before any update uses it; "warn" warns once and goes on; "ignore" goes on

    annotations with tp of 2 or more, the forms of some operators' outputs or of parameters, by patterns of their names,
                such as {"*.mlp.0": "S-1 on tp", "*.mlp.2": "P on tp"}; the forms of all others follow. Default: the
                plan's own (its key `annotations`); without these what `minipar.sharding.megatron()` gives, or
                `sequence_parallel()` if the plan has that key; where the model has none of these names, what
                `minipar.sharding.by_operators` finds

    Raises PlanError where plan, model, batch and cluster do not fit together; DeviceOutOfMemory, with plans that would
    fit, on emulated devices of limited memory; SaveError where `resume` has no saved run of this model, or where
    nothing can be written to `save`; CheckError where a step differs from plain torch by more than rounding; what a
    rank raises; RankDied.
    """
    steps_of_run = _steps(**locals())
    while True:
        try:
            next(steps_of_run)
        except StopIteration as end:
            run: Run = end.value
            return run


def stepping(model: Model, data: Any, plan: Plan | str | None = None, **options: Any) -> Iterator[Step]:
    """`train` as a loop of your own: `for step in minipar.stepping(model, data, plan): print(step.loss)`.

    options   as for `train`, which is a loop over the same steps; `progress` is False unless it is asked for

    Between two steps the ranks wait, each with its layers and its optimizer. When the loop is left, by `break`,
    `return` or an error, they are free for another run. Where replicas train by themselves (`local_steps`) or messages
    of a step travel during the next one (`overlap=priority`), a step of the loop is the several steps of a program.

    Raises PlanError for plans whose steps do not begin and end one after another (pipelines without flushes, parameter
    servers) and for program=; what `train` raises.
    """
    bound = inspect.signature(train).bind(model, data, plan, **{"progress": False, **options})
    bound.apply_defaults()
    steps = _steps(**bound.arguments, one=True)
    try:
        while (step := _advance(steps)) is not None:
            yield step
    finally:
        _leave(steps)


@driven
def _advance(steps: Generator[Step, None, Run]) -> Step | None:
    return next(steps, None)


@driven
def _leave(steps: Generator[Step, None, Run]) -> None:
    steps.close()


@dataclass
class Step:
    """A step of `stepping` that is done. What it offers is of the state after it, while the loop is at it.

    step   its number, from 0 on (a resumed run counts on from the saved step)
    loss   the mean loss of its batch, before its update
    """

    step: int
    loss: float
    _running: Running | None = field(default=None, repr=False)

    def __getstate__(self) -> dict[str, Any]:  # (under torchrun only rank 0 has the run)
        return {**vars(self), "_running": None}

    @property
    def trace(self) -> Trace:
        """What was measured of the step."""
        return _of_step(self, lambda running: running.trace(len(running.done) - 1))

    def evaluate(self, data: Any, plan: Plan | str | None = None, **options: Any) -> Evaluation:
        """`minipar.evaluate` with the parameters after this step, on the same ranks. plan: default, that of the run."""

        def found(running: Running) -> Evaluation:
            job, layout = running.job, Plan.parse(running.work.programs[0].name) if plan is None else plan
            known = {"loss": job.loss, "seed": job.seed, "dtype": job.dtype, "batch": job.batch}
            state = keeping.model_of(running.shares(), "step.evaluate")
            return evaluate(job.model, data, layout, state=state, cluster=running.ranks, **{**known, **options})

        return _of_step(self, found)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Save the run as it is after this step, for `minipar.resume`; as `Run.save` does."""
        _of_step(self, lambda running: keeping.save(running.shares(), folder))


@driven
def _of_step(step: Step, of: Callable[[Running], Found]) -> Found:
    running = step._running
    if running is None or running.work.storing.first + running.steps != step.step + 1:
        raise MiniparError(f"step {step.step}: the loop has left it")
    return of(running)


def _steps(
    model: Model, data: Any, plan: Plan | str | None, program: own_program.Own | None, cluster: Ranks | None,
    steps: int, batch: int, loss: Loss | None, optimizer: Optimizer, seed: int, dtype: torch.dtype, reference: bool,
    check: bool | str, progress: bool, memory: bool, calibration: Calibration | None,
    resume: str | os.PathLike[str] | None, save: str | os.PathLike[str] | None, save_every: int | None,
    keep: bool | None, watch: Observer | None, scheduler: Scheduler | None, keep_modes: bool,
    callback: Callback | None, on_nan: str, annotations: Mapping[str, str] | None, one: bool = False,
) -> Generator[Step, None, Run]:  # fmt: skip
    """The steps of a training, whose arguments are those of `train`, and at its end the run. one: the ranks stop after
    every step; else only where something is compared, and not all steps are seen."""
    plan = Plan.parse(plan or "") if program is None else own_program.plan_of(plan, program)
    if one and (plan.asynchronous or plan.sync == "ps" or program is not None):
        raise PlanError(
            f"stepping: plan {plan} has no steps that begin and end one after another; possible is train(callback=...)"
        )
    steps = whole_number("steps", steps)
    every = 0 if save_every is None else whole_number("save_every", save_every)
    _check_options(plan, every, save is not None, memory, callback is not None)
    cluster = given_or_here(cluster)
    check_size(cluster, plan.ranks, f"plan {plan}")
    if cluster is None and program is None:
        _check_stages(plan, model)
    storing = keeping.storing(resume, save, every, keep)
    if storing.folder:
        storing, steps = restarting.going_on(storing, steps)
    asked = Asked(plan, program, steps, storing, reference, check, memory, progress, calibration, watch, callback, one)
    loss = Own() if loss is None else loss
    pairing = loading.Pairing(isinstance(loss, Own), loading.takes_of(model))
    with loading.read_ahead(data, steps, storing.first, seed, batch, pairing) as (data, batch):
        quiet = plan.inference and not keep_modes
        forms = annotations if annotations is not None else annotations_of(plan)
        job = Job(model, data, batch, loss, optimizer, seed, dtype, scheduler, quiet, on_nan, forms)
        for part in model if isinstance(model, (list, tuple)) else [model]:
            if isinstance(part, torch.nn.Module):
                check_ids(optimizer, part)
        with nullcontext(cluster) if cluster is not None else Cluster(plan.ranks) as ranks:
            return (yield from _trained(asked, job, ranks))


@dataclass(frozen=True)
class Asked:
    """What `train` was asked for, beside the job of its ranks. `one`: they stop after every step."""

    plan: Plan
    program: own_program.Own | None
    steps: int
    storing: keeping.Storing
    reference: bool
    check: bool | str
    memory: bool
    progress: bool
    calibration: Calibration | None
    watch: Observer | None
    callback: Callback | None
    one: bool

    @property
    def split(self) -> bool:
        """Whether backwards may run in halves."""
        return self.plan.splits if self.program is None else own_program.splits(self.program)

    def bar(self, total: int, title: str) -> Any:
        return tqdm(total=total, desc=title, disable=not self.progress, leave=False)


def _trained(asked: Asked, job: Job, ranks: Ranks) -> Generator[Step, None, Run]:
    """Profile, predict, run, and compare."""
    plan, storing = asked.plan, asked.storing
    if plan.deciding:
        check_carrier(ranks, f"schedule={plan.schedule}")
    job, facts = _profiled(asked, job, ranks)
    _warn(plan, facts, storing)
    forecast = Forecast(
        facts, job.batch, ranks.emulates, available_cores() if ranks.device == "cpu" else None,
        partial(_rates, asked, ranks),
    )  # fmt: skip
    main, rest = _programs(asked, job, forecast)
    predicted = forecast.of(main)
    checker = _checker(asked, job, facts, main, predicted, ranks)
    start = checker.start
    measure = partial(ranks.run_on, [0], profile_job, job, memory=True, split=asked.split)
    with nullcontext() if ranks.emulates is None else advising(plan, job.batch, lambda rows: measure(rows)[0]):
        done, service = yield from _run(asked, job, ranks, main, rest, checker)
    programs = ([main] * (asked.steps // main.steps) + [rest] * (rest is not None))[: len(done.times)]
    sizes = [each.steps for each in programs if each is not None]
    plain, plain_time = _reference(asked, checker, start, done, service, sum(sizes))
    times = [seconds / size for seconds, size in zip(done.times, sizes, strict=True) for _ in range(size)]
    return Run(
        **vars(done), plan=plan, predicted=predicted, step_times=times if service is None else done.times,
        checked=checker.checked, reference=plain, plain_time=plain_time, first_step=storing.first, service=service,
        cut=facts.cut,
    )  # fmt: skip


def _checker(asked: Asked, job: Job, facts: Facts, main: Program, predicted: Trace, ranks: Ranks) -> Checker:
    """What compares the run with plain torch, whose process is started now, before anything is measured."""
    plan, passes, gpu = asked.plan, -(-asked.steps // main.steps), ranks.device != "cpu"
    expected, chosen = why_different(plan, facts.split_sensitive, bool(facts.cut)) or facts.loss_note, list[int]()
    checked = Checked(reason="" if asked.check else "check=False")
    if asked.check == "auto":
        cost = cost_of(main, facts.profile, job.batch, gpu)
        chosen, reason = passes_to_check(passes, job.seed, cost, passes * predicted.time)
        checked.reason = expected or reason
    compared = asked.check is True or (bool(chosen) and not expected)
    if compared or asked.reference:
        plainly.prepare()
    start = Start.of(asked.storing) if compared or asked.reference else plainly.BEGINNING
    narrow = PRECISIONS[plan.precision]
    eps = torch.finfo(getattr(torch, narrow)).eps if narrow else TF32 if gpu else 0.0
    notes = [f"{name} computed whole ({why})" for name, why in facts.whole.items()] + facts.split_sensitive
    return Checker(
        plan, job, asked.check is True, chosen if compared else [], expected, notes, ranks.threads, eps,
        asked.reference and asked.check is True, start, checked,
    )  # fmt: skip


def _check_options(plan: Plan, every: int, saves: bool, memory: bool, callback: bool) -> None:
    """Refuse options of `train` that do not go with a plan."""
    if every and not saves:
        raise PlanError(f"save_every={every}: needs save=folder")
    if plan.asynchronous and every:
        raise PlanError(f"save_every={every}: schedule={plan.schedule} has no flush; possible is save=, at the end")
    if memory and plan.schedule == "ampnet":
        raise PlanError("memory=True: schedule=ampnet decides its order as it runs; possible are the other schedules")
    if plan.sync != "ps":
        return
    if every and plan.mode.startswith(("async", "ssp")):
        raise PlanError(
            f"save_every={every}: with mode={plan.mode} workers are at different steps; possible are save=, at the "
            "end, and mode=sync"
        )
    if callback:
        raise PlanError("callback: not together with sync=ps, whose workers are at different steps; use watch=")


def _profiled(asked: Asked, job: Job, ranks: Ranks) -> tuple[Job, Facts]:
    """What one rank measures of the model's layers, and the job with what it found: graphs, and what a loss counts."""
    plan = asked.plan
    sharding = (plan.zero and plan.dp > 1) or plan.sync == "ps"
    sliced = f"plan {str(plan)!r} shards optimizer states" if sharding else ""
    rows = microbatch_rows(job.batch, plan.dp, plan.total_microbatches)
    own_means = plan.asynchronous and plan.schedule != "pipedream-2bw"  # of each micro-batch
    parts = 1 if own_means else plan.dp * plan.total_microbatches
    flops = ranks.emulates is not None and ranks.emulates.flops is not None
    with asked.bar(1, "profile, one layer at a time") as meter:
        if plan.sharing > 1:
            job = captured_once(job, plan.sharing, plan.cut, ranks, PRECISIONS[plan.precision])
        (facts,) = ranks.run_on(
            [0], profile_job, job, rows, asked.memory, _of_layers(plan), asked.split, sliced, parts, flops
        )
        meter.update()
    job = replace(job, cut=facts.cut_bytes)
    if isinstance(job.loss, Own):
        job = replace(job, loss=Own(facts.counted_form))
    elif facts.counted_form is not None:
        job = replace(job, loss=Weighted(job.loss, Counting(job.loss, facts.counted_form)))
    return job, facts


def _warn(plan: Plan, facts: Facts, storing: keeping.Storing) -> None:
    """Warn of what makes results differ from one device's, and of a saved schedule that does not fit."""
    parts = plan.dp * plan.total_microbatches * plan.slice_count
    notes = [facts.loss_note]
    if facts.split_sensitive and parts > 1:
        notes.append(
            f"the batch is split into {parts} parts, and the results of some layers depend on how: "
            f"{', '.join(facts.split_sensitive)}; they are one device's with dp=1, microbatches=1 and accumulate=1"
        )
    if facts.whole:
        named = "; ".join(f"{name}: {why}" for name, why in facts.whole.items())
        notes.append(f"{several(len(facts.whole), 'layer')} computed whole by every rank that shares layers ({named})")
    if storing.saved is not None and (note := other_scheduler(storing.saved.header.schedule, facts.scheduler)):
        notes.append(f"{storing.saved.folder}: {note}")
    for note in filter(None, notes):
        warnings.warn(note, stacklevel=6)


def _rates(asked: Asked, ranks: Ranks, program: Program) -> Calibration | None:
    """What messages and collectives of a program cost on the cluster; None for one rank, and for emulated devices."""
    if asked.calibration is not None or len(program.ranks) == 1 or (ranks.emulates and ranks.emulates.emulates):
        return asked.calibration
    algorithms = asked.plan.algorithm != "default"
    return quick_calibration(ranks, program, algorithms=algorithms, progress=asked.progress)


def _programs(asked: Asked, job: Job, forecast: Forecast) -> tuple[Program, Program | None]:
    """What is run again and again, and what is run once after it for the steps that are left."""
    plan, steps, shape, profile = asked.plan, asked.steps, forecast.facts.shape, forecast.facts.profile
    if asked.program is not None:
        return own_program.check(asked.program, plan, shape, steps), None
    if plan.sync == "ps" and PRECISIONS[plan.precision]:
        shape = _as_served(shape, job.dtype)
    planned = profile if forecast.device is None else as_emulated(profile, forecast.device)
    timed = replace(forecast, facts=forecast.facts._replace(tapes=None))
    compiled = partial(
        plan.compile, shape, costs=planned, costs_of=timed.costs, time_of=lambda program: timed.of(program).time
    )
    whole = plan.sync == "ps" or plan.asynchronous  # (then one program has all steps)
    block = steps if whole else plan.block(steps, asked.storing.every)
    try:
        return compiled(steps=block), compiled(steps=steps % block) if steps % block else None
    except PlanError as error:
        if shape.own_layers > 1 or not forecast.facts.cut:
            raise
        raise PlanError(f"{error.reason}. The model is {forecast.facts.cut}", error.details) from error


def _run(
    asked: Asked, job: Job, ranks: Ranks, main: Program, rest: Program | None, checker: Checker
) -> Generator[Step, None, tuple[Execution, Service | None]]:
    """The run, and what parameter servers did in it."""
    passes, plan, first = asked.steps // main.steps, asked.plan, asked.storing.first
    served = plan.sync == "ps"
    with asked.bar(asked.steps * (main.workers if served else 1), str(asked.plan)) as meter:
        if served:
            options = {"memory": asked.memory, "storing": asked.storing, "watch": asked.watch}
            _, compared, _ = checker.ahead(0, 1, False)
            done, service = _serve(
                main, job, ranks, plan.on_death, lambda k: meter.update(), options | {"keep_gradients": compared}
            )
            if compared:
                work = _plain_work(plan, done.program, service, asked.steps)
                checker.compare(done.losses, done.gradients, [_of_servers(done, service)], asked.steps, work)
            return done, service

        def report(k: int, loss: float) -> None:
            meter.set_postfix(loss=f"{loss:.4g}", refresh=False)
            meter.update(main.steps if k < passes else asked.steps % main.steps)

        shown = report if asked.progress else None
        total = passes + (rest is not None)
        with under_way(
            main, job, ranks, passes, shown, asked.watch, None, asked.memory, asked.storing, rest, asked.callback
        ) as running:
            while len(running.done) < total and not running.ended:
                count, compared, then = checker.ahead(len(running.done), total, asked.one)
                some = running.go_on(count, compared, compared, then, last=not asked.one)
                steps = sum(running.work.programs[k].steps for k in some)
                if compared and some:
                    work = _plain_work(plan, running.happened(some[-1]), None, steps)
                    there = [p.model for p in running.passed]
                    checker.compare(running.losses(some), running.gradients(some), there, steps, work)
                if then and not running.ended:
                    checker.go_on([p.share for p in running.passed if p.share is not None], first + running.steps)
                if some:
                    yield Step(first + running.steps - 1, running.losses(some)[-1], running)
            if not running.ended:
                running.go_on(0)
            return running.execution(), None


def _of_servers(done: Execution, service: Service) -> list[Slice]:
    """What servers have of parameters at the end, and the first worker of buffers."""
    found = list(pieces_of("parameters", service.parameters))
    with suppress(SaveError):  # (the state of a large model is not returned)
        found += pieces_of("buffers", keeping.whole_of(done.shares, "check")["buffers"])
    return found


def _serve(
    program: Program, job: Job, ranks: Ranks, on_death: str, report: Callable[[int], None], options: dict[str, Any]
) -> tuple[Execution, Service]:
    """The run with parameter servers."""
    from minipar.server.serving import execute_served, pacing_of

    slow, pacing = None, None
    if ranks.emulates is not None and ranks.emulates.emulates:
        costs = emulated_costs(program, ranks.emulates, job, ranks)
        slow = [delays(costs, rank) for rank in range(program.workers)]
        pacing = pacing_of(costs) if costs.device.links else None
    return execute_served(program, job, ranks, on_death=on_death, slow=slow, pacing=pacing, report=report, **options)


def _reference(
    asked: Asked, checker: Checker, start: Start, done: Execution, service: Service | None, steps: int
) -> tuple[Reference | None, float | None]:
    """What plain torch makes of the whole run, and its seconds for a step where it does what one device would."""
    work = _plain_work(asked.plan, done.program, service, steps)
    if asked.check is True and checker.plain is not None:
        plain = checker.plain
    elif asked.reference:
        with asked.bar(steps, "plain torch, one process") as meter:
            plain = plainly.train_reference(
                checker.job, work, checker.threads, lambda k: meter.update(), keep_gradients=False,
                clip=asked.plan.clip, inference=asked.plan.inference, start=start,
            )  # fmt: skip
    else:
        return None, None
    return plain, plain.seconds if isinstance(work, int) else None


def _plain_work(plan: Plan, program: Program, service: Service | None, steps: int) -> int | RecordedOrder:
    """What plain torch does, to be compared: so many steps, or what was done where that gives other numbers."""
    if service is not None:
        return steps if plan.mode == "sync" else served_order(service.order, plan.dp, plan.total_microbatches)
    if plan.asynchronous:
        return order_of(program)
    if plan.local_steps and plan.dp > 1 and not plan.inference:
        return local_order(steps, plan.dp, plan.total_microbatches, plan.local_steps)
    return steps


def _as_served(shape: Shape, dtype: torch.dtype) -> Shape:
    """A model in bfloat16 as servers keep it, which is also what workers push and pull: in the job's own type."""
    wide = dtype.itemsize // shape.itemsize
    groups = tuple(
        group._replace(tensors=tuple(wide * size for size in group.tensors), frozen=wide * group.frozen)
        for group in shape.groups
    )
    return replace(shape, groups=groups, itemsize=dtype.itemsize)


@driven
def resume(
    folder: str | os.PathLike[str],
    model: Model,
    data: Any,
    plan: Plan | str | None = None,
    *,
    steps: int = 10,
    **options: Any,
) -> Run:
    """Go on with a saved run after its last step, under the plan it had or any other.

    plan      default: the one it was saved under
    steps     how many more
    options   as for `train`; batch, seed and dtype are those of the saved run unless given, while loss and optimizer
              are code, which is never saved: give them again

    Raises SaveError if there is no saved run, if it is damaged, or of another model or optimizer; what `train` raises.
    """
    header = open_folder(folder).header
    dtype = dtype_named(header.dtype)
    known: dict[str, Any] = {"batch": header.batch, "seed": header.seed, "dtype": dtype, "resume": folder}
    if plan is None:
        try:
            plan = Plan.parse(header.plan)
        except PlanError as error:  # (of an older version, which had other keys and pairs of them)
            raise SaveError(
                f"{os.fspath(folder)}: was saved under {header.plan!r}, which is no plan ({error.reason}); possible is "
                "resume(..., plan=...)"
            ) from error
    return train(model, data, plan, steps=steps, **(known | options))


def annotations_of(plan: Plan) -> Mapping[str, str] | None:
    """The forms that a plan has or its keys stand for; those of all others follow. None: the model's names say it."""
    if plan.annotations:
        return dict(plan.annotations)  # type: ignore[arg-type]
    if plan.sharing == plan.tp and not plan.sequence_parallel:
        return None
    from minipar.sharding.propagation import Preset, experts, sequence_parallel

    found = experts("ep") if plan.ep > 1 else Preset()
    return Preset({**found, **sequence_parallel()}) if plan.sequence_parallel else found


def _check_stages(plan: Plan, model: Model) -> None:
    """Refuse more stages than layers before all the ranks are started.

    The model is made on torch's "meta" device, where parameters have no numbers; one that cannot be made there is
    counted by the first rank, and so is one for few stages, whose ranks start within a few seconds.
    """
    if plan.place is not None or plan.pp <= FEW_STAGES:
        return
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            given = isinstance(model, (torch.nn.Module, list, tuple))
            built: Any = model if given else cast(Callable[[], Any], model)()
        layers = len(layers_of(built) if isinstance(built, torch.nn.Module) else list(built))
    except Exception:
        return
    if layers:
        plan.check_stages(layers)


def _of_layers(plan: Plan) -> Plan:
    """The keys of a plan that a rank needs to profile layers. (It may not know a schedule that the user has added.)"""
    if plan.slice_count > 1:
        return plan
    keys = "precision", "checkpoint", "tp", "context_parallel", "ep", "host_layers", "sync"
    away = "offload", "offload_to", "offload_folder"
    return Plan(**{key: getattr(plan, key) for key in (*keys, *away)})
