"""train(program=...): a program changed by hand runs instead of the compiled one, and mistakes are reported."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch

from minipar import Plan, PlanError, ProgramError, train
from minipar.models.parameter_groups import shape_of
from minipar.program import Op, Program
from tests.toys import rows, toy

MODEL = partial(toy, ("linear", "linear", "linear"), tied=False)


def run(clusters, ranks=2, steps=2, **given):
    done = train(
        MODEL, rows(9), cluster=clusters(ranks), steps=steps, loss=torch.nn.functional.mse_loss,
        dtype=torch.float64, check=True, progress=False, **given,
    )  # fmt: skip
    assert done.max_error() <= 1e-12
    return done


def late_sums(program: Program) -> Program:
    """The same, with all sums of gradients moved to the end of the backwards."""
    for rank, row in enumerate(program.ranks):
        sums = [ins for ins in row if ins.op is Op.ALL_REDUCE]
        steps = [ins for ins in row if ins.op is Op.STEP]
        program = program.with_rank(rank, [*(i for i in row if i not in sums and i not in steps), *sums, *steps])
    return program


def test_a_program_of_ones_own_runs(clusters):
    plan = Plan(dp=2, microbatches=2, bucket="none")
    mine = late_sums(plan.compile(shape_of(list(MODEL().double()))))
    assert mine != plan.compile(shape_of(list(MODEL().double())))
    done = run(clusters, plan=plan, program=mine, steps=4)
    assert done.program == mine == done.predicted.program
    assert run(clusters, program=mine).plan == plan  # (its name says what it was made from)


def test_a_function_of_the_shape(clusters):
    plan = Plan(dp=2, bucket="none")
    done = run(clusters, plan=plan, program=lambda shape: plan.compile(shape, steps=2), steps=4)
    assert done.program.steps == 2
    assert len(done.losses) == 4


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"program": 3}, "program=3: must be a Program, or a function"),
        ({"plan": "dp=2", "program": lambda shape: None}, "the function gave None"),
        ({"plan": "dp=2", "program": Plan(dp=2).compile(layers=5)}, "was made for another model of 5 layers"),
        ({"plan": "dp=2", "program": lambda shape: Plan(pp=2).compile(shape)}, "has dp 1, but plan 'dp=2 pp=1' has 2"),
        ({"plan": "dp=2", "program": lambda s: Plan(dp=2, clip=1.0).compile(s)}, "has clip 1.0, but plan"),
        ({"plan": "dp=2", "program": lambda s: Plan(dp=2).compile(s, steps=3)}, "program 'dp=2 pp=1' has 3 steps"),
        ({"plan": "dp=2 sync=ps servers=1", "ranks": 3, "program": lambda s: None}, "the function gave None"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(clusters, given, words):
    with pytest.raises(PlanError, match=re.escape(words)):
        run(clusters, **given)


def test_a_program_that_cannot_run_is_refused(clusters):
    def broken(shape):
        program = Plan(dp=2).compile(shape)
        return program.with_rank(0, [ins for ins in program.ranks[0] if ins.op is not Op.ALL_REDUCE])

    with pytest.raises(ProgramError):
        run(clusters, plan="dp=2", program=broken)


def test_a_program_without_a_plan_needs_a_name_that_is_one(clusters):
    from dataclasses import replace

    with pytest.raises(PlanError, match="its name is no plan"):
        run(clusters, program=replace(Plan(dp=2).compile(layers=5), name="mine"))
