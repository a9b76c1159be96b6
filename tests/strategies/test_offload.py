"""The offload pass: the places of the copies, verification of its programs, what is refused, and what it costs;
and layers on the host."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minipar import Plan, PlanError, ProgramError, simulate, verify
from minipar.prediction.plain_simulator import start_and_end
from minipar.program import COPIES, Group, Op, disk, grad, home, host, optimizer_state, param, saved, tier
from minipar.program.shape import Shape
from minipar.strategies.passes.offload import BESIDE
from tests.interpreters import RandomCosts, compiled, shape, shapes


def text(row):
    return " | ".join(str(ins) for ins in row).replace(" mb0", "")


# where the copies stand ----------------------------------------------------------------------------------------------


def test_activations_leave_after_forward_and_come_back_one_backward_ahead():
    (row,) = compiled("offload=activations", 5).ranks
    assert text(row) == (
        "F 0 | OFFLOAD saved(0) -> host | F 1 | OFFLOAD saved(1) -> host | F 2 | OFFLOAD saved(2) -> host | F 3:5 | "
        "B 4 | FETCH saved(2) <- host | B 3 | FETCH saved(1) <- host | B 2 | FETCH saved(0) <- host | B 0:2 | STEP 0:5"
    )
    out = next(ins for ins in row if ins.op is Op.OFFLOAD)
    assert (out.reads, out.writes, out.frees) == ((saved(0, 0),), (host(saved(0, 0)),), (saved(0, 0),))
    assert (out.stream, next(ins for ins in row if ins.op is Op.FETCH).stream) == ("to host", "from host")


def test_what_is_needed_at_once_stays():
    """The last stage's backward follows its forward: no copy could be done in time."""
    first, last = compiled("pp=2 microbatches=4 offload=activations", 4).ranks
    assert any(ins.op in COPIES for ins in first)
    assert not any(ins.op in COPIES for ins in last)


def test_the_instruction_after_the_next_one_waits_for_a_copy():
    """So that memory does not depend on the link: a copy runs beside one compute instruction."""
    (row,) = compiled("offload=activations", 9).ranks
    compute = [ins for ins in row if ins.stream == "compute"]
    copies = [(k, ins) for k, ins in enumerate(row) if ins.op is Op.OFFLOAD]
    assert len(copies) > 4
    for k, ins in copies:
        following = [other for other in row[k:] if other.stream == "compute"]
        waiting = [other for other in compute if ins.writes[0] in other.reads]
        assert len(waiting) == 1
        assert waiting[0] in following[: BESIDE + 1]  # (the one before, where both are one instruction)


def test_with_checkpoints_it_is_the_checkpoints_that_leave():
    (row,) = compiled("offload=activations checkpoint=1", 7).ranks
    moved = {ins.reads[0].kind for ins in row if ins.op is Op.OFFLOAD}
    assert moved == {"output"}
    assert "R 4 | FETCH output(2) <- host | B 4 | R 3" in text(row)


def test_parameters_are_there_when_they_are_needed_and_not_longer():
    (row,) = compiled("offload=parameters,optimizer", 4).ranks
    assert text(row) == (
        "FETCH param(0) <- host | FETCH param(1) <- host | F 0 | FETCH param(2) <- host | F 1 | "
        "FETCH param(3) <- host | F 2:4 | B 3 | OFFLOAD grad(3) -> host | FETCH param(1) <- host | B 2 | "
        "OFFLOAD grad(2) -> host | "
        "FETCH param(0) <- host | B 1 | OFFLOAD grad(1) -> host | B 0 | OFFLOAD grad(0) -> host | "
        "STEP 0 | STEP 1 | STEP 2 | STEP 3"
    )
    here, most = 0, 0
    for ins in row:
        here += sum(v.kind == "param" for v in ins.writes)
        most = max(most, here)
        here -= sum(v.kind == "param" for v in ins.frees)
    assert (here, most) == (0, 2)


def test_steps_on_the_host_and_parameters_on_their_way_back():
    (row,) = compiled("offload=optimizer", 2).ranks
    assert text(row).endswith("STEP 0 | FETCH param(0) <- host | STEP 1 | FETCH param(1) <- host")
    step = next(ins for ins in row if ins.op is Op.STEP)
    assert set(step.reads) == {host(grad(0)), host(param(0)), host(optimizer_state(0))}
    assert step.stream == "host"


def test_the_disk_is_two_copies_away_from_the_optimizer():
    program = compiled("offload=optimizer offload_to=disk", 2)
    assert "FETCH host param(0) <- disk | FETCH host optimizer_state(0) <- disk" in text(program.ranks[0])
    assert program.state[0] == {
        param(0), param(1), disk(param(0)), disk(param(1)), disk(optimizer_state(0)), disk(optimizer_state(1)),
    }  # fmt: skip


def test_the_copies_are_on_streams_of_their_own_in_the_predicted_trace():
    trace = simulate(compiled("offload=activations,optimizer offload_to=disk", 6))
    streams = {event.stream for event in trace.events}
    assert {"compute", "host", "to disk", "from disk", "to host", "from host"} == streams
    assert trace.busy == [18.0 / 6]  # neither copies nor the host's work are the device's


