"""Programs that verify accepts are correct: mutants of programs of every kind; and its message for each wrong field."""

from dataclasses import replace

import pytest

from minipar import Plan, Program, ProgramError, verify
from minipar.program import Local, Op, Part, Serving, Staleness, grad, output, param, repartitions
from tests.fuzz.fingerprints import judge
from tests.fuzz.verify_mutants import GRID, PLAIN, TOKENS, campaign, decided, on_axes, valid
from tests.interpreters import shape


def test_all_programs_that_are_changed_are_right():
    for program in valid():
        verify(program)
        assert judge(program) == "", program.name


def test_mutants_are_refused_or_right():
    """The short form of the campaign. It must find both kinds, or it tries nothing. (What verify alone refuses are
    mostly wrong declarations of right parameters.)"""
    outcome = campaign(seed=17, count=750)
    assert not outcome.crashes, outcome.crashes[0].words + outcome.crashes[0].refusal
    assert not outcome.missed, outcome.missed[0].words + outcome.missed[0].wrong
    assert outcome.accepted > 150
    assert outcome.count - outcome.accepted > 250
    assert len(outcome.stricter) < 120


def test_mutants_on_several_axes_are_refused_or_right():
    outcome = campaign(seed=3, count=125, programs=on_axes())
    assert not outcome.crashes, outcome.crashes[0].words + outcome.crashes[0].refusal
    assert not outcome.missed, outcome.missed[0].words + outcome.missed[0].wrong
    assert outcome.accepted > 15
    assert outcome.count - outcome.accepted > 50
    assert len(outcome.stricter) < 13


def test_mutants_of_what_servers_decide_are_refused_or_right():
    outcome = campaign(seed=5, count=150, programs=decided())
    assert not outcome.crashes, outcome.crashes[0].words + outcome.crashes[0].refusal
    assert not outcome.missed, outcome.missed[0].words + outcome.missed[0].wrong
    assert outcome.accepted > 15
    assert outcome.count - outcome.accepted > 50
    assert len(outcome.stricter) < 65


def program(words: str, steps: int = 1) -> Program:
    return Plan.parse(words).compile(PLAIN, steps=steps, check=False)


def changed(given: Program, op: Op, fields: dict[str, object]) -> Program:
    """The first instruction of a kind, with other fields."""
    rank, k = next((r, k) for r, row in enumerate(given.ranks) for k, ins in enumerate(row) if ins.op is op)
    row = list(given.ranks[rank])
    row[k] = row[k]._replace(**fields)
    return given.with_rank(rank, row)


GRADIENTS = ("grad", "grad_shard", "host grad", "host grad_shard")
PIPELINE, REPLICAS, ALONE = "pp=2 microbatches=2", "dp=2 microbatches=2 bucket=none", "microbatches=2"
INSTRUCTIONS = [
    (PIPELINE, Op.FORWARD, {"layers": (1, 0)}, "layers 1,0 do not follow each other; possible are"),
    (PIPELINE, Op.BACKWARD, {"layers": (1, 0)}, "layers 1,0 do not follow each other"),
    ("checkpoint=2 microbatches=2", Op.RECOMPUTE, {"layers": (0, 0, 1)}, "names 0 twice; possible is each once"),
    (PIPELINE, Op.SEND, {"stream": "host"}, "mb0 -> 1` computes nothing, but is on the stream of the host"),
    (PIPELINE, Op.SEND, {"reads": (param(0),)}, "is of micro-batch 0 of step 0, but names param(0)"),
    (PIPELINE, Op.FORWARD, {"group": (0, 1)}, "F is no collective, so that nobody joins it in a group"),
    (REPLICAS, Op.ALL_REDUCE, {"group": (1, 0)}, "the ranks of a group ascend, each once; possible is group=(0, 1)"),
    (REPLICAS, Op.ALL_REDUCE, {"name": "mine"}, "collective without partner"),
    (REPLICAS, Op.ALL_REDUCE, {"parts": (Part(Op.ALL_REDUCE, 3, 8, 0),)}, "a piece is of one gradient"),
    ("dp=2 zero=1", Op.REDUCE_SCATTER, {"frees": ()}, "never applies grad(3): it has no STEP for it"),
    ("dp=2 zero=1", Op.ALL_GATHER, {"writes": (param(0),)}, "changes param(1), but does not write it"),
    ("dp=2 clip=1.0", Op.NORM, {"reads": (*map(grad, (0, 1, 2, 3)), grad(0))}, "counts grad(0) twice; possible is"),
    (ALONE, Op.STEP, {"writes": ()}, "changes optimizer_state(0), but does not write it"),
    (ALONE, Op.FORWARD, {"microbatch": None}, "rank 0 instruction 0: microbatch=None must be a whole number"),
    (ALONE, Op.FORWARD, {"reads": "x"}, "rank 0 instruction 0: reads='x' must be a tuple of values"),
    (ALONE, Op.FORWARD, {"name": 7}, "rank 0 instruction 0: name=7 must be text"),
    (ALONE, Op.FORWARD, {"op": "F"}, "rank 0 instruction 0: op='F' must be one of Op"),
    (ALONE, Op.FORWARD, {"op": Op.ACCEPT}, "ACCEPT is of collectives and servers, not of training"),
    ("offload=optimizer", Op.OFFLOAD, {"reads": ()}, "OFFLOAD copies one value"),
    ("offload=optimizer", Op.FETCH, {"layers": (3,)}, "possible is layers=(0,)"),
    ("offload=optimizer", Op.STEP, {"stream": "compute"}, "gradients go to the host for a STEP of the host"),
    ("pp=2 schedule=pipedream microbatches=2", Op.STEP, {"step": 1}, "is update 0 of param(0), but is called step 1"),
    ("dp=2 sync=ps", Op.PULL, {"writes": (param(0),)}, "names other values than those of its groups"),
    ("dp=2 sync=ps", Op.PULL, {"step": 1}, "was not pulled from rank 2 for step 0"),
    ("dp=2 sync=ps", Op.PUSH, {"frees": ()}, "keeps grad(0); possible is frees with all that is pushed"),
    ("dp=2 sync=ps", Op.APPLY, {"layers": (0,)}, "server 2 keeps groups 0, 1, 2, 3; possible are these"),
    ("dp=2 sync=ps", Op.APPLY, {"step": 1}, "is update 0 of group 0 at its server, but is called step 1"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "op", "fields", "says"), INSTRUCTIONS)
