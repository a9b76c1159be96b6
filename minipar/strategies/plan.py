"""Plan: what the user chooses. `Plan.compile` makes a Program by the passes of `compile.py`, and verifies it.

A plan is written as keywords in Python, as `key=value` words in a string, or as a table in TOML. All three are checked
by the same code.
"""

from __future__ import annotations

import inspect
import operator
import os
import textwrap
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import accumulate, islice, pairwise
from typing import TYPE_CHECKING, Any

from minipar import strategies
from minipar.costs.measured import Profile
from minipar.costs.protocol import Costs
from minipar.costs.recomputation import LayerCosts
from minipar.errors import MiniparError, PlanError, ProgramError
from minipar.program import PRECISIONS, Action, BackwardWeight, Program
from minipar.program.collector import paused
from minipar.program.forms import WHOLE, letter_of
from minipar.program.mesh import SHARING
from minipar.program.server_rule import Mode
from minipar.program.shape import Shape, divided, frozen, in_parts, uniform
from minipar.program.verify.verifier import prove, verify
from minipar.strategies import as_written, branches, compile, exclusions, keys, plan_file, segments
from minipar.strategies.draft import Pass
from minipar.strategies.keys import key, one_of, perhaps, whole
from minipar.strategies.layout import Layout, check_split, check_stages, even_split, place
from minipar.strategies.passes import host_layers
from minipar.strategies.schedules.registry import OPTIONS
from minipar.wording import several

if TYPE_CHECKING:
    from minipar.models.sizes import Sizes
    from minipar.models.table import Preset
    from minipar.strategies.exporting import Export

BLOCK = 8  # steps in one program, where messages of one step travel during the next step
MOST = 10_000_000  # most instructions of one replica, about, and half as many as all have: more would fill the memory
MOST_RANKS = 65_536
MOST_STAGES = 100_000  # of a pipeline


