"""execute(): a program on real processes. It gives the measured trace, the loss and the gradients.

The driver ships a `Job` to every rank; each builds the model, keeps its own layers, and runs its `Executor`.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from minipar.cluster import Cluster, launch, worker
from minipar.cluster.launched import driven, given_or_here
from minipar.cluster.ranks import Ranks, check_size
from minipar.comm import clocks, communicator
from minipar.costs.device import DeviceSpec
from minipar.costs.rates import Copies
from minipar.costs.slicing import token_ranges
from minipar.data import loading
from minipar.data.batches import Batch, BatchPart, batch_of, check_batch, gives_rows, pair_of, read_part
from minipar.errors import MiniparError, PlanError, RankError
from minipar.execution import naming_layers
from minipar.execution.dtypes import check_narrow, convert, find_sizes, matching, narrow
from minipar.execution.dynamic_schedule import check_carrier
from minipar.execution.emulation import Delays, delays
from minipar.execution.executor import Executor, PassRecord
from minipar.execution.fitting import check_parameters, row_major
from minipar.execution.following import Callback, Following, Observer, Reporter, Warnings
from minipar.execution.lines import Slice, assemble
from minipar.execution.mean_loss import Finite, check_choice
from minipar.execution.measuring.calibration import measure_copies
from minipar.execution.measuring.profiler import profile
from minipar.execution.memory.tape import record
from minipar.execution.memory.tracker import SERIES, Tracker, Watching, watching_of
from minipar.execution.saving.contents import Outline, outline_of
from minipar.execution.saving.folder import Header, new_token
from minipar.execution.saving.keeping import NOTHING, Share, Storing
from minipar.execution.sliced import count_tokens, ranges_of
from minipar.execution.state import State
from minipar.execution.updating import Optimizer, Scheduler, Update, check_update, forms_of, whole_piece
from minipar.models import selective_checkpoint, unregistered
from minipar.models.losses import Own, check_loss, raise_unless_again, scalar, try_loss, try_tokens
from minipar.models.mixture_gpt import Load, total
from minipar.models.network import Network, edges_of, is_only_layers
from minipar.models.nodes import ShardedModel
from minipar.models.own_loss import TRIED, find_count
from minipar.models.parameter_groups import parameters_of, shape_of
from minipar.models.randomness import initial, split_sensitive
from minipar.models.tensors import (
    count_bytes,
    count_rows,
    dtype_name,
    dtype_named,
    layers_of,
    map_tensors,
    mark_undivided,
    single,
    take_rows,
    take_tokens,
    undivided,
)
from minipar.prediction.forecast import Facts
from minipar.prediction.program_costs import ProgramCosts, microbatch_rows
from minipar.program import PRECISIONS, Op, Program, Synchronous, Value, collectives, repartitions
from minipar.program.collectives.moves import Algorithm
from minipar.program.comm_volume import changing
from minipar.program.mesh import SHARING, Mesh
from minipar.program.verify.verifier import verify
from minipar.strategies.keys import whole_number
from minipar.strategies.passes import host_layers
from minipar.strategies.passes.versions import as_it_happened
from minipar.strategies.plan import Plan
from minipar.trace import Trace
from minipar.trace.memory_series import Series
from minipar.wording import several

_TRIED, _TRIED_TARGETS = 8, 4096  # rows of outputs and of targets that a loss is tried on

Model = nn.Module | Sequence[nn.Module] | Callable[[], nn.Module | Sequence[nn.Module]]
Loss = Callable[[Any, Any], Tensor]


class PickledGraphs(NamedTuple):
    """A model as graphs, pickled, and what they are for: the number of sharing ranks, the slices, and the type in which
    layers compute if it is not the model's own, since a forward may convert to the type of what it is given."""

    ranks: int
    slices: int | tuple[int, ...]
    narrow: str
    data: bytes


