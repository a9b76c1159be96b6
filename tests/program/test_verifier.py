"""verify refuses every kind of program that cannot run. Its error has one line with the ranks, the instructions, and
the reason."""

import re

import pytest

from minipar import Deadlock, Plan, ProgramError, simulate, verify
from minipar.program import Op, Program, grad, grad_output, output, param, saved
from tests.fuzz.fingerprints import judge
from tests.interpreters import compiled, renamed, shape

PIPELINE = "pp=2 microbatches=2 schedule=gpipe"
#   rank 0   0 F mb0 | 1 SEND mb0 | 2 F mb1 | 3 SEND mb1 | 4 RECV mb0 | 5 B mb0 | 6 RECV mb1 | 7 B mb1 | 8 STEP
#   rank 1   0 RECV mb0 | 1 F mb0 | 2 RECV mb1 | 3 F mb1 | 4 B mb0 | 5 SEND mb0 | 6 B mb1 | 7 SEND mb1 | 8 STEP
REPLICAS = "dp=2 microbatches=2 bucket=none"
#   rank r   0 F mb0 | 1 B mb0 | 2 F mb1 | 3 B 1 mb1 | 4 ALL_REDUCE 1 | 5 B 0 mb1 | 6 ALL_REDUCE 0 | 7 STEP


def refused(program: Program, kind=ProgramError) -> str:
    """The one line in which verify refuses the program."""
    with pytest.raises(kind) as error:
        verify(program)
    first = str(error.value).split("\n")[0]
    assert first == error.value.reason
    return first


def edited(program: Program, rank: int, change) -> Program:
    row = list(program.ranks[rank])
    change(row)
    return program.with_rank(rank, row)


def without(program: Program, rank: int, *places: int) -> Program:
    return program.with_rank(rank, [ins for k, ins in enumerate(program.ranks[rank]) if k not in places])


def moved(program: Program, rank: int, source: int, target: int) -> Program:
    return edited(program, rank, lambda row: row.insert(target, row.pop(source)))


def replaced(program: Program, rank: int, place: int, **fields) -> Program:
    return edited(program, rank, lambda row: row.__setitem__(place, row[place]._replace(**fields)))


@pytest.fixture
def pipeline() -> Program:
    return compiled(PIPELINE, 4)


@pytest.fixture
def replicas() -> Program:
    return compiled(REPLICAS, 2)


# each rank -----------------------------------------------------------------------------------------------------------


def test_a_read_with_no_producer(pipeline):
    program = without(without(pipeline, 1, 0), 0, 1)  # neither sent nor received
    assert refused(program) == (
        "rank 1 instruction 0 `F 2:4 mb0` reads output(1) mb0, which has no producer;"
        " rank 0 has it, but does not send it here"
    )


def test_a_read_before_its_producer(pipeline):
    assert refused(moved(pipeline, 1, 0, 1)) == (
        "rank 1 instruction 0 `F 2:4 mb0` reads output(1) mb0 before rank 1 instruction 1 `RECV output(1) mb0 <- 0`"
        " writes it"
    )


def test_backward_before_forward(pipeline):
    assert refused(moved(pipeline, 1, 3, 6)) == (
        "backward before forward: rank 1 instruction 5 `B 2:4 mb1` needs saved(3) mb1 of rank 1 instruction 6"
        " `F 2:4 mb1`"
    )


def test_backward_on_a_rank_without_the_forward(pipeline):
    back = pipeline.ranks[1][4]
    program = edited(without(pipeline, 1, 4, 5), 0, lambda row: row.__setitem__(4, back))
    assert refused(program) == (
        "backward before forward: rank 0 instruction 4 `B 2:4 mb0` needs saved(3) mb0,"
        " but rank 0 does not run that forward"
    )


def test_details_show_the_lines_around(pipeline):
    with pytest.raises(ProgramError) as error:
        verify(moved(pipeline, 1, 3, 6))
    assert "  ->    5  B 2:4 mb1" in error.value.details.split("\n")
    assert error.value.details.startswith("rank 1:\n")


def test_used_after_it_was_freed(pipeline):
    program = edited(pipeline, 0, lambda row: row.insert(2, row[1]))
    assert refused(program) == (
        "send without receive: rank 0 instruction 2 `SEND output(1) mb0 -> 1`, not taken by rank 1"
    )
    both = edited(program, 1, lambda row: row.insert(1, row[0]))  # also received twice: each rank now has its own fault
    assert refused(both) == (
        "rank 0 instruction 2 `SEND output(1) mb0 -> 1` reads output(1) mb0 after"
        " rank 0 instruction 1 `SEND output(1) mb0 -> 1` freed it"
    )


