"""The prediction of a training: its programs, with what was measured of the model's layers and of the cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from minipar.costs.device import DeviceSpec
from minipar.costs.rates import Calibration
from minipar.execution.execution import Facts
from minipar.prediction.emulated import EmulatedCosts
from minipar.prediction.memory import with_memory
from minipar.prediction.profiled import ProfiledCosts
from minipar.prediction.simulator import simulate
from minipar.program import Program, Staleness
from minipar.trace import Trace
from minipar.wording import several


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

    def costs(self, program: Program) -> ProfiledCosts | EmulatedCosts:
        """What a program costs; on emulated devices, what it costs there."""
        known = self.facts
        costs = ProfiledCosts(program, known.profile, self.batch, calibration=self.rates(program), copies=known.copies)
        emulates = self.device is not None and self.device.emulates
        return EmulatedCosts(program, self.device, costs) if self.device is not None and emulates else costs

    def of(self, program: Program) -> Trace:
        """The predicted trace of a program, with every allocation if those of its layers were recorded."""
        calibration, costs = self.rates(program), self.costs(program)
        cores = self.cores
        sharing: float | None = cores
        if calibration is not None and calibration.ranks == len(program.ranks):
            sharing = calibration.concurrency
        note = "predicted from a profile of one layer at a time on one device"
        if isinstance(costs, EmulatedCosts):
            note = f"predicted for the emulated device {self.device}"
            if costs.computes:
                cores = sharing = None
        if cores is not None and cores < len(program.ranks):
            note += f"; {several(len(program.ranks), 'rank')} share {several(cores, 'core')}"
        if calibration is not None:
            note += "; messages and collectives as calibrated on the cluster"
        of_rows = ProfiledCosts(program, self.facts.profile, self.batch)
        trace = replace(simulate(program, costs, cores=sharing), note=note, data=self._data(program, of_rows))
        return trace if self.facts.tapes is None else with_memory(trace, self.facts.tapes, of_rows)

    def _data(self, program: Program, of_rows: ProfiledCosts) -> list[int]:
        """Bytes of x and y of each rank: those with the first and the last layer have their rows of them."""
        x, y = self.facts.data_bytes
        lasting = isinstance(program.contract, Staleness) and program.serving is None
        steps = program.steps if lasting else 1  # all are held until the run ends
        return [  # (servers hold no rows)
            round(steps * of_rows.rows_of(rank) / self.batch * ((0 in held) * x + (program.layers - 1 in held) * y))
            if held else 0
            for rank, held in enumerate(program.placement)
        ]  # fmt: skip
