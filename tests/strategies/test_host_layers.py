"""The pass that puts layers on the host: only outputs and their gradients cross, and all of it verifies."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minipar import Plan, PlanError, simulate, verify
from minipar.program import COPIES, Group, Op, home, host, optimizer_state, param, tier
from minipar.program.shape import Shape
from tests.interpreters import RandomCosts, brute_force, compiled, shape, shapes


def text(row):
    return " | ".join(str(ins) for ins in row).replace(" mb0", "")


def test_the_picture():
    (row,) = compiled("host_layers=0", 3).ranks
    assert text(row) == (
        "F 0 | FETCH output(0) <- host | F 1:3 | B 1:3 | OFFLOAD grad_output(0) -> host | B 0 | STEP 1:3 | STEP 0"
    )
    assert [ins.stream for ins in row if ins.op is Op.STEP] == ["compute", "host"]
    assert compiled("host_layers=0", 3).state[0] >= {host(param(0)), host(optimizer_state(0)), param(1)}


def test_neighbours_on_the_host_hand_on_there():
    (row,) = compiled("host_layers=1,2", 4).ranks
    assert text(row).startswith(
        "F 0 | OFFLOAD output(0) -> host | F 1:3 | FETCH output(2) <- host | F 3 | B 3 | "
        "OFFLOAD grad_output(2) -> host | B 1:3 | FETCH grad_output(0) <- host | B 0"
    )


@st.composite
def cases(draw):
    layers = draw(st.integers(1, 6))
    model = draw(shapes(layers))
    chosen = draw(st.sets(st.integers(0, layers - 1), min_size=1))
    for group in model.groups:  # tied layers go together
        if chosen.intersection(group.layers):
            chosen |= set(group.layers)
    for group in model.groups:
        if chosen.intersection(group.layers):
            chosen |= set(group.layers)
    plan = Plan(
        schedule=draw(st.sampled_from(["gpipe", "1f1b"])),
        microbatches=draw(st.integers(1, 3)),
        checkpoint=draw(st.sampled_from(["none", 1, 2])) if layers > 1 else "none",
        clip=draw(st.sampled_from([None, 1.0])),
        host_layers=sorted(chosen),
    )
    return plan, model, chosen


@given(cases())
@settings(suppress_health_check=list(HealthCheck))
def test_every_plan_verifies_and_only_outputs_cross(case):
    plan, model, chosen = case
    program = plan.compile(model, steps=2, check=False)
    verify(program)
    costs = RandomCosts(len(program))
    trace = simulate(program, costs)
    assert (trace.starts, trace.ends) == brute_force(program, costs)
    for row in program.ranks:
        for ins in row:
            if ins.layers and ins.op in (Op.FORWARD, Op.BACKWARD, Op.RECOMPUTE):
                on_host = chosen.issuperset(ins.layers)
                assert ins.stream == ("host" if on_host else "compute")
                assert {tier(v) for v in ins.reads + ins.writes} == {"host" if on_host else "device"}
            if ins.op in COPIES:
                assert home(ins.reads[0]).kind in ("output", "grad_output")


@pytest.mark.parametrize(
    ("words", "model", "says"),
    [
        ("host_layers=7", shape(4), "host_layers=7: the model has no such layer; possible are 0 to 3"),
        ("host_layers=0", shape(4, tied=[(0, 3)]), "layer 0 shares parameters with layer 3"),
        ("host_layers=table", Shape(2, (Group((0,), (4,)), Group((1,), (4,))), names=("embed", "head")), "embed, head"),
    ],
)
def test_what_cannot_be(words, model, says):
    with pytest.raises(PlanError, match=says):
        Plan.parse(words).compile(model)


def test_names_and_numbers():
    model = Shape(2, (Group((0,), (4,)), Group((1,), (4,))), names=("embed", "head"))
    assert Plan(host_layers="embed").compile(model).ranks == Plan(host_layers=0).compile(model).ranks
    assert Plan.parse(str(Plan(host_layers=("embed", "head")))) == Plan(host_layers=["embed", "head"])