def test_received_twice(pipeline):
    both = edited(pipeline, 1, lambda row: row.insert(1, row[0]))
    both = edited(both, 0, lambda row: row.insert(1, row[1]._replace(frees=())))
    assert refused(both) == (
        "output(1) mb0 is written twice: by rank 1 instruction 0 `RECV output(1) mb0 <- 0`"
        " and by rank 1 instruction 1 `RECV output(1) mb0 <- 0`"
    )


def test_freed_twice(pipeline):
    program = replaced(pipeline, 0, 2, frees=(output(1, 0),))  # the send before it freed it already
    assert refused(program) == "rank 0 instruction 2 `F 0:2 mb1` frees output(1) mb0, which is not there"


def test_a_value_never_freed(pipeline):
    send = pipeline.ranks[0][1]
    assert refused(replaced(pipeline, 0, 1, frees=())) == (
        "output(1) mb0 is never freed: written by rank 0 instruction 0 `F 0:2 mb0`"
    )
    back = pipeline.ranks[1][4]
    kept = tuple(value for value in back.frees if value != saved(2, 0))
    assert refused(replaced(pipeline, 1, 4, frees=kept)) == (
        "saved(2) mb0 is never freed: written by rank 1 instruction 1 `F 2:4 mb0`"
    )
    step = pipeline.ranks[1][8]
    assert refused(replaced(pipeline, 1, 8, frees=step.frees[1:])) == (
        "grad(2) is never freed: written by rank 1 instruction 6 `B 2:4 mb1`"
    )
    assert send.frees
    assert len(step.frees) == 2


def test_state_that_must_stay_is_freed(pipeline):
    step = pipeline.ranks[0][8]
    program = replaced(pipeline, 0, 8, frees=(*step.frees, param(0)))
    assert refused(program) == ("param(0) must outlive the program, but rank 0 instruction 8 `STEP 0:2` frees it")


# each instruction ----------------------------------------------------------------------------------------------------


def test_a_label_that_is_not_that_of_the_values(pipeline):
    assert refused(replaced(pipeline, 0, 1, microbatch=1)) == (
        "rank 0 instruction 1 `SEND output(1) mb0 -> 1` is of micro-batch 1 of step 0,"
        " but names output(1) mb0 of step 0"
    )
    swapped = replaced(replaced(pipeline, 0, 0, microbatch=1), 0, 2, microbatch=0)  # the first layer's rows are swapped
    assert judge(swapped)
    assert refused(swapped) == (
        "rank 0 instruction 0 `F 0:2 mb1` is of micro-batch 1 of step 0, but names output(0) mb0 of step 0"
    )


@pytest.mark.parametrize(
    ("rank", "place", "fields", "says"),
    [
        (1, 4, {"reads": ()}, "rank 1 instruction 4 `B 2:4 mb0` needs output(1), but does not read it"),
        (0, 8, {"reads": ()}, "rank 0 instruction 8 `STEP 0:2` needs grad(0), but does not read it"),
        (0, 0, {"writes": (grad(0),)}, "rank 0 instruction 0 `F 0:2 mb0` cannot make grad(0)"),
        (0, 5, {"writes": (grad(3),)}, "rank 0 instruction 5 `B 0:2 mb0` cannot make grad(3)"),
        (0, 1, {"reads": ()}, "rank 0 instruction 1 `SEND 1 mb0`: SEND moves values, each once"),
        (
            0,
            1,
            {"reads": (output(1, 0),) * 2},
            "rank 0 instruction 1 `SEND output(1) mb0, output(1) mb0 -> 1`: SEND moves values, each once",
        ),
        (1, 0, {"writes": ()}, "rank 1 instruction 0 `RECV 1 mb0`: RECV moves values, each once"),
        (
            0,
            0,
            {"layers": (7,)},
            "rank 0 instruction 0 `F 7 mb0` works on a layer or parameter group that is not there",
        ),
        (0, 8, {"layers": (7,)}, "rank 0 instruction 8 `STEP 7` works on a layer or parameter group that is not there"),
        (0, 0, {"layers": ()}, "rank 0 instruction 0 `F  mb0` works on a layer or parameter group that is not there"),
        (0, 0, {"layers": (1,)}, "rank 0 instruction 0 `F 1 mb0` needs output(0), but does not read it"),
    ],
)
def test_an_instruction_that_does_not_name_what_its_work_needs(pipeline, rank, place, fields, says):
    assert refused(replaced(pipeline, rank, place, **fields)) == says


