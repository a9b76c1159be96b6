"""The program: what every rank does, in order, on named values.

A strategy builds a `Program`. `verify`, `simulate`, `execute` and `plot` all read the same one. A rank's program is a
tuple of `Instruction`s. An instruction reads, writes and frees `Value`s. From these three lists minipar derives which
instruction waits for which, and how much memory is live. No dependency is written anywhere else.

    rank 0   F 0:2 mb0 | SEND output(1) mb0 -> 1 | ...          | RECV grad_output(1) mb0 <- 1 | B 0:2 mb0 | STEP 0:2
    rank 1               RECV output(1) mb0 <- 0 | F 2:4 mb0 | B 2:4 mb0 | SEND grad_output(1) mb0 -> 0     | STEP 2:4

Instructions (with actions of schedules), values and contracts have modules of their own in this package. Import their
names from here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar

from minipar.program import edges as graphs
from minipar.program.consistency import Contract, Local, Serving, Staleness, Synchronous
from minipar.program.forms import Forms, form_of
from minipar.program.instructions import (
    BACKWARDS,
    COLLECTIVES,
    COMPUTE,
    COPIES,
    MOVED,
    PARTNERS,
    PORT,
    SERVICE,
    TRANSFERS,
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    Op,
    Part,
    message,
    piece_of,
    repartitions,
    span,
)  # fmt: skip
from minipar.program.mesh import Mesh
from minipar.program.repeated import Repeated
from minipar.program.rule import Turn, Wait, order
from minipar.program.values import (
    TIERS,
    LayerRun,
    Value,
    buffer,
    carry,
    chunk,
    disk,
    grad,
    grad_carry,
    grad_output,
    grad_shard,
    home,
    host,
    incoming,
    norm,
    optimizer_shard,
    optimizer_state,
    output,
    param,
    param_shard,
    pushed,
    residual,
    saved,
    saved_weight,
    served,
    served_state,
    tier,
    version_of,
)  # fmt: skip
from minipar.wording import several

T = TypeVar("T")


class Group(NamedTuple):
    """A parameter group: the parameters of one layer that no other layer shares, or one set tied between layers.

    `tensors` are the sizes in bytes of its trainable parameters, `frozen` the bytes that never get a gradient. With
    tensor parallelism, `form` says how the ranks that share a layer have them:

    ""    every rank has all of them, and its backward makes their whole gradient
    "S"   every rank has a shard, and makes the gradient of that; sizes are those of the shards
    "P"   every rank has all of them, and makes a part of the gradient, which is the sum of the parts

    Where ranks share layers along several axes, there is a part for each of them, as in the letters of `forms.py`:
    "P/S" is a part of the gradient along the first axis, and a shard along the second.
    """

    layers: tuple[int, ...]
    tensors: tuple[int, ...] = (0,)
    frozen: int = 0
    form: str = ""

    @property
    def trainable(self) -> bool:
        return bool(self.tensors)

    @property
    def is_cut(self) -> bool:
        """Whether ranks that share its layers have shards of it."""
        return "S" in self.form


# What layers compute in, by the plan's key: a type of torch by its name; "": the model's own type.
PRECISIONS = {"float32": "", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Program:
    """A tuple of instructions for each rank, and the facts that are needed to verify, simulate and run them.

    ranks            instructions of each rank, in the order in which its loop walks them: a tuple, or a `Repeated`,
                     which has those of one pipeline and makes the others when they are asked for
    layers           number of layers of the model; layer l reads the output of layer l-1, or as `edges` say
    microbatches     number per replica and step, over all rounds of accumulation
    groups           parameter groups, by index
    mesh             axis sizes, slowest first: a `Mesh`, or the same as a tuple
    state            per rank the values held before the first instruction and after the last one
    receives_ahead   how many receives per link are posted before the walk reaches them
    clip             the largest norm of the gradient: STEP scales a longer gradient down to it. None: no clipping
    compress         how gradients are compressed before they are summed: "none", "bf16", "fp16", "topk:R", "powersgd:R"
    precision        a key of `PRECISIONS`: what layers compute in. With a shorter type STEP works in float32
    folder           the folder for values on the disk; "": the system's temporary folder
    algorithm        by which gradients are summed over the replicas, and slices gathered; "": the backend's own
    room             bytes that a rank may keep in the slower tier; None: no limit but the tier's own size
    chunks           only for a collective, which has no layers: the sizes in bytes of the chunks of its tensor
    final            only for a collective: the values that each rank holds at the end; (): the values of `state`
    selective        True: a BACKWARD first runs the attention cores of its layers forward again
    serving          the parameter servers; None: there are none
    in_flight        how many micro-batches are under way when the ranks decide their order as they run; `ranks` is then
                     one possible order. None: the order in `ranks` is fixed
    slices           how many slices of equal length a sequence is cut into, or their lengths in tokens. Each
                     micro-batch is one slice
    carries          the layers that keep something of a sequence for its later slices
    edges            the edges of a model with branches (see `minipar.program.edges`); (): a chain. With edges,
                     grad_output(e, i) belongs to edge e
    forms            with tensor parallelism, for each layer the forms in which it reads and writes values. The layers
                     are then the nodes into which the model's own layers are cut; (): every value is whole
    inputs           the form in which the ranks that share layers have the rows of a micro-batch and their targets: "":
                     each has all of them; "S0": a part of the rows; "S1": of the tokens of every row; "S0/S1": of the
                     rows along the first axis, and of their tokens along the second
    names            the names of the layers, for messages; (): they are not known
    """

    ranks: Sequence[tuple[Instruction, ...]]
    layers: int
    microbatches: int
    groups: tuple[Group, ...]
    mesh: tuple[tuple[str, int], ...] = Mesh(dp=1, pp=1)
    state: tuple[frozenset[Value], ...] = ()
    steps: int = 1
    contract: Contract = field(default_factory=Synchronous)
    receives_ahead: int = 2
    name: str = ""
    clip: float | None = None
    precision: str = "float32"
    compress: str = "none"
    folder: str = ""
    room: int | None = None
    algorithm: str = ""
    chunks: tuple[int, ...] = ()
    final: tuple[frozenset[Value], ...] = ()
    selective: bool = False
    serving: Serving | None = None
    in_flight: int | None = None
    slices: int | tuple[int, ...] = 1
    carries: tuple[int, ...] = ()
    edges: graphs.Edges = ()
    forms: tuple[Forms, ...] = ()
    inputs: str = ""
    names: tuple[str, ...] = field(default=(), compare=False)

    def __len__(self) -> int:
        return sum(self.of_each(lambda rank: len(self.ranks[rank])))

    @property
    def narrow(self) -> str:
        """The type in which layers compute, if it is not the model's own; else ""."""
        return PRECISIONS[self.precision]

    @cached_property
    def representatives(self) -> tuple[int, ...]:
        """For each rank the first one that does the same on the same layers, on other rows or shards: the rank itself
        in a program that is written rank by rank."""
        return self.ranks.representatives if isinstance(self.ranks, Repeated) else tuple(range(len(self.ranks)))

    def of_each(self, found: Callable[[int], T]) -> tuple[T, ...]:
        """`found(rank)` for every rank. It is asked only once for ranks that do the same."""
        known = {rank: found(rank) for rank in dict.fromkeys(self.representatives)}
        return tuple([known[rank] for rank in self.representatives])

    def replica(self, rank: int) -> int:
        """The replica that a rank belongs to: its coordinate on the axis `dp`. Servers get numbers after all
        replicas."""
        return self._replicas[rank]

    @cached_property
    def _replicas(self) -> tuple[int, ...]:
        mesh = Mesh(self.mesh)
        workers, servers = range(min(self.workers, mesh.size)), len(self.ranks) - min(self.workers, mesh.size)
        own = tuple(mesh.coordinates(rank).get("dp", 0) for rank in workers)
        return own + tuple(range(self.replicas, self.replicas + servers))

    @property
    def workers(self) -> int:
        """The ranks that hold layers: all but parameter servers."""
        return len(self.ranks) - (self.serving.servers if self.serving else 0)

    @cached_property
    def undecided(self) -> bool:
        """Whether it has servers that decide as they run, and has not run: then they have no instructions."""
        return self.serving is not None and not any(self.ranks[self.workers :])

    @property
    def slice_count(self) -> int:
        """How many slices a sequence is cut into."""
        return self.slices if isinstance(self.slices, int) else len(self.slices)

    @property
    def row_microbatches(self) -> int:
        """How many micro-batches the rows of a replica's step are split into, before each is cut into slices."""
        return self.microbatches // self.slice_count

    @property
    def replicas(self) -> int:
        return Mesh(self.mesh).length("dp")

    @property
    def local_steps(self) -> int:
        """How many updates a replica does alone before all average their parameters; 0: it does none alone."""
        return self.contract.steps if isinstance(self.contract, Local) and self.replicas > 1 else 0

    @cached_property
    def sharing(self) -> int:
        """How many ranks share each layer: 1, or the sizes of the axes tp, cp and ep together."""
        mesh = Mesh(self.mesh)
        return math.prod(mesh.length(axis) for axis in mesh.sharing)

    def shard(self, rank: int) -> int:
        """The place of a rank among those that share its layers. A parameter server shares none: 0."""
        return self.sharers(rank).index(rank) if self.sharing > 1 and rank < self.workers else 0

    def sharers(self, rank: int, axes: tuple[str, ...] | None = None) -> tuple[int, ...]:
        """The ranks that share a rank's layers with it, itself included; those along some of the axes alone."""
        if self.sharing == 1:
            return (rank,)
        return self._sharers(self.sharing_axes if axes is None else axes)[rank]

    @cached_property
    def sharing_axes(self) -> tuple[str, ...]:
        """The axes of the mesh along which ranks share layers, in the order of the letters of forms."""
        return Mesh(self.mesh).sharing

    @property
    def sharing_mesh(self) -> Mesh:
        """These axes with their sizes."""
        return Mesh((axis, Mesh(self.mesh).length(axis)) for axis in self.sharing_axes)

    def _sharers(self, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        if axes not in self._known_sharers:
            mesh, found = Mesh(self.mesh), {}
            for rank in range(mesh.size):
                if rank not in found:
                    ranks = mesh.group(rank, *axes)
                    found.update(dict.fromkeys(ranks, ranks))
            self._known_sharers[axes] = tuple(found[rank] for rank in range(mesh.size))
        return self._known_sharers[axes]

    @cached_property
    def _known_sharers(self) -> dict[tuple[str, ...], tuple[tuple[int, ...], ...]]:
        return {}

    def places(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Of each axis along which a rank shares layers, its place on it, and how many ranks there are."""
        mesh = Mesh(self.mesh)
        own = mesh.coordinates(rank)
        return tuple((own[axis], mesh.length(axis)) for axis in self.sharing_axes)

    def spread(self, group: int, letter: str) -> tuple[str, ...]:
        """The axes along which ranks have shards of a parameter group ("S"), or make parts of its gradient ("P")."""
        form = self.groups[group].form
        return tuple(axis for axis, part in zip(self.sharing_axes, form.split("/"), strict=False) if part == letter)

    def part(self, rank: int, group: int, letter: str) -> tuple[int, int]:
        """The place of a rank among those that have different shards ("S") of a group, or make different parts ("P") of
        its gradient, and how many there are; (0, 1) if there are none."""
        if self.sharing == 1 or rank >= self.workers or letter not in self.groups[group].form:
            return 0, 1
        found = self.sharers(rank, self.spread(group, letter))
        return found.index(rank), len(found)

    def is_first(self, rank: int, form: str, *letters: str) -> bool:
        """Whether a rank is the first along all axes that share its layers, but for those on which this form of a
        parameter group has one of these letters."""
        if self.sharing == 1:
            return True
        both = zip_longest(self.places(rank), form.split("/"), fillvalue="")
        return all(not place or place[0] == 0 or part in letters for place, part in both)

    def form_of(self, value: Value, layers: Sequence[int], *, written: bool) -> str:
        """The form in which an instruction on these layers reads or writes an output, or the gradient of one."""
        return form_of(self.forms, value, layers, written=written) if self.forms else ""

    def title(self, layer: int) -> str:
        """What a message calls a layer: its number, and its name where that is known."""
        return f"{layer} ({self.names[layer]})" if layer < len(self.names) else str(layer)

    @property
    def losses(self) -> int:
        """How many losses the program gives: one per step, or one per micro-batch that is a mini-batch of its own."""
        return self.steps * self.microbatches if self.every is not None else self.steps

    @property
    def every(self) -> int | None:
        """How many micro-batches make an update where each of them has a mean loss of its own; None: those of a step,
        which have one mean loss."""
        return self.contract.every if isinstance(self.contract, Staleness) else None

    @cached_property
    def ops(self) -> tuple[tuple[Op, ...], ...]:
        """The op of each instruction. Loops that need few instructions read this: it is close together in memory."""
        return self.of_each(lambda rank: tuple([ins.op for ins in self.ranks[rank]]))

    @cached_property
    def updates(self) -> int:
        """How often the parameters change: once a step; in an asynchronous program, as often as its STEPs
        count."""
        if isinstance(self.contract, (Synchronous, Local)):
            return self.steps
        rows = [self.ranks[rank] for rank in sorted(set(self.representatives))]
        return max((1 + ins.step for row in rows for ins in row if ins.op is Op.STEP), default=0)

    @cached_property
    def sharded(self) -> frozenset[int]:
        """The parameter groups whose optimizer state is sharded over the ranks that hold them."""
        return frozenset(v.index for held in self.state for v in held if home(v).kind == "optimizer_shard")

    @cached_property
    def scattered(self) -> frozenset[int]:
        """The parameter groups of which the parameters, too, are sharded between steps."""
        whole = {v.index for held in self.state for v in held if home(v).kind == "param"}
        slices = {v.index for held in self.state for v in held if home(v).kind == "param_shard"}
        return frozenset(slices - whole)  # (a slice on the host may be the optimizer's copy of a whole parameter)

    @cached_property
    def holders(self) -> tuple[int, ...]:
        """For each parameter group, how many ranks hold all of it or a slice of it."""
        held = [{v.index for v in values if home(v).kind in ("param", "param_shard")} for values in self.state]
        return tuple(sum(g in found for found in held) for g in range(len(self.groups)))

    def slicing(self, group: int, rank: int) -> tuple[int, ...]:
        """The ranks among which the slices of a sharded group are, in the order of the slices: of the ranks that have
        the same shard of the layer as this one, all that hold the group."""
        found = self._slicing.get(group, ())
        return tuple(r for r in found if self.shard(r) == self.shard(rank)) if self.sharing > 1 else found

    @cached_property
    def _slicing(self) -> dict[int, tuple[int, ...]]:
        known: dict[int, list[int]] = {}  # (ranks that do the same share one set, which is looked at once)
        found: dict[int, list[int]] = {}
        for rank, held in enumerate(self.state):
            if id(held) not in known:
                known[id(held)] = [v.index for v in held if home(v).kind == "optimizer_shard"]
            for g in known[id(held)]:
                found.setdefault(g, []).append(rank)
        return {g: tuple(ranks) for g, ranks in found.items()}

    @cached_property
    def first_trainable(self) -> int:
        """The first layer with a trainable parameter. Layers before it need no backward."""
        return min((min(g.layers) for g in self.groups if g.trainable), default=self.layers)

    @cached_property
    def wiring(self) -> graphs.Wiring:
        """Which layers each layer reads, and which edges lead into it and out of it."""
        return graphs.wiring(self.edges, self.layers)

    def source(self, value: Value) -> int:
        """The layer that an activation belongs to. For a grad_output it is the layer whose output has this gradient."""
        return self.edges[value.index][0] if self.edges and value.kind == "grad_output" else value.index

    @cached_property
    def placement(self) -> tuple[tuple[int, ...], ...]:
        """Layers held by each rank, ascending."""
        FORWARD = Op.FORWARD

        def held(rank: int) -> tuple[int, ...]:
            both = zip(self.ops[rank], self.ranks[rank], strict=True)
            return tuple(sorted({layer for op, ins in both if op is FORWARD for layer in ins.layers}))

        return self.of_each(held)

    @cached_property
    def share(self) -> tuple[tuple[int, ...], ...]:
        """The layers that one micro-batch goes through on each rank. Where a rank holds two stages of which a
        micro-batch uses one (Chimera), only the layers of one stage count."""
        FORWARD = Op.FORWARD

        def fullest(rank: int) -> tuple[int, ...]:
            layers: dict[int, tuple[int, ...]] = {}
            for op, ins in zip(self.ops[rank], self.ranks[rank], strict=True):
                if op is FORWARD and ins.step == 0:
                    layers[ins.microbatch] = layers.get(ins.microbatch, ()) + ins.layers
            found: tuple[int, ...] = max(layers.values(), key=len, default=())
            return tuple(sorted(found))

        return self.of_each(fullest)

    @cached_property
    def kept(self) -> tuple[int, ...]:
        """For each rank, how many layers of its `share` keep something of a micro-batch for their backward."""
        return tuple(sum(layer >= self.first_trainable for layer in layers) for layers in self.share)

    @cached_property
    def groups_of_layer(self) -> tuple[tuple[int, ...], ...]:
        """For each layer the indices of the parameter groups it uses."""
        found: list[list[int]] = [[] for _ in range(self.layers)]
        for index, group in enumerate(self.groups):
            for layer in group.layers:
                found[layer].append(index)
        return tuple(map(tuple, found))

    def with_rank(self, rank: int, instructions: Iterable[Instruction]) -> Program:
        """A copy in which one rank runs other instructions (for tests, lessons and the hand editor)."""
        ranks = list(self.ranks)
        ranks[rank] = tuple(instructions)
        return replace(self, ranks=tuple(ranks))

    def text(self, rank: int | None = None, limit: int = 40) -> str:
        """The program as text with one instruction a line, and at most `limit` instructions of each rank."""
        lines = [f"program {self.name or 'by hand'}: {self._size}"]
        for r in range(len(self.ranks)) if rank is None else [rank]:
            instructions = self.ranks[r]
            layers = f"layers {span(self.placement[r])}, " if self.placement[r] else ""
            lines.append(f"rank {r}: {layers}{several(len(instructions), 'instruction')}")
            lines += [f"  {k:4d}  {ins}" for k, ins in enumerate(instructions[:limit])]
            lines += [f"  ... {len(instructions) - limit} more"] if len(instructions) > limit else []
        return "\n".join(lines)

    @property
    def _size(self) -> str:
        return f"{several(len(self.ranks), 'rank')}, {several(len(self), 'instruction')}"

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"<Program {self.name!r}: {self._size}>"

    def to_json(self) -> dict[str, Any]:
        """Plain lists and numbers, for `json.dump`. `from_json` gives an equal program."""
        from minipar.program import text  # (text imports this module)

        return text.to_json(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Program:
        """The program that `to_json` gave."""
        from minipar.program import text

        return text.from_json(data)