# what is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("offload=weights", "offload=weights: must be none, or a list of activations, optimizer, parameters"),
        ("offload=optimizer offload_to=tape", "offload_to=tape: unknown; possible are host, disk"),
        ("offload=parameters zero=2 dp=2", "possible is zero=0 or zero=3"),
        ("offload=optimizer offload_limit=lots", "offload_limit"),
    ],
)
def test_bad_choices(words, says):
    with pytest.raises(PlanError, match=says):
        Plan.parse(words)


def drop(row, wanted):
    return [ins for ins in row if not wanted(ins)]


CHANGES = {
    "a fetch is missing": (
        "offload=activations",
        lambda row: drop(row, lambda i: i.op is Op.FETCH and i.reads[0].index == 1),
        "after",
    ),
    "an offload is missing": (
        "offload=optimizer",
        lambda row: drop(row, lambda i: i.op is Op.OFFLOAD and i.layers == (1,)),
        "host grad",
    ),
    "parameters do not come back": (
        "offload=optimizer",
        lambda row: drop(row, lambda i: i.op is Op.FETCH and i.layers == (1,)),
        "was not copied after the last STEP",
    ),
    "the optimizer's state is not written back": (
        "offload=optimizer offload_to=disk",
        lambda row: drop(row, lambda i: i.op is Op.OFFLOAD and i.reads[0] == host(optimizer_state(0))),
        "optimizer_state",
    ),
    "the host's optimizer without the host's gradients": (
        "offload=optimizer",
        lambda row: [i._replace(stream="compute") if i.op is Op.STEP else i for i in row],
        "gradients go to the host for a STEP of the host",
    ),
    "a copy to the wrong place": (
        "offload=activations",
        lambda row: [i._replace(writes=(host(saved(3, 0)),)) if i.op is Op.OFFLOAD else i for i in row],
        "cannot make",
    ),
    "a copy up that is called down": (
        "offload=activations",
        lambda row: [i._replace(op=Op.OFFLOAD) if i.op is Op.FETCH else i for i in row],
        "cannot make",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_programs_that_are_wrong(change):
    words, act, says = CHANGES[change]
    program = compiled(words, 6)
    verify(program)
    with pytest.raises(ProgramError, match=says):
        verify(program.with_rank(0, act(program.ranks[0])))


def test_a_gradient_is_not_changed_while_it_is_copied():
    """The copy of one in a bucket, which stays: a backward of the next step must not add to it."""
    program = compiled("dp=2 offload=optimizer microbatches=2", 3, steps=2)
    verify(program)
    row = list(program.ranks[0])
    k = max(k for k, ins in enumerate(row) if ins.op is Op.OFFLOAD and ins.step == 0)
    b = min(k for k, ins in enumerate(row) if ins.op is Op.BACKWARD)
    row.insert(b, row.pop(k))
    with pytest.raises(ProgramError):
        verify(program.with_rank(0, row))


# memory --------------------------------------------------------------------------------------------------------------


class Sizes(RandomCosts):
    """Saved values of one byte, parameters of 10; time only for what is computed and copied."""

    def size(self, rank, value):
        return {"saved": 1, "param": 10, "grad": 10, "optimizer_state": 20}.get(home(value).kind, 0)

    def compute(self, rank, ins):
        return 1.0

    def transfer(self, rank, ins):
        return 0.5, 0.0


def peak(words: str) -> float:
    return simulate(compiled(words, 8), Sizes(0)).peak_memory()[0]


def test_less_is_on_the_device_at_once():
    assert peak("bucket=none") == 8 * (10 + 10 + 20 + 1)
    assert peak("offload=optimizer") < 8 * (10 + 10) + 8
    assert peak("offload=optimizer,parameters") <= 3 * 10 + 3 * 10 + 8
    assert peak("offload=optimizer,parameters,activations") < peak("offload=optimizer,parameters")
    values = {v for ins in compiled("offload=activations,optimizer", 8).ranks[0] for v in ins.writes}
    assert {tier(v) for v in values} == {"device", "host"}


@pytest.mark.parametrize("prefetch", [0, 1, 2, 3])
def test_a_slice_that_would_be_fetched_before_it_was_let_go_stays(prefetch):
    """With ZeRO-3, too: the same group is gathered for neighbouring micro-batches, and by both halves of a backward."""
    for text in (
        "schedule=gpipe microbatches=3",
        "pp=2 microbatches=3",
        "schedule=zb-h1",
        "checkpoint=1 schedule=zb-h1",
    ):
        for layers in (4, 9):
            Plan.parse(f"dp=2 zero=3 offload=parameters prefetch={prefetch} {text}").compile(layers=layers)


# Layers on the host: only outputs and their gradients cross -----------------------------------------------------------


def test_the_picture():
    (row,) = compiled("host_layers=0", 3).ranks
    assert text(row) == (
        "F 0 | FETCH output(0) <- host | F 1:3 | B 1:3 | OFFLOAD grad_output(0) -> host | B 0 | STEP 1:3 | STEP 0"
    )
    assert [ins.stream for ins in row if ins.op is Op.STEP] == ["compute", "host"]
    assert compiled("host_layers=0", 3).state[0] >= {host(param(0)), host(optimizer_state(0)), param(1)}


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
    assert (trace.starts, trace.ends) == start_and_end(program, costs)
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