# each replica --------------------------------------------------------------------------------------------------------


def test_a_missing_forward(pipeline):
    assert refused(without(pipeline, 1, 3)) == (
        "micro-batch 1 is missing: no rank of replica 0 runs the forward of layer 2 on it (step 0)"
    )


def test_a_doubled_forward(pipeline):
    assert refused(edited(pipeline, 0, lambda row: row.insert(4, row[0]))) == (
        "micro-batch 0 is doubled: the forward of layer 0 runs in rank 0 instruction 0 `F 0:2 mb0`"
        " and in rank 0 instruction 4 `F 0:2 mb0`"
    )


def test_a_doubled_backward(pipeline):
    program = edited(pipeline, 1, lambda row: row.__setitem__(6, row[4]))
    assert refused(program) == (
        "micro-batch 0 is doubled: the input gradient of layer 2 runs in rank 1 instruction 4 `B 2:4 mb0`"
        " and in rank 1 instruction 6 `B 2:4 mb0`"
    )


def test_a_microbatch_that_is_not_there(pipeline):
    program = edited(pipeline, 0, lambda row: row.insert(0, renamed(row[0], 2)))
    assert refused(program) == (
        "rank 0 instruction 0 `F 0:2 mb2` works on a layer, micro-batch or step that is not there"
    )


def test_a_layer_run_in_the_place_of_another():
    """As many pieces of work as there should be, but not the right ones."""
    program = compiled("microbatches=1", shape(2, frozen=[0]))
    forward, backward, step = program.ranks[0]
    reads = (saved(0, 0), grad_output(0, 0), param(0))
    extra = backward._replace(layers=(0,), reads=reads, writes=(), frees=())
    assert refused(program.with_rank(0, [forward, extra, step])) == (
        "rank 0 instruction 1 `B 0 mb0` works on a layer, micro-batch or step that is not there"
    )


# each link -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("place", "i"), [(1, 0), (3, 1)])
def test_receive_without_send(pipeline, place, i):
    assert refused(without(pipeline, 0, place)) == (
        f"receive without send: rank 1 instruction {2 * i} `RECV output(1) mb{i} <- 0`, not sent by rank 0"
    )


@pytest.mark.parametrize(("place", "i"), [(0, 0), (2, 1)])
def test_send_without_receive(pipeline, place, i):
    assert refused(without(pipeline, 1, place)) == (
        f"send without receive: rank 0 instruction {2 * i + 1} `SEND output(1) mb{i} -> 1`, not taken by rank 1"
    )


def test_wrong_receive_order(pipeline):
    program = edited(pipeline, 0, lambda row: row.insert(4, row.pop(6)))
    assert refused(program) == (
        "receive order differs from send order: rank 1 instruction 5 `SEND grad_output(1) mb0 -> 0`"
        " meets rank 0 instruction 4 `RECV grad_output(1) mb1 <- 1`"
    )


@pytest.mark.parametrize("peer", [-1, 0, 2])
def test_a_peer_that_is_not_there(pipeline, peer):
    assert refused(replaced(pipeline, 0, 1, peer=peer)) == (
        f"rank 0 instruction 1 `SEND output(1) mb0 -> {peer}`: there is no other rank {peer}"
    )


def test_a_peer_of_another_replica():
    """Both replicas' messages crossed over consistently: every link is in order, every gradient of mixed rows."""
    program = compiled("pp=2 dp=2", 2)
    cross = {0: 3, 1: 2, 2: 1, 3: 0}
    for rank, row in enumerate(program.ranks):
        program = program.with_rank(rank, [ins._replace(peer=cross[rank]) if ins.peer >= 0 else ins for ins in row])
    assert judge(program)
    assert refused(program) == (
        "rank 0 instruction 1 `SEND output(0) mb0 -> 3`: rank 3 works on the rows of another replica"
    )


# each group ----------------------------------------------------------------------------------------------------------