@dataclass(frozen=True)
class Job:
    """Everything that a rank must know to do its part.

    model       a function that makes the layers, or the layers themselves
    data        has `batch(step, size) -> (x, y)`, or is one fixed pair (x, y). Where `batch` has a parameter `rows`,
                each rank asks for its own rows (a range); `length(step, size)` says how many rows a step has if they
                are fewer than `size`. A torch Dataset becomes `data.Rows`; `minipar.data.loading.read_ahead` makes such
                data of an iterable
    batch       rows of a step, over all replicas and micro-batches
    optimizer   makes an optimizer of the whole model's parameters (see `updating`)
    scheduler   makes a scheduler of that optimizer, which steps once after each update
    evaluate    True: put the model in evaluation mode. False: every module keeps the mode that the model function gave
                it. None: evaluation mode if the program trains nothing of a model that could be trained
    on_nan      where the loss of a micro-batch is not finite: "stop", "warn" or "ignore"
    annotations with tensor parallelism, the forms of some tensors by name (`sharding/propagation.py`); None: Megatron's
    graphs      with tensor parallelism, the model as graphs (`captured_once`); None: each rank captures it
    cut         how the model is cut, as bytes; None: it is layers, or each rank finds it
    """

    model: Model
    data: Any
    batch: int = 32
    loss: Loss = torch.nn.functional.cross_entropy
    optimizer: Optimizer = partial(torch.optim.SGD, lr=0.1)
    seed: int = 0
    dtype: torch.dtype = torch.float32
    scheduler: Scheduler | None = None
    evaluate: bool | None = None
    on_nan: str = "ignore"
    annotations: Mapping[str, str] | None = None
    graphs: PickledGraphs | None = field(default=None, repr=False)
    cut: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_loss(self.loss)
        check_choice(self.on_nan)
        object.__setattr__(self, "data", loading.indexed(self.data, self.seed, self.batch))
        if isinstance(self.data, tuple):
            object.__setattr__(self, "batch", check_batch(self.data))
        elif not hasattr(self.data, "batch"):
            raise PlanError(
                f"data={type(self.data).__name__}: must have batch(step, size) -> (x, y), or be a pair (x, y), a torch "
                "Dataset or DataLoader, or an iterable of batches"
            )
        object.__setattr__(self, "batch", whole_number("batch", self.batch))

    def build(self) -> nn.Module:
        """The whole model, the same in every process: parameters come from (seed, name) or the order of creation."""
        return self.built()[0]

    def built(self, uncut: str = "") -> tuple[nn.Module, bytes | None]:
        """The whole model, and how it was cut, for `cut`. `uncut`: why a model that is no chain must be one layer."""
        with initial(self.seed):
            model: Any = self.model
            built = model if isinstance(model, (nn.Module, list, tuple)) else model()
            model = nn.Sequential(*built) if isinstance(built, (list, tuple, nn.ModuleList)) else built
            if isinstance(model, torch.jit.ScriptModule):
                from minipar.models.tracing import Scripted

                model = Scripted(model)
            layered = not isinstance(model, nn.Module) or is_only_layers(model)
            if not isinstance(model, nn.Module) or (layered and not layers_of(model)):
                kind = type(model).__name__
                raise PlanError(f"model: a {kind} without layers; possible are an nn.Module and a list of layers")
            if any(map(is_lazy, [*model.parameters(), *model.buffers()])):
                find_sizes(model, take_rows(self.sample(2)[0][0], range(2)))
        unregistered.check_memory(model)
        convert(model, self.dtype)
        if type(model) in (nn.Sequential, Network):
            unregistered.register(model)
        found = self.cut
        if not layered:
            from minipar.models import cut_bytes  # (torch.fx is not imported for models that are layers)

            if found is None or uncut:
                x = self.sample(2)[0][0]
                key = cut_bytes.fingerprint(model, take_rows(x, range(2)), (count_rows(x), uncut))
                found = cut_bytes.known(key)
            layers = self._in_layers(model, x, uncut) if found is None else cut_bytes.read(found, model)
            found = cut_bytes.written(layers, model, key) if found is None else found
            model = layers
        return model.eval() if self.evaluate else model, found

    def _in_layers(self, model: nn.Module, x: Any, uncut: str) -> nn.Module:
        """The model cut on two rows of the first batch; on all that there are, where it cannot run on so few."""
        from minipar.models.tracing import in_layers

        for rows in sorted({2, count_rows(x)}):
            try:
                return in_layers(model, take_rows(x, range(rows)), uncut)
            except MiniparError:
                raise
            except Exception as found:
                error = found
        named = naming_layers.raised("the model", error, f"on {several(rows, 'row')}, before the run", x)
        if isinstance(self.loss, Own) and isinstance(x, (tuple, list)) and isinstance(x[0], Mapping):
            raise PlanError(
                f"loss=None: the whole batch goes to the model's forward, part by part: a dict of {', '.join(x[0])} is "
                f"its first argument, and y its second, and so it fails. Possible are a batch that is one dict, with "
                f"y by the name that forward has for it, such as {{**x, 'labels': y}}, and a loss= of (output, y). "
                f"It was: {named.reason}"
            ) from error
        raise named from error

    def share(
        self, model: nn.Module, index: int, mesh: Mesh, inputs: str, slices: int | tuple[int, ...], short: str = ""
    ) -> ShardedModel:
        """The nodes that one of the ranks which share layers, along the axes of a mesh, has of a model. `inputs`,
        `slices` and `short` (its `narrow`): see `Program`."""
        from minipar.sharding.sharded import local_model, unpickled

        known = self.graphs is not None and self.graphs[:3] == (mesh.size, slices, short)
        graphs = unpickled(self.graphs.data) if known and self.graphs is not None else None
        x, cut = self._example(slices)

        def as_computed() -> nn.Module:
            one = deepcopy(model)
            narrow(one, dtype_named(short))
            return one

        given, made = (_narrow_rows(x, short), as_computed) if short else (x, None)
        return local_model(model, index, mesh, given, self.annotations, inputs, cut, graphs, made)

    def capture(
        self, count: int, slices: int | tuple[int, ...], short: str = ""
    ) -> tuple[PickledGraphs | None, bytes | None]:
        """In one rank: the model as graphs, for all ranks that share it, and how it was cut. None where graphs cannot
        be sent."""
        x, cut = self._example(slices)
        from minipar.sharding.sharded import capture_graphs, pickled

        def graphs_of(model: nn.Module) -> Any:
            if short:
                narrow(model, dtype_named(short))
            return capture_graphs(model, count, _narrow_rows(x, short) if short else x, cut)

        model, found = self.built()
        try:
            graphs = graphs_of(model)
        except PlanError as error:  # (what crosses a cut may have other sizes than rows, as packed sequences have)
            if found is None or slices != 1:
                raise
            model, found = self.built(error.reason.partition("; possible")[0])
            graphs = graphs_of(model)
        try:
            return PickledGraphs(count, slices, short, pickled(graphs)), found
        except Exception:  # such as an operator's argument that has no pickled form: each rank then captures for itself
            return None, found

    def _example(self, slices: int | tuple[int, ...]) -> tuple[Any, Sequence[range]]:
        """Some rows that the model is given, and the tokens of each slice of a sequence."""
        x = self.sample(3)[0][0]
        return x, token_ranges(slices, count_tokens([x])) if slices != 1 else ()

    def batches(self, step: int) -> tuple[Any, Any]:
        """x and y of one step: the whole batch, of all replicas."""
        found = self.data if isinstance(self.data, tuple) else batch_of(self.data, step, self.batch)
        return self.made(found, f"data: step {step}")

    def made(self, batch: Any, where: str) -> Batch:
        """A batch as ranks are given it: its numbers have the job's type, and what has no rows is marked."""
        x, y = pair_of(batch, where)
        known = getattr(self.data, "undivided", None)
        made = mark_undivided(map_tensors(x, self._cast), undivided(x, y) if known is None else known)
        return made, made if y is x else map_tensors(y, self._cast)

    def part(self, step: int, program: Program, rank: int) -> Batch | BatchPart:
        """What a rank needs of one step: its own rows, or the whole batch where the data set gives nothing less."""
        if not gives_rows(self.data) or program.local_steps:  # (a replica must know what the others weigh)
            return self.batches(step)
        return read_part(self.data, step, self.batch, program, rank, self.loss, self.made)

    def sample(self, rows: int) -> tuple[Batch, int]:
        """The first rows of step 0, at least so many, and how many rows the whole batch has."""
        if not gives_rows(self.data):
            whole = self.batches(0)
            return whole, check_batch(whole, "data: step 0")
        return self.made(batch_of(self.data, 0, self.batch, rows=range(rows)), "data: step 0"), self.batch

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(matching(tensor, self.dtype))


