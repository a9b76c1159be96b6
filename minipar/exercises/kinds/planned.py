"""A plan, as words, for a model on emulated devices: under a target of time and of memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from minipar import models
from minipar.costs.device import DeviceSpec
from minipar.costs.emulated import EmulatedCosts
from minipar.errors import MiniparError
from minipar.exercises.kinds.verdict import Verdict, raised
from minipar.memory_formula import RankMemory, per_rank
from minipar.plan import Plan
from minipar.program import Program
from minipar.simulator import simulate

MiB = 1 << 20
STEPS = 8  # in a program of which one step's messages travel during the next


@dataclass(frozen=True)
class Planned:
    """A function that gives a plan's words, `def mine(): return "dp=4 ..."`, or the words themselves.

    model, batch        a preset, and the rows of a step over all ranks
    ranks               devices that there are
    row                 seconds of the forward of one row through the whole model; a backward takes twice as long
    launch              seconds that every forward of a micro-batch takes besides, and a backward twice
    bandwidth, latency  of the link
    time, memory        at most so many seconds a step, and bytes on every rank

    The time is what `simulate` predicts, the memory what `minipar memory` says. Only plans that train exactly as one
    device does may pass.
    """

    model: str
    batch: int
    ranks: int
    row: float
    launch: float
    bandwidth: float
    latency: float
    time: float
    memory: int

    def judge(self, answer: Any) -> Verdict:
        try:
            words = answer() if callable(answer) else answer
        except Exception as error:
            return raised(error, "your function")
        if not isinstance(words, (str, Plan)):
            return Verdict(False, f"{words!r} is no plan", 'a plan is a text such as "dp=4 microbatches=2"')
        try:
            plan = Plan.parse(words)
            if plan.ranks != self.ranks:
                return Verdict(False, f"`{plan}` needs {plan.ranks} ranks; there are {self.ranks}", "dp is that many")
            if plan.pp > 1:
                return Verdict(False, f"`{plan}` cuts the model", "here every rank has all of it: dp alone (pp=1)")
            if inexact := _inexact(plan):
                return Verdict(
                    False, f"{inexact} trains otherwise than one device does", "gradients must stay as they are"
                )
            seconds = self.seconds(plan)
            held = per_rank(plan, self.model, self.batch)
        except MiniparError as error:
            return Verdict(
                False, f"`{words}`: {error.reason}", "the words of a plan are explained by help(minipar.Plan)"
            )
        fullest = max(held, key=lambda one: one.total)
        found = f"`{plan}` takes {seconds * 1e3:.0f} ms and {fullest.total / MiB:.0f} MiB"
        wanted = f"the targets are {self.time * 1e3:.0f} ms and {self.memory / MiB:.0f} MiB"
        if seconds > self.time * (1 + 1e-9):
            return Verdict(False, f"{found}; {wanted}", self._slow(plan, seconds))
        if fullest.total > self.memory:
            return Verdict(False, f"{found}; {wanted}", _full(fullest))
        return Verdict(True, f"{found}; {wanted}")

    def costs(self, plan: Plan) -> Callable[[Program], EmulatedCosts]:
        """What instructions of a plan take, for `compile` and `simulate`."""
        rows = self.batch / plan.dp / plan.total_microbatches
        forward = self.launch + rows * self.row
        spec = DeviceSpec(
            costs={"forward": forward, "backward": 2 * forward}, bandwidth=self.bandwidth, latency=self.latency
        )
        return lambda program: EmulatedCosts(program, spec)

    def seconds(self, plan: Plan) -> float:
        """Predicted seconds of a step."""
        costs_of = self.costs(plan)
        program = plan.compile(models.shape(self.model), steps=plan.block(STEPS), costs_of=costs_of)
        return simulate(program, costs_of(program)).time / program.steps

    def _slow(self, plan: Plan, seconds: float) -> str:
        rows = self.batch / plan.dp / plan.total_microbatches
        again = 1 if plan.checkpoint != "none" else 0
        computing = plan.total_microbatches * (3 + again) * (self.launch + rows * self.row)
        waiting = f"a rank computes for about {computing * 1e3:.0f} ms of it; what does it wait for in the rest? "
        more = (
            "Each micro-batch costs its launch again, and only the last one's backward hides messages."
            if (plan.total_microbatches > 1)
            else "When can the first gradient be sent, and when the last?"
        )
        return waiting + more


def _inexact(plan: Plan) -> str:
    """The word of a plan that changes what is trained; empty if there is none."""
    for key, exact in (("compress", "none"), ("local_steps", 0), ("sync", "allreduce"), ("precision", "float32")):
        if getattr(plan, key) != exact:
            return f"{key}={getattr(plan, key)}"
    return f"schedule={plan.schedule}" if plan.asynchronous else ""


def _full(held: RankMemory) -> str:
    """Who holds the memory of the fullest rank."""
    parts = {f.name: getattr(held, f.name) for f in fields(held) if f.name not in ("held", "host")}
    name, most = max(parts.items(), key=lambda part: part[1])
    advice = {
        "activations": "fewer rows at a time (microbatches=), or keep less of them (checkpoint=)",
        "optimizer": "the replicas could share it out (zero=1)",
    }.get(name, "print(minipar.memory_formula.per_rank(plan, model, batch)) shows all of it")
    return f"most of it, {most / MiB:.0f} MiB, is {name}: {advice}"
