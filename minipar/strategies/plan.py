"""Plan: what the user chooses. `compile` turns it into a Program by the passes of `compile.py`, and verifies it.

A plan is keywords in Python, `key=value` words in a string, or a table in TOML; all three go through one validation.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any

from minipar import strategies
from minipar.costs.measured import Profile
from minipar.costs.protocol import Costs
from minipar.costs.recomputation import LayerCosts
from minipar.errors import PlanError, ProgramError
from minipar.program import Action, BackwardWeight, Program
from minipar.program.collector import paused
from minipar.program.shape import Shape, frozen, uniform
from minipar.program.verify.verifier import verify
from minipar.strategies import as_written, async_compile, compile, draft, keys
from minipar.strategies.layout import Layout, place
from minipar.strategies.passes import branches, segments
from minipar.strategies.passes import compress as compression
from minipar.strategies.schedules.registry import OPTIONS
from minipar.wording import several

OVERLAPS = ("none", "backward", "priority")
REDUCES = ("microbatch", "step")
PRECISIONS = ("float32", "bf16")
BLOCK = 8  # steps in one program where one step's messages travel during the next
MOST = 10_000_000  # forwards of a layer in one program: beyond, building it would fill the memory


@dataclass(frozen=True)
class Plan:
    """How a model is trained in parallel. Every key has a default; the default plan is one device.

    dp            replicas of the pipeline (each computes different rows)
    pp            ranks of the pipeline
    schedule      order of forwards and backwards: a name that `minipar schedules` lists, or one of your own
    microbatches  micro-batches per replica and round
    accumulate    rounds of `microbatches` before the optimizer steps
    split         layers per stage, such as "3,3,4,2"; default even, the first stages larger; or "auto", by cost
    place         which rank has each layer, such as "0,0,1,1,0", instead of `split`: any layer on any rank; "branches":
                  those of a model with branches side by side; "none": stages of neighbouring layers
    chunks        stages on each rank; default what the schedule says, for most of them 1
    doubling      with schedule=chimera: two micro-batches go forward together, for more of them than ranks
    group         micro-batches that schedule=interleaved takes through one chunk before the next; default pp
    in_flight     micro-batches that schedule=ampnet has under way at most; default pp
    update_every  micro-batches of an update of schedule=ampnet; default 1
    slices        schedule=terapipe cuts every sequence into so many slices of tokens, or into slices of these lengths,
                  such as "4,3,2,2": they are its micro-batches; default as many as the pipeline has ranks
    bucket        gradient messages: MiB per bucket, "none" (one per parameter), "flat" (one buffer), "4x" (four of
                  about equal size), "7,3" (layers that end one), or "auto" (the size that is predicted to be best);
                  default 25, or 8 with zero=3, whose layers come one by one
    overlap       "backward": a bucket is sent while backward goes on; "none": after it; "priority": also while the next
                  forward does, what it needs first before the rest, in pieces of at most `bucket`
    local_steps   every replica trains by itself for so many steps, then their parameters are averaged; 0: they never do
    compress      gradients are summed as "bf16" or "fp16" numbers, the largest of them ("topk:0.01": one in a hundred),
                  or as products of narrow matrices ("powersgd:2": of rank 2); "none": as they are
    checkpoint    layers that run forward again before their backward, to save memory: "none"; K, in segments of K;
                  "sqrt", of the length that needs least memory; a budget for activations on each rank, such as
                  "64MiB"; or the layers at which segments begin, such as "3,7,11". "selective": the core of each
                  attention, inside its layer, which costs little time and keeps no scores
    zero          what the replicas share out: 1 the optimizer state, 2 also gradients, 3 also parameters; 0 nothing
    reduce        when zero=2 or 3 sums gradients over the replicas: after each "microbatch", or once a "step", for
                  fewer messages and the memory of whole gradients
    prefetch      with zero=3: parameters are gathered so many layers ahead
    inference     forward only: nothing is kept for a backward, and a layer's input is freed when its output is there
    offload       what waits away from the device: "none", or a list of "activations", "optimizer" (its state and its
                  step) and "parameters", such as "optimizer,activations"
    offload_to    where: "host" or "disk"
    offload_folder  where on the disk; default the system's temporary folder
    offload_limit   bytes that each rank may keep there, such as "64MiB"; "none": what there is
    host_layers   layers, by name or number, that are computed on the host, such as "0"; only outputs cross
    clip          gradients are scaled down to this norm, that of all of them together; "none": they are not
    sync          how replicas agree: "allreduce", or "ps": they push gradients to parameter servers and pull parameters
    mode          of parameter servers: "sync"; "async", each gradient is an update; "ssp:S", the same, with nobody more
                  than S steps ahead; "k-of-n:K/N", the first K gradients of a step
    servers       how many parameter servers; they are ranks beside the workers
    on_death      of a rank, with sync=ps: "abort", or "continue", and it starts again and goes on
    precision     "bf16": layers compute in bfloat16, and the optimizer keeps float32 parameters of its own
    algorithm     by which gradients are summed over the replicas: one that `algorithms.names("allreduce")` lists, such
                  as "ring", or one of your own (`@minipar.collective`); "default": in shared memory, or the backend's
    extra_passes  passes of your own, by the names that `@minipar.pass_` gave them, such as "mine,other"
    """

    dp: int = 1
    pp: int = 1
    schedule: str = "1f1b"
    microbatches: int = 1
    accumulate: int = 1
    split: tuple[int, ...] | str | None = None
    place: tuple[int, ...] | str | None = None
    chunks: int | None = None
    group: int | None = None
    slices: int | tuple[int, ...] | None = None
    doubling: bool = False
    in_flight: int | None = None
    update_every: int | None = None
    bucket: float | str | tuple[int, ...] | None = None
    overlap: str = "backward"
    local_steps: int = 0
    compress: str = "none"
    checkpoint: segments.Checkpoint = "none"
    zero: int = 0
    reduce: str = "microbatch"
    prefetch: int = 1
    inference: bool = False
    clip: float | None = None
    precision: str = "float32"
    offload: tuple[str, ...] | str = ()
    offload_to: str = "host"
    offload_folder: str = ""
    offload_limit: int | str | None = None
    host_layers: tuple[str, ...] | str = ()
    sync: str = "allreduce"
    mode: str = "sync"
    servers: int = 1
    on_death: str = "abort"
    algorithm: str = keys.ALGORITHM
    extra_passes: tuple[str, ...] | str = ()

    def __new__(cls, *_: object, **given: object) -> Plan:
        # (so that a wrong keyword gets the same answer as a wrong word)
        keys.check_keys(given, [field.name for field in fields(cls)])
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for key in ("dp", "pp", "microbatches", "accumulate"):
            object.__setattr__(self, key, keys.whole_number(key, getattr(self, key)))
        chosen = strategies.find(self.schedule)
        object.__setattr__(self, "doubling", keys.truth("doubling", self.doubling))
        object.__setattr__(self, "slices", keys.slices(self.slices))
        for key in OPTIONS:
            if key not in ("doubling", "slices") and getattr(self, key) is not None:
                object.__setattr__(self, key, keys.whole_number(key, getattr(self, key)))
            chosen.check(key, getattr(self, key))
        object.__setattr__(self, "place", branches.parse(self.place, self.pp))
        if self.place is not None:
            branches.check_place(self)
        if self.split is not None:
            held = self.placement()
            counts = keys.split(self.split, 1 + max(map(max, held)), self.pp, len(held[0]))
            object.__setattr__(self, "split", counts)
        object.__setattr__(self, "bucket", keys.bucket(self.bucket))
        if self.overlap not in OVERLAPS:
            raise PlanError(f"overlap={self.overlap}: unknown; possible are {', '.join(OVERLAPS)}")
        object.__setattr__(self, "checkpoint", segments.parse(self.checkpoint))
        object.__setattr__(self, "zero", keys.whole_number("zero", self.zero, 0, 3))
        object.__setattr__(self, "prefetch", keys.whole_number("prefetch", self.prefetch, 0))
        object.__setattr__(self, "clip", keys.clip_norm(self.clip))
        object.__setattr__(self, "inference", keys.truth("inference", self.inference))
        object.__setattr__(self, "offload", keys.offloaded(self.offload))
        if self.offload_to not in ("host", "disk"):
            raise PlanError(f"offload_to={self.offload_to}: unknown; possible are host, disk")
        object.__setattr__(self, "offload_limit", keys.limit(self.offload_limit))
        object.__setattr__(self, "host_layers", keys.names(self.host_layers))
        if self.host_layers and self.zero:
            raise PlanError(f"host_layers={','.join(self.host_layers)}: are not sharded; possible is zero=0")
        if "parameters" in self.offload and self.zero in (1, 2):
            raise PlanError(
                f"offload=parameters: zero={self.zero} keeps whole ones on the device; possible are zero=0, zero=3"
            )
        if self.reduce not in REDUCES:
            raise PlanError(f"reduce={self.reduce}: unknown; possible are {', '.join(REDUCES)}")
        if self.precision not in PRECISIONS:
            raise PlanError(f"precision={self.precision}: unknown; possible are {', '.join(PRECISIONS)}")
        if self.overlap == "priority":
            keys.check_priority(self.messages, self.zero, self.clip, self.offload, self.host_layers)
        object.__setattr__(self, "compress", compression.parse(self.compress))
        if self.compress != "none":
            keys.check_compress(self)
        object.__setattr__(self, "local_steps", keys.whole_number("local_steps", self.local_steps, 0))
        if self.local_steps:
            keys.check_local(self.local_steps, self.overlap, self.zero, self.clip, self.offload, self.host_layers)
        keys.check_servers(self)
        keys.check_parts(self)
        keys.check_algorithm(self)
        object.__setattr__(self, "extra_passes", draft.check_names(keys.names(self.extra_passes)))
        if self.extra_passes and (self.sync == "ps" or chosen.asynchronous is not None):
            key = "sync=ps" if self.sync == "ps" else f"schedule={self.schedule}"
            raise PlanError(
                f"extra_passes={','.join(self.extra_passes)}: not together with {key}, whose programs are made without "
                "these passes; possible are synchronous schedules such as 1f1b with sync=allreduce"
            )
        if chosen.asynchronous is not None:
            async_compile.check_keys(self.schedule, {key: getattr(self, key) for key in async_compile.ALONE})
            chosen.asynchronous.promise(self.pp, self.numbers)
        if self.slice_count > 1:
            keys.check_slices(self)

    @staticmethod
    def parse(text: str | Mapping[str, Any] | Plan) -> Plan:
        """A plan from `"pp=2 dp=2 schedule=1f1b"`, or from a table (TOML, JSON) of the same keys; a plan is kept."""
        if isinstance(text, Plan):
            return text
        if isinstance(text, str):
            table: dict[str, Any] = {}
            for word in text.split():
                key, equals, value = word.partition("=")
                if not equals or not value:
                    raise PlanError(f"plan word {word!r}: must be key=value, such as pp=2")
                if key in table:
                    raise PlanError(f"plan key {key!r}: given twice")
                table[key] = value
        elif isinstance(text, Mapping):
            table = dict(text)
        else:
            raise PlanError(f"plan {text!r}: must be a Plan, words such as 'pp=2 dp=2', or a table of these keys")
        keys.check_keys(table, [field.name for field in fields(Plan)])
        return Plan(**table)

    @property
    def ranks(self) -> int:
        """Number of ranks the plan needs."""
        return self.dp * self.pp + (self.servers if self.sync == "ps" else 0)

    @property
    def asynchronous(self) -> bool:
        """Whether there is no flush between steps: then a program is one of a whole run."""
        return strategies.find(self.schedule).asynchronous is not None

    @property
    def settling_steps(self) -> int:
        """Steps after which an asynchronous run has been as stale, and has held as many versions, as it ever will."""
        numbers = self.numbers
        return 2 + 4 * (self.pp + numbers["in_flight"]) * numbers["update_every"] // self.microbatches

    @property
    def numbers(self) -> dict[str, int]:
        """What asynchronous schedules are told, and what they take if nobody says."""
        return {
            "microbatches": self.microbatches,
            "in_flight": self.in_flight or self.pp,
            "update_every": self.update_every or 1,
        }

    @property
    def splits(self) -> bool:
        """Whether the schedule has backwards in halves."""
        return any(isinstance(a, BackwardWeight) for rank in range(self.pp) for a in self.actions(rank))

    @property
    def messages(self) -> float | str | tuple[int, ...]:
        """`bucket`, or what it is by default: see there."""
        return (8 if self.zero == 3 else 25) if self.bucket is None else self.bucket

    @property
    def cut(self) -> int | tuple[int, ...]:
        """Into how many slices of tokens a sequence is cut, or their lengths; 1: it stays whole."""
        if self.slices is not None:
            return self.slices
        return self.pp if "slices" in strategies.find(self.schedule).options else 1

    @property
    def slice_count(self) -> int:
        """Into how many slices a sequence is cut."""
        return self.cut if isinstance(self.cut, int) else len(self.cut)

    @property
    def total_microbatches(self) -> int:
        """Micro-batches of rows per replica and step, over all rounds of accumulation; each is cut into slices."""
        return self.microbatches * self.accumulate

    def block(self, steps: int, every: int = 0) -> int:
        """How many of all `steps` to lay in one program, with a moment of rest after `every` of them (0: at any time).

        More than one where a step's messages travel during the next one: several steps, as many as divide `every`.
        """
        if self.local_steps:
            if every % self.local_steps:
                raise PlanError(
                    f"save_every={every}: the replicas differ until they are averaged; "
                    f"possible are multiples of local_steps={self.local_steps}"
                )
            return min(steps, self.local_steps)
        if self.overlap != "priority":
            return 1
        return max(size for size in range(1, min(steps, BLOCK) + 1) if every % size == 0)

    def __str__(self) -> str:
        words = [f"dp={self.dp}", f"pp={self.pp}"]
        for field in fields(self):
            value = getattr(self, field.name)
            telling = field.name == "schedule" and self.pp > 1
            if field.name not in ("dp", "pp") and (telling or value != field.default):
                if field.name in ("checkpoint", "bucket"):
                    value = segments.text(value)
                words.append(f"{field.name}={','.join(map(str, value)) if isinstance(value, tuple) else value}")
        return " ".join(words)

    def placement(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank of the pipeline, by chunk."""
        schedule = strategies.find(self.schedule)
        return place(schedule.placement, self.pp, self.chunks or schedule.chunks, self.schedule)

    def layout(self, shape: Shape, costs: LayerCosts | Profile | None = None) -> Layout:
        """Which rank holds which layers of a model of this shape; split="auto" needs what the layers cost."""
        keys.check_causal(self, shape)
        branches.check_shape(self, shape)
        if isinstance(self.bucket, tuple) and self.bucket[0] >= shape.layers:
            words = ",".join(map(str, self.bucket))
            raise PlanError(
                f"bucket={words}: the model has {shape.layers} layers; possible are 0 to {shape.layers - 1}"
            )
        if self.place is not None:
            split, placement = branches.stages(branches.ranks_of(self.place, shape, self.pp), self.pp)
            return Layout(shape, self.dp, self.pp, split, self.total_microbatches, placement)
        placement = self.placement()
        stages = 1 + max(map(max, placement))
        if self.pp > shape.layers:
            raise PlanError(f"pp={self.pp}: more stages than layers ({shape.layers}); possible are 1 to {shape.layers}")
        if stages > shape.layers:
            raise PlanError(
                f"pp={self.pp} chunks={len(placement[0])}: {stages} stages, more than layers ({shape.layers}); "
                f"possible are chunks=1 to {shape.layers // self.pp} where the schedule takes them, or fewer ranks"
            )
        if self.split is None:
            even, more = divmod(shape.layers, stages)
            split = tuple(even + (s < more) for s in range(stages))
        elif self.split == "auto":
            from minipar.costs.partition import split_by_cost  # (it needs NumPy)

            split = split_by_cost(costs, shape.layers, stages, self.total_microbatches, shape.edges)
        else:
            split = tuple(int(n) for n in self.split)
            if sum(split) != shape.layers:
                raise PlanError(
                    f"split={','.join(map(str, split))}: sums to {sum(split)}, but the model has {shape.layers} layers"
                )
        return Layout(shape, self.dp, self.pp, split, self.total_microbatches * self.slice_count, placement)

    def compile(
        self,
        shape: Shape | int | None = None,
        *,
        layers: int | None = None,
        steps: int = 1,
        check: bool = True,
        costs: LayerCosts | Profile | None = None,
        costs_of: Callable[[Program], Costs] | None = None,
    ) -> Program:
        """The program of `steps` training steps for a model of `shape`, or of `layers` equal layers.

        costs      what the layers cost for one micro-batch, such as `minipar.profile(model, batch)`; split="auto" and a
                   checkpoint budget need them, checkpoint="sqrt" uses them
        costs_of   makes the costs of a program, as `simulate` takes them: bucket="auto" and overlap="priority" decide
                   by them. Default: a forward takes 1 for each layer, a backward 2, all messages together as long

        Raises PlanError when the plan does not fit the model, ProgramError when the program cannot run (a schedule
        of your own may be wrong); `check=False` leaves the latter to the caller.
        """
        if (shape is None) == (layers is None):
            raise PlanError("compile: give either a shape (models.shape(name)) or layers=N")
        if layers is not None:
            shape = uniform(layers)
        elif not isinstance(shape, Shape):
            if not hasattr(shape, "__index__"):
                raise PlanError(f"compile({shape!r}): give a shape (models.shape(name)) or layers=N")
            shape = uniform(operator.index(shape))  # type: ignore[arg-type]
        if self.inference:
            shape = frozen(shape)
        layout = self.layout(shape, costs)
        steps = keys.whole_number("steps", steps)
        size = shape.layers * self.total_microbatches * self.slice_count * self.dp * steps
        if size > MOST:
            raise PlanError(f"plan {self}: {size} forwards of a layer in {steps} steps; possible are up to {MOST}")
        with paused():
            program = compile.program_of(self, shape, layout, steps, costs, costs_of)
            if check:
                self._verify(program, layout, steps)
            keys.check_one_group(self, program)
        return program

    def _verify(self, program: Program, layout: Layout, steps: int) -> None:
        """verify; a refusal names the schedule's action where that is the mistake, and the user's own passes that had a
        hand in the program."""
        try:
            verify(program)
        except ProgramError as error:
            if self.extra_passes:
                told = f"the plan's own passes rewrote this program: {', '.join(self.extra_passes)}"
                error.details = f"{error.details}\n{told}" if error.details else told
            raise self._as_written(layout, steps, error) from None

    def _as_written(self, layout: Layout, steps: int, error: ProgramError) -> ProgramError:
        """Why a program cannot run, as a mistake of one rank's own actions where it is one."""
        count = steps if self.asynchronous else 1
        chosen = [self.actions(rank, count, len(mine)) for rank, mine in enumerate(layout.placement)]
        trained = {stage for mine in layout.placement for stage in mine if layout.trained(stage)}
        found = as_written.mistake(chosen, layout.placement, layout.microbatches * count, trained)
        if not found:
            return error
        told = ProgramError(f"schedule={self.schedule}: {found}", str(error))
        told.places = error.places
        return told

    def actions(self, rank: int, steps: int = 1, held: int = 1) -> list[Action]:
        """The schedule of one rank, repeated for every round of accumulation; without flushes, of several steps.

        held   with `place` the stages of the rank; all ranks then follow the schedule's order for a pipeline of one
        """
        schedule = strategies.find(self.schedule)
        chunks, pieces = self.chunks or schedule.chunks, self.microbatches * self.slice_count * steps
        ranks = self.pp
        if self.place is not None:
            rank, ranks, chunks = 0, 1, held if "chunks" in schedule.options else 1
        given = {"chunks": chunks, "group": self.group, "doubling": self.doubling, "slices": self.slice_count}
        given |= self.numbers
        found = schedule.generate(
            rank, ranks, self.microbatches * steps, **{key: given[key] for key in schedule.options}
        )
        possible = "possible are Forward(i, chunk), Backward, BackwardInput and BackwardWeight"
        if not isinstance(found, Iterable):
            raise PlanError(f"schedule={self.schedule}: gave {found!r}; it must yield actions; {possible}")
        most = 3 * pieces * max(1, chunks)  # (a forward and two halves of a backward, of each)
        chosen = list(islice(found, most + 1))
        if len(chosen) > most:
            raise PlanError(
                f"schedule={self.schedule}: rank {rank} yields more than {most} actions; there are no more for "
                f"{several(pieces, 'micro-batch')} in {several(chunks, 'chunk')}; possible is a generator that ends"
            )
        for action in chosen:
            if not isinstance(action, Action):
                raise PlanError(f"schedule={self.schedule}: yielded {action!r}; {possible}")
            i, c = action.microbatch, action.chunk  # (most are plain numbers, and looking for a method takes long)
            if (type(i) is not int and not hasattr(i, "__index__")) or not 0 <= i < pieces:
                raise PlanError(
                    f"schedule={self.schedule}: {action} on rank {rank}; micro-batches count from 0 to {pieces - 1}"
                )
            if (type(c) is not int and not hasattr(c, "__index__")) or not 0 <= c < chunks:
                raise PlanError(
                    f"schedule={self.schedule}: {action} on rank {rank}; chunks count from 0 to {chunks - 1}"
                )
        if self.place is not None and chunks < held:
            chosen = branches.through(chosen, held)
        if self.accumulate == 1:
            return chosen
        return [
            replace(action, microbatch=action.microbatch + r * pieces)
            for r in range(self.accumulate)
            for action in chosen
        ]


# `__new__` takes any keyword, to answer the wrong ones; what a plan takes is what its fields say.
_parameters = list(inspect.signature(Plan.__init__).parameters.values())[1:]
Plan.__signature__ = inspect.Signature(_parameters, return_annotation="Plan")  # type: ignore[attr-defined]