def test_what_is_said_of_an_instruction(words, op, fields, says):
    mutant = changed(program(words), op, fields)
    with pytest.raises(ProgramError) as caught:
        verify(mutant)
    assert says in caught.value.reason


FIELDS = [
    ({"receives_ahead": -1}, "receives_ahead=-1: must be a whole number from 0 on"),
    ({"microbatches": 0}, "microbatches=0: must be at least 1"),
    ({"slices": 2}, "slices=2 carries=(): no layer carries anything from slice to slice; possible are"),
    ({"in_flight": 2}, "in_flight=2: its contract is not Staleness(every=..., stashed=False)"),
    ({"mesh": (("pp", 2), ("dp", 2))}, "mesh pp=2, dp=2: has 4 places for 2 ranks"),
    ({"state": ()}, "reads param(0), which has no producer"),
    ({"contract": Local(0)}, "contract=Local(steps=0): must be Synchronous(), Local(steps) or Staleness"),
    ({"contract": Staleness(-1)}, "contract=Staleness(bound=-1"),
    ({"clip": -1.0}, "clip=-1.0: must be a positive number, or None"),
    ({"compress": "topk:7"}, "compress='topk:7': must be none, bf16, fp16, topk:R"),
    ({"precision": "text"}, "precision='text': must be float32 or bf16"),
    ({"edges": ((1, 0),)}, "edge 1 -> 0: goes backward"),
    ({"serving": Serving(9)}, "serving: 9 servers of 2 ranks; at least one rank is a worker"),
    ({"ranks": ()}, "state: of 2 ranks, but the program has 0 ranks"),
    ({"groups": (shape(4).groups[0]._replace(layers=(7,)),)}, "group 0 is of layers (7,): must be ascending"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "says"), FIELDS)
def test_what_is_said_of_a_field_of_the_program(fields, says):
    mutant = replace(program(PIPELINE), **fields)
    with pytest.raises(ProgramError) as caught:
        verify(mutant)
    assert says in caught.value.reason


def test_an_output_inside_of_an_instruction_cannot_be_sent():
    """Autograd alone has it: the executor would send nothing."""
    given = program(PIPELINE)
    send, receive, back = given.ranks[0][1], given.ranks[1][0], given.ranks[1][2]
    inner = output(0, 0)
    mutant = given.with_rank(
        0, [given.ranks[0][0], send._replace(layers=(0,), reads=(inner,), frees=()), *given.ranks[0][1:]]
    )
    first = receive._replace(layers=(0,), writes=(inner,))
    rest = list(given.ranks[1])
    rest[2] = back._replace(frees=(*back.frees, inner), reads=(*back.reads, inner))
    mutant = mutant.with_rank(1, [first, *rest])
    with pytest.raises(ProgramError, match=r"moves output\(0\) mb0, which stays inside of rank 0 instruction 0"):
        verify(mutant)


