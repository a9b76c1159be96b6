"""A plan as the formulas read it, and which layers of a model each rank of its pipeline holds.

pp=4, 2 chunks, 12 blocks      stages   e bb | bb | bb | bb | b | b | b | b h        e embedding, h head
                               rank 0   e bb, b        rank 3   bb, b h
                               ranks 1 and 2   bb, b: they are alike, and formulas look at one of them
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from minipar.costs.analytic import Division
from minipar.costs.stacks import STACKS
from minipar.errors import PlanError
from minipar.models.sizes import Chain, Sizes, ends_are_layers
from minipar.strategies.layout import check_stages, even_split, place
from minipar.strategies.schedules.registry import find

FLOAT = 4  # bytes of a float32 number


class Precision(NamedTuple):
    """Bytes for each parameter, and for each number of an activation."""

    parameter: int
    gradient: int
    optimizer: int
    activation: int

    def kept(self, zero: int) -> Precision:
        """Bytes of what ZeRO shares out of 16-bit states: sums of gradients are float32 from stage 2 on, and in stage 3
        the shard of a parameter is the optimizer's own float32 one."""
        if self.parameter == FLOAT or zero < 2:
            return self
        master = FLOAT if zero == 3 else self.parameter
        return Precision(master, FLOAT, self.optimizer - (FLOAT if zero == 3 else 0), self.activation)


PRECISIONS = {
    "float32": Precision(4, 4, 8, 4),  # Adam's two moments
    "bf16": Precision(2, 2, 12, 2),  # master parameters and Adam's moments in float32; ZeRO's K = 12
    **dict.fromkeys(("fp8", "mxfp8", "nvfp4"), Precision(2, 2, 12, 2)),  # (products alone have shorter numbers)
}


