"""train(program=...): the user's own program runs, and the plan only says what it was made from."""

from __future__ import annotations

from collections.abc import Callable

from minipar.errors import PlanError
from minipar.program import Op, Program, Staleness
from minipar.program.shape import Shape
from minipar.program.verify.verifier import verify
from minipar.strategies.plan import Plan
from minipar.wording import several

Own = Program | Callable[[Shape], Program]


def plan_of(plan: Plan | str | None, program: Own) -> Plan:
    """The plan of a training: the given one; or the one that the program was compiled from, by its name; or one device.

    Errors: PlanError for a program whose name is no plan, or that is no program.
    """
    if not isinstance(program, Program) and not callable(program):
        raise PlanError(f"program={program!r}: must be a Program, or a function that makes one of a model's shape")
    if plan is not None:
        return Plan.parse(plan)
    if isinstance(program, Program):
        try:
            return Plan.parse(program.name)
        except PlanError:
            raise PlanError(
                f"program {program.name!r}: its name is no plan; give the plan whose keys it follows, too"
            ) from None
    return Plan()


def splits(program: Own) -> bool:
    """Whether backwards may run in halves."""
    if isinstance(program, Program):
        return any(Op.BACKWARD_WEIGHT in ops for ops in program.ops)
    return True


def check(program: Own, plan: Plan, shape: Shape, steps: int) -> Program:
    """The program, verified, if it can train a model of this shape as the plan says.

    Errors: PlanError that names what does not fit; ProgramError for a program that cannot run.
    """
    own = program if isinstance(program, Program) else program(shape)
    if not isinstance(own, Program):
        raise PlanError(f"program: the function gave {own!r}; it must make a Program, such as plan.compile(shape)")
    if plan.sync == "ps" or own.serving is not None:
        raise PlanError(
            "program: not together with sync=ps, whose servers decide as they run; possible is a plan alone"
        )
    if (own.layers, own.groups, own.edges) != (shape.layers, shape.groups, shape.edges):
        raise PlanError(
            f"program {own.name!r}: was made for another model of {several(own.layers, 'layer')}, with other "
            f"parameters than this one of {several(shape.layers, 'layer')}; possible is a function of the model's "
            "shape, such as program=lambda shape: mine(plan.compile(shape))"
        )
    found = {
        "ranks": (len(own.ranks), plan.ranks),
        "dp": (own.replicas, plan.dp),
        "micro-batches of a replica": (own.microbatches, plan.total_microbatches * plan.slice_count),
        "slices": (own.slice_count, plan.slice_count),
        "clip": (own.clip, plan.clip),
        "precision": (own.precision, plan.precision),
        "compress": (own.compress, plan.compress),
        "checkpoint=selective": (own.selective, plan.checkpoint == "selective"),
        "updates without a flush": (isinstance(own.contract, Staleness), plan.asynchronous),
        "local steps": (own.local_steps, plan.local_steps if plan.dp > 1 else 0),
    }
    for what, (of_program, of_plan) in found.items():
        if of_program != of_plan:
            raise PlanError(
                f"program {own.name!r}: has {what} {of_program}, but plan {str(plan)!r} has {of_plan}; "
                "give the plan that it was made from"
            )
    if steps % own.steps or (plan.asynchronous and steps != own.steps):
        possible = f"steps={own.steps}" if plan.asynchronous else f"multiples of {own.steps}"
        raise PlanError(
            f"steps={steps}: program {own.name!r} has {several(own.steps, 'step')}; possible are {possible}"
        )
    verify(own)
    return own