LOST = [
    ("checkpoint=2 microbatches=2", Op.RECOMPUTE),
    ("pp=2 schedule=zb-h1 microbatches=3", Op.BACKWARD_INPUT),
    ("pp=2 schedule=zb-h1 microbatches=3", Op.BACKWARD_WEIGHT),
    ("pp=2 schedule=naive microbatches=3", Op.SEND),
    ("host_layers=3 microbatches=2", Op.BACKWARD),
    ("dp=2 zero=2 bucket=none microbatches=2 reduce=step", Op.REDUCE_SCATTER),
    ("offload=activations microbatches=2", Op.FETCH),
    ("dp=2 sync=ps microbatches=2", Op.BACKWARD),
]


@pytest.mark.parametrize(("words", "op"), LOST)
def test_only_what_uses_a_gradient_lets_it_go(words, op):
    """Whoever else frees one loses what was summed there: the next backward begins from nothing."""
    given, refused = program(words), 0
    for k, ins in enumerate(given.ranks[0]):
        kept = {value for earlier in given.ranks[0][: k + 1] for value in earlier.writes if value.kind in GRADIENTS}
        for value in sorted(kept - set(ins.frees)) if ins.op is op else ():
            row = list(given.ranks[0])
            row[k] = ins._replace(frees=(*ins.frees, value))
            mutant = given.with_rank(0, row)
            with pytest.raises(ProgramError) as caught:
                verify(mutant)
            assert judge(mutant)
            refused += "what was summed would be lost" in caught.value.reason
    assert refused


def test_an_old_copy_does_not_come_over_an_update():
    given = Plan.parse("dp=2 zero=3 offload=parameters").compile(PLAIN, check=False)
    for rank in (0, 1):
        row = list(given.ranks[rank])
        k = max(k for k, ins in enumerate(row) if ins.op is Op.FETCH and ins.layers == (2,))
        later = next(n for n, ins in enumerate(row) if ins.op is Op.OFFLOAD and ins.layers == (2,))
        given = given.with_rank(rank, [*row[:later], row[k], *row[later:]])
    with pytest.raises(ProgramError, match=r"over param_shard\(2\) after 1: an update is lost"):
        verify(given)
    assert judge(given)


def test_an_asynchronous_update_writes_one_version_of_each():
    given = program("pp=2 schedule=ampnet microbatches=3")
    k = max(k for k, ins in enumerate(given.ranks[0]) if ins.op is Op.STEP)
    row = list(given.ranks[0])
    row[k] = row[k]._replace(writes=(*row[k].writes, next(v for v in row[k].reads if v.kind == "param")))
    mutant = given.with_rank(0, row)
    with pytest.raises(ProgramError, match=r"writes param\(0\).*; possible is param\(0\) v\d+ alone"):
        verify(mutant)


def test_the_name_of_a_contribution_of_an_asynchronous_program():
    """Two replicas, which an asynchronous program may have by hand: a contribution beyond one step's is named."""
    from minipar.program.verify.staleness import StaleContents

    given = Plan.parse("pp=2 schedule=pipedream microbatches=2").compile(PLAIN, steps=2)
    walk = StaleContents(given)
    assert walk.name(0, 1 << 3) == "micro-batch 1 of step 1 (layer 0)"


def test_slices_are_added_to_in_the_message_that_they_came_in():
    """The executor has them together; groups in another order are other slices."""
    given = program("dp=2 zero=2 microbatches=2 reduce=microbatch")
    for rank in (0, 1):
        row = list(given.ranks[rank])
        k = max(k for k, ins in enumerate(row) if ins.op is Op.REDUCE_SCATTER and len(ins.layers) > 1)
        row[k] = row[k]._replace(layers=row[k].layers[::-1])
        given = given.with_rank(rank, row)
    with pytest.raises(ProgramError, match="adds to the slices of group .*, which came with groups"):
        verify(given)


def test_a_gradient_goes_to_the_host_once():
    """The first copy lets go of it on the device, although its bucket stays: the second one would bring nothing."""

    mutant = program("dp=2 bucket=flat offload=optimizer")
    for rank in (0, 1):
        row = list(mutant.ranks[rank])
        first = next(ins for ins in row if ins.op is Op.OFFLOAD)
        update = next(k for k, ins in enumerate(row) if ins.op is Op.STEP and ins.layers == first.layers)
        mutant = mutant.with_rank(rank, [*row[:update], first, *row[update:]])
    with pytest.raises(ProgramError, match=r"comes before its gradients are complete: host grad\(0\) lacks"):
        verify(mutant)
    assert judge(mutant)