def test_collectives_in_different_orders(replicas):
    program = edited(replicas, 1, lambda row: row.insert(6, row.pop(4)))  # B 0 before it: 4 B, 5 AR 0, 6 AR 1
    assert refused(program) == (
        "collectives in different order: rank 0 instruction 4 `ALL_REDUCE 1 over 0,1`"
        " meets rank 1 instruction 5 `ALL_REDUCE 0 over 0,1`"
    )


@pytest.mark.parametrize(("rank", "other"), [(0, 1), (1, 0)])
@pytest.mark.parametrize(("place", "group"), [(4, 1), (6, 0)])
def test_a_collective_without_partner(replicas, rank, other, place, group):
    assert refused(without(replicas, rank, place)) == (
        f"collective without partner: rank {other} instruction {place} `ALL_REDUCE {group} over 0,1`;"
        f" rank {rank} never joins"
    )


def test_a_rank_that_is_not_of_its_group(replicas):
    assert refused(replaced(replicas, 1, 4, group=(0, 2))) == (
        "rank 1 instruction 4 `ALL_REDUCE 1 over 0,2`: rank 1 is not of that group"
    )


def test_messages_of_a_collective_must_agree(replicas):
    parts = replicas.ranks[1][4].parts
    program = replaced(replicas, 1, 4, parts=tuple(part._replace(bytes=part.bytes + 1) for part in parts))
    assert "rank 1 never joins" in refused(program)


# all ranks together --------------------------------------------------------------------------------------------------


def test_a_deadlock_shows_the_cycle():
    #  rank 0 wants its gradient before it sends micro-batch 1, which rank 1 wants first
    program = compiled("pp=2 microbatches=2 schedule=naive", 2)
    row = program.ranks[1]
    assert [str(ins) for ins in row[4:8]] == [
        "RECV output(0) mb1 <- 0",
        "F 1 mb1",
        "B 1 mb1",
        "SEND grad_output(0) mb1 -> 0",
    ]
    program = program.with_rank(1, [row[0], row[4], row[5], *row[1:4], *row[6:]])
    with pytest.raises(Deadlock) as error:
        verify(program)
    assert isinstance(error.value, ProgramError)
    assert error.value.reason == "deadlock: ranks wait for each other in a circle, 0 -> 1 -> 0"
    assert error.value.details == (
        "  rank 0 instruction 3 `B 0 mb0` waits for grad_output(0) mb0 of rank 1,\n"
        "    which comes after rank 1 instruction 2 `F 1 mb1`\n"
        "  rank 1 instruction 2 `F 1 mb1` waits for output(0) mb1 of rank 0,\n"
        "    which comes after rank 0 instruction 3 `B 0 mb0`"
    )
    with pytest.raises(
        ProgramError, match=r"rank \d stops for ever at instruction \d `.*`; verify\(program\) says why"
    ):
        simulate(program)


def test_a_deadlock_of_three_ranks_through_a_collective():
    #  rank 0 steps, for which rank 2 must join, before it goes on; rank 2 joins after the next step's first forward
    program = compiled("pp=3 microbatches=1", shape(3, tied=[(0, 2)]), steps=2)
    row = program.ranks[2]
    assert " ".join(ins.op.value for ins in row[:8]) == "RECV F B SEND ALL_REDUCE STEP RECV F"
    late = program.with_rank(2, [row[k] for k in (0, 1, 2, 3, 6, 7, 4, 5, 8, 9, 10, 11)])
    assert refused(late, Deadlock) == "deadlock: ranks wait for each other in a circle, 0 -> 2 -> 1 -> 0"


def test_a_step_before_its_gradients_are_complete(pipeline):
    assert refused(moved(pipeline, 1, 8, 6)) == (
        "rank 1 instruction 6 `STEP 2:4` comes before its gradients are complete: grad(2) lacks micro-batch 1 (layer 2)"
    )


def test_a_step_that_misses_the_other_holder_of_a_tied_set():
    program = compiled("pp=2", shape(4, tied=[(0, 3)]))
    for rank in (0, 1):
        place = next(k for k, ins in enumerate(program.ranks[rank]) if ins.op is Op.ALL_REDUCE)
        program = without(program, rank, place)
    assert re.fullmatch(
        r"rank 1 instruction \d `STEP 2:5` comes before its gradients are complete:"
        r" grad\(4\) lacks micro-batch 0 \(layer 0\)",
        refused(program),
    )