class Stretch(NamedTuple):
    """Passes of a run that the ranks do in one request; between two requests each rank keeps its executor.

    passes     their numbers
    last       the run ends after them
    gradients  copy every gradient as its STEP uses it
    model      bring back what each rank has of parameters and buffers after them, also what others have, too
    start      bring back all that somebody needs who begins there
    """

    passes: range
    last: bool = True
    gradients: bool = False
    model: bool = False
    start: bool = False


class Passed(NamedTuple):
    """What one rank brings back of a stretch."""

    passes: list[PassRecord]
    share: Share | None  # this rank's share of the state: what is kept of it at the end of the run, or all for a start
    load: Load | None  # of experts in the rank's layers, by this rank's rows, since the run began
    clock_error: float  # of the times, which are those of rank 0's clock
    model: list[Slice]
    ended: bool


class Work(NamedTuple):
    """What every rank does with a job.

    programs   of its passes, one after another
    slow       of each rank its delays, in the program and in the rest
    end        the file that the driver makes to end the run between two passes
    own        an algorithm that was registered in the driver
    """

    programs: list[Program]
    slow: list[list[Delays]] | None
    watching: Watching | None
    storing: Storing
    reporter: Reporter | None
    end: Path | None
    own: Algorithm | None


@dataclass(frozen=True)
class Execution:
    """A program as it ran, and what came of it.

    program     the program; where ranks decide as they run, in the order that they chose in the pass of the trace
    losses      the mean loss of every step, before its update; of asynchronous programs, of every mini-batch
    gradients   per update the gradients by parameter name, if they were kept
    times       seconds of every pass through the program (and of the rest)
    trace       the measured trace of the pass of median duration (the first, which warms up, left out if possible)
    load        how busy the experts of a mixture were, over all ranks, micro-batches and steps; None without experts
    """

    program: Program
    losses: list[float]
    times: list[float]
    trace: Trace
    gradients: list[dict[str, Tensor]] = field(default_factory=list, repr=False)
    shares: list[Share] = field(default_factory=list, repr=False)
    load: Load | None = None