def test_parameters_of_a_step_are_pulled_once():
    given = program("dp=2 sync=ps servers=2")
    answer = next(k for k, ins in enumerate(given.ranks[2]) if ins.op is Op.REPLY and ins.peer == 0)
    pull = next(k for k, ins in enumerate(given.ranks[0]) if ins.op is Op.PULL and ins.peer == 2)
    mutant = given
    for rank, k in ((2, answer), (0, pull)):
        row = given.ranks[rank]
        mutant = mutant.with_rank(rank, [*row[:k], row[k], *row[k:]])
    with pytest.raises(ProgramError, match=r"PULL .* pulls param\(0\) of step 0 again; possible is once"):
        verify(mutant)


def test_an_update_on_the_host_takes_no_gradient_of_other_replicas_that_train_alone():
    mutant = replace(program("dp=2 bucket=flat offload=optimizer"), contract=Local(2))
    with pytest.raises(ProgramError, match="the replica's own update of param.* uses micro-batch 0 of replica"):
        verify(mutant)
    assert judge(mutant)


def test_the_last_backward_of_an_asynchronous_program_writes_its_gradient():
    """The last update may be of fewer micro-batches than the others; one that is lost would not be missed there."""
    given = program("pp=2 schedule=ampnet microbatches=2 update_every=2")
    row = list(given.ranks[1])
    k = max(k for k, ins in enumerate(row) if ins.op is Op.BACKWARD)
    row[k] = row[k]._replace(writes=tuple(v for v in row[k].writes if v != grad(3)))
    mutant = given.with_rank(1, row)
    with pytest.raises(ProgramError, match=r"makes grad\(3\), but does not write it"):
        verify(mutant)
    assert judge(mutant)


def refused(mutant: Program, says: str) -> None:
    with pytest.raises(ProgramError, match=says):
        verify(mutant)
    assert judge(mutant)


MESSAGES = [
    ("tp=2 pp=2 sequence_parallel=true", "rank 3 has another part of output.4..S1. mb0 along tp; possible is rank 2"),
    ("context_parallel=2 pp=2", "rank 3 works on other rows along cp; possible is rank 2"),
]


@pytest.mark.parametrize(("words", "says"), MESSAGES)
def test_a_message_goes_to_the_same_place(words, says):
    """Links agree, and so do the names of values; but the other rank goes on with what is not its own."""
    given = Plan.parse(words).compile(layers=2)
    rows = [
        [ins._replace(peer=ins.peer ^ 1) if ins.op in (Op.SEND, Op.RECV) else ins for ins in row] for row in given.ranks
    ]
    refused(replace(given, ranks=tuple(map(tuple, rows))), says)


def test_a_whole_value_may_go_to_any_of_the_ranks_that_share_a_layer():
    given = Plan.parse("tp=2 pp=2").compile(layers=2)
    rows = [
        [ins._replace(peer=ins.peer ^ 1) if ins.op in (Op.SEND, Op.RECV) else ins for ins in row] for row in given.ranks
    ]
    mutant = replace(given, ranks=tuple(map(tuple, rows)))
    verify(mutant)
    assert judge(mutant) == ""


def test_what_was_cut_last_is_joined_first():
    """Tokens are cut along cp, and what is left along tp: joined along cp first, they come in another order."""
    given = Plan.parse(GRID).compile(TOKENS, check=False)
    for rank, row in enumerate(given.ranks):
        k = next(k for k, ins in enumerate(row) if repartitions(ins) and ins.reads[0].form == "S1/S1")
        first, then = row[k], row[k + 1]
        between = (first.writes[0]._replace(form="R/S1"),)
        turned = (
            then._replace(reads=first.reads, writes=between, frees=first.reads),
            first._replace(reads=between, writes=then.writes, frees=between),
        )
        given = given.with_rank(rank, [*row[:k], *turned, *row[k + 2 :]])
    refused(given, "mixes up the parts of output.4..S1/S1. mb0 along tp, which are parts of what cp has left")


def test_layers_of_one_instruction_hand_on_values_as_they_are():
    given = Plan.parse(GRID).compile(layers=1)
    forms = list(given.forms)
    forms[2] = forms[2]._replace(grad_writes="S1")
    refused(replace(given, forms=tuple(forms)), r"gives grad_output\(1\) as a shard of dimension 1, and layer 1")
    refused(replace(given, forms=()), "reads|writes")


def test_an_average_that_is_not_due_is_missed_by_the_update_after_it():
    """No layer computes between the two, so the update is the first to find it."""
    given = program("dp=2 local_steps=2", steps=3)
    for rank in (0, 1):
        row = list(given.ranks[rank])
        update = [k for k, ins in enumerate(row) if ins.op is Op.STEP][1]
        average = next(ins for ins in row if ins.group)
        given = given.with_rank(rank, [*row[:update], average._replace(step=0), *row[update:]])
    refused(given, "uses param.* after 0 updates by its replica alone; the program promises 1")
