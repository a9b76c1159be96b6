"""A plan for a model and a number of devices, with a target for time and for memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minipar.costs.device import DeviceSpec
from minipar.errors import MiniparError
from minipar.prediction import on_paper
from minipar.prediction.rank_memory import RankMemory
from minipar.program import Op
from minipar.strategies.plan import Plan
from minipar_course.exercises.kinds.verdict import Verdict, raised

MIB = 2**20


@dataclass(frozen=True)
class Choice:
    """A function that returns a plan, as text or as a `Plan`; or the plan itself.

    model, batch   a name of `models.table`, and the rows of a step: the whole batch counts, however it is cut
    device         as for `Cluster(device=)`
    ranks          the number of devices; a plan may use fewer
    time           seconds of a step, at most; None: no limit
    memory         bytes on every rank, at most; None: all that the device has
    precision      in which the plan must train
    by             the function that predicts, of plan, model, device and batch; `on_paper.predict` needs flops=

    Only plans that train as one device does may pass: stale or compressed gradients are not allowed.
    """

    model: str
    batch: int
    device: str | DeviceSpec
    ranks: int
    time: float | None = None
    memory: int | None = None
    precision: str = "float32"
    by: Callable[[Plan | str, str, DeviceSpec | str, int], on_paper.Estimate] = on_paper.predict

    def predict(self, plan: Plan | str) -> on_paper.Estimate:
        return self.by(plan, self.model, self.device, self.batch)

    def judge(self, answer: Any) -> Verdict:
        if callable(answer):
            try:
                answer = answer()
            except Exception as error:
                return raised(error, "your function")
        if not isinstance(answer, (str, Plan)):
            return Verdict(False, f"{answer!r} is no plan", 'return its words, such as "dp=2 microbatches=4"')
        try:
            plan = Plan.parse(answer)
            if plan.ranks > self.ranks:
                return Verdict(False, f"`{plan}` needs {plan.ranks} devices", f"there are {self.ranks}")
            if plan.precision != self.precision:
                return Verdict(
                    False, f"`{plan}` trains in {plan.precision}", f"the task says precision={self.precision}"
                )
            if word := _inexact(plan):
                return Verdict(
                    False, f"{word} trains otherwise than one device does", "gradients must stay as they are"
                )
            found = self.predict(plan)
        except MiniparError as error:
            return Verdict(False, f"`{answer}` cannot be", error.reason)
        return self._judge(found)

    def _judge(self, found: on_paper.Estimate) -> Verdict:
        most = self.memory if self.memory is not None else DeviceSpec.parse(self.device).memory
        rank = max(range(len(found.ranks)), key=found.memory.__getitem__)
        held, seconds, name = found.memory[rank], found.time, f"`{found.plan}`"
        if most is not None and held > most:
            reason = f"{name} needs {_size(held)} on rank {rank}; the target is {_size(most)}"
            return Verdict(False, reason, _smaller(found.plan, found.ranks[rank], held - most))
        if self.time is not None and seconds > self.time:
            reason = f"{name} fits, {_size(held)}, but takes {seconds:.3g} s; the target is {self.time:g} s"
            return Verdict(False, reason, _faster(found))
        met = [f"{seconds:.3g} s" + (f" of at most {self.time:g} s" if self.time is not None else "")]
        met.append(f"{_size(held)}" + (f" of at most {_size(most)}" if most is not None else ""))
        return Verdict(True, f"{name}: {', '.join(met)}")


def _inexact(plan: Plan) -> str:
    """The key and value of a plan that change its results; "" if there are none."""
    for key, exact in (("compress", "none"), ("local_steps", 0), ("mode", "sync")):
        if getattr(plan, key) != exact:
            return f"{key}={getattr(plan, key)}"
    return f"schedule={plan.schedule}" if plan.asynchronous else ""


def _size(count: int) -> str:
    return f"{count / MIB:.1f} MiB" if count < 10 * 2**30 else f"{count / 2**30:.1f} GiB"


def _smaller(plan: Plan, rank: RankMemory, excess: int) -> str:
    """What holds most memory, and which keys of a plan make it smaller."""
    words = {
        "optimizer": "shared out by zero=1, kept elsewhere by offload=optimizer, cut by pp",
        "activations": "fewer with smaller micro-batches, recomputed by checkpoint=1; a pipeline holds several at once",
        "parameters": "cut by pp, shared out by zero=3",
        "gradients": "cut by pp, shared out by zero=2",
        "buffers": "a smaller bucket= makes them smaller",
    }
    sizes = sorted(words, key=lambda kind: -getattr(rank, kind))
    parts = ", ".join(f"{kind} {_size(getattr(rank, kind))}" for kind in sizes if getattr(rank, kind))
    return f"{_size(excess)} too much of: {parts}. {sizes[0]}: {words[sizes[0]]}"


def _faster(found: on_paper.Estimate) -> str:
    """What the time of a step is lost to: uneven ranks, waiting, or work that is done twice."""
    trace, steps = found.trace, found.trace.program.steps
    busy = [seconds / steps for seconds in trace.busy]
    again = sum(
        end - start
        for row, starts, ends in zip(trace.program.ranks, trace.starts, trace.ends, strict=True)
        for ins, start, end in zip(row, starts, ends, strict=True)
        if ins.op is Op.RECOMPUTE
    ) / (len(busy) * steps)
    average, most = sum(busy) / len(busy), max(busy)
    stages = "for other stages (more micro-batches), or for messages (fewer bytes, or less often)"
    replicas = "for messages (fewer bytes, or less often): when can the first one be sent, and when the last?"
    lost = {
        f"the busiest rank works {most:.3g} s, the average {average:.3g} s: cut the layers more evenly (split=)":
            most - average,
        f"recomputing takes {again:.3g} s of each rank: is so much of it needed?": again,
        f"the busiest rank waits for {found.time - most:.3g} s: {stages if found.plan.pp > 1 else replicas}":
            found.time - most,
    }  # fmt: skip
    return max(lost, key=lambda words: lost[words])