@driven
def execute(
    program: Program,
    job: Job,
    *,
    cluster: Ranks | None = None,
    passes: int = 1,
    keep_gradients: bool = True,
    report: Callable[[int, float], None] | None = None,
    watch: Observer | None = None,
    check: bool = True,
    costs: ProgramCosts | None = None,
    memory: bool = False,
    storing: Storing = NOTHING,
    rest: Program | None = None,
    callback: Callback | None = None,
) -> Execution:
    """Run a program on real processes, `passes` times in a row (each is `program.steps` training steps).

    report(k, loss)   called when all ranks have finished pass k, with the loss of its last step
    callback    called with a `StepInfo` of every step, in order; when it returns False, the run ends after the pass
                that the ranks are at
    watch       called with a `Moment` of the run at most ten times a second
    check       verify the program first: one that cannot run would wait for ever
    costs       of the emulated devices, if the cluster has such; default: from the cluster's DeviceSpec
    memory      follow every storage of every rank: the trace then has `series` (it takes time: not for timing)
    rest        run once after these: the same program for fewer steps
    storing     go on from a saved run; save this one; bring its state back in `Execution.shares`
    Raises ProgramError if verify refuses it; PlanError if the cluster has another number of ranks, or if its ranks
    cannot see which messages are here, where the program needs that; what a rank
    raises, such as DeviceOutOfMemory on emulated devices of limited memory; RankDied.
    """
    if check:
        verify(program)
    cluster = given_or_here(cluster)
    check_size(cluster, len(program.ranks), f"program {program.name!r}")
    passes = whole_number("passes", passes)
    with (
        nullcontext(cluster) if cluster is not None else Cluster(len(program.ranks)) as ranks,
        under_way(program, job, ranks, passes, report, watch, costs, memory, storing, rest, callback) as running,
    ):
        running.go_on(passes + (rest is not None), gradients=keep_gradients)
        return running.execution()


@contextmanager
def under_way(
    program: Program,
    job: Job,
    ranks: Ranks,
    passes: int = 1,
    report: Callable[[int, float], None] | None = None,
    watch: Observer | None = None,
    costs: ProgramCosts | None = None,
    memory: bool = False,
    storing: Storing = NOTHING,
    rest: Program | None = None,
    callback: Callback | None = None,
) -> Iterator[Running]:
    """A run whose passes are asked for; ranks that have not come to its end are freed afterwards. The arguments are
    those of `execute`."""
    different = [program] if rest is None else [program, rest]
    programs = [program] * passes + different[1:]
    followed = report is not None or watch is not None or callback is not None
    if program.in_flight is not None:
        check_carrier(ranks, f"program {program.name!r}")
    job = captured_once(job, program.sharing, program.slices, ranks, program.narrow) if program.sharing > 1 else job
    if costs is None and ranks.emulates is not None and ranks.emulates.emulates:
        costs = emulated_costs(program, ranks.emulates, job, ranks)
    slow = None
    if costs is not None:
        each = [replace(costs, program=one) for one in different]
        slow = [[delays(one, rank) for one in each] for rank in range(len(program.ranks))]
    watching = watching_of(memory, ranks.emulates)
    with storing.around() if storing.folder else nullcontext(), _place_of_end(callback) as end:
        stop = None if end is None else end.touch
        hear = Following(programs, report, watch, callback, storing.first, stop) if followed else Warnings()
        own = collectives.registered(program.algorithm)  # (ranks know what is registered there)
        reporter = Reporter(watch is not None, program) if followed else None
        work = Work(programs, slow, watching, storing, reporter, end if callback is not None else None, own)
        running = Running(job, work, ranks, hear, passes, costs)
        try:
            yield running
        finally:
            running.end()


