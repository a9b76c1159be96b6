"""The prediction of a training: its programs, with what was measured of the model's layers and of the cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from minipar.costs.device import THIS_MACHINE, DeviceSpec
from minipar.costs.measured import Profile
from minipar.costs.rates import Calibration, Copies
from minipar.prediction.memory import with_memory
from minipar.prediction.program_costs import ProgramCosts
from minipar.prediction.recorded import Tapes
from minipar.prediction.simulator import simulate
from minipar.program import Program, Staleness
from minipar.program.shape import Shape
from minipar.trace import Trace
from minipar.wording import several


class Facts(NamedTuple):
    """What is known of a job before it runs: shape, profile, bytes of a batch's x and y, the layers whose results
    depend on how the batch is split; if asked for, what each layer allocates in order, and how fast tensors are copied
    away; the class of the scheduler; how a model with a forward of its own was cut; the layers that ranks
    which share layers compute whole, and why; how it was cut, for other ranks."""

    shape: Shape
    profile: Profile
    data_bytes: tuple[int, int]
    split_sensitive: list[str]
    tapes: Tapes | None = None
    copies: Copies = Copies()
    scheduler: str = ""
    # of the model's output, if the loss gives (sum, count): see `losses.Counting`; of a model's own loss, its count
    counted_form: Any = None
    loss_note: str = ""  # what to warn of
    cut: str = ""
    whole: Mapping[str, str] = {}
    cut_bytes: bytes | None = None


@dataclass(frozen=True)
class Forecast:
    """What programs of a job are predicted from.

    facts    of the job's layers
    batch    rows of a step
    device   that every rank emulates; emulated devices share no cores
    cores    shared by all ranks; None: every rank computes on its own
    rates    of a program: what messages and collectives cost on the cluster, and how much ranks that share the cores
             compute together (less than the cores could, since they disturb each other)
    """

    facts: Facts
    batch: int
    device: DeviceSpec | None = None
    cores: int | None = None
    rates: Callable[[Program], Calibration | None] = lambda program: None

    def costs(self, program: Program) -> ProgramCosts:
        """What a program costs; on emulated devices, what it costs there."""
        known, device = self.facts, self.device or THIS_MACHINE
        return ProgramCosts(program, known.profile, self.batch, device, self.rates(program), known.copies)

    def of(self, program: Program) -> Trace:
        """The predicted trace of a program, with every allocation if those of its layers were recorded."""
        calibration, costs = self.rates(program), self.costs(program)
        cores = self.cores
        sharing: float | None = cores
        if calibration is not None and calibration.ranks == len(program.ranks):
            sharing = calibration.concurrency
        note = "predicted from a profile of one layer at a time on one device"
        if costs.device.emulates:
            note = f"predicted for the emulated device {self.device}"
            if costs.device.computes:
                cores = sharing = None
        if cores is not None and cores < len(program.ranks):
            note += f"; {several(len(program.ranks), 'rank')} share {several(cores, 'core')}"
        if calibration is not None:
            note += "; messages and collectives as calibrated on the cluster"
        trace = replace(simulate(program, costs, cores=sharing), note=note, data=self.data(program))
        return trace if self.facts.tapes is None else with_memory(trace, self.facts.tapes, self.here(program))

    def here(self, program: Program) -> ProgramCosts:
        """What a program's instructions cost where the layers were measured; its sizes and rows."""
        return ProgramCosts(program, self.facts.profile, self.batch)

    def data(self, program: Program) -> list[int]:
        """Bytes of x and y of each rank: those with the first and the last layer have their rows of them."""
        (x, y), of_rows = self.facts.data_bytes, self.here(program)
        lasting = isinstance(program.contract, Staleness) and program.serving is None
        steps = program.steps if lasting else 1  # all are held until the run ends
        return [
            round(steps * of_rows.rows_of(rank) / self.batch * ((0 in held) * x + (program.layers - 1 in held) * y))
            if held else 0  # (servers hold no rows)
            for rank, held in enumerate(program.placement)
        ]  # fmt: skip