@dataclass(frozen=True)
class Plan:
    """How a model is trained in parallel. Every key has a default; the default plan is one device."""

    dp: int = key(1, whole(1), "replicas of the pipeline; each computes other rows of a batch")
    pp: int = key(1, whole(1), "ranks of the pipeline")
    tp: int = key(1, whole(1), "ranks that share each layer: they divide its operators (tensor parallelism)")
    sequence_parallel: bool = key(
        False,
        keys.TRUTH,
        "between the divided operators each of these ranks has a part of the sequence, where tp has all of it",
        exclusions.SHARED,
    )
    context_parallel: int = key(
        1, whole(1), "ranks that share every sequence: each has a part of its tokens, and attention sees all of them"
    )
    ep: int = key(
        1, whole(1), "ranks that share experts: each has some of them, and a part of the rows, as replicas have"
    )
    batch_copies: int = key(
        1,
        whole(1),
        "micro-batches that go through the layers in step, so that one's collectives overlap the other's compute",
        exclusions.SHARED_BY_SEVERAL,
    )
    schedule: str = key("1f1b", keys.SCHEDULE, "the order of forwards and backwards on each rank")
    microbatches: int = key(1, whole(1), "micro-batches of each replica and round")
    accumulate: int = key(1, whole(1), "rounds of `microbatches` before the optimizer steps")
    split: tuple[int, ...] | str | None = key(
        None, keys.SPLIT, "layers of each stage; even: the first stages are larger; auto: by cost"
    )
    place: tuple[int, ...] | str | None = key(
        None,
        keys.PLACE,
        "the rank of each layer, in place of `split`: any layer on any rank; branches: those of a model with branches "
        "side by side; none: stages of neighbouring layers",
    )
    chunks: int | None = key(None, perhaps(whole(1)), "stages of each rank; default: what the schedule says, mostly 1")
    group: int | None = key(
        None, perhaps(whole(1)), "micro-batches that interleaved takes through one chunk before the next; default pp"
    )
    slices: int | tuple[int, ...] | None = key(
        None,
        keys.SLICES,
        "slices of tokens that terapipe and seq1f1b cut every sequence into: they are its micro-batches; default: as "
        "many as the pipeline has ranks",
    )
    doubling: bool = key(
        False, keys.TRUTH, "chimera: two micro-batches go forward together, where there are more of them than ranks"
    )
    in_flight: int | None = key(None, perhaps(whole(1)), "micro-batches that ampnet has under way at most; default pp")
    update_every: int | None = key(None, perhaps(whole(1)), "micro-batches of one update of ampnet; default 1")
    bucket: float | str | tuple[int, ...] | None = key(
        None,
        keys.BUCKET,
        "size of gradient messages: MiB; none: one message per parameter; flat: one for all; 4x: four of about equal "
        "size; 7,3: these layers end one; auto: the size that is predicted to be best. Default 25, or 8 with zero=3, "
        "whose layers come one by one",
    )
    overlap: str = key(
        "backward",
        one_of("none", "backward", "priority"),
        "when buckets are sent; backward: while it goes on; none: after it; priority: also during the next forward, in "
        "pieces of at most `bucket`, those that it needs first before the others",
    )
    local_steps: int = key(
        0,
        whole(0),
        "every replica trains by itself for so many steps, then their parameters are averaged; 0: gradients are summed "
        "in each",
    )
    compress: str = key(
        "none",
        keys.COMPRESS,
        "what sums of gradients carry: bf16, fp16: shorter numbers; topk:0.01: the largest of them, one in a hundred; "
        "powersgd:2: products of narrow matrices, of rank 2",
    )
    checkpoint: segments.Checkpoint = key(
        "none",
        keys.CHECKPOINT,
        "layers that run forward again before their backward, to save memory: K: in segments of K; sqrt: of the length "
        "that needs least memory; a budget for the activations of each rank; the layers at which segments begin; "
        "selective: the core of each attention, inside its layer, which costs little time and keeps no scores; "
        "operators (estimates and exports): all but attention and every second matrix product, as torchtitan does",
    )
    zero: int = key(
        0, whole(0, 3), "what replicas share out: 1 the optimizer's state, 2 gradients too, 3 parameters too"
    )
    reduce: str = key(
        "microbatch",
        one_of("microbatch", "step"),
        "when gradients are summed over replicas: after each micro-batch, or once a step, for fewer messages and the "
        "memory of whole gradients",
        exclusions.SHARDED_GRADIENTS,
    )
    prefetch: int = key(1, whole(0), "parameters come so many layers ahead", exclusions.GATHERED)
    inference: bool = key(
        False, keys.TRUTH, "forward only: nothing is kept for a backward, and inputs are freed when outputs are there"
    )
    clip: float | None = key(None, keys.NORM, "gradients are scaled down to this norm, that of all of them together")
    precision: str = key(
        "float32",
        one_of(*PRECISIONS),
        "bf16: layers compute in bfloat16, and the optimizer keeps float32 parameters of its own",
    )
    offload: tuple[str, ...] | str = key(
        (), keys.OFFLOAD, "what waits away from the device; optimizer: its state, and its step"
    )
    offload_to: str = key("host", one_of("host", "disk"), "where it waits", exclusions.AWAY)
    offload_folder: str = key(
        "", keys.FOLDER, "where on the disk; default: the system's temporary folder", exclusions.ON_DISK
    )
    offload_limit: int | str | None = key(
        None, keys.BYTES, "bytes that each rank may keep there; none: what there is", exclusions.AWAY
    )
    host_layers: tuple[str, ...] | str = key(
        (), keys.LAYERS, "layers that are computed on the host; only their outputs cross"
    )
    sync: str = key(
        "allreduce",
        one_of("allreduce", "ps"),
        "how replicas agree: ps: they push gradients to parameter servers, and pull parameters; each is one rank",
    )
    mode: str = key(
        "sync",
        keys.MODE,
        "of servers: async: each gradient is an update; ssp:S: the same, with nobody more than S steps "
        "ahead; k-of-n:K/N: the first K gradients of a step",
        exclusions.SERVED,
    )
    servers: int = key(1, whole(1), "parameter servers; they are ranks beside the workers", exclusions.SERVED)
    on_death: str = key(
        "abort",
        one_of("abort", "continue"),
        "of a rank: the run ends, or the rank starts again and goes on",
        exclusions.SERVED,
    )
    algorithm: str = key(
        keys.ALGORITHM,
        keys.SUM,
        "by which gradients of replicas are summed, after the backward; default: shared memory, or the backend's own",
    )
    extra_passes: tuple[str, ...] | str = key((), keys.PASSES, "passes of your own, by the names of @minipar.pass_")
    annotations: tuple[tuple[str, str], ...] | Mapping[str, str] | str = key(
        (),
        keys.ANNOTATIONS,
        "the forms of some operators' outputs or of parameters, by patterns of their names; those of all others "
        "follow. Default: of the names that the presets know, or what the operators allow",
        exclusions.SHARED,
    )

    def __new__(cls, *_: object, **given: object) -> Plan:
        # (so that a wrong keyword gets the same error as a wrong word)
        keys.check_keys(given, [field.name for field in fields(cls)])
        return super().__new__(cls)

    def __post_init__(self) -> None:
        table = {field.name: (field.default, field.metadata["key"]) for field in fields(self)}
        for name, (default, row) in table.items():
            value = getattr(self, name)
            if value is not default:
                keys.check_size(name, value)
                object.__setattr__(self, name, row.domain.read(name, value))
        schedule = strategies.find(self.schedule)
        for name in OPTIONS:
            schedule.check(name, getattr(self, name))
        stages = self.pp * (self.chunks or schedule.chunks)
        if stages > MOST_STAGES:
            words = f"pp={self.pp}" if self.chunks is None else f"pp={self.pp} chunks={self.chunks}"
            raise PlanError(f"{words}: {stages} stages; possible are up to {MOST_STAGES}")
        if self.place is not None:
            object.__setattr__(self, "place", branches.parse(self.place, self.pp))
        exclusions.check(self)
        if self.split is not None:
            held = self.placement()
            counts = keys.split(self.split, 1 + max(map(max, held)), self.pp, len(held[0]))
            object.__setattr__(self, "split", counts)
        if self.sync == "ps":
            object.__setattr__(self, "mode", str(Mode.parse(self.mode, self.dp)))
        for name, (default, row) in table.items():
            if row.need is not None:
                exclusions.check_needs(self, name, default, row.need)
        if schedule.asynchronous is not None:
            schedule.asynchronous.promise(self.pp, self.numbers)

    @staticmethod
    def parse(text: str | Mapping[str, Any] | Plan) -> Plan:
        """A plan from `"pp=2 dp=2 schedule=1f1b"`, or from a table (TOML, JSON) of the same keys. A Plan is returned as
        it is. Errors: PlanError."""
        if isinstance(text, Plan):
            return text
        if isinstance(text, str):
            table: dict[str, Any] = {**keys.words(text)}
        elif isinstance(text, Mapping):
            table = dict(text)
        else:
            raise PlanError(f"plan {text!r}: must be a Plan, words such as 'pp=2 dp=2', or a table of these keys")
        keys.check_keys(table, [field.name for field in fields(Plan)])
        return Plan(**table)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """The plan that a TOML file holds, such as `save` writes. Errors: PlanError, which names file and line."""
        return plan_file.load(path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a TOML file: a key a line, in the order of the keys, without those that have their default.
        To save what was loaded gives the same bytes. Errors: PlanError for a plan that another process could not read,
        since its schedule, passes or collective are your own."""
        plan_file.save(self, path)

    def export(
        self,
        system: str,
        model: str | Preset | Sizes | None = None,
        batch: int | None = None,
        nodes: int | None = None,
        gpus_per_node: int | None = None,
    ) -> Export:
        """The plan as another system's flags or configuration: its `text`, and what stands in it as `values`.

        system   "megatron" (flags of Megatron-LM), "deepspeed" (JSON), "torchtitan" (TOML), or "torchrun": a script
                 with minipar's own `train`, of a preset
        model    a name, words, a config.json or numbers, as `estimate` takes them; the flags of Megatron-LM then have
                 the model's sizes, too
        batch    rows of a step; default: one for each micro-batch

        Errors: PlanError for what the system cannot express; it names the nearest that it can.
        """
        from minipar.strategies import exporting

        return exporting.export(self, system, model, batch, nodes, gpus_per_node)

    @property
    def ranks(self) -> int:
        """Number of ranks the plan needs."""
        return self.dp * self.pp * self.sharing + (self.servers if self.sync == "ps" else 0)

    @property
    def sharing(self) -> int:
        """How many ranks share each layer."""
        return self.tp * self.context_parallel * self.ep

    @property
    def inputs(self) -> str:
        """The form in which these ranks have rows and targets: see `Program.inputs`."""
        parts = {"cp": "S1", "ep": "S0"}
        found = letter_of([parts.get(axis, WHOLE) for axis, _ in self.shared] or [WHOLE])
        return "" if found == WHOLE else found

    @property
    def shared(self) -> tuple[tuple[str, int], ...]:
        """The axes of the mesh whose ranks share layers, with their sizes."""
        sizes = {"tp": self.tp, "cp": self.context_parallel, "ep": self.ep}
        return tuple((name, sizes[name]) for name in SHARING if sizes[name] > 1)

    @property
    def asynchronous(self) -> bool:
        """Whether there is no flush between steps. Then a program contains all steps of a run."""
        return strategies.find(self.schedule).asynchronous is not None

    @property
    def deciding(self) -> bool:
        """Whether the ranks decide as they run. Then the schedule's order is only the one that equal speeds would
        give."""
        rules = strategies.find(self.schedule).asynchronous
        return rules is not None and rules.decides

    @property
    def settling_steps(self) -> int:
        """A number of steps after which staleness and versions of an asynchronous run have reached their maxima."""
        numbers = self.numbers
        return 2 + 4 * (self.pp + numbers["in_flight"]) * numbers["update_every"] // self.microbatches

    @property
    def numbers(self) -> dict[str, int]:
        """The numbers that asynchronous schedules get from the plan, with their defaults."""
        return {
            "microbatches": self.microbatches,
            "in_flight": self.in_flight or self.pp,
            "update_every": self.update_every or 1,
        }

    @property
    def splits(self) -> bool:
        """Whether the schedule splits backwards into an input half and a weight half. Errors: PlanError for more
        actions than MOST."""
        self._check_actions(self.pp, self.microbatches * self.slice_count)
        return any(isinstance(a, BackwardWeight) for rank in range(self.pp) for a in self.actions(rank))

    @property
    def copies(self) -> bool:
        """Whether a stage is on more than one rank of the pipeline."""
        stages = [stage for mine in self.placement() for stage in mine]
        return len(set(stages)) < len(stages)

    @property
    def messages(self) -> float | str | tuple[int, ...]:
        """`bucket`, or its default, which depends on `zero`."""
        return (8 if self.zero == 3 else 25) if self.bucket is None else self.bucket

    @property
    def cut(self) -> int | tuple[int, ...]:
        """How many slices of tokens a sequence is cut into, or their lengths; 1: it stays whole."""
        if self.slices is not None:
            return self.slices
        return self.pp if "slices" in strategies.find(self.schedule).options else 1

    @property
    def slice_count(self) -> int:
        """How many slices a sequence is cut into."""
        return self.cut if isinstance(self.cut, int) else len(self.cut)

    @property
    def total_microbatches(self) -> int:
        """Micro-batches of rows per replica and step, over all rounds of accumulation, before each is cut into
        slices."""
        return self.microbatches * self.accumulate

    def block(self, steps: int, every: int = 0) -> int:
        """How many of all `steps` to put in one program. After every `every` steps a program must end (0: anywhere).

        It is 1, except where messages of one step travel during the next step, or where replicas train alone.
        Errors: PlanError if `every` does not fit `local_steps`.
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

    @property
    def sums_at_the_end(self) -> bool:
        """Whether gradients are summed after the last backward. (The program of an algorithm is a rank's own work.)"""
        return self.overlap == "none" or self.algorithm != keys.ALGORITHM

    def __str__(self) -> str:
        words = [f"dp={self.dp}", f"pp={self.pp}"]
        for field in fields(self):
            value = getattr(self, field.name)
            telling = field.name == "schedule" and self.pp > 1
            if field.name not in ("dp", "pp") and (telling or value != field.default):
                if field.name in ("checkpoint", "bucket"):
                    value = segments.text(value)
                if field.name == "annotations":
                    value = exclusions.shown(value)
                words.append(f"{field.name}={','.join(map(str, value)) if isinstance(value, tuple) else value}")
        return " ".join(words)

    def __repr__(self) -> str:
        """The keys that differ from their defaults, as Python."""
        differing = ((field.name, getattr(self, field.name), field.default) for field in fields(self))
        return f"Plan({', '.join(f'{name}={value!r}' for name, value, default in differing if value != default)})"

    def passes(self) -> tuple[Pass, ...]:
        """The passes that `compile` runs on each step, in order: `print(*plan.passes(), sep="\\n")`.

        It contains only the passes that the plan needs, and your own passes (`extra_passes`) at their places. Each pass
        has a `name` and a `summary`, and is a function from a `minipar.Draft` to a Draft.
        """
        return compile.passes_of(self)

    def placement(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank of the pipeline, by chunk."""
        schedule = strategies.find(self.schedule)
        return place(schedule.placement, self.pp, self.chunks or schedule.chunks, self.schedule)

    def check_stages(self, layers: int) -> None:
        """Errors: PlanError for more stages than a model has layers."""
        check_stages(self.placement(), layers)

    def layout(
        self,
        shape: Shape,
        costs: LayerCosts | Profile | None = None,
        costs_of: Callable[[Program], Costs] | None = None,
        time_of: Callable[[Program], float] | None = None,
    ) -> Layout:
        """Which rank holds which layers of a model of this shape. With split="auto" it needs `costs` of the layers; for
        `costs_of` and `time_of` see `compile`."""
        if self.slice_count > 1:
            keys.check_causal(self, shape)
        if self.place is not None or shape.edges:
            branches.check_shape(self, shape)
        if isinstance(self.bucket, tuple) and self.bucket[0] >= shape.own_layers:
            words, layers = ",".join(map(str, self.bucket)), shape.own_layers
            raise PlanError(f"bucket={words}: the model has {layers} layers; possible are 0 to {layers - 1}")
        host = host_layers.find(self.host_layers, shape)
        microbatches = self.total_microbatches * self.slice_count
        if self.place is not None:
            split, placement = branches.stages(branches.ranks_of(self.place, shape, self.pp), self.pp)
            return Layout(shape, self.dp, self.pp, split, microbatches, placement, host, self.shared)
        placement, layers = self.placement(), shape.own_layers
        split = even_split(layers, check_stages(placement, layers))

        def laid(split: tuple[int, ...]) -> Layout:
            """The layout with so many of the model's own layers in each stage."""
            ends = [shape.firsts[end] for end in accumulate(split, initial=0)]
            nodes = tuple(end - start for start, end in pairwise(ends))
            return Layout(shape, self.dp, self.pp, nodes, microbatches, placement, host, self.shared)

        if self.split == "auto":
            split = self._best_split(laid, split, costs, costs_of, time_of)
        elif self.split is not None:
            split = tuple(int(n) for n in self.split)
            check_split(split, layers)
        return laid(split)

    def _best_split(
        self,
        laid: Callable[[tuple[int, ...]], Layout],
        equal: tuple[int, ...],
        costs: LayerCosts | Profile | None,
        costs_of: Callable[[Program], Costs] | None,
        time_of: Callable[[Program], float] | None,
    ) -> tuple[int, ...]:
        """The split that split="auto" stands for; `laid` gives the layout with a split, such as the `equal` one."""
        from minipar.strategies.passes.priority import messages
        from minipar.strategies.splitting import by_chain, fastest  # (it needs NumPy)

        layout = laid(equal)
        usual = by_chain(costs, len(equal), layout, self.checkpoint not in ("none", "selective"))
        if time_of is None:
            return usual

        def time(split: tuple[int, ...]) -> float:
            return time_of(compile.program_of(self, layout.shape, laid(split), 1, costs, costs_of))

        work = layout.shape.layers * layout.microbatches
        if self.overlap == "priority":
            work += messages(layout.shape, self.messages)
        return fastest([equal, usual], time, work * self.dp)

    def compile(
        self,
        shape: Shape | int | None = None,
        *,
        layers: int | None = None,
        steps: int = 1,
        check: bool = True,
        costs: LayerCosts | Profile | None = None,
        costs_of: Callable[[Program], Costs] | None = None,
        time_of: Callable[[Program], float] | None = None,
    ) -> Program:
        """The program of `steps` training steps for a model of `shape`, or of `layers` equal layers.

        costs      the costs of the layers for one micro-batch, such as `minipar.profile(model, batch)`; split="auto"
                   and a checkpoint budget need them, checkpoint="sqrt" uses them
        costs_of   gives the costs of a program, as `simulate` takes them; bucket="auto" and overlap="priority" use
                   them. By default a layer's forward takes 1 and its backward 2, and the messages of all gradients
                   together take as long as all forwards and backwards of one micro-batch
        time_of    gives the predicted time of a program, such as `lambda p: simulate(p, costs_of(p)).time`;
                   split="auto" searches with it. Otherwise it takes the best split for gpipe with one stage a rank

        Errors: PlanError if the plan does not fit the model; ProgramError if the program cannot run (a schedule of your
        own may be wrong). `check=False` skips the check of the program.
        """
        if (shape is None) == (layers is None):
            raise PlanError("compile: give either a shape (models.shape(name)) or layers=N")
        if layers is not None:
            self._check_size(layers if isinstance(layers, int) and layers > 0 else 1, 1)
            shape = self._uniform(layers)
        elif not isinstance(shape, Shape):
            if not hasattr(shape, "__index__"):
                raise PlanError(f"compile({shape!r}): give a shape (models.shape(name)) or layers=N")
            shape = self._uniform(operator.index(shape))  # type: ignore[arg-type]
        elif self.sharing > 1 and shape == uniform(shape.layers):
            shape = self._uniform(shape.layers)
        elif self.sharing > 1 and not shape.forms:
            raise PlanError(
                f"{self.shared[0][0]}={self.sharing}: this shape does not say how its layers are divided; possible is "
                "compile(layers=N), or train(...), which captures the model"
            )
        if self.inference:
            shape = frozen(shape)
        steps = keys.whole_number("steps", steps)
        self._check_size(shape.layers, steps)
        layout = self.layout(shape, costs, costs_of, time_of)
        with paused():
            program = compile.program_of(self, shape, layout, steps, costs, costs_of)
            if check:
                self._verify(program, layout, steps)
        return program

    def sketch(self) -> Program:
        """The program of one step for as many layers as the plan has stages, which shows its schedule.

        Errors: PlanError if the plan needs the layers or the costs of a model.
        """
        try:
            return self.compile(layers=1 + max(map(max, self.placement())))
        except PlanError as error:
            if error.reason.startswith("schedule="):  # (no model would help)
                raise
            raise PlanError(
                f"plan {self}: without a model there is one layer for each stage, and {error.reason}; possible is "
                "plan.compile(layers=8), or plan.compile(models.shape('gpt-tiny')), which makes the program",
                error.details,
            ) from None

    def _check_size(self, layers: int, steps: int) -> None:
        """Refuse a program that would fill the memory, before anything is built. A layer has a forward and a backward
        for each micro-batch on each replica and each rank that shares it; a rank has a few instructions beside them."""
        if self.ranks > MOST_RANKS:
            raise PlanError(f"plan {self}: needs {self.ranks} ranks; possible are up to {MOST_RANKS}")
        replica = 2 * layers * self.total_microbatches * self.slice_count * steps + 4 * self.pp * steps
        for size, most, whose in ((replica, MOST, "of one replica"), (replica * self.dp * self.sharing, 2 * MOST, "")):
            if size > most:
                words = f"about {size} instructions {whose}".rstrip()
                raise PlanError(f"plan {self}: {words} in {steps} steps; possible are up to {most}")

    def _check_actions(self, ranks: int, pieces: int) -> None:
        """Refuse to list the actions of so many ranks, if there would be too many: forwards and backwards."""
        size = 2 * ranks * pieces * (self.chunks or strategies.find(self.schedule).chunks)
        if size > MOST:
            whose = "a rank" if ranks == 1 else several(ranks, "rank")
            raise PlanError(f"plan {self}: about {size} actions of {whose} in a step; possible are up to {MOST}")

    def _uniform(self, layers: int) -> Shape:
        """Equal layers; those that ranks share are divided as a transformer's blocks are."""
        shape = uniform(layers)
        if self.sharing == 1:
            return shape
        if self.annotations:
            raise PlanError(
                f"annotations={exclusions.shown(self.annotations)}: equal layers have no names; possible is "
                "train(...), which captures the model, or no annotations="
            )
        shape = divided(shape, self.tp, self.sequence_parallel) if self.tp > 1 else shape
        return in_parts(shape, self.inputs, len(self.shared)) if self.inputs else shape

    def _verify(self, program: Program, layout: Layout, steps: int) -> None:
        """Verify the program. The error names the action of the schedule that is wrong, if there is one, and the user's
        own passes that rewrote the program."""
        try:
            (verify if self.extra_passes else prove)(program)
        except ProgramError as error:
            if self.extra_passes:
                words = f"the plan's own passes rewrote this program: {', '.join(self.extra_passes)}"
                error.details = f"{error.details}\n{words}" if error.details else words
            raise self._as_written(layout, steps, error) from None

    def _as_written(self, layout: Layout, steps: int, error: ProgramError) -> ProgramError:
        """The error in terms of one rank's actions, if one of these is wrong; otherwise the error itself."""
        count = steps if self.asynchronous else 1
        chosen = [self.actions(rank, count, len(mine)) for rank, mine in enumerate(layout.placement)]
        trained = {stage for mine in layout.placement for stage in mine if layout.trained(stage)}
        found = as_written.mistake(chosen, layout.placement, layout.microbatches * count, trained)
        if not found:
            return error
        named = ProgramError(f"schedule={self.schedule}: {found}", str(error))
        named.places = error.places
        return named

    def actions(self, rank: int, steps: int = 1, held: int = 1) -> list[Action]:
        """The schedule of one rank, repeated for every round of accumulation.

        steps   how many steps an asynchronous schedule goes through
        held    how many stages the rank has, with `place`; all ranks then follow the order for a pipeline of one rank
        Errors: PlanError for what is no action, for an action on a micro-batch or chunk that does not exist, and for
        more actions than MOST.
        """
        schedule = strategies.find(self.schedule)
        chunks, pieces = self.chunks or schedule.chunks, self.microbatches * self.slice_count * steps
        self._check_actions(1, pieces * self.accumulate)
        ranks = self.pp
        if self.place is not None:
            rank, ranks, chunks = 0, 1, held if "chunks" in schedule.options else 1
        given = {"chunks": chunks, "group": self.group, "doubling": self.doubling, "slices": self.slice_count}
        given |= self.numbers
        possible = "possible are Forward(i, chunk), Backward, BackwardInput and BackwardWeight"
        most = 3 * pieces * max(1, chunks)  # (a forward and two halves of a backward, of each)
        try:
            found = schedule.generate(
                rank, ranks, self.microbatches * steps, **{key: given[key] for key in schedule.options}
            )
            if not isinstance(found, Iterable):
                raise PlanError(f"schedule={self.schedule}: gave {found!r}; it must yield actions; {possible}")
            chosen = list(islice(found, most + 1))
        except MiniparError:
            raise
        except Exception as error:  # of the user's own generator
            _, *rest = traceback.extract_tb(error.__traceback__)  # (the first is here)
            line = f", in line {rest[-1].lineno} of {rest[-1].name}: {rest[-1].line}" if rest else ""
            raise PlanError(
                f"schedule={self.schedule}: {type(error).__name__} on rank {rank}: {error}{line}"
            ) from error
        if len(chosen) > most:
            raise PlanError(
                f"schedule={self.schedule}: rank {rank} yields more than {most} actions; there are no more for "
                f"{several(pieces, 'micro-batch')} in {several(chunks, 'chunk')}; possible is a generator that ends"
            )
        for action in chosen:
            if not isinstance(action, Action):
                raise PlanError(f"schedule={self.schedule}: yielded {action!r}; {possible}")
            for k, count, what in ((action.microbatch, pieces, "micro-batches"), (action.chunk, chunks, "chunks")):
                # (most are plain numbers; looking for a method is slow)
                if (type(k) is not int and not hasattr(k, "__index__")) or not 0 <= k < count:
                    words = f"{action} on rank {rank}; {what} count from 0 to {count - 1}"
                    raise PlanError(f"schedule={self.schedule}: {words}")
        if self.place is not None and chunks < held:
            chosen = branches.through(chosen, held)
        if self.accumulate == 1:
            return chosen
        return [
            replace(action, microbatch=action.microbatch + r * pieces)
            for r in range(self.accumulate)
            for action in chosen
        ]


# `__new__` takes any keyword, so that it can refuse the wrong ones. The signature shows only the fields of a plan.
_parameters = list(inspect.signature(Plan.__init__).parameters.values())[1:]
Plan.__signature__ = inspect.Signature(_parameters, return_annotation="Plan")  # type: ignore[attr-defined]


def table() -> dict[str, dict[str, Any]]:
    """For every key: its default, its domain, its values (if there are few), a line of help, and what it excludes."""
    found: dict[str, dict[str, Any]] = {}
    for field in fields(Plan):
        row: keys.Key = field.metadata["key"]
        against = [(e, e.one, e.other) for e in exclusions.EXCLUSIONS if e.one.key == field.name]
        against += [(e, e.other, e.one) for e in exclusions.EXCLUSIONS if e.other.key == field.name]
        found[field.name] = {
            "default": exclusions.shown(field.default),
            "domain": row.domain.words,
            "values": list(row.domain.values),
            "help": row.help,
            "needs": row.need.possible if row.need else "",
            "excludes": [
                {"words": own.words, "key": other.key, "with": other.words, "why": e.why, "possible": e.possible,
                 "fundamental": e.fundamental}
                for e, own, other in against
            ],
        }  # fmt: skip
    return found


def _help() -> str:
    """What `help(Plan)` says of the keys."""
    lines = []
    for field in fields(Plan):
        row: keys.Key = field.metadata["key"]
        words = f"{row.help} [{row.domain.words}]"
        lines += textwrap.wrap(words, 116, initial_indent=f"    {field.name:19}", subsequent_indent=" " * 23)
    return "\n".join(lines)


Plan.__doc__ = f"{Plan.__doc__}\n\n{_help()}\n    "