class Running:
    """In the driver: a run between its stretches.

    done     of every pass, what each rank brought back
    passed   what each brought back of the last stretch
    graded   whether the gradients of all passes were kept
    ended    whether its last pass is done, or a callback has ended it
    """

    def __init__(
        self, job: Job, work: Work, ranks: Ranks, hear: Callable[[int, Any], None], passes: int,
        costs: ProgramCosts | None,
    ) -> None:  # fmt: skip
        self.job, self.work, self.ranks, self.hear, self.passes, self.costs = job, work, ranks, hear, passes, costs
        self.done: list[tuple[PassRecord, ...]] = []
        self.passed: list[Passed] = []
        self.graded = self.ended = False
        self._left = time.monotonic()
        self._key, self._begun, self._kept, self._clock_error = new_token(), False, False, 0.0

    def go_on(
        self, passes: int, gradients: bool = False, model: bool = False, start: bool = False, last: bool = True
    ) -> range:
        """Let the ranks do so many more passes; the numbers of those that were done. See `Stretch`. After the last one
        the run ends, unless `last` is False."""
        begin, count = len(self.done), len(self.work.programs)
        self.graded = gradients and (self.graded or not begin)
        stretch = Stretch(range(begin, begin + passes), last and begin + passes == count, gradients, model, start)
        given, self._begun, self._kept = (None if self._begun else (self.job, self.work)), True, False
        if isinstance(self.hear, Following):
            self.hear.waited(time.monotonic() - self._left)
        passed: list[Passed] = self.ranks.run_with(self.hear, _passes, self._key, given, stretch)
        self.passed = passed
        self.done += zip(*(p.passes for p in passed), strict=True)
        self.ended = passed[0].ended
        self._kept = not self.ended
        self._clock_error = max(self._clock_error, *(p.clock_error for p in passed))
        self._left = time.monotonic()
        return range(begin, len(self.done))

    @property
    def steps(self) -> int:
        """How many are done."""
        return sum(self.work.programs[k].steps for k in range(len(self.done)))

    def shares(self) -> list[Share]:
        """All that the ranks have of the state of the run, for somebody who begins there."""
        self.go_on(0, start=True, last=False)
        return [p.share for p in self.passed if p.share is not None]

    def trace(self, k: int) -> Trace:
        """What was measured of a pass."""
        trace = _measured(self.happened(k), self.done[k], self._clock_error)
        if self.costs is not None:
            overruns = [one.overruns for one in self.done[k]]
            trace = replace(trace, overruns=overruns, note=emulated_note(self.costs.device, overruns))
        return trace

    def end(self) -> None:
        """Free ranks that wait for further passes of this run."""
        if self._kept:
            self._kept = False
            with suppress(MiniparError):  # (they may be gone)
                self.ranks.run(_forget, self._key)

    def losses(self, passes: range) -> list[float]:
        """Those of some passes."""
        some = [(self.work.programs[k], self.done[k]) for k in passes]
        return [sum(one.losses[s] for one in ranks) for each, ranks in some for s in range(each.losses)]

    def gradients(self, passes: range) -> list[dict[str, Tensor]]:
        """Those of each update of some passes, whole and by name."""
        some = [(self.work.programs[k], self.done[k]) for k in passes]
        return [
            assemble(
                (part for one in ranks for own, cut in one.gradients[s] for part in own.of_whole(cut)),
                each.local_steps > 0,
            )
            for each, ranks in some for s in range(each.updates)
        ]  # fmt: skip

    def happened(self, k: int) -> Program:
        """The program; where ranks decide as they run, in the order that they chose in a pass."""
        program = self.work.programs[0]
        if program.in_flight is None:
            return program
        found = as_it_happened(program, [one.order for one in self.done[k]])
        verify(found)
        return found

    def execution(self) -> Execution:
        """The whole run, which has ended."""
        done, everything, graded = self.done, range(len(self.done)), self.graded
        times = [max(max(one.ends) for one in ranks) - min(min(one.starts) for one in ranks) for ranks in done]
        passes = min(self.passes, len(done))
        series = any(one.series is not None for one in done[-1])
        tracked = range(max(1, len(done) - SERIES), passes) if series else range(1, passes)
        typical = sorted(tracked or [0], key=times.__getitem__)[(len(tracked) - 1) // 2 if tracked else 0]
        trace, loads = self.trace(typical), [p.load for p in self.passed if p.load is not None]
        return Execution(
            trace.program, self.losses(everything), times, trace, self.gradients(everything) if graded else [],
            [p.share for p in self.passed if p.share is not None], total(loads) if loads else None,
        )  # fmt: skip


def emulated_costs(program: Program, spec: DeviceSpec, job: Job, cluster: Ranks) -> ProgramCosts:
    """The costs of a program on emulated devices; where they depend on the model, rank 0 profiles it."""
    if spec.flops is None:
        return ProgramCosts(program, device=spec)
    rows = microbatch_rows(job.batch, program.replicas, program.row_microbatches)
    keys = {"tp": "tp", "cp": "context_parallel", "ep": "ep"}
    shared = {keys[axis]: size for axis, size in program.mesh if axis in SHARING}
    words = {"precision": program.precision, "checkpoint": "selective" if program.selective else "none", **shared}
    computing = Plan.parse(words)
    if program.slice_count > 1:
        computing = replace(computing, schedule="terapipe", slices=program.slices)
    halves = any(Op.BACKWARD_WEIGHT in ops for ops in program.ops)
    (facts,) = cluster.run_on([0], profile_job, job, rows, False, computing, halves)
    return ProgramCosts(program, facts.profile, job.batch, spec)


def captured_once(job: Job, count: int, slices: int | tuple[int, ...], ranks: Ranks, short: str = "") -> Job:
    """The job with its model as graphs, for `count` ranks that share layers. Rank 0 captures it for all: torch.export
    takes seconds at its first use in a process, and tenths of seconds later."""
    if job.graphs is not None and job.graphs[:3] == (count, slices, short):
        return job
    ((graphs, cut),) = ranks.run_on([0], Job.capture, job, count, slices, short)
    return replace(job, graphs=graphs, cut=cut)


def emulated_note(spec: DeviceSpec, overruns: Sequence[Sequence[int]]) -> str:
    """The note in every picture of a run on emulated devices."""
    count = sum(map(len, overruns))
    overran = f"; {several(count, 'overrun')}: real work took longer than the device would have" if count else ""
    return f"emulated device {spec}: real work and real clock readings, delayed to its speed{overran}"


def _measured(program: Program, ranks: Sequence[PassRecord], error: float) -> Trace:
    """The trace of one pass, from the clocks of all ranks, which were made one."""
    zero = min(min(one.starts) for one in ranks)
    starts, ends = (
        [[t - zero for t in row] for row in rows] for rows in zip(*((r.starts, r.ends) for r in ranks), strict=True)
    )

    def size(rank: int, value: Value) -> int:
        return ranks[rank].sizes.get(value, 0)

    series = [replace(p.series, times=[t - zero for t in p.series.times]) for p in ranks if p.series is not None]
    data = [one.data for one in ranks]
    return Trace(program, starts, ends, size, "measured", "bytes", data, series=series, clock_error=error)


@contextmanager
def _place_of_end(callback: Callback | None) -> Iterator[Path | None]:
    """The file by which a callback ends a run between two of its passes."""
    if callback is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="ending-", dir=launch.scratch_folder()) as folder:
        yield Path(folder, "now")


