"""Costs given by hand: one number per kind of work, as in the figures of the papers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from minipar.errors import PlanError
from minipar.program import COPIES, Instruction, Op, Program, Value
from minipar.program.mesh import Mesh
from minipar.wording import several

KEPT = frozenset(("saved", "saved_weight"))  # the kinds of values that count as activations


@dataclass(frozen=True)
class UnitCosts:
    """Times of one micro-batch on one rank's whole share of the layers, in any unit of time.

    forward, backward          times for the whole share; some of its layers cost their part of the time
    input_gradient,
    weight_gradient            times of the halves of a split backward; default: half of `backward` each
    latency                    delay of every message
    stage_factors              factors of the compute times, one per rank of the pipeline or per rank of the program

    A slice of a sequence is a micro-batch; its time is proportional to its length.
    """

    program: Program
    forward: float = 1.0
    backward: float = 2.0
    input_gradient: float | None = None
    weight_gradient: float | None = None
    latency: float = 0.0
    stage_factors: Sequence[float] = ()
    _unit: dict[Op, float] = field(default_factory=dict, init=False, repr=False, compare=False)
    _scale: list[float] = field(default_factory=list, init=False, repr=False, compare=False)
    _kept: list[float] = field(default_factory=list, init=False, repr=False, compare=False)
    _lengths: list[int] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        named = {"forward": self.forward, "backward": self.backward, "latency": self.latency}
        named |= {"input_gradient": self.input_gradient or 0.0, "weight_gradient": self.weight_gradient or 0.0}
        named |= {f"stage_factors[{k}]": x for k, x in enumerate(self.stage_factors)}
        for name, number in named.items():
            if not 0 <= number < float("inf"):
                raise PlanError(f"{name}={number}: a time must be a finite number of at least 0")
        ranks, stages = len(self.program.ranks), Mesh(self.program.mesh).length("pp")
        factors = list(self.stage_factors) or [1.0] * stages
        if len(factors) == stages:
            factors = [factors[rank // self.program.sharing % stages] for rank in range(ranks)]
        if len(factors) != ranks:
            raise PlanError(
                f"stage_factors: {len(self.stage_factors)} numbers, but there are {several(stages, 'stage')}"
            )
        held = [max(1, len(layers)) for layers in self.program.share]
        self._scale.extend(factor / n for factor, n in zip(factors, held, strict=True))
        self._kept.extend(1 / max(1, n) for n in self.program.kept)
        self._lengths.extend(() if isinstance(self.program.slices, int) else self.program.slices)
        halves = (self.input_gradient, self.weight_gradient)
        if halves == (None, None):
            halves = (self.backward / 2, self.backward / 2)
        i, w = (self.backward - (halves[1] or 0) if halves[0] is None else halves[0],
                self.backward - (halves[0] or 0) if halves[1] is None else halves[1])  # fmt: skip
        self._unit.update(
            {Op.FORWARD: self.forward, Op.BACKWARD: self.backward, Op.RECOMPUTE: self.forward, Op.STEP: 0.0}
        )
        self._unit[Op.APPLY] = 0.0
        self._unit.update({Op.BACKWARD_INPUT: max(0.0, i), Op.BACKWARD_WEIGHT: max(0.0, w)})

    def compute(self, rank: int, ins: Instruction) -> float:
        """Duration of a compute instruction."""
        duration = self._unit[ins.op] * len(ins.layers) * self._scale[rank]
        lengths = self._lengths  # (of slices; empty if they are equal)
        if not lengths or ins.microbatch < 0:
            return duration
        return duration * lengths[ins.microbatch % len(lengths)] * len(lengths) / sum(lengths)

    def transfer(self, rank: int, ins: Instruction) -> tuple[float, float]:
        """(time that a message occupies its link, latency before it arrives). Copies take no time."""
        return 0.0, 0.0 if ins.op in COPIES else self.latency

    def collective(self, ins: Instruction) -> float:
        """Duration of a collective after its last rank has arrived."""
        return 0.0

    def even(self, rank: int, other: int) -> bool:
        """Whether two ranks that do the same are equally fast."""
        return self._scale[rank] == self._scale[other]

    def size(self, rank: int, value: Value) -> float:
        """Memory of a value; here in units of a rank's activations of one micro-batch."""
        return self._kept[rank] if value.kind in KEPT else 0.0