def test_a_gradient_summed_twice():
    program = compiled("dp=2 bucket=none", 1)  # F, B, ALL_REDUCE, STEP
    for rank in (0, 1):
        program = edited(program, rank, lambda row: row.insert(2, row[2]))
    assert refused(program) == (
        "rank 0 instruction 3 `ALL_REDUCE 0 over 0,1` counts micro-batch 0 of replica 0 (layer 0) twice:"
        " grad(0) was summed over these ranks before"
    )


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("bucket", ["none", "flat"])
def test_a_backward_that_adds_to_a_gradient_while_it_is_summed(rank, bucket):
    program = compiled(f"dp=2 microbatches=2 schedule=gpipe bucket={bucket}", 1)  # F F B B ALL_REDUCE STEP
    program = moved(program, rank, 4, 3)
    assert judge(program)
    assert refused(program) == (
        f"rank {rank} instruction 4 `B 0 mb1` writes grad(0) while"
        f" rank {rank} instruction 3 `ALL_REDUCE 0 over 0,1` is under way"
    )


def test_a_received_value_freed_before_it_is_there(pipeline):
    loss = output(3, 0)  # sent along for nothing, and thrown away by a backward that does not look at it
    send, receive, back = pipeline.ranks[1][5], pipeline.ranks[0][4], pipeline.ranks[0][5]
    program = edited(pipeline, 1, lambda row: row.insert(2, send._replace(layers=(3,), reads=(loss,), frees=())))
    program = edited(program, 0, lambda row: row.insert(4, receive._replace(layers=(3,), writes=(loss,))))
    program = replaced(program, 0, 6, frees=(*back.frees, loss))
    assert refused(program) == (
        "rank 0 instruction 6 `B 0:2 mb0` frees output(3) mb0 while"
        " rank 0 instruction 4 `RECV output(3) mb0 <- 1` is under way"
    )


@pytest.mark.parametrize("bucket", ["none", "flat"])
def test_a_missing_step(bucket):
    program = compiled(f"dp=2 bucket={bucket}", 2)
    assert program.ranks[1][-1].op is Op.STEP
    last = len(program.ranks[1]) - 1
    assert refused(without(program, 1, last)) == (
        "rank 1 never applies grad(1): it has no STEP for it after its last backward"
    )


def test_a_doubled_step(pipeline):
    assert refused(edited(pipeline, 0, lambda row: row.append(row[8]))) == (
        "rank 0 instruction 9 `STEP 0:2` reads grad(0) after rank 0 instruction 8 `STEP 0:2` freed it"
    )
    kept = compiled("dp=2 bucket=flat", 2)  # the gradient buffer stays, so the second step finds it empty
    for rank in (0, 1):
        kept = edited(kept, rank, lambda row: row.append(row[-1]))
    assert "comes before its gradients are complete: grad(0) lacks micro-batch 0 of replica 0" in refused(kept)


def test_the_wrong_version_of_the_parameters():
    program = compiled("microbatches=1", 2, steps=2)  # F B STEP F B STEP
    assert refused(moved(program, 0, 3, 2)) == (
        "rank 0 instruction 2 `F 0:2 mb0` of step 1 uses param(0) after 0 updates; a synchronous program promises 1"
    )
    late = edited(program, 0, lambda row: row.insert(1, row.pop(3)))
    assert "uses param(0) after 0 updates; a synchronous program promises 1" in refused(late)


def test_steps_in_the_wrong_order():
    program = compiled("microbatches=1", 1, steps=2)
    swapped = edited(program, 0, lambda row: row.__setitem__(slice(None), [row[k] for k in (0, 1, 5, 3, 4, 2)]))
    assert refused(swapped) == "rank 0 instruction 2 `STEP 0` is update 0 of grad(0), but belongs to step 1"


# what compile promises -----------------------------------------------------------------------------------------------


def test_compile_verifies_unless_told_not_to(monkeypatch):
    from minipar.strategies.schedules import registry

    monkeypatch.setattr(registry, "_schedules", dict(registry._schedules))
    registry.schedule("nothing")(lambda rank, stages, microbatches: iter(()))
    plan = Plan(schedule="nothing")
    with pytest.raises(ProgramError, match="micro-batch 0 is missing"):
        plan.compile(layers=2)
    assert [ins.op for ins in plan.compile(layers=2, check=False).ranks[0]] == [Op.STEP]