# in the ranks ---------------------------------------------------------------------------------------------------------


@dataclass
class _Kept:
    """In a rank: a run between its stretches.

    outline   of the whole model
    numbers   of each node of a sharded one, its layer
    header    with the steps that are done
    updates   that are done
    rows      of the micro-batches of the last pass, and the `sizes` of its values and of its data
    """

    job: Job
    work: Work
    executor: Executor
    outline: Outline
    numbers: list[int]
    header: Header
    tracker: Tracker | None = None
    updates: int = 0
    rows: dict[int, list[int]] = field(default_factory=dict)
    sizes: tuple[dict[Value, int], int] = field(default_factory=lambda: ({}, 0))


_kept: dict[str, _Kept] = {}  # in a rank: the run that it is in the middle of, by its key


def _forget(*keys: str) -> None:
    """In a rank: end runs that it is in the middle of."""
    for key in keys:
        if key in _kept:
            _kept.pop(key).executor.close()


def _passes(key: str, given: tuple[Job, Work] | None, stretch: Stretch) -> Passed:
    """In every rank: the passes of a stretch, and what it brings back of them. `given`: with the first stretch."""
    comm = communicator.create()
    if given is not None:
        _forget(*_kept)
    run = _kept.pop(key, None) if given is None else _prepared(*given, comm)
    if run is None or run.executor.comm.closed:
        raise RankError("this run has ended: another one has begun on its ranks, or one of them has failed")
    work, executor, outline, storing = run.work, run.executor, run.outline, run.work.storing
    found: list[PassRecord] = []
    share = None
    with ExitStack() as ending:
        ending.callback(executor.close)
        if given is not None:
            storing.begin(executor, outline)
            run.tracker = work.watching(executor) if work.watching is not None else None
        before = clocks.read(comm)
        for k in stretch.passes:
            program = work.programs[k]
            if k and program is not work.programs[k - 1]:
                executor.follow(program, work.slow[comm.rank][-1] if work.slow is not None else None)
            step = run.header.step
            batches = {s: run.job.part(s, program, comm.rank) for s in range(step, step + program.steps)}
            if work.end is not None and _is_there(work.end, comm):
                if not storing.due(step):  # (else it was saved just now)
                    storing.after(executor, outline, run.header, True, run.updates)
                break
            comm.barrier()  # so that a pass begins on all ranks at once, as the prediction assumes
            with run.tracker or nullcontext():
                record = executor.run(batches.__getitem__, step, stretch.gradients)
            run.header = replace(run.header, step=step + program.steps)
            run.updates += program.updates
            storing.after(executor, outline, run.header, k == len(work.programs) - 1, run.updates)
            _report(work, k, record, before, executor.state, run.updates)
            if not run.sizes[0] or executor.compute.rows.counts != run.rows:  # an epoch's last step has fewer rows
                run.rows, run.sizes = executor.compute.rows.counts, (_sizes(executor), executor.compute.data_bytes())
            found.append(replace(record, sizes=run.sizes[0], data=run.sizes[1]))
        after = clocks.read(comm)
        model = storing.model(executor, outline) if stretch.model else []
        ended = stretch.last or len(found) < len(stretch.passes)
        if ended or stretch.start:
            keeping = storing if ended else replace(storing, keep=None)
            share = keeping.share(executor, outline, run.header, run.updates)
        if not ended:
            _kept[key] = run
            ending.pop_all()
    series = {} if run.tracker is None else run.tracker.series_of_passes()
    experts = executor.compute.experts
    return Passed(
        [_by_one_clock(one, series.get(k), before, after) for k, one in zip(stretch.passes, found, strict=False)],
        share,
        experts.load(run.numbers) if experts is not None else None,
        max(before.error, after.error),
        model,
        ended,
    )


def _is_there(path: Path, comm: communicator.Communicator) -> bool:
    """Whether rank 0 finds a file; the answer is the same on all ranks, which all ask."""
    there = torch.tensor([float(comm.rank == 0 and path.exists())])
    comm.iallreduce(there, tuple(range(comm.size)), "whether the run ends here").wait()
    return bool(there)


def _prepared(job: Job, work: Work, comm: communicator.Communicator) -> _Kept:
    """A run that has not begun."""
    program = work.programs[0]
    if work.own is not None:
        collectives.add(program.algorithm, work.own)
    if comm.rank == 0 and len(set(comm.hosts)) > 1:
        _warn_of_hosts(program, comm.hosts)
    model = job.build()
    _check_alike(model, comm)
    if program.sharing > 1:
        model = job.share(
            model, program.shard(comm.rank), program.sharing_mesh, program.inputs, program.slices, program.narrow
        )
    trains = any(ins.op is Op.STEP for row in program.ranks for ins in row)
    if job.evaluate is None and not trains and any(p.requires_grad for p in model.parameters()):
        model.eval()  # inference
    outline = outline_of(model)
    delays = work.slow[comm.rank][0] if work.slow is not None else None
    executor = Executor(program, comm, model, job.loss, job.optimizer, job.seed, delays, job.scheduler)
    executor.compute.midst = work.reporter.midst(worker.report) if work.reporter is not None else None
    executor.compute.finite = None if job.on_nan == "ignore" else Finite(comm.rank, job.on_nan, worker.report)
    executor.state.measured = {} if work.end is not None and isinstance(program.contract, Synchronous) else None
    numbers = [layer for layer, count in enumerate(getattr(model, "nodes", ())) for _ in range(count)]
    dtype, first = dtype_name(job.dtype), work.storing.first
    header = Header(first, job.seed, job.batch, dtype, program.name, "", outline.rows, call=work.storing.call)
    return _Kept(job, work, executor, outline, numbers, header)