class PlanNumbers(NamedTuple):
    """A plan as the formulas read it.

    dp, pp, tp, cp, ep   sizes of the axes of the mesh: all of them together are the ranks
    schedule, chunks     the name of a schedule, and stages of each rank (of terapipe: slices)
    microbatches, rows   micro-batches of each replica and step, and rows of each of them; the ranks of ep share its
                         rows, those of cp its tokens
    zero                 ZeRO's stage
    checkpoint           blocks of a segment that runs forward again before its backward; 0: none; "selective": only
                         the cores of attention; "sqrt", a budget or first layers of segments as in the plan's key
    sequence_parallel    whether ranks of tp divide norms and dropout, too
    overlap              whether gradients are summed beside the backward
    every                whether sharded gradients are summed after each micro-batch, not once a step
    offload              what waits on the host: some of "optimizer", "parameters", "activations"
    precision            a key of PRECISIONS
    split                layers of each stage, embedding and head included; (): as even as can be
    stack                the software, a key of costs/stacks.py's STACKS; "": the one that fits the plan
    gradient             bytes of a whole gradient where parameters have 2; 0: those of the stack
    rounds               after so many parts of the micro-batches the pipeline is empty (the plan's `accumulate`)
    bucket               the plan's key; None: its default
    options              further keys of the schedule, with their values
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    microbatches: int = 1
    rows: float = 1.0
    zero: int = 0
    checkpoint: int | str | tuple[int, ...] = 0
    sequence_parallel: bool = False
    overlap: bool = True
    every: bool = True
    offload: tuple[str, ...] = ()
    precision: str = "bf16"
    split: tuple[int, ...] = ()
    stack: str = ""
    gradient: int = 0
    rounds: int = 1
    bucket: float | str | tuple[int, ...] | None = None
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def ranks(self) -> int:
        """How many devices the plan uses."""
        return self.dp * self.pp * self.tp * self.cp * self.ep

    @property
    def batch(self) -> float:
        """Rows of a step."""
        return self.dp * self.microbatches * self.rows

    @property
    def bytes(self) -> Precision:
        """Bytes of each kind of number."""
        found = PRECISIONS[self.precision]
        if found.parameter == FLOAT:
            return found
        return found._replace(gradient=self.gradient or STACKS[self.software].gradient)

    @property
    def software(self) -> str:
        """The stack that such a plan is usually run with, if it names none: FSDP for ZeRO 3, which is compiled where
        ranks share layers, too; Megatron for all others."""
        if self.stack or self.zero < 3:
            return self.stack or "megatron-core"
        return "torch-fsdp" if self.pp * self.tp * self.cp * self.ep == 1 else "torch-fsdp-compile"

    @property
    def pipeline(self) -> PlanNumbers:
        """The same plan without what does not change the work of a pipeline, or what it keeps of a micro-batch; with a
        bucket that names layers, since ranks differ by it."""
        bucket = self.bucket if isinstance(self.bucket, tuple) else None
        return self._replace(stack=self.software, dp=1, zero=0, overlap=True, every=True, offload=(), bucket=bucket)

    @property
    def division(self) -> Division:
        """How ranks share the layers."""
        return Division(self.tp, self.sequence_parallel, self.ep, self.cp, self.cp == 1 or STACKS[self.software].even)

    @property
    def stages_of_a_rank(self) -> int:
        """Chunks of layers of each rank. Slices are of tokens: all of them go through the same layers."""
        return find(self.schedule).chunks if "slices" in find(self.schedule).options else self.chunks


class Chunk(NamedTuple):
    """One stage on one rank: layers `start` to `stop` of the model. Where all blocks are equal, those of a rank are
    counted from the second one on, so that alike ranks have equal chunks. (The first block's input may be smaller.)

    before, after   whether its input comes from another rank, and its output goes to another one
    """

    start: int
    stop: int
    before: bool
    after: bool


class Kind(NamedTuple):
    """Neighbouring ranks of a pipeline that hold the same layers: `alike` ranks from rank `first` on."""

    chunks: tuple[Chunk, ...]
    first: int
    alike: int


def own_layers(model: Sizes) -> int:
    """How many layers minipar's own model has: embedding and head are layers, too."""
    return model.layers if isinstance(model, Chain) else model.layers + 2


def split_of(numbers: PlanNumbers, model: Sizes) -> tuple[int, ...]:
    """Layers of each stage, embedding and head included. Errors: PlanError for more stages than layers."""
    n = numbers
    if n.split:
        return n.split
    if ends_are_layers(model):
        return even_split(own_layers(model), check_stages(placement_of(n), own_layers(model)))
    stages, layers = 1 + max(map(max, placement_of(n))), model.layers
    if stages > layers:
        words = f"pp={n.pp} chunks={n.stages_of_a_rank}: {stages} stages, more than layers ({layers})"
        raise PlanError(f"{words}; possible are pp=1 to {max(1, layers * n.pp // stages)}")
    counts = even_split(layers, stages)
    return counts[0] + 1 + (stages == 1), *counts[1:-1], *([counts[-1] + 1] * (stages > 1))


def kinds_of(numbers: PlanNumbers, model: Sizes) -> tuple[Kind, ...]:
    """The different ranks of the pipeline, in order."""
    n = numbers
    named = isinstance(n.checkpoint, tuple) or isinstance(n.bucket, tuple)  # (layers by their numbers)
    equal = 0 if named or isinstance(model, Chain) else own_layers(model)
    return _kinds(n.schedule, n.pp, n.stages_of_a_rank, split_of(n, model), equal)


@lru_cache(4096)
def _placement(schedule: str, pp: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    return place(find(schedule).placement, pp, chunks, schedule)


def placement_of(numbers: PlanNumbers) -> tuple[tuple[int, ...], ...]:
    """The stages of each rank of the pipeline, by chunk."""
    return _placement(numbers.schedule, numbers.pp, numbers.stages_of_a_rank)


def copies_of(numbers: PlanNumbers) -> int:
    """On how many ranks of the pipeline each stage is."""
    placement = placement_of(numbers)
    return sum(0 in mine for mine in placement) if numbers.pp > 1 else 1


@lru_cache(4096)
def _kinds(schedule: str, pp: int, held: int, split: tuple[int, ...], equal: int) -> tuple[Kind, ...]:
    """equal   number of layers of a model with equal blocks between two ends; 0: all layers differ"""
    placement = _placement(schedule, pp, held)
    copies = sum(0 in mine for mine in placement)
    starts = [sum(split[:stage]) for stage in range(len(split))]
    found: list[Kind] = []
    for rank, mine in enumerate(placement):
        chunks = []
        # The first block that no chunk of this rank has yet.
        free = max([2, *(starts[stage] + split[stage] for stage in mine if starts[stage] < 2)])
        for stage in mine:
            start, stop = starts[stage], starts[stage] + split[stage]
            if equal and start > 1 and stop < equal:
                start, stop = free, free + split[stage]
                free = stop
            # (If a stage has copies, both pipelines go to another rank after it.)
            other = [0 <= near < len(split) and (copies > 1 or near not in mine) for near in (stage - 1, stage + 1)]
            chunks.append(Chunk(start, stop, *other))
        if found and found[-1].chunks == tuple(chunks):
            found[-1] = found[-1]._replace(alike=found[-1].alike + 1)
        else:
            found.append(Kind(tuple(chunks), rank, 1))
    return tuple(found)