def _check_alike(model: nn.Module, comm: communicator.Communicator) -> None:
    """PlanError where the model that this rank has made has other numbers than those of all ranks together."""
    mine = sum((p.detach().abs().sum().double().cpu() for p in model.parameters()), torch.zeros(1, dtype=torch.float64))
    every = mine / comm.size
    comm.iallreduce(every, tuple(range(comm.size)), "whether all ranks have made the same model").wait()
    if not torch.isclose(every, mine, rtol=1e-6, equal_nan=True):
        raise PlanError(
            "model: its function makes other numbers on each rank; possible are the module itself, made once, and "
            "draws from the global generators of torch, Python and NumPy, which begin with seed="
        )


def _report(work: Work, k: int, record: PassRecord, clock: clocks.Reading, state: State, updates: int) -> None:
    """Tell the driver of a pass, after which `updates` of the run are done; for a callback also of its updates."""
    count, squares = work.programs[k].updates, state.measured
    if work.reporter is not None:
        starts, ends = (clocks.corrected(row, clock, clock) for row in (record.starts, record.ends))
        news = work.reporter.news(k, record.losses, starts, ends)
        if work.end is not None:
            news = news._replace(
                rates=[state.update.rates_at(u) for u in range(updates - count, updates)],
                squares=None if squares is None else [sum(t.item() for t in squares.get(s, ())) for s in range(count)],
            )
        worker.report(news)
    if squares is not None:
        state.measured = {}
    if state.update.schedule is not None:
        state.update.schedule.forget(updates)


def _by_one_clock(one: PassRecord, series: Series | None, before: clocks.Reading, after: clocks.Reading) -> PassRecord:
    """The pass with its times as rank 0's clock would have them."""
    starts, ends = (clocks.corrected(row, before, after) for row in (one.starts, one.ends))
    if series is not None and before.error:
        series = replace(series, times=clocks.corrected(series.times, before, after))
    return replace(one, starts=starts, ends=ends, series=series)


def _warn_of_hosts(program: Program, hosts: Sequence[str]) -> None:
    """Say where ranks that share layers are on several hosts, between which they then send in every layer."""
    mesh = Mesh(program.mesh)
    for axis in set(mesh.spanning(hosts)) & set(mesh.sharing):
        warnings.warn(
            f"{axis}={mesh.length(axis)}: ranks that share layers are on several hosts, and send in every layer; they "
            f"are on one where {axis} divides the ranks of each host",
            stacklevel=2,
        )


def _sizes(executor: Executor) -> dict[Value, int]:
    """Bytes of every value of a rank's program, as they were in the pass before."""
    named = {value for ins in executor.instructions for value in (*ins.reads, *ins.writes)}
    named |= {changing(ins) for ins in executor.instructions if repartitions(ins)}
    return {value: executor.size(value) for value in named | executor.program.state[executor.comm.rank]}


def profile_job(
    job: Job,
    rows: tuple[int, ...],
    memory: bool = False,
    plan: Plan | None = None,
    split: bool = False,
    sliced: str = "",
    parts: int = 1,
    flops: bool = True,
) -> Facts:
    """In one rank: the facts of a job, its layers profiled for these numbers of rows, as the plan will have them.

    memory   also record what each layer allocates, in order
    split    also measure the halves of each backward
    sliced   what updates slices of parameters, for errors; "" if nothing does. An optimizer that cannot is refused
    parts    micro-batches of a step, on all replicas: a loss that is not the weighted mean of theirs is refused
    flops    also count operations, which emulated devices ask for
    """
    plan = plan or Plan()
    short = PRECISIONS[plan.precision]
    whole, cut = job.built()
    tried = find_count(job.loss, whole, job.sample(TRIED)[0][0], parts) if isinstance(job.loss, Own) else None
    whole = whole.to(worker.context().device)
    model = whole if plan.sharing == 1 else job.share(whole, 0, Mesh(plan.shared), plan.inputs, plan.cut, short)
    update = Update(job.optimizer, forms_of(model), job.scheduler)
    if sliced:
        check_update(update, sliced)
    (x, y), of = job.sample(min(job.batch, max(2, *rows)))  # (one row alone does not show what others do to it)
    sizes = tuple(count_bytes(part) * of // max(1, count_rows(part)) for part in (x, y))  # (a rank keeps them as given)
    if short:
        check_narrow(model, plan.precision)
        for one in (model, whole):  # (of shared layers, the whole ones are what is tried)
            narrow(one, dtype_named(short))
        x = _narrow_rows(x, short)

    def loss(output: Any, target: Any) -> Tensor:
        return scalar(job.loss(map_tensors(output, single) if short else output, target))

    layers = [row_major(layer) for layer in layers_of(model)]
    check_parameters(layers)
    if plan.checkpoint == "selective":
        selective_checkpoint.check(layers_of(whole))
        selective_checkpoint.check(layers)  # (a layer that says itself how it is cut may leave no such part)
    selective_checkpoint.choose(layers, plan.checkpoint == "selective")
    if isinstance(model, ShardedModel):
        shape = shape_of(model)
    else:
        shape = replace(shape_of(layers), names=tuple(model._modules), edges=edges_of(model))
    titles = {id(p): name for name, p in model.named_parameters()}
    names = [titles[id(p)] for group in parameters_of(layers) for p in group]

    def optimizer(copies: list[nn.Parameter]) -> torch.optim.Optimizer:
        return update.part(list(map(whole_piece, names, copies))).optimizer

    slices = ranges_of(plan, shape, [x, y]) if plan.slice_count > 1 else []
    threads = torch.get_num_threads()
    counted_form, note = tried or _try_loss(job, whole, x, plan, parts)
    again = plan.checkpoint not in ("none", "selective")
    layered = cast(nn.Sequential, model)
    at_home = host_layers.find(plan.host_layers, shape)
    host_steps = plan.sync == "ps" or bool({*plan.offload} - {"activations"})
    measured = profile(
        layered, (x, y), loss, rows, 3, threads, optimizer, slices, again, at_home, host_steps, split, flops
    )
    tapes = None
    if memory:
        tapes = record(layered, (x, y), loss, rows, update.of_group(update.largest), split, slices)
    copies = Copies()
    if plan.offload:
        copies = measure_copies(
            torch.device(worker.context().device), plan.offload_to == "disk", plan.offload_folder or None
        )
    # Whether what a forward writes into frozen and into trained parameters is there in the next one, as on one device.
    frozen = plan.checkpoint == "none" and "parameters" not in plan.offload
    trained = frozen and parts * plan.sharing == 1 and not (sliced or plan.offload or short)
    sensitive = split_sensitive(whole, x, isinstance(job.loss, Own), (frozen, trained))
    return Facts(
        shape,
        measured,
        (sizes[0], sizes[1]),
        sensitive,
        tapes,
        copies,
        update.scheduler,
        counted_form,
        note,
        getattr(getattr(whole, "report", None), "title", ""),
        model.whole if isinstance(model, ShardedModel) else {},
        cut,
    )


def _narrow_rows(x: Any, short: str) -> Any:
    return map_tensors(x, lambda t: t.to(dtype_named(short)) if t.is_floating_point() else t)


def _try_loss(job: Job, model: nn.Module, x: Any, plan: Plan, parts: int) -> tuple[Any, str]:
    """What `losses.try_loss` says of a job's loss, on targets of its first batch and outputs near the model's. It is
    tried on parts of sequences, too, where the plan cuts them."""
    cut = _parts_of_sequences(plan, x)
    if job.loss is nn.functional.cross_entropy and not cut:  # (which is known to be a mean)
        return None, ""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    device = worker.context().device
    with torch.random.fork_rng(devices=[device] if device.startswith("cuda") else []), torch.no_grad():

        def tried(tokens: range | None = None) -> Any:
            given = take_rows(x, range(_TRIED)) if tokens is None else take_tokens(take_rows(x, range(_TRIED)), tokens)
            return model(map_tensors(given, lambda t: t.to(device, copy=True)))

        short = None
        try:
            output = tried()
        except Exception as error:
            named = naming_layers.raised("the model", error, "in its first forward, before the run", x)
            raise_unless_again(named, tried)
            return None, ""  # (the profile then runs layer by layer, and its error names the layer)
        else:
            with suppress(Exception):  # (a model may take sequences of one length only: then nothing is tried)
                short = tried(cut[0]) if cut else None
        finally:
            for buffer, values in before:
                buffer.copy_(values)
    if PRECISIONS[plan.precision]:
        output, short = (None if value is None else map_tensors(value, single) for value in (output, short))
    rows = min(job.batch, _TRIED_TARGETS)
    y = map_tensors(job.sample(rows)[0][1], lambda t: t.to(device))
    found = try_loss(job.loss, output, y, parts)
    if cut and (short is not None or plan.context_parallel > 1):
        try_tokens(job.loss, output, short, y, cut, plan.context_parallel > 1)
    return found


def _parts_of_sequences(plan: Plan, x: Any) -> Sequence[range]:
    """The tokens of the parts into which a plan cuts sequences: slices, or what each rank has; [] if it cuts none."""
    if plan.slice_count == plan.context_parallel == 1:
        return []
    with suppress(PlanError):  # (inputs without tokens, or too few: the ranks say what they cannot divide)
        slices = token_ranges(plan.cut, count_tokens([x]))
        parts = [(each.start, part) for each in slices for part in token_ranges(plan.context_parallel, len(each))]
        return [range(start + part.start, start + part.stop) for start, part in parts]
    return []
